//! Handles stateless HTTP calls of 2026-07-28 without the MCP library.
//!
//! Most requests are such calls. The response is one JSON document, or a stream if the call sends
//! notifications before its answer. The library handles all other requests.

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
    CallToolRequestParams, CallToolResponse, ClientCapabilities, ErrorCode, JsonObject,
    NumberOrString, RequestMetaObject, ServerNotification,
};
use serde::{Deserialize as _, Serialize};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use toolgate::ToolSpec;

use crate::gateway::ActiveConfig;
use crate::server::http::{HttpResponse, HttpServer};
use crate::server::identity;
use crate::server::identity::{Caller, PathSelector};
use crate::server::tool_call::{CLIENT_CHANNEL_CAPACITY, CallClient, ClientChannel};

/// Maximum time between two messages of a stream.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// A well-formed `tools/call` request with all required headers and metadata.
pub(crate) struct FastPathCall {
    id: NumberOrString,
    request: CallToolRequestParams,
    meta: RequestMetaObject,
    capabilities: ClientCapabilities,
}

/// Returns the value of a header that occurs exactly once.
fn single_header<'p>(parts: &'p Parts, name: &str) -> Option<&'p str> {
    let mut values = parts.headers.get_all(name).iter();
    let first = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(first)
}

impl FastPathCall {
    /// Returns the call of a request, or `None` if the library must handle the request.
    ///
    /// Takes arguments and metadata out of the body only if a call is returned.
    pub(crate) fn from_request(
        running: &ActiveConfig,
        parts: &Parts,
        body: &mut Value,
    ) -> Option<Self> {
        let is = |name: &str, value: &str| single_header(parts, name) == Some(value);
        let accepts = |accept: &str| {
            accept.contains("application/json") && accept.contains("text/event-stream")
        };
        let fits = is("mcp-protocol-version", crate::REVISION_2026_07_28)
            && is("mcp-method", "tools/call")
            && single_header(parts, CONTENT_TYPE.as_str())
                .is_some_and(|kind| kind.starts_with("application/json"))
            && single_header(parts, ACCEPT.as_str()).is_some_and(accepts)
            && !parts.headers.contains_key("mcp-session-id")
            && !parts.headers.keys().any(|name| name.as_str().starts_with("mcp-param-"));
        let message = body.as_object().filter(|message| fits && message.len() == 4)?;
        if message.get("jsonrpc")?.as_str()? != "2.0"
            || message.get("method")?.as_str()? != "tools/call"
        {
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
        // The library compares headers with arguments. A caller can observe which path a request
        // takes, so this must depend only on tools that the caller may see.
        if running.header_tools.contains(&name)
            && Self::has_arguments_in_headers(running, parts, &name)
        {
            return None;
        }
        let meta = params.get("_meta")?.as_object()?;
        if meta.get("io.modelcontextprotocol/protocolVersion")?.as_str()?
            != crate::REVISION_2026_07_28
        {
            return None;
        }
        let capabilities = ClientCapabilities::deserialize(
            meta.get("io.modelcontextprotocol/clientCapabilities")?,
        )
        .ok()?;
        let params = body.get_mut("params")?.as_object_mut()?;
        let mut take = |key: &str| match params.remove(key) {
            Some(Value::Object(map)) => Some(map),
            _ => None,
        };
        let (arguments, meta): (Option<JsonObject>, JsonObject) =
            (take("arguments"), take("_meta")?);
        let mut request = CallToolRequestParams::new(name);
        request.arguments = arguments;
        Some(Self { id, request, meta: RequestMetaObject::from(meta), capabilities })
    }

    /// Returns whether a tool that the caller may see expects arguments in headers.
    fn has_arguments_in_headers(running: &ActiveConfig, parts: &Parts, name: &str) -> bool {
        let Some(caller) = parts.extensions.get::<Caller>() else { return true };
        let agent =
            parts.extensions.get::<PathSelector>().and_then(|selector| selector.agent.as_deref());
        let schema = identity::find_visible_tool(running, caller, agent, name)
            .and_then(ToolSpec::input_schema);
        schema.is_some_and(crate::has_header_arguments)
    }

    /// Makes the call and builds the response.
    pub(crate) async fn respond(self, http: &Arc<HttpServer>, parts: Parts) -> HttpResponse {
        let (sender, mut notifications) = mpsc::channel(CLIENT_CHANNEL_CAPACITY);
        let mut work = Box::pin(self.run_call(Arc::clone(http), parts, sender));
        tokio::select! {
            biased;
            response = &mut work => match notifications.try_recv() {
                Err(_) => complete_response(&response),
                Ok(first) => stream_response(first, notifications, Box::pin(std::future::ready(Some(response)))),
            },
            Some(first) = notifications.recv() => {
                // A separate task: a client that reads slowly must not delay the call, and a
                // disconnect cancels the task.
                let work = AbortOnDropHandle::new(tokio::spawn(work));
                stream_response(first, notifications, Box::pin(async move { work.await.ok() }))
            }
        }
    }

    async fn run_call(
        self,
        http: Arc<HttpServer>,
        parts: Parts,
        sender: mpsc::Sender<ServerNotification>,
    ) -> FastPathResponse {
        let client = CallClient {
            id: CallClient::format_id(&self.id),
            meta: &self.meta,
            parts: Some(&parts),
            raw_arguments: parts.extensions.get(),
            capabilities: Some(self.capabilities),
            is_modern: true,
            disconnected: &http.gateway.0.closed,
            channel: ClientChannel::ResponseStream(&sender),
        };
        let result = http.server.handle_call(self.request, &client).await;
        FastPathResponse { id: self.id, result }
    }
}

/// Result of a call, with the ID of its request.
struct FastPathResponse {
    id: NumberOrString,
    result: Result<CallToolResponse, ErrorData>,
}

#[derive(Serialize)]
struct FastPathMessage<'m, T: Serialize> {
    jsonrpc: &'static str,
    id: &'m NumberOrString,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<T>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'m ErrorData>,
}

