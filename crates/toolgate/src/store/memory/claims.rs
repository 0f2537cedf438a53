//! Claims and commits calls in the memory store, under its lock.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;

use super::super::{
    ApprovalState, ClaimError, ClaimRequest, CommitConflictError, CommitRequest, DeferredClaim,
    StoreError, check_call_charges,
};
use super::{Inner, MAX_OUTPUTS, MemoryClaim};
use crate::call::SessionKey;
use crate::ledger::row::Row;

impl Inner {
    /// Claims a call, and returns the amount used of each counter before.
    pub(super) fn claim(
        &mut self,
        request: ClaimRequest<'_>,
        now: Timestamp,
    ) -> Result<Result<Vec<Decimal>, ClaimError>, StoreError> {
        let ClaimRequest { mut record, lease_ttl, charges, approval, items } = request;
        record.lease = now.checked_add(lease_ttl).unwrap_or(Timestamp::MAX);
        if let Some((target, reason)) = self.find_pause(&record.key, &record.tool) {
            return Ok(Err(ClaimError::Paused(target, reason)));
        }
        if let Some((prior_call, kind)) = self.find_prior_call(&record.recall, record.asked, now) {
            return Ok(Err(ClaimError::PriorCall(prior_call, kind)));
        }
        let used = match check_call_charges(charges, |charge| {
            Ok::<_, StoreError>(self.check_charge(charge, now))
        })? {
            Ok(used) => used,
            Err(exceeded) => return Ok(Err(exceeded)),
        };
        if let Some(id) = approval {
            match self.approvals.get_mut(id) {
                Some(a) if a.is_usable(now) && a.digest == record.digest && a.key == record.key => {
                    a.state = ApprovalState::Used;
                }
                _ => return Ok(Err(ClaimError::ApprovalUnavailable)),
            }
        }
        for charge in charges {
            self.counters.entry((charge.counter.clone(), charge.window)).or_default().reserve(
                now,
                record.call,
                charge,
                record.effect,
            );
        }
        for key in &record.recall {
            self.dedup_keys.insert(key.clone(), (record.asked, record.call));
        }
        let call = record.call;
        self.append_items(&record.key, items);
        if let Some(provenance) = record.seen.take() {
            self.record_provenance(&record.key, *provenance);
        }
        if record.is_run_by_client() {
            self.record_carriers(&record.key, &record.carriers);
        }
        for revoked in record.revokes.iter().filter(|_| record.is_run_by_client()) {
            Arc::make_mut(&mut self.session_mut(&record.key).state).revoke(revoked.clone());
        }
        let used_before = charges
            .iter()
            .zip(&used)
            .map(|(charge, used)| (charge.counter.clone(), charge.window, *used))
            .collect();
        self.open_claims.insert(&record);
        self.claims.insert(
            call,
            MemoryClaim {
                record,
                charges: charges.to_vec(),
                used: used_before,
                outcome: None,
                pending: false,
            },
        );
        Ok(Ok(used))
    }

    /// Ends a call, and returns the oldest row if it was dropped.
    pub(super) fn commit(
        &mut self,
        request: CommitRequest,
        max_rows: usize,
    ) -> Result<Option<Arc<Row>>, CommitConflictError> {
        let session = self.session_mut(&request.row.key);
        if request.changes.as_ref().is_some_and(|changes| changes.can_conflict())
            && session.version != request.version
        {
            return Err(CommitConflictError);
        }
        if !request.logs.is_empty() {
            Arc::make_mut(&mut session.state).append_logs(request.logs);
        }
        for revoked in request.revoked {
            Arc::make_mut(&mut session.state).revoke(revoked);
        }
        if let Some(changes) = request.changes {
            session.version += u64::from(changes.can_conflict());
            Arc::make_mut(&mut session.state).apply_changes(changes);
        }
        if let Some(ended) = &request.ended {
            session.progress.record_end(ended);
        }
        if let Some(provenance) = request.provenance {
            self.record_provenance(&request.row.key, *provenance);
        }
        self.resolve_claim(
            request.row.call,
            request.resolution,
            request.spent,
            request.outcome,
            request.row.ended_at(),
        );
        for (handle, text) in request.outputs {
            let output = (request.row.key.clone(), handle);
            self.output_order.push_back(output.clone());
            self.outputs.insert(output, text);
            if self.output_order.len() > MAX_OUTPUTS
                && let Some(oldest) = self.output_order.pop_front()
            {
                self.outputs.remove(&oldest);
            }
        }
        self.append_items(&request.row.key, request.items);
        Ok(self.record_row(request.row, max_rows))
    }

    /// Takes the newest unsettled deferred call of a tool, by the client's id for the call.
    pub(super) fn take_deferred_claim(
        &mut self,
        key: &SessionKey,
        client: &str,
        tool: &str,
    ) -> Option<DeferredClaim> {
        for call in self.open_claims.deferred_calls(key) {
            let Some(claim) =
                self.claims.get_mut(&call).filter(|claim| *claim.record.tool == *tool)
            else {
                continue;
            };
            if let Some((_, state)) = claim.record.pass.take_if(|(name, _)| *name == *client) {
                return Some(DeferredClaim {
                    claim: (*claim.record).clone(),
                    state,
                    counters_before: claim.used.clone(),
                });
            }
        }
        None
    }

    /// Makes the deferred calls of a client's session pending.
    pub(super) fn close_client_session(&mut self, key: &SessionKey, now: Timestamp) {
        let lease_end = now.checked_sub(SignedDuration::from_nanos(1)).unwrap_or(Timestamp::MIN);
        for call in self.open_claims.deferred_calls(key) {
            if let Some(claim) =
                self.claims.get_mut(&call).filter(|claim| claim.record.is_run_by_client())
            {
                claim.record.pass = None;
                self.open_claims.set_lease(&mut claim.record, lease_end);
            }
        }
        self.expire_leases(now);
    }
}
