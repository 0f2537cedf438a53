//! The same door in a process of its own, perhaps of another user: what the agent's user cannot touch.

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

/// Most doors for tools that no file declares.
const MOST_UNDECLARED: usize = 256;

/// What the service has open.
struct Service {
    config: PathBuf,
    /// As which agent, where nobody says.
    agent: Option<String>,
    state: State,
    path: PathBuf,
    store: Arc<SqliteStore>,
    now: Mutex<InUse>,
}

/// The doors of one reading of the files.
struct InUse {
    doors: HashMap<String, Arc<Door>>,
    /// For tools that no file declares, by agent and tool.
    undeclared: HashMap<(String, String), Arc<Door>>,
    /// What was read: whatever the files say meanwhile, it is in force.
    found: Arc<InForce>,
    /// The files as they were when they were read.
    files: Vec<(PathBuf, Option<Stamp>)>,
}

/// What is asked.
pub(super) struct Question {
    pub(super) client: Client,
    agent: Option<String>,
    pub(super) event: Vec<u8>,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    lasting(serve(args))
}

/// A process that is there for more than one event.
pub(super) fn lasting(work: impl Future<Output = io::Result<()>>) -> ExitCode {
    super::signals::outlive_limits();
    let _ = toolgate::sandbox::close_inherited();
    // On one thread nobody waits for another to be woken; what takes time is the disk.
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
    let (Some(config), Some(socket)) = (&args.config, &args.socket) else { return Err(io::Error::other("say `--config` and `--socket`")) };
    let state = State::open()?;
    let found = InForce::find(Some(config), &place::project()?, &state)?;
    // The one that opens the ledger for longer sweeps it.
    drop(super::open_store(&found.store, &state)?);
    let (path, store) = (found.store.clone(), Arc::new(SqliteStore::open(&found.store).map_err(io::Error::other)?));
    let now = Mutex::new(InUse::of(found, &path, &state, &store).map_err(io::Error::other)?);
    let service = Arc::new(Service { config: config.clone(), agent: args.agent.clone(), state, path, store, now });
    let kept = Arc::clone(&service);
    let kept = move || lock(&kept.now).found.retention();
    tokio::spawn(crate::retention::keep(Arc::clone(&service.store), kept, say));
    let listener = listen(socket)?;
    say(&format!("toolgate answers hooks at {}, by {}", socket.display(), config.display()));
    let seats = Arc::new(tokio::sync::Semaphore::new(64));
    let (mut hang_up, mut stop) = (signal(SignalKind::hangup())?, signal(SignalKind::terminate())?);
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else {
                    // Too many at once: they are heard when others have gone.
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
                Ok(()) => say(&format!("{} was read again", service.config.display())),
                Err(why) => say(&format!("error: {} stays in force as it was: {why}", service.config.display())),
            },
            _ = stop.recv() => break,
            _ = tokio::signal::ctrl_c() => break,
        }
    }
    std::fs::remove_file(socket)
}

/// Listens where nobody listens. Whoever may reach the socket may ask; what they may do, the configuration says.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(io::Error::other(format!("{} is there, and is no socket", path.display())));
        }
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(io::Error::other(format!("a service listens at {} already", path.display())));
        }
        std::fs::remove_file(path).map_err(named)?;
    }
    let listener = UnixListener::bind(path).map_err(named)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).map_err(named)?;
    Ok(listener)
}

