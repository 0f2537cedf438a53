//! Gate 7: what do the hooks of the tool say, and how do they rewrite the arguments?

use crate::call::CheckedArguments;
use crate::call::error::{ErrorCategory, ToolError};
use crate::call::error_code;
use crate::hook::{BeforeHookResult, HookCall, HookDecision, HookError};
use crate::ledger::row::Gate;
use crate::pipeline::Toolgate;
use crate::pipeline::admission::ResolvedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::explain::GateResult;
use crate::pipeline::gates::policy::ApprovalRequest;
use crate::pipeline::gates::run::sleep_until;
use crate::pipeline::gates::validate::check_input_schema;
use crate::pipeline::mask_secrets::SecretValues;
use crate::pipeline::rejection::Rejection;
use crate::policy::HookFact;
use toolgate_json::Pointer;
use toolgate_text::escape_for_display;

/// Runs the hooks, and returns the arguments that they leave and the approvals that they request.
pub(crate) async fn run(
    gate: &Toolgate,
    resolved: &ResolvedCall<'_>,
    mut arguments: CheckedArguments,
    call_state: &mut CallState,
) -> Result<(CheckedArguments, Vec<ApprovalRequest>), Rejection> {
    call_state.enter_gate(Gate::Hooks);
    let hooks = &resolved.tool.hooks;
    if hooks.is_empty() {
        return Ok((arguments, Vec::new()));
    }
    if let Some(explain) = &mut call_state.explain {
        let names = hooks.iter().map(|hook| hook.name()).collect::<Vec<_>>().join(", ");
        let reason = format!("only an actual call runs hooks: {names}");
        explain.note_gate(Gate::Hooks, GateResult::NotAsked, Some(reason));
        return Ok((arguments, Vec::new()));
    }
    // Few calls have hooks. The box keeps the future of all other calls small.
    let requests = Box::pin(run_all(gate, resolved, &mut arguments, call_state)).await?;
    Ok((arguments, requests))
}

/// Runs the hooks in order, each on the rewrite of the one before. A hook that fails denies.
async fn run_all(
    gate: &Toolgate,
    resolved: &ResolvedCall<'_>,
    arguments: &mut CheckedArguments,
    call_state: &mut CallState,
) -> Result<Vec<ApprovalRequest>, Rejection> {
    let ResolvedCall { call, agent, tool, .. } = resolved;
    // The approved arguments are fixed. A hook may still deny the call, but not change it.
    let is_approved = resolved.approval.is_some();
    let mut requests = Vec::new();
    for hook in &tool.hooks {
        call_state.rule = Some(hook.name().to_owned());
        let hook_call = HookCall {
            call: call_state.id,
            key: &call.key,
            tool: &tool.spec.name,
            input: arguments.value(),
        };
        let work =
            futures_util::FutureExt::catch_unwind(std::panic::AssertUnwindSafe(async move {
                hook.before(hook_call).await
            }));
        let answer: Result<BeforeHookResult, HookError> = tokio::select! {
            biased;
            answer = tokio::time::timeout(hook.timeout(), work) => match answer {
                Ok(Ok(answer)) => answer,
                Ok(Err(_)) => Err(HookError("it panicked".to_owned())),
                Err(_) => Err(HookError(format!("it gave no answer within {:?}", hook.timeout()))),
            },
            () = sleep_until(call_state.deadline) => return Err(ToolError::from_code(error_code::DEADLINE_EXCEEDED, "the deadline of the call passed while hooks ran").into()),
            () = call_state.cancel.cancelled() => return Err(ToolError::from_code(error_code::CANCELLED, "the call was cancelled before it began").into()),
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
        let verdict = match &before.decision {
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
        let rewrite = before.input.filter(|input| !is_approved && input != arguments.value());
        let fact = HookFact {
            hook: hook.name().to_owned(),
            said: verdict.to_owned(),
            rewrote: rewrite.is_some(),
            no_redirect: None,
        };
        call_state.facts.hooks.push(fact);
        match before.decision {
            HookDecision::Allow => {}
            HookDecision::Deny(denial) => {
                // A hook may deny as PERMISSION or BUSINESS, but it cannot make a denial look
                // retryable.
                let category = denial
                    .category
                    .filter(|c| matches!(c, ErrorCategory::Permission | ErrorCategory::Business))
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
                    if gate.is_reachable(&to, agent, &call.key).await {
                        error.redirect_tool = Some(to);
                    } else if let Some(fact) = call_state.facts.hooks.last_mut() {
                        let to = secrets.mask_text(&escape_for_display(&to));
                        tracing::warn!(hook = hook.name(), tool = %to, "hook redirects to a tool that this caller cannot use");
                        fact.no_redirect = Some(to);
                    }
                }
                return Err(error.into());
            }
            HookDecision::Ask(reason) => {
                requests.push(ApprovalRequest {
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
            *arguments = check_input_schema(gate, tool, input, call_state)
                .map_err(|stop| bad(stop.error.message))?;
        }
    }
    call_state.rule = None;
    Ok(requests)
}
