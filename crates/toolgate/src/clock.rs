//! The clock that decisions are made by. Timers run on tokio's.

use std::fmt;
use std::sync::Mutex;

use jiff::{SignedDuration, Timestamp};

/// What time it is.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Now.
    fn now(&self) -> Timestamp;
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }
}

/// A clock that stands still until it is told otherwise: for tests, replay and scripted runs.
#[derive(Debug)]
pub struct ManualClock(Mutex<Timestamp>);

impl ManualClock {
    /// A clock that shows `now`.
    #[must_use]
    pub const fn at(now: Timestamp) -> Self {
        Self(Mutex::new(now))
    }

    /// Sets the clock, backwards too.
    pub fn set(&self, now: Timestamp) {
        *crate::lock(&self.0) = now;
    }

    /// Moves the clock. A step beyond the range of time leaves it where it is.
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

/// A length of time as people write it: `15m`, `24h`, `7d`.
#[must_use]
pub fn duration(text: &str) -> Option<jiff::SignedDuration> {
    let text = text.trim();
    match text.strip_suffix('d').and_then(|days| days.trim().parse::<i64>().ok()) {
        Some(days) => days.checked_mul(24 * 60 * 60).map(jiff::SignedDuration::from_secs),
        None => text.parse().ok(),
    }
}
