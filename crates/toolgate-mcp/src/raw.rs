//! A call whose arguments cannot be read, or are none, is a call all the same: it goes to the gate with them as they came, which says
//! what is wrong with them, and writes it down.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

/// Arguments as they came.
#[derive(Debug, Clone)]
pub(crate) struct Raw(pub(crate) Bytes);

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Message<'m> {
    #[serde(borrow)]
    jsonrpc: &'m RawValue,
    #[serde(borrow)]
    id: &'m RawValue,
    method: String,
    #[serde(borrow)]
    params: Params<'m>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Params<'m> {
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

/// A message that asks for a call, without its arguments; and these.
pub(crate) fn parted(text: &[u8]) -> Option<(Vec<u8>, Raw)> {
    let message: Message<'_> = serde_json::from_str(std::str::from_utf8(text).ok()?).ok()?;
    if message.method != "tools/call" {
        return None;
    }
    Some((serde_json::to_vec(&message).ok()?, Raw(Bytes::copy_from_slice(message.params.arguments.get().as_bytes()))))
}

/// Whether a message asks for a call with arguments that are none.
pub(crate) fn has_odd_arguments(message: &Value) -> bool {
    let arguments = message.get("params").and_then(|params| params.get("arguments"));
    message.get("method").is_some_and(|method| method == "tools/call")
        && arguments.is_some_and(|arguments| !arguments.is_object() && !arguments.is_null())
}

/// What a request is called that cannot be read otherwise; `null` where not even that can be.
pub(crate) fn id(text: &[u8]) -> Value {
    #[derive(Deserialize)]
    struct Named {
        id: Option<Value>,
    }
    let named = serde_json::from_slice::<Named>(text).ok().and_then(|named| named.id);
    named.filter(|id| id.is_string() || id.is_i64() || id.is_u64()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_told_from_its_arguments() {
        let deep = format!("{}1{}", "[".repeat(500), "]".repeat(500));
        for arguments in [r#"{"x":1,"x":2}"#, "1e400", r#""\ud800""#, "[]", &deep] {
            let text =
                format!(r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{{"name":"t","arguments":{arguments},"_meta":{{}}}}}}"#);
            let (rest, raw) = parted(text.as_bytes()).unwrap();
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
            assert!(parted(text.as_bytes()).is_none(), "{text}");
        }
        assert_eq!((id(br#"{"id":7,"x":{"a":1,"a":2}}"#), id(br#"{"id":"#), id(b"[]")), (7.into(), Value::Null, Value::Null));
    }
}
