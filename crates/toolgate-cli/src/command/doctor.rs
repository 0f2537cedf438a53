//! Implements `toolgate doctor`: checks that toolgate works in the current directory.

mod clients;
mod gateway;

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

use self::clients::{check_clients, is_server_registered};
use self::gateway::check_gateway;
use crate::command::common::{BOLD, DIM, GREEN, IgnoreBrokenPipe, RED, YELLOW, sanitize};
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
    let mut findings = DoctorFindings::default();
    run_checks(args, &mut findings)?;
    let ok = findings.0.iter().all(|finding| finding.state != FindingState::Ill);
    let mut out = IgnoreBrokenPipe(anstream::stdout().lock());
    if args.json {
        writeln!(out, "{}", json!({"ok": ok, "findings": findings.0}))?;
    } else {
        for DoctorFinding { check, state, says } in &findings.0 {
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

fn run_checks(args: &Args, findings: &mut DoctorFindings) -> io::Result<()> {
    let project = effective_config::project_dir()?;
    let state = match UserStateDir::open() {
        Ok(state) => state,
        Err(error) => {
            findings.add("state", FindingState::Ill, error.to_string());
            return Ok(());
        }
    };
    findings.add("state", FindingState::Well, format!("{} is private", state.path().display()));
    let current_program = std::env::current_exe()?;
    let mut declared: Vec<String> = Vec::new();
    // If rows cannot be written, every call is denied. Report this once, and skip the canary.
    let (mut has_gateway, mut is_ledger_writable) = (false, true);
    match EffectiveConfig::find(args.config.as_deref(), &project, &state) {
        Err(error) => findings.add("configuration", FindingState::Ill, error.to_string()),
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
                findings.add("trust", FindingState::Ill, notice.clone());
            }
            let (store, retention) = (in_force.store.clone(), in_force.retention());
            has_gateway = !in_force.config.upstreams.is_empty()
                || in_force.config.gateway.is_declared
                || is_server_registered(&project)?;
            if has_gateway {
                check_gateway(args, findings)?;
            }
            let names: Vec<String> = in_force.config.agent_names().map(str::to_owned).collect();
            match in_force.config.for_client().build_agents(None) {
                Err(error) => findings.add(
                    "configuration",
                    FindingState::Ill,
                    format!("the configuration does not load\n{}", error.render(false)),
                ),
                Ok(agents) => {
                    let rules: usize =
                        agents.iter().map(|agent| agent.enforced_rules().count()).sum();
                    findings.add(
                        "configuration",
                        FindingState::Well,
                        format!(
                            "{files} ({} enforced)",
                            crate::command::common::format_count(rules as u64, "rule")
                        ),
                    );
                    let tools = || agents.iter().flat_map(|agent| agent.tools());
                    let canary_call = find_canary_call(tools(), state.path());
                    declared = tools().map(|tool| tool.name().to_owned()).collect();
                    is_ledger_writable = check_ledger(&store, retention, &state, findings);
                    if !has_gateway && is_ledger_writable {
                        check_canary(
                            args,
                            &names,
                            &current_program,
                            canary_call.as_ref(),
                            findings,
                        );
                    }
                }
            }
        }
    }
    match toolgate_process::sandbox::test_sandbox(&current_program) {
        Ok(None) => findings.add("sandbox", FindingState::Well, "command tools run in a sandbox"),
        Ok(Some(gap)) => findings.add("sandbox", FindingState::Note, gap),
        Err(why) => findings.add(
            "sandbox",
            FindingState::Note,
            format!("command tools cannot run here: {why}"),
        ),
    }
    check_clients(
        &project,
        &state,
        &declared,
        (has_gateway, is_ledger_writable),
        &current_program,
        findings,
    )
}

/// Checks that the ledger is writable and private. Returns true if it is writable.
fn check_ledger(
    store: &Path,
    retention: Option<toolgate::SignedDuration>,
    state: &UserStateDir,
    findings: &mut DoctorFindings,
) -> bool {
    match toolgate_hook::open_store(store, state) {
        Err(error) => {
            findings.add("ledger", FindingState::Ill, error.to_string());
            false
        }
        Ok(opened_store) => {
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            if let Err(why) = runtime.map_err(|error| error.to_string()).and_then(|runtime| {
                runtime.block_on(opened_store.check_writable()).map_err(|error| error.to_string())
            }) {
                findings.add(
                    "ledger",
                    FindingState::Ill,
                    format!("cannot write to the ledger: {why}"),
                );
                return false;
            }
            drop(opened_store);
            let keys = PathBuf::from(format!("{}.state/keys", store.display()));
            let private_paths = [store.to_owned(), keys.clone()]
                .into_iter()
                .chain(fs::read_dir(&keys).into_iter().flatten().flatten().map(|file| file.path()));
            let exposed_paths: Vec<String> = private_paths
                .filter(|path| fs::metadata(path).is_ok_and(|file| file.mode() & 0o077 != 0))
                .map(|path| path.display().to_string())
                .collect();
            let pronoun = if exposed_paths.len() == 1 { "it" } else { "them" };
            match exposed_paths.first() {
                Some(_) => findings.add(
                    "ledger",
                    FindingState::Ill,
                    format!(
                        "other users can read {}; run `chmod go-rwx` on {pronoun}",
                        exposed_paths.join(", ")
                    ),
                ),
                None => {
                    let retention = toolgate_hook::retention::describe_retention(store, retention)
                        .map(|text| format!("\n{text}"))
                        .unwrap_or_default();
                    findings.add(
                        "ledger",
                        FindingState::Well,
                        format!("{}{retention}", store.display()),
                    );
                }
            }
            check_clock(store, findings);
            true
        }
    }
}

