//! Records the provenance of the values in a call, for rules that check where values come from.

use std::sync::Arc;

use serde_json::Value;

use crate::agent::{Agent, ToolEntry};
use crate::call::CheckedArguments;
use crate::call::outcome::Outcome;
use crate::pipeline::admission::AdmittedCall;
use crate::policy::FileAccess;
use crate::provenance;
use crate::provenance::{ProvenanceUpdate, TaintCarrier};
use crate::store::ClaimResolution;
use crate::tool::context::CallTransaction;
use crate::tool::{Failure, ToolSpec};
use toolgate_json;

/// Reports whether the tool declares an argument name. A declared name is not user data.
fn is_declared(spec: &ToolSpec, place: &str, name: &str) -> bool {
    let parent = toolgate_json::Pointer::from(place)
        .split_last()
        .map(|(parent, _)| parent)
        .unwrap_or_default();
    crate::schema::has_declared_member(spec, &parent, name)
}

/// Returns the entities that store what the tool writes.
fn storing_entities(spec: &ToolSpec) -> impl Iterator<Item = &(Arc<str>, toolgate_json::Pointer)> {
    spec.entities.iter().filter(move |(name, _)| spec.keeps.contains(name))
}

/// Pairs each storing entity with its id in unchecked arguments. Only text and numbers are ids.
fn entity_ids<'a>(
    spec: &'a ToolSpec,
    ran: Option<&'a Value>,
) -> impl Iterator<Item = (&'a Arc<str>, Option<&'a Value>)> {
    storing_entities(spec).map(move |(name, path)| {
        let value = ran.and_then(|ran| path.get(ran));
        (name, value.filter(|value| value.is_string() || value.is_number()))
    })
}

/// Returns what a call writes from its admission on, and the entities that it writes to if it runs.
///
/// The values count as written even if the call is abandoned.
pub(crate) fn intended_writes(
    agent: &Agent,
    spec: &ToolSpec,
    arguments: &Value,
) -> (Option<Box<ProvenanceUpdate>>, Vec<String>) {
    if agent.tracked_sources.is_none() {
        return (None, Vec::new());
    }
    // An entity that only the result names is recorded at the commit.
    let named = |(name, path): &(Arc<str>, toolgate_json::Pointer)| {
        let values: Vec<&Value> =
            path.get_all(arguments).into_iter().filter(|value| !value.is_null()).collect();
        if values.is_empty() { Vec::new() } else { TaintCarrier::entities(name, values) }
    };
    let mut update = ProvenanceUpdate::new(&agent.name);
    update.record_written(arguments, &|place, name| is_declared(spec, place, name));
    (
        Some(Box::new(update)),
        TaintCarrier::collect_write_keys(&agent.name, storing_entities(spec).flat_map(named)),
    )
}

/// A run by a client with other arguments than the admitted ones.
pub(crate) struct MismatchedRun {
    /// The reported arguments. `None` if they cannot be parsed.
    pub(crate) arguments: Option<Value>,
    /// The result, which the model may have read.
    pub(crate) result: Value,
}

impl MismatchedRun {
    pub(crate) fn new(ran: Option<&CheckedArguments>, result: &Result<Value, Failure>) -> Self {
        let text = result.as_ref().map_or_else(Failure::model_visible_text, Value::clone);
        Self { arguments: ran.map(|ran| ran.value().clone()), result: text }
    }

    /// Returns the entities that the run has read.
    fn sources(&self, spec: &ToolSpec) -> Vec<TaintCarrier> {
        let named = spec
            .entities
            .iter()
            .filter_map(|(name, path)| Some((name, path.get_all(self.arguments.as_ref()?))));
        named.flat_map(|(name, values)| TaintCarrier::entities(name, values)).collect()
    }
}

/// Records what a client may have written without admission.
///
/// In its own session, every reported value counts. Entities that other sessions share count only
/// if the client could have been admitted, and only for a tool that clients run.
pub(crate) fn unadmitted_provenance(
    agent: &Agent,
    tool: &ToolEntry,
    mismatch: &MismatchedRun,
    could_be_admitted: bool,
) -> Option<Box<ProvenanceUpdate>> {
    agent.tracked_sources.as_ref()?;
    let mut update = ProvenanceUpdate::new(&agent.name);
    update.record_reads(mismatch.sources(&tool.spec));
    let ran = mismatch.arguments.as_ref();
    match ran {
        Some(ran) => {
            update.record_written(ran, &|place, name| is_declared(&tool.spec, place, name))
        }
        None => update.mark_incomplete(),
    }
    if tool.spec.untrusted || update.has_read() {
        update.record_untrusted(&mismatch.result, tool.spec.untrusted);
    }
    if could_be_admitted && tool.spec.external {
        let valid = ran.filter(|ran| tool.accepts_arguments(ran));
        let named = entity_ids(&tool.spec, valid)
            .filter_map(|(name, value)| Some(TaintCarrier::entities(name, [value?])));
        update.record_carrier_writes(named.flatten(), false);
    }
    Some(Box::new(update))
}

