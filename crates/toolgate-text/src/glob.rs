//! Matches texts against patterns with `*`.

/// Matches a text against a pattern in which `*` matches any text. Takes linear time for any input.
#[must_use]
pub fn matches_glob(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(first) = parts.next() else { return text.is_empty() };
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    // Between two stars, the leftmost match is sufficient.
    for part in parts {
        match rest.split_once(part) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_match_any_text() {
        for (pattern, text, matches) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("a*c", "abc", true),
            ("a*b*c", "axbxc", true),
            ("a*a", "a", false),
            ("ab*ba", "aba", false),
            ("*b*", "abc", true),
            ("a**c", "abc", true),
            ("a*x*c", "abc", false),
            ("*é*", "caféx", true),
        ] {
            assert_eq!(matches_glob(pattern, text), matches, "{pattern} {text}");
        }
        assert!(
            !matches_glob(&"*@".repeat(50), &"@".repeat(40))
                && !matches_glob("*@*.evil.example", &"@".repeat(1 << 20))
        );
    }
}
