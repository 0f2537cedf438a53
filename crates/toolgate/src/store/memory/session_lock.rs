//! Locks the sessions of the memory store, and turns locks into leases.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use jiff::Timestamp;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard};

use super::super::{LeaseRequest, SessionLease, Store as _};
use super::MemoryStore;
use crate::call::SessionKey;

#[expect(dead_code, reason = "dropping the value releases the lock")]
pub(super) enum SessionGuard {
    Exclusive(OwnedRwLockWriteGuard<()>),
    Shared(OwnedRwLockReadGuard<()>),
}

impl MemoryStore {
    /// Locks a session; `None` after the timeout.
    pub(super) async fn acquire_lock(
        &self,
        key: &SessionKey,
        request: LeaseRequest,
    ) -> Option<SessionGuard> {
        let lock = Arc::clone(&crate::lock(&self.inner).session_mut(key).lock);
        // The uncontended case needs no timer.
        if request.is_exclusive {
            if let Ok(guard) = Arc::clone(&lock).try_write_owned() {
                return Some(SessionGuard::Exclusive(guard));
            }
            let guard = tokio::time::timeout(request.timeout, lock.write_owned()).await;
            guard.ok().map(SessionGuard::Exclusive)
        } else {
            if let Ok(guard) = Arc::clone(&lock).try_read_owned() {
                return Some(SessionGuard::Shared(guard));
            }
            let guard = tokio::time::timeout(request.timeout, lock.read_owned()).await;
            guard.ok().map(SessionGuard::Shared)
        }
    }

    /// Turns a lock into a lease. The caller returns it without another await.
    pub(super) fn register_lease(
        &self,
        key: &SessionKey,
        request: LeaseRequest,
        guard: SessionGuard,
    ) -> SessionLease {
        let id = self.lease_count.fetch_add(1, Ordering::Relaxed);
        crate::lock(&self.lease_locks).insert(id, guard);
        SessionLease {
            id,
            key: key.clone(),
            is_exclusive: request.is_exclusive,
            expires: self.now().checked_add(request.term).unwrap_or(Timestamp::MAX),
        }
    }
}
