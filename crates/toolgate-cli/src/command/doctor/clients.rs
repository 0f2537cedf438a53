//! Checks the settings of clients: their hooks, and toolgate as their server.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use toolgate_config::Config;

use super::{DoctorFindings, FindingState, check_refusal};
use crate::client_mcp_servers;
use crate::command::init::{find_parent_with_hooks, read_or_empty, template_tools};
use toolgate_hook::client_hooks::{SupportedClient, is_hook_program};
use toolgate_hook::effective_config::UserStateDir;

/// Checks the hooks in the settings of clients, and runs them if calls can be recorded.
///
/// If a gateway serves here, no hook is necessary.
pub(super) fn check_clients(
    project: &Path,
    state: &UserStateDir,
    declared: &[String],
    (has_gateway, is_ledger_writable): (bool, bool),
    program: &Path,
    findings: &mut DoctorFindings,
) -> io::Result<()> {
    let (mut has_any_hook, mut has_own_hooks, mut has_managed_hooks) = (false, false, false);
    let managed = SupportedClient::managed_settings_files();
    for client in SupportedClient::ALL_WITH_HOOKS {
        let places =
            [(client.settings_file(Some(project))?, ""), (client.settings_file(None)?, " --user")];
        let managed_places = managed
            .iter()
            .filter(|_| client == SupportedClient::ClaudeCode)
            .map(|path| (path.clone(), ""));
        for (path, user_flag) in places.into_iter().chain(managed_places) {
            let text = read_or_empty(&path)?;
            if text.is_empty() {
                continue;
            }
            match SupportedClient::find_hook_entries(&text) {
                Err(error) => findings.add(
                    "hooks",
                    FindingState::Ill,
                    format!("{}: {error}; the client cannot read the file either", path.display()),
                ),
                Ok(entries) if entries.is_empty() => {}
                Ok(entries) => {
                    has_any_hook = true;
                    match client {
                        SupportedClient::ClaudeCode if managed.contains(&path) => {
                            has_managed_hooks = true
                        }
                        SupportedClient::ClaudeCode => has_own_hooks = true,
                        _ => {}
                    }
                    let shell = client.shell_tool();
                    let declares_shell = declared.iter().any(|tool| tool == shell);
                    let canary_input = (declares_shell && is_ledger_writable)
                        .then(|| json!({"command": format!("cat {}/key", state.path().display())}));
                    let run_hook = |command| match &canary_input {
                        Some(input) => {
                            check_refusal(command, client.before_tool_event(), shell, input)
                                .map(drop)
                        }
                        None => Ok(()),
                    };
                    match client.ignored_file_reason(&text) {
                        // The client ignores the file, so it starts no hook.
                        Some(why) => {
                            let location = format!("{} ({})", path.display(), client.name());
                            findings.add(
                                "hooks",
                                FindingState::Ill,
                                format!("{location}\nthe client ignores the file and all hooks in it: {why}"),
                            );
                        }
                        None => check_hooks(
                            client, &path, &entries, program, run_hook, project, findings,
                        ),
                    }
                    let init = format!("`toolgate init --for {}{user_flag}`", client.name());
                    if !declared.is_empty() && !declares_shell {
                        let message = format!(
                            "{} runs commands with `{shell}`, which the configuration does not declare",
                            client.name()
                        );
                        findings.add(
                            "tools",
                            FindingState::Ill,
                            format!("{message}\n{init} adds its tools, or prints what to add"),
                        );
                    }
                    let unknown = template_tools(client).filter(|tool| {
                        declares_shell && declared.iter().all(|known| known != tool)
                    });
                    let unknown: Vec<String> = unknown.map(|tool| format!("`{tool}`")).collect();
                    if !unknown.is_empty() {
                        let message = format!(
                            "the configuration does not declare these tools of {}: {}",
                            client.name(),
                            unknown.join(", ")
                        );
                        findings.add(
                            "tools",
                            FindingState::Note,
                            format!(
                                "{message}\nif this is not intended, {init} prints what to add"
                            ),
                        );
                    }
                }
            }
        }
    }
    for files in SupportedClient::hook_disabling_files(project)
        .into_iter()
        .map(|path| vec![path])
        .chain([managed.clone()])
    {
        if let Some(path) = find_switch("disableAllHooks", &files)? {
            findings.add(
                "hooks",
                FindingState::Ill,
                format!("`disableAllHooks` is on in {}", path.display()),
            );
        }
    }
    if let Some(path) = find_switch("allowManagedHooksOnly", &managed)?
        .filter(|_| has_own_hooks && !has_managed_hooks)
    {
        let message = format!(
            "`allowManagedHooksOnly` is on in {}: Claude Code does not run hooks of users and projects",
            path.display()
        );
        findings.add(
            "hooks",
            FindingState::Ill,
            format!("{message}\nmove the hooks that `toolgate init` wrote into that file, or remove the switch"),
        );
    }
    if is_server_registered(project)? {
        has_any_hook = true;
        check_server_entry(project, program, findings)?;
    }
    // With a gateway, no hook is necessary.
    if !has_any_hook && !has_gateway {
        let advice = "no client has a hook for toolgate; run `toolgate init --for claude-code`, or add `[gateway]` to use `toolgate serve`";
        let parent = find_parent_with_hooks(project);
        let parent_advice = parent.map(|parent| {
            format!("no client that starts here has a hook; there are hooks in {}: run `toolgate doctor` there", parent.display())
        });
        findings.add(
            "hooks",
            FindingState::Ill,
            parent_advice.unwrap_or_else(|| advice.to_owned()),
        );
    }
    Ok(())
}

