//! Implements `audit verify`, `prune`, `settle`, `receipt` and `key`.

use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::{
    AgentDefinition, CallOutput, Outcome, Receipt, SignedDuration, Timestamp, Toolgate,
};
use toolgate_store::{Ledger, LedgerAnchor, RowFilter, SqliteStore, TrustRoots, check_receipt};

use super::CallIdArg;
use crate::command::common::{
    BOLD, DIM, GREEN, IgnoreBrokenPipe, RED, format_count, format_time, ledger_path, open_ledger,
    progress_bar, sanitize,
};
use toolgate_hook::effective_config;
use toolgate_hook::effective_config::{EffectiveConfig, UserStateDir};

fn block_on<T>(future: impl Future<Output = T>) -> io::Result<T> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future))
}

/// Opens an existing ledger for writing.
fn open_store(store: Option<&Path>) -> io::Result<SqliteStore> {
    open_ledger(store)?;
    SqliteStore::open(ledger_path(store)?).map_err(io::Error::other)
}

pub(crate) fn verify(
    anchor: Option<LedgerAnchor>,
    key: Option<String>,
    json: bool,
    store: Option<&Path>,
) -> io::Result<ExitCode> {
    let path = ledger_path(store)?;
    if !path.is_file() {
        // Opening the path returns an error that names the problem.
        open_ledger(store)?;
    }
    let checked = Ledger::open_to_verify(path).and_then(|ledger| {
        let rows = if io::stderr().is_terminal() {
            ledger.count(&RowFilter::default()).unwrap_or(0)
        } else {
            0
        };
        let bar = progress_bar(rows, "verifying");
        let checked = ledger.verify(&TrustRoots { anchor, key }, |count| bar.set_position(count));
        bar.finish_and_clear();
        checked
    });
    let mut out = IgnoreBrokenPipe(anstream::stdout().lock());
    match checked {
        // The ledger is unreadable, or a key is missing. The ledger may still be intact.
        Err(flaw) if flaw.unchecked => {
            return Err(io::Error::other(format!("cannot check the ledger: {flaw}")));
        }
        Ok(verified) if json => {
            writeln!(out, "{}", json!({ "holds": true, "verified": verified }))?
        }
        Ok(verified) => {
            let (rows, sessions, signatures) = (
                format_count(verified.rows, "row"),
                format_count(verified.sessions, "session"),
                format_count(verified.checkpoints, "signature"),
            );
            writeln!(
                out,
                "{GREEN}the ledger is intact{GREEN:#}: {rows} of {sessions}, {signatures}"
            )?;
            if verified.pruned > 0 {
                writeln!(
                    out,
                    "{DIM}pruned{DIM:#}   {} before them",
                    format_count(verified.pruned, "row")
                )?;
            }
            writeln!(
                out,
                "{DIM}signed{DIM:#}   up to row {} of {}",
                verified.signed_to, verified.anchor.seq
            )?;
            writeln!(out, "{DIM}key{DIM:#}      {}", verified.keys.join("\n         "))?;
            writeln!(out, "{DIM}anchor{DIM:#}   {}", verified.anchor)?;
            writeln!(
                out,
                "{DIM}         save it elsewhere: `verify --anchor` detects an older copy of the ledger{DIM:#}"
            )?;
        }
        Err(flaw) => {
            match json {
                true => writeln!(out, "{}", json!({ "holds": false, "flaw": flaw }))?,
                false => writeln!(
                    out,
                    "{RED}the ledger is not intact{RED:#}: {}",
                    sanitize(&flaw.to_string())
                )?,
            }
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Default maximum age of rows.
const DEFAULT_RETENTION: SignedDuration = SignedDuration::from_hours(24 * 90);

/// Returns `retention` of the configuration in the current directory.
///
/// If the configuration cannot be read, returns an error instead of the default, so that no row is
/// deleted too early.
fn configured_retention() -> io::Result<Option<SignedDuration>> {
    let hint = "set the maximum age of rows with `--older-than`";
    let has_config = effective_config::find_project_config(&effective_config::project_dir()?)
        .is_some()
        || effective_config::user_config_path().is_some_and(|path| path.exists());
    if !has_config {
        return Ok(None);
    }
    let unknown_retention = |error: io::Error| {
        io::Error::new(
            error.kind(),
            format!("cannot determine how long rows are kept: {error}; {hint}"),
        )
    };
    let effective = UserStateDir::without_opening()
        .and_then(|state| EffectiveConfig::load_untrusted(&state))
        .map_err(unknown_retention)?;
    let config = &effective.config;
    // `retention` applies only to the ledger of the same configuration.
    let configured_store = config.store.as_ref().and_then(|path| std::path::absolute(path).ok());
    let is_other_ledger =
        config.is_store_known() && configured_store.as_ref() != Some(&effective.store);
    let is_retention_unset = config.is_retention_known() && config.retention.is_none();
    match config.check() {
        Err(_) if !is_other_ledger && !is_retention_unset => Err(io::Error::other(format!(
            "the configuration does not load, so its `retention` is unknown; fix it, or {hint}"
        ))),
        _ => Ok(effective.retention()),
    }
}

pub(crate) fn prune(
    older_than: Option<SignedDuration>,
    sealed_older_than: SignedDuration,
    dry_run: bool,
    json: bool,
    store: Option<&Path>,
) -> io::Result<ExitCode> {
    let older_than = match older_than {
        Some(age) => age,
        None => configured_retention()?.unwrap_or(DEFAULT_RETENTION),
    };
    let time_before =
        |age: SignedDuration| Timestamp::now().checked_sub(age).map_err(io::Error::other);
    let (rows_before, sealed_before) = (time_before(older_than)?, time_before(sealed_older_than)?);
    if dry_run {
        let ledger = open_ledger(store)?;
        let first_kept =
            RowFilter { since: Some(rows_before), limit: Some(1), ..RowFilter::default() };
        let first_rows = ledger.find(&first_kept).map_err(io::Error::other)?;
        let total_rows = ledger.count(&RowFilter::default()).map_err(io::Error::other)?;
        let kept_rows = match first_rows.first() {
            Some(entry) => ledger
                .count(&RowFilter { after_seq: Some(entry.seq - 1), ..RowFilter::default() })
                .map_err(io::Error::other)?,
            None => 0,
        };
        if json {
            writeln!(
                io::stdout().lock(),
                "{}",
                json!({ "would_prune": total_rows - kept_rows, "would_keep": kept_rows })
            )?;
        } else {
            writeln!(
                io::stdout().lock(),
                "{} from before {} would be deleted, {kept_rows} would stay",
                format_count(total_rows - kept_rows, "row"),
                format_time(rows_before)
            )?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let store = open_store(store)?;
    let pruned = block_on(store.prune(rows_before, sealed_before))?.map_err(io::Error::other)?;
    if json {
        writeln!(
            io::stdout().lock(),
            "{}",
            json!({ "rows": pruned.rows, "sealed": pruned.sealed })
        )?;
    } else {
        writeln!(
            io::stdout().lock(),
            "deleted {} and {}; the remaining rows can still be verified",
            format_count(pruned.rows, "row"),
            format_count(pruned.sealed, "sealed record")
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Lists the pending calls.
pub(crate) fn list_pending(json: bool, store: Option<&Path>) -> io::Result<ExitCode> {
    let pending = open_ledger(store)?.pending_claims(Timestamp::now()).map_err(io::Error::other)?;
    let mut out = anstream::stdout().lock();
    for intent in &pending {
        let arguments =
            intent.row.as_ref().map(|row| Arc::clone(&row.arguments)).unwrap_or_default();
        if json {
            let at = intent.row.as_ref().map(|row| row.at);
            writeln!(
                out,
                "{}",
                json!({ "call": intent.call, "key": intent.key, "tool": intent.tool, "arguments": arguments, "at": at })
            )?;
            continue;
        }
        let at = intent.row.as_ref().map(|row| format_time(row.at)).unwrap_or_default();
        let (key, store, call) = (
            &intent.key,
            toolgate_hook::client_hooks::shell_quote(&ledger_path(store)?.display().to_string()),
            intent.call,
        );
        writeln!(
            out,
            "{BOLD}{}{BOLD:#} {}",
            sanitize(&intent.tool),
            sanitize(&arguments.to_string())
        )?;
        writeln!(
            out,
            "  {DIM}{at} session {} of {} with {}{DIM:#}",
            sanitize(&key.session),
            sanitize(&key.principal),
            sanitize(&key.agent)
        )?;
        writeln!(out, "  toolgate audit settle {call} --happened RESULT --by YOU --store {store}")?;
        writeln!(out, "  toolgate audit settle {call} --never --by YOU --store {store}\n")?;
    }
    if pending.is_empty() && !json {
        writeln!(out, "no pending calls")?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn settle(
    call: &CallIdArg,
    happened: Option<&str>,
    never: bool,
    by: Option<&str>,
    json: bool,
    store: Option<&Path>,
) -> io::Result<ExitCode> {
    let happened = match (happened, never) {
        (Some(result), false) => {
            let value: Value = serde_json::from_str(result)
                .map_err(|e| io::Error::other(format!("the result is not valid JSON: {e}")))?;
            Some(Outcome::Success(CallOutput::from_value(value)))
        }
        (None, true) => None,
        _ => {
            return Err(io::Error::other("missing outcome: pass `--happened RESULT` or `--never`"));
        }
    };
    let by = by.ok_or_else(|| {
        io::Error::other("missing `--by NAME`: the ledger records who settled the call")
    })?;
    let ledger = open_ledger(store)?;
    let call = call.resolve(&*ledger)?;
    let pending_claim = ledger
        .pending_claims(Timestamp::now())
        .map_err(io::Error::other)?
        .into_iter()
        .find(|intent| intent.call == call);
    let Some(intent) = pending_claim else {
        return Err(io::Error::other(format!(
            "{call} is not pending; list pending calls with `toolgate audit settle`"
        )));
    };
    // The definition says which parts of the result are secret.
    let definition = match &intent.row {
        Some(row) => ledger.definition(row.config).map_err(io::Error::other)?,
        None => None,
    };
    let agent = definition.and_then(|text| AgentDefinition::parse(&text).ok()?.build().ok());
    let (has_happened, repeatable) = (happened.is_some(), !intent.recall.is_empty());
    let settle = async {
        let gate = Toolgate::builder().store(Arc::new(open_store(store)?));
        let gate = agent.into_iter().fold(gate, |gate, agent| gate.agent(agent)).build()?;
        gate.settle_pending(call, happened, by).await.map_err(io::Error::other)
    };
    if !block_on(settle)?? {
        return Err(io::Error::other(format!("{call} was settled by another user meanwhile")));
    }
    let mut out = anstream::stdout().lock();
    match (json, has_happened, repeatable) {
        (true, ..) => {
            writeln!(out, "{}", json!({ "call": call, "happened": has_happened, "by": by }))?
        }
        (_, true, true) => {
            writeln!(out, "{call} is settled: it happened. A repeated call gets this result")?
        }
        (_, true, false) => writeln!(
            out,
            "{call} is settled: it happened. It has no idempotency key and its tool is not `once`, so a repeated call will run"
        )?,
        (_, false, _) => writeln!(
            out,
            "{call} is settled: it never happened. Its reserved limits are released, and it may be made again"
        )?,
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn verify_receipt(
    file: &Path,
    key: Option<&str>,
    store: Option<&Path>,
) -> io::Result<ExitCode> {
    let mut text = String::new();
    if file == Path::new("-") {
        io::stdin().take(1 << 20).read_to_string(&mut text)?;
    } else {
        text = std::fs::read_to_string(file)
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", file.display())))?;
    }
    let input_error = |why: String| match file == Path::new("-") {
        true => io::Error::other(why),
        false => io::Error::other(format!("{}: {why}", file.display())),
    };
    let value: Value =
        serde_json::from_str(&text).map_err(|e| input_error(format!("not valid JSON: {e}")))?;
    // The receipt alone, or an answer that contains one.
    let value = ["receipt", "toolgate/receipt"]
        .iter()
        .find_map(|name| value.get(name))
        .or_else(|| value.get("_meta")?.get("toolgate/receipt"))
        .unwrap_or(&value);
    let receipt: Receipt = serde_json::from_value(value.clone())
        .map_err(|e| input_error(format!("not a receipt: {e}")))?;
    let ledger = store.map(|path| open_ledger(Some(path))).transpose()?;
    let mut out = IgnoreBrokenPipe(anstream::stdout().lock());
    let keys = match (key, &ledger) {
        (key, Some(ledger)) => {
            // Trust the keys of a ledger only if the ledger is intact.
            match ledger
                .verify(&TrustRoots { key: key.map(str::to_owned), anchor: None }, &mut |_| ())
            {
                Ok(verified) => verified.keys,
                Err(flaw) if flaw.unchecked => {
                    return Err(io::Error::other(format!("cannot check the ledger: {flaw}")));
                }
                Err(flaw) => {
                    writeln!(
                        out,
                        "{RED}the ledger is not intact{RED:#}: {}",
                        sanitize(&flaw.to_string())
                    )?;
                    return Ok(ExitCode::FAILURE);
                }
            }
        }
        (Some(key), None) => vec![key.to_owned()],
        (None, None) => {
            return Err(io::Error::other(
                "no ledger to check against; pass its public key with `--key`, or the ledger with `--store`",
            ));
        }
    };
    if !keys.iter().any(|key| check_receipt(&receipt, key)) {
        writeln!(out, "{RED}the receipt is not valid{RED:#}: this ledger did not sign it")?;
        return Ok(ExitCode::FAILURE);
    }
    writeln!(
        out,
        "{GREEN}the receipt is valid{GREEN:#}: `{}` {} at {}, row {}",
        sanitize(&receipt.tool),
        receipt.decision,
        format_time(receipt.at),
        receipt.seq
    )?;
    let Some(ledger) = ledger else { return Ok(ExitCode::SUCCESS) };
    match ledger.check_receipt_row(&receipt).map_err(io::Error::other)? {
        Some(true) => writeln!(out, "{GREEN}its row is in the ledger{GREEN:#}, unchanged")?,
        Some(false) => {
            writeln!(out, "{RED}its row in the ledger was changed{RED:#}")?;
            return Ok(ExitCode::FAILURE);
        }
        None if ledger.last_pruned_seq().map_err(io::Error::other)? >= receipt.seq => {
            writeln!(out, "its row was pruned since")?
        }
        None => {
            writeln!(out, "{RED}its row is missing from the ledger{RED:#}")?;
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn print_key(rotate: bool, store: Option<&Path>) -> io::Result<ExitCode> {
    let key = match rotate {
        true => block_on(open_store(store)?.rotate_key())?.map_err(io::Error::other)?.to_string(),
        false => open_ledger(store)?.public_key().map_err(io::Error::other)?,
    };
    writeln!(io::stdout().lock(), "{key}")?;
    Ok(ExitCode::SUCCESS)
}
