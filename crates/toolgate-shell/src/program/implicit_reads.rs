//! Detects directory trees that a command reads as a whole, with files that its words do not name.
//!
//! Examples are trees that are searched, packed or compared.

use super::options::{self, BASE_SYNTAX, ParsedOptions, ProgramSyntax};
use crate::exec_options::is_exec_option;
use crate::path::pattern::multi_part_suffixes;
use crate::path::working_dir::{MAX_DIRECTORIES, UNKNOWN_DIRECTORY, has_unknown_parent, join_path};
use crate::program::filled_directories::{
    filled_directories, find_start_directories, module_unpack_directories,
};
use crate::program::implicit_writes::{
    certain_arguments, current_directory, is_archive_creation, is_archive_module,
    relative_to_start, writer_syntax,
};
use crate::program::tables::SEARCH_PROGRAMS;
use crate::word::{Certainty, ShellWord, WordPart, can_intersect, combine_certainty};
use crate::{PathPattern, ShellCommand, StdinSource, base_name, skip_git_options};

/// Maximum length of a partly known word. A longer one may be any path.
const MAX_TREE_WORD_CHARS: usize = 4_096;

/// Returns whether a word only selects files for a search, or is a pattern for a program that shows
/// only names.
pub(crate) fn is_non_file_word(command: &ShellCommand, word: &ShellWord) -> bool {
    const EXCLUDE_OPTIONS: &[&str] = &["--exclude=", "--exclude-dir="];
    // `--include` with a plain name names a file that is read.
    let is_pattern = word.text().is_none_or(|text| text.contains(['*', '?', '[']));
    let is_file_selection = |text: &str| {
        EXCLUDE_OPTIONS.iter().any(|option| text.starts_with(*option))
            || (is_pattern && text.starts_with("--include="))
    };
    let is_selection_spelling = |spelling: &Vec<WordPart>| matches!(spelling.first(), Some(WordPart::Text(text)) if is_file_selection(text));
    // A word that may split can contain more than the option's value.
    let can_split = word.can_split && word.text().is_none() && !word.is_pattern();
    let is_list = word.spellings().len() > 1
        && word
            .spellings()
            .iter()
            .all(|spelling| matches!(spelling.as_slice(), [WordPart::Text(_)]));
    let is_search_selection = command.program().is_some_and(is_search_program)
        && !can_split
        && !is_list
        && word.spellings().iter().all(is_selection_spelling);
    // These programs leave the excluded files out.
    let leaves_out = matches!(command.program(), Some("tar" | "bsdtar" | "gtar" | "rsync"))
        && word.text().is_some_and(|text| text.starts_with("--exclude="));
    is_search_selection
        || leaves_out
        || (matches!(command.program(), Some("du" | "ls" | "stat"))
            && word.text().is_none()
            && word.is_pattern())
}

pub(crate) fn searcher_syntax(program: &str) -> Option<&'static ProgramSyntax> {
    SEARCH_PROGRAMS.iter().find(|shape| shape.programs.contains(&program))
}

pub(crate) fn is_search_program(program: &str) -> bool {
    searcher_syntax(program).is_some()
}

/// Describes the trees that a command reads as a whole.
#[derive(Default)]
struct DirectoryTrees {
    roots: Vec<ShellWord>,
    /// Only some of the files in the trees are read, as far as is known.
    is_partial: bool,
    /// Names of directories, and of files, that are excluded.
    excluded: (Vec<ShellWord>, Vec<ShellWord>),
}

