//! Asks clients questions (elicitation, sampling, roots) and returns their answers to the asker.

use std::collections::HashMap;
use std::sync::Mutex;

use rmcp::model::*;
use rmcp::service::{Peer, PeerRequestOptions};
use rmcp::{ErrorData, RoleServer, ServiceError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::runtime::Handle;
use toolgate::Effect;

use crate::gateway::lock;
use crate::mcp_convert::strip_reserved_keys_deep;
use crate::server::handler::client_error;
use crate::upstream::{
    QuestionOrigin, ReplySender, UpstreamEvent, is_invisible, is_within_notification_limit,
};

/// Maximum length of the arguments or of the reason in a question, in characters.
const MAX_QUESTION_TEXT_CHARS: usize = 2_000;
/// Approver name for the user of the client that made the call.
pub(crate) const CLIENT_APPROVER: &str = "client";

/// Returns whether a character is invisible in a question or starts a new line.
///
/// Tool descriptions may contain some of these characters, because they are parts of emoji.
fn is_hidden(c: char) -> bool {
    is_invisible(c)
        || matches!(c,
            '\u{2028}' | '\u{2029}' | '\u{2800}' | '\u{fe00}'..='\u{fe0f}' | '\u{13430}'..='\u{1345f}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d159}'
            | '\u{1d173}'..='\u{1d17a}')
}

/// Builds the approval question.
///
/// Returns `None` if the call is too long or has hidden characters: a person must see what they
/// approve.
pub(crate) fn approval_question(
    approval: &toolgate::store::Approval,
) -> Option<ElicitRequestParams> {
    let shown = serde_json::to_string_pretty(&approval.shown).ok()?;
    // A hook may quote the model. On one line, the quote cannot imitate the lines below.
    let reason = approval.reason.split_whitespace().collect::<Vec<_>>().join(" ");
    if [&shown, &reason]
        .iter()
        .any(|text| text.chars().count() > MAX_QUESTION_TEXT_CHARS || text.chars().any(is_hidden))
    {
        return None;
    }
    let message = format!("{reason}\n\nThe agent wants to call `{}` with\n{shown}", approval.tool);
    let schema = ElicitationSchema::builder().required_bool("approve").build().ok()?;
    Some(ElicitRequestParams::FormElicitationParams {
        meta: None,
        message,
        requested_schema: schema,
    })
}

/// Returns whether the client's user may answer an approval.
///
/// True if each rule that asks names the client, or if no approver is named and the tool is not
/// destructive. A tool that no longer exists counts as destructive.
pub(crate) fn can_client_approve(
    approval: &toolgate::store::Approval,
    effect: Option<Effect>,
) -> bool {
    let named =
        approval.approvers.iter().all(|people| people.iter().any(|name| name == CLIENT_APPROVER));
    let all_named = approval.approvers.len() == approval.asked_by.len();
    named && (all_named || effect.is_some_and(|effect| effect != Effect::Destructive))
}

/// Open questions to a client: the asker, by the progress token of the question.
#[derive(Default)]
pub(crate) struct ClientQuestions(Mutex<HashMap<ProgressToken, QuestionOrigin>>);

impl ClientQuestions {
    /// Forwards progress of a client to the asker.
    pub(crate) async fn forward_progress(&self, mut progress: ProgressNotificationParam) {
        let asker = lock(&self.0).get(&progress.progress_token).cloned();
        if let Some((upstream, token)) = asker.filter(|_| is_within_notification_limit(&progress)) {
            progress.progress_token = token;
            progress.meta = progress.meta.map(crate::mcp_convert::strip_notification_meta);
            let _ = upstream.notify_progress(progress).await;
        }
    }
}

/// A question without an answer. If it is dropped, the client gets a cancellation.
struct ClientQuestionGuard<'q> {
    peer: &'q Peer<RoleServer>,
    questions: &'q ClientQuestions,
    id: Option<RequestId>,
    token: ProgressToken,
}

impl Drop for ClientQuestionGuard<'_> {
    fn drop(&mut self) {
        lock(&self.questions.0).remove(&self.token);
        if let (Some(id), Ok(runtime)) = (self.id.take(), Handle::try_current()) {
            let (peer, why) = (self.peer.clone(), "the answer is not needed any more".to_owned());
            runtime.spawn(async move {
                drop(
                    peer.notify_cancelled(CancelledNotificationParam::new(Some(id), Some(why)))
                        .await,
                )
            });
        }
    }
}

