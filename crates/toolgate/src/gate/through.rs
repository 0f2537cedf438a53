//! Work that is seen through: it runs where somebody waits for it, and by itself once nobody does.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;

/// Runs a future in the task that waits for it, which saves that task a hop. Where it is dropped before its end, it goes on in a task
/// of its own.
pub(super) struct Through<F: Future<Output: Send> + Send + 'static> {
    work: Option<Pin<Box<F>>>,
    /// Where it goes on: whoever drops it may be elsewhere.
    runtime: Option<Handle>,
}

impl<F: Future<Output: Send> + Send + 'static> Through<F> {
    pub(super) fn new(work: F) -> Self {
        Self { work: Some(Box::pin(work)), runtime: Handle::try_current().ok() }
    }
}

/// Runs a future in a task of its own from where it first has to wait: it goes on whether or not anybody polls whoever waits for it.
/// Until then it runs here, which saves it a hop. `None` where it panicked.
pub(super) async fn apart<F: Future<Output: Send> + Send + 'static>(work: F) -> Option<F::Output> {
    let mut work = Box::pin(work);
    let begun = poll_fn(|context| Poll::Ready(catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))))).await;
    match begun {
        Ok(Poll::Ready(done)) => Some(done),
        Ok(Poll::Pending) => tokio::spawn(work).await.ok(),
        Err(_) => None,
    }
}

impl<F: Future<Output: Send> + Send + 'static> Future for Through<F> {
    /// `None` where it panicked.
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // Taken out meanwhile: what has panicked is not run again.
        let Some(mut work) = self.work.take() else { return Poll::Ready(None) };
        match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))) {
            Ok(Poll::Ready(done)) => Poll::Ready(Some(done)),
            Ok(Poll::Pending) => {
                self.work = Some(work);
                Poll::Pending
            }
            Err(_) => Poll::Ready(None),
        }
    }
}

impl<F: Future<Output: Send> + Send + 'static> Drop for Through<F> {
    fn drop(&mut self) {
        if let (Some(work), Some(runtime)) = (self.work.take(), &self.runtime) {
            runtime.spawn(work);
        }
    }
}
