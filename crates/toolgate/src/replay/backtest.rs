//! Replays recorded traffic against another configuration.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use super::{
    AdmissionDecision, OpenReplayCall, RecordedStore, ReplayComparison, ReplayResult,
    ReplayRuntime, circumstance_of,
};
use crate::agent::Agent;
use crate::call::error::CallEffects;
use crate::call::error_code;
use crate::call::outcome::Outcome;
use crate::call::{Call, CallId, SessionKey};
use crate::ledger::row::{Gate, Row};
use crate::pipeline::gates::claim::all_dedup_keys;
use crate::pipeline::gates::run::RunResult;
use crate::pipeline::provenance::MismatchedRun;
use crate::policy::MissingFactTracker;
use crate::session::repetition::CallEnd;
use crate::store::{ApprovalState, ClaimResolution};
use crate::tool::context::CallTransaction;
use crate::tool::{Effect, Failure};
use toolgate_json::Digest;

/// A decision that changes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DecisionChange {
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
    pub was: AdmissionDecision,
    /// The decision under the other configuration.
    pub now: ReplayComparison,
    /// Whether an earlier call of the session would change, so this call might not have been made
    /// at all.
    pub counterfactual: bool,
}

/// Position of a row in the ledger, and of its call in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowPosition {
    /// The sequence number of the row.
    pub seq: u64,
    /// The last sequence number in the ledger when the call arrived.
    pub seq_at_start: Option<u64>,
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
    recorded: BacktestRun,
    candidate: BacktestRun,
    load_agents: Box<AgentPairLoader>,
    /// Configurations that cannot be replayed, and the reason.
    unknown_configs: HashMap<Digest, String>,
    counterfactual: HashSet<SessionKey>,
    /// Principals and tools with a call that would change, or may change. A call that recalls one
    /// of them is undecidable.
    changed_calls: HashMap<(SessionKey, Arc<str>), &'static str>,
}

/// Returns the recorded agent and the agent under test for a configuration.
type AgentPairLoader = dyn FnMut(Digest) -> Result<(Agent, Agent), String>;

/// The replay under one of the two configurations.
struct BacktestRun {
    store: Arc<RecordedStore>,
    by_config: HashMap<Digest, ReplayRuntime>,
    /// Admitted calls that have not ended.
    open_calls: HashMap<CallId, (OpenReplayCall, Digest)>,
}

/// Start or end of a recorded call. The sorted moments are the order of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CallBoundary {
    End(u64),
    Start(CallId, u64),
}

