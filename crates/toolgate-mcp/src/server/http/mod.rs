//! Serves MCP, the decision API and operational endpoints over HTTP.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use opentelemetry::trace::FutureExt as _;
use rmcp::model::ErrorCode;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::{Value, json};

use crate::gateway::{ActiveConfig, Gateway};
use crate::server::handler::{CURRENT_AGENT, McpServer};
use crate::server::http::admission::{GuardedBody, PrincipalLimiter};
use crate::server::http::fast_path::FastPathCall;
use crate::server::identity;
use crate::server::identity::{Caller, PathSelector};
use crate::server::malformed_call;
use crate::server::parse_message;
use crate::server::parse_message::ParsedMessage;
use crate::server::stdio::message_bounds;

pub(crate) mod admission;
mod cors;
pub(crate) mod event_buffer;
pub(crate) mod fast_path;
mod legacy_sessions;
mod listener;
mod request_checks;
mod resource_metadata;
mod resumable_sessions;
pub(crate) mod self_wake;

use crate::server::http::legacy_sessions::is_session_start;
pub use crate::server::http::listener::HttpListener;
use crate::server::http::resumable_sessions::ResumableSessions;

/// Timeout for receiving a request, and for the TLS handshake.
const REQUEST_READ_TIMEOUT: Duration = Duration::from_secs(15);
/// Message for an exceeded limit of concurrent requests.
const OVERLOADED_MESSAGE: &str = "too many concurrent requests";

pub(crate) type HttpResponse = Response<BoxBody<Bytes, Infallible>>;

/// State that all requests share.
pub(crate) struct HttpServer {
    pub(crate) gateway: Gateway,
    /// Handles stateless calls.
    pub(crate) server: McpServer,
    pub(crate) mcp: StreamableHttpService<McpServer, ResumableSessions>,
    /// Sessions of clients of earlier revisions.
    sessions: Arc<ResumableSessions>,
    request_permits: PrincipalLimiter,
    /// Permits for messages that are not requests.
    message_permits: PrincipalLimiter,
    /// Permits for streams that only listen, each as long as its stream.
    stream_permits: PrincipalLimiter,
    /// Bytes of requests that are still arriving.
    arriving_bytes: AtomicUsize,
    request_times: Mutex<RequestTimes>,
}

/// Times of recent requests, by principal.
type RequestTimes = HashMap<String, VecDeque<Instant>>;

impl HttpServer {
    fn new(gateway: Gateway, running: &ActiveConfig, address: SocketAddr) -> Self {
        let settings = &running.settings;
        let own_hosts = ["localhost", "127.0.0.1", "::1"]
            .into_iter()
            .map(str::to_owned)
            .chain([address.ip().to_string()]);
        let config = StreamableHttpServerConfig::default()
            .with_allowed_hosts(own_hosts.chain(settings.hosts.iter().cloned()))
            .with_allowed_origins(own_origins(address).chain(settings.origins.iter().cloned()))
            .enforce_origin_validation()
            .with_max_request_body_bytes(settings.max_request_bytes)
            .with_cancellation_token(gateway.0.closed.child_token());
        let (shared_gateway, sessions) =
            (gateway.clone(), Arc::new(ResumableSessions::new(gateway.clone())));
        let mcp = StreamableHttpService::new(
            move || Ok(McpServer::new(shared_gateway.clone(), None)),
            Arc::clone(&sessions),
            config,
        );
        let max_concurrency = settings.max_concurrency;
        let stream_permits =
            PrincipalLimiter::new(toolgate_process::nofile_limit::max_connections(
                crate::server::http::listener::MAX_CONNECTIONS,
            ));
        Self {
            server: McpServer::new(gateway.clone(), None),
            gateway,
            mcp,
            sessions,
            request_permits: PrincipalLimiter::new(max_concurrency),
            message_permits: PrincipalLimiter::new(max_concurrency),
            stream_permits,
            arriving_bytes: AtomicUsize::new(0),
            request_times: Mutex::default(),
        }
    }

    async fn respond(self: &Arc<Self>, request: Request<Incoming>) -> HttpResponse {
        let page = self.allowed_origin(request.headers());
        let mut answer = match self.handle_request(request).await {
            Ok(answer) => answer,
            Err(refused) => *refused,
        };
        // Rejected requests leave no ledger row: only calls do.
        let status = answer.status();
        if status.is_client_error() || status == StatusCode::SERVICE_UNAVAILABLE {
            self.gateway.0.metrics.count_rejection();
            tracing::debug!(status = status.as_u16(), "request rejected");
        }
        if let Some(page) = page {
            crate::server::http::cors::add_cors_headers(&mut answer, page);
        }
        answer
    }

