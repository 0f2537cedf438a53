//! Gate 13: decides how the call ends, and rolls back a failure.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::call::CallId;
use crate::call::error::{CallEffects, ToolError};
use crate::call::outcome::Outcome;
use crate::ledger::row::{Decision, Gate, Row};
use crate::pipeline::Toolgate;
use crate::pipeline::admission::AdmittedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::run::{ResolvedFailure, resolve_effects, roll_back_files};
use crate::pipeline::gates::shape::{RunOutcome, ShapedResult, ShapedRun};
use crate::pipeline::mask_secrets::SecretValues;
use crate::pipeline::provenance;
use crate::policy::{DecisionFacts, PolicyInput};
use crate::session::state::{Revocation, SessionChanges};
use crate::store::ClaimResolution;
use crate::tool::context::CallTransaction;
use crate::tool::{Effect, Failure};
use toolgate_text::escape_for_display;

/// Describes how a call ends.
pub(crate) struct Completion {
    pub(crate) outcome: Outcome,
    pub(crate) gate: Gate,
    pub(crate) decision: Decision,
    pub(crate) effects: CallEffects,
    pub(crate) resolution: ClaimResolution,
    pub(crate) changes: Option<SessionChanges>,
    pub(crate) outputs: Vec<(String, Arc<str>)>,
    /// The untruncated result, if provenance rules need it.
    pub(crate) untruncated: Option<serde_json::Value>,
    /// Digest of the result of a polling call.
    pub(crate) result: Option<toolgate_json::Digest>,
}

impl Completion {
    /// Describes a success, whose changes are committed.
    fn succeeded(shaped: ShapedResult, admitted: &AdmittedCall) -> Self {
        let is_read = admitted.authorization.tool().spec.effect == Effect::Read;
        Self {
            outcome: Outcome::Success(shaped.output),
            gate: Gate::Run,
            decision: Decision::Succeeded,
            effects: if is_read { CallEffects::None } else { CallEffects::Done },
            resolution: ClaimResolution::Done,
            changes: Some(shaped.changes),
            outputs: shaped.stored.into_iter().collect(),
            untruncated: shaped.untruncated,
            result: shaped.digest,
        }
    }

    pub(crate) fn failed(error: ToolError, gate: Gate) -> Self {
        let effects = error.effects;
        // A poll that keeps failing in the same way makes no progress either.
        let result = (!error.retryable).then(|| toolgate_json::Digest::of(error.code.as_bytes()));
        Self {
            outcome: error.into(),
            gate,
            decision: Decision::Failed,
            effects,
            resolution: ClaimResolution::from_effects(effects),
            changes: None,
            outputs: Vec::new(),
            untruncated: None,
            result,
        }
    }

    /// Marks the effects as unknown because the rollback failed.
    pub(crate) fn mark_unclean(&mut self) {
        self.effects = CallEffects::Unknown;
        self.resolution = ClaimResolution::Pending;
        if let Outcome::Error(error) = &mut self.outcome {
            **error = (**error).clone().with_effects(CallEffects::Unknown);
            error.retry_after_ms = None;
        }
    }

    /// Rewrites a row that was not stored, for a call that ended differently.
    pub(crate) fn rewrite_row(&self, row: &Row) -> Row {
        let mut outcome = self.outcome.clone();
        if let Outcome::Error(error) = &mut outcome {
            error.call_id = Some(row.call);
        }
        Row {
            outcome,
            gate: self.gate,
            decision: self.decision,
            effects: self.effects,
            ..row.clone()
        }
    }
}

/// Decides how an admitted call ends: its outcome, its effects, and the end of its claim.
///
/// A failure is rolled back here. The commit of a success is part of gate 14.
pub(crate) async fn run(
    gate: &Toolgate,
    shaped: ShapedRun,
    admitted: &AdmittedCall,
    call_state: &mut CallState,
) -> (Completion, CallTransaction) {
    let ShapedRun { result, mut txn, is_unclean, has_started } = shaped;
    let mut completion = match result {
        RunOutcome::Success(shaped) => Completion::succeeded(*shaped, admitted),
        RunOutcome::InvalidResult(error) => {
            Completion::failed(error.with_effects(admitted.effects_of_run()), Gate::Shape)
        }
        RunOutcome::Failure(failure) => settle_failure(gate, failure, admitted).await,
    };
    call_state.enter_gate(Gate::Settle);
    if is_unclean {
        completion.mark_unclean();
    }
    if !has_started {
        completion.decision = Decision::Refused;
    }
    if completion.changes.is_none() {
        roll_back(admitted, &mut completion, &mut txn, call_state.id, &call_state.facts);
    }
    (completion, txn)
}

