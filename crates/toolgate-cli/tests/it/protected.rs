//! What is toolgate's own, and no word of a call names.

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use crate::hook::{Project, decision};

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

const STATE: &str = "Agents must not access toolgate's own state.";
const UNDER: &str = "This would read toolgate's own state";
const FILES: &str = "Agents must not change";
const UNTOLD: &str = "Toolgate cannot determine what this call does: the files that it writes or removes are known only when it runs.";

fn each(project: &Project, cases: Vec<(&str, Value, &str, &str)>) {
    for (n, (tool, input, expected, reason)) in cases.into_iter().enumerate() {
        let answer = project.before(&format!("t{n}"), tool, input.clone());
        let (said, why) = decision(&answer);
        assert!(said == expected && why.starts_with(reason), "{tool} {input}: {answer}");
    }
}

#[test]
fn what_is_unpacked_over_it_is_asked_about_and_what_is_fetched_over_it_refused() {
    let project = Project::with(CONFIG);
    let bash = |command: &str, said: &'static str, why: &'static str| ("Bash", json!({"command": command}), said, why);
    let at = |name: &str| project.path(name).display().to_string();
    let cases = vec![
        bash("tar xzf a.tgz", "ask", UNTOLD),
        bash("tar xzf a.tgz -C .claude", "ask", UNTOLD),
        bash("tar xzf a.tgz -C ~", "ask", UNTOLD),
        bash(&format!("unzip a.zip -d {}", at("project")), "ask", UNTOLD),
        bash("cd ~/.local/state && unzip ~/a.zip", "ask", UNTOLD),
        bash("git clone https://x.example/a .claude", "ask", UNTOLD),
        bash("git clean -fd", "ask", UNTOLD),
        bash("tar xzf a.tgz -C ~/.local/state/toolgate", "deny", STATE),
        bash("curl -o toolgate.toml https://x.example", "deny", FILES),
        bash("wget https://x.example/toolgate.toml", "deny", FILES),
        bash("cp --target-directory=.claude x", "deny", FILES),
        bash("git -C . checkout HEAD~1 -- .claude", "deny", FILES),
        bash("tar xzf a.tgz -C /nowhere/x", "none", ""),
        bash("cd /nowhere/x && tar xzf a.tgz", "none", ""),
        bash("unzip a.zip -d build", "none", ""),
        bash("git checkout topic", "none", ""),
        bash("git stash", "none", ""),
        bash("npm install", "none", ""),
        bash("cargo build", "none", ""),
        bash("pip install x", "none", ""),
        bash("zip -r a.zip src", "none", ""),
        bash(&format!("cd /nowhere && git -C {} clean -fd", at("project")), "ask", UNTOLD),
        bash("python3 -m pip install -t .claude x", "ask", UNTOLD),
        bash(&format!("git -C {} checkout topic", at("project")), "none", ""),
        bash("git apply x.patch", "none", ""),
        bash("patch -p1 < x.patch", "none", ""),
        bash("curl -o page.html https://x.example", "none", ""),
    ];
    each(&project, cases);
}

#[test]
fn a_search_above_the_state_is_refused_and_says_what_to_do() {
    let project = Project::with(CONFIG);
    let at = |name: &str| project.path(name).display().to_string();
    let grep = |path: Value, said: &'static str, why: &'static str| ("Grep", json!({"pattern": "x", "path": path}), said, why);
    let bash = |command: &str, said: &'static str, why: &'static str| ("Bash", json!({"command": command}), said, why);
    let cases = vec![
        ("Grep", json!({"pattern": "x"}), "none", ""),
        ("Grep", json!({"pattern": at("")}), "none", ""),
        grep(json!(null), "none", ""),
        grep(json!("."), "none", ""),
        grep(json!("src"), "none", ""),
        grep(json!(at("project")), "none", ""),
        grep(json!(at("")), "deny", UNDER),
        grep(json!("~"), "deny", UNDER),
        grep(json!("~/.local"), "deny", UNDER),
        grep(json!(".."), "deny", UNDER),
        grep(json!("/"), "deny", UNDER),
        grep(json!("~/.local/state/toolgate"), "deny", STATE),
        ("look_grep", json!({"query": "x", "directory": "~"}), "deny", UNDER),
        ("look_grep", json!({"query": "~", "directory": "src"}), "none", ""),
        // Names alone are shown.
        ("Glob", json!({"pattern": "*", "path": at("")}), "none", ""),
        bash("ls -R ~", "none", ""),
        bash("grep -rn x .", "none", ""),
        bash("rg x", "none", ""),
        bash(&format!("grep -rn x {}", at("project")), "none", ""),
        bash("grep -rn --exclude-dir=.local x ~", "none", ""),
        bash("grep -rn x ~", "deny", UNDER),
        bash("cd ~ && rg x", "deny", UNDER),
        bash("cd .. && rg x", "deny", UNDER),
        bash("cd --; rg x", "deny", UNDER),
        bash("cd ~; grep -r x </dev/null", "deny", UNDER),
        bash("tar czf - --exclude=.local ~", "deny", UNDER),
        bash("rg x src", "none", ""),
        bash("grep -rn x src", "none", ""),
        bash("grep -r x . < /dev/null", "none", ""),
        bash("tar czf - ~ | head", "deny", UNDER),
        bash("find ~ -type f -exec cat {} +", "ask", "It cannot be told"),
        bash("cat ~/.local/state/toolgate/key", "deny", STATE),
    ];
    each(&project, cases);
    let answer = project.before("last", "Grep", json!({"pattern": "y", "path": "~"}));
    assert!(decision(&answer).1.contains("Search a directory that does not contain it."), "{answer}");
    // Where the ledger stands in the project, that is above it.
    let project = Project::with(&format!("store = \"ledger.db\"\n{CONFIG}"));
    let cases = vec![
        ("Grep", json!({"pattern": "x"}), "deny", UNDER),
        grep(json!("."), "deny", UNDER),
        grep(json!("src"), "none", ""),
        bash("grep -rn x .", "deny", UNDER),
        bash("grep -rn x src", "none", ""),
        bash("git grep x", "none", ""),
    ];
    each(&project, cases);
}

#[test]
fn who_tries_a_call_may_stand_further_down_in_the_project() {
    let project = Project::with(CONFIG);
    project.write("project/src/a.rs", "");
    // A link that leads to itself does not keep anybody busy.
    std::os::unix::fs::symlink("settings.json/x", project.path("project/src/settings.json")).unwrap();
    let settings = project.path("project/.claude/settings.json");
    let call = json!({"tool": "bash", "arguments": {"command": format!("echo {{}} > {}", settings.display())}});
    for verb in ["check", "explain"] {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.environment(&mut command);
        command.current_dir(project.path("project/src"));
        let output = assert_cmd::Command::from_std(command).args([verb, &call.to_string()]).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains(FILES), "{verb}: {said}");
    }
}
