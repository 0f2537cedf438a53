//! What is kept, what is sealed, what goes, and what is found out later.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use toolgate::json::Digest;
use toolgate::policy::{Limit, Per};
use toolgate::{
    Backtest, Compared, Decision, Definition, Failure, ManualClock, Outcome, Reconcile, Reconciled, Replay, Row, Tool, Toolgate,
};
use toolgate_store::{Filter, Ledger, SqliteStore, Trust, check_receipt};

use crate::world::{Desk, agent_under, noon, runtime};

fn bytes_of(desk: &Desk) -> Vec<u8> {
    fn all(path: &std::path::Path, into: &mut Vec<u8>) {
        for entry in std::fs::read_dir(path).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { all(&path, into) } else { into.extend(std::fs::read(path).unwrap()) }
        }
    }
    let mut bytes = Vec::new();
    all(desk.directory.path(), &mut bytes);
    bytes
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

#[test]
fn no_secret_is_written_down_and_equal_ones_can_be_matched() {
    let desk = Desk::new();
    runtime().block_on(async {
        let run = async |session: &str| {
            let store = Arc::new(SqliteStore::open(desk.path()).unwrap());
            let world = desk.world();
            let agent = toolgate::Agent::builder("desk")
                .tool(
                    Tool::dynamic(
                        "say",
                        "Says.",
                        json!({"type": "object", "properties": {"text": {"type": "string"}, "account": {"type": "string"}, "card": {"type": "string", "writeOnly": true}}}),
                        |_, args: Value| async move {
                            if args["text"] == "fail" { Err(Failure::business("no", "no: 4111-2222-3333-4444")) } else { Ok(json!({"said": args["text"]})) }
                        },
                    )
                    .open()
                    .once()
                    .entity("account", "/account"),
                )
                .build()
                .unwrap();
            let _ = world;
            let gate = Toolgate::builder().agent(agent).store(store).redact(r"\d{4}-\d{4}-\d{4}-\d{4}").unwrap().build().unwrap();
            let session = gate.session("desk", "alice", session);
            let answer = session.call("say", json!({"text": "it is 4111-2222-3333-4444, she said", "card": "tops3cret"})).await;
            assert_eq!(answer.outcome.success().unwrap().value["said"], "it is 4111-2222-3333-4444, she said", "the model sees what it may see");
            session.call("say", json!({"text": "fail", "account": "4111-2222-3333-4444"})).await;
            answer
        };
        assert!(!run("one").await.outcome.success().unwrap().replayed);
        // After a restart the same call is the same call, and its outcome comes back as it was.
        assert!(run("two").await.outcome.success().unwrap().replayed);
    });
    let bytes = bytes_of(&desk);
    assert!(!contains(&bytes, "4111-2222"), "a pattern is redacted wherever it stands");
    assert!(!contains(&bytes, "tops3cret"), "a secret is redacted");
    let entries = desk.ledger().find(&Filter::default()).unwrap();
    let cards: Vec<&Value> = entries.iter().map(|entry| &entry.row.arguments["card"]).collect();
    assert!(cards[0].as_str().unwrap().starts_with("[redacted "), "{cards:?}");
    assert_eq!(cards[0], cards[2], "equal secrets leave equal marks, after a restart too");
    let by_account = Filter { entity: Some(("account".to_owned(), "4111-2222-3333-4444".into())), ..Filter::default() };
    assert_eq!(desk.ledger().find(&by_account).unwrap().len(), 2, "and can be searched for by who knows them");
    desk.verify();
}

#[test]
fn a_call_that_nobody_reports_leaves_no_secret_in_its_row() {
    let (desk, card) = (Desk::new(), "4111111111111111");
    runtime().block_on(async {
        let schema = json!({"type": "object", "properties": {"card": {"type": "string"}, "n": {"type": "integer"}}});
        let agent = toolgate::Agent::builder("desk")
            .tool(Tool::external("pay", "Pays.", Some(schema)))
            .policy(Limit::calls("n", ["pay"], 5).per(Per::Entity("/card".into())));
        let store = Arc::new(SqliteStore::open(desk.path()).unwrap());
        let gate = Toolgate::builder().agent(agent.build().unwrap()).store(store).redact(r"\b\d{16}\b").unwrap().build().unwrap();
        let session = gate.session("desk", "alice", "s");
        for n in 0..2 {
            let call = session.prepare("pay", json!({"card": card, "n": n})).client_id(format!("c{n}"));
            let _ = gate.admit_kept(call).await.unwrap();
        }
        gate.leave(session.key()).await.unwrap();
        let rows = session.rows().await.unwrap();
        assert_eq!(rows.iter().map(|row| row.code()).collect::<Vec<_>>(), [Some("abandoned"); 2]);
        for row in &rows {
            let text = String::from_utf8(row.canonical().unwrap()).unwrap();
            assert!(!text.contains(card) && text.contains("[redacted "), "{text}");
            // What was used by then is told all the same.
            let used: Vec<_> =
                row.facts.claimed.iter().map(|(counter, _, used)| (counter.contains("[redacted "), used.to_string())).collect();
            assert_eq!(used, [(true, row.arguments["n"].to_string())]);
        }
    });
    desk.verify();
}

