//! What an argument must be for a rule to speak.

use std::borrow::Cow;

use rust_decimal::Decimal;
use serde_json::Value;

use super::{Ask, Fault};
use crate::json::{Pointer, decimal_of, plain};
use crate::names::glob;
use crate::shell::{Place, Shell, Sure, normal};

/// A condition on one argument. Numbers compare exactly.
#[derive(Debug, Clone)]
pub enum Condition {
    /// More than this.
    Above(Decimal),
    /// Less than this.
    Below(Decimal),
    /// One of these.
    In(Vec<Value>),
    /// None of these.
    NotIn(Vec<Value>),
    /// Text that fits a pattern in which `*` stands for any text.
    Glob(String),
    /// Text in which a regular expression is found; it takes time linear in the text.
    Matches(regex::Regex),
    /// A shell command that runs one of these, however it is spelled: a program, then words in their order, as in
    /// `git push --force*` or `rm -rf`. Where that cannot be told, a person is asked. The tool says with
    /// [`crate::Tool::shell`] where its command stands.
    Runs(Vec<String>),
    /// Text, or a shell command, that names one of these files: a path with all that lies under it, or a bare name wherever
    /// it stands. Text inside of objects and lists counts. Lenient, words of a command pass that only the running shell knows,
    /// unless something is changed by them.
    Touches {
        /// Which.
        places: Vec<String>,
        /// Whether what is unknown passes.
        lenient: bool,
        /// Whether a command counts that reads a tree as a whole in which a place lies. With `from` it always does.
        trees: bool,
        /// A text that is no command names a place only where it says where that is: from the root, from home, or with the directory.
        whole: bool,
        /// For what is searched or read as a whole: the directory, with its whole path, in which that begins. Then a directory above
        /// a place counts as well, and an argument that is absent is this directory.
        from: Option<String>,
    },
}

const UNKNOWN: &str = "some of its words are only known when it runs";
const SOMEWHERE: &str = "where it stands, or where a path in it leads, is only known when it runs";
const UNPACKED: &str = "which files it writes or takes away is only known when it runs";
const IN_PIECES: &str = "its command is no text";

/// Whether a condition holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Holds {
    No,
    Yes,
    /// Nobody can tell, and why.
    Maybe(String),
}

impl Holds {
    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Yes, _) | (_, Self::Yes) => Self::Yes,
            (Self::No, other) => other,
            (maybe, _) => maybe,
        }
    }
}

/// What a command comes to, where not everything in it can be told.
fn told(sure: Sure, shell: &Shell, why: &str) -> Holds {
    match (sure, shell.doubt()) {
        (Sure::Yes, _) => Holds::Yes,
        (_, Some(why)) => Holds::Maybe(why.to_owned()),
        (Sure::Maybe, None) => Holds::Maybe(why.to_owned()),
        (Sure::No, None) => Holds::No,
    }
}

impl Condition {
    /// One of these values.
    pub fn one_of(values: impl IntoIterator<Item = Value>) -> Self {
        Self::In(values.into_iter().collect()).normalized()
    }

    /// None of these values.
    pub fn none_of(values: impl IntoIterator<Item = Value>) -> Self {
        Self::NotIn(values.into_iter().collect()).normalized()
    }

    /// With values as judged arguments spell them: 1.0 is 1.
    pub(super) fn normalized(self) -> Self {
        match self {
            Self::In(values) => Self::In(values.into_iter().map(plain).collect()),
            Self::NotIn(values) => Self::NotIn(values.into_iter().map(plain).collect()),
            other => other,
        }
    }

