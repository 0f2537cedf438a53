//! What is recorded, whatever happens to the caller or the store.

mod redacted;
mod spool;

use std::time::Duration;

use serde_json::json;
use toolgate::policy::Deny;
use toolgate::{Agent, Compared, Effect, Effects, Gate, Replay, Tool};

use crate::support::{Fails, World};

#[tokio::test]
async fn a_caller_who_hangs_up_cancels_the_tool_and_not_the_row() {
    let world = World::whose_act(|act| act.timeout(Duration::from_secs(60)));
    let quiet = world.fingerprint().await;
    let mut call = Box::pin(world.session.call("act", json!({"how": "hang"})));
    while world.ran() == 0 {
        assert!(tokio::time::timeout(Duration::from_millis(30), &mut call).await.is_err());
    }
    drop(call);
    recorded(&world).await;
    let (rows, _) = world.rows().await;
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].outcome.error().map(|e| (&*e.code, e.effects)), Some(("cancelled", Effects::Unknown)));
    assert_eq!(world.fingerprint().await, quiet);
    assert_eq!((world.metered().await, world.gate.pending_calls().await.unwrap().len()), (1.into(), 1), "nobody knows what it did");
}

#[tokio::test]
async fn a_row_tells_the_time_at_the_last_gate_too() {
    let world = World::new(|agent| agent);
    for how in [json!("ok"), json!("fail"), json!(7)] {
        world.session.call("act", json!({"how": how})).await;
    }
    let (rows, _) = world.rows().await;
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row.latency.at(Gate::Record) > 0), "{rows:#?}");
}

#[tokio::test]
async fn a_look_back_tells_a_caller_without_time_from_a_session_without() {
    let world = World::new(|agent| agent);
    let answer = world.gate.call(world.session.prepare("look", json!({})).timeout(Duration::ZERO)).await;
    assert_eq!((answer.gate, answer.outcome.error().map(|e| &*e.code)), (Gate::Limits, Some("deadline_exceeded")));
    let (rows, _) = world.rows().await;
    let said = Replay::of(&world.gate).unwrap().decide(&rows[0]).await;
    assert!(matches!(said, Compared::Circumstance(_)), "{said:?}");
}

#[tokio::test]
async fn a_rule_whose_code_is_that_of_a_circumstance_is_a_rule() {
    let world = World::new(|agent| agent.policy(Deny::new("frozen", ["look"]).code("busy")));
    world.session.call("look", json!({})).await;
    let (rows, _) = world.rows().await;
    assert_eq!(Replay::of(&world.gate).unwrap().decide(&rows[0]).await, Compared::Same);
    let other = Agent::builder("agent").tool(crate::support::look()).build().unwrap();
    let said = Replay::new([other]).unwrap().decide(&rows[0]).await;
    assert!(matches!(said, Compared::Differs(_)), "{said:?}");
}

#[tokio::test]
async fn arguments_that_nobody_has_read_are_not_judged_later() {
    let world = World::new(|agent| agent);
    world.session.call("gone", json!({"n": 1})).await;
    let (rows, _) = world.rows().await;
    assert_eq!((rows[0].gate, rows[0].arguments.is_null()), (Gate::Resolve, true));
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let gone = Tool::external("gone", "Is there by now.", Some(schema)).open();
    let now = Agent::builder("agent").tool(gone).build().unwrap();
    let said = Replay::new([now]).unwrap().decide(&rows[0]).await;
    assert!(matches!(&said, Compared::Undecidable(why) if why.contains("before its arguments were read")), "{said:?}");
}

type Noted = std::sync::Arc<std::sync::Mutex<Vec<&'static str>>>;

/// Says so when it is gone.
struct Gone(Noted);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.lock().unwrap().push("gone");
    }
}

/// A tool that waits without end, and has set something going elsewhere.
fn waits(name: &str, effect: Effect, noted: &Noted) -> Tool {
    let noted = Noted::clone(noted);
    Tool::dynamic(name, "Waits.", json!({"type": "object"}), move |ctx: toolgate::Ctx, _| {
        let (guard, heard, told) = (Gone(Noted::clone(&noted)), Noted::clone(&noted), ctx.cancellation_token().clone());
        noted.lock().unwrap().push("begun");
        tokio::spawn(async move {
            told.cancelled().await;
            heard.lock().unwrap().push("told");
        });
        async move {
            let _guard = guard;
            std::future::pending().await
        }
    })
    .effect(effect)
    .open()
}

/// Waits until so much was noted.
async fn noted(noted: &Noted, count: usize) -> Vec<&'static str> {
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
async fn recorded(world: &World) {
    for _ in 0..1_000 {
        if !world.rows().await.0.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_caller_who_hangs_up_on_a_read_leaves_its_row_too() {
    let gone = Noted::default();
    let world = World::new(|agent| agent.tool(waits("wait", Effect::Read, &gone)));
    let quiet = world.fingerprint().await;
    let mut call = Box::pin(world.session.call("wait", json!({})));
    while gone.lock().unwrap().is_empty() {
        assert!(tokio::time::timeout(Duration::from_millis(30), &mut call).await.is_err());
    }
    drop(call);
    recorded(&world).await;
    let (rows, _) = world.rows().await;
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].outcome.error().map(|e| (&*e.code, e.effects)), Some(("cancelled", Effects::None)));
    assert_eq!(noted(&gone, 3).await, ["begun", "gone", "told"], "the tool goes on");
    assert_eq!((world.fingerprint().await, world.gate.pending_calls().await.unwrap().len()), (quiet, 0));
}

