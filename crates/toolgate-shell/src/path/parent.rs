//! Determines whether a word names a directory above a path.

use crate::path::pattern::{PathPattern, normalize_path, path_after_letters, split_paths};
use crate::path::working_dir;
use crate::program::implicit_writes::relative_to_start;
use crate::word;
use crate::word::{Certainty, ShellWord, WordPart, can_intersect};

/// Returns a word and the values that are glued to an option in it, except for exclusions.
fn words_with_option_values(word: &ShellWord) -> Vec<ShellWord> {
    let text = word
        .text()
        .filter(|text| text.starts_with('-') && !text.starts_with("--exclude"))
        .unwrap_or_default();
    let value = if text.starts_with("--") {
        text.split_once('=').map(|(_, value)| value)
    } else {
        text.get(2..)
    };
    let values =
        value.filter(|value| !value.is_empty()).into_iter().chain(path_after_letters(text));
    std::iter::once(word.clone()).chain(values.map(ShellWord::known)).collect()
}

impl PathPattern<'_> {
    /// Returns whether a text contains the path of a directory above this place.
    pub(crate) fn has_parent_in(&self, word: &ShellWord) -> bool {
        let mut paths =
            split_paths(word.text().unwrap_or_default()).filter(|path| path.contains(['/', '~']));
        paths.any(|path| self.match_parent(&ShellWord::known(path)) != Certainty::No)
    }

    /// Returns whether this path is under a directory that a word names with an absolute path.
    pub(crate) fn match_absolute_parent(&self, word: &ShellWord) -> Certainty {
        let Some(text) = word.text() else { return Certainty::No };
        let glued = text.get(2..).filter(|_| text.starts_with('-')).unwrap_or_default();
        let value = text.split_once('=').map(|(_, value)| value).unwrap_or_default();
        let named =
            [text, glued, value].into_iter().filter(|path| self.expand_home(path).starts_with('/'));
        named.map(|path| self.match_parent(&ShellWord::known(path))).max().unwrap_or(Certainty::No)
    }

    /// Returns whether this path is under a directory that a word names.
    pub(crate) fn match_parent(&self, word: &ShellWord) -> Certainty {
        let parts: Vec<&str> = self.path.split('/').filter(|part| !part.is_empty()).collect();
        let Some(text) = word.text() else {
            // A pattern may match the directory that contains this path.
            let parent = parts.iter().rev().nth(1).copied().unwrap_or_default();
            let has_parent = !parent.is_empty()
                && word.spellings().iter().any(|spelling| {
                    can_intersect(
                        &self.clean_spelling(spelling),
                        &ShellWord::parse_rule_pattern(parent),
                    )
                });
            let above = |spelling: &word::WordSpelling| match spelling.as_slice() {
                [WordPart::Text(text)] => {
                    self.match_parent(&ShellWord::known(text.as_str())) != Certainty::No
                }
                spelling => self.can_be_parent(spelling),
            };
            let has_parent = has_parent || word.spellings().iter().any(above);
            return self.match_word(word).max(if has_parent {
                Certainty::Maybe
            } else {
                Certainty::No
            });
        };
        if working_dir::is_process_path(&self.expand_home(text)) {
            return self.match_word(word).max(Certainty::Maybe);
        }
        // The home directory of another user, `~+`, and the pathspecs of `git` for a whole
        // repository are not known.
        if self.expand_home(text).starts_with('~')
            || [":/", ":(", ":!", ":^"].iter().any(|sign| text.starts_with(sign))
        {
            return Certainty::Maybe;
        }
        let path = normalize_path(&self.expand_home(text));
        match path.as_str() {
            // The current directory may be any directory.
            "" | "." | ".." | "*" => return Certainty::Maybe,
            "/" => return Certainty::Yes,
            path if path.starts_with('/') => {
                return if self.is_under(path) { Certainty::Yes } else { Certainty::No };
            }
            _ => {}
        }
        // From an unknown directory, the path ends like one of the directories above this one.
        let given_parts: Vec<&str> = path.split('/').skip_while(|part| *part == "..").collect();
        if given_parts.is_empty() {
            return Certainty::Maybe;
        }
        let ends_at = |above: usize| {
            parts
                .get(..parts.len().saturating_sub(above))
                .is_some_and(|above| above.ends_with(&given_parts))
        };
        match (1..parts.len()).find(|above| ends_at(*above)) {
            // A single name such as `bin` is common, so it proves less.
            Some(1) if given_parts.len() > 1 || path.starts_with('.') => Certainty::Yes,
            Some(_) => Certainty::Maybe,
            None => Certainty::No,
        }
    }

    /// Returns whether this path is under a directory that a changing command names, alone or glued
    /// to an option.
    pub(crate) fn match_changed_parent(
        &self,
        word: &ShellWord,
        directory: Option<&ShellWord>,
    ) -> Certainty {
        let is_current = |word: &ShellWord| matches!(word.text(), Some("." | "./"));
        let under = |word: &ShellWord| match word.text() {
            // An empty word names no directory.
            Some("") => Certainty::No,
            _ => self.match_parent(&if is_current(word) {
                relative_to_start(word, directory)
            } else {
                word.clone()
            }),
        };
        words_with_option_values(word).iter().map(under).max().unwrap_or(Certainty::No)
    }

    /// Returns whether a spelling may be a directory above this path.
    ///
    /// An absolute spelling is compared with the whole path, and a relative one with its endings.
    pub(super) fn can_be_parent(&self, spelling: &[WordPart]) -> bool {
        let mut spelling_parts = self.strip_parent_steps(spelling);
        if let Some(WordPart::Text(text)) = spelling_parts.last_mut() {
            while text.ends_with('/') || text.ends_with("/.") {
                text.pop();
            }
        }
        let is_whole =
            matches!(spelling_parts.first(), Some(WordPart::Text(text)) if text.starts_with('/'));
        let mut above = self
            .path
            .match_indices('/')
            .filter_map(|(at, _)| self.path.get(..at))
            .filter(|above| !above.is_empty());
        let can_be =
            |path: &str| can_intersect(&spelling_parts, &ShellWord::parse_rule_pattern(path));
        let can_end = |above: &str| {
            let mut suffixes = above
                .match_indices('/')
                .filter_map(|(at, _)| above.get(at + 1..))
                .filter(|end| !end.starts_with('*'));
            suffixes.any(can_be)
        };
        above.any(
            |above| if is_whole { above.starts_with('/') && can_be(above) } else { can_end(above) },
        )
    }

    /// Returns whether the path leads through a directory. `*` in the path matches any text without
    /// `/`.
    pub(crate) fn is_under(&self, directory: &str) -> bool {
        let mut place = self.path.split('/').filter(|part| !part.is_empty());
        let mut directory_parts = directory.split('/').filter(|part| !part.is_empty());
        self.path.starts_with('/')
            && directory_parts.all(|part| {
                place.next().is_some_and(|pattern| toolgate_text::matches_glob(pattern, part))
            })
            && place.next().is_some()
    }
}
