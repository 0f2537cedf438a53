//! `limit`: at most so many calls, or at most a sum, per session, principal or entity, in a window.

use jiff::SignedDuration;
use rust_decimal::Decimal;
use serde_json::Value;

use super::refusal::refusal_setters;
use super::{Ask, Fault, Policy, Refusal, Terms, ToolNames, Verdict};
use crate::json::{Pointer, decimal_of, with_canonical};
use crate::limits::{Charge, Unit};
use crate::tool::Spec;

/// Whose limit it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Per {
    /// One session.
    Session,
    /// One principal, over all sessions.
    Principal,
    /// What an argument names, over all sessions and principals.
    Entity(Pointer),
}

/// A limit that is reserved before the tool runs, and is settled by what happened.
///
/// ```
/// use toolgate::policy::{Limit, Per};
/// use toolgate::SignedDuration;
/// let daily = Limit::sum("daily_refunds", ["issue_refund"], "/amount_usd", 500.into())
///     .per(Per::Entity("/customer_id".into()))
///     .within(SignedDuration::from_hours(24));
/// ```
#[derive(Debug, Clone)]
pub struct Limit {
    name: String,
    tools: ToolNames,
    /// The argument that is summed; without it calls are counted.
    amount: Option<Pointer>,
    /// An argument that keeps sums apart.
    currency: Option<Pointer>,
    most: Decimal,
    per: Per,
    window: Option<SignedDuration>,
    refusal: Refusal,
}

impl Limit {
    /// At most so many calls.
    pub fn calls<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>, most: u64) -> Self {
        let refusal = Refusal::of(name, format!("the limit `{name}` of {most} calls is reached"));
        Self {
            name: name.to_owned(),
            tools: ToolNames::of(tools),
            amount: None,
            currency: None,
            most: most.into(),
            per: Per::Session,
            window: None,
            refusal,
        }
    }

    /// At most this sum of an argument. Negative amounts are refused.
    pub fn sum<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>, argument: impl Into<Pointer>, most: Decimal) -> Self {
        let refusal = Refusal::of(name, format!("the limit `{name}` of {most} in all would be passed"));
        Self { amount: Some(argument.into()), most, refusal, ..Self::calls(name, tools, 0) }
    }

    /// Whose limit it is: the session's unless said.
    #[must_use]
    pub fn per(mut self, per: Per) -> Self {
        self.per = per;
        self
    }

    /// In any stretch of this length.
    #[must_use]
    pub const fn within(mut self, window: SignedDuration) -> Self {
        self.window = Some(window);
        self
    }

    /// Keeps a sum for each value of this argument.
    #[must_use]
    pub fn currency(mut self, argument: impl Into<Pointer>) -> Self {
        self.currency = Some(argument.into());
        self
    }

    refusal_setters!();

    fn argument<'a>(ask: &Ask<'a>, path: &Pointer) -> Result<&'a Value, Fault> {
        ask.argument(path).ok_or_else(|| Fault::new(format!("there is no `{path}`, and the limit hangs on it")))
    }

    /// The sum of every value at a path.
    fn total(ask: &Ask<'_>, path: &Pointer) -> Result<Decimal, Fault> {
        let values = ask.arguments_at(path);
        if values.is_empty() {
            return Err(Fault::new(format!("there is no `{path}`, and the limit hangs on it")));
        }
        values.into_iter().try_fold(Decimal::ZERO, |sum, value| {
            let amount = value.and_then(decimal_of).ok_or_else(|| Fault::new(format!("`{path}` is no exact number")))?;
            if amount < Decimal::ZERO {
                return Err(Fault::new("a negative amount has no place in a sum"));
            }
            sum.checked_add(amount).ok_or_else(|| Fault::new(format!("`{path}` is too large to add up")))
        })
    }

    fn counter(&self, ask: &Ask<'_>) -> Result<String, Fault> {
        let whose = match &self.per {
            Per::Session => format!("session\u{1f}{}\u{1f}{}", ask.key.principal, ask.key.session),
            Per::Principal => format!("principal\u{1f}{}", ask.key.principal),
            Per::Entity(path) => with_canonical(Self::argument(ask, path)?, |value| format!("entity\u{1f}{value}")),
        };
        let currency = match &self.currency {
            Some(path) => with_canonical(Self::argument(ask, path)?, str::to_owned),
            None => String::new(),
        };
        Ok(format!("limit\u{1f}{}\u{1f}{}\u{1f}{whose}\u{1f}{currency}", ask.key.agent, self.name))
    }
}

impl Policy for Limit {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &Spec) -> bool {
        self.tools.contains(tool.name())
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<String> {
        let entity = match &self.per {
            Per::Entity(path) => Some(path),
            _ => None,
        };
        let arguments = self.amount.iter().chain(&self.currency).chain(entity);
        let mut problems = self.tools.unknown(tools);
        problems.extend(self.tools.unknown_arguments(tools, arguments));
        problems.extend(ToolNames::not_one(self.currency.iter().chain(entity)));
        problems.extend(self.refusal.problems(tools));
        problems
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let amount = match &self.amount {
            None => Decimal::ONE,
            Some(path) => Self::total(ask, path)?,
        };
        let charge = Charge { counter: self.counter(ask)?, amount, cap: self.most, window: self.window, unit: Unit::Fixed };
        Ok(Verdict::Allow(Terms { charges: vec![(charge, self.refusal.error())], ..Terms::default() }))
    }
}
