//! The text of files that have an end.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// What is longer is no configuration, and no secret.
const LONGEST: u64 = 16 << 20;

/// The text of a file.
pub(super) fn text_of(path: &Path) -> io::Result<String> {
    read(File::open(path)?)
}

/// The text of a file that a configuration names. Whoever wrote that may mean no good: a pipe keeps waiting whoever opens it, a device
/// has no end, and what the kernel makes up says that it is empty, so that no digest of it says anything.
pub(super) fn text_of_named(path: &Path) -> io::Result<String> {
    // What a directory is, is told when it is read.
    let plain = |found: Metadata| match found.is_file() || found.is_dir() {
        true => Ok(found),
        false => Err(io::Error::other("it is no plain file")),
    };
    // A device may do something when it is opened. What stands there may be something else by then.
    plain(path.metadata()?)?;
    let file = File::options().read(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32).open(path)?;
    let found = plain(file.metadata()?)?;
    let text = read(file)?;
    if text.len() as u64 > found.len() {
        return Err(io::Error::other("it is longer than it says, so it is no plain file or somebody is writing it"));
    }
    Ok(text)
}

fn read(file: File) -> io::Result<String> {
    let mut text = String::new();
    let length = file.take(LONGEST + 1).read_to_string(&mut text)?;
    if length as u64 > LONGEST {
        return Err(io::Error::other("it is longer than 16 MiB"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_configuration_names_is_a_plain_file() {
        let directory = tempfile::tempdir().unwrap();
        let [plain, empty, pipe, socket] = ["plain", "empty", "pipe", "socket"].map(|name| directory.path().join(name));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::fs::write(&plain, "text").unwrap();
        std::fs::write(&empty, "").unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        assert_eq!(text_of_named(&plain).unwrap(), "text");
        assert_eq!(text_of_named(&empty).unwrap(), "");
        for (path, why) in [
            (&*pipe, "no plain file"),
            // It cannot even be opened.
            (&*socket, "no plain file"),
            (Path::new("/dev/zero"), "no plain file"),
            (Path::new("/proc/self/environ"), "longer than"),
        ] {
            let error = text_of_named(path).unwrap_err().to_string();
            assert!(error.contains(why), "{}: {error}", path.display());
        }
    }
}
