//! Implements `deny` and `ask`: rules that deny a call or ask a person about it.

use serde_json::{Value, json};

use super::cel::Expression;
use super::condition::Holds;
use super::definition;
use super::{Ask, Condition, Fault, Forbids, Needs, Note, Outline, Policy, Problem, Refusal, Remedy, Terms, ToolNames, Verdict};
use crate::call::error::FieldError;
use crate::diagnostic::unfit;
use crate::policy::denial::{expression_setters, refusal_setters};
use crate::policy::unsatisfiable::{never, of_nothing};
use crate::tool::Spec;
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
    when: Option<Expression>,
    refusal: Refusal,
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
            "when": self.when.as_ref().map(Expression::definition_parts),
            "refusal": definition::refusal(&self.refusal),
            "approvers": self.approvers,
        })
    }

    /// Creates a rule that denies every call of these tools until a condition is added.
    pub fn new<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>) -> Self {
        let refusal = Refusal::of(name, format!("the rule `{name}` forbids this call"));
        Self {
            name: name.to_owned(),
            tools: ToolNames::of(tools),
            conditions: Vec::new(),
            when: None,
            refusal,
            asks_person: false,
            approvers: Vec::new(),
        }
    }

    /// Creates a rule that asks a person instead of denying.
    pub fn ask<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>) -> Self {
        let refusal = Refusal::of(name, format!("the rule `{name}` requires approval by a person"));
        Self { asks_person: true, refusal, ..Self::new(name, tools) }
    }

    /// Adds a condition: the rule applies only if this one holds too.
    #[must_use]
    pub fn when(mut self, argument: impl Into<Pointer>, condition: Condition) -> Self {
        self.conditions.push((argument.into(), condition.normalized()));
        self
    }

    expression_setters!("Applies the rule only if this CEL expression holds too, see [`super::cel`].");

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
    pub(super) fn against(&self, ask: &Ask<'_>) -> Result<Option<Against>, Fault> {
        let (mut errors, mut doubt, mut fault) = (Vec::new(), None, None);
        let mut all = true;
        for (path, condition) in &self.conditions {
            // One match is enough, and an absent value counts as a match.
            let places = ask.arguments_at(path);
            let speaks = !ask.is_sketch && condition.holds_of_nothing(|| ask.home());
            let mut guilty = (places.is_empty() && speaks).then_some(None);
            let (mut unsure, mut faulty) = (None, None);
            for place in places {
                // In a sketch, an absent argument is not known yet and may still be allowed.
                let absent = || Ok(if speaks { Holds::Yes } else { Holds::No });
                match place.map_or_else(absent, |value| condition.weigh(ask, path, value)) {
                    Ok(Holds::No) => {}
                    Ok(Holds::Yes) => {
                        (guilty, unsure) = (Some(place), None);
                        break;
                    }
                    Ok(Holds::Uncertain(why)) => {
                        guilty = Some(place);
                        unsure.get_or_insert(why);
                    }
                    Err(why) => {
                        faulty.get_or_insert(why);
                    }
                }
            }
            // A fault counts only if all other conditions hold, independent of their order.
            if faulty.is_some() {
                fault = fault.or(faulty);
                continue;
            }
            doubt = doubt.or(unsure);
            let shown = |place: Option<&serde_json::Value>| place.map_or_else(|| "nothing".to_owned(), |value| ask.shown(path, value));
            ask.note(|| {
                let found = shown(guilty.unwrap_or_else(|| ask.argument(path)));
                let whole = if path.parts().is_empty() { "arguments" } else { "" };
                Note { what: format!("{whole}{path} {}", condition.describe()), found, holds: guilty.is_some() }
            });
            match guilty {
                Some(place) => errors.push(FieldError {
                    path: path.to_string(),
                    expected: condition.opposite(),
                    got: shown(place),
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
            _ => Ok(all.then_some(Against { errors, uncertainty: doubt })),
        }
    }

    /// Returns whether a condition may depend on the location of the home directory.
    fn wants_home(&self, ask: &Ask<'_>) -> bool {
        let one = |(path, condition): &(Pointer, Condition)| {
            if !matches!(condition, Condition::Touches { .. }) {
                return false;
            }
            let wants = |value: Option<&serde_json::Value>| condition.wants_home(ask, path, value);
            let places = path.get_each(ask.arguments.value());
            (places.is_empty() && wants(None)) || places.into_iter().any(wants)
        };
        self.conditions.iter().any(one)
    }
}

impl Deny {
    /// Returns the problems of the conditions.
    pub(super) fn unfit_conditions(&self, tools: &[&Spec]) -> Vec<Problem> {
        let arguments = self.conditions.iter().enumerate().map(|(index, (path, _))| (format!("where.{index}.argument"), path));
        let mut problems = self.tools.unknown_arguments(tools, arguments);
        let governed: Vec<&Spec> = tools.iter().copied().filter(|tool| self.governs(tool)).collect();
        for (index, (path, condition)) in self.conditions.iter().enumerate() {
            problems.extend(governed.iter().filter_map(|tool| unfit(&format!("where.{index}"), tool, path, condition)));
            problems.extend(never(&format!("where.{index}"), path, condition, &governed));
            problems.extend(of_nothing(&format!("where.{index}"), condition));
            let no_command = |tool: &&&Spec| matches!(condition, Condition::Runs(_)) && tool.shell.as_ref() != Some(path);
            problems.extend(governed.iter().filter(no_command).map(|tool| {
                let message = format!("`{path}` of `{}` is not declared as a shell command", tool.name());
                let help = match &tool.shell {
                    Some(shell) => format!("its shell command is `{shell}`"),
                    None => format!("add `shell = \"{path}\"` to the tool"),
                };
                Problem::at(format!("where.{index}.argument"), message).help(help)
            }));
            // A path with `*` does not show which value is the command.
            let hidden = |tool: &&&Spec| {
                matches!(condition, Condition::Touches { .. }) && tool.shell.as_ref().is_some_and(|shell| stars_over(path, shell))
            };
            problems.extend(governed.iter().filter(hidden).map(|tool| {
                let message = format!("`{path}` would treat the shell command of `{}` as a path", tool.name());
                let problem = Problem::at(format!("where.{index}.argument"), message);
                problem.help("omit `argument` to check all arguments, or name one")
            }));
        }
        problems
    }
}

/// Returns whether a path with `*` matches another path or one of its parents.
fn stars_over(path: &Pointer, other: &Pointer) -> bool {
    let (path, other) = (path.parts(), other.parts());
    let reaches = |(part, own): (&String, &String)| part == "*" || part == own;
    path.iter().any(|part| part == "*") && path.len() <= other.len() && path.iter().zip(other).all(reaches)
}

/// A match of all conditions.
pub(super) struct Against {
    errors: Vec<FieldError>,
    /// The reason why the match is uncertain, if it is.
    uncertainty: Option<String>,
}

impl Policy for Deny {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &Spec) -> bool {
        self.tools.contains(tool.name())
    }

    fn looks_back(&self) -> Option<jiff::SignedDuration> {
        self.when.is_none().then_some(jiff::SignedDuration::ZERO)
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<Problem> {
        let mut problems = self.tools.unknown("tools", tools);
        problems.extend(self.unfit_conditions(tools));
        let governed: Vec<&Spec> = tools.iter().copied().filter(|tool| self.governs(tool)).collect();
        problems.extend(self.when.iter().flat_map(|when| when.problems("when", &governed, tools, None)));
        if !self.approvers.is_empty() && !self.asks_person {
            problems.push(Problem::at("approvers", "`approvers` has no effect in a rule that denies").help("use `ask`"));
        }
        problems.extend(self.refusal.problems(tools));
        problems
    }

    fn outline(&self, _: &Spec) -> Outline<'_> {
        let forbids = Forbids { conditions: &self.conditions, has_other_conditions: self.when.is_some(), asks_person: self.asks_person };
        Outline { denies: Some(forbids), ..Outline::default() }
    }

    fn sources(&self) -> Option<Vec<&str>> {
        self.when.as_ref().and_then(Expression::sources)
    }

    fn definition(&self) -> String {
        definition::definition(if self.asks_person { "ask" } else { "deny" }, &self.definition_parts())
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        needs.home = needs.home || self.wants_home(ask);
        if let Some(when) = &self.when {
            when.needs(ask, needs);
        }
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let Some(Against { errors, uncertainty: doubt }) = self.against(ask)? else { return Ok(Verdict::allow()) };
        if let Some(when) = &self.when
            && !when.holds(ask, None)?
        {
            return Ok(Verdict::allow());
        }
        if let Some(doubt) = doubt {
            let reason = format!("Toolgate cannot determine what this call does: {doubt}.");
            return Ok(Verdict::Ask(reason, Terms { approvers: self.approvers.clone(), ..Terms::default() }));
        }
        if self.asks_person {
            return Ok(Verdict::Ask(self.refusal.reason.clone(), Terms { approvers: self.approvers.clone(), ..Terms::default() }));
        }
        let mut error = self.refusal.error();
        error.errors = errors;
        Ok(Verdict::deny(error))
    }

    fn remedies(&self, _: &Ask<'_>) -> Option<Vec<Remedy>> {
        // No other call changes a decision on the arguments alone. An expression may depend on the
        // time, on limits and on provenance.
        self.when.is_none().then(Vec::new)
    }
}
