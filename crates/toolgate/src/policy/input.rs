//! Defines the input of a policy: the call and the facts loaded for it.

use std::borrow::Cow;
use std::sync::Mutex;

use jiff::SignedDuration;
use rust_decimal::Decimal;
use serde::Serialize;
use serde_json::Value;

use super::{DecisionFacts, FileFact, PolicyError};
use crate::call::{CallId, CheckedArguments, SessionKey};
use crate::provenance::Provenance;
use crate::session::state::{Evidence, EvidenceKey};
use crate::tool::ToolSpec;
use toolgate_json::Pointer;

/// One check of a rule, for `explain`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RuleCheck {
    /// The checked condition, for example `/amount_usd above 500`.
    pub what: String,
    /// The value that was found, with secrets masked.
    pub found: String,
    /// Whether the condition holds.
    pub holds: bool,
}

/// Collects the checks of rules.
#[derive(Debug, Default)]
pub struct RuleTrace(Mutex<Vec<RuleCheck>>);

impl RuleTrace {
    pub(crate) fn into_checks(self) -> Vec<RuleCheck> {
        self.0.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The input of a policy: a call and the facts loaded for it.
#[derive(Debug, Clone, Copy)]
pub struct PolicyInput<'a> {
    /// The id of the call.
    pub call: CallId,
    /// The session of the call.
    pub key: &'a SessionKey,
    /// The tool.
    pub tool: &'a ToolSpec,
    /// The exact arguments that will run.
    pub arguments: &'a CheckedArguments,
    /// The loaded facts.
    pub facts: &'a DecisionFacts,
    /// Whether the call is only considered as a next step.
    ///
    /// Then unknown arguments are left out, and an absent argument may still be set.
    pub is_sketch: bool,
    trace: Option<&'a RuleTrace>,
}

impl<'a> PolicyInput<'a> {
    pub(crate) const fn new(
        call: CallId,
        key: &'a SessionKey,
        tool: &'a ToolSpec,
        arguments: &'a CheckedArguments,
        facts: &'a DecisionFacts,
    ) -> Self {
        Self { call, key, tool, arguments, facts, is_sketch: false, trace: None }
    }

    /// Sets whether some arguments are not known yet.
    #[must_use]
    pub(crate) const fn with_sketch(mut self, sketch: bool) -> Self {
        self.is_sketch = sketch;
        self
    }

    /// Records all checks in a trace.
    #[must_use]
    pub(crate) const fn with_trace(mut self, trace: &'a RuleTrace) -> Self {
        self.trace = Some(trace);
        self
    }

    /// Records a check of a rule; without a trace, `note` is not called.
    pub fn record_check(&self, note: impl FnOnce() -> RuleCheck) {
        if let Some(trace) = self.trace {
            crate::lock(&trace.0).push(note());
        }
    }

    /// Returns whether checks are recorded in a trace.
    pub(crate) const fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Returns an argument; of a path with `*` only the first match, see
    /// [`PolicyInput::arguments_at`].
    #[must_use]
    pub fn argument(&self, path: &Pointer) -> Option<&'a Value> {
        let found = path.get(self.arguments.value());
        self.report_redacted_use(path, found);
        found
    }

