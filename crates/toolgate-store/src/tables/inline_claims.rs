//! Stores claims that the claiming process normally ends itself, with one insert and one delete.
//!
//! A claim that ends in any other way is moved to the `claims` table first.

use rusqlite::{Connection, OptionalExtension, params};
use rust_decimal::Decimal;
use toolgate::limits::{Charge, Cost};
use toolgate::store::{ClaimOwner, ClaimRecord, ClaimResolution};
use toolgate::{CallId, SessionKey};

use crate::error::DbResult;
use crate::tables::claims::StoredClaim;
use crate::tables::counters::{ReservedCharge, compute_charge_start, settle_charge};
use crate::tables::ledger::{parse_digest, to_nanos};
use crate::tables::sessions::{SessionHeader, from_nanos};
use crate::transaction::WriteTransaction;

/// Computes the row id of a call from the time and the random bits of its call id.
///
/// New rows are mostly last in the table.
const fn row_id(call: CallId) -> i64 {
    let [_, _, a, b, c, d, _, _, _, _, _, _, e, f, g, h] = *call.as_bytes();
    i64::from_be_bytes([a & 0x7f, b, c, d, e, f, g, h])
}

/// Inserts a claim that this process ends itself. Returns false if it must go to `claims` instead.
pub(crate) fn insert_inflight(
    tx: &WriteTransaction<'_>,
    record: &ClaimRecord,
    draft: Option<&str>,
    reserved: &[(usize, i64, &Charge, Decimal)],
) -> DbResult<bool> {
    let is_own = record.effect && record.pass.is_none() && tx.shared.is_own_claim(record);
    if !is_own || record.seen.is_some() || !record.recall.is_empty() || !record.carriers.is_empty()
    {
        return Ok(false);
    }
    let revokes = if record.revokes.is_empty() {
        None
    } else {
        Some(serde_json::to_string(&record.revokes)?)
    };
    let written = tx
        .sql
        .prepare_cached(
            "INSERT OR IGNORE INTO under_way (id, call, agent, principal, session, tool, digest, asked, term, lease, revokes, charges, draft)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
        )?
        .execute(params![
            row_id(record.call),
            record.call.as_bytes().as_slice(),
            &*record.key.agent,
            &*record.key.principal,
            &*record.key.session,
            &*record.tool,
            record.digest.as_bytes().as_slice(),
            record.asked.as_bytes().as_slice(),
            tx.shared.state_dir.term(),
            to_nanos(record.lease),
            revokes,
            serde_json::to_string(reserved)?,
            draft,
        ])?;
    // Another call may have the same id already.
    if written > 0 {
        tx.replace_inflight_charges(
            record.call,
            Some(reserved.iter().map(|(n, at, charge, _)| (*n, *at, (*charge).clone())).collect()),
        );
    }
    Ok(written > 0)
}

/// Ends a claim of this process. Returns false if there is none, or if it is in `claims` now.
pub(crate) fn end_inflight(
    tx: &WriteTransaction<'_>,
    call: CallId,
    resolution: ClaimResolution,
    spent: Option<Cost>,
    now: jiff::Timestamp,
) -> DbResult<bool> {
    let Some(reserved) = tx.replace_inflight_charges(call, None) else { return Ok(false) };
    if resolution == ClaimResolution::Pending {
        move_to_claims(tx, call)?;
        return Ok(false);
    }
    if !delete_inflight(tx.sql, call)? {
        return Ok(false);
    }
    for (n, at, charge) in reserved {
        let from = compute_charge_start(at, &charge, now);
        settle_charge(
            tx.sql,
            call,
            (n, at, &charge),
            resolution.final_amount(&charge, spent),
            from,
        )?;
    }
    Ok(true)
}

fn delete_inflight(sql: &Connection, call: CallId) -> DbResult<bool> {
    let mut statement = sql.prepare_cached("DELETE FROM under_way WHERE id = ?1 AND call = ?2")?;
    Ok(statement.execute(params![row_id(call), call.as_bytes().as_slice()])? > 0)
}

/// Returns true if a running call has reserved this charge.
pub(crate) fn has_reserved_charge(sql: &Connection, call: CallId, n: usize) -> DbResult<bool> {
    let charges: Option<String> = sql
        .prepare_cached("SELECT charges FROM under_way WHERE id = ?1 AND call = ?2")?
        .query_row(params![row_id(call), call.as_bytes().as_slice()], |row| row.get(0))
        .optional()?;
    let Some(charges) = charges else { return Ok(false) };
    let charges: Vec<(usize, i64, Charge, Decimal)> = serde_json::from_str(&charges)?;
    Ok(charges
        .iter()
        .any(|(number, _, charge, _)| *number == n && charge.is_reserved_while_pending()))
}

/// Returns true if the table has any row.
pub(crate) fn has_inflight(sql: &Connection) -> DbResult<bool> {
    Ok(sql.prepare_cached("SELECT 1 FROM under_way LIMIT 1")?.exists([])?)
}

const INFLIGHT_COLUMNS: &str = "call, agent, principal, session, tool, digest, asked, term, lease, revokes, charges, draft FROM under_way";

