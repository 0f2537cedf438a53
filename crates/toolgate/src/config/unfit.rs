//! Tools of upstreams that do not fit a file: they are not called, and the rest of it works without them.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;

use crate::Effects;
use crate::call::Judged;
use crate::code;
use crate::context::Ctx;
use crate::gate::Permit;
use crate::tool::{Failure, Handler};

/// A tool of an upstream that is not called as things are. Everything else works without it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unfit {
    /// The agent that would have it.
    pub agent: String,
    /// What it is called there.
    pub name: String,
    /// Where it comes from.
    pub upstream: String,
    /// What it is called there.
    pub tool: String,
    /// Why it is not called.
    pub why: String,
    /// It is not there, and is taken as soon as it comes; else somebody has to mend something.
    pub awaited: bool,
}

/// What is known of what upstreams offer, once something is behind the tools.
#[derive(Clone, Default)]
pub(super) struct Offered {
    /// Whether tools really run.
    pub(super) live: bool,
    /// Tools that are not called.
    pub(super) unfit: Vec<Unfit>,
}

/// What stands behind such a tool.
pub(super) struct Refusing {
    name: String,
    upstream: String,
}

impl Refusing {
    pub(super) fn of(unfit: &Unfit) -> Arc<dyn Handler> {
        Arc::new(Self { name: unfit.name.clone(), upstream: unfit.upstream.clone() })
    }

    /// A model is told that, and not why: the upstream may have put its words there.
    fn why(&self) -> Failure {
        let message = format!(
            "`{}` of the upstream `{}` does not fit the configuration; it is held back until a person has looked at it (`toolgate upstream list` says why)",
            self.name, self.upstream
        );
        Failure::of(code::DEFINITION_CHANGED, message).effects(Effects::None)
    }
}

#[async_trait]
impl Handler for Refusing {
    async fn run(&self, _: &Permit, _: Ctx, _: &Judged) -> Result<Value, Failure> {
        Err(self.why())
    }

    fn refuses(&self) -> Option<Failure> {
        Some(self.why())
    }
}
