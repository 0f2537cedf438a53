//! Counters, and what is reserved of them.

use jiff::{SignedDuration, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};
use rust_decimal::Decimal;
use toolgate::CallId;
use toolgate::limits::{Charge, Over, Spend};
use toolgate::store::Settle;

use crate::fault::{Done, Fault};
use crate::ledger::nanos;
use crate::session::time;
use crate::tx::Tx;
use crate::under_way;

fn window(window: Option<SignedDuration>) -> i64 {
    window.map_or(-1, |window| i64::try_from(window.as_nanos()).unwrap_or(i64::MAX).max(0))
}

fn amount(text: &str) -> Done<Decimal> {
    text.parse().map_err(|_| Fault::Said(format!("a counter holds `{text}`, which is no number")))
}

/// What a counter holds, also of what has left its window and is not taken out yet.
fn total(sql: &Connection, counter: &str, win: Option<SignedDuration>) -> Done<Decimal> {
    let text: Option<String> = sql
        .prepare_cached("SELECT total FROM counters WHERE counter = ?1 AND win = ?2")?
        .query_row(params![counter, window(win)], |row| row.get(0))
        .optional()?;
    text.map_or(Ok(Decimal::ZERO), |text| amount(&text))
}

/// What has left the window of a counter, but for what is held: of a call that may have had effects, and of which nobody knows yet what
/// came, nothing leaves. An attempt is one whatever comes of it.
/// What only watches, and so has no end, is not held either: it would be read with every call. Of calls under way it is asked apart.
const LEFT: &str = "counter = ?1 AND win = ?2 AND at <= ?3 AND NOT EXISTS (
    SELECT 1 FROM claims, json_each(claims.charges) AS held
    WHERE claims.call = charges.call AND claims.state <> 'settled' AND claims.effect
        AND json_extract(held.value, '$[0]') = charges.n AND json_extract(held.value, '$[2].unit') IS NOT 'attempt'
        AND json_extract(held.value, '$[2].cap') IS NOT '79228162514264337593543950335')";

/// What will leave the window of a counter: not what is pending, which stays until somebody settles it.
const LEAVES: &str = "SELECT at, amount FROM charges WHERE counter = ?1 AND win = ?2 AND at > ?3
    AND NOT EXISTS (SELECT 1 FROM claims WHERE claims.call = charges.call AND claims.state = 'pending') ORDER BY at";

/// What is used of a counter. Looking changes nothing.
pub(crate) fn used(sql: &Connection, counter: &str, win: Option<SignedDuration>, now: Timestamp) -> Done<Decimal> {
    let mut total = total(sql, counter, win)?;
    for charge in left(sql, counter, win, now)?.gone {
        total = total.saturating_sub(charge.amount);
    }
    Ok(total)
}

/// What has left the window of a counter and is not taken out yet.
#[derive(Default)]
struct Left {
    gone: Vec<Gone>,
    /// Whether something is left out that a call under way holds.
    held: bool,
}

struct Gone {
    at: i64,
    call: CallId,
    n: i64,
    amount: Decimal,
}

fn left(sql: &Connection, counter: &str, win: Option<SignedDuration>, now: Timestamp) -> Done<Left> {
    let mut left = Left::default();
    if win.is_none() {
        return Ok(left);
    }
    let mut statement = sql.prepare_cached(&format!("SELECT at, call, n, amount FROM charges WHERE {LEFT}"))?;
    let mut rows = statement.query(params![counter, window(win), nanos(now).saturating_sub(window(win))])?;
    while let Some(row) = rows.next()? {
        let amount = amount(row.get_ref(3)?.as_str().unwrap_or_default())?;
        left.gone.push(Gone { at: row.get(0)?, call: CallId::from_bytes(row.get(1)?), n: row.get(2)?, amount });
    }
    if !left.gone.is_empty() && under_way::any(sql)? {
        let all = std::mem::take(&mut left.gone);
        for charge in all {
            match under_way::holds(sql, charge.call, usize::try_from(charge.n).unwrap_or(usize::MAX))? {
                true => left.held = true,
                false => left.gone.push(charge),
            }
        }
    }
    Ok(left)
}

/// Takes out what has left the window of a counter.
fn take_out(sql: &Connection, charge: &Charge, now: Timestamp) -> Done<()> {
    let (win, left) = (window(charge.window), left(sql, &charge.counter, charge.window, now)?);
    if left.gone.is_empty() {
        return Ok(());
    }
    if !left.held {
        let mut all = sql.prepare_cached(&format!("DELETE FROM charges WHERE {LEFT}"))?;
        all.execute(params![charge.counter, win, nanos(now).saturating_sub(win)])?;
        return Ok(());
    }
    let mut one = sql.prepare_cached("DELETE FROM charges WHERE counter = ?1 AND win = ?2 AND at = ?3 AND call = ?4 AND n = ?5")?;
    for gone in left.gone {
        one.execute(params![charge.counter, win, gone.at, gone.call.as_bytes().as_slice(), gone.n])?;
    }
    Ok(())
}

