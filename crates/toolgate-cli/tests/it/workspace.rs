//! The files of an agent out of a configuration: read, written and rolled back by toolgate itself.

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

/// What becomes of a call in a session that several processes share.
fn call_in_session(project: &TestProject, tool: &str, arguments: &Value) -> Value {
    let meta = json!({"toolgate/session": "s"});
    let call = json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": tool, "arguments": arguments, "_meta": meta}});
    let heard = exchange_over_stdio(project, &[call]);
    heard.into_iter().find(|said| said["id"] == 7).unwrap()["result"].take()
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
    let (code_of_lint, said, stderr) = project.run(&["lint", "--config", "toolgate.toml"], "");
    assert!(code_of_lint == 0 && said.contains("no findings"), "{said}{stderr}");
    // `check` says beforehand what will become of it, and does nothing.
    let asked = json!({"tool": "write_file", "arguments": overwrite("two")}).to_string();
    let (_, said, stderr) = project.run(&["check", "--config", "toolgate.toml", "--json"], &asked);
    assert!(said.contains("read_before_write"), "{said}{stderr}");
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
    // What somebody else has changed since is not overwritten blindly.
    project.write("project/workspace/notes.txt", "three");
    assert_eq!(call_code(&project, "write_file", &overwrite("four")), "stale_read");
    assert_eq!(notes(), "three");
    // What is not there yet needs no reading.
    assert_eq!(
        call_code(&project, "write_file", &json!({"path": "new/deep.txt", "content": "x"})),
        "ok"
    );
    let listed =
        call_in_session(&project, "list_files", &json!({}))["structuredContent"]["files"].clone();
    assert_eq!(listed, json!(["new/deep.txt", "notes.txt"]));
    let (verified, _, stderr) = project.run(&["audit", "verify", "--store", "ledger.db"], "");
    assert_eq!(verified, 0, "{stderr}");
    // The journals of those who are gone are gone, too.
    let left = std::fs::read_dir(project.path("project/ledger.db.state/files")).unwrap().flatten();
    let left: usize = left
        .map(|root| {
            std::fs::read_dir(root.path())
                .unwrap()
                .flatten()
                .filter(|entry| entry.path().is_dir())
                .count()
        })
        .sum();
    assert!(left <= 1, "{left}");
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
        let said = call_code(&project, "read_file", &json!({"path": path}));
        assert!(["invalid_path", "path_forbidden"].contains(&&*said), "{path}: {said}");
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
    for (call, stays) in [("01a10000-0000-7000-8000-000000000001", "one"), (succeeded, "half done")]
    {
        // As one leaves it that is killed in the middle.
        let left = journals.join("left");
        std::fs::create_dir_all(&left).unwrap();
        std::fs::write(left.join("lock"), "").unwrap();
        let head = json!({"call": call, "path": "notes.txt", "old": 3, "new": 9, "made": []});
        std::fs::write(left.join(format!("{call}.000000.undo")), format!("{head}\nonehalf done"))
            .unwrap();
        project.write("project/workspace/notes.txt", "half done");
        assert_eq!(call_code(&project, "list_files", &json!({})), "ok");
        assert_eq!(notes(), stays, "{call}");
        assert!(!left.exists());
    }
}

#[test]
fn client_files_are_not_workspace_files() {
    let project = workspace_project();
    let event = json!({"session_id": "c", "cwd": project.path("project"), "hook_event_name": "PreToolUse", "tool_name": "write_file",
        "tool_input": {"path": "other.txt", "content": "x"}, "tool_use_id": "t1"});
    // It is not there in the workspace, and may be where the client writes it: nobody knows, so it
    // is refused. Others are judged as ever.
    let (code, said, stderr) = project.run(&["hook"], &event.to_string());
    assert!(code == 2 || said.contains("\"deny\""), "{code} {said} {stderr}");
    assert!(format!("{said}{stderr}").contains("read_first"), "{said} {stderr}");
    let (code, said, stderr) = project.run(&["doctor"], "");
    assert!(
        !format!("{said}{stderr}").contains("cannot use the directory"),
        "{code} {said} {stderr}"
    );
}

#[test]
fn workspace_must_not_contain_toolgate_files() {
    for (files, why) in [
        (".", "controls toolgate"),
        ("ledger.db.state/files", "belongs to toolgate"),
        ("nowhere", "No such file"),
        // It takes a key from there, the ledger is there by way of a link, and so would settings of
        // a client be.
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
        // The ledger is there already.
        assert_eq!(call_code(&project, "list_files", &json!({})), "ok");
        if files == "ledgers" {
            for end in ["ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.state"] {
                let _ = std::fs::rename(
                    project.path(&format!("project/{end}")),
                    project.path(&format!("project/ledgers/{end}")),
                );
            }
            std::os::unix::fs::symlink(
                project.path("project/ledgers/ledger.db"),
                project.path("project/ledger.db"),
            )
            .unwrap();
        }
        let key = "[tools.get]\nkind = \"http\"\neffect = \"read\"\nurl = \"https://a.example\"\nheaders = { k = { file = \"keys/key\" } }\n\
            [[hooks]]\nname = \"h\"\ncommand = \"python3\"\nargs = [\"scripts/hook.py\"]\n";
        project.write(
            "project/toolgate.toml",
            &(CONFIG.replace("\"workspace\"", &format!("{files:?}")) + key),
        );
        project.run(&["trust"], "");
        let (code, _, stderr) = project.run(&["serve", "--stdio", "--config", "toolgate.toml"], "");
        assert!(
            code == 2 && stderr.contains(why) && stderr.contains("toolgate.toml:2:"),
            "{files}: {code} {stderr}"
        );
    }
}
