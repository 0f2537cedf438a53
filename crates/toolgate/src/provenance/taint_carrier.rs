//! Tracks files and entities that models wrote, across sessions.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::MAX_CARRIERS;
use crate::provenance::fingerprint::fold_text;
use crate::provenance::leaves::{text_of, visit_leaves};

/// Storage for the files and entities that models wrote.
///
/// Data read back from them is not evidence, and is untrusted if the session of the writer was
/// tainted. The store keeps these records, because files outlive sessions.
pub trait CarrierStore {
    /// Returns whether a file or entity contains untrusted data; `None` if no model wrote it.
    fn taint_of(&self, carrier: &str) -> Option<bool>;
    /// Records that a model wrote a file or entity.
    ///
    /// Beyond [`MAX_CARRIERS`], all of them count as untrusted.
    fn add(&mut self, carrier: String, untrusted: bool);
}

/// Records of written files and entities, in memory.
#[derive(Debug, Clone, Default)]
pub struct MemoryCarrierStore {
    known: BTreeMap<String, bool>,
    overflowed: bool,
}

impl CarrierStore for MemoryCarrierStore {
    fn taint_of(&self, carrier: &str) -> Option<bool> {
        if self.overflowed { Some(true) } else { self.known.get(carrier).copied() }
    }

    fn add(&mut self, carrier: String, untrusted: bool) {
        if self.known.len() < MAX_CARRIERS || self.known.contains_key(&carrier) {
            self.known.insert(carrier, untrusted);
        } else {
            self.overflowed = true;
        }
    }
}

/// A file or an entity that stores data across sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TaintCarrier {
    File(String),
    /// An unknown file.
    UnknownFile,
    /// An entity: its name, and its folded value if known.
    Entity(Arc<str>, Option<String>),
}

impl TaintCarrier {
    /// Returns the entities that values name; without a value, one unknown entity.
    ///
    /// Values are folded, because a tool may ignore differences in spelling too.
    pub(crate) fn entities<'v>(
        name: &Arc<str>,
        values: impl IntoIterator<Item = &'v Value>,
    ) -> Vec<Self> {
        let mut found = Vec::new();
        for value in values {
            visit_leaves(value, "", &mut |_, leaf| {
                let text = text_of(leaf);
                let folded = fold_text(&text);
                found.push(Self::Entity(
                    Arc::clone(name),
                    Some(if folded.is_empty() { text.into_owned() } else { folded }),
                ));
            });
        }
        if found.is_empty() { vec![Self::Entity(Arc::clone(name), None)] } else { found }
    }
}

/// Placeholders for the value of an entity: any entity of the name, and an unknown one.
const ANY_ENTITY_VALUE: &str = "*";
const UNKNOWN_ENTITY_VALUE: &str = "?";

impl TaintCarrier {
    fn format_key(agent: &str, kind: &str, name: &str) -> String {
        format!("{agent}\u{1f}{kind}\u{1f}{name}")
    }

    fn entity_key(agent: &str, name: &str, value: &str) -> String {
        Self::format_key(agent, "e", &format!("{name}\u{1f}{value}"))
    }

    /// Returns the keys under which writes are recorded, sorted and without duplicates.
    pub(crate) fn collect_write_keys(
        agent: &str,
        carriers: impl IntoIterator<Item = Self>,
    ) -> Vec<String> {
        let mut keys: Vec<String> =
            carriers.into_iter().flat_map(|carrier| carrier.write_keys(agent)).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// Returns the keys under which a write is recorded.
    pub(crate) fn write_keys(&self, agent: &str) -> Vec<String> {
        match self {
            Self::File(path) => {
                vec![Self::format_key(agent, "f", path), Self::format_key(agent, "some file", "")]
            }
            Self::UnknownFile => Vec::new(),
            Self::Entity(name, value) => {
                vec![
                    Self::entity_key(agent, name, ANY_ENTITY_VALUE),
                    Self::entity_key(agent, name, value.as_deref().unwrap_or(UNKNOWN_ENTITY_VALUE)),
                ]
            }
        }
    }

    /// Returns the keys to check on a read; one untrusted key makes the result untrusted.
    pub(crate) fn read_keys(&self, agent: &str) -> Vec<String> {
        match self {
            Self::File(path) => vec![Self::format_key(agent, "f", path)],
            Self::UnknownFile => vec![Self::format_key(agent, "some file", "")],
            Self::Entity(name, Some(value)) => {
                vec![
                    Self::entity_key(agent, name, value),
                    Self::entity_key(agent, name, UNKNOWN_ENTITY_VALUE),
                ]
            }
            Self::Entity(name, None) => vec![Self::entity_key(agent, name, ANY_ENTITY_VALUE)],
        }
    }
}

/// Records that a model wrote under these keys; `tainted` if its session received untrusted data.
pub fn record_carrier_writes(keys: &[String], tainted: bool, carriers: &mut dyn CarrierStore) {
    for key in keys {
        let before = carriers.taint_of(key).unwrap_or(false);
        carriers.add(key.clone(), tainted || before);
    }
}
