//! Where values come from: what untrusted results said, what trusted sources said, what the model wrote itself.
//!
//! Only prints of values are kept, and a bounded number of them. To distrust, values are folded first (case, spacing,
//! look-alike letters, encodings), so that a disguise changes nothing. To trust, they must be the same to the letter.

mod address;
mod amount;
mod carrier;
mod decode;
mod fold;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

pub(crate) use carrier::Carrier;
pub use carrier::{Carriers, Carrying, carry};
pub(crate) use decode::percent;

use crate::session::Map;
use fold::Prints;

/// How many prints of untrusted values a session remembers; after that, what is not known as trusted counts as untrusted.
pub const MAX_UNTRUSTED: usize = 50_000;
/// How many prints of trusted values. The user is listened to for twice as long.
pub const MAX_TRUSTED: usize = 100_000;
/// How many prints of what the model wrote; after that, no tool is believed any more.
pub const MAX_WRITTEN: usize = 300_000;
/// How many files and entities that a model wrote to a store remembers; after that, all carry something untrusted.
pub const MAX_CARRIERS: usize = 100_000;
/// How much text of one result is looked at, decoded forms included.
pub const MAX_TEXT: usize = 2 << 20;

/// The print of a value, to the letter.
fn exact(text: &str) -> u128 {
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().take(16).fold(0, |print, byte| print << 8 | u128::from(*byte))
}

/// What is known of where a value was seen.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Known {
    /// An untrusted result held it, in whatever disguise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub untrusted: bool,
    /// There was too much to remember: it may have been untrusted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overflowed: bool,
    /// The sources that held exactly this.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<Arc<str>>,
}

impl Known {
    /// Whether it was, or may have been, in an untrusted result.
    #[must_use]
    pub const fn may_be_untrusted(&self) -> bool {
        self.untrusted || self.overflowed
    }

    /// Whether this source held it.
    #[must_use]
    pub fn comes_from(&self, source: &str) -> bool {
        self.sources.iter().any(|known| **known == *source)
    }
}

/// What a session remembers of values in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Flags {
    /// Something untrusted was heard, if only a word.
    pub tainted: bool,
    /// There was more of it than could be remembered.
    pub overflowed: bool,
    /// The model wrote more than could be remembered: nothing that tools say is believed any more.
    pub lost: bool,
    /// How many untrusted prints there are.
    pub untrusted: usize,
    /// How many trusted ones.
    pub trusted: usize,
    /// How many of what the model wrote.
    pub written: usize,
}

/// Where a session's memory of values is kept: in the session, or in the tables of a store.
pub trait Memory {
    /// What there is in all.
    fn flags(&self) -> Flags;
    /// Sets what there is in all.
    fn set_flags(&mut self, flags: Flags);
    /// Whether a folded print is untrusted, and if so, whether it may stand for a whole value.
    fn untrusted(&self, print: u64) -> Option<bool>;
    /// Remembers an untrusted print.
    fn set_untrusted(&mut self, print: u64, whole: bool);
    /// The sources that said exactly this.
    fn sources(&self, exact: u128) -> Option<Arc<[Arc<str>]>>;
    /// Remembers the sources that said exactly this.
    fn set_sources(&mut self, exact: u128, sources: Arc<[Arc<str>]>);
    /// Whether the model has put it into a call.
    fn is_written(&self, print: u64) -> bool;
    /// Remembers that the model has put it into a call.
    fn set_written(&mut self, print: u64);
}

/// What a session remembers of values. A clone costs O(1).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Values {
    /// Folded; whether it may stand for a whole value or only for a part of one.
    untrusted: Map<u64, bool>,
    trusted: Map<u128, Arc<[Arc<str>]>>,
    /// What the model has put into calls, to the letter and folded: read back, it proves nothing.
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

/// Whether a member at this place, of this name, is declared by the tool and so nothing that anybody wrote.
pub(crate) type Declared<'a> = dyn Fn(&str, &str) -> bool + 'a;

