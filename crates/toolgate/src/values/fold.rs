//! Values without their disguise.

use ahash::HashMap;
use serde_json::Value;
use unicode_normalization::UnicodeNormalization;

use super::address::{each_host, uncommented, untagged};
use super::amount::{amounts, each_amount};
use super::decode::layers;
use super::{MAX_TEXT, leaves, names, text_of};

/// Shorter than this, a text stands for nothing in particular.
pub(super) const SHORTEST: usize = 3;
/// Numbers with fewer digits are everywhere.
pub(super) const SHORTEST_NUMBER: usize = 5;
/// A value of more letters than this is looked for only as a whole.
const LONGEST_SPLIT: usize = 96;
/// The same for what a model may have put together itself; a piece of so many letters says something.
const LONGEST_ECHO: usize = 256;
const TELLING: usize = 5;
/// How many words in a row are one value: `DE89 3704 0044 0532 0130 00`.
const MAX_WORDS: usize = 8;

/// Letters and digits only, in small letters, look-alikes as what they look like.
pub(super) fn fold(text: &str) -> String {
    if text.is_ascii() {
        return text.bytes().filter(u8::is_ascii_alphanumeric).map(|b| char::from(b.to_ascii_lowercase())).collect();
    }
    let plain = text.nfkd().flat_map(char::to_lowercase).map(plain_letter).map(plain_digit);
    // Decomposed, an accent is a mark of its own, and mostly no letter.
    plain.filter(|c| c.is_alphanumeric() && !is_hidden(*c)).collect()
}

/// Marks that count as letters, and letters that show nothing.
const fn is_hidden(c: char) -> bool {
    matches!(
        c,
        '\u{300}'..='\u{36f}' | '\u{115f}'..='\u{1160}' | '\u{1ab0}'..='\u{1aff}' | '\u{1dc0}'..='\u{1dff}' | '\u{20d0}'..='\u{20ff}'
    )
}

/// The Latin letter that a large letter looks like, where the small one looks like another: of Greek, Nu, Ypsilon and Zeta.
const fn plain_capital(c: char) -> char {
    match c {
        '\u{39d}' => 'N',
        '\u{3a5}' => 'Y',
        '\u{396}' => 'Z',
        other => other,
    }
}

