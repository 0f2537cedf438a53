#![doc = include_str!("../README.md")]

#[cfg(test)]
mod differential_tests;
mod env_vars;
mod nested_command;
mod parse;
mod path;
mod program;
mod word;
mod wrapper;
mod write_then_run;

use std::collections::HashSet;

pub use crate::path::pattern::{PathPattern, normalize_path};
pub use word::Certainty;
use word::{ShellWord, WordPart, combine_certainty};

/// Describes one program with its words and the files of its redirections.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShellCommand {
    pub(crate) words: Vec<ShellWord>,
    pub(crate) redirect_files: Vec<ShellWord>,
    /// Where its standard input comes from, if that is a pipe, a file or text in the command.
    pub(crate) stdin: Option<StdinSource>,
    /// The directory that it certainly runs in.
    pub(crate) working_directory: Option<ShellWord>,
    /// The command is only considered because it follows a program that runs other programs.
    pub(crate) is_unlikely: bool,
    /// The start of the command is a guess, so its words also belong to another command.
    pub(crate) is_guessed: bool,
    /// The first word is probably not a program, so the program's effect on files proves nothing.
    pub(crate) is_vague: bool,
}

/// Describes what a command reads from its standard input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StdinSource {
    Text(ShellWord),
    /// The output of another command.
    Pipe,
    Unknown,
}

/// Maximum number of commands that are analyzed.
const MAX_COMMANDS: usize = 4_096;
/// Maximum number of bytes in partly known words; a longer command may mean anything.
const MAX_PARTIAL_WORD_BYTES: usize = 1_024;
/// Maximum number of bytes including guessed commands, whose words are compared repeatedly.
const MAX_GUESSED_WORD_BYTES: usize = 8 * MAX_PARTIAL_WORD_BYTES;

/// Holds what a shell command would run and write.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShellAnalysis {
    pub(crate) commands: Vec<ShellCommand>,
    /// The reasons why parts of the command cannot be analyzed.
    pub(crate) opaque_reasons: Vec<String>,
    /// The names of the files that are written. The next field has their paths.
    pub(crate) written_names: HashSet<String>,
    pub(crate) written_paths: Vec<String>,
    /// Files with commands or code that are read and run. Their content was checked when it was
    /// written.
    pub(crate) scripts: Vec<ShellCommand>,
    /// The values of variables, as written and as expanded. An unknown word may expand to one of
    /// them.
    pub(crate) variable_values: Vec<String>,
}

impl ShellAnalysis {
    /// Parses and analyzes a command.
    pub fn analyze(text: &str) -> Self {
        let budget = crate::nested_command::NestingBudget::initial_budget();
        crate::parse::analyze_text(text, crate::nested_command::NestingBudget::top_level(&budget))
    }

    fn opaque(reason: impl Into<String>) -> Self {
        Self { opaque_reasons: vec![reason.into()], ..Self::default() }
    }

    fn merge(&mut self, other: Self) {
        if self.commands.len() + other.commands.len() > MAX_COMMANDS {
            if self.opaque_reasons.is_empty() {
                self.opaque_reasons.push("it contains too many commands".to_owned());
            }
            return;
        }
        self.commands.extend(other.commands);
        self.opaque_reasons.extend(other.opaque_reasons);
        self.written_names.extend(other.written_names);
        self.written_paths.extend(other.written_paths);
        self.scripts.extend(other.scripts);
        self.variable_values.extend(other.variable_values);
    }

    /// Returns the first reason why a part of the command cannot be analyzed.
    pub fn first_opaque_reason(&self) -> Option<&str> {
        self.opaque_reasons.first().map(String::as_str)
    }

