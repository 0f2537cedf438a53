//! Implements deferred calls: admitted here, run by the client, and reported later, perhaps to
//! another process.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::Instrument;

use crate::call::error::{CallEffects, ToolError};
use crate::call::error_code;
use crate::call::outcome::Answer;
use crate::call::{Arguments, Call, CallId, CheckedArguments};
use crate::ledger::row::{Gate, Latency};
use crate::pipeline::Toolgate;
use crate::pipeline::admission::{Admission, AdmittedCall};
use crate::pipeline::call_state::CallState;
use crate::pipeline::early_end::UnknownToolCompletion;
use crate::pipeline::gates::policy::{Authorization, Permit};
use crate::pipeline::gates::run::RunResult;
use crate::pipeline::provenance;
use crate::pipeline::provenance::MismatchedRun;
use crate::pipeline::rejection::Rejection;
use crate::policy::DecisionFacts;
use crate::store::{ClaimRecord, DeferredClaim, StoreError};
use crate::tool::Failure;
use crate::tool::context::{CallTransaction, RemainingBudget};
use toolgate_json;
use toolgate_json::{Digest, Pointer};
use toolgate_text::escape_for_display;

/// An admitted call that its client runs.
///
/// The client reports the result with [`Toolgate::report`], here or in another process. Until
/// then the claim stays open. A call that is never reported becomes pending.
#[derive(Debug)]
#[must_use = "an admitted call must be reported"]
pub struct DeferredCall {
    /// The id of the call in the ledger.
    pub call: CallId,
    /// The arguments to run with. Hooks may have rewritten them.
    pub arguments: CheckedArguments,
    /// Why the client must ask its user first, if it must.
    pub approval_reason: Option<String>,
    /// The tool, and the id that the client gave the call.
    pub(crate) tool: String,
    pub(crate) client_id: String,
}

/// Stores a deferred call in its claim, until the report arrives.
#[derive(Serialize, Deserialize)]
pub(crate) struct DeferredState {
    arguments: Value,
    asked: Option<Digest>,
    started: Timestamp,
    admitted: Timestamp,
    turn: Option<u64>,
    stop_reason: Option<String>,
    config: Digest,
    facts: Box<DecisionFacts>,
    latency: Latency,
    /// The evidence stamp of the session at admission.
    stamp: u64,
    /// The entities of the call.
    #[serde(default)]
    about: Vec<(Arc<str>, Value)>,
}

impl DeferredState {
    /// Serializes what another process needs to settle the call.
    pub(crate) fn capture(
        permit: &Permit,
        now: Timestamp,
        call_state: &mut CallState,
    ) -> Result<Vec<u8>, ToolError> {
        let state = Self {
            arguments: permit.arguments().value().clone(),
            asked: call_state.requested_digest,
            started: call_state.started,
            admitted: now,
            turn: call_state.turn,
            stop_reason: call_state.stop_reason.clone(),
            config: call_state.config,
            facts: call_state.facts.clone(),
            latency: call_state.latency(),
            stamp: call_state.evidence_stamp,
            about: crate::pipeline::row_builder::extract_entities(
                permit.tool(),
                &call_state.arguments,
                None,
            ),
        };
        serde_json::to_vec(&state).map_err(|_| {
            ToolError::from_code(error_code::INTERNAL_FAULT, "cannot store the deferred call")
        })
    }

    /// Restores the state of the call as it was at admission. Returns the admitted arguments.
    fn restore_into(
        self,
        deferred: &DeferredClaim,
        now: Timestamp,
        call_state: &mut CallState,
    ) -> Value {
        call_state.id = deferred.claim.call;
        call_state.tool = Arc::clone(&deferred.claim.tool);
        call_state.started = self.started;
        call_state.turn = self.turn;
        call_state.stop_reason = self.stop_reason;
        call_state.config = self.config;
        call_state.requested_digest = self.asked;
        call_state.evidence_stamp = self.stamp;
        call_state.entities = self.about;
        call_state.facts = self.facts;
        call_state.facts.claimed.clone_from(&deferred.counters_before);
        let away = now.duration_since(self.admitted).as_nanos();
        call_state.resume_deferred(self.latency, u64::try_from(away).unwrap_or_default());
        self.arguments
    }
}

