//! Where values come from: what untrusted results said, what trusted sources said, what the model wrote itself.
//!
//! Only prints of values are kept, and a bounded number of them. To distrust, values are folded first (case, spacing,
//! look-alike letters, encodings), so that a disguise changes nothing. To trust, they must be the same to the letter.

mod fold;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::session::Map;

/// How many prints of untrusted values a session remembers; after that, what is not known as trusted counts as untrusted.
pub const MAX_UNTRUSTED: usize = 50_000;
/// How many prints of trusted values, and of what the model wrote.
pub const MAX_TRUSTED: usize = 50_000;
/// How much text of one result is looked at.
pub const MAX_TEXT: usize = 1 << 20;

/// A value, to the letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Exact(u128);

impl Exact {
    fn of(text: &str) -> Self {
        let digest = Sha256::digest(text.as_bytes());
        Self(digest.iter().take(16).fold(0, |print, byte| print << 8 | u128::from(*byte)))
    }
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

/// What a session remembers of values. A clone costs O(1).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Values {
    /// Folded; whether it may stand for a whole value or only for a part of one.
    untrusted: Map<u64, bool>,
    trusted: Map<Exact, Arc<[Arc<str>]>>,
    /// What the model has put into calls: read back, it proves nothing.
    written: Map<Exact, ()>,
    /// Files and entities that hold what was written after something untrusted was seen.
    carriers: Map<Arc<str>, ()>,
    overflowed: bool,
}

/// What a call adds to it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seen {
    /// What it says, for when it is not to be trusted.
    untrusted: Vec<(u64, bool)>,
    overflowed: bool,
    /// Whether it is never to be trusted, wherever it was read from.
    strange: bool,
    trusted: Option<(Arc<str>, Vec<Exact>)>,
    written: Vec<Exact>,
    /// Files and entities that it may come from, and that it was written to.
    read: Vec<Arc<str>>,
    wrote: Vec<Arc<str>>,
}

impl Seen {
    /// What a result says that is untrusted: always, or if what it was read from carries something untrusted.
    pub(crate) fn distrust(&mut self, value: &Value, always: bool) {
        self.strange = always;
        let mut budget = MAX_TEXT;
        leaves(value, "", &mut |_, leaf| {
            let text = text_of(leaf);
            self.overflowed |= text.len() > budget;
            budget = budget.saturating_sub(text.len());
            if budget > 0 {
                fold::prints(&text, leaf.is_number(), &mut |print, whole| self.untrusted.push((print, whole)));
            }
        });
        // Names of members are said too.
        keys(value, &mut |key| fold::prints(key, false, &mut |print, whole| self.untrusted.push((print, whole))));
        self.untrusted.sort_unstable();
        self.untrusted.dedup();
    }

    /// What a trusted source said. What the call itself was given, it only echoes.
    pub(crate) fn trust(&mut self, source: &Arc<str>, value: &Value, given: &Value) {
        let (mut said, mut own) = (Vec::new(), Vec::new());
        leaves(value, "", &mut |_, leaf| fold::exact_parts(&text_of(leaf), &mut |part| said.push(Exact::of(part))));
        leaves(given, "", &mut |_, leaf| fold::exact_parts(&text_of(leaf), &mut |part| own.push(Exact::of(part))));
        said.retain(|print| !own.contains(print));
        said.sort_unstable();
        said.dedup();
        self.trusted = Some((Arc::clone(source), said));
    }

    /// What the model put into a call.
    pub(crate) fn write(&mut self, given: &Value) {
        leaves(given, "", &mut |_, leaf| fold::exact_parts(&text_of(leaf), &mut |part| self.written.push(Exact::of(part))));
        self.written.sort_unstable();
        self.written.dedup();
    }

    /// Where it was read from.
    pub(crate) fn read_from(&mut self, carriers: impl IntoIterator<Item = Arc<str>>) {
        self.read.extend(carriers);
    }

    /// Whether it may come from something that carries.
    pub(crate) fn has_read(&self) -> bool {
        !self.read.is_empty()
    }

    /// Where it was written to.
    pub(crate) fn wrote_to(&mut self, carriers: impl IntoIterator<Item = Arc<str>>) {
        self.wrote.extend(carriers);
    }
}

