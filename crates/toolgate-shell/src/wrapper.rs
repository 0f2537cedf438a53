//! Finds commands that run behind a wrapper, such as `sudo` or `xargs`.

use super::word::ShellWord;
use super::{ShellAnalysis, ShellCommand, base_name};
use crate::nested_command::{MAX_WRAPPED_WORDS, analyze_subcommand, is_behaviour_change};
use crate::nesting_budget::NestingBudget;
use crate::parse;
use crate::program::options::split_name_value;
use crate::program::tables::{
    PACKAGE_MANAGERS, SAME_DIRECTORY_WRAPPERS, SIMPLE_PROGRAMS, WRAPPER_PROGRAMS,
};
use crate::word::unquote::has_braces;

/// Programs behind which a shell may read a file as commands.
#[rustfmt::skip]
const STDIN_SHELL_WRAPPERS: &[&str] = &[
    "builtin", "command", "doas", "exec", "hyperfine", "parallel", "runuser", "screen", "script", "sg", "su", "sudo", "time", "tmux", "watch",
];
/// Wrappers that run the first word that is neither an option, an option's value nor shell code.
const TRANSPARENT_WRAPPERS: &[&str] = &["env", "nice", "nohup", "sudo", "time", "timeout", "xargs"];
/// Wrappers that take their own operands, or options with values, before the command.
#[rustfmt::skip]
const OPERAND_TAKING_WRAPPERS: &[&str] = &[
    "capsh", "choom", "chroot", "chrt", "firejail", "flock", "logsave", "ltrace", "nsenter", "numactl", "perf", "prlimit", "runuser", "script",
    "setarch", "setpriv", "sg", "start-stop-daemon", "strace", "su", "systemd-inhibit", "systemd-run", "taskset", "unshare", "valgrind", "xvfb-run",
];
/// Wrappers whose words may be names of machines or containers, so the program is not known.
const CONTAINER_TOOLS: &[&str] = &["docker", "kubectl", "podman"];
/// Subcommands of container tools that run nothing.
#[rustfmt::skip]
const INERT_CONTAINER_SUBCOMMANDS: &[&str] = &[
    "describe", "events", "explain", "get", "history", "images", "info", "inspect", "kill", "label", "logs", "patch", "ps", "rm", "rmi", "stats",
    "stop", "tag", "top", "version", "wait",
];
/// Programs behind `npx` and similar tools that take patterns of file names.
const FILE_PATTERN_PROGRAMS: &[&str] =
    &["biome", "eslint", "jest", "prettier", "stylelint", "tsc", "vitest"];
/// Wrappers that pass their words to a shell as text.
const EVALUATING_WRAPPERS: &[&str] = &[
    "entr",
    "flock",
    "hyperfine",
    "nix-shell",
    "parallel",
    "runuser",
    "screen",
    "script",
    "sg",
    "su",
    "tmux",
    "watch",
];

