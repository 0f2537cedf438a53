//! A session is immutable at a version. A call works on a snapshot and records operations; what
//! fails is dropped, so nothing is ever restored by hand.

use std::sync::Arc;

use jiff::Timestamp;
use rpds::{HashTrieMap, VectorSync};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::values::Values;

/// Slices of a session, by name. Cloning one costs the same whatever its size.
pub type Slices = Map<Arc<str>, Arc<Value>>;

/// A map that is cheap to clone. Its hasher is keyed by chance, as names may come from a model.
pub type Map<K, V> = HashTrieMap<K, V, archery::ArcTK, ahash::RandomState>;

/// What a session holds. A clone is a snapshot, and costs O(1).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct State {
    /// State slices: a failed call leaves them as they were.
    pub slices: Slices,
    /// Log slices: what was appended stays, whatever became of the call.
    pub logs: Map<Arc<str>, VectorSync<Arc<Value>>>,
    /// What successful calls proved.
    pub evidence: Map<EvidenceKey, Arc<Evidence>>,
    /// What policies remember.
    pub marks: Slices,
    /// When evidence was last taken away: of a tool altogether, or about one entity.
    pub revocations: Map<EvidenceKey, u64>,
    /// Counts every change, so that it is known what came first and whether anything came since.
    pub stamp: u64,
    /// Where values were seen.
    pub values: Values,
}

impl State {
    /// A state slice.
    #[must_use]
    pub fn slice(&self, name: &str) -> Option<&Value> {
        self.slices.get(name).map(AsRef::as_ref)
    }

    /// The entries of a log slice.
    pub fn log(&self, name: &str) -> impl Iterator<Item = &Value> {
        self.logs.get(name).into_iter().flat_map(|log| log.iter().map(AsRef::as_ref))
    }

    /// The latest evidence under a key.
    #[must_use]
    pub fn evidence(&self, key: &EvidenceKey) -> Option<&Arc<Evidence>> {
        self.evidence.get(key).filter(|proof| self.stands(proof))
    }

    /// Whether nothing has taken it away since. Most sessions never take anything away.
    pub(crate) fn stands(&self, proof: &Evidence) -> bool {
        self.revocations.is_empty() || proof.keys_if(false).all(|key| self.revocations.get(&key).is_none_or(|at| *at < proof.stamp))
    }

    pub(crate) fn revoke(&mut self, revoked: Revoked) {
        self.stamp += 1;
        self.revocations.insert_mut(revoked.key(), self.stamp);
    }

    /// Changes it from outside a call. Whatever it goes back to, time does not.
    pub(crate) fn alter(&mut self, alter: Alter) {
        let stamp = self.stamp + 1;
        match alter {
            // Everything but the logs, and what the model has read and cannot unread.
            Alter::Restore(earlier) => {
                let (logs, values) = (std::mem::take(&mut self.logs), std::mem::take(&mut self.values));
                *self = Self { logs, values, ..(*earlier).clone() };
            }
            Alter::Reset => *self = Self { values: std::mem::take(&mut self.values), ..Self::default() },
            Alter::Heard(text) => crate::values::hear(&mut self.values, &text),
        }
        self.stamp = stamp;
    }

    pub(crate) fn append(&mut self, logs: Vec<(Arc<str>, Value)>) {
        self.stamp += 1;
        for (name, entry) in logs {
            let log = self.logs.get(&name).cloned().unwrap_or_default();
            self.logs.insert_mut(name, log.push_back(Arc::new(entry)));
        }
    }

    pub(crate) fn apply(&mut self, changes: Changes) {
        self.stamp += 1;
        for (name, value) in changes.slices {
            set(&mut self.slices, name, value);
        }
        for (name, value) in changes.marks {
            set(&mut self.marks, name, value);
        }
        if let Some(mut evidence) = changes.evidence {
            evidence.stamp = evidence.stamp.min(self.stamp);
            let evidence = Arc::new(evidence);
            for key in evidence.keys() {
                match self.evidence.get_mut(&key) {
                    Some(known) if known.stamp <= evidence.stamp => *known = Arc::clone(&evidence),
                    // What was proved since stands.
                    Some(_) => {}
                    None => self.evidence.insert_mut(key, Arc::clone(&evidence)),
                }
            }
        }
    }
}

