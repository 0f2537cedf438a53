//! Defines the conditions on arguments that decide whether a rule applies.

use std::borrow::Cow;

use rust_decimal::Decimal;
use serde_json::Value;

use super::{PolicyError, PolicyInput};
use crate::policy::path_candidates::{
    ContentLikelihood, can_name_place, candidate_paths, visit_texts,
};
use toolgate_json::{Pointer, decimal_of, with_canonical_numbers};
use toolgate_shell::{Certainty, PathPattern, ShellAnalysis};
use toolgate_text::matches_glob;

/// A condition on one argument.
///
/// Numbers are compared exactly.
#[derive(Debug, Clone)]
pub enum Condition {
    /// The number is greater than this.
    Above(Decimal),
    /// The number is less than this.
    Below(Decimal),
    /// The value is one of these.
    In(Vec<Value>),
    /// The value is none of these.
    NotIn(Vec<Value>),
    /// The text matches a pattern in which `*` matches any text.
    Glob(String),
    /// A regular expression matches a part of the text, in time linear in its length.
    Matches(regex::Regex),
    /// The shell command runs one of these, in any spelling.
    ///
    /// A pattern is a program and then words in order, as in `git push --force*` or `rm -rf`. If
    /// the result is uncertain, a person is asked. [`crate::Tool::shell`] names the argument that
    /// holds the command.
    Runs(Vec<String>),
    /// The text or shell command names one of these files.
    ///
    /// A place is a path, which includes everything below it, or a bare name in any directory.
    /// Text inside objects and lists counts.
    Touches {
        /// The paths and names.
        places: Vec<String>,
        /// Whether words that only the running shell knows pass, unless the command changes them.
        lenient: bool,
        /// Whether a command that reads a whole tree with a place in it counts.
        ///
        /// With `from`, such a command always counts.
        trees: bool,
        /// Whether a text that is not a command must give the location of the file.
        ///
        /// The location starts at the root or at home, or contains the directory.
        whole: bool,
        /// The absolute path of the directory where a search or a read of a whole tree starts.
        ///
        /// If set, a parent directory of a place counts too, and an absent argument means this
        /// directory.
        from: Option<String>,
    },
}

const UNKNOWN_WORDS_REASON: &str = "some words of the command are known only when it runs";
const UNKNOWN_DIRECTORY_REASON: &str =
    "its working directory, or the target of a path in it, is known only when it runs";
const UNKNOWN_FILES_REASON: &str =
    "the files that it writes or removes are known only when it runs";
const COMMAND_NOT_TEXT_REASON: &str = "the command is not text";

/// The result of checking a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ConditionResult {
    No,
    Yes,
    /// The result is uncertain, for this reason.
    Uncertain(String),
}

impl ConditionResult {
    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Yes, _) | (_, Self::Yes) => Self::Yes,
            (Self::No, other) => other,
            (maybe, _) => maybe,
        }
    }
}

/// Combines a shell verdict with the doubts about the command.
fn to_condition_result(
    certainty: Certainty,
    shell: &ShellAnalysis,
    reason: &str,
) -> ConditionResult {
    match (certainty, shell.first_opaque_reason()) {
        (Certainty::Yes, _) => ConditionResult::Yes,
        (_, Some(reason)) => ConditionResult::Uncertain(reason.to_owned()),
        (Certainty::Maybe, None) => ConditionResult::Uncertain(reason.to_owned()),
        (Certainty::No, None) => ConditionResult::No,
    }
}

impl Condition {
    /// Creates a condition that holds for one of these values.
    pub fn one_of(values: impl IntoIterator<Item = Value>) -> Self {
        Self::In(values.into_iter().collect()).normalized()
    }

    /// Creates a condition that holds for none of these values.
    pub fn none_of(values: impl IntoIterator<Item = Value>) -> Self {
        Self::NotIn(values.into_iter().collect()).normalized()
    }

