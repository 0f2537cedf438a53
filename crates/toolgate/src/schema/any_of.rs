//! Selects the intended form of a value that fits no form of `anyOf` or `oneOf`.

use jsonschema::ValidationError;
use jsonschema::error::ValidationErrorKind as K;

use crate::schema::messages::expected;

/// The errors of a value in one form.
type Form = [ValidationError<'static>];

/// States what to report for a value that fits none of the forms.
pub(crate) enum Meant<'e> {
    /// This form was intended, so its errors are reported.
    Form(&'e Form),
    /// The value has another type, and any of these is allowed.
    Types(Vec<String>),
    /// A member selects the form, but with none of these values. The error is one of that member.
    WrongTag(&'e ValidationError<'static>, Vec<String>),
    /// One of these groups of names is required, and none is present.
    MissingNames(Vec<Vec<String>>),
}

/// Determines which form of a value at a path was intended.
pub(crate) fn meant<'e>(path: &str, forms: &'e [Vec<ValidationError<'static>>]) -> Meant<'e> {
    let fitting: Vec<&'e Form> =
        forms.iter().map(Vec::as_slice).filter(|form| !form.is_empty() && !form.iter().any(|error| is_another_kind(error, path))).collect();
    let tags: Vec<&'e ValidationError<'static>> = fitting.iter().filter_map(|form| tag(form, path)).collect();
    if let Some(first) = tags.first().copied()
        && tags.len() == fitting.len()
        && tags.iter().all(|error| error.instance_path() == first.instance_path())
    {
        return Meant::WrongTag(first, each_once(tags.iter().filter_map(|error| tagged(error))));
    }
    // A form with another tag was not intended, unless all have another tag. Of the rest, prefer
    // the form with the fewest missing names.
    let untagged: Vec<&'e Form> = fitting.iter().copied().filter(|form| tags.len() == fitting.len() || tag(form, path).is_none()).collect();
    let weight = |form: &Form| (form.iter().filter(|error| matches!(error.kind(), K::Required { .. })).count(), form.len());
    let Some(least) = untagged.iter().map(|form| weight(form)).min() else {
        let mut kinds = Vec::new();
        kinds_of(path, forms, &mut kinds);
        kinds.sort();
        kinds.dedup();
        return Meant::Types(kinds);
    };
    let near: Vec<&'e Form> = untagged.into_iter().filter(|form| weight(form) == least).collect();
    let lacking: Vec<Vec<String>> = near.iter().filter_map(|form| lacks(form, path)).collect();
    let nothing_else = lacking.len() == near.len();
    let groups = each_once(lacking.into_iter());
    match near.first().copied() {
        Some(form) if groups.len() < 2 || !nothing_else => Meant::Form(form),
        _ => Meant::MissingNames(groups),
    }
}

/// Removes duplicates and keeps the order.
fn each_once<T: PartialEq>(things: impl Iterator<Item = T>) -> Vec<T> {
    things.fold(Vec::new(), |mut all, thing| {
        if !all.contains(&thing) {
            all.push(thing);
        }
        all
    })
}

/// Returns whether the value itself has another type than a form requires.
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

/// Collects the types that the forms allow.
fn kinds_of(path: &str, forms: &[Vec<ValidationError<'static>>], kinds: &mut Vec<String>) {
    for error in forms.iter().flatten().filter(|error| is_another_kind(error, path)) {
        match error.kind() {
            K::AnyOf { context } | K::OneOfNotValid { context } => kinds_of(path, context, kinds),
            K::FalseSchema => {}
            _ => kinds.push(expected(error)),
        }
    }
}

/// Returns the error of the member that selects the form, which has a single allowed value.
fn tag<'e>(form: &'e Form, path: &str) -> Option<&'e ValidationError<'static>> {
    let is_member = |error: &&'e ValidationError<'static>| {
        let at = error.instance_path().to_string();
        at.strip_prefix(path).and_then(|rest| rest.strip_prefix('/')).is_some_and(|name| !name.contains('/'))
    };
    form.iter().filter(is_member).find(|error| tagged(error).is_some())
}

/// Returns the single value that an error allows.
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

/// Returns the missing names of a form if the value has no other error.
fn lacks(form: &Form, path: &str) -> Option<Vec<String>> {
    let name = |error: &ValidationError<'static>| match error.kind() {
        K::Required { property } if error.instance_path().to_string() == path => property.as_str().map(str::to_owned),
        _ => None,
    };
    form.iter().map(name).collect()
}