/// Returns the file that turns a switch on. A later file overrides an earlier one.
fn find_switch<'f>(switch: &str, files: &'f [PathBuf]) -> io::Result<Option<&'f Path>> {
    let mut enabling_file = None;
    for path in files {
        match toolgate_hook::client_hooks::parse_settings_json(&read_or_empty(path)?)
            .ok()
            .and_then(|file| file.get(switch)?.as_bool())
        {
            Some(true) => enabling_file = Some(path.as_path()),
            Some(false) => enabling_file = None,
            None => {}
        }
    }
    Ok(enabling_file)
}

/// Checks the hook entries of a client's file, and runs them as the client does.
fn check_hooks(
    client: SupportedClient,
    path: &Path,
    entries: &[(String, String, Value)],
    toolgate_program: &Path,
    run_hook: impl Fn(Command) -> Result<(), String>,
    project: &Path,
    findings: &mut DoctorFindings,
) {
    let mut problems: Vec<String> = Vec::new();
    let is_toolgate_program = |program: &str| {
        let (program, toolgate_program) = (
            fs::canonicalize(program).unwrap_or_default(),
            fs::canonicalize(toolgate_program).unwrap_or_default(),
        );
        // The small hook programs are in the same directory as this program.
        program == toolgate_program
            || (program.parent() == toolgate_program.parent()
                && is_hook_program(&program.to_string_lossy()))
    };
    for (event, program, entry) in entries {
        if !Path::new(program).exists() {
            problems.push(format!("{event} starts {program}, which does not exist"));
        } else if !is_toolgate_program(program) {
            problems.push(format!(
                "{event} starts {program}, which is not this program ({})",
                toolgate_program.display()
            ));
        }
        if entry
            .get("matcher")
            .and_then(Value::as_str)
            .is_some_and(|matcher| !matches!(matcher, "" | "*"))
        {
            problems.push(format!("{event} covers only some tools: its matcher is not `*`"));
        }
        let is_fail_closed = match client {
            SupportedClient::ClaudeCode => {
                entry.get("onFailure").and_then(Value::as_str) == Some("block")
            }
            SupportedClient::Cursor => {
                entry.get("failClosed").and_then(Value::as_bool) == Some(true)
            }
            _ => true,
        };
        if !is_fail_closed && event == client.before_tool_event() {
            let switch = if client == SupportedClient::Cursor {
                "\"failClosed\": true"
            } else {
                "\"onFailure\": \"block\""
            };
            problems
                .push(format!("{event} allows calls if the hook does not start: add `{switch}`"));
        }
        if entry.get("async").and_then(Value::as_bool) == Some(true) {
            problems.push(format!("{event} does not wait for the hook: remove `async`"));
        }
        let args = entry.get("args").and_then(Value::as_array);
        let are_hook_args = |args: &Vec<Value>| {
            let mut words = args.iter().map(|word| word.as_str().unwrap_or_default());
            (is_hook_program(program) || words.next() == Some("hook"))
                && toolgate_hook::can_parse_flags(words)
        };
        let has_other_arguments = match args {
            Some(args) => !are_hook_args(args),
            None => !client.is_entry_as_written(entry, program),
        };
        if has_other_arguments {
            problems.push(format!("{event} has other arguments than `toolgate init` writes"));
        }
        if entry.get("timeout").is_some_and(|timeout| !timeout.is_number()) {
            problems.push(format!("{event} has a `timeout` that is not a number, so the client ignores all hooks of this file"));
        }
    }
    if !entries.iter().any(|(event, ..)| event == client.before_tool_event()) {
        problems
            .push(format!("{} has no hook, so calls are not checked", client.before_tool_event()));
    }
    // Run the hooks to check their arguments. The file may contain any command, so run only entries
    // that `init` writes.
    let is_sound = problems.is_empty();
    let is_as_written = |entry: &Value, program: &str| client.is_entry_as_written(entry, program);
    for (_, _, entry) in entries.iter().filter(|(event, program, entry)| {
        event == client.before_tool_event() && is_sound && is_as_written(entry, program)
    }) {
        let mut command = build_command(entry);
        command.current_dir(project);
        problems.extend(
            run_hook(command).err().map(|why| format!("{}: {why}", client.before_tool_event())),
        );
    }
    let location = format!("{} ({})", path.display(), client.name());
    if problems.is_empty() {
        findings.add("hooks", FindingState::Well, location);
    } else {
        problems.sort();
        problems.dedup();
        // If the entry is correct but its answer is wrong, `init` would not help.
        let advice = if is_sound {
            String::new()
        } else {
            format!("\nrun `toolgate init --for {}` again", client.name())
        };
        findings.add(
            "hooks",
            FindingState::Ill,
            format!("{location}\n{}{advice}", problems.join("\n")),
        );
    }
}

