//! A tool of an upstream, as the gate runs it.

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

/// How often an upstream is asked in one call. It may ask back once less.
const ROUNDS: usize = 10;
/// When to try again where an upstream is being started.
const TRYING: Duration = Duration::from_secs(1);

pub(super) struct RemoteTool {
    link: Arc<Link>,
    tool: String,
    /// What it looked like when the rules for it were read.
    accepted: Option<Digest>,
    /// Whether a call of it can go the straight way, where there is one.
    plain: bool,
}

/// What stands behind a tool of an upstream that is not there.
pub(super) struct Nobody(pub(super) String);

#[async_trait]
impl Handler for Nobody {
    async fn run(&self, _: &Permit, _: Ctx, _: &Judged) -> Result<Value, Failure> {
        Err(Failure::transient("upstream_unavailable", format!("the upstream `{}` is not connected here", self.0)).effects(Effects::None))
    }
}

impl RemoteTool {
    pub(super) fn new(link: Arc<Link>, tool: &str) -> Self {
        let accepted = link.pins.digest_of(tool);
        let plain = link.pins.is_plain(tool) && crate::is_plain_name(tool);
        Self { link, tool: tool.to_owned(), accepted, plain }
    }

    /// Why it cannot be called now, since when, and when to try again.
    fn away(&self) -> Failure {
        let (name, since) = (&self.link.upstream.name, shown(self.link.away_since()));
        let (message, wait, why) = match self.link.status() {
            Status::Starting => (format!("the upstream `{name}` has been starting since {since}"), TRYING, None),
            Status::Up { .. } => (format!("the upstream `{name}` has been away since {since}, a moment ago"), TRYING, None),
            Status::Down { since, why, next } => {
                let since = shown(since);
                match Duration::try_from(next.duration_since(Timestamp::now())).ok().filter(|wait| !wait.is_zero()) {
                    Some(wait) => {
                        let ms = wait.as_millis();
                        (format!("the upstream `{name}` has been away since {since}, and is tried again in {ms} ms"), wait, Some(why))
                    }
                    None => (format!("the upstream `{name}` has been away since {since}, and is being tried again now"), TRYING, Some(why)),
                }
            }
        };
        let failure = Failure::transient("upstream_unavailable", message).effects(Effects::None).retry_after_ms(in_ms(wait));
        // What it said may be anything, and is not ours.
        match why {
            Some(why) => failure.upstream(json!({"said": why})),
            None => failure,
        }
    }

    async fn call(&self, ctx: &Ctx, arguments: &Judged, line: Option<&Line>) -> Result<CallToolResult, Failure> {
        let link = &self.link;
        if let Some((since, rest, hopeful)) = link.rests() {
            let (name, since) = (&link.upstream.name, shown(since));
            // It is asked whether it is there, and may be taken back at once.
            let ms = in_ms(if hopeful { rest.min(TRYING) } else { rest });
            let message = match hopeful {
                true => format!("the upstream `{name}` has failed again and again, and is asked since {since} whether it is there"),
                false => {
                    format!("the upstream `{name}` has failed again and again, and is left alone since {since}, for another {ms} ms")
                }
            };
            return Err(Failure::transient("upstream_unavailable", message).effects(Effects::None).retry_after_ms(ms));
        }
        let mut seat = self.seat(ctx).await?;
        let mut given = Given { arguments: arguments.value().as_object(), responses: None, state: None };
        for round in 0..ROUNDS {
            // Looked at anew each time: who it is, and whether it is still what it was.
            let asked = async {
                let standing = link.standing().ok_or_else(|| self.away())?;
                self.check_definition()?;
                link.may_take(ctx.time_left().unwrap_or(link.upstream.timeout));
                match standing.straight.as_ref().filter(|_| self.plain) {
                    Some(straight) => self.straight(&standing, straight, &given, line, ctx).await,
                    None => self.once(&standing, &given, line, ctx).await,
                }
            };
            // What it did before it asked back, it did.
            match asked.await.map_err(|failure| if round == 0 { failure } else { failure.effects_unsaid() })? {
                ServerResult::CallToolResult(result) => return Ok(result),
                // Nobody is asked what nobody would read.
                ServerResult::InputRequiredResult(_) if round + 1 == ROUNDS => break,
                ServerResult::InputRequiredResult(asked) => {
                    // Nothing is under way there while the client is asked: others may have the seat. It is not ended meanwhile.
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
                        format!("the upstream `{}` answered something that is no result", link.upstream.name),
                    ));
                }
            }
        }
        Err(Failure::business("upstream_rejected", format!("the upstream `{}` asks back without end", link.upstream.name)))
    }

    /// A place among its calls. Whoever waits for one has not been sent.
    async fn seat(&self, ctx: &Ctx) -> Result<SemaphorePermit<'_>, Failure> {
        let link = &self.link;
        let patience = ctx.time_left().unwrap_or(link.upstream.timeout).mul_f64(0.9);
        match tokio::time::timeout(patience, link.seats.acquire()).await {
            Ok(Ok(seat)) => Ok(seat),
            _ => {
                let message = format!("the upstream `{}` has as many calls as it takes", link.upstream.name);
                Err(Failure::transient("upstream_unavailable", message).effects(Effects::None).retry_after_ms(1_000))
            }
        }
    }

    /// Whether the tool is the one that was looked at when the rules for it were read.
    fn check_definition(&self) -> Result<(), Failure> {
        let name = &self.link.upstream.name;
        if self.accepted.is_none() {
            let message =
                format!("`{}` of the upstream `{name}` was not there when the rules for it were read, or is held back", self.tool);
            return Err(Failure::transient("upstream_unavailable", message).effects(Effects::None).retry_after_ms(500));
        }
        self.held_back().map_or(Ok(()), Err)
    }

    /// Why it is not called: it is another one than was accepted.
    fn held_back(&self) -> Option<Failure> {
        if self.accepted.is_none() || self.link.pins.holds(&self.tool, self.accepted) {
            return None;
        }
        let message = format!(
            "`{}` of the upstream `{}` is not what it was when it was accepted; it is held back until a person has looked at it (`toolgate upstream diff`, `accept`)",
            self.tool, self.link.upstream.name
        );
        Some(Failure::permission("definition_changed", message).effects(Effects::None))
    }

    /// One request and its answer, the straight way.
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
                // A client that does not keep up misses some of it.
                Word::Client(word) => drop(line.map(|line| line.to_client.try_send(word))),
                Word::Lists => self.link.lists_changed(),
                Word::Resource(uri) => self.link.updated(uri),
            }
        });
        let answer = answer.await;
        waiting.over = true;
        answer.inspect(|_| self.link.served()).map_err(|broken| self.broken(broken, standing))
    }

    /// One request and its answer. Whoever is not waited for any more is told so.
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

    /// Asks the client what an upstream wants to know.
    async fn ask_back(&self, asked: InputRequiredResult, line: Option<&Line>) -> Result<(Option<InputResponses>, Option<String>), Failure> {
        let refuse = |why: &str| {
            Failure::business("upstream_rejected", format!("the upstream `{}` asks for something that {why}", self.link.upstream.name))
        };
        let Some(requests) = asked.input_requests.filter(|requests| !requests.is_empty()) else { return Ok((None, asked.request_state)) };
        let line = line.ok_or_else(|| refuse("nobody is there to give"))?;
        let (reply, answer) = Reply::new(None);
        line.to_client.try_send(FromUpstream::Inputs(render::questions(requests), reply)).map_err(|_| refuse("nobody is there to give"))?;
        let responses = answer.await.map_err(|_| refuse("nobody is there to give"))?.map_err(|_| refuse("the client does not give"))?;
        Ok(((!responses.is_empty()).then(|| render::responses(responses)), asked.request_state))
    }
}

