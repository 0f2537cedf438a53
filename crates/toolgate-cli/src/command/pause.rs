//! `toolgate pause` and `toolgate resume`: the kill switch.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use toolgate::SessionKey;
use toolgate::store::{Store, Target};
use toolgate_store::SqliteStore;

use super::ledger::{clean, named, open};

/// Stop an agent, a tool, a principal or a session at once, wherever this ledger is used.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate pause --tool issue_refund --because \"the bank is down\" --store ledger.db\n  toolgate pause --agent support --because \"incident 7\" --store ledger.db"
)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    target: What,
    /// Why: the model and the ledger are told.
    #[arg(long, value_name = "REASON")]
    because: String,
}

/// Let an agent, a tool, a principal or a session go on.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  toolgate resume --tool issue_refund --store ledger.db")]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    target: What,
}

#[derive(clap::Args)]
#[group(required = true, multiple = true)]
struct What {
    /// An agent. With `--principal` and `--session`, the agent of that session.
    #[arg(long)]
    agent: Option<String>,
    /// A tool, in every agent.
    #[arg(long, conflicts_with_all = ["agent", "principal", "session"])]
    tool: Option<String>,
    /// A principal.
    #[arg(long)]
    principal: Option<String>,
    /// One session; say its agent and principal, too.
    #[arg(long, requires = "agent", requires = "principal")]
    session: Option<String>,
}

impl What {
    fn target(&self) -> io::Result<(Target, String)> {
        Ok(match (&self.tool, &self.agent, &self.principal, &self.session) {
            (Some(tool), ..) => (Target::Tool(tool.as_str().into()), format!("the tool `{}`", clean(tool))),
            (_, Some(agent), Some(principal), Some(session)) => {
                let key = SessionKey::new(agent.as_str(), principal.as_str(), session.as_str());
                (Target::Session(key), format!("the session `{}`", clean(session)))
            }
            (_, Some(agent), None, None) => (Target::Agent(agent.as_str().into()), format!("the agent `{}`", clean(agent))),
            (_, None, Some(principal), None) => {
                (Target::Principal(principal.as_str().into()), format!("the principal `{}`", clean(principal)))
            }
            _ => return Err(io::Error::other("one thing at a time: an agent, a tool, a principal, or a session with both")),
        })
    }
}

pub(crate) fn pause(args: &PauseArgs, store: Option<&Path>) -> io::Result<ExitCode> {
    set(&args.target, Some(args.because.clone()), store)
}

pub(crate) fn resume(args: &ResumeArgs, store: Option<&Path>) -> io::Result<ExitCode> {
    set(&args.target, None, store)
}

fn set(what: &What, reason: Option<String>, store: Option<&Path>) -> io::Result<ExitCode> {
    let (target, named_so) = what.target()?;
    // A ledger that is not there is not made to be paused.
    open(store)?;
    let store = SqliteStore::open(named(store)?).map_err(io::Error::other)?;
    let paused = reason.is_some();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(store.set_pause(target, reason)).map_err(io::Error::other)?;
    writeln!(io::stdout().lock(), "{named_so} {}", if paused { "is paused" } else { "goes on" })?;
    Ok(ExitCode::SUCCESS)
}
