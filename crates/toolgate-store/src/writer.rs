//! One writes at a time. Whatever waits meanwhile goes into one transaction, and nobody hears "done" before that is written: on disk
//! where it must be, and then by a thread of its own, so that nobody else waits for the disk.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension};
use tokio::sync::oneshot;
use toolgate::json::Digest;
use toolgate::store::StoreError;
use toolgate::{CallId, Polling, SessionKey};

use crate::claims::Reserved;
use crate::fault::{Done, Fault};
use crate::home::{Home, Mark};
use crate::keys::Keys;
use crate::ledger::{self, Tip};
use crate::open;

/// Most that goes into one transaction.
const MOST: usize = 512;
/// How many rows, and how long, may go without a signature.
const ROWS: u64 = 1_000;
const TIME: Duration = Duration::from_secs(1);
/// How many bytes of log those who make one call may leave to the next.
const LOG: u64 = 256 << 10;

/// A transaction that is being written.
pub(crate) struct Tx<'c> {
    pub(crate) sql: &'c Connection,
    pub(crate) shared: &'c Shared,
    /// Where the ledger ends.
    pub(crate) tip: Tip,
    pub(crate) configs: &'c mut HashSet<Digest>,
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
}

/// A validated call, to be counted for its session's progress.
#[derive(Clone, Copy)]
pub(crate) struct Counted {
    pub(crate) digest: Digest,
    pub(crate) at: Timestamp,
    pub(crate) polling: Option<Polling>,
}

impl Shared {
    pub(crate) fn new(home: Home, id: String, keys: Keys) -> Arc<Self> {
        let (definitions, ahead, reads) = (Mutex::default(), Mutex::default(), Mutex::default());
        Arc::new(Self { home, keys: Mutex::new(Arc::new(keys)), id, definitions, ahead, reads })
    }

