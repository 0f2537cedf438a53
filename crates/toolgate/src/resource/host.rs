//! Files of the host below one directory that no path, link or race escapes, with an undo journal.
//!
//! Every access goes through a handle of the directory (`cap-std`), so the kernel resolves each part
//! of a path below it. A change is written to the journal, synced, and only then made; it is undone
//! from the journal, also by the next process if this one dies.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use cap_std::ambient_authority;
use cap_std::fs::{Dir, File, MetadataExt, OpenOptions, OpenOptionsExt};
use serde::{Deserialize, Serialize};

use super::{Expect, FileError, FileSystem, FileTxn, normal_path};
use crate::call::CallId;
use crate::json::Digest;
use crate::policy::FileFact;

/// Largest file that is read or written.
const MOST: u64 = 16 << 20;

/// A directory of the host.
#[derive(Clone)]
pub struct HostFs(Arc<Inner>);

struct Inner {
    root: Dir,
    journal: PathBuf,
    /// Held as long as the journal is ours.
    _lock: fs::File,
    writing: Mutex<HashMap<String, CallId>>,
}

/// One undo entry: this header as a line of JSON, then what was there.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Undo {
    call: CallId,
    path: String,
    /// The file was there, and its content follows; else what this call writes follows, and the
    /// file is removed again only if that, or the beginning of it, is what it holds.
    existed: bool,
    /// Directories made for it, outermost first.
    made: Vec<String>,
}

impl HostFs {
    /// Opens a directory, with a journal outside it, and undoes what a process that died had begun.
    /// `committed` says of a call whether it was recorded as a success: those are kept.
    ///
    /// # Errors
    /// The directory or journal cannot be opened, another process has the journal, or it lies inside the directory.
    pub fn open(root: impl AsRef<Path>, journal: impl AsRef<Path>, committed: impl Fn(CallId) -> bool) -> io::Result<Self> {
        fs::create_dir_all(journal.as_ref())?;
        let (root, journal) = (root.as_ref().canonicalize()?, journal.as_ref().canonicalize()?);
        if journal.starts_with(&root) {
            return Err(io::Error::other(format!("the journal {} must lie outside {}", journal.display(), root.display())));
        }
        let lock = fs::File::create(journal.join("lock"))?;
        lock.try_lock().map_err(|e| io::Error::other(format!("another process has the journal {}: {e}", journal.display())))?;
        let root = Dir::open_ambient_dir(&root, ambient_authority())?;
        let this = Self(Arc::new(Inner { root, journal, _lock: lock, writing: Mutex::default() }));
        this.recover(committed)?;
        Ok(this)
    }

    fn recover(&self, committed: impl Fn(CallId) -> bool) -> io::Result<()> {
        let mut entries: Vec<PathBuf> = fs::read_dir(&self.0.journal)?.filter_map(|e| e.ok().map(|e| e.path())).collect();
        entries.sort();
        // Newest first, so that the oldest content of a file is what stays.
        for entry in entries.into_iter().rev().filter(|path| path.extension().is_some_and(|e| e == "undo")) {
            let bytes = fs::read(&entry)?;
            // A header that was cut off belongs to a change that was never made.
            if let Some((undo, old)) = split_entry(&bytes)
                && !committed(undo.call)
                && let Err(error) = self.0.undo(&undo, old)
            {
                tracing::error!(%error, entry = %entry.display(), "an unfinished change could not be undone; its entry is kept as .conflict");
                fs::rename(&entry, entry.with_extension("conflict"))?;
                continue;
            }
            fs::remove_file(&entry)?;
        }
        Ok(())
    }
}

fn split_entry(bytes: &[u8]) -> Option<(Undo, &[u8])> {
    let end = bytes.iter().position(|b| *b == b'\n')?;
    let (header, rest) = bytes.split_at(end);
    Some((serde_json::from_slice(header).ok()?, rest.get(1..)?))
}

fn io_error(path: &str, error: &io::Error) -> FileError {
    match error.kind() {
        io::ErrorKind::NotFound => FileError::Missing(path.to_owned()),
        // What cap-std says of a path or link that leads outside.
        io::ErrorKind::PermissionDenied if error.raw_os_error().is_none() => FileError::Escapes(path.to_owned()),
        _ if error.raw_os_error() == Some(rustix::io::Errno::XDEV.raw_os_error()) => FileError::Escapes(path.to_owned()),
        io::ErrorKind::IsADirectory => FileError::NotAFile(path.to_owned()),
        _ => FileError::Io(path.to_owned(), error.to_string()),
    }
}

impl Inner {
    /// Opens a regular file. Never waits, as opening a pipe would.
    fn open(&self, path: &str, write: bool) -> Result<File, FileError> {
        let mut options = OpenOptions::new();
        options.read(true).write(write).custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
        let file = self.root.open_with(path, &options).map_err(|e| io_error(path, &e))?;
        let meta = file.metadata().map_err(|e| io_error(path, &e))?;
        if !meta.is_file() {
            return Err(FileError::NotAFile(path.to_owned()));
        }
        Ok(file)
    }

