//! Limits the size of responses and events of streamable HTTP upstreams.
//!
//! The protocol library would read a response of any length to its end.

use std::collections::HashMap;
use std::error::Error;
use std::future::ready;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt};
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Client, StatusCode};
use rmcp::model::{
    ClientJsonRpcMessage, ClientRequest, ErrorCode, ErrorData, JsonRpcError, JsonRpcMessage,
    RequestId, ServerJsonRpcMessage,
};
use rmcp::transport::streamable_http_client::{
    HttpStatusError, SseError, StreamableHttpClient, StreamableHttpError,
    StreamableHttpPostResponse,
};
use serde_json::{Value, json};
use sse_stream::{Sse, SseStream};

use crate::upstream::client_handler::LOG_ORIGIN_META_KEY;

/// The maximum size of a response or event, in bytes.
pub(crate) const MAX_RESPONSE_BYTES: usize = 16 << 20;

/// The error code that replaces a response over the limit.
pub(crate) const RESPONSE_TOO_LONG_CODE: ErrorCode = ErrorCode(-31_413);

const JSON_CONTENT_TYPE: &str = "application/json";
const EVENT_STREAM_CONTENT_TYPE: &str = "text/event-stream";
const SESSION_ID_HEADER: &str = "mcp-session-id";
const LOG_NOTIFICATION_METHOD: &str = "notifications/message";

/// Headers that only the transport may set.
const RESERVED_HEADERS: [&str; 3] = ["accept", SESSION_ID_HEADER, "last-event-id"];

/// A streamable HTTP client with size limits.
#[derive(Clone)]
pub(crate) struct BoundedHttpClient(pub(crate) Client);

type HttpTransportError = StreamableHttpError<reqwest::Error>;

