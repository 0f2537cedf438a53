//! Reads and writes the pin file, which several processes may share.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::runtime::{Handle, RuntimeFlavor};

use super::{PinFileContents, Pins};
use crate::gateway::lock;

/// Identifies a version of a file: modification time, length and inode.
pub(crate) type PinFileVersion = (SystemTime, u64, u64);

/// The result of locking the file; `None` without a pin file.
pub(crate) type PinFileLockResult = io::Result<Option<PinFileLock>>;

/// How long to wait for the lock: the process that holds it may be suspended.
const PIN_FILE_LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Makes the names of temporary files unique.
static NEXT_TEMP_FILE_ID: AtomicU64 = AtomicU64::new(0);

/// An exclusive lock on the pin file. The kernel releases it when the process ends.
pub(crate) struct PinFileLock(File);

impl PinFileLock {
    fn acquire(path: &Path) -> io::Result<Self> {
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let try_lock = || flock(&file, FlockOperation::NonBlockingLockExclusive);
        let outcome = match try_lock() {
            Err(Errno::WOULDBLOCK | Errno::INTR) => wait_off_worker(|| lock_with_retry(try_lock)),
            result => result,
        };
        match outcome {
            Ok(()) => Ok(Self(file)),
            Err(Errno::WOULDBLOCK) => Err(io::Error::other(format!(
                "locked by another process for more than {PIN_FILE_LOCK_TIMEOUT:?}"
            ))),
            Err(error) => Err(error.into()),
        }
    }
}

fn lock_with_retry(try_lock: impl Fn() -> Result<(), Errno>) -> Result<(), Errno> {
    let started = Instant::now();
    loop {
        std::thread::sleep(Duration::from_millis(1));
        match try_lock() {
            Err(Errno::WOULDBLOCK | Errno::INTR) if started.elapsed() < PIN_FILE_LOCK_TIMEOUT => {}
            result => return result,
        }
    }
}

/// Blocks without blocking the other tasks of the runtime.
fn wait_off_worker<T>(wait: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(wait),
        _ => wait(),
    }
}

/// Unlocks explicitly. Closing is not enough: a child between fork and exec still has a copy of the
/// descriptor.
impl Drop for PinFileLock {
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

fn file_version(file: &Metadata) -> Option<PinFileVersion> {
    Some((file.modified().ok()?, file.len(), file.ino()))
}

impl Pins {
    fn with_file_name(&self, error: &io::Error) -> io::Error {
        let file = self.file.as_deref().unwrap_or(Path::new("")).display();
        io::Error::new(error.kind(), format!("{file}: {error}"))
    }

    /// Reads the file again if another process has written it.
    pub(crate) fn reload(&self) -> io::Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let version = std::fs::metadata(path).ok().as_ref().and_then(file_version);
        // Lock order: the pins first, then the file version.
        let mut contents = lock(&self.contents);
        let mut known_version = lock(&self.file_version);
        if version.is_none() || *known_version == version {
            return Ok(());
        }
        let text = std::fs::read(path).map_err(|error| self.with_file_name(&error))?;
        let invalid_file = |error| {
            self.with_file_name(&io::Error::other(format!(
                "invalid pin file ({error}); remove it to pin all tools again"
            )))
        };
        let stored: PinFileContents = serde_json::from_slice(&text).map_err(invalid_file)?;
        // The definitions of the upstream of this process are not in the file.
        let own_definitions = std::mem::take(&mut contents.own_definitions);
        *contents = PinFileContents { own_definitions, ..stored };
        *known_version = version;
        Ok(())
    }

    /// Locks the file for a change, and reads it again if another process has written it.
    ///
    /// Do not hold the mutex of the pins while waiting: calls must not wait for other processes.
    pub(crate) fn lock_file(&self) -> PinFileLockResult {
        let Some(path) = &self.file else { return Ok(None) };
        let created = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let file_lock = created
            .and_then(|()| PinFileLock::acquire(&path.with_extension("json.lock")))
            .map_err(|error| self.with_file_name(&error))?;
        self.reload()?;
        Ok(Some(file_lock))
    }

    /// Writes the pins, and returns the reason if that fails.
    pub(crate) fn write_or_explain(
        &self,
        contents: &PinFileContents,
        file_lock: PinFileLockResult,
    ) -> Result<(), String> {
        self.write(contents, file_lock).map_err(|error| {
            tracing::error!(%error, "cannot write the pin file");
            error.to_string()
        })
    }

    /// Writes the pins and releases the lock. If the file is already up to date, no lock is needed.
    pub(crate) fn write(
        &self,
        contents: &PinFileContents,
        file_lock: PinFileLockResult,
    ) -> io::Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let text = serde_json::to_vec_pretty(contents)?;
        if std::fs::read(path).is_ok_and(|before| before == text) {
            return Ok(());
        }
        let _file_lock = file_lock?;
        let draft = path.with_extension(format!(
            "new-{}-{}",
            std::process::id(),
            NEXT_TEMP_FILE_ID.fetch_add(1, Ordering::Relaxed)
        ));
        let written = (|| {
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&draft)?;
            file.write_all(&text)?;
            file.sync_all()?;
            std::fs::rename(&draft, path)?;
            file.metadata()
        })();
        // Writing is retried often, so remove the temporary file or the disk would fill up.
        let written = written
            .inspect_err(|_| drop(std::fs::remove_file(&draft)))
            .map_err(|error| self.with_file_name(&error))?;
        *lock(&self.file_version) = file_version(&written);
        Ok(())
    }
}
