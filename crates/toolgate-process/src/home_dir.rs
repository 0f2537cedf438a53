//! Finds the user's home directory.

use std::path::PathBuf;

/// Returns the home directory of the current user: `HOME`, else the entry in `/etc/passwd`.
///
/// A relative directory is ignored, because it would depend on the working directory.
///
/// Does not use the C library, which loads NSS modules. A statically linked program crashes on
/// that.
#[must_use]
pub fn home_dir() -> Option<PathBuf> {
    let variable = std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    variable.or_else(home_from_passwd).filter(|home| home.is_absolute())
}

fn home_from_passwd() -> Option<PathBuf> {
    let (number, users) = (
        rustix::process::getuid().as_raw().to_string(),
        std::fs::read_to_string("/etc/passwd").ok()?,
    );
    let entry = users.lines().find(|line| line.split(':').nth(2) == Some(&*number))?;
    entry.split(':').nth(5).map(PathBuf::from)
}