/// A value that a source says.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
    exact: u128,
    /// By which it is known whether the model wrote it.
    spelling: u64,
    /// Where it is mostly digits: it may have been written in pieces.
    pieces: Option<String>,
}

/// What a call adds to what is remembered.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seen {
    agent: Arc<str>,
    /// What it says, for when it is not to be trusted.
    untrusted: Prints,
    /// Whether it is never to be trusted, wherever it was read from.
    strange: bool,
    /// What a source says.
    trusted: Option<(Arc<str>, Vec<Part>)>,
    written: Vec<u64>,
    /// The model wrote more than could be remembered.
    lost: bool,
    read: Vec<Carrier>,
    wrote: Vec<Carrier>,
    /// Whether what it wrote stands as a whole: not where the call failed and nobody knows what is left.
    kept: bool,
}

impl Seen {
    pub(crate) fn new(agent: &Arc<str>) -> Self {
        Self { agent: Arc::clone(agent), ..Self::default() }
    }

    /// What a result says that is untrusted: always, or if what it was read from carries something untrusted.
    pub(crate) fn distrust(&mut self, value: &Value, always: bool) {
        self.strange = always;
        self.untrusted = Prints::of(value, MAX_UNTRUSTED, fold::SHORTEST, &|_, _| false);
    }

    /// What a trusted source says. What is put together from what the call was given, the answer only echoes.
    pub(crate) fn trust(&mut self, source: Arc<str>, value: &Value, given: &Value, declared: &Declared<'_>) {
        let own = Prints::of(given, MAX_WRITTEN, 1, declared);
        if own.overflowed() {
            return;
        }
        let (mut said, mut budget) = (Vec::new(), MAX_TEXT);
        leaves(value, "", &mut |_, leaf| {
            let text = text_of(leaf);
            // What is too much to look at is not believed.
            if text.len() > budget {
                return;
            }
            budget -= text.len();
            fold::exact_parts(&text, fold::MAX_BELIEVED, &mut |part| {
                let is_own = |print| own.get(print).is_some();
                if !fold::readings(part).any(|reading| fold::is_echo(&reading, &is_own)) {
                    let folded = fold::fold(part);
                    let spelling = fold::spelling(part, &folded);
                    let pieces = fold::may_be_grouped(&folded).then_some(folded);
                    said.push(Part { exact: exact(part), spelling, pieces });
                }
                said.len() < MAX_TRUSTED
            });
        });
        said.sort_unstable();
        said.dedup();
        self.trusted = Some((source, said));
    }

