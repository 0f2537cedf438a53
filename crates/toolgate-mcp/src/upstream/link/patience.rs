//! How long an upstream is waited for: before it is started again, while it is busy, and where it fails again and again.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use toolgate::Timestamp;
use toolgate::config::Reach;

use super::{Link, PULSE};
use crate::gateway::lock;

/// So many failures in a row, and it is left alone for a while.
const PATIENCE: u32 = 5;
const REST: Duration = Duration::from_secs(5);
/// What was under way at the same time breaks off within this time.
const AT_ONCE: Duration = Duration::from_secs(1);
/// So often in such a while it may say of lists that are as before that they have changed.
const CLAIMS: u32 = 10;
const WHILE: Duration = Duration::from_secs(60);
/// How soon one that means what it turns away is asked again what it offers: it may be another by then.
const MEANT: Duration = Duration::from_secs(5);
/// So often in a row it may not know what every one of its revision knows, while it is at calls.
const STRANGE: u32 = 3;
/// The shortest and the longest wait before it is started again.
const WAITS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));
/// So often in a row it is not asked what it offers, because calls are under way.
const PASSED_OVER: u32 = 2;
/// So often in a row it may refuse to say what it offers, while nothing else that it is asked comes to anything.
const REFUSALS: u32 = 3;

/// How long it is waited before it is started again, after so many tries in vain.
pub(super) fn wait(tries: u32) -> Duration {
    WAITS.0.saturating_mul(1 << tries.min(10)).min(WAITS.1)
}

/// Whether it is asked now what it offers. One with calls under way has no time for questions; but one that always has some would never
/// be looked at.
pub(super) fn is_due(passed_over: &mut u32, busy: bool) -> bool {
    let due = !busy || *passed_over >= PASSED_OVER;
    *passed_over = if due { 0 } else { *passed_over + 1 };
    due
}

/// Whether one that has refused so often in a row to say what it offers is started again. Not in the middle of a call, unless all before
/// that have failed: the next time it is asked, that is over.
const fn is_lost(refusals: u32, busy: bool, doubted: bool) -> bool {
    refusals >= REFUSALS && (doubted || !busy)
}

/// When an upstream was last heard, and the longest time that anything had that it was asked since it is there.
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

    /// Whether it has lasted longer than anything may take, and than it lasts between two questions while nothing is under way.
    pub(super) fn is_too_long(&self) -> bool {
        let (last, longest) = *lock(&self.0);
        last.elapsed() > longest.saturating_add(PULSE)
    }
}

/// How often in a while an upstream has said of lists that were as before that they have changed.
#[derive(Default)]
pub(super) struct Claims(Mutex<Option<(Instant, u32)>>);

impl Claims {
    /// Whether its clients are told so, too: not without end.
    pub(super) fn may_pass(&self) -> bool {
        let mut own = lock(&self.0);
        let (since, times) = own.filter(|(since, _)| since.elapsed() < WHILE).unwrap_or((Instant::now(), 0));
        *own = Some((since, times.saturating_add(1)));
        times < CLAIMS
    }
}

/// An upstream has turned a request away as one of its revision does not.
pub(super) struct Doubt {
    since: Instant,
    /// It has answered since when it was asked what it offers, in the words of its revision: it means what it turns away.
    told: bool,
}

/// How an upstream has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::upstream) enum Fault {
    /// It has said nothing within its time.
    Late,
    /// Nobody was there, or the answer broke off.
    Broken,
}

/// How often in a row an upstream has failed, and what has come of that.
#[derive(Default)]
pub(super) struct Breaker {
    failures: AtomicU32,
    /// It was late in one of these.
    late: AtomicBool,
    /// It was taken back because it has said what it offers, and has answered nothing else since.
    forgiven: AtomicBool,
    rest: Mutex<Rest>,
}

/// Whether it is left alone.
#[derive(Default)]
struct Rest {
    until: Option<Instant>,
    /// Or until it says what it offers, where that is sooner.
    hopeful: bool,
    /// When it was taken back for that.
    forgiven: Option<Instant>,
}

impl Breaker {
    fn answered(&self) {
        self.failures.store(0, Ordering::Relaxed);
        self.late.store(false, Ordering::Relaxed);
        self.forgiven.store(false, Ordering::Relaxed);
    }

    /// It is there again, and nothing is held against it.
    fn trust(&self) {
        self.answered();
        *lock(&self.rest) = Rest::default();
    }

    /// It has said what it offers. Who was cut off is there; who was late may be so again, however quickly it says that.
    fn told_all(&self) {
        let mut rest = lock(&self.rest);
        if rest.hopeful && rest.until.take().is_some() && !self.forgiven.swap(true, Ordering::Relaxed) {
            rest.forgiven = Some(Instant::now());
        }
    }

    /// Whether that is once too often, so that it is left alone. Who goes on to answer no call is not taken back again for saying what it
    /// offers.
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

    /// For how long it is left alone, at most, and whether it may be for less.
    fn rests(&self) -> Option<(Duration, bool)> {
        let rest = lock(&self.rest);
        let left = rest.until?.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
        Some((left, rest.hopeful))
    }
}

