//! Builds an agent without the upstream tools that do not fit its configuration, so that no
//! upstream can keep the rest of the agent from working.
//!
//! A rule that names a tool which its upstream does not offer quarantines all tools of that
//! upstream until the rule is corrected. Names are never matched by likeness.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::json;

use crate::agent_config::{AgentConfig, ToolConfig};
use crate::tool_backend::ToolBackend;
use crate::unusable_tool::{UnusableTool, UnusableToolHandler, UpstreamInventory};
use crate::upstream_config::{UndeclaredToolPolicy, UpstreamConfig};
use toolgate::agent::Agent;
use toolgate::hook::{CommandHook, Hook};
use toolgate::policy::{Diagnostic, Severity, SourceSpan};
use toolgate::tool::name::{is_tool_name, map_characters};
use toolgate::tool::{Effect, Handler, Tool};

/// Builds that quarantine only the tools a problem is about. Later builds quarantine all upstream
/// tools.
const MAX_SELECTIVE_BUILDS: u32 = 4;
/// Builds before the errors are returned.
const MAX_BUILDS: u32 = 12;

/// Describes the upstreams of a configuration and what they offer.
pub(crate) struct UpstreamSources<'s> {
    pub(crate) upstreams: &'s [UpstreamConfig],
    pub(crate) inventory: &'s UpstreamInventory,
    /// The whole configuration file, for problems without a place of their own.
    pub(crate) file_span: &'s SourceSpan,
    /// True if the configuration has one agent only.
    pub(crate) has_single_agent: bool,
}

/// Says why a tool that the configuration names does not exist.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MissingToolReason {
    /// Its upstream has never been connected.
    UpstreamNeverSeen,
    /// Its upstream offers the tool, and the tool is quarantined.
    Quarantined,
    /// Its upstream does not offer the tool.
    NotOffered,
}

/// Returns the prefix of the names under which models know the tools of an upstream.
fn prefix_of(upstream: &UpstreamConfig) -> String {
    map_characters(&upstream.prefix).collect()
}

/// Builds one agent, and quarantines tools until the rest of the agent builds.
pub(crate) struct UpstreamMatcher<'f> {
    declared: AgentConfig,
    sources: &'f UpstreamSources<'f>,
    /// Placeholders for tools that the configuration names and that do not exist.
    placeholders: BTreeSet<String>,
    /// Quarantined tools, each with a copy that holds nothing its upstream says; `None` if the copy
    /// is in use.
    quarantined: BTreeMap<String, Option<Tool>>,
    /// Tools that keep their own refusing handler.
    refused: BTreeSet<String>,
    unusable_tools: Vec<UnusableTool>,
}

impl<'f> UpstreamMatcher<'f> {
    pub(crate) fn new(declared: AgentConfig, sources: &'f UpstreamSources<'f>) -> Self {
        let (quarantined, awaited, refused) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Self {
            declared,
            sources,
            placeholders: awaited,
            quarantined,
            refused,
            unusable_tools: Vec::new(),
        }
    }

    /// Builds the agent, or returns the problems of the configuration itself.
    pub(crate) fn build(
        mut self,
        script: Option<&Arc<dyn Handler>>,
    ) -> Result<(Agent, Vec<UnusableTool>), Vec<Diagnostic>> {
        self.postpone_hooks();
        let mut builds = 0;
        loop {
            let problems = match self.declared.clone().build(script, &self.refused, true) {
                Ok(agent) => return Ok((agent, self.unusable_tools)),
                Err(problems) => problems,
            };
            builds += 1;
            let added = self.add_placeholders(&problems);
            // Without running tools, for example in `toolgate lint`, a person wants to see every
            // problem.
            let quarantined = self.sources.inventory.is_live
                && self.quarantine_culprits(&problems, builds > MAX_SELECTIVE_BUILDS);
            if !(added || quarantined) || builds >= MAX_BUILDS {
                return Err(problems);
            }
        }
    }

