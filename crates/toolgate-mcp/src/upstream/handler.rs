//! Runs a tool of an upstream: the `Handler` that the pipeline calls.

mod trouble;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rmcp::RoleClient;
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, CallToolResult, CancelledNotification, CancelledNotificationParam, ClientCapabilities,
    ClientRequest, InputRequiredResult, InputResponses, ProtocolVersion, RequestId, RequestMetaObject, ServerResult,
};
use rmcp::service::{Peer, PeerRequestOptions};
use serde_json::{Value, json};
use tokio::sync::SemaphorePermit;
use tokio_util::sync::CancellationToken;
use toolgate::json::Digest;
use toolgate::{Ctx, Effects, Failure, Handler, Judged, Permit, Timestamp};

use super::link::{Fault, Link, Standing, Status, is_modern};
use super::route::{Asked, FromUpstream, Line, Reply};
use super::said::{blurts, value_of, words};
use super::straight::{Params, Straight, Word};
use crate::client::own_name;
use crate::render;

pub(super) use trouble::{Trouble, is_strange};

/// The maximum number of requests to the upstream in one call.
///
/// The upstream may ask the client for input one time less.
const ROUNDS: usize = 10;
/// The retry delay while an upstream is starting.
const TRYING: Duration = Duration::from_secs(1);

pub(super) struct RemoteTool {
    link: Arc<Link>,
    tool: String,
    /// The digest of the accepted definition when the rules were loaded.
    accepted: Option<Digest>,
    /// Whether calls can take the fast path, if the connection has one.
    plain: bool,
}

/// The handler for tools of an upstream that is not connected.
pub(super) struct Nobody(pub(super) String);

#[async_trait]
impl Handler for Nobody {
    async fn run(&self, _: &Permit, _: Ctx, _: &Judged) -> Result<Value, Failure> {
        Err(Failure::transient("upstream_unavailable", format!("the upstream `{}` is not connected", self.0)).effects(Effects::None))
    }
}

impl RemoteTool {
    pub(super) fn new(link: Arc<Link>, tool: &str) -> Self {
        let accepted = link.pins.digest_of(tool);
        let plain = link.pins.is_plain(tool) && crate::is_plain_name(tool);
        Self { link, tool: tool.to_owned(), accepted, plain }
    }

    /// Returns the error for an upstream that is down: since when, and when to retry.
    fn away(&self) -> Failure {
        let (name, since) = (&self.link.upstream.name, shown(self.link.away_since()));
        let (message, wait, why) = match self.link.status() {
            Status::Starting => (format!("the upstream `{name}` has been starting since {since}"), TRYING, None),
            Status::Up { .. } => (format!("the upstream `{name}` has been down since {since}, and is reconnecting"), TRYING, None),
            Status::Down { since, why, next } => {
                let since = shown(since);
                match Duration::try_from(next.duration_since(Timestamp::now())).ok().filter(|wait| !wait.is_zero()) {
                    Some(wait) => {
                        let ms = wait.as_millis();
                        (format!("the upstream `{name}` has been down since {since}; the next attempt is in {ms} ms"), wait, Some(why))
                    }
                    None => (format!("the upstream `{name}` has been down since {since}; an attempt is in progress"), TRYING, Some(why)),
                }
            }
        };
        let failure = Failure::transient("upstream_unavailable", message).effects(Effects::None).retry_after_ms(in_ms(wait));
        // The reason may quote upstream output, so mark it as the upstream's words.
        match why {
            Some(why) => failure.upstream(json!({"said": why})),
            None => failure,
        }
    }

