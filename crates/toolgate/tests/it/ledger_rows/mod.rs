//! Tests that every call is recorded, also after a disconnect, a panic or a store failure.

mod redaction;
mod spool;

use std::time::Duration;

use serde_json::json;
use toolgate::policy::Deny;
use toolgate::{Agent, CallEffects, Effect, Gate, Replay, ReplayComparison, Tool};

use crate::support::{InjectedFault, TestWorld};

#[tokio::test]
async fn disconnect_cancels_tool_and_row_is_recorded() {
    let world = TestWorld::with_act(|act| act.timeout(Duration::from_secs(60)));
    let before = world.fingerprint().await;
    let mut call = Box::pin(world.session.call("act", json!({"how": "hang"})));
    while world.run_count() == 0 {
        assert!(tokio::time::timeout(Duration::from_millis(30), &mut call).await.is_err());
    }
    drop(call);
    wait_for_row(&world).await;
    let (rows, _) = world.rows().await;
    assert_eq!(rows.len(), 1);
    assert_eq!(
        rows[0].outcome.error().map(|e| (&*e.code, e.effects)),
        Some(("cancelled", CallEffects::Unknown))
    );
    assert_eq!(world.fingerprint().await, before);
    assert_eq!(
        (world.meter_value().await, world.gate.pending_calls().await.unwrap().len()),
        (1.into(), 1),
        "the outcome is unknown"
    );
}

#[tokio::test]
async fn row_contains_latency_of_last_gate() {
    let world = TestWorld::new(|agent| agent);
    for how in [json!("ok"), json!("fail"), json!(7)] {
        world.session.call("act", json!({"how": how})).await;
    }
    let (rows, _) = world.rows().await;
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row.latency.nanos_at(Gate::Record) > 0), "{rows:#?}");
}

#[tokio::test]
async fn replay_treats_caller_deadline_as_circumstance() {
    let world = TestWorld::new(|agent| agent);
    let answer =
        world.gate.call(world.session.prepare("look", json!({})).timeout(Duration::ZERO)).await;
    assert_eq!(
        (answer.gate, answer.outcome.error().map(|e| &*e.code)),
        (Gate::Limits, Some("deadline_exceeded"))
    );
    let (rows, _) = world.rows().await;
    let comparison = Replay::from_toolgate(&world.gate).unwrap().decide(&rows[0]).await;
    assert!(matches!(comparison, ReplayComparison::Circumstance(_)), "{comparison:?}");
}

#[tokio::test]
async fn replay_compares_rule_with_code_of_circumstance() {
    let world = TestWorld::new(|agent| agent.policy(Deny::new("frozen", ["look"]).code("busy")));
    world.session.call("look", json!({})).await;
    let (rows, _) = world.rows().await;
    assert_eq!(
        Replay::from_toolgate(&world.gate).unwrap().decide(&rows[0]).await,
        ReplayComparison::Same
    );
    let other = Agent::builder("agent").tool(crate::support::look_tool()).build().unwrap();
    let comparison = Replay::new([other]).unwrap().decide(&rows[0]).await;
    assert!(matches!(comparison, ReplayComparison::Differs(_)), "{comparison:?}");
}

#[tokio::test]
async fn replay_of_call_without_parsed_arguments_is_undecidable() {
    let world = TestWorld::new(|agent| agent);
    world.session.call("gone", json!({"n": 1})).await;
    let (rows, _) = world.rows().await;
    assert_eq!((rows[0].gate, rows[0].arguments.is_null()), (Gate::Resolve, true));
    let schema =
        json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let later_tool = Tool::external("gone", "Was added later.", Some(schema)).open();
    let later_agent = Agent::builder("agent").tool(later_tool).build().unwrap();
    let comparison = Replay::new([later_agent]).unwrap().decide(&rows[0]).await;
    assert!(
        matches!(&comparison, ReplayComparison::Undecidable(why) if why.contains("before its arguments were read")),
        "{comparison:?}"
    );
}

type HandlerEvents = std::sync::Arc<std::sync::Mutex<Vec<&'static str>>>;

/// Records `gone` when it is dropped.
struct DropRecorder(HandlerEvents);