/// Analyzes the command behind a wrapper.
///
/// The start of that command depends on the options of every wrapper, so each word is tried as the
/// start.
pub(crate) fn unwrap_command(
    program: &str,
    rest: &[ShellWord],
    command: &ShellCommand,
    depth: NestingBudget<'_>,
) -> ShellAnalysis {
    let mut found = ShellAnalysis::default();
    // `command -v` only looks a program up.
    if program == "command"
        && rest.first().and_then(ShellWord::text).is_some_and(|flag| flag == "-v" || flag == "-V")
    {
        return found;
    }
    let is_quiet = |word: &ShellWord| {
        word.text().is_some_and(|verb| INERT_CONTAINER_SUBCOMMANDS.contains(&verb))
    };
    if CONTAINER_TOOLS.contains(&program) && rest.first().is_some_and(is_quiet) {
        return found;
    }
    if rest.len() > MAX_WRAPPED_WORDS {
        found.opaque_reasons.push(format!("there are too many words behind `{program}`"));
    }
    let (rest, command_start) = replace_xargs_input(program, rest);
    let rest = rest.as_slice();
    let is_flag = |word: &ShellWord| {
        word.text().is_some_and(|text| text.starts_with('-') || text.contains('='))
    };
    let is_wrapper = |word: &ShellWord| {
        word.text().is_some_and(|text| WRAPPER_PROGRAMS.contains(&base_name(text)))
    };
    let has_input_words = command
        .words
        .iter()
        .any(|word| matches!(word.text().map(base_name), Some("xargs" | "parallel")));
    let first = rest.iter().find(|word| !is_flag(word));
    if first.into_iter().chain(rest.get(command_start)).any(|word| word.text().is_none()) {
        found.opaque_reasons.push("which program runs is only known when it runs".to_owned());
    }
    // Without a program among the words, the input of `xargs` becomes the program.
    let wrapper = rest.iter().rposition(is_wrapper);
    let last = wrapper.map_or(rest, |at| rest.get(at + 1..).unwrap_or_default());
    let wrapper =
        wrapper.and_then(|at| rest.get(at)).and_then(program_candidate).unwrap_or_default();
    let is_option_or_number = |word: &ShellWord| {
        is_flag(word)
            || word.text().is_some_and(|text| {
                text.chars().all(|c| c.is_ascii_digit() || "+.smhd".contains(c))
            })
    };
    // The value of an option is not a program: `xargs sudo -u root`.
    let is_option_value = |at: usize| {
        let option =
            at.checked_sub(1).and_then(|before| last.get(before)).and_then(ShellWord::text);
        option.is_some_and(|option| is_option_with_value(wrapper, option))
    };
    let mut may_run = last
        .iter()
        .enumerate()
        .filter(|(at, word)| !is_option_or_number(word) && !is_option_value(*at));
    // The first operand of these wrappers cannot be distinguished from a program.
    if has_input_words
        && (OPERAND_TAKING_WRAPPERS.contains(&wrapper)
            || may_run.next().is_none_or(|(_, word)| word.text().is_none()))
    {
        found.opaque_reasons.push("which program runs is only known when it runs".to_owned());
    }
    // A path with `/../` may be a program, but not a setting or a package.
    let has_parent_step = |word: &ShellWord| {
        word.text().is_some_and(|text| !text.starts_with('-') && text.contains("/../"))
    };
    // The directory stays the same, unless a word in between changes it.
    let keeps_directory = |word: &ShellWord| {
        // These options select another directory or the home directory of another user.
        let changes_directory = |text: &str| match text.strip_prefix("--") {
            Some(long) => long.starts_with('c') || long.starts_with("log"),
            None => {
                text.strip_prefix('-').is_some_and(|flags| flags.contains(['C', 'D', 'R', 'i']))
            }
        };
        let is_bare = is_option_or_number(word) && !has_parent_step(word);
        program_candidate(word).is_some_and(|name| SAME_DIRECTORY_WRAPPERS.contains(&name))
            || (is_bare && word.text().is_some_and(|text| !changes_directory(text)))
    };
    let same_directory_count = 1 + rest.iter().take_while(|word| keeps_directory(word)).count();
    // Behind a program that runs none of its words, no word is a program. The words in between must
    // be known.
    let is_terminal = |at: usize| {
        let before =
            at.checked_sub(1).and_then(|before| rest.get(before)).and_then(ShellWord::text);
        let named = rest.get(at).and_then(program_candidate).is_some_and(|name| {
            SIMPLE_PROGRAMS.contains(&name) && !WRAPPER_PROGRAMS.contains(&name)
        });
        named && before.is_none_or(|text| !text.starts_with('-'))
    };
    let can_precede = |word: &ShellWord| {
        keeps_directory(word)
            || program_candidate(word).is_some_and(|name| PACKAGE_MANAGERS.contains(&name))
    };
    // Other wrappers take an operand first, as `flock` takes a file.
    let runs_first_word =
        SAME_DIRECTORY_WRAPPERS.contains(&program) || PACKAGE_MANAGERS.contains(&program);
    let is_direct = |end: &usize| {
        runs_first_word && rest.get(..*end).unwrap_or_default().iter().all(can_precede)
    };
    let end = (0..rest.len()).find(|at| is_terminal(*at)).filter(is_direct).unwrap_or(rest.len());
    // The word directly follows a package manager that runs and is not the value of an option.
    let is_managed = |at: usize| match at
        .checked_sub(1)
        .map(|before| rest.split_at_checked(before).unwrap_or_default())
    {
        None => PACKAGE_MANAGERS.contains(&program),
        Some((before, from_previous)) => {
            let is_value =
                before.last().and_then(ShellWord::text).is_none_or(|text| text.starts_with('-'))
                    && !before.is_empty();
            let name = from_previous.first().and_then(program_candidate);
            runs_first_word
                && name.is_some_and(|name| PACKAGE_MANAGERS.contains(&name))
                && !is_value
                && before.iter().all(keeps_directory)
        }
    };
    // The effect on files proves nothing if the program's position is not known, or if the word is
    // an operand.
    let run_at = rest.iter().position(|word| !keeps_directory(word)).unwrap_or(rest.len());
    let has_options =
        rest.iter().take(run_at).any(|word| word.text().is_some_and(|text| text.starts_with('-')));
    let runs_any = PACKAGE_MANAGERS.contains(&program) || CONTAINER_TOOLS.contains(&program);
    let is_vague = |at: usize| {
        let follows_operand =
            SAME_DIRECTORY_WRAPPERS.contains(&program) && !has_options && at > run_at;
        runs_any || follows_operand || rest.get(at).is_some_and(is_option_or_number)
    };
    // The word after `run` or `exec`, and after their options, is a program.
    let follows_run_verb = |at: usize| {
        let before = rest.get(..at).unwrap_or_default();
        let runs = |word: &ShellWord| matches!(word.text(), Some("exec" | "run"));
        let between = before.iter().rposition(runs).and_then(|run| before.get(run + 1..));
        let mut is_open = false;
        let is_option_part = |word: &ShellWord| {
            let is_option = word.text().is_some_and(|text| text.starts_with('-'));
            std::mem::replace(&mut is_open, is_option) || is_option
        };
        between.is_some_and(|words| words.iter().all(is_option_part))
    };
    for at in 0..rest.len().min(MAX_WRAPPED_WORDS) {
        let words = rest.get(at..).unwrap_or_default().to_vec();
        let working_directory = command
            .working_directory
            .clone()
            .filter(|_| at < same_directory_count && SAME_DIRECTORY_WRAPPERS.contains(&program));
        // The packages that a package manager installs are not files.
        let is_verb = words.first().and_then(ShellWord::text) == Some("install") && is_managed(at);
        let (unlikely, vague) = (at > end || is_verb, is_vague(at));
        let mut inner = ShellCommand {
            words,
            stdin: command.stdin.clone(),
            working_directory,
            is_unlikely: unlikely,
            is_vague: vague,
            ..ShellCommand::default()
        };
        // `@types/node` is the name of a package, not a program.
        let is_package = |word: &ShellWord| {
            word.text().is_some_and(|text| text.starts_with('@') && text.contains('/'))
        };
        let is_skipped = |word: &ShellWord| {
            is_flag(word)
                || (PACKAGE_MANAGERS.contains(&program)
                    && is_package(word)
                    && !follows_run_verb(at))
        };
        if inner.words.first().is_some_and(|word| is_skipped(word) && !has_parent_step(word)) {
            continue;
        }
        // Only certain wrappers start a shell that reads a file as commands. For others, `.` is a
        // directory.
        let is_reading = |word: &ShellWord| {
            word.text().is_some_and(|text| STDIN_SHELL_WRAPPERS.contains(&base_name(text)))
        };
        let may_read =
            STDIN_SHELL_WRAPPERS.contains(&program) || rest.iter().take(at).any(is_reading);
        let is_last = inner.words.len() == 1 && !has_input_words;
        if (is_last || !may_read)
            && matches!(inner.words.first().and_then(ShellWord::text), Some("." | "source"))
        {
            continue;
        }
        if has_input_words {
            inner.words.push(ShellWord::unknown(true));
            inner.stdin = None;
        }
        found.merge(analyze_subcommand(inner, depth, true));
    }
    let terminal_program = find_terminal_program(program, rest, end);
    let matches_files = is_file_pattern_search(program, rest);
    for (at, word) in rest.iter().enumerate().take(MAX_WRAPPED_WORDS) {
        let Some(text) = word.text() else { continue };
        if let Some((name, value)) = text.split_once('=')
            && is_behaviour_change(name, Some(value))
        {
            found.opaque_reasons.push(format!("`{name}` changes what commands do"));
        }
        if is_env_option(program, rest, at)
            && (text.starts_with("--s")
                || text
                    .strip_prefix('-')
                    .is_some_and(|flags| !flags.starts_with('-') && flags.contains('S')))
        {
            found.opaque_reasons.push("`env` splits a text into a command".to_owned());
        }
        if has_input_words && text.contains("{}") && text.contains(' ') {
            found.opaque_reasons.push("the code that runs is only known when it runs".to_owned());
        }
        if terminal_program.is_some_and(|terminal_program| at >= terminal_program) {
            continue;
        }
        // `-c'…'`, `-qc'…'` and `--command=…` contain commands as well.
        let value =
            text.strip_prefix("--").and_then(|long| long.split_once('=')).map(|(_, value)| value);
        let glued = (2..=10)
            .filter_map(|at| text.get(at..))
            .filter(|_| text.starts_with('-') && value.is_none());
        let whole_text = Some(text).filter(|_| !text.starts_with('-'));
        let mut analyzed: Vec<&str> = Vec::new();
        // If a shell expands a file pattern again, the result may be a program's name.
        let is_evaluating = |name: &str| EVALUATING_WRAPPERS.contains(&name);
        let expands_patterns = is_evaluating(program)
            || rest.iter().take(at).filter_map(ShellWord::text).map(base_name).any(is_evaluating);
        for code in glued.chain(value).chain(whole_text) {
            let is_pattern = matches_files && !has_shell_syntax(code);
            if ((can_expand(code) && !is_pattern)
                || (expands_patterns && code.contains(['*', '?', '['])))
                && !analyzed.contains(&code.trim_start())
            {
                analyzed.push(code.trim_start());
                found.merge(parse::analyze_text(code, depth.nested()));
            }
        }
    }
    found
}