impl Backtest {
    /// Starts a backtest. For the digest of a configuration, `agents` returns the recorded agent
    /// and the agent under test, or an error.
    pub fn new(agents: impl FnMut(Digest) -> Result<(Agent, Agent), String> + 'static) -> Self {
        let new_run = || BacktestRun {
            store: Arc::new(RecordedStore::with_memory()),
            by_config: HashMap::new(),
            open_calls: HashMap::new(),
        };
        Self {
            recorded: new_run(),
            candidate: new_run(),
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
        rows: &[RowPosition],
        from: u64,
        mut fetch: impl FnMut(u64) -> Result<Row, E>,
        mut judge: impl FnMut(&Row, DecisionChange) -> Result<(), E>,
    ) -> Result<(), E> {
        // A call sees only what had ended when it started.
        let mut moments: Vec<(u64, CallBoundary)> = Vec::with_capacity(2 * rows.len());
        for RowPosition { seq, seq_at_start: after, call } in rows {
            let before = seq.saturating_sub(1);
            moments.push((
                after.map_or(before, |after| after.min(before)),
                CallBoundary::Start(*call, *seq),
            ));
            moments.push((*seq, CallBoundary::End(*seq)));
        }
        moments.sort_unstable();
        for (_, moment) in moments {
            match moment {
                CallBoundary::Start(_, seq) => {
                    let row = fetch(seq)?;
                    if !row.is_call() {
                        continue;
                    }
                    let change = self.start_call(seq, &row).await;
                    if seq >= from {
                        judge(&row, change)?;
                    }
                }
                CallBoundary::End(seq) => {
                    let row = fetch(seq)?;
                    for run in [&mut self.recorded, &mut self.candidate] {
                        run.end_call(&row).await;
                    }
                }
            }
        }
        Ok(())
    }

    async fn start_call(&mut self, seq: u64, row: &Row) -> DecisionChange {
        let was = AdmissionDecision::from_row(row);
        let counterfactual = self.counterfactual.contains(&row.key);
        // A rejection by the entry point does not depend on the configuration.
        let now = if row.facts.turned_away.is_some() {
            ReplayComparison::Same
        } else {
            match self.load_config(row.config) {
                Err(why) => ReplayComparison::Undecidable(why),
                Ok(()) => self.compare_decisions(row, &was).await,
            }
        };
        let runs = |ruling: &AdmissionDecision| *ruling == AdmissionDecision::Admitted;
        match &now {
            // A rejection by another rule is still a rejection.
            ReplayComparison::Differs(ruling) if runs(ruling) != runs(&was) => {
                self.counterfactual.insert(row.key.clone());
                let why = "the decision about an earlier call that it may repeat would change";
                self.changed_calls.insert((without_session(&row.key), Arc::clone(&row.tool)), why);
            }
            // The call keeps its recorded decision, but its effects are missing from here on.
            ReplayComparison::Undecidable(_) if runs(&was) => {
                self.counterfactual.insert(row.key.clone());
                let why = "the decision about an earlier call that it may repeat is unknown";
                self.changed_calls
                    .entry((without_session(&row.key), Arc::clone(&row.tool)))
                    .or_insert(why);
            }
            _ => {}
        }
        DecisionChange {
            seq,
            call: row.call,
            at: row.at,
            key: row.key.clone(),
            tool: Arc::clone(&row.tool),
            was,
            now,
            counterfactual,
        }
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

    async fn compare_decisions(&mut self, row: &Row, was: &AdmissionDecision) -> ReplayComparison {
        let then = self.recorded.start_call(row, was).await;
        let now = self.candidate.start_call(row, was).await;
        if let Some(why) = backtest_circumstance_of(was, row) {
            return ReplayComparison::Circumstance(why);
        }
        if row.facts.recalled.is_some()
            && let Some(why) =
                self.changed_calls.get(&(without_session(&row.key), Arc::clone(&row.tool)))
        {
            return ReplayComparison::Undecidable((*why).to_owned());
        }
        match (then, now) {
            (Err(why), _) | (_, Err(why)) => ReplayComparison::Undecidable(why),
            (Ok(then), _) if !was.is_equivalent(&then) => ReplayComparison::Undecidable(format!(
                "the replay with the recorded configuration gives `{then}`, so the decision depended on data that is not recorded"
            )),
            (_, Ok(now)) if was.is_equivalent(&now) => ReplayComparison::Same,
            (_, Ok(now)) => ReplayComparison::Differs(now),
        }
    }
}

/// Explains that a rejection depended on circumstances, if it did.
///
/// For a call that a person denied, the rules first decide whether a person is asked at all.
fn backtest_circumstance_of(was: &AdmissionDecision, row: &Row) -> Option<String> {
    let is_asked = matches!(was, AdmissionDecision::Refused { gate: Gate::Approval, .. })
        && row.digest.is_some();
    let denied =
        row.facts.approval.as_ref().is_some_and(|approval| approval.state == ApprovalState::Denied);
    circumstance_of(was, row).filter(|_| !(is_asked && denied))
}

/// Returns the key without its session: idempotency keys are shared by all sessions of a principal.
fn without_session(key: &SessionKey) -> SessionKey {
    SessionKey { session: "".into(), ..key.clone() }
}

impl BacktestRun {
    fn add_config(&mut self, config: Digest, agent: Agent) -> Result<(), String> {
        let runtime = ReplayRuntime::new(std::iter::once(Arc::new(agent)), Arc::clone(&self.store))
            .map_err(|e| e.to_string())?;
        self.by_config.insert(config, runtime);
        Ok(())
    }

    async fn start_call(
        &mut self,
        row: &Row,
        was: &AdmissionDecision,
    ) -> Result<AdmissionDecision, String> {
        let Some(runtime) = self.by_config.get(&row.config) else {
            return Err("the configuration is unknown".to_owned());
        };
        // A call with effects locks its session, so an open one belongs to the same batch.
        let before =
            self.open_calls.values().map(|(open, _)| open).filter(|(admitted, call_state)| {
                let spec = &admitted.authorization.tool().spec;
                call_state.key == row.key
                    && !call_state.is_run_by_client
                    && !spec.external
                    && spec.effect != Effect::Read
            });
        let revoked = before
            .flat_map(|(admitted, call_state)| {
                admitted.authorization.tool().revoked_evidence(&call_state.arguments, None)
            })
            .collect();
        let (ruling, open) = match runtime.replay_gates(row, revoked).await {
            ReplayResult::Decided(ruling, open) => (Ok(ruling), open),
            ReplayResult::Unknown(why, open) => (Err(why), open),
        };
        let Some((admitted, call_state)) = open else {
            // A rejected call still counts as progress or repetition for the next one.
            if let (Ok(AdmissionDecision::Refused { .. }), Some(digest)) =
                (&ruling, self.store.counted_digest())
            {
                self.store.record_call_end(row, &CallEnd { digest, ..call_end_of(row) });
            }
            return ruling;
        };
        let is_circumstance = backtest_circumstance_of(was, row).is_some();
        if ruling.is_err() || is_circumstance {
            // A call that did not run leaves nothing behind. A call that ran and is undecidable is
            // settled with its recorded effects.
            let effects = if *was == AdmissionDecision::Admitted && !is_circumstance {
                row.effects
            } else {
                CallEffects::None
            };
            let failure =
                Failure::business("not_played", "the call is not replayed").effects(effects);
            let _ = runtime
                .toolgate
                .run_settlement_gates(
                    admitted,
                    RunResult::ended(Err(failure), CallTransaction::default()),
                    call_state,
                )
                .await;
            return ruling;
        }
        // A call that did not run is assumed to succeed, and a `once` tool would recall it.
        if *was != AdmissionDecision::Admitted
            && let Some(permit) = admitted.authorization.run_permit()
        {
            let call = Call::new(row.key.clone(), row.tool.to_string(), Value::Null);
            self.store.remember_keys(all_dedup_keys(
                &call,
                permit.tool(),
                call_state.requested_digest,
                permit,
            ));
        }
        self.open_calls.insert(row.call, ((admitted, call_state), row.config));
        ruling
    }

    /// Ends an admitted call with its recorded result.
    ///
    /// A call that did not run is assumed to succeed without evidence. A later settlement is
    /// applied at its recorded time.
    async fn end_call(&mut self, row: &Row) {
        if let Some(settled) = &row.settles {
            self.store
                .settle_call(settled.call, ClaimResolution::from_effects(row.effects), row)
                .await;
            return;
        }
        let Some(((mut admitted, mut call_state), config)) = self.open_calls.remove(&row.call)
        else {
            return;
        };
        let Some(runtime) = self.by_config.get(&config) else { return };
        let ran = AdmissionDecision::from_row(row) == AdmissionDecision::Admitted;
        admitted.is_reported = row.facts.reported;
        let is_mismatched =
            row.outcome.error().is_some_and(|error| error.code == error_code::NOT_AS_ADMITTED);
        admitted.mismatched_run = is_mismatched
            .then(|| MismatchedRun { arguments: row.facts.ran.clone(), result: Value::Null });
        let mut txn = CallTransaction { cost: row.spent, ..CallTransaction::default() };
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
                let failure =
                    Failure::new(error.category, error.code.clone(), error.message.clone())
                        .effects(row.effects);
                Err(match error.retry_after_ms.filter(|_| error.retryable) {
                    Some(ms) => failure.retry_after_ms(ms),
                    None => failure,
                })
            }
            Outcome::Signal(signal) if ran => Err(Failure::signal(signal.clone())),
            _ => Err(Failure::business("not_run_then", "the recorded call did not run")
                .effects(CallEffects::Done)),
        };
        call_state.facts.watch = MissingFactTracker::default();
        runtime.store.set_time(row.ended_at());
        let _ = runtime
            .toolgate
            .run_settlement_gates(
                admitted,
                RunResult { is_empty: empty, ..RunResult::ended(result, txn) },
                call_state,
            )
            .await;
    }
}

/// Returns the end of a call for the repetition check of the next one.
fn call_end_of(row: &Row) -> CallEnd {
    let retry_from = row.outcome.error().filter(|error| error.retryable).map(|error| {
        let wait = jiff::SignedDuration::from_millis(
            i64::try_from(error.retry_after_ms.unwrap_or(0)).unwrap_or(i64::MAX),
        );
        row.ended_at().checked_add(wait).unwrap_or(Timestamp::MAX)
    });
    CallEnd { digest: Digest::default(), retry_from, result: None }
}
