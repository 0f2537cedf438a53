//! Runs a tool of an upstream: the `Handler` that the pipeline calls.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, CallToolResult, ClientCapabilities, ClientRequest,
    InputRequiredResult, InputResponses, ProtocolVersion, RequestMetaObject, ServerResult,
};
use rmcp::service::PeerRequestOptions;
use serde_json::{Value, json};
use tokio::sync::SemaphorePermit;
use toolgate::{CallEffects, CheckedArguments, Failure, Handler, Permit, Timestamp, ToolContext};
use toolgate_json::Digest;

use crate::mcp_convert;
use crate::upstream::callbacks::{CallChannel, OpenQuestionCounter, ReplySender, UpstreamEvent};
use crate::upstream::client_handler::client_info;
use crate::upstream::request_guards::{DirectRequestGuard, RmcpRequestGuard};
use crate::upstream::result_value::{is_error_in_success, result_text, result_value};
use crate::upstream::supervisor::{
    ActiveConnection, UpstreamStatus, UpstreamSupervisor, is_modern,
};
use crate::upstream::transport::direct_http::{DirectCallEvent, DirectCallParams, DirectClient};

pub(super) use crate::upstream::classify_error::{TransportErrorKind, is_revision_mismatch};

/// The maximum number of requests to the upstream in one call.
///
/// The upstream may ask the client for input one time less.
const MAX_REQUESTS_PER_CALL: usize = 10;
/// The retry delay while an upstream is starting.
const STARTUP_RETRY_DELAY: Duration = Duration::from_secs(1);

pub(crate) struct RemoteToolHandler {
    pub(crate) supervisor: Arc<UpstreamSupervisor>,
    tool: String,
    /// The digest of the accepted definition when the rules were loaded.
    accepted_digest: Option<Digest>,
    /// Whether calls can take the fast path, if the connection has one.
    can_use_fast_path: bool,
}

/// The handler for tools of an upstream that is not connected.
pub(crate) struct DisconnectedHandler(pub(crate) String);

#[async_trait]
impl Handler for DisconnectedHandler {
    async fn run(
        &self,
        _: &Permit,
        _: ToolContext,
        _: &CheckedArguments,
    ) -> Result<Value, Failure> {
        Err(Failure::transient(
            "upstream_unavailable",
            format!("the upstream `{}` is not connected", self.0),
        )
        .effects(CallEffects::None))
    }
}

impl RemoteToolHandler {
    pub(crate) fn new(supervisor: Arc<UpstreamSupervisor>, tool: &str) -> Self {
        let accepted_digest = supervisor.pins.accepted_digest(tool);
        let can_use_fast_path =
            supervisor.pins.can_use_fast_path(tool) && crate::is_header_safe_name(tool);
        Self { supervisor, tool: tool.to_owned(), accepted_digest, can_use_fast_path }
    }

    /// Returns the error for an upstream that is down: since when, and when to retry.
    fn down_failure(&self) -> Failure {
        let (name, since) =
            (&self.supervisor.upstream.name, format_time(self.supervisor.down_since()));
        let (message, wait, why) = match self.supervisor.status() {
            UpstreamStatus::Starting => (
                format!("the upstream `{name}` has been starting since {since}"),
                STARTUP_RETRY_DELAY,
                None,
            ),
            UpstreamStatus::Up { .. } => (
                format!("the upstream `{name}` has been down since {since}, and is reconnecting"),
                STARTUP_RETRY_DELAY,
                None,
            ),
            UpstreamStatus::Down { since, why, next } => {
                let since = format_time(since);
                match Duration::try_from(next.duration_since(Timestamp::now()))
                    .ok()
                    .filter(|wait| !wait.is_zero())
                {
                    Some(wait) => {
                        let ms = wait.as_millis();
                        (
                            format!(
                                "the upstream `{name}` has been down since {since}; the next attempt is in {ms} ms"
                            ),
                            wait,
                            Some(why),
                        )
                    }
                    None => (
                        format!(
                            "the upstream `{name}` has been down since {since}; an attempt is in progress"
                        ),
                        STARTUP_RETRY_DELAY,
                        Some(why),
                    ),
                }
            }
        };
        let failure = Failure::transient("upstream_unavailable", message)
            .effects(CallEffects::None)
            .retry_after_ms(retry_delay_ms(wait));
        // The reason may quote upstream output, so mark it as the upstream's words.
        match why {
            Some(why) => failure.upstream(json!({"said": why})),
            None => failure,
        }
    }