/// Returns whether an option of a wrapper takes the next word as its value.
fn is_option_with_value(wrapper: &str, option: &str) -> bool {
    const SHORT_OPTIONS_WITH_VALUE: &[(&str, &str)] = &[
        ("doas", "Cu"),
        ("env", "Cu"),
        ("ionice", "cn"),
        ("nice", "n"),
        ("stdbuf", "eio"),
        ("sudo", "CDRTUghprtu"),
        ("timeout", "ks"),
    ];
    const LONG_OPTIONS_WITH_VALUE: &[&str] = &[
        "--adjustment",
        "--chdir",
        "--class",
        "--group",
        "--host",
        "--kill-after",
        "--signal",
        "--unset",
        "--user",
    ];
    let letters = SHORT_OPTIONS_WITH_VALUE
        .iter()
        .find(|(name, _)| *name == wrapper)
        .map(|(_, letters)| *letters);
    letters.is_some_and(|letters| match option.strip_prefix('-') {
        Some(flags) if !flags.starts_with('-') => {
            flags.ends_with(|flag: char| letters.contains(flag))
        }
        _ => LONG_OPTIONS_WITH_VALUE.contains(&option),
    })
}

/// Returns whether the program that runs searches for files and runs none of its words.
///
/// Examples are `npx prettier "src/**/*.{ts,tsx}"` and `pnpm exec eslint …`.
fn is_file_pattern_search(program: &str, rest: &[ShellWord]) -> bool {
    // These options take no value and do not turn the rest into shell code.
    const RUNNER_FLAGS: &[&str] = &[
        "--",
        "--no-install",
        "--offline",
        "--prefer-offline",
        "--quiet",
        "--silent",
        "--yes",
        "-q",
        "-y",
    ];
    let is_bare = |word: &&ShellWord| word.text().is_some_and(|text| RUNNER_FLAGS.contains(&text));
    let mut words = rest.iter().skip_while(is_bare).peekable();
    // For `npx`, `exec` is the name of a program.
    if program != "npx"
        && words.peek().is_some_and(|verb| matches!(verb.text(), Some("dlx" | "exec" | "run")))
    {
        words.next();
    }
    let tool = words.find(|word| !is_bare(word)).and_then(ShellWord::text);
    ["npm", "npx", "pnpm", "yarn"].contains(&program)
        && tool.is_some_and(|tool| FILE_PATTERN_PROGRAMS.contains(&tool))
}

