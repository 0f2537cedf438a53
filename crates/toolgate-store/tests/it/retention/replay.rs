//! Tests of replay and backtests: recorded calls are decided again, by the same or other rules.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::{Value, json};
use toolgate::{
    AgentDefinition, Backtest, Failure, ManualClock, Replay, ReplayComparison, Row, Tool, Toolgate,
};
use toolgate_json::Digest;
use toolgate_store::{RowFilter, SqliteStore};

use crate::ledger_fixture::{LedgerFixture, agent_with_rules, noon, runtime};

#[test]
fn replay_repeats_decisions_and_other_rules_change_them() {
    let fixture = LedgerFixture::new();
    let clock = Arc::new(ManualClock::at(noon()));
    runtime().block_on(async {
        let gate = fixture.open_at(clock.clone());
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
        let ledger = fixture.ledger();
        let rows = ledger.find(&RowFilter::default()).unwrap();
        let definition = AgentDefinition::parse(&ledger.definition(rows[0].row.config).unwrap().unwrap()).unwrap();
        let replay = Replay::new([definition.clone().build().unwrap()]).unwrap();
        for entry in &rows {
            assert_eq!(replay.decide(&entry.row).await, ReplayComparison::Same, "{:?}", entry.row);
        }
        let index = ledger.backtest_places("desk", None, None).unwrap();
        let changes_under = async |rules: &str| {
            let (definition, rules) = (definition.clone(), rules.to_owned());
            let agents = move |_| {
                let recorded = definition.clone().build().unwrap();
                Ok((recorded, definition.clone().with_policies([("new.toml".to_owned(), rules.clone())]).build().unwrap()))
            };
            let mut changes = Vec::new();
            let fetch = |seq| ledger.find_row(seq).map(Option::unwrap);
            Backtest::new(agents)
                .replay_rows(&index, 0, fetch, |row, change| {
                    changes.push((row.arguments["name"].as_str().unwrap_or("-").to_owned(), change));
                    Ok(())
                })
                .await
                .unwrap();
            changes
                .into_iter()
                .filter(|(_, change)| change.now != ReplayComparison::Same)
                .map(|(name, change)| (name, change.now, change.counterfactual))
                .collect::<Vec<_>>()
        };
        assert_eq!(changes_under(crate::ledger_fixture::RULES).await, [], "the same rules decide the same");
        // A lower cap refuses the first payment, so a later one fits the limit.
        let stricter = changes_under(&crate::ledger_fixture::RULES.replace("above = 300", "above = 220")).await;
        let changed: Vec<(&str, bool)> = stricter.iter().map(|(name, _, counterfactual)| (name.as_str(), *counterfactual)).collect();
        assert_eq!(changed, [("a", false), ("c", true)], "{stricter:?}");
        assert!(matches!(&stricter[0].1, ReplayComparison::Differs(toolgate::AdmissionDecision::Refused { rule: Some(rule), .. }) if rule == "cap"));
        assert!(matches!(&stricter[1].1, ReplayComparison::Differs(toolgate::AdmissionDecision::Admitted)));
        // A shorter window allows a call that the longer one refused.
        let shorter = changes_under(&crate::ledger_fixture::RULES.replace("24h", "1m")).await;
        assert_eq!(shorter.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), ["c"]);
        // A rule whose facts were not recorded is undecidable in a replay, but not in a backtest.
        let new = agent_with_rules(
            &fixture.world_path(),
            &format!("{}\n[[policy]]\nname = \"few\"\nrule = \"limit\"\ntools = [\"pay\"]\ncalls = 1\n", crate::ledger_fixture::RULES),
        );
        let replay = Replay::new([new]).unwrap();
        let paid_entry = rows.iter().find(|entry| entry.row.arguments["name"] == "b").unwrap();
        assert!(matches!(replay.decide(&paid_entry.row).await, ReplayComparison::Undecidable(_)));
        let few = changes_under(&format!(
            "{}\n[[policy]]\nname = \"few\"\nrule = \"limit\"\ntools = [\"pay\"]\ncalls = 0\n",
            crate::ledger_fixture::RULES.replace("max = 500", "max = 5000")
        ))
        .await;
        assert_eq!(few.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), ["a", "b", "c", "e"], "{few:?}");
    });
}