    async fn handle_request(
        self: &Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<HttpResponse, Box<HttpResponse>> {
        let running = self.gateway.active_config();
        let (mut parts, body) = request.into_parts();
        self.check_headers(&parts)?;
        if let Some(answer) = crate::server::http::cors::preflight_response(&parts) {
            return Ok(answer);
        }
        let path = parts.uri.path().to_owned();
        let segments: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
        match segments.as_slice() {
            ["healthz"] => return Ok(text_response(StatusCode::OK, "ok\n")),
            ["readyz"] => {
                return Ok(match self.gateway.check_ready() {
                    Ok(()) => text_response(StatusCode::OK, "ready\n"),
                    Err(why) => text_response(
                        StatusCode::SERVICE_UNAVAILABLE,
                        &format!("not ready: {why}\n"),
                    ),
                });
            }
            ["openapi.json"] => {
                return Ok(json_response(
                    StatusCode::OK,
                    &crate::server::decision_api::openapi_description(),
                ));
            }
            [".well-known", "oauth-protected-resource", resource_path @ ..] => {
                return Ok(crate::server::http::resource_metadata::metadata_response(
                    &running,
                    &parts,
                    resource_path,
                ));
            }
            _ => {}
        }
        if self.gateway.0.stop.is_cancelled() {
            return Err(error_response(
                StatusCode::SERVICE_UNAVAILABLE,
                "the gateway is shutting down",
                Some(5),
            ));
        }
        let caller = self.authenticate(&running, &parts, &segments).await?;
        self.check_rate_limit(&running, &caller)?;
        // A request takes no permit while its body arrives, which may take long.
        let is_shared = !running.authenticator.is_auth_disabled();
        let full = || error_response(StatusCode::SERVICE_UNAVAILABLE, OVERLOADED_MESSAGE, Some(1));
        let acquire_permits = |count: u32| {
            self.request_permits.try_acquire(&caller.principal, count, is_shared).ok_or_else(full)
        };
        match segments.as_slice() {
            ["metrics"] => self.metrics_response(&running, &caller),
            ["mcp", _, _, _, ..] => Err(error_response(
                StatusCode::NOT_FOUND,
                "unknown path; use /mcp/{agent}/{session}",
                None,
            )),
            ["mcp", rest @ ..] => {
                let Some(selector) = PathSelector::from_segments(rest) else {
                    return Err(error_response(
                        StatusCode::BAD_REQUEST,
                        "the percent-encoding of the URL path is not valid UTF-8",
                        None,
                    ));
                };
                let keep_alive =
                    self.check_session(&parts.headers, &caller, selector.agent.as_deref())?;
                // The library compares this header with the body only from this revision on.
                let listens = parts.method == Method::GET
                    || (is_modern_request(&parts.headers)
                        && parts
                            .headers
                            .get("mcp-method")
                            .is_some_and(|method| method == "subscriptions/listen"));
                let text = self.read_body(&running, &parts, body).await?;
                let mut message = match parts.method == Method::POST {
                    true => parse_message::parse_message(
                        text.clone(),
                        &message_bounds(running.settings.max_request_bytes),
                    )
                    .map_err(|error| {
                        rejection_response(
                            error.code(),
                            parse_message::find_request_id(&text),
                            error.message(),
                        )
                    })?,
                    false => ParsedMessage::default(),
                };
                if let Some(why) = parse_message::metadata_size_error(&message.value) {
                    return Err(rejection_response(ErrorCode::INVALID_REQUEST, Value::Null, &why));
                }
                drop(text);
                // Messages that are not requests have their own permits, because running requests
                // need them to finish. So do streams that only listen, which may last for days.
                let is_request =
                    message.value.get("method").is_some() && message.value.get("id").is_some();
                let permit = match is_request {
                    _ if listens => self
                        .stream_permits
                        .try_acquire(&caller.principal, 1, is_shared)
                        .ok_or_else(full),
                    false => self
                        .message_permits
                        .try_acquire(&caller.principal, 1, is_shared)
                        .ok_or_else(full),
                    true => acquire_permits(1),
                };
                let permit = Arc::new(permit?);
                if let Some(raw) = message.raw_arguments.take() {
                    parts.extensions.insert(raw);
                    parts.headers.remove(CONTENT_LENGTH);
                }
                if self.server.filter_subscriptions(
                    &running,
                    &caller,
                    selector.agent.as_deref(),
                    &mut message,
                ) {
                    parts.headers.remove(CONTENT_LENGTH);
                }
                parts.extensions.insert(caller.clone());
                parts.extensions.insert(selector.clone());
                // The running request holds its permit and its session, even if its client
                // disconnects.
                if is_request {
                    parts.extensions.insert(Arc::clone(&permit));
                }
                if let Some(keep_alive) = &keep_alive {
                    parts.extensions.insert(keep_alive.clone());
                }
                let answer = match FastPathCall::from_request(&running, &parts, &mut message.value)
                {
                    Some(call) => call.respond(self, parts).await,
                    None => {
                        let opens = is_session_start(&parts.headers, &message.value);
                        let request = Request::from_parts(parts, Full::new(message.text));
                        match opens {
                            true => {
                                self.open_session(
                                    &running,
                                    request,
                                    &caller,
                                    selector.agent.as_deref(),
                                )
                                .await?
                            }
                            false => {
                                self.handle_mcp(request, &caller, selector.agent.as_deref()).await
                            }
                        }
                    }
                };
                // The response body holds the permit until it is sent.
                Ok(answer.map(|body| {
                    GuardedBody { body, _permit: permit, _keep_alive: keep_alive }.boxed()
                }))
            }
            ["v1", "calls", verb] if parts.method == Method::POST => {
                let counted = self.gateway.count_call();
                let text = self.read_body(&running, &parts, body).await?;
                let permit = acquire_permits(1)?;
                let (verb, context) =
                    ((*verb).to_owned(), crate::trace_context::context_from_headers(&parts));
                // Hooks may take long. The task continues and holds its permit if the client
                // disconnects.
                let work = async move {
                    let (_counted, _permit) = (counted, permit);
                    crate::server::decision_api::handle_decision_request(
                        &running, &verb, &caller, &parts, &text,
                    )
                    .with_context(context)
                    .await
                };
                match tokio::spawn(work).await {
                    Ok(Ok(answer)) => Ok(json_response(StatusCode::OK, &answer)),
                    Ok(Err((status, body))) => Err(Box::new(json_response(status, &body))),
                    Err(_) => Err(error_response(
                        StatusCode::INTERNAL_SERVER_ERROR,
                        "cannot answer the request: internal error",
                        None,
                    )),
                }
            }
            ["v1", "calls", "check" | "report"] => {
                let mut answer = error_response(StatusCode::METHOD_NOT_ALLOWED, "use POST", None);
                answer.headers_mut().insert(ALLOW, http::HeaderValue::from_static("POST"));
                Err(answer)
            }
            _ => Err(error_response(StatusCode::NOT_FOUND, "unknown path; use /mcp", None)),
        }
    }

    async fn authenticate(
        &self,
        running: &ActiveConfig,
        parts: &Parts,
        segments: &[&str],
    ) -> Result<Caller, Box<HttpResponse>> {
        let found = running
            .authenticator
            .authenticate(&parts.headers, self.gateway.default_principal())
            .await;
        found.map_err(|why| {
            crate::server::http::resource_metadata::unauthorized_response(
                running, parts, segments, why,
            )
        })
    }

    /// Serves the metrics of all agents to callers that may see all of them.
    fn metrics_response(
        &self,
        running: &ActiveConfig,
        caller: &Caller,
    ) -> Result<HttpResponse, Box<HttpResponse>> {
        if !identity::can_see_all(running, caller) {
            let why = "metrics cover all agents and tools; use a token that may see all of them";
            return Err(error_response(StatusCode::FORBIDDEN, why, None));
        }
        let mut answer =
            text_response(StatusCode::OK, &self.gateway.0.metrics.export(&self.gateway.health()));
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        answer.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static(kind));
        Ok(answer)
    }

