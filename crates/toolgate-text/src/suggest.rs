//! Finds the closest name, exactly as Python's `difflib.get_close_matches(name, names, n=1,
//! cutoff=0.5)` does.

use std::collections::HashMap;

/// Minimum similarity of a suggestion.
pub const MIN_SIMILARITY: f64 = 0.5;
/// Minimum similarity at which a word counts as a misspelling of a name.
const MIN_MISSPELLING_SIMILARITY: f64 = 0.8;
/// Maximum length of names and words in characters. Longer texts get no suggestion, and difflib
/// changes its rules at 200.
const MAX_NAME_CHARS: usize = 128;

/// Returns the name that is closest to `word`, if the similarity is at least [`MIN_SIMILARITY`].
///
/// ```
/// assert_eq!(toolgate_text::suggest::find_closest("calculator", ["calc", "json_query"]), Some("calc"));
/// ```
pub fn find_closest<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // difflib keeps the greatest (ratio, name), so the greater name wins between equal ratios.
    let word: Vec<char> = word.chars().take(MAX_NAME_CHARS + 1).collect();
    if word.len() > MAX_NAME_CHARS {
        return None;
    }
    let matcher = SequenceMatcher::new(&word);
    names
        .into_iter()
        .filter_map(|name| {
            matcher.ratio(name).filter(|ratio| *ratio >= MIN_SIMILARITY).map(|ratio| (ratio, name))
        })
        .max_by(|a, b| a.0.total_cmp(&b.0).then_with(|| compare_chars(a.1, b.1)))
        .map(|(_, name)| name)
}

/// Compares like Python, by code point. UTF-8 bytes have the same order.
fn compare_chars(a: &str, b: &str) -> std::cmp::Ordering {
    a.cmp(b)
}

/// Computes difflib's `SequenceMatcher(None, name, word).ratio()`.
#[must_use]
pub fn similarity_ratio(name: &str, word: &str) -> f64 {
    let word: Vec<char> = word.chars().collect();
    SequenceMatcher::new(&word).ratio(name).unwrap_or(0.0)
}

/// Reports whether a word is an obvious misspelling of a name.
///
/// ```
/// assert!(toolgate_text::suggest::is_misspelling("effect", "efect"));
/// assert!(!toolgate_text::suggest::is_misspelling("any_of", "all_of"));
/// ```
#[must_use]
pub fn is_misspelling(name: &str, word: &str) -> bool {
    find_closest(word, [name]).is_some()
        && similarity_ratio(name, word) >= MIN_MISSPELLING_SIMILARITY
}

struct SequenceMatcher<'w> {
    word: &'w [char],
    places: HashMap<char, Vec<usize>>,
}

impl<'w> SequenceMatcher<'w> {
    fn new(word: &'w [char]) -> Self {
        let mut places: HashMap<char, Vec<usize>> = HashMap::new();
        for (index, c) in word.iter().enumerate() {
            places.entry(*c).or_default().push(index);
        }
        Self { word, places }
    }

    fn ratio(&self, name: &str) -> Option<f64> {
        let name: Vec<char> = name.chars().take(MAX_NAME_CHARS + 1).collect();
        if name.len() > MAX_NAME_CHARS {
            return None;
        }
        let total = name.len() + self.word.len();
        if total == 0 {
            return Some(1.0);
        }
        let mut matched = 0;
        let mut todo = vec![(0, name.len(), 0, self.word.len())];
        while let Some((name_start, name_end, word_start, word_end)) = todo.pop() {
            let (i, j, size) =
                self.find_longest_match(&name, name_start, name_end, word_start, word_end);
            if size > 0 {
                matched += size;
                todo.push((name_start, i, word_start, j));
                todo.push((i + size, name_end, j + size, word_end));
            }
        }
        Some(2.0 * matched as f64 / total as f64)
    }

    /// Finds the longest common block. Of several, the one that starts first in `name`, then in the
    /// word.
    fn find_longest_match(
        &self,
        name: &[char],
        name_start: usize,
        name_end: usize,
        word_start: usize,
        word_end: usize,
    ) -> (usize, usize, usize) {
        let mut best = (name_start, word_start, 0);
        let mut lengths: HashMap<usize, usize> = HashMap::new();
        for (i, c) in name.iter().enumerate().take(name_end).skip(name_start) {
            let mut next = HashMap::new();
            for &j in self.places.get(c).map(Vec::as_slice).unwrap_or_default() {
                if !(word_start..word_end).contains(&j) {
                    continue;
                }
                let size = 1 + j
                    .checked_sub(1)
                    .and_then(|before| lengths.get(&before))
                    .copied()
                    .unwrap_or(0);
                next.insert(j, size);
                if size > best.2 {
                    best = (i + 1 - size, j + 1 - size, size);
                }
            }
            lengths = next;
        }
        best
    }
}
