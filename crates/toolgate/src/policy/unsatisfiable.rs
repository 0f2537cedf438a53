//! Finds conditions that no argument and no result can meet according to the tools' schemas.

use serde_json::Value;

use super::cel::{Ty, of_schema};
use super::{Condition, Problem};
use crate::schema::{At, at, at_in};
use crate::tool::{Extra, Spec};
use toolgate_json::{Pointer, decimal_of};

/// The lint code of these problems.
pub(crate) const NEVER_TRUE: &str = "never_true";

/// Reports a condition that no argument of the governed tools can meet.
///
/// If one tool may meet the condition, or if a schema is not conclusive, there is no report.
pub(crate) fn never(field: &str, path: &Pointer, condition: &Condition, governed: &[&Spec]) -> Vec<Problem> {
    // A schema says nothing about the effect of a shell command.
    if matches!(condition, Condition::Runs(_) | Condition::Touches { .. }) {
        return Vec::new();
    }
    let kinds: Option<Vec<Ty>> = governed.iter().map(|tool| kind_at(tool, path)).collect();
    let (Some(kinds), Some(tool)) = (kinds, governed.first()) else { return Vec::new() };
    let told = |part: &str, what: &str| {
        let problem = Problem::at(format!("{field}.{part}"), format!("`{path}` of `{}` is never {what}", tool.name()));
        let allowed = kinds.first().map(allowed).unwrap_or_default();
        problem.help(format!("allowed by the schema: {allowed}")).warning().found_as(NEVER_TRUE)
    };
    match condition {
        // Check each value on its own, because a single one may be misspelled.
        Condition::In(values) => {
            let vain = values.iter().enumerate().filter(|(_, value)| !kinds.iter().any(|kind| may_be(kind, value)));
            let one = |(index, value): (usize, &Value)| {
                let problem = told(&format!("in.{index}"), &value.to_string());
                match (value, kinds.first()) {
                    (Value::String(text), Some(Ty::Text(Some(known)))) => problem.did_you_mean(text, known.iter()),
                    _ => problem,
                }
            };
            vain.map(one).collect()
        }
        other if kinds.iter().all(|kind| rules_out(kind, other)) => vec![told(word(other), &other.describe())],
        _ => Vec::new(),
    }
}

/// Reports a proved field that never has the required value, according to the output schema.
pub(crate) fn never_proved(field: &str, path: &Pointer, wanted: &Value, source: &Spec) -> Option<Problem> {
    let root = source.output_schema()?;
    let told = |what: &str| {
        let problem = Problem::at(field, format!("`{path}` in a result of `{}` is never {what}", source.name()));
        problem.warning().found_as(NEVER_TRUE)
    };
    match at_in(root, Extra::Pass, path) {
        At::Open => None,
        At::Missing(..) => Some(told("there").help("the output schema does not allow this field")),
        At::Known(schema) => {
            let kind = of_schema(schema, root, Extra::Pass);
            let never = || told(&wanted.to_string()).help(format!("allowed by the schema: {}", allowed(&kind)));
            (!may_be(&kind, wanted)).then(never)
        }
    }
}

/// Returns the type of an argument if its schema is simple enough.
fn kind_at(tool: &Spec, path: &Pointer) -> Option<Ty> {
    let At::Known(schema) = at(tool, path) else { return None };
    Some(of_schema(schema, tool.input_schema()?, tool.extra)).filter(|kind| *kind != Ty::Any)
}

/// Returns whether an argument of this type can have a value.
fn may_be(kind: &Ty, value: &Value) -> bool {
    match (kind, value) {
        // A nullable type is stored as its non-null type, so null is always possible.
        (Ty::Any, _) | (_, Value::Null) => true,
        (Ty::Bool(known), Value::Bool(value)) => known.is_none_or(|known| known == *value),
        (Ty::Number(low, high), Value::Number(_)) => {
            decimal_of(value).is_none_or(|number| low.is_none_or(|low| low <= number) && high.is_none_or(|high| number <= high))
        }
        (Ty::Text(known), Value::String(text)) => known.as_ref().is_none_or(|known| known.contains(text)),
        (Ty::List(_), Value::Array(_)) | (Ty::Object(..), Value::Object(_)) => true,
        _ => false,
    }
}

/// Returns whether a condition holds for no value of a type.
fn rules_out(kind: &Ty, condition: &Condition) -> bool {
    match (condition, kind) {
        (Condition::Above(limit), Ty::Number(_, Some(high))) => high <= limit,
        (Condition::Below(limit), Ty::Number(Some(low), _)) => low >= limit,
        (Condition::NotIn(_) | Condition::Glob(_) | Condition::Matches(_), Ty::Text(Some(known))) => {
            known.iter().all(|text| condition.holds(&Value::String(text.clone())) == Ok(false))
        }
        _ => false,
    }
}

/// Describes the values that a type allows.
fn allowed(kind: &Ty) -> String {
    match kind {
        Ty::Number(Some(low), Some(high)) => format!("between {low} and {high}"),
        Ty::Number(Some(low), None) => format!("at least {low}"),
        Ty::Number(None, Some(high)) => format!("at most {high}"),
        Ty::Text(Some(known)) => {
            format!("one of {}", known.iter().take(20).map(|text| format!("\"{text}\"")).collect::<Vec<_>>().join(", "))
        }
        Ty::Bool(Some(known)) => known.to_string(),
        other => other.kind().to_owned(),
    }
}

/// Reports a condition whose list of alternatives is empty.
pub(crate) fn of_nothing(field: &str, condition: &Condition) -> Option<Problem> {
    let is_empty = match condition {
        Condition::In(values) => values.is_empty(),
        Condition::Runs(names) | Condition::Touches { places: names, .. } => names.is_empty(),
        _ => false,
    };
    let problem = || Problem::at(format!("{field}.{}", word(condition)), "the list is empty, so the rule never applies");
    is_empty.then(|| problem().help("name at least one"))
}

/// Returns the key of a condition in a configuration file.
const fn word(condition: &Condition) -> &'static str {
    match condition {
        Condition::Above(_) => "above",
        Condition::Below(_) => "below",
        Condition::In(_) => "in",
        Condition::NotIn(_) => "not_in",
        Condition::Glob(_) => "glob",
        Condition::Matches(_) => "matches",
        Condition::Runs(_) => "runs",
        Condition::Touches { .. } => "touches",
    }
}
