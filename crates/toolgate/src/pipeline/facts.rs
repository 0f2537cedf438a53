//! Loads the facts that the policies of a call need, before the policies decide.

use crate::agent::Agent;
use crate::call::error::ToolError;
use crate::call::error_code;
use crate::call::{CheckedArguments, SessionKey};
use crate::pipeline::Toolgate;
use crate::pipeline::admission::ResolvedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::rejection::Rejection;
use crate::policy::{DecisionFacts, EnforcementMode, FactRequest, FileFact, PolicyInput};
use crate::session::state::SessionState;
use crate::store::StoreError;

impl Toolgate {
    /// Loads the facts that the policies of a tool need.
    pub(crate) async fn load_facts(
        &self,
        resolved: &ResolvedCall<'_>,
        arguments: &CheckedArguments,
        at: &SessionState,
        call_state: &mut CallState,
    ) -> Result<(), Rejection> {
        let ResolvedCall { call, agent, tool, .. } = resolved;
        for round in 0..2 {
            let mut needs = FactRequest::default();
            for attached in &tool.governed_by {
                let input = PolicyInput::new(
                    call_state.id,
                    &call.key,
                    &tool.spec,
                    arguments,
                    &call_state.facts,
                );
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    attached.policy.request_facts(&input, &mut needs)
                }));
                // A policy in observe mode records its own failure later.
                if outcome.is_err() && attached.policy.mode() == EnforcementMode::Enforce {
                    call_state.rule = Some(attached.policy.name().to_owned());
                    let message = format!(
                        "the policy `{}` panicked, so the call is denied",
                        attached.policy.name()
                    );
                    return Err(ToolError::from_code(error_code::POLICY_FAULT, message).into());
                }
            }
            if round > 0 {
                needs.remove_answered(&call_state.facts);
            }
            self.load_requested_facts(agent, &call.key, &mut needs, at, &mut call_state.facts)
                .await?;
            if !needs.repeat_with_evidence {
                break;
            }
        }
        Ok(())
    }

    /// Loads the requested facts from files, the session snapshot and the store.
    pub(crate) async fn load_requested_facts(
        &self,
        agent: &Agent,
        key: &SessionKey,
        needs: &mut FactRequest,
        at: &SessionState,
        facts: &mut DecisionFacts,
    ) -> Result<(), StoreError> {
        if needs.home {
            let home = facts.home.get_or_insert_with(crate::policy::home_dir_text);
            if crate::redact::has_mark(home) {
                facts.watch.record_missing(|| {
                    "the home directory is redacted, and a rule checks a path below it".to_owned()
                });
            }
        }
        if needs.is_empty() {
            return Ok(());
        }
        if let Some(files) = agent.resources.files() {
            for path in &needs.files {
                let fact = match crate::files::normalize_path(path) {
                    Ok(path) => files.fact(&path),
                    Err(error) => FileFact::Unreadable(error.to_string()),
                };
                facts.files.insert(path.clone(), fact);
            }
        }
        if self.0.store.has_complete_snapshots() {
            facts.load_from_session(needs, at);
            if needs.counters.is_empty() {
                return Ok(());
            }
        }
        self.0.store.load_facts(key, needs, at, facts).await?;
        // Earlier calls of the same batch may revoke evidence that the store still has.
        facts.drop_revoked_evidence(at);
        Ok(())
    }
}
