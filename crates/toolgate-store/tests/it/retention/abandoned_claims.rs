//! Tests of abandoned calls: their possible effects, reservations and stored claims.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::json;
use toolgate::{ManualClock, Outcome, Tool, Toolgate};
use toolgate_store::SqliteStore;

use crate::ledger_fixture::{LedgerFixture, noon, runtime};

const TEST_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);

/// Waits until this many calls are pending, after the threads of their processes have ended.
async fn wait_for_pending_calls(gate: &Toolgate, calls: usize) {
    let started_at = std::time::Instant::now();
    while gate.pending_calls().await.unwrap().len() < calls && started_at.elapsed() < TEST_TIMEOUT {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(gate.pending_calls().await.unwrap().len(), calls);
}

#[test]
fn abandoned_call_revokes_evidence() {
    let directory = tempfile::tempdir().unwrap();
    let plain = |name: &str| {
        Tool::dynamic(name, "Does.", json!({"type": "object"}), |_, _| async { Ok(json!({})) })
    };
    let started = Arc::new(tokio::sync::Notify::new());
    let open = || {
        let started = Arc::clone(&started);
        let agent = toolgate::Agent::builder("a")
            .tool(plain("look").effect(toolgate::Effect::Read))
            .tool(plain("act"))
            .tool(Tool::external("wipe", "Wipes.", None).open().revokes("look"))
            .tool(
                Tool::dynamic("end", "Hangs.", json!({"type": "object"}), move |_, _| {
                    let started = Arc::clone(&started);
                    async move {
                        started.notify_one();
                        std::future::pending::<()>().await;
                        Ok(json!({}))
                    }
                })
                .open()
                .revokes("look"),
            )
            .policy(toolgate::policy::Require::new("looked", ["act"], ["look"]));
        let store = Arc::new(SqliteStore::open(directory.path().join("ledger.db")).unwrap());
        Toolgate::builder().agent(agent.build().unwrap()).store(store).build().unwrap()
    };
    let act = async |gate: &Toolgate, n: u32| {
        gate.session("a", "al", "s")
            .call("act", json!({"n": n}))
            .await
            .outcome
            .error()
            .map(|error| error.code.to_string())
    };
    let look = async |gate: &Toolgate, n: u32| {
        gate.session("a", "al", "s").call("look", json!({"n": n})).await
    };
    // A client may run the call from its admission on, so the evidence is revoked then.
    runtime().block_on(async {
        let gate = open();
        look(&gate, 1).await;
        assert_eq!(act(&gate, 1).await, None);
        std::mem::forget(gate.session("a", "al", "s").admit("wipe", json!({})).await.ok().unwrap());
        assert_eq!(act(&gate, 2).await.as_deref(), Some("prerequisite_missing"));
        look(&gate, 2).await;
        assert_eq!(act(&gate, 3).await, None);
    });
    // The process ends while the call runs.
    let dying = runtime();
    dying.block_on(async {
        let gate = open();
        tokio::spawn(async move { gate.session("a", "al", "s").call("end", json!({})).await });
        tokio::time::timeout(TEST_TIMEOUT, started.notified()).await.unwrap();
    });
    dying.shutdown_background();
    runtime().block_on(async {
        let gate = open();
        wait_for_pending_calls(&gate, 1).await;
        assert_eq!(act(&gate, 4).await.as_deref(), Some("prerequisite_missing"));
    });
}

#[test]
fn running_call_keeps_reservation_after_window() {
    let fixture = LedgerFixture::new();
    let clock = Arc::new(ManualClock::at(noon()));
    let (started, end) =
        (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let (started_signal, end_signal) = (Arc::clone(&started), Arc::clone(&end));
    let wait = Tool::dynamic("wait", "Waits.", json!({"type": "object"}), move |_, arguments| {
        let (started_signal, end_signal) = (Arc::clone(&started_signal), Arc::clone(&end_signal));
        async move {
            if arguments["n"] == 1 {
                started_signal.notify_one();
                end_signal.notified().await;
            }
            Ok(json!({}))
        }
    });
    let limit = toolgate::policy::Limit::calls("two", ["wait"], 2)
        .per(toolgate::policy::LimitOwner::Principal);
    let agent = toolgate::Agent::builder("a")
        .tool(wait.timeout(TEST_TIMEOUT))
        .policy(limit.within(SignedDuration::from_mins(1)));
    let store =
        Arc::new(SqliteStore::open_with_clock(fixture.ledger_path(), clock.clone()).unwrap());
    let gate = Toolgate::builder().agent(agent.build().unwrap()).store(store).build().unwrap();
    runtime().block_on(async {
        let call = async |n: u32| {
            let answer =
                gate.session("a", "al", &n.to_string()).call("wait", json!({ "n": n })).await;
            answer.outcome.error().map(|error| error.code.to_string())
        };
        let first = tokio::spawn({
            let gate = gate.clone();
            async move { gate.session("a", "al", "1").call("wait", json!({"n": 1})).await }
        });
        tokio::time::timeout(TEST_TIMEOUT, started.notified()).await.unwrap();
        assert_eq!(call(2).await, None);
        // The ended call has left the window, and the running call has not.
        clock.advance(SignedDuration::from_mins(2));
        assert_eq!(call(3).await, None);
        assert_eq!(call(4).await.as_deref(), Some("two"));
        end.notify_one();
        assert!(first.await.unwrap().outcome.success().is_some());
        clock.advance(SignedDuration::from_mins(2));
        assert_eq!([call(5).await, call(6).await], [None, None]);
    });
}

#[test]
fn repeated_crashing_call_is_a_loop() {
    let directory = tempfile::tempdir().unwrap();
    let started = Arc::new(tokio::sync::Notify::new());
    let open = || {
        let started = Arc::clone(&started);
        let hang = Tool::dynamic("hang", "Hangs.", json!({"type": "object"}), move |_, _| {
            started.notify_one();
            async {
                std::future::pending::<()>().await;
                Ok(json!({}))
            }
        });
        let agent = toolgate::Agent::builder("a").tool(hang.open());
        let store = Arc::new(SqliteStore::open(directory.path().join("ledger.db")).unwrap());
        Toolgate::builder().agent(agent.build().unwrap()).store(store).build().unwrap()
    };
    for pending_before in 0..2 {
        let dying = runtime();
        dying.block_on(async {
            let gate = open();
            wait_for_pending_calls(&gate, pending_before).await;
            tokio::spawn(async move { gate.session("a", "al", "s").call("hang", json!({})).await });
            tokio::time::timeout(TEST_TIMEOUT, started.notified()).await.unwrap();
        });
        dying.shutdown_background();
    }
    runtime().block_on(async {
        let gate = open();
        wait_for_pending_calls(&gate, 2).await;
        let third = gate.session("a", "al", "s").call("hang", json!({})).await;
        assert_eq!(
            third.outcome.error().map(|error| error.code.to_string()).as_deref(),
            Some("loop_detected")
        );
    });
}

#[test]
fn abandoned_call_counts_as_write() {
    let directory = tempfile::tempdir().unwrap();
    let started = Arc::new(tokio::sync::Notify::new());
    let open = || {
        let started = Arc::clone(&started);
        let note = || json!({"type": "object", "properties": {"id": {"type": "string"}}});
        let hang = Tool::dynamic("hang", "Hangs.", note(), move |_, _| {
            started.notify_one();
            async {
                std::future::pending::<()>().await;
                Ok(json!({}))
            }
        });
        let read = Tool::dynamic("read", "Reads.", note(), |_, _| async {
            Ok(json!("olga@house.example"))
        });
        let to = json!({"type": "object", "properties": {"to": {"type": "string"}}});
        let agent = toolgate::Agent::builder("a")
            .tool(hang.open().entity("note", "/id").keeps("note"))
            .tool(read.effect(toolgate::Effect::Read).entity("note", "/id"))
            .tool(Tool::dynamic("send", "Sends.", to, |_, _| async { Ok(json!({})) }))
            .policy(
                toolgate::policy::Flow::only_from("known", ["send"], ["/to"]).trust_tools(["read"]),
            );
        let store = Arc::new(SqliteStore::open(directory.path().join("ledger.db")).unwrap());
        Toolgate::builder().agent(agent.build().unwrap()).store(store).build().unwrap()
    };
    // The process ends while the call runs.
    let dying = runtime();
    dying.block_on(async {
        let gate = open();
        tokio::spawn(
            async move { gate.session("a", "al", "s").call("hang", json!({"id": "7"})).await },
        );
        tokio::time::timeout(TEST_TIMEOUT, started.notified()).await.unwrap();
    });
    dying.shutdown_background();
    runtime().block_on(async {
        let gate = open();
        wait_for_pending_calls(&gate, 1).await;
        for (id, is_trusted) in [("7", false), ("8", true)] {
            let session = gate.session("a", "al", id);
            session.call("read", json!({ "id": id })).await;
            let sent = session.call("send", json!({"to": "olga@house.example"})).await;
            assert_eq!(sent.outcome.success().is_some(), is_trusted, "{id}");
        }
    });
}

/// Opens a gate with one tool, which the client runs.
fn gate_with_external_tool(fixture: &LedgerFixture, clock: &Arc<ManualClock>) -> Toolgate {
    let agent = toolgate::Agent::builder("a")
        .tool(Tool::external("run", "Runs.", None).open())
        .build()
        .unwrap();
    let store =
        Arc::new(SqliteStore::open_with_clock(fixture.ledger_path(), clock.clone()).unwrap());
    Toolgate::builder().agent(agent).store(store).build().unwrap()
}

#[test]
fn settled_deferred_call_hides_no_other_of_same_client_id() {
    let fixture = LedgerFixture::new();
    let clock = Arc::new(ManualClock::at(noon()));
    runtime().block_on(async {
        let gate = gate_with_external_tool(&fixture, &clock);
        let session = gate.session("a", "al", "s");
        let call = |n: u32| {
            session.prepare("run", json!({"n": n})).client_id("c").idempotency_key(n.to_string())
        };
        let _ = gate.admit(call(1)).await.unwrap();
        let newer = gate.admit(call(2)).await.unwrap().call;
        clock.advance(SignedDuration::from_hours(25));
        assert_eq!(gate.pending_calls().await.unwrap().len(), 2);
        let done = Outcome::Success(toolgate::CallOutput::from_value(json!("done")));
        assert!(gate.settle_pending(newer, Some(done), "eve").await.unwrap());
        let deferred = "SELECT count(*) FROM claims WHERE pass IS NOT NULL";
        let deferred: i64 = rusqlite::Connection::open(fixture.ledger_path())
            .unwrap()
            .query_row(deferred, [], |row| row.get(0))
            .unwrap();
        assert_eq!(deferred, 1, "the state of the settled call is deleted");
        let late = gate.report(call(1), Ok(json!({}))).await;
        assert_eq!(late.outcome.error().map(|error| error.code.to_string()), None);
        assert!(gate.pending_calls().await.unwrap().is_empty());
    });
}

#[test]
fn closed_session_drops_abandoned_deferred_calls() {
    let fixture = LedgerFixture::new();
    let clock = Arc::new(ManualClock::at(noon()));
    runtime().block_on(async {
        let gate = gate_with_external_tool(&fixture, &clock);
        let session = gate.session("a", "al", "s");
        let call = || session.prepare("run", json!({})).client_id("c");
        let _ = gate.admit(call()).await.unwrap();
        clock.advance(SignedDuration::from_hours(25));
        assert_eq!(gate.pending_calls().await.unwrap().len(), 1);
        gate.close_client_session(session.key()).await.unwrap();
        let late = gate.report(call(), Ok(json!({}))).await;
        assert_eq!(
            late.outcome.error().map(|error| error.code.to_string()).as_deref(),
            Some("not_admitted")
        );
        assert_eq!(gate.pending_calls().await.unwrap().len(), 1);
    });
}
