//! Implements `require`: a tool needs an earlier success of another tool, optionally about the
//! same entity, of a maximum age, and with given fields.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::{Value, json};

use super::cel::CelExpression;
use super::definition;
use super::{
    Condition, Deny, Diagnostic, FactRequest, Policy, PolicyError, PolicyInput, Prerequisite,
    RuleCheck, RuleDenial, StaticSummary, ToolNames, Verdict,
};
use crate::diagnostic::{check_lookup_key, check_single_value};
use crate::policy::denial::{expression_setters, refusal_setters};
use crate::policy::unsatisfiable::check_evidence_satisfiable;
use crate::session::state::{Evidence, EvidenceOrigin};
use crate::tool::ToolSpec;
use toolgate_json::Pointer;

/// Requires that one of some tools has succeeded in this session.
///
/// ```
/// use toolgate::policy::Require;
/// use toolgate::SignedDuration;
/// let verified = Require::new("same_customer", ["issue_refund"], ["verify_customer"])
///     .same("customer_id", "/customer_id")
///     .field("/active", true.into())
///     .within(SignedDuration::from_mins(15));
/// ```
#[derive(Debug, Clone)]
pub struct Require {
    name: String,
    tools: ToolNames,
    /// The tools of which one must have succeeded.
    any_of: ToolNames,
    same: Option<(Arc<str>, Pointer)>,
    fields: Vec<(String, RequiredValue)>,
    when: Option<CelExpression>,
    max_age: Option<SignedDuration>,
    accepts_reported: bool,
    /// If set, the rule applies only to calls that meet these conditions.
    applies_if: Option<Box<Deny>>,
    refusal: RuleDenial,
}

/// The required value of a proved field.
#[derive(Debug, Clone)]
enum RequiredValue {
    Value(Value),
    Argument(Pointer),
}

impl Require {
    /// Creates a rule: `tools` need an earlier success of one tool in `any_of`.
    pub fn new<'a>(
        name: &str,
        tools: impl IntoIterator<Item = &'a str>,
        any_of: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let any_of = ToolNames::new(any_of);
        let names = any_of.iter().map(|tool| format!("`{tool}`")).collect::<Vec<_>>().join(" or ");
        let refusal = RuleDenial {
            code: crate::call::error_code::PREREQUISITE_MISSING.to_owned(),
            ..RuleDenial::new(name, format!("{names} must have succeeded first in this session"))
        };
        Self {
            name: name.to_owned(),
            tools: ToolNames::new(tools),
            any_of,
            same: None,
            fields: Vec::new(),
            when: None,
            max_age: None,
            accepts_reported: false,
            applies_if: None,
            refusal,
        }
    }

    /// Restricts the rule to calls for which this condition, and all others, hold.
    ///
    /// An absent argument meets every condition.
    #[must_use]
    pub fn only_when(mut self, argument: impl Into<Pointer>, condition: Condition) -> Self {
        let only = self.applies_if.take().map_or_else(
            || Deny::new(&self.name, self.tools.iter().map(|tool| &**tool)),
            |only| *only,
        );
        self.applies_if = Some(Box::new(only.when(argument, condition)));
        self
    }

    /// Requires evidence about the entity that this argument names.
    #[must_use]
    pub fn same(mut self, entity: &str, argument: impl Into<Pointer>) -> Self {
        self.same = Some((entity.into(), argument.into()));
        self
    }

    /// Requires a proved field to have this value.
    #[must_use]
    pub fn field(mut self, path: impl Into<Pointer>, value: Value) -> Self {
        self.fields.push((
            path.into().to_string(),
            RequiredValue::Value(toolgate_json::with_canonical_numbers(value)),
        ));
        self
    }

    /// Requires a proved field to equal this argument.
    #[must_use]
    pub fn field_is_argument(
        mut self,
        path: impl Into<Pointer>,
        argument: impl Into<Pointer>,
    ) -> Self {
        self.fields.push((path.into().to_string(), RequiredValue::Argument(argument.into())));
        self
    }

    expression_setters!(
        "Requires a CEL expression to hold; `result` is the evidence, see [`super::cel`]."
    );

    /// Sets the maximum age of the evidence.
    #[must_use]
    pub const fn within(mut self, age: SignedDuration) -> Self {
        self.max_age = Some(age);
        self
    }

    /// Accepts evidence that a client reports, too.
    #[must_use]
    pub const fn accept_reported(mut self) -> Self {
        self.accepts_reported = true;
        self
    }

    refusal_setters!();

    fn required_entity<'a>(
        &'a self,
        input: &PolicyInput<'a>,
    ) -> Result<Option<(&'a Arc<str>, &'a Value)>, PolicyError> {
        let Some((name, path)) = &self.same else { return Ok(None) };
        let value = input.non_blank_argument(path).ok_or_else(|| {
            PolicyError::new(format!("cannot compare `{path}`: the argument is missing"))
        })?;
        Ok(Some((name, value)))
    }

    fn is_fresh(&self, proof: &Evidence, input: &PolicyInput<'_>) -> bool {
        let age = input.facts.now.duration_since(proof.at);
        // Evidence from the future (the clock went back) is not fresh.
        let fresh = self.max_age.is_none_or(|within| !age.is_negative() && age <= within);
        input.record_check(|| RuleCheck {
            what: self.max_age.map_or_else(
                || format!("`{}` succeeded", proof.tool),
                |w| format!("`{}` succeeded within {w:#}", proof.tool),
            ),
            found: match age.as_secs() {
                _ if age.is_negative() => "later than now".to_owned(),
                0 => "just now".to_owned(),
                seconds => format!("{:#} ago", SignedDuration::from_secs(seconds)),
            },
            holds: fresh,
        });
        fresh
    }

    fn has_required_fields(
        &self,
        proof: &Evidence,
        input: &PolicyInput<'_>,
    ) -> Result<bool, PolicyError> {
        if proof.origin == EvidenceOrigin::Assumed {
            return Ok(true);
        }
        for (path, required) in &self.fields {
            let display = |value: &Value| match required {
                RequiredValue::Value(_) => toolgate_text::escape_for_display(&value.to_string()),
                RequiredValue::Argument(path) => input.display_argument(path, value),
            };
            let value = match required {
                RequiredValue::Value(value) => Some(value),
                RequiredValue::Argument(path) => {
                    input.argument(path).filter(|value| !value.is_null())
                }
            };
            // A value that is missing or null on both sides does not count as equal.
            let found = proof.fields.get(path);
            let holds = value.is_some() && found == value;
            input.record_check(|| RuleCheck {
                what: format!(
                    "{path} of `{}` is {}",
                    proof.tool,
                    value.map_or_else(|| "nothing".to_owned(), display)
                ),
                found: found.map_or_else(|| "nothing".to_owned(), display),
                holds,
            });
            if !holds {
                return Ok(false);
            }
        }
        self.when.as_ref().map_or(Ok(true), |when| when.is_true(input, Some(proof)))
    }

    fn find_evidence<'a>(
        &'a self,
        input: &PolicyInput<'a>,
        tool: &str,
    ) -> Result<Option<&'a Evidence>, PolicyError> {
        let about = self.required_entity(input)?;
        input.evidence_of(tool, about.map(|(name, value)| (&**name, value)), self.accepts_reported)
    }
}

