//! Implements `json_query`, which reads one value from a JSON document.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::call::error_code;
use crate::tool::context::ToolContext;
use crate::tool::{Effect, Failure, Tool};
use toolgate_json::{JsonBounds, parse};

#[derive(Deserialize, JsonSchema)]
struct Args {
    /// JSON text: an object or array.
    data: String,
    /// Names and indices, separated by dots: `items.0.name`.
    #[schemars(length(max = 1000))]
    path: String,
}

#[derive(Serialize, JsonSchema)]
struct Found {
    /// Whether the path leads to a value.
    found: bool,
    /// The value, or null.
    value: Value,
}

/// Creates the tool `json_query`, which reads one value from JSON text.
#[must_use]
pub fn json_query() -> Tool {
    Tool::typed(
        "json_query",
        "Read one value from JSON text by a path such as `items.0.name`.\n\
         Use it to pick a field from a large JSON result instead of reading all of it.\n\
         Edge cases: if the path leads to no value, `found` is false and a message lists the existing names; text that is not JSON is an error.\n\
         Needs no other tool first.",
        |ctx: ToolContext, args: Args| async move {
            let data = parse(args.data.as_bytes(), &JsonBounds::default())
                .map_err(|e| Failure::from_code(error_code::INVALID_JSON, format!("`data` is not JSON: {e}")))?;
            let mut at = &data;
            for part in args.path.split('.').filter(|part| !part.is_empty()) {
                let next = match at {
                    Value::Object(map) => map.get(part),
                    Value::Array(items) => part.parse::<usize>().ok().and_then(|index| items.get(index)),
                    _ => None,
                };
                let Some(next) = next else {
                    ctx.set_message(describe_missing(at, part));
                    return Ok(Found { found: false, value: Value::Null });
                };
                at = next;
            }
            Ok(Found { found: true, value: at.clone() })
        },
    )
    .effect(Effect::Read)
    .example(
        "The first name",
        json!({"data": "{\"items\": [{\"name\": \"pen\"}]}", "path": "items.0.name"}),
        json!({"found": true, "value": "pen"}),
    )
}

fn describe_missing(at: &Value, part: &str) -> String {
    let part = toolgate_text::escape_for_display(part);
    match at {
        Value::Object(map) => {
            let guess = toolgate_text::suggest::find_closest(&part, map.keys().map(String::as_str));
            let names: Vec<&str> = map.keys().take(20).map(String::as_str).collect();
            format!(
                "there is no `{part}` here{}; known names: {}",
                guess.map(|g| format!(", did you mean `{g}`?")).unwrap_or_default(),
                names.join(", ")
            )
        }
        Value::Array(items) => {
            format!("`{part}` is not an index of an array with {} items", items.len())
        }
        other => {
            format!("`{part}` cannot be looked up in a {}", toolgate_json::json_type_of(other))
        }
    }
}
