//! Compares partly known words with path patterns.

use std::collections::HashSet;

use crate::PathPattern;
use crate::path::pattern::{expand_home_path, split_paths};
use crate::word::{Certainty, ShellWord, WordPart, WordSpelling, can_intersect};

/// Maximum number of prefixes that are tried. With more, a word may be any path.
const MAX_PREFIXES: usize = 32;
const MAX_TOTAL_PREFIX_BYTES: usize = 1_024;

/// Returns the paths in texts that a word with an unknown beginning may start with.
pub(crate) fn path_prefixes(texts: &[ShellWord]) -> Vec<&str> {
    let all: HashSet<&str> = texts
        .iter()
        .filter_map(ShellWord::text)
        .flat_map(split_paths)
        .filter(|path| path.contains(['/', '~']))
        .collect();
    all.into_iter().collect()
}

impl PathPattern<'_> {
    /// Returns whether a word with an unknown beginning may be this path if it starts with a
    /// prefix.
    pub(crate) fn can_match_with_prefixes(&self, prefixes: &[&str], word: &ShellWord) -> bool {
        let open: Vec<&WordSpelling> = word
            .spellings()
            .iter()
            .filter(|spelling| spelling.first() == Some(&WordPart::AnyText))
            .collect();
        !open.is_empty()
            && (has_too_many_prefixes(prefixes)
                || prefixes.iter().any(|prefix| self.can_match_with_prefix(prefix, &open)))
    }

    fn can_match_with_prefix(&self, prefix: &str, open: &[&WordSpelling]) -> bool {
        let cleaned = self.clean_spelling(&[WordPart::Text(prefix.to_owned())]);
        let Some(WordPart::Text(prefix)) = cleaned.first() else { return false };
        // Skip the expensive comparison: most prefixes have nothing in common with the path.
        let without_parents = prefix.trim_start_matches("../");
        let is_near = without_parents.split('/').any(|part| part == "..")
            || self.path.contains('*')
            || self.path.contains(without_parents)
            || prefix.starts_with(&self.path);
        is_near
            && open.iter().any(|spelling| {
                self.match_word(&replace_first_part(prefix, spelling)) != Certainty::No
            })
    }

    /// Returns whether a partly known word may be this path itself, or an ending of this path.
    pub(crate) fn can_match_partially(&self, word: &ShellWord) -> bool {
        let can_match = |spelling: &WordSpelling| match spelling.first() {
            Some(WordPart::Text(text)) if expand_home_path(text, self.home).starts_with('/') => {
                can_intersect(
                    &self.clean_spelling(spelling),
                    &ShellWord::parse_rule_pattern(&self.path),
                )
            }
            Some(WordPart::Text(_)) => self.can_start_suffix(spelling),
            _ => {
                can_intersect(spelling, &ShellWord::parse_rule_pattern(&format!("*{}", self.path)))
            }
        };
        if self.is_bare_name() {
            self.match_word(word) != Certainty::No
        } else {
            word.spellings().iter().any(can_match)
        }
    }
}

fn has_too_many_prefixes(prefixes: &[&str]) -> bool {
    prefixes.len() > MAX_PREFIXES
        || prefixes.iter().map(|prefix| prefix.len()).sum::<usize>() > MAX_TOTAL_PREFIX_BYTES
}

/// Returns a word whose first part is replaced by a text.
fn replace_first_part(text: &str, spelling: &[WordPart]) -> ShellWord {
    spelling.iter().skip(1).fold(ShellWord::known(text), |word, part| {
        word.append(&match part {
            WordPart::Text(text) => ShellWord::known(text.as_str()),
            WordPart::AnyText => ShellWord::unknown(false),
            WordPart::AnyName | WordPart::AnyFirstChar => ShellWord::unknown_name(),
        })
    })
}
