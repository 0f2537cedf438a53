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
use toolgate::json::Digest;

use crate::keys::{hex, random};

/// How far a ledger had come when it was last signed. It stands outside the database, so that an older copy of the
/// database is known for one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Which ledger.
    pub store: String,
    /// Its last row.
    pub seq: u64,
    /// The chain at that row.
    pub chain: Digest,
}

/// The directory beside a database.
pub(crate) struct Home {
    path: PathBuf,
    /// The name of this process, and the lock that says it is alive.
    owner: Option<(Arc<str>, File)>,
}

impl Home {
    /// The directory of a database, unless another is said.
    pub(crate) fn beside(database: &Path) -> PathBuf {
        let mut name = database.as_os_str().to_owned();
        name.push(".state");
        name.into()
    }

    /// Enters the directory as a process that owns things.
    pub(crate) fn enter(path: &Path) -> io::Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path.join("owners"))?;
        let name = hex(&random::<16>()?);
        let file = private().create_new(true).open(path.join("owners").join(&name))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self { path: path.to_owned(), owner: Some((format!("{PROCESS}{name}").into(), file)) })
    }

    /// Looks into the directory.
    pub(crate) fn visit(path: &Path) -> Self {
        Self { path: path.to_owned(), owner: None }
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
    pub(crate) fn is_gone(&self, owner: &str) -> bool {
        let Some(name) = owner.strip_prefix(PROCESS) else { return false };
        if self.owner().is_some_and(|own| **own == *owner) {
            return false;
        }
        match File::open(self.path.join("owners").join(name)) {
            Ok(file) => flock(&file, FlockOperation::NonBlockingLockShared).is_ok(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Takes the names of those that are gone out of the directory.
    pub(crate) fn tidy(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(self.path.join("owners"))? {
            let entry = entry?;
            if entry.file_name().to_str().is_some_and(|name| self.is_gone(&format!("{PROCESS}{name}"))) {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Holds a session against other processes, if none of them holds it otherwise. Dropping the file lets it go, and so
    /// does the end of the process.
    pub(crate) fn hold(&self, key: &SessionKey, alone: bool) -> io::Result<Option<File>> {
        let file = private().create(true).truncate(false).read(true).open(self.path.join("holds"))?;
        let digest = Digest::of(format!("{}\u{1f}{}\u{1f}{}", key.agent, key.principal, key.session).as_bytes());
        let byte = digest.as_bytes().iter().take(7).fold(0_i64, |byte, part| byte << 8 | i64::from(*part));
        let kind = if alone { nix::libc::F_WRLCK } else { nix::libc::F_RDLCK };
        let lock = nix::libc::flock {
            l_type: i16::try_from(kind).unwrap_or_default(),
            l_whence: i16::try_from(nix::libc::SEEK_SET).unwrap_or_default(),
            l_start: byte,
            l_len: 1,
            l_pid: 0,
        };
        match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)) {
            Ok(_) => Ok(Some(file)),
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(crate) fn mark(&self) -> io::Result<Option<Mark>> {
        let path = self.path.join("mark.json");
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
