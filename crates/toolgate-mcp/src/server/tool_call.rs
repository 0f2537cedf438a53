//! Runs a tool call for a client: starts it, relays the upstream's questions, and renders the
//! result.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use opentelemetry::trace::FutureExt as _;
use rmcp::ErrorData;
use rmcp::model::*;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use toolgate::call::error_code;
use toolgate::{Agent, Answer, Arguments, Call, SessionKey, ToolSpec};

use crate::gateway::ActiveConfig;
use crate::mcp_convert;
use crate::server::client_capabilities::missing_capability_error;
use crate::server::elicitation::{
    approval_question, ask_user, can_answer, can_client_approve, can_elicit, decline_question,
    forward_question,
};
use crate::server::handler::McpServer;
use crate::server::http::admission::ConcurrencyPermit;
use crate::server::identity;
use crate::server::malformed_call;
use crate::server::suspended_calls::{CallTask, InflightGuard, RunningCall, SuspendReason};
use crate::upstream::{CallChannel, UpstreamEvent};

pub(crate) use crate::server::client_capabilities::{CallClient, ClientChannel};

/// Idempotency key: calls with the same key are one call.
const IDEMPOTENCY_KEY_META: &str = "toolgate/idempotencyKey";
/// ID of an approval to use.
const APPROVAL_META: &str = "toolgate/approval";
/// Number of the model's turn.
const TURN_META: &str = "toolgate/turn";
/// Why the model stopped to make the call.
const STOP_REASON_META: &str = "toolgate/stopReason";
/// Name of the approval question.
pub(super) const APPROVAL_QUESTION_NAME: &str = "toolgate_approval";

/// Maximum number of upstream messages that wait for the client.
pub(crate) const CLIENT_CHANNEL_CAPACITY: usize = 256;
/// Maximum length of an idempotency key or approval ID, in characters.
pub(crate) const MAX_IDEMPOTENCY_KEY_CHARS: usize = 1_024;
/// How long the client's user may take to answer an approval question.
const APPROVAL_ANSWER_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// Returns whether a key is too long, in characters as in `maxLength` of the OpenAPI description.
pub(crate) fn is_key_too_long(key: &str) -> bool {
    key.chars().count() > MAX_IDEMPOTENCY_KEY_CHARS
}

/// Builds the call that a request asks for.
pub(super) fn build_call(
    key: SessionKey,
    request: &CallToolRequestParams,
    client: &CallClient<'_>,
) -> Result<Call, ErrorData> {
    // Ignoring an invalid key would drop the guarantee that it stands for.
    let text = |name: &str| match client.meta.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if !text.is_empty() => Ok(Some(text.clone())),
        Some(_) => Err(ErrorData::invalid_params(format!("`{name}` must be text"), None)),
    };
    let short = |name: &str| match text(name)? {
        Some(text) if is_key_too_long(&text) => Err(ErrorData::invalid_params(
            format!("`{name}` may have at most {MAX_IDEMPOTENCY_KEY_CHARS} characters"),
            None,
        )),
        text => Ok(text),
    };
    let arguments = match client.raw_arguments {
        Some(raw) => Arguments::Text(raw.0.to_vec()),
        None => {
            Arguments::Value(request.arguments.clone().map_or_else(|| json!({}), Value::Object))
        }
    };
    let mut call = Call::new(key, request.name.to_string(), arguments).client_id(client.id.clone());
    call.idempotency_key = short(IDEMPOTENCY_KEY_META)?;
    call.approval = short(APPROVAL_META)?;
    call.stop_reason = text(STOP_REASON_META)?.map(|why| why.chars().take(256).collect());
    call.turn = match client.meta.get(TURN_META) {
        None | Some(Value::Null) => None,
        Some(turn) => Some(turn.as_u64().ok_or_else(|| {
            ErrorData::invalid_params(format!("`{TURN_META}` must be a whole number"), None)
        })?),
    };
    Ok(call)
}

/// Returns whether a call uses an approval with other arguments than the approved ones.
///
/// Otherwise the approved arguments would run without notice to the client.
pub(crate) async fn has_unapproved_arguments(running: &ActiveConfig, call: &Call) -> bool {
    let Some(id) = &call.approval else { return false };
    let arguments = match &call.arguments {
        Arguments::Value(arguments) => arguments,
        Arguments::Text(_) => &Value::Null,
    };
    if arguments.as_object().is_some_and(JsonObject::is_empty) {
        return false;
    }
    match running.runtime.approval(id).await {
        Ok(Some(approval)) => {
            approval.key == call.key
                && *approval.tool == *call.tool
                && running.runtime.is_for_other_arguments(&approval, arguments)
        }
        // The approval gate reports everything else.
        _ => false,
    }
}

