//! Applies the assumed effects of a step to the facts of the steps after it.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Map, Value};

use crate::agent::ToolEntry;
use crate::policy::{DecisionFacts, Prerequisite};
use crate::session::state::{Evidence, EvidenceOrigin, NamedChange, Revocation};

/// Assumed effect of a step.
#[derive(Clone)]
pub(super) enum AssumedEffect {
    /// Evidence, and whether the client runs the tool.
    AddEvidence(Arc<Evidence>, bool),
    RevokeEvidence(Revocation),
    SetMark(NamedChange),
}

/// Returns the assumed effects of a step that succeeds.
pub(super) fn assumed_effects_of(
    remedy: &Prerequisite,
    tool: &ToolEntry,
    arguments: &Map<String, Value>,
    now: Timestamp,
) -> Vec<AssumedEffect> {
    let arguments = Value::Object(arguments.clone());
    let mut entities: Vec<(Arc<str>, Value)> = remedy.about.iter().cloned().collect();
    for (name, path) in &tool.spec.entities {
        if let Some(value) = path.get(&arguments)
            && !entities.iter().any(|(known, _)| known == name)
        {
            entities.push((Arc::clone(name), value.clone()));
        }
    }
    let revoked = tool.spec.revokes.iter().map(|(of, entity)| {
        let about = entity
            .as_ref()
            .and_then(|entity| entities.iter().find(|(name, _)| name == entity).cloned());
        AssumedEffect::RevokeEvidence(Revocation { tool: Arc::clone(of), about })
    });
    let mut all: Vec<AssumedEffect> = revoked.collect();
    let proof = Evidence {
        tool: Arc::clone(&tool.spec.name),
        entities,
        fields: Value::Null,
        at: now,
        origin: EvidenceOrigin::Assumed,
        stamp: 0,
    };
    all.push(AssumedEffect::AddEvidence(Arc::new(proof), tool.spec.is_external()));
    all.extend(remedy.marks.iter().cloned().map(AssumedEffect::SetMark));
    all
}

/// Applies assumed effects to the facts.
pub(super) fn apply_assumptions(facts: &mut DecisionFacts, assumed: &[AssumedEffect]) {
    for assumed in assumed {
        match assumed {
            AssumedEffect::AddEvidence(proof, reported) => {
                let keys: Vec<_> = proof.keys_for_reported(*reported).collect();
                for (_, found) in facts.evidence.iter_mut().filter(|(key, _)| keys.contains(key)) {
                    *found = Some(Arc::clone(proof));
                }
            }
            AssumedEffect::RevokeEvidence(revoked) => {
                for (_, found) in
                    facts.evidence.iter_mut().filter(|(key, _)| key.tool == revoked.tool)
                {
                    let about = |proof: &Arc<Evidence>| {
                        revoked.about.as_ref().is_none_or(|about| proof.entities.contains(about))
                    };
                    if found.as_ref().is_some_and(about) {
                        *found = None;
                    }
                }
            }
            AssumedEffect::SetMark((name, value)) => {
                if let Some(mark) = facts.marks.get_mut(&**name) {
                    mark.clone_from(value);
                }
            }
        }
    }
}
