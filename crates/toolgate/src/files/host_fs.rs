//! Implements a file system on one directory of the host, with an undo journal.
//!
//! No path, link or race leads outside of the directory: every access uses a handle of the
//! directory (`cap-std`), so the kernel resolves each part of a path below it. A change is first
//! written to the journal and synced. If this process dies, the next one undoes its changes. A file
//! that another process has changed in the meantime is never overwritten, but reported.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use cap_std::ambient_authority;
use cap_std::fs::{
    Dir, File, MetadataExt, OpenOptions, OpenOptionsExt, Permissions, PermissionsExt,
};

use super::{FileError, FileExpectation, FileSystem, FileTransaction, normalize_path};
use crate::call::CallId;
use crate::files::undo_journal::{UndoEntry, UndoHeader};
use crate::policy::FileFact;
use toolgate_json::Digest;

/// Maximum size of a file that is read or written, in bytes.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// A directory of the host.
#[derive(Clone)]
pub struct HostFs(Arc<Inner>);

struct Inner {
    root: Dir,
    journal: PathBuf,
    /// Lock of the journal, held for the lifetime of the file system.
    _lock: fs::File,
    locked_paths: Mutex<HashMap<String, CallId>>,
}

impl HostFs {
    /// Opens a directory with a journal outside of it, and undoes unfinished changes of a dead
    /// process.
    ///
    /// `committed` returns whether a call was recorded as a success; the changes of such a call are
    /// kept.
    ///
    /// # Errors
    /// Returns an error if the directory or the journal cannot be opened, if another process has
    /// locked the journal, if the journal is inside the directory, or if `committed` fails. Returns
    /// an error once if another process has changed a file that should be undone.
    pub fn open(
        root: impl AsRef<Path>,
        journal: impl AsRef<Path>,
        committed: impl Fn(CallId) -> io::Result<bool>,
    ) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(journal.as_ref())?;
        let (root, journal) = (root.as_ref().canonicalize()?, journal.as_ref().canonicalize()?);
        if journal.starts_with(&root) {
            return Err(io::Error::other(format!(
                "the journal {} must be outside of {}",
                journal.display(),
                root.display()
            )));
        }
        let lock = fs::File::create(journal.join("lock"))?;
        lock.try_lock().map_err(|e| {
            io::Error::other(format!(
                "another process has locked the journal {}: {e}",
                journal.display()
            ))
        })?;
        let root = Dir::open_ambient_dir(&root, ambient_authority())?;
        let opened =
            Self(Arc::new(Inner { root, journal, _lock: lock, locked_paths: Mutex::default() }));
        opened.recover(committed)?;
        Ok(opened)
    }

    fn recover(&self, committed: impl Fn(CallId) -> io::Result<bool>) -> io::Result<()> {
        let mut files: Vec<PathBuf> =
            fs::read_dir(&self.0.journal)?.filter_map(|e| e.ok().map(|e| e.path())).collect();
        files.sort();
        let mut first_error = None;
        // Undo the newest entry first, so that the oldest content of a file remains.
        for file in files.into_iter().rev() {
            match file.extension().and_then(|e| e.to_str()) {
                Some("undo") => {}
                // The entry was not complete, so its change was never made.
                Some("tmp") => {
                    fs::remove_file(&file)?;
                    continue;
                }
                _ => continue,
            }
            let Some(entry) = UndoEntry::parse(&fs::read(&file)?, file.clone()) else {
                fs::rename(&file, file.with_extension("conflict"))?;
                first_error.get_or_insert_with(|| {
                    io::Error::other(format!("cannot read the undo entry {}", file.display()))
                });
                continue;
            };
            if committed(entry.undo.call)? {
                fs::remove_file(&file)?;
            } else if let Err(e) = self.0.undo(&entry) {
                first_error
                    .get_or_insert_with(|| io::Error::other(format!("{}: {e}", file.display())));
            }
        }
        // Reported once: the entry is now a `.conflict` file for a person to inspect.
        first_error.map_or(Ok(()), Err)
    }
}

fn io_error(path: &str, error: &io::Error) -> FileError {
    match error.kind() {
        io::ErrorKind::NotFound => FileError::NotFound(path.to_owned()),
        // The error of cap-std for a path or link that leads outside.
        io::ErrorKind::PermissionDenied if error.raw_os_error().is_none() => {
            FileError::OutsideRoot(path.to_owned())
        }
        _ if error.raw_os_error() == Some(rustix::io::Errno::XDEV.raw_os_error()) => {
            FileError::OutsideRoot(path.to_owned())
        }
        io::ErrorKind::IsADirectory => FileError::NotAFile(path.to_owned()),
        _ => FileError::Io(path.to_owned(), error.to_string()),
    }
}

