//! The directory that a configuration gives an agent: opened where tools run, looked at where calls are only judged.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use cap_std::ambient_authority;
use cap_std::fs::Dir;

use super::host::fact_in;
use super::{Expect, FileError, FileSystem, FileTxn, HostFs};
use crate::call::CallId;
use crate::policy::FileFact;

impl HostFs {
    /// Opens a directory that several processes may have open, each with a journal of its own in `journals`, which lies outside of it.
    /// What processes that died had begun is undone first, as with [`HostFs::open`].
    ///
    /// # Errors
    /// As with [`HostFs::open`].
    pub fn open_shared(
        root: impl AsRef<Path>,
        journals: impl AsRef<Path>,
        committed: impl Fn(CallId) -> io::Result<bool>,
    ) -> io::Result<Self> {
        let (root, journals) = (root.as_ref(), journals.as_ref());
        fs::DirBuilder::new().recursive(true).mode(0o700).create(journals)?;
        // One at a time: who has made a journal and not locked it yet would be taken for dead.
        let door = fs::File::create(journals.join("door"))?;
        door.lock()?;
        let entries = fs::read_dir(journals)?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
        let left: Vec<_> = entries.filter(|path| path.is_dir()).collect();
        for journal in left {
            // Whoever lives has the lock of its own.
            let lives = fs::File::open(journal.join("lock")).is_ok_and(|lock| lock.try_lock().is_err());
            if !lives {
                let taken = Self::open(root, &journal, &committed)?;
                // What is left there is for a person to look at.
                let _ = fs::remove_file(journal.join("lock"));
                let _ = fs::remove_dir(&journal);
                drop(taken);
            }
        }
        Self::open(root, journals.join(CallId::fresh().to_string()), committed)
    }
}

/// A directory that is only looked at.
pub(crate) struct Sight(Dir);

impl Sight {
    pub(crate) fn of(root: &Path) -> io::Result<Self> {
        Dir::open_ambient_dir(root, ambient_authority()).map(Self)
    }
}

impl FileSystem for Sight {
    fn fact(&self, path: &str) -> FileFact {
        fact_in(&self.0, path)
    }

    fn begin(&self, _: CallId, _: Vec<Expect>) -> Box<dyn FileTxn> {
        Box::new(Nothing)
    }
}

/// Nothing is done where calls are only judged.
struct Nothing;

fn only_looked_at<T>(path: &str) -> Result<T, FileError> {
    Err(FileError::Io(crate::names::shown(path), "files are only looked at here".to_owned()))
}

impl FileTxn for Nothing {
    fn read(&mut self, path: &str) -> Result<Vec<u8>, FileError> {
        only_looked_at(path)
    }

    fn write(&mut self, path: &str, _: &[u8]) -> Result<(), FileError> {
        only_looked_at(path)
    }

    fn remove(&mut self, path: &str) -> Result<(), FileError> {
        only_looked_at(path)
    }

    fn list(&mut self, path: &str, _: usize) -> Result<Vec<String>, FileError> {
        only_looked_at(path)
    }

    fn commit(&mut self) -> Result<(), FileError> {
        Ok(())
    }

    fn rollback(&mut self) -> Result<(), FileError> {
        Ok(())
    }
}
