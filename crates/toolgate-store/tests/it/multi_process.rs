//! Tests of several processes that share a database.

use std::process::Stdio;
use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::{Effect, Tool, Toolgate};
use toolgate_store::SqliteStore;

use crate::ledger_fixture::{
    LedgerFixture, append_line, read_lines, runtime, worker_command as process, worker_directory,
};

const PROCESS_COUNT: usize = 3;

/// Creates a tool that increments a number in a file in two steps, which is not atomic.
fn count_tool(directory: &std::path::Path) -> Tool {
    let path = directory.join("number");
    Tool::dynamic(
        "count",
        "Counts.",
        json!({"type": "object", "properties": {"by": {"type": "string"}}}),
        move |_, _| {
            let path = path.clone();
            async move {
                let number: u32 =
                    std::fs::read_to_string(&path).unwrap_or_default().parse().unwrap_or(0);
                tokio::time::sleep(std::time::Duration::from_micros(300)).await;
                std::fs::write(&path, (number + 1).to_string())?;
                Ok(json!({"number": number + 1}))
            }
        },
    )
    .effect(Effect::Write)
}

const RULES: &str = r#"
[[policy]]
name = "few"
rule = "limit"
tools = ["count"]
calls = 40
per = "principal"
"#;

pub(crate) fn run_worker() {
    let directory = worker_directory();
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(directory.join("ledger.db")).unwrap());
        let rules = toolgate::policy::source::RuleSet::parse("rules.toml", RULES);
        let agent = toolgate::Agent::builder("desk")
            .tool(count_tool(&directory))
            .rules(rules)
            .build()
            .unwrap();
        // Processes poll the session lock, so a process may wait for long on a slow disk.
        let gate = Toolgate::builder()
            .agent(agent)
            .store(store)
            .busy_timeout(std::time::Duration::from_secs(60))
            .build()
            .unwrap();
        let session = gate.session("desk", "alice", "the same");
        for n in 0..30 {
            let answer =
                session.call("count", json!({"by": format!("{} {n}", std::process::id())})).await;
            let code = answer.outcome.error().map_or("ok", |error| &error.code).to_owned();
            append_line(&directory.join("acks.log"), &code);
        }
    });
}

#[test]
fn processes_share_limits_sessions_and_the_ledger() {
    let fixture = LedgerFixture::new();
    // All processes start at once, before the database exists.
    let children: Vec<_> = (0..PROCESS_COUNT)
        .map(|_| {
            process("share", fixture.directory.path())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let acks = read_lines(&fixture.directory.path().join("acks.log"));
    let count_of = |code: &str| acks.iter().filter(|ack| *ack == code).count();
    assert_eq!(
        (acks.len(), count_of("ok"), count_of("few")),
        (PROCESS_COUNT * 30, 40, PROCESS_COUNT * 30 - 40),
        "all processes share the limit"
    );
    let number = std::fs::read_to_string(fixture.directory.path().join("number")).unwrap();
    assert_eq!(number, "40", "the session lock excludes other processes");
    assert_eq!(fixture.verify().rows, PROCESS_COUNT as u64 * 30);
}

#[test]
fn session_is_read_from_one_snapshot() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
        let step = Tool::dynamic(
            "step",
            "Steps.",
            schema,
            |ctx: toolgate::ToolContext, args: Value| async move {
                ctx.set_slice("n", &args["n"])?;
                ctx.log("steps", &args["n"])?;
                Ok(json!({}))
            },
        );
        let agent =
            toolgate::Agent::builder("desk").tool(step.effect(Effect::Read)).build().unwrap();
        let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
        let gate = Toolgate::builder().agent(agent).store(store).build().unwrap();
        let session = gate.session("desk", "alice", "s");
        let steps = gate.session("desk", "alice", "s");
        let stepping = tokio::spawn(async move {
            for n in 1..=500 {
                assert!(steps.call("step", json!({"n": n})).await.outcome.success().is_some());
            }
        });
        while !stepping.is_finished() {
            let state = session.state().await.unwrap();
            let last = state.slice("n").and_then(Value::as_u64).unwrap_or(0);
            assert_eq!(state.log("steps").count() as u64, last, "slice and log differ");
        }
        stepping.await.unwrap();
    });
}

#[test]
fn wal_stays_short_with_many_single_call_processes() {
    let fixture = LedgerFixture::new();
    let path = fixture.directory.path().join("ledger.db");
    drop(SqliteStore::open(&path).unwrap());
    let wal = path.with_extension("db-wal");
    let mut longest = 0;
    runtime().block_on(async {
        for n in 0..200 {
            // Each process makes one small transaction, like a hook that allows a call.
            let store = SqliteStore::open_for_one_call(&path).unwrap().unwrap();
            let key = toolgate::SessionKey::new("desk", "alice", format!("s{}", n % 3));
            toolgate::store::Store::edit_session(
                &store,
                &key,
                toolgate::session::state::SessionEdit::Reset,
            )
            .await
            .unwrap();
            drop(store);
            longest = longest.max(std::fs::metadata(&wal).map_or(0, |wal| wal.len()));
        }
    });
    // The next process reads the whole WAL.
    assert!(longest < 400 << 10, "the WAL has {longest} bytes");
}
