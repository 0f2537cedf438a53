//! Fast path for calls to upstreams of revision 2026-07-28 over plain HTTP.
//!
//! Such a call is one request and one response, and needs no session, worker or task. The future
//! that waits for the response drives the connection.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use http::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT,
};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use rmcp::ErrorData;
use rmcp::model::{
    CallToolResult, InputRequiredResult, InputResponses, LoggingMessageNotificationParam,
    ProgressNotificationParam, RequestMetaObject, ServerResult,
};
use rmcp::transport::streamable_http_client::SseError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use sse_stream::Sse;
use tokio::net::TcpStream;

use crate::gateway::lock;
use crate::upstream::callbacks::{MAX_BUFFERED_MESSAGE_BYTES, UpstreamEvent};
use crate::upstream::transport::bounded_http;
use crate::upstream::transport::bounded_http::{MAX_RESPONSE_BYTES, is_too_long};

/// The timeout for opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an idle connection stays in the pool.
///
/// Many servers close idle connections after 5 s, and a request sent at that moment is lost.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// The maximum number of idle connections.
const MAX_IDLE_CONNECTIONS: usize = 64;

type ConnectionFuture = Pin<Box<Connection<TokioIo<TcpStream>, Full<Bytes>>>>;

/// An HTTP connection and the future that drives it.
struct PooledConnection {
    send: SendRequest<Full<Bytes>>,
    /// `None` once the connection has ended. Waiting requests then fail.
    connection: Option<ConnectionFuture>,
    /// The unread end of the last response.
    unread_events: Option<SseEventStream>,
}

impl PooledConnection {
    /// Returns whether the connection can take the next request.
    fn is_ready(&mut self, context: &mut Context<'_>) -> bool {
        if !self.is_open(context) {
            return false;
        }
        while let Some(rest) = &mut self.unread_events {
            match rest.as_mut().poll_next(context) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(None) => self.unread_events = None,
                Poll::Ready(Some(Err(_))) | Poll::Pending => return false,
            }
        }
        // Reading the end of a response frees the connection.
        self.is_open(context) && matches!(self.send.poll_ready(context), Poll::Ready(Ok(())))
    }

    fn is_open(&mut self, context: &mut Context<'_>) -> bool {
        drive_connection(&mut self.connection, context)
    }
}

/// An HTTP client for calls to one upstream: address, headers, and idle connections.
pub(crate) struct DirectClient {
    host: String,
    port: u16,
    target: Uri,
    headers: HeaderMap,
    idle: Mutex<Vec<(Instant, PooledConnection)>>,
    next_id: AtomicU64,
}

/// Why a call on the fast path has no result.
pub(crate) enum DirectCallError {
    /// The upstream returned a JSON-RPC error.
    JsonRpc(ErrorData),
    /// The connection could not be opened, and nothing was sent.
    NotConnected(String),
    /// The server rejected the request with a status, and a retry delay in milliseconds if given.
    Rejected(u16, Option<u64>),
    /// The response exceeds the size limit.
    TooLong,
    /// The response is not valid.
    InvalidResponse(String),
    /// The status does not say whether the request was executed. The second field is the retry
    /// delay in milliseconds.
    ServerError(u16, Option<u64>),
    /// The request may have been executed.
    Unknown(String),
}

/// The parameters of a `tools/call` request.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DirectCallParams<'p> {
    pub(crate) name: &'p str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) arguments: Option<&'p serde_json::Map<String, Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) input_responses: Option<&'p InputResponses>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) request_state: Option<&'p str>,
    #[serde(rename = "_meta")]
    pub(crate) meta: RequestMetaObject,
}

#[derive(Serialize)]
struct DirectCallRequest<'p> {
    jsonrpc: &'static str,
    id: u64,
    method: &'static str,
    params: &'p DirectCallParams<'p>,
}

/// Any JSON-RPC message from an upstream.
#[derive(Deserialize)]
struct UpstreamMessage<'s> {
    #[serde(borrow, default)]
    id: Option<&'s RawValue>,
    #[serde(borrow, default)]
    method: Option<std::borrow::Cow<'s, str>>,
    #[serde(borrow, default)]
    params: Option<&'s RawValue>,
    #[serde(borrow, default)]
    result: Option<&'s RawValue>,
    #[serde(default)]
    error: Option<ErrorData>,
}

