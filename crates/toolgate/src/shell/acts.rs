//! What programs do with the files that they are given.

use super::inner::{is_known, language};
use super::known::{PACKERS, SHELLS, TAKERS, TAKING};
use super::options::{Shape, beginning};
use super::trees::searcher;
use super::word::Word;
use super::{Command, without_options};

/// Whether its words hold code of some language.
pub(super) fn runs_code(command: &Command) -> bool {
    let Some(program) = command.program() else { return true };
    language(program).is_some() || SHELLS.contains(&program) || ["sed", "awk", "gawk", "mawk", "eval", "find"].contains(&program)
}

/// Whether its words are no files, whatever they are.
pub(super) fn names_no_files(command: &Command) -> bool {
    const WORDS: &[&str] = &[
        ":", "[", "basename", "dirname", "echo", "exit", "export", "expr", "false", "kill", "printf", "return", "seq", "shift", "sleep",
        "test", "true", "type", "unset", "wait", "which",
    ];
    command.program().is_some_and(|program| WORDS.contains(&program))
}

/// Whether one of its words is a pattern to look for.
fn looks_for(command: &Command) -> bool {
    let gives = |word: &str| {
        let short = word.strip_prefix('-').is_some_and(|flags| !flags.starts_with('-') && flags.contains(['e', 'f']));
        short || word.starts_with("--reg") || word.starts_with("--fi")
    };
    let given = || command.words.iter().filter_map(Word::text).any(gives);
    command.program().is_some_and(|program| ["grep", "egrep", "fgrep", "rg", "ag"].contains(&program)) && !given()
}

/// What a word behind a program that searches is to it.
#[derive(Clone, Copy, PartialEq)]
enum Role<'c> {
    Option,
    /// What this option takes.
    Value(&'c str),
    /// The pattern, or what is searched.
    Plain,
}

fn roles<'c>(command: &'c Command, shape: &Shape) -> Vec<Role<'c>> {
    let letters = if shape.short.is_empty() { "ABCGWgmp" } else { shape.short };
    let takes = |text: &str| match (text.strip_prefix("--"), text.strip_prefix('-')) {
        (Some(long), _) => shape.long.contains(&long),
        (None, Some(flags)) => flags.find(|flag: char| letters.contains(flag)).is_some_and(|at| at + 1 == flags.len()),
        (None, None) => false,
    };
    // Some take a number or nothing: `ag -C KEY`.
    let fits = |option: &str, word: &Word| {
        let counts = option.ends_with(['A', 'B', 'C']) || option.ends_with("context");
        !counts || word.text().is_some_and(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let (mut before, mut is_over): (Option<&'c str>, bool) = (None, false);
    let role = |word: &'c Word| {
        if let Some(option) = before.take()
            && fits(option, word)
        {
            return Role::Value(option);
        }
        match word.text().filter(|text| !is_over && text.len() > 1 && text.starts_with('-')) {
            Some("--") => is_over = true,
            Some(text) => before = takes(text).then_some(text),
            None => return Role::Plain,
        }
        Role::Option
    };
    command.words.iter().skip(1).map(role).collect()
}

/// Which words behind a program that searches name no file, in order: the pattern that it looks for, and what it is told to leave out.
/// What an option takes is no pattern: `rg -g .env x`.
pub(super) fn spared(command: &Command) -> Vec<usize> {
    let Some(shape) = command.program().and_then(searcher) else { return Vec::new() };
    let (roles, words) = (roles(command, shape), command.words.get(1..).unwrap_or_default());
    // What an option takes that is cut short nobody can tell: `--incl .env`.
    let is_cut = |text: &str| {
        let long = text.strip_prefix("--").filter(|long| !long.is_empty() && !shape.long.contains(long));
        long.is_some_and(|long| shape.long.iter().any(|name| name.starts_with(long)))
    };
    let is_sure = looks_for(command) && !words.iter().filter_map(Word::text).any(is_cut);
    let pattern = roles.iter().position(|role| *role == Role::Plain).filter(|_| is_sure);
    let is_spared = |at: usize, role: Role<'_>| match role {
        Role::Value("--exclude" | "--exclude-dir") => words.get(at).is_some_and(|word| word.text().is_some()),
        _ => Some(at) == pattern,
    };
    roles.into_iter().enumerate().filter(|(at, role)| is_spared(*at, *role)).map(|(at, _)| at).collect()
}

/// Whether the files that it changes stand in what it reads.
pub(super) fn patches(command: &Command) -> bool {
    command.program().is_some_and(|program| program == "patch" || (program == "git" && matches!(verb(command), Some("apply" | "am"))))
}

/// What `git` is told to do.
fn verb(command: &Command) -> Option<&str> {
    let words = without_options(command.words.get(1..).unwrap_or_default());
    words.iter().filter_map(Word::text).find(|word| !word.starts_with('-'))
}

