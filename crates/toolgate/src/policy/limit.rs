//! `limit`: at most so many calls, or at most a sum, per session, principal or entity, in a window.

use jiff::SignedDuration;
use rust_decimal::Decimal;
use serde_json::Value;

use std::sync::Arc;

use super::problem::{not_one, secret_key, unknown_tool};
use super::refusal::refusal_setters;
use super::{Ask, Caps, Fault, Needs, Note, Outline, Policy, Problem, Refusal, Remedy, Terms, ToolNames, Verdict};
use crate::error::{FieldError, ToolError};
use crate::json::{Pointer, decimal_of, with_canonical};
use crate::limits::{Charge, Unit};
use crate::schema::{At, at, may_be, resolve};
use crate::session::Origin;
use crate::tool::Spec;

/// What can be added up.
const AMOUNT: &str = "a number of at least 0, with at most 28 digits";

/// An argument that a limit cannot use.
struct Unusable<'a> {
    path: &'a Pointer,
    /// What stands there, if anything.
    found: Option<&'a Value>,
    /// What should.
    expected: &'static str,
    /// For the operator, where nobody else can mend it.
    why: String,
}

impl<'a> Unusable<'a> {
    fn missing(path: &'a Pointer, expected: &'static str) -> Self {
        Self { path, found: None, expected, why: format!("there is no `{path}`, and the limit hangs on it") }
    }

    /// Whether another call could be right: the schema of the tool lets the argument be there, and be a number where one is wanted.
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

/// Whether a proved field says whose a limit is. Null, blank text, and a list or an object, which has an order or more members another
/// time, would be purses of their own.
fn is_a_name(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.trim().is_empty(),
        Value::Number(_) | Value::Bool(_) => true,
        Value::Null | Value::Array(_) | Value::Object(_) => false,
    }
}

/// Whose limit it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Per {
    /// One session.
    Session,
    /// One principal, over all sessions.
    Principal,
    /// What an argument names, over all sessions and principals.
    Entity(Pointer),
    /// What evidence names, over all sessions and principals: the order says whose it is, not the model.
    Proved(Box<Proved>),
}

