//! What must be right about an agent before it is built.

use std::collections::{BTreeMap, BTreeSet};

use super::AgentBuilder;
use crate::config::{Scope, Written};
use crate::names::{is_tool_name, shown};
use crate::policy::Problem;
use crate::schema::{At, Schema, at, resolve};
use crate::tool::Spec;
use crate::values::USER;

impl AgentBuilder {
    /// A limit that limits nothing is none.
    pub(super) fn check_limits(&self, problems: &mut Vec<Problem>) {
        if self.limits.principal.wall.is_some() {
            problems
                .push(Problem::new("a principal has no beginning that its time could be counted from").help("set the wall of the session"));
        }
        if self.limits.rate.is_some_and(|rate| rate.per.is_zero()) {
            problems.push(Problem::new("a rate is so many calls in so long, and `per` is no time at all").help("say how long"));
        }
    }

    pub(super) fn check_attachments(&self, problems: &mut Vec<Problem>) {
        let specs: Vec<&Spec> = self.tools.iter().map(|(_, tool)| tool.spec()).collect();
        let sections: BTreeSet<&str> = self.tools.iter().filter_map(|(section, _)| section.as_deref()).collect();
        let mut names: BTreeMap<&str, &Written> = BTreeMap::new();
        for written in &self.policies {
            let policy = &written.policy;
            let place = |problem: Problem| {
                let place = written.place(&problem.field, problem.within.clone());
                Problem { place, ..problem }.of(policy.name())
            };
            if let Some(first) = names.insert(policy.name(), written) {
                let help = match first.file().filter(|(file, _)| written.file().is_none_or(|(own, _)| own != *file)) {
                    Some((file, _)) => format!("{file} has one of this name, which says something else; give this one another"),
                    None => "one name, one rule".to_owned(),
                };
                let problem = Problem::at("name", format!("two policies are called `{}`", shown(policy.name()))).help(help);
                problems.push(Problem { rule: None, ..place(problem) });
            }
            problems.extend(policy.problems(&specs).into_iter().map(place));
            let before = problems.len();
            match &written.scope {
                Scope::Tools(tools) => {
                    for tool in tools.iter().filter(|tool| !specs.iter().any(|spec| spec.name() == *tool)) {
                        let problem = Problem::at("tools", format!("it is attached to `{}`, which is no tool of this agent", shown(tool)));
                        let problem = problem.of_unknown(tool);
                        problems.push(place(problem.did_you_mean(tool, specs.iter().map(|spec| spec.name()))));
                    }
                }
                Scope::Section(name) if !sections.contains(name.as_str()) => {
                    let problem = Problem::at("section", format!("there is no section `{}` with tools", shown(name)));
                    problems.push(place(problem.did_you_mean(name, sections.iter())));
                }
                Scope::Section(_) | Scope::Prompt | Scope::Agent => {}
            }
            // What is attached to nothing reaches nothing; that is said already.
            if problems.len() == before {
                problems.extend(self.check_reach(written).map(place));
            }
        }
        if self.policies.iter().any(|written| written.policy.sources().is_some()) && specs.iter().any(|spec| spec.name() == USER) {
            problems.push(
                Problem::new("a tool is called `user`, and rules about where values come from mean the user by it").help("rename the tool"),
            );
        }
    }

    /// A rule that is attached where it has nothing to say would never speak.
    fn check_reach(&self, written: &Written) -> Option<Problem> {
        let within = |section: &Option<String>, tool: &Spec| match &written.scope {
            Scope::Tools(names) => names.iter().any(|name| name == tool.name()),
            Scope::Section(name) => section.as_ref() == Some(name),
            Scope::Prompt | Scope::Agent => true,
        };
        let governed = || self.tools.iter().map(|(section, tool)| (section, tool.spec())).filter(|(_, spec)| written.policy.governs(spec));
        let (mut inside, mut outside) =
            (governed().filter(|(section, spec)| within(section, spec)), governed().filter(|(section, spec)| !within(section, spec)));
        let (_, outside) = outside.next()?;
        // A rule in a file names its tools one by one, and means each of them. One in Rust may speak of a kind of tool.
        if !written.is_from_a_file() && inside.next().is_some() {
            return None;
        }
        let field = if matches!(written.scope, Scope::Section(_)) { "section" } else { "level" };
        let problem = Problem::at(field, format!("it is about `{}`, which is not where the rule is attached", outside.name()));
        Some(problem.help("attach it to the agent, or to where all its tools are"))
    }

    /// Evidence of a tool that is not there cannot be taken away.
    pub(super) fn check_revocations(&self, problems: &mut Vec<Problem>) {
        let names: BTreeSet<&str> = self.tools.iter().map(|(_, tool)| tool.spec().name()).collect();
        for (_, tool) in &self.tools {
            for (of, _) in tool.spec().revokes.iter().filter(|(of, _)| !names.contains(&**of)) {
                let message =
                    format!("`{}` takes away evidence of `{}`, which is no tool of this agent", shown(tool.spec().name()), shown(of));
                problems.push(Problem::new(message).of_unknown(of));
            }
        }
    }

    /// Who is asked about what nobody knows can be asked.
    pub(super) fn check_reconciliations(&self, problems: &mut Vec<Problem>) {
        let specs: Vec<&Spec> = self.tools.iter().map(|(_, tool)| tool.spec()).collect();
        problems.extend(specs.iter().filter_map(|spec| Some(spec.reconcile.as_ref()?.problems(spec, &specs))).flatten());
    }

