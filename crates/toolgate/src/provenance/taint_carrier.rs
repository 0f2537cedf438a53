//! Tracks files and entities that models wrote, across sessions.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::{MAX_CARRIERS, leaves, text_of};
use crate::provenance::fingerprint::fold;

/// Storage for the files and entities that models wrote.
///
/// Data read back from them is not evidence, and is untrusted if the session of the writer was
/// tainted. The store keeps these records, because files outlive sessions.
pub trait Carrying {
    /// Returns whether a file or entity contains untrusted data; `None` if no model wrote it.
    fn holds(&self, carrier: &str) -> Option<bool>;
    /// Records that a model wrote a file or entity.
    ///
    /// Beyond [`MAX_CARRIERS`], all of them count as untrusted.
    fn add(&mut self, carrier: String, untrusted: bool);
}

/// Records of written files and entities, in memory.
#[derive(Debug, Clone, Default)]
pub struct Carriers {
    known: BTreeMap<String, bool>,
    overflowed: bool,
}

impl Carrying for Carriers {
    fn holds(&self, carrier: &str) -> Option<bool> {
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
pub(crate) enum Carrier {
    File(String),
    /// An unknown file.
    UnknownFile,
    /// An entity: its name, and its folded value if known.
    Entity(Arc<str>, Option<String>),
}

impl Carrier {
    /// Returns the entities that values name; without a value, one unknown entity.
    ///
    /// Values are folded, because a tool may ignore differences in spelling too.
    pub(crate) fn entities<'v>(name: &Arc<str>, values: impl IntoIterator<Item = &'v Value>) -> Vec<Self> {
        let mut found = Vec::new();
        for value in values {
            leaves(value, "", &mut |_, leaf| {
                let text = text_of(leaf);
                let folded = fold(&text);
                found.push(Self::Entity(Arc::clone(name), Some(if folded.is_empty() { text.into_owned() } else { folded })));
            });
        }
        if found.is_empty() { vec![Self::Entity(Arc::clone(name), None)] } else { found }
    }
}

/// Placeholders for the value of an entity: any entity of the name, and an unknown one.
const SOME: &str = "*";
const UNNAMED: &str = "?";

impl Carrier {
    fn key(agent: &str, kind: &str, name: &str) -> String {
        format!("{agent}\u{1f}{kind}\u{1f}{name}")
    }

    fn entity(agent: &str, name: &str, value: &str) -> String {
        Self::key(agent, "e", &format!("{name}\u{1f}{value}"))
    }

    /// Returns the keys under which writes are recorded, sorted and without duplicates.
    pub(crate) fn keys(agent: &str, carriers: impl IntoIterator<Item = Self>) -> Vec<String> {
        let mut keys: Vec<String> = carriers.into_iter().flat_map(|carrier| carrier.written(agent)).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// Returns the keys under which a write is recorded.
    pub(crate) fn written(&self, agent: &str) -> Vec<String> {
        match self {
            Self::File(path) => vec![Self::key(agent, "f", path), Self::key(agent, "some file", "")],
            Self::UnknownFile => Vec::new(),
            Self::Entity(name, value) => {
                vec![Self::entity(agent, name, SOME), Self::entity(agent, name, value.as_deref().unwrap_or(UNNAMED))]
            }
        }
    }

    /// Returns the keys to check on a read; one untrusted key makes the result untrusted.
    pub(crate) fn read(&self, agent: &str) -> Vec<String> {
        match self {
            Self::File(path) => vec![Self::key(agent, "f", path)],
            Self::UnknownFile => vec![Self::key(agent, "some file", "")],
            Self::Entity(name, Some(value)) => vec![Self::entity(agent, name, value), Self::entity(agent, name, UNNAMED)],
            Self::Entity(name, None) => vec![Self::entity(agent, name, SOME)],
        }
    }
}

/// Records that a model wrote under these keys; `tainted` if its session received untrusted data.
pub fn carry(keys: &[String], tainted: bool, carriers: &mut dyn Carrying) {
    for key in keys {
        let before = carriers.holds(key).unwrap_or(false);
        carriers.add(key.clone(), tainted || before);
    }
}
