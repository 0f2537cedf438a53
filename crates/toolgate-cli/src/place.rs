//! What is in force here, and where toolgate keeps what is the user's and no project's.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use toolgate::SignedDuration;
use toolgate::config::Config;
pub(crate) use toolgate::home::home;
use toolgate::json::Digest;

/// The name of a configuration.
pub(crate) const FILE: &str = "toolgate.toml";

/// The name of the user's own ledger.
pub(crate) const LEDGER: &str = "ledger.db";

/// The user's own directory for state: which projects are trusted, which ledgers are known.
pub(crate) struct State(PathBuf);

impl State {
    /// Where it is: `TOOLGATE_STATE`, else under `XDG_STATE_HOME`, else under the home directory.
    pub(crate) fn path_of() -> io::Result<PathBuf> {
        if let Some(path) = std::env::var_os("TOOLGATE_STATE").filter(|path| !path.is_empty()) {
            return std::path::absolute(PathBuf::from(path));
        }
        let base = absolute("XDG_STATE_HOME").or_else(|| home().map(|home| home.join(".local/state")));
        base.map(|base| base.join("toolgate")).ok_or_else(|| io::Error::other("there is no home directory; set TOOLGATE_STATE"))
    }

    /// It by its name, for who only wants to know which paths are in it.
    pub(crate) fn unopened() -> io::Result<Self> {
        Self::path_of().map(Self)
    }

    /// Opens it, or makes it: nobody else may look into it.
    pub(crate) fn open() -> io::Result<Self> {
        let path = Self::path_of()?;
        let named = |error: io::Error| io::Error::new(error.kind(), format!("the state directory {}: {error}", path.display()));
        let found = match fs::metadata(&path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(named)?;
                fs::metadata(&path).map_err(named)?
            }
            Err(error) => return Err(named(error)),
        };
        if !found.is_dir() {
            return Err(named(io::Error::other("it is no directory")));
        }
        if found.uid() != rustix::process::geteuid().as_raw() {
            return Err(named(io::Error::other("it belongs to somebody else")));
        }
        if found.mode() & 0o077 != 0 {
            return Err(named(io::Error::other(format!(
                "others may look into it (mode {:o}); run `chmod 700` on it",
                found.mode() & 0o777
            ))));
        }
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The ledger of those who name none.
    pub(crate) fn ledger(&self) -> PathBuf {
        self.0.join(LEDGER)
    }

    /// The user's own ledger, if there is one.
    fn ledger_there() -> Option<PathBuf> {
        Self::unopened().ok().map(|state| state.ledger()).filter(|ledger| ledger.exists())
    }

    /// The key that what is kept here is known by.
    pub(crate) fn key(&self) -> io::Result<[u8; 32]> {
        let path = self.0.join("key");
        if let Ok(key) = fs::read(&path)
            && let Ok(key) = <[u8; 32]>::try_from(key)
        {
            return Ok(key);
        }
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(io::Error::other)?;
        let draft = self.0.join(format!("key.{}", std::process::id()));
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
        file.write_all(&key)?;
        fs::rename(draft, path)?;
        Ok(key)
    }

