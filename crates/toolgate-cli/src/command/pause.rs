//! Implements `toolgate pause` and `toolgate resume`, the kill switch.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use toolgate::SessionKey;
use toolgate::store::{PauseTarget, Store};
use toolgate::tool::name::{is_tool_name, tool_name_from_client};
use toolgate_store::SqliteStore;

use crate::command::common::{ledger_path, open_ledger, sanitize};

/// Pause an agent, a tool, a principal or a session at once.
///
/// A pause applies to every process that uses this ledger. Without a target, list all pauses.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate pause --tool issue_refund --because \"the bank is down\"\n  toolgate pause --agent support --because \"incident 7\" --store ledger.db"
)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    target: PauseTargetArgs,
    /// Reason, which the model and the ledger see.
    #[arg(long, value_name = "REASON", requires = "What")]
    because: Option<String>,
}

/// Resume a paused agent, tool, principal or session.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  toolgate resume --tool issue_refund --store ledger.db")]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    target: PauseTargetArgs,
}

#[derive(clap::Args)]
#[group(id = "What", multiple = true)]
struct PauseTargetArgs {
    /// An agent; with `--principal` and `--session`, the agent of that session.
    #[arg(long)]
    agent: Option<String>,
    /// A tool, in every agent.
    #[arg(long, conflicts_with_all = ["agent", "principal", "session"])]
    tool: Option<String>,
    /// A principal.
    #[arg(long)]
    principal: Option<String>,
    /// One session; requires `--agent` and `--principal`.
    #[arg(long, requires = "agent", requires = "principal")]
    session: Option<String>,
}

impl PauseTargetArgs {
    const fn is_empty(&self) -> bool {
        self.agent.is_none()
            && self.tool.is_none()
            && self.principal.is_none()
            && self.session.is_none()
    }

    fn target(&self) -> io::Result<PauseTarget> {
        Ok(match (&self.tool, &self.agent, &self.principal, &self.session) {
            (Some(tool), ..) => PauseTarget::Tool(toolgate_name(tool).into()),
            (_, Some(agent), Some(principal), Some(session)) => PauseTarget::Session(
                SessionKey::new(agent.as_str(), principal.as_str(), session.as_str()),
            ),
            (_, Some(agent), None, None) => PauseTarget::Agent(agent.as_str().into()),
            (_, None, Some(principal), None) => PauseTarget::Principal(principal.as_str().into()),
            (_, Some(_), Some(_), None) => {
                return Err(io::Error::other(
                    "missing `--session`: add it, or leave out `--agent` or `--principal`",
                ));
            }
            _ => {
                return Err(io::Error::other(
                    "missing target: pass `--agent`, `--tool`, `--principal`, or `--session` with its agent and principal",
                ));
            }
        })
    }
}

pub(crate) fn pause(args: &PauseArgs, store: Option<&Path>) -> io::Result<ExitCode> {
    let ledger = open_ledger(store)?;
    let mut out = io::stdout().lock();
    if args.target.is_empty() {
        let paused = ledger.paused_targets().map_err(io::Error::other)?;
        for (target, why) in &paused {
            writeln!(out, "{}: {}", sanitize(&describe_target(target)), sanitize(why))?;
        }
        if paused.is_empty() {
            writeln!(out, "nothing is paused in {}", ledger_path(store)?.display())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let reason = args.because.clone().filter(|why| !why.trim().is_empty());
    let reason = reason.ok_or_else(|| {
        io::Error::other("missing `--because REASON`: the model and the ledger see the reason")
    })?;
    let target = args.target.target()?;
    let is_known = ledger.has_target(&target).map_err(io::Error::other)?;
    set_pause(&target, Some(reason), store)?;
    if !is_known {
        crate::print_note(&format!(
            "note: {} does not occur in this ledger yet; it is paused anyway",
            sanitize(&describe_target(&target))
        ));
    }
    let ledger = ledger_path(store)?;
    match args.target.tool.as_deref().filter(|tool| toolgate_name(tool) != **tool) {
        Some(tool) => writeln!(
            out,
            "the tool `{}` is paused as `{}` in {}",
            sanitize(tool),
            toolgate_name(tool),
            ledger.display()
        )?,
        None => writeln!(
            out,
            "{} is paused in {}",
            sanitize(&describe_target(&target)),
            ledger.display()
        )?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn resume(args: &ResumeArgs, store: Option<&Path>) -> io::Result<ExitCode> {
    let (mut target, paused) =
        (args.target.target()?, open_ledger(store)?.paused_targets().map_err(io::Error::other)?);
    let is_paused = |target: &PauseTarget| paused.iter().any(|(paused, _)| paused == target);
    // The tool may have been paused by the given name instead of the toolgate name.
    if let Some(literal_target) =
        args.target.tool.as_deref().map(|tool| PauseTarget::Tool(tool.into()))
        && !is_paused(&target)
        && is_paused(&literal_target)
    {
        target = literal_target;
    }
    if !is_paused(&target) {
        return Err(io::Error::other(format!(
            "{} is not paused; list paused targets with `toolgate pause`",
            sanitize(&describe_target(&target))
        )));
    }
    set_pause(&target, None, store)?;
    writeln!(
        io::stdout().lock(),
        "{} is resumed in {}",
        sanitize(&describe_target(&target)),
        ledger_path(store)?.display()
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the toolgate name of a tool. An invalid name is the client's name, as in a hook event.
fn toolgate_name(tool: &str) -> String {
    if is_tool_name(tool) { tool.to_owned() } else { tool_name_from_client(tool) }
}

/// Formats a target for people.
fn describe_target(target: &PauseTarget) -> String {
    match target {
        PauseTarget::Agent(name) => format!("the agent `{name}`"),
        PauseTarget::Tool(name) => format!("the tool `{name}`"),
        PauseTarget::Principal(name) => format!("the principal `{name}`"),
        PauseTarget::Session(key) => {
            format!("the session `{}` of `{}` as `{}`", key.session, key.principal, key.agent)
        }
    }
}

fn set_pause(target: &PauseTarget, reason: Option<String>, store: Option<&Path>) -> io::Result<()> {
    let store = SqliteStore::open(ledger_path(store)?).map_err(io::Error::other)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(store.set_pause(target.clone(), reason)).map_err(io::Error::other)
}
