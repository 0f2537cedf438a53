//! Implements gates 13 and 14: commits or rolls back a call and writes its ledger row. Every call
//! ends here.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use jiff::SignedDuration;
use rust_decimal::Decimal;

use super::run::{ResolvedFailure, RunResult, resolve_effects, roll_back_files};
use crate::agent::ToolEntry;
use crate::call::CallId;
use crate::call::error::{CallEffects, ToolError};
use crate::call::error_code;
use crate::call::event::Event;
use crate::call::outcome::{Answer, Outcome};
use crate::ledger::row::{Decision, Gate, Latency, LazyReceipt, Row};
use crate::limits::Charge;
use crate::pipeline::admission::AdmittedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::mask_secrets::SecretValues;
use crate::pipeline::{Rejection, Toolgate, provenance};
use crate::policy::{DecisionFacts, PolicyInput};
use crate::provenance::{ProvenanceUpdate, TaintCarrier};
use crate::session::repetition::CallEnd;
use crate::session::state::{Revocation, SessionChanges};
use crate::store::{ClaimRecord, ClaimResolution, CommitConflictError, CommitRequest, StoreError};
use crate::tool::Effect;
use crate::tool::context::CallTransaction;
use toolgate_json;
use toolgate_text::escape_for_display;

/// Describes how a call ends.
struct Completion {
    outcome: Outcome,
    gate: Gate,
    decision: Decision,
    effects: CallEffects,
    resolution: ClaimResolution,
    changes: Option<SessionChanges>,
    outputs: Vec<(String, Arc<str>)>,
    /// The untruncated result, if provenance rules need it.
    untruncated: Option<serde_json::Value>,
    /// Digest of the result of a polling call.
    result: Option<toolgate_json::Digest>,
}

/// Describes a reported call whose tool no longer exists.
pub(crate) struct UnknownToolCompletion {
    pub(crate) error: ToolError,
    /// The client reports that the call ran.
    pub(crate) has_run: bool,
    /// The call ran with other arguments than the admitted ones, or with unknown arguments.
    pub(crate) has_other_arguments: bool,
    pub(crate) provenance: Option<Box<ProvenanceUpdate>>,
}

impl Completion {
    fn failed(error: ToolError, gate: Gate) -> Self {
        let effects = error.effects;
        // A poll that keeps failing in the same way makes no progress either.
        let result = (!error.retryable).then(|| toolgate_json::Digest::of(error.code.as_bytes()));
        Self {
            outcome: error.into(),
            gate,
            decision: Decision::Failed,
            effects,
            resolution: ClaimResolution::from_effects(effects),
            changes: None,
            outputs: Vec::new(),
            untruncated: None,
            result,
        }
    }

    /// Marks the effects as unknown because the rollback failed.
    fn into_unclean(mut self) -> Self {
        self.mark_unclean();
        self
    }

    fn mark_unclean(&mut self) {
        self.effects = CallEffects::Unknown;
        self.resolution = ClaimResolution::Pending;
        if let Outcome::Error(error) = &mut self.outcome {
            **error = (**error).clone().with_effects(CallEffects::Unknown);
            error.retry_after_ms = None;
        }
    }

    /// Rewrites a row that was not stored, for a call that ended differently.
    fn rewrite_row(&self, row: &Row) -> Row {
        let mut outcome = self.outcome.clone();
        if let Outcome::Error(error) = &mut outcome {
            error.call_id = Some(row.call);
        }
        Row {
            outcome,
            gate: self.gate,
            decision: self.decision,
            effects: self.effects,
            ..row.clone()
        }
    }
}

