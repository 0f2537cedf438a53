//! What a schema knows at a place, and what may be told of it.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::json::Pointer;

/// Stands for what is not shown.
pub(super) const MASK: &str = "(hidden)";

/// A schema and the places in it that are secret.
pub(super) struct Known<'a> {
    pub(super) schema: &'a Value,
    pub(super) secrets: &'a [Pointer],
}

impl Known<'_> {
    /// Whether what stands at a place is a secret, or inside of one: then its names may be one as well.
    pub(super) fn hides(&self, place: &Pointer) -> bool {
        let inside = |secret: &Pointer| {
            secret.parts().len() <= place.parts().len() && secret.parts().iter().zip(place.parts()).all(|(s, p)| s == "*" || s == p)
        };
        self.secrets.iter().any(inside)
    }

    /// A name as it may be told: inside of a secret, only those that the schema declares.
    pub(super) fn name<'n>(&self, place: &Pointer, name: &'n str) -> &'n str {
        let declares = |part: &&Value| part.get("properties").is_some_and(|properties| properties.get(name).is_some());
        let is_told = !self.hides(place) || schemas_at(self.schema, &place.to_string()).iter().any(declares);
        if is_told { name } else { MASK }
    }

    /// A path as it may be told.
    pub(super) fn path(&self, path: &str) -> String {
        let (mut place, mut told) = (Pointer::default(), Pointer::default());
        for part in Pointer::from(path).parts() {
            told.push(self.name(&place, part).to_owned());
            place.push(part.clone());
        }
        told.to_string()
    }
}

/// Whether anything that a schema says of a place names a member, or has a pattern that may mean it; through references and compositions.
pub(super) fn knows<'s>(schema: &'s Value, place: &str) -> impl Fn(&str) -> bool + use<'s> {
    let parts = schemas_at(schema, place);
    let patterns: BTreeSet<&String> =
        parts.iter().filter_map(|part| part.get("patternProperties")?.as_object()).flat_map(|map| map.keys()).collect();
    // Compiled once: there may be very many names.
    let patterns: Vec<Option<regex::Regex>> = patterns.into_iter().map(|pattern| regex::Regex::new(pattern).ok()).collect();
    move |name: &str| {
        let names = |part: &&Value| part.get("properties").is_some_and(|properties| properties.get(name).is_some());
        let fits = |pattern: &Option<regex::Regex>| pattern.as_ref().is_none_or(|pattern| pattern.is_match(name));
        parts.iter().any(names) || patterns.iter().any(fits)
    }
}

/// All that a schema says of a place.
pub(super) fn schemas_at<'s>(schema: &'s Value, place: &str) -> Vec<&'s Value> {
    let mut at = vec![schema];
    for part in Pointer::from(place).parts() {
        let number = part.parse::<usize>().ok();
        at = at
            .into_iter()
            .flat_map(|s| parts_of(s, schema, 0))
            .filter_map(|s| {
                s.get("properties")
                    .and_then(|p| p.get(part))
                    .or_else(|| by_pattern(s, part))
                    .or_else(|| s.get("prefixItems")?.get(number?))
                    .or_else(|| number.and_then(|_| s.get("items")))
                    .or_else(|| s.get("additionalProperties"))
            })
            .collect();
    }
    at.dedup_by(|a, b| std::ptr::eq(*a, *b));
    at.truncate(64);
    at.into_iter().flat_map(|s| parts_of(s, schema, 0)).collect()
}

/// What a schema says of members whose names fit a pattern.
fn by_pattern<'s>(schema: &'s Value, name: &str) -> Option<&'s Value> {
    let fits = |pattern: &str| regex::Regex::new(pattern).is_ok_and(|pattern| pattern.is_match(name));
    schema.get("patternProperties")?.as_object()?.iter().find(|(pattern, _)| fits(pattern)).map(|(_, schema)| schema)
}

/// A schema and those it is composed of.
fn parts_of<'s>(schema: &'s Value, root: &'s Value, depth: usize) -> Vec<&'s Value> {
    if depth > 8 {
        return Vec::new();
    }
    let mut parts = vec![schema];
    if let Some(target) = schema.get("$ref").and_then(Value::as_str).and_then(|t| t.strip_prefix('#')).and_then(|p| root.pointer(p)) {
        parts.extend(parts_of(target, root, depth + 1));
    }
    let branches = ["allOf", "anyOf", "oneOf"].into_iter().filter_map(|word| schema.get(word)?.as_array()).flatten();
    let chosen = ["if", "then", "else"].into_iter().filter_map(|word| schema.get(word));
    let dependent = schema.get("dependentSchemas").and_then(Value::as_object).into_iter().flat_map(|map| map.values());
    for part in branches.chain(chosen).chain(dependent) {
        parts.extend(parts_of(part, root, depth + 1));
    }
    parts
}