/// Records a reported run of a tool that no longer exists. Its result is untrusted.
pub(crate) fn unknown_tool_provenance(
    agent: &Agent,
    mismatch: &MismatchedRun,
) -> Option<Box<ProvenanceUpdate>> {
    agent.tracked_sources.as_ref()?;
    let mut update = ProvenanceUpdate::new(&agent.name);
    match &mismatch.arguments {
        Some(ran) => update.record_written(ran, &|_, _| false),
        None => update.mark_incomplete(),
    }
    update.record_untrusted(&mismatch.result, true);
    Some(Box::new(update))
}

/// Records the values that a call has written and read.
///
/// The model also reads the error of an untrusted tool, so errors count.
pub(crate) fn call_provenance(
    admitted: &AdmittedCall,
    (outcome, untruncated): (&Outcome, Option<&Value>),
    resolution: ClaimResolution,
    txn: &CallTransaction,
) -> Option<Box<ProvenanceUpdate>> {
    let sources = admitted.agent.tracked_sources.as_ref()?;
    let spec = &admitted.authorization.tool().spec;
    let arguments = admitted.authorization.arguments().value();
    let declared = |place: &str, name: &str| is_declared(spec, place, name);
    let mut update = ProvenanceUpdate::new(&admitted.agent.name);
    let mut answer = model_visible_text(outcome, untruncated);
    let result = untruncated.or_else(|| outcome.success().map(|output| &output.value));
    let entity = |(name, path): &(Arc<str>, toolgate_json::Pointer)| {
        let arguments = path
            .get_all(arguments)
            .into_iter()
            .filter(|value| !value.is_null())
            .collect::<Vec<_>>();
        let named = if arguments.is_empty() {
            result.map(|result| path.get_all(result)).unwrap_or_default()
        } else {
            arguments
        };
        TaintCarrier::entities(name, named)
    };
    let files = |path_of: fn(&FileAccess) -> Option<&String>| {
        txn.observations.iter().filter_map(path_of).cloned().map(TaintCarrier::File)
    };
    update.record_reads(files(|access| {
        if let FileAccess::Read(path, _) | FileAccess::Listed(path) = access {
            Some(path)
        } else {
            None
        }
    }));
    update.record_reads(spec.entities.iter().flat_map(entity));
    if let Some(mismatch) = &admitted.mismatched_run {
        update.record_reads(mismatch.sources(spec));
        answer = serde_json::json!([answer, mismatch.result]);
    }
    // A call that provably did not run has written nothing.
    if resolution != ClaimResolution::Released {
        let is_kept = matches!(outcome, Outcome::Success(_));
        update.record_carrier_writes(
            files(|access| if let FileAccess::Wrote(path, _) = access { Some(path) } else { None }),
            is_kept,
        );
        update.record_carrier_writes(storing_entities(spec).flat_map(entity), is_kept);
    }
    if spec.untrusted || update.has_read() {
        update.record_untrusted(&answer, spec.untrusted);
    }
    if sources.contains(spec.name()) && matches!(outcome, Outcome::Success(_)) {
        let source = if admitted.is_reported {
            Arc::from(provenance::reported_source(spec.name()))
        } else {
            Arc::clone(&spec.name)
        };
        update.record_trusted(source, &answer, arguments, &declared);
    }
    update.record_written(arguments, &declared);
    if let Some(MismatchedRun { arguments: ran, .. }) = &admitted.mismatched_run {
        // If the target entity is unknown, it may be any of them.
        update.record_carrier_writes(
            entity_ids(spec, ran.as_ref())
                .flat_map(|(name, value)| TaintCarrier::entities(name, value)),
            false,
        );
        match ran {
            Some(ran) => update.record_written(ran, &declared),
            None => update.mark_incomplete(),
        }
    }
    Some(Box::new(update))
}

/// Returns everything that the model reads of an outcome.
pub(crate) fn model_visible_text(outcome: &Outcome, untruncated: Option<&Value>) -> Value {
    match outcome {
        Outcome::Success(output) => {
            serde_json::json!([untruncated.unwrap_or(&output.value), output.message])
        }
        Outcome::Error(error) => serde_json::json!([error.message, error.upstream, error.errors]),
        Outcome::Signal(signal) => serde_json::json!([signal]),
    }
}
