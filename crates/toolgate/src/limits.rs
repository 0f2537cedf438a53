//! Defines budgets and counters, which are exact and reserved before the tool runs.

use std::collections::VecDeque;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};

use crate::call::error::ToolError;
use crate::call::error_code;
use crate::call::{CallId, SessionKey};

/// Upper bounds on calls, tokens, money and time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// Admitted calls.
    pub calls: Option<u64>,
    /// Tokens that tools and the agent loop report.
    pub tokens: Option<u64>,
    /// Money that tools and the agent loop report.
    pub money: Option<Decimal>,
    /// Time since the start of the session. Has no meaning for a principal.
    pub wall: Option<Duration>,
}

/// A rate limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RateLimit {
    /// Maximum number of calls.
    pub calls: u32,
    /// The length of the sliding window.
    pub per: Duration,
}

/// The limits of an agent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Budget of one session.
    pub session: Budget,
    /// Budget of one principal over all sessions.
    pub principal: Budget,
    /// Rate limit of one principal over all sessions.
    pub rate: Option<RateLimit>,
}

/// Reported cost of a call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Tokens.
    pub tokens: u64,
    /// Money.
    pub money: Decimal,
}

impl Cost {
    /// Adds two costs. Negative money counts as zero.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let money = self.money.saturating_add(other.money.max(Decimal::ZERO));
        Self { tokens: self.tokens.saturating_add(other.tokens), money }
    }
}

/// One reservation against one counter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Charge {
    /// The counter.
    pub counter: String,
    /// The amount.
    pub amount: Decimal,
    /// The upper bound of the counter.
    pub cap: Decimal,
    /// The length of the sliding window. `None` counts without end.
    pub window: Option<SignedDuration>,
    /// The unit, so that the actual cost can replace the reserved one.
    #[serde(default)]
    pub unit: ChargeUnit,
}

/// Unit of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChargeUnit {
    /// An amount known before the call: calls, or a sum of an argument.
    #[default]
    Fixed,
    /// An attempt, which counts with any outcome of the call: a rate limit.
    Attempt,
    /// Tokens. The amount is known after the call.
    Tokens,
    /// Money. The amount is known after the call.
    Money,
}

impl Charge {
    /// Reports whether the charge stays reserved beyond its window while the outcome of its call is
    /// unknown.
    ///
    /// An attempt counts with any outcome, and a charge in observe mode would otherwise never end.
    #[must_use]
    pub fn is_reserved_while_pending(&self) -> bool {
        self.unit != ChargeUnit::Attempt && self.cap != Decimal::MAX
    }

    /// Reports whether the charge fits, given the amount already used.
    #[must_use]
    pub fn fits_within(&self, used: Decimal) -> bool {
        // A charge in observe mode always fits.
        if self.cap == Decimal::MAX {
            return true;
        }
        let fits = used.checked_add(self.amount).is_some_and(|sum| sum <= self.cap);
        // If the cost is unknown before the call, an exactly exhausted budget has no room for it.
        let open_ended = !self.unit.is_known_after_call() || used < self.cap;
        fits && open_ended && self.amount >= Decimal::ZERO
    }
}

impl ChargeUnit {
    /// Reports whether the amount is known only after the call.
    #[must_use]
    pub const fn is_known_after_call(self) -> bool {
        matches!(self, Self::Tokens | Self::Money)
    }
}

/// Error for a charge that does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChargeError {
    /// The amount already used.
    pub used: Decimal,
    /// When the charge will fit, if waiting helps.
    pub retry_after: Option<SignedDuration>,
}

/// A counter, either total or over a sliding window.
#[derive(Debug, Clone, Default)]
pub struct Counter {
    total: Decimal,
    entries: VecDeque<WindowEntry>,
}

/// Amount that a call has reserved in a window.
#[derive(Debug, Clone, Copy)]
struct WindowEntry {
    at: Timestamp,
    call: CallId,
    amount: Decimal,
    /// The outcome of the call is unknown, so the entry stays for any length of time.
    is_pending: bool,
}

impl Counter {
    /// Returns the amount used now. Removes entries that have left the window, unless they are
    /// held.
    pub fn used(&mut self, now: Timestamp, window: Option<SignedDuration>) -> Decimal {
        if let Some(window) = window {
            let mut first = 0;
            while let Some(entry) = self.entries.get(first).copied() {
                if now.duration_since(entry.at) < window {
                    break;
                }
                if entry.is_pending {
                    first += 1;
                    continue;
                }
                self.entries.remove(first);
                self.total = self.total.saturating_sub(entry.amount);
            }
        }
        self.total
    }

    /// Checks whether a charge fits now.
    ///
    /// # Errors
    /// The charge does not fit. The error has the amount used and when the charge will fit.
    pub fn check_charge(&mut self, now: Timestamp, charge: &Charge) -> Result<(), ChargeError> {
        let used = self.used(now, charge.window);
        if charge.fits_within(used) {
            return Ok(());
        }
        // Finds when enough entries have left the window. `None` if the charge alone exceeds the
        // cap, or exceeds it together with held entries.
        let mut still_used = used;
        let room = |still_used: Decimal| {
            still_used.checked_add(charge.amount).is_some_and(|sum| sum <= charge.cap)
        };
        let retry_after = charge.window.and_then(|window| {
            let frees =
                self.entries.iter().filter(|entry| now.duration_since(entry.at) < window).find(
                    |entry| {
                        still_used = still_used.saturating_sub(entry.amount);
                        room(still_used)
                    },
                );
            frees.map(|entry| window.saturating_sub(now.duration_since(entry.at)))
        });
        Err(ChargeError { used, retry_after })
    }

