//! Where the user's home is.

use std::path::PathBuf;

/// The home directory of whoever runs this: `HOME`, else what `/etc/passwd` says. One that is relative would be wherever one stands,
/// and is none.
///
/// The C library is not asked. It loads whatever knows the users of a system, which a program that is linked statically does not
/// survive.
#[must_use]
pub fn home() -> Option<PathBuf> {
    let said = std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    said.or_else(listed).filter(|home| home.is_absolute())
}

fn listed() -> Option<PathBuf> {
    let (number, users) = (rustix::process::getuid().as_raw().to_string(), std::fs::read_to_string("/etc/passwd").ok()?);
    let own = users.lines().find(|line| line.split(':').nth(2) == Some(&*number))?;
    own.split(':').nth(5).map(PathBuf::from)
}
