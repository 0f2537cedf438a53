//! Writes the rules of this crate as text, so that a changed rule changes the digest of its agent.
//!
//! The text is stored and hashed. It must not depend on how Rust types are named or printed, so
//! each part is written out here.

use jiff::SignedDuration;
use serde_json::{Value, json};

use super::{Condition, RuleDenial, ToolNames};
use toolgate_json::Pointer;

/// Returns the definition of a rule: its type and its parts as canonical JSON.
pub(super) fn definition(rule: &str, parts: &Value) -> String {
    let definition = json!({ "rule": rule, "parts": parts });
    String::from_utf8_lossy(&toolgate_json::to_canonical_bytes(&definition)).into_owned()
}

pub(super) fn names(tools: &ToolNames) -> Value {
    tools.iter().map(|name| Value::from(&**name)).collect()
}

pub(super) fn pointer(path: &Pointer) -> Value {
    path.to_string().into()
}

pub(super) fn duration(duration: SignedDuration) -> Value {
    duration.to_string().into()
}

pub(super) fn refusal(refusal: &RuleDenial) -> Value {
    json!({
        "reason": refusal.reason,
        "category": refusal.category,
        "code": refusal.code,
        "redirect": refusal.redirect,
    })
}

pub(super) fn conditions(conditions: &[(Pointer, Condition)]) -> Value {
    conditions.iter().map(|(path, of)| json!([path.to_string(), condition(of)])).collect()
}

fn condition(condition: &Condition) -> Value {
    match condition {
        Condition::Above(bound) => json!({ "above": bound.to_string() }),
        Condition::Below(bound) => json!({ "below": bound.to_string() }),
        Condition::In(values) => json!({ "in": values }),
        Condition::NotIn(values) => json!({ "not_in": values }),
        Condition::Glob(pattern) => json!({ "glob": pattern }),
        Condition::Matches(pattern) => json!({ "matches": pattern.as_str() }),
        Condition::Runs(patterns) => json!({ "runs": patterns }),
        Condition::Touches { places, lenient, trees, whole, from } => json!({
            "touches": places, "lenient": lenient, "trees": trees, "whole": whole, "from": from,
        }),
    }
}