impl StreamableHttpClient for BoundedHttpClient {
    type Error = reqwest::Error;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        token: Option<String>,
        custom: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, HttpTransportError> {
        if let Some(name) = custom.keys().find(|name| RESERVED_HEADERS.contains(&name.as_str())) {
            return Err(StreamableHttpError::ReservedHeaderConflict(name.to_string()));
        }
        let mut request = self
            .0
            .post(&*uri)
            .headers(custom.into_iter().collect::<HeaderMap>())
            .header(ACCEPT, format!("{EVENT_STREAM_CONTENT_TYPE}, {JSON_CONTENT_TYPE}"));
        if let Some(session) = &session {
            request = request.header(SESSION_ID_HEADER, &**session);
        }
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        let answer = request.json(&message).send().await?;
        let status = answer.status();
        if matches!(status, StatusCode::ACCEPTED | StatusCode::NO_CONTENT) {
            return Ok(StreamableHttpPostResponse::Accepted);
        }
        let header = |name: &str| {
            answer.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        let (new_session, content_type, retry_after) = (
            header(SESSION_ID_HEADER),
            header(CONTENT_TYPE.as_str()),
            header(RETRY_AFTER.as_str()),
        );
        let is_content_type = |expected: &str| {
            content_type.as_deref().is_some_and(|content_type| content_type.starts_with(expected))
        };
        let json_request = match &message {
            ClientJsonRpcMessage::Request(request) => Some(request),
            _ => None,
        };
        // An empty success response accepts a notification.
        if status.is_success() && json_request.is_none() && answer.content_length() == Some(0) {
            return Ok(StreamableHttpPostResponse::Accepted);
        }
        if status.is_success() && is_content_type(EVENT_STREAM_CONTENT_TYPE) {
            let id = json_request.map(|request| request.id.clone());
            let events =
                bounded_events(answer.bytes_stream()).scan(false, move |has_failed, event| {
                    let had_failed = std::mem::replace(has_failed, event.is_err());
                    let event = match event {
                        Err(error) if is_too_long(&error) => Ok(Sse::default().data(
                            serde_json::to_string(&too_long_message(id.clone()))
                                .unwrap_or_default(),
                        )),
                        Ok(event) => Ok(match &id {
                            Some(id) => mark_log_origin(event, id),
                            None => event,
                        }),
                        event => event,
                    };
                    ready((!had_failed).then_some(event))
                });
            return Ok(StreamableHttpPostResponse::Sse(events.boxed(), new_session));
        }
        // For 401, 403 and 429 the status alone decides.
        let is_final_status = matches!(
            status,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS
        );
        let body: Option<ServerJsonRpcMessage> =
            match is_content_type(JSON_CONTENT_TYPE) && !is_final_status {
                true => match read_body(answer).await? {
                    Some(text) => serde_json::from_slice(&text).ok(),
                    None => Some(too_long_message(json_request.map(|request| request.id.clone()))),
                },
                false => None,
            };
        // A server that does not know `server/discover` may respond with another id or none.
        if let Some(request) = json_request
            .filter(|request| matches!(request.request, ClientRequest::DiscoverRequest(_)))
            && status.is_client_error()
            && session.is_none()
            && !is_final_status
        {
            let error = match body {
                Some(JsonRpcMessage::Error(error)) => error.error,
                _ => ErrorData::invalid_request(format!("HTTP {}", status.as_u16()), None),
            };
            return Ok(StreamableHttpPostResponse::Json(
                ServerJsonRpcMessage::error(error, Some(request.id.clone())),
                None,
            ));
        }
        // A rejection often has no id, and the request would wait forever. Some servers return a
        // numeric id as a string.
        let answers_request = |error: &JsonRpcError| {
            let id = error.id.as_ref().map(ToString::to_string);
            json_request.is_some_and(|request| id == Some(request.id.to_string()))
        };
        match body {
            Some(body) if status.is_success() => {
                Ok(StreamableHttpPostResponse::Json(body, new_session))
            }
            // Some servers also express the result by the status.
            Some(JsonRpcMessage::Response(answer))
                if json_request
                    .is_some_and(|request| answer.id.to_string() == request.id.to_string()) =>
            {
                Ok(StreamableHttpPostResponse::Json(JsonRpcMessage::Response(answer), new_session))
            }
            _ if status == StatusCode::NOT_FOUND && session.is_some() => {
                Err(StreamableHttpError::SessionExpired)
            }
            Some(JsonRpcMessage::Error(error)) if answers_request(&error) => {
                Ok(StreamableHttpPostResponse::Json(JsonRpcMessage::Error(error), new_session))
            }
            // Not all servers use 404 for an unknown session.
            Some(JsonRpcMessage::Error(error))
                if session.is_some()
                    && status == StatusCode::BAD_REQUEST
                    && error.error.message.to_ascii_lowercase().contains("session") =>
            {
                Err(StreamableHttpError::SessionExpired)
            }
            // An event stream with an error status is not read, but it may contain the result.
            _ if status.is_client_error()
                && json_request.is_some()
                && !is_final_status
                && is_content_type(EVENT_STREAM_CONTENT_TYPE) =>
            {
                Err(StreamableHttpError::UnexpectedEndOfStream)
            }
            _ if !status.is_success() => {
                Err(HttpStatusError::new(status.as_u16(), retry_after).into())
            }
            // The body of a response to a notification does not matter.
            _ if json_request.is_none() => Ok(StreamableHttpPostResponse::Accepted),
            _ if is_content_type(JSON_CONTENT_TYPE) => {
                Err(StreamableHttpError::UnexpectedServerResponse(
                    "the response is not a JSON-RPC message".into(),
                ))
            }
            _ => Err(StreamableHttpError::UnexpectedContentType(content_type)),
        }
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last: Option<String>,
        token: Option<String>,
        custom: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, HttpTransportError> {
        let stream = self
            .0
            .get_stream_with_max_sse_event_size(
                uri,
                session,
                last,
                token,
                custom,
                MAX_RESPONSE_BYTES,
            )
            .await;
        // If the session or stream is unknown, rmcp would retry forever. This error stops it, and
        // the next request finds out why.
        let unknown = |error: &reqwest::Error| {
            matches!(error.status(), Some(StatusCode::NOT_FOUND | StatusCode::BAD_REQUEST))
        };
        match stream {
            Err(StreamableHttpError::Client(error)) if unknown(&error) => {
                Err(StreamableHttpError::ServerDoesNotSupportSse)
            }
            stream => stream,
        }
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session: Arc<str>,
        token: Option<String>,
        custom: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), HttpTransportError> {
        self.0.delete_session(uri, session, token, custom).await
    }
}

/// Marks a log message in a response stream with the id of the request. Several responses may
/// arrive at once.
fn mark_log_origin(event: Sse, id: &RequestId) -> Sse {
    // Search without the slash, which some servers escape. Parse only events that match.
    let Some(text) = event.data.as_deref().filter(|text| text.contains("notifications")) else {
        return event;
    };
    let Some(origin) = LOG_ORIGIN_META_KEY.as_deref() else { return event };
    let Ok(mut message) = serde_json::from_str::<Value>(text) else { return event };
    if message.get("method").and_then(Value::as_str) != Some(LOG_NOTIFICATION_METHOD) {
        return event;
    }
    let meta = message
        .get_mut("params")
        .and_then(Value::as_object_mut)
        .map(|params| params.entry("_meta").or_insert_with(|| json!({})));
    if let Some(meta) = meta.and_then(Value::as_object_mut) {
        meta.insert(origin.to_owned(), id.clone().into_json_value());
    }
    event.data(message.to_string())
}

fn too_long_message(id: Option<RequestId>) -> ServerJsonRpcMessage {
    ServerJsonRpcMessage::error(
        ErrorData::new(
            RESPONSE_TOO_LONG_CODE,
            format!("response exceeds {MAX_RESPONSE_BYTES} bytes"),
            None,
        ),
        id,
    )
}

/// Reads a response body; `None` if it exceeds the limit.
pub(crate) async fn read_body(
    mut answer: reqwest::Response,
) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut text = Vec::new();
    while let Some(chunk) = answer.chunk().await? {
        if text.len() + chunk.len() > MAX_RESPONSE_BYTES {
            return Ok(None);
        }
        text.extend_from_slice(&chunk);
    }
    Ok(Some(text))
}

/// Parses an event stream, and fails at the first event over the limit.
pub(crate) fn bounded_events<E: Error + Send + Sync + 'static>(
    bytes: impl Stream<Item = Result<Bytes, E>> + Send + 'static,
) -> BoxStream<'static, Result<Sse, SseError>> {
    let mut event = EventSizeMeter::default();
    let bytes = bytes.map(move |chunk| match chunk {
        Ok(chunk) if event.has_room_for(&chunk) => Ok(chunk),
        Ok(_) => Err(io::Error::from(io::ErrorKind::FileTooLarge)),
        Err(error) => Err(io::Error::other(error)),
    });
    SseStream::from_byte_stream(bytes).boxed()
}

