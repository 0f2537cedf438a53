//! Finds the places that a schema marks as `writeOnly`.

use serde_json::Value;
use toolgate_json::Pointer;

/// Maximum number of places in a schema that are visited.
const MAX_VISITED_PLACES: usize = 20_000;

/// Returns the places that a schema marks as `writeOnly`.
///
/// # Errors
/// Returns an error if the schema has too many references to find all places.
pub(crate) fn find_write_only(schema: &Value) -> Result<Vec<Pointer>, String> {
    let mut walk = WriteOnlySearch {
        root: schema,
        at: Pointer::default(),
        pointers: Vec::new(),
        followed_references: Vec::new(),
        visited_places: 0,
    };
    walk.visit_schema(schema);
    if walk.visited_places > MAX_VISITED_PLACES {
        return Err("it has too many nested references to find all `writeOnly` fields".to_owned());
    }
    Ok(walk.pointers)
}

struct WriteOnlySearch<'s> {
    root: &'s Value,
    at: Pointer,
    pointers: Vec<Pointer>,
    /// The references that lead to the current schema.
    followed_references: Vec<&'s str>,
    visited_places: usize,
}

impl<'s> WriteOnlySearch<'s> {
    fn visit_schema(&mut self, schema: &'s Value) {
        self.visited_places += 1;
        let Some(map) = schema.as_object() else { return };
        if self.visited_places > MAX_VISITED_PLACES {
            return;
        }
        if map.get("writeOnly") == Some(&Value::Bool(true)) {
            self.pointers.push(self.at.clone());
        }
        for target in ["$ref", "$dynamicRef"]
            .iter()
            .filter_map(|word| map.get(*word))
            .filter_map(Value::as_str)
        {
            self.follow_reference(target);
        }
        for (word, part) in map {
            match (word.as_str(), part) {
                ("properties", Value::Object(members)) => {
                    members.iter().for_each(|(name, member)| self.visit_member(name, member))
                }
                ("patternProperties", Value::Object(members)) => {
                    members.values().for_each(|member| self.visit_member("*", member))
                }
                ("prefixItems" | "items", Value::Array(items)) => {
                    items.iter().for_each(|item| self.visit_member("*", item))
                }
                (
                    "items"
                    | "additionalProperties"
                    | "unevaluatedProperties"
                    | "unevaluatedItems"
                    | "contains",
                    part,
                ) => self.visit_member("*", part),
                ("allOf" | "anyOf" | "oneOf", Value::Array(parts)) => {
                    parts.iter().for_each(|part| self.visit_schema(part))
                }
                ("if" | "then" | "else", part) => self.visit_schema(part),
                ("dependentSchemas", Value::Object(parts)) => {
                    parts.values().for_each(|part| self.visit_schema(part))
                }
                _ => {}
            }
        }
    }

    fn visit_member(&mut self, name: &str, schema: &'s Value) {
        self.at.push(name.to_owned());
        self.visit_schema(schema);
        self.at.pop();
    }

    fn follow_reference(&mut self, target: &'s str) {
        let referred = target.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer));
        // The type is recursive, or the reference is not a path. If a secret is anywhere inside,
        // the whole value counts as secret.
        if self.followed_references.contains(&target) || referred.is_none() {
            if has_write_only(referred.unwrap_or(self.root)) {
                self.pointers.push(self.at.clone());
            }
            return;
        }
        if let Some(referred) = referred {
            self.followed_references.push(target);
            self.visit_schema(referred);
            self.followed_references.pop();
        }
    }
}

fn has_write_only(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => {
            map.get("writeOnly") == Some(&Value::Bool(true)) || map.values().any(has_write_only)
        }
        Value::Array(items) => items.iter().any(has_write_only),
        _ => false,
    }
}
