//! Provides ledgers with a payment agent, and a file that records the real effects.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};
use toolgate::policy::source::RuleSet;
use toolgate::{Agent, Clock, Effect, ReconcileSpec, SystemClock, Tool, Toolgate};
use toolgate_store::{Ledger, RowFilter, SqliteStore, TrustRoots, VerificationReport};

use toolgate_testkit::replay_check::assert_replay_unchanged;

/// The rules of the agent.
pub(crate) const RULES: &str = r#"
[[policy]]
name = "known"
rule = "require"
tools = ["pay"]
any_of = ["look"]
same = { customer_id = "/customer" }
fields = { "/active" = true }

[[policy]]
name = "cap"
rule = "deny"
tools = ["pay"]
where = [{ argument = "/amount", above = 300 }]

[[policy]]
name = "daily"
rule = "limit"
tools = ["pay"]
sum = "/amount"
max = 500
per = "/customer"
within = "24h"
"#;

/// Generates reproducible random numbers from a seed.
pub(crate) struct SeededRng(u64);

impl SeededRng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next_below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap() % limit.max(1)
    }
}

/// Returns the number of rounds: `long` in soak tests, otherwise `short`.
pub(crate) fn round_count(short: u32, long: u32) -> u32 {
    if std::env::var_os("TOOLGATE_SOAK").is_some() { long } else { short }
}

pub(crate) fn append_line(path: &Path, line: &str) {
    let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}

pub(crate) fn read_lines(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

fn look_tool() -> Tool {
    let schema = json!({"type": "object", "properties": {"customer": {"type": "string"}}, "required": ["customer"]});
    Tool::dynamic("look", "Looks at a customer.", schema, |_, args: Value| async move {
        Ok(json!({"customer": args["customer"], "active": args["customer"] != "C-9"}))
    })
    .effect(Effect::Read)
    .entity("customer_id", "/customer")
    .proves("/active")
}

/// Creates a tool that writes the name of each payment to the effects file.
fn pay_tool(world: &Path) -> Tool {
    let world = world.to_owned();
    let schema = json!({"type": "object", "properties": {
        "customer": {"type": "string"}, "amount": {"type": "number"}, "name": {"type": "string"}, "slowly": {"type": "boolean"}, "note": {"type": "string"},
        "card": {"type": "string", "writeOnly": true},
    }, "required": ["customer", "amount"]});
    Tool::dynamic("pay", "Pays a customer.", schema, move |_, args: Value| {
        let world = world.clone();
        async move {
            let pause = || {
                tokio::time::sleep(Duration::from_millis(if args["slowly"] == true {
                    1
                } else {
                    0
                }))
            };
            pause().await;
            append_line(&world, args["name"].as_str().unwrap_or("?"));
            pause().await;
            Ok(json!({"paid": args["amount"], "name": args["name"]}))
        }
    })
    .entity("customer_id", "/customer")
    .entity("payment", "/name")
    .reconcile(
        ReconcileSpec::new("find")
            .argument("name", "/name")
            .happened_if("/found", true)
            .never_if("/found", false),
    )
}

fn find_tool(world: &Path) -> Tool {
    let world = world.to_owned();
    let schema =
        json!({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]});
    Tool::dynamic("find", "Finds a payment.", schema, move |_, args: Value| {
        let world = world.clone();
        async move { Ok(json!({"found": read_lines(&world).iter().any(|line| *line == args["name"])})) }
    })
    .effect(Effect::Read)
}

/// Creates the agent with other rules.
pub(crate) fn agent_with_rules(world: &Path, rules: &str) -> Agent {
    let rules = RuleSet::parse("rules.toml", rules);
    let agent = Agent::builder("desk")
        .tool(look_tool())
        .tool(pay_tool(world))
        .tool(find_tool(world))
        .rules(rules)
        .build();
    agent.unwrap_or_else(|error| panic!("{}", error.render(false)))
}

pub(crate) fn default_agent(world: &Path) -> Agent {
    agent_with_rules(world, RULES)
}

/// A temporary directory with a ledger, for one test.
pub(crate) struct LedgerFixture {
    pub(crate) directory: tempfile::TempDir,
    is_copy: bool,
}

/// Replays the ledger when the test ends, except a copy, which a test may have damaged.
impl Drop for LedgerFixture {
    fn drop(&mut self) {
        if !self.is_copy && self.ledger_path().exists() {
            assert_replay_unchanged(&self.ledger_path());
        }
    }
}

impl LedgerFixture {
    pub(crate) fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), is_copy: false }
    }

    pub(crate) fn ledger_path(&self) -> PathBuf {
        self.directory.path().join("ledger.db")
    }

    pub(crate) fn world_path(&self) -> PathBuf {
        self.directory.path().join("world.log")
    }

    pub(crate) fn open(&self) -> Toolgate {
        self.open_at(Arc::new(SystemClock))
    }

    pub(crate) fn open_at(&self, clock: Arc<dyn Clock>) -> Toolgate {
        let store = SqliteStore::open_with_clock(self.ledger_path(), clock).unwrap();
        Toolgate::builder()
            .agent(default_agent(&self.world_path()))
            .store(Arc::new(store))
            .build()
            .unwrap()
    }

    pub(crate) fn ledger(&self) -> Ledger {
        Ledger::open(self.ledger_path()).unwrap()
    }

    pub(crate) fn verify(&self) -> VerificationReport {
        self.ledger().verify(&TrustRoots::default(), |_| ()).unwrap_or_else(|flaw| panic!("{flaw}"))
    }

    /// Returns all rows as JSON.
    pub(crate) fn export(&self) -> Vec<String> {
        export(&self.ledger())
    }

    /// Copies the directory.
    pub(crate) fn copy(&self) -> Self {
        let copy = Self { directory: tempfile::tempdir().unwrap(), is_copy: true };
        copy_all(self.directory.path(), copy.directory.path());
        copy
    }
}

pub(crate) fn export(ledger: &Ledger) -> Vec<String> {
    let entries = ledger.find(&RowFilter::default()).unwrap();
    entries.iter().map(|entry| serde_json::to_string(entry).unwrap()).collect()
}

pub(crate) fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_all(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// Returns the command that runs this test binary as a worker process.
pub(crate) fn worker_command(kind: &str, directory: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["worker", "--exact", "--nocapture", "--test-threads=1"])
        .env("TOOLGATE_WORKER", kind)
        .env("TOOLGATE_DIR", directory);
    command
}

pub(crate) fn worker_directory() -> PathBuf {
    std::env::var_os("TOOLGATE_DIR").unwrap().into()
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

pub(crate) fn noon() -> Timestamp {
    "2026-11-15T12:00:00Z".parse().unwrap()
}
