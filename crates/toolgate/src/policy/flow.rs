//! `flow` and `only_from`: where the values of an argument may come from.

use serde_json::Value;

use super::problem::unknown_tool;
use super::refusal::refusal_setters;
use super::{Ask, Condition, Fault, Needs, Note, Policy, Problem, Refusal, ToolNames, Verdict};
use crate::error::FieldError;
use crate::json::Pointer;
use crate::schema::declares;
use crate::tool::Spec;
use crate::values::{USER, leaves, names, reported};

/// How many values of one argument are looked at.
const MAX_VALUES: usize = 1_000;

/// Keeps values that untrusted results brought in out of some arguments; or, stronger, lets only values from some
/// sources in.
///
/// ```
/// use toolgate::policy::Flow;
/// let no_strangers = Flow::new("no_strangers", ["send_mail"], ["/to"]).trust_tools(["list_contacts"]).trust_user();
/// let known_accounts = Flow::only_from("known_accounts", ["transfer"], ["/iban"]).trust_tools(["list_payees"]);
/// ```
#[derive(Debug, Clone)]
pub struct Flow {
    name: String,
    tools: ToolNames,
    arguments: Vec<Pointer>,
    /// Whether a value of unknown origin is refused as well.
    strict: bool,
    trusted: Vec<String>,
    /// Whether what a client reports of the trusted tools counts.
    reported: bool,
    literals: Vec<Value>,
    refusal: Refusal,
}

impl Flow {
    /// A value that came out of an untrusted result may not reach these arguments.
    pub fn new<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>, arguments: impl IntoIterator<Item = &'a str>) -> Self {
        Self {
            name: name.to_owned(),
            tools: ToolNames::of(tools),
            arguments: arguments.into_iter().map(Pointer::from).collect(),
            strict: false,
            trusted: Vec::new(),
            reported: false,
            literals: Vec::new(),
            refusal: Refusal {
                category: crate::error::Category::Permission,
                code: crate::code::UNTRUSTED_VALUE.to_owned(),
                ..Refusal::of(name, "a value that came out of an untrusted result may not be used here")
            },
        }
    }

    /// These arguments must come from the sources that are named next, and from nowhere else.
    pub fn only_from<'a>(name: &str, tools: impl IntoIterator<Item = &'a str>, arguments: impl IntoIterator<Item = &'a str>) -> Self {
        let flow = Self::new(name, tools, arguments);
        let refusal = Refusal { reason: "this value must come from a known source".to_owned(), ..flow.refusal };
        Self { strict: true, refusal, ..flow }
    }

    /// Believes what these tools say.
    #[must_use]
    pub fn trust_tools<'a>(mut self, tools: impl IntoIterator<Item = &'a str>) -> Self {
        self.trusted.extend(tools.into_iter().map(str::to_owned));
        self
    }

    /// Believes what a client reports of these tools as well.
    #[must_use]
    pub const fn accept_reported(mut self) -> Self {
        self.reported = true;
        self
    }

    /// Believes what the user says; see [`crate::Session::user_said`].
    #[must_use]
    pub fn trust_user(mut self) -> Self {
        self.trusted.push(USER.to_owned());
        self
    }

    /// Believes these values.
    #[must_use]
    pub fn trust_values(mut self, values: impl IntoIterator<Item = Value>) -> Self {
        if let Condition::In(values) = Condition::one_of(values) {
            self.literals.extend(values);
        }
        self
    }

    refusal_setters!();

    fn sources(&self) -> String {
        let tools =
            self.trusted.iter().map(|source| if source == USER { "the user's own words".to_owned() } else { format!("`{source}`") });
        let literals = (!self.literals.is_empty()).then(|| "a fixed list".to_owned());
        let all: Vec<String> = tools.chain(literals).collect();
        if all.is_empty() { "no source at all".to_owned() } else { all.join(" or ") }
    }
}

/// Every text and number at a path of the arguments, with its place and whether it is secret; and names of members that no
/// schema declares, because those are values, too. Where there are too many of them, that is said.
pub(super) fn each_value(ask: &Ask<'_>, path: &Pointer, f: &mut dyn FnMut(&str, &Value, bool)) -> Result<(), Fault> {
    let (mut count, mut visited) = (0, 0);
    let mut counted = |place: &str, prefix: &str, value: &Value| {
        count += 1;
        let secret = ask.is_secret(&Pointer::from(place));
        match (count <= MAX_VALUES, secret) {
            (false, _) => {}
            // Below a secret, a place may tell it.
            (true, true) => f(&format!("{path} #{count}"), value, true),
            (true, false) => f(&format!("{prefix}{place}"), value, false),
        }
    };
    for (place, value) in path.reach(ask.arguments.value()) {
        ask.look_at(path, Some(value));
        leaves(value, &place, &mut |place, leaf| counted(place, "", leaf));
        names(value, &place, &mut |place, name| {
            visited += 1;
            if visited > 20 * MAX_VALUES {
                return;
            }
            let parent = Pointer::from(place).split_last().map(|(parent, _)| parent).unwrap_or_default();
            if !declares(ask.tool, &parent, name) {
                // No path begins like this.
                counted(place, "name of ", &Value::String(name.to_owned()));
            }
        });
    }
    if count > MAX_VALUES || visited > 20 * MAX_VALUES {
        return Err(Fault(format!("there are more than {MAX_VALUES} values at `{path}`")));
    }
    Ok(())
}

