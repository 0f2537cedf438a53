//! Stores ledger rows in a file while the store is unavailable.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::{FlockOperation, flock};

use crate::call::CallId;
use crate::ledger::row::Row;
use crate::store::{RejectedRow, StoreError};
use toolgate_json::Digest;

pub(crate) struct Spool {
    /// The directory shared with the spools of other processes.
    shared_directory: Option<PathBuf>,
    path: PathBuf,
    file: Mutex<Option<File>>,
    /// Rows that could not be written to a file, for example because the disk is full. Lost at
    /// process exit.
    memory_rows: Mutex<Vec<Arc<Row>>>,
    is_waiting: AtomicBool,
    /// Number of rows at the start of the file that the store has already, as far as this process
    /// knows.
    stored_rows: AtomicUsize,
    /// Held by the task that appends rows to the store. Contains the number of the last failed
    /// attempt and its error.
    pub(crate) drain_lock: tokio::sync::Mutex<Option<(u64, StoreError)>>,
    /// Number of attempts that have started.
    pub(crate) drain_attempts: AtomicU64,
}

/// Spools in use. All runtimes of one store share a spool, for example after a configuration
/// reload.
static OPEN_SPOOLS: Mutex<BTreeMap<PathBuf, Weak<Spool>>> = Mutex::new(BTreeMap::new());

/// Maximum number of rows that are kept only in memory.
const MAX_MEMORY_ROWS: usize = 10_000;

/// Rows that were read, and the file length at that time.
pub(crate) struct SpooledRows {
    pub(crate) rows: Vec<Arc<Row>>,
    end: u64,
    /// Number of these rows that were only in memory.
    from_memory: usize,
    /// The error, if some files could not be read.
    pub(crate) read_error: Option<io::Error>,
}

