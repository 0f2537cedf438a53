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

use super::event::{HookClient, HookEvent, HookEventKind};
use super::{Args, MAX_EVENT_BYTES, lock};
use crate::effective_config;
use crate::effective_config::{
    EffectiveConfig, FileMetadataFingerprint, UserStateDir, fingerprint,
};
use crate::evaluate::HookGate;
use crate::response::{HookReply, RenderedReply, ReplyDecision};
use crate::stderr::print_stderr;

/// Maximum number of cached gates for undeclared tools.
const MAX_UNDECLARED_GATES: usize = 256;

/// State of the hook service.
struct HookService {
    config: PathBuf,
    /// Agent for requests that name none.
    agent: Option<String>,
    state: UserStateDir,
    path: PathBuf,
    store: Arc<SqliteStore>,
    current: Mutex<LoadedGates>,
}

/// The gates of one version of the configuration.
struct LoadedGates {
    gates: HashMap<String, Arc<HookGate>>,
    /// Gates for undeclared tools, by agent and tool.
    undeclared_gates: HashMap<(String, String), Arc<HookGate>>,
    /// The configuration in force, even if the files have changed since.
    config: Arc<EffectiveConfig>,
    /// Fingerprints of the files at the time of the read.
    files: Vec<(PathBuf, Option<FileMetadataFingerprint>)>,
}

/// A request to the service.
pub(crate) struct ServiceRequest {
    pub(crate) client: HookClient,
    agent: Option<String>,
    pub(crate) event: Vec<u8>,
}

/// Runs the service until it is stopped.
pub fn run(args: &Args) -> ExitCode {
    run_service(serve(args))
}

/// Runs the work of a long-running process to its end.
pub(crate) fn run_service(work: impl Future<Output = io::Result<()>>) -> ExitCode {
    crate::ignore_limit_signals::block_limit_signals();
    let _ = toolgate_process::sandbox::close_inherited_files();
    // On one thread, no task waits for another thread to wake. Most time is spent on the disk.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(work)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_stderr(&format!("error: {error}"));
            ExitCode::from(2)
        }
    }
}

async fn serve(args: &Args) -> io::Result<()> {
    let (Some(config), Some(socket)) = (&args.config, &args.socket) else {
        return Err(io::Error::other("`--config` and `--socket` are required"));
    };
    let state = UserStateDir::open()?;
    let found = EffectiveConfig::find(Some(config), &effective_config::project_dir()?, &state)?;
    // The checked open is short. `SqliteStore::open` also cleans up the ledger.
    drop(super::open_store(&found.store, &state)?);
    let (path, store) =
        (found.store.clone(), Arc::new(SqliteStore::open(&found.store).map_err(io::Error::other)?));
    let current = Mutex::new(
        LoadedGates::from_config(found, &path, &state, &store).map_err(io::Error::other)?,
    );
    let service = Arc::new(HookService {
        config: config.clone(),
        agent: args.agent.clone(),
        state,
        path,
        store,
        current,
    });
    let retention_source = Arc::clone(&service);
    let current_retention = move || lock(&retention_source.current).config.retention();
    tokio::spawn(crate::retention::prune_daily(
        Arc::clone(&service.store),
        current_retention,
        print_stderr,
    ));
    let listener = bind_socket(socket)?;
    print_stderr(&format!(
        "toolgate answers hooks at {}, with {}",
        socket.display(),
        config.display()
    ));
    let slots = Arc::new(tokio::sync::Semaphore::new(64));
    let (mut hangup, mut stop) = (signal(SignalKind::hangup())?, signal(SignalKind::terminate())?);
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else {
                    // The process has too many open files. Waiting clients are accepted after
                    // others have left.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                };
                let (service, slots) = (Arc::clone(&service), Arc::clone(&slots));
                tokio::spawn(async move {
                    let _slot = slots.acquire_owned().await;
                    service.handle_connection(stream).await;
                });
            }
            _ = hangup.recv() => match service.reload() {
                Ok(()) => print_stderr(&format!("reloaded {}", service.config.display())),
                Err(why) => print_stderr(&format!("error: cannot reload {}, so the previous version stays in force: {why}", service.config.display())),
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
fn bind_socket(path: &Path) -> io::Result<UnixListener> {
    let with_path =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(io::Error::other(format!("{} exists and is not a socket", path.display())));
        }
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(io::Error::other(format!("another service listens at {}", path.display())));
        }
        std::fs::remove_file(path).map_err(with_path)?;
    }
    let listener = UnixListener::bind(path).map_err(with_path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).map_err(with_path)?;
    Ok(listener)
}