    fn list(&self, name: &str) -> io::Result<BTreeMap<String, String>> {
        let path = self.0.join(name);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| io::Error::other(format!("{}: {e}", path.display()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            Err(error) => Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
        }
    }

    /// Changes a list as a whole, one process at a time.
    fn change(&self, name: &str, change: impl FnOnce(&mut BTreeMap<String, String>)) -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).mode(0o600);
        let lock = options.clone().truncate(false).open(self.0.join(format!("{name}.lock")))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)?;
        let mut list = self.list(name)?;
        change(&mut list);
        let draft = self.0.join(format!("{name}.new"));
        let mut file = options.truncate(true).open(&draft)?;
        file.write_all(&serde_json::to_vec_pretty(&list)?)?;
        file.sync_all()?;
        fs::rename(draft, self.0.join(name))
    }

    /// Whether somebody has accepted a configuration as it is now.
    pub(crate) fn trusts(&self, config: &Path) -> io::Result<bool> {
        // One that nobody has ever accepted is not looked into: it may name whatever it likes.
        let Some(accepted) = self.list("trusted.json")?.remove(&key(config)) else { return Ok(false) };
        Ok(accepted == digest(config)?.to_string())
    }

    /// Accepts a configuration as it is now.
    pub(crate) fn trust(&self, config: &Path) -> io::Result<()> {
        let digest = digest(config)?.to_string();
        self.change("trusted.json", |list| {
            list.insert(key(config), digest);
        })
    }

    /// Does not accept it any more; says whether it was.
    pub(crate) fn distrust(&self, config: &Path) -> io::Result<bool> {
        let known = self.list("trusted.json")?.contains_key(&key(config));
        if known {
            self.change("trusted.json", |list| {
                list.remove(&key(config));
            })?;
        }
        Ok(known)
    }

    /// The files that a configuration names, any of which may be what has changed; nothing where it names none.
    fn or_named(&self, config: &Path) -> String {
        // One that nobody has ever accepted is not looked into.
        let is_known = self.list("trusted.json").is_ok_and(|list| list.contains_key(&key(config)));
        let text = if is_known { read(config).unwrap_or_default() } else { String::new() };
        let names = names_of(Config::parse(&config.display().to_string(), &text).files(), config);
        if names.is_empty() { names } else { format!(", or a file that it names ({names}),") }
    }

    /// The name of the ledger that was seen at a path before.
    pub(crate) fn known_ledger(&self, store: &Path) -> io::Result<Option<String>> {
        Ok(self.list("ledgers.json")?.remove(&key(store)))
    }

    /// Remembers which ledger is at a path.
    pub(crate) fn know_ledger(&self, store: &Path, id: &str) -> io::Result<()> {
        self.change("ledgers.json", |list| {
            list.insert(key(store), id.to_owned());
        })
    }
}

fn key(path: &Path) -> String {
    // By its own name, wherever that leads: a link that is put there is something else.
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let beside = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
    beside().unwrap_or_else(|| path.clone()).display().to_string()
}

/// A directory that the environment names. A relative one counts for nothing.
fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// The digest of a configuration with all that it includes.
fn digest(config: &Path) -> io::Result<Digest> {
    // By whatever name it is called, it is the same file.
    let config = &config.canonicalize().unwrap_or_else(|_| config.to_owned());
    let text = read(config)?;
    let parsed = Config::parse(&config.display().to_string(), &text);
    let mut all = text.into_bytes();
    for file in parsed.files() {
        // Names with lengths, so that nothing slides from one file into another.
        let text = content(file).unwrap_or_default();
        all.extend_from_slice(format!("\n{} {}\n", file.display(), text.len()).as_bytes());
        all.extend_from_slice(&text);
    }
    Ok(Digest::of(&all))
}

/// Files that a configuration names, as they are called beside it.
pub(crate) fn names_of(files: &[PathBuf], config: &Path) -> String {
    let beside = config.parent().unwrap_or(Path::new(""));
    let names = files.iter().map(|file| format!("`{}`", file.strip_prefix(beside).unwrap_or(file).display()));
    names.collect::<Vec<_>>().join(", ")
}

