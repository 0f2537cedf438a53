//! The calls of one turn: judged together, run in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use toolgate::policy::Sequence;
use toolgate::{Ctx, Effect, Tool};

use crate::support::{Fails, World};

fn counter() -> Tool {
    Tool::dynamic("count", "Counts.", json!({"type": "object", "properties": {"n": {"type": "integer"}}}), |ctx: Ctx, _| async move {
        let n: i64 = ctx.slice("n")?.unwrap_or(0) + 1;
        ctx.set_slice("n", &n)?;
        Ok(json!(n))
    })
    .effect(Effect::Write)
    .local()
    .open()
}

fn codes(answers: &[toolgate::Answer]) -> Vec<String> {
    answers.iter().map(|a| a.outcome.error().map_or_else(|| "ok".to_owned(), |e| e.code.to_string())).collect()
}

fn plan(calls: &[(&str, Value)]) -> Vec<(String, Value)> {
    calls.iter().map(|(tool, args)| ((*tool).to_owned(), args.clone())).collect()
}

#[tokio::test]
async fn no_call_leans_on_what_another_of_the_same_turn_has_not_proved_yet() {
    let world = World::new(|agent| agent.policy(Sequence::new("first_look").after("act", ["look"])));
    let turn = plan(&[("look", json!({})), ("act", json!({"how": "ok"}))]);
    assert_eq!(codes(&world.session.batch(turn.clone()).await), ["ok", "prerequisite_missing"]);
    assert_eq!(codes(&world.session.batch(turn).await), ["ok", "ok"], "by the next turn it is proved");
    assert_eq!(world.session.rows().await.unwrap().len(), 4);
}

#[tokio::test]
async fn no_call_leans_on_what_another_of_the_same_turn_takes_away() {
    let wipe = Tool::dynamic("wipe", "Wipes.", json!({"type": "object"}), |_, _| async { Ok(json!({})) });
    let wipe = wipe.effect(Effect::Write).open().revokes("look");
    let world = World::new(|agent| agent.tool(wipe).policy(Sequence::new("first_look").after("act", ["look"])));
    world.session.call("look", json!({})).await;
    let answers = world.session.batch(plan(&[("act", json!({"how": "ok"})), ("wipe", json!({})), ("act", json!({"how": "fail"}))])).await;
    assert_eq!(codes(&answers), ["ok", "ok", "prerequisite_missing"]);
    let next = answers[2].outcome.error().and_then(|error| error.next.as_ref()).map(|next| next.tool.to_string());
    assert_eq!(next.as_deref(), Some("look"));
}

#[tokio::test]
async fn effects_run_in_order_and_see_each_other() {
    let world = World::new(|agent| agent.tool(counter()));
    let turn = plan(&[("count", json!({"n": 1})), ("count", json!({"n": 2})), ("act", json!({"how": "fail"})), ("count", json!({"n": 3}))]);
    let answers = world.session.batch(turn).await;
    assert_eq!(codes(&answers), ["ok", "ok", "no_stock", "ok"], "one failure does not stop the rest");
    let values: Vec<_> = answers.iter().filter_map(|a| a.outcome.success()).map(|o| o.value.clone()).collect();
    assert_eq!(values, [json!(1), json!(2), json!(3)]);
}

#[tokio::test]
async fn neighbouring_reads_run_together() {
    static TOGETHER: AtomicU32 = AtomicU32::new(0);
    let gate = Arc::new(tokio::sync::Barrier::new(3));
    let meet = Tool::dynamic(
        "meet",
        "Waits for two others.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        move |_, args| {
            let gate = Arc::clone(&gate);
            async move {
                gate.wait().await;
                TOGETHER.fetch_add(1, Ordering::SeqCst);
                Ok(args)
            }
        },
    )
    .effect(Effect::Read)
    .timeout(Duration::from_secs(60));
    let world = World::new(|agent| agent.tool(meet));
    let turn = plan(&[("meet", json!({"n": 1})), ("meet", json!({"n": 2})), ("meet", json!({"n": 3}))]);
    assert_eq!(codes(&world.session.batch(turn).await), ["ok", "ok", "ok"]);
    assert_eq!(TOGETHER.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn reservations_are_made_in_order() {
    use toolgate::limits::{Budget, Limits};
    let world = World::new(|agent| agent.limits(Limits { session: Budget { calls: Some(2), ..Budget::default() }, ..Limits::default() }));
    let turn = plan(&[("look", json!({"at": "a"})), ("act", json!({"how": "ok"})), ("look", json!({"at": "b"}))]);
    assert_eq!(codes(&world.session.batch(turn).await), ["ok", "ok", "budget_exhausted"]);
}

#[tokio::test]
async fn three_identical_calls_in_one_turn_are_a_loop_too() {
    let world = World::new(|agent| agent);
    let turn = plan(&[("look", json!({})), ("look", json!({})), ("look", json!({}))]);
    assert_eq!(codes(&world.session.batch(turn).await), ["ok", "ok", "loop_detected"]);
}

#[tokio::test]
async fn a_call_that_dies_takes_no_other_of_its_turn_along_and_keeps_its_name() {
    let world = World::new(|agent| agent);
    world.store.fail(&[Fails::BeginDies]);
    let answers = world.session.batch(plan(&[("acts", json!({})), ("act", json!({"how": "ok"})), ("look", json!({}))])).await;
    assert_eq!(codes(&answers), ["unknown_tool", "internal_fault", "ok"]);
    let rows = world.session.rows().await.unwrap();
    assert_eq!(rows.iter().map(|row| row.call).collect::<Vec<_>>(), answers.iter().map(|answer| answer.call).collect::<Vec<_>>());
}
