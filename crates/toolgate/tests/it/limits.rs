//! Tests budgets, rates, reservations and heartbeats.

mod retries;

use std::time::Duration;

use jiff::SignedDuration;
use rust_decimal::Decimal;
use serde_json::{Value, json};
use toolgate::limits::{Budget, Cost, Limits, RateLimit};
use toolgate::policy::{Limit, LimitOwner};
use toolgate::{CallEffects, CallOutput, Effect, Failure, Outcome, Tool, ToolContext};

use crate::support::TestWorld;

async fn call_code(world: &TestWorld, tool: &str, args: Value) -> String {
    let answer = world.session.call(tool, args).await;
    answer.outcome.error().map_or_else(|| "ok".to_owned(), |e| e.code.to_string())
}

fn priced_tool() -> Tool {
    Tool::dynamic(
        "priced",
        "Costs something.",
        json!({"type": "object", "properties": {"cents": {"type": "integer"}}}),
        |ctx: ToolContext, args| async move {
            ctx.spend(Cost {
                tokens: 10,
                money: Decimal::new(args["cents"].as_i64().unwrap_or(0), 2),
            });
            Ok(json!({"left": ctx.remaining_budget().money}))
        },
    )
    .effect(Effect::Read)
    .cost(Cost { tokens: 5, money: Decimal::new(10, 2) })
}

#[tokio::test]
async fn budgets_of_calls_tokens_and_money_are_enforced() {
    let budget = |b: Budget| Limits { session: b, ..Limits::default() };
    let world =
        TestWorld::new(|a| a.limits(budget(Budget { calls: Some(2), ..Budget::default() })));
    assert_eq!(call_code(&world, "look", json!({"at": "1"})).await, "ok");
    assert_eq!(call_code(&world, "look", json!({"at": "2"})).await, "ok");
    assert_eq!(call_code(&world, "look", json!({"at": "3"})).await, "budget_exhausted");

    let world = TestWorld::new(|a| {
        a.tool(priced_tool()).limits(budget(Budget { tokens: Some(25), ..Budget::default() }))
    });
    assert_eq!(call_code(&world, "priced", json!({"cents": 1})).await, "ok");
    assert_eq!(call_code(&world, "priced", json!({"cents": 2})).await, "ok");
    assert_eq!(call_code(&world, "priced", json!({"cents": 3})).await, "ok", "20 used, 5 reserved");
    assert_eq!(call_code(&world, "priced", json!({"cents": 4})).await, "budget_exhausted");

    // 0.10 + 0.20 equals the budget of 0.30, because amounts are decimal.
    let world = TestWorld::new(|a| {
        a.tool(priced_tool())
            .limits(budget(Budget { money: Some(Decimal::new(30, 2)), ..Budget::default() }))
    });
    let first = world.session.call("priced", json!({"cents": 10})).await;
    assert_eq!(first.outcome.success().map(|o| &o.value["left"]), Some(&json!("0.30")));
    assert_eq!(call_code(&world, "priced", json!({"cents": 20})).await, "ok");
    assert_eq!(call_code(&world, "priced", json!({"cents": 1})).await, "budget_exhausted");
}

#[tokio::test]
async fn model_tokens_count_against_session_budget() {
    let world = TestWorld::new(|a| {
        a.tool(priced_tool()).limits(Limits {
            session: Budget { tokens: Some(100), ..Budget::default() },
            ..Limits::default()
        })
    });
    world.session.spend(Cost { tokens: 100, money: Decimal::ZERO }).await.unwrap();
    assert_eq!(call_code(&world, "priced", json!({})).await, "budget_exhausted");
    assert!(
        world
            .gate
            .session("agent", "alice", "other")
            .call("priced", json!({}))
            .await
            .outcome
            .success()
            .is_some()
    );
}

