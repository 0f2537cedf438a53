//! Runs the operator's own code before and after a tool.
//!
//! Hooks may have effects and have a timeout. If a hook fails, the call is denied.

mod command_hook;
mod hook_answer;

use async_trait::async_trait;
use serde_json::Value;

pub use crate::hook::command_hook::CommandHook;

use crate::call::error::ErrorCategory;
use crate::call::{CallId, SessionKey};

/// A call as a hook sees it.
#[derive(Debug, Clone, Copy)]
pub struct HookCall<'a> {
    /// The identifier of the call.
    pub call: CallId,
    /// The session.
    pub key: &'a SessionKey,
    /// The tool.
    pub tool: &'a str,
    /// The arguments, including changes of earlier hooks.
    pub input: &'a Value,
}

/// The result of a hook before a tool.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct BeforeHookResult {
    /// The decision.
    pub decision: HookDecision,
    /// Changed arguments. They are validated and checked again.
    pub input: Option<Value>,
}

/// The decision of a hook.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum HookDecision {
    /// Continue with the call.
    #[default]
    Allow,
    /// Deny the call.
    Deny(HookDenial),
    /// Ask a person, for this reason.
    Ask(String),
}

/// A denial by a hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookDenial {
    /// Reason for the model.
    pub reason: String,
    /// PERMISSION or BUSINESS. The default is PERMISSION.
    pub category: Option<ErrorCategory>,
    /// The code. The default is `hook_denied`.
    pub code: Option<String>,
    /// The tool that handles such requests instead.
    pub redirect: Option<String>,
}

impl HookDenial {
    /// Creates a denial with a reason and defaults.
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), category: None, code: None, redirect: None }
    }
}

/// A failure of a hook.
///
/// Before a tool, the call is denied. After a tool, the result is withheld.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HookError(pub String);

/// Code that runs before and after tools.
#[async_trait]
pub trait Hook: Send + Sync {
    /// Returns the name.
    fn name(&self) -> &str;

    /// Checks whether the hook applies to a tool. This is called once, when the agent is built.
    fn matches(&self, tool: &str) -> bool {
        let _ = tool;
        true
    }

    /// Returns the timeout of each run. The default is 5 s.
    fn timeout(&self) -> std::time::Duration {
        std::time::Duration::from_secs(5)
    }

    /// Runs before the tool.
    ///
    /// # Errors
    /// The hook failed. The call is denied.
    async fn before(&self, call: HookCall<'_>) -> Result<BeforeHookResult, HookError> {
        let _ = call;
        Ok(BeforeHookResult::default())
    }

    /// Runs after the tool succeeded. Returns a changed result, or `None` to keep it. It cannot
    /// deny.
    ///
    /// # Errors
    /// The hook failed. The result is withheld.
    async fn after(
        &self,
        call: HookCall<'_>,
        result: &Value,
        latency_ms: u64,
    ) -> Result<Option<Value>, HookError> {
        let _ = (call, result, latency_ms);
        Ok(None)
    }
}
