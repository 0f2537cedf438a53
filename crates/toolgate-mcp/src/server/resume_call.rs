//! Suspends calls that wait for their client, and resumes them with the client's answers.

use rmcp::ErrorData;
use rmcp::model::*;
use serde_json::json;
use toolgate::{SessionKey, ToolSpec};

use crate::gateway::lock;
use crate::server::elicitation::{CLIENT_APPROVER, answer_upstream, can_client_approve};
use crate::server::handler::McpServer;
use crate::server::identity;
use crate::server::suspended_calls::{RunningCall, SuspendReason};
use crate::server::tool_call::{APPROVAL_QUESTION_NAME, CallClient, build_call, call_digest};
use crate::upstream::UpstreamEvent;

/// Name of a question of an upstream of an earlier revision.
const INPUT_QUESTION_NAME: &str = "input";

impl McpServer {
    /// Applies the answer of the client's user.
    ///
    /// The current configuration judges the approved call.
    pub(super) async fn apply_elicitation(
        &self,
        key: SessionKey,
        request: &CallToolRequestParams,
        id: &str,
        result: &ElicitResult,
        refused: CallToolResult,
        client: &CallClient<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let running = self.gateway.active_config();
        match identity::resolve_session(
            &self.gateway,
            &running,
            self.stdio_identity.as_ref(),
            client,
        ) {
            Ok(now) if now == key => {}
            // The caller may have lost its access, or may use another session now.
            other => {
                let error = ErrorData::invalid_request(
                    "this is another session than the one that was asked",
                    None,
                );
                return Err(self
                    .reject_invalid(key, request, client, other.err().unwrap_or(error))
                    .await);
            }
        }
        let is_approved = result.action == ElicitationAction::Accept
            && result.content.as_ref().and_then(|content| content.get("approve"))
                == Some(&json!(true));
        let is_refused = result.action == ElicitationAction::Decline
            || (result.action == ElicitationAction::Accept && !is_approved);
        let approval = running.runtime.approval(id).await.ok().flatten();
        let effect = running
            .runtime
            .agent(&key.agent)
            .and_then(|agent| agent.tool(&request.name))
            .map(ToolSpec::effect);
        // The current definition of the tool decides which approver may answer.
        let Some(approval) = approval.filter(|approval| can_client_approve(approval, effect))
        else {
            return Ok(refused.into());
        };
        let by = if approval.approvers.is_empty() {
            format!("the client of {}", key.principal)
        } else {
            CLIENT_APPROVER.to_owned()
        };
        // If the user closes the question, the approval stays open and the call stays denied.
        let counts = (is_approved || is_refused)
            && matches!(running.runtime.answer_approval(id, is_approved, &by).await, Ok(true));
        if !counts {
            return Ok(refused.into());
        }
        // Continues the same call for either answer. The approval gate denies a refused call and
        // records its row.
        match build_call(key.clone(), request, client) {
            Ok(call) => Box::pin(self.run_call(&running, call.approval(id), request, client)).await,
            Err(error) => Err(self.reject_invalid(key, request, client, error).await),
        }
    }

    /// Resumes a suspended call with the answers of its client.
    pub(super) async fn resume_call(
        &self,
        key: SessionKey,
        request: CallToolRequestParams,
        reason: SuspendReason,
        client: &CallClient<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let mut responses = request.input_responses.clone().unwrap_or_default();
        match reason {
            SuspendReason::Approval { id, digest: shown, refused } => {
                if shown != call_digest(&request) {
                    // The client edited the call, so this is a new call.
                    return self
                        .start_call(&self.gateway.active_config(), key, &request, client)
                        .await;
                }
                let result: Option<ElicitResult> = responses
                    .remove(APPROVAL_QUESTION_NAME)
                    .and_then(|result| serde_json::from_value(result).ok());
                match result {
                    Some(result) => {
                        self.apply_elicitation(key, &request, &id, &result, *refused, client).await
                    }
                    None => {
                        let error = ErrorData::invalid_params(
                            "the answer to the approval question is missing",
                            None,
                        );
                        Err(self.reject_invalid(key, &request, client, error).await)
                    }
                }
            }
            SuspendReason::Upstream(mut running_call) => {
                let all_at_once =
                    matches!(running_call.question, None | Some(UpstreamEvent::Inputs(..)));
                let wrong = match running_call.digest == call_digest(&request) {
                    false => Some("the call differs from the one that was asked about"),
                    true if !all_at_once && !responses.contains_key(INPUT_QUESTION_NAME) => {
                        Some("the answer is missing")
                    }
                    true => None,
                };
                if let Some(why) = wrong {
                    // The suspended call cannot be resumed any more.
                    running_call.cancel.cancel();
                    return Err(self
                        .reject_invalid(key, &request, client, ErrorData::invalid_params(why, None))
                        .await);
                }
                *lock(&running_call.guard) = Some(self.inflight_guard(client));
                match running_call.question.take() {
                    // The upstream decides whether the answers are complete.
                    Some(UpstreamEvent::Inputs(question, reply)) => {
                        responses.retain(|name, _| question.contains_key(name));
                        reply.send(Ok(responses));
                    }
                    Some(question) => answer_upstream(
                        question,
                        responses.remove(INPUT_QUESTION_NAME).unwrap_or_default(),
                    ),
                    None => {}
                }
                self.drive_call(key, &request, *running_call, client).await
            }
        }
    }

    /// Suspends a call until its client answers the upstream's question.
    pub(super) fn suspend_call(
        &self,
        key: &SessionKey,
        question: UpstreamEvent,
        running_call: RunningCall,
        digest: String,
    ) -> Option<CallToolResponse> {
        let single = |request| InputRequests::from([(INPUT_QUESTION_NAME.to_owned(), request)]);
        let requests = match &question {
            UpstreamEvent::Elicit(params, _) => {
                single(InputRequest::Elicitation(ElicitRequest::new((**params).clone())))
            }
            UpstreamEvent::Sample(params, _) => {
                single(InputRequest::CreateMessage(CreateMessageRequest::new((**params).clone())))
            }
            UpstreamEvent::Roots(_) => single(InputRequest::ListRoots(ListRootsRequest::default())),
            UpstreamEvent::Inputs(requests, _) => requests.clone(),
            UpstreamEvent::Progress(_) | UpstreamEvent::Log(_) => return None,
        };
        let task = running_call.task.spawn();
        let reason = SuspendReason::Upstream(Box::new(RunningCall {
            question: Some(question),
            digest,
            task,
            ..running_call
        }));
        let state = self.gateway.0.suspended.suspend(key, reason)?;
        Some(CallToolResponse::InputRequired(InputRequiredResult::new(Some(requests), Some(state))))
    }
}
