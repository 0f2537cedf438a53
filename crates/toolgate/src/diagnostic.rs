//! Defines diagnostics for rules and agents: message, help, severity and position in a file.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde_json::Value;

use crate::policy::Condition;
use crate::schema::{SchemaLookup, can_have_type, lookup_input, resolve_object};
use crate::tool::ToolSpec;
use toolgate_json::Pointer;
use toolgate_text::escape_for_display;

/// The severity of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The agent is not built.
    Error,
    /// The agent is built, but the operator should check the problem.
    Warning,
    /// The agent is built, and this may be intended.
    Note,
}

/// A position in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSpan {
    /// The name of the file.
    pub file: Arc<str>,
    /// The whole text of the file.
    pub text: Arc<str>,
    /// The range in bytes.
    pub range: Range<usize>,
}

impl SourceSpan {
    /// Returns line and column, in characters, starting at 1.
    #[must_use]
    pub fn line_column(&self) -> (usize, usize) {
        let before = self.text.get(..self.range.start).unwrap_or(&self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        (line, column)
    }
}

/// Kinds of problems that code distinguishes. Messages can be reworded without changing behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiagnosticKind {
    /// No code depends on the kind.
    #[default]
    Other,
    /// A tool has effects, and no enforced rule governs it.
    Ungoverned,
    /// A tool's JSON Schema cannot be compiled.
    InvalidSchema,
    /// A tool refers to an entity that it does not declare.
    UndeclaredEntity,
    /// A hook matches no tool of its agent.
    UnusedHook,
    /// A tool revokes evidence of a tool that the agent does not have.
    RevokesUnknownTool,
    /// `reconcile` asks with an argument that is secret and therefore not stored.
    SecretReconcileArgument,
    /// `reconcile` names a tool that cannot be asked.
    InvalidReconcile,
}

/// A problem of an agent or of one of its rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// The name of the rule, if a rule has the problem.
    pub rule: Option<String>,
    /// The field of the rule in a policy file, for example `tools.0` or `where.1.argument`.
    ///
    /// Empty for the whole rule.
    pub field: String,
    /// The byte range in the field, if the field is an expression.
    pub field_range: Option<Range<usize>>,
    /// The message.
    pub message: String,
    /// The suggested correction.
    pub help: Option<String>,
    /// The severity.
    pub severity: Severity,
    /// The position of the field, for rules that come from a file.
    pub span: Option<SourceSpan>,
    /// The code under which `toolgate lint` reports the problem, if it has its own code.
    pub lint_code: Option<&'static str>,
    /// The name that is not a tool of the agent, if that is the problem.
    pub unknown_tool: Option<String>,
    /// The tool or hook that the problem is about, if it is about one.
    pub subject: Option<String>,
    /// The name that was probably meant.
    pub suggestion: Option<String>,
    /// What kind of problem it is, if code depends on that.
    pub kind: DiagnosticKind,
}

