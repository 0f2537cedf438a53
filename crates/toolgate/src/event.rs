//! What listeners hear.

use std::sync::Arc;

use serde_json::Value;

use crate::call::{CallId, SessionKey};
use crate::ledger::Row;

/// Something that happened. Listeners are called in the call's own task, after it is recorded.
#[derive(Debug, Clone)]
pub enum Event {
    /// A call ended, in whatever way. There is exactly one for each call.
    ToolInvoked(Arc<Row>),
    /// A handler published something, and its call succeeded.
    Published {
        /// The call.
        call: CallId,
        /// Whose conversation.
        key: SessionKey,
        /// The handler's name for it.
        name: Arc<str>,
        /// What it is about.
        payload: Value,
    },
}

/// Hears events.
pub type Listener = Arc<dyn Fn(&Event) + Send + Sync>;