impl LoadedGates {
    /// Builds a gate for each agent of a configuration.
    fn from_config(
        found: EffectiveConfig,
        path: &Path,
        state: &UserStateDir,
        store: &Arc<SqliteStore>,
    ) -> Result<Self, String> {
        found
            .config
            .check()
            .map_err(|error| format!("invalid configuration\n{}", error.render(false)))?;
        if found.store != path {
            return Err(format!(
                "`store` changed to {}; restart the service",
                found.store.display()
            ));
        }
        let mut gates = HashMap::new();
        for name in found.config.agent_names().map(str::to_owned) {
            let gate = HookGate::from_config(found.clone(), Some(&name), None, state, |_| {
                Ok(Arc::clone(store))
            })?;
            gates.insert(name, Arc::new(gate));
        }
        Ok(Self {
            gates,
            undeclared_gates: HashMap::new(),
            files: found.watched_files(),
            config: Arc::new(found),
        })
    }
}

impl HookService {
    /// Reads the configuration again. Calls in progress keep the previous one, and so do all calls
    /// if it does not load.
    fn reload(&self) -> Result<(), String> {
        // Fingerprints are taken before the read, so that a change during the read triggers another
        // one.
        let mut before = lock(&self.current).files.clone();
        for (file, was) in &mut before {
            *was = fingerprint(file);
        }
        let found = self.load_config();
        let watched = found.as_ref().map(EffectiveConfig::watched_files).unwrap_or_default();
        match found
            .and_then(|found| LoadedGates::from_config(found, &self.path, &self.state, &self.store))
        {
            Ok(mut loaded) => {
                for (file, was) in &mut loaded.files {
                    *was = before
                        .iter()
                        .find(|(known, _)| known == file)
                        .map_or(*was, |(_, then)| *then);
                }
                *lock(&self.current) = loaded;
                Ok(())
            }
            Err(why) => {
                // Rebuild the previous configuration, so that it protects the current targets of
                // links.
                let found = EffectiveConfig::clone(&lock(&self.current).config);
                let rebuilt = LoadedGates::from_config(found, &self.path, &self.state, &self.store);
                let mut loaded = lock(&self.current);
                if let Ok(rebuilt) = rebuilt {
                    *loaded = rebuilt;
                }
                // Report the error once for each change.
                effective_config::add_watched_files(&mut before, watched);
                loaded.files = before;
                Err(why)
            }
        }
    }

    fn load_config(&self) -> Result<EffectiveConfig, String> {
        let project = effective_config::project_dir().map_err(|error| error.to_string())?;
        EffectiveConfig::find(Some(&self.config), &project, &self.state)
            .map_err(|error| error.to_string())
    }

    /// Returns the gate for an event.
    fn gate_for_event(
        &self,
        agent: Option<&String>,
        event: &HookEvent,
    ) -> Result<Arc<HookGate>, String> {
        let gate = self.gate_for_agent(agent)?;
        let Some(missing) = gate.undeclared_tool(event) else { return Ok(gate) };
        let found = {
            let current = lock(&self.current);
            if let Some(cached) = current.undeclared_gates.get(&missing) {
                return Ok(Arc::clone(cached));
            }
            Arc::clone(&current.config)
        };
        let gate = HookGate::from_config(
            EffectiveConfig::clone(&found),
            Some(&missing.0),
            Some(&missing.1),
            &self.state,
            |_| Ok(Arc::clone(&self.store)),
        )?;
        let gate = Arc::new(gate);
        let mut current = lock(&self.current);
        // Do not cache the gate if the configuration was replaced meanwhile.
        if Arc::ptr_eq(&current.config, &found) {
            if current.undeclared_gates.len() >= MAX_UNDECLARED_GATES {
                current.undeclared_gates.clear();
            }
            current.undeclared_gates.insert(missing, Arc::clone(&gate));
        }
        Ok(gate)
    }

