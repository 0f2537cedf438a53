//! Reads text files with a limit on their length.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Maximum length of a configuration or secret.
const MAX_TEXT_FILE_BYTES: u64 = 16 << 20;

/// Reads a text file.
pub fn read_text_file(path: &Path) -> io::Result<String> {
    read_bounded(File::open(path)?)
}

/// Reads a text file that a configuration names.
///
/// The configuration may be hostile. A pipe blocks the reader, a device never ends, and files of
/// the kernel report length 0, so that a digest would not cover their content.
pub fn read_untrusted_text_file(path: &Path) -> io::Result<String> {
    // A directory gets a better message from the read itself.
    let plain = |found: Metadata| match found.is_file() || found.is_dir() {
        true => Ok(found),
        false => Err(io::Error::other("not a regular file")),
    };
    // Opening a device may have side effects, so the check comes first. Check again afterwards,
    // because the path may have changed.
    plain(path.metadata()?)?;
    let file = File::options()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
        .open(path)?;
    let found = plain(file.metadata()?)?;
    let text = read_bounded(file)?;
    if text.len() as u64 > found.len() {
        return Err(io::Error::other(
            "the file is longer than its reported length: it is not a regular file, or it is being written",
        ));
    }
    Ok(text)
}

fn read_bounded(file: File) -> io::Result<String> {
    let mut text = String::new();
    let length = file.take(MAX_TEXT_FILE_BYTES + 1).read_to_string(&mut text)?;
    if length as u64 > MAX_TEXT_FILE_BYTES {
        return Err(io::Error::other("the file is longer than 16 MiB"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let [plain, empty, pipe, socket] =
            ["plain", "empty", "pipe", "socket"].map(|name| directory.path().join(name));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::fs::write(&plain, "text").unwrap();
        std::fs::write(&empty, "").unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        assert_eq!(read_untrusted_text_file(&plain).unwrap(), "text");
        assert_eq!(read_untrusted_text_file(&empty).unwrap(), "");
        for (path, reason) in [
            (&*pipe, "not a regular file"),
            // A socket cannot even be opened.
            (&*socket, "not a regular file"),
            (Path::new("/dev/zero"), "not a regular file"),
            (Path::new("/proc/self/environ"), "longer than"),
        ] {
            let error = read_untrusted_text_file(path).unwrap_err().to_string();
            assert!(error.contains(reason), "{}: {error}", path.display());
        }
    }
}
