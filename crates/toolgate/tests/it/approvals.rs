//! Tests that an approval is valid for one exact call, once and for a limited time.

use std::sync::Arc;

use async_trait::async_trait;
use jiff::SignedDuration;
use serde_json::{Value, json};
use toolgate::policy::Verdict;
use toolgate::{
    CallEffects, CheckedArguments, ErrorCategory, Failure, Gate, Handler, Permit, PredictedOutcome,
    Tool, ToolContext, ToolError,
};

use crate::support::{TestWorld, closure_policy};

fn world_with_ask_rule() -> TestWorld {
    TestWorld::new(|agent| {
        agent.tool_policy(
            "act",
            closure_policy("large", |_| Ok(Verdict::ask("large amounts need a person"))),
        )
    })
}

async fn request_approval(world: &TestWorld, n: i64) -> String {
    let answer = world.session.call("act", json!({"how": "ok", "n": n})).await;
    let error = answer.outcome.error().unwrap();
    assert_eq!((&*error.code, error.retryable), ("approval_required", false));
    error.approval.clone().unwrap().id
}

async fn call_code(world: &TestWorld, call: toolgate::Call) -> String {
    let answer = world.gate.call(call).await;
    answer.outcome.error().map_or_else(|| "ok".to_owned(), |e| e.code.to_string())
}

#[tokio::test]
async fn approved_call_runs_once() {
    let world = world_with_ask_rule();
    let id = request_approval(&world, 1).await;
    assert_eq!(request_approval(&world, 1).await, id, "the same call asks once");
    assert!(world.gate.answer_approval(&id, true, "bob").await.unwrap());
    assert!(
        !world.gate.answer_approval(&id, false, "eve").await.unwrap(),
        "the approval has an answer"
    );
    let call = || world.session.prepare("act", json!({"how": "ok", "n": 1}));
    // The loop detector refuses the third identical call, but not a call with its approval.
    assert_eq!(call_code(&world, call().approval(&id)).await, "ok");
    assert_eq!(world.run_count(), 1);
    assert_eq!(
        call_code(&world, call().approval(&id)).await,
        "approval_denied",
        "the approval is used up"
    );
    assert_eq!(world.run_count(), 1);
}

#[tokio::test]
async fn approval_covers_only_shown_arguments() {
    let world = world_with_ask_rule();
    let id = request_approval(&world, 1).await;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    assert_eq!(
        call_code(&world, world.session.prepare("act", json!({"how": "ok", "n": 2}))).await,
        "approval_required"
    );
    // A call with an approval id runs the stored arguments, not the sent ones.
    let answer = world
        .gate
        .call(world.session.prepare("act", json!({"how": "ok", "n": 999})).approval(&id))
        .await;
    assert!(answer.outcome.success().is_some(), "{answer:?}");
    assert_eq!(world.session.slice("touched").await.unwrap(), Some(json!({"how": "ok", "n": 1})));
}

#[tokio::test]
async fn approval_is_bound_to_session_and_tool() {
    let world = world_with_ask_rule();
    let id = request_approval(&world, 1).await;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    let other = world.gate.session("agent", "mallory", "s");
    assert_eq!(
        call_code(&world, other.prepare("act", json!({"how": "ok", "n": 1})).approval(&id)).await,
        "approval_denied"
    );
    assert_eq!(
        call_code(&world, world.session.prepare("look", json!({})).approval(&id)).await,
        "approval_denied"
    );
    assert_eq!(world.run_count(), 0);
}

#[tokio::test]
async fn approval_expires_after_its_ttl() {
    let world = world_with_ask_rule();
    let id = request_approval(&world, 1).await;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    world.advance(SignedDuration::from_mins(16));
    assert_eq!(
        call_code(&world, world.session.prepare("act", json!({"how": "ok", "n": 1})).approval(&id))
            .await,
        "approval_denied"
    );
    assert_ne!(request_approval(&world, 1).await, id, "a new request");
    world.advance(SignedDuration::from_mins(16));
    assert!(!world.gate.answer_approval(&id, true, "bob").await.unwrap());
}

/// Advances the stored clock by 2 s, once.
struct SlowHook(std::sync::Arc<std::sync::Mutex<Option<std::sync::Arc<toolgate::ManualClock>>>>);

