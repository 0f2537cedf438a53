//! The store in one SQLite file.

mod end;
mod hold;
mod store;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use rusqlite::Connection;
use tokio::time::Instant;
use toolgate::SessionKey;
use toolgate::store::{Hold, StoreError};

use crate::claims;
use crate::fault::{Done, Fault};
use crate::home::Home;
use crate::keys::Keys;
use crate::ledger;
use crate::open;
use crate::tx::{Shared, Tx, lock};
use crate::writer::Writer;
use hold::{Guard, Held, Own};

/// A store that outlives its process, in one SQLite file. What does not belong into the file stands in a directory beside
/// it, `<file>.state`: the keys, the mark of how far the ledger had come, and rows that could not be written.
pub struct SqliteStore {
    path: PathBuf,
    shared: Arc<Shared>,
    /// Before the writer: whoever closes the database last puts it in order, and only the writer can.
    readers: Mutex<Vec<Connection>>,
    writer: Writer,
    locks: Mutex<HashMap<SessionKey, Arc<Own>>>,
    /// How often a session was held: now and then, locks that nobody uses any more are let go.
    holds: AtomicU64,
}

/// How long others have the file to themselves between two parts of a pruning, at most.
const MOST_REST: Duration = Duration::from_secs(1);

/// What was taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gone {
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