    /// Returns whether the command runs a program followed by words in the order of `pattern`.
    ///
    /// A word such as `-rf` is a set of flags.
    pub fn match_program(&self, pattern: &str) -> Certainty {
        let pattern_words: Vec<&str> = pattern.split_whitespace().collect();
        let match_either = |command: &ShellCommand| {
            match_command(&command.words, &pattern_words)
                .max(crate::nested_command::can_run_match(command, |words| {
                    match_command(words, &pattern_words)
                }))
        };
        // A guessed script may not run at all.
        let script = |script: &ShellCommand| {
            match_command(&script.words, &pattern_words).min(if script.is_guessed {
                Certainty::Maybe
            } else {
                Certainty::Yes
            })
        };
        self.commands
            .iter()
            .map(match_either)
            .chain(self.scripts.iter().map(script))
            .max()
            .unwrap_or(Certainty::No)
    }

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
            let words: &[ShellWord] = if crate::program::file_effects::names_no_files(command) {
                &[]
            } else {
                &command.words
            };
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
                || crate::path::working_dir::has_directory_option(command)
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
        let prefixes = crate::word::partial::path_prefixes(&values);
        let guessed: Vec<ShellCommand> =
            self.commands.iter().flat_map(crate::nested_command::possible_changes).collect();
        let match_in_command = |command: &ShellCommand,
                                place: &PathPattern<'_>,
                                may_be_parent: bool| {
            let words = command.words.get(1..).unwrap_or_default();
            // The directory that `git -C` names is not what `git` changes.
            let operands =
                if command.program() == Some("git") { skip_git_options(words) } else { words };
            let changes =
                crate::program::file_effects::is_file_change(command) && !command.is_unlikely;
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
                        && !crate::program::file_effects::is_file_preserving(command);
                    if is_open { Certainty::Maybe } else { Certainty::No }
                }
                certainty => certainty,
            };
            let skipped = crate::program::file_effects::non_file_positions(command);
            let named = words.iter().enumerate().filter(|(at, _)| {
                !crate::program::file_effects::names_no_files(command)
                    && skipped.binary_search(at).is_err()
            });
            let named = named.filter(|(_, word)| {
                !crate::program::implicit_reads::is_non_file_word(command, word)
            });
            let sent = crate::program::implicit_writes::uploaded_files(command);
            let named = named.map(|(_, word)| word).chain(&sent);
            let named = named
                .map(|word| weigh(word, place.match_word(word)))
                .max()
                .unwrap_or(Certainty::No);
            let specs = if changes {
                crate::program::implicit_writes::git_pathspecs(command)
            } else {
                Vec::new()
            };
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
            let in_code = best(crate::program::file_effects::runs_code(command), &|word| {
                weigh(word, place.match_in_code(word))
            });
            let is_reader = crate::program::file_effects::is_tree_reader(command);
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
            let mut written = crate::program::implicit_writes::implicitly_written_files(command);
            written.extend(crate::path::derived::derived_files(command));
            let written = written
                .iter()
                .map(|file| {
                    place.match_word(&crate::program::implicit_writes::relative_to_start(
                        file, directory,
                    ))
                })
                .max();
            let is_open = crate::program::implicit_writes::unknown_output_files(command)
                .iter()
                .any(|file| place.can_match_partially(file));
            let written = written.unwrap_or(Certainty::No).max(if is_open {
                Certainty::Maybe
            } else {
                Certainty::No
            });
            // An unpacked archive may contain any file.
            let filled = crate::program::implicit_writes::filled_directories(command)
                .iter()
                .map(|to| {
                    place
                        .match_parent(&crate::program::implicit_writes::relative_to_start(
                            to, directory,
                        ))
                        .min(Certainty::Maybe)
                })
                .max();
            let reached = read.max(written).max(filled.unwrap_or(Certainty::No));
            // A file that is put into a directory keeps its name there.
            let mut created = crate::program::implicit_writes::created_files(command);
            let operands = if created.is_empty() {
                operands
            } else {
                operands.split_last().map_or(operands, |(_, sources)| sources)
            };
            created.extend(crate::program::implicit_writes::created_link(command));
            let match_created = |file: &ShellWord| {
                let is_relative = file
                    .text()
                    .is_none_or(|text| text.starts_with("./") || text.starts_with("../"));
                let file = crate::program::implicit_writes::relative_to_start(file, directory);
                place.match_word(&file).max(place.match_parent(&file)).min(if is_relative {
                    Certainty::Maybe
                } else {
                    Certainty::Yes
                })
            };
            let created = created.iter().map(match_created).max().unwrap_or(Certainty::No);
            let clears = changes && !crate::program::implicit_writes::is_index_only_change(command);
            let parents = if clears {
                operands.iter().map(|word| place.match_changed_parent(word, directory)).max()
            } else {
                None
            };
            let patched = match &command.stdin {
                Some(StdinSource::Text(text))
                    if crate::program::file_effects::is_patch_program(command) =>
                {
                    place.match_in_code(text).max(place.match_patch(text))
                }
                Some(StdinSource::Pipe | StdinSource::Unknown)
                    if crate::program::file_effects::is_patch_program(command) && !lenient =>
                {
                    Certainty::Maybe
                }
                _ => Certainty::No,
            };
            let external =
                if crate::program::file_effects::has_external_file_list(command) && !lenient {
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
            !crate::program::file_effects::names_no_files(command)
                && command.words.iter().skip(1).any(is_open)
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
            .filter(|command| crate::program::file_effects::names_no_files(command))
            .flat_map(|command| command.words.iter().skip(1));
        let printed = printed
            .flat_map(|word| word.texts())
            .flat_map(crate::path::pattern::split_paths)
            .filter(is_path)
            .map(str::to_owned);
        let mut seen = HashSet::new();
        recorded
            .chain(printed)
            .filter(|text| seen.insert(text.clone()))
            .map(ShellWord::known)
            .collect()
    }

    /// Returns whether all words are known, and they alone determine the affected files.
    pub fn is_fully_known(&self) -> bool {
        let has_other_files = |command: &ShellCommand| {
            crate::program::file_effects::has_external_file_list(command)
                || (crate::program::file_effects::is_patch_program(command)
                    && command.stdin.is_some())
        };
        let has_known_words = |command: &ShellCommand| {
            command.words.iter().chain(&command.redirect_files).all(|word| word.text().is_some())
        };
        self.commands.iter().all(|command| has_known_words(command) && !has_other_files(command))
    }

    /// Returns whether a word may be a path from the home directory.
    pub fn can_name_home(&self) -> bool {
        let from_home = |word: &ShellWord| {
            word.spellings()
                .iter()
                .flatten()
                .any(|part| matches!(part, WordPart::Text(text) if text.contains('~')))
        };
        let has_home_input = |command: &ShellCommand| matches!(&command.stdin, Some(StdinSource::Text(text)) if from_home(text));
        // `cd` without arguments goes to the home directory.
        let enters_home = |command: &ShellCommand| {
            crate::path::working_dir::entered_directories(command).contains(&"~")
        };
        let has_home_value =
            || self.variable_values.iter().any(|text| text.contains('~') || text.contains("HOME"));
        let names_home = |command: &ShellCommand| {
            command.words.iter().chain(&command.redirect_files).any(from_home)
                || has_home_input(command)
                || enters_home(command)
        };
        has_home_value() || self.commands.iter().any(names_home)
    }
}

