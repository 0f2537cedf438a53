//! Analyzes shells and interpreters that a command starts.

use crate::nested_command::has_option_in_word;
use crate::nesting_budget::NestingBudget;
use crate::path::pattern::is_device;
use crate::program::options::known_prefix;
use crate::program::tables::{
    HARMLESS_SHELL_OPTIONS, INTERPRETER_FLAGS, INTERPRETERS, KNOWN_PYTHON_MODULES,
};
use crate::word::ShellWord;
use crate::{ShellAnalysis, ShellCommand, StdinSource, parse};

/// Returns the option letters of an interpreter: those for code, and those that take a value.
pub(crate) fn interpreter_options(program: &str) -> Option<(&'static str, &'static str)> {
    // `python3.12` is Python.
    let bare = program.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    INTERPRETERS
        .iter()
        .find(|(name, ..)| *name == program || *name == bare)
        .map(|(_, flags, valued)| (*flags, *valued))
}

/// Returns whether a word makes a shell start with the commands of the next word. Bash accepts one
/// dash for two.
pub(crate) fn is_command_string_option(word: &ShellWord) -> bool {
    word.text()
        .is_some_and(|text| matches!(text, "--rcfile" | "--init-file" | "-rcfile" | "-init-file"))
}

/// Analyzes a shell that is started by the command.
pub(crate) fn analyze_shell(
    program: &str,
    words: &[ShellWord],
    command: &ShellCommand,
    depth: NestingBudget<'_>,
) -> ShellAnalysis {
    let unknown = || {
        ShellAnalysis::opaque(format!("the code that `{program}` runs is only known when it runs"))
    };
    let (mut words, mut has_code) = (words.iter(), false);
    while let Some(word) = words.next() {
        let Some(text) = word.text() else { return unknown() };
        match text {
            "--version" | "--help" => return ShellAnalysis::default(),
            "--command" | "-Command" => has_code = true,
            _ if is_command_string_option(word) => {
                if words.next().is_none_or(|file| file.text().is_none_or(is_device)) {
                    return unknown();
                }
            }
            "--" => {}
            _ if text.starts_with(['-', '+']) && !text.starts_with("--") => {
                let flags = text.get(1..).unwrap_or_default();
                has_code |= text.starts_with('-') && flags.contains('c');
                // Each of these takes a word. Some values, and digits in `zsh`, change the meaning
                // of patterns.
                for _ in flags.chars().filter(|flag| matches!(flag, 'o' | 'O')) {
                    if words.next().is_some_and(|value| {
                        value.text().is_none_or(|value| !HARMLESS_SHELL_OPTIONS.contains(&value))
                    }) {
                        return unknown();
                    }
                }
                if (program == "zsh" && flags.contains(|flag: char| flag.is_ascii_digit()))
                    || (program == "fish" && flags.contains('C'))
                {
                    return unknown();
                }
                if flags.contains('s') && !has_code {
                    return analyze_shell_stdin(program, command, depth);
                }
                // PowerShell has many options for code.
                if program == "pwsh" && !has_code {
                    return unknown();
                }
            }
            // In `fish`, such a word may contain code.
            _ if text.starts_with("--") && program == "fish" => return unknown(),
            _ if text.starts_with("--") => {}
            // Other shells parse some signs differently.
            _ if has_code
                && !["bash", "zsh", "ksh"].contains(&program)
                && ["&>", "$'", "((", "{"].iter().any(|sign| text.contains(sign)) =>
            {
                return unknown();
            }
            _ if has_code => return parse::analyze_text(text, depth.nested()),
            _ if is_device(text) => return analyze_shell_stdin(program, command, depth),
            _ => return script_command(word, words.as_slice(), command),
        }
    }
    if has_code { unknown() } else { analyze_shell_stdin(program, command, depth) }
}

/// Returns a script file with its arguments.
pub(crate) fn script_command(
    file: &ShellWord,
    words: &[ShellWord],
    command: &ShellCommand,
) -> ShellAnalysis {
    let words = std::iter::once(file).chain(words).cloned().collect();
    ShellAnalysis {
        scripts: vec![ShellCommand {
            words,
            is_guessed: command.is_guessed,
            ..ShellCommand::default()
        }],
        ..ShellAnalysis::default()
    }
}

/// Analyzes a shell that reads its commands from the standard input.
pub(crate) fn analyze_shell_stdin(
    program: &str,
    command: &ShellCommand,
    depth: NestingBudget<'_>,
) -> ShellAnalysis {
    match &command.stdin {
        Some(StdinSource::Text(word)) => match word.text() {
            Some(code) => parse::analyze_text(code, depth.nested()),
            None => ShellAnalysis::opaque(format!(
                "the code that `{program}` reads is only known when it runs"
            )),
        },
        // The input may come from the parent process.
        _ => ShellAnalysis::opaque(format!("`{program}` reads its commands from elsewhere")),
    }
}

/// Analyzes the words of an interpreter.
pub(crate) fn analyze_interpreter(
    program: &str,
    (flags, valued): (&str, &str),
    words: &[ShellWord],
    command: &ShellCommand,
) -> ShellAnalysis {
    let unknown_code =
        || ShellAnalysis::opaque(format!("`{program}` has code that can run anything"));
    if flags.is_empty() {
        return unknown_code();
    }
    let python = program.starts_with("py");
    let (mut words, mut has_tests) = (words.iter(), false);
    while let Some(word) = words.next() {
        let Some(text) = word.text() else { return unknown_code() };
        match text.strip_prefix('-') {
            _ if text == "--version" || text == "--help" || (python && text == "-V") => {
                return ShellAnalysis::default();
            }
            // Some interpreters print the version and continue.
            _ if !python && text == "-v" && words.len() == 0 => return ShellAnalysis::default(),
            // `-m` runs a Python module.
            Some(module) if python && module.starts_with('m') => {
                let name = if module.len() > 1 {
                    module.get(1..)
                } else {
                    words.next().and_then(ShellWord::text)
                };
                let known = name.is_some_and(|name| KNOWN_PYTHON_MODULES.contains(&name));
                let known = known
                    && !(name == Some("pip")
                        && words.any(|word| {
                            has_option_in_word("pip", 0, known_prefix(word).0, "--editor")
                        }));
                return if known { ShellAnalysis::default() } else { unknown_code() };
            }
            // The next word is the value of an option, not a script.
            Some(short)
                if !short.starts_with('-')
                    && short.ends_with(|flag: char| valued.contains(flag))
                    && !short.contains(|flag: char| flags.contains(flag)) =>
            {
                // Some of these options do not always take a value.
                if words.next().and_then(ShellWord::text).is_none_or(|value| value.starts_with('-'))
                {
                    return unknown_code();
                }
            }
            Some(long) if long.starts_with('-') => {
                // For other long options, it is not known whether they take a value or code.
                if !INTERPRETER_FLAGS.contains(&text) && !text.starts_with("--max-old-space-size=")
                {
                    return unknown_code();
                }
                has_tests |= text == "--test" && program.starts_with("node");
            }
            Some(short)
                if short.is_empty() || short.contains(|flag: char| flags.contains(flag)) =>
            {
                return unknown_code();
            }
            Some(_) => {}
            None if matches!(text, "eval" | "exec") || is_device(text) => return unknown_code(),
            // The word is a script, and the rest are its arguments.
            None => return script_command(word, words.as_slice(), command),
        }
    }
    // Without a script, the interpreter reads code from its input, unless it searches for tests.
    if has_tests { ShellAnalysis::default() } else { unknown_code() }
}
