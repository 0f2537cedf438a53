//! Defines the values of expressions and the operations on them.

use std::borrow::Cow;
use std::cmp::Ordering;

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde_json::Value;

use super::{Arithmetic, Compare, Function, Part};
use crate::policy::Fault;
use toolgate_json::{Pointer, decimal_of, multiply_exact};

#[derive(Debug, Clone)]
pub(crate) enum Val<'a> {
    Null,
    Bool(bool),
    Number(Decimal),
    Text(Cow<'a, str>),
    Time(Timestamp),
    Duration(SignedDuration),
    /// An array or object of the arguments or of evidence.
    Json(&'a Value),
    List(Vec<Val<'a>>),
}

impl<'a> Val<'a> {
    pub(crate) fn of(value: &'a Value) -> Result<Self, Fault> {
        Ok(match value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::Bool(*value),
            Value::Number(_) => Self::Number(decimal_of(value).ok_or_else(|| Fault::new("a number cannot be compared exactly"))?),
            Value::String(text) => Self::Text(text.as_str().into()),
            Value::Array(_) | Value::Object(_) => Self::Json(value),
        })
    }

    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "true or false",
            Self::Number(_) => "a number",
            Self::Text(_) => "text",
            Self::Time(_) => "a time",
            Self::Duration(_) => "a duration",
            Self::Json(Value::Object(_)) => "an object",
            Self::Json(_) | Self::List(_) => "a list",
        }
    }

    pub(crate) fn bool(&self) -> Result<bool, Fault> {
        match self {
            Self::Bool(value) => Ok(*value),
            other => Err(unfit("true or false", other)),
        }
    }

    pub(crate) fn text(&self) -> Result<&str, Fault> {
        match self {
            Self::Text(text) => Ok(text),
            other => Err(unfit("text", other)),
        }
    }

    pub(crate) fn items(&self) -> Result<Vec<Self>, Fault> {
        match self {
            Self::List(items) => Ok(items.clone()),
            Self::Json(Value::Array(items)) => items.iter().map(Self::of).collect(),
            // As in CEL, iterating over an object iterates over its keys.
            Self::Json(Value::Object(map)) => Ok(map.keys().map(|key| Self::Text(key.as_str().into())).collect()),
            other => Err(unfit("a list", other)),
        }
    }

    /// Returns the number of items.
    pub(crate) const fn count(&self) -> usize {
        match self {
            Self::List(items) => items.len(),
            Self::Json(Value::Array(items)) => items.len(),
            _ => 0,
        }
    }

    /// Returns the cost of reading the value, in steps.
    pub(crate) fn length(&self) -> usize {
        match self {
            // Cloning a list clones its items, too.
            Self::List(items) => items.iter().map(|item| 1 + item.length()).sum(),
            Self::Json(Value::Array(items)) => items.len(),
            Self::Json(Value::Object(map)) => map.len(),
            Self::Text(text) => text.len() / 16,
            _ => 0,
        }
    }
}

pub(crate) fn unfit(wanted: &str, got: &Val<'_>) -> Fault {
    Fault(format!("expected {wanted}, found {}", got.kind()))
}

pub(crate) fn unlike(a: &Val<'_>, b: &Val<'_>) -> Fault {
    Fault(format!("{} cannot be compared with {}", a.kind(), b.kind()))
}

/// Returns the declared field that contains a path, and the rest of the path.
pub(crate) fn proved_in<'f>(fields: impl Iterator<Item = &'f str>, path: &Pointer) -> Option<(&'f str, Pointer)> {
    let inside = |field: &'f str| {
        let declared = Pointer::from(field);
        let rest = path.parts().strip_prefix(declared.parts())?.to_vec();
        Some((field, Pointer::from_parts(rest)))
    };
    fields.filter_map(inside).min_by_key(|(_, rest)| rest.parts().len())
}

/// Returns the cost of reading a whole value, in steps.
pub(crate) fn weight(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(weight).sum::<usize>(),
        Value::Object(map) => 1 + map.values().map(weight).sum::<usize>(),
        Value::String(text) => 1 + text.len() / 16,
        _ => 1,
    }
}

pub(crate) fn too_large() -> Fault {
    Fault::new("the numbers are too large or too precise for exact arithmetic")
}

pub(crate) fn field<'a>(of: &Val<'a>, name: &str) -> Result<Val<'a>, Fault> {
    match of {
        // The name may come from the arguments, so the visible fault must not contain it.
        Val::Json(Value::Object(map)) => {
            map.get(name).map_or_else(|| Err(Fault::new("an object lacks a member that the rule depends on")), Val::of)
        }
        other => Err(unfit("an object", other)),
    }
}

pub(crate) fn index_of<'a>(of: &Val<'a>, index: &Val<'a>) -> Result<Val<'a>, Fault> {
    match (of, index) {
        (Val::Json(Value::Object(_)), Val::Text(name)) => field(of, name),
        (_, Val::Number(number)) => {
            let at = usize::try_from(*number)
                .ok()
                .filter(|_| number.is_integer())
                .ok_or_else(|| Fault::new("a list index is not a whole number of at least 0"))?;
            of.items()?.into_iter().nth(at).ok_or_else(|| Fault::new("a list lacks an item that the rule depends on"))
        }
        (_, other) => Err(unfit("an index", other)),
    }
}

pub(crate) fn compare(op: Compare, a: &Val<'_>, b: &Val<'_>) -> Result<bool, Fault> {
    let order = match (a, b) {
        (Val::Number(a), Val::Number(b)) => a.cmp(b),
        (Val::Text(a), Val::Text(b)) => a.cmp(b),
        (Val::Time(a), Val::Time(b)) => a.cmp(b),
        (Val::Duration(a), Val::Duration(b)) => a.cmp(b),
        _ => return Err(unlike(a, b)),
    };
    Ok(match op {
        Compare::Less => order == Ordering::Less,
        Compare::LessOrEqual => order != Ordering::Greater,
        Compare::Greater => order == Ordering::Greater,
        Compare::GreaterOrEqual | Compare::Equal | Compare::NotEqual => order != Ordering::Less,
    })
}

