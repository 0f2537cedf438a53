//! Detects directory trees that a command reads as a whole, with files that its words do not name.
//!
//! Examples are trees that are searched, packed or compared.

use super::options::{self, BASE, Given, Shape};
use crate::path::pattern::long_ends;
use crate::path::working_dir::{ANYWHERE, MOST, is_detour, joined};
use crate::program::implicit_writes::{by_module, certain_arguments, fills, from, here, is_packing_module, packs, starts, writer};
use crate::program::tables::SEARCHERS;
use crate::word::{Part, Sure, Word, meet, sum};
use crate::wrapper::runs_another;
use crate::{Command, Fed, Place, base, without_options};

/// Maximum length of a partly known word. A longer one may be any path.
const LONGEST: usize = 4_096;

/// Returns whether a word only selects files for a search, or is a pattern for a program that shows
/// only names.
pub(crate) fn is_no_file(command: &Command, word: &Word) -> bool {
    const CHOOSING: &[&str] = &["--exclude=", "--exclude-dir="];
    // `--include` with a plain name names a file that is read.
    let is_pattern = word.text().is_none_or(|text| text.contains(['*', '?', '[']));
    let is_one = |text: &str| CHOOSING.iter().any(|option| text.starts_with(*option)) || (is_pattern && text.starts_with("--include="));
    let begins = |spelling: &Vec<Part>| matches!(spelling.first(), Some(Part::Text(text)) if is_one(text));
    // A word that may split can contain more than the option's value.
    let falls_apart = word.can_split && word.text().is_none() && !word.is_pattern();
    let named = word.spellings().len() > 1 && word.spellings().iter().all(|spelling| matches!(spelling.as_slice(), [Part::Text(_)]));
    let chooses = command.program().is_some_and(is_search) && !falls_apart && !named && word.spellings().iter().all(begins);
    // These programs leave the excluded files out.
    let leaves_out = matches!(command.program(), Some("tar" | "bsdtar" | "gtar" | "rsync"))
        && word.text().is_some_and(|text| text.starts_with("--exclude="));
    chooses || leaves_out || (matches!(command.program(), Some("du" | "ls" | "stat")) && word.text().is_none() && word.is_pattern())
}

pub(crate) fn searcher(program: &str) -> Option<&'static Shape> {
    SEARCHERS.iter().find(|shape| shape.programs.contains(&program))
}

pub(crate) fn is_search(program: &str) -> bool {
    searcher(program).is_some()
}

/// Describes the trees that a command reads as a whole.
#[derive(Default)]
struct Trees {
    roots: Vec<Word>,
    /// Only some of the files in the trees are read, as far as is known.
    is_partial: bool,
    /// Names of directories, and of files, that are excluded.
    excluded: (Vec<Word>, Vec<Word>),
}

