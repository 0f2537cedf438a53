//! Reads messages strictly, and separates invalid arguments of calls.
//!
//! A call with invalid arguments is still a call: the argument gate rejects it and records a row.

use bytes::Bytes;
use rmcp::model::ErrorCode;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use toolgate_json::{JsonBounds, parse};

/// Maximum size of IDs and metadata of a message: bytes of text, and number of values.
const MAX_METADATA_BYTES: usize = 64 << 10;
const MAX_METADATA_VALUES: usize = 2_000;

/// Arguments as the client sent them.
#[derive(Debug, Clone)]
pub(crate) struct RawArguments(pub(crate) Bytes);

/// A parsed message: its text, its value, and the invalid arguments that were removed from both.
#[derive(Debug, Default)]
pub(crate) struct ParsedMessage {
    pub(crate) text: Bytes,
    pub(crate) value: Value,
    pub(crate) raw_arguments: Option<RawArguments>,
}

/// Why a message cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MessageReadError {
    /// The text is not strict JSON, or exceeds a limit.
    Invalid(String),
    /// The message is an array. Only revision 2025-03-26 had JSON-RPC batches.
    Batch,
}

impl MessageReadError {
    /// Returns the JSON-RPC error code.
    pub(crate) const fn code(&self) -> ErrorCode {
        match self {
            Self::Invalid(_) => ErrorCode::PARSE_ERROR,
            Self::Batch => ErrorCode::INVALID_REQUEST,
        }
    }

    pub(crate) fn message(&self) -> &str {
        match self {
            Self::Invalid(why) => why,
            Self::Batch => {
                "JSON-RPC batches are not supported; send each message in a request of its own"
            }
        }
    }
}

/// Parses a message strictly. If only its arguments are invalid, they are separated.
///
/// # Errors
/// The reason why the message is invalid.
pub(crate) fn parse_message(
    text: Bytes,
    bounds: &JsonBounds,
) -> Result<ParsedMessage, MessageReadError> {
    let parsed = parse(&text, bounds);
    let is_odd = match &parsed {
        Ok(Value::Array(_)) => return Err(MessageReadError::Batch),
        Ok(message) => has_invalid_arguments(message),
        Err(_) => true,
    };
    if is_odd
        && let Some((rest, raw)) = split_call_arguments(&text)
        && let Ok(value) = parse(&rest, bounds)
    {
        return Ok(ParsedMessage { text: rest.into(), value, raw_arguments: Some(raw) });
    }
    match parsed {
        Ok(value) => Ok(ParsedMessage { text, value, raw_arguments: None }),
        Err(error) => Err(MessageReadError::Invalid(error.message)),
    }
}

/// Returns an error if IDs and metadata of a message are too large.
///
/// They may be kept as long as a session or a stream, while arguments are dropped after the answer.
pub(crate) fn metadata_size_error(message: &Value) -> Option<String> {
    let params = message.get("params");
    let fields = ["_meta", "capabilities", "clientInfo", "protocolVersion"]
        .map(|name| params.and_then(|params| params.get(name)));
    let mut values = message.get("id").into_iter().chain(fields.into_iter().flatten());
    let fits = values.try_fold((MAX_METADATA_BYTES, MAX_METADATA_VALUES), remaining_room).is_some();
    (!fits).then(|| {
        format!(
            "`id`, `_meta`, `capabilities` and `clientInfo` may have at most {} KiB and {MAX_METADATA_VALUES} values",
            MAX_METADATA_BYTES >> 10
        )
    })
}

/// Returns the bytes and values that are left after a value; `None` if it does not fit.
fn remaining_room((text, values): (usize, usize), value: &Value) -> Option<(usize, usize)> {
    let values = values.checked_sub(1)?;
    match value {
        Value::Null | Value::Bool(_) => Some((text, values)),
        Value::Number(number) => Some((text.checked_sub(number.as_str().len())?, values)),
        Value::String(string) => Some((text.checked_sub(string.len())?, values)),
        Value::Array(all) => all.iter().try_fold((text, values), remaining_room),
        Value::Object(all) => {
            all.iter().try_fold((text, values), |(text, values), (name, value)| {
                remaining_room((text.checked_sub(name.len())?, values), value)
            })
        }
    }
}