/// Opens a regular file without blocking, as opening a pipe would.
fn open_regular_file(root: &Dir, path: &str, write: bool) -> Result<File, FileError> {
    let mut options = OpenOptions::new();
    options.read(true).write(write).custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
    let file = root.open_with(path, &options).map_err(|e| io_error(path, &e))?;
    let meta = file.metadata().map_err(|e| io_error(path, &e))?;
    if !meta.is_file() {
        return Err(FileError::NotAFile(path.to_owned()));
    }
    Ok(file)
}

/// Returns the state of a file below a directory.
pub(crate) fn file_fact(root: &Dir, path: &str) -> FileFact {
    match open_regular_file(root, path, false).and_then(|mut file| read_all(&mut file, path)) {
        Ok(content) => FileFact::Present(Digest::of(&content)),
        Err(FileError::NotFound(_)) => FileFact::Absent,
        Err(error) => FileFact::Unreadable(error.to_string()),
    }
}

impl Inner {
    pub(super) fn open(&self, path: &str, write: bool) -> Result<File, FileError> {
        open_regular_file(&self.root, path, write)
    }

    /// Leaves the file unchanged and marks the entry as a conflict.
    fn mark_conflict(&self, entry: &UndoEntry) -> Result<(), FileError> {
        let path = entry.undo.path.clone();
        match fs::rename(&entry.file, entry.file.with_extension("conflict")) {
            Ok(()) => Err(FileError::Io(
                path,
                "cannot undo the change: another process has changed the file".to_owned(),
            )),
            Err(e) => Err(FileError::Io(path, format!("cannot undo the change: {e}"))),
        }
    }

    /// Undoes a change and deletes its entry.
    ///
    /// If the content is neither the old nor the new one, nor a prefix of one of them, another
    /// process has changed the file. Then the file stays, and the entry is kept as `.conflict`.
    pub(super) fn undo(&self, entry: &UndoEntry) -> Result<(), FileError> {
        let undo = &entry.undo;
        let fail =
            |e: io::Error| FileError::Io(undo.path.clone(), format!("cannot undo the change: {e}"));
        let current = match self.open(&undo.path, true) {
            Ok(mut file) => match read_all(&mut file, &undo.path) {
                Ok(content) => Some((content, file)),
                Err(_) => return self.mark_conflict(entry),
            },
            Err(FileError::NotFound(_)) => None,
            // Another process has replaced the regular file.
            Err(_) => return self.mark_conflict(entry),
        };
        let is_own_content = match &current {
            Some((content, _)) => {
                (undo.old.is_some() && entry.old.starts_with(content))
                    || (undo.new.is_some() && entry.new.starts_with(content))
            }
            None => undo.old.is_none() || undo.new.is_none(),
        };
        if !is_own_content {
            return self.mark_conflict(entry);
        }
        match (undo.old.is_some(), current) {
            (true, current) => {
                let mut file = match current {
                    Some((_, file)) => file,
                    None => {
                        // Restrict access until content and permissions are restored.
                        let mode = if undo.mode.is_some() { 0o600 } else { 0o666 };
                        self.root
                            .open_with(
                                &undo.path,
                                OpenOptions::new().write(true).create_new(true).mode(mode),
                            )
                            .map_err(fail)?
                    }
                };
                overwrite(&mut file, &entry.old).map_err(fail)?;
                if let Some(mode) = undo.mode {
                    file.set_permissions(Permissions::from_mode(mode)).map_err(fail)?;
                }
            }
            (false, Some(_)) => self.root.remove_file(&undo.path).map_err(fail)?,
            (false, None) => {}
        }
        for directory in undo.made.iter().rev() {
            // Removing a directory that is not empty fails, so directories in use stay.
            let _ = self.root.remove_dir(directory);
        }
        fs::remove_file(&entry.file).map_err(fail)
    }
}

fn read_all(file: &mut File, path: &str) -> Result<Vec<u8>, FileError> {
    let mut content = Vec::new();
    file.seek(io::SeekFrom::Start(0)).map_err(|e| io_error(path, &e))?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut content).map_err(|e| io_error(path, &e))?;
    if content.len() as u64 > MAX_FILE_BYTES {
        return Err(FileError::TooLarge(path.to_owned(), MAX_FILE_BYTES));
    }
    Ok(content)
}

fn overwrite(file: &mut File, content: &[u8]) -> io::Result<()> {
    file.seek(io::SeekFrom::Start(0))?;
    file.set_len(0)?;
    file.write_all(content)?;
    file.sync_data()
}

