//! Searches for the next allowed call: the shortest path that the rules leave open to the denied
//! call, or a tool to hand over to.

mod assumed_effect;
mod build_step;
mod invisible_tools;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use jiff::Timestamp;
use serde_json::{Map, Value};

use self::assumed_effect::{AssumedEffect, apply_assumptions};
use self::invisible_tools::hide_invisible_tools;
use crate::agent::{Agent, ToolEntry};
use crate::call::error::{NextStep, ToolError};
use crate::call::{CallId, CheckedArguments, SessionKey};
use crate::pipeline::Toolgate;
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::policy::{Permit, PolicyDenial, RuleVerdict, evaluate_rule};
use crate::pipeline::gates::recall::once_key;
use crate::pipeline::rejection::Rejection;
use crate::policy::{
    DecisionFacts, EnforcementMode, FactRequest, Policy, PolicyInput, Prerequisite,
};
use crate::session::state::SessionState;
use crate::store::SessionRequest;

/// Limits of the search: calls considered in total, and calls in one path.
const MAX_SEARCH_CALLS: u32 = 200;
const MAX_STEPS: usize = 12;

/// A call that the caller could make.
#[derive(Clone)]
struct CandidateStep {
    tool: Arc<ToolEntry>,
    arguments: Map<String, Value>,
    /// Some required arguments are unknown.
    is_incomplete: bool,
    assumed_effects: Vec<AssumedEffect>,
}

/// Verdict of the rules on a step.
enum StepVerdict {
    Admitted,
    /// Any of these calls would resolve the first denial. Empty if some denial cannot be resolved.
    Denied(Vec<Prerequisite>),
}

struct NextStepSearch<'a> {
    toolgate: &'a Toolgate,
    agent: &'a Agent,
    key: &'a SessionKey,
    state: &'a SessionState,
    /// The facts of the denied call.
    facts: &'a DecisionFacts,
    denied_arguments: &'a Map<String, Value>,
    call_id: CallId,
    now: Timestamp,
    calls_considered: AtomicU32,
}

impl Toolgate {
    /// Builds the rejection for a policy denial, with the next allowed call.
    pub(crate) async fn reject_denied(
        &self,
        denied: PolicyDenial,
        agent: &Agent,
        tool: &Arc<ToolEntry>,
        state: &SessionState,
        call_state: &mut CallState,
    ) -> Rejection {
        let PolicyDenial { rule, error, denied_by, arguments, observed, .. } = denied;
        call_state.rule = Some(rule);
        call_state.facts.observed = observed;
        let input = PolicyInput::new(
            call_state.id,
            &call_state.key,
            &tool.spec,
            &arguments,
            &call_state.facts,
        );
        let remedies = collect_prerequisites(&input, denied_by.iter().map(AsRef::as_ref));
        // The denial of the first rule is shown.
        let error = match denied_by.first() {
            Some(rule) => hide_invisible_tools(error, &**rule, &input, agent),
            None => error,
        };
        self.add_next_step(error, &arguments, remedies, agent, tool, state, call_state).await.into()
    }

    /// Extends the rejection by a limit at the claim. No call of the model frees a limit, but the
    /// rule may redirect to another tool.
    pub(crate) async fn reject_unclaimed(
        &self,
        mut stop: Rejection,
        permit: &Permit,
        agent: &Agent,
        state: &SessionState,
        call_state: &CallState,
    ) -> Rejection {
        if stop.error.redirect_tool.is_some() {
            *stop.error = self
                .add_next_step(
                    *stop.error,
                    permit.arguments(),
                    None,
                    agent,
                    permit.tool(),
                    state,
                    call_state,
                )
                .await;
        }
        stop
    }