#[async_trait::async_trait]
impl toolgate::hook::Hook for SlowHook {
    fn name(&self) -> &str {
        "slow"
    }
    async fn before(
        &self,
        _: toolgate::hook::HookCall<'_>,
    ) -> Result<toolgate::hook::BeforeHookResult, toolgate::hook::HookError> {
        if let Some(clock) = self.0.lock().unwrap().take() {
            clock.advance(SignedDuration::from_secs(2));
        }
        Ok(toolgate::hook::BeforeHookResult {
            decision: toolgate::hook::HookDecision::Allow,
            input: None,
        })
    }
}

#[tokio::test]
async fn approval_that_expires_during_hook_is_not_used() {
    for named in [true, false] {
        let slow = std::sync::Arc::default();
        let hook = SlowHook(std::sync::Arc::clone(&slow));
        let world = TestWorld::new(|agent| {
            agent
                .hook(hook)
                .tool_policy("act", closure_policy("large", |_| Ok(Verdict::ask("large"))))
        });
        let id = request_approval(&world, 1).await;
        assert!(world.gate.answer_approval(&id, true, "bob").await.unwrap());
        world.advance(SignedDuration::from_secs(15 * 60 - 1));
        *slow.lock().unwrap() = Some(world.clock.clone());
        let call = world.session.prepare("act", json!({"how": "ok", "n": 1}));
        assert_eq!(
            call_code(&world, if named { call.approval(&id) } else { call }).await,
            "approval_denied"
        );
        assert_eq!(world.run_count(), 0);
    }
}

#[tokio::test]
async fn approval_does_not_override_deny_rule() {
    use std::sync::atomic::{AtomicBool, Ordering};
    static IS_FORBIDDEN: AtomicBool = AtomicBool::new(false);
    let world = TestWorld::new(|agent| {
        agent.policy(closure_policy("large", |_| Ok(Verdict::ask("large")))).policy(closure_policy(
            "embargo",
            |_| {
                if IS_FORBIDDEN.load(Ordering::SeqCst) {
                    return Ok(Verdict::deny(ToolError::new(
                        ErrorCategory::Business,
                        "embargo",
                        "not to this country",
                    )));
                }
                Ok(Verdict::allow())
            },
        ))
    });
    let id = request_approval(&world, 1).await;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    IS_FORBIDDEN.store(true, Ordering::SeqCst);
    assert_eq!(
        call_code(&world, world.session.prepare("act", json!({"how": "ok", "n": 1})).approval(&id))
            .await,
        "embargo"
    );
    assert_eq!(world.run_count(), 0);
    // The denial did not use up the approval.
    IS_FORBIDDEN.store(false, Ordering::SeqCst);
    assert_eq!(
        call_code(&world, world.session.prepare("act", json!({"how": "ok", "n": 1})).approval(&id))
            .await,
        "ok"
    );
}

/// Returns the decision that the test sets.
struct SwitchableHook(&'static std::sync::Mutex<&'static str>);

#[async_trait::async_trait]
impl toolgate::hook::Hook for SwitchableHook {
    fn name(&self) -> &str {
        "gatekeeper"
    }
    async fn before(
        &self,
        _: toolgate::hook::HookCall<'_>,
    ) -> Result<toolgate::hook::BeforeHookResult, toolgate::hook::HookError> {
        use toolgate::hook::{BeforeHookResult, HookDecision, HookDenial};
        let decision = match *self.0.lock().unwrap() {
            "ask" => HookDecision::Ask("may it?".into()),
            "deny" => HookDecision::Deny(HookDenial::new("not any more")),
            _ => HookDecision::Allow,
        };
        Ok(BeforeHookResult { decision, input: None })
    }
}

#[tokio::test]
async fn approval_answers_ask_of_hook() {
    static HOOK_DECISION: std::sync::Mutex<&str> = std::sync::Mutex::new("ask");
    let world = TestWorld::new(|agent| agent.hook(SwitchableHook(&HOOK_DECISION)));
    let id = request_approval(&world, 1).await;
    let resume = || world.session.prepare("act", json!({"how": "ok", "n": 1})).approval(&id);
    assert_eq!(call_code(&world, resume()).await, "approval_required", "no answer yet");
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    *HOOK_DECISION.lock().unwrap() = "deny";
    assert_eq!(call_code(&world, resume()).await, "hook_denied", "the hook is asked again");
    *HOOK_DECISION.lock().unwrap() = "ask";
    assert_eq!(call_code(&world, resume()).await, "ok");
    assert_eq!(call_code(&world, resume()).await, "approval_denied", "an approval is valid once");
    let denied_id = request_approval(&world, 2).await;
    world.gate.answer_approval(&denied_id, false, "bob").await.unwrap();
    assert_eq!(
        call_code(
            &world,
            world.session.prepare("act", json!({"how": "ok", "n": 2})).approval(&denied_id)
        )
        .await,
        "approval_denied"
    );
    assert_eq!(world.run_count(), 1);
}