#[tokio::test]
async fn principal_budget_and_rate_span_sessions() {
    let limits =
        Limits { principal: Budget { calls: Some(2), ..Budget::default() }, ..Limits::default() };
    let world = TestWorld::new(|a| a.limits(limits));
    for name in ["a", "b", "c"] {
        let answer = world.gate.session("agent", "alice", name).call("look", json!({})).await;
        assert_eq!(
            answer.outcome.error().map(|e| &*e.code),
            if name == "c" { Some("budget_exhausted") } else { None }
        );
    }
    assert!(
        world
            .gate
            .session("agent", "bob", "a")
            .call("look", json!({}))
            .await
            .outcome
            .success()
            .is_some()
    );

    let world = TestWorld::new(|a| {
        a.limits(Limits {
            rate: Some(RateLimit { calls: 2, per: Duration::from_secs(10) }),
            ..Limits::default()
        })
    });
    assert_eq!(call_code(&world, "look", json!({"at": "1"})).await, "ok");
    world.advance(SignedDuration::from_secs(4));
    assert_eq!(call_code(&world, "look", json!({"at": "2"})).await, "ok");
    let limited = world.session.call("look", json!({"at": "3"})).await;
    let error = limited.outcome.error().unwrap();
    assert_eq!(
        (&*error.code, error.retryable, error.retry_after_ms),
        ("rate_limited", true, Some(6_001))
    );
    world.advance(SignedDuration::from_secs(6));
    assert_eq!(call_code(&world, "look", json!({"at": "3"})).await, "ok", "the window slides");
    assert_eq!(call_code(&world, "look", json!({"at": "4"})).await, "rate_limited");
}

#[tokio::test]
async fn reservation_is_released_only_without_effects() {
    let world = TestWorld::new(|a| a);
    assert_eq!(call_code(&world, "act", json!({"how": "refuse"})).await, "no_stock");
    assert_eq!(world.meter_value().await, 0.into());
    assert_eq!(call_code(&world, "act", json!({"how": "fail"})).await, "no_stock");
    assert_eq!(world.meter_value().await, 1.into());
    let pending = world.gate.pending_calls().await.unwrap();
    assert!(
        world.gate.settle_pending(pending[0].call, None, "bob").await.unwrap(),
        "a person settles the call as not executed"
    );
    assert!(!world.gate.settle_pending(pending[0].call, None, "bob").await.unwrap());
    assert_eq!(
        (world.meter_value().await, world.gate.pending_calls().await.unwrap().len()),
        (0.into(), 0)
    );
}

#[tokio::test]
async fn reservation_of_pending_call_outlasts_window() {
    for happened in [false, true] {
        let world = TestWorld::new(|a| {
            a.policy(
                Limit::calls("few", ["act"], 2)
                    .per(LimitOwner::Session)
                    .within(SignedDuration::from_mins(1)),
            )
        });
        let act = async |n: u32| call_code(&world, "act", json!({"how": "ok", "n": n})).await;
        assert_eq!(call_code(&world, "act", json!({"how": "fail"})).await, "no_stock");
        world.advance(SignedDuration::from_mins(10));
        assert_eq!(act(1).await, "ok");
        let limited = world.session.call("act", json!({"how": "ok", "n": 2})).await;
        assert_eq!(
            limited.outcome.error().map(|e| (&*e.code, e.retry_after_ms)),
            Some(("few", Some(60_001)))
        );
        world.advance(SignedDuration::from_mins(10));
        assert_eq!((act(3).await.as_str(), act(4).await.as_str()), ("ok", "few"));
        // A settled call counts from the time of settlement if it happened, else not at all.
        let pending = world.gate.pending_calls().await.unwrap();
        let outcome =
            happened.then(|| Outcome::Success(CallOutput::from_value(json!({"done": true}))));
        assert!(world.gate.settle_pending(pending[0].call, outcome, "bob").await.unwrap());
        assert_eq!(act(5).await, if happened { "few" } else { "ok" });
        world.advance(SignedDuration::from_mins(1));
        assert_eq!(
            (act(6).await.as_str(), act(7).await.as_str(), act(8).await.as_str()),
            ("ok", "ok", "few")
        );
    }
    // A rate counts attempts, and the time of an attempt is known.
    let world = TestWorld::new(|a| {
        a.limits(Limits {
            rate: Some(RateLimit { calls: 1, per: Duration::from_secs(60) }),
            ..Limits::default()
        })
    });
    assert_eq!(call_code(&world, "act", json!({"how": "fail"})).await, "no_stock");
    world.advance(SignedDuration::from_mins(1));
    assert_eq!(call_code(&world, "act", json!({"how": "ok"})).await, "ok");
}

