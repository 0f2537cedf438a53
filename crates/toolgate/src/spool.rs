//! Rows that the store could not take wait in a file until it can.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::{FlockOperation, flock};

use crate::call::CallId;
use crate::json::Digest;
use crate::ledger::Row;
use crate::store::{StoreError, Unfit};

pub(crate) struct Spool {
    /// The directory that it shares with the spools of other processes.
    among: Option<PathBuf>,
    path: PathBuf,
    file: Mutex<Option<File>>,
    /// What no file could take either, as when the disk is full: kept as long as the process lives.
    held: Mutex<Vec<Arc<Row>>>,
    waiting: AtomicBool,
    /// How many rows at the beginning of the file the store has already, as far as is known here.
    known: AtomicUsize,
    /// One at a time takes rows in: the last that could not, and why.
    pub(crate) taking: tokio::sync::Mutex<Option<(u64, StoreError)>>,
    /// How many have begun to.
    pub(crate) tries: AtomicU64,
}

/// The spools among others that are in use: the runtimes of one store have one, as when a configuration is read anew.
static IN_USE: Mutex<BTreeMap<PathBuf, Weak<Spool>>> = Mutex::new(BTreeMap::new());

/// Most rows that are kept in memory alone.
const MOST_HELD: usize = 10_000;

/// Rows that were read, and where the file ended then.
pub(crate) struct Taken {
    pub(crate) rows: Vec<Arc<Row>>,
    end: u64,
    /// How many of them were only kept in memory.
    held: usize,
    /// Why these are all, where there are files that could not be read.
    pub(crate) unread: Option<io::Error>,
}

impl Spool {
    pub(crate) fn new(path: PathBuf) -> Self {
        let waiting = AtomicBool::new(path.exists());
        let (file, held, taking) = (Mutex::default(), Mutex::default(), tokio::sync::Mutex::default());
        Self { among: None, path, file, held, waiting, known: AtomicUsize::new(0), taking, tries: AtomicU64::new(0) }
    }

    /// The spool of this owner among those of others. What a process left behind that is gone, is taken over.
    pub(crate) fn among(directory: &Path, owner: &str) -> io::Result<Arc<Self>> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let path = directory.join(format!("{}.jsonl", owner.replace(':', "-")));
        let mut in_use = crate::lock(&IN_USE);
        in_use.retain(|_, spool| spool.strong_count() > 0);
        let spool = match in_use.get(&path).and_then(Weak::upgrade) {
            Some(spool) => spool,
            None => {
                let spool = Arc::new(Self { among: Some(directory.to_owned()), ..Self::new(path.clone()) });
                in_use.insert(path, Arc::downgrade(&spool));
                spool
            }
        };
        drop(in_use);
        if !spool.orphans()?.is_empty() {
            spool.waiting.store(true, Ordering::Release);
        }
        Ok(spool)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// Appends a row and syncs it. One that cannot be appended is kept in memory, and the caller hears why.
    pub(crate) fn put(&self, row: &Arc<Row>) -> io::Result<()> {
        // The line break comes first too: a record that was cut off must not spoil the next.
        let mut line = vec![b'\n'];
        line.extend(serde_json::to_vec(&**row)?);
        line.push(b'\n');
        self.append(&mut crate::lock(&self.file), &line).inspect_err(|_| {
            let mut held = crate::lock(&self.held);
            if held.len() < MOST_HELD {
                held.push(Arc::clone(row));
                self.waiting.store(true, Ordering::Release);
            }
        })
    }

    /// Keeps the definition that a row was decided by, where others may take the row in: they may have another in force.
    pub(crate) fn keep(&self, config: Digest, definition: &str) -> io::Result<()> {
        // The row is in its file by now: whoever takes definitions away sees it, or has done so before.
        let _together = self.together()?;
        let Some(path) = self.definition_at(config).filter(|path| !path.exists()) else { return Ok(()) };
        // Who has only a part of an agent does not have its definition.
        if Digest::of(definition.as_bytes()) != config {
            return Ok(());
        }
        let draft = path.with_extension(CallId::fresh().to_string());
        let write = || -> io::Result<()> {
            let mut file = private().create_new(true).write(true).open(&draft)?;
            file.write_all(definition.as_bytes())?;
            file.sync_data()?;
            std::fs::rename(&draft, &path)
        };
        write().inspect_err(|_| drop(std::fs::remove_file(&draft)))
    }

    /// A definition that somebody has kept.
    pub(crate) fn definition(&self, config: Digest) -> Option<Arc<str>> {
        let text = std::fs::read_to_string(self.definition_at(config)?).ok()?;
        (Digest::of(text.as_bytes()) == config).then(|| text.into())
    }

    fn definition_at(&self, config: Digest) -> Option<PathBuf> {
        Some(self.among.as_ref()?.join(format!("{config}.definition")))
    }

    /// As long as this is held, nobody takes definitions away.
    fn together(&self) -> io::Result<Option<Locked>> {
        self.among.as_ref().map(|directory| Locked::new(directory, FlockOperation::LockShared)).transpose()
    }