/// Computes the digest of a call, to detect that the client edited it.
pub(super) fn call_digest(request: &CallToolRequestParams) -> String {
    let arguments = request.arguments.clone().map_or_else(|| json!({}), Value::Object);
    toolgate_json::Digest::of(&toolgate_json::to_canonical_bytes(&json!([request.name, arguments])))
        .to_string()
}

impl McpServer {
    /// Handles a `tools/call` request.
    pub(crate) async fn handle_call(
        &self,
        request: CallToolRequestParams,
        client: &CallClient<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        // Counted before the check, so that shutdown waits for this call.
        let _counted = self.gateway.count_call();
        if self.gateway.0.stop.is_cancelled() {
            return Err(ErrorData::internal_error("the gateway is shutting down", None));
        }
        let running = self.gateway.active_config();
        let key = match identity::resolve_call_session(
            &self.gateway,
            &running,
            self.stdio_identity.as_ref(),
            client,
        )? {
            Ok(key) => key,
            Err((key, error)) if identity::is_invalid_error(&error) => {
                return Err(self.reject_invalid(key, &request, client, error).await);
            }
            // The caller is rejected, and the rejection is recorded.
            Err((key, refused)) => {
                return match build_call(key.clone(), &request, client) {
                    Ok(call) => {
                        self.run_call(
                            &running,
                            call.with_transport_rejection(refused.message),
                            &request,
                            client,
                        )
                        .await
                    }
                    Err(error) => Err(self.reject_invalid(key, &request, client, error).await),
                };
            }
        };
        let suspended = &self.gateway.0.suspended;
        let unrequested = || {
            ErrorData::invalid_params("this answer was not requested, or was already given", None)
        };
        let reason = match (&request.request_state, &request.input_responses) {
            (Some(state), _) => suspended.resume(&key, state).map(Some).ok_or_else(unrequested),
            // An approval answer without a question has no effect.
            (None, Some(responses)) if responses.contains_key(APPROVAL_QUESTION_NAME) => {
                Err(unrequested())
            }
            // Some clients omit the request state. If no suspended call matches, the answers are
            // ignored and the question is asked again.
            (None, Some(_)) => Ok(suspended.resume_without_state(&key, &call_digest(&request))),
            (None, None) => Ok(None),
        };
        match reason {
            Ok(Some(reason)) => self.resume_call(key, request, reason, client).await,
            Ok(None) => self.start_call(&running, key, &request, client).await,
            Err(error) => Err(self.reject_invalid(key, &request, client, error).await),
        }
    }

    /// Starts a call from a request.
    pub(super) async fn start_call(
        &self,
        running: &ActiveConfig,
        key: SessionKey,
        request: &CallToolRequestParams,
        client: &CallClient<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let call = match build_call(key.clone(), request, client) {
            Ok(call) => call,
            Err(error) => return Err(self.reject_invalid(key, request, client, error).await),
        };
        if has_unapproved_arguments(running, &call).await {
            let error = ErrorData::invalid_params(
                "the approval is for other arguments; send the approved arguments, or none",
                None,
            );
            return Err(self.reject_invalid(key, request, client, error).await);
        }
        self.run_call(running, call, request, client).await
    }

    /// Rejects an invalid call request and records a row.
    pub(super) async fn reject_invalid(
        &self,
        key: SessionKey,
        request: &CallToolRequestParams,
        client: &CallClient<'_>,
        mut error: ErrorData,
    ) -> ErrorData {
        let _counted = self.gateway.count_call();
        let call = Call::new(key, request.name.to_string(), json!({})).client_id(client.id.clone());
        let answer =
            malformed_call::record_rejected_call(&self.gateway.runtime(), call, &error.message)
                .await;
        error.data = Some(malformed_call::error_contract(&error.message, Some(&answer)));
        error
    }

