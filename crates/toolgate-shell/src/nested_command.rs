//! Analyzes commands inside of commands, and code for interpreters.
//!
//! Code counts as dangerous unless it is known to be harmless.

use super::word::{Certainty, ShellWord, WordPart};
use super::{ShellAnalysis, ShellCommand, StdinSource, base_name};
use crate::exec_options::analyze_exec_options;
use crate::git_commands::analyze_git;
use crate::interpreter::{
    analyze_interpreter, analyze_shell, analyze_shell_stdin, interpreter_options,
    is_command_string_option, script_command,
};
use crate::nesting_budget::{NestingBudget, WORD_COST_BYTES};
use crate::parse;
use crate::path::pattern::is_device;
use crate::program::options::{is_make_code_variable, known_prefix, split_name_value};
use crate::program::tables::{
    BEHAVIOUR_VARIABLES, BROWSER_VARIABLES, CODE_RUNNING_OPTIONS, DATABASE_CLIENT_ESCAPES,
    HARMLESS_VARIABLE_VALUES, OPAQUE_PROGRAMS, RESERVED_WORDS, SHELL_PROGRAMS, SIMPLE_PROGRAMS,
    WRAPPER_PROGRAMS,
};
use crate::wrapper::unwrap_command;

/// Maximum number of words behind a wrapper that are analyzed.
pub(crate) const MAX_WRAPPED_WORDS: usize = 64;

/// Returns whether setting a variable changes what commands do.
pub(crate) fn is_behaviour_change(name: &str, value: Option<&str>) -> bool {
    const BEHAVIOUR_VARIABLE_SUFFIXES: [&str; 7] =
        ["PAGER", "EDITOR", "BROWSER", "ASKPASS", "_WRAPPER", "_RUNNER", "_COMMAND"];
    let named = |name: &str| {
        name.starts_with("GIT_CONFIG")
            || name.starts_with("BASH_FUNC")
            || BEHAVIOUR_VARIABLE_SUFFIXES.iter().any(|end| name.ends_with(end))
    };
    let powerful =
        BEHAVIOUR_VARIABLES.contains(&name) || named(name) || is_npm_program_setting(name);
    if name == "PATH" {
        // The search path contains a relative or a temporary directory.
        return value.is_none_or(|path| {
            path.split(':')
                .any(|part| !part.starts_with(['/', '~', '$']) || part.starts_with("/tmp"))
        });
    }
    powerful
        && !value.is_some_and(|value| {
            HARMLESS_VARIABLE_VALUES.contains(&value) || is_tool_selection(name, value)
        })
}

/// Returns whether a variable is a setting of `npm` that names a program. Upper and lower case are
/// equal.
fn is_npm_program_setting(name: &str) -> bool {
    const NPM_PROGRAM_SETTINGS: &[&str] =
        &["browser", "editor", "git", "node_options", "script_shell", "shell", "viewer"];
    let name = name.to_ascii_lowercase().replace('-', "_");
    name.strip_prefix("npm_config_").is_some_and(|key| NPM_PROGRAM_SETTINGS.contains(&key))
}

/// Returns whether a variable only selects a tool by name and runs no command: `TEST_RUNNER=jest`.
fn is_tool_selection(name: &str, value: &str) -> bool {
    let is_run = BROWSER_VARIABLES.contains(&name)
        || name.starts_with("CARGO_")
        || is_npm_program_setting(name);
    let is_tool_variable = !is_run && (name.ends_with("_BROWSER") || name.ends_with("_RUNNER"));
    let is_plain = || {
        let is_name = value.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
            && !value.starts_with('-');
        is_name && !is_known_program(value) && !OPAQUE_PROGRAMS.contains(&value)
    };
    (name.ends_with("BROWSER") && ["echo", "false", "none"].contains(&value))
        || (is_tool_variable && is_plain())
}

