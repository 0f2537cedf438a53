//! Defines the values of expressions and the operations on them.

use std::borrow::Cow;
use std::cmp::Ordering;

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde_json::Value;

use super::{ArithmeticOp, CelFunction, CompareOp, TimestampPart};
use crate::policy::PolicyError;
use toolgate_json::{Pointer, decimal_of, multiply_exact};

#[derive(Debug, Clone)]
pub(crate) enum CelValue<'a> {
    Null,
    Bool(bool),
    Number(Decimal),
    Text(Cow<'a, str>),
    Time(Timestamp),
    Duration(SignedDuration),
    /// An array or object of the arguments or of evidence.
    Json(&'a Value),
    List(Vec<CelValue<'a>>),
}

impl<'a> CelValue<'a> {
    pub(crate) fn from_json(value: &'a Value) -> Result<Self, PolicyError> {
        Ok(match value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::Bool(*value),
            Value::Number(_) => Self::Number(
                decimal_of(value)
                    .ok_or_else(|| PolicyError::new("a number cannot be compared exactly"))?,
            ),
            Value::String(text) => Self::Text(text.as_str().into()),
            Value::Array(_) | Value::Object(_) => Self::Json(value),
        })
    }

    pub(crate) const fn type_name(&self) -> &'static str {
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

    pub(crate) fn as_bool(&self) -> Result<bool, PolicyError> {
        match self {
            Self::Bool(value) => Ok(*value),
            other => Err(type_fault("true or false", other)),
        }
    }

    pub(crate) fn as_text(&self) -> Result<&str, PolicyError> {
        match self {
            Self::Text(text) => Ok(text),
            other => Err(type_fault("text", other)),
        }
    }

    pub(crate) fn items(&self) -> Result<Vec<Self>, PolicyError> {
        match self {
            Self::List(items) => Ok(items.clone()),
            Self::Json(Value::Array(items)) => items.iter().map(Self::from_json).collect(),
            // As in CEL, iterating over an object iterates over its keys.
            Self::Json(Value::Object(map)) => {
                Ok(map.keys().map(|key| Self::Text(key.as_str().into())).collect())
            }
            other => Err(type_fault("a list", other)),
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
    pub(crate) fn read_cost(&self) -> usize {
        match self {
            // Cloning a list clones its items, too.
            Self::List(items) => items.iter().map(|item| 1 + item.read_cost()).sum(),
            Self::Json(Value::Array(items)) => items.len(),
            Self::Json(Value::Object(map)) => map.len(),
            Self::Text(text) => text.len() / 16,
            _ => 0,
        }
    }
}

pub(crate) fn type_fault(expected: &str, value: &CelValue<'_>) -> PolicyError {
    PolicyError(format!("expected {expected}, found {}", value.type_name()))
}

pub(crate) fn mismatch_fault(a: &CelValue<'_>, b: &CelValue<'_>) -> PolicyError {
    PolicyError(format!("{} cannot be compared with {}", a.type_name(), b.type_name()))
}

/// Returns the declared field that contains a path, and the rest of the path.
pub(crate) fn split_evidence_path<'f>(
    fields: impl Iterator<Item = &'f str>,
    path: &Pointer,
) -> Option<(&'f str, Pointer)> {
    let inside = |field: &'f str| {
        let declared = Pointer::from(field);
        let rest = path.parts().strip_prefix(declared.parts())?.to_vec();
        Some((field, Pointer::from_parts(rest)))
    };
    fields.filter_map(inside).min_by_key(|(_, rest)| rest.parts().len())
}

/// Returns the cost of reading a whole value, in steps.
pub(crate) fn json_read_cost(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(json_read_cost).sum::<usize>(),
        Value::Object(map) => 1 + map.values().map(json_read_cost).sum::<usize>(),
        Value::String(text) => 1 + text.len() / 16,
        _ => 1,
    }
}

pub(crate) fn overflow_fault() -> PolicyError {
    PolicyError::new("the numbers are too large or too precise for exact arithmetic")
}

