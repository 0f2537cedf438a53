//! Replaces secrets by keyed marks before anything is written.

use std::ops::Range;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use regex::Regex;
use serde_json::Value;
use sha2::Sha256;

use toolgate_json::{Digest, Pointer, to_canonical_bytes};

mod escapes;
mod ledger_row;
mod value_removal;

use crate::redact::escapes::{UnescapedText, find_marks};
pub(crate) use crate::redact::value_removal::remove_values_and_short_words;
pub use crate::redact::value_removal::{
    clean_document, remove_values, safe_prefix_len, with_single_lines,
};

/// Returns the mark that replaces a value under this key, to search for it in a ledger.
#[must_use]
pub fn redaction_mark(key: [u8; 32], value: &Value) -> Option<Value> {
    Redactor::new(Some(key), Vec::new()).ok().map(|redactor| redactor.mark(value))
}

/// Last character of a truncated text.
pub(crate) const TRUNCATION_MARK: char = '…';
/// Maximum length in bytes of a partial secret before a cut.
const MAX_PARTIAL_SECRET_BYTES: usize = 16 << 10;

/// Truncates a text to a number of characters.
pub(crate) fn truncate_chars(text: &str, most: usize) -> String {
    let mut head: String = text.chars().take(most).collect();
    if head.len() < text.len() {
        head.push(TRUNCATION_MARK);
    }
    head
}

/// Reports whether a text contains a mark.
pub(crate) fn has_mark(text: &str) -> bool {
    text.contains("[redacted ")
}

/// Reports whether a document contains a mark.
pub(crate) fn has_mark_inside(value: &Value) -> bool {
    match value {
        Value::String(text) => has_mark(text),
        Value::Array(items) => items.iter().any(has_mark_inside),
        Value::Object(map) => {
            map.iter().any(|(name, item)| has_mark(name) || has_mark_inside(item))
        }
        _ => false,
    }
}

/// Reports whether a path is a secret, lies inside one, or contains one.
pub(crate) fn is_secret_path(path: &Pointer, secrets: &[Pointer]) -> bool {
    secrets
        .iter()
        .any(|secret| secret.parts().iter().zip(path.parts()).all(|(s, p)| s == "*" || s == p))
}

/// A match of a pattern.
struct SecretMatch {
    range: Range<usize>,
    /// The unescaped secret, if it differs from the text.
    unescaped: Option<String>,
}

impl SecretMatch {
    /// Extends the match.
    fn extend_range(&mut self, added: &Range<usize>) {
        self.range = self.range.start.min(added.start)..self.range.end.max(added.end);
        self.unescaped = None;
    }
}

/// Replaces secrets by marks. Equal secrets have equal marks under the same key.
#[derive(Clone)]
pub(crate) struct Redactor {
    mac: Hmac<Sha256>,
    /// Patterns of secrets in any text.
    patterns: Vec<Regex>,
}

impl Redactor {
    /// Creates a redactor with this key, or with a random one.
    pub(crate) fn new(key: Option<[u8; 32]>, patterns: Vec<Regex>) -> Result<Self, String> {
        let key = match key {
            Some(key) => key,
            None => {
                let mut key = [0u8; 32];
                getrandom::fill(&mut key)
                    .map_err(|e| format!("the system provides no random numbers: {e}"))?;
                key
            }
        };
        Ok(Self { mac: Hmac::new_from_slice(&key).map_err(|e| e.to_string())?, patterns })
    }

    /// Replaces matches of the patterns in a text.
    pub(crate) fn scrub_to_string(&self, text: &str) -> String {
        self.scrub_text(text).into_owned()
    }

