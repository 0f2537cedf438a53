//! Tests that agents can neither read the state of toolgate nor change its files.

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use crate::gateway::ServeProcess;
use crate::hook::{TestProject, decision};

const CONFIG: &str = r#"
name = "coder"

[tools.bash]
kind = "client"
policy = "open"
shell = "/command"

[tools.grep]
kind = "client"
effect = "read"

[tools.glob]
kind = "client"
effect = "read"

[tools.look_grep]
kind = "client"
effect = "read"
input = { type = "object", properties = { query = { type = "string" }, directory = { type = "string" } } }
"#;

const OWN_STATE_REASON: &str = "Agents must not access toolgate's own state.";
const READS_OWN_STATE_REASON: &str = "This would read toolgate's own state";
const OWN_FILES_REASON: &str = "Agents must not change";
const UNDECIDABLE_REASON: &str = "Toolgate cannot determine what this call does: the files that it writes or removes are known only when it runs.";

fn assert_decisions(project: &TestProject, cases: Vec<(&str, Value, &str, &str)>) {
    for (n, (tool, input, expected, reason)) in cases.into_iter().enumerate() {
        let answer = project.pre_tool_use(&format!("t{n}"), tool, input.clone());
        let (decided, why) = decision(&answer);
        assert!(decided == expected && why.starts_with(reason), "{tool} {input}: {answer}");
    }
}

#[test]
fn unpacking_over_own_files_asks_and_download_is_denied() {
    let project = TestProject::with_config(CONFIG);
    let bash = |command: &str, expected: &'static str, reason: &'static str| {
        ("Bash", json!({"command": command}), expected, reason)
    };
    let at = |name: &str| project.path(name).display().to_string();
    let cases = vec![
        bash("tar xzf a.tgz", "ask", UNDECIDABLE_REASON),
        bash("tar xzf a.tgz -C .claude", "ask", UNDECIDABLE_REASON),
        bash("tar xzf a.tgz -C ~", "ask", UNDECIDABLE_REASON),
        bash(&format!("unzip a.zip -d {}", at("project")), "ask", UNDECIDABLE_REASON),
        bash("cd ~/.local/state && unzip ~/a.zip", "ask", UNDECIDABLE_REASON),
        bash("git clone https://x.example/a .claude", "ask", UNDECIDABLE_REASON),
        bash("git clean -fd", "ask", UNDECIDABLE_REASON),
        bash("tar xzf a.tgz -C ~/.local/state/toolgate", "deny", OWN_STATE_REASON),
        bash("curl -o toolgate.toml https://x.example", "deny", OWN_FILES_REASON),
        bash("wget https://x.example/toolgate.toml", "deny", OWN_FILES_REASON),
        bash("cp --target-directory=.claude x", "deny", OWN_FILES_REASON),
        bash("git -C . checkout HEAD~1 -- .claude", "deny", OWN_FILES_REASON),
        bash("tar xzf a.tgz -C /nowhere/x", "none", ""),
        bash("cd /nowhere/x && tar xzf a.tgz", "none", ""),
        bash("unzip a.zip -d build", "none", ""),
        bash("git checkout topic", "none", ""),
        bash("git stash", "none", ""),
        bash("npm install", "none", ""),
        bash("cargo build", "none", ""),
        bash("pip install x", "none", ""),
        bash("zip -r a.zip src", "none", ""),
        bash(
            &format!("cd /nowhere && git -C {} clean -fd", at("project")),
            "ask",
            UNDECIDABLE_REASON,
        ),
        bash("python3 -m pip install -t .claude x", "ask", UNDECIDABLE_REASON),
        bash(&format!("git -C {} checkout topic", at("project")), "none", ""),
        bash("git apply x.patch", "none", ""),
        bash("patch -p1 < x.patch", "none", ""),
        bash("curl -o page.html https://x.example", "none", ""),
    ];
    assert_decisions(&project, cases);
}

