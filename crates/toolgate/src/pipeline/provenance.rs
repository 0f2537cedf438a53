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
    given: &Value,
) -> (Option<Box<ProvenanceUpdate>>, Vec<String>) {
    if agent.tracked_sources.is_none() {
        return (None, Vec::new());
    }
    // An entity that only the result names is recorded at the commit.
    let named = |(name, path): &(Arc<str>, toolgate_json::Pointer)| {
        let values: Vec<&Value> =
            path.get_all(given).into_iter().filter(|value| !value.is_null()).collect();
        if values.is_empty() { Vec::new() } else { TaintCarrier::entities(name, values) }
    };
    let mut seen = ProvenanceUpdate::new(&agent.name);
    seen.record_written(given, &|place, name| is_declared(spec, place, name));
    (
        Some(Box::new(seen)),
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
        let said = result.as_ref().map_or_else(Failure::model_visible_text, Value::clone);
        Self { arguments: ran.map(|ran| ran.value().clone()), result: said }
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
    otherwise: &MismatchedRun,
    could: bool,
) -> Option<Box<ProvenanceUpdate>> {
    agent.tracked_sources.as_ref()?;
    let mut seen = ProvenanceUpdate::new(&agent.name);
    seen.record_reads(otherwise.sources(&tool.spec));
    let ran = otherwise.arguments.as_ref();
    match ran {
        Some(ran) => seen.record_written(ran, &|place, name| is_declared(&tool.spec, place, name)),
        None => seen.mark_incomplete(),
    }
    if tool.spec.untrusted || seen.has_read() {
        seen.record_untrusted(&otherwise.result, tool.spec.untrusted);
    }
    if could && tool.spec.external {
        let fits = ran.filter(|ran| tool.accepts_arguments(ran));
        let named = entity_ids(&tool.spec, fits)
            .filter_map(|(name, value)| Some(TaintCarrier::entities(name, [value?])));
        seen.record_carrier_writes(named.flatten(), false);
    }
    Some(Box::new(seen))
}

/// Records a reported run of a tool that no longer exists. Its result is untrusted.
pub(crate) fn unknown_tool_provenance(
    agent: &Agent,
    otherwise: &MismatchedRun,
) -> Option<Box<ProvenanceUpdate>> {
    agent.tracked_sources.as_ref()?;
    let mut seen = ProvenanceUpdate::new(&agent.name);
    match &otherwise.arguments {
        Some(ran) => seen.record_written(ran, &|_, _| false),
        None => seen.mark_incomplete(),
    }
    seen.record_untrusted(&otherwise.result, true);
    Some(Box::new(seen))
}

/// Records the values that a call has written and read.
///
/// The model also reads the error of an untrusted tool, so errors count.
pub(crate) fn call_provenance(
    admitted: &AdmittedCall,
    (outcome, whole): (&Outcome, Option<&Value>),
    settle: ClaimResolution,
    txn: &CallTransaction,
) -> Option<Box<ProvenanceUpdate>> {
    let sources = admitted.agent.tracked_sources.as_ref()?;
    let spec = &admitted.authorization.tool().spec;
    let given = admitted.authorization.arguments().value();
    let declared = |place: &str, name: &str| is_declared(spec, place, name);
    let mut seen = ProvenanceUpdate::new(&admitted.agent.name);
    let mut answer = model_visible_text(outcome, whole);
    let result = whole.or_else(|| outcome.success().map(|output| &output.value));
    let entity = |(name, path): &(Arc<str>, toolgate_json::Pointer)| {
        let given =
            path.get_all(given).into_iter().filter(|value| !value.is_null()).collect::<Vec<_>>();
        let named = if given.is_empty() {
            result.map(|result| path.get_all(result)).unwrap_or_default()
        } else {
            given
        };
        TaintCarrier::entities(name, named)
    };
    let files = |wanted: fn(&FileAccess) -> Option<&String>| {
        txn.observations.iter().filter_map(wanted).cloned().map(TaintCarrier::File)
    };
    seen.record_reads(files(|seen| {
        if let FileAccess::Read(path, _) | FileAccess::Listed(path) = seen {
            Some(path)
        } else {
            None
        }
    }));
    seen.record_reads(spec.entities.iter().flat_map(entity));
    if let Some(otherwise) = &admitted.mismatched_run {
        seen.record_reads(otherwise.sources(spec));
        answer = serde_json::json!([answer, otherwise.result]);
    }
    // A call that provably did not run has written nothing.
    if settle != ClaimResolution::Released {
        let kept = matches!(outcome, Outcome::Success(_));
        seen.record_carrier_writes(
            files(|seen| if let FileAccess::Wrote(path, _) = seen { Some(path) } else { None }),
            kept,
        );
        seen.record_carrier_writes(storing_entities(spec).flat_map(entity), kept);
    }
    if spec.untrusted || seen.has_read() {
        seen.record_untrusted(&answer, spec.untrusted);
    }
    if sources.contains(spec.name()) && matches!(outcome, Outcome::Success(_)) {
        let source = if admitted.is_reported {
            Arc::from(provenance::reported_source(spec.name()))
        } else {
            Arc::clone(&spec.name)
        };
        seen.record_trusted(source, &answer, given, &declared);
    }
    seen.record_written(given, &declared);
    if let Some(MismatchedRun { arguments: ran, .. }) = &admitted.mismatched_run {
        // If the target entity is unknown, it may be any of them.
        seen.record_carrier_writes(
            entity_ids(spec, ran.as_ref())
                .flat_map(|(name, value)| TaintCarrier::entities(name, value)),
            false,
        );
        match ran {
            Some(ran) => seen.record_written(ran, &declared),
            None => seen.mark_incomplete(),
        }
    }
    Some(Box::new(seen))
}

/// Returns everything that the model reads of an outcome.
pub(crate) fn model_visible_text(outcome: &Outcome, whole: Option<&Value>) -> Value {
    match outcome {
        Outcome::Success(output) => {
            serde_json::json!([whole.unwrap_or(&output.value), output.message])
        }
        Outcome::Error(error) => serde_json::json!([error.message, error.upstream, error.errors]),
        Outcome::Signal(signal) => serde_json::json!([signal]),
    }
}