impl Link {
    /// It has said something, whatever it was.
    pub(crate) fn heard(&self) {
        self.silence.end();
    }

    /// Whether it is at calls.
    pub(super) fn is_busy(&self) -> bool {
        self.seats.available_permits() < self.upstream.concurrency
    }

    /// Waits until no call is under way, and ends it.
    pub(crate) async fn end_when_idle(&self, patience: Duration) {
        let all = u32::try_from(self.upstream.concurrency).unwrap_or(u32::MAX);
        let idle = async {
            // Looked for, and not queued for: whose client answers goes on, and needs a seat for that while others are still at it.
            loop {
                if let Ok(seats) = self.seats.try_acquire_many(all)
                    && self.parked.is_empty()
                {
                    return seats;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        // Held until it has ended: nothing is begun there any more.
        let _all = tokio::time::timeout(patience, idle).await;
        self.end().await;
    }

    /// It is asked something that may take so long.
    pub(in crate::upstream) fn may_take(&self, time: Duration) {
        self.silence.may_last(time);
    }

    /// Whether it is to be left alone for now; since when, for how long at most, and whether it may be for less. Where nobody is there,
    /// that is what there is to say.
    pub(in crate::upstream) fn rests(&self) -> Option<(Timestamp, Duration, bool)> {
        let (left, hopeful) = self.breaker.rests()?;
        self.standing()?;
        let now = Timestamp::now();
        Some((now.checked_sub(REST.saturating_sub(left)).unwrap_or(now), left, hopeful))
    }

    /// It has answered, whatever it said.
    pub(in crate::upstream) fn answered(&self) {
        self.heard();
        self.answers.fetch_add(1, Ordering::Relaxed);
        self.breaker.answered();
        self.doubted.store(false, Ordering::Relaxed);
    }

    /// It has done what it was asked.
    pub(in crate::upstream) fn served(&self) {
        self.refusals.store(0, Ordering::Relaxed);
        self.answered();
    }

    /// It has said what it offers.
    pub(super) fn told_all(&self) {
        self.refusals.store(0, Ordering::Relaxed);
        self.doubted.store(false, Ordering::Relaxed);
        self.breaker.told_all();
        self.believe();
    }

    /// It does not know what every one of its revision knows. Whether it is connected to anew: what is under way is not cut off because
    /// something between here and there knows nobody for a moment.
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

    /// It has answered with an error when it was asked what it offers. Whether it is started again: behind some that answer everything so
    /// there is nobody any more.
    pub(super) fn refused(&self) -> bool {
        self.believe();
        let refusals = self.refusals.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        is_lost(refusals, self.is_busy(), self.doubted.swap(false, Ordering::Relaxed))
    }

    /// It is there again, and nothing is held against it.
    pub(super) fn trust(&self) {
        self.told_all();
        self.breaker.trust();
        *lock(&self.doubt) = None;
        self.silence.begin(self.upstream.timeout);
    }

    /// Whether all that it says comes over one stream: that this is over is seen by whoever watches it, once for all calls.
    pub(in crate::upstream) fn has_one_stream(&self) -> bool {
        match &self.upstream.reach {
            Reach::Command { .. } => true,
            // Where that was found out only, the others do: they are forgiven when it is back.
            Reach::Url { sse, .. } => *sse == Some(true),
        }
    }

    /// Whether one that has turned a request away, and not with an answer to it, may be of an earlier revision by now, as after it was
    /// started anew. It is asked what it offers: that tells.
    pub(in crate::upstream) fn may_be_another(&self, generation: u64) -> bool {
        // It is connected to anew already.
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

    /// It has not answered over this connection. After some of these it is left alone for a while, and asked whether it is there at all.
    pub(in crate::upstream) fn failed(&self, generation: u64, fault: Fault) {
        // Who is there by now has not failed; and where nobody is, it is connected to anew without that.
        if self.standing().is_none_or(|standing| standing.generation != generation) {
            return;
        }
        if self.breaker.failed(fault) {
            self.doubted.store(true, Ordering::Relaxed);
            tracing::warn!(upstream = self.upstream.name, "an upstream is left alone for a while");
            // Whether it is there at all, its list tells.
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
        // A word is enough.
        silence.end();
        assert!(!silence.is_too_long());
        // What may take longer is waited for, and nothing less for it.
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
        // More of what was cut off with these.
        fail(Fault::Broken);
        breaker.told_all();
        assert_eq!(breaker.rests(), None);
        // It says so again, and answers nothing.
        tokio::time::advance(AT_ONCE).await;
        fail(Fault::Broken);
        breaker.told_all();
        assert_eq!(breaker.rests(), Some((REST, false)));
        tokio::time::advance(REST).await;
        assert_eq!(breaker.rests(), None);
        // One answer is enough to be believed.
        breaker.answered();
        fail(Fault::Broken);
        breaker.told_all();
        assert_eq!(breaker.rests(), None);
        // One that was late among those that broke off.
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
