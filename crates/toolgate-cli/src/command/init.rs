//! `toolgate init`, `toolgate eject` and `toolgate trust`: into a project, out of it, and whether its word counts.

mod added;

pub(super) use added::tools;

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use toolgate::config::Config;
use toolgate_store::SqliteStore;

use self::added::Lack;
use super::ledger::{BOLD, DIM, GREEN, RED, Unstopped, counted};
use crate::client::Client;
use crate::place::{self, FILE, InForce, State};
use crate::servers;

/// Put toolgate into a project: a commented configuration, and its hook in the client's own settings.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate init                         a configuration, and nothing else\n  toolgate init --for claude-code       and its hooks in .claude/settings.json\n  toolgate init --for codex --dry-run   only show what would change\n  toolgate init --for claude-desktop    before all of its MCP servers\n  toolgate init --import .mcp.json      for `serve`, before these MCP servers"
)]
pub(crate) struct InitArgs {
    /// The client to register with.
    #[arg(long = "for", value_enum, value_name = "CLIENT")]
    client: Option<Client>,
    /// In the settings of the user, for all projects.
    #[arg(long, requires = "client")]
    user: bool,
    /// MCP servers that the configuration takes in: a file with `mcpServers`, as clients have it.
    #[arg(long, value_name = "FILE")]
    import: Option<PathBuf>,
    /// Show what would change, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Take toolgate out of a client's settings again: its hooks, or its server, and put back what stood there before.
#[derive(clap::Args)]
#[command(
    after_help = "The configuration and the ledger stay, without what `init` has added to a file of yours.\n\nExamples:\n  toolgate eject                            out of every client of this project\n  toolgate eject --for claude-code --user   out of the user's own settings\n  toolgate eject --dry-run                  only show what would change"
)]
pub(crate) struct EjectArgs {
    /// The client; all of them unless said.
    #[arg(long = "for", value_enum, value_name = "CLIENT")]
    client: Option<Client>,
    /// In the settings of the user.
    #[arg(long)]
    user: bool,
    /// Show what would change, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Accept a project's configuration as it is now: until then only the user's own is in force.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate trust                accept the project's toolgate.toml and its files\n  toolgate trust --revoke       do not accept it any more\n  toolgate trust --new-ledger   begin a new ledger; the old one was moved away"
)]
pub(crate) struct TrustArgs {
    /// The configuration; that of the project here unless said.
    config: Option<PathBuf>,
    /// Do not accept it any more.
    #[arg(long)]
    revoke: bool,
    /// Forget which ledger was used before.
    #[arg(long, conflicts_with = "revoke")]
    new_ledger: bool,
}

