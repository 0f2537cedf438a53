//! Decodes texts: percent encoding, Base64, hexadecimal and HTML character references.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};

/// Maximum number of nested encodings, of decoded forms of a text, and of bytes in a text.
const MAX_ENCODING_LAYERS: usize = 3;
const MAX_DECODED_FORMS: usize = 8;
const MAX_DECODED_BYTES: usize = 64 << 10;

/// Returns a text and its decoded forms.
pub(crate) fn decode_layers(text: &str) -> Vec<String> {
    let mut all = vec![text.to_owned()];
    if text.len() > MAX_DECODED_BYTES {
        return all;
    }
    let mut next = 0;
    for _ in 0..MAX_ENCODING_LAYERS {
        let end = all.len();
        let fresh: Vec<String> = all
            .iter()
            .skip(next)
            .flat_map(|text| {
                [decode_percent(text), decode_base64(text), decode_hex(text), decode_entities(text)]
            })
            .flatten()
            .collect();
        next = end;
        for text in fresh {
            if all.len() < MAX_DECODED_FORMS && !all.contains(&text) {
                all.push(text);
            }
        }
    }
    all
}

fn is_readable(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| !c.is_control() || c.is_whitespace())
}

/// Percent-decodes a text; returns `None` if that changes nothing.
pub fn decode_percent(text: &str) -> Option<String> {
    if !text.contains('%') {
        return None;
    }
    let bytes = text.as_bytes();
    let (mut decoded, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while let Some(byte) = bytes.get(at) {
        let code = (*byte == b'%')
            .then(|| bytes.get(at + 1..at + 3))
            .flatten()
            .and_then(|pair| std::str::from_utf8(pair).ok());
        match code.and_then(|pair| u8::from_str_radix(pair, 16).ok()) {
            Some(value) => {
                decoded.push(value);
                at += 3;
            }
            None => {
                decoded.push(*byte);
                at += 1;
            }
        }
    }
    String::from_utf8(decoded).ok().filter(|decoded| decoded != text)
}

fn decode_base64(text: &str) -> Option<String> {
    let packed: String =
        text.trim_end_matches('=').chars().filter(|c| !c.is_whitespace()).collect();
    if packed.len() < 6 {
        return None;
    }
    let decoded =
        STANDARD_NO_PAD.decode(&packed).or_else(|_| URL_SAFE_NO_PAD.decode(&packed)).ok()?;
    String::from_utf8(decoded).ok().filter(|text| is_readable(text))
}

fn decode_hex(text: &str) -> Option<String> {
    let digits: String = text
        .trim_start_matches("0x")
        .trim_start_matches("0X")
        .chars()
        .filter(|c| !matches!(c, ' ' | ':' | '-'))
        .collect();
    if digits.len() < 8
        || !digits.len().is_multiple_of(2)
        || !digits.bytes().all(|b| b.is_ascii_hexdigit())
    {
        return None;
    }
    let bytes: Option<Vec<u8>> = digits
        .as_bytes()
        .chunks(2)
        .map(|pair| {
            std::str::from_utf8(pair).ok().and_then(|pair| u8::from_str_radix(pair, 16).ok())
        })
        .collect();
    String::from_utf8(bytes?).ok().filter(|text| is_readable(text))
}

/// Decodes HTML character references such as `&#64;` and `&#x40;`.
fn decode_entities(text: &str) -> Option<String> {
    let mut decoded = String::new();
    let (mut rest, mut any) = (text, false);
    while let Some((before, after)) = rest.split_once("&#") {
        decoded.push_str(before);
        let (code, base) = after.strip_prefix(['x', 'X']).map_or((after, 10), |hex| (hex, 16));
        // Leading zeros are ignored, and the final `;` is optional. No code has more than 8 digits.
        let (long, code) = (code.len(), code.trim_start_matches('0'));
        let digits =
            code.bytes().take(8).take_while(|byte| char::from(*byte).is_digit(base)).count();
        // A code of zeros only is the NUL character, which is invisible.
        let zero = (digits == 0 && code.len() < long).then_some(0);
        let number = zero.or_else(|| u32::from_str_radix(code.get(..digits)?, base).ok());
        match (number.and_then(char::from_u32), code.get(digits..)) {
            (Some(c), Some(after)) => {
                decoded.push(c);
                any = true;
                rest = after.strip_prefix(';').unwrap_or(after);
            }
            _ => {
                decoded.push_str("&#");
                rest = after;
            }
        }
    }
    decoded.push_str(rest);
    any.then_some(decoded)
}
