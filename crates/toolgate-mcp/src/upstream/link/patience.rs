//! Timing rules for an upstream: reconnect backoff, circuit breaker, health checks, rate limits.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use toolgate::Timestamp;
use toolgate::config::Reach;

use super::{Link, PULSE};
use crate::gateway::lock;

/// After this many consecutive failures the circuit breaker opens.
const PATIENCE: u32 = 5;
const REST: Duration = Duration::from_secs(5);
/// Failures within this time have the same cause as the first one.
const AT_ONCE: Duration = Duration::from_secs(1);
/// The rate limit for announced list changes that changed nothing.
const CLAIMS: u32 = 10;
const WHILE: Duration = Duration::from_secs(60);
/// The minimum interval between listings that check the protocol revision.
const MEANT: Duration = Duration::from_secs(5);
/// The upstream may reject this many listings in a row while calls are in progress.
const STRANGE: u32 = 3;
/// The shortest and the longest reconnect backoff.
const WAITS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));
/// While calls are in progress, this many health checks in a row are skipped.
const PASSED_OVER: u32 = 2;
/// This many error responses to listings in a row mean a restart, if no other request succeeds.
const REFUSALS: u32 = 3;

/// Returns the backoff after a number of failed attempts.
pub(super) fn wait(tries: u32) -> Duration {
    WAITS.0.saturating_mul(1 << tries.min(10)).min(WAITS.1)
}

/// Returns whether a health check is due.
///
/// A busy upstream is checked less often, but not never.
pub(super) fn is_due(passed_over: &mut u32, busy: bool) -> bool {
    let due = !busy || *passed_over >= PASSED_OVER;
    *passed_over = if due { 0 } else { *passed_over + 1 };
    due
}

/// Returns whether an upstream that keeps refusing listings is restarted.
///
/// A busy upstream is restarted only if all its calls failed before.
const fn is_lost(refusals: u32, busy: bool, doubted: bool) -> bool {
    refusals >= REFUSALS && (doubted || !busy)
}

/// The time of the last message from an upstream, and the longest timeout of any request on this
/// connection.
pub(super) struct Silence(Mutex<(Instant, Duration)>);

impl Silence {
    pub(super) fn new(timeout: Duration) -> Self {
        Self(Mutex::new((Instant::now(), timeout)))
    }

    fn begin(&self, timeout: Duration) {
        *lock(&self.0) = (Instant::now(), timeout);
    }

    fn end(&self) {
        lock(&self.0).0 = Instant::now();
    }

    fn may_last(&self, time: Duration) {
        let mut own = lock(&self.0);
        own.1 = own.1.max(time);
    }

    /// Returns whether the silence exceeds the longest timeout plus one health check interval.
    pub(super) fn is_too_long(&self) -> bool {
        let (last, longest) = *lock(&self.0);
        last.elapsed() > longest.saturating_add(PULSE)
    }
}

/// Counts announced list changes that changed nothing, within one window.
#[derive(Default)]
pub(super) struct Claims(Mutex<Option<(Instant, u32)>>);

impl Claims {
    /// Returns whether clients are notified too, within the rate limit.
    pub(super) fn may_pass(&self) -> bool {
        let mut own = lock(&self.0);
        let (since, times) = own.filter(|(since, _)| since.elapsed() < WHILE).unwrap_or((Instant::now(), 0));
        *own = Some((since, times.saturating_add(1)));
        times < CLAIMS
    }
}

/// Records that an upstream rejected a request in a way that its protocol revision rules out.
pub(super) struct Doubt {
    since: Instant,
    /// A listing in the same revision succeeded since, so the rejection was meant.
    told: bool,
}

/// How a request to an upstream failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::upstream) enum Fault {
    /// No response within the timeout.
    Late,
    /// The connection could not be opened, or it broke.
    Broken,
}

/// The circuit breaker of an upstream.
#[derive(Default)]
pub(super) struct Breaker {
    failures: AtomicU32,
    /// One of the failures was a timeout.
    late: AtomicBool,
    /// The breaker closed early after a listing, and no call succeeded since.
    forgiven: AtomicBool,
    rest: Mutex<Rest>,
}

/// When the breaker is open.
#[derive(Default)]
struct Rest {
    until: Option<Instant>,
    /// A successful listing closes the breaker early.
    hopeful: bool,
    /// When the breaker last closed early.
    forgiven: Option<Instant>,
}

impl Breaker {
    fn answered(&self) {
        self.failures.store(0, Ordering::Relaxed);
        self.late.store(false, Ordering::Relaxed);
        self.forgiven.store(false, Ordering::Relaxed);
    }

    /// Resets everything after a successful connection.
    fn trust(&self) {
        self.answered();
        *lock(&self.rest) = Rest::default();
    }

    /// Closes the breaker early after a successful listing.
    ///
    /// After disconnects a listing proves recovery. After timeouts it does not.
    fn told_all(&self) {
        let mut rest = lock(&self.rest);
        if rest.hopeful && rest.until.take().is_some() && !self.forgiven.swap(true, Ordering::Relaxed) {
            rest.forgiven = Some(Instant::now());
        }
    }

