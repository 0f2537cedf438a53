//! Looks up what a schema declares at a place, and masks secret names.

use std::collections::BTreeSet;

use serde_json::Value;

use toolgate_json::Pointer;

/// Replaces a hidden value or name.
pub(crate) const HIDDEN_MASK: &str = "(hidden)";

/// A schema with its secret places.
pub(crate) struct MaskedSchema<'a> {
    pub(crate) schema: &'a Value,
    pub(crate) secrets: &'a [Pointer],
}

impl MaskedSchema<'_> {
    /// Returns whether a place is a secret or inside of one, where names may be secret as well.
    pub(crate) fn is_secret(&self, place: &Pointer) -> bool {
        let inside = |secret: &Pointer| {
            secret.parts().len() <= place.parts().len()
                && secret.parts().iter().zip(place.parts()).all(|(s, p)| s == "*" || s == p)
        };
        self.secrets.iter().any(inside)
    }

    /// Returns a name for a message. Inside of a secret, undeclared names are masked.
    pub(crate) fn masked_name<'n>(&self, place: &Pointer, name: &'n str) -> &'n str {
        let declares = |part: &&Value| {
            part.get("properties").is_some_and(|properties| properties.get(name).is_some())
        };
        let is_visible = !self.is_secret(place)
            || schemas_at(self.schema, &place.to_string()).iter().any(declares);
        if is_visible { name } else { HIDDEN_MASK }
    }

    /// Returns a path for a message.
    pub(crate) fn masked_path(&self, path: &str) -> String {
        let (mut place, mut masked) = (Pointer::default(), Pointer::default());
        for part in Pointer::from(path).parts() {
            masked.push(self.masked_name(&place, part).to_owned());
            place.push(part.clone());
        }
        masked.to_string()
    }
}

/// Returns a function that tests whether a schema declares a member at a place.
///
/// A member counts if its name is declared or matches a pattern, in references and compositions
/// too.
pub(crate) fn declaration_test<'s>(
    schema: &'s Value,
    place: &str,
) -> impl Fn(&str) -> bool + use<'s> {
    let parts = schemas_at(schema, place);
    let patterns: BTreeSet<&String> = parts
        .iter()
        .filter_map(|part| part.get("patternProperties")?.as_object())
        .flat_map(|map| map.keys())
        .collect();
    // Compile each pattern once, because there may be very many names.
    let patterns: Vec<Option<regex::Regex>> =
        patterns.into_iter().map(|pattern| regex::Regex::new(pattern).ok()).collect();
    move |name: &str| {
        let names = |part: &&Value| {
            part.get("properties").is_some_and(|properties| properties.get(name).is_some())
        };
        let matches = |pattern: &Option<regex::Regex>| {
            pattern.as_ref().is_none_or(|pattern| pattern.is_match(name))
        };
        parts.iter().any(names) || patterns.iter().any(matches)
    }
}

/// Returns all schemas that apply at a place.
pub(crate) fn schemas_at<'s>(schema: &'s Value, place: &str) -> Vec<&'s Value> {
    let mut at = vec![schema];
    for part in Pointer::from(place).parts() {
        let number = part.parse::<usize>().ok();
        at = at
            .into_iter()
            .flat_map(|s| composed_parts(s, schema, 0))
            .filter_map(|s| {
                s.get("properties")
                    .and_then(|p| p.get(part))
                    .or_else(|| pattern_schema(s, part))
                    .or_else(|| s.get("prefixItems")?.get(number?))
                    .or_else(|| number.and_then(|_| s.get("items")))
                    .or_else(|| s.get("additionalProperties"))
            })
            .collect();
    }
    at.dedup_by(|a, b| std::ptr::eq(*a, *b));
    at.truncate(64);
    at.into_iter().flat_map(|s| composed_parts(s, schema, 0)).collect()
}

/// Returns the schema for members whose names match a pattern.
fn pattern_schema<'s>(schema: &'s Value, name: &str) -> Option<&'s Value> {
    let matches =
        |pattern: &str| regex::Regex::new(pattern).is_ok_and(|pattern| pattern.is_match(name));
    schema
        .get("patternProperties")?
        .as_object()?
        .iter()
        .find(|(pattern, _)| matches(pattern))
        .map(|(_, schema)| schema)
}

/// Returns a schema and the schemas that it is composed of.
fn composed_parts<'s>(schema: &'s Value, root: &'s Value, depth: usize) -> Vec<&'s Value> {
    if depth > 8 {
        return Vec::new();
    }
    let mut parts = vec![schema];
    if let Some(target) = schema
        .get("$ref")
        .and_then(Value::as_str)
        .and_then(|t| t.strip_prefix('#'))
        .and_then(|p| root.pointer(p))
    {
        parts.extend(composed_parts(target, root, depth + 1));
    }
    let branches = ["allOf", "anyOf", "oneOf"]
        .into_iter()
        .filter_map(|word| schema.get(word)?.as_array())
        .flatten();
    let conditional = ["if", "then", "else"].into_iter().filter_map(|word| schema.get(word));
    let dependent = schema
        .get("dependentSchemas")
        .and_then(Value::as_object)
        .into_iter()
        .flat_map(|map| map.values());
    for part in branches.chain(conditional).chain(dependent) {
        parts.extend(composed_parts(part, root, depth + 1));
    }
    parts
}