impl Toolgate {
    /// Ends an admitted call.
    pub(crate) async fn settle_call(
        &self,
        passed: Box<AdmittedCall>,
        ran: RunResult,
        mut trail: Box<CallState>,
    ) -> Answer {
        let RunResult { result, mut txn, is_empty: empty, is_unclean: unclean, has_started: begun } =
            ran;
        let tool = passed.authorization.tool();
        let end = match result {
            Ok(value) => {
                trail.enter_gate(Gate::Shape);
                match self.shape_result(value, empty, &passed, &mut txn, &mut trail).await {
                    Ok(shaped) => Completion {
                        outcome: Outcome::Success(shaped.output),
                        gate: Gate::Run,
                        decision: Decision::Succeeded,
                        effects: if tool.spec.effect == Effect::Read {
                            CallEffects::None
                        } else {
                            CallEffects::Done
                        },
                        resolution: ClaimResolution::Done,
                        changes: Some(shaped.changes),
                        outputs: shaped.stored.into_iter().collect(),
                        untruncated: shaped.untruncated,
                        result: shaped.digest,
                    },
                    Err(error) => {
                        Completion::failed(error.with_effects(passed.effects_of_run()), Gate::Shape)
                    }
                }
            }
            Err(failure) => match resolve_effects(failure, &passed) {
                ResolvedFailure::Error(mut error) => {
                    SecretValues::from_arguments(passed.authorization.arguments().value(), tool)
                        .mask_error(&mut error);
                    // The tool's redirect is unverified. If the caller cannot use the target, the
                    // error remains and the redirect is dropped.
                    let to = error.redirect_tool.clone();
                    let error = Box::pin(self.strip_unreachable_redirects(
                        *error,
                        &passed.agent,
                        &passed.key,
                    ))
                    .await;
                    if let Some(to) = to.filter(|_| error.redirect_tool.is_none()) {
                        tracing::warn!(tool = tool.spec.name(), to = %escape_for_display(&to), "a tool redirects to a tool that this caller cannot use");
                    }
                    Completion::failed(error, Gate::Run)
                }
                // A signal asks for something before the tool acts, so nothing has happened yet.
                ResolvedFailure::Signal(mut signal) => {
                    SecretValues::from_arguments(passed.authorization.arguments().value(), tool)
                        .mask_signal(&mut signal);
                    Completion {
                        outcome: Outcome::Signal(signal),
                        gate: Gate::Run,
                        decision: Decision::Signalled,
                        effects: CallEffects::None,
                        resolution: ClaimResolution::Released,
                        changes: None,
                        outputs: Vec::new(),
                        untruncated: None,
                        result: None,
                    }
                }
            },
        };
        trail.enter_gate(Gate::Settle);
        let end = if unclean { end.into_unclean() } else { end };
        let end = if begun { end } else { Completion { decision: Decision::Refused, ..end } };
        Box::pin(self.commit_call(passed, end, txn, trail)).await
    }

    /// Commits state and row in one transaction.
    ///
    /// A success that cannot be committed is a failure, and is recorded as a failure.
    fn commit_call(
        &self,
        mut passed: Box<AdmittedCall>,
        mut end: Completion,
        mut txn: CallTransaction,
        mut trail: Box<CallState>,
    ) -> impl Future<Output = Answer> {
        let kept = end.changes.is_some();
        if !kept {
            self.roll_back(&passed, &mut end, &mut txn, trail.id, &trail.facts);
        }
        trail.spent = txn.cost;
        trail.enter_gate(Gate::Record);
        let row = self.build_row(&end, &mut trail);
        let finish = self.commit_request(&row, &trail, &mut end, &passed, &mut txn);
        // Without this reference to the snapshot, the store can change the session in place.
        passed.state = None;
        // An `async fn` would store its arguments twice.
        async move {
            match self.0.store.commit(finish).await {
                Ok(Ok(receipt)) => {
                    if kept {
                        self.commit_files(&mut txn, &trail);
                        self.publish_tool_events(&txn, &trail);
                    }
                    self.try_flush_spool().await;
                    self.finish_answer(end, row, receipt, &trail)
                }
                // Another call committed first. This call is recorded, but its changes are dropped.
                Ok(Err(CommitConflictError)) => {
                    Box::pin(self.end_conflicting(passed, row, txn, trail)).await
                }
                Err(error) if kept => {
                    let heard = unrecorded_error(&error, passed.effects_of_run());
                    let mut end = Completion::failed(heard, Gate::Record);
                    self.roll_back(&passed, &mut end, &mut txn, trail.id, &row.facts);
                    let row = Arc::new(end.rewrite_row(&row));
                    self.spool_row(end, row, &error, &trail)
                }
                Err(error) => self.spool_row(end, row, &error, &trail),
            }
        }
    }

