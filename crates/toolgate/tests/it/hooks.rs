//! Tests the order, the rewrites and the failures of hooks.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use toolgate::hook::{
    BeforeHookResult, CommandHook, Hook, HookCall, HookDecision, HookDenial, HookError,
};
use toolgate::policy::Verdict;
use toolgate::store::PauseTarget;
use toolgate::{
    CallEffects, CheckedArguments, Effect, ErrorCategory, Failure, Gate, Handler, Permit, Tool,
    ToolContext, ToolError,
};

use crate::support::{TestWorld, closure_policy};

fn write_script(dir: &tempfile::TempDir, name: &str, body: &str) -> PathBuf {
    let (path, text) = (dir.path().join(name), dir.path().join(format!("{name}.txt")));
    fs::write(&text, format!("#!/bin/sh\n{body}\n")).unwrap();
    // Let `install` write the script. A child of another test can inherit a write handle of this
    // process, and then the script cannot be executed (`ETXTBSY`).
    assert!(
        std::process::Command::new("install")
            .args(["-m", "755"])
            .args([&text, &path])
            .status()
            .unwrap()
            .success()
    );
    path
}

/// Multiplies `n` and adds to `n`, so that the order is visible.
struct ArithmeticHook(&'static str, i64, i64);

#[async_trait]
impl Hook for ArithmeticHook {
    fn name(&self) -> &str {
        self.0
    }
    async fn before(&self, call: HookCall<'_>) -> Result<BeforeHookResult, HookError> {
        let mut input = call.input.clone();
        input["n"] = json!(input["n"].as_i64().unwrap_or(0) * self.1 + self.2);
        Ok(BeforeHookResult { input: Some(input), ..BeforeHookResult::default() })
    }
    async fn after(
        &self,
        _: HookCall<'_>,
        result: &Value,
        _: u64,
    ) -> Result<Option<Value>, HookError> {
        let mut result = result.clone();
        result["steps"] = json!(format!(
            "{}*{}+{}",
            result["steps"].as_str().unwrap_or_default(),
            self.1,
            self.2
        ));
        Ok(Some(result))
    }
}

#[tokio::test]
async fn hooks_rewrite_in_order_and_policies_check_last_result() {
    let cap =
        closure_policy("cap", |ask| match ask.argument(&"/n".into()).and_then(Value::as_i64) {
            Some(n) if n > 20 => Ok(Verdict::deny(ToolError::new(
                ErrorCategory::Business,
                "cap",
                format!("{n} is too much"),
            ))),
            _ => Ok(Verdict::allow()),
        });
    let world = TestWorld::new(|agent| {
        agent.hook(ArithmeticHook("doubles", 2, 0)).hook(ArithmeticHook("adds", 1, 3)).policy(cap)
    });
    let answer = world.session.call("act", json!({"how": "ok", "n": 5})).await;
    assert_eq!(answer.outcome.success().map(|o| &o.value["steps"]), Some(&json!("*2+0*1+3")));
    assert_eq!(world.session.slice("touched").await.unwrap(), Some(json!({"how": "ok", "n": 13})));
    let row = world.session.rows().await.unwrap()[0].clone();
    assert_eq!(
        *row.arguments,
        json!({"how": "ok", "n": 13}),
        "the row contains the executed arguments"
    );
    assert!(row.facts.hooks.iter().all(|h| h.rewrote));
    let denied = world.session.call("act", json!({"how": "ok", "n": 10})).await;
    assert_eq!(
        denied.outcome.error().map(|e| (&*e.code, e.message.as_str())),
        Some(("cap", "23 is too much"))
    );
}

#[tokio::test]
async fn command_hook_receives_call_event() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("seen.json");
    let script = write_script(&dir, "keep", &format!("cat > {}", log.display()));
    let world = TestWorld::new(|agent| agent.hook(CommandHook::new("keep", script).before()));
    assert!(world.session.call("act", json!({"how": "ok"})).await.outcome.success().is_some());
    let event: Value = serde_json::from_str(&fs::read_to_string(log).unwrap()).unwrap();
    assert_eq!((&event["tool_name"], &event["tool_input"]), (&json!("act"), &json!({"how": "ok"})));
}