    /// Reserves a charge that fits. A held entry stays in the window until it is settled.
    pub fn reserve(&mut self, now: Timestamp, call: CallId, charge: &Charge, held: bool) {
        self.total = self.total.saturating_add(charge.amount);
        if charge.window.is_some() {
            self.entries.push_back(WindowEntry {
                at: now,
                call,
                amount: charge.amount,
                is_pending: held && charge.is_reserved_while_pending(),
            });
        }
    }

    /// Replaces the reservation of a call with its actual amount. Zero releases the reservation.
    ///
    /// An entry that was held for longer than its window counts for another window from now on.
    pub fn settle(
        &mut self,
        now: Timestamp,
        call: CallId,
        charge: &Charge,
        held: bool,
        actual: Decimal,
    ) {
        if let Some(window) = charge.window {
            let held = held && charge.is_reserved_while_pending();
            let is_it = |entry: &WindowEntry| {
                entry.call == call && entry.amount == charge.amount && entry.is_pending == held
            };
            // An entry that has left the window is not part of the total any more.
            let Some(index) = self.entries.iter().rposition(is_it) else { return };
            let Some(entry) = self.entries.get_mut(index) else { return };
            (entry.amount, entry.is_pending) = (actual, false);
            if held
                && now.duration_since(entry.at) >= window
                && let Some(entry) = self.entries.remove(index)
            {
                let place = self.entries.partition_point(|other| other.at <= now);
                self.entries.insert(place, WindowEntry { at: now, ..entry });
            }
        }
        self.total = self.total.saturating_sub(charge.amount).saturating_add(actual);
    }
}

impl Limits {
    /// Returns the charges of one call, each with the error for the case that it does not fit.
    pub(crate) fn charges(&self, key: &SessionKey, cost: Cost) -> Vec<(Charge, ToolError)> {
        let mut charges = Vec::new();
        if *self == Self::default() {
            return charges;
        }
        let session = [&*key.agent, &*key.principal, &*key.session].join("\u{1f}");
        for (scope, owner, budget) in [
            ("session", session.as_str(), &self.session),
            ("principal", &*key.principal, &self.principal),
        ] {
            let mut add = |what: &str, amount: Decimal, cap: Option<Decimal>, unit| {
                if let Some(cap) = cap {
                    let counter = format!("budget\u{1f}{scope}\u{1f}{what}\u{1f}{owner}");
                    let message = format!(
                        "the {scope}'s budget of {cap} {what} is exhausted; stop and report what you have"
                    );
                    charges.push((
                        Charge { counter, amount, cap, window: None, unit },
                        ToolError::from_code(error_code::BUDGET_EXHAUSTED, message),
                    ));
                }
            };
            add("calls", Decimal::ONE, budget.calls.map(Decimal::from), ChargeUnit::Fixed);
            add("tokens", cost.tokens.into(), budget.tokens.map(Decimal::from), ChargeUnit::Tokens);
            add("money", cost.money, budget.money, ChargeUnit::Money);
        }
        if let Some(rate) = self.rate {
            let charge = Charge {
                counter: format!("rate\u{1f}{}", key.principal),
                amount: Decimal::ONE,
                cap: rate.calls.into(),
                window: SignedDuration::try_from(rate.per).ok(),
                unit: ChargeUnit::Attempt,
            };
            let message = format!(
                "more than {} calls in {:?}; wait before the next call",
                rate.calls, rate.per
            );
            charges.push((charge, ToolError::from_code(error_code::RATE_LIMITED, message)));
        }
        charges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_slides() {
        let start = Timestamp::UNIX_EPOCH;
        let at = |seconds| start + SignedDuration::from_secs(seconds);
        let charge = Charge {
            counter: "c".into(),
            amount: 300.into(),
            cap: 500.into(),
            window: Some(SignedDuration::from_secs(60)),
            unit: ChargeUnit::Fixed,
        };
        let mut counter = Counter::default();
        let call = CallId::generate();
        assert_eq!(counter.check_charge(at(0), &charge), Ok(()));
        counter.reserve(at(0), call, &charge, false);
        assert_eq!(
            counter.check_charge(at(20), &charge),
            Err(ChargeError { used: 300.into(), retry_after: Some(SignedDuration::from_secs(40)) })
        );
        let small = Charge { amount: 100.into(), ..charge.clone() };
        counter.reserve(at(10), CallId::generate(), &small, false);
        let large = Charge { amount: 450.into(), ..charge.clone() };
        assert_eq!(
            counter.check_charge(at(20), &large),
            Err(ChargeError { used: 400.into(), retry_after: Some(SignedDuration::from_secs(50)) }),
            "both entries must leave the window"
        );
        let never = Charge { amount: 501.into(), ..charge.clone() };
        assert_eq!(
            counter.check_charge(at(20), &never),
            Err(ChargeError { used: 400.into(), retry_after: None }),
            "the charge does not fit an empty counter"
        );
        assert_eq!(counter.check_charge(at(70), &charge), Ok(()));
        counter.reserve(at(60), call, &charge, false);
        counter.settle(at(60), call, &charge, false, 0.into());
        assert_eq!(counter.used(at(60), charge.window), Decimal::ZERO);
        // Settling an entry that has left the window changes nothing.
        counter.reserve(at(60), call, &charge, false);
        assert_eq!(counter.used(at(120), charge.window), Decimal::ZERO);
        counter.settle(at(120), call, &charge, false, 0.into());
        assert_eq!(counter.used(at(120), charge.window), Decimal::ZERO);
    }
}
