//! Tests that a repeated call has one effect and one result.

use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolgate::policy::{DedupKeyKind, Verdict};
use toolgate::{Answer, CallEffects, Decision, Effect, ErrorCategory, Failure, Tool, ToolError};

use crate::support::{InjectedFault, TestWorld, closure_policy};

async fn call_with_key(world: &TestWorld, key: &str, args: Value) -> Answer {
    world.gate.call(world.session.prepare("act", args).idempotency_key(key)).await
}

#[tokio::test]
async fn settled_call_is_replayed_without_running() {
    let world = TestWorld::new(|a| a);
    let first = call_with_key(&world, "k", json!({"how": "ok"})).await;
    for _ in 0..4 {
        let again = call_with_key(&world, "k", json!({"how": "ok"})).await;
        let output = again.outcome.success().unwrap_or_else(|| panic!("{again:?}"));
        assert!(
            output.replayed && Some(&output.value) == first.outcome.success().map(|o| &o.value)
        );
    }
    assert_eq!(
        (world.run_count(), world.meter_value().await),
        (1, 1.into()),
        "no loop, no limit, no second run"
    );
    let rows = world.session.rows().await.unwrap();
    assert_eq!(rows.iter().filter(|row| row.decision == Decision::Replayed).count(), 4);
    // Another session of the same principal gets the replay, because the key is not bound to a
    // session.
    let other = world.gate.session("agent", "alice", "another");
    let again =
        world.gate.call(other.prepare("act", json!({"how": "ok"})).idempotency_key("k")).await;
    assert!(again.outcome.success().unwrap().replayed);
    // Another principal gets no replay.
    let other_principal = world.gate.session("agent", "bob", "s");
    assert!(
        !world
            .gate
            .call(other_principal.prepare("act", json!({"how": "ok"})).idempotency_key("k"))
            .await
            .outcome
            .success()
            .unwrap()
            .replayed
    );
}

#[tokio::test]
async fn running_call_is_not_started_again() {
    // The call hangs until the test cancels the token.
    let world = TestWorld::with_act(|act| act.timeout(Duration::from_secs(60)));
    let other = world.gate.session("agent", "alice", "another");
    let token = CancellationToken::new();
    let slow = world
        .session
        .prepare("act", json!({"how": "hang"}))
        .idempotency_key("k")
        .cancelled_by(token.clone());
    let slow = world.gate.call(slow);
    tokio::pin!(slow);
    while world.run_count() == 0 {
        assert!(tokio::time::timeout(Duration::from_millis(30), &mut slow).await.is_err());
    }
    let again =
        world.gate.call(other.prepare("act", json!({"how": "hang"})).idempotency_key("k")).await;
    assert_eq!(again.outcome.error().map(|e| (&*e.code, e.retryable)), Some(("in_progress", true)));
    token.cancel();
    slow.await;
    let later =
        world.gate.call(other.prepare("act", json!({"how": "hang"})).idempotency_key("k")).await;
    assert_eq!(
        later.outcome.error().map(|e| (&*e.code, e.retryable)),
        Some(("pending_reconciliation", false))
    );
    assert_eq!(world.run_count(), 1);
    // A person settles the call as successful.
    let pending = world.gate.pending_calls().await.unwrap();
    let happened =
        toolgate::Outcome::Success(toolgate::CallOutput::from_value(json!({"done": true})));
    assert!(world.gate.settle_pending(pending[0].call, Some(happened), "bob").await.unwrap());
    let known =
        world.gate.call(other.prepare("act", json!({"how": "hang"})).idempotency_key("k")).await;
    assert!(known.outcome.success().unwrap().replayed);
    assert_eq!(world.run_count(), 1);
}

#[tokio::test]
async fn call_without_effects_may_run_again_with_same_key() {
    let world = TestWorld::new(|a| a);
    for _ in 0..2 {
        assert_eq!(
            call_with_key(&world, "k", json!({"how": "refuse"}))
                .await
                .outcome
                .error()
                .map(|e| &*e.code),
            Some("no_stock")
        );
    }
    assert_eq!(world.run_count(), 2);
}

#[tokio::test]
async fn withheld_result_is_replayed_without_running() {
    let world = TestWorld::new(|a| a);
    let first = call_with_key(&world, "k", json!({"how": "junk"})).await;
    let again = call_with_key(&world, "k", json!({"how": "junk"})).await;
    assert_eq!(
        first.outcome.error().map(|e| (&e.code, e.effects)),
        again.outcome.error().map(|e| (&e.code, e.effects))
    );
    assert_eq!(world.run_count(), 1);
}

