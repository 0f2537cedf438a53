//! Tests the built-in file tools of a configured agent: read, write and rollback.

use serde_json::{Value, json};

use crate::gateway::exchange_over_stdio;
use crate::hook::TestProject;

const CONFIG: &str = r#"store = "ledger.db"
files = "workspace"
[tools.read_file]
kind = "builtin"
[tools.write_file]
kind = "builtin"
[tools.list_files]
kind = "builtin"
[[policy]]
name = "read_first"
rule = "read_before_write"
"#;

fn workspace_project() -> TestProject {
    let project = TestProject::new();
    project.write("project/workspace/notes.txt", "one");
    project.write("project/secret.txt", "hunter2");
    project.write("project/toolgate.toml", CONFIG);
    project.run(&["trust"], "");
    project
}

/// Makes a call in a session that several processes share, and returns the result.
fn call_in_session(project: &TestProject, tool: &str, arguments: &Value) -> Value {
    let meta = json!({"toolgate/session": "s"});
    let call = json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": tool, "arguments": arguments, "_meta": meta}});
    let messages = exchange_over_stdio(project, &[call]);
    messages.into_iter().find(|message| message["id"] == 7).unwrap()["result"].take()
}

fn call_code(project: &TestProject, tool: &str, arguments: &Value) -> String {
    let result = call_in_session(project, tool, arguments);
    match result["isError"].as_bool() {
        Some(true) => result["_meta"]["toolgate/error"]["code"]
            .as_str()
            .unwrap_or_else(|| panic!("{result}"))
            .to_owned(),
        _ => "ok".to_owned(),
    }
}

#[test]
fn existing_file_must_be_read_before_write() {
    let project = workspace_project();
    let notes = || std::fs::read_to_string(project.path("project/workspace/notes.txt")).unwrap();
    let overwrite = |text: &str| json!({"path": "notes.txt", "content": text});
    let (lint_code, stdout, stderr) = project.run(&["lint", "--config", "toolgate.toml"], "");
    assert!(lint_code == 0 && stdout.contains("no findings"), "{stdout}{stderr}");
    // `check` predicts the result, and has no effect.
    let call = json!({"tool": "write_file", "arguments": overwrite("two")}).to_string();
    let (_, stdout, stderr) = project.run(&["check", "--config", "toolgate.toml", "--json"], &call);
    assert!(stdout.contains("read_before_write"), "{stdout}{stderr}");
    let refused =
        call_in_session(&project, "write_file", &overwrite("two"))["_meta"]["toolgate/error"]
            .clone();
    assert_eq!(
        (&refused["code"], &refused["next"]["tool"]),
        (&json!("read_before_write"), &json!("read_file")),
        "{refused}"
    );
    assert_eq!(notes(), "one");
    assert_eq!(
        call_in_session(&project, "read_file", &json!({"path": "notes.txt"}))["structuredContent"]
            ["content"],
        "one"
    );
    assert_eq!(call_code(&project, "write_file", &overwrite("two")), "ok");
    assert_eq!(notes(), "two");
    // A file that changed after the agent read it is not overwritten.
    project.write("project/workspace/notes.txt", "three");
    assert_eq!(call_code(&project, "write_file", &overwrite("four")), "stale_read");
    assert_eq!(notes(), "three");
    // A new file needs no read.
    assert_eq!(
        call_code(&project, "write_file", &json!({"path": "new/deep.txt", "content": "x"})),
        "ok"
    );
    let listed =
        call_in_session(&project, "list_files", &json!({}))["structuredContent"]["files"].clone();
    assert_eq!(listed, json!(["new/deep.txt", "notes.txt"]));
    let (verify_code, _, stderr) = project.run(&["audit", "verify", "--store", "ledger.db"], "");
    assert_eq!(verify_code, 0, "{stderr}");
    // The journals of ended processes are removed.
    let journals =
        std::fs::read_dir(project.path("project/ledger.db.state/files")).unwrap().flatten();
    let journal_count: usize = journals
        .map(|root| {
            std::fs::read_dir(root.path())
                .unwrap()
                .flatten()
                .filter(|entry| entry.path().is_dir())
                .count()
        })
        .sum();
    assert!(journal_count <= 1, "{journal_count}");
}

#[test]
fn workspace_tools_refuse_outside_paths() {
    let project = workspace_project();
    std::os::unix::fs::symlink(
        project.path("project/secret.txt"),
        project.path("project/workspace/link"),
    )
    .unwrap();
    for path in ["../secret.txt", "link", "/etc/passwd", "a/../../secret.txt"] {
        let code = call_code(&project, "read_file", &json!({"path": path}));
        assert!(["invalid_path", "path_forbidden"].contains(&&*code), "{path}: {code}");
    }
    assert_ne!(
        call_code(&project, "write_file", &json!({"path": "../toolgate.toml", "content": "x"})),
        "ok"
    );
    assert_eq!(std::fs::read_to_string(project.path("project/toolgate.toml")).unwrap(), CONFIG);
}

