//! Where clients have toolgate: among their hooks, or as their server.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use toolgate::config::Config;

use super::{Findings, Health, refuses};
use crate::client::{Client, is_hook};
use crate::command::hook;
use crate::command::init::{hooked_above, read, tools};
use crate::place::State;
use crate::servers;

/// The hooks that clients know of. They are tried where calls can be recorded; where a gateway serves, there may be none.
pub(super) fn clients(
    project: &Path,
    state: &State,
    declared: &[String],
    (serves, records): (bool, bool),
    own: &Path,
    found: &mut Findings,
) -> io::Result<()> {
    let (mut any, mut own_hooks, mut managed_hooks) = (false, false, false);
    let managed = Client::managed();
    for client in Client::HOOKED {
        let places = [(client.file(Some(project))?, ""), (client.file(None)?, " --user")];
        let others = managed.iter().filter(|_| client == Client::ClaudeCode).map(|path| (path.clone(), ""));
        for (path, user) in places.into_iter().chain(others) {
            let text = read(&path)?;
            if text.is_empty() {
                continue;
            }
            match Client::registered(&text) {
                Err(error) => found.say("hooks", Health::Ill, format!("{}: {error}; the client cannot read it either", path.display())),
                Ok(entries) if entries.is_empty() => {}
                Ok(entries) => {
                    any = true;
                    match client {
                        Client::ClaudeCode if managed.contains(&path) => managed_hooks = true,
                        Client::ClaudeCode => own_hooks = true,
                        _ => {}
                    }
                    let shell = client.shell_tool();
                    let knows = declared.iter().any(|tool| tool == shell);
                    let asked = (knows && records).then(|| json!({"command": format!("cat {}/key", state.path().display())}));
                    let tried = |command| match &asked {
                        Some(input) => refuses(command, client.before(), shell, input).map(drop),
                        None => Ok(()),
                    };
                    match client.leaves_aside(&text) {
                        // What is never read never starts.
                        Some(why) => {
                            let place = format!("{} ({})", path.display(), client.name());
                            found.say("hooks", Health::Ill, format!("{place}\nthe client leaves it aside, and all hooks in it: {why}"));
                        }
                        None => registered(client, &path, &entries, own, tried, project, found),
                    }
                    let init = format!("`toolgate init --for {}{user}`", client.name());
                    if !declared.is_empty() && !knows {
                        let says = format!("{} runs commands with `{shell}`, which the configuration does not declare", client.name());
                        found.say("tools", Health::Ill, format!("{says}\n{init} adds its tools, or says what to add"));
                    }
                    let unknown = tools(client).filter(|tool| knows && declared.iter().all(|known| known != tool));
                    let unknown: Vec<String> = unknown.map(|tool| format!("`{tool}`")).collect();
                    if !unknown.is_empty() {
                        let says = format!("of the tools of {}, the configuration leaves out {}", client.name(), unknown.join(", "));
                        found.say("tools", Health::Note, format!("{says}\nif that is not meant, {init} says what to add"));
                    }
                }
            }
        }
    }
    for files in Client::settings(project).into_iter().map(|path| vec![path]).chain([managed.clone()]) {
        if let Some(path) = switched_on("disableAllHooks", &files)? {
            found.say("hooks", Health::Ill, format!("`disableAllHooks` is on in {}", path.display()));
        }
    }
    if let Some(path) = switched_on("allowManagedHooksOnly", &managed)?.filter(|_| own_hooks && !managed_hooks) {
        let says = format!("`allowManagedHooksOnly` is on in {}: Claude Code runs no hooks of users and projects", path.display());
        found.say("hooks", Health::Ill, format!("{says}\nput what `toolgate init` has written into that file, or take the switch out"));
    }
    if served_by(project)? {
        any = true;
        registered_as_server(project, own, found)?;
    }
    // A gateway needs no hooks.
    if !any && !serves {
        let none = "no client has toolgate among its hooks; run `toolgate init --for claude-code`, or add `[gateway]` where `toolgate serve` serves this";
        let above = hooked_above(project);
        let above = above.map(|above| format!("no client that is started here has any, but in {}: look again there", above.display()));
        found.say("hooks", Health::Ill, above.unwrap_or_else(|| none.to_owned()));
    }
    Ok(())
}

/// The file that switches something on, of several of which a later one counts for more.
fn switched_on<'f>(switch: &str, files: &'f [PathBuf]) -> io::Result<Option<&'f Path>> {
    let mut on = None;
    for path in files {
        match crate::client::json(&read(path)?).ok().and_then(|file| file.get(switch)?.as_bool()) {
            Some(true) => on = Some(path.as_path()),
            Some(false) => on = None,
            None => {}
        }
    }
    Ok(on)
}