/// Returns the trees that a command reads as a whole.
///
/// With `feeds`, the files that are found become words of another command.
fn trees(command: &Command, feeds: bool) -> Trees {
    let (Some(program), words) = (command.program().filter(|_| !command.is_unlikely), certain_arguments(command)) else {
        return Trees::default();
    };
    if let Some(shape) = searcher(program) {
        // Only a pipe, or text in the command, certainly replaces the search of a directory.
        return searched(program, options::read(words, shape), matches!(command.stdin, Some(Fed::Pipe | Fed::Text(_))));
    }
    match program {
        "tar" | "bsdtar" | "gtar" | "jar" | "7z" | "7za" | "7zr" | "7zz" | "pax" => {
            let given = options::read(words, writer(program).unwrap_or(&BASE));
            if !fills(command).is_empty() && !packs(program, &given) {
                return Trees::default();
            }
            let directories = given.values(&["-C", "--directory", "--cd"]);
            // The option sets the directory for the words after it.
            let goes = |(at, word): &(usize, &Word)| {
                let short = |text: &str| (*at == 0 || text.starts_with('-')) && !text.starts_with("--") && text.contains('C');
                word.text().is_some_and(|text| text.starts_with("--d") || text.starts_with("--cd") || short(text))
            };
            let before: Vec<&Word> = words.iter().enumerate().take_while(|word| !goes(word)).map(|(_, word)| word).collect();
            let within = |word: &Word| -> Vec<Word> {
                let own = directories.is_empty() || before.contains(&word);
                directories.iter().map(|to| from(word, Some(to))).chain(own.then(|| word.clone())).collect()
            };
            // The effect of `--exclude` depends on its position and on other options, so it is
            // ignored.
            let added = given.values(&["--add-file"]);
            if directories.len() > 1 && directories.len() * (given.operands.len() + added.len()) > MOST * MOST {
                return Trees { roots: vec![Word::known(ANYWHERE)], ..Trees::default() };
            }
            Trees { roots: given.operands.iter().chain(&added).flat_map(within).collect(), ..Trees::default() }
        }
        "zip" | "diff" => {
            const BOTH: Shape = Shape { long_with_value: &["from-file", "to-file"], ..BASE };
            let given = options::read(words, &BOTH);
            let also = given.values(&["--from-file", "--to-file"]);
            Trees { roots: given.operands.into_iter().chain(also).collect(), ..Trees::default() }
        }
        "git" => Trees { roots: compared(without_options(words)), ..Trees::default() },
        "scp" | "sftp" => {
            let mut roots = options::read(words, writer(program).unwrap_or(&BASE)).operands;
            roots.pop();
            Trees { roots, ..Trees::default() }
        }
        "find" | "fd" | "fdfind" if feeds || words.iter().any(runs_another) => {
            let mut roots = if program == "find" { starts(words) } else { options::read(words, &BASE).operands };
            if roots.is_empty() || program != "find" {
                roots.push(here());
            }
            Trees { roots, is_partial: true, ..Trees::default() }
        }
        _ if program.starts_with("python") && by_module(words).is_empty() => {
            Trees { roots: if words.iter().any(is_packing_module) { words.to_vec() } else { Vec::new() }, ..Trees::default() }
        }
        _ => Trees::default(),
    }
}

/// Returns the paths that `git` reads outside of its repository.
fn compared(words: &[Word]) -> Vec<Word> {
    let Some((verb, rest)) = words.split_first() else { return Vec::new() };
    let given = options::read(rest, &BASE);
    let is_told = given.has(&["--no-index"]);
    let is_outside = |word: &Word| word.text().is_some_and(|text| text.starts_with(['/', '~']) || text.starts_with(".."));
    match verb.text() {
        Some("grep") if is_told => given.operands.into_iter().chain([here()]).collect(),
        Some("diff") if is_told => given.operands,
        // `git diff` implies `--no-index` for two files if one is outside of the repository.
        Some("diff") if given.operands.len() > 1 => given.operands.into_iter().filter(is_outside).collect(),
        _ => Vec::new(),
    }
}

fn searched(program: &str, given: Given, is_fed: bool) -> Trees {
    const DEEP: &[&str] = &["-d", "-r", "-R", "--dereference-recursive", "--directories", "--recursive"];
    if ["ack", "ag", "ug", "ugrep"].contains(&program) {
        return Trees { roots: searched_somehow(given, is_fed), ..Trees::default() };
    }
    let deep = !["grep", "egrep", "fgrep"].contains(&program) || given.has(DEEP);
    let has_pattern = given.has(&["-e", "-f", "--file", "--regexp"]);
    // File names alone are not secret.
    if !deep || given.has_just("--files") || (given.operands.is_empty() && !has_pattern) {
        return Trees::default();
    }
    let without = if program.ends_with("grep") {
        // With `--include` as well, it is not clear which of the two options applies.
        let files = if given.has(&["--include"]) { Vec::new() } else { given.values(&["--exclude"]) };
        (given.values(&["--exclude-dir"]), files)
    } else {
        (Vec::new(), Vec::new())
    };
    let mut roots: Vec<Word> = given.operands.into_iter().skip(usize::from(!has_pattern)).collect();
    // `grep -r` searches the directory even if it has input.
    if roots.is_empty() && (!is_fed || program != "rg") {
        roots.push(here());
    }
    Trees { roots, is_partial: false, excluded: without }
}

