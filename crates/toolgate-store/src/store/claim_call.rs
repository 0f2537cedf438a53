//! Claims a call: pauses, earlier calls, limits, approval and claim record in one transaction.

use jiff::Timestamp;
use rust_decimal::Decimal;
use toolgate::store::{
    Approval, ApprovalState, ClaimError, ClaimRequest, Store as _, StoreError, check_call_charges,
};

use super::SqliteStore;
use crate::error::DbError;
use crate::store::approvals::{find_approval, save_approval};
use crate::store::pauses::find_pause;
use crate::tables::claims;
use crate::tables::counters;
use crate::tables::ledger;
use crate::tables::session_items;

impl SqliteStore {
    /// Claims a call, and returns the amount used of each counter before.
    pub(super) async fn claim_call(
        &self,
        request: ClaimRequest<'_>,
    ) -> Result<Result<Vec<Decimal>, ClaimError>, StoreError> {
        let now = self.now();
        let ClaimRequest { mut record, lease_ttl, charges, approval, items } = request;
        record.lease = now.checked_add(lease_ttl).unwrap_or(Timestamp::MAX);
        let (charges, approval) = (charges.to_vec(), approval.map(str::to_owned));
        let items = self.seal_items(&items)?;
        // The draft is parsed again before it becomes a row, so it need not be canonical.
        let draft = record.row.as_ref().map(|row| serde_json::to_string(&**row)).transpose();
        let draft = draft.map_err(|error| StoreError::from(DbError::from(error)))?;
        self.write(record.effect, move |tx| {
            if let Some((target, reason)) = find_pause(tx.sql, &record.key, &record.tool)? {
                return Ok(Err(ClaimError::Paused(target, reason)));
            }
            let prior_call = claims::find_prior_call(
                tx.sql,
                &tx.shared.state_dir,
                &tx.shared.keys(),
                &record.recall,
                record.asked,
                now,
            )?;
            if let Some((prior_call, kind)) = prior_call {
                return Ok(Err(ClaimError::PriorCall(prior_call, kind)));
            }
            let used = match check_call_charges(&charges, |charge| {
                counters::check_charge(tx.sql, charge, now)
            })? {
                Ok(used) => used,
                Err(exceeded) => return Ok(Err(exceeded)),
            };
            if let Some(id) = approval {
                match find_approval(tx.sql, tx.shared, &id)? {
                    Some(a)
                        if a.is_usable(now) && a.digest == record.digest && a.key == record.key =>
                    {
                        save_approval(tx.sql, &Approval { state: ApprovalState::Used, ..a })?;
                    }
                    _ => return Ok(Err(ClaimError::ApprovalUnavailable)),
                }
            }
            if let Some(row) = &record.row {
                ledger::store_definition(tx, row.config)?;
            }
            claims::store_claim(tx, &record, draft.as_deref(), &charges, &used, now)?;
            claims::apply_claim_effects(tx, &mut record)?;
            session_items::append_items(tx, &record.key, &items)?;
            Ok(Ok(used))
        })
        .await
    }
}
