//! Implements `toolgate serve`: runs the MCP gateway.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use toolgate_config::Config;
use toolgate_mcp::{Gateway, GatewayOptions, UpstreamOptions, UpstreamStatus};
use toolgate_store::SqliteStore;

use crate::LogConfig;
use crate::command::common::{BOLD, DIM, GREEN, RED, format_count};
use crate::telemetry::Telemetry;
use toolgate_hook::builtin_rules::ProtectedPaths;
use toolgate_hook::effective_config;
use toolgate_hook::effective_config::{
    EffectiveConfig, FileMetadataFingerprint, UserStateDir, fingerprint,
};
use toolgate_hook::stderr::print_stderr;

/// Run the MCP gateway.
#[derive(clap::Args)]
#[command(
    after_help = "Clients connect to http://ADDR/mcp (or /mcp/AGENT, or /mcp/AGENT/SESSION), or start it with --stdio.\nThe configuration is reloaded when it changes, and on SIGHUP. If it is invalid, the previous one stays in force.\n\nExamples:\n  toolgate serve --config toolgate.toml           listen on 127.0.0.1:7070\n  toolgate serve --config toolgate.toml --stdio   for a client that starts it\n  toolgate serve --listen 127.0.0.1:8080          listen on another port\n  toolgate serve --agent support                  set the default agent"
)]
pub(crate) struct Args {
    /// Configuration [default: the one in force in this directory].
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG")]
    config: Option<PathBuf>,
    /// Speak MCP over standard input and output.
    #[arg(long, conflicts_with = "listen")]
    stdio: bool,
    /// Address to listen on [default: `listen` of the configuration, or 127.0.0.1:7070].
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    listen: Option<SocketAddr>,
    /// Agent for clients that name none.
    #[arg(long)]
    agent: Option<String>,
    /// Longest time to wait for upstreams at the start.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = crate::command::common::parse_duration)]
    patience: toolgate::SignedDuration,
}

/// Default address to listen on.
const DEFAULT_LISTEN_ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7070);

fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let port = text.trim_start_matches(':').parse::<u16>().unwrap_or(DEFAULT_LISTEN_ADDRESS.port());
    text.parse().map_err(|_| format!("expected an address and a port, like 127.0.0.1:{port}"))
}

/// Returns the directory with the pinned tool definitions of the upstreams.
pub(crate) fn config_pins_dir(state: &UserStateDir, found: &EffectiveConfig) -> PathBuf {
    effective_config::pins_dir(
        state.path(),
        found.files.first().map_or(Path::new(""), PathBuf::as_path),
    )
}

/// Source of the configuration that the gateway serves.
pub(crate) struct ServedConfigSource {
    path: Option<PathBuf>,
    agent: Option<String>,
    state: UserStateDir,
}

impl ServedConfigSource {
    pub(crate) fn new(path: Option<PathBuf>, agent: Option<String>) -> io::Result<Self> {
        Ok(Self { path, agent, state: UserStateDir::open()? })
    }

    pub(crate) fn find(&self) -> io::Result<EffectiveConfig> {
        EffectiveConfig::find(self.path.as_deref(), &effective_config::project_dir()?, &self.state)
    }

    fn load(&self) -> io::Result<Config> {
        let mut config = self.find()?.config;
        if self.agent.is_some() {
            config.gateway.agent.clone_from(&self.agent);
        }
        Ok(config)
    }
}

pub(crate) fn run(
    args: &Args,
    store: Option<&Path>,
    log_config: LogConfig,
) -> io::Result<ExitCode> {
    // Programs that run as hooks must not inherit open files of the caller.
    let _ = toolgate_process::sandbox::close_inherited_files();
    // Each connected client needs an open file.
    toolgate_mcp::raise_open_file_limit();
    let source = Arc::new(ServedConfigSource::new(args.config.clone(), args.agent.clone())?);
    let found = source.find()?;
    let telemetry = Telemetry::start(found.config.gateway.otlp.as_ref())?;
    log_config.install(Some(&telemetry));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let code = runtime.block_on(serve(args, store, source, found))?;
    // The task that reads standard input may be blocked in a read.
    runtime.shutdown_timeout(Duration::from_millis(100));
    Ok(code)
}

