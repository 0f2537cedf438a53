//! Removes known values from texts and documents.

use std::collections::HashSet;

use serde_json::Value;

use crate::redact::{MAX_PARTIAL_SECRET_BYTES, TRUNCATION_MARK};

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
    let lengths = value.char_indices().map(|(at, _)| at).skip(1).take_while(|at| *at <= most);
    lengths
        .filter(|at| value.get(..*at).is_some_and(|head| text.ends_with(head)))
        .last()
        .unwrap_or(0)
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
