//! Gates 11 to 14: the tool has begun, or is about to.

use std::time::Duration;

use serde_json::json;
use tokio_util::sync::CancellationToken;
use toolgate::hook::CommandHook;
use toolgate::limits::{Budget, Limits};
use toolgate::normalize::Rule as Normal;
use toolgate::{Effects, Gate, Tool};

use super::worlds::{Deaf, hang_up, hooked, patient, plain, shared, under_way};
use super::{Before, Case, Expected, Step, Stopped, act, refused, unknown, withheld};
use crate::support::{Fails, World};

pub(super) fn cases() -> Vec<Case> {
    [by_the_tool(), by_the_clock(), by_the_caller(), by_its_result(), by_another_writer(), by_the_store()].into_iter().flatten().collect()
}

fn by_the_tool() -> Vec<Case> {
    vec![
        ("a handler that fails", plain(), acts!("fail"), unknown("no_stock")),
        ("a handler that proves it did nothing", plain(), acts!("refuse"), Expected { ran: 1, ..refused("no_stock", Gate::Run) }),
        ("a lost connection", plain(), acts!("io"), unknown("upstream_unavailable")),
        ("a status of the service behind", plain(), acts!("http"), unknown("upstream_unavailable")),
        ("a handler that panics", plain(), acts!("panic"), unknown("tool_panicked")),
        (
            "a failure of a tool that only acts here",
            World::whose_act(Tool::local),
            acts!("fail"),
            Expected { effects: Effects::RolledBack, ran: 1, ..refused("no_stock", Gate::Run) },
        ),
        (
            "a tool that only the client can run",
            World::new(|a| a.tool(Tool::external("bash", "Run by the client.", None).open())),
            step!(w => w.session.call("bash", json!({})).await),
            refused("no_handler", Gate::Run),
        ),
    ]
}

fn by_the_clock() -> Vec<Case> {
    vec![
        ("a handler that takes too long", plain(), acts!("hang"), unknown("timeout")),
        (
            "a deadline that passes meanwhile",
            patient(),
            step!(w => w.gate.call(w.session.prepare("act", json!({"how": "hang"})).timeout(Duration::from_secs(2))).await),
            unknown("deadline_exceeded"),
        ),
        (
            "a session whose time is up meanwhile",
            World::new(|a| {
                let session = Budget { wall: Some(Duration::from_millis(150)), ..Budget::default() };
                a.limits(Limits { session, ..Limits::default() })
            }),
            acts!("hang"),
            unknown("deadline_exceeded"),
        ),
        (
            "a handler that gave signs of life, and gives none any more",
            World::whose_act(|act| act.timeout(Duration::from_secs(60)).heartbeat(Duration::from_secs(1))),
            step!(w => {
                let answer = act(w, "beat, then stop").await;
                let stopped = w.session.state().await.unwrap().log("beats").count();
                assert_eq!(stopped, 1, "it was ended while it gave signs of life: {answer:?}");
                let said = answer.outcome.error().map(|error| error.message.clone());
                assert_eq!(said.as_deref(), Some("`act` sent no heartbeat for 1s"));
                answer
            }),
            unknown("heartbeat_missed"),
        ),
    ]
}

fn by_the_caller() -> Vec<Case> {
    vec![
        (
            "a call that is cancelled",
            patient(),
            step!(w => {
                let token = CancellationToken::new();
                let call = under_way(w, w.session.prepare("act", json!({"how": "hang"})).cancelled_by(token.clone())).await;
                token.cancel();
                call.await.unwrap()
            }),
            unknown("cancelled"),
        ),
        (
            "a caller who hangs up",
            patient(),
            step!(w => { hang_up(w, "hang").await; Stopped { heard: None, since: None } }),
            unknown("cancelled"),
        ),
        (
            "a caller who hangs up on a read",
            shared(),
            step!(w => { hang_up(w, "read and wait").await; Stopped { heard: None, since: None } }),
            Expected { ran: 1, ..refused("cancelled", Gate::Run) },
        ),
    ]
}

