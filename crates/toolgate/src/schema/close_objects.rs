//! Closes schemas: if a schema declares properties and allows no others, others are refused.
//!
//! Every schema of a value is closed: the document, a property, an item. A plain object gets
//! `additionalProperties: false`. A composed object, or one with a reference, gets
//! `unevaluatedProperties: false` around the whole, so that its parts can add to each other.
//! Definitions and parts of a composition are not closed themselves. An object without properties
//! stays open.
//!
//! Several parts may describe the same value. Then only the first part that always applies is
//! closed. If each part were closed, each would refuse the properties that only the other declares.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// Keywords with subschemas for the same value.
const IN_PLACE_APPLICATORS: &[&str] =
    &["allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas"];
/// Keywords that refer to another schema for the same value.
const REFERENCE_KEYWORDS: &[&str] = &["$ref", "$dynamicRef"];
const DRAFT_2020_12_URI: &str = "https://json-schema.org/draft/2020-12/schema";
/// Keywords that only older drafts support.
const LEGACY_KEYWORDS: &[&str] =
    &["dependencies", "additionalItems", "$recursiveRef", "$recursiveAnchor"];

/// Closes a schema.
pub(crate) fn close_schema(source: &Value) -> Result<Value, String> {
    let mut schema = source.clone();
    let old = schema.get("$schema").and_then(Value::as_str).is_some_and(|s| !s.contains("2020-12"));
    if old && !has_no_legacy_keywords(&schema) {
        if is_composed_anywhere(&schema) {
            return Err(
                "cannot close a composed schema of an older draft against unknown properties; \
                        convert it to draft 2020-12, or set `extra = \"pass\"`"
                    .to_owned(),
            );
        }
    } else if old && let Some(map) = schema.as_object_mut() {
        map.insert("$schema".to_owned(), DRAFT_2020_12_URI.into());
    }
    let root = schema.clone();
    let mut wrong = None;
    close_value(&mut schema, &root, &mut wrong);
    // Referenced schemas may be anywhere, and the values inside of them are closed too.
    let mut references = BTreeSet::new();
    visit_references(&root, false, &mut |target, _| {
        references.insert(target.to_owned());
    });
    for target in &references {
        if let Some(part) = target.strip_prefix('#').and_then(|pointer| schema.pointer_mut(pointer))
        {
            close_inside(part, &root, &[], &mut wrong);
        }
    }
    // A closed schema must not be a part of a composition that adds properties.
    visit_references(&root, false, &mut |target, can_add| {
        let pointer = target.strip_prefix('#').unwrap_or_default();
        let closed_here = |word: &str| {
            schema.pointer(pointer).is_some_and(|s| s.get(word).is_some())
                && root.pointer(pointer).is_some_and(|s| s.get(word).is_none())
        };
        if can_add
            && target.starts_with('#')
            && (closed_here("additionalProperties") || closed_here("unevaluatedProperties"))
        {
            wrong = Some(format!(
                "`{target}` is both the schema of a value and a part of another schema; move it to `$defs`, or set `extra = \"pass\"`"
            ));
        }
    });
    wrong.map_or(Ok(schema), Err)
}

/// Returns whether choices (`anyOf`, `oneOf`) are nested too deeply or recursively through
/// references.
pub(crate) fn has_excessive_choices(schema: &Value) -> bool {
    fn has_deep_choices(
        schema: &Value,
        root: &Value,
        choices: usize,
        inside: &mut Vec<String>,
        visited: &mut usize,
    ) -> bool {
        *visited += 1;
        if choices > 2 || *visited > 10_000 {
            return true;
        }
        match schema {
            Value::Object(map) => {
                if let Some(target) = map.get("$ref").and_then(Value::as_str) {
                    // The schema is recursive. With a choice inside, the number of errors has no
                    // limit.
                    if inside.iter().any(|seen| seen == target) {
                        return choices > 0;
                    }
                    if let Some(referred) =
                        target.strip_prefix('#').and_then(|pointer| root.pointer(pointer))
                    {
                        inside.push(target.to_owned());
                        let found = has_deep_choices(referred, root, choices, inside, visited);
                        inside.pop();
                        if found {
                            return true;
                        }
                    }
                }
                map.iter()
                    .filter(|(word, _)| {
                        !matches!(
                            word.as_str(),
                            "$defs" | "definitions" | "enum" | "const" | "examples" | "default"
                        )
                    })
                    .any(|(word, part)| {
                        let choice = usize::from(matches!(word.as_str(), "anyOf" | "oneOf"));
                        has_deep_choices(part, root, choices + choice, inside, visited)
                    })
            }
            Value::Array(items) => {
                items.iter().any(|item| has_deep_choices(item, root, choices, inside, visited))
            }
            _ => false,
        }
    }
    has_deep_choices(schema, schema, 0, &mut vec!["#".to_owned()], &mut 0)
}

