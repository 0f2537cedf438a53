//! Finds weaknesses of a configuration: poor descriptions, ineffective rules, likely misspellings.

use std::collections::BTreeMap;
use std::ops::Range;

use jiff::SignedDuration;

use crate::agent_config::{AgentConfig, ToolConfig};
use crate::config::Config;
use crate::lint_descriptions::{
    check_descriptions, check_ordering, check_overlaps, check_tool_count,
};
use crate::lint_schemas::{check_schemas, check_secrets};
use crate::secret_ref::SecretRef;
use crate::upstream_config::UpstreamConfig;
use toolgate::policy::source::table_reader::TomlTable;
use toolgate::policy::{Diagnostic, Severity, SourceSpan};
use toolgate::tool::ToolSpec;

/// The codes of all findings, each with its meaning.
pub const LINTS: [(&str, &str); 16] = [
    ("load", "the configuration does not load"),
    ("dead_rule", "a rule that never applies, or a tool that can never be called"),
    (
        "never_true",
        "a condition that the schema of its argument or result makes impossible; likely a misspelling",
    ),
    (
        "too_many_tools",
        "an agent with more than five tools; models choose worse, so split the agent into specialists",
    ),
    (
        "thin_description",
        "a description needs four lines: what the tool does, when to use it, edge cases, what must come first",
    ),
    (
        "ordering_untold",
        "the description omits a tool that must come first, so the model learns the order from refusals",
    ),
    (
        "ordering_unenforced",
        "the description says that a tool must come first, but no rule enforces it",
    ),
    ("overlap", "two descriptions are nearly equal, so the model cannot tell the tools apart"),
    (
        "inlined_twice",
        "two agents declare the same tool, so a change is easily made in one of them only",
    ),
    (
        "silent_rule",
        "a rule refuses without a useful reason, so the model does not know what to do instead",
    ),
    (
        "rarely_used",
        "a tool that fewer than one in ten sessions use; it distracts the model in all others",
    ),
    (
        "short_retention",
        "a rule looks back further than rows are kept, so a backtest lacks older calls",
    ),
    (
        "missing_reference",
        "an upstream refers to a missing variable or file and stays offline until it exists",
    ),
    (
        "open_listener",
        "the gateway is reachable from other machines without a token; `toolgate serve` refuses to start",
    ),
    (
        "unknown_keyword",
        "a schema has an unknown keyword, or requires an undeclared property; likely a misspelling",
    ),
    (
        "unknown_secret",
        "neither arguments nor result contain the secret; likely misspelled, so the real one is shown and recorded",
    ),
];

/// Minimum number of words of a reason; "Not allowed." does not tell a model what to do.
const MIN_REASON_WORDS: usize = 3;
/// Minimum number of recorded sessions before usage is judged.
const MIN_USAGE_SESSIONS: u64 = 20;
/// Keys whose values decide what is allowed. They are never fixed automatically.
const DECISION_KEYS: [&str; 6] = ["policy", "rule", "mode", "effect", "undeclared", "on_failure"];

/// A finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LintFinding {
    /// The code; see [`LINTS`].
    pub code: &'static str,
    /// The problem and its position.
    pub problem: Diagnostic,
    /// A fix: the bytes of the file to replace, and the replacement.
    pub fix: Option<(Range<usize>, String)>,
}

/// In how many sessions each tool was used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolUsage {
    /// Number of sessions by agent.
    pub sessions: BTreeMap<String, u64>,
    /// Number of sessions by agent and tool.
    pub tools: BTreeMap<(String, String), u64>,
}

/// A finding that the file allows on purpose.
#[derive(Debug, Clone)]
pub(crate) struct AllowedFinding {
    code: String,
    subject: Option<String>,
}

/// Reads the allowed findings. An entry without a reason is ignored.
pub(crate) fn read_allowed_findings(table: &TomlTable<'_>) -> Vec<AllowedFinding> {
    let read_entry = |entry: TomlTable<'_>| {
        let code = entry.text("allow");
        for (key, example) in [
            ("allow", "allow = \"too_many_tools\""),
            ("reason", "reason = \"a coding agent has many\""),
        ] {
            if !entry.has_key(key) {
                entry.report(
                    key,
                    Diagnostic::new(format!("an entry of `lint` needs `{key}`"))
                        .with_help(format!("like `{example}`")),
                );
            }
        }
        let words: Vec<(&str, ())> = LINTS.iter().map(|(code, _)| (*code, ())).collect();
        entry.keyword("allow", &words);
        let of = entry.text("of").map(str::to_owned);
        let reason = entry.text("reason");
        if reason.is_some_and(|reason| reason.trim().is_empty()) {
            entry.report(
                "reason",
                Diagnostic::new("`reason` is empty")
                    .with_help("like `reason = \"a coding agent has many\"`"),
            );
        }
        entry.reject_unknown_keys("an entry of `lint`");
        reason?;
        Some(AllowedFinding { code: code?.to_owned(), subject: of })
    };
    table.tables("lint").into_iter().filter_map(read_entry).collect()
}

