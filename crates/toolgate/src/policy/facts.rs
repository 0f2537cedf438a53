//! Defines the facts that a decision is based on: loaded before it and recorded with it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::provenance::Provenance;
use crate::session::repetition::RepetitionState;
use crate::session::state::{Evidence, EvidenceKey, SessionState};
use crate::store::{ApprovalState, PauseTarget};
use toolgate_json::Digest;

/// The facts that a policy requests before it decides.
///
/// A fact that is not requested here is not available to the policy.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FactRequest {
    /// Evidence to look up.
    pub evidence: Vec<EvidenceKey>,
    /// Counters to read, each with its window.
    pub counters: Vec<(String, Option<SignedDuration>)>,
    /// Marks (values that policies stored in the session) to read.
    pub marks: Vec<String>,
    /// Files to inspect.
    pub files: Vec<String>,
    /// Values whose provenance is needed, each with its path in the arguments.
    pub origins: Vec<(String, Value)>,
    /// Whether the home directory, which `~` in paths means, is needed.
    pub home: bool,
    /// Whether further requests depend on the evidence.
    ///
    /// If set, `request_facts` is called once more after the evidence is loaded.
    pub repeat_with_evidence: bool,
}

impl FactRequest {
    /// Removes the requests that are already answered.
    pub(crate) fn remove_answered(&mut self, facts: &DecisionFacts) {
        self.evidence.retain(|key| !facts.evidence.iter().any(|(known, _)| known == key));
        self.counters.retain(|(name, window)| {
            !facts.counters.iter().any(|(known, w, _)| known == name && w == window)
        });
        self.marks.retain(|mark| !facts.marks.contains_key(mark));
        self.files.retain(|file| !facts.files.contains_key(file));
        self.origins.retain(|(place, _)| !facts.origins.contains_key(place));
        self.home &= facts.home.is_none();
    }

    /// Requests evidence that a tool succeeded, about one entity if one is given.
    ///
    /// With `reported`, evidence that a client reported counts too, not only calls that ran here.
    pub fn evidence_of(
        &mut self,
        tool: &Arc<str>,
        about: Option<(&Arc<str>, &Value)>,
        reported: bool,
    ) {
        let key = EvidenceKey::tool(Arc::clone(tool));
        let key = match about {
            Some((name, value)) => key.about(Arc::clone(name), value),
            None => key,
        };
        if reported {
            self.evidence.push(key.clone().reported());
        }
        self.evidence.push(key);
    }

    /// Returns whether no request needs the store or a file.
    pub(crate) fn is_empty(&self) -> bool {
        self.evidence.is_empty()
            && self.counters.is_empty()
            && self.marks.is_empty()
            && self.files.is_empty()
            && self.origins.is_empty()
    }
}

/// The state of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileFact {
    /// No file exists at the path.
    Absent,
    /// The file exists; the digest of its content.
    Present(Digest),
    /// The file cannot be read; the reason.
    Unreadable(String),
}

/// The facts that a decision is based on.
///
/// They are recorded with the decision, so that replay can repeat it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct DecisionFacts {
    /// The time of the decision.
    pub now: Timestamp,
    /// Evidence by key; `None` if there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<(EvidenceKey, Option<Arc<Evidence>>)>,
    /// Counters, each with its window and the amount used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counters: Vec<(String, Option<SignedDuration>, Decimal)>,
    /// Marks that policies stored in the session.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub marks: BTreeMap<String, Option<Value>>,
    /// Files by path.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, FileFact>,
    /// The provenance of argument values, by their path.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub origins: BTreeMap<String, Provenance>,
    /// The home directory (`~` in paths), if a rule used it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<String>,
    /// The answers of the hooks, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<HookFact>,
    /// Verdicts other than "allow" of rules in observe mode.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub observed: Vec<ObservedVerdict>,
    /// The reason why the transport rejected the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turned_away: Option<String>,
    /// Whether the transport rejected the call because it could not parse the request.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub misread: bool,
    /// The kill switch that was on, and its reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<(PauseTarget, String)>,
    /// Whether the deadline of the caller had passed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub late: bool,
    /// The number of ledger rows when the call opened its session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// The time when the session started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opened: Option<Timestamp>,
    /// Whether the client ran the tool and reported the result.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reported: bool,
    /// The arguments that the client ran the tool with, if they differ from the admitted ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ran: Option<Value>,
    /// The state of an earlier call with the same key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recalled: Option<PriorCallFact>,
    /// The kind of key that found the earlier call; absent in older rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recalled_by: Option<DedupKeyKind>,
    /// How often the same call was repeated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<RepetitionState>,
    /// The amount used of each budget.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub budget: Vec<CounterReading>,
    /// The approval that applied to the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approval: Option<ApprovalFact>,
    /// The amount used of each limit at the time of the claim.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claimed: Vec<CounterReading>,
    /// Records during replay which fact of the decision is missing.
    #[serde(skip)]
    pub(crate) watch: MissingFactTracker,
}

