//! Implements gates 7 and 10 (hooks and claim) and loads the facts that the policies of gate 8
//! need.

use std::sync::Arc;

use jiff::Timestamp;
use rust_decimal::Decimal;

use super::admit::{dedup_keys, lease_duration};
use crate::agent::{Agent, ToolEntry};
use crate::call::error::{CallEffects, ErrorCategory, ToolError};
use crate::call::error_code;
use crate::call::outcome::Outcome;
use crate::call::{Call, CheckedArguments, SessionKey};
use crate::hook::{BeforeHookResult, HookCall, HookDecision, HookError};
use crate::limits::Charge;
use crate::pipeline::admission::ClaimOutcome;
use crate::pipeline::call_state::CallState;
use crate::pipeline::deferred::DeferredState;
use crate::pipeline::gates::policy::{ApprovalRequest, Permit};
use crate::pipeline::mask_secrets::SecretValues;
use crate::pipeline::{Rejection, Toolgate};
use crate::policy::{
    DecisionFacts, DedupKeyKind, EnforcementMode, FactRequest, FileFact, HookFact, ObservedVerdict,
    PolicyInput,
};
use crate::session::state::SessionState;
use crate::store::{
    ClaimError, ClaimRecord, DedupKey, PriorCall, StoreError, prior_call_error, with_limit_details,
};
use crate::tool::Effect;
use toolgate_json;
use toolgate_json::{Digest, Pointer};
use toolgate_text::escape_for_display;

/// Lease of a deferred call whose client does not come back.
const DEFERRED_LEASE_TTL: std::time::Duration = std::time::Duration::from_secs(24 * 60 * 60);

impl Toolgate {
    /// Gate 7: runs the hooks in order, each on the rewrite of the one before. A hook that fails
    /// denies.
    pub(crate) async fn run_before_hooks(
        &self,
        agent: &Agent,
        call: &Call,
        tool: &Arc<ToolEntry>,
        arguments: &mut CheckedArguments,
        fixed: bool,
        trail: &mut CallState,
    ) -> Result<Vec<ApprovalRequest>, Rejection> {
        let mut asked = Vec::new();
        for hook in &tool.hooks {
            trail.rule = Some(hook.name().to_owned());
            let seen = HookCall {
                call: trail.id,
                key: &call.key,
                tool: &tool.spec.name,
                input: arguments.value(),
            };
            let work =
                futures_util::FutureExt::catch_unwind(std::panic::AssertUnwindSafe(async move {
                    hook.before(seen).await
                }));
            let answer: Result<BeforeHookResult, HookError> = tokio::select! {
                biased;
                answer = tokio::time::timeout(hook.timeout(), work) => match answer {
                    Ok(Ok(answer)) => answer,
                    Ok(Err(_)) => Err(HookError("it panicked".to_owned())),
                    Err(_) => Err(HookError(format!("it gave no answer within {:?}", hook.timeout()))),
                },
                () = super::run::sleep_until(trail.deadline) => return Err(ToolError::from_code(error_code::DEADLINE_EXCEEDED, "the deadline of the call passed while hooks ran").into()),
                () = trail.cancel.cancelled() => return Err(ToolError::from_code(error_code::CANCELLED, "the call was cancelled before it began").into()),
            };
            // The hook sees the secrets of the call, and its message goes to others.
            let mut secrets = SecretValues::from_arguments(arguments.value(), tool);
            let before = answer.map_err(|fault| {
                let fault = secrets.mask_text(&fault.0);
                ToolError::from_code(
                    error_code::HOOK_FAILED,
                    format!("the hook `{}` failed, so the call is denied: {fault}", hook.name()),
                )
            })?;
            let said = match &before.decision {
                HookDecision::Allow => "allow",
                HookDecision::Deny(_) => "deny",
                HookDecision::Ask(_) => "ask",
            };
            if let Some(why) = before
                .input
                .as_ref()
                .and_then(|input| toolgate_json::find_exceeded_bound_of_value(input, &agent.bounds))
            {
                toolgate_json::drop_iteratively(before.input.unwrap_or_default());
                return Err(ToolError::from_code(
                    error_code::HOOK_FAILED,
                    format!(
                        "the hook `{}` rewrote the arguments, and the result is too large: {why}",
                        hook.name()
                    ),
                )
                .into());
            }
            if let Some(input) = &before.input {
                secrets.add_document(input, tool);
            }
            // The approved arguments are fixed. A hook may still deny the call, but not change it.
            let rewrite = before.input.filter(|input| !fixed && input != arguments.value());
            let fact = HookFact {
                hook: hook.name().to_owned(),
                said: said.to_owned(),
                rewrote: rewrite.is_some(),
                no_redirect: None,
            };
            trail.facts.hooks.push(fact);
            match before.decision {
                HookDecision::Allow => {}
                HookDecision::Deny(denial) => {
                    // A hook may deny as PERMISSION or BUSINESS, but it cannot make a denial look
                    // retryable.
                    let category = denial
                        .category
                        .filter(|c| {
                            matches!(c, ErrorCategory::Permission | ErrorCategory::Business)
                        })
                        .unwrap_or(ErrorCategory::Permission);
                    let code = denial
                        .code
                        .map_or(std::borrow::Cow::Borrowed(error_code::HOOK_DENIED), |code| {
                            escape_for_display(&code).into()
                        });
                    let mut error = ToolError::new(category, code, denial.reason);
                    secrets.mask_error(&mut error);
                    // The hook's redirect is unverified. If the caller cannot use the target, the
                    // denial remains and the redirect is dropped.
                    if let Some(to) = denial.redirect {
                        if self.is_reachable(&to, agent, &call.key).await {
                            error.redirect_tool = Some(to);
                        } else if let Some(fact) = trail.facts.hooks.last_mut() {
                            let to = secrets.mask_text(&escape_for_display(&to));
                            tracing::warn!(hook = hook.name(), tool = %to, "hook redirects to a tool that this caller cannot use");
                            fact.no_redirect = Some(to);
                        }
                    }
                    return Err(error.into());
                }
                HookDecision::Ask(reason) => {
                    asked.push(ApprovalRequest {
                        asked_by: hook.name().to_owned(),
                        reason: secrets.mask_text(&reason),
                        approvers: Vec::new(),
                    });
                }
            }
            if let Some(mut input) = rewrite {
                let bad = |why: String| {
                    ToolError::from_code(
                        error_code::HOOK_FAILED,
                        format!(
                            "the hook `{}` rewrote the arguments, and the result is invalid: {why}",
                            hook.name()
                        ),
                    )
                };
                toolgate_json::canonicalize_numbers(&mut input, &mut Pointer::default())
                    .map_err(|(at, why)| bad(format!("{why} at `{at}`")))?;
                *arguments = self
                    .check_input_schema(tool, input, trail)
                    .map_err(|stop| bad(stop.error.message))?;
            }
        }
        trail.rule = None;
        Ok(asked)
    }

