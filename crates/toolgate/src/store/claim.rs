//! What a claim comes to, in figures and in words.

use rust_decimal::Decimal;

use super::{NotClaimed, Recalled};
use crate::error::{Effects, ToolError};
use crate::limits::{Charge, Over};

/// What is used of each counter with the charges before it, or the first charge that does not fit. Charges of one call on
/// the same counter add up. `fits` says what is used of a counter, if a charge fits.
///
/// # Errors
/// What `fits` says.
pub fn room_for<E>(
    charges: &[Charge],
    mut fits: impl FnMut(&Charge) -> Result<Result<Decimal, Over>, E>,
) -> Result<Result<Vec<Decimal>, NotClaimed>, E> {
    let mut used = Vec::with_capacity(charges.len());
    for (index, charge) in charges.iter().enumerate() {
        if charge.amount < Decimal::ZERO {
            return Ok(Err(NotClaimed::Over { index, over: Over { used: Decimal::ZERO, retry_after: None }, used }));
        }
        let same = charges.iter().take(index).filter(|c| c.counter == charge.counter && c.window == charge.window);
        let before = same.fold(Decimal::ZERO, |sum, c| sum.saturating_add(c.amount));
        match fits(&Charge { amount: charge.amount.saturating_add(before), ..charge.clone() })? {
            Ok(so_far) => used.push(so_far.saturating_add(before)),
            Err(over) => return Ok(Err(NotClaimed::Over { index, over, used })),
        }
    }
    Ok(Ok(used))
}

/// What stood in the way of a call, said to the model.
pub(crate) fn recalled_error(recalled: &Recalled) -> ToolError {
    use crate::code;
    match recalled {
        Recalled::Settled(_) => ToolError::of(
            code::DUPLICATE_CALL,
            "this call was made before and took effect; its result is not kept any more, so do not repeat it",
        )
        .with_effects(Effects::Done),
        Recalled::InProgress => ToolError::of(code::IN_PROGRESS, "the same call is running; ask again for its result").retry_after_ms(1_000),
        Recalled::Pending(call) => ToolError::of(
            code::PENDING_RECONCILIATION,
            format!("an earlier run of this call ({call}) may or may not have taken effect; do not repeat it, tell the user that a person must settle it"),
        )
        .with_effects(Effects::Unknown),
        Recalled::KeyReused => {
            ToolError::of(code::KEY_REUSED, "the idempotency key was used before with other arguments; use a new key for a new call")
        }
    }
}

/// What a charge that does not fit says: the limit's own error, with the figure and the wait.
pub(crate) fn over_error(mut error: ToolError, over: &Over) -> ToolError {
    if let Some(wait) = over.retry_after.filter(|wait| wait.is_positive()) {
        error.retry_after_ms = u64::try_from(wait.as_millis()).ok().map(|ms| ms + 1);
        // The identical call may succeed once there is room again.
        error.retryable = true;
    }
    if over.used > Decimal::ZERO {
        error.message = format!("{} (used: {})", error.message, over.used.normalize());
    }
    error
}