    async fn call(
        &self,
        ctx: &ToolContext,
        arguments: &CheckedArguments,
        channel: Option<&CallChannel>,
    ) -> Result<CallToolResult, Failure> {
        let supervisor = &self.supervisor;
        if let Some((since, open_time, can_close_early)) = supervisor.circuit_open() {
            let (name, since) = (&supervisor.upstream.name, format_time(since));
            // The upstream is being probed and may recover before the breaker closes.
            let ms = retry_delay_ms(if can_close_early {
                open_time.min(STARTUP_RETRY_DELAY)
            } else {
                open_time
            });
            let message = match can_close_early {
                true => {
                    format!(
                        "the upstream `{name}` failed repeatedly; its circuit breaker is open since {since}, and it is being probed"
                    )
                }
                false => {
                    format!(
                        "the upstream `{name}` failed repeatedly; its circuit breaker is open since {since}, and closes in {ms} ms"
                    )
                }
            };
            return Err(Failure::transient("upstream_unavailable", message)
                .effects(CallEffects::None)
                .retry_after_ms(ms));
        }
        let mut permit = self.acquire_slot(ctx).await?;
        let mut inputs =
            CallInputs { arguments: arguments.value().as_object(), responses: None, state: None };
        for round in 0..MAX_REQUESTS_PER_CALL {
            // Check the connection and the definition before every request.
            let exchange = async {
                let connection = supervisor.connection().ok_or_else(|| self.down_failure())?;
                self.check_definition()?;
                supervisor
                    .extend_silence_limit(ctx.time_left().unwrap_or(supervisor.upstream.timeout));
                match connection.direct.as_ref().filter(|_| self.can_use_fast_path) {
                    Some(direct) => {
                        self.call_direct(&connection, direct, &inputs, channel, ctx).await
                    }
                    None => self.call_rmcp(&connection, &inputs, channel, ctx).await,
                }
            };
            // The upstream may have caused effects before it asked for input.
            match exchange.await.map_err(|failure| {
                if round == 0 { failure } else { failure.without_declared_effects() }
            })? {
                ServerResult::CallToolResult(result) => return Ok(result),
                // Do not ask the client if its answer could not be sent.
                ServerResult::InputRequiredResult(_) if round + 1 == MAX_REQUESTS_PER_CALL => break,
                ServerResult::InputRequiredResult(input_request) => {
                    // Release the slot while the client is asked. The token delays a shutdown
                    // meanwhile.
                    let suspension = supervisor.suspended_calls.token();
                    drop(permit);
                    (inputs.responses, inputs.state) =
                        self.ask_client(input_request, channel).await?;
                    permit =
                        self.acquire_slot(ctx).await.map_err(Failure::without_declared_effects)?;
                    drop(suspension);
                }
                _ => {
                    supervisor.on_response();
                    return Err(Failure::business(
                        "upstream_rejected",
                        format!(
                            "the upstream `{}` returned an unsupported result type",
                            supervisor.upstream.name
                        ),
                    ));
                }
            }
        }
        Err(Failure::business(
            "upstream_rejected",
            format!("the upstream `{}` asked for input too many times", supervisor.upstream.name),
        ))
    }

