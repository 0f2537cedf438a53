//! Derives from a schema which values an expression can have.

use std::collections::BTreeMap;

use rust_decimal::Decimal;
use serde_json::Value;

use super::CompareOp;
use crate::schema::resolve_object;
use crate::tool::ExtraArguments;
use toolgate_json::decimal_of;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum CelType {
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
    List(Box<CelType>),
    /// An object with these members, and whether other members are possible.
    Object(BTreeMap<String, CelType>, bool),
}

impl CelType {
    pub(crate) const fn type_name(&self) -> &'static str {
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

    pub(crate) fn is_comparable_with(&self, other: &Self) -> bool {
        matches!(self, Self::Any)
            || matches!(other, Self::Any)
            || std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    pub(crate) fn join(self, other: Self) -> Self {
        match (self, other) {
            (a, b) if a == b => a,
            // A nullable type becomes its non-null type without bounds or known values.
            (Self::Null, Self::Text(_)) | (Self::Text(_), Self::Null) => Self::Text(None),
            (Self::Null, Self::Number(..)) | (Self::Number(..), Self::Null) => {
                Self::Number(None, None)
            }
            (Self::Null, Self::Bool(_)) | (Self::Bool(_), Self::Null) => Self::Bool(None),
            (Self::Null, other) | (other, Self::Null) => other,
            (Self::Bool(_), Self::Bool(_)) => Self::Bool(None),
            (Self::Text(Some(mut a)), Self::Text(Some(b))) => {
                a.extend(b);
                Self::Text(Some(a))
            }
            (Self::Text(_), Self::Text(_)) => Self::Text(None),
            (Self::Number(a, b), Self::Number(c, d)) => {
                Self::Number(a.zip(c).map(|(a, c)| a.min(c)), b.zip(d).map(|(b, d)| b.max(d)))
            }
            (Self::List(a), Self::List(b)) => Self::List(Box::new(a.join(*b))),
            _ => Self::Any,
        }
    }
}

/// The maximum number of subschemas that are read for one reference.
const MAX_SUBSCHEMAS: usize = 500;

/// Returns the type that a schema describes.
pub(crate) fn type_of_schema(schema: &Value, root: &Value, extra: ExtraArguments) -> CelType {
    SchemaTypeBuilder { root, extra, budget: MAX_SUBSCHEMAS }.build_type(schema)
}

struct SchemaTypeBuilder<'s> {
    root: &'s Value,
    extra: ExtraArguments,
    budget: usize,
}

impl<'s> SchemaTypeBuilder<'s> {
    fn build_type(&mut self, schema: &'s Value) -> CelType {
        self.budget = self.budget.saturating_sub(1);
        let Some(plain) = schema.as_object().filter(|_| self.budget > 0) else {
            return CelType::Any;
        };
        if let Some(options) =
            plain.get("anyOf").or_else(|| plain.get("oneOf")).and_then(Value::as_array)
            && plain.keys().all(|key| {
                matches!(key.as_str(), "anyOf" | "oneOf" | "description" | "title" | "default")
            })
        {
            return options
                .iter()
                .map(|option| self.build_type(option))
                .reduce(CelType::join)
                .unwrap_or(CelType::Any);
        }
        let Some(map) = resolve_object(schema, self.root) else { return CelType::Any };
        if let Some(constant) = map.get("const") {
            return type_of_value(constant);
        }
        if let Some(values) = map.get("enum").and_then(Value::as_array) {
            return values.iter().map(type_of_value).reduce(CelType::join).unwrap_or(CelType::Any);
        }
        match map.get("type") {
            Some(Value::String(name)) => self.named_type(name, map),
            Some(Value::Array(names)) => names
                .iter()
                .filter_map(Value::as_str)
                .map(|name| self.named_type(name, map))
                .reduce(CelType::join)
                .unwrap_or(CelType::Any),
            _ if map.contains_key("properties") => self.named_type("object", map),
            _ => CelType::Any,
        }
    }

    fn named_type(&mut self, name: &str, map: &'s serde_json::Map<String, Value>) -> CelType {
        let number = |name: &str| map.get(name).and_then(decimal_of);
        match name {
            "null" => CelType::Null,
            "boolean" => CelType::Bool(None),
            "integer" | "number" => CelType::Number(
                number("minimum").max(number("exclusiveMinimum")),
                number("maximum").into_iter().chain(number("exclusiveMaximum")).min(),
            ),
            "string" => CelType::Text(None),
            "array" => CelType::List(Box::new(match map.get("items") {
                // With `prefixItems`, the first items may have other types.
                Some(items) if !map.contains_key("prefixItems") => self.build_type(items),
                _ => CelType::Any,
            })),
            "object" => {
                let Some(properties) = map.get("properties").and_then(Value::as_object) else {
                    return CelType::Any;
                };
                let open = map.contains_key("patternProperties")
                    || map
                        .get("additionalProperties")
                        .map_or(self.extra == ExtraArguments::Pass, |additional| {
                            *additional != Value::Bool(false)
                        });
                let members =
                    properties.iter().map(|(name, schema)| (name.clone(), self.build_type(schema)));
                let members: BTreeMap<String, CelType> = members.collect();
                // If the budget is exhausted, unread subschemas may allow other members.
                CelType::Object(members, open || self.budget == 0)
            }
            _ => CelType::Any,
        }
    }
}

fn type_of_value(value: &Value) -> CelType {
    match value {
        Value::Null => CelType::Null,
        Value::Bool(value) => CelType::Bool(Some(*value)),
        Value::Number(_) => decimal_of(value)
            .map_or(CelType::Number(None, None), |n| CelType::Number(Some(n), Some(n))),
        Value::String(text) => CelType::Text(Some(vec![text.clone()])),
        Value::Array(_) | Value::Object(_) => CelType::Any,
    }
}

pub(crate) type NumberBounds = (Option<Decimal>, Option<Decimal>);

/// Returns the result of comparing two bounded numbers, if the bounds decide the result.
pub(crate) fn compare_bounds(
    op: CompareOp,
    (al, ah): NumberBounds,
    (bl, bh): NumberBounds,
) -> Option<bool> {
    let below = |high: Option<Decimal>, low: Option<Decimal>| {
        high.zip(low).is_some_and(|(high, low)| high < low)
    };
    let at_most = |high: Option<Decimal>, low: Option<Decimal>| {
        high.zip(low).is_some_and(|(high, low)| high <= low)
    };
    let (yes, no) = match op {
        CompareOp::Less => (below(ah, bl), at_most(bh, al)),
        CompareOp::LessOrEqual => (at_most(ah, bl), below(bh, al)),
        CompareOp::Greater => (below(bh, al), at_most(ah, bl)),
        CompareOp::GreaterOrEqual => (at_most(bh, al), below(ah, bl)),
        CompareOp::Equal => {
            (al.is_some() && al == ah && al == bl && bl == bh, below(ah, bl) || below(bh, al))
        }
        CompareOp::NotEqual => {
            (below(ah, bl) || below(bh, al), al.is_some() && al == ah && al == bl && bl == bh)
        }
    };
    if yes { Some(true) } else { no.then_some(false) }
}

pub(crate) fn compare_texts(op: CompareOp, a: &[String], b: &[String]) -> Option<bool> {
    let is_disjoint = !a.iter().any(|a| b.contains(a));
    let same = matches!((a, b), ([a], [b]) if a == b);
    match op {
        CompareOp::Equal if is_disjoint => Some(false),
        CompareOp::Equal if same => Some(true),
        CompareOp::NotEqual if is_disjoint => Some(true),
        CompareOp::NotEqual if same => Some(false),
        _ => None,
    }
}
