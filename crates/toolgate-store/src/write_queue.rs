//! Queues writes, and writes the queued jobs in shared transactions.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use toolgate::store::StoreError;

use crate::error::DbResult;
use crate::transaction::{SharedStoreState, WriteTransaction, lock_unpoisoned};
use crate::write_connection::{SignPolicy, WriteConnection};

/// Most jobs in one transaction of the writer thread, and of a caller that writes inline.
const MAX_JOBS_PER_TRANSACTION: usize = 512;
const MAX_JOBS_PER_INLINE_TRANSACTION: usize = 64;

/// How many transactions a caller writes for others before the writer thread takes over.
const MAX_INLINE_TRANSACTIONS: usize = 4;

/// A write that runs in the transaction of its batch.
pub(crate) trait WriteOperation: Send {
    fn run(&mut self, tx: &mut WriteTransaction<'_>) -> DbResult<()>;
    fn complete(self: Box<Self>, failed: Option<StoreError>);
}

pub(crate) struct WriteJob {
    pub(crate) is_durable: bool,
    pub(crate) task: Box<dyn WriteOperation>,
}

/// Write queue. The writer thread or a caller empties the queue, one at a time.
pub(crate) struct WriteQueue {
    /// Whether callers write everything inline, without a writer thread.
    pub(crate) is_inline: bool,
    pub(crate) connection: Mutex<WriteConnection>,
    pub(crate) pending: Mutex<PendingJobs>,
    pub(crate) wakeup: Condvar,
    pub(crate) transaction_count: AtomicU64,
    /// Set by a caller that found the connection busy, so that the writer checks the queue again.
    pub(crate) has_missed: AtomicBool,
    pub(crate) shared: Arc<SharedStoreState>,
}

/// Jobs that wait for the next transaction.
#[derive(Default)]
pub(crate) struct PendingJobs {
    pub(crate) jobs: VecDeque<WriteJob>,
    /// Whether the writer thread was woken.
    pub(crate) is_thread_called: bool,
    /// Whether the queue accepts no more jobs.
    pub(crate) is_closed: bool,
}

impl PendingJobs {
    /// Returns true if the queue is empty, or the writer thread will empty it.
    pub(crate) fn is_handled(&self) -> bool {
        self.is_thread_called || self.jobs.is_empty()
    }
}

impl WriteQueue {
    pub(crate) fn new(
        is_inline: bool,
        sql: Connection,
        shared: Arc<SharedStoreState>,
        unsigned: u64,
    ) -> Self {
        let connection = Mutex::new(WriteConnection::new(sql, Arc::clone(&shared), unsigned));
        Self {
            is_inline,
            connection,
            pending: Mutex::default(),
            wakeup: Condvar::new(),
            transaction_count: AtomicU64::new(0),
            has_missed: AtomicBool::new(false),
            shared,
        }
    }

