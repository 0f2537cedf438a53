//! Implements `flow` and `only_from`: rules about the provenance of argument values.

use serde_json::{Value, json};

use super::definition;
use super::{
    Condition, Diagnostic, FactRequest, Policy, PolicyError, PolicyInput, RuleCheck, RuleDenial,
    ToolNames, Verdict,
};
use crate::call::error::FieldError;
use crate::diagnostic::check_tool_name;
use crate::policy::denial::refusal_setters;
use crate::provenance::leaves::{visit_leaves, visit_names};
use crate::provenance::{USER_SOURCE, reported_source};
use crate::schema::has_declared_member;
use crate::tool::ToolSpec;
use toolgate_json::Pointer;

/// The maximum number of values in one argument.
const MAX_ARGUMENT_VALUES: usize = 1_000;

/// Denies argument values that come from untrusted results, or allows only values from given
/// sources.
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
    /// Whether a value of unknown provenance is denied too.
    is_strict: bool,
    trusted: Vec<String>,
    /// Whether results of trusted tools that a client reports count.
    accepts_reported: bool,
    literals: Vec<Value>,
    refusal: RuleDenial,
}

impl Flow {
    /// Creates a rule that denies values from untrusted results in these arguments.
    pub fn new<'a>(
        name: &str,
        tools: impl IntoIterator<Item = &'a str>,
        arguments: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            tools: ToolNames::new(tools),
            arguments: arguments.into_iter().map(Pointer::from).collect(),
            is_strict: false,
            trusted: Vec::new(),
            accepts_reported: false,
            literals: Vec::new(),
            refusal: RuleDenial {
                category: crate::call::error::ErrorCategory::Permission,
                code: crate::call::error_code::UNTRUSTED_VALUE.to_owned(),
                ..RuleDenial::new(name, "a value from an untrusted result may not be used here")
            },
        }
    }

    /// Creates a rule that allows only values from the sources that are added next.
    pub fn only_from<'a>(
        name: &str,
        tools: impl IntoIterator<Item = &'a str>,
        arguments: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let flow = Self::new(name, tools, arguments);
        let refusal = RuleDenial {
            reason: "this value must come from a known source".to_owned(),
            ..flow.refusal
        };
        Self { is_strict: true, refusal, ..flow }
    }

    /// Trusts the results of these tools.
    #[must_use]
    pub fn trust_tools<'a>(mut self, tools: impl IntoIterator<Item = &'a str>) -> Self {
        self.trusted.extend(tools.into_iter().map(str::to_owned));
        self
    }

    /// Trusts results of these tools that a client reports, too.
    #[must_use]
    pub const fn accept_reported(mut self) -> Self {
        self.accepts_reported = true;
        self
    }

    /// Trusts the user's own words; see [`crate::Session::add_user_text`].
    #[must_use]
    pub fn trust_user(mut self) -> Self {
        self.trusted.push(USER_SOURCE.to_owned());
        self
    }

    /// Trusts these values.
    #[must_use]
    pub fn trust_values(mut self, values: impl IntoIterator<Item = Value>) -> Self {
        if let Condition::In(values) = Condition::one_of(values) {
            self.literals.extend(values);
        }
        self
    }

    refusal_setters!();

    fn describe_sources(&self) -> String {
        let tools = self.trusted.iter().map(|source| {
            if source == USER_SOURCE {
                "the user's own words".to_owned()
            } else {
                format!("`{source}`")
            }
        });
        let literals = (!self.literals.is_empty()).then(|| "a fixed list".to_owned());
        let all: Vec<String> = tools.chain(literals).collect();
        if all.is_empty() { "no source".to_owned() } else { all.join(" or ") }
    }
}

/// Visits every text and number at a path of the arguments, with its path and whether it is secret.
///
/// Undeclared member names count as values too. Too many values are a fault.
pub(super) fn visit_values(
    input: &PolicyInput<'_>,
    path: &Pointer,
    f: &mut dyn FnMut(&str, &Value, bool),
) -> Result<(), PolicyError> {
    let (mut count, mut visited) = (0, 0);
    let mut visit = |place: &str, prefix: &str, value: &Value| {
        count += 1;
        let secret = input.is_secret(&Pointer::from(place));
        match (count <= MAX_ARGUMENT_VALUES, secret) {
            (false, _) => {}
            // The path of a value below a secret may reveal the secret.
            (true, true) => f(&format!("{path} #{count}"), value, true),
            (true, false) => f(&format!("{prefix}{place}"), value, false),
        }
    };
    for (place, value) in path.entries_or_scalars(input.arguments.value()) {
        input.report_redacted_use(path, Some(value));
        visit_leaves(value, &place, &mut |place, leaf| visit(place, "", leaf));
        visit_names(value, &place, &mut |place, name| {
            visited += 1;
            if visited > 20 * MAX_ARGUMENT_VALUES {
                return;
            }
            let parent =
                Pointer::from(place).split_last().map(|(parent, _)| parent).unwrap_or_default();
            if !has_declared_member(input.tool, &parent, name) {
                // The prefix cannot collide with a path.
                visit(place, "name of ", &Value::String(name.to_owned()));
            }
        });
    }
    if count > MAX_ARGUMENT_VALUES || visited > 20 * MAX_ARGUMENT_VALUES {
        return Err(PolicyError(format!(
            "there are more than {MAX_ARGUMENT_VALUES} values at `{path}`"
        )));
    }
    Ok(())
}

