//! Options and operands, told apart as the program itself would.

use super::text::has_braces;
use super::word::{Part, Word};

/// How a program writes its options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// `-xvf`: one letter each.
    Clusters,
    /// The same, and a first word that needs no dash: `xvf`.
    Bundle,
    /// The same, up to the first operand.
    Leading,
    /// One word each: `-fprint`, `-oDIRECTORY`.
    Single,
}

/// When a program fills a directory with files that stand on no command line.
#[derive(Debug, Clone, Copy)]
pub(super) enum When {
    Never,
    Always,
    /// With one of these options.
    Flags(&'static [&'static str]),
    /// Where an operand is one of these; where options are one word each, the first, and of `gh` one of the first two.
    Verbs(&'static [&'static str]),
}

/// How a program reads its words, and what it writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) programs: &'static [&'static str],
    pub(super) style: Style,
    /// Letters that take a value.
    pub(super) short: &'static str,
    /// Longer options that take one, without their dashes.
    pub(super) long: &'static [&'static str],
    /// Options that name a file that is written.
    pub(super) files: &'static [&'static str],
    /// Options that name the directory in which something is written.
    pub(super) directories: &'static [&'static str],
    pub(super) when: When,
    /// With one of these options it fills none.
    pub(super) spared: &'static [&'static str],
    /// With one of these options it writes wherever what it reads says.
    pub(super) anywhere: &'static [&'static str],
    /// Where no option names a directory, it is this one.
    pub(super) here: bool,
    /// The last operand may name it, too.
    pub(super) last: bool,
}

/// A program of which nothing is known.
pub(super) const BASE: Shape = Shape {
    programs: &[],
    style: Style::Clusters,
    short: "",
    long: &[],
    files: &[],
    directories: &[],
    when: When::Never,
    spared: &[],
    anywhere: &[],
    here: false,
    last: false,
};

/// The words of a command, told apart.
#[derive(Debug, Default)]
pub(super) struct Given {
    /// Options in their order, each with its value where it has one.
    options: Vec<(String, Option<Word>)>,
    /// Which of them may be the value of a longer one that stands before them.
    doubted: Vec<usize>,
    pub(super) operands: Vec<Word>,
}

impl Given {
    /// Whether one of these options is given.
    pub(super) fn has(&self, names: &[&str]) -> bool {
        self.options.iter().any(|(given, _)| names.iter().any(|name| is_option(given, name)))
    }

    /// Whether one of these options is given, and cannot be the value of another one.
    pub(super) fn is_sure_of(&self, names: &[&str]) -> bool {
        let is_one = |given: &str| names.iter().any(|name| is_option(given, name));
        self.options.iter().enumerate().any(|(at, (given, _))| is_one(given) && self.doubted.binary_search(&at).is_err())
    }

    /// Whether this option is given, and not a shorter one that begins like it.
    pub(super) fn has_just(&self, name: &str) -> bool {
        self.options.iter().any(|(given, _)| given == name)
    }

    /// How many long options, and how many of these letters, are given without a value.
    pub(super) fn bare(&self, letters: &str) -> usize {
        let is_one = |name: &str| name.starts_with("--") || name.strip_prefix('-').is_some_and(|letter| letters.contains(letter));
        self.options.iter().filter(|(name, value)| value.is_none() && is_one(name)).count()
    }

    /// What these options are given.
    pub(super) fn values(&self, names: &[&str]) -> Vec<Word> {
        let wanted = self.options.iter().filter(|(given, _)| names.contains(&given.as_str()));
        wanted.filter_map(|(_, value)| value.clone()).collect()
    }
}

/// Long options may be cut short.
fn is_option(given: &str, name: &str) -> bool {
    given == name || (given.len() >= 4 && given.starts_with("--") && name.starts_with(given))
}

/// What stands before the first `=`, and what stands behind it where there is one.
pub(super) fn name_and_value(text: &str) -> (&str, Option<&str>) {
    text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)))
}

