//! A task that wakes itself runs on at once. Left to the scheduler it would go to the back of the
//! queue, and another thread would be woken to look for work that is done by the time it looks.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

/// How often in a row, before others have their turn.
const MAX_CONSECUTIVE_POLLS: usize = 32;

/// Nobody runs it; it runs; it is to run again, and somebody will see to that.
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
        // Whoever runs it sees the mark before it goes idle; else the scheduler is asked.
        if self.state.swap(STATE_WOKEN, Ordering::SeqCst) == STATE_IDLE {
            self.outer.wake();
        }
    }
}

impl<F: Future> SelfWakingTask<F> {
    pub(crate) fn new(inner: F) -> Self {
        let bell =
            Arc::new(SelfWaker { state: AtomicU8::new(STATE_IDLE), outer: AtomicWaker::new() });
        Self { inner: Box::pin(inner), waker: Waker::from(Arc::clone(&bell)), self_waker: bell }
    }
}

impl<F: Future> Future for SelfWakingTask<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let own = &mut *self;
        own.self_waker.outer.register(context.waker());
        for _ in 0..MAX_CONSECUTIVE_POLLS {
            own.self_waker.state.swap(STATE_RUNNING, Ordering::SeqCst);
            if let Poll::Ready(done) = own.inner.as_mut().poll(&mut Context::from_waker(&own.waker))
            {
                return Poll::Ready(done);
            }
            if own
                .self_waker
                .state
                .compare_exchange(STATE_RUNNING, STATE_IDLE, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
            {
                return Poll::Pending;
            }
        }
        // The mark stays: it is to run again.
        context.waker().wake_by_ref();
        Poll::Pending
    }
}
