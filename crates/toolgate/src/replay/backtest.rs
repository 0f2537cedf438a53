//! Replays recorded traffic against another configuration.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use super::{Compared, Judged, Open, Ruling, Stage, Theatre, circumstance_of};
use crate::agent::Agent;
use crate::call::error::Effects;
use crate::call::error_code;
use crate::call::outcome::Outcome;
use crate::call::{Call, CallId, SessionKey};
use crate::ledger::row::{Gate, Row};
use crate::pipeline::gates::hooks::all_recall_keys;
use crate::pipeline::gates::run::Ran;
use crate::pipeline::provenance::Otherwise;
use crate::policy::Watch;
use crate::session::repetition::Ended;
use crate::store::{ApprovalState, Settle};
use crate::tool::context::Txn;
use crate::tool::{Effect, Failure};
use toolgate_json::Digest;

/// A decision that changes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// The sequence number of the row in the ledger.
    pub seq: u64,
    /// The call.
    pub call: CallId,
    /// When the call arrived.
    pub at: Timestamp,
    /// The session of the call.
    #[serde(flatten)]
    pub key: SessionKey,
    /// The tool.
    pub tool: Arc<str>,
    /// The recorded decision.
    pub was: Ruling,
    /// The decision under the other configuration.
    pub now: Compared,
    /// Whether an earlier call of the session would change, so this call might not have been made
    /// at all.
    pub counterfactual: bool,
}

/// Position of a row in the ledger, and of its call in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The sequence number of the row.
    pub seq: u64,
    /// The last sequence number in the ledger when the call arrived.
    pub after: Option<u64>,
    /// The id of the call. Ids sort by time.
    pub call: CallId,
}

/// Replays recorded calls against another configuration, in their original order and with their
/// original times.
///
/// Tools never run: each call gets its recorded result again.
///
/// Each call is replayed under the recorded configuration and under the other one. If the first
/// replay differs from the record, the decision depended on unrecorded data, and the call is
/// undecidable.
pub struct Backtest {
    recorded: Play,
    candidate: Play,
    load_agents: Box<Agents>,
    /// Configurations that cannot be replayed, and the reason.
    unknown_configs: HashMap<Digest, String>,
    counterfactual: HashSet<SessionKey>,
    /// Principals and tools with a call that would change, or may change. A call that recalls one
    /// of them is undecidable.
    changed_calls: HashMap<(SessionKey, Arc<str>), &'static str>,
}

/// Returns the recorded agent and the agent under test for a configuration.
type Agents = dyn FnMut(Digest) -> Result<(Agent, Agent), String>;

/// The replay under one of the two configurations.
struct Play {
    store: Arc<Stage>,
    by_config: HashMap<Digest, Theatre>,
    /// Admitted calls that have not ended.
    open_calls: HashMap<CallId, (Open, Digest)>,
}

/// Start or end of a recorded call. The sorted moments are the order of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    Ends(u64),
    Begins(CallId, u64),
}

impl Backtest {
    /// Starts a backtest. For the digest of a configuration, `agents` returns the recorded agent
    /// and the agent under test, or an error.
    pub fn new(agents: impl FnMut(Digest) -> Result<(Agent, Agent), String> + 'static) -> Self {
        let play = || Play { store: Arc::new(Stage::with_memory()), by_config: HashMap::new(), open_calls: HashMap::new() };
        Self {
            recorded: play(),
            candidate: play(),
            load_agents: Box::new(agents),
            unknown_configs: HashMap::new(),
            counterfactual: HashSet::new(),
            changed_calls: HashMap::new(),
        }
    }

