//! Implements group commit: one thread at a time writes, and queued jobs share a transaction.
//!
//! A job is acknowledged after its transaction is committed, and on disk if the job is durable. If
//! several calls are running, a separate thread waits for the disk, so that the others do not.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::oneshot;
use toolgate::store::StoreError;

use crate::error::DbResult;
use crate::tables::ledger::LedgerHead;
use crate::transaction::{SharedStoreState, WriteTransaction, lock_unpoisoned, read_transaction};
use crate::write_connection::{SignPolicy, WriteConnection};

/// Most jobs in one transaction of the writer thread, and of a caller that writes inline.
const MAX_JOBS_PER_TRANSACTION: usize = 512;
const MAX_JOBS_PER_INLINE_TRANSACTION: usize = 64;

/// Something to write.
pub(crate) trait WriteOperation: Send {
    fn run(&mut self, tx: &mut WriteTransaction<'_>) -> DbResult<()>;
    fn complete(self: Box<Self>, failed: Option<StoreError>);
}

struct WriteTask<F, T> {
    f: Option<F>,
    result: Option<T>,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

impl<T: Send, F: FnOnce(&mut WriteTransaction<'_>) -> DbResult<T> + Send> WriteOperation
    for WriteTask<F, T>
{
    fn run(&mut self, tx: &mut WriteTransaction<'_>) -> DbResult<()> {
        let Some(f) = self.f.take() else { return Ok(()) };
        self.result = Some(f(tx)?);
        Ok(())
    }

    fn complete(self: Box<Self>, failed: Option<StoreError>) {
        let result = match (failed, self.result) {
            (None, Some(result)) => Ok(result),
            (Some(error), _) => Err(error),
            (None, None) => {
                Err(StoreError::unavailable("the store was closed before the write".to_owned()))
            }
        };
        // The caller may have been cancelled.
        let _ = self.reply.send(result);
    }
}

pub(crate) struct WriteJob {
    pub(crate) is_durable: bool,
    pub(crate) task: Box<dyn WriteOperation>,
}

/// Handle to the write queue.
pub(crate) struct LedgerWriter {
    queue: Arc<WriteQueue>,
    /// The thread for slow work, if any: syncs, signatures and WAL checkpoints.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Write queue. The writer thread or a caller empties the queue, one at a time.
struct WriteQueue {
    /// Whether there is no writer thread, so that callers write everything inline.
    is_inline: bool,
    connection: Mutex<WriteConnection>,
    pending: Mutex<PendingJobs>,
    wakeup: Condvar,
    transaction_count: AtomicU64,
    /// Set by a caller that found the connection busy, so that the writer checks the queue again.
    has_missed: AtomicBool,
    shared: Arc<SharedStoreState>,
}

/// Jobs that wait for the next transaction.
#[derive(Default)]
struct PendingJobs {
    jobs: VecDeque<WriteJob>,
    /// Whether the writer thread was called.
    is_thread_called: bool,
    /// Whether the queue accepts no more jobs.
    is_closed: bool,
}

impl PendingJobs {
    /// Returns true if the queue is empty, or the writer thread will empty it.
    fn is_handled(&self) -> bool {
        self.is_thread_called || self.jobs.is_empty()
    }
}

/// How many transactions a caller writes for others before the writer thread takes over.
const MAX_INLINE_TRANSACTIONS: usize = 4;

impl WriteQueue {
    fn new(alone: bool, sql: Connection, shared: Arc<SharedStoreState>, unsigned: u64) -> Self {
        let pen = Mutex::new(WriteConnection::new(sql, Arc::clone(&shared), unsigned));
        Self {
            is_inline: alone,
            connection: pen,
            pending: Mutex::default(),
            wakeup: Condvar::new(),
            transaction_count: AtomicU64::new(0),
            has_missed: AtomicBool::new(false),
            shared,
        }
    }

    /// Returns the write connection, unless it is in use.
    fn try_connection(&self) -> Option<MutexGuard<'_, WriteConnection>> {
        match self.connection.try_lock() {
            Ok(pen) => Some(pen),
            Err(TryLockError::Poisoned(pen)) => Some(pen.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Adds a job, and calls the writer thread if `ring` is true. Returns false if closed.
    fn enqueue(&self, job: WriteJob, ring: bool) -> bool {
        let mut tray = lock_unpoisoned(&self.pending);
        if tray.is_closed {
            return false;
        }
        tray.jobs.push_back(job);
        if ring {
            tray.is_thread_called = true;
            self.wakeup.notify_one();
        }
        true
    }

    /// Returns true if a caller found the connection busy and its job is still in the queue.
    ///
    /// Checked after the connection is released: a caller sets `missed` before it tries to lock.
    fn has_missed_jobs(&self) -> bool {
        fence(Ordering::SeqCst);
        self.has_missed.load(Ordering::Relaxed) && !lock_unpoisoned(&self.pending).is_handled()
    }

    fn wake_thread(&self) {
        if !self.is_inline {
            lock_unpoisoned(&self.pending).is_thread_called = true;
            self.wakeup.notify_one();
        }
    }

    /// Takes the jobs for the next transaction. The flag says whether more jobs are left.
    ///
    /// If a job is durable and `may_wait` is false, no job is taken: the writer thread or another
    /// caller writes them.
    fn take_batch(&self, may_wait: bool) -> (Vec<WriteJob>, bool) {
        let mut tray = lock_unpoisoned(&self.pending);
        let most = tray.jobs.len().min(if may_wait {
            MAX_JOBS_PER_TRANSACTION
        } else {
            MAX_JOBS_PER_INLINE_TRANSACTION
        });
        if !may_wait && tray.jobs.iter().take(most).any(|job| job.is_durable) {
            return (Vec::new(), false);
        }
        let jobs = tray.jobs.drain(..most).collect();
        (jobs, !tray.jobs.is_empty())
    }

    /// Writes the queued jobs on the thread of the caller, unless another thread is writing.
    ///
    /// The other thread checks the queue again afterwards. Durable jobs are written here only if
    /// `may_wait` is true.
    fn write_inline(&self, may_wait: bool) {
        for turn in 0.. {
            // Without a writer thread, the caller continues until the queue is empty.
            if turn == MAX_INLINE_TRANSACTIONS && !self.is_inline {
                break;
            }
            self.has_missed.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let Some(mut pen) = self.try_connection() else {
                // The other thread may be unable to wait for the disk.
                return if may_wait && !self.is_inline {
                    self.wake_thread()
                };
            };
            self.has_missed.store(false, Ordering::Relaxed);
            let (jobs, more) = self.take_batch(may_wait);
            if !jobs.is_empty() {
                let quiet = pen.unsigned_rows == 0;
                // If another process is writing, the writer thread waits for it.
                let durable = jobs.iter().any(|job| job.is_durable);
                if !self.is_inline && !pen.try_begin(durable) {
                    let mut tray = lock_unpoisoned(&self.pending);
                    jobs.into_iter().rev().for_each(|job| tray.jobs.push_front(job));
                    drop(tray);
                    return self.wake_thread();
                }
                let written = pen.write(
                    jobs,
                    if self.is_inline { SignPolicy::WithRows } else { SignPolicy::Never },
                );
                self.transaction_count
                    .fetch_add(u64::from(written.is_committed), Ordering::Relaxed);
                pen.shared.advance_mark(written.mark);
                // The writer thread signs, some time after the first unsigned row or when due.
                if (pen.unsigned_rows > 0 && (quiet || pen.is_signature_due()))
                    || pen.needs_wal_checkpoint()
                {
                    self.wake_thread();
                }
            }
            drop(pen);
            // Other callers write their jobs themselves, unless they found the connection busy or
            // the transaction was full.
            if !more && !self.has_missed_jobs() {
                return;
            }
        }
        self.wake_thread();
    }

    /// Runs the writer thread.
    fn run_thread(&self) {
        loop {
            let (until, begun) =
                (lock_unpoisoned(&self.connection).time_until_signature(), Instant::now());
            let mut tray = lock_unpoisoned(&self.pending);
            while !tray.is_thread_called && !tray.is_closed && tray.jobs.is_empty() {
                let left = until.map(|until| until.saturating_sub(begun.elapsed()));
                tray = match left {
                    Some(Duration::ZERO) => break,
                    Some(left) => {
                        self.wakeup
                            .wait_timeout(tray, left)
                            .unwrap_or_else(PoisonError::into_inner)
                            .0
                    }
                    None => self.wakeup.wait(tray).unwrap_or_else(PoisonError::into_inner),
                };
            }
            tray.is_thread_called = false;
            let closed = tray.is_closed;
            drop(tray);
            // Jobs that arrive during the sync go into the next transaction.
            let mut pen = lock_unpoisoned(&self.connection);
            let (jobs, _) = self.take_batch(true);
            if !jobs.is_empty() || (!closed && pen.is_signature_due()) {
                let written = pen.write(jobs, SignPolicy::WhenDue);
                let shared = Arc::clone(&pen.shared);
                // Release the connection before writing the high-water mark, so others can write.
                drop(pen);
                self.transaction_count
                    .fetch_add(u64::from(written.is_committed), Ordering::Relaxed);
                self.write_inline(false);
                shared.advance_mark(written.mark);
            } else if pen.needs_wal_checkpoint() {
                pen.checkpoint_wal();
            } else if closed {
                return pen.sign_now();
            }
        }
    }
}

impl LedgerWriter {
    /// Starts the writer thread, which also signs the `unsigned` rows of a process that was killed.
    pub(crate) fn start(
        sql: Connection,
        shared: Arc<SharedStoreState>,
        unsigned: u64,
    ) -> std::io::Result<Self> {
        let desk = Arc::new(WriteQueue::new(false, sql, shared, unsigned));
        let kept = Arc::clone(&desk);
        let thread =
            std::thread::Builder::new().name("toolgate-store".to_owned()).spawn(move || {
                let _ended = CloseQueueOnDrop(&kept);
                kept.run_thread();
            })?;
        Ok(Self { queue: desk, thread: Mutex::new(Some(thread)) })
    }

    /// Creates a writer without a thread, for a process that makes one call.
    pub(crate) fn inline(sql: Connection, shared: Arc<SharedStoreState>) -> Self {
        Self { queue: Arc::new(WriteQueue::new(true, sql, shared, 0)), thread: Mutex::default() }
    }

    /// Reads with the write connection, if there is no writer thread.
    pub(crate) fn read_if_inline<T, F: FnOnce(&Connection, &SharedStoreState) -> DbResult<T>>(
        &self,
        f: F,
    ) -> Result<DbResult<T>, F> {
        if self.queue.is_inline { self.try_read(f) } else { Err(f) }
    }

    /// Reads a little with the write connection, whose page cache has recent writes.
    ///
    /// Returns `f` if the connection is busy.
    pub(crate) fn try_read<T, F: FnOnce(&Connection, &SharedStoreState) -> DbResult<T>>(
        &self,
        f: F,
    ) -> Result<DbResult<T>, F> {
        // A caller may find the connection busy meanwhile.
        let _free = WriteMissedJobsOnDrop(&self.queue);
        let Some(pen) = self.queue.try_connection().filter(|pen| pen.sql.is_autocommit()) else {
            return Err(f);
        };
        Ok(f(&pen.sql, &pen.shared))
    }

    /// Reads in one transaction, without a write.
    ///
    /// Returns `None` if the connection is busy or another process has appended rows. The caller
    /// then uses a write transaction.
    pub(crate) fn try_read_consistent<T>(
        &self,
        f: impl FnOnce(&Connection, &SharedStoreState, LedgerHead) -> DbResult<Option<T>>,
    ) -> DbResult<Option<T>> {
        let _free = WriteMissedJobsOnDrop(&self.queue);
        let Some(pen) = self.queue.try_connection().filter(|pen| pen.sql.is_autocommit()) else {
            return Ok(None);
        };
        read_transaction(&pen.sql, |sql| match crate::tables::ledger::read_head(sql)? {
            tip if pen.is_head(tip) => f(sql, &pen.shared, tip),
            // Another process has written meanwhile.
            _ => Ok(None),
        })
    }

    pub(crate) fn is_inline(&self) -> bool {
        self.queue.is_inline
    }

    /// Returns the number of committed transactions.
    pub(crate) fn transaction_count(&self) -> u64 {
        self.queue.transaction_count.load(Ordering::Relaxed)
    }

    /// Queues a job for the next transaction without waiting.
    pub(crate) fn enqueue(
        &self,
        f: impl FnOnce(&mut WriteTransaction<'_>) -> DbResult<()> + Send + 'static,
    ) {
        // A process that makes one call stores its definition with the call.
        if !self.queue.is_inline {
            let (reply, _) = oneshot::channel();
            self.queue.enqueue(
                WriteJob {
                    is_durable: false,
                    task: Box::new(WriteTask { f: Some(f), result: None, reply }),
                },
                false,
            );
            self.queue.wake_thread();
        }
    }

    /// Writes a job and waits for the commit. A durable job also waits for the disk.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        durable: bool,
        f: impl FnOnce(&mut WriteTransaction<'_>) -> DbResult<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let gone = || StoreError::unavailable("the writer thread has ended".to_owned());
        let (reply, mut answer) = oneshot::channel();
        // If other calls are running, the writer thread waits for the disk, so that they do not.
        let others = self.queue.shared.running_calls.load(Ordering::Relaxed) > 1;
        let thread = durable && others && !self.queue.is_inline;
        if !self.queue.enqueue(
            WriteJob {
                is_durable: durable,
                task: Box::new(WriteTask { f: Some(f), result: None, reply }),
            },
            thread,
        ) {
            return Err(gone());
        }
        if !thread {
            // Writing inline is faster than waking another thread. Other tasks that are ready run
            // first, so that their jobs share the transaction.
            let left = DrainQueueOnDrop(&self.queue, self.queue.is_inline || durable);
            if others && !self.queue.is_inline {
                tokio::task::yield_now().await;
            }
            drop(left);
            match answer.try_recv() {
                Ok(written) => return written,
                Err(oneshot::error::TryRecvError::Closed) => return Err(gone()),
                Err(oneshot::error::TryRecvError::Empty) => {}
            }
        }
        answer.await.map_err(|_| gone())?
    }
}

/// Writes the queued jobs on drop, so that a cancelled caller leaves no job behind.
struct DrainQueueOnDrop<'d>(&'d WriteQueue, bool);

impl Drop for DrainQueueOnDrop<'_> {
    fn drop(&mut self) {
        if !lock_unpoisoned(&self.0.pending).is_handled() {
            self.0.write_inline(self.1);
        }
    }
}

/// Writes, on drop, the jobs of callers that found the connection busy.
struct WriteMissedJobsOnDrop<'d>(&'d WriteQueue);

impl Drop for WriteMissedJobsOnDrop<'_> {
    fn drop(&mut self) {
        if self.0.has_missed_jobs() {
            self.0.write_inline(self.0.is_inline);
        }
    }
}

/// Closes the queue when the writer thread ends, so that no caller waits for it.
struct CloseQueueOnDrop<'d>(&'d WriteQueue);

impl Drop for CloseQueueOnDrop<'_> {
    fn drop(&mut self) {
        let mut tray = lock_unpoisoned(&self.0.pending);
        tray.is_closed = true;
        tray.jobs.clear();
    }
}

/// Writes and signs the remaining jobs before the store is closed.
impl Drop for LedgerWriter {
    fn drop(&mut self) {
        lock_unpoisoned(&self.queue.pending).is_closed = true;
        self.queue.wakeup.notify_one();
        match lock_unpoisoned(&self.thread).take() {
            Some(thread) => drop(thread.join()),
            None => {
                let mut pen = lock_unpoisoned(&self.queue.connection);
                pen.sign_now();
                pen.truncate_wal();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use toolgate::CallId;

    use super::*;
    use crate::error::DbError;
    use crate::state_dir::StateDir;

    fn writer(directory: &std::path::Path) -> (LedgerWriter, Arc<SharedStoreState>) {
        let sql = crate::open::open_writable(&directory.join("ledger.db")).unwrap();
        let state = directory.join("state");
        drop(StateDir::acquire_open_lock(&state).unwrap());
        let home = StateDir::open_owner(&state).unwrap();
        let (id, keys) = crate::open::link_state_dir(&sql, &home).unwrap();
        let shared = SharedStoreState::new(home, id, keys, Arc::new(toolgate::clock::SystemClock));
        (LedgerWriter::start(sql, Arc::clone(&shared), 0).unwrap(), shared)
    }

    #[tokio::test]
    async fn a_rollback_restores_the_state_in_memory() {
        let directory = tempfile::tempdir().unwrap();
        let (writer, shared) = writer(directory.path());
        let call = CallId::from_bytes([7; 16]);
        let kept = CallId::from_bytes([8; 16]);
        writer
            .write(false, move |tx| Ok(tx.replace_read_charges(kept, Some(Vec::new()))))
            .await
            .unwrap();
        let failed = writer
            .write(false, move |tx| -> DbResult<()> {
                tx.replace_read_charges(call, Some(Vec::new()));
                tx.replace_read_charges(kept, None);
                Err(DbError::Message("no".to_owned()))
            })
            .await;
        assert!(failed.is_err());
        let reads: Vec<CallId> = lock_unpoisoned(&shared.read_charges).keys().copied().collect();
        assert_eq!(reads, [kept]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn concurrent_writes_are_all_answered() {
        let directory = tempfile::tempdir().unwrap();
        let (writer, shared) = writer(directory.path());
        // Other calls are running, so each task yields before it writes.
        shared.running_calls.store(2, Ordering::Relaxed);
        let writer = Arc::new(writer);
        for _ in 0..20 {
            let tasks: Vec<_> = (0..600)
                .map(|_| {
                    let writer = Arc::clone(&writer);
                    tokio::spawn(
                        async move { writer.write(false, |tx| Ok(tx.head.seq)).await.unwrap() },
                    )
                })
                .collect();
            for task in tasks {
                // No row is unsigned, so the signing timer cannot hide a lost job.
                tokio::time::timeout(Duration::from_secs(60), task)
                    .await
                    .expect("a write was never answered")
                    .unwrap();
            }
        }
    }

    #[tokio::test]
    async fn a_store_that_cannot_sign_can_be_closed() {
        let directory = tempfile::tempdir().unwrap();
        let (writer, _) = writer(directory.path());
        writer
            .write(true, |tx| {
                tx.sql.execute("UPDATE meta SET value = 'gone' WHERE name = 'key'", [])?;
                Ok(())
            })
            .await
            .unwrap();
        lock_unpoisoned(&writer.queue.connection).unsigned_rows = 5_000;
        let (told, closed) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop(writer);
            let _ = told.send(());
        });
        assert!(closed.recv_timeout(Duration::from_secs(60)).is_ok(), "closing the store hangs");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn writes_are_answered_although_others_are_cancelled() {
        let directory = tempfile::tempdir().unwrap();
        let (writer, _) = writer(directory.path());
        let writer = Arc::new(writer);
        let mut tasks = Vec::new();
        for n in 0..64_u32 {
            let writer = Arc::clone(&writer);
            tasks.push(tokio::spawn(async move {
                for turn in 0..50 {
                    let write = writer.write((n + turn) % 7 == 0, |tx| {
                        tx.sql.execute("UPDATE meta SET value = value WHERE name = 'id'", [])?;
                        Ok(())
                    });
                    // Some callers are cancelled.
                    if (n + turn) % 11 == 0 {
                        let _ = tokio::time::timeout(Duration::from_micros(20), write).await;
                    } else {
                        write.await.unwrap();
                    }
                    let _ = writer.try_read(|sql, _| {
                        Ok(sql.query_row("SELECT count(*) FROM meta", [], |row| {
                            row.get::<_, i64>(0)
                        })?)
                    });
                }
            }));
        }
        for task in tasks {
            tokio::time::timeout(Duration::from_secs(60), task)
                .await
                .expect("a write was never answered")
                .unwrap();
        }
        // Jobs of cancelled callers are written, too.
        for _ in 0..6_000 {
            if lock_unpoisoned(&writer.queue.pending).jobs.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("a job was left in the queue");
    }
}