/// Returns whether a stream failed because of the size limit.
pub(crate) fn is_too_long(error: &SseError) -> bool {
    let SseError::Body(error) = error else { return false };
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::FileTooLarge)
}

/// Measures the current event, which ends with an empty line.
#[derive(Default)]
struct EventSizeMeter {
    bytes: usize,
    /// The current line, or the line that just ended, is not empty.
    has_line_content: bool,
    /// The last byte was `\r`, and `\n` may follow.
    is_after_cr: bool,
}

impl EventSizeMeter {
    fn has_room_for(&mut self, chunk: &[u8]) -> bool {
        for byte in chunk {
            self.bytes += 1;
            match byte {
                b'\n' if self.is_after_cr => self.is_after_cr = false,
                b'\n' | b'\r' => {
                    if !std::mem::take(&mut self.has_line_content) {
                        self.bytes = 0;
                    }
                    self.is_after_cr = *byte == b'\r';
                }
                _ => (self.has_line_content, self.is_after_cr) = (true, false),
            }
            if self.bytes > MAX_RESPONSE_BYTES {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_messages_are_marked_with_their_request() {
        let marked = |data: &str| {
            mark_log_origin(Sse::default().data(data), &RequestId::Number(7)).data.unwrap()
        };
        let meta = |data: &str| {
            serde_json::from_str::<Value>(&marked(data))
                .unwrap()
                .pointer("/params/_meta")
                .cloned()
                .unwrap()
        };
        let origin = LOG_ORIGIN_META_KEY.as_deref().unwrap();
        for name in ["notifications/message", r"notifications\/message"] {
            assert_eq!(
                meta(&format!(r#"{{"method":"{name}","params":{{"data":1.50}}}}"#)),
                json!({origin: 7})
            );
        }
        let with_meta =
            r#"{"method":"notifications/message","params":{"_meta":{"own":1},"data":1}}"#;
        assert_eq!(meta(with_meta), json!({origin: 7, "own": 1}));
        for other in [
            "notifications/message",
            r#"{"result":"notifications/message"}"#,
            r#"{"method":"notifications/progress","params":{}}"#,
        ] {
            assert_eq!(marked(other), other);
        }
    }

    #[test]
    fn an_event_ends_with_an_empty_line() {
        let half = vec![b'x'; MAX_RESPONSE_BYTES / 2 + 10];
        for (between, fits) in [
            ("", false),
            ("\n", false),
            ("\r\n", false),
            ("\n\n", true),
            ("\r\n\r\n", true),
            ("\r\r", true),
            ("\n: x\n", false),
        ] {
            let mut event = EventSizeMeter::default();
            let chunks = [&half[..], between.as_bytes(), &half[..]];
            // For every split into chunks.
            let whole = chunks.concat();
            assert_eq!(EventSizeMeter::default().has_room_for(&whole), fits, "{between:?}");
            assert_eq!(
                chunks
                    .iter()
                    .flat_map(|chunk| chunk.chunks(7))
                    .all(|chunk| event.has_room_for(chunk)),
                fits,
                "{between:?}"
            );
        }
    }
}
