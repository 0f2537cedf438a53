//! Implements `limit`: a maximum number of calls, or a maximum sum, per session, principal or
//! entity, optionally in a time window.

use jiff::SignedDuration;
use rust_decimal::Decimal;
use serde_json::{Value, json};

use std::sync::Arc;

use super::definition;
use super::{Ask, Caps, Fault, Needs, Note, Outline, Policy, Problem, Refusal, Remedy, Terms, ToolNames, Verdict};
use crate::call::error::{FieldError, ToolError};
use crate::diagnostic::{not_one, secret_key, unknown_tool};
use crate::limits::{Charge, Unit};
use crate::policy::denial::refusal_setters;
use crate::schema::{At, at, may_be, resolve};
use crate::session::state::Origin;
use crate::tool::Spec;
use toolgate_json::{Pointer, decimal_of, with_canonical_text};

/// Describes the values that can be summed.
const AMOUNT: &str = "a number of at least 0, with at most 28 digits";

/// An argument that a limit cannot use.
struct Unusable<'a> {
    path: &'a Pointer,
    /// The value at the path, if any.
    found: Option<&'a Value>,
    /// The expected value.
    expected: &'static str,
    /// The message for the operator, if the model cannot correct the argument.
    reason: String,
}

impl<'a> Unusable<'a> {
    fn missing(path: &'a Pointer, expected: &'static str) -> Self {
        Self { path, found: None, expected, reason: format!("`{path}` is missing, and the limit depends on it") }
    }

    /// Returns whether the model can correct the argument.
    ///
    /// The schema of the tool must allow the argument, and a number if one is expected.
    fn can_be_mended(&self, tool: &Spec) -> bool {
        let schema = match at(tool, self.path) {
            At::Missing(..) => return false,
            At::Open => return true,
            At::Known(schema) => schema,
        };
        let is_number = |kind: &Value| matches!(kind.as_str(), Some("number" | "integer"));
        match tool.input_schema().and_then(|root| resolve(schema, root)).and_then(|map| map.get("type")) {
            _ if self.expected != AMOUNT => true,
            None => true,
            Some(Value::Array(kinds)) => kinds.iter().any(is_number),
            Some(kind) => is_number(kind),
        }
    }
}

/// Returns whether a proved field can identify the owner of a limit.
///
/// Null and blank text identify no owner. A list or an object may have another order or more
/// members in the next call, and would then get a counter of its own.
fn is_a_name(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.trim().is_empty(),
        Value::Number(_) | Value::Bool(_) => true,
        Value::Null | Value::Array(_) | Value::Object(_) => false,
    }
}

/// The owner of a limit: each owner has its own counter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Per {
    /// A session.
    Session,
    /// A principal, over all its sessions.
    Principal,
    /// The entity that an argument names, over all sessions and principals.
    Entity(Pointer),
    /// The entity that evidence names, over all sessions and principals.
    ///
    /// The order names the customer, not the model.
    ProvedEntity(Box<Proved>),
}

/// An entity that evidence names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proved {
    /// The tool whose success is the evidence.
    pub tool: Arc<str>,
    /// The entity that the evidence is about, and the argument that names it.
    pub entity: (Arc<str>, Pointer),
    /// The proved field that names the owner of the limit.
    pub field: Pointer,
    /// The argument that names the owner if there is no evidence.
    ///
    /// Without this argument, missing evidence is a denial.
    pub fallback: Option<Pointer>,
}

/// A limit that reserves an amount before the tool runs and settles it by the outcome.
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
    /// The argument that is summed; `None` counts calls.
    amount: Option<Pointer>,
    /// An argument whose values have separate sums.
    currency: Option<Pointer>,
    max: Decimal,
    per: Per,
    window: Option<SignedDuration>,
    refusal: Refusal,
}

