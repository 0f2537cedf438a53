//! Converts a `CallToolResult` into the value that rules and callers see.

use rmcp::model::{CallToolResult, ContentBlock, ResourceContents};
use serde_json::{Value, json};

/// Returns whether a successful result contains only an error text.
///
/// Many servers report failures that way: `Error: …`, `Database error: …`.
pub(crate) fn is_error_in_success(result: &CallToolResult) -> bool {
    let ([ContentBlock::Text(text)], None) =
        (result.content.as_slice(), &result.structured_content)
    else {
        return false;
    };
    let Some((head, _)) = text.text.split_once(": ") else { return false };
    let is_word = |word: &str| !word.is_empty() && word.chars().all(char::is_alphabetic);
    let mut words = head.split(' ');
    let last = words.next_back().unwrap_or_default();
    matches!(last, "Error" | "error")
        && words.clone().count() <= 2
        && words.all(|word| is_word(word) && !word.eq_ignore_ascii_case("no"))
}

/// Returns the concatenated text blocks of a result.
pub(crate) fn result_text(result: &CallToolResult) -> String {
    let texts =
        result.content.iter().filter_map(|block| block.as_text().map(|text| text.text.as_str()));
    texts.collect::<Vec<_>>().join("\n")
}

/// Returns the value of a result for rules.
///
/// The value is the structured content if there is any, else JSON if the text is JSON, else the
/// text. Binary blocks are replaced by a description.
pub(crate) fn result_value(result: &CallToolResult) -> Value {
    if let Some(structured) = &result.structured_content {
        return structured.clone();
    }
    match result.content.as_slice() {
        [] => Value::Null,
        [ContentBlock::Text(text)] => text_value(&text.text),
        blocks if blocks.iter().all(|block| block.as_text().is_some()) => {
            Value::String(result_text(result))
        }
        blocks => Value::Array(blocks.iter().map(describe_block).collect()),
    }
}

fn text_value(text: &str) -> Value {
    let bounds =
        toolgate_json::JsonBounds { bytes: 4 << 20, ..toolgate_json::JsonBounds::default() };
    let structured = text.trim_start().starts_with(['{', '[']);
    structured
        .then(|| toolgate_json::parse(text.as_bytes(), &bounds).ok())
        .flatten()
        .unwrap_or_else(|| Value::String(text.to_owned()))
}

/// Describes a content block, with a digest in place of binary data.
fn describe_block(block: &ContentBlock) -> Value {
    let binary = |kind: &str, mime: Option<&str>, data: &str| json!({"type": kind, "mimeType": mime, "base64Length": data.len(), "sha256": toolgate_json::Digest::of(data.as_bytes()).to_string()});
    match block {
        ContentBlock::Text(text) => json!({"type": "text", "text": text.text}),
        ContentBlock::Image(image) => binary("image", Some(&image.mime_type), &image.data),
        ContentBlock::Audio(audio) => binary("audio", Some(&audio.mime_type), &audio.data),
        ContentBlock::Resource(embedded) => match &embedded.resource {
            ResourceContents::TextResourceContents { uri, text, .. } => {
                json!({"type": "resource", "uri": uri, "text": text})
            }
            ResourceContents::BlobResourceContents { uri, blob, mime_type, .. } => {
                let mut described = binary("resource", mime_type.as_deref(), blob);
                if let Some(fields) = described.as_object_mut() {
                    fields.insert("uri".to_owned(), uri.clone().into());
                }
                described
            }
            _ => json!({"type": "resource"}),
        },
        other => serde_json::to_value(other).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_texts_in_successes_are_detected() {
        let success = |text: &str| CallToolResult::success(vec![ContentBlock::text(text)]);
        for text in [
            "Error: no such table",
            "error: x",
            "Database error: near \"x\"",
            "Invalid input error: y",
        ] {
            assert!(is_error_in_success(&success(text)), "{text}");
        }
        for text in [
            "Errors: 0",
            "No error: all is well, and this is a long text about it",
            "12:00 error: x",
            "Error",
            "the log says\nError: x",
            "Terror: a film",
        ] {
            assert!(!is_error_in_success(&success(text)), "{text}");
        }
        let mut several = success("Error: x");
        several.content.push(ContentBlock::text("and more"));
        assert!(!is_error_in_success(&several));
        let mut structured = success("Error: x");
        structured.structured_content = Some(json!({"rows": []}));
        assert!(!is_error_in_success(&structured));
    }
}
