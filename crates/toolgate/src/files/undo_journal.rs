//! Reads and writes the entries of an undo journal.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::call::CallId;

/// The header of an undo entry: a line of JSON, followed by the old and the new content.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct UndoHeader {
    pub(super) call: CallId,
    pub(super) path: String,
    /// Size of the old content; `None` if there was no file.
    pub(super) old: Option<usize>,
    /// Size of the new content; `None` if the file is removed.
    pub(super) new: Option<usize>,
    /// Directories created for the file, outermost first.
    pub(super) made: Vec<String>,
    /// Permissions of a removed file; absent in entries of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) mode: Option<u32>,
}

/// An undo entry with both contents.
pub(super) struct UndoEntry {
    pub(super) undo: UndoHeader,
    pub(super) old: Vec<u8>,
    pub(super) new: Vec<u8>,
    /// The path of the entry in the journal.
    pub(super) file: PathBuf,
}

impl UndoEntry {
    pub(super) fn parse(bytes: &[u8], file: PathBuf) -> Option<Self> {
        let end = bytes.iter().position(|b| *b == b'\n')?;
        let undo: UndoHeader = serde_json::from_slice(bytes.get(..end)?).ok()?;
        let rest = bytes.get(end + 1..)?;
        let (old, new) = rest.split_at_checked(undo.old.unwrap_or(0))?;
        (new.len() == undo.new.unwrap_or(0)).then(|| Self {
            old: old.to_vec(),
            new: new.to_vec(),
            undo,
            file,
        })
    }

    /// Writes the entry atomically: to a temporary file that is synced and renamed.
    pub(super) fn write(&self, journal: &Path) -> io::Result<()> {
        let temporary = self.file.with_extension("tmp");
        // The entry contains the content of the file, so only the owner may read it.
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(&serde_json::to_vec(&self.undo)?)?;
        file.write_all(b"\n")?;
        file.write_all(&self.old)?;
        file.write_all(&self.new)?;
        file.sync_all()?;
        fs::rename(&temporary, &self.file)?;
        fs::File::open(journal)?.sync_all()
    }
}
