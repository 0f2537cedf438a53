//! What is kept, what goes, and what is found out later.

mod abandoned_claims;
mod replay;
mod sealed_records;

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use toolgate::{
    Decision, Failure, ManualClock, Outcome, ReconcileOutcome, ReconcileSpec, Tool, Toolgate,
};
use toolgate_store::{Ledger, RowFilter, SqliteStore, TrustRoots, check_receipt};

use crate::ledger_fixture::{LedgerFixture, noon, runtime};

fn all_bytes(desk: &LedgerFixture) -> Vec<u8> {
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
    collect_bytes(desk.directory.path(), &mut bytes);
    bytes
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

#[test]
fn prune_removes_old_rows_and_keeps_chain_valid() {
    let desk = LedgerFixture::new();
    let clock = Arc::new(ManualClock::at(noon() - SignedDuration::from_hours(24 * 200)));
    runtime().block_on(async {
        let gate = desk.open_at(clock.clone());
        let pay = async |session: &str, name: &str| {
            let session = gate.session("desk", "alice", session);
            session.call("look", json!({"customer": "C-1"})).await;
            let call = session.prepare("pay", json!({"customer": "C-1", "amount": 200, "name": name})).idempotency_key(name);
            gate.call(call).await
        };
        pay("old", "p1").await;
        pay("both", "p2").await;
        // Nothing but its row knows of it.
        gate.session("desk", "alice", "old").call("only_in_its_row", json!({})).await;
        clock.set(noon() - SignedDuration::from_hours(1));
        pay("both", "p3").await;
        pay("new", "p4").await;
        let everything = desk.ledger().count(&RowFilter::default()).unwrap();
        assert_eq!(everything, 9);
        let store = SqliteStore::open(desk.ledger_path()).unwrap();
        let nothing = store.prune(Timestamp::MIN, Timestamp::MIN).await.unwrap();
        assert_eq!((nothing.rows, nothing.sealed), (0, 0), "to keep for ever is to keep");
        assert!(contains(&all_bytes(&desk), "only_in_its_row"));
        let gone = store.prune(noon() - SignedDuration::from_hours(24 * 90), noon() - SignedDuration::from_hours(24 * 30)).await.unwrap();
        assert_eq!((gone.rows, gone.sealed), (5, 2));
        // A second payment under an old name is still no second payment, though its result is not
        // kept.
        let again = pay("new", "p1").await;
        assert_eq!(again.outcome.error().unwrap().code, "duplicate_call");
        let call = gate.session("desk", "alice", "new").prepare("pay", json!({"customer": "C-1", "amount": 200, "name": "p1"}));
        let why = gate.explain(&call.idempotency_key("p1")).await;
        assert!(matches!(&why.would, toolgate::PredictedOutcome::Refuse(error) if error.code == "duplicate_call"), "{why}");
        // What was proved and what was spent stays.
        let state = gate.session("desk", "alice", "old").state().await.unwrap();
        assert!(!state.evidence.is_empty());
        let answer = pay("new", "p5").await;
        assert_eq!(answer.rule.as_deref(), Some("daily"), "{answer:?}");
    });
    let verified = desk.verify();
    assert_eq!((verified.pruned, verified.rows), (5, 8));
    assert!(
        !contains(&all_bytes(&desk), "only_in_its_row"),
        "what is gone is not to be read in free pages"
    );
    // All of it may go.
    runtime().block_on(async {
        let store = SqliteStore::open(desk.ledger_path()).unwrap();
        store
            .prune(Timestamp::now() + SignedDuration::from_hours(1), Timestamp::now())
            .await
            .unwrap();
    });
    assert_eq!((desk.verify().pruned, desk.verify().rows), (13, 0));
    runtime().block_on(async {
        desk.open().session("desk", "alice", "both").call("look", json!({"customer": "C-1"})).await;
    });
    let verified = desk.verify();
    assert_eq!((verified.rows, verified.anchor.seq), (1, 14), "and it goes on where it was");
}

#[test]
fn prune_removes_arguments_of_call() {
    let desk = LedgerFixture::new();
    // Long enough to fill pages of its own, and what no evidence is about.
    let note = "only_in_its_row".repeat(500);
    runtime().block_on(async {
        let gate = desk.open();
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let paid =
            session.call("pay", json!({"customer": "C-1", "amount": 100, "note": note})).await;
        assert!(paid.outcome.success().is_some(), "{paid:?}");
    });
    let is_there = || contains(&std::fs::read(desk.ledger_path()).unwrap(), "only_in_its_row");
    assert!(is_there());
    runtime().block_on(async {
        let store = SqliteStore::open(desk.ledger_path()).unwrap();
        store
            .prune(Timestamp::now() + SignedDuration::from_hours(1), Timestamp::now())
            .await
            .unwrap();
    });
    assert!(!is_there(), "nor what its claim said of it while it ran");
}

#[test]
fn prune_removes_entities_of_unreadable_rows() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        let gate = desk.open();
        for customer in ["C-1", "C-2", "C-1"] {
            gate.session("desk", "alice", "s").call("look", json!({"customer": customer})).await;
        }
    });
    let sql = rusqlite::Connection::open(desk.ledger_path()).unwrap();
    let about =
        || sql.query_row("SELECT count(*) FROM entities", [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(about(), 3);
    sql.execute("UPDATE ledger SET body = 'odd' WHERE seq = 2", []).unwrap();
    runtime().block_on(async {
        let store = SqliteStore::open(desk.ledger_path()).unwrap();
        assert_eq!(
            store
                .prune(Timestamp::now() + SignedDuration::from_hours(1), Timestamp::MIN)
                .await
                .unwrap()
                .rows,
            3
        );
    });
    assert_eq!(about(), 0);
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
        let about =
            RowFilter { entity: Some(("ok".to_owned(), text.into())), ..RowFilter::default() };
        assert_eq!(ledger.count(&about).unwrap(), count, "{text}");
    }
}