#[test]
fn search_above_state_directory_is_denied_with_hint() {
    let project = TestProject::with_config(CONFIG);
    let at = |name: &str| project.path(name).display().to_string();
    let grep = |path: Value, expected: &'static str, reason: &'static str| {
        ("Grep", json!({"pattern": "x", "path": path}), expected, reason)
    };
    let bash = |command: &str, expected: &'static str, reason: &'static str| {
        ("Bash", json!({"command": command}), expected, reason)
    };
    let cases = vec![
        ("Grep", json!({"pattern": "x"}), "none", ""),
        ("Grep", json!({"pattern": at("")}), "none", ""),
        grep(json!(null), "none", ""),
        grep(json!("."), "none", ""),
        grep(json!("src"), "none", ""),
        grep(json!(at("project")), "none", ""),
        grep(json!(at("")), "deny", READS_OWN_STATE_REASON),
        grep(json!("~"), "deny", READS_OWN_STATE_REASON),
        grep(json!("~/.local"), "deny", READS_OWN_STATE_REASON),
        grep(json!(".."), "deny", READS_OWN_STATE_REASON),
        grep(json!("/"), "deny", READS_OWN_STATE_REASON),
        grep(json!("~/.local/state/toolgate"), "deny", OWN_STATE_REASON),
        ("look_grep", json!({"query": "x", "directory": "~"}), "deny", READS_OWN_STATE_REASON),
        ("look_grep", json!({"query": "~", "directory": "src"}), "none", ""),
        // `Glob` returns only names.
        ("Glob", json!({"pattern": "*", "path": at("")}), "none", ""),
        bash("ls -R ~", "none", ""),
        bash("grep -rn x .", "none", ""),
        bash("rg x", "none", ""),
        bash(&format!("grep -rn x {}", at("project")), "none", ""),
        bash("grep -rn --exclude-dir=.local x ~", "none", ""),
        bash("grep -rn x ~", "deny", READS_OWN_STATE_REASON),
        bash("cd ~ && rg x", "deny", READS_OWN_STATE_REASON),
        bash("cd .. && rg x", "deny", READS_OWN_STATE_REASON),
        bash("cd --; rg x", "deny", READS_OWN_STATE_REASON),
        bash("cd ~; grep -r x </dev/null", "deny", READS_OWN_STATE_REASON),
        bash("tar czf - --exclude=.local ~", "deny", READS_OWN_STATE_REASON),
        bash("rg x src", "none", ""),
        bash("grep -rn x src", "none", ""),
        bash("grep -r x . < /dev/null", "none", ""),
        bash("tar czf - ~ | head", "deny", READS_OWN_STATE_REASON),
        bash("find ~ -type f -exec cat {} +", "ask", "Toolgate cannot determine"),
        bash("cat ~/.local/state/toolgate/key", "deny", OWN_STATE_REASON),
    ];
    assert_decisions(&project, cases);
    let answer = project.pre_tool_use("last", "Grep", json!({"pattern": "y", "path": "~"}));
    assert!(
        decision(&answer).1.contains("Search a directory that does not contain it."),
        "{answer}"
    );
    // If the ledger is in the project, a search of the project would read it.
    let project = TestProject::with_config(&format!("store = \"ledger.db\"\n{CONFIG}"));
    let cases = vec![
        ("Grep", json!({"pattern": "x"}), "deny", READS_OWN_STATE_REASON),
        grep(json!("."), "deny", READS_OWN_STATE_REASON),
        grep(json!("src"), "none", ""),
        bash("grep -rn x .", "deny", READS_OWN_STATE_REASON),
        bash("grep -rn x src", "none", ""),
        bash("git grep x", "none", ""),
    ];
    assert_decisions(&project, cases);
}

#[test]
fn check_protects_own_files_from_subdirectory() {
    let project = TestProject::with_config(CONFIG);
    project.write("project/src/a.rs", "");
    // A link to itself must not cause an endless loop.
    std::os::unix::fs::symlink("settings.json/x", project.path("project/src/settings.json"))
        .unwrap();
    let settings = project.path("project/.claude/settings.json");
    let call = json!({"tool": "bash", "arguments": {"command": format!("echo {{}} > {}", settings.display())}});
    for verb in ["check", "explain"] {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.set_environment(&mut command);
        command.current_dir(project.path("project/src"));
        let output = assert_cmd::Command::from_std(command)
            .args([verb, &call.to_string()])
            .output()
            .unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert!(stdout.contains(OWN_FILES_REASON), "{verb}: {stdout}");
    }
}

