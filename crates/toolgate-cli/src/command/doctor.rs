//! Implements `toolgate doctor`: checks that toolgate works in the current directory.

mod clients;

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};
use toolgate::ToolSpec;
use toolgate_config::UpstreamTransport;
use toolgate_mcp::{Gateway, GatewayOptions, UpstreamOptions, UpstreamStatus};

use self::clients::{check_clients, is_server_registered};
use super::serve::{ServedConfigSource, config_pins_dir};
use crate::command::common::{
    BOLD, DIM, GREEN, IgnoreBrokenPipe, RED, YELLOW, format_count, sanitize,
};
use toolgate_hook::effective_config;
use toolgate_hook::effective_config::{EffectiveConfig, UserStateDir};

/// Check that the gate is on.
///
/// Checks that the configuration loads, the ledger is writable, clients start this program as their
/// hook or server, and a call that must be refused is refused.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if there is no problem, 1 if there is one.\n\nExamples:\n  toolgate doctor\n  toolgate doctor --json\n  toolgate doctor --config toolgate.toml"
)]
pub(crate) struct Args {
    /// Configuration file [default: what is in force here].
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG")]
    config: Option<PathBuf>,
    /// Print one JSON object: {"ok", "findings": [{"check", "state", "says"}]}.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum FindingState {
    Well,
    /// No problem, but worth attention.
    Note,
    Ill,
}

#[derive(Debug, Serialize)]
struct DoctorFinding {
    check: &'static str,
    state: FindingState,
    says: String,
}

/// Results of the checks.
#[derive(Default)]
struct DoctorFindings(Vec<DoctorFinding>);

