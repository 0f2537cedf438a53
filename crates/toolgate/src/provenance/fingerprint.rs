//! Folds values to a canonical form without disguise, and computes their fingerprints.

use ahash::HashMap;
use serde_json::Value;
use unicode_normalization::UnicodeNormalization;

use super::MAX_RESULT_TEXT_BYTES;
use super::amount::{parse_amounts, visit_amounts};
use super::decode::decode_layers;
use crate::provenance::exact_values::trim_punctuation;
use crate::provenance::host_key::{strip_mail_comments, strip_mail_tag, visit_hosts};
use crate::provenance::leaves::{text_of, visit_leaves, visit_names};

/// Minimum length of a significant text, in characters.
pub(crate) const MIN_TEXT_CHARS: usize = 3;
/// Minimum number of digits of a significant number, because short numbers occur everywhere.
pub(crate) const MIN_NUMBER_DIGITS: usize = 5;
/// Maximum length of a value that is split into known pieces, in characters.
const MAX_SPLIT_CHARS: usize = 96;
/// The same limit for values that the model may have assembled, and the length of a significant
/// piece.
const MAX_ECHO_CHARS: usize = 256;
const MIN_SIGNIFICANT_PIECE_CHARS: usize = 5;
/// Maximum number of consecutive words that form one value: `DE89 3704 0044 0532 0130 00`.
pub(super) const MAX_VALUE_WORDS: usize = 8;

/// Reduces a text to lower-case letters and digits, with look-alikes as Latin letters.
pub(crate) fn fold_text(text: &str) -> String {
    if text.is_ascii() {
        return text
            .bytes()
            .filter(u8::is_ascii_alphanumeric)
            .map(|b| char::from(b.to_ascii_lowercase()))
            .collect();
    }
    let plain = text.nfkd().flat_map(char::to_lowercase).map(to_latin_letter).map(to_ascii_digit);
    // After decomposition, an accent is a separate mark and usually not alphanumeric.
    plain.filter(|c| c.is_alphanumeric() && !is_invisible(*c)).collect()
}

/// Returns whether a character is a combining mark or an invisible letter.
const fn is_invisible(c: char) -> bool {
    matches!(
        c,
        '\u{300}'..='\u{36f}' | '\u{115f}'..='\u{1160}' | '\u{1ab0}'..='\u{1aff}' | '\u{1dc0}'..='\u{1dff}' | '\u{20d0}'..='\u{20ff}'
    )
}

/// Maps Greek capitals (Nu, Upsilon, Zeta) whose small letters look like other Latin letters.
const fn to_latin_capital(c: char) -> char {
    match c {
        '\u{39d}' => 'N',
        '\u{3a5}' => 'Y',
        '\u{396}' => 'Z',
        other => other,
    }
}

/// Maps a letter of another alphabet to the Latin letter that it looks like.
const fn to_latin_letter(c: char) -> char {
    match c {
        'а' | 'α' | 'ɑ' | 'ᴀ' => 'a',
        'в' | 'β' | 'ь' | 'ʙ' => 'b',
        'с' | 'ϲ' | 'ς' | 'ᴄ' => 'c',
        'ԁ' | 'ɗ' | 'ᴅ' | 'đ' => 'd',
        'е' | 'ε' | 'є' | 'ҽ' | 'ᴇ' => 'e',
        'ғ' | 'ϝ' | 'ꜰ' => 'f',
        'ɡ' | 'ց' | 'ɢ' => 'g',
        'н' | 'һ' | 'η' | 'հ' | 'ʜ' | 'ħ' => 'h',
        'і' | 'ι' | 'ı' | 'ɩ' | 'ӏ' | 'ї' | 'ɪ' => 'i',
        'ј' | 'ϳ' | 'ᴊ' => 'j',
        'к' | 'κ' | 'ᴋ' => 'k',
        'ł' | 'ⅼ' | 'ʟ' => 'l',
        'м' | 'μ' | 'ᴍ' => 'm',
        'п' | 'ո' | 'ɴ' => 'n',
        'о' | 'ο' | 'σ' | 'օ' | 'ø' | 'ᴏ' => 'o',
        'р' | 'ρ' | 'ᴘ' => 'p',
        'ԛ' => 'q',
        'г' | 'ɾ' | 'ʀ' => 'r',
        'ѕ' | 'ꜱ' => 's',
        'т' | 'τ' | 'ᴛ' | 'ŧ' => 't',
        'υ' | 'ս' | 'ᴜ' => 'u',
        'ν' | 'ѵ' | 'ᴠ' => 'v',
        'ѡ' | 'ω' | 'ԝ' | 'ᴡ' => 'w',
        'х' | 'χ' => 'x',
        'у' | 'γ' | 'ү' | 'ʏ' => 'y',
        'з' | 'ᴢ' => 'z',
        other => other,
    }
}