/// Returns the trees that a command reads as a whole.
///
/// With `feeds`, the files that are found become words of another command.
fn find_read_trees(command: &ShellCommand, feeds_command: bool) -> DirectoryTrees {
    let (Some(program), words) =
        (command.program().filter(|_| !command.is_unlikely), certain_arguments(command))
    else {
        return DirectoryTrees::default();
    };
    if let Some(shape) = searcher_syntax(program) {
        // Only a pipe, or text in the command, certainly replaces the search of a directory.
        return find_searched_trees(
            program,
            options::parse_options(words, shape),
            matches!(command.stdin, Some(StdinSource::Pipe | StdinSource::Text(_))),
        );
    }
    match program {
        "tar" | "bsdtar" | "gtar" | "jar" | "7z" | "7za" | "7zr" | "7zz" | "pax" => {
            let parsed =
                options::parse_options(words, writer_syntax(program).unwrap_or(&BASE_SYNTAX));
            if !filled_directories(command).is_empty() && !is_archive_creation(program, &parsed) {
                return DirectoryTrees::default();
            }
            let directories = parsed.values(&["-C", "--directory", "--cd"]);
            // The option sets the directory for the words after it.
            let is_directory_option = |(at, word): &(usize, &ShellWord)| {
                let short = |text: &str| {
                    (*at == 0 || text.starts_with('-'))
                        && !text.starts_with("--")
                        && text.contains('C')
                };
                word.text().is_some_and(|text| {
                    text.starts_with("--d") || text.starts_with("--cd") || short(text)
                })
            };
            let before: Vec<&ShellWord> = words
                .iter()
                .enumerate()
                .take_while(|word| !is_directory_option(word))
                .map(|(_, word)| word)
                .collect();
            let within = |word: &ShellWord| -> Vec<ShellWord> {
                let in_start_directory = directories.is_empty() || before.contains(&word);
                directories
                    .iter()
                    .map(|to| relative_to_start(word, Some(to)))
                    .chain(in_start_directory.then(|| word.clone()))
                    .collect()
            };
            // The effect of `--exclude` depends on its position and on other options, so it is
            // ignored.
            let added = parsed.values(&["--add-file"]);
            if directories.len() > 1
                && directories.len() * (parsed.operands.len() + added.len())
                    > MAX_DIRECTORIES * MAX_DIRECTORIES
            {
                return DirectoryTrees {
                    roots: vec![ShellWord::known(UNKNOWN_DIRECTORY)],
                    ..DirectoryTrees::default()
                };
            }
            DirectoryTrees {
                roots: parsed.operands.iter().chain(&added).flat_map(within).collect(),
                ..DirectoryTrees::default()
            }
        }
        "zip" | "diff" => {
            const COMPARE_SYNTAX: ProgramSyntax =
                ProgramSyntax { long_with_value: &["from-file", "to-file"], ..BASE_SYNTAX };
            let parsed = options::parse_options(words, &COMPARE_SYNTAX);
            let compared = parsed.values(&["--from-file", "--to-file"]);
            DirectoryTrees {
                roots: parsed.operands.into_iter().chain(compared).collect(),
                ..DirectoryTrees::default()
            }
        }
        "git" => DirectoryTrees {
            roots: git_compared_paths(skip_git_options(words)),
            ..DirectoryTrees::default()
        },
        "scp" | "sftp" => {
            let mut roots =
                options::parse_options(words, writer_syntax(program).unwrap_or(&BASE_SYNTAX))
                    .operands;
            roots.pop();
            DirectoryTrees { roots, ..DirectoryTrees::default() }
        }
        "find" | "fd" | "fdfind" if feeds_command || words.iter().any(is_exec_option) => {
            let mut roots = if program == "find" {
                find_start_directories(words)
            } else {
                options::parse_options(words, &BASE_SYNTAX).operands
            };
            if roots.is_empty() || program != "find" {
                roots.push(current_directory());
            }
            DirectoryTrees { roots, is_partial: true, ..DirectoryTrees::default() }
        }
        _ if program.starts_with("python") && module_unpack_directories(words).is_empty() => {
            DirectoryTrees {
                roots: if words.iter().any(is_archive_module) {
                    words.to_vec()
                } else {
                    Vec::new()
                },
                ..DirectoryTrees::default()
            }
        }
        _ => DirectoryTrees::default(),
    }
}

