//! The same again: after a restart, under a key, under a clock that was set back, and while rows
//! are taken out.

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

/// A desk that asks a person about large payments, and the store that it stands on.
fn open_asking_gate(
    desk: &LedgerFixture,
    clock: &Arc<ManualClock>,
) -> (Toolgate, Weak<SqliteStore>) {
    let store = Arc::new(SqliteStore::open_with_clock(desk.ledger_path(), clock.clone()).unwrap());
    let open = Arc::downgrade(&store);
    let gate = Toolgate::builder()
        .agent(agent_with_rules(&desk.world_path(), APPROVAL_RULES))
        .store(store)
        .build()
        .unwrap();
    (gate, open)
}

fn large_payment(name: &str) -> Value {
    json!({"customer": "C-1", "amount": 200, "name": name})
}

/// Asks for a large payment: the name of the question.
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
    let (desk, clock) = (LedgerFixture::new(), Arc::new(ManualClock::at(noon())));
    runtime().block_on(async {
        let (gate, open) = open_asking_gate(&desk, &clock);
        let id = request_approval(&gate, "large").await;
        drop(gate);
        assert!(open.upgrade().is_none(), "the store is closed");
        let (gate, open) = open_asking_gate(&desk, &clock);
        assert!(gate.answer_approval(&id, true, "bob").await.unwrap());
        drop(gate);
        assert!(open.upgrade().is_none(), "the store is closed");
        assert!(read_lines(&desk.world_path()).is_empty(), "an answer runs nothing");

        let (gate, open) = open_asking_gate(&desk, &clock);
        assert_eq!(
            outcome_label(
                &gate.session("desk", "alice", "s").call("pay", large_payment("large")).await
            ),
            "ran"
        );
        drop(gate);
        assert!(open.upgrade().is_none(), "the store is closed");
        let (gate, _) = open_asking_gate(&desk, &clock);
        let session = gate.session("desk", "alice", "s");
        // So that nobody takes it for a loop.
        session.call("look", json!({"customer": "C-1"})).await;
        assert_eq!(
            outcome_label(
                &gate.call(session.prepare("pay", large_payment("large")).approval(&id)).await
            ),
            "approval_denied",
            "it is used up"
        );
        assert_ne!(
            request_approval(&gate, "large").await,
            id,
            "the same call again is another question"
        );
    });
    assert_eq!(read_lines(&desk.world_path()), ["large"]);
    desk.verify();
}

#[test]
fn approval_is_pruned_by_its_expiry_not_with_its_row() {
    let (desk, clock) = (
        LedgerFixture::new(),
        Arc::new(ManualClock::at(noon() - SignedDuration::from_hours(24 * 200))),
    );
    let (beginning, month) = (Timestamp::MIN, noon() - SignedDuration::from_hours(24 * 30));
    runtime().block_on(async {
        let (gate, _) = open_asking_gate(&desk, &clock);
        let store = SqliteStore::open(desk.ledger_path()).unwrap();
        let is_there = async |id: &str| gate.approval(id).await.unwrap().is_some();
        let old = request_approval(&gate, "old").await;
        clock.set(noon());
        let new = request_approval(&gate, "new").await;

        let gone = store.prune(noon() + SignedDuration::from_hours(1), beginning).await.unwrap();
        assert_eq!((gone.rows, gone.sealed), (2, 0));
        assert!(is_there(&old).await && is_there(&new).await, "rows go, questions stay");
        let gone = store.prune(beginning, month).await.unwrap();
        assert_eq!((gone.rows, gone.sealed), (0, 1));
        assert!(!is_there(&old).await && is_there(&new).await, "what had expired by then goes");
        assert!(
            !gate.answer_approval(&old, true, "bob").await.unwrap(),
            "nobody can answer it any more"
        );

        let expires = gate.approval(&new).await.unwrap().unwrap().expires;
        assert_eq!(
            store.prune(beginning, expires).await.unwrap().sealed,
            0,
            "until then it can be used"
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
            store.prune(beginning, later).await.unwrap().sealed,
            1,
            "an answer that was used goes, too"
        );
        assert!(!is_there(&new).await);
    });
    assert_eq!(read_lines(&desk.world_path()), ["new"]);
    desk.verify();
}