/// Returns the operands of a program whose options are not known exactly.
///
/// Every operand may be searched, because the pattern may be another word.
fn searched_somehow(given: Given, is_fed: bool) -> Vec<Word> {
    let most = 1 + given.bare("ABCDGJKMNOWdefgmpt");
    let has_pattern = given.has(&["-e", "-f", "--file", "--match", "--regexp"]);
    let reads = is_fed && !given.has(&["--nofilter"]);
    let mut roots = given.operands;
    if !reads && roots.len() <= most && (has_pattern || !roots.is_empty()) {
        roots.push(here());
    }
    roots
}

impl Place<'_> {
    /// Returns whether a command reads this path as part of a tree, from one of these directories.
    pub(crate) fn is_read_by(&self, command: &Command, wanders: &[String], feeds: bool, lenient: bool) -> Sure {
        let trees = trees(command, feeds);
        if trees.roots.is_empty() {
            return Sure::No;
        }
        let stands = command.stands().and_then(Word::text).map(|path| {
            let mut all: Vec<String> = wanders.iter().map(|directory| joined(directory, path, self.home)).collect();
            all.sort();
            all.dedup();
            all
        });
        let from = stands.as_deref().unwrap_or(wanders);
        let one = |root: &Word| match root.text() {
            Some(path) => {
                let read = |from: &String| match self.is_searched(from, path) {
                    Sure::Yes if self.is_left_out(&joined(from, path, self.home), &trees.excluded) => Sure::No,
                    sure => sure,
                };
                let read = from.iter().map(read);
                // With many directories, the one that the command runs in is not known.
                if from.len() > 2 { sum(read) } else { read.max().unwrap_or(Sure::No) }
            }
            None if root.is_unknown() && lenient => Sure::No,
            None if root.is_unknown() || from.len() > 8 || from.iter().any(|from| self.may_lie_under(from, root)) => Sure::Maybe,
            None => Sure::No,
        };
        let sure = trees.roots.iter().map(one).max().unwrap_or(Sure::No);
        if trees.is_partial { sure.min(Sure::Maybe) } else { sure }
    }

    /// Returns whether a partly known word may be this path or a directory above it.
    fn may_lie_under(&self, from: &str, word: &Word) -> bool {
        let ends = self.path.match_indices('/').map(|(at, _)| at).chain([self.path.len()]);
        let above: Vec<&str> = ends.filter_map(|end| self.path.get(..end)).filter(|path| !path.is_empty()).collect();
        word.spellings().iter().any(|spelling| {
            let is_whole = matches!(self.cleaned(spelling).first(), Some(Part::Text(text)) if text.starts_with(['/', '~']));
            // From an unknown directory, the word may be any path.
            if spelling.iter().map(Part::len).sum::<usize>() > LONGEST || !(is_whole || from.starts_with('/')) {
                return true;
            }
            // The unknown beginning may be such that the rest continues like one of these paths.
            if let [Part::AnyText, rest @ ..] = spelling.as_slice() {
                let rest = self.cleaned(rest);
                let is_last = |path: &str| matches!(rest.as_slice(), [Part::Text(text)] if text.trim_matches('/') == base(path));
                let is_end = |end: &str| meet(&rest, &Word::wanted(end)) || meet(&rest, &Word::wanted(&format!("{end}/")));
                if above.iter().any(|path| is_last(path) || long_ends(path).any(is_end)) {
                    return true;
                }
            }
            let spelling = self.spelled_from(from, spelling);
            (!spelling.contains(&Part::AnyText) && is_detour(&spelling))
                || above.iter().any(|path| meet(&spelling, &Word::wanted(path)) || meet(&spelling, &Word::wanted(&format!("{path}/"))))
        })
    }

    /// Returns whether a search under a directory excludes this path.
    ///
    /// A pattern excludes a directory on the way to the path, or every path with that name.
    fn is_left_out(&self, directory: &str, (directories, files): &(Vec<Word>, Vec<Word>)) -> bool {
        let way = self.path.strip_prefix(directory).unwrap_or_default();
        let like = |names: &[Word], part: &str| {
            let mut plain = names.iter().filter_map(Word::text).filter(|name| !name.contains(['?', '[', '/', '\\']));
            plain.any(|name| toolgate_text::glob(name, part))
        };
        let mut parts = way.split('/').filter(|part| !part.is_empty()).rev();
        let last = parts.next().is_some_and(|part| like(directories, part) && like(files, part));
        last || parts.any(|part| like(directories, part))
    }
}
