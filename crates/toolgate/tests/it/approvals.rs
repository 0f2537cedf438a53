//! A person's word: for exactly one call, once, in time.

use std::sync::Arc;

use async_trait::async_trait;
use jiff::SignedDuration;
use serde_json::{Value, json};
use toolgate::policy::Verdict;
use toolgate::{Category, Ctx, Effects, Failure, Gate, Handler, Judged, Permit, Tool, ToolError, Would};

use crate::support::{World, rule};

fn asking() -> World {
    World::new(|agent| agent.tool_policy("act", rule("large", |_| Ok(Verdict::ask("large amounts need a person")))))
}

async fn ask(world: &World, n: i64) -> String {
    let answer = world.session.call("act", json!({"how": "ok", "n": n})).await;
    let error = answer.outcome.error().unwrap();
    assert_eq!((&*error.code, error.retryable), ("approval_required", false));
    error.approval.clone().unwrap().id
}

async fn code(world: &World, call: toolgate::Call) -> String {
    let answer = world.gate.call(call).await;
    answer.outcome.error().map_or_else(|| "ok".to_owned(), |e| e.code.to_string())
}

#[tokio::test]
async fn an_approved_call_runs_once_when_it_is_repeated() {
    let world = asking();
    let id = ask(&world, 1).await;
    assert_eq!(ask(&world, 1).await, id, "the same call asks once");
    assert!(world.gate.answer_approval(&id, true, "bob").await.unwrap());
    assert!(!world.gate.answer_approval(&id, false, "eve").await.unwrap(), "it has been answered");
    let call = || world.session.prepare("act", json!({"how": "ok", "n": 1}));
    // The loop detector would refuse the third identical call; one that comes with its approval is no repetition.
    assert_eq!(code(&world, call().approval(&id)).await, "ok");
    assert_eq!(world.ran(), 1);
    assert_eq!(code(&world, call().approval(&id)).await, "approval_denied", "it is used up");
    assert_eq!(world.ran(), 1);
}

#[tokio::test]
async fn an_approval_covers_the_arguments_that_were_shown_and_no_others() {
    let world = asking();
    let id = ask(&world, 1).await;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    assert_eq!(code(&world, world.session.prepare("act", json!({"how": "ok", "n": 2}))).await, "approval_required");
    // With the approval's name, what was stored runs, whatever is sent along.
    let answer = world.gate.call(world.session.prepare("act", json!({"how": "ok", "n": 999})).approval(&id)).await;
    assert!(answer.outcome.success().is_some(), "{answer:?}");
    assert_eq!(world.session.slice("touched").await.unwrap(), Some(json!({"how": "ok", "n": 1})));
}

#[tokio::test]
async fn an_approval_belongs_to_one_session_and_one_tool() {
    let world = asking();
    let id = ask(&world, 1).await;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    let other = world.gate.session("agent", "mallory", "s");
    assert_eq!(code(&world, other.prepare("act", json!({"how": "ok", "n": 1})).approval(&id)).await, "approval_denied");
    assert_eq!(code(&world, world.session.prepare("look", json!({})).approval(&id)).await, "approval_denied");
    assert_eq!(world.ran(), 0);
}

#[tokio::test]
async fn an_approval_expires() {
    let world = asking();
    let id = ask(&world, 1).await;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    world.advance(SignedDuration::from_mins(16));
    assert_eq!(code(&world, world.session.prepare("act", json!({"how": "ok", "n": 1})).approval(&id)).await, "approval_denied");
    assert_ne!(ask(&world, 1).await, id, "asked anew");
    world.advance(SignedDuration::from_mins(16));
    assert!(!world.gate.answer_approval(&id, true, "bob").await.unwrap());
}

/// Takes its time, as often as it is told to.
struct Slow(std::sync::Arc<std::sync::Mutex<Option<std::sync::Arc<toolgate::ManualClock>>>>);