    /// Adds a placeholder for each unknown tool that an upstream could offer, so that the rules for
    /// it hold from the moment it appears. Returns whether it added any.
    fn add_placeholders(&mut self, problems: &[Diagnostic]) -> bool {
        let mut added = false;
        for problem in problems.iter().filter(|problem| problem.severity == Severity::Error) {
            let Some(name) = problem.unknown_tool.as_deref() else { continue };
            let Some((upstream, reason)) = self.find_upstream(name) else { continue };
            let explanation = match reason {
                MissingToolReason::UpstreamNeverSeen => {
                    "its upstream has never been connected; the rule holds from the moment the tool appears"
                }
                MissingToolReason::Quarantined => {
                    "the tool is quarantined; see `toolgate upstream list`"
                }
                MissingToolReason::NotOffered => {
                    "its upstream does not offer the tool; all tools of this upstream are quarantined until the name is corrected"
                }
            };
            let message = format!("{}: {explanation}", problem.message);
            let explained = Diagnostic { message: message.clone(), ..problem.clone() };
            if reason == MissingToolReason::NotOffered {
                for upstream in self.candidate_upstreams(name) {
                    self.quarantine_upstream(&upstream.name, &explained);
                }
            }
            self.declared
                .rules
                .problems
                .push(Diagnostic { unknown_tool: None, ..explained.clone() }.into_warning());
            if self.placeholders.insert(name.to_owned()) {
                let tool = UnusableTool {
                    agent: self.declared.name.clone(),
                    name: name.to_owned(),
                    upstream: upstream.name.clone(),
                    tool: name.to_owned(),
                    reason: explained.to_string(),
                    is_awaited: reason != MissingToolReason::NotOffered,
                };
                let place = problem
                    .span
                    .as_ref()
                    .or(upstream.span.as_ref())
                    .unwrap_or(self.sources.file_span)
                    .clone();
                self.insert_placeholder(upstream, tool, place);
                added = true;
            }
        }
        added
    }

    /// Leaves out hooks for tools of upstreams that have never been connected. They apply as soon
    /// as such a tool appears.
    fn postpone_hooks(&mut self) {
        let (declared, seen) = (&self.declared, &self.sources.inventory.quarantined_by_upstream);
        let quarantined: Vec<&String> = self
            .undeclared_sources()
            .filter_map(|upstream| seen.get(&upstream.name))
            .flatten()
            .collect();
        let may_appear = |pattern: &String| {
            self.undeclared_sources().any(|upstream| {
                match pattern.strip_prefix(&prefix_of(upstream)) {
                    // The pattern means every tool of the upstream.
                    Some("*") => !upstream.prefix.is_empty(),
                    Some(rest) => !rest.starts_with('*') && !seen.contains_key(&upstream.name),
                    None => false,
                }
            })
        };
        let is_postponed = |hook: &CommandHook| {
            let matches = |tool: &str| hook.matches(tool);
            let has_own_name =
                declared.hooks.iter().filter(|other| other.name() == hook.name()).count() == 1
                    && declared
                        .rules
                        .sourced_rules()
                        .all(|written| written.policy.name() != hook.name());
            let may_match = hook.matchers().iter().all(may_appear)
                || quarantined.iter().any(|tool| matches(tool));
            may_match
                && has_own_name
                && !declared.tools.iter().any(|entry| matches(entry.tool.spec().name()))
        };
        let (later, now): (Vec<CommandHook>, Vec<CommandHook>) =
            declared.hooks.iter().cloned().partition(is_postponed);
        for hook in &later {
            let message = format!(
                "the hook `{}` matches no tool that an upstream offers now; it applies as soon as one appears",
                hook.name()
            );
            let place = self
                .declared
                .hook_spans
                .iter()
                .find(|(name, _)| name == hook.name())
                .map(|(_, place)| place.clone());
            self.declared
                .rules
                .problems
                .push(Diagnostic { span: place, ..Diagnostic::new(message) }.into_warning());
        }
        self.declared.hooks = now;
    }

