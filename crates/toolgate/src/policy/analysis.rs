//! Analyzes the rules of an agent together: unreachable tools, dead rules, contradictions.

use std::collections::{BTreeMap, BTreeSet};

use rust_decimal::Decimal;

use super::{
    AttachedPolicy, Condition, DenySummary, Diagnostic, EnforcementMode, LimitSummary,
    StaticSummary,
};
use crate::tool::ToolSpec;
use toolgate_json::Pointer;

/// A tool with the rules that govern it, most specific level first.
pub(crate) type GovernedTool<'a> = (&'a ToolSpec, &'a [AttachedPolicy]);

/// Returns the problems of an agent's rules as a whole.
pub(crate) fn analyze_rules(tools: &[GovernedTool<'_>]) -> Vec<Diagnostic> {
    let mut problems = find_unreachable_tools(tools);
    problems.extend(find_dead_rules(tools));
    for (tool, rules) in tools {
        problems.extend(find_contradictions(tool, rules));
    }
    problems
}

fn enforced_rules(rules: &[AttachedPolicy]) -> impl Iterator<Item = &AttachedPolicy> + Clone {
    rules.iter().filter(|attached| attached.policy.mode() == EnforcementMode::Enforce)
}

fn is_always_denied(tool: &ToolSpec, rules: &[AttachedPolicy]) -> bool {
    let always =
        |f: DenySummary<'_>| f.conditions.is_empty() && !f.has_other_conditions && !f.asks_person;
    enforced_rules(rules).any(|rule| {
        let outline = rule.policy.static_summary(tool);
        outline.denies.is_some_and(always) || outline.limit.is_some_and(|caps| is_zero_limit(&caps))
    })
}

/// Returns whether a limit allows no call at all.
fn is_zero_limit(caps: &LimitSummary<'_>) -> bool {
    caps.summed_argument.is_none() && caps.max < Decimal::ONE
}

/// Finds tools that no order of calls can reach.
fn find_unreachable_tools(tools: &[GovernedTool<'_>]) -> Vec<Diagnostic> {
    let denied: BTreeSet<&str> = tools
        .iter()
        .filter(|(tool, rules)| is_always_denied(tool, rules))
        .map(|(tool, _)| tool.name())
        .collect();
    let mut reachable: BTreeSet<&str> = BTreeSet::new();
    loop {
        let before = reachable.len();
        for (tool, rules) in tools.iter().filter(|(tool, _)| !denied.contains(tool.name())) {
            let mut groups = enforced_rules(rules)
                .flat_map(|rule| rule.policy.static_summary(tool).prerequisites);
            if groups.all(|(_, group)| group.iter().any(|first| reachable.contains(first))) {
                reachable.insert(tool.name());
            }
        }
        if reachable.len() == before {
            break;
        }
    }
    let mut problems = Vec::new();
    for (tool, rules) in tools
        .iter()
        .filter(|(tool, _)| !reachable.contains(tool.name()) && !denied.contains(tool.name()))
    {
        for rule in enforced_rules(rules) {
            for (field, group) in rule.policy.static_summary(tool).prerequisites {
                // Another check reports tools that do not exist.
                let known =
                    group.iter().any(|first| tools.iter().any(|(tool, _)| tool.name() == *first));
                if known && !group.iter().any(|first| reachable.contains(first)) {
                    let chain =
                        describe_prerequisite_chain(tool.name(), tools, &reachable, &denied);
                    let problem = Diagnostic::at_field(
                        field,
                        format!("`{}` can never be called: {chain}", tool.name()),
                    )
                    .with_rule(rule.policy.name());
                    problems.push(problem.with_help("remove one of these requirements"));
                }
            }
        }
    }
    for name in denied {
        let denying =
            tools.iter().filter(|(tool, _)| tool.name() == name).flat_map(|(tool, rules)| {
                enforced_rules(rules).filter(move |rule| {
                    rule.policy.static_summary(tool).denies.is_some_and(|f| {
                        f.conditions.is_empty() && !f.has_other_conditions && !f.asks_person
                    })
                })
            });
        let help = "if this is intended, remove the tool from the agent instead";
        problems.extend(denying.map(|rule| {
            Diagnostic::new(format!("`{name}` can never be called"))
                .with_rule(rule.policy.name())
                .with_help(help)
                .into_warning()
        }));
    }
    problems
}

/// Describes why a tool cannot be reached: its chain of prerequisites, up to a cycle or a denial.
fn describe_prerequisite_chain(
    tool: &str,
    tools: &[GovernedTool<'_>],
    reachable: &BTreeSet<&str>,
    denied: &BTreeSet<&str>,
) -> String {
    let mut path = vec![tool.to_owned()];
    loop {
        let at = path.last().cloned().unwrap_or_default();
        let missing =
            tools.iter().filter(|(spec, _)| spec.name() == at).find_map(|(spec, rules)| {
                let groups = enforced_rules(rules).flat_map(|rule| {
                    rule.policy
                        .static_summary(spec)
                        .prerequisites
                        .into_iter()
                        .map(|(_, g)| g.into_iter().map(str::to_owned).collect::<Vec<_>>())
                });
                groups
                    .filter(|group| !group.iter().any(|first| reachable.contains(first.as_str())))
                    .find_map(|group| group.into_iter().next())
            });
        let Some(next) = missing else {
            let end = if denied.contains(at.as_str()) { ", which is always denied" } else { "" };
            return format!("{}{end}", path.join(" needs "));
        };
        let round = path.contains(&next);
        path.push(next);
        if round {
            return path.join(" needs ");
        }
    }
}

/// Returns whether one rule applies to every call that the other one applies to.
fn covers(wider: &DenySummary<'_>, narrower: &DenySummary<'_>) -> bool {
    !wider.has_other_conditions
        && wider.conditions.iter().all(|(path, condition)| {
            narrower
                .conditions
                .iter()
                .any(|(other, inner)| other == path && inner.implies(condition))
        })
}

/// Returns whether one limit is always reached before the other.
fn is_stricter(a: &LimitSummary<'_>, b: &LimitSummary<'_>) -> bool {
    let same =
        a.summed_argument == b.summed_argument && a.currency == b.currency && a.owner == b.owner;
    let longer = match (a.window, b.window) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(a), Some(b)) => a >= b,
    };
    same && a.max <= b.max && longer
}

/// Index of the rules of one tool, so that a rule is compared only with rules that may cover it.
#[derive(Default)]
struct RuleCoverIndex<'a> {
    /// Rules that apply to every call.
    unconditional: Vec<usize>,
    /// Rules by the argument of their first condition, and by each name in it if it lists names.
    deny_rules: BTreeMap<(&'a Pointer, Option<&'a str>), Vec<usize>>,
    /// Rules by the argument that they limit; `None` for limits on calls.
    limits: BTreeMap<Option<&'a Pointer>, Vec<usize>>,
}