impl DoctorFindings {
    fn add(&mut self, check: &'static str, state: FindingState, says: impl Into<String>) {
        self.0.push(DoctorFinding { check, state, says: says.into() });
    }
}

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    // Hooks must not inherit open files of this process.
    let _ = toolgate_process::sandbox::close_inherited_files();
    let mut found = DoctorFindings::default();
    run_checks(args, &mut found)?;
    let ok = found.0.iter().all(|finding| finding.state != FindingState::Ill);
    let mut out = IgnoreBrokenPipe(anstream::stdout().lock());
    if args.json {
        writeln!(out, "{}", json!({"ok": ok, "findings": found.0}))?;
    } else {
        for DoctorFinding { check, state, says } in &found.0 {
            let (style, sign) = match state {
                FindingState::Well => (GREEN, "✓"),
                FindingState::Note => (YELLOW, "!"),
                FindingState::Ill => (RED, "✗"),
            };
            let mut lines = says.lines();
            writeln!(
                out,
                "{style}{sign}{style:#} {check:<14} {}",
                sanitize(lines.next().unwrap_or_default())
            )?;
            for line in lines {
                writeln!(out, "                 {DIM}{}{DIM:#}", sanitize(line))?;
            }
        }
        let verdict = if ok { "the gate is on" } else { "the gate has problems" };
        writeln!(out, "\n{BOLD}{verdict}{BOLD:#}")?;
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run_checks(args: &Args, found: &mut DoctorFindings) -> io::Result<()> {
    let project = effective_config::project_dir()?;
    let state = match UserStateDir::open() {
        Ok(state) => state,
        Err(error) => {
            found.add("state", FindingState::Ill, error.to_string());
            return Ok(());
        }
    };
    found.add("state", FindingState::Well, format!("{} is private", state.path().display()));
    let own = std::env::current_exe()?;
    let mut declared: Vec<String> = Vec::new();
    // If rows cannot be written, every call is denied. Report this once, and skip the canary.
    let (mut serves, mut records) = (false, true);
    match EffectiveConfig::find(args.config.as_deref(), &project, &state) {
        Err(error) => found.add("configuration", FindingState::Ill, error.to_string()),
        Ok(in_force) => {
            // Programs of upstreams are not part of the configuration, though changes to them are
            // detected.
            let is_program = |file: &Path| {
                in_force.config.upstreams.iter().any(
                    |upstream| matches!(&upstream.transport, UpstreamTransport::Command { program, .. } if file == program || file.ends_with(program)),
                )
            };
            let files = in_force
                .files
                .iter()
                .filter(|file| !is_program(file))
                .map(|file| file.display().to_string());
            let files = files.collect::<Vec<_>>().join(", ");
            if let Some(notice) = &in_force.notice {
                found.add("trust", FindingState::Ill, notice.clone());
            }
            let (store, kept) = (in_force.store.clone(), in_force.retention());
            serves = !in_force.config.upstreams.is_empty()
                || in_force.config.gateway.is_declared
                || is_server_registered(&project)?;
            if serves {
                check_gateway(args, found)?;
            }
            let names: Vec<String> = in_force.config.agent_names().map(str::to_owned).collect();
            match in_force.config.for_client().build_agents(None) {
                Err(error) => found.add(
                    "configuration",
                    FindingState::Ill,
                    format!("the configuration does not load\n{}", error.render(false)),
                ),
                Ok(agents) => {
                    let rules: usize =
                        agents.iter().map(|agent| agent.enforced_rules().count()).sum();
                    found.add(
                        "configuration",
                        FindingState::Well,
                        format!(
                            "{files} ({} enforced)",
                            crate::command::common::format_count(rules as u64, "rule")
                        ),
                    );
                    let tools = || agents.iter().flat_map(|agent| agent.tools());
                    let asked = find_canary_call(tools(), state.path());
                    declared = tools().map(|tool| tool.name().to_owned()).collect();
                    records = check_ledger(&store, kept, &state, found);
                    if !serves && records {
                        check_canary(args, &names, &own, asked.as_ref(), found);
                    }
                }
            }
        }
    }
    match toolgate_process::sandbox::test_sandbox(&own) {
        Ok(None) => found.add("sandbox", FindingState::Well, "command tools run in a sandbox"),
        Ok(Some(gap)) => found.add("sandbox", FindingState::Note, gap),
        Err(why) => found.add(
            "sandbox",
            FindingState::Note,
            format!("command tools cannot run here: {why}"),
        ),
    }
    check_clients(&project, &state, &declared, (serves, records), &own, found)
}

/// Checks that the ledger is writable and private. Returns true if it is writable.
fn check_ledger(
    store: &Path,
    kept: Option<toolgate::SignedDuration>,
    state: &UserStateDir,
    found: &mut DoctorFindings,
) -> bool {
    match toolgate_hook::open_store(store, state) {
        Err(error) => {
            found.add("ledger", FindingState::Ill, error.to_string());
            false
        }
        Ok(opened) => {
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            if let Err(why) = runtime.map_err(|error| error.to_string()).and_then(|runtime| {
                runtime.block_on(opened.check_writable()).map_err(|error| error.to_string())
            }) {
                found.add(
                    "ledger",
                    FindingState::Ill,
                    format!("cannot write to the ledger: {why}"),
                );
                return false;
            }
            drop(opened);
            let keys = PathBuf::from(format!("{}.state/keys", store.display()));
            let open = [store.to_owned(), keys.clone()]
                .into_iter()
                .chain(fs::read_dir(&keys).into_iter().flatten().flatten().map(|file| file.path()));
            let loose: Vec<String> = open
                .filter(|path| fs::metadata(path).is_ok_and(|file| file.mode() & 0o077 != 0))
                .map(|path| path.display().to_string())
                .collect();
            let them = if loose.len() == 1 { "it" } else { "them" };
            match loose.first() {
                Some(_) => found.add(
                    "ledger",
                    FindingState::Ill,
                    format!(
                        "other users can read {}; run `chmod go-rwx` on {them}",
                        loose.join(", ")
                    ),
                ),
                None => {
                    let kept = toolgate_hook::retention::describe_retention(store, kept)
                        .map(|told| format!("\n{told}"))
                        .unwrap_or_default();
                    found.add("ledger", FindingState::Well, format!("{}{kept}", store.display()));
                }
            }
            check_clock(store, found);
            true
        }
    }
}

/// Checks the clock, on which limits and evidence depend.
fn check_clock(store: &Path, found: &mut DoctorFindings) {
    let now = jiff::Timestamp::now();
    let newest = toolgate_store::Ledger::open(store)
        .ok()
        .and_then(|ledger| ledger.find_row(ledger.last_seq().ok()?).ok()?)
        .map(|row| row.at);
    match newest {
        Some(last) if last.duration_since(now) > jiff::SignedDuration::from_mins(5) => {
            found.add(
                "clock",
                FindingState::Ill,
                format!(
                    "the clock went backwards: it is {now}, but the ledger has a row of {last}"
                ),
            );
        }
        _ if now.as_second() < 1_767_225_600 => {
            found.add("clock", FindingState::Ill, format!("the clock is wrong: it is at {now}"))
        }
        _ => found.add("clock", FindingState::Well, now.strftime("%Y-%m-%d %H:%M:%SZ").to_string()),
    }
}

/// Makes a call that must be refused, with the hook program as clients start it.
fn check_canary(
    args: &Args,
    agents: &[String],
    own: &Path,
    asked: Option<&(String, Value)>,
    found: &mut DoctorFindings,
) {
    let Some((tool, input)) = asked else {
        found.add(
            "canary",
            FindingState::Note,
            "no declared tool can be asked for a file, so the canary cannot run",
        );
        return;
    };
    let mut command = Command::new(own);
    command
        .arg("hook")
        .args(args.config.iter().flat_map(|path| ["--config".as_ref(), path.as_os_str()]));
    command.args(
        effective_config::requested_store()
            .iter()
            .flat_map(|path| ["--store".as_ref(), path.as_os_str()]),
    );
    if agents.len() > 1 {
        command.args(agents.first().map(|agent| format!("--agent={agent}")));
    }
    match check_refusal(command, "PreToolUse", tool, input) {
        Err(why) => found.add("canary", FindingState::Ill, why),
        Ok(took) => found.add(
            "canary",
            FindingState::Well,
            format!("a call that must be refused was refused, in {took:?}"),
        ),
    }
}

/// Finds a tool that can be asked for toolgate's own state, and the arguments for it.
///
/// The tool must accept any arguments, or a single free text.
fn find_canary_call<'t>(
    tools: impl Iterator<Item = &'t ToolSpec>,
    state: &Path,
) -> Option<(String, Value)> {
    let key = state.join("key").display().to_string();
    let asks = |tool: &ToolSpec| {
        let Some(schema) = tool.input_schema() else {
            return Some(json!({"command": format!("cat {key}"), "file_path": key}));
        };
        let required =
            schema.get("required").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let is_text = |name: &String, one: &Value| {
            let free = ["enum", "const", "pattern", "format", "maxLength"]
                .iter()
                .all(|word| one.get(word).is_none());
            free && one.get("type").and_then(Value::as_str) == Some("string")
                && required.iter().all(|other| other.as_str() == Some(name))
        };
        let (name, _) =
            schema.get("properties")?.as_object()?.iter().find(|(name, one)| is_text(name, one))?;
        let value =
            if tool.shell_argument().is_some() { format!("cat {key}") } else { key.clone() };
        Some(json!({name.as_str(): value}))
    };
    // Skip names with a digest: the client calls such a tool by another name.
    let tools = tools
        .filter(|tool| toolgate::tool::name::tool_name_from_client(tool.name()) == tool.name());
    let mut all: Vec<(String, Value, bool)> = tools
        .filter_map(|tool| {
            Some((tool.name().to_owned(), asks(tool)?, tool.input_schema().is_some()))
        })
        .collect();
    all.sort_by_key(|(_, _, closed)| *closed);
    all.into_iter().next().map(|(tool, input, _)| (tool, input))
}