impl Policy for Flow {
    fn name(&self) -> &str {
        &self.name
    }

    fn governs(&self, tool: &ToolSpec) -> bool {
        self.tools.contains(tool.name())
    }

    fn problems(&self, tools: &[&ToolSpec]) -> Vec<Diagnostic> {
        let mut problems = self.tools.check_names("tools", tools);
        let places = self
            .arguments
            .iter()
            .enumerate()
            .map(|(index, path)| (format!("arguments.{index}"), path));
        problems.extend(self.tools.check_arguments(tools, places));
        if self.arguments.is_empty() {
            problems.push(
                Diagnostic::at_field(
                    "arguments",
                    "the rule guards no argument, so it never applies",
                )
                .with_help("name at least one"),
            );
        }
        let sources = self.trusted.iter().filter(|source| *source != USER_SOURCE).enumerate();
        for (index, source) in sources.clone() {
            problems.extend(check_tool_name(&format!("trusted.{index}"), source, tools));
        }
        for (index, source) in sources.clone() {
            let external =
                tools.iter().filter(|tool| tool.name() == source && !self.accepts_reported);
            problems.extend(
                external.filter_map(|tool| tool.warn_if_run_by_client(&format!("trusted.{index}"))),
            );
        }
        for (index, source) in sources {
            if tools.iter().any(|tool| tool.name() == source && tool.untrusted) {
                let problem = Diagnostic::at_field(
                    format!("trusted.{index}"),
                    format!("`{source}` is declared untrusted, but this rule trusts it"),
                );
                problems.push(
                    problem.with_help("remove it from the rule, or do not declare it untrusted"),
                );
            }
        }
        if self.is_strict && self.trusted.is_empty() && self.literals.is_empty() {
            problems.push(
                Diagnostic::at_field(
                    "trusted",
                    "the rule names no source, so it denies every value",
                )
                .with_help("name a tool, the user or values"),
            );
        }
        if !self.is_strict && !tools.iter().any(|tool| tool.untrusted) {
            problems.push(
                Diagnostic::new(
                    "no tool of this agent is declared untrusted, so the rule never applies",
                )
                .with_help("declare a tool untrusted, or use `only_from`"),
            );
        }
        problems.extend(self.refusal.check_redirect(tools));
        problems
    }

    fn provenance_sources(&self) -> Option<Vec<&str>> {
        Some(self.trusted.iter().map(String::as_str).collect())
    }

    fn definition(&self) -> String {
        let parts = json!({
            "name": self.name,
            "tools": definition::names(&self.tools),
            "arguments": self.arguments.iter().map(definition::pointer).collect::<Value>(),
            "strict": self.is_strict,
            "trusted": self.trusted,
            "reported": self.accepts_reported,
            "literals": self.literals,
            "refusal": definition::refusal(&self.refusal),
        });
        definition::definition("flow", &parts)
    }

    fn request_facts(&self, input: &PolicyInput<'_>, needs: &mut FactRequest) {
        for path in &self.arguments {
            // If there are too many values, `check` reports the fault.
            let _ = visit_values(input, path, &mut |place, leaf, _| {
                needs.origins.push((place.to_owned(), leaf.clone()))
            });
        }
    }

    fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        let mut fault = None;
        let mut errors = Vec::new();
        let mut check_value = |place: &str, leaf: &Value, secret: bool| {
            let known = match input.provenance(place) {
                Ok(known) => known,
                Err(missing) => {
                    fault = Some(missing);
                    return;
                }
            };
            let trusted = self.literals.contains(leaf)
                || self.trusted.iter().any(|source| {
                    known.comes_from(source)
                        || (self.accepts_reported && known.comes_from(&reported_source(source)))
                });
            let refused = !trusted && (self.is_strict || known.may_be_untrusted());
            let display = if secret {
                "(hidden)".to_owned()
            } else {
                toolgate_text::escape_for_display(&leaf.to_string())
            };
            input.record_check(|| {
                let from = match (trusted, known.untrusted, known.overflowed) {
                    (true, ..) => "known from a trusted source",
                    (_, true, _) => "seen in an untrusted result",
                    (_, _, true) => "unknown, and the record of values is incomplete",
                    _ => "unknown",
                };
                RuleCheck {
                    what: format!("origin of {place}"),
                    found: format!("{display}: {from}"),
                    holds: refused,
                }
            });
            // List at most 20 values to keep the error short.
            if refused && errors.len() < 20 {
                let expected = if self.is_strict {
                    format!("a value from {}", self.describe_sources())
                } else {
                    format!(
                        "a value that does not come from an untrusted result, or one that also comes from {}",
                        self.describe_sources()
                    )
                };
                errors.push(FieldError {
                    path: place.to_owned(),
                    expected,
                    got: display,
                    did_you_mean: None,
                });
            }
        };
        for path in &self.arguments {
            visit_values(input, path, &mut check_value)?;
        }
        match fault {
            Some(fault) => Err(fault),
            None if errors.is_empty() => Ok(Verdict::allow()),
            None => {
                let mut error = self.refusal.to_error();
                error.errors = errors;
                Ok(Verdict::deny(error))
            }
        }
    }
}
