//! Ends claims: by the outcome of their calls, by sweeping abandoned calls, or by a person.

use jiff::Timestamp;
use rusqlite::{OptionalExtension, params};
use toolgate::limits::Cost;
use toolgate::store::ClaimResolution;
use toolgate::{CallId, Outcome, Row, SessionKey};
use toolgate_json::Digest;

use crate::error::DbResult;
use crate::tables::claims::{
    StoredClaim, outcome_seal_context, record_carriers, revoke_evidence_of,
};
use crate::tables::counters::{compute_charge_start, settle_charge};
use crate::tables::inline_claims;
use crate::tables::ledger;
use crate::tables::ledger::to_nanos;
use crate::tables::sessions::SessionHeader;
use crate::transaction::WriteTransaction;

/// Statements that close the session of a client. They read only open claims and deferred calls.
const EXPIRE_CLIENT_LEASES_SQL: &str = "UPDATE claims INDEXED BY claims_unsettled SET lease = ?2
    WHERE session = ?1 AND state <> 'settled' AND state = 'open' AND term IS NULL";
const DISCARD_DEFERRED_CALLS_SQL: &str =
    "UPDATE claims INDEXED BY claims_kept SET pass = NULL WHERE session = ?1 AND pass IS NOT NULL";

/// Abandons the open calls of a client session that has ended.
pub(crate) fn close_client_session(
    tx: &mut WriteTransaction<'_>,
    key: &SessionKey,
    now: Timestamp,
) -> DbResult<()> {
    let Some(session) = SessionHeader::find(tx.sql, key)? else { return Ok(()) };
    tx.sql
        .prepare_cached(EXPIRE_CLIENT_LEASES_SQL)?
        .execute(params![session.id, to_nanos(now).saturating_sub(1)])?;
    tx.sql.prepare_cached(DISCARD_DEFERRED_CALLS_SQL)?.execute(params![session.id])?;
    sweep_abandoned(tx, now).map(|_| ())
}

/// Ends a claim by the effects of its call.
pub(crate) fn end_claim(
    tx: &WriteTransaction<'_>,
    claim: StoredClaim,
    resolution: ClaimResolution,
    spent: Option<Cost>,
    outcome: Option<&Outcome>,
    now: Timestamp,
) -> DbResult<()> {
    let call = claim.call;
    let resolution = if claim.effect { resolution } else { resolution.for_read() };
    if claim.state == "open" && resolution != ClaimResolution::Released {
        record_carriers(tx, &claim.record)?;
    }
    // A reported cost counts even if the outcome is unknown.
    let (known, reserved): (Vec<_>, Vec<_>) = claim.charges.into_iter().partition(|(.., c)| {
        resolution != ClaimResolution::Pending || (c.unit.is_known_after_call() && spent.is_some())
    });
    for (n, at, charge) in known {
        let from = if claim.effect { compute_charge_start(at, &charge, now) } else { at };
        settle_charge(
            tx.sql,
            call,
            (n, at, &charge),
            resolution.final_amount(&charge, spent),
            from,
        )?;
    }
    if resolution == ClaimResolution::Pending {
        tx.sql
            .prepare_cached("UPDATE claims SET state = 'pending', charges = ?2 WHERE call = ?1")?
            .execute(params![call.as_bytes().as_slice(), serde_json::to_string(&reserved)?])?;
        return Ok(());
    }
    // Without an effect, the call may run again. Without a recall key, the outcome is not needed.
    match outcome.filter(|_| resolution == ClaimResolution::Done && !claim.record.recall.is_empty())
    {
        Some(outcome) => {
            let sealed = tx
                .shared
                .keys()
                .seal(&outcome_seal_context(call), &serde_json::to_vec(outcome)?)?;
            tx.sql
                .prepare_cached(
                    "UPDATE claims SET state = 'settled', charges = '[]', draft = NULL, pass = NULL, outcome = ?2, ended = ?3 WHERE call = ?1",
                )?
                .execute(params![call.as_bytes().as_slice(), sealed, to_nanos(now)])?;
        }
        None => {
            tx.sql
                .prepare_cached("DELETE FROM claims WHERE call = ?1")?
                .execute(params![call.as_bytes().as_slice()])?;
            for key in &claim.record.recall {
                // Another call may have claimed the same key since.
                tx.sql
                    .prepare_cached("DELETE FROM recalls WHERE principal = ?1 AND agent = ?2 AND tool = ?3 AND key = ?4 AND call = ?5")?
                    .execute(params![&*key.principal, &*key.agent, &*key.tool, key.key, call.as_bytes().as_slice()])?;
            }
        }
    }
    Ok(())
}

