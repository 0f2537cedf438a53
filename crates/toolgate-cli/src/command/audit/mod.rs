//! `toolgate audit`: what happened, and whether the record of it holds.

mod keep;
mod read;

pub(super) use read::{about, row_of};

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use toolgate::{CallId, SignedDuration};
use toolgate_store::{Anchor, Ledger};

use super::ledger::{Part, Wanted, duration, number, only};

/// Look into the ledger: query, show, verify, export, prune, stats, settle, tail, receipt, key.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  toolgate audit query --since 1d --decision refused\n  toolgate audit show 01a1…\n  toolgate audit verify\n  toolgate audit tail -f"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// List calls, newest last.
    #[command(
        after_help = "Examples:\n  toolgate audit query --store ledger.db --since 2h\n  toolgate audit query --store ledger.db --entity customer_id=C-1001\n  toolgate audit query --decision refused --json | jq .row.rule"
    )]
    Query {
        #[command(flatten)]
        wanted: Wanted,
        /// The newest so many.
        #[arg(long, short = 'n', default_value_t = 50, value_parser = number::<usize>)]
        limit: usize,
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
    },
    /// Everything about one call: what was asked, what was decided on what, what came of it.
    #[command(after_help = "Examples:\n  toolgate audit show 019a8f0e-… --store ledger.db")]
    Show {
        /// The call, as `query` lists it; the last 6 digits will do.
        call: Named,
        /// Only a signed receipt for its row, as JSON.
        #[arg(long)]
        receipt: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Check every row, chain and signature. Exit code 0 if all hold, 1 with the first bad row named.
    #[command(
        after_help = "Examples:\n  toolgate audit verify --store ledger.db\n  toolgate audit verify --anchor 1040:9f3a…   was it put back to an older state?"
    )]
    Verify {
        /// A place that an earlier `verify` printed, noted down elsewhere.
        #[arg(long)]
        anchor: Option<Anchor>,
        /// The public key to believe, instead of the one beside the ledger.
        #[arg(long, value_name = "HEX", value_parser = key)]
        key: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Write rows as JSON lines, oldest first, as they are read.
    #[command(after_help = "Examples:\n  toolgate audit export --store ledger.db --since 30d --out october.jsonl")]
    Export {
        #[command(flatten)]
        wanted: Wanted,
        /// The file to write; standard output unless said.
        #[arg(long, short, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Take out old rows; unless `retention` is said, nothing else does. Claims, limits and evidence stay.
    #[command(
        after_help = "Examples:\n  toolgate audit prune --store ledger.db\n  toolgate audit prune --store ledger.db --older-than 30d --dry-run"
    )]
    Prune {
        /// How old rows must be to go; unless said, as `retention` of the configuration says, else 90d.
        #[arg(long, value_name = "TIME", value_parser = duration)]
        older_than: Option<SignedDuration>,
        /// How long recorded outcomes, approvals and large outputs are kept. That a call was made is never forgotten.
        #[arg(long, value_name = "TIME", default_value = "30d", value_parser = duration)]
        sealed_older_than: SignedDuration,
        /// Only say how many rows would go.
        #[arg(long)]
        dry_run: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Count calls, refusals by rule, and time by gate.
    #[command(after_help = "Examples:\n  toolgate audit stats --store ledger.db --since 7d")]
    Stats {
        #[command(flatten)]
        wanted: Wanted,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// List calls of which nobody knows whether they took effect, or say what became of one.
    #[command(
        after_help = "Examples:\n  toolgate audit settle --store ledger.db                what is open?\n  toolgate audit settle 019a8f0e-… --happened '{\"paid\": true}' --by ann\n  toolgate audit settle 019a8f0e-… --never --by ann"
    )]
    Settle {
        /// The call. Without it, all that are open are listed.
        call: Option<Named>,
        /// It happened, and this is its result, as JSON.
        #[arg(long, value_name = "RESULT", conflicts_with = "never", requires = "call", num_args = 0..=1, default_missing_value = "null")]
        happened: Option<String>,
        /// It never happened: it may be made again.
        #[arg(long, requires = "call")]
        never: bool,
        /// Who says so.
        #[arg(long, requires = "call")]
        by: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// The newest calls, and those that follow.
    #[command(after_help = "Examples:\n  toolgate audit tail -f --store ledger.db --decision refused")]
    Tail {
        #[command(flatten)]
        wanted: Wanted,
        /// Wait for more.
        #[arg(long, short)]
        follow: bool,
        /// How many to begin with.
        #[arg(long, short = 'n', default_value_t = 10, value_parser = number::<usize>)]
        limit: usize,
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
    },
    /// Check a receipt: whether this ledger signed it and, with the ledger at hand, whether the row is still there.
    #[command(
        after_help = "Examples:\n  toolgate audit show 019a8f0e-… --receipt --store ledger.db > receipt.json\n  toolgate audit receipt receipt.json --store ledger.db\n  toolgate audit receipt receipt.json --key 5f0c…   with the public key alone"
    )]
    Receipt {
        /// The receipt as JSON; `-` reads it from standard input.
        file: PathBuf,
        /// The public key of the ledger.
        #[arg(long, value_name = "HEX", value_parser = key)]
        key: Option<String>,
    },
    /// Print the public key of the ledger, for whoever shall check its receipts.
    #[command(after_help = "Examples:\n  toolgate audit key --store ledger.db\n  toolgate audit key --rotate --store ledger.db")]
    Key {
        /// Sign with a new key from here on. What the old one signed is still believed.
        #[arg(long)]
        rotate: bool,
    },
}