    async fn end_conflicting(
        &self,
        passed: Box<AdmittedCall>,
        row: Arc<Row>,
        mut txn: CallTransaction,
        trail: Box<CallState>,
    ) -> Answer {
        let error = ToolError::from_code(
            error_code::CONFLICT,
            "another call changed this session first, so the changes of this call were dropped",
        );
        let mut end = Completion::failed(
            with_retry_delay(100, error.with_effects(passed.effects_of_run())),
            Gate::Settle,
        );
        self.roll_back(&passed, &mut end, &mut txn, trail.id, &row.facts);
        let row = Arc::new(end.rewrite_row(&row));
        let finish = self.commit_request(&row, &trail, &mut end, &passed, &mut txn);
        self.record_completion(finish, end, row, &trail).await
    }

    /// Records an end that cannot conflict with another call.
    async fn record_completion(
        &self,
        finish: Box<CommitRequest>,
        end: Completion,
        row: Arc<Row>,
        trail: &CallState,
    ) -> Answer {
        match self.0.store.commit(finish).await {
            Ok(receipt) => {
                self.try_flush_spool().await;
                self.finish_answer(end, row, receipt.ok().flatten(), trail)
            }
            Err(error) => self.spool_row(end, row, &error, trail),
        }
    }

    fn commit_request(
        &self,
        row: &Arc<Row>,
        trail: &CallState,
        end: &mut Completion,
        passed: &AdmittedCall,
        txn: &mut CallTransaction,
    ) -> Box<CommitRequest> {
        let polled =
            passed.authorization.tool().spec.polling.is_some().then_some(end.result).flatten();
        Box::new(CommitRequest {
            ended: self.call_end(row, trail.requested_digest, polled),
            row: Arc::clone(row),
            version: passed.version,
            changes: end.changes.take(),
            revoked: self.revoked_evidence(passed, end, trail),
            provenance: provenance::call_provenance(
                passed,
                (&end.outcome, end.untruncated.as_ref()),
                end.resolution,
                txn,
            ),
            // Logs are kept even if another call commits first.
            logs: txn.logs.clone(),
            resolution: end.resolution,
            outcome: passed.is_recallable.then(|| end.outcome.clone()),
            spent: txn.cost,
            outputs: std::mem::take(&mut end.outputs),
            is_durable: passed.authorization.tool().spec.effect != Effect::Read,
        })
    }

    /// Returns the evidence that a call revokes, if the call ran or may have run.
    ///
    /// Evidence that may no longer hold counts as revoked. The arguments of the call decide, not
    /// the row, because the row is redacted by patterns.
    fn revoked_evidence(
        &self,
        passed: &AdmittedCall,
        end: &Completion,
        trail: &CallState,
    ) -> Vec<Revocation> {
        if end.resolution == ClaimResolution::Released {
            return Vec::new();
        }
        let tool = passed.authorization.tool();
        let mut revoked = tool
            .revoked_evidence(&trail.arguments, end.outcome.success().map(|output| &output.value));
        // A successful reported call revoked the old evidence before it produced its own.
        if passed.is_reported && end.outcome.success().is_some() {
            revoked.retain(|revoked| revoked.tool != tool.spec.name);
        }
        if let Some(provenance::MismatchedRun { arguments: ran, .. }) = &passed.mismatched_run {
            let ran = ran
                .as_ref()
                .map(|ran| self.0.redactor.redact_shared(Arc::new(ran.clone()), &tool.secrets))
                .unwrap_or_default();
            revoked.extend(tool.revoked_evidence(&ran, None));
        }
        revoked
    }

