//! Connects the tools of a configuration to the backend that runs them.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::agent_config::{AgentConfig, ToolConfig};
use crate::config::Config;
use crate::parse::http_tool::HttpTool;
use crate::unusable_tool::UnusableTool;
use crate::upstream_config::{UndeclaredToolPolicy, UpstreamConfig};
use toolgate::agent::Agent;
use toolgate::policy::Diagnostic;
use toolgate::policy::source::RuleSet;
use toolgate::provenance::USER_SOURCE;
use toolgate::tool::{Effect, Handler, Tool};

/// Runs HTTP tools and tools of MCP servers.
pub trait Backend {
    /// Returns the accepted tools of an upstream, or `None` if the upstream was never seen.
    fn accepted_tools(&self, upstream: &str) -> Option<Vec<RemoteToolSpec>>;
    /// Lists the quarantined tools of an upstream, by the names that the upstream uses.
    fn quarantined_tools(&self, upstream: &str) -> Vec<String> {
        let _ = upstream;
        Vec::new()
    }
    /// Returns the handler that calls a tool of an upstream.
    fn remote_handler(&self, upstream: &UpstreamConfig, tool: &str) -> Arc<dyn Handler>;
    /// Returns the handler that makes an HTTP request.
    fn http_handler(&self, tool: &HttpTool) -> Arc<dyn Handler>;
    /// Checks whether tools really run, so that all secrets must be present.
    fn is_live(&self) -> bool {
        true
    }
}

/// A tool as an upstream describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct RemoteToolSpec {
    /// Name at the upstream.
    pub name: String,
    /// Description from the upstream.
    pub description: String,
    /// Schema of the arguments.
    pub input: Value,
    /// Schema of the result.
    pub output: Option<Value>,
}

/// The backend of a tool.
#[derive(Debug, Clone)]
pub(crate) enum ToolBackend {
    Http(Box<HttpTool>),
    Mcp {
        upstream: String,
        /// Possible names at the upstream; the first that exists is used.
        tools: Vec<String>,
        has_description: bool,
        has_timeout: bool,
    },
}

/// A tool of an upstream under the name that an agent uses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExposedTool {
    /// The agent.
    pub agent: String,
    /// Name in the agent.
    pub name: String,
    /// Name of the upstream.
    pub upstream: String,
    /// Name at the upstream.
    pub tool: String,
    /// Declared effect.
    pub effect: Effect,
    /// Whether a table declares the tool.
    pub is_declared: bool,
}

/// Maximum number of characters of a description for a model.
const MAX_DESCRIPTION_CHARS: usize = 1_024;

