//! Tracks the provenance of values: untrusted results, trusted sources, and the model itself.
//!
//! A session stores only fingerprints of values, and a bounded number of them. For distrust, values
//! are folded first (case, spacing, look-alike letters, encodings), so a disguise has no effect.
//! For trust, values must be identical.

mod amount;
mod decode;
mod exact_values;
mod fingerprint;
mod host_key;
pub(crate) mod leaves;
mod taint_carrier;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

pub(crate) use crate::provenance::taint_carrier::TaintCarrier;
pub use crate::provenance::taint_carrier::{
    CarrierStore, MemoryCarrierStore, record_carrier_writes,
};
pub use decode::decode_percent;

use crate::provenance::fingerprint::Fingerprints;
use crate::provenance::leaves::{text_of, visit_leaves, visit_names};
use crate::session::state::PersistentMap;

/// Maximum number of untrusted fingerprints in a session.
///
/// Beyond it, every value that is not known as trusted counts as untrusted.
pub const MAX_UNTRUSTED_FINGERPRINTS: usize = 50_000;
/// Maximum number of trusted fingerprints in a session; twice as many for the user's own words.
pub const MAX_TRUSTED_FINGERPRINTS: usize = 100_000;
/// Maximum number of fingerprints of values that the model wrote.
///
/// Beyond it, no tool is trusted.
pub const MAX_WRITTEN_FINGERPRINTS: usize = 300_000;
/// Maximum number of files and entities written by models in a store.
///
/// Beyond it, every file and entity counts as untrusted.
pub const MAX_CARRIERS: usize = 100_000;
/// Maximum number of bytes that are read of one result, including decoded forms.
pub const MAX_RESULT_TEXT_BYTES: usize = 2 << 20;

/// Returns the fingerprint of an exact value.
fn exact_fingerprint(text: &str) -> u128 {
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().take(16).fold(0, |print, byte| print << 8 | u128::from(*byte))
}

/// The provenance of a value.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Provenance {
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

impl Provenance {
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
pub struct ProvenanceFlags {
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
pub trait ProvenanceStore {
    /// Returns totals and flags.
    fn flags(&self) -> ProvenanceFlags;
    /// Sets totals and flags.
    fn set_flags(&mut self, flags: ProvenanceFlags);
    /// Returns whether a folded fingerprint may be a whole value; `None` if it is not untrusted.
    fn untrusted(&self, print: u64) -> Option<bool>;
    /// Records an untrusted fingerprint.
    fn set_untrusted(&mut self, print: u64, is_whole: bool);
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
pub struct ProvenanceIndex {
    /// Folded fingerprints; whether each may be a whole value or only a part of one.
    untrusted: PersistentMap<u64, bool>,
    trusted: PersistentMap<u128, Arc<[Arc<str>]>>,
    /// Values that the model wrote into calls, exact and folded: a result that repeats one is no
    /// source.
    written: PersistentMap<u64, ()>,
    flags: ProvenanceFlags,
}

impl ProvenanceStore for ProvenanceIndex {
    fn flags(&self) -> ProvenanceFlags {
        self.flags
    }
    fn set_flags(&mut self, flags: ProvenanceFlags) {
        self.flags = flags;
    }
    fn untrusted(&self, print: u64) -> Option<bool> {
        self.untrusted.get(&print).copied()
    }
    fn set_untrusted(&mut self, print: u64, is_whole: bool) {
        self.untrusted.insert_mut(print, is_whole);
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
pub(crate) type DeclaredNameTest<'a> = dyn Fn(&str, &str) -> bool + 'a;

/// A value in the result of a source.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct SourceValue {
    fingerprint: u128,
    /// The fingerprint for the lookup in the values that the model wrote.
    folded_fingerprint: u64,
    /// The folded value if it is mostly digits, because the model may have written it in pieces.
    grouped_digits: Option<String>,
}

/// The provenance that a call adds to the record of its session.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProvenanceUpdate {
    agent: Arc<str>,
    /// Fingerprints of the result, for the case that it is untrusted.
    untrusted: Fingerprints,
    /// Whether the result is untrusted, independent of the files and entities it was read from.
    is_always_untrusted: bool,
    /// The source and its values.
    trusted: Option<(Arc<str>, Vec<SourceValue>)>,
    written_fingerprints: Vec<u64>,
    /// Whether the model wrote more than can be recorded.
    is_incomplete: bool,
    reads: Vec<TaintCarrier>,
    writes: Vec<TaintCarrier>,
    /// Whether the writes are complete; false if the call failed and the state is unknown.
    has_complete_writes: bool,
}

impl ProvenanceUpdate {
    pub(crate) fn new(agent: &Arc<str>) -> Self {
        Self { agent: Arc::clone(agent), ..Self::default() }
    }