#[test]
fn what_is_old_goes_and_what_is_left_holds() {
    let desk = Desk::new();
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
        let everything = desk.ledger().count(&Filter::default()).unwrap();
        assert_eq!(everything, 9);
        let store = SqliteStore::open(desk.path()).unwrap();
        let nothing = store.prune(Timestamp::MIN, Timestamp::MIN).await.unwrap();
        assert_eq!((nothing.rows, nothing.sealed), (0, 0), "to keep for ever is to keep");
        assert!(contains(&bytes_of(&desk), "only_in_its_row"));
        let gone = store.prune(noon() - SignedDuration::from_hours(24 * 90), noon() - SignedDuration::from_hours(24 * 30)).await.unwrap();
        assert_eq!((gone.rows, gone.sealed), (5, 2));
        // A second payment under an old name is still no second payment, though its result is not kept.
        let again = pay("new", "p1").await;
        assert_eq!(again.outcome.error().unwrap().code, "duplicate_call");
        let call = gate.session("desk", "alice", "new").prepare("pay", json!({"customer": "C-1", "amount": 200, "name": "p1"}));
        let why = gate.explain(&call.idempotency_key("p1")).await;
        assert!(matches!(&why.would, toolgate::Would::Refuse(error) if error.code == "duplicate_call"), "{why}");
        // What was proved and what was spent stays.
        let state = gate.session("desk", "alice", "old").state().await.unwrap();
        assert!(!state.evidence.is_empty());
        let answer = pay("new", "p5").await;
        assert_eq!(answer.rule.as_deref(), Some("daily"), "{answer:?}");
    });
    let verified = desk.verify();
    assert_eq!((verified.pruned, verified.rows), (5, 8));
    assert!(!contains(&bytes_of(&desk), "only_in_its_row"), "what is gone is not to be read in free pages");
    // All of it may go.
    runtime().block_on(async {
        let store = SqliteStore::open(desk.path()).unwrap();
        store.prune(Timestamp::now() + SignedDuration::from_hours(1), Timestamp::now()).await.unwrap();
    });
    assert_eq!((desk.verify().pruned, desk.verify().rows), (13, 0));
    runtime().block_on(async {
        desk.open().session("desk", "alice", "both").call("look", json!({"customer": "C-1"})).await;
    });
    let verified = desk.verify();
    assert_eq!((verified.rows, verified.anchor.seq), (1, 14), "and it goes on where it was");
}

