//! Serves MCP, the decision API and operational endpoints over HTTP.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST, ORIGIN, RETRY_AFTER, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use opentelemetry::trace::FutureExt as _;
use rmcp::model::ErrorCode;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::batch::{self, Batch};
use crate::door::{AGENT, Door};
use crate::gateway::{Gateway, Running, lock};
use crate::identity::{self, Asked, Caller};
use crate::lines::bounds;
use crate::misread::Glimpse;
use crate::raw::{self, Message, Read};
use crate::seat::{Held, Open, Seated, Seats};
use crate::straight::Straight;

mod listen;
mod pages;
mod refused;
mod resource;
mod returning;
mod sessions;

pub use listen::Listening;
use returning::Returning;
use sessions::opens_session;

/// Timeout for receiving a request, and for the TLS handshake.
const PATIENCE: Duration = Duration::from_secs(15);
/// Messages for exceeded limits, which are also recorded in the ledger.
const HASTY: &str = "rate limit exceeded";
const CROWDED: &str = "too many concurrent requests";

pub(crate) type Answer = Response<BoxBody<Bytes, Infallible>>;

/// State that all requests share.
pub(crate) struct Http {
    pub(crate) gateway: Gateway,
    /// Handles stateless calls.
    pub(crate) door: Door,
    pub(crate) mcp: StreamableHttpService<Door, Returning>,
    /// Sessions of clients of earlier revisions.
    sessions: Arc<Returning>,
    seats: Seats,
    /// Permits for messages that are not requests.
    beside: Seats,
    /// Permits for streams that only listen, each as long as its stream.
    listening: Seats,
    /// Limits the rejections that are recorded at the same time, which have no permit.
    turns: Semaphore,
    waiting: Arc<Semaphore>,
    open: Open,
    /// Bytes of requests that are still arriving.
    arriving: AtomicUsize,
    rates: Mutex<Rates>,
}

/// Times of recent requests, by principal.
type Rates = HashMap<String, VecDeque<Instant>>;

impl Http {
    fn new(gateway: Gateway, running: &Running, address: SocketAddr) -> Self {
        let settings = &running.settings;
        let own = ["localhost", "127.0.0.1", "::1"].into_iter().map(str::to_owned).chain([address.ip().to_string()]);
        let config = StreamableHttpServerConfig::default()
            .with_allowed_hosts(own.chain(settings.hosts.iter().cloned()))
            .with_allowed_origins(own_origins(address).chain(settings.origins.iter().cloned()))
            .enforce_origin_validation()
            .with_max_request_body_bytes(settings.max_request)
            .with_cancellation_token(gateway.0.closed.child_token());
        let (doors, sessions) = (gateway.clone(), Arc::new(Returning::new(gateway.clone())));
        let mcp = StreamableHttpService::new(move || Ok(Door::new(doors.clone(), None)), Arc::clone(&sessions), config);
        let (seats, beside) = (Seats::new(settings.concurrency), Seats::new(settings.concurrency));
        let listening = Seats::new(crate::files::connections(listen::CONNECTIONS));
        let door = Door::new(gateway.clone(), None);
        let (turns, waiting) = (Semaphore::new(refused::TURNS), Arc::new(Semaphore::new(refused::WAITING)));
        let arriving = AtomicUsize::new(0);
        let (open, rates) = (Open::default(), Mutex::default());
        Self { gateway, door, mcp, sessions, seats, beside, listening, turns, waiting, open, arriving, rates }
    }

    async fn answer(self: &Arc<Self>, request: Request<Incoming>) -> Answer {
        let page = self.page(request.headers());
        let mut answer = match self.route(request).await {
            Ok(answer) => answer,
            Err(refused) => {
                self.gateway.0.metrics.turned_away();
                *refused
            }
        };
        if let Some(page) = page {
            pages::show(&mut answer, page);
        }
        answer
    }

