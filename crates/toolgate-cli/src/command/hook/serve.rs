//! Runs the hook service, which may belong to another user, so that the agent's user cannot change
//! its files.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use toolgate_store::SqliteStore;

use super::answer::{Answer, Decision, Rendered};
use super::door::Door;
use super::event::{Client, Event, Kind};
use super::{Args, LONGEST, lock};
use crate::place::{self, InForce, Stamp, State, stamp};
use crate::say::say;

/// Maximum number of cached gates for undeclared tools.
const MOST_UNDECLARED: usize = 256;

/// State of the hook service.
struct Service {
    config: PathBuf,
    /// Agent for requests that name none.
    agent: Option<String>,
    state: State,
    path: PathBuf,
    store: Arc<SqliteStore>,
    now: Mutex<InUse>,
}

/// The gates of one version of the configuration.
struct InUse {
    doors: HashMap<String, Arc<Door>>,
    /// Gates for undeclared tools, by agent and tool.
    undeclared: HashMap<(String, String), Arc<Door>>,
    /// The configuration in force, even if the files have changed since.
    found: Arc<InForce>,
    /// Fingerprints of the files at the time of the read.
    files: Vec<(PathBuf, Option<Stamp>)>,
}

/// A request to the service.
pub(super) struct Question {
    pub(super) client: Client,
    agent: Option<String>,
    pub(super) event: Vec<u8>,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    lasting(serve(args))
}

/// Runs the work of a long-running process to its end.
pub(super) fn lasting(work: impl Future<Output = io::Result<()>>) -> ExitCode {
    super::signals::outlive_limits();
    let _ = toolgate::sandbox::close_inherited();
    // On one thread, no task waits for another thread to wake. Most time is spent on the disk.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(work)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("error: {error}"));
            ExitCode::from(2)
        }
    }
}

async fn serve(args: &Args) -> io::Result<()> {
    let (Some(config), Some(socket)) = (&args.config, &args.socket) else { return Err(io::Error::other("`--config` and `--socket` are required")) };
    let state = State::open()?;
    let found = InForce::find(Some(config), &place::project()?, &state)?;
    // The checked open is short. `SqliteStore::open` also cleans up the ledger.
    drop(super::open_store(&found.store, &state)?);
    let (path, store) = (found.store.clone(), Arc::new(SqliteStore::open(&found.store).map_err(io::Error::other)?));
    let now = Mutex::new(InUse::of(found, &path, &state, &store).map_err(io::Error::other)?);
    let service = Arc::new(Service { config: config.clone(), agent: args.agent.clone(), state, path, store, now });
    let kept = Arc::clone(&service);
    let kept = move || lock(&kept.now).found.retention();
    tokio::spawn(crate::retention::keep(Arc::clone(&service.store), kept, say));
    let listener = listen(socket)?;
    say(&format!("toolgate answers hooks at {}, with {}", socket.display(), config.display()));
    let seats = Arc::new(tokio::sync::Semaphore::new(64));
    let (mut hang_up, mut stop) = (signal(SignalKind::hangup())?, signal(SignalKind::terminate())?);
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else {
                    // The process has too many open files. Waiting clients are accepted after
                    // others have left.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                };
                let (service, seats) = (Arc::clone(&service), Arc::clone(&seats));
                tokio::spawn(async move {
                    let _seat = seats.acquire_owned().await;
                    service.hear(stream).await;
                });
            }
            _ = hang_up.recv() => match service.read() {
                Ok(()) => say(&format!("reloaded {}", service.config.display())),
                Err(why) => say(&format!("error: cannot reload {}, so the previous version stays in force: {why}", service.config.display())),
            },
            _ = stop.recv() => break,
            _ = tokio::signal::ctrl_c() => break,
        }
    }
    std::fs::remove_file(socket)
}

/// Binds the socket, unless another service uses it.
///
/// Every user who can reach the socket may send requests. The configuration decides about them.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(io::Error::other(format!("{} exists and is not a socket", path.display())));
        }
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(io::Error::other(format!("another service listens at {}", path.display())));
        }
        std::fs::remove_file(path).map_err(named)?;
    }
    let listener = UnixListener::bind(path).map_err(named)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).map_err(named)?;
    Ok(listener)
}

impl InUse {
    /// Builds a gate for each agent of a configuration.
    fn of(found: InForce, path: &Path, state: &State, store: &Arc<SqliteStore>) -> Result<Self, String> {
        found.config.sound().map_err(|error| format!("invalid configuration\n{}", error.render(false)))?;
        if found.store != path {
            return Err(format!("`store` changed to {}; restart the service", found.store.display()));
        }
        let mut doors = HashMap::new();
        for name in found.config.names().map(str::to_owned) {
            let door = Door::of(found.clone(), Some(&name), None, state, |_| Ok(Arc::clone(store)))?;
            doors.insert(name, Arc::new(door));
        }
        Ok(Self { doors, undeclared: HashMap::new(), files: found.watched(), found: Arc::new(found) })
    }
}

impl Service {
    /// Reads the configuration again. Calls in progress keep the previous one, and so do all calls
    /// if it does not load.
    fn read(&self) -> Result<(), String> {
        // Fingerprints are taken before the read, so that a change during the read triggers another
        // one.
        let mut before = lock(&self.now).files.clone();
        for (file, was) in &mut before {
            *was = stamp(file);
        }
        let found = self.found();
        let looked_at = found.as_ref().map(InForce::watched).unwrap_or_default();
        match found.and_then(|found| InUse::of(found, &self.path, &self.state, &self.store)) {
            Ok(mut now) => {
                for (file, was) in &mut now.files {
                    *was = before.iter().find(|(known, _)| known == file).map_or(*was, |(_, then)| *then);
                }
                *lock(&self.now) = now;
                Ok(())
            }
            Err(why) => {
                // Rebuild the previous configuration, so that it protects the current targets of
                // links.
                let found = InForce::clone(&lock(&self.now).found);
                let again = InUse::of(found, &self.path, &self.state, &self.store);
                let mut now = lock(&self.now);
                if let Ok(again) = again {
                    *now = again;
                }
                // Report the error once for each change.
                place::watch_too(&mut before, looked_at);
                now.files = before;
                Err(why)
            }
        }
    }

