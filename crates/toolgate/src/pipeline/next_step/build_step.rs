//! Turns remedies of rules into calls with arguments.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::assumed_effect::assumed_effects_of;
use super::{CandidateStep, NextStepSearch};
use crate::agent::ToolEntry;
use crate::policy::Prerequisite;
use crate::session::state::Evidence;

impl NextStepSearch<'_> {
    /// Turns a remedy into a call and fills in the known arguments.
    pub(super) fn build_step(&self, remedy: &Prerequisite) -> Option<CandidateStep> {
        let tool = Arc::clone(self.agent.tools.get(&remedy.tool)?);
        let schema = tool.spec.input_schema();
        let properties =
            schema.and_then(|schema| schema.get("properties")).and_then(Value::as_object);
        let accepts =
            |name: &str| properties.is_some_and(|properties| properties.contains_key(name));
        let mut arguments = remedy.arguments.clone();
        if let Some((entity, value)) = &remedy.about
            && let Some((_, path)) = tool.spec.entities.iter().find(|(name, _)| name == entity)
            && let [name] = path.parts()
            && accepts(name)
        {
            arguments.insert(name.clone(), value.clone());
            // The tool does not accept this entity, so it yields no evidence about it.
            if !accepts_argument(&tool, &arguments, name) {
                return None;
            }
        }
        let required: Vec<&str> = schema
            .and_then(|s| s.get("required"))
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let entities = tool
            .spec
            .entities
            .iter()
            .filter_map(|(_, path)| path.parts().first())
            .map(String::as_str)
            .filter(|name| accepts(name));
        for name in required.iter().copied().chain(entities) {
            if arguments.contains_key(name) {
                continue;
            }
            let Some(value) = self.denied_arguments.get(name).or_else(|| self.evidence_value(name))
            else {
                continue;
            };
            // A value with the right name and the wrong type is another value.
            let mut extended = arguments.clone();
            extended.insert(name.to_owned(), value.clone());
            if accepts_argument(&tool, &extended, name) {
                arguments = extended;
            }
        }
        let is_incomplete = required.iter().any(|name| !arguments.contains_key(*name));
        let assumed_effects = assumed_effects_of(remedy, &tool, &arguments, self.now);
        Some(CandidateStep { tool, arguments, is_incomplete, assumed_effects })
    }

    /// Returns the value of this name from the known evidence.
    fn evidence_value(&self, name: &str) -> Option<&Value> {
        let found: Vec<(&Evidence, &Value)> = self
            .facts
            .evidence
            .iter()
            .filter_map(|(_, proof)| {
                let proof = proof.as_deref()?;
                let entity = proof
                    .entities
                    .iter()
                    .find(|(entity, _)| **entity == *name)
                    .map(|(_, value)| value);
                Some((proof, entity.or_else(|| proof.fields.get(format!("/{name}")))?))
            })
            .collect();
        // Evidence about the same entity has precedence. Other evidence counts only if all of it
        // agrees.
        let is_about = |proof: &Evidence| {
            proof
                .entities
                .iter()
                .any(|(entity, value)| self.denied_arguments.get(&**entity) == Some(value))
        };
        let about =
            found.iter().filter(|(proof, _)| is_about(proof)).max_by_key(|(proof, _)| proof.at);
        let (_, first) = about.or_else(|| found.first())?;
        (about.is_some() || found.iter().all(|(_, value)| value == first)).then_some(*first)
    }
}

/// Reports whether the tool accepts the value of this argument. Missing values in it may still be
/// added.
fn accepts_argument(tool: &ToolEntry, arguments: &Map<String, Value>, name: &str) -> bool {
    let Some(schema) = &tool.input else { return true };
    let Err(invalid) = schema.check(&tool.spec.name, &Value::Object(arguments.clone())) else {
        return true;
    };
    let place = toolgate_json::Pointer::from_parts(vec![name.to_owned()]).to_string();
    let is_it = |path: &str| {
        path.strip_prefix(&place).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    !invalid.errors.iter().any(|error| is_it(&error.path) && error.got != "nothing")
}