pub(crate) fn arithmetic<'a>(op: Arithmetic, a: Val<'a>, b: Val<'a>) -> Result<Val<'a>, Fault> {
    use Arithmetic::{Add, Divide, Multiply, Remainder, Subtract};
    Ok(match (op, a, b) {
        (Add, Val::Number(a), Val::Number(b)) => Val::Number(add(a, b)?),
        (Subtract, Val::Number(a), Val::Number(b)) => Val::Number(add(a, -b)?),
        (Multiply, Val::Number(a), Val::Number(b)) => Val::Number(multiply_exact(a, b).ok_or_else(too_large)?),
        (Divide, Val::Number(a), Val::Number(b)) => Val::Number(a.checked_div(b).ok_or_else(|| Fault::new("division by zero"))?),
        (Remainder, Val::Number(a), Val::Number(b)) => Val::Number(a.checked_rem(b).ok_or_else(|| Fault::new("division by zero"))?),
        (Add, Val::Text(a), Val::Text(b)) => Val::Text(format!("{a}{b}").into()),
        (Add, Val::List(mut a), Val::List(b)) => {
            a.extend(b);
            Val::List(a)
        }
        (Add, Val::Time(time), Val::Duration(span)) | (Add, Val::Duration(span), Val::Time(time)) => {
            Val::Time(time.checked_add(span).map_err(|_| too_large())?)
        }
        (Subtract, Val::Time(time), Val::Duration(span)) => Val::Time(time.checked_sub(span).map_err(|_| too_large())?),
        (Subtract, Val::Time(a), Val::Time(b)) => Val::Duration(a.duration_since(b)),
        (Add, Val::Duration(a), Val::Duration(b)) => Val::Duration(a.checked_add(b).ok_or_else(too_large)?),
        (Subtract, Val::Duration(a), Val::Duration(b)) => Val::Duration(a.checked_sub(b).ok_or_else(too_large)?),
        (_, a, b) => return Err(Fault(format!("cannot calculate with {} and {}", a.kind(), b.kind()))),
    })
}

/// Adds two numbers exactly, or returns a fault.
pub(crate) fn add(a: Decimal, b: Decimal) -> Result<Decimal, Fault> {
    let sum = a.checked_add(b).ok_or_else(too_large)?;
    if sum.checked_sub(a) == Some(b) { Ok(sum) } else { Err(too_large()) }
}

pub(crate) fn apply<'a>(function: Function, values: &[Val<'a>]) -> Result<Val<'a>, Fault> {
    let missing = || Fault::new("a function lacks an argument");
    let first = values.first().ok_or_else(missing)?;
    let second = || values.get(1).ok_or_else(missing);
    Ok(match function {
        Function::Decimal => match first {
            Val::Number(number) => Val::Number(*number),
            Val::Text(text) => Val::Number(decimal(text)?),
            other => return Err(unfit("a number", other)),
        },
        Function::Duration => Val::Duration(duration(first.text()?)?),
        Function::Timestamp => match first {
            Val::Time(time) => Val::Time(*time),
            other => Val::Time(other.text()?.parse().map_err(|_| Fault::new("the text is not an RFC 3339 time"))?),
        },
        Function::Glob => Val::Bool(toolgate_text::glob(second()?.text()?, first.text()?)),
        Function::SumOf => {
            let mut sum = Decimal::ZERO;
            for item in first.items()? {
                match item {
                    Val::Number(number) => sum = add(sum, number)?,
                    other => return Err(unfit("a number", &other)),
                }
            }
            Val::Number(sum)
        }
        Function::Size => Val::Number(match first {
            Val::Text(text) => text.chars().count().into(),
            other => other.items()?.len().into(),
        }),
        Function::StartsWith => Val::Bool(first.text()?.starts_with(second()?.text()?)),
        Function::EndsWith => Val::Bool(first.text()?.ends_with(second()?.text()?)),
        Function::Contains => Val::Bool(first.text()?.contains(second()?.text()?)),
        Function::LowerAscii => Val::Text(first.text()?.to_ascii_lowercase().into()),
        Function::Part(part) => {
            let Val::Time(time) = first else { return Err(unfit("a time", first)) };
            let zone = match values.get(1) {
                Some(name) => TimeZone::get(name.text()?).map_err(|_| Fault::new("the text is not a time zone"))?,
                None => TimeZone::UTC,
            };
            let zoned = time.to_zoned(zone);
            Val::Number(match part {
                Part::Year => zoned.year().into(),
                // CEL counts months and days of the month from zero.
                Part::Month => (zoned.month() - 1).into(),
                Part::Day => (zoned.day() - 1).into(),
                Part::Weekday => zoned.weekday().to_sunday_zero_offset().into(),
                Part::Hour => zoned.hour().into(),
                Part::Minute => zoned.minute().into(),
            })
        }
        Function::IsSame => return Err(missing()),
    })
}

pub(crate) fn decimal(text: &str) -> Result<Decimal, Fault> {
    let number = toolgate_json::canonical_number(text.trim()).ok().map(Value::Number);
    number.as_ref().and_then(decimal_of).ok_or_else(|| Fault::new("the text is not a number that can be represented exactly"))
}

pub(crate) fn duration(text: &str) -> Result<SignedDuration, Fault> {
    crate::clock::parse_duration(text).ok_or_else(|| Fault::new(format!("the text is not a duration; {}", crate::clock::LENGTHS)))
}
