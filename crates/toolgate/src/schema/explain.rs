//! Validation errors in the words a model works with: its own argument names, and what was meant.

use std::collections::BTreeMap;

use jsonschema::ValidationError;
use jsonschema::error::{TypeKind, ValidationErrorKind as K};
use serde_json::Value;

use super::Invalid;
use crate::error::FieldError;
use crate::json::{Pointer, kind_of};
use crate::names::shown;
use crate::suggest::closest;

const MASK: &str = "(hidden)";

/// Where a schema says `writeOnly`.
pub(super) fn write_only(schema: &Value) -> Vec<Pointer> {
    fn walk(schema: &Value, root: &Value, at: &mut Pointer, found: &mut Vec<Pointer>, depth: usize) {
        let Some(map) = schema.as_object() else { return };
        if depth > 16 {
            return;
        }
        if map.get("writeOnly") == Some(&Value::Bool(true)) {
            found.push(at.clone());
        }
        if let Some(target) = map.get("$ref").and_then(Value::as_str).and_then(|t| t.strip_prefix('#')).and_then(|p| root.pointer(p)) {
            walk(target, root, at, found, depth + 1);
        }
        for (name, member) in map.get("properties").and_then(Value::as_object).into_iter().flatten() {
            at.push(name.clone());
            walk(member, root, at, found, depth + 1);
            at.pop();
        }
        for word in ["items", "additionalProperties"] {
            if let Some(item) = map.get(word) {
                at.push("*".to_owned());
                walk(item, root, at, found, depth + 1);
                at.pop();
            }
        }
        for word in ["allOf", "anyOf", "oneOf"] {
            for part in map.get(word).and_then(Value::as_array).into_iter().flatten() {
                walk(part, root, at, found, depth + 1);
            }
        }
    }
    let mut found = Vec::new();
    walk(schema, schema, &mut Pointer::default(), &mut found, 0);
    found
}

/// True where a path is a secret or lies inside one.
fn is_secret(path: &str, secrets: &[Pointer]) -> bool {
    let path = Pointer::from(path);
    secrets.iter().any(|secret| {
        secret.parts().len() <= path.parts().len() && secret.parts().iter().zip(path.parts()).all(|(s, p)| s == "*" || s == p)
    })
}

/// A value as it may be shown: short, and not at all where it is secret or holds a secret.
fn shown_value(value: &Value, path: &str, secrets: &[Pointer]) -> String {
    match value {
        _ if is_secret(path, secrets) => MASK.to_owned(),
        Value::Array(_) | Value::Object(_) => kind_of(value).to_owned(),
        Value::String(text) => format!("\"{}\"", shown(text)),
        scalar => shown(&scalar.to_string()),
    }
}

pub(super) fn explain<'a>(tool: &str, schema: &Value, errors: impl Iterator<Item = ValidationError<'a>>, secrets: &[Pointer]) -> Invalid {
    let mut missing: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut unknown: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut fields = Vec::new();
    for error in errors {
        gather(&error, &mut missing, &mut unknown, &mut fields, secrets);
    }
    let mut all = Vec::new();
    let mut sentences = Vec::new();
    let places: Vec<String> =
        missing.keys().chain(unknown.keys()).cloned().collect::<std::collections::BTreeSet<_>>().into_iter().collect();
    for place in places {
        let absent = missing.remove(&place).unwrap_or_default();
        let extra = unknown.remove(&place).unwrap_or_default();
        explain_names(tool, schema, &place, &absent, &extra, &mut all, &mut sentences);
    }
    for field in fields {
        sentences.push(format!("`{}` must be {}; got {}", argument_name(&field.path), field.expected, field.got));
        all.push(field);
    }
    if sentences.is_empty() {
        sentences.push("the arguments do not fit the schema".to_owned());
    }
    Invalid { errors: all, message: format!("{tool}: {}", sentences.join(". ")) }
}