#[async_trait::async_trait]
impl toolgate::hook::Hook for Slow {
    fn name(&self) -> &str {
        "slow"
    }
    async fn before(&self, _: toolgate::hook::HookCall<'_>) -> Result<toolgate::hook::Before, toolgate::hook::HookFault> {
        if let Some(clock) = self.0.lock().unwrap().take() {
            clock.advance(SignedDuration::from_secs(2));
        }
        Ok(toolgate::hook::Before { decision: toolgate::hook::HookDecision::Allow, input: None })
    }
}

#[tokio::test]
async fn an_approval_that_expires_while_its_call_waits_is_not_used() {
    for named in [true, false] {
        let slow = std::sync::Arc::default();
        let hook = Slow(std::sync::Arc::clone(&slow));
        let world = World::new(|agent| agent.hook(hook).tool_policy("act", rule("large", |_| Ok(Verdict::ask("large")))));
        let id = ask(&world, 1).await;
        assert!(world.gate.answer_approval(&id, true, "bob").await.unwrap());
        world.advance(SignedDuration::from_secs(15 * 60 - 1));
        *slow.lock().unwrap() = Some(world.clock.clone());
        let call = world.session.prepare("act", json!({"how": "ok", "n": 1}));
        assert_eq!(code(&world, if named { call.approval(&id) } else { call }).await, "approval_denied");
        assert_eq!(world.ran(), 0);
    }
}

#[tokio::test]
async fn an_approval_answers_the_question_and_not_the_law() {
    use std::sync::atomic::{AtomicBool, Ordering};
    static FORBIDDEN: AtomicBool = AtomicBool::new(false);
    let world = World::new(|agent| {
        agent.policy(rule("large", |_| Ok(Verdict::ask("large")))).policy(rule("embargo", |_| {
            if FORBIDDEN.load(Ordering::SeqCst) {
                return Ok(Verdict::deny(ToolError::new(Category::Business, "embargo", "not to this country")));
            }
            Ok(Verdict::allow())
        }))
    });
    let id = ask(&world, 1).await;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    FORBIDDEN.store(true, Ordering::SeqCst);
    assert_eq!(code(&world, world.session.prepare("act", json!({"how": "ok", "n": 1})).approval(&id)).await, "embargo");
    assert_eq!(world.ran(), 0);
    // The refusal did not use it up.
    FORBIDDEN.store(false, Ordering::SeqCst);
    assert_eq!(code(&world, world.session.prepare("act", json!({"how": "ok", "n": 1})).approval(&id)).await, "ok");
}

/// Asks for everything, or denies, as it is told.
struct Gatekeeper(&'static std::sync::Mutex<&'static str>);

#[async_trait::async_trait]
impl toolgate::hook::Hook for Gatekeeper {
    fn name(&self) -> &str {
        "gatekeeper"
    }
    async fn before(&self, _: toolgate::hook::HookCall<'_>) -> Result<toolgate::hook::Before, toolgate::hook::HookFault> {
        use toolgate::hook::{Before, Denial, HookDecision};
        let decision = match *self.0.lock().unwrap() {
            "ask" => HookDecision::Ask("may it?".into()),
            "deny" => HookDecision::Deny(Denial::new("not any more")),
            _ => HookDecision::Allow,
        };
        Ok(Before { decision, input: None })
    }
}

#[tokio::test]
async fn what_a_hook_asks_takes_an_answer_too() {
    static MOOD: std::sync::Mutex<&str> = std::sync::Mutex::new("ask");
    let world = World::new(|agent| agent.hook(Gatekeeper(&MOOD)));
    let id = ask(&world, 1).await;
    let resume = || world.session.prepare("act", json!({"how": "ok", "n": 1})).approval(&id);
    assert_eq!(code(&world, resume()).await, "approval_required", "nobody has answered");
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    *MOOD.lock().unwrap() = "deny";
    assert_eq!(code(&world, resume()).await, "hook_denied", "a hook still has its say");
    *MOOD.lock().unwrap() = "ask";
    assert_eq!(code(&world, resume()).await, "ok");
    assert_eq!(code(&world, resume()).await, "approval_denied", "one answer, one call");
    let refused = ask(&world, 2).await;
    world.gate.answer_approval(&refused, false, "bob").await.unwrap();
    assert_eq!(code(&world, world.session.prepare("act", json!({"how": "ok", "n": 2})).approval(&refused)).await, "approval_denied");
    assert_eq!(world.ran(), 1);
}