/// The zeros of other scripts, sorted; the digits 1 to 9 follow each.
///
/// Programs read these digits as numbers, too.
#[rustfmt::skip]
const SCRIPT_ZEROS: &[u32] = &[
    0x0660, 0x06f0, 0x07c0, 0x0966, 0x09e6, 0x0a66, 0x0ae6, 0x0b66, 0x0be6, 0x0c66, 0x0ce6, 0x0d66, 0x0de6, 0x0e50, 0x0ed0,
    0x0f20, 0x1040, 0x1090, 0x17e0, 0x1810, 0x1946, 0x19d0, 0x1a80, 0x1a90, 0x1b50, 0x1bb0, 0x1c40, 0x1c50, 0xa620, 0xa8d0,
    0xa900, 0xa9d0, 0xa9f0, 0xaa50, 0xabf0, 0x104a0, 0x10d30, 0x11066, 0x110f0, 0x11136, 0x111d0, 0x112f0, 0x11450, 0x114d0, 0x11650,
    0x116c0, 0x11730, 0x118e0, 0x11950, 0x11c50, 0x11d50, 0x11da0, 0x11f50, 0x16a60, 0x16ac0, 0x16b50, 0x1e140, 0x1e2f0, 0x1e4f0, 0x1e950,
];

/// Maps a digit of another script to an ASCII digit.
pub(crate) fn to_ascii_digit(c: char) -> char {
    let code = u32::from(c);
    let zero = SCRIPT_ZEROS
        .partition_point(|zero| *zero <= code)
        .checked_sub(1)
        .and_then(|at| SCRIPT_ZEROS.get(at));
    zero.and_then(|zero| char::from_digit(code - zero, 10)).unwrap_or(c)
}

/// Returns the canonical spelling of a number: `007`, `+7`, `7.00` and `0.7e1` are 7.
fn canonical_numeral(word: &str) -> Option<String> {
    let word = trim_punctuation(word.trim());
    if !word.trim_start_matches(['+', '-']).starts_with(char::is_numeric) {
        return None;
    }
    let plain: String = word.nfkd().map(to_ascii_digit).collect();
    canonical_unsigned(plain.trim_start_matches(['+', '-']))
}

/// Returns the canonical spelling of a number without a sign, ignoring leading zeros.
pub(crate) fn canonical_unsigned(number: &str) -> Option<String> {
    let digits = number.trim_start_matches('0');
    let zero = if digits.starts_with(|c: char| c.is_ascii_digit()) { "" } else { "0" };
    toolgate_json::canonical_number(&format!("{zero}{digits}"))
        .ok()
        .map(|number| fold_text(number.as_str()))
}

/// Returns the folded forms of a value.
///
/// These are the folded text, the number that it spells, the number without leading zeros if its
/// digits are grouped, and the reading of its capitals if they look like other letters than the
/// small ones.
pub(crate) fn folded_forms(text: &str) -> impl Iterator<Item = String> {
    let (folded, number) = (fold_text(text), canonical_numeral(text));
    let is_padded = folded.starts_with('0')
        && folded.bytes().all(|b| b.is_ascii_digit())
        && !text.contains('.');
    let grouped = is_padded.then(|| folded.trim_start_matches('0').to_owned());
    let large = (!text.is_ascii())
        .then(|| fold_text(&text.nfkd().map(to_latin_capital).collect::<String>()));
    let large = large.filter(|large| *large != folded);
    [Some(folded), number, grouped, large].into_iter().flatten()
}