fn read(path: &Path) -> io::Result<String> {
    let text = content(path).and_then(|text| String::from_utf8(text).map_err(io::Error::other));
    text.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// What is in a plain file, as much of it as it says that there is: a device has no end.
fn content(path: &Path) -> io::Result<Vec<u8>> {
    let found = fs::metadata(path)?;
    if !found.is_file() {
        return Err(io::Error::other("it is no plain file"));
    }
    let mut content = Vec::new();
    fs::File::open(path)?.take(found.len()).read_to_end(&mut content)?;
    Ok(content)
}

/// Watches the files of a reading that failed, too: what is wrong may be mended in one that only this reading names.
pub(crate) fn watch_too(files: &mut Vec<(PathBuf, Option<Stamp>)>, read: Vec<(PathBuf, Option<Stamp>)>) {
    for (file, was) in read {
        if files.iter().all(|(known, _)| *known != file) {
            files.push((file, was));
        }
    }
}

/// The configuration that is the user's own.
pub(crate) fn own() -> Option<PathBuf> {
    let base = absolute("XDG_CONFIG_HOME").or_else(|| home().map(|home| home.join(".config")))?;
    Some(base.join("toolgate").join(FILE))
}

/// The user's own file, if there is one. Where that cannot be told, nobody knows what holds.
fn own_there() -> io::Result<Option<PathBuf>> {
    let Some(path) = own() else { return Ok(None) };
    match fs::metadata(&path) {
        Ok(found) => Ok(found.is_file().then_some(path)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
    }
}

/// The configuration of the project that a directory is in.
pub(crate) fn of_project(directory: &Path) -> Option<PathBuf> {
    let found = directory.ancestors().map(|directory| directory.join(FILE)).find(|path| path.is_file());
    found.filter(|path| Some(path) != own().as_ref())
}

/// A configuration as it holds: that of the project here holds under the user's own, if there is one.
pub(crate) fn under_own(config: Config, path: &Path) -> io::Result<Config> {
    let Some(own) = own_there()? else { return Ok(config) };
    let is_of_project = match of_project(&project()?) {
        Some(here) => here.canonicalize()? == path.canonicalize()?,
        None => false,
    };
    if is_of_project { Ok(config.under(Config::load(&own)?)) } else { Ok(config) }
}

/// Where it is kept what the tools of a configuration's upstreams looked like.
pub(crate) fn pins(state: &Path, config: &Path) -> PathBuf {
    let config = std::path::absolute(config).unwrap_or_else(|_| config.to_owned());
    let name: String = Digest::of(config.as_os_str().as_encoded_bytes()).to_string().chars().take(16).collect();
    state.join("upstreams").join(name)
}

/// A configuration with what is known of its upstreams from before, so that rules are held against the tools that there are.
pub(crate) fn with_known(config: Config, path: &Path) -> io::Result<Config> {
    if config.upstreams.is_empty() {
        return Ok(config);
    }
    let known = toolgate_mcp::Known::of(&config, &pins(&State::path_of()?, path))?;
    Ok(config.behind(&known))
}

/// The configuration that is given, else that of the project here, by the shortest name that it has.
pub(crate) fn here(given: Option<&PathBuf>) -> io::Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path.clone());
    }
    if Path::new(FILE).is_file() {
        return Ok(PathBuf::from(FILE));
    }
    of_project(&std::env::current_dir()?).ok_or_else(nothing_here)
}

pub(crate) fn nothing_here() -> io::Error {
    io::Error::other(format!("there is no {FILE} here; make one with `toolgate init`"))
}

/// The directory of the project that a client works in. What the agent does to its own directory is not asked.
pub(crate) fn project() -> io::Result<PathBuf> {
    absolute("CLAUDE_PROJECT_DIR").map_or_else(std::env::current_dir, Ok)
}

/// How a file is known to be the same.
pub(crate) type Stamp = (u64, u64, u64, i64, i64, i64, i64);

/// How a file is now; `None` where there is none.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let file = fs::metadata(path).ok()?;
    Some((file.dev(), file.ino(), file.len(), file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()))
}

/// Whether a file was left alone for a second before a moment. A younger one may be something else by then, and look the same.
pub(crate) fn is_settled(was: &Stamp, since: SystemTime) -> bool {
    let since = since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let changed = Duration::new(u64::try_from(was.5).unwrap_or_default(), u32::try_from(was.6).unwrap_or_default());
    since.saturating_sub(changed) > Duration::from_secs(1)
}

/// What holds.
#[derive(Clone)]
pub(crate) struct InForce {
    pub(crate) config: Config,
    /// The files that it comes from, those that are included too.
    pub(crate) files: Vec<PathBuf>,
    pub(crate) store: PathBuf,
    /// What a person should be told.
    pub(crate) notice: Option<String>,
    /// Every path that was looked at, and how it was: while none of them changes, nothing else holds.
    pub(crate) looked_at: Vec<(PathBuf, Option<Stamp>)>,
    /// The files that values are taken from: what holds is the same when they change, and what they hold is not.
    values: Vec<(PathBuf, Option<Stamp>)>,
    /// When reading began.
    pub(crate) since: SystemTime,
}

