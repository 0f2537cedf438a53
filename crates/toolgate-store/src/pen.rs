//! Writes jobs to the database, one transaction at a time, and signs checkpoints of the ledger.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension};
use toolgate::json::Digest;
use toolgate::store::StoreError;

use crate::fault::{Done, Fault};
use crate::home::Mark;
use crate::ledger::{self, Tip};
use crate::open;
use crate::tx::{Shared, Tx};
use crate::writer::{Job, Work};

/// How many rows may be unsigned, and for how long.
const ROWS: u64 = 1_000;
const TIME: Duration = Duration::from_secs(1);
/// How many transactions without a sync trigger a WAL checkpoint.
const LOOSE: u64 = 4_000;
/// How many synced transactions trigger a WAL checkpoint.
///
/// Syncing a WAL that is overwritten takes half the time of one that grows.
const SYNCED: u64 = 128;
/// How many bytes of WAL a process that makes one call may leave behind.
const LOG: u64 = 256 << 10;

/// When a transaction signs a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signs {
    Never,
    /// When many rows are unsigned, or the last signature is too old.
    WhenDue,
    /// With every durable row, because the process exits before it could sign later.
    WithRows,
}

/// Result of a transaction.
pub(crate) struct Written {
    pub(crate) done: bool,
    /// The new high-water mark, if the transaction signed a checkpoint.
    pub(crate) mark: Option<Mark>,
}

/// The write connection with its state.
pub(crate) struct Pen {
    pub(crate) sql: Connection,
    pub(crate) shared: Arc<Shared>,
    /// Digests of agent definitions that are stored already.
    configs: HashSet<Digest>,
    /// Rows since the last signature of this process.
    pub(crate) unsigned: u64,
    signed_at: Instant,
    /// Ledger head after the last write of this process.
    last: Option<Tip>,
    /// Pragmas that are set: whether commits sync, and whether SQLite checkpoints the WAL.
    ways: Option<(bool, bool)>,
    /// Whether a transaction is open for the next write.
    begun: bool,
    /// Transactions since the last WAL checkpoint, and how many of them were synced.
    loose: u64,
    synced: u64,
}