impl Toolgate {
    /// Admits a call for a client that runs the tool itself and reports the result later.
    ///
    /// The claim is stored under the id that the client gives the call, so concurrent calls of one
    /// tool need different ids. The gates run on a separate
    /// task: if the caller goes away, the call is still admitted or rejected.
    ///
    /// # Errors
    /// The final answer, if the call was rejected or replayed. It is recorded already.
    pub async fn admit(&self, call: Call) -> Result<DeferredCall, Answer> {
        let mut call_state = CallState::start(self, &call, None);
        call_state.deferred_id = Some(call.client_id.clone().unwrap_or_default());
        call_state.is_run_by_client = true;
        call_state.facts.reported = true;
        let call = Arc::new(call);
        let (id, span) = (call_state.id, call_state.span.clone());
        let (gate, shared_call) = (self.clone(), Arc::clone(&call));
        let task = tokio::spawn(
            async move {
                match gate.run_admission_gates(&shared_call, &mut call_state, None).await {
                    Ok(Admission::Admitted(admitted)) => Ok(DeferredCall {
                        call: call_state.id,
                        arguments: admitted.authorization.arguments().clone(),
                        approval_reason: call_state.approval_reason.take(),
                        tool: shared_call.tool.clone(),
                        client_id: shared_call.client_id.clone().unwrap_or_default(),
                    }),
                    Ok(Admission::Replay(outcome)) => {
                        Err(gate.end_replayed(outcome, call_state).await)
                    }
                    Err(stop) => Err(gate.end_rejected(stop, call_state).await),
                }
            }
            .instrument(span),
        );
        match task.await {
            Ok(result) => result,
            Err(_) => Err(self.record_internal_error(&call, id).await),
        }
    }

    /// Reports what the client ran, and its result.
    ///
    /// A report settles a call as a success only once, and only with exactly the admitted
    /// arguments. Every other report is recorded as a violation and yields no evidence.
    pub async fn report(&self, call: Call, result: Result<Value, Failure>) -> Answer {
        let call = Arc::new(call);
        let call_state = CallState::start(self, &call, None);
        let (id, span) = (call_state.id, call_state.span.clone());
        let (gate, shared_call) = (self.clone(), Arc::clone(&call));
        match tokio::spawn(
            async move { gate.settle_deferred(&shared_call, result, call_state).await }
                .instrument(span),
        )
        .await
        {
            Ok(answer) => answer,
            Err(_) => self.record_internal_error(&call, id).await,
        }
    }

    /// Closes a client's session. Calls that were admitted and not reported become pending.
    ///
    /// # Errors
    /// The store cannot record the change.
    pub async fn close_client_session(&self, key: &crate::SessionKey) -> Result<(), StoreError> {
        self.0.store.close_client_session(key).await
    }

