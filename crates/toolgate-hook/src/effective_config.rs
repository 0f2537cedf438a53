//! Finds the configuration that is in force in a directory.

mod user_state_dir;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use toolgate::SignedDuration;
use toolgate_config::Config;
use toolgate_json::Digest;
pub(crate) use toolgate_process::home_dir::home_dir;

pub use crate::effective_config::user_state_dir::UserStateDir;

/// File name of a configuration.
pub const CONFIG_FILE_NAME: &str = "toolgate.toml";

/// Reads a directory from an environment variable, and ignores a relative path.
fn absolute_path_from_env(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Formats the included files of a configuration, relative to its directory.
pub fn format_included_files(files: &[PathBuf], config: &Path) -> String {
    let directory = config.parent().unwrap_or(Path::new(""));
    let names = files
        .iter()
        .map(|file| format!("`{}`", file.strip_prefix(directory).unwrap_or(file).display()));
    names.collect::<Vec<_>>().join(", ")
}

/// Adds the files of a failed read, because the fix may be in a file that only this read includes.
pub fn add_watched_files(
    files: &mut Vec<(PathBuf, Option<FileMetadataFingerprint>)>,
    other_files: Vec<(PathBuf, Option<FileMetadataFingerprint>)>,
) {
    for (file, was) in other_files {
        if files.iter().all(|(known, _)| *known != file) {
            files.push((file, was));
        }
    }
}

/// Returns the path of the user's own configuration.
pub fn user_config_path() -> Option<PathBuf> {
    let base = absolute_path_from_env("XDG_CONFIG_HOME")
        .or_else(|| home_dir().map(|home| home.join(".config")))?;
    Some(base.join("toolgate").join(CONFIG_FILE_NAME))
}

/// Returns the user's own configuration if it exists.
///
/// If this cannot be determined, the effective rules are unknown, so this is an error.
fn existing_user_config() -> io::Result<Option<PathBuf>> {
    let Some(path) = user_config_path() else { return Ok(None) };
    match fs::metadata(&path) {
        Ok(metadata) => Ok(metadata.is_file().then_some(path)),
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            Ok(None)
        }
        Err(error) => Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
    }
}

/// Returns the configuration of the project that contains a directory.
pub fn find_project_config(directory: &Path) -> Option<PathBuf> {
    let found = directory
        .ancestors()
        .map(|directory| directory.join(CONFIG_FILE_NAME))
        .find(|path| path.is_file());
    found.filter(|path| Some(path) != user_config_path().as_ref())
}

/// Merges a configuration under the user's own if it is the configuration of the current project.
pub fn merge_under_user_config(config: Config, path: &Path) -> io::Result<Config> {
    let Some(user_path) = existing_user_config()? else { return Ok(config) };
    let is_of_project = match find_project_config(&project_dir()?) {
        Some(project_path) => project_path.canonicalize()? == path.canonicalize()?,
        None => false,
    };
    if is_of_project {
        Ok(config.merge_under_user_config(Config::load(&user_path)?))
    } else {
        Ok(config)
    }
}

/// Returns the directory with the pinned tool definitions of a configuration's upstreams.
pub fn pins_dir(state: &Path, config: &Path) -> PathBuf {
    let config = std::path::absolute(config).unwrap_or_else(|_| config.to_owned());
    let name: String =
        Digest::of(config.as_os_str().as_encoded_bytes()).to_string().chars().take(16).collect();
    state.join("upstreams").join(name)
}

/// Adds the pinned tools of the upstreams, so that rules are checked against the existing tools.
pub fn with_pinned_tools(config: Config, path: &Path) -> io::Result<Config> {
    if config.upstreams.is_empty() {
        return Ok(config);
    }
    let known =
        toolgate_mcp::PinnedTools::read(&config, &pins_dir(&UserStateDir::default_path()?, path))?;
    Ok(config.with_backend(&known))
}

