//! Gates 1 to 10: the tool does not begin.

use std::time::Duration;

use jiff::SignedDuration;
use serde_json::json;
use toolgate::hook::CommandHook;
use toolgate::limits::{Budget, Charge, Limits, Rate};
use toolgate::policy::{Fault, Sequence, Terms, Verdict};
use toolgate::store::Target;
use toolgate::{Call, Category, Effects, Gate, SessionKey, Store, Tool, ToolError};

use super::worlds::{Deaf, hooked, plain, ruled, scripted, scripted_for};
use super::{Before, Case, Expected, Step, Stopped, act, refused};
use crate::support::{Fails, World};

pub(super) fn cases() -> Vec<Case> {
    [at_the_door(), before_it_is_judged(), made_before(), over_limits(), by_hooks(), by_rules(), at_the_claim()]
        .into_iter()
        .flatten()
        .collect()
}

fn at_the_door() -> Vec<Case> {
    vec![
        (
            "an agent nobody knows",
            plain(),
            step!(w => w.gate.call(Call::new(SessionKey::new("nobody", "alice", "s"), "act", json!({"how": "ok"}))).await),
            refused("forbidden", Gate::Admit),
        ),
        (
            "a principal who may not",
            World::new(|a| a.principals(["alice"])),
            step!(w => w.gate.call(Call::new(SessionKey::new("agent", "mallory", "s"), "act", json!({"how": "ok"}))).await),
            refused("forbidden", Gate::Admit),
        ),
        (
            "a call that its door has something against",
            plain(),
            step!(w => w.gate.call(Call::new(w.session.key().clone(), "act", json!({"how": "ok"})).with_transport_rejection("not with this token")).await),
            refused("forbidden", Gate::Admit),
        ),
        (
            "a request that its door cannot understand",
            plain(),
            step!(w => w.gate.call(Call::new(w.session.key().clone(), "act", json!({"how": "ok"})).with_parse_error("`turn` is no number")).await),
            refused("invalid_request", Gate::Admit),
        ),
        (
            "a paused agent",
            plain(),
            step!(w => { w.gate.pause(Target::Agent("agent".into()), "incident").await.unwrap(); act(w, "ok").await }),
            refused("paused", Gate::Admit),
        ),
        (
            "a paused tool",
            plain(),
            step!(w => { w.gate.pause(Target::Tool("act".into()), "incident").await.unwrap(); act(w, "ok").await }),
            refused("paused", Gate::Admit),
        ),
        (
            "a paused principal",
            plain(),
            step!(w => { w.gate.pause(Target::Principal("alice".into()), "incident").await.unwrap(); act(w, "ok").await }),
            refused("paused", Gate::Admit),
        ),
        (
            "a paused session",
            plain(),
            step!(w => { w.gate.pause(Target::Session(w.session.key().clone()), "incident").await.unwrap(); act(w, "ok").await }),
            refused("paused", Gate::Admit),
        ),
        (
            "too many bytes",
            plain(),
            step!(w => w.session.call("act", format!(r#"{{"how": "{}"}}"#, "x".repeat(2 << 20))).await),
            refused("payload_too_large", Gate::Admit),
        ),
        ("too deep", plain(), step!(w => w.session.call("act", "[".repeat(1_000)).await), refused("payload_too_large", Gate::Admit)),
        (
            "a store that is away at the door",
            plain(),
            step!(w => { w.store.fail(&[Fails::Paused]); act(w, "ok").await }),
            refused("store_unavailable", Gate::Admit),
        ),
    ]
}

fn before_it_is_judged() -> Vec<Case> {
    let hidden = || Tool::dynamic("hidden", "For Bob.", json!({"type": "object"}), |_, args| async { Ok(args) });
    vec![
        ("an invented tool", plain(), step!(w => w.session.call("acts", json!({})).await), refused("unknown_tool", Gate::Resolve)),
        (
            "a tool that others see",
            World::new(|a| a.tool(hidden().open().visible_to(["bob"]))),
            step!(w => w.session.call("hidden", json!({})).await),
            refused("unknown_tool", Gate::Resolve),
        ),
        ("a missing argument", plain(), step!(w => w.session.call("act", json!({})).await), refused("invalid_arguments", Gate::Validate)),
        (
            "a wrong type",
            plain(),
            step!(w => w.session.call("act", json!({"how": "ok", "n": "one"})).await),
            refused("invalid_arguments", Gate::Validate),
        ),
        (
            "an unknown argument",
            plain(),
            step!(w => w.session.call("act", json!({"how": "ok", "m": 1})).await),
            refused("invalid_arguments", Gate::Validate),
        ),
        (
            "a duplicate key",
            plain(),
            step!(w => w.session.call("act", r#"{"how": "ok", "how": "fail"}"#).await),
            refused("invalid_arguments", Gate::Validate),
        ),
        ("no JSON at all", plain(), step!(w => w.session.call("act", "{how: ok}").await), refused("invalid_arguments", Gate::Validate)),
    ]
}

fn made_before() -> Vec<Case> {
    vec![
        (
            "a key with other arguments",
            plain(),
            step!(w => {
                w.gate.call(w.session.prepare("act", json!({"how": "ok", "n": 1})).idempotency_key("k")).await;
                let since = Before::now(w).await;
                (since, w.gate.call(w.session.prepare("act", json!({"how": "ok", "n": 2})).idempotency_key("k")).await)
            }),
            Expected { ran: 1, metered: 1, ..refused("key_reused", Gate::Recall) },
        ),
        (
            "a key whose first run nobody knows the end of",
            plain(),
            step!(w => {
                w.gate.call(w.session.prepare("act", json!({"how": "fail"})).idempotency_key("k")).await;
                let since = Before::now(w).await;
                (since, w.gate.call(w.session.prepare("act", json!({"how": "fail"})).idempotency_key("k")).await)
            }),
            Expected { effects: Effects::Unknown, ran: 1, metered: 1, pending: 1, ..refused("pending_reconciliation", Gate::Recall) },
        ),
        (
            "a store that is away at the session",
            plain(),
            step!(w => { w.store.fail(&[Fails::Enter]); act(w, "ok").await }),
            refused("store_unavailable", Gate::Recall),
        ),
        (
            "the third identical call",
            plain(),
            step!(w => {
                for _ in 0..2 { act(w, "refuse").await; }
                let since = Before::now(w).await;
                (since, act(w, "refuse").await)
            }),
            Expected { ran: 2, ..refused("loop_detected", Gate::Progress) },
        ),
    ]
}

fn over_limits() -> Vec<Case> {
    let session = |budget| Limits { session: budget, ..Limits::default() };
    vec![
        (
            "a budget of calls",
            World::new(|a| a.limits(session(Budget { calls: Some(0), ..Budget::default() }))),
            acts!("ok"),
            refused("budget_exhausted", Gate::Limits),
        ),
        (
            "a deadline that has passed",
            plain(),
            step!(w => w.gate.call(w.session.prepare("act", json!({"how": "ok"})).timeout(Duration::ZERO)).await),
            refused("deadline_exceeded", Gate::Limits),
        ),
        (
            "a session that is too old",
            World::new(|a| a.limits(session(Budget { wall: Some(Duration::from_secs(60)), ..Budget::default() }))),
            step!(w => {
                w.session.call("look", json!({})).await;
                w.advance(SignedDuration::from_secs(61));
                let since = Before::now(w).await;
                (since, act(w, "ok").await)
            }),
            refused("deadline_exceeded", Gate::Limits),
        ),
        (
            "a rate",
            World::new(|a| a.limits(Limits { rate: Some(Rate { calls: 0, per: Duration::from_secs(1) }), ..Limits::default() })),
            acts!("ok"),
            refused("rate_limited", Gate::Limits),
        ),
    ]
}

fn by_hooks() -> Vec<Case> {
    let gone = CommandHook::new("gone", "/nonexistent/hook").before();
    let nonsense = scripted(r#"echo '{"decision": "perhaps"}'"#);
    vec![
        ("a hook that denies", hooked("deny"), acts!("ok"), refused("hook_denied", Gate::Hooks)),
        ("a hook that fails", hooked("fault"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a hook that panics", hooked("panic"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a hook that hangs", hooked("hang"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a hook that rewrites into junk", hooked("rewrite"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a program that denies", scripted("echo no >&2; exit 2"), acts!("ok"), refused("hook_denied", Gate::Hooks)),
        ("a program that crashes", scripted("exit 1"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a program that is killed", scripted("kill -9 $$"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a program that hangs", scripted_for(1, "sleep 60"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a program that prints junk", scripted("echo fine by me"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a program that decides nonsense", nonsense, acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a program that is not there", World::new(|a| a.hook(gone)), acts!("ok"), refused("hook_failed", Gate::Hooks)),
    ]
}

fn by_rules() -> Vec<Case> {
    let deaf = |how| World::new(|a| a.policy(Deaf(how)));
    vec![
        (
            "a policy that denies",
            ruled(|_| Ok(Verdict::deny(ToolError::new(Category::Business, "cap", "too much")))),
            acts!("ok"),
            refused("cap", Gate::Policy),
        ),
        ("a policy that cannot decide", ruled(|_| Err(Fault::new("no data"))), acts!("ok"), refused("policy_fault", Gate::Policy)),
        ("a policy that panics", ruled(|_| panic!("a policy has a fault")), acts!("ok"), refused("policy_fault", Gate::Policy)),
        ("a policy that panics when asked what it needs", deaf("needs"), acts!("ok"), refused("policy_fault", Gate::Policy)),
        ("a policy that looks at what it did not ask for", deaf("undeclared"), acts!("ok"), refused("policy_fault", Gate::Policy)),
        (
            "a store that is away at the facts",
            World::new(|a| a.policy(Sequence::new("seq").after("act", ["look"]))),
            step!(w => { w.store.fail(&[Fails::Load]); act(w, "ok").await }),
            refused("store_unavailable", Gate::Policy),
        ),
        ("a policy that asks", ruled(|_| Ok(Verdict::ask("over 100"))), acts!("ok"), refused("approval_required", Gate::Approval)),
        ("a hook that asks", hooked("ask"), acts!("ok"), refused("approval_required", Gate::Approval)),
        (
            "a person who refuses",
            ruled(|_| Ok(Verdict::ask("over 100"))),
            step!(w => {
                let asked = act(w, "ok").await;
                let id = asked.outcome.error().unwrap().approval.clone().unwrap().id;
                assert!(w.gate.answer_approval(&id, false, "bob").await.unwrap());
                let since = Before::now(w).await;
                (since, act(w, "ok").await)
            }),
            refused("approval_denied", Gate::Approval),
        ),
    ]
}

fn at_the_claim() -> Vec<Case> {
    vec![
        (
            "a limit with no room",
            ruled(|_| {
                let full = Charge { counter: "full".into(), amount: 2.into(), cap: 1.into(), window: None, unit: Default::default() };
                let error = ToolError::new(Category::Business, "daily_sum", "too much today");
                Ok(Verdict::Allow(Terms { charges: vec![(full, error)], ..Terms::default() }))
            }),
            acts!("ok"),
            refused("daily_sum", Gate::Claim),
        ),
        (
            "a session that another call holds",
            World::with(|a| a, |g| g.busy_timeout(Duration::from_millis(20))),
            step!(w => {
                let _other = w.store.hold(w.session.key(), true, Duration::ZERO).await.unwrap().unwrap();
                act(w, "ok").await
            }),
            refused("busy", Gate::Claim),
        ),
        (
            "a store that is away at the claim",
            plain(),
            step!(w => { w.store.fail(&[Fails::Begin]); act(w, "ok").await }),
            refused("store_unavailable", Gate::Claim),
        ),
        (
            "a call whose own task dies at the claim",
            plain(),
            step!(w => { w.store.fail(&[Fails::BeginDies]); act(w, "ok").await }),
            Expected { effects: Effects::Unknown, ..refused("internal_fault", Gate::Admit) },
        ),
    ]
}
