//! Tools of upstreams that do not fit a file: they are not called, and the rest of it works without
//! them.

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

/// When to try again where it is awaited, in milliseconds.
const RETRY_AFTER_MS: u64 = 1_000;

/// A tool of an upstream that is not called as things are. Everything else works without it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnusableTool {
    /// The agent that would have it.
    pub agent: String,
    /// What it is called there.
    pub name: String,
    /// Where it comes from.
    pub upstream: String,
    /// What it is called there.
    pub tool: String,
    /// Why it is not called.
    pub reason: String,
    /// It is not there, and is taken as soon as it comes; else somebody has to mend something.
    pub is_awaited: bool,
}

/// What is known of what upstreams offer, once something is behind the tools.
#[derive(Clone, Default)]
pub(crate) struct UpstreamInventory {
    /// Whether tools really run.
    pub(crate) is_live: bool,
    /// The upstreams that were ever seen; of each, what is held back, by the names that models
    /// would know it by.
    pub(crate) quarantined_by_upstream: BTreeMap<String, BTreeSet<String>>,
    /// Tools that are not called.
    pub(crate) unusable_tools: Vec<UnusableTool>,
}

/// What stands behind such a tool.
pub(crate) struct UnusableToolHandler {
    name: String,
    upstream: String,
    is_awaited: bool,
}

impl UnusableToolHandler {
    pub(crate) fn new_handler(unfit: &UnusableTool) -> Arc<dyn Handler> {
        Arc::new(Self {
            name: unfit.name.clone(),
            upstream: unfit.upstream.clone(),
            is_awaited: unfit.is_awaited,
        })
    }

    /// A model is told that, and not why: the upstream may have put its words there.
    fn failure(&self) -> Failure {
        let whose = format!("`{}` of the upstream `{}`", self.name, self.upstream);
        if self.is_awaited {
            let message =
                format!("{whose} was not there when the rules for it were read, or is held back");
            return Failure::from_code(error_code::UPSTREAM_UNAVAILABLE, message)
                .effects(CallEffects::None)
                .retry_after_ms(RETRY_AFTER_MS);
        }
        let message = format!(
            "{whose} does not fit the configuration; it is held back until a person has looked at it (`toolgate upstream list` says why)"
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
