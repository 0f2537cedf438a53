//! Implements gates 13 and 14: commits or rolls back a call and writes its ledger row. Every call
//! ends here.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use jiff::SignedDuration;
use rust_decimal::Decimal;

use super::run::{Failed, Ran, resolve_effects, roll_back_files};
use crate::agent::Registered;
use crate::call::CallId;
use crate::call::error::{Effects, ToolError};
use crate::call::error_code;
use crate::call::event::Event;
use crate::call::outcome::{Answer, Outcome};
use crate::ledger::row::{Decision, Gate, Latency, Recorded, Row};
use crate::limits::Charge;
use crate::pipeline::admission::Passed;
use crate::pipeline::call_state::Trail;
use crate::pipeline::mask_secrets::Secrets;
use crate::pipeline::{Stop, Toolgate, provenance};
use crate::policy::{Ask, Facts};
use crate::provenance::{Carrier, Seen};
use crate::session::repetition::Ended;
use crate::session::state::{Changes, Revoked};
use crate::store::{Conflict, Finish, Intent, Settle, StoreError};
use crate::tool::Effect;
use crate::tool::context::Txn;
use toolgate_json;
use toolgate_text::shown;

/// Describes how a call ends.
struct End {
    outcome: Outcome,
    gate: Gate,
    decision: Decision,
    effects: Effects,
    resolution: Settle,
    changes: Option<Changes>,
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
    pub(crate) ran: bool,
    /// The call ran with other arguments than the admitted ones, or with unknown arguments.
    pub(crate) is_other: bool,
    pub(crate) seen: Option<Box<Seen>>,
}

