//! Budgets and counters. Exact, and reserved before anything runs.

use std::collections::VecDeque;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};

use crate::call::{CallId, SessionKey};
use crate::code;
use crate::error::ToolError;

/// What may be used up.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// Calls that were let through.
    pub calls: Option<u64>,
    /// Tokens that tools and the loop report.
    pub tokens: Option<u64>,
    /// Money that tools and the loop report.
    pub money: Option<Decimal>,
    /// Time since the session began (no meaning for a principal).
    pub wall: Option<Duration>,
}

/// How many calls in how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Most calls.
    pub calls: u32,
    /// In any stretch of this length.
    pub per: Duration,
}

/// The limits of an agent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// For one session.
    pub session: Budget,
    /// For one principal over all sessions.
    pub principal: Budget,
    /// For one principal over all sessions.
    pub rate: Option<Rate>,
}

/// What a call spends beside itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Spend {
    /// Tokens.
    pub tokens: u64,
    /// Money.
    pub money: Decimal,
}

impl Spend {
    /// The sum of two. Nothing is ever earned back.
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
    /// How much.
    pub amount: Decimal,
    /// Most in all.
    pub cap: Decimal,
    /// In any stretch of this length; without it, ever.
    pub window: Option<SignedDuration>,
    /// What is being counted, so that the real figure can replace the reserved one.
    #[serde(default)]
    pub unit: Unit,
}

/// What a counter counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Something known before the call: calls, or a sum of an argument.
    #[default]
    Fixed,
    /// Something that counts whatever comes of the call: a rate.
    Attempt,
    /// Tokens: known after the call.
    Tokens,
    /// Money: known after the call.
    Money,
}

impl Charge {
    /// Whether it stays, while nobody knows what came of its call, also when its window has passed. An attempt is one whatever comes of it,
    /// and what only watches would never end.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.unit != Unit::Attempt && self.cap != Decimal::MAX
    }

    /// Whether it fits on what is used already.
    #[must_use]
    pub fn fits_on(&self, used: Decimal) -> bool {
        // What is only watched always fits.
        if self.cap == Decimal::MAX {
            return true;
        }
        let fits = used.checked_add(self.amount).is_some_and(|sum| sum <= self.cap);
        // A budget that is used up exactly has no room for a call whose cost is not known yet.
        let open_ended = !self.unit.is_spent() || used < self.cap;
        fits && open_ended && self.amount >= Decimal::ZERO
    }
}

impl Unit {
    /// Whether the real figure is known only after the call.
    #[must_use]
    pub const fn is_spent(self) -> bool {
        matches!(self, Self::Tokens | Self::Money)
    }
}

/// A counter that has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Over {
    /// What is used already.
    pub used: Decimal,
    /// When there will be room, where that is a matter of time.
    pub retry_after: Option<SignedDuration>,
}

/// One counter, total or sliding.
#[derive(Debug, Clone, Default)]
pub struct Counter {
    total: Decimal,
    entries: VecDeque<Entry>,
}

/// What a call has reserved of a window.
#[derive(Debug, Clone, Copy)]
struct Entry {
    at: Timestamp,
    call: CallId,
    amount: Decimal,
    /// Nobody knows yet what came of the call: it stays, however long that takes.
    held: bool,
}

impl Counter {
    /// What is used now. Entries that have left the window are forgotten, unless they are held.
    pub fn used(&mut self, now: Timestamp, window: Option<SignedDuration>) -> Decimal {
        if let Some(window) = window {
            let mut first = 0;
            while let Some(entry) = self.entries.get(first).copied() {
                if now.duration_since(entry.at) < window {
                    break;
                }
                if entry.held {
                    first += 1;
                    continue;
                }
                self.entries.remove(first);
                self.total = self.total.saturating_sub(entry.amount);
            }
        }
        self.total
    }

    /// Whether a charge fits now.
    ///
    /// # Errors
    /// What is used, and when there will be room.
    pub fn fits(&mut self, now: Timestamp, charge: &Charge) -> Result<(), Over> {
        let used = self.used(now, charge.window);
        if charge.fits_on(used) {
            return Ok(());
        }
        // When enough has left the window; never, where the charge alone is too much, or with what is held beyond it.
        let mut left = used;
        let room = |left: Decimal| left.checked_add(charge.amount).is_some_and(|sum| sum <= charge.cap);
        let retry_after = charge.window.and_then(|window| {
            let frees = self.entries.iter().filter(|entry| now.duration_since(entry.at) < window).find(|entry| {
                left = left.saturating_sub(entry.amount);
                room(left)
            });
            frees.map(|entry| window.saturating_sub(now.duration_since(entry.at)))
        });
        Err(Over { used, retry_after })
    }

