//! Tests rows that wait in the spool while the store is unavailable.

use std::sync::atomic::Ordering;

use serde_json::json;
use toolgate::{Effect, Tool};

use crate::support::{InjectedFault, TestWorld};

#[tokio::test]
async fn spooled_row_is_added_when_store_recovers() {
    let world = TestWorld::new(|agent| agent);
    world.store.inject_faults(&[InjectedFault::Commit]);
    let lost = world.session.call("act", json!({"how": "ok"})).await;
    assert_eq!(world.rows().await.1, 1);
    world.store.inject_faults(&[]);
    // The next recorded call adds the spooled row.
    world.session.call("look", json!({})).await;
    let (rows, spooled) = world.rows().await;
    assert_eq!((rows.len(), spooled), (2, 0));
    assert_eq!(rows.iter().filter(|row| row.call == lost.call).count(), 1);
    assert_eq!(
        (world.meter_value().await, world.gate.pending_calls().await.unwrap().len()),
        (1.into(), 0),
        "the call happened, and its claim is settled"
    );
    assert_eq!(world.gate.recover_spool().await, Ok(0));
}

/// Builds a world whose spool has one row, followed by the given bytes.
async fn world_with_damaged_spool(appended: &[u8]) -> TestWorld {
    let world = TestWorld::new(|agent| agent);
    world.store.inject_faults(&[InjectedFault::Commit]);
    world.session.call("look", json!({"at": "1"})).await;
    let path = world.spool.path().join("rows.jsonl");
    let mut rows = std::fs::read(&path).unwrap();
    rows.extend_from_slice(appended);
    std::fs::write(&path, rows).unwrap();
    world
}

#[tokio::test]
async fn torn_spool_line_loses_no_other_row() {
    let world = world_with_damaged_spool(b"\n{\"call\": \"cut \xc3").await;
    world.session.call("look", json!({"at": "2"})).await;
    world.store.inject_faults(&[]);
    for _ in 0..3 {
        world.session.call("look", json!({})).await;
    }
    assert_eq!(
        world
            .session
            .rows()
            .await
            .unwrap()
            .iter()
            .filter(|row| row.arguments["at"].is_string())
            .count(),
        2
    );
    let left: Vec<_> =
        std::fs::read_dir(world.spool.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(left.len(), 1, "one copy for inspection: {left:?}");
    assert!(left[0].to_string_lossy().ends_with(".spoilt"));
}

#[tokio::test]
async fn call_during_outage_does_not_read_whole_spool() {
    // A reader that reaches the invalid line makes a copy of the file.
    let world = world_with_damaged_spool(b"\nno row\n").await;
    let path = world.spool.path().join("rows.jsonl");
    for at in ["2", "3", "4"] {
        world.session.call("look", json!({"at": at})).await;
    }
    let copies = || {
        std::fs::read_dir(world.spool.path())
            .unwrap()
            .filter(|e| e.as_ref().unwrap().path() != path)
            .count()
    };
    assert_eq!((world.spooled_lines().len(), copies()), (5, 0));
    world.store.inject_faults(&[]);
    assert_eq!(world.gate.recover_spool().await, Ok(4));
    assert_eq!((world.rows().await.0.len(), copies()), (4, 1));
}

/// Checks that two runtimes with one spool file lose no row.
#[tokio::test]
async fn runtimes_can_share_one_spool() {
    let store = std::sync::Arc::new(crate::support::FaultyStore::with_clock(std::sync::Arc::new(
        toolgate::SystemClock,
    )));
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        let agent = toolgate::Agent::builder("a").tool(toolgate::builtin::calc()).build().unwrap();
        let store: std::sync::Arc<dyn toolgate::Store> = store.clone();
        toolgate::Toolgate::builder()
            .agent(agent)
            .store(store)
            .spool(directory.path().join("rows.jsonl"))
            .build()
            .unwrap()
    };
    let gates = [open(), open()];
    let call = async |gate: usize, n: u32| {
        gates[gate]
            .session("a", "alice", "s")
            .call("calc", json!({"expression": format!("{n} + 1")}))
            .await
    };
    store.inject_faults(&[InjectedFault::Commit]);
    call(0, 1).await;
    call(1, 2).await;
    store.inject_faults(&[]);
    gates[0].recover_spool().await.unwrap();
    store.inject_faults(&[InjectedFault::Commit]);
    call(1, 3).await;
    call(0, 4).await;
    store.inject_faults(&[]);
    gates[1].recover_spool().await.unwrap();
    let rows = gates[0].session("a", "alice", "s").rows().await.unwrap();
    assert_eq!(rows.len(), 4, "{rows:#?}");
}

