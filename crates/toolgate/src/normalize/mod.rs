//! Normalizes the results of a tool to a stable shape, by declared rules.
//!
//! A path is a JSON pointer with `*` for every item. Absent and `null` values are left unchanged.
//! Any other value that a rule cannot convert fails the call, because a guess would be worse.

mod timestamp;

pub use timestamp::TimeUnit;

use std::collections::BTreeMap;

use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use toolgate_json::{Pointer, decimal_of, multiply_exact, number_from_decimal};
use toolgate_text::escape_for_display;

/// A letter case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LetterCase {
    /// `PAID`
    Upper,
    /// `paid`
    Lower,
    /// `order_paid`
    Snake,
}

/// One step of normalization.
///
/// ```
/// use serde_json::json;
/// use toolgate::{Decimal, normalize::{NormalizationRule, apply_rules}};
/// let mut order = json!({"id": 7, "created_unix": 1700000000, "state": 2, "total_cents": 1999});
/// apply_rules(&[
///     NormalizationRule::rename("/created_unix", "created_at"),
///     NormalizationRule::timestamp("/created_at"),
///     NormalizationRule::codes("/state", [("1", "OPEN"), ("2", "PAID")]),
///     NormalizationRule::scale("/total_cents", Decimal::new(1, 2)),
///     NormalizationRule::rename("/total_cents", "total"),
/// ], &mut order)?;
/// assert_eq!(order, json!({"id": 7, "created_at": "2023-11-14T22:13:20Z", "state": "PAID", "total": 19.99}));
/// # Ok::<(), toolgate::normalize::NormalizationError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum NormalizationRule {
    /// Converts a Unix time or a common date string to RFC 3339 in UTC.
    Timestamp {
        /// The path of the value.
        path: Pointer,
        /// The unit of a number since 1970.
        ///
        /// Without it, the size decides: below 10^11 seconds, then milliseconds, and so on.
        /// Milliseconds before March 1973 need a unit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unit: Option<TimeUnit>,
    },
    /// Replaces codes by names.
    Codes {
        /// The path of the value.
        path: Pointer,
        /// The name of each code.
        names: BTreeMap<String, String>,
        /// The name of every other code; without it, another code is an error.
        #[serde(default)]
        other: Option<String>,
    },
    /// Renames a member of an object.
    Rename {
        /// The path of the member.
        path: Pointer,
        /// The new name.
        to: String,
    },
    /// Keeps the first of some members that is not `null`, under one name, and removes the others.
    FirstOf {
        /// The path of the objects.
        #[serde(default)]
        within: Pointer,
        /// The names, preferred first.
        names: Vec<String>,
        /// The new name.
        to: String,
    },
    /// Converts `1`, `"yes"`, `"true"`, `"on"` and their opposites to booleans.
    Bool {
        /// The path of the value.
        path: Pointer,
    },
    /// Converts text to a letter case.
    Case {
        /// The path of the value.
        path: Pointer,
        /// The letter case.
        to: LetterCase,
    },
    /// Multiplies a number (or a number in a string) exactly, for example to convert cents.
    Scale {
        /// The path of the value.
        path: Pointer,
        /// The factor.
        by: Decimal,
    },
    /// Sets an absent or `null` value.
    Default {
        /// The path of the value; the objects that contain it must exist.
        path: Pointer,
        /// The value.
        value: Value,
    },
    /// Removes all other members.
    Keep {
        /// The path of the objects.
        #[serde(default)]
        within: Pointer,
        /// The names of the members to keep.
        names: Vec<String>,
    },
}

impl NormalizationRule {
    /// See [`NormalizationRule::Timestamp`].
    pub fn timestamp(path: &str) -> Self {
        Self::Timestamp { path: path.into(), unit: None }
    }

    /// See [`NormalizationRule::Timestamp`].
    pub fn timestamp_in(path: &str, unit: TimeUnit) -> Self {
        Self::Timestamp { path: path.into(), unit: Some(unit) }
    }

