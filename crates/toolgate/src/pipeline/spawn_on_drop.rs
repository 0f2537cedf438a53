//! Provides futures that run to completion even if their caller drops them.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;

/// Runs a future in the caller's task, which avoids a task switch.
///
/// If the future is dropped before its end, it continues on a separate task.
pub(crate) struct SpawnOnDrop<F: Future<Output: Send> + Send + 'static> {
    work: Option<Pin<Box<F>>>,
    /// The runtime to continue on. The value may be dropped outside of any runtime.
    runtime: Option<Handle>,
}

impl<F: Future<Output: Send> + Send + 'static> SpawnOnDrop<F> {
    pub(crate) fn new(work: F) -> Self {
        Self { work: Some(Box::pin(work)), runtime: Handle::try_current().ok() }
    }
}

/// Polls a future once here and moves it to a separate task if it has to wait.
///
/// The future continues even if the caller is never polled again. The first poll here avoids a task
/// switch. Returns `None` if the future panicked.
pub(crate) async fn poll_then_spawn<F: Future<Output: Send> + Send + 'static>(
    work: F,
) -> Option<F::Output> {
    let mut work = Box::pin(work);
    let begun = poll_fn(|context| {
        Poll::Ready(catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))))
    })
    .await;
    match begun {
        Ok(Poll::Ready(done)) => Some(done),
        Ok(Poll::Pending) => tokio::spawn(work).await.ok(),
        Err(_) => None,
    }
}

impl<F: Future<Output: Send> + Send + 'static> Future for SpawnOnDrop<F> {
    /// `None` if the future panicked.
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // The future is taken out during the poll, so a panicked future is never polled again.
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

impl<F: Future<Output: Send> + Send + 'static> Drop for SpawnOnDrop<F> {
    fn drop(&mut self) {
        if let (Some(work), Some(runtime)) = (self.work.take(), &self.runtime) {
            runtime.spawn(work);
        }
    }
}
