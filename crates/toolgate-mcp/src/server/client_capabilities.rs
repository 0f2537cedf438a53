//! Describes the client of a call: its request, its capabilities, and how to notify it.

use http::request::Parts;
use rmcp::model::*;
use rmcp::service::{Peer, RequestContext};
use rmcp::{ErrorData, RoleServer};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use toolgate::Answer;

use crate::server::malformed_call;
use crate::server::parse_message::RawArguments;

/// Maximum length of a recorded request ID, in characters.
const MAX_REQUEST_ID_CHARS: usize = 200;
/// Maximum depth at which capabilities are compared.
const MAX_CAPABILITY_DEPTH: u8 = 4;

/// The client of a call request, independent of the transport.
pub(crate) struct CallClient<'c> {
    /// The request ID.
    pub(crate) id: String,
    pub(crate) meta: &'c RequestMetaObject,
    /// Head of the request, over HTTP.
    pub(crate) parts: Option<&'c Parts>,
    /// The arguments as they were sent, if they are invalid.
    pub(crate) raw_arguments: Option<&'c RawArguments>,
    pub(crate) capabilities: Option<ClientCapabilities>,
    /// Whether the client uses 2026-07-28 or later.
    pub(crate) is_modern: bool,
    /// Cancelled when the client disconnects.
    pub(crate) disconnected: &'c CancellationToken,
    pub(crate) channel: ClientChannel<'c>,
}

/// How a client receives notifications during a call.
pub(crate) enum ClientChannel<'c> {
    /// Over its connection, where it also answers questions.
    Peer(&'c Peer<RoleServer>),
    /// In the response stream of its request.
    ResponseStream(&'c mpsc::Sender<ServerNotification>),
}

impl<'c> CallClient<'c> {
    /// Formats a request ID for the ledger, cut to the maximum length.
    pub(crate) fn format_id(id: &RequestId) -> String {
        id.to_string().chars().take(MAX_REQUEST_ID_CHARS).collect()
    }

    pub(crate) fn from_context(context: &'c RequestContext<RoleServer>) -> Self {
        let parts: Option<&Parts> = context.extensions.get();
        Self {
            id: Self::format_id(&context.id),
            meta: &context.meta,
            raw_arguments: parts
                .and_then(|parts| parts.extensions.get())
                .or_else(|| context.extensions.get()),
            parts,
            capabilities: context.client_capabilities(),
            is_modern: context
                .protocol_version()
                .is_some_and(|version| version.as_str() >= crate::REVISION_2026_07_28),
            disconnected: &context.ct,
            channel: ClientChannel::Peer(&context.peer),
        }
    }

    /// Sends a notification. A slow client does not delay the call.
    pub(crate) async fn notify(&self, notification: ServerNotification) {
        match self.channel {
            ClientChannel::Peer(peer) => drop(peer.send_notification(notification).await),
            ClientChannel::ResponseStream(answer) => drop(answer.try_send(notification)),
        }
    }
}

/// Returns the error for a capability that the upstream needs and the client lacks.
///
/// 2026-07-28 defines an error code for this case. All other errors of an upstream are returned as
/// tool errors.
pub(crate) fn missing_capability_error(
    answer: &Answer,
    client: &CallClient<'_>,
) -> Option<ErrorData> {
    let (error, code) = (answer.outcome.error()?, ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY);
    let upstream_error = error.upstream.as_ref().filter(|_| client.is_modern)?;
    if upstream_error.get("code").and_then(Value::as_i64) != Some(i64::from(code.0)) {
        return None;
    }
    let mut supported =
        serde_json::to_value(client.capabilities.clone().unwrap_or_default()).unwrap_or_default();
    // An empty `elicitation` capability means forms.
    if let Some(elicitation) = supported
        .get_mut("elicitation")
        .and_then(Value::as_object_mut)
        .filter(|elicitation| elicitation.is_empty())
    {
        elicitation.insert("form".to_owned(), json!({}));
    }
    // Removes the capabilities that the client has.
    let missing = missing_capabilities(
        upstream_error
            .pointer("/data/requiredCapabilities")
            .filter(|required| required.is_object())?,
        &supported,
        MAX_CAPABILITY_DEPTH,
    )?;
    let mut data = malformed_call::error_contract(&error.message, Some(answer));
    data.as_object_mut()?.insert("requiredCapabilities".to_owned(), missing);
    Some(ErrorData::new(code, error.message.clone(), Some(data)))
}

/// Returns the missing parts of a capability, or `None` if it is complete.
///
/// The result has names only, because values are text of the upstream.
fn missing_capabilities(required: &Value, supported: &Value, depth: u8) -> Option<Value> {
    let is_absent = |value: &Value| matches!(value, Value::Null | Value::Bool(false));
    if is_absent(required) {
        return None;
    }
    let parts = required.as_object().filter(|_| depth > 0).into_iter().flatten();
    let missing = parts.filter_map(|(name, part)| {
        let supported_part = supported.get(name.as_str()).unwrap_or(&Value::Null);
        Some((name.clone(), missing_capabilities(part, supported_part, depth.saturating_sub(1))?))
    });
    let missing: JsonObject = missing.collect();
    (is_absent(supported) || !missing.is_empty()).then_some(Value::Object(missing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_have_names_only() {
        for (required, supported, missing) in [
            (json!({"sampling": {}}), json!({}), Some(json!({"sampling": {}}))),
            (json!({"sampling": {}}), json!({"sampling": {}}), None),
            (
                json!({"sampling": {"tools": {"a": "words"}}}),
                json!({"sampling": {}}),
                Some(json!({"sampling": {"tools": {"a": {}}}})),
            ),
            (
                json!({"sampling": {"tools": {}}}),
                json!({"sampling": {"tools": {}}, "roots": {}}),
                None,
            ),
            (
                json!({"roots": {"listChanged": true}}),
                json!({"roots": {"listChanged": false}}),
                Some(json!({"roots": {"listChanged": {}}})),
            ),
            (json!({"roots": {"listChanged": false}}), json!({"roots": {}}), None),
            (json!({}), json!({}), None),
        ] {
            assert_eq!(
                missing_capabilities(&required, &supported, MAX_CAPABILITY_DEPTH),
                missing,
                "{required} {supported}"
            );
        }
    }
}
