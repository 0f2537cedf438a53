//! Receipts: whether a row is the one that a receipt was given for, and a new one for a row.

use rusqlite::OptionalExtension;
use toolgate::store::StoreError;
use toolgate::{Receipt, Row};

use super::{Entry, Ledger};
use crate::fault::Done;
use crate::keys::Keys;
use crate::ledger::{digest, unsigned};
use crate::tx::at_once;

impl Ledger {
    /// Whether the row of a receipt is in the ledger, as it was when the receipt was given. `None` where there is no such
    /// row.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn holds(&self, receipt: &Receipt) -> Result<Option<bool>, StoreError> {
        let find = || -> Done<Option<bool>> {
            let read = |row: &rusqlite::Row<'_>| {
                Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?, row.get::<_, i64>(2)?, row.get::<_, String>(3)?))
            };
            let found = self
                .sql
                .query_row("SELECT seq, session, n, body FROM ledger WHERE call = ?1", [receipt.call.as_bytes().as_slice()], read)
                .optional()?;
            let Some((seq, session, n, body)) = found else { return Ok(None) };
            let row: Row = serde_json::from_str(&body)?;
            let before: Option<Vec<u8>> = self
                .sql
                .query_row("SELECT hash FROM ledger WHERE session = ?1 AND n = ?2", [session, n - 1], |row| row.get(0))
                .optional()?;
            let anchor: Option<Vec<u8>> = self
                .sql
                .query_row("SELECT anchor FROM sessions WHERE id = ?1 AND pruned = ?2", [session, n - 1], |row| row.get(0))
                .optional()?
                .flatten();
            let before = match before.or(anchor) {
                Some(hash) => digest(&hash)?,
                None => crate::chain::opening(&row.key),
            };
            // The row itself is what counts, not what is written beside it.
            let link = crate::chain::link(&before, unsigned(n), body.as_bytes());
            Ok(Some(link == receipt.hash && unsigned(seq) == receipt.seq))
        };
        self.named(at_once(&self.sql, |_| find()))
    }

    /// A receipt for a row, signed with the key beside the ledger: only where the whole ledger holds, and the row is signed
    /// already. Nobody is to get a signature for what he has put there himself.
    ///
    /// # Errors
    /// What does not hold, or is not there.
    pub fn receipt(&self, entry: &Entry) -> Result<Receipt, StoreError> {
        let verified =
            self.verify(&crate::flaw::Trust::default(), |_| ()).map_err(|flaw| StoreError(format!("the ledger does not hold: {flaw}")))?;
        if entry.seq > verified.signed_to {
            return Err(StoreError(format!("row {} is not signed yet; try again in a second", entry.seq)));
        }
        let keys = Keys::open(&self.home.keys(), &self.public_key()?).map_err(|e| StoreError(e.to_string()))?;
        Ok(crate::keys::recorded(std::sync::Arc::new(keys), &entry.row, entry.seq, entry.hash).receipt())
    }

    /// The public key that this ledger signs with.
    ///
    /// # Errors
    /// It cannot be read, or is not the one of the ledger's own keys.
    pub fn public_key(&self) -> Result<String, StoreError> {
        let key = self.named(crate::session::meta(&self.sql))?.remove("key").unwrap_or_default();
        let own = Keys::own(&self.home.keys()).unwrap_or_default();
        if own.contains(&key) { Ok(key) } else { Err(StoreError("the key of this ledger is not beside it".to_owned())) }
    }
}
