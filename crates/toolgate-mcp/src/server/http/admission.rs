//! Limits concurrent requests, and the bytes of requests that are arriving.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::gateway::lock;

/// Maximum bytes of requests that are still arriving, in total.
const MAX_ARRIVING_BYTES: usize = 512 << 20;

/// Counts the bytes of an arriving request. It has no permit yet, and must not exhaust memory.
pub(crate) struct ArrivingBytes<'h>(&'h AtomicUsize, usize);

impl<'h> ArrivingBytes<'h> {
    /// Starts with no bytes.
    pub(crate) fn new(all: &'h AtomicUsize) -> Self {
        Self(all, 0)
    }

    /// Adds bytes, and returns whether the total is within the limit.
    pub(crate) fn try_add(&mut self, bytes: usize) -> bool {
        self.1 += bytes;
        self.0.fetch_add(bytes, Ordering::Relaxed) + bytes <= MAX_ARRIVING_BYTES
    }
}

impl Drop for ArrivingBytes<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

/// Limits concurrent requests.
///
/// If there are several principals, each gets at most half of the permits. Slow requests of one
/// principal then do not block the others.
pub(crate) struct PrincipalLimiter {
    permits: Arc<Semaphore>,
    capacity: usize,
    /// Number of permits of each principal that has any.
    in_use: Arc<Mutex<HashMap<String, usize>>>,
}

impl PrincipalLimiter {
    pub(crate) fn new(all: usize) -> Self {
        let all = all.min(Semaphore::MAX_PERMITS);
        Self { permits: Arc::new(Semaphore::new(all)), capacity: all, in_use: Arc::default() }
    }

    /// Returns the maximum number of permits of one principal.
    pub(crate) fn max_per_principal(&self, is_shared: bool) -> usize {
        if is_shared { (self.capacity / 2).max(1) } else { self.capacity }
    }

    /// Takes permits for a principal: all of them, or none.
    pub(crate) fn try_acquire(
        &self,
        principal: &str,
        count: u32,
        is_shared: bool,
    ) -> Option<ConcurrencyPermit> {
        let mut in_use = lock(&self.in_use);
        let taken = in_use.get(principal).copied().unwrap_or_default() + count as usize;
        if taken > self.max_per_principal(is_shared) {
            return None;
        }
        let permits = Arc::clone(&self.permits).try_acquire_many_owned(count).ok()?;
        in_use.insert(principal.to_owned(), taken);
        Some(ConcurrencyPermit {
            _permits: permits,
            in_use: Arc::clone(&self.in_use),
            principal: principal.to_owned(),
            count: count as usize,
        })
    }
}

/// Permits of one request, until this is dropped.
pub(crate) struct ConcurrencyPermit {
    _permits: OwnedSemaphorePermit,
    in_use: Arc<Mutex<HashMap<String, usize>>>,
    principal: String,
    count: usize,
}

impl Drop for ConcurrencyPermit {
    fn drop(&mut self) {
        let mut in_use = lock(&self.in_use);
        if let Some(taken) = in_use.get_mut(&self.principal) {
            *taken = taken.saturating_sub(self.count);
            if *taken == 0 {
                in_use.remove(&self.principal);
            }
        }
    }
}

/// Keeps a session alive: each running request and each listener has a copy.
#[derive(Clone, Default)]
pub(crate) struct SessionKeepAlive(Arc<()>);

impl SessionKeepAlive {
    /// Returns whether there is another copy.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// A response body that holds the permit and the session of its request until it ends.
pub(crate) struct GuardedBody {
    pub(crate) body: BoxBody<Bytes, Infallible>,
    pub(crate) _permit: Arc<ConcurrencyPermit>,
    pub(crate) _keep_alive: Option<SessionKeepAlive>,
}

impl Body for GuardedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_principal_gets_at_most_half_of_the_permits() {
        let limiter = PrincipalLimiter::new(5);
        let permits_of = |principal: &str| lock(&limiter.in_use).get(principal).copied();
        assert_eq!(
            (
                limiter.max_per_principal(true),
                limiter.max_per_principal(false),
                PrincipalLimiter::new(1).max_per_principal(true)
            ),
            (2, 5, 1)
        );
        let (first, second) = (
            limiter.try_acquire("ann", 1, true).unwrap(),
            limiter.try_acquire("ann", 1, true).unwrap(),
        );
        assert!(
            limiter.try_acquire("ann", 1, true).is_none()
                && limiter.try_acquire("bob", 3, true).is_none()
        );
        let both = limiter.try_acquire("bob", 2, true).unwrap();
        assert_eq!((permits_of("ann"), permits_of("bob")), (Some(2), Some(2)));
        // Only one permit is left.
        assert!(limiter.try_acquire("cat", 2, true).is_none() && permits_of("cat").is_none());
        let last = limiter.try_acquire("cat", 1, true).unwrap();
        drop((first, both));
        assert_eq!(
            (permits_of("ann"), permits_of("bob"), limiter.permits.available_permits()),
            (Some(1), None, 3)
        );
        drop((second, last));
        assert!(lock(&limiter.in_use).is_empty());
        // Without tokens there is one principal, which may have all permits.
        assert!(limiter.try_acquire("local", 5, false).is_some());
    }
}
