//! Defines the write transaction, and the state that is shared between the writer and readers.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use rusqlite::Connection;
use toolgate::clock::Clock;
use toolgate::store::{ClaimOwner, ClaimRecord};
use toolgate::{CallId, PollingSettings, SessionKey};
use toolgate_json::Digest;

use crate::error::DbResult;
use crate::keys::LedgerKeys;
use crate::state_dir::{HighWaterMark, StateDir};
use crate::tables::counters::ReservedCharge;
use crate::tables::ledger::LedgerHead;

/// A write transaction.
pub(crate) struct WriteTransaction<'c> {
    pub(crate) sql: &'c Connection,
    pub(crate) shared: &'c SharedStoreState,
    /// The head of the ledger.
    pub(crate) head: LedgerHead,
    pub(crate) stored_configs: &'c mut HashSet<Digest>,
    /// Previous values of the in-memory state, which a rollback restores.
    undo_log: RefCell<Vec<UndoLogEntry>>,
}

/// Previous value of an entry of the in-memory state.
enum UndoLogEntry {
    UncountedCalls(SessionKey, Option<Vec<UncountedCall>>),
    ReadCharges(CallId, Option<Vec<ReservedCharge>>),
    InflightCharges(CallId, Option<Vec<ReservedCharge>>),
}

impl<'c> WriteTransaction<'c> {
    pub(crate) fn new(
        sql: &'c Connection,
        shared: &'c SharedStoreState,
        head: LedgerHead,
        configs: &'c mut HashSet<Digest>,
    ) -> Self {
        Self { sql, shared, head, stored_configs: configs, undo_log: RefCell::default() }
    }

    /// Replaces the calls of a session that are counted in memory only. Returns the previous ones.
    pub(crate) fn replace_uncounted_calls(
        &self,
        key: &SessionKey,
        replacement: Option<Vec<UncountedCall>>,
    ) -> Option<Vec<UncountedCall>> {
        let before =
            insert_or_remove(&mut lock_unpoisoned(&self.shared.uncounted_calls), key, replacement);
        self.undo_log.borrow_mut().push(UndoLogEntry::UncountedCalls(key.clone(), before.clone()));
        before
    }

    /// Replaces the reserved charges of a read. Returns the previous ones.
    pub(crate) fn replace_read_charges(
        &self,
        call: CallId,
        replacement: Option<Vec<ReservedCharge>>,
    ) -> Option<Vec<ReservedCharge>> {
        let before =
            insert_or_remove(&mut lock_unpoisoned(&self.shared.read_charges), &call, replacement);
        self.undo_log.borrow_mut().push(UndoLogEntry::ReadCharges(call, before.clone()));
        before
    }

    /// Replaces the reserved charges of a claim in `under_way`. Returns the previous ones.
    pub(crate) fn replace_inflight_charges(
        &self,
        call: CallId,
        replacement: Option<Vec<ReservedCharge>>,
    ) -> Option<Vec<ReservedCharge>> {
        let before = insert_or_remove(
            &mut lock_unpoisoned(&self.shared.inflight_charges),
            &call,
            replacement,
        );
        self.undo_log.borrow_mut().push(UndoLogEntry::InflightCharges(call, before.clone()));
        before
    }

    /// Returns the length of the undo log.
    pub(crate) fn undo_len(&self) -> usize {
        self.undo_log.borrow().len()
    }

    /// Restores the in-memory state to when the undo log had this length.
    pub(crate) fn undo_to(&self, length: usize) {
        let mut undo = self.undo_log.borrow_mut();
        while undo.len() > length {
            match undo.pop() {
                Some(UndoLogEntry::UncountedCalls(key, before)) => drop(insert_or_remove(
                    &mut lock_unpoisoned(&self.shared.uncounted_calls),
                    &key,
                    before,
                )),
                Some(UndoLogEntry::ReadCharges(call, before)) => drop(insert_or_remove(
                    &mut lock_unpoisoned(&self.shared.read_charges),
                    &call,
                    before,
                )),
                Some(UndoLogEntry::InflightCharges(call, before)) => drop(insert_or_remove(
                    &mut lock_unpoisoned(&self.shared.inflight_charges),
                    &call,
                    before,
                )),
                None => {}
            }
        }
    }
}

