//! Reads `toolgate.toml`: agents, their tools, rules and limits.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use jiff::SignedDuration;
use toml::de::DeTable;

use super::lint::AllowedFinding;
use crate::agent_config::AgentConfig;
use crate::parse::gateway::GatewayConfig;
use crate::tool_backend::{ExposedTool, ToolBackend};
use crate::unusable_tool::UpstreamInventory;
use crate::upstream_config::UpstreamConfig;
use toolgate::limits::{Limits, RateLimit};
use toolgate::policy::source::table_reader::{TableReadState, TomlSource, TomlTable};
use toolgate::policy::{Diagnostic, Severity, SourceSpan};

pub use crate::build_agents::ConfigError;

/// A configuration file.
///
/// ```
/// use toolgate_config::Config;
/// let config = Config::parse("toolgate.toml", r#"
///     name = "support"
///
///     [tools.verify_customer]
///     effect = "read"
///     input = { type = "object", properties = { customer_id = { type = "string" } } }
///     entities = { customer_id = "/customer_id" }
///
///     [tools.issue_refund]
///     [tools.issue_refund.input]
///     type = "object"
///     properties = { customer_id = { type = "string" }, amount = { type = "number" } }
///
///     [[policy]]
///     name = "verified"
///     rule = "require"
///     tools = ["issue_refund"]
///     any_of = ["verify_customer"]
///     same = { customer_id = "/customer_id" }
/// "#);
/// assert!(config.problems().is_empty());
/// ```
#[derive(Clone)]
pub struct Config {
    /// Path of the ledger, relative to the file.
    pub store: Option<PathBuf>,
    /// How long the ledger keeps rows. `None` keeps them forever.
    pub retention: Option<SignedDuration>,
    /// Regular expressions whose matches are redacted in every row.
    pub redact: Vec<String>,
    /// Answers for clients that run their tools themselves.
    pub client: ClientFallbacks,
    /// Settings of the gateway.
    pub gateway: GatewayConfig,
    /// MCP servers that provide tools.
    pub upstreams: Vec<UpstreamConfig>,
    pub(crate) agents: Vec<AgentConfig>,
    pub(crate) problems: Vec<Diagnostic>,
    pub(crate) included_files: Vec<PathBuf>,
    /// All files that affect the configuration.
    pub(crate) dependencies: crate::parse::workspace::ConfigDependencies,
    pub(crate) is_store_known: bool,
    pub(crate) is_retention_known: bool,
    pub(crate) allowed_findings: Vec<AllowedFinding>,
    /// Position of the `listen` key of the gateway.
    pub(crate) listen_span: Option<SourceSpan>,
    /// Tools of upstreams, known once the upstreams are connected.
    pub(crate) exposed_tools: Vec<ExposedTool>,
    pub(crate) upstream_inventory: UpstreamInventory,
    /// The file itself.
    pub(crate) file_span: SourceSpan,
}

/// Answers for a client that runs its tools itself, if the gate has no decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClientFallbacks {
    /// The decision if the gate fails, for example because the store is unavailable.
    pub on_failure: FallbackDecision,
    /// The decision on a tool that no agent declares.
    pub undeclared: FallbackDecision,
}

/// A decision that replaces the decision of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FallbackDecision {
    /// Deny the call.
    #[default]
    Deny,
    /// Ask the client's user.
    Ask,
}

impl Config {
    /// Reads a file from disk.
    ///
    /// # Errors
    /// The file cannot be read. The message contains its name.
    pub fn load(path: impl AsRef<Path>) -> std::io::Result<Self> {
        let path = path.as_ref();
        let named = |error: std::io::Error| {
            std::io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        };
        Ok(Self::parse(
            &path.display().to_string(),
            &toolgate::policy::source::read_file::read_text_file(path).map_err(named)?,
        ))
    }

