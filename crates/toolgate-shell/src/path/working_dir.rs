//! Tracks the directories that a command enters, and resolves paths from there.

use std::collections::HashMap;

use crate::path::pattern::expand_home_path;
use crate::program::implicit_writes::certain_arguments;
use crate::program::options::split_name_value;
use crate::word::{Certainty, ShellWord, WordPart, can_intersect};
use crate::{PathPattern, ShellAnalysis, ShellCommand, normalize_path};

/// Maximum number of directories that are tracked. With more, the directory is unknown.
pub(crate) const MAX_DIRECTORIES: usize = 64;
/// Maximum number of steps for the search of reachable directories.
const MAX_SEARCH_STEPS: usize = 16_384;
pub(crate) const UNKNOWN_DIRECTORY: &str = "~+";

impl ShellAnalysis {
    /// Returns the directories that a command may run in: `from` and all that are reachable from
    /// there.
    pub(crate) fn reachable_directories(&self, from: &str, home: &str) -> Vec<String> {
        let (mut all, mut steps) = (vec![normalize_path(from)], 0);
        let mut tried: HashMap<&str, usize> = HashMap::new();
        for to in self.commands.iter().flat_map(entered_directories) {
            // Since the last attempt no directory was added, so the result is the same.
            if tried.insert(to, all.len()) == Some(all.len()) {
                continue;
            }
            steps += all.len();
            let reached: Vec<String> =
                all.iter().map(|directory| join_path(directory, to, home)).collect();
            for directory in reached {
                if !all.contains(&directory) {
                    all.push(directory);
                }
            }
            if all.len() > MAX_DIRECTORIES || steps > MAX_SEARCH_STEPS {
                return vec![UNKNOWN_DIRECTORY.to_owned()];
            }
        }
        all
    }
}

/// Returns the directories that options of a command select, with `None` for an unknown one.
fn option_directories(command: &ShellCommand) -> Vec<Option<&str>> {
    const LAUNCHER_OPTIONS_WITH_VALUE: &[&str] =
        &["-C", "-D", "-R", "-T", "-U", "-g", "-h", "-p", "-r", "-t", "-u"];
    let words = command.words.get(1..).unwrap_or_default();
    // Options of these programs apply to the program that they start.
    let mut is_launcher_option =
        matches!(command.program(), Some("doas" | "env" | "runuser" | "su" | "sudo"));
    let is_login_option = |text: &str| match (command.program(), text.strip_prefix("--")) {
        (Some("runuser" | "su" | "sudo"), Some(long)) => long.starts_with("lo"),
        (Some("sudo"), None) => text.starts_with('-') && text.contains('i'),
        (Some("runuser" | "su"), None) => {
            text == "-" || (text.starts_with('-') && text.contains('l'))
        }
        _ => false,
    };
    let (mut found, mut before) = (Vec::new(), None);
    for (at, word) in words.iter().enumerate() {
        let previous = std::mem::replace(&mut before, word.text());
        let Some(text) = word.text() else { continue };
        is_launcher_option = is_launcher_option
            && (text.starts_with('-')
                || text.contains('=')
                || previous.is_some_and(|option| LAUNCHER_OPTIONS_WITH_VALUE.contains(&option)));
        // The home directory of another user may be any directory.
        if is_launcher_option && is_login_option(text) {
            found.push(Some(UNKNOWN_DIRECTORY));
        }
        let value = match text.strip_prefix("--") {
            Some(long) => {
                let (name, value) = split_name_value(long);
                let is_like =
                    |option: &str, least: usize| name.len() >= least && option.starts_with(name);
                (is_like("chdir", 1)
                    || is_like("directory", 5)
                    || is_like("work-tree", 5)
                    || name == "cd")
                    .then_some(value)
            }
            None => match text.strip_prefix('-').and_then(|flags| flags.split_once(['C', 'D'])) {
                // For most programs, these letters have another meaning.
                Some((before, value))
                    if is_launcher_option
                        || (before.is_empty()
                            && (value.is_empty() || value.starts_with(['/', '.', '~']))) =>
                {
                    Some(Some(value).filter(|value| !value.is_empty()))
                }
                _ => None,
            },
        };
        if let Some(value) = value {
            found.push(value.or_else(|| words.get(at + 1).and_then(ShellWord::text)));
        }
    }
    found
}

/// Returns whether a spelling contains `..` after an unknown part, so the path is not known.
pub(crate) fn has_unknown_parent(spelling: &[WordPart]) -> bool {
    let has_parent_step = |part: &WordPart| matches!(part, WordPart::Text(text) if text.contains("/../") || text.ends_with("/.."));
    spelling.iter().skip(1).any(has_parent_step)
}

/// Returns whether a path, as written, leads through a directory that a process has open.
///
/// Such a path is another way to the same files. A descriptor alone is usually a pipe.
pub(crate) fn is_process_path(path: &str) -> bool {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/').filter(|part| !matches!(*part, "" | ".")) {
        match (parts.as_slice(), part) {
            (["dev", "fd" | "stdin" | "stdout" | "stderr", ..], "..") => return true,
            (["dev", "fd", _, ..] | ["dev", "stdin" | "stdout" | "stderr", ..], _) => return true,
            (["proc", _, ..], "cwd" | "fd" | "root") => return true,
            (_, "..") => {
                parts.pop();
            }
            _ => parts.push(part),
        }
    }
    false
}

