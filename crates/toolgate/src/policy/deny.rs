//! `deny` and `ask`: what must not be, or not without a person.

use super::refusal::refusal_setters;
use super::{Ask, Condition, Fault, Policy, Refusal, ToolNames, Verdict};
use crate::error::FieldError;
use crate::json::Pointer;
use crate::tool::Spec;

/// Refuses a call, or asks a person about it, when all its conditions hold. A condition on an argument
/// that is absent holds: what a rule cannot see does not pass it.
///
/// ```
/// use toolgate::policy::{Condition, Deny};
/// let cap = Deny::new("refund_cap", ["issue_refund"])
///     .when("/amount_usd", Condition::Above(500.into()))
///     .reason("Refunds over $500 require human approval.")
///     .redirect("escalate_to_human");
/// ```
#[derive(Debug, Clone)]
pub struct Deny {
    name: String,
    tools: ToolNames,
    conditions: Vec<(Pointer, Condition)>,
    refusal: Refusal,
    asks: bool,
}

impl Deny {
    /// Denies these tools altogether, until a condition is added.
    pub fn new<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>) -> Self {
        let refusal = Refusal::of(name, format!("the rule `{name}` forbids this call"));
        Self { name: name.to_owned(), tools: ToolNames::of(tools), conditions: Vec::new(), refusal, asks: false }
    }

    /// Asks a person instead of denying.
    pub fn ask<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>) -> Self {
        Self { asks: true, ..Self::new(name, tools) }
    }

    /// Speaks only when this holds too.
    #[must_use]
    pub fn when(mut self, argument: impl Into<Pointer>, condition: Condition) -> Self {
        self.conditions.push((argument.into(), condition.normalized()));
        self
    }

    refusal_setters!();
}

impl Policy for Deny {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &Spec) -> bool {
        self.tools.contains(tool.name())
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<String> {
        let arguments = self.conditions.iter().map(|(path, _)| path);
        self.tools
            .unknown(tools)
            .into_iter()
            .chain(self.tools.unknown_arguments(tools, arguments))
            .chain(self.refusal.problems(tools))
            .collect()
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let mut errors = Vec::new();
        for (path, condition) in &self.conditions {
            // Of many places one is enough, and one where nothing stands is one of them.
            let places = ask.arguments_at(path);
            let mut guilty = places.is_empty().then_some(None);
            for place in places {
                if place.map_or(Ok(true), |value| condition.holds(value))? {
                    guilty = Some(place);
                    break;
                }
            }
            let Some(place) = guilty else { return Ok(Verdict::allow()) };
            let got = place.map_or_else(|| "nothing".to_owned(), |value| ask.shown(path, value));
            errors.push(FieldError { path: path.to_string(), expected: condition.opposite(), got, did_you_mean: None });
        }
        if self.asks {
            return Ok(Verdict::ask(self.refusal.reason.clone()));
        }
        let mut error = self.refusal.error();
        error.errors = errors;
        Ok(Verdict::deny(error))
    }
}
