//! Implements `limit`: a maximum number of calls, or a maximum sum, per session, principal or
//! entity, optionally in a time window.

use jiff::SignedDuration;
use rust_decimal::Decimal;
use serde_json::{Value, json};

use std::sync::Arc;

use super::definition;
use super::{
    Diagnostic, FactRequest, LimitSummary, Obligations, Policy, PolicyError, PolicyInput,
    Prerequisite, RuleCheck, RuleDenial, StaticSummary, ToolNames, Verdict,
};
use crate::call::error::{FieldError, ToolError};
use crate::diagnostic::{check_lookup_key, check_single_value, check_tool_name};
use crate::limits::{Charge, ChargeUnit};
use crate::policy::denial::refusal_setters;
use crate::policy::limit_owner::LimitOwner;
use crate::schema::{SchemaLookup, can_have_type, lookup_input, resolve_object};
use crate::tool::ToolSpec;
use toolgate_json::{Pointer, decimal_of, with_canonical_text};

/// Describes the values that can be summed.
const AMOUNT_DESCRIPTION: &str = "a number of at least 0, with at most 28 digits";

/// An argument that a limit cannot use.
struct UnusableArgument<'a> {
    path: &'a Pointer,
    /// The value at the path, if any.
    found: Option<&'a Value>,
    /// The expected value.
    expected: &'static str,
    /// The message for the operator, if the model cannot correct the argument.
    reason: String,
}

impl<'a> UnusableArgument<'a> {
    fn missing(path: &'a Pointer, expected: &'static str) -> Self {
        Self {
            path,
            found: None,
            expected,
            reason: format!("`{path}` is missing, and the limit depends on it"),
        }
    }

    /// Returns whether the model can correct the argument.
    ///
    /// The schema of the tool must allow the argument, and a number if one is expected.
    fn can_be_corrected(&self, tool: &ToolSpec) -> bool {
        let schema = match lookup_input(tool, self.path) {
            SchemaLookup::Missing(..) => return false,
            SchemaLookup::Open => return true,
            SchemaLookup::Known(schema) => schema,
        };
        let is_number = |kind: &Value| matches!(kind.as_str(), Some("number" | "integer"));
        match tool
            .input_schema()
            .and_then(|root| resolve_object(schema, root))
            .and_then(|map| map.get("type"))
        {
            _ if self.expected != AMOUNT_DESCRIPTION => true,
            None => true,
            Some(Value::Array(kinds)) => kinds.iter().any(is_number),
            Some(kind) => is_number(kind),
        }
    }
}

/// A limit that reserves an amount before the tool runs and settles it by the outcome.
///
/// ```
/// use toolgate::policy::{Limit, LimitOwner};
/// use toolgate::SignedDuration;
/// let daily = Limit::sum("daily_refunds", ["issue_refund"], "/amount_usd", 500.into())
///     .per(LimitOwner::Entity("/customer_id".into()))
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
    pub(super) per: LimitOwner,
    window: Option<SignedDuration>,
    refusal: RuleDenial,
}

