//! Writes jobs to the database, one transaction at a time, and signs checkpoints of the ledger.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension};
use toolgate::store::StoreError;
use toolgate_json::Digest;

use crate::error::{DbError, DbResult};
use crate::open;
use crate::state_dir::HighWaterMark;
use crate::tables::ledger;
use crate::tables::ledger::LedgerHead;
use crate::transaction::{SharedStoreState, WriteTransaction};
use crate::write_queue::{WriteJob, WriteOperation};

/// How many rows may be unsigned, and for how long.
const MAX_UNSIGNED_ROWS: u64 = 1_000;
const SIGN_INTERVAL: Duration = Duration::from_secs(1);
/// How many transactions without a sync trigger a WAL checkpoint.
const MAX_WAL_TRANSACTIONS: u64 = 4_000;
/// How many synced transactions trigger a WAL checkpoint.
///
/// Syncing a WAL that is overwritten takes half the time of one that grows.
const MAX_SYNCED_WAL_TRANSACTIONS: u64 = 128;
/// How many bytes of WAL a process that makes one call may leave behind.
const MAX_LEFTOVER_WAL_BYTES: u64 = 256 << 10;

/// When a transaction signs a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SignPolicy {
    Never,
    /// When many rows are unsigned, or the last signature is too old.
    WhenDue,
    /// With every durable row, because the process exits before it could sign later.
    WithRows,
}

/// Result of a transaction.
pub(crate) struct TransactionResult {
    pub(crate) is_committed: bool,
    /// The new high-water mark, if the transaction signed a checkpoint.
    pub(crate) mark: Option<HighWaterMark>,
}

/// The write connection with its state.
pub(crate) struct WriteConnection {
    pub(crate) sql: Connection,
    pub(crate) shared: Arc<SharedStoreState>,
    /// Digests of agent definitions that are stored already.
    stored_configs: HashSet<Digest>,
    /// Rows since the last signature of this process.
    pub(crate) unsigned_rows: u64,
    signed_at: Instant,
    /// Ledger head after the last write of this process.
    last_head: Option<LedgerHead>,
    /// Pragmas that are set: whether commits sync, and whether SQLite checkpoints the WAL.
    sync_mode: Option<(bool, bool)>,
    /// Whether a transaction is open for the next write.
    has_open_transaction: bool,
    /// Transactions since the last WAL checkpoint, and how many of them were synced.
    wal_transactions: u64,
    wal_synced_transactions: u64,
}

/// Signs a checkpoint in the transaction. If signing fails, the rows are committed unsigned.
fn try_sign_head(tx: &mut WriteTransaction<'_>) -> DbResult<Option<HighWaterMark>> {
    tx.sql.prepare_cached("SAVEPOINT job")?.execute([])?;
    let signed = ledger::sign_checkpoint(tx, Timestamp::now());
    if tx.sql.is_autocommit() {
        return signed.map(Some);
    }
    let mark = signed
        .map_err(|fault| {
            tracing::error!(%fault, "cannot sign a checkpoint");
            tx.sql.execute_batch("ROLLBACK TO job")
        })
        .ok();
    tx.sql.prepare_cached("RELEASE job")?.execute([])?;
    Ok(mark)
}

impl WriteConnection {
    pub(crate) fn new(sql: Connection, shared: Arc<SharedStoreState>, unsigned: u64) -> Self {
        Self {
            sql,
            shared,
            stored_configs: HashSet::new(),
            unsigned_rows: unsigned,
            signed_at: Instant::now(),
            last_head: None,
            sync_mode: None,
            has_open_transaction: false,
            wal_transactions: 0,
            wal_synced_transactions: 0,
        }
    }

    pub(crate) fn is_signature_due(&self) -> bool {
        self.unsigned_rows > 0
            && (self.unsigned_rows >= MAX_UNSIGNED_ROWS
                || self.signed_at.elapsed() >= SIGN_INTERVAL)
    }

    /// Returns how long to wait until the next checkpoint is due, if rows are unsigned.
    pub(crate) fn time_until_signature(&self) -> Option<Duration> {
        (self.unsigned_rows > 0).then(|| SIGN_INTERVAL.saturating_sub(self.signed_at.elapsed()))
    }

    /// Signs all unsigned rows now.
    pub(crate) fn sign_now(&mut self) {
        if self.unsigned_rows > 0 {
            self.signed_at = Instant::now().checked_sub(SIGN_INTERVAL).unwrap_or(self.signed_at);
            let written = self.write(Vec::new(), SignPolicy::WhenDue);
            self.shared.advance_mark(written.mark);
        }
    }

