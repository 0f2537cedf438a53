//! How it is found out whether a call took effect of which nobody knows.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Effect, Spec};
use crate::json::Pointer;
use crate::policy::Problem;

/// How it is found out whether a call took effect of which nobody knows: a read tool, and what its result means. What
/// fits neither leaves the call to a person.
///
/// ```
/// use toolgate::Reconcile;
/// let reconcile = Reconcile::with("find_refund")
///     .argument("order_id", "/order_id")
///     .happened_if("/status", "paid")
///     .never_if("/status", "none");
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reconcile {
    pub(crate) tool: Arc<str>,
    arguments: Vec<(String, Pointer)>,
    happened: Vec<(Pointer, Value)>,
    never: Vec<(Pointer, Value)>,
}

impl Reconcile {
    /// Asks this tool.
    pub fn with(tool: impl Into<Arc<str>>) -> Self {
        Self { tool: tool.into(), arguments: Vec::new(), happened: Vec::new(), never: Vec::new() }
    }

    /// Fills an argument of that tool from an argument of the call.
    #[must_use]
    pub fn argument(mut self, name: &str, from: impl Into<Pointer>) -> Self {
        self.arguments.push((name.to_owned(), from.into()));
        self
    }

    /// It happened where this field of the result has this value, and all others that are named.
    #[must_use]
    pub fn happened_if(mut self, field: impl Into<Pointer>, is: impl Into<Value>) -> Self {
        self.happened.push((field.into(), is.into()));
        self
    }

    /// It never happened where this field of the result has this value, and all others that are named.
    #[must_use]
    pub fn never_if(mut self, field: impl Into<Pointer>, is: impl Into<Value>) -> Self {
        self.never.push((field.into(), is.into()));
        self
    }

    /// The arguments to ask with; the name of one that the call does not have.
    pub(crate) fn ask(&self, arguments: &Value) -> Result<Value, String> {
        let mut asked = Map::new();
        for (name, from) in &self.arguments {
            let value = from.get(arguments).ok_or_else(|| format!("the call has no `{from}` to ask `{}` about", self.tool))?;
            // A mark is not what was asked for: nothing would be found by it, and that would prove nothing.
            if crate::redact::is_redacted(value) {
                return Err(format!("`{from}` of the call was redacted, so `{}` cannot be asked about it", self.tool));
            }
            asked.insert(name.clone(), value.clone());
        }
        Ok(Value::Object(asked))
    }

    /// Whether it happened, as far as this result says.
    pub(crate) fn says(&self, result: &Value) -> Option<bool> {
        let plain = |value: &Value| crate::json::plain(value.clone());
        let all = |wanted: &[(Pointer, Value)]| {
            !wanted.is_empty() && wanted.iter().all(|(field, is)| field.get(result).is_some_and(|found| plain(found) == plain(is)))
        };
        match (all(&self.happened), all(&self.never)) {
            (true, false) => Some(true),
            (false, true) => Some(false),
            // Both, or neither: nobody knows.
            _ => None,
        }
    }

    /// What is wrong with it for this tool, among these.
    pub(crate) fn problems(&self, of: &Spec, tools: &[&Spec]) -> Vec<Problem> {
        let wrong =
            |what: String| Problem::new(format!("`{}` is reconciled with `{}`: {what}", of.name(), crate::names::shown(&self.tool)));
        let mut problems = Vec::new();
        match tools.iter().find(|tool| tool.name() == &*self.tool) {
            None => problems.push(
                wrong("which is no tool of this agent".to_owned())
                    .of_unknown(&self.tool)
                    .did_you_mean(&self.tool, tools.iter().map(|tool| tool.name())),
            ),
            Some(tool) if tool.effect != Effect::Read => problems.push(wrong("which is no read".to_owned())),
            Some(tool) if tool.external => problems.push(wrong("which only the client can run".to_owned())),
            Some(_) => {}
        }
        if self.happened.is_empty() {
            problems.push(wrong("and no result of it means that the call happened".to_owned()).help("say `.happened_if(field, value)`"));
        }
        let secret = self.arguments.iter().find(|(_, from)| crate::redact::is_secret(from, &of.secrets));
        problems.extend(secret.map(|(_, from)| wrong(format!("`{from}` is secret, and is not kept to be asked about"))));
        problems
    }
}