/// One error of the validator, sorted into what is missing, what is unknown and what is wrong.
fn gather(
    error: &ValidationError<'_>,
    missing: &mut BTreeMap<String, Vec<String>>,
    unknown: &mut BTreeMap<String, Vec<String>>,
    fields: &mut Vec<FieldError>,
    secrets: &[Pointer],
) {
    let path = error.instance_path().to_string();
    match error.kind() {
        K::Required { property } => missing.entry(path).or_default().push(property.as_str().unwrap_or_default().to_owned()),
        K::AdditionalProperties { unexpected } | K::UnevaluatedProperties { unexpected } => {
            unknown.entry(path).or_default().extend(unexpected.iter().cloned());
        }
        // The branch with the fewest complaints is the one that was meant.
        K::AnyOf { context } | K::OneOfNotValid { context } => {
            let nearest = context.iter().filter(|branch| !branch.is_empty()).min_by_key(|branch| (is_type_mismatch(branch), branch.len()));
            match nearest {
                Some(branch) if !is_type_mismatch(branch) => {
                    branch.iter().for_each(|error| gather(error, missing, unknown, fields, secrets))
                }
                _ => {
                    let kinds: Vec<String> = context.iter().flatten().map(expected).collect();
                    fields.push(field(path, kinds.join(" or "), error, secrets));
                }
            }
        }
        _ => fields.push(field(path, expected(error), error, secrets)),
    }
}

fn is_type_mismatch(branch: &[ValidationError<'_>]) -> bool {
    branch.iter().any(|error| matches!(error.kind(), K::Type { .. } | K::Constant { .. }))
}

fn field(path: String, expected: String, error: &ValidationError<'_>, secrets: &[Pointer]) -> FieldError {
    let value = error.instance();
    let got = match value.as_ref() {
        Value::String(_) if matches!(error.kind(), K::Type { .. }) => format!("the string {}", shown_value(value, &path, secrets)),
        value => shown_value(value, &path, secrets),
    };
    FieldError { path, expected, got, did_you_mean: None }
}

/// Missing and unknown names of one object, each unknown one with the name that was probably meant.
fn explain_names(
    tool: &str,
    schema: &Value,
    place: &str,
    absent: &[String],
    extra: &[String],
    all: &mut Vec<FieldError>,
    sentences: &mut Vec<String>,
) {
    let properties = properties_at(schema, place);
    let known: Vec<&str> = properties.iter().map(|(name, _)| name.as_str()).collect();
    let kind = |name: &str| {
        properties.iter().find(|(n, _)| n == name).and_then(|(_, s)| type_of(s)).map(|t| format!(" ({t})")).unwrap_or_default()
    };
    let whose = if place.is_empty() { format!("`{tool}`") } else { format!("`{}`", argument_name(place)) };
    let mut meant: BTreeMap<&str, &str> = BTreeMap::new();
    for name in extra {
        // A missing name first: that is what a misspelt one stands for.
        let guess = closest(name, absent.iter().map(String::as_str)).or_else(|| closest(name, known.iter().copied()));
        if let Some(guess) = guess {
            meant.insert(name, guess);
        }
        all.push(FieldError {
            path: format!("{place}/{}", name.replace('~', "~0").replace('/', "~1")),
            expected: "no such argument".to_owned(),
            got: shown(name),
            did_you_mean: guess.map(str::to_owned),
        });
    }
    let mut said: Vec<&str> = Vec::new();
    for name in absent {
        all.push(FieldError {
            path: format!("{place}/{name}"),
            expected: format!("required{}", kind(name)),
            got: "nothing".to_owned(),
            did_you_mean: None,
        });
        let misspelt = meant.iter().find(|(_, guess)| **guess == name).map(|(wrong, _)| *wrong);
        sentences.push(match misspelt {
            Some(wrong) => {
                said.push(wrong);
                format!("{whose} requires `{name}`{}; got `{}`, did you mean `{name}`?", kind(name), shown(wrong))
            }
            None => format!("{whose} requires `{name}`{}, which is missing (a required property)", kind(name)),
        });
    }
    for name in extra.iter().filter(|name| !said.contains(&name.as_str())) {
        let guess = meant.get(name.as_str()).map_or_else(String::new, |guess| format!(", did you mean `{guess}`?"));
        let takes = if known.is_empty() {
            String::new()
        } else {
            format!(" (it takes {})", known.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", "))
        };
        sentences.push(format!("{whose} has no `{}`{}", shown(name), if guess.is_empty() { takes } else { guess }));
    }
}

