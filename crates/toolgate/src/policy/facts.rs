//! What a decision rests on, loaded before it is made and recorded with it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::json::Digest;
use crate::progress::Progress;
use crate::session::{Evidence, EvidenceKey, State};
use crate::store::{ApprovalState, Target};
use crate::values::Known;

/// What a policy wants to know before it decides. What is not named here is not there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Needs {
    /// Evidence to look up.
    pub evidence: Vec<EvidenceKey>,
    /// Counters to read, each with its window.
    pub counters: Vec<(String, Option<SignedDuration>)>,
    /// What policies remembered.
    pub marks: Vec<String>,
    /// Files to look at.
    pub files: Vec<String>,
    /// Values whose origin matters, each under the place where it stands in the arguments.
    pub origins: Vec<(String, Value)>,
    /// Whether the home directory is wanted: what `~` stands for in paths.
    pub home: bool,
    /// Set where what else is wanted hangs on the evidence: `needs` is asked once more when that is there.
    pub again: bool,
}

impl Needs {
    /// Leaves out what is known already.
    pub(crate) fn less(&mut self, facts: &Facts) {
        self.evidence.retain(|key| !facts.evidence.iter().any(|(known, _)| known == key));
        self.counters.retain(|(name, window)| !facts.counters.iter().any(|(known, w, _)| known == name && w == window));
        self.marks.retain(|mark| !facts.marks.contains_key(mark));
        self.files.retain(|file| !facts.files.contains_key(file));
        self.origins.retain(|(place, _)| !facts.origins.contains_key(place));
        self.home &= facts.home.is_none();
    }

    /// Evidence of a tool's success, about one entity where one is given.
    /// `reported` says whether what a client told is wanted beside what ran here.
    pub fn evidence_of(&mut self, tool: &Arc<str>, about: Option<(&Arc<str>, &Value)>, reported: bool) {
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

    /// Whether neither the store nor a file has to be asked.
    pub(crate) fn is_empty(&self) -> bool {
        self.evidence.is_empty() && self.counters.is_empty() && self.marks.is_empty() && self.files.is_empty() && self.origins.is_empty()
    }
}

/// What is known of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileFact {
    /// There is nothing at the path.
    Absent,
    /// There is a file with this content.
    Present(Digest),
    /// It cannot be looked at; why.
    Unreadable(String),
}

/// What a decision rests on. It is recorded with the decision, so that the decision can be made again.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Facts {
    /// The clock.
    pub now: Timestamp,
    /// Evidence, found or not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<(EvidenceKey, Option<Arc<Evidence>>)>,
    /// Counters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counters: Vec<(String, Option<SignedDuration>, Decimal)>,
    /// What policies remembered.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub marks: BTreeMap<String, Option<Value>>,
    /// Files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, FileFact>,
    /// Where values of the arguments were seen before, by place.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub origins: BTreeMap<String, Known>,
    /// The home directory, where a rule looked at a path from there: what `~` stood for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<String>,
    /// What hooks answered, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<HookFact>,
    /// What rules that only observe would have said, where it was not "yes".
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub observed: Vec<Observed>,
    /// What the door had against it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turned_away: Option<String>,
    /// Whether that is that it could not be understood.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub misread: bool,
    /// The kill switch that was on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<(Target, String)>,
    /// Whether the time that the caller gave it was up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub late: bool,
    /// How many rows the ledger had when the call came to its session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// When the session began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opened: Option<Timestamp>,
    /// Whether the client ran the tool and said what came of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reported: bool,
    /// What a client says that it ran, where that is something else than was admitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ran: Option<Value>,
    /// What was known of an earlier call under the same key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recalled: Option<RecallFact>,
    /// How that call was known. Older rows do not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recalled_by: Option<RecalledBy>,
    /// How often the same call was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// What was used of each budget.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub budget: Vec<Used>,
    /// The word of a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approval: Option<ApprovalFact>,
    /// What was used of each limit when it was claimed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claimed: Vec<Used>,
    /// Who looks back is told what a decision hung on that is not known any more.
    #[serde(skip)]
    pub(crate) watch: Watch,
}

/// What a decision hung on that nobody knows any more. Nobody watches while calls are made.
#[derive(Debug, Clone, Default)]
pub(crate) struct Watch(pub(crate) Option<Arc<Mutex<Option<String>>>>);

impl PartialEq for Watch {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Watch {
    pub(crate) fn on() -> Self {
        Self(Some(Arc::default()))
    }

    /// The first thing that is not known is the one that is told.
    pub(crate) fn unknown(&self, what: impl FnOnce() -> String) {
        if let Some(told) = &self.0 {
            crate::lock(told).get_or_insert_with(what);
        }
    }

    pub(crate) fn told(&self) -> Option<String> {
        self.0.as_ref().and_then(|told| crate::lock(told).clone())
    }
}

/// What is used of a counter, in a stretch of time where it has one.
pub type Used = (String, Option<SignedDuration>, Decimal);

/// What was known of an earlier call under the same key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecallFact {
    /// It had ended.
    Settled,
    /// It had ended so long ago that its outcome is not kept.
    Forgotten,
    /// It was running.
    InProgress,
    /// Nobody knew.
    Pending,
    /// It had other arguments.
    KeyReused,
}

/// How an earlier call was known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecalledBy {
    /// By the key that the client gave.
    Key,
    /// By its arguments, as its tool is `once`.
    Once,
}

/// What a person had said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApprovalFact {
    /// The approval.
    pub id: String,
    /// Where it stood.
    pub state: ApprovalState,
    /// Whose question it answered.
    pub asked_by: Vec<String>,
    /// Who had answered.
    pub answered_by: Option<String>,
    /// Until when it could be used.
    pub expires: Timestamp,
    /// Whether the call named it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub named: bool,
}

impl Facts {
    /// Nothing but the clock.
    #[must_use]
    pub fn at(now: Timestamp) -> Self {
        Self { now, ..Self::default() }
    }

    /// Lets go of evidence that is taken away as the session stands.
    pub(crate) fn keep_what_stands(&mut self, state: &State) {
        for (_, proof) in &mut self.evidence {
            *proof = proof.take().filter(|proof| state.stands(proof));
        }
    }

    /// Takes evidence, marks and origins from a snapshot of the session: they are needed no more.
    pub(crate) fn take_from(&mut self, needs: &mut Needs, state: &State) {
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
            self.origins.entry(place).or_insert_with(|| crate::values::known(&state.values, &value));
        }
    }
}

/// What one hook answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookFact {
    /// The hook.
    pub hook: String,
    /// `allow`, `deny` or `ask`.
    pub said: String,
    /// Whether it rewrote the arguments.
    pub rewrote: bool,
    /// The tool that its refusal sent the model to, where this caller cannot use it: that was left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_redirect: Option<String>,
}

/// What a rule that only observes would have said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observed {
    /// The rule.
    pub rule: String,
    /// `deny`, `ask` or `fault`.
    pub said: String,
    /// The code of the refusal.
    pub code: String,
    /// Why.
    pub message: String,
}
