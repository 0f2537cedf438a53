//! Defines words of a shell command, as far as they are known before the shell expands them.

pub(crate) mod expand;
pub(crate) mod partial;
pub(crate) mod unquote;
/// A part of a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WordPart {
    Text(String),
    /// Any text, which only the running shell knows.
    AnyText,
    /// A part of a file name that a pattern matches.
    AnyName,
    /// The first character of a file name, which is not a dot.
    AnyFirstChar,
}

impl WordPart {
    pub(crate) fn len(&self) -> usize {
        if let Self::Text(text) = self { text.len() } else { 1 }
    }
}

/// One possible form of a word, as a sequence of parts.
pub(crate) type WordSpelling = Vec<WordPart>;

/// A word with all its possible forms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShellWord {
    spellings: Vec<WordSpelling>,
    /// Whether the word may expand to several words, or to none.
    pub(crate) can_split: bool,
}

/// Whether a statement is true, possible or false.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Certainty {
    /// The statement is false.
    No,
    /// The statement may be true.
    Maybe,
    /// The statement is true.
    Yes,
}

/// Maximum length of a spelling. A longer one counts as unknown.
const MAX_SPELLING_BYTES: usize = 16 << 10;
/// Maximum number of spellings. A word with more counts as unknown.
const MAX_SPELLINGS: usize = 16;

impl ShellWord {
    pub(crate) fn known(text: impl Into<String>) -> Self {
        Self { spellings: vec![vec![WordPart::Text(text.into())]], can_split: false }
    }

    /// Creates a word that only the running shell knows.
    pub(crate) fn unknown(splits: bool) -> Self {
        Self { spellings: vec![vec![WordPart::AnyText]], can_split: splits }
    }

    /// Creates an unknown part of a file name.
    pub(crate) fn unknown_name() -> Self {
        Self { spellings: vec![vec![WordPart::AnyName]], can_split: false }
    }

    pub(crate) fn empty() -> Self {
        Self { spellings: vec![Vec::new()], can_split: false }
    }

    /// Parses a text in which `*`, `?` and `[…]` match parts of file names.
    pub(crate) fn parse_file_pattern(text: &str) -> Self {
        let mut spelling = Vec::new();
        let mut letters = text.chars();
        while let Some(letter) = letters.next() {
            let first = match spelling.last() {
                None => true,
                Some(WordPart::Text(before)) => before.ends_with('/'),
                Some(_) => false,
            };
            match letter {
                // Shells differ on the end of a bracket expression, so the last bracket is used.
                '[' if letters.as_str().contains(']') => {
                    let rest = letters.as_str();
                    let end = rest.rfind(']').map_or(rest.len(), |at| at + 1);
                    letters = rest.get(end..).unwrap_or_default().chars();
                    if rest.get(..end).is_some_and(|inside| inside.contains('/')) {
                        push_part(&mut spelling, WordPart::AnyText);
                        continue;
                    }
                }
                '*' | '?' => {}
                letter => {
                    push_part(&mut spelling, WordPart::Text(letter.into()));
                    continue;
                }
            }
            // `*secret` also matches `secret`. A leading `*` does not match a hidden file.
            let may_be_bare = letter == '*'
                && !letters.as_str().is_empty()
                && !letters.as_str().starts_with(['.', '/']);
            if first && !may_be_bare {
                push_part(&mut spelling, WordPart::AnyFirstChar);
            }
            push_part(&mut spelling, WordPart::AnyName);
            if spelling.len() > 64 {
                return Self::unknown(true);
            }
        }
        Self { spellings: vec![spelling], can_split: true }
    }

    /// Parses a rule's pattern, in which `*` matches any text.
    pub(crate) fn parse_rule_pattern(pattern: &str) -> WordSpelling {
        let mut spelling = Vec::new();
        for (n, piece) in pattern.split('*').enumerate() {
            if n > 0 {
                push_part(&mut spelling, WordPart::AnyText);
            }
            push_part(&mut spelling, WordPart::Text(piece.to_owned()));
        }
        spelling
    }

    /// Creates a word that is one of several words.
    pub(crate) fn one_of(words: &[Self]) -> Self {
        let spellings: Vec<WordSpelling> =
            words.iter().flat_map(|word| word.spellings.iter().cloned()).collect();
        match spellings.len() {
            0 => Self::empty(),
            1..=MAX_SPELLINGS => {
                Self { spellings, can_split: words.iter().any(|word| word.can_split) }
            }
            _ => Self::unknown(true),
        }
    }