/// Records the first fact that a replayed decision needs and that is missing.
///
/// The tracker is off for live calls.
#[derive(Debug, Clone, Default)]
pub(crate) struct MissingFactTracker(pub(crate) Option<Arc<Mutex<Option<String>>>>);

impl PartialEq for MissingFactTracker {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl MissingFactTracker {
    pub(crate) fn enabled() -> Self {
        Self(Some(Arc::default()))
    }

    /// Records a missing fact; only the first one is kept.
    pub(crate) fn record_missing(&self, description: impl FnOnce() -> String) {
        if let Some(missing) = &self.0 {
            crate::lock(missing).get_or_insert_with(description);
        }
    }

    pub(crate) fn missing_fact(&self) -> Option<String> {
        self.0.as_ref().and_then(|missing| crate::lock(missing).clone())
    }
}

/// A counter, its time window if it has one, and the amount used.
pub type CounterReading = (String, Option<SignedDuration>, Decimal);

/// The state of an earlier call with the same key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PriorCallFact {
    /// The call had ended.
    Settled,
    /// The call had ended so long ago that its outcome was no longer stored.
    Forgotten,
    /// The call was running.
    InProgress,
    /// The outcome of the call was unknown.
    Pending,
    /// The call had other arguments.
    KeyReused,
}

/// The kind of key that found an earlier call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DedupKeyKind {
    /// The idempotency key of the client.
    Key,
    /// The arguments, because the tool is declared `once`.
    Once,
}

/// The state of an approval at the time of a decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApprovalFact {
    /// The id of the approval.
    pub id: String,
    /// The state of the approval.
    pub state: ApprovalState,
    /// The rules and hooks that asked for the approval.
    pub asked_by: Vec<String>,
    /// The person who answered.
    pub answered_by: Option<String>,
    /// The time until which the approval could be used.
    pub expires: Timestamp,
    /// Whether the call named the approval.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub named: bool,
}

impl DecisionFacts {
    /// Creates facts that contain only the time.
    #[must_use]
    pub fn at(now: Timestamp) -> Self {
        Self { now, ..Self::default() }
    }

    /// Drops evidence that the session has revoked.
    pub(crate) fn drop_revoked_evidence(&mut self, state: &SessionState) {
        for (_, proof) in &mut self.evidence {
            *proof = proof.take().filter(|proof| state.is_current(proof));
        }
    }

    /// Answers the requests for evidence, marks and origins from a snapshot of the session.
    pub(crate) fn load_from_session(&mut self, needs: &mut FactRequest, state: &SessionState) {
        self.evidence.reserve_exact(needs.evidence.len());
        for key in needs.evidence.drain(..) {
            let proof = state.evidence(&key).cloned();
            self.evidence.push((key, proof));
        }
        for mark in needs.marks.drain(..) {
            let found = state.marks.get(mark.as_str()).map(|m| m.as_ref().clone());
            self.marks.insert(mark, found);
        }
        for (place, value) in needs.origins.drain(..) {
            self.origins
                .entry(place)
                .or_insert_with(|| crate::provenance::find_provenance(&state.provenance, &value));
        }
    }
}

/// The answer of a hook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookFact {
    /// The name of the hook.
    pub hook: String,
    /// `allow`, `deny` or `ask`.
    pub said: String,
    /// Whether the hook rewrote the arguments.
    pub rewrote: bool,
    /// The redirect tool of the hook that was left out, because this caller cannot use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_redirect: Option<String>,
}

/// The verdict of a rule in observe mode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservedVerdict {
    /// The name of the rule.
    pub rule: String,
    /// `deny`, `ask` or `fault`.
    pub said: String,
    /// The code of the denial.
    pub code: String,
    /// The reason.
    pub message: String,
}