/// Signs a checkpoint in the transaction. If signing fails, the rows are committed unsigned.
fn signed_tip(tx: &mut Tx<'_>) -> Done<Option<Mark>> {
    tx.sql.prepare_cached("SAVEPOINT job")?.execute([])?;
    let signed = ledger::checkpoint(tx, Timestamp::now());
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

impl Pen {
    pub(crate) fn new(sql: Connection, shared: Arc<Shared>, unsigned: u64) -> Self {
        Self {
            sql,
            shared,
            configs: HashSet::new(),
            unsigned,
            signed_at: Instant::now(),
            last: None,
            ways: None,
            begun: false,
            loose: 0,
            synced: 0,
        }
    }

    pub(crate) fn is_to_sign(&self) -> bool {
        self.unsigned > 0 && (self.unsigned >= ROWS || self.signed_at.elapsed() >= TIME)
    }

    /// Returns how long to wait until the next checkpoint is due, if rows are unsigned.
    pub(crate) fn signs_in(&self) -> Option<Duration> {
        (self.unsigned > 0).then(|| TIME.saturating_sub(self.signed_at.elapsed()))
    }

    /// Signs all unsigned rows now.
    pub(crate) fn sign(&mut self) {
        if self.unsigned > 0 {
            self.signed_at = Instant::now().checked_sub(TIME).unwrap_or(self.signed_at);
            let written = self.write(Vec::new(), Signs::WhenDue);
            self.shared.set_mark(written.mark);
        }
    }

    /// Writes jobs in one transaction and completes them.
    pub(crate) fn write(&mut self, jobs: Vec<Job>, signs: Signs) -> Written {
        let sign = signs != Signs::Never && self.is_to_sign();
        let durable = sign || jobs.iter().any(|job| job.durable);
        let mut work: Vec<(Box<dyn Work>, Option<StoreError>)> = jobs.into_iter().map(|job| (job.work, None)).collect();
        let with_rows = durable && signs == Signs::WithRows;
        let written = self.transaction(durable, sign, with_rows, &mut work);
        let mut done = Written { done: written.is_ok(), mark: None };
        let failed = match written {
            Ok((rows, mark)) => {
                self.unsigned = if mark.is_some() { 0 } else { self.unsigned + rows };
                done.mark = mark;
                // If signing failed, the next attempt is one interval later.
                if sign || self.unsigned == rows {
                    self.signed_at = Instant::now();
                }
                None
            }
            Err(fault) => {
                self.configs.clear();
                self.roll_back();
                if sign {
                    tracing::error!(%fault, "cannot write a checkpoint");
                    self.signed_at = Instant::now();
                }
                Some(StoreError::from(fault))
            }
        };
        for (work, refused) in work {
            work.end(failed.clone().or(refused));
        }
        done
    }

    /// Begins a transaction, unless another process is writing. Does not wait.
    pub(crate) fn could_begin(&mut self, durable: bool) -> bool {
        let waits = self.sql.busy_timeout(Duration::ZERO);
        let began = waits.map_err(Fault::from).and_then(|()| self.begin(durable, false));
        // Another error shows again when the writer thread tries.
        let waits = self.sql.busy_timeout(open::BUSY);
        if began.is_ok() && waits.is_err() {
            self.roll_back();
        }
        self.begun = began.is_ok() && waits.is_ok();
        self.begun
    }

    /// Checkpoints and truncates a long WAL, unless another process uses the database.
    ///
    /// The next process that opens the database alone reads the whole WAL.
    pub(crate) fn shorten_log(&self) {
        let long = |path: &str| std::fs::metadata(format!("{path}-wal")).is_ok_and(|log| log.len() > LOG);
        if self.sql.path().is_some_and(long)
            && let Err(error) =
                self.sql.busy_timeout(Duration::ZERO).and_then(|()| self.sql.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())))
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
    fn begin(&mut self, durable: bool, has_time: bool) -> Done<()> {
        if std::mem::take(&mut self.begun) {
            return Ok(());
        }
        // Do not continue a transaction that an earlier job left open.
        self.roll_back();
        if self.ways != Some((durable, has_time)) {
            self.ways = None;
            self.sql.execute_batch(match (durable, has_time) {
                (true, true) => "PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 16000",
                (true, false) => "PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 0",
                (false, _) => "PRAGMA synchronous = NORMAL; PRAGMA wal_autocheckpoint = 0",
            })?;
            self.ways = Some((durable, has_time));
        }
        self.sql.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        Ok(())
    }

    /// Runs one transaction. Returns the number of new rows and the new high-water mark, if any.
    fn transaction(
        &mut self,
        durable: bool,
        sign: bool,
        with_rows: bool,
        work: &mut [(Box<dyn Work>, Option<StoreError>)],
    ) -> Done<(u64, Option<Mark>)> {
        let has_time = durable && !self.begun;
        self.begin(durable, has_time)?;
        let tip = ledger::tip(&self.sql)?;
        if self.last != Some(tip) {
            self.is_the_same_ledger()?;
        }
        let mut tx = Tx::new(&self.sql, &self.shared, tip, &mut self.configs);
        let mut written = write_all(&mut tx, work, sign, with_rows);
        if written.is_ok()
            && let Err(error) = tx.sql.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]))
        {
            written = Err(error.into());
        }
        if written.is_err() {
            tx.unwind(0);
        }
        let last = tx.tip;
        let mark = written?;
        self.last = Some(last);
        self.loose = if has_time { 0 } else { self.loose + 1 };
        self.synced += u64::from(durable);
        Ok((last.seq - tip.seq, mark))
    }

    /// Returns true if the ledger ends where this process left it.
    pub(crate) fn ends_at(&self, tip: Tip) -> bool {
        self.last == Some(tip)
    }

    /// Returns true if a WAL checkpoint is due.
    pub(crate) fn is_loose(&self) -> bool {
        self.loose >= LOOSE || self.synced >= SYNCED
    }

    /// Checkpoints the WAL, as far as no reader needs it.
    pub(crate) fn tie(&mut self) {
        (self.loose, self.synced) = (0, 0);
        if let Err(error) = self.sql.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())) {
            tracing::error!(%error, "cannot checkpoint the WAL of the ledger");
        }
    }

    /// Checks that the last row of this process is still in the ledger, or was pruned.
    fn is_the_same_ledger(&self) -> Done<()> {
        let Some(last) = self.last.filter(|last| last.seq > 0) else { return Ok(()) };
        let there: Option<Vec<u8>> = self
            .sql
            .prepare_cached("SELECT chain FROM ledger WHERE seq = ?1")?
            .query_row([ledger::signed(last.seq)], |row| row.get(0))
            .optional()?;
        let pruned =
            || -> Done<bool> { Ok(self.sql.prepare_cached("SELECT 1 FROM prunes WHERE seq >= ?1")?.exists([ledger::signed(last.seq)])?) };
        match there {
            Some(chain) if ledger::digest(&chain)? == last.chain => Ok(()),
            None if pruned()? => Ok(()),
            _ => Err(Fault::Said(format!(
                "row {} is missing: the ledger was changed; run `toolgate audit verify`",
                last.seq
            ))),
        }
    }
}

