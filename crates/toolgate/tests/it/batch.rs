//! Tests that the calls of one turn are decided together and run in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use toolgate::policy::Sequence;
use toolgate::{Effect, Tool, ToolContext};

use crate::support::{InjectedFault, TestWorld};

fn counter_tool() -> Tool {
    Tool::dynamic(
        "count",
        "Counts.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        |ctx: ToolContext, _| async move {
            let n: i64 = ctx.slice("n")?.unwrap_or(0) + 1;
            ctx.set_slice("n", &n)?;
            Ok(json!(n))
        },
    )
    .effect(Effect::Write)
    .local()
    .open()
}

fn answer_codes(answers: &[toolgate::Answer]) -> Vec<String> {
    answers
        .iter()
        .map(|a| a.outcome.error().map_or_else(|| "ok".to_owned(), |e| e.code.to_string()))
        .collect()
}

fn batch_calls(calls: &[(&str, Value)]) -> Vec<(String, Value)> {
    calls.iter().map(|(tool, args)| ((*tool).to_owned(), args.clone())).collect()
}

#[tokio::test]
async fn batch_call_gets_no_evidence_from_same_turn() {
    let world =
        TestWorld::new(|agent| agent.policy(Sequence::new("first_look").after("act", ["look"])));
    let turn = batch_calls(&[("look", json!({})), ("act", json!({"how": "ok"}))]);
    assert_eq!(
        answer_codes(&world.session.batch(turn.clone()).await),
        ["ok", "prerequisite_missing"]
    );
    assert_eq!(
        answer_codes(&world.session.batch(turn).await),
        ["ok", "ok"],
        "the next turn has the evidence"
    );
    assert_eq!(world.session.rows().await.unwrap().len(), 4);
}

#[tokio::test]
async fn batch_call_loses_evidence_revoked_in_same_turn() {
    let wipe =
        Tool::dynamic("wipe", "Wipes.", json!({"type": "object"}), |_, _| async { Ok(json!({})) });
    let wipe = wipe.effect(Effect::Write).open().revokes("look");
    let world = TestWorld::new(|agent| {
        agent.tool(wipe).policy(Sequence::new("first_look").after("act", ["look"]))
    });
    world.session.call("look", json!({})).await;
    let answers = world
        .session
        .batch(batch_calls(&[
            ("act", json!({"how": "ok"})),
            ("wipe", json!({})),
            ("act", json!({"how": "fail"})),
        ]))
        .await;
    assert_eq!(answer_codes(&answers), ["ok", "ok", "prerequisite_missing"]);
    let next = answers[2]
        .outcome
        .error()
        .and_then(|error| error.next.as_ref())
        .map(|next| next.tool.to_string());
    assert_eq!(next.as_deref(), Some("look"));
}

#[tokio::test]
async fn batch_effects_run_in_order_and_share_state() {
    let world = TestWorld::new(|agent| agent.tool(counter_tool()));
    let turn = batch_calls(&[
        ("count", json!({"n": 1})),
        ("count", json!({"n": 2})),
        ("act", json!({"how": "fail"})),
        ("count", json!({"n": 3})),
    ]);
    let answers = world.session.batch(turn).await;
    assert_eq!(
        answer_codes(&answers),
        ["ok", "ok", "no_stock", "ok"],
        "one failure does not stop the rest"
    );
    let values: Vec<_> =
        answers.iter().filter_map(|a| a.outcome.success()).map(|o| o.value.clone()).collect();
    assert_eq!(values, [json!(1), json!(2), json!(3)]);
}

#[tokio::test]
async fn adjacent_reads_run_concurrently() {
    static RUNNING_READS: AtomicU32 = AtomicU32::new(0);
    let gate = Arc::new(tokio::sync::Barrier::new(3));
    let meet = Tool::dynamic(
        "meet",
        "Waits for two others.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        move |_, args| {
            let gate = Arc::clone(&gate);
            async move {
                gate.wait().await;
                RUNNING_READS.fetch_add(1, Ordering::SeqCst);
                Ok(args)
            }
        },
    )
    .effect(Effect::Read)
    .timeout(Duration::from_secs(60));
    let world = TestWorld::new(|agent| agent.tool(meet));
    let turn = batch_calls(&[
        ("meet", json!({"n": 1})),
        ("meet", json!({"n": 2})),
        ("meet", json!({"n": 3})),
    ]);
    assert_eq!(answer_codes(&world.session.batch(turn).await), ["ok", "ok", "ok"]);
    assert_eq!(RUNNING_READS.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn batch_reserves_limits_in_order() {
    use toolgate::limits::{Budget, Limits};
    let world = TestWorld::new(|agent| {
        agent.limits(Limits {
            session: Budget { calls: Some(2), ..Budget::default() },
            ..Limits::default()
        })
    });
    let turn = batch_calls(&[
        ("look", json!({"at": "a"})),
        ("act", json!({"how": "ok"})),
        ("look", json!({"at": "b"})),
    ]);
    assert_eq!(answer_codes(&world.session.batch(turn).await), ["ok", "ok", "budget_exhausted"]);
}

#[tokio::test]
async fn identical_calls_in_one_turn_are_a_loop() {
    let world = TestWorld::new(|agent| agent);
    let turn = batch_calls(&[("look", json!({})), ("look", json!({})), ("look", json!({}))]);
    assert_eq!(answer_codes(&world.session.batch(turn).await), ["ok", "ok", "loop_detected"]);
}

#[tokio::test]
async fn panicking_batch_call_does_not_affect_others() {
    let world = TestWorld::new(|agent| agent);
    world.store.inject_faults(&[InjectedFault::ClaimPanics]);
    let answers = world
        .session
        .batch(batch_calls(&[
            ("acts", json!({})),
            ("act", json!({"how": "ok"})),
            ("look", json!({})),
        ]))
        .await;
    assert_eq!(answer_codes(&answers), ["unknown_tool", "internal_fault", "ok"]);
    let rows = world.session.rows().await.unwrap();
    assert_eq!(
        rows.iter().map(|row| row.call).collect::<Vec<_>>(),
        answers.iter().map(|answer| answer.call).collect::<Vec<_>>()
    );
}
