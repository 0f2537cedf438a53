//! Replays recorded calls through the same gates, in the same order, without running tools or
//! hooks.

mod backtest;
mod explain_recorded;
mod recorded_limits;
mod recorded_store;
mod replay_agent;

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use crate::agent::Agent;
use crate::call::error_code;
use crate::call::{Arguments, Call};
use crate::ledger::row::{Decision, Gate, Row};
use crate::pipeline::admission::{Admission, AdmittedCall};
use crate::pipeline::call_state::CallState;
use crate::pipeline::{Toolgate, ToolgateBuilder};
use crate::policy::{DedupKeyKind, MissingFactTracker};
use crate::redact::{has_mark, has_mark_inside};
use crate::replay::recorded_store::RecordedStore;
use crate::session::state::Revocation;

pub use backtest::{Backtest, DecisionChange, RowPosition as BacktestPlace};

/// Decision about a call before the tool runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionDecision {
    /// The call was admitted.
    Admitted,
    /// The call got the outcome of an earlier call.
    Replayed,
    /// The call was rejected.
    Refused {
        /// The gate that rejected the call.
        gate: Gate,
        /// The rule or hook that rejected the call, if any.
        rule: Option<String>,
        /// The error code.
        code: String,
        /// The message that the model received.
        message: String,
    },
}

impl AdmissionDecision {
    /// Returns the decision about a recorded call.
    #[must_use]
    pub fn from_row(row: &Row) -> Self {
        match (row.decision, row.outcome.error()) {
            (Decision::Replayed, _) => Self::Replayed,
            // A call that was rejected after the claim was admitted before. A report without
            // admission was not.
            (Decision::Refused, Some(error)) if row.gate < Gate::Run || !row.is_call() => {
                Self::Refused {
                    gate: row.gate,
                    rule: row.rule.clone(),
                    code: error.code.to_string(),
                    message: error.message.clone(),
                }
            }
            _ => Self::Admitted,
        }
    }

    /// Compares gate, rule and code, but not messages.
    #[must_use]
    pub fn is_equivalent(&self, other: &Self) -> bool {
        match (self, other) {
            // The answer of a person (none, denied or late) is not a decision of the configuration.
            (
                Self::Refused { gate: Gate::Approval, .. },
                Self::Refused { gate: Gate::Approval, .. },
            ) => true,
            (
                Self::Refused { gate, rule, code, .. },
                Self::Refused { gate: g, rule: r, code: c, .. },
            ) => (gate, rule, code) == (g, r, c),
            (a, b) => a == b,
        }
    }
}

impl fmt::Display for AdmissionDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Admitted => f.write_str("admitted"),
            Self::Replayed => f.write_str("answered from the record"),
            Self::Refused { gate, rule: Some(rule), code, .. } => {
                write!(f, "refused at {gate} by `{rule}` ({code})")
            }
            Self::Refused { gate, code, .. } => write!(f, "refused at {gate} ({code})"),
        }
    }
}

/// Result of comparing a replayed decision with the recorded one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplayComparison {
    /// The decision is the same.
    Same,
    /// The decision is different.
    Differs(AdmissionDecision),
    /// The decision depends on data that is not recorded.
    Undecidable(String),
    /// The decision depended on circumstances that are not recorded, so it is accepted as it is.
    Circumstance(String),
}

/// Repeats the decisions about recorded calls, each with the facts of the original decision.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use toolgate::policy::{Condition, Deny};
/// use toolgate::{Agent, ReplayComparison, Effect, Replay, Tool, Toolgate};
///
/// let agent = |cap: i64| {
///     let schema = serde_json::json!({
///         "type": "object",
///         "properties": {"amount": {"type": "number"}},
///     });
///     let pay = Tool::dynamic("pay", "Pays.", schema, |_, _| async {
///         Ok(serde_json::json!({"paid": true}))
///     });
///     let pay = pay.effect(Effect::Write);
///     let cap = Deny::new("cap", ["pay"]).when("/amount", Condition::Above(cap.into()));
///     Agent::builder("desk").tool(pay).policy(cap).build()
/// };
/// let session = Toolgate::builder().agent(agent(500)?).build()?.session("desk", "alice", "s");
/// session.call("pay", serde_json::json!({"amount": 300})).await;
/// let row = session.rows().await?.remove(0);
///
/// assert_eq!(Replay::new([agent(500)?])?.decide(&row).await, ReplayComparison::Same);
/// assert!(matches!(Replay::new([agent(200)?])?.decide(&row).await, ReplayComparison::Differs(_)));
/// # Ok(()) }
/// ```
pub struct Replay(ReplayRuntime);