    /// Approvals remember who asked by name, so a name must mean one thing.
    pub(super) fn check_hooks(&self, problems: &mut Vec<Problem>) {
        let mut names: BTreeSet<&str> = self.policies.iter().map(|written| written.policy.name()).collect();
        for hook in &self.hooks {
            if !names.insert(hook.name()) {
                problems.push(Problem::new(format!("the hook `{}` has the name of another hook or policy", shown(hook.name()))));
            }
            // One that is for every tool is for those that come.
            if !hook.matches("") && !self.tools.iter().any(|(_, tool)| hook.matches(tool.spec().name())) {
                let message = format!("the hook `{}` is meant for no tool of this agent, so it would never be asked", shown(hook.name()));
                problems.push(Problem::new(message));
            }
        }
    }
}

/// The sources that rules ask about, if any does.
pub(super) fn watched(policies: &[Written]) -> Option<BTreeSet<String>> {
    let asked: Vec<Vec<&str>> = policies.iter().filter_map(|written| written.policy.sources()).collect();
    (!asked.is_empty()).then(|| asked.into_iter().flatten().map(str::to_owned).collect())
}

pub(super) fn check_words(spec: &Spec) -> Vec<String> {
    let mut problems = Vec::new();
    let name = shown(&spec.name);
    if !is_tool_name(&spec.name) {
        problems.push(format!("`{name}` is no tool name: 1 to 64 of a-z, 0-9, `_` and `-`"));
    }
    let length = spec.description.chars().count();
    if !(1..=1_024).contains(&length) {
        problems.push(format!("the description of `{name}` has {length} characters; 1 to 1,024 are allowed"));
    }
    for entity in spec.revokes.iter().filter_map(|(_, entity)| entity.as_ref()) {
        if !spec.entities.iter().any(|(name, _)| name == entity) {
            problems.push(format!("`{name}` takes away evidence about `{entity}`, and declares no such entity"));
        }
    }
    for entity in spec.keeps.iter().filter(|entity| !spec.entities.iter().any(|(name, _)| name == *entity)) {
        problems.push(format!("`{name}` keeps what it writes under `{entity}`, and declares no such entity"));
    }
    for (entity, path) in spec.entities.iter().filter(|(_, path)| crate::redact::is_secret(path, &spec.secrets)) {
        problems.push(format!("the entity `{entity}` of `{name}` is its secret `{path}`; what is looked up by it would be written down"));
    }
    for path in spec.entities.iter().map(|(_, path)| path).chain(&spec.proves) {
        if path.parts().iter().any(|part| part == "*") {
            problems.push(format!("`{path}` of `{name}` names more than one value; an entity or a proved field is one"));
        }
    }
    for lacks in spec.normalize.iter().filter_map(crate::normalize::Rule::lacks) {
        problems.push(format!("a rule of `{name}` for its results {lacks}"));
    }
    if spec.polling.is_some_and(|polling| polling.max_unchanged == 0) {
        problems.push(format!("`{name}` may be polled 0 times, so it could never be called"));
    }
    // What a model sends is an object.
    if !spec.external && spec.input.as_ref().and_then(|input| input.get("type")).is_some_and(|kind| kind == "null") {
        problems
            .push(format!("`{name}` takes `null` for its arguments, so no model could call it; without arguments, take a struct `{{}}`"));
    }
    for example in &spec.examples {
        if example.description.chars().count() > 200 {
            problems.push(format!("an example of `{name}` has a description of more than 200 characters"));
        }
    }
    problems
}

/// A shell command that stands nowhere, or is never text, is one that no rule reads.
pub(super) fn check_shell(spec: &Spec) -> Option<Problem> {
    let path = spec.shell.as_ref()?;
    let told = |what: &str| Problem::new(format!("the shell command of `{}` is said to be `{path}`, {what}", shown(&spec.name)));
    let one = "name one argument, like `shell = \"/command\"`";
    if path.parts().is_empty() || path.parts().iter().any(|part| part == "*") {
        return Some(told("which is not one argument").help(one));
    }
    match at(spec, path) {
        At::Missing(name, known) => Some(told("and it has no such argument").did_you_mean(&name, known.iter()).or_help(one)),
        At::Open => None,
        At::Known(schema) => {
            let kind = resolve(schema, spec.input_schema()?)?.get("type")?;
            let is_text = kind == "string" || kind.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "string"));
            (!is_text).then(|| told("which is never text").help("a command in a list of words is not read; name the argument that is text"))
        }
    }
}

pub(super) fn check_examples(spec: &Spec, input: Option<&Schema>, output: Option<&Schema>) -> Vec<Problem> {
    let mut problems = Vec::new();
    for example in &spec.examples {
        let checks = [(input, &example.input, "input"), (output, &example.output, "output")];
        for (schema, value, what) in checks {
            if let Some(Err(invalid)) = schema.map(|schema| schema.check(&spec.name, value)) {
                let of = format!("the example `{}` of `{}`", shown(&example.description), shown(&spec.name));
                let problem = Problem::new(format!("{of} has an {what} that does not fit: {}", invalid.message));
                problems.push(problem.help(format!("an example is a call as it could be; mend its `{what}`, or take it out")));
            }
        }
    }
    problems
}