/// Returns the given configuration, else that of the current project by its shortest path.
pub fn config_path_or_default(requested: Option<&PathBuf>) -> io::Result<PathBuf> {
    if let Some(path) = requested {
        return Ok(path.clone());
    }
    if Path::new(CONFIG_FILE_NAME).is_file() {
        return Ok(PathBuf::from(CONFIG_FILE_NAME));
    }
    find_project_config(&std::env::current_dir()?).ok_or_else(missing_config_error)
}

/// Returns the error for a directory without a configuration.
pub fn missing_config_error() -> io::Error {
    io::Error::other(format!("no {CONFIG_FILE_NAME} here; create one with `toolgate init`"))
}

/// Returns the directory of the project that a client works in.
///
/// The client's variable counts more than the working directory, which the agent can change.
pub fn project_dir() -> io::Result<PathBuf> {
    absolute_path_from_env("CLAUDE_PROJECT_DIR").map_or_else(std::env::current_dir, Ok)
}

/// Metadata that identifies an unchanged file.
pub type FileMetadataFingerprint = (u64, u64, u64, i64, i64, i64, i64);

/// Returns the current fingerprint of a file; `None` if it does not exist.
pub fn fingerprint(path: &Path) -> Option<FileMetadataFingerprint> {
    let file = fs::metadata(path).ok()?;
    Some((
        file.dev(),
        file.ino(),
        file.len(),
        file.mtime(),
        file.mtime_nsec(),
        file.ctime(),
        file.ctime_nsec(),
    ))
}

/// Returns whether a file was unchanged for more than a second before a moment.
///
/// A younger file may change again within the resolution of its time stamp.
pub(crate) fn is_stable_at(was: &FileMetadataFingerprint, since: SystemTime) -> bool {
    let since = since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let changed = Duration::new(
        u64::try_from(was.5).unwrap_or_default(),
        u32::try_from(was.6).unwrap_or_default(),
    );
    since.saturating_sub(changed) > Duration::from_secs(1)
}

/// The configuration that is in force, with its sources.
#[derive(Clone)]
pub struct EffectiveConfig {
    /// The configuration.
    pub config: Config,
    /// Source files, including included files.
    pub files: Vec<PathBuf>,
    /// The path of the ledger.
    pub store: PathBuf,
    /// Message for the user.
    pub notice: Option<String>,
    /// Every path that was examined, and its fingerprint. The result is current while none changes.
    pub(crate) examined_files: Vec<(PathBuf, Option<FileMetadataFingerprint>)>,
    /// Files that values are read from. If they change, the configuration is the same and the
    /// values are not.
    value_files: Vec<(PathBuf, Option<FileMetadataFingerprint>)>,
    /// Time at which the read started.
    pub(crate) read_started: SystemTime,
}

/// The ledger that was given on the command line.
static COMMAND_LINE_STORE: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();

/// Sets the ledger of this process, which overrides all other sources.
pub fn set_command_line_store(path: &Path) {
    let _ = COMMAND_LINE_STORE.set(path.to_owned());
}

/// Returns the ledger that was given on the command line or in the environment.
pub fn requested_store() -> Option<PathBuf> {
    let environment =
        || std::env::var_os("TOOLGATE_STORE").filter(|path| !path.is_empty()).map(PathBuf::from);
    COMMAND_LINE_STORE.get().cloned().or_else(environment)
}

