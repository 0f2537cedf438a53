//! From specs to tools as clients see them, and from outcomes to results.

use std::sync::Arc;

use rmcp::ErrorData;
use rmcp::model::{
    CallToolResult, ContentBlock, InputRequests, InputRequiredResult, InputResponses, JsonObject, MetaObject, NotificationMetaObject,
    RequestMetaObject, ResultType, Tool as McpTool, ToolAnnotations,
};
use serde_json::{Value, json};
use toolgate::json::Bounds;
use toolgate::{Answer, Dialect, Effect, Outcome, Spec};

use crate::upstream::Line;

/// What stands before the name of an upstream's question that is called as only toolgate's are.
const THEIRS: &str = "upstream_";

/// A tool as a client sees it. What an upstream says of its effects is a hint; what the configuration says holds.
pub(crate) fn tool(spec: &Spec, remote: Option<&McpTool>) -> McpTool {
    let mut schema = match spec.input_schema() {
        Some(Value::Object(schema)) => schema.clone(),
        _ => JsonObject::from_iter([("type".to_owned(), json!("object"))]),
    };
    if !spec.examples().is_empty() {
        schema.insert("examples".to_owned(), spec.examples().iter().map(|example| example.input.clone()).collect());
    }
    let mut tool = McpTool::new(spec.name().to_owned(), spec.description().to_owned(), Arc::new(schema));
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
        tool.meta = remote.meta.clone().map(clean);
        annotations.title = remote.annotations.as_ref().and_then(|hints| hints.title.clone());
        annotations.open_world_hint = remote.annotations.as_ref().and_then(|hints| hints.open_world_hint);
    }
    tool.annotations = Some(annotations);
    tool
}

/// Metadata of an upstream, without what only toolgate writes.
pub(crate) fn clean(mut meta: MetaObject) -> MetaObject {
    meta.retain(|key, _| !key.starts_with("toolgate/"));
    meta
}

/// Metadata of a result, without that and without what is the protocol's: that is said of one connection, and this is another.
pub(crate) fn of_result(meta: MetaObject) -> MetaObject {
    let mut meta = clean(meta);
    meta.retain(|key, _| !key.starts_with("io.modelcontextprotocol/"));
    meta
}

/// The same of something that is said on the way to a result.
pub(crate) fn of_word(meta: NotificationMetaObject) -> NotificationMetaObject {
    NotificationMetaObject(of_result(meta.0))
}

/// Metadata of a client that an upstream may see. What is the protocol's is said anew on the way there.
pub(crate) fn own_words(mut meta: RequestMetaObject) -> RequestMetaObject {
    meta.retain(|key, _| !key.starts_with("toolgate/") && !key.starts_with("io.modelcontextprotocol/") && key != "progressToken");
    meta
}

/// Something of an upstream, or for one, without what only toolgate writes, however deep it stands.
pub(crate) fn unspoofed<T: serde::Serialize + serde::de::DeserializeOwned + Clone>(thing: T) -> T {
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
    let Ok(mut value) = serde_json::to_value(&thing) else { return thing };
    if !value.to_string().contains("toolgate/") {
        return thing;
    }
    strip(&mut value);
    serde_json::from_value(value).unwrap_or(thing)
}

/// Whether a question is called as only toolgate's are, or as an upstream's that was called so.
fn is_ours(name: &str) -> bool {
    name.trim_start_matches(THEIRS).starts_with("toolgate")
}

/// What an upstream asks its client. Another gateway may be behind this one: what it asks is called otherwise than what is asked here.
pub(crate) fn questions(requests: InputRequests) -> InputRequests {
    let named = |name: String| if is_ours(&name) { format!("{THEIRS}{name}") } else { name };
    unspoofed(requests.into_iter().map(|(name, request)| (named(name), request)).collect())
}

/// What it is told, by the names that it has asked by, and by nobody in the name of toolgate.
pub(crate) fn responses(told: InputResponses) -> InputResponses {
    let asked = |name: String| name.strip_prefix(THEIRS).filter(|own| is_ours(own)).map(str::to_owned).unwrap_or(name);
    told.into_iter().map(|(name, said)| (asked(name), unspoofed(said))).collect()
}

/// What an upstream asks in answer to something that is no call. There toolgate asks nothing, and nobody does so in its name.
pub(crate) fn asked_back(mut asked: InputRequiredResult) -> Result<InputRequiredResult, ErrorData> {
    if asked.input_requests.iter().flat_map(InputRequests::keys).any(|name| is_ours(name)) {
        return Err(ErrorData::internal_error("the upstream asks in the name of toolgate", None));
    }
    asked.input_requests = asked.input_requests.map(unspoofed);
    asked.meta = asked.meta.map(of_result);
    Ok(asked)
}