/// Returns the names that a condition lists.
///
/// A wider condition contains all of them, so looking up any one name finds it.
fn listed_names(condition: &Condition) -> Option<&[String]> {
    match condition {
        Condition::Runs(names) | Condition::Touches { places: names, .. } => Some(names),
        _ => None,
    }
}

impl<'a> RuleCoverIndex<'a> {
    fn build(rules: &[(&'a str, StaticSummary<'a>)]) -> Self {
        let mut index = Self::default();
        for (position, (_, outline)) in rules.iter().enumerate() {
            match outline.denies.map(|forbids| forbids.conditions.first()) {
                Some(Some((path, condition))) => match listed_names(condition) {
                    Some(names) => {
                        for name in names {
                            index
                                .deny_rules
                                .entry((path, Some(name.as_str())))
                                .or_default()
                                .push(position);
                        }
                    }
                    None => index.deny_rules.entry((path, None)).or_default().push(position),
                },
                Some(None) => index.unconditional.push(position),
                None => {}
            }
            if let Some(caps) = outline.limit {
                index.limits.entry(caps.summed_argument).or_default().push(position);
            }
        }
        index
    }

    /// Returns the rules that may apply to every call that this rule applies to.
    fn find_candidates(&self, outline: &StaticSummary<'a>) -> Vec<usize> {
        let mut found: Vec<usize> = Vec::new();
        if let Some(forbids) = outline.denies {
            found.extend(&self.unconditional);
            for (path, condition) in forbids.conditions {
                let first =
                    listed_names(condition).and_then(|names| names.first()).map(String::as_str);
                let keys = [Some((path, None)), first.map(|name| (path, Some(name)))];
                found.extend(
                    keys.into_iter()
                        .flatten()
                        .filter_map(|key| self.deny_rules.get(&key))
                        .flatten(),
                );
            }
        }
        found.extend(
            outline
                .limit
                .and_then(|caps| self.limits.get(&caps.summed_argument))
                .into_iter()
                .flatten(),
        );
        found
    }
}

