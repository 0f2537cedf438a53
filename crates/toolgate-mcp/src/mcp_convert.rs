//! Renders tool definitions as MCP tools, and outcomes as MCP results.

use std::sync::Arc;

use rmcp::ErrorData;
use rmcp::model::{
    CallToolResult, ContentBlock, InputRequests, InputRequiredResult, InputResponses, JsonObject,
    MetaObject, NotificationMetaObject, RequestMetaObject, ResultType, Tool as McpTool,
    ToolAnnotations,
};
use serde_json::{Value, json};
use toolgate::{Answer, Effect, ErrorDialect, Outcome, ToolSpec};
use toolgate_json::JsonBounds;

use crate::upstream::CallChannel;

/// Prefix for a question of an upstream whose name is reserved for toolgate.
const UPSTREAM_QUESTION_PREFIX: &str = "upstream_";

/// Renders a tool for a client.
///
/// The configuration decides the hints about effects; those of the upstream are ignored.
pub(crate) fn render_tool(spec: &ToolSpec, remote: Option<&McpTool>) -> McpTool {
    let mut schema = match spec.input_schema() {
        Some(Value::Object(schema)) => schema.clone(),
        _ => JsonObject::from_iter([("type".to_owned(), json!("object"))]),
    };
    if !spec.examples().is_empty() {
        schema.insert(
            "examples".to_owned(),
            spec.examples().iter().map(|example| example.input.clone()).collect(),
        );
    }
    let mut tool =
        McpTool::new(spec.name().to_owned(), spec.description().to_owned(), Arc::new(schema));
    if let Some(Value::Object(schema)) = spec.output_schema() {
        tool.output_schema = Some(Arc::new(schema.clone()));
    }
    let mut annotations = ToolAnnotations::new();
    annotations.read_only_hint = Some(spec.effect() == Effect::Read);
    annotations.destructive_hint = Some(spec.effect() == Effect::Destructive);
    annotations.idempotent_hint = Some(spec.is_idempotent());
    if let Some(remote) = remote {
        tool.title.clone_from(&remote.title);
        tool.icons.clone_from(&remote.icons);
        tool.meta = remote.meta.clone().map(strip_reserved_keys);
        annotations.title = remote.annotations.as_ref().and_then(|hints| hints.title.clone());
        annotations.open_world_hint =
            remote.annotations.as_ref().and_then(|hints| hints.open_world_hint);
    }
    tool.annotations = Some(annotations);
    tool
}

/// Removes keys that only toolgate may set from metadata of an upstream.
pub(crate) fn strip_reserved_keys(mut meta: MetaObject) -> MetaObject {
    meta.retain(|key, _| !key.starts_with("toolgate/"));
    meta
}

/// Removes reserved keys and protocol keys from metadata of a result.
///
/// Protocol keys describe the connection to the upstream, not the one to the client.
pub(crate) fn strip_result_meta(meta: MetaObject) -> MetaObject {
    let mut meta = strip_reserved_keys(meta);
    meta.retain(|key, _| !key.starts_with("io.modelcontextprotocol/"));
    meta
}

/// Removes reserved keys and protocol keys from metadata of a notification.
pub(crate) fn strip_notification_meta(meta: NotificationMetaObject) -> NotificationMetaObject {
    NotificationMetaObject(strip_result_meta(meta.0))
}

/// Removes keys that an upstream may not see from metadata of a client.
///
/// The connection to the upstream sets protocol keys of its own.
pub(crate) fn strip_request_meta(mut meta: RequestMetaObject) -> RequestMetaObject {
    meta.retain(|key, _| {
        !key.starts_with("toolgate/")
            && !key.starts_with("io.modelcontextprotocol/")
            && key != "progressToken"
    });
    meta
}

/// Removes keys that only toolgate may set from all metadata in a value, at any depth.
pub(crate) fn strip_reserved_keys_deep<
    T: serde::Serialize + serde::de::DeserializeOwned + Clone,