#[tokio::test]
async fn claim_is_pending_after_its_lease() {
    let world =
        TestWorld::new(|a| a.tool(Tool::external("bash", "Run by the client.", None).open()));
    let deferred = world.session.admit("bash", json!({"command": "make"})).await.ok().unwrap();
    world.advance(SignedDuration::from_hours(23));
    assert!(world.gate.pending_calls().await.unwrap().is_empty());
    world.advance(SignedDuration::from_hours(2));
    assert_eq!(world.gate.pending_calls().await.unwrap().len(), 1);
    // A late report still settles the call.
    world.session.report(&deferred, Ok(json!({"exit": 0}))).await;
    assert!(world.gate.pending_calls().await.unwrap().is_empty());
}

#[tokio::test]
async fn heartbeat_keeps_declared_tool_alive() {
    let world = TestWorld::new(|a| a);
    // 400 ms of work exceed the timeout of 300 ms.
    assert_eq!(call_code(&world, "act", json!({"how": "beat"})).await, "timeout");
    let alive = Tool::dynamic(
        "alive",
        "Beats.",
        json!({"type": "object"}),
        |ctx: ToolContext, _| async move {
            for _ in 0..12 {
                tokio::time::sleep(Duration::from_millis(100)).await;
                ctx.send_heartbeat();
            }
            Ok(json!({"left": ctx.time_left().is_some()}))
        },
    )
    .effect(Effect::Read)
    .heartbeat(Duration::from_secs(1));
    let world = TestWorld::new(|a| a.tool(alive));
    assert_eq!(call_code(&world, "alive", json!({})).await, "ok");
}

#[tokio::test]
async fn declared_and_reported_costs_spend_budget() {
    let quiet = Tool::dynamic(
        "quiet",
        "Says nothing.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        |_, args| async move { Ok(args) },
    )
    .effect(Effect::Read)
    .cost(Cost { tokens: 0, money: Decimal::ONE });
    let cheat = Tool::dynamic(
        "cheat",
        "Earns.",
        json!({"type": "object"}),
        |ctx: ToolContext, args| async move {
            ctx.spend(Cost { tokens: 0, money: Decimal::from(-100) });
            Ok(args)
        },
    )
    .effect(Effect::Read);
    let burns = Tool::dynamic(
        "burns",
        "Spends and fails.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        |ctx: ToolContext, _| async move {
            ctx.spend(Cost { tokens: 0, money: Decimal::ONE });
            Err::<Value, _>(Failure::business("no", "no"))
        },
    )
    .effect(Effect::Read);
    let budget = Limits {
        session: Budget { money: Some(Decimal::from(3)), ..Budget::default() },
        ..Limits::default()
    };
    let world = TestWorld::new(|a| a.tool(quiet).tool(cheat).tool(burns).limits(budget));
    assert_eq!(call_code(&world, "quiet", json!({"n": 1})).await, "ok");
    assert_eq!(call_code(&world, "cheat", json!({})).await, "ok");
    assert_eq!(call_code(&world, "burns", json!({"n": 1})).await, "no");
    assert_eq!(call_code(&world, "burns", json!({"n": 2})).await, "no");
    assert_eq!(
        call_code(&world, "quiet", json!({"n": 2})).await,
        "budget_exhausted",
        "failed calls spend the budget"
    );
}

