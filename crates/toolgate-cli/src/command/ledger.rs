//! What the verbs about a ledger have in common.

use std::io::{self, IsTerminal};
use std::path::Path;

use anstyle::{AnsiColor, Style};
use comfy_table::{ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use toolgate::{Decision, Row, Timestamp};
use toolgate_store::{Filter, Ledger};

pub(crate) const BOLD: Style = Style::new().bold();
pub(crate) const DIM: Style = Style::new().dimmed();
pub(crate) const GREEN: Style = AnsiColor::Green.on_default();
pub(crate) const RED: Style = AnsiColor::Red.on_default();
pub(crate) const CYAN: Style = AnsiColor::Cyan.on_default();
pub(crate) const YELLOW: Style = AnsiColor::Yellow.on_default();

/// The ledger that was named.
pub(crate) fn named(store: Option<&Path>) -> io::Result<&Path> {
    store.ok_or_else(|| io::Error::other("no ledger is named; say which one with `--store PATH`"))
}

pub(crate) fn open(store: Option<&Path>) -> io::Result<Ledger> {
    Ledger::open(named(store)?).map_err(io::Error::other)
}

/// Which rows are wanted.
#[derive(clap::Args, Clone)]
pub(crate) struct Wanted {
    /// Not before: a time (2026-11-15T09:00:00Z) or how long ago (2h, 7d).
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<Timestamp>,
    /// Not after: a time, or how long ago.
    #[arg(long, value_name = "TIME", value_parser = moment)]
    until: Option<Timestamp>,
    /// Of this tool.
    #[arg(long)]
    tool: Option<String>,
    /// Of this agent.
    #[arg(long)]
    agent: Option<String>,
    /// Of this principal.
    #[arg(long)]
    principal: Option<String>,
    /// Of this session.
    #[arg(long)]
    session: Option<String>,
    /// That ended so: succeeded, failed, refused, replayed, signalled, settled.
    #[arg(long, value_parser = decision)]
    decision: Option<Decision>,
    /// With this error code.
    #[arg(long)]
    code: Option<String>,
    /// That this rule or hook decided.
    #[arg(long)]
    rule: Option<String>,
    /// About this entity, such as customer_id=C-1001. One that was redacted is found, too.
    #[arg(long, value_name = "NAME=VALUE", value_parser = entity)]
    entity: Option<(String, Value)>,
}

impl Wanted {
    pub(crate) fn filter(&self) -> Filter {
        Filter {
            since: self.since,
            until: self.until,
            tool: self.tool.clone(),
            agent: self.agent.clone(),
            principal: self.principal.clone(),
            session: self.session.clone(),
            decision: self.decision,
            code: self.code.clone(),
            rule: self.rule.clone(),
            entity: self.entity.clone(),
            ..Filter::default()
        }
    }
}

pub(crate) fn moment(text: &str) -> Result<Timestamp, String> {
    if let Ok(at) = text.parse() {
        return Ok(at);
    }
    let ago = duration(text)?;
    Timestamp::now().checked_sub(ago).map_err(|e| e.to_string())
}

pub(crate) fn duration(text: &str) -> Result<toolgate::SignedDuration, String> {
    toolgate::clock::duration(text)
        .filter(|length| !length.is_negative())
        .ok_or_else(|| "a time is like 2026-11-15T09:00:00Z, a length of time like 90s, 15m, 2h or 7d".to_owned())
}

fn decision(text: &str) -> Result<Decision, String> {
    let names = || Decision::ALL.map(Decision::name).join(", ");
    Decision::ALL.into_iter().find(|decision| decision.name() == text).ok_or_else(|| format!("there are {}", names()))
}

fn entity(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or("an entity is like customer_id=C-1001")?;
    Ok((name.to_owned(), Value::String(value.to_owned())))
}

/// A table without lines, as wide as the terminal.
pub(crate) fn table<const N: usize>(head: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if !io::stdout().is_terminal() {
        table.set_content_arrangement(ContentArrangement::Disabled);
    }
    table.set_header(head.map(|cell| comfy_table::Cell::new(cell).add_attribute(comfy_table::Attribute::Dim)));
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table
}

/// The decision in a word, in the colour that it has everywhere.
pub(crate) const fn style(decision: Decision) -> Style {
    match decision {
        Decision::Succeeded => GREEN,
        Decision::Failed | Decision::Refused => RED,
        Decision::Replayed | Decision::Signalled => CYAN,
        Decision::Settled => YELLOW,
    }
}

pub(crate) fn colour(decision: Decision) -> comfy_table::Color {
    match decision {
        Decision::Succeeded => comfy_table::Color::Green,
        Decision::Failed | Decision::Refused => comfy_table::Color::Red,
        Decision::Replayed | Decision::Signalled => comfy_table::Color::Cyan,
        Decision::Settled => comfy_table::Color::Yellow,
    }
}

/// Why: the code, and the rule that said so.
pub(crate) fn why(row: &Row) -> String {
    let code = row.code().unwrap_or_default();
    match (&row.rule, &row.settles) {
        (_, Some(settled)) => format!("by {}", settled.by),
        (Some(rule), _) if rule != code => format!("{code} · {rule}"),
        _ => code.to_owned(),
    }
}

/// A time as a person reads it: to the second, in UTC.
pub(crate) fn time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// A length of time as a person reads it.
pub(crate) fn length(nanos: u64) -> String {
    match nanos {
        0..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => format!("{}.{} µs", nanos / 1_000, nanos % 1_000 / 100),
        1_000_000..1_000_000_000 => format!("{}.{} ms", nanos / 1_000_000, nanos % 1_000_000 / 100_000),
        _ => format!("{}.{} s", nanos / 1_000_000_000, nanos % 1_000_000_000 / 100_000_000),
    }
}

/// A bar on a terminal; nothing elsewhere.
pub(crate) fn bar(length: u64, what: &'static str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{msg} {bar:40} {human_pos}/{human_len} {eta}").unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length).with_style(style).with_message(what)
}

/// So many of something.
pub(crate) fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Two spaces before each line.
pub(crate) fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}
