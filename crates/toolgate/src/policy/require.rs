//! `require`: a tool needs a success of another, about the same entity, fresh, with these fields.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::{Map, Value};

use super::refusal::refusal_setters;
use super::{Ask, Fault, Needs, Policy, Refusal, ToolNames, Verdict};
use crate::error::NextStep;
use crate::json::Pointer;
use crate::session::Evidence;
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
    any_of: Vec<Arc<str>>,
    same: Option<(Arc<str>, Pointer)>,
    fields: Vec<(String, Wanted)>,
    within: Option<SignedDuration>,
    reported: bool,
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
        let any_of: Vec<Arc<str>> = any_of.into_iter().map(Arc::from).collect();
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
            within: None,
            reported: false,
            refusal,
        }
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
        self.fields.push((path.into().to_string(), Wanted::Value(value)));
        self
    }

    /// A field that it proved must be what this argument says.
    #[must_use]
    pub fn field_is_argument(mut self, path: impl Into<Pointer>, argument: impl Into<Pointer>) -> Self {
        self.fields.push((path.into().to_string(), Wanted::Argument(argument.into())));
        self
    }

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
        let value = ask.argument(path).ok_or_else(|| Fault::new(format!("there is no `{path}` to compare")))?;
        Ok(Some((name, value)))
    }

    fn satisfied_by(&self, proof: &Evidence, ask: &Ask<'_>) -> bool {
        let age = ask.facts.now.duration_since(proof.at);
        // A clock that went back makes nothing fresh.
        let fresh = self.within.is_none_or(|within| !age.is_negative() && age <= within);
        let proved = self.fields.iter().all(|(path, wanted)| {
            let wanted = match wanted {
                Wanted::Value(value) => Some(value),
                Wanted::Argument(path) => ask.argument(path),
            };
            // What is missing on both sides is not the same.
            wanted.is_some() && proof.fields.get(path) == wanted
        });
        fresh && proved
    }
}

impl Policy for Require {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &Spec) -> bool {
        self.tools.contains(tool.name())
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<String> {
        let mut problems = self.tools.unknown(tools);
        problems.extend(self.refusal.problems(tools));
        problems.extend(ToolNames::of(self.any_of.iter().map(AsRef::as_ref)).unknown(tools));
        let compared = self.fields.iter().filter_map(|(_, wanted)| match wanted {
            Wanted::Argument(path) => Some(path),
            Wanted::Value(_) => None,
        });
        let arguments = self.same.iter().map(|(_, path)| path).chain(compared);
        problems.extend(ToolNames::not_one(arguments.clone()));
        problems.extend(self.tools.unknown_arguments(tools, arguments));
        for source in tools.iter().filter(|tool| self.any_of.iter().any(|name| **name == *tool.name())) {
            if let Some((entity, _)) = &self.same
                && !source.entities.iter().any(|(name, _)| name == entity)
            {
                problems.push(format!("`{}` declares no entity `{entity}`, so nothing it proves can be compared", source.name()));
            }
            for (path, _) in self.fields.iter().filter(|(path, _)| !source.proves.iter().any(|p| p.to_string() == *path)) {
                problems.push(format!("`{}` does not declare that it proves `{path}`", source.name()));
            }
        }
        problems
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        let Ok(about) = self.entity(ask) else { return };
        for tool in &self.any_of {
            needs.evidence_of(tool, about, self.reported);
        }
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let about = self.entity(ask)?;
        for tool in &self.any_of {
            let proof = ask.evidence_of(tool, about.map(|(name, value)| (&**name, value)), self.reported)?;
            if proof.is_some_and(|proof| self.satisfied_by(proof, ask)) {
                return Ok(Verdict::allow());
            }
        }
        let mut error = self.refusal.error();
        // A secret is not written into an error to be helpful.
        let secret = self.same.as_ref().is_some_and(|(_, path)| ask.is_secret(path));
        let shown = about.filter(|_| !secret).map(|(name, value)| (name.to_string(), value.clone()));
        let arguments: Map<String, Value> = shown.into_iter().collect();
        error.next = self.any_of.first().map(|tool| NextStep { tool: tool.to_string(), arguments: Value::Object(arguments) });
        Ok(Verdict::deny(error))
    }
}