    /// A regular expression.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn matches(pattern: &str) -> Result<Self, regex::Error> {
        regex::RegexBuilder::new(pattern).size_limit(1 << 20).build().map(Self::Matches)
    }

    /// Whether it may hang on where the home directory is, of an argument or where none is given.
    pub(crate) fn wants_home(&self, ask: &Ask<'_>, path: &Pointer, value: Option<&Value>) -> bool {
        let Self::Touches { places, from, .. } = self else { return false };
        let is_there = |place: &String| place.starts_with('~');
        let (mut wanted, mut has_text) = (false, false);
        each_text(value.unwrap_or(&Value::Null), &mut path.clone(), false, &mut |at, text, is_told| {
            has_text = true;
            let contents = Contents::of(at, path, is_told);
            let is_near = |place: &String| is_there(place) && (from.is_some() || may_name(text, place));
            wanted = match ask.tool.shell.as_ref() == Some(at) {
                _ if wanted => true,
                true => places.iter().any(is_there) || ask.arguments.shell(text).names_home(),
                false if text.contains('~') && paths_in(text, contents).any(|path| path.contains('~')) => true,
                false => places.iter().any(is_near) && paths_in(text, contents).next().is_some(),
            };
        });
        // What says nothing is the directory in which a search begins.
        wanted || (!has_text && from.is_some() && places.iter().any(is_there))
    }

    /// Whether it holds of an argument.
    pub(crate) fn weigh(&self, ask: &Ask<'_>, path: &Pointer, value: &Value) -> Result<Holds, Fault> {
        match self {
            Self::Runs(patterns) => {
                let text = value.as_str().ok_or_else(|| Fault::new("the argument is no text"))?;
                let shell = ask.arguments.shell(text);
                Ok(told(patterns.iter().map(|pattern| shell.runs(pattern)).max().unwrap_or(Sure::No), &shell, UNKNOWN))
            }
            Self::Touches { places, lenient, trees, whole, from } => {
                let (home, mut found, mut has_text) = (ask.home(), Holds::No, false);
                each_text(value, &mut path.clone(), false, &mut |at, text, is_told| {
                    has_text = true;
                    let is_command = ask.tool.shell.as_ref() == Some(at);
                    let contents = Contents::of(at, path, is_told);
                    // Most texts have nothing of any of them.
                    let near = places.iter().filter(|place| is_command || from.is_some() || may_name(text, place));
                    let places: Vec<Place<'_>> = near.map(|place| Place::new(place, &home)).collect();
                    let named = if is_command {
                        let shell = ask.arguments.shell(text);
                        let sure = shell.touches(&places, *lenient, *trees, from.as_deref());
                        let why = match shell.unpacks() {
                            true => UNPACKED,
                            false if shell.is_spelled_out() => SOMEWHERE,
                            false => UNKNOWN,
                        };
                        told(sure, &shell, why)
                    } else {
                        // Of a text nobody asks what it might mean, but for a path that leads through something else.
                        let led = |path: &str| (path.starts_with("/proc/") || path.contains("/../")) && !path.contains(char::is_whitespace);
                        let named = |place: &Place<'_>, path: &str| match place.is(path) {
                            Sure::Maybe if !led(path) => Sure::No,
                            _ if *whole && place.is_only_called(path) => Sure::No,
                            sure => sure,
                        };
                        let above = |place: &Place<'_>, path: &str| from.as_deref().map_or(Sure::No, |from| place.is_searched(from, path));
                        let sure = |place: &Place<'_>, path: &str| named(place, path).max(above(place, path));
                        let paths: Vec<Cow<'_, str>> = paths_in(text, contents).collect();
                        match places.iter().flat_map(|place| paths.iter().map(move |path| sure(place, path.as_ref()))).max() {
                            Some(Sure::Yes) => Holds::Yes,
                            Some(Sure::Maybe) => Holds::Maybe("a path in it leads through something else".to_owned()),
                            _ => Holds::No,
                        }
                    };
                    found = std::mem::replace(&mut found, Holds::No).or(named);
                });
                if is_in_pieces(ask, path, value) {
                    found = found.or(Holds::Maybe(IN_PIECES.to_owned()));
                }
                // Null, and a list of nothing, say no more than an argument that is absent.
                let searches_here = !has_text && from.is_some() && self.holds_of_nothing(|| ask.home());
                Ok(if searches_here { Holds::Yes } else { found })
            }
            other => Ok(if other.holds(value)? { Holds::Yes } else { Holds::No }),
        }
    }

    /// Whether it holds where nothing stands. What a rule cannot see does not pass it; but who searches and does not say where, does
    /// so where it is.
    pub(crate) fn holds_of_nothing<'h>(&self, home: impl FnOnce() -> Cow<'h, str>) -> bool {
        match self {
            Self::Touches { places, from: Some(from), .. } => {
                let home = home();
                places.iter().any(|place| Place::new(place, &home).is_searched(from, ".") != Sure::No)
            }
            _ => true,
        }
    }

    /// Whether it holds of a value. What cannot be compared is a fault, never a "no".
    pub(crate) fn holds(&self, value: &Value) -> Result<bool, Fault> {
        // What a fault says is shown, and the value may be a secret.
        let number = || decimal_of(value).ok_or_else(|| Fault::new("the argument is no number that can be compared exactly"));
        let text = || value.as_str().ok_or_else(|| Fault::new("the argument is no text"));
        Ok(match self {
            Self::Above(limit) => number()? > *limit,
            Self::Below(limit) => number()? < *limit,
            Self::In(values) => {
                // What a tool takes another kind of value for, nobody knows: `"3"` for 3, or null for what it does unless told.
                let is_alike = |one: &Value| std::mem::discriminant(one) == std::mem::discriminant(value);
                if !values.iter().any(is_alike) {
                    return Err(Fault::new("the argument is of another kind than all that it is compared with"));
                }
                values.contains(value)
            }
            Self::NotIn(values) => !values.contains(value),
            Self::Glob(pattern) => glob(pattern, text()?),
            Self::Matches(pattern) => pattern.is_match(text()?),
            Self::Runs(_) | Self::Touches { .. } => return Err(Fault::new("what a command does is only known with its tool")),
        })
    }

    /// What it asks of a value.
    pub(crate) fn describe(&self) -> String {
        let list = |values: &[Value]| values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Self::Above(limit) => format!("above {limit}"),
            Self::Below(limit) => format!("below {limit}"),
            Self::In(values) => format!("in {}", list(values)),
            Self::NotIn(values) => format!("not in {}", list(values)),
            Self::Glob(pattern) => format!("like `{pattern}`"),
            Self::Matches(pattern) => format!("matching `{pattern}`"),
            Self::Runs(patterns) => format!("running {}", ticked(patterns)),
            Self::Touches { places, from: Some(_), .. } => format!("naming {}, or a directory above", ticked(places)),
            Self::Touches { places, .. } => format!("naming {}", ticked(places)),
        }
    }

    /// Whether every value of which this holds is one of which the other holds, as far as can be told.
    pub(crate) fn implies(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Above(a), Self::Above(b)) => a >= b,
            (Self::Below(a), Self::Below(b)) => a <= b,
            (Self::In(values), other) => values.iter().all(|value| other.holds(value).unwrap_or(false)),
            (Self::NotIn(a), Self::NotIn(b)) => b.iter().all(|value| a.contains(value)),
            (Self::Glob(a), Self::Glob(b)) => a == b,
            (Self::Matches(a), Self::Matches(b)) => a.as_str() == b.as_str(),
            (Self::Runs(a), Self::Runs(b)) => a.iter().all(|pattern| b.contains(pattern)),
            (
                Self::Touches { places: a, lenient: x, trees: s, whole: v, from: f },
                Self::Touches { places: b, lenient: y, trees: t, whole: w, from: g },
            ) if v == w && f == g => a.iter().all(|place| b.contains(place)) && (*x || !y) && (!s || *t),
            _ => false,
        }
    }

    /// The kind of value that it can be asked of, as a schema calls it.
    pub(crate) const fn wants(&self) -> Option<&'static str> {
        match self {
            Self::Above(_) | Self::Below(_) => Some("number"),
            Self::Glob(_) | Self::Matches(_) | Self::Runs(_) => Some("string"),
            Self::In(_) | Self::NotIn(_) | Self::Touches { .. } => None,
        }
    }

    /// What would have been right, for the model.
    pub(crate) fn opposite(&self) -> String {
        let list = |values: &[Value]| values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Self::Above(limit) => format!("at most {limit}"),
            Self::Below(limit) => format!("at least {limit}"),
            Self::In(values) => format!("none of {}", list(values)),
            Self::NotIn(values) => format!("one of {}", list(values)),
            Self::Glob(pattern) => format!("text that does not fit `{pattern}`"),
            Self::Matches(pattern) => format!("text that does not match `{pattern}`"),
            Self::Runs(patterns) => format!("a command that runs none of {}", ticked(patterns)),
            Self::Touches { places, from: Some(_), .. } => format!("nothing that names {}, or a directory above", ticked(places)),
            Self::Touches { places, .. } => format!("nothing that names {}", ticked(places)),
        }
    }
}

