//! `toolgate backtest`: recorded traffic against other rules.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use toolgate::json::Digest;
use toolgate::{Agent, Backtest, Change, Compared, Definition, Timestamp};
use toolgate_store::{Filter, Ledger};

use super::ledger::{BOLD, DIM, GREEN, RED, YELLOW, bar, clean, counted, moment, named, open, time};

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
    /// Why calls were undecidable.
    why: BTreeMap<String, u64>,
}

pub(crate) fn run(args: &Args, store: Option<&Path>) -> io::Result<ExitCode> {
    let ledger = open(store)?;
    let name = agent_name(&ledger, args.agent.as_deref())?;
    let files = read_files(&args.config)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tally = runtime.block_on(play(named(store)?, &ledger, &name, files, args))?;
    let mut out = anstream::stdout().lock();
    if args.json {
        writeln!(
            out,
            "{}",
            json!({ "summary": { "calls": tally.calls, "same": tally.same, "changed": tally.changed, "counterfactual": tally.counterfactual,
                "undecidable": tally.undecidable, "circumstance": tally.circumstance } })
        )?;
    } else {
        for (why, count) in &tally.why {
            writeln!(out, "{YELLOW}{} undecidable{YELLOW:#}: {}", counted(*count, "call"), clean(why))?;
        }
        let style = if tally.changed == 0 { GREEN } else { RED };
        writeln!(
            out,
            "{}{BOLD}{}{BOLD:#}: {} would be decided the same, {style}{} otherwise{style:#} ({} of them counterfactual), {} undecidable, {} taken as they are",
            if tally.changed > 0 { "\n" } else { "" },
            counted(tally.calls, "call"),
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

/// The rules that are to be tried.
fn read_files(files: &[PathBuf]) -> io::Result<Vec<(String, String)>> {
    let read = |file: &PathBuf| {
        let text = std::fs::read_to_string(file).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", file.display())))?;
        Ok((file.display().to_string(), text))
    };
    files.iter().map(read).collect()
}

/// An agent as it was recorded, and the same with the rules that are to be tried.
fn agents(ledger: &Ledger, config: Digest, files: &[(String, String)]) -> Result<(Agent, Agent), Unplayable> {
    let text = ledger.definition(config).ok().flatten().ok_or(Unplayable::Unknown)?;
    let definition = Definition::parse(&text).map_err(|_| Unplayable::Unknown)?;
    let then = definition.clone().build().map_err(|_| Unplayable::Unknown)?;
    let now = definition
        .with_policies(files.iter().cloned())
        .build()
        .map_err(|error| Unplayable::Rules(error.render(io::stderr().is_terminal())))?;
    Ok((then, now))
}

/// Why a configuration cannot be played.
enum Unplayable {
    Unknown,
    Rules(String),
}

async fn play(path: &Path, ledger: &Ledger, name: &str, files: Vec<(String, String)>, args: &Args) -> io::Result<Tally> {
    // Rules that do not load on the newest configuration are a mistake, and not a result.
    let newest = Filter { agent: Some(name.to_owned()), newest_first: true, most: Some(1), ..Filter::default() };
    let newest = ledger.find(&newest).map_err(io::Error::other)?;
    let config = newest.first().ok_or_else(|| io::Error::other(format!("the ledger has no calls of an agent `{name}`")))?.row.config;
    let agent = match agents(ledger, config, &files) {
        Ok((_, agent)) => agent,
        Err(Unplayable::Rules(why)) => return Err(io::Error::other(format!("the configuration does not load\n\n{why}"))),
        Err(Unplayable::Unknown) => return Err(io::Error::other(format!("the ledger has no configuration of the agent `{name}`"))),
    };
    let from = args.since.unwrap_or(Timestamp::MIN);
    let warm = agent.looks_back().and_then(|back| from.checked_sub(back).ok());
    let rows = ledger.index(name, warm, args.until).map_err(io::Error::other)?;
    let first = Filter { agent: Some(name.to_owned()), since: args.since, until: args.until, most: Some(1), ..Filter::default() };
    let Some(first) = ledger.find(&first).map_err(io::Error::other)?.first().map(|entry| entry.seq) else {
        return Err(io::Error::other("no calls are recorded in this period; look at `--since` and `--until`"));
    };
    let own = Ledger::open(path).map_err(io::Error::other)?;
    let mut backtest = Backtest::new(move |config| match agents(&own, config, &files) {
        Ok(both) => Ok(both),
        Err(Unplayable::Unknown) => Err("its configuration cannot be read".to_owned()),
        Err(Unplayable::Rules(_)) => Err("the new rules do not load on the tools of its time".to_owned()),
    });
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
                Compared::Undecidable(why) => {
                    tally.undecidable += 1;
                    *tally.why.entry(why.clone()).or_default() += 1;
                }
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
        clean(&change.tool),
        clean(&change.key.session),
        change.call
    )?;
    writeln!(out, "  was {}", change.was)?;
    let message = match now {
        toolgate::Ruling::Refused { message, .. } => format!(": {}", clean(message)),
        _ => String::new(),
    };
    writeln!(out, "  now {RED}{now}{RED:#}{message}")
}
