//! The code behind a tool.

use std::marker::PhantomData;

use async_trait::async_trait;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Failure;
use crate::call::Judged;
use crate::code;
use crate::context::Ctx;
use crate::gate::Permit;

/// The code behind a tool. It can only be run with a [`Permit`], and only the gate makes those.
#[async_trait]
pub trait Handler: Send + Sync {
    /// Runs. The arguments are exactly those that were judged.
    ///
    /// # Errors
    /// What went wrong, in the tool's own words.
    async fn run(&self, permit: &Permit, ctx: Ctx, arguments: &Judged) -> Result<Value, Failure>;

    /// Why it would refuse every call now, whatever the arguments: looked at before a person is asked, lest somebody approves what
    /// cannot run. Nothing, unless said. A panic in here is a refusal, too: `tool_panicked`.
    fn refuses(&self) -> Option<Failure> {
        None
    }
}

pub(super) struct Typed<F, A, R>(pub(super) F, pub(super) PhantomData<fn(A) -> R>);

#[async_trait]
impl<A, R, F, Fut> Handler for Typed<F, A, R>
where
    A: DeserializeOwned + Send + Sync + 'static,
    R: Serialize + Send + Sync + 'static,
    F: Fn(Ctx, A) -> Fut + Send + Sync,
    Fut: Future<Output = Result<R, Failure>> + Send,
{
    async fn run(&self, permit: &Permit, ctx: Ctx, arguments: &Judged) -> Result<Value, Failure> {
        // What serde says of a value may hold the value.
        let said = |e: serde_json::Error| if permit.has_secrets() { "they do not fit the type".to_owned() } else { e.to_string() };
        let typed = A::deserialize(arguments.value()).map_err(|e| {
            Failure::of(code::INVALID_ARGUMENTS, format!("the arguments cannot be read: {}", said(e))).effects(crate::Effects::None)
        })?;
        let result = (self.0)(ctx, typed).await?;
        // By then it has done its work: nobody need find out whether it did.
        serde_json::to_value(result)
            .map_err(|e| Failure::of(code::INVALID_RESULT, format!("the result is no JSON: {e}")).effects(permit.effects_of_run()))
    }
}

/// What stands behind a tool that is only looked at.
pub(super) struct Nothing;

impl Nothing {
    fn why() -> Failure {
        let message = "nothing here runs this tool: its table in `toolgate.toml` has no `kind` (mcp, http, command, builtin or client)";
        Failure::of(code::INTERNAL_FAULT, message).effects(crate::Effects::None)
    }
}

#[async_trait]
impl Handler for Nothing {
    async fn run(&self, _: &Permit, _: Ctx, _: &Judged) -> Result<Value, Failure> {
        Err(Self::why())
    }

    fn refuses(&self) -> Option<Failure> {
        Some(Self::why())
    }
}

pub(super) struct Dynamic<F>(pub(super) F);

#[async_trait]
impl<F, Fut> Handler for Dynamic<F>
where
    F: Fn(Ctx, Value) -> Fut + Send + Sync,
    Fut: Future<Output = Result<Value, Failure>> + Send,
{
    async fn run(&self, _: &Permit, ctx: Ctx, arguments: &Judged) -> Result<Value, Failure> {
        (self.0)(ctx, arguments.value().clone()).await
    }
}
