//! Indexes the claims that have not ended, by session and by end of lease.

use std::collections::BTreeSet;

use ahash::HashMap;
use jiff::Timestamp;

use super::ClaimRecord;
use crate::call::{CallId, SessionKey};

#[derive(Default)]
pub(crate) struct OpenClaims {
    /// Deferred calls by session, until they are settled.
    deferred: HashMap<SessionKey, BTreeSet<CallId>>,
    /// Ends of leases of the claims that have not ended.
    leases: BTreeSet<(Timestamp, CallId)>,
}

impl OpenClaims {
    pub(crate) fn insert(&mut self, intent: &ClaimRecord) {
        self.leases.insert((intent.lease, intent.call));
        if intent.pass.is_some() || intent.is_run_by_client() {
            self.deferred.entry(intent.key.clone()).or_default().insert(intent.call);
        }
    }

    /// Removes an ended claim; if the end is pending, a client may still report the outcome.
    pub(crate) fn remove(&mut self, intent: &ClaimRecord, pending: bool) {
        self.leases.remove(&(intent.lease, intent.call));
        if !pending && let Some(calls) = self.deferred.get_mut(&intent.key) {
            calls.remove(&intent.call);
            if calls.is_empty() {
                self.deferred.remove(&intent.key);
            }
        }
    }

    /// Changes the end of a lease.
    pub(crate) fn set_lease(&mut self, intent: &mut ClaimRecord, lease: Timestamp) {
        if self.leases.remove(&(intent.lease, intent.call)) {
            self.leases.insert((lease, intent.call));
        }
        intent.lease = lease;
    }

    /// Returns the deferred calls of a session, newest first.
    pub(crate) fn deferred_calls(&self, key: &SessionKey) -> Vec<CallId> {
        self.deferred
            .get(key)
            .map(|calls| calls.iter().rev().copied().collect())
            .unwrap_or_default()
    }

    /// Returns the claims whose lease has ended.
    pub(crate) fn expired(&self, now: Timestamp) -> Vec<CallId> {
        self.leases.range(..(now, CallId::from_bytes([0; 16]))).map(|(_, call)| *call).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn intent(n: u8) -> ClaimRecord {
        ClaimRecord {
            call: CallId::from_bytes([n; 16]),
            key: SessionKey::new("a", "alice", "s"),
            tool: "run".into(),
            digest: toolgate_json::Digest::default(),
            asked: toolgate_json::Digest::default(),
            recall: Vec::new(),
            owner: crate::store::ClaimOwner::ClientSession("s".into()),
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
    fn only_open_claims_are_found() {
        let (mut open, mut all) = (OpenClaims::default(), [1, 2, 3].map(intent));
        all.iter().for_each(|intent| open.insert(intent));
        let key = all[0].key.clone();
        assert_eq!(open.deferred_calls(&key), [all[2].call, all[1].call, all[0].call]);
        assert_eq!(open.expired(at(20)), [all[0].call], "a lease holds until its last moment");
        // The outcome is pending, and the client may still report it.
        open.remove(&all[0], true);
        assert_eq!((open.expired(at(20)).len(), open.deferred_calls(&key).len()), (0, 3));
        open.remove(&all[0], false);
        assert_eq!(open.deferred_calls(&key), [all[2].call, all[1].call]);
        open.set_lease(&mut all[2], at(1));
        assert_eq!(open.expired(at(2)), [all[2].call]);
        all.iter().for_each(|intent| open.remove(intent, false));
        assert!(open.deferred.is_empty() && open.leases.is_empty());
    }
}
