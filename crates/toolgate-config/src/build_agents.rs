//! Builds agents from a configuration.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use crate::UnusableTool;
use crate::agent_config::{AgentConfig, ToolConfig};
use crate::config::Config;
use crate::match_upstreams::{UpstreamMatcher, UpstreamSources};
use toolgate::agent::{Agent, PromptSection};
use toolgate::files::{FileSystem, ReadOnlyDir};
use toolgate::policy::source::SourcedRule;
use toolgate::policy::{Diagnostic, DiagnosticKind, EnforcementMode, Severity, SourceSpan};
use toolgate::tool::Handler;

/// All problems of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot load the configuration:{}", .problems.iter().map(|p| format!("\n  - {p}")).collect::<String>())]
pub struct ConfigError {
    /// The problems.
    pub problems: Vec<Diagnostic>,
}

impl ConfigError {
    /// Renders the problems with the lines of the file.
    #[must_use]
    pub fn render(&self, colours: bool) -> String {
        toolgate::policy::source::render_problems(&self.problems, colours)
    }
}

impl Config {
    /// Sets the program that starts command tools in their sandboxes, and hooks.
    ///
    /// The program must call [`toolgate_process::sandbox::run_as_helper_if_requested`], as
    /// `toolgate` does. By default, the running program starts sandboxes, and hooks start directly.
    #[must_use]
    pub fn with_launcher(mut self, program: impl Into<PathBuf>) -> Self {
        let program = program.into();
        for declared in &mut self.agents {
            declared.tools = std::mem::take(&mut declared.tools)
                .into_iter()
                .map(|entry| entry.map_tool(|tool| tool.with_launcher(&program)))
                .collect();
            declared.hooks = std::mem::take(&mut declared.hooks)
                .into_iter()
                .map(|hook| hook.launcher(&program))
                .collect();
        }
        self
    }

    /// Builds all agents.
    ///
    /// With `script`, that handler replaces every tool that toolgate would run, so a configuration
    /// can be tried without side effects. Without it, built-in tools run and all other tools are
    /// only declared.
    ///
    /// # Errors
    /// All problems of the configuration.
    pub fn build_agents(
        self,
        script: Option<&Arc<dyn Handler>>,
    ) -> Result<Vec<Agent>, ConfigError> {
        self.build_with_upstreams(script).map(|(agents, _)| agents)
    }

    /// Builds all agents and returns the tools of upstreams that cannot be called.
    ///
    /// If tools really run, an unsuitable upstream tool does not prevent an agent from being built:
    /// the tool is quarantined, and everything else is built.
    ///
    /// # Errors
    /// All problems of the file itself.
    pub fn build_with_upstreams(
        self,
        script: Option<&Arc<dyn Handler>>,
    ) -> Result<(Vec<Agent>, Vec<UnusableTool>), ConfigError> {
        let (mut problems, mut built, mut unusable) =
            (self.problems, Vec::new(), self.upstream_inventory.unusable_tools.clone());
        let is_complete = problems.iter().all(|problem| problem.severity != Severity::Error);
        let (upstreams, offered) = (&self.upstreams, &self.upstream_inventory);
        let sources = UpstreamSources {
            upstreams,
            inventory: offered,
            file_span: &self.file_span,
            has_single_agent: self.agents.len() == 1,
        };
        for declared in self.agents {
            let result = match is_complete && !self.upstreams.is_empty() {
                true => UpstreamMatcher::new(declared, &sources).build(script),
                false => declared
                    .build(script, &BTreeSet::new(), is_complete)
                    .map(|agent| (agent, Vec::new())),
            };
            match result {
                Ok((agent, unusable_tools)) => {
                    built.push(agent);
                    unusable.extend(unusable_tools);
                }
                Err(wrong) => problems.extend(wrong),
            }
        }
        if problems.iter().any(|problem| problem.severity == Severity::Error) {
            problems.sort_by_cached_key(Diagnostic::sort_key);
            return Err(ConfigError { problems });
        }
        Ok((built, unusable))
    }
}