/// A notification that arrives during a call.
pub(crate) enum DirectCallEvent {
    /// For the client of the call.
    Client(UpstreamEvent),
    /// A list of the upstream changed.
    ListsChanged,
    /// A resource changed.
    ResourceUpdated(String),
}

impl DirectClient {
    /// Creates a client for a URL; `None` if the fast path does not support the URL.
    pub(crate) fn new(
        url: &str,
        custom: impl IntoIterator<Item = (HeaderName, HeaderValue)>,
        token: Option<&str>,
    ) -> Option<Self> {
        let url = url::Url::parse(url).ok()?;
        // TLS, and user names or passwords in the URL, are left to the general client.
        if url.scheme() != "http" || !url.username().is_empty() || url.password().is_some() {
            return None;
        }
        let host = url.host_str()?.trim_matches(['[', ']']).to_owned();
        let target = match url.query() {
            Some(query) => format!("{}?{query}", url.path()),
            None => url.path().to_owned(),
        };
        let mut headers: HeaderMap = custom.into_iter().collect();
        let authority = match url.port() {
            Some(port) => format!("{}:{port}", url.host_str()?),
            None => url.host_str()?.to_owned(),
        };
        headers.insert(HOST, authority.parse().ok()?);
        if let Some(token) = token {
            let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        headers.insert(
            USER_AGENT,
            HeaderValue::from_static(concat!("toolgate/", env!("CARGO_PKG_VERSION"))),
        );
        headers.insert(ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers
            .insert("mcp-protocol-version", HeaderValue::from_static(crate::REVISION_2026_07_28));
        headers.insert("mcp-method", HeaderValue::from_static("tools/call"));
        Some(Self {
            host,
            port: url.port_or_known_default()?,
            target: target.parse().ok()?,
            headers,
            idle: Mutex::default(),
            next_id: AtomicU64::new(0),
        })
    }

    /// Calls a tool, and passes notifications to `tell`.
    ///
    /// Dropping the future closes the connection, which cancels the request in this revision.
    pub(crate) async fn call(
        &self,
        params: &DirectCallParams<'_>,
        mut on_event: impl FnMut(DirectCallEvent),
    ) -> Result<ServerResult, DirectCallError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let message = DirectCallRequest { jsonrpc: "2.0", id, method: "tools/call", params };
        let body = serde_json::to_vec(&message)
            .map_err(|error| DirectCallError::NotConnected(error.to_string()))?;
        let mut request = Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.target.clone();
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().insert(
            "mcp-name",
            HeaderValue::from_str(params.name)
                .map_err(|error| DirectCallError::NotConnected(error.to_string()))?,
        );
        loop {
            let (mut pooled, is_reused) = match self.take_idle().await {
                Some(pooled) => (pooled, true),
                None => {
                    (self.open_connection().await.map_err(DirectCallError::NotConnected)?, false)
                }
            };
            let sent =
                drive_while(&mut pooled.connection, pooled.send.try_send_request(request)).await;
            let answer = match sent {
                Ok(answer) => answer,
                Err(mut failed) => match failed.take_message() {
                    // The pooled connection was closed and nothing was sent, so try the next one.
                    Some(unsent) if is_reused => {
                        request = unsent;
                        continue;
                    }
                    Some(_) => {
                        return Err(DirectCallError::NotConnected(failed.error().to_string()));
                    }
                    None => return Err(DirectCallError::Unknown(failed.error().to_string())),
                },
            };
            let response =
                drive_while(&mut pooled.connection, read_response(answer, id, &mut on_event))
                    .await?;
            pooled.unread_events = response.unread_events;
            self.return_idle(pooled);
            return response.result;
        }
    }

    /// Takes an idle connection that is still open.
    async fn take_idle(&self) -> Option<PooledConnection> {
        loop {
            let (since, mut pooled) = lock(&self.idle).pop()?;
            if since.elapsed() > POOL_IDLE_TIMEOUT {
                // All others in the stack are older.
                lock(&self.idle).clear();
                return None;
            }
            let is_ready = poll_fn(|context| Poll::Ready(pooled.is_ready(context)));
            if is_ready.await {
                return Some(pooled);
            }
        }
    }

    fn return_idle(&self, pooled: PooledConnection) {
        let mut idle = lock(&self.idle);
        if idle.len() < MAX_IDLE_CONNECTIONS && pooled.connection.is_some() {
            idle.push((Instant::now(), pooled));
        }
    }

    /// Closes connections that were idle for too long.
    pub(crate) fn close_idle(&self) {
        lock(&self.idle).retain(|(since, _)| since.elapsed() <= POOL_IDLE_TIMEOUT);
    }

    /// Connects to the first address of the host that responds.
    async fn connect_tcp(&self) -> Result<TcpStream, String> {
        let addresses = tokio::net::lookup_host((self.host.as_str(), self.port))
            .await
            .map_err(|error| error.to_string())?;
        let mut why = "the host name has no address".to_owned();
        for address in addresses {
            match tokio::time::timeout(CONNECT_TIMEOUT / 4, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => why = error.to_string(),
                Err(_) => why = format!("{address} did not respond"),
            }
        }
        Err(why)
    }

    async fn open_connection(&self) -> Result<PooledConnection, String> {
        let opening = tokio::time::timeout(CONNECT_TIMEOUT, async {
            let stream = self.connect_tcp().await?;
            let _ = stream.set_nodelay(true);
            let (send, connection) = http1::Builder::new()
                .handshake(TokioIo::new(stream))
                .await
                .map_err(|error| error.to_string())?;
            Ok(PooledConnection {
                send,
                connection: Some(Box::pin(connection)),
                unread_events: None,
            })
        });
        opening.await.map_err(|_| format!("no connection within {CONNECT_TIMEOUT:?}"))?
    }
}

/// Polls a connection, and drops it if it has ended. Unsent requests then return to the caller.
fn drive_connection<D: Future + Unpin>(drive: &mut Option<D>, context: &mut Context<'_>) -> bool {
    if drive.as_mut().is_some_and(|drive| Pin::new(drive).poll(context).is_ready()) {
        *drive = None;
    }
    drive.is_some()
}

/// Polls `work` while driving the connection.
async fn drive_while<T, D: Future + Unpin>(
    drive: &mut Option<D>,
    work: impl Future<Output = T>,
) -> T {
    let mut work = pin!(work);
    poll_fn(move |context| {
        if let Poll::Ready(done) = work.as_mut().poll(context) {
            return Poll::Ready(done);
        }
        drive_connection(drive, context);
        work.as_mut().poll(context)
    })
    .await
}

/// A response and the unread rest of its stream.
struct DirectCallResponse {
    result: Result<ServerResult, DirectCallError>,
    unread_events: Option<SseEventStream>,
}

type SseEventStream = BoxStream<'static, Result<Sse, SseError>>;

/// Reads a response. After an error the connection cannot be used any more.
async fn read_response(
    answer: Response<Incoming>,
    id: u64,
    on_event: &mut impl FnMut(DirectCallEvent),
) -> Result<DirectCallResponse, DirectCallError> {
    let status = answer.status();
    let content_type =
        answer.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let (is_json, is_event_stream) = (
        content_type.starts_with(b"application/json"),
        content_type.starts_with(b"text/event-stream"),
    );
    if is_event_stream && status.is_success() {
        let mut events: SseEventStream =
            bounded_http::bounded_events(answer.into_body().into_data_stream());
        while let Some(event) = events.next().await {
            let event = event.map_err(|error| {
                if is_too_long(&error) {
                    DirectCallError::TooLong
                } else {
                    DirectCallError::Unknown(error.to_string())
                }
            })?;
            let is_message = event
                .event
                .as_deref()
                .is_none_or(|content_type| matches!(content_type, "" | "message"));
            // Empty events only keep the connection alive.
            let Some(text) = event.data.filter(|text| is_message && !text.trim().is_empty()) else {
                continue;
            };
            if let Some(result) = interpret_message(text.as_bytes(), id, true, on_event) {
                // Many servers end the stream right after the response.
                let has_ended = matches!(futures_util::poll!(events.next()), Poll::Ready(None));
                return Ok(DirectCallResponse {
                    result,
                    unread_events: (!has_ended).then_some(events),
                });
            }
        }
        return Err(DirectCallError::Unknown("the response ended early".to_owned()));
    }
    let wait = crate::http_tool::retry_after_ms(answer.headers());
    let is_rejected =
        (400..500).contains(&status.as_u16()) && status != StatusCode::REQUEST_TIMEOUT;
    let status_error = || match is_rejected {
        true => DirectCallError::Rejected(status.as_u16(), wait),
        false if status.is_success() => {
            DirectCallError::InvalidResponse("the response is not a JSON-RPC message".to_owned())
        }
        false => DirectCallError::ServerError(status.as_u16(), wait),
    };
    // An event stream with an error status is not read, but it may contain the result.
    if is_event_stream
        && !matches!(
            status,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS
        )
    {
        return Err(DirectCallError::ServerError(status.as_u16(), wait));
    }
    // For 401, 403 and 429 the status alone decides.
    if !is_json
        || matches!(
            status,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS
        )
    {
        return Err(status_error());
    }
    let text = match Limited::new(answer.into_body(), MAX_RESPONSE_BYTES).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => return Err(DirectCallError::TooLong),
        Err(error) => return Err(DirectCallError::Unknown(error.to_string())),
    };
    let result = match interpret_message(&text, id, status.is_success(), on_event) {
        // Some servers also express the result by the status.
        Some(result) => result,
        None if !status.is_success() => Err(status_error()),
        None => Err(DirectCallError::InvalidResponse(
            "the response does not match the request".to_owned(),
        )),
    };
    Ok(DirectCallResponse { result, unread_events: None })
}

