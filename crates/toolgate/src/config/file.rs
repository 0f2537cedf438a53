//! `toolgate.toml`: agents, their tools, rules and limits in one file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use toml::de::DeTable;

use super::read::{File, Shared, Table};
use super::{Rules, rule};
use crate::builtin;
use crate::limits::{Budget, Limits, Rate};
use crate::policy::{Place, Problem, Severity};
use crate::registry::Agent;
use crate::tool::{Effect, Extra, Handler, Tool};

/// A configuration file.
///
/// ```
/// use toolgate::config::Config;
/// let config = Config::parse("toolgate.toml", r#"
///     name = "support"
///
///     [tools.verify_customer]
///     effect = "read"
///     input = { type = "object", properties = { customer_id = { type = "string" } } }
///     entities = { customer_id = "/customer_id" }
///
///     [tools.issue_refund]
///     input = { type = "object", properties = { customer_id = { type = "string" }, amount = { type = "number" } } }
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
pub struct Config {
    /// Where the ledger is kept, relative to the file.
    pub store: Option<PathBuf>,
    /// What is redacted wherever it stands in a row.
    pub redact: Vec<String>,
    agents: Vec<Declared>,
    problems: Vec<Problem>,
}

/// An agent as the file says it.
struct Declared {
    name: String,
    principals: Option<Vec<String>>,
    limits: Limits,
    max_output: Option<usize>,
    tools: Vec<(Tool, Place)>,
    rules: Rules,
}

/// What is wrong with a configuration, all at once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the configuration does not load:{}", .problems.iter().map(|p| format!("\n  - {p}")).collect::<String>())]
pub struct ConfigError {
    /// What is wrong.
    pub problems: Vec<Problem>,
}

impl ConfigError {
    /// The problems as a person reads them, with the lines they stand in.
    #[must_use]
    pub fn render(&self, colours: bool) -> String {
        super::render(&self.problems, colours)
    }
}

impl Config {
    /// Reads a file from disk.
    ///
    /// # Errors
    /// It cannot be read; its name is in the message.
    pub fn load(path: impl AsRef<Path>) -> std::io::Result<Self> {
        let path = path.as_ref();
        let named = |error: std::io::Error| std::io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        Ok(Self::parse(&path.display().to_string(), &std::fs::read_to_string(path).map_err(named)?))
    }

    /// Reads a file's text. Policy files that it includes are read from beside it.
    #[must_use]
    pub fn parse(name: &str, text: &str) -> Self {
        let file = File { name: name.into(), text: text.into() };
        let mut config = Self { store: None, redact: Vec::new(), agents: Vec::new(), problems: Vec::new() };
        let (document, errors) = DeTable::parse_recoverable(text);
        config.problems.extend(errors.iter().map(|error| {
            let problem = Problem::new(format!("this is no TOML: {}", error.message()));
            Problem {
                place: Some(file.place(error.span().unwrap_or(0..0))),
                ..problem.help("text stands in quotes, a list in `[ ]`, a table in `{ }`")
            }
        }));
        if !config.problems.is_empty() {
            return config;
        }
        let shared = Shared::default();
        let table = Table::new(&file, document.get_ref(), 0..0, &shared);
        let beside = Path::new(name).parent().map(Path::to_owned).unwrap_or_default();
        config.store = table.text("store").map(|path| beside.join(path));
        config.redact = config.patterns(&table);
        let reader = Reader { file: &file, beside: &beside };
        // One agent needs no table of its own.
        if table.has("tools") || table.has("policy") || table.has("include") {
            let name = table.text("name").unwrap_or("default").to_owned();
            config.agents.push(reader.agent(name, &table));
        } else if table.has("name") {
            table.wrong("name", Problem::new("an agent is named here, and has no tools").help("add `[tools.…]`, or take the name out"));
        }
        if let Some(agents) = table.table("agents") {
            for name in agents.keys() {
                if let Some(inner) = agents.table(&name) {
                    let agent = reader.agent(name, &inner);
                    inner.finish("an agent");
                    config.agents.push(agent);
                }
            }
        }
        // What one agent reads at the top, nobody else does.
        for key in ["name", "principals", "limits", "max_output", "tools", "policy", "include"] {
            table.mark_read(key);
        }
        table.finish("a configuration");
        let (wrong, _) = shared.into_parts();
        config.problems.extend(wrong);
        if config.agents.is_empty() && config.problems.is_empty() {
            let problem = Problem::new("there is no agent in it").help("declare tools in `[tools.…]` and rules in `[[policy]]`");
            config.problems.push(Problem { place: Some(file.place(0..0)), ..problem });
        }
        config
    }