    /// Passes a request to the library, with the agent for its `get_tool`.
    pub(crate) async fn handle_mcp(
        &self,
        request: Request<Full<Bytes>>,
        caller: &Caller,
        agent: Option<&str>,
    ) -> HttpResponse {
        let agent = identity::resolve_agent(&self.gateway.active_config(), caller, agent)
            .ok()
            .map(|agent| (agent, caller.principal.clone()));
        let session = request
            .headers()
            .get("mcp-session-id")
            .filter(|_| !is_modern_request(request.headers()))
            .cloned();
        let answer = CURRENT_AGENT.scope(agent, self.mcp.handle(request)).await;
        self.replace_ended_session_error(session.as_ref(), answer)
    }
}

/// Returns whether a request is of 2026-07-28 or later.
fn is_modern_request(headers: &HeaderMap) -> bool {
    headers
        .get("mcp-protocol-version")
        .is_some_and(|version| version.as_bytes() >= crate::REVISION_2026_07_28.as_bytes())
}

/// Returns the origins of pages that the gateway itself would serve.
fn own_origins(address: SocketAddr) -> impl Iterator<Item = String> {
    let port = address.port();
    ["localhost", "127.0.0.1", "[::1]"].into_iter().map(move |host| format!("http://{host}:{port}"))
}

fn full_body(text: impl Into<Bytes>) -> BoxBody<Bytes, Infallible> {
    Full::new(text.into()).boxed()
}

fn text_response(status: StatusCode, text: &str) -> HttpResponse {
    let mut answer = Response::new(full_body(text.to_owned()));
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(CONTENT_TYPE, http::HeaderValue::from_static("text/plain; charset=utf-8"));
    answer
}

pub(crate) fn json_response(status: StatusCode, body: &Value) -> HttpResponse {
    let mut answer = Response::new(full_body(body.to_string()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    answer
}

/// Builds the response to a message that is not a valid request.
fn rejection_response(code: ErrorCode, id: Value, why: &str) -> Box<HttpResponse> {
    Box::new(json_response(
        StatusCode::BAD_REQUEST,
        &malformed_call::rejection_message(code, id, why),
    ))
}

fn error_response(status: StatusCode, why: &str, retry: Option<u64>) -> Box<HttpResponse> {
    let mut answer = json_response(status, &json!({"error": why}));
    if let Some(seconds) = retry {
        answer.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    Box::new(answer)
}