impl Config {
    /// Connects all tools to a backend: HTTP tools make requests, and upstream tools are called.
    #[must_use]
    pub fn with_backend(mut self, backend: &dyn Backend) -> Self {
        // A missing secret fails the load only for HTTP tools; an upstream without its secret stays
        // offline.
        let missing = self.agents.iter().flat_map(|declared| {
            declared.tools.iter().flat_map(|entry| match &entry.backend {
                Some(ToolBackend::Http(http)) => {
                    http.headers.iter().map(|(_, value)| value).collect::<Vec<_>>()
                }
                _ => Vec::new(),
            })
        });
        let missing: Vec<Diagnostic> = missing
            .filter(|_| backend.is_live())
            .filter_map(crate::SecretRef::resolution_problem)
            .collect();
        self.problems.extend(missing);
        self.upstream_inventory.is_live = backend.is_live();
        for upstream in self
            .upstreams
            .iter()
            .filter(|upstream| backend.accepted_tools(&upstream.name).is_some())
        {
            let names: Vec<String> = backend
                .quarantined_tools(&upstream.name)
                .iter()
                .map(|tool| upstream.default_tool_name(tool))
                .collect();
            self.upstream_inventory.quarantined_by_upstream.insert(
                upstream.name.clone(),
                map_each_name(names.iter().map(String::as_str)).collect(),
            );
        }
        let is_only_agent = self.agents.len() == 1;
        let mut agents = std::mem::take(&mut self.agents);
        for declared in &mut agents {
            for entry in &mut declared.tools {
                match entry.backend.clone() {
                    Some(ToolBackend::Http(http)) => {
                        entry.tool = entry.tool.clone().replace_handler(backend.http_handler(&http))
                    }
                    Some(ToolBackend::Mcp {
                        upstream,
                        tools,
                        has_description: described,
                        has_timeout: timed,
                    }) => {
                        let known = backend.accepted_tools(&upstream).unwrap_or_default();
                        let candidate = tools
                            .iter()
                            .find(|tool| known.iter().any(|remote| remote.name == **tool))
                            .or_else(|| tools.first());
                        let Some(tool) = candidate.cloned() else { continue };
                        let is_offered =
                            self.connect_tool(entry, &upstream, &tool, described, timed, backend);
                        entry.backend = Some(ToolBackend::Mcp {
                            upstream: upstream.clone(),
                            tools: vec![tool.clone()],
                            has_description: described,
                            has_timeout: timed,
                        });
                        let spec = entry.tool.spec();
                        let (name, effect) = (spec.name().to_owned(), spec.effect());
                        // A missing tool must not stop the other tools. A call of it is refused
                        // with the reason.
                        if !is_offered {
                            let reason = "the upstream does not offer it, or it is quarantined; see `toolgate upstream list`".to_owned();
                            let (agent, name) = (declared.name.clone(), name.clone());
                            let (upstream, tool) = (upstream.clone(), tool.clone());
                            self.upstream_inventory.unusable_tools.push(UnusableTool {
                                agent,
                                name,
                                upstream,
                                tool,
                                reason,
                                is_awaited: true,
                            });
                        }
                        self.exposed_tools.push(ExposedTool {
                            agent: declared.name.clone(),
                            name,
                            upstream,
                            tool,
                            effect,
                            is_declared: true,
                        });
                    }
                    None => {}
                }
            }
            self.offer_undeclared_tools(declared, is_only_agent, backend);
        }
        self.agents = agents;
        self
    }

