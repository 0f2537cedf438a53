//! Defines diagnostics for rules and agents: message, help, severity and position in a file.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde_json::Value;

use crate::policy::Condition;
use crate::schema::{At, at, may_be, resolve};
use crate::tool::Spec;
use toolgate_json::Pointer;
use toolgate_text::shown;

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
pub struct Place {
    /// The name of the file.
    pub file: Arc<str>,
    /// The whole text of the file.
    pub text: Arc<str>,
    /// The range in bytes.
    pub span: Range<usize>,
}

impl Place {
    /// Returns line and column, in characters, starting at 1.
    #[must_use]
    pub fn line_column(&self) -> (usize, usize) {
        let before = self.text.get(..self.span.start).unwrap_or(&self.text);
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
pub struct Problem {
    /// The name of the rule, if a rule has the problem.
    pub rule: Option<String>,
    /// The field of the rule in a policy file, for example `tools.0` or `where.1.argument`.
    ///
    /// Empty for the whole rule.
    pub field: String,
    /// The byte range in the field, if the field is an expression.
    pub within: Option<Range<usize>>,
    /// The message.
    pub message: String,
    /// The suggested correction.
    pub help: Option<String>,
    /// The severity.
    pub severity: Severity,
    /// The position of the field, for rules that come from a file.
    pub place: Option<Place>,
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

impl Problem {
    /// Creates an error in a field of a rule.
    pub fn at(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            rule: None,
            field: field.into(),
            within: None,
            message: message.into(),
            help: None,
            severity: Severity::Error,
            place: None,
            lint_code: None,
            unknown_tool: None,
            subject: None,
            suggestion: None,
            kind: DiagnosticKind::Other,
        }
    }

    /// Creates an error that belongs to no single field.
    pub fn new(message: impl Into<String>) -> Self {
        Self::at("", message)
    }

    /// Sets the suggested correction.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Sets the byte range in the field.
    #[must_use]
    pub fn within(mut self, range: Range<usize>) -> Self {
        self.within = Some(range);
        self
    }

    /// Sets the rule that has the problem.
    #[must_use]
    pub fn of(mut self, rule: &str) -> Self {
        self.rule = Some(rule.to_owned());
        self
    }

    /// Returns the sort key: the position in the file.
    #[must_use]
    pub fn order(&self) -> impl Ord + use<> {
        self.place.as_ref().map(|place| (place.file.to_string(), place.span.start))
    }

    /// Lowers the severity to a warning.
    #[must_use]
    pub const fn warning(mut self) -> Self {
        self.severity = Severity::Warning;
        self
    }

    /// Sets the code under which `toolgate lint` reports the problem.
    #[must_use]
    pub(crate) const fn found_as(mut self, code: &'static str) -> Self {
        self.lint_code = Some(code);
        self
    }

    /// Sets the suggested correction if there is none yet.
    #[must_use]
    pub fn or_help(self, help: &str) -> Self {
        if self.help.is_some() { self } else { self.help(help) }
    }

    /// Names the tool or hook that the problem is about.
    #[must_use]
    pub(crate) fn about(mut self, subject: &str) -> Self {
        self.subject = Some(subject.to_owned());
        self
    }

    /// Sets the kind.
    #[must_use]
    pub(crate) const fn of_kind(mut self, kind: DiagnosticKind) -> Self {
        self.kind = kind;
        self
    }

    /// Sets the name that is not a tool of the agent.
    #[must_use]
    pub(crate) fn of_unknown(mut self, tool: &str) -> Self {
        self.unknown_tool = Some(tool.to_owned());
        self
    }

    /// Suggests the most similar known name, or lists the known names.
    #[must_use]
    pub fn did_you_mean(self, wrong: &str, known: impl Iterator<Item = impl AsRef<str>>) -> Self {
        let mut known: Vec<String> = known.map(|name| name.as_ref().to_owned()).collect();
        known.dedup();
        match toolgate_text::suggest::closest(wrong, known.iter().map(String::as_str)) {
            Some(guess) => Self { suggestion: Some(guess.to_owned()), ..self.help(format!("did you mean `{guess}`?")) },
            None if self.help.is_some() || known.is_empty() => self,
            None => {
                let (shown, more) =
                    (known.iter().take(40).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "), known.len() > 40);
                self.help(format!("known names: {shown}{}", if more { " and more" } else { "" }))
            }
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            let (line, column) = place.line_column();
            write!(f, "{}:{line}:{column}: ", place.file)?;
        }
        if let Some(rule) = &self.rule {
            write!(f, "policy `{}`: ", shown(rule))?;
        }
        f.write_str(&self.message)?;
        self.help.as_ref().map_or(Ok(()), |help| write!(f, "; {help}"))
    }
}

/// The tools that a rule names, in their order.
#[derive(Debug, Clone, Default)]
pub(crate) struct ToolNames(Vec<Arc<str>>);

impl ToolNames {
    pub(crate) fn of<'a>(tools: impl IntoIterator<Item = &'a str>) -> Self {
        Self(tools.into_iter().map(Arc::from).collect())
    }

    pub(crate) fn contains(&self, tool: &str) -> bool {
        self.0.iter().any(|name| **name == *tool)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<str>> {
        self.0.iter()
    }

    /// Reports names that are not tools of the agent; a rule without tools would never apply.
    pub(crate) fn unknown(&self, field: &str, tools: &[&Spec]) -> Vec<Problem> {
        if self.0.is_empty() {
            return vec![Problem::at(field, "the rule names no tool, so it never applies").help("name at least one")];
        }
        let places = self.0.iter().enumerate();
        places.filter_map(|(index, name)| unknown_tool(&format!("{field}.{index}"), name, tools)).collect()
    }

    /// Reports arguments that a tool does not accept; a condition on one would never match.
    pub(crate) fn unknown_arguments<'p>(
        &self,
        tools: &[&Spec],
        paths: impl Iterator<Item = (String, &'p Pointer)> + Clone,
    ) -> Vec<Problem> {
        let governed = tools.iter().filter(|tool| self.contains(tool.name()));
        governed.flat_map(|tool| paths.clone().filter_map(|(field, path)| unknown_argument(&field, path, tool))).collect()
    }
}

/// Reports a name that is not a tool of the agent.
pub(crate) fn unknown_tool(field: &str, name: &str, tools: &[&Spec]) -> Option<Problem> {
    if tools.iter().any(|tool| tool.name() == name) {
        return None;
    }
    let problem = Problem::at(field, format!("`{}` is not a tool of this agent", shown(name))).of_unknown(name);
    let problem = problem.did_you_mean(name, tools.iter().map(|tool| tool.name()));
    Some(problem.or_help(&format!("the agent has no tools yet; in a file, declare a tool as a table like `[tools.{}]`", shown(name))))
}

fn unknown_argument(field: &str, path: &Pointer, tool: &Spec) -> Option<Problem> {
    match at(tool, path) {
        At::Missing(name, known) => Some(Problem { field: field.to_owned(), ..lacking(tool, path, &name, &known) }),
        At::Known(_) | At::Open => None,
    }
}

/// Reports a path that the schema of a tool does not contain.
pub(crate) fn lacking(tool: &Spec, path: &Pointer, name: &str, known: &[String]) -> Problem {
    let first = path.parts().first().is_some_and(|part| part == name);
    let what = if first { format!("argument `{}`", shown(name)) } else { format!("`{}` in `{path}`", shown(name)) };
    let problem = Problem::new(format!("`{}` has no {what}", tool.name())).did_you_mean(name, known.iter());
    match nothing_inside(tool, path) {
        Some(help) => problem.or_help(&help),
        None => problem,
    }
}

/// Suggests a correction for a path into a value without members: a list, a text, a number.
fn nothing_inside(tool: &Spec, path: &Pointer) -> Option<String> {
    let upto = |count: usize| Pointer::from_parts(path.parts().iter().take(count).cloned().collect());
    let ends = (0..path.parts().len()).find(|count| matches!(at(tool, &upto(count + 1)), At::Missing(..)))?;
    let place = upto(ends);
    let At::Known(schema) = at(tool, &place) else { return None };
    let map = resolve(schema, tool.input_schema()?)?;
    if may_be(map, "object") {
        return None;
    }
    let rest = Pointer::from_parts(path.parts().iter().skip(ends).cloned().collect());
    Some(if may_be(map, "array") {
        format!("`{place}` is a list: use `{place}/*{rest}` for its items, or `exists` or `all` in an expression")
    } else {
        format!("`{place}` is neither an object nor a list, so it has no members")
    })
}

/// Reports a secret argument that is used as a lookup key, because lookup keys are recorded.
pub(crate) fn secret_key(field: &str, path: &Pointer, tools: &[&Spec]) -> Option<Problem> {
    let tool = tools.iter().find(|tool| crate::redact::is_secret(path, &tool.secrets))?;
    let problem = Problem::at(field, format!("`{path}` of `{}` is secret, but a lookup key is recorded", tool.name()));
    Some(problem.help("use an argument that is not secret"))
}

/// Reports a path with `*` where exactly one value is needed.
pub(crate) fn not_one(field: &str, path: &Pointer) -> Option<Problem> {
    let many = path.parts().iter().any(|part| part == "*");
    many.then(|| {
        Problem::at(field, format!("`{path}` names more than one value, but exactly one is needed")).help("name one value, without `*`")
    })
}

/// Reports a condition that needs another type than the schema declares for the argument.
pub(crate) fn unfit(field: &str, tool: &Spec, path: &Pointer, condition: &Condition) -> Option<Problem> {
    let wanted = condition.wants()?;
    let At::Known(schema) = at(tool, path) else { return None };
    let declared = resolve(schema, tool.input_schema()?)?.get("type").and_then(Value::as_str)?;
    let fits = match wanted {
        "number" => matches!(declared, "number" | "integer"),
        other => declared == other,
    };
    let message = format!("`{path}` of `{}` is declared as {declared}, but `{}` needs a {wanted}", tool.name(), condition.describe());
    let help = if wanted == "number" { "compare numbers with numbers, or use `in`" } else { "use `above`, `below` or `in`" };
    (!fits).then(|| Problem::at(field, message).help(help))
}