/// Returns whether a program runs none of its words, or the code that it runs is analyzed.
pub(crate) fn is_known_program(program: &str) -> bool {
    SIMPLE_PROGRAMS.contains(&program)
        || WRAPPER_PROGRAMS.contains(&program)
        || SHELL_PROGRAMS.contains(&program)
        || interpreter_options(program).is_some()
}

/// Analyzes the other commands that a command runs.
pub(crate) fn analyze_nested(command: &ShellCommand, depth: NestingBudget<'_>) -> ShellAnalysis {
    analyze_command(command, depth, false)
}

/// Returns whether a word contains an option, possibly in a cluster or abbreviated.
pub(crate) fn has_option_in_word(program: &str, at: usize, word: &str, flag: &str) -> bool {
    match (flag.strip_prefix("--"), flag.strip_prefix('-')) {
        (Some(long), _) => word.strip_prefix("--").is_some_and(|option| {
            let option = option.split('=').next().unwrap_or_default();
            !option.is_empty() && (long.starts_with(option) || option.starts_with(long))
        }),
        // The option may follow other letters: `zip -qTT`.
        (None, Some(short)) if program == "zip" => word
            .strip_prefix('-')
            .is_some_and(|option| !option.starts_with('-') && option.contains(short)),
        // These programs have no clusters: `-DCMAKE_X=y`, `scala -version`.
        (None, Some(short))
            if short.chars().count() == 1 && !["cmake", "kotlin", "scala"].contains(&program) =>
        {
            let cluster = word
                .strip_prefix('-')
                .filter(|option| !option.starts_with('-'))
                .or_else(|| Some(word).filter(|_| program == "tar" && at == 0));
            cluster.is_some_and(|option| option.contains(short))
        }
        _ => word.starts_with(flag),
    }
}

/// Returns the words of a program itself, without the words for a script that it runs.
///
/// The word after an option may be the value of that option.
fn words_before_script<'w>(program: &str, words: &'w [ShellWord]) -> &'w [ShellWord] {
    let mut may_be_value = false;
    let is_script = |word: &ShellWord| {
        let text = word.text().unwrap_or("-");
        let is_value = std::mem::replace(&mut may_be_value, text.starts_with('-'));
        !is_value && !text.starts_with('-') && text.contains(['.', '/'])
    };
    // After `--`, the words belong to a script of `npm`.
    if program == "npm" {
        return words.split(|word| word.text() == Some("--")).next().unwrap_or_default();
    }
    match words.iter().position(is_script) {
        Some(at) if ["elixir", "ts-node", "tsx"].contains(&program) => {
            words.get(..at).unwrap_or_default()
        }
        _ => words,
    }
}

