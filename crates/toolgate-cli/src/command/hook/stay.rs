//! A process that stays while a session of a client is open, so that a hook finds ready what it would have to open at every step. It
//! decides by what is kept ready for a hook (`compiled`), looked at anew with every question, and by nothing else: whatever is not
//! plainly so is left to the hook, which then does all by itself.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use tokio::net::UnixListener;
use tokio::sync::Notify;
use toolgate::json::Digest;
use toolgate::names::of_client;
use toolgate_store::SqliteStore;

use super::compiled::{self, Compiled};
use super::door::Door;
use super::event::{Event, Kind};
use super::serve::{self, Question};
use super::{Args, Rendered, lock, wire};
use crate::place::{self, State, stamp};

/// How long it stays where nobody asks.
const IDLE: Duration = Duration::from_secs(30 * 60);
/// How often it looks whether it is still to stay.
const LOOK: Duration = Duration::from_secs(15);
/// How long it answers those who have come while it left.
const FAREWELL: Duration = Duration::from_millis(200);
/// How long whoever is to stay waits for somebody who leaves, and whoever leaves for those who are being answered.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a hook hears.
pub(super) enum Asked {
    /// Nobody stays.
    Nobody,
    /// It is to do all by itself.
    Alone,
    Told(Rendered),
}

/// Where it listens: for one way to ask, in one directory, by one program. What stands there by the same name later is another place.
fn socket(args: &Args) -> io::Result<PathBuf> {
    let (state, project) = (State::open()?, place::project()?);
    let here = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let way = compiled::way(args, &project);
    let places = (here(Path::new("."))?, here(&project)?, stamp(Path::new("/proc/self/exe")));
    let name = Digest::of(format!("{way} {places:?}").as_bytes()).to_string();
    Ok(state.path().join("stay").join(name.get(..24).unwrap_or(&name)))
}

/// Asks whoever stays. Who is there and does not answer has not said yes.
pub(super) fn ask(args: &Args, event: &[u8], patience: Duration) -> Asked {
    let Ok(socket) = socket(args) else { return Asked::Nobody };
    let stream = match connected(&socket) {
        Ok(stream) => stream,
        // Too many wait there already.
        Err(rustix::io::Errno::AGAIN) => return Asked::Alone,
        Err(_) => return Asked::Nobody,
    };
    match wire::exchange(stream, &super::named(args.client), args.agent.as_deref().unwrap_or_default(), event, patience) {
        Ok((wire::ALONE, _)) => Asked::Alone,
        Ok(said) => Asked::Told(super::rendered(said, &socket)),
        Err(error) => {
            let why = if error.kind() == io::ErrorKind::WouldBlock { "not in time".to_owned() } else { error.to_string() };
            Asked::Told(Rendered::Refused(format!("the process that stays with this session does not answer: {why}")))
        }
    }
}

/// A connection, where there is one without waiting.
fn connected(socket: &Path) -> rustix::io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    connect(&stream, &SocketAddrUnix::new(socket)?)?;
    let stream = UnixStream::from(stream);
    stream.set_nonblocking(false).map_err(|_| rustix::io::Errno::IO)?;
    Ok(stream)
}

/// Has somebody stay from here on. Where that cannot be, every hook goes on by itself.
pub(super) fn begin(args: &Args, session: &str) -> io::Result<()> {
    let program = std::env::current_exe()?;
    let is_own = program.file_name().is_some_and(|name| name == "toolgate-hook");
    let mut command = Command::new(&program);
    command.args((!is_own).then_some("hook")).args(["--stay", "--session", session]);
    for (flag, value) in [("--config", &args.config), ("--store", &args.store)] {
        command.args(value.iter().flat_map(|value| [flag.as_ref(), value.as_os_str()]));
    }
    command.args(args.agent.iter().flat_map(|agent| ["--agent", agent]));
    // It is no part of what the client waits for, or ends.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().map(drop)
}

/// What stays.
struct Staying {
    args: Args,
    user: String,
    project: PathBuf,
    state: State,
    ready: Mutex<Ready>,
    sessions: Mutex<HashSet<String>>,
    asked: Mutex<Instant>,
    leave: Notify,
}

/// What is ready: the ledger, and a door for each tool.
#[derive(Default)]
struct Ready {
    ledger: Option<Ledger>,
    doors: HashMap<String, (Compiled, Arc<Door>)>,
}

/// A ledger that is open, and the files that it is.
struct Ledger {
    path: PathBuf,
    files: Files,
    store: Arc<SqliteStore>,
}

/// The database, the directory beside it, and the log: which files they are.
type Files = [Option<(u64, u64)>; 3];

fn files(path: &Path) -> Files {
    // The log stands where the database is, wherever a link leads.
    let mut log = path.canonicalize().unwrap_or_else(|_| path.to_owned()).into_os_string();
    log.push("-wal");
    [path, &toolgate_store::beside(path), Path::new(&log)].map(|path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino())))
}

pub(super) fn run(args: &Args) -> ExitCode {
    let _ = tracing::subscriber::set_global_default(super::loud::Loud);
    if let Some(path) = &args.store {
        place::name_store(path);
    }
    serve::lasting(stay(args))
}

