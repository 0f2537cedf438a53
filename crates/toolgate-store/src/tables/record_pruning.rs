//! Prunes recorded outcomes, approvals and large outputs.

use jiff::Timestamp;
use rusqlite::Connection;

use crate::error::DbResult;
use crate::tables::ledger::to_nanos;

/// How many records one transaction prunes, so that other processes can write in between.
const MAX_PRUNED_RECORDS_PER_TRANSACTION: i64 = 5_000;

/// Deletes the outcomes of settled claims that ended before `before`. The claims themselves stay.
///
/// Handles one batch of claims after the id `after`. Returns the number of deleted outcomes and the
/// start of the next batch.
pub(crate) fn prune_outcomes(
    sql: &Connection,
    before: Timestamp,
    after: i64,
) -> DbResult<(u64, Option<i64>)> {
    let last = after.saturating_add(MAX_PRUNED_RECORDS_PER_TRANSACTION);
    let deleted = sql.execute(
        "UPDATE claims SET outcome = NULL WHERE id > ?2 AND id <= ?3 AND state = 'settled' AND outcome IS NOT NULL AND ended < ?1",
        [to_nanos(before), after, last],
    )?;
    let next: Option<i64> =
        sql.query_row("SELECT min(id) FROM claims WHERE id > ?1", [last], |row| row.get(0))?;
    Ok((deleted as u64, next.map(|id| id - 1)))
}

/// Deletes a batch of approvals that expired before `before`, and of older outputs.
///
/// Returns the number of deleted rows, 0 if none are left.
pub(crate) fn prune_approvals_and_outputs(sql: &Connection, before: Timestamp) -> DbResult<u64> {
    let approvals = sql.execute(
        "DELETE FROM approvals WHERE n IN (SELECT n FROM approvals WHERE expires < ?1 LIMIT ?2)",
        [to_nanos(before), MAX_PRUNED_RECORDS_PER_TRANSACTION],
    )?;
    let outputs = sql.execute(
        "DELETE FROM outputs WHERE (session, handle) IN (SELECT session, handle FROM outputs WHERE at < ?1 LIMIT ?2)",
        [to_nanos(before), MAX_PRUNED_RECORDS_PER_TRANSACTION],
    )?;
    Ok((approvals + outputs) as u64)
}
