//! Stores the counters of limits and the charges that calls reserve.

use jiff::{SignedDuration, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};
use rust_decimal::Decimal;
use toolgate::CallId;
use toolgate::limits::{Charge, ChargeError, Cost};
use toolgate::store::ClaimResolution;

use crate::error::{DbError, DbResult};
use crate::tables::inline_claims;
use crate::tables::ledger::to_nanos;
use crate::tables::sessions::from_nanos;
use crate::transaction::WriteTransaction;

fn window_nanos(window: Option<SignedDuration>) -> i64 {
    window.map_or(-1, |window| i64::try_from(window.as_nanos()).unwrap_or(i64::MAX).max(0))
}

fn parse_amount(text: &str) -> DbResult<Decimal> {
    text.parse()
        .map_err(|_| DbError::Message(format!("the counter value `{text}` is not a number")))
}

/// Reads the total of a counter, including charges that have expired but are not deleted yet.
fn read_total(sql: &Connection, counter: &str, win: Option<SignedDuration>) -> DbResult<Decimal> {
    let text: Option<String> = sql
        .prepare_cached("SELECT total FROM counters WHERE counter = ?1 AND win = ?2")?
        .query_row(params![counter, window_nanos(win)], |row| row.get(0))
        .optional()?;
    text.map_or(Ok(Decimal::ZERO), |text| parse_amount(&text))
}

/// Matches the expired charges of a counter, except those that an unsettled claim reserves.
///
/// A claim with effects reserves its charges until its outcome is known, except `attempt` charges,
/// which count in any case. Charges of observe-only rules (unlimited cap) are not reserved either:
/// otherwise every call would read them. Claims in `under_way` are checked separately.
const EXPIRED_CHARGES_CONDITION: &str = "counter = ?1 AND win = ?2 AND at <= ?3 AND NOT EXISTS (
    SELECT 1 FROM claims, json_each(claims.charges) AS held
    WHERE claims.call = charges.call AND claims.state <> 'settled' AND claims.effect
        AND json_extract(held.value, '$[0]') = charges.n AND json_extract(held.value, '$[2].unit') IS NOT 'attempt'
        AND json_extract(held.value, '$[2].cap') IS NOT '79228162514264337593543950335')";

/// Finds the charges that will expire. Charges of pending claims stay until the claim is settled.
const EXPIRING_CHARGES_SQL: &str = "SELECT at, amount FROM charges WHERE counter = ?1 AND win = ?2 AND at > ?3
    AND NOT EXISTS (SELECT 1 FROM claims WHERE claims.call = charges.call AND claims.state = 'pending') ORDER BY at";

/// Computes how much of a counter is used, without changing it.
pub(crate) fn read_used(
    sql: &Connection,
    counter: &str,
    win: Option<SignedDuration>,
    now: Timestamp,
) -> DbResult<Decimal> {
    let mut total = read_total(sql, counter, win)?;
    for charge in find_expired(sql, counter, win, now)?.charges {
        total = total.saturating_sub(charge.amount);
    }
    Ok(total)
}

/// Charges of a counter that have expired but are not deleted yet.
#[derive(Default)]
struct ExpiredCharges {
    charges: Vec<ExpiredCharge>,
    /// Whether a running call has reserved an expired charge.
    has_reserved_charge: bool,
}

struct ExpiredCharge {
    at: i64,
    call: CallId,
    n: i64,
    amount: Decimal,
}

fn find_expired(
    sql: &Connection,
    counter: &str,
    win: Option<SignedDuration>,
    now: Timestamp,
) -> DbResult<ExpiredCharges> {
    let mut expired = ExpiredCharges::default();
    if win.is_none() {
        return Ok(expired);
    }
    let mut statement = sql.prepare_cached(&format!(
        "SELECT at, call, n, amount FROM charges WHERE {EXPIRED_CHARGES_CONDITION}"
    ))?;
    let mut rows = statement.query(params![
        counter,
        window_nanos(win),
        to_nanos(now).saturating_sub(window_nanos(win))
    ])?;
    while let Some(row) = rows.next()? {
        let amount = parse_amount(row.get_ref(3)?.as_str().unwrap_or_default())?;
        expired.charges.push(ExpiredCharge {
            at: row.get(0)?,
            call: CallId::from_bytes(row.get(1)?),
            n: row.get(2)?,
            amount,
        });
    }
    if !expired.charges.is_empty() && inline_claims::has_inflight(sql)? {
        let all = std::mem::take(&mut expired.charges);
        for charge in all {
            match inline_claims::has_reserved_charge(
                sql,
                charge.call,
                usize::try_from(charge.n).unwrap_or(usize::MAX),
            )? {
                true => expired.has_reserved_charge = true,
                false => expired.charges.push(charge),
            }
        }
    }
    Ok(expired)
}

/// Deletes the expired charges of a counter.
fn delete_expired(sql: &Connection, charge: &Charge, now: Timestamp) -> DbResult<()> {
    let (win, expired) =
        (window_nanos(charge.window), find_expired(sql, &charge.counter, charge.window, now)?);
    if expired.charges.is_empty() {
        return Ok(());
    }
    if !expired.has_reserved_charge {
        let mut delete_all =
            sql.prepare_cached(&format!("DELETE FROM charges WHERE {EXPIRED_CHARGES_CONDITION}"))?;
        delete_all.execute(params![charge.counter, win, to_nanos(now).saturating_sub(win)])?;
        return Ok(());
    }
    let mut delete = sql.prepare_cached(
        "DELETE FROM charges WHERE counter = ?1 AND win = ?2 AND at = ?3 AND call = ?4 AND n = ?5",
    )?;
    for expired_charge in expired.charges {
        delete.execute(params![
            charge.counter,
            win,
            expired_charge.at,
            expired_charge.call.as_bytes().as_slice(),
            expired_charge.n
        ])?;
    }
    Ok(())
}