/// An agent with two tools that write down that they ran.
fn clerk_agent(desk: &LedgerFixture, name: &'static str) -> Agent {
    let tool = |tool: &'static str| {
        let (world, schema) = (
            desk.world_path(),
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
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        // Each in a runtime of its own: what is remembered is in the store.
        let call = async |(agent, principal, tool): (&str, &str, &str), session: &str, n: u32| {
            let store = Arc::new(SqliteStore::open(desk.ledger_path()).unwrap());
            let gate = Toolgate::builder()
                .agent(clerk_agent(&desk, "desk"))
                .agent(clerk_agent(&desk, "archive"))
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
            assert_eq!(
                call(claim, "s", n).await,
                "ran",
                "{claim:?} is another claim, whatever its arguments"
            );
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
        read_lines(&desk.world_path()),
        ["desk stamp 1", "desk file 2", "archive stamp 3", "desk stamp 4"]
    );
    desk.verify();
}

/// One row a minute, the last of them at noon.
fn record_row_per_minute(desk: &LedgerFixture, rows: i64) {
    let clock = Arc::new(ManualClock::at(noon()));
    runtime().block_on(async {
        let gate = desk.open_at(clock.clone());
        for n in 1..=rows {
            clock.set(noon() - SignedDuration::from_mins(rows - n));
            gate.session("desk", "alice", &format!("s{}", n % 3))
                .call("look", json!({"customer": format!("C-{}", n % 2)}))
                .await;
        }
    });
}

fn matching_seqs(desk: &LedgerFixture, filter: &RowFilter) -> Vec<u64> {
    desk.ledger().find(filter).unwrap().iter().map(|entry| entry.seq).collect()
}

#[test]
fn running_query_is_not_affected_by_prune() {
    let desk = LedgerFixture::new();
    record_row_per_minute(&desk, 30);
    let (runtime, store) = (runtime(), SqliteStore::open(desk.ledger_path()).unwrap());
    let about = RowFilter {
        entity: Some(("customer_id".to_owned(), json!("C-1"))),
        ..RowFilter::default()
    };
    let (ledger, mut read) = (desk.ledger(), Vec::new());
    let reading = ledger.query(&about, |entry| {
        if read.is_empty() {
            let gone = runtime
                .block_on(store.prune(noon() - SignedDuration::from_mins(9), Timestamp::MIN))
                .unwrap();
            assert_eq!(gone.rows, 20);
        }
        read.push(entry.seq);
        Ok(true)
    });
    reading.unwrap();
    assert_eq!(read, (1..=29).step_by(2).collect::<Vec<u64>>());
    assert_eq!(
        matching_seqs(&desk, &about),
        [21, 23, 25, 27, 29],
        "who begins now reads what is left"
    );
    drop(ledger);
    assert_eq!((desk.verify().pruned, desk.verify().rows), (20, 10));
}

#[test]
fn query_during_prune_reads_one_snapshot() {
    let desk = LedgerFixture::new();
    record_row_per_minute(&desk, 60);
    std::thread::scope(|scope| {
        let pruning = scope.spawn(|| {
            let (runtime, store) = (runtime(), SqliteStore::open(desk.ledger_path()).unwrap());
            for left in (0..60).rev() {
                let gone = runtime
                    .block_on(store.prune(noon() - SignedDuration::from_mins(left), Timestamp::MIN))
                    .unwrap();
                // The first moment is that of the first row, which is not before itself.
                assert_eq!(gone.rows, u64::from(left < 59));
            }
        });
        let mut first = 1;
        loop {
            let is_last = pruning.is_finished();
            let found = matching_seqs(&desk, &RowFilter::default());
            assert!(found[0] >= first, "what is gone does not come back");
            first = found[0];
            assert_eq!(found, (first..=60).collect::<Vec<_>>(), "no row is missing between others");
            desk.verify();
            if is_last {
                break;
            }
        }
        pruning.join().unwrap();
    });
    assert_eq!(matching_seqs(&desk, &RowFilter::default()), [60]);
}

#[test]
fn clock_set_back_keeps_row_order_and_chain() {
    let (desk, clock) = (LedgerFixture::new(), Arc::new(ManualClock::at(noon())));
    let times = [0, 1, -48, -24, 2, -72].map(|hours| noon() + SignedDuration::from_hours(hours));
    runtime().block_on(async {
        let mut gate = desk.open_at(clock.clone());
        for (n, time) in times.into_iter().enumerate() {
            // A process that begins before the rows that it finds goes on behind them, too.
            if n % 2 == 0 {
                drop(gate);
                gate = desk.open_at(clock.clone());
            }
            clock.set(time);
            for session in ["s", "t"] {
                gate.session("desk", "alice", session)
                    .call("look", json!({"customer": format!("C-{n}")}))
                    .await;
            }
        }
    });
    let entries = desk.ledger().find(&RowFilter::default()).unwrap();
    assert_eq!(
        entries.iter().map(|entry| entry.row.at).collect::<Vec<_>>(),
        times.map(|time| [time, time]).concat()
    );
    let (mut tip, mut heads) =
        (hash_chain::genesis(), BTreeMap::<SessionKey, (u64, Digest)>::new());
    for (seq, entry) in (1..).zip(&entries) {
        let key = &entry.row.key;
        let (n, head) =
            heads.get(key).copied().unwrap_or_else(|| (0, hash_chain::session_genesis(key)));
        let link = hash_chain::session_link(&head, n + 1, &entry.row.to_canonical_bytes().unwrap());
        tip = hash_chain::ledger_link(&tip, seq, &link);
        assert_eq!((entry.seq, entry.n, entry.hash, entry.chain), (seq, n + 1, link, tip));
        heads.insert(key.clone(), (n + 1, link));
    }
    assert_eq!(desk.verify().rows, 12);
    // Rows are found by what they say.
    assert_eq!(
        matching_seqs(&desk, &RowFilter { since: Some(noon()), ..RowFilter::default() }),
        [1, 2, 3, 4, 9, 10]
    );
    // They go from the front: one that says it is older than those before it waits for them.
    runtime().block_on(async {
        let store = SqliteStore::open(desk.ledger_path()).unwrap();
        assert_eq!(store.prune(noon(), Timestamp::MIN).await.unwrap().rows, 0);
        assert_eq!(
            store.prune(noon() + SignedDuration::from_mins(30), Timestamp::MIN).await.unwrap().rows,
            2
        );
    });
    assert_eq!((desk.verify().pruned, desk.verify().rows), (2, 10));
}

#[test]
#[should_panic(expected = "row 2: `pay` was admitted, now refused at policy by `cap`")]
fn changed_decision_fails_replay_check() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        let session = desk.open().session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        session.call("pay", json!({"customer": "C-1", "amount": 200, "name": "x"})).await;
    });
    let sql = rusqlite::Connection::open(desk.ledger_path()).unwrap();
    sql.execute("UPDATE configs SET body = replace(body, 'above = 300', 'above = 100')", [])
        .unwrap();
}

