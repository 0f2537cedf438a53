//! Implements the store in one SQLite file.

mod approvals;
mod claim_call;
mod finish_call;
mod impl_store;
mod pauses;
mod session_lock;
mod session_requests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use rusqlite::Connection;
use tokio::time::Instant;
use toolgate::SessionKey;
use toolgate::clock::{Clock, SystemClock};
use toolgate::store::{LeaseRequest, SessionItem, SessionLease, Store, StoreError};

use crate::error::{DbError, DbResult};
use crate::group_commit::LedgerWriter;
use crate::keys::LedgerKeys;
use crate::open;
use crate::state_dir::StateDir;
use crate::store::session_lock::{LocalSessionGuard, LocalSessionLock, ProcessSessionGuard};
use crate::tables::ledger;
use crate::tables::record_pruning;
use crate::tables::session_items::ITEM_SEAL_CONTEXT;
use crate::transaction::{SharedStoreState, WriteTransaction, lock_unpoisoned};

/// A persistent store in one SQLite file.
///
/// The directory `<file>.state` beside the file contains the keys, the high-water mark of the
/// ledger, and spooled rows.
pub struct SqliteStore {
    path: PathBuf,
    shared: Arc<SharedStoreState>,
    /// Declared before `writer`: the last connection to close cleans up, which needs the writer.
    readers: Mutex<Vec<Connection>>,
    writer: LedgerWriter,
    session_locks: Mutex<HashMap<SessionKey, Arc<LocalSessionLock>>>,
    /// The locks behind the leases that are not released.
    lease_guards: Mutex<HashMap<u64, SqliteSessionGuard>>,
    lease_count: AtomicU64,
    /// Number of session locks so far. Unused entries of `session_locks` are removed now and then.
    lock_count: AtomicU64,
}

/// Guards of the locks against other processes, and against other calls of this process.
type SqliteSessionGuard = (ProcessSessionGuard, LocalSessionGuard);

/// Longest pause between two transactions of a pruning, in which other processes can write.
const MAX_PRUNE_PAUSE: Duration = Duration::from_secs(1);

/// Number of pruned rows and records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PruneStats {
    /// Rows of the ledger.
    pub rows: u64,
    /// Recorded outcomes, approvals and large outputs.
    pub sealed: u64,
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Adds the path of the ledger to an error.
pub(crate) fn ledger_error(path: &Path, fault: &DbError) -> StoreError {
    StoreError::new(fault.kind(), format!("the ledger {}: {fault}", path.display()))
}

