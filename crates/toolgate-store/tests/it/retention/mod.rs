//! Tests of pruning, and of what the ledger stores after it.

mod abandoned_claims;
mod reconcile;
mod replay;
mod sealed_records;
mod signatures;

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use toolgate::{ManualClock, Outcome, Tool, Toolgate};
use toolgate_store::{Ledger, RowFilter, SqliteStore, TrustRoots};

use crate::ledger_fixture::{LedgerFixture, noon, runtime};

fn all_bytes(fixture: &LedgerFixture) -> Vec<u8> {
    fn collect_bytes(path: &std::path::Path, into: &mut Vec<u8>) {
        for entry in std::fs::read_dir(path).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect_bytes(&path, into)
            } else {
                into.extend(std::fs::read(path).unwrap())
            }
        }
    }
    let mut bytes = Vec::new();
    collect_bytes(fixture.directory.path(), &mut bytes);
    bytes
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

#[test]
fn prune_removes_old_rows_and_keeps_chain_valid() {
    let fixture = LedgerFixture::new();
    let clock = Arc::new(ManualClock::at(noon() - SignedDuration::from_hours(24 * 200)));
    runtime().block_on(async {
        let gate = fixture.open_at(clock.clone());
        let pay = async |session: &str, name: &str| {
            let session = gate.session("desk", "alice", session);
            session.call("look", json!({"customer": "C-1"})).await;
            let call = session.prepare("pay", json!({"customer": "C-1", "amount": 200, "name": name})).idempotency_key(name);
            gate.call(call).await
        };
        pay("old", "p1").await;
        pay("both", "p2").await;
        // Only the row contains this text.
        gate.session("desk", "alice", "old").call("only_in_its_row", json!({})).await;
        clock.set(noon() - SignedDuration::from_hours(1));
        pay("both", "p3").await;
        pay("new", "p4").await;
        let everything = fixture.ledger().count(&RowFilter::default()).unwrap();
        assert_eq!(everything, 9);
        let store = SqliteStore::open(fixture.ledger_path()).unwrap();
        let unlimited = store.prune(Timestamp::MIN, Timestamp::MIN).await.unwrap();
        assert_eq!((unlimited.rows, unlimited.sealed), (0, 0), "a prune before all times deletes nothing");
        assert!(contains(&all_bytes(&fixture), "only_in_its_row"));
        let pruned = store.prune(noon() - SignedDuration::from_hours(24 * 90), noon() - SignedDuration::from_hours(24 * 30)).await.unwrap();
        assert_eq!((pruned.rows, pruned.sealed), (5, 2));
        // A repeated key is still a duplicate, although its result was pruned.
        let again = pay("new", "p1").await;
        assert_eq!(again.outcome.error().unwrap().code, "duplicate_call");
        let call = gate.session("desk", "alice", "new").prepare("pay", json!({"customer": "C-1", "amount": 200, "name": "p1"}));
        let explanation = gate.explain(&call.idempotency_key("p1")).await;
        assert!(matches!(&explanation.would, toolgate::PredictedOutcome::Refuse(error) if error.code == "duplicate_call"), "{explanation}");
        // Evidence and used limits stay.
        let state = gate.session("desk", "alice", "old").state().await.unwrap();
        assert!(!state.evidence.is_empty());
        let answer = pay("new", "p5").await;
        assert_eq!(answer.rule.as_deref(), Some("daily"), "{answer:?}");
    });
    let verified = fixture.verify();
    assert_eq!((verified.pruned, verified.rows), (5, 8));
    assert!(
        !contains(&all_bytes(&fixture), "only_in_its_row"),
        "free pages contain no pruned rows"
    );
    // All rows can be pruned.
    runtime().block_on(async {
        let store = SqliteStore::open(fixture.ledger_path()).unwrap();
        store
            .prune(Timestamp::now() + SignedDuration::from_hours(1), Timestamp::now())
            .await
            .unwrap();
    });
    assert_eq!((fixture.verify().pruned, fixture.verify().rows), (13, 0));
    runtime().block_on(async {
        fixture
            .open()
            .session("desk", "alice", "both")
            .call("look", json!({"customer": "C-1"}))
            .await;
    });
    let verified = fixture.verify();
    assert_eq!((verified.rows, verified.anchor.seq), (1, 14), "the numbers continue");
}

#[test]
fn prune_removes_arguments_of_call() {
    let fixture = LedgerFixture::new();
    // The text fills whole pages, and no evidence contains it.
    let note = "only_in_its_row".repeat(500);
    runtime().block_on(async {
        let gate = fixture.open();
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let paid =
            session.call("pay", json!({"customer": "C-1", "amount": 100, "note": note})).await;
        assert!(paid.outcome.success().is_some(), "{paid:?}");
    });
    let is_there = || contains(&std::fs::read(fixture.ledger_path()).unwrap(), "only_in_its_row");
    assert!(is_there());
    runtime().block_on(async {
        let store = SqliteStore::open(fixture.ledger_path()).unwrap();
        store
            .prune(Timestamp::now() + SignedDuration::from_hours(1), Timestamp::now())
            .await
            .unwrap();
    });
    assert!(!is_there(), "the claim of the call leaves no arguments, either");
}