impl Spool {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self {
            shared_directory: None,
            is_waiting: AtomicBool::new(path.exists()),
            path,
            file: Mutex::default(),
            memory_rows: Mutex::default(),
            stored_rows: AtomicUsize::new(0),
            drain_lock: tokio::sync::Mutex::default(),
            drain_attempts: AtomicU64::new(0),
        }
    }

    /// Opens the spool of this owner in a shared directory.
    ///
    /// Rows of processes that have ended are taken over.
    pub(crate) fn open_shared(directory: &Path, owner: &str) -> io::Result<Arc<Self>> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let path = directory.join(format!("{}.jsonl", owner.replace(':', "-")));
        let mut in_use = crate::lock(&OPEN_SPOOLS);
        in_use.retain(|_, spool| spool.strong_count() > 0);
        let spool = match in_use.get(&path).and_then(Weak::upgrade) {
            Some(spool) => spool,
            None => {
                let spool = Arc::new(Self {
                    shared_directory: Some(directory.to_owned()),
                    ..Self::new(path.clone())
                });
                in_use.insert(path, Arc::downgrade(&spool));
                spool
            }
        };
        drop(in_use);
        if !spool.lock_orphaned_files()?.is_empty() {
            spool.is_waiting.store(true, Ordering::Release);
        }
        Ok(spool)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn has_waiting_rows(&self) -> bool {
        self.is_waiting.load(Ordering::Acquire)
    }

    /// Appends a row and syncs it. On error, keeps the row in memory and returns the error.
    pub(crate) fn append_row(&self, row: &Arc<Row>) -> io::Result<()> {
        // The leading line break separates the row from a truncated record before it.
        let mut line = vec![b'\n'];
        line.extend(serde_json::to_vec(&**row)?);
        line.push(b'\n');
        self.append_lines(&mut crate::lock(&self.file), &line).inspect_err(|_| {
            let mut memory_rows = crate::lock(&self.memory_rows);
            if memory_rows.len() < MAX_MEMORY_ROWS {
                memory_rows.push(Arc::clone(row));
                self.is_waiting.store(true, Ordering::Release);
            }
        })
    }

    /// Stores the agent definition that a row refers to.
    ///
    /// Another process may append the row to the ledger, and its own configuration may differ.
    pub(crate) fn save_definition(&self, config: Digest, definition: &str) -> io::Result<()> {
        // The row is in its file already, so a concurrent `delete_unused_definitions` finds that
        // the definition is needed.
        let _lock = self.lock_shared()?;
        let Some(path) = self.definition_path(config).filter(|path| !path.exists()) else {
            return Ok(());
        };
        // A partial agent does not have the full definition.
        if Digest::of(definition.as_bytes()) != config {
            return Ok(());
        }
        let draft = path.with_extension(CallId::generate().to_string());
        let write = || -> io::Result<()> {
            let mut file = private_open_options().create_new(true).write(true).open(&draft)?;
            file.write_all(definition.as_bytes())?;
            file.sync_data()?;
            std::fs::rename(&draft, &path)
        };
        write().inspect_err(|_| drop(std::fs::remove_file(&draft)))
    }

    /// Reads a stored definition.
    pub(crate) fn load_definition(&self, config: Digest) -> Option<Arc<str>> {
        let text = std::fs::read_to_string(self.definition_path(config)?).ok()?;
        (Digest::of(text.as_bytes()) == config).then(|| text.into())
    }

    fn definition_path(&self, config: Digest) -> Option<PathBuf> {
        Some(self.shared_directory.as_ref()?.join(format!("{config}.definition")))
    }

    /// Locks the directory so that no process deletes definitions.
    fn lock_shared(&self) -> io::Result<Option<DirectoryLock>> {
        self.shared_directory
            .as_ref()
            .map(|directory| DirectoryLock::new(directory, FlockOperation::LockShared))
            .transpose()
    }

    /// Deletes the definitions that no row of any process needs.
    ///
    /// Does nothing if another process stores a definition or takes over rows, or if a file cannot
    /// be read.
    pub(crate) fn delete_unused_definitions(&self) -> io::Result<()> {
        let Some(directory) = &self.shared_directory else { return Ok(()) };
        let _lock = DirectoryLock::new(directory, FlockOperation::NonBlockingLockExclusive)?;
        let (mut definitions, mut needed) = (Vec::new(), BTreeSet::new());
        needed.extend(
            crate::lock(&self.memory_rows)
                .iter()
                .filter_map(|row| self.definition_path(row.config)),
        );
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            let is = |ending: &str| path.extension().is_some_and(|extension| extension == ending);
            if is("jsonl") {
                for line in std::fs::read(&path)?
                    .split(|byte| *byte == b'\n')
                    .filter(|line| !line.is_empty())
                {
                    needed
                        .extend(self.definition_path(serde_json::from_slice::<Row>(line)?.config));
                }
            } else if is("definition") {
                definitions.push(path);
            }
        }
        definitions.iter().filter(|path| !needed.contains(*path)).try_for_each(std::fs::remove_file)
    }

    fn append_lines(&self, guard: &mut Option<File>, lines: &[u8]) -> io::Result<()> {
        let mut file = self.open_file(guard)?;
        let before = file.metadata()?.len();
        if let Err(error) = file.write_all(lines).and_then(|()| file.sync_data()) {
            // Remove the partial row, and an empty file too.
            let _ = file.set_len(before);
            if before == 0 && std::fs::remove_file(&self.path).is_ok() {
                *guard = None;
            }
            return Err(error);
        }
        self.is_waiting.store(true, Ordering::Release);
        Ok(())
    }

    /// Opens, creates and locks the file.
    ///
    /// In a shared directory, the lock is held until the process exits, which shows that the
    /// process is alive. A separate file may be shared, so its lock ends with the returned file.
    fn open_file(&self, guard: &mut Option<File>) -> io::Result<File> {
        if let Some(file) = guard.as_ref() {
            return file.try_clone();
        }
        if self.shared_directory.is_none() {
            loop {
                let file =
                    private_open_options().read(true).append(true).create(true).open(&self.path)?;
                flock(&file, FlockOperation::LockExclusive)?;
                // Another process may have removed the file in the meantime.
                if is_file_at(&file, &self.path) {
                    return Ok(file);
                }
            }
        }
        let file = match self.open_existing_file()? {
            Some(file) => file,
            None => self.create_file()?,
        };
        *guard = Some(file.try_clone()?);
        Ok(file)
    }

    /// Opens and locks the file of an earlier runtime of the same store. Returns `None` if another
    /// process has just taken it over.
    fn open_existing_file(&self) -> io::Result<Option<File>> {
        let file = match private_open_options().read(true).append(true).open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(is_file_at(&file, &self.path).then_some(file))
    }

    fn create_file(&self) -> io::Result<File> {
        // The file is locked before it gets its visible name.
        let draft = self.path.with_extension("new");
        let file = private_open_options().read(true).append(true).create(true).open(&draft)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        std::fs::rename(&draft, &self.path)?;
        if let Some(directory) = self.path.parent() {
            File::open(directory)?.sync_all()?;
        }
        Ok(file)
    }

    /// Returns the locked spools of processes that have ended.
    fn lock_orphaned_files(&self) -> io::Result<Vec<(PathBuf, File)>> {
        let Some(directory) = &self.shared_directory else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "jsonl") || path == self.path {
                continue;
            }
            let Ok(file) = File::open(&path) else { continue };
            let locked = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
            // Another process may have removed the file first.
            if locked && is_file_at(&file, &path) {
                found.push((path, file));
            }
        }
        Ok(found)
    }

    /// Returns the first row that the store may not have, and the number of rows before it.
    ///
    /// Reads no further than that row. Rows of ended processes come after the rows of the own file.
    pub(crate) fn first_unstored_row(&self) -> Option<(Arc<Row>, usize)> {
        let known = self.stored_rows.load(Ordering::Relaxed);
        let own_row = File::open(&self.path).ok().and_then(|file| read_nth_row(file, known));
        let row = own_row.or_else(|| {
            self.lock_orphaned_files().ok()?.into_iter().find_map(|(_, file)| read_nth_row(file, 0))
        })?;
        Some((row, known))
    }

    /// Records how many rows of the file the store has.
    pub(crate) fn record_stored_rows(&self, rows: usize) {
        self.stored_rows.fetch_max(rows, Ordering::Relaxed);
    }

    /// Reads the waiting rows and takes over those of ended processes. The rows stay on disk until
    /// [`Spool::remove_stored_rows`].
    pub(crate) fn read_rows(&self) -> io::Result<SpooledRows> {
        let memory_rows = crate::lock(&self.memory_rows).clone();
        match self.read_rows_with(memory_rows.clone()) {
            // Rows in memory must not wait for a file that cannot be read.
            Err(error) if !memory_rows.is_empty() => Ok(SpooledRows {
                from_memory: memory_rows.len(),
                rows: memory_rows,
                end: 0,
                read_error: Some(error),
            }),
            result => result,
        }
    }

    fn read_rows_with(&self, memory_rows: Vec<Arc<Row>>) -> io::Result<SpooledRows> {
        let mut guard = crate::lock(&self.file);
        // Under this lock, `delete_unused_definitions` cannot miss a row that moves between files.
        let _lock = self.lock_shared()?;
        for (path, mut file) in self.lock_orphaned_files()? {
            let mut lines = Vec::new();
            file.read_to_end(&mut lines)?;
            self.append_lines(&mut guard, &lines)?;
            std::fs::remove_file(&path)?;
        }
        if guard.is_none() && !self.path.exists() {
            return Ok(SpooledRows {
                from_memory: memory_rows.len(),
                rows: memory_rows,
                end: 0,
                read_error: None,
            });
        }
        let mut file = self.open_file(&mut guard)?;
        let mut text = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        file.read_to_end(&mut text)?;
        let (mut rows, mut has_unreadable): (Vec<Arc<Row>>, bool) = (Vec::new(), false);
        for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            match serde_json::from_slice::<Row>(line) {
                Ok(row) => rows.push(Arc::new(row)),
                Err(_) => has_unreadable = true,
            }
        }
        if has_unreadable {
            // Keep a copy for a person. The record may have been truncated by a crash.
            let copy = self.path.with_extension(format!("{}.spoilt", CallId::generate()));
            private_open_options().create_new(true).write(true).open(&copy)?.write_all(&text)?;
            // Rewrite the file with the readable rows, so that the error is reported only once.
            let mut good = Vec::new();
            for row in &rows {
                good.extend(serde_json::to_vec(&**row)?);
                good.push(b'\n');
            }
            file.set_len(0)?;
            file.write_all(&good)?;
            file.sync_data()?;
            text = good;
            tracing::error!(path = %copy.display(), "cannot read a spooled row; its file was copied");
        }
        let from_memory = memory_rows.len();
        rows.extend(memory_rows);
        Ok(SpooledRows { rows, end: text.len() as u64, from_memory, read_error: None })
    }

    /// Saves the rows that the store can never accept to separate files.
    pub(crate) fn save_rejected_rows(
        &self,
        spooled: &SpooledRows,
        rejected: &[RejectedRow],
    ) -> io::Result<()> {
        for RejectedRow { call, reason: why } in rejected {
            let Some(row) = spooled.rows.iter().find(|row| row.call == *call) else { continue };
            // Named after the call, so that a row that is read again is saved only once.
            let copy = self.path.with_extension(format!("{call}.spoilt"));
            let mut file =
                private_open_options().create(true).truncate(true).write(true).open(&copy)?;
            file.write_all(&serde_json::to_vec(&**row)?)?;
            file.sync_data()?;
            tracing::error!(%call, %why, path = %copy.display(), "the store rejected a spooled row permanently; it was moved to a separate file");
        }
        Ok(())
    }

    /// Removes the rows that are in the store now.
    ///
    /// If the file has grown, it stays, and the next read starts with the same rows, which the
    /// store knows.
    pub(crate) fn remove_stored_rows(&self, spooled: &SpooledRows) -> io::Result<()> {
        let mut guard = crate::lock(&self.file);
        let is_held = {
            let mut memory_rows = crate::lock(&self.memory_rows);
            let count = spooled.from_memory.min(memory_rows.len());
            memory_rows.drain(..count);
            !memory_rows.is_empty()
        };
        if self.path.exists() {
            let file = self.open_file(&mut guard)?;
            if file.metadata()?.len() > spooled.end {
                self.stored_rows.store(
                    spooled.rows.len().saturating_sub(spooled.from_memory),
                    Ordering::Relaxed,
                );
                return Ok(());
            }
            std::fs::remove_file(&self.path)?;
            *guard = None;
        }
        self.stored_rows.store(0, Ordering::Relaxed);
        self.is_waiting.store(
            is_held || spooled.read_error.is_some() || self.path.exists(),
            Ordering::Release,
        );
        Ok(())
    }
}

