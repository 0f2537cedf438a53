//! Every way a call can stop: one structured error, one row, nothing changed, claims and limits settled by effect.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use jiff::SignedDuration;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use toolgate::hook::{Before, CommandHook, Denial, Hook, HookCall, HookDecision, HookFault};
use toolgate::limits::{Budget, Limits, Rate};
use toolgate::normalize::Rule as Normal;
use toolgate::policy::{Ask, Done, Fault, Needs, Policy, Verdict};
use toolgate::session::Change;
use toolgate::store::Target;
use toolgate::{Answer, Call, Category, Effect, Effects, Gate, Outcome, SessionKey, Tool, ToolError};

use crate::support::{Fails, World, rule};

type Step = for<'a> fn(&'a World) -> Pin<Box<dyn Future<Output = Answer> + Send + 'a>>;

/// What a stopped call leaves: its code, gate, effects, whether the tool ran, what stays reserved and pending.
struct Expected {
    code: &'static str,
    gate: Gate,
    effects: Effects,
    ran: u32,
    metered: u32,
    pending: usize,
    /// Rows that are there besides the one of the stopped call, from getting there.
    before: usize,
    spooled: bool,
}

const fn refused(code: &'static str, gate: Gate) -> Expected {
    Expected { code, gate, effects: Effects::None, ran: 0, metered: 0, pending: 0, before: 0, spooled: false }
}

/// It ran and nobody can say what it did: pending, and the meter stays reserved.
const fn unknown(code: &'static str) -> Expected {
    Expected { code, gate: Gate::Run, effects: Effects::Unknown, ran: 1, metered: 1, pending: 1, before: 0, spooled: false }
}

/// It ran, and its result is withheld.
const fn withheld(code: &'static str) -> Expected {
    Expected { code, gate: Gate::Shape, effects: Effects::Done, ran: 1, metered: 1, pending: 0, before: 0, spooled: false }
}

const fn after(before: usize, expected: Expected) -> Expected {
    Expected { before, ..expected }
}

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
            "deny" => Ok(Before { decision: HookDecision::Deny(Denial::because("not on my watch")), input: None }),
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

