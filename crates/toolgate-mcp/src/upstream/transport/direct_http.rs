//! Sends calls on a fast path to upstreams of revision 2026-07-28 over plain HTTP.
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
use http::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT,
};
use http::{Method, Request, Uri};
use http_body_util::Full;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use rmcp::ErrorData;
use rmcp::model::{InputResponses, RequestMetaObject, ServerResult};
use serde::Serialize;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::gateway::lock;
use crate::upstream::callbacks::UpstreamEvent;
use crate::upstream::transport::direct_response::{SseEventStream, read_response};

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

    /// Calls a tool, and passes notifications to `on_event`.
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
