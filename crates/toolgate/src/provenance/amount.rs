//! Recognizes amounts: `$12345.60`, `12,345.60`, `12.345,60 EUR` and `12 345,60` are one number.

use unicode_normalization::UnicodeNormalization;

use crate::provenance::exact_values::trim_punctuation;
use crate::provenance::fingerprint::{
    MIN_NUMBER_DIGITS, canonical_unsigned, is_whole_value, to_ascii_digit,
};

/// Maximum length of a currency sign or code beside an amount, in characters.
const MAX_CURRENCY_SIGN_CHARS: usize = 4;
/// Maximum number of digits that are given in groups.
const MAX_GROUPED_DIGITS: usize = 32;

/// Returns the numbers that a text may mean as an amount, with a point or a comma before the
/// decimals.
pub(crate) fn parse_amounts(text: &str) -> impl Iterator<Item = String> {
    ['.', ',']
        .into_iter()
        .filter_map(move |point| parse_amount(text, point))
        .filter(|number| is_whole_value(number))
}

fn parse_amount(text: &str, point: char) -> Option<String> {
    // Most texts are not amounts, so check this first.
    if text.chars().filter(|c| c.is_numeric()).count() < MIN_NUMBER_DIGITS {
        return None;
    }
    let plain: String = trim_punctuation(text.trim()).nfkd().map(to_ascii_digit).collect();
    let (start, end) = (plain.find(is_digit)?, plain.rfind(is_digit)? + 1);
    let is_sign = |affix: Option<&str>| {
        affix.is_some_and(|affix| affix.chars().count() <= MAX_CURRENCY_SIGN_CHARS)
    };
    if !is_sign(plain.get(..start)) || !is_sign(plain.get(end..)) {
        return None;
    }
    let digits = plain.get(start..end)?;
    if !digits.chars().all(|c| is_digit(c) || matches!(c, '.' | ',' | '\'' | '’' | '_' | ' ')) {
        return None;
    }
    let number: String = digits
        .chars()
        .filter(|c| is_digit(*c) || *c == point)
        .map(|c| if c == point { '.' } else { c })
        .collect();
    // A character that occurs twice separates groups, not decimals.
    if number.matches('.').count() > 1 { None } else { canonical_unsigned(&number) }
}

/// Visits every amount in a text: words, and groups of digits with spaces between them.
pub(crate) fn visit_amounts(text: &str, f: &mut dyn FnMut(&str)) {
    let mut groups = String::new();
    for word in text.split(is_separator).filter(|word| !word.is_empty()) {
        parse_amounts(word).for_each(|number| f(&number));
        if !groups.is_empty()
            && groups.len() < MAX_GROUPED_DIGITS
            && word.chars().take_while(|c| is_digit(*c)).count() == 3
        {
            groups.push_str(word);
            parse_amounts(&groups).for_each(|number| f(&number));
            // Only a group of exactly three digits can continue.
            if word.len() > 3 {
                groups.clear();
            }
            continue;
        }
        groups.clear();
        if word.ends_with(is_digit)
            && (1..=3).contains(&word.chars().filter(|c| is_digit(*c)).count())
        {
            groups.push_str(word);
        }
    }
}

const fn is_digit(c: char) -> bool {
    c.is_ascii_digit()
}

fn is_separator(c: char) -> bool {
    c.is_whitespace() || ";<>()[]{}\"|`:=/\\?&#@".contains(c)
}
