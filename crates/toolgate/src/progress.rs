//! Is the model getting anywhere? The third identical call in a row says no.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::code;
use crate::error::ToolError;
use crate::json::Digest;
use crate::tool::Polling;

/// The identical call that is refused.
pub const REPEATS: u32 = 3;

/// What is remembered of a session's last calls: one call, however old the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
    /// The last validated call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last: Option<Digest>,
    /// How often in a row.
    streak: u32,
    /// After a retryable error: from when on a repetition is what the error asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retry_from: Option<Timestamp>,
    /// Result of the last poll.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    result: Option<Digest>,
    /// How many polls in a row gave that result.
    #[serde(default, skip_serializing_if = "is_zero")]
    unchanged: u32,
    /// When the last poll was let through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    polled: Option<Timestamp>,
    /// How much too soon the poll came that was counted last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    too_soon: Option<SignedDuration>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde wants it")]
const fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// How a call ended, as far as the next one's progress hangs on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// The call.
    pub digest: Digest,
    /// After a retryable error: from when on it may be repeated.
    pub retry_from: Option<Timestamp>,
    /// Digest of a poll's result.
    pub result: Option<Digest>,
}

impl Progress {
    /// Counts a validated call.
    pub fn count(&mut self, digest: Digest, now: Timestamp, polling: Option<&Polling>) {
        if self.last != Some(digest) {
            *self = Self { last: Some(digest), streak: 1, ..Self::default() };
        } else if self.retry_from.take().is_none_or(|from| now < from) {
            self.streak = self.streak.saturating_add(1);
        }
        if let Some(polling) = polling {
            let interval = SignedDuration::try_from(polling.interval).unwrap_or(SignedDuration::MAX);
            // Where the clock was set back, the wait begins anew: nobody waits for the clock to come round again.
            let polled = self.polled.map(|at| at.min(now));
            self.too_soon = polled.map(|at| interval.saturating_sub(now.duration_since(at))).filter(SignedDuration::is_positive);
            self.polled = if self.too_soon.is_some() { polled } else { Some(now) };
        }
    }

    /// What it was before a call was counted, of which this is what was recorded. Digests are keyed anew when one looks
    /// back: `now` stands for `then`.
    pub(crate) fn before(mut self, now: Digest, then: Option<Digest>) -> Self {
        if self.last == then && self.streak > 1 {
            self.last = Some(now);
            self.streak -= 1;
            // It was counted, so there was nothing to wait for.
            self.retry_from = None;
            return self;
        }
        Self::default()
    }

    /// Takes note of how a call ended.
    pub fn ended(&mut self, ended: &Ended) {
        if self.last != Some(ended.digest) {
            return;
        }
        self.retry_from = ended.retry_from;
        if let Some(result) = ended.result {
            self.unchanged = if self.result == Some(result) { self.unchanged.saturating_add(1) } else { 1 };
            self.result = Some(result);
        }
    }

    /// Judges the call that was counted last.
    ///
    /// # Errors
    /// `loop_detected`; for a poll that comes too soon `rate_limited`.
    pub(crate) fn judge(&self, tool: &str, polling: Option<&Polling>) -> Result<(), ToolError> {
        let Some(polling) = polling else {
            return if self.streak < REPEATS { Ok(()) } else { Err(looped(tool, self.streak)) };
        };
        if self.unchanged >= polling.max_unchanged {
            let message = format!(
                "`{tool}` gave the same result {} times in a row; stop polling, and tell the user that it has not changed",
                self.unchanged
            );
            return Err(ToolError::of(code::LOOP_DETECTED, message));
        }
        if let Some(wait) = self.too_soon {
            let ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).saturating_add(1);
            let message = format!("`{tool}` may be polled every {:?}; wait {ms} ms", polling.interval);
            return Err(ToolError::of(code::RATE_LIMITED, message).retry_after_ms(ms));
        }
        Ok(())
    }
}

fn looped(tool: &str, streak: u32) -> ToolError {
    let message = format!(
        "tool-call loop: `{tool}` was called with identical arguments {streak} times in a row; change the arguments, \
         use another tool, or stop and give your best answer"
    );
    ToolError::of(code::LOOP_DETECTED, message)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_wait_without_end_is_told_as_one() {
        let polling = Polling { interval: Duration::MAX, max_unchanged: 9 };
        let mut progress = Progress::default();
        for _ in 0..2 {
            progress.count(Digest::default(), Timestamp::UNIX_EPOCH, Some(&polling));
        }
        let told = progress.judge("poll", Some(&polling)).err().and_then(|error| error.retry_after_ms);
        assert_eq!(told, Some(u64::MAX));
    }
}
