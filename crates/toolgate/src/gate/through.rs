//! Work that is seen through: it runs where somebody waits for it, and by itself once nobody does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;

/// Runs a future in the task that waits for it, which saves that task a hop. Where it is dropped before its end, it goes on in a task
/// of its own.
pub(super) struct Through<F: Future<Output: Send> + Send + 'static>(Option<Pin<Box<F>>>);

impl<F: Future<Output: Send> + Send + 'static> Through<F> {
    pub(super) fn new(work: F) -> Self {
        Self(Some(Box::pin(work)))
    }
}

impl<F: Future<Output: Send> + Send + 'static> Future for Through<F> {
    /// `None` where it panicked.
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // Taken out meanwhile: what has panicked is not run again.
        let Some(mut work) = self.0.take() else { return Poll::Ready(None) };
        match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))) {
            Ok(Poll::Ready(done)) => Poll::Ready(Some(done)),
            Ok(Poll::Pending) => {
                self.0 = Some(work);
                Poll::Pending
            }
            Err(_) => Poll::Ready(None),
        }
    }
}

impl<F: Future<Output: Send> + Send + 'static> Drop for Through<F> {
    fn drop(&mut self) {
        if let Some(work) = self.0.take()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(work);
        }
    }
}
