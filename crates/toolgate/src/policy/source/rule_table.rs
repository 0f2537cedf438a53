//! Reads `[[policy]]` tables as rules.

use std::sync::Arc;

use toml::de::{DeTable, DeValue};

use super::{PolicyScope, RuleSet, RuleSource, SourcedRule};
use crate::policy::source::rule_kinds::{
    read_deny, read_flow, read_limit, read_require, read_sequence, read_write_guard,
};
use crate::policy::source::table_reader::{TableReadState, TomlSource, TomlTable, toml_type_name};
use crate::policy::{
    Deny, Diagnostic, EnforcementMode, Flow, Limit, Policy, ReadBeforeWrite, Require, Sequence,
    observe,
};

/// The kinds of rules that a file can contain.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RuleKind {
    Require,
    Deny,
    Ask,
    Limit,
    Sequence,
    ReadBeforeWrite,
    Flow,
    OnlyFrom,
}

const RULE_KINDS: [(&str, RuleKind); 8] = [
    ("require", RuleKind::Require),
    ("deny", RuleKind::Deny),
    ("ask", RuleKind::Ask),
    ("limit", RuleKind::Limit),
    ("sequence", RuleKind::Sequence),
    ("read_before_write", RuleKind::ReadBeforeWrite),
    ("flow", RuleKind::Flow),
    ("only_from", RuleKind::OnlyFrom),
];

/// A rule that is not yet wrapped in its mode.
pub(super) enum RuleDraft {
    Require(Require),
    Deny(Deny),
    Limit(Limit),
    Sequence(Sequence),
    ReadBeforeWrite(ReadBeforeWrite),
    Flow(Flow),
}

pub(crate) fn read_policy_files<'a>(
    files: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> RuleSet {
    assemble_rules(Vec::new(), files)
}

/// Reads the rules of a larger file and of the policy files that it includes.
///
/// Problems of the larger file are reported where that file is read.
pub fn read_rules<'a>(
    file: &TomlSource,
    tables: &[TomlTable<'_>],
    files: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> RuleSet {
    let mut drafts = Vec::new();
    for table in tables {
        let before = table.problem_count();
        let read = read_rule(table);
        if table.problem_count() > before {
            table.assign_rule(before, table.text("name").unwrap_or("unnamed"));
        } else if let Some((draft, mode, scope)) = read {
            let source = RuleSource {
                file: Arc::clone(&file.name),
                text: Arc::clone(&file.text),
                part_spans: table.part_spans(),
            };
            drafts.push((draft, mode, scope, source));
        }
    }
    assemble_rules(drafts, files)
}

fn assemble_rules<'a>(
    mut drafts: Vec<(RuleDraft, EnforcementMode, PolicyScope, RuleSource)>,
    files: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> RuleSet {
    let mut problems = Vec::new();
    for (name, text) in files {
        let file = TomlSource { name: name.into(), text: text.into() };
        read_policy_file(&file, &mut drafts, &mut problems);
    }
    // An expression in any rule may read a limit of any file.
    let limits: Vec<Limit> =
        drafts
            .iter()
            .filter_map(|(draft, ..)| {
                if let RuleDraft::Limit(limit) = draft { Some(limit.clone()) } else { None }
            })
            .collect();
    let policies = drafts.into_iter().map(|(draft, mode, scope, source)| {
        let draft = match draft {
            RuleDraft::Deny(rule) => RuleDraft::Deny(limits.iter().fold(rule, Deny::reading)),
            RuleDraft::Require(rule) => {
                RuleDraft::Require(limits.iter().fold(rule, Require::reading))
            }
            other => other,
        };
        SourcedRule { scope, policy: draft.into_policy(mode), source: Some(Arc::new(source)) }
    });
    RuleSet { policies: policies.collect(), problems }
}

impl RuleDraft {
    fn into_policy(self, mode: EnforcementMode) -> Arc<dyn Policy> {
        fn apply_mode<P: Policy + 'static>(policy: P, mode: EnforcementMode) -> Arc<dyn Policy> {
            match mode {
                EnforcementMode::Enforce => Arc::new(policy),
                EnforcementMode::Observe => Arc::new(observe(policy)),
            }
        }
        match self {
            Self::Require(rule) => apply_mode(rule, mode),
            Self::Deny(rule) => apply_mode(rule, mode),
            Self::Limit(rule) => apply_mode(rule, mode),
            Self::Sequence(rule) => apply_mode(rule, mode),
            Self::ReadBeforeWrite(rule) => apply_mode(rule, mode),
            Self::Flow(rule) => apply_mode(rule, mode),
        }
    }
}