/// Finds rules that never apply because another rule always applies first.
fn find_dead_rules(tools: &[GovernedTool<'_>]) -> Vec<Diagnostic> {
    // For each rule: the rules that apply before it on every tool that it governs.
    let mut before: BTreeMap<&str, Option<BTreeSet<&str>>> = BTreeMap::new();
    for (tool, rules) in tools {
        let rules: Vec<(&str, StaticSummary<'_>)> = enforced_rules(rules)
            .map(|rule| (rule.policy.name(), rule.policy.static_summary(tool)))
            .collect();
        let index = RuleCoverIndex::build(&rules);
        for (position, (rule, outline)) in rules.iter().enumerate() {
            let is_before = |other: usize, other_summary: &StaticSummary<'_>| {
                let shadowed = matches!((&other_summary.denies, &outline.denies), (Some(wide), Some(narrow))
                    if covers(wide, narrow) && !wide.asks_person && (narrow.asks_person || other < position));
                let capped = matches!((&other_summary.limit, &outline.limit), (Some(a), Some(b))
                    if is_stricter(a, b) && (other < position || !is_stricter(b, a)));
                other != position && (shadowed || capped)
            };
            let others = index.find_candidates(outline).into_iter().filter_map(|other| {
                rules.get(other).map(|(name, other_summary)| (other, *name, other_summary))
            });
            let found: BTreeSet<&str> = others
                .filter(|(other, _, other_summary)| is_before(*other, other_summary))
                .map(|(_, name, _)| name)
                .collect();
            let known = before.entry(*rule).or_insert(None);
            *known = Some(match known.take() {
                None => found,
                Some(earlier) => earlier.intersection(&found).copied().collect(),
            });
        }
    }
    let shadowed = before
        .into_iter()
        .filter_map(|(rule, by)| by.and_then(|by| by.into_iter().next()).map(|by| (rule, by)));
    shadowed
        .map(|(rule, by)| {
            let problem =
                Diagnostic::new(format!("the rule never applies: `{by}` always applies first"))
                    .with_rule(rule);
            problem
                .with_help(format!("remove the rule, or make it stricter than `{by}`"))
                .into_warning()
        })
        .collect()
}

/// Finds rules that together deny every call of a tool.
fn find_contradictions(tool: &ToolSpec, rules: &[AttachedPolicy]) -> Vec<Diagnostic> {
    let bounds = |limit_of: fn(&Condition) -> Option<Decimal>| {
        enforced_rules(rules).filter_map(move |rule| {
            let outline = rule.policy.static_summary(tool);
            let forbids = outline.denies.filter(|f| !f.has_other_conditions && !f.asks_person)?;
            match forbids.conditions {
                [(path, condition)] => {
                    limit_of(condition).map(|limit| (rule.policy.name(), path.clone(), limit))
                }
                _ => None,
            }
        })
    };
    let least = |c: &Condition| if let Condition::Below(limit) = c { Some(*limit) } else { None };
    let most = |c: &Condition| if let Condition::Above(limit) = c { Some(*limit) } else { None };
    let name = tool.name();
    let mut problems = Vec::new();
    let highs: Vec<_> = bounds(most).collect();
    let caps: Vec<_> = enforced_rules(rules)
        .filter_map(|rule| Some((rule.policy.name(), rule.policy.static_summary(tool).limit?)))
        .collect();
    for (low_rule, path, low) in bounds(least) {
        for (high_rule, other, high) in &highs {
            if path == *other && *high < low {
                let message = format!(
                    "`{name}` can never be called: `{low_rule}` requires `{path}` to be at least {low}, `{high_rule}` at most {high}"
                );
                problems.push(
                    Diagnostic::new(message)
                        .with_rule(high_rule)
                        .with_help("choose bounds that leave values between them"),
                );
            }
        }
        for (rule, caps) in
            caps.iter().filter(|(_, caps)| caps.summed_argument == Some(&path) && caps.max < low)
        {
            let message = format!(
                "`{name}` can never be called: `{low_rule}` requires `{path}` to be at least {low}, but this limit is {}",
                caps.max
            );
            problems.push(
                Diagnostic::at_field("max", message)
                    .with_rule(rule)
                    .with_help("raise the limit, or allow smaller amounts"),
            );
        }
    }
    for (rule, _) in caps.iter().filter(|(_, caps)| is_zero_limit(caps)) {
        let problem = Diagnostic::at_field(
            "calls",
            format!("`{name}` can never be called: the limit is 0 calls"),
        )
        .with_rule(rule);
        problems.push(
            problem
                .with_help("if this is intended, remove the tool from the agent instead")
                .into_warning(),
        );
    }
    problems
}