impl Policy for Flow {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &Spec) -> bool {
        self.tools.contains(tool.name())
    }

    fn problems(&self, tools: &[&Spec]) -> Vec<Problem> {
        let mut problems = self.tools.unknown("tools", tools);
        let places = self.arguments.iter().enumerate().map(|(index, path)| (format!("arguments.{index}"), path));
        problems.extend(self.tools.unknown_arguments(tools, places));
        if self.arguments.is_empty() {
            problems.push(Problem::at("arguments", "it guards no argument, so it would never speak").help("name at least one"));
        }
        let sources = self.trusted.iter().filter(|source| *source != USER).enumerate();
        for (index, source) in sources.clone() {
            problems.extend(unknown_tool(&format!("trusted.{index}"), source, tools));
        }
        for (index, source) in sources.clone() {
            let external = tools.iter().filter(|tool| tool.name() == source && !self.reported);
            problems.extend(external.filter_map(|tool| tool.run_by_client(&format!("trusted.{index}"))));
        }
        for (index, source) in sources {
            if tools.iter().any(|tool| tool.name() == source && tool.untrusted) {
                let problem =
                    Problem::at(format!("trusted.{index}"), format!("`{source}` is declared untrusted, and this rule believes it"));
                problems.push(problem.help("take it out here, or do not declare it untrusted"));
            }
        }
        if self.strict && self.trusted.is_empty() && self.literals.is_empty() {
            problems
                .push(Problem::at("trusted", "it names no source, so no value would ever pass").help("name a tool, the user or values"));
        }
        if !self.strict && !tools.iter().any(|tool| tool.untrusted) {
            problems.push(
                Problem::new("no tool of this agent is declared untrusted, so it would never speak")
                    .help("declare one, or use `only_from`"),
            );
        }
        problems.extend(self.refusal.problems(tools));
        problems
    }

    fn sources(&self) -> Option<Vec<&str>> {
        Some(self.trusted.iter().map(String::as_str).collect())
    }

    fn definition(&self) -> String {
        format!("{self:?}")
    }

    fn needs(&self, ask: &Ask<'_>, needs: &mut Needs) {
        for path in &self.arguments {
            // Where there are too many, `check` says so.
            let _ = each_value(ask, path, &mut |place, leaf, _| needs.origins.push((place.to_owned(), leaf.clone())));
        }
    }

    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        let mut fault = None;
        let mut errors = Vec::new();
        let mut judge = |place: &str, leaf: &Value, secret: bool| {
            let known = match ask.origin(place) {
                Ok(known) => known,
                Err(missing) => {
                    fault = Some(missing);
                    return;
                }
            };
            let trusted = self.literals.contains(leaf)
                || self.trusted.iter().any(|source| known.comes_from(source) || (self.reported && known.comes_from(&reported(source))));
            let refused = !trusted && (self.strict || known.may_be_untrusted());
            let shown = if secret { "(hidden)".to_owned() } else { crate::names::shown(&leaf.to_string()) };
            ask.note(|| {
                let from = match (trusted, known.untrusted, known.overflowed) {
                    (true, ..) => "known from a trusted source",
                    (_, true, _) => "seen in an untrusted result",
                    (_, _, true) => "unknown, and not everything could be remembered",
                    _ => "unknown",
                };
                Note { what: format!("origin of {place}"), found: format!("{shown}: {from}"), holds: refused }
            });
            // Twenty are enough to see what is meant.
            if refused && errors.len() < 20 {
                let expected = if self.strict {
                    format!("a value from {}", self.sources())
                } else {
                    format!("no value that only an untrusted result has brought in; {} may vouch for it", self.sources())
                };
                errors.push(FieldError { path: place.to_owned(), expected, got: shown, did_you_mean: None });
            }
        };
        for path in &self.arguments {
            each_value(ask, path, &mut judge)?;
        }
        match fault {
            Some(fault) => Err(fault),
            None if errors.is_empty() => Ok(Verdict::allow()),
            None => {
                let mut error = self.refusal.error();
                error.errors = errors;
                Ok(Verdict::deny(error))
            }
        }
    }
}