/// Calls `f` with each reference and whether others may add properties to its target.
fn visit_references(schema: &Value, can_add: bool, f: &mut impl FnMut(&str, bool)) {
    match schema {
        Value::Object(map) => {
            let company =
                ["properties", "patternProperties", "allOf", "dependentSchemas", "then", "else"]
                    .iter()
                    .any(|word| map.contains_key(*word));
            for word in REFERENCE_KEYWORDS {
                if let Some(target) = map.get(*word).and_then(Value::as_str) {
                    f(target, can_add || company);
                }
            }
            for (key, item) in map {
                match (key.as_str(), item) {
                    ("allOf" | "if" | "then" | "else", item) => visit_references(item, true, f),
                    ("anyOf" | "oneOf", item) => visit_references(item, can_add || company, f),
                    ("dependentSchemas", Value::Object(parts)) => {
                        parts.values().for_each(|part| visit_references(part, true, f))
                    }
                    (_, item) => visit_references(item, false, f),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| visit_references(item, can_add, f)),
        _ => {}
    }
}

fn has_no_legacy_keywords(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => {
            !LEGACY_KEYWORDS.iter().any(|word| map.contains_key(*word))
                && !map.get("items").is_some_and(Value::is_array)
                && !map.get("exclusiveMinimum").is_some_and(Value::is_boolean)
                && !map.get("exclusiveMaximum").is_some_and(Value::is_boolean)
                && map.values().all(has_no_legacy_keywords)
        }
        Value::Array(items) => items.iter().all(has_no_legacy_keywords),
        _ => true,
    }
}

fn is_composed_anywhere(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => {
            IN_PLACE_APPLICATORS
                .iter()
                .chain(REFERENCE_KEYWORDS)
                .any(|word| map.contains_key(*word))
                || map.values().any(is_composed_anywhere)
        }
        Value::Array(items) => items.iter().any(is_composed_anywhere),
        _ => false,
    }
}

/// Closes the schema of a value and the schemas of the values inside.
fn close_value(schema: &mut Value, root: &Value, wrong: &mut Option<String>) {
    let names_properties = has_declared_properties(schema, root, &mut BTreeSet::new());
    if let Some(map) = schema.as_object_mut()
        && is_open_by_default(map)
        && names_properties
    {
        let word = if is_composed(map) { "unevaluatedProperties" } else { "additionalProperties" };
        map.insert(word.to_owned(), json!(false));
    }
    close_inside(schema, root, &[], wrong);
}

fn is_open_by_default(map: &Map<String, Value>) -> bool {
    !map.contains_key("additionalProperties") && !map.contains_key("unevaluatedProperties")
}

/// Returns whether a schema is composed of others.
fn is_composed(map: &Map<String, Value>) -> bool {
    IN_PLACE_APPLICATORS.iter().chain(REFERENCE_KEYWORDS).any(|word| map.contains_key(*word))
}

