//! Reads the response to a call on the fast path, and passes on the notifications before it.

use std::task::Poll;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use rmcp::ErrorData;
use rmcp::model::{
    CallToolResult, InputRequiredResult, LoggingMessageNotificationParam,
    ProgressNotificationParam, ServerResult,
};
use rmcp::transport::streamable_http_client::SseError;
use serde::Deserialize;
use serde_json::value::RawValue;
use sse_stream::Sse;

use crate::upstream::callbacks::{MAX_BUFFERED_MESSAGE_BYTES, UpstreamEvent};
use crate::upstream::transport::bounded_http;
use crate::upstream::transport::bounded_http::{MAX_RESPONSE_BYTES, is_too_long};
use crate::upstream::transport::direct_http::{DirectCallError, DirectCallEvent};

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

/// A response and the unread rest of its stream.
pub(super) struct DirectCallResponse {
    pub(super) result: Result<ServerResult, DirectCallError>,
    pub(super) unread_events: Option<SseEventStream>,
}

pub(super) type SseEventStream = BoxStream<'static, Result<Sse, SseError>>;

/// Reads a response. After an error the connection cannot be used any more.
pub(super) async fn read_response(
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
                .is_none_or(|event_type| matches!(event_type, "" | "message"));
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
/// (`is_accepted`).
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
                .map(|params| DirectCallEvent::Client(UpstreamEvent::Progress(params))),
            "notifications/message" => {
                serde_json::from_str::<LoggingMessageNotificationParam>(params)
                    .ok()
                    .map(|params| DirectCallEvent::Client(UpstreamEvent::Log(params)))
            }
            "notifications/resources/updated" => {
                serde_json::from_str::<rmcp::model::ResourceUpdatedNotificationParam>(params)
                    .ok()
                    .map(|params| DirectCallEvent::ResourceUpdated(params.uri))
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
    let is_own = message.id.is_some_and(|raw_id| raw_id.get().trim_matches('"') == id.to_string());
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
