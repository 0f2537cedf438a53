//! Reads `[[policy]]` tables as rules.

use std::sync::Arc;

use toml::de::{DeTable, DeValue};

use super::{PolicyScope, RuleSet, RuleSource, SourcedRule};
use crate::policy::source::table_reader::{TableReadState, TomlSource, TomlTable, toml_type_name};
use crate::policy::{
    Condition, Deny, Diagnostic, EnforcementMode, EvidenceEntity, Flow, Limit, LimitOwner, Policy,
    ReadBeforeWrite, Require, Sequence, observe,
};
use toolgate_json::Pointer;

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
enum RuleDraft {
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
fn read_tools<'t>(table: &TomlTable<'t>) -> Vec<&'t str> {
    if !table.has_key("tools") {
        table.report(
            "tools",
            Diagnostic::new("a rule needs the `tools` that it governs")
                .with_help("like `tools = [\"issue_refund\"]`"),
        );
    }
    table.names("tools").unwrap_or_default()
}

/// Reads the fields that describe a refusal; most kinds of rules have them.
macro_rules! refusal {
    ($table:expr, $rule:expr) => {{
        let (table, mut rule) = ($table, $rule);
        if let Some(reason) = table.text("reason") {
            rule = rule.reason(reason);
        }
        if let Some(category) = table.category() {
            rule = rule.category(category);
        }
        if let Some(code) = table.text("code") {
            rule = rule.code(code);
        }
        if let Some(to) = table.text("redirect") {
            rule = rule.redirect(to);
        }
        rule
    }};
}

fn read_require(table: &TomlTable<'_>, name: &str) -> Option<RuleDraft> {
    if !table.has_key("any_of") {
        table.report(
            "any_of",
            Diagnostic::new(
                "a `require` rule needs `any_of`: the tools of which one must have succeeded",
            )
            .with_help("like `any_of = [\"verify_customer\"]`"),
        );
    }
    let mut rule = Require::new(name, read_tools(table), table.names("any_of").unwrap_or_default());
    for (argument, condition) in read_conditions(table) {
        rule = rule.only_when(argument, condition);
    }
    if let Some(same) = table.table("same") {
        let keys = same.keys();
        let [entity] = keys.as_slice() else {
            table.report(
                "same",
                Diagnostic::new("`same` must name exactly one entity")
                    .with_help("like `same = { customer_id = \"/customer_id\" }`"),
            );
            return None;
        };
        rule = rule.same(entity, same.pointer(entity)?);
    }
    if let Some(fields) = table.table("fields") {
        for path in fields.keys() {
            rule = match fields.is_table(&path).then(|| fields.table(&path)).flatten() {
                Some(inner) => {
                    let argument = inner.pointer("argument");
                    inner.reject_unknown_keys("a field that is compared with an argument");
                    if !inner.has_key("argument") {
                        inner.report(
                            "argument",
                            Diagnostic::new("the `argument` to compare with is missing")
                                .with_help("like `{ argument = \"/customer_id\" }`"),
                        );
                    }
                    rule.field_is_argument(path.as_str(), argument?)
                }
                None => rule.field(path.as_str(), fields.value(&path)?),
            };
        }
    }
    if let Some(when) = table.text("when") {
        rule = rule.when_cel(when);
    }
    if let Some(age) = table.positive_duration("within") {
        rule = rule.within(age);
    }
    if table.bool("reported") == Some(true) {
        rule = rule.accept_reported();
    }
    Some(RuleDraft::Require(refusal!(table, rule)))
}

fn read_deny(table: &TomlTable<'_>, name: &str, asks_person: bool) -> Option<RuleDraft> {
    let tools = read_tools(table);
    let mut rule = if asks_person { Deny::ask(name, tools) } else { Deny::new(name, tools) };
    for (argument, condition) in read_conditions(table) {
        rule = rule.when(argument, condition);
    }
    if let Some(when) = table.text("when") {
        rule = rule.when_cel(when);
    }
    if !asks_person {
        return Some(RuleDraft::Deny(refusal!(table, rule)));
    }
    // The model always reads `approval_required`, so code, category and redirect cannot be set.
    if let Some(people) = table.names("approvers") {
        // An empty list is more likely a mistake than permission for everyone.
        if people.is_empty() {
            let problem =
                Diagnostic::new("`approvers` is empty, which would allow everyone to answer");
            table.report(
                "approvers",
                problem.with_help("name the approvers, or remove the key to allow everyone"),
            );
        }
        rule = rule.approvers(people);
    }
    if let Some(reason) = table.text("reason") {
        rule = rule.reason(reason);
    }
    Some(RuleDraft::Deny(rule))
}

