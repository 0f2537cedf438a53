//! Gate 9: where a rule or hook asked, a person answers, for exactly this call and once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::authorize::{Judgement, Permit};
use super::run::panicked;
use super::trail::Trail;
use super::{Stop, Toolgate};
use crate::call::{Call, CallId};
use crate::code;
use crate::error::{ApprovalRef, Effects, ToolError};
use crate::json::{self, Pointer};
use crate::registry::Registered;
use crate::store::{Approval, ApprovalState};
use crate::tool::Kind;

/// What a row says where the client asks its own user, before whose name that is.
pub(super) const LEFT_TO: &str = "left to the client of ";

impl Toolgate {
    /// The permit, and by which approval it is given, with the moment until which that can be used.
    pub(super) async fn approve(
        &self,
        judgement: Judgement,
        call: &Call,
        trail: &mut Trail,
    ) -> Result<(Permit, Option<(String, Timestamp)>), Stop> {
        trail.rule = judgement.asked().first().map(|asked| asked.by.clone());
        let digest = judgement.arguments().digest();
        let known = self.0.store.approval_for(&call.key, digest).await?;
        trail.facts.approval = known.as_ref().map(Approval::fact);
        let live = known.filter(|approval| trail.started <= approval.expires);
        let (judgement, asked) = match live {
            Some(approval) if approval.state == ApprovalState::Approved => match judgement.permit(Some(&approval)) {
                Ok(permit) => {
                    trail.rule = None;
                    return Ok((permit, Some((approval.id, approval.expires))));
                }
                // Somebody else asks by now: that takes a new answer.
                Err(judgement) => (judgement, None),
            },
            Some(approval) if approval.state == ApprovalState::Denied => return Err(unusable(&approval).into()),
            Some(approval) if approval.state == ApprovalState::Waiting => (judgement, Some(approval)),
            // Used: one answer, one call.
            _ => (judgement, None),
        };
        if let Some(refused) = in_vain(judgement.tool()) {
            trail.rule = None;
            return Err(refused);
        }
        // The client's own user is somebody, where nobody in particular is named.
        if call.client_asks && judgement.asked().iter().all(|asked| asked.approvers.is_empty()) {
            let approval = self.approval_of(&judgement, call, trail);
            let by = Some(format!("{LEFT_TO}{}", call.key.principal));
            let approval = Approval { state: ApprovalState::Approved, answered_by: by, ..approval };
            if let Ok(permit) = judgement.permit(Some(&approval)) {
                trail.rule = None;
                trail.facts.approval = Some(approval.fact());
                trail.asks = Some(approval.reason);
                return Ok((permit, None));
            }
            return Err(waiting(&approval).into());
        }
        let approval = match asked {
            Some(approval) => approval,
            None => self.ask(&judgement, call, trail).await?,
        };
        Err(waiting(&approval).into())
    }

    /// Whether an approval is for other arguments than these, which a client sends along with its name. Where a hook may have rewritten
    /// them before a person was asked, nobody can tell, and it is not said.
    #[must_use]
    pub fn is_for_others(&self, approval: &Approval, arguments: &Value) -> bool {
        let agent = self.0.agents.get(&approval.key.agent);
        let tool = agent.and_then(|agent| agent.tools.get(&approval.tool)).filter(|tool| tool.hooks.is_empty());
        let Some(tool) = tool else { return false };
        let mut given = arguments.clone();
        let fits = json::canonicalize_numbers(&mut given, &mut Pointer::default()).is_ok()
            && tool.input.as_ref().is_none_or(|schema| schema.validate(&tool.spec.name, &mut given).is_ok());
        !fits || json::canonical(&given) != json::canonical(&approval.arguments)
    }

    async fn ask(&self, judgement: &Judgement, call: &Call, trail: &Trail) -> Result<Approval, Stop> {
        let approval = self.approval_of(judgement, call, trail);
        self.0.store.ask(approval.clone()).await?;
        Ok(approval)
    }

    fn approval_of(&self, judgement: &Judgement, call: &Call, trail: &Trail) -> Approval {
        let mut shown = self.0.redactor.redact(judgement.arguments().value(), &judgement.tool().secrets);
        self.0.redactor.scrub(&mut shown);
        let life = SignedDuration::try_from(self.0.approval_life).unwrap_or(SignedDuration::MAX);
        Approval {
            id: format!("apr_{}", CallId::fresh()),
            key: call.key.clone(),
            tool: Arc::clone(&judgement.tool().spec.name),
            digest: judgement.arguments().digest(),
            arguments: judgement.arguments().value().clone(),
            shown,
            asked_by: judgement.asked().iter().map(|asked| asked.by.clone()).collect(),
            reason: self.0.redactor.text(&reasons(judgement).join(" ")),
            approvers: judgement.asked().iter().map(|asked| asked.approvers.clone()).filter(|people| !people.is_empty()).collect(),
            asked_at: trail.started,
            expires: trail.started.checked_add(life).unwrap_or(Timestamp::MAX),
            state: ApprovalState::Waiting,
            answered_by: None,
        }
    }
}

/// Why a person is wanted, each reason once.
fn reasons(judgement: &Judgement) -> Vec<&str> {
    let mut reasons = Vec::new();
    for asked in judgement.asked() {
        if !reasons.contains(&asked.reason.as_str()) {
            reasons.push(asked.reason.as_str());
        }
    }
    reasons
}

/// Why nobody is asked about a tool: it would not run, whatever a person says.
pub(super) fn in_vain(tool: &Registered) -> Option<Stop> {
    let handler = tool.handler.as_ref()?;
    // One that panics when it is asked has a fault, whatever a person says.
    let refused = catch_unwind(AssertUnwindSafe(|| handler.refuses()));
    match refused.unwrap_or_else(|panic| Some(panicked(&tool.spec.name, panic.as_ref())))?.into_kind() {
        Kind::Error { error, .. } => Some(error.with_effects(Effects::None).into()),
        Kind::Signal(_) => None,
    }
}

/// A person has not answered yet.
pub(super) fn waiting(approval: &Approval) -> ToolError {
    let reason = approval.reason.trim_end_matches('.');
    // A question has an end of its own.
    let end = if reason.ends_with(['!', '?', '…']) { "" } else { "." };
    let message =
        format!("{reason}{end} A person must approve this call; tell the user, then repeat the identical call once it is approved");
    let mut error = ToolError::of(code::APPROVAL_REQUIRED, message);
    error.approval = Some(ApprovalRef { id: approval.id.clone(), expires_at: approval.expires.to_string() });
    error
}

/// A person said no, or the answer is used up or too old.
pub(super) fn unusable(approval: &Approval) -> ToolError {
    let message = match approval.state {
        ApprovalState::Denied => {
            format!("{} refused this call; do not repeat it, tell the user", approval.answered_by.as_deref().unwrap_or("a person"))
        }
        ApprovalState::Used => "the approval was used; make the call without it to ask anew".to_owned(),
        _ => "the approval has expired; make the call without it to ask anew".to_owned(),
    };
    ToolError::of(code::APPROVAL_DENIED, message)
}