    /// Reserves a charge that fits. What is held stays in the window until it is settled; an attempt is one whatever comes of it.
    pub fn reserve(&mut self, now: Timestamp, call: CallId, charge: &Charge, held: bool) {
        self.total = self.total.saturating_add(charge.amount);
        if charge.window.is_some() {
            self.entries.push_back(Entry { at: now, call, amount: charge.amount, held: held && charge.is_held() });
        }
    }

    /// Replaces what a call reserved by what it came to; zero releases it. What was held for longer than its window counts from now on for
    /// another.
    pub fn settle(&mut self, now: Timestamp, call: CallId, charge: &Charge, held: bool, actual: Decimal) {
        if let Some(window) = charge.window {
            let held = held && charge.is_held();
            let is_it = |entry: &Entry| entry.call == call && entry.amount == charge.amount && entry.held == held;
            // What has left the window meanwhile is not in the total any more.
            let Some(index) = self.entries.iter().rposition(is_it) else { return };
            let Some(entry) = self.entries.get_mut(index) else { return };
            (entry.amount, entry.held) = (actual, false);
            if held
                && now.duration_since(entry.at) >= window
                && let Some(entry) = self.entries.remove(index)
            {
                let place = self.entries.partition_point(|other| other.at <= now);
                self.entries.insert(place, Entry { at: now, ..entry });
            }
        }
        self.total = self.total.saturating_sub(charge.amount).saturating_add(actual);
    }
}

impl Limits {
    /// The reservations of one call, each with the error for when it does not fit.
    pub(crate) fn charges(&self, key: &SessionKey, cost: Spend) -> Vec<(Charge, ToolError)> {
        let mut charges = Vec::new();
        if *self == Self::default() {
            return charges;
        }
        let session = [&*key.agent, &*key.principal, &*key.session].join("\u{1f}");
        for (scope, whose, budget) in [("session", session.as_str(), &self.session), ("principal", &*key.principal, &self.principal)] {
            let mut add = |what: &str, amount: Decimal, cap: Option<Decimal>, unit| {
                if let Some(cap) = cap {
                    let counter = format!("budget\u{1f}{scope}\u{1f}{what}\u{1f}{whose}");
                    let message = format!("the {scope}'s budget of {cap} {what} is used up; stop and report what you have");
                    charges.push((Charge { counter, amount, cap, window: None, unit }, ToolError::of(code::BUDGET_EXHAUSTED, message)));
                }
            };
            add("calls", Decimal::ONE, budget.calls.map(Decimal::from), Unit::Fixed);
            add("tokens", cost.tokens.into(), budget.tokens.map(Decimal::from), Unit::Tokens);
            add("money", cost.money, budget.money, Unit::Money);
        }
        if let Some(rate) = self.rate {
            let charge = Charge {
                counter: format!("rate\u{1f}{}", key.principal),
                amount: Decimal::ONE,
                cap: rate.calls.into(),
                window: SignedDuration::try_from(rate.per).ok(),
                unit: Unit::Attempt,
            };
            let message = format!("more than {} calls in {:?}; wait before the next", rate.calls, rate.per);
            charges.push((charge, ToolError::of(code::RATE_LIMITED, message)));
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
            unit: Unit::Fixed,
        };
        let mut counter = Counter::default();
        let call = CallId::fresh();
        assert_eq!(counter.fits(at(0), &charge), Ok(()));
        counter.reserve(at(0), call, &charge, false);
        assert_eq!(counter.fits(at(20), &charge), Err(Over { used: 300.into(), retry_after: Some(SignedDuration::from_secs(40)) }));
        let two = Charge { amount: 100.into(), ..charge.clone() };
        counter.reserve(at(10), CallId::fresh(), &two, false);
        let most = Charge { amount: 450.into(), ..charge.clone() };
        assert_eq!(
            counter.fits(at(20), &most),
            Err(Over { used: 400.into(), retry_after: Some(SignedDuration::from_secs(50)) }),
            "both must leave"
        );
        let never = Charge { amount: 501.into(), ..charge.clone() };
        assert_eq!(counter.fits(at(20), &never), Err(Over { used: 400.into(), retry_after: None }), "it would not fit an empty counter");
        assert_eq!(counter.fits(at(70), &charge), Ok(()));
        counter.reserve(at(60), call, &charge, false);
        counter.settle(at(60), call, &charge, false, 0.into());
        assert_eq!(counter.used(at(60), charge.window), Decimal::ZERO);
        // Too late to give back what has left the window.
        counter.reserve(at(60), call, &charge, false);
        assert_eq!(counter.used(at(120), charge.window), Decimal::ZERO);
        counter.settle(at(120), call, &charge, false, 0.into());
        assert_eq!(counter.used(at(120), charge.window), Decimal::ZERO);
    }
}
