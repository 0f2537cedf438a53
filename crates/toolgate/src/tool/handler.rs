//! Defines the code that runs a tool.

use std::marker::PhantomData;

use async_trait::async_trait;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Failure;
use crate::call::CheckedArguments;
use crate::call::error_code;
use crate::pipeline::Permit;
use crate::tool::context::ToolContext;

/// Runs a tool.
///
/// Running requires a [`Permit`], and only the gate creates permits.
#[async_trait]
pub trait Handler: Send + Sync {
    /// Runs the tool with exactly the arguments that were checked.
    ///
    /// # Errors
    /// The failure of the tool.
    async fn run(
        &self,
        permit: &Permit,
        ctx: ToolContext,
        arguments: &CheckedArguments,
    ) -> Result<Value, Failure>;

    /// Returns a failure if the tool would currently refuse every call.
    ///
    /// The gate checks this before it asks a person, so that an approval is never useless. The
    /// default is `None`. A panic counts as a refusal with the code `tool_panicked`.
    fn refusal(&self) -> Option<Failure> {
        None
    }
}

pub(super) struct TypedHandler<F, A, R>(pub(super) F, pub(super) PhantomData<fn(A) -> R>);

#[async_trait]
impl<A, R, F, Fut> Handler for TypedHandler<F, A, R>
where
    A: DeserializeOwned + Send + Sync + 'static,
    R: Serialize + Send + Sync + 'static,
    F: Fn(ToolContext, A) -> Fut + Send + Sync,
    Fut: Future<Output = Result<R, Failure>> + Send,
{
    async fn run(
        &self,
        permit: &Permit,
        ctx: ToolContext,
        arguments: &CheckedArguments,
    ) -> Result<Value, Failure> {
        // Messages of serde may contain the value.
        let describe = |e: serde_json::Error| {
            if permit.has_secrets() {
                "they do not match the type".to_owned()
            } else {
                e.to_string()
            }
        };
        let typed = A::deserialize(arguments.value()).map_err(|e| {
            Failure::from_code(
                error_code::INVALID_ARGUMENTS,
                format!("cannot read the arguments: {}", describe(e)),
            )
            .effects(crate::CallEffects::None)
        })?;
        let result = (self.0)(ctx, typed).await?;
        // The tool has already run, so its effects are known and need no reconciliation.
        serde_json::to_value(result).map_err(|e| {
            Failure::from_code(
                error_code::INVALID_RESULT,
                format!("the result cannot be represented as JSON: {e}"),
            )
            .effects(permit.effects_of_run())
        })
    }
}

/// Handler of a tool that is declared but cannot run.
pub(super) struct UnavailableHandler;

impl UnavailableHandler {
    fn failure() -> Failure {
        let message = "this tool cannot run: its table in `toolgate.toml` has no `kind` (mcp, http, command, builtin or client)";
        Failure::from_code(error_code::INTERNAL_FAULT, message).effects(crate::CallEffects::None)
    }
}

#[async_trait]
impl Handler for UnavailableHandler {
    async fn run(
        &self,
        _: &Permit,
        _: ToolContext,
        _: &CheckedArguments,
    ) -> Result<Value, Failure> {
        Err(Self::failure())
    }

    fn refusal(&self) -> Option<Failure> {
        Some(Self::failure())
    }
}

pub(super) struct DynamicHandler<F>(pub(super) F);

#[async_trait]
impl<F, Fut> Handler for DynamicHandler<F>
where
    F: Fn(ToolContext, Value) -> Fut + Send + Sync,
    Fut: Future<Output = Result<Value, Failure>> + Send,
{
    async fn run(
        &self,
        _: &Permit,
        ctx: ToolContext,
        arguments: &CheckedArguments,
    ) -> Result<Value, Failure> {
        (self.0)(ctx, arguments.value().clone()).await
    }
}