/// Analyzes a command. With `nested`, a wrapper has already tried each of its words as a command.
fn analyze_command(
    command: &ShellCommand,
    depth: NestingBudget<'_>,
    nested: bool,
) -> ShellAnalysis {
    let mut found = ShellAnalysis::default();
    let Some((_, rest)) = command.words.split_first() else { return found };
    let Some(program) = command.program() else {
        return ShellAnalysis::opaque("which program runs is only known when it runs");
    };
    if depth.is_too_deep() {
        return ShellAnalysis::opaque("commands are nested too deeply");
    }
    // Behind a wrapper every word is tried as a program, but `time` is a reserved word.
    let is_reserved =
        |word: &ShellWord| word.text().is_some_and(|word| RESERVED_WORDS.contains(&word));
    let timed = rest
        .iter()
        .find(|word| word.text().is_none_or(|text| !text.starts_with('-')))
        .filter(|_| program == "time");
    if !nested && command.words.first().into_iter().chain(timed).any(is_reserved) {
        found.opaque_reasons.push(format!("`{program}` is a reserved word of the shell"));
    }
    if OPAQUE_PROGRAMS.contains(&program) {
        found.opaque_reasons.push(format!("`{program}` can run anything"));
    }
    let program_words = words_before_script(program, rest);
    if let Some((_, flags)) = CODE_RUNNING_OPTIONS.iter().find(|(name, _)| *name == program)
        // The rest of a partly known word may follow its beginning directly.
        && program_words.iter().enumerate().any(|(at, word)| flags.iter().any(|flag| has_option_in_word(program, at, known_prefix(word).0, flag)))
    {
        found.opaque_reasons.push(format!("`{program}` has an option that runs another program"));
    }
    if has_client_escape(program, rest, command) {
        found.opaque_reasons.push(format!("`{program}` has text that runs another program"));
    }
    // An unknown program may run the words after it.
    if !is_known_program(program) && !nested {
        let runs = |word: &ShellWord| {
            word.text().map(base_name).is_some_and(|name| {
                SHELL_PROGRAMS.contains(&name)
                    || interpreter_options(name).is_some()
                    || WRAPPER_PROGRAMS.contains(&name)
                    || name == "eval"
            })
        };
        for at in 0..rest.len().min(MAX_WRAPPED_WORDS) {
            if rest.get(at).is_some_and(runs) {
                let words = rest.get(at..).unwrap_or_default().to_vec();
                let inner =
                    ShellCommand { words, stdin: command.stdin.clone(), ..ShellCommand::default() };
                found.merge(analyze_subcommand(inner, depth, true));
            }
        }
        if rest.iter().skip(MAX_WRAPPED_WORDS).any(runs) {
            found.opaque_reasons.push(format!("there are too many words behind `{program}`"));
        }
    }
    if WRAPPER_PROGRAMS.contains(&program) && !nested {
        found.merge(unwrap_command(program, rest, command, depth));
    }
    match program {
        "find" | "fd" | "fdfind" => found.merge(analyze_exec_options(program, rest, depth)),
        "git" => found.merge(analyze_git(rest, depth)),
        "eval" | "trap" => found.merge(analyze_joined_words(rest, depth)),
        "set"
            if rest.iter().filter_map(ShellWord::text).any(|word| {
                word == "keyword"
                    || word == "posix"
                    || (word.starts_with('-') && word.contains('k'))
            }) =>
        {
            found.opaque_reasons.push("`set` changes how words are parsed".to_owned());
        }
        "gh" if rest
            .first()
            .and_then(ShellWord::text)
            .is_some_and(|verb| verb == "alias" || verb == "extension") =>
        {
            found.opaque_reasons.push("`gh` is configured to run another program".to_owned());
        }
        "source" | "." => {
            let rest = rest.strip_prefix(&[ShellWord::known("--")]).unwrap_or(rest);
            match rest.split_first().and_then(|(file, words)| Some((file, file.text()?, words))) {
                Some((file, text, words)) => {
                    found.merge(if is_device(text) {
                        ShellAnalysis::default()
                    } else {
                        script_command(file, words, command)
                    });
                    if is_device(text) || command.stdin.is_some() {
                        found.merge(analyze_shell_stdin(program, command, depth));
                    }
                }
                None => found
                    .opaque_reasons
                    .push("which file is read as commands is only known when it runs".to_owned()),
            }
        }
        "awk" | "gawk" | "mawk" | "nawk" => {
            if !crate::program::awk::is_harmless_awk(rest) {
                found.opaque_reasons.push(format!("`{program}` has code that can run anything"));
            }
        }
        "sed" | "gsed" => {
            if !crate::program::sed::is_harmless_sed(rest) {
                found
                    .opaque_reasons
                    .push("`sed` has code that can run or write anything".to_owned());
            }
        }
        "make" | "gmake" => {
            let mut words = rest.iter();
            while let Some(word) = words.next() {
                let Some(text) = word.text() else {
                    // The beginning determines the meaning: `VERSION=$X`, `-j$X`.
                    let is_open = word.spellings().iter().any(|spelling| match spelling.first() {
                        Some(WordPart::Text(text)) => {
                            text == "-" || text.starts_with("--") || is_make_code_variable(text)
                        }
                        first => matches!(first, Some(WordPart::AnyText)),
                    });
                    if is_open {
                        found
                            .opaque_reasons
                            .push("`make` has a word that is only known when it runs".to_owned());
                    }
                    continue;
                };
                // Abbreviated options are accepted.
                let (name, value) = split_name_value(text);
                let is_file = name.len() > 2
                    && ["--file", "--makefile"].iter().any(|long| long.starts_with(name));
                let flags = text.strip_prefix('-').filter(|flags| !flags.starts_with('-'));
                let file = match flags.and_then(|flags| flags.split_once('f')) {
                    // A process substitution that is glued to the option is a separate word here.
                    _ if is_file => value
                        .filter(|value| !value.is_empty())
                        .or_else(|| words.next().and_then(ShellWord::text)),
                    Some((_, "")) => words.next().and_then(ShellWord::text),
                    Some((_, file)) => Some(file),
                    None => Some("Makefile"),
                };
                if file.is_none_or(is_device) {
                    found
                        .opaque_reasons
                        .push("`make` reads rules from a file that is not known".to_owned());
                }
            }
            if rest.iter().any(|word| is_make_code_variable(known_prefix(word).0)) {
                found
                    .opaque_reasons
                    .push("`make` has a variable that changes what it runs".to_owned());
            }
            if command.stdin.is_some() {
                found.opaque_reasons.push("`make` may read rules from its input".to_owned());
            }
        }
        _ if SHELL_PROGRAMS.contains(&program) => {
            let files = rest
                .iter()
                .zip(rest.iter().skip(1))
                .filter(|(word, _)| is_command_string_option(word));
            files.for_each(|(_, file)| found.merge(script_command(file, &[], command)));
            found.merge(analyze_shell(program, rest, command, depth));
        }
        _ => {
            if let Some(flags) = interpreter_options(program) {
                found.merge(analyze_interpreter(program, flags, rest, command));
            }
        }
    }
    found
}

