//! Combines configurations: a project file, policy files and the user's own file.

use toolgate::limits::Limits;
use toolgate::policy::source::RuleSet;
use toolgate::tool::{Tool, ToolSpec};

use crate::config::Config;

impl Config {
    /// Prepares the configuration for a client that runs all tools itself.
    #[must_use]
    pub fn for_client(mut self) -> Self {
        for declared in &mut self.agents {
            declared.tools = std::mem::take(&mut declared.tools)
                .into_iter()
                .map(|entry| entry.map_tool(Tool::into_client_run))
                .collect();
            declared.is_for_client = true;
            // The client limits large results itself.
            declared.max_output = declared.max_output.or(Some(usize::MAX));
        }
        self
    }

    /// Adds a policy file to every agent.
    #[must_use]
    pub fn with_policies(mut self, name: &str, text: impl Fn(&[&ToolSpec]) -> String) -> Self {
        for declared in &mut self.agents {
            let specs: Vec<&ToolSpec> =
                declared.tools.iter().map(|entry| entry.tool.spec()).collect();
            let rules = RuleSet::parse(name, &text(&specs));
            declared.rules = std::mem::take(&mut declared.rules).append(rules);
        }
        self
    }

    /// Merges this configuration under the user's own configuration.
    ///
    /// All rules of the user's configuration apply as well. If both configure a tool, limits or the
    /// store, the user's configuration takes precedence.
    #[must_use]
    pub fn merge_under_user_config(mut self, user: Self) -> Self {
        // The file that names the ledger also sets its retention.
        if user.store.is_some() {
            self.retention = user.retention;
            self.is_retention_known = user.is_retention_known;
        }
        self.is_retention_known &= user.is_retention_known;
        self.store = user.store.or(self.store);
        self.redact.extend(user.redact);
        self.client.on_failure = user.client.on_failure;
        self.client.undeclared = user.client.undeclared;
        self.problems.extend(user.problems);
        self.included_files.extend(user.included_files);
        self.dependencies.extend(user.dependencies);
        self.upstreams
            .retain(|upstream| user.upstreams.iter().all(|other| other.name != upstream.name));
        self.upstreams.extend(user.upstreams);
        for agent in user.agents {
            // A single agent matches any agent of the other file; several agents match by name.
            let single = self.agents.len() == 1;
            let Some(declared) =
                self.agents.iter_mut().find(|declared| single || declared.name == agent.name)
            else {
                self.agents.push(agent);
                continue;
            };
            declared.tools.retain(|entry| {
                agent.tools.iter().all(|entry_of_user| {
                    entry_of_user.tool.spec().name() != entry.tool.spec().name()
                })
            });
            declared.granted_tools.retain(|name| {
                agent.tools.iter().all(|entry_of_user| entry_of_user.tool.spec().name() != name)
            });
            declared.tools.extend(agent.tools);
            declared.granted_tools.extend(agent.granted_tools);
            declared.hooks =
                agent.hooks.into_iter().chain(std::mem::take(&mut declared.hooks)).collect();
            declared.rules = agent.rules.append_new(std::mem::take(&mut declared.rules));
            declared.principals = agent.principals.or(declared.principals.take());
            declared.max_output = agent.max_output.or(declared.max_output);
            declared.dialect = agent.dialect.or(declared.dialect);
            declared.files = agent.files.or(declared.files.take());
            if agent.limits != Limits::default() {
                declared.limits = agent.limits;
            }
        }
        self
    }
}