    fn undo(&self, undo: &Undo, kept: &[u8]) -> Result<(), FileError> {
        let fail = |e: io::Error| FileError::Io(undo.path.clone(), format!("could not be undone: {e}"));
        match (undo.existed, self.open(&undo.path, true)) {
            (true, Ok(mut file)) => overwrite(&mut file, kept).map_err(fail)?,
            (true, Err(FileError::Missing(_))) => {
                let mut file = self.root.open_with(&undo.path, OpenOptions::new().write(true).create_new(true)).map_err(fail)?;
                overwrite(&mut file, kept).map_err(fail)?;
            }
            (false, Ok(mut file)) => {
                if !kept.starts_with(&read_all(&mut file, &undo.path)?) {
                    return Err(FileError::Io(undo.path.clone(), "could not be undone: somebody else has changed it".to_owned()));
                }
                self.root.remove_file(&undo.path).map_err(fail)?;
            }
            (false, Err(FileError::Missing(_))) => {}
            (_, Err(error)) => return Err(error),
        }
        for made in undo.made.iter().rev() {
            // A directory that others use by now stays.
            let _ = self.root.remove_dir(made);
        }
        Ok(())
    }
}

fn read_all(file: &mut File, path: &str) -> Result<Vec<u8>, FileError> {
    let mut content = Vec::new();
    file.seek(io::SeekFrom::Start(0)).map_err(|e| io_error(path, &e))?;
    file.take(MOST + 1).read_to_end(&mut content).map_err(|e| io_error(path, &e))?;
    if content.len() as u64 > MOST {
        return Err(FileError::TooLarge(path.to_owned(), MOST));
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
        match self.0.open(path, false).and_then(|mut file| read_all(&mut file, path)) {
            Ok(content) => FileFact::Present(Digest::of(&content)),
            Err(FileError::Missing(_)) => FileFact::Absent,
            Err(error) => FileFact::Unreadable(error.to_string()),
        }
    }

    fn begin(&self, call: CallId, expects: Vec<Expect>) -> Box<dyn FileTxn> {
        Box::new(Txn { fs: Arc::clone(&self.0), call, expects, undo: Vec::new() })
    }
}

struct Txn {
    fs: Arc<Inner>,
    call: CallId,
    expects: Vec<Expect>,
    /// What to undo, oldest first: the entry, what was there, and where the journal keeps it.
    undo: Vec<(Undo, Vec<u8>, PathBuf)>,
}

impl Txn {
    fn hold(&self, name: String, path: &str) -> Result<(), FileError> {
        let mut writing = crate::lock(&self.fs.writing);
        match writing.get(&name) {
            Some(by) if *by != self.call => Err(FileError::Busy(path.to_owned())),
            _ => {
                writing.insert(name, self.call);
                Ok(())
            }
        }
    }

    /// Holds the path, and the file itself where there is one: a second name for it is the same file.
    fn claim(&self, path: &str, file: Option<&File>) -> Result<(), FileError> {
        self.hold(path.to_owned(), path)?;
        if let Some(file) = file {
            let meta = file.metadata().map_err(|e| io_error(path, &e))?;
            self.hold(format!("\0{}:{}", meta.dev(), meta.ino()), path)?;
        }
        Ok(())
    }

    fn is_first(&self, path: &str) -> bool {
        !self.undo.iter().any(|(undo, ..)| undo.path == path)
    }

    /// The journal knows what was there before anything changes.
    fn journal(&mut self, undo: Undo, old: Vec<u8>) -> Result<(), FileError> {
        let entry = self.fs.journal.join(format!("{}.{:06}.undo", self.call, self.undo.len()));
        let write = || -> io::Result<()> {
            let mut file = fs::File::create_new(&entry)?;
            file.write_all(&serde_json::to_vec(&undo)?)?;
            file.write_all(b"\n")?;
            file.write_all(&old)?;
            file.sync_all()?;
            fs::File::open(&self.fs.journal)?.sync_all()
        };
        write().map_err(|e| FileError::Io(undo.path.clone(), format!("the undo journal cannot be written: {e}")))?;
        self.undo.push((undo, old, entry));
        Ok(())
    }

    /// The change of the last entry was not made after all.
    fn forget_last(&mut self) {
        if let Some((undo, _, entry)) = self.undo.pop() {
            let _ = fs::remove_file(entry);
            for made in undo.made.iter().rev() {
                let _ = self.fs.root.remove_dir(made);
            }
        }
    }

