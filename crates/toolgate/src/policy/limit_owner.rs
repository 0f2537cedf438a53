//! Determines the owner of a limit: a session, a principal or an entity.

use std::sync::Arc;

use serde_json::Value;
use toolgate_json::Pointer;

use crate::policy::limit::Limit;
use crate::policy::{PolicyError, PolicyInput};
use crate::session::state::EvidenceOrigin;

/// Returns whether a proved field can identify the owner of a limit.
///
/// Null and blank text identify no owner. A list or an object may have another order or more
/// members in the next call, and would then get a counter of its own.
fn can_identify_owner(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.trim().is_empty(),
        Value::Number(_) | Value::Bool(_) => true,
        Value::Null | Value::Array(_) | Value::Object(_) => false,
    }
}

/// The owner of a limit: each owner has its own counter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitOwner {
    /// A session.
    Session,
    /// A principal, over all its sessions.
    Principal,
    /// The entity that an argument names, over all sessions and principals.
    Entity(Pointer),
    /// The entity that evidence names, over all sessions and principals.
    ///
    /// The order names the customer, not the model.
    EvidenceEntity(Box<EvidenceEntity>),
}

/// An entity that evidence names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvidenceEntity {
    /// The tool whose success is the evidence.
    pub tool: Arc<str>,
    /// The entity that the evidence is about, and the argument that names it.
    pub entity: (Arc<str>, Pointer),
    /// The proved field that names the owner of the limit.
    pub field: Pointer,
    /// The argument that names the owner if evidence is missing.
    ///
    /// Without this argument, missing evidence is a denial.
    pub fallback: Option<Pointer>,
}

impl Limit {
    /// Returns the argument that names the owner.
    pub(super) fn owner_argument(&self) -> Option<&Pointer> {
        match &self.per {
            LimitOwner::Session | LimitOwner::Principal => None,
            LimitOwner::Entity(path) => Some(path),
            LimitOwner::EvidenceEntity(proved) => Some(&proved.entity.1),
        }
    }

    /// Returns the entity that evidence names, or the fallback argument.
    pub(super) fn evidence_entity<'a>(
        input: &PolicyInput<'a>,
        proved: &EvidenceEntity,
    ) -> Result<&'a Value, PolicyError> {
        let (entity, argument) = &proved.entity;
        let about = Self::require_argument(input, argument)?;
        let evidence = input.evidence_of(&proved.tool, Some((entity, about)), false)?;
        match (evidence, &proved.fallback) {
            // If there is evidence, it must name the owner. The model must not choose the owner.
            (Some(proof), _) => proof
                .fields
                .get(proved.field.to_string())
                .filter(|owner| can_identify_owner(owner))
                .ok_or_else(|| {
                    PolicyError::new(format!(
                        "the evidence of `{}` does not name the owner of the limit",
                        proved.tool
                    ))
                }),
            (None, Some(path)) => Self::require_argument(input, path),
            (None, None) => Err(PolicyError::new(format!(
                "evidence of `{}`, which names the owner of the limit, is missing",
                proved.tool
            ))),
        }
    }

    pub(super) fn is_owner_assumed(&self, input: &PolicyInput<'_>) -> bool {
        let LimitOwner::EvidenceEntity(proved) = &self.per else { return false };
        let Some(about) = input.argument(&proved.entity.1) else { return false };
        let evidence = input.evidence_of(&proved.tool, Some((&proved.entity.0, about)), false);
        matches!(evidence, Ok(Some(proof)) if proof.origin == EvidenceOrigin::Assumed)
    }
}
