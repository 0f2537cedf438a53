//! Decides about reconnect backoff, circuit breaker, health checks and rate limits of an upstream.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use toolgate::Timestamp;
use toolgate_config::UpstreamTransport;

use crate::gateway::lock;
use crate::upstream::supervisor::{HEALTH_CHECK_INTERVAL, UpstreamSupervisor};

/// After this many consecutive failures the circuit breaker opens.
const MAX_CONSECUTIVE_FAILURES: u32 = 5;
const CIRCUIT_OPEN_DURATION: Duration = Duration::from_secs(5);
/// Failures within this time have the same cause as the first one.
const SAME_CAUSE_WINDOW: Duration = Duration::from_secs(1);
/// The rate limit for announced list changes that changed nothing.
const MAX_UNCHANGED_ANNOUNCEMENTS: u32 = 10;
const ANNOUNCEMENT_RATE_WINDOW: Duration = Duration::from_secs(60);
/// The minimum interval between listings that check the protocol revision.
const MIN_REVISION_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The upstream may reject this many listings in a row while calls are in progress.
const MAX_REVISION_REJECTIONS: u32 = 3;
/// The shortest and the longest reconnect backoff.
const RECONNECT_BACKOFF_RANGE: (Duration, Duration) =
    (Duration::from_millis(200), Duration::from_secs(30));
/// While calls are in progress, this many health checks in a row are skipped.
const MAX_SKIPPED_HEALTH_CHECKS: u32 = 2;
/// This many error responses to listings in a row mean a restart, if no other request succeeds.
const MAX_LISTING_REFUSALS: u32 = 3;

/// Returns the backoff after a number of failed attempts.
pub(crate) fn reconnect_backoff(tries: u32) -> Duration {
    RECONNECT_BACKOFF_RANGE.0.saturating_mul(1 << tries.min(10)).min(RECONNECT_BACKOFF_RANGE.1)
}

/// Returns whether a health check is due.
///
/// A busy upstream is checked less often.
pub(crate) fn is_health_check_due(skipped: &mut u32, is_busy: bool) -> bool {
    let is_due = !is_busy || *skipped >= MAX_SKIPPED_HEALTH_CHECKS;
    *skipped = if is_due { 0 } else { *skipped + 1 };
    is_due
}

/// Returns whether an upstream that keeps refusing listings is restarted.
///
/// A busy upstream is restarted only if all its calls failed before.
const fn is_restart_due(refusals: u32, is_busy: bool, is_suspect: bool) -> bool {
    refusals >= MAX_LISTING_REFUSALS && (is_suspect || !is_busy)
}

/// The time of the last message from an upstream, and the longest timeout of any request on this
/// connection.
pub(crate) struct IdleWatch(Mutex<(Instant, Duration)>);

impl IdleWatch {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self(Mutex::new((Instant::now(), timeout)))
    }

    fn reset(&self, timeout: Duration) {
        *lock(&self.0) = (Instant::now(), timeout);
    }

    fn record_activity(&self) {
        lock(&self.0).0 = Instant::now();
    }

    fn extend_limit(&self, timeout: Duration) {
        let mut state = lock(&self.0);
        state.1 = state.1.max(timeout);
    }

    /// Returns whether the silence exceeds the longest timeout plus one health check interval.
    pub(crate) fn is_too_long(&self) -> bool {
        let (last, longest) = *lock(&self.0);
        last.elapsed() > longest.saturating_add(HEALTH_CHECK_INTERVAL)
    }
}

/// Counts announced list changes that changed nothing, within one window.
#[derive(Default)]
pub(crate) struct ListChangedLimiter(Mutex<Option<(Instant, u32)>>);

impl ListChangedLimiter {
    /// Returns whether clients are notified too, within the rate limit.
    pub(crate) fn is_allowed(&self) -> bool {
        let mut window = lock(&self.0);
        let (since, count) = window
            .filter(|(since, _)| since.elapsed() < ANNOUNCEMENT_RATE_WINDOW)
            .unwrap_or((Instant::now(), 0));
        *window = Some((since, count.saturating_add(1)));
        count < MAX_UNCHANGED_ANNOUNCEMENTS
    }
}

/// Records that an upstream rejected a request in a way that its protocol revision rules out.
pub(crate) struct RevisionSuspicion {
    since: Instant,
    /// A listing in the same revision succeeded since, so the upstream meant the
    /// rejection.
    is_revision_confirmed: bool,
}