/// The ledger that was named on the command line.
static NAMED: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();

/// Names the ledger for whatever this process does: that counts for more than all else.
pub(crate) fn name_store(path: &Path) {
    let _ = NAMED.set(path.to_owned());
}

/// The ledger that was named on the command line, or in the environment.
pub(crate) fn named_store() -> Option<PathBuf> {
    let environment = || std::env::var_os("TOOLGATE_STORE").filter(|path| !path.is_empty()).map(PathBuf::from);
    NAMED.get().cloned().or_else(environment)
}

/// The ledger of what holds in a directory, for who only looks into it: the one that its files name, else the user's own where there
/// is one. A file that cannot be read may name any.
pub(crate) fn store_of(directory: &Path) -> io::Result<Option<PathBuf>> {
    let store = |path: &Path| -> io::Result<Option<PathBuf>> {
        let say = "name the ledger with `--store`";
        let config = Config::load(path).map_err(|error| io::Error::new(error.kind(), format!("{error}; {say}")))?;
        match config.tells_store() {
            true => Ok(config.store),
            false => Err(io::Error::other(format!("{}: it cannot be read which ledger it names; mend it, or {say}", path.display()))),
        }
    };
    let own = own_there()?;
    if let Some(named) = own.as_deref().map(store).transpose()?.flatten() {
        return Ok(Some(named));
    }
    // Beside the user's own, one that nobody has accepted has no say.
    let project = match (of_project(directory), own) {
        (Some(project), Some(_)) if !State::unopened()?.trusts(&project)? => None,
        (project, _) => project,
    };
    Ok(project.as_deref().map(store).transpose()?.flatten().or_else(State::ledger_there))
}

impl InForce {
    /// What holds in a directory: the configuration that is given, else the user's own and that of the project, where it is
    /// trusted.
    pub(crate) fn find(given: Option<&Path>, directory: &Path, state: &State) -> io::Result<Self> {
        let since = SystemTime::now();
        if let Some(path) = given {
            let found = Self::of(Config::load(path)?, vec![path.to_owned()], None, state)?;
            return Ok(Self { since, ..found });
        }
        let found = Self::found(directory, state, since)?;
        let above = directory.ancestors().map(|directory| directory.join(FILE));
        let more = above.chain(own()).chain([state.path().join("trusted.json")]).map(|path| (path.clone(), stamp(&path)));
        Ok(Self { looked_at: more.chain(found.looked_at).collect(), since, ..found })
    }

    /// What would hold here, whether or not somebody has accepted it yet: the configuration of the project, and the user's own.
    pub(crate) fn tried(state: &State) -> io::Result<Self> {
        let directory = project()?;
        let (config, files) = match (of_project(&directory), own_there()?) {
            (Some(project), Some(own)) => (with_known(Config::load(&project)?.under(Config::load(&own)?), &project)?, vec![project, own]),
            (Some(one), None) | (None, Some(one)) => (with_known(Config::load(&one)?, &one)?, vec![one]),
            (None, None) => return Err(nothing_here()),
        };
        let found = Self::of(config, files, None, state)?;
        // A file in any of these would count as well.
        let above = directory.ancestors().map(|directory| directory.join(FILE)).map(|path| (path.clone(), stamp(&path)));
        Ok(Self { looked_at: above.chain(found.looked_at).collect(), ..found })
    }