async fn serve(
    args: &Args,
    store: Option<&Path>,
    source: Arc<ServedConfigSource>,
    found: EffectiveConfig,
) -> io::Result<ExitCode> {
    // Signal handlers are installed before the start message is printed.
    let mut signals = TerminationSignals::new()?;
    // This process may inherit an ignored `SIGCHLD`, and would then miss the exit of child
    // processes.
    let _child_exits = signal(SignalKind::child())?;
    // A `SIGHUP` during the start must not end the process. It is handled once the gateway serves.
    let hangup = signal(SignalKind::hangup())?;
    if let Some(notice) = &found.notice {
        print_stderr(notice);
    }
    if let Some(agent) = args
        .agent
        .as_deref()
        .filter(|agent| found.config.agent_names().all(|known| known != *agent))
    {
        let known: Vec<&str> = found.config.agent_names().collect();
        return Err(io::Error::other(format!(
            "unknown agent `{}`; {}",
            crate::command::common::sanitize(agent),
            effective_config::list_known_names(&known)
        )));
    }
    // Settings that the command line overrides.
    let overridden: Vec<&str> =
        store.map(|_| "store").into_iter().chain(args.listen.map(|_| "listen")).collect();
    let path = store.map_or_else(|| found.store.clone(), Path::to_owned);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    // The checked open is short. `SqliteStore::open` also cleans up the ledger.
    drop(toolgate_hook::open_store(&path, &source.state)?);
    let store = Arc::new(SqliteStore::open(&path).map_err(io::Error::other)?);
    // A reloaded configuration may name another ledger. Its retention does not apply to the open
    // one.
    let (retention_source, ledger) = (Arc::clone(&source), std::path::absolute(&path)?);
    let current_retention = move || {
        retention_source
            .find()
            .ok()
            .filter(|found| found.store == ledger)
            .and_then(|found| found.retention())
    };
    let pruning = toolgate_hook::retention::prune_daily(
        Arc::clone(&store),
        current_retention,
        crate::print_note,
    );
    let program = std::env::current_exe()?;
    // The rules follow the current files, or the files at the start if those do not load.
    let (rule_source, project) = (Arc::clone(&source), effective_config::project_dir()?);
    let protected = ProtectedPaths::collect(&found, &source.state, &project);
    let own_paths = protected.paths().chain([path.clone()]).collect();
    let rules = move |tools: &[&toolgate::ToolSpec]| match rule_source.find() {
        Ok(found) => ProtectedPaths::collect(&found, &rule_source.state, &project)
            .render_rules(tools, Some(&project)),
        Err(_) => protected.render_rules(tools, Some(&project)),
    };
    let options = GatewayOptions {
        built_in_rules: Some(Arc::new(rules)),
        store,
        upstreams: UpstreamOptions {
            pin_dir: Some(config_pins_dir(&source.state, &found)),
            launcher: Some(program.clone()),
        },
        upstream_start_timeout: Duration::try_from(args.patience)
            .unwrap_or(Duration::from_secs(10)),
        launcher: Some(program),
        principal: effective_config::local_user_name(),
        own_paths,
    };
    let listen = found.config.gateway.listen.as_deref().and_then(|address| address.parse().ok());
    let address = args.listen.or(listen).unwrap_or(DEFAULT_LISTEN_ADDRESS);
    let reader = Arc::clone(&source);
    let gateway = tokio::select! {
        opened = Gateway::open(move || reader.load(), options) => opened?,
        // Upstreams that were started meanwhile end with this process.
        () = signals.wait() => return Ok(ExitCode::SUCCESS),
    };
    // Restoring files of agents needs rows, so pruning starts after that.
    let retention = tokio::spawn(pruning);
    tokio::spawn({
        let gateway = gateway.clone();
        async move { gateway.run_periodic_checks(Duration::from_secs(60)).await }
    });
    let initial = (found.watched_files(), startup_settings(&found, &overridden));
    let reload_task = tokio::spawn(reload_on_change(
        gateway.clone(),
        Arc::clone(&source),
        initial,
        overridden,
        hangup,
    ));
    let result = if args.stdio {
        crate::print_note("toolgate serves on standard input and output");
        let mut serving = std::pin::pin!(gateway.serve_stdio(args.agent.clone()));
        tokio::select! {
            result = &mut serving => result,
            () = signals.wait() => {
                // Let calls in progress end first.
                gateway.start_shutdown();
                serving.await
            }
        }
    } else {
        let listening = gateway.listen(address).await;
        match listening {
            Ok(listening) => {
                print_startup_report(
                    &gateway,
                    listening.address,
                    found.config.gateway.tls.is_some(),
                )?;
                signals.wait().await;
                gateway.start_shutdown();
                listening.wait_stopped().await;
                Ok(())
            }
            Err(error) => Err(error),
        }
    };
    retention.abort();
    gateway.shut_down().await;
    // The reload task has stopped by now.
    reload_task.abort();
    result.map(|()| ExitCode::SUCCESS)
}

