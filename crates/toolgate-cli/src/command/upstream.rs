//! Implements `toolgate upstream`: lists the tools of MCP servers, shows changes and accepts them.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};
use toolgate_config::{Config, UndeclaredToolPolicy, UpstreamConfig};
use toolgate_mcp::{
    Pins, QuarantineReason, QuarantinedTool, UpstreamOptions, UpstreamStatus, Upstreams,
};

use super::serve::{ServedConfigSource, config_pins_dir};
use crate::command::common::{BOLD, DIM, GREEN, RED, TextTable, YELLOW, format_count, sanitize};
use toolgate_hook::effective_config;
use toolgate_hook::effective_config::UserStateDir;
use toolgate_hook::stderr::print_stderr;

/// List the MCP servers behind the gateway, and review changes of their tools.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate upstream list                 list the tools of all upstreams\n  toolgate upstream diff                 show quarantined tools\n  toolgate upstream accept git commit    accept a tool as shown"
)]
pub(crate) struct Args {
    /// Configuration file [default: what is in force here].
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG", global = true)]
    config: Option<PathBuf>,
    /// Print one JSON document.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: UpstreamCommand,
}

#[derive(clap::Subcommand)]
enum UpstreamCommand {
    /// Start all upstreams, list their tools, and stop them.
    #[command(after_help = "Examples:\n  toolgate upstream list\n  toolgate upstream list --json")]
    List,
    /// Show quarantined tools, as of when the upstreams were last asked.
    ///
    /// A tool is quarantined if it has changed or looks suspicious. Exit code 1 if there are any.
    #[command(after_help = "Examples:\n  toolgate upstream diff\n  toolgate upstream diff git")]
    Diff {
        /// Show only this upstream.
        upstream: Option<String>,
    },
    /// Accept tools as `diff` last showed them.
    #[command(
        after_help = "Examples:\n  toolgate upstream accept git           all its quarantined tools\n  toolgate upstream accept git commit    one tool"
    )]
    Accept {
        /// Name of the upstream.
        upstream: String,
        /// Tool name as `diff` shows it [default: all quarantined tools].
        tool: Option<String>,
    },
}

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    let source = ServedConfigSource::new(args.config.clone(), None)?;
    let found = source.find()?;
    let pins = config_pins_dir(&UserStateDir::open()?, &found);
    let config = found.config;
    match &args.verb {
        UpstreamCommand::List => list_upstreams(config, &pins, args.json),
        UpstreamCommand::Diff { upstream } => {
            print_quarantined(&config, &pins, upstream.as_deref(), args.json)
        }
        UpstreamCommand::Accept { upstream, tool } => {
            accept_tools(&config, &pins, upstream, tool.as_deref(), args.json)
        }
    }
}

