//! What if: recorded traffic against another configuration.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use super::super::judge::all_keys;
use super::super::run::Ran;
use super::super::seen::Otherwise;
use super::{Compared, Judged, Open, Ruling, Stage, Theatre, circumstance};
use crate::call::{Call, CallId, SessionKey};
use crate::code;
use crate::context::Txn;
use crate::error::Effects;
use crate::json::Digest;
use crate::ledger::{Gate, Row};
use crate::outcome::Outcome;
use crate::policy::Watch;
use crate::progress::Ended;
use crate::registry::Agent;
use crate::store::{ApprovalState, Settle};
use crate::tool::{Effect, Failure};

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

/// Where a row stands in the ledger, and when its call came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Its number.
    pub seq: u64,
    /// The number that the ledger had come to when the call came to its session.
    pub after: Option<u64>,
    /// The call: names sort by time.
    pub call: CallId,
}

/// Plays recorded calls against another configuration, in the order in which they came, by the clock they came by. What a
/// tool gave then, it gives again; it is never run.
///
/// Each call is played twice: under the configuration it was decided by, and under the other one. Where the first does not
/// come to what is recorded, something that is not recorded had a say, and the call is undecidable.
pub struct Backtest {
    then: Play,
    now: Play,
    agents: Box<Agents>,
    /// Configurations that cannot be played, and why.
    unknown: HashMap<Digest, String>,
    counterfactual: HashSet<SessionKey>,
    /// Whose calls of which tool would have gone otherwise, or may have: what repeats one of them cannot be answered from it.
    otherwise: HashMap<(SessionKey, Arc<str>), &'static str>,
}

/// For a configuration, the agent as it was recorded and as it is to be tried.
type Agents = dyn FnMut(Digest) -> Result<(Agent, Agent), String>;

/// One of the two.
struct Play {
    stage: Arc<Stage>,
    by_config: HashMap<Digest, Theatre>,
    /// Calls that were let through and have not ended yet.
    open: HashMap<CallId, (Open, Digest)>,
}

/// When a recorded call begins or ends. Sorted, they are the order in which things happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    Ends(u64),
    Begins(CallId, u64),
}

impl Backtest {
    /// Plays against other agents: `agents` gives, for the digest of a configuration, the agent as it was recorded and as
    /// it is to be tried, or says why it cannot.
    pub fn new(agents: impl FnMut(Digest) -> Result<(Agent, Agent), String> + 'static) -> Self {
        let play = || Play { stage: Arc::new(Stage::played()), by_config: HashMap::new(), open: HashMap::new() };
        Self {
            then: play(),
            now: play(),
            agents: Box::new(agents),
            unknown: HashMap::new(),
            counterfactual: HashSet::new(),
            otherwise: HashMap::new(),
        }
    }

    /// Plays rows. `fetch` brings the row at a place; `judge` hears of each decision from the place `from` on, and what is
    /// before it only warms up.
    ///
    /// # Errors
    /// What `fetch` or `judge` says.
    pub async fn play<E>(
        &mut self,
        rows: &[Place],
        from: u64,
        mut fetch: impl FnMut(u64) -> Result<Row, E>,
        mut judge: impl FnMut(&Row, Change) -> Result<(), E>,
    ) -> Result<(), E> {
        // A call saw what had ended when it began, and nothing else.
        let mut moments: Vec<(u64, Moment)> = Vec::with_capacity(2 * rows.len());
        for Place { seq, after, call } in rows {
            let before = seq.saturating_sub(1);
            moments.push((after.map_or(before, |after| after.min(before)), Moment::Begins(*call, *seq)));
            moments.push((*seq, Moment::Ends(*seq)));
        }
        moments.sort_unstable();
        for (_, moment) in moments {
            match moment {
                Moment::Begins(_, seq) => {
                    let row = fetch(seq)?;
                    if !row.is_a_call() {
                        continue;
                    }
                    let change = self.begin(seq, &row).await;
                    if seq >= from {
                        judge(&row, change)?;
                    }
                }
                Moment::Ends(seq) => {
                    let row = fetch(seq)?;
                    for play in [&mut self.then, &mut self.now] {
                        play.end(&row).await;
                    }
                }
            }
        }
        Ok(())
    }

