//! Replaces secrets by keyed marks before anything is written.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use regex::Regex;
use serde_json::Value;
use sha2::Sha256;

use toolgate_json::{Digest, Pointer, to_canonical_bytes};

mod escapes;
mod ledger_row;

use crate::redact::escapes::{UnescapedText, find_marks};

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

/// Removes these values from a text, including a value that is truncated at the end.
///
/// Values shorter than four bytes are ignored, because they occur in too many words.
pub fn remove_values(values: impl IntoIterator<Item = impl AsRef<str>>, text: &str) -> String {
    let mut values: Vec<_> = values.into_iter().filter(|value| value.as_ref().len() >= 4).collect();
    // Longest first, because one value may be a prefix of another.
    values.sort_by_key(|value| std::cmp::Reverse(value.as_ref().len()));
    let text = values
        .iter()
        .fold(text.to_owned(), |text, value| text.replace(value.as_ref(), "[redacted]"));
    if values.is_empty() || !text.contains(TRUNCATION_MARK) {
        return text;
    }
    let mut clean = String::with_capacity(text.len());
    for part in text.split_inclusive(TRUNCATION_MARK) {
        let Some(before) = part.strip_suffix(TRUNCATION_MARK) else {
            clean.push_str(part);
            continue;
        };
        let left = values
            .iter()
            .map(|value| trailing_prefix_len(value.as_ref(), before, MAX_PARTIAL_SECRET_BYTES))
            .max()
            .unwrap_or(0);
        clean.push_str(before.get(..before.len() - left).unwrap_or_default());
        clean.push_str(if left > 0 { "[redacted]" } else { "" });
        clean.push(TRUNCATION_MARK);
    }
    clean
}

/// Adds each line of multi-line values, because log readers report single lines.
///
/// Lines shorter than eight bytes are ignored, because they occur in too many other lines.
pub fn with_single_lines(values: Vec<String>) -> Vec<String> {
    let lines = |value: &String| -> Vec<String> {
        let lines =
            value.lines().map(str::trim).filter(|line| line.len() >= 8 && line.len() < value.len());
        lines.map(str::to_owned).collect()
    };
    let single_lines: Vec<String> = values.iter().flat_map(lines).collect();
    values.into_iter().chain(single_lines).collect()
}

/// Returns the length of a prefix that can be sent while the text still grows.
///
/// The rest may be the start of a value. A whole value that crosses this position is not split.
pub fn safe_prefix_len(values: &[String], text: &str) -> usize {
    let mut known: Vec<&String> = values.iter().filter(|value| value.len() >= 4).collect();
    let cut = text.len()
        - known.iter().map(|value| trailing_prefix_len(value, text, text.len())).max().unwrap_or(0);
    // Same order as in `remove_values`: the longest value first, and no overlaps.
    known.sort_by_key(|value| std::cmp::Reverse(value.len()));
    let (mut from, mut to) = (0, text.len());
    for value in known {
        let search_start = from;
        for (at, found) in
            text.get(search_start..to).unwrap_or_default().match_indices(value.as_str())
        {
            let (start, end) = (search_start + at, search_start + at + found.len());
            if end <= cut {
                from = end;
            } else if start >= cut {
                to = start;
                break;
            } else {
                return start;
            }
        }
    }
    cut
}

/// Removes shorter values too if they are separate words or numbers.
pub(crate) fn remove_values_and_short_words(values: &[String], text: &str) -> String {
    let is_short = |value: &&str| value.len() < 4 && value.contains(char::is_alphanumeric);
    let short: HashSet<&str> = values.iter().map(String::as_str).filter(is_short).collect();
    let text = remove_values(values, text);
    if short.is_empty() {
        return text;
    }
    // A short value may be truncated too.
    let heads: HashSet<&str> = short
        .iter()
        .flat_map(|value| (1..value.len()).filter_map(move |end| value.get(..end)))
        .collect();
    let (mut clean, mut rest) = (String::with_capacity(text.len()), text.as_str());
    while let Some(next) = rest.chars().next() {
        let before = text.get(..text.len() - rest.len()).unwrap_or_default();
        let remainder = (1..4).rev().find_map(|end| {
            let (found, after) = rest.split_at_checked(end)?;
            let is_short_value = short.contains(found)
                || (heads.contains(found) && after.starts_with(TRUNCATION_MARK));
            (is_short_value
                && !is_word_continued(before, found)
                && !is_word_continued(found, after))
            .then_some(after)
        });
        rest = match remainder {
            Some(after) => {
                clean.push_str("[redacted]");
                after
            }
            None => {
                clean.push(next);
                rest.get(next.len_utf8()..).unwrap_or_default()
            }
        };
    }
    clean
}

