//! Checks the limits, attachments, hooks and tools of an agent before it is built.

use std::collections::{BTreeMap, BTreeSet};

use super::AgentBuilder;
use crate::policy::source::{PolicyScope, SourcedRule};
use crate::policy::{Diagnostic, DiagnosticKind};
use crate::provenance::USER_SOURCE;
use crate::schema::{CompiledSchema, SchemaLookup, lookup_input, resolve_object};
use crate::tool::ToolSpec;
use crate::tool::name::is_tool_name;
use toolgate_text::escape_for_display;

impl AgentBuilder {
    /// Rejects limits that can never take effect.
    pub(crate) fn check_limits(&self, problems: &mut Vec<Diagnostic>) {
        if self.limits.principal.wall.is_some() {
            problems.push(
                Diagnostic::new(
                    "`wall` cannot limit a principal, because a principal has no start time",
                )
                .with_help("set the wall of the session"),
            );
        }
        if self.limits.rate.is_some_and(|rate| rate.per.is_zero()) {
            problems.push(
                Diagnostic::new("`per` of a rate limit must be longer than zero")
                    .with_help("set the length of the window"),
            );
        }
    }

    pub(crate) fn check_attachments(&self, problems: &mut Vec<Diagnostic>) {
        let specs: Vec<&ToolSpec> = self.tools.iter().map(|(_, tool)| tool.spec()).collect();
        let sections: BTreeSet<&str> =
            self.tools.iter().filter_map(|(section, _)| section.as_deref()).collect();
        let mut names: BTreeMap<&str, &SourcedRule> = BTreeMap::new();
        for rule in &self.policies {
            let policy = &rule.policy;
            let locate = |problem: Diagnostic| {
                let span = rule.source_span(&problem.field, problem.field_range.clone());
                Diagnostic { span, ..problem }.with_rule(policy.name())
            };
            if let Some(first) = names.insert(policy.name(), rule) {
                let help = match first.file().filter(|(file, _)| {
                    rule.file().is_none_or(|(other_file, _)| other_file != *file)
                }) {
                    Some((file, _)) => {
                        format!("{file} has a different rule of this name; rename one of them")
                    }
                    None => "give each rule its own name".to_owned(),
                };
                let problem = Diagnostic::at_field(
                    "name",
                    format!("two policies have the name `{}`", escape_for_display(policy.name())),
                )
                .with_help(help);
                problems.push(Diagnostic { rule: None, ..locate(problem) });
            }
            problems.extend(policy.problems(&specs).into_iter().map(locate));
            let before = problems.len();
            match &rule.scope {
                PolicyScope::Tools(tools) => {
                    for tool in
                        tools.iter().filter(|tool| !specs.iter().any(|spec| spec.name() == *tool))
                    {
                        let problem = Diagnostic::at_field(
                            "tools",
                            format!(
                                "the rule is attached to `{}`, which is not a tool of this agent",
                                escape_for_display(tool)
                            ),
                        );
                        let problem = problem.with_unknown_tool(tool);
                        problems.push(locate(
                            problem.with_suggestion(tool, specs.iter().map(|spec| spec.name())),
                        ));
                    }
                }
                PolicyScope::Section(name) if !sections.contains(name.as_str()) => {
                    let problem = Diagnostic::at_field(
                        "section",
                        format!("no section `{}` with tools", escape_for_display(name)),
                    );
                    problems.push(locate(problem.with_suggestion(name, sections.iter())));
                }
                PolicyScope::Section(_) | PolicyScope::Prompt | PolicyScope::Agent => {}
            }
            // A rule that is attached to a missing tool was reported above.
            if problems.len() == before {
                problems.extend(self.check_scope(rule).map(locate));
            }
        }
        if self.policies.iter().any(|rule| rule.policy.provenance_sources().is_some())
            && specs.iter().any(|spec| spec.name() == USER_SOURCE)
        {
            problems.push(
                Diagnostic::new(
                    "the tool name `user` is reserved: rules about provenance use it for the user",
                )
                .with_help("rename the tool"),
            );
        }
    }