    /// Reports whether a caller can use a tool: it exists, is visible to the caller and is not
    /// paused.
    pub(crate) async fn is_reachable(&self, tool: &str, agent: &Agent, key: &SessionKey) -> bool {
        let Some(tool) = agent.tools.get(tool).filter(|tool| tool.is_visible_to(&key.principal))
        else {
            return false;
        };
        let store = &self.0.store;
        !store.may_be_paused() || matches!(store.find_pause(key, &tool.spec.name).await, Ok(None))
    }

    /// Removes redirects and next steps that the caller cannot use.
    pub(crate) async fn strip_unreachable_redirects(
        &self,
        mut error: ToolError,
        agent: &Agent,
        key: &SessionKey,
    ) -> ToolError {
        if let Some(to) = error.redirect_tool.take()
            && self.is_reachable(&to, agent, key).await
        {
            error.redirect_tool = Some(to);
        }
        if let Some(next) = error.next.take()
            && self.is_reachable(&next.tool, agent, key).await
        {
            error.next = Some(next);
        }
        error
    }

    #[expect(clippy::too_many_arguments, reason = "the whole context of a denied call")]
    async fn add_next_step(
        &self,
        error: ToolError,
        arguments: &CheckedArguments,
        remedies: Option<Vec<Prerequisite>>,
        agent: &Agent,
        tool: &Arc<ToolEntry>,
        state: &SessionState,
        call_state: &CallState,
    ) -> ToolError {
        // Replay needs only the decision, not the advice.
        if call_state.facts.watch.0.is_some() {
            return error;
        }
        let mut error = self.strip_unreachable_redirects(error, agent, &call_state.key).await;
        let none = Map::new();
        let denied_arguments = arguments.value().as_object().unwrap_or(&none);
        let search = NextStepSearch {
            toolgate: self,
            agent,
            key: &call_state.key,
            state,
            facts: &call_state.facts,
            denied_arguments,
            call_id: call_state.id,
            now: call_state.started,
            calls_considered: AtomicU32::new(0),
        };
        let target = CandidateStep {
            tool: Arc::clone(tool),
            arguments: denied_arguments.clone(),
            is_incomplete: false,
            assumed_effects: Vec::new(),
        };
        let nothing_helps = remedies.as_ref().is_some_and(Vec::is_empty);
        let path = search
            .find_path_by_remedies(&target, remedies.unwrap_or_default(), &[], &mut Vec::new())
            .await;
        let step = match path.and_then(|steps| steps.into_iter().next()) {
            Some(step) => Some(step),
            None => search.find_redirect_step(error.redirect_tool.as_deref()).await,
        };
        // Never suggest the very call that was rejected, even if a limit has free capacity by now.
        let is_it = |name: &str, arguments: &Map<String, Value>| {
            *name == *tool.spec.name && arguments == denied_arguments
        };
        let step = step.filter(|step| !is_it(&step.tool.spec.name, &step.arguments));
        error.next = error.next.filter(|next| {
            !next.arguments.as_object().is_some_and(|arguments| is_it(&next.tool, arguments))
        });
        if step.is_none() && nothing_helps && error.redirect_tool.is_none() {
            error.message = format!(
                "{}{} Repeating this call does not help.",
                error.message,
                if error.message.ends_with(['.', '!', '?']) { "" } else { "." }
            );
        }
        if let Some(step) = step {
            error.next = Some(search.to_next_step(&step, &tool.secrets));
        }
        error
    }
}