    async fn call(&self, ctx: &Ctx, arguments: &Judged, line: Option<&Line>) -> Result<CallToolResult, Failure> {
        let link = &self.link;
        if let Some((since, rest, hopeful)) = link.rests() {
            let (name, since) = (&link.upstream.name, shown(since));
            // The upstream is being probed and may recover before the breaker closes.
            let ms = in_ms(if hopeful { rest.min(TRYING) } else { rest });
            let message = match hopeful {
                true => format!("the upstream `{name}` failed repeatedly; its circuit breaker is open since {since}, and it is being probed"),
                false => {
                    format!("the upstream `{name}` failed repeatedly; its circuit breaker is open since {since}, and closes in {ms} ms")
                }
            };
            return Err(Failure::transient("upstream_unavailable", message).effects(Effects::None).retry_after_ms(ms));
        }
        let mut seat = self.seat(ctx).await?;
        let mut given = Given { arguments: arguments.value().as_object(), responses: None, state: None };
        for round in 0..ROUNDS {
            // Check the connection and the definition before every request.
            let asked = async {
                let standing = link.standing().ok_or_else(|| self.away())?;
                self.check_definition()?;
                link.may_take(ctx.time_left().unwrap_or(link.upstream.timeout));
                match standing.straight.as_ref().filter(|_| self.plain) {
                    Some(straight) => self.straight(&standing, straight, &given, line, ctx).await,
                    None => self.once(&standing, &given, line, ctx).await,
                }
            };
            // The upstream may have caused effects before it asked for input.
            match asked.await.map_err(|failure| if round == 0 { failure } else { failure.effects_unsaid() })? {
                ServerResult::CallToolResult(result) => return Ok(result),
                // Do not ask the client if its answer could not be sent.
                ServerResult::InputRequiredResult(_) if round + 1 == ROUNDS => break,
                ServerResult::InputRequiredResult(asked) => {
                    // Release the slot while the client is asked. The token delays a shutdown
                    // meanwhile.
                    let parked = link.parked.token();
                    drop(seat);
                    (given.responses, given.state) = self.ask_back(asked, line).await?;
                    seat = self.seat(ctx).await.map_err(Failure::effects_unsaid)?;
                    drop(parked);
                }
                _ => {
                    link.answered();
                    return Err(Failure::business(
                        "upstream_rejected",
                        format!("the upstream `{}` returned an unsupported result type", link.upstream.name),
                    ));
                }
            }
        }
        Err(Failure::business("upstream_rejected", format!("the upstream `{}` asked for input too many times", link.upstream.name)))
    }

