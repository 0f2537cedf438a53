//! Gate 6: are the deadline and the budgets of the session kept?

use std::time::Duration;

use rust_decimal::Decimal;
use rust_decimal::prelude::ToPrimitive;
use tokio::time::Instant;

use crate::call::error::ToolError;
use crate::call::error_code;
use crate::ledger::row::Gate;
use crate::limits::{Charge, ChargeError, ChargeUnit};
use crate::pipeline::Toolgate;
use crate::pipeline::admission::ResolvedCall;
use crate::pipeline::call_state::{CallState, earlier_deadline};
use crate::pipeline::rejection::Rejection;
use crate::store::{SessionSnapshot, with_limit_details};
use crate::tool::context::RemainingBudget;

/// The charges of the budgets for a call, and what remains for its tool.
pub(crate) struct CallBudget {
    /// Charges, each with the error if it exceeds its limit.
    pub(crate) charges: Vec<(Charge, ToolError)>,
    pub(crate) remaining: RemainingBudget,
}

/// Checks the deadline and the budgets. The claim reserves the charges.
pub(crate) async fn run(
    gate: &Toolgate,
    resolved: &ResolvedCall<'_>,
    snapshot: &SessionSnapshot,
    call_state: &mut CallState,
) -> Result<CallBudget, Rejection> {
    call_state.enter_gate(Gate::Limits);
    let ResolvedCall { call, agent, tool, .. } = resolved;
    if call_state.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
        call_state.facts.late = true;
        return Err(ToolError::from_code(
            error_code::DEADLINE_EXCEEDED,
            "the deadline of the call has passed",
        )
        .into());
    }
    if let Some(wall) = agent.limits.session.wall {
        let left = |at: jiff::Timestamp| {
            wall.saturating_sub(
                Duration::try_from(at.duration_since(snapshot.started_at)).unwrap_or_default(),
            )
        };
        if left(call_state.started).is_zero() {
            return Err(ToolError::from_code(
                error_code::DEADLINE_EXCEEDED,
                format!("the session has used up its time limit of {wall:?}; stop and report what you have"),
            )
            .into());
        }
        // The session's time limit also ends a running call.
        call_state.deadline =
            earlier_deadline(call_state.deadline, Instant::now().checked_add(left(gate.now())));
    }
    let charges = agent.limits.charges(&call.key, tool.spec.cost);
    let mut remaining = RemainingBudget::default();
    if charges.is_empty() {
        return Ok(CallBudget { charges, remaining });
    }
    let plain_charges: Vec<Charge> = charges.iter().map(|(charge, _)| charge.clone()).collect();
    let room = gate.0.store.check_charges(&plain_charges).await?;
    let used = |room: &Result<Decimal, ChargeError>| {
        room.map_or_else(|exceeded| exceeded.used, |used| used)
    };
    call_state.facts.budget = room
        .iter()
        .zip(&plain_charges)
        .map(|(room, c)| (c.counter.clone(), c.window, used(room)))
        .collect();
    for (room, (charge, error)) in room.iter().zip(&charges) {
        let used = room.map_err(|exceeded| with_limit_details(error.clone(), &exceeded))?;
        let left = (charge.cap - used).max(Decimal::ZERO);
        match charge.unit {
            ChargeUnit::Tokens => {
                remaining.tokens = min_of_options(remaining.tokens, left.to_u64())
            }
            ChargeUnit::Money => remaining.money = min_of_options(remaining.money, Some(left)),
            ChargeUnit::Fixed | ChargeUnit::Attempt => {}
        }
    }
    Ok(CallBudget { charges, remaining })
}

fn min_of_options<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