/// Offset of FNV-1a, which hashes character by character.
///
/// The fingerprints of all prefixes therefore cost no more than that of the whole text. A collision
/// only makes one more value untrusted.
const FNV_OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

fn hash_char(print: u64, c: char) -> u64 {
    let mut buffer = [0; 4];
    c.encode_utf8(&mut buffer)
        .bytes()
        .fold(print, |print, byte| (print ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn fingerprint(folded: &str) -> u64 {
    folded.chars().fold(FNV_OFFSET_BASIS, hash_char)
}

/// Visits the parts of a word such as `mailto:a@b` or `https://host/path?to=value`.
///
/// With `finely`, visits single names and numbers too. The decoded forms of all parts are visited
/// as well.
fn visit_parts(word: &str, finely: bool, f: &mut dyn FnMut(&str)) {
    const FINE_SEPARATORS: &[char] = &['/', '\\', '?', '&', '=', ':', '#', '@', '.', '-', '_'];
    for (separators, coarse) in [
        (&['?', '&', '=', ':', '#'][..], true),
        (&['/', '\\'], true),
        (&['.'], false),
        (FINE_SEPARATORS, false),
    ] {
        for part in
            word.split(separators).filter(|part| !part.is_empty() && part.len() < word.len())
        {
            if coarse || finely {
                f(part);
            }
            for decoded in decode_layers(part).iter().skip(1) {
                f(decoded);
                for word in split_words(decoded) {
                    f(word);
                    if finely {
                        word.split(FINE_SEPARATORS).for_each(&mut *f);
                    }
                }
            }
        }
    }
}

/// Visits every word of a text, and its decoded forms.
fn visit_words(text: &str, f: &mut dyn FnMut(&str)) {
    for word in split_words(text) {
        f(word);
        for decoded in decode_layers(word).iter().skip(1) {
            f(decoded);
            split_words(decoded).for_each(&mut *f);
        }
    }
}

fn split_words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| {
        c.is_whitespace()
            || matches!(
                c,
                ',' | ';' | '<' | '>' | '(' | ')' | '[' | ']' | '{' | '}' | '"' | '\'' | '|' | '`'
            )
    })
    .filter(|word| !word.is_empty())
}

/// Returns whether a folded text is long enough to be a whole value, not only a part of one.
pub(crate) fn is_whole_value(folded: &str) -> bool {
    let letters = folded.chars().count();
    let number = folded.bytes().all(|b| b.is_ascii_digit());
    letters >= if number { MIN_NUMBER_DIGITS } else { MIN_TEXT_CHARS }
}

/// A bounded set of fingerprints; for each, whether it may be a whole value.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Fingerprints {
    entries: HashMap<u64, bool>,
    /// Bytes that may still be read.
    budget: usize,
    /// Bytes of joined words that may still be built.
    join_budget: usize,
    max_entries: usize,
    /// Minimum length of a folded text, in characters.
    min_chars: usize,
    overflowed: bool,
}

impl Fingerprints {
    /// Computes the fingerprints of a value, including its undeclared member names.
    pub(crate) fn from_value(
        value: &Value,
        most: usize,
        shortest: usize,
        declared: &super::DeclaredNameTest<'_>,
    ) -> Self {
        let mut all = Self {
            budget: MAX_RESULT_TEXT_BYTES,
            join_budget: 8 * MAX_RESULT_TEXT_BYTES,
            max_entries: most,
            min_chars: shortest,
            ..Self::default()
        };
        visit_leaves(value, "", &mut |_, leaf| all.insert_text(&text_of(leaf), leaf.is_number()));
        visit_names(value, "", &mut |place, name| {
            if !declared(place, name) {
                all.insert_text(name, false);
            }
        });
        all
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, bool)> {
        self.entries.iter().map(|(print, is_whole)| (*print, *is_whole))
    }