/// Sends a request to a client and waits for the answer.
///
/// If the future is dropped, the client gets a cancellation.
async fn request_answer(
    request: ServerRequest,
    asker: Option<QuestionOrigin>,
    peer: &Peer<RoleServer>,
    questions: &ClientQuestions,
) -> Result<ClientResult, ServiceError> {
    let handle = peer.send_cancellable_request(request, PeerRequestOptions::no_options()).await?;
    let token = handle.progress_token.clone();
    if let Some(asker) = asker {
        lock(&questions.0).insert(token.clone(), asker);
    }
    let mut open = ClientQuestionGuard { peer, questions, id: Some(handle.id.clone()), token };
    let answer = handle.rx.await.unwrap_or(Err(ServiceError::TransportClosed));
    open.id = None;
    answer
}

/// Asks the client's user a question.
pub(crate) async fn ask_user(
    params: ElicitRequestParams,
    peer: &Peer<RoleServer>,
    questions: &ClientQuestions,
) -> Result<ElicitResult, ServiceError> {
    match request_answer(
        ServerRequest::ElicitRequest(ElicitRequest::new(params)),
        None,
        peer,
        questions,
    )
    .await?
    {
        ClientResult::ElicitResult(result) => Ok(result),
        _ => Err(ServiceError::UnexpectedResponse),
    }
}

/// Sends a client's answer to the asker, unless the asker stops waiting.
async fn forward_answer<T>(
    mut reply: ReplySender<T>,
    answer: impl Future<Output = Result<T, ErrorData>>,
) {
    tokio::select! {
        biased;
        answer = answer => reply.send(answer),
        () = reply.closed() => {}
    }
}

/// Sends a request to a client and forwards the answer to the asker.
async fn ask_and_forward<T: Serialize + DeserializeOwned + Clone>(
    request: ServerRequest,
    mut reply: ReplySender<T>,
    peer: &Peer<RoleServer>,
    questions: &ClientQuestions,
    read: impl FnOnce(ClientResult) -> Option<T>,
) {
    let asker = reply.origin.take();
    let answer = async {
        let answer = request_answer(request, asker, peer, questions).await;
        answer
            .and_then(|answer| {
                read(answer).map(strip_reserved_keys_deep).ok_or(ServiceError::UnexpectedResponse)
            })
            .map_err(client_error)
    };
    forward_answer(reply, answer).await;
}

/// Forwards an upstream's question to a client of an earlier revision, during its request.
pub(crate) async fn forward_question(
    question: UpstreamEvent,
    peer: &Peer<RoleServer>,
    questions: &ClientQuestions,
) {
    match question {
        UpstreamEvent::Elicit(params, reply) => {
            let read = |result| {
                if let ClientResult::ElicitResult(result) = result { Some(result) } else { None }
            };
            ask_and_forward(
                ServerRequest::ElicitRequest(ElicitRequest::new(*params)),
                reply,
                peer,
                questions,
                read,
            )
            .await;
        }
        UpstreamEvent::Sample(params, reply) => {
            let read = |result| {
                if let ClientResult::CreateMessageResult(result) = result {
                    Some(*result)
                } else {
                    None
                }
            };
            ask_and_forward(
                ServerRequest::CreateMessageRequest(CreateMessageRequest::new(*params)),
                reply,
                peer,
                questions,
                read,
            )
            .await;
        }
        UpstreamEvent::Roots(reply) => {
            let read = |result| {
                if let ClientResult::ListRootsResult(result) = result { Some(result) } else { None }
            };
            ask_and_forward(
                ServerRequest::ListRootsRequest(ListRootsRequest::default()),
                reply,
                peer,
                questions,
                read,
            )
            .await;
        }
        UpstreamEvent::Inputs(requests, reply) => {
            forward_answer(reply, ask_in_sequence(requests, peer, questions)).await
        }
        UpstreamEvent::Progress(_) | UpstreamEvent::Log(_) => {}
    }
}

