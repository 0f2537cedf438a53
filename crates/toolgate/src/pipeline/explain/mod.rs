//! Explains what would happen to a call, gate by gate and rule by rule, without making the call.

mod types;

pub use types::{Explanation, GateExplanation, GateResult, PredictedOutcome, RuleExplanation};

use crate::call::{Call, CheckedArguments};
use crate::ledger::row::Gate;
use crate::pipeline::Toolgate;
use crate::pipeline::admission::{Admission, ResolvedCall};
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::policy::{RuleVerdict, evaluate_rule};
use crate::pipeline::rejection::Rejection;
use crate::policy::{Obligations, PolicyInput, RuleTrace};
use crate::session::state::SessionState;

/// Collects what the gates and rules say about an explained call.
#[derive(Default)]
pub(crate) struct ExplainState {
    gates: Vec<GateExplanation>,
    rules: Vec<RuleExplanation>,
    /// The outcome, if a gate has predicted it.
    pub(crate) outcome: Option<PredictedOutcome>,
}

impl ExplainState {
    /// Notes the result of a gate. A gate without a note has passed, if the call went on.
    pub(crate) fn note_gate(&mut self, gate: Gate, result: GateResult, why: Option<String>) {
        self.gates.push(GateExplanation { gate, said: result, why });
    }

    /// Returns the note of a rule.
    pub(crate) fn rule_mut(&mut self, rule: &str) -> Option<&mut RuleExplanation> {
        self.rules.iter_mut().find(|note| note.rule == rule)
    }
}

impl Toolgate {
    /// Explains what would happen to a call, with every gate, every rule and the values that
    /// decide.
    ///
    /// Reads the session and changes nothing: writes no row, counts no call and runs no hook.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use toolgate::policy::{Condition, Deny};
    /// use toolgate::{Agent, Toolgate, builtin};
    /// let no_secrets = Deny::new("no_secrets", ["write_file"])
    ///     .when("/path", Condition::Glob("*.env".into()));
    /// let agent = Agent::builder("a")
    ///     .files(toolgate::MemoryFs::default())
    ///     .tools(builtin::files())
    ///     .policy(no_secrets)
    ///     .build()?;
    /// let session = Toolgate::builder().agent(agent).build()?.session("a", "alice", "s");
    /// let arguments = serde_json::json!({"path": "prod.env", "content": ""});
    /// let why = session.explain("write_file", arguments).await;
    /// assert!(why.to_string().contains("/path like `*.env`"), "{why}");
    /// # Ok(()) }
    /// ```
    pub async fn explain(&self, call: &Call) -> Explanation {
        self.explain_with_state(call, CallState::for_explain(self, call)).await
    }

    /// Explains a call whose state is partly known already.
    pub(crate) async fn explain_with_state(
        &self,
        call: &Call,
        mut call_state: Box<CallState>,
    ) -> Explanation {
        let admission = Box::pin(self.run_admission_gates(call, &mut call_state, None)).await;
        let mut explain = call_state.explain.take().unwrap_or_default();
        let would = match (explain.outcome.take(), admission) {
            (Some(predicted), _) => predicted,
            (None, Ok(Admission::Admitted(_))) => PredictedOutcome::Run,
            (None, Ok(Admission::Replay(_))) => PredictedOutcome::Replay,
            (None, Err(Rejection { error, gate })) => {
                // The approval that a call names is looked up at gate 2, after the tool was found.
                if gate == Some(Gate::Approval) && call_state.gate() == Gate::Resolve {
                    explain.note_gate(Gate::Resolve, GateResult::Pass, None);
                }
                let gate = gate.unwrap_or_else(|| call_state.gate());
                explain.note_gate(gate, GateResult::Deny, Some(error.message.clone()));
                PredictedOutcome::Refuse(error)
            }
        };
        for gate in Gate::ALL {
            if explain.gates.iter().any(|note| note.gate == gate) {
                continue;
            }
            let result = if gate < call_state.gate() {
                GateResult::Pass
            } else if matches!(would, PredictedOutcome::Run) {
                GateResult::NotAsked
            } else {
                GateResult::NotReached
            };
            explain.note_gate(gate, result, None);
        }
        explain.gates.sort_by_key(|note| note.gate);
        Explanation {
            tool: call_state.tool.to_string(),
            arguments: (*call_state.arguments).clone(),
            gates: explain.gates,
            rules: explain.rules,
            would,
        }
    }

    /// Notes what every rule of the agent says about the call, also if a gate before the policies
    /// would reject it.
    pub(crate) async fn explain_rules(
        &self,
        resolved: &ResolvedCall<'_>,
        arguments: &CheckedArguments,
        session: &SessionState,
        call_state: &mut CallState,
    ) -> Result<(), Rejection> {
        let ResolvedCall { call, agent, tool, .. } = resolved;
        self.load_facts(resolved, arguments, session, call_state).await.map_err(|rejection| {
            Rejection { gate: Some(rejection.gate.unwrap_or(Gate::Policy)), ..rejection }
        })?;
        let governing = tool.governed_by.iter().map(|attached| {
            let trace = RuleTrace::default();
            let input = PolicyInput::new(
                call_state.id,
                &call.key,
                &tool.spec,
                arguments,
                &call_state.facts,
            )
            .with_trace(&trace);
            let (result, why) = match evaluate_rule(&*self.0.engine, &*attached.policy, &input) {
                RuleVerdict::Allow(terms) => charged_result(&terms),
                RuleVerdict::Ask(reason, _) => (GateResult::Ask, Some(reason)),
                RuleVerdict::Deny(error) => (GateResult::Deny, Some(error.message)),
                RuleVerdict::Fault(error) => (GateResult::Fault, Some(error.message)),
            };
            let (rule, mode) = (attached.policy.name().to_owned(), attached.policy.mode());
            RuleExplanation {
                rule,
                level: Some(attached.level),
                mode,
                said: result,
                why,
                looked_at: trace.into_checks(),
            }
        });
        let mut notes: Vec<RuleExplanation> = governing.collect();
        for policy in &agent.rules {
            if !notes.iter().any(|note| note.rule == policy.name()) {
                let (rule, mode) = (policy.name().to_owned(), policy.mode());
                notes.push(RuleExplanation {
                    rule,
                    level: None,
                    mode,
                    said: GateResult::NotAsked,
                    why: None,
                    looked_at: Vec::new(),
                });
            }
        }
        if let Some(explain) = &mut call_state.explain {
            explain.rules = notes;
        }
        Ok(())
    }
}

/// Returns the result of a rule that allows the call. If the rule charges a limit, the claim
/// decides.
fn charged_result(terms: &Obligations) -> (GateResult, Option<String>) {
    match terms.charges.iter().find(|(charge, _)| charge.amount > charge.cap) {
        Some((_, error)) => (GateResult::Deny, Some(error.message.clone())),
        None if terms.charges.is_empty() => (GateResult::Pass, None),
        None => (GateResult::NotReached, Some("not reached (claim)".to_owned())),
    }
}
