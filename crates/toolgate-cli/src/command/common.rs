//! Provides filters, time parsing, tables and text output for the commands.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use anstyle::{AnsiColor, Style};
use indicatif::{ProgressBar, ProgressStyle};
use jiff::civil::Date;
use jiff::tz::TimeZone;
use serde::Serialize;
use serde_json::Value;
use toolgate::{Decision, Row, Timestamp};
use toolgate_store::{Ledger, LedgerReader, RowFilter};

pub(crate) const BOLD: Style = Style::new().bold();
pub(crate) const DIM: Style = Style::new().dimmed();
pub(crate) const GREEN: Style = AnsiColor::Green.on_default();
pub(crate) const RED: Style = AnsiColor::Red.on_default();
pub(crate) const CYAN: Style = AnsiColor::Cyan.on_default();
pub(crate) const YELLOW: Style = AnsiColor::Yellow.on_default();

/// Returns the path of the ledger, or an error if none is given.
pub(crate) fn ledger_path(store: Option<&Path>) -> io::Result<&Path> {
    store.ok_or_else(|| {
        io::Error::other("no ledger given; pass `--store PATH`, or set `store` in toolgate.toml")
    })
}

pub(crate) fn open_ledger(store: Option<&Path>) -> io::Result<Box<dyn LedgerReader>> {
    let ledger = Ledger::open(ledger_path(store)?).map_err(io::Error::other)?;
    Ok(Box::new(ledger))
}

/// At least 6 hexadecimal digits at the beginning or the end of an id.
#[derive(Debug, Clone)]
pub(crate) struct PartialId {
    /// The part as given.
    pub(crate) text: String,
    digits: String,
}

impl PartialId {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let trimmed = text.trim_start_matches('…').trim_end_matches('…');
        let digits = trimmed.replace('-', "").to_ascii_lowercase();
        let is_valid = digits.len() >= 6 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_valid.then(|| Self { text: trimmed.to_owned(), digits })
    }

    /// Returns true if an id begins or ends with these digits.
    pub(crate) fn matches(&self, name: &str) -> bool {
        let digits = name.replace('-', "");
        digits.starts_with(&self.digits) || digits.ends_with(&self.digits)
    }
}

/// Returns the only match, or `None`. Several matches are an error, so that the user chooses.
pub(crate) fn at_most_one<T: ToString>(mut found: Vec<T>, noun: &str) -> io::Result<Option<T>> {
    if found.len() > 1 {
        let names: Vec<String> = found.iter().take(5).map(ToString::to_string).collect();
        let ellipsis = if found.len() > names.len() { ", …" } else { "" };
        return Err(io::Error::other(format!(
            "several {noun} match: {}{ellipsis}",
            names.join(", ")
        )));
    }
    Ok(found.pop())
}

/// Output of a command that changes files. Ignores write errors, so that the command does not stop
/// half way.
pub(crate) struct IgnoreWriteErrors<W>(pub(crate) W);

impl<W: Write> Write for IgnoreWriteErrors<W> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let _ = self.0.write_all(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = self.0.flush();
        Ok(())
    }
}

/// Output of a command whose exit code is its result. Ignores a broken pipe.
pub(crate) struct IgnoreBrokenPipe<W>(pub(crate) W);

impl<W: Write> Write for IgnoreBrokenPipe<W> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        ignore_broken_pipe(self.0.write_all(text))?;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        ignore_broken_pipe(self.0.flush())
    }
}

