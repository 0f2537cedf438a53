//! Implements `observe`: records the verdicts of a rule without enforcing them.

use super::{Ask, Done, Fault, Mode, Needs, Outline, Policy, Problem, Remedy, Verdict};
use crate::call::error::ToolError;
use crate::session::state::Change;
use crate::tool::Spec;

/// A rule whose verdicts and faults are only recorded.
///
/// The counters of the rule run in full. When the rule is enforced later, they are complete.
#[derive(Debug, Clone)]
pub struct Observe<P>(P);

/// Wraps a rule so that its verdicts are recorded but not enforced.
///
/// ```
/// use toolgate::policy::{Deny, Mode, Policy, observe};
/// let trial = observe(Deny::new("no_weekends", ["deploy"]));
/// assert_eq!(trial.mode(), Mode::Observe);
/// ```
pub const fn observe<P: Policy>(policy: P) -> Observe<P> {
    Observe(policy)
}

impl<P: Policy> Policy for Observe<P> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn governs(&self, tool: &Spec) -> bool {
        self.0.governs(tool)
    }

    fn hears_all(&self) -> bool {
        self.0.hears_all()
    }

    fn mode(&self) -> Mode {
        Mode::Observe
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<Problem> {
        self.0.problems(tools)
    }

    fn outline(&self, tool: &Spec) -> Outline<'_> {
        self.0.outline(tool)
    }

    fn sources(&self) -> Option<Vec<&str>> {
        self.0.sources()
    }

    fn definition(&self) -> String {
        format!("observe {}", self.0.definition())
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        self.0.needs(ask, needs);
    }

    fn looks_back(&self) -> Option<jiff::SignedDuration> {
        self.0.looks_back()
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        self.0.check(ask)
    }

    fn remedies(&self, ask: &Ask<'_>) -> Option<Vec<Remedy>> {
        self.0.remedies(ask)
    }

    fn on_result(&self, done: &Done<'_>) -> Result<Vec<Change>, Fault> {
        self.0.on_result(done)
    }

    fn on_rollback(&self, ask: &Ask<'_>, error: &ToolError) {
        self.0.on_rollback(ask, error);
    }
}