impl Replay {
    /// Replays with these agents. Their tools and hooks never run.
    ///
    /// # Errors
    /// The system provides no random numbers.
    pub fn new(agents: impl IntoIterator<Item = Agent>) -> std::io::Result<Self> {
        ReplayRuntime::new(agents.into_iter().map(Arc::new), Arc::new(RecordedStore::from_facts()))
            .map(Self)
    }

    /// Replays with the agents of a runtime.
    ///
    /// # Errors
    /// The system provides no random numbers.
    pub fn from_toolgate(gate: &Toolgate) -> std::io::Result<Self> {
        ReplayRuntime::new(gate.0.agents.values().cloned(), Arc::new(RecordedStore::from_facts()))
            .map(Self)
    }

    /// Repeats the decision about a recorded call.
    pub async fn decide(&self, row: &Row) -> ReplayComparison {
        if !row.is_call() {
            return ReplayComparison::Circumstance(
                "the row is not a call: it settles an earlier call".to_owned(),
            );
        }
        let was = AdmissionDecision::from_row(row);
        if let Some(why) = circumstance_of(&was, row) {
            return ReplayComparison::Circumstance(why);
        }
        let _lock = self.0.call_lock.lock().await;
        match self.0.replay_gates(row, Vec::new()).await {
            ReplayResult::Unknown(why, _) => ReplayComparison::Undecidable(why),
            ReplayResult::Decided(now, _) if was.is_equivalent(&now) => ReplayComparison::Same,
            ReplayResult::Decided(now, _) => ReplayComparison::Differs(now),
        }
    }
}

/// Result of replaying the gates for a recorded call.
enum ReplayResult {
    Decided(AdmissionDecision, Option<OpenReplayCall>),
    Unknown(String, Option<OpenReplayCall>),
}

/// An admitted call that has not ended.
type OpenReplayCall = (Box<AdmittedCall>, Box<CallState>);

/// A runtime that only replays.
struct ReplayRuntime {
    toolgate: Toolgate,
    store: Arc<RecordedStore>,
    /// The store answers for one call at a time.
    call_lock: tokio::sync::Mutex<()>,
}

/// Reason for a call that was rejected before its arguments were read.
const UNREAD_ARGUMENTS_REASON: &str =
    "the call was rejected before its arguments were read, so they are not recorded";

/// Codes that depend on circumstances: concurrency, timing, the system or the answer of a person.
const CIRCUMSTANCE_CODES: [&str; 9] = [
    error_code::BUSY,
    error_code::CANCELLED,
    error_code::DEADLINE_EXCEEDED,
    error_code::STORE_UNAVAILABLE,
    error_code::INTERNAL_FAULT,
    error_code::PAYLOAD_TOO_LARGE,
    error_code::IN_PROGRESS,
    error_code::CONFLICT,
    error_code::APPROVAL_DENIED,
];

impl ReplayRuntime {
    fn new(
        agents: impl Iterator<Item = Arc<Agent>>,
        store: Arc<RecordedStore>,
    ) -> std::io::Result<Self> {
        let mut builder: ToolgateBuilder = Toolgate::builder().store(store.clone());
        builder.agents = agents
            .map(|agent| (Arc::clone(&agent.name), Arc::new(agent.for_replay(&store))))
            .collect();
        Ok(Self { toolgate: builder.build()?, store, call_lock: tokio::sync::Mutex::new(()) })
    }

    /// Prepares the replay of a recorded call and sets the clock to its time.
    fn prepare_call(&self, row: &Row) -> (Call, Box<CallState>, MissingFactTracker) {
        self.store.set_time(row.at);
        let watch = MissingFactTracker::enabled();
        self.store.set_current_row(row, &watch);
        let mut call = Call::new(
            row.key.clone(),
            row.tool.to_string(),
            Arguments::Value((*row.arguments).clone()),
        );
        (call.turn, call.transport_rejection, call.is_unparsable) =
            (row.turn, row.facts.turned_away.clone(), row.facts.misread);
        // A recall by key implies a key, and a pause at the claim implies a claim. Any key works,
        // because the row records what was found under it.
        let keyed = row.facts.recalled_by == Some(DedupKeyKind::Key)
            || (row.gate == Gate::Claim && row.facts.paused.is_some());
        call.idempotency_key = keyed.then(|| row.call.to_string());
        let mut call_state = CallState::without_span(&self.toolgate, &call, Some(row.call));
        call_state.facts.watch = watch.clone();
        // The client ran the recorded call too.
        call_state.is_run_by_client =
            row.facts.reported && AdmissionDecision::from_row(row) == AdmissionDecision::Admitted;
        // Use the recorded home directory. Rows without one use the current home directory.
        call_state.facts.home.clone_from(&row.facts.home);
        (call, call_state, watch)
    }

    /// Reports whether a redacted tool name in a row may match a tool here.
    fn may_match_tool(&self, row: &Row) -> bool {
        let agent = self.toolgate.agent(&row.key.agent).filter(|_| has_mark(&row.tool));
        agent.is_some_and(|agent| agent.tools.keys().any(|name| may_match_name(&row.tool, name)))
    }

