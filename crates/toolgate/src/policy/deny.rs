//! `deny` and `ask`: what must not be, or not without a person.

use super::cel::Expression;
use super::condition::Holds;
use super::never::{never, of_nothing};
use super::problem::unfit;
use super::refusal::{expression_setters, refusal_setters};
use super::{Ask, Condition, Fault, Forbids, Needs, Note, Outline, Policy, Problem, Refusal, Remedy, Terms, ToolNames, Verdict};
use crate::error::FieldError;
use crate::json::Pointer;
use crate::tool::Spec;

/// Refuses a call, or asks a person about it, when all its conditions hold. A condition on an argument
/// that is absent holds: what a rule cannot see does not pass it. Only of a search it is known where it is, see [`Condition::Touches`].
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
    asks: bool,
    approvers: Vec<String>,
}

impl Deny {
    /// Denies these tools altogether, until a condition is added.
    pub fn new<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>) -> Self {
        let refusal = Refusal::of(name, format!("the rule `{name}` forbids this call"));
        Self {
            name: name.to_owned(),
            tools: ToolNames::of(tools),
            conditions: Vec::new(),
            when: None,
            refusal,
            asks: false,
            approvers: Vec::new(),
        }
    }

    /// Asks a person instead of denying.
    pub fn ask<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>) -> Self {
        let refusal = Refusal::of(name, format!("the rule `{name}` wants a person to decide"));
        Self { asks: true, refusal, ..Self::new(name, tools) }
    }

    /// Speaks only when this holds too.
    #[must_use]
    pub fn when(mut self, argument: impl Into<Pointer>, condition: Condition) -> Self {
        self.conditions.push((argument.into(), condition.normalized()));
        self
    }

    expression_setters!("Speaks only when this holds too: an expression in CEL, see [`super::cel`].");

    /// Only these people may answer. Anybody may, unless said, or where the list is empty; in a file an empty one does not load.
    #[must_use]
    pub fn approvers<'a>(mut self, people: impl IntoIterator<Item = &'a str>) -> Self {
        self.approvers = people.into_iter().map(str::to_owned).collect();
        self
    }

    refusal_setters!();

    /// The first condition's argument that speaks against the call, for each condition; `None` where one does not hold.
    pub(super) fn against(&self, ask: &Ask<'_>) -> Result<Option<Against>, Fault> {
        let (mut errors, mut doubt, mut fault) = (Vec::new(), None, None);
        let mut all = true;
        for (path, condition) in &self.conditions {
            // Of many places one is enough, and one where nothing stands is one of them.
            let places = ask.arguments_at(path);
            let speaks = !ask.sketch && condition.holds_of_nothing(|| ask.home());
            let mut guilty = (places.is_empty() && speaks).then_some(None);
            let (mut unsure, mut faulty) = (None, None);
            for place in places {
                // What nobody knows yet may turn out well.
                let absent = || Ok(if speaks { Holds::Yes } else { Holds::No });
                match place.map_or_else(absent, |value| condition.weigh(ask, path, value)) {
                    Ok(Holds::No) => {}
                    Ok(Holds::Yes) => {
                        (guilty, unsure) = (Some(place), None);
                        break;
                    }
                    Ok(Holds::Maybe(why)) => {
                        guilty = Some(place);
                        unsure.get_or_insert(why);
                    }
                    Err(why) => {
                        faulty.get_or_insert(why);
                    }
                }
            }
            // It counts where no other condition keeps the rule silent, whichever stands first.
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
            _ => Ok(all.then_some(Against { errors, doubt })),
        }
    }

    /// Whether a condition may hang on where the home directory is.
    fn wants_home(&self, ask: &Ask<'_>) -> bool {
        let one = |(path, condition): &(Pointer, Condition)| {
            if !matches!(condition, Condition::Touches { .. }) {
                return false;
            }
            let wants = |value: Option<&serde_json::Value>| condition.wants_home(ask, path, value);
            let places = path.each(ask.arguments.value());
            (places.is_empty() && wants(None)) || places.into_iter().any(wants)
        };
        self.conditions.iter().any(one)
    }
}

impl Deny {
    /// What is wrong with its conditions.
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
                    None => format!("say `shell = \"{path}\"` with the tool"),
                };
                Problem::at(format!("where.{index}.argument"), message).help(help)
            }));
            // Among many places nobody sees which one is the command.
            let hidden = |tool: &&&Spec| {
                matches!(condition, Condition::Touches { .. }) && tool.shell.as_ref().is_some_and(|shell| stars_over(path, shell))
            };
            problems.extend(governed.iter().filter(hidden).map(|tool| {
                let message = format!("with `{path}`, the shell command of `{}` would be looked at as if it were a path", tool.name());
                let problem = Problem::at(format!("where.{index}.argument"), message);
                problem.help("leave `argument` out, to look through all of them, or name one")
            }));
        }
        problems
    }
}

/// Whether a path with `*` in it reaches another, or what that stands in.
fn stars_over(path: &Pointer, other: &Pointer) -> bool {
    let (path, other) = (path.parts(), other.parts());
    let reaches = |(part, own): (&String, &String)| part == "*" || part == own;
    path.iter().any(|part| part == "*") && path.len() <= other.len() && path.iter().zip(other).all(reaches)
}

/// What speaks against a call.
pub(super) struct Against {
    errors: Vec<FieldError>,
    /// Where nobody can tell whether it really does, why.
    doubt: Option<String>,
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
        if !self.approvers.is_empty() && !self.asks {
            problems.push(Problem::at("approvers", "nobody is asked by a rule that denies").help("use `ask`"));
        }
        problems.extend(self.refusal.problems(tools));
        problems
    }

    fn outline(&self, _: &Spec) -> Outline<'_> {
        let forbids = Forbids { conditions: &self.conditions, more: self.when.is_some(), asks: self.asks };
        Outline { forbids: Some(forbids), ..Outline::default() }
    }

    fn sources(&self) -> Option<Vec<&str>> {
        self.when.as_ref().and_then(Expression::sources)
    }

    fn definition(&self) -> String {
        format!("{self:?}")
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        needs.home = needs.home || self.wants_home(ask);
        if let Some(when) = &self.when {
            when.needs(ask, needs);
        }
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let Some(Against { errors, doubt }) = self.against(ask)? else { return Ok(Verdict::allow()) };
        if let Some(when) = &self.when
            && !when.holds(ask, None)?
        {
            return Ok(Verdict::allow());
        }
        if let Some(doubt) = doubt {
            let reason = format!("It cannot be told what this call does: {doubt}.");
            return Ok(Verdict::Ask(reason, Terms { approvers: self.approvers.clone(), ..Terms::default() }));
        }
        if self.asks {
            return Ok(Verdict::Ask(self.refusal.reason.clone(), Terms { approvers: self.approvers.clone(), ..Terms::default() }));
        }
        let mut error = self.refusal.error();
        error.errors = errors;
        Ok(Verdict::deny(error))
    }

    fn remedies(&self, _: &Ask<'_>) -> Option<Vec<Remedy>> {
        // What hangs on the arguments alone stays as it is; an expression may hang on the time, on limits, on origins.
        self.when.is_none().then(Vec::new)
    }
}