/// What is used, if a charge fits.
pub(crate) fn fits(sql: &Connection, charge: &Charge, now: Timestamp) -> Done<Result<Decimal, Over>> {
    let used = used(sql, &charge.counter, charge.window, now)?;
    if charge.fits_on(used) {
        return Ok(Ok(used));
    }
    let Some(stretch) = charge.window else { return Ok(Err(Over { used, retry_after: None })) };
    // When enough has left the window; never, where the charge alone is too much, or with what is held beyond it.
    let mut entries = sql.prepare_cached(LEAVES)?;
    let mut rows = entries.query(params![charge.counter, window(charge.window), nanos(now).saturating_sub(window(charge.window))])?;
    let mut left = used;
    while let Some(row) = rows.next()? {
        left = left.saturating_sub(amount(row.get_ref(1)?.as_str().unwrap_or_default())?);
        if left.checked_add(charge.amount).is_some_and(|sum| sum <= charge.cap) {
            let at = time(row.get(0)?);
            return Ok(Err(Over { used, retry_after: Some(stretch.saturating_sub(now.duration_since(at))) }));
        }
    }
    Ok(Err(Over { used, retry_after: None }))
}

/// Reserves a charge on top of what is used.
pub(crate) fn reserve(sql: &Connection, call: CallId, n: usize, charge: &Charge, used: Decimal, now: Timestamp) -> Done<()> {
    if charge.window.is_some() {
        take_out(sql, charge, now)?;
        sql.prepare_cached("INSERT INTO charges (counter, win, at, call, n, amount) VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?.execute(params![
            charge.counter,
            window(charge.window),
            nanos(now),
            call.as_bytes().as_slice(),
            i64::try_from(n).unwrap_or(i64::MAX),
            charge.amount.to_string()
        ])?;
    }
    set_total(sql, charge, used.saturating_add(charge.amount))
}

fn set_total(sql: &Connection, charge: &Charge, total: Decimal) -> Done<()> {
    sql.prepare_cached("INSERT OR REPLACE INTO counters (counter, win, total) VALUES (?1, ?2, ?3)")?.execute(params![
        charge.counter,
        window(charge.window),
        total.to_string()
    ])?;
    Ok(())
}

/// What a call has reserved, which of its charges that is, and when.
pub(crate) type Reserved = (usize, i64, Charge);

/// Settles what a read has reserved, if it is one of this process.
pub(crate) fn end_read(tx: &Tx<'_>, call: CallId, settle: Settle, spent: Option<Spend>) -> Done<bool> {
    let Some(reserved) = tx.take_read(call, None) else { return Ok(false) };
    let settle = settle.of_read();
    for (n, at, charge) in reserved {
        settle_charge(tx.sql, call, (n, at, &charge), settle.amount(&charge, spent), at)?;
    }
    Ok(true)
}

/// From when on a charge counts that is settled now. What was held for longer than its window counts for another.
pub(crate) fn counts_from(at: i64, charge: &Charge, now: Timestamp) -> i64 {
    let has_left = charge.window.is_some() && at <= nanos(now).saturating_sub(window(charge.window));
    if has_left && charge.is_held() { nanos(now) } else { at }
}

/// Replaces what a call reserved by what it came to, and says from when on it counts.
pub(crate) fn settle_charge(
    sql: &Connection,
    call: CallId,
    (n, at, charge): (usize, i64, &Charge),
    actual: Decimal,
    from: i64,
) -> Done<()> {
    // It came to what was reserved, as most do.
    if actual == charge.amount && from == at {
        return Ok(());
    }
    if charge.window.is_some() {
        let changed = sql
            .prepare_cached("UPDATE charges SET amount = ?6, at = ?7 WHERE counter = ?1 AND win = ?2 AND at = ?3 AND call = ?4 AND n = ?5")?
            .execute(params![
                charge.counter,
                window(charge.window),
                at,
                call.as_bytes().as_slice(),
                i64::try_from(n).unwrap_or(i64::MAX),
                actual.to_string(),
                from
            ])?;
        // What has left the window meanwhile is not in the total any more.
        if changed == 0 {
            return Ok(());
        }
    }
    let now = total(sql, &charge.counter, charge.window)?;
    set_total(sql, charge, now.saturating_sub(charge.amount).saturating_add(actual))
}
