//! Tracks the provenance of values: untrusted results, trusted sources, and the model itself.
//!
//! A session stores only fingerprints of values, and a bounded number of them. For distrust, values
//! are folded first (case, spacing, look-alike letters, encodings), so a disguise has no effect.
//! For trust, values must be identical.

mod amount;
mod decode;
mod fingerprint;
mod host_key;
mod taint_carrier;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

pub(crate) use crate::provenance::taint_carrier::Carrier;
pub use crate::provenance::taint_carrier::{Carriers, Carrying, carry};
pub use decode::percent;

use crate::provenance::fingerprint::Prints;
use crate::session::state::Map;

/// Maximum number of untrusted fingerprints in a session.
///
/// Beyond it, every value that is not known as trusted counts as untrusted.
pub const MAX_UNTRUSTED: usize = 50_000;
/// Maximum number of trusted fingerprints in a session; twice as many for the user's own words.
pub const MAX_TRUSTED: usize = 100_000;
/// Maximum number of fingerprints of values that the model wrote.
///
/// Beyond it, no tool is trusted.
pub const MAX_WRITTEN: usize = 300_000;
/// Maximum number of files and entities written by models in a store.
///
/// Beyond it, every file and entity counts as untrusted.
pub const MAX_CARRIERS: usize = 100_000;
/// Maximum number of bytes that are read of one result, including decoded forms.
pub const MAX_TEXT: usize = 2 << 20;

/// Returns the fingerprint of an exact value.
fn exact(text: &str) -> u128 {
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().take(16).fold(0, |print, byte| print << 8 | u128::from(*byte))
}

/// The provenance of a value.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Known {
    /// Whether an untrusted result contained the value, in any disguise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub untrusted: bool,
    /// Whether the record of untrusted values is incomplete, so the value may be untrusted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overflowed: bool,
    /// The sources that contained exactly this value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<Arc<str>>,
}

impl Known {
    /// Returns whether the value was, or may have been, in an untrusted result.
    #[must_use]
    pub const fn may_be_untrusted(&self) -> bool {
        self.untrusted || self.overflowed
    }

    /// Returns whether this source contained the value.
    #[must_use]
    pub fn comes_from(&self, source: &str) -> bool {
        self.sources.iter().any(|known| **known == *source)
    }
}

/// Totals and flags of the provenance record of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Flags {
    /// Whether the session received any untrusted value.
    pub tainted: bool,
    /// Whether the record of untrusted values is incomplete.
    pub overflowed: bool,
    /// Whether the record of values from the model is incomplete; then no tool is trusted.
    pub lost: bool,
    /// The number of untrusted fingerprints.
    pub untrusted: usize,
    /// The number of trusted fingerprints.
    pub trusted: usize,
    /// The number of fingerprints of values that the model wrote.
    pub written: usize,
}

/// Storage for the provenance record of a session: in the session, or in the tables of a store.
pub trait Memory {
    /// Returns totals and flags.
    fn flags(&self) -> Flags;
    /// Sets totals and flags.
    fn set_flags(&mut self, flags: Flags);
    /// Returns whether a folded fingerprint may be a whole value; `None` if it is not untrusted.
    fn untrusted(&self, print: u64) -> Option<bool>;
    /// Records an untrusted fingerprint.
    fn set_untrusted(&mut self, print: u64, whole: bool);
    /// Returns the sources that contained exactly this value.
    fn sources(&self, exact: u128) -> Option<Arc<[Arc<str>]>>;
    /// Records the sources that contained exactly this value.
    fn set_sources(&mut self, exact: u128, sources: Arc<[Arc<str>]>);
    /// Returns whether the model wrote this value into a call.
    fn is_written(&self, print: u64) -> bool;
    /// Records that the model wrote this value into a call.
    fn set_written(&mut self, print: u64);
}

/// The provenance record of a session; cloning costs O(1).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Values {
    /// Folded fingerprints; whether each may be a whole value or only a part of one.
    untrusted: Map<u64, bool>,
    trusted: Map<u128, Arc<[Arc<str>]>>,
    /// Values that the model wrote into calls, exact and folded: a result that repeats one is no
    /// source.
    written: Map<u64, ()>,
    flags: Flags,
}

