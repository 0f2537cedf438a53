//! What is to be remembered of the values in a call, where rules ask where values come from.

use std::sync::Arc;

use serde_json::Value;

use super::pass::Passed;
use crate::call::Judged;
use crate::context::Txn;
use crate::json;
use crate::outcome::Outcome;
use crate::policy::Observation;
use crate::registry::{Agent, Registered};
use crate::store::Settle;
use crate::tool::{Failure, Spec};
use crate::values::{self, Carrier, Seen};

/// Whether a tool declares a member of its arguments: then its name is nothing that anybody wrote.
fn is_declared(spec: &Spec, place: &str, name: &str) -> bool {
    let parent = json::Pointer::from(place).split_last().map(|(parent, _)| parent).unwrap_or_default();
    crate::schema::declares(spec, &parent, name)
}

/// The entities that keep what a tool writes.
fn keeping(spec: &Spec) -> impl Iterator<Item = &(Arc<str>, json::Pointer)> {
    spec.entities.iter().filter(move |(name, _)| spec.keeps.contains(name))
}

/// What each of them is called in arguments that nobody has judged: by one text or number.
fn called<'a>(spec: &'a Spec, ran: Option<&'a Value>) -> impl Iterator<Item = (&'a Arc<str>, Option<&'a Value>)> {
    keeping(spec).map(move |(name, path)| {
        let value = ran.and_then(|ran| path.get(ran));
        (name, value.filter(|value| value.is_string() || value.is_number()))
    })
}

/// What a call writes from the moment on that it is let through, whether anybody ever says how it ended or not; and what it writes to, if
/// it happens.
pub(super) fn intended(agent: &Agent, spec: &Spec, given: &Value) -> (Option<Box<Seen>>, Vec<String>) {
    if agent.watched.is_none() {
        return (None, Vec::new());
    }
    // One that only its result names is known when that is there.
    let named = |(name, path): &(Arc<str>, json::Pointer)| {
        let values: Vec<&Value> = path.all(given).into_iter().filter(|value| !value.is_null()).collect();
        if values.is_empty() { Vec::new() } else { Carrier::entities(name, values) }
    };
    let mut seen = Seen::new(&agent.name);
    seen.write(given, &|place, name| is_declared(spec, place, name));
    (Some(Box::new(seen)), Carrier::keys(&agent.name, keeping(spec).flat_map(named)))
}

/// What a client ran that is something else than was admitted.
pub(super) struct Otherwise {
    /// What it says that it ran; nothing where nobody can read it.
    pub(super) ran: Option<Value>,
    /// What came of it, and the model may have read.
    pub(super) said: Value,
}

impl Otherwise {
    pub(super) fn new(ran: Option<&Judged>, result: &Result<Value, Failure>) -> Self {
        let said = result.as_ref().map_or_else(|failure| format!("{failure:?}").into(), Value::clone);
        Self { ran: ran.map(|ran| ran.value().clone()), said }
    }

    /// What it was read from.
    fn sources(&self, spec: &Spec) -> Vec<Carrier> {
        let named = spec.entities.iter().filter_map(|(name, path)| Some((name, path.all(self.ran.as_ref()?))));
        named.flat_map(|(name, values)| Carrier::entities(name, values)).collect()
    }
}

/// What a client may have written that ran what nobody let through: in its own session whatever it says. What all sessions share, only
/// who could have been let through has a word in, of a tool that clients run and of one entity at a time.
pub(super) fn unadmitted(agent: &Agent, tool: &Registered, otherwise: &Otherwise, could: bool) -> Option<Box<Seen>> {
    agent.watched.as_ref()?;
    let mut seen = Seen::new(&agent.name);
    seen.read_from(otherwise.sources(&tool.spec));
    let ran = otherwise.ran.as_ref();
    match ran {
        Some(ran) => seen.write(ran, &|place, name| is_declared(&tool.spec, place, name)),
        None => seen.lose(),
    }
    if tool.spec.untrusted || seen.has_read() {
        seen.distrust(&otherwise.said, tool.spec.untrusted);
    }
    if could && tool.spec.external {
        let fits = ran.filter(|ran| tool.takes(ran));
        let named = called(&tool.spec, fits).filter_map(|(name, value)| Some(Carrier::entities(name, [value?])));
        seen.wrote_to(named.flatten(), false);
    }
    Some(Box::new(seen))
}

