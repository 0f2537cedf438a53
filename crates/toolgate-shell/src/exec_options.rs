//! Analyzes the commands behind `find -exec` and similar options.

use crate::nested_command::{MAX_WRAPPED_WORDS, analyze_subcommand};
use crate::nesting_budget::NestingBudget;
use crate::word::ShellWord;
use crate::{ShellAnalysis, ShellCommand};

/// Returns whether a word makes `find` or `fd` run another program.
pub(crate) fn is_exec_option(word: &ShellWord) -> bool {
    matches!(
        word.text(),
        Some("-exec" | "-execdir" | "-ok" | "-okdir" | "-x" | "-X" | "--exec" | "--exec-batch")
    )
}

/// Analyzes the commands behind `-exec` and similar options.
pub(crate) fn analyze_exec_options(
    program: &str,
    words: &[ShellWord],
    depth: NestingBudget<'_>,
) -> ShellAnalysis {
    let mut found = ShellAnalysis::default();
    for (at, word) in words.iter().enumerate().take(MAX_WRAPPED_WORDS) {
        // The text that is glued to the flag is the program.
        let glued = match word.text() {
            _ if is_exec_option(word) => "",
            Some(text) if program != "find" => match exec_option_value(text) {
                Some(glued) => glued,
                None => continue,
            },
            _ => continue,
        };
        let after = words.get(at + 1..).unwrap_or_default();
        let is_end = |word: &ShellWord| matches!(word.text(), Some(";" | "+"));
        let after = after.split(is_end).next().unwrap_or_default();
        let after: Vec<ShellWord> = Some(glued)
            .filter(|glued| !glued.is_empty())
            .map(ShellWord::known)
            .into_iter()
            .chain(after.iter().cloned())
            .collect();
        let has_placeholder = |word: &ShellWord| {
            word.text().is_some_and(|text| {
                ["{}", "{/}", "{//}", "{.}", "{/.}"]
                    .iter()
                    .any(|placeholder| text.contains(placeholder))
            })
        };
        let has_code_placeholder = after.iter().any(|word| {
            has_placeholder(word) && word.text().is_some_and(|text| text.contains(' '))
        });
        if after.first().is_none_or(has_placeholder) || has_code_placeholder {
            found.opaque_reasons.push("which program runs is only known when it runs".to_owned());
        }
        // The found file may be any file. Without a placeholder, `fd` appends the file to the
        // command.
        let mut words: Vec<ShellWord> = after
            .iter()
            .map(
                |word| if has_placeholder(word) { ShellWord::unknown(false) } else { word.clone() },
            )
            .collect();
        if program != "find" && !after.iter().any(has_placeholder) {
            words.push(ShellWord::unknown(true));
        }
        found.merge(analyze_subcommand(
            ShellCommand { words, ..ShellCommand::default() },
            depth,
            false,
        ));
    }
    // Words beyond the limit are not analyzed.
    let is_glued =
        |word: &ShellWord| program != "find" && word.text().and_then(exec_option_value).is_some();
    if words.iter().skip(MAX_WRAPPED_WORDS).any(|word| is_exec_option(word) || is_glued(word)) {
        found.opaque_reasons.push(format!("there are too many words behind `{program}`"));
    }
    found
}

/// Returns the text that is glued to the exec option of `fd`: `-xrm`, `-Hx`, `--exec=rm`.
fn exec_option_value(text: &str) -> Option<&str> {
    if let Some(long) = text.strip_prefix("--") {
        let (name, value) = long.split_once('=').unwrap_or((long, ""));
        return (name.len() > 2 && "exec-batch".starts_with(name) && name.starts_with("exe"))
            .then_some(value);
    }
    let flags = text.strip_prefix('-')?;
    // The other options take the rest of the word as their value.
    let at = flags.find(|flag: char| "cCdeEjoStxX".contains(flag))?;
    flags.get(at..)?.strip_prefix(['x', 'X']).map(|rest| rest.strip_prefix('=').unwrap_or(rest))
}