impl Memory for Values {
    fn flags(&self) -> Flags {
        self.flags
    }
    fn set_flags(&mut self, flags: Flags) {
        self.flags = flags;
    }
    fn untrusted(&self, print: u64) -> Option<bool> {
        self.untrusted.get(&print).copied()
    }
    fn set_untrusted(&mut self, print: u64, whole: bool) {
        self.untrusted.insert_mut(print, whole);
    }
    fn sources(&self, exact: u128) -> Option<Arc<[Arc<str>]>> {
        self.trusted.get(&exact).cloned()
    }
    fn set_sources(&mut self, exact: u128, sources: Arc<[Arc<str>]>) {
        self.trusted.insert_mut(exact, sources);
    }
    fn is_written(&self, print: u64) -> bool {
        self.written.contains_key(&print)
    }
    fn set_written(&mut self, print: u64) {
        self.written.insert_mut(print, ());
    }
}

/// Returns whether the tool declares a member with this path and name; then the name is not data.
pub(crate) type Declared<'a> = dyn Fn(&str, &str) -> bool + 'a;

/// A value in the result of a source.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
    fingerprint: u128,
    /// The fingerprint for the lookup in the values that the model wrote.
    folded_fingerprint: u64,
    /// The folded value if it is mostly digits, because the model may have written it in pieces.
    grouped_digits: Option<String>,
}

/// The provenance that a call adds to the record of its session.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seen {
    agent: Arc<str>,
    /// Fingerprints of the result, for the case that it is untrusted.
    untrusted: Prints,
    /// Whether the result is untrusted, independent of the files and entities it was read from.
    is_always_untrusted: bool,
    /// The source and its values.
    trusted: Option<(Arc<str>, Vec<Part>)>,
    written: Vec<u64>,
    /// Whether the model wrote more than can be recorded.
    is_incomplete: bool,
    read: Vec<Carrier>,
    wrote: Vec<Carrier>,
    /// Whether the writes are complete; false if the call failed and the state is unknown.
    has_complete_writes: bool,
}

impl Seen {
    pub(crate) fn new(agent: &Arc<str>) -> Self {
        Self { agent: Arc::clone(agent), ..Self::default() }
    }

    /// Records a result as untrusted: always, or only if a file or entity it was read from is.
    pub(crate) fn distrust(&mut self, value: &Value, always: bool) {
        self.is_always_untrusted = always;
        self.untrusted = Prints::of(value, MAX_UNTRUSTED, crate::provenance::fingerprint::SHORTEST, &|_, _| false);
    }

    /// Records the values of a trusted source, except those that only repeat the arguments.
    pub(crate) fn trust(&mut self, source: Arc<str>, value: &Value, given: &Value, declared: &Declared<'_>) {
        let own = Prints::of(given, MAX_WRITTEN, 1, declared);
        if own.overflowed() {
            return;
        }
        let (mut said, mut budget) = (Vec::new(), MAX_TEXT);
        leaves(value, "", &mut |_, leaf| {
            let text = text_of(leaf);
            // Text beyond the budget is not trusted.
            if text.len() > budget {
                return;
            }
            budget -= text.len();
            crate::provenance::fingerprint::exact_parts(&text, crate::provenance::fingerprint::MAX_BELIEVED, &mut |part| {
                let is_own = |print| own.get(print).is_some();
                if !crate::provenance::fingerprint::readings(part).any(|reading| crate::provenance::fingerprint::is_echo(&reading, &is_own))
                {
                    let folded = crate::provenance::fingerprint::fold(part);
                    let spelling = crate::provenance::fingerprint::spelling(part, &folded);
                    let pieces = crate::provenance::fingerprint::may_be_grouped(&folded).then_some(folded);
                    said.push(Part { fingerprint: exact(part), folded_fingerprint: spelling, grouped_digits: pieces });
                }
                said.len() < MAX_TRUSTED
            });
        });
        said.sort_unstable();
        said.dedup();
        self.trusted = Some((source, said));
    }

