//! Detects variables that change what commands do, however they are set.

use super::word::ShellWord;
use crate::nested_command::is_behaviour_change;
use crate::program::options::{known_prefix, split_name_value};

/// The reason that is reported if a command sets such a variable.
pub(crate) const VARIABLE_CHANGE_REASON: &str = "a variable changes what commands do";
/// Programs that fill variables from other sources.
const VARIABLE_FILLING_PROGRAMS: &[&str] =
    &["getopts", "mapfile", "print", "printf", "read", "readarray"];
/// Programs that declare variables. The grammar knows them, except in spellings such as `\export`.
const VARIABLE_DECLARING_PROGRAMS: &[&str] = &["declare", "export", "local", "readonly", "typeset"];

/// Returns whether the source text of `export NAME=value` or a similar command sets such a
/// variable.
pub(crate) fn is_behaviour_declaration(words: &[&str]) -> bool {
    let Some((first, rest)) = words.split_first() else { return false };
    let changes_behaviour = |word: &str| {
        let (name, value) = split_name_value(word);
        let value = value.map(|value| value.trim_matches(['"', '\'']));
        let plain = name.replace(['"', '\'', '\\'], "");
        // Only the running shell knows the name.
        if value.is_some() && plain.contains(['$', '`']) {
            return true;
        }
        // If the name is plain, its value is checked with it.
        match plain == name {
            true => is_behaviour_change(variable_of_element(name), value) && name != "PATH",
            false => is_behaviour_change(
                variable_of_element(&plain),
                value.filter(|_| word.ends_with(['"', '\''])),
            ),
        }
    };
    is_nameref_declaration(first, rest.iter().copied())
        || rest.iter().copied().any(changes_behaviour)
}

/// Returns whether a command creates an alias that can set another variable: `declare -n`.
fn is_nameref_declaration<'w>(program: &str, mut words: impl Iterator<Item = &'w str>) -> bool {
    let is_flag =
        |word: &str| word.starts_with('-') && !word.starts_with("--") && word.contains('n');
    matches!(program, "declare" | "local" | "typeset") && words.any(is_flag)
}

/// Returns whether a command sets such a variable or may set any variable.
pub(crate) fn is_behaviour_input(words: &[ShellWord]) -> bool {
    let Some((program, rest)) = words.split_first() else { return false };
    let texts = || rest.iter().filter_map(ShellWord::text);
    let is_open = |word: &ShellWord| word.text().is_none();
    match program.text() {
        Some("print" | "printf") => {
            // Only the running shell knows the name after `-v`.
            let has_valued_option = rest.windows(2).any(
                |pair| matches!(pair, [flag, name] if flag.text() == Some("-v") && is_open(name)),
            );
            has_valued_option
                || texts().any(is_behaviour_name)
                || rest.iter().any(|word| is_open(word) && known_prefix(word).0.starts_with("-v"))
        }
        Some(program) if VARIABLE_FILLING_PROGRAMS.contains(&program) => {
            let takes_value = |option: &str| {
                option.starts_with('-')
                    && option.ends_with(['C', 'N', 'O', 'c', 'd', 'i', 'n', 'p', 's', 't', 'u'])
            };
            let is_value = |at: usize| {
                at.checked_sub(1)
                    .and_then(|before| rest.get(before))
                    .and_then(ShellWord::text)
                    .is_some_and(takes_value)
            };
            let names =
                rest.iter().enumerate().filter(|(at, word)| is_open(word) && !is_value(*at));
            texts().any(is_behaviour_name)
                || names
                    .map(|(_, word)| known_prefix(word).0)
                    .any(|prefix| !prefix.starts_with('-'))
        }
        Some(program) if VARIABLE_DECLARING_PROGRAMS.contains(&program) => {
            is_nameref_declaration(program, texts()) || rest.iter().any(is_behaviour_assignment)
        }
        _ => false,
    }
}

/// Returns whether a word is the name of such a variable, or ends with one: `-vHOME`.
fn is_behaviour_name(word: &str) -> bool {
    let glued = (2..=8).filter_map(|at| word.get(at..)).filter(|_| word.starts_with('-'));
    std::iter::once(word)
        .chain(glued)
        .any(|name| is_behaviour_change(variable_of_element(name), None))
}

/// Returns the name of the variable that an element belongs to: `BASH_CMDS[ls]`.
fn variable_of_element(name: &str) -> &str {
    name.split('[').next().unwrap_or(name)
}

/// Returns whether `NAME=value` sets such a variable, or one with an unknown name.
fn is_behaviour_assignment(word: &ShellWord) -> bool {
    let (text, is_whole) = known_prefix(word);
    let (name, value) = split_name_value(text);
    let is_open = text.is_empty() && !is_whole && word.texts().any(|text| text.contains('='));
    is_open || is_behaviour_change(variable_of_element(name), value.filter(|_| is_whole))
}

/// Returns whether `for NAME in …` sets such a variable.
pub(crate) fn is_behaviour_loop(name: &str, values: &[ShellWord]) -> bool {
    if values.is_empty() {
        is_behaviour_change(name, None)
    } else {
        values.iter().any(|value| is_behaviour_change(name, value.text()))
    }
}

/// Returns whether `${NAME:=value}` sets such a variable.
pub(crate) fn is_behaviour_default(text: &str) -> bool {
    let inside =
        text.strip_prefix("${").and_then(|text| text.strip_suffix('}')).unwrap_or_default();
    let Some((name, value)) = inside.split_once('=') else { return false };
    let name = variable_of_element(name.trim_end_matches(':'));
    let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_plain && is_behaviour_change(name, Some(value.trim_matches(['"', '\''])))
}
