//! Any common way of writing a moment, to RFC 3339 in UTC.

use jiff::civil::{Date, DateTime};
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use serde_json::Value;

use crate::json::decimal_of;

/// Up to here a number is seconds (year 5138); then milliseconds, microseconds, nanoseconds.
const SECONDS: i128 = 100_000_000_000;

pub(super) fn to_rfc3339(value: &Value) -> Result<String, &'static str> {
    let moment = match value {
        Value::Number(_) => from_number(value),
        Value::String(text) => from_text(text.trim()),
        _ => None,
    };
    moment.map(|m| m.to_string()).ok_or("is no moment in time")
}

fn from_number(value: &Value) -> Option<Timestamp> {
    use rust_decimal::prelude::ToPrimitive;
    let number = decimal_of(value)?;
    let whole = number.trunc().to_i128()?;
    let scale: i128 = match whole.abs() {
        n if n < SECONDS => 1_000_000_000,
        n if n < SECONDS * 1_000 => 1_000_000,
        n if n < SECONDS * 1_000_000 => 1_000,
        _ => 1,
    };
    let nanos = number.checked_mul(rust_decimal::Decimal::from_i128_with_scale(scale, 0))?.trunc().to_i128()?;
    Timestamp::from_nanosecond(nanos).ok()
}

fn from_text(text: &str) -> Option<Timestamp> {
    if !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_digit() || b == b'-' || b == b'.')
        && text.bytes().filter(|b| *b == b'-').count() < 2
    {
        return text.parse().ok().and_then(|number| from_number(&Value::Number(number)));
    }
    let utc = |moment: DateTime| moment.to_zoned(TimeZone::UTC).ok().map(|z| z.timestamp());
    text.parse::<Timestamp>()
        .ok()
        .or_else(|| text.parse::<Zoned>().ok().map(|z| z.timestamp()))
        .or_else(|| jiff::fmt::rfc2822::parse(text).ok().map(|z| z.timestamp()))
        // Without an offset, UTC is meant: a result must not hang on where it is read.
        .or_else(|| text.parse::<DateTime>().ok().and_then(utc))
        .or_else(|| text.parse::<Date>().ok().and_then(|d| utc(d.at(0, 0, 0, 0))))
        .or_else(|| FORMATS.iter().find_map(|format| DateTime::strptime(format, text).ok()).and_then(utc))
        .or_else(|| DATE_FORMATS.iter().find_map(|format| Date::strptime(format, text).ok()).and_then(|d| utc(d.at(0, 0, 0, 0))))
}

/// Day and month are never guessed: `03/04/2026` is not read at all.
const FORMATS: &[&str] = &[
    "%Y/%m/%d %H:%M:%S",
    "%Y/%m/%d %H:%M",
    "%d %b %Y %H:%M:%S",
    "%d %b %Y %H:%M",
    "%b %d, %Y %H:%M:%S",
    "%a %b %d %H:%M:%S %Y",
    "%d.%m.%Y %H:%M:%S",
    "%d.%m.%Y %H:%M",
    "%Y%m%dT%H%M%S",
];
const DATE_FORMATS: &[&str] = &["%Y/%m/%d", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y", "%d.%m.%Y"];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn moments() {
        let same = "2023-11-14T22:13:20Z";
        for value in [
            json!(1_700_000_000),
            json!("1700000000"),
            json!(1_700_000_000_000_i64),
            json!(1_700_000_000_000_000_i64),
            json!(1_700_000_000_000_000_000_i64),
            json!("2023-11-14T22:13:20Z"),
            json!("2023-11-14 22:13:20"),
            json!("2023-11-14T23:13:20+01:00"),
            json!("Tue, 14 Nov 2023 22:13:20 GMT"),
            json!("14 Nov 2023 22:13:20"),
            json!("Nov 14, 2023 22:13:20"),
            json!("Tue Nov 14 22:13:20 2023"),
            json!("14.11.2023 22:13:20"),
            json!("2023/11/14 22:13:20"),
        ] {
            assert_eq!(to_rfc3339(&value).as_deref(), Ok(same), "{value}");
        }
        assert_eq!(to_rfc3339(&json!(1_700_000_000.5)).as_deref(), Ok("2023-11-14T22:13:20.5Z"));
        assert_eq!(to_rfc3339(&json!("2023-11-14")).as_deref(), Ok("2023-11-14T00:00:00Z"));
        for value in [json!("03/04/2026"), json!("soon"), json!(true), json!(""), json!("2023-13-01")] {
            assert!(to_rfc3339(&value).is_err(), "{value}");
        }
    }
}
