//! Gate 2: which tool does the call mean, and which approval does it name?

use std::sync::Arc;

use crate::agent::{Agent, ToolEntry};
use crate::call::Call;
use crate::call::error::{FieldError, ToolError};
use crate::call::error_code;
use crate::ledger::row::Gate;
use crate::pipeline::Toolgate;
use crate::pipeline::admission::ResolvedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::approval::{
    approval_unusable_error, approval_waiting_error, handler_refusal,
};
use crate::pipeline::rejection::Rejection;
use crate::policy::ApprovalFact;
use crate::session::state::SessionState;
use crate::store::{Approval, ApprovalState};
use toolgate_text::escape_for_display;

/// Finds the tool and the approval of a call.
pub(crate) async fn run<'c>(
    gate: &Toolgate,
    agent: Arc<Agent>,
    call: &'c Call,
    batch: Option<&'c SessionState>,
    call_state: &mut CallState,
) -> Result<ResolvedCall<'c>, Rejection> {
    call_state.enter_gate(Gate::Resolve);
    let tool = find_tool(&agent, call)?;
    let approval = find_named_approval(gate, call, &tool, call_state).await?;
    Ok(ResolvedCall { call, agent, tool, approval, batch })
}

/// Finds the tool, if this caller may see it.
fn find_tool(agent: &Agent, call: &Call) -> Result<Arc<ToolEntry>, Rejection> {
    if let Some(tool) =
        agent.tools.get(call.tool.as_str()).filter(|tool| tool.is_visible_to(&call.key.principal))
    {
        return Ok(Arc::clone(tool));
    }
    let mut names = agent.visible_names(&call.key.principal);
    // An entry point that runs tools does not offer tools that clients run themselves.
    if call.extension.is_some() {
        names.retain(|name| {
            agent.tools.get(*name).is_some_and(|tool| !tool.spec.is_run_by_client())
        });
    }
    let suggestion = toolgate_text::suggest::find_closest(&call.tool, names.iter().copied());
    let did_you_mean = suggestion
        .map(|name| format!("; did you mean `{name}`?"))
        .unwrap_or_else(|| ".".to_owned());
    let available = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let mut error = ToolError::from_code(
        error_code::UNKNOWN_TOOL,
        format!(
            "there is no tool `{}`{did_you_mean} Available: {available}",
            escape_for_display(&call.tool)
        ),
    );
    error.errors.push(FieldError {
        path: String::new(),
        expected: "the name of a tool".to_owned(),
        got: escape_for_display(&call.tool),
        did_you_mean: suggestion.map(str::to_owned),
    });
    Err(error.into())
}

/// Loads the approval that the call names. Its stored arguments are the ones that run.
async fn find_named_approval(
    gate: &Toolgate,
    call: &Call,
    tool: &ToolEntry,
    call_state: &mut CallState,
) -> Result<Option<Box<Approval>>, Rejection> {
    let Some(id) = &call.approval else { return Ok(None) };
    let known = gate.0.store.approval(id).await?;
    call_state.facts.approval =
        known.as_ref().map(|approval| ApprovalFact { named: true, ..approval.fact() });
    match known.filter(|approval| approval.key == call.key && approval.tool == tool.spec.name) {
        Some(approval) if approval.is_usable(call_state.started) => Ok(Some(Box::new(approval))),
        Some(approval)
            if approval.state == ApprovalState::Waiting
                && call_state.started <= approval.expires =>
        {
            Err(Rejection {
                gate: Some(Gate::Approval),
                ..handler_refusal(tool).unwrap_or_else(|| approval_waiting_error(&approval).into())
            })
        }
        // The outcome of a call made with this approval may be replayed. Gate 5 rejects
        // everything else.
        Some(approval) if call.idempotency_key.is_some() || tool.spec.once => {
            Ok(Some(Box::new(approval)))
        }
        Some(approval) => {
            Err(Rejection::at_gate(Gate::Approval, approval_unusable_error(&approval)))
        }
        None => Err(Rejection::at_gate(
            Gate::Approval,
            ToolError::from_code(
                error_code::APPROVAL_DENIED,
                format!("this session has no approval `{}` for this tool", escape_for_display(id)),
            ),
        )),
    }
}
