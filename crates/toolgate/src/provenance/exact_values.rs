//! Finds the exact values in a text.

use crate::provenance::fingerprint::MAX_VALUE_WORDS;

/// Visits the exact forms of a value: the text, and grouped digits without spaces.
pub(crate) fn visit_exact_forms(text: &str, f: &mut dyn FnMut(&str)) {
    let text = text.trim();
    f(text);
    if let Some(compact) = join_grouped_digits(text) {
        f(&compact);
    }
}

/// Maximum number of trusted words of a text, and of consecutive words that form one value.
pub(crate) const MAX_TRUSTED_WORDS: usize = 4_000;

const MAX_CONSECUTIVE_WORDS: usize = 3;

/// Visits the exact values in the first words of a text, until `f` returns false.
///
/// These are the whole text, its words, a few consecutive words, and grouped digits.
pub(crate) fn visit_exact_values(text: &str, max_words: usize, f: &mut dyn FnMut(&str) -> bool) {
    let mut must_continue = true;
    let mut visit = |part: &str| {
        visit_exact_forms(part, &mut |form| must_continue = must_continue && f(form));
        must_continue
    };
    if !visit(text) || !visit(trim_punctuation(text)) {
        return;
    }
    // The parts between separators are values too: `a@x,b@x`, `Mum<mum@x>`, `{"mail":"mum@x"}`.
    let separators = [',', ';', '<', '>', '(', ')', '[', ']', '{', '}', '"', '|', '`', '\n', '\t'];
    let segments = text.contains(separators).then(|| text.split(separators)).into_iter().flatten();
    let mut remaining = max_words;
    for segment in std::iter::once(text).chain(segments) {
        let words: Vec<&str> = segment.split_whitespace().take(remaining.min(max_words)).collect();
        remaining = remaining.saturating_sub(words.len() / 2);
        for start in 0..words.len() {
            for count in 1..=MAX_VALUE_WORDS {
                let Some(row) = words.get(start..start + count) else { break };
                let continues = if count <= MAX_CONSECUTIVE_WORDS {
                    visit(trim_punctuation(&row.join(" ")))
                } else {
                    join_grouped_digits(trim_punctuation(&row.join(" ")))
                        .is_none_or(|grouped| visit(&grouped))
                };
                if !continues {
                    return;
                }
            }
        }
    }
}

/// Removes punctuation around a word.
pub(crate) fn trim_punctuation(word: &str) -> &str {
    word.trim_matches(|c: char| {
        matches!(
            c,
            ',' | ';' | '.' | ':' | '!' | '?' | '"' | '\'' | '(' | ')' | '<' | '>' | '[' | ']'
        )
    })
}

/// Removes the spaces from grouped digits: `DE89 3704 0044` is `DE8937040044`.
///
/// The text must consist of ASCII letters and digits, with at least four digits.
fn join_grouped_digits(text: &str) -> Option<String> {
    let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b' ');
    let digits = text.bytes().filter(u8::is_ascii_digit).count() >= 4;
    (plain && digits).then(|| {
        text.bytes().filter(|b| *b != b' ').map(|b| char::from(b.to_ascii_uppercase())).collect()
    })
}