fn by_its_result() -> Vec<Case> {
    let post = CommandHook::new("post", "/bin/sh").arg("-c").arg("exit 2").after();
    let deaf = |how| World::new(|a| a.policy(Deaf(how)));
    let dated = World::whose_act(|act| act.normalize(Normal::timestamp("/at")));
    vec![
        ("a result of another shape", plain(), acts!("junk"), withheld("invalid_result")),
        ("a result that cannot be normalised", dated, acts!("dated"), withheld("invalid_result")),
        ("a hook that fails after the tool", hooked("after-fault"), acts!("ok"), withheld("hook_failed")),
        ("a hook that panics after the tool", hooked("after-panic"), acts!("ok"), withheld("hook_failed")),
        ("a hook that hangs after the tool", hooked("after-hang"), acts!("ok"), withheld("hook_failed")),
        ("a program that fails after the tool", World::new(|a| a.hook(post)), acts!("ok"), withheld("hook_failed")),
        ("a policy that cannot take note", deaf("result-fault"), acts!("ok"), withheld("policy_fault")),
        ("a policy that panics at the result", deaf("result-panic"), acts!("ok"), withheld("policy_fault")),
    ]
}

fn by_another_writer() -> Vec<Case> {
    vec![
        (
            "of two writers, the one who comes second",
            shared(),
            step!(w => {
                let second = under_way(w, w.session.prepare("act", json!({"how": "read and wait"}))).await;
                let first = act(w, "read").await;
                assert!(first.outcome.success().is_some(), "{first:?}");
                // What the first has written is what the second must leave alone.
                let since = Before::now(w).await;
                w.go.add_permits(1);
                (since, second.await.unwrap())
            }),
            // The meter counts the first.
            Expected { ran: 2, metered: 1, ..refused("conflict", Gate::Settle) },
        ),
        (
            "a writer with files and a claim, who comes second",
            plain(),
            step!(w => { w.store.fail(&[Fails::FinishConflicts]); act(w, "ok").await }),
            Expected { gate: Gate::Settle, ..withheld("conflict") },
        ),
        (
            "a writer who only acts here, and comes second",
            World::whose_act(Tool::local),
            step!(w => { w.store.fail(&[Fails::FinishConflicts]); act(w, "ok").await }),
            Expected { effects: Effects::RolledBack, ran: 1, ..refused("conflict", Gate::Settle) },
        ),
    ]
}

fn by_the_store() -> Vec<Case> {
    vec![
        (
            "a store that is away at the end",
            plain(),
            step!(w => { w.store.fail(&[Fails::Finish]); act(w, "ok").await }),
            Expected { gate: Gate::Record, spooled: true, ..withheld("store_unavailable") },
        ),
        (
            "a store that is away at the end of a failure",
            plain(),
            step!(w => { w.store.fail(&[Fails::Finish]); act(w, "fail").await }),
            Expected { gate: Gate::Record, spooled: true, ..unknown("store_unavailable") },
        ),
        (
            "a store that is away for a refusal",
            plain(),
            step!(w => { w.store.fail(&[Fails::Finish]); w.session.call("acts", json!({})).await }),
            Expected { spooled: true, ..refused("store_unavailable", Gate::Record) },
        ),
        (
            "a store that is away altogether",
            plain(),
            step!(w => { w.store.fail(&[Fails::Paused, Fails::Finish]); act(w, "ok").await }),
            Expected { spooled: true, ..refused("store_unavailable", Gate::Record) },
        ),
        (
            "a call whose own task dies at its end",
            plain(),
            step!(w => { w.store.fail(&[Fails::FinishDies]); act(w, "ok").await }),
            Expected { gate: Gate::Admit, ..unknown("internal_fault") },
        ),
    ]
}