/// How a request to an upstream failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UpstreamFailure {
    /// No response within the timeout.
    Timeout,
    /// The connection could not be opened, or it broke.
    Disconnected,
}

/// The circuit breaker of an upstream.
#[derive(Default)]
pub(crate) struct CircuitBreaker {
    failures: AtomicU32,
    /// One of the failures was a timeout.
    has_timeout: AtomicBool,
    /// The breaker closed early after a listing, and no call succeeded since.
    has_closed_early: AtomicBool,
    state: Mutex<BreakerState>,
}

/// Times and flags of the open state.
#[derive(Default)]
struct BreakerState {
    open_until: Option<Instant>,
    /// A successful listing closes the breaker early.
    can_close_early: bool,
    /// When the breaker last closed early.
    closed_early_at: Option<Instant>,
}

impl CircuitBreaker {
    fn on_response(&self) {
        self.failures.store(0, Ordering::Relaxed);
        self.has_timeout.store(false, Ordering::Relaxed);
        self.has_closed_early.store(false, Ordering::Relaxed);
    }

    /// Resets everything after a successful connection.
    fn reset(&self) {
        self.on_response();
        *lock(&self.state) = BreakerState::default();
    }

    /// Closes the breaker early after a successful listing.
    ///
    /// After disconnects a listing proves recovery. After timeouts it does not.
    fn on_listing(&self) {
        let mut state = lock(&self.state);
        if state.can_close_early
            && state.open_until.take().is_some()
            && !self.has_closed_early.swap(true, Ordering::Relaxed)
        {
            state.closed_early_at = Some(Instant::now());
        }
    }

    /// Counts a failure, and returns whether the breaker opens.
    ///
    /// If calls keep failing, a listing does not close the breaker early a second time.
    fn on_failure(&self, failure: UpstreamFailure) -> bool {
        if failure == UpstreamFailure::Timeout {
            self.has_timeout.store(true, Ordering::Relaxed);
        }
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 < MAX_CONSECUTIVE_FAILURES {
            return false;
        }
        self.failures.store(0, Ordering::Relaxed);
        let mut state = lock(&self.state);
        let is_repeated = self.has_closed_early.load(Ordering::Relaxed)
            && state.closed_early_at.is_some_and(|at| at.elapsed() >= SAME_CAUSE_WINDOW);
        state.can_close_early = !self.has_timeout.swap(false, Ordering::Relaxed) && !is_repeated;
        state.open_until = Instant::now().checked_add(CIRCUIT_OPEN_DURATION);
        true
    }

    /// Returns for how long the breaker stays open, and whether it may close early.
    fn open_time(&self) -> Option<(Duration, bool)> {
        let state = lock(&self.state);
        let left = state
            .open_until?
            .checked_duration_since(Instant::now())
            .filter(|left| !left.is_zero())?;
        Some((left, state.can_close_early))
    }
}

impl UpstreamSupervisor {
    /// Records that a message arrived.
    pub(crate) fn on_message(&self) {
        self.idle_watch.record_activity();
    }

    /// Returns whether calls are in progress.
    pub(crate) fn is_busy(&self) -> bool {
        self.slots.available_permits() < self.upstream.max_concurrency
    }

