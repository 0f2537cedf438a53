//! Code of the operator's own, before and after a tool. Effectful and time-boxed; what fails, denies.

mod command;

use async_trait::async_trait;
use serde_json::Value;

pub use command::CommandHook;

use crate::call::{CallId, SessionKey};
use crate::error::Category;

/// A call as a hook sees it.
#[derive(Debug, Clone, Copy)]
pub struct HookCall<'a> {
    /// The call.
    pub call: CallId,
    /// Whose conversation.
    pub key: &'a SessionKey,
    /// The tool.
    pub tool: &'a str,
    /// The arguments, with the rewrites of the hooks before.
    pub input: &'a Value,
}

/// What a hook says before a tool.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Before {
    /// Whether the call may go on.
    pub decision: HookDecision,
    /// The arguments to go on with; they are validated and judged again.
    pub input: Option<Value>,
}

/// A hook's word.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum HookDecision {
    /// It may go on.
    #[default]
    Allow,
    /// It may not.
    Deny(Denial),
    /// A person must say; why.
    Ask(String),
}

/// A hook's refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denial {
    /// For the model to read.
    pub reason: String,
    /// PERMISSION or BUSINESS; PERMISSION unless said.
    pub category: Option<Category>,
    /// `hook_denied` unless said.
    pub code: Option<String>,
    /// The tool that handles such requests instead.
    pub redirect: Option<String>,
}

impl Denial {
    /// A refusal with nothing but a reason.
    pub fn because(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), category: None, code: None, redirect: None }
    }
}

/// A hook did not do its work. Before a tool the call is refused; after it the result is withheld.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HookFault(pub String);

/// A hook.
#[async_trait]
pub trait Hook: Send + Sync {
    /// Its name.
    fn name(&self) -> &str;

    /// Whether it is called for this tool. Asked once, when the agent is built.
    fn matches(&self, tool: &str) -> bool {
        let _ = tool;
        true
    }

    /// How long it may take, each time: 5 s unless said.
    fn timeout(&self) -> std::time::Duration {
        std::time::Duration::from_secs(5)
    }

    /// Before the tool.
    ///
    /// # Errors
    /// It did not do its work; the call is refused.
    async fn before(&self, call: HookCall<'_>) -> Result<Before, HookFault> {
        let _ = call;
        Ok(Before::default())
    }

    /// After the tool succeeded: a rewritten result, or `None` to leave it. It cannot deny.
    ///
    /// # Errors
    /// It did not do its work; the result is withheld.
    async fn after(&self, call: HookCall<'_>, result: &Value, latency_ms: u64) -> Result<Option<Value>, HookFault> {
        let _ = (call, result, latency_ms);
        Ok(None)
    }
}