/// Checks the clock, on which limits and evidence depend.
fn check_clock(store: &Path, findings: &mut DoctorFindings) {
    let now = jiff::Timestamp::now();
    let newest = toolgate_store::Ledger::open(store)
        .ok()
        .and_then(|ledger| ledger.find_row(ledger.last_seq().ok()?).ok()?)
        .map(|row| row.at);
    match newest {
        Some(last) if last.duration_since(now) > jiff::SignedDuration::from_mins(5) => {
            findings.add(
                "clock",
                FindingState::Ill,
                format!(
                    "the clock went backwards: it is {now}, but the ledger has a row of {last}"
                ),
            );
        }
        _ if now.as_second() < 1_767_225_600 => {
            findings.add("clock", FindingState::Ill, format!("the clock is wrong: it is at {now}"))
        }
        _ => findings.add(
            "clock",
            FindingState::Well,
            now.strftime("%Y-%m-%d %H:%M:%SZ").to_string(),
        ),
    }
}

/// Makes a call that must be refused, with the hook program as clients start it.
fn check_canary(
    args: &Args,
    agents: &[String],
    program: &Path,
    canary_call: Option<&(String, Value)>,
    findings: &mut DoctorFindings,
) {
    let Some((tool, input)) = canary_call else {
        findings.add(
            "canary",
            FindingState::Note,
            "no declared tool can be asked for a file, so the canary cannot run",
        );
        return;
    };
    let mut command = Command::new(program);
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
        Err(why) => findings.add("canary", FindingState::Ill, why),
        Ok(duration) => findings.add(
            "canary",
            FindingState::Well,
            format!("a call that must be refused was refused, in {duration:?}"),
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
    let arguments_for = |tool: &ToolSpec| {
        let Some(schema) = tool.input_schema() else {
            return Some(json!({"command": format!("cat {key}"), "file_path": key}));
        };
        let required =
            schema.get("required").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let is_text = |name: &String, property: &Value| {
            let is_unrestricted = ["enum", "const", "pattern", "format", "maxLength"]
                .iter()
                .all(|keyword| property.get(keyword).is_none());
            is_unrestricted
                && property.get("type").and_then(Value::as_str) == Some("string")
                && required.iter().all(|other| other.as_str() == Some(name))
        };
        let (name, _) = schema
            .get("properties")?
            .as_object()?
            .iter()
            .find(|(name, property)| is_text(name, property))?;
        let value =
            if tool.shell_argument().is_some() { format!("cat {key}") } else { key.clone() };
        Some(json!({name.as_str(): value}))
    };
    // Skip names with a digest: the client calls such a tool by another name.
    let tools = tools
        .filter(|tool| toolgate::tool::name::tool_name_from_client(tool.name()) == tool.name());
    let mut candidates: Vec<(String, Value, bool)> = tools
        .filter_map(|tool| {
            Some((tool.name().to_owned(), arguments_for(tool)?, tool.input_schema().is_some()))
        })
        .collect();
    candidates.sort_by_key(|(_, _, has_schema)| *has_schema);
    candidates.into_iter().next().map(|(tool, input, _)| (tool, input))
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
    let started = Instant::now();
    let mut run = || -> io::Result<std::process::Output> {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A hook that does not read its input may still answer.
            let _ = stdin.write_all(event.to_string().as_bytes());
        }
        while child.try_wait()?.is_none() {
            if started.elapsed() > Duration::from_secs(10) {
                child.kill()?;
                return Err(io::Error::other("no answer within 10 seconds"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        child.wait_with_output()
    };
    let output =
        run().map_err(|error| format!("a call that must be refused got no answer: {error}"))?;
    let duration =
        Duration::from_micros(u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX));
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let denied =
        output.status.success() && stdout.contains("\"deny\"") && stdout.contains("own_state");
    if denied || (output.status.code() == Some(2) && stderr.contains("own_state")) {
        return Ok(duration);
    }
    let reply: Value = serde_json::from_str(&stdout).unwrap_or_default();
    let reply_field =
        |name: &str| reply.pointer(&format!("/hookSpecificOutput/{name}")).and_then(Value::as_str);
    let why = reply_field("permissionDecisionReason").unwrap_or(if stdout.trim().is_empty() {
        stderr.trim()
    } else {
        stdout.trim()
    });
    let why: String = why.lines().next().unwrap_or("no output").chars().take(300).collect();
    if output.status.code() == Some(2) || (output.status.success() && stdout.contains("\"deny\"")) {
        return Err(format!(
            "a call that must be refused was refused, but not by the rule that protects toolgate: {why}"
        ));
    }
    Err(format!(
        "a call that must be refused got {}: {why}",
        reply_field("permissionDecision").unwrap_or("no decision")
    ))
}
