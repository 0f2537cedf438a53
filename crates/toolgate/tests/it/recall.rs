//! The same call twice: one effect, one result.

use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolgate::policy::{RecalledBy, Verdict};
use toolgate::{Answer, Category, Decision, Effect, Effects, Failure, Tool, ToolError};

use crate::support::{Fails, World, rule};

async fn keyed(world: &World, key: &str, args: Value) -> Answer {
    world.gate.call(world.session.prepare("act", args).idempotency_key(key)).await
}

#[tokio::test]
async fn a_settled_call_is_handed_back_without_running() {
    let world = World::new(|a| a);
    let first = keyed(&world, "k", json!({"how": "ok"})).await;
    for _ in 0..4 {
        let again = keyed(&world, "k", json!({"how": "ok"})).await;
        let output = again.outcome.success().unwrap_or_else(|| panic!("{again:?}"));
        assert!(output.replayed && Some(&output.value) == first.outcome.success().map(|o| &o.value));
    }
    assert_eq!((world.ran(), world.metered().await), (1, 1.into()), "no loop, no limit, no second run");
    let rows = world.session.rows().await.unwrap();
    assert_eq!(rows.iter().filter(|row| row.decision == Decision::Replayed).count(), 4);
    // Another session of the same principal gets it too: the key names the act, not the conversation.
    let other = world.gate.session("agent", "alice", "another");
    let again = world.gate.call(other.prepare("act", json!({"how": "ok"})).idempotency_key("k")).await;
    assert!(again.outcome.success().unwrap().replayed);
    // Another principal does not.
    let stranger = world.gate.session("agent", "bob", "s");
    assert!(!world.gate.call(stranger.prepare("act", json!({"how": "ok"})).idempotency_key("k")).await.outcome.success().unwrap().replayed);
}

#[tokio::test]
async fn a_call_that_is_running_is_not_started_again() {
    // It hangs for as long as this test wants.
    let world = World::whose_act(|act| act.timeout(Duration::from_secs(60)));
    let other = world.gate.session("agent", "alice", "another");
    let token = CancellationToken::new();
    let slow = world.session.prepare("act", json!({"how": "hang"})).idempotency_key("k").cancelled_by(token.clone());
    let slow = world.gate.call(slow);
    tokio::pin!(slow);
    while world.ran() == 0 {
        assert!(tokio::time::timeout(Duration::from_millis(30), &mut slow).await.is_err());
    }
    let again = world.gate.call(other.prepare("act", json!({"how": "hang"})).idempotency_key("k")).await;
    assert_eq!(again.outcome.error().map(|e| (&*e.code, e.retryable)), Some(("in_progress", true)));
    token.cancel();
    slow.await;
    let later = world.gate.call(other.prepare("act", json!({"how": "hang"})).idempotency_key("k")).await;
    assert_eq!(later.outcome.error().map(|e| (&*e.code, e.retryable)), Some(("pending_reconciliation", false)));
    assert_eq!(world.ran(), 1);
    // A person looks, and says what happened.
    let pending = world.gate.pending_calls().await.unwrap();
    let happened = toolgate::Outcome::Success(toolgate::Output::of(json!({"done": true})));
    assert!(world.gate.settle_pending(pending[0].call, Some(happened), "bob").await.unwrap());
    let known = world.gate.call(other.prepare("act", json!({"how": "hang"})).idempotency_key("k")).await;
    assert!(known.outcome.success().unwrap().replayed);
    assert_eq!(world.ran(), 1);
}

#[tokio::test]
async fn what_provably_did_nothing_may_run_again_under_the_same_key() {
    let world = World::new(|a| a);
    for _ in 0..2 {
        assert_eq!(keyed(&world, "k", json!({"how": "refuse"})).await.outcome.error().map(|e| &*e.code), Some("no_stock"));
    }
    assert_eq!(world.ran(), 2);
}

#[tokio::test]
async fn a_result_that_was_withheld_is_not_a_reason_to_run_again() {
    let world = World::new(|a| a);
    let first = keyed(&world, "k", json!({"how": "junk"})).await;
    let again = keyed(&world, "k", json!({"how": "junk"})).await;
    assert_eq!(first.outcome.error().map(|e| (&e.code, e.effects)), again.outcome.error().map(|e| (&e.code, e.effects)));
    assert_eq!(world.ran(), 1);
}

