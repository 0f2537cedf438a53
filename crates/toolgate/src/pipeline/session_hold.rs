//! Releases the lease of a session when the call that holds it ends, in whatever way.

use std::sync::Arc;

use crate::store::{SessionLease, Store};

/// A lease that is released when the value is dropped.
pub(crate) struct SessionHold {
    store: Arc<dyn Store>,
    lease: Option<SessionLease>,
}

impl SessionHold {
    pub(crate) fn new(store: &Arc<dyn Store>, lease: SessionLease) -> Self {
        Self { store: Arc::clone(store), lease: Some(lease) }
    }
}

impl Drop for SessionHold {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.store.release_session(lease);
        }
    }
}
