//! Loads the rules of the demo desk.

use toolgate::AgentBuilder;
use toolgate::policy::source::RuleSet;

/// Whether the rules are in force. A run without them shows what would leak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RuleEnforcement {
    Yes,
    #[cfg_attr(not(test), expect(dead_code, reason = "only a test disables the rules"))]
    No,
}

pub(crate) fn attach_rules(agent: AgentBuilder) -> AgentBuilder {
    agent.rules(RuleSet::parse("policy.toml", include_str!("policy.toml")))
}
