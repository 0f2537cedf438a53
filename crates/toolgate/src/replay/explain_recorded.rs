//! Explains the decision about a recorded call.

use super::{AdmissionDecision, Replay};
use crate::call::error::ToolError;
use crate::ledger::row::{Gate, Row};
use crate::pipeline::explain::{Explanation, GateExplanation, GateResult, PredictedOutcome};
use crate::pipeline::gates::approval::CLIENT_APPROVER_PREFIX;
use crate::store::ApprovalState;

impl Replay {
    /// Explains why a recorded call was allowed or rejected.
    ///
    /// Gates show their recorded results. Rules are evaluated again with the recorded facts, so
    /// their results are as reliable as [`Replay::decide`] reports. Returns `None` for a row that
    /// is not a call.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use toolgate::policy::{Condition, Deny};
    /// use toolgate::{Agent, Replay, Tool, Toolgate};
    ///
    /// let schema = serde_json::json!({
    ///     "type": "object",
    ///     "properties": {"amount": {"type": "number"}},
    /// });
    /// let pay = Tool::dynamic("pay", "Pays.", schema, |_, _| async {
    ///     Ok(serde_json::json!({"paid": true}))
    /// });
    /// let cap = Deny::new("cap", ["pay"]).when("/amount", Condition::Above(500.into()));
    /// let agent = Agent::builder("desk").tool(pay).policy(cap).build()?;
    /// let gate = Toolgate::builder().agent(agent).build()?;
    /// let session = gate.session("desk", "alice", "s");
    /// session.call("pay", serde_json::json!({"amount": 600})).await;
    ///
    /// let row = session.rows().await?.remove(0);
    /// let why = Replay::from_toolgate(&gate)?.explain(&row).await.ok_or("it is a call")?;
    /// assert!(why.to_string().contains("+ /amount above 500: 600"), "{why}");
    /// # Ok(()) }
    /// ```
    pub async fn explain(&self, row: &Row) -> Option<Explanation> {
        if !row.is_call() {
            return None;
        }
        let _lock = self.0.call_lock.lock().await;
        let (call, mut call_state, _) = self.0.prepare_call(row);
        call_state.explain = Some(Box::default());
        Some(with_recorded_results(
            self.0.toolgate.explain_with_state(&call, call_state).await,
            row,
        ))
    }
}

/// Replaces the predicted results with the recorded ones.
fn with_recorded_results(explanation: Explanation, row: &Row) -> Explanation {
    let was = AdmissionDecision::from_row(row);
    let error = row.outcome.error();
    let refusal = error.filter(|_| matches!(was, AdmissionDecision::Refused { .. }));
    let is_asked = refusal.is_some_and(|error| error.approval.is_some());
    // The gate that ended the call.
    let stop = match &was {
        AdmissionDecision::Admitted => None,
        AdmissionDecision::Replayed => Some(Gate::Recall),
        AdmissionDecision::Refused { gate, .. } => Some(*gate),
    };
    // A later gate may have rejected the call early: its session was locked, or its approval was
    // unknown.
    let skipped = match (row.facts.progress, row.digest) {
        _ if refusal.is_none() => None,
        (None, None) => Some(Gate::Validate),
        (None, Some(_)) => Some(Gate::Recall),
        (Some(_), _) => None,
    };
    let gates = explanation.gates.into_iter().map(|note| {
        let gate = note.gate;
        let (result, why) = match (stop, refusal) {
            (Some(stop), Some(error)) if gate == stop => (
                if is_asked { GateResult::Ask } else { GateResult::Deny },
                Some(error.message.clone()),
            ),
            (Some(stop), _) if gate > stop || skipped.is_some_and(|from| gate >= from) => {
                (GateResult::NotReached, None)
            }
            (None, _) if gate >= Gate::Run => recorded_result(gate, row, error),
            _ => (GateResult::Pass, pass_details(&note, row)),
        };
        GateExplanation { gate, said: result, why }
    });
    let gates = gates.collect();
    let mut rules = explanation.rules;
    // A rule that was not evaluated has no result.
    if refusal.is_some() && (skipped.is_some() || stop.is_some_and(|stop| stop < Gate::Policy)) {
        for note in rules.iter_mut().filter(|note| note.level.is_some()) {
            (note.said, note.why) = (GateResult::NotReached, None);
            note.looked_at.clear();
        }
    }
    let would = match refusal {
        Some(_) if is_asked => PredictedOutcome::Ask,
        Some(error) => PredictedOutcome::Refuse(Box::new(error.clone())),
        None if stop.is_some() => PredictedOutcome::Replay,
        None => PredictedOutcome::Run,
    };
    Explanation {
        tool: row.tool.to_string(),
        arguments: (*row.arguments).clone(),
        gates,
        rules,
        would,
    }
}

/// Returns the result of a gate after the claim for an admitted call.
fn recorded_result(
    gate: Gate,
    row: &Row,
    error: Option<&ToolError>,
) -> (GateResult, Option<String>) {
    match error {
        Some(error) if gate == row.gate => (GateResult::Failed, Some(error.message.clone())),
        // A failed call is settled and recorded, but its result is not shaped.
        Some(_) if gate > row.gate && gate < Gate::Settle => (GateResult::NotReached, None),
        _ => (GateResult::Pass, None),
    }
}

/// Returns details about a gate that the call has passed.
fn pass_details(note: &GateExplanation, row: &Row) -> Option<String> {
    match note.gate {
        Gate::Hooks => {
            let decisions = row.facts.hooks.iter().map(|fact| {
                let rewrote = if fact.rewrote { ", and rewrote the arguments" } else { "" };
                format!("{}: {}{rewrote}", fact.hook, fact.said)
            });
            let decisions: Vec<String> = decisions.collect();
            (!decisions.is_empty()).then(|| decisions.join("; "))
        }
        Gate::Approval => {
            let fact =
                row.facts.approval.as_ref().filter(|fact| fact.state == ApprovalState::Approved)?;
            // The client's user may not have answered, so do not say "approved".
            fact.answered_by.as_ref().map(|by| {
                if by.starts_with(CLIENT_APPROVER_PREFIX) {
                    by.clone()
                } else {
                    format!("approved by {by}")
                }
            })
        }
        _ => note.why.clone().filter(|_| note.said == GateResult::Pass),
    }
}
