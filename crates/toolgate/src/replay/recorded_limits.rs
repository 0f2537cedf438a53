//! Checks charges against the counters of a recorded row.

use rust_decimal::Decimal;

use crate::ledger::row::Row;
use crate::limits::{Charge, ChargeError};
use crate::policy::{CounterReading, MissingFactTracker};
use crate::store::ClaimError;

/// Returns the recorded usage of the counter of a charge.
fn find_usage(used: &[CounterReading], charge: &Charge) -> Option<Decimal> {
    used.iter()
        .find(|(counter, window, _)| *counter == charge.counter && *window == charge.window)
        .map(|(.., used)| *used)
}

/// Returns the usage of each counter, or an error for a charge that does not fit.
pub(super) fn check_recorded_charges(
    row: &Row,
    watch: &MissingFactTracker,
    charges: &[Charge],
) -> Vec<Result<Decimal, ChargeError>> {
    let check = |charge: &Charge| {
        let is_budget =
            charge.counter.starts_with("budget\u{1f}") || charge.counter.starts_with("rate\u{1f}");
        // Limits of rules are read at the claim and by `explain`.
        let used = if is_budget {
            find_usage(&row.facts.budget, charge)
        } else {
            find_usage(&row.facts.claimed, charge)
        };
        if used.is_none() && is_budget {
            watch.record_missing(|| "a budget is needed, but not recorded".to_owned());
        }
        let used = used.unwrap_or_default();
        if charge.fits_within(used) {
            Ok(used)
        } else {
            Err(ChargeError { used, retry_after: None })
        }
    };
    charges.iter().map(check).collect()
}

/// Returns the usage of each counter before the claim, or an error for the first charge that does
/// not fit.
pub(super) fn claim_recorded_charges(
    row: &Row,
    watch: &MissingFactTracker,
    charges: &[Charge],
) -> Result<Vec<Decimal>, ClaimError> {
    let mut all = Vec::with_capacity(charges.len());
    for (index, charge) in charges.iter().enumerate() {
        // A call may charge the same counter twice. The charges are recorded in order.
        let known = row.facts.claimed.get(index..).unwrap_or_default();
        let used = find_usage(known.get(..1).unwrap_or_default(), charge)
            .or_else(|| find_usage(&row.facts.claimed, charge));
        if used.is_none() && charge.cap != Decimal::MAX {
            watch.record_missing(|| "a limit is needed, but not recorded".to_owned());
        }
        let used = used.unwrap_or_default();
        // The recorded usage includes the earlier charges of this call.
        if !charge.fits_within(used) {
            return Err(ClaimError::LimitExceeded {
                index,
                error: ChargeError { used, retry_after: None },
                used: all,
            });
        }
        all.push(used);
    }
    Ok(all)
}