#[test]
fn several_replays_run_at_once() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let gate = fixture.open();
        let session = gate.session("desk", "alice", "s");
        for amount in [10, 400, 20, 30] {
            session.call("look", json!({"customer": "C-1"})).await;
            session.call("pay", json!({"customer": "C-1", "amount": amount, "name": "x"})).await;
        }
        let rows = fixture.ledger().find(&RowFilter::default()).unwrap();
        let replay = Arc::new(Replay::from_toolgate(&gate).unwrap());
        let tasks = (0..4).map(|_| {
            let (replay, rows) = (Arc::clone(&replay), rows.clone());
            tokio::spawn(async move {
                for _ in 0..50 {
                    for entry in &rows {
                        assert_eq!(replay.decide(&entry.row).await, ReplayComparison::Same);
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
fn backtest_with_same_rules_changes_nothing() {
    let fixture = LedgerFixture::new();
    let clock = Arc::new(ManualClock::at(noon()));
    let slow = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let agent = move || {
        let offline = Arc::clone(&slow);
        let schema = || json!({"type": "object", "properties": {"n": {"type": "integer"}, "amount": {"type": "number"}}});
        let pay = Tool::dynamic("pay", "Pays.", schema(), move |_, _| {
            let offline = offline.swap(false, std::sync::atomic::Ordering::SeqCst);
            async move {
                if offline {
                    Err(Failure::transient("offline", "offline")
                        .effects(toolgate::CallEffects::None)
                        .retry_after_ms(60_000))
                } else {
                    Ok(json!({"paid": true}))
                }
            }
        })
        .retry(0, std::time::Duration::ZERO)
        .once();
        let look = Tool::dynamic("look", "Looks.", schema(), |_, args: Value| async move {
            if args["n"] == 404 {
                Err(Failure::http(404, "not found"))
            } else {
                Ok(json!({"ok": true}))
            }
        })
        .effect(toolgate::Effect::Read)
        .empty_on_status(404);
        let rules = "[[policy]]\nname = \"sum\"\nrule = \"limit\"\ntools = [\"pay\"]\nsum = \"/amount\"\nmax = 500\nper = \"principal\"\nwithin = \"24h\"\n[[policy]]\nname = \"looked\"\nrule = \"require\"\ntools = [\"pay\"]\nany_of = [\"look\"]\n";
        toolgate::Agent::builder("desk")
            .tool(pay)
            .tool(look)
            .rules(toolgate::policy::source::RuleSet::parse("r.toml", rules))
            .build()
            .unwrap()
    };
    runtime().block_on(async {
        let store =
            Arc::new(SqliteStore::open_with_clock(fixture.ledger_path(), clock.clone()).unwrap());
        let gate = Toolgate::builder().agent(agent()).store(store).build().unwrap();
        let session = gate.session("desk", "alice", "s");
        let pay = async |amount: u32| {
            clock.advance(SignedDuration::from_secs(10));
            session.call("pay", json!({"amount": amount})).await
        };
        session.call("look", json!({"n": 404})).await;
        assert_eq!(
            pay(100).await.rule.as_deref(),
            Some("looked"),
            "an empty result gives no evidence"
        );
        session.call("look", json!({"n": 1})).await;
        assert_eq!(pay(100).await.outcome.error().unwrap().code, "offline");
        for _ in 0..3 {
            pay(100).await;
        }
        clock.advance(SignedDuration::from_secs(90));
        pay(100).await;
        // Of two calls in one turn, only the first fits the limit.
        session
            .batch([
                ("pay".to_owned(), json!({"amount": 300})),
                ("pay".to_owned(), json!({"amount": 350})),
            ])
            .await;
        pay(90).await;
        let ledger = fixture.ledger();
        let index = ledger.backtest_places("desk", None, None).unwrap();
        let mut changes = Vec::new();
        let fetch = |seq| ledger.find_row(seq).map(Option::unwrap);
        let mut backtest = Backtest::new(move |_| Ok((agent(), agent())));
        backtest
            .replay_rows(&index, 0, fetch, |row, change| {
                changes.push((row.tool.to_string(), change.now, change.was.to_string()));
                Ok(())
            })
            .await
            .unwrap();
        assert!(changes.iter().all(|(_, now, _)| *now == ReplayComparison::Same), "{changes:#?}");
        assert!(changes.len() >= 11);
    });
}

/// Returns the recorded payments whose decision changes, by name.
async fn backtest_changes(
    fixture: &LedgerFixture,
    agents: impl FnMut(Digest) -> Result<(toolgate::Agent, toolgate::Agent), String> + 'static,
    read: impl Fn(Row) -> Row,
) -> Vec<(String, ReplayComparison)> {
    let ledger = fixture.ledger();
    let index = ledger.backtest_places("desk", None, None).unwrap();
    let mut changes = Vec::new();
    let fetch = |seq| ledger.find_row(seq).map(|row| read(row.unwrap()));
    Backtest::new(agents)
        .replay_rows(&index, 0, fetch, |row, change| {
            changes.push((row.arguments["name"].as_str().unwrap_or("-").to_owned(), change.now));
            Ok(())
        })
        .await
        .unwrap();
    changes.retain(|(_, now)| *now != ReplayComparison::Same);
    changes
}

#[test]
fn backtest_covers_calls_replayed_by_key() {
    use toolgate::policy::{DedupKeyKind, PriorCallFact};
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let gate = fixture.open();
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        for (amount, name) in [(100, "a"), (100, "a"), (120, "a"), (250, "b"), (250, "b")] {
            let pay = json!({"customer": "C-1", "amount": amount, "name": name});
            gate.call(session.prepare("pay", pay).idempotency_key(name)).await;
        }
        drop(gate);
        let rows = fixture.ledger().find(&RowFilter::default()).unwrap();
        let known: Vec<_> = rows.iter().filter_map(|entry| Some((entry.row.facts.recalled?, entry.row.facts.recalled_by?))).collect();
        let by_key = |fact| (fact, DedupKeyKind::Key);
        assert_eq!(known, [by_key(PriorCallFact::Settled), by_key(PriorCallFact::KeyReused), by_key(PriorCallFact::Settled)]);
        let under = |rules: String| {
            let world = fixture.world_path();
            move |_: Digest| Ok((agent_with_rules(&world, crate::ledger_fixture::RULES), agent_with_rules(&world, &rules)))
        };
        assert_eq!(backtest_changes(&fixture, under(crate::ledger_fixture::RULES.to_owned()), |row| row).await, []);
        // A call that is refused now has no outcome to replay.
        let changes = backtest_changes(&fixture, under(crate::ledger_fixture::RULES.replace("above = 300", "above = 220")), |row| row).await;
        assert!(
            matches!(&changes[..], [(a, ReplayComparison::Differs(_)), (b, ReplayComparison::Undecidable(_))] if a == "b" && b == "b"),
            "{changes:?}"
        );
        // Older rows do not record the kind of key.
        let old = |mut row: Row| {
            row.facts.recalled_by = None;
            row
        };
        let changes = backtest_changes(&fixture, under(crate::ledger_fixture::RULES.to_owned()), old).await;
        assert!(changes.len() == 3 && changes.iter().all(|(_, now)| matches!(now, ReplayComparison::Undecidable(_))), "{changes:?}");
    });
}

#[test]
fn backtest_without_ask_rule_allows_refused_approval() {
    const APPROVAL_RULE: &str = "\n[[policy]]\nname = \"large\"\nrule = \"ask\"\ntools = [\"pay\"]\nwhere = [{ argument = \"/amount\", above = 150 }]\n";
    let fixture = LedgerFixture::new();
    let ask_rules = format!("{}{APPROVAL_RULE}", crate::ledger_fixture::RULES);
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
        let gate = Toolgate::builder()
            .agent(agent_with_rules(&fixture.world_path(), &ask_rules))
            .store(store)
            .build()
            .unwrap();
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let pay = async || {
            let answer =
                session.call("pay", json!({"customer": "C-1", "amount": 200, "name": "a"})).await;
            answer.outcome.error().unwrap().clone()
        };
        let asked = pay().await;
        assert!(gate.answer_approval(&asked.approval.unwrap().id, false, "bob").await.unwrap());
        assert_eq!(pay().await.code, "approval_denied");
        drop(gate);
        let under = |rules: &str| {
            let (world, recorded, new) =
                (fixture.world_path(), ask_rules.clone(), rules.to_owned());
            move |_: Digest| {
                Ok((agent_with_rules(&world, &recorded), agent_with_rules(&world, &new)))
            }
        };
        assert_eq!(backtest_changes(&fixture, under(&ask_rules), |row| row).await, []);
        let changes =
            backtest_changes(&fixture, under(crate::ledger_fixture::RULES), |row| row).await;
        let is_admitted = |now: &ReplayComparison| {
            *now == ReplayComparison::Differs(toolgate::AdmissionDecision::Admitted)
        };
        assert!(
            changes.len() == 2 && changes.iter().all(|(_, now)| is_admitted(now)),
            "{changes:?}"
        );
    });
}

#[test]
fn backtest_of_replayed_once_call_is_undecidable() {
    const REQUIRE_LOOK_RULE: &str = "[[policy]]\nname = \"looked\"\nrule = \"require\"\ntools = [\"pay\"]\nany_of = [\"look\"]\n";
    const CAP_RULE: &str = "[[policy]]\nname = \"cap\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhere = [{ argument = \"/amount\", above = 300 }]\n";
    let fixture = LedgerFixture::new();
    let agent = |rules: &str| {
        let schema = || json!({"type": "object", "properties": {"name": {"type": "string"}, "amount": {"type": "number"}}});
        let pay =
            Tool::dynamic("pay", "Pays.", schema(), |_, _| async { Ok(json!({"paid": true})) })
                .once();
        let look = Tool::dynamic("look", "Looks.", schema(), |_, _| async { Ok(json!({})) })
            .effect(toolgate::Effect::Read);
        let rules = toolgate::policy::source::RuleSet::parse("r.toml", rules);
        toolgate::Agent::builder("desk").tool(pay).tool(look).rules(rules).build().unwrap()
    };
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
        let gate = Toolgate::builder().agent(agent(REQUIRE_LOOK_RULE)).store(store).build().unwrap();
        let session = gate.session("desk", "alice", "s");
        let pay = async || session.call("pay", json!({"name": "a", "amount": 1})).await;
        assert_eq!(pay().await.rule.as_deref(), Some("looked"));
        session.call("look", json!({})).await;
        assert!(pay().await.outcome.success().is_some());
        drop(gate);
        let changes = backtest_changes(&fixture, move |_| Ok((agent(REQUIRE_LOOK_RULE), agent(CAP_RULE))), |row| row).await;
        assert!(
            matches!(&changes[..], [(_, ReplayComparison::Differs(_)), (_, ReplayComparison::Undecidable(reason))] if reason.contains("once")),
            "{changes:?}"
        );
    });
}

