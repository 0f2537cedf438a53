//! Defines how a gate ends a call early, and the rejections that several gates share.

use crate::call::SessionKey;
use crate::call::error::ToolError;
use crate::call::error_code;
use crate::ledger::row::Gate;
use crate::store::{PauseTarget, StoreError};
use toolgate_text::escape_for_display;

/// Explains why a gate ended a call early.
#[derive(Debug)]
pub(crate) struct Rejection {
    pub(crate) error: Box<ToolError>,
    /// The rejecting gate, if it differs from the gate that the call is at.
    pub(crate) gate: Option<Gate>,
}

impl Rejection {
    pub(crate) fn new(error: ToolError) -> Self {
        Self { error: Box::new(error), gate: None }
    }

    pub(crate) fn at_gate(gate: Gate, error: ToolError) -> Self {
        Self { error: Box::new(error), gate: Some(gate) }
    }
}

impl From<ToolError> for Rejection {
    fn from(error: ToolError) -> Self {
        Self::new(error)
    }
}

/// Maps a store failure before the tool ran to a retryable error.
impl From<StoreError> for Rejection {
    fn from(error: StoreError) -> Self {
        // The caller does not see the store's message, because it may name hosts and users.
        tracing::error!(%error, "store unavailable");
        Self::new(
            ToolError::from_code(
                error_code::STORE_UNAVAILABLE,
                "the store is unavailable; nothing was done",
            )
            .retry_after_ms(1_000),
        )
    }
}

/// Rejects a call because the principal may not act as the agent.
pub(crate) fn forbidden_rejection(key: &SessionKey) -> Rejection {
    Rejection::new(ToolError::from_code(
        error_code::FORBIDDEN,
        format!(
            "`{}` may not act as the agent `{}`",
            escape_for_display(&key.principal),
            escape_for_display(&key.agent)
        ),
    ))
}

/// Rejects a call because another call holds the session lock.
pub(crate) fn busy_rejection() -> Rejection {
    Rejection::at_gate(
        Gate::Claim,
        ToolError::from_code(
            error_code::BUSY,
            "another call of this session is still running; wait for it",
        )
        .retry_after_ms(1_000),
    )
}

/// Returns the error for a paused target.
pub(crate) fn paused_target_error(target: &PauseTarget, why: &str) -> ToolError {
    let what = match target {
        PauseTarget::Agent(name) => format!("the agent `{name}`"),
        PauseTarget::Tool(name) => format!("the tool `{name}`"),
        PauseTarget::Principal(name) => format!("`{}`", escape_for_display(name)),
        PauseTarget::Session(_) => "this session".to_owned(),
    };
    ToolError::from_code(error_code::PAUSED, format!("{what} is paused by an operator: {why}"))
}
