//! Tests colors, prompts and the escaping of untrusted text in a terminal.

use std::process::Stdio;

use serde_json::json;

use crate::hook::TestProject;
use crate::output_snapshots::{CODER_CONFIG, demo_project, send_hook_event};

/// Runs toolgate in a pseudo-terminal, and returns its output.
fn run_in_terminal(project: &TestProject, variables: &[(&str, &str)], args: &[&str]) -> String {
    let line =
        format!("'{}' {}", assert_cmd::cargo::cargo_bin("toolgate").display(), args.join(" "));
    let mut command = std::process::Command::new("script");
    project.set_environment(&mut command);
    command
        .env("TERM", "xterm")
        .envs(variables.iter().copied())
        .args(["-qec", &line, "/dev/null"])
        .stdin(Stdio::null());
    String::from_utf8(command.output().unwrap().stdout).unwrap()
}

#[test]
fn colors_appear_only_in_color_terminals() {
    if std::process::Command::new("script").arg("--version").output().is_err() {
        eprintln!("SKIPPED: `script` is not installed");
        return;
    }
    let project = demo_project();
    project.write("project/bad.toml", "[tools.look]\nkind = \"clint\"\n");
    for line in [
        "audit query",
        "audit verify",
        "doctor --config bad.toml",
        "trust bad.toml",
        "lint --config bad.toml",
        "dmeo",
        "--help",
    ] {
        let args: Vec<&str> = line.split(' ').collect();
        assert!(run_in_terminal(&project, &[], &args).contains('\u{1b}'), "{line}: no colors");
        for off in [("NO_COLOR", "1"), ("CLICOLOR", "0"), ("TERM", "dumb")] {
            let seen = run_in_terminal(&project, &[off], &args);
            assert!(!seen.is_empty() && !seen.contains('\u{1b}'), "{line} with {off:?}: {seen}");
        }
        let (_, stdout, stderr) =
            project.run_with(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")], &args, "");
        assert!(!format!("{stdout}{stderr}").contains('\u{1b}'), "{line}");
    }
}

#[test]
fn terminal_prompt_names_expected_input() {
    if std::process::Command::new("script").arg("--version").output().is_err() {
        eprintln!("SKIPPED: `script` is not installed");
        return;
    }
    let project = TestProject::with_config(CODER_CONFIG);
    assert!(run_in_terminal(&project, &[], &["check"]).contains("type one call per line"));
    assert!(!project.run(&["check"], "").2.contains("type one call"));
    assert!(run_in_terminal(&project, &[], &["hook"]).contains("waiting for one JSON event"));
    assert!(!project.run(&["hook"], "").2.contains("waiting"));
}

#[test]
fn untrusted_text_is_escaped_in_terminal() {
    let project = TestProject::with_config(CODER_CONFIG);
    let hostile = "rm \u{202e}x\u{1b}[2J\r\nls";
    send_hook_event(&project, "PreToolUse", hostile, &json!({}));
    assert_eq!(project.run(&["pause", "--principal", hostile, "--because", hostile], "").0, 0);
    for (line, lines) in
        [("approvals list", 4), ("audit query", 3), ("audit tail", 1), ("pause", 1)]
    {
        let (_, stdout, _) = project.run(&line.split(' ').collect::<Vec<_>>(), "");
        assert!(!stdout.contains(['\u{202e}', '\u{1b}', '\r']), "{line}: {stdout:?}");
        assert_eq!(stdout.lines().count(), lines, "{line}: {stdout}");
    }
}