#[test]
fn signatures_of_old_key_stay_valid_after_rotation() {
    let desk = LedgerFixture::new();
    let (first, second, receipt) = runtime().block_on(async {
        let gate = desk.open();
        let session = gate.session("desk", "alice", "s");
        let answer = session.call("look", json!({"customer": "C-1"})).await;
        let other = SqliteStore::open(desk.ledger_path()).unwrap();
        let first = other.public_key();
        let second = other.rotate_key().await.unwrap();
        drop(other);
        // The process that was there before goes on, with the new key.
        session.call("look", json!({"customer": "C-2"})).await;
        (first, second, answer.receipt().unwrap())
    });
    assert_ne!(first, second);
    assert!(check_receipt(&receipt, &first) && !check_receipt(&receipt, &second));
    let verified = desk.verify();
    assert_eq!(verified.signed_to, 2);
    for key in [&first, &second] {
        let elsewhere =
            Ledger::open_with_state_dir(desk.ledger_path(), std::path::Path::new("/nowhere"))
                .unwrap();
        elsewhere.verify(&TrustRoots { key: Some(key.to_string()), anchor: None }, |_| ()).unwrap();
    }
    let elsewhere =
        Ledger::open_with_state_dir(desk.ledger_path(), std::path::Path::new("/nowhere")).unwrap();
    assert!(
        elsewhere.verify(&TrustRoots { key: Some("11".repeat(32)), anchor: None }, |_| ()).is_err()
    );
}

#[test]
fn undone_key_rotation_is_detected() {
    let desk = LedgerFixture::new();
    let look = |desk: &LedgerFixture, n: u32| {
        let call = async {
            desk.open()
                .session("desk", "alice", "s")
                .call("look", json!({"customer": format!("C-{n}")}))
                .await
        };
        runtime().block_on(call);
    };
    let rotate = || {
        runtime().block_on(async {
            SqliteStore::open(desk.ledger_path()).unwrap().rotate_key().await.unwrap()
        })
    };
    look(&desk, 1);
    let first = desk.verify().keys.remove(0);
    let (second, third) = (rotate(), rotate());
    look(&desk, 2);
    desk.verify();
    // What a pruning leaves is in order as well.
    let pruned = async {
        SqliteStore::open(desk.ledger_path())
            .unwrap()
            .prune(Timestamp::now(), Timestamp::MIN)
            .await
            .unwrap()
            .rows
    };
    assert_eq!(runtime().block_on(pruned), 2);
    desk.verify();
    let flaw = |desk: &LedgerFixture| {
        desk.ledger().verify(&TrustRoots::default(), |_| ()).unwrap_err().to_string()
    };
    for key in [&*first, &*second] {
        let copy = desk.copy();
        let sql = rusqlite::Connection::open(copy.ledger_path()).unwrap();
        sql.execute("UPDATE meta SET value = ?1 WHERE name = 'key'", [key]).unwrap();
        let found = flaw(&copy);
        assert!(
            found.starts_with(&format!(
                "the next signature would use {key}, but {third} is current"
            )),
            "{found}"
        );
        // Nor is it hidden by what is signed with it then, and by putting back which key it was.
        look(&copy, 3);
        sql.execute("UPDATE meta SET value = ?1 WHERE name = 'key'", [&*third]).unwrap();
        let found = flaw(&copy);
        assert!(
            found.contains(&format!("is signed with {key}, but {third} was current")),
            "{found}"
        );
    }
}