pub(crate) fn init(args: &InitArgs, store: Option<&Path>) -> io::Result<ExitCode> {
    let project = std::env::current_dir()?;
    let mut out = Unstopped(anstream::stdout().lock());
    let config = if args.user { place::own().ok_or_else(|| io::Error::other("there is no home directory"))? } else { project.join(FILE) };
    // A client that cannot be registered is known before anything is written.
    let settings = match args.client {
        Some(client) => {
            let path = client.file((!args.user).then_some(&*project))?;
            let program = std::env::current_exe()?.display().to_string();
            let before = read(&path)?;
            let named = |why: String| io::Error::other(format!("{}: {why}", path.display()));
            let after = match client {
                Client::ClaudeDesktop => servers::with_toolgate(&before, &program, &config.display().to_string()).map_err(named)?,
                _ => client.with_hooks(&before, &crate::client::hook_program()?.display().to_string()).map_err(named)?,
            };
            Some((path, before, after))
        }
        None => None,
    };
    let is_new = !config.exists();
    // What a client has of servers stands behind toolgate from now on.
    let behind = settings.as_ref().filter(|(_, _, after)| args.client == Some(Client::ClaudeDesktop) && after.contains(servers::BEHIND));
    let import = match (&args.import, behind) {
        (Some(file), _) => {
            let named = |why: String| io::Error::other(format!("{}: {why}", file.display()));
            let text = fs::read_to_string(file).map_err(|error| named(error.to_string()))?;
            toolgate::config::mcp_servers(&text).map_err(named)?;
            // One that stands beside the configuration moves with it.
            let beside =
                config.parent().and_then(|directory| std::path::absolute(file).ok()?.strip_prefix(directory).ok().map(Path::to_owned));
            Some(beside.map_or_else(|| std::path::absolute(file), Ok)?)
        }
        (None, Some((path, ..))) => Some(path.clone()),
        (None, None) => None,
    };
    // Whoever writes it has accepted it; whoever finds it there reads it first.
    let accepted = if is_new {
        let text = template(args.client, args.user, store, import.as_deref());
        change(&mut out, &config, "", &text, args.dry_run)?;
        // The nearest counts alone.
        if let Some(above) = project.parent().and_then(place::of_project).filter(|_| !args.user) {
            writeln!(out, "from here down it counts in place of {}: if that is not meant, remove it and run this there", above.display())?;
        }
        true
    } else {
        extend(&mut out, args, &config)?
    };
    let unread = import.as_ref().map(|import| format!("mcp_servers = [{}]", serde_json::json!(import)));
    let unread = if is_new { None } else { unread };
    let unread = unread.filter(|line| read(&config).is_ok_and(|text| !text.contains(line)));
    say_unread(&mut out, &config, unread.as_deref())?;
    if let Some((path, before, after)) = &settings {
        change(&mut out, path, before, after, args.dry_run)?;
        if let Some((client, why)) = args.client.and_then(|client| Some((client.name(), client.leaves_aside(after)?))) {
            writeln!(out, "{RED}{client} leaves this file aside{RED:#}, and all hooks in it, as it is: {why}")?;
        }
    }
    if args.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    let state = State::open()?;
    if !args.user {
        if accepted {
            state.trust(&config)?;
        } else if !state.trusts(&config)? {
            writeln!(out, "it is not in force yet: read it, then run {BOLD}toolgate trust{BOLD:#}")?;
        }
    }
    let found = InForce::find(Some(&config), &project, &state)?;
    if let Some(parent) = found.store.parent() {
        fs::create_dir_all(parent)?;
    }
    super::hook::open_store(&found.store, &state)?;
    writeln!(out, "the ledger is {}", found.store.display())?;
    match args.client {
        Some(Client::ClaudeDesktop) => writeln!(out, "start Claude Desktop again; what its agent may do is in {}", config.display())?,
        Some(Client::Codex) => writeln!(out, "Codex runs no hook that was not reviewed: start it and say {BOLD}/hooks{BOLD:#}")?,
        Some(_) => {
            if let Some((path, ..)) = settings.as_ref().filter(|_| !args.user) {
                let path = path.file_name().unwrap_or_default().to_string_lossy();
                writeln!(out, "{DIM}{path} names the program at its place on this machine: whoever shares it needs it there{DIM:#}")?;
            }
            writeln!(out, "look whether it holds with {BOLD}toolgate doctor{BOLD:#}")?;
        }
        None if args.import.is_some() => {
            writeln!(out, "see what they offer with {BOLD}toolgate upstream list{BOLD:#}, and serve with {BOLD}toolgate serve{BOLD:#}")?
        }
        None => writeln!(out, "register a client with {BOLD}toolgate init --for claude-code{BOLD:#}")?,
    }
    // Until that is done the client has no tools: it is the last that is read.
    say_unread(&mut out, &config, unread.as_deref())?;
    Ok(ExitCode::SUCCESS)
}

/// Says which line a configuration lacks, so that it has the servers which are to stand behind it.
fn say_unread(out: &mut impl Write, config: &Path, line: Option<&str>) -> io::Result<()> {
    match line {
        Some(line) => writeln!(out, "add this at the top of {}, so that the servers are there: {BOLD}{line}{BOLD:#}", config.display()),
        None => Ok(()),
    }
}

