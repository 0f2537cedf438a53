//! Detects repetition without progress: the third identical call in a row is rejected.

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::call::error::ToolError;
use crate::call::error_code;
use crate::tool::PollingSettings;
use toolgate_json::Digest;

/// Number of identical calls in a row of which the last is rejected.
pub const LOOP_THRESHOLD_CALLS: u32 = 3;

/// Repetition state of a session. Constant size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RepetitionState {
    /// The last validated call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last: Option<Digest>,
    /// Number of identical calls in a row.
    streak: u32,
    /// After a retryable error, the time from which a repetition is allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retry_from: Option<Timestamp>,
    /// Digest of the last poll's result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    result: Option<Digest>,
    /// Number of polls in a row with that result.
    #[serde(default, skip_serializing_if = "is_zero")]
    unchanged: u32,
    /// Time of the last allowed poll.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    polled: Option<Timestamp>,
    /// Remaining wait of the poll that was counted last, if it came too soon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    too_soon: Option<SignedDuration>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde requires a reference")]
const fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// End of a call, as far as the repetition check needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallEnd {
    /// Digest of the call.
    pub digest: Digest,
    /// After a retryable error, the time from which the call may be repeated.
    pub retry_from: Option<Timestamp>,
    /// Digest of a poll's result.
    pub result: Option<Digest>,
}

impl RepetitionState {
    /// Counts a validated call.
    pub fn count_call(
        &mut self,
        digest: Digest,
        now: Timestamp,
        polling: Option<&PollingSettings>,
    ) {
        if self.last != Some(digest) {
            *self = Self { last: Some(digest), streak: 1, ..Self::default() };
        } else if self.retry_from.take().is_none_or(|from| now < from) {
            self.streak = self.streak.saturating_add(1);
        }
        if let Some(polling) = polling {
            let interval =
                SignedDuration::try_from(polling.interval).unwrap_or(SignedDuration::MAX);
            // If the clock was set back, the wait starts over. It must not last until the old time
            // comes again.
            let polled = self.polled.map(|at| at.min(now));
            self.too_soon = polled
                .map(|at| interval.saturating_sub(now.duration_since(at)))
                .filter(SignedDuration::is_positive);
            self.polled = if self.too_soon.is_some() { polled } else { Some(now) };
        }
    }

    /// Computes the state before a recorded call was counted.
    ///
    /// Digests are keyed differently in a replay: `now` is the digest that corresponds to `then`.
    pub(crate) fn state_before(mut self, now: Digest, then: Option<Digest>) -> Self {
        if self.last == then && self.streak > 1 {
            self.last = Some(now);
            self.streak -= 1;
            // The call was counted, so there was no pending wait.
            self.retry_from = None;
            return self;
        }
        Self::default()
    }

    /// Records how a call ended.
    pub fn record_end(&mut self, ended: &CallEnd) {
        if self.last != Some(ended.digest) {
            return;
        }
        self.retry_from = ended.retry_from;
        if let Some(result) = ended.result {
            self.unchanged =
                if self.result == Some(result) { self.unchanged.saturating_add(1) } else { 1 };
            self.result = Some(result);
        }
    }

    /// Checks the call that was counted last.
    ///
    /// # Errors
    /// `loop_detected`, or `rate_limited` for a poll that comes too soon.
    pub(crate) fn check(
        &self,
        tool: &str,
        polling: Option<&PollingSettings>,
    ) -> Result<(), ToolError> {
        let Some(polling) = polling else {
            return if self.streak < LOOP_THRESHOLD_CALLS {
                Ok(())
            } else {
                Err(loop_error(tool, self.streak))
            };
        };
        if self.unchanged >= polling.max_unchanged {
            let message = format!(
                "`{tool}` gave the same result {} times in a row; stop polling, and tell the user that it has not changed",
                self.unchanged
            );
            return Err(ToolError::from_code(error_code::LOOP_DETECTED, message));
        }
        if let Some(wait) = self.too_soon {
            let ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).saturating_add(1);
            let message =
                format!("`{tool}` may be polled every {:?}; wait {ms} ms", polling.interval);
            return Err(ToolError::from_code(error_code::RATE_LIMITED, message).retry_after_ms(ms));
        }
        Ok(())
    }
}

fn loop_error(tool: &str, streak: u32) -> ToolError {
    let message = format!(
        "tool-call loop: `{tool}` was called with identical arguments {streak} times in a row; change the arguments, \
         use another tool, or stop and give your best answer"
    );
    ToolError::from_code(error_code::LOOP_DETECTED, message)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_endless_interval_gives_the_longest_delay() {
        let polling = PollingSettings { interval: Duration::MAX, max_unchanged: 9 };
        let mut progress = RepetitionState::default();
        for _ in 0..2 {
            progress.count_call(Digest::default(), Timestamp::UNIX_EPOCH, Some(&polling));
        }
        let delay =
            progress.check("poll", Some(&polling)).err().and_then(|error| error.retry_after_ms);
        assert_eq!(delay, Some(u64::MAX));
    }
}
