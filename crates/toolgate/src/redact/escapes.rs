//! Finds marks and JSON escapes in a text.

use std::ops::Range;

/// Prefix of a mark, and the number of digits that follow.
const MARK_PREFIX: &str = "[redacted ";
const MARK_DIGITS: usize = 32;

/// Finds the marks in a text, in order.
pub(crate) fn find_marks(text: &str) -> Vec<Range<usize>> {
    let to_mark = |(start, prefix): (usize, &str)| {
        let digits = start + prefix.len();
        let end = digits + MARK_DIGITS;
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_complete = text.get(digits..end).is_some_and(|all| all.bytes().all(is_digit))
            && text.get(end..=end) == Some("]");
        is_complete.then_some(start..end + 1)
    };
    text.match_indices(MARK_PREFIX).filter_map(to_mark).collect()
}

/// An unescaped text, because a key or message may contain a secret in JSON spelling.
pub(crate) struct UnescapedText {
    pub(crate) text: String,
    /// Positions after each escape: in the unescaped text and in the original.
    offsets: Vec<(usize, usize)>,
}

impl UnescapedText {
    /// Unescapes a text. Returns `None` if it has no escapes.
    pub(crate) fn unescape(written: &str) -> Option<Self> {
        if !written.contains('\\') {
            return None;
        }
        let (mut text, mut from, mut rest) =
            (String::with_capacity(written.len()), Vec::new(), written);
        while let Some((before, after)) = rest.split_once('\\') {
            text.push_str(before);
            rest = match parse_escape(after) {
                Some((decoded, after)) => {
                    text.push(decoded);
                    from.push((text.len(), written.len() - after.len()));
                    after
                }
                None => {
                    text.push('\\');
                    after
                }
            };
        }
        text.push_str(rest);
        (!from.is_empty()).then_some(Self { text, offsets: from })
    }

    /// Maps a range of the unescaped text to the original.
    pub(crate) fn original_range(&self, place: &Range<usize>) -> Range<usize> {
        self.original_position(place.start)..self.original_position(place.end)
    }

    fn original_position(&self, place: usize) -> usize {
        let before = self
            .offsets
            .partition_point(|(unescaped, _)| *unescaped <= place)
            .checked_sub(1)
            .and_then(|last| self.offsets.get(last));
        before.map_or(place, |(unescaped, original)| original + (place - unescaped))
    }
}

/// Parses the escape after a backslash. Returns the character and the rest.
fn parse_escape(text: &str) -> Option<(char, &str)> {
    let mut rest = text.chars();
    let decoded = match rest.next()? {
        same @ ('"' | '\\' | '/') => same,
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'u' => {
            // Also accepts toolgate's own format, `\u{…}`.
            let (digits, after) = match rest.as_str().strip_prefix('{') {
                Some(inner) => inner.split_once('}')?,
                None => rest.as_str().split_at_checked(4)?,
            };
            return Some((u32::from_str_radix(digits, 16).ok().and_then(char::from_u32)?, after));
        }
        _ => return None,
    };
    Some((decoded, rest.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_marks_are_not_found() {
        let mark = format!("[redacted {}]", "0af9".repeat(8));
        for (text, expected) in [
            (mark.clone(), vec![(0, 43)]),
            (format!("ä{mark}{mark}!"), vec![(2, 45), (45, 88)]),
            (format!("[redacted {mark}"), vec![(10, 53)]),
            (mark.replace(']', ""), vec![]),
            (mark.replace("f9]", "F9]"), vec![]),
            (mark.replace('9', "ä"), vec![]),
            ("[redacted ]".to_owned(), vec![]),
        ] {
            let found: Vec<(usize, usize)> =
                find_marks(&text).iter().map(|mark| (mark.start, mark.end)).collect();
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn a_range_maps_to_the_escaped_text() {
        let written = r#"a \"b\\c\" \u00e4\nd \x"#;
        let plain = UnescapedText::unescape(written).unwrap();
        assert_eq!(plain.text, "a \"b\\c\" ä\nd \\x");
        for (unescaped, expected) in [
            ("a", "a"),
            ("b\\c", r"b\\c"),
            ("\"b", r#"\"b"#),
            ("ä", r"\u00e4"),
            ("ä\nd", r"\u00e4\nd"),
            ("\\x", r"\x"),
        ] {
            let start = plain.text.find(unescaped).unwrap();
            assert_eq!(
                written.get(plain.original_range(&(start..start + unescaped.len()))),
                Some(expected),
                "{unescaped}"
            );
        }
        assert_eq!(UnescapedText::unescape(r"M\u{fc}ller").unwrap().text, "Müller");
        assert!(UnescapedText::unescape(r"C:\users\x, \u12, \").is_none());
    }
}
