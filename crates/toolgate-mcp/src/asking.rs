//! What clients are asked, and how their answers get back to whoever asked.

use rmcp::model::*;
use rmcp::service::Peer;
use rmcp::{ErrorData, RoleServer};
use serde_json::Value;

use crate::door::passed;
use crate::upstream::{FromUpstream, is_invisible};

/// Most letters of a call that a person reads in a question.
const LONGEST: usize = 2_000;

/// What a person is asked; `None` where that does not fit, or cannot be seen as it is. Nobody approves what they were not shown.
pub(crate) fn question(approval: &toolgate::store::Approval) -> Option<ElicitRequestParams> {
    let shown = serde_json::to_string_pretty(&approval.shown).ok()?;
    if shown.chars().count() > LONGEST || shown.chars().any(is_invisible) {
        return None;
    }
    let message = format!("{}\n\nThe agent wants to call `{}` with\n{shown}", approval.reason, approval.tool);
    let schema = ElicitationSchema::builder().required_bool("approve").build().ok()?;
    Some(ElicitRequestParams::FormElicitationParams { meta: None, message, requested_schema: schema })
}

/// Asks a client of an earlier revision, in the middle of its request.
pub(crate) async fn ask(question: FromUpstream, peer: &Peer<RoleServer>) {
    let cannot = |error: rmcp::ServiceError| passed(error);
    match question {
        FromUpstream::Elicit(params, reply) => {
            let _ = reply.send(peer.create_elicitation(*params).await.map_err(cannot));
        }
        FromUpstream::Sample(params, reply) => {
            let _ = reply.send(peer.create_message(*params).await.map_err(cannot));
        }
        FromUpstream::Roots(reply) => {
            let _ = reply.send(peer.list_roots().await.map_err(cannot));
        }
        FromUpstream::Inputs(requests, reply) => {
            let _ = reply.send(ask_all(requests, peer).await);
        }
        FromUpstream::Progress(_) | FromUpstream::Log(_) => {}
    }
}

/// Asks a client of an earlier revision one thing after the other.
async fn ask_all(requests: InputRequests, peer: &Peer<RoleServer>) -> Result<InputResponses, ErrorData> {
    let unread = |_| ErrorData::internal_error("the client's answer cannot be passed on", None);
    let mut responses = InputResponses::new();
    for (key, request) in requests {
        let said = match request {
            InputRequest::Elicitation(request) => serde_json::to_value(peer.create_elicitation(request.params).await.map_err(passed)?),
            InputRequest::CreateMessage(request) => serde_json::to_value(peer.create_message(request.params).await.map_err(passed)?),
            InputRequest::ListRoots(_) => serde_json::to_value(peer.list_roots().await.map_err(passed)?),
            _ => return Err(ErrorData::invalid_request("this is not known here", None)),
        };
        responses.insert(key, said.map_err(unread)?);
    }
    Ok(responses)
}

/// Whether a client can be asked this.
pub(crate) fn can_answer(question: &FromUpstream, capabilities: &ClientCapabilities) -> bool {
    let can = |request: &InputRequest| match request {
        InputRequest::Elicitation(_) => capabilities.elicitation.is_some(),
        InputRequest::CreateMessage(_) => capabilities.sampling.is_some(),
        InputRequest::ListRoots(_) => capabilities.roots.is_some(),
        _ => false,
    };
    match question {
        FromUpstream::Elicit(..) => capabilities.elicitation.is_some(),
        FromUpstream::Sample(..) => capabilities.sampling.is_some(),
        FromUpstream::Roots(_) => capabilities.roots.is_some(),
        FromUpstream::Inputs(requests, _) => requests.values().all(can),
        FromUpstream::Progress(_) | FromUpstream::Log(_) => true,
    }
}

/// The client cannot be asked.
pub(crate) fn decline(question: FromUpstream) {
    let cannot = || ErrorData::invalid_request("the client cannot be asked this", None);
    match question {
        FromUpstream::Elicit(_, reply) => drop(reply.send(Err(cannot()))),
        FromUpstream::Sample(_, reply) => drop(reply.send(Err(cannot()))),
        FromUpstream::Roots(reply) => drop(reply.send(Err(cannot()))),
        FromUpstream::Inputs(_, reply) => drop(reply.send(Err(cannot()))),
        FromUpstream::Progress(_) | FromUpstream::Log(_) => {}
    }
}

/// Gives an upstream what a client has said.
pub(crate) fn reply(asked: FromUpstream, said: Value) {
    let unread = || ErrorData::invalid_params("the client's answer cannot be read", None);
    match asked {
        FromUpstream::Elicit(_, reply) => {
            let _ = reply.send(serde_json::from_value(said).map_err(|_| unread()));
        }
        FromUpstream::Sample(_, reply) => {
            let _ = reply.send(serde_json::from_value(said).map_err(|_| unread()));
        }
        FromUpstream::Roots(reply) => {
            let _ = reply.send(serde_json::from_value(said).map_err(|_| unread()));
        }
        FromUpstream::Inputs(..) | FromUpstream::Progress(_) | FromUpstream::Log(_) => {}
    }
}