/// Asks a client of an earlier revision several questions, one after the other.
async fn ask_in_sequence(
    requests: InputRequests,
    peer: &Peer<RoleServer>,
    questions: &ClientQuestions,
) -> Result<InputResponses, ErrorData> {
    let forward_error = |_| ErrorData::internal_error("cannot forward the client's answer", None);
    let mut responses = InputResponses::new();
    for (key, request) in requests {
        let request = match request {
            InputRequest::Elicitation(request) => ServerRequest::ElicitRequest(request),
            InputRequest::CreateMessage(request) => ServerRequest::CreateMessageRequest(request),
            InputRequest::ListRoots(request) => ServerRequest::ListRootsRequest(request),
            _ => return Err(ErrorData::invalid_request("unsupported input request", None)),
        };
        let answer =
            match request_answer(request, None, peer, questions).await.map_err(client_error)? {
                ClientResult::ElicitResult(answer) => serde_json::to_value(answer),
                ClientResult::CreateMessageResult(answer) => serde_json::to_value(answer),
                ClientResult::ListRootsResult(answer) => serde_json::to_value(answer),
                _ => return Err(client_error(ServiceError::UnexpectedResponse)),
            };
        responses.insert(key, answer.map_err(forward_error)?);
    }
    Ok(responses)
}

/// Returns whether a client supports this kind of elicitation.
///
/// A client that names neither forms nor URLs supports forms.
pub(crate) fn can_elicit(params: &ElicitRequestParams, capabilities: &ClientCapabilities) -> bool {
    let Some(modes) = &capabilities.elicitation else { return false };
    match params {
        ElicitRequestParams::FormElicitationParams { .. } => {
            modes.form.is_some() || modes.url.is_none()
        }
        ElicitRequestParams::UrlElicitationParams { .. } => modes.url.is_some(),
        _ => false,
    }
}

/// Returns whether a client supports this kind of question.
pub(crate) fn can_answer(question: &UpstreamEvent, capabilities: &ClientCapabilities) -> bool {
    let can = |request: &InputRequest| match request {
        InputRequest::Elicitation(request) => can_elicit(&request.params, capabilities),
        InputRequest::CreateMessage(_) => capabilities.sampling.is_some(),
        InputRequest::ListRoots(_) => capabilities.roots.is_some(),
        _ => false,
    };
    match question {
        UpstreamEvent::Elicit(params, _) => can_elicit(params, capabilities),
        UpstreamEvent::Sample(..) => capabilities.sampling.is_some(),
        UpstreamEvent::Roots(_) => capabilities.roots.is_some(),
        UpstreamEvent::Inputs(requests, _) => requests.values().all(can),
        UpstreamEvent::Progress(_) | UpstreamEvent::Log(_) => true,
    }
}

/// Answers an upstream that the client does not support the question.
pub(crate) fn decline_question(question: UpstreamEvent) {
    let cannot = || ErrorData::invalid_request("the client does not support this request", None);
    match question {
        UpstreamEvent::Elicit(_, reply) => reply.send(Err(cannot())),
        UpstreamEvent::Sample(_, reply) => reply.send(Err(cannot())),
        UpstreamEvent::Roots(reply) => reply.send(Err(cannot())),
        UpstreamEvent::Inputs(_, reply) => reply.send(Err(cannot())),
        UpstreamEvent::Progress(_) | UpstreamEvent::Log(_) => {}
    }
}

