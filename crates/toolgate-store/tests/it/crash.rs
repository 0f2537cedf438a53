//! Killed at any moment: what was acknowledged has its row, nothing is done twice, what nobody
//! knows is pending.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use toolgate::{Agent, CallOutput, Outcome, Toolgate};
use toolgate_store::{RowFilter, SqliteStore};

use crate::ledger_fixture::{
    LedgerFixture, SeededRng, agent_with_rules, append_line, read_lines, round_count, runtime,
    worker_command as process, worker_directory,
};

const TASK_COUNT: usize = 6;

/// Only a limit: all calls are let through, and what they add up to is known.
const RULES: &str = r#"
[[policy]]
name = "sum"
rule = "limit"
tools = ["pay"]
sum = "/amount"
max = 100000
per = "/customer"
"#;

fn agent(directory: &Path) -> Agent {
    agent_with_rules(&directory.join("world.log"), RULES)
}

fn open(directory: &Path) -> Toolgate {
    let store = Arc::new(SqliteStore::open(directory.join("ledger.db")).unwrap());
    Toolgate::builder().agent(agent(directory)).store(store).build().unwrap()
}

async fn pay(gate: &Toolgate, directory: &Path, task: usize, name: &str) {
    let session = gate.session("desk", "alice", &format!("task-{task}"));
    // So that nobody takes a third attempt for a loop.
    let looked = session.call("look", json!({"customer": name})).await;
    append_line(&directory.join("reads.log"), &looked.call.to_string());
    let arguments =
        json!({"customer": format!("C-{task}"), "amount": 1, "name": name, "slowly": true});
    let answer = gate.call(session.prepare("pay", arguments).idempotency_key(name)).await;
    let said =
        answer.outcome.error().map_or_else(|| "ok".to_owned(), |error| error.code.to_string());
    append_line(&directory.join("acks.log"), &format!("{name} {said} {}", answer.call));
}