    pub(crate) fn get(&self, print: u64) -> Option<bool> {
        self.entries.get(&print).copied()
    }

    pub(crate) const fn has_overflowed(&self) -> bool {
        self.overflowed
    }

    fn insert_folded(&mut self, folded: &str) {
        if folded.chars().count() < self.min_chars {
            return;
        }
        if self.entries.len() >= self.max_entries {
            self.overflowed = true;
            return;
        }
        *self.entries.entry(fingerprint(folded)).or_default() |= is_whole_value(folded);
    }

    fn insert_text(&mut self, text: &str, number: bool) {
        if self.overflowed {
            return;
        }
        if number {
            self.insert_folded(&fold_text(text));
            return;
        }
        for text in decode_layers(text) {
            if text.len() > self.budget || self.overflowed {
                self.overflowed = true;
                return;
            }
            self.budget -= text.len();
            let folded = fold_text(&text);
            if folded.chars().count() <= 4 * MAX_SPLIT_CHARS {
                self.insert_folded(&folded);
            }
            visit_words(&text, &mut |word| self.insert_word(word));
            visit_amounts(&text, &mut |number| self.insert_folded(number));
            self.insert_word_groups(&text);
        }
    }

    fn insert_word(&mut self, word: &str) {
        if word.len() > self.budget {
            self.overflowed = true;
            return;
        }
        self.budget -= word.len();
        self.insert_part(word);
        visit_parts(word, true, &mut |part| self.insert_part(part));
    }

    /// Adds the folded forms of a word or of a part of one.
    fn insert_part(&mut self, part: &str) {
        folded_forms(part).for_each(|reading| self.insert_folded(&reading));
        if let Some(plain) = strip_mail_tag(part) {
            folded_forms(&plain).for_each(|reading| self.insert_folded(&reading));
        }
    }

    /// Adds consecutive words that form one value: grouped digits, and single letters.
    fn insert_word_groups(&mut self, text: &str) {
        let mut row: std::collections::VecDeque<String> = std::collections::VecDeque::new();
        for word in split_words(text) {
            let folded = fold_text(word);
            if folded.len() > 8 {
                row.clear();
                continue;
            }
            if row.len() >= 4 * MAX_VALUE_WORDS {
                row.pop_front();
            }
            row.push_back(folded);
            // Count first, and join only the candidates.
            let (mut digits, mut letters) = (0, 0);
            for (count, word) in row.iter().rev().enumerate() {
                digits += word.bytes().filter(u8::is_ascii_digit).count();
                letters += word.chars().count();
                let (spelled, grouped) =
                    (letters == count + 1, count < MAX_VALUE_WORDS && digits >= 4);
                if count > 0 && (spelled || grouped) {
                    let joined: String =
                        row.iter().skip(row.len() - 1 - count).map(String::as_str).collect();
                    self.join_budget = self.join_budget.saturating_sub(joined.len());
                    self.insert_folded(&joined);
                    if joined.starts_with('0') {
                        self.insert_part(&joined);
                    }
                } else if !spelled && count >= MAX_VALUE_WORDS {
                    break;
                }
            }
            self.overflowed |= self.join_budget == 0;
            if self.overflowed {
                return;
            }
        }
    }
}

