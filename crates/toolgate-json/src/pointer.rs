//! Implements JSON pointers, in which `*` means every item of an array or member of an object.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A path into a document, such as `/order/items/*/price`.
///
/// A name without a leading `/` is a single member.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct Pointer(Vec<String>);

impl From<&str> for Pointer {
    fn from(text: &str) -> Self {
        match text.strip_prefix('/') {
            Some(rest) => Self(
                rest.split('/').map(|part| part.replace("~1", "/").replace("~0", "~")).collect(),
            ),
            None if text.is_empty() => Self(Vec::new()),
            None => Self(vec![text.to_owned()]),
        }
    }
}

impl From<String> for Pointer {
    fn from(text: String) -> Self {
        Self::from(text.as_str())
    }
}

impl From<Pointer> for String {
    fn from(pointer: Pointer) -> Self {
        pointer.to_string()
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .try_for_each(|part| write!(f, "/{}", part.replace('~', "~0").replace('/', "~1")))
    }
}

impl Pointer {
    /// Returns the unescaped parts.
    #[must_use]
    pub fn parts(&self) -> &[String] {
        &self.0
    }

    /// Creates a pointer from unescaped parts.
    pub const fn from_parts(parts: Vec<String>) -> Self {
        Self(parts)
    }

    /// Returns every value at this path with its own path.
    #[must_use]
    pub fn entries<'a>(&self, value: &'a Value) -> Vec<(String, &'a Value)> {
        let escaped = |name: &str| name.replace('~', "~0").replace('/', "~1");
        self.0.iter().fold(vec![(String::new(), value)], |found, part| {
            let inside = |(at, value): (String, &'a Value)| -> Vec<(String, &'a Value)> {
                match value {
                    Value::Array(items) if part == "*" => items
                        .iter()
                        .enumerate()
                        .map(|(index, item)| (format!("{at}/{index}"), item))
                        .collect(),
                    Value::Object(map) if part == "*" => map
                        .iter()
                        .map(|(name, item)| (format!("{at}/{}", escaped(name)), item))
                        .collect(),
                    other => values_of_part(other, part)
                        .into_iter()
                        .map(|item| (format!("{at}/{}", escaped(part)), item))
                        .collect(),
                }
            };
            found.into_iter().flat_map(inside).collect()
        })
    }

    /// Returns every value at this path with its own path; a path into a scalar ends at the scalar.
    pub fn entries_or_scalars<'a>(&self, value: &'a Value) -> Vec<(String, &'a Value)> {
        let (mut found, mut ended) = (vec![(String::new(), value)], Vec::new());
        for part in &self.0 {
            let index = part == "*" || part.parse::<usize>().is_ok();
            let (inner, scalars): (Vec<_>, Vec<_>) = found
                .into_iter()
                .partition(|(_, value)| value.is_object() || (value.is_array() && index));
            ended.extend(scalars);
            let pointer = Self(vec![part.clone()]);
            found = inner
                .into_iter()
                .flat_map(|(at, value)| {
                    pointer
                        .entries(value)
                        .into_iter()
                        .map(move |(step, item)| (format!("{at}{step}"), item))
                })
                .collect();
        }
        found.extend(ended);
        found
    }

    /// Appends a part.
    pub fn push(&mut self, part: String) {
        self.0.push(part);
    }

    /// Removes the last part.
    pub fn pop(&mut self) {
        self.0.pop();
    }

    /// Returns the first value at this path, or the first match for a path with `*`.
    #[must_use]
    pub fn get<'a>(&self, value: &'a Value) -> Option<&'a Value> {
        if self.0.iter().any(|part| part == "*") {
            return self.get_all(value).into_iter().next();
        }
        self.0.iter().try_fold(value, |value, part| match value {
            Value::Object(map) => map.get(part),
            Value::Array(items) => part.parse::<usize>().ok().and_then(|index| items.get(index)),
            _ => None,
        })
    }

    /// Returns every value at this path.
    #[must_use]
    pub fn get_all<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        self.0.iter().fold(vec![value], |found, part| {
            found.into_iter().flat_map(|value| values_of_part(value, part)).collect()
        })
    }

    /// Returns a value for every place of this path, or `None` for a missing one.
    #[must_use]
    pub fn get_each<'a>(&self, value: &'a Value) -> Vec<Option<&'a Value>> {
        if !self.0.iter().any(|part| part == "*") {
            return vec![self.get(value)];
        }
        self.0.iter().fold(vec![Some(value)], |places, part| {
            let inside = |place: Option<&'a Value>| match place {
                Some(Value::Array(items)) if part == "*" => items.iter().map(Some).collect(),
                Some(Value::Object(map)) if part == "*" => map.values().map(Some).collect(),
                Some(value) => vec![values_of_part(value, part).into_iter().next()],
                None => vec![None],
            };
            places.into_iter().flat_map(inside).collect()
        })
    }

    /// Calls `f` on every value at this path and stores the result; `None` removes the value.
    pub fn rewrite<E>(
        &self,
        value: &mut Value,
        f: &mut impl FnMut(Value) -> Result<Option<Value>, E>,
    ) -> Result<(), E> {
        rewrite(&self.0, value, f)
    }

    /// Splits off the last part, and returns the path of the containers and the part.
    #[must_use]
    pub fn split_last(&self) -> Option<(Pointer, &str)> {
        let (last, parents) = self.0.split_last()?;
        Some((Self(parents.to_vec()), last))
    }
}

