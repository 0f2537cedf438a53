//! Ends calls that do not reach their tool here: rejected, replayed, or reported without a tool.

use std::sync::Arc;

use crate::call::error::{CallEffects, ToolError};
use crate::call::outcome::{Answer, Outcome};
use crate::ledger::row::{Decision, Gate};
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::settle::Completion;
use crate::pipeline::rejection::Rejection;
use crate::pipeline::{Toolgate, provenance};
use crate::provenance::{ProvenanceUpdate, TaintCarrier};
use crate::session::state::Revocation;
use crate::store::{ClaimRecord, ClaimResolution, CommitRequest};
use crate::tool::Effect;

/// Describes a reported call whose tool no longer exists.
pub(crate) struct UnknownToolCompletion {
    pub(crate) error: ToolError,
    /// The client reports that the call ran.
    pub(crate) has_run: bool,
    /// The call ran with other arguments than the admitted ones, or with unknown arguments.
    pub(crate) has_other_arguments: bool,
    pub(crate) provenance: Option<Box<ProvenanceUpdate>>,
}

impl Toolgate {
    /// Ends a rejected call.
    pub(crate) async fn end_rejected(&self, stop: Rejection, call_state: Box<CallState>) -> Answer {
        self.end_rejected_with(stop, None, Vec::new(), call_state).await
    }

    /// Ends a rejected call that may nevertheless have written values or revoked evidence.
    pub(crate) async fn end_rejected_with(
        &self,
        stop: Rejection,
        update: Option<Box<ProvenanceUpdate>>,
        revoked: Vec<Revocation>,
        call_state: Box<CallState>,
    ) -> Answer {
        let gate = stop.gate.unwrap_or_else(|| call_state.gate());
        let end =
            Completion { decision: Decision::Refused, ..Completion::failed(*stop.error, gate) };
        self.end_without_changes(end, update, revoked, false, call_state).await
    }

    /// Ends an admitted call whose tool does not exist any more.
    pub(crate) async fn end_without_tool(
        &self,
        completion: UnknownToolCompletion,
        claim: &ClaimRecord,
        call_state: Box<CallState>,
    ) -> Answer {
        let mut end = Completion::failed(completion.error, Gate::Run);
        // A read counts as done if the client made it.
        if completion.has_run {
            end.resolution = ClaimResolution::Done;
        }
        let mut revoked = if end.resolution == ClaimResolution::Released {
            Vec::new()
        } else {
            claim.revokes.clone()
        };
        // If other arguments ran, the entity is unknown, so evidence about every entity is revoked.
        if completion.has_other_arguments {
            revoked.iter_mut().for_each(|revoked| revoked.about = None);
        }
        // A read can be repeated, so its outcome need not be replayed.
        self.end_without_changes(
            end,
            completion.provenance,
            revoked,
            claim.effect && !claim.recall.is_empty(),
            call_state,
        )
        .await
    }

    /// Ends a call with the outcome of an earlier identical call.
    pub(crate) async fn end_replayed(
        &self,
        mut outcome: Outcome,
        call_state: Box<CallState>,
    ) -> Answer {
        match &mut outcome {
            Outcome::Success(output) => output.replayed = true,
            Outcome::Error(error) => {
                error.replayed = true;
                // Do not suggest the same call as the next step: it would only be replayed again.
                error.next = error.next.take().filter(|next| {
                    *next.tool != *call_state.tool || next.arguments != *call_state.arguments
                });
            }
            Outcome::Signal(_) => {}
        }
        let effects = outcome.error().map_or(CallEffects::None, |error| error.effects);
        // The result may be new to this session, so record its provenance here too.
        let agent = self
            .0
            .agents
            .get(&call_state.key.agent)
            .filter(|agent| agent.tracked_sources.is_some());
        let files = agent.is_some_and(|agent| agent.resources.files().is_some());
        let update = agent.and_then(|agent| agent.tools.get(&call_state.tool)).map(|tool| {
            let entities = tool.spec.entities.iter().flat_map(|(name, path)| {
                TaintCarrier::entities(name, path.get_all(&call_state.arguments))
            });
            let mut update = ProvenanceUpdate::new(&call_state.key.agent);
            update.record_reads(entities);
            // The original files are unknown, so assume any file.
            update.record_reads(files.then_some(TaintCarrier::UnknownFile));
            update.record_untrusted(
                &provenance::model_visible_text(&outcome, None),
                tool.spec.untrusted,
            );
            Box::new(update)
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
        self.end_without_changes(end, update, Vec::new(), false, call_state).await
    }

    /// Records an end without state changes. A later call may replay the outcome if it is
    /// `recallable`.
    async fn end_without_changes(
        &self,
        end: Completion,
        update: Option<Box<ProvenanceUpdate>>,
        revoked: Vec<Revocation>,
        recallable: bool,
        mut call_state: Box<CallState>,
    ) -> Answer {
        // The call changes nothing, so the next call need not wait for its row.
        call_state.session_hold = None;
        call_state.enter_gate(Gate::Record);
        let row = self.build_row(&end, &mut call_state);
        // A poll that keeps being rejected makes no progress. The loop rejection itself is not a
        // result.
        let polls = end.gate != Gate::Progress
            && self.registered_tool(&call_state).is_some_and(|tool| tool.spec.polling.is_some());
        let request = Box::new(CommitRequest {
            ended: if end.decision == Decision::Replayed {
                None
            } else {
                self.call_end(&row, call_state.requested_digest, end.result.filter(|_| polls))
            },
            row: Arc::clone(&row),
            version: 0,
            changes: None,
            revoked,
            provenance: update,
            logs: Vec::new(),
            resolution: end.resolution,
            outcome: recallable.then(|| end.outcome.clone()),
            spent: None,
            outputs: Vec::new(),
            items: Vec::new(),
            is_durable: self
                .registered_tool(&call_state)
                .is_none_or(|tool| tool.spec.effect != Effect::Read),
        });
        self.record_completion(request, end, row, &call_state).await
    }
}