    /// See [`NormalizationRule::Codes`].
    pub fn codes<'a>(path: &str, names: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        Self::Codes {
            path: path.into(),
            names: names.into_iter().map(|(c, n)| (c.to_owned(), n.to_owned())).collect(),
            other: None,
        }
    }

    /// See [`NormalizationRule::Rename`].
    pub fn rename(path: &str, to: &str) -> Self {
        Self::Rename { path: path.into(), to: to.to_owned() }
    }

    /// See [`NormalizationRule::FirstOf`].
    pub fn first_of<'a>(within: &str, names: impl IntoIterator<Item = &'a str>, to: &str) -> Self {
        Self::FirstOf {
            within: within.into(),
            names: names.into_iter().map(str::to_owned).collect(),
            to: to.to_owned(),
        }
    }

    /// See [`NormalizationRule::Bool`].
    pub fn bool(path: &str) -> Self {
        Self::Bool { path: path.into() }
    }

    /// See [`NormalizationRule::Case`].
    pub fn case(path: &str, to: LetterCase) -> Self {
        Self::Case { path: path.into(), to }
    }

    /// See [`NormalizationRule::Scale`].
    pub fn scale(path: &str, by: Decimal) -> Self {
        Self::Scale { path: path.into(), by }
    }

    /// See [`NormalizationRule::Default`].
    pub fn default_value(path: &str, value: Value) -> Self {
        Self::Default { path: path.into(), value }
    }

    /// See [`NormalizationRule::Keep`].
    pub fn keep<'a>(within: &str, names: impl IntoIterator<Item = &'a str>) -> Self {
        Self::Keep { within: within.into(), names: names.into_iter().map(str::to_owned).collect() }
    }

    fn apply(&self, value: &mut Value) -> Result<(), NormalizationError> {
        match self {
            Self::Timestamp { path, unit } => rewrite_each(path, value, |old| {
                timestamp::to_rfc3339(old, *unit).map(Value::String)
            }),
            Self::Codes { path, names, other } => rewrite_each(path, value, |old| {
                let name = code_text(old).and_then(|code| names.get(&code).or(other.as_ref()));
                name.cloned().map(Value::String).ok_or("is not a known code")
            }),
            Self::Rename { path, to } => rename_member(path, to, value),
            Self::FirstOf { within, names, to } => rewrite_objects(within, value, |map| {
                let first =
                    names.iter().position(|name| map.get(name).is_some_and(|v| !v.is_null()));
                let found = first
                    .and_then(|index| names.get(index))
                    .and_then(|name| map.get(name).cloned());
                names.iter().for_each(|name| {
                    map.remove(name);
                });
                if let Some(found) = found {
                    map.insert(to.clone(), found);
                }
            }),
            Self::Bool { path } => rewrite_each(path, value, |old| to_bool(old).map(Value::Bool)),
            Self::Case { path, to } => rewrite_each(path, value, |old| {
                let text = old.as_str().ok_or("is not text")?;
                Ok(Value::String(match to {
                    LetterCase::Upper => text.to_uppercase(),
                    LetterCase::Lower => text.to_lowercase(),
                    LetterCase::Snake => to_snake_case(text),
                }))
            }),
            Self::Scale { path, by } => rewrite_each(path, value, |old| {
                let number = to_decimal(old).ok_or("is not a number")?;
                // Drop trailing zeros, which would count as digits of the product.
                multiply_exact(number.normalize(), *by)
                    .map(number_from_decimal)
                    .ok_or("is too large or too precise for exact arithmetic")
            }),
            Self::Default { path, value: default } => match path.split_last() {
                Some((within, name)) => rewrite_objects(&within, value, |map| {
                    if map.get(name).is_none_or(Value::is_null) {
                        map.insert(name.to_owned(), default.clone());
                    }
                }),
                None => {
                    if value.is_null() {
                        *value = default.clone();
                    }
                    Ok(())
                }
            },
            Self::Keep { within, names } => {
                rewrite_objects(within, value, |map| map.retain(|name, _| names.contains(name)))
            }
        }
    }

    /// Describes what the rule lacks to have an effect.
    pub(crate) fn missing_setting(&self) -> Option<String> {
        let is_open = |path: &Pointer| path.parts().last().is_some_and(|part| part == "*");
        match self {
            Self::Default { path, .. } | Self::Rename { path, .. } if is_open(path) => {
                Some(format!("names no member: `{path}` ends in `*`"))
            }
            Self::Codes { names, other: None, .. } if names.is_empty() => {
                Some("has no `names`, so every code is an error".to_owned())
            }
            Self::FirstOf { names, .. } | Self::Keep { names, .. } if names.is_empty() => {
                Some("has no `names`".to_owned())
            }
            _ => None,
        }
    }
}

