//! What stands behind the tools of a file that are run elsewhere.

use std::sync::Arc;

use serde_json::{Value, json};

use super::Rules;
use super::file::{Config, Declared, Entry};
use super::http::HttpTool;
use super::unfit::Unfit;
use super::upstream::{Undeclared, Upstream};
use crate::policy::Problem;
use crate::registry::Agent;
use crate::tool::{Effect, Handler, Tool};
use crate::values::USER;

/// Who runs tools that are requests to web services or tools of MCP servers.
pub trait Backend {
    /// The tools of an upstream as they were accepted; `None` where nobody has seen it yet.
    fn tools(&self, upstream: &str) -> Option<Vec<Remote>>;
    /// What an upstream offers and is held back, by the names that it has there.
    fn held(&self, upstream: &str) -> Vec<String> {
        let _ = upstream;
        Vec::new()
    }
    /// What calls a tool of an upstream.
    fn remote(&self, upstream: &Upstream, tool: &str) -> Arc<dyn Handler>;
    /// What makes a request.
    fn http(&self, tool: &HttpTool) -> Arc<dyn Handler>;
    /// Whether anything really runs, so that all that it needs must be there.
    fn is_live(&self) -> bool {
        true
    }
}

/// A tool as an upstream describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Remote {
    /// What the upstream calls it.
    pub name: String,
    /// What the upstream says of it.
    pub description: String,
    /// The schema of its arguments.
    pub input: Value,
    /// The schema of its result.
    pub output: Option<Value>,
}

/// What a tool of a file is run by.
#[derive(Debug, Clone)]
pub(super) enum Behind {
    Http(Box<HttpTool>),
    Mcp {
        upstream: String,
        /// What it may be called there; the first that is there is meant.
        tools: Vec<String>,
        described: bool,
        timed: bool,
    },
}

/// A tool of an upstream, under the name that an agent has for it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Exposed {
    /// The agent.
    pub agent: String,
    /// What it is called there.
    pub name: String,
    /// Where it comes from.
    pub upstream: String,
    /// What it is called there.
    pub tool: String,
    /// What it does to the world, as far as somebody has said.
    pub effect: Effect,
    /// Whether a table declares it.
    pub declared: bool,
}

/// The longest description that a model is given.
const LONGEST: usize = 1_024;

impl Config {
    /// With tools that really run: requests are made, and upstreams are called.
    #[must_use]
    pub fn behind(mut self, backend: &dyn Backend) -> Self {
        // An upstream that lacks something is away, and takes nobody along.
        let missing = self.agents.iter().flat_map(|declared| {
            declared.tools.iter().flat_map(|entry| match &entry.behind {
                Some(Behind::Http(http)) => http.headers.iter().map(|(_, value)| value).collect::<Vec<_>>(),
                _ => Vec::new(),
            })
        });
        let missing: Vec<Problem> = missing.filter(|_| backend.is_live()).filter_map(super::Reference::problem).collect();
        self.problems.extend(missing);
        self.offered.live = backend.is_live();
        for upstream in self.upstreams.iter().filter(|upstream| backend.tools(&upstream.name).is_some()) {
            let names: Vec<String> = backend.held(&upstream.name).iter().map(|tool| upstream.undeclared_name(tool)).collect();
            self.offered.seen.insert(upstream.name.clone(), each_mapped(names.iter().map(String::as_str)).collect());
        }
        let single = self.agents.len() == 1;
        let mut agents = std::mem::take(&mut self.agents);
        for declared in &mut agents {
            for entry in &mut declared.tools {
                match entry.behind.clone() {
                    Some(Behind::Http(http)) => entry.tool = entry.tool.clone().handled_by(backend.http(&http)),
                    Some(Behind::Mcp { upstream, tools, described, timed }) => {
                        let known = backend.tools(&upstream).unwrap_or_default();
                        let meant = tools.iter().find(|tool| known.iter().any(|remote| remote.name == **tool)).or_else(|| tools.first());
                        let Some(tool) = meant.cloned() else { continue };
                        let is_there = self.connect(entry, &upstream, &tool, described, timed, backend);
                        entry.behind = Some(Behind::Mcp { upstream: upstream.clone(), tools: vec![tool.clone()], described, timed });
                        let spec = entry.tool.spec();
                        let (name, effect) = (spec.name().to_owned(), spec.effect());
                        // It may be held back, or gone: whoever calls it hears so. That is no reason to take others down.
                        if !is_there {
                            let why = "it is not there, or is held back; see `toolgate upstream list`".to_owned();
                            let (agent, name) = (declared.name.clone(), name.clone());
                            let (upstream, tool) = (upstream.clone(), tool.clone());
                            self.offered.unfit.push(Unfit { agent, name, upstream, tool, why, awaited: true });
                        }
                        self.exposed.push(Exposed { agent: declared.name.clone(), name, upstream, tool, effect, declared: true });
                    }
                    None => {}
                }
            }
            self.offer_undeclared(declared, single, backend);
        }
        self.agents = agents;
        self
    }

