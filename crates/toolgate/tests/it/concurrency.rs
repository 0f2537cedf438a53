//! Tests that concurrent calls have the same result as calls in some serial order.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Barrier;
use toolgate::{Effect, Tool, ToolContext};

use crate::support::TestWorld;

/// Declares a tool that rewrites a list and yields in between, so that a lost update is visible.
fn push_tool() -> Tool {
    Tool::dynamic(
        "push",
        "Appends.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}, "fail": {"type": "boolean"}}, "required": ["n"]}),
        |ctx: ToolContext, args| async move {
            let mut list: Vec<Value> = ctx.slice("list")?.unwrap_or_default();
            tokio::time::sleep(Duration::from_millis(args["n"].as_u64().unwrap_or(0) % 3)).await;
            list.push(args["n"].clone());
            ctx.set_slice("list", &list)?;
            if args["fail"] == true { Err(toolgate::Failure::business("requested_failure", "requested by the test")) } else { Ok(json!(list)) }
        },
    )
    .effect(Effect::Write)
    .local()
    .open()
}

/// Checks that a random interleaving of writers and readers equals some serial order.
async fn check_interleaving(calls: u64, seed: u64) {
    let peek = Tool::dynamic(
        "peek",
        "Looks.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        |ctx: ToolContext, _| async move {
            let before: Vec<Value> = ctx.slice("list")?.unwrap_or_default();
            tokio::task::yield_now().await;
            Ok(json!(before))
        },
    );
    // All calls wait for one session lock, which can take long on a slow disk.
    let world = TestWorld::with_builder(
        |agent| agent.tool(push_tool()).tool(peek.effect(Effect::Read)),
        |gate| gate.busy_timeout(Duration::from_secs(60)),
    );
    let mut tasks = Vec::new();
    for n in 0..calls {
        let session = world.session.clone();
        let reads = (seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(n.wrapping_mul(1_442_695_040_888_963_407))
            >> 60)
            % 3
            == 0;
        tasks.push(tokio::spawn(async move {
            let tool = if reads { "peek" } else { "push" };
            let args = if !reads && n % 5 == 4 {
                json!({"n": n, "fail": true})
            } else {
                json!({ "n": n })
            };
            (reads, session.call(tool, args).await)
        }));
    }
    let (mut written, mut seen) = (Vec::new(), Vec::new());
    for task in tasks {
        let (reads, answer) = task.await.unwrap();
        // A failed call is not part of the list.
        if answer.outcome.error().is_some_and(|e| e.code == "requested_failure") {
            continue;
        }
        let list: Vec<u64> = serde_json::from_value(
            answer.outcome.success().unwrap_or_else(|| panic!("{answer:?}")).value.clone(),
        )
        .unwrap();
        if reads { seen.push(list) } else { written.push(list) }
    }
    // Each writer saw exactly what the writers before it had written: the lists form one chain.
    written.sort_by_key(Vec::len);
    for (index, list) in written.iter().enumerate() {
        assert_eq!(list.len(), index + 1);
        assert!(index == 0 || list[..index] == written[index - 1][..]);
    }
    let last = written.last().cloned().unwrap_or_default();
    assert!(
        seen.iter().all(|list| last.starts_with(list)),
        "a reader saw a list that is not in the chain"
    );
    assert_eq!(world.session.slice("list").await.unwrap().unwrap_or(json!([])), json!(last));
    assert_eq!(world.session.rows().await.unwrap().len() as u64, calls);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_interleaving_equals_some_serial_order() {
    let rounds = if std::env::var_os("TOOLGATE_SOAK").is_some() { 2_000 } else { 20 };
    for seed in 0..rounds {
        check_interleaving(24, seed).await;
    }
}

#[tokio::test]
async fn conflicting_writers_are_both_recorded_and_one_fails() {
    // Both calls are declared `read`, so they run concurrently. Both write, so the second one
    // conflicts. The barrier keeps both from ending before both have started.
    let both = Arc::new(Barrier::new(2));
    let meet = Tool::dynamic(
        "push",
        "Appends.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
        move |ctx: ToolContext, args: Value| {
            let both = Arc::clone(&both);
            async move {
                let mut list: Vec<Value> = ctx.slice("list")?.unwrap_or_default();
                both.wait().await;
                list.push(args["n"].clone());
                ctx.set_slice("list", &list)?;
                Ok(json!(list))
            }
        },
    );
    let world = TestWorld::new(|agent| agent.tool(meet.effect(Effect::Read).local().open()));
    let (a, b) = tokio::join!(
        world.session.call("push", json!({"n": 1})),
        world.session.call("push", json!({"n": 2}))
    );
    let conflicts: Vec<_> =
        [&a, &b].into_iter().filter_map(|answer| answer.outcome.error()).collect();
    assert_eq!(conflicts.len(), 1, "{a:?} {b:?}");
    assert_eq!(
        (&*conflicts[0].code, conflicts[0].retryable, conflicts[0].effects),
        ("conflict", true, toolgate::CallEffects::None)
    );
    assert_eq!(
        world.session.slice("list").await.unwrap().map(|list| list.as_array().unwrap().len()),
        Some(1)
    );
    let rows = world.session.rows().await.unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!(
        rows.iter()
            .filter(|row| row.decision == toolgate::Decision::Failed
                && row.gate == toolgate::Gate::Settle)
            .count(),
        1
    );
}

#[tokio::test]
async fn sessions_do_not_wait_for_each_other() {
    let world = TestWorld::with_act(|act| act.timeout(Duration::from_secs(60)));
    let slow = world.session.call("act", json!({"how": "read and wait"}));
    let other = world.gate.session("agent", "alice", "another");
    tokio::pin!(slow);
    while world.run_count() == 0 {
        assert!(tokio::time::timeout(Duration::from_millis(20), &mut slow).await.is_err());
    }
    let answer = tokio::select! {
        answer = other.call("look", json!({})) => answer,
        _ = &mut slow => panic!("the call waited for the other session"),
    };
    assert!(answer.outcome.success().is_some());
    world.go.add_permits(1);
    slow.await;
}

#[tokio::test]
async fn nested_call_in_own_session_gets_busy() {
    use std::sync::OnceLock;
    static INNER_SESSION: OnceLock<toolgate::Session> = OnceLock::new();
    let nest = Tool::dynamic("nest", "Calls again.", json!({"type": "object"}), |_, _| async {
        let answer = INNER_SESSION.get().unwrap().call("nest", json!({})).await;
        Ok(json!(answer.outcome.error().map(|e| e.code.to_string())))
    })
    .open();
    let world = TestWorld::with_builder(
        |agent| agent.tool(nest),
        |gate| gate.busy_timeout(Duration::from_millis(20)),
    );
    INNER_SESSION.set(world.session.clone()).ok().unwrap();
    let answer = world.session.call("nest", json!({})).await;
    assert_eq!(answer.outcome.success().map(|o| &o.value), Some(&json!("busy")));
}
