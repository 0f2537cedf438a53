//! Tools of upstreams that do not fit a file: they are not called, and the rest of it works without them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;

use toolgate::Effects;
use toolgate::call::Judged;
use toolgate::call::error_code;
use toolgate::pipeline::Permit;
use toolgate::tool::context::Ctx;
use toolgate::tool::{Failure, Handler};

/// When to try again where it is awaited, in milliseconds.
const TRYING: u64 = 1_000;

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
pub(crate) struct Offered {
    /// Whether tools really run.
    pub(crate) live: bool,
    /// The upstreams that were ever seen; of each, what is held back, by the names that models would know it by.
    pub(crate) seen: BTreeMap<String, BTreeSet<String>>,
    /// Tools that are not called.
    pub(crate) unfit: Vec<Unfit>,
}

/// What stands behind such a tool.
pub(crate) struct Refusing {
    name: String,
    upstream: String,
    awaited: bool,
}

impl Refusing {
    pub(crate) fn of(unfit: &Unfit) -> Arc<dyn Handler> {
        Arc::new(Self { name: unfit.name.clone(), upstream: unfit.upstream.clone(), awaited: unfit.awaited })
    }

    /// A model is told that, and not why: the upstream may have put its words there.
    fn why(&self) -> Failure {
        let whose = format!("`{}` of the upstream `{}`", self.name, self.upstream);
        if self.awaited {
            let message = format!("{whose} was not there when the rules for it were read, or is held back");
            return Failure::of(error_code::UPSTREAM_UNAVAILABLE, message).effects(Effects::None).retry_after_ms(TRYING);
        }
        let message = format!(
            "{whose} does not fit the configuration; it is held back until a person has looked at it (`toolgate upstream list` says why)"
        );
        Failure::of(error_code::DEFINITION_CHANGED, message).effects(Effects::None)
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
