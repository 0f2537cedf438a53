//! Defines policies: pure, synchronous rules that decide a call from facts loaded beforehand.

mod analysis;
pub mod cel;
mod condition;
mod definition;
mod denial;
mod deny;
mod facts;
mod flow;
mod input;
mod limit;
mod limit_owner;
mod observe;
mod path_candidates;
mod read_before_write;
mod require;
mod sequence;
pub mod source;
mod unsatisfiable;

use std::sync::Arc;

use jiff::SignedDuration;
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use crate::diagnostic::ToolNames;
pub use crate::diagnostic::{Diagnostic, DiagnosticKind, Severity, SourceSpan};
pub use crate::policy::denial::RuleDenial;
pub(crate) use crate::policy::input::home_dir_text;
pub use crate::policy::input::{PolicyInput, RuleCheck, RuleTrace};
pub use crate::policy::limit_owner::{EvidenceEntity, LimitOwner};
pub(crate) use analysis::analyze_rules;
pub use condition::Condition;
pub use deny::Deny;
pub(crate) use facts::MissingFactTracker;
pub use facts::{
    ApprovalFact, CounterReading, DecisionFacts, DedupKeyKind, FactRequest, FileFact, HookFact,
    ObservedVerdict, PriorCallFact,
};
pub use flow::Flow;
pub use limit::Limit;
pub use observe::{Observe, observe};
pub use read_before_write::ReadBeforeWrite;
pub use require::Require;
pub use sequence::Sequence;
pub use source::RuleSet;

use crate::call::error::ToolError;
use crate::files::FileExpectation;
use crate::limits::Charge;
use crate::session::state::{NamedChange, Revocation};
use crate::tool::ToolSpec;
use toolgate_json::{Digest, Pointer};

/// The reason why a policy could not decide; the call is denied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PolicyError(pub String);

impl PolicyError {
    /// Creates a fault with a message for the operator.
    pub fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

/// The decision of a policy.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// Allow the call, with these obligations.
    Allow(Obligations),
    /// Deny the call.
    Deny(Box<ToolError>),
    /// Ask a person, for this reason; if approved, these obligations apply.
    Ask(String, Obligations),
}

impl Verdict {
    /// Allows the call without obligations.
    #[must_use]
    pub fn allow() -> Self {
        Self::Allow(Obligations::default())
    }

    /// Asks a person.
    pub fn ask(reason: impl Into<String>) -> Self {
        Self::Ask(reason.into(), Obligations::default())
    }

    /// Denies the call with an error.
    #[must_use]
    pub fn deny(error: ToolError) -> Self {
        Self::Deny(Box::new(error))
    }
}

/// Obligations that an allowed call must meet.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Obligations {
    /// Charges to reserve at the claim, each with the error for an exhausted limit.
    pub charges: Vec<(Charge, ToolError)>,
    /// The state that files must have when the tool opens them.
    pub file_expectations: Vec<FileExpectation>,
    /// The people who may answer an approval; an empty list means anyone.
    pub approvers: Vec<String>,
}

/// Whether the verdicts of a rule are enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnforcementMode {
    /// Verdicts are enforced.
    #[default]
    Enforce,
    /// Verdicts are only recorded. The counters of the rule still run.
    Observe,
}

/// The effects of a rule on one tool that are known before any call.
#[derive(Debug, Clone, Default)]
pub struct StaticSummary<'a> {
    /// Groups of tools, each with the rule field that requires it.
    ///
    /// One tool of each group must have succeeded.
    pub prerequisites: Vec<(String, Vec<&'a str>)>,
    /// The calls that the rule denies or asks about.
    pub denies: Option<DenySummary<'a>>,
    /// The limit that the rule sets.
    pub limit: Option<LimitSummary<'a>>,
    /// Whether the rule needs the file system.
    pub needs_files: bool,
}

/// The calls that a rule denies: those for which all conditions hold.
#[derive(Debug, Clone, Copy)]
pub struct DenySummary<'a> {
    /// The conditions, all of which must hold.
    pub conditions: &'a [(Pointer, Condition)],
    /// Whether the rule depends on more than the conditions.
    pub has_other_conditions: bool,
    /// Whether the rule asks a person instead of denying.
    pub asks_person: bool,
}

/// The limit that a rule sets.
#[derive(Debug, Clone, Copy)]
pub struct LimitSummary<'a> {
    /// The argument that is summed; `None` counts calls.
    pub summed_argument: Option<&'a Pointer>,
    /// The argument whose values have separate sums.
    pub currency: Option<&'a Pointer>,
    /// The maximum.
    pub max: Decimal,
    /// The owner of the limit.
    pub owner: &'a LimitOwner,
    /// The length of the time window.
    pub window: Option<SignedDuration>,
}

impl dyn Policy {
    /// Returns whether the rule denies calls of one of these tools on its own.
    pub fn can_deny_any<'a>(&self, mut tools: impl Iterator<Item = &'a ToolSpec>) -> bool {
        tools.any(|tool| {
            self.governs(tool)
                && self.static_summary(tool).denies.is_some_and(|forbids| !forbids.asks_person)
        })
    }
}

