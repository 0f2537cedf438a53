//! Implements `sequence`: a tool needs other tools to have succeeded in this session first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::json;

use super::definition;
use super::{
    Diagnostic, FactRequest, Policy, PolicyError, PolicyInput, Prerequisite, RuleCheck,
    StaticSummary, Verdict,
};
use crate::call::error::ToolError;
use crate::call::error_code;
use crate::diagnostic::check_tool_name;
use crate::tool::ToolSpec;

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
struct PrerequisiteCycle(Vec<String>);

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

    fn check_acyclic(&self) -> Result<(), PrerequisiteCycle> {
        let mut done = BTreeSet::new();
        self.prerequisites
            .keys()
            .try_for_each(|tool| self.visit_prerequisites(tool, &mut Vec::new(), &mut done))
    }

    fn visit_prerequisites<'a>(
        &'a self,
        tool: &'a Arc<str>,
        path: &mut Vec<&'a Arc<str>>,
        done: &mut BTreeSet<&'a Arc<str>>,
    ) -> Result<(), PrerequisiteCycle> {
        if let Some(start) = path.iter().position(|seen| *seen == tool) {
            let tools = path.iter().skip(start).chain([&tool]).map(|t| t.to_string()).collect();
            return Err(PrerequisiteCycle(tools));
        }
        if done.contains(tool) {
            return Ok(());
        }
        path.push(tool);
        for first in self.prerequisites.get(tool).into_iter().flatten() {
            self.visit_prerequisites(first, path, done)?;
        }
        path.pop();
        done.insert(tool);
        Ok(())
    }

    fn direct_prerequisites(&self, tool: &str) -> impl Iterator<Item = &Arc<str>> {
        self.prerequisites.get(tool).into_iter().flatten()
    }

    /// Returns the tools that must still succeed first.
    fn missing_tools(&self, input: &PolicyInput<'_>) -> Result<Vec<&Arc<str>>, PolicyError> {
        let mut missing = Vec::new();
        for first in self.direct_prerequisites(input.tool.name()) {
            if input.evidence_of(first, None, self.accepts_reported)?.is_none() {
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

    fn governs(&self, tool: &ToolSpec) -> bool {
        self.prerequisites.contains_key(tool.name())
    }

    fn problems(&self, tools: &[&ToolSpec]) -> Vec<Diagnostic> {
        let cycle = self.check_acyclic().err().map(|PrerequisiteCycle(tools)| {
            Diagnostic::at_field(
                "after",
                format!("the requirements form a cycle: {}", tools.join(" needs ")),
            )
            .with_help("remove one of these requirements")
        });
        let mut problems: Vec<Diagnostic> = cycle.into_iter().collect();
        if self.prerequisites.is_empty() {
            problems.push(
                Diagnostic::at_field("after", "the rule names no tool, so it never applies")
                    .with_help("name at least one"),
            );
        }
        let mut names = BTreeSet::new();
        for (tool, first) in &self.prerequisites {
            if first.is_empty() {
                let message =
                    format!("`{tool}` needs no tool first, so the rule never applies to it");
                problems.push(
                    Diagnostic::at_field(format!("after.{tool}"), message)
                        .with_help("name the tools that must come first, or remove the entry"),
                );
            }
            let inner = first
                .iter()
                .enumerate()
                .map(|(index, first)| (format!("after.{tool}.{index}"), first));
            for (field, name) in std::iter::once((format!("after.{tool}"), tool)).chain(inner) {
                if names.insert(name) {
                    problems.extend(check_tool_name(&field, name, tools));
                }
            }
        }
        // A report from a client is not evidence here, so the tool would always be denied.
        for (tool, first) in self.prerequisites.iter().filter(|_| !self.accepts_reported) {
            let sources = tools.iter().filter(|source| first.contains(source.name()));
            problems.extend(
                sources.filter_map(|source| source.warn_if_run_by_client(&format!("after.{tool}"))),
            );
        }
        problems
    }

    fn static_summary(&self, tool: &ToolSpec) -> StaticSummary<'_> {
        StaticSummary {
            prerequisites: self
                .direct_prerequisites(tool.name())
                .map(|first| (format!("after.{}", tool.name()), vec![&**first]))
                .collect(),
            ..StaticSummary::default()
        }
    }

    fn definition(&self) -> String {
        let parts = json!({ "name": self.name, "edges": self.prerequisites, "reported": self.accepts_reported });
        definition::definition("sequence", &parts)
    }

    fn request_facts(&self, input: &PolicyInput<'_>, needs: &mut FactRequest) {
        for first in self.direct_prerequisites(input.tool.name()) {
            needs.evidence_of(first, None, self.accepts_reported);
        }
    }

    fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        let tool = input.tool.name();
        let missing = self.missing_tools(input)?;
        for first in self.direct_prerequisites(tool) {
            input.record_check(|| RuleCheck {
                what: format!("`{first}` succeeded"),
                found: if missing.contains(&first) { "never in this session" } else { "yes" }
                    .to_owned(),
                holds: !missing.contains(&first),
            });
        }
        if missing.is_empty() {
            return Ok(Verdict::allow());
        }
        let names =
            missing.iter().map(|first| format!("`{first}`")).collect::<Vec<_>>().join(" and ");
        let message = format!("`{tool}` needs {names} to have succeeded first in this session");
        Ok(Verdict::deny(ToolError::from_code(error_code::PREREQUISITE_MISSING, message)))
    }

    fn suggest_prerequisites(&self, input: &PolicyInput<'_>) -> Option<Vec<Prerequisite>> {
        let missing = self.missing_tools(input).ok()?;
        Some(
            missing
                .into_iter()
                .take(1)
                .map(|tool| Prerequisite { tool: Arc::clone(tool), ..Prerequisite::default() })
                .collect(),
        )
    }
}