    /// Appends another word directly to this one.
    pub(crate) fn append(self, next: &Self) -> Self {
        let long = |word: &Self| {
            word.spellings
                .iter()
                .map(|spelling| spelling.iter().map(WordPart::len).sum::<usize>())
                .max()
                .unwrap_or(0)
        };
        if self.spellings.len() * next.spellings.len() > MAX_SPELLINGS
            || long(&self) + long(next) > MAX_SPELLING_BYTES
        {
            return Self::unknown(self.can_split || next.can_split);
        }
        // A shell splits only the unquoted part, which a single word cannot express.
        let fixed = |word: &Self| {
            let is_splittable = |part: &WordPart| matches!(part, WordPart::Text(text) if text.contains([' ', '\t', '\n', '*', '?', '[']));
            !word.can_split
                && word.spellings.iter().any(|spelling| spelling.iter().any(is_splittable))
        };
        if (self.can_split && fixed(next)) || (next.can_split && fixed(&self)) {
            return Self::unknown(true);
        }
        let mut spellings = Vec::new();
        for before in &self.spellings {
            for after in &next.spellings {
                let mut spelling = before.clone();
                // In the middle of a name, a pattern may match nothing or a dot.
                let starts_spelling = before
                    .last()
                    .is_none_or(|last| matches!(last, WordPart::Text(text) if text.ends_with('/')));
                let skipped =
                    usize::from(!starts_spelling && after.first() == Some(&WordPart::AnyFirstChar));
                after.iter().skip(skipped).for_each(|part| push_part(&mut spelling, part.clone()));
                spellings.push(spelling);
            }
        }
        Self { spellings, can_split: self.can_split || next.can_split }
    }

    /// Splits an unquoted word with a known text into the words that it expands to.
    pub(crate) fn split(self) -> Vec<Self> {
        match self.text().filter(|_| self.can_split) {
            Some(text) => text
                .split_whitespace()
                .map(|word| {
                    if word.contains(['*', '?', '[']) {
                        Self::parse_file_pattern(word)
                    } else {
                        Self::known(word)
                    }
                })
                .collect(),
            None => vec![self],
        }
    }

    /// Turns the word into a single word, as double quotes do.
    pub(crate) fn into_quoted(self) -> Self {
        Self { can_split: false, ..self }
    }