#[test]
fn prune_removes_entities_of_unreadable_rows() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let gate = fixture.open();
        for customer in ["C-1", "C-2", "C-1"] {
            gate.session("desk", "alice", "s").call("look", json!({"customer": customer})).await;
        }
    });
    let sql = rusqlite::Connection::open(fixture.ledger_path()).unwrap();
    let entity_count =
        || sql.query_row("SELECT count(*) FROM entities", [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(entity_count(), 3);
    sql.execute("UPDATE ledger SET body = 'odd' WHERE seq = 2", []).unwrap();
    runtime().block_on(async {
        let store = SqliteStore::open(fixture.ledger_path()).unwrap();
        assert_eq!(
            store
                .prune(Timestamp::now() + SignedDuration::from_hours(1), Timestamp::MIN)
                .await
                .unwrap()
                .rows,
            3
        );
    });
    assert_eq!(entity_count(), 0);
}

#[test]
fn entity_of_any_json_type_is_found_by_its_text() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.db");
    let look = Tool::dynamic(
        "look",
        "Looks.",
        json!({"type": "object", "properties": {"ok": {}}}),
        |_, _| async { Ok(json!(1)) },
    );
    let agent = toolgate::Agent::builder("a")
        .tool(look.effect(toolgate::Effect::Read).entity("ok", "/ok"))
        .build()
        .unwrap();
    runtime().block_on(async {
        let gate = Toolgate::builder()
            .agent(agent)
            .store(Arc::new(SqliteStore::open(&path).unwrap()))
            .build()
            .unwrap();
        for value in [json!(true), json!(false), json!(7), json!("x")] {
            gate.session("a", "b", "s").call("look", json!({"ok": value})).await;
        }
    });
    let ledger = Ledger::open(&path).unwrap();
    for (text, count) in [("true", 1), ("false", 1), ("7", 1), ("x", 1), ("nothing", 0)] {
        let filter =
            RowFilter { entity: Some(("ok".to_owned(), text.into())), ..RowFilter::default() };
        assert_eq!(ledger.count(&filter).unwrap(), count, "{text}");
    }
}

#[test]
fn definition_can_arrive_after_its_row() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let elsewhere = LedgerFixture::new();
        let session = elsewhere.open().session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let row = session.rows().await.unwrap().remove(0);
        let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
        toolgate::Store::append_spooled(&*store, row).await.unwrap();
        let agent = crate::ledger_fixture::default_agent(&fixture.world_path());
        let gate = Toolgate::builder().agent(agent).store(store).build().unwrap();
        gate.session("desk", "alice", "s").call("look", json!({"customer": "C-2"})).await;
    });
    assert_eq!(fixture.verify().rows, 2);
}

#[test]
fn damaged_definition_is_repaired_by_its_agent() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        fixture.open().session("desk", "alice", "s").call("look", json!({"customer": "C-1"})).await
    });
    for body in ["", "{}"] {
        let changed = rusqlite::Connection::open(fixture.ledger_path())
            .unwrap()
            .execute("UPDATE configs SET body = ?1", [body])
            .unwrap();
        assert_eq!(changed, 1);
        assert!(fixture.ledger().verify(&TrustRoots::default(), |_| ()).is_err());
        runtime().block_on(async {
            fixture
                .open()
                .session("desk", "alice", "s")
                .call("look", json!({"customer": "C-1"}))
                .await
        });
        fixture.verify();
    }
}

#[test]
fn pause_applies_to_every_process_at_once() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let gate = fixture.open();
        let session = gate.session("desk", "alice", "s");
        let other = SqliteStore::open(fixture.ledger_path()).unwrap();
        for n in 0..20 {
            assert!(
                session
                    .call("look", json!({"customer": format!("C-{n}")}))
                    .await
                    .outcome
                    .success()
                    .is_some()
            );
            let target = toolgate::store::PauseTarget::Tool("look".into());
            toolgate::Store::set_pause(&other, target.clone(), Some("stop".to_owned()))
                .await
                .unwrap();
            assert_eq!(
                session
                    .call("look", json!({"customer": "C-0"}))
                    .await
                    .outcome
                    .error()
                    .unwrap()
                    .code,
                "paused"
            );
            toolgate::Store::set_pause(&other, target, None).await.unwrap();
        }
    });
}

#[test]
fn repeated_calls_need_key_to_be_replayed() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let gate = fixture.open();
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let call = || {
            session
                .prepare("pay", json!({"customer": "C-1", "amount": 10, "name": "once"}))
                .idempotency_key("k")
        };
        let first = gate.call(call()).await;
        let second = gate.call(call()).await;
        let (Outcome::Success(first), Outcome::Success(second)) = (&first.outcome, &second.outcome)
        else {
            panic!("{first:?} {second:?}")
        };
        assert_eq!((&first.value, first.replayed, second.replayed), (&second.value, false, true));
        // Without a key, repeated calls run again.
        for amount in [1, 2, 1] {
            session.call("pay", json!({"customer": "C-1", "amount": amount, "name": "w"})).await;
        }
        assert_eq!(
            crate::ledger_fixture::read_lines(&fixture.world_path()),
            ["once", "w", "w", "w"]
        );
        let other = gate
            .call(
                session
                    .prepare("pay", json!({"customer": "C-1", "amount": 11, "name": "once"}))
                    .idempotency_key("k"),
            )
            .await;
        assert_eq!(other.outcome.error().unwrap().code, "key_reused");
    });
}