    /// Reads the text of a file. Included policy files are resolved relative to it.
    #[must_use]
    pub fn parse(name: &str, text: &str) -> Self {
        let file = TomlSource { name: name.into(), text: text.into() };
        let mut config = Self {
            store: None,
            retention: None,
            redact: Vec::new(),
            client: ClientFallbacks::default(),
            gateway: GatewayConfig::default(),
            upstreams: Vec::new(),
            agents: Vec::new(),
            problems: Vec::new(),
            included_files: Vec::new(),
            dependencies: crate::parse::workspace::ConfigDependencies::default(),
            is_store_known: false,
            is_retention_known: false,
            allowed_findings: Vec::new(),
            listen_span: None,
            exposed_tools: Vec::new(),
            upstream_inventory: UpstreamInventory::default(),
            file_span: file.span_at(0..0),
        };
        let (document, errors) = DeTable::parse_recoverable(text);
        config.problems.extend(errors.iter().map(|error| file.syntax_problem(error)));
        if !config.problems.is_empty() {
            return config;
        }
        let shared = TableReadState::default();
        let table = TomlTable::new(&file, document.get_ref(), 0..0, &shared);
        let directory = Path::new(name).parent().map(Path::to_owned).unwrap_or_default();
        let store = table.text("store");
        if store.is_some_and(|path| path.trim().is_empty()) {
            let problem = Diagnostic::new("`store` is empty; it must name a file");
            table.report(
                "store",
                problem.with_help(
                    "like `store = \"ledger.db\"`; without it, rows go to the user's own ledger",
                ),
            );
        }
        config.store =
            store.filter(|path| !path.trim().is_empty()).map(|path| directory.join(path));
        config.is_store_known = config.store.is_some() || !table.has_key("store");
        config.retention = read_retention(&table);
        config.is_retention_known = config.retention.is_some() || !table.has_key("retention");
        config.redact = config.read_redactions(&table);
        config.allowed_findings = super::lint::read_allowed_findings(&table);
        if let Some(client) = table.table("client") {
            let otherwise = |key: &str| {
                client
                    .keyword(
                        key,
                        &[("deny", FallbackDecision::Deny), ("ask", FallbackDecision::Ask)],
                    )
                    .unwrap_or_default()
            };
            config.client = ClientFallbacks {
                on_failure: otherwise("on_failure"),
                undeclared: otherwise("undeclared"),
            };
            client.reject_unknown_keys("`client`");
        }
        let reader = ConfigReader {
            file: &file,
            base_dir: &directory,
            included_files: RefCell::default(),
            referenced_files: RefCell::default(),
            named_agents: RefCell::default(),
            named_upstreams: RefCell::default(),
        };
        config.upstreams = reader.read_upstreams(&table);
        if let Some(gateway) = table.table("gateway") {
            config.gateway = reader.read_gateway(&gateway);
            config.listen_span = gateway.has_key("listen").then(|| gateway.span_of("listen"));
        }
        // A single agent may be declared at the top level, without a table of its own.
        let has_upstreams = !config.upstreams.is_empty() && !table.has_key("agents");
        if table.has_key("tools")
            || table.has_key("policy")
            || table.has_key("include")
            || has_upstreams
        {
            let name = table.text("name").unwrap_or("default").to_owned();
            config.agents.push(reader.read_agent(name, &table));
        } else if let Some(key) =
            ["principals", "limits", "max_output", "dialect", "files", "hooks"]
                .into_iter()
                .find(|key| table.has_key(key))
        {
            let problem = Diagnostic::new(format!(
                "`{key}` belongs to an agent, but the top level of this file declares none"
            ));
            table.report(
                key,
                problem.with_help("move it into the table of an agent, `[agents.NAME]`"),
            );
        } else if table.has_key("name") {
            table.report(
                "name",
                Diagnostic::new("the agent has a `name` but no tools")
                    .with_help("add `[tools.…]`, or remove `name`"),
            );
        }
        if let Some(agents) = table.table("agents") {
            for name in agents.keys() {
                if let Some(inner) = agents.table(&name) {
                    let agent = reader.read_agent(name, &inner);
                    inner.reject_unknown_keys("an agent");
                    config.agents.push(agent);
                }
            }
        }
        config.check_names(&table, &reader);
        // Only the agent at the top level reads these keys.
        for key in [
            "name",
            "principals",
            "limits",
            "max_output",
            "dialect",
            "files",
            "tools",
            "policy",
            "include",
            "hooks",
        ] {
            table.mark_read(key);
        }
        table.reject_unknown_keys("a configuration");
        let (wrong, _) = shared.into_parts();
        config.problems.extend(wrong);
        config.included_files = reader.included_files.into_inner();
        config.dependencies =
            config.collect_dependencies(name, reader.referenced_files.into_inner());
        if config.agents.is_empty() && config.problems.is_empty() {
            let problem = Diagnostic::new("the file declares no agent")
                .with_help("declare tools in `[tools.…]` and rules in `[[policy]]`");
            config.problems.push(Diagnostic { span: Some(file.span_at(0..0)), ..problem });
        }
        config
    }

