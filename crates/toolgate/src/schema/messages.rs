//! Explains validation errors to a model, with its argument names and the names that it probably
//! meant.

use std::collections::{BTreeMap, BTreeSet};

use jsonschema::ValidationError;
use jsonschema::error::{TypeKind, ValidationErrorKind as K};
use serde_json::Value;

use super::SchemaValidationError;
use crate::call::error::FieldError;
use crate::redact::is_secret_path;
use crate::schema::any_of::{IntendedForm, find_intended_form};
use crate::schema::lookup::{HIDDEN_MASK, MaskedSchema, declaration_test, schemas_at};
use toolgate_json::{Pointer, json_type_of};
use toolgate_text::escape_for_display;
use toolgate_text::suggest::find_closest;

/// Maximum number of names or fields in a message; more do not help a model.
const MAX_LISTED_NAMES: usize = 20;

/// Formats a value for a message: shortened, and masked if it is or contains a secret.
fn format_value(value: &Value, path: &str, secrets: &[Pointer]) -> String {
    match value {
        _ if is_secret_path(&Pointer::from(path), secrets) => HIDDEN_MASK.to_owned(),
        Value::Array(_) | Value::Object(_) => json_type_of(value).to_owned(),
        Value::String(text) => format!("\"{}\"", escape_for_display(text)),
        scalar => escape_for_display(&scalar.to_string()),
    }
}

pub(crate) fn explain_errors<'a>(
    tool: &str,
    schema: &Value,
    errors: impl Iterator<Item = ValidationError<'a>>,
    secrets: &[Pointer],
) -> SchemaValidationError {
    let mut found = ValidationErrorGroups::default();
    for error in errors {
        found.record_error(&error, secrets);
    }
    found.separate_declared_names(schema);
    let known = MaskedSchema { schema, secrets };
    let ValidationErrorGroups {
        mut missing,
        alternatives: mut either,
        mut unknown,
        mut incompatible,
        wrong_values: fields,
    } = found;
    let mut all = Vec::new();
    let mut sentences = Vec::new();
    let places: BTreeSet<String> = missing
        .keys()
        .chain(unknown.keys())
        .chain(either.keys())
        .chain(incompatible.keys())
        .cloned()
        .collect();
    // Messages about the top level already contain the name of the tool.
    let is_named = places.first().is_some_and(String::is_empty);
    for place in places {
        let absent = missing.remove(&place).unwrap_or_default();
        let extra = unknown.remove(&place).unwrap_or_default();
        explain_names(tool, &known, &place, &absent, &extra, &mut all, &mut sentences);
        let owner = owner_name(tool, &known.masked_path(&place));
        for groups in either.remove(&place).unwrap_or_default() {
            let names = format_alternatives(&groups);
            sentences.push(format!("{owner} requires {names}"));
            all.push(FieldError {
                path: place.clone(),
                expected: format!("required: {names}"),
                got: "nothing".to_owned(),
                did_you_mean: None,
            });
        }
        for name in incompatible.remove(&place).unwrap_or_default() {
            let shown_name = escape_for_display(known.masked_name(&Pointer::from(&*place), &name));
            sentences.push(format!(
                "{owner} does not accept `{shown_name}` together with the other members"
            ));
            all.push(FieldError {
                path: member_path(&place, &name),
                expected: "absent, together with the other members".to_owned(),
                got: shown_name,
                did_you_mean: None,
            });
        }
    }
    for field in fields.into_iter().take(MAX_LISTED_NAMES) {
        sentences.push(format!(
            "{} must be {}; got {}",
            sentence_subject(&known.masked_path(&field.path)),
            field.expected,
            field.got
        ));
        all.push(field);
    }
    if sentences.is_empty() {
        sentences.push("the arguments do not fit the schema".to_owned());
    }
    let mut message = if is_named { String::new() } else { format!("{tool}: ") };
    for (index, sentence) in sentences.iter().enumerate() {
        if index > 0 {
            message.push_str(if message.ends_with('?') { " " } else { "; " });
        }
        message.push_str(sentence);
    }
    for field in &mut all {
        field.path = format_path(&known.masked_path(&field.path));
    }
    SchemaValidationError { errors: all, message }
}

/// Collects validation errors. Names are grouped by the object that has or lacks them.
#[derive(Default)]
struct ValidationErrorGroups {
    missing: BTreeMap<String, Vec<String>>,
    /// Groups of names, one of which is required.
    alternatives: BTreeMap<String, Vec<Vec<Vec<String>>>>,
    unknown: BTreeMap<String, Vec<String>>,
    /// Declared names that do not fit together with the other members.
    incompatible: BTreeMap<String, Vec<String>>,
    wrong_values: Vec<FieldError>,
}