    /// Normalizes the values as checked arguments are normalized: 1.0 becomes 1.
    pub(super) fn normalized(self) -> Self {
        match self {
            Self::In(values) => Self::In(values.into_iter().map(with_canonical_numbers).collect()),
            Self::NotIn(values) => {
                Self::NotIn(values.into_iter().map(with_canonical_numbers).collect())
            }
            other => other,
        }
    }

    /// Creates a condition from a regular expression.
    ///
    /// # Errors
    /// Returns an error if the expression is not valid or too large.
    pub fn matches(pattern: &str) -> Result<Self, regex::Error> {
        regex::RegexBuilder::new(pattern).size_limit(1 << 20).build().map(Self::Matches)
    }

    /// Returns whether the result may depend on the location of the home directory.
    pub(crate) fn depends_on_home(
        &self,
        input: &PolicyInput<'_>,
        path: &Pointer,
        value: Option<&Value>,
    ) -> bool {
        let Self::Touches { places, from, .. } = self else { return false };
        let is_in_home = |place: &String| place.starts_with('~');
        let (mut depends, mut has_text) = (false, false);
        visit_texts(
            value.unwrap_or(&Value::Null),
            &mut path.clone(),
            false,
            &mut |at, text, has_file_argument| {
                has_text = true;
                let contents = ContentLikelihood::classify(at, path, has_file_argument);
                let is_near = |place: &String| {
                    is_in_home(place) && (from.is_some() || can_name_place(text, place))
                };
                depends = match input.tool.shell.as_ref() == Some(at) {
                    _ if depends => true,
                    true => {
                        places.iter().any(is_in_home) || input.arguments.shell(text).can_name_home()
                    }
                    false
                        if text.contains('~')
                            && candidate_paths(text, contents).any(|path| path.contains('~')) =>
                    {
                        true
                    }
                    false => {
                        places.iter().any(is_near)
                            && candidate_paths(text, contents).next().is_some()
                    }
                };
            },
        );
        // An argument without text means the directory where the search starts.
        depends || (!has_text && from.is_some() && places.iter().any(is_in_home))
    }