    /// Runs the gates before the tool for a recorded call. `revoked` is the evidence that earlier
    /// calls of the same batch revoke.
    async fn replay_gates(&self, row: &Row, revoked: Vec<Revocation>) -> ReplayResult {
        let (call, mut call_state, watch) = self.prepare_call(row);
        // Unparsable or unread arguments and their size are not recorded.
        let unread = row.arguments.is_null() && row.digest.is_none();
        if unread && row.gate == Gate::Validate {
            return ReplayResult::Unknown(
                "the arguments could not be parsed, so they are not recorded".to_owned(),
                None,
            );
        }
        // A rule in Rust code does not say which arguments it checks.
        let tool = self.toolgate.agent(&row.key.agent).and_then(|agent| agent.tools.get(&row.tool));
        let opaque = tool.and_then(|tool| {
            tool.governed_by
                .iter()
                .find(|attached| attached.policy.definition() == attached.policy.name())
        });
        if let Some(rule) = opaque.filter(|_| has_mark_inside(&row.arguments)) {
            return ReplayResult::Unknown(
                format!(
                    "an argument is redacted, and the rule `{}` may check it",
                    rule.policy.name()
                ),
                None,
            );
        }
        let planned = self.store.state_without(&row.key, revoked).await;
        let admitted =
            Box::pin(self.toolgate.run_admission_gates(&call, &mut call_state, planned.as_ref()))
                .await;
        if unread {
            watch.record_missing(|| UNREAD_ARGUMENTS_REASON.to_owned());
        }
        let ruling = match admitted {
            Ok(Admission::Admitted(admitted)) => {
                call_state.session_hold = None;
                return match watch.missing_fact() {
                    Some(why) => ReplayResult::Unknown(why, Some((admitted, call_state))),
                    None => ReplayResult::Decided(
                        AdmissionDecision::Admitted,
                        Some((admitted, call_state)),
                    ),
                };
            }
            Ok(Admission::Replay(_)) => AdmissionDecision::Replayed,
            Err(stop) => {
                let gate = stop.gate.unwrap_or_else(|| call_state.gate());
                if gate == Gate::Resolve && self.may_match_tool(row) {
                    return ReplayResult::Unknown(
                        "the tool name is redacted, and may match an existing tool".to_owned(),
                        None,
                    );
                }
                if gate == Gate::Validate && unread {
                    return ReplayResult::Unknown(UNREAD_ARGUMENTS_REASON.to_owned(), None);
                }
                if gate == Gate::Validate && has_mark_inside(&row.arguments) {
                    return ReplayResult::Unknown(
                        "an argument is redacted, and may be the invalid one".to_owned(),
                        None,
                    );
                }
                AdmissionDecision::Refused {
                    gate,
                    rule: call_state.rule.take(),
                    code: stop.error.code.to_string(),
                    message: stop.error.message,
                }
            }
        };
        match watch.missing_fact() {
            // A call that is rejected before the unknown data matters is rejected.
            Some(why) if !matches!(&ruling, AdmissionDecision::Refused { gate, .. } if *gate < Gate::Recall) => {
                ReplayResult::Unknown(why, None)
            }
            _ => ReplayResult::Decided(ruling, None),
        }
    }
}

/// Reports whether a partly redacted name may be this name.
fn may_match_name(marked: &str, name: &str) -> bool {
    let (before, after) = (
        marked.split("[redacted ").next().unwrap_or_default(),
        marked.rsplit(']').next().unwrap_or_default(),
    );
    name.len() > before.len() + after.len() && name.starts_with(before) && name.ends_with(after)
}

/// Explains that a rejection depended on circumstances, if it did.
fn circumstance_of(was: &AdmissionDecision, row: &Row) -> Option<String> {
    let AdmissionDecision::Refused { code, gate, rule, .. } = was else { return None };
    // The session's time limit can be checked from the record.
    let wall = code == error_code::DEADLINE_EXCEEDED
        && *gate == Gate::Limits
        && row.facts.opened.is_some()
        && !row.facts.late;
    // A named approval is checked before the arguments are parsed.
    let named = *gate == Gate::Approval && row.digest.is_none();
    // A rule may use any code for its denials.
    let ruled = rule.is_some() && matches!(gate, Gate::Recall | Gate::Policy | Gate::Claim);
    let moment =
        (CIRCUMSTANCE_CODES.contains(&code.as_str()) && !ruled) || *gate == Gate::Hooks || named;
    (moment && !wall).then(|| {
        if named {
            "the call named an approval, and its result depended on a person".to_owned()
        } else {
            format!("`{code}` depended on circumstances that are not recorded")
        }
    })
}
