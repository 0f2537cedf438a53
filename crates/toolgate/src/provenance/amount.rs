//! Recognizes amounts: `$12345.60`, `12,345.60`, `12.345,60 EUR` and `12 345,60` are one number.

use unicode_normalization::UnicodeNormalization;

use crate::provenance::fingerprint::{SHORTEST_NUMBER, bare, canonical, is_whole, plain_digit};

/// Maximum length of a currency sign or code beside an amount, in characters.
const LONGEST_SIGN: usize = 4;
/// Maximum number of digits that are given in groups.
const LONGEST_GROUPS: usize = 32;

/// Returns the numbers that a text may mean as an amount, with a point or a comma before the
/// decimals.
pub(crate) fn amounts(text: &str) -> impl Iterator<Item = String> {
    ['.', ','].into_iter().filter_map(move |point| amount(text, point)).filter(|number| is_whole(number))
}

fn amount(text: &str, point: char) -> Option<String> {
    // Most texts are not amounts, so check this first.
    if text.chars().filter(|c| c.is_numeric()).count() < SHORTEST_NUMBER {
        return None;
    }
    let plain: String = bare(text.trim()).nfkd().map(plain_digit).collect();
    let (start, end) = (plain.find(is_digit)?, plain.rfind(is_digit)? + 1);
    let is_sign = |beside: Option<&str>| beside.is_some_and(|beside| beside.chars().count() <= LONGEST_SIGN);
    if !is_sign(plain.get(..start)) || !is_sign(plain.get(end..)) {
        return None;
    }
    let digits = plain.get(start..end)?;
    if !digits.chars().all(|c| is_digit(c) || matches!(c, '.' | ',' | '\'' | '’' | '_' | ' ')) {
        return None;
    }
    let number: String = digits.chars().filter(|c| is_digit(*c) || *c == point).map(|c| if c == point { '.' } else { c }).collect();
    // A character that occurs twice separates groups, not decimals.
    if number.matches('.').count() > 1 { None } else { canonical(&number) }
}

/// Visits every amount in a text: words, and groups of digits with spaces between them.
pub(crate) fn each_amount(text: &str, f: &mut dyn FnMut(&str)) {
    let mut groups = String::new();
    for word in text.split(is_between).filter(|word| !word.is_empty()) {
        amounts(word).for_each(|number| f(&number));
        if !groups.is_empty() && groups.len() < LONGEST_GROUPS && word.chars().take_while(|c| is_digit(*c)).count() == 3 {
            groups.push_str(word);
            amounts(&groups).for_each(|number| f(&number));
            // Only a group of exactly three digits can continue.
            if word.len() > 3 {
                groups.clear();
            }
            continue;
        }
        groups.clear();
        if word.ends_with(is_digit) && (1..=3).contains(&word.chars().filter(|c| is_digit(*c)).count()) {
            groups.push_str(word);
        }
    }
}

const fn is_digit(c: char) -> bool {
    c.is_ascii_digit()
}

fn is_between(c: char) -> bool {
    c.is_whitespace() || ";<>()[]{}\"|`:=/\\?&#@".contains(c)
}