    /// Acquires a concurrency slot. A call that waits for one was not sent yet.
    async fn acquire_slot(&self, ctx: &ToolContext) -> Result<SemaphorePermit<'_>, Failure> {
        let supervisor = &self.supervisor;
        let timeout = ctx.time_left().unwrap_or(supervisor.upstream.timeout).mul_f64(0.9);
        match tokio::time::timeout(timeout, supervisor.slots.acquire()).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => {
                let message = format!(
                    "the upstream `{}` is at its concurrency limit",
                    supervisor.upstream.name
                );
                Err(Failure::transient("upstream_unavailable", message)
                    .effects(CallEffects::None)
                    .retry_after_ms(1_000))
            }
        }
    }

    /// Checks that the tool still has the definition for which the rules were loaded.
    fn check_definition(&self) -> Result<(), Failure> {
        let name = &self.supervisor.upstream.name;
        if self.accepted_digest.is_none() {
            let message = format!(
                "the tool `{}` of the upstream `{name}` was unknown when its rules were loaded, or is quarantined",
                self.tool
            );
            return Err(Failure::transient("upstream_unavailable", message)
                .effects(CallEffects::None)
                .retry_after_ms(500));
        }
        self.definition_failure().map_or(Ok(()), Err)
    }

    /// Returns the error for a tool whose definition differs from the accepted one.
    fn definition_failure(&self) -> Option<Failure> {
        if self.accepted_digest.is_none()
            || self.supervisor.pins.is_current(&self.tool, self.accepted_digest)
        {
            return None;
        }
        let message = format!(
            "the definition of the tool `{}` of the upstream `{}` changed after it was accepted; it is quarantined until a person reviews it (`toolgate upstream diff`, `accept`)",
            self.tool, self.supervisor.upstream.name
        );
        Some(Failure::permission("definition_changed", message).effects(CallEffects::None))
    }

    /// Sends one request on the fast path and waits for the response.
    async fn call_direct(
        &self,
        connection: &ActiveConnection,
        direct: &DirectClient,
        inputs: &CallInputs<'_>,
        channel: Option<&CallChannel>,
        ctx: &ToolContext,
    ) -> Result<ServerResult, Failure> {
        let mut meta = channel.map(|channel| forwarded_meta(channel, true)).unwrap_or_default();
        if let Some(token) = channel.and_then(|channel| channel.meta.get_progress_token()) {
            meta.set_progress_token(token);
        }
        meta.set_protocol_version(ProtocolVersion::V_2026_07_28);
        meta.set_client_info(client_info());
        if channel.is_none() {
            meta.set_client_capabilities(ClientCapabilities::default());
        }
        let params = DirectCallParams {
            name: &self.tool,
            arguments: inputs.arguments,
            input_responses: inputs.responses.as_ref(),
            request_state: inputs.state.as_deref(),
            meta,
        };
        let mut guard = DirectRequestGuard {
            link: &self.supervisor,
            generation: connection.generation,
            is_done: false,
            cancelled: ctx.cancellation_token(),
        };
        let answer = direct.call(&params, |event| {
            self.supervisor.on_message();
            match event {
                // A client that reads too slowly misses messages.
                DirectCallEvent::Client(event) => {
                    drop(channel.map(|channel| channel.to_client.try_send(event)))
                }
                DirectCallEvent::ListsChanged => self.supervisor.on_lists_changed(),
                DirectCallEvent::ResourceUpdated(uri) => {
                    self.supervisor.publish_resource_update(uri)
                }
            }
        });
        let answer = answer.await;
        guard.is_done = true;
        answer
            .inspect(|_| self.supervisor.on_success())
            .map_err(|error| self.classify_direct_error(error, connection))
    }

    /// Sends one request through rmcp and waits for the response.
    ///
    /// If the caller stops waiting, the upstream receives a cancellation.
    async fn call_rmcp(
        &self,
        connection: &ActiveConnection,
        inputs: &CallInputs<'_>,
        channel: Option<&CallChannel>,
        ctx: &ToolContext,
    ) -> Result<ServerResult, Failure> {
        let (generation, peer) = (connection.generation, &connection.peer);
        let mut params = CallToolRequestParams::new(self.tool.clone());
        params.arguments = inputs.arguments.cloned();
        (params.input_responses, params.request_state) =
            (inputs.responses.clone(), inputs.state.clone());
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(params));
        let mut options = PeerRequestOptions::no_options();
        if let Some(channel) = channel {
            options = options.with_meta(forwarded_meta(channel, is_modern(peer)));
        }
        let _unrouted = channel.is_none().then(|| self.supervisor.routes.add_unrouted());
        let send = peer.send_request_with_option(request, options);
        let open_questions = OpenQuestionCounter::default();
        let sent = self
            .supervisor
            .routes
            .send_for_call(channel, &open_questions, send, |handle| {
                (handle.id.clone(), handle.progress_token.clone())
            })
            .await;
        let (handle, route) =
            sent.map_err(|error| self.classify_rmcp_error(error, false, connection))?;
        let mut guard = RmcpRequestGuard {
            peer: peer.clone(),
            link: Arc::clone(&self.supervisor),
            generation,
            id: handle.id.clone(),
            route,
            is_done: false,
            cancelled: ctx.cancellation_token().clone(),
            open_questions,
        };
        let answer = handle.await_response().await;
        guard.is_done = true;
        match answer {
            Ok(result) => {
                self.supervisor.on_success();
                Ok(result)
            }
            Err(error) => Err(self.classify_rmcp_error(error, true, connection)),
        }
    }

    /// Asks the client for the input that an upstream requests.
    async fn ask_client(
        &self,
        input_request: InputRequiredResult,
        channel: Option<&CallChannel>,
    ) -> Result<(Option<InputResponses>, Option<String>), Failure> {
        let failure = |why: &str| {
            Failure::business(
                "upstream_rejected",
                format!(
                    "cannot answer the request of the upstream `{}` for input: {why}",
                    self.supervisor.upstream.name
                ),
            )
        };
        let Some(requests) = input_request.input_requests.filter(|requests| !requests.is_empty())
        else {
            return Ok((None, input_request.request_state));
        };
        let channel = channel.ok_or_else(|| failure("no client is connected to answer"))?;
        let (reply, answer) = ReplySender::new(None);
        channel
            .to_client
            .try_send(UpstreamEvent::Inputs(mcp_convert::rename_questions(requests), reply))
            .map_err(|_| failure("no client is connected to answer"))?;
        let responses = answer
            .await
            .map_err(|_| failure("no client is connected to answer"))?
            .map_err(|_| failure("the client refused"))?;
        Ok((
            (!responses.is_empty()).then(|| mcp_convert::restore_responses(responses)),
            input_request.request_state,
        ))
    }
}

