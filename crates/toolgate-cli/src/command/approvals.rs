//! `toolgate approvals`: calls that wait for a person.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use serde_json::json;
use toolgate::Timestamp;
use toolgate::store::{Approval, Store};
use toolgate_store::SqliteStore;

use super::ledger::{BOLD, DIM, GREEN, Part, RED, clean, named, only, open, time};

/// Calls that wait for a person: list them, approve or deny one.
#[derive(clap::Args)]
#[command(
    after_help = "An approval is for one call, exactly as it was shown; the agent makes the call again to use it.\n\nExamples:\n  toolgate approvals list --store ledger.db\n  toolgate approvals approve apr_01a1… --store ledger.db\n  toolgate approvals deny apr_01a1… --store ledger.db"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// What waits.
    #[command(after_help = "Examples:\n  toolgate approvals list --json")]
    List {
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
    },
    /// Say yes to one call.
    #[command(after_help = "Examples:\n  toolgate approvals approve apr_01a1…")]
    Approve(Answer),
    /// Say no to one call.
    #[command(after_help = "Examples:\n  toolgate approvals deny apr_01a1…")]
    Deny(Answer),
}

#[derive(clap::Args)]
struct Answer {
    /// Which, as `list` shows it; the last 6 digits will do.
    id: String,
    /// In whose name; yours unless said.
    #[arg(long = "as", value_name = "NAME")]
    name: Option<String>,
}

pub(crate) fn run(args: &Args, store: Option<&Path>) -> io::Result<ExitCode> {
    match &args.verb {
        Verb::List { json } => list(store, *json),
        Verb::Approve(answer) => say(store, answer, true),
        Verb::Deny(answer) => say(store, answer, false),
    }
}

/// What waits under an id, or under a part of it that fits no other approval of the ledger: not one that was answered either, lest
/// whoever means that one answers another.
fn find(store: Option<&Path>, said: &str) -> io::Result<Approval> {
    let ledger = open(store)?;
    let mut known = ledger.approvals().map_err(io::Error::other)?;
    match (known.iter().any(|id| id == said), Part::of(digits(said))) {
        (true, _) => known.retain(|id| id == said),
        (false, Some(part)) => known.retain(|id| part.fits(digits(id))),
        (false, None) => {
            let why = "is no id, nor at least 6 digits of one, at its beginning or its end";
            return Err(io::Error::other(format!("`{}` {why}; `toolgate approvals list` lists what waits", clean(said))));
        }
    }
    let id = only(known, "approvals")?;
    let mut waiting = ledger.waiting(Timestamp::now()).map_err(io::Error::other)?.into_iter();
    let missing = || io::Error::other(format!("`{}` does not wait; `toolgate approvals list` lists what does", clean(said)));
    waiting.find(|approval| Some(&approval.id) == id.as_ref()).ok_or_else(missing)
}

/// An id without how all of them begin.
fn digits(id: &str) -> &str {
    id.strip_prefix("apr_").unwrap_or(id)
}

fn list(store: Option<&Path>, as_json: bool) -> io::Result<ExitCode> {
    let mut out = anstream::stdout().lock();
    let waiting = open(store)?.waiting(Timestamp::now()).map_err(io::Error::other)?;
    for approval in &waiting {
        if as_json {
            writeln!(out, "{}", json!(approval))?;
            continue;
        }
        writeln!(out, "{BOLD}{}{BOLD:#} {} {}", approval.id, clean(&approval.tool), clean(&approval.shown.to_string()))?;
        writeln!(out, "  {}", clean(&approval.reason))?;
        let by = approval.asked_by.join(", ");
        let who: Vec<String> = approval.approvers.iter().map(|people| people.join(" or ")).collect();
        let who = if who.is_empty() { "anybody".to_owned() } else { who.join(", and ") };
        let (session, until) = (clean(&approval.key.session), time(approval.expires));
        writeln!(out, "  {DIM}asked by {}; to be answered by {} until {until}; session {session}{DIM:#}", clean(&by), clean(&who))?;
        let caller = format!("{} as {}", approval.key.principal, approval.key.agent);
        writeln!(out, "  {DIM}for {}; say `toolgate approvals approve {}`, or `deny`{DIM:#}", clean(&caller), approval.id)?;
    }
    if waiting.is_empty() && !as_json {
        writeln!(out, "nothing waits in {}", named(store)?.display())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn say(store: Option<&Path>, answer: &Answer, yes: bool) -> io::Result<ExitCode> {
    let name = answer.name.clone().unwrap_or_else(crate::place::user);
    let approval = find(store, &answer.id)?;
    if !approval.may_be_answered_by(&name) {
        return Err(io::Error::other(format!("`{}` may not answer this one; `--as` says in whose name", clean(&name))));
    }
    let opened = SqliteStore::open(named(store)?).map_err(io::Error::other)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if !runtime.block_on(opened.answer(&approval.id, yes, &name, Timestamp::now())).map_err(io::Error::other)? {
        return Err(io::Error::other("somebody else was first, or its time is up"));
    }
    let mut out = anstream::stdout().lock();
    let (style, word) = if yes { (GREEN, "approved") } else { (RED, "denied") };
    let (shown, ledger) = (clean(&approval.shown.to_string()), named(store)?.display());
    writeln!(out, "{style}{word}{style:#} {} {shown} in {ledger}", clean(&approval.tool))?;
    Ok(ExitCode::SUCCESS)
}