/// Returns the ledger to read for a directory: the one that its configurations name, else the
/// user's own if it exists.
///
/// A configuration that cannot be read may name any ledger, so this is an error.
pub fn find_store_for_reading(directory: &Path) -> io::Result<Option<PathBuf>> {
    let store = |path: &Path| -> io::Result<Option<PathBuf>> {
        let hint = "give the ledger with `--store`";
        let config = Config::load(path)
            .map_err(|error| io::Error::new(error.kind(), format!("{error}; {hint}")))?;
        match config.is_store_known() {
            true => Ok(config.store),
            false => Err(io::Error::other(format!(
                "{}: cannot read `store`; fix the file, or {hint}",
                path.display()
            ))),
        }
    };
    let user_path = existing_user_config()?;
    if let Some(user_store) = user_path.as_deref().map(store).transpose()?.flatten() {
        return Ok(Some(user_store));
    }
    // If the user has a configuration, one of a project that was not accepted is ignored.
    let project = match (find_project_config(directory), user_path) {
        (Some(project), Some(_)) if !UserStateDir::without_opening()?.is_trusted(&project)? => None,
        (project, _) => project,
    };
    Ok(project.as_deref().map(store).transpose()?.flatten().or_else(UserStateDir::existing_ledger))
}

impl EffectiveConfig {
    /// Finds the configuration for a directory: the given one, else the user's own and that of the
    /// project if it is trusted.
    pub fn find(
        requested: Option<&Path>,
        directory: &Path,
        state: &UserStateDir,
    ) -> io::Result<Self> {
        let started = SystemTime::now();
        if let Some(path) = requested {
            let found = Self::from_config(Config::load(path)?, vec![path.to_owned()], None, state)?;
            return Ok(Self { read_started: started, ..found });
        }
        let found = Self::find_in_directory(directory, state, started)?;
        let candidates = directory.ancestors().map(|directory| directory.join(CONFIG_FILE_NAME));
        let watched = candidates
            .chain(user_config_path())
            .chain([state.path().join("trusted.json")])
            .map(|path| (path.clone(), fingerprint(&path)));
        Ok(Self {
            examined_files: watched.chain(found.examined_files).collect(),
            read_started: started,
            ..found
        })
    }

    /// Returns the configuration that would be in force here if the project were trusted.
    pub fn load_untrusted(state: &UserStateDir) -> io::Result<Self> {
        let directory = project_dir()?;
        let (config, files) = match (find_project_config(&directory), existing_user_config()?) {
            (Some(project), Some(user)) => (
                with_pinned_tools(
                    Config::load(&project)?.merge_under_user_config(Config::load(&user)?),
                    &project,
                )?,
                vec![project, user],
            ),
            (Some(single), None) | (None, Some(single)) => {
                (with_pinned_tools(Config::load(&single)?, &single)?, vec![single])
            }
            (None, None) => return Err(missing_config_error()),
        };
        let found = Self::from_config(config, files, None, state)?;
        // A new file in any of these directories would be in force too.
        let candidates = directory
            .ancestors()
            .map(|directory| directory.join(CONFIG_FILE_NAME))
            .map(|path| (path.clone(), fingerprint(&path)));
        Ok(Self { examined_files: candidates.chain(found.examined_files).collect(), ..found })
    }

    fn find_in_directory(
        directory: &Path,
        state: &UserStateDir,
        started: SystemTime,
    ) -> io::Result<Self> {
        let user = existing_user_config()?;
        let project = find_project_config(directory);
        let trusted =
            project.as_ref().map(|path| state.is_trusted(path)).transpose()?.unwrap_or(false);
        let trusted_project = project.clone().filter(|_| trusted);
        let not_accepted = |path: &Path| {
            io::Error::other(format!(
                "{}{} is not trusted in its current form; {TRUST_HINT}",
                path.display(),
                state.included_files_hint(path)
            ))
        };
        let found = match (project, user) {
            (Some(project), Some(user)) if trusted => {
                let config = Config::load(&project)?.merge_under_user_config(Config::load(&user)?);
                Self::from_config(config, vec![project, user], None, state)
            }
            (Some(project), None) if trusted => {
                Self::from_config(Config::load(&project)?, vec![project], None, state)
            }
            (Some(project), Some(user)) => {
                let included = state.included_files_hint(&project);
                let notice = format!(
                    "{}{included} is ignored: not trusted in its current form; {TRUST_HINT}",
                    project.display()
                );
                Self::from_config(Config::load(&user)?, vec![user, project], Some(notice), state)
            }
            (Some(project), None) => Err(not_accepted(&project)),
            (None, Some(user)) => Self::from_config(Config::load(&user)?, vec![user], None, state),
            (None, None) => Err(io::Error::other(format!(
                "no {CONFIG_FILE_NAME} here, so no configuration is in force; create one with `toolgate init`"
            ))),
        }?;
        // A file that changes during the read may differ from the accepted one, so the check is
        // repeated.
        let is_young = |(_, was): &(PathBuf, Option<FileMetadataFingerprint>)| {
            was.as_ref().is_some_and(|was| !is_stable_at(was, started))
        };
        match trusted_project.filter(|_| found.examined_files.iter().any(is_young)) {
            Some(path) if !state.is_trusted(&path)? => Err(not_accepted(&path)),
            _ => Ok(found),
        }
    }

