//! Converts common spellings of a time to RFC 3339 in UTC.

use jiff::civil::{Date, DateTime};
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use toolgate_json::decimal_of;

/// Numbers below this are seconds (until year 5138), then milliseconds, microseconds, nanoseconds.
const MAX_SECONDS: i128 = 100_000_000_000;

/// Earliest accepted year: an earlier one was written with two digits, so its century is unknown.
const MIN_YEAR: i16 = 1_000;

/// The unit of a Unix time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TimeUnit {
    /// Seconds.
    #[serde(rename = "s")]
    Seconds,
    /// Milliseconds.
    #[serde(rename = "ms")]
    Millis,
    /// Microseconds.
    #[serde(rename = "us")]
    Micros,
    /// Nanoseconds.
    #[serde(rename = "ns")]
    Nanos,
}

pub(super) fn to_rfc3339(value: &Value, unit: Option<TimeUnit>) -> Result<String, &'static str> {
    let moment = match value {
        Value::Number(_) => from_number(value, unit),
        Value::String(text) => from_text(text.trim(), unit),
        _ => None,
    };
    moment.map(|m| m.to_string()).ok_or("is not a time")
}

fn from_number(value: &Value, unit: Option<TimeUnit>) -> Option<Timestamp> {
    use rust_decimal::prelude::ToPrimitive;
    let number = decimal_of(value)?;
    let integer = number.trunc().to_i128()?;
    let unit = unit.unwrap_or(match integer.abs() {
        n if n < MAX_SECONDS => TimeUnit::Seconds,
        n if n < MAX_SECONDS * 1_000 => TimeUnit::Millis,
        n if n < MAX_SECONDS * 1_000_000 => TimeUnit::Micros,
        _ => TimeUnit::Nanos,
    });
    let scale: i128 = match unit {
        TimeUnit::Seconds => 1_000_000_000,
        TimeUnit::Millis => 1_000_000,
        TimeUnit::Micros => 1_000,
        TimeUnit::Nanos => 1,
    };
    let nanos = number
        .checked_mul(rust_decimal::Decimal::from_i128_with_scale(scale, 0))?
        .trunc()
        .to_i128()?;
    Timestamp::from_nanosecond(nanos).ok()
}

fn from_text(text: &str, unit: Option<TimeUnit>) -> Option<Timestamp> {
    let utc = |moment: DateTime| moment.to_zoned(TimeZone::UTC).ok().map(|z| z.timestamp());
    let day = |format: &str, text: &str| {
        Date::strptime(format, text).ok().filter(|day| day.year() >= MIN_YEAR)
    };
    let moment = |format: &str, text: &str| {
        DateTime::strptime(format, text).ok().filter(|moment| moment.year() >= MIN_YEAR)
    };
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    // Without a unit, a few digits are a year or a date, not a Unix time.
    if digits && unit.is_none() && text.len() < 9 {
        return day("%Y%m%d", text)
            .filter(|_| text.len() == 8)
            .and_then(|day| utc(day.at(0, 0, 0, 0)));
    }
    let count = |sign: u8| text.bytes().filter(|b| *b == sign).count();
    let integer_digits = text.bytes().take_while(|b| *b != b'.').filter(u8::is_ascii_digit).count();
    if !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_digit() || b == b'-' || b == b'.')
        && count(b'-') < 2
        && count(b'.') < 2
        && (unit.is_some() || integer_digits >= 9)
    {
        return text.parse().ok().and_then(|number| from_number(&Value::Number(number), unit));
    }
    let text = [" UTC", " GMT"]
        .iter()
        .find_map(|zone| text.strip_suffix(zone))
        .filter(|rest| !rest.contains(','))
        .unwrap_or(text);
    let with_zone = text
        .parse::<Timestamp>()
        .ok()
        .or_else(|| text.parse::<Zoned>().ok().map(|z| z.timestamp()))
        .or_else(|| jiff::fmt::rfc2822::parse(text).ok().map(|z| z.timestamp()));
    // A text with an unknown time zone is not in UTC.
    if with_zone.is_some() || text.contains('[') {
        return with_zone;
    }
    // Without an offset, assume UTC: the result must not depend on the local time zone.
    text.parse::<DateTime>()
        .ok()
        .and_then(utc)
        .or_else(|| text.parse::<Date>().ok().and_then(|d| utc(d.at(0, 0, 0, 0))))
        .or_else(|| DATE_TIME_FORMATS.iter().find_map(|format| moment(format, text)).and_then(utc))
        .or_else(|| {
            DATE_FORMATS
                .iter()
                .find_map(|format| day(format, text))
                .and_then(|d| utc(d.at(0, 0, 0, 0)))
        })
}

/// Accepted formats; an ambiguous order of day and month, as in `03/04/2026`, is an error.
const DATE_TIME_FORMATS: &[&str] = &[
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
const DATE_FORMATS: &[&str] =
    &["%Y/%m/%d", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y", "%d.%m.%Y"];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn timestamps_are_normalized() {
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
            json!("2023-11-14 22:13:20 UTC"),
            json!("20231114T221320"),
        ] {
            assert_eq!(to_rfc3339(&value, None).as_deref(), Ok(same), "{value}");
        }
        let read =
            |value: Value, unit| to_rfc3339(&value, unit).unwrap_or_else(|error| error.to_owned());
        assert_eq!(read(json!(1_700_000_000.5), None), "2023-11-14T22:13:20.5Z");
        assert_eq!(read(json!("2023-11-14"), None), "2023-11-14T00:00:00Z");
        assert_eq!(read(json!("20231114"), None), "2023-11-14T00:00:00Z");
        assert_eq!(read(json!("14.11.2023"), None), "2023-11-14T00:00:00Z");
        assert_eq!(read(json!("1700000000.5"), None), "2023-11-14T22:13:20.5Z");
        assert_eq!(read(json!("2023-11-14T22:13:20[Europe/Berlin]"), None), "2023-11-14T21:13:20Z");
        // With a unit, the size of a number does not matter.
        assert_eq!(read(json!(86_400_000), Some(TimeUnit::Millis)), "1970-01-02T00:00:00Z");
        assert_eq!(read(json!("86400"), Some(TimeUnit::Seconds)), "1970-01-02T00:00:00Z");
        assert_eq!(read(json!(1_700_000_000), Some(TimeUnit::Nanos)), "1970-01-01T00:00:01.7Z");
        assert_eq!(read(json!("14.5"), Some(TimeUnit::Seconds)), "1970-01-01T00:00:14.5Z");
        for value in [
            json!("03/04/2026"),
            json!("soon"),
            json!(true),
            json!(""),
            json!("2023-13-01"),
            json!("2023"),
            json!("20231345"),
            json!("12"),
        ] {
            assert!(to_rfc3339(&value, None).is_err(), "{value}");
        }
        // A year of two digits, an incomplete date, and an unknown time zone.
        for text in [
            "03/04/26",
            "14.11.23 10:00",
            "14.11.23",
            "14 Nov 23",
            "Nov 14, 23",
            "11.2023",
            "14.11",
            "14.11.2023.1",
            "2023-11-14T22:13:20[Foo/Bar]",
        ] {
            assert!(
                to_rfc3339(&json!(text), None).is_err(),
                "{text}: {:?}",
                to_rfc3339(&json!(text), None)
            );
        }
    }
}
