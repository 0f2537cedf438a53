//! What a transaction works with, and what everybody knows.

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

/// A transaction that is being written.
pub(crate) struct Tx<'c> {
    pub(crate) sql: &'c Connection,
    pub(crate) shared: &'c Shared,
    /// Where the ledger ends.
    pub(crate) tip: Tip,
    pub(crate) configs: &'c mut HashSet<Digest>,
    /// How what is kept in memory was before: it goes back with what is rolled back.
    undo: RefCell<Vec<Undo>>,
}

/// Something in memory, as it was.
enum Undo {
    Ahead(SessionKey, Option<Vec<Counted>>),
    Reads(CallId, Option<Vec<Reserved>>),
    Own(CallId, Option<Vec<Reserved>>),
}

impl<'c> Tx<'c> {
    pub(crate) fn new(sql: &'c Connection, shared: &'c Shared, tip: Tip, configs: &'c mut HashSet<Digest>) -> Self {
        Self { sql, shared, tip, configs, undo: RefCell::default() }
    }

    /// The calls that have come to a session and are not counted yet; those given are left instead.
    pub(crate) fn take_ahead(&self, key: &SessionKey, left: Option<Vec<Counted>>) -> Option<Vec<Counted>> {
        let before = put(&mut lock(&self.shared.ahead), key, left);
        self.undo.borrow_mut().push(Undo::Ahead(key.clone(), before.clone()));
        before
    }

    /// What a read has reserved; what is given is noted instead.
    pub(crate) fn take_read(&self, call: CallId, left: Option<Vec<Reserved>>) -> Option<Vec<Reserved>> {
        let before = put(&mut lock(&self.shared.reads), &call, left);
        self.undo.borrow_mut().push(Undo::Reads(call, before.clone()));
        before
    }

    /// What a claim of this process has reserved, where its end is nothing but that; what is given is noted instead.
    pub(crate) fn take_own(&self, call: CallId, left: Option<Vec<Reserved>>) -> Option<Vec<Reserved>> {
        let before = put(&mut lock(&self.shared.own), &call, left);
        self.undo.borrow_mut().push(Undo::Own(call, before.clone()));
        before
    }

    /// How much could be undone.
    pub(crate) fn done(&self) -> usize {
        self.undo.borrow().len()
    }

    /// Puts back what was changed in memory since so much was done.
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
    /// The keys to sign with: another process may have changed them.
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

/// What the writer and everybody else knows.
pub(crate) struct Shared {
    pub(crate) home: Home,
    pub(crate) keys: Mutex<Arc<Keys>>,
    /// Which ledger this is.
    pub(crate) id: String,
    /// Definitions of agents, by digest, until they are stored.
    pub(crate) definitions: Mutex<Vec<(Digest, Arc<str>)>>,
    /// Calls that have come to their sessions and are counted with what those write next. Only whoever writes looks.
    pub(crate) ahead: Mutex<HashMap<SessionKey, Vec<Counted>>>,
    /// What reads under way have reserved. They leave nothing to reconcile, so nothing else is written down of them before their end.
    pub(crate) reads: Mutex<HashMap<CallId, Vec<Reserved>>>,
    /// What claims under way have reserved that are on disk, and that this process need not read to end them.
    pub(crate) own: Mutex<HashMap<CallId, Vec<Reserved>>>,
    /// How many calls are under way.
    pub(crate) calls: AtomicUsize,
}

/// A validated call, to be counted for its session's progress.
#[derive(Clone, Copy)]
pub(crate) struct Counted {
    pub(crate) digest: Digest,
    pub(crate) at: Timestamp,
    pub(crate) polling: Option<Polling>,
}

impl Shared {
    /// Moves the mark beside the ledger to where it was signed.
    pub(crate) fn set_mark(&self, mark: Option<Mark>) {
        if let Some(mark) = mark
            && let Err(error) = self.home.set_mark(&mark)
        {
            tracing::error!(%error, "the mark beside the ledger could not be moved");
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

/// Reads several things as of one moment. However that ends, the connection is free again.
pub(crate) fn at_once<T>(sql: &Connection, f: impl FnOnce(&Connection) -> Done<T>) -> Done<T> {
    sql.prepare_cached("BEGIN")?.execute([])?;
    let _moment = Moment(sql);
    f(sql)
}

struct Moment<'c>(&'c Connection);

impl Drop for Moment<'_> {
    fn drop(&mut self) {
        // Nothing was written.
        let ended = self.0.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
        if ended.is_err() && !self.0.is_autocommit() {
            let _ = self.0.execute_batch("ROLLBACK");
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
