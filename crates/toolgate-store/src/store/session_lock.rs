//! Locks sessions against other calls of this process, and against other processes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use toolgate::SessionKey;

use crate::state_dir::FileLockMode;
use crate::transaction::{SharedStoreState, lock_unpoisoned};

#[expect(dead_code, reason = "dropping the value releases the lock")]
pub(crate) enum LocalSessionGuard {
    Exclusive(OwnedRwLockWriteGuard<()>),
    Shared(OwnedRwLockReadGuard<()>),
}

/// Lock of a session in this process.
#[derive(Default)]
pub(crate) struct LocalSessionLock {
    pub(crate) call_lock: Arc<RwLock<()>>,
    /// Number of calls that use the lock against other processes.
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
        local: Arc<LocalSessionLock>,
        shared: Arc<SharedStoreState>,
        key: &SessionKey,
        is_exclusive: bool,
    ) -> std::io::Result<Option<Self>> {
        let mut count = lock_unpoisoned(&local.lock_count);
        if *count == 0
            && !shared.state_dir.set_session_lock(
                key,
                if is_exclusive { FileLockMode::Exclusive } else { FileLockMode::Shared },
            )?
        {
            return Ok(None);
        }
        *count += 1;
        drop(count);
        shared.running_calls.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Self { local, shared, key: key.clone() }))
    }
}

impl Drop for ProcessSessionGuard {
    fn drop(&mut self) {
        self.shared.running_calls.fetch_sub(1, Ordering::Relaxed);
        let mut count = lock_unpoisoned(&self.local.lock_count);
        *count -= 1;
        if *count == 0
            && let Err(error) =
                self.shared.state_dir.set_session_lock(&self.key, FileLockMode::Unlocked)
        {
            tracing::error!(%error, "cannot unlock a session");
        }
    }
}