/// A value that a rule cannot convert.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{value}` at `{path}` {reason}")]
pub struct NormalizationError {
    /// The path of the value.
    pub path: String,
    /// The value.
    pub value: String,
    /// The reason.
    pub reason: &'static str,
}

/// Applies rules in order.
///
/// # Errors
/// Returns the first value that a rule cannot convert.
pub fn apply_rules(
    rules: &[NormalizationRule],
    value: &mut Value,
) -> Result<(), NormalizationError> {
    rules.iter().try_for_each(|rule| rule.apply(value))
}

fn rewrite_each(
    path: &Pointer,
    value: &mut Value,
    f: impl Fn(&Value) -> Result<Value, &'static str>,
) -> Result<(), NormalizationError> {
    path.rewrite(value, &mut |old| {
        if old.is_null() {
            return Ok(Some(old));
        }
        f(&old).map(Some).map_err(|reason| NormalizationError {
            path: path.to_string(),
            value: escape_for_display(&old.to_string()),
            reason,
        })
    })
}

fn rewrite_objects(
    within: &Pointer,
    value: &mut Value,
    mut f: impl FnMut(&mut Map<String, Value>),
) -> Result<(), NormalizationError> {
    within.rewrite(value, &mut |mut old| {
        match &mut old {
            Value::Object(map) => f(map),
            Value::Array(items) => {
                items.iter_mut().filter_map(Value::as_object_mut).for_each(&mut f)
            }
            _ => {}
        }
        Ok(Some(old))
    })
}

fn rename_member(path: &Pointer, to: &str, value: &mut Value) -> Result<(), NormalizationError> {
    let Some((within, from)) = path.split_last() else { return Ok(()) };
    rewrite_objects(&within, value, |map| {
        if let Some(old) = map.remove(from) {
            map.insert(to.to_owned(), old);
        }
    })
}

fn code_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

fn to_decimal(value: &Value) -> Option<Decimal> {
    match value {
        Value::String(text) => Decimal::from_str_exact(text.trim()).ok(),
        value => decimal_of(value),
    }
}

fn to_bool(value: &Value) -> Result<bool, &'static str> {
    let text = code_text(value).ok_or("is not a boolean")?;
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "yes" | "y" | "on" | "1" | "t" | "enabled" | "active" => Ok(true),
        "false" | "no" | "n" | "off" | "0" | "f" | "disabled" | "inactive" => Ok(false),
        _ => Err("is not a boolean"),
    }
}