#[test]
fn what_rows_are_found_by_goes_with_them_also_where_one_cannot_be_read() {
    let desk = Desk::new();
    runtime().block_on(async {
        let gate = desk.open();
        for customer in ["C-1", "C-2", "C-1"] {
            gate.session("desk", "alice", "s").call("look", json!({"customer": customer})).await;
        }
    });
    let sql = rusqlite::Connection::open(desk.path()).unwrap();
    let about = || sql.query_row("SELECT count(*) FROM entities", [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(about(), 3);
    sql.execute("UPDATE ledger SET body = 'odd' WHERE seq = 2", []).unwrap();
    runtime().block_on(async {
        let store = SqliteStore::open(desk.path()).unwrap();
        assert_eq!(store.prune(Timestamp::now() + SignedDuration::from_hours(1), Timestamp::MIN).await.unwrap().rows, 3);
    });
    assert_eq!(about(), 0);
}

#[test]
fn a_key_can_be_changed_and_the_old_one_is_still_believed() {
    let desk = Desk::new();
    let (first, second, receipt) = runtime().block_on(async {
        let gate = desk.open();
        let session = gate.session("desk", "alice", "s");
        let answer = session.call("look", json!({"customer": "C-1"})).await;
        let other = SqliteStore::open(desk.path()).unwrap();
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
        let elsewhere = Ledger::open_beside(desk.path(), std::path::Path::new("/nowhere")).unwrap();
        elsewhere.verify(&Trust { key: Some(key.to_string()), anchor: None }, |_| ()).unwrap();
    }
    let elsewhere = Ledger::open_beside(desk.path(), std::path::Path::new("/nowhere")).unwrap();
    assert!(elsewhere.verify(&Trust { key: Some("11".repeat(32)), anchor: None }, |_| ()).is_err());
}

/// A key that cannot be read for a while keeps nobody from being signed later, though nobody calls any more.
#[test]
fn what_could_not_be_signed_is_signed_later() {
    let desk = Desk::new();
    runtime().block_on(async {
        let gate = desk.open();
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let other = SqliteStore::open(desk.path()).unwrap();
        let key = other.rotate_key().await.unwrap();
        drop(other);
        let file = desk.directory.path().join(format!("ledger.db.state/keys/sign-{}.key", &key.get(..16).unwrap()));
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
fn a_configuration_that_comes_after_its_row_is_kept_all_the_same() {
    let desk = Desk::new();
    runtime().block_on(async {
        let elsewhere = Desk::new();
        let session = elsewhere.open().session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let row = session.rows().await.unwrap().remove(0);
        let store = Arc::new(SqliteStore::open(desk.path()).unwrap());
        toolgate::Store::take_in(&*store, row).await.unwrap();
        let agent = crate::world::agent(&desk.world());
        let gate = Toolgate::builder().agent(agent).store(store).build().unwrap();
        gate.session("desk", "alice", "s").call("look", json!({"customer": "C-2"})).await;
    });
    assert_eq!(desk.verify().rows, 2);
}

#[test]
fn a_definition_that_does_not_fit_is_put_right_by_whoever_knows_it() {
    let desk = Desk::new();
    runtime().block_on(async { desk.open().session("desk", "alice", "s").call("look", json!({"customer": "C-1"})).await });
    for body in ["", "{}"] {
        let changed = rusqlite::Connection::open(desk.path()).unwrap().execute("UPDATE configs SET body = ?1", [body]).unwrap();
        assert_eq!(changed, 1);
        assert!(desk.ledger().verify(&Trust::default(), |_| ()).is_err());
        runtime().block_on(async { desk.open().session("desk", "alice", "s").call("look", json!({"customer": "C-1"})).await });
        desk.verify();
    }
}

#[test]
fn a_kill_switch_holds_at_once_in_every_process() {
    let desk = Desk::new();
    runtime().block_on(async {
        let gate = desk.open();
        let session = gate.session("desk", "alice", "s");
        let other = SqliteStore::open(desk.path()).unwrap();
        for n in 0..20 {
            assert!(session.call("look", json!({"customer": format!("C-{n}")})).await.outcome.success().is_some());
            let target = toolgate::store::Target::Tool("look".into());
            toolgate::Store::set_pause(&other, target.clone(), Some("stop".to_owned())).await.unwrap();
            assert_eq!(session.call("look", json!({"customer": "C-0"})).await.outcome.error().unwrap().code, "paused");
            toolgate::Store::set_pause(&other, target, None).await.unwrap();
        }
    });
}

#[test]
fn a_receipt_holds_for_what_it_was_given_for() {
    let desk = Desk::new();
    let receipt = runtime().block_on(async {
        let answer = desk.open().session("desk", "alice", "s").call("look", json!({"customer": "C-1"})).await;
        answer.receipt().unwrap()
    });
    let key = SqliteStore::open(desk.path()).unwrap().public_key();
    assert!(check_receipt(&receipt, &key));
    let text = serde_json::to_string(&receipt).unwrap();
    for (from, to) in [("look", "pay"), ("succeeded", "refused"), ("\"seq\":1", "\"seq\":2")] {
        let changed: toolgate::Receipt = serde_json::from_str(&text.replace(from, to)).unwrap();
        assert!(!check_receipt(&changed, &key), "{from} to {to}");
    }
    let entry = &desk.ledger().show(receipt.call).unwrap()[0];
    assert_eq!((entry.seq, entry.hash), (receipt.seq, receipt.hash));
}

/// A desk whose payments end in the dark.
pub(crate) fn dark(desk: &Desk) -> Toolgate {
    let world = desk.world();
    let schema = json!({"type": "object", "properties": {"name": {"type": "string"}, "arrives": {"type": "boolean"}}});
    let found = world.clone();
    let pay = Tool::dynamic("pay", "Pays.", schema, move |_, args: Value| {
        let world = world.clone();
        async move {
            if args["arrives"] == true {
                crate::world::append(&world, args["name"].as_str().unwrap());
            }
            Err(Failure::transient("upstream_timeout", "no answer"))
        }
    })
    .open()
    .reconcile(Reconcile::with("find").argument("name", "/name").happened_if("/found", true).never_if("/found", false));
    let find =
        Tool::dynamic("find", "Finds.", json!({"type": "object", "properties": {"name": {"type": "string"}}}), move |_, args: Value| {
            let found = found.clone();
            async move {
                if args["name"] == "hidden" {
                    Ok(json!({"found": "perhaps"}))
                } else {
                    Ok(json!({"found": crate::world::lines(&found).iter().any(|line| *line == args["name"])}))
                }
            }
        })
        .effect(toolgate::Effect::Read);
    let agent = toolgate::Agent::builder("desk").tool(pay).tool(find).build().unwrap();
    Toolgate::builder().agent(agent).store(Arc::new(SqliteStore::open(desk.path()).unwrap())).build().unwrap()
}

#[test]
fn what_nobody_knows_is_found_out_by_the_tool_that_was_named_for_it() {
    let desk = Desk::new();
    runtime().block_on(async {
        let gate = dark(&desk);
        let session = gate.session("desk", "alice", "s");
        let pay = async |name: &str, arrives: bool| {
            gate.call(session.prepare("pay", json!({"name": name, "arrives": arrives})).idempotency_key(name)).await
        };
        for (name, arrives) in [("a", true), ("b", false), ("hidden", true)] {
            assert_eq!(pay(name, arrives).await.outcome.error().unwrap().effects, toolgate::Effects::Unknown);
            assert_eq!(pay(name, arrives).await.outcome.error().unwrap().code, "pending_reconciliation");
        }
        let said: Vec<Reconciled> = gate.reconcile().await.unwrap().into_iter().map(|(_, said)| said).collect();
        assert_eq!(said[..2], [Reconciled::Happened, Reconciled::Never]);
        assert!(matches!(&said[2], Reconciled::Unknown(why) if why.contains("says neither")), "{said:?}");
        assert_eq!(gate.pending().await.unwrap().len(), 1);
        let again = pay("a", true).await;
        assert!(again.outcome.success().is_some_and(|output| output.replayed), "{again:?}");
        let again = pay("b", false).await;
        assert_eq!(again.outcome.error().unwrap().code, "upstream_timeout", "what never happened may be made again");
        assert_eq!(crate::world::lines(&desk.world()), ["a", "hidden"]);
    });
    let settled = desk.ledger().find(&Filter { decision: Some(Decision::Settled), ..Filter::default() }).unwrap();
    let by: Vec<&str> = settled.iter().map(|entry| entry.row.settles.as_ref().unwrap().by.split(' ').next().unwrap()).collect();
    assert_eq!(by, ["`find`", "`find`"], "and the ledger says by whom");
    desk.verify();
}

#[test]
fn wrong_reconciliations_do_not_load() {
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
    let build = |reconcile| toolgate::Agent::builder("desk").tool(tool(reconcile)).build().unwrap_err().to_string();
    let error = build(Reconcile::with("fnd").argument("card", "/card"));
    for part in ["no tool of this agent", "no result of it means that the call happened", "`/card` is secret"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(build(Reconcile::with("pay").happened_if("/a", 1)).contains("which is no read"));
}

#[test]
fn a_kept_session_is_decided_again_and_other_rules_decide_otherwise() {
    let desk = Desk::new();
    let clock = Arc::new(ManualClock::at(noon()));
    runtime().block_on(async {
        let gate = desk.open_at(clock.clone());
        let session = gate.session("desk", "alice", "s");
        let other = gate.session("desk", "bob", "t");
        let pay = async |session: &toolgate::Session, amount: u32, name: &str| {
            clock.advance(SignedDuration::from_mins(1));
            session.call("pay", json!({"customer": "C-1", "amount": amount, "name": name})).await;
        };
        pay(&session, 100, "too early").await;
        session.call("look", json!({"customer": "C-1"})).await;
        other.call("look", json!({"customer": "C-1"})).await;
        pay(&session, 250, "a").await;
        pay(&other, 200, "b").await;
        pay(&session, 100, "c").await;
        pay(&session, 400, "d").await;
        pay(&session, 50, "e").await;
        drop(gate);
        let ledger = desk.ledger();
        let rows = ledger.find(&Filter::default()).unwrap();
        let definition = Definition::parse(&ledger.definition(rows[0].row.config).unwrap().unwrap()).unwrap();
        let replay = Replay::new([definition.clone().build().unwrap()]).unwrap();
        for entry in &rows {
            assert_eq!(replay.decide(&entry.row).await, Compared::Same, "{:?}", entry.row);
        }
        let index = ledger.index("desk", None, None).unwrap();
        let played = async |rules: &str| {
            let (definition, rules) = (definition.clone(), rules.to_owned());
            let agents = move |_| {
                let then = definition.clone().build().unwrap();
                Ok((then, definition.clone().with_policies([("new.toml".to_owned(), rules.clone())]).build().unwrap()))
            };
            let mut changes = Vec::new();
            let fetch = |seq| ledger.row(seq).map(Option::unwrap);
            Backtest::new(agents)
                .play(&index, 0, fetch, |row, change| {
                    changes.push((row.arguments["name"].as_str().unwrap_or("-").to_owned(), change));
                    Ok(())
                })
                .await
                .unwrap();
            changes
                .into_iter()
                .filter(|(_, change)| change.now != Compared::Same)
                .map(|(name, change)| (name, change.now, change.counterfactual))
                .collect::<Vec<_>>()
        };
        assert_eq!(played(crate::world::RULES).await, [], "the same rules decide the same");
        // A lower cap refuses what was paid; then there is room for what did not fit.
        let stricter = played(&crate::world::RULES.replace("above = 300", "above = 220")).await;
        let told: Vec<(&str, bool)> = stricter.iter().map(|(name, _, counterfactual)| (name.as_str(), *counterfactual)).collect();
        assert_eq!(told, [("a", false), ("c", true)], "{stricter:?}");
        assert!(matches!(&stricter[0].1, Compared::Differs(toolgate::Ruling::Refused { rule: Some(rule), .. }) if rule == "cap"));
        assert!(matches!(&stricter[1].1, Compared::Differs(toolgate::Ruling::Admitted)));
        // A shorter memory lets through what a longer one refused.
        let shorter = played(&crate::world::RULES.replace("24h", "1m")).await;
        assert_eq!(shorter.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), ["c"]);
        // A rule about something that was never asked for cannot be decided by the facts alone, and is by playing.
        let new = agent_under(
            &desk.world(),
            &format!("{}\n[[policy]]\nname = \"few\"\nrule = \"limit\"\ntools = [\"pay\"]\ncalls = 1\n", crate::world::RULES),
        );
        let replay = Replay::new([new]).unwrap();
        let paid = rows.iter().find(|entry| entry.row.arguments["name"] == "b").unwrap();
        assert!(matches!(replay.decide(&paid.row).await, Compared::Undecidable(_)));
        let few = played(&format!(
            "{}\n[[policy]]\nname = \"few\"\nrule = \"limit\"\ntools = [\"pay\"]\ncalls = 0\n",
            crate::world::RULES.replace("most = 500", "most = 5000")
        ))
        .await;
        assert_eq!(few.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), ["a", "b", "c", "e"], "{few:?}");
    });
}

#[test]
fn many_may_look_back_at_once() {
    let desk = Desk::new();
    runtime().block_on(async {
        let gate = desk.open();
        let session = gate.session("desk", "alice", "s");
        for amount in [10, 400, 20, 30] {
            session.call("look", json!({"customer": "C-1"})).await;
            session.call("pay", json!({"customer": "C-1", "amount": amount, "name": "x"})).await;
        }
        let rows = desk.ledger().find(&Filter::default()).unwrap();
        let replay = Arc::new(Replay::of(&gate).unwrap());
        let tasks = (0..4).map(|_| {
            let (replay, rows) = (Arc::clone(&replay), rows.clone());
            tokio::spawn(async move {
                for _ in 0..50 {
                    for entry in &rows {
                        assert_eq!(replay.decide(&entry.row).await, Compared::Same);
                    }
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    });
}

#[test]
fn the_same_rules_on_the_same_traffic_change_nothing() {
    let desk = Desk::new();
    let clock = Arc::new(ManualClock::at(noon()));
    let slow = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let agent = move || {
        let offline = Arc::clone(&slow);
        let schema = || json!({"type": "object", "properties": {"n": {"type": "integer"}, "amount": {"type": "number"}}});
        let pay = Tool::dynamic("pay", "Pays.", schema(), move |_, _| {
            let offline = offline.swap(false, std::sync::atomic::Ordering::SeqCst);
            async move {
                if offline {
                    Err(Failure::transient("offline", "offline").effects(toolgate::Effects::None).retry_after_ms(60_000))
                } else {
                    Ok(json!({"paid": true}))
                }
            }
        })
        .retry(0, std::time::Duration::ZERO)
        .once();
        let look = Tool::dynamic("look", "Looks.", schema(), |_, args: Value| async move {
            if args["n"] == 404 { Err(Failure::http(404, "not found")) } else { Ok(json!({"ok": true})) }
        })
        .effect(toolgate::Effect::Read)
        .empty_on(404);
        let rules = "[[policy]]\nname = \"sum\"\nrule = \"limit\"\ntools = [\"pay\"]\nsum = \"/amount\"\nmost = 500\nper = \"principal\"\nwithin = \"24h\"\n[[policy]]\nname = \"looked\"\nrule = \"require\"\ntools = [\"pay\"]\nany_of = [\"look\"]\n";
        toolgate::Agent::builder("desk").tool(pay).tool(look).rules(toolgate::config::Rules::parse("r.toml", rules)).build().unwrap()
    };
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(desk.path()).unwrap());
        let gate = Toolgate::builder().agent(agent()).store(store).clock(clock.clone()).build().unwrap();
        let session = gate.session("desk", "alice", "s");
        let pay = async |amount: u32| {
            clock.advance(SignedDuration::from_secs(10));
            session.call("pay", json!({"amount": amount})).await
        };
        session.call("look", json!({"n": 404})).await;
        assert_eq!(pay(100).await.rule.as_deref(), Some("looked"), "nothing was found, and nothing is proved");
        session.call("look", json!({"n": 1})).await;
        assert_eq!(pay(100).await.outcome.error().unwrap().code, "offline");
        for _ in 0..3 {
            pay(100).await;
        }
        clock.advance(SignedDuration::from_secs(90));
        pay(100).await;
        // Two of one turn, of which only the first fits.
        session.batch([("pay".to_owned(), json!({"amount": 300})), ("pay".to_owned(), json!({"amount": 350}))]).await;
        pay(90).await;
        let ledger = desk.ledger();
        let index = ledger.index("desk", None, None).unwrap();
        let mut said = Vec::new();
        let fetch = |seq| ledger.row(seq).map(Option::unwrap);
        let mut backtest = Backtest::new(move |_| Ok((agent(), agent())));
        backtest
            .play(&index, 0, fetch, |row, change| {
                said.push((row.tool.to_string(), change.now, change.was.to_string()));
                Ok(())
            })
            .await
            .unwrap();
        assert!(said.iter().all(|(_, now, _)| *now == Compared::Same), "{said:#?}");
        assert!(said.len() >= 11);
    });
}

/// What would not be decided the same, of all that the desk has recorded: the payment's name, and what it comes to.
async fn tried(
    desk: &Desk,
    agents: impl FnMut(Digest) -> Result<(toolgate::Agent, toolgate::Agent), String> + 'static,
    read: impl Fn(Row) -> Row,
) -> Vec<(String, Compared)> {
    let ledger = desk.ledger();
    let index = ledger.index("desk", None, None).unwrap();
    let mut said = Vec::new();
    let fetch = |seq| ledger.row(seq).map(|row| read(row.unwrap()));
    Backtest::new(agents)
        .play(&index, 0, fetch, |row, change| {
            said.push((row.arguments["name"].as_str().unwrap_or("-").to_owned(), change.now));
            Ok(())
        })
        .await
        .unwrap();
    said.retain(|(_, now)| *now != Compared::Same);
    said
}

#[test]
fn what_was_known_by_its_key_is_decided_under_other_rules_too() {
    use toolgate::policy::{RecallFact, RecalledBy};
    let desk = Desk::new();
    runtime().block_on(async {
        let gate = desk.open();
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        for (amount, name) in [(100, "a"), (100, "a"), (120, "a"), (250, "b"), (250, "b")] {
            let pay = json!({"customer": "C-1", "amount": amount, "name": name});
            gate.call(session.prepare("pay", pay).idempotency_key(name)).await;
        }
        drop(gate);
        let rows = desk.ledger().find(&Filter::default()).unwrap();
        let known: Vec<_> = rows.iter().filter_map(|entry| Some((entry.row.facts.recalled?, entry.row.facts.recalled_by?))).collect();
        let by_key = |fact| (fact, RecalledBy::Key);
        assert_eq!(known, [by_key(RecallFact::Settled), by_key(RecallFact::KeyReused), by_key(RecallFact::Settled)]);
        let under = |rules: String| {
            let world = desk.world();
            move |_: Digest| Ok((agent_under(&world, crate::world::RULES), agent_under(&world, &rules)))
        };
        assert_eq!(tried(&desk, under(crate::world::RULES.to_owned()), |row| row).await, []);
        // What is refused now cannot be repeated; what came before it can.
        let said = tried(&desk, under(crate::world::RULES.replace("above = 300", "above = 220")), |row| row).await;
        assert!(matches!(&said[..], [(a, Compared::Differs(_)), (b, Compared::Undecidable(_))] if a == "b" && b == "b"), "{said:?}");
        // Rows of a time when none said it.
        let old = |mut row: Row| {
            row.facts.recalled_by = None;
            row
        };
        let said = tried(&desk, under(crate::world::RULES.to_owned()), old).await;
        assert!(said.len() == 3 && said.iter().all(|(_, now)| matches!(now, Compared::Undecidable(_))), "{said:?}");
    });
}

#[test]
fn what_a_person_refused_is_let_through_where_nobody_asks() {
    const ASK: &str =
        "\n[[policy]]\nname = \"large\"\nrule = \"ask\"\ntools = [\"pay\"]\nwhere = [{ argument = \"/amount\", above = 150 }]\n";
    let desk = Desk::new();
    let asking = format!("{}{ASK}", crate::world::RULES);
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(desk.path()).unwrap());
        let gate = Toolgate::builder().agent(agent_under(&desk.world(), &asking)).store(store).build().unwrap();
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let pay = async || {
            let answer = session.call("pay", json!({"customer": "C-1", "amount": 200, "name": "a"})).await;
            answer.outcome.error().unwrap().clone()
        };
        let asked = pay().await;
        assert!(gate.answer_approval(&asked.approval.unwrap().id, false, "bob").await.unwrap());
        assert_eq!(pay().await.code, "approval_denied");
        drop(gate);
        let under = |rules: &str| {
            let (world, then, now) = (desk.world(), asking.clone(), rules.to_owned());
            move |_: Digest| Ok((agent_under(&world, &then), agent_under(&world, &now)))
        };
        assert_eq!(tried(&desk, under(&asking), |row| row).await, []);
        let said = tried(&desk, under(crate::world::RULES), |row| row).await;
        let through = |now: &Compared| *now == Compared::Differs(toolgate::Ruling::Admitted);
        assert!(said.len() == 2 && said.iter().all(|(_, now)| through(now)), "{said:?}");
    });
}

#[test]
fn what_a_tool_would_know_again_is_not_taken_for_a_new_call() {
    const LOOKED: &str = "[[policy]]\nname = \"looked\"\nrule = \"require\"\ntools = [\"pay\"]\nany_of = [\"look\"]\n";
    const CAP: &str = "[[policy]]\nname = \"cap\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhere = [{ argument = \"/amount\", above = 300 }]\n";
    let desk = Desk::new();
    let agent = |rules: &str| {
        let schema = || json!({"type": "object", "properties": {"name": {"type": "string"}, "amount": {"type": "number"}}});
        let pay = Tool::dynamic("pay", "Pays.", schema(), |_, _| async { Ok(json!({"paid": true})) }).once();
        let look = Tool::dynamic("look", "Looks.", schema(), |_, _| async { Ok(json!({})) }).effect(toolgate::Effect::Read);
        let rules = toolgate::config::Rules::parse("r.toml", rules);
        toolgate::Agent::builder("desk").tool(pay).tool(look).rules(rules).build().unwrap()
    };
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(desk.path()).unwrap());
        let gate = Toolgate::builder().agent(agent(LOOKED)).store(store).build().unwrap();
        let session = gate.session("desk", "alice", "s");
        let pay = async || session.call("pay", json!({"name": "a", "amount": 1})).await;
        assert_eq!(pay().await.rule.as_deref(), Some("looked"));
        session.call("look", json!({})).await;
        assert!(pay().await.outcome.success().is_some());
        drop(gate);
        let said = tried(&desk, move |_| Ok((agent(LOOKED), agent(CAP))), |row| row).await;
        assert!(matches!(&said[..], [(_, Compared::Differs(_)), (_, Compared::Undecidable(why))] if why.contains("once")), "{said:?}");
    });
}

#[test]
fn what_hangs_on_a_redacted_value_is_undecidable() {
    let desk = Desk::new();
    let rules = "[[policy]]\nname = \"card\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhere = [{ argument = \"/card\", glob = \"4*\" }]\n";
    let free = "[[policy]]\nname = \"card\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhere = [{ argument = \"/amount\", above = 500 }]\n";
    runtime().block_on(async {
        let gate = |rules: &str| {
            let store = Arc::new(SqliteStore::open(desk.path()).unwrap());
            Toolgate::builder().agent(agent_under(&desk.world(), rules)).store(store).build().unwrap()
        };
        let pay = json!({"customer": "C-1", "amount": 10, "card": "5111", "name": "x"});
        gate(rules).session("desk", "alice", "s").call("pay", pay.clone()).await;
        gate(free).session("desk", "alice", "t").call("pay", pay).await;
        let rows = desk.ledger().find(&Filter::default()).unwrap();
        let replay = |rules: &str| Replay::new([agent_under(&desk.world(), rules)]).unwrap();
        let said = replay(rules).decide(&rows[0].row).await;
        assert!(matches!(&said, Compared::Undecidable(why) if why.contains("/card")), "{said:?}");
        assert_eq!(replay(free).decide(&rows[1].row).await, Compared::Same, "what no rule looks at does not matter");
    });
}

#[test]
fn outcomes_are_answers_of_a_kind() {
    let desk = Desk::new();
    runtime().block_on(async {
        let gate = desk.open();
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let call = || session.prepare("pay", json!({"customer": "C-1", "amount": 10, "name": "once"})).idempotency_key("k");
        let first = gate.call(call()).await;
        let second = gate.call(call()).await;
        let (Outcome::Success(first), Outcome::Success(second)) = (&first.outcome, &second.outcome) else { panic!("{first:?} {second:?}") };
        assert_eq!((&first.value, first.replayed, second.replayed), (&second.value, false, true));
        // X, then Y, then X again without a key are three writes.
        for amount in [1, 2, 1] {
            session.call("pay", json!({"customer": "C-1", "amount": amount, "name": "w"})).await;
        }
        assert_eq!(crate::world::lines(&desk.world()), ["once", "w", "w", "w"]);
        let other = gate.call(session.prepare("pay", json!({"customer": "C-1", "amount": 11, "name": "once"})).idempotency_key("k")).await;
        assert_eq!(other.outcome.error().unwrap().code, "key_reused");
    });
}

const LONG: std::time::Duration = std::time::Duration::from_secs(60);

/// Waits for the one call that is pending once the threads of its process have let go.
async fn is_given_up(gate: &Toolgate) {
    let begun = std::time::Instant::now();
    while gate.pending().await.unwrap().is_empty() && begun.elapsed() < LONG {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(gate.pending().await.unwrap().len(), 1);
}

#[test]
fn a_call_that_nobody_ended_may_have_taken_evidence_away() {
    let directory = tempfile::tempdir().unwrap();
    let plain = |name: &str| Tool::dynamic(name, "Does.", json!({"type": "object"}), |_, _| async { Ok(json!({})) });
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
        gate.session("a", "al", "s").call("act", json!({"n": n})).await.outcome.error().map(|error| error.code.to_string())
    };
    let look = async |gate: &Toolgate, n: u32| gate.session("a", "al", "s").call("look", json!({"n": n})).await;
    // A client runs it, and says nothing: from the moment on that it may.
    runtime().block_on(async {
        let gate = open();
        look(&gate, 1).await;
        assert_eq!(act(&gate, 1).await, None);
        std::mem::forget(gate.session("a", "al", "s").admit("wipe", json!({})).await.ok().unwrap());
        assert_eq!(act(&gate, 2).await.as_deref(), Some("prerequisite_missing"));
        look(&gate, 2).await;
        assert_eq!(act(&gate, 3).await, None);
    });
    // Its process is gone in the middle of it.
    let dying = runtime();
    dying.block_on(async {
        let gate = open();
        tokio::spawn(async move { gate.session("a", "al", "s").call("end", json!({})).await });
        tokio::time::timeout(LONG, started.notified()).await.unwrap();
    });
    dying.shutdown_background();
    runtime().block_on(async {
        let gate = open();
        is_given_up(&gate).await;
        assert_eq!(act(&gate, 4).await.as_deref(), Some("prerequisite_missing"));
    });
}

#[test]
fn a_call_that_nobody_ended_may_have_written() {
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
        let read = Tool::dynamic("read", "Reads.", note(), |_, _| async { Ok(json!("olga@house.example")) });
        let to = json!({"type": "object", "properties": {"to": {"type": "string"}}});
        let agent = toolgate::Agent::builder("a")
            .tool(hang.open().entity("note", "/id").keeps("note"))
            .tool(read.effect(toolgate::Effect::Read).entity("note", "/id"))
            .tool(Tool::dynamic("send", "Sends.", to, |_, _| async { Ok(json!({})) }))
            .policy(toolgate::policy::Flow::only_from("known", ["send"], ["/to"]).trust_tools(["read"]));
        let store = Arc::new(SqliteStore::open(directory.path().join("ledger.db")).unwrap());
        Toolgate::builder().agent(agent.build().unwrap()).store(store).build().unwrap()
    };
    // Its process is gone in the middle of it.
    let dying = runtime();
    dying.block_on(async {
        let gate = open();
        tokio::spawn(async move { gate.session("a", "al", "s").call("hang", json!({"id": "7"})).await });
        tokio::time::timeout(LONG, started.notified()).await.unwrap();
    });
    dying.shutdown_background();
    runtime().block_on(async {
        let gate = open();
        is_given_up(&gate).await;
        for (id, believed) in [("7", false), ("8", true)] {
            let session = gate.session("a", "al", id);
            session.call("read", json!({ "id": id })).await;
            let sent = session.call("send", json!({"to": "olga@house.example"})).await;
            assert_eq!(sent.outcome.success().is_some(), believed, "{id}");
        }
    });
}