    /// Reports upstreams and agents that are named but not declared.
    fn check_names(&self, table: &TomlTable<'_>, reader: &ConfigReader<'_>) {
        let known = || self.upstreams.iter().map(|upstream| upstream.name.as_str());
        let unknown = |name: &str| {
            let problem = Diagnostic::new(format!(
                "unknown upstream `{}`",
                toolgate_text::escape_for_display(name)
            ));
            problem
                .with_suggestion(name, known())
                .with_default_help("declare it in `[upstreams.NAME]`")
        };
        let report = |problem: Diagnostic, place: &SourceSpan| table.report_at(place, problem);
        for declared in &self.agents {
            for entry in &declared.tools {
                if let Some(ToolBackend::Mcp { upstream, .. }) = &entry.backend
                    && !known().any(|name| name == upstream)
                {
                    report(unknown(upstream), &entry.span);
                }
            }
        }
        for (name, place) in reader
            .named_upstreams
            .borrow()
            .iter()
            .filter(|(name, _)| !known().any(|known| known == name))
        {
            report(unknown(name), place);
        }
        for (name, place) in reader
            .named_agents
            .borrow()
            .iter()
            .filter(|(name, _)| self.agents.iter().all(|known| known.name != *name))
        {
            let problem = Diagnostic::new(format!(
                "unknown agent `{}`",
                toolgate_text::escape_for_display(name)
            ));
            let problem =
                problem.with_suggestion(name, self.agents.iter().map(|known| known.name.as_str()));
            report(problem.with_default_help("declare it in `[agents.NAME]`"), place);
        }
    }

    /// Lists the tools of upstreams under the names that agents use.
    ///
    /// The list is empty until a backend is connected.
    #[must_use]
    pub fn exposed_tools(&self) -> &[ExposedTool] {
        &self.exposed_tools
    }

    fn read_redactions(&self, table: &TomlTable<'_>) -> Vec<String> {
        let patterns = table.names("redact").unwrap_or_default();
        for pattern in &patterns {
            if let Err(error) = regex::Regex::new(pattern) {
                let reason = error.to_string();
                let reason = reason
                    .lines()
                    .last()
                    .unwrap_or_default()
                    .trim_start_matches("error: ")
                    .to_owned();
                let problem = Diagnostic::new(format!(
                    "`{}` is not a valid regular expression: {reason}",
                    toolgate_text::escape_for_display(pattern)
                ));
                table.report(
                    "redact",
                    problem.with_help("use the syntax of the `regex` crate; put the expression in single quotes to keep backslashes"),
                );
            }
        }
        patterns.into_iter().map(str::to_owned).collect()
    }

    /// Returns the problems of the file itself.
    ///
    /// Problems that concern rules and tools together are reported when the agents are built.
    #[must_use]
    pub fn problems(&self) -> &[Diagnostic] {
        &self.problems
    }

    /// Fails if the file has an error.
    ///
    /// # Errors
    /// The file has at least one error.
    pub fn check(&self) -> Result<(), ConfigError> {
        match self.problems.iter().any(|problem| problem.severity == Severity::Error) {
            true => Err(ConfigError { problems: self.problems.clone() }),
            false => Ok(()),
        }
    }

    /// Checks whether the file names its ledger validly, or names none.
    ///
    /// Otherwise `store` is not meaningful.
    #[must_use]
    pub const fn is_store_known(&self) -> bool {
        self.is_store_known
    }

    /// Checks whether the file sets `retention` validly, or does not set it.
    ///
    /// Otherwise `retention` is not meaningful.
    #[must_use]
    pub const fn is_retention_known(&self) -> bool {
        self.is_retention_known
    }