    /// What the model put into a call. Names that the tool declares are the tool's own.
    pub(crate) fn write(&mut self, given: &Value, declared: &Declared<'_>) {
        // Parts of words and decoded readings too: what is taken out of an argument is not new.
        let prints = Prints::of(given, MAX_WRITTEN, 1, declared);
        let (mut written, mut lost): (Vec<u64>, bool) = (prints.iter().map(|(print, _)| print).collect(), prints.overflowed());
        let mut one = |text: &str| {
            fold::exact_parts(text, usize::MAX, &mut |part| {
                written.push(fold::spelling(part, &fold::fold(part)));
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
        self.lost |= lost;
    }

    /// The model put something into a call that nobody can read.
    pub(crate) fn lose(&mut self) {
        self.lost = true;
    }

    /// Where it was read from.
    pub(crate) fn read_from(&mut self, carriers: impl IntoIterator<Item = Carrier>) {
        self.read.extend(carriers);
    }

    /// Whether it may come from something that carries.
    pub(crate) fn has_read(&self) -> bool {
        !self.read.is_empty()
    }

    /// Where it was written to; whether all of it stands.
    pub(crate) fn wrote_to(&mut self, carriers: impl IntoIterator<Item = Carrier>, kept: bool) {
        self.wrote.extend(carriers);
        self.kept = kept;
    }
}

/// What is known of a value that stands in an argument.
#[must_use]
pub fn known(memory: &dyn Memory, leaf: &Value) -> Known {
    if matches!(leaf, Value::Null | Value::Bool(_)) {
        return Known::default();
    }
    let text = text_of(leaf);
    let flags = memory.flags();
    let mut sources: Vec<Arc<str>> = Vec::new();
    if flags.trusted > 0 {
        fold::exact_whole(&text, &mut |form| {
            sources.extend(memory.sources(exact(form)).iter().flat_map(|known| known.iter().cloned()));
        });
    }
    sources.sort_unstable();
    sources.dedup();
    let untrusted = flags.untrusted > 0 && fold::is_made_of(&text, leaf.is_number(), &|print| memory.untrusted(print));
    Known { untrusted, overflowed: flags.overflowed, sources }
}

/// The user's own words are always believed.
pub fn hear(memory: &mut dyn Memory, text: &str) {
    let user: Arc<str> = USER.into();
    let mut flags = memory.flags();
    fold::exact_parts(text, fold::MAX_BELIEVED, &mut |part| {
        believe(memory, &mut flags, exact(part), &user, 2 * MAX_TRUSTED);
        true
    });
    memory.set_flags(flags);
}

/// Takes in what a call has brought, and settles what its files and entities carry from now on.
pub fn take_in(memory: &mut dyn Memory, seen: Seen, carriers: &mut dyn Carrying) {
    let agent = &*seen.agent;
    let mut flags = memory.flags();
    let held: Vec<bool> = seen.read.iter().flat_map(|carrier| carrier.read(agent)).filter_map(|key| carriers.holds(&key)).collect();
    let distrusted = seen.strange || held.contains(&true);
    if distrusted {
        flags.tainted = true;
        flags.overflowed |= distrust(memory, &mut flags.untrusted, &seen.untrusted);
    }
    // What the model wrote counts first: what a call was given, its answer only echoes.
    flags.lost |= seen.lost;
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
            let in_pieces = |folded: &String| fold::is_echo(folded, &|print| memory.is_written(print));
            if !memory.is_written(part.spelling) && !part.pieces.as_ref().is_some_and(in_pieces) {
                believe(memory, &mut flags, part.exact, &source, MAX_TRUSTED);
            }
        }
    }
    // Whatever is written after something untrusted was heard may stem from it, in whatever form.
    for carrier in &seen.wrote {
        // The whole of a file is new once the call has succeeded; what else was written, stays.
        let replaced = seen.kept && matches!(carrier, Carrier::File(_));
        for (index, key) in carrier.written(agent).into_iter().enumerate() {
            let before = carriers.holds(&key).unwrap_or(false);
            // One file is replaced; that there is some file that carries stays true.
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

/// Adds prints to a memory; true where there is no room for all.
fn distrust(memory: &mut dyn Memory, count: &mut usize, prints: &Prints) -> bool {
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

/// The user's own words, as a source.
pub const USER: &str = "user";

/// A tool that a client ran, as a source: what it reports is kept apart from what was seen here.
pub(crate) fn reported(tool: &str) -> String {
    format!("{tool} (reported)")
}

/// One spelling for one number.
fn text_of(leaf: &Value) -> std::borrow::Cow<'_, str> {
    match leaf {
        Value::String(text) => text.as_str().into(),
        Value::Number(number) => match crate::json::canonical_number(number.as_str()) {
            Ok(canonical) => canonical.as_str().to_owned().into(),
            Err(_) => number.as_str().to_owned().into(),
        },
        other => other.to_string().into(),
    }
}

/// Every text and number in a value, with its place.
pub(crate) fn leaves(value: &Value, place: &str, f: &mut dyn FnMut(&str, &Value)) {
    match value {
        Value::Null | Value::Bool(_) => {}
        Value::Number(_) | Value::String(_) => f(place, value),
        Value::Array(items) => items.iter().enumerate().for_each(|(index, item)| leaves(item, &format!("{place}/{index}"), f)),
        Value::Object(map) => map.iter().for_each(|(name, item)| leaves(item, &within(place, name), f)),
    }
}

/// Every name of a member in a value, with the place of the member.
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
