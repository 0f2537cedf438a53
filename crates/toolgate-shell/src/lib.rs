#![doc = include_str!("../README.md")]

#[cfg(test)]
mod differential_tests;
mod env_vars;
mod exec_options;
mod git_commands;
mod interpreter;
mod match_paths;
mod match_program;
mod nested_command;
mod nesting_budget;
mod parse;
mod path;
mod program;
mod word;
mod wrapper;
mod write_then_run;

use std::collections::HashSet;

pub use crate::path::pattern::{PathPattern, normalize_path};
use nesting_budget::NestingBudget;
use path::working_dir;
use program::file_effects;
pub use word::Certainty;
use word::{ShellWord, WordPart};

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
        let budget = NestingBudget::initial_budget();
        crate::parse::analyze_text(text, NestingBudget::top_level(&budget))
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

    /// Returns whether all words are known, and they alone determine the affected files.
    pub fn is_fully_known(&self) -> bool {
        let has_other_files = |command: &ShellCommand| {
            file_effects::has_external_file_list(command)
                || (file_effects::is_patch_program(command) && command.stdin.is_some())
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
        let enters_home =
            |command: &ShellCommand| working_dir::entered_directories(command).contains(&"~");
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
