//! Files and entities that carry what was written to them, beyond the session that wrote it.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::fold::fold;
use super::{MAX_CARRIERS, leaves, text_of};

/// Files and entities of agents that models wrote to. What is read back from them proves nothing, and is untrusted where
/// it was written after something untrusted was seen. Kept with the store, because files outlive sessions.
pub trait Carrying {
    /// Whether a model wrote to it, and if so, whether what it holds is untrusted.
    fn holds(&self, carrier: &str) -> Option<bool>;
    /// Remembers that a model wrote to it. Of more than [`MAX_CARRIERS`], all hold something untrusted.
    fn add(&mut self, carrier: String, untrusted: bool);
}

/// Carriers in memory.
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

/// Something that keeps what is written to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Carrier {
    File(String),
    /// Some file, nobody knows which.
    SomeFile,
    /// An entity of this name; which one, folded, where that is known.
    Entity(Arc<str>, Option<String>),
}

impl Carrier {
    /// The entities that some values name; one that nobody could name where there is none. Spelling does not tell two apart,
    /// because a tool may not either.
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

/// Which entity of a name: some, or one that nobody could name.
const SOME: &str = "*";
const UNNAMED: &str = "?";

impl Carrier {
    fn key(agent: &str, kind: &str, name: &str) -> String {
        format!("{agent}\u{1f}{kind}\u{1f}{name}")
    }

    fn entity(agent: &str, name: &str, value: &str) -> String {
        Self::key(agent, "e", &format!("{name}\u{1f}{value}"))
    }

    /// The keys under which some are remembered, each once.
    pub(crate) fn keys(agent: &str, carriers: impl IntoIterator<Item = Self>) -> Vec<String> {
        let mut keys: Vec<String> = carriers.into_iter().flat_map(|carrier| carrier.written(agent)).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// The keys under which it is remembered.
    pub(super) fn written(&self, agent: &str) -> Vec<String> {
        match self {
            Self::File(path) => vec![Self::key(agent, "f", path), Self::key(agent, "some file", "")],
            Self::SomeFile => Vec::new(),
            Self::Entity(name, value) => {
                vec![Self::entity(agent, name, SOME), Self::entity(agent, name, value.as_deref().unwrap_or(UNNAMED))]
            }
        }
    }

    /// The keys any one of which makes what is read from it untrusted.
    pub(super) fn read(&self, agent: &str) -> Vec<String> {
        match self {
            Self::File(path) => vec![Self::key(agent, "f", path)],
            Self::SomeFile => vec![Self::key(agent, "some file", "")],
            Self::Entity(name, Some(value)) => vec![Self::entity(agent, name, value), Self::entity(agent, name, UNNAMED)],
            Self::Entity(name, None) => vec![Self::entity(agent, name, SOME)],
        }
    }
}

/// Remembers that a model wrote to what is known under these keys; whether after something untrusted was heard.
pub fn carry(keys: &[String], tainted: bool, carriers: &mut dyn Carrying) {
    for key in keys {
        let before = carriers.holds(key).unwrap_or(false);
        carriers.add(key.clone(), tainted || before);
    }
}