fn set(map: &mut Slices, name: Arc<str>, value: Option<Value>) {
    match value {
        Some(value) => match map.get_mut(&name) {
            Some(known) => *known = Arc::new(value),
            None => map.insert_mut(name, Arc::new(value)),
        },
        None => {
            map.remove_mut(&name);
        }
    }
}

/// A change to a session from outside a call.
#[derive(Debug, Clone)]
pub enum Alter {
    /// Back to an earlier moment. Logs, limits and claims stay, and so does where values were seen.
    Restore(Arc<State>),
    /// Back to the beginning: slices, logs, evidence and marks go. Limits and claims stay, and so does where values were seen.
    Reset,
    /// The user said something, word for word.
    Heard(String),
}

/// A change to one named thing: `None` removes it.
pub type Change = (Arc<str>, Option<Value>);

/// What a successful call changes, committed as one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Changes {
    /// State slices.
    pub slices: Vec<Change>,
    /// What policies remember.
    pub marks: Vec<Change>,
    /// What the call proved.
    pub evidence: Option<Evidence>,
}

/// Evidence that is taken away: all of a tool, or what it proved about one entity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revoked {
    /// Whose evidence.
    pub tool: Arc<str>,
    /// About what; all of it where nothing is said.
    pub about: Option<(Arc<str>, Value)>,
}

impl Revoked {
    /// What is taken away: all of a tool at once, however much it is, or what it proved about one entity.
    #[must_use]
    pub fn key(self) -> EvidenceKey {
        let key = EvidenceKey::tool(self.tool);
        match self.about {
            Some((name, value)) => key.about(name, &value),
            None => key,
        }
    }
}

impl Changes {
    /// True where another call's change in between would be lost or built upon blindly.
    #[must_use]
    pub fn needs_version(&self) -> bool {
        !self.slices.is_empty()
    }
}

/// Under what evidence is looked up: a tool, and at most one entity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EvidenceKey {
    /// The tool that succeeded.
    pub tool: Arc<str>,
    /// Name and canonical value of an entity: `("customer_id", "\"C-1\"")`.
    pub entity: Option<(Arc<str>, Arc<str>)>,
    /// What a client says it did is kept apart from what was seen here.
    #[serde(default)]
    pub reported: bool,
}

impl EvidenceKey {
    /// Any success of a tool.
    pub fn tool(tool: impl Into<Arc<str>>) -> Self {
        Self { tool: tool.into(), entity: None, reported: false }
    }

    /// A success that a client reports.
    #[must_use]
    pub const fn reported(mut self) -> Self {
        self.reported = true;
        self
    }

    /// A success of a tool about one entity.
    #[must_use]
    pub fn about(mut self, name: impl Into<Arc<str>>, value: &Value) -> Self {
        self.entity = Some((name.into(), crate::json::with_canonical(value, |text| Arc::from(text))));
        self
    }
}

/// Where evidence comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// toolgate ran the tool.
    RunHere,
    /// A client ran the tool and said so.
    Reported,
    /// Nobody ran it yet: what if, while a next step is looked for. It proves whatever is wanted, and is never kept.
    Assumed,
}

/// What a successful call proved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    /// The tool.
    pub tool: Arc<str>,
    /// The entities it was about.
    pub entities: Vec<(Arc<str>, Value)>,
    /// Fields of its result, as far as the tool declares them.
    pub fields: Value,
    /// When.
    pub at: Timestamp,
    /// Who ran it.
    pub origin: Origin,
    /// When in the session it was proved, counted against what was taken away: at most when it is committed.
    #[serde(default)]
    pub stamp: u64,
}

impl Evidence {
    /// The keys under which it is kept.
    pub fn keys(&self) -> impl Iterator<Item = EvidenceKey> {
        self.keys_if(self.origin == Origin::Reported)
    }

    /// The keys it has, or would have, run by this side or by the client.
    pub fn keys_if(&self, reported: bool) -> impl Iterator<Item = EvidenceKey> {
        let bare = EvidenceKey::tool(Arc::clone(&self.tool));
        let about = self.entities.iter().map(|(name, value)| EvidenceKey::tool(Arc::clone(&self.tool)).about(Arc::clone(name), value));
        std::iter::once(bare).chain(about).map(move |key| EvidenceKey { reported, ..key })
    }
}
