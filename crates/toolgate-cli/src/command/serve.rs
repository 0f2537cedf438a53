//! `toolgate serve`: the gateway.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use toolgate::config::Config;
use toolgate_mcp::{Gateway, Options, Starting, Status};
use toolgate_store::SqliteStore;

use super::ledger::{BOLD, DIM, GREEN, RED, counted};
use crate::Telling;
use crate::place::{self, InForce, Stamp, State, stamp};
use crate::protected::Protected;
use crate::say::say;
use crate::telemetry::Telemetry;

/// Serve as an MCP gateway: every call of every client takes the gates, and only then goes to the tool.
#[derive(clap::Args)]
#[command(
    after_help = "Clients connect to http://ADDR/mcp (or /mcp/AGENT, or /mcp/AGENT/SESSION), or start it themselves with --stdio.\nThe configuration is read again when it changes, and on SIGHUP. What does not load leaves the old one in force.\n\nExamples:\n  toolgate serve --config toolgate.toml           listen at 127.0.0.1:7070\n  toolgate serve --config toolgate.toml --stdio   for a client that starts it\n  toolgate serve --listen 127.0.0.1:8080          at another port\n  toolgate serve --agent support                  for those who name no agent"
)]
pub(crate) struct Args {
    /// The configuration. Without it: what is in force here.
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG")]
    config: Option<PathBuf>,
    /// Speak MCP over standard input and output.
    #[arg(long, conflicts_with = "listen")]
    stdio: bool,
    /// Where to listen; `listen` of the configuration unless said, else 127.0.0.1:7070.
    #[arg(long, value_name = "ADDR", value_parser = address)]
    listen: Option<SocketAddr>,
    /// The agent of those who name none.
    #[arg(long)]
    agent: Option<String>,
    /// How long upstreams may take before the gateway is ready without them.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = super::ledger::duration)]
    patience: toolgate::SignedDuration,
}

/// Where clients are listened to, unless somebody says otherwise.
const HERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7070);

fn address(text: &str) -> Result<SocketAddr, String> {
    let port = text.trim_start_matches(':').parse::<u16>().unwrap_or(HERE.port());
    text.parse().map_err(|_| format!("an address and a port are wanted, like 127.0.0.1:{port}"))
}

/// Where it is kept what the tools of upstreams looked like.
pub(crate) fn pins(state: &State, found: &InForce) -> PathBuf {
    place::pins(state.path(), found.files.first().map_or(Path::new(""), PathBuf::as_path))
}

/// The configuration that is served, and the files that it comes from.
pub(crate) struct Served {
    given: Option<PathBuf>,
    agent: Option<String>,
    state: State,
}

impl Served {
    pub(crate) fn new(given: Option<PathBuf>, agent: Option<String>) -> io::Result<Self> {
        Ok(Self { given, agent, state: State::open()? })
    }

    pub(crate) fn find(&self) -> io::Result<InForce> {
        InForce::find(self.given.as_deref(), &place::project()?, &self.state)
    }

    fn config(&self) -> io::Result<Config> {
        let mut config = self.find()?.config;
        if self.agent.is_some() {
            config.gateway.agent.clone_from(&self.agent);
        }
        Ok(config)
    }
}

pub(crate) fn run(args: &Args, store: Option<&Path>, telling: Telling) -> io::Result<ExitCode> {
    // Hooks are not handed what was left open here.
    let _ = toolgate::sandbox::close_inherited();
    // Each client that is connected is an open file.
    toolgate_mcp::raise_open_files();
    let served = Arc::new(Served::new(args.config.clone(), args.agent.clone())?);
    let found = served.find()?;
    let telemetry = Telemetry::start(found.config.gateway.otlp.as_ref())?;
    telling.begin(Some(&telemetry));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let code = runtime.block_on(serve(args, store, served, found))?;
    // Whoever reads standard input waits for a line that never comes.
    runtime.shutdown_timeout(Duration::from_millis(100));
    Ok(code)
}