/// Builds a world where `ship` requires `check`, and `edit` revokes `check`.
fn shipping_world() -> TestWorld {
    let plain = |name: &str| {
        Tool::dynamic(name, "Does.", json!({"type": "object"}), |_, _| async { Ok(json!({})) })
    };
    TestWorld::new(|agent| {
        let edit = plain("edit").effect(Effect::Write).open().revokes("check");
        let ship = plain("ship").effect(Effect::Write);
        let rule = toolgate::policy::Require::new("checked", ["ship"], ["check"]);
        agent.tool(plain("check").effect(Effect::Read)).tool(edit).tool(ship).policy(rule)
    })
}

async fn error_code(world: &TestWorld, tool: &str) -> Option<String> {
    let answer = world.session.call(tool, json!({})).await;
    answer.outcome.error().map(|error| error.code.to_string())
}

#[tokio::test]
async fn spooled_revocation_keeps_later_evidence() {
    let world = shipping_world();
    let code = async |tool: &str| error_code(&world, tool).await;
    assert_eq!(code("check").await, None);
    world.store.inject_faults(&[InjectedFault::Commit]);
    assert_eq!(code("edit").await.as_deref(), Some("store_unavailable"));
    world.store.inject_faults(&[]);
    // Earlier evidence is revoked, and later evidence counts.
    assert_eq!(code("ship").await.as_deref(), Some("prerequisite_missing"));
    assert_eq!((code("check").await, code("ship").await), (None, None));
}

#[tokio::test]
async fn call_waits_for_spooled_revocation() {
    let world = shipping_world();
    let code = async |tool: &str| error_code(&world, tool).await;
    assert_eq!(code("check").await, None);
    world.store.inject_faults(&[InjectedFault::Commit]);
    code("edit").await;
    // The store accepts calls again, but not spooled rows.
    world.store.inject_faults(&[InjectedFault::AppendSpooled]);
    assert_eq!(code("ship").await.as_deref(), Some("store_unavailable"));
    world.store.inject_faults(&[]);
    assert_eq!(code("ship").await.as_deref(), Some("prerequisite_missing"));
    assert_eq!(world.rows().await.0.len(), 4);
}

#[tokio::test]
async fn call_during_recovery_waits_for_spooled_rows() {
    let world = shipping_world();
    assert!(world.session.call("check", json!({})).await.outcome.success().is_some());
    world.store.inject_faults(&[InjectedFault::Commit]);
    world.session.call("edit", json!({})).await;
    world.store.inject_faults(&[]);
    // The store blocks while it adds the first row.
    let (append_guard, before) =
        (world.store.append_lock.lock().await, world.store.append_attempts.load(Ordering::SeqCst));
    let gate = world.gate.clone();
    let recovery = tokio::spawn(async move { gate.recover_spool().await });
    while world.store.append_attempts.load(Ordering::SeqCst) == before {
        tokio::task::yield_now().await;
    }
    let session = world.session.clone();
    let ship = tokio::spawn(async move { session.call("ship", json!({})).await });
    // A call that does not wait for the recovery would end here.
    for _ in 0..10_000 {
        tokio::task::yield_now().await;
    }
    assert!(!ship.is_finished(), "the call was decided before the row was added");
    drop(append_guard);
    assert_eq!(recovery.await.unwrap(), Ok(1));
    assert_eq!(
        ship.await.unwrap().outcome.error().map(|error| error.code.to_string()).as_deref(),
        Some("prerequisite_missing")
    );
}

#[tokio::test]
async fn waiters_of_failed_recovery_do_not_retry_one_by_one() {
    let world = TestWorld::new(|agent| agent);
    world.store.inject_faults(&[InjectedFault::Commit]);
    world.session.call("look", json!({})).await;
    let (append_guard, before) =
        (world.store.append_lock.lock().await, world.store.append_attempts.load(Ordering::SeqCst));
    let recover = || {
        let gate = world.gate.clone();
        tokio::spawn(async move { gate.recover_spool().await })
    };
    let mut recoveries = vec![recover()];
    while world.store.append_attempts.load(Ordering::SeqCst) == before {
        tokio::task::yield_now().await;
    }
    recoveries.extend((0..20).map(|_| recover()));
    // After these yields, all recoveries wait.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    drop(append_guard);
    for recovery in recoveries {
        assert!(recovery.await.unwrap().is_err());
    }
    assert_eq!(world.store.append_attempts.load(Ordering::SeqCst) - before, 2);
}