    /// Records a result as untrusted: always, or only if a file or entity it was read from is.
    pub(crate) fn record_untrusted(&mut self, value: &Value, always: bool) {
        self.is_always_untrusted = always;
        self.untrusted = Fingerprints::from_value(
            value,
            MAX_UNTRUSTED_FINGERPRINTS,
            crate::provenance::fingerprint::MIN_TEXT_CHARS,
            &|_, _| false,
        );
    }

    /// Records the values of a trusted source, except those that only repeat the arguments.
    pub(crate) fn record_trusted(
        &mut self,
        source: Arc<str>,
        value: &Value,
        arguments: &Value,
        declared: &DeclaredNameTest<'_>,
    ) {
        let argument_prints =
            Fingerprints::from_value(arguments, MAX_WRITTEN_FINGERPRINTS, 1, declared);
        if argument_prints.has_overflowed() {
            return;
        }
        let (mut values, mut budget) = (Vec::new(), MAX_RESULT_TEXT_BYTES);
        visit_leaves(value, "", &mut |_, leaf| {
            let text = text_of(leaf);
            // Text beyond the budget is not trusted.
            if text.len() > budget {
                return;
            }
            budget -= text.len();
            crate::provenance::exact_values::visit_exact_values(
                &text,
                crate::provenance::exact_values::MAX_TRUSTED_WORDS,
                &mut |part| {
                    let is_argument = |print| argument_prints.get(print).is_some();
                    if !crate::provenance::fingerprint::folded_forms(part).any(|reading| {
                        crate::provenance::fingerprint::is_echo(&reading, &is_argument)
                    }) {
                        let folded = crate::provenance::fingerprint::fold_text(part);
                        let spelling =
                            crate::provenance::fingerprint::written_fingerprint(part, &folded);
                        let pieces = crate::provenance::fingerprint::can_be_grouped_digits(&folded)
                            .then_some(folded);
                        values.push(SourceValue {
                            fingerprint: exact_fingerprint(part),
                            folded_fingerprint: spelling,
                            grouped_digits: pieces,
                        });
                    }
                    values.len() < MAX_TRUSTED_FINGERPRINTS
                },
            );
        });
        values.sort_unstable();
        values.dedup();
        self.trusted = Some((source, values));
    }

    /// Records the values that the model wrote into a call, without the member names that the tool
    /// declares.
    pub(crate) fn record_written(&mut self, arguments: &Value, declared: &DeclaredNameTest<'_>) {
        // Include parts of words and decoded forms: a part of an argument is not a new value.
        let prints = Fingerprints::from_value(arguments, MAX_WRITTEN_FINGERPRINTS, 1, declared);
        let (mut written, mut lost): (Vec<u64>, bool) =
            (prints.iter().map(|(print, _)| print).collect(), prints.has_overflowed());
        let mut add_values = |text: &str| {
            crate::provenance::exact_values::visit_exact_values(text, usize::MAX, &mut |part| {
                written.push(crate::provenance::fingerprint::written_fingerprint(
                    part,
                    &crate::provenance::fingerprint::fold_text(part),
                ));
                lost |= written.len() > 8 * MAX_WRITTEN_FINGERPRINTS;
                !lost
            });
        };
        if !prints.has_overflowed() {
            visit_leaves(arguments, "", &mut |_, leaf| add_values(&text_of(leaf)));
            visit_names(arguments, "", &mut |place, name| {
                if !declared(place, name) {
                    add_values(name);
                }
            });
        }
        written.sort_unstable();
        written.dedup();
        self.written_fingerprints.extend(written);
        self.is_incomplete |= lost;
    }

    /// Records that the model wrote a value that cannot be read.
    pub(crate) fn mark_incomplete(&mut self) {
        self.is_incomplete = true;
    }

    /// Records the files and entities that the call read.
    pub(crate) fn record_reads(&mut self, carriers: impl IntoIterator<Item = TaintCarrier>) {
        self.reads.extend(carriers);
    }

