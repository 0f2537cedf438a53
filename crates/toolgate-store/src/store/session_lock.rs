//! Locks sessions against other calls of this process, and against other processes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use toolgate::SessionKey;

use crate::state_dir::FileLockMode;
use crate::transaction::{SharedStoreState, lock_unpoisoned};

#[expect(dead_code, reason = "held for its drop")]
pub(crate) enum LocalSessionGuard {
    Exclusive(OwnedRwLockWriteGuard<()>),
    Shared(OwnedRwLockReadGuard<()>),
}

/// Lock of a session in this process.
#[derive(Default)]
pub(crate) struct LocalSessionLock {
    pub(crate) call_lock: Arc<RwLock<()>>,
    /// Number of calls that hold the lock against other processes.
    lock_count: Mutex<usize>,
}

/// Guard of the lock against other processes.
///
/// The first call of a session takes the lock, and the last one releases it.
pub(crate) struct ProcessSessionGuard {
    local: Arc<LocalSessionLock>,
    shared: Arc<SharedStoreState>,
    key: SessionKey,
}

impl ProcessSessionGuard {
    pub(crate) fn acquire(
        own: Arc<LocalSessionLock>,
        shared: Arc<SharedStoreState>,
        key: &SessionKey,
        alone: bool,
    ) -> std::io::Result<Option<Self>> {
        let mut held = lock_unpoisoned(&own.lock_count);
        if *held == 0
            && !shared.state_dir.set_session_lock(
                key,
                if alone { FileLockMode::Exclusive } else { FileLockMode::Shared },
            )?
        {
            return Ok(None);
        }
        *held += 1;
        drop(held);
        shared.running_calls.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Self { local: own, shared, key: key.clone() }))
    }
}

impl Drop for ProcessSessionGuard {
    fn drop(&mut self) {
        self.shared.running_calls.fetch_sub(1, Ordering::Relaxed);
        let mut held = lock_unpoisoned(&self.local.lock_count);
        *held -= 1;
        if *held == 0
            && let Err(error) =
                self.shared.state_dir.set_session_lock(&self.key, FileLockMode::Unlocked)
        {
            tracing::error!(%error, "cannot unlock a session");
        }
    }
}