/// Closes the schemas of the values inside of a schema, but not the schema itself.
///
/// `others` apply to the same value whenever the schema does.
fn close_inside(schema: &mut Value, root: &Value, others: &[&Value], wrong: &mut Option<String>) {
    let before =
        if schema.as_object().is_some_and(is_composed) { schema.clone() } else { Value::Null };
    let mut known = others.to_vec();
    known.push(&before);
    let Some(map) = schema.as_object_mut() else { return };
    if let Some(Value::Object(members)) = map.get_mut("properties") {
        for (name, member) in members {
            let declared = others.iter().filter_map(|other| other.get("properties")?.get(name));
            close_member(member, root, &property_schemas(declared, root), wrong);
        }
    }
    for word in ["patternProperties", "prefixItems"] {
        subschemas_of(map, word).into_iter().for_each(|member| close_value(member, root, wrong));
    }
    if let Some(items) = map.get_mut("items") {
        // With `prefixItems`, `items` only applies to the other items.
        let declared = others
            .iter()
            .filter(|other| other.get("prefixItems").is_none())
            .filter_map(|other| other.get("items"));
        close_member(items, root, &property_schemas(declared, root), wrong);
    }
    for word in ["additionalProperties", "unevaluatedProperties", "unevaluatedItems"] {
        if let Some(inner) = map.get_mut(word) {
            close_value(inner, root, wrong);
        }
    }
    // Closing a condition or a negation would change its meaning.
    for (at, part) in subschemas_of(map, "allOf").into_iter().enumerate() {
        close_inside(part, root, &known, wrong);
        known.extend(before.get("allOf").and_then(|parts| parts.get(at)));
    }
    // A part that applies only sometimes may still allow other calls, so a conflict is not an error
    // here.
    let mut ignored = None;
    for word in ["anyOf", "oneOf", "dependentSchemas"] {
        subschemas_of(map, word)
            .into_iter()
            .for_each(|part| close_inside(part, root, &known, &mut ignored));
    }
    for word in ["then", "else"] {
        if let Some(part) = map.get_mut(word) {
            close_inside(part, root, &known, &mut ignored);
        }
    }
    for word in ["$defs", "definitions"] {
        subschemas_of(map, word).into_iter().for_each(|part| close_inside(part, root, &[], wrong));
    }
}

/// Returns the subschemas of a keyword.
fn subschemas_of<'m>(map: &'m mut Map<String, Value>, word: &str) -> Vec<&'m mut Value> {
    match map.get_mut(word) {
        Some(Value::Object(members)) => members.values_mut().collect(),
        Some(Value::Array(items)) => items.iter_mut().collect(),
        _ => Vec::new(),
    }
}

/// Returns the schemas that declare properties or state which others are allowed.
fn property_schemas<'s>(schemas: impl Iterator<Item = &'s Value>, root: &Value) -> Vec<&'s Value> {
    let restricts = |schema: &&Value| {
        schema.as_object().is_some_and(|map| !is_open_by_default(map))
            || has_declared_properties(schema, root, &mut BTreeSet::new())
    };
    schemas.filter(restricts).collect()
}

/// Closes the schema of a member, except for the part that others close.
fn close_member(member: &mut Value, root: &Value, others: &[&Value], wrong: &mut Option<String>) {
    if others.is_empty() {
        return close_value(member, root, wrong);
    }
    // A closed plain object refuses properties that another part adds.
    let plain = others.iter().filter_map(|other| other.as_object());
    let plain = plain.filter(|map| {
        is_open_by_default(map) && !is_composed(map) && !map.contains_key("patternProperties")
    });
    let declares = |map: &Map<String, Value>, name: &str| {
        map.get("properties").is_some_and(|properties| properties.get(name).is_some())
    };
    for other in plain {
        // A part that forbids a property does not add the property.
        let named = member.get("properties").and_then(Value::as_object).into_iter().flatten();
        let mut names =
            named.filter(|(_, schema)| **schema != Value::Bool(false)).map(|(name, _)| name);
        if let Some(name) = names.find(|name| !declares(other, name)) {
            *wrong = Some(format!(
                "`{}` is added by a part of the schema to an object that does not declare it; declare it there too, \
                 or set `extra = \"pass\"`",
                toolgate_text::escape_for_display(name)
            ));
        }
    }
    close_inside(member, root, others, wrong);
}

