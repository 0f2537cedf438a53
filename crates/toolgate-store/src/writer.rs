//! One thread writes. Whatever waits for it goes into one transaction, and nobody hears "done" before that is on disk.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension};
use tokio::sync::oneshot;
use toolgate::json::Digest;
use toolgate::store::StoreError;

use crate::fault::{Done, Fault};
use crate::home::{Home, Mark};
use crate::keys::Keys;
use crate::ledger::{self, Tip};

/// Most that goes into one transaction.
const MOST: usize = 512;
/// How many rows, and how long, may go without a signature.
const ROWS: u64 = 1_000;
const TIME: Duration = Duration::from_secs(1);

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
}

impl Shared {
    pub(crate) fn keys(&self) -> Arc<Keys> {
        Arc::clone(&lock(&self.keys))
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
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
    way: Way,
    /// How many transactions were written.
    pub(crate) count: Arc<AtomicU64>,
}

enum Way {
    /// A thread of its own: what comes in meanwhile goes into one transaction.
    Thread(Mutex<Option<Sender<Job>>>, Mutex<Option<JoinHandle<()>>>),
    /// Whoever asks writes, at once.
    Here(Box<Mutex<Thread>>),
}

impl Writer {
    /// Starts the thread. What a process left unsigned that was killed, is signed by the next.
    pub(crate) fn start(sql: Connection, shared: Arc<Shared>, unsigned: u64) -> std::io::Result<Self> {
        let (jobs, todo) = channel();
        let count = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&count);
        let thread = std::thread::Builder::new().name("toolgate-store".to_owned()).spawn(move || {
            Thread { sql, shared, configs: HashSet::new(), unsigned, signed_at: Instant::now(), last: None, count: counted }.work(&todo);
        })?;
        Ok(Self { way: Way::Thread(Mutex::new(Some(jobs)), Mutex::new(Some(thread))), count })
    }

    /// For a process that makes one call: nothing is started.
    pub(crate) fn here(sql: Connection, shared: Arc<Shared>) -> Self {
        let count = Arc::new(AtomicU64::new(0));
        let thread =
            Thread { sql, shared, configs: HashSet::new(), unsigned: 0, signed_at: Instant::now(), last: None, count: Arc::clone(&count) };
        Self { way: Way::Here(Box::new(Mutex::new(thread))), count }
    }

    /// Reads with the connection that writes, where there is but one.
    pub(crate) fn read<T, F: FnOnce(&Connection, &Shared) -> Done<T>>(&self, f: F) -> Result<Done<T>, F> {
        match &self.way {
            Way::Here(thread) => {
                let thread = lock(thread);
                Ok(f(&thread.sql, &thread.shared))
            }
            Way::Thread(..) => Err(f),
        }
    }

    pub(crate) fn is_here(&self) -> bool {
        matches!(self.way, Way::Here(_))
    }

    /// Writes when its turn comes, and waits for nothing. What was sent later is written later.
    pub(crate) fn post(&self, f: impl FnOnce(&mut Tx<'_>) -> Done<()> + Send + 'static) {
        let (reply, _) = oneshot::channel();
        // Who makes one call stores what belongs to it with the call.
        if let Way::Thread(jobs, _) = &self.way
            && let Some(jobs) = &*lock(jobs)
        {
            let _ = jobs.send(Job { durable: false, work: Box::new(Task { f: Some(f), result: None, reply }) });
        }
    }

    /// Writes, and waits until it is written: to the disk where it is durable, else to the machine.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        durable: bool,
        f: impl FnOnce(&mut Tx<'_>) -> Done<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let gone = || StoreError("the thread that writes has ended".to_owned());
        let (reply, answer) = oneshot::channel();
        let job = Job { durable, work: Box::new(Task { f: Some(f), result: None, reply }) };
        let sent = match &self.way {
            Way::Thread(jobs, _) => lock(jobs).as_ref().is_some_and(|jobs| jobs.send(job).is_ok()),
            Way::Here(thread) => {
                lock(thread).write(vec![job]);
                true
            }
        };
        if !sent {
            return Err(gone());
        }
        answer.await.map_err(|_| gone())?
    }
}

/// The last of it is written and signed before the store is gone.
impl Drop for Writer {
    fn drop(&mut self) {
        match &self.way {
            Way::Thread(jobs, thread) => {
                *lock(jobs) = None;
                if let Some(thread) = lock(thread).take() {
                    let _ = thread.join();
                }
            }
            Way::Here(thread) => lock(thread).sign(),
        }
    }
}

struct Thread {
    sql: Connection,
    shared: Arc<Shared>,
    /// Definitions that are stored.
    configs: HashSet<Digest>,
    /// Rows since the last signature of this process.
    unsigned: u64,
    signed_at: Instant,
    /// Where the ledger ended when this thread last wrote.
    last: Option<Tip>,
    count: Arc<AtomicU64>,
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

impl Thread {
    fn work(mut self, todo: &Receiver<Job>) {
        loop {
            let next = if self.unsigned == 0 {
                todo.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                todo.recv_timeout(TIME.saturating_sub(self.signed_at.elapsed()))
            };
            match next {
                Ok(first) => {
                    let mut jobs = vec![first];
                    jobs.extend(todo.try_iter().take(MOST - 1));
                    self.write(jobs);
                }
                Err(RecvTimeoutError::Timeout) => self.write(Vec::new()),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.sign();
    }

    /// Signs what is not signed yet.
    fn sign(&mut self) {
        if self.unsigned > 0 {
            self.signed_at = Instant::now().checked_sub(TIME).unwrap_or(self.signed_at);
            self.write(Vec::new());
        }
    }

    /// One transaction. All of it is there afterwards, or none.
    fn write(&mut self, jobs: Vec<Job>) {
        let sign = self.unsigned > 0 && (self.unsigned >= ROWS || self.signed_at.elapsed() >= TIME);
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
                if !self.sql.is_autocommit()
                    && let Err(error) = self.sql.execute_batch("ROLLBACK")
                {
                    tracing::error!(%error, "a transaction could not be rolled back");
                }
                if sign {
                    tracing::error!(%fault, "a checkpoint could not be written");
                    self.signed_at = Instant::now();
                }
                Some(StoreError::from(fault))
            }
        };
        for (work, refused) in work {
            work.end(failed.clone().or(refused));
        }
    }

    /// Says how many rows came in, and whether they are signed.
    fn transaction(&mut self, durable: bool, sign: bool, work: &mut [(Box<dyn Work>, Option<StoreError>)]) -> Done<(u64, bool)> {
        self.sql.execute_batch(if durable {
            "PRAGMA synchronous = FULL; BEGIN IMMEDIATE"
        } else {
            "PRAGMA synchronous = NORMAL; BEGIN IMMEDIATE"
        })?;
        let tip = ledger::tip(&self.sql)?;
        self.is_the_same_ledger()?;
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
        self.sql.execute_batch("COMMIT")?;
        self.last = Some(last);
        self.count.fetch_add(1, Ordering::Relaxed);
        if let Some(mark) = &mark {
            self.set_mark(mark);
        }
        Ok((rows, mark.is_some()))
    }

    /// Whether the last row that this thread knew is still there, or was pruned. Somebody may have cut it off since.
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
