//! Implements `toolgate explain`: explains why a call was or would be allowed or denied.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use serde_json::json;
use tokio::runtime::Runtime;
use toolgate::{AdmissionDecision, ReplayComparison};
use toolgate_store::LedgerReader;

use super::audit::{CallIdArg, find_row};
use super::check::{self, CheckHarness};
use super::replay::build_replay;
use crate::command::common::{
    BOLD, DIM, RED, YELLOW, decision_style, format_time, open_ledger, sanitize,
};

/// Explain why a call was or would be allowed or denied.
///
/// Prints every gate and every rule, with the values that decide.
///
/// A recorded call is given by its id. It is decided again on its recorded facts, by its recorded
/// configuration. Any other call is a JSON object, as for `toolgate check`. It is decided by the
/// current configuration, after the calls before it. No tool runs, and no live state changes.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if every call can be explained; 2 if one cannot.\n\nExamples:\n  toolgate explain 01a1df09-ae84-70f4-bcc8-c27a3fb5b2c8\n  toolgate explain c27a3fb5b2c8 --store ledger.db --json\n  toolgate explain '{\"tool\": \"issue_refund\", \"arguments\": {\"amount\": 600}}'"
)]
pub(crate) struct Args {
    /// Call ids (6 digits at the beginning or end suffice) or JSON objects.
    #[arg(value_name = "CALL", required = true)]
    calls: Vec<ExplainTarget>,
    /// Configuration for JSON calls [default: what is in force here].
    #[arg(long, value_name = "FILE", env = "TOOLGATE_CONFIG")]
    config: Option<PathBuf>,
    /// Print one JSON object per call.
    #[arg(long)]
    json: bool,
}

/// A call to explain.
#[derive(Debug, Clone)]
enum ExplainTarget {
    /// A recorded call.
    Recorded(CallIdArg),
    /// A hypothetical call as JSON.
    Hypothetical(String),
}

impl FromStr for ExplainTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim_start().starts_with('{') {
            return Ok(Self::Hypothetical(text.to_owned()));
        }
        text.parse::<CallIdArg>()
            .map(Self::Recorded)
            .map_err(|why: String| format!("{why}; or a JSON object for a call that was not made"))
    }
}

impl Args {
    /// Returns true if the command needs no ledger.
    pub(crate) fn is_offline(&self) -> bool {
        self.calls.iter().all(|call| matches!(call, ExplainTarget::Hypothetical(_)))
    }
}

pub(crate) fn run(args: &Args, store: Option<&Path>) -> io::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Open the ledger and the configuration only if a call needs them.
    let ledger = if args.is_offline() { None } else { Some(open_ledger(store)?) };
    let has_hypothetical =
        args.calls.iter().any(|call| matches!(call, ExplainTarget::Hypothetical(_)));
    let harness = if has_hypothetical {
        Some(CheckHarness::open_effective(args.config.as_ref())?)
    } else {
        None
    };
    let mut out = anstream::stdout().lock();
    for (number, call) in args.calls.iter().enumerate() {
        let place = format!("call {}", number + 1);
        match (call, &ledger, &harness) {
            (ExplainTarget::Recorded(call), Some(ledger), _) => {
                explain_recorded(&mut out, &**ledger, &runtime, call, args.json)?
            }
            (ExplainTarget::Hypothetical(line), _, Some(harness)) => check::print_decision(
                &mut out,
                harness,
                &runtime,
                (place.as_str(), line.as_str()),
                true,
                args.json,
            )?,
            _ => {}
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Explains a recorded call.
fn explain_recorded(
    out: &mut impl Write,
    ledger: &dyn LedgerReader,
    runtime: &Runtime,
    call: &CallIdArg,
    json: bool,
) -> io::Result<()> {
    let row = find_row(call, ledger)?;
    let cannot_explain =
        |why: String| io::Error::other(format!("cannot explain {}: {why}", row.call));
    let replay = build_replay(ledger, row.config)?.map_err(cannot_explain)?;
    let (now, why) =
        runtime.block_on(async { (replay.decide(&row).await, replay.explain(&row).await) });
    let why = why.ok_or_else(|| {
        cannot_explain("the row is not a call; show it with `toolgate audit show`".to_owned())
    })?;
    if json {
        let was = AdmissionDecision::from_row(&row);
        let output = json!({
            "call": row.call, "turn": row.turn, "tool": row.tool, "at": row.at, "was": was, "now": now, "explanation": why,
        });
        return writeln!(out, "{output}");
    }
    let (style, error) = (decision_style(row.decision), row.outcome.error());
    let rule = row.rule.as_deref().map(|rule| format!(" · {}", sanitize(rule))).unwrap_or_default();
    let gate_text =
        if error.is_some() { format!(" {DIM}at{DIM:#} {}{rule}", row.gate) } else { String::new() };
    writeln!(
        out,
        "{style}{}{style:#} {BOLD}{}{BOLD:#} {}{gate_text}",
        row.decision,
        sanitize(&row.tool),
        sanitize(&row.arguments.to_string())
    )?;
    if let Some(error) = error {
        check::print_error(out, error)?;
    }
    let key = &row.key;
    writeln!(
        out,
        "      {DIM}{} session {} of {} with {}{DIM:#}",
        format_time(row.at),
        sanitize(&key.session),
        sanitize(&key.principal),
        sanitize(&key.agent)
    )?;
    match now {
        ReplayComparison::Same => {}
        ReplayComparison::Differs(now) => {
            writeln!(out, "      {RED}decided again: {}{RED:#}", sanitize(&now.to_string()))?
        }
        ReplayComparison::Undecidable(why) => {
            writeln!(out, "      {YELLOW}undecidable now{YELLOW:#}: {}", sanitize(&why))?
        }
        ReplayComparison::Circumstance(why) => {
            writeln!(out, "      {DIM}{}{DIM:#}", sanitize(&why))?
        }
    }
    check::print_steps(out, &why)
}