/// Returns the paths that `git` reads outside of its repository.
fn git_compared_paths(words: &[ShellWord]) -> Vec<ShellWord> {
    let Some((verb, rest)) = words.split_first() else { return Vec::new() };
    let parsed = options::parse_options(rest, &BASE_SYNTAX);
    let compares_any_files = parsed.has(&["--no-index"]);
    let is_outside = |word: &ShellWord| {
        word.text().is_some_and(|text| text.starts_with(['/', '~']) || text.starts_with(".."))
    };
    match verb.text() {
        Some("grep") if compares_any_files => {
            parsed.operands.into_iter().chain([current_directory()]).collect()
        }
        Some("diff") if compares_any_files => parsed.operands,
        // `git diff` implies `--no-index` for two files if one is outside of the repository.
        Some("diff") if parsed.operands.len() > 1 => {
            parsed.operands.into_iter().filter(is_outside).collect()
        }
        _ => Vec::new(),
    }
}

fn find_searched_trees(program: &str, parsed: ParsedOptions, has_input: bool) -> DirectoryTrees {
    const RECURSIVE_OPTIONS: &[&str] =
        &["-d", "-r", "-R", "--dereference-recursive", "--directories", "--recursive"];
    if ["ack", "ag", "ug", "ugrep"].contains(&program) {
        return DirectoryTrees {
            roots: possible_search_roots(parsed, has_input),
            ..DirectoryTrees::default()
        };
    }
    let deep = !["grep", "egrep", "fgrep"].contains(&program) || parsed.has(RECURSIVE_OPTIONS);
    let has_pattern = parsed.has(&["-e", "-f", "--file", "--regexp"]);
    // File names alone are not secret.
    if !deep || parsed.has_exactly("--files") || (parsed.operands.is_empty() && !has_pattern) {
        return DirectoryTrees::default();
    }
    let without = if program.ends_with("grep") {
        // With `--include` as well, it is not clear which of the two options applies.
        let files =
            if parsed.has(&["--include"]) { Vec::new() } else { parsed.values(&["--exclude"]) };
        (parsed.values(&["--exclude-dir"]), files)
    } else {
        (Vec::new(), Vec::new())
    };
    let mut roots: Vec<ShellWord> =
        parsed.operands.into_iter().skip(usize::from(!has_pattern)).collect();
    // `grep -r` searches the directory even if it has input.
    if roots.is_empty() && (!has_input || program != "rg") {
        roots.push(current_directory());
    }
    DirectoryTrees { roots, is_partial: false, excluded: without }
}

/// Returns the operands of a program whose options are not known exactly.
///
/// Every operand may be searched, because the pattern may be another word.
fn possible_search_roots(parsed: ParsedOptions, has_input: bool) -> Vec<ShellWord> {
    let max_roots = 1 + parsed.count_without_value("ABCDGJKMNOWdefgmpt");
    let has_pattern = parsed.has(&["-e", "-f", "--file", "--match", "--regexp"]);
    let reads = has_input && !parsed.has(&["--nofilter"]);
    let mut roots = parsed.operands;
    if !reads && roots.len() <= max_roots && (has_pattern || !roots.is_empty()) {
        roots.push(current_directory());
    }
    roots
}