/// A call that would bring a denied call closer to being allowed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prerequisite {
    /// The tool to call.
    pub tool: Arc<str>,
    /// The entity that the call must be about.
    pub about: Option<(Arc<str>, Value)>,
    /// The arguments that are known.
    pub arguments: serde_json::Map<String, Value>,
    /// The marks that a policy will store after the call.
    pub marks: Vec<NamedChange>,
}

/// A file access by a tool, recorded in addition to the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileAccess {
    /// The tool read a whole file.
    Read(String, Digest),
    /// The tool wrote a file.
    Wrote(String, Digest),
    /// The tool removed a file.
    Removed(String),
    /// The tool listed a file name.
    Listed(String),
}

/// A successful call and its effects.
#[derive(Debug, Clone, Copy)]
pub struct SuccessfulCall<'a> {
    /// The call as the policies checked it.
    pub input: PolicyInput<'a>,
    /// The result as the model sees it.
    pub value: &'a Value,
    /// The file accesses of the tool.
    pub file_accesses: &'a [FileAccess],
    /// The evidence that the call revokes.
    pub revoked: &'a [Revocation],
}

/// A rule that decides calls.
///
/// ```
/// use toolgate::policy::{PolicyInput, PolicyError, Policy, Verdict};
/// use toolgate::{ErrorCategory, ToolSpec, ToolError};
///
/// struct OfficeHours;
/// impl Policy for OfficeHours {
///     fn name(&self) -> &str { "office_hours" }
///     fn governs(&self, tool: &ToolSpec) -> bool { tool.name() == "call_customer" }
///     fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
///         let hour = input.facts.now.to_zoned(jiff::tz::TimeZone::UTC).hour();
///         if (8..18).contains(&hour) { return Ok(Verdict::allow()); }
///         Ok(Verdict::deny(ToolError::new(ErrorCategory::Business, "office_hours", "Customers are called from 8 to 18 UTC.")))
///     }
/// }
/// ```
pub trait Policy: Send + Sync {
    /// Returns the name, which is unique in the agent.
    fn name(&self) -> &str;

    /// Returns whether the rule governs this tool; called once, when the agent is built.
    fn governs(&self, tool: &ToolSpec) -> bool {
        let _ = tool;
        true
    }

    /// Returns whether the rule observes the results of all tools, not only of those it governs.
    fn observes_all_tools(&self) -> bool {
        false
    }

    /// Returns whether verdicts are enforced or only recorded.
    fn mode(&self) -> EnforcementMode {
        EnforcementMode::Enforce
    }

    /// Returns the problems of the rule in an agent with these tools; called once, when the agent
    /// is built.
    fn problems(&self, tools: &[&ToolSpec]) -> Vec<Diagnostic> {
        let _ = tools;
        Vec::new()
    }

    /// Returns the effects known before any call, so that the rules of an agent can be analyzed
    /// together.
    fn static_summary(&self, tool: &ToolSpec) -> StaticSummary<'_> {
        let _ = tool;
        StaticSummary::default()
    }

    /// Returns the tools (or `user` for the user's own words) whose values must be recorded; `None`
    /// if the rule does not use provenance.
    fn provenance_sources(&self) -> Option<Vec<&str>> {
        None
    }

    /// Returns the maximum age of the history that the rule depends on; `None` is unlimited.
    fn lookback_window(&self) -> Option<SignedDuration> {
        None
    }

    /// Returns the complete definition as text, so that a changed rule changes the configuration
    /// digest.
    fn definition(&self) -> String {
        self.name().to_owned()
    }

    /// Requests the facts that the rule needs.
    ///
    /// At this point the facts of `input` contain only the time and the answers of hooks.
    fn request_facts(&self, input: &PolicyInput<'_>, needs: &mut FactRequest) {
        let _ = (input, needs);
    }

    /// Decides the call from `input` alone.
    ///
    /// # Errors
    /// Returns a fault if the rule cannot decide; the call is then denied.
    fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError>;

    /// Returns, for a call that this rule has denied, calls that would help.
    ///
    /// Each of them is a step towards an allowed call. An empty list means that no call helps,
    /// `None` that this is unknown.
    fn suggest_prerequisites(&self, input: &PolicyInput<'_>) -> Option<Vec<Prerequisite>> {
        let _ = input;
        None
    }

    /// Observes a successful call and returns marks, which are committed with the call.
    ///
    /// # Errors
    /// Returns a fault to fail the call.
    fn on_result(&self, done: &SuccessfulCall<'_>) -> Result<Vec<NamedChange>, PolicyError> {
        let _ = done;
        Ok(Vec::new())
    }

    /// Observes that a call which this rule allowed has failed and left the session unchanged.
    fn on_rollback(&self, input: &PolicyInput<'_>, error: &ToolError) {
        let _ = (input, error);
    }
}

/// The level at which a policy is attached, most specific first.
///
/// Of several denials, the most specific one is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLevel {
    /// One tool.
    Tool,
    /// A section of the prompt.
    Section,
    /// The prompt.
    Prompt,
    /// The agent.
    Agent,
}

/// A policy and the level at which it is attached.
#[derive(Clone)]
pub(crate) struct AttachedPolicy {
    pub(crate) level: PolicyLevel,
    pub(crate) policy: Arc<dyn Policy>,
}
