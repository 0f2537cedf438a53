//! Lists calls that stop in gates 1 to 10, before the tool starts.

use std::time::Duration;

use jiff::SignedDuration;
use serde_json::json;
use toolgate::hook::CommandHook;
use toolgate::limits::{Budget, Charge, Limits, RateLimit};
use toolgate::policy::{Obligations, PolicyError, Sequence, Verdict};
use toolgate::store::{LeaseRequest, PauseTarget};
use toolgate::{Call, CallEffects, ErrorCategory, Gate, SessionKey, Store, Tool, ToolError};

use super::{
    ExpectedStop, StopCase, StopOutcome, StopStep, WorldBaseline, call_act, expect_refused,
};
use crate::call_outcomes::faulty_collaborators::{
    FaultInjectingPolicy, plain_world, world_with_hook, world_with_policy, world_with_script,
    world_with_script_timeout,
};
use crate::support::{InjectedFault, TestWorld};

pub(crate) fn cases() -> Vec<StopCase> {
    [
        admission_cases(),
        resolve_and_validate_cases(),
        recall_cases(),
        limit_cases(),
        hook_cases(),
        policy_cases(),
        claim_cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn admission_cases() -> Vec<StopCase> {
    vec![
        (
            "an unknown agent",
            plain_world(),
            step!(w => w.gate.call(Call::new(SessionKey::new("unknown_agent", "alice", "s"), "act", json!({"how": "ok"}))).await),
            expect_refused("forbidden", Gate::Admit),
        ),
        (
            "a principal without access",
            TestWorld::new(|a| a.principals(["alice"])),
            step!(w => w.gate.call(Call::new(SessionKey::new("agent", "mallory", "s"), "act", json!({"how": "ok"}))).await),
            expect_refused("forbidden", Gate::Admit),
        ),
        (
            "a call that its entry point rejects",
            plain_world(),
            step!(w => w.gate.call(Call::new(w.session.key().clone(), "act", json!({"how": "ok"})).with_transport_rejection("not with this token")).await),
            expect_refused("forbidden", Gate::Admit),
        ),
        (
            "a request that its entry point cannot parse",
            plain_world(),
            step!(w => w.gate.call(Call::new(w.session.key().clone(), "act", json!({"how": "ok"})).with_parse_error("`turn` is not a number")).await),
            expect_refused("invalid_request", Gate::Admit),
        ),
        (
            "a paused agent",
            plain_world(),
            step!(w => { w.gate.pause(PauseTarget::Agent("agent".into()), "incident").await.unwrap(); call_act(w, "ok").await }),
            expect_refused("paused", Gate::Admit),
        ),
        (
            "a paused tool",
            plain_world(),
            step!(w => { w.gate.pause(PauseTarget::Tool("act".into()), "incident").await.unwrap(); call_act(w, "ok").await }),
            expect_refused("paused", Gate::Admit),
        ),
        (
            "a paused principal",
            plain_world(),
            step!(w => { w.gate.pause(PauseTarget::Principal("alice".into()), "incident").await.unwrap(); call_act(w, "ok").await }),
            expect_refused("paused", Gate::Admit),
        ),
        (
            "a paused session",
            plain_world(),
            step!(w => { w.gate.pause(PauseTarget::Session(w.session.key().clone()), "incident").await.unwrap(); call_act(w, "ok").await }),
            expect_refused("paused", Gate::Admit),
        ),
        (
            "too many bytes",
            plain_world(),
            step!(w => w.session.call("act", format!(r#"{{"how": "{}"}}"#, "x".repeat(2 << 20))).await),
            expect_refused("payload_too_large", Gate::Admit),
        ),
        (
            "too deep",
            plain_world(),
            step!(w => w.session.call("act", "[".repeat(1_000)).await),
            expect_refused("payload_too_large", Gate::Admit),
        ),
        (
            "a store that is unavailable at admission",
            plain_world(),
            step!(w => { w.store.inject_faults(&[InjectedFault::Paused]); call_act(w, "ok").await }),
            expect_refused("store_unavailable", Gate::Admit),
        ),
    ]
}

fn resolve_and_validate_cases() -> Vec<StopCase> {
    let hidden = || {
        Tool::dynamic("hidden", "For Bob.", json!({"type": "object"}), |_, args| async { Ok(args) })
    };
    vec![
        (
            "an invented tool",
            plain_world(),
            step!(w => w.session.call("acts", json!({})).await),
            expect_refused("unknown_tool", Gate::Resolve),
        ),
        (
            "a tool that others see",
            TestWorld::new(|a| a.tool(hidden().open().visible_to(["bob"]))),
            step!(w => w.session.call("hidden", json!({})).await),
            expect_refused("unknown_tool", Gate::Resolve),
        ),
        (
            "a missing argument",
            plain_world(),
            step!(w => w.session.call("act", json!({})).await),
            expect_refused("invalid_arguments", Gate::Validate),
        ),
        (
            "a wrong type",
            plain_world(),
            step!(w => w.session.call("act", json!({"how": "ok", "n": "one"})).await),
            expect_refused("invalid_arguments", Gate::Validate),
        ),
        (
            "an unknown argument",
            plain_world(),
            step!(w => w.session.call("act", json!({"how": "ok", "m": 1})).await),
            expect_refused("invalid_arguments", Gate::Validate),
        ),
        (
            "a duplicate key",
            plain_world(),
            step!(w => w.session.call("act", r#"{"how": "ok", "how": "fail"}"#).await),
            expect_refused("invalid_arguments", Gate::Validate),
        ),
        (
            "invalid JSON",
            plain_world(),
            step!(w => w.session.call("act", "{how: ok}").await),
            expect_refused("invalid_arguments", Gate::Validate),
        ),
    ]
}

fn recall_cases() -> Vec<StopCase> {
    vec![
        (
            "a key with other arguments",
            plain_world(),
            step!(w => {
                w.gate.call(w.session.prepare("act", json!({"how": "ok", "n": 1})).idempotency_key("k")).await;
                let baseline = WorldBaseline::capture(w).await;
                (baseline, w.gate.call(w.session.prepare("act", json!({"how": "ok", "n": 2})).idempotency_key("k")).await)
            }),
            ExpectedStop { ran: 1, metered: 1, ..expect_refused("key_reused", Gate::Recall) },
        ),
        (
            "a key whose first run has an unknown outcome",
            plain_world(),
            step!(w => {
                w.gate.call(w.session.prepare("act", json!({"how": "fail"})).idempotency_key("k")).await;
                let baseline = WorldBaseline::capture(w).await;
                (baseline, w.gate.call(w.session.prepare("act", json!({"how": "fail"})).idempotency_key("k")).await)
            }),
            ExpectedStop {
                effects: CallEffects::Unknown,
                ran: 1,
                metered: 1,
                pending: 1,
                ..expect_refused("pending_reconciliation", Gate::Recall)
            },
        ),
        (
            "a store that cannot open the session",
            plain_world(),
            step!(w => { w.store.inject_faults(&[InjectedFault::Enter]); call_act(w, "ok").await }),
            expect_refused("store_unavailable", Gate::Recall),
        ),
        (
            "the third identical call",
            plain_world(),
            step!(w => {
                for _ in 0..2 { call_act(w, "refuse").await; }
                let baseline = WorldBaseline::capture(w).await;
                (baseline, call_act(w, "refuse").await)
            }),
            ExpectedStop { ran: 2, ..expect_refused("loop_detected", Gate::Progress) },
        ),
    ]
}

fn limit_cases() -> Vec<StopCase> {
    let session = |budget| Limits { session: budget, ..Limits::default() };
    vec![
        (
            "a budget of calls",
            TestWorld::new(|a| a.limits(session(Budget { calls: Some(0), ..Budget::default() }))),
            acts!("ok"),
            expect_refused("budget_exhausted", Gate::Limits),
        ),
        (
            "a deadline that has passed",
            plain_world(),
            step!(w => w.gate.call(w.session.prepare("act", json!({"how": "ok"})).timeout(Duration::ZERO)).await),
            expect_refused("deadline_exceeded", Gate::Limits),
        ),
        (
            "a session that is too old",
            TestWorld::new(|a| {
                a.limits(session(Budget {
                    wall: Some(Duration::from_secs(60)),
                    ..Budget::default()
                }))
            }),
            step!(w => {
                w.session.call("look", json!({})).await;
                w.advance(SignedDuration::from_secs(61));
                let baseline = WorldBaseline::capture(w).await;
                (baseline, call_act(w, "ok").await)
            }),
            expect_refused("deadline_exceeded", Gate::Limits),
        ),
        (
            "a rate",
            TestWorld::new(|a| {
                a.limits(Limits {
                    rate: Some(RateLimit { calls: 0, per: Duration::from_secs(1) }),
                    ..Limits::default()
                })
            }),
            acts!("ok"),
            expect_refused("rate_limited", Gate::Limits),
        ),
    ]
}

fn hook_cases() -> Vec<StopCase> {
    let missing_program = CommandHook::new("missing", "/nonexistent/hook").before();
    let unknown_decision = world_with_script(r#"echo '{"decision": "perhaps"}'"#);
    vec![
        (
            "a hook that denies",
            world_with_hook("deny"),
            acts!("ok"),
            expect_refused("hook_denied", Gate::Hooks),
        ),
        (
            "a hook that fails",
            world_with_hook("fault"),
            acts!("ok"),
            expect_refused("hook_failed", Gate::Hooks),
        ),
        (
            "a hook that panics",
            world_with_hook("panic"),
            acts!("ok"),
            expect_refused("hook_failed", Gate::Hooks),
        ),
        (
            "a hook that hangs",
            world_with_hook("hang"),
            acts!("ok"),
            expect_refused("hook_failed", Gate::Hooks),
        ),
        (
            "a hook that rewrites to invalid arguments",
            world_with_hook("rewrite"),
            acts!("ok"),
            expect_refused("hook_failed", Gate::Hooks),
        ),
        (
            "a program that denies",
            world_with_script("echo no >&2; exit 2"),
            acts!("ok"),
            expect_refused("hook_denied", Gate::Hooks),
        ),
        (
            "a program that crashes",
            world_with_script("exit 1"),
            acts!("ok"),
            expect_refused("hook_failed", Gate::Hooks),
        ),
        (
            "a program that is killed",
            world_with_script("kill -9 $$"),
            acts!("ok"),
            expect_refused("hook_failed", Gate::Hooks),
        ),
        (
            "a program that hangs",
            world_with_script_timeout(1, "sleep 60"),
            acts!("ok"),
            expect_refused("hook_failed", Gate::Hooks),
        ),
        (
            "a program that prints invalid JSON",
            world_with_script("echo fine by me"),
            acts!("ok"),
            expect_refused("hook_failed", Gate::Hooks),
        ),
        (
            "a program that prints an unknown decision",
            unknown_decision,
            acts!("ok"),
            expect_refused("hook_failed", Gate::Hooks),
        ),
        (
            "a program that does not exist",
            TestWorld::new(|a| a.hook(missing_program)),
            acts!("ok"),
            expect_refused("hook_failed", Gate::Hooks),
        ),
    ]
}

fn policy_cases() -> Vec<StopCase> {
    let with_policy_fault = |fault| TestWorld::new(|a| a.policy(FaultInjectingPolicy(fault)));
    vec![
        (
            "a policy that denies",
            world_with_policy(|_| {
                Ok(Verdict::deny(ToolError::new(ErrorCategory::Business, "cap", "too much")))
            }),
            acts!("ok"),
            expect_refused("cap", Gate::Policy),
        ),
        (
            "a policy that cannot decide",
            world_with_policy(|_| Err(PolicyError::new("no data"))),
            acts!("ok"),
            expect_refused("policy_fault", Gate::Policy),
        ),
        (
            "a policy that panics",
            world_with_policy(|_| panic!("a policy has a fault")),
            acts!("ok"),
            expect_refused("policy_fault", Gate::Policy),
        ),
        (
            "a policy that panics in `request_facts`",
            with_policy_fault("needs"),
            acts!("ok"),
            expect_refused("policy_fault", Gate::Policy),
        ),
        (
            "a policy that reads facts that it did not request",
            with_policy_fault("undeclared"),
            acts!("ok"),
            expect_refused("policy_fault", Gate::Policy),
        ),
        (
            "a store that cannot load facts",
            TestWorld::new(|a| a.policy(Sequence::new("seq").after("act", ["look"]))),
            step!(w => { w.store.inject_faults(&[InjectedFault::Load]); call_act(w, "ok").await }),
            expect_refused("store_unavailable", Gate::Policy),
        ),
        (
            "a policy that asks",
            world_with_policy(|_| Ok(Verdict::ask("over 100"))),
            acts!("ok"),
            expect_refused("approval_required", Gate::Approval),
        ),
        (
            "a hook that asks",
            world_with_hook("ask"),
            acts!("ok"),
            expect_refused("approval_required", Gate::Approval),
        ),
        (
            "a person that denies",
            world_with_policy(|_| Ok(Verdict::ask("over 100"))),
            step!(w => {
                let first = call_act(w, "ok").await;
                let id = first.outcome.error().unwrap().approval.clone().unwrap().id;
                assert!(w.gate.answer_approval(&id, false, "bob").await.unwrap());
                let baseline = WorldBaseline::capture(w).await;
                (baseline, call_act(w, "ok").await)
            }),
            expect_refused("approval_denied", Gate::Approval),
        ),
    ]
}

fn claim_cases() -> Vec<StopCase> {
    vec![
        (
            "a limit that is full",
            world_with_policy(|_| {
                let full = Charge {
                    counter: "full".into(),
                    amount: 2.into(),
                    cap: 1.into(),
                    window: None,
                    unit: Default::default(),
                };
                let error = ToolError::new(ErrorCategory::Business, "daily_sum", "too much today");
                Ok(Verdict::Allow(Obligations {
                    charges: vec![(full, error)],
                    ..Obligations::default()
                }))
            }),
            acts!("ok"),
            expect_refused("daily_sum", Gate::Claim),
        ),
        (
            "a session that another call holds",
            TestWorld::with_builder(|a| a, |g| g.busy_timeout(Duration::from_millis(20))),
            step!(w => {
                let term = SignedDuration::from_mins(1);
                let request = LeaseRequest { is_exclusive: true, timeout: Duration::ZERO, term };
                let _lease = w.store.lease_session(w.session.key(), request).await.unwrap().unwrap();
                call_act(w, "ok").await
            }),
            expect_refused("busy", Gate::Claim),
        ),
        (
            "a store that is unavailable at the claim",
            plain_world(),
            step!(w => { w.store.inject_faults(&[InjectedFault::Claim]); call_act(w, "ok").await }),
            expect_refused("store_unavailable", Gate::Claim),
        ),
        (
            "a call whose task panics at the claim",
            plain_world(),
            step!(w => { w.store.inject_faults(&[InjectedFault::ClaimPanics]); call_act(w, "ok").await }),
            ExpectedStop {
                effects: CallEffects::Unknown,
                ..expect_refused("internal_fault", Gate::Admit)
            },
        ),
    ]
}
