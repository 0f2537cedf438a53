//! Declares how to find out whether a call with unknown outcome took effect.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Effect, ToolSpec};
use crate::policy::{Diagnostic, DiagnosticKind};
use toolgate_json::Pointer;

/// A read-only tool, and the meaning of its results, that settle a call with unknown outcome.
///
/// If a result has neither meaning, a person decides.
///
/// ```
/// use toolgate::ReconcileSpec;
/// let reconcile = ReconcileSpec::new("find_refund")
///     .argument("order_id", "/order_id")
///     .happened_if("/status", "paid")
///     .never_if("/status", "none");
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReconcileSpec {
    pub(crate) tool: Arc<str>,
    arguments: Vec<(String, Pointer)>,
    happened: Vec<(Pointer, Value)>,
    never: Vec<(Pointer, Value)>,
}

impl ReconcileSpec {
    /// Creates a declaration that uses this tool.
    pub fn new(tool: impl Into<Arc<str>>) -> Self {
        Self { tool: tool.into(), arguments: Vec::new(), happened: Vec::new(), never: Vec::new() }
    }

    /// Fills an argument of that tool from an argument of the call.
    #[must_use]
    pub fn argument(mut self, name: &str, from: impl Into<Pointer>) -> Self {
        self.arguments.push((name.to_owned(), from.into()));
        self
    }

    /// Declares that the call took effect if this field of the result has this value.
    ///
    /// If several fields are declared, all must match.
    #[must_use]
    pub fn happened_if(mut self, field: impl Into<Pointer>, is: impl Into<Value>) -> Self {
        self.happened.push((field.into(), is.into()));
        self
    }

    /// Declares that the call did not take effect if this field of the result has this value.
    ///
    /// If several fields are declared, all must match.
    #[must_use]
    pub fn never_if(mut self, field: impl Into<Pointer>, is: impl Into<Value>) -> Self {
        self.never.push((field.into(), is.into()));
        self
    }

    /// Returns the arguments for the tool, or an error if the call lacks one.
    pub(crate) fn build_arguments(&self, arguments: &Value) -> Result<Value, String> {
        let mut query = Map::new();
        for (name, from) in &self.arguments {
            let value = from
                .get(arguments)
                .ok_or_else(|| format!("the call has no `{from}` to ask `{}` about", self.tool))?;
            // A search for the redaction mark would find nothing, which must not count as proof.
            if crate::redact::has_mark_inside(value) {
                return Err(format!(
                    "`{from}` of the call was redacted, so `{}` cannot search for it",
                    self.tool
                ));
            }
            query.insert(name.clone(), value.clone());
        }
        Ok(Value::Object(query))
    }

    /// Returns whether the call took effect, if the result is conclusive.
    pub(crate) fn interpret_result(&self, result: &Value) -> Option<bool> {
        let plain = |value: &Value| toolgate_json::with_canonical_numbers(value.clone());
        let all = |conditions: &[(Pointer, Value)]| {
            !conditions.is_empty()
                && conditions.iter().all(|(field, is)| {
                    field.get(result).is_some_and(|found| plain(found) == plain(is))
                })
        };
        match (all(&self.happened), all(&self.never)) {
            (true, false) => Some(true),
            (false, true) => Some(false),
            // Both or neither match, so the result is inconclusive.
            _ => None,
        }
    }

    /// Lists the problems of this declaration for a tool.
    pub(crate) fn problems(&self, of: &ToolSpec, tools: &[&ToolSpec]) -> Vec<Diagnostic> {
        let wrong = |what: String| {
            let problem = Diagnostic::new(format!(
                "`{}` cannot be reconciled with `{}`: {what}",
                of.name(),
                toolgate_text::escape_for_display(&self.tool)
            ));
            problem.with_subject(of.name()).with_kind(DiagnosticKind::InvalidReconcile)
        };
        let mut problems = Vec::new();
        match tools.iter().find(|tool| tool.name() == &*self.tool) {
            None => problems.push(
                wrong("it is not a tool of this agent".to_owned())
                    .with_unknown_tool(&self.tool)
                    .with_suggestion(&self.tool, tools.iter().map(|tool| tool.name())),
            ),
            Some(tool) if tool.effect != Effect::Read => {
                problems.push(wrong("it does not only read".to_owned()))
            }
            Some(tool) if tool.external => {
                problems.push(wrong("only the client can run it".to_owned()))
            }
            Some(_) => {}
        }
        if self.happened.is_empty() {
            problems.push(
                wrong("no result means that the call took effect".to_owned())
                    .with_help("add `.happened_if(field, value)`"),
            );
        }
        let secret = self
            .arguments
            .iter()
            .find(|(_, from)| crate::redact::is_secret_path(from, &of.secrets));
        problems.extend(secret.map(|(_, from)| {
            wrong(format!("`{from}` is secret and therefore not recorded"))
                .with_kind(DiagnosticKind::SecretReconcileArgument)
        }));
        problems
    }
}