/// What is written in a client's file, and what comes of it when it is started as the client starts it.
fn registered(
    client: Client,
    path: &Path,
    entries: &[(String, String, Value)],
    own: &Path,
    refuses: impl Fn(Command) -> Result<(), String>,
    project: &Path,
    found: &mut Findings,
) {
    let mut wrong: Vec<String> = Vec::new();
    let same = |program: &str| {
        let (program, own) = (fs::canonicalize(program).unwrap_or_default(), fs::canonicalize(own).unwrap_or_default());
        // The small ones stand beside this one.
        program == own || (program.parent() == own.parent() && is_hook(&program.to_string_lossy()))
    };
    for (event, program, entry) in entries {
        if !Path::new(program).exists() {
            wrong.push(format!("{event} starts {program}, which is not there"));
        } else if !same(program) {
            wrong.push(format!("{event} starts {program}, which is another program than this one ({})", own.display()));
        }
        if entry.get("matcher").and_then(Value::as_str).is_some_and(|matcher| !matches!(matcher, "" | "*")) {
            wrong.push(format!("{event} is only for some tools: its matcher is not `*`"));
        }
        let closed = match client {
            Client::ClaudeCode => entry.get("onFailure").and_then(Value::as_str) == Some("block"),
            Client::Cursor => entry.get("failClosed").and_then(Value::as_bool) == Some(true),
            _ => true,
        };
        if !closed && event == client.before() {
            let switch = if client == Client::Cursor { "\"failClosed\": true" } else { "\"onFailure\": \"block\"" };
            wrong.push(format!("{event} lets calls run when the hook cannot be started: it has no `{switch}`"));
        }
        if entry.get("async").and_then(Value::as_bool) == Some(true) {
            wrong.push(format!("{event} is not waited for: it has `async`"));
        }
        let args = entry.get("args").and_then(Value::as_array);
        let plain = |args: &Vec<Value>| {
            let words = args.iter().map(|word| word.as_str().unwrap_or_default().into());
            let read = if is_hook(program) { hook::Args::of_flags(words) } else { hook::Args::quickly(words) };
            read.is_some()
        };
        let other = match args {
            Some(args) => !plain(args),
            None => !client.writes(entry, program),
        };
        if other {
            wrong.push(format!("{event} is started with other words than `toolgate init` writes"));
        }
        if entry.get("timeout").is_some_and(|timeout| !timeout.is_number()) {
            wrong.push(format!("{event} has a `timeout` that is no number, so the client drops all hooks of this file"));
        }
    }
    if !entries.iter().any(|(event, ..)| event == client.before()) {
        wrong.push(format!("there is none for {}: nothing is asked before a tool", client.before()));
    }
    // What it is started with is best seen when it is started.
    // What is written there may be anybody's: only what `init` writes is started.
    let sound = wrong.is_empty();
    let own = |entry: &Value, program: &str| client.writes(entry, program);
    for (_, _, entry) in entries.iter().filter(|(event, program, entry)| event == client.before() && sound && own(entry, program)) {
        let mut command = started(entry);
        command.current_dir(project);
        wrong.extend(refuses(command).err().map(|why| format!("{}: {why}", client.before())));
    }
    let place = format!("{} ({})", path.display(), client.name());
    if wrong.is_empty() {
        found.say("hooks", Health::Well, place);
    } else {
        wrong.sort();
        wrong.dedup();
        // What is written well and answers ill is not mended by writing it again.
        let again = if sound { String::new() } else { format!("\nrun `toolgate init --for {}` again", client.name()) };
        found.say("hooks", Health::Ill, format!("{place}\n{}{again}", wrong.join("\n")));
    }
}

/// An entry as a client starts it: a program with its words, or a line for the shell.
fn started(entry: &Value) -> Command {
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

/// Whether a client has toolgate as its server.
pub(super) fn served_by(project: &Path) -> io::Result<bool> {
    let text = read(&Client::ClaudeDesktop.file(Some(project))?)?;
    Ok(servers::registered(&text).ok().flatten().is_some())
}

/// Toolgate among the servers of a client.
fn registered_as_server(project: &Path, own: &Path, found: &mut Findings) -> io::Result<()> {
    let path = Client::ClaudeDesktop.file(Some(project))?;
    let text = read(&path)?;
    let Ok(Some((program, config))) = servers::registered(&text) else { return Ok(()) };
    let is_file = |file: &PathBuf| fs::canonicalize(file).is_ok_and(|file| fs::canonicalize(&path).is_ok_and(|path| file == path));
    let reads = |config: &str| Config::load(config).is_ok_and(|config| config.files().iter().any(is_file));
    let same = fs::canonicalize(&program).ok().is_some_and(|program| fs::canonicalize(own).ok() == Some(program));
    let place = format!("{} (claude-desktop)", path.display());
    match config {
        _ if !same => found.say(
            "server",
            Health::Ill,
            format!("{place}\nit starts {program}, which is not this program\nrun `toolgate init --for claude-desktop` again"),
        ),
        Some(config) if !Path::new(&config).is_file() => {
            found.say("server", Health::Ill, format!("{place}\nits configuration {config} is not there"))
        }
        Some(config) if servers::has_behind(&text) && !reads(&config) => {
            let line = format!("mcp_servers = [{}]", json!(path));
            let says = format!("its servers stand behind toolgate, and {config} does not read them\nadd this at its top: {line}");
            found.say("server", Health::Ill, format!("{place}\n{says}"));
        }
        _ => found.say("server", Health::Well, place),
    }
    Ok(())
}
