//! Implements gate 9: if a rule or hook asks, a person must approve exactly this call, once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::run::panic_failure;
use crate::agent::ToolEntry;
use crate::call::error::{ApprovalRef, CallEffects, ToolError};
use crate::call::error_code;
use crate::call::{Call, CallId};
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::policy::{Permit, PolicyDecision};
use crate::pipeline::{Rejection, Toolgate};
use crate::store::{Approval, ApprovalState};
use crate::tool::FailureKind;
use toolgate_json;
use toolgate_json::Pointer;

/// Prefix of `answered_by` in a row if the client asks its own user. The principal follows.
pub(crate) const CLIENT_APPROVER_PREFIX: &str = "left to the client of ";

impl Toolgate {
    /// Returns the permit and, if there is one, the id and expiry of the approval that it uses.
    pub(crate) async fn require_approval(
        &self,
        judgement: PolicyDecision,
        call: &Call,
        trail: &mut CallState,
    ) -> Result<(Permit, Option<(String, Timestamp)>), Rejection> {
        trail.rule = judgement.approval_requests().first().map(|asked| asked.asked_by.clone());
        let digest = judgement.arguments().digest();
        let known = self.0.store.approval_for(&call.key, digest).await?;
        trail.facts.approval = known.as_ref().map(Approval::fact);
        let live = known.filter(|approval| trail.started <= approval.expires);
        let (judgement, asked) = match live {
            Some(approval) if approval.state == ApprovalState::Approved => {
                match judgement.into_permit(Some(&approval)) {
                    Ok(permit) => {
                        trail.rule = None;
                        return Ok((permit, Some((approval.id, approval.expires))));
                    }
                    // Another rule asks in the meantime, which requires a new answer.
                    Err(judgement) => (judgement, None),
                }
            }
            Some(approval) if approval.state == ApprovalState::Denied => {
                return Err(approval_unusable_error(&approval).into());
            }
            Some(approval) if approval.state == ApprovalState::Waiting => {
                (judgement, Some(approval))
            }
            // The approval is used. One answer covers one call.
            _ => (judgement, None),
        };
        if let Some(refused) = handler_refusal(judgement.tool()) {
            trail.rule = None;
            return Err(refused);
        }
        // The client's own user may answer if no approver is named.
        if call.can_ask_user
            && judgement.approval_requests().iter().all(|asked| asked.approvers.is_empty())
        {
            let approval = self.build_approval(&judgement, call, trail);
            let by = Some(format!("{CLIENT_APPROVER_PREFIX}{}", call.key.principal));
            let approval = Approval { state: ApprovalState::Approved, answered_by: by, ..approval };
            if let Ok(permit) = judgement.into_permit(Some(&approval)) {
                trail.rule = None;
                trail.facts.approval = Some(approval.fact());
                trail.approval_reason = Some(approval.reason);
                return Ok((permit, None));
            }
            return Err(approval_waiting_error(&approval).into());
        }
        let approval = match asked {
            Some(approval) => approval,
            None => self.create_approval(&judgement, call, trail).await?,
        };
        Err(approval_waiting_error(&approval).into())
    }

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
        let mut given = arguments.clone();
        let fits = toolgate_json::canonicalize_numbers(&mut given, &mut Pointer::default()).is_ok()
            && tool
                .input
                .as_ref()
                .is_none_or(|schema| schema.validate(&tool.spec.name, &mut given).is_ok());
        !fits
            || toolgate_json::to_canonical_bytes(&given)
                != toolgate_json::to_canonical_bytes(&approval.arguments)
    }

    async fn create_approval(
        &self,
        judgement: &PolicyDecision,
        call: &Call,
        trail: &CallState,
    ) -> Result<Approval, Rejection> {
        let approval = self.build_approval(judgement, call, trail);
        self.0.store.create_approval(approval.clone()).await?;
        Ok(approval)
    }

    fn build_approval(
        &self,
        judgement: &PolicyDecision,
        call: &Call,
        trail: &CallState,
    ) -> Approval {
        let mut shown =
            self.0.redactor.redact(judgement.arguments().value(), &judgement.tool().secrets);
        self.0.redactor.scrub(&mut shown);
        let life = SignedDuration::try_from(self.0.approval_ttl).unwrap_or(SignedDuration::MAX);
        Approval {
            id: format!("apr_{}", CallId::generate()),
            key: call.key.clone(),
            tool: Arc::clone(&judgement.tool().spec.name),
            digest: judgement.arguments().digest(),
            arguments: judgement.arguments().value().clone(),
            shown,
            asked_by: judgement
                .approval_requests()
                .iter()
                .map(|asked| asked.asked_by.clone())
                .collect(),
            reason: self.0.redactor.scrub_to_string(&approval_reasons(judgement).join(" ")),
            approvers: judgement
                .approval_requests()
                .iter()
                .map(|asked| asked.approvers.clone())
                .filter(|people| !people.is_empty())
                .collect(),
            asked_at: trail.started,
            expires: trail.started.checked_add(life).unwrap_or(Timestamp::MAX),
            state: ApprovalState::Waiting,
            answered_by: None,
        }
    }
}

/// Collects the distinct reasons for the approval.
fn approval_reasons(judgement: &PolicyDecision) -> Vec<&str> {
    let mut reasons = Vec::new();
    for asked in judgement.approval_requests() {
        if !reasons.contains(&asked.reason.as_str()) {
            reasons.push(asked.reason.as_str());
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
