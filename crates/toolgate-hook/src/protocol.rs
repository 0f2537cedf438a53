//! Implements the protocol between a hook and its service.
//!
//! A request is two lines and the event. A response is an exit code and the text.

use std::io::{Error, Read, Result, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest time to wait for an answer of the service.
const SERVICE_SOCKET_TIMEOUT: Duration = Duration::from_secs(4);

fn invalid_response() -> Error {
    Error::other("invalid response")
}

/// Asks the service, and returns the exit code and the text to print.
pub(crate) fn ask_service(
    socket: &Path,
    client: &str,
    agent: &str,
    event: &[u8],
) -> Result<(u8, String)> {
    let mut stream = UnixStream::connect(socket)?;
    let deadline = Instant::now() + SERVICE_SOCKET_TIMEOUT;
    // A timeout of zero would mean no timeout.
    let time_left =
        || Some(deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
    stream.set_write_timeout(time_left())?;
    // One write, because each write wakes the service.
    stream.write_all(&[format!("{client}\n{agent}\n").as_bytes(), event].concat())?;
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(time_left())?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    match reply.split_at_checked(1) {
        // An incomplete response is an error: a client would read it as "no objection".
        Some(("0", text)) if text.starts_with('{') && text.ends_with("}\n") => {
            Ok((0, text.to_owned()))
        }
        Some(("2", reason)) => Ok((2, reason.to_owned())),
        _ => Err(invalid_response()),
    }
}

/// Runs a function after a delay, on a thread of its own.
pub(crate) fn run_after(delay: Duration, action: impl FnOnce() + Send + 'static) -> Result<()> {
    let wait = move || {
        std::thread::sleep(delay);
        action();
    };
    std::thread::Builder::new().stack_size(64 << 10).spawn(wait).map(drop)
}

/// Returns whether standard output is discarded: it is `/dev/null`, or was closed before the
/// program started.
///
/// If this cannot be determined, the answer counts as discarded.
pub(crate) fn is_stdout_discarded() -> bool {
    let stdout = std::io::stdout()
        .as_fd()
        .try_clone_to_owned()
        .and_then(|stdout| std::fs::File::from(stdout).metadata());
    let (Ok(stdout), Ok(dev_null)) = (stdout, std::fs::metadata("/dev/null")) else { return true };
    let is_device = stdout.file_type().is_char_device() && stdout.rdev() == dev_null.rdev();
    is_device || (stdout.dev(), stdout.ino()) == (dev_null.dev(), dev_null.ino())
}

/// Message for an answer that the client cannot read.
pub(crate) const STDOUT_CLOSED: &str = "standard output is closed, so the call is denied";

/// Formats the error for a service that does not answer.
pub(crate) fn no_response_message(socket: &Path, error: &Error) -> String {
    let start = "start it with `toolgate hook --serve --config FILE --socket PATH`";
    format!("the service at {} does not answer: {error}; {start}", socket.display())
}