/// Sees to it that a configuration which is there has the tools of a client. Says whether it is accepted as it is now.
fn extend(out: &mut impl Write, args: &InitArgs, config: &Path) -> io::Result<bool> {
    let text = read(config)?;
    let hooked = args.client.filter(|client| Client::HOOKED.contains(client));
    let lack = hooked.map_or(Lack::Nothing, |client| Lack::of(client, config, &text, beside(args.user).as_ref()));
    let name = hooked.map(Client::name).unwrap_or_default();
    if let Lack::Added(after) = &lack {
        // What was accepted before is accepted with what is added here.
        let accepted = !args.user && !args.dry_run && State::open()?.trusts(config)?;
        change(out, config, &text, after, args.dry_run)?;
        return Ok(accepted);
    }
    writeln!(out, "{DIM}{} is there already, and stays as it is{DIM:#}", config.display())?;
    match &lack {
        Lack::Nothing | Lack::Added(_) => {}
        Lack::Unfit(text) => {
            writeln!(out, "it does not declare what {name} runs commands with, and cannot be added to as it stands")?;
            writeln!(out, "write this into it, for the agent that {name} works as:\n\n{text}")?;
        }
        Lack::Others(text) => {
            writeln!(out, "it leaves out some tools of {name}; if that is not meant, add this at its end:\n\n{text}")?;
        }
    }
    Ok(false)
}

/// The user's own configuration, where it holds beside that of a project.
fn beside(is_own: bool) -> Option<Config> {
    let own = place::own().filter(|own| !is_own && own.is_file())?;
    Config::load(own).ok()
}

