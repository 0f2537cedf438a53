//! What a schema says of a path, found without validating anything.

use serde_json::{Map, Value};

use crate::json::Pointer;
use crate::tool::{Extra, Spec};

/// What stands at a path of the arguments.
pub(crate) enum At<'s> {
    /// This schema.
    Known(&'s Value),
    /// Nobody can tell: the schema is open there, or put together from others.
    Open,
    /// Nothing: the schema knows these names, and not that one.
    Missing(String, Vec<String>),
}

/// How many references are followed.
const MAX_REFERENCES: usize = 8;

/// Looks a path up in the arguments of a tool.
pub(crate) fn at<'s>(tool: &'s Spec, path: &Pointer) -> At<'s> {
    let Some(root) = tool.input_schema() else { return At::Open };
    let mut schema = root;
    for part in path.parts() {
        let Some(map) = resolve(schema, root) else { return At::Open };
        let items = part == "*" || part.parse::<usize>().is_ok();
        let next = match map.get("properties").and_then(|p| p.get(part)) {
            Some(property) => Some(property),
            None if items => map.get("items").or_else(|| map.get("additionalProperties")).filter(|schema| schema.is_object()),
            None => None,
        };
        match next {
            Some(next) => schema = next,
            None if items || is_open(map, tool.extra) => return At::Open,
            None => {
                let known = map.get("properties").and_then(Value::as_object).map(|p| p.keys().cloned().collect()).unwrap_or_default();
                return At::Missing(part.clone(), known);
            }
        }
    }
    match resolve(schema, root) {
        Some(_) => At::Known(schema),
        None => At::Open,
    }
}

/// The object behind a schema; `None` where it is put together in ways that are not looked into.
pub(crate) fn resolve<'s>(mut schema: &'s Value, root: &'s Value) -> Option<&'s Map<String, Value>> {
    for _ in 0..MAX_REFERENCES {
        let map = schema.as_object()?;
        let Some(reference) = map.get("$ref").and_then(Value::as_str) else {
            let composed = ["allOf", "anyOf", "oneOf", "if", "$dynamicRef"].iter().any(|word| map.contains_key(*word));
            return (!composed).then_some(map);
        };
        // What stands beside a reference adds to it.
        let alone =
            map.keys().all(|key| matches!(key.as_str(), "$ref" | "description" | "title" | "default" | "writeOnly" | "$schema" | "$defs"));
        if !alone {
            return None;
        }
        schema = reference.strip_prefix('#').and_then(|path| Pointer::from(path).get(root))?;
    }
    None
}

/// Whether members that a schema does not name may stand there.
fn is_open(map: &Map<String, Value>, extra: Extra) -> bool {
    let silent = match extra {
        Extra::Pass => true,
        Extra::Refuse | Extra::Drop => !map.contains_key("properties"),
    };
    map.contains_key("patternProperties") || map.get("additionalProperties").map_or(silent, |more| *more != Value::Bool(false))
}
