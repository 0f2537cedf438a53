//! Tests the messages for hook programs that deny or fail.

use std::time::Duration;

use serde_json::json;
use toolgate::hook::CommandHook;
use toolgate::{CallEffects, Decision, Gate};

use crate::support::TestWorld;

const INVALID_JSON_MESSAGE: &str =
    "expected a JSON value (object, array, string, number, true, false or null) (at byte 0)";

fn shell_hook(script: &str) -> CommandHook {
    CommandHook::new("script", "/bin/sh").arg("-c").arg(script)
}

fn program_hook(path: &str) -> CommandHook {
    CommandHook::new("script", path)
}

fn hanging_hook() -> CommandHook {
    shell_hook("sleep 60").timeout(Duration::from_millis(200))
}

/// Lists faults of hook programs and their messages.
fn fault_cases() -> Vec<(&'static str, CommandHook, String)> {
    let invalid_answer = |why: &str| format!("/bin/sh printed an invalid answer: {why}");
    let text = str::to_owned;
    vec![
        ("it hangs", hanging_hook(), text("/bin/sh gave no answer within 200ms and was stopped")),
        (
            "it is missing",
            program_hook("/nonexistent/hook"),
            text("/nonexistent/hook cannot be started: No such file or directory (os error 2)"),
        ),
        (
            "it is not executable",
            program_hook("/etc/passwd"),
            text("/etc/passwd cannot be started: Permission denied (os error 13)"),
        ),
        (
            "it prints invalid JSON",
            shell_hook("echo fine by me"),
            invalid_answer(INVALID_JSON_MESSAGE),
        ),
        (
            "it prints two answers",
            shell_hook("echo '{}{}'"),
            invalid_answer("there is more text after the end of the document (at byte 2)"),
        ),
        (
            "it prints a key twice",
            shell_hook(r#"echo '{"decision": "allow", "decision": "deny"}'"#),
            invalid_answer("the key `decision` is given twice (at byte 22)"),
        ),
        (
            "it prints invalid UTF-8",
            shell_hook(r"printf '\377'"),
            invalid_answer("the document is not valid UTF-8 (at byte 0)"),
        ),
        ("it prints a list", shell_hook("echo '[]'"), invalid_answer("expected a JSON object")),
        (
            "it prints a decision of another type",
            shell_hook(r#"echo '{"decision": true}'"#),
            invalid_answer("`decision` must be a string"),
        ),
        // The message must not contain the printed value, because the value can be a secret.
        (
            "it prints a number for a reason",
            shell_hook(r#"echo '{"decision": "deny", "reason": 4711}'"#),
            invalid_answer("`reason` must be a string"),
        ),
        (
            "it prints text for an object",
            shell_hook(r#"echo '{"hookSpecificOutput": "sesame"}'"#),
            invalid_answer("`hookSpecificOutput` must be an object"),
        ),
        (
            "it prints a number within it",
            shell_hook(r#"echo '{"hookSpecificOutput": {"permissionDecision": 4711}}'"#),
            invalid_answer("`permissionDecision` must be a string"),
        ),
        (
            "it prints an unknown category",
            shell_hook(r#"echo '{"decision": "deny", "category": "sesame"}'"#),
            invalid_answer("`category` must be TRANSIENT, VALIDATION, PERMISSION or BUSINESS"),
        ),
        (
            "it prints arguments twice",
            shell_hook(r#"echo '{"tool_input": {}, "updatedInput": {}}'"#),
            invalid_answer("arguments or result are present twice"),
        ),
        (
            "it prints a secret key twice",
            shell_hook(r#"echo '{"sesame": 1, "sesame": 2}'"#).redact_value("sesame"),
            invalid_answer("the key `[redacted]` is given twice (at byte 14)"),
        ),
        (
            "it prints a misspelt key",
            shell_hook(r#"echo '{"decison": "deny"}'"#),
            invalid_answer("unknown field `decison` in the answer; did you mean `decision`?"),
        ),
        (
            "it prints another key",
            shell_hook(r#"echo '{"verdict": "deny"}'"#),
            invalid_answer("missing `decision`, `tool_input` or `tool_result`"),
        ),
        (
            "it prints a byte too much",
            shell_hook("head -c 1048577 /dev/zero"),
            text("/bin/sh printed more than 1048576 bytes"),
        ),
        (
            "it prints a byte too much to standard error",
            shell_hook("head -c 1048577 /dev/zero >&2"),
            text("/bin/sh printed more than 1048576 bytes"),
        ),
    ]
}

#[tokio::test]
async fn failing_before_hook_refuses_call() {
    let text = str::to_owned;
    let mut cases = fault_cases();
    cases.extend([
        ("it crashes", shell_hook("exit 1"), text("/bin/sh ended with exit code 1")),
        ("it crashes with a message", shell_hook("echo boom >&2; exit 1"), text("/bin/sh ended with exit code 1: boom")),
        ("it ends with an unknown exit code", shell_hook("exit 3"), text("/bin/sh ended with exit code 3")),
        ("it allows, and then crashes", shell_hook(r#"echo '{"decision": "allow"}'; exit 1"#), text("/bin/sh ended with exit code 1")),
        ("it is killed", shell_hook("kill -9 $$"), text("/bin/sh was killed")),
        ("it is killed after a message", shell_hook("echo dying >&2; kill -9 $$"), text("/bin/sh was killed: dying")),
        ("it prints an unknown decision", shell_hook(r#"echo '{"decision": "perhaps"}'"#), text("/bin/sh gave the unknown decision `perhaps`")),
        (
            "it echoes the event, and misspells its decision",
            shell_hook(r#"echo '{"tool_input": {"how": "ok"}, "decison": "deny"}'"#),
            text("/bin/sh printed an invalid answer: unknown field `decison` in the answer; did you mean `decision`?"),
        ),
        (
            "it uses the field name of another client",
            shell_hook(r#"echo '{"tool_input": {"how": "ok"}, "hookSpecificOutput": {"permission_decision": "deny"}}'"#),
            text(
                "/bin/sh printed an invalid answer: unknown field `permission_decision` in the answer; did you mean `permissionDecision`?",
            ),
        ),
        (
            "its decision is a secret value",
            shell_hook(r#"echo '{"decision": "sesame"}'"#).redact_value("sesame"),
            text("/bin/sh gave the unknown decision `[redacted]`"),
        ),
    ]);
    for (name, hook, why) in cases {
        let world = TestWorld::new(|agent| agent.hook(hook.before()));
        let message = format!("the hook `script` failed, so the call is denied: {why}");
        assert_refused(name, &world, "hook_failed", &message).await;
    }
}

#[tokio::test]
async fn denial_quotes_reason_of_hook() {
    let rewrite_error = "the hook `script` rewrote the arguments, and the result is invalid: act: `how` must be a string; got 7";
    let cases = [
        // A printed decision counts with any exit code.
        (
            r#"echo '{"decision": "deny", "reason": "not today"}'; exit 0"#,
            "hook_denied",
            "not today",
        ),
        (r#"echo '{"decision": "block"}'; exit 0"#, "hook_denied", "denied by the hook `script`"),
        (
            r#"echo '{"decision": "deny", "reason": "rule 7", "code": "rule_7"}'"#,
            "rule_7",
            "rule 7",
        ),
        ("echo 'over the cap' >&2; exit 2", "hook_denied", "over the cap"),
        ("exit 2", "hook_denied", "denied by the hook `script`"),
        ("echo junk; exit 2", "hook_denied", "denied by the hook `script`"),
        (r#"echo '{"decision": "allow"}'; echo 'no' >&2; exit 2"#, "hook_denied", "no"),
        (
            r#"echo '{"decision": "allow", "reason": "as printed"}'; echo 'no' >&2; exit 2"#,
            "hook_denied",
            "as printed",
        ),
        (r#"echo '{"tool_input": {"how": 7}}'"#, "hook_failed", rewrite_error),
    ];
    for (script, code, message) in cases {
        let world = TestWorld::new(|agent| agent.hook(shell_hook(script).before()));
        assert_refused(script, &world, code, message).await;
    }
}

/// Asserts that the tool does not run, no state changes, and the row names the hook.
async fn assert_refused(name: &str, world: &TestWorld, code: &str, message: &str) {
    let before = world.fingerprint().await;
    let answer = world.session.call("act", json!({"how": "ok"})).await;
    let error = answer.outcome.error().unwrap_or_else(|| panic!("{name}: {answer:?}"));
    assert_eq!((&*error.code, error.message.as_str()), (code, message), "{name}");
    assert_eq!(
        (error.effects, error.retryable, answer.gate, answer.rule.as_deref()),
        (CallEffects::None, false, Gate::Hooks, Some("script")),
        "{name}"
    );
    assert_eq!((world.run_count(), world.meter_value().await), (0, 0.into()), "{name}");
    assert_eq!(world.fingerprint().await, before, "{name}");
    let rows = world.session.rows().await.unwrap();
    let recorded: Vec<_> =
        rows.iter().map(|row| (row.decision, row.rule.as_deref(), row.code())).collect();
    assert_eq!(recorded, [(Decision::Refused, Some("script"), Some(code))], "{name}");
}

#[tokio::test]
async fn failing_after_hook_withholds_result() {
    let text = str::to_owned;
    let mut cases = fault_cases();
    cases.extend([
        (
            "it crashes",
            shell_hook("echo boom >&2; exit 1"),
            text("/bin/sh failed after the tool: exit status: 1"),
        ),
        (
            "it denies after the run",
            shell_hook("echo no >&2; exit 2"),
            text("/bin/sh failed after the tool: exit status: 2"),
        ),
        (
            "it is killed",
            shell_hook("kill -9 $$"),
            text("/bin/sh failed after the tool: signal: 9 (SIGKILL)"),
        ),
        (
            "it rewrites, and then crashes",
            shell_hook(r#"echo '{"tool_result": {"done": false}}'; exit 3"#),
            text("/bin/sh failed after the tool: exit status: 3"),
        ),
    ]);
    for (name, hook, why) in cases {
        let world = TestWorld::new(|agent| agent.hook(hook.after()));
        let message = format!(
            "the hook `script` failed after the tool had run, so its result is withheld: {why}"
        );
        assert_withheld(name, &world, "hook_failed", Some("script"), &message).await;
    }
    let world = TestWorld::new(|agent| {
        agent.hook(shell_hook(r#"echo '{"tool_result": {"undone": 1}}'"#).after())
    });
    let message =
        "the result does not match its schema: `act` requires `done` (boolean), which is missing";
    assert_withheld("it rewrites to an invalid result", &world, "invalid_result", None, message)
        .await;
}

/// Asserts that the tool ran, the result is withheld, and the session is unchanged.
async fn assert_withheld(
    name: &str,
    world: &TestWorld,
    code: &str,
    rule: Option<&str>,
    message: &str,
) {
    let before = world.fingerprint().await;
    let answer = world.session.call("act", json!({"how": "ok"})).await;
    let error = answer.outcome.error().unwrap_or_else(|| panic!("{name}: {answer:?}"));
    assert_eq!((&*error.code, error.message.as_str()), (code, message), "{name}");
    assert_eq!(
        (error.effects, error.retryable, answer.gate, answer.rule.as_deref()),
        (CallEffects::Done, false, Gate::Shape, rule),
        "{name}"
    );
    assert_eq!((world.run_count(), world.meter_value().await), (1, 1.into()), "{name}");
    assert_eq!(world.gate.pending_calls().await.unwrap().len(), 0, "{name}");
    assert_eq!(world.fingerprint().await, before, "{name}");
    let rows = world.session.rows().await.unwrap();
    let recorded: Vec<_> = rows.iter().map(|row| (row.decision, row.code(), row.effects)).collect();
    assert_eq!(recorded, [(Decision::Failed, Some(code), CallEffects::Done)], "{name}");
}

#[tokio::test]
async fn hook_without_decision_allows_call() {
    let scripts = [
        "exit 0",
        "echo '{}'",
        "echo oh dear >&2",
        "head -c 1048576 /dev/zero | tr '\\0' ' '",
        r#"echo '{"decision": "approve"}'"#,
        r#"echo '{"decision": "approve", "decision_id": "7", "reason": "", "reasons": []}'"#,
        // Further fields that coding agents send.
        r#"echo '{"decision": "approve", "continue": true, "stopReason": "", "suppressOutput": true, "systemMessage": "", "tool_response": {}}'"#,
        r#"echo '{"hookSpecificOutput": {"hookEventName": "x", "permissionDecision": "allow", "additionalContext": "", "updatedMCPToolOutput": {}}}'"#,
    ];
    for script in scripts {
        for hook in [shell_hook(script).before(), shell_hook(script).after()] {
            let world = TestWorld::new(|agent| agent.hook(hook));
            let answer = world.session.call("act", json!({"how": "ok"})).await;
            assert_eq!(
                answer.outcome.success().map(|output| &output.value),
                Some(&json!({"done": true})),
                "{script}: {answer:?}"
            );
        }
    }
    // A decision after the run is ignored.
    let world =
        TestWorld::new(|agent| agent.hook(shell_hook(r#"echo '{"decision": "deny"}'"#).after()));
    assert!(world.session.call("act", json!({"how": "ok"})).await.outcome.success().is_some());
}

#[tokio::test]
async fn secret_in_hook_output_is_redacted() {
    let read_secret = "word=$(grep -o 'hunter[^\"]*'); ";
    let cases = [
        ("grep -o 'password.*' >&2; exit 2".to_owned(), "hook_denied", "password\":\"[redacted]\""),
        ("grep -o 'password.*' >&2; exit 3".to_owned(), "hook_failed", "password\":\"[redacted]\""),
        (
            read_secret.to_owned()
                + r#"echo "{\"decision\": \"deny\", \"reason\": \"not with $word\", \"redirectTool\": \"$word\"}""#,
            "hook_denied",
            "not with [redacted]",
        ),
        (
            read_secret.to_owned() + r#"echo "{\"decision\": \"$word\"}""#,
            "hook_failed",
            "the unknown decision `[redacted]`",
        ),
        (
            read_secret.to_owned() + r#"echo "{\"$word\": 1, \"$word\": 2}""#,
            "hook_failed",
            "the key `[redacted]` is given twice",
        ),
        (
            read_secret.to_owned()
                + r#"echo "{\"decision\": \"ask\", \"reason\": \"really $word?\"}""#,
            "approval_required",
            "really [redacted]?",
        ),
        // The truncation is inside the secret.
        (
            read_secret.to_owned()
                + r#"(head -c 1995 /dev/zero | tr '\0' x; echo "$word") >&2; exit 2"#,
            "hook_denied",
            "xx[redacted]…",
        ),
    ];
    for password in ["hunter2-long", "hunterü2-long"] {
        for (script, code, expected) in &cases {
            let world = TestWorld::new(|agent| agent.hook(shell_hook(script).before()));
            let answer =
                world.session.call("act", json!({"how": "ok", "password": password})).await;
            let error = answer.outcome.error().unwrap_or_else(|| panic!("{script}: {answer:?}"));
            assert!(error.code == *code && error.message.contains(expected), "{script}: {error:?}");
            let output = format!("{answer:?} {:?}", world.session.rows().await.unwrap());
            assert!(!output.contains("hunte"), "{script}: {output}");
        }
    }
    let world = TestWorld::new(|agent| agent.hook(shell_hook(&cases[4].0).after()));
    let answer = world.session.call("act", json!({"how": "ok", "password": "hunter2-long"})).await;
    assert!(answer.outcome.error().unwrap().message.contains(cases[4].2), "{answer:?}");
    assert!(!format!("{answer:?} {:?}", world.session.rows().await.unwrap()).contains("hunte"));
}

#[tokio::test]
async fn truncated_hook_reason_ends_with_ellipsis() {
    let long = "head -c 2100 /dev/zero | tr '\\0' x";
    for script in [
        format!("{long} >&2; exit 2"),
        format!(r#"echo "{{\"decision\": \"deny\", \"reason\": \"$({long})\"}}""#),
    ] {
        let world = TestWorld::new(|agent| agent.hook(shell_hook(&script).before()));
        assert_refused(&script, &world, "hook_denied", &format!("{}…", "x".repeat(2_000))).await;
    }
}
