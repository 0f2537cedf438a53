//! Parses the answers of hook programs, in the formats of toolgate and of coding agents.

use serde::Deserialize;
use serde_json::Value;

use crate::call::error::ErrorCategory;
use toolgate_text::escape_for_display;

/// The answer of a hook.
///
/// Unknown fields are ignored unless they look misspelled, because a hook may echo the whole event.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct HookProgramAnswer {
    pub(super) decision: Option<String>,
    pub(super) reason: Option<String>,
    pub(super) redirect_tool: Option<String>,
    pub(super) category: Option<ErrorCategory>,
    pub(super) code: Option<String>,
    #[serde(rename = "tool_input", alias = "updatedInput")]
    pub(super) input: Option<Value>,
    #[serde(rename = "tool_result", alias = "updatedResult")]
    pub(super) result: Option<Value>,
    /// The answer format of hooks of coding agents.
    pub(super) hook_specific_output: Option<CodingAgentHookAnswer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CodingAgentHookAnswer {
    permission_decision: Option<String>,
    permission_decision_reason: Option<String>,
    updated_input: Option<Value>,
    updated_tool_output: Option<Value>,
}

impl HookProgramAnswer {
    /// Merges both formats. The stricter decision counts; an unknown decision is kept so that it is
    /// rejected.
    pub(super) fn merge_formats(mut self) -> Self {
        let Some(specific) = self.hook_specific_output.take() else { return self };
        let strictness = |decision: &Option<String>| match decision.as_deref() {
            None => 0,
            Some("allow" | "approve") => 1,
            Some("ask") => 2,
            Some("deny" | "block") => 4,
            Some(_) => 3,
        };
        if strictness(&specific.permission_decision) > strictness(&self.decision) {
            self.decision = specific.permission_decision;
        }
        self.reason = specific.permission_decision_reason.or(self.reason);
        self.input = specific.updated_input.or(self.input);
        self.result = specific.updated_tool_output.or(self.result);
        self
    }

    /// Checks for a known field. An object without one is not an answer.
    pub(super) fn has_known_field(&self) -> bool {
        let plain = self.decision.is_some() || self.input.is_some() || self.result.is_some();
        let specific = |s: &CodingAgentHookAnswer| {
            s.permission_decision.is_some()
                || s.updated_input.is_some()
                || s.updated_tool_output.is_some()
        };
        plain || self.hook_specific_output.as_ref().is_some_and(specific)
    }
}

/// Fields of an answer, at its top level and in `hookSpecificOutput`, and of an event, which a hook
/// may echo.
const ANSWER_FIELDS: [&str; 10] = [
    "decision",
    "reason",
    "redirectTool",
    "category",
    "code",
    "tool_input",
    "updatedInput",
    "tool_result",
    "updatedResult",
    "hookSpecificOutput",
];
const SPECIFIC_OUTPUT_FIELDS: [&str; 4] =
    ["permissionDecision", "permissionDecisionReason", "updatedInput", "updatedToolOutput"];
const EVENT_FIELDS: [&str; 7] = [
    "hook_event_name",
    "session_id",
    "principal",
    "agent",
    "tool_use_id",
    "tool_name",
    "latency_ms",
];

/// Further fields that coding agents define.
const IGNORED_SPECIFIC_FIELDS: [&str; 3] =
    ["hookEventName", "additionalContext", "updatedMCPToolOutput"];

/// Finds a misspelled field, because ignoring it could turn a denial into an allowed call.
pub(super) fn find_misspelled_field(answer: &Value) -> Option<String> {
    let normalize = |name: &str| name.replace(['_', '-', ' '], "").to_ascii_lowercase();
    let find_in = |object: Option<&Value>, known: &[&str], others: &[&str]| {
        let names = object.and_then(Value::as_object).into_iter().flat_map(|object| object.keys());
        names
            .filter(|name| !known.contains(&name.as_str()) && !others.contains(&name.as_str()))
            .find_map(|name| {
                let meant = known.iter().find(|known| {
                    normalize(known) == normalize(name)
                        || toolgate_text::suggest::is_misspelling(known, name)
                })?;
                // If the correct field is present too, this one means something else.
                object?.get(meant).is_none().then_some(())?;
                Some(format!(
                    "unknown field `{}` in the answer; did you mean `{meant}`?",
                    escape_for_display(name)
                ))
            })
    };
    let specific = answer.get("hookSpecificOutput");
    find_in(Some(answer), &ANSWER_FIELDS, &EVENT_FIELDS)
        .or_else(|| find_in(specific, &SPECIFIC_OUTPUT_FIELDS, &IGNORED_SPECIFIC_FIELDS))
}

/// Describes an invalid answer without its values, which may be secret.
pub(super) fn describe_invalid_answer(answer: &Value) -> String {
    let no_text = |of: &Value, key: &str| {
        of.get(key).is_some_and(|value| !value.is_string() && !value.is_null())
    };
    let specific = answer.get("hookSpecificOutput").unwrap_or(&Value::Null);
    let plain =
        ["decision", "reason", "redirectTool", "code"].into_iter().find(|key| no_text(answer, key));
    let special = ["permissionDecision", "permissionDecisionReason"]
        .into_iter()
        .find(|key| no_text(specific, key));
    if let Some(key) = plain.or(special) {
        return format!("`{key}` must be a string");
    }
    if !specific.is_object() && !specific.is_null() {
        return "`hookSpecificOutput` must be an object".to_owned();
    }
    if answer
        .get("category")
        .is_some_and(|category| Option::<ErrorCategory>::deserialize(category).is_err())
    {
        return "`category` must be TRANSIENT, VALIDATION, PERMISSION or BUSINESS".to_owned();
    }
    "arguments or result are present twice".to_owned()
}
