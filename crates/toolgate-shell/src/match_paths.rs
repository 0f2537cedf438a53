//! Matches the files that a command names, reads or changes against path patterns.

use std::collections::HashSet;

use crate::word::{Certainty, ShellWord};

use crate::nested_command;
use crate::path::pattern::{PathPattern, split_paths};
use crate::path::{derived, working_dir};
use crate::program::filled_directories::filled_directories;
use crate::program::{file_effects, implicit_reads, implicit_writes};
use crate::word::partial;
use crate::{ShellAnalysis, ShellCommand, StdinSource, skip_git_options};

/// Maximum number of bytes in partly known words; a longer command may mean anything.
const MAX_PARTIAL_WORD_BYTES: usize = 1_024;

/// Maximum number of bytes including guessed commands, whose words are compared repeatedly.
const MAX_GUESSED_WORD_BYTES: usize = 8 * MAX_PARTIAL_WORD_BYTES;

impl ShellAnalysis {
    /// Returns whether the command names one of these files.
    ///
    /// With `lenient`, words that only the running shell knows are ignored, unless the command
    /// changes something. If `from` is absent, trees that are only read count if `trees` is set.
    pub fn match_paths(
        &self,
        places: &[PathPattern<'_>],
        lenient: bool,
        trees: bool,
        from: Option<&str>,
    ) -> Certainty {
        let letters = |command: &ShellCommand| {
            let words: &[ShellWord] =
                if file_effects::names_no_files(command) { &[] } else { &command.words };
            words.iter().chain(&command.redirect_files).map(ShellWord::partial_len).sum::<usize>()
        };
        let written =
            self.commands.iter().filter(|command| !command.is_guessed).map(letters).sum::<usize>();
        if written > MAX_PARTIAL_WORD_BYTES
            || self.commands.iter().map(letters).sum::<usize>() > MAX_GUESSED_WORD_BYTES
        {
            return self
                .without_partial_words()
                .match_paths(places, lenient, trees, from)
                .max(Certainty::Maybe);
        }
        let changes_directory = |command: &ShellCommand| {
            matches!(command.program(), Some("cd" | "pushd" | "popd") | None)
                || working_dir::has_directory_option(command)
        };
        let moves = self.commands.iter().any(changes_directory);
        let directories = from
            .zip(places.first())
            .map(|(from, place)| self.reachable_directories(from, place.home));
        let feeds_command = self
            .commands
            .iter()
            .any(|command| matches!(command.program(), Some("xargs" | "parallel")));
        let values = self.possible_path_values();
        let prefixes = partial::path_prefixes(&values);
        let guessed: Vec<ShellCommand> =
            self.commands.iter().flat_map(nested_command::possible_changes).collect();
        let match_in_command = |command: &ShellCommand,
                                place: &PathPattern<'_>,
                                may_be_parent: bool| {
            let words = command.words.get(1..).unwrap_or_default();
            // The directory that `git -C` names is not what `git` changes.
            let operands =
                if command.program() == Some("git") { skip_git_options(words) } else { words };
            let changes = file_effects::is_file_change(command) && !command.is_unlikely;
            let is_named_here =
                |word: &ShellWord| from.is_some_and(|from| place.can_be_named_from(from, word));
            let weigh = |word: &ShellWord, certainty: Certainty| match certainty {
                // A file pattern matches files in the current directory. A word that starts with an
                // unknown part may continue to the place.
                Certainty::Maybe
                    if !word.is_unknown()
                        && place.is_unrelated_pattern(word)
                        && !changes
                        && !moves
                        && !is_named_here(word)
                        && !place.can_match_with_prefixes(&prefixes, word) =>
                {
                    Certainty::No
                }
                Certainty::Maybe if lenient && word.is_unknown() && !changes => Certainty::No,
                Certainty::Maybe
                    if lenient && word.is_unknown_path() && !changes && !may_be_parent =>
                {
                    Certainty::No
                }
                // Many files share a name, but relative to `from` the word may mean the place.
                Certainty::Yes
                    if lenient
                        && place.has_only_same_name_as_word(word)
                        && !changes
                        && !moves
                        && !is_named_here(word) =>
                {
                    let is_open = place.has_rare_name()
                        && !command.is_vague
                        && !command.is_unlikely
                        && !file_effects::is_file_preserving(command);
                    if is_open { Certainty::Maybe } else { Certainty::No }
                }
                certainty => certainty,
            };
            let skipped = file_effects::non_file_positions(command);
            let named = words.iter().enumerate().filter(|(at, _)| {
                !file_effects::names_no_files(command) && skipped.binary_search(at).is_err()
            });
            let named = named.filter(|(_, word)| !implicit_reads::is_non_file_word(command, word));
            let sent = implicit_writes::uploaded_files(command);
            let named = named.map(|(_, word)| word).chain(&sent);
            let named = named
                .map(|word| weigh(word, place.match_word(word)))
                .max()
                .unwrap_or(Certainty::No);
            let specs = if changes { implicit_writes::git_pathspecs(command) } else { Vec::new() };
            let named = named.max(
                specs.iter().map(|word| place.match_word(word)).max().unwrap_or(Certainty::No),
            );
            let files = command
                .redirect_files
                .iter()
                .map(|word| place.match_word(word))
                .max()
                .unwrap_or(Certainty::No);
            let best = |of: bool, f: &dyn Fn(&ShellWord) -> Certainty| {
                if of { words.iter().map(f).max().unwrap_or(Certainty::No) } else { Certainty::No }
            };
            let in_code = best(file_effects::runs_code(command), &|word| {
                weigh(word, place.match_in_code(word))
            });
            let is_reader = file_effects::is_tree_reader(command);
            let read = match &directories {
                Some(directories) => {
                    place.match_tree_read(command, directories, feeds_command, lenient)
                }
                None if !trees => Certainty::No,
                None if moves && !lenient => best(is_reader, &|word| {
                    place.match_absolute_parent(word).max(place.match_parent(word))
                }),
                None => best(is_reader, &|word| place.match_absolute_parent(word)),
            };
            let directory = command.known_directory();
            let mut written = implicit_writes::implicitly_written_files(command);
            written.extend(derived::derived_files(command));
            let written = written
                .iter()
                .map(|file| place.match_word(&implicit_writes::relative_to_start(file, directory)))
                .max();
            let is_open = implicit_writes::unknown_output_files(command)
                .iter()
                .any(|file| place.can_match_partially(file));
            let written = written.unwrap_or(Certainty::No).max(if is_open {
                Certainty::Maybe
            } else {
                Certainty::No
            });
            // An unpacked archive may contain any file.
            let filled = filled_directories(command)
                .iter()
                .map(|to| {
                    place
                        .match_parent(&implicit_writes::relative_to_start(to, directory))
                        .min(Certainty::Maybe)
                })
                .max();
            let reached = read.max(written).max(filled.unwrap_or(Certainty::No));
            // A file that is put into a directory keeps its name there.
            let mut created = implicit_writes::created_files(command);
            let operands = if created.is_empty() {
                operands
            } else {
                operands.split_last().map_or(operands, |(_, sources)| sources)
            };
            created.extend(implicit_writes::created_link(command));
            let match_created = |file: &ShellWord| {
                let is_relative = file
                    .text()
                    .is_none_or(|text| text.starts_with("./") || text.starts_with("../"));
                let file = implicit_writes::relative_to_start(file, directory);
                place.match_word(&file).max(place.match_parent(&file)).min(if is_relative {
                    Certainty::Maybe
                } else {
                    Certainty::Yes
                })
            };
            let created = created.iter().map(match_created).max().unwrap_or(Certainty::No);
            let clears = changes && !implicit_writes::is_index_only_change(command);
            let parents = if clears {
                operands.iter().map(|word| place.match_changed_parent(word, directory)).max()
            } else {
                None
            };
            let patched = match &command.stdin {
                Some(StdinSource::Text(text)) if file_effects::is_patch_program(command) => {
                    place.match_in_code(text).max(place.match_patch(text))
                }
                Some(StdinSource::Pipe | StdinSource::Unknown)
                    if file_effects::is_patch_program(command) && !lenient =>
                {
                    Certainty::Maybe
                }
                _ => Certainty::No,
            };
            let external = if file_effects::has_external_file_list(command) && !lenient {
                Certainty::Maybe
            } else {
                Certainty::No
            };
            named
                .max(files)
                .max(in_code)
                .max(parents.unwrap_or(Certainty::No))
                .max(created)
                .max(reached)
                .max(patched)
                .max(external)
        };
        // Without `lenient`, every unknown word is in doubt, whatever it expands to.
        let expansions: &[ShellWord] = if lenient { &values } else { &[] };
        let match_expansions = |place: &PathPattern<'_>| {
            expansions
                .iter()
                .map(|text| place.match_in_code(text).min(Certainty::Maybe))
                .max()
                .unwrap_or(Certainty::No)
        };
        let match_place = |place: &PathPattern<'_>| {
            let may_be_parent = expansions.iter().any(|text| place.has_parent_in(text));
            let named = self
                .commands
                .iter()
                .map(|command| match_in_command(command, place, may_be_parent))
                .max()
                .unwrap_or(Certainty::No);
            let guessed = guessed
                .iter()
                .map(|command| {
                    match_in_command(command, place, may_be_parent).min(Certainty::Maybe)
                })
                .max()
                .unwrap_or(Certainty::No);
            named.max(guessed).max(match_expansions(place))
        };
        places.iter().map(match_place).max().unwrap_or(Certainty::No)
    }

    /// Returns a copy in which every partly known word is entirely unknown.
    fn without_partial_words(&self) -> Self {
        let plain = |word: &ShellWord| {
            if word.text().is_some() { word.clone() } else { ShellWord::unknown(word.can_split) }
        };
        let mut same = self.clone();
        for command in &mut same.commands {
            command.words = command.words.iter().map(plain).collect();
            command.redirect_files = command.redirect_files.iter().map(plain).collect();
        }
        same
    }

    /// Collects the paths that an unknown word may expand to.
    ///
    /// They come from variables, from the input of `xargs` and similar programs, and from words
    /// that are only printed.
    fn possible_path_values(&self) -> Vec<ShellWord> {
        let is_open = |word: &ShellWord| word.text().is_none() && !word.is_pattern();
        let opens = |command: &ShellCommand| {
            !file_effects::names_no_files(command) && command.words.iter().skip(1).any(is_open)
        };
        if !self.commands.iter().any(opens) {
            return Vec::new();
        }
        let input_path = |command: &ShellCommand| match (command.program(), &command.stdin) {
            (
                Some("mapfile" | "parallel" | "read" | "readarray" | "xargs"),
                Some(StdinSource::Text(text)),
            ) => text.text().map(str::to_owned),
            _ => None,
        };
        let may_have_path = |text: &String| text.contains(['/', '~']) || text.contains("HOME");
        let recorded = self
            .variable_values
            .iter()
            .cloned()
            .chain(self.commands.iter().filter_map(input_path))
            .filter(may_have_path);
        let recorded = recorded.map(|text| text.replace("${HOME}", "~").replace("$HOME", "~"));
        // Text for people contains names and slashes that are not paths.
        let is_path = |text: &&str| {
            *text == "~" || (text.contains('/') && text.chars().any(|letter| letter != '/'))
        };
        let printed = self
            .commands
            .iter()
            .filter(|command| file_effects::names_no_files(command))
            .flat_map(|command| command.words.iter().skip(1));
        let printed = printed
            .flat_map(|word| word.texts())
            .flat_map(split_paths)
            .filter(is_path)
            .map(str::to_owned);
        let mut seen = HashSet::new();
        recorded
            .chain(printed)
            .filter(|text| seen.insert(text.clone()))
            .map(ShellWord::known)
            .collect()
    }
}