    /// Records the values that the model wrote into a call, without the member names that the tool
    /// declares.
    pub(crate) fn write(&mut self, given: &Value, declared: &Declared<'_>) {
        // Include parts of words and decoded forms: a part of an argument is not a new value.
        let prints = Prints::of(given, MAX_WRITTEN, 1, declared);
        let (mut written, mut lost): (Vec<u64>, bool) = (prints.iter().map(|(print, _)| print).collect(), prints.overflowed());
        let mut one = |text: &str| {
            crate::provenance::fingerprint::exact_parts(text, usize::MAX, &mut |part| {
                written.push(crate::provenance::fingerprint::spelling(part, &crate::provenance::fingerprint::fold(part)));
                lost |= written.len() > 8 * MAX_WRITTEN;
                !lost
            });
        };
        if !prints.overflowed() {
            leaves(given, "", &mut |_, leaf| one(&text_of(leaf)));
            names(given, "", &mut |place, name| {
                if !declared(place, name) {
                    one(name);
                }
            });
        }
        written.sort_unstable();
        written.dedup();
        self.written.extend(written);
        self.is_incomplete |= lost;
    }

    /// Records that the model wrote a value that cannot be read.
    pub(crate) fn lose(&mut self) {
        self.is_incomplete = true;
    }

    /// Records the files and entities that the call read.
    pub(crate) fn read_from(&mut self, carriers: impl IntoIterator<Item = Carrier>) {
        self.read.extend(carriers);
    }

    /// Returns whether the call read a file or an entity.
    pub(crate) fn has_read(&self) -> bool {
        !self.read.is_empty()
    }

    /// Records the files and entities that the call wrote, and whether the writes are complete.
    pub(crate) fn wrote_to(&mut self, carriers: impl IntoIterator<Item = Carrier>, kept: bool) {
        self.wrote.extend(carriers);
        self.has_complete_writes = kept;
    }
}

/// Returns the provenance of an argument value.
#[must_use]
pub fn known(memory: &dyn Memory, leaf: &Value) -> Known {
    if matches!(leaf, Value::Null | Value::Bool(_)) {
        return Known::default();
    }
    let text = text_of(leaf);
    let flags = memory.flags();
    let mut sources: Vec<Arc<str>> = Vec::new();
    if flags.trusted > 0 {
        crate::provenance::fingerprint::exact_whole(&text, &mut |form| {
            sources.extend(memory.sources(exact(form)).iter().flat_map(|known| known.iter().cloned()));
        });
    }
    sources.sort_unstable();
    sources.dedup();
    let untrusted =
        flags.untrusted > 0 && crate::provenance::fingerprint::is_made_of(&text, leaf.is_number(), &|print| memory.untrusted(print));
    Known { untrusted, overflowed: flags.overflowed, sources }
}

/// Records the user's own words as trusted.
pub fn hear(memory: &mut dyn Memory, text: &str) {
    let user: Arc<str> = USER.into();
    let mut flags = memory.flags();
    crate::provenance::fingerprint::exact_parts(text, crate::provenance::fingerprint::MAX_BELIEVED, &mut |part| {
        believe(memory, &mut flags, exact(part), &user, 2 * MAX_TRUSTED);
        true
    });
    memory.set_flags(flags);
}