    /// Ends a rejected call.
    pub(crate) async fn end_rejected(&self, stop: Rejection, trail: Box<CallState>) -> Answer {
        self.end_rejected_with(stop, None, Vec::new(), trail).await
    }

    /// Ends a rejected call that may nevertheless have written values or revoked evidence.
    pub(crate) async fn end_rejected_with(
        &self,
        stop: Rejection,
        seen: Option<Box<ProvenanceUpdate>>,
        revoked: Vec<Revocation>,
        trail: Box<CallState>,
    ) -> Answer {
        let gate = stop.gate.unwrap_or_else(|| trail.gate());
        let end =
            Completion { decision: Decision::Refused, ..Completion::failed(*stop.error, gate) };
        self.end_without_changes(end, seen, revoked, false, trail).await
    }

    /// Ends an admitted call whose tool is no longer known.
    pub(crate) async fn end_without_tool(
        &self,
        blind: UnknownToolCompletion,
        intent: &ClaimRecord,
        trail: Box<CallState>,
    ) -> Answer {
        let mut end = Completion::failed(blind.error, Gate::Run);
        // A read counts as done if the client made it.
        if blind.has_run {
            end.resolution = ClaimResolution::Done;
        }
        let mut revoked = if end.resolution == ClaimResolution::Released {
            Vec::new()
        } else {
            intent.revokes.clone()
        };
        // If other arguments ran, the entity is unknown, so evidence about every entity is revoked.
        if blind.has_other_arguments {
            revoked.iter_mut().for_each(|revoked| revoked.about = None);
        }
        // A read can be repeated, so its outcome need not be replayed.
        self.end_without_changes(
            end,
            blind.provenance,
            revoked,
            intent.effect && !intent.recall.is_empty(),
            trail,
        )
        .await
    }

    /// Ends a call with the outcome of an earlier identical call.
    pub(crate) async fn end_replayed(&self, mut outcome: Outcome, trail: Box<CallState>) -> Answer {
        match &mut outcome {
            Outcome::Success(output) => output.replayed = true,
            Outcome::Error(error) => {
                error.replayed = true;
                // Do not suggest the same call as the next step: it would only be replayed again.
                error.next = error
                    .next
                    .take()
                    .filter(|next| *next.tool != *trail.tool || next.arguments != *trail.arguments);
            }
            Outcome::Signal(_) => {}
        }
        let effects = outcome.error().map_or(CallEffects::None, |error| error.effects);
        // The result may be new to this session, so record its provenance here too.
        let agent =
            self.0.agents.get(&trail.key.agent).filter(|agent| agent.tracked_sources.is_some());
        let files = agent.is_some_and(|agent| agent.resources.files().is_some());
        let seen = agent.and_then(|agent| agent.tools.get(&trail.tool)).map(|tool| {
            let entities = tool.spec.entities.iter().flat_map(|(name, path)| {
                TaintCarrier::entities(name, path.get_all(&trail.arguments))
            });
            let mut seen = ProvenanceUpdate::new(&trail.key.agent);
            seen.record_reads(entities);
            // The original files are unknown, so assume any file.
            seen.record_reads(files.then_some(TaintCarrier::UnknownFile));
            seen.record_untrusted(
                &provenance::model_visible_text(&outcome, None),
                tool.spec.untrusted,
            );
            Box::new(seen)
        });
        let end = Completion {
            outcome,
            gate: Gate::Recall,
            decision: Decision::Replayed,
            effects,
            resolution: ClaimResolution::Released,
            changes: None,
            outputs: Vec::new(),
            untruncated: None,
            result: None,
        };
        self.end_without_changes(end, seen, Vec::new(), false, trail).await
    }