    fn make_parents(&self, path: &str) -> Result<Vec<String>, FileError> {
        let mut made = Vec::new();
        let parts: Vec<&str> = path.split('/').collect();
        for end in 1..parts.len() {
            let parent = parts.iter().take(end).copied().collect::<Vec<_>>().join("/");
            match self.fs.root.create_dir(&parent) {
                Ok(()) => made.push(parent),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(io_error(path, &e)),
            }
        }
        Ok(made)
    }

    fn release(&self) {
        crate::lock(&self.fs.writing).retain(|_, by| *by != self.call);
    }
}

impl FileTxn for Txn {
    fn read(&mut self, path: &str) -> Result<Vec<u8>, FileError> {
        let path = normal_path(path)?;
        read_all(&mut self.fs.open(&path, false)?, &path)
    }

    fn write(&mut self, path: &str, content: &[u8]) -> Result<(), FileError> {
        let path = normal_path(path)?;
        if content.len() as u64 > MOST {
            return Err(FileError::TooLarge(path, MOST));
        }
        match self.fs.open(&path, true) {
            Ok(mut file) => {
                self.claim(&path, Some(&file))?;
                let old = read_all(&mut file, &path)?;
                if self.is_first(&path) {
                    Expect::check(&self.expects, &path, Some(Digest::of(&old)))?;
                }
                // Written through the handle that was compared: no swap of the path in between matters.
                self.journal(Undo { call: self.call, path: path.clone(), existed: true, made: Vec::new() }, old)?;
                overwrite(&mut file, content).map_err(|e| io_error(&path, &e))
            }
            Err(FileError::Missing(_)) => {
                self.claim(&path, None)?;
                if self.is_first(&path) {
                    Expect::check(&self.expects, &path, None)?;
                }
                let made = self.make_parents(&path)?;
                self.journal(Undo { call: self.call, path: path.clone(), existed: false, made }, content.to_vec())?;
                let created = self.fs.root.open_with(&path, OpenOptions::new().write(true).create_new(true));
                let mut file = created.map_err(|e| {
                    self.forget_last();
                    match e.kind() {
                        io::ErrorKind::AlreadyExists => FileError::Appeared(path.clone()),
                        _ => io_error(&path, &e),
                    }
                })?;
                overwrite(&mut file, content).map_err(|e| io_error(&path, &e))
            }
            Err(error) => Err(error),
        }
    }

    fn remove(&mut self, path: &str) -> Result<(), FileError> {
        let path = normal_path(path)?;
        let mut file = self.fs.open(&path, false)?;
        self.claim(&path, Some(&file))?;
        let old = read_all(&mut file, &path)?;
        if self.is_first(&path) {
            Expect::check(&self.expects, &path, Some(Digest::of(&old)))?;
        }
        self.journal(Undo { call: self.call, path: path.clone(), existed: true, made: Vec::new() }, old)?;
        self.fs.root.remove_file(&path).map_err(|e| io_error(&path, &e))
    }

    fn list(&mut self, below: &str, most: usize) -> Result<Vec<String>, FileError> {
        let start = if below.is_empty() || below == "." { String::new() } else { normal_path(below)? };
        let (mut found, mut todo) = (Vec::new(), vec![start]);
        while let Some(dir) = todo.pop() {
            let shown = if dir.is_empty() { "." } else { dir.as_str() };
            let entries = self.fs.root.read_dir(shown).map_err(|e| io_error(shown, &e))?;
            for entry in entries {
                let entry = entry.map_err(|e| io_error(shown, &e))?;
                let name = entry.file_name().to_string_lossy().into_owned();
                let path = if dir.is_empty() { name } else { format!("{dir}/{name}") };
                // Links are not followed: a directory is listed once, under its own name.
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => todo.push(path),
                    Ok(kind) if kind.is_file() => found.push(path),
                    _ => {}
                }
            }
            // Enough to sort and cut; a huge tree is not walked to its end.
            if found.len() > most.saturating_mul(4).max(10_000) {
                break;
            }
        }
        found.sort();
        found.truncate(most);
        Ok(found)
    }

    fn commit(&mut self) -> Result<(), FileError> {
        for (undo, _, entry) in std::mem::take(&mut self.undo) {
            fs::remove_file(&entry).map_err(|e| FileError::Io(undo.path, format!("its undo journal stays behind: {e}")))?;
        }
        self.release();
        Ok(())
    }

    fn rollback(&mut self) -> Result<(), FileError> {
        let mut first_error = None;
        for (undo, old, entry) in std::mem::take(&mut self.undo).into_iter().rev() {
            match self.fs.undo(&undo, &old) {
                Ok(()) => {
                    let _ = fs::remove_file(&entry);
                }
                // The entry stays for the next start.
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        self.release();
        first_error.map_or(Ok(()), Err)
    }
}

impl Drop for Txn {
    fn drop(&mut self) {
        if let Err(error) = self.rollback() {
            tracing::error!(call = %self.call, %error, "a file could not be rolled back");
        }
    }
}
