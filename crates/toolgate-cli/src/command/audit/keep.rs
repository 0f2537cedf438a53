//! Checking, and taking care of what is kept.

use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::{CallId, Definition, Outcome, Output, Receipt, SignedDuration, Timestamp, Toolgate};
use toolgate_store::{Anchor, Filter, Ledger, SqliteStore, Trust, check_receipt};

use super::super::ledger::{BOLD, DIM, GREEN, RED, bar, counted, named, open as open_ledger, time};

fn block_on<T>(future: impl Future<Output = T>) -> io::Result<T> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future))
}

/// A ledger that is there, to change something in it.
fn open_store(store: Option<&Path>) -> io::Result<SqliteStore> {
    open_ledger(store)?;
    SqliteStore::open(named(store)?).map_err(io::Error::other)
}

pub(super) fn verify(anchor: Option<Anchor>, key: Option<String>, json: bool, store: Option<&Path>) -> io::Result<ExitCode> {
    let path = named(store)?;
    if !path.exists() {
        return Err(io::Error::other(format!("there is no ledger {}", path.display())));
    }
    let checked = match Ledger::open(path) {
        Ok(ledger) => {
            let rows = if io::stderr().is_terminal() { ledger.count(&Filter::default()).unwrap_or(0) } else { 0 };
            let bar = bar(rows, "verifying");
            let checked = ledger.verify(&Trust { anchor, key }, |count| bar.set_position(count));
            bar.finish_and_clear();
            checked.map_err(|flaw| (flaw.to_string(), json!(flaw)))
        }
        // What cannot even be opened does not hold.
        Err(error) => Err((error.to_string(), json!({ "what": error.to_string() }))),
    };
    match checked {
        Ok(verified) if json => println!("{}", json!({ "holds": true, "verified": verified })),
        Err((_, flaw)) if json => {
            println!("{}", json!({ "holds": false, "flaw": flaw }));
            return Ok(ExitCode::FAILURE);
        }
        Ok(verified) => {
            let mut out = anstream::stdout().lock();
            writeln!(
                out,
                "{GREEN}the ledger holds{GREEN:#}: {} of {}, {}",
                counted(verified.rows, "row"),
                counted(verified.sessions, "session"),
                counted(verified.checkpoints, "signature")
            )?;
            if verified.pruned > 0 {
                writeln!(out, "{DIM}pruned{DIM:#}   {} before them", counted(verified.pruned, "row"))?;
            }
            writeln!(out, "{DIM}signed{DIM:#}   up to row {} of {}", verified.signed_to, verified.anchor.seq)?;
            writeln!(out, "{DIM}key{DIM:#}      {}", verified.keys.join("\n         "))?;
            writeln!(out, "{DIM}anchor{DIM:#}   {}", verified.anchor)?;
            writeln!(out, "{DIM}         note it down elsewhere: `--anchor` will tell whether this ledger was put back{DIM:#}")?;
        }
        Err((flaw, _)) => {
            anstream::println!("{RED}the ledger does not hold{RED:#}: {flaw}");
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn prune(
    older_than: SignedDuration,
    sealed_older_than: SignedDuration,
    dry_run: bool,
    json: bool,
    store: Option<&Path>,
) -> io::Result<ExitCode> {
    let before = |age: SignedDuration| Timestamp::now().checked_sub(age).map_err(io::Error::other);
    let (rows_before, sealed_before) = (before(older_than)?, before(sealed_older_than)?);
    if dry_run {
        let ledger = open_ledger(store)?;
        let first_kept = Filter { since: Some(rows_before), most: Some(1), ..Filter::default() };
        let kept = ledger.find(&first_kept).map_err(io::Error::other)?;
        let all = ledger.count(&Filter::default()).map_err(io::Error::other)?;
        let stay = match kept.first() {
            Some(entry) => ledger.count(&Filter { after: Some(entry.seq - 1), ..Filter::default() }).map_err(io::Error::other)?,
            None => 0,
        };
        if json {
            println!("{}", json!({ "would_prune": all - stay, "would_keep": stay }));
        } else {
            anstream::println!("{} rows from before {} would go, {stay} would stay", all - stay, time(rows_before));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let store = open_store(store)?;
    let gone = block_on(store.prune(rows_before, sealed_before))?.map_err(io::Error::other)?;
    if json {
        println!("{}", json!({ "rows": gone.rows, "sealed": gone.sealed }));
    } else {
        anstream::println!(
            "{} rows and {} recorded outcomes, approvals and outputs are gone; what is left holds without them",
            gone.rows,
            gone.sealed
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// What nobody knows the end of.
pub(super) fn open(json: bool, store: Option<&Path>) -> io::Result<ExitCode> {
    let pending = open_ledger(store)?.pending(Timestamp::now()).map_err(io::Error::other)?;
    let mut out = anstream::stdout().lock();
    for intent in &pending {
        let asked = intent.row.as_ref().map(|row| Arc::clone(&row.arguments)).unwrap_or_default();
        if json {
            writeln!(
                out,
                "{}",
                json!({ "call": intent.call, "key": intent.key, "tool": intent.tool, "arguments": asked, "at": intent.row.as_ref().map(|row| row.at) })
            )?;
            continue;
        }
        let at = intent.row.as_ref().map(|row| time(row.at)).unwrap_or_default();
        writeln!(out, "{BOLD}{}{BOLD:#} {asked}", intent.tool)?;
        writeln!(out, "  {DIM}{at} session {} of {} with {}{DIM:#}", intent.key.session, intent.key.principal, intent.key.agent)?;
        writeln!(out, "  toolgate audit settle {} --happened RESULT | --never --by YOU\n", intent.call)?;
    }
    if pending.is_empty() && !json {
        writeln!(out, "nothing is open: of every call it is known what became of it")?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn settle(
    call: CallId,
    happened: Option<&str>,
    never: bool,
    by: Option<&str>,
    json: bool,
    store: Option<&Path>,
) -> io::Result<ExitCode> {
    let happened = match (happened, never) {
        (Some(result), false) => {
            let value: Value = serde_json::from_str(result).map_err(|e| io::Error::other(format!("the result is no JSON: {e}")))?;
            Some(Outcome::Success(Output::of(value)))
        }
        (None, true) => None,
        _ => return Err(io::Error::other("say what became of it: `--happened RESULT` or `--never`")),
    };
    let by = by.ok_or_else(|| io::Error::other("say who says so, with `--by`: the ledger keeps it"))?;
    let ledger = open_ledger(store)?;
    let open = ledger.pending(Timestamp::now()).map_err(io::Error::other)?.into_iter().find(|intent| intent.call == call);
    let Some(intent) = open else { return Err(io::Error::other(format!("{call} is not open; `toolgate audit settle` lists what is"))) };
    // What its tool keeps secret is kept secret here, too.
    let definition = match &intent.row {
        Some(row) => ledger.definition(row.config).map_err(io::Error::other)?,
        None => None,
    };
    let agent = definition.and_then(|text| Definition::parse(&text).ok()?.build().ok());
    let done = happened.is_some();
    let settle = async {
        let gate = Toolgate::builder().store(Arc::new(open_store(store)?));
        let gate = agent.into_iter().fold(gate, |gate, agent| gate.agent(agent)).build()?;
        gate.settle_pending(call, happened, by).await.map_err(io::Error::other)
    };
    if !block_on(settle)?? {
        return Err(io::Error::other(format!("{call} was settled by somebody else meanwhile")));
    }
    match (json, done) {
        (true, _) => println!("{}", json!({ "call": call, "happened": done, "by": by })),
        (_, true) => anstream::println!("{call} is settled: it happened, and whoever repeats it gets this result"),
        _ => anstream::println!("{call} is settled: it never happened, what it had reserved is free, and it may be made again"),
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn receipt(file: &Path, key: Option<&str>, store: Option<&Path>) -> io::Result<ExitCode> {
    let mut text = String::new();
    if file == Path::new("-") {
        io::stdin().take(1 << 20).read_to_string(&mut text)?;
    } else {
        text = std::fs::read_to_string(file).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", file.display())))?;
    }
    let value: Value = serde_json::from_str(&text).map_err(|e| io::Error::other(format!("this is no JSON: {e}")))?;
    // On its own, or as part of an answer.
    let value = ["receipt", "toolgate/receipt"]
        .iter()
        .find_map(|name| value.get(name))
        .or_else(|| value.get("_meta")?.get("toolgate/receipt"))
        .unwrap_or(&value);
    let receipt: Receipt = serde_json::from_value(value.clone()).map_err(|e| io::Error::other(format!("this is no receipt: {e}")))?;
    let ledger = store.map(|path| open_ledger(Some(path))).transpose()?;
    let keys = match (key, &ledger) {
        (Some(key), _) => vec![key.to_owned()],
        (None, Some(ledger)) => ledger.keys().map_err(io::Error::other)?,
        (None, None) => {
            return Err(io::Error::other("say which ledger to believe: its public key with `--key`, or the ledger with `--store`"));
        }
    };
    let signed = keys.iter().any(|key| check_receipt(&receipt, key));
    if !signed {
        anstream::println!("{RED}this receipt is not one of this ledger{RED:#}: its signature does not hold");
        return Ok(ExitCode::FAILURE);
    }
    let mut out = anstream::stdout().lock();
    writeln!(
        out,
        "{GREEN}the receipt holds{GREEN:#}: `{}` {} at {}, row {}",
        receipt.tool,
        receipt.decision,
        time(receipt.at),
        receipt.seq
    )?;
    let Some(ledger) = ledger else { return Ok(ExitCode::SUCCESS) };
    let there = ledger.show(receipt.call).map_err(io::Error::other)?;
    match there.first() {
        Some(entry) if entry.hash == receipt.hash && entry.seq == receipt.seq => {
            writeln!(out, "{GREEN}its row is in the ledger{GREEN:#}, unchanged")?
        }
        Some(_) => {
            writeln!(out, "{RED}its row is in the ledger, and is not the one that the receipt was given for{RED:#}")?;
            return Ok(ExitCode::FAILURE);
        }
        None if ledger.pruned_to().map_err(io::Error::other)? >= receipt.seq => writeln!(out, "its row was pruned since")?,
        None => {
            writeln!(out, "{RED}its row is missing from the ledger{RED:#}")?;
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn key(rotate: bool, store: Option<&Path>) -> io::Result<ExitCode> {
    let key = match rotate {
        true => block_on(open_store(store)?.rotate_key())?.map_err(io::Error::other)?.to_string(),
        false => open_ledger(store)?.public_key().map_err(io::Error::other)?,
    };
    println!("{key}");
    Ok(ExitCode::SUCCESS)
}
