//! Prints messages to standard error.

use std::io::Write as _;

/// Prints a line, and ignores errors: a full disk or a closed terminal must not stop a server.
pub fn print_stderr(text: &str) {
    let _ = writeln!(anstream::stderr(), "{text}");
}