    /// Checks whether the file declares tools or upstreams.
    #[must_use]
    pub fn has_tools(&self) -> bool {
        !self.upstreams.is_empty() || self.agents.iter().any(|declared| !declared.tools.is_empty())
    }

    /// Checks whether an agent of this file declares a tool.
    #[must_use]
    pub fn declares_tool(&self, tool: &str) -> bool {
        self.agents
            .iter()
            .flat_map(|declared| &declared.tools)
            .any(|entry| entry.tool.spec().name() == tool)
    }

    /// Checks whether the file declares rules for its agents and nothing else.
    #[must_use]
    pub fn has_only_rules(&self) -> bool {
        let plain = |declared: &AgentConfig| {
            declared.limits == Limits::default()
                && declared.principals.is_none()
                && declared.hooks.is_empty()
        };
        !self.has_tools() && self.agents.iter().all(plain)
    }

    /// Iterates over the names of the agents.
    pub fn agent_names(&self) -> impl Iterator<Item = &str> {
        self.agents.iter().map(|agent| agent.name.as_str())
    }

    /// Maps each agent to the upstreams that it names, or to `None` if it names none.
    #[must_use]
    pub fn agent_upstreams(&self) -> BTreeMap<String, Option<Vec<String>>> {
        self.agents
            .iter()
            .map(|declared| (declared.name.clone(), declared.upstreams.clone()))
            .collect()
    }

    /// Lists included files and the programs of hooks and tools.
    #[must_use]
    pub fn included_files(&self) -> &[PathBuf] {
        &self.included_files
    }

    /// Checks whether an agent has hooks.
    #[must_use]
    pub fn has_hooks(&self) -> bool {
        self.agents.iter().any(|declared| !declared.hooks.is_empty())
    }

    /// Iterates over the tools of an agent for which an allowed call also grants the client's
    /// permission.
    pub fn granted_tools(&self, agent: &str) -> impl Iterator<Item = &str> {
        self.agents
            .iter()
            .filter(move |declared| declared.name == agent)
            .flat_map(|declared| declared.granted_tools.iter().map(String::as_str))
    }
}

/// State that is collected while a file is read.
pub(crate) struct ConfigReader<'r> {
    pub(crate) file: &'r TomlSource,
    pub(crate) base_dir: &'r Path,
    /// Included files.
    pub(crate) included_files: RefCell<Vec<PathBuf>>,
    /// Files that are referenced but not included.
    pub(crate) referenced_files: RefCell<crate::parse::workspace::ReferencedFiles>,
    /// Agents that the gateway names, and where.
    pub(crate) named_agents: RefCell<Vec<(String, SourceSpan)>>,
    /// Upstreams that agents name, and where.
    pub(crate) named_upstreams: RefCell<Vec<(String, SourceSpan)>>,
}

/// Reads the retention. Only the file that names the ledger may set it, so that no file can delete
/// the rows of another ledger.
fn read_retention(table: &TomlTable<'_>) -> Option<SignedDuration> {
    let retention = table.duration("retention")?;
    let problem = if retention < SignedDuration::from_hours(24) {
        Diagnostic::new("`retention` must be at least one day")
            .with_help("like `retention = \"90d\"`")
    } else if !table.has_key("store") {
        Diagnostic::new(
            "`retention` applies to the ledger in `store`, but this file does not set `store`",
        )
        .with_help("add `store = \"…\"`")
    } else {
        return Some(retention);
    };
    table.report("retention", problem);
    None
}

/// Reads a rate limit.
pub(crate) fn read_rate_limit(table: &TomlTable<'_>) -> Option<RateLimit> {
    table.table("rate").and_then(|inner| {
        let (calls, per) = (inner.count("calls"), inner.positive_std_duration("per"));
        inner.reject_unknown_keys("a rate");
        if !inner.has_key("calls") || !inner.has_key("per") {
            table.report(
                "rate",
                Diagnostic::new("a rate limit needs `calls` and `per`")
                    .with_help("like `rate = { calls = 10, per = \"1s\" }`"),
            );
        }
        Some(RateLimit { calls: u32::try_from(calls?).unwrap_or(u32::MAX), per: per? })
    })
}
