//! Removes the names of tools that a caller cannot see from denials.

use crate::agent::Agent;
use crate::call::error::ToolError;
use crate::policy::{Policy, PolicyInput};

/// Returns the tools that a rule requires to succeed first: one of each group.
fn required_tools(rule: &dyn Policy, input: &PolicyInput<'_>) -> Vec<Vec<String>> {
    let groups = || {
        let after: Vec<Vec<String>> = rule
            .static_summary(input.tool)
            .prerequisites
            .into_iter()
            .map(|(_, group)| group.into_iter().map(str::to_owned).collect())
            .collect();
        // Requirements of specific calls are not part of the static summary.
        if after.is_empty() {
            let remedies = rule.suggest_prerequisites(input).unwrap_or_default();
            return vec![remedies.into_iter().map(|remedy| remedy.tool.to_string()).collect()];
        }
        after
    };
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(groups)).unwrap_or_default()
}

/// Removes tools that the caller cannot see from a denial that says which tools must come first.
///
/// Calling such a tool would fail with `unknown_tool`.
pub(super) fn hide_invisible_tools(
    mut error: ToolError,
    rule: &dyn Policy,
    input: &PolicyInput<'_>,
    agent: &Agent,
) -> ToolError {
    let is_seen = |tool: &String| {
        agent.tools.get(tool.as_str()).is_none_or(|tool| tool.is_visible_to(&input.key.principal))
    };
    // The names are masked like secrets are: wherever they occur as words, however the message is
    // worded.
    let is_name_character = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let names = |message: &str, tool: &str| {
        message.split(|c| !is_name_character(c)).any(|word| word == tool)
    };
    let mut groups = required_tools(rule, input);
    groups.retain(|group| group.iter().any(|tool| names(&error.message, tool)));
    if !groups.iter().flatten().any(|tool| !is_seen(tool) && names(&error.message, tool)) {
        return error;
    }
    groups.iter_mut().for_each(|group| group.retain(is_seen));
    let one_of = |group: &Vec<String>| {
        group.iter().map(|tool| format!("`{tool}`")).collect::<Vec<_>>().join(" or ")
    };
    error.message = if groups.iter().any(Vec::is_empty) {
        "a step that this caller cannot take must come first; tell the user".to_owned()
    } else {
        format!(
            "{} must have succeeded first in this session",
            groups.iter().map(one_of).collect::<Vec<_>>().join(" and ")
        )
    };
    error
}
