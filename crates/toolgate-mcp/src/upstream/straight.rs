//! The straight way to an upstream of 2026-07-28 over HTTP: such a call is one request and one answer, and needs no session, no
//! worker and no task of its own. The connection is driven by whoever waits for the answer.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use rmcp::ErrorData;
use rmcp::model::{
    CallToolResult, InputRequiredResult, InputResponses, LoggingMessageNotificationParam, ProgressNotificationParam, RequestMetaObject,
    ServerResult,
};
use rmcp::transport::streamable_http_client::SseError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use sse_stream::Sse;
use tokio::net::TcpStream;

use super::route::{FromUpstream, LONGEST_WORD};
use crate::bounded::{self, LONGEST, is_too_long};
use crate::gateway::lock;

/// How long a connection may take to stand.
const HELLO: Duration = Duration::from_secs(10);
/// How long a connection is kept that nobody needs. Many servers hang up after five seconds, and what is sent at that moment is lost.
const KEPT: Duration = Duration::from_secs(4);
/// Most connections that are kept.
const MOST: usize = 64;

type Drive = Pin<Box<Connection<TokioIo<TcpStream>, Full<Bytes>>>>;

/// A connection, and what drives it.
struct Wire {
    send: SendRequest<Full<Bytes>>,
    /// Gone as soon as it has ended: then whoever waits for it hears of it.
    drive: Option<Drive>,
    /// What may still come of the last answer: its end.
    rest: Option<Events>,
}

impl Wire {
    /// Whether the next request can be sent.
    fn stands(&mut self, context: &mut Context<'_>) -> bool {
        if !self.goes_on(context) {
            return false;
        }
        while let Some(rest) = &mut self.rest {
            match rest.as_mut().poll_next(context) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(None) => self.rest = None,
                Poll::Ready(Some(Err(_))) | Poll::Pending => return false,
            }
        }
        // The end of one answer makes room for the next request.
        self.goes_on(context) && matches!(self.send.poll_ready(context), Poll::Ready(Ok(())))
    }

    fn goes_on(&mut self, context: &mut Context<'_>) -> bool {
        goes_on(&mut self.drive, context)
    }
}

/// Where an upstream is, and what every request to it says.
pub(super) struct Straight {
    host: String,
    port: u16,
    target: Uri,
    headers: HeaderMap,
    kept: Mutex<Vec<(Instant, Wire)>>,
    next: AtomicU64,
}

/// Why there is no result.
pub(super) enum Broken {
    /// The upstream says so, in the words of the protocol.
    Refused(ErrorData),
    /// Nobody was there, and nothing was sent.
    Nobody(String),
    /// It was turned away, and is to wait for so many milliseconds, where that is said.
    Status(u16, Option<u64>),
    /// The answer is longer than any may be.
    TooLong,
    /// The answer cannot be understood.
    Unread(String),
    /// It has answered with a status that does not say whether it was heard, and is to wait for so many milliseconds, where that is said.
    Failing(u16, Option<u64>),
    /// It may have been heard.
    Unclear(String),
}

/// What is asked of a tool.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Params<'p> {
    pub(super) name: &'p str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) arguments: Option<&'p serde_json::Map<String, Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) input_responses: Option<&'p InputResponses>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) request_state: Option<&'p str>,
    #[serde(rename = "_meta")]
    pub(super) meta: RequestMetaObject,
}

#[derive(Serialize)]
struct Asked<'p> {
    jsonrpc: &'static str,
    id: u64,
    method: &'static str,
    params: &'p Params<'p>,
}

/// Anything that an upstream says.
#[derive(Deserialize)]
struct Said<'s> {
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

/// What an upstream says in the middle of a call.
pub(super) enum Word {
    /// To the client of the call.
    Client(FromUpstream),
    /// Its lists have changed.
    Lists,
    /// A resource has changed.
    Resource(String),
}

