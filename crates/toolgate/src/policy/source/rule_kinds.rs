//! Reads the keys of each kind of rule.

use std::sync::Arc;

use toolgate_json::Pointer;

use crate::policy::source::rule_table::{RuleDraft, read_tools};
use crate::policy::source::table_reader::TomlTable;
use crate::policy::{
    Condition, Deny, Diagnostic, EvidenceEntity, Flow, Limit, LimitOwner, ReadBeforeWrite, Require,
    Sequence,
};

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

pub(super) fn read_require(table: &TomlTable<'_>, name: &str) -> Option<RuleDraft> {
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

pub(super) fn read_deny(table: &TomlTable<'_>, name: &str, asks_person: bool) -> Option<RuleDraft> {
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

pub(super) fn read_limit(table: &TomlTable<'_>, name: &str) -> Option<RuleDraft> {
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

pub(super) fn read_sequence(table: &TomlTable<'_>, name: &str) -> Option<RuleDraft> {
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

pub(super) fn read_write_guard(table: &TomlTable<'_>, name: &str) -> Option<RuleDraft> {
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

pub(super) fn read_flow(table: &TomlTable<'_>, name: &str, strict: bool) -> Option<RuleDraft> {
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