    /// Records an end without state changes. A later call may replay the outcome if it is
    /// `recallable`.
    async fn end_without_changes(
        &self,
        end: Completion,
        seen: Option<Box<ProvenanceUpdate>>,
        revoked: Vec<Revocation>,
        recallable: bool,
        mut trail: Box<CallState>,
    ) -> Answer {
        trail.enter_gate(Gate::Record);
        let row = self.build_row(&end, &mut trail);
        // A poll that keeps being rejected makes no progress. The loop rejection itself is not a
        // result.
        let polls = end.gate != Gate::Progress
            && self.registered_tool(&trail).is_some_and(|tool| tool.spec.polling.is_some());
        let finish = Box::new(CommitRequest {
            ended: if end.decision == Decision::Replayed {
                None
            } else {
                self.call_end(&row, trail.requested_digest, end.result.filter(|_| polls))
            },
            row: Arc::clone(&row),
            version: 0,
            changes: None,
            revoked,
            provenance: seen,
            logs: Vec::new(),
            resolution: end.resolution,
            outcome: recallable.then(|| end.outcome.clone()),
            spent: None,
            outputs: Vec::new(),
            is_durable: self
                .registered_tool(&trail)
                .is_none_or(|tool| tool.spec.effect != Effect::Read),
        });
        self.record_completion(finish, end, row, &trail).await
    }

    /// Rolls back a failed call and notifies its policies.
    fn roll_back(
        &self,
        passed: &AdmittedCall,
        end: &mut Completion,
        txn: &mut CallTransaction,
        call: CallId,
        facts: &DecisionFacts,
    ) {
        if !roll_back_files(txn) {
            end.mark_unclean();
        }
        let tool = passed.authorization.tool();
        if let Outcome::Error(error) = &end.outcome {
            let ask = PolicyInput::new(
                call,
                &passed.key,
                &tool.spec,
                passed.authorization.arguments(),
                facts,
            );
            for policy in &tool.observers {
                if catch_unwind(AssertUnwindSafe(|| policy.on_rollback(&ask, error))).is_err() {
                    tracing::error!(policy = policy.name(), "policy panicked in `on_rollback`");
                }
            }
        }
    }

    fn commit_files(&self, txn: &mut CallTransaction, trail: &CallState) {
        if let Some(Err(error)) = txn.files.take().map(|mut files| files.commit()) {
            tracing::error!(call = %trail.id, %error, "cannot remove the undo entry of a file");
        }
    }

    fn publish_tool_events(&self, txn: &CallTransaction, trail: &CallState) {
        for (name, payload) in &txn.events {
            self.publish_event(&Event::Published {
                call: trail.id,
                key: trail.key.clone(),
                name: Arc::clone(name),
                payload: payload.clone(),
            });
        }
    }

    fn call_end(
        &self,
        row: &Row,
        asked: Option<toolgate_json::Digest>,
        result: Option<toolgate_json::Digest>,
    ) -> Option<CallEnd> {
        let retry_from = row.outcome.error().filter(|error| error.retryable).map(|error| {
            let wait = SignedDuration::from_millis(
                i64::try_from(error.retry_after_ms.unwrap_or(0)).unwrap_or(i64::MAX),
            );
            self.now().checked_add(wait).unwrap_or(jiff::Timestamp::MAX)
        });
        asked.map(|digest| CallEnd { digest, retry_from, result })
    }

    /// Builds the ledger row, redacted.
    fn build_row(&self, end: &Completion, trail: &mut CallState) -> Arc<Row> {
        let mut outcome = end.outcome.clone();
        match &mut outcome {
            Outcome::Error(error) => error.call_id = Some(trail.id),
            // `shape` redacts results, including those that are replayed.
            Outcome::Success(_) | Outcome::Signal(_) => {}
        }
        let facts = std::mem::take(&mut trail.facts);
        let row = Row {
            rule: trail.rule.take(),
            retries: trail.retries,
            spent: trail.spent,
            ..self.base_row(outcome, (end.decision, end.gate, end.effects), facts, trail)
        };
        let mut row = self.0.redactor.redact_row(row);
        // Latency excludes the time to write the row itself.
        row.latency = trail.latency();
        Arc::new(row)
    }

