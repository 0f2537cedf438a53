//! Gate 4: was the same call made before? If so, its recorded outcome is the answer.

use std::sync::Arc;

use tokio::time::Instant;

use crate::agent::ToolEntry;
use crate::call::error::{CallEffects, ToolError};
use crate::call::error_code;
use crate::call::outcome::Outcome;
use crate::call::{Call, CheckedArguments, SessionKey};
use crate::ledger::row::Gate;
use crate::pipeline::Toolgate;
use crate::pipeline::admission::ResolvedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::explain::GateResult;
use crate::pipeline::gates::claim::lease_duration;
use crate::pipeline::gates::policy::evaluate_policies;
use crate::pipeline::rejection::{Rejection, busy_rejection};
use crate::pipeline::session_hold::SessionHold;
use crate::store::{
    DedupKey, LeaseRequest, PriorCall, SessionRequest, SessionSnapshot, prior_call_error,
};
use crate::tool::Effect;
use toolgate_json::Digest;

/// A call that goes on, or the outcome of an earlier identical call.
pub(crate) enum RecallOutcome {
    New(Box<SessionSnapshot>),
    Replay(Outcome),
}

/// Opens the session, and finds an earlier identical call.
///
/// From here until the commit, a tool with effects has exclusive access to the session.
pub(crate) async fn run(
    gate: &Toolgate,
    resolved: &ResolvedCall<'_>,
    arguments: &CheckedArguments,
    call_state: &mut CallState,
) -> Result<RecallOutcome, Rejection> {
    call_state.enter_gate(Gate::Recall);
    if call_state.explain.is_none() {
        // Append the rows of earlier calls first, including those that are still in the spool.
        gate.flush_spool().await?;
    }
    let snapshot = open_session(gate, resolved, arguments, call_state).await?;
    call_state.evidence_stamp = snapshot.state.stamp;
    if call_state.explain.is_some() {
        gate.explain_rules(resolved, arguments, &snapshot.state, call_state).await?;
    }
    match &snapshot.prior_call {
        None => Ok(RecallOutcome::New(snapshot)),
        Some(PriorCall::Settled(Some(outcome))) => {
            let outcome = outcome.clone();
            Box::pin(recheck_policies(gate, resolved, arguments, &outcome, &snapshot, call_state))
                .await?;
            if let Some(explain) = &mut call_state.explain {
                let reason = "the call was made before; its outcome is replayed";
                explain.note_gate(Gate::Recall, GateResult::Pass, Some(reason.to_owned()));
            }
            Ok(RecallOutcome::Replay(outcome))
        }
        Some(other) => Err(prior_call_error(other).into()),
    }
}

/// Leases the session, loads it and counts the call.
///
/// A tool with effects gets an exclusive lease, a read a shared one. A batch has one lease for all
/// its calls. An explained call leases and counts nothing.
async fn open_session(
    gate: &Toolgate,
    resolved: &ResolvedCall<'_>,
    arguments: &CheckedArguments,
    call_state: &mut CallState,
) -> Result<Box<SessionSnapshot>, Rejection> {
    let ResolvedCall { call, tool, .. } = resolved;
    call_state.requested_digest = Some(arguments.digest());
    let recall = dedup_keys(call, tool, arguments.digest());
    let time_left =
        call_state.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let wait =
        time_left.map_or(gate.0.busy_timeout, |time_left| time_left.min(gate.0.busy_timeout));
    let request = SessionRequest {
        key: &call.key,
        digest: arguments.digest(),
        dedup_keys: &recall,
        counts_repetition: resolved.approval.is_none(),
        polling: tool.spec.polling.as_ref(),
        lease: (resolved.batch.is_none() && call_state.explain.is_none()).then(|| LeaseRequest {
            is_exclusive: tool.spec.effect != Effect::Read,
            timeout: wait,
            term: lease_duration(tool.spec.timeout.saturating_add(call_state.lease_slack)),
        }),
    };
    if call_state.explain.is_some() {
        return Ok(gate.0.store.inspect_session(request).await?);
    }
    let snapshot = tokio::select! {
        biased;
        snapshot = gate.0.store.open_session(request) => snapshot?,
        () = call_state.cancel.cancelled() => return Err(Rejection::at_gate(Gate::Claim, ToolError::from_code(error_code::CANCELLED, "the call was cancelled before it began"))),
    };
    let mut snapshot = snapshot.ok_or_else(busy_rejection)?;
    call_state.session_hold =
        snapshot.lease.take().map(|lease| SessionHold::new(&gate.0.store, lease));
    (call_state.started, call_state.facts.now) = (snapshot.now, snapshot.now);
    call_state.facts.after = Some(snapshot.row_count);
    call_state.facts.opened = Some(snapshot.started_at);
    (call_state.facts.recalled, call_state.facts.recalled_by) =
        (snapshot.prior_call.as_ref().map(PriorCall::fact), snapshot.dedup_key_kind);
    call_state.facts.progress = Some(snapshot.repetitions);
    Ok(snapshot)
}

/// Checks that the caller may still make a call whose earlier outcome would be replayed.
async fn recheck_policies(
    gate: &Toolgate,
    resolved: &ResolvedCall<'_>,
    arguments: &CheckedArguments,
    outcome: &Outcome,
    snapshot: &SessionSnapshot,
    call_state: &mut CallState,
) -> Result<(), Rejection> {
    let ResolvedCall { call, agent, tool, .. } = resolved;
    gate.load_facts(resolved, arguments, &snapshot.state, call_state).await?;
    // Business rules limit new actions, and a replay is none. Permission denials apply to
    // replays too, even if a business denial has precedence.
    let decision = evaluate_policies(
        &*gate.0.engine,
        call_state.id,
        &call.key,
        tool,
        arguments.clone(),
        &call_state.facts,
        Vec::new(),
    );
    let Some((rule, error)) = decision.err().and_then(|denied| denied.permission_denial) else {
        return Ok(());
    };
    call_state.rule = Some(rule);
    // The outcome is withheld, but the earlier call had its effects.
    let done = if tool.spec.effect == Effect::Read { CallEffects::None } else { CallEffects::Done };
    let error = error.with_effects(outcome.error().map_or(done, |error| error.effects));
    Err(gate.strip_unreachable_redirects(error, agent, &call.key).await.into())
}

/// Returns the keys under which a call is recalled: the client's key and, for a tool declared
/// `once`, its arguments.
///
/// The second key prevents a client from repeating a `once` call under another key.
pub(crate) fn dedup_keys(call: &Call, tool: &ToolEntry, digest: Digest) -> Vec<DedupKey> {
    let by_key =
        call.idempotency_key.as_ref().map(|key| dedup_key(&call.key, tool, format!("key:{key}")));
    by_key.into_iter().chain(once_key(&call.key, tool, digest)).collect()
}

/// Returns the key under which a call of a `once` tool is recalled.
pub(crate) fn once_key(key: &SessionKey, tool: &ToolEntry, digest: Digest) -> Option<DedupKey> {
    tool.spec.once.then(|| dedup_key(key, tool, format!("once:{digest}")))
}

fn dedup_key(of: &SessionKey, tool: &ToolEntry, key: String) -> DedupKey {
    DedupKey {
        principal: Arc::clone(&of.principal),
        agent: Arc::clone(&of.agent),
        tool: Arc::clone(&tool.spec.name),
        key,
    }
}