impl Straight {
    /// For an address with everything that is sent along; `None` where this way does not lead there.
    pub(super) fn new(url: &str, custom: impl IntoIterator<Item = (HeaderName, HeaderValue)>, token: Option<&str>) -> Option<Self> {
        let url = url::Url::parse(url).ok()?;
        // What is encrypted, or has a name and a password in its address, is for those who know what to make of it.
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
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("toolgate/", env!("CARGO_PKG_VERSION"))));
        headers.insert(ACCEPT, HeaderValue::from_static("application/json, text/event-stream"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert("mcp-protocol-version", HeaderValue::from_static(crate::MODERN));
        headers.insert("mcp-method", HeaderValue::from_static("tools/call"));
        Some(Self {
            host,
            port: url.port_or_known_default()?,
            target: target.parse().ok()?,
            headers,
            kept: Mutex::default(),
            next: AtomicU64::new(0),
        })
    }

    /// Calls a tool, and tells what is said meanwhile. Whoever stops waiting hangs up, which is how an upstream of this revision hears
    /// that nobody waits any more.
    pub(super) async fn call(&self, params: &Params<'_>, mut tell: impl FnMut(Word)) -> Result<ServerResult, Broken> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let asked = Asked { jsonrpc: "2.0", id, method: "tools/call", params };
        let body = serde_json::to_vec(&asked).map_err(|error| Broken::Nobody(error.to_string()))?;
        let mut request = Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.target.clone();
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().insert("mcp-name", HeaderValue::from_str(params.name).map_err(|error| Broken::Nobody(error.to_string()))?);
        loop {
            let (mut wire, kept) = match self.take().await {
                Some(wire) => (wire, true),
                None => (self.open().await.map_err(Broken::Nobody)?, false),
            };
            let sent = driven(&mut wire.drive, wire.send.try_send_request(request)).await;
            let answer = match sent {
                Ok(answer) => answer,
                Err(mut failed) => match failed.take_message() {
                    // It was hung up meanwhile, and nothing was sent: the next may stand.
                    Some(unsent) if kept => {
                        request = unsent;
                        continue;
                    }
                    Some(_) => return Err(Broken::Nobody(failed.error().to_string())),
                    None => return Err(Broken::Unclear(failed.error().to_string())),
                },
            };
            let heard = driven(&mut wire.drive, hear(answer, id, &mut tell)).await?;
            wire.rest = heard.rest;
            self.keep(wire);
            return heard.said;
        }
    }

    /// A connection that was kept and still stands.
    async fn take(&self) -> Option<Wire> {
        loop {
            let (since, mut wire) = lock(&self.kept).pop()?;
            if since.elapsed() > KEPT {
                // All before it were kept for longer.
                lock(&self.kept).clear();
                return None;
            }
            let stands = poll_fn(|context| Poll::Ready(wire.stands(context)));
            if stands.await {
                return Some(wire);
            }
        }
    }

    fn keep(&self, wire: Wire) {
        let mut kept = lock(&self.kept);
        if kept.len() < MOST && wire.drive.is_some() {
            kept.push((Instant::now(), wire));
        }
    }

    /// Lets go of connections that nobody has needed for a while.
    pub(super) fn sweep(&self) {
        lock(&self.kept).retain(|(since, _)| since.elapsed() <= KEPT);
    }

    /// A connection to the first of its addresses that answers.
    async fn connected(&self) -> Result<TcpStream, String> {
        let addresses = tokio::net::lookup_host((self.host.as_str(), self.port)).await.map_err(|error| error.to_string())?;
        let mut why = "it has no address".to_owned();
        for address in addresses {
            match tokio::time::timeout(HELLO / 4, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => why = error.to_string(),
                Err(_) => why = format!("{address} does not answer"),
            }
        }
        Err(why)
    }

    async fn open(&self) -> Result<Wire, String> {
        let standing = tokio::time::timeout(HELLO, async {
            let stream = self.connected().await?;
            let _ = stream.set_nodelay(true);
            let (send, drive) = http1::Builder::new().handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
            Ok(Wire { send, drive: Some(Box::pin(drive)), rest: None })
        });
        standing.await.map_err(|_| format!("not within {HELLO:?}"))?
    }
}

/// Drives a connection. One that has ended is let go: what was to be sent on it comes back unsent.
fn goes_on<D: Future + Unpin>(drive: &mut Option<D>, context: &mut Context<'_>) -> bool {
    if drive.as_mut().is_some_and(|drive| Pin::new(drive).poll(context).is_ready()) {
        *drive = None;
    }
    drive.is_some()
}

/// Waits for something that comes over a connection, and drives the connection meanwhile.
async fn driven<T, D: Future + Unpin>(drive: &mut Option<D>, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    poll_fn(move |context| {
        if let Poll::Ready(done) = work.as_mut().poll(context) {
            return Poll::Ready(done);
        }
        goes_on(drive, context);
        work.as_mut().poll(context)
    })
    .await
}

/// What was answered, and what is left of the stream that it came in.
struct Heard {
    said: Result<ServerResult, Broken>,
    rest: Option<Events>,
}

type Events = BoxStream<'static, Result<Sse, SseError>>;