/// Checks that a hook refuses a call for toolgate's own state by the rule `own_state`.
///
/// A refusal for another reason does not count. Returns the duration, or what the hook did instead.
fn check_refusal(
    mut command: Command,
    event: &str,
    tool: &str,
    input: &Value,
) -> Result<Duration, String> {
    let session = format!("toolgate-doctor-{}", jiff::Timestamp::now().as_millisecond());
    let event = json!({"hook_event_name": event, "session_id": session, "tool_use_id": "canary", "tool_name": tool, "tool_input": input});
    let begun = Instant::now();
    let mut run = || -> io::Result<std::process::Output> {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A hook that does not read its input may still answer.
            let _ = stdin.write_all(event.to_string().as_bytes());
        }
        while child.try_wait()?.is_none() {
            if begun.elapsed() > Duration::from_secs(10) {
                child.kill()?;
                return Err(io::Error::other("no answer within 10 seconds"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        child.wait_with_output()
    };
    let output =
        run().map_err(|error| format!("a call that must be refused got no answer: {error}"))?;
    let took =
        Duration::from_micros(u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX));
    let (answer, said) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let denied =
        output.status.success() && answer.contains("\"deny\"") && answer.contains("own_state");
    if denied || (output.status.code() == Some(2) && said.contains("own_state")) {
        return Ok(took);
    }
    let read: Value = serde_json::from_str(&answer).unwrap_or_default();
    let told =
        |name: &str| read.pointer(&format!("/hookSpecificOutput/{name}")).and_then(Value::as_str);
    let why = told("permissionDecisionReason").unwrap_or(if answer.trim().is_empty() {
        said.trim()
    } else {
        answer.trim()
    });
    let why: String = why.lines().next().unwrap_or("no output").chars().take(300).collect();
    if output.status.code() == Some(2) || (output.status.success() && answer.contains("\"deny\"")) {
        return Err(format!(
            "a call that must be refused was refused, but not by the rule that protects toolgate: {why}"
        ));
    }
    Err(format!(
        "a call that must be refused got {}: {why}",
        told("permissionDecision").unwrap_or("no decision")
    ))
}

/// Starts the gateway, and checks that its upstreams answer and that it refuses the canary.
fn check_gateway(args: &Args, found: &mut DoctorFindings) -> io::Result<()> {
    let served = ServedConfigSource::new(args.config.clone(), None)?;
    let program = std::env::current_exe()?;
    let in_force = served.find()?;
    let starting = UpstreamOptions {
        pin_dir: Some(config_pins_dir(&UserStateDir::open()?, &in_force)),
        launcher: Some(program.clone()),
    };
    // In memory, so that the check leaves no rows.
    let options = GatewayOptions {
        built_in_rules: None,
        store: std::sync::Arc::new(toolgate::MemoryStore::default()),
        upstreams: starting,
        upstream_start_timeout: Duration::from_secs(15),
        launcher: Some(program),
        principal: effective_config::local_user_name(),
        own_paths: toolgate_hook::builtin_rules::ProtectedPaths::collect(
            &in_force,
            &UserStateDir::open()?,
            &effective_config::project_dir()?,
        )
        .paths()
        .collect(),
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let opened = Gateway::open(move || Ok(served.find()?.config), options).await;
        match opened {
            Err(error) => found.add("gateway", FindingState::Ill, error.to_string()),
            Ok(gateway) => {
                found.add("canary", FindingState::Well, "a call that must be refused was refused");
                for one in gateway.health() {
                    match &one.status {
                        UpstreamStatus::Up { .. } if one.held.is_empty() => found.add(
                            "upstream",
                            FindingState::Well,
                            format!("{}: {}", one.name, format_count(one.tools as u64, "tool")),
                        ),
                        UpstreamStatus::Up { .. } => {
                            let held = format_count(one.held.len() as u64, "tool");
                            let (health, why) =
                                match (one.pin_write_error(), one.unusable_tools().count()) {
                                    (Some(why), _) => (
                                        FindingState::Ill,
                                        format!(": new definitions cannot be stored: {why}"),
                                    ),
                                    (None, 0) => (
                                        FindingState::Note,
                                        "; review with `toolgate upstream diff`".to_owned(),
                                    ),
                                    (None, unfit) => {
                                        let whys = one.unusable_tools().map(|(tool, why)| {
                                            format!(
                                                "\n{tool} does not fit the configuration: {why}"
                                            )
                                        });
                                        let rest = if unfit < one.held.len() {
                                            "; review with `toolgate upstream diff`"
                                        } else {
                                            ""
                                        };
                                        (
                                            FindingState::Note,
                                            format!("{rest}{}", whys.collect::<String>()),
                                        )
                                    }
                                };
                            found.add(
                                "upstream",
                                health,
                                format!("{}: {held} quarantined{why}", one.name),
                            );
                        }
                        UpstreamStatus::Starting => found.add(
                            "upstream",
                            FindingState::Ill,
                            format!("{}: no answer", one.name),
                        ),
                        UpstreamStatus::Down { why, .. } => {
                            found.add("upstream", FindingState::Ill, format!("{}: {why}", one.name))
                        }
                    }
                }
                gateway.shut_down().await;
            }
        }
    });
    Ok(())
}