#[test]
fn rule_on_redacted_value_is_undecidable() {
    let fixture = LedgerFixture::new();
    let rules = "[[policy]]\nname = \"card\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhere = [{ argument = \"/card\", glob = \"4*\" }]\n";
    let free = "[[policy]]\nname = \"card\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhere = [{ argument = \"/amount\", above = 500 }]\n";
    runtime().block_on(async {
        let gate = |rules: &str| {
            let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
            Toolgate::builder()
                .agent(agent_with_rules(&fixture.world_path(), rules))
                .store(store)
                .build()
                .unwrap()
        };
        let pay = json!({"customer": "C-1", "amount": 10, "card": "5111", "name": "x"});
        gate(rules).session("desk", "alice", "s").call("pay", pay.clone()).await;
        gate(free).session("desk", "alice", "t").call("pay", pay).await;
        let rows = fixture.ledger().find(&RowFilter::default()).unwrap();
        let replay =
            |rules: &str| Replay::new([agent_with_rules(&fixture.world_path(), rules)]).unwrap();
        let changes = replay(rules).decide(&rows[0].row).await;
        assert!(
            matches!(&changes, ReplayComparison::Undecidable(reason) if reason.contains("/card")),
            "{changes:?}"
        );
        assert_eq!(
            replay(free).decide(&rows[1].row).await,
            ReplayComparison::Same,
            "a redacted value that no rule reads has no influence"
        );
    });
}