    /// Iterates over the declared tools of an upstream, before a backend is connected.
    ///
    /// Each item is the declared name and the possible names at the upstream. The first of these
    /// that exists is used.
    pub fn declared_tools_of<'c>(
        &'c self,
        upstream: &'c str,
    ) -> impl Iterator<Item = (&'c str, &'c [String])> {
        self.agents.iter().flat_map(|declared| &declared.tools).filter_map(
            move |entry| match &entry.backend {
                Some(ToolBackend::Mcp { upstream: from, tools, .. }) if from == upstream => {
                    Some((entry.tool.spec().name(), tools.as_slice()))
                }
                _ => None,
            },
        )
    }

    /// Connects a declared tool to its upstream. Returns false if the upstream is known not to
    /// offer it.
    fn connect_tool(
        &self,
        entry: &mut ToolConfig,
        upstream: &str,
        tool: &str,
        described: bool,
        timed: bool,
        backend: &dyn Backend,
    ) -> bool {
        // An unknown upstream was reported when the file was read.
        let Some(found) = self.upstreams.iter().find(|known| known.name == upstream) else {
            return true;
        };
        let handler = backend.remote_handler(found, tool);
        let mut connected = entry.tool.clone().replace_handler(handler);
        if !timed {
            connected = connected.timeout(found.timeout);
        }
        let known = backend.accepted_tools(upstream);
        let remote = known.iter().flatten().find(|remote| remote.name == tool);
        if let Some(remote) = remote {
            connected = connected.with_schemas(remote.input.clone(), remote.output.clone());
            if !described {
                connected = connected
                    .with_description(&shorten_description(&remote.description, &remote.name));
            }
        }
        entry.tool = connected;
        known.is_none() || remote.is_some()
    }

    /// Offers tools that no table declares, if the table of their upstream allows that.
    fn offer_undeclared_tools(
        &mut self,
        declared: &mut AgentConfig,
        is_only_agent: bool,
        backend: &dyn Backend,
    ) {
        let mut needing_approval = Vec::new();
        let mut found: Vec<(String, &UpstreamConfig, RemoteToolSpec)> = Vec::new();
        for upstream in &self.upstreams {
            let is_used = match &declared.upstreams {
                Some(names) => names.contains(&upstream.name),
                None => is_only_agent,
            };
            if !is_used || upstream.undeclared == UndeclaredToolPolicy::Deny {
                continue;
            }
            let remotes = backend.accepted_tools(&upstream.name).unwrap_or_default();
            let names: Vec<String> =
                remotes.iter().map(|remote| upstream.default_tool_name(&remote.name)).collect();
            let mapped = toolgate::tool::name::map_foreign_names(names.iter().map(String::as_str));
            // Tools of one upstream whose mapped names collide are left out.
            let left_out = map_each_name(mapped.excluded.iter().map(String::as_str));
            if let Some(seen) =
                self.upstream_inventory.quarantined_by_upstream.get_mut(&upstream.name)
            {
                seen.extend(left_out);
            }
            for (valid_name, foreign) in &mapped.names {
                let Some(remote) =
                    names.iter().position(|name| name == foreign).and_then(|at| remotes.get(at))
                else {
                    continue;
                };
                let declares = |entry: &ToolConfig| {
                    let is_same_tool = matches!(&entry.backend, Some(ToolBackend::Mcp { upstream: from, tools, .. }) if *from == upstream.name && tools.contains(&remote.name));
                    is_same_tool || entry.tool.spec().name() == valid_name
                };
                if !declared.tools.iter().any(declares) {
                    found.push((valid_name.clone(), upstream, remote.clone()));
                }
            }
        }
        // Names that collide across upstreams are quarantined, so that neither tool replaces the
        // other.
        let duplicates: Vec<String> = found
            .iter()
            .map(|(valid_name, ..)| valid_name)
            .filter(|valid_name| {
                found.iter().filter(|(other, ..)| other == *valid_name).count() > 1
            })
            .cloned()
            .collect();
        for (valid_name, upstream, remote) in &found {
            if duplicates.contains(valid_name) {
                self.upstream_inventory
                    .quarantined_by_upstream
                    .entry(upstream.name.clone())
                    .or_default()
                    .insert(valid_name.clone());
                tracing::warn!(
                    upstream = upstream.name,
                    tool = valid_name,
                    "another upstream has a tool of this name; both are quarantined"
                );
                continue;
            }
            let tool = Tool::with_handler(
                valid_name,
                &shorten_description(&remote.description, &remote.name),
                remote.input.clone(),
                backend.remote_handler(upstream, &remote.name),
            )
            .timeout(upstream.timeout);
            let tool = remote
                .output
                .clone()
                .map_or_else(|| tool.clone(), |schema| tool.clone().output_schema(schema));
            // A tool that would prevent the agent from being built is quarantined.
            if let Some(reason) = find_build_error(&tool, &declared.rules) {
                self.upstream_inventory
                    .quarantined_by_upstream
                    .entry(upstream.name.clone())
                    .or_default()
                    .insert(valid_name.clone());
                self.upstream_inventory.unusable_tools.push(UnusableTool {
                    agent: declared.name.clone(),
                    name: valid_name.clone(),
                    upstream: upstream.name.clone(),
                    tool: remote.name.clone(),
                    reason,
                    is_awaited: false,
                });
                continue;
            }
            let tool = match upstream.undeclared {
                UndeclaredToolPolicy::Open => tool.open(),
                UndeclaredToolPolicy::Read => tool.effect(Effect::Read),
                UndeclaredToolPolicy::Ask | UndeclaredToolPolicy::Deny => tool,
            };
            if upstream.undeclared == UndeclaredToolPolicy::Ask {
                needing_approval.push(valid_name.clone());
            }
            self.exposed_tools.push(ExposedTool {
                agent: declared.name.clone(),
                name: valid_name.clone(),
                upstream: upstream.name.clone(),
                tool: remote.name.clone(),
                effect: tool.spec().effect(),
                is_declared: false,
            });
            let place = upstream.span.clone().unwrap_or_else(|| self.file_span.clone());
            let backend_entry = Some(ToolBackend::Mcp {
                upstream: upstream.name.clone(),
                tools: vec![remote.name.clone()],
                has_description: false,
                has_timeout: true,
            });
            declared.tools.push(ToolConfig {
                tool,
                span: place,
                section: None,
                backend: backend_entry,
                secrets: Vec::new(),
                uses_agent_files: false,
            });
        }
        if !needing_approval.is_empty() {
            declared.require_approval(&needing_approval, UNDECLARED_TOOL_REASON);
        }
    }

    /// Adds tools that the client of an agent has and no table declares. A person is asked before
    /// each call of them.
    #[must_use]
    pub fn with_undeclared_tools(mut self, agent: &str, tools: &[&str]) -> Self {
        let Some(declared) = self.agents.iter_mut().find(|declared| declared.name == agent) else {
            return self;
        };
        let mut undeclared = Vec::new();
        for tool in tools.iter().copied() {
            if declared.tools.iter().all(|entry| entry.tool.spec().name() != tool) {
                let external = Tool::external(tool, tool, None);
                let place = self.file_span.clone();
                declared.tools.push(ToolConfig {
                    tool: external,
                    span: place,
                    section: None,
                    backend: None,
                    secrets: Vec::new(),
                    uses_agent_files: false,
                });
                undeclared.push(tool.to_owned());
            }
        }
        // The name in the configuration may differ from the name in the client.
        match undeclared.as_slice() {
            [] => {}
            [name] => declared
                .require_approval(&undeclared, &format!("{UNDECLARED_TOOL_REASON} To declare it, add `[tools.{name}]` to the configuration.")),
            _ => declared.require_approval(&undeclared, UNDECLARED_TOOL_REASON),
        }
        self
    }
}

