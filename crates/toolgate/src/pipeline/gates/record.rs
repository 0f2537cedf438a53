//! Gate 14: writes the ledger row, together with the state of the call, and answers the caller.

use std::sync::Arc;

use jiff::SignedDuration;

use crate::call::error::{CallEffects, ToolError};
use crate::call::error_code;
use crate::call::event::Event;
use crate::call::outcome::{Answer, Outcome};
use crate::ledger::row::{Gate, LazyReceipt, Row};
use crate::pipeline::admission::AdmittedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::settle::{Completion, revoked_evidence, roll_back};
use crate::pipeline::{Toolgate, provenance};
use crate::session::repetition::CallEnd;
use crate::store::{CommitConflictError, CommitRequest, StoreError};
use crate::tool::Effect;
use crate::tool::context::CallTransaction;

/// Commits state and row in one transaction.
///
/// A success that cannot be committed is a failure, and is recorded as a failure.
pub(crate) fn run<'g>(
    gate: &'g Toolgate,
    mut admitted: Box<AdmittedCall>,
    mut completion: Completion,
    mut txn: CallTransaction,
    mut call_state: Box<CallState>,
) -> impl Future<Output = Answer> + 'g {
    let is_kept = completion.changes.is_some();
    call_state.spent = txn.cost;
    call_state.enter_gate(Gate::Record);
    let row = gate.build_row(&completion, &mut call_state);
    let request = commit_request(gate, &row, &call_state, &mut completion, &admitted, &mut txn);
    // Without this reference to the snapshot, the store can change the session in place.
    admitted.state = None;
    // An `async fn` would store its arguments twice.
    async move {
        match gate.0.store.commit(request).await {
            Ok(Ok(receipt)) => {
                if is_kept {
                    commit_files(&mut txn, &call_state);
                    publish_tool_events(gate, &txn, &call_state);
                }
                gate.try_flush_spool().await;
                gate.finish_answer(completion, row, receipt, &call_state)
            }
            // Another call committed first. This call is recorded, but its changes are dropped.
            Ok(Err(CommitConflictError)) => {
                Box::pin(end_conflicting(gate, admitted, row, txn, call_state)).await
            }
            Err(error) if is_kept => {
                let unrecorded = unrecorded_error(&error, admitted.effects_of_run());
                let mut completion = Completion::failed(unrecorded, Gate::Record);
                roll_back(&admitted, &mut completion, &mut txn, call_state.id, &row.facts);
                let row = Arc::new(completion.rewrite_row(&row));
                gate.spool_row(completion, row, &error, &call_state)
            }
            Err(error) => gate.spool_row(completion, row, &error, &call_state),
        }
    }
}

async fn end_conflicting(
    gate: &Toolgate,
    admitted: Box<AdmittedCall>,
    row: Arc<Row>,
    mut txn: CallTransaction,
    call_state: Box<CallState>,
) -> Answer {
    let error = ToolError::from_code(
        error_code::CONFLICT,
        "another call changed this session first, so the changes of this call were dropped",
    );
    let mut end = Completion::failed(
        with_retry_delay(100, error.with_effects(admitted.effects_of_run())),
        Gate::Settle,
    );
    roll_back(&admitted, &mut end, &mut txn, call_state.id, &row.facts);
    let row = Arc::new(end.rewrite_row(&row));
    let request = commit_request(gate, &row, &call_state, &mut end, &admitted, &mut txn);
    gate.record_completion(request, end, row, &call_state).await
}

fn commit_request(
    gate: &Toolgate,
    row: &Arc<Row>,
    call_state: &CallState,
    end: &mut Completion,
    admitted: &AdmittedCall,
    txn: &mut CallTransaction,
) -> Box<CommitRequest> {
    let polled =
        admitted.authorization.tool().spec.polling.is_some().then_some(end.result).flatten();
    Box::new(CommitRequest {
        ended: gate.call_end(row, call_state.requested_digest, polled),
        row: Arc::clone(row),
        version: admitted.version,
        changes: end.changes.take(),
        revoked: revoked_evidence(gate, admitted, end, call_state),
        provenance: provenance::call_provenance(
            admitted,
            (&end.outcome, end.untruncated.as_ref()),
            end.resolution,
            txn,
        ),
        // Logs are kept even if another call commits first.
        logs: txn.logs.clone(),
        resolution: end.resolution,
        outcome: admitted.is_recallable.then(|| end.outcome.clone()),
        spent: txn.cost,
        outputs: std::mem::take(&mut end.outputs),
        items: Vec::new(),
        is_durable: admitted.authorization.tool().spec.effect != Effect::Read,
    })
}

