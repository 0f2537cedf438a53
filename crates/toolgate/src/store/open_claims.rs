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
    pub(crate) fn insert(&mut self, record: &ClaimRecord) {
        self.leases.insert((record.lease, record.call));
        if record.pass.is_some() || record.is_run_by_client() {
            self.deferred.entry(record.key.clone()).or_default().insert(record.call);
        }
    }

    /// Removes an ended claim; if the end is pending, a client may still report the outcome.
    pub(crate) fn remove(&mut self, record: &ClaimRecord, pending: bool) {
        self.leases.remove(&(record.lease, record.call));
        if !pending && let Some(calls) = self.deferred.get_mut(&record.key) {
            calls.remove(&record.call);
            if calls.is_empty() {
                self.deferred.remove(&record.key);
            }
        }
    }

    /// Changes the end of a lease.
    pub(crate) fn set_lease(&mut self, record: &mut ClaimRecord, lease: Timestamp) {
        if self.leases.remove(&(record.lease, record.call)) {
            self.leases.insert((lease, record.call));
        }
        record.lease = lease;
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

    fn record(n: u8) -> ClaimRecord {
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
        let (mut open, mut all) = (OpenClaims::default(), [1, 2, 3].map(record));
        all.iter().for_each(|record| open.insert(record));
        let key = all[0].key.clone();
        assert_eq!(open.deferred_calls(&key), [all[2].call, all[1].call, all[0].call]);
        assert_eq!(open.expired(at(20)), [all[0].call], "a lease is valid until its last moment");
        // The outcome is pending, and the client may still report it.
        open.remove(&all[0], true);
        assert_eq!((open.expired(at(20)).len(), open.deferred_calls(&key).len()), (0, 3));
        open.remove(&all[0], false);
        assert_eq!(open.deferred_calls(&key), [all[2].call, all[1].call]);
        open.set_lease(&mut all[2], at(1));
        assert_eq!(open.expired(at(2)), [all[2].call]);
        all.iter().for_each(|record| open.remove(record, false));
        assert!(open.deferred.is_empty() && open.leases.is_empty());
    }
}
