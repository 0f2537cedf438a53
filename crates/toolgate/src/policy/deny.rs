//! Implements `deny` and `ask`: rules that deny a call or ask a person about it.

use serde_json::{Value, json};

use super::cel::CelExpression;
use super::condition::ConditionResult;
use super::definition;
use super::{
    Condition, DenySummary, Diagnostic, FactRequest, Obligations, Policy, PolicyError, PolicyInput,
    Prerequisite, RuleCheck, RuleDenial, StaticSummary, ToolNames, Verdict,
};
use crate::call::error::FieldError;
use crate::diagnostic::check_condition_type;
use crate::policy::denial::{expression_setters, refusal_setters};
use crate::policy::unsatisfiable::{check_alternatives, check_satisfiable};
use crate::tool::ToolSpec;
use toolgate_json::Pointer;

/// Denies a call, or asks a person about it, if all conditions hold.
///
/// A condition on an absent argument holds, so a call cannot avoid a rule by omitting the argument.
/// The exception is a search whose start directory is known, see [`Condition::Touches`].
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
    when: Option<CelExpression>,
    refusal: RuleDenial,
    asks_person: bool,
    approvers: Vec<String>,
}

impl Deny {
    /// Returns what [`Policy::definition`] is made of.
    pub(super) fn definition_parts(&self) -> Value {
        json!({
            "name": self.name,
            "tools": definition::names(&self.tools),
            "conditions": definition::conditions(&self.conditions),
            "when": self.when.as_ref().map(CelExpression::definition_parts),
            "refusal": definition::refusal(&self.refusal),
            "approvers": self.approvers,
        })
    }

    /// Creates a rule that denies every call of these tools until a condition is added.
    pub fn new<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>) -> Self {
        let refusal = RuleDenial::new(name, format!("the rule `{name}` forbids this call"));
        Self {
            name: name.to_owned(),
            tools: ToolNames::new(tools),
            conditions: Vec::new(),
            when: None,
            refusal,
            asks_person: false,
            approvers: Vec::new(),
        }
    }

    /// Creates a rule that asks a person instead of denying.
    pub fn ask<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>) -> Self {
        let refusal =
            RuleDenial::new(name, format!("the rule `{name}` requires approval by a person"));
        Self { asks_person: true, refusal, ..Self::new(name, tools) }
    }

    /// Adds a condition: the rule applies only if this one holds too.
    #[must_use]
    pub fn when(mut self, argument: impl Into<Pointer>, condition: Condition) -> Self {
        self.conditions.push((argument.into(), condition.normalized()));
        self
    }

    expression_setters!(
        "Applies the rule only if this CEL expression holds too, see [`super::cel`]."
    );

    /// Sets the people who may answer; an empty list means anyone [default: anyone].
    ///
    /// In a configuration file, an empty list is an error.
    #[must_use]
    pub fn approvers<'a>(mut self, people: impl IntoIterator<Item = &'a str>) -> Self {
        self.approvers = people.into_iter().map(str::to_owned).collect();
        self
    }

    refusal_setters!();

    /// Returns the offending argument of each condition, or `None` if a condition does not hold.
    pub(super) fn match_conditions(
        &self,
        input: &PolicyInput<'_>,
    ) -> Result<Option<DenyMatch>, PolicyError> {
        let (mut errors, mut doubt, mut fault) = (Vec::new(), None, None);
        let mut all = true;
        for (path, condition) in &self.conditions {
            // One match is enough, and an absent value counts as a match.
            let places = input.arguments_at(path);
            let is_met_if_absent =
                !input.is_sketch && condition.is_met_by_absent(|| input.home_dir());
            let mut offending = (places.is_empty() && is_met_if_absent).then_some(None);
            let (mut uncertainty, mut error) = (None, None);
            for place in places {
                // In a sketch, an absent argument is not known yet and may still be allowed.
                let absent = || {
                    Ok(if is_met_if_absent { ConditionResult::Yes } else { ConditionResult::No })
                };
                match place.map_or_else(absent, |value| condition.evaluate(input, path, value)) {
                    Ok(ConditionResult::No) => {}
                    Ok(ConditionResult::Yes) => {
                        (offending, uncertainty) = (Some(place), None);
                        break;
                    }
                    Ok(ConditionResult::Uncertain(reason)) => {
                        offending = Some(place);
                        uncertainty.get_or_insert(reason);
                    }
                    Err(reason) => {
                        error.get_or_insert(reason);
                    }
                }
            }
            // A fault counts only if all other conditions hold, independent of their order.
            if error.is_some() {
                fault = fault.or(error);
                continue;
            }
            doubt = doubt.or(uncertainty);
            let display = |place: Option<&serde_json::Value>| {
                place.map_or_else(
                    || "nothing".to_owned(),
                    |value| input.display_argument(path, value),
                )
            };
            input.record_check(|| {
                let found = display(offending.unwrap_or_else(|| input.argument(path)));
                let prefix = if path.parts().is_empty() { "arguments" } else { "" };
                RuleCheck {
                    what: format!("{prefix}{path} {}", condition.describe()),
                    found,
                    holds: offending.is_some(),
                }
            });
            match offending {
                Some(place) => errors.push(FieldError {
                    path: path.to_string(),
                    expected: condition.describe_opposite(),
                    got: display(place),
                    did_you_mean: None,
                }),
                None => {
                    all = false;
                    break;
                }
            }
        }
        match fault {
            Some(fault) if all => Err(fault),
            _ => Ok(all.then_some(DenyMatch { errors, uncertainty: doubt })),
        }
    }

    /// Returns whether a condition may depend on the location of the home directory.
    fn depends_on_home(&self, input: &PolicyInput<'_>) -> bool {
        let can_depend = |(path, condition): &(Pointer, Condition)| {
            if !matches!(condition, Condition::Touches { .. }) {
                return false;
            }
            let wants =
                |value: Option<&serde_json::Value>| condition.depends_on_home(input, path, value);
            let places = path.get_each(input.arguments.value());
            (places.is_empty() && wants(None)) || places.into_iter().any(wants)
        };
        self.conditions.iter().any(can_depend)
    }
}