impl Policy for Require {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &ToolSpec) -> bool {
        self.tools.contains(tool.name())
    }

    fn lookback_window(&self) -> Option<SignedDuration> {
        self.max_age.filter(|_| self.when.is_none())
    }

    fn problems(&self, tools: &[&ToolSpec]) -> Vec<Diagnostic> {
        let mut problems = self.tools.check_names("tools", tools);
        problems.extend(self.any_of.check_names("any_of", tools));
        problems.extend(self.applies_if.iter().flat_map(|only| only.check_conditions(tools)));
        let same = self.same.iter().map(|(entity, path)| (format!("same.{entity}"), path));
        let compared = self.fields.iter().filter_map(|(field, required)| match required {
            RequiredValue::Argument(path) => Some((format!("fields.{field}"), path)),
            RequiredValue::Value(_) => None,
        });
        let arguments: Vec<(String, &Pointer)> = same.chain(compared).collect();
        problems
            .extend(arguments.iter().filter_map(|(field, path)| check_single_value(field, path)));
        let governed: Vec<&ToolSpec> =
            tools.iter().copied().filter(|tool| self.governs(tool)).collect();
        problems.extend(self.same.iter().filter_map(|(entity, path)| {
            check_lookup_key(&format!("same.{entity}"), path, &governed)
        }));
        problems.extend(
            self.tools.check_arguments(
                tools,
                arguments.iter().map(|(field, path)| (field.clone(), *path)),
            ),
        );
        let sources: Vec<&ToolSpec> =
            tools.iter().copied().filter(|tool| self.any_of.contains(tool.name())).collect();
        for source in &sources {
            if let Some((entity, _)) = &self.same {
                problems.extend(source.check_entity(&format!("same.{entity}"), entity));
            }
            for (path, required) in &self.fields {
                let (field, path) = (format!("fields.{path}"), Pointer::from(path.as_str()));
                let never = || match required {
                    RequiredValue::Value(value) => {
                        check_evidence_satisfiable(&field, &path, value, source)
                    }
                    RequiredValue::Argument(_) => None,
                };
                problems.extend(source.check_evidence_field(&field, &path).or_else(never));
            }
            problems
                .extend(source.warn_if_run_by_client("any_of").filter(|_| !self.accepts_reported));
        }
        problems.extend(
            self.when
                .iter()
                .flat_map(|when| when.problems("when", &governed, tools, Some(&sources))),
        );
        if self.max_age.is_some_and(|age| age <= SignedDuration::ZERO) {
            problems.push(
                Diagnostic::at_field("within", "the age must be longer than 0")
                    .with_help("like `15m`"),
            );
        }
        problems.extend(self.refusal.check_redirect(tools));
        problems
    }

    fn static_summary(&self, _: &ToolSpec) -> StaticSummary<'_> {
        // With conditions, only some calls need the evidence.
        if self.applies_if.is_some() {
            return StaticSummary::default();
        }
        StaticSummary {
            prerequisites: vec![(
                "any_of".to_owned(),
                self.any_of.iter().map(|tool| &**tool).collect(),
            )],
            ..StaticSummary::default()
        }
    }

    fn provenance_sources(&self) -> Option<Vec<&str>> {
        self.when.as_ref().and_then(CelExpression::provenance_sources)
    }

    fn definition(&self) -> String {
        let field = |(name, required): &(String, RequiredValue)| match required {
            RequiredValue::Value(value) => json!({ "field": name, "value": value }),
            RequiredValue::Argument(path) => json!({ "field": name, "argument": path.to_string() }),
        };
        let parts = json!({
            "name": self.name,
            "tools": definition::names(&self.tools),
            "any_of": definition::names(&self.any_of),
            "same": self.same.as_ref().map(|(entity, path)| json!([entity, path.to_string()])),
            "fields": self.fields.iter().map(field).collect::<Value>(),
            "when": self.when.as_ref().map(CelExpression::definition_parts),
            "within": self.max_age.map(definition::duration),
            "reported": self.accepts_reported,
            "only": self.applies_if.as_ref().map(|only| only.definition_parts()),
            "refusal": definition::refusal(&self.refusal),
        });
        definition::definition("require", &parts)
    }

    fn request_facts(&self, input: &PolicyInput<'_>, needs: &mut FactRequest) {
        if let Some(only) = &self.applies_if {
            only.request_facts(input, needs);
        }
        let Ok(about) = self.required_entity(input) else { return };
        for tool in self.any_of.iter() {
            needs.evidence_of(tool, about, self.accepts_reported);
        }
        if let Some(when) = &self.when {
            when.request_facts(input, needs);
        }
    }

    fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        if let Some(only) = &self.applies_if
            && only.match_conditions(input)?.is_none()
        {
            return Ok(Verdict::allow());
        }
        for tool in self.any_of.iter() {
            match self.find_evidence(input, tool)? {
                Some(proof)
                    if self.is_fresh(proof, input) && self.has_required_fields(proof, input)? =>
                {
                    return Ok(Verdict::allow());
                }
                Some(_) => {}
                None => input.record_check(|| RuleCheck {
                    what: format!(
                        "`{tool}` succeeded{}",
                        self.same.as_ref().map_or_else(String::new, |(entity, _)| format!(
                            " about the same `{entity}`"
                        ))
                    ),
                    found: "never in this session".to_owned(),
                    holds: false,
                }),
            }
        }
        Ok(Verdict::deny(self.refusal.to_error()))
    }

    fn suggest_prerequisites(&self, input: &PolicyInput<'_>) -> Option<Vec<Prerequisite>> {
        let about = self.required_entity(input).ok()?;
        let can_help = |tool: &&Arc<str>| match self.find_evidence(input, tool) {
            // Fresh evidence with other fields exists, so repeating the call would not help.
            Ok(Some(proof)) => !self.is_fresh(proof, input),
            Ok(None) => true,
            Err(_) => false,
        };
        let about = about.map(|(name, value)| (Arc::clone(name), value.clone()));
        let remedy = |tool: &Arc<str>| Prerequisite {
            tool: Arc::clone(tool),
            about: about.clone(),
            ..Prerequisite::default()
        };
        let remedies: Vec<Prerequisite> = self.any_of.iter().filter(can_help).map(remedy).collect();
        // If all evidence is fresh, the answer may still change later, so the help is unknown.
        (!remedies.is_empty()).then_some(remedies)
    }
}