>(
    message: T,
) -> T {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(map) => {
                if let Some(Value::Object(meta)) = map.get_mut("_meta") {
                    meta.retain(|key, _| !key.starts_with("toolgate/"));
                }
                map.values_mut().for_each(strip);
            }
            Value::Array(items) => items.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let Ok(mut value) = serde_json::to_value(&message) else { return message };
    if !value.to_string().contains("toolgate/") {
        return message;
    }
    strip(&mut value);
    serde_json::from_value(value).unwrap_or(message)
}

/// Returns whether the name of a question is reserved for toolgate, with or without the prefix.
fn is_reserved_name(name: &str) -> bool {
    name.trim_start_matches(UPSTREAM_QUESTION_PREFIX).starts_with("toolgate")
}

/// Renames questions of an upstream that use reserved names.
///
/// The upstream may be another gateway, which asks questions with these names.
pub(crate) fn rename_questions(requests: InputRequests) -> InputRequests {
    let rename = |name: String| {
        if is_reserved_name(&name) { format!("{UPSTREAM_QUESTION_PREFIX}{name}") } else { name }
    };
    strip_reserved_keys_deep(
        requests.into_iter().map(|(name, request)| (rename(name), request)).collect(),
    )
}

/// Restores the original names in the answers for an upstream, and removes reserved metadata.
pub(crate) fn restore_responses(responses: InputResponses) -> InputResponses {
    let original_name = |name: String| {
        name.strip_prefix(UPSTREAM_QUESTION_PREFIX)
            .filter(|original| is_reserved_name(original))
            .map(str::to_owned)
            .unwrap_or(name)
    };
    responses
        .into_iter()
        .map(|(name, response)| (original_name(name), strip_reserved_keys_deep(response)))
        .collect()
}

/// Checks the questions that an upstream returns for a request that is not a call.
///
/// Toolgate asks no questions there, so reserved names are an error.
pub(crate) fn check_input_request(
    mut request: InputRequiredResult,
) -> Result<InputRequiredResult, ErrorData> {
    if request
        .input_requests
        .iter()
        .flat_map(InputRequests::keys)
        .any(|name| is_reserved_name(name))
    {
        return Err(ErrorData::internal_error(
            "the upstream used a question name that is reserved for toolgate",
            None,
        ));
    }
    request.input_requests = request.input_requests.map(strip_reserved_keys_deep);
    request.meta = request.meta.map(strip_result_meta);
    Ok(request)
}

/// Returns whether JSON text has no more content than the equal structured value.
///
/// Duplicate keys and long whitespace would be additional content.
fn is_equivalent_text(text: &str, structured: &Value) -> bool {
    let bounds = JsonBounds { bytes: usize::MAX, depth: 128, nodes: usize::MAX };
    text.len() <= 4 * structured.to_string().len() + 256
        && toolgate_json::parse(text.as_bytes(), &bounds).is_ok()
}

/// Renders the result of an upstream.
///
/// Only checked content may pass. Beside a structured result, only its text form, images and audio
/// stay.
fn render_upstream_result(mut result: CallToolResult) -> CallToolResult {
    // Servers of earlier revisions do not send the result type.
    result.result_type = Some(ResultType::COMPLETE);
    if let Some(structured) = &result.structured_content {
        let single_text = structured
            .as_object()
            .filter(|map| map.len() == 1)
            .and_then(|map| map.get("result"))
            .and_then(Value::as_str);
        let before = result.content.len();
        let mut has_text = false;
        result.content.retain_mut(|block| match block {
            // One text block may repeat the structured result.
            ContentBlock::Text(text) => {
                let is_single_text = single_text == Some(text.text.as_str());
                if has_text
                    || !(is_single_text
                        || serde_json::from_str::<Value>(&text.text)
                            .is_ok_and(|value| value == *structured))
                {
                    return false;
                }
                if !is_single_text && !is_equivalent_text(&text.text, structured) {
                    text.text = structured.to_string();
                }
                has_text = true;
                true
            }
            ContentBlock::Image(_) | ContentBlock::Audio(_) => true,
            _ => false,
        });
        if result.content.len() < before && !has_text {
            result.content.insert(0, ContentBlock::text(structured.to_string()));
        }
    }
    result.meta = result.meta.map(strip_result_meta);
    for block in &mut result.content {
        let meta = match block {
            ContentBlock::Text(text) => &mut text.meta,
            ContentBlock::Image(image) => &mut image.meta,
            ContentBlock::Audio(audio) => &mut audio.meta,
            // Other blocks are rare, so all of their metadata is searched.
            other => {
                *other = strip_reserved_keys_deep(other.clone());
                continue;
            }
        };
        *meta = meta.take().map(strip_reserved_keys);
    }
    result
}

