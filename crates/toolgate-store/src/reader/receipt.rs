//! Checks receipts against their rows, and creates receipts for rows.

use rusqlite::OptionalExtension;
use toolgate::store::StoreError;
use toolgate::{Receipt, Row};

use super::{Ledger, LedgerEntry};
use crate::error::DbResult;
use crate::keys::LedgerKeys;
use crate::tables::ledger::{parse_digest, to_u64};
use crate::transaction::read_transaction;

impl Ledger {
    /// Checks whether the row of a receipt is unchanged. Returns `None` if the row is missing.
    ///
    /// # Errors
    /// The row cannot be read.
    pub fn check_receipt_row(&self, receipt: &Receipt) -> Result<Option<bool>, StoreError> {
        let find = || -> DbResult<Option<bool>> {
            let read = |row: &rusqlite::Row<'_>| {
                Ok((
                    row.get::<_, i64>(0)?,
                    row.get::<_, i64>(1)?,
                    row.get::<_, i64>(2)?,
                    row.get::<_, String>(3)?,
                ))
            };
            let found = self
                .sql
                .query_row(
                    "SELECT seq, session, n, body FROM ledger WHERE call = ?1",
                    [receipt.call.as_bytes().as_slice()],
                    read,
                )
                .optional()?;
            let Some((seq, session, n, body)) = found else { return Ok(None) };
            let row: Row = serde_json::from_str(&body)?;
            let previous: Option<Vec<u8>> = self
                .sql
                .query_row(
                    "SELECT hash FROM ledger WHERE session = ?1 AND n = ?2",
                    [session, n - 1],
                    |row| row.get(0),
                )
                .optional()?;
            let anchor: Option<Vec<u8>> = self
                .sql
                .query_row(
                    "SELECT anchor FROM sessions WHERE id = ?1 AND pruned = ?2",
                    [session, n - 1],
                    |row| row.get(0),
                )
                .optional()?
                .flatten();
            let previous = match previous.or(anchor) {
                Some(hash) => parse_digest(&hash)?,
                None => crate::hash_chain::session_genesis(&row.key),
            };
            // Compute the link from the row itself. The stored hash may have been changed.
            let link = crate::hash_chain::session_link(&previous, to_u64(n), body.as_bytes());
            Ok(Some(link == receipt.hash && to_u64(seq) == receipt.seq))
        };
        self.with_path(read_transaction(&self.sql, |_| find()))
    }

    /// Creates a signed receipt for a row.
    ///
    /// The whole ledger must verify and the row must be signed already. Otherwise a user could
    /// insert a row and get a signature for it.
    ///
    /// # Errors
    /// The ledger does not verify, the row is not signed yet, or the key is missing.
    pub fn sign_receipt(&self, entry: &LedgerEntry) -> Result<Receipt, StoreError> {
        let verified = self
            .verify(&crate::verify::report::TrustRoots::default(), |_| ())
            .map_err(|flaw| StoreError::unavailable(format!("the ledger is not intact: {flaw}")))?;
        if entry.seq > verified.signed_to {
            return Err(StoreError::unavailable(format!(
                "row {} is not signed yet; try again in a second",
                entry.seq
            )));
        }
        let keys = LedgerKeys::open(&self.state_dir.keys_dir(), &self.public_key()?)
            .map_err(|e| StoreError::unavailable(e.to_string()))?;
        Ok(crate::keys::recorded_row(std::sync::Arc::new(keys), &entry.row, entry.seq, entry.hash)
            .receipt())
    }

    /// Returns the public key of this ledger.
    ///
    /// # Errors
    /// The key cannot be read, or the state directory does not have it.
    pub fn public_key(&self) -> Result<String, StoreError> {
        let key = self
            .with_path(crate::tables::sessions::read_meta(&self.sql))?
            .remove("key")
            .unwrap_or_default();
        let own_keys =
            LedgerKeys::read_own_public_keys(&self.state_dir.keys_dir()).unwrap_or_default();
        if own_keys.contains(&key) {
            Ok(key)
        } else {
            Err(StoreError::unavailable(
                "the state directory does not have the key of this ledger".to_owned(),
            ))
        }
    }
}
