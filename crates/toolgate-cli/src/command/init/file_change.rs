//! Changes settings files and configurations atomically, and prints the differences.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::command::common::{BOLD, DIM, GREEN, RED};

/// Reads a file, and returns an empty text if it does not exist.
pub(crate) fn read_or_empty(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(with_path(path, &error)),
        text => text,
    }
}

/// Replaces a file atomically, and prints the difference. An empty file is removed.
pub(super) fn apply_change(
    out: &mut impl Write,
    path: &Path,
    before: &str,
    after: &str,
    dry_run: bool,
) -> io::Result<()> {
    if before == after {
        return writeln!(out, "{DIM}{} is unchanged{DIM:#}", path.display());
    }
    match (dry_run, after.is_empty()) {
        (true, _) => {}
        (false, true) => remove_file(path)?,
        (false, false) => write_atomically(path, after)?,
    }
    let verb = match (dry_run, before.is_empty(), after.is_empty()) {
        (true, true, _) => "would write",
        (true, false, true) => "would remove",
        (true, false, false) => "would change",
        (false, true, _) => "wrote",
        (false, false, true) => "removed",
        (false, false, false) => "changed",
    };
    let diff = similar::TextDiff::from_lines(before, after);
    writeln!(out, "{BOLD}{verb}{BOLD:#} {}", path.display())?;
    // A long new file is not printed.
    if !before.is_empty() || after.lines().count() <= 90 || dry_run {
        for change in
            diff.iter_all_changes().filter(|change| change.tag() != similar::ChangeTag::Equal)
        {
            match change.tag() {
                similar::ChangeTag::Delete => write!(out, "  {RED}-{}{RED:#}", change.value())?,
                _ => write!(out, "  {GREEN}+{}{GREEN:#}", change.value())?,
            }
            if !change.value().ends_with('\n') {
                writeln!(out)?;
            }
        }
    } else {
        writeln!(out, "  {DIM}({} lines, commented){DIM:#}", after.lines().count())?;
    }
    Ok(())
}

/// Removes a file, and its directory if it is empty.
fn remove_file(path: &Path) -> io::Result<()> {
    fs::remove_file(path).map_err(|error| with_path(path, &error))?;
    // A `hooks` directory has a parent that was created with it.
    if let Some(directory) = path.parent()
        && fs::remove_dir(directory).is_ok()
        && directory.ends_with("hooks")
        && let Some(grandparent) = directory.parent()
    {
        let _ = fs::remove_dir(grandparent);
    }
    Ok(())
}

/// Writes a file atomically.
pub(crate) fn write_atomically(path: &Path, text: &str) -> io::Result<()> {
    // A symbolic link stays, and its target is replaced.
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let write = || -> io::Result<()> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let directory = target
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        // The temporary name is random: a link at a predictable name would lead to another file.
        let mut draft = tempfile::Builder::new()
            .permissions(fs::Permissions::from_mode(0o666))
            .tempfile_in(directory)?;
        if let Ok(metadata) = fs::metadata(&target) {
            draft.as_file().set_permissions(metadata.permissions())?;
        }
        draft.write_all(text.as_bytes())?;
        draft.as_file().sync_all()?;
        draft.persist(&target).map(drop).map_err(|error| error.error)
    };
    write().map_err(|error| with_path(path, &error))
}

/// Adds the path to an error.
fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