#[tokio::test]
async fn once_tool_is_replayed_without_key() {
    let pay = toolgate::Tool::dynamic(
        "pay",
        "Pays.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        |ctx: toolgate::ToolContext, _| async move {
            let n: i64 = ctx.slice("paid")?.unwrap_or(0) + 1;
            ctx.set_slice("paid", &n)?;
            Ok(json!(n))
        },
    )
    .open()
    .once();
    let world = TestWorld::new(|a| a.tool(pay));
    let mut replayed = Vec::new();
    for n in [1, 2, 1, 1, 1] {
        let answer = world.session.call("pay", json!({ "n": n })).await;
        replayed.push(answer.outcome.success().unwrap().replayed);
    }
    assert_eq!(replayed, [false, false, true, true, true]);
    assert_eq!(world.session.slice("paid").await.unwrap(), Some(json!(2)));
    // Without `once` and without a key, X, Y, X are three calls.
    let world = TestWorld::new(|a| a);
    for n in [1, 2, 1] {
        world.session.call("act", json!({"how": "ok", "n": n})).await;
    }
    assert_eq!(world.run_count(), 3);
}

#[tokio::test]
async fn replay_is_withheld_after_access_is_revoked() {
    use std::sync::atomic::{AtomicU32, Ordering};
    static RULE_MODE: AtomicU32 = AtomicU32::new(0);
    let world = TestWorld::new(|a| {
        a.policy(closure_policy("access", |_| match RULE_MODE.load(Ordering::SeqCst) {
            0 => Ok(Verdict::allow()),
            1 => Ok(Verdict::deny(ToolError::new(ErrorCategory::Business, "cap", "one is enough"))),
            _ => Ok(Verdict::deny(ToolError::new(
                ErrorCategory::Permission,
                "revoked",
                "access was revoked",
            ))),
        }))
    });
    assert!(call_with_key(&world, "k", json!({"how": "ok"})).await.outcome.success().is_some());
    RULE_MODE.store(1, Ordering::SeqCst);
    assert!(
        call_with_key(&world, "k", json!({"how": "ok"})).await.outcome.success().is_some(),
        "a business rule does not withhold a recorded outcome"
    );
    RULE_MODE.store(2, Ordering::SeqCst);
    let withheld = call_with_key(&world, "k", json!({"how": "ok"})).await;
    assert_eq!(
        withheld.outcome.error().map(|e| (&*e.code, e.effects)),
        Some(("revoked", toolgate::CallEffects::Done)),
        "the effects are known"
    );
}

#[tokio::test]
async fn keyed_read_is_replayed() {
    let world = TestWorld::new(|a| a);
    for expected in [false, true] {
        let answer = world
            .gate
            .call(world.session.prepare("look", json!({"at": "x"})).idempotency_key("k"))
            .await;
        assert_eq!(answer.outcome.success().map(|o| o.replayed), Some(expected));
    }
}

#[tokio::test]
async fn failed_read_is_never_pending() {
    for effects in [CallEffects::Done, CallEffects::Unknown] {
        let tool =
            Tool::dynamic("fetch", "Fetches.", json!({"type": "object"}), move |_, _| async move {
                Err::<Value, _>(Failure::transient("away", "later").effects(effects))
            });
        let world = TestWorld::new(|a| {
            a.tool(tool.effect(Effect::Read).retry(1, Duration::from_millis(1)))
        });
        for _ in 0..2 {
            let answer = world
                .gate
                .call(world.session.prepare("fetch", json!({})).idempotency_key("k"))
                .await;
            assert_eq!(
                answer.outcome.error().map(|e| (&*e.code, e.effects, e.retryable)),
                Some(("away", CallEffects::None, true)),
                "{effects:?}"
            );
        }
        let rows = world.session.rows().await.unwrap();
        assert_eq!(
            rows.iter().map(|row| (row.retries, row.effects)).collect::<Vec<_>>(),
            [(1, CallEffects::None); 2],
            "{effects:?}"
        );
        assert!(world.gate.pending_calls().await.unwrap().is_empty(), "{effects:?}");
    }
}

#[tokio::test]
async fn crashed_read_may_run_again_with_same_key() {
    let world = TestWorld::new(|a| a);
    world.store.inject_faults(&[InjectedFault::CommitPanics]);
    for expected in [Some("internal_fault"), None] {
        let answer =
            world.gate.call(world.session.prepare("look", json!({})).idempotency_key("k")).await;
        assert_eq!(answer.outcome.error().map(|e| &*e.code), expected);
    }
    assert!(world.gate.pending_calls().await.unwrap().is_empty());
}

