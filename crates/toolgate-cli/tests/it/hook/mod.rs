//! Tests the hook of coding agents: its answers to events in the format of each client.

mod client_tool_names;
mod config_cache;
mod decisions;
mod effective_config;
mod failures;
mod results;
mod service;
mod test_project;

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use assert_cmd::cargo::CommandCargoExt;
use regex::Regex;
use serde_json::{Value, json};

pub(crate) use self::test_project::TestProject;

pub(crate) const CONFIG: &str = r#"
store = "ledger.db"
name = "coder"
redact = ["4111[0-9-]+"]

[tools.bash]
kind = "client"
shell = "/command"

[tools.read]
kind = "client"
effect = "read"
skip_client_prompt = true
entities = { file = "/file_path" }

[tools.write]
kind = "client"
policy = "open"

[tools.lookup]
kind = "client"
effect = "read"
normalize = [{ op = "timestamp", path = "/created" }]

[[policy]]
name = "no_push"
rule = "deny"
tools = ["bash"]
where = [{ argument = "/command", runs = ["git push"] }]
reason = "Do not push from here."

[[policy]]
name = "deletes"
rule = "ask"
tools = ["bash"]
where = [{ argument = "/command", runs = ["rm"] }]
reason = "This deletes something."
"#;

pub(crate) fn hook_event(name: &str, id: &str, tool: &str, input: Value) -> Value {
    json!({
        "hook_event_name": name, "session_id": "s1", "transcript_path": "/x", "cwd": "/", "permission_mode": "default", "effort": {"level": "x"},
        "tool_name": tool, "tool_input": input, "tool_use_id": id,
    })
}

fn post_tool_use_event(id: &str, tool: &str, input: Value, response: Value) -> Value {
    let mut event = hook_event("PostToolUse", id, tool, input);
    event["tool_response"] = response;
    event
}

pub(crate) fn decision(answer: &Value) -> (&str, &str) {
    let output = &answer["hookSpecificOutput"];
    (
        output["permissionDecision"].as_str().unwrap_or("none"),
        output["permissionDecisionReason"].as_str().unwrap_or_default(),
    )
}

#[test]
fn hook_answers_in_format_of_client() {
    let project = TestProject::with_config(CONFIG);
    let ask = |client: &str, n: u32, command: &str| {
        let name = if client == "cursor" { "preToolUse" } else { "PreToolUse" };
        let event = hook_event(name, &format!("{client}{n}"), "bash", json!({"command": command}));
        project.run_hook_with(&["hook", "--config", "toolgate.toml", "--client", client], &event)
    };
    // Codex does not support `ask`, and treats a bare `allow` as an error.
    assert_eq!(ask("codex", 1, "ls"), json!({}));
    let (answer, reason) = (ask("codex", 2, "rm x"), "A person must approve this call");
    assert!(decision(&answer).0 == "deny" && decision(&answer).1.contains(reason), "{answer}");
    // Cursor blocks a call without an answer.
    assert_eq!(ask("cursor", 1, "ls -l"), json!({"permission": "allow"}));
    let answer = ask("cursor", 2, "git push");
    assert_eq!(answer["permission"], "deny");
    assert_eq!(answer["user_message"], answer["agent_message"]);
    assert_eq!(decision(&ask("vscode", 1, "git push -u")).0, "deny");
    // Without arguments the call is denied. A byte order mark before the event is accepted.
    project.run(&["trust"], "");
    let text = format!(
        "\u{feff}{}",
        hook_event("PreToolUse", "x1", "Bash", json!({"command": "git push -v"}))
    );
    assert_eq!(project.run(&[], &text).0, 2);
    let (code, stdout, _) = project.run(&["hook"], &text);
    assert!(code == 0 && stdout.contains("deny"), "{stdout}");
}

#[test]
fn plain_protocol_answers_with_exit_code() {
    let project = TestProject::with_config(CONFIG);
    let hook =
        |event: Value| project.run(&["hook", "--config", "toolgate.toml"], &event.to_string());
    let (code, stdout, _) = hook(json!({"tool_name": "bash", "tool_input": {"command": "ls"}}));
    assert_eq!((code, stdout.as_str()), (0, "{\"decision\":\"allow\"}\n"));
    let (code, _, stderr) =
        hook(json!({"tool_name": "bash", "tool_input": {"command": "git push"}}));
    assert!(code == 2 && stderr.starts_with("toolgate: Do not push from here."), "{stderr}");
    let (code, _, stderr) = hook(json!({"tool_name": "bash", "tool_input": {"command": "rm x"}}));
    assert!(code == 2 && stderr.contains("A person must approve"), "{stderr}");
    let (code, stdout, _) = hook(
        json!({"tool_name": "bash", "tool_input": {"command": "ls"}, "tool_result": null, "latency_ms": 3}),
    );
    assert_eq!((code, stdout.as_str()), (0, "{}\n"));
    assert!(project.recorded_outcomes().contains(&("succeeded".to_owned(), String::new())));
}