/// Returns a document with empty arguments, and the arguments that were removed.
pub(crate) fn split_arguments(text: &[u8]) -> Option<(Vec<u8>, RawArguments)> {
    #[derive(Deserialize)]
    struct ArgumentsDocument<'d> {
        #[serde(borrow)]
        arguments: &'d RawValue,
    }
    let document: ArgumentsDocument<'_> =
        serde_json::from_str(std::str::from_utf8(text).ok()?).ok()?;
    let arguments = document.arguments.get().as_bytes();
    let begin = arguments.as_ptr().addr().checked_sub(text.as_ptr().addr())?;
    let (before, after) = (text.get(..begin)?, text.get(begin.checked_add(arguments.len())?..)?);
    Some(([before, b"{}", after].concat(), RawArguments(Bytes::copy_from_slice(arguments))))
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawCallMessage<'m> {
    #[serde(borrow)]
    jsonrpc: &'m RawValue,
    #[serde(borrow)]
    id: &'m RawValue,
    method: String,
    #[serde(borrow)]
    params: RawCallParams<'m>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RawCallParams<'m> {
    #[serde(borrow)]
    name: &'m RawValue,
    #[serde(borrow, skip_serializing)]
    arguments: &'m RawValue,
    #[serde(borrow, rename = "_meta", skip_serializing_if = "Option::is_none")]
    meta: Option<&'m RawValue>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    input_responses: Option<&'m RawValue>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    request_state: Option<&'m RawValue>,
}

/// Returns a call message without its arguments, and the arguments.
fn split_call_arguments(text: &[u8]) -> Option<(Vec<u8>, RawArguments)> {
    let message: RawCallMessage<'_> = serde_json::from_str(std::str::from_utf8(text).ok()?).ok()?;
    if message.method != "tools/call" {
        return None;
    }
    Some((
        serde_json::to_vec(&message).ok()?,
        RawArguments(Bytes::copy_from_slice(message.params.arguments.get().as_bytes())),
    ))
}

/// Returns whether a message is a call whose arguments are not an object.
fn has_invalid_arguments(message: &Value) -> bool {
    let arguments = message.get("params").and_then(|params| params.get("arguments"));
    message.get("method").is_some_and(|method| method == "tools/call")
        && arguments.is_some_and(|arguments| !arguments.is_object() && !arguments.is_null())
}

/// Returns the ID of a request that cannot be parsed otherwise; `null` if there is none.
pub(crate) fn find_request_id(text: &[u8]) -> Value {
    #[derive(Deserialize)]
    struct IdOnlyMessage {
        id: Option<Value>,
    }
    let named = serde_json::from_slice::<IdOnlyMessage>(text).ok().and_then(|named| named.id);
    named.filter(|id| id.is_string() || id.is_i64() || id.is_u64()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_arguments_are_separated() {
        let deep = format!("{}1{}", "[".repeat(500), "]".repeat(500));
        for arguments in [r#"{"x":1,"x":2}"#, "1e400", r#""\ud800""#, "[]", &deep] {
            let text = format!(
                r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{{"name":"t","arguments":{arguments},"_meta":{{}}}}}}"#
            );
            let (rest, raw) = split_call_arguments(text.as_bytes()).unwrap();
            assert_eq!(raw.0, arguments.as_bytes());
            assert_eq!(rest, br#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"t","_meta":{}}}"#);
        }
        for text in [
            r#"{"jsonrpc":"2.0","id":7,"id":8,"method":"tools/call","params":{"name":"t","arguments":[]}}"#,
            r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"t","name":"u","arguments":[]}}"#,
            r#"{"jsonrpc":"2.0","id":7,"method":"tools/list","params":{"name":"t","arguments":[]}}"#,
            r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"t","arguments":[}}"#,
            "[]",
        ] {
            assert!(split_call_arguments(text.as_bytes()).is_none(), "{text}");
        }
        let bounds = JsonBounds { bytes: 1 << 20, depth: 96, nodes: 400_000 };
        for (text, error) in [
            (r#"[{"jsonrpc":"2.0","method":"n"}]"#, MessageReadError::Batch),
            ("[]", MessageReadError::Batch),
        ] {
            assert_eq!(
                parse_message(Bytes::from_static(text.as_bytes()), &bounds).err(),
                Some(error),
                "{text}"
            );
        }
        assert!(matches!(
            parse_message(Bytes::from_static(b"[{]"), &bounds),
            Err(MessageReadError::Invalid(_))
        ));
        let (rest, raw) =
            split_arguments(br#"{"tool": "t", "arguments" : {"x":1,"x":2} , "id": "a"}"#).unwrap();
        assert_eq!(
            (&*rest, &*raw.0),
            (&br#"{"tool": "t", "arguments" : {} , "id": "a"}"#[..], &br#"{"x":1,"x":2}"#[..])
        );
        assert_eq!(
            (
                find_request_id(br#"{"id":7,"x":{"a":1,"a":2}}"#),
                find_request_id(br#"{"id":"#),
                find_request_id(b"[]")
            ),
            (7.into(), Value::Null, Value::Null)
        );
    }
}