    /// Rejects a `tools/call` request whose parameters have the wrong shape.
    pub(crate) async fn reject_malformed(&self, tool: &str, client: &CallClient<'_>) -> ErrorData {
        let error = ErrorData::invalid_params("cannot read the parameters of this call", None);
        let running = self.gateway.active_config();
        match identity::resolve_call_session(
            &self.gateway,
            &running,
            self.stdio_identity.as_ref(),
            client,
        ) {
            Ok(Ok(key) | Err((key, _))) => {
                self.reject_invalid(
                    key,
                    &CallToolRequestParams::new(tool.to_owned()),
                    client,
                    error,
                )
                .await
            }
            Err(refused) => refused,
        }
    }

    /// Creates the channel between a client and the upstream of its call.
    fn open_channel(
        &self,
        to_client: mpsc::Sender<UpstreamEvent>,
        client: &CallClient<'_>,
    ) -> CallChannel {
        let capabilities = client.capabilities.clone().unwrap_or_default();
        CallChannel {
            to_client,
            meta: client.meta.clone(),
            capabilities,
            log_level: self.log_level(client),
            raw_result: Mutex::default(),
        }
    }

    /// Creates the guard that counts a call as running and holds its permit.
    pub(super) fn inflight_guard(&self, client: &CallClient<'_>) -> InflightGuard {
        let permit = client
            .parts
            .and_then(|parts| parts.extensions.get::<Arc<ConcurrencyPermit>>())
            .cloned();
        InflightGuard::new(self.gateway.count_call(), permit)
    }

    /// Starts a call and drives it to its end.
    pub(super) async fn run_call(
        &self,
        running: &ActiveConfig,
        call: Call,
        request: &CallToolRequestParams,
        client: &CallClient<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let (to_client, events) = mpsc::channel(CLIENT_CHANNEL_CAPACITY);
        let channel = Arc::new(self.open_channel(to_client, client));
        let gate = running.runtime.clone();
        let key = call.key.clone();
        let cancel = CancellationToken::new();
        let call = call.with_extension(Arc::clone(&channel)).cancelled_by(cancel.clone());
        // This request is itself counted, so a higher count means other requests.
        let among_others = *self.gateway.0.inflight.borrow() > 1;
        // Counted until the call ends, even if its client disconnects.
        let guard = Arc::new(Mutex::new(Some(self.inflight_guard(client))));
        let (held_guard, busy) =
            (Arc::clone(&guard), self.gateway.0.default_sessions.use_session(&key));
        let work = async move {
            let answer = gate.call(call).await;
            drop((held_guard, busy));
            answer
        };
        let task =
            CallTask::new(work.with_context(crate::trace_context::context_of_request(client)));
        // A call that may wait for its client runs in a separate task. So does a concurrent call,
        // because waking a task after a ledger write costs less than waking its connection.
        let task = if among_others || matches!(client.channel, ClientChannel::Peer(_)) {
            task.spawn()
        } else {
            task
        };
        let running_call = RunningCall {
            task,
            events,
            channel,
            cancel,
            question: None,
            digest: String::new(),
            guard,
        };
        self.drive_call(key, request, running_call, client).await
    }

    /// Drives a call until it ends or its client must answer a question.
    pub(super) async fn drive_call(
        &self,
        key: SessionKey,
        request: &CallToolRequestParams,
        mut running_call: RunningCall,
        client: &CallClient<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let modern = client.is_modern;
        // A disconnect cancels the call; a question to the client does not.
        let cancel_guard = running_call.cancel.clone().drop_guard();
        let mut pending_question = None;
        loop {
            let busy = pending_question.is_some();
            tokio::select! {
                biased;
                () = client.disconnected.cancelled(), if !running_call.cancel.is_cancelled() => running_call.cancel.cancel(),
                () = poll_optional(&mut pending_question), if busy => pending_question = None,
                Some(event) = running_call.events.recv(), if !busy => match event {
                    UpstreamEvent::Progress(progress) => self.send_progress(progress, client).await,
                    UpstreamEvent::Log(message) => self.send_log(message, client).await,
                    question if !can_answer(&question, &running_call.channel.capabilities) => decline_question(question),
                    // If no more calls can be suspended, decline. The upstream decides how the call
                    // continues.
                    question if modern && !self.gateway.0.suspended.has_room(&key) => decline_question(question),
                    question if modern => match self.suspend_call(&key, question, running_call, call_digest(request)) {
                        Some(response) => {
                            cancel_guard.disarm();
                            return Ok(response);
                        }
                        None => return Err(ErrorData::internal_error("too many suspended calls", None)),
                    },
                    question => match client.channel {
                        ClientChannel::Peer(peer) => pending_question = Some(Box::pin(forward_question(question, peer, &self.questions))),
                        ClientChannel::ResponseStream(_) => decline_question(question),
                    },
                },
                answer = &mut running_call.task => {
                    drop(pending_question);
                    cancel_guard.disarm();
                    let answer = answer.ok_or_else(|| ErrorData::internal_error("the call ended without a result", None))?;
                    // Delivers messages that the upstream sent before its answer.
                    while let Ok(event) = running_call.events.try_recv() {
                        self.deliver_event(event, client).await;
                    }
                    return self.render_answer(key, request, answer, &running_call.channel, client).await;
                }
            }
        }
    }