    /// Returns the write connection, unless it is in use.
    pub(crate) fn try_connection(&self) -> Option<MutexGuard<'_, WriteConnection>> {
        match self.connection.try_lock() {
            Ok(connection) => Some(connection),
            Err(TryLockError::Poisoned(connection)) => Some(connection.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Adds a job, and wakes the writer thread if `wakes_thread` is true. Returns false if closed.
    pub(crate) fn enqueue(&self, job: WriteJob, wakes_thread: bool) -> bool {
        let mut pending = lock_unpoisoned(&self.pending);
        if pending.is_closed {
            return false;
        }
        pending.jobs.push_back(job);
        if wakes_thread {
            pending.is_thread_called = true;
            self.wakeup.notify_one();
        }
        true
    }

    /// Returns true if a caller found the connection busy and its job is still in the queue.
    ///
    /// Call this after the connection is released: a caller sets `has_missed` before it tries to
    /// lock.
    pub(crate) fn has_missed_jobs(&self) -> bool {
        fence(Ordering::SeqCst);
        self.has_missed.load(Ordering::Relaxed) && !lock_unpoisoned(&self.pending).is_handled()
    }

    pub(crate) fn wake_thread(&self) {
        if !self.is_inline {
            lock_unpoisoned(&self.pending).is_thread_called = true;
            self.wakeup.notify_one();
        }
    }

    /// Takes the jobs for the next transaction. The flag says whether more jobs are left.
    ///
    /// If a job is durable and `may_wait` is false, no job is taken: the writer thread or another
    /// caller writes them.
    pub(crate) fn take_batch(&self, may_wait: bool) -> (Vec<WriteJob>, bool) {
        let mut pending = lock_unpoisoned(&self.pending);
        let count = pending.jobs.len().min(if may_wait {
            MAX_JOBS_PER_TRANSACTION
        } else {
            MAX_JOBS_PER_INLINE_TRANSACTION
        });
        if !may_wait && pending.jobs.iter().take(count).any(|job| job.is_durable) {
            return (Vec::new(), false);
        }
        let jobs = pending.jobs.drain(..count).collect();
        (jobs, !pending.jobs.is_empty())
    }

    /// Writes the queued jobs on the thread of the caller, unless another thread is writing.
    ///
    /// The other thread checks the queue again afterwards. Durable jobs are written here only if
    /// `may_wait` is true.
    pub(crate) fn write_inline(&self, may_wait: bool) {
        for round in 0.. {
            // Without a writer thread, the caller continues until the queue is empty.
            if round == MAX_INLINE_TRANSACTIONS && !self.is_inline {
                break;
            }
            self.has_missed.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let Some(mut connection) = self.try_connection() else {
                // The other thread may be unable to wait for the disk.
                return if may_wait && !self.is_inline {
                    self.wake_thread()
                };
            };
            self.has_missed.store(false, Ordering::Relaxed);
            let (jobs, has_more) = self.take_batch(may_wait);
            if !jobs.is_empty() {
                let was_signed = connection.unsigned_rows == 0;
                // If another process is writing, the writer thread waits for it.
                let durable = jobs.iter().any(|job| job.is_durable);
                if !self.is_inline && !connection.try_begin(durable) {
                    let mut pending = lock_unpoisoned(&self.pending);
                    jobs.into_iter().rev().for_each(|job| pending.jobs.push_front(job));
                    drop(pending);
                    return self.wake_thread();
                }
                let written = connection.write(
                    jobs,
                    if self.is_inline { SignPolicy::WithRows } else { SignPolicy::Never },
                );
                self.transaction_count
                    .fetch_add(u64::from(written.is_committed), Ordering::Relaxed);
                connection.shared.advance_mark(written.mark);
                // The writer thread signs, some time after the first unsigned row or when due.
                if (connection.unsigned_rows > 0 && (was_signed || connection.is_signature_due()))
                    || connection.needs_wal_checkpoint()
                {
                    self.wake_thread();
                }
            }
            drop(connection);
            // Other callers write their jobs themselves, unless they found the connection busy or
            // the transaction was full.
            if !has_more && !self.has_missed_jobs() {
                return;
            }
        }
        self.wake_thread();
    }

    /// Runs the writer thread.
    pub(crate) fn run_thread(&self) {
        loop {
            let (sign_wait, started_at) =
                (lock_unpoisoned(&self.connection).time_until_signature(), Instant::now());
            let mut pending = lock_unpoisoned(&self.pending);
            while !pending.is_thread_called && !pending.is_closed && pending.jobs.is_empty() {
                let left = sign_wait.map(|wait| wait.saturating_sub(started_at.elapsed()));
                pending = match left {
                    Some(Duration::ZERO) => break,
                    Some(left) => {
                        self.wakeup
                            .wait_timeout(pending, left)
                            .unwrap_or_else(PoisonError::into_inner)
                            .0
                    }
                    None => self.wakeup.wait(pending).unwrap_or_else(PoisonError::into_inner),
                };
            }
            pending.is_thread_called = false;
            let is_closed = pending.is_closed;
            drop(pending);
            // Jobs that arrive during the sync go into the next transaction.
            let mut connection = lock_unpoisoned(&self.connection);
            let (jobs, _) = self.take_batch(true);
            if !jobs.is_empty() || (!is_closed && connection.is_signature_due()) {
                let written = connection.write(jobs, SignPolicy::WhenDue);
                let shared = Arc::clone(&connection.shared);
                // Release the connection before writing the high-water mark, so others can write.
                drop(connection);
                self.transaction_count
                    .fetch_add(u64::from(written.is_committed), Ordering::Relaxed);
                self.write_inline(false);
                shared.advance_mark(written.mark);
            } else if connection.needs_wal_checkpoint() {
                connection.checkpoint_wal();
            } else if is_closed {
                return connection.sign_now();
            }
        }
    }
}