/// Builds the command of an entry: a program with arguments, or a shell command.
fn build_command(entry: &Value) -> Command {
    let line = entry.get("command").and_then(Value::as_str).unwrap_or_default();
    match entry.get("args").and_then(Value::as_array) {
        Some(args) => {
            let mut command = Command::new(line);
            command.args(args.iter().filter_map(Value::as_str));
            command
        }
        None => {
            let mut command = Command::new("sh");
            command.arg("-c").arg(line);
            command
        }
    }
}

/// Returns true if a client has toolgate as its server.
pub(super) fn is_server_registered(project: &Path) -> io::Result<bool> {
    let text = read_or_empty(&SupportedClient::ClaudeDesktop.settings_file(Some(project))?)?;
    Ok(client_mcp_servers::find_toolgate_server(&text).ok().flatten().is_some())
}

/// Checks the entry of toolgate among the servers of a client.
fn check_server_entry(
    project: &Path,
    toolgate_program: &Path,
    findings: &mut DoctorFindings,
) -> io::Result<()> {
    let path = SupportedClient::ClaudeDesktop.settings_file(Some(project))?;
    let text = read_or_empty(&path)?;
    let Ok(Some((program, config))) = client_mcp_servers::find_toolgate_server(&text) else {
        return Ok(());
    };
    let is_file = |file: &PathBuf| {
        fs::canonicalize(file)
            .is_ok_and(|file| fs::canonicalize(&path).is_ok_and(|path| file == path))
    };
    let includes_file = |config: &str| {
        Config::load(config).is_ok_and(|config| config.included_files().iter().any(is_file))
    };
    let is_toolgate_program = fs::canonicalize(&program)
        .ok()
        .is_some_and(|program| fs::canonicalize(toolgate_program).ok() == Some(program));
    let location = format!("{} (claude-desktop)", path.display());
    match config {
        _ if !is_toolgate_program => findings.add(
            "server",
            FindingState::Ill,
            format!("{location}\nit starts {program}, which is not this program\nrun `toolgate init --for claude-desktop` again"),
        ),
        Some(config) if !Path::new(&config).is_file() => {
            findings.add("server", FindingState::Ill, format!("{location}\nits configuration {config} does not exist"))
        }
        Some(config) if client_mcp_servers::has_upstream_servers(&text) && !includes_file(&config) => {
            let line = format!("mcp_servers = [{}]", json!(path));
            let message = format!("the other servers are behind toolgate, but {config} does not read them\nadd this at its top: {line}");
            findings.add("server", FindingState::Ill, format!("{location}\n{message}"));
        }
        _ => findings.add("server", FindingState::Well, location),
    }
    Ok(())
}
