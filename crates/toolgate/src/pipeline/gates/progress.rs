//! Gate 5: does the call repeat itself without progress?

use crate::call::error_code;
use crate::ledger::row::Gate;
use crate::pipeline::Toolgate;
use crate::pipeline::admission::ResolvedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::approval::approval_unusable_error;
use crate::pipeline::rejection::Rejection;
use crate::store::{Approval, SessionSnapshot};

/// Rejects calls that repeat without progress.
pub(crate) async fn run(
    gate: &Toolgate,
    resolved: &ResolvedCall<'_>,
    snapshot: &SessionSnapshot,
    call_state: &mut CallState,
) -> Result<(), Rejection> {
    call_state.enter_gate(Gate::Progress);
    let ResolvedCall { call, tool, .. } = resolved;
    // No call was made with an approval that is used, expired or denied, so there is nothing to
    // replay.
    match &resolved.approval {
        Some(approval) if approval.is_usable(call_state.started) => return Ok(()),
        Some(approval) => {
            return Err(Rejection::at_gate(Gate::Approval, approval_unusable_error(approval)));
        }
        None => {}
    }
    let Err(error) = snapshot.repetitions.check(&tool.spec.name, tool.spec.polling.as_ref()) else {
        return Ok(());
    };
    // Repeating a call after its approval is not a loop.
    let approved = match call_state.requested_digest {
        Some(digest) if error.code == error_code::LOOP_DETECTED => {
            gate.0.store.approval_for(&call.key, digest).await?
        }
        _ => None,
    };
    call_state.facts.approval = approved.as_ref().map(Approval::fact);
    if approved.is_some_and(|approval| approval.is_usable(call_state.started)) {
        Ok(())
    } else {
        Err(error.into())
    }
}
