//! Determines what programs do with the files that their words name.

use super::options::{ProgramSyntax, known_prefix};
use crate::interpreter::interpreter_options;
use crate::nested_command::is_known_program;
use crate::program::implicit_reads::searcher_syntax;
use crate::program::tables::{
    FILE_CHANGING_GIT_SUBCOMMANDS, IN_PLACE_COMPRESSORS, OPERAND_CHANGING_PROGRAMS, SHELL_PROGRAMS,
};
use crate::word::ShellWord;
use crate::{ShellCommand, skip_git_options};

/// Returns whether the words of a command contain code.
pub(crate) fn runs_code(command: &ShellCommand) -> bool {
    let Some(program) = command.program() else { return true };
    interpreter_options(program).is_some()
        || SHELL_PROGRAMS.contains(&program)
        || ["sed", "awk", "gawk", "mawk", "eval", "find"].contains(&program)
}

/// Returns whether the words of a command never name files.
pub(crate) fn names_no_files(command: &ShellCommand) -> bool {
    const FILELESS_PROGRAMS: &[&str] = &[
        ":", "[", "basename", "dirname", "echo", "exit", "export", "expr", "false", "kill",
        "printf", "return", "seq", "shift", "sleep", "test", "true", "type", "unset", "wait",
        "which",
    ];
    command.program().is_some_and(|program| FILELESS_PROGRAMS.contains(&program))
}

/// Returns whether one word of a command is a search pattern.
fn has_search_pattern(command: &ShellCommand) -> bool {
    let gives = |word: &str| {
        let short = word
            .strip_prefix('-')
            .is_some_and(|flags| !flags.starts_with('-') && flags.contains(['e', 'f']));
        short || word.starts_with("--reg") || word.starts_with("--fi")
    };
    let has_option = || command.words.iter().filter_map(ShellWord::text).any(gives);
    command
        .program()
        .is_some_and(|program| ["grep", "egrep", "fgrep", "rg", "ag"].contains(&program))
        && !has_option()
}

/// The role of a word of a search program.
#[derive(Clone, Copy, PartialEq)]
enum SearchWordRole<'c> {
    Option,
    /// The value of this option.
    Value(&'c str),
    /// The pattern or a file to search.
    Operand,
}

fn classify_search_words<'c>(
    command: &'c ShellCommand,
    shape: &ProgramSyntax,
) -> Vec<SearchWordRole<'c>> {
    let letters =
        if shape.short_with_value.is_empty() { "ABCGWgmp" } else { shape.short_with_value };
    let takes_value = |text: &str| match (text.strip_prefix("--"), text.strip_prefix('-')) {
        (Some(long), _) => shape.long_with_value.contains(&long),
        (None, Some(flags)) => {
            flags.find(|flag: char| letters.contains(flag)).is_some_and(|at| at + 1 == flags.len())
        }
        (None, None) => false,
    };
    // Some options take a number or nothing: `ag -C KEY`.
    let fits = |option: &str, word: &ShellWord| {
        let counts = option.ends_with(['A', 'B', 'C']) || option.ends_with("context");
        !counts || word.text().is_some_and(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let (mut before, mut is_over): (Option<&'c str>, bool) = (None, false);
    let role = |word: &'c ShellWord| {
        if let Some(option) = before.take()
            && fits(option, word)
        {
            return SearchWordRole::Value(option);
        }
        match word.text().filter(|text| !is_over && text.len() > 1 && text.starts_with('-')) {
            Some("--") => is_over = true,
            Some(text) => before = takes_value(text).then_some(text),
            None => return SearchWordRole::Operand,
        }
        SearchWordRole::Option
    };
    command.words.iter().skip(1).map(role).collect()
}

/// Returns the positions of words of a search program that name no file, in order.
///
/// These are the search pattern and the names that are excluded. The value of an option is not the
/// pattern: `rg -g .env x`.
pub(crate) fn non_file_positions(command: &ShellCommand) -> Vec<usize> {
    let Some(shape) = command.program().and_then(searcher_syntax) else { return Vec::new() };
    let (roles, words) =
        (classify_search_words(command, shape), command.words.get(1..).unwrap_or_default());
    // It is not known whether an abbreviated option takes a value: `--incl .env`.
    let is_cut = |text: &str| {
        let long = text
            .strip_prefix("--")
            .filter(|long| !long.is_empty() && !shape.long_with_value.contains(long));
        long.is_some_and(|long| shape.long_with_value.iter().any(|name| name.starts_with(long)))
    };
    let is_certain =
        has_search_pattern(command) && !words.iter().filter_map(ShellWord::text).any(is_cut);
    let pattern =
        roles.iter().position(|role| *role == SearchWordRole::Operand).filter(|_| is_certain);
    let is_skipped = |at: usize, role: SearchWordRole<'_>| match role {
        SearchWordRole::Value("--exclude" | "--exclude-dir") => {
            words.get(at).is_some_and(|word| word.text().is_some())
        }
        _ => Some(at) == pattern,
    };
    roles
        .into_iter()
        .enumerate()
        .filter(|(at, role)| is_skipped(*at, *role))
        .map(|(at, _)| at)
        .collect()
}

/// Returns whether the input of a command names the files that it changes.
pub(crate) fn is_patch_program(command: &ShellCommand) -> bool {
    command.program().is_some_and(|program| {
        program == "patch"
            || (program == "git" && matches!(git_subcommand(command), Some("apply" | "am")))
    })
}