#[tokio::test]
async fn a_reason_ends_as_it_was_written() {
    for (reason, told) in
        [("Sure?", "Sure? A "), ("Stop!", "Stop! A "), ("Well…", "Well… A "), ("It is large.", "It is large. A "), ("large", "large. A ")]
    {
        let world = World::new(|agent| agent.tool_policy("act", rule("large", move |_| Ok(Verdict::ask(reason)))));
        let answer = world.session.call("act", json!({"how": "ok", "n": 1})).await;
        let message = &answer.outcome.error().unwrap().message;
        assert!(message.starts_with(&format!("{told}person must approve")), "{message}");
    }
}

#[tokio::test]
async fn patience_with_a_person_is_no_loop() {
    let world = asking();
    let id = ask(&world, 1).await;
    ask(&world, 1).await;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    // The third identical call, as the error told the model to make it.
    assert_eq!(code(&world, world.session.prepare("act", json!({"how": "ok", "n": 1}))).await, "ok");
}

#[tokio::test]
async fn a_person_does_not_see_secrets() {
    let world = asking();
    let answer = world.session.call("act", json!({"how": "ok", "password": "hunter2"})).await;
    let id = answer.outcome.error().unwrap().approval.clone().unwrap().id;
    let approval = world.gate.approval(&id).await.unwrap().unwrap();
    assert!(!serde_json::to_string(&approval).unwrap().contains("hunter2"));
    assert_eq!(approval.shown["how"], json!("ok"));
}

#[tokio::test]
async fn who_did_not_hear_what_an_approved_call_came_to_hears_it_again() {
    let world = asking();
    let call = || world.session.prepare("act", json!({"how": "ok", "n": 1})).idempotency_key("k");
    let asked = world.gate.call(call()).await;
    let id = asked.outcome.error().unwrap().approval.clone().unwrap().id;
    world.gate.answer_approval(&id, true, "bob").await.unwrap();
    assert_eq!(code(&world, call().approval(&id)).await, "ok");
    let again = world.gate.call(call().approval(&id)).await;
    assert!(again.outcome.success().is_some_and(|output| output.replayed), "{again:?}");
    assert!(matches!(world.gate.explain(&call().approval(&id)).await.would, Would::Replay));
    // Under another key it is another call, and the approval is used up.
    let other = world.gate.explain(&call().idempotency_key("other").approval(&id)).await.would;
    assert!(matches!(&other, Would::Refuse(error) if error.code == "approval_denied"), "{other:?}");
    assert_eq!(code(&world, call().idempotency_key("other").approval(&id)).await, "approval_denied");
    assert_eq!(world.ran(), 1);
}

/// Dies when it is asked whether it refuses.
struct Faulty;

#[async_trait]
impl Handler for Faulty {
    async fn run(&self, _: &Permit, _: Ctx, _: &Judged) -> Result<Value, Failure> {
        Ok(json!({}))
    }
    fn refuses(&self) -> Option<Failure> {
        panic!("the password is hunter2")
    }
}

#[tokio::test]
async fn nobody_is_asked_about_a_tool_that_panics_when_it_is_asked_itself() {
    let tool = Tool::with_handler("faulty", "Has a fault.", json!({"type": "object"}), Arc::new(Faulty));
    let asks = rule("asks", |_| Ok(Verdict::ask("a person should look")));
    let world = World::new(|agent| agent.tool(tool).tool_policy("faulty", asks));
    let would = world.session.explain("faulty", json!({})).await.would;
    assert!(matches!(&would, Would::Refuse(error) if error.code == "tool_panicked"), "{would:?}");
    let answer = world.session.call("faulty", json!({})).await;
    let error = answer.outcome.error().unwrap();
    assert_eq!((&*error.code, error.effects, answer.gate), ("tool_panicked", Effects::None, Gate::Approval), "{error}");
    assert!(error.approval.is_none() && !error.message.contains("hunter2"), "{error}");
}
