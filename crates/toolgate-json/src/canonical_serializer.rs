//! Writes any serializable value in canonical form without building a document first.

use std::ops::Range;

use serde::Serialize;

use super::to_canonical_bytes;

/// Returns the canonical bytes of a value, which are those of its JSON document.
///
/// # Errors
/// Returns an error if the value cannot be written as JSON.
///
/// ```
/// let thing = std::collections::HashMap::from([("b", vec![1, 2]), ("a", vec![])]);
/// assert_eq!(toolgate_json::serialize_canonical(&thing).unwrap(), br#"{"a":[],"b":[1,2]}"#);
/// ```
pub fn serialize_canonical(value: &impl Serialize) -> Result<Vec<u8>, serde_json::Error> {
    let text = serde_json::to_vec(value)?;
    let mut sorted = CanonicalSorter { text: &text, at: 0, out: Vec::with_capacity(text.len()) };
    match sorted.write_value() {
        Some(()) => Ok(sorted.out),
        None => Ok(to_canonical_bytes(&serde_json::to_value(value)?)),
    }
}

/// Sorts the members of compact text that `serde_json` has written.
///
/// Everything else in such text already has its canonical form. The methods return `None` if a key
/// is escaped or occurs twice.
struct CanonicalSorter<'t> {
    text: &'t [u8],
    at: usize,
    out: Vec<u8>,
}

impl<'t> CanonicalSorter<'t> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    /// Copies the next bytes to the output.
    fn copy_bytes(&mut self, length: usize) -> Option<&'t [u8]> {
        let bytes = self.text.get(self.at..self.at.checked_add(length)?)?;
        self.out.extend_from_slice(bytes);
        self.at += length;
        Some(bytes)
    }

    fn write_value(&mut self) -> Option<()> {
        match self.peek()? {
            b'{' => self.write_object(),
            b'[' => self.write_array(),
            b'"' => self.write_string().map(drop),
            _ => {
                let rest = self.text.get(self.at..)?;
                self.copy_bytes(
                    rest.iter().position(|b| matches!(b, b',' | b']' | b'}')).unwrap_or(rest.len()),
                )
                .map(drop)
            }
        }
    }

    fn write_string(&mut self) -> Option<&'t [u8]> {
        let mut escaped = false;
        let closes = self.text.get(self.at + 1..)?.iter().position(|b| {
            let closes = *b == b'"' && !escaped;
            escaped = *b == b'\\' && !escaped;
            closes
        })?;
        self.copy_bytes(closes + 2)
    }

    fn write_array(&mut self) -> Option<()> {
        self.copy_bytes(1)?;
        while self.peek()? != b']' {
            if self.peek()? == b',' {
                self.copy_bytes(1)?;
            }
            self.write_value()?;
        }
        self.copy_bytes(1).map(drop)
    }

    fn write_object(&mut self) -> Option<()> {
        self.copy_bytes(1)?;
        let object_start = self.out.len();
        let mut members: Vec<(&'t [u8], Range<usize>)> = Vec::new();
        while self.peek()? != b'}' {
            if self.peek()? == b',' {
                self.copy_bytes(1)?;
            }
            let from = self.out.len();
            let key = self.write_string()?;
            let key = key.get(1..key.len() - 1).filter(|key| !key.contains(&b'\\'))?;
            self.copy_bytes(1)?;
            self.write_value()?;
            members.push((key, from - object_start..self.out.len() - object_start));
        }
        if !members.is_sorted_by(|(key, _), (next_key, _)| key < next_key) {
            members.sort_unstable_by_key(|(key, _)| *key);
            if members
                .windows(2)
                .any(|pair| matches!(pair, [(key, _), (next_key, _)] if key == next_key))
            {
                return None;
            }
            let written = self.out.split_off(object_start);
            for (n, (_, member)) in members.into_iter().enumerate() {
                if n > 0 {
                    self.out.push(b',');
                }
                self.out.extend_from_slice(written.get(member)?);
            }
        }
        self.copy_bytes(1).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    #[test]
    fn unusual_documents_have_the_same_canonical_form() {
        let unusual = [
            r#"{}"#,
            r#"[]"#,
            r#""""#,
            r#"{"":{"":[]}}"#,
            r#"{"b":1,"a":"}],{"}"#,
            r#"{"a\"b":1,"a":2,"a\\":3}"#,
            r#"{"z":"\\","y":"\"","x":"\\\""}"#,
            r#"{"ä":1,"a":1e400,"B":-0.10}"#,
            r#"[{"b":[1,{"d":null,"c":true}],"a":[]},[[],{}],1.5e-7]"#,
        ];
        for text in unusual {
            let value: Value = serde_json::from_str(text).unwrap();
            assert_eq!(serialize_canonical(&value).unwrap(), to_canonical_bytes(&value), "{text}");
        }
        let twice = r#"{"a":1,"b":{},"a":2}"#.to_owned();
        let twice = serde_json::value::to_raw_value(
            &serde_json::value::RawValue::from_string(twice).unwrap(),
        )
        .unwrap();
        assert_eq!(serialize_canonical(&twice).unwrap(), br#"{"a":2,"b":{}}"#);
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".*".prop_map(Value::from)
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::hash_map(".{0,4}", inner, 0..6)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn values_have_the_same_canonical_form_either_way(members in prop::collection::vec((".{0,4}", value()), 0..8)) {
            // A `HashMap` serializes its members in any order, like a structure.
            let map: std::collections::HashMap<String, Value> = members.into_iter().collect();
            prop_assert_eq!(serialize_canonical(&map).unwrap(), to_canonical_bytes(&serde_json::to_value(&map).unwrap()));
        }
    }
}