    fn patterns(&self, table: &Table<'_>) -> Vec<String> {
        let patterns = table.names("redact").unwrap_or_default();
        for pattern in &patterns {
            if let Err(error) = regex::Regex::new(pattern) {
                let why = error.to_string();
                let why = why.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
                table.wrong("redact", Problem::new(format!("this is no regular expression: {why}")));
            }
        }
        patterns.into_iter().map(str::to_owned).collect()
    }

    /// What is wrong with the file itself. What is wrong with its rules and tools together is known when the agents are built.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// The names of its agents.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.agents.iter().map(|agent| agent.name.as_str())
    }

    /// Builds all agents. With a script, that is behind every tool that the client does not run, to try a configuration
    /// without running anything; without it, built-in tools run, and the rest can only be declared so far.
    ///
    /// # Errors
    /// Everything that is wrong, all at once.
    pub fn agents(self, script: Option<&Arc<dyn Handler>>) -> Result<Vec<Agent>, ConfigError> {
        let (mut problems, mut built) = (self.problems, Vec::new());
        let whole = problems.iter().all(|problem| problem.severity != Severity::Error);
        for declared in self.agents {
            let places: Vec<(String, Place)> =
                declared.tools.iter().map(|(tool, place)| (tool.spec().name().to_owned(), place.clone())).collect();
            let mut builder = Agent::builder(declared.name.as_str()).rules(declared.rules).limits(declared.limits);
            if let Some(principals) = &declared.principals {
                builder = builder.principals(principals.iter().map(String::as_str));
            }
            if let Some(bytes) = declared.max_output {
                builder = builder.max_output(bytes);
            }
            for (tool, _) in declared.tools {
                builder = builder.tool(match script {
                    Some(script) if tool.has_handler() => tool.scripted(Arc::clone(script)),
                    _ => tool,
                });
            }
            match builder.build() {
                Ok(agent) => built.push(agent),
                // Where a tool or a rule could not be read, what governs what is anybody's guess.
                Err(error) => {
                    let known = error.problems.into_iter().filter(|problem| whole || problem.field != UNGOVERNED);
                    problems.extend(known.map(|problem| placed(problem, &places)));
                }
            }
        }
        if problems.iter().any(|problem| problem.severity == Severity::Error) { Err(ConfigError { problems }) } else { Ok(built) }
    }
}

/// A problem that speaks of a tool stands where the tool is declared.
fn placed(problem: Problem, places: &[(String, Place)]) -> Problem {
    if problem.place.is_some() {
        return problem;
    }
    let place = places.iter().find(|(name, _)| problem.message.contains(&format!("`{name}`"))).map(|(_, place)| place.clone());
    match problem.field.as_str() {
        UNGOVERNED => Problem { place, ..problem.help("write a rule for it, or say `effect = \"read\"` or `policy = \"open\"`") },
        _ => Problem { place, ..problem },
    }
}

/// The part of a rule that would have to say something else, where a tool is governed by none.
const UNGOVERNED: &str = "mode";

/// What is read on the way.
struct Reader<'r> {
    file: &'r File,
    beside: &'r Path,
}

