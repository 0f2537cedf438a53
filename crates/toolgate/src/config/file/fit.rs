//! An agent without those tools of upstreams that do not fit: whatever an upstream offers, it keeps nothing else from working.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::json;

use super::{Declared, Entry};
use crate::config::backend::{Behind, Exposed};
use crate::config::unfit::{Offered, Refusing, Unfit};
use crate::config::upstream::{Undeclared, Upstream};
use crate::hook::{CommandHook, Hook};
use crate::names::{is_tool_name, mapped_letters};
use crate::policy::{Place, Problem, Severity};
use crate::registry::Agent;
use crate::suggest::is_nearly;
use crate::tool::{Effect, Handler, Tool};

/// So often those tools are held back that something wrong is about; from then on all of them.
const TRIES: u32 = 4;
/// And so often it is built at all.
const MOST: u32 = 12;

/// Where tools of upstreams come from.
pub(super) struct Sources<'s> {
    pub(super) upstreams: &'s [Upstream],
    pub(super) exposed: &'s [Exposed],
    pub(super) offered: &'s Offered,
    /// The file.
    pub(super) whole: &'s Place,
    /// There is no other agent.
    pub(super) single: bool,
}

/// Why a tool that is named is not there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lacking {
    /// Its upstream was never seen.
    Unseen,
    /// Its upstream offers it, and it is held back.
    Held,
    /// Its upstream does not offer it.
    Unoffered,
}

/// What the names of an upstream's tools begin with.
fn prefix_of(upstream: &Upstream) -> String {
    mapped_letters(&upstream.prefix).collect()
}

/// Whether two upstreams have one tool by these names, but for what all of theirs begin with.
fn is_same((name, of): (&str, &Upstream), (other, whose): (&str, &Upstream)) -> bool {
    match (name.strip_prefix(&prefix_of(of)), other.strip_prefix(&prefix_of(whose))) {
        (Some(name), Some(other)) => name == other,
        _ => false,
    }
}

/// An agent that is being fitted.
pub(super) struct Fitting<'f> {
    declared: Declared,
    sources: &'f Sources<'f>,
    /// Its tools that no table declares, each with its upstream.
    undeclared: BTreeMap<&'f str, &'f str>,
    /// Tools that are named and are not there.
    awaited: BTreeSet<String>,
    /// What is held back, each as it is without anything that its upstream says of it; `None` where that is taken already.
    held: BTreeMap<String, Option<Tool>>,
    /// Nothing else is put behind these.
    refused: BTreeSet<String>,
    unfit: Vec<Unfit>,
}

impl<'f> Fitting<'f> {
    pub(super) fn new(declared: Declared, sources: &'f Sources<'f>) -> Self {
        let own = sources.exposed.iter().filter(|one| !one.declared && one.agent == declared.name);
        let undeclared = own.map(|one| (one.name.as_str(), one.upstream.as_str())).collect();
        let (held, awaited, refused) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Self { declared, sources, undeclared, awaited, held, refused, unfit: Vec::new() }
    }

    /// Builds it; else says what is wrong with the file itself.
    pub(super) fn build(mut self, script: Option<&Arc<dyn Handler>>) -> Result<(Agent, Vec<Unfit>), Vec<Problem>> {
        self.await_hooked();
        let mut tries = 0;
        loop {
            let wrong = match self.declared.clone().build(script, &self.refused, true) {
                Ok(agent) => return Ok((agent, self.unfit)),
                Err(wrong) => wrong,
            };
            tries += 1;
            let awaits = self.await_unknown(&wrong);
            // Where nothing runs, all that is wrong is to be seen.
            let holds = self.sources.offered.live && self.hold_back(&wrong, tries > TRIES);
            if !(awaits || holds) || tries >= MOST {
                return Err(wrong);
            }
        }
    }

