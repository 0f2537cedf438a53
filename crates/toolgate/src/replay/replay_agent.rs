//! Prepares an agent for a replay: its hooks, files and results come from the record.

use std::sync::Arc;

use async_trait::async_trait;

use crate::agent::{Agent, ToolEntry};
use crate::call::CallId;
use crate::files::{FileExpectation, FileSystem, FileTransaction, MemoryFs, Resources};
use crate::hook::{BeforeHookResult, Hook, HookCall, HookDecision, HookDenial, HookError};
use crate::ledger::row::Gate;
use crate::policy::FileFact;
use crate::replay::recorded_store::RecordedStore;

/// A hook that repeats its recorded decision.
struct ReplayHook {
    name: String,
    store: Arc<RecordedStore>,
}

#[async_trait]
impl Hook for ReplayHook {
    fn name(&self) -> &str {
        &self.name
    }

    async fn before(&self, _: HookCall<'_>) -> Result<BeforeHookResult, HookError> {
        let (row, watch) = self.store.current_row().map_err(|e| HookError(e.to_string()))?;
        let decided = row.gate == Gate::Hooks && row.rule.as_deref() == Some(&self.name);
        let decision = match row
            .facts
            .hooks
            .iter()
            .find(|fact| fact.hook == self.name)
            .map(|fact| fact.said.as_str())
        {
            Some("deny") => {
                let error = row.outcome.error();
                let code = error.map(|error| error.code.to_string());
                let category = error.map(|error| error.category);
                HookDecision::Deny(HookDenial {
                    code,
                    category,
                    ..HookDenial::new("recorded denial")
                })
            }
            Some("ask") => HookDecision::Ask("recorded request for approval".to_owned()),
            Some(_) if !decided => HookDecision::Allow,
            _ if decided => return Err(HookError("recorded failure".to_owned())),
            _ => {
                watch.record_missing(|| {
                    format!("the decision of the hook `{}` is not recorded", self.name)
                });
                HookDecision::Allow
            }
        };
        Ok(BeforeHookResult { decision, input: None })
    }
}

/// File system that answers with the recorded file facts.
struct ReplayFileSystem(Arc<RecordedStore>);

impl FileSystem for ReplayFileSystem {
    fn fact(&self, path: &str) -> FileFact {
        let Ok((row, watch)) = self.0.current_row() else { return FileFact::Absent };
        let known = |(spelt, _): &(&String, &FileFact)| {
            crate::files::normalize_path(spelt).is_ok_and(|spelt| spelt == path)
        };
        match row.facts.files.iter().find(known) {
            Some((_, fact)) => fact.clone(),
            None => {
                watch.record_missing(|| {
                    format!(
                        "the state of the file `{}` is not recorded",
                        toolgate_text::escape_for_display(path)
                    )
                });
                FileFact::Absent
            }
        }
    }
    fn begin(&self, call: CallId, expects: Vec<FileExpectation>) -> Box<dyn FileTransaction> {
        MemoryFs::default().begin(call, expects)
    }
}

impl Agent {
    /// Returns the agent for a replay: results and hook decisions come from the record.
    pub(crate) fn for_replay(&self, store: &Arc<RecordedStore>) -> Self {
        let mut resources = Resources::default();
        if self.resources.files().is_some() {
            resources.set_files(Arc::new(ReplayFileSystem(Arc::clone(store))));
        }
        let tools = self.tools.iter().map(|(name, tool)| {
            let mut spec = tool.spec.clone();
            spec.normalize.clear();
            spec.max_output = Some(usize::MAX);
            let hooks = tool.hooks.iter().map(|hook| {
                let replayed: Arc<dyn Hook> =
                    Arc::new(ReplayHook { name: hook.name().to_owned(), store: Arc::clone(store) });
                replayed
            });
            let staged = ToolEntry {
                spec,
                handler: None,
                input: tool.input.clone(),
                output: None,
                secrets: tool.secrets.clone(),
                is_entity_declared: tool.is_entity_declared.clone(),
                governed_by: tool.governed_by.clone(),
                observers: tool.observers.clone(),
                hooks: hooks.collect(),
                definition_digest: tool.definition_digest,
            };
            (Arc::clone(name), Arc::new(staged))
        });
        self.with_tools(tools.collect(), resources)
    }
}
