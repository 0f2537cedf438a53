//! Defines the state of a session.
//!
//! A session is immutable at a version. A call works on a snapshot and records its changes. If the
//! call fails, the changes are dropped, so nothing has to be restored.

use std::sync::Arc;

use jiff::Timestamp;
use rpds::{HashTrieMap, VectorSync};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::provenance::ProvenanceIndex;

/// Slices of a session, by name. A clone has constant cost.
pub type SessionSlices = PersistentMap<Arc<str>, Arc<Value>>;

/// A map that is cheap to clone. The hasher has a random key, because names may come from a model.
pub type PersistentMap<K, V> = HashTrieMap<K, V, archery::ArcTK, ahash::RandomState>;

/// State of a session. A clone is a snapshot and costs O(1).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SessionState {
    /// State slices.
    pub slices: SessionSlices,
    /// Log slices. Entries stay even if the call fails.
    pub logs: PersistentMap<Arc<str>, VectorSync<Arc<Value>>>,
    /// Evidence of successful calls.
    pub evidence: PersistentMap<EvidenceKey, Arc<Evidence>>,
    /// Marks of policies.
    pub marks: SessionSlices,
    /// When evidence was last revoked, per tool or per entity.
    pub revocations: PersistentMap<EvidenceKey, u64>,
    /// Counts all changes, which gives evidence and revocations an order.
    pub stamp: u64,
    /// Provenance of values.
    pub provenance: ProvenanceIndex,
}

impl SessionState {
    /// Returns a state slice.
    #[must_use]
    pub fn slice(&self, name: &str) -> Option<&Value> {
        self.slices.get(name).map(AsRef::as_ref)
    }

    /// Returns the entries of a log slice.
    pub fn log(&self, name: &str) -> impl Iterator<Item = &Value> {
        self.logs.get(name).into_iter().flat_map(|log| log.iter().map(AsRef::as_ref))
    }

    /// Returns the latest evidence under a key.
    #[must_use]
    pub fn evidence(&self, key: &EvidenceKey) -> Option<&Arc<Evidence>> {
        self.evidence.get(key).filter(|proof| self.is_current(proof))
    }

    /// Reports whether evidence was not revoked since.
    ///
    /// Most sessions never revoke anything, so that case is fast.
    pub(crate) fn is_current(&self, proof: &Evidence) -> bool {
        self.revocations.is_empty()
            || proof
                .keys_for_reported(false)
                .all(|key| self.revocations.get(&key).is_none_or(|at| *at < proof.stamp))
    }

    pub(crate) fn revoke(&mut self, revoked: Revocation) {
        self.stamp += 1;
        self.revocations.insert_mut(revoked.into_key(), self.stamp);
    }

    /// Changes the state from outside a call. The stamp always increases.
    pub(crate) fn apply_edit(&mut self, edit: SessionEdit) {
        let stamp = self.stamp + 1;
        match edit {
            // Keep the logs and the provenance: the model cannot forget what it has read.
            SessionEdit::Restore(earlier) => {
                let (logs, values) =
                    (std::mem::take(&mut self.logs), std::mem::take(&mut self.provenance));
                *self = Self { logs, provenance: values, ..(*earlier).clone() };
            }
            SessionEdit::Reset => {
                *self = Self { provenance: std::mem::take(&mut self.provenance), ..Self::default() }
            }
            SessionEdit::UserText(text) => {
                crate::provenance::trust_user_text(&mut self.provenance, &text)
            }
        }
        self.stamp = stamp;
    }

    pub(crate) fn append_logs(&mut self, logs: Vec<(Arc<str>, Value)>) {
        self.stamp += 1;
        for (name, entry) in logs {
            let log = self.logs.get(&name).cloned().unwrap_or_default();
            self.logs.insert_mut(name, log.push_back(Arc::new(entry)));
        }
    }

    pub(crate) fn apply_changes(&mut self, changes: SessionChanges) {
        self.stamp += 1;
        for (name, value) in changes.slices {
            set_or_remove(&mut self.slices, name, value);
        }
        for (name, value) in changes.marks {
            set_or_remove(&mut self.marks, name, value);
        }
        if let Some(mut evidence) = changes.evidence {
            evidence.stamp = evidence.stamp.min(self.stamp);
            let evidence = Arc::new(evidence);
            for key in evidence.keys() {
                match self.evidence.get_mut(&key) {
                    Some(known) if known.stamp <= evidence.stamp => *known = Arc::clone(&evidence),
                    // Newer evidence stays.
                    Some(_) => {}
                    None => self.evidence.insert_mut(key, Arc::clone(&evidence)),
                }
            }
        }
    }
}

