//! One writes at a time. Whatever waits meanwhile goes into one transaction, and nobody hears "done" before that is written: on disk
//! where it must be, and then by a thread of its own, so that nobody else waits for the disk.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::oneshot;
use toolgate::store::StoreError;

use crate::fault::Done;
use crate::pen::Pen;
use crate::tx::{Shared, Tx, lock};

/// Most that goes into one transaction.
const MOST: usize = 512;
/// Something to write.
pub(crate) trait Work: Send {
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

pub(crate) struct Job {
    pub(crate) durable: bool,
    pub(crate) work: Box<dyn Work>,
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
        let pen = Pen::new(alone, sql, shared, unsigned);
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
                let written = pen.write(jobs, self.alone);
                self.count.fetch_add(u64::from(written.done), Ordering::Relaxed);
                pen.shared.set_mark(written.mark);
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
                let written = pen.write(jobs, true);
                let shared = Arc::clone(&pen.shared);
                // Others write on while the mark is moved.
                drop(pen);
                self.count.fetch_add(u64::from(written.done), Ordering::Relaxed);
                shared.set_mark(written.mark);
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
