//! Gate 10: reserves the limits, uses the approval and records the claim, in one transaction.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;

use crate::agent::ToolEntry;
use crate::call::Call;
use crate::call::error::ToolError;
use crate::call::error_code;
use crate::call::outcome::Outcome;
use crate::ledger::row::Gate;
use crate::limits::Charge;
use crate::pipeline::Toolgate;
use crate::pipeline::admission::{Admission, AdmittedCall, ResolvedCall};
use crate::pipeline::call_state::CallState;
use crate::pipeline::deferred::DeferredState;
use crate::pipeline::explain::GateResult;
use crate::pipeline::gates::limits::CallBudget;
use crate::pipeline::gates::policy::{Authorization, Permit};
use crate::pipeline::gates::recall::dedup_keys;
use crate::pipeline::rejection::{Rejection, paused_target_error};
use crate::policy::{DedupKeyKind, ObservedVerdict};
use crate::store::{
    ClaimError, ClaimOwner, ClaimRecord, ClaimRequest, DedupKey, PriorCall, SessionSnapshot,
    prior_call_error, with_limit_details,
};
use crate::tool::Effect;
use toolgate_json::Digest;

/// Lease of a deferred call whose client does not come back.
const DEFERRED_LEASE_TTL: std::time::Duration = std::time::Duration::from_secs(24 * 60 * 60);

/// Result of the claim.
enum ClaimOutcome {
    /// Everything that must be settled later is claimed.
    Claimed,
    /// An identical call was first and has ended.
    Replay(Outcome),
}

/// Claims the call.
pub(crate) async fn run(
    gate: &Toolgate,
    resolved: ResolvedCall<'_>,
    permit: Permit,
    approval: Option<(String, Timestamp)>,
    budget: CallBudget,
    snapshot: Box<SessionSnapshot>,
    call_state: &mut CallState,
) -> Result<Admission, Rejection> {
    call_state.enter_gate(Gate::Claim);
    let ResolvedCall { call, agent, tool, batch, .. } = resolved;
    let keys = all_dedup_keys(call, &tool, call_state.requested_digest, &permit);
    let is_recallable = !keys.is_empty();
    let claimed = if call_state.explain.is_some() {
        predict_claim(gate, &permit, budget.charges, call_state).await
    } else {
        claim_call(gate, call, &permit, budget.charges, keys, approval, call_state).await
    };
    match claimed {
        Ok(ClaimOutcome::Claimed) => {}
        Ok(ClaimOutcome::Replay(outcome)) => return Ok(Admission::Replay(outcome)),
        Err(rejection) => {
            let session = batch.unwrap_or(&snapshot.state);
            let rejected = gate.reject_unclaimed(rejection, &permit, &agent, session, call_state);
            return Err(Box::pin(rejected).await);
        }
    }
    Ok(Admission::Admitted(Box::new(AdmittedCall {
        agent,
        authorization: Authorization::Run(permit),
        version: snapshot.version,
        state: Some(snapshot.state),
        remaining: budget.remaining,
        is_recallable,
        key: call.key.clone(),
        is_reported: false,
        mismatched_run: None,
    })))
}

