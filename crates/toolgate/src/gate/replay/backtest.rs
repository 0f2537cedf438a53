//! What if: recorded traffic against another configuration.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use serde::Serialize;

use super::super::pass::Passed;
use super::super::run::Ran;
use super::super::trail::Trail;
use super::{Compared, Judged, Ruling, Stage, Theatre};
use crate::call::{CallId, SessionKey};
use crate::context::Txn;
use crate::error::Effects;
use crate::ledger::{Decision, Row};
use crate::outcome::Outcome;
use crate::policy::Watch;
use crate::registry::Agent;
use crate::tool::Failure;

/// A decision that would be another one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Where it stands in the ledger.
    pub seq: u64,
    /// The call.
    pub call: CallId,
    /// When it came in.
    pub at: Timestamp,
    /// Whose.
    #[serde(flatten)]
    pub key: SessionKey,
    /// The tool.
    pub tool: Arc<str>,
    /// What was decided.
    pub was: Ruling,
    /// What would be.
    pub now: Compared,
    /// An earlier call of the session would have gone otherwise, so what came after it might not have come at all.
    pub counterfactual: bool,
}

/// Plays recorded calls against another configuration, in the order in which they came, by the clock they came by. What a
/// tool gave then, it gives again; it is never run.
pub struct Backtest {
    theatre: Theatre,
    /// Calls that were let through and have not ended yet.
    open: HashMap<CallId, (Box<Passed>, Box<Trail>)>,
    counterfactual: HashSet<SessionKey>,
}

/// Where a recorded call begins or ends. Sorted, they are the order in which things happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    /// After this row, and which call.
    Ends(u64),
    Begins(u64, u64),
}

impl Backtest {
    /// Plays against these agents.
    ///
    /// # Errors
    /// The machine gives no random numbers.
    pub fn new(agents: impl IntoIterator<Item = Agent>) -> std::io::Result<Self> {
        let theatre = Theatre::new(agents.into_iter().map(Arc::new), Stage::played())?;
        Ok(Self { theatre, open: HashMap::new(), counterfactual: HashSet::new() })
    }

    /// Plays rows. `rows` are their places in the ledger, each with the place that the ledger had come to when the call
    /// came to its session; `fetch` brings a row; `judge` hears of each decision from `from` on, and what is before it only
    /// warms up.
    ///
    /// # Errors
    /// What `fetch` or `judge` says.
    pub async fn play<E>(
        &mut self,
        rows: &[(u64, Option<u64>)],
        from: u64,
        mut fetch: impl FnMut(u64) -> Result<Row, E>,
        mut judge: impl FnMut(&Row, Change) -> Result<(), E>,
    ) -> Result<(), E> {
        // A call saw what had ended when it began, and nothing else.
        let mut moments: Vec<(u64, Moment)> = Vec::with_capacity(2 * rows.len());
        for (seq, after) in rows {
            let begins = after.map_or(seq - 1, |after| after.min(seq - 1));
            moments.push((begins, Moment::Begins(*seq, begins)));
            moments.push((*seq, Moment::Ends(*seq)));
        }
        moments.sort_unstable();
        for (_, moment) in moments {
            match moment {
                Moment::Begins(seq, _) => {
                    let row = fetch(seq)?;
                    if row.decision == Decision::Settled {
                        continue;
                    }
                    let change = self.begin(seq, &row).await;
                    if seq >= from {
                        judge(&row, change)?;
                    }
                }
                Moment::Ends(seq) => {
                    let row = fetch(seq)?;
                    self.end(&row).await;
                }
            }
        }
        Ok(())
    }

    async fn begin(&mut self, seq: u64, row: &Row) -> Change {
        let was = Ruling::of(row);
        let counterfactual = self.counterfactual.contains(&row.key);
        let now = match self.theatre.judge(row).await {
            Judged::Unknown(why) => Compared::Undecidable(why),
            Judged::Decided(ruling, passed) => {
                if let Some(passed) = passed {
                    self.open.insert(row.call, passed);
                }
                Theatre::compare(&was, ruling)
            }
        };
        // What hangs on the moment, or on what nobody knows, went as it went.
        let taken = matches!(now, Compared::Undecidable(_) | Compared::Circumstance(_));
        let effect = self
            .theatre
            .gate
            .agent(&row.key.agent)
            .and_then(|agent| agent.tools.get(&row.tool))
            .is_none_or(|tool| tool.spec.effect != crate::tool::Effect::Read);
        // Refused by another rule is refused all the same.
        let runs = |ruling: &Ruling| *ruling == Ruling::Admitted;
        if matches!(&now, Compared::Differs(ruling) if runs(ruling) != runs(&was)) && effect {
            self.counterfactual.insert(row.key.clone());
        }
        if taken && was == Ruling::Admitted && !self.open.contains_key(&row.call) {
            // Its evidence and its charges are missing from here on.
            self.counterfactual.insert(row.key.clone());
        }
        Change { seq, call: row.call, at: row.at, key: row.key.clone(), tool: Arc::clone(&row.tool), was, now, counterfactual }
    }

    /// What was let through comes to what it came to then; what did not run then is taken to have happened, and to have
    /// proved nothing.
    async fn end(&mut self, row: &Row) {
        let Some((mut passed, mut trail)) = self.open.remove(&row.call) else { return };
        let ran = Ruling::of(row) == Ruling::Admitted;
        passed.reported = row.facts.reported;
        let mut txn = Txn { spent: row.spent, ..Txn::default() };
        let result = match &row.outcome {
            Outcome::Success(output) if ran => {
                txn.message.clone_from(&output.message);
                txn.hidden = output.hidden;
                if output.stored.is_some() {
                    // Only its beginning is known.
                    self.counterfactual.insert(row.key.clone());
                }
                Ok(output.value.clone())
            }
            Outcome::Error(error) if ran => {
                Err(Failure::new(error.category, error.code.clone(), error.message.clone()).effects(row.effects))
            }
            Outcome::Signal(signal) if ran => Err(Failure::signal(signal.clone())),
            _ => Err(Failure::business("not_run_then", "it did not run then").effects(Effects::Done)),
        };
        trail.facts.watch = Watch::default();
        let took = jiff::SignedDuration::from_nanos(i64::try_from(row.latency.total()).unwrap_or(i64::MAX));
        self.theatre.clock.set(row.at.checked_add(took).unwrap_or(row.at));
        let _ = self.theatre.gate.settle(passed, Ran::ended(result, txn), trail).await;
    }
}
