//! `toolgate demo`: a scripted model works at a refund desk, and then tries to break out of it.

mod books;
mod desk;
mod rules;
mod script;
mod show;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::{Answer, Decision, Session, Toolgate};
use toolgate_store::{Ledger, SqliteStore};

use books::SharedBooks;
use script::{Act, Step};

/// A refund desk behind the gate: a scripted model does its work, then tries to break out.
///
/// Everything happens in this process, on embedded defaults: no server, no key, no network. Whether
/// anything leaked is found out from the desk's own books, not by the gate's word. With `--store` the
/// ledger is kept, to look into with `toolgate audit`, `toolgate replay` and `toolgate backtest`.
#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if nothing leaked, 1 if something did, 2 if the demonstration could not run.\n\nExamples:\n  toolgate demo\n  toolgate demo --store ledger.db\n  toolgate demo --json | tail -n 1"
)]
pub(crate) struct Args {
    /// One JSON object a line: {"step", "asked", "gate", "ran", "outcome"}, and at last {"summary"}.
    #[arg(long)]
    json: bool,
}

/// What came of one step.
struct Played {
    step: &'static Step,
    answer: Answer,
    rule: Option<String>,
    ran: bool,
    replayed: bool,
}

/// How it all came out.
#[derive(serde::Serialize)]
struct Summary {
    asked: usize,
    ran: usize,
    refused: usize,
    /// Calls that were answered from the record.
    replayed: usize,
    /// Payments in the books that the desk's rules forbid.
    leaked: usize,
}

pub(crate) fn run(args: &Args, store: Option<&Path>) -> io::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (played, books) = runtime.block_on(play(rules::Enforced::Yes, store))?;
    let summary = summarize(&played, &books);
    if args.json {
        print_json(&played, &summary)?;
    } else {
        show::print(&played, &summary, &books)?;
        if let Some(path) = store {
            show::print_store(path)?;
        }
    }
    Ok(if summary.leaked == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Plays the whole script at a fresh desk.
async fn play(enforced: rules::Enforced, store: Option<&Path>) -> io::Result<(Vec<Played>, SharedBooks)> {
    let books = SharedBooks::default();
    let mut name = "refund-desk".to_owned();
    // The demonstration has a clock of its own, so that it comes out the same every time.
    let mut gate = Toolgate::builder().clock(desk::clock(&books));
    if let Some(path) = store {
        let kept = SqliteStore::open(path).map_err(io::Error::other)?;
        // What is kept is kept by the calendar; and another run is another desk, with books of its own.
        books.lock().now = toolgate::Timestamp::now().as_second() - 30 * i64::try_from(script::STEPS.len()).unwrap_or(0);
        let runs = Ledger::open(path)
            .and_then(|ledger| ledger.sessions(script::STEPS.first().map(|step| step.session)))
            .map_err(io::Error::other)?
            .len();
        if runs > 0 {
            name = format!("refund-desk-{}", runs + 1);
        }
        gate = gate.store(Arc::new(kept));
    }
    let agent = desk::agent(&name, &books, enforced).map_err(io::Error::other)?;
    let gate = gate.agent(agent).build()?;
    let mut played = Vec::new();
    for step in script::STEPS {
        books.lock().now += 30;
        let session = gate.session(&name, "agent-7", step.session);
        played.push(make(&gate, &session, step).await?);
    }
    Ok((played, books))
}

async fn make(gate: &Toolgate, session: &Session, step: &'static Step) -> io::Result<Played> {
    let answer = gate.call(session.prepare(step.tool, step.arguments)).await;
    // A desk without its ledger shows nothing.
    if let Some(error) = answer.outcome.error().filter(|error| error.code == "store_unavailable") {
        return Err(io::Error::other(format!("the demonstration cannot go on: {}", error.message)));
    }
    let rows = session.rows().await.map_err(io::Error::other)?;
    let decision = rows.iter().find(|row| row.call == answer.call).map(|row| row.decision);
    let ran = matches!(decision, Some(Decision::Succeeded | Decision::Failed | Decision::Signalled));
    Ok(Played { step, rule: answer.rule.clone(), answer, ran, replayed: decision == Some(Decision::Replayed) })
}

fn summarize(played: &[Played], books: &SharedBooks) -> Summary {
    let ran = played.iter().filter(|p| p.ran).count();
    let replayed = played.iter().filter(|p| p.replayed).count();
    Summary { asked: played.len(), ran, refused: played.len() - ran - replayed, replayed, leaked: books.lock().forbidden_payments().len() }
}

fn print_json(played: &[Played], summary: &Summary) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for Played { step, answer, ran, .. } in played {
        // What is no JSON (two keys of one name, say) is shown as the text it is.
        let strict = toolgate::json::parse(step.arguments.as_bytes(), &toolgate::json::Bounds::default());
        let arguments = strict.unwrap_or_else(|_| Value::String(step.arguments.to_owned()));
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

impl Step {
    const fn is_escape(&self) -> bool {
        matches!(self.act, Act::BreakOut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_books_find_what_leaks_when_no_rule_holds() {
        let (played, books) = play(rules::Enforced::No, None).await.expect("the demonstration runs");
        let summary = summarize(&played, &books);
        assert!(summary.leaked >= 4, "an open desk leaks: {}", summary.leaked);
        let (played, books) = play(rules::Enforced::Yes, None).await.expect("the demonstration runs");
        let summary = summarize(&played, &books);
        let (all, told) = (script::STEPS.len(), summary.ran + summary.refused + summary.replayed);
        assert_eq!((summary.leaked, summary.asked, told, summary.replayed), (0, all, all, 1));
        assert_eq!(books.lock().payments.len(), 2, "the two refunds that are due were paid");
    }

    #[tokio::test]
    async fn every_step_ends_at_the_gate_that_the_script_says() {
        let (played, _) = play(rules::Enforced::Yes, None).await.expect("the demonstration runs");
        for p in played {
            let code = p.answer.outcome.error().map_or("ok", |e| &e.code);
            assert_eq!((p.answer.gate.name(), code), (p.step.gate, p.step.code), "{}: {:?}", p.step.name, p.answer);
        }
    }
}