impl PathPattern<'_> {
    /// Returns whether a command reads this path as part of a tree, from one of these directories.
    pub(crate) fn match_tree_read(
        &self,
        command: &ShellCommand,
        directories: &[String],
        feeds_command: bool,
        lenient: bool,
    ) -> Certainty {
        let trees = find_read_trees(command, feeds_command);
        if trees.roots.is_empty() {
            return Certainty::No;
        }
        let resolved = command.known_directory().and_then(ShellWord::text).map(|path| {
            let mut all: Vec<String> =
                directories.iter().map(|directory| join_path(directory, path, self.home)).collect();
            all.sort();
            all.dedup();
            all
        });
        let from = resolved.as_deref().unwrap_or(directories);
        let match_root = |root: &ShellWord| match root.text() {
            Some(path) => {
                let read = |from: &String| match self.match_relative_parent(from, path) {
                    Certainty::Yes
                        if self.is_excluded(&join_path(from, path, self.home), &trees.excluded) =>
                    {
                        Certainty::No
                    }
                    certainty => certainty,
                };
                let read = from.iter().map(read);
                // With many directories, the one that the command runs in is not known.
                if from.len() > 2 {
                    combine_certainty(read)
                } else {
                    read.max().unwrap_or(Certainty::No)
                }
            }
            None if root.is_unknown() && lenient => Certainty::No,
            None if root.is_unknown()
                || from.len() > 8
                || from.iter().any(|from| self.can_be_under(from, root)) =>
            {
                Certainty::Maybe
            }
            None => Certainty::No,
        };
        let certainty = trees.roots.iter().map(match_root).max().unwrap_or(Certainty::No);
        if trees.is_partial { certainty.min(Certainty::Maybe) } else { certainty }
    }

    /// Returns whether a partly known word may be this path or a directory above it.
    fn can_be_under(&self, from: &str, word: &ShellWord) -> bool {
        let lengths = self.path.match_indices('/').map(|(at, _)| at).chain([self.path.len()]);
        let above: Vec<&str> = lengths
            .filter_map(|end| self.path.get(..end))
            .filter(|path| !path.is_empty())
            .collect();
        word.spellings().iter().any(|spelling| {
            let is_whole = matches!(self.clean_spelling(spelling).first(), Some(WordPart::Text(text)) if text.starts_with(['/', '~']));
            // From an unknown directory, the word may be any path.
            if spelling.iter().map(WordPart::len).sum::<usize>() > MAX_TREE_WORD_CHARS || !(is_whole || from.starts_with('/')) {
                return true;
            }
            // The unknown beginning may be such that the rest continues like one of these paths.
            if let [WordPart::AnyText, rest @ ..] = spelling.as_slice() {
                let rest = self.clean_spelling(rest);
                let is_last = |path: &str| matches!(rest.as_slice(), [WordPart::Text(text)] if text.trim_matches('/') == base_name(path));
                let is_end = |end: &str| {
                    can_intersect(&rest, &ShellWord::parse_rule_pattern(end))
                        || can_intersect(&rest, &ShellWord::parse_rule_pattern(&format!("{end}/")))
                };
                if above.iter().any(|path| is_last(path) || multi_part_suffixes(path).any(is_end)) {
                    return true;
                }
            }
            let spelling = self.resolve_spelling(from, spelling);
            (!spelling.contains(&WordPart::AnyText) && has_unknown_parent(&spelling))
                || above.iter().any(|path| {
                    can_intersect(&spelling, &ShellWord::parse_rule_pattern(path))
                        || can_intersect(&spelling, &ShellWord::parse_rule_pattern(&format!("{path}/")))
                })
        })
    }

    /// Returns whether a search under a directory excludes this path.
    ///
    /// A pattern excludes a directory on the way to the path, or every path with that name.
    fn is_excluded(
        &self,
        directory: &str,
        (directories, files): &(Vec<ShellWord>, Vec<ShellWord>),
    ) -> bool {
        let relative_path = self.path.strip_prefix(directory).unwrap_or_default();
        let is_in = |names: &[ShellWord], part: &str| {
            let mut plain = names
                .iter()
                .filter_map(ShellWord::text)
                .filter(|name| !name.contains(['?', '[', '/', '\\']));
            plain.any(|name| toolgate_text::matches_glob(name, part))
        };
        let mut parts = relative_path.split('/').filter(|part| !part.is_empty()).rev();
        let last = parts.next().is_some_and(|part| is_in(directories, part) && is_in(files, part));
        last || parts.any(|part| is_in(directories, part))
    }
}
