//! Finds weaknesses of a configuration: poor descriptions, ineffective rules, likely misspellings.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use jiff::SignedDuration;

use crate::config::{AgentConfig, Config, ToolConfig};
use crate::parse::upstream::UpstreamConfig;
use crate::schema_keywords::find_misspelled_keywords;
use crate::secret_ref::SecretRef;
use crate::tool_backend::ToolBackend;
use toolgate::policy::source::table_reader::TomlTable;
use toolgate::policy::{Diagnostic, EnforcementMode, Severity, SourceSpan};
use toolgate::schema::{SchemaLookup, lookup_input, lookup_schema};
use toolgate::tool::{ExtraArguments, ToolSpec};
use toolgate_text::escape_for_display;
use toolgate_text::suggest::find_closest;

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

/// Recommended maximum number of tools of an agent.
const MAX_RECOMMENDED_TOOLS: usize = 5;
/// Minimum share of common words for two descriptions to overlap.
const MIN_DESCRIPTION_OVERLAP: f64 = 0.6;
/// Minimum number of words of a reason; "Not allowed." does not tell a model what to do.
const MIN_REASON_WORDS: usize = 3;
/// Minimum number of recorded sessions before usage is judged.
const MIN_USAGE_SESSIONS: u64 = 20;
/// Keys whose values decide what is allowed. They are never fixed automatically.
const DECISION_KEYS: [&str; 6] = ["policy", "rule", "mode", "effect", "undeclared", "on_failure"];

/// A finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LintFinding {
    /// Its code; see [`LINTS`].
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
type NamedFinding = (LintFinding, String);

