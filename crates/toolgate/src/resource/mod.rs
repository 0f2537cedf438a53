//! What tools act on, and what is rolled back with the session.

mod host;
mod memory;
mod workspace;

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::Arc;

pub use host::HostFs;
pub use memory::MemoryFs;
pub(crate) use workspace::Sight;

use crate::call::CallId;
use crate::code;
use crate::json::Digest;
use crate::policy::FileFact;

/// What a file must look like when it is opened for writing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expect {
    /// There must be nothing there: it is created exclusively.
    Absent(String),
    /// It must hold exactly what was seen.
    Unchanged(String, Digest),
}

impl Expect {
    /// Finds what is expected of a path.
    fn of<'a>(expects: &'a [Self], path: &str) -> Option<&'a Self> {
        expects.iter().find(|expect| match expect {
            Self::Absent(p) | Self::Unchanged(p, _) => p == path,
        })
    }

    /// Compares what is there with what was seen.
    fn check(expects: &[Self], path: &str, there: Option<Digest>) -> Result<(), FileError> {
        match (Self::of(expects, path), there) {
            (Some(Self::Absent(_)), Some(_)) => Err(FileError::Appeared(path.to_owned())),
            (Some(Self::Unchanged(_, seen)), there) if there != Some(*seen) => Err(FileError::Changed(path.to_owned())),
            _ => Ok(()),
        }
    }
}

/// Why a file operation was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// The path is not a plain relative path.
    #[error("`{0}` is not a relative path inside the directory: {1}")]
    Path(String, &'static str),
    /// The path leads outside.
    #[error("`{0}` leads outside the directory")]
    Escapes(String),
    /// Nothing is there.
    #[error("there is no file `{0}`")]
    Missing(String),
    /// Something is there that is no regular file.
    #[error("`{0}` is not a regular file")]
    NotAFile(String),
    /// Too large.
    #[error("`{0}` is larger than {1} bytes")]
    TooLarge(String, u64),
    /// It was not there when the call was judged.
    #[error("`{0}` exists by now and has not been read; read it before you overwrite it")]
    Appeared(String),
    /// It was different when the call was judged.
    #[error("`{0}` has changed since it was read; read it again before you overwrite it")]
    Changed(String),
    /// Another call is writing it.
    #[error("another call is writing `{0}`")]
    Busy(String),
    /// The tool is declared `read`.
    #[error("a tool that is declared `read` may not change files")]
    ReadOnly,
    /// The call is over.
    #[error("the call has ended; its file system is closed")]
    Closed,
    /// The machine says no.
    #[error("`{0}`: {1}")]
    Io(String, String),
}

impl FileError {
    /// The code that a tool's failure of this kind has.
    pub(crate) const fn code(&self) -> &'static str {
        match self {
            Self::Path(..) | Self::Missing(_) | Self::NotAFile(_) => code::INVALID_PATH,
            Self::Escapes(_) | Self::ReadOnly => code::PATH_FORBIDDEN,
            Self::TooLarge(..) => code::FILE_TOO_LARGE,
            Self::Appeared(_) => code::READ_BEFORE_WRITE,
            Self::Changed(_) => code::STALE_READ,
            Self::Busy(_) => code::BUSY,
            Self::Closed => code::CANCELLED,
            Self::Io(..) => code::TOOL_FAILED,
        }
    }
}

/// A file system that rolls back.
pub trait FileSystem: Send + Sync {
    /// What is at a path now.
    fn fact(&self, path: &str) -> FileFact;
    /// Opens a transaction for a call.
    fn begin(&self, call: CallId, expects: Vec<Expect>) -> Box<dyn FileTxn>;
}

/// The changes of one call. Dropping it without `commit` rolls back.
pub trait FileTxn: Send {
    /// The whole of a file, with the changes of this call.
    ///
    /// # Errors
    /// Why not.
    fn read(&mut self, path: &str) -> Result<Vec<u8>, FileError>;
    /// Creates or overwrites a file.
    ///
    /// # Errors
    /// Why not; then nothing has changed.
    fn write(&mut self, path: &str, content: &[u8]) -> Result<(), FileError>;
    /// Removes a file.
    ///
    /// # Errors
    /// Why not; then nothing has changed.
    fn remove(&mut self, path: &str) -> Result<(), FileError>;
    /// The files below a directory, sorted; at most this many.
    ///
    /// # Errors
    /// Why not.
    fn list(&mut self, below: &str, most: usize) -> Result<Vec<String>, FileError>;
    /// Keeps the changes.
    ///
    /// # Errors
    /// What could not be kept.
    fn commit(&mut self) -> Result<(), FileError>;
    /// Undoes the changes.
    ///
    /// # Errors
    /// What could not be undone.
    fn rollback(&mut self) -> Result<(), FileError>;
}

/// A path in one spelling: relative, `/` between its parts, no `.` or `..`.
///
/// # Errors
/// Why it is none.
pub fn normal_path(path: &str) -> Result<String, FileError> {
    let wrong = |why| Err(FileError::Path(crate::names::shown(path), why));
    if path.starts_with('/') {
        return wrong("it is absolute");
    }
    if path.len() > 4_096 || path.contains(['\0', '\\']) {
        return wrong("it is too long, or has a NUL or backslash in it");
    }
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => return wrong("it goes up with `..`"),
            part => parts.push(part),
        }
    }
    match parts.first() {
        None => return wrong("it names no file"),
        // What another system takes for a drive.
        Some(first) if first.chars().nth(1) == Some(':') => return wrong("it is absolute"),
        Some(_) => {}
    }
    Ok(parts.join("/"))
}

/// Typed things that handlers may ask for, by type.
#[derive(Clone, Default)]
pub struct Resources {
    things: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
    files: Option<Arc<dyn FileSystem>>,
}

impl Resources {
    /// Puts it in, and gives back what was there of its type.
    pub(crate) fn insert<T: Any + Send + Sync>(&mut self, thing: Arc<T>) -> Option<Arc<dyn Any + Send + Sync>> {
        self.things.insert(TypeId::of::<T>(), thing)
    }

    pub(crate) fn set_files(&mut self, files: Arc<dyn FileSystem>) {
        self.files = Some(files);
    }

    pub(crate) fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.things.get(&TypeId::of::<T>()).cloned().and_then(|thing| thing.downcast().ok())
    }

    pub(crate) fn files(&self) -> Option<&Arc<dyn FileSystem>> {
        self.files.as_ref()
    }
}

impl std::fmt::Debug for Resources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resources").field("things", &self.things.len()).field("files", &self.files.is_some()).finish()
    }
}
