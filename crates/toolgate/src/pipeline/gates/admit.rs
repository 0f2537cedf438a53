//! Gate 1: may this principal act as this agent, is nothing paused, and are the arguments small
//! enough to be parsed?

use std::sync::Arc;

use crate::agent::Agent;
use crate::call::error::ToolError;
use crate::call::error_code;
use crate::call::{Arguments, Call};
use crate::ledger::row::Gate;
use crate::pipeline::Toolgate;
use crate::pipeline::call_state::CallState;
use crate::pipeline::rejection::{Rejection, forbidden_rejection, paused_target_error};

/// Checks that the principal may act as this agent, that nothing is paused, and that
/// the arguments are not too large.
pub(crate) async fn run(
    gate: &Toolgate,
    call: &Call,
    call_state: &mut CallState,
) -> Result<Arc<Agent>, Rejection> {
    call_state.enter_gate(Gate::Admit);
    if let Some(why) = &call.transport_rejection {
        (call_state.facts.turned_away, call_state.facts.misread) =
            (Some(why.clone()), call.is_unparsable);
        let error = if call.is_unparsable {
            ToolError::from_code(error_code::INVALID_REQUEST, why.clone())
        } else {
            ToolError::from_code(error_code::FORBIDDEN, why.clone())
        };
        return Err(error.into());
    }
    let agent = Arc::clone(
        gate.0.agents.get(&call.key.agent).ok_or_else(|| forbidden_rejection(&call.key))?,
    );
    call_state.config = agent.definition_digest;
    if agent.principals.as_ref().is_some_and(|allowed| !allowed.contains(&*call.key.principal)) {
        return Err(forbidden_rejection(&call.key));
    }
    // Do not reveal whether a tool is paused to a caller who may not see the tool.
    let is_visible = agent
        .tools
        .get(call.tool.as_str())
        .is_none_or(|tool| tool.is_visible_to(&call.key.principal));
    let tool = if is_visible { Arc::clone(&call_state.tool) } else { Arc::from("") };
    if gate.0.store.may_be_paused()
        && let Some((target, why)) = gate.0.store.find_pause(&call.key, &tool).await?
    {
        let error = paused_target_error(&target, &why);
        call_state.facts.paused = Some((target, why));
        return Err(error.into());
    }
    let exceeded = match &call.arguments {
        Arguments::Text(text) => toolgate_json::find_exceeded_bound(text, &agent.bounds),
        Arguments::Value(value) => {
            toolgate_json::find_exceeded_bound_of_value(value, &agent.bounds)
        }
    };
    match exceeded {
        Some(why) => Err(ToolError::from_code(
            error_code::PAYLOAD_TOO_LARGE,
            format!("the arguments are too large: {why}"),
        )
        .into()),
        None => Ok(agent),
    }
}