const EFFECTS: [(&str, Effect); 3] = [("read", Effect::Read), ("write", Effect::Write), ("destructive", Effect::Destructive)];
const EXTRAS: [(&str, Extra); 3] = [("refuse", Extra::Refuse), ("drop", Extra::Drop), ("pass", Extra::Pass)];

/// What is behind a tool.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Client,
    Builtin,
}

const KINDS: [(&str, Kind); 2] = [("client", Kind::Client), ("builtin", Kind::Builtin)];

impl Reader<'_> {
    fn agent(&self, name: String, table: &Table<'_>) -> Declared {
        let principals = table.names("principals").map(|names| names.into_iter().map(str::to_owned).collect());
        let max_output = table.count("max_output").and_then(|bytes| usize::try_from(bytes).ok());
        let limits = table.table("limits").map(|limits| read_limits(&limits)).unwrap_or_default();
        let mut tools = Vec::new();
        if let Some(declared) = table.table("tools") {
            for name in declared.keys() {
                let Some(inner) = declared.table(&name) else { continue };
                let place = self.file.place(inner.span());
                if let Some(tool) = read_tool(&name, &inner) {
                    tools.push((tool, place));
                }
                inner.finish("a tool");
            }
        }
        let mut files: Vec<(String, String)> = Vec::new();
        for path in table.names("include").unwrap_or_default() {
            let path = self.beside.join(path);
            match std::fs::read_to_string(&path) {
                Ok(text) => files.push((path.display().to_string(), text)),
                Err(error) => {
                    table.wrong("include", Problem::new(format!("{}: {error}", path.display())).help("a path is relative to this file"))
                }
            }
        }
        let rules = rule::read_with(self.file, &table.tables("policy"), files.iter().map(|(name, text)| (name.as_str(), text.as_str())));
        Declared { name, principals, limits, max_output, tools, rules }
    }
}

fn read_limits(table: &Table<'_>) -> Limits {
    let budget = |key: &str| {
        let budget = table.table(key).map(|inner| {
            let budget = Budget {
                calls: inner.count("calls"),
                tokens: inner.count("tokens"),
                money: inner.number("money"),
                wall: inner.duration("wall").and_then(positive),
            };
            inner.finish("a budget");
            budget
        });
        budget.unwrap_or_default()
    };
    let (session, principal) = (budget("session"), budget("principal"));
    let rate = table.table("rate").and_then(|inner| {
        let (calls, per) = (inner.count("calls"), inner.duration("per").and_then(positive));
        inner.finish("a rate");
        if !inner.has("calls") || !inner.has("per") {
            table.wrong("rate", Problem::new("a rate is so many `calls` `per` so long").help("like `rate = { calls = 10, per = \"1s\" }`"));
        }
        Some(Rate { calls: u32::try_from(calls?).unwrap_or(u32::MAX), per: per? })
    });
    table.finish("limits");
    Limits { session, principal, rate }
}

fn positive(length: SignedDuration) -> Option<Duration> {
    Duration::try_from(length).ok()
}

