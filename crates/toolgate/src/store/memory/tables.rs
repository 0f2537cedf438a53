//! Implements the operations of the memory store under its lock.

use std::sync::Arc;

use jiff::Timestamp;
use rust_decimal::Decimal;

use super::super::{ClaimResolution, DedupKey, PauseTarget, PriorCall, SessionItem};
use super::{Inner, MemoryClaim, MemorySession};
use crate::call::outcome::Outcome;
use crate::call::{CallId, SessionKey};
use crate::ledger::row::Row;
use crate::limits::{Charge, ChargeError, Cost, Counter};
use crate::policy::DedupKeyKind;
use crate::provenance;
use crate::provenance::ProvenanceStore as _;
use crate::session::repetition::RepetitionState;
use toolgate_json::Digest;

impl Inner {
    /// Appends items to a session.
    pub(super) fn append_items(&mut self, key: &SessionKey, items: Vec<SessionItem>) {
        if !items.is_empty() {
            self.items.entry(key.clone()).or_default().extend(items);
        }
    }

    pub(crate) fn session_mut(&mut self, key: &SessionKey) -> &mut MemorySession {
        self.sessions.entry(key.clone()).or_insert_with(|| MemorySession {
            version: 0,
            opened: None,
            state: Arc::default(),
            progress: RepetitionState::default(),
            lock: Arc::default(),
        })
    }

    pub(crate) fn find_pause(
        &self,
        key: &SessionKey,
        tool: &Arc<str>,
    ) -> Option<(PauseTarget, String)> {
        if self.paused.is_empty() {
            return None;
        }
        let targets = [
            PauseTarget::Agent(Arc::clone(&key.agent)),
            PauseTarget::Principal(Arc::clone(&key.principal)),
            PauseTarget::Tool(Arc::clone(tool)),
            PauseTarget::Session(key.clone()),
        ];
        targets
            .into_iter()
            .find_map(|target| self.paused.get(&target).cloned().map(|reason| (target, reason)))
    }

    pub(crate) fn find_prior_call(
        &self,
        keys: &[DedupKey],
        digest: Digest,
        now: Timestamp,
    ) -> Option<(PriorCall, DedupKeyKind)> {
        keys.iter()
            .find_map(|key| Some((self.find_prior_call_by_key(key, digest, now)?, key.kind())))
    }

    fn find_prior_call_by_key(
        &self,
        key: &DedupKey,
        digest: Digest,
        now: Timestamp,
    ) -> Option<PriorCall> {
        let (first_digest, call) = self.dedup_keys.get(key)?;
        // A call of a `once` tool is found by its arguments, as requested or as changed by hooks.
        if *first_digest != digest && key.kind() == DedupKeyKind::Key {
            return Some(PriorCall::KeyReused);
        }
        let claim = self.claims.get(call)?;
        Some(match &claim.outcome {
            Some(outcome) => PriorCall::Settled(Some(outcome.clone())),
            None if claim.is_pending(now) => PriorCall::Pending(*call),
            // An abandoned read had no effect.
            None if now > claim.record.lease => return None,
            None => PriorCall::InProgress,
        })
    }

    /// Returns the amount used of a counter if a charge fits; never creates a counter.
    pub(crate) fn check_charge(
        &mut self,
        charge: &Charge,
        now: Timestamp,
    ) -> Result<Decimal, ChargeError> {
        let mut fresh = Counter::default();
        let counter =
            self.counters.get_mut(&(charge.counter.clone(), charge.window)).unwrap_or(&mut fresh);
        counter.check_charge(now, charge).map(|()| counter.used(now, charge.window))
    }

    /// Records the provenance of the values of a call.
    pub(crate) fn record_provenance(
        &mut self,
        key: &SessionKey,
        update: provenance::ProvenanceUpdate,
    ) {
        let mut carriers = std::mem::take(&mut self.carriers);
        let state = Arc::make_mut(&mut self.session_mut(key).state);
        state.stamp += 1;
        provenance::apply_update(&mut state.provenance, update, &mut carriers);
        self.carriers = carriers;
    }

    /// Records the files and entities that a call has, or may have, written.
    pub(crate) fn record_carriers(&mut self, key: &SessionKey, keys: &[String]) {
        let tainted =
            self.sessions.get(key).is_some_and(|session| session.state.provenance.flags().tainted);
        provenance::record_carrier_writes(keys, tainted, &mut self.carriers);
    }

    /// Revokes the evidence of a call that may have had an effect.
    pub(crate) fn revoke_evidence_of(&mut self, call: CallId) {
        let Some(claim) =
            self.claims.get(&call).filter(|claim| claim.outcome.is_none() && claim.record.effect)
        else {
            return;
        };
        let (key, revokes) = (claim.record.key.clone(), claim.record.revokes.clone());
        for revoked in revokes {
            Arc::make_mut(&mut self.session_mut(&key).state).revoke(revoked);
        }
    }

    /// Makes claims with an ended lease pending, which revokes their evidence.
    ///
    /// A deferred read is released.
    pub(crate) fn expire_leases(&mut self, now: Timestamp) {
        let must_expire =
            |claim: &MemoryClaim| claim.record.effect || claim.record.is_run_by_client();
        for call in self.open_claims.expired(now) {
            if !self.claims.get(&call).is_some_and(must_expire) {
                continue;
            }
            self.revoke_evidence_of(call);
            self.resolve_claim(call, ClaimResolution::Pending, None, None, now);
        }
    }

    pub(crate) fn resolve_claim(
        &mut self,
        call: CallId,
        resolution: ClaimResolution,
        spent: Option<Cost>,
        outcome: Option<Outcome>,
        now: Timestamp,
    ) -> bool {
        // A settled claim never changes.
        let Some(claim) = self.claims.get_mut(&call).filter(|claim| claim.outcome.is_none()) else {
            return false;
        };
        let effect = claim.record.effect;
        let resolution = if effect { resolution } else { resolution.for_read() };
        claim.pending |= resolution == ClaimResolution::Pending;
        self.open_claims.remove(&claim.record, resolution == ClaimResolution::Pending);
        let written = std::mem::take(&mut claim.record.carriers);
        let carrier_session = (resolution != ClaimResolution::Released && !written.is_empty())
            .then(|| claim.record.key.clone());
        // A reported amount is final, even if the effect is unknown.
        let (known, reserved): (Vec<Charge>, Vec<Charge>) =
            std::mem::take(&mut claim.charges).into_iter().partition(|c| {
                resolution != ClaimResolution::Pending
                    || (c.unit.is_known_after_call() && spent.is_some())
            });
        claim.charges = reserved;
        if let Some(key) = carrier_session {
            self.record_carriers(&key, &written);
        }
        for charge in known {
            let actual = resolution.final_amount(&charge, spent);
            if let Some(counter) = self.counters.get_mut(&(charge.counter.clone(), charge.window)) {
                counter.settle(now, call, &charge, effect, actual);
            }
        }
        if resolution == ClaimResolution::Pending {
            return true;
        }
        let Some(claim) = self.claims.get_mut(&call) else { return true };
        // A call without effect may run again. An outcome without keys is never requested again.
        match outcome
            .filter(|_| resolution == ClaimResolution::Done && !claim.record.recall.is_empty())
        {
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
    pub(crate) fn record_row(&mut self, row: Arc<Row>, max_rows: usize) -> Option<Arc<Row>> {
        let oldest = if self.rows.len() >= max_rows { self.rows.pop_front() } else { None };
        self.rows.push_back(row);
        self.rows_recorded += 1;
        oldest
    }
}