/// Returns the subcommand of `git`.
fn git_subcommand(command: &ShellCommand) -> Option<&str> {
    let words = skip_git_options(command.words.get(1..).unwrap_or_default());
    words.iter().filter_map(ShellWord::text).find(|word| !word.starts_with('-'))
}

/// Returns whether a command removes, moves, changes or makes accessible the files that it names.
pub(crate) fn is_file_change(command: &ShellCommand) -> bool {
    // For `-i$X`, the beginning is known.
    let words = || command.words.iter().skip(1).map(|word| known_prefix(word).0);
    let has = |flag: &str| words().any(|word| word.starts_with(flag));
    // `-Ei` edits in place, as `-i` does.
    let in_place = |flags: &str| {
        flags.trim_start_matches(|flag: char| "nErszu".contains(flag)).starts_with('i')
    };
    let edits = |word: &str| word.strip_prefix('-').is_some_and(in_place);
    let edits_by_name = |word: &str| {
        let name = word.split('=').next().unwrap_or_default();
        name.len() > 2 && ["--in-place", "--inplace"].iter().any(|known| known.starts_with(name))
    };
    // `zip -m` removes the files that it has packed.
    let moves = |word: &str| match word.strip_prefix("--") {
        Some(long) => long.starts_with("mo"),
        None => word.strip_prefix('-').is_some_and(|flags| flags.contains('m')),
    };
    // Search the cluster up to the first letter that takes a value.
    let cluster = |word: &str, valued: &[char], flag: char| {
        let flags = word.strip_prefix('-').filter(|flags| !flags.starts_with('-'));
        flags.and_then(|flags| flags.split(valued).next()).is_some_and(|flags| flags.contains(flag))
    };
    let is_any_of =
        |word: &str, names: &[&str]| names.iter().any(|name| word.eq_ignore_ascii_case(name));
    let verb =
        || words().find(|word| !word.is_empty() && !word.starts_with('-')).unwrap_or_default();
    command.program().is_none_or(|program| {
        OPERAND_CHANGING_PROGRAMS.contains(&program)
            || is_in_place_compression(command)
            || (program == "git" && git_subcommand(command).is_some_and(|verb| FILE_CHANGING_GIT_SUBCOMMANDS.contains(&verb)))
            || (program == "find" && has("-delete"))
            || (["sed", "gsed", "yq"].contains(&program) && words().any(|word| edits(word) || edits_by_name(word)))
            || (program == "zip" && words().any(moves))
            || (["tar", "bsdtar", "gtar"].contains(&program) && has("--rem"))
            || (program == "sort" && (has("--o") || words().any(|word| cluster(word, &['S', 'T', 'k', 't'], 'o'))))
            || ((program.starts_with("perl") || program.starts_with("ruby"))
                && words().any(|word| cluster(word, &['C', 'D', 'E', 'F', 'I', 'M', 'e', 'm', 'r', 'x'], 'i')))
            // These options remove the files that are packed.
            || (program.starts_with("7z") && words().any(|word| is_any_of(word, &["-sdel"])))
            || (program == "rar" && (is_any_of(verb(), &["m", "mf"]) || words().any(|word| is_any_of(word, &["-df", "-dr", "-dw"]))))
    })
}

/// Returns whether a command certainly does not change the files that it names, or its effect is
/// checked elsewhere.
pub(crate) fn is_file_preserving(command: &ShellCommand) -> bool {
    const DISPLAY_PROGRAMS: &[&str] =
        &["bat", "column", "less", "more", "nl", "rev", "strings", "tac", "toolgate", "yq"];
    command
        .program()
        .is_some_and(|program| is_known_program(program) || DISPLAY_PROGRAMS.contains(&program))
}

/// Returns whether a command replaces the files that it names by compressed or decompressed ones.
pub(crate) fn is_in_place_compression(command: &ShellCommand) -> bool {
    let shows = |word: &str| match word.strip_prefix("--") {
        Some(long) => ["stdout", "to-stdout", "test", "list"].contains(&long),
        // The text after these letters is their value. Not all of these programs list with `-l`.
        None => {
            let lists = command
                .program()
                .is_some_and(|program| !program.contains("bz") && !program.contains("lz4"));
            let flags = word.strip_prefix('-').and_then(|flags| {
                flags.split(['C', 'D', 'F', 'M', 'S', 'T', 'b', 'o', 'p']).next()
            });
            flags.is_some_and(|flags| flags.contains(['c', 't']) || (lists && flags.contains('l')))
        }
    };
    let packs = command.program().is_some_and(|program| IN_PLACE_COMPRESSORS.contains(&program));
    packs
        && !command
            .words
            .iter()
            .skip(1)
            .filter_map(ShellWord::text)
            .take_while(|word| *word != "--")
            .any(shows)
}

/// Returns whether a command reads directory trees.
pub(crate) fn is_tree_reader(command: &ShellCommand) -> bool {
    command.program().is_some_and(|program| {
        ["cp", "grep", "egrep", "fgrep", "rg", "ag", "tar", "zip", "scp", "rsync", "diff", "7z"]
            .contains(&program)
    })
}

/// Returns whether another file or the input names the files of a command.
pub(crate) fn has_external_file_list(command: &ShellCommand) -> bool {
    let has = |flag: &str| {
        command.words.iter().filter_map(ShellWord::text).any(|word| word.starts_with(flag))
    };
    command.program().is_some_and(|program| {
        program == "cpio" || (program == "tar" && has("-T")) || (program == "zip" && has("-@"))
    }) || has("--files-from")
        || has("--files0-from")
}
