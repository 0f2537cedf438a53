//! Computes whether charges fit their limits, and the errors of failed claims.

use rust_decimal::Decimal;

use super::{ClaimError, PriorCall};
use crate::call::error::{CallEffects, ToolError};
use crate::limits::{Charge, ChargeError};

/// Returns the amount used of each counter, or the first charge that exceeds its limit.
///
/// Charges of one call on the same counter add up. `fits` returns the amount used of a counter if a
/// charge fits.
///
/// # Errors
/// Returns the errors of `fits`.
pub fn check_call_charges<E>(
    charges: &[Charge],
    mut fits: impl FnMut(&Charge) -> Result<Result<Decimal, ChargeError>, E>,
) -> Result<Result<Vec<Decimal>, ClaimError>, E> {
    let mut used = Vec::with_capacity(charges.len());
    for (index, charge) in charges.iter().enumerate() {
        if charge.amount < Decimal::ZERO {
            return Ok(Err(ClaimError::LimitExceeded {
                index,
                error: ChargeError { used: Decimal::ZERO, retry_after: None },
                used,
            }));
        }
        let same = charges
            .iter()
            .take(index)
            .filter(|c| c.counter == charge.counter && c.window == charge.window);
        let amount_before = same.fold(Decimal::ZERO, |sum, c| sum.saturating_add(c.amount));
        match fits(&Charge {
            amount: charge.amount.saturating_add(amount_before),
            ..charge.clone()
        })? {
            Ok(used_so_far) => used.push(used_so_far.saturating_add(amount_before)),
            Err(error) => return Ok(Err(ClaimError::LimitExceeded { index, error, used })),
        }
    }
    Ok(Ok(used))
}

/// Returns the error for a call that repeats an earlier one.
pub(crate) fn prior_call_error(prior_call: &PriorCall) -> ToolError {
    use crate::call::error_code;
    match prior_call {
        PriorCall::Settled(_) => ToolError::from_code(
            error_code::DUPLICATE_CALL,
            "this call was made before and took effect; its result is no longer stored; do not repeat the call",
        )
        .with_effects(CallEffects::Done),
        PriorCall::InProgress => ToolError::from_code(error_code::IN_PROGRESS, "the same call is still running; repeat the call later to get its result").retry_after_ms(1_000),
        PriorCall::Pending(call) => ToolError::from_code(
            error_code::PENDING_RECONCILIATION,
            format!("an earlier run of this call ({call}) may or may not have taken effect; do not repeat it, tell the user that a person must settle it"),
        )
        .with_effects(CallEffects::Unknown),
        PriorCall::KeyReused => {
            ToolError::from_code(error_code::KEY_REUSED, "the idempotency key was used before with other arguments; use a new key for a new call")
        }
    }
}

/// Adds the used amount and the waiting time to the error of a limit.
pub(crate) fn with_limit_details(mut error: ToolError, limit: &ChargeError) -> ToolError {
    if let Some(wait) = limit.retry_after.filter(|wait| wait.is_positive()) {
        error.retry_after_ms = u64::try_from(wait.as_millis()).ok().map(|ms| ms + 1);
        // The identical call may succeed when the window has moved on.
        error.retryable = true;
    }
    if limit.used > Decimal::ZERO {
        error.message = format!("{} (used: {})", error.message, limit.used.normalize());
    }
    error
}
