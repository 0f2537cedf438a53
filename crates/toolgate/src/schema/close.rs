//! Where a schema names properties and is silent about others, others are refused.
//!
//! A plain object gets `additionalProperties: false`. One that is composed (`allOf`, `anyOf`, `oneOf`,
//! conditions, references with company) gets `unevaluatedProperties: false` around the whole, so that
//! its parts can still add to each other. A bare object stays an open map.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// Sub-schemas that speak about the same object.
const IN_PLACE: &[&str] = &["allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas"];
const DRAFT: &str = "https://json-schema.org/draft/2020-12/schema";
/// Only older drafts understand these.
const OLD_WORDS: &[&str] = &["dependencies", "additionalItems", "$recursiveRef", "$recursiveAnchor", "id"];

/// Closes a schema.
pub(super) fn close(source: &Value) -> Result<Value, String> {
    let mut schema = source.clone();
    let old = schema.get("$schema").and_then(Value::as_str).is_some_and(|s| !s.contains("2020-12"));
    if old && !is_modern(&schema) {
        if is_composed_anywhere(&schema) {
            return Err("a composed schema of an older draft cannot be closed against unknown properties; \
                        move it to draft 2020-12, or say `extra = \"pass\"`"
                .to_owned());
        }
    } else if old && let Some(map) = schema.as_object_mut() {
        map.insert("$schema".to_owned(), DRAFT.into());
    }
    // Definitions that take part in a composition stay open: whoever composes them closes the whole.
    let mut composed = BTreeSet::new();
    collect_composed(&schema, false, &mut composed);
    let root = schema.clone();
    close_at(&mut schema, &root, &composed, true);
    for word in ["$defs", "definitions"] {
        if let Some(Value::Object(defs)) = schema.get_mut(word) {
            for (name, def) in defs.iter_mut() {
                let shared = composed.contains(&format!("#/{word}/{name}"));
                close_at(def, &root, &composed, !shared);
            }
        }
    }
    Ok(schema)
}

fn is_modern(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => {
            !OLD_WORDS.iter().any(|word| map.contains_key(*word) && *word != "id")
                && !map.get("items").is_some_and(Value::is_array)
                && !map.get("exclusiveMinimum").is_some_and(Value::is_boolean)
                && !map.get("exclusiveMaximum").is_some_and(Value::is_boolean)
                && map.values().all(is_modern)
        }
        Value::Array(items) => items.iter().all(is_modern),
        _ => true,
    }
}

fn is_composed_anywhere(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => IN_PLACE.iter().any(|word| map.contains_key(*word)) || map.values().any(is_composed_anywhere),
        Value::Array(items) => items.iter().any(is_composed_anywhere),
        _ => false,
    }
}