impl FastPathResponse {
    fn to_json(&self) -> Vec<u8> {
        fn serialize_response<T: Serialize>(
            id: &NumberOrString,
            result: Option<T>,
            error: Option<&ErrorData>,
        ) -> Vec<u8> {
            serde_json::to_vec(&FastPathMessage { jsonrpc: "2.0", id, result, error })
                .unwrap_or_default()
        }
        match &self.result {
            Ok(CallToolResponse::Complete(result)) => {
                serialize_response(&self.id, Some(result), None)
            }
            Ok(CallToolResponse::InputRequired(input_required)) => {
                serialize_response(&self.id, Some(input_required), None)
            }
            Ok(_) => serialize_response::<()>(
                &self.id,
                None,
                Some(&ErrorData::internal_error("unsupported result type", None)),
            ),
            Err(error) => serialize_response::<()>(&self.id, None, Some(error)),
        }
    }

    fn status(&self) -> StatusCode {
        match self.result.as_ref().err().map(|error| error.code) {
            Some(ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY) => StatusCode::BAD_REQUEST,
            _ => StatusCode::OK,
        }
    }
}

fn response_head(status: StatusCode, kind: &'static str) -> Response<()> {
    let mut answer = Response::new(());
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// Builds the response of a call that sent no notifications.
fn complete_response(response: &FastPathResponse) -> HttpResponse {
    response_head(response.status(), "application/json")
        .map(|()| Full::new(Bytes::from(response.to_json())).boxed())
}

/// Resolves to the result of a call, or to `None` if the call was aborted.
type FastPathFuture = Pin<Box<dyn Future<Output = Option<FastPathResponse>> + Send + Sync>>;

/// Builds a stream of the notifications of a call, followed by its answer.
fn stream_response(
    first: ServerNotification,
    notifications: mpsc::Receiver<ServerNotification>,
    work: FastPathFuture,
) -> HttpResponse {
    let event = |text: &[u8]| Some(Bytes::from([b"data: ", text, b"\n\n"].concat()));
    let notification_event = move |notification: &ServerNotification| {
        event(
            &serde_json::to_vec(&FastPathNotification { jsonrpc: "2.0", said: notification })
                .unwrap_or_default(),
        )
    };
    let events = stream::unfold(
        (Some(first), notifications, Some(work)),
        move |(first, mut notifications, mut work)| async move {
            if let Some(first) = first {
                return Some((notification_event(&first), (None, notifications, work)));
            }
            let call = work.as_mut()?;
            let frame = tokio::select! {
                biased;
                Some(next) = notifications.recv() => notification_event(&next),
                response = call => {
                    work = None;
                    response.and_then(|response| event(&response.to_json()))
                }
                () = tokio::time::sleep(KEEP_ALIVE_INTERVAL) => Some(Bytes::from_static(b":\n\n")),
            };
            Some((frame, (None, notifications, work)))
        },
    );
    let frames = futures_util::StreamExt::filter_map(events, |event| async move {
        event.map(|event| Ok::<_, Infallible>(Frame::data(event)))
    });
    event_stream_response(frames)
}

/// Builds a response with a stream of server-sent events.
pub(crate) fn event_stream_response(
    frames: impl stream::Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + Sync + 'static,
) -> HttpResponse {
    let mut answer = response_head(StatusCode::OK, "text/event-stream")
        .map(|()| BodyExt::boxed(StreamBody::new(frames)));
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    answer
        .headers_mut()
        .insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    answer
}

#[derive(Serialize)]
struct FastPathNotification<'n> {
    jsonrpc: &'static str,
    #[serde(flatten)]
    said: &'n ServerNotification,
}