fn lint_warning(
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
fn own_tools(declared: &AgentConfig) -> impl Iterator<Item = (&ToolSpec, &SourceSpan)> {
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

fn check_tool_count(declared: &AgentConfig) -> Option<NamedFinding> {
    let count = declared.tools.len();
    let place = declared.tools.get(MAX_RECOMMENDED_TOOLS).map(|entry| &entry.span);
    (count > MAX_RECOMMENDED_TOOLS && own_tools(declared).next().is_some()).then(|| {
        let message = format!("the agent `{}` has {count} tools; models choose well among at most {MAX_RECOMMENDED_TOOLS}", declared.name);
        lint_warning(
            "too_many_tools",
            &declared.name,
            place,
            message,
            "give each specialist its own agent, and let one agent route between them",
        )
    })
}

fn check_descriptions(declared: &AgentConfig) -> Vec<NamedFinding> {
    let is_short = |(spec, _): &(&ToolSpec, &SourceSpan)| {
        spec.description().lines().filter(|line| !line.trim().is_empty()).count() < 4
    };
    let to_finding = |(spec, place): (&ToolSpec, &SourceSpan)| {
        let lines = spec.description().lines().count();
        let message = format!(
            "the description of `{}` has {lines} line{}",
            spec.name(),
            if lines == 1 { "" } else { "s" }
        );
        lint_warning(
            "thin_description",
            spec.name(),
            Some(place),
            message,
            "write four lines: what it does, when to use it, edge cases, what must come first",
        )
    };
    own_tools(declared).filter(is_short).map(to_finding).collect()
}

/// Schemas of upstreams are not checked, because this file cannot change them.
fn check_schemas(declared: &AgentConfig) -> Vec<NamedFinding> {
    let mut found = Vec::new();
    for ToolConfig { tool, span: place, .. } in declared
        .tools
        .iter()
        .filter(|entry| !matches!(entry.backend, Some(ToolBackend::Mcp { .. })))
    {
        let spec = tool.spec();
        for (direction, schema) in
            [("input", spec.input_schema()), ("output", spec.output_schema())]
        {
            for (problem, help) in schema.map(find_misspelled_keywords).unwrap_or_default() {
                let message = format!("the {direction} of `{}` {problem}", spec.name());
                found.push(lint_warning(
                    "unknown_keyword",
                    spec.name(),
                    Some(place),
                    message,
                    &help,
                ));
            }
        }
    }
    found
}

/// Finds misspelled secrets, whose real values would be shown.
///
/// Without an output schema the result may contain the secret, so the finding is only a note.
fn check_secrets(declared: &AgentConfig) -> Vec<NamedFinding> {
    let mut found = Vec::new();
    for ToolConfig { tool, secrets, .. } in &declared.tools {
        let spec = tool.spec();
        for (path, place) in secrets {
            let SchemaLookup::Missing(name, mut known) = lookup_input(spec, path) else { continue };
            let (severity, otherwise) = match spec
                .output_schema()
                .map(|output| lookup_schema(output, ExtraArguments::Pass, path))
            {
                Some(SchemaLookup::Known(_)) => continue,
                Some(SchemaLookup::Missing(_, output_names)) => {
                    known.extend(output_names);
                    (
                        Severity::Warning,
                        "name a field of the arguments or of the result, or remove it",
                    )
                }
                Some(SchemaLookup::Open) | None => {
                    (Severity::Note, "if the result contains it, declare it in `output`")
                }
            };
            let guess = find_closest(&name, known.iter().map(String::as_str));
            let parts = match severity {
                Severity::Note => {
                    ("does not accept", "unless the result contains it, the entry hides nothing")
                }
                _ => ("neither accepts nor returns", "the entry hides nothing"),
            };
            let message = format!(
                "`{}` {} a `{}`: {}",
                spec.name(),
                parts.0,
                escape_for_display(&path.to_string()),
                parts.1
            );
            let problem = Diagnostic {
                span: Some(place.clone()),
                severity,
                ..match guess {
                    Some(guess) => Diagnostic::new(message).did_you_mean(guess),
                    None => Diagnostic::new(message).with_help(otherwise),
                }
            };
            // A note is too uncertain for an automatic fix.
            let finding = match severity {
                Severity::Note => LintFinding { code: "unknown_secret", problem, fix: None },
                _ => LintFinding::from_problem("unknown_secret", problem),
            };
            found.push((finding, spec.name().to_owned()));
        }
    }
    found
}

/// Returns the tools that enforced rules require before this tool.
fn required_predecessors(declared: &AgentConfig, spec: &ToolSpec) -> BTreeSet<String> {
    let rules = declared.rules.sourced_rules().filter(|written| {
        written.policy.mode() == EnforcementMode::Enforce && written.policy.governs(spec)
    });
    rules
        .flat_map(|written| {
            written
                .policy
                .static_summary(spec)
                .prerequisites
                .into_iter()
                .flat_map(|(_, group)| group.into_iter().map(str::to_owned))
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Checks whether a rule about files orders two tools: read before write.
fn is_ordered_by_files(declared: &AgentConfig, reads: &str, writes: &ToolSpec) -> bool {
    let on_files = declared
        .tools
        .iter()
        .any(|entry| entry.uses_agent_files && entry.tool.spec().name() == reads);
    let looks = |written: &toolgate::policy::source::SourcedRule| {
        written.policy.governs(writes) && written.policy.static_summary(writes).needs_files
    };
    on_files
        && declared
            .rules
            .sourced_rules()
            .any(|written| written.policy.mode() == EnforcementMode::Enforce && looks(written))
}

fn check_ordering(declared: &AgentConfig) -> Vec<NamedFinding> {
    const ORDERING_PHRASES: [&str; 8] =
        ["after", "before", "first", "requires", "must", "only once", "prior", "needs"];
    let mut found = Vec::new();
    for (spec, place) in own_tools(declared) {
        let enforced = required_predecessors(declared, spec);
        let described = spec.description().to_lowercase();
        let names = |name: &str| {
            described
                .split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '-'))
                .any(|word| word == name)
        };
        // If several tools satisfy the rule, naming one of them is enough.
        if !enforced.is_empty() && !enforced.iter().any(|name| names(name)) {
            let list =
                enforced.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" or ");
            let message = format!(
                "`{}` is refused without {list}, but its description does not say so",
                spec.name()
            );
            found.push(lint_warning(
                "ordering_untold",
                spec.name(),
                Some(place),
                message,
                "name the tool that must come first in the last line",
            ));
        }
        let ordered = |line: &&str| ORDERING_PHRASES.iter().any(|word| line.contains(word));
        for line in described.lines().filter(ordered) {
            let others = declared
                .tools
                .iter()
                .map(|entry| entry.tool.spec())
                .filter(|other| other.name() != spec.name());
            let mentioned = others
                .filter(|other| {
                    line.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '-'))
                        .any(|word| word == other.name())
                })
                // The line may say that this tool comes before the other one.
                .filter(|other| {
                    !is_ordered_by_files(declared, other.name(), spec)
                        && !is_ordered_by_files(declared, spec.name(), other)
                });
            for name in mentioned.map(ToolSpec::name).filter(|name| !enforced.contains(*name)) {
                let message = format!(
                    "the description of `{}` says that `{name}` comes first, but no rule enforces it",
                    spec.name()
                );
                found.push(lint_warning(
                    "ordering_unenforced",
                    spec.name(),
                    Some(place),
                    message,
                    "write a `require` rule, or remove the sentence: models do not follow it reliably",
                ));
            }
        }
    }
    found
}

fn check_overlaps(declared: &AgentConfig) -> Vec<NamedFinding> {
    let words = |spec: &ToolSpec| -> BTreeSet<String> {
        let text = spec.description().to_lowercase();
        text.split(|c: char| !c.is_alphanumeric())
            .filter(|word| word.len() > 2)
            .map(str::to_owned)
            .collect()
    };
    let all: Vec<(&ToolSpec, &SourceSpan, BTreeSet<String>)> =
        own_tools(declared).map(|(spec, place)| (spec, place, words(spec))).collect();
    let mut found = Vec::new();
    for (at, (first, _, first_words)) in all.iter().enumerate() {
        for (second, place, second_words) in all.iter().skip(at + 1) {
            let (both, either) = (
                first_words.intersection(second_words).count(),
                first_words.union(second_words).count(),
            );
            if either >= 4 && both as f64 / either as f64 >= MIN_DESCRIPTION_OVERLAP {
                let message = format!(
                    "the descriptions of `{}` and `{}` are nearly equal",
                    first.name(),
                    second.name()
                );
                found.push(lint_warning(
                    "overlap",
                    second.name(),
                    Some(place),
                    message,
                    "say when to use each of them, or merge them",
                ));
            }
        }
    }
    found
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
