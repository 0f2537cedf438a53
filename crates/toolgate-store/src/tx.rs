//! Defines the write transaction, and the state that is shared between the writer and readers.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use rusqlite::Connection;
use toolgate::json::Digest;
use toolgate::{CallId, Polling, SessionKey};

use crate::counters::Reserved;
use crate::fault::Done;
use crate::home::{Home, Mark};
use crate::keys::Keys;
use crate::ledger::Tip;

/// A write transaction.
pub(crate) struct Tx<'c> {
    pub(crate) sql: &'c Connection,
    pub(crate) shared: &'c Shared,
    /// The head of the ledger.
    pub(crate) tip: Tip,
    pub(crate) configs: &'c mut HashSet<Digest>,
    /// Previous values of the in-memory state, which a rollback restores.
    undo: RefCell<Vec<Undo>>,
}

/// Previous value of an entry of the in-memory state.
enum Undo {
    Ahead(SessionKey, Option<Vec<Counted>>),
    Reads(CallId, Option<Vec<Reserved>>),
    Own(CallId, Option<Vec<Reserved>>),
}

impl<'c> Tx<'c> {
    pub(crate) fn new(sql: &'c Connection, shared: &'c Shared, tip: Tip, configs: &'c mut HashSet<Digest>) -> Self {
        Self { sql, shared, tip, configs, undo: RefCell::default() }
    }

    /// Replaces the calls of a session that are counted in memory only. Returns the previous ones.
    pub(crate) fn take_ahead(&self, key: &SessionKey, left: Option<Vec<Counted>>) -> Option<Vec<Counted>> {
        let before = put(&mut lock(&self.shared.ahead), key, left);
        self.undo.borrow_mut().push(Undo::Ahead(key.clone(), before.clone()));
        before
    }

    /// Replaces the reserved charges of a read. Returns the previous ones.
    pub(crate) fn take_read(&self, call: CallId, left: Option<Vec<Reserved>>) -> Option<Vec<Reserved>> {
        let before = put(&mut lock(&self.shared.reads), &call, left);
        self.undo.borrow_mut().push(Undo::Reads(call, before.clone()));
        before
    }

    /// Replaces the reserved charges of a claim in `under_way`. Returns the previous ones.
    pub(crate) fn take_own(&self, call: CallId, left: Option<Vec<Reserved>>) -> Option<Vec<Reserved>> {
        let before = put(&mut lock(&self.shared.own), &call, left);
        self.undo.borrow_mut().push(Undo::Own(call, before.clone()));
        before
    }

    /// Returns the length of the undo log.
    pub(crate) fn done(&self) -> usize {
        self.undo.borrow().len()
    }

    /// Restores the in-memory state to when the undo log had this length.
    pub(crate) fn unwind(&self, to: usize) {
        let mut undo = self.undo.borrow_mut();
        while undo.len() > to {
            match undo.pop() {
                Some(Undo::Ahead(key, before)) => drop(put(&mut lock(&self.shared.ahead), &key, before)),
                Some(Undo::Reads(call, before)) => drop(put(&mut lock(&self.shared.reads), &call, before)),
                Some(Undo::Own(call, before)) => drop(put(&mut lock(&self.shared.own), &call, before)),
                None => {}
            }
        }
    }
}

fn put<K: std::hash::Hash + Eq + Clone, V>(map: &mut HashMap<K, V>, key: &K, value: Option<V>) -> Option<V> {
    match value {
        Some(value) => map.insert(key.clone(), value),
        None => map.remove(key),
    }
}

impl Tx<'_> {
    /// Returns the current signing keys. Another process may have rotated them.
    pub(crate) fn keys(&self) -> Done<Arc<Keys>> {
        let current: String = self.sql.prepare_cached("SELECT value FROM meta WHERE name = 'key'")?.query_row([], |row| row.get(0))?;
        let known = self.shared.keys();
        if **known.public() == *current {
            return Ok(known);
        }
        let keys = Arc::new(Keys::open(&self.shared.home.keys(), &current)?);
        *lock(&self.shared.keys) = Arc::clone(&keys);
        Ok(keys)
    }
}

/// State that is shared between the writer and readers.
pub(crate) struct Shared {
    pub(crate) home: Home,
    pub(crate) keys: Mutex<Arc<Keys>>,
    /// Id of the ledger.
    pub(crate) id: String,
    /// Definitions of agents by digest.
    pub(crate) definitions: Mutex<Vec<(Digest, Arc<str>)>>,
    /// Calls that are counted with the next write to their session. Only the writer reads them.
    pub(crate) ahead: Mutex<HashMap<SessionKey, Vec<Counted>>>,
    /// Reserved charges of running reads, whose claims are not stored.
    pub(crate) reads: Mutex<HashMap<CallId, Vec<Reserved>>>,
    /// Reserved charges of this process's claims in `under_way`, to end one without a read.
    pub(crate) own: Mutex<HashMap<CallId, Vec<Reserved>>>,
    /// Number of running calls.
    pub(crate) calls: AtomicUsize,
}

/// A validated call that counts for the progress of its session.
#[derive(Clone, Copy)]
pub(crate) struct Counted {
    pub(crate) digest: Digest,
    pub(crate) at: Timestamp,
    pub(crate) polling: Option<Polling>,
}

impl Shared {
    /// Moves the high-water mark to the last signed row.
    pub(crate) fn set_mark(&self, mark: Option<Mark>) {
        if let Some(mark) = mark
            && let Err(error) = self.home.set_mark(&mark)
        {
            tracing::error!(%error, "cannot update the high-water mark of the ledger");
        }
    }

    pub(crate) fn new(home: Home, id: String, keys: Keys) -> Arc<Self> {
        let (definitions, ahead, reads, own) = (Mutex::default(), Mutex::default(), Mutex::default(), Mutex::default());
        Arc::new(Self { home, keys: Mutex::new(Arc::new(keys)), id, definitions, ahead, reads, own, calls: AtomicUsize::new(0) })
    }

    pub(crate) fn keys(&self) -> Arc<Keys> {
        Arc::clone(&lock(&self.keys))
    }
}

/// Runs `f` in a read transaction, so that all its reads see the same state.
pub(crate) fn at_once<T>(sql: &Connection, f: impl FnOnce(&Connection) -> Done<T>) -> Done<T> {
    sql.prepare_cached("BEGIN")?.execute([])?;
    let _moment = Moment(sql);
    f(sql)
}

struct Moment<'c>(&'c Connection);

impl Drop for Moment<'_> {
    fn drop(&mut self) {
        // A read transaction loses nothing if the commit fails.
        let ended = self.0.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
        if ended.is_err() && !self.0.is_autocommit() {
            let _ = self.0.execute_batch("ROLLBACK");
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