async fn stay(args: &Args) -> io::Result<()> {
    let socket = socket(args)?;
    if let Some(directory) = socket.parent() {
        use std::os::unix::fs::DirBuilderExt;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    }
    // One stays; whoever comes second need not, unless the first is about to leave.
    let seat = fs::OpenOptions::new().write(true).create(true).truncate(false).open(socket.with_extension("lock"))?;
    let begun = Instant::now();
    while rustix::fs::flock(&seat, FlockOperation::NonBlockingLockExclusive).is_err() {
        if begun.elapsed() > PATIENCE {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    match fs::remove_file(&socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&socket)?;
    let own = fs::metadata(&socket)?.ino();
    let staying = Arc::new(Staying {
        args: args.clone(),
        user: place::user(),
        project: place::project()?,
        state: State::open()?,
        ready: Mutex::default(),
        sessions: Mutex::new(args.session.iter().cloned().collect()),
        asked: Mutex::new(Instant::now()),
        leave: Notify::new(),
    });
    let mut look = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(tokio::spawn(Arc::clone(&staying).hear(stream))),
                // Too many at once: they are heard when others have gone.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            },
            _ = look.tick() => {
                let is_gone = fs::metadata(&socket).map_or(true, |found| found.ino() != own);
                // Whose directory was taken away has nobody to wait for.
                let is_homeless = fs::metadata(".").map_or(true, |here| here.nlink() == 0) || !staying.project.exists();
                if is_gone || is_homeless || lock(&staying.asked).elapsed() > IDLE {
                    break;
                }
            }
            () = staying.leave.notified() => break,
        }
    }
    // Nobody comes any more; whoever has come is answered.
    if fs::metadata(&socket).is_ok_and(|found| found.ino() == own) {
        fs::remove_file(&socket)?;
    }
    let farewell = async {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(Arc::clone(&staying).hear(stream));
        }
    };
    let _ = tokio::time::timeout(FAREWELL, farewell).await;
    let left = Instant::now();
    while Arc::strong_count(&staying) > 1 && left.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

impl Staying {
    async fn hear(self: Arc<Self>, mut stream: tokio::net::UnixStream) {
        let question = match serve::question(&mut stream).await {
            Ok((question, user)) if user == rustix::process::getuid().as_raw() => question,
            // It stays for one user, and half a question is nobody's.
            _ => return,
        };
        match self.decided(&question).await {
            Some((door, event)) => serve::decide(&door, &event, question.client, &self.user, &mut stream).await,
            None => drop(serve::tell(&mut stream, &char::from(b'0' + wire::ALONE).to_string()).await),
        }
    }

    /// An event, and the door that decides about it; `None` where that is for the hook to find out.
    async fn decided(&self, question: &Question) -> Option<(Arc<Door>, Event)> {
        *lock(&self.asked) = Instant::now();
        let event = Event::heard(&question.event).ok()?;
        match event.kind {
            Kind::Ends => {
                let mut sessions = lock(&self.sessions);
                sessions.remove(&event.session);
                if sessions.is_empty() {
                    self.leave.notify_one();
                }
                return None;
            }
            Kind::Begins => {
                lock(&self.sessions).insert(event.session);
                return None;
            }
            Kind::Before | Kind::After(_) | Kind::Failed { .. } => {}
            Kind::Unread | Kind::Says(_) | Kind::Misread(..) => return None,
        }
        lock(&self.sessions).insert(event.session.clone());
        Some((self.door(&of_client(&event.tool))?, event))
    }

    /// The door for a tool, where what it was made of is as it was.
    fn door(&self, tool: &str) -> Option<Arc<Door>> {
        let mut ready = lock(&self.ready);
        if let Some(ledger) = &ready.ledger {
            let [database, beside, log] = files(&ledger.path);
            if [database, beside, log] != ledger.files {
                // Whoever closes a ledger whose log was taken away puts that into the file: it is left as it is, and gone with this process.
                let is_cut_off = log != ledger.files[2];
                let left = std::mem::take(&mut *ready);
                if is_cut_off {
                    std::mem::forget(left);
                    self.leave.notify_one();
                    return None;
                }
            }
        }
        if let Some((kept, door)) = ready.doors.get(tool) {
            if kept.holds() {
                return Some(Arc::clone(door));
            }
            ready.doors.remove(tool);
        }
        let kept = Compiled::find(&self.args, &self.project, &self.state, tool)?;
        let store = ready.ledger(&kept.store)?;
        let door = Arc::new(Door::ready(&kept, tool, store)?);
        ready.doors.insert(tool.to_owned(), (kept, Arc::clone(&door)));
        Some(door)
    }
}

impl Ready {
    /// The ledger at a path, open.
    fn ledger(&mut self, path: &Path) -> Option<Arc<SqliteStore>> {
        if let Some(ledger) = self.ledger.as_ref().filter(|ledger| ledger.path == path) {
            return Some(Arc::clone(&ledger.store));
        }
        let [before, beside, _] = files(path);
        // One that is not there is not begun anew.
        let store = Arc::new(SqliteStore::open_briefly(path).ok()?.and_then(|_| SqliteStore::open(path).ok())?);
        let files = files(path);
        if files.contains(&None) || files[..2] != [before, beside] {
            return None;
        }
        *self = Self { ledger: Some(Ledger { path: path.to_owned(), files, store: Arc::clone(&store) }), doors: HashMap::new() };
        Some(store)
    }
}