fn ignore_broken_pipe(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Row filters of the command line.
#[derive(clap::Args, Clone)]
pub(crate) struct RowFilterArgs {
    /// Filter by start: a time (2026-11-15, today) or how long ago (2h, 7d).
    ///
    /// A time is like 2026-11-15T09:00:00Z, 2026-11-15, today or yesterday.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<Timestamp>,
    /// Filter by end: a time or how long ago; a day counts to its end.
    #[arg(long, value_name = "TIME", value_parser = parse_end_time)]
    until: Option<Timestamp>,
    /// Filter by tool.
    #[arg(long)]
    tool: Option<String>,
    /// Filter by agent.
    #[arg(long)]
    agent: Option<String>,
    /// Include rows of the canary, a self-test of the gateway.
    #[arg(long)]
    all: bool,
    /// Filter by principal.
    #[arg(long)]
    principal: Option<String>,
    /// Filter by session.
    #[arg(long)]
    session: Option<String>,
    /// Filter by decision: succeeded, failed, refused, replayed, signalled, settled.
    #[arg(long, value_parser = parse_decision)]
    decision: Option<Decision>,
    /// Filter by error code.
    #[arg(long)]
    code: Option<String>,
    /// Filter by the rule or hook that decided.
    #[arg(long)]
    rule: Option<String>,
    /// Filter by entity, such as customer_id=C-1001. Finds redacted values, too.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_entity)]
    entity: Option<(String, Value)>,
}

impl RowFilterArgs {
    pub(crate) fn to_filter(&self) -> RowFilter {
        RowFilter {
            since: self.since,
            until: self.until,
            tool: self.tool.clone(),
            agent: self.agent.clone(),
            excluded_agent: (!self.all && self.agent.is_none())
                .then(|| toolgate_mcp::CANARY.to_owned()),
            principal: self.principal.clone(),
            session: self.session.clone(),
            decision: self.decision,
            code: self.code.clone(),
            rule: self.rule.clone(),
            entity: self.entity.clone(),
            ..RowFilter::default()
        }
    }

    /// Returns the message for no matching rows. Lists the known entities if the name is unknown.
    pub(crate) fn no_rows_message(&self, ledger: &dyn LedgerReader) -> String {
        let message = "no matching rows".to_owned();
        let Some((name, _)) = &self.entity else { return message };
        match ledger.entity_names() {
            Ok(names) if !names.is_empty() && !names.contains(name) => {
                format!(
                    "{message}; no row has the entity `{}`, known entities: {}",
                    sanitize(name),
                    sanitize(&names.join(", "))
                )
            }
            _ => message,
        }
    }
}

/// Parses a day: a date, `today` or `yesterday`.
fn parse_day(text: &str) -> Option<Date> {
    let today = || Timestamp::now().to_zoned(TimeZone::UTC).date();
    match text {
        "today" => Some(today()),
        "yesterday" => today().yesterday().ok(),
        text => text.parse::<Date>().ok().filter(|_| text.len() == 10),
    }
}

fn start_of_day(day: Date) -> Option<Timestamp> {
    day.to_zoned(TimeZone::UTC).ok().map(|at| at.timestamp())
}

/// Parses a time. A day means its last nanosecond.
pub(crate) fn parse_end_time(text: &str) -> Result<Timestamp, String> {
    let next = parse_day(text).and_then(|day| start_of_day(day.tomorrow().ok()?));
    match next.and_then(|next| next.checked_sub(toolgate::SignedDuration::from_nanos(1)).ok()) {
        Some(last) => Ok(last),
        None => parse_time(text),
    }
}

pub(crate) fn parse_time(text: &str) -> Result<Timestamp, String> {
    if let Ok(at) = text.parse() {
        return Ok(at);
    }
    if let Some(at) = parse_day(text).and_then(start_of_day) {
        return Ok(at);
    }
    let ago = toolgate::clock::parse_duration(text)
        .ok_or("not a time: use 2026-11-15T09:00:00Z, 2026-11-15, today, yesterday, or a duration like 90s, 15m, 2h, 7d or 3w")?;
    // A duration that is too long means from the beginning.
    Ok(Timestamp::now().checked_sub(ago).unwrap_or(Timestamp::MIN))
}

pub(crate) fn parse_duration(text: &str) -> Result<toolgate::SignedDuration, String> {
    toolgate::clock::parse_duration(text)
        .ok_or_else(|| "not a duration: use a form like 90s, 15m, 2h, 7d or 3w".to_owned())
}

/// Parses a whole number.
pub(crate) fn parse_number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "expected a whole number, like 20".to_owned())
}