impl ValidationErrorGroups {
    /// Records one error of the validator as missing, unknown or wrong.
    fn record_error(&mut self, error: &ValidationError<'_>, secrets: &[Pointer]) {
        let path = error.instance_path().to_string();
        match error.kind() {
            K::Required { property } => {
                let names = self.missing.entry(path).or_default();
                let name = property.as_str().unwrap_or_default();
                if !names.iter().any(|known| known == name) {
                    names.push(name.to_owned());
                }
            }
            K::AdditionalProperties { unexpected } | K::UnevaluatedProperties { unexpected } => {
                self.unknown
                    .entry(path)
                    .or_default()
                    .extend(unexpected.iter().take(MAX_LISTED_NAMES).cloned());
            }
            K::AnyOf { context } | K::OneOfNotValid { context } => {
                match find_intended_form(&path, context) {
                    IntendedForm::Form(errors) => errors
                        .iter()
                        .take(MAX_LISTED_NAMES)
                        .for_each(|error| self.record_error(error, secrets)),
                    IntendedForm::WrongTag(tag, options) => self.record_wrong_value(field_error(
                        tag.instance_path().to_string(),
                        format_allowed_values(&options),
                        tag,
                        secrets,
                    )),
                    IntendedForm::MissingNames(groups) => {
                        self.alternatives.entry(path).or_default().push(groups)
                    }
                    IntendedForm::Types(kinds) if kinds.is_empty() => {
                        self.record_wrong_value(field_error(
                            path,
                            "of one of the allowed forms".to_owned(),
                            error,
                            secrets,
                        ));
                    }
                    IntendedForm::Types(kinds) => self.record_wrong_value(field_error(
                        path,
                        kinds.join(" or "),
                        error,
                        secrets,
                    )),
                }
            }
            _ => {
                self.record_wrong_value(field_error(path, describe_expected(error), error, secrets))
            }
        }
    }

    /// Records a wrong value, unless another part of the schema reported the same.
    fn record_wrong_value(&mut self, field: FieldError) {
        if !self.wrong_values.contains(&field) {
            self.wrong_values.push(field);
        }
    }

    /// Separates undeclared names from declared ones.
    ///
    /// If a part of a composed schema fails, the validator reports all names in that part as
    /// unknown. A declared name is not reported as unknown. Without another error at the place, the
    /// name does not fit together with the others.
    fn separate_declared_names(&mut self, schema: &Value) {
        // Start with the inner places, because keys are sorted and a place comes before its
        // members.
        let places: Vec<String> = self.unknown.keys().rev().cloned().collect();
        for place in places {
            let is_known = declaration_test(schema, &place);
            let names = self.unknown.remove(&place).unwrap_or_default();
            let (known, unknown): (Vec<String>, Vec<String>) =
                names.into_iter().partition(|name| is_known(name));
            if !known.is_empty() && !self.has_error_at(&place) {
                self.incompatible.insert(place.clone(), known);
            }
            if !unknown.is_empty() {
                self.unknown.insert(place, unknown);
            }
        }
    }

    /// Returns whether there is another error at a place or inside of its value.
    fn has_error_at(&self, place: &str) -> bool {
        let inside =
            |path: &str| path.strip_prefix(place).is_some_and(|rest| rest.starts_with('/'));
        let at = |path: &str| path == place || inside(path);
        self.wrong_values.iter().any(|field| at(&field.path))
            || self.missing.keys().chain(self.alternatives.keys()).any(|path| at(path))
            || self.unknown.keys().chain(self.incompatible.keys()).any(|path| inside(path))
    }
}

/// Formats groups of names, one of which is required.
fn format_alternatives(groups: &[Vec<String>]) -> String {
    let listed: Vec<String> = groups
        .iter()
        .map(|names| {
            names
                .iter()
                .map(|name| format!("`{}`", escape_for_display(name)))
                .collect::<Vec<_>>()
                .join(" and ")
        })
        .collect();
    listed.join(if groups.iter().all(|names| names.len() == 1) { " or " } else { ", or " })
}

fn format_allowed_values(options: &[String]) -> String {
    match options {
        [only] => only.clone(),
        options => format!("one of {}", options.join(", ")),
    }
}

/// Returns the name of the object at a place.
fn owner_name(tool: &str, place: &str) -> String {
    if place.is_empty() { format!("`{tool}`") } else { format!("`{}`", argument_name(place)) }
}

/// Returns the path of a member.
fn member_path(place: &str, name: &str) -> String {
    format!("{place}/{}", name.replace('~', "~0").replace('/', "~1"))
}

fn field_error(
    path: String,
    expected: String,
    error: &ValidationError<'_>,
    secrets: &[Pointer],
) -> FieldError {
    let value = error.instance();
    let got = match value.as_ref() {
        Value::String(_) if matches!(error.kind(), K::Type { .. }) => {
            format!("the string {}", format_value(value, &path, secrets))
        }
        value => format_value(value, &path, secrets),
    };
    FieldError { path, expected, got, did_you_mean: None }
}

