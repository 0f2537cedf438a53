//! Converts numbers to exact decimals of bounded length.

use rust_decimal::Decimal;
use serde_json::{Number, Value};

/// Maximum number of significant digits of a number.
const MAX_SIGNIFICANT_DIGITS: usize = 64;
/// Maximum absolute exponent of the first digit, which is the range of a double.
const MAX_EXPONENT: i64 = 308;
/// Maximum number of digits before or after the point without an exponent.
const MAX_PLAIN_DIGITS: i64 = 40;

/// Returns whether a text is a canonical integer: no exponent, no point and no negative zero.
pub(crate) fn is_plain_integer(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    digits.len() <= MAX_PLAIN_DIGITS as usize
        && digits.bytes().all(|b| b.is_ascii_digit())
        && text != "-0"
}

/// Converts a number to its canonical form.
///
/// `1.0`, `1e0` and `10e-1` all become `1`, and every digit is kept.
///
/// # Errors
/// Returns a message if the text is not a JSON number, or has too many digits or a too large
/// exponent.
///
/// ```
/// use toolgate_json::canonical_number;
/// assert_eq!(canonical_number("6.00e2")?.as_str(), "600");
/// assert_eq!(canonical_number("9007199254740993")?.as_str(), "9007199254740993");
/// assert!(canonical_number("1e400").is_err());
/// # Ok::<(), String>(())
/// ```
pub fn canonical_number(text: &str) -> Result<Number, String> {
    let unparsable =
        || format!("`{}` is not a JSON number", toolgate_text::escape_for_display(text));
    if let Some(plain) = plain_decimal(text) {
        return plain.parse::<Number>().map_err(|_| unparsable());
    }
    rewrite_number(text)?.parse::<Number>().map_err(|_| unparsable())
}

/// Returns a short integer or decimal without trailing zeros, as a part of the text.
fn plain_decimal(text: &str) -> Option<&str> {
    if is_plain_integer(text) {
        return Some(text);
    }
    let (integer, fraction) = text.split_once('.')?;
    let fraction = fraction.trim_end_matches('0');
    let digits = integer.strip_prefix('-').unwrap_or(integer);
    let plain = text.len() <= MAX_PLAIN_DIGITS as usize
        && !fraction.is_empty()
        && fraction.bytes().all(|b| b.is_ascii_digit());
    let no_leading_zero = digits == "0" || !digits.starts_with('0');
    if plain && no_leading_zero && !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
    {
        text.get(..integer.len() + 1 + fraction.len())
    } else {
        None
    }
}

fn rewrite_number(text: &str) -> Result<String, String> {
    let unparsable =
        || format!("`{}` is not a JSON number", toolgate_text::escape_for_display(text));
    let (negative, rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (mantissa, exponent) = match rest.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, parse_exponent(exponent)?),
        None => (rest, 0),
    };
    let (integer, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = [integer, fraction].concat();
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(unparsable());
    }
    let significant = digits.trim_start_matches('0');
    let leading = (digits.len() - significant.len()) as i64;
    let significant = significant.trim_end_matches('0');
    if significant.is_empty() {
        return Ok("0".to_owned());
    }
    if significant.len() > MAX_SIGNIFICANT_DIGITS {
        return Err(format!(
            "the number has more than {MAX_SIGNIFICANT_DIGITS} significant digits"
        ));
    }
    // The number is 0.<significant> × 10^point.
    let point = integer.len() as i64 - leading + exponent;
    if (point - 1).abs() > MAX_EXPONENT {
        return Err(format!(
            "the number is out of range: at most {MAX_EXPONENT} digits either side of the point"
        ));
    }
    let sign = if negative { "-" } else { "" };
    let count = significant.len() as i64;
    let body = if (count..=MAX_PLAIN_DIGITS).contains(&point) {
        format!("{significant}{}", "0".repeat((point - count) as usize))
    } else if (1..count).contains(&point) {
        let (before, after) = significant.split_at(point as usize);
        format!("{before}.{after}")
    } else if (-MAX_PLAIN_DIGITS..=0).contains(&point) {
        format!("0.{}{significant}", "0".repeat(-point as usize))
    } else {
        let (first, after) = significant.split_at(1);
        let dot = if after.is_empty() { "" } else { "." };
        format!("{first}{dot}{after}e{:+}", point - 1)
    };
    Ok(format!("{sign}{body}"))
}

/// Parses an exponent. A large one is limited to a value that is out of range.
fn parse_exponent(text: &str) -> Result<i64, String> {
    let (negative, digits) = match (text.strip_prefix('-'), text.strip_prefix('+')) {
        (Some(digits), _) => (true, digits),
        (_, Some(digits)) => (false, digits),
        _ => (false, text),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err("the exponent of a number must be digits".to_owned());
    }
    let digits = digits.trim_start_matches('0');
    let size = if digits.len() > 6 { 1_000_000 } else { digits.parse::<i64>().unwrap_or(0) };
    Ok(if negative { -size } else { size })
}

/// Returns the exact decimal of a JSON number, if it fits 28 digits. A string has none.
#[must_use]
pub fn decimal_of(value: &Value) -> Option<Decimal> {
    let text = value.as_number()?.as_str();
    Decimal::from_str_exact(text).or_else(|_| Decimal::from_scientific(text)).ok()
}

/// Multiplies two decimals, and returns `None` if the product is not exact.
pub fn multiply_exact(a: Decimal, b: Decimal) -> Option<Decimal> {
    // A rounded product has fewer decimal places than both factors together.
    a.checked_mul(b)
        .filter(|product| a.is_zero() || b.is_zero() || product.scale() == a.scale() + b.scale())
}

/// Converts a decimal to a JSON number with all its digits.
#[must_use]
pub fn number_from_decimal(decimal: Decimal) -> Value {
    decimal.normalize().to_string().parse::<Number>().map_or(Value::Null, Value::Number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_numbers_have_one_canonical_form() {
        let cases = [
            ("0", "0"),
            ("-0", "0"),
            ("0.0", "0"),
            ("0e5", "0"),
            ("-0.0e-3", "0"),
            ("1.0", "1"),
            ("1e2", "100"),
            ("1E+2", "100"),
            ("10e-1", "1"),
            ("0.10", "0.1"),
            ("-12.500", "-12.5"),
            ("123e-5", "0.00123"),
            ("6.00e2", "600"),
            ("9007199254740993", "9007199254740993"),
            ("1e308", "1e+308"),
            ("1.25e-50", "1.25e-50"),
            ("0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"),
        ];
        for (text, canonical) in cases {
            assert_eq!(
                canonical_number(text).map(|n| n.to_string()),
                Ok(canonical.to_owned()),
                "{text}"
            );
        }
    }

    #[test]
    fn out_of_range_and_invalid_numbers_are_refused() {
        for text in [
            "1e400",
            "-1e400",
            "1e-400",
            "1e99999999999999999999",
            "NaN",
            "Infinity",
            "",
            "-",
            ".",
            "1e",
            "1e+",
            "0x10",
            "1_000",
        ] {
            assert!(canonical_number(text).is_err(), "{text}");
        }
        assert!(canonical_number(&"9".repeat(65)).is_err());
        assert!(canonical_number(&"1".repeat(64)).is_ok());
    }
}