/// Adds the call ID and the receipt of the ledger row to metadata.
pub(crate) fn add_receipt(meta: &mut MetaObject, answer: &Answer) {
    meta.insert("toolgate/call".to_owned(), json!(answer.call.to_string()));
    if let Some(receipt) = answer.receipt() {
        meta.insert(
            "toolgate/receipt".to_owned(),
            serde_json::to_value(receipt).unwrap_or_default(),
        );
    }
}

/// Renders the outcome of a call.
pub(crate) fn render_result(
    answer: &Answer,
    channel: &CallChannel,
    has_schema: bool,
    dialect: ErrorDialect,
) -> CallToolResult {
    let mut result = match &answer.outcome {
        Outcome::Error(error) => {
            let mut result = CallToolResult::structured_error(error.to_json_in(dialect));
            result.content = vec![ContentBlock::text(error.for_model_in(dialect))];
            // Some clients validate structured errors against the output schema and do not show
            // invalid ones.
            if has_schema {
                result.structured_content = None;
            }
            result
        }
        Outcome::Success(output) => {
            let raw_result =
                channel.raw_result.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
            match raw_result {
                // If the pipeline changed nothing, the result of the upstream is returned as it is.
                Some((value, raw))
                    if value == output.value
                        && !output.hidden
                        && output.stored.is_none()
                        && !output.replayed =>
                {
                    let mut raw = render_upstream_result(*raw);
                    if let Some(message) = &output.message {
                        raw.content.push(ContentBlock::text(message.clone()));
                    }
                    raw
                }
                _ => {
                    let mut result =
                        CallToolResult::success(vec![ContentBlock::text(output.for_model())]);
                    if output.value.is_object() && !output.hidden {
                        result.structured_content = Some(output.value.clone());
                    }
                    result
                }
            }
        }
        Outcome::Signal(signal) => {
            CallToolResult::structured(serde_json::to_value(signal).unwrap_or_default())
        }
    };
    let mut meta = result.meta.take().unwrap_or_default();
    add_receipt(&mut meta, answer);
    if let Outcome::Error(error) = &answer.outcome {
        meta.insert("toolgate/error".to_owned(), serde_json::to_value(error).unwrap_or_default());
    }
    if let Outcome::Success(output) = &answer.outcome {
        if output.replayed {
            meta.insert("toolgate/replayed".to_owned(), json!(true));
        }
        if let Some(stored) = &output.stored {
            meta.insert(
                "toolgate/stored".to_owned(),
                serde_json::to_value(stored).unwrap_or_default(),
            );
        }
    }
    result.meta = Some(meta);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_metadata_is_removed_from_responses() {
        let response = json!({"action": "accept", "content": {"name": "x"}, "_meta": {"toolgate/call": "1", "own": 2}});
        let restored =
            restore_responses(InputResponses::from([("upstream_toolgate_a".to_owned(), response)]));
        let expected = json!({"action": "accept", "content": {"name": "x"}, "_meta": {"own": 2}});
        assert_eq!(restored, InputResponses::from([("toolgate_a".to_owned(), expected)]));
    }
}