/// Goes on where the process before it was killed.
pub(crate) fn run_worker() {
    let directory = worker_directory();
    runtime().block_on(async {
        let gate = open(&directory);
        // What was tried and never acknowledged either never began, or ended, or is pending.
        let acked: BTreeSet<String> = read_lines(&directory.join("acks.log"))
            .iter()
            .filter_map(|line| line.name_if_code("ok"))
            .map(str::to_owned)
            .collect();
        let tried: BTreeMap<String, usize> = read_lines(&directory.join("tries.log"))
            .iter()
            .filter_map(|line| {
                Some((line.split(' ').next()?.to_owned(), line.split(' ').nth(1)?.parse().ok()?))
            })
            .collect();
        let world = read_lines(&directory.join("world.log"));
        let pending = gate.pending_calls().await.unwrap();
        for (name, task) in tried.iter().filter(|(name, _)| !acked.contains(*name)) {
            let open = pending.iter().find(|intent| {
                intent.row.as_ref().is_some_and(|row| row.arguments["name"] == **name)
            });
            let happened = world.contains(name);
            let Some(intent) = open else {
                // Settled before it died, or never claimed: made again, it is answered or done for
                // the first time.
                pay(&gate, &directory, *task, name).await;
                continue;
            };
            // As it is, nobody makes it again.
            pay(&gate, &directory, *task, name).await;
            assert!(
                read_lines(&directory.join("acks.log"))
                    .last()
                    .unwrap()
                    .contains(" pending_reconciliation "),
                "{name}"
            );
            assert_eq!(read_lines(&directory.join("world.log")).contains(name), happened);
            // Somebody looks, and says what became of it.
            let outcome = happened.then(|| {
                Outcome::Success(CallOutput::from_value(json!({"paid": 1, "name": name})))
            });
            assert!(gate.settle_pending(intent.call, outcome, "an operator").await.unwrap());
            append_line(&directory.join("settled.log"), &format!("{name} {happened}"));
            pay(&gate, &directory, *task, name).await;
        }
        if std::env::var_os("TOOLGATE_LAST").is_some() {
            return;
        }
        println!("ready");
        let round = std::process::id();
        let tasks = (0..TASK_COUNT).map(|task| {
            let (gate, directory) = (gate.clone(), directory.clone());
            tokio::spawn(async move {
                for n in 0.. {
                    let name = format!("{round}-{task}-{n}");
                    append_line(&directory.join("tries.log"), &format!("{name} {task}"));
                    pay(&gate, &directory, task, &name).await;
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    });
}

trait RecordedCode {
    fn name_if_code(&self, code: &str) -> Option<&str>;
}

impl RecordedCode for String {
    fn name_if_code(&self, code: &str) -> Option<&str> {
        let mut parts = self.split(' ');
        let name = parts.next()?;
        (parts.next() == Some(code)).then_some(name)
    }
}

#[test]
fn killed_process_loses_no_row_and_repeats_no_effect() {
    let desk = LedgerFixture::new();
    let directory = desk.directory.path();
    let mut dice = SeededRng::new(7);
    for _ in 0..round_count(15, 320) {
        let mut child = process("crash", directory)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Sometimes while it still cleans up after the one before.
        if dice.next_below(4) > 0 {
            wait_for_ready(&mut child);
        }
        std::thread::sleep(Duration::from_micros(200 * dice.next_below(150) as u64));
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains("panicked"), "{said}");
    }
    let last = process("crash", directory).env("TOOLGATE_LAST", "1").output().unwrap();
    assert!(last.status.success(), "{}", String::from_utf8_lossy(&last.stderr));

    let (world, acks) = (read_lines(&desk.world_path()), read_lines(&directory.join("acks.log")));
    let done: BTreeSet<&String> = world.iter().collect();
    assert_eq!(done.len(), world.len(), "an effect ran twice");
    let ledger = desk.ledger();
    let rows = ledger.find(&RowFilter::default()).unwrap();
    let by_call: BTreeMap<String, _> =
        rows.iter().map(|entry| (entry.row.call.to_string(), &entry.row)).collect();
    assert_eq!(by_call.len(), rows.len(), "one row a call");
    for ack in &acks {
        let parts: Vec<&str> = ack.split(' ').collect();
        assert!(by_call.contains_key(parts[2]), "{ack} was acknowledged and has no row");
        assert!(
            parts[1] != "ok" || done.contains(&parts[0].to_owned()),
            "{ack} was acknowledged and never happened"
        );
    }
    // What was only read has its row, too, though nobody waited for the disk.
    let reads = read_lines(&directory.join("reads.log"));
    assert!(
        reads.len() >= world.len() && reads.iter().all(|call| by_call.contains_key(call)),
        "a read was acknowledged and has no row"
    );
    let tried: BTreeSet<String> = read_lines(&directory.join("tries.log"))
        .iter()
        .map(|line| line.split(' ').next().unwrap().to_owned())
        .collect();
    let acked: BTreeSet<String> =
        acks.iter().filter_map(|line| line.name_if_code("ok")).map(str::to_owned).collect();
    assert_eq!(tried, acked, "in the end every call came to its end");
    assert!(ledger.pending_claims(jiff::Timestamp::now()).unwrap().is_empty());
    assert!(world.len() > 20, "the test did something: {}", world.len());
    println!(
        "{} effects, {} settled by hand, {} rows",
        world.len(),
        read_lines(&directory.join("settled.log")).len(),
        rows.len()
    );
    // What was reserved is what was done.
    runtime().block_on(async {
        let gate = open(directory);
        for task in 0..TASK_COUNT {
            let spent = world
                .iter()
                .filter(|name| name.split('-').nth(1) == Some(&task.to_string()))
                .count();
            let why = gate
                .session("desk", "alice", "a new one")
                .explain("pay", json!({"customer": format!("C-{task}"), "amount": 1}))
                .await;
            assert!(why.to_string().contains(&format!("{spent} of 100000 used")), "{spent}: {why}");
        }
    });
    desk.verify();
}

fn wait_for_ready(child: &mut std::process::Child) {
    use std::io::BufRead;
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while out.read_line(&mut line).unwrap() > 0 && !line.contains("ready") {
        line.clear();
    }
}