fn parse_decision(text: &str) -> Result<Decision, String> {
    let names = || Decision::ALL.map(Decision::name).join(", ");
    Decision::ALL
        .into_iter()
        .find(|decision| decision.name() == text)
        .ok_or_else(|| format!("expected one of {}", names()))
}

fn parse_entity(text: &str) -> Result<(String, Value), String> {
    let (name, value) =
        text.split_once('=').ok_or("expected NAME=VALUE, like customer_id=C-1001")?;
    Ok((name.to_owned(), Value::String(value.to_owned())))
}

/// A table without lines.
///
/// Columns in `cut_columns` are shortened to fit the terminal. If the terminal has no space, they
/// are dropped.
pub(crate) struct TextTable {
    head: Vec<String>,
    /// Columns that may be cut, with their minimum width. The last entry is cut first.
    cut_columns: Vec<(usize, usize)>,
    rows: Vec<Vec<(String, Style)>>,
}

impl TextTable {
    pub(crate) fn new(head: &[&str]) -> Self {
        Self {
            head: head.iter().map(|&head| head.to_owned()).collect(),
            cut_columns: Vec::new(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn with_cut_column(mut self, column: usize, least: usize) -> Self {
        self.cut_columns.push((column, least));
        self
    }

    pub(crate) fn push_row(&mut self, cells: impl IntoIterator<Item = (String, Style)>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(crate) fn push_plain(&mut self, cells: impl IntoIterator<Item = String>) {
        self.push_row(cells.into_iter().map(|cell| (cell, Style::new())));
    }

    pub(crate) fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let char_count = |text: &str| text.chars().count();
        let mut widths: Vec<usize> = self.head.iter().map(|head| char_count(head)).collect();
        for row in &self.rows {
            for (width, (cell, _)) in widths.iter_mut().zip(row) {
                *width = (*width).max(char_count(cell));
            }
        }
        let available_width =
            if io::stdout().is_terminal() { terminal_width() } else { usize::MAX };
        for (column, least) in self.cut_columns.iter().rev() {
            let total_width: usize =
                widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1);
            if let Some(width) = widths.get_mut(*column) {
                *width = width
                    .saturating_sub(total_width.saturating_sub(available_width))
                    .max((*least).min(*width));
            }
        }
        for (column, _) in self.cut_columns.iter().rev() {
            let total_width: usize =
                widths.iter().filter(|width| **width > 0).map(|width| width + 2).sum();
            if total_width > available_width.saturating_add(2)
                && let Some(width) = widths.get_mut(*column)
            {
                *width = 0;
            }
        }
        let mut line = |cells: &mut dyn Iterator<Item = (&str, Style)>| {
            let mut text = String::new();
            for ((cell, style), width) in cells.zip(&widths).filter(|(_, width)| **width > 0) {
                let cell = if char_count(cell) > *width {
                    cell.chars().take(width.saturating_sub(1)).chain(['…']).collect()
                } else {
                    cell.to_owned()
                };
                let padding = " ".repeat(width.saturating_sub(char_count(&cell)) + 2);
                let _ = std::fmt::Write::write_fmt(
                    &mut text,
                    format_args!("{style}{cell}{style:#}{padding}"),
                );
            }
            writeln!(out, "{}", text.trim_end())
        };
        line(&mut self.head.iter().map(|head| (head.as_str(), DIM)))?;
        self.rows
            .iter()
            .try_for_each(|row| line(&mut row.iter().map(|(cell, style)| (cell.as_str(), *style))))
    }
}

/// Returns true if standard output is a narrow terminal.
pub(crate) fn is_narrow() -> bool {
    io::stdout().is_terminal() && terminal_width() < 160
}

fn terminal_width() -> usize {
    let size = rustix::termios::tcgetwinsize(io::stdout()).map(|size| usize::from(size.ws_col));
    size.ok().filter(|columns| *columns > 0).unwrap_or(80)
}

/// Replaces control and format characters in untrusted text, so that the text cannot change the
/// terminal.
pub(crate) fn sanitize(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || is_format_char(c) { '\u{fffd}' } else { c }).collect()
}

/// Formats untrusted JSON for people. Control and format characters are written as JSON escapes.
pub(crate) fn to_safe_json(value: &impl Serialize) -> io::Result<String> {
    let text = serde_json::to_string_pretty(value)?;
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if c == '\n' || !(c.is_control() || is_format_char(c)) {
            escaped.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = std::fmt::Write::write_fmt(&mut escaped, format_args!("\\u{unit:04x}"));
        }
    }
    Ok(escaped)
}