impl Args {
    /// Whether it needs no ledger, so that none is looked for.
    pub(crate) const fn is_offline(&self) -> bool {
        matches!(self.verb, Verb::Receipt { key: Some(_), .. })
    }
}

/// A call, by its whole name or by a part of it.
#[derive(Debug, Clone)]
pub(crate) enum Named {
    Whole(CallId),
    Part(Part),
}

impl std::str::FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(call) = text.parse() {
            return Ok(Self::Whole(call));
        }
        let part = Part::of(text).ok_or("a call is named by 32 digits, or by at least 6 at the beginning or the end")?;
        Ok(Self::Part(part))
    }
}

impl Named {
    fn find(&self, ledger: &Ledger) -> io::Result<CallId> {
        let part = match self {
            Self::Whole(call) => return Ok(*call),
            Self::Part(part) => part,
        };
        let mut found = ledger.calls_named(&part.said).map_err(io::Error::other)?;
        // Some are not written down yet.
        let pending = ledger.pending(toolgate::Timestamp::now()).map_err(io::Error::other)?;
        found.extend(pending.into_iter().map(|intent| intent.call).filter(|call| part.fits(&call.to_string())));
        found.sort();
        found.dedup();
        let missing = || io::Error::other(format!("the ledger has no call `{}`; `toolgate audit query` lists those it has", part.said));
        only(found, "calls")?.ok_or_else(missing)
    }
}

fn key(text: &str) -> Result<String, String> {
    let key = text.trim().to_ascii_lowercase();
    let right = key.len() == 64 && key.bytes().all(|byte| byte.is_ascii_hexdigit());
    if right { Ok(key) } else { Err("a public key is 64 hexadecimal digits, as `toolgate audit key` prints it".to_owned()) }
}

pub(crate) fn run(args: Args, store: Option<&Path>) -> io::Result<ExitCode> {
    // What is said of a file or of the ledger names it: where something bare is full, it is where all of this is written to.
    let named = |error: io::Error| match error.kind() {
        io::ErrorKind::StorageFull => io::Error::other(format!("standard output could not be written: {error}")),
        _ => error,
    };
    look(args, store).map_err(named)
}

fn look(args: Args, store: Option<&Path>) -> io::Result<ExitCode> {
    match args.verb {
        Verb::Query { wanted, limit, json } => read::query(&wanted, limit, json, store),
        Verb::Show { call, receipt, json } => read::show(&call, receipt, json, store),
        Verb::Export { wanted, out } => read::export(&wanted, out.as_deref(), store),
        Verb::Stats { wanted, json } => read::stats(&wanted, json, store),
        Verb::Tail { wanted, follow, limit, json } => read::tail(&wanted, follow, limit, json, store),
        Verb::Verify { anchor, key, json } => keep::verify(anchor, key, json, store),
        Verb::Prune { older_than, sealed_older_than, dry_run, json } => keep::prune(older_than, sealed_older_than, dry_run, json, store),
        Verb::Settle { call: None, json, .. } => keep::open(json, store),
        Verb::Settle { call: Some(call), happened, never, by, json } => {
            keep::settle(&call, happened.as_deref(), never, by.as_deref(), json, store)
        }
        Verb::Receipt { file, key } => keep::receipt(&file, key.as_deref(), store),
        Verb::Key { rotate } => keep::key(rotate, store),
    }
}
