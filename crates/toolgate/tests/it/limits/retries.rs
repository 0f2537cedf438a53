//! Tests retries and polling.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use jiff::SignedDuration;
use serde_json::{Value, json};
use toolgate::{CallEffects, Effect, Failure, Tool, ToolContext};

use super::call_code;
use crate::support::TestWorld;

fn flaky_tool(
    effect: Effect,
    fails: u32,
    effects_on_failure: Option<CallEffects>,
) -> (Tool, Arc<AtomicU32>) {
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
                Err(match effects_on_failure {
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
        ("an idempotent write", Effect::Write, true, 1, None, 2, "ok"),
        ("a write that was never sent", Effect::Write, false, 1, Some(CallEffects::None), 2, "ok"),
    ];
    for (name, effect, idempotent, fails, effects_on_failure, runs, outcome) in cases {
        let (mut tool, ran) = flaky_tool(effect, fails, effects_on_failure);
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
    // A retry before the requested delay counts as a repetition.
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
        assert_eq!(call_code(&world, "poll", json!({})).await, "ok", "the result changes: {n}");
        let soon = world.session.call("poll", json!({})).await;
        let error = soon.outcome.error().unwrap();
        assert_eq!(
            (&*error.code, error.retryable, error.retry_after_ms),
            ("rate_limited", true, Some(2_001))
        );
        world.advance(SignedDuration::from_secs(3));
    }
    assert_eq!(call_code(&world, "poll", json!({})).await, "ok", "fourth identical result");
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
    // A loop error does not reset the count; another call does.
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
            // The response to the first request is lost; the second request is refused.
            if first {
                Err::<Value, _>(Failure::http(504, "gateway timeout"))
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