/// The first few; a long list helps nobody.
fn ticked(texts: &[String]) -> String {
    let mut listed = texts.iter().take(3).map(|text| format!("`{text}`")).collect::<Vec<_>>();
    if texts.len() > 3 {
        listed.push(format!("{} more", texts.len() - 3));
    }
    listed.join(", ")
}

/// Whether a value is, holds or stands in the tool's shell command, and that is something else than text: nobody reads it then as a shell
/// would.
fn is_in_pieces(ask: &Ask<'_>, path: &Pointer, value: &Value) -> bool {
    let Some(shell) = &ask.tool.shell else { return false };
    match shell.parts().strip_prefix(path.parts()) {
        Some(inside) => Pointer::of(inside.to_vec()).get(value).is_some_and(|command| !command.is_string() && !command.is_null()),
        None => path.parts().starts_with(shell.parts()) && !value.is_null(),
    }
}

/// Whether a text can be a path to a place, or to something in it: it has the place's own name in it, or leads through something else.
fn may_name(text: &str, place: &str) -> bool {
    let name = place.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    place.contains('*') || name.starts_with('~') || text.contains("/proc/") || text.contains('~') || text.contains(name)
}

/// What is longer is no path.
const LONGEST: usize = 4_096;

/// Arguments that hold what is written into a file, or looked for in one, without `_` and in small letters.
#[rustfmt::skip]
const CONTENTS: &[&str] = &[
    "body", "code", "codeedit", "content", "contents", "filetext", "inserttext", "message", "newsource", "newstr", "newstring", "newtext", "oldstr",
    "oldstring", "oldtext", "replacement", "text",
];