#[tokio::test]
async fn command_hook_output_decides_call() {
    let cases = [
        // (script, outcome)
        ("exit 0", "ok"),
        ("echo '{}'", "ok"),
        ("echo '{\"decision\": \"allow\"}'", "ok"),
        ("cat", "ok"),
        (
            "echo '{\"decision\": \"deny\", \"reason\": \"because\"}'",
            "PERMISSION hook_denied because",
        ),
        (
            "echo '{\"decision\": \"deny\", \"reason\": \"rule 7\", \"category\": \"BUSINESS\", \"code\": \"rule_7\", \"redirectTool\": \"look\"}'",
            "BUSINESS rule_7 rule 7 -> look",
        ),
        (
            "echo '{\"decision\": \"deny\", \"category\": \"TRANSIENT\"}'",
            "PERMISSION hook_denied denied by the hook `script`",
        ),
        (
            "echo 'over the cap; use look' >&2; exit 2",
            "PERMISSION hook_denied over the cap; use look",
        ),
        (
            "echo '{\"decision\": \"allow\"}'; exit 2",
            "PERMISSION hook_denied denied by the hook `script`",
        ),
        ("echo '{\"decision\": \"ask\", \"reason\": \"sure?\"}'", "BUSINESS approval_required"),
        ("echo '{\"tool_input\": {\"how\": \"refuse\"}}'", "BUSINESS no_stock"),
        ("echo '{\"decision\": \"allow\", \"decision\": \"deny\"}'", "PERMISSION hook_failed"),
        (
            "echo '{\"hookSpecificOutput\": {\"hookEventName\": \"PreToolUse\", \"permissionDecision\": \"deny\", \"permissionDecisionReason\": \"not this\"}}'",
            "PERMISSION hook_denied not this",
        ),
        (
            "echo '{\"decision\": \"deny\", \"hookSpecificOutput\": {\"permissionDecision\": \"allow\"}}'",
            "PERMISSION hook_denied",
        ),
        (
            "echo '{\"hookSpecificOutput\": {\"permissionDecision\": \"defer\"}}'",
            "PERMISSION hook_failed",
        ),
        (
            "echo '{\"hookSpecificOutput\": {\"updatedInput\": {\"how\": \"refuse\"}}}'",
            "BUSINESS no_stock",
        ),
        ("echo '{\"decison\": \"deny\"}'", "PERMISSION hook_failed"),
        (
            "echo '{\"hookSpecificOutput\": {\"permisionDecision\": \"deny\"}}'",
            "PERMISSION hook_failed",
        ),
        (
            "echo '{\"decision\": \"ask\", \"hookSpecificOutput\": {\"permissionDecision\": \"allow\"}}'",
            "BUSINESS approval_required",
        ),
        ("echo '[]'", "PERMISSION hook_failed"),
        ("echo '{\"decision\": 5}'", "PERMISSION hook_failed"),
        ("head -c 3000000 /dev/zero", "PERMISSION hook_failed"),
        ("exit 3", "PERMISSION hook_failed"),
    ];
    for (body, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let path = write_script(&dir, "hook", body);
        let world = TestWorld::new(|agent| {
            agent.hook(CommandHook::new("script", path).tools("act|other_*").before())
        });
        let answer = world.session.call("act", json!({"how": "ok"})).await;
        let outcome = answer.outcome.error().map_or_else(
            || "ok".to_owned(),
            |e| {
                format!(
                    "{} {} {}{}",
                    e.category,
                    e.code,
                    e.message,
                    e.redirect_tool.as_ref().map(|t| format!(" -> {t}")).unwrap_or_default()
                )
            },
        );
        assert!(outcome.starts_with(expected), "{body}: {outcome}");
        // The hook does not match other tools.
        assert!(world.session.call("look", json!({})).await.outcome.success().is_some());
    }
}

