//! Opens the directory that a configuration gives an agent: writable where tools run, otherwise
//! for checks only.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use cap_std::ambient_authority;
use cap_std::fs::Dir;

use super::{FileError, FileExpectation, FileSystem, FileTransaction, HostFs};
use crate::call::CallId;
use crate::files::host_fs::file_fact;
use crate::policy::FileFact;

impl HostFs {
    /// Opens a directory that several processes may share.
    ///
    /// Each process has its own journal in `journals`, which must be outside of the directory.
    /// Unfinished changes of dead processes are undone first, as with [`HostFs::open`].
    ///
    /// # Errors
    /// See [`HostFs::open`].
    pub fn open_shared(
        root: impl AsRef<Path>,
        journals: impl AsRef<Path>,
        committed: impl Fn(CallId) -> io::Result<bool>,
    ) -> io::Result<Self> {
        let (root, journals) = (root.as_ref(), journals.as_ref());
        fs::DirBuilder::new().recursive(true).mode(0o700).create(journals)?;
        // Only one process may start at a time: a new journal that is not locked yet would look
        // like the journal of a dead process.
        let start_lock = fs::File::create(journals.join("door"))?;
        start_lock.lock()?;
        let entries =
            fs::read_dir(journals)?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
        let journals_left: Vec<_> = entries.filter(|path| path.is_dir()).collect();
        for journal in journals_left {
            // A running process holds the lock of its journal.
            let is_running =
                fs::File::open(journal.join("lock")).is_ok_and(|lock| lock.try_lock().is_err());
            if !is_running {
                let recovered = Self::open(root, &journal, &committed)?;
                // Conflicts remain in the directory for a person.
                let _ = fs::remove_file(journal.join("lock"));
                let _ = fs::remove_dir(&journal);
                drop(recovered);
            }
        }
        Self::open(root, journals.join(CallId::generate().to_string()), committed)
    }
}

/// A directory in which only the state of files can be checked.
pub struct ReadOnlyDir(Dir);

impl ReadOnlyDir {
    /// Opens a directory for reading.
    pub fn open(root: &Path) -> io::Result<Self> {
        Dir::open_ambient_dir(root, ambient_authority()).map(Self)
    }
}

impl FileSystem for ReadOnlyDir {
    fn fact(&self, path: &str) -> FileFact {
        file_fact(&self.0, path)
    }

    fn begin(&self, _: CallId, _: Vec<FileExpectation>) -> Box<dyn FileTransaction> {
        Box::new(RejectingFileTransaction)
    }
}

/// A transaction that rejects every operation, because this process only checks calls.
struct RejectingFileTransaction;

fn reject_access<T>(path: &str) -> Result<T, FileError> {
    Err(FileError::Io(
        toolgate_text::escape_for_display(path),
        "this process only checks calls and does not access files".to_owned(),
    ))
}

impl FileTransaction for RejectingFileTransaction {
    fn read(&mut self, path: &str) -> Result<Vec<u8>, FileError> {
        reject_access(path)
    }

    fn write(&mut self, path: &str, _: &[u8]) -> Result<(), FileError> {
        reject_access(path)
    }

    fn remove(&mut self, path: &str) -> Result<(), FileError> {
        reject_access(path)
    }

    fn list(&mut self, path: &str, _: usize) -> Result<Vec<String>, FileError> {
        reject_access(path)
    }

    fn commit(&mut self) -> Result<(), FileError> {
        Ok(())
    }

    fn rollback(&mut self) -> Result<(), FileError> {
        Ok(())
    }
}