/// Reports the missing and unknown names of one object, with suggestions.
fn explain_names(
    tool: &str,
    of: &MaskedSchema<'_>,
    place: &str,
    absent: &[String],
    extra: &[String],
    all: &mut Vec<FieldError>,
    sentences: &mut Vec<String>,
) {
    let parts = schemas_at(of.schema, place);
    let known: BTreeSet<&str> = parts
        .iter()
        .filter_map(|part| part.get("properties")?.as_object())
        .flat_map(|map| map.keys().map(String::as_str))
        .collect();
    // If parts of the schema disagree about the type, omit the type.
    let kind = |name: &str| {
        let kinds: BTreeSet<String> = parts
            .iter()
            .filter_map(|part| declared_type(part.get("properties")?.get(name)?))
            .collect();
        match kinds.len() {
            1 => kinds.first().map(|kind| format!(" ({kind})")).unwrap_or_default(),
            _ => String::new(),
        }
    };
    let accepted = if known.is_empty() {
        String::new()
    } else {
        format!(
            " (it takes {})",
            known.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ")
        )
    };
    let owner = owner_name(tool, &of.masked_path(place));
    // A name inside of a secret may be the secret, so such names are only counted.
    let is_secret = of.is_secret(&Pointer::from(place));
    if is_secret && !extra.is_empty() {
        let (path, expected) = (member_path(place, HIDDEN_MASK), "no such argument".to_owned());
        all.push(FieldError { path, expected, got: HIDDEN_MASK.to_owned(), did_you_mean: None });
        sentences
            .push(format!("{owner} has {} unknown member(s), not shown{accepted}", extra.len()));
    }
    let extra: &[String] = if is_secret { &[] } else { extra };
    let mut guesses: BTreeMap<&str, &str> = BTreeMap::new();
    for name in extra {
        // A misspelled name probably stands for a missing one, so try those first.
        let guess = find_closest(name, absent.iter().map(String::as_str))
            .or_else(|| find_closest(name, known.iter().copied()));
        if let Some(guess) = guess {
            guesses.insert(name, guess);
        }
        all.push(FieldError {
            path: member_path(place, name),
            expected: "no such argument".to_owned(),
            got: escape_for_display(name),
            did_you_mean: guess.map(str::to_owned),
        });
    }
    let mut explained: Vec<&str> = Vec::new();
    for name in absent {
        all.push(FieldError {
            path: format!("{place}/{name}"),
            expected: format!("required{}", kind(name)),
            got: "nothing".to_owned(),
            did_you_mean: None,
        });
        let misspelt = guesses.iter().find(|(_, guess)| **guess == name).map(|(wrong, _)| *wrong);
        sentences.push(match misspelt {
            Some(wrong) => {
                explained.push(wrong);
                format!(
                    "{owner} requires `{name}`{}; got `{}`, did you mean `{name}`?",
                    kind(name),
                    escape_for_display(wrong)
                )
            }
            None => format!("{owner} requires `{name}`{}, which is missing", kind(name)),
        });
    }
    for name in extra.iter().filter(|name| !explained.contains(&name.as_str())) {
        let guess = guesses
            .get(name.as_str())
            .map_or_else(String::new, |guess| format!(", did you mean `{guess}`?"));
        sentences.push(format!(
            "{owner} has no `{}`{}",
            escape_for_display(name),
            if guess.is_empty() { &accepted } else { &guess }
        ));
    }
}

/// Returns a phrase for the expected value.
pub(crate) fn describe_expected(error: &ValidationError<'_>) -> String {
    match error.kind() {
        K::Type { kind: TypeKind::Single(kind) } => with_article(&kind.to_string()),
        K::Type { kind: TypeKind::Multiple(kinds) } => {
            kinds.into_iter().map(|k| with_article(&k.to_string())).collect::<Vec<_>>().join(" or ")
        }
        K::Enum { options } => {
            let options: Vec<String> = options
                .as_array()
                .into_iter()
                .flatten()
                .take(20)
                .map(ToString::to_string)
                .collect();
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
        K::UniqueItems => "items that are all different".to_owned(),
        K::Pattern { pattern } => format!("text that matches `{pattern}`"),
        K::BacktrackLimitExceeded { .. } | K::RegexEngineFailure { .. } => {
            "text that its pattern can match in a limited number of steps".to_owned()
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

/// Returns the subject of a sentence about a path.
fn sentence_subject(path: &str) -> String {
    if path.is_empty() { "the value".to_owned() } else { format!("`{}`", argument_name(path)) }
}

/// Formats a path for a message. Its names are untrusted.
fn format_path(path: &str) -> String {
    path.split('/').map(escape_for_display).collect::<Vec<_>>().join("/")
}

/// Converts `/items/0/price` to the form that a model writes: `items[0].price`.
fn argument_name(path: &str) -> String {
    let mut name = String::new();
    for part in Pointer::from(path).parts() {
        match part.parse::<usize>() {
            Ok(index) => name.push_str(&format!("[{index}]")),
            Err(_) if name.is_empty() => name.push_str(&escape_for_display(part)),
            Err(_) => name.push_str(&format!(".{}", escape_for_display(part))),
        }
    }
    if name.is_empty() { "the arguments".to_owned() } else { name }
}

fn declared_type(schema: &Value) -> Option<String> {
    match schema.get("type")? {
        Value::String(kind) => Some(kind.clone()),
        Value::Array(kinds) => {
            Some(kinds.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or "))
        }
        _ => None,
    }
}