pub(crate) fn eject(args: &EjectArgs) -> io::Result<ExitCode> {
    let project = std::env::current_dir()?;
    let mut out = Unstopped(anstream::stdout().lock());
    let clients: Vec<Client> =
        args.client.map_or_else(|| Client::HOOKED.into_iter().chain([Client::ClaudeDesktop]).collect(), |client| vec![client]);
    let mut found = false;
    for client in clients.iter().copied() {
        let path = client.file((!args.user).then_some(&*project))?;
        let before = read(&path)?;
        let why = |why: String| io::Error::other(format!("{}: {why}", path.display()));
        let is_server = client == Client::ClaudeDesktop;
        let registered = match is_server {
            _ if before.is_empty() => false,
            true => servers::registered(&before).map_err(why)?.is_some(),
            false => !Client::registered(&before).map_err(why)?.is_empty(),
        };
        if !registered {
            continue;
        }
        found = true;
        let after = if is_server { servers::without_toolgate(&before) } else { Client::without_hooks(&before) }.map_err(why)?;
        // Behind a link, what is left of the file stays with it: to take the link away would leave the hooks where they are.
        let after = if crate::client::says_nothing(&after) && !path.is_symlink() { String::new() } else { after };
        change(&mut out, &path, &before, &after, args.dry_run)?;
    }
    found |= shorten(&mut out, args, &project, &clients)?;
    if !found {
        let above = hooked_above(&project).filter(|_| !args.user);
        let above = above.map(|above| format!("; it is in those of {}: run this there", above.display())).unwrap_or_default();
        writeln!(out, "toolgate is in none of these settings{above}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes out of a configuration what was added to it for clients. Says whether there was anything.
fn shorten(out: &mut impl Write, args: &EjectArgs, project: &Path, clients: &[Client]) -> io::Result<bool> {
    let config = if args.user { place::own() } else { Some(project.join(FILE)) };
    let Some(config) = config else { return Ok(false) };
    let mut others = Vec::new();
    for other in Client::HOOKED.into_iter().filter(|other| !clients.contains(other)) {
        let settings = read(&other.file((!args.user).then_some(project))?)?;
        if Client::registered(&settings).is_ok_and(|entries| !entries.is_empty()) {
            others.push(other);
        }
    }
    let (own, before) = (beside(args.user), read(&config)?);
    let (mut after, mut found) = (before.clone(), false);
    for client in clients {
        match added::without(*client, &config, &after, own.as_ref(), &others) {
            Ok(None) => continue,
            Ok(Some(left)) => after = left,
            Err(why) => writeln!(out, "{} keeps what was added for {}: {why}", config.display(), client.name())?,
        }
        found = true;
    }
    if after != before {
        // What was accepted with it is accepted without it.
        let accepted = !args.user && !args.dry_run && State::open()?.trusts(&config)?;
        change(out, &config, &before, &after, args.dry_run)?;
        if accepted {
            State::open()?.trust(&config)?;
        }
    }
    Ok(found)
}

pub(crate) fn trust(args: &TrustArgs) -> io::Result<ExitCode> {
    let state = State::open()?;
    let mut out = anstream::stdout().lock();
    let directory = std::env::current_dir()?;
    let config = match &args.config {
        Some(path) => path.clone(),
        None => place::of_project(&directory)
            .or_else(|| place::own().filter(|own| args.new_ledger && own.exists()))
            .ok_or_else(place::nothing_here)?,
    };
    if args.revoke {
        let was = state.distrust(&config)?;
        writeln!(out, "{} {}", config.display(), if was { "is not in force any more" } else { "was not accepted before" })?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.new_ledger {
        let store = match &args.config {
            Some(path) => InForce::find(Some(path), &directory, &state)?.store,
            None => match place::named_store() {
                Some(named) => std::path::absolute(named)?,
                None => place::store_of(&place::project()?)?.unwrap_or_else(|| state.ledger()),
            },
        };
        begin(&store, &state)?;
        writeln!(out, "a new ledger begins at {}", store.display())?;
        return Ok(ExitCode::SUCCESS);
    }
    let found = InForce::find(Some(&config), &directory, &state)?;
    let (files, names) = (found.config.files().len(), place::names_of(found.config.files(), &config));
    let agents = place::with_known(found.config, &config)?.agents(None).map_err(|error| {
        let problems = error.render(io::stderr().is_terminal());
        io::Error::other(format!("the configuration does not load, so it is not accepted\n\n{problems}"))
    })?;
    state.trust(&config)?;
    writeln!(out, "{GREEN}accepted{GREEN:#} {}", config.display())?;
    for agent in &agents {
        let (tools, rules) = (agent.tools().count() as u64, agent.enforced_rules().count() as u64);
        writeln!(out, "  {} has {} and {}", agent.name(), counted(tools, "tool"), counted(rules, "rule"))?;
    }
    if files > 0 {
        writeln!(out, "  with {}: {names}", counted(files as u64, "included file"))?;
    }
    writeln!(out, "{DIM}any change to it must be accepted anew{DIM:#}")?;
    Ok(ExitCode::SUCCESS)
}

/// Begins a ledger where nothing is left of another; leaves nothing behind where that cannot be done.
fn begin(store: &Path, state: &State) -> io::Result<()> {
    let beside = toolgate_store::beside(store);
    if let Some(left) = [store, beside.as_path()].into_iter().find(|path| path.exists()) {
        return Err(io::Error::other(format!("{} is there; move it away first", left.display())));
    }
    let begun = SqliteStore::open(store).map_err(io::Error::other).and_then(|new| state.know_ledger(store, new.id()));
    if begun.is_err() {
        let _ = (fs::remove_file(store), fs::remove_dir_all(beside));
    }
    begun
}

/// The directory further up whose configuration counts in this one, where clients that are started there have hooks.
pub(super) fn hooked_above(directory: &Path) -> Option<PathBuf> {
    let above = place::of_project(directory)?.parent()?.to_owned();
    let is_hooked = |client: Client| {
        let text = client.file(Some(&above)).and_then(|path| read(&path)).unwrap_or_default();
        Client::registered(&text).is_ok_and(|entries| !entries.is_empty())
    };
    (above != directory && Client::HOOKED.into_iter().any(is_hooked)).then_some(above)
}

/// The text of a file; nothing where there is none.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(named(path, &error)),
        text => text,
    }
}

/// Changes a file, whole or not at all, and shows what changed. One in which nothing is left is removed.
fn change(out: &mut impl Write, path: &Path, before: &str, after: &str, dry_run: bool) -> io::Result<()> {
    if before == after {
        return writeln!(out, "{DIM}{} stays as it is{DIM:#}", path.display());
    }
    match (dry_run, after.is_empty()) {
        (true, _) => {}
        (false, true) => remove(path)?,
        (false, false) => put(path, after)?,
    }
    let verb = match (dry_run, before.is_empty(), after.is_empty()) {
        (true, true, _) => "would write",
        (true, false, true) => "would remove",
        (true, false, false) => "would change",
        (false, true, _) => "wrote",
        (false, false, true) => "removed",
        (false, false, false) => "changed",
    };
    let diff = similar::TextDiff::from_lines(before, after);
    writeln!(out, "{BOLD}{verb}{BOLD:#} {}", path.display())?;
    // What is all new is shown only where it is short.
    if !before.is_empty() || after.lines().count() <= 90 || dry_run {
        for change in diff.iter_all_changes().filter(|change| change.tag() != similar::ChangeTag::Equal) {
            match change.tag() {
                similar::ChangeTag::Delete => write!(out, "  {RED}-{}{RED:#}", change.value())?,
                _ => write!(out, "  {GREEN}+{}{GREEN:#}", change.value())?,
            }
            if !change.value().ends_with('\n') {
                writeln!(out)?;
            }
        }
    } else {
        writeln!(out, "  {DIM}({} lines, commented){DIM:#}", after.lines().count())?;
    }
    Ok(())
}

/// Removes a file.
fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path).map_err(|error| named(path, &error))?;
    // The directory too, if it was there for this alone; and the one around it, where hooks have one of their own.
    if let Some(directory) = path.parent()
        && fs::remove_dir(directory).is_ok()
        && directory.ends_with("hooks")
        && let Some(around) = directory.parent()
    {
        let _ = fs::remove_dir(around);
    }
    Ok(())
}