impl NextStepSearch<'_> {
    /// Finds the shortest path to a call: the calls to make before it. Empty if it is allowed
    /// already.
    fn find_path<'s>(
        &'s self,
        target: &'s CandidateStep,
        assumed: &'s [AssumedEffect],
        stack: &'s mut Vec<(Arc<str>, Map<String, Value>)>,
    ) -> std::pin::Pin<Box<dyn Future<Output = Option<Vec<CandidateStep>>> + Send + 's>> {
        Box::pin(async move {
            let remedies = match self.check_step(target, assumed).await? {
                StepVerdict::Admitted => return Some(Vec::new()),
                StepVerdict::Denied(remedies) => remedies,
            };
            self.find_path_by_remedies(target, remedies, assumed, stack).await
        })
    }

    /// Finds the shortest path to a denied call that starts with one of these remedies.
    async fn find_path_by_remedies(
        &self,
        target: &CandidateStep,
        remedies: Vec<Prerequisite>,
        assumed: &[AssumedEffect],
        stack: &mut Vec<(Arc<str>, Map<String, Value>)>,
    ) -> Option<Vec<CandidateStep>> {
        let mut best: Option<Vec<CandidateStep>> = None;
        for remedy in remedies {
            let Some(step) = self.build_step(&remedy) else { continue };
            let candidate = (Arc::clone(&step.tool.spec.name), step.arguments.clone());
            if stack.len() >= MAX_STEPS || stack.contains(&candidate) {
                continue;
            }
            stack.push(candidate);
            let found = self.find_path_through(target, step, assumed, stack).await;
            stack.pop();
            best = match (best, found) {
                (Some(best), Some(found)) if best.len() <= found.len() => Some(best),
                (best, found) => found.or(best),
            };
        }
        best
    }

    /// Finds the path to a call through this step.
    async fn find_path_through(
        &self,
        target: &CandidateStep,
        step: CandidateStep,
        assumed: &[AssumedEffect],
        stack: &mut Vec<(Arc<str>, Map<String, Value>)>,
    ) -> Option<Vec<CandidateStep>> {
        let mut steps = self.find_path(&step, assumed, stack).await?;
        steps.push(step);
        let mut assumed = assumed.to_vec();
        assumed.extend(steps.iter().flat_map(|step| step.assumed_effects.iter().cloned()));
        steps.extend(self.find_path(target, &assumed, stack).await?);
        Some(steps)
    }

    /// Returns the redirect target, or the first step towards it.
    async fn find_redirect_step(&self, redirect: Option<&str>) -> Option<CandidateStep> {
        let step =
            self.build_step(&Prerequisite { tool: redirect?.into(), ..Prerequisite::default() })?;
        let steps = self.find_path(&step, &[], &mut Vec::new()).await?;
        Some(steps.into_iter().next().unwrap_or(step))
    }

    /// Checks a step under the given assumptions. Returns `None` if the step is impossible.
    async fn check_step(
        &self,
        step: &CandidateStep,
        assumed: &[AssumedEffect],
    ) -> Option<StepVerdict> {
        let tool = &step.tool;
        if self.calls_considered.fetch_add(1, Ordering::Relaxed) >= MAX_SEARCH_CALLS
            || !tool.is_visible_to(&self.key.principal)
        {
            return None;
        }
        let store = &self.toolgate.0.store;
        if store.may_be_paused()
            && !matches!(store.find_pause(self.key, &tool.spec.name).await, Ok(None))
        {
            return None;
        }
        let arguments =
            CheckedArguments::new(&tool.spec.name, Value::Object(step.arguments.clone()));
        // A `once` call that was made before is only replayed, and yields no new evidence.
        if tool.spec.once && !step.is_incomplete && self.has_earlier_call(tool, &arguments).await {
            return None;
        }
        let mut facts = DecisionFacts { now: self.now, ..DecisionFacts::default() };
        let enforced = || {
            tool.governed_by
                .iter()
                .filter(|attached| attached.policy.mode() == EnforcementMode::Enforce)
                .map(|attached| &*attached.policy)
        };
        for round in 0..2 {
            let mut needs = FactRequest::default();
            let input = PolicyInput::new(self.call_id, self.key, &tool.spec, &arguments, &facts)
                .with_sketch(step.is_incomplete);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                enforced().for_each(|policy| policy.request_facts(&input, &mut needs))
            }));
            outcome.ok()?;
            if round > 0 {
                needs.remove_answered(&facts);
            }
            self.toolgate
                .load_requested_facts(self.agent, self.key, &mut needs, self.state, &mut facts)
                .await
                .ok()?;
            apply_assumptions(&mut facts, assumed);
            if !needs.repeat_with_evidence {
                break;
            }
        }
        let input = PolicyInput::new(self.call_id, self.key, &tool.spec, &arguments, &facts)
            .with_sketch(step.is_incomplete);
        let mut charges: Vec<_> = self
            .agent
            .limits
            .charges(self.key, tool.spec.cost)
            .into_iter()
            .map(|(charge, _)| charge)
            .collect();
        let mut denied_by = Vec::new();
        for policy in enforced() {
            match evaluate_rule(&*self.toolgate.0.engine, policy, &input) {
                RuleVerdict::Allow(terms) | RuleVerdict::Ask(_, terms) => {
                    charges.extend(terms.charges.into_iter().map(|(charge, _)| charge))
                }
                // The rule may have failed only because arguments are unknown, so the step stays.
                RuleVerdict::Fault(_) if step.is_incomplete => {}
                RuleVerdict::Deny(_) | RuleVerdict::Fault(_) => denied_by.push(policy),
            }
        }
        let room = store.check_charges(&charges).await.ok()?;
        if room.iter().any(Result::is_err) {
            return Some(StepVerdict::Denied(Vec::new()));
        }
        Some(if denied_by.is_empty() {
            StepVerdict::Admitted
        } else {
            StepVerdict::Denied(
                collect_prerequisites(&input, denied_by.into_iter()).unwrap_or_default(),
            )
        })
    }

    /// Reports whether a `once` call was made before, with any outcome. Returns true if the lookup
    /// fails.
    async fn has_earlier_call(&self, tool: &ToolEntry, arguments: &CheckedArguments) -> bool {
        let digest = self.toolgate.0.redactor.key_digest(arguments.digest());
        let recall: Vec<_> = once_key(self.key, tool, digest).into_iter().collect();
        let request = SessionRequest {
            key: self.key,
            digest,
            dedup_keys: &recall,
            counts_repetition: false,
            polling: None,
            lease: None,
        };
        self.toolgate
            .0
            .store
            .inspect_session(request)
            .await
            .map_or(true, |snapshot| snapshot.prior_call.is_some())
    }

    /// Formats a step for the model, without secrets.
    fn to_next_step(&self, step: &CandidateStep, secrets: &[toolgate_json::Pointer]) -> NextStep {
        let is_secret = |name: &str| {
            let path = toolgate_json::Pointer::from_parts(vec![name.to_owned()]);
            crate::redact::is_secret_path(&path, secrets)
                || crate::redact::is_secret_path(&path, &step.tool.secrets)
        };
        let hidden: Vec<&Value> = self
            .denied_arguments
            .iter()
            .filter(|(name, _)| is_secret(name))
            .map(|(_, value)| value)
            .collect();
        let arguments = step
            .arguments
            .iter()
            .filter(|(name, value)| !is_secret(name) && !hidden.contains(value));
        let arguments = arguments.map(|(name, value)| (name.clone(), value.clone())).collect();
        NextStep { tool: step.tool.spec.name.to_string(), arguments: Value::Object(arguments) }
    }
}

/// Returns the remedies for the first denial. Empty if some denial has no remedy, `None` if some
/// rule does not know.
fn collect_prerequisites<'p>(
    input: &PolicyInput<'_>,
    deniers: impl Iterator<Item = &'p dyn Policy>,
) -> Option<Vec<Prerequisite>> {
    let remedies = |policy: &dyn Policy| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            policy.suggest_prerequisites(input)
        }))
        .unwrap_or_default()
    };
    let all: Vec<Vec<Prerequisite>> = deniers.map(remedies).collect::<Option<_>>()?;
    if all.iter().any(Vec::is_empty) { Some(Vec::new()) } else { all.into_iter().next() }
}