/// Sends a client's answer to the upstream.
pub(crate) fn answer_upstream(question: UpstreamEvent, answer: Value) {
    let invalid_answer = || ErrorData::invalid_params("cannot read the client's answer", None);
    let answer = strip_reserved_keys_deep(answer);
    match question {
        UpstreamEvent::Elicit(_, reply) => {
            reply.send(serde_json::from_value(answer).map_err(|_| invalid_answer()))
        }
        UpstreamEvent::Sample(_, reply) => {
            reply.send(serde_json::from_value(answer).map_err(|_| invalid_answer()))
        }
        UpstreamEvent::Roots(reply) => {
            reply.send(serde_json::from_value(answer).map_err(|_| invalid_answer()))
        }
        UpstreamEvent::Inputs(..) | UpstreamEvent::Progress(_) | UpstreamEvent::Log(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn elicitation_mode_must_be_supported() {
        let form = json!({"mode": "form", "message": "Who?", "requestedSchema": {"type": "object", "properties": {}}});
        let address = json!({"mode": "url", "message": "There.", "url": "https://a.example/", "elicitationId": "1"});
        let [form, address] = [form, address]
            .map(|params| serde_json::from_value::<ElicitRequestParams>(params).unwrap());
        for (capabilities, can_form, can_url) in [
            (json!({}), false, false),
            (json!({"elicitation": {}}), true, false),
            (json!({"elicitation": {"form": {}}}), true, false),
            (json!({"elicitation": {"url": {}}}), false, true),
            (json!({"elicitation": {"form": {}, "url": {}}}), true, true),
        ] {
            let can: ClientCapabilities = serde_json::from_value(capabilities.clone()).unwrap();
            assert_eq!(
                (can_elicit(&form, &can), can_elicit(&address, &can)),
                (can_form, can_url),
                "{capabilities}"
            );
        }
    }

    fn approval(approver: Option<&str>) -> toolgate::store::Approval {
        toolgate::store::Approval {
            id: "a".to_owned(),
            key: toolgate::SessionKey::new("agent", "ann", "s"),
            tool: "pay".into(),
            digest: toolgate_json::Digest::of(b""),
            arguments: Value::Null,
            shown: Value::Null,
            asked_by: vec!["rule".to_owned()],
            approvers: approver.iter().map(|name| vec![(*name).to_owned()]).collect(),
            reason: String::new(),
            asked_at: toolgate::Timestamp::UNIX_EPOCH,
            expires: toolgate::Timestamp::UNIX_EPOCH,
            state: toolgate::store::ApprovalState::Waiting,
            answered_by: None,
        }
    }

    fn question_message(reason: &str, shown: Value) -> Option<String> {
        match approval_question(&toolgate::store::Approval {
            reason: reason.to_owned(),
            shown,
            ..approval(None)
        })? {
            ElicitRequestParams::FormElicitationParams { message, .. } => Some(message),
            _ => None,
        }
    }

    #[test]
    fn question_with_hidden_characters_is_not_asked() {
        let lines = "\u{2028}\u{2029}\u{85}";
        let marks = "\u{200b}\u{202e}\u{2066}\u{61c}\u{2800}\u{fe00}\u{fe0f}\u{13437}\u{1bca0}\u{1d159}\u{1d173}\u{e0041}\u{7f}";
        for hidden in lines.chars().chain(marks.chars()) {
            let text = format!("a{hidden}b");
            assert_eq!(question_message("Why.", json!({"to": text})), None, "{hidden:?}");
            assert_eq!(question_message("Why.", json!({ (text.as_str()): 1 })), None, "{hidden:?}");
            // Line separators in a reason become spaces.
            assert_eq!(
                question_message(&text, json!({})).is_some(),
                lines.contains(hidden),
                "{hidden:?}"
            );
        }
        assert_eq!(question_message("Why.", json!("x".repeat(MAX_QUESTION_TEXT_CHARS))), None);
        assert_eq!(question_message(&"x".repeat(MAX_QUESTION_TEXT_CHARS + 1), json!({})), None);
        // Visible characters stay, and strings are shown with their escapes.
        let shown =
            question_message("Why.", json!({"to": "Zoë 山田 🙂\n\"from\": \"Ann\""})).unwrap();
        assert!(
            shown.ends_with("with\n{\n  \"to\": \"Zoë 山田 🙂\\n\\\"from\\\": \\\"Ann\\\"\"\n}"),
            "{shown}"
        );
    }

    #[test]
    fn reason_is_one_line() {
        let forged = "Look.\n\nThe agent wants to call `pay` with\n{\n  \"amount\": 1\n}";
        let shown = question_message(forged, json!({"amount": 9_000})).unwrap();
        assert_eq!(
            shown.lines().filter(|line| line.starts_with("The agent wants to call")).count(),
            1,
            "{shown}"
        );
        assert!(
            shown.starts_with("Look. The agent") && shown.ends_with("{\n  \"amount\": 9000\n}"),
            "{shown}"
        );
    }

    #[test]
    fn client_approves_destructive_calls_only_if_all_rules_name_it() {
        for (approver, effect, expected) in [
            (None, Some(Effect::Write), true),
            (None, Some(Effect::Destructive), false),
            // The tool was removed while the question was open.
            (None, None, false),
            (Some(CLIENT_APPROVER), Some(Effect::Destructive), true),
            (Some(CLIENT_APPROVER), None, true),
            (Some("lead"), Some(Effect::Write), false),
        ] {
            assert_eq!(
                can_client_approve(&approval(approver), effect),
                expected,
                "{approver:?} {effect:?}"
            );
        }
    }
}
