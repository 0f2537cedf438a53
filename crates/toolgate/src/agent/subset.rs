//! Reduces an agent to one tool, the rules that affect it and the tools that these rules name.
//!
//! The size of an excerpt does not depend on the number of other tools.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::definition::AgentDefinition;
use super::{Agent, AgentBuildError, ToolEntry};
use crate::policy::Policy;
use toolgate_json::Digest;

/// The part of an agent that calls of one tool need.
///
/// Calls are decided and recorded as by the whole agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AgentSubset {
    definition: AgentDefinition,
    config: Digest,
    watched: Option<BTreeSet<String>>,
}

impl AgentSubset {
    /// Builds the agent.
    ///
    /// # Errors
    /// The excerpt does not fit this version.
    pub fn build(self) -> Result<Agent, AgentBuildError> {
        let agent = self.definition.build_prechecked()?;
        // Rows must refer to the digest of the whole agent.
        Ok(Agent { definition_digest: self.config, tracked_sources: self.watched, ..agent })
    }
}

impl Agent {
    /// Returns an excerpt for each tool without hooks, if no rule was written in Rust.
    #[must_use]
    pub fn tool_subsets(&self) -> Vec<(Arc<str>, AgentSubset)> {
        let Ok(full) = AgentDefinition::parse(&self.definition) else { return Vec::new() };
        if !full.has_only_file_rules() {
            return Vec::new();
        }
        let files = full.files();
        let tables: Vec<(String, Map<String, Value>)> =
            crate::policy::source::parse_recorded_tables(&self.name, &files)
                .into_iter()
                .filter_map(|table| Some((table.get("name")?.as_str()?.to_owned(), table)))
                .collect();
        let by_name: HashMap<&str, &Map<String, Value>> =
            tables.iter().map(|(name, table)| (name.as_str(), table)).collect();
        let subset_of = |name: &Arc<str>| {
            let tool = self.tools.get(name).filter(|tool| tool.hooks.is_empty())?;
            let (tools, rules) = self.collect_dependencies(tool, &by_name)?;
            let text: String = tables
                .iter()
                .filter(|(name, _)| rules.contains(name.as_str()))
                .map(|(_, table)| rule_to_toml(table, &tools))
                .collect();
            let definition = full.clone().retain_tools(&tools, text);
            Some((
                Arc::clone(name),
                AgentSubset {
                    definition,
                    config: self.definition_digest,
                    watched: self.tracked_sources.clone(),
                },
            ))
        };
        self.tool_order.iter().filter_map(subset_of).collect()
    }

    /// Collects the tools and rules that can affect a call of a tool.
    fn collect_dependencies<'a>(
        &'a self,
        tool: &'a ToolEntry,
        tables: &HashMap<&str, &'a Map<String, Value>>,
    ) -> Option<(HashSet<&'a str>, HashSet<&'a str>)> {
        let (mut tools, mut rules) = (HashSet::from([tool.spec.name()]), HashSet::new());
        let mut pending_tools = vec![tool];
        while let Some(tool) = pending_tools.pop() {
            let mut names: Vec<&str> = tool.spec.revokes.iter().map(|(tool, _)| &**tool).collect();
            let policies =
                tool.governed_by.iter().map(|attached| &attached.policy).chain(&tool.observers);
            let mut pending_rules: Vec<&str> =
                policies.map(|policy: &Arc<dyn Policy>| policy.name()).collect();
            while let Some(rule) = pending_rules.pop() {
                if !rules.insert(rule) {
                    continue;
                }
                let table = tables.get(rule)?;
                let mut texts = Vec::new();
                // Other tools that the rule governs do not affect this call.
                table.iter().filter(|(key, _)| *key != "tools").for_each(|(key, value)| {
                    texts.push(key.as_str());
                    collect_texts(value, &mut texts);
                });
                // Provenance depends on which tools are untrusted.
                if table
                    .get("rule")
                    .and_then(Value::as_str)
                    .is_some_and(|rule| rule == "flow" || rule == "only_from")
                {
                    texts.extend(
                        self.tools
                            .values()
                            .filter(|tool| tool.spec.untrusted)
                            .map(|tool| tool.spec.name()),
                    );
                }
                // A limit that an expression reads is named in the expression.
                let when = table
                    .get("when")
                    .and_then(Value::as_str)
                    .filter(|when| when.contains("sum_of"));
                if let Some(when) = when {
                    pending_rules.extend(
                        self.rules
                            .iter()
                            .map(|rule| rule.name())
                            .filter(|limit| when.contains(limit)),
                    );
                }
                names.extend(texts);
            }
            for name in names {
                if let Some((name, tool)) = self.tools.get_key_value(name)
                    && tools.insert(name)
                {
                    pending_tools.push(tool);
                }
            }
        }
        Some((tools, rules))
    }
}

fn collect_texts<'v>(value: &'v Value, texts: &mut Vec<&'v str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(items) => items.iter().for_each(|item| collect_texts(item, texts)),
        Value::Object(fields) => fields.iter().for_each(|(name, field)| {
            texts.push(name);
            collect_texts(field, texts);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Writes a rule as TOML, for these tools only.
fn rule_to_toml(table: &Map<String, Value>, tools: &HashSet<&str>) -> String {
    let mut text = "[[policy]]\n".to_owned();
    for (key, value) in table {
        let value = match value {
            Value::Array(names) if key == "tools" => Value::Array(
                names
                    .iter()
                    .filter(|name| name.as_str().is_some_and(|name| tools.contains(name)))
                    .cloned()
                    .collect(),
            ),
            value => value.clone(),
        };
        text.push_str(&format!(
            "{} = {}\n",
            value_to_toml(&Value::from(key.as_str())),
            value_to_toml(&value)
        ));
    }
    text
}

/// Writes a value as TOML on one line.
fn value_to_toml(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            format!("[{}]", items.iter().map(value_to_toml).collect::<Vec<_>>().join(", "))
        }
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, field)| {
                format!("{} = {}", value_to_toml(&Value::from(name.as_str())), value_to_toml(field))
            });
            format!("{{ {} }}", fields.collect::<Vec<_>>().join(", "))
        }
        // TOML accepts the escapes of JSON, but also requires one for U+007F.
        Value::String(_) => value.to_string().replace('\u{7f}', "\\u007f"),
        other => other.to_string(),
    }
}
