//! Recognizes `sed` scripts that only edit text, while other scripts may run programs or write
//! files.

use crate::word::ShellWord;

/// Returns whether all scripts among the words only edit text.
pub(crate) fn is_harmless_sed(words: &[ShellWord]) -> bool {
    let mut words = words.iter();
    let mut has_script = false;
    while let Some(word) = words.next() {
        let Some(text) = word.text() else {
            // After the script, an unknown word is a file.
            if has_script {
                continue;
            }
            return false;
        };
        let ends_in_e = text.strip_prefix('-').is_some_and(|flags| {
            flags.ends_with('e') && flags.chars().all(|flag| "nErszue".contains(flag))
        });
        let script = match text {
            _ if ends_in_e || text == "--expression" => words.next().and_then(ShellWord::text),
            _ if text.starts_with("--expression=") => text.strip_prefix("--expression="),
            "-n" | "-E" | "-r" | "-s" | "-z" | "-u" | "-i" | "-nE" | "-nr" | "-En" | "-rn"
            | "-Ei" | "-iE" | "--quiet" | "--silent" | "--in-place" | "--regexp-extended"
            | "--null-data" | "--posix" => continue,
            _ if (text.starts_with("-i") && !text.contains('e')
                || text.starts_with("--in-place="))
                && !text.contains(['*', '/']) =>
            {
                continue;
            }
            _ if text.starts_with('-') && text.len() > 1 => return false,
            _ if has_script => continue,
            _ => Some(text),
        };
        match script {
            // BSD `sed` takes the empty word for the backup suffix.
            Some("") => {}
            Some(script) if is_harmless_script(script) => has_script = true,
            _ => return false,
        }
    }
    true
}

fn is_harmless_script(script: &str) -> bool {
    let mut rest = script;
    loop {
        rest = rest.trim_start_matches([' ', '\t', '\n', ';', '}']);
        if rest.is_empty() {
            return true;
        }
        let Some(after) = skip_address(rest) else { return false };
        rest = after.trim_start_matches([' ', '!']);
        let mut letters = rest.chars();
        let Some(command) = letters.next() else { return false };
        rest = letters.as_str();
        match command {
            'p' | 'd' | 'q' | '=' | 'n' | 'N' | 'D' | 'P' | 'h' | 'H' | 'g' | 'G' | 'x' | '{' => {}
            // A label or a branch.
            ':' | 'b' | 't' | 'T' => {
                let name = rest.trim_start_matches([' ', '\t']);
                rest = name.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '_');
            }
            // Text up to the end of the line.
            'a' | 'i' | 'c' => {
                rest = rest.split_once('\n').map(|(_, rest)| rest).unwrap_or_default()
            }
            's' | 'y' => {
                let Some(after) = skip_substitution(rest) else { return false };
                let flags = after.len()
                    - after
                        .trim_start_matches(|c: char| "gpiIm".contains(c) || c.is_ascii_digit())
                        .len();
                rest = after.get(flags..).unwrap_or_default();
            }
            _ => return false,
        }
        if !rest.is_empty() && !rest.starts_with([' ', ';', '\n', '}', '\t']) && command != '{' {
            return false;
        }
    }
}

/// Returns the text after the address of a command.
fn skip_address(text: &str) -> Option<&str> {
    let mut rest = text;
    loop {
        rest = match rest.chars().next()? {
            c if c.is_ascii_digit() || matches!(c, '$' | ',' | '~' | '+') => rest.get(1..)?,
            '/' => {
                let after = skip_pattern(rest.get(1..)?, '/')?;
                after.trim_start_matches(['I', 'M'])
            }
            _ => return Some(rest),
        };
    }
}

/// Returns the text after `/old/new/`.
fn skip_substitution(text: &str) -> Option<&str> {
    let mark = text
        .chars()
        .next()
        .filter(|mark| !mark.is_alphanumeric() && !mark.is_whitespace() && *mark != '\\')?;
    after_delimiter(skip_pattern(text.get(mark.len_utf8()..)?, mark)?, mark)
}

/// Returns the text after a pattern.
///
/// Between brackets, some versions treat the delimiter as the end and others as a plain character.
fn skip_pattern(text: &str, mark: char) -> Option<&str> {
    let after = after_delimiter(text, mark)?;
    let pattern = text.get(..text.len() - after.len() - mark.len_utf8())?;
    (!has_open_bracket(pattern, true) && !has_open_bracket(pattern, false)).then_some(after)
}

/// Returns whether a bracket expression is open at the end of a pattern.
///
/// With `escapes`, `\` escapes the next character between brackets.
fn has_open_bracket(pattern: &str, escapes: bool) -> bool {
    let mut letters = pattern.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => {
                letters.next();
                continue;
            }
            '[' => {}
            _ => continue,
        }
        letters.next_if_eq(&'^');
        letters.next_if_eq(&']');
        loop {
            match letters.next() {
                None => return true,
                Some(']') => break,
                Some('\\') if escapes => {
                    letters.next();
                }
                // `[:alpha:]` ends with the same sign.
                Some('[') => {
                    let Some(sign) = letters.next_if(|next| matches!(*next, ':' | '.' | '='))
                    else {
                        continue;
                    };
                    while let Some(next) = letters.next() {
                        if next == sign && letters.next_if_eq(&']').is_some() {
                            break;
                        }
                    }
                }
                Some(_) => {}
            }
        }
    }
    false
}

/// Returns the text after the next delimiter that is not escaped.
fn after_delimiter(text: &str, mark: char) -> Option<&str> {
    let mut escaped = false;
    for (at, letter) in text.char_indices() {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            letter if letter == mark => return text.get(at + letter.len_utf8()..),
            _ => {}
        }
    }
    None
}