/// Writes a file: whole, or not at all.
pub(crate) fn put(path: &Path, text: &str) -> io::Result<()> {
    // A link stays a link: what it leads to is changed.
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let write = || -> io::Result<()> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let beside = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Under a name that nobody can have put there before: a link in its place would lead to another file.
        let mut draft = tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o666)).tempfile_in(beside)?;
        if let Ok(old) = fs::metadata(&target) {
            draft.as_file().set_permissions(old.permissions())?;
        }
        draft.write_all(text.as_bytes())?;
        draft.as_file().sync_all()?;
        draft.persist(&target).map(drop).map_err(|error| error.error)
    };
    write().map_err(|error| named(path, &error))
}

/// What went wrong, and with which file.
fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// What a client's configuration begins with.
const fn template_of(client: Client) -> &'static str {
    match client {
        Client::ClaudeDesktop => include_str!("init/server.toml"),
        Client::ClaudeCode => include_str!("init/claude-code.toml"),
        Client::Codex => include_str!("init/codex.toml"),
        Client::Cursor => include_str!("init/cursor.toml"),
        Client::Vscode => include_str!("init/vscode.toml"),
    }
}

/// The configuration to begin with: of a project, or the user's `own`.
fn template(client: Option<Client>, is_own: bool, store: Option<&Path>, import: Option<&Path>) -> String {
    let text = match client {
        Some(client) => template_of(client),
        None if import.is_some() => template_of(Client::ClaudeDesktop),
        None => include_str!("init/bare.toml"),
    };
    // One's own file needs nobody's word.
    let whom = match is_own {
        false => "the agent that works here. Every change must be accepted with `toolgate trust`.",
        true => "your agents, wherever they work. Every change is in force at once.",
    };
    let text = text.replace("#WHOM#", whom);
    let line =
        import.map_or_else(|| "# mcp_servers = [\".mcp.json\"]".to_owned(), |path| format!("mcp_servers = [{}]", serde_json::json!(path)));
    // One that is for hooks has no place for servers unless there are some; they stand beside its name.
    let text = match (text.contains("#IMPORT#"), import) {
        (false, Some(_)) => text.replacen("\n# store", &format!("\n{line}  # for `toolgate serve`\n# store"), 1),
        _ => text.replace("#IMPORT#", &line),
    };
    let Some(store) = store else { return text };
    // The line that names a ledger, or stands where one would be named.
    let line = |line: &str| match line.trim_start_matches("# ").starts_with("store = ") {
        true => format!("store = {}\n", serde_json::json!(store)),
        false => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}
