//! Recognizes `awk` programs that run no commands and write no files.

use crate::word::ShellWord;

/// Maximum number of `print` statements that are checked.
const MAX_PRINT_STATEMENTS: usize = 64;

/// Returns whether all programs among the words are harmless.
pub(crate) fn is_harmless_awk(words: &[ShellWord]) -> bool {
    let (mut words, mut has_text) = (words.iter(), false);
    while let Some(word) = words.next() {
        let Some(text) = word.text() else {
            // After the program, an unknown word is a file.
            if has_text {
                continue;
            }
            return false;
        };
        match text {
            "-F" | "-v" => {
                words.next();
                continue;
            }
            _ if text.starts_with("-F") || text.starts_with("-v") => continue,
            _ if text.starts_with('-') && text.len() > 1 => return false,
            // The words after the program are files and variables.
            _ if has_text => continue,
            _ => {}
        }
        // After `print`, `>` writes to a file; elsewhere it compares.
        let mut printed =
            text.match_indices("print").filter_map(|(at, name)| text.get(at + name.len()..));
        let writes =
            text.matches("print").count() > MAX_PRINT_STATEMENTS || printed.any(has_redirection);
        let is_piped = text.replace("||", "").contains('|');
        if writes
            || is_piped
            || ["system", "getline", "ARGV", "@"].iter().any(|action| text.contains(action))
        {
            return false;
        }
        has_text = true;
    }
    true
}

/// Returns whether a statement writes to a file, given its text after `print`.
fn has_redirection(rest: &str) -> bool {
    let mut letters = rest.strip_prefix('f').unwrap_or(rest).chars();
    let (mut before, mut open) = (' ', 0_usize);
    while let Some(letter) = letters.next() {
        match letter {
            '>' => return true,
            ';' | '{' | '}' => return false,
            // After these signs and in brackets, the statement continues on the next line.
            '\n' if open == 0 && !",&|?:\\".contains(before) => return false,
            '"' => skip_string(&mut letters),
            '#' => {
                letters = letters
                    .as_str()
                    .find('\n')
                    .and_then(|end| letters.as_str().get(end..))
                    .unwrap_or_default()
                    .chars();
                continue;
            }
            // A slash that does not divide starts a pattern, whose end is not known.
            '/' if !before.is_alphanumeric() && !"_)]\"".contains(before) => {
                return letters.as_str().contains('>');
            }
            '(' => open += 1,
            ')' => open = open.saturating_sub(1),
            _ => {}
        }
        if !letter.is_whitespace() {
            before = letter;
        }
    }
    false
}

/// Skips the rest of a string.
fn skip_string(letters: &mut std::str::Chars<'_>) {
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => {
                letters.next();
            }
            '"' => return,
            _ => {}
        }
    }
}