/// Cleans all texts of a document, including member names. A number that is a secret is replaced
/// entirely.
pub fn clean_document(
    value: Value,
    secrets: &[String],
    clean: fn(&[String], &str) -> String,
) -> Value {
    match value {
        Value::String(text) => clean(secrets, &text).into(),
        Value::Number(number) if clean(secrets, &number.to_string()) == "[redacted]" => {
            "[redacted]".into()
        }
        Value::Array(items) => {
            items.into_iter().map(|item| clean_document(item, secrets, clean)).collect()
        }
        Value::Object(map) => map
            .into_iter()
            .map(|(name, item)| (clean(secrets, &name), clean_document(item, secrets, clean)))
            .collect(),
        other => other,
    }
}

/// Reports whether a word or a decimal number continues from one text to the next.
fn is_word_continued(a: &str, b: &str) -> bool {
    let last = |text: &str, is: fn(char) -> bool| text.chars().next_back().is_some_and(is);
    let first = |text: &str, is: fn(char) -> bool| text.chars().next().is_some_and(is);
    let digit = |c: char| c.is_ascii_digit();
    let word = last(a, char::is_alphanumeric) && first(b, char::is_alphanumeric);
    let behind_point = a.strip_suffix('.').is_some_and(|a| last(a, digit)) && first(b, digit);
    let before_point = last(a, digit) && b.strip_prefix('.').is_some_and(|b| first(b, digit));
    word || behind_point || before_point
}