/// Denies the call and redirects the model to a tool.
struct RedirectingHook(&'static str);

#[async_trait]
impl Hook for RedirectingHook {
    fn name(&self) -> &str {
        "redirects"
    }
    fn matches(&self, tool: &str) -> bool {
        tool == "act"
    }
    async fn before(&self, _: HookCall<'_>) -> Result<BeforeHookResult, HookError> {
        let denial =
            HookDenial { redirect: Some(self.0.to_owned()), ..HookDenial::new("not here") };
        Ok(BeforeHookResult { decision: HookDecision::Deny(denial), input: None })
    }
}

#[tokio::test]
async fn hook_redirect_to_unreachable_tool_is_removed() {
    for (to, paused, is_reachable) in [
        ("look", false, true),
        ("look", true, false),
        ("back_office", false, false),
        ("nowhere", false, false),
    ] {
        let hidden = Tool::dynamic(
            "back_office",
            "Only for Bob.",
            json!({"type": "object"}),
            |_, args| async move { Ok(args) },
        );
        let world = TestWorld::new(|agent| {
            agent.tool(hidden.effect(Effect::Read).visible_to(["bob"])).hook(RedirectingHook(to))
        });
        if paused {
            world.gate.pause(PauseTarget::Tool(to.into()), "incident").await.unwrap();
        }
        let answer = world.session.call("act", json!({"how": "ok"})).await;
        let error = answer.outcome.error().unwrap();
        assert_eq!(
            (&*error.code, error.message.as_str(), error.redirect_tool.as_deref()),
            ("hook_denied", "not here", is_reachable.then_some(to)),
            "the denial is the same with and without a redirect"
        );
        // The row names the removed redirect for the author of the hook.
        let row = world.session.rows().await.unwrap()[0].clone();
        assert_eq!(
            row.facts.hooks[0].no_redirect.as_deref(),
            (!is_reachable).then_some(to),
            "{to}"
        );
    }
}

#[tokio::test]
async fn command_hook_gets_only_configured_environment() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("env");
    let path = write_script(&dir, "env", &format!("env > {}", log.display()));
    // Cargo sets this variable for tests.
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    let hook =
        CommandHook::new("env", path).env("REFUND_CAP", "500").inherit("CARGO_PKG_NAME").before();
    TestWorld::new(|agent| agent.hook(hook)).session.call("act", json!({"how": "ok"})).await;
    let environment = fs::read_to_string(log).unwrap();
    assert!(
        environment.contains("REFUND_CAP=500")
            && environment.contains("CARGO_PKG_NAME=")
            && !environment.contains("CARGO_MANIFEST_DIR"),
        "{environment}"
    );
}

#[tokio::test]
async fn hanging_hook_is_killed_with_its_children() {
    let dir = tempfile::tempdir().unwrap();
    // A unique duration identifies the process of this test.
    let (duration, start_marker) = (format!("60.{}", std::process::id()), dir.path().join("begun"));
    let path = write_script(
        &dir,
        "hang",
        &format!("(echo > {}; exec sleep {duration}) &\nsleep 60", start_marker.display()),
    );
    // A busy machine starts processes slowly, so retry with longer timeouts.
    for seconds in [1, 4, 16] {
        let hook = CommandHook::new("hang", &path).timeout(Duration::from_secs(seconds)).before();
        let answer = TestWorld::new(|agent| agent.hook(hook))
            .session
            .call("act", json!({"how": "ok"}))
            .await;
        assert_eq!(answer.outcome.error().map(|e| &*e.code), Some("hook_failed"));
        if start_marker.exists() {
            break;
        }
    }
    assert!(start_marker.exists(), "the child of the hook never started");
    let line = format!("sleep\0{duration}\0").into_bytes();
    let is_sleeper = |entry: fs::DirEntry| {
        fs::read(entry.path().join("cmdline")).is_ok_and(|cmdline| cmdline == line)
    };
    let is_alive = || fs::read_dir("/proc").unwrap().flatten().any(is_sleeper);
    for _ in 0..500 {
        if !is_alive() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!is_alive(), "a child of the hook outlived it");
}