/// Prints the address, and the agents and upstreams unless `--quiet` was given.
fn print_startup_report(gateway: &Gateway, address: SocketAddr, tls: bool) -> io::Result<()> {
    let scheme = if tls { "https" } else { "http" };
    let mut out = anstream::stdout().lock();
    writeln!(out, "toolgate serves at {BOLD}{scheme}://{address}/mcp{BOLD:#}")?;
    out.flush()?;
    if crate::is_quiet() {
        return Ok(());
    }
    for (agent, tools) in gateway.tool_counts() {
        print_stderr(&format!(
            "  {DIM}agent{DIM:#} {agent}: {}",
            format_count(tools as u64, "tool")
        ));
    }
    for health in gateway.health() {
        print_stderr(&match &health.status {
            UpstreamStatus::Up { .. } => format!(
                "  {GREEN}✓{GREEN:#} {}: {}",
                health.name,
                format_count(health.tools as u64, "tool")
            ),
            UpstreamStatus::Starting => format!("  {DIM}… {}: still starting{DIM:#}", health.name),
            // The reason was logged when it was detected.
            UpstreamStatus::Down { .. } => format!("  {RED}✗{RED:#} {}: unavailable", health.name),
        });
        if !health.held.is_empty() {
            let quarantined = format_count(health.held.len() as u64, "tool");
            print_stderr(&match health.pin_write_error() {
                Some(why) => {
                    format!(
                        "    {quarantined} quarantined: cannot save the pins of new tools: {why}"
                    )
                }
                // The reason was logged when it was detected.
                None if health.unusable_tools().count() == health.held.len() => {
                    format!("    {quarantined} quarantined; see `toolgate upstream list`")
                }
                None => format!("    {quarantined} quarantined; see `toolgate upstream diff`"),
            });
        }
    }
    Ok(())
}

/// Signals that end the process.
struct TerminationSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl TerminationSignals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for one of the signals.
    async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Returns whether only pin files have changed; `None` if nothing has.
fn only_pins_changed(
    files: &[(PathBuf, Option<FileMetadataFingerprint>)],
    pins: &[PathBuf],
) -> Option<bool> {
    let changed: Vec<&PathBuf> = files
        .iter()
        .filter(|(file, was)| fingerprint(file) != *was)
        .map(|(file, _)| file)
        .collect();
    (!changed.is_empty()).then(|| changed.iter().all(|file| pins.contains(file)))
}