    /// Returns the gate for an agent from the current files, or from the previous ones if they do
    /// not load.
    fn gate_for_agent(&self, agent: Option<&String>) -> Result<Arc<HookGate>, String> {
        let changed = {
            let current = lock(&self.current);
            // All gates protect the same paths, so one is enough.
            let has_moved_links =
                current.gates.values().next().is_some_and(|gate| !gate.has_current_links());
            has_moved_links || current.files.iter().any(|(file, was)| fingerprint(file) != *was)
        };
        if changed && let Err(why) = self.reload() {
            print_stderr(&format!(
                "error: cannot reload {}, so the previous version stays in force: {why}",
                self.config.display()
            ));
        }
        let current = lock(&self.current);
        let only_gate = || current.gates.values().next().filter(|_| current.gates.len() == 1);
        let gate = match agent.or(self.agent.as_ref()) {
            Some(agent) => {
                current.gates.get(agent).ok_or_else(|| format!("unknown agent `{agent}`"))
            }
            None => only_gate().ok_or_else(|| {
                "the configuration has several agents; choose one with `--agent`".to_owned()
            }),
        };
        gate.map(Arc::clone)
    }

    async fn handle_connection(&self, mut stream: UnixStream) {
        let parsed = match read_request(&mut stream).await {
            Ok((request, user)) => {
                HookEvent::parse(&request.event).map(|event| (request, user, event))
            }
            Err(error) => Err(format!("the service cannot read the request: {error}")),
        };
        let denial = match parsed {
            Ok((request, user, event)) => match self.gate_for_event(request.agent.as_ref(), &event)
            {
                Ok(gate) => {
                    return decide_and_reply(
                        &gate,
                        &event,
                        request.client,
                        &effective_config::user_name(user),
                        &mut stream,
                    )
                    .await;
                }
                Err(reason) => {
                    HookReply::gate_error(&event, format!("toolgate denies every call: {reason}"))
                        .render(&event, request.client)
                }
            },
            Err(reason) => RenderedReply::Denied(reason),
        };
        let _ = send_reply(&mut stream, &encode_reply(denial)).await;
    }
}

/// Decides about an event, and sends the answer.
///
/// If the client has left, the permission is withdrawn, because the call will not run.
pub(crate) async fn decide_and_reply(
    gate: &HookGate,
    event: &HookEvent,
    client: HookClient,
    user: &str,
    stream: &mut UnixStream,
) {
    let answer = gate.handle_event(event, client, user).await;
    let is_permission = matches!(event.kind, HookEventKind::BeforeTool)
        && !matches!(answer.decision, Some(ReplyDecision::Deny(_)));
    if send_reply(stream, &encode_reply(answer.render(event, client))).await.is_err()
        && is_permission
    {
        gate.withdraw_permission(event, user).await;
    }
}

/// Reads a request, and returns it with the user id of the peer from the kernel.
pub(crate) async fn read_request(stream: &mut UnixStream) -> io::Result<(ServiceRequest, u32)> {
    let user = stream.peer_cred()?.uid();
    let mut bytes = Vec::with_capacity(16 << 10);
    // The limit leaves room for the header lines and for detecting an event that is too large.
    tokio::time::timeout(
        Duration::from_secs(4),
        stream.take(MAX_EVENT_BYTES + (64 << 10)).read_to_end(&mut bytes),
    )
    .await??;
    let mut lines = bytes.splitn(3, |byte| *byte == b'\n');
    let mut line = || lines.next().ok_or_else(|| io::Error::other("incomplete request"));
    let (client, agent, event) = (line()?, line()?, line()?);
    let to_text = |line| std::str::from_utf8(line).map_err(io::Error::other);
    let (client, agent) = (
        clap::ValueEnum::from_str(to_text(client)?, false).map_err(io::Error::other)?,
        to_text(agent)?,
    );
    Ok((
        ServiceRequest {
            client,
            agent: (!agent.is_empty()).then(|| agent.to_owned()),
            event: event.to_vec(),
        },
        user,
    ))
}

/// Serializes an answer for the hook.
fn encode_reply(rendered: RenderedReply) -> String {
    match rendered {
        RenderedReply::Json(reply) => format!("0{reply}\n"),
        RenderedReply::Denied(reason) => format!("2{reason}"),
        RenderedReply::AlreadyWritten(_) => String::new(),
    }
}

pub(crate) async fn send_reply(stream: &mut UnixStream, text: &str) -> io::Result<()> {
    stream.write_all(text.as_bytes()).await
}
