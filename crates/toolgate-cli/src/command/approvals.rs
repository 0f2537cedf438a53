//! Implements `toolgate approvals`: lists and answers approvals.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use serde_json::json;
use toolgate::Timestamp;
use toolgate::store::{Approval, Store};
use toolgate_store::SqliteStore;

use crate::command::common::{
    BOLD, DIM, GREEN, PartialId, RED, at_most_one, format_time, ledger_path, open_ledger, sanitize,
};

/// List calls that need approval, and approve or deny one.
#[derive(clap::Args)]
#[command(
    after_help = "An approval covers one call, exactly as shown. The agent repeats the call to use it.\n\nExamples:\n  toolgate approvals list --store ledger.db\n  toolgate approvals approve apr_01a1… --store ledger.db\n  toolgate approvals deny apr_01a1… --store ledger.db"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: ApprovalsCommand,
}

#[derive(clap::Subcommand)]
enum ApprovalsCommand {
    /// List waiting approvals.
    #[command(after_help = "Examples:\n  toolgate approvals list --json")]
    List {
        /// Print one JSON object per line.
        #[arg(long)]
        json: bool,
    },
    /// Approve one call.
    #[command(after_help = "Examples:\n  toolgate approvals approve apr_01a1…")]
    Approve(ApprovalAnswerArgs),
    /// Deny one call.
    #[command(after_help = "Examples:\n  toolgate approvals deny apr_01a1…")]
    Deny(ApprovalAnswerArgs),
}

#[derive(clap::Args)]
struct ApprovalAnswerArgs {
    /// Approval id, or at least 6 digits at its beginning or end.
    id: String,
    /// Name of the approver [default: your user name].
    #[arg(long = "as", value_name = "NAME")]
    name: Option<String>,
}

pub(crate) fn run(args: &Args, store: Option<&Path>) -> io::Result<ExitCode> {
    match &args.verb {
        ApprovalsCommand::List { json } => list_waiting(store, *json),
        ApprovalsCommand::Approve(answer) => answer_approval(store, answer, true),
        ApprovalsCommand::Deny(answer) => answer_approval(store, answer, false),
    }
}

/// Finds a waiting approval by its id or a part of it.
///
/// The part must match no other approval in the ledger, answered ones included. Otherwise an
/// attempt to answer an old approval again could answer another one.
fn find_waiting(store: Option<&Path>, text: &str) -> io::Result<Approval> {
    let ledger = open_ledger(store)?;
    let mut ids = ledger.approval_ids().map_err(io::Error::other)?;
    match (ids.iter().any(|id| id == text), PartialId::parse(id_digits(text))) {
        (true, _) => ids.retain(|id| id == text),
        (false, Some(part)) => ids.retain(|id| part.matches(id_digits(id))),
        (false, None) => {
            let problem = "is not an approval id, nor at least 6 digits at its beginning or end";
            return Err(io::Error::other(format!(
                "`{}` {problem}; list waiting approvals with `toolgate approvals list`",
                sanitize(text)
            )));
        }
    }
    let id = at_most_one(ids, "approvals")?;
    let mut waiting =
        ledger.waiting_approvals(Timestamp::now()).map_err(io::Error::other)?.into_iter();
    let not_waiting = || {
        io::Error::other(format!(
            "`{}` is not waiting; list waiting approvals with `toolgate approvals list`",
            sanitize(text)
        ))
    };
    waiting.find(|approval| Some(&approval.id) == id.as_ref()).ok_or_else(not_waiting)
}

/// Returns an id without its prefix.
fn id_digits(id: &str) -> &str {
    id.strip_prefix("apr_").unwrap_or(id)
}

fn list_waiting(store: Option<&Path>, as_json: bool) -> io::Result<ExitCode> {
    let mut out = anstream::stdout().lock();
    let waiting =
        open_ledger(store)?.waiting_approvals(Timestamp::now()).map_err(io::Error::other)?;
    for approval in &waiting {
        if as_json {
            writeln!(out, "{}", json!(approval))?;
            continue;
        }
        writeln!(
            out,
            "{BOLD}{}{BOLD:#} {} {}",
            approval.id,
            sanitize(&approval.tool),
            sanitize(&approval.shown.to_string())
        )?;
        writeln!(out, "  {}", sanitize(&approval.reason))?;
        let askers = approval.asked_by.join(", ");
        let approvers: Vec<String> =
            approval.approvers.iter().map(|people| people.join(" or ")).collect();
        let approvers =
            if approvers.is_empty() { "anyone".to_owned() } else { approvers.join(", and ") };
        let (session, until) = (sanitize(&approval.key.session), format_time(approval.expires));
        writeln!(
            out,
            "  {DIM}asked by {}; to be answered by {} until {until}; session {session}{DIM:#}",
            sanitize(&askers),
            sanitize(&approvers)
        )?;
        let caller = format!("{} as {}", approval.key.principal, approval.key.agent);
        writeln!(
            out,
            "  {DIM}for {}; run `toolgate approvals approve {}`, or `deny`{DIM:#}",
            sanitize(&caller),
            approval.id
        )?;
    }
    if waiting.is_empty() && !as_json {
        writeln!(out, "no approvals are waiting in {}", ledger_path(store)?.display())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn answer_approval(
    store: Option<&Path>,
    answer: &ApprovalAnswerArgs,
    is_approved: bool,
) -> io::Result<ExitCode> {
    let name = answer.name.clone().unwrap_or_else(toolgate_hook::effective_config::local_user_name);
    let approval = find_waiting(store, &answer.id)?;
    if !approval.can_be_answered_by(&name) {
        return Err(io::Error::other(format!(
            "`{}` may not answer this approval; pass the name of an approver with `--as`",
            sanitize(&name)
        )));
    }
    let sqlite_store = SqliteStore::open(ledger_path(store)?).map_err(io::Error::other)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if !runtime
        .block_on(sqlite_store.answer_approval(&approval.id, is_approved, &name))
        .map_err(io::Error::other)?
    {
        return Err(io::Error::other("the approval was answered meanwhile, or has expired"));
    }
    let mut out = anstream::stdout().lock();
    let (style, verb) = if is_approved { (GREEN, "approved") } else { (RED, "denied") };
    let (shown, ledger) = (sanitize(&approval.shown.to_string()), ledger_path(store)?.display());
    writeln!(out, "{style}{verb}{style:#} {} {shown} in {ledger}", sanitize(&approval.tool))?;
    Ok(ExitCode::SUCCESS)
}
