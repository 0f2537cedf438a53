//! Visits the texts, numbers and member names of a value.

use serde_json::Value;

/// Returns the text of a leaf, with one spelling for each number.
pub(super) fn text_of(leaf: &Value) -> std::borrow::Cow<'_, str> {
    match leaf {
        Value::String(text) => text.as_str().into(),
        Value::Number(number) => match toolgate_json::canonical_number(number.as_str()) {
            Ok(canonical) => canonical.as_str().to_owned().into(),
            Err(_) => number.as_str().to_owned().into(),
        },
        other => other.to_string().into(),
    }
}

/// Visits every text and number in a value, with its path.
pub(crate) fn visit_leaves(value: &Value, place: &str, f: &mut dyn FnMut(&str, &Value)) {
    match value {
        Value::Null | Value::Bool(_) => {}
        Value::Number(_) | Value::String(_) => f(place, value),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(index, item)| visit_leaves(item, &format!("{place}/{index}"), f)),
        Value::Object(map) => {
            map.iter().for_each(|(name, item)| visit_leaves(item, &child_path(place, name), f))
        }
    }
}

/// Visits every member name in a value, with the path of the member.
pub(crate) fn visit_names(value: &Value, place: &str, f: &mut dyn FnMut(&str, &str)) {
    match value {
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(index, item)| visit_names(item, &format!("{place}/{index}"), f)),
        Value::Object(map) => map.iter().for_each(|(name, item)| {
            let place = child_path(place, name);
            f(&place, name);
            visit_names(item, &place, f);
        }),
        _ => {}
    }
}

fn child_path(place: &str, name: &str) -> String {
    format!("{place}/{}", name.replace('~', "~0").replace('/', "~1"))
}