    /// Puts tools there that are named, are not there, and could be an upstream's: the rules for them hold from when they come. Whether
    /// there were any.
    fn await_unknown(&mut self, wrong: &[Problem]) -> bool {
        let mut found = false;
        for problem in wrong.iter().filter(|problem| problem.severity == Severity::Error) {
            let Some(name) = problem.unknown.as_deref() else { continue };
            let Some((upstream, lacking)) = self.whose(name) else { continue };
            let why = match lacking {
                Lacking::Unseen => "its upstream was never seen, and what is said of it here holds from when it is",
                Lacking::Held => "it is held back; see `toolgate upstream list`",
                Lacking::Unoffered => "its upstream does not offer it, and what no table declares of it is held back; mend the name",
            };
            // Which of its tools is meant, nobody knows; nor whether it is one of another that is called nearly so.
            if lacking == Lacking::Unoffered {
                for upstream in self.owners(name) {
                    self.hold_undeclared(&upstream.name, problem);
                }
            }
            if lacking != Lacking::Held {
                for tool in self.nearly(name, upstream) {
                    self.hold(&tool, problem.to_string());
                }
            }
            let message = format!("{}: {why}", problem.message);
            self.declared.rules.problems.push(Problem { unknown: None, message: message.clone(), ..problem.clone() }.warning());
            if self.awaited.insert(name.to_owned()) {
                let unfit = Unfit {
                    agent: self.declared.name.clone(),
                    name: name.to_owned(),
                    upstream: upstream.name.clone(),
                    tool: name.to_owned(),
                    why: Problem { message, ..problem.clone() }.to_string(),
                    awaited: lacking != Lacking::Unoffered,
                };
                let place = problem.place.as_ref().or(upstream.place.as_ref()).unwrap_or(self.sources.whole).clone();
                self.put(upstream, unfit, place);
                found = true;
            }
        }
        found
    }

    /// Leaves out hooks that are for what an upstream may have, as long as there is nothing of the kind: they are asked from when there is.
    /// One that may be misspelt is none of them, nor one that is wrong in itself.
    fn await_hooked(&mut self) {
        let (declared, seen) = (&self.declared, &self.sources.offered.seen);
        let held: Vec<&String> = self.takes().filter_map(|upstream| seen.get(&upstream.name)).flatten().collect();
        let in_file = |name: &str, whose: &Upstream| {
            let is_meant =
                |called: &str, of: &Upstream| is_nearly(called, name) && (of.name == whose.name || !is_same((called, of), (name, whose)));
            declared.tools.iter().any(|entry| {
                let here = entry.tool.spec().name();
                let mut remote = self.would_be(entry).peekable();
                match remote.peek() {
                    None => is_nearly(here, name),
                    Some(_) => remote.any(|(of, called)| is_meant(here, of) || is_meant(&called, of)),
                }
            })
        };
        let may_come = |pattern: &String| {
            let head = pattern.split('*').next().unwrap_or_default();
            self.takes().any(|upstream| match pattern.strip_prefix(&prefix_of(upstream)) {
                // All that it has.
                Some("*") => !upstream.prefix.is_empty(),
                Some(rest) => !rest.starts_with('*') && !seen.contains_key(&upstream.name) && !in_file(head, upstream),
                None => false,
            })
        };
        let waits = |hook: &CommandHook| {
            let matches = |tool: &str| hook.matches(tool);
            let is_alone = declared.hooks.iter().filter(|other| other.name() == hook.name()).count() == 1
                && declared.rules.written().all(|written| written.policy.name() != hook.name());
            let may_be = hook.names().iter().all(may_come) || held.iter().any(|tool| matches(tool));
            may_be && is_alone && !declared.tools.iter().any(|entry| matches(entry.tool.spec().name()))
        };
        let (later, now): (Vec<CommandHook>, Vec<CommandHook>) = declared.hooks.iter().cloned().partition(waits);
        for hook in &later {
            let message =
                format!("the hook `{}` is meant for tools that no upstream offers now; it is asked from when one does", hook.name());
            let place = self.declared.hook_places.iter().find(|(name, _)| name == hook.name()).map(|(_, place)| place.clone());
            self.declared.rules.problems.push(Problem { place, ..Problem::new(message) }.warning());
        }
        self.declared.hooks = now;
    }

