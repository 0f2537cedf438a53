//! `toolgate upstream`: what MCP servers offer, and whether it is still what somebody looked at.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};
use toolgate::config::{Config, Undeclared, Upstream};
use toolgate_mcp::{Change, Pins, Starting, Status, Suspicion, Upstreams};

use super::ledger::{BOLD, DIM, GREEN, RED, Table, YELLOW, clean, counted};
use super::serve::{Served, pins};
use crate::place::{self, State};
use crate::say::say;

/// Look at the MCP servers behind the gateway: whether they answer, what they offer, and what has changed since somebody
/// looked at it.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate upstream list                 ask all of them what they offer\n  toolgate upstream diff                 what is held back, and why\n  toolgate upstream accept git commit    it is fine as it was shown"
)]
pub(crate) struct Args {
    /// The configuration. Without it: what is in force here.
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG", global = true)]
    config: Option<PathBuf>,
    /// One JSON document.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// Start them, ask what they offer, and end them.
    #[command(after_help = "Examples:\n  toolgate upstream list\n  toolgate upstream list --json")]
    List,
    /// Show tools that are held back, as of when the upstreams were last asked: they have changed, or there is something odd about
    /// them. Exit code 1 if there are any.
    #[command(after_help = "Examples:\n  toolgate upstream diff\n  toolgate upstream diff git")]
    Diff {
        /// Only of this one.
        upstream: Option<String>,
    },
    /// Accept tools as `diff` last showed them.
    #[command(
        after_help = "Examples:\n  toolgate upstream accept git           all that is held back of it\n  toolgate upstream accept git commit    one tool"
    )]
    Accept {
        /// Of which upstream.
        upstream: String,
        /// Which tool, by the name that `diff` shows; all that are held back unless said.
        tool: Option<String>,
    },
}

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    let served = Served::new(args.config.clone(), None)?;
    let found = served.find()?;
    let pins = pins(&State::open()?, &found);
    let config = found.config;
    match &args.verb {
        Verb::List => list(config, &pins, args.json),
        Verb::Diff { upstream } => diff(&config, &pins, upstream.as_deref(), args.json),
        Verb::Accept { upstream, tool } => accept(&config, &pins, upstream, tool.as_deref(), args.json),
    }
}

