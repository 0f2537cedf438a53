//! Which of several forms was meant by a value that fits none of them (`anyOf`, `oneOf`), so that what is said of it is true.

use jsonschema::ValidationError;
use jsonschema::error::ValidationErrorKind as K;

use super::explain::expected;

/// What one form has against a value.
type Form = [ValidationError<'static>];

/// What is to be said of a value that fits none of the forms.
pub(super) enum Meant<'e> {
    /// This form was meant: what is wrong is what is wrong with it.
    Form(&'e Form),
    /// It is of another kind altogether: any of these would do.
    Kinds(Vec<String>),
    /// A member says which form it is, and says none of them: the complaint, and what it could say.
    Tag(&'e ValidationError<'static>, Vec<String>),
    /// Any of these groups of names would do, and none is there.
    Either(Vec<Vec<String>>),
}

/// Finds out which form of a value at a path was meant.
pub(super) fn meant<'e>(path: &str, forms: &'e [Vec<ValidationError<'static>>]) -> Meant<'e> {
    let fitting: Vec<&'e Form> =
        forms.iter().map(Vec::as_slice).filter(|form| !form.is_empty() && !form.iter().any(|error| is_another_kind(error, path))).collect();
    let tags: Vec<&'e ValidationError<'static>> = fitting.iter().filter_map(|form| tag(form, path)).collect();
    if let Some(first) = tags.first().copied()
        && tags.len() == fitting.len()
        && tags.iter().all(|error| error.instance_path() == first.instance_path())
    {
        return Meant::Tag(first, each_once(tags.iter().filter_map(|error| tagged(error))));
    }
    // A form whose tag is another was not meant, unless all are. Of the others, the one that is about what was given, not about what is missing.
    let untagged: Vec<&'e Form> = fitting.iter().copied().filter(|form| tags.len() == fitting.len() || tag(form, path).is_none()).collect();
    let weight = |form: &Form| (form.iter().filter(|error| matches!(error.kind(), K::Required { .. })).count(), form.len());
    let Some(least) = untagged.iter().map(|form| weight(form)).min() else {
        let mut kinds = Vec::new();
        kinds_of(path, forms, &mut kinds);
        kinds.sort();
        kinds.dedup();
        return Meant::Kinds(kinds);
    };
    let near: Vec<&'e Form> = untagged.into_iter().filter(|form| weight(form) == least).collect();
    let lacking: Vec<Vec<String>> = near.iter().filter_map(|form| lacks(form, path)).collect();
    let nothing_else = lacking.len() == near.len();
    let groups = each_once(lacking.into_iter());
    match near.first().copied() {
        Some(form) if groups.len() < 2 || !nothing_else => Meant::Form(form),
        _ => Meant::Either(groups),
    }
}

/// Without what came before.
fn each_once<T: PartialEq>(things: impl Iterator<Item = T>) -> Vec<T> {
    things.fold(Vec::new(), |mut all, thing| {
        if !all.contains(&thing) {
            all.push(thing);
        }
        all
    })
}

/// Whether the value itself is of another kind than a form wants, and not only something in it.
fn is_another_kind(error: &ValidationError<'_>, path: &str) -> bool {
    let here = error.instance_path().to_string() == path;
    match error.kind() {
        K::Type { .. } | K::Constant { .. } | K::Enum { .. } | K::FalseSchema => here,
        K::AnyOf { context } | K::OneOfNotValid { context } => {
            here && context.iter().all(|form| form.iter().any(|error| is_another_kind(error, path)))
        }
        _ => false,
    }
}

/// What the value could have been, in all forms.
fn kinds_of(path: &str, forms: &[Vec<ValidationError<'static>>], kinds: &mut Vec<String>) {
    for error in forms.iter().flatten().filter(|error| is_another_kind(error, path)) {
        match error.kind() {
            K::AnyOf { context } | K::OneOfNotValid { context } => kinds_of(path, context, kinds),
            K::FalseSchema => {}
            _ => kinds.push(expected(error)),
        }
    }
}

/// The complaint about the member that says which form it is: one that can have a single value.
fn tag<'e>(form: &'e Form, path: &str) -> Option<&'e ValidationError<'static>> {
    let is_member = |error: &&'e ValidationError<'static>| {
        let at = error.instance_path().to_string();
        at.strip_prefix(path).and_then(|rest| rest.strip_prefix('/')).is_some_and(|name| !name.contains('/'))
    };
    form.iter().filter(is_member).find(|error| tagged(error).is_some())
}

/// The single value that a complaint wants.
fn tagged(error: &ValidationError<'_>) -> Option<String> {
    match error.kind() {
        K::Constant { expected_value } => Some(expected_value.to_string()),
        K::Enum { options } => match options.as_array().map(Vec::as_slice) {
            Some([only]) => Some(only.to_string()),
            _ => None,
        },
        _ => None,
    }
}

/// The names that a form lacks, where that is all it has against a value.
fn lacks(form: &Form, path: &str) -> Option<Vec<String>> {
    let name = |error: &ValidationError<'static>| match error.kind() {
        K::Required { property } if error.instance_path().to_string() == path => property.as_str().map(str::to_owned),
        _ => None,
    };
    form.iter().map(name).collect()
}