    /// The tools of an upstream that tables declare, as long as nothing is behind them: the name that the table gives to one, and what it
    /// may be called there. The first of these that is there is meant.
    pub fn declared_of<'c>(&'c self, upstream: &'c str) -> impl Iterator<Item = (&'c str, &'c [String])> {
        self.agents.iter().flat_map(|declared| &declared.tools).filter_map(move |entry| match &entry.behind {
            Some(Behind::Mcp { upstream: from, tools, .. }) if from == upstream => Some((entry.tool.spec().name(), tools.as_slice())),
            _ => None,
        })
    }

    /// Puts a tool of an upstream behind one that is declared. Whether it is there, as far as that is known.
    fn connect(&self, entry: &mut Entry, upstream: &str, tool: &str, described: bool, timed: bool, backend: &dyn Backend) -> bool {
        // An upstream that is not there was told when the file was read.
        let Some(found) = self.upstreams.iter().find(|known| known.name == upstream) else { return true };
        let handler = backend.remote(found, tool);
        let mut connected = entry.tool.clone().handled_by(handler);
        if !timed {
            connected = connected.timeout(found.timeout);
        }
        let known = backend.tools(upstream);
        let remote = known.iter().flatten().find(|remote| remote.name == tool);
        if let Some(remote) = remote {
            connected = connected.with_schemas(remote.input.clone(), remote.output.clone());
            if !described {
                connected = connected.description(&cut(&remote.description, &remote.name));
            }
        }
        entry.tool = connected;
        known.is_none() || remote.is_some()
    }

    /// Offers what no table declares, where the upstream's own table says so.
    fn offer_undeclared(&mut self, declared: &mut Declared, single: bool, backend: &dyn Backend) {
        let mut asks = Vec::new();
        let mut found: Vec<(String, &Upstream, Remote)> = Vec::new();
        for upstream in &self.upstreams {
            let taken = match &declared.upstreams {
                Some(names) => names.contains(&upstream.name),
                None => single,
            };
            if !taken || upstream.undeclared == Undeclared::Deny {
                continue;
            }
            let remotes = backend.tools(&upstream.name).unwrap_or_default();
            let names: Vec<String> = remotes.iter().map(|remote| upstream.undeclared_name(&remote.name)).collect();
            let mapped = crate::names::map_foreign(names.iter().map(String::as_str));
            // Two of one upstream that cannot be told apart are there, and left out.
            let left_out = each_mapped(mapped.held_back.iter().map(String::as_str));
            if let Some(seen) = self.offered.seen.get_mut(&upstream.name) {
                seen.extend(left_out);
            }
            for (legal, foreign) in &mapped.names {
                let Some(remote) = names.iter().position(|name| name == foreign).and_then(|at| remotes.get(at)) else { continue };
                let declares = |entry: &Entry| {
                    let own = matches!(&entry.behind, Some(Behind::Mcp { upstream: from, tools, .. }) if *from == upstream.name && tools.contains(&remote.name));
                    own || entry.tool.spec().name() == legal
                };
                if !declared.tools.iter().any(declares) {
                    found.push((legal.clone(), upstream, remote.clone()));
                }
            }
        }
        // Two that cannot be told apart are both held back: neither may stand in for the other.
        let twice: Vec<String> = found
            .iter()
            .map(|(legal, ..)| legal)
            .filter(|legal| found.iter().filter(|(other, ..)| other == *legal).count() > 1)
            .cloned()
            .collect();
        for (legal, upstream, remote) in &found {
            if twice.contains(legal) {
                self.offered.seen.entry(upstream.name.clone()).or_default().insert(legal.clone());
                tracing::warn!(upstream = upstream.name, tool = legal, "another upstream has a tool of this name; both are held back");
                continue;
            }
            let tool = Tool::with_handler(
                legal,
                &cut(&remote.description, &remote.name),
                remote.input.clone(),
                backend.remote(upstream, &remote.name),
            )
            .timeout(upstream.timeout);
            let tool = remote.output.clone().map_or_else(|| tool.clone(), |schema| tool.clone().output_schema(schema));
            // One that no agent can be built with is held back, and takes nobody else along.
            if let Some(why) = unbuildable(&tool, &declared.rules) {
                self.offered.seen.entry(upstream.name.clone()).or_default().insert(legal.clone());
                self.offered.unfit.push(Unfit {
                    agent: declared.name.clone(),
                    name: legal.clone(),
                    upstream: upstream.name.clone(),
                    tool: remote.name.clone(),
                    why,
                    awaited: false,
                });
                continue;
            }
            let tool = match upstream.undeclared {
                Undeclared::Open => tool.open(),
                Undeclared::Read => tool.effect(Effect::Read),
                Undeclared::Ask | Undeclared::Deny => tool,
            };
            if upstream.undeclared == Undeclared::Ask {
                asks.push(legal.clone());
            }
            self.exposed.push(Exposed {
                agent: declared.name.clone(),
                name: legal.clone(),
                upstream: upstream.name.clone(),
                tool: remote.name.clone(),
                effect: tool.spec().effect(),
                declared: false,
            });
            let place = upstream.place.clone().unwrap_or_else(|| self.whole.clone());
            let behind =
                Some(Behind::Mcp { upstream: upstream.name.clone(), tools: vec![remote.name.clone()], described: false, timed: true });
            declared.tools.push(Entry { tool, place, section: None, behind, secrets: Vec::new(), on_files: false });
        }
        if !asks.is_empty() {
            declared.ask_before(&asks, UNSAID);
        }
    }

    /// The same with tools that an agent's client has and no table declares: a person is asked before each call of them.
    #[must_use]
    pub fn with_undeclared(mut self, agent: &str, tools: &[&str]) -> Self {
        let Some(declared) = self.agents.iter_mut().find(|declared| declared.name == agent) else { return self };
        let mut lacking = Vec::new();
        for tool in tools.iter().copied() {
            if declared.tools.iter().all(|entry| entry.tool.spec().name() != tool) {
                let external = Tool::external(tool, tool, None);
                let place = self.whole.clone();
                declared.tools.push(Entry { tool: external, place, section: None, behind: None, secrets: Vec::new(), on_files: false });
                lacking.push(tool.to_owned());
            }
        }
        // It may be called otherwise here than by its client.
        match lacking.as_slice() {
            [] => {}
            [one] => declared.ask_before(&lacking, &format!("{UNSAID} In a configuration it is `[tools.{one}]`.")),
            _ => declared.ask_before(&lacking, UNSAID),
        }
        self
    }
}