/// Returns true for characters that change the text direction, break lines or are invisible.
fn is_format_char(c: char) -> bool {
    matches!(
        c,
        '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}'
    )
}

/// Returns the colour of a decision.
pub(crate) const fn decision_style(decision: Decision) -> Style {
    match decision {
        Decision::Succeeded => GREEN,
        Decision::Failed | Decision::Refused => RED,
        Decision::Replayed | Decision::Signalled => CYAN,
        Decision::Settled => YELLOW,
    }
}

/// Formats why a call was decided: the code and the rule, or the settlement.
pub(crate) fn describe_reason(row: &Row) -> String {
    let code = row.code().unwrap_or_default();
    sanitize(&match (&row.rule, &row.settles) {
        (_, Some(settled)) => format!("{} · by {}", settlement_text(row), settled.by),
        (Some(rule), _) if rule != code => format!("{code} · {rule}"),
        _ => code.to_owned(),
    })
}

/// Returns the text for the outcome of a settled call.
pub(crate) fn settlement_text(row: &Row) -> &'static str {
    match row.effects {
        toolgate::CallEffects::Done => "it happened",
        toolgate::CallEffects::None | toolgate::CallEffects::RolledBack => "it never happened",
        toolgate::CallEffects::Unknown => "unknown",
    }
}

/// Formats a time in UTC, to the second.
pub(crate) fn format_time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// Formats a duration with a unit.
pub(crate) fn format_nanos(nanos: u64) -> String {
    match nanos {
        0..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => format!("{}.{} µs", nanos / 1_000, nanos % 1_000 / 100),
        1_000_000..1_000_000_000 => {
            format!("{}.{} ms", nanos / 1_000_000, nanos % 1_000_000 / 100_000)
        }
        _ => format!("{}.{} s", nanos / 1_000_000_000, nanos % 1_000_000_000 / 100_000_000),
    }
}

/// Creates a progress bar, which is hidden with `--quiet` and without a terminal.
pub(crate) fn progress_bar(length: u64, label: &'static str) -> ProgressBar {
    if crate::is_quiet() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {bar:40} {human_pos}/{human_len} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length).with_style(style).with_message(label)
}

/// Formats a count with its noun in singular or plural.
pub(crate) fn format_count(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Indents each line by two spaces.
pub(crate) fn indent_lines(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_lasts_from_its_start_to_its_end() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        assert_eq!(parse_time("2026-10-31"), Ok(at("2026-10-31T00:00:00Z")));
        assert_eq!(parse_end_time("2026-10-31"), Ok(at("2026-10-31T23:59:59.999999999Z")));
        // An exact time is not extended to the end of its day.
        assert_eq!(parse_end_time("2026-10-31T09:00:00Z"), Ok(at("2026-10-31T09:00:00Z")));
        assert_eq!(parse_end_time("9999-12-31").is_ok(), parse_time("9999-12-31").is_ok());
        assert!(parse_end_time("2026-02-30").is_err() && parse_end_time("tomorrow").is_err());
    }
}
