//! The straight way for calls of 2026-07-28 over HTTP. Most requests are such calls: each stands for itself, and its answer is one
//! JSON document, or a stream where something is said before the answer. Whatever is not plainly so goes the long way, and is told
//! there what is wrong with it.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use rmcp::ErrorData;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ClientCapabilities, ErrorCode, JsonObject, NumberOrString, RequestMetaObject,
    ServerNotification,
};
use serde::{Deserialize as _, Serialize};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use toolgate::Spec;

use crate::gateway::Running;
use crate::server::http::{Answer, Http};
use crate::server::identity;
use crate::server::identity::{Asked, Caller};
use crate::server::tool_call::{Client, Ear, WORDS};

/// How long a stream is silent at most.
const PULSE: Duration = Duration::from_secs(15);

/// A call that says everything in its place.
pub(crate) struct Straight {
    id: NumberOrString,
    request: CallToolRequestParams,
    meta: RequestMetaObject,
    capabilities: ClientCapabilities,
}

/// The one value of a header.
fn only<'p>(parts: &'p Parts, name: &str) -> Option<&'p str> {
    let mut values = parts.headers.get_all(name).iter();
    let first = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(first)
}

impl Straight {
    /// The call that a request asks for, where it can go this way. What it takes of the body it takes only then.
    pub(crate) fn of(running: &Running, parts: &Parts, body: &mut Value) -> Option<Self> {
        let is = |name: &str, value: &str| only(parts, name) == Some(value);
        let accepts = |accept: &str| accept.contains("application/json") && accept.contains("text/event-stream");
        let fits = is("mcp-protocol-version", crate::MODERN)
            && is("mcp-method", "tools/call")
            && only(parts, CONTENT_TYPE.as_str()).is_some_and(|kind| kind.starts_with("application/json"))
            && only(parts, ACCEPT.as_str()).is_some_and(accepts)
            && !parts.headers.contains_key("mcp-session-id")
            && !parts.headers.keys().any(|name| name.as_str().starts_with("mcp-param-"));
        let message = body.as_object().filter(|message| fits && message.len() == 4)?;
        if message.get("jsonrpc")?.as_str()? != "2.0" || message.get("method")?.as_str()? != "tools/call" {
            return None;
        }
        let id = match message.get("id")? {
            Value::Number(number) => NumberOrString::Number(number.as_i64()?),
            Value::String(text) => NumberOrString::String(text.as_str().into()),
            _ => return None,
        };
        let params = message.get("params")?.as_object()?;
        let known = |key: &String| matches!(key.as_str(), "name" | "arguments" | "_meta");
        let arguments = params.get("arguments").is_none_or(Value::is_object);
        let name = params.get("name")?.as_str()?.to_owned();
        let plain = crate::is_header_safe_name(&name) && is("mcp-name", &name);
        if !arguments || !plain || !params.keys().all(known) {
            return None;
        }
        // Only what its caller sees goes the other way, which can be told from this one.
        if running.header_tools.contains(&name) && Self::is_in_headers(running, parts, &name) {
            return None;
        }
        let meta = params.get("_meta")?.as_object()?;
        if meta.get("io.modelcontextprotocol/protocolVersion")?.as_str()? != crate::MODERN {
            return None;
        }
        let capabilities = ClientCapabilities::deserialize(meta.get("io.modelcontextprotocol/clientCapabilities")?).ok()?;
        let params = body.get_mut("params")?.as_object_mut()?;
        let mut take = |key: &str| match params.remove(key) {
            Some(Value::Object(map)) => Some(map),
            _ => None,
        };
        let (arguments, meta): (Option<JsonObject>, JsonObject) = (take("arguments"), take("_meta")?);
        let mut request = CallToolRequestParams::new(name);
        request.arguments = arguments;
        Some(Self { id, request, meta: RequestMetaObject::from(meta), capabilities })
    }

    /// Whether arguments of a tool are said in headers as well, as far as its caller can know.
    fn is_in_headers(running: &Running, parts: &Parts, name: &str) -> bool {
        let Some(caller) = parts.extensions.get::<Caller>() else { return true };
        let asked = parts.extensions.get::<Asked>().and_then(|asked| asked.agent.as_deref());
        let schema = identity::find_visible_tool(running, caller, asked, name).and_then(Spec::input_schema);
        schema.is_some_and(crate::has_header_arguments)
    }