/// Runs all jobs. Each has a savepoint, so that a failed job does not roll back the others.
fn write_all(tx: &mut Tx<'_>, work: &mut [(Box<dyn Work>, Option<StoreError>)], sign: bool, with_rows: bool) -> Done<Option<Mark>> {
    let began = tx.tip;
    // A single job needs no savepoint: the whole transaction is rolled back.
    let alone = work.len() == 1 && !sign;
    for (work, refused) in work.iter_mut() {
        let (before, done) = (tx.tip, tx.done());
        if !alone {
            tx.sql.prepare_cached("SAVEPOINT job")?.execute([])?;
        }
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work.run(tx)))
            .unwrap_or_else(|_| Err(Fault::Said("the store panicked".to_owned())));
        if let Err(fault) = ran {
            // Some errors end the whole transaction, so all jobs fail.
            if alone || tx.sql.is_autocommit() {
                return Err(fault);
            }
            tx.sql.prepare_cached("ROLLBACK TO job")?.execute([])?;
            tx.tip = before;
            tx.unwind(done);
            // A definition of the failed job may be in the set.
            tx.configs.clear();
            *refused = Some(fault.into());
        }
        if !alone {
            tx.sql.prepare_cached("RELEASE job")?.execute([])?;
        }
    }
    if sign || (with_rows && tx.tip != began) { signed_tip(tx) } else { Ok(None) }
}

/// Marks claims of dead processes as pending, with a row each. Runs before any other write.
///
/// Returns the number of unsigned rows.
pub(crate) fn sweep(sql: &Connection, shared: &Shared, now: Timestamp) -> Done<u64> {
    sql.execute_batch("BEGIN IMMEDIATE")?;
    let swept = (|| -> Done<u64> {
        let mut configs = HashSet::new();
        let mut tx = Tx::new(sql, shared, ledger::tip(sql)?, &mut configs);
        crate::claims::sweep(&mut tx, now)?;
        let signed: Option<i64> =
            sql.query_row("SELECT seq FROM checkpoints ORDER BY rowid DESC LIMIT 1", [], |row| row.get(0)).optional()?;
        Ok(tx.tip.seq.saturating_sub(signed.map_or(0, ledger::unsigned)))
    })();
    sql.execute_batch(if swept.is_ok() { "COMMIT" } else { "ROLLBACK" })?;
    swept
}
