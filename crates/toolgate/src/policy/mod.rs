//! Rules that hold: pure, synchronous, and decided on facts that were loaded before.

mod condition;
mod deny;
mod limit;
mod read_before_write;
mod refusal;
mod require;
mod sequence;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use condition::Condition;
pub use deny::Deny;
pub use limit::{Limit, Per};
pub use read_before_write::ReadBeforeWrite;
pub use refusal::Refusal;
pub use require::Require;
pub use sequence::Sequence;

use crate::call::{CallId, Judged, SessionKey};
use crate::error::ToolError;
use crate::json::{Digest, Pointer};
use crate::limits::Charge;
use crate::resource::Expect;
use crate::session::{Change, Evidence, EvidenceKey, State};
use crate::tool::Spec;

/// What a policy wants to know before it decides. What is not named here is not there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Needs {
    /// Evidence to look up.
    pub evidence: Vec<EvidenceKey>,
    /// Counters to read, each with its window.
    pub counters: Vec<(String, Option<SignedDuration>)>,
    /// What policies remembered.
    pub marks: Vec<String>,
    /// Files to look at.
    pub files: Vec<String>,
}

impl Needs {
    /// Evidence of a tool's success, about one entity where one is given.
    /// `reported` says whether what a client told is wanted beside what ran here.
    pub fn evidence_of(&mut self, tool: &Arc<str>, about: Option<(&Arc<str>, &Value)>, reported: bool) {
        let key = EvidenceKey::tool(Arc::clone(tool));
        let key = match about {
            Some((name, value)) => key.about(Arc::clone(name), value),
            None => key,
        };
        if reported {
            self.evidence.push(key.clone().reported());
        }
        self.evidence.push(key);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.evidence.is_empty() && self.counters.is_empty() && self.marks.is_empty() && self.files.is_empty()
    }
}

/// What is known of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileFact {
    /// There is nothing at the path.
    Absent,
    /// There is a file with this content.
    Present(Digest),
    /// It cannot be looked at; why.
    Unreadable(String),
}

/// What a decision rests on. It is recorded with the decision, so that the decision can be made again.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Facts {
    /// The clock.
    pub now: Timestamp,
    /// Evidence, found or not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<(EvidenceKey, Option<Arc<Evidence>>)>,
    /// Counters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counters: Vec<(String, Option<SignedDuration>, Decimal)>,
    /// What policies remembered.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub marks: BTreeMap<String, Option<Value>>,
    /// Files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, FileFact>,
    /// What hooks answered, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<HookFact>,
}

impl Facts {
    /// Takes evidence and marks from a snapshot of the session.
    pub(crate) fn take_from(&mut self, needs: &Needs, state: &State) {
        self.evidence.reserve_exact(needs.evidence.len());
        for key in &needs.evidence {
            self.evidence.push((key.clone(), state.evidence(key).cloned()));
        }
        for mark in &needs.marks {
            let found = state.marks.get(mark.as_str()).map(|m| m.as_ref().clone());
            self.marks.insert(mark.clone(), found);
        }
    }
}

/// What one hook answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookFact {
    /// The hook.
    pub hook: String,
    /// `allow`, `deny` or `ask`.
    pub said: String,
    /// Whether it rewrote the arguments.
    pub rewrote: bool,
}

/// A policy could not decide. The call is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Fault(pub String);

impl Fault {
    /// A fault, in words for the operator.
    pub fn new(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

/// A call as a policy sees it.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The call.
    pub call: CallId,
    /// Whose conversation.
    pub key: &'a SessionKey,
    /// The tool.
    pub tool: &'a Spec,
    /// The exact arguments that will run.
    pub arguments: &'a Judged,
    /// What was loaded.
    pub facts: &'a Facts,
}

impl<'a> Ask<'a> {
    /// An argument. A path with `*` gives the first match only; see [`Ask::arguments_at`].
    #[must_use]
    pub fn argument(&self, path: &Pointer) -> Option<&'a Value> {
        path.get(self.arguments.value())
    }