/// Reads the conditions on arguments.
fn read_conditions(table: &TomlTable<'_>) -> Vec<(Pointer, Condition)> {
    let mut conditions = Vec::new();
    for inner in table.tables("where") {
        inner.mark_read("argument");
        // With `touches` alone, all arguments are searched for files.
        let argument = if inner.has_key("argument") {
            inner.pointer("argument")
        } else {
            inner.has_key("touches").then(Pointer::default)
        };
        if !inner.has_key("argument") && argument.is_none() {
            inner.report(
                "argument",
                Diagnostic::new("a condition needs an `argument`")
                    .with_help("like `{ argument = \"/amount\", above = 500 }`"),
            );
        }
        if let Some(condition) = read_condition(&inner)
            && let Some(argument) = argument
        {
            conditions.push((argument, condition));
        }
        inner.reject_unknown_keys("a condition");
    }
    conditions
}

/// Reads the directory where a search begins.
fn read_search_root(table: &TomlTable<'_>) -> Option<String> {
    let from = table.text("from")?;
    if !from.starts_with('/') {
        table.report(
            "from",
            Diagnostic::new("`from` must be the absolute path of a directory")
                .with_help("like `from = \"/home/ann/desk\"`"),
        );
    }
    Some(from.to_owned())
}

fn read_condition(table: &TomlTable<'_>) -> Option<Condition> {
    let pattern = |text: &str| match Condition::matches(text) {
        Ok(condition) => Some(condition),
        Err(error) => {
            let reason = error.to_string();
            let reason =
                reason.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
            table.report(
                "matches",
                Diagnostic::new(format!("not a valid regular expression: {reason}"))
                    .with_help("use the syntax of the `regex` crate, with `\\\\` before literal special characters"),
            );
            None
        }
    };
    let tests: Vec<&str> = ["above", "below", "in", "not_in", "glob", "matches", "runs", "touches"]
        .into_iter()
        .filter(|word| table.has_key(word))
        .collect();
    let found = [
        table.number("above").map(Condition::Above),
        table.number("below").map(Condition::Below),
        table.values("in").map(Condition::one_of),
        table.values("not_in").map(Condition::none_of),
        table.text("glob").map(|pattern| Condition::Glob(pattern.to_owned())),
        table.text("matches").and_then(pattern),
        table
            .names("runs")
            .map(|patterns| Condition::Runs(patterns.into_iter().map(str::to_owned).collect())),
        table.names("touches").map(|places| Condition::Touches {
            places: places.into_iter().map(str::to_owned).collect(),
            lenient: table.bool("lenient").unwrap_or(false),
            trees: table.bool("recursive").unwrap_or(true),
            whole: table.bool("qualified").unwrap_or(false),
            from: read_search_root(table),
        }),
    ];
    if tests.len() != 1 {
        let problem =
            Diagnostic::new(format!("a condition needs exactly one test, not {}", tests.len()));
        table.report(
            tests.get(1).copied().unwrap_or_default(),
            problem.with_help(
                "one of `above`, `below`, `in`, `not_in`, `glob`, `matches`, `runs`, `touches`",
            ),
        );
        return None;
    }
    found.into_iter().flatten().next()
}

fn read_limit(table: &TomlTable<'_>, name: &str) -> Option<RuleDraft> {
    let tools = read_tools(table);
    let (calls, sum, most) = (table.count("calls"), table.pointer("sum"), table.number("max"));
    let mut rule = match (table.has_key("calls"), table.has_key("sum")) {
        (true, false) => {
            if table.has_key("max") {
                table.report(
                    "max",
                    Diagnostic::new("`max` belongs to `sum`, but this limit counts calls")
                        .with_help("remove one of them"),
                );
            }
            Limit::calls(name, tools, calls?)
        }
        (false, true) => {
            if !table.has_key("max") {
                table.report(
                    "sum",
                    Diagnostic::new("a limit with `sum` needs `max`").with_help("like `max = 500`"),
                );
            }
            Limit::sum(name, tools, sum?, most?)
        }
        (true, true) => {
            table.report(
                "calls",
                Diagnostic::new("a limit has `calls` or `sum`, not both")
                    .with_help("write two rules"),
            );
            return None;
        }
        (false, false) => {
            table.report(
                "calls",
                Diagnostic::new("a limit needs `calls` or `sum`")
                    .with_help("like `calls = 3`, or `sum = \"/amount\"` with `max = 500`"),
            );
            return None;
        }
    };
    if let Some(currency) = table.pointer("currency") {
        rule = rule.currency(currency);
    }
    table.mark_read("per");
    if table.has_key("per") {
        rule = rule.per(read_per(table)?);
    }
    if let Some(window) = table.positive_duration("within") {
        rule = rule.within(window);
    }
    Some(RuleDraft::Limit(refusal!(table, rule)))
}

