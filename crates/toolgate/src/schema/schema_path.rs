//! Looks up the schema for a path without validating a document.

use serde_json::{Map, Value};

use crate::tool::{ExtraArguments, ToolSpec};
use toolgate_json::Pointer;

/// States which schema applies at a path.
pub enum SchemaLookup<'s> {
    /// This schema applies.
    Known(&'s Value),
    /// The schema is not known, because it is open or composed there.
    Open,
    /// The schema does not declare this name, but these names.
    Missing(String, Vec<String>),
}

/// Maximum number of references that are followed.
const MAX_REFERENCES: usize = 8;

/// Looks up a path in the input schema of a tool.
pub fn lookup_input<'s>(tool: &'s ToolSpec, path: &Pointer) -> SchemaLookup<'s> {
    tool.input_schema().map_or(SchemaLookup::Open, |root| lookup_schema(root, tool.extra, path))
}

/// Looks up a path in a schema.
pub fn lookup_schema<'s>(
    root: &'s Value,
    extra: ExtraArguments,
    path: &Pointer,
) -> SchemaLookup<'s> {
    let mut schema = root;
    for part in path.parts() {
        let Some(map) = resolve_object(schema, root) else { return SchemaLookup::Open };
        let any = part == "*";
        let index = any || part.parse::<usize>().is_ok();
        // Scalars have no members, and arrays have no names.
        if !(can_have_type(map, "object") || index && can_have_type(map, "array")) {
            return SchemaLookup::Missing(part.clone(), Vec::new());
        }
        let within = |word: &str| map.get(word).filter(|schema| schema.is_object());
        let next = match map.get("properties").and_then(|p| p.get(part)) {
            Some(property) => Some(property),
            // Other keywords may describe the first items, and members whose names match a pattern.
            None if index && map.contains_key("prefixItems") => return SchemaLookup::Open,
            None if index && map.contains_key("items") => within("items"),
            None if any || map.contains_key("patternProperties") => return SchemaLookup::Open,
            None => within("additionalProperties"),
        };
        match next {
            Some(next) => schema = next,
            None if any || (index && !map.contains_key("properties")) || is_open(map, extra) => {
                return SchemaLookup::Open;
            }
            None => {
                let known = map
                    .get("properties")
                    .and_then(Value::as_object)
                    .map(|p| p.keys().cloned().collect())
                    .unwrap_or_default();
                return SchemaLookup::Missing(part.clone(), known);
            }
        }
    }
    match resolve_object(schema, root) {
        Some(_) => SchemaLookup::Known(schema),
        None => SchemaLookup::Open,
    }
}

/// Returns the object behind a schema, or `None` if it is composed in an unsupported way.
pub fn resolve_object<'s>(
    mut schema: &'s Value,
    root: &'s Value,
) -> Option<&'s Map<String, Value>> {
    for _ in 0..MAX_REFERENCES {
        let map = schema.as_object()?;
        let Some(reference) = map.get("$ref").and_then(Value::as_str) else {
            let composed = ["allOf", "anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef"]
                .iter()
                .any(|word| map.contains_key(*word));
            let has_other = map
                .get("unevaluatedProperties")
                .is_some_and(|unevaluated| *unevaluated != Value::Bool(false));
            return (!composed && !has_other).then_some(map);
        };
        // Other keywords beside a reference add to it.
        let has_no_other_keywords = map.keys().all(|key| {
            matches!(
                key.as_str(),
                "$ref" | "description" | "title" | "default" | "writeOnly" | "$schema" | "$defs"
            )
        });
        if !has_no_other_keywords {
            return None;
        }
        schema = reference.strip_prefix('#').and_then(|path| Pointer::from(path).get(root))?;
    }
    None
}

/// Returns whether a schema allows values of a type.
pub fn can_have_type(map: &Map<String, Value>, kind: &str) -> bool {
    match map.get("type") {
        Some(Value::String(declared)) => declared == kind,
        Some(Value::Array(declared)) => declared.iter().any(|declared| declared == kind),
        _ => true,
    }
}

/// Returns whether a schema allows members that it does not declare.
fn is_open(map: &Map<String, Value>, extra: ExtraArguments) -> bool {
    let default = match extra {
        ExtraArguments::Pass => true,
        ExtraArguments::Refuse | ExtraArguments::Drop => !map.contains_key("properties"),
    };
    map.contains_key("patternProperties")
        || map
            .get("additionalProperties")
            .map_or(default, |additional| *additional != Value::Bool(false))
}

/// Maximum number of schemas that are searched for a declaration.
const MAX_SEARCHED_SCHEMAS: usize = 500;

/// Returns whether any schema for the value at `place` declares a member of this name.
///
/// All branches and references are searched.
pub fn has_declared_member(tool: &ToolSpec, place: &Pointer, name: &str) -> bool {
    let Some(root) = tool.input_schema() else { return false };
    let mut left = MAX_SEARCHED_SCHEMAS;
    let mut level = vec![root];
    for part in place.parts() {
        let mut next = Vec::new();
        for schema in level {
            visit_branches(schema, root, &mut left, &mut |map| {
                let property = map.get("properties").and_then(|p| p.get(part));
                let inside = ["items", "additionalProperties"]
                    .into_iter()
                    .filter_map(|word| map.get(word))
                    .filter(|schema| schema.is_object());
                next.extend(property.into_iter().chain(inside.filter(|_| property.is_none())));
            });
        }
        level = next;
    }
    let mut found = false;
    for schema in level {
        visit_branches(schema, root, &mut left, &mut |map| {
            found |= map.get("properties").and_then(|p| p.get(name)).is_some()
        });
    }
    found
}

fn visit_branches<'s>(
    schema: &'s Value,
    root: &'s Value,
    left: &mut usize,
    f: &mut dyn FnMut(&'s Map<String, Value>),
) {
    let Some(map) = schema.as_object().filter(|_| *left > 0) else { return };
    *left -= 1;
    f(map);
    let referred = map
        .get("$ref")
        .and_then(Value::as_str)
        .and_then(|r| r.strip_prefix('#'))
        .and_then(|path| Pointer::from(path).get(root));
    let branches = ["anyOf", "oneOf", "allOf"]
        .into_iter()
        .filter_map(|word| map.get(word).and_then(Value::as_array))
        .flatten();
    let conditional = ["if", "then", "else"].into_iter().filter_map(|word| map.get(word));
    let dependent =
        map.get("dependentSchemas").and_then(Value::as_object).into_iter().flat_map(Map::values);
    for branch in referred.into_iter().chain(branches).chain(conditional).chain(dependent) {
        visit_branches(branch, root, left, f);
    }
}