    /// Writes jobs in one transaction and completes them.
    pub(crate) fn write(&mut self, jobs: Vec<WriteJob>, signs: SignPolicy) -> TransactionResult {
        let sign = signs != SignPolicy::Never && self.is_signature_due();
        let durable = sign || jobs.iter().any(|job| job.is_durable);
        let mut work: Vec<(Box<dyn WriteOperation>, Option<StoreError>)> =
            jobs.into_iter().map(|job| (job.task, None)).collect();
        let with_rows = durable && signs == SignPolicy::WithRows;
        let written = self.run_transaction(durable, sign, with_rows, &mut work);
        let mut result = TransactionResult { is_committed: written.is_ok(), mark: None };
        let failed = match written {
            Ok((rows, mark)) => {
                self.unsigned_rows = if mark.is_some() { 0 } else { self.unsigned_rows + rows };
                result.mark = mark;
                // If signing failed, the next attempt is one interval later.
                if sign || self.unsigned_rows == rows {
                    self.signed_at = Instant::now();
                }
                None
            }
            Err(fault) => {
                self.stored_configs.clear();
                self.roll_back();
                if sign {
                    tracing::error!(%fault, "cannot write a checkpoint");
                    self.signed_at = Instant::now();
                }
                Some(StoreError::from(fault))
            }
        };
        for (work, job_error) in work {
            work.complete(failed.clone().or(job_error));
        }
        result
    }

    /// Begins a transaction, unless another process is writing. Does not wait.
    pub(crate) fn try_begin(&mut self, durable: bool) -> bool {
        let timeout_set = self.sql.busy_timeout(Duration::ZERO);
        let began = timeout_set.map_err(DbError::from).and_then(|()| self.begin(durable, false));
        // Another error shows again when the writer thread tries.
        let timeout_set = self.sql.busy_timeout(open::BUSY_TIMEOUT);
        if began.is_ok() && timeout_set.is_err() {
            self.roll_back();
        }
        self.has_open_transaction = began.is_ok() && timeout_set.is_ok();
        self.has_open_transaction
    }

    /// Checkpoints and truncates a long WAL, unless another process uses the database.
    ///
    /// The next process that opens the database alone reads the whole WAL.
    pub(crate) fn truncate_wal(&self) {
        let is_long = |path: &str| {
            std::fs::metadata(format!("{path}-wal"))
                .is_ok_and(|wal| wal.len() > MAX_LEFTOVER_WAL_BYTES)
        };
        if self.sql.path().is_some_and(is_long)
            && let Err(error) = self.sql.busy_timeout(Duration::ZERO).and_then(|()| {
                self.sql.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
            })
        {
            tracing::error!(%error, "cannot checkpoint the WAL of the ledger");
        }
    }

    fn roll_back(&self) {
        if !self.sql.is_autocommit()
            && let Err(error) = self.sql.execute_batch("ROLLBACK")
        {
            tracing::error!(%error, "cannot roll back a transaction");
        }
    }

    /// Begins a transaction. SQLite checkpoints the WAL, which is slow, only if `has_time` is true.
    fn begin(&mut self, durable: bool, has_time: bool) -> DbResult<()> {
        if std::mem::take(&mut self.has_open_transaction) {
            return Ok(());
        }
        // Do not continue a transaction that an earlier job left open.
        self.roll_back();
        if self.sync_mode != Some((durable, has_time)) {
            self.sync_mode = None;
            self.sql.execute_batch(match (durable, has_time) {
                (true, true) => "PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 16000",
                (true, false) => "PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 0",
                (false, _) => "PRAGMA synchronous = NORMAL; PRAGMA wal_autocheckpoint = 0",
            })?;
            self.sync_mode = Some((durable, has_time));
        }
        self.sql.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        Ok(())
    }

