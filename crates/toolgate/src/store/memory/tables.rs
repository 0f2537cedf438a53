//! Implements the operations of the memory store under its lock.

use std::sync::Arc;

use jiff::Timestamp;
use rust_decimal::Decimal;

use super::super::{RecallKey, Recalled, Settle, Target};
use super::{Claim, Inner, Session};
use crate::call::outcome::Outcome;
use crate::call::{CallId, SessionKey};
use crate::ledger::row::Row;
use crate::limits::{Charge, Counter, Over, Spend};
use crate::policy::RecalledBy;
use crate::provenance;
use crate::provenance::Memory as _;
use crate::session::repetition::Progress;
use toolgate_json::Digest;

impl Inner {
    pub(crate) fn session(&mut self, key: &SessionKey) -> &mut Session {
        self.sessions.entry(key.clone()).or_insert_with(|| Session {
            version: 0,
            opened: None,
            state: Arc::default(),
            progress: Progress::default(),
            lock: Arc::default(),
        })
    }

    pub(crate) fn paused(&self, key: &SessionKey, tool: &Arc<str>) -> Option<(Target, String)> {
        if self.paused.is_empty() {
            return None;
        }
        let targets = [
            Target::Agent(Arc::clone(&key.agent)),
            Target::Principal(Arc::clone(&key.principal)),
            Target::Tool(Arc::clone(tool)),
            Target::Session(key.clone()),
        ];
        targets.into_iter().find_map(|target| self.paused.get(&target).cloned().map(|why| (target, why)))
    }

    pub(crate) fn recall_any(&self, keys: &[RecallKey], digest: Digest, now: Timestamp) -> Option<(Recalled, RecalledBy)> {
        keys.iter().find_map(|key| Some((self.recall(key, digest, now)?, key.kind())))
    }

    fn recall(&self, key: &RecallKey, digest: Digest, now: Timestamp) -> Option<Recalled> {
        let (first, call) = self.dedup_keys.get(key)?;
        // A call of a `once` tool is found by its arguments, as requested or as changed by hooks.
        if *first != digest && key.kind() == RecalledBy::Key {
            return Some(Recalled::KeyReused);
        }
        let claim = self.claims.get(call)?;
        Some(match &claim.outcome {
            Some(outcome) => Recalled::Settled(Some(outcome.clone())),
            None if claim.is_pending(now) => Recalled::Pending(*call),
            // An abandoned read had no effect.
            None if now > claim.record.lease => return None,
            None => Recalled::InProgress,
        })
    }

    /// Returns the amount used of a counter if a charge fits; never creates a counter.
    pub(crate) fn fits(&mut self, charge: &Charge, now: Timestamp) -> Result<Decimal, Over> {
        let mut fresh = Counter::default();
        let counter = self.counters.get_mut(&(charge.counter.clone(), charge.window)).unwrap_or(&mut fresh);
        counter.check_charge(now, charge).map(|()| counter.used(now, charge.window))
    }

    /// Records the provenance of the values of a call.
    pub(crate) fn see(&mut self, key: &SessionKey, seen: provenance::Seen) {
        let mut carriers = std::mem::take(&mut self.carriers);
        let state = Arc::make_mut(&mut self.session(key).state);
        state.stamp += 1;
        provenance::take_in(&mut state.values, seen, &mut carriers);
        self.carriers = carriers;
    }

    /// Records the files and entities that a call has, or may have, written.
    pub(crate) fn carry(&mut self, key: &SessionKey, keys: &[String]) {
        let tainted = self.sessions.get(key).is_some_and(|session| session.state.values.flags().tainted);
        provenance::carry(keys, tainted, &mut self.carriers);
    }

    /// Revokes the evidence of a call that may have had an effect.
    pub(crate) fn revoke_for(&mut self, call: CallId) {
        let Some(claim) = self.claims.get(&call).filter(|claim| claim.outcome.is_none() && claim.record.effect) else { return };
        let (key, revokes) = (claim.record.key.clone(), claim.record.revokes.clone());
        for revoked in revokes {
            Arc::make_mut(&mut self.session(&key).state).revoke(revoked);
        }
    }

    /// Makes claims with an ended lease pending, which revokes their evidence.
    ///
    /// A deferred read is released.
    pub(crate) fn sweep(&mut self, now: Timestamp) {
        let swept = |claim: &Claim| claim.record.effect || claim.record.is_run_by_client();
        for call in self.open_claims.over(now) {
            if !self.claims.get(&call).is_some_and(swept) {
                continue;
            }
            self.revoke_for(call);
            self.end_claim(call, Settle::Pending, None, None, now);
        }
    }

    pub(crate) fn end_claim(
        &mut self,
        call: CallId,
        settle: Settle,
        spent: Option<Spend>,
        outcome: Option<Outcome>,
        now: Timestamp,
    ) -> bool {
        // A settled claim never changes.
        let Some(claim) = self.claims.get_mut(&call).filter(|claim| claim.outcome.is_none()) else { return false };
        let effect = claim.record.effect;
        let settle = if effect { settle } else { settle.of_read() };
        claim.pending |= settle == Settle::Pending;
        self.open_claims.end(&claim.record, settle == Settle::Pending);
        let wrote = std::mem::take(&mut claim.record.carriers);
        let carries = (settle != Settle::Released && !wrote.is_empty()).then(|| claim.record.key.clone());
        // A reported amount is final, even if the effect is unknown.
        let (known, reserved): (Vec<Charge>, Vec<Charge>) = std::mem::take(&mut claim.charges)
            .into_iter()
            .partition(|c| settle != Settle::Pending || (c.unit.is_spent() && spent.is_some()));
        claim.charges = reserved;
        if let Some(key) = carries {
            self.carry(&key, &wrote);
        }
        for charge in known {
            let actual = settle.amount(&charge, spent);
            if let Some(counter) = self.counters.get_mut(&(charge.counter.clone(), charge.window)) {
                counter.settle(now, call, &charge, effect, actual);
            }
        }
        if settle == Settle::Pending {
            return true;
        }
        let Some(claim) = self.claims.get_mut(&call) else { return true };
        // A call without effect may run again. An outcome without keys is never requested again.
        match outcome.filter(|_| settle == Settle::Done && !claim.record.recall.is_empty()) {
            Some(outcome) => claim.outcome = Some(outcome),
            None => {
                if let Some(claim) = self.claims.remove(&call) {
                    for key in &claim.record.recall {
                        // Another call may have used the same key since.
                        if self.dedup_keys.get(key).is_some_and(|(_, by)| *by == call) {
                            self.dedup_keys.remove(key);
                        }
                    }
                }
            }
        }
        true
    }

    /// Records a row, and returns the oldest row if it was dropped.
    pub(crate) fn record(&mut self, row: Arc<Row>, keep: usize) -> Option<Arc<Row>> {
        let oldest = if self.rows.len() >= keep { self.rows.pop_front() } else { None };
        self.rows.push_back(row);
        self.rows_recorded += 1;
        oldest
    }
}