impl InUse {
    /// What was read, with a door for each agent.
    fn of(found: InForce, path: &Path, state: &State, store: &Arc<SqliteStore>) -> Result<Self, String> {
        found.config.sound().map_err(|error| format!("it does not load\n{}", error.render(false)))?;
        if found.store != path {
            return Err(format!("it names another store, {}; start the service again", found.store.display()));
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
    /// Reads the configuration. What is in use stays in use for calls that are under way, and for all where it does not load.
    fn read(&self) -> Result<(), String> {
        // As they are before: what changes while it is read is read again.
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
                // What was read before protects what it names where that is now.
                let found = InForce::clone(&lock(&self.now).found);
                let again = InUse::of(found, &self.path, &self.state, &self.store);
                let mut now = lock(&self.now);
                if let Ok(again) = again {
                    *now = again;
                }
                // Said once for each change.
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

    /// The door for an event.
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
        // What was read meanwhile has doors of its own.
        if Arc::ptr_eq(&now.found, &found) {
            if now.undeclared.len() >= MOST_UNDECLARED {
                now.undeclared.clear();
            }
            now.undeclared.insert(lacks, Arc::clone(&door));
        }
        Ok(door)
    }

    /// The door for an agent, of the files as they are now; as they were, where they do not load any more.
    fn current(&self, agent: Option<&String>) -> Result<Arc<Door>, String> {
        let changed = {
            let now = lock(&self.now);
            // All doors protect the same.
            let moved = now.doors.values().next().is_some_and(|door| !door.links_hold());
            moved || now.files.iter().any(|(file, was)| stamp(file) != *was)
        };
        if changed && let Err(why) = self.read() {
            say(&format!("error: {} stays in force as it was: {why}", self.config.display()));
        }
        let now = lock(&self.now);
        let only = || now.doors.values().next().filter(|_| now.doors.len() == 1);
        let door = match agent.or(self.agent.as_ref()) {
            Some(agent) => now.doors.get(agent).ok_or_else(|| format!("there is no agent `{agent}`")),
            None => only().ok_or_else(|| "there are several agents; say which with `--agent`".to_owned()),
        };
        door.map(Arc::clone)
    }

    async fn hear(&self, mut stream: UnixStream) {
        let asked = match question(&mut stream).await {
            Ok((question, user)) => Event::heard(&question.event).map(|event| (question, user, event)),
            Err(error) => Err(format!("the service could not read what was asked: {error}")),
        };
        let refused = match asked {
            Ok((question, user, event)) => match self.door(question.agent.as_ref(), &event) {
                Ok(door) => return decide(&door, &event, question.client, &place::name_of(user), &mut stream).await,
                Err(reason) => Answer::refusal(&event, format!("toolgate refuses every call: {reason}")).render(&event, question.client),
            },
            Err(reason) => Rendered::Refused(reason),
        };
        let _ = tell(&mut stream, &said(refused)).await;
    }
}

/// Decides about an event, and says so. Whoever does not wait for the answer has no permission: what it was let through with is taken back.
pub(super) async fn decide(door: &Door, event: &Event, client: Client, user: &str, stream: &mut UnixStream) {
    let answer = door.answer(event, client, user).await;
    let lets_through = matches!(event.kind, Kind::Before) && !matches!(answer.decision, Some(Decision::Deny(_)));
    if tell(stream, &said(answer.render(event, client))).await.is_err() && lets_through {
        door.take_back(event, user).await;
    }
}

/// What is asked, and by whom: the kernel says so.
pub(super) async fn question(stream: &mut UnixStream) -> io::Result<(Question, u32)> {
    let user = stream.peer_cred()?.uid();
    let mut asked = Vec::with_capacity(16 << 10);
    // There is room for an event that is too long, and the lines before it.
    tokio::time::timeout(Duration::from_secs(4), stream.take(LONGEST + (64 << 10)).read_to_end(&mut asked)).await??;
    let mut lines = asked.splitn(3, |byte| *byte == b'\n');
    let mut line = || lines.next().ok_or_else(|| io::Error::other("it is no question"));
    let (client, agent, event) = (line()?, line()?, line()?);
    let word = |line| std::str::from_utf8(line).map_err(io::Error::other);
    let (client, agent) = (clap::ValueEnum::from_str(word(client)?, false).map_err(io::Error::other)?, word(agent)?);
    Ok((Question { client, agent: (!agent.is_empty()).then(|| agent.to_owned()), event: event.to_vec() }, user))
}

/// An answer as a hook hears it.
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