/// Stores the intent, reserves the limits and uses the approval, all in one
/// transaction.
async fn claim_call(
    gate: &Toolgate,
    call: &Call,
    permit: &Permit,
    budget: Vec<(Charge, ToolError)>,
    recall: Vec<DedupKey>,
    approval: Option<(String, Timestamp)>,
    call_state: &mut CallState,
) -> Result<ClaimOutcome, Rejection> {
    // The approval may have expired while the call waited for its session or for a hook.
    if approval.as_ref().is_some_and(|(_, expires)| gate.now() > *expires) {
        return Err(approval_gone_rejection());
    }
    let tool = permit.tool();
    let effect = tool.spec.effect != Effect::Read;
    let uncharged = permit.charges().is_empty() && permit.observed_charges().is_empty();
    // A read that runs here leaves nothing that a later call could read, so its provenance can
    // wait.
    let ahead = effect || call_state.is_run_by_client;
    let agent = gate.0.agents.get(&call.key.agent).filter(|_| ahead);
    let intended = agent.map(|agent| {
        crate::pipeline::provenance::intended_writes(agent, &tool.spec, permit.arguments().value())
    });
    let (update, carriers) = intended.unwrap_or_default();
    let may_revoke = call_state.is_run_by_client && !tool.spec.revokes.is_empty();
    let nothing = recall.is_empty()
        && budget.is_empty()
        && uncharged
        && approval.is_none()
        && call_state.deferred_id.is_none()
        && update.is_none();
    if !effect && nothing && !may_revoke {
        return Ok(ClaimOutcome::Claimed);
    }
    let observed = observed_charges(gate, permit, call_state).await?;
    let budget_charges = budget.into_iter().map(|(charge, error)| (charge, (None, error)));
    let rule_charges =
        permit.charges().iter().cloned().map(|(rule, charge, error)| (charge, (Some(rule), error)));
    let (mut charges, sources): (Vec<Charge>, Vec<(Option<String>, ToolError)>) =
        budget_charges.chain(rule_charges).unzip();
    charges.extend(observed);
    let deferred_id = call_state.deferred_id.clone();
    let pass = match deferred_id {
        Some(client) => Some((client, DeferredState::capture(permit, gate.now(), call_state)?)),
        None => None,
    };
    // The client may ask a person first, so the lease is long. A client that closes its session
    // ends it.
    let time = if pass.is_some() {
        DEFERRED_LEASE_TTL
    } else {
        tool.spec.timeout.saturating_add(call_state.lease_slack)
    };
    let record = Box::new(ClaimRecord {
        call: call_state.id,
        key: call.key.clone(),
        tool: Arc::clone(&tool.spec.name),
        digest: permit.arguments().digest(),
        asked: call_state.requested_digest.unwrap_or_else(|| permit.arguments().digest()),
        recall,
        // A call that the client runs outlives this process, which cannot tell whether the
        // client is alive.
        owner: if call_state.is_run_by_client {
            ClaimOwner::ClientSession(Arc::clone(&call.key.session))
        } else {
            ClaimOwner::Term(Arc::clone(&gate.0.term))
        },
        lease: Timestamp::MAX,
        effect,
        // If the process dies before the end, this row is recorded.
        row: ((effect || pass.is_some()) && gate.0.store.outlives_process())
            .then(|| gate.draft_abandoned_row(effect, &charges, call_state)),
        pass,
        carriers,
        seen: update,
        revokes: tool.revoked_evidence(&call_state.arguments, None),
    });
    let approval = approval.as_ref().map(|(id, _)| id.as_str());
    let request = ClaimRequest {
        record,
        lease_ttl: lease_duration(time),
        charges: &charges,
        approval,
        items: Vec::new(),
    };
    let claimed = gate.0.store.claim(request).await?;
    let used = match &claimed {
        Ok(used) => used.clone(),
        // Includes the amounts that earlier charges of this call take from the same counter.
        Err(ClaimError::LimitExceeded { index, error: exceeded, used }) => {
            let (before, full) = charges.split_at((*index).min(charges.len()));
            let same = |c: &&Charge| {
                full.first()
                    .is_some_and(|full| full.counter == c.counter && full.window == c.window)
            };
            let reserved = before
                .iter()
                .filter(same)
                .fold(exceeded.used, |sum, c| sum.saturating_add(c.amount));
            used.iter().copied().chain([reserved]).collect()
        }
        Err(_) => Vec::new(),
    };
    call_state.facts.claimed = charges
        .into_iter()
        .zip(used)
        .map(|(charge, used)| (charge.counter, charge.window, used))
        .collect();
    match claimed {
        Ok(_) => Ok(ClaimOutcome::Claimed),
        Err(ClaimError::PriorCall(recalled, by)) => {
            (call_state.facts.recalled, call_state.facts.recalled_by) =
                (Some(recalled.fact()), Some(by));
            match recalled {
                PriorCall::Settled(Some(outcome)) => Ok(ClaimOutcome::Replay(outcome)),
                other => Err(prior_call_error(&other).into()),
            }
        }
        Err(ClaimError::LimitExceeded { index, error: exceeded, .. }) => {
            let full = || {
                (None, ToolError::from_code(error_code::BUDGET_EXHAUSTED, "a limit is exhausted"))
            };
            let (rule, error) = sources.into_iter().nth(index).unwrap_or_else(full);
            call_state.rule = rule;
            Err(with_limit_details(error, &exceeded).into())
        }
        Err(ClaimError::Paused(target, why)) => {
            let error = paused_target_error(&target, &why);
            call_state.facts.paused = Some((target, why));
            Err(error.into())
        }
        Err(ClaimError::ApprovalUnavailable) => Err(approval_gone_rejection()),
    }
}

