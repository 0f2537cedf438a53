//! Provides worlds whose hooks, policies and programs stop calls.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use toolgate::hook::{
    BeforeHookResult, CommandHook, Hook, HookCall, HookDecision, HookDenial, HookError,
};
use toolgate::policy::{FactRequest, Policy, PolicyError, PolicyInput, SuccessfulCall, Verdict};
use toolgate::session::state::NamedChange;
use toolgate::{Answer, Call, Effect};

use crate::support::{TestWorld, closure_policy};

struct FaultInjectingHook(&'static str);

#[async_trait]
impl Hook for FaultInjectingHook {
    fn name(&self) -> &str {
        "hook"
    }
    fn timeout(&self) -> Duration {
        Duration::from_millis(50)
    }
    async fn before(&self, _: HookCall<'_>) -> Result<BeforeHookResult, HookError> {
        match self.0 {
            "deny" => Ok(BeforeHookResult {
                decision: HookDecision::Deny(HookDenial::new("not on my watch")),
                input: None,
            }),
            "fault" => Err(HookError("cannot reach the policy service".into())),
            "panic" => panic!("a hook has a fault"),
            "hang" => std::future::pending().await,
            "rewrite" => Ok(BeforeHookResult {
                input: Some(json!({"how": 7})),
                ..BeforeHookResult::default()
            }),
            "ask" => Ok(BeforeHookResult {
                decision: HookDecision::Ask("a person should look".into()),
                input: None,
            }),
            _ => Ok(BeforeHookResult::default()),
        }
    }
    async fn after(&self, _: HookCall<'_>, _: &Value, _: u64) -> Result<Option<Value>, HookError> {
        match self.0 {
            "after-fault" => Err(HookError("cannot write the audit log".into())),
            "after-panic" => panic!("a hook has a fault"),
            "after-hang" => std::future::pending().await,
            _ => Ok(None),
        }
    }
}

pub(crate) struct FaultInjectingPolicy(pub(crate) &'static str);

impl Policy for FaultInjectingPolicy {
    fn name(&self) -> &str {
        "faulty"
    }
    fn request_facts(&self, _: &PolicyInput<'_>, _: &mut FactRequest) {
        assert!(self.0 != "needs", "a policy has a fault");
    }
    fn check(&self, ask: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        match self.0 {
            "undeclared" => ask.counter("never requested", None).map(|_| Verdict::allow()),
            _ => Ok(Verdict::allow()),
        }
    }
    fn on_result(&self, _: &SuccessfulCall<'_>) -> Result<Vec<NamedChange>, PolicyError> {
        match self.0 {
            "result-fault" => Err(PolicyError::new("cannot record the result")),
            "result-panic" => panic!("a policy has a fault"),
            _ => Ok(Vec::new()),
        }
    }
}

pub(crate) fn plain_world() -> TestWorld {
    TestWorld::new(|agent| agent)
}

/// Builds a world whose `act` has a timeout of 60 s, so that another limit comes first.
pub(crate) fn world_with_long_timeout() -> TestWorld {
    TestWorld::with_act(|act| act.timeout(Duration::from_secs(60)))
}

/// Builds a world whose `act` is declared a read, so that two calls run concurrently.
pub(crate) fn world_with_concurrent_act() -> TestWorld {
    TestWorld::with_act(|act| act.timeout(Duration::from_secs(60)).effect(Effect::Read))
}

pub(crate) fn world_with_hook(how: &'static str) -> TestWorld {
    TestWorld::new(|agent| agent.hook(FaultInjectingHook(how)))
}

/// Builds a world with a hook program and a timeout of 60 s.
pub(crate) fn world_with_script(script: &'static str) -> TestWorld {
    world_with_script_timeout(60, script)
}

/// Builds a world with a hook program and a timeout.
pub(crate) fn world_with_script_timeout(seconds: u64, script: &'static str) -> TestWorld {
    let hook = CommandHook::new("script", "/bin/sh")
        .arg("-c")
        .arg(script)
        .timeout(Duration::from_secs(seconds));
    TestWorld::new(|agent| agent.hook(hook.before()))
}

pub(crate) fn world_with_policy(
    check: fn(&PolicyInput<'_>) -> Result<Verdict, PolicyError>,
) -> TestWorld {
    TestWorld::new(|agent| agent.policy(closure_policy("rule", check)))
}

/// Starts a call on its own task and waits until the tool runs.
pub(crate) async fn start_call(world: &TestWorld, call: Call) -> JoinHandle<Answer> {
    let (gate, before) = (world.gate.clone(), world.run_count());
    let task = tokio::spawn(async move { gate.call(call).await });
    while world.run_count() == before && !task.is_finished() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    task
}

/// Aborts a call while the tool runs, and waits for its row.
pub(crate) async fn abort_call(world: &TestWorld, how: &str) {
    start_call(world, world.session.prepare("act", json!({"how": how}))).await.abort();
    for _ in 0..10_000 {
        if !world.rows().await.0.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