    /// Acquires a concurrency slot. A call that waits for one was not sent yet.
    async fn seat(&self, ctx: &Ctx) -> Result<SemaphorePermit<'_>, Failure> {
        let link = &self.link;
        let patience = ctx.time_left().unwrap_or(link.upstream.timeout).mul_f64(0.9);
        match tokio::time::timeout(patience, link.seats.acquire()).await {
            Ok(Ok(seat)) => Ok(seat),
            _ => {
                let message = format!("the upstream `{}` is at its concurrency limit", link.upstream.name);
                Err(Failure::transient("upstream_unavailable", message).effects(Effects::None).retry_after_ms(1_000))
            }
        }
    }

    /// Checks that the tool still has the definition for which the rules were loaded.
    fn check_definition(&self) -> Result<(), Failure> {
        let name = &self.link.upstream.name;
        if self.accepted.is_none() {
            let message =
                format!("the tool `{}` of the upstream `{name}` was unknown when its rules were loaded, or is quarantined", self.tool);
            return Err(Failure::transient("upstream_unavailable", message).effects(Effects::None).retry_after_ms(500));
        }
        self.held_back().map_or(Ok(()), Err)
    }

    /// Returns the error for a tool whose definition differs from the accepted one.
    fn held_back(&self) -> Option<Failure> {
        if self.accepted.is_none() || self.link.pins.holds(&self.tool, self.accepted) {
            return None;
        }
        let message = format!(
            "the definition of the tool `{}` of the upstream `{}` changed after it was accepted; it is quarantined until a person reviews it (`toolgate upstream diff`, `accept`)",
            self.tool, self.link.upstream.name
        );
        Some(Failure::permission("definition_changed", message).effects(Effects::None))
    }

    /// Sends one request on the fast path and waits for the response.
    async fn straight(
        &self,
        standing: &Standing,
        straight: &Straight,
        given: &Given<'_>,
        line: Option<&Line>,
        ctx: &Ctx,
    ) -> Result<ServerResult, Failure> {
        let mut meta = line.map(|line| passed_on(line, true)).unwrap_or_default();
        if let Some(token) = line.and_then(|line| line.meta.get_progress_token()) {
            meta.set_progress_token(token);
        }
        meta.set_protocol_version(ProtocolVersion::V_2026_07_28);
        meta.set_client_info(own_name());
        if line.is_none() {
            meta.set_client_capabilities(ClientCapabilities::default());
        }
        let params = Params {
            name: &self.tool,
            arguments: given.arguments,
            input_responses: given.responses.as_ref(),
            request_state: given.state.as_deref(),
            meta,
        };
        let mut waiting = Unanswered { link: &self.link, generation: standing.generation, over: false, cancelled: ctx.cancelled() };
        let answer = straight.call(&params, |word| {
            self.link.heard();
            match word {
                // A client that reads too slowly misses messages.
                Word::Client(word) => drop(line.map(|line| line.to_client.try_send(word))),
                Word::Lists => self.link.lists_changed(),
                Word::Resource(uri) => self.link.updated(uri),
            }
        });
        let answer = answer.await;
        waiting.over = true;
        answer.inspect(|_| self.link.served()).map_err(|broken| self.broken(broken, standing))
    }

    /// Sends one request through rmcp and waits for the response.
    ///
    /// If the caller stops waiting, the upstream receives a cancellation.
    async fn once(&self, standing: &Standing, given: &Given<'_>, line: Option<&Line>, ctx: &Ctx) -> Result<ServerResult, Failure> {
        let (generation, peer) = (standing.generation, &standing.peer);
        let mut params = CallToolRequestParams::new(self.tool.clone());
        params.arguments = given.arguments.cloned();
        (params.input_responses, params.request_state) = (given.responses.clone(), given.state.clone());
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(params));
        let mut options = PeerRequestOptions::no_options();
        if let Some(line) = line {
            options = options.with_meta(passed_on(line, is_modern(peer)));
        }
        let _other = line.is_none().then(|| self.link.routes.other());
        let send = peer.send_request_with_option(request, options);
        let asked = Asked::default();
        let opened = self.link.routes.open(line, &asked, send, |handle| (handle.id.clone(), handle.progress_token.clone())).await;
        let (handle, route) = opened.map_err(|error| self.understand(error, false, standing))?;
        let mut waiting = Waiting {
            peer: peer.clone(),
            link: Arc::clone(&self.link),
            generation,
            id: handle.id.clone(),
            route,
            over: false,
            cancelled: ctx.cancelled().clone(),
            asked,
        };
        let answer = handle.await_response().await;
        waiting.over = true;
        match answer {
            Ok(result) => {
                self.link.served();
                Ok(result)
            }
            Err(error) => Err(self.understand(error, true, standing)),
        }
    }

    /// Asks the client for the input that an upstream requests.
    async fn ask_back(&self, asked: InputRequiredResult, line: Option<&Line>) -> Result<(Option<InputResponses>, Option<String>), Failure> {
        let refuse = |why: &str| {
            Failure::business("upstream_rejected", format!("cannot answer the request of the upstream `{}` for input: {why}", self.link.upstream.name))
        };
        let Some(requests) = asked.input_requests.filter(|requests| !requests.is_empty()) else { return Ok((None, asked.request_state)) };
        let line = line.ok_or_else(|| refuse("no client is connected to answer"))?;
        let (reply, answer) = Reply::new(None);
        line.to_client.try_send(FromUpstream::Inputs(render::questions(requests), reply)).map_err(|_| refuse("no client is connected to answer"))?;
        let responses = answer.await.map_err(|_| refuse("no client is connected to answer"))?.map_err(|_| refuse("the client refused"))?;
        Ok(((!responses.is_empty()).then(|| render::responses(responses)), asked.request_state))
    }
}

