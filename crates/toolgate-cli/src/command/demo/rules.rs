//! The desk's rules, from a file.

use toolgate::AgentBuilder;
use toolgate::config::Rules;

/// Whether the rules are in force. Without them the books show what would leak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Enforced {
    Yes,
    #[cfg_attr(not(test), expect(dead_code, reason = "only a test runs the desk without its rules"))]
    No,
}

pub(super) fn attach(agent: AgentBuilder) -> AgentBuilder {
    agent.rules(Rules::parse("policy.toml", include_str!("policy.toml")))
}