fn list(config: Config, pins: &Path, as_json: bool) -> io::Result<ExitCode> {
    let starting = Starting { pins: Some(pins.to_owned()), launcher: Some(std::env::current_exe()?) };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (health, exposed) = runtime.block_on(async {
        let upstreams = Upstreams::start(&config, &starting, Duration::from_secs(20)).await?;
        let undeclared: Vec<(String, Undeclared)> = config.upstreams.iter().map(|one| (one.name.clone(), one.undeclared)).collect();
        let offers: Vec<(String, Vec<String>)> = config
            .upstreams
            .iter()
            .map(|one| {
                (
                    one.name.clone(),
                    toolgate::config::Backend::tools(&upstreams, &one.name).unwrap_or_default().into_iter().map(|tool| tool.name).collect(),
                )
            })
            .collect();
        let connected = config.behind(&upstreams);
        let exposed = connected.exposed().to_vec();
        // What is wrong with the file itself is told by others.
        let unfit = connected.fitted(None).map(|(_, unfit)| unfit).unwrap_or_default();
        let health = upstreams.health_with(&unfit);
        upstreams.end().await;
        Ok::<_, io::Error>((health, (undeclared, offers, exposed)))
    })?;
    let (undeclared, offers, exposed) = exposed;
    let hides = |upstream: &str| undeclared.iter().any(|(name, how)| name == upstream && *how == Undeclared::Deny);
    let mut out = anstream::stdout().lock();
    if as_json {
        let tools = |name: &str| offers.iter().find(|(own, _)| own == name).map(|(_, tools)| tools.clone()).unwrap_or_default();
        let all: Vec<Value> = health
            .iter()
            .map(|one| {
                let mut shown = json!(one);
                let offered: Vec<Value> = tools(&one.name)
                    .into_iter()
                    .map(|tool| json!({"tool": tool, "as": exposed.iter().filter(|e| e.upstream == one.name && e.tool == tool).map(|e| json!({"agent": e.agent, "name": e.name, "effect": e.effect, "declared": e.declared})).collect::<Vec<_>>()}))
                    .collect();
                if let Some(fields) = shown.as_object_mut() {
                    fields.insert("offers".to_owned(), json!(offered));
                }
                shown
            })
            .collect();
        writeln!(out, "{}", json!(all))?;
    } else {
        for one in &health {
            match &one.status {
                Status::Up { .. } => writeln!(out, "{GREEN}✓{GREEN:#} {BOLD}{}{BOLD:#}", one.name)?,
                Status::Starting => writeln!(out, "{YELLOW}…{YELLOW:#} {BOLD}{}{BOLD:#} has not answered yet", one.name)?,
                Status::Down { why, .. } => writeln!(out, "{RED}✗{RED:#} {BOLD}{}{BOLD:#} {}", one.name, clean(why))?,
            }
            let undeclared = match undeclared.iter().find(|(name, _)| *name == one.name).map(|(_, how)| how) {
                Some(Undeclared::Ask) => "undeclared: asked about",
                Some(Undeclared::Open) => "undeclared: let through",
                _ => "undeclared: taken for a read",
            };
            let mut table = Table::new(&["  tool", "offered as", "agent", "effect"]).cutting(1, 12);
            for tool in offers.iter().filter(|(own, _)| *own == one.name).flat_map(|(_, tools)| tools) {
                let found: Vec<_> = exposed.iter().filter(|e| e.upstream == one.name && e.tool == *tool).collect();
                if found.is_empty() {
                    table.plain([
                        format!("  {}", clean(tool)),
                        "not offered: no table declares it".to_owned(),
                        String::new(),
                        String::new(),
                    ]);
                }
                for exposed in found {
                    let effect = if exposed.declared { format!("{:?}", exposed.effect).to_lowercase() } else { undeclared.to_owned() };
                    table.plain([format!("  {}", clean(tool)), exposed.name.clone(), exposed.agent.clone(), effect]);
                }
            }
            if offers.iter().any(|(own, tools)| *own == one.name && !tools.is_empty()) {
                table.print(&mut out)?;
            } else {
                writeln!(out, "  {DIM}no tool of it was ever seen{DIM:#}")?;
            }
            for change in &one.held {
                writeln!(out, "  {RED}held back{RED:#} {}: {}", clean(&change.tool), why(change))?;
            }
            if hides(&one.name) {
                let hidden = offers.iter().filter(|(own, _)| *own == one.name).flat_map(|(_, tools)| tools);
                let hidden = hidden.filter(|tool| !exposed.iter().any(|e| e.upstream == one.name && e.tool == **tool)).count();
                if hidden > 0 {
                    writeln!(
                        out,
                        "  {DIM}declare one with `[tools.{}_…]`, `kind = \"mcp\"`, `upstream = \"{}\"`{DIM:#}",
                        one.name, one.name
                    )?;
                }
            }
            writeln!(out)?;
        }
        if health.is_empty() {
            writeln!(out, "the configuration names no upstream; add one with `[upstreams.NAME]`")?;
        }
    }
    let all_up = health.iter().all(|one| matches!(one.status, Status::Up { .. }));
    Ok(if all_up { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn why(change: &Change) -> String {
    if change.why.is_empty() {
        return "it is not what it was when it was accepted".to_owned();
    }
    let one = |suspicion: &Suspicion| match suspicion {
        Suspicion::Invisible { part } => format!("letters that nobody sees in its {part}"),
        Suspicion::Instruction { part, words } => format!("words meant for the model in its {part}: “{}”", clean(words)),
        Suspicion::Shadow { tool } => format!("it speaks of `{}`, a tool of another upstream", clean(tool)),
        Suspicion::Unwritten { why } => format!("it is new, and what it looks like cannot be written down: {}", clean(why)),
        Suspicion::Unfit { why } => format!("it does not fit the configuration: {}", clean(why)),
    };
    change.why.iter().map(one).collect::<Vec<_>>().join("; ")
}

fn known<'c>(config: &'c Config, wanted: Option<&str>) -> io::Result<Vec<&'c Upstream>> {
    let found: Vec<&Upstream> = config.upstreams.iter().filter(|one| wanted.is_none_or(|wanted| wanted == one.name)).collect();
    match wanted {
        Some(wanted) if found.is_empty() => {
            let names: Vec<&str> = config.upstreams.iter().map(|one| one.name.as_str()).collect();
            Err(io::Error::other(format!("there is no upstream `{wanted}`; {}", place::there_are(&names))))
        }
        _ => Ok(found),
    }
}

fn diff(config: &Config, pins: &Path, wanted: Option<&str>, as_json: bool) -> io::Result<ExitCode> {
    let is_wanted = |one: &Upstream| wanted.is_none_or(|wanted| wanted == one.name);
    known(config, wanted)?;
    let mut all: Vec<(&Upstream, Pins)> = Vec::new();
    for one in &config.upstreams {
        match Pins::open(Some(pins), one) {
            Ok(pins) => all.push((one, pins)),
            Err(error) if is_wanted(one) => return Err(error),
            // Of the others the names alone are needed.
            Err(error) => say(&format!("warning: whether a tool speaks of one of `{}` is not known: {error}", one.name)),
        }
    }
    // What has changed since they were started may speak of the tools of others, and whoever accepts it has to know.
    toolgate_mcp::look_for_shadows(config, &all, wanted);
    let mut changes = Vec::new();
    for (_, pins) in all.iter().filter(|(one, _)| is_wanted(one)) {
        changes.extend(pins.show()?);
    }
    let mut out = anstream::stdout().lock();
    if as_json {
        writeln!(out, "{}", json!(changes))?;
    } else if changes.is_empty() {
        writeln!(out, "nothing is held back, as of when they were last asked; `toolgate upstream list` asks them")?;
    } else {
        for change in &changes {
            writeln!(out, "{BOLD}{} {}{BOLD:#}: {}", change.upstream, clean(&change.tool), why(change))?;
            let text = |value: &Value| serde_json::to_string_pretty(value).unwrap_or_default();
            let before = change.before.as_ref().map(text).unwrap_or_default();
            let now = text(&change.now);
            for line in
                similar::TextDiff::from_lines(&before, &now).iter_all_changes().filter(|line| line.tag() != similar::ChangeTag::Equal)
            {
                let said = clean(line.value().trim_end_matches('\n'));
                match line.tag() {
                    similar::ChangeTag::Delete => writeln!(out, "  {RED}-{said}{RED:#}")?,
                    _ => writeln!(out, "  {GREEN}+{said}{GREEN:#}")?,
                }
            }
        }
        writeln!(out, "\naccept what is fine with {BOLD}toolgate upstream accept UPSTREAM TOOL{BOLD:#}")?;
    }
    Ok(if changes.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn accept(config: &Config, pins: &Path, upstream: &str, tool: Option<&str>, as_json: bool) -> io::Result<ExitCode> {
    let (mut done, mut held, mut unseen, mut names) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for upstream in known(config, Some(upstream))? {
        let pins = Pins::open(Some(pins), upstream)?;
        held.extend(pins.changes().into_iter().map(|change| change.tool));
        names.extend(pins.names());
        let accepted = pins.accept(tool)?;
        done.extend(accepted.tools);
        unseen.extend(accepted.unseen);
    }
    // An upstream may have changed its mind while somebody was looking.
    if !unseen.is_empty() {
        return Err(io::Error::other(format!(
            "{}: nobody was shown what it looks like now{}; look with `toolgate upstream diff`, then accept it",
            clean(&unseen.join(", ")),
            if done.is_empty() { String::new() } else { format!(" (accepted: {})", clean(&done.join(", "))) }
        )));
    }
    // By the name that the upstream has for it.
    if let Some(tool) = tool
        && done.is_empty()
        && !held.is_empty()
    {
        return Err(io::Error::other(format!(
            "`{}` is not held back; of `{upstream}`, these are: {}",
            clean(tool),
            clean(&held.join(", "))
        )));
    }
    if let Some(tool) = tool.filter(|tool| names.iter().all(|name| name != tool)) {
        let says = match toolgate::suggest::closest(tool, names.iter().map(String::as_str)) {
            Some(meant) => format!("did you mean `{}`?", clean(meant)),
            None => "`toolgate upstream list` says what it offers".to_owned(),
        };
        return Err(io::Error::other(format!("`{upstream}` has no tool `{}`; {says}", clean(tool))));
    }
    let mut out = anstream::stdout().lock();
    match (as_json, done.is_empty()) {
        (true, _) => writeln!(out, "{}", json!({"upstream": upstream, "accepted": done}))?,
        (false, true) => writeln!(out, "nothing of that is held back")?,
        (false, false) => writeln!(out, "{GREEN}accepted{GREEN:#} {}: {}", counted(done.len() as u64, "tool"), clean(&done.join(", ")))?,
    }
    Ok(ExitCode::SUCCESS)
}
