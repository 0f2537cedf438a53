//! Implements `toolgate audit`: queries, verifies and maintains the ledger.

mod export;
mod maintain;
mod query;

pub(super) use crate::command::audit::query::{describe_arguments, find_row};

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use toolgate::{CallId, SignedDuration};
use toolgate_store::{LedgerAnchor, LedgerReader};

use crate::command::common::{PartialId, RowFilterArgs, at_most_one, parse_duration, parse_number};

/// Query, verify and maintain the ledger.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate audit query --since 1d --decision refused\n  toolgate audit show 01a1…\n  toolgate audit verify\n  toolgate audit tail -f"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: AuditCommand,
}

#[derive(Subcommand)]
enum AuditCommand {
    /// List calls, newest last.
    #[command(
        after_help = "Examples:\n  toolgate audit query --store ledger.db --since 2h\n  toolgate audit query --store ledger.db --entity customer_id=C-1001\n  toolgate audit query --decision refused --json | jq .row.rule"
    )]
    Query {
        #[command(flatten)]
        filter: RowFilterArgs,
        /// Show at most this many of the newest rows.
        #[arg(long, short = 'n', default_value_t = 50, value_parser = parse_number::<usize>)]
        limit: usize,
        /// Print one JSON object per line.
        #[arg(long)]
        json: bool,
    },
    /// Show one call: its arguments, decision, facts and outcome.
    #[command(after_help = "Examples:\n  toolgate audit show 019a8f0e-… --store ledger.db")]
    Show {
        /// Call id, or at least 6 digits at its beginning or end.
        call: CallIdArg,
        /// Print only a signed receipt for the row, as JSON.
        #[arg(long)]
        receipt: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Check every row, chain and signature.
    ///
    /// Exit code 0 if the ledger is intact, 1 if not. Prints the first problem.
    #[command(
        after_help = "Examples:\n  toolgate audit verify --store ledger.db\n  toolgate audit verify --anchor 1040:9f3a…   detect an older copy"
    )]
    Verify {
        /// Anchor that an earlier `verify` printed.
        #[arg(long)]
        anchor: Option<LedgerAnchor>,
        /// Public key to trust [default: the keys beside the ledger].
        #[arg(long, value_name = "HEX", value_parser = parse_public_key)]
        key: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Write rows as JSON lines, oldest first.
    #[command(
        after_help = "Examples:\n  toolgate audit export --store ledger.db --since 30d --out october.jsonl"
    )]
    Export {
        #[command(flatten)]
        filter: RowFilterArgs,
        /// File to write [default: standard output].
        #[arg(long, short, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Delete old rows. Claims, limits and evidence stay.
    ///
    /// Without `retention` in the configuration, nothing else deletes rows.
    #[command(
        after_help = "Examples:\n  toolgate audit prune --store ledger.db\n  toolgate audit prune --store ledger.db --older-than 30d --dry-run"
    )]
    Prune {
        /// Delete rows older than this [default: `retention`, else 90d].
        #[arg(long, value_name = "TIME", value_parser = parse_duration)]
        older_than: Option<SignedDuration>,
        /// Delete outcomes, approvals and large outputs older than this.
        ///
        /// The claims stay: a call that was made is never forgotten.
        #[arg(long, value_name = "TIME", default_value = "30d", value_parser = parse_duration)]
        sealed_older_than: SignedDuration,
        /// Only print how many rows would be deleted.
        #[arg(long)]
        dry_run: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Count calls, refusals by rule, and time by gate.
    #[command(after_help = "Examples:\n  toolgate audit stats --store ledger.db --since 7d")]
    Stats {
        #[command(flatten)]
        filter: RowFilterArgs,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// List calls with an unknown outcome, or record the outcome of one.
    #[command(
        after_help = "Examples:\n  toolgate audit settle --store ledger.db                list pending calls\n  toolgate audit settle 019a8f0e-… --happened '{\"paid\": true}' --by ann\n  toolgate audit settle 019a8f0e-… --never --by ann"
    )]
    Settle {
        /// Call id [default: list all pending calls].
        call: Option<CallIdArg>,
        /// Record that the call happened, with this JSON result.
        #[arg(long, value_name = "RESULT", conflicts_with = "never", requires = "call", num_args = 0..=1, default_missing_value = "null")]
        happened: Option<String>,
        /// Record that the call never happened, so that it may be made again.
        #[arg(long, requires = "call")]
        never: bool,
        /// Person that settles the call; the ledger records the name.
        #[arg(long, requires = "call")]
        by: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show the newest calls, and follow new ones.
    #[command(
        after_help = "Examples:\n  toolgate audit tail -f --store ledger.db --decision refused"
    )]
    Tail {
        #[command(flatten)]
        filter: RowFilterArgs,
        /// Wait for new rows.
        #[arg(long, short)]
        follow: bool,
        /// Start with at most this many of the newest rows.
        #[arg(long, short = 'n', default_value_t = 10, value_parser = parse_number::<usize>)]
        limit: usize,
        /// Print one JSON object per line.
        #[arg(long)]
        json: bool,
    },
    /// Check the signature of a receipt, and whether its row is unchanged.
    #[command(
        after_help = "Examples:\n  toolgate audit show 019a8f0e-… --receipt --store ledger.db > receipt.json\n  toolgate audit receipt receipt.json --store ledger.db\n  toolgate audit receipt receipt.json --key 5f0c…   with the public key alone"
    )]
    Receipt {
        /// File with the receipt as JSON; `-` reads standard input.
        file: PathBuf,
        /// Public key of the ledger.
        #[arg(long, value_name = "HEX", value_parser = parse_public_key)]
        key: Option<String>,
    },
    /// Print the public key of the ledger, which verifies its receipts.
    #[command(
        after_help = "Examples:\n  toolgate audit key --store ledger.db\n  toolgate audit key --rotate --store ledger.db"
    )]
    Key {
        /// Create a new signing key. Old signatures stay valid.
        #[arg(long)]
        rotate: bool,
    },
}