/// Why a person is asked about a tool that no table declares.
const UNSAID: &str = "Nobody has said what this tool does.";

impl Declared {
    /// Nobody has said what these do.
    fn ask_before(&mut self, tools: &[String], reason: &str) {
        let text = format!(
            "[[policy]]\nname = \"undeclared_tool\"\nrule = \"ask\"\ntools = {}\nwhen = \"true\"\nreason = {}\n",
            json!(tools),
            json!(reason)
        );
        self.rules = std::mem::take(&mut self.rules).and(Rules::parse("(built in)", &text));
    }
}

/// What each of these names would be, were it alone.
fn each_mapped<'n>(names: impl Iterator<Item = &'n str>) -> impl Iterator<Item = String> {
    names.flat_map(|name| crate::names::map_foreign([name]).names.into_keys())
}

/// Why no agent with these rules can have a tool.
fn unbuildable(tool: &Tool, rules: &Rules) -> Option<String> {
    if let Err(error) = Agent::builder("probe").tool(tool.clone().open()).build() {
        return Some(error.problems.iter().map(|problem| problem.message.as_str()).collect::<Vec<_>>().join("; "));
    }
    let means_the_user = tool.spec().name() == USER && rules.written().any(|written| written.policy.sources().is_some());
    means_the_user.then(|| "rules about where values come from mean the user by its name; declare it under another".to_owned())
}

/// A description that a model can be given: some words, and not too many.
fn cut(description: &str, name: &str) -> String {
    let description = if description.trim().is_empty() { name } else { description.trim() };
    if description.chars().count() <= LONGEST {
        return description.to_owned();
    }
    description.chars().take(LONGEST - 1).chain(['…']).collect()
}