fn insert_or_remove<K: std::hash::Hash + Eq + Clone, V>(
    map: &mut HashMap<K, V>,
    key: &K,
    value: Option<V>,
) -> Option<V> {
    match value {
        Some(value) => map.insert(key.clone(), value),
        None => map.remove(key),
    }
}

impl WriteTransaction<'_> {
    /// Returns the current signing keys. Another process may have rotated them.
    pub(crate) fn current_keys(&self) -> DbResult<Arc<LedgerKeys>> {
        let current: String = self
            .sql
            .prepare_cached("SELECT value FROM meta WHERE name = 'key'")?
            .query_row([], |row| row.get(0))?;
        let known = self.shared.keys();
        if **known.public_key() == *current {
            return Ok(known);
        }
        let keys = Arc::new(LedgerKeys::open(&self.shared.state_dir.keys_dir(), &current)?);
        *lock_unpoisoned(&self.shared.keys) = Arc::clone(&keys);
        Ok(keys)
    }
}

/// State that is shared between the writer and readers.
pub(crate) struct SharedStoreState {
    /// The clock of all decisions of the store.
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) state_dir: StateDir,
    pub(crate) keys: Mutex<Arc<LedgerKeys>>,
    /// Id of the ledger.
    pub(crate) ledger_id: String,
    /// Definitions of agents by digest.
    pub(crate) definitions: Mutex<Vec<(Digest, Arc<str>)>>,
    /// Calls that are counted with the next write to their session. Only the writer reads them.
    pub(crate) uncounted_calls: Mutex<HashMap<SessionKey, Vec<UncountedCall>>>,
    /// Reserved charges of running reads, whose claims are not stored.
    pub(crate) read_charges: Mutex<HashMap<CallId, Vec<ReservedCharge>>>,
    /// Reserved charges of this process's claims in `under_way`, to end one without a read.
    pub(crate) inflight_charges: Mutex<HashMap<CallId, Vec<ReservedCharge>>>,
    /// Number of running calls.
    pub(crate) running_calls: AtomicUsize,
}

/// A validated call that counts for the progress of its session.
#[derive(Clone, Copy)]
pub(crate) struct UncountedCall {
    pub(crate) digest: Digest,
    pub(crate) at: Timestamp,
    pub(crate) polling: Option<PollingSettings>,
}

impl SharedStoreState {
    /// Moves the high-water mark to the last signed row.
    pub(crate) fn advance_mark(&self, mark: Option<HighWaterMark>) {
        if let Some(mark) = mark
            && let Err(error) = self.state_dir.write_mark(&mark)
        {
            tracing::error!(%error, "cannot update the high-water mark of the ledger");
        }
    }

    pub(crate) fn new(
        state_dir: StateDir,
        id: String,
        keys: LedgerKeys,
        clock: Arc<dyn Clock>,
    ) -> Arc<Self> {
        Arc::new(Self {
            state_dir,
            clock,
            keys: Mutex::new(Arc::new(keys)),
            ledger_id: id,
            definitions: Mutex::default(),
            uncounted_calls: Mutex::default(),
            read_charges: Mutex::default(),
            inflight_charges: Mutex::default(),
            running_calls: AtomicUsize::new(0),
        })
    }

    /// Returns whether this process owns a claim.
    pub(crate) fn is_own_claim(&self, claim: &ClaimRecord) -> bool {
        matches!((&claim.owner, self.state_dir.term()), (ClaimOwner::Term(owner), Some(term)) if owner == term)
    }

    pub(crate) fn keys(&self) -> Arc<LedgerKeys> {
        Arc::clone(&lock_unpoisoned(&self.keys))
    }
}

/// Runs `f` in a read transaction, so that all its reads see the same state.
pub(crate) fn read_transaction<T>(
    sql: &Connection,
    f: impl FnOnce(&Connection) -> DbResult<T>,
) -> DbResult<T> {
    sql.prepare_cached("BEGIN")?.execute([])?;
    let _guard = ReadTransactionGuard(sql);
    f(sql)
}

struct ReadTransactionGuard<'c>(&'c Connection);

impl Drop for ReadTransactionGuard<'_> {
    fn drop(&mut self) {
        // A read transaction loses nothing if the commit fails.
        let ended = self.0.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
        if ended.is_err() && !self.0.is_autocommit() {
            let _ = self.0.execute_batch("ROLLBACK");
        }
    }
}

pub(crate) fn lock_unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