    /// Replays rows. `fetch` returns the row at a position. `judge` receives each decision from
    /// position `from` on; earlier rows only build up state.
    ///
    /// # Errors
    /// The error of `fetch` or `judge`.
    pub async fn replay_rows<E>(
        &mut self,
        rows: &[Place],
        from: u64,
        mut fetch: impl FnMut(u64) -> Result<Row, E>,
        mut judge: impl FnMut(&Row, Change) -> Result<(), E>,
    ) -> Result<(), E> {
        // A call sees only what had ended when it started.
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
                    if !row.is_call() {
                        continue;
                    }
                    let change = self.start_call(seq, &row).await;
                    if seq >= from {
                        judge(&row, change)?;
                    }
                }
                Moment::Ends(seq) => {
                    let row = fetch(seq)?;
                    for play in [&mut self.recorded, &mut self.candidate] {
                        play.end_call(&row).await;
                    }
                }
            }
        }
        Ok(())
    }

    async fn start_call(&mut self, seq: u64, row: &Row) -> Change {
        let was = Ruling::of_row(row);
        let counterfactual = self.counterfactual.contains(&row.key);
        // A rejection by the entry point does not depend on the configuration.
        let now = if row.facts.turned_away.is_some() {
            Compared::Same
        } else {
            match self.load_config(row.config) {
                Err(why) => Compared::Undecidable(why),
                Ok(()) => self.compare_decisions(row, &was).await,
            }
        };
        let runs = |ruling: &Ruling| *ruling == Ruling::Admitted;
        match &now {
            // A rejection by another rule is still a rejection.
            Compared::Differs(ruling) if runs(ruling) != runs(&was) => {
                self.counterfactual.insert(row.key.clone());
                let why = "the decision about an earlier call that it may repeat would change";
                self.changed_calls.insert((without_session(&row.key), Arc::clone(&row.tool)), why);
            }
            // The call keeps its recorded decision, but its effects are missing from here on.
            Compared::Undecidable(_) if runs(&was) => {
                self.counterfactual.insert(row.key.clone());
                let why = "the decision about an earlier call that it may repeat is unknown";
                self.changed_calls.entry((without_session(&row.key), Arc::clone(&row.tool))).or_insert(why);
            }
            _ => {}
        }
        Change { seq, call: row.call, at: row.at, key: row.key.clone(), tool: Arc::clone(&row.tool), was, now, counterfactual }
    }

    fn load_config(&mut self, config: Digest) -> Result<(), String> {
        if let Some(why) = self.unknown_configs.get(&config) {
            return Err(why.clone());
        }
        if self.candidate.by_config.contains_key(&config) {
            return Ok(());
        }
        let mut add = || {
            let (then, now) = (self.load_agents)(config)?;
            self.recorded.add_config(config, then)?;
            self.candidate.add_config(config, now)
        };
        add().inspect_err(|why| {
            self.unknown_configs.insert(config, why.clone());
        })
    }

    async fn compare_decisions(&mut self, row: &Row, was: &Ruling) -> Compared {
        let then = self.recorded.start_call(row, was).await;
        let now = self.candidate.start_call(row, was).await;
        if let Some(why) = backtest_circumstance_of(was, row) {
            return Compared::Circumstance(why);
        }
        if row.facts.recalled.is_some()
            && let Some(why) = self.changed_calls.get(&(without_session(&row.key), Arc::clone(&row.tool)))
        {
            return Compared::Undecidable((*why).to_owned());
        }
        match (then, now) {
            (Err(why), _) | (_, Err(why)) => Compared::Undecidable(why),
            (Ok(then), _) if !was.is_equivalent(&then) => Compared::Undecidable(format!(
                "the replay with the recorded configuration gives `{then}`, so the decision depended on data that is not recorded"
            )),
            (_, Ok(now)) if was.is_equivalent(&now) => Compared::Same,
            (_, Ok(now)) => Compared::Differs(now),
        }
    }
}

/// Explains that a rejection depended on circumstances, if it did.
///
/// For a call that a person denied, the rules first decide whether a person is asked at all.
fn backtest_circumstance_of(was: &Ruling, row: &Row) -> Option<String> {
    let asked = matches!(was, Ruling::Refused { gate: Gate::Approval, .. }) && row.digest.is_some();
    let denied = row.facts.approval.as_ref().is_some_and(|approval| approval.state == ApprovalState::Denied);
    circumstance_of(was, row).filter(|_| !(asked && denied))
}

/// Returns the key without its session: idempotency keys are shared by all sessions of a principal.
fn without_session(key: &SessionKey) -> SessionKey {
    SessionKey { session: "".into(), ..key.clone() }
}

impl Play {
    fn add_config(&mut self, config: Digest, agent: Agent) -> Result<(), String> {
        let theatre = Theatre::new(std::iter::once(Arc::new(agent)), Arc::clone(&self.store)).map_err(|e| e.to_string())?;
        self.by_config.insert(config, theatre);
        Ok(())
    }