#[test]
fn gateway_tools_cannot_change_toolgate_files() {
    let text = "type = \"string\"";
    let project = TestProject::with_config(&format!(
        "store = \"ledger.db\"\nname = \"coder\"\n[tools.write_note]\nkind = \"command\"\ncommand = \"tee\"\nargs = [\"{{/path}}\"]\npolicy = \"open\"\n\
         input = {{ type = \"object\", properties = {{ path = {{ {text} }} }} }}\n\
         [tools.read_note]\nkind = \"command\"\ncommand = \"cat\"\nargs = [\"{{/path}}\"]\neffect = \"read\"\n\
         input = {{ type = \"object\", properties = {{ path = {{ {text} }} }} }}\n\
         [tools.grep_notes]\nkind = \"command\"\ncommand = \"grep\"\nargs = [\"-r\", \"x\", \"{{/path}}\"]\neffect = \"read\"\n\
         input = {{ type = \"object\", properties = {{ path = {{ {text} }} }} }}\n"
    ));
    let gateway = ServeProcess::start(&project);
    for (tool, path, code) in [
        ("grep_notes", project.path("project").display().to_string(), "own_state"),
        ("grep_notes", "..".to_owned(), "own_state"),
        ("write_note", project.path("project/toolgate.toml").display().to_string(), "own_files"),
        ("write_note", "toolgate.toml".to_owned(), "own_files"),
        ("read_note", project.path("project/ledger.db").display().to_string(), "own_state"),
        (
            "read_note",
            project.path("project/ledger.db.state/keys/seal.key").display().to_string(),
            "own_state",
        ),
    ] {
        let body = gateway.post(
            "/v1/calls/check",
            "",
            &json!({"id": path, "session": "s", "tool": tool, "arguments": {"path": path}}),
        );
        let answer: Value = serde_json::from_str(&body).unwrap_or_else(|_| panic!("{body}"));
        assert_eq!(
            (answer["decision"].as_str(), answer["error"]["code"].as_str()),
            (Some("deny"), Some(code)),
            "{tool} {path}: {body}"
        );
    }
    let notes = json!({"id": "notes", "session": "notes", "tool": "grep_notes", "arguments": {"path": "notes"}});
    assert!(gateway.post("/v1/calls/check", "", &notes).contains("\"allow\""));
    // Text that only resembles a path of toolgate is allowed.
    for (n, text) in [
        "toolgate",
        "repo:toolgate",
        "toolgate/docs",
        "config.toml",
        "settings.json",
        "hooks.json",
        "state",
        "team=state",
    ]
    .iter()
    .enumerate()
    {
        for tool in ["read_note", "write_note"] {
            let body = gateway.post(
                "/v1/calls/check",
                "",
                &json!({"id": format!("{tool}{n}"), "session": format!("{tool}{n}"), "tool": tool, "arguments": {"path": text}}),
            );
            assert!(body.contains("\"allow\""), "{tool} {text}: {body}");
        }
    }
    // A report may have a null result with an error.
    let call = json!({"id": "read_note0", "session": "read_note0", "tool": "read_note", "arguments": {"path": "toolgate"}});
    let report_with = |fields: Value| {
        let mut report = call.clone();
        report.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        gateway.post("/v1/calls/report", "", &report)
    };
    let body =
        report_with(json!({"result": null, "error": {"message": "it broke", "effects": "none"}}));
    assert!(body.contains("client_tool_failed"), "{body}");
}

#[test]
fn paths_through_links_and_proc_ask() {
    let project = TestProject::with_config(
        "store = \"ledger.db\"\nname = \"coder\"\n[tools.write]\nkind = \"client\"\npolicy = \"open\"\n[tools.read]\nkind = \"client\"\neffect = \"read\"\n",
    );
    let long = "a=b, ".repeat(40) + "and so on";
    for (tool, path, decision) in [
        ("Write", "/proc/self/cwd/toolgate.toml", "ask"),
        ("Write", "/proc/self/cwd/.claude/settings.json", "ask"),
        ("Write", "/tmp/x/../project/toolgate.toml", "ask"),
        ("Read", "/proc/self/fd/3/ledger.db", "ask"),
        ("Write", "/proc/sys/kernel/x", "{}"),
        ("Write", long.as_str(), "{}"),
        ("Write", "src/main.rs", "{}"),
    ] {
        let event = json!({"hook_event_name": "PreToolUse", "session_id": "s", "tool_name": tool, "tool_use_id": path, "tool_input": {"file_path": path}});
        let (_, stdout, stderr) =
            project.run(&["hook", "--config", "toolgate.toml"], &event.to_string());
        assert!(stdout.contains(decision), "{path}: {stdout}{stderr}");
    }
}