impl Limit {
    /// Returns what [`Policy::definition`] is made of.
    pub(super) fn definition_parts(&self) -> Value {
        let per = match &self.per {
            LimitOwner::Session => json!("session"),
            LimitOwner::Principal => json!("principal"),
            LimitOwner::Entity(path) => json!({ "entity": path.to_string() }),
            LimitOwner::EvidenceEntity(proved) => json!({
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
        let refusal =
            RuleDenial::new(name, format!("the limit `{name}` of {most} calls is reached"));
        Self {
            name: name.to_owned(),
            tools: ToolNames::new(tools),
            amount: None,
            currency: None,
            max: most.into(),
            per: LimitOwner::Session,
            window: None,
            refusal,
        }
    }

    /// Limits the sum of an argument.
    ///
    /// An amount that cannot be summed, such as a negative one, is denied as an invalid argument.
    pub fn sum<'a>(
        name: &str,
        tools: impl IntoIterator<Item = &'a str>,
        argument: impl Into<Pointer>,
        most: Decimal,
    ) -> Self {
        let refusal = RuleDenial::new(
            name,
            format!("the limit `{name}` of {most} in total would be exceeded"),
        );
        Self { amount: Some(argument.into()), max: most, refusal, ..Self::calls(name, tools, 0) }
    }

    /// Sets the owner of the limit [default: the session].
    #[must_use]
    pub fn per(mut self, per: LimitOwner) -> Self {
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

    /// Returns an argument that the counter depends on and that the tool does not accept.
    pub(super) fn undeclared_argument(&self, tool: &ToolSpec) -> Option<&Pointer> {
        self.currency.iter().chain(self.owner_argument()).find(|path| {
            matches!(
                crate::schema::lookup_input(tool, path),
                crate::schema::SchemaLookup::Missing(..)
            )
        })
    }

    /// Reports a summed argument that is never a number.
    fn check_summable(&self, tool: &ToolSpec) -> Option<Diagnostic> {
        let path = self.amount.as_ref()?;
        let SchemaLookup::Known(schema) = lookup_input(tool, path) else { return None };
        let map = resolve_object(schema, tool.input_schema()?)?;
        if can_have_type(map, "number") || can_have_type(map, "integer") {
            return None;
        }
        let problem = Diagnostic::at_field(
            "sum",
            format!("`{path}` of `{}` is never a number, so it cannot be summed", tool.name()),
        );
        Some(problem.with_help("name an argument that is declared as a number"))
    }

    pub(super) fn has_name(&self, name: &str) -> bool {
        self.name == name
    }

    pub(super) fn require_argument<'a>(
        input: &PolicyInput<'a>,
        path: &Pointer,
    ) -> Result<&'a Value, PolicyError> {
        input.non_blank_argument(path).ok_or_else(|| {
            PolicyError::new(format!("`{path}` is missing, and the limit depends on it"))
        })
    }

    /// Returns the sum of all values at a path.
    fn sum_argument<'a>(
        input: &PolicyInput<'a>,
        path: &'a Pointer,
    ) -> Result<Decimal, UnusableArgument<'a>> {
        let values = input.arguments_at(path);
        if values.is_empty() {
            return Err(UnusableArgument::missing(path, AMOUNT_DESCRIPTION));
        }
        values.into_iter().try_fold(Decimal::ZERO, |sum, found| {
            let wrong = |reason: String| UnusableArgument {
                path,
                found,
                expected: AMOUNT_DESCRIPTION,
                reason,
            };
            let amount = found
                .and_then(decimal_of)
                .ok_or_else(|| wrong(format!("`{path}` is not an exact number")))?;
            if amount < Decimal::ZERO {
                return Err(wrong("a sum accepts no negative amounts".to_owned()));
            }
            sum.checked_add(amount)
                .ok_or_else(|| wrong(format!("the sum of `{path}` is too large")))
        })
    }

    /// Returns an argument that names the owner or the currency and is missing.
    fn find_missing_argument<'a>(
        &'a self,
        input: &PolicyInput<'a>,
    ) -> Option<UnusableArgument<'a>> {
        let missing = self
            .owner_argument()
            .into_iter()
            .chain(&self.currency)
            .find(|path| input.non_blank_argument(path).is_none())?;
        Some(UnusableArgument {
            found: input.argument(missing),
            ..UnusableArgument::missing(missing, "given")
        })
    }

    /// Denies a call with an unusable argument.
    ///
    /// The model can correct such an argument, as it corrects one that does not fit the schema. If
    /// the declaration of the tool rules out a usable value, or if the arguments are not complete
    /// yet, the result is a fault.
    fn deny_unusable(
        &self,
        input: &PolicyInput<'_>,
        wrong: &UnusableArgument<'_>,
    ) -> Result<Verdict, PolicyError> {
        if input.is_sketch || !wrong.can_be_corrected(input.tool) {
            return Err(PolicyError::new(wrong.reason.clone()));
        }
        let path = wrong.path;
        let received = wrong
            .found
            .map_or_else(|| "nothing".to_owned(), |value| input.display_argument(path, value));
        let expected = wrong.expected.to_owned();
        let message = format!(
            "{}: `{path}` must be {expected}, because the limit `{}` depends on it; got {received}",
            input.tool.name(),
            self.name
        );
        let mut error = ToolError::from_code(crate::call::error_code::INVALID_ARGUMENTS, message);
        error.errors.push(FieldError {
            path: path.to_string(),
            expected,
            got: received,
            did_you_mean: None,
        });
        Ok(Verdict::deny(error))
    }

    /// Returns the name of the counter that a call is charged to.
    pub(super) fn counter(&self, input: &PolicyInput<'_>) -> Result<String, PolicyError> {
        let owner = match &self.per {
            LimitOwner::Session => {
                format!("session\u{1f}{}\u{1f}{}", input.key.principal, input.key.session)
            }
            LimitOwner::Principal => format!("principal\u{1f}{}", input.key.principal),
            LimitOwner::Entity(path) => {
                with_canonical_text(Self::require_argument(input, path)?, |value| {
                    format!("entity\u{1f}{value}")
                })
            }
            LimitOwner::EvidenceEntity(proved) => {
                with_canonical_text(Self::evidence_entity(input, proved)?, |value| {
                    format!("entity\u{1f}{value}")
                })
            }
        };
        let currency = match &self.currency {
            // All spellings of a currency code share one counter.
            Some(path) => match Self::require_argument(input, path)? {
                Value::String(code) => with_canonical_text(
                    &Value::String(code.trim().to_ascii_uppercase()),
                    str::to_owned,
                ),
                other => with_canonical_text(other, str::to_owned),
            },
            None => String::new(),
        };
        Ok(format!(
            "limit\u{1f}{}\u{1f}{}\u{1f}{owner}\u{1f}{currency}",
            input.key.agent, self.name
        ))
    }
}

