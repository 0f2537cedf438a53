//! Detects variables that change what commands do, however they are set.

use super::word::Word;
use crate::nested_command::is_powerful;
use crate::program::options::{beginning, name_and_value};

/// The reason that is reported if a command sets such a variable.
pub(crate) const WHY: &str = "a variable changes what commands do";
/// Programs that fill variables from other sources.
const FILLING: &[&str] = &["getopts", "mapfile", "print", "printf", "read", "readarray"];
/// Programs that declare variables. The grammar knows them, except in spellings such as `\export`.
const DECLARING: &[&str] = &["declare", "export", "local", "readonly", "typeset"];

/// Returns whether the source text of `export NAME=value` or a similar command sets such a
/// variable.
pub(crate) fn declares(words: &[&str]) -> bool {
    let Some((first, rest)) = words.split_first() else { return false };
    let one = |word: &str| {
        let (name, value) = name_and_value(word);
        let value = value.map(|value| value.trim_matches(['"', '\'']));
        let plain = name.replace(['"', '\'', '\\'], "");
        // Only the running shell knows the name.
        if value.is_some() && plain.contains(['$', '`']) {
            return true;
        }
        // If the name is plain, its value is checked with it.
        match plain == name {
            true => is_powerful(whole(name), value) && name != "PATH",
            false => is_powerful(whole(&plain), value.filter(|_| word.ends_with(['"', '\'']))),
        }
    };
    renames(first, rest.iter().copied()) || rest.iter().copied().any(one)
}

/// Returns whether a command creates an alias that can set another variable: `declare -n`.
fn renames<'w>(program: &str, mut words: impl Iterator<Item = &'w str>) -> bool {
    let is_flag = |word: &str| word.starts_with('-') && !word.starts_with("--") && word.contains('n');
    matches!(program, "declare" | "local" | "typeset") && words.any(is_flag)
}

/// Returns whether a command sets such a variable or may set any variable.
pub(crate) fn fills(words: &[Word]) -> bool {
    let Some((program, rest)) = words.split_first() else { return false };
    let texts = || rest.iter().filter_map(Word::text);
    let is_open = |word: &Word| word.text().is_none();
    match program.text() {
        Some("print" | "printf") => {
            // Only the running shell knows the name after `-v`.
            let behind = rest.windows(2).any(|pair| matches!(pair, [flag, name] if flag.text() == Some("-v") && is_open(name)));
            behind || texts().any(is_name) || rest.iter().any(|word| is_open(word) && beginning(word).0.starts_with("-v"))
        }
        Some(program) if FILLING.contains(&program) => {
            let takes = |option: &str| option.starts_with('-') && option.ends_with(['C', 'N', 'O', 'c', 'd', 'i', 'n', 'p', 's', 't', 'u']);
            let is_value = |at: usize| at.checked_sub(1).and_then(|before| rest.get(before)).and_then(Word::text).is_some_and(takes);
            let names = rest.iter().enumerate().filter(|(at, word)| is_open(word) && !is_value(*at));
            texts().any(is_name) || names.map(|(_, word)| beginning(word).0).any(|begins| !begins.starts_with('-'))
        }
        Some(program) if DECLARING.contains(&program) => renames(program, texts()) || rest.iter().any(sets),
        _ => false,
    }
}

/// Returns whether a word is the name of such a variable, or ends with one: `-vHOME`.
fn is_name(word: &str) -> bool {
    let glued = (2..=8).filter_map(|at| word.get(at..)).filter(|_| word.starts_with('-'));
    std::iter::once(word).chain(glued).any(|name| is_powerful(whole(name), None))
}

/// Returns the name of the variable that an element belongs to: `BASH_CMDS[ls]`.
fn whole(name: &str) -> &str {
    name.split('[').next().unwrap_or(name)
}

/// Returns whether `NAME=value` sets such a variable, or one with an unknown name.
fn sets(word: &Word) -> bool {
    let (text, is_whole) = beginning(word);
    let (name, value) = name_and_value(text);
    let is_open = text.is_empty() && !is_whole && word.texts().any(|text| text.contains('='));
    is_open || is_powerful(whole(name), value.filter(|_| is_whole))
}

/// Returns whether `for NAME in …` sets such a variable.
pub(crate) fn loops(name: &str, values: &[Word]) -> bool {
    if values.is_empty() { is_powerful(name, None) } else { values.iter().any(|value| is_powerful(name, value.text())) }
}

/// Returns whether `${NAME:=value}` sets such a variable.
pub(crate) fn defaults(text: &str) -> bool {
    let inside = text.strip_prefix("${").and_then(|text| text.strip_suffix('}')).unwrap_or_default();
    let Some((name, value)) = inside.split_once('=') else { return false };
    let name = whole(name.trim_end_matches(':'));
    let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_plain && is_powerful(name, Some(value.trim_matches(['"', '\''])))
}