fn read_per(table: &TomlTable<'_>) -> Option<LimitOwner> {
    if !table.is_table("per") {
        return match table.text("per")? {
            path if path.starts_with('/') => Some(LimitOwner::Entity(path.into())),
            _ => {
                table.keyword("per", &[("session", false), ("principal", true)]).map(|principal| {
                    if principal { LimitOwner::Principal } else { LimitOwner::Session }
                })
            }
        };
    }
    let inner = table.table("per")?;
    let same = inner.table("same");
    let (tool, field, otherwise) =
        (inner.text("proved_by"), inner.pointer("field"), inner.pointer("argument"));
    inner.reject_unknown_keys("`per`");
    let keys = same.as_ref().map(TomlTable::keys).unwrap_or_default();
    let (Some(tool), Some(field), Some(same), [entity]) = (tool, field, same, keys.as_slice())
    else {
        let help = "like `per = { proved_by = \"lookup_order\", same = { order_id = \"/order_id\" }, field = \"/customer_id\" }`";
        table.report(
            "per",
            Diagnostic::new(
                "an entity from evidence needs `proved_by`, `same` with one entity, and `field`",
            )
            .with_help(help),
        );
        return None;
    };
    let same = (Arc::from(entity.as_str()), same.pointer(entity)?);
    Some(LimitOwner::EvidenceEntity(Box::new(EvidenceEntity {
        tool: tool.into(),
        entity: same,
        field,
        fallback: otherwise,
    })))
}

fn read_sequence(table: &TomlTable<'_>, name: &str) -> Option<RuleDraft> {
    if !table.has_key("after") {
        table.report(
            "after",
            Diagnostic::new(
                "a sequence needs `after`: each tool with the tools that come before it",
            )
            .with_help("like `after = { deploy = [\"test\", \"build\"] }`"),
        );
    }
    let after = table.table("after")?;
    let mut rule = Sequence::new(name);
    for tool in after.keys() {
        rule = rule.after(&tool, after.names(&tool)?);
    }
    if table.bool("reported") == Some(true) {
        rule = rule.accept_reported();
    }
    Some(RuleDraft::Sequence(rule))
}

fn read_write_guard(table: &TomlTable<'_>, name: &str) -> Option<RuleDraft> {
    let mut rule = ReadBeforeWrite::new(name);
    match table.table("guard") {
        Some(guard) => {
            for tool in guard.keys() {
                rule = rule.guard(&tool, guard.pointer(&tool)?);
            }
        }
        None => rule = rule.guard("write_file", "/path"),
    }
    if let Some(tool) = table.text("read_tool") {
        rule = rule.read_with(tool);
    }
    Some(RuleDraft::ReadBeforeWrite(rule))
}

fn read_flow(table: &TomlTable<'_>, name: &str, strict: bool) -> Option<RuleDraft> {
    let tools = read_tools(table);
    if !table.has_key("arguments") {
        table.report(
            "arguments",
            Diagnostic::new("the `arguments` to guard are missing")
                .with_help("like `arguments = [\"/to\"]`"),
        );
    }
    let arguments = table.names("arguments").unwrap_or_default();
    let mut rule = if strict {
        Flow::only_from(name, tools, arguments)
    } else {
        Flow::new(name, tools, arguments)
    };
    rule = rule.trust_tools(table.names("trusted").unwrap_or_default());
    if table.bool("user") == Some(true) {
        rule = rule.trust_user();
    }
    if table.bool("reported") == Some(true) {
        rule = rule.accept_reported();
    }
    rule = rule.trust_values(table.values("values").unwrap_or_default());
    Some(RuleDraft::Flow(refusal!(table, rule)))
}