pub(crate) fn get_field<'a>(of: &CelValue<'a>, name: &str) -> Result<CelValue<'a>, PolicyError> {
    match of {
        // The name may come from the arguments, so the visible fault must not contain it.
        CelValue::Json(Value::Object(map)) => map.get(name).map_or_else(
            || Err(PolicyError::new("an object lacks a member that the rule depends on")),
            CelValue::from_json,
        ),
        other => Err(type_fault("an object", other)),
    }
}

pub(crate) fn get_index<'a>(
    of: &CelValue<'a>,
    index: &CelValue<'a>,
) -> Result<CelValue<'a>, PolicyError> {
    match (of, index) {
        (CelValue::Json(Value::Object(_)), CelValue::Text(name)) => get_field(of, name),
        (_, CelValue::Number(number)) => {
            let at =
                usize::try_from(*number).ok().filter(|_| number.is_integer()).ok_or_else(|| {
                    PolicyError::new("a list index is not a whole number of at least 0")
                })?;
            of.items()?
                .into_iter()
                .nth(at)
                .ok_or_else(|| PolicyError::new("a list lacks an item that the rule depends on"))
        }
        (_, other) => Err(type_fault("an index", other)),
    }
}

pub(crate) fn compare_values(
    op: CompareOp,
    a: &CelValue<'_>,
    b: &CelValue<'_>,
) -> Result<bool, PolicyError> {
    let order = match (a, b) {
        (CelValue::Number(a), CelValue::Number(b)) => a.cmp(b),
        (CelValue::Text(a), CelValue::Text(b)) => a.cmp(b),
        (CelValue::Time(a), CelValue::Time(b)) => a.cmp(b),
        (CelValue::Duration(a), CelValue::Duration(b)) => a.cmp(b),
        _ => return Err(mismatch_fault(a, b)),
    };
    Ok(match op {
        CompareOp::Less => order == Ordering::Less,
        CompareOp::LessOrEqual => order != Ordering::Greater,
        CompareOp::Greater => order == Ordering::Greater,
        CompareOp::GreaterOrEqual | CompareOp::Equal | CompareOp::NotEqual => {
            order != Ordering::Less
        }
    })
}

pub(crate) fn compute<'a>(
    op: ArithmeticOp,
    a: CelValue<'a>,
    b: CelValue<'a>,
) -> Result<CelValue<'a>, PolicyError> {
    use ArithmeticOp::{Add, Divide, Multiply, Remainder, Subtract};
    Ok(match (op, a, b) {
        (Add, CelValue::Number(a), CelValue::Number(b)) => CelValue::Number(add_exact(a, b)?),
        (Subtract, CelValue::Number(a), CelValue::Number(b)) => CelValue::Number(add_exact(a, -b)?),
        (Multiply, CelValue::Number(a), CelValue::Number(b)) => {
            CelValue::Number(multiply_exact(a, b).ok_or_else(overflow_fault)?)
        }
        (Divide, CelValue::Number(a), CelValue::Number(b)) => {
            CelValue::Number(a.checked_div(b).ok_or_else(|| PolicyError::new("division by zero"))?)
        }
        (Remainder, CelValue::Number(a), CelValue::Number(b)) => {
            CelValue::Number(a.checked_rem(b).ok_or_else(|| PolicyError::new("division by zero"))?)
        }
        (Add, CelValue::Text(a), CelValue::Text(b)) => CelValue::Text(format!("{a}{b}").into()),
        (Add, CelValue::List(mut a), CelValue::List(b)) => {
            a.extend(b);
            CelValue::List(a)
        }
        (Add, CelValue::Time(time), CelValue::Duration(span))
        | (Add, CelValue::Duration(span), CelValue::Time(time)) => {
            CelValue::Time(time.checked_add(span).map_err(|_| overflow_fault())?)
        }
        (Subtract, CelValue::Time(time), CelValue::Duration(span)) => {
            CelValue::Time(time.checked_sub(span).map_err(|_| overflow_fault())?)
        }
        (Subtract, CelValue::Time(a), CelValue::Time(b)) => CelValue::Duration(a.duration_since(b)),
        (Add, CelValue::Duration(a), CelValue::Duration(b)) => {
            CelValue::Duration(a.checked_add(b).ok_or_else(overflow_fault)?)
        }
        (Subtract, CelValue::Duration(a), CelValue::Duration(b)) => {
            CelValue::Duration(a.checked_sub(b).ok_or_else(overflow_fault)?)
        }
        (_, a, b) => {
            return Err(PolicyError(format!(
                "cannot calculate with {} and {}",
                a.type_name(),
                b.type_name()
            )));
        }
    })
}