/// Returns the charges of rules in observe mode, without their caps, and records would-be
/// denials.
///
/// The claim would reject a negative charge, so negative charges are left out.
async fn observed_charges(
    gate: &Toolgate,
    permit: &Permit,
    call_state: &mut CallState,
) -> Result<Vec<Charge>, Rejection> {
    if permit.observed_charges().is_empty() {
        return Ok(Vec::new());
    }
    let (mut charges, mut rules) = (Vec::new(), Vec::new());
    for (rule, charge, error) in permit.observed_charges() {
        if charge.amount < Decimal::ZERO {
            let (code, message) =
                (error_code::POLICY_FAULT.to_owned(), negative_charge_message(rule));
            call_state.facts.observed.push(ObservedVerdict {
                rule: rule.clone(),
                said: "fault".to_owned(),
                code,
                message,
            });
            continue;
        }
        charges.push(charge.clone());
        rules.push((rule, error));
    }
    let room = gate.0.store.check_charges(&charges).await?;
    for (room, (rule, error)) in room.into_iter().zip(rules) {
        if let Err(exceeded) = room {
            let error = with_limit_details(error.clone(), &exceeded);
            let (code, message) = (error.code.into_owned(), error.message);
            call_state.facts.observed.push(ObservedVerdict {
                rule: rule.clone(),
                said: "deny".to_owned(),
                code,
                message,
            });
        }
    }
    for charge in &mut charges {
        charge.cap = Decimal::MAX;
    }
    Ok(charges)
}

/// Explains which limits the claim would reserve, and changes nothing.
async fn predict_claim(
    gate: &Toolgate,
    permit: &Permit,
    budget: Vec<(Charge, ToolError)>,
    call_state: &mut CallState,
) -> Result<ClaimOutcome, Rejection> {
    let rule_charges = permit
        .charges()
        .iter()
        .map(|(rule, charge, error)| (charge.clone(), Some(rule.as_str()), error.clone()));
    let all: Vec<(Charge, Option<&str>, ToolError)> = budget
        .into_iter()
        .map(|(charge, error)| (charge, None, error))
        .chain(rule_charges)
        .collect();
    let charges: Vec<Charge> = all.iter().map(|(charge, ..)| charge.clone()).collect();
    let rooms = gate.0.store.check_charges(&charges).await?;
    let observed: Vec<Charge> =
        permit.observed_charges().iter().map(|(_, charge, _)| charge.clone()).collect();
    let observed_rooms = gate.0.store.check_charges(&observed).await?;
    let Some(explain) = &mut call_state.explain else { return Ok(ClaimOutcome::Claimed) };
    let mut used = Vec::new();
    for (room, (charge, rule, error)) in rooms.into_iter().zip(&all) {
        let note = rule.and_then(|rule| explain.rule_mut(rule));
        match room {
            Ok(so_far) => {
                let text = format!("{} of {} used", so_far.normalize(), charge.cap.normalize());
                if let Some(note) = note {
                    (note.said, note.why) = (GateResult::Pass, Some(text.clone()));
                }
                used.push(text);
            }
            Err(exceeded) => {
                let error = with_limit_details(error.clone(), &exceeded);
                if let Some(note) = note {
                    note.mark_exceeded(charge, &exceeded, error.message.clone());
                }
                return Err(error.into());
            }
        }
    }
    for (room, (rule, charge, error)) in observed_rooms.into_iter().zip(permit.observed_charges()) {
        let Some(note) = explain.rule_mut(rule) else { continue };
        match room {
            _ if charge.amount < Decimal::ZERO => {
                (note.said, note.why) = (GateResult::Fault, Some(negative_charge_message(rule)));
            }
            Ok(_) if note.said == GateResult::NotReached => {
                (note.said, note.why) = (GateResult::Pass, None);
            }
            Ok(_) => {}
            Err(exceeded) => note.mark_exceeded(
                charge,
                &exceeded,
                with_limit_details(error.clone(), &exceeded).message,
            ),
        }
    }
    let reason = (!used.is_empty()).then(|| used.join("; "));
    explain.note_gate(Gate::Claim, GateResult::Pass, reason);
    Ok(ClaimOutcome::Claimed)
}

fn approval_gone_rejection() -> Rejection {
    ToolError::from_code(
        error_code::APPROVAL_DENIED,
        "the approval was used, has expired or was revoked",
    )
    .into()
}

/// Describes a negative charge.
pub(crate) fn negative_charge_message(rule: &str) -> String {
    format!("the policy `{rule}` charges a negative amount")
}

/// Returns the recall keys of a call, both as requested and as rewritten by hooks.
pub(crate) fn all_dedup_keys(
    call: &Call,
    tool: &ToolEntry,
    requested: Option<Digest>,
    permit: &Permit,
) -> Vec<DedupKey> {
    let checked = permit.arguments().digest();
    let mut keys = dedup_keys(call, tool, requested.unwrap_or(checked));
    keys.extend(
        dedup_keys(call, tool, checked).into_iter().filter(|key| key.kind() == DedupKeyKind::Once),
    );
    keys.dedup();
    keys
}

/// Returns how long a claim stays valid before the call counts as abandoned.
pub(crate) fn lease_duration(timeout: Duration) -> SignedDuration {
    SignedDuration::try_from(timeout.saturating_add(Duration::from_secs(60)))
        .unwrap_or(SignedDuration::MAX)
}
