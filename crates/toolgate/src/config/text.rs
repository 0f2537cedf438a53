//! The text of files that have an end.

use std::fs::File;
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
    let file = File::options().read(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32).open(path)?;
    let found = file.metadata()?;
    // What a directory is, is told when it is read.
    if !found.is_file() && !found.is_dir() {
        return Err(io::Error::other("it is no plain file"));
    }
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
        let (plain, empty, pipe) = (directory.path().join("plain"), directory.path().join("empty"), directory.path().join("pipe"));
        std::fs::write(&plain, "text").unwrap();
        std::fs::write(&empty, "").unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        assert_eq!(text_of_named(&plain).unwrap(), "text");
        assert_eq!(text_of_named(&empty).unwrap(), "");
        for (path, why) in
            [(&*pipe, "no plain file"), (Path::new("/dev/zero"), "no plain file"), (Path::new("/proc/self/environ"), "longer than")]
        {
            let error = text_of_named(path).unwrap_err().to_string();
            assert!(error.contains(why), "{}: {error}", path.display());
        }
    }
}
