//! Escapes untrusted text for messages.

/// Escapes untrusted text for a message: no control or look-alike characters, at most 80
/// characters.
#[must_use]
pub fn escape_for_display(text: &str) -> String {
    let mut out = String::new();
    for (count, c) in text.chars().enumerate() {
        if count == 80 {
            out.push('…');
            break;
        }
        escape_char(c, &mut out);
    }
    out
}

/// Escapes a whole text in the same way.
#[must_use]
pub fn escape_text(text: &str) -> String {
    let mut out = String::new();
    text.chars().for_each(|c| escape_char(c, &mut out));
    out
}

fn escape_char(c: char, out: &mut String) {
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
    fn look_alike_characters_are_escaped() {
        assert_eq!(escape_for_display("с\u{430}lc"), "\\u{441}\\u{430}lc");
        assert_eq!(escape_for_display("a\u{202e}b\n"), "a\\u{202e}b\\u{a}");
        assert_eq!(escape_for_display(&"x".repeat(500)).chars().count(), 81);
    }
}