#[tokio::test]
async fn a_tool_declared_once_needs_no_key() {
    let pay = toolgate::Tool::dynamic(
        "pay",
        "Pays.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        |ctx: toolgate::Ctx, _| async move {
            let n: i64 = ctx.slice("paid")?.unwrap_or(0) + 1;
            ctx.set_slice("paid", &n)?;
            Ok(json!(n))
        },
    )
    .open()
    .once();
    let world = World::new(|a| a.tool(pay));
    let mut replayed = Vec::new();
    for n in [1, 2, 1, 1, 1] {
        let answer = world.session.call("pay", json!({ "n": n })).await;
        replayed.push(answer.outcome.success().unwrap().replayed);
    }
    assert_eq!(replayed, [false, false, true, true, true]);
    assert_eq!(world.session.slice("paid").await.unwrap(), Some(json!(2)));
    // Without `once` and without a key, X, Y, X are three acts.
    let world = World::new(|a| a);
    for n in [1, 2, 1] {
        world.session.call("act", json!({"how": "ok", "n": n})).await;
    }
    assert_eq!(world.ran(), 3);
}

#[tokio::test]
async fn an_old_result_is_not_for_those_who_may_not_call_any_more() {
    use std::sync::atomic::{AtomicU32, Ordering};
    static MODE: AtomicU32 = AtomicU32::new(0);
    let world = World::new(|a| {
        a.policy(rule("access", |_| match MODE.load(Ordering::SeqCst) {
            0 => Ok(Verdict::allow()),
            1 => Ok(Verdict::deny(ToolError::new(Category::Business, "cap", "one is enough"))),
            _ => Ok(Verdict::deny(ToolError::new(Category::Permission, "revoked", "access was revoked"))),
        }))
    });
    assert!(keyed(&world, "k", json!({"how": "ok"})).await.outcome.success().is_some());
    MODE.store(1, Ordering::SeqCst);
    assert!(keyed(&world, "k", json!({"how": "ok"})).await.outcome.success().is_some(), "a rule about new acts does not hide an old one");
    MODE.store(2, Ordering::SeqCst);
    let withheld = keyed(&world, "k", json!({"how": "ok"})).await;
    assert_eq!(withheld.outcome.error().map(|e| (&*e.code, e.effects)), Some(("revoked", toolgate::Effects::Done)), "it happened");
}

#[tokio::test]
async fn a_read_with_a_key_is_recalled_too() {
    let world = World::new(|a| a);
    for expected in [false, true] {
        let answer = world.gate.call(world.session.prepare("look", json!({"at": "x"})).idempotency_key("k")).await;
        assert_eq!(answer.outcome.success().map(|o| o.replayed), Some(expected));
    }
}

#[tokio::test]
async fn a_read_leaves_nothing_to_find_out_whatever_it_says() {
    for effects in [Effects::Done, Effects::Unknown] {
        let tool = Tool::dynamic("fetch", "Fetches.", json!({"type": "object"}), move |_, _| async move {
            Err::<Value, _>(Failure::transient("away", "later").effects(effects))
        });
        let world = World::new(|a| a.tool(tool.effect(Effect::Read).retry(1, Duration::from_millis(1))));
        for _ in 0..2 {
            let answer = world.gate.call(world.session.prepare("fetch", json!({})).idempotency_key("k")).await;
            assert_eq!(
                answer.outcome.error().map(|e| (&*e.code, e.effects, e.retryable)),
                Some(("away", Effects::None, true)),
                "{effects:?}"
            );
        }
        let rows = world.session.rows().await.unwrap();
        assert_eq!(rows.iter().map(|row| (row.retries, row.effects)).collect::<Vec<_>>(), [(1, Effects::None); 2], "{effects:?}");
        assert!(world.gate.pending_calls().await.unwrap().is_empty(), "{effects:?}");
    }
}

#[tokio::test]
async fn a_read_that_dies_may_be_made_again_under_the_same_key() {
    let world = World::new(|a| a);
    world.store.fail(&[Fails::FinishDies]);
    for expected in [Some("internal_fault"), None] {
        let answer = world.gate.call(world.session.prepare("look", json!({})).idempotency_key("k")).await;
        assert_eq!(answer.outcome.error().map(|e| &*e.code), expected);
    }
    assert!(world.gate.pending_calls().await.unwrap().is_empty());
}