    /// Runs one transaction. Returns the number of new rows and the new high-water mark, if any.
    fn run_transaction(
        &mut self,
        durable: bool,
        sign: bool,
        with_rows: bool,
        work: &mut [(Box<dyn WriteOperation>, Option<StoreError>)],
    ) -> DbResult<(u64, Option<HighWaterMark>)> {
        let has_time = durable && !self.has_open_transaction;
        self.begin(durable, has_time)?;
        let head = ledger::read_head(&self.sql)?;
        if self.last_head != Some(head) {
            self.check_same_ledger()?;
        }
        let mut tx = WriteTransaction::new(&self.sql, &self.shared, head, &mut self.stored_configs);
        let mut written = run_jobs(&mut tx, work, sign, with_rows);
        if written.is_ok()
            && let Err(error) =
                tx.sql.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]))
        {
            written = Err(error.into());
        }
        if written.is_err() {
            tx.undo_to(0);
        }
        let last = tx.head;
        let mark = written?;
        self.last_head = Some(last);
        self.wal_transactions = if has_time { 0 } else { self.wal_transactions + 1 };
        self.wal_synced_transactions += u64::from(durable);
        Ok((last.seq - head.seq, mark))
    }

    /// Returns true if the ledger ends where this process left it.
    pub(crate) fn is_head(&self, head: LedgerHead) -> bool {
        self.last_head == Some(head)
    }

    /// Returns true if a WAL checkpoint is due.
    pub(crate) fn needs_wal_checkpoint(&self) -> bool {
        self.wal_transactions >= MAX_WAL_TRANSACTIONS
            || self.wal_synced_transactions >= MAX_SYNCED_WAL_TRANSACTIONS
    }

    /// Checkpoints the WAL, as far as no reader needs it.
    pub(crate) fn checkpoint_wal(&mut self) {
        (self.wal_transactions, self.wal_synced_transactions) = (0, 0);
        if let Err(error) = self.sql.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())) {
            tracing::error!(%error, "cannot checkpoint the WAL of the ledger");
        }
    }

    /// Checks that the last row of this process is still in the ledger, or was pruned.
    fn check_same_ledger(&self) -> DbResult<()> {
        let Some(last) = self.last_head.filter(|last| last.seq > 0) else { return Ok(()) };
        let chain: Option<Vec<u8>> = self
            .sql
            .prepare_cached("SELECT chain FROM ledger WHERE seq = ?1")?
            .query_row([ledger::to_i64(last.seq)], |row| row.get(0))
            .optional()?;
        let pruned = || -> DbResult<bool> {
            Ok(self
                .sql
                .prepare_cached("SELECT 1 FROM prunes WHERE seq >= ?1")?
                .exists([ledger::to_i64(last.seq)])?)
        };
        match chain {
            Some(chain) if ledger::parse_digest(&chain)? == last.chain => Ok(()),
            None if pruned()? => Ok(()),
            _ => Err(DbError::Message(format!(
                "row {} is missing: the ledger was changed; run `toolgate audit verify`",
                last.seq
            ))),
        }
    }
}

/// Runs all jobs. Each has a savepoint, so that a failed job does not roll back the others.
fn run_jobs(
    tx: &mut WriteTransaction<'_>,
    work: &mut [(Box<dyn WriteOperation>, Option<StoreError>)],
    sign: bool,
    with_rows: bool,
) -> DbResult<Option<HighWaterMark>> {
    let first_head = tx.head;
    // A single job needs no savepoint: the whole transaction is rolled back.
    let alone = work.len() == 1 && !sign;
    for (work, job_error) in work.iter_mut() {
        let (head_before, undo_before) = (tx.head, tx.undo_len());
        if !alone {
            tx.sql.prepare_cached("SAVEPOINT job")?.execute([])?;
        }
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work.run(tx)))
            .unwrap_or_else(|_| Err(DbError::Message("the store panicked".to_owned())));
        if let Err(fault) = ran {
            // Some errors end the whole transaction, so all jobs fail.
            if alone || tx.sql.is_autocommit() {
                return Err(fault);
            }
            tx.sql.prepare_cached("ROLLBACK TO job")?.execute([])?;
            tx.head = head_before;
            tx.undo_to(undo_before);
            // A definition of the failed job may be in the set.
            tx.stored_configs.clear();
            *job_error = Some(fault.into());
        }
        if !alone {
            tx.sql.prepare_cached("RELEASE job")?.execute([])?;
        }
    }
    if sign || (with_rows && tx.head != first_head) { try_sign_head(tx) } else { Ok(None) }
}

/// Marks claims of dead processes as pending, with a row each. Runs before any other write.
///
/// Returns the number of unsigned rows.
pub(crate) fn sweep_on_open(
    sql: &Connection,
    shared: &SharedStoreState,
    now: Timestamp,
) -> DbResult<u64> {
    sql.execute_batch("BEGIN IMMEDIATE")?;
    let swept = (|| -> DbResult<u64> {
        let mut configs = HashSet::new();
        let mut tx = WriteTransaction::new(sql, shared, ledger::read_head(sql)?, &mut configs);
        crate::tables::claim_settlement::sweep_abandoned(&mut tx, now)?;
        let signed: Option<i64> = sql
            .query_row("SELECT seq FROM checkpoints ORDER BY rowid DESC LIMIT 1", [], |row| {
                row.get(0)
            })
            .optional()?;
        Ok(tx.head.seq.saturating_sub(signed.map_or(0, ledger::to_u64)))
    })();
    sql.execute_batch(if swept.is_ok() { "COMMIT" } else { "ROLLBACK" })?;
    swept
}
