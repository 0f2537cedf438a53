//! Commits the outcome of a call: state, claim, charges and ledger row in one transaction.

use std::sync::Arc;

use rusqlite::params;
use toolgate::json::Digest;
use toolgate::store::{Conflict, Finish, Settle, Unfit};
use toolgate::{Effects, Row};

use crate::claims::{self, Claim};
use crate::counters;
use crate::fault::{Done, Fault};
use crate::ledger::{self, nanos};
use crate::session::Session;
use crate::tx::Tx;
use crate::under_way;

/// A row, its sequence number in the ledger and its hash.
pub(super) type Appended = (Arc<Row>, u64, Digest);

/// Commits a call: state, claim, charges and row.
pub(super) fn end(tx: &mut Tx<'_>, finish: Finish, body: &str, outputs: Vec<Vec<u8>>) -> Done<Result<Appended, Conflict>> {
    let row = &finish.row;
    let (now, ended_at) = (row.at, row.ended());
    let mut session = Session::find_or_make(tx.sql, &row.key)?;
    if finish.changes.as_ref().is_some_and(|changes| changes.needs_version()) && session.version != finish.version {
        return Ok(Err(Conflict));
    }
    session.catch_up(tx, &row.key);
    if !finish.logs.is_empty() {
        session.append(tx.sql, finish.logs)?;
    }
    for revoked in finish.revoked {
        session.revoke(tx.sql, &revoked.key())?;
    }
    if let Some(changes) = finish.changes {
        session.apply(tx.sql, changes)?;
    }
    if let Some(ended) = &finish.ended {
        session.progress.ended(ended);
    }
    if let Some(seen) = finish.seen {
        session.see(tx.sql, &tx.shared.keys().redact, *seen)?;
    }
    for ((handle, _), sealed) in finish.outputs.iter().zip(outputs) {
        tx.sql.prepare_cached("INSERT OR REPLACE INTO outputs (session, handle, at, text) VALUES (?1, ?2, ?3, ?4)")?.execute(params![
            session.id,
            handle,
            nanos(now),
            sealed
        ])?;
    }
    let ended = counters::end_read(tx, row.call, finish.settle, finish.spent)?
        || under_way::end(tx, row.call, finish.settle, finish.spent, ended_at)?;
    let claim = match ended {
        true => None,
        false => Claim::find(tx.sql, row.call)?.filter(|claim| !claim.is_settled()),
    };
    let (row, (seq, hash)) = match ledger::append(tx, &mut session, row, body) {
        // The call was abandoned and has a row that says so. This is its late result.
        Err(Fault::Sql(error))
            if error.sqlite_error_code() == Some(rusqlite::ErrorCode::ConstraintViolation) && ledger::has(tx.sql, &row.call)? =>
        {
            let late = row.settled(row.outcome.clone(), row.effects, "a report that came late", row.ended());
            let body = ledger::text(&late)?;
            let appended = ledger::append(tx, &mut session, &late, &body)?;
            (Arc::new(late), appended)
        }
        appended => (Arc::clone(row), appended?),
    };
    session.save(tx.sql)?;
    if let Some(claim) = claim {
        claims::end(tx, claim, finish.settle, finish.spent, finish.outcome.as_ref(), ended_at)?;
    }
    Ok(Ok((row, seq, hash)))
}

/// Appends a row that was spooled while the store was unavailable, and ends its claim.
///
/// A row that is in the ledger already is skipped.
pub(super) fn take_in(tx: &mut Tx<'_>, row: &Row) -> Done<()> {
    counters::end_read(tx, row.call, Settle::by(row.effects), row.spent)?;
    // Handle the claim like one of another process.
    tx.take_own(row.call, None);
    under_way::adopt(tx, row.call)?;
    let claim = Claim::find(tx.sql, row.call)?.filter(|claim| !claim.is_settled());
    if ledger::has(tx.sql, &row.call)? {
        // The call was abandoned meanwhile, and this is its real outcome.
        if let Some(claim) = claim.filter(|_| row.effects != Effects::Unknown) {
            let late = row.settled(row.outcome.clone(), row.effects, "a report that came late", row.ended());
            claims::append_row(tx, &late)?;
            claims::end(tx, claim, Settle::by(row.effects), row.spent, Some(&row.outcome), row.ended())?;
        }
        return Ok(());
    }
    if let Some(claim) = claim {
        if Settle::by(row.effects) != Settle::Released {
            claims::revoke_for(tx, &claim)?;
        }
        claims::end(tx, claim, Settle::by(row.effects), row.spent, Some(&row.outcome), row.ended())?;
    }
    claims::append_row(tx, row).map(|_| ())
}

/// Appends a spooled row. Skips and returns a row that can never be stored.
pub(super) fn take_in_if_fit(tx: &mut Tx<'_>, row: &Row) -> Done<Option<Unfit>> {
    let (before, done) = (tx.tip, tx.done());
    tx.sql.prepare_cached("SAVEPOINT spooled")?.execute([])?;
    let unfit = match take_in(tx, row) {
        Ok(()) => None,
        Err(fault) if fault.is_for_good() && !tx.sql.is_autocommit() => {
            tx.sql.prepare_cached("ROLLBACK TO spooled")?.execute([])?;
            tx.tip = before;
            tx.unwind(done);
            // A definition of the failed row may be in the set.
            tx.configs.clear();
            Some(Unfit { call: row.call, why: fault.to_string() })
        }
        Err(fault) => return Err(fault),
    };
    tx.sql.prepare_cached("RELEASE spooled")?.execute([])?;
    Ok(unfit)
}