/// A key that cannot be read for a while keeps nobody from being signed later, though nobody calls
/// any more.
#[test]
fn missing_signature_is_added_later() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        let gate = desk.open();
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let other = SqliteStore::open(desk.ledger_path()).unwrap();
        let key = other.rotate_key().await.unwrap();
        drop(other);
        let file = desk
            .directory
            .path()
            .join(format!("ledger.db.state/keys/sign-{}.key", &key.get(..16).unwrap()));
        let aside = desk.directory.path().join("aside.key");
        std::fs::rename(&file, &aside).unwrap();
        session.call("look", json!({"customer": "C-2"})).await;
        tokio::time::sleep(std::time::Duration::from_millis(1_500)).await;
        std::fs::rename(&aside, &file).unwrap();
        let signed = async || {
            for _ in 0..600 {
                if desk.verify().signed_to == 2 {
                    return true;
                }
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
            false
        };
        assert!(signed().await, "the last row is signed while nobody calls");
    });
}

#[test]
fn definition_can_arrive_after_its_row() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        let elsewhere = LedgerFixture::new();
        let session = elsewhere.open().session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let row = session.rows().await.unwrap().remove(0);
        let store = Arc::new(SqliteStore::open(desk.ledger_path()).unwrap());
        toolgate::Store::append_spooled(&*store, row).await.unwrap();
        let agent = crate::ledger_fixture::default_agent(&desk.world_path());
        let gate = Toolgate::builder().agent(agent).store(store).build().unwrap();
        gate.session("desk", "alice", "s").call("look", json!({"customer": "C-2"})).await;
    });
    assert_eq!(desk.verify().rows, 2);
}

#[test]
fn damaged_definition_is_repaired_by_its_agent() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        desk.open().session("desk", "alice", "s").call("look", json!({"customer": "C-1"})).await
    });
    for body in ["", "{}"] {
        let changed = rusqlite::Connection::open(desk.ledger_path())
            .unwrap()
            .execute("UPDATE configs SET body = ?1", [body])
            .unwrap();
        assert_eq!(changed, 1);
        assert!(desk.ledger().verify(&TrustRoots::default(), |_| ()).is_err());
        runtime().block_on(async {
            desk.open().session("desk", "alice", "s").call("look", json!({"customer": "C-1"})).await
        });
        desk.verify();
    }
}

#[test]
fn pause_applies_to_every_process_at_once() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        let gate = desk.open();
        let session = gate.session("desk", "alice", "s");
        let other = SqliteStore::open(desk.ledger_path()).unwrap();
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
fn receipt_is_valid_only_for_its_row() {
    let desk = LedgerFixture::new();
    let receipt = runtime().block_on(async {
        let answer = desk
            .open()
            .session("desk", "alice", "s")
            .call("look", json!({"customer": "C-1"}))
            .await;
        answer.receipt().unwrap()
    });
    let key = SqliteStore::open(desk.ledger_path()).unwrap().public_key();
    assert!(check_receipt(&receipt, &key));
    let text = serde_json::to_string(&receipt).unwrap();
    for (from, to) in [("look", "pay"), ("succeeded", "refused"), ("\"seq\":1", "\"seq\":2")] {
        let changed: toolgate::Receipt = serde_json::from_str(&text.replace(from, to)).unwrap();
        assert!(!check_receipt(&changed, &key), "{from} to {to}");
    }
    let entry = &desk.ledger().rows_of_call(receipt.call).unwrap()[0];
    assert_eq!((entry.seq, entry.hash), (receipt.seq, receipt.hash));
}

