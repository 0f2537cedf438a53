//! Locks sessions against other calls of this process, and against other processes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use toolgate::SessionKey;

use crate::home::Holding;
use crate::tx::{Shared, lock};

#[expect(dead_code, reason = "held for its drop")]
pub(super) enum Guard {
    Alone(OwnedRwLockWriteGuard<()>),
    Together(OwnedRwLockReadGuard<()>),
}

/// Lock of a session in this process.
#[derive(Default)]
pub(super) struct Own {
    pub(super) calls: Arc<RwLock<()>>,
    /// Number of calls that hold the lock against other processes.
    held: Mutex<usize>,
}

/// Guard of the lock against other processes.
///
/// The first call of a session takes the lock, and the last one releases it.
pub(super) struct Held {
    own: Arc<Own>,
    shared: Arc<Shared>,
    key: SessionKey,
}

impl Held {
    pub(super) fn take(own: Arc<Own>, shared: Arc<Shared>, key: &SessionKey, alone: bool) -> std::io::Result<Option<Self>> {
        let mut held = lock(&own.held);
        if *held == 0 && !shared.home.hold(key, if alone { Holding::Alone } else { Holding::Together })? {
            return Ok(None);
        }
        *held += 1;
        drop(held);
        shared.calls.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Self { own, shared, key: key.clone() }))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shared.calls.fetch_sub(1, Ordering::Relaxed);
        let mut held = lock(&self.own.held);
        *held -= 1;
        if *held == 0
            && let Err(error) = self.shared.home.hold(&self.key, Holding::Not)
        {
            tracing::error!(%error, "cannot unlock a session");
        }
    }
}
