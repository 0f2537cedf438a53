//! Parses JSON strictly: RFC 8259 without duplicate keys and without numbers out of range.

use serde_json::{Map, Value};

use super::{JsonBounds, number};

/// States why a document was refused, and at which byte.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message} (at byte {offset})")]
pub struct JsonParseError {
    /// The problem, in words that a model can act on.
    pub message: String,
    /// The byte offset in the document.
    pub offset: usize,
}

/// Parses one JSON document strictly.
///
/// # Errors
/// Returns the first violation of strict JSON with its byte offset.
///
/// ```
/// use toolgate_json::{JsonBounds, parse};
/// let twice = parse(br#"{"amount": 5, "amount": 600}"#, &JsonBounds::default());
/// assert_eq!(twice.unwrap_err().message, "the key `amount` is given twice");
/// ```
pub fn parse(text: &[u8], bounds: &JsonBounds) -> Result<Value, JsonParseError> {
    parse_document(text, bounds, false)
}

/// Parses like [`parse`], but the error contains no key, because a key may be a secret.
pub fn parse_with_hidden_keys(text: &[u8], bounds: &JsonBounds) -> Result<Value, JsonParseError> {
    parse_document(text, bounds, true)
}

fn parse_document(
    text: &[u8],
    bounds: &JsonBounds,
    hides_keys: bool,
) -> Result<Value, JsonParseError> {
    if let Some(reason) = super::find_exceeded_bound(text, bounds) {
        return Err(JsonParseError {
            message: format!("the document is too large: {reason}"),
            offset: 0,
        });
    }
    let text = std::str::from_utf8(text).map_err(|e| JsonParseError {
        message: "the document is not valid UTF-8".to_owned(),
        offset: e.valid_up_to(),
    })?;
    let mut reader = JsonParser { text, at: 0, hides_keys };
    let value = reader.parse_value()?;
    reader.skip_space();
    match reader.peek() {
        None => Ok(value),
        Some(_) => Err(reader.error("there is more text after the end of the document")),
    }
}

/// Parses one document. The bounds limit the nesting beforehand, so recursion is safe.
struct JsonParser<'a> {
    text: &'a str,
    at: usize,
    /// Whether error messages leave out keys.
    hides_keys: bool,
}

impl<'a> JsonParser<'a> {
    fn error(&self, message: impl Into<String>) -> JsonParseError {
        JsonParseError { message: message.into(), offset: self.at }
    }

