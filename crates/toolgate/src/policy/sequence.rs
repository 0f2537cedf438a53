//! `sequence`: a tool needs others to have succeeded in this session first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Ask, Fault, Needs, Policy, ToolNames, Verdict};
use crate::code;
use crate::error::{NextStep, ToolError};
use crate::tool::Spec;

/// A graph of tools: `deploy` after `test` and `build`, `build` after `lint`.
///
/// ```
/// use toolgate::policy::{Policy, Sequence};
/// let pipeline = Sequence::new("pipeline").after("deploy", ["test", "build"]).after("build", ["lint"]);
/// let circular = pipeline.after("lint", ["build"]);
/// assert!(circular.problems(&[]).contains(&"it goes in a circle: build needs lint needs build".to_owned()));
/// ```
#[derive(Debug, Clone)]
pub struct Sequence {
    name: String,
    edges: BTreeMap<Arc<str>, BTreeSet<Arc<str>>>,
    /// Whether what a client reports counts.
    reported: bool,
    /// For each tool, everything that must come before it, near and far.
    before: BTreeMap<Arc<str>, Vec<Arc<str>>>,
}

/// Tools that wait for each other, ending where it begins.
struct Cycle(Vec<String>);

impl Sequence {
    /// A sequence that asks for nothing yet.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), edges: BTreeMap::new(), reported: false, before: BTreeMap::new() }
    }

    /// Says that `tool` needs a success of each of `first`.
    #[must_use]
    pub fn after<'a>(mut self, tool: &str, first: impl IntoIterator<Item = &'a str>) -> Self {
        self.edges.entry(tool.into()).or_default().extend(first.into_iter().map(Arc::from));
        self.before = self.edges.keys().map(|tool| (Arc::clone(tool), self.all_before(tool))).collect();
        self
    }

    /// Lets what a client reports count as well. Without it only what ran here does.
    #[must_use]
    pub const fn accept_reported(mut self) -> Self {
        self.reported = true;
        self
    }

    fn check_acyclic(&self) -> Result<(), Cycle> {
        let mut done = BTreeSet::new();
        self.edges.keys().try_for_each(|tool| self.walk(tool, &mut Vec::new(), &mut done))
    }

    fn walk<'a>(&'a self, tool: &'a Arc<str>, path: &mut Vec<&'a Arc<str>>, done: &mut BTreeSet<&'a Arc<str>>) -> Result<(), Cycle> {
        if let Some(start) = path.iter().position(|seen| *seen == tool) {
            let tools = path.iter().skip(start).chain([&tool]).map(|t| t.to_string()).collect();
            return Err(Cycle(tools));
        }
        if done.contains(tool) {
            return Ok(());
        }
        path.push(tool);
        for first in self.edges.get(tool).into_iter().flatten() {
            self.walk(first, path, done)?;
        }
        path.pop();
        done.insert(tool);
        Ok(())
    }

    fn first(&self, tool: &str) -> impl Iterator<Item = &Arc<str>> {
        self.edges.get(tool).into_iter().flatten()
    }

    fn all_before(&self, tool: &str) -> Vec<Arc<str>> {
        let (mut all, mut todo) = (BTreeSet::new(), vec![tool]);
        while let Some(tool) = todo.pop() {
            for first in self.first(tool) {
                if all.insert(first) {
                    todo.push(first);
                }
            }
        }
        all.into_iter().cloned().collect()
    }

    /// The step to take now towards `tool`: something missing that itself has nothing missing.
    fn next_towards<'a>(&'a self, tool: &'a str, missing: &BTreeSet<&Arc<str>>) -> &'a str {
        let mut at = tool;
        while let Some(first) = self.first(at).find(|first| missing.contains(first)) {
            at = first;
        }
        at
    }
}

impl Policy for Sequence {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &Spec) -> bool {
        self.edges.contains_key(tool.name())
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<String> {
        let circle = self.check_acyclic().err().map(|Cycle(tools)| format!("it goes in a circle: {}", tools.join(" needs ")));
        let named = ToolNames::of(self.edges.iter().flat_map(|(tool, first)| first.iter().chain([tool])).map(AsRef::as_ref));
        circle.into_iter().chain(named.unknown(tools)).collect()
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        for before in self.before.get(ask.tool.name()).into_iter().flatten() {
            needs.evidence_of(before, None, self.reported);
        }
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let tool = ask.tool.name();
        let mut missing = BTreeSet::new();
        for before in self.before.get(tool).into_iter().flatten() {
            if ask.evidence_of(before, None, self.reported)?.is_none() {
                missing.insert(before);
            }
        }
        let direct: Vec<String> = self.first(tool).filter(|first| missing.contains(first)).map(|first| format!("`{first}`")).collect();
        if direct.is_empty() {
            return Ok(Verdict::allow());
        }
        let message = format!("`{tool}` needs {} to have succeeded first in this session", direct.join(" and "));
        let mut error = ToolError::of(code::PREREQUISITE_MISSING, message);
        error.next = Some(NextStep { tool: self.next_towards(tool, &missing).to_owned(), arguments: serde_json::json!({}) });
        Ok(Verdict::deny(error))
    }
}