#[tokio::test]
async fn failed_calls_count_and_rate_windows_are_independent() {
    let fails = Tool::dynamic(
        "fails",
        "Fails.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        |_, _| async { Err::<Value, _>(Failure::business("no", "no")) },
    )
    .effect(Effect::Read);
    let world = TestWorld::new(|a| {
        a.tool(fails).limits(Limits {
            rate: Some(RateLimit { calls: 2, per: Duration::from_secs(60) }),
            ..Limits::default()
        })
    });
    for (n, expected) in [(1, "no"), (2, "no"), (3, "rate_limited")] {
        assert_eq!(call_code(&world, "fails", json!({ "n": n })).await, expected);
    }
    // An agent with a shorter window must not clear the longer window of the same principal.
    use toolgate::limits::{Charge, ChargeUnit};
    let clock = std::sync::Arc::new(toolgate::ManualClock::at(jiff::Timestamp::UNIX_EPOCH));
    let store = toolgate::MemoryStore::new().with_clock(clock.clone());
    let charge = |seconds| Charge {
        counter: "c".into(),
        amount: 1.into(),
        cap: 1.into(),
        window: Some(SignedDuration::from_secs(seconds)),
        unit: ChargeUnit::Attempt,
    };
    toolgate::Store::add_cost(&store, &[charge(3_600), charge(1)]).await.unwrap();
    clock.advance(SignedDuration::from_secs(10));
    let room = toolgate::Store::check_charges(&store, &[charge(1), charge(3_600)]).await.unwrap();
    assert!(room[0].is_ok() && room[1].is_err());
}

#[tokio::test]
async fn failed_deferred_call_is_not_rolled_back() {
    let world = TestWorld::new(|a| {
        a.tool(
            Tool::dynamic("edit", "Edits.", json!({"type": "object"}), |_, args| async move {
                Ok(args)
            })
            .local()
            .open(),
        )
    });
    let deferred = world.session.admit("edit", json!({})).await.ok().unwrap();
    let answer = world.session.report(&deferred, Err(Failure::business("lost", "lost"))).await;
    assert_eq!(answer.outcome.error().map(|e| e.effects), Some(CallEffects::Unknown));
    assert_eq!(world.gate.pending_calls().await.unwrap().len(), 1);
}

#[tokio::test]
async fn negative_charge_frees_no_limit() {
    use toolgate::limits::{Charge, ChargeUnit};
    use toolgate::policy::{Obligations, Verdict};
    let charge = |amount: i64| Charge {
        counter: "c".into(),
        amount: amount.into(),
        cap: 500.into(),
        window: None,
        unit: ChargeUnit::Fixed,
    };
    let full = || toolgate::ToolError::new(toolgate::ErrorCategory::Business, "full", "full");
    let world = TestWorld::new(|a| {
        a.policy(crate::support::closure_policy("lines", move |_| {
            Ok(Verdict::Allow(Obligations {
                charges: vec![(charge(499), full()), (charge(-499), full())],
                ..Obligations::default()
            }))
        }))
    });
    assert_eq!(call_code(&world, "act", json!({"how": "ok"})).await, "full");
}

#[tokio::test]
async fn observed_negative_charge_has_no_effect() {
    use toolgate::policy::{Obligations, Verdict, observe};
    let full = || toolgate::ToolError::new(toolgate::ErrorCategory::Business, "full", "full");
    let world = TestWorld::new(|a| {
        a.policy(observe(crate::support::closure_policy("less", move |_| {
            Ok(Verdict::Allow(Obligations {
                charges: vec![(crate::support::meter_charge(-1), full())],
                ..Obligations::default()
            }))
        })))
    });
    for n in 0..2 {
        assert_eq!(call_code(&world, "act", json!({"how": "ok", "n": n})).await, "ok");
    }
    assert_eq!(world.meter_value().await, 2.into());
    for row in world.session.rows().await.unwrap() {
        let seen: Vec<_> = row
            .facts
            .observed
            .iter()
            .map(|o| (o.rule.as_str(), o.said.as_str(), o.code.as_str()))
            .collect();
        assert_eq!(seen, [("less", "fault", "policy_fault")]);
    }
    let why = world.session.explain("act", json!({"how": "ok", "n": 2})).await.to_string();
    assert!(why.contains("fault     less (observes)"), "{why}");
}
