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

use crate::gateway::{ActiveConfig, lock};
use crate::mcp_convert;
use crate::server::client_capabilities::missing_capability_error;
use crate::server::elicitation::{
    CLIENT_APPROVER, answer_upstream, approval_question, ask_user, can_answer, can_client_approve,
    can_elicit, decline_question, forward_question,
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
const APPROVAL_QUESTION_NAME: &str = "toolgate_approval";
/// Name of a question of an upstream of an earlier revision.
const INPUT_QUESTION_NAME: &str = "input";
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
fn build_call(
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
    let given = match &call.arguments {
        Arguments::Value(given) => given,
        Arguments::Text(_) => &Value::Null,
    };
    if given.as_object().is_some_and(JsonObject::is_empty) {
        return false;
    }
    match running.runtime.approval(id).await {
        Ok(Some(approval)) => {
            approval.key == call.key
                && *approval.tool == *call.tool
                && running.runtime.is_for_other_arguments(&approval, given)
        }
        // The approval gate reports everything else.
        _ => false,
    }
}

/// Computes the digest of a call, to detect that the client edited it.
fn call_digest(request: &CallToolRequestParams) -> String {
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
        let parked = &self.gateway.0.suspended;
        let unasked = || {
            ErrorData::invalid_params("this answer was not requested, or was already given", None)
        };
        let waits = match (&request.request_state, &request.input_responses) {
            (Some(state), _) => parked.resume(&key, state).map(Some).ok_or_else(unasked),
            // An approval answer without a question has no effect.
            (None, Some(said)) if said.contains_key(APPROVAL_QUESTION_NAME) => Err(unasked()),
            // Some clients omit the request state. If no suspended call matches, the answers are
            // ignored and the question is asked again.
            (None, Some(_)) => Ok(parked.resume_without_state(&key, &call_digest(&request))),
            (None, None) => Ok(None),
        };
        match waits {
            Ok(Some(waits)) => self.resume_call(key, request, waits, client).await,
            Ok(None) => self.start_call(&running, key, &request, client).await,
            Err(error) => Err(self.reject_invalid(key, &request, client, error).await),
        }
    }

    /// Starts a call from a request.
    async fn start_call(
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
    async fn reject_invalid(
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

    /// Returns the lowest log level that a client wants, or `None` for no log messages.
    ///
    /// A client of 2026-07-28 or later gets log messages only if its request asks for them.
    pub(crate) fn log_level(&self, client: &CallClient<'_>) -> Option<LoggingLevel> {
        match client.is_modern {
            true => client.meta.log_level(),
            false => Some(lock(&self.level).unwrap_or(LoggingLevel::Info)),
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
    fn inflight_guard(&self, client: &CallClient<'_>) -> InflightGuard {
        let seat = client
            .parts
            .and_then(|parts| parts.extensions.get::<Arc<ConcurrencyPermit>>())
            .cloned();
        InflightGuard::new(self.gateway.count_call(), seat)
    }

    /// Starts a call and drives it to its end.
    async fn run_call(
        &self,
        running: &ActiveConfig,
        call: Call,
        request: &CallToolRequestParams,
        client: &CallClient<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let (to_client, heard) = mpsc::channel(CLIENT_CHANNEL_CAPACITY);
        let line = Arc::new(self.open_channel(to_client, client));
        let gate = running.runtime.clone();
        let key = call.key.clone();
        let cancel = CancellationToken::new();
        let call = call.with_extension(Arc::clone(&line)).cancelled_by(cancel.clone());
        // This request is itself counted, so a higher count means other requests.
        let among_others = *self.gateway.0.inflight.borrow() > 1;
        // Counted until the call ends, even if its client disconnects.
        let counted = Arc::new(Mutex::new(Some(self.inflight_guard(client))));
        let (counts, busy) =
            (Arc::clone(&counted), self.gateway.0.default_sessions.use_session(&key));
        let path = async move {
            let answer = gate.call(call).await;
            drop((counts, busy));
            answer
        };
        let task =
            CallTask::new(path.with_context(crate::trace_context::context_of_request(client)));
        // A call that may wait for its client runs in a separate task. So does a concurrent call,
        // because waking a task after a ledger write costs less than waking its connection.
        let task = if among_others || matches!(client.channel, ClientChannel::Peer(_)) {
            task.spawn()
        } else {
            task
        };
        let underway = RunningCall {
            task,
            events: heard,
            channel: line,
            cancel,
            question: None,
            digest: String::new(),
            guard: counted,
        };
        self.drive_call(key, request, underway, client).await
    }

    /// Drives a call until it ends or its client must answer a question.
    async fn drive_call(
        &self,
        key: SessionKey,
        request: &CallToolRequestParams,
        mut underway: RunningCall,
        client: &CallClient<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let modern = client.is_modern;
        // A disconnect cancels the call; a question to the client does not.
        let hang_up = underway.cancel.clone().drop_guard();
        let mut asking = None;
        loop {
            let busy = asking.is_some();
            tokio::select! {
                biased;
                () = client.disconnected.cancelled(), if !underway.cancel.is_cancelled() => underway.cancel.cancel(),
                () = poll_optional(&mut asking), if busy => asking = None,
                Some(said) = underway.events.recv(), if !busy => match said {
                    UpstreamEvent::Progress(progress) => self.send_progress(progress, client).await,
                    UpstreamEvent::Log(message) => self.send_log(message, client).await,
                    question if !can_answer(&question, &underway.channel.capabilities) => decline_question(question),
                    // If no more calls can be suspended, decline. The upstream decides how the call
                    // continues.
                    question if modern && !self.gateway.0.suspended.has_room(&key) => decline_question(question),
                    question if modern => match self.suspend_call(&key, question, underway, call_digest(request)) {
                        Some(asked) => {
                            hang_up.disarm();
                            return Ok(asked);
                        }
                        None => return Err(ErrorData::internal_error("too many suspended calls", None)),
                    },
                    question => match client.channel {
                        ClientChannel::Peer(peer) => asking = Some(Box::pin(forward_question(question, peer, &self.questions))),
                        ClientChannel::ResponseStream(_) => decline_question(question),
                    },
                },
                answer = &mut underway.task => {
                    drop(asking);
                    hang_up.disarm();
                    let answer = answer.ok_or_else(|| ErrorData::internal_error("the call ended without a result", None))?;
                    // Delivers messages that the upstream sent before its answer.
                    while let Ok(said) = underway.events.try_recv() {
                        self.deliver_event(said, client).await;
                    }
                    return self.render_answer(key, request, answer, &underway.channel, client).await;
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
        line: &CallChannel,
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
            line,
            has_schema,
            agent.map(Agent::dialect).unwrap_or_default(),
        );
        let waits = answer
            .outcome
            .error()
            .filter(|error| error.code == error_code::APPROVAL_REQUIRED)
            .and_then(|error| error.approval.clone());
        let Some(waits) = waits else { return Ok(refused.into()) };
        let Ok(Some(approval)) = running.runtime.approval(&waits.id).await else {
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
            let parked = self.gateway.0.suspended.suspend(
                &key,
                SuspendReason::Approval {
                    id: waits.id,
                    digest: call_digest(request),
                    refused: Box::new(refused.clone()),
                },
            );
            let Some(state) = parked else { return Ok(refused.into()) };
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
        let said = tokio::select! {
            biased;
            // The call is denied until it is approved. During shutdown no approved call could
            // start, so do not wait.
            () = self.gateway.0.stop.cancelled() => return Ok(refused.into()),
            () = client.disconnected.cancelled() => return Ok(refused.into()),
            said = tokio::time::timeout(APPROVAL_ANSWER_TIMEOUT, Box::pin(ask_user(params, peer, &self.questions))) => said,
        };
        let Ok(Ok(said)) = said else { return Ok(refused.into()) };
        self.apply_elicitation(key, request, &waits.id, &said, refused, client).await
    }

    /// Applies the answer of the client's user.
    ///
    /// The current configuration judges the approved call.
    async fn apply_elicitation(
        &self,
        key: SessionKey,
        request: &CallToolRequestParams,
        id: &str,
        said: &ElicitResult,
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
        let yes = said.action == ElicitationAction::Accept
            && said.content.as_ref().and_then(|content| content.get("approve"))
                == Some(&json!(true));
        let no = said.action == ElicitationAction::Decline
            || (said.action == ElicitationAction::Accept && !yes);
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
        // Closing the question is no refusal: the approval stays open and the call stays denied.
        let counts =
            (yes || no) && matches!(running.runtime.answer_approval(id, yes, &by).await, Ok(true));
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
    async fn resume_call(
        &self,
        key: SessionKey,
        request: CallToolRequestParams,
        waits: SuspendReason,
        client: &CallClient<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let mut responses = request.input_responses.clone().unwrap_or_default();
        match waits {
            SuspendReason::Approval { id, digest: shown, refused } => {
                if shown != call_digest(&request) {
                    // The client edited the call, so this is a new call.
                    return self
                        .start_call(&self.gateway.active_config(), key, &request, client)
                        .await;
                }
                let said: Option<ElicitResult> = responses
                    .remove(APPROVAL_QUESTION_NAME)
                    .and_then(|said| serde_json::from_value(said).ok());
                match said {
                    Some(said) => {
                        self.apply_elicitation(key, &request, &id, &said, *refused, client).await
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
            SuspendReason::Upstream(mut underway) => {
                let all_at_once =
                    matches!(underway.question, None | Some(UpstreamEvent::Inputs(..)));
                let wrong = match underway.digest == call_digest(&request) {
                    false => Some("the call differs from the one that was asked about"),
                    true if !all_at_once && !responses.contains_key(INPUT_QUESTION_NAME) => {
                        Some("the answer is missing")
                    }
                    true => None,
                };
                if let Some(why) = wrong {
                    // The suspended call cannot be resumed any more.
                    underway.cancel.cancel();
                    return Err(self
                        .reject_invalid(key, &request, client, ErrorData::invalid_params(why, None))
                        .await);
                }
                *lock(&underway.guard) = Some(self.inflight_guard(client));
                match underway.question.take() {
                    // The upstream decides whether the answers are complete.
                    Some(UpstreamEvent::Inputs(asked, reply)) => {
                        responses.retain(|name, _| asked.contains_key(name));
                        reply.send(Ok(responses));
                    }
                    Some(asked) => answer_upstream(
                        asked,
                        responses.remove(INPUT_QUESTION_NAME).unwrap_or_default(),
                    ),
                    None => {}
                }
                self.drive_call(key, &request, *underway, client).await
            }
        }
    }

    /// Suspends a call until its client answers the upstream's question.
    fn suspend_call(
        &self,
        key: &SessionKey,
        question: UpstreamEvent,
        underway: RunningCall,
        digest: String,
    ) -> Option<CallToolResponse> {
        let one = |request| InputRequests::from([(INPUT_QUESTION_NAME.to_owned(), request)]);
        let requests = match &question {
            UpstreamEvent::Elicit(params, _) => {
                one(InputRequest::Elicitation(ElicitRequest::new((**params).clone())))
            }
            UpstreamEvent::Sample(params, _) => {
                one(InputRequest::CreateMessage(CreateMessageRequest::new((**params).clone())))
            }
            UpstreamEvent::Roots(_) => one(InputRequest::ListRoots(ListRootsRequest::default())),
            UpstreamEvent::Inputs(requests, _) => requests.clone(),
            UpstreamEvent::Progress(_) | UpstreamEvent::Log(_) => return None,
        };
        let task = underway.task.spawn();
        let waits = SuspendReason::Upstream(Box::new(RunningCall {
            question: Some(question),
            digest,
            task,
            ..underway
        }));
        let state = self.gateway.0.suspended.suspend(key, waits)?;
        Some(CallToolResponse::InputRequired(InputRequiredResult::new(Some(requests), Some(state))))
    }

    /// Delivers a notification of an upstream, and declines a question.
    pub(crate) async fn deliver_event(&self, said: UpstreamEvent, client: &CallClient<'_>) {
        match said {
            UpstreamEvent::Progress(progress) => self.send_progress(progress, client).await,
            UpstreamEvent::Log(message) => self.send_log(message, client).await,
            question => decline_question(question),
        }
    }

    async fn send_progress(
        &self,
        mut progress: ProgressNotificationParam,
        client: &CallClient<'_>,
    ) {
        if let Some(token) = client.meta.get_progress_token() {
            progress.progress_token = token;
            progress.meta = progress.meta.map(mcp_convert::strip_notification_meta);
            client.notify(ProgressNotification::new(progress).into()).await;
        }
    }

    async fn send_log(
        &self,
        mut message: LoggingMessageNotificationParam,
        client: &CallClient<'_>,
    ) {
        if self
            .log_level(client)
            .is_some_and(|wanted| level_rank(message.level) >= level_rank(wanted))
        {
            message.meta = message.meta.map(mcp_convert::strip_notification_meta);
            client.notify(LoggingMessageNotification::new(message).into()).await;
        }
    }
}

/// Polls the pending future, or waits forever if there is none.
pub(crate) async fn poll_optional<F: Future<Output = ()> + Unpin>(asking: &mut Option<F>) {
    match asking {
        Some(asking) => asking.await,
        None => std::future::pending().await,
    }
}

const fn level_rank(level: LoggingLevel) -> u8 {
    match level {
        LoggingLevel::Debug => 0,
        LoggingLevel::Info => 1,
        LoggingLevel::Notice => 2,
        LoggingLevel::Warning => 3,
        LoggingLevel::Error => 4,
        LoggingLevel::Critical => 5,
        LoggingLevel::Alert => 6,
        LoggingLevel::Emergency => 7,
    }
}