    /// Returns the text, if there is only one possibility.
    pub(crate) fn text(&self) -> Option<&str> {
        match self.spellings.as_slice() {
            [spelling] => match spelling.as_slice() {
                [] => Some(""),
                [WordPart::Text(text)] => Some(text),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns the known texts in the word.
    ///
    /// Leading slashes of a partly known word are removed, because the start of the path is not
    /// known.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        let is_known = self.text().is_some();
        self.spellings.iter().flatten().filter_map(move |part| match part {
            WordPart::Text(text) if is_known => Some(text.as_str()),
            WordPart::Text(text) => Some(text.trim_start_matches('/')),
            _ => None,
        })
    }

    /// Returns the rest of the word after a known beginning.
    pub(crate) fn strip_known_prefix(&self, prefix: &str) -> Option<Self> {
        let [spelling] = self.spellings.as_slice() else { return None };
        let (WordPart::Text(text), rest) = spelling.split_first()? else { return None };
        let mut left = Vec::new();
        push_part(&mut left, WordPart::Text(text.strip_prefix(prefix)?.to_owned()));
        left.extend(rest.iter().cloned());
        Some(Self { spellings: vec![left], can_split: self.can_split })
    }

    pub(crate) fn is_unknown(&self) -> bool {
        self.spellings.iter().any(|spelling| spelling.as_slice() == [WordPart::AnyText])
    }

    /// Returns whether only slashes between unknown parts are known: `$DIR/$FILE`.
    pub(crate) fn is_unknown_path(&self) -> bool {
        let is_open = |part: &WordPart| match part {
            WordPart::AnyText => true,
            WordPart::Text(text) => text.chars().all(|letter| letter == '/'),
            WordPart::AnyName | WordPart::AnyFirstChar => false,
        };
        self.spellings.iter().all(|spelling| {
            spelling.first() == Some(&WordPart::AnyText) && spelling.iter().all(is_open)
        })
    }

    /// Returns the number of characters to compare if the word is partly known.
    pub(crate) fn partial_len(&self) -> usize {
        if self.text().is_some() || self.is_unknown() {
            0
        } else {
            self.spellings.iter().flatten().map(WordPart::len).sum()
        }
    }

    /// Returns whether the word only has unknown parts that match file names.
    pub(crate) fn is_pattern(&self) -> bool {
        self.spellings.iter().all(|spelling| spelling.iter().all(|part| *part != WordPart::AnyText))
    }

    pub(crate) fn spellings(&self) -> &[WordSpelling] {
        &self.spellings
    }

    /// Returns whether the word matches a rule's pattern.
    pub(crate) fn match_pattern(&self, pattern: &str) -> Certainty {
        let pattern_parts = Self::parse_rule_pattern(pattern);
        let compare = |spelling: &WordSpelling| match (
            spelling.iter().all(|part| matches!(part, WordPart::Text(_))),
            can_intersect(spelling, &pattern_parts),
        ) {
            (_, false) => Certainty::No,
            (true, true) => Certainty::Yes,
            (false, true) => Certainty::Maybe,
        };
        combine_certainty(self.spellings.iter().map(compare))
    }
}

/// Combines several possibilities. The result is only certain if all agree.
pub(crate) fn combine_certainty(certainties: impl Iterator<Item = Certainty>) -> Certainty {
    let (mut least, mut most) = (Certainty::Yes, Certainty::No);
    for certainty in certainties {
        (least, most) = (least.min(certainty), most.max(certainty));
    }
    if most == Certainty::No { Certainty::No } else { least.max(Certainty::Maybe) }
}

fn push_part(spelling: &mut WordSpelling, part: WordPart) {
    match (spelling.last_mut(), part) {
        (_, WordPart::Text(text)) if text.is_empty() => {}
        (Some(WordPart::Text(before)), WordPart::Text(text)) => before.push_str(&text),
        (Some(WordPart::AnyText), WordPart::AnyText)
        | (Some(WordPart::AnyName), WordPart::AnyName) => {}
        (_, part) => spelling.push(part),
    }
}

/// A character of a pattern.
#[derive(Clone, Copy)]
enum PatternChar {
    Literal(char),
    FirstChar,
    /// Any number of characters; `/` is included if the flag is set.
    Run(bool),
}

impl PatternChar {
    /// Returns whether this character may be the same as a single character of another pattern.
    fn can_be(self, other: Self) -> bool {
        match (self, other) {
            (Self::Literal(a), Self::Literal(b)) => a == b,
            (Self::Run(matches_slash), Self::Literal(letter)) => matches_slash || letter != '/',
            (Self::FirstChar, Self::Literal(letter)) | (Self::Literal(letter), Self::FirstChar) => {
                letter != '.' && letter != '/'
            }
            _ => true,
        }
    }
}

/// Returns whether a text exists that matches both patterns.
pub(crate) fn can_intersect(a: &[WordPart], b: &[WordPart]) -> bool {
    let to_chars = |parts: &[WordPart]| -> Vec<PatternChar> {
        let letters = |part: &WordPart| match part {
            WordPart::Text(text) => text.chars().map(PatternChar::Literal).collect(),
            WordPart::AnyText => vec![PatternChar::Run(true)],
            WordPart::AnyName => vec![PatternChar::Run(false)],
            WordPart::AnyFirstChar => vec![PatternChar::FirstChar],
        };
        parts.iter().flat_map(letters).collect()
    };
    let (a, b) = (to_chars(a), to_chars(b));
    let is_run = |letter: &PatternChar| matches!(letter, PatternChar::Run(_));
    // `reached` states which prefixes of `b` match the part of `a` that was read, one row at a
    // time.
    let mut reached: Vec<bool> =
        (0..=b.len()).map(|most| b.iter().take(most).all(is_run)).collect();
    for letter in &a {
        let mut next: Vec<bool> = Vec::with_capacity(b.len() + 1);
        for at in 0..=b.len() {
            let is_reached = |row: &[bool], at: Option<usize>| {
                at.and_then(|at| row.get(at)).copied().unwrap_or(false)
            };
            let (is_reached_here, previous) = (is_reached(&reached, Some(at)), at.checked_sub(1));
            let other = previous.and_then(|previous| b.get(previous));
            let matches = match (letter, other) {
                // A run matches nothing or the next character.
                (PatternChar::Run(_), None) => is_reached_here,
                (PatternChar::Run(_), Some(other)) => {
                    is_reached_here
                        || (is_reached(&next, previous) && (is_run(other) || letter.can_be(*other)))
                }
                (_, None) => false,
                (letter, Some(other)) if is_run(other) => {
                    is_reached(&next, previous) || (is_reached_here && other.can_be(*letter))
                }
                (letter, Some(other)) => letter.can_be(*other) && is_reached(&reached, previous),
            };
            next.push(matches);
        }
        reached = next;
    }
    reached.last().copied().unwrap_or(false)
}
