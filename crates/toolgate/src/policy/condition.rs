//! What an argument must be for a rule to speak.

use rust_decimal::Decimal;
use serde_json::Value;

use super::Fault;
use crate::json::{decimal_of, plain};
use crate::names::glob;

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

    /// Whether it holds of a value. What cannot be compared is a fault, never a "no".
    pub(crate) fn holds(&self, value: &Value) -> Result<bool, Fault> {
        // What a fault says is shown, and the value may be a secret.
        let number = || decimal_of(value).ok_or_else(|| Fault::new("the argument is no number that can be compared exactly"));
        let text = || value.as_str().ok_or_else(|| Fault::new("the argument is no text"));
        Ok(match self {
            Self::Above(limit) => number()? > *limit,
            Self::Below(limit) => number()? < *limit,
            Self::In(values) => values.contains(value),
            Self::NotIn(values) => !values.contains(value),
            Self::Glob(pattern) => glob(pattern, text()?),
            Self::Matches(pattern) => pattern.is_match(text()?),
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
            _ => false,
        }
    }

    /// The kind of value that it can be asked of, as a schema calls it.
    pub(crate) const fn wants(&self) -> Option<&'static str> {
        match self {
            Self::Above(_) | Self::Below(_) => Some("number"),
            Self::Glob(_) | Self::Matches(_) => Some("string"),
            Self::In(_) | Self::NotIn(_) => None,
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
        }
    }
}