    async fn settle_deferred(
        &self,
        call: &Call,
        result: Result<Value, Failure>,
        mut call_state: Box<CallState>,
    ) -> Answer {
        call_state.enter_gate(Gate::Settle);
        call_state.facts.reported = true;
        let reported = self.parse_reported_arguments(call, &mut call_state);
        let ran = Arc::clone(&call_state.arguments);
        let agent = self.0.agents.get(&call.key.agent).map(Arc::clone);
        if let Some(agent) = &agent {
            call_state.config = agent.definition_digest;
        }
        let name = call.client_id.as_deref().unwrap_or_default();
        let deferred = match self.0.store.take_deferred_claim(&call.key, name, &call.tool).await {
            Ok(deferred) => deferred,
            Err(error) => {
                let mismatch = MismatchedRun::new(reported.as_ref(), &result);
                return self
                    .reject_unadmitted(
                        unrecorded_report_rejection(&error),
                        call,
                        &mismatch,
                        call_state,
                    )
                    .await;
            }
        };
        let mismatch = || MismatchedRun::new(reported.as_ref(), &result);
        let Some(deferred) = deferred else {
            return self
                .reject_unadmitted(
                    never_admitted_rejection(&call.tool),
                    call,
                    &mismatch(),
                    call_state,
                )
                .await;
        };
        let Ok(state) = serde_json::from_slice::<DeferredState>(&deferred.state) else {
            let error = ToolError::from_code(
                error_code::INTERNAL_FAULT,
                "cannot read the stored state of the deferred call",
            )
            .with_effects(CallEffects::Unknown);
            return self
                .reject_unadmitted(Rejection::new(error), call, &mismatch(), call_state)
                .await;
        };
        let arguments = state.restore_into(&deferred, self.now(), &mut call_state);
        let arguments = CheckedArguments::new(&deferred.claim.tool, arguments)
            .with_digest(|digest| self.0.redactor.key_digest(digest));
        call_state.digest = Some(arguments.digest());
        let as_admitted =
            reported.as_ref().is_some_and(|reported| reported.digest() == arguments.digest());
        if !as_admitted {
            call_state.facts.ran = reported.as_ref().map(|_| (*ran).clone());
        }
        let Some((agent, tool)) =
            agent.as_ref().and_then(|agent| Some((agent, agent.tools.get(&deferred.claim.tool)?)))
        else {
            // Only the tool declares which arguments are secret, and the tool is gone. Mask all of
            // them.
            let known = deferred.claim.row.as_ref().map(|row| Arc::clone(&row.arguments));
            call_state.arguments =
                known.unwrap_or_else(|| Arc::new(self.0.redactor.mark(arguments.value())));
            // Without the agent, the reported arguments cannot be parsed and compared.
            let is_other = !as_admitted && agent.is_some();
            let update = agent
                .as_ref()
                .and_then(|agent| provenance::unknown_tool_provenance(agent, &mismatch()));
            let end = UnknownToolCompletion {
                error: missing_tool_error(&deferred.claim, is_other, &result),
                has_run: result.is_ok(),
                has_other_arguments: !as_admitted,
                provenance: update,
            };
            return self.end_without_tool(end, &deferred.claim, call_state).await;
        };
        call_state.arguments =
            self.0.redactor.redact_shared(arguments.shared_value(), &tool.secrets);
        let admitted = AdmittedCall {
            agent: Arc::clone(agent),
            authorization: Authorization::Settle { arguments, tool: Arc::clone(tool) },
            version: 0,
            state: None,
            remaining: RemainingBudget::default(),
            is_recallable: !deferred.claim.recall.is_empty(),
            key: call.key.clone(),
            is_reported: true,
            mismatched_run: (!as_admitted).then(mismatch),
        };
        let result = if as_admitted { result } else { Err(other_arguments_failure()) };
        self.run_settlement_gates(
            Box::new(admitted),
            RunResult::ended(result, CallTransaction::default()),
            call_state,
        )
        .await
    }

    /// Records a reported call that was never admitted.
    ///
    /// The report yields no evidence, but the call may have written values and changed the entities
    /// it names.
    async fn reject_unadmitted(
        &self,
        stop: Rejection,
        call: &Call,
        mismatch: &MismatchedRun,
        call_state: Box<CallState>,
    ) -> Answer {
        let agent = self.0.agents.get(&call.key.agent);
        let (update, revoked) =
            match agent.and_then(|agent| Some((agent, agent.tools.get(call.tool.as_str())?))) {
                Some((agent, tool)) => {
                    let may_act = agent
                        .principals
                        .as_ref()
                        .is_none_or(|allowed| allowed.contains(&*call.key.principal));
                    let could_be_admitted =
                        may_act && self.is_reachable(&call.tool, agent, &call.key).await;
                    (
                        provenance::unadmitted_provenance(agent, tool, mismatch, could_be_admitted),
                        tool.revoked_evidence(&call_state.arguments, None),
                    )
                }
                None => (None, Vec::new()),
            };
        self.end_rejected_with(stop, update, revoked, call_state).await
    }

