//! Tests of repeated calls after restarts, and of queries, pruning and clocks that are set back.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use toolgate::policy::Require;
use toolgate::{
    Agent, Answer, Backtest, Effect, ManualClock, ReplayComparison, SessionKey, Tool, Toolgate,
};
use toolgate_json::Digest;
use toolgate_store::{RowFilter, SqliteStore, hash_chain};

use crate::ledger_fixture::{
    LedgerFixture, agent_with_rules, append_line, noon, read_lines, runtime,
};

const APPROVAL_RULES: &str = r#"
[[policy]]
name = "large"
rule = "ask"
tools = ["pay"]
where = [{ argument = "/amount", above = 100 }]
"#;

/// Opens a gate that requires approval of large payments, and returns its store.
fn open_asking_gate(
    fixture: &LedgerFixture,
    clock: &Arc<ManualClock>,
) -> (Toolgate, Weak<SqliteStore>) {
    let store =
        Arc::new(SqliteStore::open_with_clock(fixture.ledger_path(), clock.clone()).unwrap());
    let open = Arc::downgrade(&store);
    let gate = Toolgate::builder()
        .agent(agent_with_rules(&fixture.world_path(), APPROVAL_RULES))
        .store(store)
        .build()
        .unwrap();
    (gate, open)
}

fn large_payment(name: &str) -> Value {
    json!({"customer": "C-1", "amount": 200, "name": name})
}

/// Makes a large payment, and returns the id of the requested approval.
async fn request_approval(gate: &Toolgate, name: &str) -> String {
    let answer = gate.session("desk", "alice", "s").call("pay", large_payment(name)).await;
    let error = answer.outcome.error().unwrap();
    assert_eq!(error.code, "approval_required");
    error.approval.clone().unwrap().id
}

fn outcome_label(answer: &Answer) -> String {
    match (answer.outcome.success(), answer.outcome.error()) {
        (Some(output), _) if output.replayed => "replayed".to_owned(),
        (_, Some(error)) => error.code.to_string(),
        _ => "ran".to_owned(),
    }
}

#[test]
fn approval_survives_restarts_and_allows_one_call() {
    let (fixture, clock) = (LedgerFixture::new(), Arc::new(ManualClock::at(noon())));
    runtime().block_on(async {
        let (gate, open) = open_asking_gate(&fixture, &clock);
        let id = request_approval(&gate, "large").await;
        drop(gate);
        assert!(open.upgrade().is_none(), "the store is still open");
        let (gate, open) = open_asking_gate(&fixture, &clock);
        assert!(gate.answer_approval(&id, true, "bob").await.unwrap());
        drop(gate);
        assert!(open.upgrade().is_none(), "the store is still open");
        assert!(read_lines(&fixture.world_path()).is_empty(), "an approval ran a call");

        let (gate, open) = open_asking_gate(&fixture, &clock);
        assert_eq!(
            outcome_label(
                &gate.session("desk", "alice", "s").call("pay", large_payment("large")).await
            ),
            "ran"
        );
        drop(gate);
        assert!(open.upgrade().is_none(), "the store is still open");
        let (gate, _) = open_asking_gate(&fixture, &clock);
        let session = gate.session("desk", "alice", "s");
        // A different call in between prevents that the repetition counts as a loop.
        session.call("look", json!({"customer": "C-1"})).await;
        assert_eq!(
            outcome_label(
                &gate.call(session.prepare("pay", large_payment("large")).approval(&id)).await
            ),
            "approval_denied",
            "the approval was used already"
        );
        assert_ne!(
            request_approval(&gate, "large").await,
            id,
            "a repeated call needs another approval"
        );
    });
    assert_eq!(read_lines(&fixture.world_path()), ["large"]);
    fixture.verify();
}