fn format_time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// Converts a retry delay to milliseconds, at least 100.
fn retry_delay_ms(wait: Duration) -> u64 {
    u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).max(100)
}

/// Returns the client's metadata that an upstream may see.
fn forwarded_meta(channel: &CallChannel, is_modern_peer: bool) -> RequestMetaObject {
    let mut meta = mcp_convert::strip_request_meta(channel.meta.clone());
    if is_modern_peer {
        // Toolgate does not substitute for missing capabilities of the client.
        meta.set_client_capabilities(channel.capabilities.clone());
        if let Some(level) = channel.log_level {
            meta.set_log_level(level);
        }
    }
    crate::trace_context::inject_trace_context(&mut meta);
    meta
}

/// The inputs of one request of a call.
struct CallInputs<'g> {
    arguments: Option<&'g serde_json::Map<String, Value>>,
    /// The client's answers to the upstream's last request for input.
    responses: Option<InputResponses>,
    state: Option<String>,
}

#[async_trait]
impl Handler for RemoteToolHandler {
    fn refusal(&self) -> Option<Failure> {
        self.definition_failure()
    }

    async fn run(
        &self,
        _: &Permit,
        ctx: ToolContext,
        arguments: &CheckedArguments,
    ) -> Result<Value, Failure> {
        let channel = ctx.extension::<CallChannel>();
        let result = self.call(&ctx, arguments, channel.as_deref()).await?;
        let text = result_text(&result);
        // The tool ran to its end, so its changes before the failure are done.
        let failed = || {
            let message = format!(
                "the tool `{}` of the upstream `{}` reported a failure",
                self.tool, self.supervisor.upstream.name
            );
            Failure::business("tool_failed", message).effects(CallEffects::Done)
        };
        // An error text may contain a credential.
        let redact = |value: Value| self.supervisor.upstream.redact_value(value);
        if result.is_error == Some(true) {
            let failure = self.match_error_pattern(&text).unwrap_or_else(failed);
            let structured = result.structured_content.unwrap_or_default();
            return Err(failure.upstream(redact(json!({"said": text, "structured": structured}))));
        }
        // Some servers report an error in a successful result.
        let text_error = || {
            (self.supervisor.upstream.detects_text_errors && is_error_in_success(&result))
                .then(failed)
        };
        if let Some(failure) = self.match_error_pattern(&text).or_else(text_error) {
            return Err(failure.upstream(redact(json!({"said": text}))));
        }
        let value = result_value(&result);
        // An upstream must not return a value in the form of toolgate's own errors.
        if let Some(stripped) = toolgate::strip_reserved_fields(&value) {
            return Ok(stripped);
        }
        if let Some(channel) = &channel {
            *channel.raw_result.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
                Some((value.clone(), Box::new(result)));
        }
        Ok(value)
    }
}
