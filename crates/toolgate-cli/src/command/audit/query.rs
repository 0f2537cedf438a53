//! Implements `audit query`, `show`, `stats` and `tail`.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;
use toolgate::{CallId, Decision, Gate, Outcome, Row};
use toolgate_store::{LatencyPercentiles, LedgerEntry, LedgerReader, RowFilter};

use super::CallIdArg;
use crate::command::common::{
    BOLD, DIM, RowFilterArgs, TextTable, decision_style, describe_reason, format_count,
    format_nanos, format_time, indent_lines, is_narrow, open_ledger, sanitize, to_safe_json,
};

pub(crate) fn query(
    filter_args: &RowFilterArgs,
    limit: usize,
    json: bool,
    store: Option<&Path>,
) -> io::Result<ExitCode> {
    let ledger = open_ledger(store)?;
    let filter = RowFilter {
        newest_first: true,
        limit: Some(limit.saturating_add(1)),
        ..filter_args.to_filter()
    };
    let mut entries = ledger.find(&filter).map_err(io::Error::other)?;
    let has_more = entries.len() > limit;
    entries.truncate(limit);
    entries.reverse();
    let mut out = anstream::stdout().lock();
    if json {
        entries.iter().try_for_each(|entry| writeln!(out, "{}", json!(entry)))?;
        return Ok(ExitCode::SUCCESS);
    }
    if entries.is_empty() {
        writeln!(out, "{}", filter_args.no_rows_message(&*ledger))?;
        return Ok(ExitCode::SUCCESS);
    }
    print_entries(&mut out, &entries)?;
    if has_more {
        writeln!(out, "{DIM}showing the newest {limit}; show more with `--limit`{DIM:#}")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print_entries(out: &mut impl Write, entries: &[LedgerEntry]) -> io::Result<()> {
    let caller_of = |row: &Row| sanitize(&format!("{} as {}", row.key.principal, row.key.agent));
    let first_caller = entries.first().map(|entry| caller_of(&entry.row));
    // A column with one value is omitted.
    let has_several_callers =
        entries.iter().any(|entry| Some(caller_of(&entry.row)) != first_caller);
    // If all rows are from one day, print the date once.
    let day_of = |row: &Row| format_time(row.at).split(' ').next().unwrap_or_default().to_owned();
    let common_day = entries
        .first()
        .map(|entry| day_of(&entry.row))
        .filter(|day| entries.iter().all(|entry| day_of(&entry.row) == *day));
    let time_of = |row: &Row| match &common_day {
        Some(_) => format_time(row.at).split(' ').nth(1).unwrap_or_default().to_owned(),
        None => format_time(row.at),
    };
    let (time_heading, is_narrow_terminal) = (common_day.as_deref().unwrap_or("time"), is_narrow());
    let mut table = match has_several_callers {
        true => TextTable::new(&[
            time_heading,
            "tool",
            "decision",
            "why",
            "session",
            "caller",
            "about",
            "call",
        ])
        .with_cut_column(1, 12)
        .with_cut_column(3, 8)
        .with_cut_column(4, 6)
        .with_cut_column(5, 8)
        .with_cut_column(6, 10),
        false => {
            TextTable::new(&[time_heading, "tool", "decision", "why", "session", "about", "call"])
                .with_cut_column(1, 12)
                .with_cut_column(3, 8)
                .with_cut_column(4, 6)
                .with_cut_column(5, 10)
        }
    };
    for LedgerEntry { row, .. } in entries {
        let plain = |text: String| (text, anstyle::Style::new());
        let mut cells = vec![
            plain(time_of(row)),
            plain(sanitize(&row.tool)),
            (row.decision.to_string(), decision_style(row.decision)),
            plain(describe_reason(row)),
            plain(sanitize(&row.key.session)),
        ];
        cells.extend(has_several_callers.then(|| plain(caller_of(row))));
        // In a narrow terminal, print the end of the call id, which `show` accepts.
        let call = row.call.to_string();
        let call = if is_narrow_terminal {
            call.get(call.len().saturating_sub(12)..).unwrap_or(&call).to_owned()
        } else {
            call
        };
        cells.extend([plain(describe_arguments(row)), plain(call)]);
        table.push_row(cells);
    }
    table.print(out)?;
    match first_caller.filter(|_| !has_several_callers) {
        Some(caller) => writeln!(out, "{DIM}all by {caller}{DIM:#}"),
        None => Ok(()),
    }
}

pub(crate) fn describe_arguments(row: &Row) -> String {
    // Without entities, show the most telling argument.
    if row.entities.is_empty() {
        let telling_names = ["command", "file_path", "filePath", "path", "url", "pattern"];
        let text = telling_names
            .iter()
            .find_map(|name| row.arguments.get(name).and_then(serde_json::Value::as_str));
        return sanitize(&text.unwrap_or_default().chars().take(60).collect::<String>());
    }
    let format_value =
        |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    sanitize(
        &row.entities
            .iter()
            .map(|(name, value)| format!("{name}={}", format_value(value)))
            .collect::<Vec<_>>()
            .join(" "),
    )
}

/// Returns the row of a call, or the draft row of a call whose outcome is unknown.
pub(crate) fn find_row(call: &CallIdArg, ledger: &dyn LedgerReader) -> io::Result<Row> {
    let call = call.resolve(ledger)?;
    let found_entry = ledger
        .rows_of_call(call)
        .map_err(io::Error::other)?
        .into_iter()
        .find(|entry| entry.row.call == call);
    if let Some(entry) = found_entry {
        return Ok(entry.row);
    }
    match pending_row(call, ledger)? {
        Some(row) => Ok((*row).clone()),
        None => Err(no_such_call_error(call, ledger.pruned_since(call).map_err(io::Error::other)?)),
    }
}

/// Returns the draft row of a pending call whose process died before it wrote a row.
fn pending_row(call: CallId, ledger: &dyn LedgerReader) -> io::Result<Option<Arc<Row>>> {
    let pending = ledger.pending_claims(toolgate::Timestamp::now()).map_err(io::Error::other)?;
    Ok(pending.into_iter().find(|intent| intent.call == call).and_then(|intent| intent.row))
}

/// Returns the error for a call that has no row.
fn no_such_call_error(call: CallId, pruned: Option<u64>) -> io::Error {
    io::Error::other(match pruned {
        Some(seq) => format!(
            "the ledger has no call {call}; rows up to {seq} were pruned since then, and it may be one of them"
        ),
        None => format!("the ledger has no call {call}; list calls with `toolgate audit query`"),
    })
}

pub(crate) fn show(
    call: &CallIdArg,
    receipt: bool,
    json: bool,
    store: Option<&Path>,
) -> io::Result<ExitCode> {
    let ledger = open_ledger(store)?;
    let call = call.resolve(&*ledger)?;
    let entries = ledger.rows_of_call(call).map_err(io::Error::other)?;
    let call_entry = entries.first().filter(|entry| entry.row.call == call);
    let pruned = if call_entry.is_none() {
        ledger.pruned_since(call).map_err(io::Error::other)?
    } else {
        None
    };
    if receipt {
        let receipt = ledger
            .sign_receipt(call_entry.ok_or_else(|| no_such_call_error(call, pruned))?)
            .map_err(io::Error::other)?;
        writeln!(io::stdout().lock(), "{}", json!(receipt))?;
        return Ok(ExitCode::SUCCESS);
    }
    if entries.is_empty() {
        if let Some(row) = pending_row(call, &*ledger)? {
            let mut out = anstream::stdout().lock();
            // A draft row has no sequence number and no hash.
            if json {
                return writeln!(out, "{}", json!({ "row": &*row })).map(|()| ExitCode::SUCCESS);
            }
            let status = if pruned.is_some() {
                "no longer in the ledger, or not yet"
            } else {
                "not in the ledger yet"
            };
            writeln!(out, "{DIM}{status}: the outcome is unknown{DIM:#}")?;
            return writeln!(out, "{}", to_safe_json(&*row)?).map(|()| ExitCode::SUCCESS);
        }
        return Err(no_such_call_error(call, pruned));
    }
    let mut out = anstream::stdout().lock();
    if call_entry.is_none() && !json {
        writeln!(out, "{DIM}the row of this call was pruned; this row settled it later{DIM:#}\n")?;
    }
    for entry in &entries {
        if json {
            writeln!(out, "{}", json!(entry))?;
        } else {
            print_entry(&mut out, entry)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn print_entry(out: &mut impl Write, entry: &LedgerEntry) -> io::Result<()> {
    let row = &entry.row;
    let style = decision_style(row.decision);
    let gate_text =
        if row.decision == Decision::Refused { format!(" at {}", row.gate) } else { String::new() };
    let reason = describe_reason(row);
    let reason = if reason.is_empty() { String::new() } else { format!(" {DIM}({reason}){DIM:#}") };
    writeln!(
        out,
        "{BOLD}{}{BOLD:#} {style}{}{style:#}{gate_text}{reason}",
        sanitize(&row.tool),
        row.decision
    )?;
    let key = &row.key;
    writeln!(out, "  {DIM}when{DIM:#}       {}, in {}", row.at, format_nanos(row.latency.total()))?;
    writeln!(
        out,
        "  {DIM}caller{DIM:#}     `{}` as `{}`, session `{}`",
        sanitize(&key.principal),
        sanitize(&key.agent),
        sanitize(&key.session)
    )?;
    writeln!(out, "  {DIM}call{DIM:#}       {}", row.call)?;
    writeln!(
        out,
        "  {DIM}row{DIM:#}        {} of the ledger, {} of its session",
        entry.seq, entry.n
    )?;
    writeln!(out, "  {DIM}config{DIM:#}     {}", row.config)?;
    if let Some(settled) = &row.settles {
        writeln!(out, "  {DIM}settles{DIM:#}    {}, by {}", settled.call, sanitize(&settled.by))?;
    }
    writeln!(out, "\n{BOLD}arguments{BOLD:#}\n{}", indent_lines(&to_safe_json(&row.arguments)?))?;
    let outcome = match &row.outcome {
        Outcome::Error(error) => to_safe_json(error)?,
        other => to_safe_json(&other.to_json())?,
    };
    writeln!(out, "{BOLD}outcome{BOLD:#}\n{}", indent_lines(&outcome))?;
    let facts: Vec<String> = to_safe_json(&row.facts)?
        .lines()
        .map(|line| describe_counter_line(line).unwrap_or_else(|| line.to_owned()))
        .collect();
    writeln!(out, "{BOLD}facts{BOLD:#}\n{}", indent_lines(&facts.join("\n")))?;
    if row.latency.total() > 0 {
        writeln!(out, "{BOLD}time by gate{BOLD:#}")?;
        for gate in Gate::ALL.into_iter().filter(|gate| row.latency.nanos_at(*gate) > 0) {
            writeln!(out, "  {gate:<9} {:>9}", format_nanos(row.latency.nanos_at(gate)))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Formats a line with a counter key for people: the rule or budget, and the owner of the counter.
fn describe_counter_line(line: &str) -> Option<String> {
    let indent: String = line.chars().take_while(|c| *c == ' ').collect();
    let (text, comma) = line.strip_suffix(',').map_or((line, ""), |text| (text, ","));
    let text: String = serde_json::from_str(text.trim()).ok()?;
    let in_currency = |currency: &str| {
        if currency.is_empty() { String::new() } else { format!(" in {currency}") }
    };
    let description = match text.split('\u{1f}').collect::<Vec<_>>().as_slice() {
        ["limit", _, rule, "entity", value, currency] => {
            format!("{rule} for {value}{}", in_currency(currency))
        }
        ["limit", _, rule, "principal", principal, currency] => {
            format!("{rule} for `{principal}`{}", in_currency(currency))
        }
        ["limit", _, rule, "session", _, session, currency] => {
            format!("{rule} for session `{session}`{}", in_currency(currency))
        }
        ["budget", scope, resource, ..] => format!("{resource} of the {scope}"),
        ["rate", principal] => format!("rate of `{principal}`"),
        _ => return None,
    };
    Some(format!("{indent}{}{comma}", sanitize(&description)))
}

pub(crate) fn stats(
    filter_args: &RowFilterArgs,
    json: bool,
    store: Option<&Path>,
) -> io::Result<ExitCode> {
    let stats =
        open_ledger(store)?.compute_stats(&filter_args.to_filter()).map_err(io::Error::other)?;
    let mut out = anstream::stdout().lock();
    if json {
        writeln!(out, "{}", json!(stats))?;
        return Ok(ExitCode::SUCCESS);
    }
    let (Some(from), Some(to)) = (stats.from, stats.to) else {
        writeln!(out, "no matching rows")?;
        return Ok(ExitCode::SUCCESS);
    };
    writeln!(
        out,
        "{BOLD}{}{BOLD:#} from {} to {}",
        format_count(stats.rows, "row"),
        format_time(from),
        format_time(to)
    )?;
    let decisions: Vec<String> =
        stats.decisions.iter().map(|(name, count)| format!("{count} {name}")).collect();
    writeln!(out, "{}\n", decisions.join(", "))?;
    let mut tools = TextTable::new(&["tool", "calls", "refused", "failed"]);
    for (tool, (calls, refused, failed)) in &stats.tools {
        tools.push_plain([
            sanitize(tool),
            calls.to_string(),
            refused.to_string(),
            failed.to_string(),
        ]);
    }
    print_table(&mut out, &tools)?;
    for (title, counts) in [
        ("refused by", &stats.refused_by),
        ("code", &stats.codes),
        ("would be refused by", &stats.observed),
    ] {
        if !counts.is_empty() {
            let mut rows = TextTable::new(&[title, "calls"]);
            let mut sorted: Vec<_> = counts.iter().collect();
            sorted.sort_by_key(|(name, count)| (std::cmp::Reverse(**count), (*name).clone()));
            sorted.into_iter().for_each(|(name, count)| {
                rows.push_plain([sanitize(name), count.to_string()]);
            });
            print_table(&mut out, &rows)?;
        }
    }
    let mut times = TextTable::new(&["gate", "median", "95 %", "99 %"]);
    for gate in Gate::ALL {
        if let Some(LatencyPercentiles { p50_ns, p95_ns, p99_ns }) = stats.latency.get(gate.name())
        {
            times.push_plain([
                gate.name().to_owned(),
                format_nanos(*p50_ns),
                format_nanos(*p95_ns),
                format_nanos(*p99_ns),
            ]);
        }
    }
    print_table(&mut out, &times)?;
    Ok(ExitCode::SUCCESS)
}

fn print_table(out: &mut impl Write, table: &TextTable) -> io::Result<()> {
    table.print(out)?;
    writeln!(out)
}

pub(crate) fn tail(
    filter_args: &RowFilterArgs,
    follow: bool,
    limit: usize,
    json: bool,
    store: Option<&Path>,
) -> io::Result<ExitCode> {
    let ledger = open_ledger(store)?;
    let first = RowFilter { newest_first: true, limit: Some(limit), ..filter_args.to_filter() };
    let mut seen_seq = ledger.last_seq().map_err(io::Error::other)?;
    let mut entries = ledger.find(&first).map_err(io::Error::other)?;
    entries.retain(|entry| entry.seq <= seen_seq);
    entries.reverse();
    for entry in &entries {
        print_line(entry, json)?;
    }
    if entries.is_empty() && !json {
        crate::print_note(&filter_args.no_rows_message(&*ledger));
    }
    if !follow {
        return Ok(ExitCode::SUCCESS);
    }
    loop {
        std::thread::sleep(Duration::from_millis(200));
        if is_reader_gone() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let filter = RowFilter { after_seq: Some(seen_seq), ..filter_args.to_filter() };
        let newest_seq = ledger.last_seq().map_err(io::Error::other)?;
        for entry in ledger.find(&filter).map_err(io::Error::other)? {
            seen_seq = seen_seq.max(entry.seq);
            print_line(&entry, json)?;
        }
        // Rows that do not match were read, too.
        seen_seq = seen_seq.max(newest_seq);
    }
}

/// Returns true if the reader of standard output is gone.
///
/// If this is unknown, the next write fails.
fn is_reader_gone() -> bool {
    let stdout = io::stdout();
    let mut poll_fds = [PollFd::new(&stdout, PollFlags::empty())];
    let has_polled = poll(&mut poll_fds, Some(&Timespec::default())).is_ok();
    has_polled
        && poll_fds
            .iter()
            .any(|poll_fd| poll_fd.revents().intersects(PollFlags::ERR | PollFlags::HUP))
}

fn print_line(entry: &LedgerEntry, json: bool) -> io::Result<()> {
    let row = &entry.row;
    if json {
        return writeln!(io::stdout().lock(), "{}", json!(entry));
    }
    let style = decision_style(row.decision);
    let mut out = anstream::stdout().lock();
    let line = format!("{} {}", describe_reason(row), describe_arguments(row));
    writeln!(
        out,
        "{DIM}{}{DIM:#} {style}{:<9}{style:#} {BOLD}{}{BOLD:#} {DIM}{}{DIM:#} {} {DIM}{}{DIM:#}",
        format_time(row.at),
        row.decision,
        sanitize(&row.tool),
        sanitize(&row.key.session),
        line.trim(),
        row.call
    )
}