#[test]
fn approval_is_pruned_by_its_expiry_not_with_its_row() {
    let (fixture, clock) = (
        LedgerFixture::new(),
        Arc::new(ManualClock::at(noon() - SignedDuration::from_hours(24 * 200))),
    );
    let (start, month_ago) = (Timestamp::MIN, noon() - SignedDuration::from_hours(24 * 30));
    runtime().block_on(async {
        let (gate, _) = open_asking_gate(&fixture, &clock);
        let store = SqliteStore::open(fixture.ledger_path()).unwrap();
        let is_stored = async |id: &str| gate.approval(id).await.unwrap().is_some();
        let old = request_approval(&gate, "old").await;
        clock.set(noon());
        let new = request_approval(&gate, "new").await;

        let pruned = store.prune(noon() + SignedDuration::from_hours(1), start).await.unwrap();
        assert_eq!((pruned.rows, pruned.sealed), (2, 0));
        assert!(
            is_stored(&old).await && is_stored(&new).await,
            "pruning rows deletes no approvals"
        );
        let pruned = store.prune(start, month_ago).await.unwrap();
        assert_eq!((pruned.rows, pruned.sealed), (0, 1));
        assert!(
            !is_stored(&old).await && is_stored(&new).await,
            "only the expired approval is deleted"
        );
        assert!(
            !gate.answer_approval(&old, true, "bob").await.unwrap(),
            "a deleted approval cannot be answered"
        );

        let expires = gate.approval(&new).await.unwrap().unwrap().expires;
        assert_eq!(
            store.prune(start, expires).await.unwrap().sealed,
            0,
            "the approval can be used until then"
        );
        assert!(gate.answer_approval(&new, true, "bob").await.unwrap());
        assert_eq!(
            outcome_label(
                &gate.session("desk", "alice", "s").call("pay", large_payment("new")).await
            ),
            "ran"
        );
        let later = expires + SignedDuration::from_nanos(1);
        assert_eq!(
            store.prune(start, later).await.unwrap().sealed,
            1,
            "a used approval is deleted, too"
        );
        assert!(!is_stored(&new).await);
    });
    assert_eq!(read_lines(&fixture.world_path()), ["new"]);
    fixture.verify();
}

/// Creates an agent with two tools that record their calls in the effects file.
fn clerk_agent(fixture: &LedgerFixture, name: &'static str) -> Agent {
    let tool = |tool: &'static str| {
        let (world, schema) = (
            fixture.world_path(),
            json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        );
        Tool::dynamic(tool, "Writes down that it ran.", schema, move |_, args: Value| {
            append_line(&world, &format!("{name} {tool} {}", args["n"]));
            async move { Ok(args) }
        })
        .effect(Effect::Write)
        .open()
    };
    Agent::builder(name).tool(tool("stamp")).tool(tool("file")).build().unwrap()
}

#[test]
fn idempotency_key_is_scoped_to_tool_agent_and_principal() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        // Each call has its own `Toolgate`, so earlier calls are known only to the store.
        let call = async |(agent, principal, tool): (&str, &str, &str), session: &str, n: u32| {
            let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
            let gate = Toolgate::builder()
                .agent(clerk_agent(&fixture, "desk"))
                .agent(clerk_agent(&fixture, "archive"))
                .store(store)
                .build()
                .unwrap();
            let call = gate
                .session(agent, principal, session)
                .prepare(tool, json!({"n": n}))
                .idempotency_key("k");
            outcome_label(&gate.call(call).await)
        };
        let claims = [
            ("desk", "alice", "stamp"),
            ("desk", "alice", "file"),
            ("archive", "alice", "stamp"),
            ("desk", "bob", "stamp"),
        ];
        for (n, claim) in (1..).zip(claims) {
            assert_eq!(call(claim, "s", n).await, "ran", "{claim:?} has its own claim");
        }
        for (n, claim) in (1..).zip(claims) {
            assert_eq!(
                call(claim, "t", n).await,
                "replayed",
                "{claim:?} in another session is the same claim"
            );
            assert_eq!(
                call(claim, "s", n + 1).await,
                "key_reused",
                "{claim:?} with other arguments"
            );
        }
    });
    assert_eq!(
        read_lines(&fixture.world_path()),
        ["desk stamp 1", "desk file 2", "archive stamp 3", "desk stamp 4"]
    );
    fixture.verify();
}

/// Records one row per minute, the last one at noon.
fn record_row_per_minute(fixture: &LedgerFixture, rows: i64) {
    let clock = Arc::new(ManualClock::at(noon()));
    runtime().block_on(async {
        let gate = fixture.open_at(clock.clone());
        for n in 1..=rows {
            clock.set(noon() - SignedDuration::from_mins(rows - n));
            gate.session("desk", "alice", &format!("s{}", n % 3))
                .call("look", json!({"customer": format!("C-{}", n % 2)}))
                .await;
        }
    });
}

fn matching_seqs(fixture: &LedgerFixture, filter: &RowFilter) -> Vec<u64> {
    fixture.ledger().find(filter).unwrap().iter().map(|entry| entry.seq).collect()
}