impl AgentConfig {
    /// Builds the agent.
    ///
    /// `script` replaces every tool that is not in `refused`. If the file was not read completely
    /// (`whole`), tools without a rule are not reported, because the missing rule may be in the
    /// unread part.
    pub(crate) fn build(
        self,
        script: Option<&Arc<dyn Handler>>,
        refused: &BTreeSet<String>,
        is_complete: bool,
    ) -> Result<Agent, Vec<Diagnostic>> {
        let mut problems = check_file_rules(&self);
        let places: Vec<(String, SourceSpan)> = self
            .tools
            .iter()
            .map(|entry| (entry.tool.spec().name().to_owned(), entry.span.clone()))
            .chain(self.hook_spans)
            .collect();
        let mut builder = Agent::builder(self.name.as_str()).rules(self.rules).limits(self.limits);
        if let Some(principals) = &self.principals {
            builder = builder.principals(principals.iter().map(String::as_str));
        }
        if let Some(bytes) = self.max_output {
            builder = builder.max_output(bytes);
        }
        builder = builder.dialect(self.dialect.unwrap_or_default());
        // A directory that is not open is still readable for rules, if it exists. In a client, the
        // same path may mean another file, so rules about files get no file system there and deny.
        let root = self.files.as_ref().filter(|_| !self.is_for_client).map(|(root, _)| root);
        let seen = || Some(Arc::new(ReadOnlyDir::open(root?).ok()?) as Arc<dyn FileSystem>);
        if let Some(files) = self.open_files.clone().or_else(seen) {
            builder = builder.shared_files(files);
        }
        if script.is_none() {
            builder = self.hooks.into_iter().fold(builder, |builder, hook| builder.hook(hook));
        }
        for ToolConfig { tool, section, .. } in self.tools {
            let tool = match script.filter(|_| !refused.contains(tool.spec().name())) {
                Some(script) => tool.replace_handler(Arc::clone(script)),
                None => tool,
            };
            builder = match section {
                Some(section) => builder.section(PromptSection::new(section).tool(tool)),
                None => builder.tool(tool),
            };
        }
        match builder.build() {
            Ok(agent) if problems.is_empty() => return Ok(agent),
            Ok(_) => {}
            Err(error) => {
                let known = error
                    .problems
                    .into_iter()
                    .filter(|problem| is_complete || problem.kind != DiagnosticKind::Ungoverned);
                problems.extend(known.map(|problem| locate_problem(problem, &places)));
            }
        }
        Err(problems)
    }
}

/// Finds rules about files that cannot work.
///
/// Without a file system such a rule always denies. On a tool that works on other files, the rule
/// would decide by unrelated contents. If a client runs all tools, such rules deny, and that is
/// intended.
fn check_file_rules(declared: &AgentConfig) -> Vec<Diagnostic> {
    if declared.files.is_some() && declared.is_for_client {
        return Vec::new();
    }
    let find_problem = |rule: &SourcedRule| {
        let enforced = rule.policy.mode() == EnforcementMode::Enforce || declared.files.is_some();
        let needs_files = |entry: &&ToolConfig| {
            let (spec, has_files) =
                (entry.tool.spec(), declared.files.is_some() && entry.uses_agent_files);
            enforced
                && !has_files
                && rule.policy.governs(spec)
                && rule.policy.static_summary(spec).needs_files
        };
        let name = declared.tools.iter().find(needs_files)?.tool.spec().name();
        let (message, help) = match declared.files {
            None => (
                format!(
                    "`{name}` can never be called: the rule checks files, and the agent has no file system"
                ),
                "set a directory: `files = \"workspace\"`; for tools of clients, `require` the tool that reads, with the `same` path",
            ),
            Some(_) => (
                format!(
                    "the rule checks the agent's files, but `{name}` is not built in and works on other files"
                ),
                "`require` the tool that reads, with the `same` path",
            ),
        };
        let problem =
            Diagnostic::at_field("rule", message).with_rule(rule.policy.name()).with_help(help);
        Some(Diagnostic { span: rule.source_span("rule", None), ..problem })
    };
    declared.rules.sourced_rules().filter_map(find_problem).collect()
}

/// Returns the problem with the place of the tool or hook that it is about, and with help.
fn locate_problem(problem: Diagnostic, places: &[(String, SourceSpan)]) -> Diagnostic {
    if problem.span.is_some() {
        return problem;
    }
    let named = places.iter().find(|(name, _)| problem.subject.as_deref() == Some(name));
    let place = named.map(|(_, place)| place.clone());
    let help = match problem.kind {
        DiagnosticKind::Other => None,
        DiagnosticKind::Ungoverned => {
            // In a file, the setters that the library names are keys.
            let help = "write a rule for it, or set `effect = \"read\"` or `policy = \"open\"`";
            return Diagnostic { span: place, ..problem.with_help(help) };
        }
        DiagnosticKind::InvalidSchema => Some(
            "a JSON Schema, written as TOML: `{ type = \"object\", properties = { id = { type = \"string\" } } }`",
        ),
        DiagnosticKind::UndeclaredEntity => {
            Some("declare its path: `entities = { name = \"/path\" }`")
        }
        DiagnosticKind::UnusedHook => {
            Some("name tools of this agent in `tools`, or remove the hook")
        }
        DiagnosticKind::RevokesUnknownTool => {
            Some("name a tool of this agent in `revokes`, or remove it")
        }
        DiagnosticKind::SecretReconcileArgument => {
            Some("fill `arguments` of `reconcile` with values that are not secret")
        }
        DiagnosticKind::InvalidReconcile => {
            Some("name a tool of this agent in `reconcile` that only reads and that toolgate runs")
        }
    };
    let problem = match help {
        Some(help) => problem.with_default_help(help),
        None => problem,
    };
    Diagnostic { span: place, ..problem }
}