/// Sweeps a few expired claims of clients, for processes that make one call each.
pub(crate) fn sweep_client_claims(tx: &mut WriteTransaction<'_>, now: Timestamp) -> DbResult<()> {
    let expired: Vec<[u8; 16]> = tx
        .sql
        .prepare_cached(
            "SELECT call FROM claims INDEXED BY claims_unsettled WHERE state <> 'settled' AND state = 'open' AND lease < ?1 AND term IS NULL LIMIT 8",
        )?
        .query_map([to_nanos(now)], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    let claims: DbResult<Vec<Option<StoredClaim>>> = expired
        .into_iter()
        .map(|call| StoredClaim::find(tx.sql, CallId::from_bytes(call)))
        .collect();
    sweep_claims(tx, claims?.into_iter().flatten().collect(), now).map(|_| ())
}

/// Marks abandoned claims as pending and appends their rows. Abandoned reads are released.
pub(crate) fn sweep_abandoned(tx: &mut WriteTransaction<'_>, now: Timestamp) -> DbResult<u64> {
    inline_claims::move_abandoned_to_claims(tx, now)?;
    let open = StoredClaim::read_open(tx.sql)?;
    sweep_claims(tx, open, now)
}

fn sweep_claims(
    tx: &mut WriteTransaction<'_>,
    claims: Vec<StoredClaim>,
    now: Timestamp,
) -> DbResult<u64> {
    let mut swept = 0;
    for claim in claims {
        if !claim.is_abandoned(&tx.shared.state_dir, now) {
            continue;
        }
        swept += 1;
        if let Some(draft) = &claim.draft
            && !ledger::has_row(tx.sql, &claim.call)?
        {
            match serde_json::from_str::<Row>(draft) {
                Ok(mut row) => {
                    // The draft has masked counter names, so copy only the amounts.
                    for ((.., amount), (.., used)) in row.facts.claimed.iter_mut().zip(&claim.used)
                    {
                        *amount = *used;
                    }
                    append_row(tx, &row)?;
                }
                // One unreadable draft must not block the others.
                Err(error) => {
                    tracing::error!(call = %claim.call, %error, "cannot read the draft row of an abandoned call")
                }
            }
        }
        revoke_evidence_of(tx, &claim)?;
        end_claim(tx, claim, ClaimResolution::Pending, None, None, now)?;
    }
    Ok(swept)
}

/// Settles a pending claim, with a row that names the settler.
pub(crate) fn settle_claim(
    tx: &mut WriteTransaction<'_>,
    call: CallId,
    resolution: ClaimResolution,
    (outcome, shown): (&Outcome, Outcome),
    by: &str,
    now: Timestamp,
) -> DbResult<bool> {
    sweep_abandoned(tx, now)?;
    let Some(claim) = StoredClaim::find(tx.sql, call)?.filter(|claim| {
        claim.is_pending(&tx.shared.state_dir, now) && resolution != ClaimResolution::Pending
    }) else {
        return Ok(false);
    };
    let body: Option<String> = tx
        .sql
        .prepare_cached("SELECT body FROM ledger WHERE call = ?1")?
        .query_row(params![call.as_bytes().as_slice()], |row| row.get(0))
        .optional()?;
    if let Some(body) = body.or_else(|| claim.draft.clone()) {
        let row: Row = serde_json::from_str(&body)?;
        append_row(tx, &row.settlement_row(shown, resolution.effects(), by, now))?;
    }
    end_claim(tx, claim, resolution, None, Some(outcome), now)?;
    Ok(true)
}

/// Appends a row outside of a commit, and saves its session.
pub(crate) fn append_row(tx: &mut WriteTransaction<'_>, row: &Row) -> DbResult<(u64, Digest)> {
    let mut session = SessionHeader::get_or_create(tx.sql, &row.key)?;
    session.count_uncounted_calls(tx, &row.key);
    let body = ledger::canonical_text(row)?;
    let appended = ledger::append_to_chains(tx, &mut session, row, &body)?;
    session.save(tx.sql)?;
    Ok(appended)
}

#[cfg(test)]
mod tests {
    #[test]
    fn closing_a_client_session_scans_no_table() {
        for statement in [super::EXPIRE_CLIENT_LEASES_SQL, super::DISCARD_DEFERRED_CALLS_SQL] {
            assert_eq!(crate::open::full_scans(statement), Vec::<String>::new());
        }
    }
}