/// Interprets a message: the response, or a notification before it.
///
/// An error without an id, or an invalid message, is the response only if the request was accepted
/// (`taken`).
fn interpret_message(
    text: &[u8],
    id: u64,
    is_accepted: bool,
    on_event: &mut impl FnMut(DirectCallEvent),
) -> Option<Result<ServerResult, DirectCallError>> {
    let message: UpstreamMessage<'_> = match serde_json::from_slice(text) {
        Ok(message) => message,
        Err(error) => {
            return is_accepted.then(|| Err(DirectCallError::InvalidResponse(error.to_string())));
        }
    };
    if let Some(method) = message.method {
        let params = message.params.map_or("{}", RawValue::get);
        // Drop long notifications: they would be buffered for a slow client.
        let event = match &*method {
            "notifications/progress" | "notifications/message"
                if params.len() > MAX_BUFFERED_MESSAGE_BYTES =>
            {
                None
            }
            "notifications/progress" => serde_json::from_str::<ProgressNotificationParam>(params)
                .ok()
                .map(|message| DirectCallEvent::Client(UpstreamEvent::Progress(message))),
            "notifications/message" => {
                serde_json::from_str::<LoggingMessageNotificationParam>(params)
                    .ok()
                    .map(|message| DirectCallEvent::Client(UpstreamEvent::Log(message)))
            }
            "notifications/resources/updated" => {
                serde_json::from_str::<rmcp::model::ResourceUpdatedNotificationParam>(params)
                    .ok()
                    .map(|message| DirectCallEvent::ResourceUpdated(message.uri))
            }
            "notifications/tools/list_changed"
            | "notifications/prompts/list_changed"
            | "notifications/resources/list_changed" => Some(DirectCallEvent::ListsChanged),
            _ => None,
        };
        if let Some(event) = event {
            on_event(event);
        }
        return None;
    }
    // Some servers return a numeric id as a string.
    let is_own =
        message.id.is_some_and(|message| message.get().trim_matches('"') == id.to_string());
    if let Some(error) = message.error {
        // A server that could not parse the request does not know its id. If the request was
        // rejected, the status says more.
        let has_no_id = is_accepted && message.id.is_none_or(|id| id.get() == "null");
        return (is_own || has_no_id).then_some(Err(DirectCallError::JsonRpc(error)));
    }
    let result = message.result.filter(|_| is_own)?.get();
    Some(match serde_json::from_str::<CallToolResult>(result) {
        Ok(result) => Ok(ServerResult::CallToolResult(result)),
        Err(error) => match serde_json::from_str::<InputRequiredResult>(result) {
            Ok(input_request) => Ok(ServerResult::InputRequiredResult(input_request)),
            Err(_) => Err(DirectCallError::InvalidResponse(error.to_string())),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_on_a_closed_connection_returns_unsent() {
        let (client_io, server_io) = tokio::io::duplex(1024);
        let (mut send, drive) =
            http1::Builder::new().handshake(TokioIo::new(client_io)).await.unwrap();
        let mut drive = Some(Box::pin(drive));
        // The connection is open when checked and closed when used.
        assert!(poll_fn(|context| Poll::Ready(drive_connection(&mut drive, context))).await);
        let request = Request::post("/mcp").body(Full::new(Bytes::from_static(b"{}"))).unwrap();
        let sent = send.try_send_request(request);
        drop(server_io);
        let sent = tokio::time::timeout(Duration::from_secs(60), drive_while(&mut drive, sent))
            .await
            .expect("the request never fails");
        assert!(sent.unwrap_err().take_message().is_some());
    }
}
