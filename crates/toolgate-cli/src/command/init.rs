//! Implements `toolgate init`, `toolgate eject` and `toolgate trust`.

mod file_change;
mod managed_block;
mod template;

pub(super) use crate::command::init::file_change::{read_or_empty, write_atomically};
pub(super) use crate::command::init::managed_block::template_tools;

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use toolgate_config::Config;
use toolgate_store::SqliteStore;

use crate::client_mcp_servers;
use crate::command::common::{BOLD, DIM, GREEN, IgnoreWriteErrors, RED, format_count};
use crate::command::init::file_change::apply_change;
use crate::command::init::managed_block::MissingTools;
use crate::command::init::template::render_template;
use toolgate_hook::client_hooks::SupportedClient;
use toolgate_hook::effective_config;
use toolgate_hook::effective_config::{CONFIG_FILE_NAME, EffectiveConfig, UserStateDir};

/// Create a configuration, and register toolgate with a client.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate init                         create only a configuration\n  toolgate init --for claude-code       add hooks to .claude/settings.json\n  toolgate init --for codex --dry-run   show what would change\n  toolgate init --for claude-desktop    run its MCP servers behind toolgate\n  toolgate init --import .mcp.json      use these MCP servers with `serve`"
)]
pub(crate) struct InitArgs {
    /// Client to register with.
    #[arg(long = "for", value_enum, value_name = "CLIENT")]
    client: Option<SupportedClient>,
    /// Use the settings of the user, for all projects.
    #[arg(long, requires = "client")]
    user: bool,
    /// File with `mcpServers` to include in the configuration.
    #[arg(long, value_name = "FILE")]
    import: Option<PathBuf>,
    /// Show what would change, without changing anything.
    #[arg(long)]
    dry_run: bool,
}

/// Remove toolgate from the settings of clients.
#[derive(clap::Args)]
#[command(
    after_help = "Keeps the configuration and the ledger. Removes what `init` added to an existing file.\n\nExamples:\n  toolgate eject                            remove from all clients here\n  toolgate eject --for claude-code --user   remove from the user's own settings\n  toolgate eject --dry-run                  show what would change"
)]
pub(crate) struct EjectArgs {
    /// Client to remove from [default: all].
    #[arg(long = "for", value_enum, value_name = "CLIENT")]
    client: Option<SupportedClient>,
    /// Use the settings of the user.
    #[arg(long)]
    user: bool,
    /// Show what would change, without changing anything.
    #[arg(long)]
    dry_run: bool,
}

/// Trust the current configuration of a project, so that it is in force.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate trust                trust the project's toolgate.toml and its files\n  toolgate trust --revoke       stop trusting it\n  toolgate trust --new-ledger   start a new ledger after moving the old one away"
)]
pub(crate) struct TrustArgs {
    /// Configuration [default: the one of the current project].
    config: Option<PathBuf>,
    /// Stop trusting the configuration.
    #[arg(long)]
    revoke: bool,
    /// Start a new ledger, and forget the one that was used before.
    #[arg(long, conflicts_with = "revoke")]
    new_ledger: bool,
}

