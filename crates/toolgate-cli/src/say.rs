//! What is said on standard error.

use std::io::Write as _;

/// Says it. Where nobody can be told, as on a full disk or at a terminal that is gone, whoever serves goes on without.
pub(crate) fn say(text: &str) {
    let _ = writeln!(anstream::stderr(), "{text}");
}
