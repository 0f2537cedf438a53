//! The file that pins are kept in. Several processes may read and write it.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::runtime::{Handle, RuntimeFlavor};

use super::{Known, Pins};
use crate::gateway::lock;

/// How a file was: when it was written, how long it was, and which one it was.
pub(super) type Stamp = (SystemTime, u64, u64);

/// Whether it is one's turn to change the file; nothing where there is none.
pub(super) type Taken = io::Result<Option<Turn>>;

/// How long whoever writes the file is waited for: it may have been stopped in the middle of it.
const PATIENCE: Duration = Duration::from_secs(2);

/// No two drafts have one name.
static DRAFTS: AtomicU64 = AtomicU64::new(0);

/// The turn to change the file, of one instance at a time. It ends with the process at the latest.
pub(super) struct Turn(File);

impl Turn {
    fn take(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let taken = || flock(&file, FlockOperation::NonBlockingLockExclusive);
        let outcome = match taken() {
            Err(Errno::WOULDBLOCK | Errno::INTR) => aside(|| patiently(taken)),
            at_once => at_once,
        };
        match outcome {
            Ok(()) => Ok(Self(file)),
            Err(Errno::WOULDBLOCK) => Err(io::Error::other(format!("another process has been writing to it for {PATIENCE:?}"))),
            Err(error) => Err(error.into()),
        }
    }
}

fn patiently(taken: impl Fn() -> Result<(), Errno>) -> Result<(), Errno> {
    let begun = Instant::now();
    loop {
        std::thread::sleep(Duration::from_millis(1));
        match taken() {
            Err(Errno::WOULDBLOCK | Errno::INTR) if begun.elapsed() < PATIENCE => {}
            last => return last,
        }
    }
}

/// Waits while everybody else goes on.
fn aside<T>(wait: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(wait),
        _ => wait(),
    }
}

/// A process that is being started has a copy of what is open for a moment: to close it here is not enough.
impl Drop for Turn {
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

fn stamp(file: &Metadata) -> Option<Stamp> {
    Some((file.modified().ok()?, file.len(), file.ino()))
}

impl Pins {
    fn named(&self, error: &io::Error) -> io::Error {
        let file = self.file.as_deref().unwrap_or(Path::new("")).display();
        io::Error::new(error.kind(), format!("{file}: {error}"))
    }

    /// Reads the file, where somebody else has written it since.
    pub(super) fn read(&self) -> io::Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let now = std::fs::metadata(path).ok().as_ref().and_then(stamp);
        // Always in this order: what is known, then how the file was.
        let mut known = lock(&self.known);
        let mut before = lock(&self.stamp);
        if now.is_none() || *before == now {
            return Ok(());
        }
        let text = std::fs::read(path).map_err(|error| self.named(&error))?;
        let spoiled = |error| self.named(&io::Error::other(format!("it is spoiled ({error}); remove it to see all tools anew")));
        let read: Known = serde_json::from_slice(&text).map_err(spoiled)?;
        // What the own upstream has offered is in no file.
        let own = std::mem::take(&mut known.own);
        *known = Known { own, ..read };
        *before = now;
        Ok(())
    }

    /// Waits for one's turn to change the file, and reads it where somebody else had it before. What is known must not be held then: calls do
    /// not wait for other processes.
    pub(super) fn enter(&self) -> Taken {
        let Some(path) = &self.file else { return Ok(None) };
        let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let turn = made.and_then(|()| Turn::take(&path.with_extension("json.lock"))).map_err(|error| self.named(&error))?;
        self.read()?;
        Ok(Some(turn))
    }

    /// Writes it down; else says why that cannot be done.
    pub(super) fn keep(&self, known: &Known, turn: Taken) -> Result<(), String> {
        self.write(known, turn).map_err(|error| {
            tracing::error!(%error, "what tools look like cannot be written down");
            error.to_string()
        })
    }

    /// Writes it down, and lets the next one write. Where it is written down already, nobody has to have had a turn.
    pub(super) fn write(&self, known: &Known, turn: Taken) -> io::Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let text = serde_json::to_vec_pretty(known)?;
        if std::fs::read(path).is_ok_and(|before| before == text) {
            return Ok(());
        }
        let _turn = turn?;
        let draft = path.with_extension(format!("new-{}-{}", std::process::id(), DRAFTS.fetch_add(1, Ordering::Relaxed)));
        let written = (|| {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
            file.write_all(&text)?;
            file.sync_all()?;
            std::fs::rename(&draft, path)?;
            file.metadata()
        })();
        // It is tried again and again: what was begun each time would fill the disk.
        let written = written.inspect_err(|_| drop(std::fs::remove_file(&draft))).map_err(|error| self.named(&error))?;
        *lock(&self.stamp) = stamp(&written);
        Ok(())
    }
}
