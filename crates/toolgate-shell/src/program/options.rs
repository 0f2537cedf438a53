//! Separates options from operands as the program itself does.

use crate::word::unquote::has_braces;
use crate::word::{ShellWord, WordPart};

/// Specifies how a program writes its options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OptionStyle {
    /// One letter each: `-xvf`.
    Clusters,
    /// Like `Clusters`, with a first word that needs no dash: `xvf`.
    DashlessCluster,
    /// Like `Clusters`, up to the first operand.
    BeforeOperands,
    /// One word each: `-fprint`, `-oDIRECTORY`.
    OneWordEach,
}

/// Specifies when a program fills a directory with files that its words do not name.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FillCondition {
    Never,
    Always,
    /// If one of these options is present.
    WithOption(&'static [&'static str]),
    /// If an operand is one of these subcommands.
    ///
    /// If options are one word each, only the first operand counts. For `gh`, the first two count.
    WithSubcommand(&'static [&'static str]),
}

/// Describes how a program reads its words, and which files it writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProgramSyntax {
    pub(crate) programs: &'static [&'static str],
    pub(crate) style: OptionStyle,
    /// Letters of short options that take a value.
    pub(crate) short_with_value: &'static str,
    /// Long options that take a value, without their dashes.
    pub(crate) long_with_value: &'static [&'static str],
    /// Options that name a file that is written.
    pub(crate) output_file_options: &'static [&'static str],
    /// Options that name the directory for written files.
    pub(crate) output_directory_options: &'static [&'static str],
    pub(crate) fills_when: FillCondition,
    /// Options with which the program fills no directory.
    pub(crate) no_fill_options: &'static [&'static str],
    /// Options with which an archive may write to any path.
    pub(crate) fill_anywhere_options: &'static [&'static str],
    /// If no option names a directory, the program fills the current one.
    pub(crate) fills_current_directory: bool,
    /// The last operand may name the directory, too.
    pub(crate) has_directory_operand: bool,
}

/// The description of an unknown program.
pub(crate) const BASE_SYNTAX: ProgramSyntax = ProgramSyntax {
    programs: &[],
    style: OptionStyle::Clusters,
    short_with_value: "",
    long_with_value: &[],
    output_file_options: &[],
    output_directory_options: &[],
    fills_when: FillCondition::Never,
    no_fill_options: &[],
    fill_anywhere_options: &[],
    fills_current_directory: false,
    has_directory_operand: false,
};

/// The words of a command, separated into options and operands.
#[derive(Debug, Default)]
pub(crate) struct ParsedOptions {
    /// The options in order, with their values.
    options: Vec<(String, Option<ShellWord>)>,
    /// The positions of options that may be the value of a preceding abbreviated option.
    ambiguous_options: Vec<usize>,
    pub(crate) operands: Vec<ShellWord>,
}

impl ParsedOptions {
    /// Returns whether one of these options is present.
    pub(crate) fn has(&self, names: &[&str]) -> bool {
        self.options
            .iter()
            .any(|(option, _)| names.iter().any(|name| is_abbreviation_of(option, name)))
    }

    /// Returns whether one of these options is present and cannot be the value of another option.
    pub(crate) fn has_certainly(&self, names: &[&str]) -> bool {
        let is_wanted = |option: &str| names.iter().any(|name| is_abbreviation_of(option, name));
        self.options.iter().enumerate().any(|(at, (option, _))| {
            is_wanted(option) && self.ambiguous_options.binary_search(&at).is_err()
        })
    }

    /// Returns whether exactly this option is present, without abbreviation.
    pub(crate) fn has_exactly(&self, name: &str) -> bool {
        self.options.iter().any(|(option, _)| option == name)
    }

    /// Counts the long options and the short options among `letters` that have no value.
    pub(crate) fn count_without_value(&self, letters: &str) -> usize {
        let is_counted = |name: &str| {
            name.starts_with("--")
                || name.strip_prefix('-').is_some_and(|letter| letters.contains(letter))
        };
        self.options.iter().filter(|(name, value)| value.is_none() && is_counted(name)).count()
    }

    /// Returns the values of these options.
    pub(crate) fn values(&self, names: &[&str]) -> Vec<ShellWord> {
        let selected = self.options.iter().filter(|(option, _)| names.contains(&option.as_str()));
        selected.filter_map(|(_, value)| value.clone()).collect()
    }
}

/// Returns whether an option is this one, as long options may be abbreviated.
fn is_abbreviation_of(option: &str, name: &str) -> bool {
    option == name || (option.len() >= 4 && option.starts_with("--") && name.starts_with(option))
}

/// Splits a text at the first `=` into a name and an optional value.
pub(crate) fn split_name_value(text: &str) -> (&str, Option<&str>) {
    text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)))
}