    /// Returns whether the call read a file or an entity.
    pub(crate) fn has_read(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Records the files and entities that the call wrote, and whether the writes are complete.
    pub(crate) fn record_carrier_writes(
        &mut self,
        carriers: impl IntoIterator<Item = TaintCarrier>,
        is_complete: bool,
    ) {
        self.writes.extend(carriers);
        self.has_complete_writes = is_complete;
    }
}

/// Returns the provenance of an argument value.
#[must_use]
pub fn find_provenance(memory: &dyn ProvenanceStore, leaf: &Value) -> Provenance {
    if matches!(leaf, Value::Null | Value::Bool(_)) {
        return Provenance::default();
    }
    let text = text_of(leaf);
    let flags = memory.flags();
    let mut sources: Vec<Arc<str>> = Vec::new();
    if flags.trusted > 0 {
        crate::provenance::exact_values::visit_exact_forms(&text, &mut |form| {
            sources.extend(
                memory
                    .sources(exact_fingerprint(form))
                    .iter()
                    .flat_map(|known| known.iter().cloned()),
            );
        });
    }
    sources.sort_unstable();
    sources.dedup();
    let untrusted = flags.untrusted > 0
        && crate::provenance::fingerprint::is_composed_of_known(
            &text,
            leaf.is_number(),
            &|print| memory.untrusted(print),
        );
    Provenance { untrusted, overflowed: flags.overflowed, sources }
}

/// Records the user's own words as trusted.
pub fn trust_user_text(memory: &mut dyn ProvenanceStore, text: &str) {
    let user: Arc<str> = USER_SOURCE.into();
    let mut flags = memory.flags();
    crate::provenance::exact_values::visit_exact_values(
        text,
        crate::provenance::exact_values::MAX_TRUSTED_WORDS,
        &mut |part| {
            add_trusted(
                memory,
                &mut flags,
                exact_fingerprint(part),
                &user,
                2 * MAX_TRUSTED_FINGERPRINTS,
            );
            true
        },
    );
    memory.set_flags(flags);
}

/// Adds the provenance of a call to the record, and updates the files and entities that it wrote.
pub fn apply_update(
    memory: &mut dyn ProvenanceStore,
    seen: ProvenanceUpdate,
    carriers: &mut dyn CarrierStore,
) {
    let agent = &*seen.agent;
    let mut flags = memory.flags();
    let carrier_taints: Vec<bool> = seen
        .reads
        .iter()
        .flat_map(|carrier| carrier.read_keys(agent))
        .filter_map(|key| carriers.taint_of(&key))
        .collect();
    let distrusted = seen.is_always_untrusted || carrier_taints.contains(&true);
    if distrusted {
        flags.tainted = true;
        flags.overflowed |= add_untrusted(memory, &mut flags.untrusted, &seen.untrusted);
    }
    // Record the arguments before the result, because a result may only repeat its arguments.
    flags.lost |= seen.is_incomplete;
    for print in seen.written_fingerprints {
        if flags.written >= MAX_WRITTEN_FINGERPRINTS {
            flags.lost = true;
            break;
        }
        if !memory.is_written(print) {
            memory.set_written(print);
            flags.written += 1;
        }
    }
    if let Some((source, parts)) =
        seen.trusted.filter(|_| !distrusted && carrier_taints.is_empty() && !flags.lost)
    {
        for part in parts {
            let in_pieces = |folded: &String| {
                crate::provenance::fingerprint::is_echo(folded, &|print| memory.is_written(print))
            };
            if !memory.is_written(part.folded_fingerprint)
                && !part.grouped_digits.as_ref().is_some_and(in_pieces)
            {
                add_trusted(
                    memory,
                    &mut flags,
                    part.fingerprint,
                    &source,
                    MAX_TRUSTED_FINGERPRINTS,
                );
            }
        }
    }
    // A write after an untrusted result may contain untrusted data in any form.
    for carrier in &seen.writes {
        // A successful call replaces a whole file. Other writes add to the earlier content.
        let replaced = seen.has_complete_writes && matches!(carrier, TaintCarrier::File(_));
        for (index, key) in carrier.write_keys(agent).into_iter().enumerate() {
            let before = carriers.taint_of(&key).unwrap_or(false);
            // Index 0 is the file itself. The key for "some file" keeps its value.
            carriers.add(key, flags.tainted || (before && !(replaced && index == 0)));
        }
    }
    memory.set_flags(flags);
}

fn add_trusted(
    memory: &mut dyn ProvenanceStore,
    flags: &mut ProvenanceFlags,
    print: u128,
    source: &Arc<str>,
    most: usize,
) {
    let known = memory.sources(print);
    if known.as_ref().is_some_and(|known| known.contains(source))
        || (known.is_none() && flags.trusted >= most)
    {
        return;
    }
    flags.trusted += usize::from(known.is_none());
    let sources: Arc<[Arc<str>]> =
        known.iter().flat_map(|known| known.iter().cloned()).chain([Arc::clone(source)]).collect();
    memory.set_sources(print, sources);
}

/// Adds fingerprints to the record; returns true if they do not all fit.
fn add_untrusted(
    memory: &mut dyn ProvenanceStore,
    count: &mut usize,
    prints: &Fingerprints,
) -> bool {
    for (print, is_whole) in prints.iter() {
        let known = memory.untrusted(print);
        if known.is_none() && *count >= MAX_UNTRUSTED_FINGERPRINTS {
            return true;
        }
        if known.is_none_or(|known| is_whole && !known) {
            memory.set_untrusted(print, is_whole);
            *count += usize::from(known.is_none());
        }
    }
    prints.has_overflowed()
}

/// The source name for the user's own words.
pub const USER_SOURCE: &str = "user";

/// Returns the source name for a tool that a client ran; its reports are a separate source.
pub(crate) fn reported_source(tool: &str) -> String {
    format!("{tool} (reported)")
}
