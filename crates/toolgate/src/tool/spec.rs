//! What is declared of a tool.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Effect, Example, Extra, Polling, Reconcile, Retry};
use crate::json::Pointer;
use crate::limits::Spend;
use crate::normalize::Rule;
use crate::policy::Problem;

/// Everything about a tool but its handler.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Spec {
    pub(crate) name: Arc<str>,
    pub(crate) description: String,
    pub(crate) accepts_overrides: bool,
    pub(crate) input: Option<Value>,
    pub(crate) output: Option<Value>,
    pub(crate) effect: Effect,
    pub(crate) idempotent: bool,
    pub(crate) once: bool,
    pub(crate) local: bool,
    pub(crate) open: bool,
    pub(crate) polling: Option<Polling>,
    pub(crate) retry: Retry,
    pub(crate) timeout: Duration,
    pub(crate) heartbeat: Option<Duration>,
    pub(crate) extra: Extra,
    pub(crate) examples: Vec<Example>,
    pub(crate) secrets: Vec<Pointer>,
    pub(crate) entities: Vec<(Arc<str>, Pointer)>,
    pub(crate) proves: Vec<Pointer>,
    pub(crate) revokes: Vec<(Arc<str>, Option<Arc<str>>)>,
    pub(crate) reconcile: Option<Reconcile>,
    pub(crate) untrusted: bool,
    pub(crate) keeps: Vec<Arc<str>>,
    pub(crate) external: bool,
    pub(crate) normalize: Vec<Rule>,
    pub(crate) max_output: Option<usize>,
    pub(crate) cost: Spend,
    pub(crate) visible_to: Option<BTreeSet<String>>,
    pub(crate) empty_statuses: BTreeSet<u16>,
    /// Where a shell command stands in the arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shell: Option<Pointer>,
    /// Nothing of its arguments is written down.
    #[serde(skip)]
    pub(crate) veiled: bool,
}

impl Spec {
    /// Whether it says which read tells whether a call took effect.
    #[must_use]
    pub const fn can_be_reconciled(&self) -> bool {
        self.reconcile.is_some()
    }

    /// Name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Description for the model.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.description
    }

    /// JSON Schema of the arguments; a tool that the client runs itself may have none.
    #[must_use]
    pub const fn input_schema(&self) -> Option<&Value> {
        self.input.as_ref()
    }

    /// JSON Schema of the result.
    #[must_use]
    pub const fn output_schema(&self) -> Option<&Value> {
        self.output.as_ref()
    }

    /// Where a shell command stands in the arguments.
    #[must_use]
    pub const fn shell_argument(&self) -> Option<&Pointer> {
        self.shell.as_ref()
    }

    /// What it does to the world.
    #[must_use]
    pub const fn effect(&self) -> Effect {
        self.effect
    }

    /// Worked calls.
    #[must_use]
    pub fn examples(&self) -> &[Example] {
        &self.examples
    }

    /// What is wrong where evidence about an entity is wanted that the tool does not declare.
    pub(crate) fn lacks_entity(&self, field: &str, entity: &str) -> Option<Problem> {
        let declared = || self.entities.iter().map(|(name, _)| name);
        if declared().any(|name| **name == *entity) {
            return None;
        }
        let message = format!("`{}` declares no entity `{}`, so nothing it proves can be compared", self.name, crate::names::shown(entity));
        Some(Problem::at(field, message).did_you_mean(entity, declared()))
    }

    /// What is wrong where a field is wanted that the tool does not declare to prove.
    pub(crate) fn lacks_proof(&self, field: &str, path: &Pointer) -> Option<Problem> {
        if self.proves.contains(path) {
            return None;
        }
        let problem = Problem::at(field, format!("`{}` does not declare that it proves `{path}`", self.name));
        Some(problem.did_you_mean(&path.to_string(), self.proves.iter().map(ToString::to_string)))
    }

    /// What is odd about asking for evidence of a tool that the client runs.
    pub(crate) fn run_by_client(&self, field: &str) -> Option<Problem> {
        let message = || format!("`{}` is run by the client, and what a client reports does not count here", self.name);
        self.external.then(|| Problem::at(field, message()).help("say `reported = true` to believe the client").warning())
    }

    /// Whether the client runs it.
    pub(crate) const fn handler_is_external(&self) -> bool {
        self.external
    }

    /// Whether the client runs it, and reports what came of it.
    #[must_use]
    pub const fn is_run_by_client(&self) -> bool {
        self.external
    }

    /// True where a second run changes nothing more.
    #[must_use]
    pub const fn is_idempotent(&self) -> bool {
        self.idempotent
    }
}