fn read_tool(name: &str, table: &Table<'_>) -> Option<Tool> {
    let kind = table.word("kind", &KINDS);
    let description = table.text("description").unwrap_or(name);
    let (input, output) = (table.value("input"), table.value("output"));
    let mut tool = match kind {
        Some(Kind::Builtin) => built_in(name, table)?,
        Some(Kind::Client) => Tool::external(name, description, input),
        None => Tool::declared(name, description, input.unwrap_or_else(|| serde_json::json!({"type": "object"}))),
    };
    if kind == Some(Kind::Builtin) && (table.has("input") || table.has("output")) {
        let problem = Problem::new(format!("the built-in tool `{}` has schemas of its own", crate::names::shown(name)));
        table.wrong("kind", problem.help("take `input` and `output` out"));
    }
    if let Some(schema) = output {
        tool = tool.output_schema(schema);
    }
    if let Some(effect) = table.word("effect", &EFFECTS) {
        tool = tool.effect(effect);
    }
    if let Some(extra) = table.word("extra", &EXTRAS) {
        tool = tool.extra(extra);
    }
    if table.word("policy", &[("open", true)]) == Some(true) {
        tool = tool.open();
    }
    for (key, set) in [("once", Tool::once as fn(Tool) -> Tool), ("idempotent", Tool::idempotent), ("untrusted", Tool::untrusted)] {
        if table.bool(key) == Some(true) {
            tool = set(tool);
        }
    }
    match table.duration("timeout").and_then(positive) {
        Some(timeout) => tool = tool.timeout(timeout),
        // A client takes its time, and asks its user in between.
        None if kind == Some(Kind::Client) => tool = tool.timeout(Duration::from_secs(600)),
        None => {}
    }
    if let Some(path) = table.pointer("shell") {
        tool = tool.shell(path);
    }
    if let Some(entities) = table.table("entities") {
        for entity in entities.keys() {
            if let Some(path) = entities.pointer(&entity) {
                tool = tool.entity(&entity, path);
            }
        }
    }
    tool = table.names("proves").unwrap_or_default().into_iter().fold(tool, |tool, path| tool.proves(path));
    tool = table.names("secrets").unwrap_or_default().into_iter().fold(tool, |tool, path| tool.secret(path));
    tool = table.names("revokes").unwrap_or_default().into_iter().fold(tool, Tool::revokes);
    tool = table.names("keeps").unwrap_or_default().into_iter().fold(tool, Tool::keeps);
    if let Some(who) = table.names("visible_to") {
        tool = tool.visible_to(who);
    }
    if let Some(polling) = table.table("polling") {
        let (interval, most) = (polling.duration("interval").and_then(positive), polling.count("max_unchanged"));
        polling.finish("`polling`");
        tool = tool.polling(interval.unwrap_or_default(), most.and_then(|most| u32::try_from(most).ok()).unwrap_or(10));
    }
    if let Some(bytes) = table.count("max_output").and_then(|bytes| usize::try_from(bytes).ok()) {
        tool = tool.max_output(bytes);
    }
    Some(tool)
}

/// A tool that is built in.
fn built_in(name: &str, table: &Table<'_>) -> Option<Tool> {
    let known: BTreeMap<&str, fn() -> Tool> = BTreeMap::from([
        ("calc", builtin::calc as fn() -> Tool),
        ("json_query", builtin::json_query),
        ("read_output", builtin::read_output),
    ]);
    let found = known.get(name).map(|make| make());
    if found.is_none() {
        let names = known.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let problem = Problem::new(format!("there is no built-in tool `{}`", crate::names::shown(name)));
        table.wrong("kind", problem.help(format!("there are {names}")).did_you_mean(name, known.keys()));
    }
    found
}

/// The rules of an agent out of the files that they came from: policy files, and at most one configuration.
pub(crate) fn rules_of<'a>(agent: &str, files: &[(&'a str, &'a str)]) -> Rules {
    let is_configuration = |text: &str| {
        let (document, _) = DeTable::parse_recoverable(text);
        document.get_ref().keys().any(|key| key.get_ref() != "policy")
    };
    let (configurations, policies): (Vec<_>, Vec<_>) = files.iter().copied().partition(|(_, text)| is_configuration(text));
    let Some((name, text)) = configurations.first().copied() else { return Rules::parse_all(policies) };
    let file = File { name: name.into(), text: text.into() };
    let (document, _) = DeTable::parse_recoverable(text);
    let shared = Shared::default();
    let table = Table::new(&file, document.get_ref(), 0..0, &shared);
    let own = table.table("agents").and_then(|agents| agents.table(agent));
    rule::read_with(&file, &own.as_ref().unwrap_or(&table).tables("policy"), policies)
}
