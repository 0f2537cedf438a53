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
    results: &[DemoStepResult],
    summary: &DemoSummary,
    accounts: &SharedDeskAccounts,
) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    writeln!(out, "{BOLD}The refund desk{BOLD:#}")?;
    writeln!(
        out,
        "Five tools, six rules, a scripted model. It does its work, and then tries to break the rules."
    )?;
    let mut has_attack_heading = false;
    for (index, result) in results.iter().enumerate() {
        if index == 0 {
            writeln!(
                out,
                "\n{BOLD}── The work ──────────────────────────────────────────────────{BOLD:#}"
            )?;
        }
        if result.step.is_attack() && !has_attack_heading {
            has_attack_heading = true;
            writeln!(
                out,
                "\n{BOLD}── Attacks ───────────────────────────────────────────────────{BOLD:#}"
            )?;
        }
        print_step(&mut out, index + 1, result)?;
    }
    print_summary(&mut out, summary, accounts)
}

fn print_step(out: &mut impl Write, number: usize, result: &DemoStepResult) -> io::Result<()> {
    let (style, mark) = match (&result.answer.outcome, result.replayed) {
        (_, true) => (CYAN, "↺ answered from the ledger"),
        (Outcome::Success(_), _) => (GREEN, "✓ ran"),
        (_, _) if result.ran => (RED, "✗ ran and failed"),
        _ => (RED, "✗ denied"),
    };
    writeln!(
        out,
        "\n{number:>2}  {BOLD}{}{BOLD:#}  {DIM}“{}”{DIM:#}",
        result.step.name, result.step.reasoning
    )?;
    writeln!(out, "    {DIM}call{DIM:#}    {} {}", result.step.tool, result.step.arguments)?;
    let rule = result.rule.as_ref().map(|rule| format!(" · {rule}")).unwrap_or_default();
    let gate_text = if result.ran {
        String::new()
    } else {
        format!(" {DIM}at{DIM:#} {}{rule}", result.answer.gate)
    };
    writeln!(out, "    {DIM}gate{DIM:#}    {style}{mark}{style:#}{gate_text}")?;
    match &result.answer.outcome {
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
    accounts: &SharedDeskAccounts,
) -> io::Result<()> {
    let accounts = accounts.lock();
    writeln!(
        out,
        "\n{BOLD}── Accounts of the desk ──────────────────────────────────────{BOLD:#}\n"
    )?;
    for payment in &accounts.payments {
        writeln!(
            out,
            "    paid ${} to {} for order {}",
            payment.amount, payment.customer, payment.order
        )?;
    }
    for case in &accounts.escalations {
        writeln!(out, "    escalated: order {case}")?;
    }
    for payment in accounts.forbidden_payments() {
        writeln!(
            out,
            "    {RED}leaked: ${} to {} for order {}{RED:#}",
            payment.amount, payment.customer, payment.order
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
