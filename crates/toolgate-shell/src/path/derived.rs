//! Determines files whose names a command composes: backups of changed files, and pieces of a split
//! file.

use crate::Command;
use crate::program::implicit_writes::certain_arguments;
use crate::program::options;
use crate::program::options::{BASE, Shape};
use crate::word::Word;

/// Returns the files that a command writes under names that it composes.
pub(crate) fn composed(command: &Command) -> Vec<Word> {
    const KEEPING: Shape =
        Shape { short_with_value: "Sgmot", long_with_value: &["group", "mode", "owner", "suffix", "target-directory"], ..BASE };
    // Most of these letters have another meaning for `rsync`.
    const SYNCING: Shape = Shape { short_with_value: "@BMTef", long_with_value: &["suffix"], ..BASE };
    let (Some(program), words) = (command.program(), certain_arguments(command)) else { return Vec::new() };
    match program {
        "sed" | "gsed" => edited(words),
        "cp" | "install" | "ln" | "mv" => kept(words, &KEEPING, &["-S", "--suffix"]),
        "rsync" => kept(words, &SYNCING, &["--suffix"]),
        "patch" if patches_elsewhere(words) => vec![Word::unknown(false)],
        "split" | "csplit" => pieces(program, words),
        _ => Vec::new(),
    }
}

/// Returns the backup files with a suffix: `cp -S .old`.
fn kept(words: &[Word], shape: &Shape, names: &[&str]) -> Vec<Word> {
    let given = options::read(words, shape);
    let Some(ending) = given.values(names).pop() else { return Vec::new() };
    given.operands.into_iter().map(|file| file.then(&ending)).collect()
}

/// Returns the backup files of `sed -i.old`. Other spellings of the suffix are not supported.
fn edited(words: &[Word]) -> Vec<Word> {
    let ending = |text: &str| {
        let ending = text.strip_prefix("-i").or_else(|| text.strip_prefix("--in-place="));
        ending.filter(|ending| !ending.is_empty()).map(Word::known)
    };
    let Some(ending) = words.iter().filter_map(Word::text).filter_map(ending).next_back() else { return Vec::new() };
    let files = words.iter().filter(|word| word.text().is_none_or(|text| !text.starts_with('-')));
    files.map(|file| file.clone().then(&ending)).collect()
}

/// Returns whether `patch` composes the names of its backup files in another way.
fn patches_elsewhere(words: &[Word]) -> bool {
    const PATCH: Shape = Shape { short_with_value: "BDFVYdgioprz", long_with_value: &["basename-prefix", "prefix", "suffix"], ..BASE };
    options::read(words, &PATCH).has(&["-B", "-Y", "-z", "--basename-prefix", "--prefix", "--suffix"])
}

/// Returns the pieces of a file, whose names are a prefix and a counter.
fn pieces(program: &str, words: &[Word]) -> Vec<Word> {
    const SPLIT: Shape = Shape {
        short_with_value: "Cablnt",
        long_with_value: &["additional-suffix", "bytes", "filter", "line-bytes", "lines", "number", "separator", "suffix-length"],
        ..BASE
    };
    const CSPLIT: Shape = Shape { short_with_value: "bfn", long_with_value: &["digits", "prefix", "suffix-format"], ..BASE };
    if program == "split" {
        let given = options::read(words, &SPLIT);
        return given.operands.into_iter().skip(1).map(|begins| begins.then(&Word::unknown_name())).collect();
    }
    let given = options::read(words, &CSPLIT);
    // The format of the counter may contain more of the path.
    let counted = if given.has(&["-b", "--suffix-format"]) { Word::unknown(false) } else { Word::unknown_name() };
    let mut begins = given.values(&["-f", "--p", "--prefix"]);
    // Without an option, `csplit` uses a default prefix.
    if begins.is_empty() {
        begins.push(Word::known("xx"));
    }
    // The word after an abbreviated option is an operand as well.
    let cut = given.has_just("--p");
    begins.into_iter().chain(given.operands.into_iter().filter(|_| cut)).map(|begins| begins.then(&counted)).collect()
}