/// Returns whether SQL text runs another program: `psql -c '\! rm x'`.
///
/// The text is a word of the database client or its input.
fn has_client_escape(program: &str, rest: &[ShellWord], command: &ShellCommand) -> bool {
    let Some((_, signs)) = DATABASE_CLIENT_ESCAPES.iter().find(|(name, _)| *name == program) else {
        return false;
    };
    let input_text = match &command.stdin {
        Some(StdinSource::Text(text)) => text.text(),
        _ => None,
    };
    // In SQL, `||` concatenates strings.
    let has_escape = |text: &str| {
        let text = text.replace("||", "").to_lowercase();
        signs.iter().any(|sign| {
            if *sign == "|" { has_output_pipe(&text) } else { contains_sign(&text, sign) }
        })
    };
    rest.iter().filter_map(ShellWord::text).chain(input_text).any(has_escape)
}

/// Returns whether a database client sends its output to a program: `\o |sh` or `-o|sh`.
fn has_output_pipe(text: &str) -> bool {
    let is_pipe = |(before, to): (&str, &str)| {
        text.contains('\\') || (!to.is_empty() && !before.contains(char::is_whitespace))
    };
    text.split_once('|').is_some_and(is_pipe)
}

/// Returns whether a text contains a sign, which must be a separate word if it consists of letters.
fn contains_sign(text: &str, sign: &str) -> bool {
    let is_letter = |letter: char| letter.is_alphanumeric() || letter == '_';
    text.match_indices(sign).any(|(at, found)| {
        let is_continued = text.get(..at).is_some_and(|before| before.ends_with(is_letter))
            || text.get(at + found.len()..).is_some_and(|after| after.starts_with(is_letter));
        !(is_continued && sign.starts_with(is_letter))
    })
}

