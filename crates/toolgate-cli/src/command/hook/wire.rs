//! What a hook and its service say to each other: two lines and the event; an exit code and the text. The client needs little
//! beside this file, because it is started at every step of an agent.

use std::io::{Error, Read, Result, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long an answer is waited for.
const PATIENCE: Duration = Duration::from_secs(4);

/// What is answered in place of an exit code where a hook is to do all by itself.
pub(crate) const ALONE: u8 = 1;

/// Asks the service: the exit code, and what is to be said.
pub(crate) fn ask(socket: &Path, client: &str, agent: &str, event: &[u8]) -> Result<(u8, String)> {
    match exchange(UnixStream::connect(socket)?, client, agent, event, PATIENCE)? {
        (ALONE, _) => Err(no_answer()),
        said => Ok(said),
    }
}

fn no_answer() -> Error {
    Error::other("it said something else than an answer")
}

/// Asks whoever listens at the other end.
pub(crate) fn exchange(mut stream: UnixStream, client: &str, agent: &str, event: &[u8], patience: Duration) -> Result<(u8, String)> {
    let until = Instant::now() + patience.min(PATIENCE);
    // None at all would be without end.
    let left = || Some(until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
    stream.set_write_timeout(left())?;
    // In one piece: each wakes the service.
    stream.write_all(&[format!("{client}\n{agent}\n").as_bytes(), event].concat())?;
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(left())?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    match reply.split_at_checked(1) {
        // Half an answer is none: a client would take it for "no objection".
        Some(("0", told)) if told.starts_with('{') && told.ends_with("}\n") => Ok((0, told.to_owned())),
        Some(("2", reason)) => Ok((2, reason.to_owned())),
        Some(("1", "")) => Ok((ALONE, String::new())),
        _ => Err(no_answer()),
    }
}

/// Does something later, whatever happens meanwhile.
pub(crate) fn later(time: Duration, what: impl FnOnce() + Send + 'static) -> Result<()> {
    let wait = move || {
        std::thread::sleep(time);
        what();
    };
    std::thread::Builder::new().stack_size(64 << 10).spawn(wait).map(drop)
}

/// Whether standard output leads nowhere: so it is where it was closed before the program began. Where that cannot be told, nobody hears.
pub(crate) fn is_unheard() -> bool {
    let told = std::io::stdout().as_fd().try_clone_to_owned().and_then(|told| std::fs::File::from(told).metadata());
    let (Ok(told), Ok(nowhere)) = (told, std::fs::metadata("/dev/null")) else { return true };
    let is_device = told.file_type().is_char_device() && told.rdev() == nowhere.rdev();
    is_device || (told.dev(), told.ino()) == (nowhere.dev(), nowhere.ino())
}

/// What is said where an answer was not heard.
pub(crate) const UNHEARD: &str = "standard output is closed, so the call is refused";

/// Why there is no answer.
pub(crate) fn silent(socket: &Path, error: &Error) -> String {
    let start = "start it with `toolgate hook --serve --config FILE --socket PATH`";
    format!("the service at {} does not answer: {error}; {start}", socket.display())
}