/// Returns whether a value, in any disguise, equals, contains or is composed of known values.
pub(crate) fn is_composed_of_known(
    text: &str,
    number: bool,
    known: &dyn Fn(u64) -> Option<bool>,
) -> bool {
    if number {
        return is_joined_from_known(&fold_text(text), known);
    }
    decode_layers(text).iter().any(|text| {
        if folded_forms(text).any(|reading| is_joined_from_known(&reading, known)) {
            return true;
        }
        let mut found = parse_amounts(text).any(|number| known(fingerprint(&number)) == Some(true));
        visit_amounts(text, &mut |number| {
            found = found || (number.len() >= 6 && known(fingerprint(number)) == Some(true))
        });
        // An address inside a longer text counts, too.
        let mut search_text = |text: &str| {
            visit_words(text, &mut |word| {
                let is_significant = word.contains(['@', '/', '\\', '.', ':', '='])
                    || word.chars().filter(|c| c.is_numeric()).count() >= MIN_NUMBER_DIGITS;
                let is_known = |reading: String| {
                    reading.chars().count() >= 6 && known(fingerprint(&reading)) == Some(true)
                };
                let mut search_part = |part: &str| {
                    let plain = strip_mail_tag(part);
                    found = found
                        || folded_forms(part).any(is_known)
                        || plain.is_some_and(|plain| folded_forms(&plain).any(is_known));
                };
                if is_significant {
                    search_part(word);
                    visit_parts(word, false, &mut search_part);
                    visit_hosts(word, &mut search_part);
                }
            });
        };
        search_text(text);
        if let Some(plain) = strip_mail_comments(text) {
            search_text(&plain);
        }
        found
    })
}

/// Returns whether a folded value is known, or consists only of known pieces.
pub(crate) fn is_joined_from_known(folded: &str, known: &dyn Fn(u64) -> Option<bool>) -> bool {
    known(fingerprint(folded)) == Some(true)
        || (folded.chars().count() >= 2 * MIN_TEXT_CHARS
            && is_sequence_of_known(folded, MIN_TEXT_CHARS, MAX_SPLIT_CHARS, &|print| {
                known(print).is_some()
            }))
}

/// Returns whether a folded value is known, or consists of known pieces of any length, one of which
/// is significant.
pub(crate) fn is_echo(folded: &str, known: &dyn Fn(u64) -> bool) -> bool {
    known(fingerprint(folded)) || is_sequence_of_known(folded, 1, MAX_ECHO_CHARS, known)
}

/// Returns whether a folded value contains digits that may have been given in groups.
pub(crate) fn can_be_grouped_digits(folded: &str) -> bool {
    folded.len() <= MAX_SPLIT_CHARS && folded.bytes().filter(u8::is_ascii_digit).count() >= 4
}

/// Returns whether a folded value is a sequence of known pieces.
///
/// If pieces of one character count, one piece must be significantly longer.
fn is_sequence_of_known(
    folded: &str,
    shortest: usize,
    longest: usize,
    known: &dyn Fn(u64) -> bool,
) -> bool {
    let letters: Vec<char> = folded.chars().take(longest + 1).collect();
    if letters.len() > longest || letters.is_empty() {
        return false;
    }
    // For each end: `None` if it is not reached, or whether the pieces include a significant one.
    let min_significant =
        if shortest < MIN_TEXT_CHARS { MIN_SIGNIFICANT_PIECE_CHARS } else { shortest };
    let mut reached: Vec<Option<bool>> = vec![None; letters.len() + 1];
    if let Some(start) = reached.first_mut() {
        *start = Some(false);
    }
    for start in 0..letters.len() {
        let Some(has_significant) = reached.get(start).copied().flatten() else { continue };
        let mut hash = FNV_OFFSET_BASIS;
        for (offset, c) in letters.iter().skip(start).enumerate() {
            hash = hash_char(hash, *c);
            if offset + 1 >= shortest
                && known(hash)
                && let Some(end) = reached.get_mut(start + offset + 1)
            {
                *end =
                    Some(end.unwrap_or(false) || has_significant || offset + 1 >= min_significant);
            }
        }
    }
    reached.last().copied().flatten().unwrap_or(false)
}

/// Returns the fingerprint under which written values are recorded, independent of spelling.
pub(crate) fn written_fingerprint(text: &str, folded: &str) -> u64 {
    // A text that folds to nothing is recorded by its characters.
    if folded.is_empty() {
        text.chars().fold(hash_char(FNV_OFFSET_BASIS, '='), hash_char)
    } else {
        fingerprint(folded)
    }
}
