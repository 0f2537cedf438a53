//! Declares the policies of the test world.

use toolgate::limits::{Charge, ChargeUnit};
use toolgate::policy::{Obligations, Policy, PolicyError, PolicyInput, Verdict};
use toolgate::{ErrorCategory, ToolError};

/// Charges one unit of the counter `meter` for every call of `act`.
pub(super) struct MeterPolicy;

pub(crate) fn meter_charge(amount: i64) -> Charge {
    Charge {
        counter: "meter".into(),
        amount: amount.into(),
        cap: 100.into(),
        window: None,
        unit: ChargeUnit::Fixed,
    }
}

impl Policy for MeterPolicy {
    fn name(&self) -> &str {
        "meter"
    }
    fn governs(&self, tool: &toolgate::ToolSpec) -> bool {
        tool.name() == "act"
    }
    fn check(&self, _: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        let error = ToolError::new(ErrorCategory::Business, "meter_full", "the meter is full");
        Ok(Verdict::Allow(Obligations {
            charges: vec![(meter_charge(1), error)],
            ..Obligations::default()
        }))
    }
}

/// Wraps a closure as a policy.
pub(crate) struct ClosurePolicy<F>(&'static str, F);

pub(crate) fn closure_policy<
    F: Fn(&PolicyInput<'_>) -> Result<Verdict, PolicyError> + Send + Sync,
>(
    name: &'static str,
    check: F,
) -> ClosurePolicy<F> {
    ClosurePolicy(name, check)
}

impl<F: Fn(&PolicyInput<'_>) -> Result<Verdict, PolicyError> + Send + Sync> Policy
    for ClosurePolicy<F>
{
    fn name(&self) -> &str {
        self.0
    }
    fn check(&self, ask: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        (self.1)(ask)
    }
}