/// Adds two numbers exactly, or returns a fault.
pub(crate) fn add_exact(a: Decimal, b: Decimal) -> Result<Decimal, PolicyError> {
    let sum = a.checked_add(b).ok_or_else(overflow_fault)?;
    if sum.checked_sub(a) == Some(b) { Ok(sum) } else { Err(overflow_fault()) }
}

pub(crate) fn call_function<'a>(
    function: CelFunction,
    values: &[CelValue<'a>],
) -> Result<CelValue<'a>, PolicyError> {
    let missing = || PolicyError::new("a function lacks an argument");
    let first = values.first().ok_or_else(missing)?;
    let second = || values.get(1).ok_or_else(missing);
    Ok(match function {
        CelFunction::Decimal => match first {
            CelValue::Number(number) => CelValue::Number(*number),
            CelValue::Text(text) => CelValue::Number(parse_decimal(text)?),
            other => return Err(type_fault("a number", other)),
        },
        CelFunction::Duration => CelValue::Duration(parse_duration(first.as_text()?)?),
        CelFunction::Timestamp => match first {
            CelValue::Time(time) => CelValue::Time(*time),
            other => CelValue::Time(
                other
                    .as_text()?
                    .parse()
                    .map_err(|_| PolicyError::new("the text is not an RFC 3339 time"))?,
            ),
        },
        CelFunction::Glob => {
            CelValue::Bool(toolgate_text::matches_glob(second()?.as_text()?, first.as_text()?))
        }
        CelFunction::SumOf => {
            let mut sum = Decimal::ZERO;
            for item in first.items()? {
                match item {
                    CelValue::Number(number) => sum = add_exact(sum, number)?,
                    other => return Err(type_fault("a number", &other)),
                }
            }
            CelValue::Number(sum)
        }
        CelFunction::Size => CelValue::Number(match first {
            CelValue::Text(text) => text.chars().count().into(),
            other => other.items()?.len().into(),
        }),
        CelFunction::StartsWith => {
            CelValue::Bool(first.as_text()?.starts_with(second()?.as_text()?))
        }
        CelFunction::EndsWith => CelValue::Bool(first.as_text()?.ends_with(second()?.as_text()?)),
        CelFunction::Contains => CelValue::Bool(first.as_text()?.contains(second()?.as_text()?)),
        CelFunction::LowerAscii => CelValue::Text(first.as_text()?.to_ascii_lowercase().into()),
        CelFunction::Part(part) => {
            let CelValue::Time(time) = first else { return Err(type_fault("a time", first)) };
            let zone = match values.get(1) {
                Some(name) => TimeZone::get(name.as_text()?)
                    .map_err(|_| PolicyError::new("the text is not a time zone"))?,
                None => TimeZone::UTC,
            };
            let zoned = time.to_zoned(zone);
            CelValue::Number(match part {
                TimestampPart::Year => zoned.year().into(),
                // CEL counts months and days of the month from zero.
                TimestampPart::Month => (zoned.month() - 1).into(),
                TimestampPart::Day => (zoned.day() - 1).into(),
                TimestampPart::Weekday => zoned.weekday().to_sunday_zero_offset().into(),
                TimestampPart::Hour => zoned.hour().into(),
                TimestampPart::Minute => zoned.minute().into(),
            })
        }
        CelFunction::IsSame => return Err(missing()),
    })
}

pub(crate) fn parse_decimal(text: &str) -> Result<Decimal, PolicyError> {
    let number = toolgate_json::canonical_number(text.trim()).ok().map(Value::Number);
    number
        .as_ref()
        .and_then(decimal_of)
        .ok_or_else(|| PolicyError::new("the text is not a number that can be represented exactly"))
}

pub(crate) fn parse_duration(text: &str) -> Result<SignedDuration, PolicyError> {
    crate::clock::parse_duration(text).ok_or_else(|| {
        PolicyError::new(format!("the text is not a duration; {}", crate::clock::DURATION_HELP))
    })
}