/// Adds the provenance of a call to the record, and updates the files and entities that it wrote.
pub fn take_in(memory: &mut dyn Memory, seen: Seen, carriers: &mut dyn Carrying) {
    let agent = &*seen.agent;
    let mut flags = memory.flags();
    let held: Vec<bool> = seen.read.iter().flat_map(|carrier| carrier.read(agent)).filter_map(|key| carriers.holds(&key)).collect();
    let distrusted = seen.is_always_untrusted || held.contains(&true);
    if distrusted {
        flags.tainted = true;
        flags.overflowed |= add_untrusted(memory, &mut flags.untrusted, &seen.untrusted);
    }
    // Record the arguments before the result, because a result may only repeat its arguments.
    flags.lost |= seen.is_incomplete;
    for print in seen.written {
        if flags.written >= MAX_WRITTEN {
            flags.lost = true;
            break;
        }
        if !memory.is_written(print) {
            memory.set_written(print);
            flags.written += 1;
        }
    }
    if let Some((source, parts)) = seen.trusted.filter(|_| !distrusted && held.is_empty() && !flags.lost) {
        for part in parts {
            let in_pieces = |folded: &String| crate::provenance::fingerprint::is_echo(folded, &|print| memory.is_written(print));
            if !memory.is_written(part.folded_fingerprint) && !part.grouped_digits.as_ref().is_some_and(in_pieces) {
                believe(memory, &mut flags, part.fingerprint, &source, MAX_TRUSTED);
            }
        }
    }
    // A write after an untrusted result may contain untrusted data in any form.
    for carrier in &seen.wrote {
        // A successful call replaces a whole file. Other writes add to the earlier content.
        let replaced = seen.has_complete_writes && matches!(carrier, Carrier::File(_));
        for (index, key) in carrier.written(agent).into_iter().enumerate() {
            let before = carriers.holds(&key).unwrap_or(false);
            // Index 0 is the file itself. The key for "some file" keeps its value.
            carriers.add(key, flags.tainted || (before && !(replaced && index == 0)));
        }
    }
    memory.set_flags(flags);
}

fn believe(memory: &mut dyn Memory, flags: &mut Flags, print: u128, source: &Arc<str>, most: usize) {
    let known = memory.sources(print);
    if known.as_ref().is_some_and(|known| known.contains(source)) || (known.is_none() && flags.trusted >= most) {
        return;
    }
    flags.trusted += usize::from(known.is_none());
    let sources: Arc<[Arc<str>]> = known.iter().flat_map(|known| known.iter().cloned()).chain([Arc::clone(source)]).collect();
    memory.set_sources(print, sources);
}

/// Adds fingerprints to the record; returns true if they do not all fit.
fn add_untrusted(memory: &mut dyn Memory, count: &mut usize, prints: &Prints) -> bool {
    for (print, whole) in prints.iter() {
        let known = memory.untrusted(print);
        if known.is_none() && *count >= MAX_UNTRUSTED {
            return true;
        }
        if known.is_none_or(|known| whole && !known) {
            memory.set_untrusted(print, whole);
            *count += usize::from(known.is_none());
        }
    }
    prints.overflowed()
}

/// The source name for the user's own words.
pub const USER: &str = "user";

/// Returns the source name for a tool that a client ran; its reports are a separate source.
pub(crate) fn reported(tool: &str) -> String {
    format!("{tool} (reported)")
}

/// Returns the text of a leaf, with one spelling for each number.
fn text_of(leaf: &Value) -> std::borrow::Cow<'_, str> {
    match leaf {
        Value::String(text) => text.as_str().into(),
        Value::Number(number) => match toolgate_json::canonical_number(number.as_str()) {
            Ok(canonical) => canonical.as_str().to_owned().into(),
            Err(_) => number.as_str().to_owned().into(),
        },
        other => other.to_string().into(),
    }
}

/// Visits every text and number in a value, with its path.
pub(crate) fn leaves(value: &Value, place: &str, f: &mut dyn FnMut(&str, &Value)) {
    match value {
        Value::Null | Value::Bool(_) => {}
        Value::Number(_) | Value::String(_) => f(place, value),
        Value::Array(items) => items.iter().enumerate().for_each(|(index, item)| leaves(item, &format!("{place}/{index}"), f)),
        Value::Object(map) => map.iter().for_each(|(name, item)| leaves(item, &within(place, name), f)),
    }
}

/// Visits every member name in a value, with the path of the member.
pub(crate) fn names(value: &Value, place: &str, f: &mut dyn FnMut(&str, &str)) {
    match value {
        Value::Array(items) => items.iter().enumerate().for_each(|(index, item)| names(item, &format!("{place}/{index}"), f)),
        Value::Object(map) => map.iter().for_each(|(name, item)| {
            let place = within(place, name);
            f(&place, name);
            names(item, &place, f);
        }),
        _ => {}
    }
}

fn within(place: &str, name: &str) -> String {
    format!("{place}/{}", name.replace('~', "~0").replace('/', "~1"))
}