/// Reads the n-th row of a file, and nothing after it.
fn read_nth_row(file: File, n: usize) -> Option<Arc<Row>> {
    let lines = io::BufReader::new(file).split(b'\n').map_while(Result::ok);
    let line = lines.filter(|line| !line.is_empty()).nth(n)?;
    serde_json::from_slice(&line).ok().map(Arc::new)
}

/// Reports whether this file still has this path.
fn is_file_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let inode = |metadata: io::Result<std::fs::Metadata>| {
        metadata.ok().map(|metadata| (metadata.dev(), metadata.ino()))
    };
    let file_inode = inode(file.metadata());
    file_inode.is_some() && file_inode == inode(std::fs::metadata(path))
}

fn private_open_options() -> OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = OpenOptions::new();
    options.mode(0o600).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    options
}

/// A locked directory.
///
/// Unlocks explicitly on drop: a child process that is just starting may still have a copy of the
/// descriptor, which would keep the lock.
struct DirectoryLock(File);

impl DirectoryLock {
    fn new(directory: &Path, how: FlockOperation) -> io::Result<Self> {
        let directory = File::open(directory)?;
        flock(&directory, how)?;
        Ok(Self(directory))
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needed_definitions_are_not_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let (first, second) = (
            Spool::open_shared(directory.path(), "one").unwrap(),
            Spool::open_shared(directory.path(), "two").unwrap(),
        );
        let config = Digest::of(b"{}");
        first.save_definition(config, "{}").unwrap();
        let lock = second.lock_shared().unwrap();
        assert!(
            first.delete_unused_definitions().is_err() && second.load_definition(config).is_some()
        );
        drop(lock);
        // An incomplete line may refer to any definition.
        std::fs::write(directory.path().join("three.jsonl"), "{").unwrap();
        assert!(
            first.delete_unused_definitions().is_err() && second.load_definition(config).is_some()
        );
        std::fs::remove_file(directory.path().join("three.jsonl")).unwrap();
        first.delete_unused_definitions().unwrap();
        assert!(second.load_definition(config).is_none());
        second.save_definition(config, "{}").unwrap();
        assert!(first.load_definition(config).is_some());
    }
}
