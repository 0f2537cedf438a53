//! Implements a file system in memory; a transaction is an overlay that a rollback drops.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use rpds::RedBlackTreeMapSync;

use super::{FileError, FileExpectation, FileSystem, FileTransaction, normalize_path};
use crate::call::CallId;
use crate::policy::FileFact;
use toolgate_json::Digest;

type FileMap = RedBlackTreeMapSync<String, Arc<[u8]>>;

/// Files in memory.
///
/// ```
/// use toolgate::MemoryFs;
/// let files = MemoryFs::new([("notes.txt", "hello")]);
/// assert_eq!(files.get("notes.txt").as_deref(), Some("hello".as_bytes()));
/// ```
#[derive(Debug, Clone, Default)]
pub struct MemoryFs(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    files: FileMap,
    locked_paths: HashMap<String, CallId>,
}

impl MemoryFs {
    /// Creates a file system with these files.
    ///
    /// Paths are normalized here and in all methods: `./notes.txt` is `notes.txt`. A path that
    /// [`normalize_path`] rejects is stored unchanged, and no handler can reach it.
    pub fn new<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let files = files
            .into_iter()
            .map(|(path, text)| (normalize_or_keep(path), Arc::from(text.as_bytes())))
            .collect();
        Self(Arc::new(Mutex::new(Inner { files, locked_paths: HashMap::new() })))
    }

    /// Returns the content of a file.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<Arc<[u8]>> {
        crate::lock(&self.0).files.get(&normalize_or_keep(path)).cloned()
    }

    /// Writes a file outside of any call.
    pub fn put(&self, path: &str, content: &[u8]) {
        crate::lock(&self.0).files.insert_mut(normalize_or_keep(path), Arc::from(content));
    }

    /// Returns one digest of all files.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let files = crate::lock(&self.0).files.clone();
        Digest::of_parts(files.iter().flat_map(|(path, content)| [path.as_bytes(), content]))
    }
}

/// Normalizes a path as handlers do.
fn normalize_or_keep(path: &str) -> String {
    normalize_path(path).unwrap_or_else(|_| path.to_owned())
}

impl FileSystem for MemoryFs {
    fn fact(&self, path: &str) -> FileFact {
        self.get(path).map_or(FileFact::Absent, |content| FileFact::Present(Digest::of(&content)))
    }

    fn begin(&self, call: CallId, expectations: Vec<FileExpectation>) -> Box<dyn FileTransaction> {
        Box::new(MemoryFileTransaction {
            fs: self.clone(),
            call,
            expectations,
            overlay: BTreeMap::new(),
        })
    }
}

struct MemoryFileTransaction {
    fs: MemoryFs,
    call: CallId,
    expectations: Vec<FileExpectation>,
    overlay: BTreeMap<String, Option<Arc<[u8]>>>,
}

impl MemoryFileTransaction {
    fn content_at(&self, path: &str) -> Option<Arc<[u8]>> {
        self.overlay.get(path).cloned().unwrap_or_else(|| self.fs.get(path))
    }

    /// Locks the path for this call, and checks its required state the first time.
    fn lock_path(&self, path: &str) -> Result<(), FileError> {
        if self.overlay.contains_key(path) {
            return Ok(());
        }
        let mut inner = crate::lock(&self.fs.0);
        if inner.locked_paths.get(path).is_some_and(|by| *by != self.call) {
            return Err(FileError::Busy(path.to_owned()));
        }
        FileExpectation::check_content(
            &self.expectations,
            path,
            inner.files.get(path).map(|content| Digest::of(content)),
        )?;
        inner.locked_paths.insert(path.to_owned(), self.call);
        Ok(())
    }

    /// Commits or drops the changes and releases the paths, in one step.
    fn finish(&mut self, keep: bool) {
        let overlay = std::mem::take(&mut self.overlay);
        let mut inner = crate::lock(&self.fs.0);
        for (path, content) in overlay.into_iter().filter(|_| keep) {
            match content {
                Some(content) => inner.files.insert_mut(path, content),
                None => {
                    inner.files.remove_mut(&path);
                }
            }
        }
        inner.locked_paths.retain(|_, by| *by != self.call);
    }
}

impl FileTransaction for MemoryFileTransaction {
    fn read(&mut self, path: &str) -> Result<Vec<u8>, FileError> {
        let path = normalize_path(path)?;
        self.content_at(&path).map(|content| content.to_vec()).ok_or(FileError::NotFound(path))
    }

    fn write(&mut self, path: &str, content: &[u8]) -> Result<(), FileError> {
        let path = normalize_path(path)?;
        self.lock_path(&path)?;
        self.overlay.insert(path, Some(Arc::from(content)));
        Ok(())
    }

    fn remove(&mut self, path: &str) -> Result<(), FileError> {
        let path = normalize_path(path)?;
        if self.content_at(&path).is_none() {
            return Err(FileError::NotFound(path));
        }
        self.lock_path(&path)?;
        self.overlay.insert(path, None);
        Ok(())
    }

    fn list(&mut self, below: &str, max: usize) -> Result<Vec<String>, FileError> {
        let prefix = if below.is_empty() || below == "." {
            String::new()
        } else {
            normalize_path(below)? + "/"
        };
        let files = crate::lock(&self.fs.0).files.clone();
        let mut names: BTreeMap<&str, bool> =
            files.keys().map(|path| (path.as_str(), true)).collect();
        names.extend(self.overlay.iter().map(|(path, content)| (path.as_str(), content.is_some())));
        let present =
            names.into_iter().filter(|(path, present)| *present && path.starts_with(&prefix));
        Ok(present.take(max).map(|(path, _)| path.to_owned()).collect())
    }

    fn commit(&mut self) -> Result<(), FileError> {
        self.finish(true);
        Ok(())
    }

    fn rollback(&mut self) -> Result<(), FileError> {
        self.finish(false);
        Ok(())
    }
}

impl Drop for MemoryFileTransaction {
    fn drop(&mut self) {
        self.finish(false);
    }
}