impl LintFinding {
    /// Creates a finding from a problem. If the problem suggests a near misspelling, the finding
    /// has a fix.
    #[must_use]
    pub fn from_problem(code: &'static str, problem: Diagnostic) -> Self {
        let fix = problem.span.as_ref().and_then(|place| suggest_fix(&problem, place));
        Self { code, problem, fix }
    }
}

/// Derives the replacement from the suggestion in the help text.
fn suggest_fix(problem: &Diagnostic, place: &SourceSpan) -> Option<(Range<usize>, String)> {
    let name = problem.suggestion.as_deref()?;
    let written = place.text.get(place.range.clone())?;
    let quote = written.chars().next().filter(|first| matches!(first, '"' | '\''));
    let inner =
        quote.map_or(Some(written), |quote| written.strip_prefix(quote)?.strip_suffix(quote))?;
    // In a longer path, the misspelled part is ambiguous.
    let (before, word) = inner.strip_prefix('/').map_or(("", inner), |word| ("/", word));
    let is_one_word =
        !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
    // The marked text may not be the error, and a merely similar word may have another meaning.
    let is_misspelling = toolgate_text::suggest::is_misspelling(name, word);
    let is_excluded =
        DECISION_KEYS.contains(&key_at(place)) || word.ends_with("_of") || name.ends_with("_of");
    if !is_one_word || !is_misspelling || is_excluded || name.contains(['/', '"', '\'', '\\']) {
        return None;
    }
    let quote = quote.map(String::from).unwrap_or_default();
    let text = format!("{quote}{before}{name}{quote}");
    Some((place.range.clone(), text))
}

/// Returns the key of the value at this position, or an empty string.
fn key_at(place: &SourceSpan) -> &str {
    let before = place.text.get(..place.range.start).unwrap_or_default().trim_end();
    let key = before.strip_suffix('=').unwrap_or_default().trim_end().trim_end_matches(['"', '\'']);
    key.rsplit(|c: char| !(c.is_alphanumeric() || c == '_' || c == '-')).next().unwrap_or_default()
}

impl Config {
    /// Returns all findings in the order of the file, without those that the file allows.
    ///
    /// Errors that prevent loading are reported when the agents are built.
    #[must_use]
    pub fn lint(&self, usage: Option<&ToolUsage>) -> Vec<LintFinding> {
        let mut found = Vec::new();
        for declared in &self.agents {
            found.extend(check_zero_limits(declared));
            found.extend(check_tool_count(declared));
            found.extend(check_descriptions(declared));
            found.extend(check_schemas(declared));
            found.extend(check_secrets(declared));
            found.extend(check_ordering(declared));
            found.extend(check_overlaps(declared));
            found.extend(check_reasons(declared));
            found.extend(usage.into_iter().flat_map(|usage| check_usage(declared, usage)));
            found.extend(
                self.retention
                    .into_iter()
                    .flat_map(|retention| check_retention(declared, retention)),
            );
        }
        found.extend(check_duplicates(&self.agents));
        found.extend(self.upstreams.iter().flat_map(check_references));
        found.extend(self.check_listener());
        found.retain(|(finding, of)| !self.is_finding_allowed(finding.code, of));
        found.sort_by_key(|(finding, _)| {
            finding.problem.span.as_ref().map(|place| (place.file.to_string(), place.range.start))
        });
        found.into_iter().map(|(finding, _)| finding).collect()
    }

    /// Finds an address that `toolgate serve` refuses. Hooks, and `serve` with another address, are
    /// unaffected.
    fn check_listener(&self) -> Option<NamedFinding> {
        let address: std::net::SocketAddr = self.gateway.listen.as_ref()?.parse().ok()?;
        if address.ip().is_loopback()
            || !self.gateway.tokens.is_empty()
            || self.gateway.jwt.is_some()
        {
            return None;
        }
        let message =
            format!("{address} is reachable from other machines, and no token is required");
        let help = "add `[[gateway.tokens]]` or `[gateway.jwt]`, or listen on 127.0.0.1";
        let problem = Diagnostic {
            span: self.listen_span.clone(),
            ..Diagnostic::new(message).with_help(help)
        };
        Some((LintFinding { code: "open_listener", problem, fix: None }, "gateway".to_owned()))
    }

    /// Checks whether the file allows a finding on purpose.
    #[must_use]
    pub fn is_finding_allowed(&self, code: &str, of: &str) -> bool {
        self.allowed_findings.iter().any(|allowed| {
            allowed.code == code && allowed.subject.as_deref().is_none_or(|name| name == of)
        })
    }
}

/// A finding, and the name of the item that it concerns.
pub(crate) type NamedFinding = (LintFinding, String);

pub(crate) fn lint_warning(
    code: &'static str,
    of: &str,
    place: Option<&SourceSpan>,
    message: String,
    help: &str,
) -> NamedFinding {
    let problem = Diagnostic {
        span: place.cloned(),
        severity: Severity::Warning,
        ..Diagnostic::new(message).with_help(help)
    };
    (LintFinding { code, problem, fix: None }, of.to_owned())
}