#[test]
fn a_pass_ends_with_its_call_and_hides_no_other_of_the_same_name() {
    let desk = Desk::new();
    let clock = Arc::new(ManualClock::at(noon()));
    runtime().block_on(async {
        let agent = toolgate::Agent::builder("a").tool(Tool::external("run", "Runs.", None).open()).build().unwrap();
        let store = Arc::new(SqliteStore::open(desk.path()).unwrap());
        let gate = Toolgate::builder().agent(agent).store(store).clock(clock.clone()).build().unwrap();
        let session = gate.session("a", "al", "s");
        let call = |n: u32| session.prepare("run", json!({"n": n})).client_id("c").idempotency_key(n.to_string());
        let _ = gate.admit_kept(call(1)).await.unwrap();
        let newer = gate.admit_kept(call(2)).await.unwrap().call;
        clock.advance(SignedDuration::from_hours(25));
        assert_eq!(gate.pending().await.unwrap().len(), 2);
        let done = Outcome::Success(toolgate::Output::of(json!("done")));
        assert!(gate.settle_pending(newer, Some(done), "eve").await.unwrap());
        let kept = "SELECT count(*) FROM claims WHERE pass IS NOT NULL";
        let kept: i64 = rusqlite::Connection::open(desk.path()).unwrap().query_row(kept, [], |row| row.get(0)).unwrap();
        assert_eq!(kept, 1, "nobody needs the other any more");
        let late = gate.report_kept(call(1), Ok(json!({}))).await;
        assert_eq!(late.outcome.error().map(|error| error.code.to_string()), None);
        assert!(gate.pending().await.unwrap().is_empty());
    });
}

#[test]
fn a_session_that_ends_keeps_no_pass_of_what_was_given_up_before() {
    let desk = Desk::new();
    let clock = Arc::new(ManualClock::at(noon()));
    runtime().block_on(async {
        let agent = toolgate::Agent::builder("a").tool(Tool::external("run", "Runs.", None).open()).build().unwrap();
        let store = Arc::new(SqliteStore::open(desk.path()).unwrap());
        let gate = Toolgate::builder().agent(agent).store(store).clock(clock.clone()).build().unwrap();
        let session = gate.session("a", "al", "s");
        let call = || session.prepare("run", json!({})).client_id("c");
        let _ = gate.admit_kept(call()).await.unwrap();
        clock.advance(SignedDuration::from_hours(25));
        assert_eq!(gate.pending().await.unwrap().len(), 1);
        gate.leave(session.key()).await.unwrap();
        let late = gate.report_kept(call(), Ok(json!({}))).await;
        assert_eq!(late.outcome.error().map(|error| error.code.to_string()).as_deref(), Some("not_admitted"));
        assert_eq!(gate.pending().await.unwrap().len(), 1);
    });
}