#[test]
fn running_query_is_not_affected_by_prune() {
    let fixture = LedgerFixture::new();
    record_row_per_minute(&fixture, 30);
    let (runtime, store) = (runtime(), SqliteStore::open(fixture.ledger_path()).unwrap());
    let filter = RowFilter {
        entity: Some(("customer_id".to_owned(), json!("C-1"))),
        ..RowFilter::default()
    };
    let (ledger, mut seqs) = (fixture.ledger(), Vec::new());
    let query = ledger.query(&filter, |entry| {
        if seqs.is_empty() {
            let pruned = runtime
                .block_on(store.prune(noon() - SignedDuration::from_mins(9), Timestamp::MIN))
                .unwrap();
            assert_eq!(pruned.rows, 20);
        }
        seqs.push(entry.seq);
        Ok(true)
    });
    query.unwrap();
    assert_eq!(seqs, (1..=29).step_by(2).collect::<Vec<u64>>());
    assert_eq!(
        matching_seqs(&fixture, &filter),
        [21, 23, 25, 27, 29],
        "a new query reads the remaining rows"
    );
    drop(ledger);
    assert_eq!((fixture.verify().pruned, fixture.verify().rows), (20, 10));
}

#[test]
fn query_during_prune_reads_one_snapshot() {
    let fixture = LedgerFixture::new();
    record_row_per_minute(&fixture, 60);
    std::thread::scope(|scope| {
        let pruning = scope.spawn(|| {
            let (runtime, store) = (runtime(), SqliteStore::open(fixture.ledger_path()).unwrap());
            for minutes in (0..60).rev() {
                let pruned = runtime
                    .block_on(
                        store.prune(noon() - SignedDuration::from_mins(minutes), Timestamp::MIN),
                    )
                    .unwrap();
                // The first round uses the time of the first row, so no row is older.
                assert_eq!(pruned.rows, u64::from(minutes < 59));
            }
        });
        let mut first = 1;
        loop {
            let is_last = pruning.is_finished();
            let found = matching_seqs(&fixture, &RowFilter::default());
            assert!(found[0] >= first, "a pruned row is visible again");
            first = found[0];
            assert_eq!(found, (first..=60).collect::<Vec<_>>(), "a row is missing between others");
            fixture.verify();
            if is_last {
                break;
            }
        }
        pruning.join().unwrap();
    });
    assert_eq!(matching_seqs(&fixture, &RowFilter::default()), [60]);
}

#[test]
fn clock_set_back_keeps_row_order_and_chain() {
    let (fixture, clock) = (LedgerFixture::new(), Arc::new(ManualClock::at(noon())));
    let times = [0, 1, -48, -24, 2, -72].map(|hours| noon() + SignedDuration::from_hours(hours));
    runtime().block_on(async {
        let mut gate = fixture.open_at(clock.clone());
        for (n, time) in times.into_iter().enumerate() {
            // A restarted process appends after existing rows, even if their time is later.
            if n % 2 == 0 {
                drop(gate);
                gate = fixture.open_at(clock.clone());
            }
            clock.set(time);
            for session in ["s", "t"] {
                gate.session("desk", "alice", session)
                    .call("look", json!({"customer": format!("C-{n}")}))
                    .await;
            }
        }
    });
    let entries = fixture.ledger().find(&RowFilter::default()).unwrap();
    assert_eq!(
        entries.iter().map(|entry| entry.row.at).collect::<Vec<_>>(),
        times.map(|time| [time, time]).concat()
    );
    let (mut chain, mut heads) =
        (hash_chain::genesis(), BTreeMap::<SessionKey, (u64, Digest)>::new());
    for (seq, entry) in (1..).zip(&entries) {
        let key = &entry.row.key;
        let (n, head) =
            heads.get(key).copied().unwrap_or_else(|| (0, hash_chain::session_genesis(key)));
        let link = hash_chain::session_link(&head, n + 1, &entry.row.to_canonical_bytes().unwrap());
        chain = hash_chain::ledger_link(&chain, seq, &link);
        assert_eq!((entry.seq, entry.n, entry.hash, entry.chain), (seq, n + 1, link, chain));
        heads.insert(key.clone(), (n + 1, link));
    }
    assert_eq!(fixture.verify().rows, 12);
    // Filters use the recorded times.
    assert_eq!(
        matching_seqs(&fixture, &RowFilter { since: Some(noon()), ..RowFilter::default() }),
        [1, 2, 3, 4, 9, 10]
    );
    // Pruning starts at the first row, so an older row after a newer one stays.
    runtime().block_on(async {
        let store = SqliteStore::open(fixture.ledger_path()).unwrap();
        assert_eq!(store.prune(noon(), Timestamp::MIN).await.unwrap().rows, 0);
        assert_eq!(
            store.prune(noon() + SignedDuration::from_mins(30), Timestamp::MIN).await.unwrap().rows,
            2
        );
    });
    assert_eq!((fixture.verify().pruned, fixture.verify().rows), (2, 10));
}