#[test]
fn derived_call_id_contains_no_secret() {
    let project = TestProject::with_config(
        &CONFIG.replace("policy = \"open\"", "policy = \"open\"\nsecrets = \"/pin\""),
    );
    let service = service::HookServiceProcess::start(&project);
    let input = json!({"file_path": "notes.md", "pin": "pin-8153-0247"});
    // Another spelling of the arguments is the same call, also for another process.
    let respelled = r#"{"pin":"pin-8153-0247",  "file_path":"notes.md"}"#;
    let (one_process, by_service) =
        (&["hook", "--config", "toolgate.toml"][..], &["hook", "--socket", "hook.sock"][..]);
    for (first, then) in [(one_process, by_service), (by_service, one_process)] {
        assert_eq!(
            project.run(first, &json!({"tool_name": "write", "tool_input": input}).to_string()).0,
            0
        );
        assert_eq!(
            project
                .run(
                    then,
                    &format!(
                        r#"{{"tool_name":"write","tool_input":{respelled},"tool_result":null}}"#
                    )
                )
                .0,
            0
        );
    }
    let unadmitted =
        json!({"tool_name": "write", "tool_input": {"pin": "pin-8153-0248"}, "tool_result": null})
            .to_string();
    project.run(one_process, &unadmitted);
    drop(service);
    let rows = project.exported_rows();
    assert_eq!(
        project.recorded_outcomes().iter().filter(|(outcome, _)| outcome == "succeeded").count(),
        2,
        "{rows:?}"
    );
    assert!(rows.iter().all(|line| line.to_string().contains("\"unnamed:")), "{rows:?}");
    for path in list_files(&project.path("")) {
        let bytes = std::fs::read(&path).unwrap_or_default();
        assert!(!bytes.windows(8).any(|text| text == b"pin-8153"), "{}", path.display());
    }
}

pub(crate) fn list_files(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { list_files(&path) } else { vec![path] }).collect()
}

