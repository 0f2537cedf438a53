//! Builds the errors of requests that cannot be understood, in the error contract.

use rmcp::model::ErrorCode;
use serde_json::{Value, json};
use toolgate::call::error_code;
use toolgate::{Answer, Call, ToolError, Toolgate};

/// Maximum length of a request ID that is returned with an error.
const MAX_ECHOED_ID_BYTES: usize = 4 << 10;
/// Maximum length of a reason, which may quote what the client sent.
const MAX_REASON_CHARS: usize = 300;

/// Shortens a reason.
pub(crate) fn truncate_reason(why: &str) -> String {
    why.chars().take(MAX_REASON_CHARS).collect()
}

/// Records a call that is rejected because of its request.
pub(crate) async fn record_rejected_call(gate: &Toolgate, call: Call, why: &str) -> Answer {
    gate.call(call.with_parse_error(truncate_reason(why))).await
}

/// Returns the error contract for a rejected request, with the receipt of its call if there is one.
pub(crate) fn error_contract(why: &str, answer: Option<&Answer>) -> Value {
    let error = ToolError::from_code(error_code::INVALID_REQUEST, truncate_reason(why));
    let mut contract =
        serde_json::to_value(answer.and_then(|answer| answer.outcome.error()).unwrap_or(&error))
            .unwrap_or_default();
    if let (Some(fields), Some(receipt)) =
        (contract.as_object_mut(), answer.and_then(Answer::receipt))
    {
        fields.insert("receipt".to_owned(), serde_json::to_value(receipt).unwrap_or_default());
    }
    contract
}

/// Builds the JSON-RPC error for a message that is not a valid request.
pub(crate) fn rejection_message(code: ErrorCode, id: Value, why: &str) -> Value {
    let id = if id.to_string().len() > MAX_ECHOED_ID_BYTES { Value::Null } else { id };
    let why = truncate_reason(why);
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code.0, "message": why, "data": error_contract(&why, None)}})
}