impl Deny {
    /// Returns the problems of the conditions.
    pub(super) fn check_conditions(&self, tools: &[&ToolSpec]) -> Vec<Diagnostic> {
        let arguments = self
            .conditions
            .iter()
            .enumerate()
            .map(|(index, (path, _))| (format!("where.{index}.argument"), path));
        let mut problems = self.tools.check_arguments(tools, arguments);
        let governed: Vec<&ToolSpec> =
            tools.iter().copied().filter(|tool| self.governs(tool)).collect();
        for (index, (path, condition)) in self.conditions.iter().enumerate() {
            problems.extend(governed.iter().filter_map(|tool| {
                check_condition_type(&format!("where.{index}"), tool, path, condition)
            }));
            problems.extend(check_satisfiable(
                &format!("where.{index}"),
                path,
                condition,
                &governed,
            ));
            problems.extend(check_alternatives(&format!("where.{index}"), condition));
            let no_command = |tool: &&&ToolSpec| {
                matches!(condition, Condition::Runs(_)) && tool.shell.as_ref() != Some(path)
            };
            problems.extend(governed.iter().filter(no_command).map(|tool| {
                let message =
                    format!("`{path}` of `{}` is not declared as a shell command", tool.name());
                let help = match &tool.shell {
                    Some(shell) => format!("its shell command is `{shell}`"),
                    None => format!("add `shell = \"{path}\"` to the tool"),
                };
                Diagnostic::at_field(format!("where.{index}.argument"), message).with_help(help)
            }));
            // A path with `*` does not show which value is the command.
            let hidden = |tool: &&&ToolSpec| {
                matches!(condition, Condition::Touches { .. })
                    && tool.shell.as_ref().is_some_and(|shell| covers_path(path, shell))
            };
            problems.extend(governed.iter().filter(hidden).map(|tool| {
                let message = format!(
                    "`{path}` would treat the shell command of `{}` as a path",
                    tool.name()
                );
                let problem = Diagnostic::at_field(format!("where.{index}.argument"), message);
                problem.with_help("omit `argument` to check all arguments, or name one")
            }));
        }
        problems
    }
}