    async fn route(self: &Arc<Self>, request: Request<Incoming>) -> Result<Answer, Box<Answer>> {
        let running = self.gateway.running();
        let (mut parts, body) = request.into_parts();
        self.check_headers(&parts)?;
        if let Some(answer) = pages::preflight(&parts) {
            return Ok(answer);
        }
        let path = parts.uri.path().to_owned();
        let words: Vec<&str> = path.split('/').filter(|word| !word.is_empty()).collect();
        match words.as_slice() {
            ["healthz"] => return Ok(text(StatusCode::OK, "ok\n")),
            ["readyz"] => {
                return Ok(match self.gateway.ready() {
                    Ok(()) => text(StatusCode::OK, "ready\n"),
                    Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, &format!("not ready: {why}\n")),
                });
            }
            ["openapi.json"] => return Ok(json_answer(StatusCode::OK, &crate::api::description())),
            [".well-known", "oauth-protected-resource", place @ ..] => return Ok(resource::metadata(&running, &parts, place)),
            _ => {}
        }
        if self.gateway.0.stop.is_cancelled() {
            return Err(refusal(StatusCode::SERVICE_UNAVAILABLE, "the gateway is shutting down", Some(5)));
        }
        let caller = self.let_in(&running, &parts, &words).await?;
        self.hold_rate(&running, &caller, 1)?;
        // A request takes no permit while its body arrives, which may take long.
        let is_shared = !running.keys.is_open();
        let full = || refusal(StatusCode::SERVICE_UNAVAILABLE, CROWDED, Some(1));
        let seats = |many: u32| self.seats.take(&caller.principal, many, is_shared).ok_or_else(full);
        match words.as_slice() {
            ["metrics"] => self.metrics(&running, &caller),
            ["mcp", _, _, _, ..] => Err(refusal(StatusCode::NOT_FOUND, "unknown path; use /mcp/{agent}/{session}", None)),
            ["mcp", rest @ ..] => {
                let Some(asked) = Asked::of(rest) else {
                    let text = self.collect(&running, &parts, body).await?;
                    let why = "the percent-encoding of the URL path is not valid UTF-8";
                    return Err(self.unread(&caller, Some(""), text, ErrorCode::INVALID_REQUEST, why).await);
                };
                let hold = self.hold_session(&parts.headers, &caller, asked.agent.as_deref())?;
                // The library compares this header with the body only from this revision on.
                let listens = parts.method == Method::GET
                    || (is_newer(&parts.headers) && parts.headers.get("mcp-method").is_some_and(|method| method == "subscriptions/listen"));
                let text = self.collect(&running, &parts, body).await?;
                let read = match parts.method == Method::POST {
                    true => raw::read(text.clone(), &bounds(running.settings.max_request)),
                    false => Ok(Read::One(Message::default())),
                };
                let (mut message, batch) = match read {
                    Ok(Read::One(message)) => {
                        if let Some(why) = raw::overlong(&message.value) {
                            return Err(self.unread(&caller, asked.agent.as_deref(), text, ErrorCode::INVALID_REQUEST, &why).await);
                        }
                        (message, None)
                    }
                    Ok(Read::Several(messages)) => match Batch::of(&parts, messages) {
                        Ok(batch) => (Message::default(), Some(batch)),
                        Err((messages, why)) => {
                            self.lost(&running, &caller, asked.agent.as_deref(), messages, &why).await;
                            return Err(Box::new(batch::refused(&why)));
                        }
                    },
                    Err(why) => {
                        return Err(self.unread(&caller, asked.agent.as_deref(), text, ErrorCode::PARSE_ERROR, &why).await);
                    }
                };
                drop(text);
                let many = batch.as_ref().map_or(1, Batch::len);
                let room = running.settings.rate.map_or(u64::MAX, |rate| u64::from(rate.calls)).min(self.seats.most(is_shared) as u64);
                if u64::from(many) > room {
                    let why = format!("no more than {room} messages are taken at once");
                    let messages = batch.map(Batch::into_messages).unwrap_or_default();
                    self.lost(&running, &caller, asked.agent.as_deref(), messages, &why).await;
                    return Err(refusal(StatusCode::BAD_REQUEST, &why, None));
                }
                // The library would answer the first of two where the second is waited for, and the second nowhere.
                let session = parts.headers.get("mcp-session-id").and_then(|id| id.to_str().ok());
                let unanswered = match &batch {
                    Some(batch) => self.open.begin(session, batch.values()),
                    None => self.open.begin(session, [&message.value]),
                };
                let Some(unanswered) = unanswered else {
                    return Err(self.confused(&running, &caller, asked.agent.as_deref(), message, batch).await);
                };
                let said = |message, batch: Option<Batch>| batch.map_or_else(|| vec![message], Batch::into_messages);
                if let Err(refused) = self.hold_rate(&running, &caller, many - 1) {
                    self.lost(&running, &caller, asked.agent.as_deref(), said(message, batch), HASTY).await;
                    return Err(refused);
                }
                // Who only answers, takes back or leaves has others: those who are at it need that to come to an end. So has who listens or
                // comes back, which may be for days.
                let asking = match &batch {
                    Some(batch) => batch.values().filter(|message| batch::asks(message)).count(),
                    None => usize::from(batch::asks(&message.value)),
                };
                let taken = match asking {
                    _ if listens => self.listening.take(&caller.principal, 1, is_shared).ok_or_else(full),
                    0 => self.beside.take(&caller.principal, 1, is_shared).ok_or_else(full),
                    asking => seats(u32::try_from(asking).unwrap_or(many)),
                };
                let seat = match taken {
                    Ok(seat) => Arc::new(seat),
                    Err(refused) => {
                        // All of them have counted as requests.
                        let calls = batch::calls(said(message, batch));
                        self.set_down(&caller, asked.agent.as_deref(), calls, batch::MOST, CROWDED).await;
                        return Err(refused);
                    }
                };
                if let Some(raw) = message.raw.take() {
                    parts.extensions.insert(raw);
                    parts.headers.remove(CONTENT_LENGTH);
                }
                if self.door.prune(&running, &caller, asked.agent.as_deref(), &mut message) {
                    parts.headers.remove(CONTENT_LENGTH);
                }
                parts.extensions.insert(caller.clone());
                parts.extensions.insert(asked.clone());
                // The running request holds its permit and its session, even if its client
                // disconnects.
                parts.extensions.insert(unanswered.clone());
                if asking > 0 {
                    parts.extensions.insert(Arc::clone(&seat));
                }
                if let Some(hold) = &hold {
                    parts.extensions.insert(hold.clone());
                }
                let unanswered = Some(unanswered);
                if let Some(batch) = batch {
                    return Ok(batch
                        .answer(self, &parts, &caller, asked.agent.as_deref())
                        .await
                        .map(|body| Seated { body, _seat: seat, unanswered, _hold: hold }.boxed()));
                }
                let answer = match Straight::of(&running, &parts, &mut message.value) {
                    Some(call) => call.answer(self, parts).await,
                    None => {
                        let opens = opens_session(&parts.headers, &message.value);
                        let request = Request::from_parts(parts, Full::new(message.text));
                        let answer = match opens {
                            true => self.open_session(&running, request, &caller, asked.agent.as_deref()).await?,
                            false => self.handle(request, &caller, asked.agent.as_deref()).await,
                        };
                        self.noted(answer, &caller, asked.agent.as_deref(), &message.value).await
                    }
                };
                // The response body holds the permit until it is sent.
                Ok(answer.map(|body| Seated { body, _seat: seat, unanswered, _hold: hold }.boxed()))
            }
            ["v1", "calls", verb] if parts.method == Method::POST => {
                let counted = self.gateway.count();
                let text = self.collect(&running, &parts, body).await?;
                let seat = match seats(1) {
                    Ok(seat) => seat,
                    Err(refused) => {
                        let call = Glimpse::of_body(&text).filter(|_| matches!(*verb, "check" | "report"));
                        let agent = call.as_ref().and_then(|call| call.agent.clone());
                        drop(text);
                        self.set_down(&caller, agent.as_deref(), (call.into_iter().collect(), 0), 1, CROWDED).await;
                        return Err(refused);
                    }
                };
                let (verb, context) = ((*verb).to_owned(), crate::trace::of_headers(&parts));
                // Hooks may take long. The task continues and holds its permit if the client
                // disconnects.
                let work = async move {
                    let (_counted, _seat) = (counted, seat);
                    crate::api::call(&running, &verb, &caller, &parts, &text).with_context(context).await
                };
                match tokio::spawn(work).await {
                    Ok(Ok(answer)) => Ok(json_answer(StatusCode::OK, &answer)),
                    Ok(Err((status, told))) => Err(Box::new(json_answer(status, &told))),
                    Err(_) => Err(refusal(StatusCode::INTERNAL_SERVER_ERROR, "cannot answer the request: internal error", None)),
                }
            }
            ["v1", "calls", "check" | "report"] => {
                let mut answer = refusal(StatusCode::METHOD_NOT_ALLOWED, "use POST", None);
                answer.headers_mut().insert(ALLOW, http::HeaderValue::from_static("POST"));
                Err(answer)
            }
            _ => Err(refusal(StatusCode::NOT_FOUND, "unknown path; use /mcp", None)),
        }
    }

    /// Checks what the headers alone decide.
    fn check_headers(&self, parts: &Parts) -> Result<(), Box<Answer>> {
        let once = |name: &http::HeaderName| parts.headers.get_all(name).iter().count() <= 1;
        // hyper rejects two different `Content-Length` headers, and ignores them beside chunked
        // encoding.
        if !once(&HOST) || !once(&TRANSFER_ENCODING) || !once(&ORIGIN) || !once(&CONTENT_TYPE) {
            return Err(refusal(StatusCode::BAD_REQUEST, "duplicate header", None));
        }
        // Bodies are not decompressed.
        if parts.headers.contains_key(CONTENT_ENCODING) {
            return Err(refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, "compressed requests are not supported", None));
        }
        let allowed = &self.mcp.config.allowed_hosts;
        let host =
            parts.headers.get(HOST).and_then(|host| host.to_str().ok()).or_else(|| parts.uri.authority().map(http::uri::Authority::as_str));
        let host = host.and_then(|host| host.parse::<http::uri::Authority>().ok());
        let known = host.as_ref().is_some_and(|host| {
            let bare = host.host().trim_matches(['[', ']']);
            allowed.iter().any(|known| known.eq_ignore_ascii_case(bare) || known.eq_ignore_ascii_case(host.as_str()))
        });
        if !known {
            return Err(refusal(StatusCode::FORBIDDEN, "unknown `Host` header; add it to `hosts` in `[gateway]`", None));
        }
        if parts.headers.get(ORIGIN).is_some_and(|origin| !self.admits(origin)) {
            return Err(refusal(StatusCode::FORBIDDEN, "origin not allowed; add it to `origins` in `[gateway]`", None));
        }
        Ok(())
    }

    async fn let_in(&self, running: &Running, parts: &Parts, words: &[&str]) -> Result<Caller, Box<Answer>> {
        let found = running.keys.caller(&parts.headers, self.gateway.principal()).await;
        found.map_err(|why| resource::challenge(running, parts, words, why))
    }

    /// Serves the metrics of all agents to callers that may see all of them.
    fn metrics(&self, running: &Running, caller: &Caller) -> Result<Answer, Box<Answer>> {
        if !identity::sees_all(running, caller) {
            let why = "metrics cover all agents and tools; use a token that may see all of them";
            return Err(refusal(StatusCode::FORBIDDEN, why, None));
        }
        let mut answer = text(StatusCode::OK, &self.gateway.0.metrics.text(&self.gateway.health()));
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        answer.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static(kind));
        Ok(answer)
    }

    /// Counts requests against the rate limit of a caller: all of them, or none.
    fn hold_rate(&self, running: &Running, caller: &Caller, many: u32) -> Result<(), Box<Answer>> {
        let Some(rate) = running.settings.rate else { return Ok(()) };
        let mut rates = lock(&self.rates);
        let now = Instant::now();
        if rates.len() > 10_000 {
            rates.retain(|_, asked| asked.back().is_some_and(|last| now.duration_since(*last) < rate.per));
        }
        let asked = recent(&mut rates, &caller.principal, rate.per, now);
        if asked.len() + many as usize > rate.calls as usize {
            let wait = asked.front().map_or(rate.per, |first| rate.per.saturating_sub(now.duration_since(*first)));
            return Err(refusal(StatusCode::TOO_MANY_REQUESTS, HASTY, Some(wait.as_secs() + 1)));
        }
        asked.extend((0..many).map(|_| now));
        Ok(())
    }

    /// As many more requests of a caller as there is room for, and no more than these: how many that is.
    fn take_rate(&self, running: &Running, caller: &Caller, most: usize) -> usize {
        let Some(rate) = running.settings.rate else { return most };
        let mut rates = lock(&self.rates);
        let now = Instant::now();
        let asked = recent(&mut rates, &caller.principal, rate.per, now);
        let taken = most.min((rate.calls as usize).saturating_sub(asked.len()));
        asked.extend((0..taken).map(|_| now));
        taken
    }

    /// Passes a request to the library, with the agent for its `get_tool`.
    pub(crate) async fn handle(&self, request: Request<Full<Bytes>>, caller: &Caller, agent: Option<&str>) -> Answer {
        let agent = identity::agent(&self.gateway.running(), caller, agent).ok().map(|agent| (agent, caller.principal.clone()));
        let session = request.headers().get("mcp-session-id").filter(|_| !is_newer(request.headers())).cloned();
        let answer = AGENT.scope(agent, self.mcp.handle(request)).await;
        self.said_in(session.as_ref(), answer)
    }

    /// Reads the body of a request, within limits for size and time.
    async fn collect(&self, running: &Running, parts: &Parts, body: Incoming) -> Result<Bytes, Box<Answer>> {
        if parts.method != Method::POST {
            return Ok(Bytes::new());
        }
        let most = running.settings.max_request;
        let mut held = Held::new(&self.arriving);
        let mut body = Limited::new(body, most);
        let collect = async {
            let mut bytes = Vec::new();
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
                    true => refusal(StatusCode::PAYLOAD_TOO_LARGE, &format!("the request is larger than {most} bytes"), None),
                    false => refusal(StatusCode::BAD_REQUEST, "the request body is incomplete", None),
                })?;
                if let Ok(chunk) = frame.into_data() {
                    if !held.takes(chunk.len()) {
                        return Err(refusal(StatusCode::SERVICE_UNAVAILABLE, "too many bytes of requests are arriving", Some(1)));
                    }
                    bytes.extend_from_slice(&chunk);
                }
            }
            Ok(Bytes::from(bytes))
        };
        let collected = tokio::time::timeout(PATIENCE, collect).await;
        collected.map_err(|_| refusal(StatusCode::REQUEST_TIMEOUT, "the request body took too long to arrive", None))?
    }
}

