//! Serializes an agent for the ledger, so that recorded decisions can be repeated later.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Agent, AgentBuildError, AgentBuilder, ToolEntry};
use crate::files::MemoryFs;
use crate::hook::Hook;
use crate::limits::{Budget, Limits};
use crate::policy::source::{PolicyScope, SourcedRule};
use crate::policy::{EnforcementMode, Policy, PolicyError, PolicyInput, Verdict};
use crate::tool::{Tool, ToolSpec};
use toolgate_json::JsonBounds;

/// The serialized form of an agent.
///
/// It contains all declarations of tools and the text of policy files. Rules and hooks that were
/// written in Rust are contained by name only. An agent that is built from its definition cannot
/// run them and reports that.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AgentDefinition {
    agent: Arc<str>,
    tools: Vec<DefinitionTool>,
    policies: Vec<DefinitionFile>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    in_code: Vec<DefinitionCodeRule>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    hooks: Vec<DefinitionHook>,
    limits: Limits,
    bounds: JsonBounds,
    principals: Option<BTreeSet<String>>,
    max_output: usize,
    files: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct DefinitionTool {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    section: Option<String>,
    spec: ToolSpec,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct DefinitionFile {
    name: String,
    text: String,
}

impl DefinitionFile {
    /// Checks for rules that toolgate adds together with the tools.
    fn is_built_in(&self) -> bool {
        self.name == "(built in)"
    }

    /// Checks for built-in rules that protect toolgate itself.
    fn has_protective_rules(&self) -> bool {
        self.is_built_in()
            && self
                .text
                .contains(&format!("name = \"{}", crate::policy::source::BUILT_IN_RULE_PREFIX))
    }
}

/// A rule that was written in Rust.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct DefinitionCodeRule {
    name: String,
    says: String,
    governs: Vec<Arc<str>>,
    #[serde(default)]
    mode: EnforcementMode,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct DefinitionHook {
    name: String,
    tools: Vec<Arc<str>>,
}

impl AgentDefinition {
    /// Parses a definition.
    ///
    /// # Errors
    /// The text is not a definition.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Returns the agent's name.
    #[must_use]
    pub fn agent(&self) -> &str {
        &self.agent
    }

    /// Iterates over its tools.
    pub fn tools(&self) -> impl Iterator<Item = &ToolSpec> {
        self.tools.iter().map(|placed| &placed.spec)
    }

    /// Replaces the policy files.
    ///
    /// Built-in rules stay: those that protect toolgate, and the approval of undeclared tools.
    #[must_use]
    pub fn with_policies(mut self, files: impl IntoIterator<Item = (String, String)>) -> Self {
        self.policies.retain(DefinitionFile::is_built_in);
        self.policies
            .splice(0..0, files.into_iter().map(|(name, text)| DefinitionFile { name, text }));
        self
    }

    /// Applies the rules, limits and tools of a new definition.
    ///
    /// This definition still decides whether the client runs a tool. It also keeps the schemas of
    /// tools whose upstream the new definition has never seen.
    #[must_use]
    pub fn with_update(self, new: Self) -> Self {
        let mut before = self.tools;
        let mut tools: Vec<DefinitionTool> = new.tools;
        for placed in &mut tools {
            let Some(at) = before.iter().position(|known| known.spec.name == placed.spec.name)
            else {
                continue;
            };
            let (known, spec) = (before.swap_remove(at).spec, &mut placed.spec);
            spec.external = known.external;
            let unseen = spec
                .input
                .as_ref()
                .is_some_and(|input| *input == serde_json::json!({"type": "object"}));
            if unseen && !spec.external {
                (spec.input, spec.output) =
                    (known.input.or(spec.input.take()), spec.output.take().or(known.output));
            }
        }
        // Rules that protect toolgate may name removed tools. Keep these tools, visible to no
        // principal.
        tools.extend(before.into_iter().map(|mut placed| {
            (placed.spec.visible_to, placed.spec.open) = (Some(BTreeSet::new()), true);
            placed
        }));
        let policies = new
            .policies
            .into_iter()
            .chain(self.policies.into_iter().filter(DefinitionFile::has_protective_rules))
            .collect();
        Self {
            tools,
            policies,
            limits: new.limits,
            principals: new.principals,
            bounds: new.bounds,
            ..self
        }
    }

    /// Checks that no rule was written in Rust and that the agent has no files.
    pub(crate) fn has_only_file_rules(&self) -> bool {
        self.in_code.is_empty() && !self.files
    }

    /// Lists the names and texts of the policy files.
    pub(crate) fn files(&self) -> Vec<(&str, &str)> {
        self.policies.iter().map(|file| (file.name.as_str(), file.text.as_str())).collect()
    }

    /// Keeps only these tools, and replaces the policy files by one.
    pub(crate) fn retain_tools(mut self, tools: &HashSet<&str>, policies: String) -> Self {
        self.tools.retain(|placed| tools.contains(placed.spec.name()));
        self.hooks.clear();
        self.policies = vec![DefinitionFile { name: "(excerpt)".to_owned(), text: policies }];
        self
    }

    /// Builds the agent without handlers, for replay and never for calls.
    ///
    /// # Errors
    /// The rules have problems.
    pub fn build(self) -> Result<Agent, AgentBuildError> {
        self.builder().build()
    }

    /// Builds an agent that was built before, without checks and without its own digest.
    pub(crate) fn build_prechecked(self) -> Result<Agent, AgentBuildError> {
        AgentBuilder { is_prechecked: true, ..self.builder() }.build()
    }

    fn builder(self) -> AgentBuilder {
        let files: Vec<(&str, &str)> =
            self.policies.iter().map(|file| (file.name.as_str(), file.text.as_str())).collect();
        let rules = crate::policy::source::parse_recorded_rules(&self.agent, &files);
        // Earlier versions accepted these limits without effect. Ignore them to decide as they did.
        let rate = self.limits.rate.filter(|rate| !rate.per.is_zero());
        let limits = Limits {
            principal: Budget { wall: None, ..self.limits.principal },
            rate,
            ..self.limits
        };
        let mut builder = Agent::builder(Arc::clone(&self.agent))
            .rules(rules)
            .limits(limits)
            .bounds(self.bounds)
            .max_output(self.max_output);
        builder.principals = self.principals;
        if self.files {
            builder = builder.files(MemoryFs::default());
        }
        for rule in self.in_code {
            builder.policies.push(SourcedRule::from_code(
                PolicyScope::Agent,
                Arc::new(UnavailableCodeRule(rule)),
            ));
        }
        for hook in self.hooks {
            builder = builder.hook(hook);
        }
        for DefinitionTool { section, spec } in self.tools {
            builder.tools.push((section, Tool::without_handler(spec)));
        }
        builder
    }
}

impl AgentBuilder {
    pub(crate) fn definition(&self, tools: &[(Option<String>, Arc<ToolEntry>)]) -> AgentDefinition {
        let mut files: Vec<(&str, &str)> = Vec::new();
        for (name, text) in self.policies.iter().filter_map(SourcedRule::file) {
            // Rules of one file share its text, so comparing pointers is usually enough.
            if !files
                .iter()
                .any(|(known, same)| *known == name && (std::ptr::eq(*same, text) || *same == text))
            {
                files.push((name, text));
            }
        }
        let policies = files
            .into_iter()
            .map(|(name, text)| DefinitionFile { name: name.to_owned(), text: text.to_owned() })
            .collect();
        let governs = |policy: &Arc<dyn Policy>| {
            let governs_tool = |tool: &&(Option<String>, Arc<ToolEntry>)| {
                tool.1.governed_by.iter().any(|attached| Arc::ptr_eq(&attached.policy, policy))
            };
            tools.iter().filter(governs_tool).map(|(_, tool)| Arc::clone(&tool.spec.name)).collect()
        };
        let in_code = self.policies.iter().filter(|rule| !rule.is_from_file()).map(|rule| {
            DefinitionCodeRule {
                name: rule.policy.name().to_owned(),
                says: rule.policy.definition(),
                governs: governs(&rule.policy),
                mode: rule.policy.mode(),
            }
        });
        let hooked = |hook: &Arc<dyn Hook>| DefinitionHook {
            name: hook.name().to_owned(),
            tools: tools
                .iter()
                .map(|(_, tool)| &tool.spec.name)
                .filter(|name| hook.matches(name))
                .cloned()
                .collect(),
        };
        AgentDefinition {
            agent: Arc::clone(&self.name),
            tools: tools
                .iter()
                .map(|(section, tool)| DefinitionTool {
                    section: section.clone(),
                    spec: tool.spec.clone(),
                })
                .collect(),
            policies,
            in_code: in_code.collect(),
            hooks: self.hooks.iter().map(hooked).collect(),
            limits: self.limits.clone(),
            bounds: self.bounds,
            principals: self.principals.clone(),
            max_output: self.max_output,
            files: self.resources.files().is_some(),
        }
    }
}

/// Replaces a rule that was written in Rust; its decision is unknown.
struct UnavailableCodeRule(DefinitionCodeRule);

impl Policy for UnavailableCodeRule {
    fn name(&self) -> &str {
        &self.0.name
    }
    fn governs(&self, tool: &ToolSpec) -> bool {
        self.0.governs.iter().any(|name| **name == *tool.name())
    }
    fn definition(&self) -> String {
        self.0.says.clone()
    }
    fn mode(&self) -> EnforcementMode {
        self.0.mode
    }
    fn check(&self, ask: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        // An observing rule decides nothing.
        if self.0.mode == EnforcementMode::Observe {
            return Ok(Verdict::allow());
        }
        ask.facts.watch.record_missing(|| {
            format!("the rule `{}` was written in Rust and is not available here", self.0.name)
        });
        Err(PolicyError("the rule was written in Rust and is not available here".to_owned()))
    }
}

#[async_trait::async_trait]
impl Hook for DefinitionHook {
    fn name(&self) -> &str {
        &self.name
    }
    fn matches(&self, tool: &str) -> bool {
        self.tools.iter().any(|name| **name == *tool)
    }
}
