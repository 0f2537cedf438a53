//! An agent: a named registry of tools with its policies, hooks, limits and resources, checked as a whole.

mod builder;
mod checks;
mod definition;
mod excerpt;
mod registered;
mod section;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use ahash::HashMap;

pub use builder::AgentBuilder;
pub use definition::Definition;
pub use excerpt::Excerpt;
pub(crate) use registered::Registered;
pub use section::Section;

use crate::error::Dialect;
use crate::json::{Bounds, Digest};
use crate::limits::Limits;
use crate::policy::{Mode, Policy, Problem};
use crate::resource::Resources;
use crate::tool::Spec;

/// An agent. Clients connect as one.
pub struct Agent {
    pub(crate) name: Arc<str>,
    pub(crate) tools: HashMap<Arc<str>, Arc<Registered>>,
    pub(crate) order: Vec<Arc<str>>,
    pub(crate) principals: Option<BTreeSet<String>>,
    pub(crate) limits: Limits,
    pub(crate) bounds: Bounds,
    pub(crate) max_output: usize,
    pub(crate) dialect: Dialect,
    pub(crate) resources: Arc<Resources>,
    pub(crate) config: Digest,
    /// What the digest is of.
    pub(crate) definition: Arc<str>,
    /// The sources whose values are remembered, where rules ask where values come from.
    pub(crate) watched: Option<BTreeSet<String>>,
    pub(crate) rules: Vec<Arc<dyn Policy>>,
    warnings: Vec<Problem>,
}

impl Agent {
    /// Starts an agent.
    pub fn builder(name: impl Into<Arc<str>>) -> AgentBuilder {
        AgentBuilder {
            name: name.into(),
            tools: Vec::new(),
            policies: Vec::new(),
            unreadable: Vec::new(),
            hooks: Vec::new(),
            overrides: BTreeMap::new(),
            principals: None,
            limits: Limits::default(),
            bounds: Bounds::default(),
            max_output: 64 * 1024,
            dialect: Dialect::default(),
            resources: Resources::default(),
            known: false,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its tools in the order of declaration.
    pub fn tools(&self) -> impl Iterator<Item = &Spec> {
        self.order.iter().filter_map(|name| self.tools.get(name)).map(|tool| &tool.spec)
    }

    /// Whether a principal may act as it.
    #[must_use]
    pub fn admits(&self, principal: &str) -> bool {
        self.principals.as_ref().is_none_or(|who| who.contains(principal))
    }

    /// The tools that a principal sees, in the order of declaration.
    pub fn tools_for<'a>(&'a self, principal: &'a str) -> impl Iterator<Item = &'a Spec> {
        let seen = |tool: &&Arc<Registered>| tool.is_visible_to(principal);
        self.order.iter().filter_map(|name| self.tools.get(name)).filter(seen).map(|tool| &tool.spec)
    }

    /// One of its tools.
    #[must_use]
    pub fn tool(&self, name: &str) -> Option<&Spec> {
        self.tools.get(name).map(|tool| &tool.spec)
    }

    /// One of its tools, where a principal sees it.
    #[must_use]
    pub fn tool_for(&self, principal: &str, name: &str) -> Option<&Spec> {
        self.tools.get(name).filter(|tool| tool.is_visible_to(principal)).map(|tool| &tool.spec)
    }

    /// What somebody should look at, though it does not keep the agent from working.
    #[must_use]
    pub fn warnings(&self) -> &[Problem] {
        &self.warnings
    }

    /// The warnings as a person reads them, with the lines of the policy files they stand in.
    #[must_use]
    pub fn render_warnings(&self, colours: bool) -> String {
        crate::config::render(&self.warnings, colours)
    }

    /// Digest of its definition. Rules take part with all they say, policies and hooks written in Rust by name.
    #[must_use]
    pub const fn digest(&self) -> Digest {
        self.config
    }

    /// The names of its rules whose word counts.
    pub fn enforced_rules(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().filter(|rule| rule.mode() == Mode::Enforce).map(|rule| rule.name())
    }

    /// How far back what it decides on may lie; `None` is without end.
    #[must_use]
    pub fn looks_back(&self) -> Option<jiff::SignedDuration> {
        let budgets = [&self.limits.session, &self.limits.principal];
        if budgets.iter().any(|budget| **budget != crate::limits::Budget::default()) {
            return None;
        }
        let rate = self.limits.rate.and_then(|rate| jiff::SignedDuration::try_from(rate.per).ok()).unwrap_or_default();
        self.rules.iter().try_fold(rate, |longest, rule| rule.looks_back().map(|window| window.max(longest)))
    }

    /// The same agent with other tools behind its names.
    pub(crate) fn with(&self, tools: HashMap<Arc<str>, Arc<Registered>>, resources: Resources) -> Self {
        Self {
            name: Arc::clone(&self.name),
            tools,
            order: self.order.clone(),
            principals: self.principals.clone(),
            limits: self.limits.clone(),
            bounds: self.bounds,
            max_output: self.max_output,
            dialect: self.dialect,
            resources: Arc::new(resources),
            config: self.config,
            definition: Arc::clone(&self.definition),
            watched: self.watched.clone(),
            rules: self.rules.clone(),
            warnings: Vec::new(),
        }
    }

    /// How errors are written for its model.
    #[must_use]
    pub const fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Its definition as it is written down; see [`Definition`].
    #[must_use]
    pub fn definition(&self) -> &str {
        &self.definition
    }

    /// The sorted names of the tools that a principal sees.
    pub(crate) fn visible_names(&self, principal: &str) -> Vec<&str> {
        let mut names: Vec<&str> = self.tools.values().filter(|t| t.is_visible_to(principal)).map(|t| t.spec.name()).collect();
        names.sort_unstable();
        names
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("name", &self.name).field("tools", &self.order).finish_non_exhaustive()
    }
}

/// Everything that is wrong with an agent, all at once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("agent `{agent}` cannot be built:{}", .problems.iter().map(|p| format!("\n  - {p}")).collect::<String>())]
pub struct BuildError {
    /// The agent.
    pub agent: String,
    /// What is wrong.
    pub problems: Vec<Problem>,
}

impl BuildError {
    /// The problems as a person reads them, with the lines of the policy files they stand in.
    #[must_use]
    pub fn render(&self, colours: bool) -> String {
        crate::config::render(&self.problems, colours)
    }
}