fn shown(moment: Timestamp) -> String {
    moment.strftime("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// After how long to try again: never at once.
fn in_ms(wait: Duration) -> u64 {
    u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).max(100)
}

/// Metadata of a client that an upstream may see.
fn passed_on(line: &Line, modern: bool) -> RequestMetaObject {
    let mut meta = render::own_words(line.meta.clone());
    if modern {
        // What the client cannot do, nobody does for it.
        meta.set_client_capabilities(line.capabilities.clone());
        if let Some(level) = line.level {
            meta.set_log_level(level);
        }
    }
    crate::trace::tell(&mut meta);
    meta
}

/// What a tool is given.
struct Given<'g> {
    arguments: Option<&'g serde_json::Map<String, Value>>,
    /// What the client said when it was asked back.
    responses: Option<InputResponses>,
    state: Option<String>,
}

/// A request of which nothing is heard. Where nobody but the upstream is to blame, it counts against it.
struct Unanswered<'u> {
    link: &'u Link,
    /// Over which connection.
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

/// A request that is waited for. Whoever stops waiting says so.
struct Waiting {
    peer: Peer<RoleClient>,
    link: Arc<Link>,
    /// Over which connection.
    generation: u64,
    id: RequestId,
    /// Where what is said of it goes to somebody.
    route: Option<u64>,
    over: bool,
    /// The client has hung up: that is not the upstream's fault.
    cancelled: CancellationToken,
    /// Its client is asked something: that it takes its time is not the upstream's fault either.
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
                let gone = CancelledNotificationParam::new(Some(id), Some("nobody waits for it any more".to_owned()));
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
        // It ran and is over: what it changed before it failed, it changed.
        let failed = || {
            let message = format!("`{}` of the upstream `{}` reported a failure", self.tool, self.link.upstream.name);
            Failure::business("tool_failed", message).effects(Effects::Done)
        };
        // Who fails may say with which key.
        let clean = |said: Value| self.link.upstream.said_without_secrets(said);
        if result.is_error == Some(true) {
            let failure = self.by_pattern(&said).unwrap_or_else(failed);
            let structured = result.structured_content.unwrap_or_default();
            return Err(failure.upstream(clean(json!({"said": said, "structured": structured}))));
        }
        // Some say in a success that they failed.
        let blurted = || (self.link.upstream.blurts && blurts(&result)).then(failed);
        if let Some(failure) = self.by_pattern(&said).or_else(blurted) {
            return Err(failure.upstream(clean(json!({"said": said}))));
        }
        let value = value_of(&result);
        // Nobody else speaks as toolgate does, also not word for word.
        if let Some(own) = toolgate::without_contract(&value) {
            return Ok(own);
        }
        if let Some(line) = &line {
            *line.answered.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some((value.clone(), Box::new(result)));
        }
        Ok(value)
    }
}