    /// Counts a failure, and returns whether the breaker opens.
    ///
    /// If calls keep failing, a listing does not close the breaker early a second time.
    fn failed(&self, fault: Fault) -> bool {
        if fault == Fault::Late {
            self.late.store(true, Ordering::Relaxed);
        }
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 < PATIENCE {
            return false;
        }
        self.failures.store(0, Ordering::Relaxed);
        let mut rest = lock(&self.rest);
        let again = self.forgiven.load(Ordering::Relaxed) && rest.forgiven.is_some_and(|at| at.elapsed() >= AT_ONCE);
        rest.hopeful = !self.late.swap(false, Ordering::Relaxed) && !again;
        rest.until = Instant::now().checked_add(REST);
        true
    }

    /// Returns for how long the breaker stays open, and whether it may close early.
    fn rests(&self) -> Option<(Duration, bool)> {
        let rest = lock(&self.rest);
        let left = rest.until?.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
        Some((left, rest.hopeful))
    }
}

impl Link {
    /// Records that a message arrived.
    pub(crate) fn heard(&self) {
        self.silence.end();
    }

    /// Returns whether calls are in progress.
    pub(super) fn is_busy(&self) -> bool {
        self.seats.available_permits() < self.upstream.concurrency
    }

    /// Stops the upstream once no call is in progress, or after `patience`.
    pub(crate) async fn end_when_idle(&self, patience: Duration) {
        let all = u32::try_from(self.upstream.concurrency).unwrap_or(u32::MAX);
        let idle = async {
            // Poll instead of queueing: a suspended call needs a slot to continue, and a queued
            // request for all slots would block it.
            loop {
                if let Ok(seats) = self.seats.try_acquire_many(all)
                    && self.parked.is_empty()
                {
                    return seats;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        // Hold all slots until the upstream has stopped, so that no call starts.
        let _all = tokio::time::timeout(patience, idle).await;
        self.end().await;
    }

    /// Records that a request may take this long.
    pub(in crate::upstream) fn may_take(&self, time: Duration) {
        self.silence.may_last(time);
    }

    /// Returns since when the breaker is open, for how long at most, and whether it may close
    /// early.
    ///
    /// Returns `None` if the upstream is not connected: then that is the error to report.
    pub(in crate::upstream) fn rests(&self) -> Option<(Timestamp, Duration, bool)> {
        let (left, hopeful) = self.breaker.rests()?;
        self.standing()?;
        let now = Timestamp::now();
        Some((now.checked_sub(REST.saturating_sub(left)).unwrap_or(now), left, hopeful))
    }

    /// Records a response of any kind.
    pub(in crate::upstream) fn answered(&self) {
        self.heard();
        self.answers.fetch_add(1, Ordering::Relaxed);
        self.breaker.answered();
        self.doubted.store(false, Ordering::Relaxed);
    }

    /// Records a successful response.
    pub(in crate::upstream) fn served(&self) {
        self.refusals.store(0, Ordering::Relaxed);
        self.answered();
    }

    /// Records a successful listing.
    pub(super) fn told_all(&self) {
        self.refusals.store(0, Ordering::Relaxed);
        self.doubted.store(false, Ordering::Relaxed);
        self.breaker.told_all();
        self.believe();
    }

    /// Records that a listing was rejected as by another revision. Returns whether to reconnect.
    ///
    /// While calls are in progress, one rejection is not enough: a proxy in between may have
    /// failed.
    pub(super) fn is_estranged(&self) -> bool {
        let times = self.strange.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        !self.is_busy() || times >= STRANGE
    }

    fn believe(&self) {
        self.strange.store(0, Ordering::Relaxed);
        if let Some(doubt) = &mut *lock(&self.doubt) {
            doubt.told = true;
        }
    }

    /// Records that a listing was refused. Returns whether to restart the upstream.
    ///
    /// A server that answers everything with errors may have lost its backend.
    pub(super) fn refused(&self) -> bool {
        self.believe();
        let refusals = self.refusals.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        is_lost(refusals, self.is_busy(), self.doubted.swap(false, Ordering::Relaxed))
    }

    /// Resets everything after a successful connection.
    pub(super) fn trust(&self) {
        self.told_all();
        self.breaker.trust();
        *lock(&self.doubt) = None;
        self.silence.begin(self.upstream.timeout);
    }

    /// Returns whether all responses share one stream. The supervisor notices its end, once for all
    /// calls.
    pub(in crate::upstream) fn has_one_stream(&self) -> bool {
        match &self.upstream.reach {
            Reach::Command { .. } => true,
            // A detected SSE transport counts as separate streams. The failures are reset on
            // reconnect.
            Reach::Url { sse, .. } => *sse == Some(true),
        }
    }

    /// Returns whether a rejected request can mean that the upstream now has an older revision, for
    /// example after a restart. Starts a listing to find out.
    pub(in crate::upstream) fn may_be_another(&self, generation: u64) -> bool {
        // The supervisor is already reconnecting.
        if self.standing().is_none_or(|standing| standing.generation != generation) {
            return true;
        }
        let mut doubt = lock(&self.doubt);
        let doubt = doubt.get_or_insert_with(|| Doubt { since: Instant::now(), told: false });
        if !doubt.told || doubt.since.elapsed() > MEANT {
            doubt.since = Instant::now();
            self.relist.notify_one();
        }
        !doubt.told
    }

    /// Records a failed request. If the breaker opens, a listing probes the upstream.
    pub(in crate::upstream) fn failed(&self, generation: u64, fault: Fault) {
        // Ignore failures of an earlier connection. Without a connection, the supervisor reconnects
        // anyway.
        if self.standing().is_none_or(|standing| standing.generation != generation) {
            return;
        }
        if self.breaker.failed(fault) {
            self.doubted.store(true, Ordering::Relaxed);
            tracing::warn!(upstream = self.upstream.name, "circuit breaker opened");
            // The listing shows whether the upstream responds.
            self.relist.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wait_is_longer_than_the_one_before_up_to_the_longest() {
        let waits: Vec<Duration> = (0..12).map(wait).collect();
        assert_eq!(waits.first(), Some(&WAITS.0));
        assert!(waits.windows(2).all(|two| two[1] == (two[0] * 2).min(WAITS.1)), "{waits:?}");
        assert_eq!((waits.last(), wait(u32::MAX)), (Some(&WAITS.1), WAITS.1));
    }

    #[test]
    fn who_refuses_again_and_again_is_started_again_but_not_in_the_middle_of_a_call() {
        let lost = |busy, doubted| (1..=4).map(|refusals| is_lost(refusals, busy, doubted)).collect::<Vec<_>>();
        assert_eq!(lost(false, false), [false, false, true, true]);
        assert_eq!(lost(true, false), [false; 4]);
        assert_eq!(lost(true, true), [false, false, true, true]);
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_nothing_for_longer_than_anything_may_take_is_silent() {
        let second = Duration::from_secs(1);
        let silence = Silence::new(second * 60);
        tokio::time::advance(second * 60 + PULSE).await;
        assert!(!silence.is_too_long());
        tokio::time::advance(second).await;
        assert!(silence.is_too_long());
        // One message is enough.
        silence.end();
        assert!(!silence.is_too_long());
        // A longer timeout extends the limit, and a shorter one does not reduce it.
        silence.may_last(second * 600);
        silence.may_last(second);
        tokio::time::advance(second * 600 + PULSE).await;
        assert!(!silence.is_too_long());
        tokio::time::advance(second).await;
        assert!(silence.is_too_long());
        silence.begin(second * 60);
        tokio::time::advance(second * 61 + PULSE).await;
        assert!(silence.is_too_long());
    }

    #[tokio::test(start_paused = true)]
    async fn who_was_cut_off_is_taken_back_for_what_it_offers_unless_that_goes_on_and_who_was_late_is_not() {
        let breaker = Breaker::default();
        let fail = |fault: Fault| (0..PATIENCE).map(|_| breaker.failed(fault)).collect::<Vec<_>>();
        assert_eq!(fail(Fault::Broken), [false, false, false, false, true]);
        assert_eq!(breaker.rests(), Some((REST, true)));
        breaker.told_all();
        assert_eq!(breaker.rests(), None);
        // Failures with the same cause.
        fail(Fault::Broken);
        breaker.told_all();
        assert_eq!(breaker.rests(), None);
        // The listing succeeds again, but no call does.
        tokio::time::advance(AT_ONCE).await;
        fail(Fault::Broken);
        breaker.told_all();
        assert_eq!(breaker.rests(), Some((REST, false)));
        tokio::time::advance(REST).await;
        assert_eq!(breaker.rests(), None);
        // One response restores the early close.
        breaker.answered();
        fail(Fault::Broken);
        breaker.told_all();
        assert_eq!(breaker.rests(), None);
        // One timeout among the disconnects.
        breaker.answered();
        breaker.failed(Fault::Late);
        fail(Fault::Broken);
        breaker.told_all();
        assert_eq!(breaker.rests(), Some((REST, false)));
        breaker.trust();
        assert_eq!(breaker.rests(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_without_end_that_something_has_changed_is_heard_now_and_then() {
        let claims = Claims::default();
        for _ in 0..2 {
            assert_eq!((0..50).filter(|_| claims.may_pass()).count(), 10);
            tokio::time::advance(WHILE).await;
        }
    }

    #[test]
    fn who_is_always_busy_is_asked_now_and_then() {
        let mut passed_over = 0;
        let asked: Vec<bool> = [false, true, true, true, true, true, false, true].map(|busy| is_due(&mut passed_over, busy)).to_vec();
        assert_eq!(asked, [true, false, false, true, false, false, true, false]);
    }
}
