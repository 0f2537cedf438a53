//! Keeps the user's own state directory: trusted configurations, known ledgers and the cache key.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use toolgate_config::Config;
use toolgate_json::Digest;

use crate::effective_config::{absolute_path_from_env, format_included_files, home_dir};

/// File name of the user's own ledger.
const LEDGER_FILE_NAME: &str = "ledger.db";

/// The user's own state directory: which projects are trusted, and which ledgers are known.
pub struct UserStateDir(PathBuf);

impl UserStateDir {
    /// Returns the path: `TOOLGATE_STATE`, else under `XDG_STATE_HOME`, else under the home
    /// directory.
    pub(crate) fn default_path() -> io::Result<PathBuf> {
        if let Some(path) = std::env::var_os("TOOLGATE_STATE").filter(|path| !path.is_empty()) {
            return std::path::absolute(PathBuf::from(path));
        }
        let base = absolute_path_from_env("XDG_STATE_HOME")
            .or_else(|| home_dir().map(|home| home.join(".local/state")));
        base.map(|base| base.join("toolgate"))
            .ok_or_else(|| io::Error::other("no home directory; set TOOLGATE_STATE"))
    }

    /// Returns the directory without opening or checking it, for callers that only need paths.
    pub fn without_opening() -> io::Result<Self> {
        Self::default_path().map(Self)
    }

    /// Opens or creates the directory, and checks that only its owner can read it.
    pub fn open() -> io::Result<Self> {
        let path = Self::default_path()?;
        let with_directory = |error: io::Error| {
            io::Error::new(error.kind(), format!("the state directory {}: {error}", path.display()))
        };
        let metadata = match fs::metadata(&path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::DirBuilder::new()
                    .recursive(true)
                    .mode(0o700)
                    .create(&path)
                    .map_err(with_directory)?;
                fs::metadata(&path).map_err(with_directory)?
            }
            Err(error) => return Err(with_directory(error)),
        };
        if !metadata.is_dir() {
            return Err(with_directory(io::Error::other("not a directory")));
        }
        if metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(with_directory(io::Error::other("owned by another user")));
        }
        if metadata.mode() & 0o077 != 0 {
            return Err(with_directory(io::Error::other(format!(
                "accessible to other users (mode {:o}); run `chmod 700` on it",
                metadata.mode() & 0o777
            ))));
        }
        Ok(Self(path))
    }

    /// Returns the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path of the user's own ledger, which is the default.
    pub fn ledger_path(&self) -> PathBuf {
        self.0.join(LEDGER_FILE_NAME)
    }

    /// Returns the user's own ledger if it exists.
    pub(super) fn existing_ledger() -> Option<PathBuf> {
        Self::without_opening()
            .ok()
            .map(|state| state.ledger_path())
            .filter(|ledger| ledger.exists())
    }

    /// Returns the key that authenticates cached configurations, and creates it on first use.
    pub(crate) fn read_or_create_key(&self) -> io::Result<[u8; 32]> {
        let path = self.0.join("key");
        if let Ok(key) = fs::read(&path)
            && let Ok(key) = <[u8; 32]>::try_from(key)
        {
            return Ok(key);
        }
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(io::Error::other)?;
        let draft = self.0.join(format!("key.{}", std::process::id()));
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
        file.write_all(&key)?;
        fs::rename(draft, path)?;
        Ok(key)
    }

    fn read_list(&self, name: &str) -> io::Result<BTreeMap<String, String>> {
        let path = self.0.join(name);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|e| io::Error::other(format!("{}: {e}", path.display()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            Err(error) => Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
        }
    }

    /// Changes a list atomically and under a lock, so that one process at a time writes it.
    fn change_list(
        &self,
        name: &str,
        change: impl FnOnce(&mut BTreeMap<String, String>),
    ) -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).mode(0o600);
        let lock = options.clone().truncate(false).open(self.0.join(format!("{name}.lock")))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)?;
        let mut list = self.read_list(name)?;
        change(&mut list);
        let draft = self.0.join(format!("{name}.new"));
        let mut file = options.truncate(true).open(&draft)?;
        file.write_all(&serde_json::to_vec_pretty(&list)?)?;
        file.sync_all()?;
        fs::rename(draft, self.0.join(name))
    }

    /// Returns whether the current content of a configuration was accepted.
    pub fn is_trusted(&self, config: &Path) -> io::Result<bool> {
        // A configuration that was never accepted is not read, because it may include any file.
        let Some(accepted) = self.read_list("trusted.json")?.remove(&list_key(config)) else {
            return Ok(false);
        };
        Ok(accepted == config_digest(config)?.to_string())
    }

    /// Accepts the current content of a configuration.
    pub fn trust(&self, config: &Path) -> io::Result<()> {
        let digest = config_digest(config)?.to_string();
        self.change_list("trusted.json", |list| {
            list.insert(list_key(config), digest);
        })
    }

    /// Revokes the acceptance of a configuration, and returns whether it was accepted.
    pub fn distrust(&self, config: &Path) -> io::Result<bool> {
        let known = self.read_list("trusted.json")?.contains_key(&list_key(config));
        if known {
            self.change_list("trusted.json", |list| {
                list.remove(&list_key(config));
            })?;
        }
        Ok(known)
    }

    /// Returns the part of a message that lists the included files, because any of them may have
    /// changed.
    pub(super) fn included_files_hint(&self, config: &Path) -> String {
        // A configuration that was never accepted is not read.
        let is_known =
            self.read_list("trusted.json").is_ok_and(|list| list.contains_key(&list_key(config)));
        let text = if is_known { read_text(config).unwrap_or_default() } else { String::new() };
        let names = format_included_files(
            Config::parse(&config.display().to_string(), &text).included_files(),
            config,
        );
        if names.is_empty() { names } else { format!(" or an included file ({names})") }
    }

    /// Returns the id of the ledger that was used at a path before.
    pub(crate) fn known_ledger_id(&self, store: &Path) -> io::Result<Option<String>> {
        Ok(self.read_list("ledgers.json")?.remove(&list_key(store)))
    }

    /// Records the id of the ledger at a path.
    pub fn record_ledger_id(&self, store: &Path, id: &str) -> io::Result<()> {
        self.change_list("ledgers.json", |list| {
            list.insert(list_key(store), id.to_owned());
        })
    }
}

