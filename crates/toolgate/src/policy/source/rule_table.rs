//! Reads `[[policy]]` tables as rules.

use std::sync::Arc;

use toml::de::{DeTable, DeValue};

use super::{Rules, Scope, Source, Written};
use crate::policy::source::table_reader::{File, Shared, Table, toml_type_name};
use crate::policy::{Condition, Deny, Flow, Limit, Mode, Per, Policy, Problem, Proved, ReadBeforeWrite, Require, Sequence, observe};
use toolgate_json::Pointer;

/// The kinds of rules that a file can contain.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Require,
    Deny,
    Ask,
    Limit,
    Sequence,
    ReadBeforeWrite,
    Flow,
    OnlyFrom,
}

const KINDS: [(&str, Kind); 8] = [
    ("require", Kind::Require),
    ("deny", Kind::Deny),
    ("ask", Kind::Ask),
    ("limit", Kind::Limit),
    ("sequence", Kind::Sequence),
    ("read_before_write", Kind::ReadBeforeWrite),
    ("flow", Kind::Flow),
    ("only_from", Kind::OnlyFrom),
];

/// A rule that is not yet wrapped in its mode.
enum Draft {
    Require(Require),
    Deny(Deny),
    Limit(Limit),
    Sequence(Sequence),
    ReadBeforeWrite(ReadBeforeWrite),
    Flow(Flow),
}

pub(crate) fn read_policy_files<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Rules {
    assemble_rules(Vec::new(), files)
}

/// Reads the rules of a larger file and of the policy files that it includes.
///
/// Problems of the larger file are reported where that file is read.
pub fn read_rules<'a>(file: &File, tables: &[Table<'_>], files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Rules {
    let mut drafts = Vec::new();
    for table in tables {
        let before = table.problem_count();
        let read = read_rule(table);
        if table.problem_count() > before {
            table.assign_rule(before, table.text("name").unwrap_or("unnamed"));
        } else if let Some((draft, mode, scope)) = read {
            let source = Source { file: Arc::clone(&file.name), text: Arc::clone(&file.text), part_spans: table.part_spans() };
            drafts.push((draft, mode, scope, source));
        }
    }
    assemble_rules(drafts, files)
}

fn assemble_rules<'a>(mut drafts: Vec<(Draft, Mode, Scope, Source)>, files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Rules {
    let mut problems = Vec::new();
    for (name, text) in files {
        let file = File { name: name.into(), text: text.into() };
        read_policy_file(&file, &mut drafts, &mut problems);
    }
    // An expression in any rule may read a limit of any file.
    let limits: Vec<Limit> =
        drafts.iter().filter_map(|(draft, ..)| if let Draft::Limit(limit) = draft { Some(limit.clone()) } else { None }).collect();
    let policies = drafts.into_iter().map(|(draft, mode, scope, source)| {
        let draft = match draft {
            Draft::Deny(rule) => Draft::Deny(limits.iter().fold(rule, Deny::reading)),
            Draft::Require(rule) => Draft::Require(limits.iter().fold(rule, Require::reading)),
            other => other,
        };
        Written { scope, policy: draft.into_policy(mode), source: Some(Arc::new(source)) }
    });
    Rules { policies: policies.collect(), problems }
}

impl Draft {
    fn into_policy(self, mode: Mode) -> Arc<dyn Policy> {
        fn at<P: Policy + 'static>(policy: P, mode: Mode) -> Arc<dyn Policy> {
            match mode {
                Mode::Enforce => Arc::new(policy),
                Mode::Observe => Arc::new(observe(policy)),
            }
        }
        match self {
            Self::Require(rule) => at(rule, mode),
            Self::Deny(rule) => at(rule, mode),
            Self::Limit(rule) => at(rule, mode),
            Self::Sequence(rule) => at(rule, mode),
            Self::ReadBeforeWrite(rule) => at(rule, mode),
            Self::Flow(rule) => at(rule, mode),
        }
    }
}