    /// Makes the call, and answers.
    pub(crate) async fn answer(self, http: &Arc<Http>, parts: Parts) -> Answer {
        let (tell, mut told) = mpsc::channel(WORDS);
        let mut work = Box::pin(self.work(Arc::clone(http), parts, tell));
        tokio::select! {
            biased;
            said = &mut work => match told.try_recv() {
                Err(_) => whole(&said),
                Ok(first) => streamed(first, told, Box::pin(std::future::ready(Some(said)))),
            },
            Some(first) = told.recv() => {
                // Nobody who reads slowly holds up the call; whoever hangs up ends the wait for it.
                let work = AbortOnDropHandle::new(tokio::spawn(work));
                streamed(first, told, Box::pin(async move { work.await.ok() }))
            }
        }
    }

    async fn work(self, http: Arc<Http>, parts: Parts, tell: mpsc::Sender<ServerNotification>) -> Said {
        let client = Client {
            id: Client::format_id(&self.id),
            meta: &self.meta,
            parts: Some(&parts),
            raw_arguments: parts.extensions.get(),
            capabilities: Some(self.capabilities),
            is_modern: true,
            disconnected: &http.gateway.0.closed,
            channel: Ear::ResponseStream(&tell),
        };
        let said = http.server.handle_call(self.request, &client).await;
        Said { id: self.id, said }
    }
}

/// What a call came to.
struct Said {
    id: NumberOrString,
    said: Result<CallToolResponse, ErrorData>,
}

#[derive(Serialize)]
struct Message<'m, T: Serialize> {
    jsonrpc: &'static str,
    id: &'m NumberOrString,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<T>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'m ErrorData>,
}

impl Said {
    fn text(&self) -> Vec<u8> {
        fn written<T: Serialize>(id: &NumberOrString, result: Option<T>, error: Option<&ErrorData>) -> Vec<u8> {
            serde_json::to_vec(&Message { jsonrpc: "2.0", id, result, error }).unwrap_or_default()
        }
        match &self.said {
            Ok(CallToolResponse::Complete(result)) => written(&self.id, Some(result), None),
            Ok(CallToolResponse::InputRequired(asked)) => written(&self.id, Some(asked), None),
            Ok(_) => written::<()>(&self.id, None, Some(&ErrorData::internal_error("there is no word for this", None))),
            Err(error) => written::<()>(&self.id, None, Some(error)),
        }
    }

    fn status(&self) -> StatusCode {
        match self.said.as_ref().err().map(|error| error.code) {
            Some(ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY) => StatusCode::BAD_REQUEST,
            _ => StatusCode::OK,
        }
    }
}

fn head(status: StatusCode, kind: &'static str) -> Response<()> {
    let mut answer = Response::new(());
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// The answer alone.
fn whole(said: &Said) -> Answer {
    head(said.status(), "application/json").map(|()| Full::new(Bytes::from(said.text())).boxed())
}

/// What a call comes to; `None` where it does not come to an end.
type Waits = Pin<Box<dyn Future<Output = Option<Said>> + Send + Sync>>;

/// What was said before the answer, and the answer.
fn streamed(first: ServerNotification, told: mpsc::Receiver<ServerNotification>, work: Waits) -> Answer {
    let event = |text: &[u8]| Some(Bytes::from([b"data: ", text, b"\n\n"].concat()));
    let word = move |said: &ServerNotification| event(&serde_json::to_vec(&Notified { jsonrpc: "2.0", said }).unwrap_or_default());
    let events = stream::unfold((Some(first), told, Some(work)), move |(first, mut told, mut work)| async move {
        if let Some(first) = first {
            return Some((word(&first), (None, told, work)));
        }
        let waits = work.as_mut()?;
        let said = tokio::select! {
            biased;
            Some(next) = told.recv() => word(&next),
            said = waits => {
                work = None;
                said.and_then(|said| event(&said.text()))
            }
            () = tokio::time::sleep(PULSE) => Some(Bytes::from_static(b":\n\n")),
        };
        Some((said, (None, told, work)))
    });
    let frames =
        futures_util::StreamExt::filter_map(events, |event| async move { event.map(|event| Ok::<_, Infallible>(Frame::data(event))) });
    event_stream(frames)
}

/// An answer that is told bit by bit.
pub(crate) fn event_stream(frames: impl stream::Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + Sync + 'static) -> Answer {
    let mut answer = head(StatusCode::OK, "text/event-stream").map(|()| BodyExt::boxed(StreamBody::new(frames)));
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    answer.headers_mut().insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    answer
}

#[derive(Serialize)]
struct Notified<'n> {
    jsonrpc: &'static str,
    #[serde(flatten)]
    said: &'n ServerNotification,
}