/// What would have been right.
fn expected(error: &ValidationError<'_>) -> String {
    match error.kind() {
        K::Type { kind: TypeKind::Single(kind) } => with_article(&kind.to_string()),
        K::Type { kind: TypeKind::Multiple(kinds) } => {
            kinds.into_iter().map(|k| with_article(&k.to_string())).collect::<Vec<_>>().join(" or ")
        }
        K::Enum { options } => {
            let options: Vec<String> = options.as_array().into_iter().flatten().take(20).map(ToString::to_string).collect();
            format!("one of {}", options.join(", "))
        }
        K::Constant { expected_value } => expected_value.to_string(),
        K::Maximum { limit } => format!("at most {limit}"),
        K::Minimum { limit } => format!("at least {limit}"),
        K::ExclusiveMaximum { limit } => format!("less than {limit}"),
        K::ExclusiveMinimum { limit } => format!("more than {limit}"),
        K::MultipleOf { multiple_of } => format!("a multiple of {multiple_of}"),
        K::MaxLength { limit } => format!("at most {limit} characters long"),
        K::MinLength { limit } => format!("at least {limit} characters long"),
        K::MaxItems { limit } => format!("at most {limit} items"),
        K::MinItems { limit } => format!("at least {limit} items"),
        K::MaxProperties { limit } => format!("at most {limit} members"),
        K::MinProperties { limit } => format!("at least {limit} members"),
        K::UniqueItems => "items that all differ".to_owned(),
        K::Pattern { pattern } => format!("text that matches `{pattern}`"),
        K::BacktrackLimitExceeded { .. } | K::RegexEngineFailure { .. } => {
            "text that its pattern can be tried on in bounded time".to_owned()
        }
        K::Format { format } => format!("a valid {format}"),
        K::FalseSchema => "absent".to_owned(),
        K::OneOfMultipleValid { .. } => "of exactly one of the allowed forms".to_owned(),
        K::Not { .. } => "something else".to_owned(),
        other => format!("something that satisfies `{}`", other.keyword()),
    }
}

fn with_article(kind: &str) -> String {
    match kind {
        "integer" | "object" | "array" => format!("an {kind}"),
        "null" => "null".to_owned(),
        kind => format!("a {kind}"),
    }
}

/// `/items/0/price` as a model writes it: `items[0].price`.
fn argument_name(path: &str) -> String {
    let mut name = String::new();
    for part in Pointer::from(path).parts() {
        match part.parse::<usize>() {
            Ok(index) => name.push_str(&format!("[{index}]")),
            Err(_) if name.is_empty() => name.push_str(&shown(part)),
            Err(_) => name.push_str(&format!(".{}", shown(part))),
        }
    }
    if name.is_empty() { "the arguments".to_owned() } else { name }
}

fn type_of(schema: &Value) -> Option<String> {
    match schema.get("type")? {
        Value::String(kind) => Some(kind.clone()),
        Value::Array(kinds) => Some(kinds.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or ")),
        _ => None,
    }
}

/// The properties that a schema knows at a place of the document, through references and compositions.
fn properties_at(schema: &Value, place: &str) -> Vec<(String, Value)> {
    let mut at = vec![schema];
    for part in Pointer::from(place).parts() {
        at = at
            .into_iter()
            .flat_map(|s| parts_of(s, schema, 0))
            .filter_map(|s| {
                s.get("properties")
                    .and_then(|p| p.get(part))
                    .or_else(|| part.parse::<usize>().ok().and_then(|_| s.get("items")))
                    .or_else(|| s.get("additionalProperties"))
            })
            .collect();
    }
    let mut found: Vec<(String, Value)> = at
        .into_iter()
        .flat_map(|s| parts_of(s, schema, 0))
        .filter_map(|s| s.get("properties")?.as_object())
        .flat_map(|map| map.iter().map(|(name, s)| (name.clone(), s.clone())))
        .collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found.dedup_by(|a, b| a.0 == b.0);
    found
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
    for word in ["allOf", "anyOf", "oneOf"] {
        for part in schema.get(word).and_then(Value::as_array).into_iter().flatten() {
            parts.extend(parts_of(part, root, depth + 1));
        }
    }
    parts
}
