//! Tests that a killed process loses no acknowledged row and repeats no effect.

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

/// A limit that allows all calls and counts their sum.
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
    // A different call in between prevents that a third attempt counts as a loop.
    let looked = session.call("look", json!({"customer": name})).await;
    append_line(&directory.join("reads.log"), &looked.call.to_string());
    let arguments =
        json!({"customer": format!("C-{task}"), "amount": 1, "name": name, "slowly": true});
    let answer = gate.call(session.prepare("pay", arguments).idempotency_key(name)).await;
    let code =
        answer.outcome.error().map_or_else(|| "ok".to_owned(), |error| error.code.to_string());
    append_line(&directory.join("acks.log"), &format!("{name} {code} {}", answer.call));
}

/// Settles the calls of the killed process before it, and makes new calls.
pub(crate) fn run_worker() {
    let directory = worker_directory();
    runtime().block_on(async {
        let gate = open(&directory);
        // A call without an acknowledgement was not claimed, or has ended, or is pending.
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
            let open = pending.iter().find(|record| {
                record.row.as_ref().is_some_and(|row| row.arguments["name"] == **name)
            });
            let happened = world.contains(name);
            let Some(record) = open else {
                // The call was settled or not claimed, so a repetition is replayed or runs once.
                pay(&gate, &directory, *task, name).await;
                continue;
            };
            // A pending call does not run again.
            pay(&gate, &directory, *task, name).await;
            assert!(
                read_lines(&directory.join("acks.log"))
                    .last()
                    .unwrap()
                    .contains(" pending_reconciliation "),
                "{name}"
            );
            assert_eq!(read_lines(&directory.join("world.log")).contains(name), happened);
            // An operator settles the call.
            let outcome = happened.then(|| {
                Outcome::Success(CallOutput::from_value(json!({"paid": 1, "name": name})))
            });
            assert!(gate.settle_pending(record.call, outcome, "an operator").await.unwrap());
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
    let fixture = LedgerFixture::new();
    let directory = fixture.directory.path();
    let mut rng = SeededRng::new(7);
    for _ in 0..round_count(15, 320) {
        let mut child = process("crash", directory)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Some processes are killed during their recovery.
        if rng.next_below(4) > 0 {
            wait_for_ready(&mut child);
        }
        std::thread::sleep(Duration::from_micros(200 * rng.next_below(150) as u64));
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
    let last = process("crash", directory).env("TOOLGATE_LAST", "1").output().unwrap();
    assert!(last.status.success(), "{}", String::from_utf8_lossy(&last.stderr));

    let (world, acks) =
        (read_lines(&fixture.world_path()), read_lines(&directory.join("acks.log")));
    let effects: BTreeSet<&String> = world.iter().collect();
    assert_eq!(effects.len(), world.len(), "an effect ran twice");
    let ledger = fixture.ledger();
    let rows = ledger.find(&RowFilter::default()).unwrap();
    let by_call: BTreeMap<String, _> =
        rows.iter().map(|entry| (entry.row.call.to_string(), &entry.row)).collect();
    assert_eq!(by_call.len(), rows.len(), "a call has several rows");
    for ack in &acks {
        let parts: Vec<&str> = ack.split(' ').collect();
        assert!(by_call.contains_key(parts[2]), "{ack} was acknowledged but has no row");
        assert!(
            parts[1] != "ok" || effects.contains(&parts[0].to_owned()),
            "{ack} was acknowledged but had no effect"
        );
    }
    // A read has its row, too, although it does not wait for the disk.
    let reads = read_lines(&directory.join("reads.log"));
    assert!(
        reads.len() >= world.len() && reads.iter().all(|call| by_call.contains_key(call)),
        "a read was acknowledged but has no row"
    );
    let tried: BTreeSet<String> = read_lines(&directory.join("tries.log"))
        .iter()
        .map(|line| line.split(' ').next().unwrap().to_owned())
        .collect();
    let acked: BTreeSet<String> =
        acks.iter().filter_map(|line| line.name_if_code("ok")).map(str::to_owned).collect();
    assert_eq!(tried, acked, "a call was never acknowledged");
    assert!(ledger.pending_claims(jiff::Timestamp::now()).unwrap().is_empty());
    assert!(world.len() > 20, "too few effects: {}", world.len());
    println!(
        "{} effects, {} settled by hand, {} rows",
        world.len(),
        read_lines(&directory.join("settled.log")).len(),
        rows.len()
    );
    // The used amount of the limit equals the effects.
    runtime().block_on(async {
        let gate = open(directory);
        for task in 0..TASK_COUNT {
            let spent = world
                .iter()
                .filter(|name| name.split('-').nth(1) == Some(&task.to_string()))
                .count();
            let explanation = gate
                .session("desk", "alice", "a new one")
                .explain("pay", json!({"customer": format!("C-{task}"), "amount": 1}))
                .await;
            assert!(
                explanation.to_string().contains(&format!("{spent} of 100000 used")),
                "{spent}: {explanation}"
            );
        }
    });
    fixture.verify();
}

fn wait_for_ready(child: &mut std::process::Child) {
    use std::io::BufRead;
    let mut stdout = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while stdout.read_line(&mut line).unwrap() > 0 && !line.contains("ready") {
        line.clear();
    }
}