    /// Loads the facts that the policies of a tool need.
    pub(crate) async fn load_facts(
        &self,
        agent: &Agent,
        call: &Call,
        tool: &ToolEntry,
        arguments: &CheckedArguments,
        at: &SessionState,
        trail: &mut CallState,
    ) -> Result<(), Rejection> {
        for round in 0..2 {
            let mut needs = FactRequest::default();
            for attached in &tool.governed_by {
                let ask =
                    PolicyInput::new(trail.id, &call.key, &tool.spec, arguments, &trail.facts);
                let asked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    attached.policy.request_facts(&ask, &mut needs)
                }));
                // A policy in observe mode records its own failure later.
                if asked.is_err() && attached.policy.mode() == EnforcementMode::Enforce {
                    trail.rule = Some(attached.policy.name().to_owned());
                    let message = format!(
                        "the policy `{}` panicked, so the call is denied",
                        attached.policy.name()
                    );
                    return Err(ToolError::from_code(error_code::POLICY_FAULT, message).into());
                }
            }
            if round > 0 {
                needs.remove_answered(&trail.facts);
            }
            self.load_requested_facts(agent, &call.key, &mut needs, at, &mut trail.facts).await?;
            if !needs.repeat_with_evidence {
                break;
            }
        }
        Ok(())
    }

    /// Loads the requested facts from files, the session snapshot and the store.
    pub(crate) async fn load_requested_facts(
        &self,
        agent: &Agent,
        key: &SessionKey,
        needs: &mut FactRequest,
        at: &SessionState,
        facts: &mut DecisionFacts,
    ) -> Result<(), StoreError> {
        if needs.home {
            let home = facts.home.get_or_insert_with(crate::policy::home_dir_text);
            if crate::redact::has_mark(home) {
                facts.watch.record_missing(|| {
                    "the home directory is redacted, and a rule checks a path below it".to_owned()
                });
            }
        }
        if needs.is_empty() {
            return Ok(());
        }
        if let Some(files) = agent.resources.files() {
            for path in &needs.files {
                let fact = match crate::files::normalize_path(path) {
                    Ok(path) => files.fact(&path),
                    Err(error) => FileFact::Unreadable(error.to_string()),
                };
                facts.files.insert(path.clone(), fact);
            }
        }
        if self.0.store.has_complete_snapshots() {
            facts.load_from_session(needs, at);
            if needs.counters.is_empty() {
                return Ok(());
            }
        }
        self.0.store.load_facts(key, needs, at, facts).await?;
        // Earlier calls of the same batch may revoke evidence that the store still has.
        facts.drop_revoked_evidence(at);
        Ok(())
    }

    /// Checks that the caller may still make a call whose earlier outcome would be replayed.
    pub(crate) async fn recheck_policies(
        &self,
        agent: &Agent,
        call: &Call,
        tool: &Arc<ToolEntry>,
        (arguments, outcome): (&CheckedArguments, &Outcome),
        state: &SessionState,
        trail: &mut CallState,
    ) -> Result<(), Rejection> {
        self.load_facts(agent, call, tool, arguments, state, trail).await?;
        // Business rules limit new actions, and a replay is none. Permission denials apply to
        // replays too, even if a business denial has precedence.
        let judged = crate::pipeline::gates::policy::evaluate_policies(
            &*self.0.engine,
            trail.id,
            &call.key,
            tool,
            arguments.clone(),
            &trail.facts,
            Vec::new(),
        );
        let Some((rule, error)) = judged.err().and_then(|denied| denied.permission_denial) else {
            return Ok(());
        };
        trail.rule = Some(rule);
        // The outcome is withheld, but the earlier call had its effects.
        let done =
            if tool.spec.effect == Effect::Read { CallEffects::None } else { CallEffects::Done };
        let error = error.with_effects(outcome.error().map_or(done, |error| error.effects));
        Err(self.strip_unreachable_redirects(error, agent, &call.key).await.into())
    }

    /// Gate 10: stores the intent, reserves the limits and uses the approval, all in one
    /// transaction.
    pub(crate) async fn claim_call(
        &self,
        call: &Call,
        permit: &Permit,
        budget: Vec<(Charge, ToolError)>,
        recall: Vec<DedupKey>,
        approval: Option<(String, Timestamp)>,
        trail: &mut CallState,
    ) -> Result<ClaimOutcome, Rejection> {
        // The approval may have expired while the call waited for its session or for a hook.
        if approval.as_ref().is_some_and(|(_, expires)| self.now() > *expires) {
            return Err(approval_gone_rejection());
        }
        let tool = permit.tool();
        let effect = tool.spec.effect != Effect::Read;
        let uncharged = permit.charges().is_empty() && permit.observed_charges().is_empty();
        // A read that runs here leaves nothing that a later call could read, so its provenance can
        // wait.
        let ahead = effect || trail.is_run_by_client;
        let agent = self.0.agents.get(&call.key.agent).filter(|_| ahead);
        let intended = agent.map(|agent| {
            crate::pipeline::provenance::intended_writes(
                agent,
                &tool.spec,
                permit.arguments().value(),
            )
        });
        let (seen, carriers) = intended.unwrap_or_default();
        let takes_away = trail.is_run_by_client && !tool.spec.revokes.is_empty();
        let nothing = recall.is_empty()
            && budget.is_empty()
            && uncharged
            && approval.is_none()
            && trail.deferred_id.is_none()
            && seen.is_none();
        if !effect && nothing && !takes_away {
            return Ok(ClaimOutcome::Claimed);
        }
        let watched = self.observed_charges(permit, trail).await?;
        let own = budget.into_iter().map(|(charge, error)| (charge, (None, error)));
        let ruled = permit
            .charges()
            .iter()
            .cloned()
            .map(|(rule, charge, error)| (charge, (Some(rule), error)));
        let (mut charges, whose): (Vec<Charge>, Vec<(Option<String>, ToolError)>) =
            own.chain(ruled).unzip();
        charges.extend(watched);
        let kept = trail.deferred_id.clone();
        let pass = match kept {
            Some(client) => Some((client, DeferredState::capture(permit, self.now(), trail)?)),
            None => None,
        };
        // The client may ask a person first, so the lease is long. A client that closes its session
        // ends it.
        let time = if pass.is_some() {
            DEFERRED_LEASE_TTL
        } else {
            tool.spec.timeout.saturating_add(trail.lease_slack)
        };
        let intent = Box::new(ClaimRecord {
            call: trail.id,
            key: call.key.clone(),
            tool: Arc::clone(&tool.spec.name),
            digest: permit.arguments().digest(),
            asked: trail.requested_digest.unwrap_or_else(|| permit.arguments().digest()),
            recall,
            // A call that the client runs outlives this process, which cannot tell whether the
            // client is alive.
            owner: if trail.is_run_by_client {
                format!("client:{}", call.key.session).into()
            } else {
                Arc::clone(&self.0.owner)
            },
            lease: self.now().checked_add(lease_duration(time)).unwrap_or(Timestamp::MAX),
            effect,
            // If the process dies before the end, this row is recorded.
            row: ((effect || pass.is_some()) && self.0.store.state_dir().is_some())
                .then(|| self.draft_abandoned_row(effect, &charges, trail)),
            pass,
            carriers,
            seen,
            revokes: tool.revoked_evidence(&trail.arguments, None),
        });
        let approval = approval.as_ref().map(|(id, _)| id.as_str());
        let begun = self.0.store.claim(intent, &charges, approval, trail.started).await?;
        let used = match &begun {
            Ok(used) => used.clone(),
            // Includes the amounts that earlier charges of this call take from the same counter.
            Err(ClaimError::LimitExceeded { index, error: over, used }) => {
                let (before, full) = charges.split_at((*index).min(charges.len()));
                let same = |c: &&Charge| {
                    full.first()
                        .is_some_and(|full| full.counter == c.counter && full.window == c.window)
                };
                let reserved = before
                    .iter()
                    .filter(same)
                    .fold(over.used, |sum, c| sum.saturating_add(c.amount));
                used.iter().copied().chain([reserved]).collect()
            }
            Err(_) => Vec::new(),
        };
        trail.facts.claimed = charges
            .into_iter()
            .zip(used)
            .map(|(charge, used)| (charge.counter, charge.window, used))
            .collect();
        match begun {
            Ok(_) => Ok(ClaimOutcome::Claimed),
            Err(ClaimError::PriorCall(recalled, by)) => {
                (trail.facts.recalled, trail.facts.recalled_by) = (Some(recalled.fact()), Some(by));
                match recalled {
                    PriorCall::Settled(Some(outcome)) => Ok(ClaimOutcome::Replay(outcome)),
                    other => Err(prior_call_error(&other).into()),
                }
            }
            Err(ClaimError::LimitExceeded { index, error: over, .. }) => {
                let full = || {
                    (
                        None,
                        ToolError::from_code(error_code::BUDGET_EXHAUSTED, "a limit is exhausted"),
                    )
                };
                let (rule, error) = whose.into_iter().nth(index).unwrap_or_else(full);
                trail.rule = rule;
                Err(with_limit_details(error, &over).into())
            }
            Err(ClaimError::Paused(target, why)) => {
                let error = super::admit::paused_target_error(&target, &why);
                trail.facts.paused = Some((target, why));
                Err(error.into())
            }
            Err(ClaimError::ApprovalUnavailable) => Err(approval_gone_rejection()),
        }
    }
}