impl Policy for Limit {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &ToolSpec) -> bool {
        self.tools.contains(tool.name())
    }

    fn lookback_window(&self) -> Option<SignedDuration> {
        // The evidence that names the owner may be of any age.
        self.window.filter(|_| !matches!(self.per, LimitOwner::EvidenceEntity(_)))
    }

    fn problems(&self, tools: &[&ToolSpec]) -> Vec<Diagnostic> {
        let mut arguments: Vec<(String, &Pointer)> = Vec::new();
        arguments.extend(self.amount.iter().map(|path| ("sum".to_owned(), path)));
        let mut single: Vec<(String, &Pointer)> =
            self.currency.iter().map(|path| ("currency".to_owned(), path)).collect();
        match &self.per {
            LimitOwner::Session | LimitOwner::Principal => {}
            LimitOwner::Entity(path) => single.push(("per".to_owned(), path)),
            LimitOwner::EvidenceEntity(proved) => {
                single.push((format!("per.same.{}", proved.entity.0), &proved.entity.1));
                single.extend(proved.fallback.iter().map(|path| ("per.argument".to_owned(), path)));
            }
        }
        let mut problems = self.tools.check_names("tools", tools);
        problems.extend(single.iter().filter_map(|(field, path)| check_single_value(field, path)));
        let governed: Vec<&ToolSpec> =
            tools.iter().copied().filter(|tool| self.governs(tool)).collect();
        problems.extend(
            single.iter().filter_map(|(field, path)| check_lookup_key(field, path, &governed)),
        );
        problems.extend(governed.iter().filter_map(|tool| self.check_summable(tool)));
        arguments.append(&mut single);
        problems.extend(self.tools.check_arguments(tools, arguments.into_iter()));
        if let LimitOwner::EvidenceEntity(proved) = &self.per {
            problems.extend(check_tool_name("per.proved_by", &proved.tool, tools));
            for source in tools.iter().filter(|tool| *proved.tool == *tool.name()) {
                problems.extend(
                    source.check_entity(&format!("per.same.{}", proved.entity.0), &proved.entity.0),
                );
                problems.extend(source.check_evidence_field("per.field", &proved.field));
                problems.extend(source.warn_if_run_by_client("per.proved_by"));
            }
        }
        if self.max < Decimal::ZERO {
            problems
                .push(Diagnostic::at_field("max", format!("the limit is negative: {}", self.max)));
        }
        if self.window.is_some_and(|window| window <= SignedDuration::ZERO) {
            problems.push(
                Diagnostic::at_field("within", "the window must be longer than 0")
                    .with_help("like `24h`"),
            );
        }
        problems.extend(self.refusal.check_redirect(tools));
        problems
    }

    fn static_summary(&self, _: &ToolSpec) -> StaticSummary<'_> {
        let caps = LimitSummary {
            summed_argument: self.amount.as_ref(),
            currency: self.currency.as_ref(),
            max: self.max,
            owner: &self.per,
            window: self.window,
        };
        StaticSummary { limit: Some(caps), ..StaticSummary::default() }
    }

    fn definition(&self) -> String {
        definition::definition("limit", &self.definition_parts())
    }

    fn request_facts(&self, input: &PolicyInput<'_>, needs: &mut FactRequest) {
        if let LimitOwner::EvidenceEntity(proved) = &self.per
            && let Some(about) = input.argument(&proved.entity.1)
        {
            needs.evidence_of(&proved.tool, Some((&proved.entity.0, about)), false);
        }
    }

    fn suggest_prerequisites(&self, input: &PolicyInput<'_>) -> Option<Vec<Prerequisite>> {
        let LimitOwner::EvidenceEntity(proved) = &self.per else { return None };
        let (entity, argument) = &proved.entity;
        let about = (Arc::clone(entity), input.argument(argument)?.clone());
        let known = input.evidence_of(&proved.tool, Some((&about.0, &about.1)), false).ok()?;
        Some(if known.is_some() {
            Vec::new()
        } else {
            vec![Prerequisite {
                tool: Arc::clone(&proved.tool),
                about: Some(about),
                ..Prerequisite::default()
            }]
        })
    }

    fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        // The owner is known only after the tool has run.
        if self.is_owner_assumed(input) {
            return Ok(Verdict::allow());
        }
        let amount = match self
            .amount
            .as_ref()
            .map_or(Ok(Decimal::ONE), |path| Self::sum_argument(input, path))
        {
            Ok(amount) => amount,
            Err(wrong) => return self.deny_unusable(input, &wrong),
        };
        if let Some(wrong) = self.find_missing_argument(input) {
            return self.deny_unusable(input, &wrong);
        }
        input.record_check(|| {
            let secret = self.amount.as_ref().is_some_and(|path| input.is_secret(path));
            let found = if secret { "(hidden)".to_owned() } else { format!("{amount} more") };
            RuleCheck { what: format!("at most {}", self.max), found, holds: amount <= self.max }
        });
        let charge = Charge {
            counter: self.counter(input)?,
            amount,
            cap: self.max,
            window: self.window,
            unit: ChargeUnit::Fixed,
        };
        Ok(Verdict::Allow(Obligations {
            charges: vec![(charge, self.refusal.to_error())],
            ..Obligations::default()
        }))
    }
}