fn read_policy_file(file: &File, drafts: &mut Vec<(Draft, Mode, Scope, Source)>, problems: &mut Vec<Problem>) {
    let (document, errors) = DeTable::parse_recoverable(&file.text);
    problems.extend(errors.iter().map(|error| file.syntax_problem(error)));
    // The parser recovers from syntax errors, but the recovered rules may differ from the intended
    // ones.
    if !errors.is_empty() {
        return;
    }
    for (key, value) in document.get_ref() {
        if key.get_ref() != "policy" {
            let problem = Problem::new(format!("unknown key `{}` in a policy file", toolgate_text::shown(key.get_ref())));
            let problem = problem.help("rules are `[[policy]]` tables").did_you_mean(key.get_ref(), ["policy"].iter());
            problems.push(Problem { place: Some(file.span_at(key.span())), ..problem });
            continue;
        }
        let DeValue::Array(tables) = value.get_ref() else {
            let problem = Problem::new(format!("`policy` must be a list of tables, not {}", toml_type_name(value.get_ref())));
            problems.push(Problem { place: Some(file.span_at(key.span())), ..problem.help("write `[[policy]]`") });
            continue;
        };
        for item in tables {
            let DeValue::Table(table) = item.get_ref() else {
                let problem = Problem::new(format!("a rule must be a table, not {}", toml_type_name(item.get_ref())));
                problems.push(Problem { place: Some(file.span_at(item.span())), ..problem });
                continue;
            };
            let shared = Shared::default();
            let read = read_rule(&Table::new(file, table, item.span(), &shared).with_header("policy"));
            let (wrong, parts) = shared.into_parts();
            if let (Some((draft, mode, scope)), true) = (read, wrong.is_empty()) {
                let source = Source { file: Arc::clone(&file.name), text: Arc::clone(&file.text), part_spans: parts };
                drafts.push((draft, mode, scope, source));
            }
            let named = table.get("name").and_then(|name| name.get_ref().as_str());
            problems.extend(wrong.into_iter().map(|problem| match named {
                Some(name) => problem.of(name),
                None => problem,
            }));
        }
    }
}

fn read_rule(table: &Table<'_>) -> Option<(Draft, Mode, Scope)> {
    let name = table.text("name");
    if !table.has_key("name") || name.is_some_and(|name| name.trim().is_empty()) {
        table.report("name", Problem::new("a rule needs a `name`").help("the name is shown in refusals, in the ledger and by `explain`"));
    }
    if !table.has_key("rule") {
        let kinds = KINDS.map(|(kind, _)| format!("`{kind}`")).join(", ");
        table.report("rule", Problem::new("a rule needs a `rule` kind").help(format!("one of {kinds}")));
        return None;
    }
    let kind = table.keyword("rule", &KINDS)?;
    let name = name.unwrap_or("unnamed");
    let draft = match kind {
        Kind::Require => read_require(table, name),
        Kind::Deny | Kind::Ask => read_deny(table, name, kind == Kind::Ask),
        Kind::Limit => read_limit(table, name),
        Kind::Sequence => read_sequence(table, name),
        Kind::ReadBeforeWrite => read_write_guard(table, name),
        Kind::Flow | Kind::OnlyFrom => read_flow(table, name, kind == Kind::OnlyFrom),
    };
    let mode = table.keyword("mode", &[("enforce", Mode::Enforce), ("observe", Mode::Observe)]).unwrap_or_default();
    let scope = read_scope(table);
    let draft = draft?;
    let word = KINDS.iter().find(|(_, known)| *known == kind).map_or("", |(word, _)| *word);
    table.reject_unknown_keys(&format!("a `{word}` rule"));
    Some((draft, mode, scope))
}

/// Reads where the rule is attached, from the narrowest scope to the widest: tool, section, prompt,
/// agent.
fn read_scope(table: &Table<'_>) -> Scope {
    if let Some(section) = table.text("section") {
        if table.has_key("level") {
            table.report("level", Problem::new("a rule has a `section` or a `level`, not both").help("remove one of them"));
        }
        return Scope::Section(section.to_owned());
    }
    match table.keyword("level", &[("agent", 0), ("prompt", 1), ("tool", 2)]) {
        Some(2) => {
            let named = ["tools", "after", "guard"].into_iter().find(|key| table.has_key(key));
            let tools = match named {
                Some("tools") => table.names("tools").unwrap_or_default().into_iter().map(str::to_owned).collect(),
                Some(key) => table.table(key).map(|inner| inner.keys()).unwrap_or_default(),
                None => vec!["write_file".to_owned()],
            };
            Scope::Tools(tools)
        }
        Some(1) => Scope::Prompt,
        _ => Scope::Agent,
    }
}

