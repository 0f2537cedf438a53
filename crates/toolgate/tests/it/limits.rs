//! Budgets, rates, polling, retries: counted exactly, reserved first, settled by effect.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
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

    // 0.10 + 0.20 is 0.30 here, and 0.30 is the budget.
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
        "somebody looked: it never happened"
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
        // What happened counts from when that is known; what did not, not at all.
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
    // A rate counts attempts: when one was made is known.
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
    let pass = world.session.admit("bash", json!({"command": "make"})).await.ok().unwrap();
    world.advance(SignedDuration::from_hours(23));
    assert!(world.gate.pending_calls().await.unwrap().is_empty());
    world.advance(SignedDuration::from_hours(2));
    assert_eq!(world.gate.pending_calls().await.unwrap().len(), 1);
    // A late report still settles the call.
    world.session.report(&pass, Ok(json!({"exit": 0}))).await;
    assert!(world.gate.pending_calls().await.unwrap().is_empty());
}

fn flaky_tool(effect: Effect, fails: u32, left: Option<CallEffects>) -> (Tool, Arc<AtomicU32>) {
    let runs = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&runs);
    let tool = Tool::dynamic(
        "flaky",
        "Fails at first.",
        json!({"type": "object"}),
        move |ctx: ToolContext, _| {
            let run = seen.fetch_add(1, Ordering::SeqCst) + 1;
            async move {
                ctx.log("runs", &run)?;
                ctx.set_slice("run", &run)?;
                if run > fails {
                    return Ok(json!({ "run": run }));
                }
                let failure = Failure::transient("offline", "the system is offline");
                Err(match left {
                    Some(effects) => failure.effects(effects),
                    None => failure,
                })
            }
        },
    )
    .effect(effect)
    .open()
    .retry(2, Duration::from_millis(1));
    (tool, runs)
}

#[tokio::test]
async fn tool_run_is_retried_only_if_safe() {
    let cases = [
        ("a read", Effect::Read, false, 2, None, 3, "ok"),
        ("a read that stays down", Effect::Read, false, 9, None, 3, "offline"),
        ("a write", Effect::Write, false, 1, None, 1, "offline"),
        ("a write that says it is idempotent", Effect::Write, true, 1, None, 2, "ok"),
        ("a write that was never sent", Effect::Write, false, 1, Some(CallEffects::None), 2, "ok"),
    ];
    for (name, effect, idempotent, fails, left, runs, outcome) in cases {
        let (mut tool, ran) = flaky_tool(effect, fails, left);
        if idempotent {
            tool = tool.idempotent();
        }
        let world = TestWorld::new(|a| a.tool(tool));
        assert_eq!(call_code(&world, "flaky", json!({})).await, outcome, "{name}");
        assert_eq!(ran.load(Ordering::SeqCst), runs, "{name}");
        let row = world.session.rows().await.unwrap()[0].clone();
        assert_eq!(row.retries + 1, runs, "{name}");
        let state = world.session.state().await.unwrap();
        assert_eq!(state.log("runs").count() as u32, runs, "{name}: logs of every run stay");
        assert_eq!(state.slice("run").cloned(), (outcome == "ok").then(|| json!(runs)), "{name}");
    }
}

#[tokio::test]
async fn retry_after_requested_delay_is_not_a_loop() {
    let (tool, _) = flaky_tool(Effect::Read, 99, None);
    let world = TestWorld::new(|a| a.tool(tool.retry(0, Duration::ZERO)));
    for _ in 0..5 {
        let answer = world.session.call("flaky", json!({})).await;
        let error = answer.outcome.error().unwrap();
        assert_eq!((&*error.code, error.retryable), ("offline", true));
        world.advance(SignedDuration::from_millis(
            i64::try_from(error.retry_after_ms.unwrap()).unwrap(),
        ));
    }
    // Sooner than it was told to is hammering.
    assert_eq!(call_code(&world, "flaky", json!({})).await, "offline");
    assert_eq!(call_code(&world, "flaky", json!({})).await, "offline");
    assert_eq!(call_code(&world, "flaky", json!({})).await, "loop_detected");
}

#[tokio::test]
async fn poll_loop_depends_on_result_and_interval() {
    let state = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&state);
    let poll = Tool::dynamic("poll", "Polls.", json!({"type": "object"}), move |_, _| {
        let state = seen.load(Ordering::SeqCst);
        async move { Ok(json!({ "state": state })) }
    })
    .effect(Effect::Read)
    .polling(Duration::from_secs(2), 4);
    let world = TestWorld::new(|a| a.tool(poll));
    for n in 0..12 {
        state.store(n / 3, Ordering::SeqCst);
        assert_eq!(call_code(&world, "poll", json!({})).await, "ok", "it gets somewhere: {n}");
        let soon = world.session.call("poll", json!({})).await;
        let error = soon.outcome.error().unwrap();
        assert_eq!(
            (&*error.code, error.retryable, error.retry_after_ms),
            ("rate_limited", true, Some(2_001))
        );
        world.advance(SignedDuration::from_secs(3));
    }
    assert_eq!(call_code(&world, "poll", json!({})).await, "ok", "the fourth of the same");
    world.advance(SignedDuration::from_secs(3));
    assert_eq!(call_code(&world, "poll", json!({})).await, "loop_detected");
}