/// Settings that are read only at the start.
type StartupSettings = Vec<(&'static str, String)>;

/// Returns these settings of a configuration, except those that the command line overrides.
fn startup_settings(found: &EffectiveConfig, overridden: &[&str]) -> StartupSettings {
    let gateway = &found.config.gateway;
    let all = [
        ("store", format!("{:?}", found.store)),
        ("listen", format!("{:?}", gateway.listen)),
        ("hosts", format!("{:?}", gateway.hosts)),
        ("origins", format!("{:?}", gateway.origins)),
        ("concurrency", format!("{:?}", gateway.max_concurrency)),
        ("tls", format!("{:?}", gateway.tls)),
        ("otlp", format!("{:?}", gateway.otlp)),
    ];
    all.into_iter().filter(|(name, _)| !overridden.contains(name)).collect()
}

/// Reloads the configuration when it changes, and on `SIGHUP`.
async fn reload_on_change(
    gateway: Gateway,
    source: Arc<ServedConfigSource>,
    (files, initial_settings): (Vec<(PathBuf, Option<FileMetadataFingerprint>)>, StartupSettings),
    overridden: Vec<&'static str>,
    mut hangup: Signal,
) {
    let with_pins = |files: Vec<(PathBuf, Option<FileMetadataFingerprint>)>| {
        let pins = gateway.pin_files().into_iter().map(|file| (file.clone(), fingerprint(&file)));
        files.into_iter().chain(pins).collect::<Vec<_>>()
    };
    let (mut files, mut reported_settings) = (with_pins(files), initial_settings.clone());
    let mut poll = tokio::time::interval(Duration::from_millis(500));
    loop {
        let mut only_pins = false;
        let trigger = tokio::select! {
            _ = hangup.recv() => "SIGHUP",
            _ = poll.tick() => {
                let Some(pins) = only_pins_changed(&files, &gateway.pin_files()) else { continue };
                only_pins = pins;
                // The file may be only partly written.
                tokio::time::sleep(Duration::from_millis(100)).await;
                "a file has changed"
            }
        };
        // Fingerprints are taken before the reload, so that a change during the reload triggers
        // another one.
        for (file, was) in &mut files {
            *was = fingerprint(file);
        }
        let now = source
            .find()
            .map(|found| (with_pins(found.watched_files()), startup_settings(&found, &overridden)));
        match gateway.reload().await {
            // A tool definition has changed, or was accepted.
            Ok(()) if only_pins => {
                let health = gateway.health();
                // The gateway itself logs tools that do not fit their declaration.
                let fits = |upstream: &toolgate_mcp::UpstreamHealth, tool: &str| {
                    upstream.unusable_tools().all(|(unusable, _)| unusable != tool)
                };
                let quarantined = health.iter().flat_map(|upstream| {
                    upstream.held.iter().filter(move |change| fits(upstream, &change.tool))
                });
                let quarantined =
                    quarantined.map(|change| format!("{} {}", change.upstream, change.tool));
                let quarantined: Vec<String> =
                    quarantined.map(|tool| crate::command::common::sanitize(&tool)).collect();
                match quarantined.is_empty() {
                    true => crate::print_note("all tools of upstreams match their pins"),
                    false => print_stderr(&format!(
                        "quarantined: {}; see `toolgate upstream diff`",
                        quarantined.join(", ")
                    )),
                }
                files = now.map_or(files, |(files, _)| files);
            }
            Ok(()) => {
                crate::print_note(&format!("reloaded the configuration: {trigger}"));
                let Ok((watched, now)) = now else { continue };
                let changed = now
                    .iter()
                    .zip(&initial_settings)
                    .filter(|(now, initial)| now != initial)
                    .map(|((name, _), _)| format!("`{name}`"));
                let changed: Vec<String> = changed.collect();
                if !changed.is_empty() && now != reported_settings {
                    print_stderr(&format!(
                        "changed settings need a restart of `toolgate serve`: {}",
                        changed.join(", ")
                    ));
                }
                (files, reported_settings) = (watched, now);
            }
            Err(_) if gateway.is_shutting_down() => return,
            Err(error) => {
                print_stderr(&format!(
                    "error: cannot reload the configuration, so the previous one stays in force: {error}"
                ));
                effective_config::add_watched_files(
                    &mut files,
                    now.map(|(files, _)| files).unwrap_or_default(),
                );
            }
        }
    }
}