    /// Returns an argument unless its value is null or blank text.
    pub(crate) fn non_blank_argument(&self, path: &Pointer) -> Option<&'a Value> {
        self.argument(path).filter(|value| {
            !value.is_null() && value.as_str().is_none_or(|text| !text.trim().is_empty())
        })
    }

    /// Returns all values at a path of the arguments; `*` matches every item, `None` is absent.
    #[must_use]
    pub fn arguments_at(&self, path: &Pointer) -> Vec<Option<&'a Value>> {
        let found = path.get_each(self.arguments.value());
        found.iter().for_each(|found| self.report_redacted_use(path, *found));
        found
    }

    /// Reports to a replay that the decision depends on a redacted value.
    pub(crate) fn report_redacted_use(&self, path: &Pointer, value: Option<&Value>) {
        if self.facts.watch.0.is_some()
            && let Some(value) = value
            && crate::redact::has_mark_inside(value)
        {
            self.facts.watch.record_missing(|| match path.parts() {
                [] => "an argument was redacted, and a rule reads all of them".to_owned(),
                _ => format!("`{path}` was redacted, and a rule reads it"),
            });
        }
    }

    /// Returns whether an argument is secret.
    pub(crate) fn is_secret(&self, path: &Pointer) -> bool {
        crate::redact::is_secret_path(path, &self.tool.secrets)
    }

    /// Formats an argument value for an error message, with secrets hidden.
    pub(crate) fn display_argument(&self, path: &Pointer, value: &Value) -> String {
        if self.is_secret(path) {
            "(hidden)".to_owned()
        } else {
            toolgate_text::escape_for_display(&value.to_string())
        }
    }

    /// Returns the latest evidence that a tool succeeded, about one entity if one is given.
    ///
    /// With `reported`, evidence that a client reported counts too.
    ///
    /// # Errors
    /// Returns a fault if the policy did not request it in [`super::Policy::request_facts`].
    pub fn evidence_of(
        &self,
        tool: &str,
        about: Option<(&str, &Value)>,
        reported: bool,
    ) -> Result<Option<&'a Evidence>, PolicyError> {
        let matches = |key: &EvidenceKey| match (&key.entity, about) {
            _ if &*key.tool != tool => false,
            (None, None) => true,
            (Some((name, value)), Some((required, required_value))) => {
                &**name == required
                    && toolgate_json::with_canonical_text(required_value, |text| text == &**value)
            }
            _ => false,
        };
        let mut asked_for = false;
        let mut latest: Option<&'a Evidence> = None;
        for (_, proof) in self
            .facts
            .evidence
            .iter()
            .filter(|(key, _)| (reported || !key.reported) && matches(key))
        {
            asked_for = true;
            if let Some(proof) = proof {
                self.report_redacted_use(&Pointer::default(), Some(&proof.fields));
            }
            latest = latest.into_iter().chain(proof.as_deref()).max_by_key(|proof| proof.at);
        }
        if asked_for {
            Ok(latest)
        } else {
            Err(PolicyError(format!("evidence of `{tool}` was not requested in `request_facts`")))
        }
    }

    /// Returns the used amount of a counter in this time window.
    ///
    /// # Errors
    /// Returns a fault if the policy did not request it in [`super::Policy::request_facts`].
    pub fn counter(
        &self,
        name: &str,
        window: Option<SignedDuration>,
    ) -> Result<Decimal, PolicyError> {
        let found = self.facts.counters.iter().find(|(n, w, _)| n == name && *w == window);
        found.map(|(.., used)| *used).ok_or_else(|| {
            PolicyError(format!("counter `{name}` was not requested in `request_facts`"))
        })
    }

    /// Returns a mark that a policy stored in the session.
    ///
    /// # Errors
    /// Returns a fault if the policy did not request it in [`super::Policy::request_facts`].
    pub fn mark(&self, name: &str) -> Result<Option<&'a Value>, PolicyError> {
        let mark = self.facts.marks.get(name).ok_or_else(|| {
            PolicyError(format!("mark `{name}` was not requested in `request_facts`"))
        })?;
        if self.facts.watch.0.is_some() && mark.as_ref().is_some_and(crate::redact::has_mark_inside)
        {
            self.facts
                .watch
                .record_missing(|| "a mark was redacted, and a rule reads it".to_owned());
        }
        Ok(mark.as_ref())
    }

    /// Returns the state of a file.
    ///
    /// # Errors
    /// Returns a fault if the policy did not request it in [`super::Policy::request_facts`], or if
    /// the agent has no file system.
    pub fn file(&self, path: &str) -> Result<&'a FileFact, PolicyError> {
        self.facts.files.get(path).ok_or_else(|| {
            PolicyError(format!("cannot inspect `{path}`: the agent has no file system"))
        })
    }

    /// Returns the home directory from the facts, or else that of this process.
    pub(crate) fn home_dir(&self) -> Cow<'a, str> {
        self.facts.home.as_deref().map_or_else(|| Cow::Owned(home_dir_text()), Cow::Borrowed)
    }

    /// Returns the provenance of the value at a path of the arguments.
    ///
    /// # Errors
    /// Returns a fault if the policy did not request it in [`super::Policy::request_facts`].
    pub fn provenance(&self, place: &str) -> Result<&'a Provenance, PolicyError> {
        self.facts.origins.get(place).ok_or_else(|| {
            PolicyError(format!("the provenance of `{place}` was not requested in `request_facts`"))
        })
    }
}

/// Returns the home directory of the current user without a trailing slash, or `~` if it is
/// unknown.
pub(crate) fn home_dir_text() -> String {
    match toolgate_process::home_dir::home_dir() {
        Some(home) => toolgate_shell::normalize_path(&home.display().to_string())
            .trim_end_matches('/')
            .to_owned(),
        None => "~".to_owned(),
    }
}
