//! Rules that hold: pure, synchronous, and decided on facts that were loaded before.

mod analysis;
mod ask;
pub mod cel;
mod condition;
mod deny;
mod facts;
mod flow;
mod limit;
mod never;
mod observe;
mod problem;
mod read_before_write;
mod refusal;
mod require;
mod sequence;

use std::sync::Arc;

use jiff::SignedDuration;
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use analysis::analyse;
pub use ask::{Ask, Note, Trace};
pub use condition::Condition;
pub use deny::Deny;
pub(crate) use facts::Watch;
pub use facts::{ApprovalFact, Facts, FileFact, HookFact, Needs, Observed, RecallFact, RecalledBy, Used};
pub use flow::Flow;
pub use limit::{Limit, Per, Proved};
pub use observe::{Observe, observe};
pub(crate) use problem::ToolNames;
pub use problem::{Place, Problem, Severity};
pub use read_before_write::ReadBeforeWrite;
pub use refusal::Refusal;
pub use require::Require;
pub use sequence::Sequence;

use crate::error::ToolError;
use crate::json::{Digest, Pointer};
use crate::limits::Charge;
use crate::resource::Expect;
use crate::session::{Change, Revoked};
use crate::tool::Spec;

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
    /// Where a person is asked: who may answer. Anybody, where nobody is named.
    pub approvers: Vec<String>,
}

/// Whether a rule's word counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// What it says is done.
    #[default]
    Enforce,
    /// What it says is recorded and touches nothing else. Its counters run.
    Observe,
}

/// What can be known of a rule, as it governs one tool, before any call.
#[derive(Debug, Clone, Default)]
pub struct Outline<'a> {
    /// Of each group, one tool must have succeeded; with the part of the rule that says so.
    pub after: Vec<(String, Vec<&'a str>)>,
    /// What it forbids or asks about.
    pub forbids: Option<Forbids<'a>>,
    /// What it caps.
    pub caps: Option<Caps<'a>>,
    /// Whether it looks at files.
    pub files: bool,
}

/// What a rule forbids: calls for which all conditions hold.
#[derive(Debug, Clone, Copy)]
pub struct Forbids<'a> {
    /// All of them must hold.
    pub conditions: &'a [(Pointer, Condition)],
    /// Whether there is more to it than the conditions.
    pub more: bool,
    /// Whether a person is asked instead.
    pub asks: bool,
}

/// What a rule caps.
#[derive(Debug, Clone, Copy)]
pub struct Caps<'a> {
    /// The argument that is summed; without it calls are counted.
    pub amount: Option<&'a Pointer>,
    /// What keeps sums apart.
    pub currency: Option<&'a Pointer>,
    /// At most.
    pub most: Decimal,
    /// Whose it is.
    pub per: &'a Per,
    /// In any stretch of this length.
    pub window: Option<SignedDuration>,
}

impl dyn Policy {
    /// Whether it refuses calls of one of these tools by itself.
    pub(crate) fn outline_of<'a>(&self, mut tools: impl Iterator<Item = &'a Spec>) -> bool {
        tools.any(|tool| self.governs(tool) && self.outline(tool).forbids.is_some_and(|forbids| !forbids.asks))
    }
}

/// A call that would be a step towards a "yes".
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Remedy {
    /// The tool to call.
    pub tool: Arc<str>,
    /// The entity that it must be about.
    pub about: Option<(Arc<str>, Value)>,
    /// Arguments that are known.
    pub arguments: serde_json::Map<String, Value>,
    /// What a policy will remember of it.
    pub marks: Vec<Change>,
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
    /// It saw the name of a file in a list.
    Listed(String),
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
    /// Evidence that it takes away.
    pub revoked: &'a [Revoked],
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

    /// Whether its word counts, or is only taken down.
    fn mode(&self) -> Mode {
        Mode::Enforce
    }

    /// What is wrong with it in an agent with these tools, if anything. Asked once, when the agent is built.
    fn problems(&self, tools: &[&Spec]) -> Vec<Problem> {
        let _ = tools;
        Vec::new()
    }

    /// What can be known of it before any call, so that an agent's rules can be looked at together.
    fn outline(&self, tool: &Spec) -> Outline<'_> {
        let _ = tool;
        Outline::default()
    }

    /// The tools whose results (or `user` for the user's own words) it wants remembered, if it asks where values
    /// come from at all.
    fn sources(&self) -> Option<Vec<&str>> {
        None
    }

    /// How far back what it decides on may lie; `None` is without end.
    fn looks_back(&self) -> Option<SignedDuration> {
        None
    }

    /// All of it, written down, so that a changed rule is a changed configuration.
    fn definition(&self) -> String {
        self.name().to_owned()
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

    /// After it has denied a call: calls any one of which would be a step towards a "yes", empty where nothing helps;
    /// `None` where that is not known.
    fn remedies(&self, ask: &Ask<'_>) -> Option<Vec<Remedy>> {
        let _ = ask;
        None
    }

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

/// Where a policy is attached, closest first: of several denials, the closest is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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