    pub(crate) fn keys(&self) -> Arc<Keys> {
        Arc::clone(&lock(&self.keys))
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something to write.
trait Work: Send {
    fn run(&mut self, tx: &mut Tx<'_>) -> Done<()>;
    fn end(self: Box<Self>, failed: Option<StoreError>);
}

struct Task<F, T> {
    f: Option<F>,
    result: Option<T>,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

impl<T: Send, F: FnOnce(&mut Tx<'_>) -> Done<T> + Send> Work for Task<F, T> {
    fn run(&mut self, tx: &mut Tx<'_>) -> Done<()> {
        let Some(f) = self.f.take() else { return Ok(()) };
        self.result = Some(f(tx)?);
        Ok(())
    }

    fn end(self: Box<Self>, failed: Option<StoreError>) {
        let result = match (failed, self.result) {
            (None, Some(result)) => Ok(result),
            (Some(error), _) => Err(error),
            (None, None) => Err(StoreError("the store did not get to it".to_owned())),
        };
        // Whoever has hung up does not want to know.
        let _ = self.reply.send(result);
    }
}

struct Job {
    durable: bool,
    work: Box<dyn Work>,
}

/// The way to whoever writes.
pub(crate) struct Writer {
    desk: Arc<Desk>,
    /// Where there is a thread for what takes long: syncs, signatures, and putting the log into the file.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Where writing is done, one at a time: by the thread, or by whoever asks while nobody else is at it.
struct Desk {
    /// Whether whoever asks writes everything at once, syncs and all.
    alone: bool,
    pen: Mutex<Pen>,
    tray: Mutex<Tray>,
    ring: Condvar,
    count: AtomicU64,
}

/// What waits to be written.
#[derive(Default)]
struct Tray {
    jobs: VecDeque<Job>,
    /// The thread is wanted.
    rung: bool,
    /// Nothing more comes.
    closed: bool,
}

impl Tray {
    /// Whether nothing waits, or the thread will see to it.
    fn is_settled(&self) -> bool {
        self.rung || self.jobs.is_empty()
    }
}

/// How many transactions one who asks writes for others before the thread goes on.
const TURNS: usize = 4;

impl Desk {
    fn new(alone: bool, sql: Connection, shared: Arc<Shared>, unsigned: u64) -> Self {
        let pen = Pen { alone, sql, shared, configs: HashSet::new(), unsigned, signed_at: Instant::now(), last: None, durable: None };
        Self { alone, pen: Mutex::new(pen), tray: Mutex::default(), ring: Condvar::new(), count: AtomicU64::new(0) }
    }

    /// The pen, unless somebody has it. Whoever had it looks into the tray afterwards.
    fn pen(&self) -> Option<MutexGuard<'_, Pen>> {
        match self.pen.try_lock() {
            Ok(pen) => Some(pen),
            Err(TryLockError::Poisoned(pen)) => Some(pen.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Leaves something to be written; false where nothing is taken any more.
    fn leave(&self, job: Job) -> bool {
        let mut tray = lock(&self.tray);
        if tray.closed {
            return false;
        }
        let ring = job.durable && !self.alone;
        tray.jobs.push_back(job);
        if ring {
            tray.rung = true;
            self.ring.notify_one();
        }
        true
    }

    fn call_thread(&self) {
        lock(&self.tray).rung = true;
        self.ring.notify_one();
    }

    /// What waits, as far as it goes into one transaction. Nothing, where somebody must wait for the disk and `may_wait` is
    /// false: then all of it is the thread's, which was rung for.
    fn take(&self, may_wait: bool) -> Vec<Job> {
        let mut tray = lock(&self.tray);
        if !may_wait && tray.jobs.iter().take(MOST).any(|job| job.durable) {
            return Vec::new();
        }
        let most = tray.jobs.len().min(MOST);
        tray.jobs.drain(..most).collect()
    }

    /// Writes what waits, unless somebody is at it: whoever that is looks again afterwards.
    fn write_here(&self) {
        for _ in 0..TURNS {
            let Some(mut pen) = self.pen() else { return };
            let jobs = self.take(self.alone);
            if !jobs.is_empty() {
                let quiet = pen.unsigned == 0;
                // Another process may be writing: the thread waits for it.
                if !self.alone && !pen.could_begin() {
                    let mut tray = lock(&self.tray);
                    jobs.into_iter().rev().for_each(|job| tray.jobs.push_front(job));
                    drop(tray);
                    return self.call_thread();
                }
                self.count.fetch_add(pen.write(jobs, self.alone), Ordering::Relaxed);
                // The thread signs, a while after the first row, or when there are many.
                if !self.alone && pen.unsigned > 0 && (quiet || pen.is_to_sign()) {
                    self.call_thread();
                }
            }
            drop(pen);
            if lock(&self.tray).is_settled() {
                return;
            }
        }
        self.call_thread();
    }

    /// The thread.
    fn keep(&self) {
        loop {
            let (until, begun) = (lock(&self.pen).signs_in(), Instant::now());
            let mut tray = lock(&self.tray);
            while !tray.rung && !tray.closed && tray.jobs.is_empty() {
                let left = until.map(|until| until.saturating_sub(begun.elapsed()));
                tray = match left {
                    Some(Duration::ZERO) => break,
                    Some(left) => self.ring.wait_timeout(tray, left).unwrap_or_else(PoisonError::into_inner).0,
                    None => self.ring.wait(tray).unwrap_or_else(PoisonError::into_inner),
                };
            }
            tray.rung = false;
            let closed = tray.closed;
            drop(tray);
            // What comes in while the disk is waited for goes into the next transaction.
            let mut pen = lock(&self.pen);
            let jobs = self.take(true);
            if !jobs.is_empty() || pen.is_to_sign() {
                self.count.fetch_add(pen.write(jobs, true), Ordering::Relaxed);
            } else if closed {
                return pen.sign();
            }
        }
    }
}

impl Writer {
    /// Starts the thread. What a process left unsigned that was killed, is signed by the next.
    pub(crate) fn start(sql: Connection, shared: Arc<Shared>, unsigned: u64) -> std::io::Result<Self> {
        let desk = Arc::new(Desk::new(false, sql, shared, unsigned));
        let kept = Arc::clone(&desk);
        let thread = std::thread::Builder::new().name("toolgate-store".to_owned()).spawn(move || kept.keep())?;
        Ok(Self { desk, thread: Mutex::new(Some(thread)) })
    }

    /// For a process that makes one call: nothing is started.
    pub(crate) fn here(sql: Connection, shared: Arc<Shared>) -> Self {
        Self { desk: Arc::new(Desk::new(true, sql, shared, 0)), thread: Mutex::default() }
    }

    /// Reads with the connection that writes, where there is but one.
    pub(crate) fn read<T, F: FnOnce(&Connection, &Shared) -> Done<T>>(&self, f: F) -> Result<Done<T>, F> {
        if self.desk.alone { self.glance(f) } else { Err(f) }
    }

    /// Reads a little with the connection that writes, which remembers what it wrote, unless somebody writes.
    pub(crate) fn glance<T, F: FnOnce(&Connection, &Shared) -> Done<T>>(&self, f: F) -> Result<Done<T>, F> {
        let Some(pen) = self.desk.pen() else { return Err(f) };
        let found = f(&pen.sql, &pen.shared);
        drop(pen);
        // Somebody may have come and found it busy.
        if !lock(&self.desk.tray).is_settled() {
            self.desk.write_here();
        }
        Ok(found)
    }

    pub(crate) fn is_here(&self) -> bool {
        self.desk.alone
    }

    /// How many transactions were written.
    pub(crate) fn count(&self) -> u64 {
        self.desk.count.load(Ordering::Relaxed)
    }

    /// Writes with what is written next, and waits for nothing.
    pub(crate) fn post(&self, f: impl FnOnce(&mut Tx<'_>) -> Done<()> + Send + 'static) {
        // Who makes one call stores what belongs to it with the call.
        if !self.desk.alone {
            let (reply, _) = oneshot::channel();
            self.desk.leave(Job { durable: false, work: Box::new(Task { f: Some(f), result: None, reply }) });
            self.desk.call_thread();
        }
    }

    /// Writes, and waits until it is written: to the disk where it is durable, else to the machine.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        durable: bool,
        f: impl FnOnce(&mut Tx<'_>) -> Done<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let gone = || StoreError("the thread that writes has ended".to_owned());
        let (reply, mut answer) = oneshot::channel();
        if !self.desk.leave(Job { durable, work: Box::new(Task { f: Some(f), result: None, reply }) }) {
            return Err(gone());
        }
        if self.desk.alone {
            self.desk.write_here();
        } else if !durable {
            // What needs no sync is written here, before another thread would have woken up. Whoever else is ready comes first: it
            // goes into the same transaction.
            tokio::task::yield_now().await;
            if let Ok(written) = answer.try_recv() {
                return written;
            }
            self.desk.write_here();
        }
        answer.await.map_err(|_| gone())?
    }
}

/// The last of it is written and signed before the store is gone.
impl Drop for Writer {
    fn drop(&mut self) {
        lock(&self.desk.tray).closed = true;
        self.desk.ring.notify_one();
        match lock(&self.thread).take() {
            Some(thread) => drop(thread.join()),
            None => {
                let mut pen = lock(&self.desk.pen);
                pen.sign();
                pen.shorten_log();
            }
        }
    }
}

/// The connection that writes, and what must be known to write.
struct Pen {
    /// Whether there is no thread.
    alone: bool,
    sql: Connection,
    shared: Arc<Shared>,
    /// Definitions that are stored.
    configs: HashSet<Digest>,
    /// Rows since the last signature of this process.
    unsigned: u64,
    signed_at: Instant,
    /// Where the ledger ended when this process last wrote.
    last: Option<Tip>,
    /// Whether the connection waits for the disk, as far as it was told.
    durable: Option<bool>,
}

/// Signs where the ledger stands. What cannot be signed is signed later: the rows are worth more.
fn signed_tip(tx: &mut Tx<'_>) -> Done<Option<Mark>> {
    tx.sql.prepare_cached("SAVEPOINT job")?.execute([])?;
    let signed = ledger::checkpoint(tx, Timestamp::now());
    if tx.sql.is_autocommit() {
        return signed.map(Some);
    }
    let mark = signed
        .map_err(|fault| {
            tracing::error!(%fault, "a checkpoint could not be signed");
            tx.sql.execute_batch("ROLLBACK TO job")
        })
        .ok();
    tx.sql.prepare_cached("RELEASE job")?.execute([])?;
    Ok(mark)
}

impl Pen {
    fn is_to_sign(&self) -> bool {
        self.unsigned > 0 && (self.unsigned >= ROWS || self.signed_at.elapsed() >= TIME)
    }

    /// After how long something is to be signed.
    fn signs_in(&self) -> Option<Duration> {
        (self.unsigned > 0).then(|| TIME.saturating_sub(self.signed_at.elapsed()))
    }

    /// Signs what is not signed yet.
    fn sign(&mut self) {
        if self.unsigned > 0 {
            self.signed_at = Instant::now().checked_sub(TIME).unwrap_or(self.signed_at);
            self.write(Vec::new(), true);
        }
    }

    /// One transaction. All of it is there afterwards, or none. Says how many were written, one or none.
    fn write(&mut self, jobs: Vec<Job>, may_sign: bool) -> u64 {
        let sign = may_sign && self.is_to_sign();
        let durable = sign || jobs.iter().any(|job| job.durable);
        let mut work: Vec<(Box<dyn Work>, Option<StoreError>)> = jobs.into_iter().map(|job| (job.work, None)).collect();
        let written = self.transaction(durable, sign, &mut work);
        let failed = match written {
            Ok((rows, signed)) => {
                self.unsigned = if signed { 0 } else { self.unsigned + rows };
                // What could not be signed is tried again after a while.
                if sign || self.unsigned == rows {
                    self.signed_at = Instant::now();
                }
                None
            }
            Err(fault) => {
                self.configs.clear();
                self.roll_back();
                if sign {
                    tracing::error!(%fault, "a checkpoint could not be written");
                    self.signed_at = Instant::now();
                }
                Some(StoreError::from(fault))
            }
        };
        let count = u64::from(failed.is_none());
        for (work, refused) in work {
            work.end(failed.clone().or(refused));
        }
        count
    }

    /// Begins to write what needs no sync, unless another process is at it.
    fn could_begin(&mut self) -> bool {
        let waits = self.sql.busy_timeout(Duration::ZERO);
        let began = waits.map_err(Fault::from).and_then(|()| self.begin(false));
        // What else is wrong shows when the thread tries.
        let waits = self.sql.busy_timeout(open::BUSY);
        if began.is_ok() && waits.is_err() {
            self.roll_back();
        }
        began.is_ok() && waits.is_ok()
    }

    /// Puts the log into the file when it has grown long, unless somebody is at work: whoever opens it next, with nobody else there,
    /// reads all of it, and does not know how much of it is in the file already.
    fn shorten_log(&self) {
        let long = |path: &str| std::fs::metadata(format!("{path}-wal")).is_ok_and(|log| log.len() > LOG);
        if self.sql.path().is_some_and(long)
            && let Err(error) =
                self.sql.busy_timeout(Duration::ZERO).and_then(|()| self.sql.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())))
        {
            tracing::error!(%error, "the log of the ledger could not be put into its file");
        }
    }

    fn roll_back(&self) {
        if !self.sql.is_autocommit()
            && let Err(error) = self.sql.execute_batch("ROLLBACK")
        {
            tracing::error!(%error, "a transaction could not be rolled back");
        }
    }

    fn begin(&mut self, durable: bool) -> Done<()> {
        if !self.sql.is_autocommit() {
            return Ok(());
        }
        if self.durable != Some(durable) {
            self.durable = None;
            // Putting the log into the file takes long: that is for whoever waits for the disk anyway.
            self.sql.execute_batch(match (durable, self.alone) {
                (true, false) => "PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 16000",
                (false, false) => "PRAGMA synchronous = NORMAL; PRAGMA wal_autocheckpoint = 0",
                (true, true) => "PRAGMA synchronous = FULL",
                (false, true) => "PRAGMA synchronous = NORMAL",
            })?;
            self.durable = Some(durable);
        }
        self.sql.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        Ok(())
    }

    /// Says how many rows came in, and whether they are signed.
    fn transaction(&mut self, durable: bool, sign: bool, work: &mut [(Box<dyn Work>, Option<StoreError>)]) -> Done<(u64, bool)> {
        self.begin(durable)?;
        let tip = ledger::tip(&self.sql)?;
        if self.last != Some(tip) {
            self.is_the_same_ledger()?;
        }
        let began = tip.seq;
        let mut tx = Tx { sql: &self.sql, shared: &self.shared, tip, configs: &mut self.configs };
        for (work, refused) in work.iter_mut() {
            let before = tx.tip;
            tx.sql.prepare_cached("SAVEPOINT job")?.execute([])?;
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work.run(&mut tx)))
                .unwrap_or_else(|_| Err(Fault::Said("the store panicked".to_owned())));
            if let Err(fault) = ran {
                // Some faults end the whole transaction, and everybody in it must know.
                if tx.sql.is_autocommit() {
                    return Err(fault);
                }
                tx.sql.prepare_cached("ROLLBACK TO job")?.execute([])?;
                tx.tip = before;
                // What was stored in between may not be.
                tx.configs.clear();
                *refused = Some(fault.into());
            }
            tx.sql.prepare_cached("RELEASE job")?.execute([])?;
        }
        let mark = if sign { signed_tip(&mut tx)? } else { None };
        let (rows, last) = (tx.tip.seq - began, tx.tip);
        self.sql.prepare_cached("COMMIT")?.execute([])?;
        self.last = Some(last);
        if let Some(mark) = &mark {
            self.set_mark(mark);
        }
        Ok((rows, mark.is_some()))
    }

    /// Whether the last row that this process knew is still there, or was pruned. Somebody may have cut it off since.
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
                "row {} is not there any more: somebody has changed the ledger; run `toolgate audit verify`",
                last.seq
            ))),
        }
    }

    fn set_mark(&self, mark: &Mark) {
        if let Err(error) = self.shared.home.set_mark(mark) {
            tracing::error!(%error, "the mark beside the ledger could not be moved");
        }
    }
}

/// Before anything else is written: what died with its process is pending, and the ledger says so. Says how many rows are
/// not signed yet.
pub(crate) fn sweep(sql: &Connection, shared: &Shared, now: Timestamp) -> Done<u64> {
    sql.execute_batch("BEGIN IMMEDIATE")?;
    let swept = (|| -> Done<u64> {
        let mut configs = HashSet::new();
        let mut tx = Tx { sql, shared, tip: ledger::tip(sql)?, configs: &mut configs };
        crate::claims::sweep(&mut tx, now)?;
        let signed: Option<i64> = sql.query_row("SELECT max(seq) FROM checkpoints", [], |row| row.get(0))?;
        Ok(tx.tip.seq.saturating_sub(signed.map_or(0, ledger::unsigned)))
    })();
    sql.execute_batch(if swept.is_ok() { "COMMIT" } else { "ROLLBACK" })?;
    swept
}
