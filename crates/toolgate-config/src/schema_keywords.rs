//! Finds misspelled keywords in JSON Schemas, which validators ignore silently.

use serde_json::{Map, Value};

use toolgate_text::escape_for_display;
use toolgate_text::suggest::find_closest;

/// Keywords that contain no schemas.
const NON_SCHEMA_KEYWORDS: [&str; 30] = [
    "type",
    "enum",
    "const",
    "multipleOf",
    "maximum",
    "exclusiveMaximum",
    "minimum",
    "exclusiveMinimum",
    "maxLength",
    "minLength",
    "pattern",
    "maxItems",
    "minItems",
    "uniqueItems",
    "maxContains",
    "minContains",
    "maxProperties",
    "minProperties",
    "required",
    "dependentRequired",
    "title",
    "description",
    "default",
    "deprecated",
    "readOnly",
    "writeOnly",
    "examples",
    "format",
    "contentEncoding",
    "contentMediaType",
];
/// Keywords whose schemas apply to the same value.
const SAME_VALUE_KEYWORDS: [&str; 7] = ["allOf", "anyOf", "oneOf", "not", "if", "then", "else"];
const CHILD_VALUE_KEYWORDS: [&str; 9] = [
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "contentSchema",
];
/// Keywords that map names to schemas. The last two apply to the same value as their schema.
const SCHEMA_MAP_KEYWORDS: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];

/// Returns the problems of a schema, each with a help text.
pub(crate) fn find_misspelled_keywords(schema: &Value) -> Vec<(String, String)> {
    let mut found = Vec::new();
    check_schema(schema, "", true, &mut found);
    found
}

/// Checks a schema and all schemas inside it.
///
/// If `whole` is false, the schema is part of another one and may require properties that the other
/// one declares.
fn check_schema(schema: &Value, at: &str, is_whole: bool, found: &mut Vec<(String, String)>) {
    let Value::Object(members) = schema else { return };
    if is_whole {
        check_required(members, at, found);
    }
    for (key, value) in members {
        let place = format!("{at}/{key}");
        let name = key.as_str();
        if SCHEMA_MAP_KEYWORDS.contains(&name) {
            let is_whole = !matches!(name, "dependentSchemas" | "dependencies");
            for (part, inner) in value.as_object().into_iter().flatten() {
                check_schema(inner, &format!("{place}/{part}"), is_whole, found);
            }
        } else if SAME_VALUE_KEYWORDS.contains(&name) || CHILD_VALUE_KEYWORDS.contains(&name) {
            let is_whole = CHILD_VALUE_KEYWORDS.contains(&name);
            check_schema(value, &place, is_whole, found);
            for (index, inner) in value.as_array().into_iter().flatten().enumerate() {
                check_schema(inner, &format!("{place}/{index}"), is_whole, found);
            }
        } else if !NON_SCHEMA_KEYWORDS.contains(&name)
            && !name.starts_with('$')
            && !name.starts_with("x-")
        {
            let known = NON_SCHEMA_KEYWORDS
                .into_iter()
                .chain(SAME_VALUE_KEYWORDS)
                .chain(CHILD_VALUE_KEYWORDS)
                .chain(SCHEMA_MAP_KEYWORDS);
            let help = find_closest(name, known).map_or_else(
                || "remove it, or prefix its name with `x-`".to_owned(),
                |guess| format!("did you mean `{guess}`?"),
            );
            found.push((
                format!(
                    "has `{}`{}, which is not a JSON Schema keyword",
                    escape_for_display(name),
                    location_suffix(at)
                ),
                help,
            ));
        }
    }
}

/// Finds required properties that are not declared.
fn check_required(members: &Map<String, Value>, at: &str, found: &mut Vec<(String, String)>) {
    let (Some(properties), Some(required)) = (
        members.get("properties").and_then(Value::as_object),
        members.get("required").and_then(Value::as_array),
    ) else {
        return;
    };
    // Properties may be declared elsewhere, or additional ones may be allowed.
    let is_open = members
        .get("additionalProperties")
        .is_some_and(|additional| *additional != Value::Bool(false));
    if is_open
        || members.keys().any(|key| {
            SAME_VALUE_KEYWORDS.contains(&key.as_str())
                || ["$ref", "patternProperties"].contains(&key.as_str())
        })
    {
        return;
    }
    for name in
        required.iter().filter_map(Value::as_str).filter(|name| !properties.contains_key(*name))
    {
        let help = find_closest(name, properties.keys().map(String::as_str)).map_or_else(
            || "declare it in `properties`".to_owned(),
            |guess| format!("did you mean `{guess}`?"),
        );
        found.push((
            format!(
                "requires `{}`{}, which is not declared in its properties",
                escape_for_display(name),
                location_suffix(at)
            ),
            help,
        ));
    }
}

fn location_suffix(at: &str) -> String {
    if at.is_empty() { String::new() } else { format!(" in `{}`", escape_for_display(at)) }
}