/// Reason for asking a person about a tool that no table declares.
const UNDECLARED_TOOL_REASON: &str = "This tool is not declared.";

impl AgentConfig {
    /// Adds a rule that asks a person before each call of these undeclared tools.
    fn require_approval(&mut self, tools: &[String], reason: &str) {
        let text = format!(
            "[[policy]]\nname = \"undeclared_tool\"\nrule = \"ask\"\ntools = {}\nwhen = \"true\"\nreason = {}\n",
            json!(tools),
            json!(reason)
        );
        self.rules = std::mem::take(&mut self.rules).append(RuleSet::parse("(built in)", &text));
    }
}

/// Maps each name as if it were the only one.
fn map_each_name<'n>(names: impl Iterator<Item = &'n str>) -> impl Iterator<Item = String> {
    names.flat_map(|name| toolgate::tool::name::map_foreign_names([name]).names.into_keys())
}

/// Explains why no agent with these rules can have a tool.
fn find_build_error(tool: &Tool, rules: &RuleSet) -> Option<String> {
    if let Err(error) = Agent::builder("probe").tool(tool.clone().open()).build() {
        return Some(
            error
                .problems
                .iter()
                .map(|problem| problem.message.as_str())
                .collect::<Vec<_>>()
                .join("; "),
        );
    }
    let means_the_user = tool.spec().name() == USER_SOURCE
        && rules.sourced_rules().any(|written| written.policy.provenance_sources().is_some());
    means_the_user.then(|| "rules about provenance reserve this name for the user; declare the tool under another name".to_owned())
}

/// Shortens a description for a model; an empty description becomes the name.
fn shorten_description(description: &str, name: &str) -> String {
    let description = if description.trim().is_empty() { name } else { description.trim() };
    if description.chars().count() <= MAX_DESCRIPTION_CHARS {
        return description.to_owned();
    }
    description.chars().take(MAX_DESCRIPTION_CHARS - 1).chain(['…']).collect()
}
