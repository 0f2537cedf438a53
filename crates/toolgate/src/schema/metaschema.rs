//! Finds the faults of a schema itself with their positions.

use std::collections::HashSet;

use serde_json::Value;

use super::{MAX_LISTED_ERRORS, pattern_options};
use toolgate_json::Pointer;

/// A fault of a schema.
pub struct SchemaFault {
    /// The position in the schema.
    pub pointer: Pointer,
    /// The reason.
    pub reason: String,
    /// A suggestion.
    pub suggestion: Option<&'static str>,
}

/// The types of JSON Schema.
const JSON_TYPES: [&str; 7] = ["array", "boolean", "integer", "null", "number", "object", "string"];
/// Keywords whose contents are not schemas.
const VALUE_KEYWORDS: [&str; 5] = ["const", "default", "enum", "example", "examples"];

/// Returns the faults of a schema that can be found without compiling all of it.
pub fn find_schema_faults(schema: &Value) -> Vec<SchemaFault> {
    let mut found: Vec<SchemaFault> = match jsonschema::meta::validator_for(schema) {
        Ok(rules) => rules
            .iter_errors(schema)
            .take(MAX_LISTED_ERRORS)
            .map(|error| to_schema_fault(&error))
            .collect(),
        // If the metaschema is not available, the compiler reports the reason.
        Err(_) => Vec::new(),
    };
    find_invalid_patterns(schema, &mut Pointer::default(), &mut found);
    // Several rules may report the same position.
    let mut reported = HashSet::new();
    found.retain(|fault| reported.insert(fault.pointer.to_string()));
    found
}

fn to_schema_fault(error: &jsonschema::ValidationError<'_>) -> SchemaFault {
    let at = Pointer::from(error.instance_path().to_string().as_str());
    let parts: Vec<&str> = at.parts().iter().map(String::as_str).collect();
    // A property may have the name of a keyword.
    let is_kind = matches!(parts.as_slice(), ["type"] | [.., "type", _] | [.., "type"])
        && !matches!(
            parts.as_slice(),
            [
                ..,
                "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas",
                _
            ]
        );
    let value = error.instance();
    let keyword = value
        .as_str()
        .filter(|_| is_kind)
        .and_then(|kind| toolgate_text::suggest::find_closest(kind, JSON_TYPES));
    let reason = match is_kind {
        true => format!("{value} is not a type; the types are {}", JSON_TYPES.join(", ")),
        false => error.to_string(),
    };
    SchemaFault {
        pointer: at,
        reason,
        suggestion: keyword
            .and_then(|keyword| JSON_TYPES.into_iter().find(|kind| *kind == keyword)),
    }
}

/// Finds regular expressions that cannot be compiled.
fn find_invalid_patterns(schema: &Value, at: &mut Pointer, found: &mut Vec<SchemaFault>) {
    if at.parts().len() > 64 || found.len() >= MAX_LISTED_ERRORS {
        return;
    }
    match schema {
        Value::Object(map) => {
            for (key, inner) in
                map.iter().filter(|(key, _)| !VALUE_KEYWORDS.contains(&key.as_str()))
            {
                at.push(key.clone());
                match inner {
                    Value::String(_) if key == "pattern" => {
                        let pattern_schema = serde_json::json!({"pattern": inner});
                        if jsonschema::options()
                            .with_pattern_options(pattern_options())
                            .build(&pattern_schema)
                            .is_err()
                        {
                            let reason = format!("cannot compile the regular expression {inner}");
                            found.push(SchemaFault {
                                pointer: at.clone(),
                                reason,
                                suggestion: None,
                            });
                        }
                    }
                    _ => find_invalid_patterns(inner, at, found),
                }
                at.pop();
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                at.push(index.to_string());
                find_invalid_patterns(item, at, found);
                at.pop();
            }
        }
        _ => {}
    }
}
