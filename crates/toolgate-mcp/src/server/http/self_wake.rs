//! Polls a task that wakes itself again at once, without the scheduler.
//!
//! The scheduler would move the task to the end of its queue and wake another thread. That thread
//! would find no work, because the task has usually finished by then.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

/// Maximum number of polls in a row, so that other tasks also run.
const MAX_CONSECUTIVE_POLLS: usize = 32;

/// States of the task: not polled now, polled now, and woken during a poll.
const STATE_IDLE: u8 = 0;
const STATE_RUNNING: u8 = 1;
const STATE_WOKEN: u8 = 2;

/// Runs a future in place.
pub(crate) struct SelfWakingTask<F> {
    inner: Pin<Box<F>>,
    self_waker: Arc<SelfWaker>,
    waker: Waker,
}

struct SelfWaker {
    state: AtomicU8,
    outer: AtomicWaker,
}

impl Wake for SelfWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A running poll sees the state before it returns. If no poll is running, the scheduler
        // must wake the task.
        if self.state.swap(STATE_WOKEN, Ordering::SeqCst) == STATE_IDLE {
            self.outer.wake();
        }
    }
}

impl<F: Future> SelfWakingTask<F> {
    pub(crate) fn new(inner: F) -> Self {
        let self_waker =
            Arc::new(SelfWaker { state: AtomicU8::new(STATE_IDLE), outer: AtomicWaker::new() });
        Self { inner: Box::pin(inner), waker: Waker::from(Arc::clone(&self_waker)), self_waker }
    }
}

impl<F: Future> Future for SelfWakingTask<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        this.self_waker.outer.register(context.waker());
        for _ in 0..MAX_CONSECUTIVE_POLLS {
            this.self_waker.state.swap(STATE_RUNNING, Ordering::SeqCst);
            if let Poll::Ready(done) =
                this.inner.as_mut().poll(&mut Context::from_waker(&this.waker))
            {
                return Poll::Ready(done);
            }
            if this
                .self_waker
                .state
                .compare_exchange(STATE_RUNNING, STATE_IDLE, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
            {
                return Poll::Pending;
            }
        }
        // The state stays `STATE_WOKEN`, because the scheduler polls the task again.
        context.waker().wake_by_ref();
        Poll::Pending
    }
}
