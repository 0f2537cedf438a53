//! Which claims have not ended: found by their session and by their time, without looking through all.

use std::collections::BTreeSet;

use ahash::HashMap;
use jiff::Timestamp;

use super::Intent;
use crate::call::{CallId, SessionKey};

#[derive(Default)]
pub(super) struct Open {
    /// What clients run or have a pass for, until it is settled.
    clients: HashMap<SessionKey, BTreeSet<CallId>>,
    /// When the time is up of each that has no end.
    leases: BTreeSet<(Timestamp, CallId)>,
}

impl Open {
    pub(super) fn begin(&mut self, intent: &Intent) {
        self.leases.insert((intent.lease, intent.call));
        if intent.pass.is_some() || intent.is_run_by_client() {
            self.clients.entry(intent.key.clone()).or_default().insert(intent.call);
        }
    }

    /// It has come to an end, be it that nobody knows which: then a client may still tell.
    pub(super) fn end(&mut self, intent: &Intent, pending: bool) {
        self.leases.remove(&(intent.lease, intent.call));
        if !pending && let Some(calls) = self.clients.get_mut(&intent.key) {
            calls.remove(&intent.call);
            if calls.is_empty() {
                self.clients.remove(&intent.key);
            }
        }
    }

    /// Its time is up at another moment.
    pub(super) fn renew(&mut self, intent: &mut Intent, lease: Timestamp) {
        if self.leases.remove(&(intent.lease, intent.call)) {
            self.leases.insert((lease, intent.call));
        }
        intent.lease = lease;
    }

    /// What clients have open in a session, the newest first.
    pub(super) fn of(&self, key: &SessionKey) -> Vec<CallId> {
        self.clients.get(key).map(|calls| calls.iter().rev().copied().collect()).unwrap_or_default()
    }

    /// Those whose time is up.
    pub(super) fn over(&self, now: Timestamp) -> Vec<CallId> {
        self.leases.range(..(now, CallId::from_bytes([0; 16]))).map(|(_, call)| *call).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn intent(n: u8) -> Intent {
        Intent {
            call: CallId::from_bytes([n; 16]),
            key: SessionKey::new("a", "alice", "s"),
            tool: "run".into(),
            digest: crate::json::Digest::default(),
            asked: crate::json::Digest::default(),
            recall: Vec::new(),
            owner: "client:s".into(),
            lease: at(10 * i64::from(n)),
            effect: true,
            row: None,
            pass: None,
            carriers: Vec::new(),
            seen: None,
            revokes: Vec::new(),
        }
    }

    #[test]
    fn only_what_has_not_ended_is_found() {
        let (mut open, mut all) = (Open::default(), [1, 2, 3].map(intent));
        all.iter().for_each(|intent| open.begin(intent));
        let key = all[0].key.clone();
        assert_eq!(open.of(&key), [all[2].call, all[1].call, all[0].call]);
        assert_eq!(open.over(at(20)), [all[0].call], "a lease holds until its last moment");
        // Nobody knows how it ended, and its client may still say so.
        open.end(&all[0], true);
        assert_eq!((open.over(at(20)).len(), open.of(&key).len()), (0, 3));
        open.end(&all[0], false);
        assert_eq!(open.of(&key), [all[2].call, all[1].call]);
        open.renew(&mut all[2], at(1));
        assert_eq!(open.over(at(2)), [all[2].call]);
        all.iter().for_each(|intent| open.end(intent, false));
        assert!(open.clients.is_empty() && open.leases.is_empty());
    }
}
