//! Rows that the store could not take wait in a file until it can.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::ledger::Row;

pub(crate) struct Spool {
    /// The directory that it shares with the spools of other processes.
    among: Option<PathBuf>,
    path: PathBuf,
    file: Mutex<Option<File>>,
    waiting: AtomicBool,
}

impl Spool {
    pub(crate) fn new(path: PathBuf) -> Self {
        let waiting = AtomicBool::new(path.exists() || path.with_extension("taking").exists());
        Self { among: None, path, file: Mutex::default(), waiting }
    }

    /// A spool of this process among those of others. What a process left behind that is gone, is taken over.
    pub(crate) fn among(directory: &Path, owner: &str) -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let spool = Self { among: Some(directory.to_owned()), ..Self::new(directory.join(format!("{owner}.jsonl"))) };
        if !spool.orphans()?.is_empty() {
            spool.waiting.store(true, Ordering::Release);
        }
        Ok(spool)
    }

    /// The spools of processes that are gone. A process locks its own for as long as it writes to it.
    fn orphans(&self) -> io::Result<Vec<(PathBuf, File)>> {
        let Some(directory) = &self.among else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            let is_spool = path.extension().is_some_and(|e| e == "jsonl" || e == "taking");
            if !is_spool || path == self.path || path == self.aside() {
                continue;
            }
            let Ok(file) = File::open(&path) else { continue };
            if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok() && path.exists() {
                found.push((path, file));
            }
        }
        Ok(found)
    }

    /// Brings what others left behind into this spool.
    fn adopt(&self) -> io::Result<()> {
        for (path, file) in self.orphans()? {
            let mut left = Vec::new();
            io::Read::read_to_end(&mut io::BufReader::new(&file), &mut left)?;
            self.append(&left)?;
            std::fs::remove_file(&path)?;
        }
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// Appends a row and syncs it.
    pub(crate) fn put(&self, row: &Row) -> io::Result<()> {
        // The line break comes first too: a record that was cut off must not spoil the next.
        let mut line = vec![b'\n'];
        line.extend(serde_json::to_vec(row)?);
        line.push(b'\n');
        self.append(&line)
    }

    fn append(&self, lines: &[u8]) -> io::Result<()> {
        let mut guard = crate::lock(&self.file);
        if guard.is_none() {
            let file = private().append(true).create(true).open(&self.path)?;
            if self.among.is_some() {
                rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
            }
            *guard = Some(file);
        }
        let Some(file) = guard.as_mut() else { return Err(io::Error::other("the spool is closed")) };
        file.write_all(lines)?;
        file.sync_data()?;
        self.waiting.store(true, Ordering::Release);
        Ok(())
    }

    /// Sets the waiting rows aside and reads them. They stay on disk until [`Spool::taken`].
    pub(crate) fn take(&self) -> io::Result<Vec<Arc<Row>>> {
        self.adopt()?;
        let aside = self.aside();
        let mut guard = crate::lock(&self.file);
        if !aside.exists() {
            *guard = None;
            match std::fs::rename(&self.path, &aside) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                other => other?,
            }
        }
        let (mut rows, mut spoilt): (Vec<Arc<Row>>, bool) = (Vec::new(), false);
        for line in BufReader::new(File::open(&aside)?).split(b'\n') {
            let line = line?;
            if line.is_empty() {
                continue;
            }
            match serde_json::from_slice::<Row>(&line) {
                Ok(row) => rows.push(Arc::new(row)),
                Err(_) => spoilt = true,
            }
        }
        if spoilt {
            // For a person to look at: perhaps a record that a crash cut off.
            let copy = self.path.with_extension(format!("{}.spoilt", crate::call::CallId::fresh()));
            std::fs::copy(&aside, &copy)?;
            // Said once: what is left is what can be read.
            let mut good = Vec::new();
            for row in &rows {
                good.extend(serde_json::to_vec(&**row)?);
                good.push(b'\n');
            }
            std::fs::write(&aside, good)?;
            tracing::error!(path = %copy.display(), "a spooled row cannot be read; a copy is kept");
        }
        Ok(rows)
    }

    /// The rows that were set aside are in the store.
    pub(crate) fn taken(&self) -> io::Result<()> {
        let _guard = crate::lock(&self.file);
        match std::fs::remove_file(self.aside()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        self.waiting.store(self.path.exists(), Ordering::Release);
        Ok(())
    }

    fn aside(&self) -> PathBuf {
        self.path.with_extension("taking")
    }
}

fn private() -> OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = OpenOptions::new();
    options.mode(0o600).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    options
}