    /// Returns the upstreams whose undeclared tools the agent offers.
    fn undeclared_sources(&self) -> impl Iterator<Item = &'f UpstreamConfig> {
        let (sources, names) = (self.sources, &self.declared.upstreams);
        let offers = move |upstream: &&'f UpstreamConfig| match names {
            Some(names) => names.contains(&upstream.name),
            None => sources.has_single_agent,
        };
        sources
            .upstreams
            .iter()
            .filter(|upstream| upstream.undeclared != UndeclaredToolPolicy::Deny)
            .filter(offers)
    }

    /// Returns the upstreams that could offer an undeclared tool of this name: those with the
    /// longest matching prefix.
    fn candidate_upstreams(&self, name: &str) -> Vec<&'f UpstreamConfig> {
        let length = |upstream: &'f UpstreamConfig| {
            let prefix = prefix_of(upstream);
            name.starts_with(&prefix).then_some((prefix.len(), upstream))
        };
        let owners: Vec<(usize, &'f UpstreamConfig)> =
            self.undeclared_sources().filter(|_| is_tool_name(name)).filter_map(length).collect();
        let longest = owners.iter().map(|(length, _)| *length).max();
        owners
            .into_iter()
            .filter(|(length, _)| Some(*length) == longest)
            .map(|(_, upstream)| upstream)
            .collect()
    }

    /// Finds the upstream that could offer an undeclared tool of this name, and why it does not.
    fn find_upstream(&self, name: &str) -> Option<(&'f UpstreamConfig, MissingToolReason)> {
        let owners = self.candidate_upstreams(name);
        let quarantined = |upstream: &UpstreamConfig| {
            self.sources
                .inventory
                .quarantined_by_upstream
                .get(&upstream.name)
                .map(|tools| tools.contains(name))
        };
        if let Some(owner) =
            owners.iter().copied().find(|upstream| quarantined(upstream) == Some(true))
        {
            return Some((owner, MissingToolReason::Quarantined));
        }
        // A table of the file gives this tool another name. The rule must use that name.
        if self
            .declared
            .tools
            .iter()
            .any(|entry| self.upstream_tool_names(entry).any(|known| known == name))
        {
            return None;
        }
        if let Some(owner) = owners.iter().copied().find(|upstream| quarantined(upstream).is_none())
        {
            return Some((owner, MissingToolReason::UpstreamNeverSeen));
        }
        // Without running tools, an unknown name is an error of the file.
        owners
            .first()
            .copied()
            .filter(|_| self.sources.inventory.is_live)
            .map(|upstream| (upstream, MissingToolReason::NotOffered))
    }

    /// Returns the names that a declared upstream tool would have without its table.
    fn upstream_tool_names<'e>(
        &'e self,
        entry: &'e ToolConfig,
    ) -> impl Iterator<Item = String> + 'e {
        let (of, tools) = match &entry.backend {
            Some(ToolBackend::Mcp { upstream, tools, .. }) => (Some(upstream), tools.as_slice()),
            _ => (None, <&[String]>::default()),
        };
        let upstream = self.sources.upstreams.iter().find(|upstream| Some(&upstream.name) == of);
        let name = |upstream: &UpstreamConfig, tool: &String| {
            map_characters(&upstream.default_tool_name(tool)).collect()
        };
        upstream
            .into_iter()
            .flat_map(move |upstream| tools.iter().map(move |tool| name(upstream, tool)))
    }

    /// Adds a tool that refuses every call.
    fn insert_placeholder(
        &mut self,
        upstream: &UpstreamConfig,
        unusable: UnusableTool,
        place: SourceSpan,
    ) {
        let tool = Tool::declare(&unusable.name, &unusable.name, json!({"type": "object"}))
            .timeout(upstream.timeout)
            .open();
        let tool = if upstream.undeclared == UndeclaredToolPolicy::Read {
            tool.effect(Effect::Read)
        } else {
            tool
        };
        let tool = match self.declared.is_for_client {
            // No handler here could refuse a call that the client runs, so the tool is hidden.
            true => tool.into_client_run().visible_to([]),
            false => tool.replace_handler(UnusableToolHandler::new_handler(&unusable)),
        };
        self.declared.tools.push(ToolConfig {
            tool,
            span: place,
            section: None,
            backend: None,
            secrets: Vec::new(),
            uses_agent_files: false,
        });
        self.refused.insert(unusable.name.clone());
        self.unusable_tools.push(unusable);
    }

    /// Quarantines every tool of an upstream.
    fn quarantine_upstream(&mut self, upstream: &str, problem: &Diagnostic) {
        let is_from_upstream = |entry: &&ToolConfig| matches!(&entry.backend, Some(ToolBackend::Mcp { upstream: source, .. }) if source == upstream);
        let names: Vec<String> = self
            .declared
            .tools
            .iter()
            .filter(is_from_upstream)
            .map(|entry| entry.tool.spec().name().to_owned())
            .collect();
        for name in names
            .into_iter()
            .filter(|name| !self.quarantined.contains_key(name))
            .collect::<Vec<_>>()
        {
            self.quarantine(&name, problem.to_string());
        }
    }

    /// Quarantines the tools that a problem is about. What the file says of them holds as if their
    /// upstream had never been connected. Returns whether there were any.
    fn quarantine_culprits(&mut self, problems: &[Diagnostic], all: bool) -> bool {
        // A problem about an unknown name is one of the file.
        let errors = || {
            problems.iter().filter(|problem| {
                problem.severity == Severity::Error && problem.unknown_tool.is_none()
            })
        };
        let Some(first) = errors().next() else { return false };
        let mut affected: BTreeMap<String, &Diagnostic> = BTreeMap::new();
        for problem in errors().filter(|_| !all) {
            for name in self.find_culprits(problem) {
                affected.entry(name).or_insert(problem);
            }
        }
        if affected.is_empty() {
            affected = self
                .remote_tools()
                .map(|entry| (entry.tool.spec().name().to_owned(), first))
                .collect();
        }
        for (name, problem) in &affected {
            // The place of a problem with a rule helps to find the rule in the file.
            let reason =
                if problem.rule.is_some() { problem.to_string() } else { problem.message.clone() };
            self.quarantine(name, reason);
        }
        !affected.is_empty()
    }

    /// Returns the upstream tools that can still be quarantined.
    fn remote_tools(&self) -> impl Iterator<Item = &ToolConfig> {
        let is_open = move |entry: &&ToolConfig| {
            !matches!(self.quarantined.get(entry.tool.spec().name()), Some(None))
        };
        self.declared
            .tools
            .iter()
            .filter(|entry| matches!(entry.backend, Some(ToolBackend::Mcp { .. })))
            .filter(is_open)
    }

    /// Returns the tool that a problem is about, else the tools that its rule governs.
    fn find_culprits(&self, problem: &Diagnostic) -> Vec<String> {
        let name = |entry: &ToolConfig| entry.tool.spec().name().to_owned();
        if let Some(subject) =
            self.remote_tools().map(name).find(|name| problem.subject.as_deref() == Some(name))
        {
            return vec![subject];
        }
        let rule = self
            .declared
            .rules
            .sourced_rules()
            .find(|written| Some(written.policy.name()) == problem.rule.as_deref());
        let Some(rule) = rule else { return Vec::new() };
        self.remote_tools()
            .filter(|entry| rule.policy.governs(entry.tool.spec()))
            .map(name)
            .collect()
    }

    fn quarantine(&mut self, name: &str, reason: String) {
        let Some(entry) = self
            .declared
            .tools
            .iter_mut()
            .find(|entry| entry.tool.spec().name() == name && entry.backend.is_some())
        else {
            return;
        };
        let Some(ToolBackend::Mcp { upstream, tools, .. }) = &entry.backend else { return };
        if let Some(copy) = self.quarantined.get_mut(name) {
            // The declared secrets are part of the problem, so all arguments count as secret.
            entry.tool = copy.take().map_or_else(|| entry.tool.clone(), Tool::hide_all_arguments);
            return;
        }
        let tool = tools.first().cloned().unwrap_or_default();
        let unusable = UnusableTool {
            agent: self.declared.name.clone(),
            name: name.to_owned(),
            upstream: upstream.clone(),
            tool,
            reason,
            is_awaited: false,
        };
        let without_definition = |tool: Tool| {
            tool.with_schemas(json!({"type": "object"}), None)
                .replace_handler(UnusableToolHandler::new_handler(&unusable))
        };
        // Calls are refused and recorded. The record must not hold what the tool calls secret.
        let mut masked = entry.tool.clone();
        if !masked.find_secrets() {
            masked = masked.hide_all_arguments();
        }
        let original = std::mem::replace(&mut entry.tool, without_definition(masked));
        self.quarantined.insert(name.to_owned(), Some(without_definition(original)));
        self.refused.insert(name.to_owned());
        self.unusable_tools.push(unusable);
    }
}
