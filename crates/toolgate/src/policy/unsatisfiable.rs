//! Finds conditions that no argument and no result can meet according to the tools' schemas.

use serde_json::Value;

use super::cel::{CelType, type_of_schema};
use super::{Condition, Diagnostic};
use crate::schema::{SchemaLookup, lookup_input, lookup_schema};
use crate::tool::{ExtraArguments, ToolSpec};
use toolgate_json::{Pointer, decimal_of};

/// The lint code of these problems.
pub(crate) const NEVER_TRUE_LINT: &str = "never_true";

/// Reports a condition that no argument of the governed tools can meet.
///
/// If one tool may meet the condition, or if a schema is not conclusive, the result is empty.
pub(crate) fn check_satisfiable(
    field: &str,
    path: &Pointer,
    condition: &Condition,
    governed: &[&ToolSpec],
) -> Vec<Diagnostic> {
    // A schema says nothing about the effect of a shell command.
    if matches!(condition, Condition::Runs(_) | Condition::Touches { .. }) {
        return Vec::new();
    }
    let kinds: Option<Vec<CelType>> =
        governed.iter().map(|tool| argument_type(tool, path)).collect();
    let (Some(kinds), Some(tool)) = (kinds, governed.first()) else { return Vec::new() };
    let problem_for = |part: &str, value: &str| {
        let problem = Diagnostic::at_field(
            format!("{field}.{part}"),
            format!("`{path}` of `{}` is never {value}", tool.name()),
        );
        let allowed = kinds.first().map(describe_allowed_values).unwrap_or_default();
        problem
            .with_help(format!("allowed by the schema: {allowed}"))
            .into_warning()
            .with_lint_code(NEVER_TRUE_LINT)
    };
    match condition {
        // Check each value on its own, because a single one may be misspelled.
        Condition::In(values) => {
            let impossible = values
                .iter()
                .enumerate()
                .filter(|(_, value)| !kinds.iter().any(|kind| can_have_value(kind, value)));
            let explain = |(index, value): (usize, &Value)| {
                let problem = problem_for(&format!("in.{index}"), &value.to_string());
                match (value, kinds.first()) {
                    (Value::String(text), Some(CelType::Text(Some(known)))) => {
                        problem.with_suggestion(text, known.iter())
                    }
                    _ => problem,
                }
            };
            impossible.map(explain).collect()
        }
        other if kinds.iter().all(|kind| is_excluded(kind, other)) => {
            vec![problem_for(condition_key(other), &other.describe())]
        }
        _ => Vec::new(),
    }
}

/// Reports a proved field that never has the required value, according to the output schema.
pub(crate) fn check_evidence_satisfiable(
    field: &str,
    path: &Pointer,
    required: &Value,
    source: &ToolSpec,
) -> Option<Diagnostic> {
    let root = source.output_schema()?;
    let problem_for = |value: &str| {
        let problem = Diagnostic::at_field(
            field,
            format!("`{path}` in a result of `{}` is never {value}", source.name()),
        );
        problem.into_warning().with_lint_code(NEVER_TRUE_LINT)
    };
    match lookup_schema(root, ExtraArguments::Pass, path) {
        SchemaLookup::Open => None,
        SchemaLookup::Missing(..) => {
            Some(problem_for("there").with_help("the output schema does not allow this field"))
        }
        SchemaLookup::Known(schema) => {
            let kind = type_of_schema(schema, root, ExtraArguments::Pass);
            let never = || {
                problem_for(&required.to_string())
                    .with_help(format!("allowed by the schema: {}", describe_allowed_values(&kind)))
            };
            (!can_have_value(&kind, required)).then(never)
        }
    }
}

/// Returns the type of an argument if its schema is simple enough.
fn argument_type(tool: &ToolSpec, path: &Pointer) -> Option<CelType> {
    let SchemaLookup::Known(schema) = lookup_input(tool, path) else { return None };
    Some(type_of_schema(schema, tool.input_schema()?, tool.extra))
        .filter(|kind| *kind != CelType::Any)
}

/// Returns whether an argument of this type can have a value.
fn can_have_value(kind: &CelType, value: &Value) -> bool {
    match (kind, value) {
        // A nullable type is stored as its non-null type, so null is always possible.
        (CelType::Any, _) | (_, Value::Null) => true,
        (CelType::Bool(known), Value::Bool(value)) => known.is_none_or(|known| known == *value),
        (CelType::Number(low, high), Value::Number(_)) => decimal_of(value).is_none_or(|number| {
            low.is_none_or(|low| low <= number) && high.is_none_or(|high| number <= high)
        }),
        (CelType::Text(known), Value::String(text)) => {
            known.as_ref().is_none_or(|known| known.contains(text))
        }
        (CelType::List(_), Value::Array(_)) | (CelType::Object(..), Value::Object(_)) => true,
        _ => false,
    }
}

/// Returns whether a condition holds for no value of a type.
fn is_excluded(kind: &CelType, condition: &Condition) -> bool {
    match (condition, kind) {
        (Condition::Above(limit), CelType::Number(_, Some(high))) => high <= limit,
        (Condition::Below(limit), CelType::Number(Some(low), _)) => low >= limit,
        (
            Condition::NotIn(_) | Condition::Glob(_) | Condition::Matches(_),
            CelType::Text(Some(known)),
        ) => {
            known.iter().all(|text| condition.is_met_by(&Value::String(text.clone())) == Ok(false))
        }
        _ => false,
    }
}

/// Describes the values that a type allows.
fn describe_allowed_values(kind: &CelType) -> String {
    match kind {
        CelType::Number(Some(low), Some(high)) => format!("between {low} and {high}"),
        CelType::Number(Some(low), None) => format!("at least {low}"),
        CelType::Number(None, Some(high)) => format!("at most {high}"),
        CelType::Text(Some(known)) => {
            format!(
                "one of {}",
                known
                    .iter()
                    .take(20)
                    .map(|text| format!("\"{text}\""))
                    .collect::<Vec<_>>()
                    .join(", ")
            )
        }
        CelType::Bool(Some(known)) => known.to_string(),
        other => other.type_name().to_owned(),
    }
}

/// Reports a condition whose list of alternatives is empty.
pub(crate) fn check_alternatives(field: &str, condition: &Condition) -> Option<Diagnostic> {
    let is_empty = match condition {
        Condition::In(values) => values.is_empty(),
        Condition::Runs(names) | Condition::Touches { places: names, .. } => names.is_empty(),
        _ => false,
    };
    let problem = || {
        Diagnostic::at_field(
            format!("{field}.{}", condition_key(condition)),
            "the list is empty, so the rule never applies",
        )
    };
    is_empty.then(|| problem().with_help("name at least one"))
}

/// Returns the key of a condition in a configuration file.
const fn condition_key(condition: &Condition) -> &'static str {
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