    fn found(&self) -> Result<InForce, String> {
        let project = place::project().map_err(|error| error.to_string())?;
        InForce::find(Some(&self.config), &project, &self.state).map_err(|error| error.to_string())
    }

    /// Returns the gate for an event.
    fn door(&self, agent: Option<&String>, event: &Event) -> Result<Arc<Door>, String> {
        let door = self.current(agent)?;
        let Some(lacks) = door.lacks(event) else { return Ok(door) };
        let found = {
            let now = lock(&self.now);
            if let Some(known) = now.undeclared.get(&lacks) {
                return Ok(Arc::clone(known));
            }
            Arc::clone(&now.found)
        };
        let door = Door::of(InForce::clone(&found), Some(&lacks.0), Some(&lacks.1), &self.state, |_| Ok(Arc::clone(&self.store)))?;
        let door = Arc::new(door);
        let mut now = lock(&self.now);
        // Do not cache the gate if the configuration was replaced meanwhile.
        if Arc::ptr_eq(&now.found, &found) {
            if now.undeclared.len() >= MOST_UNDECLARED {
                now.undeclared.clear();
            }
            now.undeclared.insert(lacks, Arc::clone(&door));
        }
        Ok(door)
    }

    /// Returns the gate for an agent from the current files, or from the previous ones if they do
    /// not load.
    fn current(&self, agent: Option<&String>) -> Result<Arc<Door>, String> {
        let changed = {
            let now = lock(&self.now);
            // All gates protect the same paths, so one is enough.
            let moved = now.doors.values().next().is_some_and(|door| !door.links_hold());
            moved || now.files.iter().any(|(file, was)| stamp(file) != *was)
        };
        if changed && let Err(why) = self.read() {
            say(&format!("error: cannot reload {}, so the previous version stays in force: {why}", self.config.display()));
        }
        let now = lock(&self.now);
        let only = || now.doors.values().next().filter(|_| now.doors.len() == 1);
        let door = match agent.or(self.agent.as_ref()) {
            Some(agent) => now.doors.get(agent).ok_or_else(|| format!("unknown agent `{agent}`")),
            None => only().ok_or_else(|| "the configuration has several agents; choose one with `--agent`".to_owned()),
        };
        door.map(Arc::clone)
    }

    async fn hear(&self, mut stream: UnixStream) {
        let asked = match question(&mut stream).await {
            Ok((question, user)) => Event::heard(&question.event).map(|event| (question, user, event)),
            Err(error) => Err(format!("the service cannot read the request: {error}")),
        };
        let refused = match asked {
            Ok((question, user, event)) => match self.door(question.agent.as_ref(), &event) {
                Ok(door) => return decide(&door, &event, question.client, &place::name_of(user), &mut stream).await,
                Err(reason) => Answer::refusal(&event, format!("toolgate denies every call: {reason}")).render(&event, question.client),
            },
            Err(reason) => Rendered::Refused(reason),
        };
        let _ = tell(&mut stream, &said(refused)).await;
    }
}

/// Decides about an event, and sends the answer.
///
/// If the client has left, the permission is withdrawn, because the call will not run.
pub(super) async fn decide(door: &Door, event: &Event, client: Client, user: &str, stream: &mut UnixStream) {
    let answer = door.answer(event, client, user).await;
    let lets_through = matches!(event.kind, Kind::Before) && !matches!(answer.decision, Some(Decision::Deny(_)));
    if tell(stream, &said(answer.render(event, client))).await.is_err() && lets_through {
        door.take_back(event, user).await;
    }
}

/// Reads a request, and returns it with the user id of the peer from the kernel.
pub(super) async fn question(stream: &mut UnixStream) -> io::Result<(Question, u32)> {
    let user = stream.peer_cred()?.uid();
    let mut asked = Vec::with_capacity(16 << 10);
    // The limit leaves room for the header lines and for detecting an event that is too large.
    tokio::time::timeout(Duration::from_secs(4), stream.take(LONGEST + (64 << 10)).read_to_end(&mut asked)).await??;
    let mut lines = asked.splitn(3, |byte| *byte == b'\n');
    let mut line = || lines.next().ok_or_else(|| io::Error::other("incomplete request"));
    let (client, agent, event) = (line()?, line()?, line()?);
    let word = |line| std::str::from_utf8(line).map_err(io::Error::other);
    let (client, agent) = (clap::ValueEnum::from_str(word(client)?, false).map_err(io::Error::other)?, word(agent)?);
    Ok((Question { client, agent: (!agent.is_empty()).then(|| agent.to_owned()), event: event.to_vec() }, user))
}

/// Serializes an answer for the hook.
fn said(rendered: Rendered) -> String {
    match rendered {
        Rendered::Told(told) => format!("0{told}\n"),
        Rendered::Refused(reason) => format!("2{reason}"),
        Rendered::Done(_) => String::new(),
    }
}

pub(super) async fn tell(stream: &mut UnixStream, said: &str) -> io::Result<()> {
    stream.write_all(said.as_bytes()).await
}
