//! What stands beside the database: keys, the mark of how far the ledger had come, who is alive, who holds what.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use toolgate::SessionKey;
use toolgate::json::{Digest, hex};

use crate::keys::random;

/// How far a ledger had come when it was last signed. It stands outside the database, so that an older copy of the
/// database is known for one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    /// Which ledger.
    pub(crate) store: String,
    /// Its last row.
    pub(crate) seq: u64,
    /// The chain at that row.
    pub(crate) chain: Digest,
}

/// How a session is held against other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holding {
    Alone,
    Together,
    Not,
}

/// The directory beside a database.
pub(crate) struct Home {
    path: PathBuf,
    /// The name of this process, and the lock that says it is alive.
    owner: Option<(Arc<str>, File)>,
    /// Where sessions are held, a byte each.
    holds: Option<File>,
}

/// The directory beside a database, with its keys and how far it had come, unless another is said.
#[must_use]
pub fn beside(database: &Path) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(".state");
    name.into()
}

impl Home {
    /// Enters the directory as a process that owns things.
    pub(crate) fn enter(path: &Path) -> io::Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path.join("owners"))?;
        let name = hex(&random::<16>()?);
        // Nobody sees it before it is locked.
        let (draft, own) = (path.join("owners").join(format!(".{name}")), path.join("owners").join(&name));
        let file = private().create_new(true).open(&draft)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        std::fs::rename(&draft, &own)?;
        let holds = private().create(true).truncate(false).read(true).open(path.join("holds"))?;
        Ok(Self { path: path.to_owned(), owner: Some((format!("{PROCESS}{name}").into(), file)), holds: Some(holds) })
    }

    /// Looks in as a process that owns nothing, and holds a session while it makes one call.
    pub(crate) fn pass(path: &Path) -> io::Result<Self> {
        let holds = private().create(true).truncate(false).read(true).open(path.join("holds"))?;
        Ok(Self { path: path.to_owned(), owner: None, holds: Some(holds) })
    }

    /// One process at a time opens the database. Dropping the file lets the next one.
    pub(crate) fn door(path: &Path) -> io::Result<File> {
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let file = private().create(true).truncate(false).open(path.join("door"))?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(file)
    }

    /// Looks into the directory.
    pub(crate) fn visit(path: &Path) -> Self {
        Self { path: path.to_owned(), owner: None, holds: None }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn keys(&self) -> PathBuf {
        self.path.join("keys")
    }

    pub(crate) fn owner(&self) -> Option<&Arc<str>> {
        self.owner.as_ref().map(|(name, _)| name)
    }

    /// Whether the process that goes by this name is gone. Of anybody else nobody can tell.
    pub(crate) fn is_gone(&self, owner: &str) -> Option<bool> {
        let name = owner.strip_prefix(PROCESS)?;
        if self.owner().is_some_and(|own| **own == *owner) {
            return Some(false);
        }
        Some(match File::open(self.path.join("owners").join(name)) {
            Ok(file) => flock(&file, FlockOperation::NonBlockingLockShared).is_ok(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        })
    }

    /// Takes the names of those that are gone out of the directory.
    pub(crate) fn tidy(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(self.path.join("owners"))? {
            let entry = entry?;
            let gone = |name: &str| !name.starts_with('.') && self.is_gone(&format!("{PROCESS}{name}")) == Some(true);
            if entry.file_name().to_str().is_some_and(gone)
                && let Err(error) = std::fs::remove_file(entry.path())
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(io::Error::new(error.kind(), format!("{}: {error}", entry.path().display())));
            }
        }
        Ok(())
    }

    /// Holds a session against other processes, if none of them holds it otherwise: alone, together, or not any more. The
    /// end of the process lets go of all. Calls of one process are kept apart before.
    pub(crate) fn hold(&self, key: &SessionKey, how: Holding) -> io::Result<bool> {
        let Some(file) = &self.holds else { return Err(io::Error::other("nothing can be held from here")) };
        let digest = Digest::of(format!("{}\u{1f}{}\u{1f}{}", key.agent, key.principal, key.session).as_bytes());
        let byte = digest.as_bytes().iter().take(7).fold(0_i64, |byte, part| byte << 8 | i64::from(*part));
        let kind = match how {
            Holding::Alone => nix::libc::F_WRLCK,
            Holding::Together => nix::libc::F_RDLCK,
            Holding::Not => nix::libc::F_UNLCK,
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

    pub(crate) fn mark(&self) -> io::Result<Option<Mark>> {
        let path = self.path.join("mark.json");
        // A pipe would be waited for.
        if std::fs::metadata(&path).is_ok_and(|there| !there.is_file()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "`mark.json` beside it is no plain file"));
        }
        match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| io::Error::other(format!("{}: {e}", path.display()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Moves the mark, never backwards. The row that it names is on disk already.
    pub(crate) fn set_mark(&self, mark: &Mark) -> io::Result<()> {
        let lock = private().create(true).truncate(false).open(self.path.join("mark.lock"))?;
        flock(&lock, FlockOperation::LockExclusive)?;
        if self.mark()?.is_some_and(|known| known.store == mark.store && known.seq >= mark.seq) {
            return Ok(());
        }
        let draft = self.path.join("mark.json.new");
        let mut file = private().create(true).truncate(true).open(&draft)?;
        file.write_all(&serde_json::to_vec(mark)?)?;
        file.sync_all()?;
        // One that is lost with the power leaves the one before it, which is as true.
        std::fs::rename(&draft, self.path.join("mark.json"))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if let Some(name) = self.owner().and_then(|owner| owner.strip_prefix(PROCESS)) {
            // Claims that are still open must find nobody alive under this name: a missing file says so.
            let _ = std::fs::remove_file(self.path.join("owners").join(name));
        }
    }
}

const PROCESS: &str = "process:";

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    options
}
