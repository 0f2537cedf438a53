//! What is recorded, whatever happens to the caller or the store.

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
    let quiet = world.fingerprint().await;
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
    assert_eq!(world.fingerprint().await, quiet);
    assert_eq!(
        (world.meter_value().await, world.gate.pending_calls().await.unwrap().len()),
        (1.into(), 1),
        "nobody knows what it did"
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
    let said = Replay::from_toolgate(&world.gate).unwrap().decide(&rows[0]).await;
    assert!(matches!(said, ReplayComparison::Circumstance(_)), "{said:?}");
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
    let said = Replay::new([other]).unwrap().decide(&rows[0]).await;
    assert!(matches!(said, ReplayComparison::Differs(_)), "{said:?}");
}

#[tokio::test]
async fn replay_of_call_without_parsed_arguments_is_undecidable() {
    let world = TestWorld::new(|agent| agent);
    world.session.call("gone", json!({"n": 1})).await;
    let (rows, _) = world.rows().await;
    assert_eq!((rows[0].gate, rows[0].arguments.is_null()), (Gate::Resolve, true));
    let schema =
        json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let gone = Tool::external("gone", "Is there by now.", Some(schema)).open();
    let now = Agent::builder("agent").tool(gone).build().unwrap();
    let said = Replay::new([now]).unwrap().decide(&rows[0]).await;
    assert!(
        matches!(&said, ReplayComparison::Undecidable(why) if why.contains("before its arguments were read")),
        "{said:?}"
    );
}

type HandlerEvents = std::sync::Arc<std::sync::Mutex<Vec<&'static str>>>;

/// Says so when it is gone.
struct DropRecorder(HandlerEvents);

impl Drop for DropRecorder {
    fn drop(&mut self) {
        self.0.lock().unwrap().push("gone");
    }
}

/// A tool that waits without end, and has set something going elsewhere.
fn waiting_tool(name: &str, effect: Effect, noted: &HandlerEvents) -> Tool {
    let noted = HandlerEvents::clone(noted);
    Tool::dynamic(
        name,
        "Waits.",
        json!({"type": "object"}),
        move |ctx: toolgate::ToolContext, _| {
            let (guard, heard, told) = (
                DropRecorder(HandlerEvents::clone(&noted)),
                HandlerEvents::clone(&noted),
                ctx.cancellation_token().clone(),
            );
            noted.lock().unwrap().push("begun");
            tokio::spawn(async move {
                told.cancelled().await;
                heard.lock().unwrap().push("told");
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

/// Waits until so much was noted.
async fn wait_for_events(noted: &HandlerEvents, count: usize) -> Vec<&'static str> {
    for _ in 0..2_000 {
        if noted.lock().unwrap().len() >= count {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut all = noted.lock().unwrap().clone();
    all.sort_unstable();
    all
}

/// Waits until there is a row: who has hung up is told nothing.
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
    let gone = HandlerEvents::default();
    let world = TestWorld::new(|agent| agent.tool(waiting_tool("wait", Effect::Read, &gone)));
    let quiet = world.fingerprint().await;
    let mut call = Box::pin(world.session.call("wait", json!({})));
    while gone.lock().unwrap().is_empty() {
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
    assert_eq!(wait_for_events(&gone, 3).await, ["begun", "gone", "told"], "the tool goes on");
    assert_eq!(
        (world.fingerprint().await, world.gate.pending_calls().await.unwrap().len()),
        (quiet, 0)
    );
}

#[tokio::test]
async fn timeout_stops_tool() {
    for effect in [Effect::Read, Effect::Write] {
        let gone = HandlerEvents::default();
        let world = TestWorld::new(|agent| {
            agent.tool(
                waiting_tool("wait", effect, &gone)
                    .timeout(Duration::from_millis(40))
                    .retry(0, Duration::ZERO),
            )
        });
        let answer = world.session.call("wait", json!({})).await;
        assert_eq!(answer.outcome.error().map(|e| &*e.code), Some("timeout"), "{answer:?}");
        assert_eq!(wait_for_events(&gone, 3).await, ["begun", "gone", "told"]);
    }
}

#[tokio::test]
async fn background_task_is_not_cancelled_after_call_ends() {
    let tokens: std::sync::Arc<std::sync::Mutex<Vec<_>>> = std::sync::Arc::default();
    let kept = std::sync::Arc::clone(&tokens);
    let schema = json!({"type": "object", "properties": {"fails": {"type": "boolean"}}});
    let start = move |ctx: toolgate::ToolContext, args: serde_json::Value| {
        kept.lock().unwrap().push(ctx.cancellation_token().clone());
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
    for (fails, code, wait) in [
        (InjectedFault::Commit, "store_unavailable", 1_000),
        (InjectedFault::CommitConflicts, "conflict", 100),
    ] {
        // What has happened, and what was rolled back.
        for (world, again) in
            [(TestWorld::new(|agent| agent), false), (TestWorld::with_act(Tool::local), true)]
        {
            world.store.inject_faults(&[fails]);
            let answer = world.session.call("act", json!({"how": "ok"})).await;
            let heard = answer
                .outcome
                .error()
                .map(|error| (&*error.code, error.retryable, error.retry_after_ms));
            assert_eq!(heard, Some((code, again, again.then_some(wait))));
        }
    }
}

#[tokio::test]
async fn signal_is_forwarded_without_state_change() {
    let world = TestWorld::new(|agent| agent);
    let quiet = world.fingerprint().await;
    let answer = world.session.call("act", json!({"how": "expand"})).await;
    assert_eq!(
        answer.outcome.to_json(),
        json!({"isError": false, "signal": "expand_section", "section": "refunds", "reason": "needed"})
    );
    assert_eq!(world.fingerprint().await, quiet);
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

/// The task of a call dies between its claim and its end: the row says so, and the claim is
/// pending, not forgotten.
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
    assert_eq!(world.gate.pending_calls().await.unwrap().len(), 1, "somebody must look");
    assert_eq!(world.meter_value().await, 1.into(), "what it reserved stays reserved");
}