struct Deaf(&'static str);

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

fn plain() -> World {
    World::new(|agent| agent)
}

fn hooked(how: &'static str) -> World {
    World::new(|agent| agent.hook(TestHook(how)))
}

fn scripted(script: &'static str) -> World {
    World::new(|agent| agent.hook(CommandHook::new("script", "/bin/sh").arg("-c").arg(script).timeout(Duration::from_millis(300)).before()))
}

fn ruled(check: fn(&Ask<'_>) -> Result<Verdict, Fault>) -> World {
    World::new(|agent| agent.policy(rule("rule", check)))
}

fn act(how: &'static str) -> impl for<'a> Fn(&'a World) -> Pin<Box<dyn Future<Output = Answer> + Send + 'a>> {
    move |world| Box::pin(async move { world.session.call("act", json!({"how": how})).await })
}

macro_rules! step {
    ($world:ident => $body:expr) => {{
        let step: Step = |$world| Box::pin(async move { $body });
        step
    }};
}

macro_rules! acts {
    ($how:literal) => {
        step!(w => act($how)(w).await)
    };
}

fn failing(w: &World, faults: &[Fails]) {
    w.store.fail(faults);
}

#[expect(clippy::too_many_lines, reason = "a table is as long as it is")]
fn cases() -> Vec<(&'static str, World, Step, Expected)> {
    vec![
        // 1 admit
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
            step!(w => w.gate.call(Call::new(w.session.key().clone(), "act", json!({"how": "ok"})).turned_away("not with this token")).await),
            refused("forbidden", Gate::Admit),
        ),
        (
            "a paused agent",
            plain(),
            step!(w => { w.gate.pause(Target::Agent("agent".into()), "incident").await.unwrap(); act("ok")(w).await }),
            refused("paused", Gate::Admit),
        ),
        (
            "a paused tool",
            plain(),
            step!(w => { w.gate.pause(Target::Tool("act".into()), "incident").await.unwrap(); act("ok")(w).await }),
            refused("paused", Gate::Admit),
        ),
        (
            "a paused principal",
            plain(),
            step!(w => { w.gate.pause(Target::Principal("alice".into()), "incident").await.unwrap(); act("ok")(w).await }),
            refused("paused", Gate::Admit),
        ),
        (
            "a paused session",
            plain(),
            step!(w => { w.gate.pause(Target::Session(w.session.key().clone()), "incident").await.unwrap(); act("ok")(w).await }),
            refused("paused", Gate::Admit),
        ),
        (
            "too many bytes",
            plain(),
            step!(w => w.session.call("act", format!(r#"{{"how": "{}"}}"#, "x".repeat(2 << 20))).await),
            refused("payload_too_large", Gate::Admit),
        ),
        ("too deep", plain(), step!(w => w.session.call("act", "[".repeat(1_000)).await), refused("payload_too_large", Gate::Admit)),
        // 2 resolve
        ("an invented tool", plain(), step!(w => w.session.call("acts", json!({})).await), refused("unknown_tool", Gate::Resolve)),
        (
            "a tool that others see",
            World::new(|a| {
                a.tool(
                    Tool::dynamic("hidden", "For Bob.", json!({"type": "object"}), |_, args| async { Ok(args) }).open().visible_to(["bob"]),
                )
            }),
            step!(w => w.session.call("hidden", json!({})).await),
            refused("unknown_tool", Gate::Resolve),
        ),
        // 3 validate
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
        // 4 recall
        (
            "a key with other arguments",
            plain(),
            step!(w => {
                w.gate.call(w.session.prepare("act", json!({"how": "ok", "n": 1})).idempotency_key("k")).await;
                w.ran.store(0, std::sync::atomic::Ordering::SeqCst);
                w.gate.call(w.session.prepare("act", json!({"how": "ok", "n": 2})).idempotency_key("k")).await
            }),
            Expected { metered: 1, ..after(1, refused("key_reused", Gate::Recall)) },
        ),
        (
            "a key whose first run nobody knows the end of",
            plain(),
            step!(w => {
                w.gate.call(w.session.prepare("act", json!({"how": "fail"})).idempotency_key("k")).await;
                w.ran.store(0, std::sync::atomic::Ordering::SeqCst);
                w.gate.call(w.session.prepare("act", json!({"how": "fail"})).idempotency_key("k")).await
            }),
            Expected { effects: Effects::Unknown, metered: 1, pending: 1, ..after(1, refused("pending_reconciliation", Gate::Recall)) },
        ),
        // 5 progress
        (
            "the third identical call",
            plain(),
            step!(w => {
                for _ in 0..2 { act("refuse")(w).await; }
                w.ran.store(0, std::sync::atomic::Ordering::SeqCst);
                act("refuse")(w).await
            }),
            after(2, refused("loop_detected", Gate::Progress)),
        ),
        // 6 limits
        (
            "a budget of calls",
            World::new(|a| a.limits(Limits { session: Budget { calls: Some(0), ..Budget::default() }, ..Limits::default() })),
            acts!("ok"),
            refused("budget_exhausted", Gate::Limits),
        ),
        (
            "a deadline that has passed",
            plain(),
            step!(w => w.gate.call(w.session.prepare("act", json!({"how": "ok"})).within(Duration::ZERO)).await),
            refused("deadline_exceeded", Gate::Limits),
        ),
        (
            "a session that is too old",
            World::new(|a| {
                a.limits(Limits { session: Budget { wall: Some(Duration::from_secs(60)), ..Budget::default() }, ..Limits::default() })
            }),
            step!(w => {
                w.session.call("look", json!({})).await;
                w.advance(SignedDuration::from_secs(61));
                act("ok")(w).await
            }),
            after(1, refused("deadline_exceeded", Gate::Limits)),
        ),
        (
            "a rate",
            World::new(|a| a.limits(Limits { rate: Some(Rate { calls: 0, per: Duration::from_secs(1) }), ..Limits::default() })),
            acts!("ok"),
            refused("rate_limited", Gate::Limits),
        ),
        // 7 hooks
        ("a hook that denies", hooked("deny"), acts!("ok"), refused("hook_denied", Gate::Hooks)),
        ("a hook that fails", hooked("fault"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a hook that panics", hooked("panic"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a hook that hangs", hooked("hang"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a hook that rewrites into junk", hooked("rewrite"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a program that denies", scripted("echo no >&2; exit 2"), acts!("ok"), refused("hook_denied", Gate::Hooks)),
        ("a program that crashes", scripted("exit 1"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a program that is killed", scripted("kill -9 $$"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a program that hangs", scripted("sleep 60"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        ("a program that prints junk", scripted("echo fine by me"), acts!("ok"), refused("hook_failed", Gate::Hooks)),
        (
            "a program that decides nonsense",
            scripted(r#"echo '{"decision": "perhaps"}'"#),
            acts!("ok"),
            refused("hook_failed", Gate::Hooks),
        ),
        (
            "a program that is not there",
            World::new(|a| a.hook(CommandHook::new("gone", "/nonexistent/hook").before())),
            acts!("ok"),
            refused("hook_failed", Gate::Hooks),
        ),
        // 8 policy
        (
            "a policy that denies",
            ruled(|_| Ok(Verdict::deny(ToolError::new(Category::Business, "cap", "too much")))),
            acts!("ok"),
            refused("cap", Gate::Policy),
        ),
        ("a policy that cannot decide", ruled(|_| Err(Fault::new("no data"))), acts!("ok"), refused("policy_fault", Gate::Policy)),
        ("a policy that panics", ruled(|_| panic!("a policy has a fault")), acts!("ok"), refused("policy_fault", Gate::Policy)),
        (
            "a policy that panics when asked what it needs",
            World::new(|a| a.policy(Deaf("needs"))),
            acts!("ok"),
            refused("policy_fault", Gate::Policy),
        ),
        (
            "a policy that looks at what it did not ask for",
            World::new(|a| a.policy(Deaf("undeclared"))),
            acts!("ok"),
            refused("policy_fault", Gate::Policy),
        ),
        // 9 approval
        ("a policy that asks", ruled(|_| Ok(Verdict::ask("over 100"))), acts!("ok"), refused("approval_required", Gate::Approval)),
        ("a hook that asks", hooked("ask"), acts!("ok"), refused("approval_required", Gate::Approval)),
        (
            "a person who refuses",
            ruled(|_| Ok(Verdict::ask("over 100"))),
            step!(w => {
                let asked = act("ok")(w).await;
                let id = asked.outcome.error().unwrap().approval.clone().unwrap().id;
                assert!(w.gate.answer_approval(&id, false, "bob").await.unwrap());
                act("ok")(w).await
            }),
            after(1, refused("approval_denied", Gate::Approval)),
        ),
        // 10 claim
        (
            "a limit with no room",
            ruled(|_| {
                let full = toolgate::limits::Charge {
                    counter: "full".into(),
                    amount: 2.into(),
                    cap: 1.into(),
                    window: None,
                    unit: Default::default(),
                };
                Ok(Verdict::Allow(toolgate::policy::Terms {
                    charges: vec![(full, ToolError::new(Category::Business, "daily_sum", "too much today"))],
                    ..Default::default()
                }))
            }),
            acts!("ok"),
            refused("daily_sum", Gate::Claim),
        ),
        (
            "a session that another call holds",
            World::with(|a| a, |g| g.busy_wait(Duration::from_millis(20))),
            step!(w => {
                let _other = toolgate::Store::hold(&*w.store, w.session.key(), true, Duration::ZERO).await.unwrap().unwrap();
                act("ok")(w).await
            }),
            refused("busy", Gate::Claim),
        ),
        // 11 run
        ("a handler that fails", plain(), acts!("fail"), unknown("no_stock")),
        ("a handler that proves it did nothing", plain(), acts!("refuse"), Expected { ran: 1, ..refused("no_stock", Gate::Run) }),
        ("a lost connection", plain(), acts!("io"), unknown("upstream_unavailable")),
        ("a status of the service behind", plain(), acts!("http"), unknown("upstream_unavailable")),
        ("a handler that panics", plain(), acts!("panic"), unknown("tool_panicked")),
        ("a handler that takes too long", plain(), acts!("hang"), unknown("timeout")),
        (
            "a deadline that passes meanwhile",
            plain(),
            step!(w => w.gate.call(w.session.prepare("act", json!({"how": "hang"})).within(Duration::from_millis(50))).await),
            unknown("deadline_exceeded"),
        ),
        (
            "a missed heartbeat",
            World::new(|a| {
                a.tool(
                    Tool::dynamic("sleepy", "Sleeps.", json!({"type": "object"}), |_, _| std::future::pending())
                        .open()
                        .effect(Effect::Write)
                        .heartbeat(Duration::from_millis(30)),
                )
            }),
            step!(w => w.session.call("sleepy", json!({})).await),
            Expected { ran: 0, metered: 0, ..unknown("heartbeat_missed") },
        ),
        (
            "a call that is cancelled",
            plain(),
            step!(w => {
                let token = CancellationToken::new();
                let cancel = token.clone();
                tokio::spawn(async move { tokio::time::sleep(Duration::from_millis(30)).await; cancel.cancel(); });
                w.gate.call(w.session.prepare("act", json!({"how": "hang"})).cancelled_by(token)).await
            }),
            unknown("cancelled"),
        ),
        (
            "a tool that only the client can run",
            World::new(|a| a.tool(Tool::external("bash", "Run by the client.", None).open())),
            step!(w => w.session.call("bash", json!({})).await),
            refused("no_handler", Gate::Run),
        ),
        // 12 shape
        ("a result of another shape", plain(), acts!("junk"), withheld("invalid_result")),
        (
            "a result that cannot be normalised",
            World::new(|a| {
                a.tool(
                    Tool::dynamic("odd", "Odd.", json!({"type": "object"}), |_, _| async { Ok(json!({"at": "soon"})) })
                        .open()
                        .normalize(Normal::timestamp("/at")),
                )
            }),
            step!(w => w.session.call("odd", json!({})).await),
            Expected { ran: 0, metered: 0, ..withheld("invalid_result") },
        ),
        ("a hook that fails after the tool", hooked("after-fault"), acts!("ok"), withheld("hook_failed")),
        ("a hook that panics after the tool", hooked("after-panic"), acts!("ok"), withheld("hook_failed")),
        ("a hook that hangs after the tool", hooked("after-hang"), acts!("ok"), withheld("hook_failed")),
        (
            "a program that fails after the tool",
            World::new(|a| a.hook(CommandHook::new("post", "/bin/sh").arg("-c").arg("exit 2").after())),
            acts!("ok"),
            withheld("hook_failed"),
        ),
        ("a policy that cannot take note", World::new(|a| a.policy(Deaf("result-fault"))), acts!("ok"), withheld("policy_fault")),
        ("a policy that panics at the result", World::new(|a| a.policy(Deaf("result-panic"))), acts!("ok"), withheld("policy_fault")),
        // 13, 14: the store
        (
            "a store that is away at the door",
            plain(),
            step!(w => { failing(w, &[Fails::Paused]); act("ok")(w).await }),
            refused("store_unavailable", Gate::Admit),
        ),
        (
            "a store that is away at the session",
            plain(),
            step!(w => { failing(w, &[Fails::Enter]); act("ok")(w).await }),
            refused("store_unavailable", Gate::Recall),
        ),
        (
            "a store that is away at the facts",
            World::new(|a| a.policy(toolgate::policy::Sequence::new("seq").after("act", ["look"]))),
            step!(w => { failing(w, &[Fails::Load]); act("ok")(w).await }),
            refused("store_unavailable", Gate::Policy),
        ),
        (
            "a store that is away at the claim",
            plain(),
            step!(w => { failing(w, &[Fails::Begin]); act("ok")(w).await }),
            refused("store_unavailable", Gate::Claim),
        ),
        (
            "a store that is away at the end",
            plain(),
            step!(w => { failing(w, &[Fails::Finish]); act("ok")(w).await }),
            Expected { effects: Effects::Done, ran: 1, metered: 1, spooled: true, ..refused("store_unavailable", Gate::Record) },
        ),
        (
            "a store that is away for a refusal",
            plain(),
            step!(w => { failing(w, &[Fails::Finish]); w.session.call("acts", json!({})).await }),
            Expected { spooled: true, ..refused("store_unavailable", Gate::Record) },
        ),
        (
            "a store that is away altogether",
            plain(),
            step!(w => { failing(w, &[Fails::Paused, Fails::Finish]); act("ok")(w).await }),
            Expected { spooled: true, ..refused("store_unavailable", Gate::Record) },
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_stop_is_one_error_one_row_and_no_change() {
    let cases = cases();
    assert!(cases.len() >= 25);
    for (name, world, step, expected) in cases {
        let quiet = world.fingerprint().await;
        let answer = step(&world).await;
        world.store.fail(&[]);
        let Outcome::Error(error) = &answer.outcome else { panic!("{name}: {answer:?}") };
        assert_eq!((&*error.code, answer.gate, error.effects), (expected.code, expected.gate, expected.effects), "{name}: {error:?}");
        assert_eq!(error.call_id, Some(answer.call), "{name}");
        assert!(!error.message.is_empty() && (error.effects.is_clean() || !error.retryable), "{name}: {error:?}");
        assert_eq!(world.ran(), expected.ran, "{name}: runs");
        let (rows, spooled) = world.rows().await;
        let of_call = rows.iter().filter(|row| row.call == answer.call).count();
        assert_eq!((of_call, spooled), if expected.spooled { (0, 1) } else { (1, 0) }, "{name}: rows");
        let ours: Vec<_> = rows.iter().filter(|row| row.call != answer.call).collect();
        assert_eq!(ours.len(), expected.before, "{name}: other rows");
        if expected.before == 0 || !ours.iter().any(|row| matches!(row.outcome, Outcome::Success(_))) {
            assert_eq!(world.fingerprint().await, quiet, "{name}: something changed");
        }
        assert_eq!(world.metered().await, expected.metered.into(), "{name}: limits");
        assert_eq!(world.gate.pending().await.unwrap().len(), expected.pending, "{name}: claims");
    }
}