/// Returns how many bytes at the end of a text are a prefix of a value, up to a maximum.
fn trailing_prefix_len(value: &str, text: &str, most: usize) -> usize {
    let most = text.len().min(most);
    let ends = value.char_indices().map(|(at, _)| at).skip(1).take_while(|at| *at <= most);
    ends.filter(|at| value.get(..*at).is_some_and(|head| text.ends_with(head))).last().unwrap_or(0)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_values_are_removed() {
        let cases = [
            ("key hunter2-lo…", "key [redacted]…"),
            ("key hunter2-long…", "key [redacted]…"),
            ("a h… and then hun… again", "a [redacted]… and then [redacted]… again"),
            ("nothing of it… hunte", "nothing of it… hunte"),
            ("hhunt…", "h[redacted]…"),
            ("ä…", "ä…"),
            ("…", "…"),
        ];
        for (text, expected) in cases {
            assert_eq!(remove_values(["hunter2-long"], text), expected);
        }
        assert_eq!(remove_values(["päss-wörd"], "it is pä…"), "it is [redacted]…");
        assert_eq!(remove_values(Vec::<String>::new(), "h…"), "h…");
    }

    #[test]
    fn each_line_of_a_value_is_removed() {
        let values = with_single_lines(
            ["{\n  \"key\": \"hunter2\"\r\n}", "one line", " with room around "]
                .map(str::to_owned)
                .to_vec(),
        );
        let cases = [
            ("\"key\": \"hunter2\"", "[redacted]"),
            ("    \"key\": \"hunter2\",", "    [redacted],"),
            ("{ \"other\": 1 }", "{ \"other\": 1 }"),
            ("one line with room around", "[redacted] [redacted]"),
        ];
        for (text, expected) in cases {
            assert_eq!(remove_values(&values, text), expected);
        }
    }

    #[test]
    fn a_growing_text_is_sent_up_to_a_possible_value() {
        let values = ["hunter2-long", "hunt-pä", "no"].map(str::to_owned);
        let cases = [
            ("key hunter2-lo", 4),
            ("key hunter2-long", 16),
            ("key hunt", 4),
            ("hunt-p", 0),
            ("n", 1),
            ("", 0),
            ("hhh", 2),
        ];
        for (text, expected) in cases {
            assert_eq!(safe_prefix_len(&values, text), expected, "{text}");
        }
        assert_eq!(safe_prefix_len(&["abca".to_owned()], "key abca"), 4);
    }

    /// Cutting a text at any position does not change what is removed.
    #[test]
    fn splitting_a_text_does_not_change_the_removal() {
        let cases: [(&[&str], &str); 6] = [
            (&["abca"], "key abca, abcabca, abcabcabca and abc"),
            (&["aaaa"], "aaaaaaaaaaa and aaaa"),
            (&["päss-wörd-p"], "it is päss-wörd-p, päss-wörd-päss-wörd-p"),
            (
                &["hunter-one", "one-two-three"],
                "hunter-one-two-three hunter-one one-two-three-hunter-one-two",
            ),
            (&["abcd", "cdef", "abcd-cdef"], "abcdef cdefabcd abcd-cdef abcd-cdefabcdef"),
            (&["secret-s", "s-sec", "tsec"], "secret-secret-s-secretsecret-s"),
        ];
        for (values, text) in cases {
            let values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
            for (at, _) in text.char_indices() {
                let (safe, rest) = text.split_at(safe_prefix_len(&values, text.get(..at).unwrap()));
                assert_eq!(
                    remove_values(&values, safe) + &remove_values(&values, rest),
                    remove_values(&values, text),
                    "{text}: {safe}"
                );
            }
        }
    }

    #[test]
    fn short_values_are_removed_as_whole_words() {
        let cases = [
            ("wrong cvv 123", "wrong cvv [redacted]"),
            (
                "123: cvv_123, (123). \"123\"",
                "[redacted]: cvv_[redacted], ([redacted]). \"[redacted]\"",
            ),
            ("1234 0123 x123 123x", "1234 0123 x123 123x"),
            ("123.45 and 0.123", "123.45 and 0.123"),
            ("4,123", "4,[redacted]"),
            ("cvv 12…", "cvv [redacted]…"),
            ("cvv 123…", "cvv [redacted]…"),
            ("cvv 412…", "cvv 412…"),
            ("12 and 1", "12 and 1"),
            ("", ""),
        ];
        for (text, expected) in cases {
            assert_eq!(remove_values_and_short_words(&["123".to_owned()], text), expected);
        }
        let both =
            ["1".to_owned(), "a-1".to_owned(), "-".to_owned(), String::new(), "hunter2".to_owned()];
        assert_eq!(
            remove_values_and_short_words(&both, "a-1, 1, 11 - hunter2x"),
            "[redacted], [redacted], 11 - [redacted]x"
        );
        assert_eq!(
            remove_values_and_short_words(&["ä1".to_owned()], "ä1 bä1 ä…"),
            "[redacted] bä1 [redacted]…"
        );
    }

    #[test]
    fn numbers_are_removed_like_their_text() {
        let secrets = ["1", "4111", "0.75"].map(str::to_owned);
        let document = || serde_json::json!({"n": [1, "1", 4111, "no 4111", 41_112, -1, 0.75, true], "4111": null});
        let long =
            clean_document(document(), &secrets, |secrets, text| remove_values(secrets, text));
        let n = serde_json::json!([
            1,
            "1",
            "[redacted]",
            "no [redacted]",
            41_112,
            -1,
            "[redacted]",
            true
        ]);
        assert_eq!(long, serde_json::json!({"n": n, "[redacted]": null}));
        let short = clean_document(document(), &secrets, remove_values_and_short_words);
        let n = serde_json::json!([
            "[redacted]",
            "[redacted]",
            "[redacted]",
            "no [redacted]",
            41_112,
            -1,
            "[redacted]",
            true
        ]);
        assert_eq!(short, serde_json::json!({"n": n, "[redacted]": null}));
    }

    #[test]
    fn the_longest_value_is_removed_first() {
        assert_eq!(
            remove_values(["abcd", "abcd-XYZ9", "no"], "key abcd-XYZ9, then abcd, no"),
            "key [redacted], then [redacted], no"
        );
    }
}