    /// Takes away the definitions that no row waits for, of whatever process. Where somebody keeps one or takes rows over just now, or
    /// something cannot be read, they stay for the next time.
    pub(crate) fn sweep(&self) -> io::Result<()> {
        let Some(directory) = &self.among else { return Ok(()) };
        let _alone = Locked::new(directory, FlockOperation::NonBlockingLockExclusive)?;
        let (mut kept, mut needed) = (Vec::new(), BTreeSet::new());
        needed.extend(crate::lock(&self.held).iter().filter_map(|row| self.definition_at(row.config)));
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            let is = |ending: &str| path.extension().is_some_and(|extension| extension == ending);
            if is("jsonl") {
                for line in std::fs::read(&path)?.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                    needed.extend(self.definition_at(serde_json::from_slice::<Row>(line)?.config));
                }
            } else if is("definition") {
                kept.push(path);
            }
        }
        kept.iter().filter(|path| !needed.contains(*path)).try_for_each(std::fs::remove_file)
    }

    fn append(&self, guard: &mut Option<File>, lines: &[u8]) -> io::Result<()> {
        let mut file = self.opened(guard)?;
        let before = file.metadata()?.len();
        if let Err(error) = file.write_all(lines).and_then(|()| file.sync_data()) {
            // Half a row is none, and an empty file nobody's.
            let _ = file.set_len(before);
            if before == 0 && std::fs::remove_file(&self.path).is_ok() {
                *guard = None;
            }
            return Err(error);
        }
        self.waiting.store(true, Ordering::Release);
        Ok(())
    }

    /// The file, made where it is not there, and locked. Among others it stays so as long as the process lives, which tells
    /// them that it does; on its own it may be shared, and is let go with the file that is handed out.
    fn opened(&self, guard: &mut Option<File>) -> io::Result<File> {
        if let Some(own) = guard.as_ref() {
            return own.try_clone();
        }
        if self.among.is_none() {
            loop {
                let file = private().read(true).append(true).create(true).open(&self.path)?;
                flock(&file, FlockOperation::LockExclusive)?;
                // Perhaps another has taken it away meanwhile.
                if is_at(&file, &self.path) {
                    return Ok(file);
                }
            }
        }
        let file = match self.left_before()? {
            Some(file) => file,
            None => self.made()?,
        };
        *guard = Some(file.try_clone()?);
        Ok(file)
    }

    /// What an earlier runtime of the same store has left, locked; nothing where another process has just taken it over.
    fn left_before(&self) -> io::Result<Option<File>> {
        let file = match private().read(true).append(true).open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(is_at(&file, &self.path).then_some(file))
    }

    fn made(&self) -> io::Result<File> {
        // Nobody sees it before it is locked.
        let draft = self.path.with_extension("new");
        let file = private().read(true).append(true).create(true).open(&draft)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        std::fs::rename(&draft, &self.path)?;
        if let Some(directory) = self.path.parent() {
            File::open(directory)?.sync_all()?;
        }
        Ok(file)
    }

    /// The spools of processes that are gone, locked.
    fn orphans(&self) -> io::Result<Vec<(PathBuf, File)>> {
        let Some(directory) = &self.among else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "jsonl") || path == self.path {
                continue;
            }
            let Ok(file) = File::open(&path) else { continue };
            let locked = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
            // Perhaps somebody else was faster, and this is a file without a name.
            if locked && is_at(&file, &path) {
                found.push((path, file));
            }
        }
        Ok(found)
    }

    /// The first row that the store may not have, where that can be told without reading those behind it, and how many stand before it.
    /// What others left behind comes after what is in the file.
    pub(crate) fn first(&self) -> Option<(Arc<Row>, usize)> {
        let known = self.known.load(Ordering::Relaxed);
        let own = File::open(&self.path).ok().and_then(|file| nth_row(file, known));
        let row = own.or_else(|| self.orphans().ok()?.into_iter().find_map(|(_, file)| nth_row(file, 0)))?;
        Some((row, known))
    }

    /// The store has so many rows of the file.
    pub(crate) fn has_stored(&self, rows: usize) {
        self.known.fetch_max(rows, Ordering::Relaxed);
    }

    /// Reads the waiting rows, and those that others left behind. They stay on disk until [`Spool::taken`].
    pub(crate) fn take(&self) -> io::Result<Taken> {
        let held = crate::lock(&self.held).clone();
        match self.take_with(held.clone()) {
            // What is only in memory does not wait for a file that cannot be read.
            Err(error) if !held.is_empty() => Ok(Taken { held: held.len(), rows: held, end: 0, unread: Some(error) }),
            taken => taken,
        }
    }

    fn take_with(&self, held: Vec<Arc<Row>>) -> io::Result<Taken> {
        let mut guard = crate::lock(&self.file);
        // Rows that change their place are seen in one of the two.
        let _together = self.together()?;
        for (path, mut file) in self.orphans()? {
            let mut left = Vec::new();
            file.read_to_end(&mut left)?;
            self.append(&mut guard, &left)?;
            std::fs::remove_file(&path)?;
        }
        if guard.is_none() && !self.path.exists() {
            return Ok(Taken { held: held.len(), rows: held, end: 0, unread: None });
        }
        let mut file = self.opened(&mut guard)?;
        let mut text = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        file.read_to_end(&mut text)?;
        let (mut rows, mut spoilt): (Vec<Arc<Row>>, bool) = (Vec::new(), false);
        for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            match serde_json::from_slice::<Row>(line) {
                Ok(row) => rows.push(Arc::new(row)),
                Err(_) => spoilt = true,
            }
        }
        if spoilt {
            // For a person to look at: perhaps a record that a crash cut off.
            let copy = self.path.with_extension(format!("{}.spoilt", CallId::fresh()));
            private().create_new(true).write(true).open(&copy)?.write_all(&text)?;
            // Said once: what is left is what can be read.
            let mut good = Vec::new();
            for row in &rows {
                good.extend(serde_json::to_vec(&**row)?);
                good.push(b'\n');
            }
            file.set_len(0)?;
            file.write_all(&good)?;
            file.sync_data()?;
            text = good;
            tracing::error!(path = %copy.display(), "a spooled row cannot be read; a copy is kept");
        }
        let kept = held.len();
        rows.extend(held);
        Ok(Taken { rows, end: text.len() as u64, held: kept, unread: None })
    }

    /// Keeps rows for a person to look at that the store can never take in.
    pub(crate) fn put_aside(&self, taken: &Taken, unfit: &[Unfit]) -> io::Result<()> {
        for Unfit { call, why } in unfit {
            let Some(row) = taken.rows.iter().find(|row| row.call == *call) else { continue };
            // By its own name: one that is read again is there once.
            let copy = self.path.with_extension(format!("{call}.spoilt"));
            let mut file = private().create(true).truncate(true).write(true).open(&copy)?;
            file.write_all(&serde_json::to_vec(&**row)?)?;
            file.sync_data()?;
            tracing::error!(%call, %why, path = %copy.display(), "the store can never take in a spooled row; it is put aside");
        }
        Ok(())
    }

    /// The rows that were read are in the store. What came since stays; what was read is read again with it, and the store
    /// knows it.
    pub(crate) fn taken(&self, taken: &Taken) -> io::Result<()> {
        let mut guard = crate::lock(&self.file);
        let is_held = {
            let mut held = crate::lock(&self.held);
            let gone = taken.held.min(held.len());
            held.drain(..gone);
            !held.is_empty()
        };
        if self.path.exists() {
            let file = self.opened(&mut guard)?;
            if file.metadata()?.len() > taken.end {
                self.known.store(taken.rows.len().saturating_sub(taken.held), Ordering::Relaxed);
                return Ok(());
            }
            std::fs::remove_file(&self.path)?;
            *guard = None;
        }
        self.known.store(0, Ordering::Relaxed);
        self.waiting.store(is_held || taken.unread.is_some() || self.path.exists(), Ordering::Release);
        Ok(())
    }
}

