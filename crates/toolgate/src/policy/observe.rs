//! Implements `observe`: records the verdicts of a rule without enforcing them.

use super::{
    Diagnostic, EnforcementMode, FactRequest, Policy, PolicyError, PolicyInput, Prerequisite,
    StaticSummary, SuccessfulCall, Verdict,
};
use crate::call::error::ToolError;
use crate::session::state::NamedChange;
use crate::tool::ToolSpec;

/// A rule whose verdicts and faults are only recorded.
///
/// The counters of the rule run in full. When the rule is enforced later, they are complete.
#[derive(Debug, Clone)]
pub struct Observe<P>(P);

/// Wraps a rule so that its verdicts are recorded but not enforced.
///
/// ```
/// use toolgate::policy::{Deny, EnforcementMode, Policy, observe};
/// let trial = observe(Deny::new("no_weekends", ["deploy"]));
/// assert_eq!(trial.mode(), EnforcementMode::Observe);
/// ```
pub const fn observe<P: Policy>(policy: P) -> Observe<P> {
    Observe(policy)
}

impl<P: Policy> Policy for Observe<P> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn governs(&self, tool: &ToolSpec) -> bool {
        self.0.governs(tool)
    }

    fn observes_all_tools(&self) -> bool {
        self.0.observes_all_tools()
    }

    fn mode(&self) -> EnforcementMode {
        EnforcementMode::Observe
    }

    fn problems(&self, tools: &[&ToolSpec]) -> Vec<Diagnostic> {
        self.0.problems(tools)
    }

    fn static_summary(&self, tool: &ToolSpec) -> StaticSummary<'_> {
        self.0.static_summary(tool)
    }

    fn provenance_sources(&self) -> Option<Vec<&str>> {
        self.0.provenance_sources()
    }

    fn definition(&self) -> String {
        format!("observe {}", self.0.definition())
    }

    fn request_facts(&self, input: &PolicyInput<'_>, needs: &mut FactRequest) {
        self.0.request_facts(input, needs);
    }

    fn lookback_window(&self) -> Option<jiff::SignedDuration> {
        self.0.lookback_window()
    }

    fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        self.0.check(input)
    }

    fn suggest_prerequisites(&self, input: &PolicyInput<'_>) -> Option<Vec<Prerequisite>> {
        self.0.suggest_prerequisites(input)
    }

    fn on_result(&self, done: &SuccessfulCall<'_>) -> Result<Vec<NamedChange>, PolicyError> {
        self.0.on_result(done)
    }

    fn on_rollback(&self, input: &PolicyInput<'_>, error: &ToolError) {
        self.0.on_rollback(input, error);
    }
}