#[test]
#[should_panic(expected = "row 2: `pay` was admitted, now refused at policy by `cap`")]
fn changed_decision_fails_replay_check() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let session = fixture.open().session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        session.call("pay", json!({"customer": "C-1", "amount": 200, "name": "x"})).await;
    });
    let sql = rusqlite::Connection::open(fixture.ledger_path()).unwrap();
    sql.execute("UPDATE configs SET body = replace(body, 'above = 300', 'above = 100')", [])
        .unwrap();
}

#[test]
fn replay_repeats_revocation_of_evidence() {
    let fixture = LedgerFixture::new();
    let agent = || {
        let schema = || json!({"type": "object", "properties": {"n": {"type": "integer"}}});
        let local =
            |name: &str| Tool::dynamic(name, "Does.", schema(), |_, _| async { Ok(json!({})) });
        let client = |name: &str| Tool::external(name, "Does.", Some(schema()));
        Agent::builder("desk")
            .tool(local("look").effect(Effect::Read))
            .tool(local("act"))
            .tool(local("wipe").open().revokes("look"))
            .tool(client("test").effect(Effect::Read))
            .tool(client("edit").open().revokes("look").revokes("test"))
            .tool(client("ship"))
            .policy(Require::new("looked", ["act"], ["look"]))
            .policy(Require::new("tested", ["ship"], ["test"]).accept_reported())
            .build()
            .unwrap()
    };
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
        let gate = Toolgate::builder().agent(agent()).store(store).build().unwrap();
        let session = gate.session("desk", "alice", "s");
        let mut codes = Vec::new();
        let code = |answer: &toolgate::Answer| {
            answer.outcome.error().map_or_else(|| "ok".to_owned(), |error| error.code.to_string())
        };
        let call = async |tool: &str, n: u32| code(&session.call(tool, json!({ "n": n })).await);
        let prepared = |tool: &str, n: u32| {
            session.prepare(tool, json!({ "n": n })).client_id(format!("{tool}{n}"))
        };
        let begin = async |tool: &str, n: u32| {
            gate.admit(prepared(tool, n))
                .await
                .err()
                .map_or_else(|| "ok".to_owned(), |answer| code(&answer))
        };
        let end =
            async |tool: &str, n: u32| code(&gate.report(prepared(tool, n), Ok(json!({}))).await);
        codes.push(call("look", 1).await);
        let plan = ["act", "wipe", "act"]
            .into_iter()
            .zip(1..)
            .map(|(tool, n)| (tool.to_owned(), json!({ "n": n })));
        codes.extend(session.batch(plan).await.iter().map(code));
        codes.extend([call("look", 2).await, call("act", 4).await]);
        codes.extend([begin("edit", 1).await, call("act", 5).await, end("edit", 1).await]);
        // A call that started before a change gives no evidence after it.
        codes.extend([
            begin("test", 1).await,
            begin("edit", 2).await,
            end("edit", 2).await,
            end("test", 1).await,
            begin("ship", 1).await,
        ]);
        codes.extend([
            begin("test", 2).await,
            end("test", 2).await,
            begin("ship", 2).await,
            end("ship", 2).await,
        ]);
        let missing = "prerequisite_missing";
        let expected = [
            "ok", "ok", "ok", missing, "ok", "ok", "ok", missing, "ok", "ok", "ok", "ok", "ok",
            missing, "ok", "ok", "ok", "ok",
        ];
        assert_eq!(codes, expected);
    });
    let ledger = fixture.ledger();
    let index = ledger.backtest_places("desk", None, None).unwrap();
    let mut changes = Vec::new();
    let fetch = |seq| ledger.find_row(seq).map(Option::unwrap);
    runtime().block_on(async {
        let mut backtest = Backtest::new(move |_| Ok((agent(), agent())));
        let replay = backtest.replay_rows(&index, 0, fetch, |row, change| {
            changes.push((row.tool.to_string(), change.now, change.was.to_string()));
            Ok(())
        });
        replay.await.unwrap();
    });
    assert!(
        changes.len() == 13 && changes.iter().all(|(_, now, _)| *now == ReplayComparison::Same),
        "{changes:#?}"
    );
}
