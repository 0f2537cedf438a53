//! Defines the declaration of a tool.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Effect, Example, Extra, Polling, Reconcile, Retry};
use crate::limits::Spend;
use crate::normalize::Rule;
use crate::policy::Problem;
use toolgate_json::Pointer;

/// The declaration of a tool: everything except its handler.
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
    pub secrets: Vec<Pointer>,
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
    /// Argument that contains a shell command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shell: Option<Pointer>,
    /// Whether all arguments are kept out of the ledger.
    #[serde(skip)]
    pub(crate) veiled: bool,
}

impl Spec {
    /// Checks whether a read-only tool can settle calls with unknown outcome.
    #[must_use]
    pub const fn can_be_reconciled(&self) -> bool {
        self.reconcile.is_some()
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the description for the model.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Returns the JSON Schema of the arguments. A tool that the client runs may have none.
    #[must_use]
    pub const fn input_schema(&self) -> Option<&Value> {
        self.input.as_ref()
    }

    /// Returns the JSON Schema of the result.
    #[must_use]
    pub const fn output_schema(&self) -> Option<&Value> {
        self.output.as_ref()
    }

    /// Returns the argument that contains a shell command.
    #[must_use]
    pub const fn shell_argument(&self) -> Option<&Pointer> {
        self.shell.as_ref()
    }

    /// Returns the effect on the world.
    #[must_use]
    pub const fn effect(&self) -> Effect {
        self.effect
    }

    /// Returns the example calls.
    #[must_use]
    pub fn examples(&self) -> &[Example] {
        &self.examples
    }

    /// Reports that evidence about an entity is required but the tool does not declare the entity.
    pub(crate) fn lacks_entity(&self, field: &str, entity: &str) -> Option<Problem> {
        let declared = || self.entities.iter().map(|(name, _)| name);
        if declared().any(|name| **name == *entity) {
            return None;
        }
        let message = format!("`{}` declares no entity `{}`, so its evidence cannot be compared", self.name, toolgate_text::shown(entity));
        Some(Problem::at(field, message).did_you_mean(entity, declared()))
    }

    /// Reports that a field is required as evidence but the tool does not declare it.
    pub(crate) fn lacks_proof(&self, field: &str, path: &Pointer) -> Option<Problem> {
        if self.proves.contains(path) {
            return None;
        }
        let problem = Problem::at(field, format!("`{}` does not declare `{path}` as evidence", self.name));
        Some(problem.did_you_mean(&path.to_string(), self.proves.iter().map(ToString::to_string)))
    }

    /// Warns if evidence of a tool that the client runs is required.
    pub(crate) fn run_by_client(&self, field: &str) -> Option<Problem> {
        let message = || format!("the client runs `{}`, and results that a client reports do not count here", self.name);
        self.external.then(|| Problem::at(field, message()).help("set `reported = true` to trust the client").warning())
    }

    /// Checks whether the client runs the tool.
    pub(crate) const fn handler_is_external(&self) -> bool {
        self.external
    }

    /// Checks whether the client runs the tool and reports the result.
    #[must_use]
    pub const fn is_run_by_client(&self) -> bool {
        self.external
    }

    /// Checks whether a second run changes nothing more.
    #[must_use]
    pub const fn is_idempotent(&self) -> bool {
        self.idempotent
    }
}