/// A row of a file, read no further than that.
fn nth_row(file: File, n: usize) -> Option<Arc<Row>> {
    let lines = io::BufReader::new(file).split(b'\n').map_while(Result::ok);
    let line = lines.filter(|line| !line.is_empty()).nth(n)?;
    serde_json::from_slice(&line).ok().map(Arc::new)
}

/// Whether this file is the one that goes by this name.
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let inode = |metadata: io::Result<std::fs::Metadata>| metadata.ok().map(|metadata| (metadata.dev(), metadata.ino()));
    let own = inode(file.metadata());
    own.is_some() && own == inode(std::fs::metadata(path))
}

fn private() -> OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = OpenOptions::new();
    options.mode(0o600).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    options
}

/// A directory that is locked. A process that is being started has a copy of what is open for a moment: to close it here is not enough.
struct Locked(File);

impl Locked {
    fn new(directory: &Path, how: FlockOperation) -> io::Result<Self> {
        let directory = File::open(directory)?;
        flock(&directory, how)?;
        Ok(Self(directory))
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_definition_goes_while_somebody_keeps_one_or_takes_rows_over() {
        let directory = tempfile::tempdir().unwrap();
        let (one, two) = (Spool::among(directory.path(), "one").unwrap(), Spool::among(directory.path(), "two").unwrap());
        let config = Digest::of(b"{}");
        one.keep(config, "{}").unwrap();
        let together = two.together().unwrap();
        assert!(one.sweep().is_err() && two.definition(config).is_some());
        drop(together);
        // Nobody knows what stands in a line that is half written.
        std::fs::write(directory.path().join("three.jsonl"), "{").unwrap();
        assert!(one.sweep().is_err() && two.definition(config).is_some());
        std::fs::remove_file(directory.path().join("three.jsonl")).unwrap();
        one.sweep().unwrap();
        assert!(two.definition(config).is_none());
        two.keep(config, "{}").unwrap();
        assert!(one.definition(config).is_some());
    }
}