#[tokio::test]
async fn a_deadline_ends_the_tool_and_not_only_the_wait_for_it() {
    for effect in [Effect::Read, Effect::Write] {
        let gone = Noted::default();
        let world =
            World::new(|agent| agent.tool(waits("wait", effect, &gone).timeout(Duration::from_millis(40)).retry(0, Duration::ZERO)));
        let answer = world.session.call("wait", json!({})).await;
        assert_eq!(answer.outcome.error().map(|e| &*e.code), Some("timeout"), "{answer:?}");
        assert_eq!(noted(&gone, 3).await, ["begun", "gone", "told"]);
    }
}

#[tokio::test]
async fn what_a_tool_has_set_going_is_not_told_to_end_once_its_call_has_ended() {
    let tokens: std::sync::Arc<std::sync::Mutex<Vec<_>>> = std::sync::Arc::default();
    let kept = std::sync::Arc::clone(&tokens);
    let schema = json!({"type": "object", "properties": {"fails": {"type": "boolean"}}});
    let start = move |ctx: toolgate::Ctx, args: serde_json::Value| {
        kept.lock().unwrap().push(ctx.cancellation_token().clone());
        async move { if args["fails"] == true { Err(toolgate::Failure::business("no_room", "full")) } else { Ok(json!({})) } }
    };
    let tool = |name, effect| Tool::dynamic(name, "Starts.", schema.clone(), start.clone()).effect(effect).open();
    let world = World::new(|agent| agent.tool(tool("peek", Effect::Read)).tool(tool("start", Effect::Write)));
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
async fn a_handler_is_given_what_the_agent_has_for_its_type() {
    struct Rates(u32);
    let tool = Tool::dynamic("rate", "Tells.", json!({"type": "object"}), |ctx: toolgate::Ctx, _| async move {
        let rates = ctx.resource::<Rates>().map(|rates| rates.0);
        let left = ctx.deadline().is_some() && ctx.time_left().is_some_and(|left| left <= Duration::from_secs(7));
        Ok(json!({"rate": rates, "text": ctx.resource::<String>().is_some(), "has a deadline": left}))
    });
    let world = World::new(|agent| agent.tool(tool.effect(Effect::Read).timeout(Duration::from_secs(7))).resource(Rates(19)));
    let answer = world.session.call("rate", json!({})).await;
    assert_eq!(answer.outcome.success().unwrap().value, json!({"rate": 19, "text": false, "has a deadline": true}));
}

#[tokio::test]
async fn nobody_hears_when_to_try_again_what_may_not_be_tried_again() {
    for (fails, code, wait) in [(Fails::Finish, "store_unavailable", 1_000), (Fails::FinishConflicts, "conflict", 100)] {
        // What has happened, and what was rolled back.
        for (world, again) in [(World::new(|agent| agent), false), (World::whose_act(Tool::local), true)] {
            world.store.fail(&[fails]);
            let answer = world.session.call("act", json!({"how": "ok"})).await;
            let heard = answer.outcome.error().map(|error| (&*error.code, error.retryable, error.retry_after_ms));
            assert_eq!(heard, Some((code, again, again.then_some(wait))));
        }
    }
}

#[tokio::test]
async fn a_signal_passes_through_untouched_and_changes_nothing() {
    let world = World::new(|agent| agent);
    let quiet = world.fingerprint().await;
    let answer = world.session.call("act", json!({"how": "expand"})).await;
    assert_eq!(answer.outcome.to_json(), json!({"isError": false, "signal": "expand_section", "section": "refunds", "reason": "needed"}));
    assert_eq!(world.fingerprint().await, quiet);
    assert_eq!(world.rows().await.0.len(), 1);
}

#[tokio::test]
async fn a_log_slice_survives_what_a_state_slice_does_not() {
    let world = World::new(|agent| agent);
    world.session.call("act", json!({"how": "fail"})).await;
    world.session.call("act", json!({"how": "ok"})).await;
    let state = world.session.state().await.unwrap();
    assert_eq!(state.log("attempts").count(), 2);
    assert_eq!(state.slice("touched"), Some(&json!({"how": "ok"})));
    assert_eq!(world.files.get("kept.txt").as_deref(), Some("changed".as_bytes()));
}

/// The task of a call dies between its claim and its end: the row says so, and the claim is pending, not forgotten.
#[tokio::test]
async fn a_call_that_dies_is_recorded_and_its_claim_is_pending() {
    let world = World::new(|agent| agent);
    world.store.fail(&[Fails::FinishDies]);
    let answer = world.session.call("act", json!({"how": "ok"})).await;
    assert_eq!(answer.outcome.error().map(|e| (&*e.code, e.effects)), Some(("internal_fault", Effects::Unknown)));
    assert_eq!(world.session.rows().await.unwrap().len(), 1);
    assert_eq!(world.gate.pending_calls().await.unwrap().len(), 1, "somebody must look");
    assert_eq!(world.metered().await, 1.into(), "what it reserved stays reserved");
}