/// Reads an answer. After an error nothing more can be heard on the connection.
async fn hear(answer: Response<Incoming>, id: u64, tell: &mut impl FnMut(Word)) -> Result<Heard, Broken> {
    let status = answer.status();
    let kind = answer.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let (json, events) = (kind.starts_with(b"application/json"), kind.starts_with(b"text/event-stream"));
    if events && status.is_success() {
        let mut events: Events = bounded::events(answer.into_body().into_data_stream());
        while let Some(event) = events.next().await {
            let event = event.map_err(|error| if is_too_long(&error) { Broken::TooLong } else { Broken::Unclear(error.to_string()) })?;
            let is_message = event.event.as_deref().is_none_or(|kind| matches!(kind, "" | "message"));
            // An event may say nothing but that somebody is there.
            let Some(text) = event.data.filter(|text| is_message && !text.trim().is_empty()) else { continue };
            if let Some(said) = understand(text.as_bytes(), id, true, tell) {
                // Who has said everything often ends the stream a moment later.
                let over = matches!(futures_util::poll!(events.next()), Poll::Ready(None));
                return Ok(Heard { said, rest: (!over).then_some(events) });
            }
        }
        return Err(Broken::Unclear("it broke off in the middle of its answer".to_owned()));
    }
    let wait = crate::http::wait_of(answer.headers());
    let turned_away = (400..500).contains(&status.as_u16()) && status != StatusCode::REQUEST_TIMEOUT;
    let refused = || match turned_away {
        true => Broken::Status(status.as_u16(), wait),
        false if status.is_success() => Broken::Unread("it answers with something that is no message".to_owned()),
        false => Broken::Failing(status.as_u16(), wait),
    };
    // What nobody reads here may be an answer, whatever the status.
    if events && !matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS) {
        return Err(Broken::Failing(status.as_u16(), wait));
    }
    // Who is not let in is told so by the status alone.
    if !json || matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS) {
        return Err(refused());
    }
    let text = match Limited::new(answer.into_body(), LONGEST).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => return Err(Broken::TooLong),
        Err(error) => return Err(Broken::Unclear(error.to_string())),
    };
    let said = match understand(&text, id, status.is_success(), tell) {
        // Some say with the status, too, how it went.
        Some(said) => said,
        None if !status.is_success() => Err(refused()),
        None => Err(Broken::Unread("it answers something else than it was asked".to_owned())),
    };
    Ok(Heard { said, rest: None })
}

/// What a message says: the answer, or something on the way to it. An error without a name is that only where it was `taken` in, and so is
/// what is no message.
fn understand(text: &[u8], id: u64, taken: bool, tell: &mut impl FnMut(Word)) -> Option<Result<ServerResult, Broken>> {
    let said: Said<'_> = match serde_json::from_slice(text) {
        Ok(said) => said,
        Err(error) => return taken.then(|| Err(Broken::Unread(error.to_string()))),
    };
    if let Some(method) = said.method {
        let params = said.params.map_or("{}", RawValue::get);
        // What is longer than anybody reads is not kept for a client who may be slow.
        let word = match &*method {
            "notifications/progress" | "notifications/message" if params.len() > LONGEST_WORD => None,
            "notifications/progress" => {
                serde_json::from_str::<ProgressNotificationParam>(params).ok().map(|said| Word::Client(FromUpstream::Progress(said)))
            }
            "notifications/message" => {
                serde_json::from_str::<LoggingMessageNotificationParam>(params).ok().map(|said| Word::Client(FromUpstream::Log(said)))
            }
            "notifications/resources/updated" => {
                serde_json::from_str::<rmcp::model::ResourceUpdatedNotificationParam>(params).ok().map(|said| Word::Resource(said.uri))
            }
            "notifications/tools/list_changed" | "notifications/prompts/list_changed" | "notifications/resources/list_changed" => {
                Some(Word::Lists)
            }
            _ => None,
        };
        if let Some(word) = word {
            tell(word);
        }
        return None;
    }
    // Some say a number as text.
    let own = said.id.is_some_and(|said| said.get().trim_matches('"') == id.to_string());
    if let Some(error) = said.error {
        // Who could not read the question does not know its number; but where it is turned away at the door, the status says more.
        let nobodys = taken && said.id.is_none_or(|id| id.get() == "null");
        return (own || nobodys).then_some(Err(Broken::Refused(error)));
    }
    let result = said.result.filter(|_| own)?.get();
    Some(match serde_json::from_str::<CallToolResult>(result) {
        Ok(result) => Ok(ServerResult::CallToolResult(result)),
        Err(error) => match serde_json::from_str::<InputRequiredResult>(result) {
            Ok(asked) => Ok(ServerResult::InputRequiredResult(asked)),
            Err(_) => Err(Broken::Unread(error.to_string())),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_finds_its_connection_closed_comes_back_unsent() {
        let (near, far) = tokio::io::duplex(1024);
        let (mut send, drive) = http1::Builder::new().handshake(TokioIo::new(near)).await.unwrap();
        let mut drive = Some(Box::pin(drive));
        // It stood when it was looked at, and is gone when something is sent.
        assert!(poll_fn(|context| Poll::Ready(goes_on(&mut drive, context))).await);
        let request = Request::post("/mcp").body(Full::new(Bytes::from_static(b"{}"))).unwrap();
        let sent = send.try_send_request(request);
        drop(far);
        let sent = tokio::time::timeout(Duration::from_secs(60), driven(&mut drive, sent)).await.expect("nobody ever says so");
        assert!(sent.unwrap_err().take_message().is_some());
    }
}