#[tokio::test]
async fn once_tool_runs_once_with_any_key() {
    let pay = toolgate::Tool::dynamic(
        "pay",
        "Pays.",
        json!({"type": "object"}),
        |ctx: toolgate::ToolContext, _| async move {
            let n: i64 = ctx.slice("paid")?.unwrap_or(0) + 1;
            ctx.set_slice("paid", &n)?;
            Ok(json!(n))
        },
    )
    .open()
    .once();
    let world = TestWorld::new(|a| a.tool(pay));
    for key in [Some("a"), Some("b"), None, Some("a")] {
        let call = world.session.prepare("pay", json!({}));
        let call = key.into_iter().fold(call, |call, key| call.idempotency_key(key));
        assert!(world.gate.call(call).await.outcome.success().is_some());
    }
    assert_eq!(world.session.slice("paid").await.unwrap(), Some(json!(1)));
    // Each row names the kind of key that found the first call.
    let key_kinds: Vec<Option<DedupKeyKind>> =
        world.session.rows().await.unwrap().iter().map(|row| row.facts.recalled_by).collect();
    assert_eq!(
        key_kinds,
        [None, Some(DedupKeyKind::Once), Some(DedupKeyKind::Once), Some(DedupKeyKind::Key)]
    );
}

/// Trims the `how` argument, so that requested and executed arguments differ.
struct TrimmingHook;

#[async_trait::async_trait]
impl toolgate::hook::Hook for TrimmingHook {
    fn name(&self) -> &str {
        "trims"
    }
    async fn before(
        &self,
        call: toolgate::hook::HookCall<'_>,
    ) -> Result<toolgate::hook::BeforeHookResult, toolgate::hook::HookError> {
        let mut input = call.input.clone();
        input["how"] = json!(input["how"].as_str().unwrap_or_default().trim());
        Ok(toolgate::hook::BeforeHookResult { input: Some(input), ..Default::default() })
    }
}

#[tokio::test]
async fn replay_and_loop_detection_work_with_rewriting_hook() {
    let world = TestWorld::new(|a| a.hook(TrimmingHook));
    for replayed in [false, true] {
        let answer = call_with_key(&world, "k", json!({"how": " ok "})).await;
        assert_eq!(answer.outcome.success().map(|o| o.replayed), Some(replayed), "{answer:?}");
    }
    assert_eq!(world.run_count(), 1);
}

#[tokio::test]
async fn pause_during_hooks_stops_call() {
    use toolgate::store::PauseTarget;
    struct PausingHook(std::sync::OnceLock<toolgate::Toolgate>);
    #[async_trait::async_trait]
    impl toolgate::hook::Hook for &'static PausingHook {
        fn name(&self) -> &str {
            "pulls"
        }
        async fn before(
            &self,
            _: toolgate::hook::HookCall<'_>,
        ) -> Result<toolgate::hook::BeforeHookResult, toolgate::hook::HookError> {
            self.0.get().unwrap().pause(PauseTarget::Tool("act".into()), "incident").await.unwrap();
            Ok(Default::default())
        }
    }
    static PAUSING_HOOK: PausingHook = PausingHook(std::sync::OnceLock::new());
    let world = TestWorld::new(|a| a.hook(&PAUSING_HOOK));
    PAUSING_HOOK.0.set(world.gate.clone()).ok().unwrap();
    let answer = world.session.call("act", json!({"how": "ok"})).await;
    assert_eq!(
        (answer.outcome.error().map(|e| &*e.code), answer.gate),
        (Some("paused"), toolgate::Gate::Claim)
    );
    assert_eq!((world.run_count(), world.meter_value().await), (0, 0.into()));
}

#[tokio::test]
async fn pause_by_batch_call_stops_next_call() {
    use std::sync::OnceLock;
    use toolgate::store::PauseTarget;
    static RUNTIME: OnceLock<toolgate::Toolgate> = OnceLock::new();
    let pull = toolgate::Tool::dynamic(
        "pull",
        "Pulls.",
        json!({"type": "object"}),
        |_, args| async move {
            RUNTIME
                .get()
                .unwrap()
                .pause(PauseTarget::Tool("act".into()), "incident")
                .await
                .unwrap();
            Ok(args)
        },
    )
    .open();
    let world = TestWorld::new(|a| a.tool(pull));
    RUNTIME.set(world.gate.clone()).ok().unwrap();
    let answers = world
        .session
        .batch([("pull".to_owned(), json!({})), ("act".to_owned(), json!({"how": "ok"}))])
        .await;
    assert_eq!(
        answers[1].outcome.error().map(|e| (&*e.code, e.effects)),
        Some(("paused", toolgate::CallEffects::None))
    );
    assert_eq!(
        (
            world.run_count(),
            world.meter_value().await,
            world.gate.pending_calls().await.unwrap().len()
        ),
        (0, 0.into(), 0)
    );
    assert_eq!(world.session.rows().await.unwrap()[1].decision, Decision::Refused);
}
