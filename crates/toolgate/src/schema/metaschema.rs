//! Finds the faults of a schema itself with their positions.

use std::collections::HashSet;

use serde_json::Value;

use super::{MOST_ERRORS, patterns};
use toolgate_json::Pointer;

/// A fault of a schema.
pub struct Fault {
    /// The position in the schema.
    pub pointer: Pointer,
    pub why: String,
    /// A suggestion.
    pub suggestion: Option<&'static str>,
}

/// The types of JSON Schema.
const KINDS: [&str; 7] = ["array", "boolean", "integer", "null", "number", "object", "string"];
/// Keywords whose contents are not schemas.
const VALUES: [&str; 5] = ["const", "default", "enum", "example", "examples"];

/// Returns the faults of a schema that can be found without compiling all of it.
pub fn faults(schema: &Value) -> Vec<Fault> {
    let mut found: Vec<Fault> = match jsonschema::meta::validator_for(schema) {
        Ok(rules) => rules.iter_errors(schema).take(MOST_ERRORS).map(|error| fault(&error)).collect(),
        // If the metaschema is not available, the compiler reports the reason.
        Err(_) => Vec::new(),
    };
    unread_patterns(schema, &mut Pointer::default(), &mut found);
    // Several rules may report the same position.
    let mut told = HashSet::new();
    found.retain(|fault| told.insert(fault.pointer.to_string()));
    found
}

fn fault(error: &jsonschema::ValidationError<'_>) -> Fault {
    let at = Pointer::from(error.instance_path().to_string().as_str());
    let parts: Vec<&str> = at.parts().iter().map(String::as_str).collect();
    // A property may have the name of a keyword.
    let is_kind = matches!(parts.as_slice(), ["type"] | [.., "type", _] | [.., "type"])
        && !matches!(parts.as_slice(), [.., "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas", _]);
    let got = error.instance();
    let meant = got.as_str().filter(|_| is_kind).and_then(|kind| toolgate_text::suggest::closest(kind, KINDS));
    let why = match is_kind {
        true => format!("{got} is not a type; the types are {}", KINDS.join(", ")),
        false => error.to_string(),
    };
    Fault { pointer: at, why, suggestion: meant.and_then(|meant| KINDS.into_iter().find(|kind| *kind == meant)) }
}

/// Finds regular expressions that cannot be compiled.
fn unread_patterns(schema: &Value, at: &mut Pointer, found: &mut Vec<Fault>) {
    if at.parts().len() > 64 || found.len() >= MOST_ERRORS {
        return;
    }
    match schema {
        Value::Object(map) => {
            for (key, inner) in map.iter().filter(|(key, _)| !VALUES.contains(&key.as_str())) {
                at.push(key.clone());
                match inner {
                    Value::String(_) if key == "pattern" => {
                        let alone = serde_json::json!({"pattern": inner});
                        if jsonschema::options().with_pattern_options(patterns()).build(&alone).is_err() {
                            let why = format!("cannot compile the regular expression {inner}");
                            found.push(Fault { pointer: at.clone(), why, suggestion: None });
                        }
                    }
                    _ => unread_patterns(inner, at, found),
                }
                at.pop();
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                at.push(index.to_string());
                unread_patterns(item, at, found);
                at.pop();
            }
        }
        _ => {}
    }
}