/// Tells the words behind a program apart.
pub(super) fn read(words: &[Word], shape: &Shape) -> Given {
    let mut given = Given::default();
    let (mut rest, mut is_first, mut is_over, mut is_open) = (words.iter(), true, false, false);
    while let Some(word) = rest.next() {
        let first = std::mem::replace(&mut is_first, false);
        let (may_be_value, before) = (std::mem::replace(&mut is_open, false), given.options.len());
        let (text, whole) = beginning(word);
        // What only the running shell knows may be a value.
        let glued = |tail: &str| match whole {
            true => Some(tail).filter(|tail| !tail.is_empty()).map(Word::known),
            false => Some(Word::unknown(false)),
        };
        if first && whole && shape.style == Style::Bundle && !text.starts_with('-') {
            for flag in text.chars() {
                let value = if shape.short.contains(flag) { rest.next().cloned() } else { None };
                given.options.push((format!("-{flag}"), value));
            }
            continue;
        }
        let flags = text.strip_prefix('-').filter(|flags| !flags.is_empty() && !is_over).unwrap_or_default();
        let late =
            shape.style == Style::Leading && !given.operands.is_empty() && !flags.starts_with(|flag: char| shape.short.contains(flag));
        if flags.is_empty() || late {
            given.operands.push(word.clone());
        } else if flags == "-" && whole {
            is_over = !may_be_value;
        } else if let Some(long) = flags.strip_prefix('-') {
            let (name, tail) = name_and_value(long);
            let exact = shape.long.iter().find(|known| **known == name);
            let known = exact.or_else(|| shape.long.iter().find(|known| name.len() > 1 && known.starts_with(name)));
            let value = match tail {
                Some(tail) => glued(tail),
                None if !whole => Some(Word::unknown(false)),
                None if exact.is_some() => rest.next().cloned(),
                // Cut short, it may be another one that takes no value: what follows is looked at by itself as well.
                None => known.and_then(|_| rest.clone().next().cloned()),
            };
            given.options.push((format!("--{}", known.copied().unwrap_or(name)), value));
            is_open = tail.is_none() && exact.is_none();
        } else if shape.style == Style::Single {
            match flags.chars().next().filter(|flag| shape.short.contains(*flag)) {
                Some(flag) => given.options.push((format!("-{flag}"), glued(flags.get(flag.len_utf8()..).unwrap_or_default()))),
                None => {
                    let (name, tail) = name_and_value(flags);
                    match tail.filter(|_| shape.long.contains(&name)) {
                        Some(tail) => given.options.push((format!("-{name}"), glued(tail))),
                        None => {
                            let value = if shape.long.contains(&flags) { rest.next().cloned() } else { None };
                            given.options.push((text.to_owned(), value));
                        }
                    }
                }
            }
        } else {
            for (at, flag) in flags.char_indices() {
                let takes = shape.short.contains(flag);
                let tail = flags.get(at + flag.len_utf8()..).unwrap_or_default();
                let value = if takes { glued(tail).or_else(|| rest.next().cloned()) } else { None };
                given.options.push((format!("-{flag}"), value));
                if takes {
                    break;
                }
            }
        }
        if may_be_value {
            given.doubted.extend(before..given.options.len());
        }
    }
    given
}

/// How a word begins, and whether that is all of it.
pub(super) fn beginning(word: &Word) -> (&str, bool) {
    match (word.text(), word.spellings()) {
        (Some(text), _) => (text, true),
        (None, [spelling]) => match spelling.first() {
            Some(Part::Text(text)) => (text.as_str(), false),
            _ => ("", false),
        },
        _ => ("", false),
    }
}

/// Whether a word sets a variable of `make` to what it, or a shell, runs: to more than one plain word, or one that says how the rest runs.
pub(super) fn sets_code(word: &str) -> bool {
    const RUN: &[&str] = &[".SHELLFLAGS", "GNUMAKEFLAGS", "MAKEFLAGS", "SHELL"];
    let Some((name, value)) = word.split_once('=') else { return false };
    let is_code = value.contains(|c: char| c.is_whitespace() || "$`;&|<>(".contains(c)) || has_braces(value);
    is_code || name.ends_with('!') || RUN.contains(&name.trim_end_matches([' ', '\t', ':', '+', '?']))
}
