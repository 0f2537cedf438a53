//! Defines the events that listeners receive.

use std::sync::Arc;

use serde_json::Value;

use crate::call::{CallId, SessionKey};
use crate::ledger::row::Row;

/// An event. Listeners run on the call's own task, after the call is recorded.
#[derive(Debug, Clone)]
pub enum Event {
    /// A call ended, with any outcome. Each call has exactly one such event.
    CallEnded(Arc<Row>),
    /// A handler published an event, and its call succeeded.
    Published {
        /// The call.
        call: CallId,
        /// The session of the call.
        key: SessionKey,
        /// The event name that the handler chose.
        name: Arc<str>,
        /// The payload.
        payload: Value,
    },
}

/// Callback for events.
pub type EventListener = Arc<dyn Fn(&Event) + Send + Sync>;
