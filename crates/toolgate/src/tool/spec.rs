//! Defines the declaration of a tool.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Effect, ExtraArguments, PollingSettings, ReconcileSpec, RetrySettings, ToolExample};
use crate::limits::Cost;
use crate::normalize::NormalizationRule;
use crate::policy::Diagnostic;
use toolgate_json::Pointer;

/// The declaration of a tool: everything except its handler.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ToolSpec {
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
    pub(crate) polling: Option<PollingSettings>,
    pub(crate) retry: RetrySettings,
    pub(crate) timeout: Duration,
    pub(crate) heartbeat: Option<Duration>,
    pub(crate) extra: ExtraArguments,
    pub(crate) examples: Vec<ToolExample>,
    /// Paths of arguments and results that are never recorded or logged.
    pub secrets: Vec<Pointer>,
    pub(crate) entities: Vec<(Arc<str>, Pointer)>,
    pub(crate) proves: Vec<Pointer>,
    pub(crate) revokes: Vec<(Arc<str>, Option<Arc<str>>)>,
    pub(crate) reconcile: Option<ReconcileSpec>,
    pub(crate) untrusted: bool,
    pub(crate) keeps: Vec<Arc<str>>,
    pub(crate) external: bool,
    pub(crate) normalize: Vec<NormalizationRule>,
    pub(crate) max_output: Option<usize>,
    pub(crate) cost: Cost,
    pub(crate) visible_to: Option<BTreeSet<String>>,
    pub(crate) empty_statuses: BTreeSet<u16>,
    /// Argument that contains a shell command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shell: Option<Pointer>,
    /// Whether all arguments are kept out of the ledger.
    #[serde(skip)]
    pub(crate) veiled: bool,
}

impl ToolSpec {
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
    pub fn examples(&self) -> &[ToolExample] {
        &self.examples
    }

    /// Reports that evidence about an entity is required but the tool does not declare the entity.
    pub(crate) fn check_entity(&self, field: &str, entity: &str) -> Option<Diagnostic> {
        let declared = || self.entities.iter().map(|(name, _)| name);
        if declared().any(|name| **name == *entity) {
            return None;
        }
        let message = format!(
            "`{}` declares no entity `{}`, so its evidence cannot be compared",
            self.name,
            toolgate_text::escape_for_display(entity)
        );
        Some(Diagnostic::at_field(field, message).with_suggestion(entity, declared()))
    }

    /// Reports that a field is required as evidence but the tool does not declare it.
    pub(crate) fn check_evidence_field(&self, field: &str, path: &Pointer) -> Option<Diagnostic> {
        if self.proves.contains(path) {
            return None;
        }
        let problem = Diagnostic::at_field(
            field,
            format!("`{}` does not declare `{path}` as evidence", self.name),
        );
        Some(
            problem.with_suggestion(&path.to_string(), self.proves.iter().map(ToString::to_string)),
        )
    }

    /// Warns if evidence of a tool that the client runs is required.
    pub(crate) fn warn_if_run_by_client(&self, field: &str) -> Option<Diagnostic> {
        let message = || {
            format!(
                "the client runs `{}`, and results that a client reports do not count here",
                self.name
            )
        };
        self.external.then(|| {
            Diagnostic::at_field(field, message())
                .with_help("set `reported = true` to trust the client")
                .into_warning()
        })
    }

    /// Checks whether the client runs the tool.
    pub(crate) const fn is_external(&self) -> bool {
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