    /// Checks the condition for an argument of a call.
    pub(crate) fn evaluate(
        &self,
        input: &PolicyInput<'_>,
        path: &Pointer,
        value: &Value,
    ) -> Result<ConditionResult, PolicyError> {
        match self {
            Self::Runs(patterns) => {
                let text =
                    value.as_str().ok_or_else(|| PolicyError::new("the argument is not text"))?;
                let shell = input.arguments.shell(text);
                Ok(to_condition_result(
                    patterns
                        .iter()
                        .map(|pattern| shell.match_program(pattern))
                        .max()
                        .unwrap_or(Certainty::No),
                    &shell,
                    UNKNOWN_WORDS_REASON,
                ))
            }
            Self::Touches { places, lenient, trees, whole, from } => {
                let (home, mut found, mut has_text) =
                    (input.home_dir(), ConditionResult::No, false);
                visit_texts(value, &mut path.clone(), false, &mut |at, text, has_file_argument| {
                    has_text = true;
                    let is_command = input.tool.shell.as_ref() == Some(at);
                    let contents = ContentLikelihood::classify(at, path, has_file_argument);
                    // Most texts name no place, so skip the rest early.
                    let relevant = places.iter().filter(|place| {
                        is_command || from.is_some() || can_name_place(text, place)
                    });
                    let places: Vec<PathPattern<'_>> =
                        relevant.map(|place| PathPattern::new(place, &home)).collect();
                    let named = if is_command {
                        let shell = input.arguments.shell(text);
                        let certainty =
                            shell.match_paths(&places, *lenient, *trees, from.as_deref());
                        let reason = match shell.has_filled_directory() {
                            true => UNKNOWN_FILES_REASON,
                            false if shell.is_fully_known() => UNKNOWN_DIRECTORY_REASON,
                            false => UNKNOWN_WORDS_REASON,
                        };
                        to_condition_result(certainty, &shell, reason)
                    } else {
                        // In other texts, only `/proc/` and `..` make a path uncertain.
                        let is_indirect = |path: &str| {
                            (path.starts_with("/proc/") || path.contains("/../"))
                                && !path.contains(char::is_whitespace)
                        };
                        let named =
                            |place: &PathPattern<'_>, path: &str| match place.match_text(path) {
                                Certainty::Maybe if !is_indirect(path) => Certainty::No,
                                _ if *whole && place.has_only_same_name(path) => Certainty::No,
                                certainty => certainty,
                            };
                        let above = |place: &PathPattern<'_>, path: &str| {
                            from.as_deref().map_or(Certainty::No, |from| {
                                place.match_relative_parent(from, path)
                            })
                        };
                        let match_place = |place: &PathPattern<'_>, path: &str| {
                            named(place, path).max(above(place, path))
                        };
                        let paths: Vec<Cow<'_, str>> = candidate_paths(text, contents).collect();
                        match places
                            .iter()
                            .flat_map(|place| {
                                paths.iter().map(move |path| match_place(place, path.as_ref()))
                            })
                            .max()
                        {
                            Some(Certainty::Yes) => ConditionResult::Yes,
                            Some(Certainty::Maybe) => ConditionResult::Uncertain(
                                "a path in it goes through `/proc` or `..`".to_owned(),
                            ),
                            _ => ConditionResult::No,
                        }
                    };
                    found = std::mem::replace(&mut found, ConditionResult::No).or(named);
                });
                if is_non_text_command(input, path, value) {
                    found =
                        found.or(ConditionResult::Uncertain(COMMAND_NOT_TEXT_REASON.to_owned()));
                }
                // Null and an empty list count as an absent argument.
                let searches_here =
                    !has_text && from.is_some() && self.is_met_by_absent(|| input.home_dir());
                Ok(if searches_here { ConditionResult::Yes } else { found })
            }
            other => {
                Ok(if other.is_met_by(value)? { ConditionResult::Yes } else { ConditionResult::No })
            }
        }
    }

    /// Returns whether the condition holds for an absent argument.
    ///
    /// An absent argument does not pass a rule. A search without a directory starts in `from`.
    pub(crate) fn is_met_by_absent<'h>(&self, home: impl FnOnce() -> Cow<'h, str>) -> bool {
        match self {
            Self::Touches { places, from: Some(from), .. } => {
                let home = home();
                places.iter().any(|place| {
                    PathPattern::new(place, &home).match_relative_parent(from, ".") != Certainty::No
                })
            }
            _ => true,
        }
    }

    /// Checks the condition for a value; a value that cannot be compared is a fault, never a "no".
    pub(crate) fn is_met_by(&self, value: &Value) -> Result<bool, PolicyError> {
        // The message of a fault is visible, so it must not contain the value, which may be secret.
        let number = || {
            decimal_of(value).ok_or_else(|| {
                PolicyError::new("the argument is not a number that can be compared exactly")
            })
        };
        let text = || value.as_str().ok_or_else(|| PolicyError::new("the argument is not text"));
        Ok(match self {
            Self::Above(limit) => number()? > *limit,
            Self::Below(limit) => number()? < *limit,
            Self::In(values) => {
                // A tool may convert another type: `"3"` to 3, or null to its default.
                let is_alike = |listed: &Value| {
                    std::mem::discriminant(listed) == std::mem::discriminant(value)
                };
                if !values.iter().any(is_alike) {
                    return Err(PolicyError::new(
                        "the argument has another type than every value that it is compared with",
                    ));
                }
                values.contains(value)
            }
            Self::NotIn(values) => !values.contains(value),
            Self::Glob(pattern) => matches_glob(pattern, text()?),
            Self::Matches(pattern) => pattern.is_match(text()?),
            Self::Runs(_) | Self::Touches { .. } => {
                return Err(PolicyError::new("cannot check a command without its tool"));
            }
        })
    }

    /// Describes the condition.
    pub(crate) fn describe(&self) -> String {
        let list = |values: &[Value]| {
            values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::Above(limit) => format!("above {limit}"),
            Self::Below(limit) => format!("below {limit}"),
            Self::In(values) => format!("in {}", list(values)),
            Self::NotIn(values) => format!("not in {}", list(values)),
            Self::Glob(pattern) => format!("like `{pattern}`"),
            Self::Matches(pattern) => format!("matching `{pattern}`"),
            Self::Runs(patterns) => format!("running {}", list_in_backticks(patterns)),
            Self::Touches { places, from: Some(_), .. } => {
                format!("naming {} or a parent directory", list_in_backticks(places))
            }
            Self::Touches { places, .. } => format!("naming {}", list_in_backticks(places)),
        }
    }

    /// Returns whether this condition certainly implies the other one.
    pub(crate) fn implies(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Above(a), Self::Above(b)) => a >= b,
            (Self::Below(a), Self::Below(b)) => a <= b,
            (Self::In(values), other) => {
                values.iter().all(|value| other.is_met_by(value).unwrap_or(false))
            }
            (Self::NotIn(a), Self::NotIn(b)) => b.iter().all(|value| a.contains(value)),
            (Self::Glob(a), Self::Glob(b)) => a == b,
            (Self::Matches(a), Self::Matches(b)) => a.as_str() == b.as_str(),
            (Self::Runs(a), Self::Runs(b)) => a.iter().all(|pattern| b.contains(pattern)),
            (
                Self::Touches { places: a, lenient: x, trees: s, whole: v, from: f },
                Self::Touches { places: b, lenient: y, trees: t, whole: w, from: g },
            ) if v == w && f == g => {
                a.iter().all(|place| b.contains(place)) && (*x || !y) && (!s || *t)
            }
            _ => false,
        }
    }

    /// Returns the JSON Schema type that the condition needs, if it needs one.
    pub(crate) const fn required_type(&self) -> Option<&'static str> {
        match self {
            Self::Above(_) | Self::Below(_) => Some("number"),
            Self::Glob(_) | Self::Matches(_) | Self::Runs(_) => Some("string"),
            Self::In(_) | Self::NotIn(_) | Self::Touches { .. } => None,
        }
    }

    /// Describes for the model which values pass.
    pub(crate) fn describe_opposite(&self) -> String {
        let list = |values: &[Value]| {
            values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::Above(limit) => format!("at most {limit}"),
            Self::Below(limit) => format!("at least {limit}"),
            Self::In(values) => format!("none of {}", list(values)),
            Self::NotIn(values) => format!("one of {}", list(values)),
            Self::Glob(pattern) => format!("text that is not like `{pattern}`"),
            Self::Matches(pattern) => format!("text that does not match `{pattern}`"),
            Self::Runs(patterns) => {
                format!("a command that runs none of {}", list_in_backticks(patterns))
            }
            Self::Touches { places, from: Some(_), .. } => {
                format!(
                    "a value that does not name {} or a parent directory",
                    list_in_backticks(places)
                )
            }
            Self::Touches { places, .. } => {
                format!("a value that does not name {}", list_in_backticks(places))
            }
        }
    }
}

/// Lists the first three in backticks, and the number of the others.
fn list_in_backticks(texts: &[String]) -> String {
    let mut listed = texts.iter().take(3).map(|text| format!("`{text}`")).collect::<Vec<_>>();
    if texts.len() > 3 {
        listed.push(format!("{} more", texts.len() - 3));
    }
    listed.join(", ")
}

/// Returns whether a value is, contains or is part of a shell command that is not text.
///
/// Such a command cannot be parsed as a shell would parse it.
fn is_non_text_command(input: &PolicyInput<'_>, path: &Pointer, value: &Value) -> bool {
    let Some(shell) = &input.tool.shell else { return false };
    match shell.parts().strip_prefix(path.parts()) {
        Some(inside) => Pointer::from_parts(inside.to_vec())
            .get(value)
            .is_some_and(|command| !command.is_string() && !command.is_null()),
        None => path.parts().starts_with(shell.parts()) && !value.is_null(),
    }
}
