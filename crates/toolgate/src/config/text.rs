//! The text of files that have an end.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// What is longer is no configuration, and no secret.
const LONGEST: u64 = 16 << 20;

/// The text of a file.
pub(super) fn text_of(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let length = File::open(path)?.take(LONGEST + 1).read_to_string(&mut text)?;
    if length as u64 > LONGEST {
        return Err(io::Error::other("it is longer than 16 MiB"));
    }
    Ok(text)
}

/// The text of a file that a configuration names. Whoever wrote that may mean no good: a pipe keeps waiting whoever opens it, and a
/// device has no end.
pub(super) fn text_of_named(path: &Path) -> io::Result<String> {
    let kind = path.metadata()?.file_type();
    // What a directory is, is told when it is read.
    if !kind.is_file() && !kind.is_dir() {
        return Err(io::Error::other("it is no plain file"));
    }
    text_of(path)
}
