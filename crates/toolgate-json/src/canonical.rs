//! Writes documents in canonical form: sorted keys, no white space, canonical numbers.

use std::cell::RefCell;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest, usually of canonical bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Computes the digest of bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Computes the digest of several parts with their lengths, so that no two lists collide.
    pub fn of_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        Self(hash.finalize().into())
    }

    /// Creates a digest from bytes that were computed elsewhere.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the 32 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = [0; 64];
        digits
            .as_chunks_mut::<2>()
            .0
            .iter_mut()
            .zip(self.0)
            .for_each(|(pair, byte)| *pair = hex_digits_of(byte));
        f.pad(std::str::from_utf8(&digits).unwrap_or_default())
    }
}

/// Formats bytes as hexadecimal digits.
///
/// ```
/// assert_eq!(toolgate_json::hex(&[0, 0x1f, 0xab]), "001fab");
/// ```
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().flat_map(|byte| hex_digits_of(*byte)).map(char::from).collect()
}

fn hex_digits_of(byte: u8) -> [u8; 2] {
    [byte >> 4, byte & 15].map(|digit| if digit < 10 { b'0' + digit } else { b'a' + digit - 10 })
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut bytes = [0u8; 32];
        let wrong = || serde::de::Error::custom("a digest must be 64 hexadecimal digits");
        if text.len() != 64 {
            return Err(wrong());
        }
        for (index, byte) in bytes.iter_mut().enumerate() {
            let pair = text.get(2 * index..2 * index + 2).ok_or_else(wrong)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
        }
        Ok(Self(bytes))
    }
}

/// Returns the canonical bytes of a document.
#[must_use]
pub fn to_canonical_bytes(value: &Value) -> Vec<u8> {
    let mut out = Vec::with_capacity(160);
    write_canonical(value, &mut out);
    out
}

/// Calls `f` with the canonical form of a document in a reused buffer.
pub fn with_canonical_text<T>(value: &Value, f: impl FnOnce(&str) -> T) -> T {
    thread_local!(static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) });
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.clear();
        write_canonical(value, scratch);
        let text = std::str::from_utf8(scratch).unwrap_or_default();
        f(text)
    })
}

/// Computes the digest of a document's canonical bytes.
#[must_use]
pub fn digest_of(value: &Value) -> Digest {
    Digest::of(&to_canonical_bytes(value))
}

fn write_canonical(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.extend_from_slice(b"null"),
        Value::Bool(true) => out.extend_from_slice(b"true"),
        Value::Bool(false) => out.extend_from_slice(b"false"),
        Value::Number(number) => out.extend_from_slice(number.as_str().as_bytes()),
        Value::String(text) => write_string(text, out),
        Value::Array(items) => {
            out.push(b'[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                write_canonical(item, out);
            }
            out.push(b']');
        }
        Value::Object(map) => {
            out.push(b'{');
            // The keys are already sorted unless a crate in the build enables `preserve_order`.
            if map.keys().is_sorted() {
                write_members(map.iter(), out);
            } else {
                let mut members: Vec<_> = map.iter().collect();
                members.sort_unstable_by_key(|(key, _)| *key);
                write_members(members.into_iter(), out);
            }
            out.push(b'}');
        }
    }
}

fn write_members<'a>(members: impl Iterator<Item = (&'a String, &'a Value)>, out: &mut Vec<u8>) {
    for (index, (key, item)) in members.enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write_string(key, out);
        out.push(b':');
        write_canonical(item, out);
    }
}

fn write_string(text: &str, out: &mut Vec<u8>) {
    if text.bytes().all(|b| b >= 0x20 && b != b'"' && b != b'\\') {
        out.push(b'"');
        out.extend_from_slice(text.as_bytes());
        out.push(b'"');
    } else if serde_json::to_writer(&mut *out, text).is_err() {
        out.extend_from_slice(b"\"\"");
    }
}
