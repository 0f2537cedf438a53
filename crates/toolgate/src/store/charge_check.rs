//! Computes whether charges fit their limits, and the errors of failed claims.

use rust_decimal::Decimal;

use super::{NotClaimed, Recalled};
use crate::call::error::{Effects, ToolError};
use crate::limits::{Charge, Over};

/// Returns the amount used of each counter, or the first charge that exceeds its limit.
///
/// Charges of one call on the same counter add up. `fits` returns the amount used of a counter if a
/// charge fits.
///
/// # Errors
/// Returns the errors of `fits`.
pub fn room_for<E>(
    charges: &[Charge],
    mut fits: impl FnMut(&Charge) -> Result<Result<Decimal, Over>, E>,
) -> Result<Result<Vec<Decimal>, NotClaimed>, E> {
    let mut used = Vec::with_capacity(charges.len());
    for (index, charge) in charges.iter().enumerate() {
        if charge.amount < Decimal::ZERO {
            return Ok(Err(NotClaimed::LimitExceeded { index, over: Over { used: Decimal::ZERO, retry_after: None }, used }));
        }
        let same = charges.iter().take(index).filter(|c| c.counter == charge.counter && c.window == charge.window);
        let before = same.fold(Decimal::ZERO, |sum, c| sum.saturating_add(c.amount));
        match fits(&Charge { amount: charge.amount.saturating_add(before), ..charge.clone() })? {
            Ok(so_far) => used.push(so_far.saturating_add(before)),
            Err(over) => return Ok(Err(NotClaimed::LimitExceeded { index, over, used })),
        }
    }
    Ok(Ok(used))
}

/// Returns the error for a call that repeats an earlier one.
pub(crate) fn recalled_error(recalled: &Recalled) -> ToolError {
    use crate::call::error_code;
    match recalled {
        Recalled::Settled(_) => ToolError::of(
            error_code::DUPLICATE_CALL,
            "this call was made before and took effect; its result is no longer stored; do not repeat the call",
        )
        .with_effects(Effects::Done),
        Recalled::InProgress => ToolError::of(error_code::IN_PROGRESS, "the same call is still running; repeat the call later to get its result").retry_after_ms(1_000),
        Recalled::Pending(call) => ToolError::of(
            error_code::PENDING_RECONCILIATION,
            format!("an earlier run of this call ({call}) may or may not have taken effect; do not repeat it, tell the user that a person must settle it"),
        )
        .with_effects(Effects::Unknown),
        Recalled::KeyReused => {
            ToolError::of(error_code::KEY_REUSED, "the idempotency key was used before with other arguments; use a new key for a new call")
        }
    }
}

/// Adds the used amount and the waiting time to the error of a limit.
pub(crate) fn over_error(mut error: ToolError, over: &Over) -> ToolError {
    if let Some(wait) = over.retry_after.filter(|wait| wait.is_positive()) {
        error.retry_after_ms = u64::try_from(wait.as_millis()).ok().map(|ms| ms + 1);
        // The identical call may succeed when the window has moved on.
        error.retryable = true;
    }
    if over.used > Decimal::ZERO {
        error.message = format!("{} (used: {})", error.message, over.used.normalize());
    }
    error
}