fn list_key(path: &Path) -> String {
    // The last component is not resolved: a symbolic link that is put there is a different file.
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let resolve = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
    resolve().unwrap_or_else(|| path.clone()).display().to_string()
}

/// Returns the digest of a configuration and all included files.
fn config_digest(config: &Path) -> io::Result<Digest> {
    // The digest must not depend on the name by which the file is reached.
    let config = &config.canonicalize().unwrap_or_else(|_| config.to_owned());
    let text = read_text(config)?;
    let parsed = Config::parse(&config.display().to_string(), &text);
    let mut content = text.into_bytes();
    for file in parsed.included_files() {
        // Names and lengths are part of the digest, so that text cannot move from one file to
        // another.
        let text = read_regular_file(file).unwrap_or_default();
        content.extend_from_slice(format!("\n{} {}\n", file.display(), text.len()).as_bytes());
        content.extend_from_slice(&text);
    }
    Ok(Digest::of(&content))
}

fn read_text(path: &Path) -> io::Result<String> {
    let text =
        read_regular_file(path).and_then(|text| String::from_utf8(text).map_err(io::Error::other));
    text.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Reads a regular file up to the size that its metadata states, because a device has no end.
fn read_regular_file(path: &Path) -> io::Result<Vec<u8>> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut content = Vec::new();
    fs::File::open(path)?.take(metadata.len()).read_to_end(&mut content)?;
    Ok(content)
}
