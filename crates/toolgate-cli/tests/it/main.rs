//! Tests the command line as a user sees it: exit code, standard output, standard error.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests may fail loudly"
)]

mod approval_while_serving;
mod broken_environment;
mod check;
mod doctor;
mod gateway;
mod hook;
mod init_trust;
mod ledger;
mod lint;
mod output_snapshots;
mod pause;
mod process_behaviour;
mod process_cleanup;
mod protected_files;
mod replay_check;
mod sandbox;
mod secrets;
mod serve_environment;
mod serve_resilience;
mod serve_shutdown;
mod server_import;
mod telemetry;
mod user_errors;
mod workspace;

use assert_cmd::Command;
use serde_json::Value;

pub(crate) fn run_toolgate(args: &[&str]) -> (i32, String, String) {
    let output = Command::cargo_bin("toolgate").unwrap().args(args).env_clear().output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap_or_else(|| panic!("killed")),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn help_prints_purpose_and_examples() {
    let (code, stdout, stderr) = run_toolgate(&["--help"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    insta::assert_snapshot!(stdout);
    let (code, stdout, _) = run_toolgate(&["demo", "--help"]);
    assert_eq!(code, 0);
    insta::assert_snapshot!(stdout);
}

#[test]
fn misspelled_verb_gets_suggestion() {
    let (code, stdout, stderr) = run_toolgate(&["dmeo"]);
    assert_eq!((code, stdout.as_str()), (2, ""));
    insta::assert_snapshot!(stderr);
}

#[test]
fn demo_output_is_deterministic() {
    let (code, stdout, stderr) = run_toolgate(&["demo"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(!stdout.contains('\u{1b}'), "colors without a terminal");
    insta::assert_snapshot!(stdout);
}

#[test]
fn demo_prints_json() {
    let (code, stdout, _) = run_toolgate(&["demo", "--json"]);
    assert_eq!(code, 0);
    let lines: Vec<Value> =
        stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (summary, steps) = lines.split_last().unwrap();
    let ran = steps.iter().filter(|s| s["ran"] == true).count();
    let replayed = steps.iter().filter(|s| s["outcome"]["replayed"] == true).count();
    let refused = steps.len() - ran - replayed;
    let expected = serde_json::json!({"asked": steps.len(), "ran": ran, "refused": refused, "replayed": replayed, "leaked": 0});
    assert_eq!((&summary["summary"], replayed), (&expected, 1));
    for step in steps {
        let keys: Vec<&String> = step.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["asked", "gate", "outcome", "ran", "step"]);
        let outcome = &step["outcome"];
        if outcome["isError"] == true {
            for field in ["errorCategory", "isRetryable", "code", "message", "effects", "callId"] {
                assert!(!outcome[field].is_null(), "{field} of {step}");
            }
        } else {
            assert_eq!(outcome["isError"], false, "{step}");
        }
    }
    let find =
        |name: &str| steps.iter().find(|s| s["step"] == name).unwrap_or_else(|| panic!("{name}"));
    assert_eq!(find("user not found")["outcome"]["isError"], false);
    assert_eq!(find("access denied")["outcome"]["errorCategory"], "PERMISSION");
    assert_eq!(find("system offline")["outcome"]["isRetryable"], true);
    assert_eq!(find("normalised result")["outcome"]["value"]["created_at"], "2023-11-14T22:13:20Z");
    assert_eq!(find("repeats a paid refund")["outcome"]["replayed"], true);
    assert!(find("hides 600 in a second key")["asked"]["arguments"].is_string());
}

#[test]
fn completions_are_printed_for_each_shell() {
    for shell in ["bash", "zsh", "fish"] {
        let (code, stdout, _) = run_toolgate(&["completions", shell]);
        assert!(code == 0 && stdout.contains("demo"), "{shell}");
    }
}
