//! Finds weak descriptions: short, overlapping, or silent about the order of calls.

use std::collections::BTreeSet;

use toolgate::policy::{EnforcementMode, SourceSpan};
use toolgate::tool::ToolSpec;

use crate::agent_config::AgentConfig;
use crate::lint::{NamedFinding, lint_warning, own_tools};

/// Recommended maximum number of tools of an agent.
const MAX_RECOMMENDED_TOOLS: usize = 5;

/// Minimum share of common words for two descriptions to overlap.
const MIN_DESCRIPTION_OVERLAP: f64 = 0.6;

pub(crate) fn check_tool_count(declared: &AgentConfig) -> Option<NamedFinding> {
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

pub(crate) fn check_descriptions(declared: &AgentConfig) -> Vec<NamedFinding> {
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

pub(crate) fn check_ordering(declared: &AgentConfig) -> Vec<NamedFinding> {
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

pub(crate) fn check_overlaps(declared: &AgentConfig) -> Vec<NamedFinding> {
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