    /// Every place at a path of the arguments (`*` in it stands for each item), `None` where nothing stands.
    #[must_use]
    pub fn arguments_at(&self, path: &Pointer) -> Vec<Option<&'a Value>> {
        path.each(self.arguments.value())
    }

    /// Whether an argument may be shown at all.
    pub(crate) fn is_secret(&self, path: &Pointer) -> bool {
        crate::redact::is_secret(path, &self.tool.secrets)
    }

    /// A value of an argument as an error may show it.
    pub(crate) fn shown(&self, path: &Pointer, value: &Value) -> String {
        if self.is_secret(path) { "(hidden)".to_owned() } else { crate::names::shown(&value.to_string()) }
    }

    /// The latest evidence of a tool's success, about one entity where one is given, and of those that a
    /// client reports where they are wanted.
    ///
    /// # Errors
    /// A fault if the policy did not name it in [`Policy::needs`].
    pub fn evidence_of(&self, tool: &str, about: Option<(&str, &Value)>, reported: bool) -> Result<Option<&'a Evidence>, Fault> {
        let matches = |key: &EvidenceKey| match (&key.entity, about) {
            _ if &*key.tool != tool => false,
            (None, None) => true,
            (Some((name, value)), Some((wanted, of))) => &**name == wanted && crate::json::with_canonical(of, |text| text == &**value),
            _ => false,
        };
        let mut asked_for = false;
        let mut latest: Option<&'a Evidence> = None;
        for (_, proof) in self.facts.evidence.iter().filter(|(key, _)| (reported || !key.reported) && matches(key)) {
            asked_for = true;
            latest = latest.into_iter().chain(proof.as_deref()).max_by_key(|proof| proof.at);
        }
        if asked_for { Ok(latest) } else { Err(Fault(format!("evidence of `{tool}` was not asked for in `needs`"))) }
    }

    /// What a counter shows, over this window.
    ///
    /// # Errors
    /// A fault if the policy did not name it in [`Policy::needs`].
    pub fn counter(&self, name: &str, window: Option<SignedDuration>) -> Result<Decimal, Fault> {
        let found = self.facts.counters.iter().find(|(n, w, _)| n == name && *w == window);
        found.map(|(.., used)| *used).ok_or_else(|| Fault(format!("counter `{name}` was not asked for in `needs`")))
    }

    /// What a policy remembered.
    ///
    /// # Errors
    /// A fault if the policy did not name it in [`Policy::needs`].
    pub fn mark(&self, name: &str) -> Result<Option<&'a Value>, Fault> {
        let mark = self.facts.marks.get(name).ok_or_else(|| Fault(format!("mark `{name}` was not asked for in `needs`")))?;
        Ok(mark.as_ref())
    }

    /// What is known of a file.
    ///
    /// # Errors
    /// A fault if the policy did not name it in [`Policy::needs`], or there is no file system.
    pub fn file(&self, path: &str) -> Result<&'a FileFact, Fault> {
        self.facts.files.get(path).ok_or_else(|| Fault(format!("there is no file system to ask about `{path}`")))
    }
}

/// What a policy says.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// It may pass, under these terms.
    Allow(Terms),
    /// It may not.
    Deny(Box<ToolError>),
    /// A person must say; why, and under which terms it may pass then.
    Ask(String, Terms),
}

impl Verdict {
    /// It may pass.
    #[must_use]
    pub fn allow() -> Self {
        Self::Allow(Terms::default())
    }

    /// A person must say.
    pub fn ask(reason: impl Into<String>) -> Self {
        Self::Ask(reason.into(), Terms::default())
    }

    /// It may not.
    #[must_use]
    pub fn deny(error: ToolError) -> Self {
        Self::Deny(Box::new(error))
    }
}

/// What a permission hangs on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Terms {
    /// Reserved at the claim; each with the error for when there is no room.
    pub charges: Vec<(Charge, ToolError)>,
    /// What a file must look like when the tool opens it.
    pub expects: Vec<Expect>,
}

/// Something that a tool saw or did, beyond its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Observation {
    /// It read the whole of a file.
    Read(String, Digest),
    /// It wrote a file.
    Wrote(String, Digest),
    /// It removed a file.
    Removed(String),
}

/// A call that succeeded.
#[derive(Debug, Clone, Copy)]
pub struct Done<'a> {
    /// The call as it was judged.
    pub ask: Ask<'a>,
    /// The result as the model sees it.
    pub value: &'a Value,
    /// What the tool saw and did.
    pub observed: &'a [Observation],
}

/// A rule.
///
/// ```
/// use toolgate::policy::{Ask, Fault, Policy, Verdict};
/// use toolgate::{Category, Spec, ToolError};
///
/// struct OfficeHours;
/// impl Policy for OfficeHours {
///     fn name(&self) -> &str { "office_hours" }
///     fn governs(&self, tool: &Spec) -> bool { tool.name() == "call_customer" }
///     fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
///         let hour = ask.facts.now.to_zoned(jiff::tz::TimeZone::UTC).hour();
///         if (8..18).contains(&hour) { return Ok(Verdict::allow()); }
///         Ok(Verdict::deny(ToolError::new(Category::Business, "office_hours", "Customers are called from 8 to 18 UTC.")))
///     }
/// }
/// ```
pub trait Policy: Send + Sync {
    /// Its name, unique in its agent.
    fn name(&self) -> &str;