#[test]
fn replay_repeats_revocation_of_evidence() {
    let desk = LedgerFixture::new();
    let agent = || {
        let schema = || json!({"type": "object", "properties": {"n": {"type": "integer"}}});
        let here =
            |name: &str| Tool::dynamic(name, "Does.", schema(), |_, _| async { Ok(json!({})) });
        let client = |name: &str| Tool::external(name, "Does.", Some(schema()));
        Agent::builder("desk")
            .tool(here("look").effect(Effect::Read))
            .tool(here("act"))
            .tool(here("wipe").open().revokes("look"))
            .tool(client("test").effect(Effect::Read))
            .tool(client("edit").open().revokes("look").revokes("test"))
            .tool(client("ship"))
            .policy(Require::new("looked", ["act"], ["look"]))
            .policy(Require::new("tested", ["ship"], ["test"]).accept_reported())
            .build()
            .unwrap()
    };
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(desk.ledger_path()).unwrap());
        let gate = Toolgate::builder().agent(agent()).store(store).build().unwrap();
        let session = gate.session("desk", "alice", "s");
        let mut codes = Vec::new();
        let code = |answer: &toolgate::Answer| {
            answer.outcome.error().map_or_else(|| "ok".to_owned(), |error| error.code.to_string())
        };
        let one = async |tool: &str, n: u32| code(&session.call(tool, json!({ "n": n })).await);
        let of = |tool: &str, n: u32| {
            session.prepare(tool, json!({ "n": n })).client_id(format!("{tool}{n}"))
        };
        let begin = async |tool: &str, n: u32| {
            gate.admit(of(tool, n))
                .await
                .err()
                .map_or_else(|| "ok".to_owned(), |refused| code(&refused))
        };
        let end = async |tool: &str, n: u32| code(&gate.report(of(tool, n), Ok(json!({}))).await);
        codes.push(one("look", 1).await);
        let plan = ["act", "wipe", "act"]
            .into_iter()
            .zip(1..)
            .map(|(tool, n)| (tool.to_owned(), json!({ "n": n })));
        codes.extend(session.batch(plan).await.iter().map(code));
        codes.extend([one("look", 2).await, one("act", 4).await]);
        codes.extend([begin("edit", 1).await, one("act", 5).await, end("edit", 1).await]);
        // What was begun before a change proves nothing after it.
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
    let ledger = desk.ledger();
    let index = ledger.backtest_places("desk", None, None).unwrap();
    let mut said = Vec::new();
    let fetch = |seq| ledger.find_row(seq).map(Option::unwrap);
    runtime().block_on(async {
        let mut backtest = Backtest::new(move |_| Ok((agent(), agent())));
        let played = backtest.replay_rows(&index, 0, fetch, |row, change| {
            said.push((row.tool.to_string(), change.now, change.was.to_string()));
            Ok(())
        });
        played.await.unwrap();
    });
    assert!(
        said.len() == 13 && said.iter().all(|(_, now, _)| *now == ReplayComparison::Same),
        "{said:#?}"
    );
}
