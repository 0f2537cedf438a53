//! Removes quotes and escapes from the texts of words, and expands braces.

use crate::word::ShellWord;

/// Expands `a{b,c}d` to words, if these are few and plain.
pub(crate) fn expand_braces(text: &str) -> Option<Vec<String>> {
    if !has_braces(text)
        || !text.chars().all(|c| c.is_alphanumeric() || "_./,{}-*~:+@%=".contains(c))
        || text.contains("..")
    {
        return None;
    }
    let mut words = vec![String::new()];
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        let (inside, suffix) = after.split_once('}')?;
        if inside.contains('{') || !inside.contains(',') {
            return None;
        }
        words = words
            .iter()
            .flat_map(|word| inside.split(',').map(move |part| format!("{word}{before}{part}")))
            .collect();
        if words.len() > 16 {
            return None;
        }
        rest = suffix;
    }
    if rest.contains('}') {
        return None;
    }
    words.iter_mut().for_each(|word| word.push_str(rest));
    // A shell drops empty words.
    Some(words.into_iter().filter(|word| !word.is_empty()).collect())
}

pub(crate) fn has_braces(text: &str) -> bool {
    text.contains('{') && text.contains('}') && (text.contains(',') || text.contains(".."))
}

/// Returns the position of the first brace that does not belong to a variable.
fn find_brace(text: &str) -> Option<usize> {
    text.match_indices('{')
        .map(|(at, _)| at)
        .find(|at| !text.get(..*at).is_some_and(|before| before.ends_with('$')))
}

/// Parses a text without quotes as a word.
pub(crate) fn parse_unquoted(text: &str) -> ShellWord {
    if has_braces(text) {
        // The parts before and after the braces are known.
        let before = find_brace(text).and_then(|at| text.get(..at)).unwrap_or_default();
        let suffix = text.rsplit_once('}').map_or("", |(_, suffix)| suffix);
        let plain = |part: &str| !has_braces(part) && !part.contains('{');
        return match plain(before) && plain(suffix) {
            true => parse_unquoted(before)
                .append(&ShellWord::unknown(true))
                .append(&parse_unquoted(suffix)),
            false => ShellWord::unknown(true),
        };
    }
    let (mut plain, mut pattern, mut letters) = (String::new(), false, text.chars());
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => plain.extend(letters.next().filter(|next| *next != '\n')),
            '*' | '?' | '[' => {
                pattern = true;
                plain.push(letter);
            }
            // A sign with a special meaning makes the word unknown.
            '$' | '`' | '"' | '\'' => return ShellWord::unknown(true),
            _ => plain.push(letter),
        }
    }
    if pattern { ShellWord::parse_file_pattern(&plain) } else { ShellWord::known(plain) }
}

pub(crate) fn unescape_double_quoted(text: &str) -> String {
    let (mut plain, mut letters) = (String::new(), text.chars());
    while let Some(letter) = letters.next() {
        match (letter, letters.clone().next()) {
            ('\\', Some(next @ ('"' | '\\' | '$' | '`'))) => {
                plain.push(next);
                letters.next();
            }
            ('\\', Some('\n')) => {
                letters.next();
            }
            _ => plain.push(letter),
        }
    }
    plain
}

/// Decodes the escapes of `$'…'`, or returns `None` if one of them is unknown.
pub(crate) fn decode_ansi_c(text: &str) -> Option<String> {
    let inside = text.strip_prefix("$'")?.strip_suffix('\'')?;
    let (mut plain, mut letters) = (String::new(), inside.chars().peekable());
    while let Some(letter) = letters.next() {
        if letter != '\\' {
            plain.push(letter);
            continue;
        }
        let escaped = letters.next()?;
        let mut digits = |most: usize, base: u32| {
            let mut value = None;
            for _ in 0..most {
                let Some(digit) = letters.peek().and_then(|next| next.to_digit(base)) else {
                    break;
                };
                value = Some(value.unwrap_or(0) * base + digit);
                letters.next();
            }
            value
        };
        plain.push(match escaped {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\u{7}',
            'b' => '\u{8}',
            'e' | 'E' => '\u{1b}',
            'f' => '\u{c}',
            'v' => '\u{b}',
            '\\' | '\'' | '"' | '?' => escaped,
            'x' => char::from_u32(digits(2, 16)?).filter(char::is_ascii)?,
            'u' => char::from_u32(digits(4, 16)?)?,
            'U' => char::from_u32(digits(8, 16)?)?,
            '0'..='7' => {
                let mut value = escaped.to_digit(8)?;
                for _ in 0..2 {
                    let Some(digit) = digits(1, 8) else { break };
                    value = value * 8 + digit;
                }
                char::from_u32(value).filter(char::is_ascii)?
            }
            _ => return None,
        });
    }
    // A shell ends the word at a null character.
    (!plain.contains('\0')).then_some(plain)
}