    async fn begin(&mut self, seq: u64, row: &Row) -> Change {
        let was = Ruling::of(row);
        let counterfactual = self.counterfactual.contains(&row.key);
        // What its door had against a call is said before any configuration is asked.
        let now = if row.facts.turned_away.is_some() {
            Compared::Same
        } else {
            match self.prepare(row.config) {
                Err(why) => Compared::Undecidable(why),
                Ok(()) => self.judge(row, &was).await,
            }
        };
        let runs = |ruling: &Ruling| *ruling == Ruling::Admitted;
        match &now {
            // Refused by another rule is refused all the same.
            Compared::Differs(ruling) if runs(ruling) != runs(&was) => {
                self.counterfactual.insert(row.key.clone());
                let why = "an earlier call that it may repeat would have been decided otherwise";
                self.otherwise.insert((anybody(&row.key), Arc::clone(&row.tool)), why);
            }
            // It went as it went, and what came of it is missing from here on.
            Compared::Undecidable(_) if runs(&was) => {
                self.counterfactual.insert(row.key.clone());
                let why = "an earlier call that it may repeat cannot be decided";
                self.otherwise.entry((anybody(&row.key), Arc::clone(&row.tool))).or_insert(why);
            }
            _ => {}
        }
        Change { seq, call: row.call, at: row.at, key: row.key.clone(), tool: Arc::clone(&row.tool), was, now, counterfactual }
    }

    fn prepare(&mut self, config: Digest) -> Result<(), String> {
        if let Some(why) = self.unknown.get(&config) {
            return Err(why.clone());
        }
        if self.now.by_config.contains_key(&config) {
            return Ok(());
        }
        let mut add = || {
            let (then, now) = (self.agents)(config)?;
            self.then.add(config, then)?;
            self.now.add(config, now)
        };
        add().inspect_err(|why| {
            self.unknown.insert(config, why.clone());
        })
    }

    async fn judge(&mut self, row: &Row, was: &Ruling) -> Compared {
        let then = self.then.begin(row, was).await;
        let now = self.now.begin(row, was).await;
        if let Some(why) = by_the_moment(was, row) {
            return Compared::Circumstance(why);
        }
        if row.facts.recalled.is_some()
            && let Some(why) = self.otherwise.get(&(anybody(&row.key), Arc::clone(&row.tool)))
        {
            return Compared::Undecidable((*why).to_owned());
        }
        match (then, now) {
            (Err(why), _) | (_, Err(why)) => Compared::Undecidable(why),
            (Ok(then), _) if !was.is_same(&then) => {
                Compared::Undecidable(format!("played as it was, it comes out as {then}: something that is not recorded had a say"))
            }
            (_, Ok(now)) if was.is_same(&now) => Compared::Same,
            (_, Ok(now)) => Compared::Differs(now),
        }
    }
}

/// Where a refusal hung on the moment, that it did. What a person has refused hangs first on whether anybody asks, and that is for the
/// rules to say.
fn by_the_moment(was: &Ruling, row: &Row) -> Option<String> {
    let asked = matches!(was, Ruling::Refused { gate: Gate::Approval, .. }) && row.digest.is_some();
    let denied = row.facts.approval.as_ref().is_some_and(|approval| approval.state == ApprovalState::Denied);
    circumstance(was, row).filter(|_| !(asked && denied))
}

/// Keys are known to all sessions of a principal with an agent.
fn anybody(key: &SessionKey) -> SessionKey {
    SessionKey { session: "".into(), ..key.clone() }
}

impl Play {
    fn add(&mut self, config: Digest, agent: Agent) -> Result<(), String> {
        let theatre = Theatre::new(std::iter::once(Arc::new(agent)), Arc::clone(&self.stage)).map_err(|e| e.to_string())?;
        self.by_config.insert(config, theatre);
        Ok(())
    }

