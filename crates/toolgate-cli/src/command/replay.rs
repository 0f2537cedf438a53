//! Implements `toolgate replay`: decides a recorded session again.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use serde_json::json;
use toolgate::{AdmissionDecision, AgentDefinition, Replay, ReplayComparison};
use toolgate_json::Digest;
use toolgate_store::{LedgerEntry, LedgerReader, RowFilter};

use crate::command::common::{
    BOLD, DIM, GREEN, IgnoreBrokenPipe, RED, YELLOW, describe_reason, format_count, format_time,
    open_ledger, parse_number, sanitize,
};

/// Decide a recorded session again, call by call, without running any tool.
///
/// Each call is decided by its recorded configuration and on its recorded facts: the clock,
/// counters, evidence, files, hook answers and approvals. A decision that depends on a redacted
/// value is undecidable.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if no decision differs, 1 if one does, 2 if it could not be done.\n\nExamples:\n  toolgate replay conversation-1 --store ledger.db\n  toolgate replay conversation-1 --store ledger.db --until 12 --json"
)]
pub(crate) struct Args {
    /// Name of the session.
    session: String,
    /// Agent of the session, if several agents have one of this name.
    #[arg(long)]
    agent: Option<String>,
    /// Principal of the session, if several principals have one of this name.
    #[arg(long)]
    principal: Option<String>,
    /// Stop after this turn of the model, or after this call if no turns are known.
    #[arg(long, value_name = "TURN", value_parser = parse_number::<u64>)]
    until: Option<u64>,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, store: Option<&Path>) -> io::Result<ExitCode> {
    let ledger = open_ledger(store)?;
    let mut keys = ledger.sessions(Some(&args.session)).map_err(io::Error::other)?;
    keys.retain(|key| args.agent.as_deref().is_none_or(|agent| *key.agent == *agent));
    keys.retain(|key| {
        args.principal.as_deref().is_none_or(|principal| *key.principal == *principal)
    });
    let [key] = keys.as_slice() else {
        let found: Vec<String> = keys
            .iter()
            .map(|key| {
                format!("--agent {} --principal {}", sanitize(&key.agent), sanitize(&key.principal))
            })
            .collect();
        let message = match found.is_empty() {
            true => format!(
                "the ledger has no session `{}`; list sessions with `toolgate audit query`",
                args.session
            ),
            false => format!(
                "several sessions are called `{}`; choose one:\n  {}",
                args.session,
                found.join("\n  ")
            ),
        };
        return Err(io::Error::other(message));
    };
    let filter = RowFilter {
        agent: Some(key.agent.to_string()),
        principal: Some(key.principal.to_string()),
        session: Some(key.session.to_string()),
        ..RowFilter::default()
    };
    let entries = ledger.find(&filter).map_err(io::Error::other)?;
    match entries.first() {
        None => {
            return Err(io::Error::other(format!(
                "all rows of session `{}` were pruned; there is nothing to decide again",
                args.session
            )));
        }
        Some(first) if first.n > 1 => {
            writeln!(
                IgnoreBrokenPipe(anstream::stderr().lock()),
                "{YELLOW}note{YELLOW:#}: the first {} of this session were pruned",
                format_count(first.n - 1, "row")
            )?;
        }
        Some(_) => {}
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let differs = runtime.block_on(replay_rows(&*ledger, &entries, args))?;
    Ok(if differs { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn replay_rows(
    ledger: &dyn LedgerReader,
    entries: &[LedgerEntry],
    args: &Args,
) -> io::Result<bool> {
    let mut by_config: HashMap<Digest, Result<Replay, String>> = HashMap::new();
    let (mut same, mut differ, mut undecidable, mut circumstances) = (0, 0, 0, 0);
    let mut out = IgnoreBrokenPipe(anstream::stdout().lock());
    // A row without a turn belongs to the turn before it.
    let (has_turns, mut position) = (entries.iter().any(|entry| entry.row.turn.is_some()), 0);
    for entry in entries {
        let row = &entry.row;
        position = if has_turns { row.turn.unwrap_or(position) } else { entry.n };
        if args.until.is_some_and(|until| position > until) {
            continue;
        }
        let replay = match by_config.entry(row.config) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => {
                new.insert(build_replay(ledger, row.config)?)
            }
        };
        let compared = match replay {
            Ok(replay) => replay.decide(row).await,
            Err(why) => ReplayComparison::Undecidable(why.clone()),
        };
        match &compared {
            ReplayComparison::Same => same += 1,
            ReplayComparison::Differs(_) => differ += 1,
            ReplayComparison::Undecidable(_) => undecidable += 1,
            ReplayComparison::Circumstance(_) if row.settles.is_some() => {}
            ReplayComparison::Circumstance(_) => circumstances += 1,
        }
        let was = AdmissionDecision::from_row(row);
        if args.json {
            writeln!(
                out,
                "{}",
                json!({ "call": row.call, "turn": row.turn, "tool": row.tool, "at": row.at, "was": was, "now": compared })
            )?;
            continue;
        }
        if row.settles.is_some() {
            writeln!(
                out,
                "{:>4}  {DIM}· {} {} {}{DIM:#}",
                "",
                format_time(row.at),
                sanitize(&row.tool),
                describe_reason(row)
            )?;
            continue;
        }
        let (style, mark, detail) = match &compared {
            ReplayComparison::Same => (GREEN, "=", String::new()),
            ReplayComparison::Differs(now) => {
                (RED, "≠", format!("\n      {RED}now {}{RED:#}", sanitize(&now.to_string())))
            }
            ReplayComparison::Undecidable(why) => {
                (YELLOW, "?", format!(" {DIM}undecidable: {}{DIM:#}", sanitize(why)))
            }
            ReplayComparison::Circumstance(why) => {
                (DIM, "·", format!(" {DIM}not decided again: {}{DIM:#}", sanitize(why)))
            }
        };
        let turn = if has_turns {
            row.turn.map_or_else(String::new, |turn| turn.to_string())
        } else {
            entry.n.to_string()
        };
        let arguments_text = super::audit::describe_arguments(row);
        let arguments_text = if arguments_text.is_empty() {
            arguments_text
        } else {
            format!(" {DIM}{arguments_text}{DIM:#}")
        };
        writeln!(
            out,
            "{turn:>4}  {style}{mark}{style:#} {DIM}{}{DIM:#} {BOLD}{}{BOLD:#} {}{arguments_text}{detail}",
            format_time(row.at),
            sanitize(&row.tool),
            sanitize(&was.to_string())
        )?;
    }
    if args.json {
        writeln!(
            out,
            "{}",
            json!({ "summary": { "same": same, "differ": differ, "undecidable": undecidable, "circumstance": circumstances } })
        )?;
    } else {
        let style = if differ == 0 { GREEN } else { RED };
        writeln!(
            out,
            "\n{style}{same} the same, {differ} differ{style:#}, {undecidable} undecidable, {circumstances} not decided again"
        )?;
    }
    Ok(differ > 0)
}

/// Rebuilds the agent that decided a row.
pub(super) fn build_replay(
    ledger: &dyn LedgerReader,
    config: Digest,
) -> io::Result<Result<Replay, String>> {
    if config == Digest::default() {
        // The agent was unknown when the row was written.
        return Replay::new([]).map(Ok);
    }
    let Some(text) = ledger.definition(config).map_err(io::Error::other)? else {
        return Ok(Err(format!("the configuration {config} is not in the ledger")));
    };
    let built = AgentDefinition::parse(&text)
        .map_err(|e| e.to_string())
        .and_then(|definition| definition.build().map_err(|e| e.to_string()));
    match built {
        Ok(agent) => Replay::new([agent]).map(Ok),
        Err(why) => Ok(Err(format!("this version cannot read the configuration {config}: {why}"))),
    }
}
