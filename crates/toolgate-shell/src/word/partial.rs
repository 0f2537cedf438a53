//! Compares partly known words with path patterns.

use std::collections::HashSet;

use crate::Place;
use crate::path::pattern::{paths_of, spelled_out};
use crate::word::{Part, Spelling, Sure, Word, meet};

/// Maximum number of prefixes that are tried. With more, a word may be any path.
const MOST: usize = 32;
const MOST_LETTERS: usize = 1_024;

/// Returns the paths in texts that a word with an unknown beginning may start with.
pub(crate) fn ways(texts: &[Word]) -> Vec<&str> {
    let all: HashSet<&str> = texts.iter().filter_map(Word::text).flat_map(paths_of).filter(|path| path.contains(['/', '~'])).collect();
    all.into_iter().collect()
}

impl Place<'_> {
    /// Returns whether a word with an unknown beginning may be this path if it starts with a
    /// prefix.
    pub(crate) fn is_led_on(&self, ways: &[&str], word: &Word) -> bool {
        let open: Vec<&Spelling> = word.spellings().iter().filter(|spelling| spelling.first() == Some(&Part::AnyText)).collect();
        !open.is_empty() && (is_too_much(ways) || ways.iter().any(|way| self.leads_on(way, &open)))
    }

    fn leads_on(&self, way: &str, open: &[&Spelling]) -> bool {
        let cleaned = self.cleaned(&[Part::Text(way.to_owned())]);
        let Some(Part::Text(way)) = cleaned.first() else { return false };
        // Skip the expensive comparison: most prefixes have nothing in common with the path.
        let bare = way.trim_start_matches("../");
        let is_near =
            bare.split('/').any(|part| part == "..") || self.path.contains('*') || self.path.contains(bare) || way.starts_with(&self.path);
        is_near && open.iter().any(|spelling| self.is_named_by(&begun_with(way, spelling)) != Sure::No)
    }

    /// Returns whether a partly known word may be this path itself, or an ending of this path.
    pub(crate) fn may_be(&self, word: &Word) -> bool {
        let one = |spelling: &Spelling| match spelling.first() {
            Some(Part::Text(text)) if spelled_out(text, self.home).starts_with('/') => {
                meet(&self.cleaned(spelling), &Word::wanted(&self.path))
            }
            Some(Part::Text(_)) => self.may_end_so(spelling),
            _ => meet(spelling, &Word::wanted(&format!("*{}", self.path))),
        };
        if self.is_a_name() { self.is_named_by(word) != Sure::No } else { word.spellings().iter().any(one) }
    }
}

fn is_too_much(ways: &[&str]) -> bool {
    ways.len() > MOST || ways.iter().map(|way| way.len()).sum::<usize>() > MOST_LETTERS
}

/// Returns a word whose first part is replaced by a text.
fn begun_with(text: &str, spelling: &[Part]) -> Word {
    spelling.iter().skip(1).fold(Word::known(text), |word, part| {
        word.then(&match part {
            Part::Text(text) => Word::known(text.as_str()),
            Part::AnyText => Word::unknown(false),
            Part::AnyName | Part::AnyFirstChar => Word::unknown_name(),
        })
    })
}
