//! Implements `sequence`: a tool needs other tools to have succeeded in this session first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::json;

use super::definition;
use super::{Ask, Fault, Needs, Note, Outline, Policy, Problem, Remedy, Verdict};
use crate::call::error::ToolError;
use crate::call::error_code;
use crate::diagnostic::unknown_tool;
use crate::tool::Spec;

/// A graph of prerequisites: `deploy` after `test` and `build`, `build` after `lint`.
///
/// ```
/// use toolgate::policy::{Policy, Sequence};
/// let pipeline = Sequence::new("pipeline").after("deploy", ["test", "build"]).after("build", ["lint"]);
/// let circular = pipeline.after("lint", ["build"]);
/// let problems = circular.problems(&[]);
/// assert!(problems.iter().any(|p| p.message.ends_with("build needs lint needs build")));
/// ```
#[derive(Debug, Clone)]
pub struct Sequence {
    name: String,
    prerequisites: BTreeMap<Arc<str>, BTreeSet<Arc<str>>>,
    /// Whether evidence that a client reports counts.
    accepts_reported: bool,
}

/// A cycle of tools that need each other; the first one is repeated at the end.
struct Cycle(Vec<String>);

impl Sequence {
    /// Creates a sequence without requirements.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), prerequisites: BTreeMap::new(), accepts_reported: false }
    }

    /// Requires a success of each tool in `first` before `tool`.
    #[must_use]
    pub fn after<'a>(mut self, tool: &str, first: impl IntoIterator<Item = &'a str>) -> Self {
        self.prerequisites.entry(tool.into()).or_default().extend(first.into_iter().map(Arc::from));
        self
    }

    /// Accepts evidence that a client reports [default: only calls that ran here].
    #[must_use]
    pub const fn accept_reported(mut self) -> Self {
        self.accepts_reported = true;
        self
    }

    fn check_acyclic(&self) -> Result<(), Cycle> {
        let mut done = BTreeSet::new();
        self.prerequisites.keys().try_for_each(|tool| self.walk(tool, &mut Vec::new(), &mut done))
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
        for first in self.prerequisites.get(tool).into_iter().flatten() {
            self.walk(first, path, done)?;
        }
        path.pop();
        done.insert(tool);
        Ok(())
    }

    fn first(&self, tool: &str) -> impl Iterator<Item = &Arc<str>> {
        self.prerequisites.get(tool).into_iter().flatten()
    }

    /// Returns the tools that must still succeed first.
    fn missing(&self, ask: &Ask<'_>) -> Result<Vec<&Arc<str>>, Fault> {
        let mut missing = Vec::new();
        for first in self.first(ask.tool.name()) {
            if ask.evidence_of(first, None, self.accepts_reported)?.is_none() {
                missing.push(first);
            }
        }
        Ok(missing)
    }
}

impl Policy for Sequence {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &Spec) -> bool {
        self.prerequisites.contains_key(tool.name())
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<Problem> {
        let circle = self.check_acyclic().err().map(|Cycle(tools)| {
            Problem::at("after", format!("the requirements form a cycle: {}", tools.join(" needs ")))
                .help("remove one of these requirements")
        });
        let mut problems: Vec<Problem> = circle.into_iter().collect();
        if self.prerequisites.is_empty() {
            problems.push(Problem::at("after", "the rule names no tool, so it never applies").help("name at least one"));
        }
        let mut names = BTreeSet::new();
        for (tool, first) in &self.prerequisites {
            if first.is_empty() {
                let message = format!("`{tool}` needs no tool first, so the rule never applies to it");
                problems
                    .push(Problem::at(format!("after.{tool}"), message).help("name the tools that must come first, or remove the entry"));
            }
            let inner = first.iter().enumerate().map(|(index, first)| (format!("after.{tool}.{index}"), first));
            for (field, name) in std::iter::once((format!("after.{tool}"), tool)).chain(inner) {
                if names.insert(name) {
                    problems.extend(unknown_tool(&field, name, tools));
                }
            }
        }
        // A report from a client is not evidence here, so the tool would always be denied.
        for (tool, first) in self.prerequisites.iter().filter(|_| !self.accepts_reported) {
            let sources = tools.iter().filter(|source| first.contains(source.name()));
            problems.extend(sources.filter_map(|source| source.run_by_client(&format!("after.{tool}"))));
        }
        problems
    }

    fn outline(&self, tool: &Spec) -> Outline<'_> {
        Outline {
            prerequisites: self.first(tool.name()).map(|first| (format!("after.{}", tool.name()), vec![&**first])).collect(),
            ..Outline::default()
        }
    }

    fn definition(&self) -> String {
        let parts = json!({ "name": self.name, "edges": self.prerequisites, "reported": self.accepts_reported });
        definition::definition("sequence", &parts)
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        for first in self.first(ask.tool.name()) {
            needs.evidence_of(first, None, self.accepts_reported);
        }
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let tool = ask.tool.name();
        let missing = self.missing(ask)?;
        for first in self.first(tool) {
            ask.note(|| Note {
                what: format!("`{first}` succeeded"),
                found: if missing.contains(&first) { "never in this session" } else { "yes" }.to_owned(),
                holds: !missing.contains(&first),
            });
        }
        if missing.is_empty() {
            return Ok(Verdict::allow());
        }
        let names = missing.iter().map(|first| format!("`{first}`")).collect::<Vec<_>>().join(" and ");
        let message = format!("`{tool}` needs {names} to have succeeded first in this session");
        Ok(Verdict::deny(ToolError::of(error_code::PREREQUISITE_MISSING, message)))
    }

    fn remedies(&self, ask: &Ask<'_>) -> Option<Vec<Remedy>> {
        let missing = self.missing(ask).ok()?;
        Some(missing.into_iter().take(1).map(|tool| Remedy { tool: Arc::clone(tool), ..Remedy::default() }).collect())
    }
}