    fn found(directory: &Path, state: &State, since: SystemTime) -> io::Result<Self> {
        let own = own_there()?;
        let project = of_project(directory);
        let trusted = project.as_ref().map(|path| state.trusts(path)).transpose()?.unwrap_or(false);
        let accepted = project.clone().filter(|_| trusted);
        let not_accepted =
            |path: &Path| io::Error::other(format!("{}{} is not accepted as it is now; {TRUST}", path.display(), state.or_named(path)));
        let found = match (project, own) {
            (Some(project), Some(own)) if trusted => {
                let config = Config::load(&project)?.under(Config::load(&own)?);
                Self::of(config, vec![project, own], None, state)
            }
            (Some(project), None) if trusted => Self::of(Config::load(&project)?, vec![project], None, state),
            (Some(project), Some(own)) => {
                let or = state.or_named(&project);
                let notice = format!("{} is not in force, because nobody has accepted it{or} as it is now; {TRUST}", project.display());
                Self::of(Config::load(&own)?, vec![own, project], Some(notice), state)
            }
            (Some(project), None) => Err(not_accepted(&project)),
            (None, Some(own)) => Self::of(Config::load(&own)?, vec![own], None, state),
            (None, None) => {
                Err(io::Error::other(format!("there is no {FILE} here, so nothing is in force; make one with `toolgate init`")))
            }
        }?;
        // What changes while it is read may be something else than what was accepted.
        let is_young = |(_, was): &(PathBuf, Option<Stamp>)| was.as_ref().is_some_and(|was| !is_settled(was, since));
        match accepted.filter(|_| found.looked_at.iter().any(is_young)) {
            Some(path) if !state.trusts(&path)? => Err(not_accepted(&path)),
            _ => Ok(found),
        }
    }

    /// How long rows stay in the ledger, where the configuration says so of the one that is used.
    pub(crate) fn retention(&self) -> Option<SignedDuration> {
        let named = self.config.store.as_ref().and_then(|path| std::path::absolute(path).ok());
        self.config.retention.filter(|_| named.as_ref() == Some(&self.store) && self.config.sound().is_ok())
    }

    /// Every path whose change somebody takes up who stays.
    pub(crate) fn watched(&self) -> Vec<(PathBuf, Option<Stamp>)> {
        self.looked_at.iter().chain(&self.values).cloned().collect()
    }

    fn of(config: Config, mut files: Vec<PathBuf>, notice: Option<String>, state: &State) -> io::Result<Self> {
        files.extend(config.files().iter().cloned());
        // A flag counts for more than the environment, and that for more than a file.
        let store = std::path::absolute(named_store().or_else(|| config.store.clone()).unwrap_or_else(|| state.ledger()))?;
        // The rules that protect what is toolgate's go by text.
        let unsaid = |path: &&Path| path.to_str().is_none();
        if let Some(path) = files.iter().map(PathBuf::as_path).chain([&*store, state.path()]).find(unsaid) {
            return Err(io::Error::other(format!("{}: its path is no text, so nobody could be kept away from it", path.display())));
        }
        let stamped = |paths: &[PathBuf]| paths.iter().map(|path| (path.clone(), stamp(path))).collect();
        let (looked_at, values) = (stamped(&files), stamped(config.taken_from()));
        Ok(Self { config, files, store, notice, looked_at, values, since: SystemTime::UNIX_EPOCH })
    }
}

const TRUST: &str = "read it, then run `toolgate trust` in a terminal";

/// What there is, for whoever has named something else.
pub(crate) fn there_are(names: &[impl AsRef<str>]) -> String {
    match names {
        [] => "there is none".to_owned(),
        [one] => format!("there is only `{}`", one.as_ref()),
        several => format!("there are {}", several.iter().map(|name| format!("`{}`", name.as_ref())).collect::<Vec<_>>().join(", ")),
    }
}

/// The local user's name.
pub(crate) fn user() -> String {
    name_of(rustix::process::getuid().as_raw())
}

/// A user's name; the number where there is none, or none that anybody can have.
pub(crate) fn name_of(uid: u32) -> String {
    let number = uid.to_string();
    let known = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let line = known.lines().find(|line| line.split(':').nth(2) == Some(&*number));
    let name = line.and_then(|line| line.split(':').next()).filter(|name| *name != toolgate::config::CANARY_PRINCIPAL);
    name.map_or_else(|| format!("uid-{uid}"), str::to_owned)
}
