//! Escapes untrusted text for messages.

/// Escapes untrusted text for a message: no control or look-alike characters, at most 80
/// characters.
#[must_use]
pub fn shown(text: &str) -> String {
    let mut out = String::new();
    for (count, c) in text.chars().enumerate() {
        if count == 80 {
            out.push('…');
            break;
        }
        escape(c, &mut out);
    }
    out
}

/// Escapes a whole text in the same way.
#[must_use]
pub fn escaped(text: &str) -> String {
    let mut out = String::new();
    text.chars().for_each(|c| escape(c, &mut out));
    out
}

fn escape(c: char, out: &mut String) {
    if c.is_ascii_graphic() || c == ' ' {
        out.push(c);
    } else {
        out.extend(c.escape_unicode());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_alikes_are_shown_for_what_they_are() {
        assert_eq!(shown("с\u{430}lc"), "\\u{441}\\u{430}lc");
        assert_eq!(shown("a\u{202e}b\n"), "a\\u{202e}b\\u{a}");
        assert_eq!(shown(&"x".repeat(500)).chars().count(), 81);
    }
}