#[test]
fn unfinished_write_is_undone_after_kill_and_finished_stays() {
    let project = workspace_project();
    let notes = || std::fs::read_to_string(project.path("project/workspace/notes.txt")).unwrap();
    assert_eq!(
        call_code(&project, "write_file", &json!({"path": "other.txt", "content": "x"})),
        "ok"
    );
    let (_, rows, stderr) = project
        .run(&["audit", "query", "--store", "ledger.db", "--tool", "write_file", "--json"], "");
    let row: Value = serde_json::from_str(rows.lines().next().unwrap())
        .unwrap_or_else(|_| panic!("{rows}{stderr}"));
    let succeeded = row["row"]["call"].as_str().unwrap_or_else(|| panic!("{row}"));
    let journals = std::fs::read_dir(project.path("project/ledger.db.state/files"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    for (call, expected) in
        [("01a10000-0000-7000-8000-000000000001", "one"), (succeeded, "half done")]
    {
        // A killed process leaves these files during a write.
        let journal = journals.join("left");
        std::fs::create_dir_all(&journal).unwrap();
        std::fs::write(journal.join("lock"), "").unwrap();
        let head = json!({"call": call, "path": "notes.txt", "old": 3, "new": 9, "made": []});
        std::fs::write(
            journal.join(format!("{call}.000000.undo")),
            format!("{head}\nonehalf done"),
        )
        .unwrap();
        project.write("project/workspace/notes.txt", "half done");
        assert_eq!(call_code(&project, "list_files", &json!({})), "ok");
        assert_eq!(notes(), expected, "{call}");
        assert!(!journal.exists());
    }
}

#[test]
fn client_files_are_not_workspace_files() {
    let project = workspace_project();
    let event = json!({"session_id": "c", "cwd": project.path("project"), "hook_event_name": "PreToolUse", "tool_name": "write_file",
        "tool_input": {"path": "other.txt", "content": "x"}, "tool_use_id": "t1"});
    // The file may exist where the client writes it, and toolgate cannot check that. So the call is
    // denied.
    let (code, stdout, stderr) = project.run(&["hook"], &event.to_string());
    assert!(code == 2 || stdout.contains("\"deny\""), "{code} {stdout} {stderr}");
    assert!(format!("{stdout}{stderr}").contains("read_first"), "{stdout} {stderr}");
    let (code, stdout, stderr) = project.run(&["doctor"], "");
    assert!(
        !format!("{stdout}{stderr}").contains("cannot use the directory"),
        "{code} {stdout} {stderr}"
    );
}

#[test]
fn workspace_must_not_contain_toolgate_files() {
    for (files, why) in [
        (".", "controls toolgate"),
        ("ledger.db.state/files", "belongs to toolgate"),
        ("nowhere", "No such file"),
        // These directories contain a key, the linked ledger, settings of a client, or a hook.
        ("keys", "controls toolgate"),
        ("ledgers", "controls toolgate"),
        (".claude", "controls toolgate"),
        ("scripts", "controls toolgate"),
        ("link", "controls toolgate"),
    ] {
        let project = workspace_project();
        project.write("project/keys/key", "hunter2");
        project.write("project/.claude/other", "");
        project.write("project/scripts/hook.py", "");
        project.write("project/ledgers/other", "");
        std::os::unix::fs::symlink(project.path("project/keys"), project.path("project/link"))
            .unwrap();
        // This call creates the ledger.
        assert_eq!(call_code(&project, "list_files", &json!({})), "ok");
        if files == "ledgers" {
            for name in ["ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.state"] {
                let _ = std::fs::rename(
                    project.path(&format!("project/{name}")),
                    project.path(&format!("project/ledgers/{name}")),
                );
            }
            std::os::unix::fs::symlink(
                project.path("project/ledgers/ledger.db"),
                project.path("project/ledger.db"),
            )
            .unwrap();
        }
        let extra_config = "[tools.get]\nkind = \"http\"\neffect = \"read\"\nurl = \"https://a.example\"\nheaders = { k = { file = \"keys/key\" } }\n\
            [[hooks]]\nname = \"h\"\ncommand = \"python3\"\nargs = [\"scripts/hook.py\"]\n";
        project.write(
            "project/toolgate.toml",
            &(CONFIG.replace("\"workspace\"", &format!("{files:?}")) + extra_config),
        );
        project.run(&["trust"], "");
        let (code, _, stderr) = project.run(&["serve", "--stdio", "--config", "toolgate.toml"], "");
        assert!(
            code == 2 && stderr.contains(why) && stderr.contains("toolgate.toml:2:"),
            "{files}: {code} {stderr}"
        );
    }
}
