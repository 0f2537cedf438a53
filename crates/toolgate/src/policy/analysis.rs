//! Analyzes the rules of an agent together: unreachable tools, dead rules, contradictions.

use std::collections::{BTreeMap, BTreeSet};

use rust_decimal::Decimal;

use super::{Attached, Caps, Condition, Forbids, Mode, Outline, Problem};
use crate::tool::Spec;
use toolgate_json::Pointer;

/// A tool with the rules that govern it, most specific level first.
pub(crate) type Governed<'a> = (&'a Spec, &'a [Attached]);

/// Returns the problems of an agent's rules as a whole.
pub(crate) fn analyse(tools: &[Governed<'_>]) -> Vec<Problem> {
    let mut problems = unreachable(tools);
    problems.extend(never_speak(tools));
    for (tool, rules) in tools {
        problems.extend(contradictions(tool, rules));
    }
    problems
}

fn enforced(rules: &[Attached]) -> impl Iterator<Item = &Attached> + Clone {
    rules.iter().filter(|attached| attached.policy.mode() == Mode::Enforce)
}

fn is_always_denied(tool: &Spec, rules: &[Attached]) -> bool {
    let always = |f: Forbids<'_>| f.conditions.is_empty() && !f.has_other_conditions && !f.asks_person;
    enforced(rules).any(|rule| {
        let outline = rule.policy.outline(tool);
        outline.denies.is_some_and(always) || outline.limit.is_some_and(|caps| leaves_none(&caps))
    })
}

/// Returns whether a limit allows no call at all.
fn leaves_none(caps: &Caps<'_>) -> bool {
    caps.summed_argument.is_none() && caps.max < Decimal::ONE
}

/// Finds tools that no order of calls can reach.
fn unreachable(tools: &[Governed<'_>]) -> Vec<Problem> {
    let denied: BTreeSet<&str> = tools.iter().filter(|(tool, rules)| is_always_denied(tool, rules)).map(|(tool, _)| tool.name()).collect();
    let mut reachable: BTreeSet<&str> = BTreeSet::new();
    loop {
        let before = reachable.len();
        for (tool, rules) in tools.iter().filter(|(tool, _)| !denied.contains(tool.name())) {
            let mut groups = enforced(rules).flat_map(|rule| rule.policy.outline(tool).prerequisites);
            if groups.all(|(_, group)| group.iter().any(|first| reachable.contains(first))) {
                reachable.insert(tool.name());
            }
        }
        if reachable.len() == before {
            break;
        }
    }
    let mut problems = Vec::new();
    for (tool, rules) in tools.iter().filter(|(tool, _)| !reachable.contains(tool.name()) && !denied.contains(tool.name())) {
        for rule in enforced(rules) {
            for (field, group) in rule.policy.outline(tool).prerequisites {
                // Another check reports tools that do not exist.
                let known = group.iter().any(|first| tools.iter().any(|(tool, _)| tool.name() == *first));
                if known && !group.iter().any(|first| reachable.contains(first)) {
                    let chain = chain(tool.name(), tools, &reachable, &denied);
                    let problem = Problem::at(field, format!("`{}` can never be called: {chain}", tool.name())).of(rule.policy.name());
                    problems.push(problem.help("remove one of these requirements"));
                }
            }
        }
    }
    for name in denied {
        let spoken = tools.iter().filter(|(tool, _)| tool.name() == name).flat_map(|(tool, rules)| {
            enforced(rules).filter(move |rule| {
                rule.policy.outline(tool).denies.is_some_and(|f| f.conditions.is_empty() && !f.has_other_conditions && !f.asks_person)
            })
        });
        let help = "if this is intended, remove the tool from the agent instead";
        problems
            .extend(spoken.map(|rule| Problem::new(format!("`{name}` can never be called")).of(rule.policy.name()).help(help).warning()));
    }
    problems
}

/// Describes why a tool cannot be reached: its chain of prerequisites, up to a cycle or a denial.
fn chain(tool: &str, tools: &[Governed<'_>], reachable: &BTreeSet<&str>, denied: &BTreeSet<&str>) -> String {
    let mut path = vec![tool.to_owned()];
    loop {
        let at = path.last().cloned().unwrap_or_default();
        let missing = tools.iter().filter(|(spec, _)| spec.name() == at).find_map(|(spec, rules)| {
            let groups = enforced(rules).flat_map(|rule| {
                rule.policy.outline(spec).prerequisites.into_iter().map(|(_, g)| g.into_iter().map(str::to_owned).collect::<Vec<_>>())
            });
            groups.filter(|group| !group.iter().any(|first| reachable.contains(first.as_str()))).find_map(|group| group.into_iter().next())
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
fn covers(wider: &Forbids<'_>, narrower: &Forbids<'_>) -> bool {
    !wider.has_other_conditions
        && wider
            .conditions
            .iter()
            .all(|(path, condition)| narrower.conditions.iter().any(|(other, inner)| other == path && inner.implies(condition)))
}

/// Returns whether one limit is always reached before the other.
fn is_stricter(a: &Caps<'_>, b: &Caps<'_>) -> bool {
    let same = a.summed_argument == b.summed_argument && a.currency == b.currency && a.per == b.per;
    let longer = match (a.window, b.window) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(a), Some(b)) => a >= b,
    };
    same && a.max <= b.max && longer
}

/// Index of the rules of one tool, so that a rule is compared only with rules that may cover it.
#[derive(Default)]
struct Alike<'a> {
    /// Rules that apply to every call.
    always: Vec<usize>,
    /// Rules by the argument of their first condition, and by each name in it if it lists names.
    forbids: BTreeMap<(&'a Pointer, Option<&'a str>), Vec<usize>>,
    /// Rules by the argument that they limit; `None` for limits on calls.
    caps: BTreeMap<Option<&'a Pointer>, Vec<usize>>,
}

/// Returns the names that a condition lists.
///
/// A wider condition contains all of them, so looking up any one name finds it.
fn names(condition: &Condition) -> Option<&[String]> {
    match condition {
        Condition::Runs(names) | Condition::Touches { places: names, .. } => Some(names),
        _ => None,
    }
}

impl<'a> Alike<'a> {
    fn among(rules: &[(&'a str, Outline<'a>)]) -> Self {
        let mut alike = Self::default();
        for (index, (_, outline)) in rules.iter().enumerate() {
            match outline.denies.map(|forbids| forbids.conditions.first()) {
                Some(Some((path, condition))) => match names(condition) {
                    Some(names) => {
                        for name in names {
                            alike.forbids.entry((path, Some(name.as_str()))).or_default().push(index);
                        }
                    }
                    None => alike.forbids.entry((path, None)).or_default().push(index),
                },
                Some(None) => alike.always.push(index),
                None => {}
            }
            if let Some(caps) = outline.limit {
                alike.caps.entry(caps.summed_argument).or_default().push(index);
            }
        }
        alike
    }

    /// Returns the rules that may apply to every call that this rule applies to.
    fn to(&self, outline: &Outline<'a>) -> Vec<usize> {
        let mut found: Vec<usize> = Vec::new();
        if let Some(forbids) = outline.denies {
            found.extend(&self.always);
            for (path, condition) in forbids.conditions {
                let first = names(condition).and_then(|names| names.first()).map(String::as_str);
                let keys = [Some((path, None)), first.map(|name| (path, Some(name)))];
                found.extend(keys.into_iter().flatten().filter_map(|key| self.forbids.get(&key)).flatten());
            }
        }
        found.extend(outline.limit.and_then(|caps| self.caps.get(&caps.summed_argument)).into_iter().flatten());
        found
    }
}

/// Finds rules that never apply because another rule always applies first.
fn never_speak(tools: &[Governed<'_>]) -> Vec<Problem> {
    // For each rule: the rules that apply before it on every tool that it governs.
    let mut before: BTreeMap<&str, Option<BTreeSet<&str>>> = BTreeMap::new();
    for (tool, rules) in tools {
        let rules: Vec<(&str, Outline<'_>)> = enforced(rules).map(|rule| (rule.policy.name(), rule.policy.outline(tool))).collect();
        let alike = Alike::among(&rules);
        for (index, (rule, outline)) in rules.iter().enumerate() {
            let speaks_before = |other: usize, theirs: &Outline<'_>| {
                let shadowed = matches!((&theirs.denies, &outline.denies), (Some(wide), Some(narrow))
                    if covers(wide, narrow) && !wide.asks_person && (narrow.asks_person || other < index));
                let capped = matches!((&theirs.limit, &outline.limit), (Some(a), Some(b))
                    if is_stricter(a, b) && (other < index || !is_stricter(b, a)));
                other != index && (shadowed || capped)
            };
            let others = alike.to(outline).into_iter().filter_map(|other| rules.get(other).map(|(name, theirs)| (other, *name, theirs)));
            let found: BTreeSet<&str> =
                others.filter(|(other, _, theirs)| speaks_before(*other, theirs)).map(|(_, name, _)| name).collect();
            let known = before.entry(*rule).or_insert(None);
            *known = Some(match known.take() {
                None => found,
                Some(earlier) => earlier.intersection(&found).copied().collect(),
            });
        }
    }
    let shadowed = before.into_iter().filter_map(|(rule, by)| by.and_then(|by| by.into_iter().next()).map(|by| (rule, by)));
    shadowed
        .map(|(rule, by)| {
            let problem = Problem::new(format!("the rule never applies: `{by}` always applies first")).of(rule);
            problem.help(format!("remove the rule, or make it stricter than `{by}`")).warning()
        })
        .collect()
}

/// Finds rules that together deny every call of a tool.
fn contradictions(tool: &Spec, rules: &[Attached]) -> Vec<Problem> {
    let bounds = |wanted: fn(&Condition) -> Option<Decimal>| {
        enforced(rules).filter_map(move |rule| {
            let outline = rule.policy.outline(tool);
            let forbids = outline.denies.filter(|f| !f.has_other_conditions && !f.asks_person)?;
            match forbids.conditions {
                [(path, condition)] => wanted(condition).map(|limit| (rule.policy.name(), path.clone(), limit)),
                _ => None,
            }
        })
    };
    let least = |c: &Condition| if let Condition::Below(limit) = c { Some(*limit) } else { None };
    let most = |c: &Condition| if let Condition::Above(limit) = c { Some(*limit) } else { None };
    let name = tool.name();
    let mut problems = Vec::new();
    let highs: Vec<_> = bounds(most).collect();
    let caps: Vec<_> = enforced(rules).filter_map(|rule| Some((rule.policy.name(), rule.policy.outline(tool).limit?))).collect();
    for (low_rule, path, low) in bounds(least) {
        for (high_rule, other, high) in &highs {
            if path == *other && *high < low {
                let message = format!(
                    "`{name}` can never be called: `{low_rule}` requires `{path}` to be at least {low}, `{high_rule}` at most {high}"
                );
                problems.push(Problem::new(message).of(high_rule).help("choose bounds that leave values between them"));
            }
        }
        for (rule, caps) in caps.iter().filter(|(_, caps)| caps.summed_argument == Some(&path) && caps.max < low) {
            let message = format!(
                "`{name}` can never be called: `{low_rule}` requires `{path}` to be at least {low}, but this limit is {}",
                caps.max
            );
            problems.push(Problem::at("max", message).of(rule).help("raise the limit, or allow smaller amounts"));
        }
    }
    for (rule, _) in caps.iter().filter(|(_, caps)| leaves_none(caps)) {
        let problem = Problem::at("calls", format!("`{name}` can never be called: the limit is 0 calls")).of(rule);
        problems.push(problem.help("if this is intended, remove the tool from the agent instead").warning());
    }
    problems
}