    /// Whether it has a say about this tool. Asked once, when the agent is built.
    fn governs(&self, tool: &Spec) -> bool {
        let _ = tool;
        true
    }

    /// Whether it wants to hear how calls of every tool of the agent ended, not only of those it governs.
    fn hears_all(&self) -> bool {
        false
    }

    /// What is wrong with it in an agent with these tools, if anything. Asked once, when the agent is built.
    fn problems(&self, tools: &[&Spec]) -> Vec<String> {
        let _ = tools;
        Vec::new()
    }

    /// Adds what it wants to know. The facts of the `ask` hold only the clock and what hooks answered yet.
    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        let _ = (ask, needs);
    }

    /// Decides. Must not look at anything but the `ask`.
    ///
    /// # Errors
    /// A fault, which is a denial.
    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault>;

    /// Takes note of a success. What it remembers commits with the call.
    ///
    /// # Errors
    /// A fault, which fails the call.
    fn on_result(&self, done: &Done<'_>) -> Result<Vec<Change>, Fault> {
        let _ = done;
        Ok(Vec::new())
    }

    /// Hears that a call it let pass has failed and changed nothing in the session.
    fn on_rollback(&self, ask: &Ask<'_>, error: &ToolError) {
        let _ = (ask, error);
    }
}

/// The tools that a rule speaks of.
#[derive(Debug, Clone, Default)]
pub(crate) struct ToolNames(BTreeSet<Arc<str>>);

impl ToolNames {
    fn of<'a>(tools: impl IntoIterator<Item = &'a str>) -> Self {
        Self(tools.into_iter().map(Arc::from).collect())
    }

    fn contains(&self, tool: &str) -> bool {
        self.0.contains(tool)
    }

    /// Paths that name more than one value where one is wanted.
    fn not_one<'p>(paths: impl Iterator<Item = &'p Pointer>) -> Vec<String> {
        paths
            .filter(|path| path.parts().iter().any(|part| part == "*"))
            .map(|path| format!("`{path}` names more than one value, and one is wanted here"))
            .collect()
    }

    /// Names that are no tool of the agent: a rule that speaks of nothing would never speak.
    fn unknown(&self, tools: &[&Spec]) -> Vec<String> {
        if self.0.is_empty() {
            return vec!["it names no tool, so it would never speak".to_owned()];
        }
        let missing = self.0.iter().filter(|name| !tools.iter().any(|tool| tool.name() == &***name));
        missing
            .map(|name| {
                let guess = crate::suggest::closest(name, tools.iter().map(|tool| tool.name()));
                let hint = guess.map(|guess| format!("; did you mean `{guess}`?")).unwrap_or_default();
                format!("`{}` is no tool of this agent{hint}", crate::names::shown(name))
            })
            .collect()
    }

    /// Arguments that a tool does not take: a rule that looks at nothing would never match.
    fn unknown_arguments<'p>(&self, tools: &[&Spec], paths: impl Iterator<Item = &'p Pointer> + Clone) -> Vec<String> {
        let mut problems = Vec::new();
        for tool in tools.iter().filter(|tool| self.contains(tool.name())) {
            let Some(properties) = tool.input_schema().and_then(|schema| schema.get("properties")).and_then(Value::as_object) else {
                continue;
            };
            for name in paths.clone().filter_map(|path| path.parts().first()).filter(|name| !properties.contains_key(*name)) {
                let guess = crate::suggest::closest(name, properties.keys().map(String::as_str));
                let hint = guess.map(|guess| format!("; did you mean `{guess}`?")).unwrap_or_default();
                problems.push(format!("`{}` has no argument `{}`{hint}", tool.name(), crate::names::shown(name)));
            }
        }
        problems
    }
}

/// Where a policy is attached, closest first: of several denials, the closest is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// To one tool.
    Tool,
    /// To a section of the prompt.
    Section,
    /// To the prompt.
    Prompt,
    /// To the agent.
    Agent,
}

/// A policy at its place.
#[derive(Clone)]
pub(crate) struct Attached {
    pub(crate) level: Level,
    pub(crate) policy: Arc<dyn Policy>,
}
