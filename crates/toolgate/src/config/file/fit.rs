//! An agent without those tools of upstreams that do not fit: whatever an upstream offers, it keeps nothing else from working.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::json;

use super::{Declared, Entry};
use crate::config::backend::Behind;
use crate::config::unfit::{Offered, Refusing, Unfit};
use crate::policy::{Problem, Severity};
use crate::registry::Agent;
use crate::tool::{Handler, Tool};

/// So often those tools are held back that something wrong is about; from then on all of them.
const TRIES: u32 = 4;

/// An agent that is being fitted.
pub(super) struct Fitting<'f> {
    declared: Declared,
    offered: &'f Offered,
    /// What is held back, each as it is without anything that its upstream says of it; `None` where that is taken already.
    held: BTreeMap<String, Option<Tool>>,
    /// Nothing else is put behind these.
    refused: BTreeSet<String>,
    unfit: Vec<Unfit>,
}

impl<'f> Fitting<'f> {
    pub(super) fn new(declared: Declared, offered: &'f Offered) -> Self {
        Self { declared, offered, held: BTreeMap::new(), refused: BTreeSet::new(), unfit: Vec::new() }
    }

    /// Builds it; else says what is wrong with the file itself.
    pub(super) fn build(mut self, script: Option<&Arc<dyn Handler>>) -> Result<(Agent, Vec<Unfit>), Vec<Problem>> {
        let mut tries = 0;
        loop {
            let wrong = match self.declared.clone().build(script, &self.refused, true) {
                Ok(agent) => return Ok((agent, self.unfit)),
                Err(wrong) => wrong,
            };
            tries += 1;
            // Where nothing runs, all that is wrong is to be seen.
            if !self.offered.live || !self.hold_back(&wrong, tries > TRIES) {
                return Err(wrong);
            }
        }
    }

    /// Holds back the tools that something wrong is about: what the file says of them holds as if they had never been seen. Whether there
    /// were any.
    fn hold_back(&mut self, wrong: &[Problem], all: bool) -> bool {
        let errors = || wrong.iter().filter(|problem| problem.severity == Severity::Error);
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
        let Some(entry) = self.declared.tools.iter_mut().find(|entry| entry.tool.spec().name() == name) else { return };
        let Some(Behind::Mcp { upstream, tools, .. }) = &entry.behind else { return };
        if let Some(held) = self.held.get_mut(name) {
            // What it calls secret is in somebody's way, too.
            entry.tool = held.take().unwrap_or_else(|| entry.tool.clone());
            return;
        }
        let tool = tools.first().cloned().unwrap_or_default();
        let unfit =
            Unfit { agent: self.declared.name.clone(), name: name.to_owned(), upstream: upstream.clone(), tool, why, awaited: false };
        let bare = |tool: Tool| tool.with_schemas(json!({"type": "object"}), None).handled_by(Refusing::of(&unfit));
        // Who calls it is refused; what it calls secret is written down by nobody all the same.
        let mut careful = entry.tool.clone();
        careful.find_secrets();
        let before = std::mem::replace(&mut entry.tool, bare(careful));
        self.held.insert(name.to_owned(), Some(bare(before)));
        self.refused.insert(name.to_owned());
        self.unfit.push(unfit);
    }
}