pub(crate) fn init(args: &InitArgs, store: Option<&Path>) -> io::Result<ExitCode> {
    let project = std::env::current_dir()?;
    let mut out = IgnoreWriteErrors(anstream::stdout().lock());
    let config = if args.user {
        effective_config::user_config_path().ok_or_else(|| io::Error::other("no home directory"))?
    } else {
        project.join(CONFIG_FILE_NAME)
    };
    // The client's settings are read first, so that nothing is written if they are invalid.
    let settings = match args.client {
        Some(client) => {
            let path = client.settings_file((!args.user).then_some(&*project))?;
            let program = std::env::current_exe()?.display().to_string();
            let before = read_or_empty(&path)?;
            let with_path_name =
                |why: String| io::Error::other(format!("{}: {why}", path.display()));
            let after = match client {
                SupportedClient::ClaudeDesktop => client_mcp_servers::add_toolgate_server(
                    &before,
                    &program,
                    &config.display().to_string(),
                )
                .map_err(with_path_name)?,
                _ => client
                    .with_hooks(
                        &before,
                        &toolgate_hook::client_hooks::find_hook_program()?.display().to_string(),
                    )
                    .map_err(with_path_name)?,
            };
            Some((path, before, after))
        }
        None => None,
    };
    let is_new = !config.exists();
    // The MCP servers of the client run behind toolgate from now on.
    let upstream_settings = settings.as_ref().filter(|(_, _, after)| {
        args.client == Some(SupportedClient::ClaudeDesktop)
            && after.contains(client_mcp_servers::UPSTREAM_SERVERS_KEY)
    });
    let import = match (&args.import, upstream_settings) {
        (Some(file), _) => {
            let with_path_name =
                |why: String| io::Error::other(format!("{}: {why}", file.display()));
            let text =
                fs::read_to_string(file).map_err(|error| with_path_name(error.to_string()))?;
            toolgate_config::parse_mcp_servers(&text).map_err(with_path_name)?;
            // A relative path keeps working if the directory moves.
            let relative = config.parent().and_then(|directory| {
                std::path::absolute(file).ok()?.strip_prefix(directory).ok().map(Path::to_owned)
            });
            Some(relative.map_or_else(|| std::path::absolute(file), Ok)?)
        }
        (None, Some((path, ..))) => Some(path.clone()),
        (None, None) => None,
    };
    // A file that this command creates is trusted. An existing one must be reviewed first.
    let is_trusted = if is_new {
        let text = render_template(args.client, args.user, store, import.as_deref());
        apply_change(&mut out, &config, "", &text, args.dry_run)?;
        // Only the nearest configuration is in force.
        if let Some(parent_config) =
            project.parent().and_then(effective_config::find_project_config).filter(|_| !args.user)
        {
            writeln!(
                out,
                "this file replaces {} in this directory; to use that one, remove this file and run `toolgate init` there",
                parent_config.display()
            )?;
        }
        true
    } else {
        extend_config(&mut out, args, &config)?
    };
    let missing_import =
        import.as_ref().map(|import| format!("mcp_servers = [{}]", serde_json::json!(import)));
    let missing_import = if is_new { None } else { missing_import };
    let missing_import =
        missing_import.filter(|line| read_or_empty(&config).is_ok_and(|text| !text.contains(line)));
    print_missing_import(&mut out, &config, missing_import.as_deref())?;
    if let Some((path, before, after)) = &settings {
        apply_change(&mut out, path, before, after, args.dry_run)?;
        if let Some((client, why)) =
            args.client.and_then(|client| Some((client.name(), client.ignored_file_reason(after)?)))
        {
            writeln!(out, "{RED}{client} ignores this file{RED:#} and all hooks in it: {why}")?;
        }
    }
    if args.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    let state = UserStateDir::open()?;
    if !args.user {
        if is_trusted {
            state.trust(&config)?;
        } else if !state.is_trusted(&config)? {
            writeln!(
                out,
                "not in force yet: read the file, then run {BOLD}toolgate trust{BOLD:#}"
            )?;
        }
    }
    let found = EffectiveConfig::find(Some(&config), &project, &state)?;
    if let Some(parent) = found.store.parent() {
        fs::create_dir_all(parent)?;
    }
    toolgate_hook::open_store(&found.store, &state)?;
    writeln!(out, "ledger: {}", found.store.display())?;
    match args.client {
        Some(SupportedClient::ClaudeDesktop) => writeln!(
            out,
            "restart Claude Desktop; the rules for its agent are in {}",
            config.display()
        )?,
        Some(SupportedClient::Codex) => writeln!(
            out,
            "Codex runs only reviewed hooks: start it and enter {BOLD}/hooks{BOLD:#}"
        )?,
        Some(_) => {
            if let Some((path, ..)) = settings.as_ref().filter(|_| !args.user) {
                let path = path.file_name().unwrap_or_default().to_string_lossy();
                writeln!(
                    out,
                    "{DIM}{path} has the path of toolgate on this machine; other users of the file need it at the same path{DIM:#}"
                )?;
            }
            writeln!(out, "check the setup with {BOLD}toolgate doctor{BOLD:#}")?;
        }
        None if args.import.is_some() => writeln!(
            out,
            "list the tools with {BOLD}toolgate upstream list{BOLD:#}, and start the gateway with {BOLD}toolgate serve{BOLD:#}"
        )?,
        None => {
            writeln!(out, "register a client with {BOLD}toolgate init --for claude-code{BOLD:#}")?
        }
    }
    // Without this line the client has no tools, so the line is repeated at the end of the output.
    print_missing_import(&mut out, &config, missing_import.as_deref())?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the line that the configuration needs to include the servers.
fn print_missing_import(out: &mut impl Write, config: &Path, line: Option<&str>) -> io::Result<()> {
    match line {
        Some(line) => writeln!(
            out,
            "add this line at the top of {} to include the servers: {BOLD}{line}{BOLD:#}",
            config.display()
        ),
        None => Ok(()),
    }
}

/// Adds the tools of a client to an existing configuration, and returns whether it is trusted.
fn extend_config(out: &mut impl Write, args: &InitArgs, config: &Path) -> io::Result<bool> {
    let text = read_or_empty(config)?;
    let hook_client = args.client.filter(|client| SupportedClient::ALL_WITH_HOOKS.contains(client));
    let missing = hook_client.map_or(MissingTools::NothingMissing, |client| {
        MissingTools::determine(client, config, &text, load_user_config(args.user).as_ref())
    });
    let name = hook_client.map(SupportedClient::name).unwrap_or_default();
    if let MissingTools::Extended(after) = &missing {
        // If the file was trusted, the added part is trusted too.
        let is_trusted = !args.user && !args.dry_run && UserStateDir::open()?.is_trusted(config)?;
        apply_change(out, config, &text, after, args.dry_run)?;
        return Ok(is_trusted);
    }
    writeln!(out, "{DIM}{} exists and is unchanged{DIM:#}", config.display())?;
    match &missing {
        MissingTools::NothingMissing | MissingTools::Extended(_) => {}
        MissingTools::ManualShellTool(text) => {
            writeln!(
                out,
                "it does not declare the shell tool of {name}, and cannot be extended automatically"
            )?;
            writeln!(out, "add this for the agent of {name}:\n\n{text}")?;
        }
        MissingTools::ManualOtherTools(text) => {
            writeln!(
                out,
                "it does not declare some tools of {name}; to declare them, add this at the end:\n\n{text}"
            )?;
        }
    }
    Ok(false)
}

/// Returns the user's own configuration if it applies together with that of a project.
fn load_user_config(is_user_config: bool) -> Option<Config> {
    let path =
        effective_config::user_config_path().filter(|path| !is_user_config && path.is_file())?;
    Config::load(path).ok()
}

pub(crate) fn eject(args: &EjectArgs) -> io::Result<ExitCode> {
    let project = std::env::current_dir()?;
    let mut out = IgnoreWriteErrors(anstream::stdout().lock());
    let clients: Vec<SupportedClient> = args.client.map_or_else(
        || {
            SupportedClient::ALL_WITH_HOOKS
                .into_iter()
                .chain([SupportedClient::ClaudeDesktop])
                .collect()
        },
        |client| vec![client],
    );
    let mut found = false;
    for client in clients.iter().copied() {
        let path = client.settings_file((!args.user).then_some(&*project))?;
        let before = read_or_empty(&path)?;
        let add_path = |why: String| io::Error::other(format!("{}: {why}", path.display()));
        let is_server = client == SupportedClient::ClaudeDesktop;
        let registered = match is_server {
            _ if before.is_empty() => false,
            true => client_mcp_servers::find_toolgate_server(&before).map_err(add_path)?.is_some(),
            false => !SupportedClient::find_hook_entries(&before).map_err(add_path)?.is_empty(),
        };
        if !registered {
            continue;
        }
        found = true;
        let after = if is_server {
            client_mcp_servers::remove_toolgate_server(&before)
        } else {
            SupportedClient::without_hooks(&before)
        }
        .map_err(add_path)?;
        // A symbolic link is not removed, because that would leave the hooks in its target.
        let after =
            if toolgate_hook::client_hooks::is_settings_file_empty(&after) && !path.is_symlink() {
                String::new()
            } else {
                after
            };
        apply_change(&mut out, &path, &before, &after, args.dry_run)?;
    }
    found |= remove_managed_blocks(&mut out, args, &project, &clients)?;
    if !found {
        let parent = find_parent_with_hooks(&project).filter(|_| !args.user);
        let hint = parent
            .map(|parent| {
                format!("; it is in the settings of {}: run this command there", parent.display())
            })
            .unwrap_or_default();
        writeln!(out, "no settings with toolgate found{hint}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes what was added to a configuration for clients, and returns whether there was anything.
fn remove_managed_blocks(
    out: &mut impl Write,
    args: &EjectArgs,
    project: &Path,
    clients: &[SupportedClient],
) -> io::Result<bool> {
    let config = if args.user {
        effective_config::user_config_path()
    } else {
        Some(project.join(CONFIG_FILE_NAME))
    };
    let Some(config) = config else { return Ok(false) };
    let mut others = Vec::new();
    for other in
        SupportedClient::ALL_WITH_HOOKS.into_iter().filter(|other| !clients.contains(other))
    {
        let settings = read_or_empty(&other.settings_file((!args.user).then_some(project))?)?;
        if SupportedClient::find_hook_entries(&settings).is_ok_and(|entries| !entries.is_empty()) {
            others.push(other);
        }
    }
    let (user_config, before) = (load_user_config(args.user), read_or_empty(&config)?);
    let (mut after, mut found) = (before.clone(), false);
    for client in clients {
        match crate::command::init::managed_block::remove_managed_block(
            *client,
            &config,
            &after,
            user_config.as_ref(),
            &others,
        ) {
            Ok(None) => continue,
            Ok(Some(remaining)) => after = remaining,
            Err(why) => writeln!(
                out,
                "cannot remove from {} what was added for {}: {why}",
                config.display(),
                client.name()
            )?,
        }
        found = true;
    }
    if after != before {
        // If the file was trusted, the rest is trusted too.
        let was_trusted =
            !args.user && !args.dry_run && UserStateDir::open()?.is_trusted(&config)?;
        apply_change(out, &config, &before, &after, args.dry_run)?;
        if was_trusted {
            UserStateDir::open()?.trust(&config)?;
        }
    }
    Ok(found)
}

pub(crate) fn trust(args: &TrustArgs) -> io::Result<ExitCode> {
    let state = UserStateDir::open()?;
    let mut out = anstream::stdout().lock();
    let directory = std::env::current_dir()?;
    let config = match &args.config {
        Some(path) => path.clone(),
        None => effective_config::find_project_config(&directory)
            .or_else(|| {
                effective_config::user_config_path().filter(|path| args.new_ledger && path.exists())
            })
            .ok_or_else(effective_config::missing_config_error)?,
    };
    if args.revoke {
        let was_trusted = state.distrust(&config)?;
        writeln!(
            out,
            "{} {}",
            config.display(),
            if was_trusted { "is no longer trusted" } else { "was not trusted" }
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.new_ledger {
        let store = match &args.config {
            Some(path) => EffectiveConfig::find(Some(path), &directory, &state)?.store,
            None => match effective_config::requested_store() {
                Some(requested) => std::path::absolute(requested)?,
                None => {
                    effective_config::find_store_for_reading(&effective_config::project_dir()?)?
                        .unwrap_or_else(|| state.ledger_path())
                }
            },
        };
        create_ledger(&store, &state)?;
        writeln!(out, "created a new ledger at {}", store.display())?;
        return Ok(ExitCode::SUCCESS);
    }
    let found = EffectiveConfig::find(Some(&config), &directory, &state)?;
    let (files, names) = (
        found.config.included_files().len(),
        effective_config::format_included_files(found.config.included_files(), &config),
    );
    let agents = effective_config::with_pinned_tools(found.config, &config)?
        .build_agents(None)
        .map_err(|error| {
            let problems = error.render(io::stderr().is_terminal());
            io::Error::other(format!("invalid configuration, so it is not trusted\n\n{problems}"))
        })?;
    state.trust(&config)?;
    writeln!(out, "{GREEN}trusted{GREEN:#} {}", config.display())?;
    for agent in &agents {
        let (tools, rules) = (agent.tools().count() as u64, agent.enforced_rules().count() as u64);
        writeln!(
            out,
            "  {} has {} and {}",
            agent.name(),
            format_count(tools, "tool"),
            format_count(rules, "rule")
        )?;
    }
    if files > 0 {
        writeln!(out, "  with {}: {names}", format_count(files as u64, "included file"))?;
    }
    writeln!(out, "{DIM}after any change, run `toolgate trust` again{DIM:#}")?;
    Ok(ExitCode::SUCCESS)
}

/// Creates a ledger if no part of another one exists, and cleans up if that fails.
fn create_ledger(store: &Path, state: &UserStateDir) -> io::Result<()> {
    let state_dir = toolgate_store::state_dir_for(store);
    if let Some(existing) = [store, state_dir.as_path()].into_iter().find(|path| path.exists()) {
        return Err(io::Error::other(format!("{} exists; move it away first", existing.display())));
    }
    let created = SqliteStore::open(store)
        .map_err(io::Error::other)
        .and_then(|opened| state.record_ledger_id(store, opened.id()));
    if created.is_err() {
        let _ = (fs::remove_file(store), fs::remove_dir_all(state_dir));
    }
    created
}

/// Returns the parent directory whose configuration is in force here and whose clients have hooks.
pub(super) fn find_parent_with_hooks(directory: &Path) -> Option<PathBuf> {
    let parent = effective_config::find_project_config(directory)?.parent()?.to_owned();
    let is_hooked = |client: SupportedClient| {
        let text = client
            .settings_file(Some(&parent))
            .and_then(|path| read_or_empty(&path))
            .unwrap_or_default();
        SupportedClient::find_hook_entries(&text).is_ok_and(|entries| !entries.is_empty())
    };
    (parent != directory && SupportedClient::ALL_WITH_HOOKS.into_iter().any(is_hooked))
        .then_some(parent)
}
