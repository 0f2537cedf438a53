//! Gate 9: if a rule or a hook asks, has a person approved exactly this call?

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::agent::ToolEntry;
use crate::call::error::{ApprovalRef, CallEffects, ToolError};
use crate::call::error_code;
use crate::call::{Call, CallId};
use crate::ledger::row::Gate;
use crate::pipeline::Toolgate;
use crate::pipeline::admission::ResolvedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::explain::{GateResult, PredictedOutcome};
use crate::pipeline::gates::policy::{Permit, PolicyDecision};
use crate::pipeline::gates::run::panic_failure;
use crate::pipeline::rejection::Rejection;
use crate::store::{Approval, ApprovalState};
use crate::tool::FailureKind;
use toolgate_json;
use toolgate_json::Pointer;

/// Prefix of `answered_by` in a row if the client asks its own user. The principal follows.
pub(crate) const CLIENT_APPROVER_PREFIX: &str = "left to the client of ";

/// Returns the permit and, if the call uses one, the id and expiry of its approval.
pub(crate) async fn run(
    gate: &Toolgate,
    resolved: &ResolvedCall<'_>,
    decision: PolicyDecision,
    call_state: &mut CallState,
) -> Result<(Permit, Option<(String, Timestamp)>), Rejection> {
    call_state.enter_gate(Gate::Approval);
    if call_state.explain.is_some() {
        return predict_approval(gate, resolved, decision, call_state).await;
    }
    let approval = resolved.approval.as_deref();
    match decision.into_permit(approval) {
        Ok(permit) => {
            Ok((permit, approval.map(|approval| (approval.id.clone(), approval.expires))))
        }
        Err(decision) => {
            Box::pin(request_approval(gate, decision, resolved.call, call_state)).await
        }
    }
}

/// Explains whether the call would wait for an approval, and requests none.
async fn predict_approval(
    gate: &Toolgate,
    resolved: &ResolvedCall<'_>,
    decision: PolicyDecision,
    call_state: &mut CallState,
) -> Result<(Permit, Option<(String, Timestamp)>), Rejection> {
    let known = match &resolved.approval {
        Some(approval) => Some((**approval).clone()),
        None => gate
            .0
            .store
            .approval_for(&resolved.call.key, decision.arguments().digest())
            .await?
            .filter(|known| call_state.started <= known.expires),
    };
    if let Some(denied) = known.as_ref().filter(|known| {
        known.state == ApprovalState::Denied && !decision.approval_requests().is_empty()
    }) {
        return Err(approval_unusable_error(denied).into());
    }
    let decision = match decision.into_permit(known.as_ref()) {
        Ok(permit) => return Ok((permit, None)),
        Err(decision) => decision,
    };
    if let Some(refused) = handler_refusal(decision.tool()) {
        return Err(refused);
    }
    let reasons: Vec<&str> =
        decision.approval_requests().iter().map(|request| request.reason.as_str()).collect();
    let reasons = reasons.join("; ");
    if let Some(explain) = &mut call_state.explain {
        explain.note_gate(Gate::Approval, GateResult::Ask, Some(reasons.clone()));
        explain.outcome = Some(PredictedOutcome::Ask);
    }
    Err(ToolError::from_code(error_code::APPROVAL_REQUIRED, reasons).into())
}

/// Returns the permit and, if there is one, the id and expiry of the approval that it uses.
async fn request_approval(
    gate: &Toolgate,
    decision: PolicyDecision,
    call: &Call,
    call_state: &mut CallState,
) -> Result<(Permit, Option<(String, Timestamp)>), Rejection> {
    call_state.rule = decision.approval_requests().first().map(|request| request.asked_by.clone());
    let digest = decision.arguments().digest();
    let known = gate.0.store.approval_for(&call.key, digest).await?;
    call_state.facts.approval = known.as_ref().map(Approval::fact);
    let current = known.filter(|approval| call_state.started <= approval.expires);
    let (decision, waiting) = match current {
        Some(approval) if approval.state == ApprovalState::Approved => {
            match decision.into_permit(Some(&approval)) {
                Ok(permit) => {
                    call_state.rule = None;
                    return Ok((permit, Some((approval.id, approval.expires))));
                }
                // Another rule asks in the meantime, which requires a new answer.
                Err(decision) => (decision, None),
            }
        }
        Some(approval) if approval.state == ApprovalState::Denied => {
            return Err(approval_unusable_error(&approval).into());
        }
        Some(approval) if approval.state == ApprovalState::Waiting => (decision, Some(approval)),
        // The approval is used. One answer covers one call.
        _ => (decision, None),
    };
    if let Some(refused) = handler_refusal(decision.tool()) {
        call_state.rule = None;
        return Err(refused);
    }
    // The client's own user may answer if no approver is named.
    if call.can_ask_user
        && decision.approval_requests().iter().all(|request| request.approvers.is_empty())
    {
        let approval = build_approval(gate, &decision, call, call_state);
        let by = Some(format!("{CLIENT_APPROVER_PREFIX}{}", call.key.principal));
        let approval = Approval { state: ApprovalState::Approved, answered_by: by, ..approval };
        if let Ok(permit) = decision.into_permit(Some(&approval)) {
            call_state.rule = None;
            call_state.facts.approval = Some(approval.fact());
            call_state.approval_reason = Some(approval.reason);
            return Ok((permit, None));
        }
        return Err(approval_waiting_error(&approval).into());
    }
    let approval = match waiting {
        Some(approval) => approval,
        None => create_approval(gate, &decision, call, call_state).await?,
    };
    Err(approval_waiting_error(&approval).into())
}

