//! `toolgate explain`: why a call was let through or not, or would be.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use serde_json::json;
use tokio::runtime::Runtime;
use toolgate::{Compared, Ruling};
use toolgate_store::Ledger;

use super::audit::{Named, row_of};
use super::check::{self, Desk};
use super::ledger::{BOLD, DIM, RED, YELLOW, clean, open, style, time};
use super::replay::replay_of;

/// Say why a call was let through or not: every gate and every rule, with the values that decide.
///
/// A call that was made is named by its id: it is looked up in the ledger, and rules are asked again on the facts that it was decided
/// on, by the configuration of its time. A call that was not made is a JSON object, as for `toolgate check`: it is judged by the
/// configuration as it is now, after those that stand before it. No tool runs, and nothing live is touched.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if it can be explained, whatever became of it; 2 if it cannot.\n\nExamples:\n  toolgate explain 01a1df09-ae84-70f4-bcc8-c27a3fb5b2c8\n  toolgate explain c27a3fb5b2c8 --store ledger.db --json\n  toolgate explain '{\"tool\": \"issue_refund\", \"arguments\": {\"amount\": 600}}'"
)]
pub(crate) struct Args {
    /// Calls: each by its id, of which the last 6 digits will do, or as a JSON object.
    #[arg(value_name = "CALL", required = true)]
    calls: Vec<Asked>,
    /// The configuration alone, for calls not made; without it, all that a call meets here.
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG")]
    config: Option<PathBuf>,
    /// One JSON object a call.
    #[arg(long)]
    json: bool,
}

/// What is to be explained.
#[derive(Debug, Clone)]
enum Asked {
    /// A call that was made.
    Made(Named),
    /// One that might be, as JSON.
    Tried(String),
}

impl FromStr for Asked {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim_start().starts_with('{') {
            return Ok(Self::Tried(text.to_owned()));
        }
        text.parse::<Named>().map(Self::Made).map_err(|why: String| format!("{why}; one that was not made is a JSON object"))
    }
}

impl Args {
    /// Whether it needs no ledger, so that none is looked for.
    pub(crate) fn is_offline(&self) -> bool {
        self.calls.iter().all(|call| matches!(call, Asked::Tried(_)))
    }
}

pub(crate) fn run(args: &Args, store: Option<&Path>) -> io::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Each is opened where somebody asks for it.
    let ledger = if args.is_offline() { None } else { Some(open(store)?) };
    let tries = args.calls.iter().any(|call| matches!(call, Asked::Tried(_)));
    let desk = if tries { Some(Desk::open_here(args.config.as_ref())?) } else { None };
    let mut out = anstream::stdout().lock();
    for (number, call) in args.calls.iter().enumerate() {
        let place = format!("call {}", number + 1);
        match (call, &ledger, &desk) {
            (Asked::Made(call), Some(ledger), _) => made(&mut out, ledger, &runtime, call, args.json)?,
            (Asked::Tried(line), _, Some(desk)) => check::tell(&mut out, desk, &runtime, (place.as_str(), line.as_str()), true, args.json)?,
            _ => {}
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A call of the ledger.
fn made(out: &mut impl Write, ledger: &Ledger, runtime: &Runtime, call: &Named, json: bool) -> io::Result<()> {
    let row = row_of(call, ledger)?;
    let unexplained = |why: String| io::Error::other(format!("{} cannot be explained: {why}", row.call));
    let replay = replay_of(ledger, row.config)?.map_err(unexplained)?;
    let (now, why) = runtime.block_on(async { (replay.decide(&row).await, replay.explain(&row).await) });
    let why = why.ok_or_else(|| unexplained("it asked for nothing; `toolgate audit show` says what it tells of".to_owned()))?;
    if json {
        let was = Ruling::of(&row);
        let told = json!({
            "call": row.call, "turn": row.turn, "tool": row.tool, "at": row.at, "was": was, "now": now, "explanation": why,
        });
        return writeln!(out, "{told}");
    }
    let (style, error) = (style(row.decision), row.outcome.error());
    let rule = row.rule.as_deref().map(|rule| format!(" · {}", clean(rule))).unwrap_or_default();
    let place = if error.is_some() { format!(" {DIM}at{DIM:#} {}{rule}", row.gate) } else { String::new() };
    writeln!(out, "{style}{}{style:#} {BOLD}{}{BOLD:#} {}{place}", row.decision, clean(&row.tool), clean(&row.arguments.to_string()))?;
    if let Some(error) = error {
        check::told(out, error)?;
    }
    let key = &row.key;
    writeln!(
        out,
        "      {DIM}{} session {} of {} with {}{DIM:#}",
        time(row.at),
        clean(&key.session),
        clean(&key.principal),
        clean(&key.agent)
    )?;
    match now {
        Compared::Same => {}
        Compared::Differs(now) => writeln!(out, "      {RED}decided again it is {}{RED:#}", clean(&now.to_string()))?,
        Compared::Undecidable(why) => writeln!(out, "      {YELLOW}not all is known that it hung on{YELLOW:#}: {}", clean(&why))?,
        Compared::Circumstance(why) => writeln!(out, "      {DIM}{}{DIM:#}", clean(&why))?,
    }
    check::steps(out, &why)
}