/// Analyzes a command inside another one.
///
/// If the command is only a guess, a word that is not the name of a program is ignored.
pub(crate) fn analyze_subcommand(
    command: ShellCommand,
    depth: NestingBudget<'_>,
    guessed: bool,
) -> ShellAnalysis {
    if guessed && command.program().is_none() {
        return ShellAnalysis::default();
    }
    let command = ShellCommand { is_guessed: guessed, ..command };
    // Each word is compared with every place.
    if !depth.try_spend(command.words.len() * WORD_COST_BYTES) {
        let short = command.words.len() <= MAX_WRAPPED_WORDS;
        return ShellAnalysis {
            commands: Some(command).filter(|_| short).into_iter().collect(),
            ..ShellAnalysis::opaque("it contains too many commands")
        };
    }
    let mut found = analyze_command(&command, depth.nested(), guessed);
    found.commands.insert(0, command);
    found
}

/// Analyzes words that form a command when they are joined with spaces.
pub(crate) fn analyze_joined_words(words: &[ShellWord], depth: NestingBudget<'_>) -> ShellAnalysis {
    let words = match words.split_first() {
        Some((first, rest)) if first.text() == Some("--") => rest,
        _ => words,
    };
    let texts: Option<Vec<&str>> = words.iter().map(ShellWord::text).collect();
    match texts {
        Some(texts) => parse::analyze_text(&texts.join(" "), depth.nested()),
        None => ShellAnalysis::opaque("the evaluated code is only known when it runs"),
    }
}

/// Returns whether an unknown program may run a matching command among its words.
pub(crate) fn can_run_match(
    command: &ShellCommand,
    match_words: impl Fn(&[ShellWord]) -> Certainty,
) -> Certainty {
    // `bun` runs programs as well as code.
    if command.program().is_none_or(|program| is_known_program(program) && program != "bun") {
        return Certainty::No;
    }
    let known = |at: &usize| command.words.get(*at).is_some_and(|word| word.text().is_some());
    let inner_matches = (1..command.words.len().min(MAX_WRAPPED_WORDS))
        .filter(known)
        .map(|at| match_words(command.words.get(at..).unwrap_or_default()));
    // Beyond the limit, only the program is compared.
    let match_start = |at: usize| {
        command.words.get(at).map(|word| match_words(&[word.clone(), ShellWord::unknown(true)]))
    };
    let far_matches =
        (MAX_WRAPPED_WORDS..command.words.len()).filter(known).filter_map(match_start);
    inner_matches.chain(far_matches).max().unwrap_or(Certainty::No).min(Certainty::Maybe)
}

/// Returns the commands behind an unknown program that change files if the program runs them.
///
/// Unknown words are left out, because they usually have another meaning: `aws s3 cp "$FILE"
/// s3://x`.
pub(crate) fn possible_changes(command: &ShellCommand) -> Vec<ShellCommand> {
    const FILE_CHANGING_PROGRAMS: &[&str] =
        &["chmod", "cp", "dd", "ln", "mv", "rimraf", "rm", "rsync", "tee"];
    // These programs have subcommands with the same names.
    const REMOTE_STORAGE_PROGRAMS: &[&str] =
        &["aws", "az", "gcloud", "gsutil", "mc", "rclone", "s3cmd"];
    // The words after such a command contain the next one.
    const MAX_INNER_COMMANDS: usize = 2;
    if command.is_guessed
        || command.program().is_none_or(|program| {
            is_known_program(program) || REMOTE_STORAGE_PROGRAMS.contains(&program)
        })
    {
        return Vec::new();
    }
    let is_file_changing = |at: &usize| {
        command
            .words
            .get(*at)
            .and_then(ShellWord::text)
            .is_some_and(|text| FILE_CHANGING_PROGRAMS.contains(&base_name(text)))
    };
    let is_usable = |word: &&ShellWord| word.text().is_some() || word.is_pattern();
    let words_from = |at: usize| -> Vec<ShellWord> {
        command.words.get(at..).unwrap_or_default().iter().filter(is_usable).cloned().collect()
    };
    let found = (1..command.words.len().min(MAX_WRAPPED_WORDS))
        .filter(is_file_changing)
        .take(MAX_INNER_COMMANDS);
    found
        .map(|at| ShellCommand {
            words: words_from(at),
            is_guessed: true,
            ..ShellCommand::default()
        })
        .collect()
}