    /// Returns the retention of rows, if the configuration names the ledger in use and is sound.
    pub fn retention(&self) -> Option<SignedDuration> {
        let configured_store =
            self.config.store.as_ref().and_then(|path| std::path::absolute(path).ok());
        self.config.retention.filter(|_| {
            configured_store.as_ref() == Some(&self.store) && self.config.check().is_ok()
        })
    }

    /// Returns every path that a long-running process must watch.
    pub fn watched_files(&self) -> Vec<(PathBuf, Option<FileMetadataFingerprint>)> {
        self.examined_files.iter().chain(&self.value_files).cloned().collect()
    }

    fn from_config(
        config: Config,
        mut files: Vec<PathBuf>,
        notice: Option<String>,
        state: &UserStateDir,
    ) -> io::Result<Self> {
        files.extend(config.included_files().iter().cloned());
        // A flag overrides the environment, and the environment overrides a file.
        let store = std::path::absolute(
            requested_store()
                .or_else(|| config.store.clone())
                .unwrap_or_else(|| state.ledger_path()),
        )?;
        // The rules that protect toolgate's own files compare paths as text.
        let is_not_text = |path: &&Path| path.to_str().is_none();
        if let Some(path) =
            files.iter().map(PathBuf::as_path).chain([&*store, state.path()]).find(is_not_text)
        {
            return Err(io::Error::other(format!(
                "{}: path is not valid UTF-8 and cannot be protected",
                path.display()
            )));
        }
        let with_fingerprints = |paths: &[PathBuf]| {
            paths.iter().map(|path| (path.clone(), fingerprint(path))).collect()
        };
        let (examined_files, value_files) =
            (with_fingerprints(&files), with_fingerprints(config.value_files()));
        Ok(Self {
            config,
            files,
            store,
            notice,
            examined_files,
            value_files,
            read_started: SystemTime::UNIX_EPOCH,
        })
    }
}

const TRUST_HINT: &str = "read it, then run `toolgate trust` in a terminal";

/// Formats the list of valid names for an error message.
pub fn list_known_names(names: &[impl AsRef<str>]) -> String {
    match names {
        [] => "none is configured".to_owned(),
        [only_name] => format!("the only one is `{}`", only_name.as_ref()),
        several => format!(
            "known: {}",
            several
                .iter()
                .map(|name| format!("`{}`", name.as_ref()))
                .collect::<Vec<_>>()
                .join(", ")
        ),
    }
}

/// Returns the name of the local user.
pub fn local_user_name() -> String {
    user_name(rustix::process::getuid().as_raw())
}

/// Returns the name of a user, or `uid-<number>` if there is none or the name is reserved.
pub(crate) fn user_name(uid: u32) -> String {
    let number = uid.to_string();
    let known = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let line = known.lines().find(|line| line.split(':').nth(2) == Some(&*number));
    let name = line
        .and_then(|line| line.split(':').next())
        .filter(|name| *name != toolgate::policy::source::CANARY_PRINCIPAL);
    name.map_or_else(|| format!("uid-{uid}"), str::to_owned)
}