impl Args {
    /// Returns true if the command needs no ledger.
    pub(crate) const fn is_offline(&self) -> bool {
        matches!(self.verb, AuditCommand::Receipt { key: Some(_), .. })
    }
}

/// A call id, or a part of one.
#[derive(Debug, Clone)]
pub(crate) enum CallIdArg {
    Id(CallId),
    Partial(PartialId),
}

impl std::str::FromStr for CallIdArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(call) = text.parse() {
            return Ok(Self::Id(call));
        }
        let partial =
            PartialId::parse(text).ok_or("not a call id: expected 32 hexadecimal digits, or at least 6 at the beginning or the end")?;
        Ok(Self::Partial(partial))
    }
}

impl CallIdArg {
    fn resolve(&self, ledger: &dyn LedgerReader) -> io::Result<CallId> {
        let partial = match self {
            Self::Id(call) => return Ok(*call),
            Self::Partial(partial) => partial,
        };
        let mut found = ledger.find_calls(&partial.text).map_err(io::Error::other)?;
        // An abandoned call may have no row yet.
        let pending =
            ledger.pending_claims(toolgate::Timestamp::now()).map_err(io::Error::other)?;
        found.extend(
            pending
                .into_iter()
                .map(|intent| intent.call)
                .filter(|call| partial.matches(&call.to_string())),
        );
        found.sort();
        found.dedup();
        let missing_call = || {
            io::Error::other(format!(
                "the ledger has no call `{}`; list calls with `toolgate audit query`",
                partial.text
            ))
        };
        at_most_one(found, "calls")?.ok_or_else(missing_call)
    }
}

fn parse_public_key(text: &str) -> Result<String, String> {
    let key = text.trim().to_ascii_lowercase();
    let is_valid = key.len() == 64 && key.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_valid {
        Ok(key)
    } else {
        Err("not a public key: expected 64 hexadecimal digits, as `toolgate audit key` prints it"
            .to_owned())
    }
}

pub(crate) fn run(args: Args, store: Option<&Path>) -> io::Result<ExitCode> {
    // Errors of files and of the ledger name them. A bare "disk full" is from standard output.
    let name_output = |error: io::Error| match error.kind() {
        io::ErrorKind::StorageFull => {
            io::Error::other(format!("cannot write to standard output: {error}"))
        }
        _ => error,
    };
    dispatch(args, store).map_err(name_output)
}

fn dispatch(args: Args, store: Option<&Path>) -> io::Result<ExitCode> {
    match args.verb {
        AuditCommand::Query { filter, limit, json } => {
            crate::command::audit::query::query(&filter, limit, json, store)
        }
        AuditCommand::Show { call, receipt, json } => {
            crate::command::audit::query::show(&call, receipt, json, store)
        }
        AuditCommand::Export { filter, out } => {
            crate::command::audit::export::export(&filter, out.as_deref(), store)
        }
        AuditCommand::Stats { filter, json } => {
            crate::command::audit::query::stats(&filter, json, store)
        }
        AuditCommand::Tail { filter, follow, limit, json } => {
            crate::command::audit::query::tail(&filter, follow, limit, json, store)
        }
        AuditCommand::Verify { anchor, key, json } => {
            crate::command::audit::maintain::verify(anchor, key, json, store)
        }
        AuditCommand::Prune { older_than, sealed_older_than, dry_run, json } => {
            crate::command::audit::maintain::prune(
                older_than,
                sealed_older_than,
                dry_run,
                json,
                store,
            )
        }
        AuditCommand::Settle { call: None, json, .. } => {
            crate::command::audit::maintain::list_pending(json, store)
        }
        AuditCommand::Settle { call: Some(call), happened, never, by, json } => {
            crate::command::audit::maintain::settle(
                &call,
                happened.as_deref(),
                never,
                by.as_deref(),
                json,
                store,
            )
        }
        AuditCommand::Receipt { file, key } => {
            crate::command::audit::maintain::verify_receipt(&file, key.as_deref(), store)
        }
        AuditCommand::Key { rotate } => crate::command::audit::maintain::print_key(rotate, store),
    }
}