    /// Finds a rule that governs tools outside of its scope, where it never applies.
    fn check_scope(&self, rule: &SourcedRule) -> Option<Diagnostic> {
        let within = |section: &Option<String>, tool: &ToolSpec| match &rule.scope {
            PolicyScope::Tools(names) => names.iter().any(|name| name == tool.name()),
            PolicyScope::Section(name) => section.as_ref() == Some(name),
            PolicyScope::Prompt | PolicyScope::Agent => true,
        };
        let governed = || {
            self.tools
                .iter()
                .map(|(section, tool)| (section, tool.spec()))
                .filter(|(_, spec)| rule.policy.governs(spec))
        };
        let (mut inside, mut outside) = (
            governed().filter(|(section, spec)| within(section, spec)),
            governed().filter(|(section, spec)| !within(section, spec)),
        );
        let (_, outside) = outside.next()?;
        // A rule in a file lists its tools, and each must be in scope. A rule in Rust may govern a
        // kind of tool, so one tool in scope is enough.
        if !rule.is_from_file() && inside.next().is_some() {
            return None;
        }
        let field = if matches!(rule.scope, PolicyScope::Section(_)) { "section" } else { "level" };
        let problem = Diagnostic::at_field(
            field,
            format!("the rule governs `{}`, which is outside of its scope", outside.name()),
        );
        Some(problem.with_help("attach it to the agent, or to a scope that contains all its tools"))
    }

    /// Rejects revocations of tools that do not exist.
    pub(crate) fn check_revocations(&self, problems: &mut Vec<Diagnostic>) {
        let names: BTreeSet<&str> = self.tools.iter().map(|(_, tool)| tool.spec().name()).collect();
        for (_, tool) in &self.tools {
            for (of, _) in tool.spec().revokes.iter().filter(|(of, _)| !names.contains(&**of)) {
                let message = format!(
                    "`{}` revokes evidence of `{}`, which is not a tool of this agent",
                    escape_for_display(tool.spec().name()),
                    escape_for_display(of)
                );
                let problem =
                    Diagnostic::new(message).with_unknown_tool(of).with_subject(tool.spec().name());
                problems.push(problem.with_kind(DiagnosticKind::RevokesUnknownTool));
            }
        }
    }

    /// Checks the tools that reconcile calls with unknown outcome.
    pub(crate) fn check_reconciliations(&self, problems: &mut Vec<Diagnostic>) {
        let specs: Vec<&ToolSpec> = self.tools.iter().map(|(_, tool)| tool.spec()).collect();
        problems.extend(
            specs
                .iter()
                .filter_map(|spec| Some(spec.reconcile.as_ref()?.problems(spec, &specs)))
                .flatten(),
        );
    }

    /// Rejects duplicate names, because an approval stores the name of the rule or hook that asked.
    pub(crate) fn check_hooks(&self, problems: &mut Vec<Diagnostic>) {
        let mut names: BTreeSet<&str> =
            self.policies.iter().map(|rule| rule.policy.name()).collect();
        for hook in &self.hooks {
            if !names.insert(hook.name()) {
                problems.push(Diagnostic::new(format!(
                    "the hook `{}` has the name of another hook or policy",
                    escape_for_display(hook.name())
                )));
            }
            // A hook for every tool is allowed on an agent without tools.
            if !hook.matches("")
                && !self.tools.iter().any(|(_, tool)| hook.matches(tool.spec().name()))
            {
                let message = format!(
                    "the hook `{}` matches no tool of this agent, so it never runs",
                    escape_for_display(hook.name())
                );
                problems.push(
                    Diagnostic::new(message)
                        .with_subject(hook.name())
                        .with_kind(DiagnosticKind::UnusedHook),
                );
            }
        }
    }
}

/// Returns the sources that provenance rules refer to, or `None` without such rules.
pub(crate) fn tracked_sources(policies: &[SourcedRule]) -> Option<BTreeSet<String>> {
    let sources: Vec<Vec<&str>> =
        policies.iter().filter_map(|rule| rule.policy.provenance_sources()).collect();
    (!sources.is_empty()).then(|| sources.into_iter().flatten().map(str::to_owned).collect())
}