fn read_claim(row: &rusqlite::Row<'_>) -> DbResult<StoredClaim> {
    let text = |column: usize| row.get::<_, String>(column);
    let (term, lease) = (text(7)?, from_nanos(row.get(8)?));
    let revokes: Option<String> = row.get(9)?;
    let charges: Vec<(usize, i64, Charge, Decimal)> = serde_json::from_str(&text(10)?)?;
    let record = ClaimRecord {
        call: CallId::from_bytes(row.get(0)?),
        key: SessionKey::new(text(1)?, text(2)?, text(3)?),
        tool: text(4)?.into(),
        digest: parse_digest(&row.get::<_, Vec<u8>>(5)?)?,
        asked: parse_digest(&row.get::<_, Vec<u8>>(6)?)?,
        recall: Vec::new(),
        owner: ClaimOwner::Term(term.into()),
        lease,
        effect: true,
        row: None,
        pass: None,
        carriers: Vec::new(),
        seen: None,
        revokes: revokes.map_or_else(|| Ok(Vec::new()), |text| serde_json::from_str(&text))?,
    };
    let used = charges
        .iter()
        .map(|(_, _, charge, used)| (charge.counter.clone(), charge.window, *used))
        .collect();
    let reserved: Vec<ReservedCharge> =
        charges.into_iter().map(|(n, at, charge, _)| (n, at, charge)).collect();
    Ok(StoredClaim::new_open(record, reserved, used, row.get(11)?))
}

/// Reads the claims of all processes. A read-only ledger with an older schema has no such table.
pub(crate) fn read_inflight(sql: &Connection) -> DbResult<Vec<StoredClaim>> {
    if !sql.prepare_cached("SELECT 1 FROM sqlite_schema WHERE name = 'under_way'")?.exists([])? {
        return Ok(Vec::new());
    }
    let mut statement = sql.prepare_cached(&format!("SELECT {INFLIGHT_COLUMNS} ORDER BY id"))?;
    let mut rows = statement.query([])?;
    let mut all = Vec::new();
    while let Some(row) = rows.next()? {
        all.push(read_claim(row)?);
    }
    Ok(all)
}

/// Moves a call to `claims`, if it is in this table.
pub(crate) fn move_to_claims(tx: &WriteTransaction<'_>, call: CallId) -> DbResult<()> {
    let mut statement =
        tx.sql.prepare_cached(&format!("SELECT {INFLIGHT_COLUMNS} WHERE id = ?1 AND call = ?2"))?;
    let mut rows = statement.query(params![row_id(call), call.as_bytes().as_slice()])?;
    let found = rows.next()?.map(read_claim).transpose()?;
    drop(rows);
    found.map_or(Ok(()), |claim| move_claim(tx, &claim))
}

/// Moves calls of processes that have ended to `claims`.
pub(crate) fn move_abandoned_to_claims(
    tx: &WriteTransaction<'_>,
    now: jiff::Timestamp,
) -> DbResult<()> {
    if !has_inflight(tx.sql)? {
        return Ok(());
    }
    let abandoned = read_inflight(tx.sql)?
        .into_iter()
        .filter(|claim| claim.is_abandoned(&tx.shared.state_dir, now));
    abandoned.into_iter().try_for_each(|claim| move_claim(tx, &claim))
}

fn move_claim(tx: &WriteTransaction<'_>, claim: &StoredClaim) -> DbResult<()> {
    delete_inflight(tx.sql, claim.call)?;
    let session = SessionHeader::get_or_create(tx.sql, &claim.record.key)?;
    claim.insert(tx.sql, session.id)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use jiff::Timestamp;
    use toolgate_json::Digest;

    use super::*;
    use crate::state_dir::StateDir;
    use crate::transaction::SharedStoreState;

    #[test]
    fn a_call_whose_row_id_is_taken_goes_to_claims() {
        let directory = tempfile::tempdir().unwrap();
        let sql = crate::open::open_writable(&directory.path().join("ledger.db")).unwrap();
        let state = directory.path().join("state");
        drop(StateDir::acquire_open_lock(&state).unwrap());
        let home = StateDir::open_owner(&state).unwrap();
        let (id, keys) = crate::open::link_state_dir(&sql, &home).unwrap();
        let shared = SharedStoreState::new(
            home,
            id,
            keys,
            std::sync::Arc::new(toolgate::clock::SystemClock),
        );
        let mut configs = HashSet::new();
        let tx = WriteTransaction::new(
            &sql,
            &shared,
            crate::tables::ledger::read_head(&sql).unwrap(),
            &mut configs,
        );
        // The ids differ only in bits that the row id does not contain.
        let calls = [1, 2]
            .map(|n| CallId::from_bytes([1, 2, 3, 4, 5, 6, 7, n, 9, 10, 11, 12, 13, 14, 15, 16]));
        let now = Timestamp::now();
        for call in calls {
            let record = ClaimRecord {
                call,
                key: SessionKey::new("a", "al", "s"),
                tool: "act".into(),
                digest: Digest::default(),
                asked: Digest::default(),
                recall: Vec::new(),
                owner: ClaimOwner::Term(shared.state_dir.term().cloned().unwrap()),
                lease: now,
                effect: true,
                row: None,
                pass: None,
                carriers: Vec::new(),
                seen: None,
                revokes: Vec::new(),
            };
            crate::tables::claims::store_claim(&tx, &record, None, &[], &[], now).unwrap();
        }
        let [first, second] = calls;
        assert!(
            StoredClaim::find(&sql, first).unwrap().is_none()
                && StoredClaim::find(&sql, second).unwrap().is_some()
        );
        assert_eq!(StoredClaim::read_unsettled(&sql).unwrap().len(), 2);
        assert!(end_inflight(&tx, first, ClaimResolution::Done, None, now).unwrap());
        assert!(!end_inflight(&tx, second, ClaimResolution::Done, None, now).unwrap());
        assert_eq!(StoredClaim::read_unsettled(&sql).unwrap().len(), 1);
    }
}