    async fn begin(&mut self, row: &Row, was: &Ruling) -> Result<Ruling, String> {
        let Some(theatre) = self.by_config.get(&row.config) else { return Err("its configuration is not known".to_owned()) };
        // Who changes something has the session to itself: what begins meanwhile is of the same plan.
        let before = self.open.values().map(|(open, _)| open).filter(|(passed, trail)| {
            let spec = &passed.permit.tool().spec;
            trail.key == row.key && !trail.apart && !spec.external && spec.effect != Effect::Read
        });
        let taken = before.flat_map(|(passed, trail)| passed.permit.tool().takes_away(&trail.arguments, None)).collect();
        let (ruling, open) = match theatre.judge(row, taken).await {
            Judged::Decided(ruling, open) => (Ok(ruling), open),
            Judged::Unknown(why, open) => (Err(why), open),
        };
        let Some((passed, trail)) = open else {
            // It was refused: how that ended counts for the next one's progress.
            if let (Ok(Ruling::Refused { .. }), Some(asked)) = (&ruling, self.stage.asked()) {
                self.stage.ended(row, &Ended { digest: asked, ..ended_of(row) });
            }
            return ruling;
        };
        let moment = by_the_moment(was, row).is_some();
        if ruling.is_err() || moment {
            // What did not run then leaves nothing behind; what did, and cannot be decided, is settled by what it left.
            let effects = if *was == Ruling::Admitted && !moment { row.effects } else { Effects::None };
            let failure = Failure::business("not_played", "it is not played").effects(effects);
            let _ = theatre.gate.settle(passed, Ran::ended(Err(failure), Txn::default()), trail).await;
            return ruling;
        }
        // What did not run then is taken to have happened, and a tool that is `once` would know it again.
        if *was != Ruling::Admitted
            && let Some(permit) = passed.permit.to_run()
        {
            let call = Call::new(row.key.clone(), row.tool.to_string(), Value::Null);
            self.stage.remember(all_keys(&call, permit.tool(), trail.asked, permit));
        }
        self.open.insert(row.call, ((passed, trail), row.config));
        ruling
    }

    /// What was let through comes to what it came to then; what did not run then is taken to have happened, and to have
    /// proved nothing. What somebody found out later is found out now.
    async fn end(&mut self, row: &Row) {
        if let Some(settled) = &row.settles {
            self.stage.settle(settled.call, Settle::by(row.effects), row).await;
            return;
        }
        let Some(((mut passed, mut trail), config)) = self.open.remove(&row.call) else { return };
        let Some(theatre) = self.by_config.get(&config) else { return };
        let ran = Ruling::of(row) == Ruling::Admitted;
        passed.reported = row.facts.reported;
        let otherwise = row.outcome.error().is_some_and(|error| error.code == code::NOT_AS_ADMITTED);
        passed.ran = otherwise.then(|| Otherwise { ran: row.facts.ran.clone(), said: Value::Null });
        let mut txn = Txn { spent: row.spent, ..Txn::default() };
        let mut empty = false;
        let result = match &row.outcome {
            // Only the beginning of a large result is kept: it is not taken for the whole.
            Outcome::Success(output) if ran => {
                txn.message.clone_from(&output.message);
                txn.hidden = output.hidden;
                empty = output.empty || output.stored.is_some();
                Ok(output.value.clone())
            }
            Outcome::Error(error) if ran => {
                let failure = Failure::new(error.category, error.code.clone(), error.message.clone()).effects(row.effects);
                Err(match error.retry_after_ms.filter(|_| error.retryable) {
                    Some(ms) => failure.retry_after_ms(ms),
                    None => failure,
                })
            }
            Outcome::Signal(signal) if ran => Err(Failure::signal(signal.clone())),
            _ => Err(Failure::business("not_run_then", "it did not run then").effects(Effects::Done)),
        };
        trail.facts.watch = Watch::default();
        theatre.clock.set(row.ended());
        let _ = theatre.gate.settle(passed, Ran { empty, ..Ran::ended(result, txn) }, trail).await;
    }
}

/// How a call ended, as far as the next one's progress hangs on it.
fn ended_of(row: &Row) -> Ended {
    let retry_from = row.outcome.error().filter(|error| error.retryable).map(|error| {
        let wait = jiff::SignedDuration::from_millis(i64::try_from(error.retry_after_ms.unwrap_or(0)).unwrap_or(i64::MAX));
        row.ended().checked_add(wait).unwrap_or(Timestamp::MAX)
    });
    Ended { digest: Digest::default(), retry_from, result: None }
}
