#![doc = include_str!("../README.md")]

mod canonical;
mod canonical_serializer;
mod number;
mod parse;
mod pointer;

pub use canonical::with_canonical_text;
pub use canonical::{Digest, digest_of, hex, to_canonical_bytes};
pub use canonical_serializer::serialize_canonical;
pub use number::multiply_exact;
pub use number::{canonical_number, decimal_of, number_from_decimal};
pub use parse::parse_with_hidden_keys;
pub use parse::{JsonParseError, parse};
pub use pointer::Pointer;

use serde_json::Value;

/// Limits that are checked before a document is parsed or traversed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct JsonBounds {
    /// Maximum size of a document in bytes.
    pub bytes: usize,
    /// Maximum nesting of arrays and objects.
    pub depth: usize,
    /// Maximum number of values (scalars, arrays and objects) in a document.
    pub nodes: usize,
}

impl Default for JsonBounds {
    fn default() -> Self {
        Self { bytes: 1 << 20, depth: 64, nodes: 100_000 }
    }
}

/// Returns the limit that a document exceeds, from one pass over its bytes without parsing.
pub fn find_exceeded_bound(text: &[u8], bounds: &JsonBounds) -> Option<String> {
    if text.len() > bounds.bytes {
        return Some(format!("it has {} bytes, and the limit is {}", text.len(), bounds.bytes));
    }
    // Most documents cannot exceed a limit wherever their brackets are. Counting is much faster
    // than tracking strings.
    let count = |is_counted: fn(&&u8) -> bool| text.iter().filter(is_counted).count();
    let opens = count(|b| matches!(b, b'[' | b'{'));
    if opens <= bounds.depth && opens + count(|b| **b == b',') < bounds.nodes {
        return None;
    }
    let (mut depth, mut nodes, mut in_string, mut escaped) = (0usize, 1usize, false, false);
    for byte in text {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => {
                depth += 1;
                nodes += 1;
                if depth > bounds.depth {
                    return Some(format!("it is nested more than {} levels deep", bounds.depth));
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' => nodes += 1,
            _ => {}
        }
    }
    (nodes > bounds.nodes).then(|| format!("it has more than {} values", bounds.nodes))
}

/// Checks the same limits for a document that a caller built in memory.
pub fn find_exceeded_bound_of_value(value: &Value, bounds: &JsonBounds) -> Option<String> {
    let mut left = JsonBounds { depth: bounds.depth, ..*bounds };
    subtract_size(value, &mut left).err().map(|limit| match limit {
        ExceededBound::Bytes => format!("it has more than {} bytes", bounds.bytes),
        ExceededBound::Depth => format!("it is nested more than {} levels deep", bounds.depth),
        ExceededBound::Nodes => format!("it has more than {} values", bounds.nodes),
        ExceededBound::Reserved => "one of its keys is reserved".to_owned(),
    })
}

enum ExceededBound {
    Bytes,
    Depth,
    Nodes,
    Reserved,
}

/// Subtracts the size of a value from the remaining limits. The depth limits the recursion.
fn subtract_size(value: &Value, left: &mut JsonBounds) -> Result<(), ExceededBound> {
    let bytes = match value {
        Value::Array(_) => 2,
        Value::Object(map) => 2 + map.keys().map(|key| key.len() + 4).sum::<usize>(),
        Value::String(text) => text.len() + 2,
        Value::Number(number) => number.as_str().len(),
        Value::Null | Value::Bool(_) => 4,
    };
    left.bytes = left.bytes.checked_sub(bytes).ok_or(ExceededBound::Bytes)?;
    left.nodes = left.nodes.checked_sub(1).ok_or(ExceededBound::Nodes)?;
    if !value.is_array() && !value.is_object() {
        return Ok(());
    }
    left.depth = left.depth.checked_sub(1).ok_or(ExceededBound::Depth)?;
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| subtract_size(item, left))?,
        Value::Object(map) => map.iter().try_for_each(|(key, item)| {
            if is_reserved_key(key) {
                Err(ExceededBound::Reserved)
            } else {
                subtract_size(item, left)
            }
        })?,
        _ => {}
    }
    left.depth += 1;
    Ok(())
}

/// Returns whether a document is nested deeper than any accepted document.
pub fn is_nested_too_deeply(value: &Value) -> bool {
    matches!(
        subtract_size(value, &mut JsonBounds { bytes: usize::MAX, depth: 256, nodes: usize::MAX }),
        Err(ExceededBound::Depth)
    )
}

/// Drops a document without recursion, so that a deep one cannot exhaust the stack.
pub fn drop_iteratively(value: Value) {
    let mut stack = vec![value];
    while let Some(value) = stack.pop() {
        match value {
            Value::Array(items) => stack.extend(items),
            Value::Object(map) => stack.extend(map.into_iter().map(|(_, item)| item)),
            _ => {}
        }
    }
}

/// Converts every number of a document that a caller built in memory to canonical form.
///
/// # Errors
/// Returns the pointer and the problem of the first number that is out of range. The document must
/// be within the limits.
pub fn canonicalize_numbers(value: &mut Value, at: &mut Pointer) -> Result<(), (Pointer, String)> {
    match value {
        Value::Number(number) if !number::is_plain_integer(number.as_str()) => {
            *number = canonical_number(number.as_str()).map_err(|reason| (at.clone(), reason))?;
            Ok(())
        }
        Value::Array(items) => items.iter_mut().enumerate().try_for_each(|(index, item)| {
            at.push(index.to_string());
            canonicalize_numbers(item, at)?;
            at.pop();
            Ok(())
        }),
        Value::Object(map) => map.iter_mut().try_for_each(|(key, item)| {
            if is_reserved_key(key) {
                return Err((
                    at.clone(),
                    format!("the key `{}` is reserved", toolgate_text::escape_for_display(key)),
                ));
            }
            at.push(key.clone());
            canonicalize_numbers(item, at)?;
            at.pop();
            Ok(())
        }),
        _ => Ok(()),
    }
}

/// Returns whether `serde_json` uses a key to represent exact numbers.
///
/// An object with such a key would be parsed as another value than the one that was checked.
fn is_reserved_key(key: &str) -> bool {
    key.starts_with("$serde_json::private::")
}

/// Returns a value with canonical numbers: `1.0` becomes `1`.
pub fn with_canonical_numbers(mut value: Value) -> Value {
    // If a number has no canonical form, the value equals no other value.
    let _ = canonicalize_numbers(&mut value, &mut Pointer::default());
    value
}

/// Returns the type of a JSON value as JSON Schema names it.
pub fn json_type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number::is_plain_integer(number.as_str()) => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
