//! Defines the clock for decisions. Timers use tokio's clock.

use std::fmt;
use std::sync::Mutex;

use jiff::{SignedDuration, Span, SpanRelativeTo, Timestamp};

/// Source of the current time.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Returns the current time.
    fn now(&self) -> Timestamp;
}

/// The system clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }
}

/// A clock that only changes when it is set, for tests, replay and scripted runs.
#[derive(Debug)]
pub struct ManualClock(Mutex<Timestamp>);

impl ManualClock {
    /// Creates a clock that shows `now`.
    #[must_use]
    pub const fn at(now: Timestamp) -> Self {
        Self(Mutex::new(now))
    }

    /// Sets the clock, backwards too.
    pub fn set(&self, now: Timestamp) {
        *crate::lock(&self.0) = now;
    }

    /// Advances the clock. A step beyond the range of timestamps has no effect.
    pub fn advance(&self, by: SignedDuration) {
        let mut now = crate::lock(&self.0);
        *now = now.checked_add(by).unwrap_or(*now);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        *crate::lock(&self.0)
    }
}

/// Hint for an invalid duration.
pub(crate) const DURATION_HELP: &str = "write `90d`, `1h` or `30s`";

/// Parses a duration without a sign: `30s`, `15 minutes`, `1.5h`, `1h 30m`, `7d`, `2 weeks`. A day
/// has 24 hours.
///
/// ```
/// assert_eq!(toolgate::clock::parse_duration("2 weeks"), toolgate::clock::parse_duration("336h"));
/// assert_eq!(toolgate::clock::parse_duration("-5s"), None);
/// ```
#[must_use]
pub fn parse_duration(text: &str) -> Option<SignedDuration> {
    let text = text.trim();
    if text.starts_with(['+', '-']) || text.ends_with("ago") {
        return None;
    }
    let (number, unit) =
        text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let days = match unit.trim() {
        "d" | "day" | "days" => 1,
        "w" | "week" | "weeks" => 7,
        _ => {
            return text.parse::<SignedDuration>().ok().or_else(|| {
                text.parse::<Span>().ok()?.to_duration(SpanRelativeTo::days_are_24_hours()).ok()
            });
        }
    };
    number.parse::<i64>().ok()?.checked_mul(days * 24 * 60 * 60).map(SignedDuration::from_secs)
}