impl Drop for DropRecorder {
    fn drop(&mut self) {
        self.0.lock().unwrap().push("gone");
    }
}

/// Declares a tool that never ends and starts a background task.
fn waiting_tool(name: &str, effect: Effect, events: &HandlerEvents) -> Tool {
    let events = HandlerEvents::clone(events);
    Tool::dynamic(
        name,
        "Waits.",
        json!({"type": "object"}),
        move |ctx: toolgate::ToolContext, _| {
            let (guard, task_events, token) = (
                DropRecorder(HandlerEvents::clone(&events)),
                HandlerEvents::clone(&events),
                ctx.cancellation_token().clone(),
            );
            events.lock().unwrap().push("begun");
            tokio::spawn(async move {
                token.cancelled().await;
                task_events.lock().unwrap().push("cancelled");
            });
            async move {
                let _guard = guard;
                std::future::pending().await
            }
        },
    )
    .effect(effect)
    .open()
}

/// Waits until `count` events are recorded.
async fn wait_for_events(events: &HandlerEvents, count: usize) -> Vec<&'static str> {
    for _ in 0..2_000 {
        if events.lock().unwrap().len() >= count {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut all = events.lock().unwrap().clone();
    all.sort_unstable();
    all
}

/// Waits for the row of a call whose caller disconnected.
async fn wait_for_row(world: &TestWorld) {
    for _ in 0..1_000 {
        if !world.rows().await.0.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn disconnect_during_read_is_recorded() {
    let events = HandlerEvents::default();
    let world = TestWorld::new(|agent| agent.tool(waiting_tool("wait", Effect::Read, &events)));
    let before = world.fingerprint().await;
    let mut call = Box::pin(world.session.call("wait", json!({})));
    while events.lock().unwrap().is_empty() {
        assert!(tokio::time::timeout(Duration::from_millis(30), &mut call).await.is_err());
    }
    drop(call);
    wait_for_row(&world).await;
    let (rows, _) = world.rows().await;
    assert_eq!(rows.len(), 1);
    assert_eq!(
        rows[0].outcome.error().map(|e| (&*e.code, e.effects)),
        Some(("cancelled", CallEffects::None))
    );
    assert_eq!(
        wait_for_events(&events, 3).await,
        ["begun", "cancelled", "gone"],
        "the tool was not stopped"
    );
    assert_eq!(
        (world.fingerprint().await, world.gate.pending_calls().await.unwrap().len()),
        (before, 0)
    );
}

#[tokio::test]
async fn timeout_stops_tool() {
    for effect in [Effect::Read, Effect::Write] {
        let events = HandlerEvents::default();
        let world = TestWorld::new(|agent| {
            agent.tool(
                waiting_tool("wait", effect, &events)
                    .timeout(Duration::from_millis(40))
                    .retry(0, Duration::ZERO),
            )
        });
        let answer = world.session.call("wait", json!({})).await;
        assert_eq!(answer.outcome.error().map(|e| &*e.code), Some("timeout"), "{answer:?}");
        assert_eq!(wait_for_events(&events, 3).await, ["begun", "cancelled", "gone"]);
    }
}

#[tokio::test]
async fn background_task_is_not_cancelled_after_call_ends() {
    let tokens: std::sync::Arc<std::sync::Mutex<Vec<_>>> = std::sync::Arc::default();
    let recorded_tokens = std::sync::Arc::clone(&tokens);
    let schema = json!({"type": "object", "properties": {"fails": {"type": "boolean"}}});
    let start = move |ctx: toolgate::ToolContext, args: serde_json::Value| {
        recorded_tokens.lock().unwrap().push(ctx.cancellation_token().clone());
        async move {
            if args["fails"] == true {
                Err(toolgate::Failure::business("no_room", "full"))
            } else {
                Ok(json!({}))
            }
        }
    };
    let tool = |name, effect| {
        Tool::dynamic(name, "Starts.", schema.clone(), start.clone()).effect(effect).open()
    };
    let world = TestWorld::new(|agent| {
        agent.tool(tool("peek", Effect::Read)).tool(tool("start", Effect::Write))
    });
    for name in ["peek", "start"] {
        for fails in [false, true] {
            world.session.call(name, json!({"fails": fails})).await;
        }
    }
    world.session.batch([("peek".to_owned(), json!({})), ("start".to_owned(), json!({}))]).await;
    let tokens = tokens.lock().unwrap();
    assert_eq!(tokens.len(), 6);
    assert!(tokens.iter().all(|token| !token.is_cancelled()), "{tokens:?}");
}

#[tokio::test]
async fn handler_gets_resource_of_its_type() {
    struct ExchangeRates(u32);
    let tool = Tool::dynamic(
        "rate",
        "Tells.",
        json!({"type": "object"}),
        |ctx: toolgate::ToolContext, _| async move {
            let rates = ctx.resource::<ExchangeRates>().map(|rates| rates.0);
            let left = ctx.deadline().is_some()
                && ctx.time_left().is_some_and(|left| left <= Duration::from_secs(7));
            Ok(
                json!({"rate": rates, "text": ctx.resource::<String>().is_some(), "has a deadline": left}),
            )
        },
    );
    let world = TestWorld::new(|agent| {
        agent
            .tool(tool.effect(Effect::Read).timeout(Duration::from_secs(7)))
            .resource(ExchangeRates(19))
    });
    let answer = world.session.call("rate", json!({})).await;
    assert_eq!(
        answer.outcome.success().unwrap().value,
        json!({"rate": 19, "text": false, "has a deadline": true})
    );
}

#[tokio::test]
async fn retry_delay_is_given_only_for_retryable_errors() {
    for (fault, code, wait) in [
        (InjectedFault::Commit, "store_unavailable", 1_000),
        (InjectedFault::CommitConflicts, "conflict", 100),
    ] {
        // A call that happened, and a call that was rolled back.
        for (world, is_retryable) in
            [(TestWorld::new(|agent| agent), false), (TestWorld::with_act(Tool::local), true)]
        {
            world.store.inject_faults(&[fault]);
            let answer = world.session.call("act", json!({"how": "ok"})).await;
            let actual = answer
                .outcome
                .error()
                .map(|error| (&*error.code, error.retryable, error.retry_after_ms));
            assert_eq!(actual, Some((code, is_retryable, is_retryable.then_some(wait))));
        }
    }
}

#[tokio::test]
async fn signal_is_forwarded_without_state_change() {
    let world = TestWorld::new(|agent| agent);
    let before = world.fingerprint().await;
    let answer = world.session.call("act", json!({"how": "expand"})).await;
    assert_eq!(
        answer.outcome.to_json(),
        json!({"isError": false, "signal": "expand_section", "section": "refunds", "reason": "needed"})
    );
    assert_eq!(world.fingerprint().await, before);
    assert_eq!(world.rows().await.0.len(), 1);
}

#[tokio::test]
async fn log_slice_survives_rollback() {
    let world = TestWorld::new(|agent| agent);
    world.session.call("act", json!({"how": "fail"})).await;
    world.session.call("act", json!({"how": "ok"})).await;
    let state = world.session.state().await.unwrap();
    assert_eq!(state.log("attempts").count(), 2);
    assert_eq!(state.slice("touched"), Some(&json!({"how": "ok"})));
    assert_eq!(world.files.get("kept.txt").as_deref(), Some("changed".as_bytes()));
}

/// Checks that a panic between claim and commit leaves a row and a pending claim.
#[tokio::test]
async fn panicking_call_is_recorded_and_pending() {
    let world = TestWorld::new(|agent| agent);
    world.store.inject_faults(&[InjectedFault::CommitPanics]);
    let answer = world.session.call("act", json!({"how": "ok"})).await;
    assert_eq!(
        answer.outcome.error().map(|e| (&*e.code, e.effects)),
        Some(("internal_fault", CallEffects::Unknown))
    );
    assert_eq!(world.session.rows().await.unwrap().len(), 1);
    assert_eq!(world.gate.pending_calls().await.unwrap().len(), 1, "the claim is pending");
    assert_eq!(world.meter_value().await, 1.into(), "the reservation is kept");
}
