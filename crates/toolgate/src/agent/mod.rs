//! Defines agents: named sets of tools with policies, hooks, limits and resources.

mod builder;
mod definition;
mod prompt_section;
mod subset;
mod tool_entry;
mod validate;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use ahash::HashMap;

pub use crate::agent::prompt_section::PromptSection;
pub use crate::agent::subset::AgentSubset;
pub(crate) use crate::agent::tool_entry::ToolEntry;
pub use builder::AgentBuilder;
pub use definition::AgentDefinition;

use crate::call::error::ErrorDialect;
use crate::files::Resources;
use crate::limits::Limits;
use crate::policy::{Diagnostic, EnforcementMode, Policy};
use crate::tool::ToolSpec;
use toolgate_json::{Digest, JsonBounds};

/// A set of tools with its policies, hooks, limits and resources. A client connects as one agent.
pub struct Agent {
    pub(crate) name: Arc<str>,
    pub(crate) tools: HashMap<Arc<str>, Arc<ToolEntry>>,
    pub(crate) tool_order: Vec<Arc<str>>,
    pub(crate) principals: Option<BTreeSet<String>>,
    pub(crate) limits: Limits,
    pub(crate) bounds: JsonBounds,
    pub(crate) max_output: usize,
    pub(crate) dialect: ErrorDialect,
    pub(crate) resources: Arc<Resources>,
    pub(crate) definition_digest: Digest,
    /// The text that `definition_digest` is the digest of.
    pub(crate) definition: Arc<str>,
    /// Sources whose values are tracked, if rules check provenance.
    pub(crate) tracked_sources: Option<BTreeSet<String>>,
    pub(crate) rules: Vec<Arc<dyn Policy>>,
    warnings: Vec<Diagnostic>,
}

impl Agent {
    /// Starts building an agent.
    pub fn builder(name: impl Into<Arc<str>>) -> AgentBuilder {
        AgentBuilder {
            name: name.into(),
            tools: Vec::new(),
            policies: Vec::new(),
            input_problems: Vec::new(),
            hooks: Vec::new(),
            description_overrides: BTreeMap::new(),
            principals: None,
            limits: Limits::default(),
            bounds: JsonBounds::default(),
            max_output: 64 * 1024,
            dialect: ErrorDialect::default(),
            resources: Resources::default(),
            is_prechecked: false,
        }
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Iterates over the tools in the order of declaration.
    pub fn tools(&self) -> impl Iterator<Item = &ToolSpec> {
        self.tool_order.iter().filter_map(|name| self.tools.get(name)).map(|tool| &tool.spec)
    }

    /// Checks whether a principal may use this agent.
    #[must_use]
    pub fn can_be_used_by(&self, principal: &str) -> bool {
        self.principals.as_ref().is_none_or(|allowed| allowed.contains(principal))
    }

    /// Iterates over the tools that a principal sees, in the order of declaration.
    pub fn tools_for<'a>(&'a self, principal: &'a str) -> impl Iterator<Item = &'a ToolSpec> {
        let is_visible = |tool: &&Arc<ToolEntry>| tool.is_visible_to(principal);
        self.tool_order
            .iter()
            .filter_map(|name| self.tools.get(name))
            .filter(is_visible)
            .map(|tool| &tool.spec)
    }

    /// Returns a tool.
    #[must_use]
    pub fn tool(&self, name: &str) -> Option<&ToolSpec> {
        self.tools.get(name).map(|tool| &tool.spec)
    }

    /// Returns a tool if the principal sees it.
    #[must_use]
    pub fn tool_for(&self, principal: &str, name: &str) -> Option<&ToolSpec> {
        self.tools.get(name).filter(|tool| tool.is_visible_to(principal)).map(|tool| &tool.spec)
    }

    /// Returns problems that do not prevent the agent from working.
    #[must_use]
    pub fn warnings(&self) -> &[Diagnostic] {
        &self.warnings
    }

    /// Renders the warnings with the lines of the policy files.
    #[must_use]
    pub fn render_warnings(&self, colours: bool) -> String {
        crate::policy::source::render_problems(&self.warnings, colours)
    }

    /// Returns the digest of the definition.
    ///
    /// Rules in files count with their text, policies and hooks in Rust by name.
    #[must_use]
    pub const fn digest(&self) -> Digest {
        self.definition_digest
    }

    /// Iterates over the names of the enforced rules.
    pub fn enforced_rules(&self) -> impl Iterator<Item = &str> {
        self.rules
            .iter()
            .filter(|rule| rule.mode() == EnforcementMode::Enforce)
            .map(|rule| rule.name())
    }

    /// Returns the time that decisions look back, or `None` if it is unlimited.
    #[must_use]
    pub fn lookback_window(&self) -> Option<jiff::SignedDuration> {
        let budgets = [&self.limits.session, &self.limits.principal];
        if budgets.iter().any(|budget| **budget != crate::limits::Budget::default()) {
            return None;
        }
        let rate = self
            .limits
            .rate
            .and_then(|rate| jiff::SignedDuration::try_from(rate.per).ok())
            .unwrap_or_default();
        self.rules.iter().try_fold(rate, |longest, rule| {
            rule.lookback_window().map(|window| window.max(longest))
        })
    }

    /// Copies the agent with other handlers and resources.
    pub(crate) fn with_tools(
        &self,
        tools: HashMap<Arc<str>, Arc<ToolEntry>>,
        resources: Resources,
    ) -> Self {
        Self {
            name: Arc::clone(&self.name),
            tools,
            tool_order: self.tool_order.clone(),
            principals: self.principals.clone(),
            limits: self.limits.clone(),
            bounds: self.bounds,
            max_output: self.max_output,
            dialect: self.dialect,
            resources: Arc::new(resources),
            definition_digest: self.definition_digest,
            definition: Arc::clone(&self.definition),
            tracked_sources: self.tracked_sources.clone(),
            rules: self.rules.clone(),
            warnings: Vec::new(),
        }
    }

    /// Returns the dialect of errors for the model.
    #[must_use]
    pub const fn dialect(&self) -> ErrorDialect {
        self.dialect
    }

    /// Returns the serialized definition; see [`AgentDefinition`].
    #[must_use]
    pub fn definition(&self) -> &str {
        &self.definition
    }

    /// Returns the sorted names of the tools that a principal sees.
    pub(crate) fn visible_names(&self, principal: &str) -> Vec<&str> {
        let mut names: Vec<&str> = self
            .tools
            .values()
            .filter(|t| t.is_visible_to(principal))
            .map(|t| t.spec.name())
            .collect();
        names.sort_unstable();
        names
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent")
            .field("name", &self.name)
            .field("tools", &self.tool_order)
            .finish_non_exhaustive()
    }
}

/// All problems of an agent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot build the agent `{agent}`:{}", .problems.iter().map(|p| format!("\n  - {p}")).collect::<String>())]
pub struct AgentBuildError {
    /// The agent.
    pub agent: String,
    /// The problems.
    pub problems: Vec<Diagnostic>,
}

impl AgentBuildError {
    /// Renders the problems with the lines of the policy files.
    #[must_use]
    pub fn render(&self, colours: bool) -> String {
        crate::policy::source::render_problems(&self.problems, colours)
    }
}
