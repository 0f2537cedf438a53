//! Derives from a schema which values an expression can have.

use std::collections::BTreeMap;

use rust_decimal::Decimal;
use serde_json::Value;

use super::Compare;
use crate::schema::resolve;
use crate::tool::Extra;
use toolgate_json::decimal_of;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ty {
    /// Any value.
    Any,
    Null,
    /// A boolean, and its value if known.
    Bool(Option<bool>),
    /// A number between these bounds.
    Number(Option<Decimal>, Option<Decimal>),
    /// A text, and the possible texts if known.
    Text(Option<Vec<String>>),
    Time,
    Duration,
    List(Box<Ty>),
    /// An object with these members, and whether other members are possible.
    Object(BTreeMap<String, Ty>, bool),
}

impl Ty {
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Any => "anything",
            Self::Null => "null",
            Self::Bool(_) => "true or false",
            Self::Number(..) => "a number",
            Self::Text(_) => "text",
            Self::Time => "a time",
            Self::Duration => "a duration",
            Self::List(_) => "a list",
            Self::Object(..) => "an object",
        }
    }

    pub(crate) fn is_like(&self, other: &Self) -> bool {
        matches!(self, Self::Any) || matches!(other, Self::Any) || std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    pub(crate) fn join(self, other: Self) -> Self {
        match (self, other) {
            (a, b) if a == b => a,
            // A nullable type becomes its non-null type without bounds or known values.
            (Self::Null, Self::Text(_)) | (Self::Text(_), Self::Null) => Self::Text(None),
            (Self::Null, Self::Number(..)) | (Self::Number(..), Self::Null) => Self::Number(None, None),
            (Self::Null, Self::Bool(_)) | (Self::Bool(_), Self::Null) => Self::Bool(None),
            (Self::Null, other) | (other, Self::Null) => other,
            (Self::Bool(_), Self::Bool(_)) => Self::Bool(None),
            (Self::Text(Some(mut a)), Self::Text(Some(b))) => {
                a.extend(b);
                Self::Text(Some(a))
            }
            (Self::Text(_), Self::Text(_)) => Self::Text(None),
            (Self::Number(a, b), Self::Number(c, d)) => Self::Number(a.zip(c).map(|(a, c)| a.min(c)), b.zip(d).map(|(b, d)| b.max(d))),
            (Self::List(a), Self::List(b)) => Self::List(Box::new(a.join(*b))),
            _ => Self::Any,
        }
    }
}

/// The maximum number of subschemas that are read for one reference.
const MAX_PARTS: usize = 500;

/// Returns the type that a schema describes.
pub(crate) fn of_schema(schema: &Value, root: &Value, extra: Extra) -> Ty {
    Looking { root, extra, budget: MAX_PARTS }.ty(schema)
}

struct Looking<'s> {
    root: &'s Value,
    extra: Extra,
    budget: usize,
}

impl<'s> Looking<'s> {
    fn ty(&mut self, schema: &'s Value) -> Ty {
        self.budget = self.budget.saturating_sub(1);
        let Some(plain) = schema.as_object().filter(|_| self.budget > 0) else { return Ty::Any };
        if let Some(options) = plain.get("anyOf").or_else(|| plain.get("oneOf")).and_then(Value::as_array)
            && plain.keys().all(|key| matches!(key.as_str(), "anyOf" | "oneOf" | "description" | "title" | "default"))
        {
            return options.iter().map(|option| self.ty(option)).reduce(Ty::join).unwrap_or(Ty::Any);
        }
        let Some(map) = resolve(schema, self.root) else { return Ty::Any };
        if let Some(constant) = map.get("const") {
            return of_value(constant);
        }
        if let Some(values) = map.get("enum").and_then(Value::as_array) {
            return values.iter().map(of_value).reduce(Ty::join).unwrap_or(Ty::Any);
        }
        match map.get("type") {
            Some(Value::String(name)) => self.named(name, map),
            Some(Value::Array(names)) => {
                names.iter().filter_map(Value::as_str).map(|name| self.named(name, map)).reduce(Ty::join).unwrap_or(Ty::Any)
            }
            _ if map.contains_key("properties") => self.named("object", map),
            _ => Ty::Any,
        }
    }

    fn named(&mut self, name: &str, map: &'s serde_json::Map<String, Value>) -> Ty {
        let number = |name: &str| map.get(name).and_then(decimal_of);
        match name {
            "null" => Ty::Null,
            "boolean" => Ty::Bool(None),
            "integer" | "number" => Ty::Number(
                number("minimum").max(number("exclusiveMinimum")),
                number("maximum").into_iter().chain(number("exclusiveMaximum")).min(),
            ),
            "string" => Ty::Text(None),
            "array" => Ty::List(Box::new(match map.get("items") {
                // With `prefixItems`, the first items may have other types.
                Some(items) if !map.contains_key("prefixItems") => self.ty(items),
                _ => Ty::Any,
            })),
            "object" => {
                let Some(properties) = map.get("properties").and_then(Value::as_object) else { return Ty::Any };
                let open = map.contains_key("patternProperties")
                    || map.get("additionalProperties").map_or(self.extra == Extra::Pass, |more| *more != Value::Bool(false));
                let members = properties.iter().map(|(name, schema)| (name.clone(), self.ty(schema)));
                let members: BTreeMap<String, Ty> = members.collect();
                // If the budget is exhausted, unread subschemas may allow other members.
                Ty::Object(members, open || self.budget == 0)
            }
            _ => Ty::Any,
        }
    }
}

fn of_value(value: &Value) -> Ty {
    match value {
        Value::Null => Ty::Null,
        Value::Bool(value) => Ty::Bool(Some(*value)),
        Value::Number(_) => decimal_of(value).map_or(Ty::Number(None, None), |n| Ty::Number(Some(n), Some(n))),
        Value::String(text) => Ty::Text(Some(vec![text.clone()])),
        Value::Array(_) | Value::Object(_) => Ty::Any,
    }
}

pub(crate) type Bounds = (Option<Decimal>, Option<Decimal>);

/// Returns the result of comparing two bounded numbers, if the bounds decide the result.
pub(crate) fn numbers(op: Compare, (al, ah): Bounds, (bl, bh): Bounds) -> Option<bool> {
    let below = |high: Option<Decimal>, low: Option<Decimal>| high.zip(low).is_some_and(|(high, low)| high < low);
    let at_most = |high: Option<Decimal>, low: Option<Decimal>| high.zip(low).is_some_and(|(high, low)| high <= low);
    let (yes, no) = match op {
        Compare::Less => (below(ah, bl), at_most(bh, al)),
        Compare::LessOrEqual => (at_most(ah, bl), below(bh, al)),
        Compare::Greater => (below(bh, al), at_most(ah, bl)),
        Compare::GreaterOrEqual => (at_most(bh, al), below(ah, bl)),
        Compare::Equal => (al.is_some() && al == ah && al == bl && bl == bh, below(ah, bl) || below(bh, al)),
        Compare::NotEqual => (below(ah, bl) || below(bh, al), al.is_some() && al == ah && al == bl && bl == bh),
    };
    if yes { Some(true) } else { no.then_some(false) }
}

pub(crate) fn texts(op: Compare, a: &[String], b: &[String]) -> Option<bool> {
    let apart = !a.iter().any(|a| b.contains(a));
    let same = matches!((a, b), ([a], [b]) if a == b);
    match op {
        Compare::Equal if apart => Some(false),
        Compare::Equal if same => Some(true),
        Compare::NotEqual if apart => Some(true),
        Compare::NotEqual if same => Some(false),
        _ => None,
    }
}
