//! A word of a shell command, as far as it is known before the shell expands it.

/// A part of a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    Text(String),
    /// Any text at all: a pattern of file names, or what only the running shell knows.
    Any,
}

/// One spelling of a word.
pub(crate) type Spelling = Vec<Part>;

/// A word: what it may come to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Word {
    spellings: Vec<Spelling>,
    /// It may come to several words, or to none.
    pub(crate) splits: bool,
}

/// How sure something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sure {
    No,
    Maybe,
    Yes,
}

/// So many spellings are looked at; what has more may be anything.
const MOST: usize = 16;

impl Word {
    pub(crate) fn known(text: impl Into<String>) -> Self {
        Self { spellings: vec![vec![Part::Text(text.into())]], splits: false }
    }

    /// Only the running shell knows it.
    pub(crate) fn unknown(splits: bool) -> Self {
        Self { spellings: vec![vec![Part::Any]], splits }
    }

    pub(crate) fn empty() -> Self {
        Self { spellings: vec![Vec::new()], splits: false }
    }

    /// Text in which `*`, `?` and `[…]` stand for any text.
    pub(crate) fn pattern(text: &str) -> Self {
        let mut spelling = Vec::new();
        for piece in text.split_inclusive(['*', '?', ']']) {
            let cut = piece.find(['*', '?', '[']).unwrap_or(piece.len());
            push(&mut spelling, Part::Text(piece.get(..cut).unwrap_or_default().to_owned()));
            if cut < piece.len() {
                push(&mut spelling, Part::Any);
            }
        }
        Self { spellings: vec![spelling], splits: true }
    }

    /// One of several.
    pub(crate) fn one_of(words: &[Self]) -> Self {
        let spellings: Vec<Spelling> = words.iter().flat_map(|word| word.spellings.iter().cloned()).collect();
        match spellings.len() {
            0 => Self::empty(),
            1..=MOST => Self { spellings, splits: words.iter().any(|word| word.splits) },
            _ => Self::unknown(true),
        }
    }

    /// This word with another right after it.
    pub(crate) fn then(self, next: &Self) -> Self {
        if self.spellings.len() * next.spellings.len() > MOST {
            return Self::unknown(self.splits || next.splits);
        }
        let mut spellings = Vec::new();
        for before in &self.spellings {
            for after in &next.spellings {
                let mut spelling = before.clone();
                after.iter().for_each(|part| push(&mut spelling, part.clone()));
                spellings.push(spelling);
            }
        }
        Self { spellings, splits: self.splits || next.splits }
    }

    /// In double quotes, whatever it is, it is one word.
    pub(crate) fn quoted(self) -> Self {
        Self { splits: false, ..self }
    }

    /// Its text, where there is but one.
    pub(crate) fn text(&self) -> Option<&str> {
        match self.spellings.as_slice() {
            [spelling] => match spelling.as_slice() {
                [] => Some(""),
                [Part::Text(text)] => Some(text),
                _ => None,
            },
            _ => None,
        }
    }

    pub(crate) fn is_unknown(&self) -> bool {
        self.spellings.iter().any(|spelling| spelling.as_slice() == [Part::Any])
    }

    pub(crate) fn spellings(&self) -> &[Spelling] {
        &self.spellings
    }

    /// Whether it is like a pattern.
    pub(crate) fn is_like(&self, pattern: &str) -> Sure {
        let wanted = Self::pattern(pattern);
        let wanted = wanted.spellings.first().map(Vec::as_slice).unwrap_or_default();
        let one = |spelling: &Spelling| match (spelling.iter().all(|part| matches!(part, Part::Text(_))), meet(spelling, wanted)) {
            (_, false) => Sure::No,
            (true, true) => Sure::Yes,
            (false, true) => Sure::Maybe,
        };
        sum(self.spellings.iter().map(one))
    }
}

/// What several possibilities come to: sure only where all are.
pub(crate) fn sum(all: impl Iterator<Item = Sure>) -> Sure {
    let (mut least, mut most) = (Sure::Yes, Sure::No);
    for one in all {
        (least, most) = (least.min(one), most.max(one));
    }
    if most == Sure::No { Sure::No } else { least.max(Sure::Maybe) }
}

fn push(spelling: &mut Spelling, part: Part) {
    match (spelling.last_mut(), part) {
        (_, Part::Text(text)) if text.is_empty() => {}
        (Some(Part::Text(before)), Part::Text(text)) => before.push_str(&text),
        (Some(Part::Any), Part::Any) => {}
        (_, part) => spelling.push(part),
    }
}

/// Whether two patterns have a text in common.
pub(crate) fn meet(a: &[Part], b: &[Part]) -> bool {
    let spell = |parts: &[Part]| -> Vec<Option<char>> {
        parts.iter().flat_map(|part| match part {
            Part::Text(text) => text.chars().map(Some).collect(),
            Part::Any => vec![None],
        }).collect()
    };
    let (a, b) = (spell(a), spell(b));
    // Where one stands in `b` after each letter of `a`: a table of two rows.
    let mut reached = vec![false; b.len() + 1];
    for (at, slot) in reached.iter_mut().enumerate() {
        *slot = b.iter().take(at).all(Option::is_none);
    }
    for letter in &a {
        let mut next = vec![false; b.len() + 1];
        let came = |row: &[bool], at: usize| row.get(at).copied().unwrap_or(false);
        for at in 0..=b.len() {
            let before = at.checked_sub(1).and_then(|before| b.get(before)).copied();
            let fits = match (letter, before) {
                // `*` of `a` takes nothing, or goes on taking.
                (None, None) if at == 0 => came(&reached, 0),
                (None, _) => came(&reached, at) || at.checked_sub(1).is_some_and(|before| came(&next, before)),
                (Some(_), Some(None)) => came(&next, at - 1) || came(&reached, at),
                (Some(letter), Some(Some(other))) => *letter == other && came(&reached, at - 1),
                (Some(_), None) => false,
            };
            if let Some(slot) = next.get_mut(at) {
                *slot = fits;
            }
        }
        reached = next;
    }
    reached.last().copied().unwrap_or(false)
}