    /// The upstreams whose undeclared tools the agent takes.
    fn takes(&self) -> impl Iterator<Item = &'f Upstream> {
        let (sources, names) = (self.sources, &self.declared.upstreams);
        let takes = move |upstream: &&'f Upstream| match names {
            Some(names) => names.contains(&upstream.name),
            None => sources.single,
        };
        sources.upstreams.iter().filter(|upstream| upstream.undeclared != Undeclared::Deny).filter(takes)
    }

    /// The upstreams whose tool a name could be that no table declares.
    fn owners(&self, name: &str) -> Vec<&'f Upstream> {
        let length = |upstream: &'f Upstream| {
            let prefix = prefix_of(upstream);
            name.starts_with(&prefix).then_some((prefix.len(), upstream))
        };
        let owners: Vec<(usize, &'f Upstream)> = self.takes().filter(|_| is_tool_name(name)).filter_map(length).collect();
        // The longest prefix tells most.
        let longest = owners.iter().map(|(length, _)| *length).max();
        owners.into_iter().filter(|(length, _)| Some(*length) == longest).map(|(_, upstream)| upstream).collect()
    }

    /// Whose tool a name could be that no table declares, and why it is not there.
    fn whose(&self, name: &str) -> Option<(&'f Upstream, Lacking)> {
        let owners = self.owners(name);
        let held = |upstream: &Upstream| self.sources.offered.seen.get(&upstream.name).map(|held| held.contains(name));
        if let Some(holder) = owners.iter().copied().find(|upstream| held(upstream) == Some(true)) {
            return Some((holder, Lacking::Held));
        }
        // What is nearly a tool of the file is misspelt; or it is the name that a table replaces.
        let in_file = |tool: &str| !self.undeclared.contains_key(tool) && !self.awaited.contains(tool);
        // What all tools of an upstream begin with makes none of them like another; what nobody could hold back is compared as a whole.
        let prefix = owners.first().map(|upstream| prefix_of(upstream)).unwrap_or_default();
        let nearly = |entry: &Entry| {
            let tool = entry.tool.spec().name();
            match (&entry.behind, tool.strip_prefix(&prefix), name.strip_prefix(&prefix)) {
                (Some(Behind::Mcp { .. }), Some(tool), Some(name)) => is_nearly(tool, name),
                _ => is_nearly(tool, name),
            }
        };
        let is_meant = |entry: &Entry| nearly(entry) || self.would_be(entry).any(|(_, tool)| tool == name);
        if self.declared.tools.iter().filter(|entry| in_file(entry.tool.spec().name())).any(is_meant) {
            return None;
        }
        if let Some(unseen) = owners.iter().copied().find(|upstream| held(upstream).is_none()) {
            return Some((unseen, Lacking::Unseen));
        }
        // Where nothing runs, a name that nobody has is an error.
        owners.first().copied().filter(|_| self.sources.offered.live).map(|upstream| (upstream, Lacking::Unoffered))
    }

    /// What a tool of an upstream would be called if no table declared it.
    fn would_be<'e>(&'e self, entry: &'e Entry) -> impl Iterator<Item = (&'f Upstream, String)> + 'e {
        let (of, tools) = match &entry.behind {
            Some(Behind::Mcp { upstream, tools, .. }) => (Some(upstream), tools.as_slice()),
            _ => (None, <&[String]>::default()),
        };
        let upstream = self.sources.upstreams.iter().find(|upstream| Some(&upstream.name) == of);
        let name = |upstream: &Upstream, tool: &String| mapped_letters(&upstream.undeclared_name(tool)).collect();
        upstream.into_iter().flat_map(move |upstream| tools.iter().map(move |tool| (upstream, name(upstream, tool))))
    }

    /// The tools of whichever upstream that are nearly called so, here or as they would be if no table declared them. What is called so behind
    /// the prefix of another upstream is that one's: two upstreams may well have one tool.
    fn nearly(&self, name: &str, whose: &Upstream) -> Vec<String> {
        let is_meant =
            |called: &str, of: &Upstream| is_nearly(called, name) && (of.name == whose.name || !is_same((called, of), (name, whose)));
        // One that was never seen has nothing that runs.
        let is_seen = |of: &Upstream| self.sources.offered.seen.contains_key(&of.name);
        let meant = |entry: &&Entry| {
            let here = entry.tool.spec().name();
            self.would_be(entry).any(|(of, called)| is_seen(of) && (is_meant(&called, of) || is_meant(here, of)))
        };
        let names = self.declared.tools.iter().filter(meant).map(|entry| entry.tool.spec().name());
        names.filter(|tool| !self.held.contains_key(*tool)).map(str::to_owned).collect()
    }

    /// Puts a tool there that nobody can call.
    fn put(&mut self, upstream: &Upstream, unfit: Unfit, place: Place) {
        let tool = Tool::declared(&unfit.name, &unfit.name, json!({"type": "object"})).timeout(upstream.timeout).open();
        let tool = if upstream.undeclared == Undeclared::Read { tool.effect(Effect::Read) } else { tool };
        let tool = match self.declared.for_client {
            // Nobody here could refuse to run it.
            true => tool.run_by_client().visible_to([]),
            false => tool.handled_by(Refusing::of(&unfit)),
        };
        self.declared.tools.push(Entry { tool, place, section: None, behind: None, secrets: Vec::new(), on_files: false });
        self.refused.insert(unfit.name.clone());
        self.unfit.push(unfit);
    }

    /// Holds back what no table declares of an upstream.
    fn hold_undeclared(&mut self, upstream: &str, problem: &Problem) {
        let names: Vec<&str> = self.undeclared.iter().filter(|(_, of)| **of == upstream).map(|(name, _)| *name).collect();
        for name in names {
            if !self.held.contains_key(name) {
                self.hold(name, problem.to_string());
            }
        }
    }

    /// Holds back the tools that something wrong is about: what the file says of them holds as if they had never been seen. Whether there
    /// were any.
    fn hold_back(&mut self, wrong: &[Problem], all: bool) -> bool {
        // A name that nobody has is the file's own.
        let errors = || wrong.iter().filter(|problem| problem.severity == Severity::Error && problem.unknown.is_none());
        let Some(first) = errors().next() else { return false };
        let mut culprits: BTreeMap<String, &Problem> = BTreeMap::new();
        for problem in errors().filter(|_| !all) {
            for name in self.culprits(problem) {
                culprits.entry(name).or_insert(problem);
            }
        }
        // Whichever it is about.
        if culprits.is_empty() {
            culprits = self.remotes().map(|entry| (entry.tool.spec().name().to_owned(), first)).collect();
        }
        for (name, problem) in &culprits {
            // What is wrong with a rule stands somewhere in the file.
            let why = if problem.rule.is_some() { problem.to_string() } else { problem.message.clone() };
            self.hold(name, why);
        }
        !culprits.is_empty()
    }

    /// The tools of upstreams that can still be blamed.
    fn remotes(&self) -> impl Iterator<Item = &Entry> {
        let can_be = move |entry: &&Entry| !matches!(self.held.get(entry.tool.spec().name()), Some(None));
        self.declared.tools.iter().filter(|entry| matches!(entry.behind, Some(Behind::Mcp { .. }))).filter(can_be)
    }

    /// The tools that a problem is about: the first that it names, else those of its rule.
    fn culprits(&self, problem: &Problem) -> Vec<String> {
        let name = |entry: &Entry| entry.tool.spec().name().to_owned();
        let named = self.remotes().map(name).filter_map(|name| Some((problem.message.find(&format!("`{name}`"))?, name)));
        if let Some((_, name)) = named.min() {
            return vec![name];
        }
        let rule = self.declared.rules.written().find(|written| Some(written.policy.name()) == problem.rule.as_deref());
        let Some(rule) = rule else { return Vec::new() };
        self.remotes().filter(|entry| rule.policy.governs(entry.tool.spec())).map(name).collect()
    }

    fn hold(&mut self, name: &str, why: String) {
        let Some(entry) = self.declared.tools.iter_mut().find(|entry| entry.tool.spec().name() == name && entry.behind.is_some()) else {
            return;
        };
        let Some(Behind::Mcp { upstream, tools, .. }) = &entry.behind else { return };
        if let Some(held) = self.held.get_mut(name) {
            // What it calls secret is in somebody's way, too: then all of it is.
            entry.tool = held.take().map_or_else(|| entry.tool.clone(), Tool::veiled);
            return;
        }
        let tool = tools.first().cloned().unwrap_or_default();
        let unfit =
            Unfit { agent: self.declared.name.clone(), name: name.to_owned(), upstream: upstream.clone(), tool, why, awaited: false };
        let bare = |tool: Tool| tool.with_schemas(json!({"type": "object"}), None).handled_by(Refusing::of(&unfit));
        // Who calls it is refused; what it calls secret is written down by nobody all the same.
        let mut careful = entry.tool.clone();
        if !careful.find_secrets() {
            careful = careful.veiled();
        }
        let before = std::mem::replace(&mut entry.tool, bare(careful));
        self.held.insert(name.to_owned(), Some(bare(before)));
        self.refused.insert(name.to_owned());
        self.unfit.push(unfit);
    }
}