#[tokio::test]
async fn no_key_talks_a_tool_declared_once_into_a_second_act() {
    let pay = toolgate::Tool::dynamic("pay", "Pays.", json!({"type": "object"}), |ctx: toolgate::Ctx, _| async move {
        let n: i64 = ctx.slice("paid")?.unwrap_or(0) + 1;
        ctx.set_slice("paid", &n)?;
        Ok(json!(n))
    })
    .open()
    .once();
    let world = World::new(|a| a.tool(pay));
    for key in [Some("a"), Some("b"), None, Some("a")] {
        let call = world.session.prepare("pay", json!({}));
        let call = key.into_iter().fold(call, |call, key| call.idempotency_key(key));
        assert!(world.gate.call(call).await.outcome.success().is_some());
    }
    assert_eq!(world.session.slice("paid").await.unwrap(), Some(json!(1)));
    // Each row says how the first call was known.
    let by: Vec<Option<RecalledBy>> = world.session.rows().await.unwrap().iter().map(|row| row.facts.recalled_by).collect();
    assert_eq!(by, [None, Some(RecalledBy::Once), Some(RecalledBy::Once), Some(RecalledBy::Key)]);
}

/// Trims what it is given, so that what is asked for and what runs differ.
struct Trims;

#[async_trait::async_trait]
impl toolgate::hook::Hook for Trims {
    fn name(&self) -> &str {
        "trims"
    }
    async fn before(&self, call: toolgate::hook::HookCall<'_>) -> Result<toolgate::hook::Before, toolgate::hook::HookFault> {
        let mut input = call.input.clone();
        input["how"] = json!(input["how"].as_str().unwrap_or_default().trim());
        Ok(toolgate::hook::Before { input: Some(input), ..Default::default() })
    }
}

#[tokio::test]
async fn a_hook_that_rewrites_does_not_break_recall_or_patience() {
    let world = World::new(|a| a.hook(Trims));
    for replayed in [false, true] {
        let answer = keyed(&world, "k", json!({"how": " ok "})).await;
        assert_eq!(answer.outcome.success().map(|o| o.replayed), Some(replayed), "{answer:?}");
    }
    assert_eq!(world.ran(), 1);
}

#[tokio::test]
async fn a_kill_switch_pulled_meanwhile_stops_what_has_not_begun() {
    use toolgate::store::Target;
    struct Pulls(std::sync::OnceLock<toolgate::Toolgate>);
    #[async_trait::async_trait]
    impl toolgate::hook::Hook for &'static Pulls {
        fn name(&self) -> &str {
            "pulls"
        }
        async fn before(&self, _: toolgate::hook::HookCall<'_>) -> Result<toolgate::hook::Before, toolgate::hook::HookFault> {
            self.0.get().unwrap().pause(Target::Tool("act".into()), "incident").await.unwrap();
            Ok(Default::default())
        }
    }
    static PULLS: Pulls = Pulls(std::sync::OnceLock::new());
    let world = World::new(|a| a.hook(&PULLS));
    PULLS.0.set(world.gate.clone()).ok().unwrap();
    let answer = world.session.call("act", json!({"how": "ok"})).await;
    assert_eq!((answer.outcome.error().map(|e| &*e.code), answer.gate), (Some("paused"), toolgate::Gate::Claim));
    assert_eq!((world.ran(), world.metered().await), (0, 0.into()));
}

#[tokio::test]
async fn a_kill_switch_pulled_by_one_call_of_a_batch_stops_the_next() {
    use std::sync::OnceLock;
    use toolgate::store::Target;
    static GATE: OnceLock<toolgate::Toolgate> = OnceLock::new();
    let pull = toolgate::Tool::dynamic("pull", "Pulls.", json!({"type": "object"}), |_, args| async move {
        GATE.get().unwrap().pause(Target::Tool("act".into()), "incident").await.unwrap();
        Ok(args)
    })
    .open();
    let world = World::new(|a| a.tool(pull));
    GATE.set(world.gate.clone()).ok().unwrap();
    let answers = world.session.batch([("pull".to_owned(), json!({})), ("act".to_owned(), json!({"how": "ok"}))]).await;
    assert_eq!(answers[1].outcome.error().map(|e| (&*e.code, e.effects)), Some(("paused", toolgate::Effects::None)));
    assert_eq!((world.ran(), world.metered().await, world.gate.pending_calls().await.unwrap().len()), (0, 0.into(), 0));
    assert_eq!(world.session.rows().await.unwrap()[1].decision, Decision::Refused);
}