impl End {
    fn failed(error: ToolError, gate: Gate) -> Self {
        let effects = error.effects;
        // A poll that keeps failing in the same way makes no progress either.
        let result = (!error.retryable).then(|| toolgate_json::Digest::of(error.code.as_bytes()));
        Self {
            outcome: error.into(),
            gate,
            decision: Decision::Failed,
            effects,
            resolution: Settle::by(effects),
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
        self.effects = Effects::Unknown;
        self.resolution = Settle::Pending;
        if let Outcome::Error(error) = &mut self.outcome {
            **error = (**error).clone().with_effects(Effects::Unknown);
            error.retry_after_ms = None;
        }
    }

    /// Rewrites a row that was not stored, for a call that ended differently.
    fn rewrite_row(&self, row: &Row) -> Row {
        let mut outcome = self.outcome.clone();
        if let Outcome::Error(error) = &mut outcome {
            error.call_id = Some(row.call);
        }
        Row { outcome, gate: self.gate, decision: self.decision, effects: self.effects, ..row.clone() }
    }
}

impl Toolgate {
    /// Ends an admitted call.
    pub(crate) async fn settle_call(&self, passed: Box<Passed>, ran: Ran, mut trail: Box<Trail>) -> Answer {
        let Ran { result, mut txn, is_empty: empty, is_unclean: unclean, has_started: begun } = ran;
        let tool = passed.authorization.tool();
        let end = match result {
            Ok(value) => {
                trail.enter_gate(Gate::Shape);
                match self.shape_result(value, empty, &passed, &mut txn, &mut trail).await {
                    Ok(shaped) => End {
                        outcome: Outcome::Success(shaped.output),
                        gate: Gate::Run,
                        decision: Decision::Succeeded,
                        effects: if tool.spec.effect == Effect::Read { Effects::None } else { Effects::Done },
                        resolution: Settle::Done,
                        changes: Some(shaped.changes),
                        outputs: shaped.stored.into_iter().collect(),
                        untruncated: shaped.untruncated,
                        result: shaped.digest,
                    },
                    Err(error) => End::failed(error.with_effects(passed.effects_of_run()), Gate::Shape),
                }
            }
            Err(failure) => match resolve_effects(failure, &passed) {
                Failed::Error(mut error) => {
                    Secrets::from_arguments(passed.authorization.arguments().value(), tool).mask_error(&mut error);
                    // The tool's redirect is unverified. If the caller cannot use the target, the
                    // error remains and the redirect is dropped.
                    let to = error.redirect_tool.clone();
                    let error = Box::pin(self.strip_unreachable_redirects(*error, &passed.agent, &passed.key)).await;
                    if let Some(to) = to.filter(|_| error.redirect_tool.is_none()) {
                        tracing::warn!(tool = tool.spec.name(), to = %shown(&to), "a tool redirects to a tool that this caller cannot use");
                    }
                    End::failed(error, Gate::Run)
                }
                // A signal asks for something before the tool acts, so nothing has happened yet.
                Failed::Signal(mut signal) => {
                    Secrets::from_arguments(passed.authorization.arguments().value(), tool).mask_signal(&mut signal);
                    End {
                        outcome: Outcome::Signal(signal),
                        gate: Gate::Run,
                        decision: Decision::Signalled,
                        effects: Effects::None,
                        resolution: Settle::Released,
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
        let end = if begun { end } else { End { decision: Decision::Refused, ..end } };
        Box::pin(self.commit_call(passed, end, txn, trail)).await
    }

    /// Commits state and row in one transaction.
    ///
    /// A success that cannot be committed is a failure, and is recorded as a failure.
    fn commit_call(&self, mut passed: Box<Passed>, mut end: End, mut txn: Txn, mut trail: Box<Trail>) -> impl Future<Output = Answer> {
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
            match self.0.store.finish(finish).await {
                Ok(Ok(receipt)) => {
                    if kept {
                        self.commit_files(&mut txn, &trail);
                        self.publish_tool_events(&txn, &trail);
                    }
                    self.try_flush_spool().await;
                    self.finish_answer(end, row, receipt, &trail)
                }
                // Another call committed first. This call is recorded, but its changes are dropped.
                Ok(Err(Conflict)) => Box::pin(self.end_conflicting(passed, row, txn, trail)).await,
                Err(error) if kept => {
                    let heard = unrecorded_error(&error, passed.effects_of_run());
                    let mut end = End::failed(heard, Gate::Record);
                    self.roll_back(&passed, &mut end, &mut txn, trail.id, &row.facts);
                    let row = Arc::new(end.rewrite_row(&row));
                    self.spool_row(end, row, &error, &trail)
                }
                Err(error) => self.spool_row(end, row, &error, &trail),
            }
        }
    }

    async fn end_conflicting(&self, passed: Box<Passed>, row: Arc<Row>, mut txn: Txn, trail: Box<Trail>) -> Answer {
        let error =
            ToolError::of(error_code::CONFLICT, "another call changed this session first, so the changes of this call were dropped");
        let mut end = End::failed(with_retry_delay(100, error.with_effects(passed.effects_of_run())), Gate::Settle);
        self.roll_back(&passed, &mut end, &mut txn, trail.id, &row.facts);
        let row = Arc::new(end.rewrite_row(&row));
        let finish = self.commit_request(&row, &trail, &mut end, &passed, &mut txn);
        self.record_completion(finish, end, row, &trail).await
    }

    /// Records an end that cannot conflict with another call.
    async fn record_completion(&self, finish: Box<Finish>, end: End, row: Arc<Row>, trail: &Trail) -> Answer {
        match self.0.store.finish(finish).await {
            Ok(receipt) => {
                self.try_flush_spool().await;
                self.finish_answer(end, row, receipt.ok().flatten(), trail)
            }
            Err(error) => self.spool_row(end, row, &error, trail),
        }
    }

    fn commit_request(&self, row: &Arc<Row>, trail: &Trail, end: &mut End, passed: &Passed, txn: &mut Txn) -> Box<Finish> {
        let polled = passed.authorization.tool().spec.polling.is_some().then_some(end.result).flatten();
        Box::new(Finish {
            ended: self.call_end(row, trail.requested_digest, polled),
            row: Arc::clone(row),
            version: passed.version,
            changes: end.changes.take(),
            revoked: self.revoked_evidence(passed, end, trail),
            provenance: provenance::call_provenance(passed, (&end.outcome, end.untruncated.as_ref()), end.resolution, txn),
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
    fn revoked_evidence(&self, passed: &Passed, end: &End, trail: &Trail) -> Vec<Revoked> {
        if end.resolution == Settle::Released {
            return Vec::new();
        }
        let tool = passed.authorization.tool();
        let mut revoked = tool.takes_away(&trail.arguments, end.outcome.success().map(|output| &output.value));
        // A successful reported call revoked the old evidence before it produced its own.
        if passed.is_reported && end.outcome.success().is_some() {
            revoked.retain(|revoked| revoked.tool != tool.spec.name);
        }
        if let Some(provenance::Otherwise { arguments: ran, .. }) = &passed.mismatched_run {
            let ran = ran.as_ref().map(|ran| self.0.redactor.redact_shared(Arc::new(ran.clone()), &tool.secrets)).unwrap_or_default();
            revoked.extend(tool.takes_away(&ran, None));
        }
        revoked
    }

    /// Ends a rejected call.
    pub(crate) async fn end_rejected(&self, stop: Stop, trail: Box<Trail>) -> Answer {
        self.end_rejected_with(stop, None, Vec::new(), trail).await
    }

    /// Ends a rejected call that may nevertheless have written values or revoked evidence.
    pub(crate) async fn end_rejected_with(&self, stop: Stop, seen: Option<Box<Seen>>, revoked: Vec<Revoked>, trail: Box<Trail>) -> Answer {
        let gate = stop.gate.unwrap_or_else(|| trail.gate());
        let end = End { decision: Decision::Refused, ..End::failed(*stop.error, gate) };
        self.end_without_changes(end, seen, revoked, false, trail).await
    }

    /// Ends an admitted call whose tool is no longer known.
    pub(crate) async fn end_without_tool(&self, blind: UnknownToolCompletion, intent: &Intent, trail: Box<Trail>) -> Answer {
        let mut end = End::failed(blind.error, Gate::Run);
        // A read counts as done if the client made it.
        if blind.ran {
            end.resolution = Settle::Done;
        }
        let mut revoked = if end.resolution == Settle::Released { Vec::new() } else { intent.revokes.clone() };
        // If other arguments ran, the entity is unknown, so evidence about every entity is revoked.
        if blind.is_other {
            revoked.iter_mut().for_each(|revoked| revoked.about = None);
        }
        // A read can be repeated, so its outcome need not be replayed.
        self.end_without_changes(end, blind.seen, revoked, intent.effect && !intent.recall.is_empty(), trail).await
    }

    /// Ends a call with the outcome of an earlier identical call.
    pub(crate) async fn end_replayed(&self, mut outcome: Outcome, trail: Box<Trail>) -> Answer {
        match &mut outcome {
            Outcome::Success(output) => output.replayed = true,
            Outcome::Error(error) => {
                error.replayed = true;
                // Do not suggest the same call as the next step: it would only be replayed again.
                error.next = error.next.take().filter(|next| *next.tool != *trail.tool || next.arguments != *trail.arguments);
            }
            Outcome::Signal(_) => {}
        }
        let effects = outcome.error().map_or(Effects::None, |error| error.effects);
        // The result may be new to this session, so record its provenance here too.
        let agent = self.0.agents.get(&trail.key.agent).filter(|agent| agent.tracked_sources.is_some());
        let files = agent.is_some_and(|agent| agent.resources.files().is_some());
        let seen = agent.and_then(|agent| agent.tools.get(&trail.tool)).map(|tool| {
            let entities = tool.spec.entities.iter().flat_map(|(name, path)| Carrier::entities(name, path.get_all(&trail.arguments)));
            let mut seen = Seen::new(&trail.key.agent);
            seen.read_from(entities);
            // The original files are unknown, so assume any file.
            seen.read_from(files.then_some(Carrier::UnknownFile));
            seen.distrust(&provenance::model_visible_text(&outcome, None), tool.spec.untrusted);
            Box::new(seen)
        });
        let end = End {
            outcome,
            gate: Gate::Recall,
            decision: Decision::Replayed,
            effects,
            resolution: Settle::Released,
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
        end: End,
        seen: Option<Box<Seen>>,
        revoked: Vec<Revoked>,
        recallable: bool,
        mut trail: Box<Trail>,
    ) -> Answer {
        trail.enter_gate(Gate::Record);
        let row = self.build_row(&end, &mut trail);
        // A poll that keeps being rejected makes no progress. The loop rejection itself is not a
        // result.
        let polls = end.gate != Gate::Progress && self.registered_tool(&trail).is_some_and(|tool| tool.spec.polling.is_some());
        let finish = Box::new(Finish {
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
            is_durable: self.registered_tool(&trail).is_none_or(|tool| tool.spec.effect != Effect::Read),
        });
        self.record_completion(finish, end, row, &trail).await
    }

    /// Rolls back a failed call and notifies its policies.
    fn roll_back(&self, passed: &Passed, end: &mut End, txn: &mut Txn, call: CallId, facts: &Facts) {
        if !roll_back_files(txn) {
            end.mark_unclean();
        }
        let tool = passed.authorization.tool();
        if let Outcome::Error(error) = &end.outcome {
            let ask = Ask::new(call, &passed.key, &tool.spec, passed.authorization.arguments(), facts);
            for policy in &tool.observers {
                if catch_unwind(AssertUnwindSafe(|| policy.on_rollback(&ask, error))).is_err() {
                    tracing::error!(policy = policy.name(), "policy panicked in `on_rollback`");
                }
            }
        }
    }

    fn commit_files(&self, txn: &mut Txn, trail: &Trail) {
        if let Some(Err(error)) = txn.files.take().map(|mut files| files.commit()) {
            tracing::error!(call = %trail.id, %error, "cannot remove the undo entry of a file");
        }
    }

    fn publish_tool_events(&self, txn: &Txn, trail: &Trail) {
        for (name, payload) in &txn.events {
            self.publish_event(&Event::Published {
                call: trail.id,
                key: trail.key.clone(),
                name: Arc::clone(name),
                payload: payload.clone(),
            });
        }
    }

    fn call_end(&self, row: &Row, asked: Option<toolgate_json::Digest>, result: Option<toolgate_json::Digest>) -> Option<Ended> {
        let retry_from = row.outcome.error().filter(|error| error.retryable).map(|error| {
            let wait = SignedDuration::from_millis(i64::try_from(error.retry_after_ms.unwrap_or(0)).unwrap_or(i64::MAX));
            self.now().checked_add(wait).unwrap_or(jiff::Timestamp::MAX)
        });
        asked.map(|digest| Ended { digest, retry_from, result })
    }

    /// Builds the ledger row, redacted.
    fn build_row(&self, end: &End, trail: &mut Trail) -> Arc<Row> {
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
        let mut row = self.0.redactor.row(row);
        // Latency excludes the time to write the row itself.
        row.latency = trail.latency();
        Arc::new(row)
    }

    /// Builds the row that is used if the call is abandoned. The store fills in the counter values.
    pub(crate) fn draft_abandoned_row(&self, effect: bool, charges: &[Charge], trail: &Trail) -> Arc<Row> {
        let (effects, so) = if effect { (Effects::Unknown, "it may have taken effect") } else { (Effects::None, "it only reads") };
        let message = format!("call abandoned: the process ended or timed out before reporting a result; {so}");
        let error = ToolError::of(error_code::ABANDONED, message).with_effects(effects);
        let end = (Decision::Failed, Gate::Run, effects);
        let mut facts = trail.facts.clone();
        facts.claimed = charges.iter().map(|charge| (charge.counter.clone(), charge.window, Decimal::ZERO)).collect();
        Arc::new(self.0.redactor.row(self.base_row(error.into(), end, facts, trail)))
    }

    /// Builds the fields that every row of a call has.
    fn base_row(&self, outcome: Outcome, (decision, gate, effects): (Decision, Gate, Effects), facts: Box<Facts>, trail: &Trail) -> Row {
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

    fn registered_tool(&self, trail: &Trail) -> Option<&Arc<Registered>> {
        self.0.agents.get(&trail.key.agent)?.tools.get(&trail.tool)
    }

    /// Returns the entities of the call, from its arguments or else from its result.
    fn entities_of_call(&self, outcome: &Outcome, trail: &Trail) -> Vec<(Arc<str>, serde_json::Value)> {
        let Some(tool) = self.registered_tool(trail) else { return trail.entities.clone() };
        extract_entities(tool, &trail.arguments, outcome.success().map(|output| &output.value))
    }

    /// Writes the row to the spool because the store is unavailable, and tells the caller.
    fn spool_row(&self, end: End, row: Arc<Row>, error: &StoreError, trail: &Trail) -> Answer {
        if let Err(spool) = self.0.spool.put(&row) {
            tracing::error!(%spool, path = %self.0.spool.path().display(), row = %serde_json::to_string(&*row).unwrap_or_default(), "cannot store or spool a ledger row; it stays in memory until the store accepts it");
        }
        if let Some(agent) = self.0.agents.get(&row.key.agent).filter(|agent| agent.definition_digest == row.config)
            && let Err(error) = self.0.spool.keep(agent.definition_digest, &agent.definition)
        {
            tracing::warn!(%error, "cannot save the agent definition of a spooled row next to the spool");
        }
        let heard = unrecorded_error(error, end.effects);
        let end = End { outcome: heard.into(), gate: Gate::Record, ..end };
        self.finish_answer(end, row, None, trail)
    }

    fn finish_answer(&self, mut end: End, row: Arc<Row>, recorded: Option<Recorded>, trail: &Trail) -> Answer {
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
    tool: &Registered,
    arguments: &serde_json::Value,
    result: Option<&serde_json::Value>,
) -> Vec<(Arc<str>, serde_json::Value)> {
    let about = |(name, path): &(Arc<str>, toolgate_json::Pointer)| {
        let found = path.get(arguments).filter(|value| !value.is_null()).or_else(|| result.and_then(|value| path.get(value)));
        found.filter(|value| !value.is_null()).map(|value| (Arc::clone(name), toolgate_json::with_canonical_numbers(value.clone())))
    };
    tool.spec.entities.iter().filter_map(about).collect()
}

fn unrecorded_error(error: &StoreError, effects: Effects) -> ToolError {
    tracing::error!(%error, "cannot record a call in the store");
    with_retry_delay(1_000, ToolError::of(error_code::STORE_UNAVAILABLE, "the store could not record the call").with_effects(effects))
}

/// Adds a retry delay to a retryable error.
fn with_retry_delay(ms: u64, error: ToolError) -> ToolError {
    if error.retryable { error.retry_after_ms(ms) } else { error }
}