impl SqliteStore {
    /// Opens a ledger, or creates one.
    ///
    /// # Errors
    /// The file is not a ledger, is damaged, is an older copy, or cannot be written to.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::open_with_clock(path, Arc::new(SystemClock))
    }

    /// Opens a ledger whose time is that of a clock, for tests and scripted runs.
    ///
    /// # Errors
    /// As for [`SqliteStore::open`].
    pub fn open_with_clock(
        path: impl AsRef<Path>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StoreError> {
        // The state directory is beside the file itself, not beside a symbolic link to it.
        let path =
            std::fs::canonicalize(path.as_ref()).unwrap_or_else(|_| path.as_ref().to_owned());
        let (path, state) = (path.as_path(), crate::state_dir::state_dir_for(&path));
        let state = state.as_path();
        let open = || -> DbResult<Self> {
            let state_dir_error =
                |error: std::io::Error| DbError::Message(format!("{}: {error}", state.display()));
            open::check_file(path)?;
            let hint = "check that the directory exists and is writable";
            let lock_error = |error: std::io::Error| {
                DbError::Message(format!("{}: {error}; {hint}", state.display()))
            };
            let _open_lock = StateDir::acquire_open_lock(state).map_err(lock_error)?;
            let sql = open::open_writable(path)?;
            let state_dir = StateDir::open_owner(state).map_err(state_dir_error)?;
            let (id, keys) = open::link_state_dir(&sql, &state_dir)?;
            open::check_not_older(&sql, &state_dir, &id)?;
            let now = clock.now();
            let shared = SharedStoreState::new(state_dir, id, keys, clock);
            let unsigned = crate::write_connection::sweep_on_open(&sql, &shared, now)?;
            shared.state_dir.remove_dead_owners().map_err(state_dir_error)?;
            Ok(Self {
                path: path.to_owned(),
                writer: LedgerWriter::start(sql, Arc::clone(&shared), unsigned)?,
                shared,
                readers: Mutex::default(),
                session_locks: Mutex::default(),
                lock_count: AtomicU64::new(0),
                lease_guards: Mutex::default(),
                lease_count: AtomicU64::new(0),
            })
        };
        open().map_err(|fault| ledger_error(path, &fault))
    }

    /// Opens a ledger for a process that makes one call and ends. Starts no thread and no sweep.
    ///
    /// Returns `None` if the ledger does not exist or needs a migration by [`SqliteStore::open`].
    ///
    /// # Errors
    /// As for [`SqliteStore::open`].
    pub fn open_for_one_call(path: impl AsRef<Path>) -> Result<Option<Self>, StoreError> {
        let path = path.as_ref();
        let Ok(path) = std::fs::canonicalize(path) else { return Ok(None) };
        let open = || -> DbResult<Option<Self>> {
            let Some(sql) = open::open_current(&path)? else { return Ok(None) };
            let state = crate::state_dir::state_dir_for(&path);
            let state_dir = StateDir::open_transient(&state)
                .map_err(|error| DbError::Message(format!("{}: {error}", state.display())))?;
            let Some((id, keys)) = open::read_identity(&sql, &state_dir)? else { return Ok(None) };
            open::check_not_older(&sql, &state_dir, &id)?;
            let shared = SharedStoreState::new(state_dir, id, keys, Arc::new(SystemClock));
            Ok(Some(Self {
                path: path.clone(),
                writer: LedgerWriter::inline(sql, Arc::clone(&shared)),
                shared,
                readers: Mutex::default(),
                session_locks: Mutex::default(),
                lock_count: AtomicU64::new(0),
                lease_guards: Mutex::default(),
                lease_count: AtomicU64::new(0),
            }))
        };
        open().map_err(|fault| ledger_error(&path, &fault))
    }

    /// Returns the public key of this ledger in hexadecimal digits, which verifies its receipts.
    #[must_use]
    pub fn public_key(&self) -> Arc<str> {
        Arc::clone(self.shared.keys().public_key())
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the id of this ledger. Another file at the same path has another id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.shared.ledger_id
    }

    /// Returns the number of transactions that this process has committed.
    #[must_use]
    pub fn transaction_count(&self) -> u64 {
        self.writer.transaction_count()
    }

    /// Checks that the store can write: writes an unchanged value to the disk.
    ///
    /// # Errors
    /// The write failed.
    pub async fn check_writable(&self) -> Result<(), StoreError> {
        self.write(true, |tx| {
            Ok(tx.sql.execute("UPDATE meta SET value = value WHERE name = 'id'", []).map(drop)?)
        })
        .await
    }

    /// Replaces the signing key. The old key signs the new one, so old signatures stay valid.
    ///
    /// # Errors
    /// The key cannot be created or stored.
    pub async fn rotate_key(&self) -> Result<Arc<str>, StoreError> {
        let new = Arc::new(
            LedgerKeys::with_new_signing_key(&self.shared.state_dir.keys_dir())
                .map_err(|e| self.with_path(&StoreError::unavailable(e.to_string())))?,
        );
        let (next, now) = (Arc::clone(&new), self.now());
        self.write(true, move |tx| ledger::rotate_key(tx, now, &next).map(|_| ())).await?;
        let public = Arc::clone(new.public_key());
        *lock_unpoisoned(&self.shared.keys) = new;
        Ok(public)
    }

    /// Prunes rows older than `rows_before`, and outcomes, approvals and large outputs older than
    /// `sealed_before`.
    ///
    /// The chains stay verifiable. Claims, limits, evidence and sessions are never pruned.
    ///
    /// # Errors
    /// A transaction failed. Earlier ones stay: a transaction prunes a few thousand rows.
    pub async fn prune(
        &self,
        rows_before: Timestamp,
        sealed_before: Timestamp,
    ) -> Result<PruneStats, StoreError> {
        let now = self.now();
        let (mut pruned, mut next_start) = (PruneStats { rows: 0, sealed: 0 }, Some(0));
        while let Some(start) = next_start {
            let (sealed, next) = self
                .write_and_pause(move |tx| {
                    record_pruning::prune_outcomes(tx.sql, sealed_before, start)
                })
                .await?;
            pruned.sealed += sealed;
            next_start = next;
        }
        loop {
            match self
                .write_and_pause(move |tx| {
                    record_pruning::prune_approvals_and_outputs(tx.sql, sealed_before)
                })
                .await?
            {
                0 => break,
                sealed => pruned.sealed += sealed,
            }
        }
        loop {
            match self.write_and_pause(move |tx| ledger::prune_rows(tx, rows_before, now)).await? {
                0 => return Ok(pruned),
                rows => pruned.rows += rows,
            }
        }
    }

    /// Writes, and then pauses for about as long as the write took, so that others can write.
    async fn write_and_pause<T: Send + 'static>(
        &self,
        f: impl FnOnce(&mut WriteTransaction<'_>) -> DbResult<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let begun = Instant::now();
        let written = self.write(true, f).await?;
        tokio::time::sleep(begun.elapsed().min(MAX_PRUNE_PAUSE)).await;
        Ok(written)
    }

    async fn write<T: Send + 'static>(
        &self,
        durable: bool,
        f: impl FnOnce(&mut WriteTransaction<'_>) -> DbResult<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.writer.write(durable, f).await.map_err(|error| self.with_path(&error))
    }

    /// Reads a little on this thread: by a key, from pages that are mostly cached.
    ///
    /// The read ends before another thread would have started.
    fn read_inline<T>(
        &self,
        f: impl FnOnce(&Connection, &SharedStoreState) -> DbResult<T>,
    ) -> Result<T, StoreError> {
        let f = match self.writer.try_read(f) {
            Ok(found) => return found.map_err(|fault| self.with_path(&fault.into())),
            Err(f) => f,
        };
        let sql = lock_unpoisoned(&self.readers).pop();
        let read = || -> DbResult<(Connection, T)> {
            let sql = match sql {
                Some(sql) => sql,
                None => open::open_readonly(&self.path)?,
            };
            let found = f(&sql, &self.shared)?;
            Ok((sql, found))
        };
        let (sql, found) = read().map_err(|fault| self.with_path(&fault.into()))?;
        self.return_reader(sql);
        Ok(found)
    }

    fn return_reader(&self, sql: Connection) {
        let mut readers = lock_unpoisoned(&self.readers);
        if readers.len() < 8 {
            readers.push(sql);
        }
    }

    /// Reads on another thread, because the read may be long.
    async fn read<T: Send + 'static>(
        &self,
        f: impl FnOnce(&Connection, &SharedStoreState) -> DbResult<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let f = match self.writer.read_if_inline(f) {
            Ok(found) => return found.map_err(|fault| self.with_path(&fault.into())),
            Err(f) => f,
        };
        let sql = lock_unpoisoned(&self.readers).pop();
        let (path, shared) = (self.path.clone(), Arc::clone(&self.shared));
        let work = move || -> DbResult<(Connection, T)> {
            let sql = match sql {
                Some(sql) => sql,
                None => open::open_readonly(&path)?,
            };
            let found = f(&sql, &shared)?;
            Ok((sql, found))
        };
        let done = tokio::task::spawn_blocking(work)
            .await
            .map_err(|error| StoreError::unavailable(error.to_string()))?;
        let (sql, found) = done.map_err(|fault| self.with_path(&fault.into()))?;
        self.return_reader(sql);
        Ok(found)
    }

    fn with_path(&self, error: &StoreError) -> StoreError {
        StoreError::new(error.kind, format!("the ledger {}: {error}", self.path.display()))
    }

    fn keys(&self) -> Arc<LedgerKeys> {
        self.shared.keys()
    }

    /// Locks a session against other calls of this process, then against other processes.
    async fn acquire_session_lock(
        &self,
        key: &SessionKey,
        request: LeaseRequest,
    ) -> Result<Option<SqliteSessionGuard>, StoreError> {
        let LeaseRequest { is_exclusive, timeout, .. } = request;
        let deadline = Instant::now().checked_add(timeout);
        let local_lock = {
            let mut locks = lock_unpoisoned(&self.session_locks);
            if self.lock_count.fetch_add(1, Ordering::Relaxed) % 1_024 == 1_023 {
                locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            }
            Arc::clone(locks.entry(key.clone()).or_default())
        };
        let calls = Arc::clone(&local_lock.call_lock);
        let local_guard = async {
            if is_exclusive {
                LocalSessionGuard::Exclusive(calls.write_owned().await)
            } else {
                LocalSessionGuard::Shared(calls.read_owned().await)
            }
        };
        let Ok(local_guard) = tokio::time::timeout(timeout, local_guard).await else {
            return Ok(None);
        };
        loop {
            let process_guard = ProcessSessionGuard::acquire(
                Arc::clone(&local_lock),
                Arc::clone(&self.shared),
                key,
                is_exclusive,
            );
            match process_guard.map_err(|error| {
                self.with_path(&StoreError::unavailable(format!(
                    "cannot lock the session: {error}"
                )))
            })? {
                Some(process_guard) => return Ok(Some((process_guard, local_guard))),
                None if deadline.is_none_or(|deadline| Instant::now() < deadline) => {
                    tokio::time::sleep(Duration::from_millis(5)).await
                }
                None => return Ok(None),
            }
        }
    }

    /// Turns a lock into a lease. The caller returns it without another await.
    fn register_lease(
        &self,
        key: &SessionKey,
        request: LeaseRequest,
        guard: SqliteSessionGuard,
    ) -> SessionLease {
        let id = self.lease_count.fetch_add(1, Ordering::Relaxed);
        lock_unpoisoned(&self.lease_guards).insert(id, guard);
        SessionLease {
            id,
            key: key.clone(),
            is_exclusive: request.is_exclusive,
            expires: self.now().checked_add(request.term).unwrap_or(Timestamp::MAX),
        }
    }

    fn seal_items(&self, items: &[SessionItem]) -> Result<Vec<Vec<u8>>, StoreError> {
        let keys = self.keys();
        let sealed = items.iter().map(|SessionItem(body)| keys.seal(ITEM_SEAL_CONTEXT, body));
        sealed
            .collect::<Result<_, _>>()
            .map_err(|error| self.with_path(&StoreError::unavailable(error.to_string())))
    }
}