impl Diagnostic {
    /// Creates an error in a field of a rule.
    pub fn at_field(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            rule: None,
            field: field.into(),
            field_range: None,
            message: message.into(),
            help: None,
            severity: Severity::Error,
            span: None,
            lint_code: None,
            unknown_tool: None,
            subject: None,
            suggestion: None,
            kind: DiagnosticKind::Other,
        }
    }

    /// Creates an error that belongs to no single field.
    pub fn new(message: impl Into<String>) -> Self {
        Self::at_field("", message)
    }

    /// Sets the suggested correction.
    #[must_use]
    pub fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Sets the byte range in the field.
    #[must_use]
    pub fn with_range(mut self, range: Range<usize>) -> Self {
        self.field_range = Some(range);
        self
    }

    /// Sets the rule that has the problem.
    #[must_use]
    pub fn with_rule(mut self, rule: &str) -> Self {
        self.rule = Some(rule.to_owned());
        self
    }

    /// Returns the sort key: the position in the file.
    #[must_use]
    pub fn sort_key(&self) -> impl Ord + use<> {
        self.span.as_ref().map(|span| (span.file.to_string(), span.range.start))
    }

    /// Lowers the severity to a warning.
    #[must_use]
    pub const fn into_warning(mut self) -> Self {
        self.severity = Severity::Warning;
        self
    }

    /// Sets the code under which `toolgate lint` reports the problem.
    #[must_use]
    pub(crate) const fn with_lint_code(mut self, code: &'static str) -> Self {
        self.lint_code = Some(code);
        self
    }

    /// Sets the suggested correction if there is none yet.
    #[must_use]
    pub fn with_default_help(self, help: &str) -> Self {
        if self.help.is_some() { self } else { self.with_help(help) }
    }

    /// Names the tool or hook that the problem is about.
    #[must_use]
    pub(crate) fn with_subject(mut self, subject: &str) -> Self {
        self.subject = Some(subject.to_owned());
        self
    }

    /// Sets the kind.
    #[must_use]
    pub(crate) const fn with_kind(mut self, kind: DiagnosticKind) -> Self {
        self.kind = kind;
        self
    }

    /// Sets the name that is not a tool of the agent.
    #[must_use]
    pub(crate) fn with_unknown_tool(mut self, tool: &str) -> Self {
        self.unknown_tool = Some(tool.to_owned());
        self
    }

    /// Suggests a name, which `toolgate lint --fix` may write.
    #[must_use]
    pub fn did_you_mean(self, guess: &str) -> Self {
        Self {
            suggestion: Some(guess.to_owned()),
            ..self.with_help(format!("did you mean `{guess}`?"))
        }
    }

    /// Suggests the most similar known name, or lists the known names.
    #[must_use]
    pub fn with_suggestion(
        self,
        wrong: &str,
        known: impl Iterator<Item = impl AsRef<str>>,
    ) -> Self {
        let mut known: Vec<String> = known.map(|name| name.as_ref().to_owned()).collect();
        known.dedup();
        match toolgate_text::suggest::find_closest(wrong, known.iter().map(String::as_str)) {
            Some(guess) => self.did_you_mean(guess),
            None if self.help.is_some() || known.is_empty() => self,
            None => {
                let (shown, is_cut) = (
                    known
                        .iter()
                        .take(40)
                        .map(|name| format!("`{name}`"))
                        .collect::<Vec<_>>()
                        .join(", "),
                    known.len() > 40,
                );
                self.with_help(format!(
                    "known names: {shown}{}",
                    if is_cut { " and more" } else { "" }
                ))
            }
        }
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(span) = &self.span {
            let (line, column) = span.line_column();
            write!(f, "{}:{line}:{column}: ", span.file)?;
        }
        if let Some(rule) = &self.rule {
            write!(f, "policy `{}`: ", escape_for_display(rule))?;
        }
        f.write_str(&self.message)?;
        self.help.as_ref().map_or(Ok(()), |help| write!(f, "; {help}"))
    }
}

/// The tools that a rule names, in their order.
#[derive(Debug, Clone, Default)]
pub(crate) struct ToolNames(Vec<Arc<str>>);

impl ToolNames {
    pub(crate) fn new<'a>(tools: impl IntoIterator<Item = &'a str>) -> Self {
        Self(tools.into_iter().map(Arc::from).collect())
    }

    pub(crate) fn contains(&self, tool: &str) -> bool {
        self.0.iter().any(|name| **name == *tool)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<str>> {
        self.0.iter()
    }

    /// Reports names that are not tools of the agent; a rule without tools would never apply.
    pub(crate) fn check_names(&self, field: &str, tools: &[&ToolSpec]) -> Vec<Diagnostic> {
        if self.0.is_empty() {
            return vec![
                Diagnostic::at_field(field, "the rule names no tool, so it never applies")
                    .with_help("name at least one"),
            ];
        }
        let places = self.0.iter().enumerate();
        places
            .filter_map(|(index, name)| check_tool_name(&format!("{field}.{index}"), name, tools))
            .collect()
    }

    /// Reports arguments that a tool does not accept; a condition on one would never match.
    pub(crate) fn check_arguments<'p>(
        &self,
        tools: &[&ToolSpec],
        paths: impl Iterator<Item = (String, &'p Pointer)> + Clone,
    ) -> Vec<Diagnostic> {
        let governed = tools.iter().filter(|tool| self.contains(tool.name()));
        governed
            .flat_map(|tool| {
                paths.clone().filter_map(|(field, path)| check_argument(&field, path, tool))
            })
            .collect()
    }
}

/// Reports a name that is not a tool of the agent.
pub(crate) fn check_tool_name(field: &str, name: &str, tools: &[&ToolSpec]) -> Option<Diagnostic> {
    if tools.iter().any(|tool| tool.name() == name) {
        return None;
    }
    let problem = Diagnostic::at_field(
        field,
        format!("`{}` is not a tool of this agent", escape_for_display(name)),
    )
    .with_unknown_tool(name);
    let problem = problem.with_suggestion(name, tools.iter().map(|tool| tool.name()));
    Some(problem.with_default_help(&format!(
        "the agent has no tools yet; in a file, declare a tool as a table like `[tools.{}]`",
        escape_for_display(name)
    )))
}