    /// Stops the upstream once no call is in progress, or after `timeout`.
    pub(crate) async fn stop_when_idle(&self, timeout: Duration) {
        let slot_count = u32::try_from(self.upstream.max_concurrency).unwrap_or(u32::MAX);
        let idle = async {
            // Poll instead of queueing: a suspended call needs a slot to continue, and a queued
            // request for all slots would block it.
            loop {
                if let Ok(permits) = self.slots.try_acquire_many(slot_count)
                    && self.suspended_calls.is_empty()
                {
                    return permits;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        // Hold all slots until the upstream has stopped, so that no call starts.
        let _permits = tokio::time::timeout(timeout, idle).await;
        self.stop().await;
    }

    /// Records that a request may take this long.
    pub(crate) fn extend_silence_limit(&self, timeout: Duration) {
        self.idle_watch.extend_limit(timeout);
    }

    /// Returns since when the breaker is open, for how long at most, and whether it may close
    /// early.
    ///
    /// Returns `None` if the upstream is not connected, because callers report that error instead.
    pub(crate) fn circuit_open(&self) -> Option<(Timestamp, Duration, bool)> {
        let (left, can_close_early) = self.breaker.open_time()?;
        self.connection()?;
        let now = Timestamp::now();
        Some((
            now.checked_sub(CIRCUIT_OPEN_DURATION.saturating_sub(left)).unwrap_or(now),
            left,
            can_close_early,
        ))
    }

    /// Records a response of any kind.
    pub(crate) fn on_response(&self) {
        self.on_message();
        self.response_count.fetch_add(1, Ordering::Relaxed);
        self.breaker.on_response();
        self.is_suspect.store(false, Ordering::Relaxed);
    }

    /// Records a successful response.
    pub(crate) fn on_success(&self) {
        self.listing_refusals.store(0, Ordering::Relaxed);
        self.on_response();
    }

    /// Records a successful listing.
    pub(crate) fn on_listing(&self) {
        self.listing_refusals.store(0, Ordering::Relaxed);
        self.is_suspect.store(false, Ordering::Relaxed);
        self.breaker.on_listing();
        self.confirm_revision();
    }

    /// Records that a listing was rejected as by another revision. Returns whether to reconnect.
    ///
    /// While calls are in progress, one rejection is not enough: a proxy in between may have
    /// failed.
    pub(crate) fn on_revision_rejection(&self) -> bool {
        let count = self.revision_rejections.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        !self.is_busy() || count >= MAX_REVISION_REJECTIONS
    }

    fn confirm_revision(&self) {
        self.revision_rejections.store(0, Ordering::Relaxed);
        if let Some(suspicion) = &mut *lock(&self.revision_suspicion) {
            suspicion.is_revision_confirmed = true;
        }
    }

    /// Records that a listing was refused. Returns whether to restart the upstream.
    ///
    /// A server that answers everything with errors may have lost its backend.
    pub(crate) fn on_listing_refused(&self) -> bool {
        self.confirm_revision();
        let refusals = self.listing_refusals.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        is_restart_due(refusals, self.is_busy(), self.is_suspect.swap(false, Ordering::Relaxed))
    }

    /// Resets everything after a successful connection.
    pub(crate) fn on_connected(&self) {
        self.on_listing();
        self.breaker.reset();
        *lock(&self.revision_suspicion) = None;
        self.idle_watch.reset(self.upstream.timeout);
    }

    /// Returns whether all responses share one stream. The supervisor notices its end, once for all
    /// calls.
    pub(crate) fn has_one_stream(&self) -> bool {
        match &self.upstream.transport {
            UpstreamTransport::Command { .. } => true,
            // A detected SSE transport counts as separate streams. The failures are reset on
            // reconnect.
            UpstreamTransport::Http { sse, .. } => *sse == Some(true),
        }
    }

    /// Returns whether a rejected request can mean that the upstream now has an older revision, for
    /// example after a restart. Starts a listing to find out.
    pub(crate) fn suspect_revision(&self, generation: u64) -> bool {
        // The supervisor is already reconnecting.
        if self.connection().is_none_or(|connection| connection.generation != generation) {
            return true;
        }
        let mut suspicion = lock(&self.revision_suspicion);
        let suspicion = suspicion.get_or_insert_with(|| RevisionSuspicion {
            since: Instant::now(),
            is_revision_confirmed: false,
        });
        if !suspicion.is_revision_confirmed
            || suspicion.since.elapsed() > MIN_REVISION_CHECK_INTERVAL
        {
            suspicion.since = Instant::now();
            self.relist_requested.notify_one();
        }
        !suspicion.is_revision_confirmed
    }

    /// Records a failed request. If the breaker opens, a listing probes the upstream.
    pub(crate) fn on_failure(&self, generation: u64, failure: UpstreamFailure) {
        // Ignore failures of an earlier connection. Without a connection, the supervisor reconnects
        // anyway.
        if self.connection().is_none_or(|connection| connection.generation != generation) {
            return;
        }
        if self.breaker.on_failure(failure) {
            self.is_suspect.store(true, Ordering::Relaxed);
            tracing::warn!(upstream = self.upstream.name, "circuit breaker opened");
            // The listing shows whether the upstream responds.
            self.relist_requested.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backoff_doubles_up_to_its_maximum() {
        let waits: Vec<Duration> = (0..12).map(reconnect_backoff).collect();
        assert_eq!(waits.first(), Some(&RECONNECT_BACKOFF_RANGE.0));
        assert!(
            waits.windows(2).all(|two| two[1] == (two[0] * 2).min(RECONNECT_BACKOFF_RANGE.1)),
            "{waits:?}"
        );
        assert_eq!(
            (waits.last(), reconnect_backoff(u32::MAX)),
            (Some(&RECONNECT_BACKOFF_RANGE.1), RECONNECT_BACKOFF_RANGE.1)
        );
    }

    #[test]
    fn repeated_refusals_restart_the_upstream_unless_it_is_busy() {
        let restarts = |is_busy, is_suspect| {
            (1..=4)
                .map(|refusals| is_restart_due(refusals, is_busy, is_suspect))
                .collect::<Vec<_>>()
        };
        assert_eq!(restarts(false, false), [false, false, true, true]);
        assert_eq!(restarts(true, false), [false; 4]);
        assert_eq!(restarts(true, true), [false, false, true, true]);
    }

    #[tokio::test(start_paused = true)]
    async fn silence_beyond_the_longest_timeout_is_detected() {
        let second = Duration::from_secs(1);
        let silence = IdleWatch::new(second * 60);
        tokio::time::advance(second * 60 + HEALTH_CHECK_INTERVAL).await;
        assert!(!silence.is_too_long());
        tokio::time::advance(second).await;
        assert!(silence.is_too_long());
        // One message is enough.
        silence.record_activity();
        assert!(!silence.is_too_long());
        // A longer timeout extends the limit, and a shorter one does not reduce it.
        silence.extend_limit(second * 600);
        silence.extend_limit(second);
        tokio::time::advance(second * 600 + HEALTH_CHECK_INTERVAL).await;
        assert!(!silence.is_too_long());
        tokio::time::advance(second).await;
        assert!(silence.is_too_long());
        silence.reset(second * 60);
        tokio::time::advance(second * 61 + HEALTH_CHECK_INTERVAL).await;
        assert!(silence.is_too_long());
    }

    #[tokio::test(start_paused = true)]
    async fn a_listing_closes_the_breaker_once_after_disconnects_and_never_after_timeouts() {
        let breaker = CircuitBreaker::default();
        let fail = |failure: UpstreamFailure| {
            (0..MAX_CONSECUTIVE_FAILURES).map(|_| breaker.on_failure(failure)).collect::<Vec<_>>()
        };
        assert_eq!(fail(UpstreamFailure::Disconnected), [false, false, false, false, true]);
        assert_eq!(breaker.open_time(), Some((CIRCUIT_OPEN_DURATION, true)));
        breaker.on_listing();
        assert_eq!(breaker.open_time(), None);
        // Failures with the same cause.
        fail(UpstreamFailure::Disconnected);
        breaker.on_listing();
        assert_eq!(breaker.open_time(), None);
        // The listing succeeds again, but no call does.
        tokio::time::advance(SAME_CAUSE_WINDOW).await;
        fail(UpstreamFailure::Disconnected);
        breaker.on_listing();
        assert_eq!(breaker.open_time(), Some((CIRCUIT_OPEN_DURATION, false)));
        tokio::time::advance(CIRCUIT_OPEN_DURATION).await;
        assert_eq!(breaker.open_time(), None);
        // One response restores the early close.
        breaker.on_response();
        fail(UpstreamFailure::Disconnected);
        breaker.on_listing();
        assert_eq!(breaker.open_time(), None);
        // One timeout among the disconnects.
        breaker.on_response();
        breaker.on_failure(UpstreamFailure::Timeout);
        fail(UpstreamFailure::Disconnected);
        breaker.on_listing();
        assert_eq!(breaker.open_time(), Some((CIRCUIT_OPEN_DURATION, false)));
        breaker.reset();
        assert_eq!(breaker.open_time(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn unchanged_list_notifications_are_rate_limited() {
        let limiter = ListChangedLimiter::default();
        for _ in 0..2 {
            assert_eq!((0..50).filter(|_| limiter.is_allowed()).count(), 10);
            tokio::time::advance(ANNOUNCEMENT_RATE_WINDOW).await;
        }
    }

    #[test]
    fn a_busy_upstream_is_still_checked() {
        let mut skipped = 0;
        let checks: Vec<bool> = [false, true, true, true, true, true, false, true]
            .map(|is_busy| is_health_check_due(&mut skipped, is_busy))
            .to_vec();
        assert_eq!(checks, [true, false, false, true, false, false, true, false]);
    }
}
