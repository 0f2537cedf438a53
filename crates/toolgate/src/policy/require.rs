//! `require`: a tool needs a success of another, about the same entity, fresh, with these fields.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::Value;

use super::cel::Expression;
use super::never::never_proved;
use super::problem::{not_one, secret_key};
use super::refusal::{expression_setters, refusal_setters};
use super::{Ask, Condition, Deny, Fault, Needs, Note, Outline, Policy, Problem, Refusal, Remedy, ToolNames, Verdict};
use crate::json::Pointer;
use crate::session::{Evidence, Origin};
use crate::tool::Spec;

/// Needs a success of one of some tools, in this session.
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
    /// Any of these will do.
    any_of: ToolNames,
    same: Option<(Arc<str>, Pointer)>,
    fields: Vec<(String, Wanted)>,
    when: Option<Expression>,
    within: Option<SignedDuration>,
    reported: bool,
    /// Where there are conditions, only calls that meet them need it.
    only: Option<Box<Deny>>,
    refusal: Refusal,
}

/// What a proved field must be.
#[derive(Debug, Clone)]
enum Wanted {
    Value(Value),
    Argument(Pointer),
}

impl Require {
    /// These tools need a success of any of those.
    pub fn new<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>, any_of: impl IntoIterator<Item = &'a str>) -> Self {
        let any_of = ToolNames::of(any_of);
        let wanted = any_of.iter().map(|tool| format!("`{tool}`")).collect::<Vec<_>>().join(" or ");
        let refusal = Refusal {
            code: crate::code::PREREQUISITE_MISSING.to_owned(),
            ..Refusal::of(name, format!("{wanted} must have succeeded first in this session"))
        };
        Self {
            name: name.to_owned(),
            tools: ToolNames::of(tools),
            any_of,
            same: None,
            fields: Vec::new(),
            when: None,
            within: None,
            reported: false,
            only: None,
            refusal,
        }
    }

    /// Only calls of which this holds need it, and all other conditions too. An argument that is absent meets every condition.
    #[must_use]
    pub fn only_when(mut self, argument: impl Into<Pointer>, condition: Condition) -> Self {
        let only = self.only.take().map_or_else(|| Deny::new(&self.name, self.tools.iter().map(|tool| &**tool)), |only| *only);
        self.only = Some(Box::new(only.when(argument, condition)));
        self
    }

    /// It must have been about the entity that this argument names.
    #[must_use]
    pub fn same(mut self, entity: &str, argument: impl Into<Pointer>) -> Self {
        self.same = Some((entity.into(), argument.into()));
        self
    }

    /// A field that it proved must have this value.
    #[must_use]
    pub fn field(mut self, path: impl Into<Pointer>, value: Value) -> Self {
        self.fields.push((path.into().to_string(), Wanted::Value(crate::json::plain(value))));
        self
    }

    /// A field that it proved must be what this argument says.
    #[must_use]
    pub fn field_is_argument(mut self, path: impl Into<Pointer>, argument: impl Into<Pointer>) -> Self {
        self.fields.push((path.into().to_string(), Wanted::Argument(argument.into())));
        self
    }

    expression_setters!("This must hold of it: an expression in CEL in which `result` is what it proved; see [`super::cel`].");

    /// It must not be older than this.
    #[must_use]
    pub const fn within(mut self, age: SignedDuration) -> Self {
        self.within = Some(age);
        self
    }

    /// Lets what a client reports count as well.
    #[must_use]
    pub const fn accept_reported(mut self) -> Self {
        self.reported = true;
        self
    }

    refusal_setters!();

    fn entity<'a>(&'a self, ask: &Ask<'a>) -> Result<Option<(&'a Arc<str>, &'a Value)>, Fault> {
        let Some((name, path)) = &self.same else { return Ok(None) };
        let value = ask.said(path).ok_or_else(|| Fault::new(format!("there is no `{path}` to compare")))?;
        Ok(Some((name, value)))
    }

    fn is_fresh(&self, proof: &Evidence, ask: &Ask<'_>) -> bool {
        let age = ask.facts.now.duration_since(proof.at);
        // A clock that went back makes nothing fresh.
        let fresh = self.within.is_none_or(|within| !age.is_negative() && age <= within);
        ask.note(|| Note {
            what: self.within.map_or_else(|| format!("`{}` succeeded", proof.tool), |w| format!("`{}` succeeded within {w:#}", proof.tool)),
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
                Wanted::Value(_) => crate::names::shown(&value.to_string()),
                Wanted::Argument(path) => ask.shown(path, value),
            };
            let wanted = match wanted {
                Wanted::Value(value) => Some(value),
                Wanted::Argument(path) => ask.argument(path).filter(|value| !value.is_null()),
            };
            // What is missing, or null, on both sides is not the same.
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
        ask.evidence_of(tool, about.map(|(name, value)| (&**name, value)), self.reported)
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
        self.within.filter(|_| self.when.is_none())
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<Problem> {
        let mut problems = self.tools.unknown("tools", tools);
        problems.extend(self.any_of.unknown("any_of", tools));
        problems.extend(self.only.iter().flat_map(|only| only.unfit_conditions(tools)));
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
            problems.extend(source.run_by_client("any_of").filter(|_| !self.reported));
        }
        problems.extend(self.when.iter().flat_map(|when| when.problems("when", &governed, tools, Some(&sources))));
        if self.within.is_some_and(|age| age <= SignedDuration::ZERO) {
            problems.push(Problem::at("within", "nothing is ever that fresh").help("like `15m`"));
        }
        problems.extend(self.refusal.problems(tools));
        problems
    }

    fn outline(&self, _: &Spec) -> Outline<'_> {
        // What some calls need, not all do.
        if self.only.is_some() {
            return Outline::default();
        }
        Outline { after: vec![("any_of".to_owned(), self.any_of.iter().map(|tool| &**tool).collect())], ..Outline::default() }
    }

    fn sources(&self) -> Option<Vec<&str>> {
        self.when.as_ref().and_then(Expression::sources)
    }

    fn definition(&self) -> String {
        format!("{self:?}")
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        if let Some(only) = &self.only {
            only.needs(ask, needs);
        }
        let Ok(about) = self.entity(ask) else { return };
        for tool in self.any_of.iter() {
            needs.evidence_of(tool, about, self.reported);
        }
        if let Some(when) = &self.when {
            when.needs(ask, needs);
        }
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        if let Some(only) = &self.only
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
            // What was asked a moment ago and answered otherwise is not asked again.
            Ok(Some(proof)) => !self.is_fresh(proof, ask),
            Ok(None) => true,
            Err(_) => false,
        };
        let about = about.map(|(name, value)| (Arc::clone(name), value.clone()));
        let remedy = |tool: &Arc<str>| Remedy { tool: Arc::clone(tool), about: about.clone(), ..Remedy::default() };
        let remedies: Vec<Remedy> = self.any_of.iter().filter(helps).map(remedy).collect();
        // Another day the answer may be another.
        (!remedies.is_empty()).then_some(remedies)
    }
}