impl Limit {
    /// Returns what [`Policy::definition`] is made of.
    pub(super) fn definition_parts(&self) -> Value {
        let per = match &self.per {
            Per::Session => json!("session"),
            Per::Principal => json!("principal"),
            Per::Entity(path) => json!({ "entity": path.to_string() }),
            Per::ProvedEntity(proved) => json!({
                "tool": proved.tool,
                "same": [proved.entity.0, proved.entity.1.to_string()],
                "field": proved.field.to_string(),
                "otherwise": proved.fallback.as_ref().map(definition::pointer),
            }),
        };
        json!({
            "name": self.name,
            "tools": definition::names(&self.tools),
            "amount": self.amount.as_ref().map(definition::pointer),
            "currency": self.currency.as_ref().map(definition::pointer),
            "max": self.max.to_string(),
            "per": per,
            "window": self.window.map(definition::duration),
            "refusal": definition::refusal(&self.refusal),
        })
    }

    /// Limits the number of calls.
    pub fn calls<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>, most: u64) -> Self {
        let refusal = Refusal::of(name, format!("the limit `{name}` of {most} calls is reached"));
        Self {
            name: name.to_owned(),
            tools: ToolNames::of(tools),
            amount: None,
            currency: None,
            max: most.into(),
            per: Per::Session,
            window: None,
            refusal,
        }
    }

    /// Limits the sum of an argument.
    ///
    /// An amount that cannot be summed, such as a negative one, is denied as an invalid argument.
    pub fn sum<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>, argument: impl Into<Pointer>, most: Decimal) -> Self {
        let refusal = Refusal::of(name, format!("the limit `{name}` of {most} in total would be exceeded"));
        Self { amount: Some(argument.into()), max: most, refusal, ..Self::calls(name, tools, 0) }
    }

    /// Sets the owner of the limit [default: the session].
    #[must_use]
    pub fn per(mut self, per: Per) -> Self {
        self.per = per;
        self
    }

    /// Applies the limit to any time window of this length.
    #[must_use]
    pub const fn within(mut self, window: SignedDuration) -> Self {
        self.window = Some(window);
        self
    }

    /// Keeps a separate sum for each value of this argument, ignoring case and outer spaces.
    #[must_use]
    pub fn currency(mut self, argument: impl Into<Pointer>) -> Self {
        self.currency = Some(argument.into());
        self
    }

    refusal_setters!();

    /// Returns the length of the time window.
    pub(super) const fn window(&self) -> Option<SignedDuration> {
        self.window
    }

    /// Returns the argument that names the owner.
    fn whose(&self) -> Option<&Pointer> {
        match &self.per {
            Per::Session | Per::Principal => None,
            Per::Entity(path) => Some(path),
            Per::ProvedEntity(proved) => Some(&proved.entity.1),
        }
    }

    /// Returns an argument that the counter depends on and that the tool does not accept.
    pub(super) fn lacks(&self, tool: &Spec) -> Option<&Pointer> {
        self.currency.iter().chain(self.whose()).find(|path| matches!(crate::schema::at(tool, path), crate::schema::At::Missing(..)))
    }

    /// Reports a summed argument that is never a number.
    fn never_adds_up(&self, tool: &Spec) -> Option<Problem> {
        let path = self.amount.as_ref()?;
        let At::Known(schema) = at(tool, path) else { return None };
        let map = resolve(schema, tool.input_schema()?)?;
        if may_be(map, "number") || may_be(map, "integer") {
            return None;
        }
        let problem = Problem::at("sum", format!("`{path}` of `{}` is never a number, so it cannot be summed", tool.name()));
        Some(problem.help("name an argument that is declared as a number"))
    }

    pub(super) fn is_called(&self, name: &str) -> bool {
        self.name == name
    }

    fn argument<'a>(ask: &Ask<'a>, path: &Pointer) -> Result<&'a Value, Fault> {
        ask.said(path).ok_or_else(|| Fault::new(format!("`{path}` is missing, and the limit depends on it")))
    }

    /// Returns the sum of all values at a path.
    fn total<'a>(ask: &Ask<'a>, path: &'a Pointer) -> Result<Decimal, Unusable<'a>> {
        let values = ask.arguments_at(path);
        if values.is_empty() {
            return Err(Unusable::missing(path, AMOUNT));
        }
        values.into_iter().try_fold(Decimal::ZERO, |sum, found| {
            let wrong = |why: String| Unusable { path, found, expected: AMOUNT, reason: why };
            let amount = found.and_then(decimal_of).ok_or_else(|| wrong(format!("`{path}` is not an exact number")))?;
            if amount < Decimal::ZERO {
                return Err(wrong("a sum accepts no negative amounts".to_owned()));
            }
            sum.checked_add(amount).ok_or_else(|| wrong(format!("the sum of `{path}` is too large")))
        })
    }

    /// Returns an argument that names the owner or the currency and is missing.
    fn unsaid<'a>(&'a self, ask: &Ask<'a>) -> Option<Unusable<'a>> {
        let missing = self.whose().into_iter().chain(&self.currency).find(|path| ask.said(path).is_none())?;
        Some(Unusable { found: ask.argument(missing), ..Unusable::missing(missing, "given") })
    }

    /// Denies a call with an unusable argument.
    ///
    /// The model can correct such an argument, as it corrects one that does not fit the schema. If
    /// the declaration of the tool rules out a usable value, or if the arguments are not complete
    /// yet, the result is a fault.
    fn cannot_use(&self, ask: &Ask<'_>, wrong: &Unusable<'_>) -> Result<Verdict, Fault> {
        if ask.is_sketch || !wrong.can_be_mended(ask.tool) {
            return Err(Fault::new(wrong.reason.clone()));
        }
        let path = wrong.path;
        let got = wrong.found.map_or_else(|| "nothing".to_owned(), |value| ask.shown(path, value));
        let expected = wrong.expected.to_owned();
        let message =
            format!("{}: `{path}` must be {expected}, because the limit `{}` depends on it; got {got}", ask.tool.name(), self.name);
        let mut error = ToolError::of(crate::call::error_code::INVALID_ARGUMENTS, message);
        error.errors.push(FieldError { path: path.to_string(), expected, got, did_you_mean: None });
        Ok(Verdict::deny(error))
    }

    /// Returns the entity that evidence names, or the fallback argument.
    fn proved_entity<'a>(ask: &Ask<'a>, proved: &Proved) -> Result<&'a Value, Fault> {
        let (entity, argument) = &proved.entity;
        let about = Self::argument(ask, argument)?;
        let evidence = ask.evidence_of(&proved.tool, Some((entity, about)), false)?;
        match (evidence, &proved.fallback) {
            // If there is evidence, it must name the owner. The model must not choose the owner.
            (Some(proof), _) => proof
                .fields
                .get(proved.field.to_string())
                .filter(|whose| is_a_name(whose))
                .ok_or_else(|| Fault::new(format!("the evidence of `{}` does not name the owner of the limit", proved.tool))),
            (None, Some(path)) => Self::argument(ask, path),
            (None, None) => Err(Fault::new(format!("there is no evidence of `{}` yet that names the owner of the limit", proved.tool))),
        }
    }

    fn is_assumed(&self, ask: &Ask<'_>) -> bool {
        let Per::ProvedEntity(proved) = &self.per else { return false };
        let Some(about) = ask.argument(&proved.entity.1) else { return false };
        let evidence = ask.evidence_of(&proved.tool, Some((&proved.entity.0, about)), false);
        matches!(evidence, Ok(Some(proof)) if proof.origin == Origin::Assumed)
    }

    /// Returns the name of the counter that a call is charged to.
    pub(super) fn counter(&self, ask: &Ask<'_>) -> Result<String, Fault> {
        let whose = match &self.per {
            Per::Session => format!("session\u{1f}{}\u{1f}{}", ask.key.principal, ask.key.session),
            Per::Principal => format!("principal\u{1f}{}", ask.key.principal),
            Per::Entity(path) => with_canonical_text(Self::argument(ask, path)?, |value| format!("entity\u{1f}{value}")),
            Per::ProvedEntity(proved) => with_canonical_text(Self::proved_entity(ask, proved)?, |value| format!("entity\u{1f}{value}")),
        };
        let currency = match &self.currency {
            // All spellings of a currency code share one counter.
            Some(path) => match Self::argument(ask, path)? {
                Value::String(code) => with_canonical_text(&Value::String(code.trim().to_ascii_uppercase()), str::to_owned),
                other => with_canonical_text(other, str::to_owned),
            },
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

    fn looks_back(&self) -> Option<SignedDuration> {
        // The evidence that names the owner may be of any age.
        self.window.filter(|_| !matches!(self.per, Per::ProvedEntity(_)))
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<Problem> {
        let mut arguments: Vec<(String, &Pointer)> = Vec::new();
        arguments.extend(self.amount.iter().map(|path| ("sum".to_owned(), path)));
        let mut single: Vec<(String, &Pointer)> = self.currency.iter().map(|path| ("currency".to_owned(), path)).collect();
        match &self.per {
            Per::Session | Per::Principal => {}
            Per::Entity(path) => single.push(("per".to_owned(), path)),
            Per::ProvedEntity(proved) => {
                single.push((format!("per.same.{}", proved.entity.0), &proved.entity.1));
                single.extend(proved.fallback.iter().map(|path| ("per.argument".to_owned(), path)));
            }
        }
        let mut problems = self.tools.unknown("tools", tools);
        problems.extend(single.iter().filter_map(|(field, path)| not_one(field, path)));
        let governed: Vec<&Spec> = tools.iter().copied().filter(|tool| self.governs(tool)).collect();
        problems.extend(single.iter().filter_map(|(field, path)| secret_key(field, path, &governed)));
        problems.extend(governed.iter().filter_map(|tool| self.never_adds_up(tool)));
        arguments.append(&mut single);
        problems.extend(self.tools.unknown_arguments(tools, arguments.into_iter()));
        if let Per::ProvedEntity(proved) = &self.per {
            problems.extend(unknown_tool("per.proved_by", &proved.tool, tools));
            for source in tools.iter().filter(|tool| *proved.tool == *tool.name()) {
                problems.extend(source.lacks_entity(&format!("per.same.{}", proved.entity.0), &proved.entity.0));
                problems.extend(source.lacks_proof("per.field", &proved.field));
                problems.extend(source.run_by_client("per.proved_by"));
            }
        }
        if self.max < Decimal::ZERO {
            problems.push(Problem::at("max", format!("the limit is negative: {}", self.max)));
        }
        if self.window.is_some_and(|window| window <= SignedDuration::ZERO) {
            problems.push(Problem::at("within", "the window must be longer than 0").help("like `24h`"));
        }
        problems.extend(self.refusal.problems(tools));
        problems
    }

    fn outline(&self, _: &Spec) -> Outline<'_> {
        let caps = Caps {
            summed_argument: self.amount.as_ref(),
            currency: self.currency.as_ref(),
            max: self.max,
            per: &self.per,
            window: self.window,
        };
        Outline { limit: Some(caps), ..Outline::default() }
    }

    fn definition(&self) -> String {
        definition::definition("limit", &self.definition_parts())
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        if let Per::ProvedEntity(proved) = &self.per
            && let Some(about) = ask.argument(&proved.entity.1)
        {
            needs.evidence_of(&proved.tool, Some((&proved.entity.0, about)), false);
        }
    }

    fn remedies(&self, ask: &Ask<'_>) -> Option<Vec<Remedy>> {
        let Per::ProvedEntity(proved) = &self.per else { return None };
        let (entity, argument) = &proved.entity;
        let about = (Arc::clone(entity), ask.argument(argument)?.clone());
        let known = ask.evidence_of(&proved.tool, Some((&about.0, &about.1)), false).ok()?;
        Some(if known.is_some() {
            Vec::new()
        } else {
            vec![Remedy { tool: Arc::clone(&proved.tool), about: Some(about), ..Remedy::default() }]
        })
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        // The owner is known only after the tool has run.
        if self.is_assumed(ask) {
            return Ok(Verdict::allow());
        }
        let amount = match self.amount.as_ref().map_or(Ok(Decimal::ONE), |path| Self::total(ask, path)) {
            Ok(amount) => amount,
            Err(wrong) => return self.cannot_use(ask, &wrong),
        };
        if let Some(wrong) = self.unsaid(ask) {
            return self.cannot_use(ask, &wrong);
        }
        ask.note(|| {
            let secret = self.amount.as_ref().is_some_and(|path| ask.is_secret(path));
            let found = if secret { "(hidden)".to_owned() } else { format!("{amount} more") };
            Note { what: format!("at most {}", self.max), found, holds: amount <= self.max }
        });
        let charge = Charge { counter: self.counter(ask)?, amount, cap: self.max, window: self.window, unit: Unit::Fixed };
        Ok(Verdict::Allow(Terms { charges: vec![(charge, self.refusal.error())], ..Terms::default() }))
    }
}