    /// Builds the row that is used if the call is abandoned. The store fills in the counter values.
    pub(crate) fn draft_abandoned_row(
        &self,
        effect: bool,
        charges: &[Charge],
        trail: &CallState,
    ) -> Arc<Row> {
        let (effects, so) = if effect {
            (CallEffects::Unknown, "it may have taken effect")
        } else {
            (CallEffects::None, "it only reads")
        };
        let message = format!(
            "call abandoned: the process ended or timed out before reporting a result; {so}"
        );
        let error = ToolError::from_code(error_code::ABANDONED, message).with_effects(effects);
        let end = (Decision::Failed, Gate::Run, effects);
        let mut facts = trail.facts.clone();
        facts.claimed = charges
            .iter()
            .map(|charge| (charge.counter.clone(), charge.window, Decimal::ZERO))
            .collect();
        Arc::new(self.0.redactor.redact_row(self.base_row(error.into(), end, facts, trail)))
    }

    /// Builds the fields that every row of a call has.
    fn base_row(
        &self,
        outcome: Outcome,
        (decision, gate, effects): (Decision, Gate, CallEffects),
        facts: Box<DecisionFacts>,
        trail: &CallState,
    ) -> Row {
        Row {
            call: trail.id,
            client_id: trail.client_id.clone(),
            at: trail.started,
            key: trail.key.clone(),
            turn: trail.turn,
            stop_reason: trail.stop_reason.clone(),
            tool: Arc::clone(&trail.tool),
            arguments: Arc::clone(&trail.arguments),
            entities: self.entities_of_call(&outcome, trail),
            digest: trail.digest,
            decision,
            gate,
            rule: None,
            facts,
            outcome,
            effects,
            latency: Latency::default(),
            retries: 0,
            spent: None,
            config: trail.config,
            settles: None,
        }
    }

    fn registered_tool(&self, trail: &CallState) -> Option<&Arc<ToolEntry>> {
        self.0.agents.get(&trail.key.agent)?.tools.get(&trail.tool)
    }

    /// Returns the entities of the call, from its arguments or else from its result.
    fn entities_of_call(
        &self,
        outcome: &Outcome,
        trail: &CallState,
    ) -> Vec<(Arc<str>, serde_json::Value)> {
        let Some(tool) = self.registered_tool(trail) else { return trail.entities.clone() };
        extract_entities(tool, &trail.arguments, outcome.success().map(|output| &output.value))
    }

    /// Writes the row to the spool because the store is unavailable, and tells the caller.
    fn spool_row(
        &self,
        end: Completion,
        row: Arc<Row>,
        error: &StoreError,
        trail: &CallState,
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
        let heard = unrecorded_error(error, end.effects);
        let end = Completion { outcome: heard.into(), gate: Gate::Record, ..end };
        self.finish_answer(end, row, None, trail)
    }

    fn finish_answer(
        &self,
        mut end: Completion,
        row: Arc<Row>,
        recorded: Option<LazyReceipt>,
        trail: &CallState,
    ) -> Answer {
        let rule = row.rule.clone();
        trail.span.record("toolgate.gate", end.gate.name());
        trail.span.record("toolgate.decision", end.decision.name());
        if let Outcome::Error(error) = &mut end.outcome {
            error.call_id = Some(trail.id);
            // Use the row's code, which is redacted. If the row could not be stored, the code is
            // toolgate's own.
            let code = row.code().filter(|_| end.gate != Gate::Record).unwrap_or(&error.code);
            trail.span.record("error.type", code);
            trail.span.record("otel.status_code", "ERROR");
        }
        self.publish_event(&Event::CallEnded(row));
        Answer { call: trail.id, gate: end.gate, rule, outcome: end.outcome, recorded }
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
