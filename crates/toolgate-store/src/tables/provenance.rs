//! Stores the provenance of values in tables.
//!
//! The tables contain only keyed fingerprints: a value can be looked up, but not read back.

use std::cell::RefCell;
use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, params};
use sha2::{Digest as _, Sha256};
use toolgate::provenance::{CarrierStore, MAX_CARRIERS, ProvenanceFlags, ProvenanceStore};

use crate::error::DbResult;
use crate::tables::sessions::SessionHeader;

/// Provenance of the values of one session. `finish` returns the first error.
pub(crate) struct ProvenanceTables<'c> {
    sql: &'c Connection,
    /// Fingerprints are keyed, so that values cannot be found by guessing.
    key: &'c [u8; 32],
    session: i64,
    flags: ProvenanceFlags,
    error: RefCell<Option<rusqlite::Error>>,
}

impl<'c> ProvenanceTables<'c> {
    pub(crate) fn new(sql: &'c Connection, key: &'c [u8; 32], session: &SessionHeader) -> Self {
        Self {
            sql,
            key,
            session: session.id,
            flags: session.provenance_flags,
            error: RefCell::default(),
        }
    }

    pub(crate) fn finish(self) -> DbResult<ProvenanceFlags> {
        self.error.into_inner().map_or(Ok(self.flags), |error| Err(error.into()))
    }

    fn keyed_fingerprint(&self, print: u64) -> i64 {
        let digest = Sha256::new()
            .chain_update(b"toolgate-print-v1\0")
            .chain_update(self.key)
            .chain_update(print.to_be_bytes())
            .finalize();
        digest.iter().take(8).fold(0_u64, |print, byte| print << 8 | u64::from(*byte)).cast_signed()
    }

    fn keyed_exact_fingerprint(&self, print: u128) -> [u8; 16] {
        let digest = Sha256::new()
            .chain_update(b"toolgate-exact-v1\0")
            .chain_update(self.key)
            .chain_update(print.to_be_bytes())
            .finalize();
        let mut keyed = [0; 16];
        keyed.iter_mut().zip(digest).for_each(|(to, from)| *to = from);
        keyed
    }

    fn record_error<T>(&self, result: rusqlite::Result<T>) -> Option<T> {
        record_first_error(&self.error, result)
    }
}

fn record_first_error<T>(
    fault: &RefCell<Option<rusqlite::Error>>,
    result: rusqlite::Result<T>,
) -> Option<T> {
    result.map_err(|error| fault.borrow_mut().get_or_insert(error).to_string()).ok()
}

impl ProvenanceStore for ProvenanceTables<'_> {
    fn flags(&self) -> ProvenanceFlags {
        self.flags
    }
    fn set_flags(&mut self, flags: ProvenanceFlags) {
        self.flags = flags;
    }
    fn untrusted(&self, print: u64) -> Option<bool> {
        let find = || {
            self.sql
                .prepare_cached("SELECT whole FROM untrusted WHERE session = ?1 AND print = ?2")?
                .query_row(params![self.session, self.keyed_fingerprint(print)], |row| row.get(0))
                .optional()
        };
        self.record_error(find()).flatten()
    }
    fn set_untrusted(&mut self, print: u64, whole: bool) {
        let put = || {
            self.sql
                .prepare_cached(
                    "INSERT OR REPLACE INTO untrusted (session, print, whole) VALUES (?1, ?2, ?3)",
                )?
                .execute(params![self.session, self.keyed_fingerprint(print), whole])
        };
        self.record_error(put());
    }
    fn sources(&self, exact: u128) -> Option<Arc<[Arc<str>]>> {
        let find = || {
            self.sql
                .prepare_cached("SELECT sources FROM trusted WHERE session = ?1 AND print = ?2")?
                .query_row(
                    params![self.session, self.keyed_exact_fingerprint(exact).as_slice()],
                    |row| row.get::<_, String>(0),
                )
                .optional()
        };
        self.record_error(find()).flatten().and_then(|text| serde_json::from_str(&text).ok())
    }
    fn set_sources(&mut self, exact: u128, sources: Arc<[Arc<str>]>) {
        let put = || {
            let sources = serde_json::to_string(&sources).unwrap_or_default();
            self.sql
                .prepare_cached(
                    "INSERT OR REPLACE INTO trusted (session, print, sources) VALUES (?1, ?2, ?3)",
                )?
                .execute(params![
                    self.session,
                    self.keyed_exact_fingerprint(exact).as_slice(),
                    sources
                ])
        };
        self.record_error(put());
    }
    fn is_written(&self, print: u64) -> bool {
        let find = || {
            self.sql
                .prepare_cached("SELECT 1 FROM written WHERE session = ?1 AND print = ?2")?
                .exists(params![self.session, self.keyed_fingerprint(print)])
        };
        // If the lookup fails, the value may have been written. `finish` returns the error.
        self.record_error(find()).unwrap_or(true)
    }
    fn set_written(&mut self, print: u64) {
        let put = || {
            self.sql
                .prepare_cached("INSERT OR IGNORE INTO written (session, print) VALUES (?1, ?2)")?
                .execute(params![self.session, self.keyed_fingerprint(print)])
        };
        self.record_error(put());
    }
}

/// Files and entities that carry untrusted or trusted content, in a table.
pub(crate) struct CarrierTable<'c> {
    sql: &'c Connection,
    error: RefCell<Option<rusqlite::Error>>,
}

/// Entry that marks the table as full. No carrier has this name: each begins with its agent's name.
const OVERFLOW_MARKER: &str = "";

impl<'c> CarrierTable<'c> {
    pub(crate) fn new(sql: &'c Connection) -> Self {
        Self { sql, error: RefCell::default() }
    }

    pub(crate) fn finish(self) -> DbResult<()> {
        self.error.into_inner().map_or(Ok(()), |error| Err(error.into()))
    }

    fn find(&self, carrier: &str) -> Option<bool> {
        let find = || {
            self.sql
                .prepare_cached("SELECT untrusted FROM carriers WHERE carrier = ?1")?
                .query_row([carrier], |row| row.get(0))
                .optional()
        };
        record_first_error(&self.error, find()).flatten()
    }
}

impl CarrierStore for CarrierTable<'_> {
    fn taint_of(&self, carrier: &str) -> Option<bool> {
        if self.find(OVERFLOW_MARKER).is_some() { Some(true) } else { self.find(carrier) }
    }

    fn add(&mut self, carrier: String, untrusted: bool) {
        let put = || {
            let known = self.find(&carrier).is_some();
            let mut carrier = carrier.as_str();
            if !known {
                // A running count: `count(*)` would cost more with each carrier.
                self.sql
                    .prepare_cached("INSERT INTO meta (name, value) VALUES ('carriers', '1') ON CONFLICT (name) DO UPDATE SET value = CAST(value + 1 AS TEXT)")?
                    .execute([])?;
                let count: String = self
                    .sql
                    .prepare_cached("SELECT value FROM meta WHERE name = 'carriers'")?
                    .query_row([], |row| row.get(0))?;
                if count.parse::<usize>().is_ok_and(|count| count > MAX_CARRIERS) {
                    carrier = OVERFLOW_MARKER;
                }
            }
            self.sql
                .prepare_cached(
                    "INSERT OR REPLACE INTO carriers (carrier, untrusted) VALUES (?1, ?2)",
                )?
                .execute(params![carrier, untrusted || carrier == OVERFLOW_MARKER])
        };
        record_first_error(&self.error, put());
    }
}