fn set_or_remove(map: &mut SessionSlices, name: Arc<str>, value: Option<Value>) {
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

/// Change of a session from outside a call.
#[derive(Debug, Clone)]
pub enum SessionEdit {
    /// Restores an earlier state. Logs, limits, claims and provenance stay.
    Restore(Arc<SessionState>),
    /// Clears slices, logs, evidence and marks. Limits, claims and provenance stay.
    Reset,
    /// Adds the exact words of the user.
    UserText(String),
}

/// Change of one named value. `None` removes the value.
pub type NamedChange = (Arc<str>, Option<Value>);

/// Changes of a successful call, committed together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SessionChanges {
    /// State slices.
    pub slices: Vec<NamedChange>,
    /// Marks of policies.
    pub marks: Vec<NamedChange>,
    /// Evidence of the call.
    pub evidence: Option<Evidence>,
}

/// Revocation of evidence: all evidence of a tool, or only about one entity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// The tool whose evidence is revoked.
    pub tool: Arc<str>,
    /// The entity. `None` revokes all evidence of the tool.
    pub about: Option<(Arc<str>, Value)>,
}

impl Revocation {
    /// Returns the key of the revocation.
    #[must_use]
    pub fn into_key(self) -> EvidenceKey {
        let key = EvidenceKey::tool(self.tool);
        match self.about {
            Some((name, value)) => key.about(name, &value),
            None => key,
        }
    }
}

impl SessionChanges {
    /// Reports whether the changes conflict with changes of other calls since the snapshot.
    #[must_use]
    pub fn can_conflict(&self) -> bool {
        !self.slices.is_empty()
    }
}

/// Lookup key of evidence: a tool and at most one entity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EvidenceKey {
    /// The tool that succeeded.
    pub tool: Arc<str>,
    /// Name and canonical value of an entity: `("customer_id", "\"C-1\"")`.
    pub entity: Option<(Arc<str>, Arc<str>)>,
    /// Whether a client reported the success. Reported evidence has separate keys.
    #[serde(default)]
    pub reported: bool,
}

impl EvidenceKey {
    /// Creates the key for any success of a tool.
    pub fn tool(tool: impl Into<Arc<str>>) -> Self {
        Self { tool: tool.into(), entity: None, reported: false }
    }

    /// Restricts the key to successes that a client reports.
    #[must_use]
    pub const fn reported(mut self) -> Self {
        self.reported = true;
        self
    }

    /// Restricts the key to one entity.
    #[must_use]
    pub fn about(mut self, name: impl Into<Arc<str>>, value: &Value) -> Self {
        self.entity =
            Some((name.into(), toolgate_json::with_canonical_text(value, |text| Arc::from(text))));
        self
    }
}

/// Origin of evidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvidenceOrigin {
    /// Toolgate ran the tool.
    RunHere,
    /// A client ran the tool and reported the result.
    Reported,
    /// Hypothetical evidence during the search for a next step. It satisfies every rule and is
    /// never stored.
    Assumed,
}

/// Evidence of a successful call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    /// The tool.
    pub tool: Arc<str>,
    /// The entities of the call.
    pub entities: Vec<(Arc<str>, Value)>,
    /// The fields of the result that the tool declares as evidence.
    pub fields: Value,
    /// The time of the call.
    pub at: Timestamp,
    /// Whether toolgate or the client ran the tool.
    pub origin: EvidenceOrigin,
    /// The position in the order of changes and revocations. At most the stamp of the commit.
    #[serde(default)]
    pub stamp: u64,
}

impl Evidence {
    /// Returns the keys under which the evidence is stored.
    pub fn keys(&self) -> impl Iterator<Item = EvidenceKey> {
        self.keys_for_reported(self.origin == EvidenceOrigin::Reported)
    }

    /// Returns the keys as if toolgate (`false`) or the client (`true`) had run the tool.
    pub fn keys_for_reported(&self, reported: bool) -> impl Iterator<Item = EvidenceKey> {
        let bare = EvidenceKey::tool(Arc::clone(&self.tool));
        let about = self.entities.iter().map(|(name, value)| {
            EvidenceKey::tool(Arc::clone(&self.tool)).about(Arc::clone(name), value)
        });
        std::iter::once(bare).chain(about).map(move |key| EvidenceKey { reported, ..key })
    }
}