impl Values {
    /// What is known of a value that stands in an argument.
    #[must_use]
    pub fn known(&self, leaf: &Value) -> Known {
        if matches!(leaf, Value::Null | Value::Bool(_)) {
            return Known::default();
        }
        let text = text_of(leaf);
        let mut sources: Vec<Arc<str>> = Vec::new();
        fold::exact_whole(&text, &mut |form| {
            sources.extend(self.trusted.get(&Exact::of(form)).into_iter().flat_map(|known| known.iter().cloned()));
        });
        sources.sort_unstable();
        sources.dedup();
        let untrusted =
            !self.untrusted.is_empty() && fold::is_made_of(&text, leaf.is_number(), &|print| self.untrusted.get(&print).copied());
        Known { untrusted, overflowed: self.overflowed, sources }
    }

    /// Whether anything untrusted was seen.
    #[must_use]
    fn is_tainted(&self) -> bool {
        self.overflowed || !self.untrusted.is_empty()
    }

    /// The user's own words are always believed.
    pub(crate) fn heard_from_user(&mut self, text: &str) {
        let user: Arc<str> = crate::values::USER.into();
        fold::exact_parts(text, &mut |part| self.believe(Exact::of(part), &user));
    }

    pub(crate) fn apply(&mut self, seen: Seen) {
        let distrusted = seen.strange || seen.read.iter().any(|carrier| self.carriers.get(carrier).is_some());
        self.overflowed |= distrusted && seen.overflowed;
        for (print, whole) in seen.untrusted.into_iter().filter(|_| distrusted) {
            let known = self.untrusted.get(&print).copied();
            if known.is_none() && self.untrusted.size() >= MAX_UNTRUSTED {
                self.overflowed = true;
                break;
            }
            if known.is_none_or(|known| whole && !known) {
                self.untrusted.insert_mut(print, whole);
            }
        }
        if let Some((source, prints)) = seen.trusted.filter(|_| !distrusted) {
            // When it is not known any more what the model wrote, nothing that is read back is believed.
            let believed = self.written.size() < MAX_TRUSTED;
            for print in prints.into_iter().filter(|_| believed) {
                if self.written.get(&print).is_none() {
                    self.believe(print, &source);
                }
            }
        }
        for print in seen.written {
            if self.written.size() < MAX_TRUSTED && self.trusted.get(&print).is_none() {
                self.written.insert_mut(print, ());
            }
        }
        // Whatever is written after something untrusted was seen may stem from it, in whatever form.
        let tainted = self.is_tainted();
        for carrier in seen.wrote.into_iter().filter(|_| tainted) {
            self.carriers.insert_mut(carrier, ());
        }
    }

    fn believe(&mut self, print: Exact, source: &Arc<str>) {
        let known = self.trusted.get(&print);
        if known.is_some_and(|known| known.contains(source)) || (known.is_none() && self.trusted.size() >= MAX_TRUSTED) {
            return;
        }
        let sources: Arc<[Arc<str>]> = known.into_iter().flat_map(|known| known.iter().cloned()).chain([Arc::clone(source)]).collect();
        self.trusted.insert_mut(print, sources);
    }
}

/// The user's own words, as a source.
pub const USER: &str = "user";

/// A tool that a client ran, as a source: what it reports is kept apart from what was seen here.
pub(crate) fn reported(tool: &str) -> String {
    format!("{tool} (reported)")
}

fn text_of(leaf: &Value) -> std::borrow::Cow<'_, str> {
    match leaf {
        Value::String(text) => text.as_str().into(),
        other => other.to_string().into(),
    }
}

/// Every text and number in a value, with its place.
pub(crate) fn leaves(value: &Value, place: &str, f: &mut dyn FnMut(&str, &Value)) {
    match value {
        Value::Null | Value::Bool(_) => {}
        Value::Number(_) | Value::String(_) => f(place, value),
        Value::Array(items) => items.iter().enumerate().for_each(|(index, item)| leaves(item, &format!("{place}/{index}"), f)),
        Value::Object(map) => {
            map.iter().for_each(|(name, item)| leaves(item, &format!("{place}/{}", name.replace('~', "~0").replace('/', "~1")), f))
        }
    }
}

fn keys(value: &Value, f: &mut dyn FnMut(&str)) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| keys(item, f)),
        Value::Object(map) => map.iter().for_each(|(name, item)| {
            f(name);
            keys(item, f);
        }),
        _ => {}
    }
}
