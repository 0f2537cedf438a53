//! Tests how `audit` shows and settles pending calls.

use std::path::Path;

use serde_json::{Value, json};

use crate::replay_check::assert_replay_unchanged;
use crate::run_toolgate;

#[tokio::test]
async fn audit_show_prints_pending_call_as_json() {
    use toolgate::{Agent, ManualClock, SignedDuration, Timestamp, Tool, Toolgate};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.db");
    let agent =
        Agent::builder("a").tool(Tool::external("run", "Runs.", None).open()).build().unwrap();
    // The lease of the call has expired, and no sweep has run since.
    let past = Timestamp::now().checked_sub(SignedDuration::from_hours(72)).unwrap();
    let clock = std::sync::Arc::new(ManualClock::at(past));
    let store = toolgate_store::SqliteStore::open_with_clock(&path, clock).unwrap();
    let gate = Toolgate::builder().store(std::sync::Arc::new(store)).agent(agent).build().unwrap();
    let call = gate
        .admit(gate.session("a", "b", "s").prepare("run", json!({"n": 1})).client_id("c"))
        .await
        .unwrap()
        .call
        .to_string();
    drop(gate);
    let show = |extra_args: &[&str]| {
        run_toolgate(
            &[&["audit", "show", &call, "--store", path.to_str().unwrap()], extra_args].concat(),
        )
    };
    let (code, stdout, stderr) = show(&["--json"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let shown: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        (shown["row"]["call"].as_str(), &shown["row"]["arguments"]),
        (Some(call.as_str()), &json!({"n": 1}))
    );
    assert!(show(&[]).1.starts_with("not in the ledger yet: the outcome is unknown\n"));
}

/// Creates a ledger with two pending calls, and returns their ids.
async fn ledger_with_pending_calls(path: &Path) -> Vec<String> {
    use toolgate::{Agent, Failure, Tool, Toolgate};
    let schema = json!({"type": "object", "properties": {"order": {"type": "string"}}});
    let pay = Tool::dynamic("pay", "Pays.", schema, |_, _| async {
        Err::<Value, _>(Failure::transient("gone", "the line broke"))
    });
    let gate = Toolgate::builder()
        .store(std::sync::Arc::new(toolgate_store::SqliteStore::open(path).unwrap()))
        .agent(Agent::builder("a").tool(pay.open().once()).build().unwrap())
        .build()
        .unwrap();
    let session = gate.session("a", "b", "s");
    for order in ["one", "two"] {
        session.call("pay", json!({"order": order})).await;
    }
    gate.pending_calls().await.unwrap().into_iter().map(|intent| intent.call.to_string()).collect()
}

#[tokio::test]
async fn pending_call_survives_prune_and_is_settled() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.db");
    let calls = ledger_with_pending_calls(&path).await;
    let run = |args: &[&str]| run_toolgate(&[args, &["--store", path.to_str().unwrap()]].concat());
    assert_replay_unchanged(&path, run_toolgate);
    // The keys are private.
    let mut keys = 0;
    for key in std::fs::read_dir(directory.path().join("ledger.db.state/keys")).unwrap() {
        assert_eq!(key.unwrap().metadata().unwrap().permissions().mode() & 0o077, 0);
        keys += 1;
    }
    assert!(keys >= 2, "{keys}");
    // Pruning removes rows and keeps claims.
    assert!(run(&["audit", "prune", "--older-than", "0s"]).1.starts_with("deleted 2 rows"));
    let (code, listed, _) = run(&["audit", "settle"]);
    assert!(
        code == 0 && calls.len() == 2 && calls.iter().all(|call| listed.contains(call.as_str())),
        "{calls:?} {listed}"
    );
    let (code, stdout, _) =
        run(&["audit", "settle", &calls[0], "--happened", "{\"paid\": true}", "--by", "ann"]);
    assert!(
        code == 0 && stdout.contains("it happened. A repeated call gets this result"),
        "{stdout}"
    );
    let (code, stdout, _) =
        run(&["audit", "settle", &calls[1], "--never", "--by", "ann", "--json"]);
    assert_eq!(
        (code, serde_json::from_str::<Value>(&stdout).unwrap()["happened"].as_bool()),
        (0, Some(false)),
        "{stdout}"
    );
    assert_eq!(run(&["audit", "settle"]).1, "no pending calls\n");
    assert_eq!(run(&["audit", "settle", &calls[1], "--never", "--by", "ann"]).0, 2);
    let (code, stdout, _) = run(&["audit", "verify"]);
    assert!(code == 0, "{stdout}");
    let (code, stdout, _) = run(&["audit", "show", &calls[0]]);
    assert!(
        code == 0
            && stdout.starts_with("the row of this call was pruned")
            && stdout.contains("by ann"),
        "{stdout}"
    );
    let (code, stdout, stderr) = run(&["audit", "show", &calls[0], "--receipt"]);
    assert!(
        code == 2 && stdout.is_empty() && stderr.contains("rows up to 2 were pruned since then"),
        "{stderr}"
    );
    let (_, rows, _) = run(&["audit", "query", "--decision", "settled", "--json"]);
    assert_eq!(rows.lines().count(), 2, "{rows}");
}
