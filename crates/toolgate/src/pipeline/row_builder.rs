//! Builds the ledger row of a call from its state.

use std::sync::Arc;

use rust_decimal::Decimal;

use crate::agent::ToolEntry;
use crate::call::error::{CallEffects, ToolError};
use crate::call::error_code;
use crate::call::outcome::Outcome;
use crate::ledger::row::{Decision, Gate, Latency, Row};
use crate::limits::Charge;
use crate::pipeline::Toolgate;
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::settle::Completion;
use crate::policy::DecisionFacts;

impl Toolgate {
    /// Builds the ledger row, redacted.
    pub(crate) fn build_row(&self, end: &Completion, call_state: &mut CallState) -> Arc<Row> {
        let mut outcome = end.outcome.clone();
        match &mut outcome {
            Outcome::Error(error) => error.call_id = Some(call_state.id),
            // `shape` redacts results, including those that are replayed.
            Outcome::Success(_) | Outcome::Signal(_) => {}
        }
        let facts = std::mem::take(&mut call_state.facts);
        let row = Row {
            rule: call_state.rule.take(),
            retries: call_state.retries,
            spent: call_state.spent,
            ..self.base_row(outcome, (end.decision, end.gate, end.effects), facts, call_state)
        };
        let mut row = self.0.redactor.redact_row(row);
        // Latency excludes the time to write the row itself.
        row.latency = call_state.latency();
        Arc::new(row)
    }

    /// Builds the row that is used if the call is abandoned. The store fills in the counter values.
    pub(crate) fn draft_abandoned_row(
        &self,
        effect: bool,
        charges: &[Charge],
        call_state: &CallState,
    ) -> Arc<Row> {
        let (effects, note) = if effect {
            (CallEffects::Unknown, "it may have taken effect")
        } else {
            (CallEffects::None, "it only reads")
        };
        let message = format!(
            "call abandoned: the process ended or timed out before reporting a result; {note}"
        );
        let error = ToolError::from_code(error_code::ABANDONED, message).with_effects(effects);
        let end = (Decision::Failed, Gate::Run, effects);
        let mut facts = call_state.facts.clone();
        facts.claimed = charges
            .iter()
            .map(|charge| (charge.counter.clone(), charge.window, Decimal::ZERO))
            .collect();
        Arc::new(self.0.redactor.redact_row(self.base_row(error.into(), end, facts, call_state)))
    }

    /// Builds the fields that every row of a call has.
    fn base_row(
        &self,
        outcome: Outcome,
        (decision, gate, effects): (Decision, Gate, CallEffects),
        facts: Box<DecisionFacts>,
        call_state: &CallState,
    ) -> Row {
        Row {
            call: call_state.id,
            client_id: call_state.client_id.clone(),
            at: call_state.started,
            key: call_state.key.clone(),
            turn: call_state.turn,
            stop_reason: call_state.stop_reason.clone(),
            tool: Arc::clone(&call_state.tool),
            arguments: Arc::clone(&call_state.arguments),
            entities: self.entities_of_call(&outcome, call_state),
            digest: call_state.digest,
            decision,
            gate,
            rule: None,
            facts,
            outcome,
            effects,
            latency: Latency::default(),
            retries: 0,
            spent: None,
            config: call_state.config,
            settles: None,
        }
    }

    pub(crate) fn registered_tool(&self, call_state: &CallState) -> Option<&Arc<ToolEntry>> {
        self.0.agents.get(&call_state.key.agent)?.tools.get(&call_state.tool)
    }

    /// Returns the entities of the call, from its arguments or else from its result.
    fn entities_of_call(
        &self,
        outcome: &Outcome,
        call_state: &CallState,
    ) -> Vec<(Arc<str>, serde_json::Value)> {
        let Some(tool) = self.registered_tool(call_state) else {
            return call_state.entities.clone();
        };
        extract_entities(tool, &call_state.arguments, outcome.success().map(|output| &output.value))
    }
}

/// Returns the entities of a call, from its arguments or else from its result.
pub(crate) fn extract_entities(
    tool: &ToolEntry,
    arguments: &serde_json::Value,
    result: Option<&serde_json::Value>,
) -> Vec<(Arc<str>, serde_json::Value)> {
    let about = |(name, path): &(Arc<str>, toolgate_json::Pointer)| {
        let found = path
            .get(arguments)
            .filter(|value| !value.is_null())
            .or_else(|| result.and_then(|value| path.get(value)));
        found
            .filter(|value| !value.is_null())
            .map(|value| (Arc::clone(name), toolgate_json::with_canonical_numbers(value.clone())))
    };
    tool.spec.entities.iter().filter_map(about).collect()
}
