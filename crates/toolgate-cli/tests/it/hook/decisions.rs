//! Tests the decision of the hook for single calls.

use serde_json::{Value, json};

use super::{CONFIG, TestProject, decision};

const CHANGES_OWN_FILES: &str = "Agents must not change";
const RUNS_TOOLGATE: &str = "Agents must not run this command";

#[test]
fn hook_answers_deny_allow_ask_or_nothing() {
    let project = TestProject::with_config(CONFIG);
    let settings = project.path("project/.claude/settings.json").display().to_string();
    let changed = |path: String| {
        ("Write", json!({"file_path": path, "content": ""}), "deny", CHANGES_OWN_FILES)
    };
    let bash = |command: &str, expected: &'static str, reason: &'static str| {
        ("Bash", json!({"command": command}), expected, reason)
    };
    let cases = [
        // Another program may read these paths differently.
        changed(format!("{settings}\n")),
        changed(format!(" {settings}")),
        changed(settings.replace("/settings", "/x\n/../settings")),
        changed(settings.replace("/.claude", &format!("/{}.claude", "./".repeat(2_100)))),
        changed("toolgate.toml\n".to_owned()),
        changed("\t.claude/settings.json \n".to_owned()),
        (
            "Write",
            json!({"file_path": "notes.md", "content": "// see\nfile=toolgate.toml, and so on\n"}),
            "none",
            "",
        ),
        // The content of a file is not a path.
        (
            "Write",
            json!({"file_path": ".gitignore", "content": ".claude/settings.json\n"}),
            "none",
            "",
        ),
        (
            "Write",
            json!({"file_path": "notes.md", "edits": [{"old_string": "  toolgate.toml", "newText": "toolgate.toml\n"}]}),
            "none",
            "",
        ),
        (
            "Write",
            json!({"file_path": "notes.md", "old_string": "settings.json", "new_string": "toolgate.toml"}),
            "none",
            "",
        ),
        ("Write", json!({"content": "toolgate.toml"}), "deny", CHANGES_OWN_FILES),
        (
            "Write",
            json!({"file_path": "x", "new_string": "--- a/x\n+++ b/.claude/settings.json\n"}),
            "deny",
            CHANGES_OWN_FILES,
        ),
        ("Bash", json!({"command": "ls", "description": "List"}), "none", ""),
        bash("git push", "deny", "Do not push from here."),
        bash("x=push; git $x", "deny", "Do not push from here."),
        bash("rm x", "ask", "This deletes something."),
        bash(
            "python3 -c 1",
            "ask",
            "Toolgate cannot determine what this call does: `python3` has code that can run anything.",
        ),
        ("Read", json!({"file_path": "/x/a.txt"}), "allow", ""),
        ("Grep", json!({}), "deny", "there is no tool `grep`"),
        bash("cat toolgate.toml", "none", ""),
        bash(
            "echo x > toolgate.toml",
            "deny",
            "Agents must not change the files that control them.",
        ),
        bash(
            "sed -i s/deny/ask/ toolgate.toml",
            "deny",
            "Agents must not change the files that control them.",
        ),
        bash("cp x $(ls *.toml)", "ask", "Toolgate cannot determine what this call does"),
        changed(project.path("project/toolgate.toml").display().to_string()),
        changed(project.path("project/.claude/settings.json").display().to_string()),
        ("Read", json!({"file_path": project.path("project/toolgate.toml")}), "allow", ""),
        (
            "Read",
            json!({"file_path": project.path("project/ledger.db.state/keys/seal.key")}),
            "deny",
            "Agents must not access",
        ),
        bash("cat ~/.local/state/toolgate/trusted.json", "deny", "Agents must not access"),
        bash("toolgate audit settle x --done", "deny", RUNS_TOOLGATE),
        bash("toolgate eject", "deny", RUNS_TOOLGATE),
        bash("toolgate explain c27a3fb5b2c8", "deny", RUNS_TOOLGATE),
        bash("echo x | toolgate hook", "deny", RUNS_TOOLGATE),
        bash("toolgate-hook --socket x", "deny", RUNS_TOOLGATE),
        changed(project.path("project/.github/hooks/toolgate.json").display().to_string()),
        bash("cat settings.json package.json", "none", ""),
        bash("rm .claude/settings.json", "deny", CHANGES_OWN_FILES),
        bash("cd .claude && rm settings.json", "deny", CHANGES_OWN_FILES),
        bash("mv .claude x", "deny", CHANGES_OWN_FILES),
        bash("mv ./.claude* x", "ask", "Toolgate cannot determine"),
        bash("git rm -r .claude", "deny", CHANGES_OWN_FILES),
        (
            "Write",
            json!({"patch": "*** Begin Patch\n*** Update File: toolgate.toml\n@@\n-a\n+b\n*** End Patch"}),
            "deny",
            CHANGES_OWN_FILES,
        ),
        (
            "Write",
            json!({"patch": "--- a/x\n+++ b/.claude/settings.json\n"}),
            "deny",
            CHANGES_OWN_FILES,
        ),
        (
            "Write",
            json!({"content": "a page\nabout toolgate.toml\n", "file_path": "notes.md"}),
            "none",
            "",
        ),
        bash("toolgate audit query", "deny", RUNS_TOOLGATE),
        bash("toolgate serve --stdio --config /tmp/x.toml < m", "deny", RUNS_TOOLGATE),
        bash("toolgate replay s1", "deny", RUNS_TOOLGATE),
        bash("toolgate check --config x.toml", "none", ""),
    ];
    for (n, (tool, input, expected, reason)) in cases.into_iter().enumerate() {
        let answer = project.pre_tool_use(&format!("t{n}"), tool, input.clone());
        let (decided, why) = decision(&answer);
        assert!(decided == expected && why.starts_with(reason), "{tool} {input}: {answer}");
    }
    // The reason contains the error object for the model.
    let answer = project.pre_tool_use("t99", "Bash", json!({"command": "git push --all"}));
    let (_, reason) = decision(&answer);
    let (_, contract) = reason.split_once('\n').unwrap();
    let contract: Value = serde_json::from_str(contract).unwrap();
    assert_eq!((&contract["code"], &contract["isRetryable"]), (&json!("no_push"), &json!(false)));
}

#[test]
fn third_identical_call_is_loop_across_processes() {
    let project = TestProject::with_config(CONFIG);
    let decisions: Vec<String> = (0..3)
        .map(|n| {
            decision(&project.pre_tool_use(&format!("t{n}"), "Bash", json!({"command": "ls"})))
                .0
                .to_owned()
        })
        .collect();
    assert_eq!(decisions, ["none", "none", "deny"]);
}
