//! What is wrong with a rule, said so that it can be mended.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde_json::Value;

use super::Condition;
use crate::json::Pointer;
use crate::names::shown;
use crate::schema::{At, at, may_be, resolve};
use crate::tool::Spec;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Nothing is built.
    Error,
    /// It is built; somebody should look.
    Warning,
    /// It is built, and may be meant so.
    Note,
}

/// Where in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file's name.
    pub file: Arc<str>,
    /// All of its text.
    pub text: Arc<str>,
    /// In bytes.
    pub span: Range<usize>,
}

impl Place {
    /// Line and column, counted from one, in characters.
    #[must_use]
    pub fn line_column(&self) -> (usize, usize) {
        let before = self.text.get(..self.span.start).unwrap_or(&self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        (line, column)
    }
}

/// Something that is wrong with an agent or with one of its rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The rule, where one is at fault.
    pub rule: Option<String>,
    /// The part of the rule as a policy file spells it: `tools.0`, `where.1.argument`; empty for the whole rule.
    pub field: String,
    /// Which bytes of that part, where it is an expression.
    pub within: Option<Range<usize>>,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub help: Option<String>,
    /// How bad it is.
    pub severity: Severity,
    /// Where the part stands, for rules that come from a file.
    pub place: Option<Place>,
    /// The code under which `toolgate lint` tells it, where it has one of its own.
    pub lint: Option<&'static str>,
    /// The name that is no tool of the agent, where that is what is wrong.
    pub unknown: Option<String>,
}

