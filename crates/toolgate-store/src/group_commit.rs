//! Implements group commit: one thread at a time writes, and queued jobs share a transaction.
//!
//! A job is acknowledged after its transaction is committed, and on disk if the job is durable. If
//! several calls are running, a separate thread waits for the disk, so that the others do not.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rusqlite::Connection;
use tokio::sync::oneshot;
use toolgate::store::StoreError;

use crate::error::DbResult;
use crate::tables::ledger::LedgerHead;
use crate::transaction::{SharedStoreState, WriteTransaction, lock_unpoisoned, read_transaction};
use crate::write_queue::{WriteJob, WriteOperation, WriteQueue};

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

/// Handle to the write queue.
pub(crate) struct LedgerWriter {
    queue: Arc<WriteQueue>,
    /// The thread for slow work, if any: syncs, signatures and WAL checkpoints.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl LedgerWriter {
    /// Starts the writer thread, which also signs the `unsigned` rows of a process that was killed.
    pub(crate) fn start(
        sql: Connection,
        shared: Arc<SharedStoreState>,
        unsigned: u64,
    ) -> std::io::Result<Self> {
        let queue = Arc::new(WriteQueue::new(false, sql, shared, unsigned));
        let thread_queue = Arc::clone(&queue);
        let thread =
            std::thread::Builder::new().name("toolgate-store".to_owned()).spawn(move || {
                let _closes_queue = CloseQueueOnDrop(&thread_queue);
                thread_queue.run_thread();
            })?;
        Ok(Self { queue, thread: Mutex::new(Some(thread)) })
    }

    /// Creates a writer without a thread, for a process that makes one call.
    pub(crate) fn inline(sql: Connection, shared: Arc<SharedStoreState>) -> Self {
        Self { queue: Arc::new(WriteQueue::new(true, sql, shared, 0)), thread: Mutex::default() }
    }

    /// Reads with the write connection, unless the store has a writer thread.
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
        let _missed_jobs = WriteMissedJobsOnDrop(&self.queue);
        let Some(connection) =
            self.queue.try_connection().filter(|connection| connection.sql.is_autocommit())
        else {
            return Err(f);
        };
        Ok(f(&connection.sql, &connection.shared))
    }

    /// Reads in one transaction, without a write.
    ///
    /// Returns `None` if the connection is busy or another process has appended rows. The caller
    /// then uses a write transaction.
    pub(crate) fn try_read_consistent<T>(
        &self,
        f: impl FnOnce(&Connection, &SharedStoreState, LedgerHead) -> DbResult<Option<T>>,
    ) -> DbResult<Option<T>> {
        let _missed_jobs = WriteMissedJobsOnDrop(&self.queue);
        let Some(connection) =
            self.queue.try_connection().filter(|connection| connection.sql.is_autocommit())
        else {
            return Ok(None);
        };
        read_transaction(&connection.sql, |sql| match crate::tables::ledger::read_head(sql)? {
            head if connection.is_head(head) => f(sql, &connection.shared, head),
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
        let closed = || StoreError::unavailable("the writer thread has ended".to_owned());
        let (reply, mut answer) = oneshot::channel();
        // If other calls are running, the writer thread waits for the disk, so that they do not.
        let has_other_calls = self.queue.shared.running_calls.load(Ordering::Relaxed) > 1;
        let uses_thread = durable && has_other_calls && !self.queue.is_inline;
        if !self.queue.enqueue(
            WriteJob {
                is_durable: durable,
                task: Box::new(WriteTask { f: Some(f), result: None, reply }),
            },
            uses_thread,
        ) {
            return Err(closed());
        }
        if !uses_thread {
            // Writing inline is faster than waking another thread. Other tasks that are ready run
            // first, so that their jobs share the transaction.
            let drain = DrainQueueOnDrop(&self.queue, self.queue.is_inline || durable);
            if has_other_calls && !self.queue.is_inline {
                tokio::task::yield_now().await;
            }
            drop(drain);
            match answer.try_recv() {
                Ok(written) => return written,
                Err(oneshot::error::TryRecvError::Closed) => return Err(closed()),
                Err(oneshot::error::TryRecvError::Empty) => {}
            }
        }
        answer.await.map_err(|_| closed())?
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
        let mut pending = lock_unpoisoned(&self.0.pending);
        pending.is_closed = true;
        pending.jobs.clear();
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
                let mut connection = lock_unpoisoned(&self.queue.connection);
                connection.sign_now();
                connection.truncate_wal();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
        let other_call = CallId::from_bytes([8; 16]);
        writer
            .write(false, move |tx| Ok(tx.replace_read_charges(other_call, Some(Vec::new()))))
            .await
            .unwrap();
        let failed = writer
            .write(false, move |tx| -> DbResult<()> {
                tx.replace_read_charges(call, Some(Vec::new()));
                tx.replace_read_charges(other_call, None);
                Err(DbError::Message("no".to_owned()))
            })
            .await;
        assert!(failed.is_err());
        let reads: Vec<CallId> = lock_unpoisoned(&shared.read_charges).keys().copied().collect();
        assert_eq!(reads, [other_call]);
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
                    .expect("a write has no answer")
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
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop(writer);
            let _ = sender.send(());
        });
        assert!(receiver.recv_timeout(Duration::from_secs(60)).is_ok(), "closing the store hangs");
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
                for round in 0..50 {
                    let write = writer.write((n + round) % 7 == 0, |tx| {
                        tx.sql.execute("UPDATE meta SET value = value WHERE name = 'id'", [])?;
                        Ok(())
                    });
                    // Some callers are cancelled.
                    if (n + round) % 11 == 0 {
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
                .expect("a write has no answer")
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