async fn serve(args: &Args, store: Option<&Path>, served: Arc<Served>, found: InForce) -> io::Result<ExitCode> {
    // Whoever says that it serves can be told to end.
    let mut ending = Ending::new()?;
    // Where whoever started it did not want to hear who ends, nobody started from here would hear of it either.
    let _ends = signal(SignalKind::child())?;
    // Nor does it end because it is told too early to read its file again: it does so once it serves.
    let hang_up = signal(SignalKind::hangup())?;
    if let Some(notice) = &found.notice {
        say(notice);
    }
    if let Some(agent) = args.agent.as_deref().filter(|agent| found.config.names().all(|known| known != *agent)) {
        let known: Vec<&str> = found.config.names().collect();
        return Err(io::Error::other(format!("there is no agent `{}`; {}", super::ledger::clean(agent), place::there_are(&known))));
    }
    // What the command line says counts in any case.
    let given: Vec<&str> = store.map(|_| "store").into_iter().chain(args.listen.map(|_| "listen")).collect();
    let path = store.map_or_else(|| found.store.clone(), Path::to_owned);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    // The one that opens the ledger for longer sweeps it.
    drop(super::hook::open_store(&path, &served.state)?);
    let store = Arc::new(SqliteStore::open(&path).map_err(io::Error::other)?);
    // What another file says, or another reading of it, is about the ledger that it names, and not about any that is open.
    let (kept, ledger) = (Arc::clone(&served), std::path::absolute(&path)?);
    let kept = move || kept.find().ok().filter(|found| found.store == ledger).and_then(|found| found.retention());
    let keeping = crate::retention::keep(Arc::clone(&store), kept, crate::note);
    let program = std::env::current_exe()?;
    // As the files are when they are read; as they were, where they do not load.
    let (looks, project) = (Arc::clone(&served), place::project()?);
    let protected = Protected::of(&found, &served.state, &project);
    let own = protected.places().chain([path.clone()]).collect();
    let rules = move |tools: &[&toolgate::Spec]| match looks.find() {
        Ok(found) => Protected::of(&found, &looks.state, &project).rules(tools, Some(&project)),
        Err(_) => protected.rules(tools, Some(&project)),
    };
    let options = Options {
        built_in: Some(Arc::new(rules)),
        store,
        upstreams: Starting { pins: Some(pins(&served.state, &found)), launcher: Some(program.clone()) },
        patience: Duration::try_from(args.patience).unwrap_or(Duration::from_secs(10)),
        launcher: Some(program),
        principal: place::user(),
        own,
    };
    let listen = found.config.gateway.listen.as_deref().and_then(|address| address.parse().ok());
    let address = args.listen.or(listen).unwrap_or(HERE);
    let reader = Arc::clone(&served);
    let gateway = tokio::select! {
        opened = Gateway::open(move || reader.config(), options) => opened?,
        // What was started meanwhile ends with this process.
        () = ending.told() => return Ok(ExitCode::SUCCESS),
    };
    // Which files of agents are put back hangs on rows: none goes before that.
    let retention = tokio::spawn(keeping);
    tokio::spawn({
        let gateway = gateway.clone();
        async move { gateway.watch(Duration::from_secs(60)).await }
    });
    let begun = (found.watched(), fixed(&found, &given));
    let keeper = tokio::spawn(keep_current(gateway.clone(), Arc::clone(&served), begun, given, hang_up));
    let ended = if args.stdio {
        crate::note("toolgate serves on standard streams");
        let mut serving = std::pin::pin!(gateway.serve_stdio(args.agent.clone()));
        tokio::select! {
            ended = &mut serving => ended,
            () = ending.told() => {
                // What is under way ends first.
                gateway.begin_to_end();
                serving.await
            }
        }
    } else {
        let listening = gateway.listen(address).await;
        match listening {
            Ok(listening) => {
                report(&gateway, listening.address, found.config.gateway.tls.is_some())?;
                ending.told().await;
                gateway.begin_to_end();
                listening.ended().await;
                Ok(())
            }
            Err(error) => Err(error),
        }
    };
    retention.abort();
    gateway.end().await;
    // Who reads the configuration has given up, and ended what that had begun.
    keeper.abort();
    ended.map(|()| ExitCode::SUCCESS)
}

/// One line when it is ready, and a few for a person who wants to know.
fn report(gateway: &Gateway, address: SocketAddr, tls: bool) -> io::Result<()> {
    let scheme = if tls { "https" } else { "http" };
    let mut out = anstream::stdout().lock();
    writeln!(out, "toolgate serves at {BOLD}{scheme}://{address}/mcp{BOLD:#}")?;
    out.flush()?;
    if crate::is_quiet() {
        return Ok(());
    }
    for (agent, tools) in gateway.offers() {
        say(&format!("  {DIM}agent{DIM:#} {agent}: {}", counted(tools as u64, "tool")));
    }
    for health in gateway.health() {
        say(&match &health.status {
            Status::Up { .. } => format!("  {GREEN}✓{GREEN:#} {}: {}", health.name, counted(health.tools as u64, "tool")),
            Status::Starting => format!("  {DIM}… {}: still starting{DIM:#}", health.name),
            // Why, was said when it was found out.
            Status::Down { .. } => format!("  {RED}✗{RED:#} {}: away", health.name),
        });
        if !health.held.is_empty() {
            let held = counted(health.held.len() as u64, "tool");
            say(&match health.unwritten() {
                Some(why) => format!("    {held} held back: what new ones look like cannot be written down: {why}"),
                // Why, was said when it was found out.
                None if health.unfit().count() == health.held.len() => {
                    format!("    {held} held back; look at it with `toolgate upstream list`")
                }
                None => format!("    {held} held back; look at it with `toolgate upstream diff`"),
            });
        }
    }
    Ok(())
}

