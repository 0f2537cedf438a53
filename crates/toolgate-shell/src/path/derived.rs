//! Determines files whose names a command composes: backups of changed files, and pieces of a split
//! file.

use crate::ShellCommand;
use crate::program::implicit_writes::certain_arguments;
use crate::program::options;
use crate::program::options::{BASE_SYNTAX, ProgramSyntax};
use crate::word::ShellWord;

/// Returns the files that a command writes under names that it composes.
pub(crate) fn derived_files(command: &ShellCommand) -> Vec<ShellWord> {
    const BACKUP_SYNTAX: ProgramSyntax = ProgramSyntax {
        short_with_value: "Sgmot",
        long_with_value: &["group", "mode", "owner", "suffix", "target-directory"],
        ..BASE_SYNTAX
    };
    // Most of these letters have another meaning for `rsync`.
    const RSYNC_SYNTAX: ProgramSyntax =
        ProgramSyntax { short_with_value: "@BMTef", long_with_value: &["suffix"], ..BASE_SYNTAX };
    let (Some(program), words) = (command.program(), certain_arguments(command)) else {
        return Vec::new();
    };
    match program {
        "sed" | "gsed" => sed_backup_files(words),
        "cp" | "install" | "ln" | "mv" => backup_files(words, &BACKUP_SYNTAX, &["-S", "--suffix"]),
        "rsync" => backup_files(words, &RSYNC_SYNTAX, &["--suffix"]),
        "patch" if has_custom_patch_backups(words) => vec![ShellWord::unknown(false)],
        "split" | "csplit" => split_file_names(program, words),
        _ => Vec::new(),
    }
}

/// Returns the backup files with a suffix: `cp -S .old`.
fn backup_files(words: &[ShellWord], shape: &ProgramSyntax, names: &[&str]) -> Vec<ShellWord> {
    let parsed = options::parse_options(words, shape);
    let Some(suffix) = parsed.values(names).pop() else { return Vec::new() };
    parsed.operands.into_iter().map(|file| file.append(&suffix)).collect()
}

/// Returns the backup files of `sed -i.old`. Other spellings of the suffix are not supported.
fn sed_backup_files(words: &[ShellWord]) -> Vec<ShellWord> {
    let ending = |text: &str| {
        let ending = text.strip_prefix("-i").or_else(|| text.strip_prefix("--in-place="));
        ending.filter(|ending| !ending.is_empty()).map(ShellWord::known)
    };
    let Some(ending) = words.iter().filter_map(ShellWord::text).filter_map(ending).next_back()
    else {
        return Vec::new();
    };
    let files = words.iter().filter(|word| word.text().is_none_or(|text| !text.starts_with('-')));
    files.map(|file| file.clone().append(&ending)).collect()
}

/// Returns whether `patch` composes the names of its backup files in another way.
fn has_custom_patch_backups(words: &[ShellWord]) -> bool {
    const PATCH_SYNTAX: ProgramSyntax = ProgramSyntax {
        short_with_value: "BDFVYdgioprz",
        long_with_value: &["basename-prefix", "prefix", "suffix"],
        ..BASE_SYNTAX
    };
    options::parse_options(words, &PATCH_SYNTAX).has(&[
        "-B",
        "-Y",
        "-z",
        "--basename-prefix",
        "--prefix",
        "--suffix",
    ])
}

/// Returns the pieces of a file, whose names are a prefix and a counter.
fn split_file_names(program: &str, words: &[ShellWord]) -> Vec<ShellWord> {
    const SPLIT_SYNTAX: ProgramSyntax = ProgramSyntax {
        short_with_value: "Cablnt",
        long_with_value: &[
            "additional-suffix",
            "bytes",
            "filter",
            "line-bytes",
            "lines",
            "number",
            "separator",
            "suffix-length",
        ],
        ..BASE_SYNTAX
    };
    const CSPLIT_SYNTAX: ProgramSyntax = ProgramSyntax {
        short_with_value: "bfn",
        long_with_value: &["digits", "prefix", "suffix-format"],
        ..BASE_SYNTAX
    };
    if program == "split" {
        let parsed = options::parse_options(words, &SPLIT_SYNTAX);
        return parsed
            .operands
            .into_iter()
            .skip(1)
            .map(|prefix| prefix.append(&ShellWord::unknown_name()))
            .collect();
    }
    let parsed = options::parse_options(words, &CSPLIT_SYNTAX);
    // The format of the counter may contain more of the path.
    let counter = if parsed.has(&["-b", "--suffix-format"]) {
        ShellWord::unknown(false)
    } else {
        ShellWord::unknown_name()
    };
    let mut prefix = parsed.values(&["-f", "--p", "--prefix"]);
    // Without an option, `csplit` uses a default prefix.
    if prefix.is_empty() {
        prefix.push(ShellWord::known("xx"));
    }
    // The word after an abbreviated option is an operand as well.
    let is_abbreviated = parsed.has_exactly("--p");
    prefix
        .into_iter()
        .chain(parsed.operands.into_iter().filter(|_| is_abbreviated))
        .map(|prefix| prefix.append(&counter))
        .collect()
}
