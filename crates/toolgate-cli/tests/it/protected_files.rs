//! Tests that agents can neither read the state of toolgate nor change its files.

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

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
