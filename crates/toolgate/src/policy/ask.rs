//! A call as a policy sees it.

use std::borrow::Cow;
use std::sync::Mutex;

use jiff::SignedDuration;
use rust_decimal::Decimal;
use serde::Serialize;
use serde_json::Value;

use super::{Facts, Fault, FileFact};
use crate::call::{CallId, Judged, SessionKey};
use crate::json::Pointer;
use crate::session::{Evidence, EvidenceKey};
use crate::tool::Spec;
use crate::values::Known;

/// One thing that a rule looked at, for `explain`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Note {
    /// What it looked at: `/amount_usd above 500`.
    pub what: String,
    /// What it found there. Secrets are masked.
    pub found: String,
    /// Whether what the rule speaks of holds.
    pub holds: bool,
}

/// Collects what rules look at.
#[derive(Debug, Default)]
pub struct Trace(Mutex<Vec<Note>>);

impl Trace {
    pub(crate) fn into_notes(self) -> Vec<Note> {
        self.0.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A call as a policy sees it.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The call.
    pub call: CallId,
    /// Whose conversation.
    pub key: &'a SessionKey,
    /// The tool.
    pub tool: &'a Spec,
    /// The exact arguments that will run.
    pub arguments: &'a Judged,
    /// What was loaded.
    pub facts: &'a Facts,
    /// True where the call is only being considered as a next step, and arguments that nobody knows yet are left
    /// out: what is absent may still come.
    pub sketch: bool,
    trace: Option<&'a Trace>,
}

impl<'a> Ask<'a> {
    pub(crate) const fn new(call: CallId, key: &'a SessionKey, tool: &'a Spec, arguments: &'a Judged, facts: &'a Facts) -> Self {
        Self { call, key, tool, arguments, facts, sketch: false, trace: None }
    }

    /// The same call; whether not all of its arguments are known.
    #[must_use]
    pub(crate) const fn sketched(mut self, sketch: bool) -> Self {
        self.sketch = sketch;
        self
    }

    /// The same call, looked at by somebody who wants to know why.
    #[must_use]
    pub(crate) const fn traced(mut self, trace: &'a Trace) -> Self {
        self.trace = Some(trace);
        self
    }

    /// Takes note of something a rule looks at. Costs nothing unless somebody asked for an explanation.
    pub fn note(&self, note: impl FnOnce() -> Note) {
        if let Some(trace) = self.trace {
            crate::lock(&trace.0).push(note());
        }
    }

    /// Whether somebody asked for an explanation.
    pub(crate) const fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// An argument. A path with `*` gives the first match only; see [`Ask::arguments_at`].
    #[must_use]
    pub fn argument(&self, path: &Pointer) -> Option<&'a Value> {
        let found = path.get(self.arguments.value());
        self.look_at(path, found);
        found
    }

    /// An argument that says something: null, and text without a letter, are nobody's name.
    pub(super) fn said(&self, path: &Pointer) -> Option<&'a Value> {
        self.argument(path).filter(|value| !value.is_null() && value.as_str().is_none_or(|text| !text.trim().is_empty()))
    }

    /// Every place at a path of the arguments (`*` in it stands for each item), `None` where nothing stands.
    #[must_use]
    pub fn arguments_at(&self, path: &Pointer) -> Vec<Option<&'a Value>> {
        let found = path.each(self.arguments.value());
        found.iter().for_each(|found| self.look_at(path, *found));
        found
    }

    /// Tells who looks back that a decision hangs on something that was redacted.
    pub(crate) fn look_at(&self, path: &Pointer, value: Option<&Value>) {
        if self.facts.watch.0.is_some()
            && let Some(value) = value
            && crate::redact::is_redacted(value)
        {
            self.facts.watch.unknown(|| match path.parts() {
                [] => "an argument was redacted, and a rule looks at all of them".to_owned(),
                _ => format!("`{path}` was redacted, and a rule looks at it"),
            });
        }
    }

    /// Whether an argument may be shown at all.
    pub(crate) fn is_secret(&self, path: &Pointer) -> bool {
        crate::redact::is_secret(path, &self.tool.secrets)
    }

    /// A value of an argument as an error may show it.
    pub(crate) fn shown(&self, path: &Pointer, value: &Value) -> String {
        if self.is_secret(path) { "(hidden)".to_owned() } else { crate::names::shown(&value.to_string()) }
    }

    /// The latest evidence of a tool's success, about one entity where one is given, and of those that a
    /// client reports where they are wanted.
    ///
    /// # Errors
    /// A fault if the policy did not name it in [`super::Policy::needs`].
    pub fn evidence_of(&self, tool: &str, about: Option<(&str, &Value)>, reported: bool) -> Result<Option<&'a Evidence>, Fault> {
        let matches = |key: &EvidenceKey| match (&key.entity, about) {
            _ if &*key.tool != tool => false,
            (None, None) => true,
            (Some((name, value)), Some((wanted, of))) => &**name == wanted && crate::json::with_canonical(of, |text| text == &**value),
            _ => false,
        };
        let mut asked_for = false;
        let mut latest: Option<&'a Evidence> = None;
        for (_, proof) in self.facts.evidence.iter().filter(|(key, _)| (reported || !key.reported) && matches(key)) {
            asked_for = true;
            if let Some(proof) = proof {
                self.look_at(&Pointer::default(), Some(&proof.fields));
            }
            latest = latest.into_iter().chain(proof.as_deref()).max_by_key(|proof| proof.at);
        }
        if asked_for { Ok(latest) } else { Err(Fault(format!("evidence of `{tool}` was not asked for in `needs`"))) }
    }

    /// What a counter shows, over this window.
    ///
    /// # Errors
    /// A fault if the policy did not name it in [`super::Policy::needs`].
    pub fn counter(&self, name: &str, window: Option<SignedDuration>) -> Result<Decimal, Fault> {
        let found = self.facts.counters.iter().find(|(n, w, _)| n == name && *w == window);
        found.map(|(.., used)| *used).ok_or_else(|| Fault(format!("counter `{name}` was not asked for in `needs`")))
    }

    /// What a policy remembered.
    ///
    /// # Errors
    /// A fault if the policy did not name it in [`super::Policy::needs`].
    pub fn mark(&self, name: &str) -> Result<Option<&'a Value>, Fault> {
        let mark = self.facts.marks.get(name).ok_or_else(|| Fault(format!("mark `{name}` was not asked for in `needs`")))?;
        if self.facts.watch.0.is_some() && mark.as_ref().is_some_and(crate::redact::is_redacted) {
            self.facts.watch.unknown(|| "what a rule remembers was redacted".to_owned());
        }
        Ok(mark.as_ref())
    }

    /// What is known of a file.
    ///
    /// # Errors
    /// A fault if the policy did not name it in [`super::Policy::needs`], or there is no file system.
    pub fn file(&self, path: &str) -> Result<&'a FileFact, Fault> {
        self.facts.files.get(path).ok_or_else(|| Fault(format!("there is no file system to ask about `{path}`")))
    }

    /// What `~` stands for in paths: what was looked up, else what it is here.
    pub(crate) fn home(&self) -> Cow<'a, str> {
        self.facts.home.as_deref().map_or_else(|| Cow::Owned(crate::shell::home()), Cow::Borrowed)
    }

    /// Where the value at a place of the arguments was seen before.
    ///
    /// # Errors
    /// A fault if the policy did not name it in [`super::Policy::needs`].
    pub fn origin(&self, place: &str) -> Result<&'a Known, Fault> {
        self.facts.origins.get(place).ok_or_else(|| Fault(format!("the origin of `{place}` was not asked for in `needs`")))
    }
}