/// Iterates over tools whose descriptions belong to this file. Those of a client's own tools do
/// not.
pub(crate) fn own_tools(declared: &AgentConfig) -> impl Iterator<Item = (&ToolSpec, &SourceSpan)> {
    declared
        .tools
        .iter()
        .map(|entry| (entry.tool.spec(), &entry.span))
        .filter(|(spec, _)| !spec.is_run_by_client())
}

fn check_zero_limits(declared: &AgentConfig) -> Vec<NamedFinding> {
    let to_finding = |place: &SourceSpan| {
        let message = format!("the agent `{}` refuses every call", declared.name);
        lint_warning(
            "dead_rule",
            &declared.name,
            Some(place),
            message,
            "raise the limit, or remove the agent",
        )
    };
    declared.zero_limits.iter().map(to_finding).collect()
}

fn check_reasons(declared: &AgentConfig) -> Vec<NamedFinding> {
    let denying = declared.rules.sourced_rules().filter(|rule| {
        let can_deny =
            rule.policy.can_deny_any(declared.tools.iter().map(|entry| entry.tool.spec()));
        can_deny && !rule.policy.name().starts_with(toolgate::policy::source::BUILT_IN_RULE_PREFIX)
    });
    let to_finding = |rule: &toolgate::policy::source::SourcedRule| {
        let name = rule.policy.name();
        let words = |place: SourceSpan| {
            place.text.get(place.range).map_or(0, |reason| reason.split_whitespace().count())
        };
        let (at, message) = match rule.has_field("reason") {
            false => ("", format!("the rule `{name}` refuses without a reason")),
            // A redirect also tells the model what to do.
            true if rule.has_field("redirect")
                || rule.source_span("reason", None).map_or(0, words) >= MIN_REASON_WORDS =>
            {
                return None;
            }
            true => ("reason", format!("the reason of the rule `{name}` is too short to act on")),
        };
        let help = "add `reason = \"…\"` that tells the model what to do instead";
        Some(lint_warning("silent_rule", name, rule.source_span(at, None).as_ref(), message, help))
    };
    denying.filter_map(to_finding).collect()
}

fn check_usage(declared: &AgentConfig, usage: &ToolUsage) -> Vec<NamedFinding> {
    let all = usage.sessions.get(&declared.name).copied().unwrap_or(0);
    if all < MIN_USAGE_SESSIONS {
        return Vec::new();
    }
    let to_finding = |(spec, place): (&ToolSpec, &SourceSpan)| {
        let used =
            usage.tools.get(&(declared.name.clone(), spec.name().to_owned())).copied().unwrap_or(0);
        (used * 10 < all).then(|| {
            let message = format!("`{}` was used in {used} of {all} sessions", spec.name());
            lint_warning(
                "rarely_used",
                spec.name(),
                Some(place),
                message,
                "move it to a specialist, or remove it",
            )
        })
    };
    own_tools(declared).filter_map(to_finding).collect()
}

fn check_retention(declared: &AgentConfig, retention: SignedDuration) -> Vec<NamedFinding> {
    let rules = declared
        .rules
        .sourced_rules()
        .filter(|rule| rule.policy.lookback_window().is_some_and(|window| window > retention));
    let to_finding = |rule: &toolgate::policy::source::SourcedRule| {
        let name = rule.policy.name();
        let message = format!("the rule `{name}` looks back further than rows are kept");
        lint_warning(
            "short_retention",
            name,
            rule.source_span("", None).as_ref(),
            message,
            "increase `retention`; the rule still works, but a backtest lacks older calls",
        )
    };
    rules.map(to_finding).collect()
}

fn check_duplicates(agents: &[AgentConfig]) -> Vec<NamedFinding> {
    let mut seen: BTreeMap<&str, (&ToolSpec, &str)> = BTreeMap::new();
    let mut found = Vec::new();
    for declared in agents {
        for ToolConfig { tool, span: place, .. } in &declared.tools {
            let spec = tool.spec();
            match seen.get(spec.name()) {
                Some((other, agent))
                    if other.input_schema() == spec.input_schema()
                        && other.description() == spec.description() =>
                {
                    let message = format!(
                        "`{}` is declared in the agents `{agent}` and `{}`",
                        spec.name(),
                        declared.name
                    );
                    found.push(lint_warning(
                        "inlined_twice",
                        spec.name(),
                        Some(place),
                        message,
                        "declare it in one agent, and let the other agent call that one",
                    ));
                }
                _ => {
                    seen.insert(spec.name(), (spec, &declared.name));
                }
            }
        }
    }
    found
}

/// Finds references that are missing here. Where the gateway runs, they may exist.
fn check_references(upstream: &UpstreamConfig) -> Vec<NamedFinding> {
    let to_finding = |problem: Diagnostic| {
        let place = problem.span.as_ref().or(upstream.span.as_ref());
        let message =
            format!("the upstream `{}` would stay offline: {}", upstream.name, problem.message);
        lint_warning(
            "missing_reference",
            &upstream.name,
            place,
            message,
            problem.help.as_deref().unwrap_or_default(),
        )
    };
    upstream.all_references().filter_map(SecretRef::resolution_problem).map(to_finding).collect()
}