#[tokio::test]
async fn clock_set_back_delays_poll_at_most_one_interval() {
    let poll =
        Tool::dynamic("poll", "Polls.", json!({"type": "object"}), |_, _| async { Ok(json!({})) });
    let world =
        TestWorld::new(|a| a.tool(poll.effect(Effect::Read).polling(Duration::from_secs(2), 9)));
    assert_eq!(call_code(&world, "poll", json!({})).await, "ok");
    world.advance(SignedDuration::from_secs(-86_400));
    let soon = world.session.call("poll", json!({})).await;
    let error = soon.outcome.error().unwrap();
    assert_eq!((&*error.code, error.retry_after_ms), ("rate_limited", Some(2_001)));
    world.advance(SignedDuration::from_secs(2));
    assert_eq!(call_code(&world, "poll", json!({})).await, "ok");
}

#[tokio::test]
async fn heartbeat_keeps_declared_tool_alive() {
    let world = TestWorld::new(|a| a);
    // 400 ms of work under a time-out of 300 ms.
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
        "what is spent is spent"
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
    // The same principal under an agent with a shorter window does not wipe the longer one.
    use toolgate::limits::{Charge, ChargeUnit};
    let store = toolgate::MemoryStore::new();
    let charge = |seconds| Charge {
        counter: "c".into(),
        amount: 1.into(),
        cap: 1.into(),
        window: Some(SignedDuration::from_secs(seconds)),
        unit: ChargeUnit::Attempt,
    };
    let at = |seconds| jiff::Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
    toolgate::Store::add_cost(&store, &[charge(3_600), charge(1)], at(0)).await.unwrap();
    let room =
        toolgate::Store::check_charges(&store, &[charge(1), charge(3_600)], at(10)).await.unwrap();
    assert!(room[0].is_ok() && room[1].is_err());
}

#[tokio::test]
async fn cancelled_call_neither_starts_nor_retries() {
    let (tool, runs) = flaky_tool(Effect::Read, 0, None);
    let slow =
        Tool::dynamic("slow", "Hangs.", json!({"type": "object"}), |_, _| std::future::pending())
            .effect(Effect::Read)
            .retry(5, Duration::from_millis(1));
    let world = TestWorld::new(|a| a.tool(tool).tool(slow));
    let token = tokio_util::sync::CancellationToken::new();
    token.cancel();
    let answer =
        world.gate.call(world.session.prepare("flaky", json!({})).cancelled_by(token)).await;
    assert_eq!(
        answer.outcome.error().map(|e| (&*e.code, e.effects)),
        Some(("cancelled", CallEffects::None))
    );
    assert_eq!(runs.load(Ordering::SeqCst), 0);
    let token = tokio_util::sync::CancellationToken::new();
    let later = token.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(20)).await;
        later.cancel();
    });
    world.gate.call(world.session.prepare("slow", json!({})).cancelled_by(token)).await;
    assert_eq!(world.session.rows().await.unwrap()[1].retries, 0);
}

#[tokio::test]
async fn repeatedly_failing_poll_is_a_loop() {
    let poll = Tool::dynamic("poll", "Polls.", json!({"type": "object"}), |_, _| async {
        Err::<Value, _>(Failure::business("gone", "no such job"))
    })
    .effect(Effect::Read)
    .polling(Duration::from_secs(1), 3);
    let world = TestWorld::new(|a| a.tool(poll));
    let mut codes = Vec::new();
    for _ in 0..4 {
        codes.push(call_code(&world, "poll", json!({})).await);
        world.advance(SignedDuration::from_secs(2));
    }
    assert_eq!(codes, ["gone", "gone", "gone", "loop_detected"]);
}

#[tokio::test]
async fn repeatedly_refused_poll_is_a_loop() {
    let schema = json!({"type": "object", "properties": {"job": {"type": "string"}}});
    let poll = Tool::dynamic("poll", "Polls.", schema, |_, args: Value| async move { Ok(args) })
        .effect(Effect::Read)
        .polling(Duration::from_secs(1), 3);
    let closed = toolgate::policy::Deny::new("closed", ["poll"])
        .when("/job", toolgate::policy::Condition::one_of([json!("shut")]));
    let world = TestWorld::new(|a| a.tool(poll).policy(closed));
    let mut codes = Vec::new();
    // What is said of the loop does not begin the count anew; another call does.
    for job in ["shut", "shut", "shut", "shut", "shut", "open", "shut"] {
        codes.push(call_code(&world, "poll", json!({ "job": job })).await);
        world.advance(SignedDuration::from_secs(2));
    }
    assert_eq!(
        codes,
        ["closed", "closed", "closed", "loop_detected", "loop_detected", "ok", "closed"]
    );
}

#[tokio::test]
async fn retry_keeps_unknown_effects_of_earlier_run() {
    let runs = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&runs);
    let pay = Tool::dynamic("pay", "Pays.", json!({"type": "object"}), move |_, _| {
        let first = seen.fetch_add(1, Ordering::SeqCst) == 0;
        async move {
            // The first request is lost on the way back; the second is refused at the door.
            if first {
                Err::<Value, _>(Failure::http(504, "gateway time-out"))
            } else {
                Err(Failure::business("closed", "closed").effects(CallEffects::None))
            }
        }
    })
    .open()
    .idempotent()
    .retry(1, Duration::from_millis(1));
    let world = TestWorld::new(|a| a.tool(pay));
    let answer = world.session.call("pay", json!({})).await;
    assert_eq!(
        answer.outcome.error().map(|e| (&*e.code, e.effects)),
        Some(("closed", CallEffects::Unknown))
    );
    assert_eq!(
        (runs.load(Ordering::SeqCst), world.gate.pending_calls().await.unwrap().len()),
        (2, 1)
    );
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
    let pass = world.session.admit("edit", json!({})).await.ok().unwrap();
    let answer = world.session.report(&pass, Err(Failure::business("lost", "lost"))).await;
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