    /// Renders the outcome of a call.
    ///
    /// If the call needs an approval and the client supports questions, its user is asked.
    async fn render_answer(
        &self,
        key: SessionKey,
        request: &CallToolRequestParams,
        answer: Answer,
        channel: &CallChannel,
        client: &CallClient<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        if let Some(error) = missing_capability_error(&answer, client) {
            return Err(error);
        }
        let running = self.gateway.active_config();
        let agent = running.runtime.agent(&key.agent);
        // A tool that is hidden from the caller looks like a tool that does not exist.
        let spec = agent.and_then(|agent| agent.tool_for(&key.principal, &request.name));
        // A caller that may not act as the agent must not learn the schemas of its tools.
        let forbidden =
            answer.outcome.error().is_some_and(|error| error.code == error_code::FORBIDDEN);
        let has_schema = spec.is_some_and(|spec| spec.output_schema().is_some()) && !forbidden;
        let refused = mcp_convert::render_result(
            &answer,
            channel,
            has_schema,
            agent.map(Agent::dialect).unwrap_or_default(),
        );
        let approval_ref = answer
            .outcome
            .error()
            .filter(|error| error.code == error_code::APPROVAL_REQUIRED)
            .and_then(|error| error.approval.clone());
        let Some(approval_ref) = approval_ref else { return Ok(refused.into()) };
        let Ok(Some(approval)) = running.runtime.approval(&approval_ref.id).await else {
            return Ok(refused.into());
        };
        let effect = spec.map(ToolSpec::effect);
        let can_ask = |params: &ElicitRequestParams| {
            client.capabilities.as_ref().is_some_and(|can| can_elicit(params, can))
        };
        let Some(params) = approval_question(&approval)
            .filter(|params| can_ask(params) && can_client_approve(&approval, effect))
        else {
            return Ok(refused.into());
        };
        if client.is_modern {
            let suspended = self.gateway.0.suspended.suspend(
                &key,
                SuspendReason::Approval {
                    id: approval_ref.id,
                    digest: call_digest(request),
                    refused: Box::new(refused.clone()),
                },
            );
            let Some(state) = suspended else { return Ok(refused.into()) };
            let requests = InputRequests::from([(
                APPROVAL_QUESTION_NAME.to_owned(),
                InputRequest::Elicitation(ElicitRequest::new(params)),
            )]);
            // The call is denied until it is approved. The denial has a row, which the metadata
            // names.
            let mut meta = MetaObject::default();
            mcp_convert::add_receipt(&mut meta, &answer);
            return Ok(CallToolResponse::InputRequired(
                InputRequiredResult::new(Some(requests), Some(state)).with_meta(meta),
            ));
        }
        let ClientChannel::Peer(peer) = client.channel else { return Ok(refused.into()) };
        let reply = tokio::select! {
            biased;
            // The call is denied until it is approved. During shutdown no approved call could
            // start, so do not wait.
            () = self.gateway.0.stop.cancelled() => return Ok(refused.into()),
            () = client.disconnected.cancelled() => return Ok(refused.into()),
            reply = tokio::time::timeout(APPROVAL_ANSWER_TIMEOUT, Box::pin(ask_user(params, peer, &self.questions))) => reply,
        };
        let Ok(Ok(reply)) = reply else { return Ok(refused.into()) };
        self.apply_elicitation(key, request, &approval_ref.id, &reply, refused, client).await
    }
}

/// Polls the pending future, or waits forever if there is none.
pub(crate) async fn poll_optional<F: Future<Output = ()> + Unpin>(future: &mut Option<F>) {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