impl Problem {
    /// An error in a part of a rule.
    pub fn at(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            rule: None,
            field: field.into(),
            within: None,
            message: message.into(),
            help: None,
            severity: Severity::Error,
            place: None,
            lint: None,
            unknown: None,
        }
    }

    /// An error that is no single part's.
    pub fn new(message: impl Into<String>) -> Self {
        Self::at("", message)
    }

    /// Says what to do about it.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Points at some bytes of the part.
    #[must_use]
    pub fn within(mut self, range: Range<usize>) -> Self {
        self.within = Some(range);
        self
    }

    /// Says whose it is.
    #[must_use]
    pub fn of(mut self, rule: &str) -> Self {
        self.rule = Some(rule.to_owned());
        self
    }

    /// Where it comes among others: from the top down, as they are mended.
    #[must_use]
    pub fn order(&self) -> impl Ord + use<> {
        self.place.as_ref().map(|place| (place.file.to_string(), place.span.start))
    }

    /// Only a warning.
    #[must_use]
    pub const fn warning(mut self) -> Self {
        self.severity = Severity::Warning;
        self
    }

    /// Says under which code `toolgate lint` tells it.
    #[must_use]
    pub(crate) const fn found_as(mut self, code: &'static str) -> Self {
        self.lint = Some(code);
        self
    }

    /// Says what to do about it, where nothing is said yet.
    #[must_use]
    pub(crate) fn or_help(self, help: &str) -> Self {
        if self.help.is_some() { self } else { self.help(help) }
    }

    /// Says which name is no tool of the agent.
    #[must_use]
    pub(crate) fn of_unknown(mut self, tool: &str) -> Self {
        self.unknown = Some(tool.to_owned());
        self
    }

    /// Suggests the name that was probably meant.
    #[must_use]
    pub(crate) fn did_you_mean(self, wrong: &str, known: impl Iterator<Item = impl AsRef<str>>) -> Self {
        let mut known: Vec<String> = known.map(|name| name.as_ref().to_owned()).collect();
        known.dedup();
        match crate::suggest::closest(wrong, known.iter().map(String::as_str)) {
            Some(guess) => self.help(format!("did you mean `{guess}`?")),
            None if self.help.is_some() || known.is_empty() => self,
            None => {
                let (shown, more) =
                    (known.iter().take(40).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "), known.len() > 40);
                self.help(format!("there is {shown}{}", if more { " and more" } else { "" }))
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

/// The tools that a rule speaks of, in the order it names them.
#[derive(Debug, Clone, Default)]
pub(crate) struct ToolNames(Vec<Arc<str>>);

impl ToolNames {
    pub(super) fn of<'a>(tools: impl IntoIterator<Item = &'a str>) -> Self {
        Self(tools.into_iter().map(Arc::from).collect())
    }

    pub(super) fn contains(&self, tool: &str) -> bool {
        self.0.iter().any(|name| **name == *tool)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<str>> {
        self.0.iter()
    }

    /// Names that are no tool of the agent: a rule that speaks of nothing would never speak.
    pub(super) fn unknown(&self, field: &str, tools: &[&Spec]) -> Vec<Problem> {
        if self.0.is_empty() {
            return vec![Problem::at(field, "it names no tool, so it would never speak").help("name at least one")];
        }
        let places = self.0.iter().enumerate();
        places.filter_map(|(index, name)| unknown_tool(&format!("{field}.{index}"), name, tools)).collect()
    }

    /// Arguments that a tool does not take: a rule that looks at nothing would never match.
    pub(super) fn unknown_arguments<'p>(
        &self,
        tools: &[&Spec],
        paths: impl Iterator<Item = (String, &'p Pointer)> + Clone,
    ) -> Vec<Problem> {
        let governed = tools.iter().filter(|tool| self.contains(tool.name()));
        governed.flat_map(|tool| paths.clone().filter_map(|(field, path)| unknown_argument(&field, path, tool))).collect()
    }
}

/// A name that is no tool of the agent.
pub(super) fn unknown_tool(field: &str, name: &str, tools: &[&Spec]) -> Option<Problem> {
    if tools.iter().any(|tool| tool.name() == name) {
        return None;
    }
    let problem = Problem::at(field, format!("`{}` is no tool of this agent", shown(name))).of_unknown(name);
    let problem = problem.did_you_mean(name, tools.iter().map(|tool| tool.name()));
    Some(problem.or_help(&format!("it has no tools yet; in a file, one is a table like `[tools.{}]`", shown(name))))
}

fn unknown_argument(field: &str, path: &Pointer, tool: &Spec) -> Option<Problem> {
    match at(tool, path) {
        At::Missing(name, known) => Some(Problem { field: field.to_owned(), ..lacking(tool, path, &name, &known) }),
        At::Known(_) | At::Open => None,
    }
}

/// A tool does not take what a path names.
pub(super) fn lacking(tool: &Spec, path: &Pointer, name: &str, known: &[String]) -> Problem {
    let first = path.parts().first().is_some_and(|part| part == name);
    let what = if first { format!("argument `{}`", shown(name)) } else { format!("`{}` in `{path}`", shown(name)) };
    let problem = Problem::new(format!("`{}` has no {what}", tool.name())).did_you_mean(name, known.iter());
    match nothing_inside(tool, path) {
        Some(help) => problem.or_help(&help),
        None => problem,
    }
}

/// What to do about a path that goes into what has no names: a list, text, a number.
fn nothing_inside(tool: &Spec, path: &Pointer) -> Option<String> {
    let upto = |count: usize| Pointer::of(path.parts().iter().take(count).cloned().collect());
    let ends = (0..path.parts().len()).find(|count| matches!(at(tool, &upto(count + 1)), At::Missing(..)))?;
    let place = upto(ends);
    let At::Known(schema) = at(tool, &place) else { return None };
    let map = resolve(schema, tool.input_schema()?)?;
    if may_be(map, "object") {
        return None;
    }
    let rest = Pointer::of(path.parts().iter().skip(ends).cloned().collect());
    Some(if may_be(map, "array") {
        format!("`{place}` is a list: name its items, `{place}/*{rest}`; an expression goes through them with `exists` or `all`")
    } else {
        format!("`{place}` is neither an object nor a list, so nothing stands in it")
    })
}

/// A secret that something is looked up by would have to be written down.
pub(super) fn secret_key(field: &str, path: &Pointer, tools: &[&Spec]) -> Option<Problem> {
    let tool = tools.iter().find(|tool| crate::redact::is_secret(path, &tool.secrets))?;
    let problem = Problem::at(field, format!("`{path}` of `{}` is secret, and what is looked up by it would be written down", tool.name()));
    Some(problem.help("use an argument that is no secret"))
}

/// A path that names more than one value where one is wanted.
pub(super) fn not_one(field: &str, path: &Pointer) -> Option<Problem> {
    let many = path.parts().iter().any(|part| part == "*");
    many.then(|| Problem::at(field, format!("`{path}` names more than one value, and one is wanted here")).help("name one, without `*`"))
}

/// A condition that can be asked of no value that the schema lets an argument have.
pub(super) fn unfit(field: &str, tool: &Spec, path: &Pointer, condition: &Condition) -> Option<Problem> {
    let wanted = condition.wants()?;
    let At::Known(schema) = at(tool, path) else { return None };
    let declared = resolve(schema, tool.input_schema()?)?.get("type").and_then(Value::as_str)?;
    let fits = match wanted {
        "number" => matches!(declared, "number" | "integer"),
        other => declared == other,
    };
    let message =
        format!("`{path}` of `{}` is declared as {declared}, and `{}` can be asked of a {wanted} only", tool.name(), condition.describe());
    let help = if wanted == "number" { "compare numbers with numbers, or use `in`" } else { "use `above`, `below` or `in`" };
    (!fits).then(|| Problem::at(field, message).help(help))
}
