//! `toolgate backtest`: recorded traffic against other rules.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use toolgate::{Agent, Backtest, Change, Compared, Definition, Timestamp};
use toolgate_store::{Filter, Ledger};

use super::ledger::{BOLD, DIM, GREEN, RED, YELLOW, bar, moment, open, time};

/// Run recorded traffic of a period against a changed configuration, and list every decision that would change.
///
/// Calls are played in the order in which they came, by the clock they came by, after a warm-up with what came before, as
/// far as a rule looks back. Results are taken as they were recorded; no tool is run. After the first effect that would
/// have gone otherwise, what follows in a session might not have come at all, and is marked as counterfactual.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if no decision would change, 1 if one would, 2 if it could not be done.\n\nExamples:\n  toolgate backtest --store ledger.db --config policy.toml\n  toolgate backtest --store ledger.db --config policy.toml --since 30d --json"
)]
pub(crate) struct Args {
    /// The policy file to try; again for several. The tools are those of the recorded configuration.
    #[arg(long, value_name = "FILE", required = true)]
    config: Vec<PathBuf>,
    /// The agent, where the ledger has several.
    #[arg(long)]
    agent: Option<String>,
    /// From when on: a time, or how long ago.
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<Timestamp>,
    /// Until when: a time, or how long ago.
    #[arg(long, value_name = "TIME", value_parser = moment)]
    until: Option<Timestamp>,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Default)]
struct Tally {
    calls: u64,
    same: u64,
    changed: u64,
    counterfactual: u64,
    undecidable: u64,
    circumstance: u64,
}

pub(crate) fn run(args: &Args, store: Option<&Path>) -> io::Result<ExitCode> {
    let ledger = open(store)?;
    let name = agent_name(&ledger, args.agent.as_deref())?;
    let agent = changed(&ledger, &name, &args.config)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tally = runtime.block_on(play(&ledger, &name, agent, args))?;
    let mut out = anstream::stdout().lock();
    if args.json {
        writeln!(
            out,
            "{}",
            json!({ "summary": { "calls": tally.calls, "same": tally.same, "changed": tally.changed, "counterfactual": tally.counterfactual,
                "undecidable": tally.undecidable, "circumstance": tally.circumstance } })
        )?;
    } else {
        let style = if tally.changed == 0 { GREEN } else { RED };
        writeln!(
            out,
            "{}{BOLD}{} calls{BOLD:#}: {} would be decided the same, {style}{} otherwise{style:#} ({} of them counterfactual), {} undecidable, {} taken as they are",
            if tally.changed > 0 { "\n" } else { "" },
            tally.calls,
            tally.same,
            tally.changed,
            tally.counterfactual,
            tally.undecidable,
            tally.circumstance
        )?;
    }
    Ok(if tally.changed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn agent_name(ledger: &Ledger, wanted: Option<&str>) -> io::Result<String> {
    if let Some(name) = wanted {
        return Ok(name.to_owned());
    }
    let mut names: Vec<String> = ledger.sessions(None).map_err(io::Error::other)?.into_iter().map(|key| key.agent.to_string()).collect();
    names.sort();
    names.dedup();
    match names.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(io::Error::other("the ledger is empty")),
        several => Err(io::Error::other(format!("the ledger has several agents; say which one with `--agent`: {}", several.join(", ")))),
    }
}

/// The agent as it was last recorded, with the rules that are to be tried.
fn changed(ledger: &Ledger, name: &str, files: &[PathBuf]) -> io::Result<Agent> {
    let mut definition = None;
    let newest = Filter { agent: Some(name.to_owned()), newest_first: true, ..Filter::default() };
    ledger
        .query(&newest, |entry| {
            definition = ledger.definition(entry.row.config)?;
            Ok(definition.is_none())
        })
        .map_err(io::Error::other)?;
    let definition = definition.ok_or_else(|| io::Error::other(format!("the ledger has no configuration of an agent `{name}`")))?;
    let definition = Definition::parse(&definition).map_err(io::Error::other)?;
    let mut texts = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", file.display())))?;
        texts.push((file.display().to_string(), text));
    }
    let agent = definition.with_policies(texts).build();
    agent.map_err(|error| io::Error::other(format!("the configuration does not load\n\n{}", error.render(io::stderr().is_terminal()))))
}

async fn play(ledger: &Ledger, name: &str, agent: Agent, args: &Args) -> io::Result<Tally> {
    let from = args.since.unwrap_or(Timestamp::MIN);
    let warm = agent.looks_back().and_then(|back| from.checked_sub(back).ok());
    let rows = ledger.index(name, warm, args.until).map_err(io::Error::other)?;
    let first = Filter { agent: Some(name.to_owned()), since: args.since, most: Some(1), ..Filter::default() };
    let first = ledger.find(&first).map_err(io::Error::other)?.first().map_or(u64::MAX, |entry| entry.seq);
    let mut backtest = Backtest::new([agent])?;
    let bar = bar(2 * rows.len() as u64, "backtesting");
    let (mut tally, mut out) = (Tally::default(), anstream::stdout().lock());
    let fetch = |seq| {
        bar.inc(1);
        ledger.row(seq).map_err(io::Error::other)?.ok_or_else(|| io::Error::other(format!("row {seq} is gone")))
    };
    backtest
        .play(&rows, first, fetch, |row, change| {
            // Of a period, only what came in it.
            if row.at < from {
                return Ok(());
            }
            tally.calls += 1;
            match &change.now {
                Compared::Same => tally.same += 1,
                Compared::Undecidable(_) => tally.undecidable += 1,
                Compared::Circumstance(_) => tally.circumstance += 1,
                Compared::Differs(_) => {
                    tally.changed += 1;
                    tally.counterfactual += u64::from(change.counterfactual);
                }
            }
            if args.json && change.now != Compared::Same {
                writeln!(out, "{}", json!(change))?;
            } else if !args.json {
                bar.suspend(|| shown(&mut out, &change))?;
            }
            Ok(())
        })
        .await?;
    bar.finish_and_clear();
    Ok(tally)
}

fn shown(out: &mut impl Write, change: &Change) -> io::Result<()> {
    let Compared::Differs(now) = &change.now else { return Ok(()) };
    let maybe = if change.counterfactual { format!(" {YELLOW}counterfactual{YELLOW:#}") } else { String::new() };
    writeln!(
        out,
        "{DIM}{}{DIM:#} {BOLD}{}{BOLD:#} {DIM}session {} call {}{DIM:#}{maybe}",
        time(change.at),
        change.tool,
        change.key.session,
        change.call
    )?;
    writeln!(out, "  was {}", change.was)?;
    let message = match now {
        toolgate::Ruling::Refused { message, .. } => format!(": {message}"),
        _ => String::new(),
    };
    writeln!(out, "  now {RED}{now}{RED:#}{message}")
}