/// A desk whose payments end in the dark.
pub(crate) fn gate_with_unknown_outcomes(desk: &LedgerFixture) -> Toolgate {
    let world = desk.world_path();
    let schema = json!({"type": "object", "properties": {"name": {"type": "string"}, "arrives": {"type": "boolean"}}});
    let found = world.clone();
    let pay = Tool::dynamic("pay", "Pays.", schema, move |_, args: Value| {
        let world = world.clone();
        async move {
            if args["arrives"] == true {
                crate::ledger_fixture::append_line(&world, args["name"].as_str().unwrap());
            }
            Err(Failure::transient("upstream_timeout", "no answer"))
        }
    })
    .open()
    .reconcile(
        ReconcileSpec::new("find")
            .argument("name", "/name")
            .happened_if("/found", true)
            .never_if("/found", false),
    );
    let find =
        Tool::dynamic("find", "Finds.", json!({"type": "object", "properties": {"name": {"type": "string"}}}), move |_, args: Value| {
            let found = found.clone();
            async move {
                if args["name"] == "hidden" {
                    Ok(json!({"found": "perhaps"}))
                } else {
                    Ok(json!({"found": crate::ledger_fixture::read_lines(&found).iter().any(|line| *line == args["name"])}))
                }
            }
        })
        .effect(toolgate::Effect::Read);
    let agent = toolgate::Agent::builder("desk").tool(pay).tool(find).build().unwrap();
    Toolgate::builder()
        .agent(agent)
        .store(Arc::new(SqliteStore::open(desk.ledger_path()).unwrap()))
        .build()
        .unwrap()
}

#[test]
fn pending_call_is_settled_by_reconcile_tool() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        let gate = gate_with_unknown_outcomes(&desk);
        let session = gate.session("desk", "alice", "s");
        let pay = async |name: &str, arrives: bool| {
            gate.call(
                session
                    .prepare("pay", json!({"name": name, "arrives": arrives}))
                    .idempotency_key(name),
            )
            .await
        };
        for (name, arrives) in [("a", true), ("b", false), ("hidden", true)] {
            assert_eq!(
                pay(name, arrives).await.outcome.error().unwrap().effects,
                toolgate::CallEffects::Unknown
            );
            assert_eq!(
                pay(name, arrives).await.outcome.error().unwrap().code,
                "pending_reconciliation"
            );
        }
        let said: Vec<ReconcileOutcome> =
            gate.reconcile().await.unwrap().into_iter().map(|(_, said)| said).collect();
        assert_eq!(said[..2], [ReconcileOutcome::Happened, ReconcileOutcome::Never]);
        assert!(
            matches!(&said[2], ReconcileOutcome::Unknown(why) if why.contains("inconclusive")),
            "{said:?}"
        );
        assert_eq!(gate.pending_calls().await.unwrap().len(), 1);
        let again = pay("a", true).await;
        assert!(again.outcome.success().is_some_and(|output| output.replayed), "{again:?}");
        let again = pay("b", false).await;
        assert_eq!(
            again.outcome.error().unwrap().code,
            "upstream_timeout",
            "what never happened may be made again"
        );
        assert_eq!(crate::ledger_fixture::read_lines(&desk.world_path()), ["a", "hidden"]);
    });
    let settled = desk
        .ledger()
        .find(&RowFilter { decision: Some(Decision::Settled), ..RowFilter::default() })
        .unwrap();
    let by: Vec<&str> = settled
        .iter()
        .map(|entry| entry.row.settles.as_ref().unwrap().by.split(' ').next().unwrap())
        .collect();
    assert_eq!(by, ["`find`", "`find`"], "and the ledger says by whom");
    desk.verify();
}

#[test]
fn invalid_reconcile_settings_do_not_load() {
    let tool = |reconcile| {
        Tool::dynamic(
            "pay",
            "Pays.",
            json!({"type": "object", "properties": {"card": {"type": "string", "writeOnly": true}}}),
            |_, _| async { Ok(Value::Null) },
        )
        .open()
        .reconcile(reconcile)
    };
    let build = |reconcile| {
        toolgate::Agent::builder("desk").tool(tool(reconcile)).build().unwrap_err().to_string()
    };
    let error = build(ReconcileSpec::new("fnd").argument("card", "/card"));
    for part in [
        "not a tool of this agent",
        "no result means that the call took effect",
        "`/card` is secret",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert!(
        build(ReconcileSpec::new("pay").happened_if("/a", 1)).contains("it does not only read")
    );
}

#[test]
fn repeated_calls_need_key_to_be_replayed() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        let gate = desk.open();
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
        // X, then Y, then X again without a key are three writes.
        for amount in [1, 2, 1] {
            session.call("pay", json!({"customer": "C-1", "amount": amount, "name": "w"})).await;
        }
        assert_eq!(crate::ledger_fixture::read_lines(&desk.world_path()), ["once", "w", "w", "w"]);
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