/// How somebody says that it should end.
struct Ending {
    terminate: Signal,
    interrupt: Signal,
}

impl Ending {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Until somebody does.
    async fn told(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Whether only files of pins have changed; `None` where nothing has.
fn changed(files: &[(PathBuf, Option<Stamp>)], pins: &[PathBuf]) -> Option<bool> {
    let changed: Vec<&PathBuf> = files.iter().filter(|(file, was)| stamp(file) != *was).map(|(file, _)| file).collect();
    (!changed.is_empty()).then(|| changed.iter().all(|file| pins.contains(file)))
}

/// What counts only when it starts.
type Fixed = Vec<(&'static str, String)>;

/// The same of a configuration, but for what the command line says.
fn fixed(found: &InForce, given: &[&str]) -> Fixed {
    let gateway = &found.config.gateway;
    let all = [
        ("store", format!("{:?}", found.store)),
        ("listen", format!("{:?}", gateway.listen)),
        ("hosts", format!("{:?}", gateway.hosts)),
        ("origins", format!("{:?}", gateway.origins)),
        ("concurrency", format!("{:?}", gateway.concurrency)),
        ("tls", format!("{:?}", gateway.tls)),
        ("otlp", format!("{:?}", gateway.otlp)),
    ];
    all.into_iter().filter(|(name, _)| !given.contains(name)).collect()
}

/// Reads the configuration again when it changes, and when it is told to.
async fn keep_current(
    gateway: Gateway,
    served: Arc<Served>,
    (files, begun): (Vec<(PathBuf, Option<Stamp>)>, Fixed),
    given: Vec<&'static str>,
    mut hang_up: Signal,
) {
    let with_pins = |files: Vec<(PathBuf, Option<Stamp>)>| {
        let pins = gateway.files().into_iter().map(|file| (file.clone(), stamp(&file)));
        files.into_iter().chain(pins).collect::<Vec<_>>()
    };
    let (mut files, mut told) = (with_pins(files), begun.clone());
    let mut look = tokio::time::interval(Duration::from_millis(500));
    loop {
        let mut only_pins = false;
        let because = tokio::select! {
            _ = hang_up.recv() => "it was told to",
            _ = look.tick() => {
                let Some(pins) = changed(&files, &gateway.files()) else { continue };
                only_pins = pins;
                // Whoever writes a file may not be done yet.
                tokio::time::sleep(Duration::from_millis(100)).await;
                "it has changed"
            }
        };
        // As they are now: what changes while it is read is read again.
        for (file, was) in &mut files {
            *was = stamp(file);
        }
        let now = served.find().map(|found| (with_pins(found.watched()), fixed(&found, &given)));
        match gateway.reload().await {
            // What tools look like has changed, or somebody has accepted it.
            Ok(()) if only_pins => {
                let health = gateway.health();
                // What does not fit is told by the gateway itself.
                let fits = |one: &toolgate_mcp::Health, tool: &str| one.unfit().all(|(unfit, _)| unfit != tool);
                let held = health.iter().flat_map(|one| one.held.iter().filter(move |change| fits(one, &change.tool)));
                let held = held.map(|change| format!("{} {}", change.upstream, change.tool));
                let held: Vec<String> = held.map(|tool| super::ledger::clean(&tool)).collect();
                match held.is_empty() {
                    true => crate::note("the tools of upstreams are offered as they were accepted"),
                    false => say(&format!("held back: {}; look with `toolgate upstream diff`", held.join(", "))),
                }
                files = now.map_or(files, |(files, _)| files);
            }
            Ok(()) => {
                crate::note(&format!("the configuration was read again: {because}"));
                let Ok((watched, now)) = now else { continue };
                let other = now.iter().zip(&begun).filter(|(now, begun)| now != begun).map(|((name, _), _)| format!("`{name}`"));
                let other: Vec<String> = other.collect();
                if !other.is_empty() && now != told {
                    say(&format!("changed, and read only at the start of `toolgate serve`: {}; start it again", other.join(", ")));
                }
                (files, told) = (watched, now);
            }
            Err(_) if gateway.is_ending() => return,
            Err(error) => {
                say(&format!("error: the configuration stays in force as it was: {error}"));
                place::watch_too(&mut files, now.map(|(files, _)| files).unwrap_or_default());
            }
        }
    }
}