/// Arguments that say which file is meant, spelled the same.
const MEANT: &[&str] = &["filepath", "notebookpath", "path", "targetfile"];

/// Whether an argument is called like one of these.
fn is_called(name: &str, names: &[&str]) -> bool {
    names.contains(&name.replace(['_', '-'], "").to_ascii_lowercase().as_str())
}

/// Whether a text is what a file holds, and no file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contents {
    No,
    /// By what its argument is called.
    Likely,
    /// And another argument says which file is meant.
    Sure,
}

impl Contents {
    /// Of a text at a place, unless that is the one that a rule names.
    fn of(at: &Pointer, named: &Pointer, is_told: bool) -> Self {
        let inside = at.parts().get(named.parts().len()..).unwrap_or_default();
        let name = inside.iter().rev().find(|part| part.parse::<usize>().is_err());
        match name.is_some_and(|name| is_called(name, CONTENTS)) {
            false => Self::No,
            true if is_told => Self::Sure,
            true => Self::Likely,
        }
    }
}

/// The paths that a text names: itself, unless it is a whole page; the same without the space around it and without detours, as whoever
/// opens it may read it; and the files that a patch changes. Contents end in a line break, and nobody opens them; where it is said which
/// file is meant, they name no other.
fn paths_in(text: &str, contents: Contents) -> impl Iterator<Item = Cow<'_, str>> {
    let whole = Some(text).filter(|text| contents != Contents::Sure && text.len() <= LONGEST && !text.contains('\n'));
    let winds = text.len() > LONGEST || text.trim() != text || ["//", "/./", "/../"].iter().any(|detour| text.contains(detour));
    // Of several lines, only what says where it is can be a path.
    let is_path = |path: &String| path.len() <= LONGEST && (!path.contains('\n') || path.starts_with(['/', '~']));
    let plain = (winds && contents == Contents::No).then(|| normal(text.trim())).filter(is_path);
    let header = |line: &'_ str| -> Option<std::ops::Range<usize>> {
        let marks = [
            "*** Update File:",
            "*** Add File:",
            "*** Delete File:",
            "*** Move to:",
            "+++ ",
            "--- ",
            "rename to ",
            "rename from ",
            "copy to ",
        ];
        let mark = marks.iter().find(|mark| line.starts_with(**mark))?;
        Some(mark.len()..line.len())
    };
    let named = text.lines().filter(|_| text.contains('\n')).filter_map(move |line| line.get(header(line)?)).map(|path| {
        let path = path.split('\t').next().unwrap_or(path).trim();
        path.strip_prefix("a/").or_else(|| path.strip_prefix("b/")).unwrap_or(path)
    });
    whole.into_iter().chain(named).map(Cow::Borrowed).chain(plain.map(Cow::<str>::Owned))
}

/// Every text in a value, where it stands, and whether it is said there, or further up, which file is meant.
fn each_text(value: &Value, at: &mut Pointer, is_told: bool, visit: &mut impl FnMut(&Pointer, &str, bool)) {
    match value {
        Value::String(text) => visit(at, text, is_told),
        Value::Array(items) => {
            for (n, item) in items.iter().enumerate() {
                at.push(n.to_string());
                each_text(item, at, is_told, visit);
                at.pop();
            }
        }
        Value::Object(fields) => {
            let is_told =
                is_told || fields.iter().any(|(name, field)| field.as_str().is_some_and(|path| !path.is_empty()) && is_called(name, MEANT));
            for (name, field) in fields {
                at.push(name.clone());
                each_text(field, at, is_told, visit);
                at.pop();
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
