//! Prints the demo as text.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use toolgate::Outcome;

use super::{DemoStepResult, DemoSummary};
use crate::command::demo::accounts::SharedDeskAccounts;

const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();
const GREEN: Style = AnsiColor::Green.on_default();
const RED: Style = AnsiColor::Red.on_default();
const CYAN: Style = AnsiColor::Cyan.on_default();

pub(crate) fn print_demo(
    played: &[DemoStepResult],
    summary: &DemoSummary,
    books: &SharedDeskAccounts,
) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    writeln!(out, "{BOLD}The refund desk{BOLD:#}")?;
    writeln!(
        out,
        "Five tools, six rules, a scripted model. It does its work, and then tries to break the rules."
    )?;
    let mut escaping = false;
    for (index, p) in played.iter().enumerate() {
        if index == 0 {
            writeln!(
                out,
                "\n{BOLD}── The work ──────────────────────────────────────────────────{BOLD:#}"
            )?;
        }
        if p.step.is_attack() && !escaping {
            escaping = true;
            writeln!(
                out,
                "\n{BOLD}── Attacks ───────────────────────────────────────────────────{BOLD:#}"
            )?;
        }
        print_step(&mut out, index + 1, p)?;
    }
    print_summary(&mut out, summary, books)
}

fn print_step(out: &mut impl Write, number: usize, p: &DemoStepResult) -> io::Result<()> {
    let (style, mark) = match (&p.answer.outcome, p.replayed) {
        (_, true) => (CYAN, "↺ answered from the ledger"),
        (Outcome::Success(_), _) => (GREEN, "✓ ran"),
        (_, _) if p.ran => (RED, "✗ ran and failed"),
        _ => (RED, "✗ denied"),
    };
    writeln!(
        out,
        "\n{number:>2}  {BOLD}{}{BOLD:#}  {DIM}“{}”{DIM:#}",
        p.step.name, p.step.reasoning
    )?;
    writeln!(out, "    {DIM}call{DIM:#}    {} {}", p.step.tool, p.step.arguments)?;
    let rule = p.rule.as_ref().map(|rule| format!(" · {rule}")).unwrap_or_default();
    let place =
        if p.ran { String::new() } else { format!(" {DIM}at{DIM:#} {}{rule}", p.answer.gate) };
    writeln!(out, "    {DIM}gate{DIM:#}    {style}{mark}{style:#}{place}")?;
    match &p.answer.outcome {
        Outcome::Success(output) if output.value.is_null() => {
            writeln!(
                out,
                "    {DIM}result{DIM:#}  nothing found {DIM}(an answer, not an error){DIM:#}"
            )
        }
        Outcome::Success(output) => writeln!(out, "    {DIM}result{DIM:#}  {}", output.for_model()),
        Outcome::Signal(signal) => writeln!(out, "    {DIM}result{DIM:#}  {signal:?}"),
        Outcome::Error(error) => {
            let retry = if error.retryable { ", retryable" } else { "" };
            writeln!(
                out,
                "    {DIM}result{DIM:#}  {}{} {}{retry}{}: {}",
                BOLD,
                error.category,
                error.code,
                BOLD.render_reset(),
                error.message
            )?;
            match (&error.next, &error.redirect_tool) {
                (Some(next), _) => {
                    writeln!(out, "            {CYAN}next{CYAN:#} {} {}", next.tool, next.arguments)
                }
                (None, Some(tool)) => writeln!(out, "            {CYAN}instead{CYAN:#} {tool}"),
                (None, None) => Ok(()),
            }
        }
    }
}

fn print_summary(
    out: &mut impl Write,
    summary: &DemoSummary,
    books: &SharedDeskAccounts,
) -> io::Result<()> {
    let books = books.lock();
    writeln!(
        out,
        "\n{BOLD}── Accounts of the desk ──────────────────────────────────────{BOLD:#}\n"
    )?;
    for paid in &books.payments {
        writeln!(out, "    paid ${} to {} for order {}", paid.amount, paid.customer, paid.order)?;
    }
    for case in &books.escalations {
        writeln!(out, "    escalated: order {case}")?;
    }
    for paid in books.forbidden_payments() {
        writeln!(
            out,
            "    {RED}leaked: ${} to {} for order {}{RED:#}",
            paid.amount, paid.customer, paid.order
        )?;
    }
    let style = if summary.leaked == 0 { GREEN } else { RED };
    let DemoSummary { asked, ran, refused, replayed, leaked } = summary;
    let answered = format!("{ran} ran · {refused} denied · {replayed} answered from the ledger");
    writeln!(out, "\n{asked} calls · {answered} · {style}{BOLD}{leaked} leaked{BOLD:#}")
}

/// Prints commands for the kept ledger.
pub(crate) fn print_ledger_commands(path: &std::path::Path) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    let path = path.display();
    writeln!(out, "\n{BOLD}The ledger is in {path}{BOLD:#}")?;
    writeln!(out, "  toolgate audit query --store {path}     {DIM}show recorded calls{DIM:#}")?;
    writeln!(
        out,
        "  toolgate audit verify --store {path}    {DIM}check the ledger for tampering{DIM:#}"
    )
}
