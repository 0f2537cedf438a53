//! Hooks, policies and stores that stand in the way.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use toolgate::hook::{Before, CommandHook, Denial, Hook, HookCall, HookDecision, HookFault};
use toolgate::policy::{Ask, Done, Fault, Needs, Policy, Verdict};
use toolgate::session::state::Change;
use toolgate::{Answer, Call, Effect};

use crate::support::{World, rule};

struct TestHook(&'static str);

#[async_trait]
impl Hook for TestHook {
    fn name(&self) -> &str {
        "hook"
    }
    fn timeout(&self) -> Duration {
        Duration::from_millis(50)
    }
    async fn before(&self, _: HookCall<'_>) -> Result<Before, HookFault> {
        match self.0 {
            "deny" => Ok(Before { decision: HookDecision::Deny(Denial::new("not on my watch")), input: None }),
            "fault" => Err(HookFault("cannot reach the policy service".into())),
            "panic" => panic!("a hook has a fault"),
            "hang" => std::future::pending().await,
            "rewrite" => Ok(Before { input: Some(json!({"how": 7})), ..Before::default() }),
            "ask" => Ok(Before { decision: HookDecision::Ask("a person should look".into()), input: None }),
            _ => Ok(Before::default()),
        }
    }
    async fn after(&self, _: HookCall<'_>, _: &Value, _: u64) -> Result<Option<Value>, HookFault> {
        match self.0 {
            "after-fault" => Err(HookFault("cannot write the audit log".into())),
            "after-panic" => panic!("a hook has a fault"),
            "after-hang" => std::future::pending().await,
            _ => Ok(None),
        }
    }
}

pub(super) struct Deaf(pub(super) &'static str);

impl Policy for Deaf {
    fn name(&self) -> &str {
        "deaf"
    }
    fn needs(&self, _: &Ask<'_>, _: &mut Needs) {
        assert!(self.0 != "needs", "a policy has a fault");
    }
    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        match self.0 {
            "undeclared" => ask.counter("never asked for", None).map(|_| Verdict::allow()),
            _ => Ok(Verdict::allow()),
        }
    }
    fn on_result(&self, _: &Done<'_>) -> Result<Vec<Change>, Fault> {
        match self.0 {
            "result-fault" => Err(Fault::new("cannot take note")),
            "result-panic" => panic!("a policy has a fault"),
            _ => Ok(Vec::new()),
        }
    }
}

pub(super) fn plain() -> World {
    World::new(|agent| agent)
}

/// Here no time-out comes before what is waited for.
pub(super) fn patient() -> World {
    World::whose_act(|act| act.timeout(Duration::from_secs(60)))
}

/// Here `act` is taken for a read, so that two of it run at the same time.
pub(super) fn shared() -> World {
    World::whose_act(|act| act.timeout(Duration::from_secs(60)).effect(Effect::Read))
}

pub(super) fn hooked(how: &'static str) -> World {
    World::new(|agent| agent.hook(TestHook(how)))
}

/// A program that is given the time it takes to begin.
pub(super) fn scripted(script: &'static str) -> World {
    scripted_for(60, script)
}

/// A program that is given so many seconds.
pub(super) fn scripted_for(seconds: u64, script: &'static str) -> World {
    let hook = CommandHook::new("script", "/bin/sh").arg("-c").arg(script).timeout(Duration::from_secs(seconds));
    World::new(|agent| agent.hook(hook.before()))
}

pub(super) fn ruled(check: fn(&Ask<'_>) -> Result<Verdict, Fault>) -> World {
    World::new(|agent| agent.policy(rule("rule", check)))
}

/// A call on a task of its own. It is under way: the tool has begun.
pub(super) async fn under_way(world: &World, call: Call) -> JoinHandle<Answer> {
    let (gate, before) = (world.gate.clone(), world.ran());
    let task = tokio::spawn(async move { gate.call(call).await });
    while world.ran() == before && !task.is_finished() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    task
}

/// The caller goes away while the tool runs. That it has ended, only its row tells.
pub(super) async fn hang_up(world: &World, how: &str) {
    under_way(world, world.session.prepare("act", json!({"how": how}))).await.abort();
    for _ in 0..10_000 {
        if !world.rows().await.0.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