/// Returns the name of the program that a word may be; options and settings have none.
fn program_candidate(word: &ShellWord) -> Option<&str> {
    word.text().filter(|text| !text.starts_with('-') && !text.contains('=')).map(base_name)
}

/// Returns whether a shell may expand a text to several or other words, apart from file patterns.
fn can_expand(text: &str) -> bool {
    has_shell_syntax(text) || has_braces(text)
}

fn has_shell_syntax(text: &str) -> bool {
    text.contains(|c: char| c.is_whitespace() || c.is_control() || ";&|<>()$`\"'\\!#".contains(c))
}

/// Returns the words behind a wrapper and the position of the command that `xargs` runs.
///
/// The text that `xargs` replaces by its input becomes unknown: that of `-I R`, `-IR`, `-iR` or
/// `--replace=R`.
fn replace_xargs_input(program: &str, rest: &[ShellWord]) -> (Vec<ShellWord>, usize) {
    const XARGS_OPTIONS_WITH_VALUE: &[&str] =
        &["arg-file", "delimiter", "max-args", "max-chars", "max-procs", "process-slot-var"];
    let is_xargs = |word: &ShellWord| word.text().map(base_name) == Some("xargs");
    let start =
        if program == "xargs" { Some(0) } else { rest.iter().position(is_xargs).map(|at| at + 1) };
    let Some(mut at) = start else { return (rest.to_vec(), 0) };
    let mut placeholder = None;
    while let Some(text) =
        rest.get(at).and_then(ShellWord::text).filter(|text| text.starts_with('-'))
    {
        at += 1;
        let next = rest.get(at).and_then(ShellWord::text).unwrap_or_default();
        if let Some(long) = text.strip_prefix("--") {
            let (name, value) = split_name_value(long);
            if !name.is_empty() && "replace".starts_with(name) {
                placeholder = Some(value.unwrap_or("{}"));
            }
            let is_valued = name.len() > 1
                && XARGS_OPTIONS_WITH_VALUE.iter().any(|known| known.starts_with(name));
            at += usize::from(is_valued && value.is_none());
            continue;
        }
        // The first letter that takes a value takes the rest of the word.
        let Some((flag, value)) = text
            .find(|flag: char| "EIJLPRSadeilns".contains(flag))
            .and_then(|at| text.get(at..)?.split_at_checked(1))
        else {
            continue;
        };
        let is_next = value.is_empty() && !["e", "i", "l"].contains(&flag);
        at += usize::from(is_next);
        match flag {
            "I" | "J" => placeholder = Some(if is_next { next } else { value }),
            "i" => placeholder = Some(if value.is_empty() { "{}" } else { value }),
            _ => {}
        }
    }
    let fill = |(n, word): (usize, &ShellWord)| {
        let (before, after) = word.text().filter(|_| n >= at).and_then(|text| {
            Some((text.split_once(placeholder?)?.0, text.rsplit_once(placeholder?)?.1))
        })?;
        Some(
            ShellWord::known(before)
                .append(&ShellWord::unknown(false))
                .append(&ShellWord::known(after)),
        )
    };
    (rest.iter().enumerate().map(|word| fill(word).unwrap_or_else(|| word.1.clone())).collect(), at)
}