/// An entity that evidence names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proved {
    /// The tool whose success is the evidence.
    pub tool: Arc<str>,
    /// The entity that the evidence is about, and the argument that names it.
    pub same: (Arc<str>, Pointer),
    /// The proved field that says whose limit it is.
    pub field: Pointer,
    /// The argument that counts where there is no evidence; without one, no evidence is a denial.
    pub otherwise: Option<Pointer>,
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

    /// At most this sum of an argument. What cannot be added up, such as a negative amount, is refused as an invalid argument.
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

    /// Keeps a sum for each value of this argument. Small letters and capitals are the same, and so are spaces around them.
    #[must_use]
    pub fn currency(mut self, argument: impl Into<Pointer>) -> Self {
        self.currency = Some(argument.into());
        self
    }

    refusal_setters!();

    /// How far back it looks.
    pub(super) const fn window(&self) -> Option<SignedDuration> {
        self.window
    }

    /// The argument that says whose it is.
    fn whose(&self) -> Option<&Pointer> {
        match &self.per {
            Per::Session | Per::Principal => None,
            Per::Entity(path) => Some(path),
            Per::Proved(proved) => Some(&proved.same.1),
        }
    }

    /// An argument that its counter hangs on and a tool does not take.
    pub(super) fn lacks(&self, tool: &Spec) -> Option<&Pointer> {
        self.currency.iter().chain(self.whose()).find(|path| matches!(crate::schema::at(tool, path), crate::schema::At::Missing(..)))
    }

    /// What is never a number does not add up.
    fn never_adds_up(&self, tool: &Spec) -> Option<Problem> {
        let path = self.amount.as_ref()?;
        let At::Known(schema) = at(tool, path) else { return None };
        let map = resolve(schema, tool.input_schema()?)?;
        if may_be(map, "number") || may_be(map, "integer") {
            return None;
        }
        let problem = Problem::at("sum", format!("`{path}` of `{}` is never a number, and only numbers add up", tool.name()));
        Some(problem.help("name an argument that is declared as a number"))
    }

    pub(super) fn is_called(&self, name: &str) -> bool {
        self.name == name
    }

    fn argument<'a>(ask: &Ask<'a>, path: &Pointer) -> Result<&'a Value, Fault> {
        ask.said(path).ok_or_else(|| Fault::new(format!("there is no `{path}`, and the limit hangs on it")))
    }

    /// The sum of every value at a path.
    fn total<'a>(ask: &Ask<'a>, path: &'a Pointer) -> Result<Decimal, Unusable<'a>> {
        let values = ask.arguments_at(path);
        if values.is_empty() {
            return Err(Unusable::missing(path, AMOUNT));
        }
        values.into_iter().try_fold(Decimal::ZERO, |sum, found| {
            let wrong = |why: String| Unusable { path, found, expected: AMOUNT, why };
            let amount = found.and_then(decimal_of).ok_or_else(|| wrong(format!("`{path}` is no exact number")))?;
            if amount < Decimal::ZERO {
                return Err(wrong("a negative amount has no place in a sum".to_owned()));
            }
            sum.checked_add(amount).ok_or_else(|| wrong(format!("`{path}` is too large to add up")))
        })
    }

    /// An argument that says whose the limit is, and is not there.
    fn unsaid<'a>(&'a self, ask: &Ask<'a>) -> Option<Unusable<'a>> {
        let missing = self.whose().into_iter().chain(&self.currency).find(|path| ask.said(path).is_none())?;
        Some(Unusable { found: ask.argument(missing), ..Unusable::missing(missing, "given") })
    }

    /// An argument that cannot be used is the model's to mend, as one that does not fit the schema. What the tool's own declaration does not let
    /// be otherwise, the model cannot mend, and what is not known yet may still come: that is a fault.
    fn cannot_use(&self, ask: &Ask<'_>, wrong: &Unusable<'_>) -> Result<Verdict, Fault> {
        if ask.sketch || !wrong.can_be_mended(ask.tool) {
            return Err(Fault::new(wrong.why.clone()));
        }
        let path = wrong.path;
        let got = wrong.found.map_or_else(|| "nothing".to_owned(), |value| ask.shown(path, value));
        let expected = wrong.expected.to_owned();
        let message = format!("{}: `{path}` must be {expected}, for the limit `{}` hangs on it; got {got}", ask.tool.name(), self.name);
        let mut error = ToolError::of(crate::code::INVALID_ARGUMENTS, message);
        error.errors.push(FieldError { path: path.to_string(), expected, got, did_you_mean: None });
        Ok(Verdict::deny(error))
    }

    /// The entity as evidence names it, where there is any.
    fn proved_entity<'a>(ask: &Ask<'a>, proved: &Proved) -> Result<&'a Value, Fault> {
        let (entity, argument) = &proved.same;
        let about = Self::argument(ask, argument)?;
        let evidence = ask.evidence_of(&proved.tool, Some((entity, about)), false)?;
        match (evidence, &proved.otherwise) {
            // Where there is evidence, it must say whose limit it is: the model does not get to.
            (Some(proof), _) => proof
                .fields
                .get(proved.field.to_string())
                .filter(|whose| is_a_name(whose))
                .ok_or_else(|| Fault::new(format!("what `{}` has proved does not say whose limit this is", proved.tool))),
            (None, Some(path)) => Self::argument(ask, path),
            (None, None) => Err(Fault::new(format!("`{}` has proved nothing yet about whose limit this is", proved.tool))),
        }
    }

    fn is_assumed(&self, ask: &Ask<'_>) -> bool {
        let Per::Proved(proved) = &self.per else { return false };
        let Some(about) = ask.argument(&proved.same.1) else { return false };
        let evidence = ask.evidence_of(&proved.tool, Some((&proved.same.0, about)), false);
        matches!(evidence, Ok(Some(proof)) if proof.origin == Origin::Assumed)
    }

    /// The counter that a call is charged to.
    pub(super) fn counter(&self, ask: &Ask<'_>) -> Result<String, Fault> {
        let whose = match &self.per {
            Per::Session => format!("session\u{1f}{}\u{1f}{}", ask.key.principal, ask.key.session),
            Per::Principal => format!("principal\u{1f}{}", ask.key.principal),
            Per::Entity(path) => with_canonical(Self::argument(ask, path)?, |value| format!("entity\u{1f}{value}")),
            Per::Proved(proved) => with_canonical(Self::proved_entity(ask, proved)?, |value| format!("entity\u{1f}{value}")),
        };
        let currency = match &self.currency {
            // However a code is written, it is one purse.
            Some(path) => match Self::argument(ask, path)? {
                Value::String(code) => with_canonical(&Value::String(code.trim().to_ascii_uppercase()), str::to_owned),
                other => with_canonical(other, str::to_owned),
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
        // Whose it is may have been proved at any time.
        self.window.filter(|_| !matches!(self.per, Per::Proved(_)))
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<Problem> {
        let mut arguments: Vec<(String, &Pointer)> = Vec::new();
        arguments.extend(self.amount.iter().map(|path| ("sum".to_owned(), path)));
        let mut single: Vec<(String, &Pointer)> = self.currency.iter().map(|path| ("currency".to_owned(), path)).collect();
        match &self.per {
            Per::Session | Per::Principal => {}
            Per::Entity(path) => single.push(("per".to_owned(), path)),
            Per::Proved(proved) => {
                single.push((format!("per.same.{}", proved.same.0), &proved.same.1));
                single.extend(proved.otherwise.iter().map(|path| ("per.argument".to_owned(), path)));
            }
        }
        let mut problems = self.tools.unknown("tools", tools);
        problems.extend(single.iter().filter_map(|(field, path)| not_one(field, path)));
        let governed: Vec<&Spec> = tools.iter().copied().filter(|tool| self.governs(tool)).collect();
        problems.extend(single.iter().filter_map(|(field, path)| secret_key(field, path, &governed)));
        problems.extend(governed.iter().filter_map(|tool| self.never_adds_up(tool)));
        arguments.append(&mut single);
        problems.extend(self.tools.unknown_arguments(tools, arguments.into_iter()));
        if let Per::Proved(proved) = &self.per {
            problems.extend(unknown_tool("per.proved_by", &proved.tool, tools));
            for source in tools.iter().filter(|tool| *proved.tool == *tool.name()) {
                problems.extend(source.lacks_entity(&format!("per.same.{}", proved.same.0), &proved.same.0));
                problems.extend(source.lacks_proof("per.field", &proved.field));
                problems.extend(source.run_by_client("per.proved_by"));
            }
        }
        if self.most < Decimal::ZERO {
            problems.push(Problem::at("most", format!("a limit of {} can never be kept", self.most)));
        }
        if self.window.is_some_and(|window| window <= SignedDuration::ZERO) {
            problems.push(Problem::at("within", "a window has a length").help("like `24h`"));
        }
        problems.extend(self.refusal.problems(tools));
        problems
    }

    fn outline(&self, _: &Spec) -> Outline<'_> {
        let caps =
            Caps { amount: self.amount.as_ref(), currency: self.currency.as_ref(), most: self.most, per: &self.per, window: self.window };
        Outline { caps: Some(caps), ..Outline::default() }
    }

    fn definition(&self) -> String {
        format!("{self:?}")
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        if let Per::Proved(proved) = &self.per
            && let Some(about) = ask.argument(&proved.same.1)
        {
            needs.evidence_of(&proved.tool, Some((&proved.same.0, about)), false);
        }
    }

    fn remedies(&self, ask: &Ask<'_>) -> Option<Vec<Remedy>> {
        let Per::Proved(proved) = &self.per else { return None };
        let (entity, argument) = &proved.same;
        let about = (Arc::clone(entity), ask.argument(argument)?.clone());
        let known = ask.evidence_of(&proved.tool, Some((&about.0, &about.1)), false).ok()?;
        Some(if known.is_some() {
            Vec::new()
        } else {
            vec![Remedy { tool: Arc::clone(&proved.tool), about: Some(about), ..Remedy::default() }]
        })
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        // Whose limit it is will only be known once the tool has said so.
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
            Note { what: format!("at most {}", self.most), found, holds: amount <= self.most }
        });
        let charge = Charge { counter: self.counter(ask)?, amount, cap: self.most, window: self.window, unit: Unit::Fixed };
        Ok(Verdict::Allow(Terms { charges: vec![(charge, self.refusal.error())], ..Terms::default() }))
    }
}