/// What a client has run whose tool is not there any more: nobody knows whether what that says can be trusted.
pub(super) fn blindly(agent: &Agent, otherwise: &Otherwise) -> Option<Box<Seen>> {
    agent.watched.as_ref()?;
    let mut seen = Seen::new(&agent.name);
    match &otherwise.ran {
        Some(ran) => seen.write(ran, &|_, _| false),
        None => seen.lose(),
    }
    seen.distrust(&otherwise.said, true);
    Some(Box::new(seen))
}

/// What a call that has ended wrote, and what its answer says. What an untrusted tool says when it fails is read by the model as well.
pub(super) fn seen(passed: &Passed, (outcome, whole): (&Outcome, Option<&Value>), settle: Settle, txn: &Txn) -> Option<Box<Seen>> {
    let sources = passed.agent.watched.as_ref()?;
    let spec = &passed.permit.tool().spec;
    let given = passed.permit.arguments().value();
    let declared = |place: &str, name: &str| is_declared(spec, place, name);
    let mut seen = Seen::new(&passed.agent.name);
    let mut answer = said(outcome, whole);
    let result = whole.or_else(|| outcome.success().map(|output| &output.value));
    let entity = |(name, path): &(Arc<str>, json::Pointer)| {
        let given = path.all(given).into_iter().filter(|value| !value.is_null()).collect::<Vec<_>>();
        let named = if given.is_empty() { result.map(|result| path.all(result)).unwrap_or_default() } else { given };
        Carrier::entities(name, named)
    };
    let files = |wanted: fn(&Observation) -> Option<&String>| txn.observed.iter().filter_map(wanted).cloned().map(Carrier::File);
    seen.read_from(files(|seen| if let Observation::Read(path, _) | Observation::Listed(path) = seen { Some(path) } else { None }));
    seen.read_from(spec.entities.iter().flat_map(entity));
    if let Some(otherwise) = &passed.ran {
        seen.read_from(otherwise.sources(spec));
        answer = serde_json::json!([answer, otherwise.said]);
    }
    // What provably did not happen was not written.
    if settle != Settle::Released {
        let kept = matches!(outcome, Outcome::Success(_));
        seen.wrote_to(files(|seen| if let Observation::Wrote(path, _) = seen { Some(path) } else { None }), kept);
        seen.wrote_to(keeping(spec).flat_map(entity), kept);
    }
    if spec.untrusted || seen.has_read() {
        seen.distrust(&answer, spec.untrusted);
    }
    if sources.contains(spec.name()) && matches!(outcome, Outcome::Success(_)) {
        let source = if passed.reported { Arc::from(values::reported(spec.name())) } else { Arc::clone(&spec.name) };
        seen.trust(source, &answer, given, &declared);
    }
    seen.write(given, &declared);
    if let Some(Otherwise { ran, .. }) = &passed.ran {
        // Where it cannot be told to which, it may be any.
        seen.wrote_to(called(spec, ran.as_ref()).flat_map(|(name, value)| Carrier::entities(name, value)), false);
        match ran {
            Some(ran) => seen.write(ran, &declared),
            None => seen.lose(),
        }
    }
    Some(Box::new(seen))
}

/// Everything that the model reads of an outcome.
pub(super) fn said(outcome: &Outcome, whole: Option<&Value>) -> Value {
    match outcome {
        Outcome::Success(output) => serde_json::json!([whole.unwrap_or(&output.value), output.message]),
        Outcome::Error(error) => serde_json::json!([error.message, error.upstream, error.errors]),
        Outcome::Signal(signal) => serde_json::json!([format!("{signal:?}")]),
    }
}
