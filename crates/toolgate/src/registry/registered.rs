//! A tool at its place in an agent.

use std::sync::Arc;

use serde_json::Value;

use crate::error::Effects;
use crate::hook::Hook;
use crate::json::{self, Digest, Pointer};
use crate::policy::{Attached, Policy};
use crate::schema::Schema;
use crate::session::Revoked;
use crate::tool::{Effect, Handler, Spec};

/// A tool at its place in an agent, with everything that has a say about it.
pub(crate) struct Registered {
    pub(crate) spec: Spec,
    pub(crate) handler: Option<Arc<dyn Handler>>,
    pub(crate) input: Option<Arc<Schema>>,
    pub(crate) output: Option<Schema>,
    pub(crate) secrets: Vec<Pointer>,
    /// Of each entity, whether an argument that the schema declares names it: any other is only the model's word.
    pub(crate) declares_entity: Vec<bool>,
    pub(crate) governed_by: Vec<Attached>,
    pub(crate) heard_by: Vec<Arc<dyn Policy>>,
    pub(crate) hooks: Vec<Arc<dyn Hook>>,
    pub(crate) definition: Digest,
}

impl Registered {
    pub(crate) fn is_visible_to(&self, principal: &str) -> bool {
        self.spec.visible_to.as_ref().is_none_or(|who| who.contains(principal))
    }

    /// The evidence that a call takes away: about what its arguments say, as far as they are declared, and about what its result says.
    /// Where neither says about what, all of it goes.
    pub(crate) fn takes_away(&self, arguments: &Value, result: Option<&Value>) -> Vec<Revoked> {
        let about = |entity: &Arc<str>| -> Vec<(Arc<str>, Value)> {
            let declared = self.spec.entities.iter().zip(&self.declares_entity).find(|((name, _), _)| name == entity);
            let Some(((name, path), declared)) = declared else { return Vec::new() };
            let asked = path.get(arguments).filter(|_| *declared);
            let said = [asked, result.and_then(|result| path.get(result))].into_iter().flatten().filter(|value| !value.is_null());
            let mut about: Vec<(Arc<str>, Value)> = said.map(|value| (Arc::clone(name), json::plain(value.clone()))).collect();
            about.dedup();
            about
        };
        let mut revoked = Vec::new();
        for (tool, entity) in &self.spec.revokes {
            let about = entity.as_ref().map(about).unwrap_or_default();
            if about.is_empty() {
                revoked.push(Revoked { tool: Arc::clone(tool), about: None });
            }
            revoked.extend(about.into_iter().map(|about| Revoked { tool: Arc::clone(tool), about: Some(about) }));
        }
        revoked
    }

    /// Whether its schema takes these arguments as they stand.
    pub(crate) fn takes(&self, arguments: &Value) -> bool {
        self.input.as_ref().is_none_or(|schema| schema.takes(arguments))
    }

    /// What a failure left behind, as far as only toolgate knows.
    pub(crate) fn effects_of_failure(&self) -> Effects {
        match (self.spec.effect, self.spec.local) {
            (Effect::Read, _) => Effects::None,
            (_, true) => Effects::RolledBack,
            _ => Effects::Unknown,
        }
    }

    /// What a run that finished left behind, if its result is then withheld.
    pub(crate) fn effects_of_run(&self) -> Effects {
        match self.effects_of_failure() {
            Effects::Unknown => Effects::Done,
            other => other,
        }
    }
}