fn list_upstreams(config: Config, pins: &Path, as_json: bool) -> io::Result<ExitCode> {
    let options = UpstreamOptions {
        pin_dir: Some(pins.to_owned()),
        launcher: Some(std::env::current_exe()?),
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (health, exposed) = runtime.block_on(async {
        let upstreams = Upstreams::start(&config, &options, Duration::from_secs(20)).await?;
        let undeclared: Vec<(String, UndeclaredToolPolicy)> = config
            .upstreams
            .iter()
            .map(|upstream| (upstream.name.clone(), upstream.undeclared))
            .collect();
        let offers: Vec<(String, Vec<String>)> = config
            .upstreams
            .iter()
            .map(|upstream| {
                (
                    upstream.name.clone(),
                    toolgate_config::Backend::accepted_tools(&upstreams, &upstream.name)
                        .unwrap_or_default()
                        .into_iter()
                        .map(|tool| tool.name)
                        .collect(),
                )
            })
            .collect();
        let connected = config.with_backend(&upstreams);
        let exposed = connected.exposed_tools().to_vec();
        // `check` and `lint` report problems of the configuration itself.
        let unusable =
            connected.build_with_upstreams(None).map(|(_, unusable)| unusable).unwrap_or_default();
        let health = upstreams.health_with_unusable(&unusable);
        upstreams.stop_all().await;
        Ok::<_, io::Error>((health, (undeclared, offers, exposed)))
    })?;
    let (undeclared, offers, exposed) = exposed;
    let hides_undeclared = |upstream: &str| {
        undeclared
            .iter()
            .any(|(name, policy)| name == upstream && *policy == UndeclaredToolPolicy::Deny)
    };
    let mut out = anstream::stdout().lock();
    if as_json {
        let tools = |name: &str| {
            offers
                .iter()
                .find(|(owner, _)| owner == name)
                .map(|(_, tools)| tools.clone())
                .unwrap_or_default()
        };
        let all: Vec<Value> = health
            .iter()
            .map(|upstream| {
                let mut object = json!(upstream);
                let offered: Vec<Value> = tools(&upstream.name)
                    .into_iter()
                    .map(|tool| json!({"tool": tool, "as": exposed.iter().filter(|e| e.upstream == upstream.name && e.tool == tool).map(|e| json!({"agent": e.agent, "name": e.name, "effect": e.effect, "declared": e.is_declared})).collect::<Vec<_>>()}))
                    .collect();
                if let Some(fields) = object.as_object_mut() {
                    fields.insert("offers".to_owned(), json!(offered));
                }
                object
            })
            .collect();
        writeln!(out, "{}", json!(all))?;
    } else {
        for upstream in &health {
            match &upstream.status {
                UpstreamStatus::Up { .. } => {
                    writeln!(out, "{GREEN}✓{GREEN:#} {BOLD}{}{BOLD:#}", upstream.name)?
                }
                UpstreamStatus::Starting => writeln!(
                    out,
                    "{YELLOW}…{YELLOW:#} {BOLD}{}{BOLD:#} has not answered yet",
                    upstream.name
                )?,
                UpstreamStatus::Down { why, .. } => writeln!(
                    out,
                    "{RED}✗{RED:#} {BOLD}{}{BOLD:#} {}",
                    upstream.name,
                    sanitize(why)
                )?,
            }
            let undeclared = match undeclared
                .iter()
                .find(|(name, _)| *name == upstream.name)
                .map(|(_, policy)| policy)
            {
                Some(UndeclaredToolPolicy::Ask) => "undeclared: ask",
                Some(UndeclaredToolPolicy::Open) => "undeclared: allow",
                _ => "undeclared: treated as a read",
            };
            let mut table =
                TextTable::new(&["  tool", "offered as", "agent", "effect"]).with_cut_column(1, 12);
            for tool in offers
                .iter()
                .filter(|(owner, _)| *owner == upstream.name)
                .flat_map(|(_, tools)| tools)
            {
                let found: Vec<_> = exposed
                    .iter()
                    .filter(|e| e.upstream == upstream.name && e.tool == *tool)
                    .collect();
                if found.is_empty() {
                    table.push_plain([
                        format!("  {}", sanitize(tool)),
                        "not offered: no table declares it".to_owned(),
                        String::new(),
                        String::new(),
                    ]);
                }
                for exposed in found {
                    let effect = if exposed.is_declared {
                        format!("{:?}", exposed.effect).to_lowercase()
                    } else {
                        undeclared.to_owned()
                    };
                    table.push_plain([
                        format!("  {}", sanitize(tool)),
                        exposed.name.clone(),
                        exposed.agent.clone(),
                        effect,
                    ]);
                }
            }
            if offers.iter().any(|(owner, tools)| *owner == upstream.name && !tools.is_empty()) {
                table.print(&mut out)?;
            } else {
                writeln!(out, "  {DIM}no tools known{DIM:#}")?;
            }
            for change in &upstream.held {
                writeln!(
                    out,
                    "  {RED}quarantined{RED:#} {}: {}",
                    sanitize(&change.tool),
                    describe_suspicions(change)
                )?;
            }
            if hides_undeclared(&upstream.name) {
                let hidden = offers
                    .iter()
                    .filter(|(owner, _)| *owner == upstream.name)
                    .flat_map(|(_, tools)| tools);
                let hidden = hidden
                    .filter(|tool| {
                        !exposed.iter().any(|e| e.upstream == upstream.name && e.tool == **tool)
                    })
                    .count();
                if hidden > 0 {
                    writeln!(
                        out,
                        "  {DIM}declare one with `[tools.{}_…]`, `kind = \"mcp\"`, `upstream = \"{}\"`{DIM:#}",
                        upstream.name, upstream.name
                    )?;
                }
            }
            writeln!(out)?;
        }
        if health.is_empty() {
            writeln!(out, "the configuration has no upstreams; add one with `[upstreams.NAME]`")?;
        }
    }
    let all_up = health.iter().all(|upstream| matches!(upstream.status, UpstreamStatus::Up { .. }));
    Ok(if all_up { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn describe_suspicions(change: &QuarantinedTool) -> String {
    if change.why.is_empty() {
        return "the definition changed since it was accepted".to_owned();
    }
    let describe = |suspicion: &QuarantineReason| match suspicion {
        QuarantineReason::Invisible { part } => format!("invisible characters in its {part}"),
        QuarantineReason::Instruction { part, words } => {
            format!("instructions to the model in its {part}: “{}”", sanitize(words))
        }
        QuarantineReason::Shadow { tool } => {
            format!("it mentions `{}`, a tool of another upstream", sanitize(tool))
        }
        QuarantineReason::Unwritten { why } => {
            format!("it is new, and its definition cannot be stored: {}", sanitize(why))
        }
        QuarantineReason::Unfit { why } => {
            format!("it does not fit the configuration: {}", sanitize(why))
        }
    };
    change.why.iter().map(describe).collect::<Vec<_>>().join("; ")
}

fn find_upstreams<'c>(
    config: &'c Config,
    name: Option<&str>,
) -> io::Result<Vec<&'c UpstreamConfig>> {
    let found: Vec<&UpstreamConfig> = config
        .upstreams
        .iter()
        .filter(|upstream| name.is_none_or(|name| name == upstream.name))
        .collect();
    match name {
        Some(name) if found.is_empty() => {
            let names: Vec<&str> =
                config.upstreams.iter().map(|upstream| upstream.name.as_str()).collect();
            Err(io::Error::other(format!(
                "unknown upstream `{name}`; {}",
                effective_config::list_known_names(&names)
            )))
        }
        _ => Ok(found),
    }
}

fn print_quarantined(
    config: &Config,
    pins: &Path,
    name: Option<&str>,
    as_json: bool,
) -> io::Result<ExitCode> {
    let is_selected = |upstream: &UpstreamConfig| name.is_none_or(|name| name == upstream.name);
    find_upstreams(config, name)?;
    let mut all: Vec<(&UpstreamConfig, Pins)> = Vec::new();
    for upstream in &config.upstreams {
        match Pins::open(Some(pins), upstream) {
            Ok(pins) => all.push((upstream, pins)),
            Err(error) if is_selected(upstream) => return Err(error),
            // Only the tool names of other upstreams are needed.
            Err(error) => print_stderr(&format!(
                "warning: cannot check whether a tool mentions one of `{}`: {error}",
                upstream.name
            )),
        }
    }
    // A changed definition may mention tools of other upstreams. The user must see this before
    // accepting the tool.
    toolgate_mcp::quarantine_shadowing_tools(config, &all, name);
    let mut changes = Vec::new();
    for (_, pins) in all.iter().filter(|(upstream, _)| is_selected(upstream)) {
        changes.extend(pins.show_quarantined()?);
    }
    let mut out = anstream::stdout().lock();
    if as_json {
        writeln!(out, "{}", json!(changes))?;
    } else if changes.is_empty() {
        writeln!(
            out,
            "no tool is quarantined as of the last check; check again with `toolgate upstream list`"
        )?;
    } else {
        for change in &changes {
            writeln!(
                out,
                "{BOLD}{} {}{BOLD:#}: {}",
                change.upstream,
                sanitize(&change.tool),
                describe_suspicions(change)
            )?;
            let text = |value: &Value| serde_json::to_string_pretty(value).unwrap_or_default();
            let before = change.before.as_ref().map(text).unwrap_or_default();
            let now = text(&change.now);
            for line in similar::TextDiff::from_lines(&before, &now)
                .iter_all_changes()
                .filter(|line| line.tag() != similar::ChangeTag::Equal)
            {
                let content = sanitize(line.value().trim_end_matches('\n'));
                match line.tag() {
                    similar::ChangeTag::Delete => writeln!(out, "  {RED}-{content}{RED:#}")?,
                    _ => writeln!(out, "  {GREEN}+{content}{GREEN:#}")?,
                }
            }
        }
        writeln!(out, "\naccept a tool with {BOLD}toolgate upstream accept UPSTREAM TOOL{BOLD:#}")?;
    }
    Ok(if changes.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn accept_tools(
    config: &Config,
    pins: &Path,
    upstream: &str,
    tool: Option<&str>,
    as_json: bool,
) -> io::Result<ExitCode> {
    let (mut accepted_tools, mut quarantined, mut not_shown, mut names) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for upstream in find_upstreams(config, Some(upstream))? {
        let pins = Pins::open(Some(pins), upstream)?;
        quarantined.extend(pins.quarantined().into_iter().map(|change| change.tool));
        names.extend(pins.tool_names());
        let accepted = pins.accept(tool)?;
        accepted_tools.extend(accepted.tools);
        not_shown.extend(accepted.not_shown);
    }
    // The upstream may have changed a tool after `diff` showed it.
    if !not_shown.is_empty() {
        return Err(io::Error::other(format!(
            "{}: the current definition was not shown yet{}; run `toolgate upstream diff`, then accept it",
            sanitize(&not_shown.join(", ")),
            if accepted_tools.is_empty() {
                String::new()
            } else {
                format!(" (accepted: {})", sanitize(&accepted_tools.join(", ")))
            }
        )));
    }
    // The user may have passed the exposed name instead of the upstream's name.
    if let Some(tool) = tool
        && accepted_tools.is_empty()
        && !quarantined.is_empty()
    {
        return Err(io::Error::other(format!(
            "`{}` is not quarantined; of `{upstream}`, these are: {}",
            sanitize(tool),
            sanitize(&quarantined.join(", "))
        )));
    }
    if let Some(tool) = tool.filter(|tool| names.iter().all(|name| name != tool)) {
        let hint =
            match toolgate_text::suggest::find_closest(tool, names.iter().map(String::as_str)) {
                Some(closest) => format!("did you mean `{}`?", sanitize(closest)),
                None => "list its tools with `toolgate upstream list`".to_owned(),
            };
        return Err(io::Error::other(format!(
            "`{upstream}` has no tool `{}`; {hint}",
            sanitize(tool)
        )));
    }
    let mut out = anstream::stdout().lock();
    match (as_json, accepted_tools.is_empty()) {
        (true, _) => {
            writeln!(out, "{}", json!({"upstream": upstream, "accepted": accepted_tools}))?
        }
        (false, true) => writeln!(out, "no matching tool is quarantined")?,
        (false, false) => writeln!(
            out,
            "{GREEN}accepted{GREEN:#} {}: {}",
            format_count(accepted_tools.len() as u64, "tool"),
            sanitize(&accepted_tools.join(", "))
        )?,
    }
    Ok(ExitCode::SUCCESS)
}
