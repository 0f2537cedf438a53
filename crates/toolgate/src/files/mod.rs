//! Provides resources for tools, and file systems that roll back with the call.

mod host_fs;
mod memory_fs;
mod undo_journal;
mod workspace;

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::Arc;

pub use crate::files::host_fs::HostFs;
pub use crate::files::memory_fs::MemoryFs;
pub use workspace::ReadOnlyDir;

use crate::call::CallId;
use crate::call::error_code;
use crate::policy::FileFact;
use toolgate_json::Digest;

/// The required state of a file when it is opened for writing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileExpectation {
    /// The file must not exist; it is created exclusively.
    Absent(String),
    /// The file must have the content with this digest.
    Unchanged(String, Digest),
}

impl FileExpectation {
    /// Finds the requirement for a path.
    fn find<'a>(expectations: &'a [Self], path: &str) -> Option<&'a Self> {
        expectations.iter().find(|expectation| match expectation {
            Self::Absent(p) | Self::Unchanged(p, _) => p == path,
        })
    }

    /// Compares the current content of a file with the requirement.
    fn check_content(
        expectations: &[Self],
        path: &str,
        current: Option<Digest>,
    ) -> Result<(), FileError> {
        match (Self::find(expectations, path), current) {
            (Some(Self::Absent(_)), Some(_)) => Err(FileError::CreatedMeanwhile(path.to_owned())),
            (Some(Self::Unchanged(_, seen)), current) if current != Some(*seen) => {
                Err(FileError::ChangedMeanwhile(path.to_owned()))
            }
            _ => Ok(()),
        }
    }
}

/// The reason why a file operation was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// The path is not a plain relative path.
    #[error("`{0}` is not a relative path inside the directory: {1}")]
    InvalidPath(String, &'static str),
    /// The path leads outside of the directory.
    #[error("`{0}` leads outside the directory")]
    OutsideRoot(String),
    /// The file does not exist.
    #[error("file `{0}` does not exist")]
    NotFound(String),
    /// The path exists, but is not a regular file.
    #[error("`{0}` is not a regular file")]
    NotAFile(String),
    /// The file is larger than the limit.
    #[error("`{0}` is larger than {1} bytes")]
    TooLarge(String, u64),
    /// The file did not exist when the call was checked.
    #[error("`{0}` now exists and has not been read; read it before you overwrite it")]
    CreatedMeanwhile(String),
    /// The file had other content when the call was checked.
    #[error("`{0}` has changed since it was read; read it again before you overwrite it")]
    ChangedMeanwhile(String),
    /// Another call is writing the file.
    #[error("another call is writing `{0}`")]
    Busy(String),
    /// The tool is declared `read`.
    #[error("a tool that is declared `read` may not change files")]
    ReadOnly,
    /// The call has ended.
    #[error("the call has ended; its file system is closed")]
    Closed,
    /// The operating system reported an error.
    #[error("`{0}`: {1}")]
    Io(String, String),
}

impl FileError {
    /// Returns the code of a tool failure with this error.
    pub(crate) const fn code(&self) -> &'static str {
        match self {
            Self::InvalidPath(..) | Self::NotFound(_) | Self::NotAFile(_) => {
                error_code::INVALID_PATH
            }
            Self::OutsideRoot(_) | Self::ReadOnly => error_code::PATH_FORBIDDEN,
            Self::TooLarge(..) => error_code::FILE_TOO_LARGE,
            Self::CreatedMeanwhile(_) => error_code::READ_BEFORE_WRITE,
            Self::ChangedMeanwhile(_) => error_code::STALE_READ,
            Self::Busy(_) => error_code::BUSY,
            Self::Closed => error_code::CANCELLED,
            Self::Io(..) => error_code::TOOL_FAILED,
        }
    }
}

/// A file system whose changes can be rolled back.
pub trait FileSystem: Send + Sync {
    /// Returns the current state of a file.
    fn fact(&self, path: &str) -> FileFact;
    /// Opens a transaction for a call.
    fn begin(&self, call: CallId, expectations: Vec<FileExpectation>) -> Box<dyn FileTransaction>;
}

/// The changes of one call; dropping the transaction without `commit` rolls them back.
pub trait FileTransaction: Send {
    /// Reads a whole file, including the changes of this call.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    fn read(&mut self, path: &str) -> Result<Vec<u8>, FileError>;
    /// Creates or overwrites a file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written; then nothing has changed.
    fn write(&mut self, path: &str, content: &[u8]) -> Result<(), FileError>;
    /// Removes a file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be removed; then nothing has changed.
    fn remove(&mut self, path: &str) -> Result<(), FileError>;
    /// Lists at most this many files below a directory, sorted.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be listed.
    fn list(&mut self, below: &str, most: usize) -> Result<Vec<String>, FileError>;
    /// Commits the changes.
    ///
    /// # Errors
    /// Returns the first change that cannot be committed.
    fn commit(&mut self) -> Result<(), FileError>;
    /// Rolls the changes back.
    ///
    /// # Errors
    /// Returns the first change that cannot be undone.
    fn rollback(&mut self) -> Result<(), FileError>;
}

/// Normalizes a relative path: `/` between its parts, no `.` or `..`.
///
/// # Errors
/// Returns an error if the path is not a relative path of a file.
pub fn normalize_path(path: &str) -> Result<String, FileError> {
    let invalid =
        |reason| Err(FileError::InvalidPath(toolgate_text::escape_for_display(path), reason));
    if path.starts_with('/') {
        return invalid("the path is absolute");
    }
    if path.len() > 4_096 || path.contains(['\0', '\\']) {
        return invalid("the path is too long, or contains a NUL or backslash");
    }
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => return invalid("the path contains `..`"),
            part => parts.push(part),
        }
    }
    match parts.first() {
        None => return invalid("the path names no file"),
        // Windows reads this as a drive letter.
        Some(first) if first.chars().nth(1) == Some(':') => return invalid("the path is absolute"),
        Some(_) => {}
    }
    Ok(parts.join("/"))
}

/// Values that handlers can request by type.
#[derive(Clone, Default)]
pub struct Resources {
    values: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
    files: Option<Arc<dyn FileSystem>>,
}

impl Resources {
    /// Inserts a value, and returns the previous value of its type.
    pub(crate) fn insert<T: Any + Send + Sync>(
        &mut self,
        value: Arc<T>,
    ) -> Option<Arc<dyn Any + Send + Sync>> {
        self.values.insert(TypeId::of::<T>(), value)
    }

    pub(crate) fn set_files(&mut self, files: Arc<dyn FileSystem>) {
        self.files = Some(files);
    }

    pub(crate) fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.values.get(&TypeId::of::<T>()).cloned().and_then(|value| value.downcast().ok())
    }

    pub(crate) fn files(&self) -> Option<&Arc<dyn FileSystem>> {
        self.files.as_ref()
    }
}

impl std::fmt::Debug for Resources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resources")
            .field("things", &self.values.len())
            .field("files", &self.files.is_some())
            .finish()
    }
}