impl FileSystem for HostFs {
    fn fact(&self, path: &str) -> FileFact {
        file_fact(&self.0.root, path)
    }

    fn begin(&self, call: CallId, expectations: Vec<FileExpectation>) -> Box<dyn FileTransaction> {
        Box::new(HostFileTransaction {
            fs: Arc::clone(&self.0),
            call,
            expectations,
            undo_entries: Vec::new(),
        })
    }
}

struct HostFileTransaction {
    fs: Arc<Inner>,
    call: CallId,
    expectations: Vec<FileExpectation>,
    /// The undo entries, oldest first.
    undo_entries: Vec<UndoEntry>,
}

impl HostFileTransaction {
    fn lock_name(&self, name: String, path: &str) -> Result<(), FileError> {
        let mut writing = crate::lock(&self.fs.locked_paths);
        match writing.get(&name) {
            Some(by) if *by != self.call => Err(FileError::Busy(path.to_owned())),
            _ => {
                writing.insert(name, self.call);
                Ok(())
            }
        }
    }

    /// Locks the path, and the inode of an existing file, because a hard link is a second path.
    fn lock_path(&self, path: &str, file: Option<&File>) -> Result<(), FileError> {
        self.lock_name(path.to_owned(), path)?;
        if let Some(file) = file {
            let meta = file.metadata().map_err(|e| io_error(path, &e))?;
            self.lock_name(format!("\0{}:{}", meta.dev(), meta.ino()), path)?;
        }
        Ok(())
    }

    fn is_first_change(&self, path: &str) -> bool {
        !self.undo_entries.iter().any(|entry| entry.undo.path == path)
    }

    /// Writes an undo entry before the change.
    fn write_undo_entry(
        &mut self,
        path: &str,
        old: Option<Vec<u8>>,
        new: Option<&[u8]>,
        created: Vec<String>,
        mode: Option<u32>,
    ) -> Result<(), FileError> {
        let undo = UndoHeader {
            call: self.call,
            path: path.to_owned(),
            old: old.as_ref().map(Vec::len),
            new: new.map(<[u8]>::len),
            made: created,
            mode,
        };
        let file =
            self.fs.journal.join(format!("{}.{:06}.undo", self.call, self.undo_entries.len()));
        let entry = UndoEntry {
            undo,
            old: old.unwrap_or_default(),
            new: new.unwrap_or_default().to_vec(),
            file,
        };
        entry.write(&self.fs.journal).map_err(|e| {
            FileError::Io(path.to_owned(), format!("cannot write the undo journal: {e}"))
        })?;
        self.undo_entries.push(entry);
        Ok(())
    }

    /// Undoes the failed change of the last entry at once.
    fn undo_last_change<T>(&mut self, error: FileError) -> Result<T, FileError> {
        if let Some(entry) = self.undo_entries.pop()
            && let Err(undo_error) = self.fs.undo(&entry)
        {
            tracing::error!(call = %self.call, error = %undo_error, "cannot undo a failed change");
            self.undo_entries.push(entry);
        }
        Err(error)
    }

    fn create_parents(&self, path: &str) -> Result<Vec<String>, FileError> {
        let mut created = Vec::new();
        let parts: Vec<&str> = path.split('/').collect();
        for end in 1..parts.len() {
            let parent = parts.iter().take(end).copied().collect::<Vec<_>>().join("/");
            match self.fs.root.create_dir(&parent) {
                Ok(()) => created.push(parent),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(io_error(path, &e)),
            }
        }
        Ok(created)
    }

    fn unlock_paths(&self) {
        crate::lock(&self.fs.locked_paths).retain(|_, by| *by != self.call);
    }
}

impl FileTransaction for HostFileTransaction {
    fn read(&mut self, path: &str) -> Result<Vec<u8>, FileError> {
        let path = normalize_path(path)?;
        read_all(&mut self.fs.open(&path, false)?, &path)
    }

