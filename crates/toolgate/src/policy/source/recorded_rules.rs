//! Reads the rules of an agent from the files that are stored with the ledger.

use toml::de::DeTable;

use super::RuleSet;
use crate::policy::source::rule_table;
use crate::policy::source::table_reader::{TableReadState, TomlSource, TomlTable};

/// Reads the rules of an agent from its policy files and configurations.
pub(crate) fn parse_recorded_rules<'a>(agent: &str, files: &[(&'a str, &'a str)]) -> RuleSet {
    let is_configuration = |text: &str| {
        let (document, _) = DeTable::parse_recoverable(text);
        document.get_ref().keys().any(|key| key.get_ref() != "policy")
    };
    let (configurations, policies): (Vec<_>, Vec<_>) =
        files.iter().copied().partition(|(_, text)| is_configuration(text));
    let Some(((name, text), included)) = configurations.split_first() else {
        return RuleSet::parse_all(policies);
    };
    let rules = |name: &str, text: &str, policies: Vec<(&'a str, &'a str)>| {
        let file = TomlSource { name: name.into(), text: text.into() };
        let (document, _) = DeTable::parse_recoverable(text);
        let shared = TableReadState::default();
        let table = TomlTable::new(&file, document.get_ref(), 0..0, &shared);
        let agent_table = table.table("agents").and_then(|agents| agents.table(agent));
        rule_table::read_rules(
            &file,
            &agent_table.as_ref().unwrap_or(&table).tables("policy"),
            policies,
        )
    };
    included.iter().fold(rules(name, text, policies), |all, (name, text)| {
        all.append(rules(name, text, Vec::new()))
    })
}

/// Reads the rules of an agent as tables.
pub(crate) fn parse_recorded_tables(
    agent: &str,
    files: &[(&str, &str)],
) -> Vec<serde_json::Map<String, serde_json::Value>> {
    let mut tables = Vec::new();
    for (_, text) in files {
        let (document, _) = DeTable::parse_recoverable(text);
        let agent_table = document
            .get_ref()
            .get("agents")
            .and_then(|agents| agents.get_ref().as_table()?.get(agent)?.get_ref().as_table());
        let policies = agent_table
            .unwrap_or_else(|| document.get_ref())
            .get("policy")
            .and_then(|policies| policies.get_ref().as_array());
        tables.extend(policies.into_iter().flatten().filter_map(|policy| {
            match crate::policy::source::table_reader::to_json(policy.get_ref())? {
                serde_json::Value::Object(table) => Some(table),
                _ => None,
            }
        }));
    }
    tables
}
