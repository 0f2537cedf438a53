//! Defines a tool together with the policies and hooks that apply to it.

use std::sync::Arc;

use serde_json::Value;

use crate::call::error::CallEffects;
use crate::hook::Hook;
use crate::policy::{AttachedPolicy, Policy};
use crate::schema::CompiledSchema;
use crate::session::state::Revocation;
use crate::tool::{Effect, Handler, ToolSpec};
use toolgate_json;
use toolgate_json::{Digest, Pointer};

/// A tool of an agent, with its schemas, policies and hooks.
pub(crate) struct ToolEntry {
    pub(crate) spec: ToolSpec,
    pub(crate) handler: Option<Arc<dyn Handler>>,
    pub(crate) input: Option<Arc<CompiledSchema>>,
    pub(crate) output: Option<CompiledSchema>,
    pub(crate) secrets: Vec<Pointer>,
    /// For each entity, whether the input schema declares its argument. An undeclared argument is
    /// only a claim of the model.
    pub(crate) is_entity_declared: Vec<bool>,
    pub(crate) governed_by: Vec<AttachedPolicy>,
    pub(crate) observers: Vec<Arc<dyn Policy>>,
    pub(crate) hooks: Vec<Arc<dyn Hook>>,
    pub(crate) definition_digest: Digest,
}

impl ToolEntry {
    pub(crate) fn is_visible_to(&self, principal: &str) -> bool {
        self.spec.visible_to.as_ref().is_none_or(|allowed| allowed.contains(principal))
    }

    /// Returns the evidence that a call revokes.
    ///
    /// The entity comes from declared arguments and from the result. If neither contains it, the
    /// call revokes all evidence of the tool.
    pub(crate) fn revoked_evidence(
        &self,
        arguments: &Value,
        result: Option<&Value>,
    ) -> Vec<Revocation> {
        let about = |entity: &Arc<str>| -> Vec<(Arc<str>, Value)> {
            let declared = self
                .spec
                .entities
                .iter()
                .zip(&self.is_entity_declared)
                .find(|((name, _), _)| name == entity);
            let Some(((name, path), declared)) = declared else { return Vec::new() };
            let argument = path.get(arguments).filter(|_| *declared);
            let values = [argument, result.and_then(|result| path.get(result))]
                .into_iter()
                .flatten()
                .filter(|value| !value.is_null());
            let mut about: Vec<(Arc<str>, Value)> = values
                .map(|value| {
                    (Arc::clone(name), toolgate_json::with_canonical_numbers(value.clone()))
                })
                .collect();
            about.dedup();
            about
        };
        let mut revoked = Vec::new();
        for (tool, entity) in &self.spec.revokes {
            let about = entity.as_ref().map(about).unwrap_or_default();
            if about.is_empty() {
                revoked.push(Revocation { tool: Arc::clone(tool), about: None });
            }
            revoked.extend(
                about
                    .into_iter()
                    .map(|about| Revocation { tool: Arc::clone(tool), about: Some(about) }),
            );
        }
        revoked
    }

    /// Checks whether the schema accepts these arguments unchanged.
    pub(crate) fn accepts_arguments(&self, arguments: &Value) -> bool {
        self.input.as_ref().is_none_or(|schema| schema.is_valid(arguments))
    }

    /// Returns the effects of a failure, as far as toolgate can know them.
    pub(crate) fn effects_of_failure(&self) -> CallEffects {
        match (self.spec.effect, self.spec.local) {
            (Effect::Read, _) => CallEffects::None,
            (_, true) => CallEffects::RolledBack,
            _ => CallEffects::Unknown,
        }
    }

    /// Returns the effects of a completed run whose result is withheld.
    pub(crate) fn effects_of_run(&self) -> CallEffects {
        match self.effects_of_failure() {
            CallEffects::Unknown => CallEffects::Done,
            other => other,
        }
    }
}