/// Whether JSON that says the same as a result says no more than it: a key that stands there twice, or blanks without end.
fn says_no_more(text: &str, structured: &Value) -> bool {
    let bounds = Bounds { bytes: usize::MAX, depth: 128, nodes: usize::MAX };
    text.len() <= 4 * structured.to_string().len() + 256 && toolgate::json::parse(text.as_bytes(), &bounds).is_ok()
}

/// A result as the upstream gave it. Its words are those that were judged: beside a structured result, whatever else says something is
/// left out, and only pictures and sounds stay.
fn as_given(mut said: CallToolResult) -> CallToolResult {
    // A server of an earlier revision does not say that this is all.
    said.result_type = Some(ResultType::COMPLETE);
    if let Some(structured) = &said.structured_content {
        let alone = structured.as_object().filter(|map| map.len() == 1).and_then(|map| map.get("result")).and_then(Value::as_str);
        let before = said.content.len();
        let mut told = false;
        said.content.retain_mut(|block| match block {
            // What says the same is said once.
            ContentBlock::Text(text) => {
                let is_alone = alone == Some(text.text.as_str());
                if told || !(is_alone || serde_json::from_str::<Value>(&text.text).is_ok_and(|value| value == *structured)) {
                    return false;
                }
                if !is_alone && !says_no_more(&text.text, structured) {
                    text.text = structured.to_string();
                }
                told = true;
                true
            }
            ContentBlock::Image(_) | ContentBlock::Audio(_) => true,
            _ => false,
        });
        if said.content.len() < before && !told {
            said.content.insert(0, ContentBlock::text(structured.to_string()));
        }
    }
    said.meta = said.meta.map(of_result);
    for block in &mut said.content {
        let meta = match block {
            ContentBlock::Text(text) => &mut text.meta,
            ContentBlock::Image(image) => &mut image.meta,
            ContentBlock::Audio(audio) => &mut audio.meta,
            // What is nested deeper is rare.
            other => {
                *other = unspoofed(other.clone());
                continue;
            }
        };
        *meta = meta.take().map(clean);
    }
    said
}

/// Says which row of the ledger something is about.
pub(crate) fn sign(meta: &mut MetaObject, answer: &Answer) {
    meta.insert("toolgate/call".to_owned(), json!(answer.call.to_string()));
    if let Some(receipt) = answer.receipt() {
        meta.insert("toolgate/receipt".to_owned(), serde_json::to_value(receipt).unwrap_or_default());
    }
}

/// What a call came to, as a client reads it.
pub(crate) fn result(answer: &Answer, line: &Line, has_schema: bool, dialect: Dialect) -> CallToolResult {
    let mut result = match &answer.outcome {
        Outcome::Error(error) => {
            let mut result = CallToolResult::structured_error(error.told_in(dialect));
            result.content = vec![ContentBlock::text(error.for_model_in(dialect))];
            // Some clients hold every structured result against the tool's schema, errors too, and show nobody what does not fit.
            if has_schema {
                result.structured_content = None;
            }
            result
        }
        Outcome::Success(output) => {
            let answered = line.answered.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
            match answered {
                // As the upstream said it, where nothing on the way has changed it.
                Some((value, said)) if value == output.value && !output.hidden && output.stored.is_none() && !output.replayed => {
                    let mut said = as_given(*said);
                    if let Some(message) = &output.message {
                        said.content.push(ContentBlock::text(message.clone()));
                    }
                    said
                }
                _ => {
                    let mut result = CallToolResult::success(vec![ContentBlock::text(output.for_model())]);
                    if output.value.is_object() && !output.hidden {
                        result.structured_content = Some(output.value.clone());
                    }
                    result
                }
            }
        }
        Outcome::Signal(signal) => CallToolResult::structured(serde_json::to_value(signal).unwrap_or_default()),
    };
    let mut meta = result.meta.take().unwrap_or_default();
    sign(&mut meta, answer);
    if let Outcome::Error(error) = &answer.outcome {
        meta.insert("toolgate/error".to_owned(), serde_json::to_value(error).unwrap_or_default());
    }
    if let Outcome::Success(output) = &answer.outcome {
        if output.replayed {
            meta.insert("toolgate/replayed".to_owned(), json!(true));
        }
        if let Some(stored) = &output.stored {
            meta.insert("toolgate/stored".to_owned(), serde_json::to_value(stored).unwrap_or_default());
        }
    }
    result.meta = Some(meta);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_answers_an_upstream_in_the_name_of_toolgate() {
        let said = json!({"action": "accept", "content": {"name": "x"}, "_meta": {"toolgate/call": "1", "own": 2}});
        let told = responses(InputResponses::from([("upstream_toolgate_a".to_owned(), said)]));
        let heard = json!({"action": "accept", "content": {"name": "x"}, "_meta": {"own": 2}});
        assert_eq!(told, InputResponses::from([("toolgate_a".to_owned(), heard)]));
    }
}