/// Reads the tools that a rule governs.
fn read_tools<'t>(table: &Table<'t>) -> Vec<&'t str> {
    if !table.has_key("tools") {
        table.report("tools", Problem::new("a rule needs the `tools` that it governs").help("like `tools = [\"issue_refund\"]`"));
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

fn read_require(table: &Table<'_>, name: &str) -> Option<Draft> {
    if !table.has_key("any_of") {
        table.report(
            "any_of",
            Problem::new("a `require` rule needs `any_of`: the tools of which one must have succeeded")
                .help("like `any_of = [\"verify_customer\"]`"),
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
                Problem::new("`same` must name exactly one entity").help("like `same = { customer_id = \"/customer_id\" }`"),
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
                            Problem::new("the `argument` to compare with is missing").help("like `{ argument = \"/customer_id\" }`"),
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
    Some(Draft::Require(refusal!(table, rule)))
}

fn read_deny(table: &Table<'_>, name: &str, asks: bool) -> Option<Draft> {
    let tools = read_tools(table);
    let mut rule = if asks { Deny::ask(name, tools) } else { Deny::new(name, tools) };
    for (argument, condition) in read_conditions(table) {
        rule = rule.when(argument, condition);
    }
    if let Some(when) = table.text("when") {
        rule = rule.when_cel(when);
    }
    if !asks {
        return Some(Draft::Deny(refusal!(table, rule)));
    }
    // The model always reads `approval_required`, so code, category and redirect cannot be set.
    if let Some(people) = table.names("approvers") {
        // An empty list is more likely a mistake than permission for everyone.
        if people.is_empty() {
            let problem = Problem::new("`approvers` is empty, which would allow everyone to answer");
            table.report("approvers", problem.help("name the approvers, or remove the key to allow everyone"));
        }
        rule = rule.approvers(people);
    }
    if let Some(reason) = table.text("reason") {
        rule = rule.reason(reason);
    }
    Some(Draft::Deny(rule))
}

/// Reads the conditions on arguments.
fn read_conditions(table: &Table<'_>) -> Vec<(Pointer, Condition)> {
    let mut conditions = Vec::new();
    for inner in table.tables("where") {
        inner.mark_read("argument");
        // With `touches` alone, all arguments are searched for files.
        let argument = if inner.has_key("argument") { inner.pointer("argument") } else { inner.has_key("touches").then(Pointer::default) };
        if !inner.has_key("argument") && argument.is_none() {
            inner
                .report("argument", Problem::new("a condition needs an `argument`").help("like `{ argument = \"/amount\", above = 500 }`"));
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
fn read_search_root(table: &Table<'_>) -> Option<String> {
    let from = table.text("from")?;
    if !from.starts_with('/') {
        table.report("from", Problem::new("`from` must be the absolute path of a directory").help("like `from = \"/home/ann/desk\"`"));
    }
    Some(from.to_owned())
}

fn read_condition(table: &Table<'_>) -> Option<Condition> {
    let pattern = |text: &str| match Condition::matches(text) {
        Ok(condition) => Some(condition),
        Err(error) => {
            let why = error.to_string();
            let why = why.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
            table.report(
                "matches",
                Problem::new(format!("not a valid regular expression: {why}"))
                    .help("use the syntax of the `regex` crate, with `\\\\` before literal special characters"),
            );
            None
        }
    };
    let asked: Vec<&str> =
        ["above", "below", "in", "not_in", "glob", "matches", "runs", "touches"].into_iter().filter(|word| table.has_key(word)).collect();
    let found = [
        table.number("above").map(Condition::Above),
        table.number("below").map(Condition::Below),
        table.values("in").map(Condition::one_of),
        table.values("not_in").map(Condition::none_of),
        table.text("glob").map(|pattern| Condition::Glob(pattern.to_owned())),
        table.text("matches").and_then(pattern),
        table.names("runs").map(|patterns| Condition::Runs(patterns.into_iter().map(str::to_owned).collect())),
        table.names("touches").map(|places| Condition::Touches {
            places: places.into_iter().map(str::to_owned).collect(),
            lenient: table.bool("lenient").unwrap_or(false),
            trees: table.bool("recursive").unwrap_or(true),
            whole: table.bool("qualified").unwrap_or(false),
            from: read_search_root(table),
        }),
    ];
    if asked.len() != 1 {
        let problem = Problem::new(format!("a condition needs exactly one test, not {}", asked.len()));
        table.report(
            asked.get(1).copied().unwrap_or_default(),
            problem.help("one of `above`, `below`, `in`, `not_in`, `glob`, `matches`, `runs`, `touches`"),
        );
        return None;
    }
    found.into_iter().flatten().next()
}

fn read_limit(table: &Table<'_>, name: &str) -> Option<Draft> {
    let tools = read_tools(table);
    let (calls, sum, most) = (table.count("calls"), table.pointer("sum"), table.number("max"));
    let mut rule = match (table.has_key("calls"), table.has_key("sum")) {
        (true, false) => {
            if table.has_key("max") {
                table.report("max", Problem::new("`max` belongs to `sum`, but this limit counts calls").help("remove one of them"));
            }
            Limit::calls(name, tools, calls?)
        }
        (false, true) => {
            if !table.has_key("max") {
                table.report("sum", Problem::new("a limit with `sum` needs `max`").help("like `max = 500`"));
            }
            Limit::sum(name, tools, sum?, most?)
        }
        (true, true) => {
            table.report("calls", Problem::new("a limit has `calls` or `sum`, not both").help("write two rules"));
            return None;
        }
        (false, false) => {
            table.report(
                "calls",
                Problem::new("a limit needs `calls` or `sum`").help("like `calls = 3`, or `sum = \"/amount\"` with `max = 500`"),
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
    Some(Draft::Limit(refusal!(table, rule)))
}

fn read_per(table: &Table<'_>) -> Option<Per> {
    if !table.is_table("per") {
        return match table.text("per")? {
            path if path.starts_with('/') => Some(Per::Entity(path.into())),
            _ => table
                .keyword("per", &[("session", false), ("principal", true)])
                .map(|principal| if principal { Per::Principal } else { Per::Session }),
        };
    }
    let inner = table.table("per")?;
    let same = inner.table("same");
    let (tool, field, otherwise) = (inner.text("proved_by"), inner.pointer("field"), inner.pointer("argument"));
    inner.reject_unknown_keys("`per`");
    let keys = same.as_ref().map(Table::keys).unwrap_or_default();
    let (Some(tool), Some(field), Some(same), [entity]) = (tool, field, same, keys.as_slice()) else {
        let help = "like `per = { proved_by = \"lookup_order\", same = { order_id = \"/order_id\" }, field = \"/customer_id\" }`";
        table.report("per", Problem::new("an entity from evidence needs `proved_by`, `same` with one entity, and `field`").help(help));
        return None;
    };
    let same = (Arc::from(entity.as_str()), same.pointer(entity)?);
    Some(Per::ProvedEntity(Box::new(Proved { tool: tool.into(), entity: same, field, fallback: otherwise })))
}

fn read_sequence(table: &Table<'_>, name: &str) -> Option<Draft> {
    if !table.has_key("after") {
        table.report(
            "after",
            Problem::new("a sequence needs `after`: each tool with the tools that come before it")
                .help("like `after = { deploy = [\"test\", \"build\"] }`"),
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
    Some(Draft::Sequence(rule))
}

fn read_write_guard(table: &Table<'_>, name: &str) -> Option<Draft> {
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
    Some(Draft::ReadBeforeWrite(rule))
}

fn read_flow(table: &Table<'_>, name: &str, strict: bool) -> Option<Draft> {
    let tools = read_tools(table);
    if !table.has_key("arguments") {
        table.report("arguments", Problem::new("the `arguments` to guard are missing").help("like `arguments = [\"/to\"]`"));
    }
    let arguments = table.names("arguments").unwrap_or_default();
    let mut rule = if strict { Flow::only_from(name, tools, arguments) } else { Flow::new(name, tools, arguments) };
    rule = rule.trust_tools(table.names("trusted").unwrap_or_default());
    if table.bool("user") == Some(true) {
        rule = rule.trust_user();
    }
    if table.bool("reported") == Some(true) {
        rule = rule.accept_reported();
    }
    rule = rule.trust_values(table.values("values").unwrap_or_default());
    Some(Draft::Flow(refusal!(table, rule)))
}
