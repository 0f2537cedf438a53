//! Represents tools of upstreams that cannot be called: missing tools, and tools that do not fit the
//! configuration.
//!
//! The rest of the configuration works without them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;

use toolgate::CallEffects;
use toolgate::call::CheckedArguments;
use toolgate::call::error_code;
use toolgate::pipeline::Permit;
use toolgate::tool::context::ToolContext;
use toolgate::tool::{Failure, Handler};

/// Delay that is suggested before a retry of an awaited tool, in milliseconds.
const RETRY_AFTER_MS: u64 = 1_000;

/// A tool of an upstream that cannot be called at present.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnusableTool {
    /// The agent that declares or offers the tool.
    pub agent: String,
    /// Name in the agent.
    pub name: String,
    /// Name of the upstream.
    pub upstream: String,
    /// Name at the upstream.
    pub tool: String,
    /// The reason why calls are refused.
    pub reason: String,
    /// Whether the tool works as soon as its upstream offers it. Otherwise a person must correct
    /// the configuration or the upstream.
    pub is_awaited: bool,
}

/// The known tools of the upstreams, once a backend is connected.
#[derive(Clone, Default)]
pub(crate) struct UpstreamInventory {
    /// Whether tools really run.
    pub(crate) is_live: bool,
    /// The upstreams that were ever connected, each with the default names of its quarantined
    /// tools.
    pub(crate) quarantined_by_upstream: BTreeMap<String, BTreeSet<String>>,
    /// Tools that cannot be called.
    pub(crate) unusable_tools: Vec<UnusableTool>,
}

/// Refuses every call of an unusable tool.
pub(crate) struct UnusableToolHandler {
    name: String,
    upstream: String,
    is_awaited: bool,
}

impl UnusableToolHandler {
    pub(crate) fn new_handler(tool: &UnusableTool) -> Arc<dyn Handler> {
        Arc::new(Self {
            name: tool.name.clone(),
            upstream: tool.upstream.clone(),
            is_awaited: tool.is_awaited,
        })
    }

    /// Returns the error for the model.
    ///
    /// The error omits the reason, because the reason may contain text from the upstream.
    fn failure(&self) -> Failure {
        let tool = format!("`{}` of the upstream `{}`", self.name, self.upstream);
        if self.is_awaited {
            let message = format!(
                "{tool} was not available when its rules were loaded, or it is quarantined"
            );
            return Failure::from_code(error_code::UPSTREAM_UNAVAILABLE, message)
                .effects(CallEffects::None)
                .retry_after_ms(RETRY_AFTER_MS);
        }
        let message = format!(
            "{tool} does not fit the configuration; it is quarantined until a person has checked it (`toolgate upstream list` shows the reason)"
        );
        Failure::from_code(error_code::DEFINITION_CHANGED, message).effects(CallEffects::None)
    }
}

#[async_trait]
impl Handler for UnusableToolHandler {
    async fn run(
        &self,
        _: &Permit,
        _: ToolContext,
        _: &CheckedArguments,
    ) -> Result<Value, Failure> {
        Err(self.failure())
    }

    fn refusal(&self) -> Option<Failure> {
        Some(self.failure())
    }
}