fn check_argument(field: &str, path: &Pointer, tool: &ToolSpec) -> Option<Diagnostic> {
    match lookup_input(tool, path) {
        SchemaLookup::Missing(name, known) => Some(Diagnostic {
            field: field.to_owned(),
            ..undeclared_path_problem(tool, path, &name, &known)
        }),
        SchemaLookup::Known(_) | SchemaLookup::Open => None,
    }
}

/// Reports a path that the schema of a tool does not contain.
pub(crate) fn undeclared_path_problem(
    tool: &ToolSpec,
    path: &Pointer,
    name: &str,
    known: &[String],
) -> Diagnostic {
    let first = path.parts().first().is_some_and(|part| part == name);
    let what = if first {
        format!("argument `{}`", escape_for_display(name))
    } else {
        format!("`{}` in `{path}`", escape_for_display(name))
    };
    let problem = Diagnostic::new(format!("`{}` has no {what}", tool.name()))
        .with_suggestion(name, known.iter());
    match suggest_parent_path(tool, path) {
        Some(help) => problem.with_default_help(&help),
        None => problem,
    }
}

/// Suggests a correction for a path into a value without members: a list, a text, a number.
fn suggest_parent_path(tool: &ToolSpec, path: &Pointer) -> Option<String> {
    let prefix =
        |count: usize| Pointer::from_parts(path.parts().iter().take(count).cloned().collect());
    let depth = (0..path.parts().len()).find(|count| {
        matches!(lookup_input(tool, &prefix(count + 1)), SchemaLookup::Missing(..))
    })?;
    let parent = prefix(depth);
    let SchemaLookup::Known(schema) = lookup_input(tool, &parent) else { return None };
    let map = resolve_object(schema, tool.input_schema()?)?;
    if can_have_type(map, "object") {
        return None;
    }
    let rest = Pointer::from_parts(path.parts().iter().skip(depth).cloned().collect());
    Some(if can_have_type(map, "array") {
        format!(
            "`{parent}` is a list: use `{parent}/*{rest}` for its items, or `exists` or `all` in an expression"
        )
    } else {
        format!("`{parent}` is neither an object nor a list, so it has no members")
    })
}

/// Reports a secret argument that is used as a lookup key, because lookup keys are recorded.
pub(crate) fn check_lookup_key(
    field: &str,
    path: &Pointer,
    tools: &[&ToolSpec],
) -> Option<Diagnostic> {
    let tool = tools.iter().find(|tool| crate::redact::is_secret_path(path, &tool.secrets))?;
    let problem = Diagnostic::at_field(
        field,
        format!("`{path}` of `{}` is secret, but a lookup key is recorded", tool.name()),
    );
    Some(problem.with_help("use an argument that is not secret"))
}

/// Reports a path with `*` where exactly one value is needed.
pub(crate) fn check_single_value(field: &str, path: &Pointer) -> Option<Diagnostic> {
    let has_wildcard = path.parts().iter().any(|part| part == "*");
    has_wildcard.then(|| {
        Diagnostic::at_field(
            field,
            format!("`{path}` names more than one value, but exactly one is needed"),
        )
        .with_help("name one value, without `*`")
    })
}

/// Reports a condition that needs another type than the schema declares for the argument.
pub(crate) fn check_condition_type(
    field: &str,
    tool: &ToolSpec,
    path: &Pointer,
    condition: &Condition,
) -> Option<Diagnostic> {
    let required = condition.required_type()?;
    let SchemaLookup::Known(schema) = lookup_input(tool, path) else { return None };
    let declared =
        resolve_object(schema, tool.input_schema()?)?.get("type").and_then(Value::as_str)?;
    let fits = match required {
        "number" => matches!(declared, "number" | "integer"),
        other => declared == other,
    };
    let message = format!(
        "`{path}` of `{}` is declared as {declared}, but `{}` needs a {required}",
        tool.name(),
        condition.describe()
    );
    let help = if required == "number" {
        "compare numbers with numbers, or use `in`"
    } else {
        "use `above`, `below` or `in`"
    };
    (!fits).then(|| Diagnostic::at_field(field, message).with_help(help))
}