/// Settles a failure of the tool.
async fn settle_failure(gate: &Toolgate, failure: Failure, admitted: &AdmittedCall) -> Completion {
    let tool = admitted.authorization.tool();
    let secrets = SecretValues::from_arguments(admitted.authorization.arguments().value(), tool);
    match resolve_effects(failure, admitted) {
        ResolvedFailure::Error(mut error) => {
            secrets.mask_error(&mut error);
            // The tool's redirect is unverified. If the caller cannot use the target, the error
            // remains and the redirect is dropped.
            let to = error.redirect_tool.clone();
            let error = gate.strip_unreachable_redirects(*error, &admitted.agent, &admitted.key);
            let error = Box::pin(error).await;
            if let Some(to) = to.filter(|_| error.redirect_tool.is_none()) {
                tracing::warn!(tool = tool.spec.name(), to = %escape_for_display(&to), "a tool redirects to a tool that this caller cannot use");
            }
            Completion::failed(error, Gate::Run)
        }
        // A signal asks for something before the tool acts, so nothing has happened yet.
        ResolvedFailure::Signal(mut signal) => {
            secrets.mask_signal(&mut signal);
            Completion {
                outcome: Outcome::Signal(signal),
                gate: Gate::Run,
                decision: Decision::Signalled,
                effects: CallEffects::None,
                resolution: ClaimResolution::Released,
                changes: None,
                outputs: Vec::new(),
                untruncated: None,
                result: None,
            }
        }
    }
}

/// Rolls back a failed call and notifies its policies.
pub(crate) fn roll_back(
    admitted: &AdmittedCall,
    end: &mut Completion,
    txn: &mut CallTransaction,
    call: CallId,
    facts: &DecisionFacts,
) {
    if !roll_back_files(txn) {
        end.mark_unclean();
    }
    let tool = admitted.authorization.tool();
    if let Outcome::Error(error) = &end.outcome {
        let input = PolicyInput::new(
            call,
            &admitted.key,
            &tool.spec,
            admitted.authorization.arguments(),
            facts,
        );
        for policy in &tool.observers {
            if catch_unwind(AssertUnwindSafe(|| policy.on_rollback(&input, error))).is_err() {
                tracing::error!(policy = policy.name(), "policy panicked in `on_rollback`");
            }
        }
    }
}

/// Returns the evidence that a call revokes, if the call ran or may have run.
///
/// Evidence that may no longer hold counts as revoked. The arguments of the call decide, not
/// the row, because the row is redacted by patterns.
pub(crate) fn revoked_evidence(
    gate: &Toolgate,
    admitted: &AdmittedCall,
    end: &Completion,
    call_state: &CallState,
) -> Vec<Revocation> {
    if end.resolution == ClaimResolution::Released {
        return Vec::new();
    }
    let tool = admitted.authorization.tool();
    let mut revoked = tool
        .revoked_evidence(&call_state.arguments, end.outcome.success().map(|output| &output.value));
    // A successful reported call revoked the old evidence before it produced its own.
    if admitted.is_reported && end.outcome.success().is_some() {
        revoked.retain(|revoked| revoked.tool != tool.spec.name);
    }
    if let Some(provenance::MismatchedRun { arguments: ran, .. }) = &admitted.mismatched_run {
        let ran = ran
            .as_ref()
            .map(|ran| gate.0.redactor.redact_shared(Arc::new(ran.clone()), &tool.secrets))
            .unwrap_or_default();
        revoked.extend(tool.revoked_evidence(&ran, None));
    }
    revoked
}