    fn describe_key(&self, key: &str) -> String {
        if self.hides_keys {
            "a key".to_owned()
        } else {
            format!("the key `{}`", toolgate_text::escape_for_display(key))
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn slice(&self, from: usize, to: usize) -> &'a str {
        self.text.get(from..to).unwrap_or_default()
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn parse_value(&mut self) -> Result<Value, JsonParseError> {
        self.skip_space();
        match self.peek() {
            Some(b'{') => self.parse_object(),
            Some(b'[') => self.parse_array(),
            Some(b'"') => self.parse_string().map(Value::String),
            Some(b'-' | b'0'..=b'9') => self.parse_number(),
            Some(_) => self.parse_keyword(),
            None => Err(self.error("the document ends where a value should be")),
        }
    }

    fn parse_object(&mut self) -> Result<Value, JsonParseError> {
        self.at += 1;
        let mut map = Map::new();
        self.skip_space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Value::Object(map));
        }
        loop {
            self.skip_space();
            if self.peek() != Some(b'"') {
                return Err(self.error("an object's key must be a string in double quotes"));
            }
            let start = self.at;
            let key = self.parse_string()?;
            self.skip_space();
            if self.peek() != Some(b':') {
                return Err(self.error(format!("expected `:` after {}", self.describe_key(&key))));
            }
            self.at += 1;
            let value = self.parse_value()?;
            if super::is_reserved_key(&key) {
                let message = format!("{} is reserved", self.describe_key(&key));
                return Err(JsonParseError { message, offset: start });
            }
            if map.contains_key(&key) {
                let message = format!("{} is given twice", self.describe_key(&key));
                return Err(JsonParseError { message, offset: start });
            }
            map.insert(key, value);
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(Value::Object(map));
                }
                _ => return Err(self.error("expected `,` or `}` in an object")),
            }
        }
    }

    fn parse_array(&mut self) -> Result<Value, JsonParseError> {
        self.at += 1;
        let mut items = Vec::new();
        self.skip_space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Value::Array(items));
        }
        loop {
            items.push(self.parse_value()?);
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    return Ok(Value::Array(items));
                }
                _ => return Err(self.error("expected `,` or `]` in an array")),
            }
        }
    }

    fn parse_string(&mut self) -> Result<String, JsonParseError> {
        self.at += 1;
        let mut out = String::new();
        let mut from = self.at;
        loop {
            match self.peek() {
                None => return Err(self.error("a string is not closed")),
                Some(b'"') => {
                    out.push_str(self.slice(from, self.at));
                    self.at += 1;
                    return Ok(out);
                }
                Some(b'\\') => {
                    out.push_str(self.slice(from, self.at));
                    out.push(self.parse_escape()?);
                    from = self.at;
                }
                Some(0..=0x1f) => {
                    return Err(self.error("a control character in a string must be escaped"));
                }
                Some(_) => self.at += 1,
            }
        }
    }

    fn parse_escape(&mut self) -> Result<char, JsonParseError> {
        self.at += 1;
        let plain = match self.peek() {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => return self.parse_unicode_escape(),
            _ => return Err(self.error("unknown escape in a string")),
        };
        self.at += 1;
        Ok(plain)
    }

    fn parse_unicode_escape(&mut self) -> Result<char, JsonParseError> {
        let start = self.at - 1;
        let unpaired = || JsonParseError {
            message: "a string contains half of a surrogate pair".to_owned(),
            offset: start,
        };
        let first = self.parse_hex_digits()?;
        let code = match first {
            0xd800..=0xdbff => {
                if self.slice(self.at, self.at + 2) != "\\u" {
                    return Err(unpaired());
                }
                self.at += 1;
                let second = self.parse_hex_digits()?;
                if !(0xdc00..=0xdfff).contains(&second) {
                    return Err(unpaired());
                }
                0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)
            }
            other => other,
        };
        char::from_u32(code).ok_or_else(unpaired)
    }

    /// Parses four hexadecimal digits after a `u`.
    fn parse_hex_digits(&mut self) -> Result<u32, JsonParseError> {
        let digits = self.slice(self.at + 1, self.at + 5);
        if digits.len() != 4 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(self.error("`\\u` needs four hexadecimal digits"));
        }
        self.at += 5;
        u32::from_str_radix(digits, 16)
            .map_err(|_| self.error("`\\u` needs four hexadecimal digits"))
    }

    fn skip_digits(&mut self) -> usize {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        self.at - start
    }

    fn parse_number(&mut self) -> Result<Value, JsonParseError> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        let leading_zero = self.peek() == Some(b'0');
        let integer_digits = self.skip_digits();
        if integer_digits == 0 || (leading_zero && integer_digits > 1) {
            return Err(JsonParseError {
                message: "a number must start with a digit, and a leading 0 must be the only digit before the point".to_owned(),
                offset: start,
            });
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            if self.skip_digits() == 0 {
                return Err(self.error("digits must follow the point of a number"));
            }
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            if self.skip_digits() == 0 {
                return Err(self.error("digits must follow the exponent of a number"));
            }
        }
        number::canonical_number(self.slice(start, self.at))
            .map(Value::Number)
            .map_err(|message| JsonParseError { message, offset: start })
    }

    fn parse_keyword(&mut self) -> Result<Value, JsonParseError> {
        for (word, value) in
            [("null", Value::Null), ("true", Value::Bool(true)), ("false", Value::Bool(false))]
        {
            if self.slice(self.at, self.at + word.len()) == word {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self
            .error("expected a JSON value (object, array, string, number, true, false or null)"))
    }
}