#[test]
fn concurrent_hook_calls_are_all_recorded() {
    let project =
        TestProject::with_config(&format!("{CONFIG}\n[limits]\nsession = {{ calls = 6 }}\n"));
    let project = &project;
    let decisions: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..10)
            .map(|n| {
                scope.spawn(move || {
                    decision(&project.pre_tool_use(
                        &format!("t{n}"),
                        "Bash",
                        json!({"command": format!("ls {n}")}),
                    ))
                    .0
                    .to_owned()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(decisions.iter().filter(|word| *word == "none").count(), 6, "{decisions:?}");
    let (code, stdout, _) = project.run(&["audit", "verify", "--store", "ledger.db"], "");
    assert_eq!(code, 0, "{stdout}");
}

#[test]
fn approval_is_answered_in_terminal_if_client_cannot_ask() {
    let project = TestProject::with_config(&CONFIG.replace(
        "reason = \"This deletes something.\"",
        "reason = \"This deletes something.\"\napprovers = [\"boss\"]",
    ));
    let ask = |id: &str| project.pre_tool_use(id, "Bash", json!({"command": "rm x"}));
    let answer = ask("t1");
    assert!(
        decision(&answer).1.starts_with("This deletes something. A person must approve this call")
    );
    let (_, listed, _) = project.run(&["approvals", "list"], "");
    let id = listed.split_whitespace().next().unwrap().to_owned();
    // The message names the command that answers the approval.
    assert!(
        decision(&answer)
            .1
            .contains(&format!("with `toolgate approvals approve {id}` in a terminal")),
        "{answer}"
    );
    let shown = project.masked_output(&["approvals", "list"], "");
    assert!(
        shown.contains("bash {\"command\":\"rm x\"}") && shown.contains("to be answered by boss"),
        "{shown}"
    );
    assert!(
        project
            .masked_output(&["approvals", "approve", &id, "--as", "mallory"], "")
            .contains("may not answer this approval")
    );
    assert!(
        project
            .masked_output(&["approvals", "approve", &id, "--as", "boss"], "")
            .starts_with("exit 0\napproved bash")
    );
    assert_eq!(ask("t2"), json!({}));
    assert_eq!(decision(&ask("t3")).0, "deny");
    assert_eq!(
        project.masked_output(&["approvals", "deny", &id], "").lines().next(),
        Some("exit 2")
    );
}

#[test]
fn agent_cannot_change_toolgate_programs() {
    let project = TestProject::with_config(CONFIG);
    let toolgate = assert_cmd::cargo::cargo_bin("toolgate");
    let home = project.path("");
    let desktop = home.join(".config/Claude/claude_desktop_config.json");
    let programs = ["toolgate", "toolgate-hook"].map(|name| toolgate.with_file_name(name));
    for (n, path) in programs.into_iter().chain([desktop]).enumerate() {
        let answer = project.pre_tool_use(
            &format!("t{n}"),
            "bash",
            json!({"command": format!("cp /bin/true {}", path.display())}),
        );
        assert!(answer.to_string().contains("own_files"), "{}: {answer}", path.display());
    }
}

#[test]
fn hook_binary_answers_like_toolgate_hook() {
    let run = |is_binary: bool, extra_args: &[&str]| {
        let project = TestProject::with_config(CONFIG);
        let mut outputs = Vec::new();
        let events = [
            hook_event("SessionStart", "", "", json!({})),
            hook_event("PreToolUse", "t1", "Bash", json!({"command": "git push"})),
            hook_event("PreToolUse", "t2", "Bash", json!({"command": "rm x"})),
            hook_event("PreToolUse", "t3", "Read", json!({"file_path": "/tmp/x"})),
            post_tool_use_event("t3", "Read", json!({"file_path": "/tmp/x"}), json!("text")),
            hook_event("PreToolUse", "t4", "lookup", json!({"id": 7})),
            post_tool_use_event(
                "t4",
                "lookup",
                json!({"id": 7}),
                json!({"created": 1_700_000_000}),
            ),
            hook_event("PreToolUse", "t5", "Nothing", json!({})),
            json!({"tool_name": "bash", "tool_input": {"command": "git push"}}),
            json!(["no event"]),
            hook_event("SessionEnd", "", "", json!({})),
        ];
        // Times and call ids differ in every run.
        let variable_parts = Regex::new(
            "20[0-9-]{8}T[0-9:.]+Z|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        )
        .unwrap();
        for event in events {
            let mut command = std::process::Command::cargo_bin(if is_binary {
                "toolgate-hook"
            } else {
                "toolgate"
            })
            .unwrap();
            project.set_environment(&mut command);
            let verb: &[&str] = if is_binary { &[] } else { &["hook"] };
            let output = Command::from_std(command)
                .args(verb)
                .args(["--config", "toolgate.toml"])
                .args(extra_args)
                .write_stdin(event.to_string())
                .output()
                .unwrap();
            let text = format!(
                "{:?} {}{}",
                output.status.code(),
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            outputs.push(variable_parts.replace_all(&text, "EACH").into_owned());
        }
        let rows = if project.path("project/ledger.db").exists() {
            project.recorded_outcomes()
        } else {
            Vec::new()
        };
        (outputs, rows)
    };
    for extra_args in [&[][..], &["--client", "codex"], &["--client", "cursor"]] {
        assert_eq!(run(true, extra_args), run(false, extra_args), "{extra_args:?}");
    }
    // An unknown flag denies the call.
    assert!(
        run(true, &["--no-such-flag", "x"]).0.iter().all(|output| output.starts_with("Some(2)"))
    );
}

#[test]
fn agent_config_selects_error_dialect() {
    let project = TestProject::with_config(&format!("dialect = \"bucket\"\n{CONFIG}"));
    // The cached configuration has the dialect too.
    for n in 0..3 {
        std::thread::sleep(std::time::Duration::from_millis(if n == 0 { 1_200 } else { 0 }));
        let answer = project.pre_tool_use(
            &format!("t{n}"),
            "bash",
            json!({"command": format!("git push {n}")}),
        );
        let contract: Value =
            serde_json::from_str(decision(&answer).1.lines().last().unwrap()).unwrap();
        assert_eq!(
            (&contract["error"]["bucket"], &contract["error"]["code"]),
            (&json!("Business"), &json!("no_push")),
            "{answer}"
        );
    }
}