/// Returns whether an option makes a command, or one that it starts, run in another directory.
pub(crate) fn has_directory_option(command: &ShellCommand) -> bool {
    !option_directories(command).is_empty()
}

/// Returns the directories that a command enters, or that it makes another command enter.
pub(crate) fn entered_directories(command: &ShellCommand) -> Vec<&str> {
    // The directory of `tar` only applies to its operands, and is checked with them.
    if command.is_unlikely || matches!(command.program(), Some("tar" | "bsdtar" | "gtar")) {
        return Vec::new();
    }
    if !matches!(command.program(), Some("cd" | "chdir" | "pushd")) {
        return option_directories(command).into_iter().flatten().collect();
    }
    let words = certain_arguments(command);
    let is_option = |word: &ShellWord| word.text().is_some_and(|text| text.starts_with('-'));
    // `cd`, `cd --` and `cd -P` go to the home directory, and `cd -` to the previous one.
    if words.iter().all(|word| is_option(word) && word.text() != Some("-")) {
        return vec!["~"];
    }
    words.iter().filter(|word| !is_option(word)).filter_map(ShellWord::text).collect()
}

/// Joins a path to a directory, as far as that directory is known.
pub(crate) fn join_path(directory: &str, path: &str, home: &str) -> String {
    let path = expand_home_path(path, home);
    let joined = match path.starts_with('/') {
        true => path,
        false if path.starts_with('~') || !directory.starts_with('/') => {
            return UNKNOWN_DIRECTORY.to_owned();
        }
        false => format!("{directory}/{path}"),
    };
    // From such a path, the next `cd` may lead to any directory.
    if is_process_path(&joined) { "/proc/self/cwd".to_owned() } else { normalize_path(&joined) }
}

impl PathPattern<'_> {
    /// Returns whether this place is under a directory that is named relative to another one.
    pub fn match_relative_parent(&self, from: &str, path: &str) -> Certainty {
        let joined = join_path(from, path, self.home);
        let is_unresolved = !joined.starts_with('/');
        // `/proc` is another way to the same files, and a name may be in any directory.
        let is_process = joined.starts_with("/proc/")
            && ["/cwd", "/fd", "/root"].iter().any(|part| joined.contains(part));
        if is_unresolved || is_process || self.is_bare_name() || self.path.starts_with('*') {
            return Certainty::Maybe;
        }
        if joined == "/" || self.is_under(&joined) { Certainty::Yes } else { Certainty::No }
    }

    /// Returns whether a word may name this place from a directory. Words that exclude files are
    /// ignored.
    pub(crate) fn can_be_named_from(&self, directory: &str, word: &ShellWord) -> bool {
        let under = format!("{}/*", self.path);
        let Some(text) = word.text() else {
            let can_name = |spelling: &Vec<WordPart>| {
                let is_open = spelling.first() == Some(&WordPart::AnyText);
                let spelling = self.resolve_spelling(directory, spelling);
                !is_open
                    && (has_unknown_parent(&spelling)
                        || can_intersect(&spelling, &ShellWord::parse_rule_pattern(&self.path))
                        || can_intersect(&spelling, &ShellWord::parse_rule_pattern(&under)))
            };
            return word.spellings().iter().any(can_name);
        };
        if text.starts_with("--exclude") {
            return false;
        }
        // The path may follow an option or a sign.
        let glued = text.get(2..).filter(|_| text.starts_with('-'));
        let values = text
            .match_indices(['=', ':', '@', ','])
            .take(16)
            .filter_map(|(at, _)| text.get(at + 1..));
        std::iter::once(text).chain(glued).chain(values).any(|path| {
            let joined = join_path(directory, path, self.home);
            toolgate_text::matches_glob(&self.path, &joined)
                || toolgate_text::matches_glob(&under, &joined)
        })
    }

    /// Resolves a partly known spelling from a directory.
    pub(crate) fn resolve_spelling(&self, directory: &str, spelling: &[WordPart]) -> Vec<WordPart> {
        let mut spelling = self.clean_spelling(spelling);
        let prefix = match spelling.first_mut() {
            Some(WordPart::Text(text)) => std::mem::take(text),
            _ => String::new(),
        };
        let joined =
            if prefix.starts_with(['/', '~']) { prefix } else { format!("{directory}/{prefix}") };
        if is_process_path(&joined) {
            return vec![WordPart::AnyText];
        }
        if matches!(spelling.as_slice(), [WordPart::Text(_)]) {
            return vec![WordPart::Text(normalize_path(&joined))];
        }
        // The rest of the last part is not known.
        let (above, last) = joined.rsplit_once('/').unwrap_or(("", joined.as_str()));
        spelling.insert(
            0,
            WordPart::Text(format!("{}/{last}", normalize_path(above).trim_end_matches('/'))),
        );
        spelling
    }
}
