//! Lists calls that stop in gates 11 to 14, when the tool has started or is about to start.

use std::time::Duration;

use serde_json::json;
use tokio_util::sync::CancellationToken;
use toolgate::hook::CommandHook;
use toolgate::limits::{Budget, Limits};
use toolgate::normalize::NormalizationRule as Normal;
use toolgate::{CallEffects, Gate, Tool};

use super::{
    ExpectedStop, StopCase, StopOutcome, StopStep, WorldBaseline, call_act, expect_refused,
    expect_unknown, expect_withheld,
};
use crate::call_outcomes::faulty_collaborators::{
    FaultInjectingPolicy, abort_call, plain_world, start_call, world_with_concurrent_act,
    world_with_hook, world_with_long_timeout,
};
use crate::support::{InjectedFault, TestWorld};

pub(crate) fn cases() -> Vec<StopCase> {
    [
        tool_cases(),
        timeout_cases(),
        cancellation_cases(),
        result_cases(),
        conflict_cases(),
        store_cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn tool_cases() -> Vec<StopCase> {
    vec![
        ("a handler that fails", plain_world(), acts!("fail"), expect_unknown("no_stock")),
        (
            "a handler that proves it did nothing",
            plain_world(),
            acts!("refuse"),
            ExpectedStop { ran: 1, ..expect_refused("no_stock", Gate::Run) },
        ),
        ("a lost connection", plain_world(), acts!("io"), expect_unknown("upstream_unavailable")),
        (
            "an HTTP error of the service",
            plain_world(),
            acts!("http"),
            expect_unknown("upstream_unavailable"),
        ),
        ("a handler that panics", plain_world(), acts!("panic"), expect_unknown("tool_panicked")),
        (
            "a failure of a local tool",
            TestWorld::with_act(Tool::local),
            acts!("fail"),
            ExpectedStop {
                effects: CallEffects::RolledBack,
                ran: 1,
                ..expect_refused("no_stock", Gate::Run)
            },
        ),
        (
            "a tool that only the client can run",
            TestWorld::new(|a| a.tool(Tool::external("bash", "Run by the client.", None).open())),
            step!(w => w.session.call("bash", json!({})).await),
            expect_refused("no_handler", Gate::Run),
        ),
    ]
}

fn timeout_cases() -> Vec<StopCase> {
    vec![
        ("a handler that takes too long", plain_world(), acts!("hang"), expect_unknown("timeout")),
        (
            "a deadline that passes during the run",
            world_with_long_timeout(),
            step!(w => w.gate.call(w.session.prepare("act", json!({"how": "hang"})).timeout(Duration::from_secs(2))).await),
            expect_unknown("deadline_exceeded"),
        ),
        (
            "a session whose time ends during the run",
            TestWorld::new(|a| {
                let session =
                    Budget { wall: Some(Duration::from_millis(150)), ..Budget::default() };
                a.limits(Limits { session, ..Limits::default() })
            }),
            acts!("hang"),
            expect_unknown("deadline_exceeded"),
        ),
        (
            "a handler that stops sending heartbeats",
            TestWorld::with_act(|act| {
                act.timeout(Duration::from_secs(60)).heartbeat(Duration::from_secs(1))
            }),
            step!(w => {
                let answer = call_act(w, "beat, then stop").await;
                let stopped = w.session.state().await.unwrap().log("beats").count();
                assert_eq!(stopped, 1, "the call ended while it sent heartbeats: {answer:?}");
                let message = answer.outcome.error().map(|error| error.message.clone());
                assert_eq!(message.as_deref(), Some("`act` sent no heartbeat for 1s"));
                answer
            }),
            expect_unknown("heartbeat_missed"),
        ),
    ]
}

fn cancellation_cases() -> Vec<StopCase> {
    vec![
        (
            "a call that is cancelled",
            world_with_long_timeout(),
            step!(w => {
                let token = CancellationToken::new();
                let call = start_call(w, w.session.prepare("act", json!({"how": "hang"})).cancelled_by(token.clone())).await;
                token.cancel();
                call.await.unwrap()
            }),
            expect_unknown("cancelled"),
        ),
        (
            "a caller that disconnects",
            world_with_long_timeout(),
            step!(w => { abort_call(w, "hang").await; StopOutcome { answer: None, baseline: None } }),
            expect_unknown("cancelled"),
        ),
        (
            "a caller that disconnects during a read",
            world_with_concurrent_act(),
            step!(w => { abort_call(w, "read and wait").await; StopOutcome { answer: None, baseline: None } }),
            ExpectedStop { ran: 1, ..expect_refused("cancelled", Gate::Run) },
        ),
    ]
}

fn result_cases() -> Vec<StopCase> {
    let post = CommandHook::new("post", "/bin/sh").arg("-c").arg("exit 2").after();
    let with_policy_fault = |fault| TestWorld::new(|a| a.policy(FaultInjectingPolicy(fault)));
    let dated = TestWorld::with_act(|act| act.normalize(Normal::timestamp("/at")));
    vec![
        (
            "a result that violates its schema",
            plain_world(),
            acts!("junk"),
            expect_withheld("invalid_result"),
        ),
        (
            "a result that cannot be normalized",
            dated,
            acts!("dated"),
            expect_withheld("invalid_result"),
        ),
        (
            "a hook that fails after the tool",
            world_with_hook("after-fault"),
            acts!("ok"),
            expect_withheld("hook_failed"),
        ),
        (
            "a hook that panics after the tool",
            world_with_hook("after-panic"),
            acts!("ok"),
            expect_withheld("hook_failed"),
        ),
        (
            "a hook that hangs after the tool",
            world_with_hook("after-hang"),
            acts!("ok"),
            expect_withheld("hook_failed"),
        ),
        (
            "a program that fails after the tool",
            TestWorld::new(|a| a.hook(post)),
            acts!("ok"),
            expect_withheld("hook_failed"),
        ),
        (
            "a policy that cannot record the result",
            with_policy_fault("result-fault"),
            acts!("ok"),
            expect_withheld("policy_fault"),
        ),
        (
            "a policy that panics at the result",
            with_policy_fault("result-panic"),
            acts!("ok"),
            expect_withheld("policy_fault"),
        ),
    ]
}

fn conflict_cases() -> Vec<StopCase> {
    vec![
        (
            "the second of two concurrent writers",
            world_with_concurrent_act(),
            step!(w => {
                let second = start_call(w, w.session.prepare("act", json!({"how": "read and wait"}))).await;
                let first = call_act(w, "read").await;
                assert!(first.outcome.success().is_some(), "{first:?}");
                // The second writer must not change the state that the first writer left.
                let baseline = WorldBaseline::capture(w).await;
                w.go.add_permits(1);
                (baseline, second.await.unwrap())
            }),
            // The meter counts the call of the first writer.
            ExpectedStop { ran: 2, metered: 1, ..expect_refused("conflict", Gate::Settle) },
        ),
        (
            "a conflicting writer with files and a claim",
            plain_world(),
            step!(w => { w.store.inject_faults(&[InjectedFault::CommitConflicts]); call_act(w, "ok").await }),
            ExpectedStop { gate: Gate::Settle, ..expect_withheld("conflict") },
        ),
        (
            "a conflicting writer with a local tool",
            TestWorld::with_act(Tool::local),
            step!(w => { w.store.inject_faults(&[InjectedFault::CommitConflicts]); call_act(w, "ok").await }),
            ExpectedStop {
                effects: CallEffects::RolledBack,
                ran: 1,
                ..expect_refused("conflict", Gate::Settle)
            },
        ),
    ]
}

fn store_cases() -> Vec<StopCase> {
    vec![
        (
            "a store that is unavailable at commit",
            plain_world(),
            step!(w => { w.store.inject_faults(&[InjectedFault::Commit]); call_act(w, "ok").await }),
            ExpectedStop {
                gate: Gate::Record,
                spooled: true,
                ..expect_withheld("store_unavailable")
            },
        ),
        (
            "a store that is unavailable at commit of a failure",
            plain_world(),
            step!(w => { w.store.inject_faults(&[InjectedFault::Commit]); call_act(w, "fail").await }),
            ExpectedStop {
                gate: Gate::Record,
                spooled: true,
                ..expect_unknown("store_unavailable")
            },
        ),
        (
            "a store that is unavailable for a refusal",
            plain_world(),
            step!(w => { w.store.inject_faults(&[InjectedFault::Commit]); w.session.call("acts", json!({})).await }),
            ExpectedStop { spooled: true, ..expect_refused("store_unavailable", Gate::Record) },
        ),
        (
            "a store that is unavailable from the start",
            plain_world(),
            step!(w => { w.store.inject_faults(&[InjectedFault::Paused, InjectedFault::Commit]); call_act(w, "ok").await }),
            ExpectedStop { spooled: true, ..expect_refused("store_unavailable", Gate::Record) },
        ),
        (
            "a call whose task panics at commit",
            plain_world(),
            step!(w => { w.store.inject_faults(&[InjectedFault::CommitPanics]); call_act(w, "ok").await }),
            ExpectedStop { gate: Gate::Admit, ..expect_unknown("internal_fault") },
        ),
    ]
}