/// Returns whether a schema, or a part of its composition, declares properties.
fn has_declared_properties(schema: &Value, root: &Value, seen: &mut BTreeSet<String>) -> bool {
    let Some(map) = schema.as_object() else { return false };
    if map.contains_key("properties") {
        return true;
    }
    for target in
        REFERENCE_KEYWORDS.iter().filter_map(|word| map.get(*word)).filter_map(Value::as_str)
    {
        if !seen.insert(target.to_owned()) {
            continue;
        }
        match target.strip_prefix('#').and_then(|pointer| root.pointer(pointer)) {
            Some(referred) if !has_declared_properties(referred, root, seen) => {}
            // The reference is not a path, so the target is not known. Close the schema.
            _ => return true,
        }
    }
    IN_PLACE_APPLICATORS.iter().filter_map(|word| map.get(*word)).any(|part| match part {
        Value::Array(parts) => parts.iter().any(|part| has_declared_properties(part, root, seen)),
        Value::Object(parts) if is_schema_map(map, part) => {
            parts.values().any(|part| has_declared_properties(part, root, seen))
        }
        Value::Object(_) => has_declared_properties(part, root, seen),
        _ => false,
    })
}

/// Returns whether a part is a map of schemas instead of a schema.
fn is_schema_map(map: &Map<String, Value>, part: &Value) -> bool {
    map.get("dependentSchemas").is_some_and(|schemas| std::ptr::eq(schemas, part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_schemas_without_their_own_rule_are_closed() {
        let cases = [
            (json!({"type": "object"}), json!({"type": "object"})),
            (
                json!({"properties": {"a": {}}}),
                json!({"properties": {"a": {}}, "additionalProperties": false}),
            ),
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
                json!({"$ref": "#/$defs/A", "unevaluatedProperties": false, "$defs": {"A": {"properties": {"x": {}}}}}),
            ),
            (
                json!({"allOf": [{"$ref": "#/$defs/A"}], "properties": {"y": {}}, "$defs": {"A": {"properties": {"x": {}}}}}),
                json!({"allOf": [{"$ref": "#/$defs/A"}], "properties": {"y": {}}, "unevaluatedProperties": false, "$defs": {"A": {"properties": {"x": {}}}}}),
            ),
        ];
        for (open, closed) in cases.into_iter().chain([
            // A definition at another place, and one inside another.
            (
                json!({"items": {"$ref": "#/components/X"}, "components": {"X": {"properties": {"a": {"properties": {"b": {}}}}}}}),
                json!({"items": {"$ref": "#/components/X", "unevaluatedProperties": false}, "components": {"X": {"properties": {"a": {"properties": {"b": {}}, "additionalProperties": false}}}}}),
            ),
            (
                json!({"dependentSchemas": {"card": {"$ref": "#/$defs/B"}}, "properties": {"card": {}}, "$defs": {"B": {"properties": {"street": {}}}}}),
                json!({"dependentSchemas": {"card": {"$ref": "#/$defs/B"}}, "properties": {"card": {}}, "unevaluatedProperties": false, "$defs": {"B": {"properties": {"street": {}}}}}),
            ),
            // A recursive type.
            (
                json!({"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}),
                json!({"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}], "unevaluatedProperties": false}}, "additionalProperties": false}),
            ),
            (json!({"$ref": "#named"}), json!({"$ref": "#named", "unevaluatedProperties": false})),
        ]) {
            assert_eq!(close_schema(&open), Ok(closed), "{open}");
        }
    }

    #[test]
    fn parts_described_twice_are_closed_once() {
        let base = json!({"kind": {}, "card": {"properties": {"no": {}}}, "iban": {}});
        let schema = json!({
            "properties": {"pay": {"properties": base}},
            "if": {"properties": {"pay": {"properties": {"kind": {"const": "card"}}}}},
            "then": {"properties": {"pay": {"properties": {"card": {"properties": {"no": {}}}, "iban": {"properties": {"x": {}}}}, "required": ["card"]}}},
            "allOf": [{"properties": {"to": {"properties": {"a": {}, "b": {}}}}}, {"properties": {"to": {"properties": {"a": {}}}}}],
            "oneOf": [{"properties": {"by": {"properties": {"a": {}}}}}, {"properties": {"by": {"properties": {"b": {}}}}}],
        });
        let closed = close_schema(&schema).unwrap();
        let is_closed = |place: &str| {
            closed.pointer(place).unwrap().get("additionalProperties") == Some(&json!(false))
        };
        // A value that is described once is closed in that place.
        for place in [
            "/properties/pay",
            "/properties/pay/properties/card",
            "/then/properties/pay/properties/iban",
            "/allOf/0/properties/to",
            "/oneOf/0/properties/by",
            "/oneOf/1/properties/by",
        ] {
            assert!(is_closed(place), "{place}: {closed}");
        }
        for place in [
            "/then/properties/pay",
            "/then/properties/pay/properties/card",
            "/allOf/1/properties/to",
        ] {
            assert!(!is_closed(place), "{place}: {closed}");
        }
        let validator = jsonschema::validator_for(&closed).unwrap();
        for (value, is_valid) in [
            (json!({"pay": {"kind": "card", "card": {"no": 1}}, "by": {"a": 1}}), true),
            (
                json!({"pay": {"kind": "card", "card": {"no": 1, "extra": 1}}, "by": {"a": 1}}),
                false,
            ),
            (
                json!({"pay": {"kind": "card", "card": {"no": 1}, "extra": 1}, "by": {"a": 1}}),
                false,
            ),
            (
                json!({"pay": {"kind": "card", "card": {}, "iban": {"extra": 1}}, "by": {"a": 1}}),
                false,
            ),
            (
                json!({"pay": {"kind": "iban", "iban": 1}, "to": {"a": 1, "b": 1}, "by": {"b": 1}}),
                true,
            ),
            (json!({"pay": {"kind": "iban"}, "to": {"c": 1}, "by": {"b": 1}}), false),
        ] {
            assert_eq!(validator.is_valid(&value), is_valid, "{value}");
        }
        // A property that a part adds to a closed object could never be passed. A part that applies
        // only sometimes allows other calls, and a forbidden property is not added.
        let part = |card: Value| json!({"properties": {"pay": {"properties": {"card": card}}}});
        let pay = json!({"pay": {"properties": {"kind": {}}}});
        let added = json!({"properties": pay, "allOf": [part(json!({}))]});
        assert!(close_schema(&added).is_err_and(|e| e.contains("`card` is added by a part")));
        for conditional in [
            json!({"properties": pay, "if": {}, "then": part(json!({}))}),
            json!({"properties": pay, "oneOf": [part(json!({})), {"required": ["b"]}]}),
            json!({"properties": pay, "allOf": [part(json!(false))]}),
        ] {
            let closed = close_schema(&conditional).unwrap();
            let validator = jsonschema::validator_for(&closed).unwrap();
            assert!(!validator.is_valid(&json!({"pay": {"kind": 1, "extra": 1}})), "{closed}");
        }
        let open = json!({"properties": {"pay": {"type": "object"}}, "then": {"properties": {"pay": {"properties": {"card": {}}}}}});
        assert_eq!(
            close_schema(&open).unwrap().pointer("/then/properties/pay/additionalProperties"),
            Some(&json!(false))
        );
    }

    #[test]
    fn schemas_that_cannot_be_closed_are_refused() {
        let both = json!({"properties": {"a": {"properties": {"x": {}}}, "b": {"allOf": [{"$ref": "#/properties/a"}, {"properties": {"y": {}}}]}}});
        assert!(
            close_schema(&both)
                .is_err_and(|e| e.contains("`#/properties/a` is both the schema of a value"))
        );
    }

    #[test]
    fn older_drafts_are_moved_or_refused() {
        let draft7 = "http://json-schema.org/draft-07/schema#";
        let moved = close_schema(&json!({"$schema": draft7, "properties": {"a": {}}}));
        assert_eq!(
            moved,
            Ok(
                json!({"$schema": DRAFT_2020_12_URI, "properties": {"a": {}}, "additionalProperties": false})
            )
        );
        assert!(close_schema(&json!({"$schema": draft7, "anyOf": [{"properties": {"a": {}}}], "dependencies": {}})).is_err());
        assert!(
            close_schema(
                &json!({"$schema": draft7, "$ref": "#/definitions/a", "definitions": {"a": {"properties": {"b": {}}}}, "dependencies": {}})
            )
            .is_err()
        );
    }
}