pub(crate) fn check_spec(spec: &ToolSpec) -> Vec<Diagnostic> {
    let mut problems = Vec::new();
    let name = escape_for_display(&spec.name);
    if !is_tool_name(&spec.name) {
        problems.push(Diagnostic::new(format!(
            "`{name}` is not a valid tool name: use 1 to 64 of a-z, 0-9, `_` and `-`"
        )));
    }
    let length = spec.description.chars().count();
    if !(1..=1_024).contains(&length) {
        problems.push(Diagnostic::new(format!(
            "the description of `{name}` has {length} characters; allowed are 1 to 1,024"
        )));
    }
    for entity in spec.revokes.iter().filter_map(|(_, entity)| entity.as_ref()) {
        if !spec.entities.iter().any(|(name, _)| name == entity) {
            problems.push(
                Diagnostic::new(format!(
                    "`{name}` revokes evidence about `{entity}`, but declares no such entity"
                ))
                .with_kind(DiagnosticKind::UndeclaredEntity),
            );
        }
    }
    for entity in
        spec.keeps.iter().filter(|entity| !spec.entities.iter().any(|(name, _)| name == *entity))
    {
        problems.push(
            Diagnostic::new(format!(
                "`{name}` stores text under `{entity}`, but declares no such entity"
            ))
            .with_kind(DiagnosticKind::UndeclaredEntity),
        );
    }
    for (entity, path) in
        spec.entities.iter().filter(|(_, path)| crate::redact::is_secret_path(path, &spec.secrets))
    {
        problems.push(Diagnostic::new(format!(
            "the entity `{entity}` of `{name}` is its secret `{path}`, but entities are recorded"
        )));
    }
    for path in spec.entities.iter().map(|(_, path)| path).chain(&spec.proves) {
        if path.parts().iter().any(|part| part == "*") {
            problems.push(Diagnostic::new(format!(
                "`{path}` of `{name}` matches more than one value, but an entity or evidence field has one"
            )));
        }
    }
    for missing in
        spec.normalize.iter().filter_map(crate::normalize::NormalizationRule::missing_setting)
    {
        problems.push(Diagnostic::new(format!("a normalization rule of `{name}` {missing}")));
    }
    if spec.polling.is_some_and(|polling| polling.max_unchanged == 0) {
        problems.push(Diagnostic::new(format!(
            "`{name}` may be polled 0 times, so it can never be called"
        )));
    }
    // Models always send an object.
    if !spec.external
        && spec
            .input
            .as_ref()
            .and_then(|input| input.get("type"))
            .is_some_and(|kind| kind == "null")
    {
        problems.push(Diagnostic::new(format!(
            "the arguments of `{name}` are `null`, but models send an object; for no arguments, use a struct `{{}}`"
        )));
    }
    for example in &spec.examples {
        if example.description.chars().count() > 200 {
            problems.push(Diagnostic::new(format!(
                "an example of `{name}` has a description of more than 200 characters"
            )));
        }
    }
    problems
}

/// Rejects a shell command that is absent or not text, because no rule could check it.
pub(crate) fn check_shell(spec: &ToolSpec) -> Option<Diagnostic> {
    let path = spec.shell.as_ref()?;
    let problem = |what: &str| {
        Diagnostic::new(format!(
            "the shell command of `{}` is declared as `{path}`, {what}",
            escape_for_display(&spec.name)
        ))
    };
    let help = "name one argument, like `shell = \"/command\"`";
    if path.parts().is_empty() || path.parts().iter().any(|part| part == "*") {
        return Some(problem("which is not exactly one argument").with_help(help));
    }
    match lookup_input(spec, path) {
        SchemaLookup::Missing(name, known) => Some(
            problem("which is not one of its arguments")
                .with_suggestion(&name, known.iter())
                .with_default_help(help),
        ),
        SchemaLookup::Open => None,
        SchemaLookup::Known(schema) => {
            let kind = resolve_object(schema, spec.input_schema()?)?.get("type")?;
            let is_text = kind == "string"
                || kind.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "string"));
            (!is_text).then(|| {
                problem("which is never a string").with_help("a command as a list of words is not checked; name an argument that is a string")
            })
        }
    }
}

pub(crate) fn check_examples(
    spec: &ToolSpec,
    input: Option<&CompiledSchema>,
    output: Option<&CompiledSchema>,
) -> Vec<Diagnostic> {
    let mut problems = Vec::new();
    for example in &spec.examples {
        let checks = [(input, &example.input, "input"), (output, &example.output, "output")];
        for (schema, value, what) in checks {
            if let Some(Err(invalid)) = schema.map(|schema| schema.check(&spec.name, value)) {
                let of = format!(
                    "the example `{}` of `{}`",
                    escape_for_display(&example.description),
                    escape_for_display(&spec.name)
                );
                let problem =
                    Diagnostic::new(format!("{of} has an invalid {what}: {}", invalid.message));
                problems.push(problem.with_help(format!(
                    "an example must be a valid call; fix its `{what}`, or remove the example"
                )));
            }
        }
    }
    problems
}
