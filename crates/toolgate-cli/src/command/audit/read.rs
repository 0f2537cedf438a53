//! Looking.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::Cell;
use serde_json::json;
use toolgate::store::StoreError;
use toolgate::{CallId, Decision, Gate, Outcome, Row};
use toolgate_store::{Entry, Filter};

use super::super::ledger::{BOLD, DIM, Wanted, bar, colour, indented, length, open, style, table, time, why};

fn stored(error: io::Error) -> StoreError {
    StoreError(error.to_string())
}

/// An error of the output that came back as one of the store is one of the output still.
fn told(error: StoreError) -> io::Error {
    if error.0.contains("Broken pipe") { io::ErrorKind::BrokenPipe.into() } else { io::Error::other(error) }
}

pub(super) fn query(wanted: &Wanted, limit: usize, json: bool, store: Option<&Path>) -> io::Result<ExitCode> {
    let ledger = open(store)?;
    let filter = Filter { newest_first: true, most: Some(limit.saturating_add(1)), ..wanted.filter() };
    let mut entries = ledger.find(&filter).map_err(io::Error::other)?;
    let more = entries.len() > limit;
    entries.truncate(limit);
    entries.reverse();
    if json {
        let mut out = io::stdout().lock();
        for entry in &entries {
            writeln!(out, "{}", json!(entry))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if entries.is_empty() {
        anstream::println!("nothing is recorded that fits");
        return Ok(ExitCode::SUCCESS);
    }
    anstream::println!("{}", listed(&entries));
    if more {
        anstream::println!("{DIM}these are the newest {limit}; more with `--limit`{DIM:#}");
    }
    Ok(ExitCode::SUCCESS)
}

fn listed(entries: &[Entry]) -> String {
    let mut table = table(["time", "session", "tool", "decision", "why", "about", "call"]);
    for Entry { row, .. } in entries {
        table.add_row([
            Cell::new(time(row.at)),
            Cell::new(&row.key.session),
            Cell::new(&row.tool),
            Cell::new(row.decision).fg(colour(row.decision)),
            Cell::new(why(row)),
            Cell::new(about(row)),
            Cell::new(row.call),
        ]);
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

fn about(row: &Row) -> String {
    let plain = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    row.entities.iter().map(|(name, value)| format!("{name}={}", plain(value))).collect::<Vec<_>>().join(" ")
}

pub(super) fn show(call: CallId, json: bool, store: Option<&Path>) -> io::Result<ExitCode> {
    let entries = open(store)?.show(call).map_err(io::Error::other)?;
    if entries.is_empty() {
        return Err(io::Error::other(format!("the ledger has no call {call}; `toolgate audit query` lists those it has")));
    }
    let mut out = anstream::stdout().lock();
    for entry in &entries {
        if json {
            writeln!(out, "{}", json!(entry))?;
        } else {
            shown(&mut out, entry)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn shown(out: &mut impl Write, entry: &Entry) -> io::Result<()> {
    let row = &entry.row;
    let style = style(row.decision);
    let place = if row.decision == Decision::Refused { format!(" at {}", row.gate) } else { String::new() };
    let why = why(row);
    let why = if why.is_empty() { String::new() } else { format!(" {DIM}({why}){DIM:#}") };
    writeln!(out, "{BOLD}{}{BOLD:#} {style}{}{style:#}{place}{why}", row.tool, row.decision)?;
    let key = &row.key;
    writeln!(out, "  {DIM}when{DIM:#}       {}, in {}", row.at, length(row.latency.total()))?;
    writeln!(out, "  {DIM}who{DIM:#}        `{}` as `{}`, session `{}`", key.principal, key.agent, key.session)?;
    writeln!(out, "  {DIM}call{DIM:#}       {}", row.call)?;
    writeln!(out, "  {DIM}row{DIM:#}        {} of the ledger, {} of its session", entry.seq, entry.n)?;
    writeln!(out, "  {DIM}config{DIM:#}     {}", row.config)?;
    if let Some(settled) = &row.settles {
        writeln!(out, "  {DIM}settles{DIM:#}    {}, by {}", settled.call, settled.by)?;
    }
    writeln!(out, "\n{BOLD}asked{BOLD:#}\n{}", indented(&serde_json::to_string_pretty(&row.arguments)?))?;
    let what = match &row.outcome {
        Outcome::Error(error) => serde_json::to_string_pretty(error)?,
        other => serde_json::to_string_pretty(&other.to_json())?,
    };
    writeln!(out, "{BOLD}came to{BOLD:#}\n{}", indented(&what))?;
    writeln!(out, "{BOLD}decided on{BOLD:#}\n{}", indented(&serde_json::to_string_pretty(&row.facts)?))?;
    if row.latency.total() > 0 {
        writeln!(out, "{BOLD}time by gate{BOLD:#}")?;
        for gate in Gate::ALL.into_iter().filter(|gate| row.latency.at(*gate) > 0) {
            writeln!(out, "  {gate:<9} {:>9}", length(row.latency.at(gate)))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

pub(super) fn export(wanted: &Wanted, out: Option<&Path>, store: Option<&Path>) -> io::Result<ExitCode> {
    let ledger = open(store)?;
    let filter = wanted.filter();
    let total = if out.is_some() && io::stderr().is_terminal() { ledger.count(&filter).map_err(io::Error::other)? } else { 0 };
    let bar = bar(total, "exporting");
    let file: Box<dyn Write> = match out {
        Some(path) => Box::new(File::create(path).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?),
        None => Box::new(io::stdout().lock()),
    };
    let mut file = BufWriter::new(file);
    let mut count = 0_u64;
    ledger
        .query(&filter, |entry| {
            serde_json::to_writer(&mut file, &entry).map_err(|e| stored(e.into()))?;
            file.write_all(b"\n").map_err(stored)?;
            count += 1;
            if total > 0 {
                bar.set_position(count);
            }
            Ok(true)
        })
        .map_err(told)?;
    file.flush()?;
    bar.finish_and_clear();
    if let Some(path) = out {
        anstream::println!("{count} rows in {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn stats(wanted: &Wanted, json: bool, store: Option<&Path>) -> io::Result<ExitCode> {
    let stats = open(store)?.stats(&wanted.filter()).map_err(io::Error::other)?;
    if json {
        println!("{}", json!(stats));
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = anstream::stdout().lock();
    let (Some(from), Some(to)) = (stats.from, stats.to) else {
        writeln!(out, "nothing is recorded that fits")?;
        return Ok(ExitCode::SUCCESS);
    };
    writeln!(out, "{BOLD}{} rows{BOLD:#} from {} to {}", stats.rows, time(from), time(to))?;
    let decisions: Vec<String> = stats.decisions.iter().map(|(name, count)| format!("{count} {name}")).collect();
    writeln!(out, "{}\n", decisions.join(", "))?;
    let mut tools = table(["tool", "calls", "refused", "failed"]);
    for (tool, (calls, refused, failed)) in &stats.tools {
        tools.add_row([tool.clone(), calls.to_string(), refused.to_string(), failed.to_string()]);
    }
    print_table(&mut out, &tools)?;
    for (title, counts) in [("refused by", &stats.refused_by), ("code", &stats.codes), ("would be refused by", &stats.observed)] {
        if !counts.is_empty() {
            let mut rows = table([title, "calls"]);
            let mut sorted: Vec<_> = counts.iter().collect();
            sorted.sort_by_key(|(name, count)| (std::cmp::Reverse(**count), (*name).clone()));
            sorted.into_iter().for_each(|(name, count)| {
                rows.add_row([name.clone(), count.to_string()]);
            });
            print_table(&mut out, &rows)?;
        }
    }
    let mut times = table(["gate", "median", "95 %", "99 %"]);
    for gate in Gate::ALL {
        if let Some([median, most, nearly_all]) = stats.latency.get(gate.name()) {
            times.add_row([gate.name().to_owned(), length(*median), length(*most), length(*nearly_all)]);
        }
    }
    print_table(&mut out, &times)?;
    Ok(ExitCode::SUCCESS)
}

fn print_table(out: &mut impl Write, table: &comfy_table::Table) -> io::Result<()> {
    for line in table.lines() {
        writeln!(out, "{}", line.trim_end())?;
    }
    writeln!(out)
}

pub(super) fn tail(wanted: &Wanted, follow: bool, limit: usize, json: bool, store: Option<&Path>) -> io::Result<ExitCode> {
    let ledger = open(store)?;
    let first = Filter { newest_first: true, most: Some(limit), ..wanted.filter() };
    let mut after = ledger.last().map_err(io::Error::other)?;
    let mut entries = ledger.find(&first).map_err(io::Error::other)?;
    entries.retain(|entry| entry.seq <= after);
    entries.reverse();
    for entry in &entries {
        line(entry, json)?;
    }
    if !follow {
        return Ok(ExitCode::SUCCESS);
    }
    loop {
        std::thread::sleep(Duration::from_millis(200));
        let filter = Filter { after: Some(after), ..wanted.filter() };
        let until = ledger.last().map_err(io::Error::other)?;
        for entry in ledger.find(&filter).map_err(io::Error::other)? {
            after = after.max(entry.seq);
            line(&entry, json)?;
        }
        // What did not fit was looked at, too.
        after = after.max(until);
    }
}

fn line(entry: &Entry, json: bool) -> io::Result<()> {
    let row = &entry.row;
    if json {
        return writeln!(io::stdout().lock(), "{}", json!(entry));
    }
    let style = style(row.decision);
    let mut out = anstream::stdout().lock();
    let line = format!("{} {}", why(row), about(row));
    writeln!(
        out,
        "{DIM}{}{DIM:#} {style}{:<9}{style:#} {BOLD}{}{BOLD:#} {DIM}{}{DIM:#} {}",
        time(row.at),
        row.decision,
        row.tool,
        row.key.session,
        line.trim()
    )
}