fn shown(moment: Timestamp) -> String {
    moment.strftime("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// Converts a retry delay to milliseconds, at least 100.
fn in_ms(wait: Duration) -> u64 {
    u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).max(100)
}

/// Returns the client's metadata that an upstream may see.
fn passed_on(line: &Line, modern: bool) -> RequestMetaObject {
    let mut meta = render::own_words(line.meta.clone());
    if modern {
        // Toolgate does not substitute for missing capabilities of the client.
        meta.set_client_capabilities(line.capabilities.clone());
        if let Some(level) = line.level {
            meta.set_log_level(level);
        }
    }
    crate::trace::tell(&mut meta);
    meta
}

/// The inputs of one request of a call.
struct Given<'g> {
    arguments: Option<&'g serde_json::Map<String, Value>>,
    /// The client's answers to the upstream's last request for input.
    responses: Option<InputResponses>,
    state: Option<String>,
}

/// A request on the fast path. An abandoned request counts as a failure of the upstream, unless the
/// caller cancelled it.
struct Unanswered<'u> {
    link: &'u Link,
    /// The generation of the connection.
    generation: u64,
    over: bool,
    cancelled: &'u CancellationToken,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if !self.over && !self.cancelled.is_cancelled() {
            self.link.failed(self.generation, Fault::Late);
        }
    }
}

/// A request through rmcp. Dropping it before the response sends a cancellation.
struct Waiting {
    peer: Peer<RoleClient>,
    link: Arc<Link>,
    /// The generation of the connection.
    generation: u64,
    id: RequestId,
    /// The route for messages about the request, if there is one.
    route: Option<u64>,
    over: bool,
    /// Cancelled if the client disconnected, which is not the upstream's fault.
    cancelled: CancellationToken,
    /// Open questions to the client. Waiting for them is not the upstream's fault.
    asked: Asked,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.over && self.route.is_none() {
            return;
        }
        let (peer, link, id) = (self.peer.clone(), Arc::clone(&self.link), self.id.clone());
        let (route, over, generation) = (self.route, self.over, self.generation);
        let at_fault = !self.cancelled.is_cancelled() && !self.asked.is_open();
        tokio::spawn(async move {
            if let Some(route) = route {
                link.routes.close(&id, route).await;
            }
            if !over {
                if at_fault {
                    link.failed(generation, Fault::Late);
                }
                let gone = CancelledNotificationParam::new(Some(id), Some("the caller no longer waits for the response".to_owned()));
                let _ = peer.send_notification(CancelledNotification::new(gone).into()).await;
            }
        });
    }
}

#[async_trait]
impl Handler for RemoteTool {
    fn refuses(&self) -> Option<Failure> {
        self.held_back()
    }

    async fn run(&self, _: &Permit, ctx: Ctx, arguments: &Judged) -> Result<Value, Failure> {
        let line = ctx.carried::<Line>();
        let result = self.call(&ctx, arguments, line.as_deref()).await?;
        let said = words(&result);
        // The tool ran to its end, so its changes before the failure are done.
        let failed = || {
            let message = format!("the tool `{}` of the upstream `{}` reported a failure", self.tool, self.link.upstream.name);
            Failure::business("tool_failed", message).effects(Effects::Done)
        };
        // An error text may contain a credential.
        let clean = |said: Value| self.link.upstream.said_without_secrets(said);
        if result.is_error == Some(true) {
            let failure = self.by_pattern(&said).unwrap_or_else(failed);
            let structured = result.structured_content.unwrap_or_default();
            return Err(failure.upstream(clean(json!({"said": said, "structured": structured}))));
        }
        // Some servers report an error in a successful result.
        let blurted = || (self.link.upstream.blurts && blurts(&result)).then(failed);
        if let Some(failure) = self.by_pattern(&said).or_else(blurted) {
            return Err(failure.upstream(clean(json!({"said": said}))));
        }
        let value = value_of(&result);
        // An upstream must not return a value in the form of toolgate's own errors.
        if let Some(own) = toolgate::without_contract(&value) {
            return Ok(own);
        }
        if let Some(line) = &line {
            *line.answered.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some((value.clone(), Box::new(result)));
        }
        Ok(value)
    }
}