/// Parses the words behind a program.
pub(crate) fn parse_options(words: &[ShellWord], shape: &ProgramSyntax) -> ParsedOptions {
    let mut parsed = ParsedOptions::default();
    let (mut rest, mut is_first, mut is_over, mut is_open) = (words.iter(), true, false, false);
    while let Some(word) = rest.next() {
        let first = std::mem::replace(&mut is_first, false);
        let (may_be_value, before) = (std::mem::replace(&mut is_open, false), parsed.options.len());
        let (text, is_whole) = known_prefix(word);
        // An unknown rest of the word may be a value.
        let glued = |tail: &str| match is_whole {
            true => Some(tail).filter(|tail| !tail.is_empty()).map(ShellWord::known),
            false => Some(ShellWord::unknown(false)),
        };
        if first
            && is_whole
            && shape.style == OptionStyle::DashlessCluster
            && !text.starts_with('-')
        {
            for flag in text.chars() {
                let value =
                    if shape.short_with_value.contains(flag) { rest.next().cloned() } else { None };
                parsed.options.push((format!("-{flag}"), value));
            }
            continue;
        }
        let flags = text
            .strip_prefix('-')
            .filter(|flags| !flags.is_empty() && !is_over)
            .unwrap_or_default();
        let late = shape.style == OptionStyle::BeforeOperands
            && !parsed.operands.is_empty()
            && !flags.starts_with(|flag: char| shape.short_with_value.contains(flag));
        if flags.is_empty() || late {
            parsed.operands.push(word.clone());
        } else if flags == "-" && is_whole {
            is_over = !may_be_value;
        } else if let Some(long) = flags.strip_prefix('-') {
            let (name, tail) = split_name_value(long);
            let exact = shape.long_with_value.iter().find(|known| **known == name);
            let known = exact.or_else(|| {
                shape.long_with_value.iter().find(|known| name.len() > 1 && known.starts_with(name))
            });
            let value = match tail {
                Some(tail) => glued(tail),
                None if !is_whole => Some(ShellWord::unknown(false)),
                None if exact.is_some() => rest.next().cloned(),
                // An abbreviated option may be one without a value, so the next word is also parsed
                // alone.
                None => known.and_then(|_| rest.clone().next().cloned()),
            };
            parsed.options.push((format!("--{}", known.copied().unwrap_or(name)), value));
            is_open = tail.is_none() && exact.is_none();
        } else if shape.style == OptionStyle::OneWordEach {
            match flags.chars().next().filter(|flag| shape.short_with_value.contains(*flag)) {
                Some(flag) => parsed.options.push((
                    format!("-{flag}"),
                    glued(flags.get(flag.len_utf8()..).unwrap_or_default()),
                )),
                None => {
                    let (name, tail) = split_name_value(flags);
                    match tail.filter(|_| shape.long_with_value.contains(&name)) {
                        Some(tail) => parsed.options.push((format!("-{name}"), glued(tail))),
                        None => {
                            let value = if shape.long_with_value.contains(&flags) {
                                rest.next().cloned()
                            } else {
                                None
                            };
                            parsed.options.push((text.to_owned(), value));
                        }
                    }
                }
            }
        } else {
            for (at, flag) in flags.char_indices() {
                let takes_value = shape.short_with_value.contains(flag);
                let tail = flags.get(at + flag.len_utf8()..).unwrap_or_default();
                let value =
                    if takes_value { glued(tail).or_else(|| rest.next().cloned()) } else { None };
                parsed.options.push((format!("-{flag}"), value));
                if takes_value {
                    break;
                }
            }
        }
        if may_be_value {
            parsed.ambiguous_options.extend(before..parsed.options.len());
        }
    }
    parsed
}

/// Returns the known beginning of a word, and whether that is the whole word.
pub(crate) fn known_prefix(word: &ShellWord) -> (&str, bool) {
    match (word.text(), word.spellings()) {
        (Some(text), _) => (text, true),
        (None, [spelling]) => match spelling.first() {
            Some(WordPart::Text(text)) => (text.as_str(), false),
            _ => ("", false),
        },
        _ => ("", false),
    }
}

/// Returns whether a word sets a variable of `make` to code, or to a setting for how code runs.
pub(crate) fn is_make_code_variable(word: &str) -> bool {
    const MAKE_CODE_VARIABLES: &[&str] = &[".SHELLFLAGS", "GNUMAKEFLAGS", "MAKEFLAGS", "SHELL"];
    let Some((name, value)) = word.split_once('=') else { return false };
    let is_code =
        value.contains(|c: char| c.is_whitespace() || "$`;&|<>(".contains(c)) || has_braces(value);
    is_code
        || name.ends_with('!')
        || MAKE_CODE_VARIABLES.contains(&name.trim_end_matches([' ', '\t', ':', '+', '?']))
}