fn values_of_part<'a>(value: &'a Value, part: &str) -> Vec<&'a Value> {
    match value {
        Value::Array(items) if part == "*" => items.iter().collect(),
        Value::Object(map) if part == "*" => map.values().collect(),
        Value::Array(items) => {
            part.parse::<usize>().ok().and_then(|index| items.get(index)).into_iter().collect()
        }
        Value::Object(map) => map.get(part).into_iter().collect(),
        _ => Vec::new(),
    }
}

fn rewrite<E>(
    parts: &[String],
    value: &mut Value,
    f: &mut impl FnMut(Value) -> Result<Option<Value>, E>,
) -> Result<(), E> {
    let Some((part, rest)) = parts.split_first() else {
        if let Some(new) = f(value.take())? {
            *value = new;
        }
        return Ok(());
    };
    match value {
        Value::Array(items) => {
            let only = part.parse::<usize>().ok();
            if part != "*" && only.is_none() {
                return Ok(());
            }
            for (index, item) in items.iter_mut().enumerate() {
                if only.is_none_or(|only| only == index) {
                    rewrite(rest, item, f)?;
                }
            }
            Ok(())
        }
        Value::Object(map) => {
            let keys: Vec<String> =
                if part == "*" { map.keys().cloned().collect() } else { vec![part.clone()] };
            for key in keys {
                if rest.is_empty() {
                    if let Some(old) = map.remove(&key)
                        && let Some(new) = f(old)?
                    {
                        map.insert(key, new);
                    }
                } else if let Some(item) = map.get_mut(&key) {
                    rewrite(rest, item, f)?;
                }
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn stars_reach_every_item() {
        let order = json!({"items": [{"price": 1}, {"price": 2}, {"name": "x"}], "a/b": {"~": 3}});
        assert_eq!(Pointer::from("/items/*/price").get_all(&order), vec![&json!(1), &json!(2)]);
        assert_eq!(Pointer::from("/a~1b/~0").get(&order), Some(&json!(3)));
        assert_eq!(Pointer::from("/items/9").get(&order), None);
        assert_eq!(
            Pointer::from("/items/*/price").get_each(&order),
            vec![Some(&json!(1)), Some(&json!(2)), None]
        );
        assert_eq!(Pointer::from("/nothing/*").get_each(&order), vec![None]);
        assert_eq!(Pointer::from("/a~1b/~0").to_string(), "/a~1b/~0");
    }

    #[test]
    fn rewriting_replaces_and_removes() {
        let mut order = json!({"items": [{"price": 1}, {"price": 2}]});
        let result = Pointer::from("/items/*/price")
            .rewrite(&mut order, &mut |v| Ok::<_, ()>((v == json!(1)).then(|| json!("one"))));
        assert_eq!((result, order), (Ok(()), json!({"items": [{"price": "one"}, {}]})));
    }
}
