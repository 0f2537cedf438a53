//! Implements `require`: a tool needs an earlier success of another tool, optionally about the
//! same entity, of a maximum age, and with given fields.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::{Value, json};

use super::cel::Expression;
use super::definition;
use super::{Ask, Condition, Deny, Fault, Needs, Note, Outline, Policy, Problem, Refusal, Remedy, ToolNames, Verdict};
use crate::diagnostic::{not_one, secret_key};
use crate::policy::denial::{expression_setters, refusal_setters};
use crate::policy::unsatisfiable::never_proved;
use crate::session::state::{Evidence, Origin};
use crate::tool::Spec;
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
    fields: Vec<(String, Wanted)>,
    when: Option<Expression>,
    max_age: Option<SignedDuration>,
    accepts_reported: bool,
    /// If set, the rule applies only to calls that meet these conditions.
    applies_if: Option<Box<Deny>>,
    refusal: Refusal,
}

/// The required value of a proved field.
#[derive(Debug, Clone)]
enum Wanted {
    Value(Value),
    Argument(Pointer),
}

impl Require {
    /// Creates a rule: `tools` need an earlier success of one tool in `any_of`.
    pub fn new<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>, any_of: impl IntoIterator<Item = &'a str>) -> Self {
        let any_of = ToolNames::of(any_of);
        let wanted = any_of.iter().map(|tool| format!("`{tool}`")).collect::<Vec<_>>().join(" or ");
        let refusal = Refusal {
            code: crate::call::error_code::PREREQUISITE_MISSING.to_owned(),
            ..Refusal::of(name, format!("{wanted} must have succeeded first in this session"))
        };
        Self {
            name: name.to_owned(),
            tools: ToolNames::of(tools),
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
        let only = self.applies_if.take().map_or_else(|| Deny::new(&self.name, self.tools.iter().map(|tool| &**tool)), |only| *only);
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
        self.fields.push((path.into().to_string(), Wanted::Value(toolgate_json::with_canonical_numbers(value))));
        self
    }

    /// Requires a proved field to equal this argument.
    #[must_use]
    pub fn field_is_argument(mut self, path: impl Into<Pointer>, argument: impl Into<Pointer>) -> Self {
        self.fields.push((path.into().to_string(), Wanted::Argument(argument.into())));
        self
    }

    expression_setters!("Requires a CEL expression to hold; `result` is the evidence, see [`super::cel`].");

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

    fn entity<'a>(&'a self, ask: &Ask<'a>) -> Result<Option<(&'a Arc<str>, &'a Value)>, Fault> {
        let Some((name, path)) = &self.same else { return Ok(None) };
        let value = ask.said(path).ok_or_else(|| Fault::new(format!("cannot compare `{path}`: the argument is missing")))?;
        Ok(Some((name, value)))
    }

    fn is_fresh(&self, proof: &Evidence, ask: &Ask<'_>) -> bool {
        let age = ask.facts.now.duration_since(proof.at);
        // Evidence from the future (the clock went back) is not fresh.
        let fresh = self.max_age.is_none_or(|within| !age.is_negative() && age <= within);
        ask.note(|| Note {
            what: self
                .max_age
                .map_or_else(|| format!("`{}` succeeded", proof.tool), |w| format!("`{}` succeeded within {w:#}", proof.tool)),
            found: match age.as_secs() {
                _ if age.is_negative() => "later than now".to_owned(),
                0 => "just now".to_owned(),
                seconds => format!("{:#} ago", SignedDuration::from_secs(seconds)),
            },
            holds: fresh,
        });
        fresh
    }

    fn is_proved(&self, proof: &Evidence, ask: &Ask<'_>) -> Result<bool, Fault> {
        if proof.origin == Origin::Assumed {
            return Ok(true);
        }
        for (path, wanted) in &self.fields {
            let shown = |value: &Value| match wanted {
                Wanted::Value(_) => toolgate_text::shown(&value.to_string()),
                Wanted::Argument(path) => ask.shown(path, value),
            };
            let wanted = match wanted {
                Wanted::Value(value) => Some(value),
                Wanted::Argument(path) => ask.argument(path).filter(|value| !value.is_null()),
            };
            // A value that is missing or null on both sides does not count as equal.
            let found = proof.fields.get(path);
            let holds = wanted.is_some() && found == wanted;
            ask.note(|| Note {
                what: format!("{path} of `{}` is {}", proof.tool, wanted.map_or_else(|| "nothing".to_owned(), shown)),
                found: found.map_or_else(|| "nothing".to_owned(), shown),
                holds,
            });
            if !holds {
                return Ok(false);
            }
        }
        self.when.as_ref().map_or(Ok(true), |when| when.holds(ask, Some(proof)))
    }

    fn proof<'a>(&'a self, ask: &Ask<'a>, tool: &str) -> Result<Option<&'a Evidence>, Fault> {
        let about = self.entity(ask)?;
        ask.evidence_of(tool, about.map(|(name, value)| (&**name, value)), self.accepts_reported)
    }
}