async fn create_approval(
    gate: &Toolgate,
    decision: &PolicyDecision,
    call: &Call,
    call_state: &CallState,
) -> Result<Approval, Rejection> {
    let approval = build_approval(gate, decision, call, call_state);
    gate.0.store.create_approval(approval.clone()).await?;
    Ok(approval)
}

fn build_approval(
    gate: &Toolgate,
    decision: &PolicyDecision,
    call: &Call,
    call_state: &CallState,
) -> Approval {
    let mut shown = gate.0.redactor.redact(decision.arguments().value(), &decision.tool().secrets);
    gate.0.redactor.scrub(&mut shown);
    let ttl = SignedDuration::try_from(gate.0.approval_ttl).unwrap_or(SignedDuration::MAX);
    Approval {
        id: format!("apr_{}", CallId::generate()),
        key: call.key.clone(),
        tool: Arc::clone(&decision.tool().spec.name),
        digest: decision.arguments().digest(),
        arguments: decision.arguments().value().clone(),
        shown,
        asked_by: decision
            .approval_requests()
            .iter()
            .map(|request| request.asked_by.clone())
            .collect(),
        reason: gate.0.redactor.scrub_to_string(&approval_reasons(decision).join(" ")),
        approvers: decision
            .approval_requests()
            .iter()
            .map(|request| request.approvers.clone())
            .filter(|people| !people.is_empty())
            .collect(),
        asked_at: call_state.started,
        expires: call_state.started.checked_add(ttl).unwrap_or(Timestamp::MAX),
        state: ApprovalState::Waiting,
        answered_by: None,
    }
}

impl Toolgate {
    /// Reports whether an approval covers other arguments than `arguments`, which a client sends
    /// along with the approval id.
    ///
    /// Returns false if the tool has hooks, because they may have rewritten the arguments.
    #[must_use]
    pub fn is_for_other_arguments(&self, approval: &Approval, arguments: &Value) -> bool {
        let agent = self.0.agents.get(&approval.key.agent);
        let tool = agent
            .and_then(|agent| agent.tools.get(&approval.tool))
            .filter(|tool| tool.hooks.is_empty());
        let Some(tool) = tool else { return false };
        let mut canonical = arguments.clone();
        let fits = toolgate_json::canonicalize_numbers(&mut canonical, &mut Pointer::default())
            .is_ok()
            && tool
                .input
                .as_ref()
                .is_none_or(|schema| schema.validate(&tool.spec.name, &mut canonical).is_ok());
        !fits
            || toolgate_json::to_canonical_bytes(&canonical)
                != toolgate_json::to_canonical_bytes(&approval.arguments)
    }
}

/// Collects the distinct reasons for the approval.
fn approval_reasons(decision: &PolicyDecision) -> Vec<&str> {
    let mut reasons = Vec::new();
    for request in decision.approval_requests() {
        if !reasons.contains(&request.reason.as_str()) {
            reasons.push(request.reason.as_str());
        }
    }
    reasons
}

/// Returns the error of a tool that would not run even if a person approved the call.
pub(crate) fn handler_refusal(tool: &ToolEntry) -> Option<Rejection> {
    let handler = tool.handler.as_ref()?;
    // A handler that panics here would also fail after an approval.
    let refused = catch_unwind(AssertUnwindSafe(|| handler.refusal()));
    match refused
        .unwrap_or_else(|panic| Some(panic_failure(&tool.spec.name, panic.as_ref())))?
        .into_kind()
    {
        FailureKind::Error { error, .. } => Some(error.with_effects(CallEffects::None).into()),
        FailureKind::Signal(_) => None,
    }
}

/// Returns the error for an approval that is still waiting.
pub(crate) fn approval_waiting_error(approval: &Approval) -> ToolError {
    let reason = approval.reason.trim_end_matches('.');
    // Do not add a period after a reason that already ends in punctuation.
    let end = if reason.ends_with(['!', '?', '…']) { "" } else { "." };
    let message = format!(
        "{reason}{end} A person must approve this call; tell the user, then repeat the identical call after it is approved"
    );
    let mut error = ToolError::from_code(error_code::APPROVAL_REQUIRED, message);
    error.approval =
        Some(ApprovalRef { id: approval.id.clone(), expires_at: approval.expires.to_string() });
    error
}

/// Returns the error for an approval that is denied, used or expired.
pub(crate) fn approval_unusable_error(approval: &Approval) -> ToolError {
    let message = match approval.state {
        ApprovalState::Denied => {
            format!(
                "{} denied this call; do not repeat it, tell the user",
                approval.answered_by.as_deref().unwrap_or("a person")
            )
        }
        ApprovalState::Used => {
            "the approval was used; make the call without it to request a new one".to_owned()
        }
        _ => "the approval has expired; make the call without it to request a new one".to_owned(),
    };
    ToolError::from_code(error_code::APPROVAL_DENIED, message)
}