/// Checks whether a charge fits. Returns how much is used, or when to retry.
pub(crate) fn check_charge(
    sql: &Connection,
    charge: &Charge,
    now: Timestamp,
) -> DbResult<Result<Decimal, ChargeError>> {
    let used = read_used(sql, &charge.counter, charge.window, now)?;
    if charge.fits_within(used) {
        return Ok(Ok(used));
    }
    let Some(window) = charge.window else {
        return Ok(Err(ChargeError { used, retry_after: None }));
    };
    // The retry time is when enough charges have expired. There is none if the charge never fits.
    let mut entries = sql.prepare_cached(EXPIRING_CHARGES_SQL)?;
    let mut rows = entries.query(params![
        charge.counter,
        window_nanos(charge.window),
        to_nanos(now).saturating_sub(window_nanos(charge.window))
    ])?;
    let mut left = used;
    while let Some(row) = rows.next()? {
        left = left.saturating_sub(parse_amount(row.get_ref(1)?.as_str().unwrap_or_default())?);
        if left.checked_add(charge.amount).is_some_and(|sum| sum <= charge.cap) {
            let at = from_nanos(row.get(0)?);
            return Ok(Err(ChargeError {
                used,
                retry_after: Some(window.saturating_sub(now.duration_since(at))),
            }));
        }
    }
    Ok(Err(ChargeError { used, retry_after: None }))
}

/// Reserves a charge on top of what is used.
pub(crate) fn reserve_charge(
    sql: &Connection,
    call: CallId,
    n: usize,
    charge: &Charge,
    used: Decimal,
    now: Timestamp,
) -> DbResult<()> {
    if charge.window.is_some() {
        delete_expired(sql, charge, now)?;
        sql.prepare_cached("INSERT INTO charges (counter, win, at, call, n, amount) VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?.execute(params![
            charge.counter,
            window_nanos(charge.window),
            to_nanos(now),
            call.as_bytes().as_slice(),
            i64::try_from(n).unwrap_or(i64::MAX),
            charge.amount.to_string()
        ])?;
    }
    write_total(sql, charge, used.saturating_add(charge.amount))
}

fn write_total(sql: &Connection, charge: &Charge, total: Decimal) -> DbResult<()> {
    sql.prepare_cached(
        "INSERT OR REPLACE INTO counters (counter, win, total) VALUES (?1, ?2, ?3)",
    )?
    .execute(params![charge.counter, window_nanos(charge.window), total.to_string()])?;
    Ok(())
}

/// A charge that a call reserved: its number in the call, its time and the charge.
pub(crate) type ReservedCharge = (usize, i64, Charge);

/// Settles the charges of a read of this process. Returns false if the call is not such a read.
pub(crate) fn settle_read_charges(
    tx: &WriteTransaction<'_>,
    call: CallId,
    resolution: ClaimResolution,
    spent: Option<Cost>,
) -> DbResult<bool> {
    let Some(reserved) = tx.replace_read_charges(call, None) else { return Ok(false) };
    let resolution = resolution.for_read();
    for (n, at, charge) in reserved {
        settle_charge(tx.sql, call, (n, at, &charge), resolution.final_amount(&charge, spent), at)?;
    }
    Ok(true)
}

/// Returns the time from which a charge counts that is settled now.
///
/// A charge that was reserved for longer than its window counts for another window.
pub(crate) fn compute_charge_start(at: i64, charge: &Charge, now: Timestamp) -> i64 {
    let has_expired =
        charge.window.is_some() && at <= to_nanos(now).saturating_sub(window_nanos(charge.window));
    if has_expired && charge.is_reserved_while_pending() { to_nanos(now) } else { at }
}

/// Replaces a reserved charge by the actual amount, which counts from `from`.
pub(crate) fn settle_charge(
    sql: &Connection,
    call: CallId,
    (n, at, charge): (usize, i64, &Charge),
    actual: Decimal,
    from: i64,
) -> DbResult<()> {
    // The usual case: the actual amount is the reserved one.
    if actual == charge.amount && from == at {
        return Ok(());
    }
    if charge.window.is_some() {
        let changed = sql
            .prepare_cached("UPDATE charges SET amount = ?6, at = ?7 WHERE counter = ?1 AND win = ?2 AND at = ?3 AND call = ?4 AND n = ?5")?
            .execute(params![
                charge.counter,
                window_nanos(charge.window),
                at,
                call.as_bytes().as_slice(),
                i64::try_from(n).unwrap_or(i64::MAX),
                actual.to_string(),
                from
            ])?;
        // The charge expired meanwhile, so the total does not contain it.
        if changed == 0 {
            return Ok(());
        }
    }
    let total = read_total(sql, &charge.counter, charge.window)?;
    write_total(sql, charge, total.saturating_sub(charge.amount).saturating_add(actual))
}
