//! Manages the state directory beside the database: keys, the high-water mark, live processes and
//! session locks.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use toolgate::SessionKey;
use toolgate_json::{Digest, hex};

use crate::keys::random_bytes;

/// High-water mark: the last signed row of a ledger.
///
/// The mark is stored outside the database, so that an older copy of the database is detected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HighWaterMark {
    /// Id of the ledger.
    pub(crate) store: String,
    /// The last signed row.
    pub(crate) seq: u64,
    /// The chain value at that row.
    pub(crate) chain: Digest,
}

/// How a session is locked against other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileLockMode {
    Exclusive,
    Shared,
    Unlocked,
}

/// The state directory of a ledger.
pub(crate) struct StateDir {
    path: PathBuf,
    /// The name of this process, and a file that is locked while the process is alive.
    owner: Option<(Arc<str>, File)>,
    /// File with one lockable byte for each session.
    lock_file: Option<File>,
}

/// Returns the default state directory of a database, which contains its keys and high-water mark.
#[must_use]
pub fn state_dir_for(database: &Path) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(".state");
    name.into()
}

impl StateDir {
    /// Opens the directory for a long-lived process, which can own claims.
    pub(crate) fn open_owner(path: &Path) -> io::Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path.join("owners"))?;
        let name = hex(&random_bytes::<16>()?);
        // The file gets its final name only after it is locked.
        let (draft, owner_file) =
            (path.join("owners").join(format!(".{name}")), path.join("owners").join(&name));
        let file = private_file_options().create_new(true).open(&draft)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        std::fs::rename(&draft, &owner_file)?;
        let lock_file = private_file_options()
            .create(true)
            .truncate(false)
            .read(true)
            .open(path.join("holds"))?;
        Ok(Self {
            path: path.to_owned(),
            owner: Some((format!("{PROCESS_OWNER_PREFIX}{name}").into(), file)),
            lock_file: Some(lock_file),
        })
    }

    /// Opens the directory for a short-lived process that locks one session for one call.
    pub(crate) fn open_transient(path: &Path) -> io::Result<Self> {
        let lock_file = private_file_options()
            .create(true)
            .truncate(false)
            .read(true)
            .open(path.join("holds"))?;
        Ok(Self { path: path.to_owned(), owner: None, lock_file: Some(lock_file) })
    }

    /// Locks the directory, so that one process at a time opens the database.
    ///
    /// Dropping the file releases the lock.
    pub(crate) fn acquire_open_lock(path: &Path) -> io::Result<File> {
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let file = private_file_options().create(true).truncate(false).open(path.join("door"))?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(file)
    }

    /// Opens the directory for reading.
    pub(crate) fn open_readonly(path: &Path) -> Self {
        Self { path: path.to_owned(), owner: None, lock_file: None }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn keys_dir(&self) -> PathBuf {
        self.path.join("keys")
    }

    /// Returns the term of this process.
    pub(crate) fn term(&self) -> Option<&Arc<str>> {
        self.owner.as_ref().map(|(name, _)| name)
    }

    /// Returns whether the process `owner` has ended, or `None` if `owner` is not a process.
    pub(crate) fn has_process_ended(&self, owner: &str) -> Option<bool> {
        let name = owner.strip_prefix(PROCESS_OWNER_PREFIX)?;
        if self.term().is_some_and(|term| **term == *owner) {
            return Some(false);
        }
        Some(match File::open(self.path.join("owners").join(name)) {
            Ok(file) => flock(&file, FlockOperation::NonBlockingLockShared).is_ok(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        })
    }

    /// Removes the files of processes that have ended.
    pub(crate) fn remove_dead_owners(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(self.path.join("owners"))? {
            let entry = entry?;
            let has_ended = |name: &str| {
                !name.starts_with('.')
                    && self.has_process_ended(&format!("{PROCESS_OWNER_PREFIX}{name}"))
                        == Some(true)
            };
            if entry.file_name().to_str().is_some_and(has_ended)
                && let Err(error) = std::fs::remove_file(entry.path())
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(io::Error::new(
                    error.kind(),
                    format!("{}: {error}", entry.path().display()),
                ));
            }
        }
        Ok(())
    }

    /// Locks or unlocks a session against other processes.
    ///
    /// Returns false if another process has the lock. When the process ends, the kernel releases
    /// its locks. Calls of the same process need another lock.
    pub(crate) fn set_session_lock(
        &self,
        key: &SessionKey,
        mode: FileLockMode,
    ) -> io::Result<bool> {
        let Some(file) = &self.lock_file else {
            return Err(io::Error::other(
                "cannot lock a session: the state directory is open for reading only",
            ));
        };
        let digest = Digest::of(
            format!("{}\u{1f}{}\u{1f}{}", key.agent, key.principal, key.session).as_bytes(),
        );
        let byte =
            digest.as_bytes().iter().take(7).fold(0_i64, |byte, part| byte << 8 | i64::from(*part));
        let kind = match mode {
            FileLockMode::Exclusive => nix::libc::F_WRLCK,
            FileLockMode::Shared => nix::libc::F_RDLCK,
            FileLockMode::Unlocked => nix::libc::F_UNLCK,
        };
        let lock = nix::libc::flock {
            l_type: i16::try_from(kind).unwrap_or_default(),
            l_whence: i16::try_from(nix::libc::SEEK_SET).unwrap_or_default(),
            l_start: byte,
            l_len: 1,
            l_pid: 0,
        };
        match fcntl(file, FcntlArg::F_OFD_SETLK(&lock)) {
            Ok(_) => Ok(true),
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(crate) fn read_mark(&self) -> io::Result<Option<HighWaterMark>> {
        let path = self.path.join("mark.json");
        // Opening a pipe would block.
        if std::fs::metadata(&path).is_ok_and(|file| !file.is_file()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "`mark.json` of the ledger is not a regular file",
            ));
        }
        match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map(Some)
                .map_err(|e| io::Error::other(format!("{}: {e}", path.display()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Moves the high-water mark forward. The row that it names is on disk already.
    pub(crate) fn write_mark(&self, mark: &HighWaterMark) -> io::Result<()> {
        let lock = private_file_options()
            .create(true)
            .truncate(false)
            .open(self.path.join("mark.lock"))?;
        flock(&lock, FlockOperation::LockExclusive)?;
        if self.read_mark()?.is_some_and(|known| known.store == mark.store && known.seq >= mark.seq)
        {
            return Ok(());
        }
        let draft = self.path.join("mark.json.new");
        let mut file = private_file_options().create(true).truncate(true).open(&draft)?;
        file.write_all(&serde_json::to_vec(mark)?)?;
        file.sync_all()?;
        // A power loss may restore the previous mark, which is still correct.
        std::fs::rename(&draft, self.path.join("mark.json"))
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        if let Some(name) = self.term().and_then(|owner| owner.strip_prefix(PROCESS_OWNER_PREFIX)) {
            // Open claims of this process must count as abandoned: no file means that it ended.
            let _ = std::fs::remove_file(self.path.join("owners").join(name));
        }
    }
}

const PROCESS_OWNER_PREFIX: &str = "process:";

fn private_file_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    options
}