fn approval_gone_rejection() -> Rejection {
    ToolError::from_code(
        error_code::APPROVAL_DENIED,
        "the approval was used, has expired or was revoked",
    )
    .into()
}

impl Toolgate {
    /// Returns the charges of rules in observe mode, without their caps, and records would-be
    /// denials.
    ///
    /// The claim would reject a negative charge, so negative charges are left out.
    async fn observed_charges(
        &self,
        permit: &Permit,
        trail: &mut CallState,
    ) -> Result<Vec<Charge>, Rejection> {
        if permit.observed_charges().is_empty() {
            return Ok(Vec::new());
        }
        let (mut charges, mut whose) = (Vec::new(), Vec::new());
        for (rule, charge, error) in permit.observed_charges() {
            if charge.amount < Decimal::ZERO {
                let (code, message) =
                    (error_code::POLICY_FAULT.to_owned(), negative_charge_message(rule));
                trail.facts.observed.push(ObservedVerdict {
                    rule: rule.clone(),
                    said: "fault".to_owned(),
                    code,
                    message,
                });
                continue;
            }
            charges.push(charge.clone());
            whose.push((rule, error));
        }
        let room = self.0.store.check_charges(&charges, trail.started).await?;
        for (room, (rule, error)) in room.into_iter().zip(whose) {
            if let Err(over) = room {
                let error = with_limit_details(error.clone(), &over);
                let (code, message) = (error.code.into_owned(), error.message);
                trail.facts.observed.push(ObservedVerdict {
                    rule: rule.clone(),
                    said: "deny".to_owned(),
                    code,
                    message,
                });
            }
        }
        for charge in &mut charges {
            charge.cap = Decimal::MAX;
        }
        Ok(charges)
    }
}

/// Describes a negative charge.
pub(crate) fn negative_charge_message(rule: &str) -> String {
    format!("the policy `{rule}` charges a negative amount")
}

/// Returns the recall keys of a call, both as requested and as rewritten by hooks.
pub(crate) fn all_dedup_keys(
    call: &Call,
    tool: &ToolEntry,
    asked: Option<Digest>,
    permit: &Permit,
) -> Vec<DedupKey> {
    let judged = permit.arguments().digest();
    let mut keys = dedup_keys(call, tool, asked.unwrap_or(judged));
    keys.extend(
        dedup_keys(call, tool, judged).into_iter().filter(|key| key.kind() == DedupKeyKind::Once),
    );
    keys.dedup();
    keys
}