/// Returns the position of a program that runs none of its words, so the rest are its operands.
///
/// The program must directly follow wrappers that run no text. `end` is the position of the first
/// such program that is not the value of an option.
fn find_terminal_program(program: &str, rest: &[ShellWord], end: usize) -> Option<usize> {
    let text = |at: usize| rest.get(at).and_then(ShellWord::text);
    let before = |at: usize| at.checked_sub(1).and_then(text);
    // The word after these options of `xargs` is not their value.
    let takes_no_value = |option: &str| {
        let glued = option.len() > 2
            && ["-I", "-L", "-P", "-d", "-n", "-s"].iter().any(|flag| option.starts_with(flag));
        glued || matches!(option, "-0" | "-r" | "-0r" | "-r0" | "--null" | "--no-run-if-empty")
    };
    let is_plain = |at: &usize| {
        rest.get(*at)
            .and_then(program_candidate)
            .is_some_and(|name| SIMPLE_PROGRAMS.contains(&name))
    };
    let xargs_program = (0..end)
        .filter(|_| program == "xargs")
        .filter(is_plain)
        .find(|at| before(*at).is_some_and(takes_no_value));
    let program_at = xargs_program.unwrap_or(end);
    let is_transparent = |at: usize| {
        let is_bare = |text: &str| {
            text.starts_with('-')
                || text.contains('=')
                || text.starts_with(|first: char| first.is_ascii_digit())
        };
        let is_value = before(at).is_some_and(|before| before.starts_with('-'));
        let may_be_value = |text: &str| is_value && !WRAPPER_PROGRAMS.contains(&base_name(text));
        text(at).is_some_and(|text| {
            may_be_value(text) || is_bare(text) || TRANSPARENT_WRAPPERS.contains(&base_name(text))
        })
    };
    // A program that is also a wrapper runs its words.
    let is_wrapper =
        text(program_at).is_some_and(|text| WRAPPER_PROGRAMS.contains(&base_name(text)));
    (TRANSPARENT_WRAPPERS.contains(&program) && !is_wrapper && (0..program_at).all(is_transparent))
        .then_some(program_at)
}

/// Returns whether `env` may read a word as its own option.
///
/// `env` reads options before its first setting and before the program.
fn is_env_option(program: &str, words: &[ShellWord], at: usize) -> bool {
    let before = words.iter().take(at);
    let from = match before.clone().rposition(|word| program_candidate(word) == Some("env")) {
        Some(env) => env + 1,
        None if program == "env" => 0,
        None => return false,
    };
    let mut takes_value = false;
    before.skip(from).all(|word| {
        let Some(text) = word.text() else { return true };
        let is_env_word = takes_value || text.starts_with('-');
        takes_value = matches!(text, "-u" | "-C" | "-a" | "--unset" | "--chdir" | "--argv0");
        is_env_word
    })
}