/// Returns whether a path with `*` matches another path or one of its parents.
fn covers_path(path: &Pointer, other: &Pointer) -> bool {
    let (path, other) = (path.parts(), other.parts());
    let matches = |(part, other_part): (&String, &String)| part == "*" || part == other_part;
    path.iter().any(|part| part == "*")
        && path.len() <= other.len()
        && path.iter().zip(other).all(matches)
}

/// A match of all conditions.
pub(super) struct DenyMatch {
    errors: Vec<FieldError>,
    /// The reason why the match is uncertain, if it is.
    uncertainty: Option<String>,
}

impl Policy for Deny {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &ToolSpec) -> bool {
        self.tools.contains(tool.name())
    }

    fn lookback_window(&self) -> Option<jiff::SignedDuration> {
        self.when.is_none().then_some(jiff::SignedDuration::ZERO)
    }

    fn problems(&self, tools: &[&ToolSpec]) -> Vec<Diagnostic> {
        let mut problems = self.tools.check_names("tools", tools);
        problems.extend(self.check_conditions(tools));
        let governed: Vec<&ToolSpec> =
            tools.iter().copied().filter(|tool| self.governs(tool)).collect();
        problems.extend(
            self.when.iter().flat_map(|when| when.problems("when", &governed, tools, None)),
        );
        if !self.approvers.is_empty() && !self.asks_person {
            problems.push(
                Diagnostic::at_field(
                    "approvers",
                    "`approvers` has no effect in a rule that denies",
                )
                .with_help("use `ask`"),
            );
        }
        problems.extend(self.refusal.check_redirect(tools));
        problems
    }

    fn static_summary(&self, _: &ToolSpec) -> StaticSummary<'_> {
        let forbids = DenySummary {
            conditions: &self.conditions,
            has_other_conditions: self.when.is_some(),
            asks_person: self.asks_person,
        };
        StaticSummary { denies: Some(forbids), ..StaticSummary::default() }
    }

    fn provenance_sources(&self) -> Option<Vec<&str>> {
        self.when.as_ref().and_then(CelExpression::provenance_sources)
    }

    fn definition(&self) -> String {
        definition::definition(
            if self.asks_person { "ask" } else { "deny" },
            &self.definition_parts(),
        )
    }

    fn request_facts(&self, input: &PolicyInput<'_>, needs: &mut FactRequest) {
        needs.home = needs.home || self.depends_on_home(input);
        if let Some(when) = &self.when {
            when.request_facts(input, needs);
        }
    }

    fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        let Some(DenyMatch { errors, uncertainty: doubt }) = self.match_conditions(input)? else {
            return Ok(Verdict::allow());
        };
        if let Some(when) = &self.when
            && !when.is_true(input, None)?
        {
            return Ok(Verdict::allow());
        }
        if let Some(doubt) = doubt {
            let reason = format!("Toolgate cannot determine what this call does: {doubt}.");
            return Ok(Verdict::Ask(
                reason,
                Obligations { approvers: self.approvers.clone(), ..Obligations::default() },
            ));
        }
        if self.asks_person {
            return Ok(Verdict::Ask(
                self.refusal.reason.clone(),
                Obligations { approvers: self.approvers.clone(), ..Obligations::default() },
            ));
        }
        let mut error = self.refusal.to_error();
        error.errors = errors;
        Ok(Verdict::deny(error))
    }

    fn suggest_prerequisites(&self, _: &PolicyInput<'_>) -> Option<Vec<Prerequisite>> {
        // No other call changes a decision on the arguments alone. An expression may depend on the
        // time, on limits and on provenance.
        self.when.is_none().then(Vec::new)
    }
}