/// Whether it takes away, moves, changes or opens up what it names.
pub(super) fn changes(command: &Command) -> bool {
    // Of `-i$X` the beginning is known.
    let words = || command.words.iter().skip(1).map(|word| beginning(word).0);
    let has = |flag: &str| words().any(|word| word.starts_with(flag));
    // `-Ei` edits in place, as `-i` does.
    let in_place = |flags: &str| flags.trim_start_matches(|flag: char| "nErszu".contains(flag)).starts_with('i');
    let edits = |word: &str| word.strip_prefix('-').is_some_and(in_place);
    let edits_by_name = |word: &str| {
        let name = word.split('=').next().unwrap_or_default();
        name.len() > 2 && ["--in-place", "--inplace"].iter().any(|known| known.starts_with(name))
    };
    // `zip -m` takes away what it has packed.
    let moves = |word: &str| match word.strip_prefix("--") {
        Some(long) => long.starts_with("mo"),
        None => word.strip_prefix('-').is_some_and(|flags| flags.contains('m')),
    };
    // Up to the first letter that takes a value.
    let cluster = |word: &str, valued: &[char], flag: char| {
        let flags = word.strip_prefix('-').filter(|flags| !flags.starts_with('-'));
        flags.and_then(|flags| flags.split(valued).next()).is_some_and(|flags| flags.contains(flag))
    };
    let is_one = |word: &str, names: &[&str]| names.iter().any(|name| word.eq_ignore_ascii_case(name));
    let act = || words().find(|word| !word.is_empty() && !word.starts_with('-')).unwrap_or_default();
    command.program().is_none_or(|program| {
        TAKERS.contains(&program)
            || repacks(command)
            || (program == "git" && verb(command).is_some_and(|verb| TAKING.contains(&verb)))
            || (program == "find" && has("-delete"))
            || (["sed", "gsed", "yq"].contains(&program) && words().any(|word| edits(word) || edits_by_name(word)))
            || (program == "zip" && words().any(moves))
            || (["tar", "bsdtar", "gtar"].contains(&program) && has("--rem"))
            || (program == "sort" && (has("--o") || words().any(|word| cluster(word, &['S', 'T', 'k', 't'], 'o'))))
            || ((program.starts_with("perl") || program.starts_with("ruby"))
                && words().any(|word| cluster(word, &['C', 'D', 'E', 'F', 'I', 'M', 'e', 'm', 'r', 'x'], 'i')))
            // What is packed is taken away.
            || (program.starts_with("7z") && words().any(|word| is_one(word, &["-sdel"])))
            || (program == "rar" && (is_one(act(), &["m", "mf"]) || words().any(|word| is_one(word, &["-df", "-dr", "-dw"]))))
    })
}

/// Whether it is known to leave alone what it names, or what it does with that is looked at.
pub(super) fn leaves_alone(command: &Command) -> bool {
    const SHOWING: &[&str] = &["bat", "column", "less", "more", "nl", "rev", "strings", "tac", "toolgate", "yq"];
    command.program().is_some_and(|program| is_known(program) || SHOWING.contains(&program))
}

/// Whether it puts another file, packed or unpacked, in the place of the one that it names.
pub(super) fn repacks(command: &Command) -> bool {
    let shows = |word: &str| match word.strip_prefix("--") {
        Some(long) => ["stdout", "to-stdout", "test", "list"].contains(&long),
        // What stands behind some letters is their value; and not all of them list with `-l`.
        None => {
            let lists = command.program().is_some_and(|program| !program.contains("bz") && !program.contains("lz4"));
            let flags = word.strip_prefix('-').and_then(|flags| flags.split(['C', 'D', 'F', 'M', 'S', 'T', 'b', 'o', 'p']).next());
            flags.is_some_and(|flags| flags.contains(['c', 't']) || (lists && flags.contains('l')))
        }
    };
    let packs = command.program().is_some_and(|program| PACKERS.contains(&program));
    packs && !command.words.iter().skip(1).filter_map(Word::text).take_while(|word| *word != "--").any(shows)
}

/// Whether it reads whole trees.
pub(super) fn reads_trees(command: &Command) -> bool {
    command
        .program()
        .is_some_and(|program| ["cp", "grep", "egrep", "fgrep", "rg", "ag", "tar", "zip", "scp", "rsync", "diff", "7z"].contains(&program))
}

/// Whether the files that it works on come from elsewhere.
pub(super) fn is_told_files(command: &Command) -> bool {
    let has = |flag: &str| command.words.iter().filter_map(Word::text).any(|word| word.starts_with(flag));
    command.program().is_some_and(|program| program == "cpio" || (program == "tar" && has("-T")) || (program == "zip" && has("-@")))
        || has("--files-from")
        || has("--files0-from")
}