fn read_policy_file(
    file: &TomlSource,
    drafts: &mut Vec<(RuleDraft, EnforcementMode, PolicyScope, RuleSource)>,
    problems: &mut Vec<Diagnostic>,
) {
    let (document, errors) = DeTable::parse_recoverable(&file.text);
    problems.extend(errors.iter().map(|error| file.syntax_problem(error)));
    // The parser recovers from syntax errors, but the recovered rules may differ from the intended
    // ones.
    if !errors.is_empty() {
        return;
    }
    for (key, value) in document.get_ref() {
        if key.get_ref() != "policy" {
            let problem = Diagnostic::new(format!(
                "unknown key `{}` in a policy file",
                toolgate_text::escape_for_display(key.get_ref())
            ));
            let problem = problem
                .with_help("rules are `[[policy]]` tables")
                .with_suggestion(key.get_ref(), ["policy"].iter());
            problems.push(Diagnostic { span: Some(file.span_at(key.span())), ..problem });
            continue;
        }
        let DeValue::Array(tables) = value.get_ref() else {
            let problem = Diagnostic::new(format!(
                "`policy` must be a list of tables, not {}",
                toml_type_name(value.get_ref())
            ));
            problems.push(Diagnostic {
                span: Some(file.span_at(key.span())),
                ..problem.with_help("write `[[policy]]`")
            });
            continue;
        };
        for item in tables {
            let DeValue::Table(table) = item.get_ref() else {
                let problem = Diagnostic::new(format!(
                    "a rule must be a table, not {}",
                    toml_type_name(item.get_ref())
                ));
                problems.push(Diagnostic { span: Some(file.span_at(item.span())), ..problem });
                continue;
            };
            let shared = TableReadState::default();
            let read =
                read_rule(&TomlTable::new(file, table, item.span(), &shared).with_header("policy"));
            let (wrong, parts) = shared.into_parts();
            if let (Some((draft, mode, scope)), true) = (read, wrong.is_empty()) {
                let source = RuleSource {
                    file: Arc::clone(&file.name),
                    text: Arc::clone(&file.text),
                    part_spans: parts,
                };
                drafts.push((draft, mode, scope, source));
            }
            let named = table.get("name").and_then(|name| name.get_ref().as_str());
            problems.extend(wrong.into_iter().map(|problem| match named {
                Some(name) => problem.with_rule(name),
                None => problem,
            }));
        }
    }
}

fn read_rule(table: &TomlTable<'_>) -> Option<(RuleDraft, EnforcementMode, PolicyScope)> {
    let name = table.text("name");
    if !table.has_key("name") || name.is_some_and(|name| name.trim().is_empty()) {
        table.report(
            "name",
            Diagnostic::new("a rule needs a `name`")
                .with_help("the name is shown in refusals, in the ledger and by `explain`"),
        );
    }
    if !table.has_key("rule") {
        let kinds = RULE_KINDS.map(|(kind, _)| format!("`{kind}`")).join(", ");
        table.report(
            "rule",
            Diagnostic::new("a rule needs a `rule` kind").with_help(format!("one of {kinds}")),
        );
        return None;
    }
    let kind = table.keyword("rule", &RULE_KINDS)?;
    let name = name.unwrap_or("unnamed");
    let draft = match kind {
        RuleKind::Require => read_require(table, name),
        RuleKind::Deny | RuleKind::Ask => read_deny(table, name, kind == RuleKind::Ask),
        RuleKind::Limit => read_limit(table, name),
        RuleKind::Sequence => read_sequence(table, name),
        RuleKind::ReadBeforeWrite => read_write_guard(table, name),
        RuleKind::Flow | RuleKind::OnlyFrom => read_flow(table, name, kind == RuleKind::OnlyFrom),
    };
    let mode = table
        .keyword(
            "mode",
            &[("enforce", EnforcementMode::Enforce), ("observe", EnforcementMode::Observe)],
        )
        .unwrap_or_default();
    let scope = read_scope(table);
    let draft = draft?;
    let word = RULE_KINDS.iter().find(|(_, known)| *known == kind).map_or("", |(word, _)| *word);
    table.reject_unknown_keys(&format!("a `{word}` rule"));
    Some((draft, mode, scope))
}

/// Reads where the rule is attached, from the narrowest scope to the widest: tool, section, prompt,
/// agent.
fn read_scope(table: &TomlTable<'_>) -> PolicyScope {
    if let Some(section) = table.text("section") {
        if table.has_key("level") {
            table.report(
                "level",
                Diagnostic::new("a rule has a `section` or a `level`, not both")
                    .with_help("remove one of them"),
            );
        }
        return PolicyScope::Section(section.to_owned());
    }
    match table.keyword("level", &[("agent", 0), ("prompt", 1), ("tool", 2)]) {
        Some(2) => {
            let named = ["tools", "after", "guard"].into_iter().find(|key| table.has_key(key));
            let tools = match named {
                Some("tools") => table
                    .names("tools")
                    .unwrap_or_default()
                    .into_iter()
                    .map(str::to_owned)
                    .collect(),
                Some(key) => table.table(key).map(|inner| inner.keys()).unwrap_or_default(),
                None => vec!["write_file".to_owned()],
            };
            PolicyScope::Tools(tools)
        }
        Some(1) => PolicyScope::Prompt,
        _ => PolicyScope::Agent,
    }
}

/// Reads the tools that a rule governs.
pub(super) fn read_tools<'t>(table: &TomlTable<'t>) -> Vec<&'t str> {
    if !table.has_key("tools") {
        table.report(
            "tools",
            Diagnostic::new("a rule needs the `tools` that it governs")
                .with_help("like `tools = [\"issue_refund\"]`"),
        );
    }
    table.names("tools").unwrap_or_default()
}