#[tokio::test]
async fn ask_reason_keeps_its_punctuation() {
    for (reason, prefix) in [
        ("Sure?", "Sure? A "),
        ("Stop!", "Stop! A "),
        ("Well…", "Well… A "),
        ("It is large.", "It is large. A "),
        ("large", "large. A "),
    ] {
        let world = TestWorld::new(|agent| {
            agent.tool_policy("act", closure_policy("large", move |_| Ok(Verdict::ask(reason))))
        });
        let answer = world.session.call("act", json!({"how": "ok", "n": 1})).await;
        let message = &answer.outcome.error().unwrap().message;
        assert!(message.starts_with(&format!("{prefix}person must approve")), "{message}");
    }
}

#[tokio::test]
async fn repeated_call_with_approval_is_not_a_loop() {
    let world = world_with_ask_rule();
    let id = request_approval(&world, 1).await;
    request_approval(&world, 1).await;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    // This is the third identical call, as the error requires.
    assert_eq!(
        call_code(&world, world.session.prepare("act", json!({"how": "ok", "n": 1}))).await,
        "ok"
    );
}

#[tokio::test]
async fn approval_shows_no_secrets() {
    let world = world_with_ask_rule();
    let answer = world.session.call("act", json!({"how": "ok", "password": "hunter2"})).await;
    let id = answer.outcome.error().unwrap().approval.clone().unwrap().id;
    let approval = world.gate.approval(&id).await.unwrap().unwrap();
    assert!(!serde_json::to_string(&approval).unwrap().contains("hunter2"));
    assert_eq!(approval.shown["how"], json!("ok"));
}

#[tokio::test]
async fn result_of_approved_call_is_replayed() {
    let world = world_with_ask_rule();
    let call = || world.session.prepare("act", json!({"how": "ok", "n": 1})).idempotency_key("k");
    let first = world.gate.call(call()).await;
    let id = first.outcome.error().unwrap().approval.clone().unwrap().id;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    assert_eq!(call_code(&world, call().approval(&id)).await, "ok");
    let again = world.gate.call(call().approval(&id)).await;
    assert!(again.outcome.success().is_some_and(|output| output.replayed), "{again:?}");
    assert!(matches!(
        world.gate.explain(&call().approval(&id)).await.would,
        PredictedOutcome::Replay
    ));
    // A call with another key is another call, and the approval is used up.
    let other = world.gate.explain(&call().idempotency_key("other").approval(&id)).await.would;
    assert!(
        matches!(&other, PredictedOutcome::Refuse(error) if error.code == "approval_denied"),
        "{other:?}"
    );
    assert_eq!(
        call_code(&world, call().idempotency_key("other").approval(&id)).await,
        "approval_denied"
    );
    assert_eq!(world.run_count(), 1);
}

/// Panics in `refusal`.
struct PanickingHandler;

#[async_trait]
impl Handler for PanickingHandler {
    async fn run(
        &self,
        _: &Permit,
        _: ToolContext,
        _: &CheckedArguments,
    ) -> Result<Value, Failure> {
        Ok(json!({}))
    }
    fn refusal(&self) -> Option<Failure> {
        panic!("the password is hunter2")
    }
}

#[tokio::test]
async fn panicking_refuses_method_creates_no_approval() {
    let tool = Tool::with_handler(
        "faulty",
        "Has a fault.",
        json!({"type": "object"}),
        Arc::new(PanickingHandler),
    );
    let asks = closure_policy("asks", |_| Ok(Verdict::ask("a person should look")));
    let world = TestWorld::new(|agent| agent.tool(tool).tool_policy("faulty", asks));
    let would = world.session.explain("faulty", json!({})).await.would;
    assert!(
        matches!(&would, PredictedOutcome::Refuse(error) if error.code == "tool_panicked"),
        "{would:?}"
    );
    let answer = world.session.call("faulty", json!({})).await;
    let error = answer.outcome.error().unwrap();
    assert_eq!(
        (&*error.code, error.effects, answer.gate),
        ("tool_panicked", CallEffects::None, Gate::Approval),
        "{error}"
    );
    assert!(error.approval.is_none() && !error.message.contains("hunter2"), "{error}");
}
