//! Commits the outcome of a call: state, claim, charges and ledger row in one transaction.

use std::sync::Arc;

use rusqlite::params;
use toolgate::store::{ClaimResolution, CommitConflictError, CommitRequest, RejectedRow};
use toolgate::{CallEffects, Row};
use toolgate_json::Digest;

use crate::error::{DbError, DbResult};
use crate::tables::claim_settlement;
use crate::tables::claims;
use crate::tables::claims::StoredClaim;
use crate::tables::counters;
use crate::tables::inline_claims;
use crate::tables::ledger;
use crate::tables::ledger::to_nanos;
use crate::tables::session_items;
use crate::tables::sessions::SessionHeader;
use crate::transaction::WriteTransaction;

/// A row, its sequence number in the ledger and its hash.
pub(crate) type AppendedRow = (Arc<Row>, u64, Digest);

/// Commits a call: state, claim, charges and row.
pub(crate) fn commit_call(
    tx: &mut WriteTransaction<'_>,
    request: CommitRequest,
    body: &str,
    outputs: Vec<Vec<u8>>,
    items: &[Vec<u8>],
) -> DbResult<Result<AppendedRow, CommitConflictError>> {
    let row = &request.row;
    let (now, ended_at) = (row.at, row.ended_at());
    let mut session = SessionHeader::get_or_create(tx.sql, &row.key)?;
    if request.changes.as_ref().is_some_and(|changes| changes.can_conflict())
        && session.version != request.version
    {
        return Ok(Err(CommitConflictError));
    }
    session.count_uncounted_calls(tx, &row.key);
    if !request.logs.is_empty() {
        session.append_logs(tx.sql, request.logs)?;
    }
    for revoked in request.revoked {
        session.revoke_evidence(tx.sql, &revoked.into_key())?;
    }
    if let Some(changes) = request.changes {
        session.apply_changes(tx.sql, changes)?;
    }
    if let Some(ended) = &request.ended {
        session.progress.record_end(ended);
    }
    if let Some(provenance) = request.provenance {
        session.store_provenance(tx.sql, &tx.shared.keys().redaction_key, *provenance)?;
    }
    for ((handle, _), sealed) in request.outputs.iter().zip(outputs) {
        tx.sql.prepare_cached("INSERT OR REPLACE INTO outputs (session, handle, at, text) VALUES (?1, ?2, ?3, ?4)")?.execute(params![
            session.id,
            handle,
            to_nanos(now),
            sealed
        ])?;
    }
    let ended = counters::settle_read_charges(tx, row.call, request.resolution, request.spent)?
        || inline_claims::end_inflight(tx, row.call, request.resolution, request.spent, ended_at)?;
    let claim = match ended {
        true => None,
        false => StoredClaim::find(tx.sql, row.call)?.filter(|claim| !claim.is_settled()),
    };
    let (row, (seq, hash)) = match ledger::append_to_chains(tx, &mut session, row, body) {
        // The call was abandoned, and the ledger has a row for that. This is its late result.
        Err(DbError::Sql(error))
            if error.sqlite_error_code() == Some(rusqlite::ErrorCode::ConstraintViolation)
                && ledger::has_row(tx.sql, &row.call)? =>
        {
            let late = row.settlement_row(
                row.outcome.clone(),
                row.effects,
                "a report that came late",
                row.ended_at(),
            );
            let body = ledger::canonical_text(&late)?;
            let appended = ledger::append_to_chains(tx, &mut session, &late, &body)?;
            (Arc::new(late), appended)
        }
        appended => (Arc::clone(row), appended?),
    };
    session.save(tx.sql)?;
    session_items::append_items(tx, &row.key, items)?;
    if let Some(claim) = claim {
        claim_settlement::end_claim(
            tx,
            claim,
            request.resolution,
            request.spent,
            request.outcome.as_ref(),
            ended_at,
        )?;
    }
    Ok(Ok((row, seq, hash)))
}

/// Appends a row that was spooled while the store was unavailable, and ends its claim.
///
/// A row that is in the ledger already is skipped.
pub(crate) fn append_spooled_row(tx: &mut WriteTransaction<'_>, row: &Row) -> DbResult<()> {
    counters::settle_read_charges(
        tx,
        row.call,
        ClaimResolution::from_effects(row.effects),
        row.spent,
    )?;
    // Handle the claim like one of another process.
    tx.replace_inflight_charges(row.call, None);
    inline_claims::move_to_claims(tx, row.call)?;
    let claim = StoredClaim::find(tx.sql, row.call)?.filter(|claim| !claim.is_settled());
    if ledger::has_row(tx.sql, &row.call)? {
        // The call was abandoned meanwhile, and this is its real outcome.
        if let Some(claim) = claim.filter(|_| row.effects != CallEffects::Unknown) {
            let late = row.settlement_row(
                row.outcome.clone(),
                row.effects,
                "a report that came late",
                row.ended_at(),
            );
            claim_settlement::append_row(tx, &late)?;
            claim_settlement::end_claim(
                tx,
                claim,
                ClaimResolution::from_effects(row.effects),
                row.spent,
                Some(&row.outcome),
                row.ended_at(),
            )?;
        }
        return Ok(());
    }
    if let Some(claim) = claim {
        if ClaimResolution::from_effects(row.effects) != ClaimResolution::Released {
            claims::revoke_evidence_of(tx, &claim)?;
        }
        claim_settlement::end_claim(
            tx,
            claim,
            ClaimResolution::from_effects(row.effects),
            row.spent,
            Some(&row.outcome),
            row.ended_at(),
        )?;
    }
    claim_settlement::append_row(tx, row).map(|_| ())
}

/// Appends a spooled row. Skips and returns a row that can never be stored.
pub(crate) fn append_spooled_row_if_valid(
    tx: &mut WriteTransaction<'_>,
    row: &Row,
) -> DbResult<Option<RejectedRow>> {
    let (head_before, undo_before) = (tx.head, tx.undo_len());
    tx.sql.prepare_cached("SAVEPOINT spooled")?.execute([])?;
    let rejected = match append_spooled_row(tx, row) {
        Ok(()) => None,
        Err(fault) if fault.is_permanent() && !tx.sql.is_autocommit() => {
            tx.sql.prepare_cached("ROLLBACK TO spooled")?.execute([])?;
            tx.head = head_before;
            tx.undo_to(undo_before);
            // A definition of the failed row may be in the set.
            tx.stored_configs.clear();
            Some(RejectedRow { call: row.call, reason: fault.to_string() })
        }
        Err(fault) => return Err(fault),
    };
    tx.sql.prepare_cached("RELEASE spooled")?.execute([])?;
    Ok(rejected)
}