    /// Replaces matches of the patterns in a document, including member names.
    pub(crate) fn scrub(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let std::borrow::Cow::Owned(clean) = self.scrub_text(text) {
                    *text = clean;
                }
            }
            // A number is replaced entirely, because part of it would be another number.
            Value::Number(number) => {
                if self.pattern_ranges(number.as_str()).next().is_some() {
                    *value = self.mark(value);
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.scrub(item)),
            Value::Object(map) => {
                let names: Vec<(String, String)> = map
                    .keys()
                    .filter_map(|name| match self.scrub_text(name) {
                        std::borrow::Cow::Owned(clean) => Some((name.clone(), clean)),
                        std::borrow::Cow::Borrowed(_) => None,
                    })
                    .collect();
                for (name, clean) in names {
                    if let Some(item) = map.remove(&name) {
                        map.insert(clean, item);
                    }
                }
                map.values_mut().for_each(|item| self.scrub(item));
            }
            Value::Null | Value::Bool(_) => {}
        }
    }

    fn scrub_text<'t>(&self, text: &'t str) -> std::borrow::Cow<'t, str> {
        let found = self.find_matches(text);
        if found.is_empty() {
            return text.into();
        }
        let (mut clean, mut end) = (String::with_capacity(text.len()), 0);
        for SecretMatch { range: place, unescaped: secret } in found {
            clean.push_str(text.get(end..place.start).unwrap_or_default());
            let secret =
                secret.unwrap_or_else(|| text.get(place.clone()).unwrap_or_default().to_owned());
            clean.push_str(&self.mark_text(&Value::String(secret)));
            end = place.end;
        }
        clean.push_str(text.get(end..).unwrap_or_default());
        clean.into()
    }

    /// Finds the matches of all patterns in a text, in order.
    ///
    /// Each pattern sees the whole text, because another match may be part of its context.
    /// Overlapping matches are merged, and matches inside a mark are dropped.
    fn find_matches(&self, text: &str) -> Vec<SecretMatch> {
        if self.patterns.is_empty() {
            return Vec::new();
        }
        let mut found: Vec<SecretMatch> = self
            .pattern_ranges(text)
            .map(|place| SecretMatch { range: place, unescaped: None })
            .collect();
        if let Some(plain) = UnescapedText::unescape(text) {
            let in_original = |place: Range<usize>| SecretMatch {
                unescaped: plain.text.get(place.clone()).map(str::to_owned),
                range: plain.original_range(&place),
            };
            found.extend(self.pattern_ranges(&plain.text).map(in_original));
        }
        if found.is_empty() {
            return found;
        }
        let marks = find_marks(text);
        let outside = |mut found_match: SecretMatch| {
            let first = marks.partition_point(|mark| mark.end <= found_match.range.start);
            let last = marks.partition_point(|mark| mark.start < found_match.range.end);
            for mark in marks.get(first..last).unwrap_or_default() {
                if mark.start <= found_match.range.start && found_match.range.end <= mark.end {
                    return None;
                }
                found_match.extend_range(mark);
            }
            Some(found_match)
        };
        found = found.into_iter().filter_map(outside).collect();
        found.sort_by_key(|found_match| {
            (found_match.range.start, found_match.range.end, found_match.unescaped.is_some())
        });
        found.dedup_by(|next, found_match| {
            let overlaps = next.range.start < found_match.range.end;
            if overlaps && next.range != found_match.range {
                found_match.extend_range(&next.range);
            }
            overlaps
        });
        found
    }

    /// Returns the position at or before `at` where a text can be cut without splitting a match.
    pub(crate) fn find_cut_position(&self, text: &str, at: usize) -> usize {
        let mut end = at.saturating_add(MAX_PARTIAL_SECRET_BYTES).min(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let found = self.find_matches(text.get(..end).unwrap_or_default());
        found
            .iter()
            .find(|found| found.range.start < at && at < found.range.end)
            .map_or(at, |found| found.range.start)
    }

    /// Returns the matches of each pattern. Empty matches are skipped.
    fn pattern_ranges(&self, text: &str) -> impl Iterator<Item = Range<usize>> {
        self.patterns
            .iter()
            .flat_map(move |pattern| pattern.find_iter(text))
            .map(|found| found.range())
            .filter(|place| !place.is_empty())
    }

    /// Returns a keyed digest, from which secrets cannot be guessed.
    pub(crate) fn key_digest(&self, digest: Digest) -> Digest {
        let mut mac = self.mac.clone();
        mac.update(digest.as_bytes());
        Digest::from_bytes(mac.finalize().into_bytes().into())
    }

    /// Returns the mark for a value that must not be written.
    pub(crate) fn mark(&self, value: &Value) -> Value {
        Value::String(self.mark_text(value))
    }

    fn mark_text(&self, value: &Value) -> String {
        let mut mac = self.mac.clone();
        mac.update(&to_canonical_bytes(value));
        let digest = mac.finalize().into_bytes();
        format!("[redacted {}]", toolgate_json::hex(digest.get(..16).unwrap_or(&digest)))
    }

    /// Returns the document itself if it has no secrets, else a redacted copy.
    pub(crate) fn redact_shared(&self, value: Arc<Value>, secrets: &[Pointer]) -> Arc<Value> {
        if secrets.is_empty() { value } else { Arc::new(self.redact(&value, secrets)) }
    }

    /// Returns a copy without secrets.
    pub(crate) fn redact(&self, value: &Value, secrets: &[Pointer]) -> Value {
        let mut copy = value.clone();
        for secret in secrets {
            // The closure cannot fail.
            let _: Result<(), std::convert::Infallible> =
                secret.rewrite(&mut copy, &mut |old| Ok(Some(self.mark(&old))));
        }
        copy
    }
}
