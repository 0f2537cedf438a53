//! Selects the intended form of a value that fits no form of `anyOf` or `oneOf`.

use jsonschema::ValidationError;
use jsonschema::error::ValidationErrorKind as K;

use crate::schema::messages::describe_expected;

/// The errors of a value in one form.
type FormErrors = [ValidationError<'static>];

/// States what to report for a value that fits none of the forms.
pub(crate) enum IntendedForm<'e> {
    /// This form was intended, so its errors are reported.
    Form(&'e FormErrors),
    /// The value has another type, and any of these is allowed.
    Types(Vec<String>),
    /// A member selects the form, but with none of these values. The error is one of that member.
    WrongTag(&'e ValidationError<'static>, Vec<String>),
    /// One of these groups of names is required, and none is present.
    MissingNames(Vec<Vec<String>>),
}

/// Determines which form of a value at a path was intended.
pub(crate) fn find_intended_form<'e>(
    path: &str,
    forms: &'e [Vec<ValidationError<'static>>],
) -> IntendedForm<'e> {
    let candidates: Vec<&'e FormErrors> = forms
        .iter()
        .map(Vec::as_slice)
        .filter(|form| !form.is_empty() && !form.iter().any(|error| is_type_mismatch(error, path)))
        .collect();
    let tags: Vec<&'e ValidationError<'static>> =
        candidates.iter().filter_map(|form| find_tag_error(form, path)).collect();
    if let Some(first) = tags.first().copied()
        && tags.len() == candidates.len()
        && tags.iter().all(|error| error.instance_path() == first.instance_path())
    {
        return IntendedForm::WrongTag(
            first,
            deduplicate(tags.iter().filter_map(|error| single_allowed_value(error))),
        );
    }
    // A form with another tag was not intended, unless all have another tag. Of the rest, prefer
    // the form with the fewest missing names.
    let untagged: Vec<&'e FormErrors> = candidates
        .iter()
        .copied()
        .filter(|form| tags.len() == candidates.len() || find_tag_error(form, path).is_none())
        .collect();
    let weight = |form: &FormErrors| {
        (form.iter().filter(|error| matches!(error.kind(), K::Required { .. })).count(), form.len())
    };
    let Some(least) = untagged.iter().map(|form| weight(form)).min() else {
        let mut kinds = Vec::new();
        collect_types(path, forms, &mut kinds);
        kinds.sort();
        kinds.dedup();
        return IntendedForm::Types(kinds);
    };
    let closest: Vec<&'e FormErrors> =
        untagged.into_iter().filter(|form| weight(form) == least).collect();
    let missing: Vec<Vec<String>> =
        closest.iter().filter_map(|form| missing_names(form, path)).collect();
    let has_only_missing = missing.len() == closest.len();
    let groups = deduplicate(missing.into_iter());
    match closest.first().copied() {
        Some(form) if groups.len() < 2 || !has_only_missing => IntendedForm::Form(form),
        _ => IntendedForm::MissingNames(groups),
    }
}

/// Removes duplicates and keeps the order.
fn deduplicate<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    items.fold(Vec::new(), |mut all, item| {
        if !all.contains(&item) {
            all.push(item);
        }
        all
    })
}

/// Returns whether the value itself has another type than a form requires.
fn is_type_mismatch(error: &ValidationError<'_>, path: &str) -> bool {
    let is_at_path = error.instance_path().to_string() == path;
    match error.kind() {
        K::Type { .. } | K::Constant { .. } | K::Enum { .. } | K::FalseSchema => is_at_path,
        K::AnyOf { context } | K::OneOfNotValid { context } => {
            is_at_path
                && context.iter().all(|form| form.iter().any(|error| is_type_mismatch(error, path)))
        }
        _ => false,
    }
}

/// Collects the types that the forms allow.
fn collect_types(path: &str, forms: &[Vec<ValidationError<'static>>], kinds: &mut Vec<String>) {
    for error in forms.iter().flatten().filter(|error| is_type_mismatch(error, path)) {
        match error.kind() {
            K::AnyOf { context } | K::OneOfNotValid { context } => {
                collect_types(path, context, kinds)
            }
            K::FalseSchema => {}
            _ => kinds.push(describe_expected(error)),
        }
    }
}

/// Returns the error of the member that selects the form, which has a single allowed value.
fn find_tag_error<'e>(form: &'e FormErrors, path: &str) -> Option<&'e ValidationError<'static>> {
    let is_member = |error: &&'e ValidationError<'static>| {
        let at = error.instance_path().to_string();
        at.strip_prefix(path)
            .and_then(|rest| rest.strip_prefix('/'))
            .is_some_and(|name| !name.contains('/'))
    };
    form.iter().filter(is_member).find(|error| single_allowed_value(error).is_some())
}

/// Returns the single value that an error allows.
fn single_allowed_value(error: &ValidationError<'_>) -> Option<String> {
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
fn missing_names(form: &FormErrors, path: &str) -> Option<Vec<String>> {
    let name = |error: &ValidationError<'static>| match error.kind() {
        K::Required { property } if error.instance_path().to_string() == path => {
            property.as_str().map(str::to_owned)
        }
        _ => None,
    };
    form.iter().map(name).collect()
}