/// Which definitions are referred to from inside a composition, or beside properties of the referrer.
fn collect_composed(schema: &Value, inside: bool, composed: &mut BTreeSet<String>) {
    match schema {
        Value::Object(map) => {
            if let Some(target) = map.get("$ref").and_then(Value::as_str)
                && (inside || map.contains_key("properties") || IN_PLACE.iter().any(|word| map.contains_key(*word)))
            {
                composed.insert(target.to_owned());
            }
            for (key, item) in map {
                let in_place = IN_PLACE.contains(&key.as_str()) || key == "not";
                // `properties` and the like speak of other values; arrays of sub-schemas stay in place.
                collect_composed(item, in_place || (inside && schema_list(key)), composed);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect_composed(item, inside, composed)),
        _ => {}
    }
}

fn schema_list(key: &str) -> bool {
    IN_PLACE.contains(&key)
}

/// Closes one schema that speaks of one value, and those of the values inside it.
fn close_at(schema: &mut Value, root: &Value, composed: &BTreeSet<String>, close_this: bool) {
    let names_properties = names_properties(schema, root, &mut BTreeSet::new());
    let Some(map) = schema.as_object_mut() else { return };
    let silent = !map.contains_key("additionalProperties") && !map.contains_key("unevaluatedProperties");
    if close_this && silent && names_properties {
        let is_composed = IN_PLACE.iter().any(|word| map.contains_key(*word));
        let refers = map.get("$ref").and_then(Value::as_str).map(|target| composed.contains(target));
        match (is_composed, refers, map.contains_key("properties")) {
            (true, ..) | (_, Some(true), _) | (_, Some(_), true) => map.insert("unevaluatedProperties".to_owned(), json!(false)),
            // The definition closes itself.
            (false, Some(false), false) => None,
            (false, None, _) => map.insert("additionalProperties".to_owned(), json!(false)),
        };
    }
    close_inside(map, root, composed);
}

fn close_inside(map: &mut Map<String, Value>, root: &Value, composed: &BTreeSet<String>) {
    for word in ["properties", "patternProperties"] {
        if let Some(Value::Object(members)) = map.get_mut(word) {
            members.values_mut().for_each(|member| close_at(member, root, composed, true));
        }
    }
    for word in ["items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"] {
        if let Some(inner) = map.get_mut(word) {
            close_at(inner, root, composed, true);
        }
    }
    if let Some(Value::Array(items)) = map.get_mut("prefixItems") {
        items.iter_mut().for_each(|item| close_at(item, root, composed, true));
    }
    // The parts of a composition stay open themselves; what is inside them is closed. Conditions and
    // negations are left alone: closing them would change what they mean.
    for word in ["allOf", "anyOf", "oneOf"] {
        if let Some(Value::Array(parts)) = map.get_mut(word) {
            parts.iter_mut().for_each(|part| close_at(part, root, composed, false));
        }
    }
    for word in ["then", "else"] {
        if let Some(part) = map.get_mut(word) {
            close_at(part, root, composed, false);
        }
    }
    if let Some(Value::Object(parts)) = map.get_mut("dependentSchemas") {
        parts.values_mut().for_each(|part| close_at(part, root, composed, false));
    }
}

/// Whether a schema, or one it is composed of, names properties.
fn names_properties(schema: &Value, root: &Value, seen: &mut BTreeSet<String>) -> bool {
    let Some(map) = schema.as_object() else { return false };
    if map.contains_key("properties") {
        return true;
    }
    if let Some(target) = map.get("$ref").and_then(Value::as_str)
        && seen.insert(target.to_owned())
        && let Some(referred) = target.strip_prefix('#').and_then(|pointer| root.pointer(pointer))
        && names_properties(referred, root, seen)
    {
        return true;
    }
    IN_PLACE.iter().filter_map(|word| map.get(*word)).any(|part| match part {
        Value::Array(parts) => parts.iter().any(|part| names_properties(part, root, seen)),
        Value::Object(_) => names_properties(part, root, seen),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_closed_and_speech_is_kept() {
        let cases = [
            (json!({"type": "object"}), json!({"type": "object"})),
            (json!({"properties": {"a": {}}}), json!({"properties": {"a": {}}, "additionalProperties": false})),
            (
                json!({"properties": {"a": {}}, "additionalProperties": true}),
                json!({"properties": {"a": {}}, "additionalProperties": true}),
            ),
            (
                json!({"properties": {"a": {"properties": {"b": {}}}}}),
                json!({"properties": {"a": {"properties": {"b": {}}, "additionalProperties": false}}, "additionalProperties": false}),
            ),
            (
                json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}),
                json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "unevaluatedProperties": false}),
            ),
            (
                json!({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"x": {}}}}}),
                json!({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"x": {}}, "additionalProperties": false}}}),
            ),
            (
                json!({"allOf": [{"$ref": "#/$defs/A"}], "properties": {"y": {}}, "$defs": {"A": {"properties": {"x": {}}}}}),
                json!({"allOf": [{"$ref": "#/$defs/A"}], "properties": {"y": {}}, "unevaluatedProperties": false, "$defs": {"A": {"properties": {"x": {}}}}}),
            ),
        ];
        for (open, closed) in cases {
            assert_eq!(close(&open), Ok(closed), "{open}");
        }
    }

    #[test]
    fn older_drafts_are_moved_or_refused() {
        let draft7 = "http://json-schema.org/draft-07/schema#";
        let moved = close(&json!({"$schema": draft7, "properties": {"a": {}}}));
        assert_eq!(moved, Ok(json!({"$schema": DRAFT, "properties": {"a": {}}, "additionalProperties": false})));
        assert!(close(&json!({"$schema": draft7, "anyOf": [{"properties": {"a": {}}}], "dependencies": {}})).is_err());
    }
}