    async fn start_call(&mut self, row: &Row, was: &Ruling) -> Result<Ruling, String> {
        let Some(theatre) = self.by_config.get(&row.config) else { return Err("the configuration is unknown".to_owned()) };
        // A call with effects locks its session, so an open one belongs to the same batch.
        let before = self.open_calls.values().map(|(open, _)| open).filter(|(passed, trail)| {
            let spec = &passed.authorization.tool().spec;
            trail.key == row.key && !trail.is_run_by_client && !spec.external && spec.effect != Effect::Read
        });
        let taken = before.flat_map(|(passed, trail)| passed.authorization.tool().takes_away(&trail.arguments, None)).collect();
        let (ruling, open) = match theatre.replay_gates(row, taken).await {
            Judged::Decided(ruling, open) => (Ok(ruling), open),
            Judged::Unknown(why, open) => (Err(why), open),
        };
        let Some((passed, trail)) = open else {
            // A rejected call still counts as progress or repetition for the next one.
            if let (Ok(Ruling::Refused { .. }), Some(asked)) = (&ruling, self.store.counted_digest()) {
                self.store.record_call_end(row, &Ended { digest: asked, ..call_end_of(row) });
            }
            return ruling;
        };
        let moment = backtest_circumstance_of(was, row).is_some();
        if ruling.is_err() || moment {
            // A call that did not run leaves nothing behind. A call that ran and is undecidable is
            // settled with its recorded effects.
            let effects = if *was == Ruling::Admitted && !moment { row.effects } else { Effects::None };
            let failure = Failure::business("not_played", "the call is not replayed").effects(effects);
            let _ = theatre.toolgate.settle_call(passed, Ran::ended(Err(failure), Txn::default()), trail).await;
            return ruling;
        }
        // A call that did not run is assumed to succeed, and a `once` tool would recall it.
        if *was != Ruling::Admitted
            && let Some(permit) = passed.authorization.run_permit()
        {
            let call = Call::new(row.key.clone(), row.tool.to_string(), Value::Null);
            self.store.remember_keys(all_recall_keys(&call, permit.tool(), trail.requested_digest, permit));
        }
        self.open_calls.insert(row.call, ((passed, trail), row.config));
        ruling
    }

    /// Ends an admitted call with its recorded result.
    ///
    /// A call that did not run is assumed to succeed without evidence. A later settlement is
    /// applied at its recorded time.
    async fn end_call(&mut self, row: &Row) {
        if let Some(settled) = &row.settles {
            self.store.settle_call(settled.call, Settle::by(row.effects), row).await;
            return;
        }
        let Some(((mut passed, mut trail), config)) = self.open_calls.remove(&row.call) else { return };
        let Some(theatre) = self.by_config.get(&config) else { return };
        let ran = Ruling::of_row(row) == Ruling::Admitted;
        passed.is_reported = row.facts.reported;
        let otherwise = row.outcome.error().is_some_and(|error| error.code == error_code::NOT_AS_ADMITTED);
        passed.mismatched_run = otherwise.then(|| Otherwise { arguments: row.facts.ran.clone(), result: Value::Null });
        let mut txn = Txn { cost: row.spent, ..Txn::default() };
        let mut empty = false;
        let result = match &row.outcome {
            // Only the beginning of a large result is recorded, so it is not used as the result.
            Outcome::Success(output) if ran => {
                txn.message.clone_from(&output.message);
                txn.is_value_hidden = output.hidden;
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
            _ => Err(Failure::business("not_run_then", "the recorded call did not run").effects(Effects::Done)),
        };
        trail.facts.watch = Watch::default();
        theatre.clock.set(row.ended_at());
        let _ = theatre.toolgate.settle_call(passed, Ran { is_empty: empty, ..Ran::ended(result, txn) }, trail).await;
    }
}

/// Returns the end of a call for the repetition check of the next one.
fn call_end_of(row: &Row) -> Ended {
    let retry_from = row.outcome.error().filter(|error| error.retryable).map(|error| {
        let wait = jiff::SignedDuration::from_millis(i64::try_from(error.retry_after_ms.unwrap_or(0)).unwrap_or(i64::MAX));
        row.ended_at().checked_add(wait).unwrap_or(Timestamp::MAX)
    });
    Ended { digest: Digest::default(), retry_from, result: None }
}
