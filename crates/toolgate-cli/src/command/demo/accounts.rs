//! Holds the accounts of the demo desk: customers, orders and payments.
//!
//! The desk records them, independently of the gate.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use toolgate::Decimal;

/// A refund that was paid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeskPayment {
    /// Conversation in which the refund was paid.
    pub(crate) session: String,
    pub(crate) customer: String,
    pub(crate) order: String,
    pub(crate) amount: Decimal,
    pub(crate) at: i64,
}

/// The accounts of the desk.
#[derive(Debug)]
pub(crate) struct DeskAccounts {
    /// Current time in seconds since 1970.
    pub(crate) now: i64,
    /// Customer of each order.
    pub(crate) orders: BTreeMap<&'static str, &'static str>,
    pub(crate) active: BTreeSet<&'static str>,
    /// Verified customers, each with conversation and time.
    pub(crate) verified: Vec<(String, String, i64)>,
    /// Orders that were looked up, each with the conversation.
    pub(crate) looked_up: Vec<(String, String)>,
    pub(crate) payments: Vec<DeskPayment>,
    pub(crate) escalations: Vec<String>,
    /// How many more times the payment system fails with "offline".
    pub(crate) offline: u32,
}

impl Default for DeskAccounts {
    fn default() -> Self {
        Self {
            now: 1_794_700_800,
            orders: BTreeMap::from([
                ("A-7", "C-1001"),
                ("B-1", "C-2002"),
                ("B-2", "C-2002"),
                ("D-4", "C-3003"),
            ]),
            active: BTreeSet::from(["C-1001", "C-2002", "C-3003"]),
            verified: Vec::new(),
            looked_up: Vec::new(),
            payments: Vec::new(),
            escalations: Vec::new(),
            offline: 1,
        }
    }
}

impl DeskAccounts {
    /// Returns the payments that violate the rules of the desk, according to the accounts alone.
    ///
    /// A payment needs a verification of its customer in the same conversation within 15 minutes
    /// before, and a lookup of the customer's own order there. It is at most 500, at most 500 a day
    /// for a customer, and paid once for an order.
    pub(crate) fn forbidden_payments(&self) -> Vec<&DeskPayment> {
        let day = 24 * 60 * 60;
        let cap = Decimal::from(500);
        let forbidden = |(index, payment): &(usize, &DeskPayment)| {
            let earlier = || self.payments.iter().take(*index);
            let verified = self.verified.iter().any(|(customer, session, at)| {
                *customer == payment.customer
                    && *session == payment.session
                    && *at <= payment.at
                    && payment.at - at <= 15 * 60
            });
            let looked_up = self
                .looked_up
                .iter()
                .any(|(order, session)| *order == payment.order && *session == payment.session);
            let is_own_order = self
                .orders
                .get(payment.order.as_str())
                .is_some_and(|owner| *owner == payment.customer);
            let paid_today: Decimal = earlier()
                .filter(|earlier_payment| {
                    earlier_payment.customer == payment.customer
                        && payment.at - earlier_payment.at < day
                })
                .map(|earlier_payment| earlier_payment.amount)
                .sum();
            let is_repeated =
                earlier().any(|earlier_payment| earlier_payment.order == payment.order);
            !verified
                || !looked_up
                || !is_own_order
                || is_repeated
                || payment.amount > cap
                || paid_today + payment.amount > cap
        };
        self.payments.iter().enumerate().filter(forbidden).map(|(_, payment)| payment).collect()
    }
}

/// Accounts that are shared by the tools of the desk and the report.
#[derive(Debug, Clone, Default)]
pub(crate) struct SharedDeskAccounts(Arc<Mutex<DeskAccounts>>);

impl SharedDeskAccounts {
    pub(crate) fn lock(&self) -> MutexGuard<'_, DeskAccounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forged_payments_are_found() {
        let pay = |customer: &str, order: &str, amount: i64, at: i64| DeskPayment {
            session: "monday".into(),
            customer: customer.into(),
            order: order.into(),
            amount: amount.into(),
            at,
        };
        let verified = || vec![("C-2002".into(), "monday".into(), 50)];
        let looked_up =
            || ["B-1", "A-7", "Z-9", "D-4"].map(|order| (order.into(), "monday".into())).to_vec();
        let cases = [
            ("fine", pay("C-2002", "B-1", 499, 100), 0),
            ("too much", pay("C-2002", "B-1", 501, 100), 1),
            ("not verified", pay("C-3003", "D-4", 5, 100), 1),
            ("verified too long ago", pay("C-2002", "B-1", 5, 2_000), 1),
            ("order of another customer", pay("C-2002", "A-7", 5, 100), 1),
            ("unknown order", pay("C-2002", "Z-9", 5, 100), 1),
            ("order not looked up", pay("C-2002", "B-2", 5, 100), 1),
            (
                "in another conversation",
                DeskPayment { session: "tuesday".into(), ..pay("C-2002", "B-1", 5, 100) },
                1,
            ),
        ];
        for (name, payment, leaked) in cases {
            let accounts = DeskAccounts {
                verified: verified(),
                looked_up: looked_up(),
                payments: vec![payment],
                ..DeskAccounts::default()
            };
            assert_eq!(accounts.forbidden_payments().len(), leaked, "{name}");
        }
        let twice = vec![pay("C-2002", "B-1", 10, 100), pay("C-2002", "B-1", 10, 110)];
        let sum = vec![pay("C-2002", "B-1", 499, 100), pay("C-2002", "B-2", 2, 110)];
        for payments in [twice, sum] {
            let both = looked_up().into_iter().chain([("B-2".into(), "monday".into())]).collect();
            let accounts = DeskAccounts {
                verified: verified(),
                looked_up: both,
                payments,
                ..DeskAccounts::default()
            };
            assert_eq!(accounts.forbidden_payments().len(), 1);
        }
    }
}