impl Policy for Require {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &Spec) -> bool {
        self.tools.contains(tool.name())
    }

    fn looks_back(&self) -> Option<SignedDuration> {
        self.max_age.filter(|_| self.when.is_none())
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<Problem> {
        let mut problems = self.tools.unknown("tools", tools);
        problems.extend(self.any_of.unknown("any_of", tools));
        problems.extend(self.applies_if.iter().flat_map(|only| only.unfit_conditions(tools)));
        let same = self.same.iter().map(|(entity, path)| (format!("same.{entity}"), path));
        let compared = self.fields.iter().filter_map(|(field, wanted)| match wanted {
            Wanted::Argument(path) => Some((format!("fields.{field}"), path)),
            Wanted::Value(_) => None,
        });
        let arguments: Vec<(String, &Pointer)> = same.chain(compared).collect();
        problems.extend(arguments.iter().filter_map(|(field, path)| not_one(field, path)));
        let governed: Vec<&Spec> = tools.iter().copied().filter(|tool| self.governs(tool)).collect();
        problems.extend(self.same.iter().filter_map(|(entity, path)| secret_key(&format!("same.{entity}"), path, &governed)));
        problems.extend(self.tools.unknown_arguments(tools, arguments.iter().map(|(field, path)| (field.clone(), *path))));
        let sources: Vec<&Spec> = tools.iter().copied().filter(|tool| self.any_of.contains(tool.name())).collect();
        for source in &sources {
            if let Some((entity, _)) = &self.same {
                problems.extend(source.lacks_entity(&format!("same.{entity}"), entity));
            }
            for (path, wanted) in &self.fields {
                let (field, path) = (format!("fields.{path}"), Pointer::from(path.as_str()));
                let never = || match wanted {
                    Wanted::Value(value) => never_proved(&field, &path, value, source),
                    Wanted::Argument(_) => None,
                };
                problems.extend(source.lacks_proof(&field, &path).or_else(never));
            }
            problems.extend(source.run_by_client("any_of").filter(|_| !self.accepts_reported));
        }
        problems.extend(self.when.iter().flat_map(|when| when.problems("when", &governed, tools, Some(&sources))));
        if self.max_age.is_some_and(|age| age <= SignedDuration::ZERO) {
            problems.push(Problem::at("within", "the age must be longer than 0").help("like `15m`"));
        }
        problems.extend(self.refusal.problems(tools));
        problems
    }

    fn outline(&self, _: &Spec) -> Outline<'_> {
        // With conditions, only some calls need the evidence.
        if self.applies_if.is_some() {
            return Outline::default();
        }
        Outline { prerequisites: vec![("any_of".to_owned(), self.any_of.iter().map(|tool| &**tool).collect())], ..Outline::default() }
    }

    fn sources(&self) -> Option<Vec<&str>> {
        self.when.as_ref().and_then(Expression::sources)
    }

    fn definition(&self) -> String {
        let field = |(name, wanted): &(String, Wanted)| match wanted {
            Wanted::Value(value) => json!({ "field": name, "value": value }),
            Wanted::Argument(path) => json!({ "field": name, "argument": path.to_string() }),
        };
        let parts = json!({
            "name": self.name,
            "tools": definition::names(&self.tools),
            "any_of": definition::names(&self.any_of),
            "same": self.same.as_ref().map(|(entity, path)| json!([entity, path.to_string()])),
            "fields": self.fields.iter().map(field).collect::<Value>(),
            "when": self.when.as_ref().map(Expression::definition_parts),
            "within": self.max_age.map(definition::duration),
            "reported": self.accepts_reported,
            "only": self.applies_if.as_ref().map(|only| only.definition_parts()),
            "refusal": definition::refusal(&self.refusal),
        });
        definition::definition("require", &parts)
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        if let Some(only) = &self.applies_if {
            only.needs(ask, needs);
        }
        let Ok(about) = self.entity(ask) else { return };
        for tool in self.any_of.iter() {
            needs.evidence_of(tool, about, self.accepts_reported);
        }
        if let Some(when) = &self.when {
            when.needs(ask, needs);
        }
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        if let Some(only) = &self.applies_if
            && only.against(ask)?.is_none()
        {
            return Ok(Verdict::allow());
        }
        for tool in self.any_of.iter() {
            match self.proof(ask, tool)? {
                Some(proof) if self.is_fresh(proof, ask) && self.is_proved(proof, ask)? => return Ok(Verdict::allow()),
                Some(_) => {}
                None => ask.note(|| Note {
                    what: format!(
                        "`{tool}` succeeded{}",
                        self.same.as_ref().map_or_else(String::new, |(entity, _)| format!(" about the same `{entity}`"))
                    ),
                    found: "never in this session".to_owned(),
                    holds: false,
                }),
            }
        }
        Ok(Verdict::deny(self.refusal.error()))
    }

    fn remedies(&self, ask: &Ask<'_>) -> Option<Vec<Remedy>> {
        let about = self.entity(ask).ok()?;
        let helps = |tool: &&Arc<str>| match self.proof(ask, tool) {
            // Fresh evidence with other fields exists, so repeating the call would not help.
            Ok(Some(proof)) => !self.is_fresh(proof, ask),
            Ok(None) => true,
            Err(_) => false,
        };
        let about = about.map(|(name, value)| (Arc::clone(name), value.clone()));
        let remedy = |tool: &Arc<str>| Remedy { tool: Arc::clone(tool), about: about.clone(), ..Remedy::default() };
        let remedies: Vec<Remedy> = self.any_of.iter().filter(helps).map(remedy).collect();
        // If all evidence is fresh, the answer may still change later, so the help is unknown.
        (!remedies.is_empty()).then_some(remedies)
    }
}