/// Returns the last part of a program's path, which is its name.
pub(crate) fn base_name(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

impl ShellCommand {
    /// Returns the name of the program, if it is known.
    pub(crate) fn program(&self) -> Option<&str> {
        self.words.first().and_then(ShellWord::text).map(base_name)
    }

    /// Returns the directory that the command certainly works in.
    ///
    /// Options of `git` itself may select another directory.
    pub(crate) fn known_directory(&self) -> Option<&ShellWord> {
        let words = self.words.get(1..).unwrap_or_default();
        self.working_directory.as_ref().filter(|_| {
            self.program() != Some("git") || skip_git_options(words).len() == words.len()
        })
    }
}

/// Returns whether words are a command that matches the wanted words.
fn match_command(words: &[ShellWord], pattern: &[&str]) -> Certainty {
    let (Some((program, rest)), Some((first, words))) =
        (pattern.split_first(), words.split_first())
    else {
        return Certainty::No;
    };
    // `git-push` is `git push`.
    if *program == "git"
        && let Some(verb) = first.text().map(base_name).and_then(|name| name.strip_prefix("git-"))
    {
        let words: Vec<ShellWord> = [ShellWord::known("git"), ShellWord::known(verb)]
            .into_iter()
            .chain(words.iter().cloned())
            .collect();
        return match_command(&words, pattern);
    }
    let certainty =
        combine_certainty(first.spellings().iter().map(|spelling| match spelling.as_slice() {
            [WordPart::Text(name)] => ShellWord::known(base_name(name)).match_pattern(program),
            [.., WordPart::Text(end)] if end.contains('/') => {
                ShellWord::known(base_name(end)).match_pattern(program)
            }
            _ => Certainty::Maybe,
        }));
    if certainty == Certainty::No {
        return Certainty::No;
    }
    let (flags, rest): (Vec<&str>, Vec<&str>) = rest.iter().partition(|word| is_flag_cluster(word));
    let flags = flags.iter().map(|flags| match_flags(words, flags)).min().unwrap_or(Certainty::Yes);
    // The subcommand of `git` is its first word that is not an option.
    let words = if *program == "git" { skip_git_options(words) } else { words };
    // These subcommands do the same as `git push`.
    let pushes = |word: &ShellWord| matches!(word.text(), Some("send-pack" | "http-push"));
    if *program == "git" && rest.first() == Some(&"push") && words.first().is_some_and(pushes) {
        return certainty.min(flags).min(match_in_order(rest.get(1..).unwrap_or_default(), words));
    }
    let verb = match (rest.first(), words.first()) {
        (Some(verb), Some(word)) if *program == "git" => {
            word.match_pattern(verb).max(if word.can_split && word.is_unknown() {
                Certainty::Maybe
            } else {
                Certainty::No
            })
        }
        (Some(_), None) if *program == "git" => Certainty::No,
        _ => Certainty::Yes,
    };
    certainty.min(flags).min(verb).min(match_in_order(&rest, words))
}

/// Returns the words of `git` after its own options.
fn skip_git_options(words: &[ShellWord]) -> &[ShellWord] {
    let mut rest = words;
    while let Some((first, after)) = rest.split_first() {
        match first.text() {
            Some(
                "-C" | "-c" | "--git-dir" | "--work-tree" | "--namespace" | "--super-prefix"
                | "--attr-source" | "--shallow-file",
            ) => {
                // A word that may expand to nothing can shift the option's value to the subcommand.
                if after.first().is_some_and(|value| value.can_split && value.text().is_none()) {
                    return after;
                }
                rest = after.get(1..).unwrap_or_default();
            }
            Some(text) if text.starts_with('-') => rest = after,
            _ => break,
        }
    }
    rest
}

fn match_flags(words: &[ShellWord], pattern: &str) -> Certainty {
    // For `-r$x`, the beginning is known.
    let known_flags = |word: &ShellWord| match word.spellings() {
        [spelling] => match spelling.first() {
            Some(WordPart::Text(text)) => flag_letters(text),
            _ => None,
        },
        _ => None,
    };
    let flags: String = words.iter().filter_map(known_flags).collect::<String>().to_lowercase();
    if pattern.to_lowercase().chars().skip(1).all(|flag| flags.contains(flag)) {
        return Certainty::Yes;
    }
    // File names rarely look like flags.
    let open = |word: &ShellWord| {
        word.is_unknown()
            || (word.text().is_none()
                && word.match_pattern("-*") == Certainty::Maybe
                && !word.is_pattern())
    };
    // A single word cannot be both a flag and its operand.
    let operands =
        words.iter().filter(|word| word.text().is_none_or(|text| !text.starts_with('-'))).count();
    if words.iter().any(|word| open(word) && (word.can_split || operands > 1)) {
        Certainty::Maybe
    } else {
        Certainty::No
    }
}

/// Returns whether a word is a set of flags: `-rf`, but not `--force`, `-delete` or `-`.
fn is_flag_cluster(word: &str) -> bool {
    word.strip_prefix('-').is_some_and(|flags| {
        (1..=3).contains(&flags.len()) && flags.chars().all(char::is_alphabetic)
    })
}

/// Returns the flags of a word: those of `-rf`, and `f` for `--force`.
fn flag_letters(word: &str) -> Option<String> {
    match word.strip_prefix("--") {
        Some(long) => {
            let known = [
                ("recursive", 'r'),
                ("force", 'f'),
                ("delete", 'd'),
                ("all", 'a'),
                ("interactive", 'i'),
                ("hard", 'h'),
            ];
            // Programs accept abbreviated options: `rm --rec`.
            let is_abbreviation =
                |name: &str| long.starts_with(name) || (!long.is_empty() && name.starts_with(long));
            known.iter().find(|(name, _)| is_abbreviation(name)).map(|(_, flag)| flag.to_string())
        }
        None => word.strip_prefix('-').map(str::to_owned),
    }
}

/// Returns whether words follow each other in this order, with others in between.
fn match_in_order(pattern_words: &[&str], words: &[ShellWord]) -> Certainty {
    let least = |level: Certainty| {
        let mut words = words.iter();
        pattern_words
            .iter()
            .all(|pattern_words| words.any(|word| word.match_pattern(pattern_words) >= level))
    };
    if least(Certainty::Yes) {
        Certainty::Yes
    // A word that may expand to several words can be all wanted words.
    } else if least(Certainty::Maybe)
        || words.iter().any(|word| word.can_split && word.is_unknown())
    {
        Certainty::Maybe
    } else {
        Certainty::No
    }
}
