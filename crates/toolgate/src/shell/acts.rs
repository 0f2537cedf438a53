//! What programs do with the files that they are given.

use super::Command;
use super::inner::language;
use super::known::SHELLS;
use super::word::Word;

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
pub(super) fn looks_for(command: &Command) -> bool {
    let gives = |word: &str| {
        let short = word.strip_prefix('-').is_some_and(|flags| !flags.starts_with('-') && flags.contains(['e', 'f']));
        short || word.starts_with("--reg") || word.starts_with("--fi")
    };
    let given = || command.words.iter().filter_map(Word::text).any(gives);
    command.program().is_some_and(|program| ["grep", "egrep", "fgrep", "rg", "ag"].contains(&program)) && !given()
}

/// Whether the files that it changes stand in what it reads.
pub(super) fn patches(command: &Command) -> bool {
    let applies = || command.words.get(1).and_then(Word::text).is_some_and(|verb| verb == "apply" || verb == "am");
    command.program().is_some_and(|program| program == "patch" || (program == "git" && applies()))
}

/// Whether it takes away, moves, changes or opens up what it names.
pub(super) fn changes(command: &Command) -> bool {
    const TAKERS: &[&str] = &[
        "bwrap", "chattr", "chgrp", "chmod", "chown", "cp", "dd", "install", "ln", "mount", "mv", "patch", "rm", "rmdir", "rsync",
        "setfacl", "shred", "srm", "tee", "touch", "trash", "truncate", "unlink",
    ];
    let has = |flag: &str| command.words.iter().filter_map(Word::text).any(|word| word.starts_with(flag));
    let verb = || command.words.iter().skip(1).filter_map(Word::text).find(|word| !word.starts_with('-'));
    let unmakes = || verb().is_some_and(|verb| ["rm", "mv", "checkout", "restore", "clean", "reset", "stash", "apply"].contains(&verb));
    command.program().is_none_or(|program| {
        TAKERS.contains(&program)
            || (program == "git" && unmakes())
            || (program == "find" && has("-delete"))
            || (program == "sed" && (has("-i") || has("--in-place")))
            || has("-o") && program == "sort"
    })
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