    fn write(&mut self, path: &str, content: &[u8]) -> Result<(), FileError> {
        let path = normalize_path(path)?;
        if content.len() as u64 > MAX_FILE_BYTES {
            return Err(FileError::TooLarge(path, MAX_FILE_BYTES));
        }
        match self.fs.open(&path, true) {
            Ok(mut file) => {
                self.lock_path(&path, Some(&file))?;
                let old = read_all(&mut file, &path)?;
                if self.is_first_change(&path) {
                    FileExpectation::check_content(
                        &self.expectations,
                        &path,
                        Some(Digest::of(&old)),
                    )?;
                }
                // Write through the checked handle, so that replacing the path has no effect.
                self.write_undo_entry(&path, Some(old), Some(content), Vec::new(), None)?;
                overwrite(&mut file, content)
                    .or_else(|e| self.undo_last_change(io_error(&path, &e)))
            }
            Err(FileError::NotFound(_)) => {
                self.lock_path(&path, None)?;
                if self.is_first_change(&path) {
                    FileExpectation::check_content(&self.expectations, &path, None)?;
                }
                let created = self.create_parents(&path)?;
                self.write_undo_entry(&path, None, Some(content), created, None)?;
                match self.fs.root.open_with(&path, OpenOptions::new().write(true).create_new(true))
                {
                    Ok(mut file) => overwrite(&mut file, content)
                        .or_else(|e| self.undo_last_change(io_error(&path, &e))),
                    // Another process created the file first, so there is nothing to undo.
                    Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                        if let Some(entry) = self.undo_entries.pop() {
                            let _ = fs::remove_file(&entry.file);
                        }
                        Err(FileError::CreatedMeanwhile(path))
                    }
                    Err(e) => self.undo_last_change(io_error(&path, &e)),
                }
            }
            Err(error) => Err(error),
        }
    }

    fn remove(&mut self, path: &str) -> Result<(), FileError> {
        let path = normalize_path(path)?;
        let link =
            self.fs.root.symlink_metadata(&path).map_err(|e| io_error(&path, &e))?.is_symlink();
        let mut file = self.fs.open(&path, false)?;
        if link {
            return Err(FileError::NotAFile(path));
        }
        self.lock_path(&path, Some(&file))?;
        let old = read_all(&mut file, &path)?;
        if self.is_first_change(&path) {
            FileExpectation::check_content(&self.expectations, &path, Some(Digest::of(&old)))?;
        }
        let mode = file.metadata().map_err(|e| io_error(&path, &e))?.mode() & 0o777;
        self.write_undo_entry(&path, Some(old), None, Vec::new(), Some(mode))?;
        self.fs.root.remove_file(&path).or_else(|e| self.undo_last_change(io_error(&path, &e)))
    }

    fn list(&mut self, below: &str, max: usize) -> Result<Vec<String>, FileError> {
        let start =
            if below.is_empty() || below == "." { String::new() } else { normalize_path(below)? };
        let (mut found, mut todo) = (Vec::new(), vec![start.clone()]);
        while let Some(dir) = todo.pop() {
            let dir_path = if dir.is_empty() { "." } else { dir.as_str() };
            let entries = match self.fs.root.read_dir(dir_path) {
                Ok(entries) => entries,
                // Skip a directory that is not readable or was removed in the meantime.
                Err(e)
                    if dir != start
                        && matches!(
                            e.kind(),
                            io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound
                        ) =>
                {
                    continue;
                }
                Err(e) => return Err(io_error(dir_path, &e)),
            };
            for entry in entries {
                let entry = entry.map_err(|e| io_error(dir_path, &e))?;
                // A path argument cannot contain a name that is not UTF-8.
                let Ok(name) = entry.file_name().into_string() else { continue };
                let path = if dir.is_empty() { name } else { format!("{dir}/{name}") };
                // Do not follow links, so that each directory is listed once.
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => todo.push(path),
                    Ok(kind) if kind.is_file() => found.push(path),
                    _ => {}
                }
            }
            // Stop early in a huge tree: there are enough names to sort and truncate.
            if found.len() > max.saturating_mul(4).max(10_000) {
                break;
            }
        }
        found.sort();
        found.truncate(max);
        Ok(found)
    }

    fn commit(&mut self) -> Result<(), FileError> {
        let entries = std::mem::take(&mut self.undo_entries);
        self.unlock_paths();
        // Delete the oldest entry last: a remaining entry never depends on a deleted newer one.
        entries.iter().rev().try_for_each(|entry| {
            fs::remove_file(&entry.file).map_err(|e| {
                FileError::Io(entry.undo.path.clone(), format!("cannot delete the undo entry: {e}"))
            })
        })
    }

    fn rollback(&mut self) -> Result<(), FileError> {
        let mut first_error = None;
        for entry in std::mem::take(&mut self.undo_entries).into_iter().rev() {
            if let Err(error) = self.fs.undo(&entry) {
                first_error = first_error.or(Some(error));
            }
        }
        self.unlock_paths();
        first_error.map_or(Ok(()), Err)
    }
}

impl Drop for HostFileTransaction {
    fn drop(&mut self) {
        if let Err(error) = self.rollback() {
            tracing::error!(call = %self.call, %error, "cannot roll back a file");
        }
    }
}