/// Returns the times of the requests of a principal that still count.
fn recent<'r>(rates: &'r mut Rates, principal: &str, per: Duration, now: Instant) -> &'r mut VecDeque<Instant> {
    let asked = rates.entry(principal.to_owned()).or_default();
    while asked.front().is_some_and(|first| now.duration_since(*first) >= per) {
        asked.pop_front();
    }
    asked
}

/// Returns whether a request is of 2026-07-28 or later.
fn is_newer(headers: &HeaderMap) -> bool {
    headers.get("mcp-protocol-version").is_some_and(|version| version.as_bytes() >= crate::MODERN.as_bytes())
}

/// Returns the origins of pages that the gateway itself would serve.
fn own_origins(address: SocketAddr) -> impl Iterator<Item = String> {
    let port = address.port();
    ["localhost", "127.0.0.1", "[::1]"].into_iter().map(move |host| format!("http://{host}:{port}"))
}

fn body(text: impl Into<Bytes>) -> BoxBody<Bytes, Infallible> {
    Full::new(text.into()).boxed()
}

fn text(status: StatusCode, said: &str) -> Answer {
    let mut answer = Response::new(body(said.to_owned()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("text/plain; charset=utf-8"));
    answer
}

pub(crate) fn json_answer(status: StatusCode, said: &Value) -> Answer {
    let mut answer = Response::new(body(said.to_string()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    answer
}

fn refusal(status: StatusCode, why: &str, retry: Option<u64>) -> Box<Answer> {
    let mut answer = json_answer(status, &json!({"error": why}));
    if let Some(seconds) = retry {
        answer.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    Box::new(answer)
}