#[tokio::test]
async fn after_hook_rewrites_result() {
    let dir = tempfile::tempdir().unwrap();
    let path = write_script(
        &dir,
        "post",
        r#"cat > /dev/null; echo '{"tool_result": {"done": true, "note": "checked"}}'"#,
    );
    let world = TestWorld::new(|agent| agent.hook(CommandHook::new("post", path).after()));
    let answer = world.session.call("act", json!({"how": "ok"})).await;
    assert_eq!(answer.outcome.success().map(|o| &o.value["note"]), Some(&json!("checked")));
    // The hook receives the call and the result.
    let log = dir.path().join("seen.json");
    let path = write_script(&dir, "log", &format!("cat > {}", log.display()));
    let world = TestWorld::new(|agent| agent.hook(CommandHook::new("log", path).after()));
    world.session.call("act", json!({"how": "ok"})).await;
    let event: Value = serde_json::from_str(&fs::read_to_string(log).unwrap()).unwrap();
    assert_eq!(
        (&event["tool_name"], &event["tool_result"]),
        (&json!("act"), &json!({"done": true}))
    );
    assert!(event["latency_ms"].is_u64());
}

/// Panics before it returns a future.
///
/// The `async_trait` macro would move the panic into the future.
struct EarlyPanic(&'static str);

impl EarlyPanic {
    fn panic_at(&self, place: &str) {
        assert!(self.0 != place, "the password is hunter2");
    }
}

impl Hook for EarlyPanic {
    fn name(&self) -> &str {
        "hasty"
    }
    fn before<'s, 'c, 'f>(
        &'s self,
        _: HookCall<'c>,
    ) -> BoxFuture<'f, Result<BeforeHookResult, HookError>>
    where
        's: 'f,
        'c: 'f,
        Self: 'f,
    {
        self.panic_at("before");
        Box::pin(async { Ok(BeforeHookResult::default()) })
    }
    fn after<'s, 'c, 'r, 'f>(
        &'s self,
        _: HookCall<'c>,
        _: &'r Value,
        _: u64,
    ) -> BoxFuture<'f, Result<Option<Value>, HookError>>
    where
        's: 'f,
        'c: 'f,
        'r: 'f,
        Self: 'f,
    {
        self.panic_at("after");
        Box::pin(async { Ok(None) })
    }
}

impl Handler for EarlyPanic {
    fn run<'s, 'p, 'a, 'f>(
        &'s self,
        _: &'p Permit,
        _: ToolContext,
        _: &'a CheckedArguments,
    ) -> BoxFuture<'f, Result<Value, Failure>>
    where
        's: 'f,
        'p: 'f,
        'a: 'f,
        Self: 'f,
    {
        self.panic_at("run");
        Box::pin(async { Ok(json!({})) })
    }
}

#[tokio::test]
async fn panic_before_first_await_is_reported_like_any_panic() {
    let cases = [
        ("before", "hook_failed", Gate::Hooks, CallEffects::None),
        ("run", "tool_panicked", Gate::Run, CallEffects::Unknown),
        ("after", "hook_failed", Gate::Shape, CallEffects::Done),
    ];
    for (place, code, gate, effects) in cases {
        let tool = Tool::with_handler(
            "hasty",
            "Panics early.",
            json!({"type": "object"}),
            Arc::new(EarlyPanic(place)),
        );
        let world = TestWorld::new(|agent| {
            agent.tool(tool.effect(Effect::Write).open()).hook(EarlyPanic(place))
        });
        let answer = world.session.call("hasty", json!({})).await;
        let error = answer.outcome.error().unwrap_or_else(|| panic!("{place}: {answer:?}"));
        assert_eq!(
            (&*error.code, answer.gate, error.effects),
            (code, gate, effects),
            "{place}: {error}"
        );
        assert!(!error.message.contains("hunter2"), "{place}: {error}");
    }
}
