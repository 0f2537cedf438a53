//! Strict JSON: what a model sends is read once, exactly, and written back in one canonical form.
//!
//! Duplicate keys are refused, numbers keep every digit, nesting and size are bounded, and two
//! documents that mean the same have the same bytes and the same [`Digest`].

mod canon;
mod number;
mod parse;
mod pointer;
mod spell;

pub(crate) use canon::with_canonical;
pub use canon::{Digest, canonical, digest_of, hex};
pub(crate) use number::product;
pub use number::{canonical_number, decimal_of, number_from_decimal};
pub(crate) use parse::parse_hiding;
pub use parse::{ParseError, parse};
pub use pointer::Pointer;
pub use spell::canonical_of;

use serde_json::Value;

/// Bounds that hold before anything is parsed or walked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Bounds {
    /// Most bytes of one argument document.
    pub bytes: usize,
    /// Deepest nesting of arrays and objects.
    pub depth: usize,
    /// Most values (scalars, arrays and objects) in one document.
    pub nodes: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { bytes: 1 << 20, depth: 64, nodes: 100_000 }
    }
}

/// Which bound a document breaks, found by one pass over its bytes and no parsing.
pub(crate) fn over_bounds(text: &[u8], bounds: &Bounds) -> Option<String> {
    if text.len() > bounds.bytes {
        return Some(format!("{} bytes; at most {} are taken", text.len(), bounds.bytes));
    }
    // Most documents cannot break a bound whatever stands where: counting is much faster than looking.
    let count = |wanted: fn(&&u8) -> bool| text.iter().filter(wanted).count();
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
                    return Some(format!("nested more than {} levels deep", bounds.depth));
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' => nodes += 1,
            _ => {}
        }
    }
    (nodes > bounds.nodes).then(|| format!("more than {} values", bounds.nodes))
}

/// The same bounds for a document that a caller built in memory.
pub(crate) fn value_over_bounds(value: &Value, bounds: &Bounds) -> Option<String> {
    let mut left = Bounds { depth: bounds.depth, ..*bounds };
    measure(value, &mut left).err().map(|what| match what {
        Over::Bytes => format!("more than {} bytes", bounds.bytes),
        Over::Depth => format!("nested more than {} levels deep", bounds.depth),
        Over::Nodes => format!("more than {} values", bounds.nodes),
        Over::Reserved => "one of its keys is reserved".to_owned(),
    })
}

enum Over {
    Bytes,
    Depth,
    Nodes,
    Reserved,
}

/// Uses up what is left. Recursion ends where the depth does.
fn measure(value: &Value, left: &mut Bounds) -> Result<(), Over> {
    let bytes = match value {
        Value::Array(_) => 2,
        Value::Object(map) => 2 + map.keys().map(|key| key.len() + 4).sum::<usize>(),
        Value::String(text) => text.len() + 2,
        Value::Number(number) => number.as_str().len(),
        Value::Null | Value::Bool(_) => 4,
    };
    left.bytes = left.bytes.checked_sub(bytes).ok_or(Over::Bytes)?;
    left.nodes = left.nodes.checked_sub(1).ok_or(Over::Nodes)?;
    if !value.is_array() && !value.is_object() {
        return Ok(());
    }
    left.depth = left.depth.checked_sub(1).ok_or(Over::Depth)?;
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| measure(item, left))?,
        Value::Object(map) => {
            map.iter().try_for_each(|(key, item)| if is_reserved(key) { Err(Over::Reserved) } else { measure(item, left) })?
        }
        _ => {}
    }
    left.depth += 1;
    Ok(())
}

/// Whether a document nests deeper than anything that is ever accepted.
pub(crate) fn is_deep(value: &Value) -> bool {
    matches!(measure(value, &mut Bounds { bytes: usize::MAX, depth: 256, nodes: usize::MAX }), Err(Over::Depth))
}

/// Takes a document apart without recursion, so that dropping a deep one cannot exhaust the stack.
pub(crate) fn dismantle(value: Value) {
    let mut stack = vec![value];
    while let Some(value) = stack.pop() {
        match value {
            Value::Array(items) => stack.extend(items),
            Value::Object(map) => stack.extend(map.into_iter().map(|(_, item)| item)),
            _ => {}
        }
    }
}

/// Brings every number of a document that a caller built in memory into canonical form.
///
/// # Errors
/// The pointer of the first number out of range, and why. The document must be within bounds.
pub(crate) fn canonicalize_numbers(value: &mut Value, at: &mut Pointer) -> Result<(), (Pointer, String)> {
    match value {
        Value::Number(number) if !number::is_plain_integer(number.as_str()) => {
            *number = canonical_number(number.as_str()).map_err(|why| (at.clone(), why))?;
            Ok(())
        }
        Value::Array(items) => items.iter_mut().enumerate().try_for_each(|(index, item)| {
            at.push(index.to_string());
            canonicalize_numbers(item, at)?;
            at.pop();
            Ok(())
        }),
        Value::Object(map) => map.iter_mut().try_for_each(|(key, item)| {
            if is_reserved(key) {
                return Err((at.clone(), format!("the key `{}` is reserved", crate::names::shown(key))));
            }
            at.push(key.clone());
            canonicalize_numbers(item, at)?;
            at.pop();
            Ok(())
        }),
        _ => Ok(()),
    }
}

/// Keys by which the JSON library smuggles exact numbers through: an object that has one would be read
/// back as something else than what was judged.
fn is_reserved(key: &str) -> bool {
    key.starts_with("$serde_json::private::")
}

/// A value as judged arguments spell it: 1.0 is 1.
pub(crate) fn plain(mut value: Value) -> Value {
    // What cannot be brought into form equals nothing.
    let _ = canonicalize_numbers(&mut value, &mut Pointer::default());
    value
}

/// What kind of JSON value this is, in the words of JSON Schema.
pub(crate) fn kind_of(value: &Value) -> &'static str {
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