fn to_snake_case(text: &str) -> String {
    let mut out = String::new();
    let mut before_lower = false;
    for c in text.trim().chars() {
        if c.is_alphanumeric() {
            if c.is_uppercase() && before_lower {
                out.push('_');
            }
            before_lower = c.is_lowercase() || c.is_numeric();
            out.extend(c.to_lowercase());
        } else {
            if !out.is_empty() && !out.ends_with('_') {
                out.push('_');
            }
            before_lower = false;
        }
    }
    out.trim_end_matches('_').to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rules_normalize_values() {
        let cases = [
            (NormalizationRule::bool("/a"), json!({"a": "YES"}), Ok(json!({"a": true}))),
            (NormalizationRule::bool("/a"), json!({"a": 0}), Ok(json!({"a": false}))),
            (NormalizationRule::bool("/a"), json!({"a": "maybe"}), Err("is not a boolean")),
            (NormalizationRule::bool("/a"), json!({"a": null}), Ok(json!({"a": null}))),
            (NormalizationRule::bool("/a"), json!({}), Ok(json!({}))),
            (
                NormalizationRule::case("/a", LetterCase::Upper),
                json!({"a": "paid"}),
                Ok(json!({"a": "PAID"})),
            ),
            (
                NormalizationRule::case("/a", LetterCase::Snake),
                json!({"a": "OrderPaid twice-Now"}),
                Ok(json!({"a": "order_paid_twice_now"})),
            ),
            (NormalizationRule::case("/a", LetterCase::Lower), json!({"a": 1}), Err("is not text")),
            (
                NormalizationRule::scale("/items/*/cents", Decimal::new(1, 2)),
                json!({"items": [{"cents": 1999}, {"cents": "50"}]}),
                Ok(json!({"items": [{"cents": 19.99}, {"cents": 0.5}]})),
            ),
            (
                NormalizationRule::scale("/a", Decimal::new(1, 3)),
                json!({"a": "1.500"}),
                Ok(json!({"a": 0.0015})),
            ),
            (
                NormalizationRule::scale("/a", Decimal::ONE),
                json!({"a": "x"}),
                Err("is not a number"),
            ),
            (
                NormalizationRule::scale("/a", Decimal::new(1, 2)),
                json!({"a": "0.1234567890123456789012345678"}),
                Err("is too large or too precise for exact arithmetic"),
            ),
            (
                NormalizationRule::scale("/a", 100.into()),
                json!({"a": "79228162514264337593543950335"}),
                Err("is too large or too precise for exact arithmetic"),
            ),
            (
                NormalizationRule::scale("/a", Decimal::new(1, 2)),
                json!({"a": "1.5000000000000000000000000000"}),
                Ok(json!({"a": 0.015})),
            ),
            (
                NormalizationRule::first_of("", ["id", "order_id"], "order_id"),
                json!({"order_id": "B", "id": null}),
                Ok(json!({"order_id": "B"})),
            ),
            (
                NormalizationRule::first_of("/items", ["a", "b"], "c"),
                json!({"items": [{"b": 1}, {"a": 2, "b": 3}]}),
                Ok(json!({"items": [{"c": 1}, {"c": 2}]})),
            ),
            (
                NormalizationRule::default_value("/tier", json!("standard")),
                json!({"tier": null}),
                Ok(json!({"tier": "standard"})),
            ),
            (
                NormalizationRule::default_value("/items/*/n", json!(1)),
                json!({"items": [{}, {"n": 5}]}),
                Ok(json!({"items": [{"n": 1}, {"n": 5}]})),
            ),
            (NormalizationRule::keep("", ["a"]), json!({"a": 1, "b": 2}), Ok(json!({"a": 1}))),
            (
                NormalizationRule::codes("/s", [("2", "PAID")]),
                json!({"s": 2}),
                Ok(json!({"s": "PAID"})),
            ),
            (
                NormalizationRule::codes("/s", [("2", "PAID")]),
                json!({"s": 3}),
                Err("is not a known code"),
            ),
            (
                NormalizationRule::rename("/items/*/a", "b"),
                json!({"items": [{"a": 1}, {}]}),
                Ok(json!({"items": [{"b": 1}, {}]})),
            ),
        ];
        for (rule, mut value, expected) in cases {
            let result = rule.apply(&mut value).map(|()| value).map_err(|e| e.reason);
            assert_eq!(result, expected, "{rule:?}");
        }
    }
}
