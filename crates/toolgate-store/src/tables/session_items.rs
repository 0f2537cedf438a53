//! Stores the items of sessions, encrypted and in order.

use rusqlite::{Connection, params};
use toolgate::SessionKey;
use toolgate::store::SessionItem;

use crate::error::{DbError, DbResult};
use crate::keys::LedgerKeys;
use crate::tables::ledger::{to_i64, to_u64};
use crate::tables::sessions::SessionHeader;
use crate::transaction::WriteTransaction;

/// Context to which encrypted items are bound.
pub(crate) const ITEM_SEAL_CONTEXT: &str = "item";

/// Appends encrypted items to a session.
pub(crate) fn append_items(
    tx: &WriteTransaction<'_>,
    key: &SessionKey,
    items: &[Vec<u8>],
) -> DbResult<()> {
    if items.is_empty() {
        return Ok(());
    }
    let session = SessionHeader::get_or_create(tx.sql, key)?;
    let mut statement = tx.sql.prepare_cached(
        "INSERT INTO items (session, n, body) SELECT ?1, coalesce(max(n), 0) + 1, ?2 FROM items WHERE session = ?1",
    )?;
    for item in items {
        statement.execute(params![session.id, item])?;
    }
    Ok(())
}

/// Reads the items of a session after the first `after`, in order.
pub(crate) fn read_items(
    sql: &Connection,
    keys: &LedgerKeys,
    key: &SessionKey,
    after: u64,
) -> DbResult<Vec<(u64, SessionItem)>> {
    let Some(session) = SessionHeader::find(sql, key)? else { return Ok(Vec::new()) };
    let mut statement =
        sql.prepare_cached("SELECT n, body FROM items WHERE session = ?1 AND n > ?2 ORDER BY n")?;
    let mut rows = statement.query(params![session.id, to_i64(after)])?;
    let mut items = Vec::new();
    while let Some(row) = rows.next()? {
        let body = keys.unseal(ITEM_SEAL_CONTEXT, &row.get::<_, Vec<u8>>(1)?).ok_or_else(|| {
            DbError::Message("cannot decrypt an item: another key encrypted it".to_owned())
        })?;
        items.push((to_u64(row.get(0)?), SessionItem(body)));
    }
    Ok(items)
}