/// The Latin letter that a letter of another alphabet looks like.
const fn plain_letter(c: char) -> char {
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

/// The zeros of other alphabets, in order; their other digits follow them. Programs read these as numbers, too.
#[rustfmt::skip]
const ZEROS: &[u32] = &[
    0x0660, 0x06f0, 0x07c0, 0x0966, 0x09e6, 0x0a66, 0x0ae6, 0x0b66, 0x0be6, 0x0c66, 0x0ce6, 0x0d66, 0x0de6, 0x0e50, 0x0ed0,
    0x0f20, 0x1040, 0x1090, 0x17e0, 0x1810, 0x1946, 0x19d0, 0x1a80, 0x1a90, 0x1b50, 0x1bb0, 0x1c40, 0x1c50, 0xa620, 0xa8d0,
    0xa900, 0xa9d0, 0xa9f0, 0xaa50, 0xabf0, 0x104a0, 0x10d30, 0x11066, 0x110f0, 0x11136, 0x111d0, 0x112f0, 0x11450, 0x114d0, 0x11650,
    0x116c0, 0x11730, 0x118e0, 0x11950, 0x11c50, 0x11d50, 0x11da0, 0x11f50, 0x16a60, 0x16ac0, 0x16b50, 0x1e140, 0x1e2f0, 0x1e4f0, 0x1e950,
];

/// The plain digit that a digit of another alphabet is.
pub(super) fn plain_digit(c: char) -> char {
    let code = u32::from(c);
    let zero = ZEROS.partition_point(|zero| *zero <= code).checked_sub(1).and_then(|at| ZEROS.get(at));
    zero.and_then(|zero| char::from_digit(code - zero, 10)).unwrap_or(c)
}

/// A number as arguments spell it, where a word is one in another spelling: `007`, `+7`, `7.00`, `0.7e1`.
fn numeral(word: &str) -> Option<String> {
    let word = bare(word.trim());
    if !word.trim_start_matches(['+', '-']).starts_with(char::is_numeric) {
        return None;
    }
    let plain: String = word.nfkd().map(plain_digit).collect();
    canonical(plain.trim_start_matches(['+', '-']))
}

/// The spelling in arguments of a number without a sign, whatever zeros it begins with.
pub(super) fn canonical(number: &str) -> Option<String> {
    let digits = number.trim_start_matches('0');
    let zero = if digits.starts_with(|c: char| c.is_ascii_digit()) { "" } else { "0" };
    crate::json::canonical_number(&format!("{zero}{digits}")).ok().map(|number| fold(number.as_str()))
}

/// A value without its disguise, and the number that it is: zeros before it say nothing, also where its digits are grouped. And what its
/// large letters look like, where the small ones look like something else.
pub(super) fn readings(text: &str) -> impl Iterator<Item = String> {
    let (folded, number) = (fold(text), numeral(text));
    let is_padded = folded.starts_with('0') && folded.bytes().all(|b| b.is_ascii_digit()) && !text.contains('.');
    let grouped = is_padded.then(|| folded.trim_start_matches('0').to_owned());
    let large = (!text.is_ascii()).then(|| fold(&text.nfkd().map(plain_capital).collect::<String>()));
    let large = large.filter(|large| *large != folded);
    [Some(folded), number, grouped, large].into_iter().flatten()
}

/// FNV-1a, letter by letter, so that the prints of all beginnings cost no more than that of the whole. A collision
/// only ever distrusts one value more.
const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

fn letter(print: u64, c: char) -> u64 {
    let mut buffer = [0; 4];
    c.encode_utf8(&mut buffer).bytes().fold(print, |print, byte| (print ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn print(folded: &str) -> u64 {
    folded.chars().fold(OFFSET, letter)
}

/// `mailto:a@b`, `a@b`, `https://host/path?to=value`: the parts of a word, each on its own; finely, to its names and
/// numbers. And what any of them is once decoded.
fn each_part(word: &str, finely: bool, f: &mut dyn FnMut(&str)) {
    const FINE: &[char] = &['/', '\\', '?', '&', '=', ':', '#', '@', '.', '-', '_'];
    for (separators, coarse) in [(&['?', '&', '=', ':', '#'][..], true), (&['/', '\\'], true), (&['.'], false), (FINE, false)] {
        for part in word.split(separators).filter(|part| !part.is_empty() && part.len() < word.len()) {
            if coarse || finely {
                f(part);
            }
            for decoded in layers(part).iter().skip(1) {
                f(decoded);
                for word in words(decoded) {
                    f(word);
                    if finely {
                        word.split(FINE).for_each(&mut *f);
                    }
                }
            }
        }
    }
}

/// Every word of a text, as it stands and decoded.
fn each_word(text: &str, f: &mut dyn FnMut(&str)) {
    for word in words(text) {
        f(word);
        for decoded in layers(word).iter().skip(1) {
            f(decoded);
            words(decoded).for_each(&mut *f);
        }
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| {
        c.is_whitespace() || matches!(c, ',' | ';' | '<' | '>' | '(' | ')' | '[' | ']' | '{' | '}' | '"' | '\'' | '|' | '`')
    })
    .filter(|word| !word.is_empty())
}

/// Whether a folded text may stand for a whole value, or only for a part of one.
pub(super) fn is_whole(folded: &str) -> bool {
    let letters = folded.chars().count();
    let number = folded.bytes().all(|b| b.is_ascii_digit());
    letters >= if number { SHORTEST_NUMBER } else { SHORTEST }
}

/// Prints, a bounded number of them; for each, whether it may stand for a whole value.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Prints {
    prints: HashMap<u64, bool>,
    /// Bytes that may still be looked at.
    budget: usize,
    /// Bytes of rows of words that may still be put together.
    rows_left: usize,
    most: usize,
    /// What is shorter is not kept.
    shortest: usize,
    overflowed: bool,
}

impl Prints {
    /// Of everything in a value that may be used as one, names of members included but for those that are declared.
    pub(super) fn of(value: &Value, most: usize, shortest: usize, declared: &super::Declared<'_>) -> Self {
        let mut all = Self { budget: MAX_TEXT, rows_left: 8 * MAX_TEXT, most, shortest, ..Self::default() };
        leaves(value, "", &mut |_, leaf| all.text(&text_of(leaf), leaf.is_number()));
        names(value, "", &mut |place, name| {
            if !declared(place, name) {
                all.text(name, false);
            }
        });
        all
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, bool)> {
        self.prints.iter().map(|(print, whole)| (*print, *whole))
    }

    pub(super) fn get(&self, print: u64) -> Option<bool> {
        self.prints.get(&print).copied()
    }

    pub(super) const fn overflowed(&self) -> bool {
        self.overflowed
    }

    fn say(&mut self, folded: &str) {
        if folded.chars().count() < self.shortest {
            return;
        }
        if self.prints.len() >= self.most {
            self.overflowed = true;
            return;
        }
        *self.prints.entry(print(folded)).or_default() |= is_whole(folded);
    }

    fn text(&mut self, text: &str, number: bool) {
        if self.overflowed {
            return;
        }
        if number {
            self.say(&fold(text));
            return;
        }
        for text in layers(text) {
            if text.len() > self.budget || self.overflowed {
                self.overflowed = true;
                return;
            }
            self.budget -= text.len();
            let whole = fold(&text);
            if whole.chars().count() <= 4 * LONGEST_SPLIT {
                self.say(&whole);
            }
            each_word(&text, &mut |word| self.word(word));
            each_amount(&text, &mut |number| self.say(number));
            self.rows(&text);
        }
    }

    fn word(&mut self, word: &str) {
        if word.len() > self.budget {
            self.overflowed = true;
            return;
        }
        self.budget -= word.len();
        self.part(word);
        each_part(word, true, &mut |part| self.part(part));
    }

    /// A word or a part of one. A number has one spelling in arguments.
    fn part(&mut self, part: &str) {
        readings(part).for_each(|reading| self.say(&reading));
        if let Some(plain) = untagged(part) {
            readings(&plain).for_each(|reading| self.say(&reading));
        }
    }

    /// Words in a row that are one value: grouped digits, and letters with a space between each.
    fn rows(&mut self, text: &str) {
        let mut row: std::collections::VecDeque<String> = std::collections::VecDeque::new();
        for word in words(text) {
            let folded = fold(word);
            if folded.len() > 8 {
                row.clear();
                continue;
            }
            if row.len() >= 4 * MAX_WORDS {
                row.pop_front();
            }
            row.push_back(folded);
            // Counted first, joined only where there is something to say.
            let (mut digits, mut letters) = (0, 0);
            for (count, word) in row.iter().rev().enumerate() {
                digits += word.bytes().filter(u8::is_ascii_digit).count();
                letters += word.chars().count();
                let (spelled, grouped) = (letters == count + 1, count < MAX_WORDS && digits >= 4);
                if count > 0 && (spelled || grouped) {
                    let joined: String = row.iter().skip(row.len() - 1 - count).map(String::as_str).collect();
                    self.rows_left = self.rows_left.saturating_sub(joined.len());
                    self.say(&joined);
                    if joined.starts_with('0') {
                        self.part(&joined);
                    }
                } else if !spelled && count >= MAX_WORDS {
                    break;
                }
            }
            self.overflowed |= self.rows_left == 0;
            if self.overflowed {
                return;
            }
        }
    }
}

/// Whether a value, in whatever disguise, is one of the known prints, holds one, or is put together from several.
pub(super) fn is_made_of(text: &str, number: bool, known: &dyn Fn(u64) -> Option<bool>) -> bool {
    if number {
        return is_put_together(&fold(text), known);
    }
    layers(text).iter().any(|text| {
        if readings(text).any(|reading| is_put_together(&reading, known)) {
            return true;
        }
        let mut found = amounts(text).any(|number| known(print(&number)) == Some(true));
        each_amount(text, &mut |number| found = found || (number.len() >= 6 && known(print(number)) == Some(true)));
        // An address inside a longer text is the address still.
        let mut look_through = |text: &str| {
            each_word(text, &mut |word| {
                let telling =
                    word.contains(['@', '/', '\\', '.', ':', '=']) || word.chars().filter(|c| c.is_numeric()).count() >= SHORTEST_NUMBER;
                let is_known = |reading: String| reading.chars().count() >= 6 && known(print(&reading)) == Some(true);
                let mut look = |part: &str| {
                    let plain = untagged(part);
                    found = found || readings(part).any(is_known) || plain.is_some_and(|plain| readings(&plain).any(is_known));
                };
                if telling {
                    look(word);
                    each_part(word, false, &mut look);
                    each_host(word, &mut look);
                }
            });
        };
        look_through(text);
        if let Some(plain) = uncommented(text) {
            look_through(&plain);
        }
        found
    })
}

/// Whether a folded value is a known one, or nothing but known pieces of some length.
pub(super) fn is_put_together(folded: &str, known: &dyn Fn(u64) -> Option<bool>) -> bool {
    known(print(folded)) == Some(true)
        || (folded.chars().count() >= 2 * SHORTEST && is_split(folded, SHORTEST, LONGEST_SPLIT, &|print| known(print).is_some()))
}

/// Whether a folded value is what somebody gave, or put together from it: any pieces, one of which says something.
pub(super) fn is_echo(folded: &str, known: &dyn Fn(u64) -> bool) -> bool {
    known(print(folded)) || is_split(folded, 1, LONGEST_ECHO, known)
}

/// Whether a folded value looks like digits that may have been given group by group.
pub(super) fn may_be_grouped(folded: &str) -> bool {
    folded.len() <= LONGEST_SPLIT && folded.bytes().filter(u8::is_ascii_digit).count() >= 4
}

/// Whether a folded value is nothing but known pieces, one after the other. Where pieces of one letter count, one of them
/// must be longer than that by far.
fn is_split(folded: &str, shortest: usize, longest: usize, known: &dyn Fn(u64) -> bool) -> bool {
    let letters: Vec<char> = folded.chars().take(longest + 1).collect();
    if letters.len() > longest || letters.is_empty() {
        return false;
    }
    // For each end: whether it is reached, and whether with a piece that says something.
    let telling = if shortest < SHORTEST { TELLING } else { shortest };
    let mut reached: Vec<Option<bool>> = vec![None; letters.len() + 1];
    if let Some(start) = reached.first_mut() {
        *start = Some(false);
    }
    for start in 0..letters.len() {
        let Some(so_far_told) = reached.get(start).copied().flatten() else { continue };
        let mut so_far = OFFSET;
        for (taken, c) in letters.iter().skip(start).enumerate() {
            so_far = letter(so_far, *c);
            if taken + 1 >= shortest
                && known(so_far)
                && let Some(end) = reached.get_mut(start + taken + 1)
            {
                *end = Some(end.unwrap_or(false) || so_far_told || taken + 1 >= telling);
            }
        }
    }
    reached.last().copied().flatten().unwrap_or(false)
}

/// The spellings under which a whole value is believed: itself, and grouped digits without their spaces.
pub(super) fn exact_whole(text: &str, f: &mut dyn FnMut(&str)) {
    let text = text.trim();
    f(text);
    if let Some(compact) = compact(text) {
        f(&compact);
    }
}

/// How many words of a text are believed, and how many in a row.
pub(super) const MAX_BELIEVED: usize = 4_000;
const MAX_ROW: usize = 3;

/// Everything in a text that is believed, within its first words: the whole, its words, a few words in a row, and grouped
/// digits. Ends when `f` says so.
pub(super) fn exact_parts(text: &str, most: usize, f: &mut dyn FnMut(&str) -> bool) {
    let mut go_on = true;
    let mut one = |part: &str| {
        exact_whole(part, &mut |form| go_on = go_on && f(form));
        go_on
    };
    if !one(text) || !one(bare(text)) {
        return;
    }
    // `a@x,b@x`, `Mum<mum@x>`, `{"mail":"mum@x"}`: what stands between separators is on its own, too.
    let separators = [',', ';', '<', '>', '(', ')', '[', ']', '{', '}', '"', '|', '`', '\n', '\t'];
    let apart = text.contains(separators).then(|| text.split(separators)).into_iter().flatten();
    let mut left = most;
    for segment in std::iter::once(text).chain(apart) {
        let words: Vec<&str> = segment.split_whitespace().take(left.min(most)).collect();
        left = left.saturating_sub(words.len() / 2);
        for start in 0..words.len() {
            for count in 1..=MAX_WORDS {
                let Some(row) = words.get(start..start + count) else { break };
                let more = if count <= MAX_ROW {
                    one(bare(&row.join(" ")))
                } else {
                    compact(bare(&row.join(" "))).is_none_or(|grouped| one(&grouped))
                };
                if !more {
                    return;
                }
            }
        }
    }
}

/// The print by which it is known whether somebody wrote a value, in whatever spelling.
pub(super) fn spelling(text: &str, folded: &str) -> u64 {
    // What folds to nothing is known by its letters.
    if folded.is_empty() { text.chars().fold(letter(OFFSET, '='), letter) } else { print(folded) }
}

/// Without the punctuation around it.
pub(super) fn bare(word: &str) -> &str {
    word.trim_matches(|c: char| matches!(c, ',' | ';' | '.' | ':' | '!' | '?' | '"' | '\'' | '(' | ')' | '<' | '>' | '[' | ']'))
}

/// `DE89 3704 0044` is `DE893704 0044`: only plain letters and digits, at least four digits.
fn compact(text: &str) -> Option<String> {
    let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b' ');
    let digits = text.bytes().filter(u8::is_ascii_digit).count() >= 4;
    (plain && digits).then(|| text.bytes().filter(|b| *b != b' ').map(|b| char::from(b.to_ascii_uppercase())).collect())
}