fn commit_files(txn: &mut CallTransaction, call_state: &CallState) {
    if let Some(Err(error)) = txn.files.take().map(|mut files| files.commit()) {
        tracing::error!(call = %call_state.id, %error, "cannot remove the undo entry of a file");
    }
}

fn publish_tool_events(gate: &Toolgate, txn: &CallTransaction, call_state: &CallState) {
    for (name, payload) in &txn.events {
        gate.publish_event(&Event::Published {
            call: call_state.id,
            key: call_state.key.clone(),
            name: Arc::clone(name),
            payload: payload.clone(),
        });
    }
}

impl Toolgate {
    /// Records an end that cannot conflict with another call.
    pub(crate) async fn record_completion(
        &self,
        request: Box<CommitRequest>,
        end: Completion,
        row: Arc<Row>,
        call_state: &CallState,
    ) -> Answer {
        match self.0.store.commit(request).await {
            Ok(receipt) => {
                self.try_flush_spool().await;
                self.finish_answer(end, row, receipt.ok().flatten(), call_state)
            }
            Err(error) => self.spool_row(end, row, &error, call_state),
        }
    }

    pub(crate) fn call_end(
        &self,
        row: &Row,
        requested: Option<toolgate_json::Digest>,
        result: Option<toolgate_json::Digest>,
    ) -> Option<CallEnd> {
        let retry_from = row.outcome.error().filter(|error| error.retryable).map(|error| {
            let wait = SignedDuration::from_millis(
                i64::try_from(error.retry_after_ms.unwrap_or(0)).unwrap_or(i64::MAX),
            );
            self.now().checked_add(wait).unwrap_or(jiff::Timestamp::MAX)
        });
        requested.map(|digest| CallEnd { digest, retry_from, result })
    }

    /// Writes the row to the spool because the store is unavailable, and tells the caller.
    pub(crate) fn spool_row(
        &self,
        end: Completion,
        row: Arc<Row>,
        error: &StoreError,
        call_state: &CallState,
    ) -> Answer {
        if let Err(spool) = self.0.spool.append_row(&row) {
            tracing::error!(%spool, path = %self.0.spool.path().display(), row = %serde_json::to_string(&*row).unwrap_or_default(), "cannot store or spool a ledger row; it stays in memory until the store accepts it");
        }
        if let Some(agent) =
            self.0.agents.get(&row.key.agent).filter(|agent| agent.definition_digest == row.config)
            && let Err(error) =
                self.0.spool.save_definition(agent.definition_digest, &agent.definition)
        {
            tracing::warn!(%error, "cannot save the agent definition of a spooled row next to the spool");
        }
        let client_error = unrecorded_error(error, end.effects);
        let end = Completion { outcome: client_error.into(), gate: Gate::Record, ..end };
        self.finish_answer(end, row, None, call_state)
    }

    pub(crate) fn finish_answer(
        &self,
        mut end: Completion,
        row: Arc<Row>,
        recorded: Option<LazyReceipt>,
        call_state: &CallState,
    ) -> Answer {
        let rule = row.rule.clone();
        call_state.span.record("toolgate.gate", end.gate.name());
        call_state.span.record("toolgate.decision", end.decision.name());
        if let Outcome::Error(error) = &mut end.outcome {
            error.call_id = Some(call_state.id);
            // Use the row's code, which is redacted. If the row could not be stored, the code is
            // toolgate's own.
            let code = row.code().filter(|_| end.gate != Gate::Record).unwrap_or(&error.code);
            call_state.span.record("error.type", code);
            call_state.span.record("otel.status_code", "ERROR");
        }
        self.publish_event(&Event::CallEnded(row));
        Answer { call: call_state.id, gate: end.gate, rule, outcome: end.outcome, recorded }
    }
}

fn unrecorded_error(error: &StoreError, effects: CallEffects) -> ToolError {
    tracing::error!(%error, "cannot record a call in the store");
    with_retry_delay(
        1_000,
        ToolError::from_code(error_code::STORE_UNAVAILABLE, "the store could not record the call")
            .with_effects(effects),
    )
}

/// Adds a retry delay to a retryable error.
fn with_retry_delay(ms: u64, error: ToolError) -> ToolError {
    if error.retryable { error.retry_after_ms(ms) } else { error }
}