impl SqliteStore {
    /// Opens a ledger, or begins one.
    ///
    /// # Errors
    /// What stands in the way: the file is no ledger, is damaged, is older than it should be, or cannot be written to.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        // What stands beside it stands beside the file, not beside a link to it.
        let path = std::fs::canonicalize(path.as_ref()).unwrap_or_else(|_| path.as_ref().to_owned());
        let (path, state) = (path.as_path(), crate::home::beside(&path));
        let state = state.as_path();
        let open = || -> Done<Self> {
            let there = |error: std::io::Error| Fault::Said(format!("{}: {error}", state.display()));
            open::is_ours(path)?;
            let look = "look whether the directory is there and can be written to";
            let no_door = |error: std::io::Error| Fault::Said(format!("{}: {error}; {look}", state.display()));
            let _door = Home::door(state).map_err(no_door)?;
            let sql = open::writing(path)?;
            let home = Home::enter(state).map_err(there)?;
            let (id, keys) = open::acquaint(&sql, &home)?;
            open::is_newest(&sql, &home, &id)?;
            let shared = Shared::new(home, id, keys);
            let unsigned = crate::pen::sweep(&sql, &shared, Timestamp::now())?;
            shared.home.tidy().map_err(there)?;
            Ok(Self {
                path: path.to_owned(),
                writer: Writer::start(sql, Arc::clone(&shared), unsigned)?,
                shared,
                readers: Mutex::default(),
                locks: Mutex::default(),
                holds: AtomicU64::new(0),
            })
        };
        open().map_err(|fault| StoreError(format!("the ledger {}: {fault}", path.display())))
    }

    /// Opens a ledger for a process that makes one call and ends: nothing is started, swept or put in order that the call does
    /// not need. `None` where there is no ledger yet, or one of an older shape: [`SqliteStore::open`] makes it ready.
    ///
    /// # Errors
    /// As for [`SqliteStore::open`].
    pub fn open_briefly(path: impl AsRef<Path>) -> Result<Option<Self>, StoreError> {
        let path = path.as_ref();
        let Ok(path) = std::fs::canonicalize(path) else { return Ok(None) };
        let open = || -> Done<Option<Self>> {
            let Some(sql) = open::ready(&path)? else { return Ok(None) };
            let home = Home::pass(&crate::home::beside(&path))
                .map_err(|error| Fault::Said(format!("{}: {error}", crate::home::beside(&path).display())))?;
            let Some((id, keys)) = open::known(&sql, &home)? else { return Ok(None) };
            open::is_newest(&sql, &home, &id)?;
            let shared = Shared::new(home, id, keys);
            Ok(Some(Self {
                path: path.clone(),
                writer: Writer::here(sql, Arc::clone(&shared)),
                shared,
                readers: Mutex::default(),
                locks: Mutex::default(),
                holds: AtomicU64::new(0),
            }))
        };
        open().map_err(|fault| StoreError(format!("the ledger {}: {fault}", path.display())))
    }

    /// The key that this ledger signs with, in hexadecimal digits: give it to whoever shall check receipts.
    #[must_use]
    pub fn public_key(&self) -> Arc<str> {
        Arc::clone(self.shared.keys().public())
    }

    /// The file that it is in.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name of this ledger: another file at the same path has another.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.shared.id
    }

    /// How many transactions this process has written: whatever waits goes into one.
    #[must_use]
    pub fn transactions(&self) -> u64 {
        self.writer.count()
    }

    /// Whether it takes what is written to it: writes what is there already, to the disk.
    ///
    /// # Errors
    /// It does not.
    pub async fn try_out(&self) -> Result<(), StoreError> {
        self.write(true, |tx| Ok(tx.sql.execute("UPDATE meta SET value = value WHERE name = 'id'", []).map(drop)?)).await
    }

    /// Signs with a new key from here on. The old key signs the new one, so that what it signed is still believed.
    ///
    /// # Errors
    /// It cannot be made or written down.
    pub async fn rotate_key(&self) -> Result<Arc<str>, StoreError> {
        let new = Arc::new(Keys::with_new_signing_key(&self.shared.home.keys()).map_err(|e| self.named(&StoreError(e.to_string())))?);
        let next = Arc::clone(&new);
        self.write(true, move |tx| ledger::rotate(tx, Timestamp::now(), &next).map(|_| ())).await?;
        let public = Arc::clone(new.public());
        *lock(&self.shared.keys) = new;
        Ok(public)
    }

    /// Takes rows out of the ledger that are older than one moment, and recorded outcomes, approvals and large outputs
    /// that are older than another. Chains still hold afterwards; claims, limits, evidence and sessions are never touched.
    ///
    /// # Errors
    /// The store cannot do it, or not all of it: rows go a few thousand at a time.
    pub async fn prune(&self, rows_before: Timestamp, sealed_before: Timestamp) -> Result<Gone, StoreError> {
        let (mut gone, mut after) = (Gone { rows: 0, sealed: 0 }, Some(0));
        while let Some(from) = after {
            let (sealed, next) = self.write_and_rest(move |tx| claims::forget(tx.sql, sealed_before, from)).await?;
            gone.sealed += sealed;
            after = next;
        }
        loop {
            match self.write_and_rest(move |tx| claims::clear(tx.sql, sealed_before)).await? {
                0 => break,
                sealed => gone.sealed += sealed,
            }
        }
        loop {
            match self.write_and_rest(move |tx| ledger::prune(tx, rows_before, Timestamp::now())).await? {
                0 => return Ok(gone),
                rows => gone.rows += rows,
            }
        }
    }

    /// Writes, and then leaves the file to others for about as long as that took.
    async fn write_and_rest<T: Send + 'static>(&self, f: impl FnOnce(&mut Tx<'_>) -> Done<T> + Send + 'static) -> Result<T, StoreError> {
        let begun = Instant::now();
        let written = self.write(true, f).await?;
        tokio::time::sleep(begun.elapsed().min(MOST_REST)).await;
        Ok(written)
    }

    async fn write<T: Send + 'static>(
        &self,
        durable: bool,
        f: impl FnOnce(&mut Tx<'_>) -> Done<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.writer.write(durable, f).await.map_err(|error| self.named(&error))
    }

    /// Reads a little: by a key, from pages that a call has just written. That is over before another thread would have begun.
    fn read_here<T>(&self, f: impl FnOnce(&Connection, &Shared) -> Done<T>) -> Result<T, StoreError> {
        let f = match self.writer.glance(f) {
            Ok(found) => return found.map_err(|fault| self.named(&fault.into())),
            Err(f) => f,
        };
        let sql = lock(&self.readers).pop();
        let read = || -> Done<(Connection, T)> {
            let sql = match sql {
                Some(sql) => sql,
                None => open::reading(&self.path)?,
            };
            let found = f(&sql, &self.shared)?;
            Ok((sql, found))
        };
        let (sql, found) = read().map_err(|fault| self.named(&fault.into()))?;
        self.put_back(sql);
        Ok(found)
    }

    fn put_back(&self, sql: Connection) {
        let mut readers = lock(&self.readers);
        if readers.len() < 8 {
            readers.push(sql);
        }
    }

    /// Reads what may be much, on another thread.
    async fn read<T: Send + 'static>(&self, f: impl FnOnce(&Connection, &Shared) -> Done<T> + Send + 'static) -> Result<T, StoreError> {
        let f = match self.writer.read(f) {
            Ok(found) => return found.map_err(|fault| self.named(&fault.into())),
            Err(f) => f,
        };
        let sql = lock(&self.readers).pop();
        let (path, shared) = (self.path.clone(), Arc::clone(&self.shared));
        let work = move || -> Done<(Connection, T)> {
            let sql = match sql {
                Some(sql) => sql,
                None => open::reading(&path)?,
            };
            let found = f(&sql, &shared)?;
            Ok((sql, found))
        };
        let done = tokio::task::spawn_blocking(work).await.map_err(|error| StoreError(error.to_string()))?;
        let (sql, found) = done.map_err(|fault| self.named(&fault.into()))?;
        self.put_back(sql);
        Ok(found)
    }

    fn named(&self, error: &StoreError) -> StoreError {
        StoreError(format!("the ledger {}: {error}", self.path.display()))
    }

    fn keys(&self) -> Arc<Keys> {
        self.shared.keys()
    }

    /// Holds a session against other calls of this process, then against other processes.
    async fn acquire(&self, key: &SessionKey, alone: bool, wait: Duration) -> Result<Option<Hold>, StoreError> {
        let until = Instant::now().checked_add(wait);
        let own = {
            let mut locks = lock(&self.locks);
            if self.holds.fetch_add(1, Ordering::Relaxed) % 1_024 == 1_023 {
                locks.retain(|_, own| Arc::strong_count(own) > 1);
            }
            Arc::clone(locks.entry(key.clone()).or_default())
        };
        let calls = Arc::clone(&own.calls);
        let guard = async { if alone { Guard::Alone(calls.write_owned().await) } else { Guard::Together(calls.read_owned().await) } };
        let Ok(guard) = tokio::time::timeout(wait, guard).await else { return Ok(None) };
        loop {
            let held = Held::take(Arc::clone(&own), Arc::clone(&self.shared), key, alone);
            match held.map_err(|error| self.named(&StoreError(format!("a session could not be held: {error}"))))? {
                Some(held) => return Ok(Some(Hold::new((held, guard)))),
                None if until.is_none_or(|until| Instant::now() < until) => tokio::time::sleep(Duration::from_millis(5)).await,
                None => return Ok(None),
            }
        }
    }
}
