//! Implements `toolgate demo`: a scripted model works at a refund desk, and then tries to break its
//! rules.

mod accounts;
mod policy;
mod render;
mod script;
mod tools;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::{Answer, Decision, MemoryStore, Session, Toolgate};
use toolgate_store::{Ledger, SqliteStore};

use crate::command::demo::accounts::SharedDeskAccounts;
use script::{DemoPart, DemoStep};

/// Run a demo: a scripted model works at a refund desk and attacks it.
///
/// Everything runs in this process: no server, no API key, no network. The result is checked
/// against the accounts of the desk. With `--store` the ledger is kept for `toolgate audit`,
/// `toolgate replay` and `toolgate backtest`.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if no forbidden refund was paid, 1 if one was, 2 on an error.\n\nExamples:\n  toolgate demo\n  toolgate demo --store ledger.db\n  toolgate demo --json | tail -n 1"
)]
pub(crate) struct Args {
    /// Print JSON lines: one object for each step, and a summary.
    #[arg(long)]
    json: bool,
}

/// The result of one step.
struct DemoStepResult {
    step: &'static DemoStep,
    answer: Answer,
    rule: Option<String>,
    ran: bool,
    replayed: bool,
}

/// Totals of a run.
#[derive(serde::Serialize)]
struct DemoSummary {
    asked: usize,
    ran: usize,
    refused: usize,
    /// Calls that were answered from the ledger.
    replayed: usize,
    /// Payments that violate the rules of the desk.
    leaked: usize,
}

pub(crate) fn run(args: &Args, store: Option<&Path>) -> io::Result<ExitCode> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (results, accounts) =
        runtime.block_on(run_script(crate::command::demo::policy::RuleEnforcement::Yes, store))?;
    let summary = summarize(&results, &accounts);
    if args.json {
        print_json(&results, &summary)?;
    } else {
        crate::command::demo::render::print_demo(&results, &summary, &accounts)?;
        if let Some(path) = store {
            crate::command::demo::render::print_ledger_commands(path)?;
        }
    }
    Ok(if summary.leaked == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the whole script at a new desk.
async fn run_script(
    enforcement: crate::command::demo::policy::RuleEnforcement,
    store: Option<&Path>,
) -> io::Result<(Vec<DemoStepResult>, SharedDeskAccounts)> {
    let accounts = SharedDeskAccounts::default();
    let mut name = "refund-desk".to_owned();
    // The demo uses its own clock, so that every run gives the same result.
    let clock = crate::command::demo::tools::accounts_clock(&accounts);
    let gate = if let Some(path) = store {
        let store = SqliteStore::open_with_clock(path, clock).map_err(io::Error::other)?;
        // A kept ledger needs real times. Another run is another agent, with its own accounts.
        accounts.lock().now = toolgate::Timestamp::now().as_second()
            - 30 * i64::try_from(script::STEPS.len()).unwrap_or(0);
        let runs = Ledger::open(path)
            .and_then(|ledger| ledger.sessions(script::STEPS.first().map(|step| step.session)))
            .map_err(io::Error::other)?
            .len();
        if runs > 0 {
            name = format!("refund-desk-{}", runs + 1);
        }
        Toolgate::builder().store(Arc::new(store))
    } else {
        Toolgate::builder().store(Arc::new(MemoryStore::new().with_clock(clock)))
    };
    let agent = crate::command::demo::tools::build_agent(&name, &accounts, enforcement)
        .map_err(io::Error::other)?;
    let gate = gate.agent(agent).build()?;
    let mut results = Vec::new();
    for step in script::STEPS {
        accounts.lock().now += 30;
        let session = gate.session(&name, "agent-7", step.session);
        results.push(run_step(&gate, &session, step).await?);
    }
    Ok((results, accounts))
}

async fn run_step(
    gate: &Toolgate,
    session: &Session,
    step: &'static DemoStep,
) -> io::Result<DemoStepResult> {
    let answer = gate.call(session.prepare(step.tool, step.arguments)).await;
    // Without the ledger the demo is meaningless.
    if let Some(error) = answer.outcome.error().filter(|error| error.code == "store_unavailable") {
        return Err(io::Error::other(format!("cannot continue the demo: {}", error.message)));
    }
    let rows = session.rows().await.map_err(io::Error::other)?;
    let decision = rows.iter().find(|row| row.call == answer.call).map(|row| row.decision);
    let ran =
        matches!(decision, Some(Decision::Succeeded | Decision::Failed | Decision::Signalled));
    Ok(DemoStepResult {
        step,
        rule: answer.rule.clone(),
        answer,
        ran,
        replayed: decision == Some(Decision::Replayed),
    })
}

fn summarize(results: &[DemoStepResult], accounts: &SharedDeskAccounts) -> DemoSummary {
    let ran = results.iter().filter(|result| result.ran).count();
    let replayed = results.iter().filter(|result| result.replayed).count();
    DemoSummary {
        asked: results.len(),
        ran,
        refused: results.len() - ran - replayed,
        replayed,
        leaked: accounts.lock().forbidden_payments().len(),
    }
}

fn print_json(results: &[DemoStepResult], summary: &DemoSummary) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for DemoStepResult { step, answer, ran, .. } in results {
        // Invalid JSON, for example with duplicate keys, is printed as a string.
        let parsed =
            toolgate_json::parse(step.arguments.as_bytes(), &toolgate_json::JsonBounds::default());
        let arguments = parsed.unwrap_or_else(|_| Value::String(step.arguments.to_owned()));
        let line = json!({
            "step": step.name,
            "asked": { "tool": step.tool, "arguments": arguments },
            "gate": answer.gate,
            "ran": ran,
            "outcome": answer.outcome.to_json(),
        });
        writeln!(out, "{line}")?;
    }
    writeln!(out, "{}", json!({ "summary": summary }))
}

impl DemoStep {
    const fn is_attack(&self) -> bool {
        matches!(self.part, DemoPart::Attack)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn without_rules_the_accounts_show_forbidden_payments() {
        let (results, accounts) =
            run_script(policy::RuleEnforcement::No, None).await.expect("the demo runs");
        let summary = summarize(&results, &accounts);
        assert!(summary.leaked >= 4, "without rules, payments leak: {}", summary.leaked);
        let (results, accounts) =
            run_script(policy::RuleEnforcement::Yes, None).await.expect("the demo runs");
        let summary = summarize(&results, &accounts);
        let (all, counted) =
            (script::STEPS.len(), summary.ran + summary.refused + summary.replayed);
        assert_eq!((summary.leaked, summary.asked, counted, summary.replayed), (0, all, all, 1));
        assert_eq!(accounts.lock().payments.len(), 2, "the two due refunds were paid");
    }

    #[tokio::test]
    async fn each_step_ends_at_the_gate_in_the_script() {
        let (results, _) =
            run_script(policy::RuleEnforcement::Yes, None).await.expect("the demo runs");
        for result in results {
            let code = result.answer.outcome.error().map_or("ok", |e| &e.code);
            assert_eq!(
                (result.answer.gate.name(), code),
                (result.step.gate, result.step.code),
                "{}: {:?}",
                result.step.name,
                result.answer
            );
        }
    }
}