    /// Parses the arguments that the client reports.
    fn parse_reported_arguments(
        &self,
        call: &Call,
        call_state: &mut CallState,
    ) -> Option<CheckedArguments> {
        let agent = self.0.agents.get(&call.key.agent)?;
        let mut value = match &call.arguments {
            Arguments::Text(text) => toolgate_json::parse(text, &agent.bounds).ok()?,
            Arguments::Value(value)
                if toolgate_json::find_exceeded_bound_of_value(value, &agent.bounds).is_none() =>
            {
                value.clone()
            }
            Arguments::Value(_) => return None,
        };
        toolgate_json::canonicalize_numbers(&mut value, &mut Pointer::default()).ok()?;
        let reported = CheckedArguments::new(&call.tool, value)
            .with_digest(|digest| self.0.redactor.key_digest(digest));
        call_state.digest = Some(reported.digest());
        // Undeclared arguments may contain anything, and a misspelled name may carry a secret.
        let known = agent
            .tools
            .get(call.tool.as_str())
            .filter(|tool| tool.secrets.is_empty() || tool.accepts_arguments(reported.value()));
        call_state.arguments = match known {
            Some(tool) => self.0.redactor.redact_shared(reported.shared_value(), &tool.secrets),
            None => Arc::new(self.0.redactor.mark(reported.value())),
        };
        Some(reported)
    }
}

/// Rejects a report of a call that was never admitted, or was reported before.
fn never_admitted_rejection(tool: &str) -> Rejection {
    let message = format!(
        "the reported run of `{}` was never admitted, or was reported before; it yields no evidence",
        escape_for_display(tool)
    );
    Rejection::at_gate(
        Gate::Settle,
        ToolError::from_code(error_code::NOT_ADMITTED, message).with_effects(CallEffects::Unknown),
    )
}

/// Rejects a report because the store is unavailable.
///
/// The tool has run, so the caller must not repeat it. The claim stays open.
fn unrecorded_report_rejection(error: &StoreError) -> Rejection {
    tracing::error!(%error, "store unavailable; cannot record the report of a deferred call");
    let message = "the store is unavailable, so the result of the call is not recorded; do not repeat the call";
    Rejection::at_gate(
        Gate::Settle,
        ToolError::from_code(error_code::STORE_UNAVAILABLE, message)
            .with_effects(CallEffects::Unknown),
    )
}

const OTHER_ARGUMENTS_MESSAGE: &str =
    "the client ran other arguments than those that were admitted; the run yields no evidence";

fn other_arguments_failure() -> Failure {
    Failure::from_code(error_code::NOT_AS_ADMITTED, OTHER_ARGUMENTS_MESSAGE)
        .effects(CallEffects::Done)
}

/// Builds the error for a reported call whose tool no longer exists.
///
/// The run is recorded, with the effects that the client reports.
fn missing_tool_error(
    claim: &ClaimRecord,
    is_other: bool,
    result: &Result<Value, Failure>,
) -> ToolError {
    if is_other {
        return ToolError::from_code(error_code::NOT_AS_ADMITTED, OTHER_ARGUMENTS_MESSAGE)
            .with_effects(CallEffects::Done);
    }
    let effects = match result {
        _ if !claim.effect => CallEffects::None,
        Ok(_) => CallEffects::Done,
        Err(failure) => failure.declared_effects().unwrap_or(CallEffects::Unknown),
    };
    let message = format!(
        "the tool `{}` was removed after this call was admitted; the run is recorded, but its result is not checked and yields no evidence",
        claim.tool
    );
    ToolError::from_code(error_code::UNKNOWN_TOOL, message).with_effects(effects)
}
