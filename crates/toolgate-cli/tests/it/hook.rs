//! The door of coding agents: what a client asks, what it is answered, and that nothing is let through when something is wrong.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use assert_cmd::Command;
use assert_cmd::cargo::CommandCargoExt;
use regex::Regex;
use serde_json::{Value, json};

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
grant = true
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
reason = "Nobody pushes from here."

[[policy]]
name = "deletes"
rule = "ask"
tools = ["bash"]
where = [{ argument = "/command", runs = ["rm"] }]
reason = "This deletes something."
"#;

/// A home with a project in it.
pub(crate) struct Project {
    directory: tempfile::TempDir,
}

impl Project {
    pub(crate) fn new() -> Self {
        let project = Self { directory: tempfile::tempdir().unwrap() };
        std::fs::create_dir_all(project.path("project")).unwrap();
        project
    }

    pub(crate) fn with(config: &str) -> Self {
        let project = Self::new();
        project.write("project/toolgate.toml", config);
        project
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    pub(crate) fn environment(&self, command: &mut std::process::Command) {
        command.current_dir(self.path("project")).env_clear().env("HOME", self.path("")).env("PATH", "/usr/bin:/bin");
    }

    pub(crate) fn run(&self, args: &[&str], input: &str) -> (i32, String, String) {
        self.run_with(&[], args, input)
    }

    pub(crate) fn run_with(&self, variables: &[(&str, &str)], args: &[&str], input: &str) -> (i32, String, String) {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        self.environment(&mut command);
        command.envs(variables.iter().copied());
        let output = Command::from_std(command).args(args).write_stdin(input).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    /// What it says, without what is different every time.
    pub(crate) fn said(&self, args: &[&str], input: &str) -> String {
        let (code, stdout, stderr) = self.run(args, input);
        let text = format!("exit {code}\n{stdout}{stderr}").replace(self.directory.path().to_str().unwrap(), "HOME");
        let one = |pattern: &str, to: &str, text: &str| Regex::new(pattern).unwrap().replace_all(text, to).into_owned();
        let text = one("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "CALL", &text);
        let text = one("[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}Z", "TIME", &text);
        let text = one(r"[^ \x22']*/toolgate(-hook)?(['\x22 ,])", "TOOLGATE$1$2", &text);
        one(r"in [0-9.]+(µs|ms|s)\b", "in LENGTH", &text)
    }

    /// The answer to an event.
    fn hook(&self, event: &Value) -> Value {
        self.hook_as(&["hook", "--config", "toolgate.toml"], event)
    }

    pub(crate) fn hook_as(&self, args: &[&str], event: &Value) -> Value {
        let (code, stdout, stderr) = self.run(args, &event.to_string());
        assert_eq!((code, stderr.as_str()), (0, ""), "{event}");
        serde_json::from_str(&stdout).unwrap()
    }

    pub(crate) fn before(&self, id: &str, tool: &str, input: Value) -> Value {
        self.hook(&event("PreToolUse", id, tool, input))
    }

    fn rows(&self) -> Vec<Value> {
        let (_, stdout, stderr) = self.run(&["audit", "export", "--store", "ledger.db"], "");
        assert_eq!(stderr, "");
        stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn said_of(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let row = |row: &Value| (text(&row["row"]["decision"]), text(&row["row"]["outcome"]["error"]["code"]));
        let plain = |row: &Value| (text(&row["decision"]), text(&row["outcome"]["error"]["code"]));
        self.rows().iter().map(|line| if line["row"].is_object() { row(line) } else { plain(line) }).collect()
    }
}

pub(crate) fn event(name: &str, id: &str, tool: &str, input: Value) -> Value {
    json!({
        "hook_event_name": name, "session_id": "s1", "transcript_path": "/x", "cwd": "/", "permission_mode": "default", "effort": {"level": "x"},
        "tool_name": tool, "tool_input": input, "tool_use_id": id,
    })
}

fn after(id: &str, tool: &str, input: Value, response: Value) -> Value {
    let mut event = event("PostToolUse", id, tool, input);
    event["tool_response"] = response;
    event
}

pub(crate) fn decision(answer: &Value) -> (&str, &str) {
    let said = &answer["hookSpecificOutput"];
    (said["permissionDecision"].as_str().unwrap_or("none"), said["permissionDecisionReason"].as_str().unwrap_or_default())
}

#[test]
fn a_client_is_told_no_yes_or_ask_and_nothing_where_nothing_is_to_be_said() {
    let project = Project::with(CONFIG);
    let settings = project.path("project/.claude/settings.json").display().to_string();
    let changed = |path: String| ("Write", json!({"file_path": path, "content": ""}), "deny", "What decides about an agent");
    let cases = [
        // Whoever opens it may read it otherwise.
        changed(format!("{settings}\n")),
        changed(format!(" {settings}")),
        changed(settings.replace("/settings", "/x\n/../settings")),
        changed(settings.replace("/.claude", &format!("/{}.claude", "./".repeat(2_100)))),
        changed("toolgate.toml\n".to_owned()),
        changed("\t.claude/settings.json \n".to_owned()),
        ("Write", json!({"file_path": "notes.md", "content": "// see\nfile=toolgate.toml, and so on\n"}), "none", ""),
        // What a file holds is no file.
        ("Write", json!({"file_path": ".gitignore", "content": ".claude/settings.json\n"}), "none", ""),
        ("Write", json!({"file_path": "notes.md", "edits": [{"old_string": "  toolgate.toml", "newText": "toolgate.toml\n"}]}), "none", ""),
        ("Write", json!({"file_path": "notes.md", "old_string": "settings.json", "new_string": "toolgate.toml"}), "none", ""),
        ("Write", json!({"content": "toolgate.toml"}), "deny", "What decides about an agent"),
        ("Write", json!({"file_path": "x", "new_string": "--- a/x\n+++ b/.claude/settings.json\n"}), "deny", "What decides about an agent"),
        ("Bash", json!({"command": "ls", "description": "List"}), "none", ""),
        ("Bash", json!({"command": "git push"}), "deny", "Nobody pushes from here."),
        ("Bash", json!({"command": "x=push; git $x"}), "deny", "Nobody pushes from here."),
        ("Bash", json!({"command": "rm x"}), "ask", "This deletes something."),
        (
            "Bash",
            json!({"command": "python3 -c 1"}),
            "ask",
            "It cannot be told what this call does: `python3` has code that can run anything.",
        ),
        ("Read", json!({"file_path": "/x/a.txt"}), "allow", ""),
        ("Grep", json!({}), "deny", "there is no tool `grep`"),
        ("Bash", json!({"command": "cat toolgate.toml"}), "none", ""),
        ("Bash", json!({"command": "echo x > toolgate.toml"}), "deny", "What decides about an agent is not the agent's to change."),
        (
            "Bash",
            json!({"command": "sed -i s/deny/ask/ toolgate.toml"}),
            "deny",
            "What decides about an agent is not the agent's to change.",
        ),
        ("Bash", json!({"command": "cp x $(ls *.toml)"}), "ask", "It cannot be told what this call does"),
        ("Write", json!({"file_path": project.path("project/toolgate.toml"), "content": ""}), "deny", "What decides about an agent"),
        (
            "Write",
            json!({"file_path": project.path("project/.claude/settings.json"), "content": ""}),
            "deny",
            "What decides about an agent",
        ),
        ("Read", json!({"file_path": project.path("project/toolgate.toml")}), "allow", ""),
        ("Read", json!({"file_path": project.path("project/ledger.db.state/keys/seal.key")}), "deny", "toolgate's own state"),
        ("Bash", json!({"command": "cat ~/.local/state/toolgate/trusted.json"}), "deny", "toolgate's own state"),
        ("Bash", json!({"command": "toolgate audit settle x --done"}), "deny", "This answers for a person"),
        ("Bash", json!({"command": "toolgate eject"}), "deny", "This answers for a person"),
        ("Bash", json!({"command": "toolgate explain c27a3fb5b2c8"}), "deny", "This answers for a person"),
        ("Bash", json!({"command": "echo x | toolgate hook"}), "deny", "This answers for a person"),
        ("Bash", json!({"command": "toolgate-hook --socket x"}), "deny", "This answers for a person"),
        (
            "Write",
            json!({"file_path": project.path("project/.github/hooks/toolgate.json"), "content": ""}),
            "deny",
            "What decides about an agent",
        ),
        ("Bash", json!({"command": "cat settings.json package.json"}), "none", ""),
        ("Bash", json!({"command": "rm .claude/settings.json"}), "deny", "What decides about an agent"),
        ("Bash", json!({"command": "cd .claude && rm settings.json"}), "deny", "What decides about an agent"),
        ("Bash", json!({"command": "mv .claude x"}), "deny", "What decides about an agent"),
        ("Bash", json!({"command": "mv ./.claude* x"}), "ask", "It cannot be told"),
        ("Bash", json!({"command": "git rm -r .claude"}), "deny", "What decides about an agent"),
        (
            "Write",
            json!({"patch": "*** Begin Patch\n*** Update File: toolgate.toml\n@@\n-a\n+b\n*** End Patch"}),
            "deny",
            "What decides about an agent",
        ),
        ("Write", json!({"patch": "--- a/x\n+++ b/.claude/settings.json\n"}), "deny", "What decides about an agent"),
        ("Write", json!({"content": "a page\nabout toolgate.toml\n", "file_path": "notes.md"}), "none", ""),
        ("Bash", json!({"command": "toolgate audit query"}), "deny", "This answers for a person"),
        ("Bash", json!({"command": "toolgate serve --stdio --config /tmp/x.toml < m"}), "deny", "This answers for a person"),
        ("Bash", json!({"command": "toolgate replay s1"}), "deny", "This answers for a person"),
        ("Bash", json!({"command": "toolgate check --config x.toml"}), "none", ""),
    ];
    for (n, (tool, input, expected, reason)) in cases.into_iter().enumerate() {
        let answer = project.before(&format!("t{n}"), tool, input.clone());
        let (said, why) = decision(&answer);
        assert!(said == expected && why.starts_with(reason), "{tool} {input}: {answer}");
    }
    // A model reads in the reason what to do.
    let answer = project.before("t99", "Bash", json!({"command": "git push --all"}));
    let (_, reason) = decision(&answer);
    let (_, contract) = reason.split_once('\n').unwrap();
    let contract: Value = serde_json::from_str(contract).unwrap();
    assert_eq!((&contract["code"], &contract["isRetryable"]), (&json!("no_push"), &json!(false)));
}

#[test]
fn what_was_admitted_is_settled_once_and_only_as_it_was_admitted() {
    let project = Project::with(CONFIG);
    let ls = json!({"command": "ls"});
    assert_eq!(project.before("t1", "Bash", ls.clone()), json!({}));
    let done = json!({"stdout": "a\nb", "stderr": "", "interrupted": false});
    assert_eq!(project.hook(&after("t1", "Bash", ls.clone(), done.clone())), json!({}));
    let twice = project.hook(&after("t1", "Bash", ls.clone(), done.clone()));
    assert_eq!(twice["decision"], "block");
    assert_eq!(project.before("t2", "Bash", json!({"command": "pwd"})), json!({}));
    let other = project.hook(&after("t2", "Bash", json!({"command": "pwd; id"}), done.clone()));
    assert!(other["reason"].as_str().unwrap().starts_with("what was run is not what was admitted"), "{other}");
    let never = project.hook(&after("t3", "Bash", ls, done));
    assert!(never["reason"].as_str().unwrap().contains("never admitted"), "{never}");
    let said: Vec<(String, String)> = project.said_of();
    let expected = [("succeeded", ""), ("refused", "not_admitted"), ("failed", "not_as_admitted"), ("refused", "not_admitted")];
    assert_eq!(said, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    let (code, ..) = project.run(&["audit", "verify", "--store", "ledger.db"], "");
    assert_eq!(code, 0);
    let (code, stdout, _) = project.run(&["replay", "s1", "--store", "ledger.db"], "");
    assert_eq!(code, 0, "{stdout}");
}

#[test]
fn a_result_is_brought_into_shape_and_the_original_is_not_pointed_to() {
    let project = Project::with(CONFIG);
    let input = json!({"id": 7});
    assert_eq!(project.before("t1", "lookup", input.clone()), json!({}));
    let raw = json!({"created": 1_700_000_000, "persistedOutputPath": "/tmp/all", "persistedOutputSize": 5});
    let answer = project.hook(&after("t1", "lookup", input.clone(), raw));
    assert_eq!(answer["hookSpecificOutput"]["updatedToolOutput"], json!({"created": "2023-11-14T22:13:20Z"}));
    // What cannot be brought into shape is withheld.
    assert_eq!(project.before("t2", "lookup", json!({"id": 8})), json!({}));
    let answer = project.hook(&after("t2", "lookup", json!({"id": 8}), json!({"created": "soon", "text": "secret"})));
    assert_eq!(answer["decision"], "block");
    assert_eq!(answer["hookSpecificOutput"]["updatedToolOutput"], json!({"created": "(withheld)", "text": "(withheld)"}));
}

#[test]
fn no_result_is_shown_that_could_not_be_looked_at() {
    let shown = |answer: &Value| answer["hookSpecificOutput"]["updatedToolOutput"].clone();
    let project = Project::with(CONFIG);
    let lone = r#"{"hook_event_name":"PostToolUse","session_id":"s1","tool_name":"Bash","tool_input":{"command":"ls"},"tool_use_id":"t1","tool_response":{"stdout":"secret \ud83d"}}"#;
    assert_eq!(project.before("t1", "Bash", json!({"command": "ls"})), json!({}));
    let (code, stdout, _) = project.run(&["hook", "--config", "toolgate.toml"], lone);
    let answer: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &shown(&answer)["stdout"], &answer["decision"]), (0, &json!("(withheld)"), &json!("block")));
    assert_eq!(project.said_of(), [("failed".to_owned(), "unreadable_result".to_owned())]);
    // Of two keys of one name, another reader takes the other; so it is in the words of other clients.
    let twice = r#"{"ok":false,"ok":true}"#;
    for (id, name, result) in [
        ("d1", r#""hook_event_name":"PostToolUse","#, format!(r#""tool_response":{twice}"#)),
        ("d2", r#""hook_event_name":"PostToolUse","#, format!(r#""tool_result":{twice}"#)),
        ("d3", r#""hook_event_name":"postToolUse","#, format!(r#""tool_output":{}"#, json!(twice))),
        ("d4", "", format!(r#""tool_result":{twice}"#)),
    ] {
        assert_eq!(project.before(id, "lookup", json!({"id": id})), json!({}), "{id}");
        let told =
            format!(r#"{{{name}"session_id":"s1","tool_name":"lookup","tool_input":{{"id":"{id}"}},"tool_use_id":"{id}",{result}}}"#);
        let (code, stdout, stderr) = project.run(&["hook", "--config", "toolgate.toml"], &told);
        assert!(code == 0 && stdout.contains("(withheld)"), "{id}: {stdout}{stderr}");
        assert_eq!(project.said_of().last(), Some(&("failed".to_owned(), "unreadable_result".to_owned())), "{id}");
    }
    // An exit code would show it: so it is where the event itself cannot be understood.
    let told = r#""hook_event_name":"PostToolUse","session_id":"s1","tool_name":"Bash","tool_input":{"command":"pwd"},"tool_use_id":"m1","tool_response":{"stdout":"secret"}"#;
    for more in [r#""tool_response":{"stdout":"other"}"#, r#""tool_output":{}"#, r#""is_interrupt":null"#] {
        for args in [&["hook", "--config", "toolgate.toml"][..], &["hook", "--config", "nowhere.toml"]] {
            let (code, stdout, stderr) = project.run(args, &format!("{{{told},{more}}}"));
            let answer: Value = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{more}: {stderr}"));
            assert_eq!((code, shown(&answer), &answer["decision"]), (0, json!({"stdout": "(withheld)"}), &json!("block")), "{more}");
        }
        assert_eq!(project.said_of().last(), Some(&("refused".to_owned(), "invalid_request".to_owned())), "{more}");
    }
    // Nobody let it in, the store is gone, the configuration is gone, the service is not there.
    let response = json!({"stdout": "secret"});
    let never = project.hook(&after("t9", "Bash", json!({"command": "id"}), response.clone()));
    assert_eq!(shown(&never)["stdout"], "(withheld)");
    std::fs::remove_file(project.path("project/ledger.db")).unwrap();
    let gone = project.hook(&after("t1", "Bash", json!({"command": "ls"}), response.clone()));
    assert_eq!(shown(&gone)["stdout"], "(withheld)");
    for args in [&["hook", "--config", "nowhere.toml"][..], &["hook", "--socket", "nowhere.sock"]] {
        let gone = project.hook_as(args, &after("t1", "Bash", json!({"command": "ls"}), response.clone()));
        assert_eq!(shown(&gone)["stdout"], "(withheld)", "{args:?}");
    }
}

#[test]
fn calls_that_a_client_gives_no_name_are_not_taken_for_each_other() {
    for id in [json!(""), Value::Null] {
        let project = Project::with(CONFIG);
        let told = |mut event: Value| {
            event["tool_use_id"] = id.clone();
            project.hook(&event)
        };
        let (one, two) = (json!({"command": "ls"}), json!({"command": "pwd"}));
        for input in [&one, &two] {
            assert_eq!(told(event("PreToolUse", "", "Bash", input.clone())), json!({}), "{id}");
        }
        for input in [&one, &two] {
            assert_eq!(told(after("", "Bash", input.clone(), json!({"stdout": "x"}))), json!({}), "{id}");
        }
        assert!(project.said_of().iter().all(|(decision, _)| decision == "succeeded"), "{id}: {:?}", project.said_of());
    }
}

#[test]
fn another_ledger_in_the_place_of_one_is_noticed() {
    let project = Project::with(&format!("{CONFIG}\n[limits]\nsession = {{ calls = 2 }}\n"));
    assert_eq!(project.before("t1", "Bash", json!({"command": "ls"})), json!({}));
    std::fs::rename(project.path("project/ledger.db"), project.path("project/moved.db")).unwrap();
    std::os::unix::fs::symlink(project.path("project/fresh.db"), project.path("project/ledger.db")).unwrap();
    project.write("project/fresh.db", "");
    assert_eq!(decision(&project.before("t2", "Bash", json!({"command": "ls -l"}))).0, "deny");
}

#[test]
fn what_is_tried_meets_what_a_hook_meets() {
    let own = "name = \"coder\"\n[tools.bash]\nkind = \"client\"\nshell = \"/command\"\n[[policy]]\nname = \"no_curl\"\nrule = \"deny\"\ntools = [\"bash\"]\n\
               where = [{ argument = \"/command\", runs = [\"curl\"] }]\n";
    let project = Project::new();
    let tried = |args: &[&str], command: &str| {
        let call = json!({"tool": "bash", "arguments": {"command": command}}).to_string();
        let (code, said, told) = project.run(&[args, &[call.as_str()]].concat(), "");
        assert_eq!(code, 0, "{told}");
        said
    };
    // Also where there is only one's own file.
    project.write(".config/toolgate/toolgate.toml", own);
    assert!(tried(&["check"], "curl x.example").contains("no_curl"));
    project.write("project/toolgate.toml", CONFIG);
    for verb in ["check", "explain"] {
        assert!(tried(&[verb], "git push").contains("no_push"), "{verb}");
        assert!(tried(&[verb], "curl x.example").contains("no_curl"), "{verb}");
        assert!(tried(&[verb], "rm .claude/settings.json").contains("own_files"), "{verb}");
        assert!(tried(&[verb], "cat ~/.local/state/toolgate/key").contains("own_state"), "{verb}");
        assert!(tried(&[verb], "ls").starts_with("allow"), "{verb}");
        // A file that is named is all there is.
        for command in ["curl x.example", "cat ~/.local/state/toolgate/key"] {
            assert!(tried(&[verb, "--config", "toolgate.toml"], command).starts_with("allow"), "{verb} {command}");
        }
    }
    assert!(!project.path(".local").exists(), "nothing is touched");
}

#[test]
fn a_project_that_nobody_has_accepted_keeps_nobody_waiting() {
    let project = Project::new();
    project.write(".config/toolgate/toolgate.toml", CONFIG);
    assert!(std::process::Command::new("mkfifo").arg(project.path("pipe")).status().unwrap().success());
    let pipe = project.path("pipe").display().to_string();
    let hook = format!("[[hooks]]\nname = \"h\"\ncommand = \"{pipe}\"\nenv = {{ KEY = {{ file = \"{pipe}\" }} }}\n");
    // What holds is one's own.
    let holds = |id: &str, named: &str| {
        let call = event("PreToolUse", id, "Bash", json!({"command": format!("git push {id}")}));
        let answer = project.hook_as(&["hook"], &call);
        assert!(decision(&answer).1.contains("Nobody pushes"), "{named}: {answer}");
    };
    let files = [format!("include = [\"{pipe}\"]\n{CONFIG}"), format!("mcp_servers = [\"{pipe}\"]\n{CONFIG}"), format!("{CONFIG}{hook}")];
    for (n, named) in files.into_iter().enumerate() {
        project.write("project/toolgate.toml", &named);
        holds(&format!("a{n}"), &named);
        // Whoever looks at it hears what is wrong with it.
        let (code, _, said) = project.run(&["check", "--config", "toolgate.toml", "{\"tool\": \"bash\"}"], "");
        assert!(code == 2 && said.contains("it is no plain file"), "{named}: {said}");
        // The same where it was accepted as it was before.
        project.write("project/toolgate.toml", CONFIG);
        assert_eq!(project.run(&["trust"], "").0, 0);
        project.write("project/toolgate.toml", &named);
        holds(&format!("b{n}"), &named);
        assert_eq!(project.run(&["trust", "--revoke"], "").0, 0);
    }
}

#[test]
fn a_nearer_file_cannot_be_put_before_one_that_holds() {
    let project = Project::with(CONFIG);
    project.write(".config/toolgate/toolgate.toml", "[tools.write]\nkind = \"client\"\npolicy = \"open\"\n");
    assert_eq!(project.run(&["trust"], "").0, 0);
    std::fs::create_dir_all(project.path("project/inner")).unwrap();
    let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
    project.environment(&mut command);
    command.current_dir(project.path("project/inner"));
    let event = event("PreToolUse", "t1", "Write", json!({"file_path": project.path("project/inner/toolgate.toml"), "content": ""}));
    let output = Command::from_std(command).arg("hook").write_stdin(event.to_string()).output().unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().contains("own_files"));
}

#[test]
fn what_is_kept_ready_is_kept_for_one_environment() {
    let project = Project::with(&CONFIG.replace("store = \"ledger.db\"\n", ""));
    std::thread::sleep(std::time::Duration::from_millis(1_200));
    let run = |store: Option<&str>, id: &str| {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.environment(&mut command);
        command.envs(store.map(|store| ("TOOLGATE_STORE", store)));
        let event = event("PreToolUse", id, "Bash", json!({"command": format!("git push {id}")}));
        Command::from_std(command).args(["hook", "--config", "toolgate.toml"]).write_stdin(event.to_string()).output().unwrap();
    };
    let rows = |store: &Path| project.run(&["audit", "export", "--store", store.to_str().unwrap()], "").1.lines().count();
    (0..3).for_each(|n| run(None, &format!("a{n}")));
    (0..2).for_each(|n| run(Some("other.db"), &format!("b{n}")));
    assert_eq!((rows(&project.path(".local/state/toolgate/ledger.db")), rows(&project.path("project/other.db"))), (3, 2));
}

#[test]
fn a_tool_that_failed_is_over_and_one_that_was_cut_off_is_pending() {
    let project = Project::with(CONFIG);
    for (id, interrupted) in [("t1", false), ("t2", true)] {
        let input = json!({"command": format!("make {id}")});
        assert_eq!(project.before(id, "Bash", input.clone()), json!({}));
        let mut failed = event("PostToolUseFailure", id, "Bash", input);
        failed["error"] = json!("Exit code 2\nno rule, card 4111-1111-1111-1111");
        failed["is_interrupt"] = json!(interrupted);
        assert_eq!(project.hook(&failed), json!({}));
    }
    let rows = project.rows();
    let text = rows.iter().map(Value::to_string).collect::<String>();
    assert!(text.contains("Exit code 2") && !text.contains("1111-1111"), "{text}");
    let effects: Vec<&str> =
        ["\"effects\":\"done\"", "\"effects\":\"unknown\""].into_iter().filter(|wanted| text.contains(wanted)).collect();
    assert_eq!(effects.len(), 2, "{text}");
}

#[test]
fn a_session_that_ends_leaves_what_it_did_not_report_pending() {
    let project = Project::with(CONFIG);
    assert_eq!(project.before("t1", "Bash", json!({"command": "sleep 1000"})), json!({}));
    assert_eq!(project.hook(&json!({"hook_event_name": "SessionStart", "session_id": "s1", "source": "startup"})), json!({}));
    assert_eq!(project.hook(&json!({"hook_event_name": "SessionEnd", "session_id": "s1", "reason": "other"})), json!({}));
    assert_eq!(project.said_of(), [("failed".to_owned(), "abandoned".to_owned())]);
    let late = project.hook(&after("t1", "Bash", json!({"command": "sleep 1000"}), json!({})));
    assert_eq!(late["decision"], "block");
}

#[test]
fn the_third_identical_call_is_a_loop_across_processes() {
    let project = Project::with(CONFIG);
    let said: Vec<String> =
        (0..3).map(|n| decision(&project.before(&format!("t{n}"), "Bash", json!({"command": "ls"}))).0.to_owned()).collect();
    assert_eq!(said, ["none", "none", "deny"]);
}

#[test]
fn other_clients_are_answered_in_their_own_words() {
    let project = Project::with(CONFIG);
    let asked = |client: &str, n: u32, command: &str| {
        let name = if client == "cursor" { "preToolUse" } else { "PreToolUse" };
        let event = event(name, &format!("{client}{n}"), "bash", json!({"command": command}));
        project.hook_as(&["hook", "--config", "toolgate.toml", "--client", client], &event)
    };
    // Codex cannot ask, and takes a bare "allow" for a fault.
    assert_eq!(asked("codex", 1, "ls"), json!({}));
    let (said, reason) = (asked("codex", 2, "rm x"), "A person must approve this call");
    assert!(decision(&said).0 == "deny" && decision(&said).1.contains(reason), "{said}");
    // Cursor blocks what is not answered.
    assert_eq!(asked("cursor", 1, "ls -l"), json!({"permission": "allow"}));
    let said = asked("cursor", 2, "git push");
    assert_eq!(said["permission"], "deny");
    assert_eq!(said["user_message"], said["agent_message"]);
    assert_eq!(decision(&asked("vscode", 1, "git push -u")).0, "deny");
    // A client that leaves the words out is refused, whatever it says; one may write a byte order mark.
    project.run(&["trust"], "");
    let text = format!("\u{feff}{}", event("PreToolUse", "x1", "Bash", json!({"command": "git push -v"})));
    assert_eq!(project.run(&[], &text).0, 2);
    let (code, stdout, _) = project.run(&["hook"], &text);
    assert!(code == 0 && stdout.contains("deny"), "{stdout}");
}

#[test]
fn the_plain_protocol_is_an_exit_code() {
    let project = Project::with(CONFIG);
    let hook = |event: Value| project.run(&["hook", "--config", "toolgate.toml"], &event.to_string());
    let (code, stdout, _) = hook(json!({"tool_name": "bash", "tool_input": {"command": "ls"}}));
    assert_eq!((code, stdout.as_str()), (0, "{\"decision\":\"allow\"}\n"));
    let (code, _, stderr) = hook(json!({"tool_name": "bash", "tool_input": {"command": "git push"}}));
    assert!(code == 2 && stderr.starts_with("toolgate: Nobody pushes from here."), "{stderr}");
    let (code, _, stderr) = hook(json!({"tool_name": "bash", "tool_input": {"command": "rm x"}}));
    assert!(code == 2 && stderr.contains("A person must approve"), "{stderr}");
    let (code, stdout, _) = hook(json!({"tool_name": "bash", "tool_input": {"command": "ls"}, "tool_result": null, "latency_ms": 3}));
    assert_eq!((code, stdout.as_str()), (0, "{}\n"));
    assert!(project.said_of().contains(&("succeeded".to_owned(), String::new())));
}

#[test]
fn whatever_is_wrong_is_a_refusal() {
    let good = event("PreToolUse", "t", "Bash", json!({"command": "ls"})).to_string();
    let broken = |break_it: &dyn Fn(&Project), input: &str| {
        let project = Project::with(CONFIG);
        break_it(&project);
        let said = project.said(&["hook", "--config", "toolgate.toml"], input);
        let refused = said.starts_with("exit 2\n") || (said.starts_with("exit 0\n") && said.contains("\"permissionDecision\":\"deny\""));
        assert!(refused, "{said}");
        said
    };
    let fine = |_: &Project| {};
    let mut told = String::new();
    let mut tell = |name: &str, said: &str| told.push_str(&format!("## {name}\n{said}\n"));
    for (name, input) in [
        ("nothing", ""),
        ("no JSON", "{junk"),
        ("a list", "[1]"),
        ("no tool", r#"{"hook_event_name": "PreToolUse", "session_id": "s"}"#),
        ("no session", r#"{"hook_event_name": "PreToolUse", "tool_name": "Bash", "tool_input": {}}"#),
        ("another event", r#"{"hook_event_name": "Notification", "session_id": "s"}"#),
        (
            "two keys of one name",
            r#"{"hook_event_name": "PreToolUse", "session_id": "s", "tool_name": "Bash", "tool_input": {"command": "ls", "command": "git push"}, "tool_use_id": "t"}"#,
        ),
    ] {
        tell(name, &broken(&fine, input));
    }
    tell("no configuration", &broken(&|project| std::fs::remove_file(project.path("project/toolgate.toml")).unwrap(), &good));
    tell("a broken configuration", &broken(&|project| project.write("project/toolgate.toml", "[tools.bash]\nkind = \"clint\"\n"), &good));
    tell("an ungoverned tool", &broken(&|project| project.write("project/toolgate.toml", "[tools.bash]\nkind = \"client\"\n"), &good));
    tell("a store that is none", &broken(&|project| project.write("project/ledger.db", "this is no database, and never was one"), &good));
    let taken_away = |project: &Project| {
        project.run(&["hook", "--config", "toolgate.toml"], &good);
        std::fs::remove_file(project.path("project/ledger.db")).unwrap();
    };
    tell("a store that is gone", &broken(&taken_away, &good));
    let taken_with_keys = |project: &Project| {
        taken_away(project);
        std::fs::remove_dir_all(project.path("project/ledger.db.state")).unwrap();
    };
    tell("a store that is gone with its keys", &broken(&taken_with_keys, &good));
    let no_state = |project: &Project| project.write(".local/state/toolgate", "a file");
    tell("a state directory that is none", &broken(&no_state, &good));
    insta::assert_snapshot!(told);
}

#[test]
fn an_event_that_cannot_be_understood_is_refused_and_written_down() {
    let project = Project::with(CONFIG);
    let event = r#""hook_event_name":"PreToolUse","session_id":"s1","tool_name":"Bash","tool_input":{"command":"ls"},"tool_use_id":"t1""#;
    let nobody = r#""hook_event_name":"PreToolUse","session_id":7,"tool_name":"Bash""#;
    for (n, (event, more, session)) in [
        (event, r#""tool_input":{"command":"pwd"}"#, "s1"),
        (event, r#""session_id":"s2""#, "s1"),
        (event, r#""tool_name":"Read""#, "s1"),
        (event, r#""hook_event_name":"PostToolUse""#, "s1"),
        (event, r#""is_interrupt":"no""#, "s1"),
        (nobody, r#""cwd":"/""#, "(turned away)"),
        (r#""tool_name":"bash","tool_input":{}"#, r#""tool_input":{}"#, "plain"),
    ]
    .into_iter()
    .enumerate()
    {
        let (code, stdout, stderr) = project.run(&["hook", "--config", "toolgate.toml"], &format!("{{{event},{more}}}"));
        assert!(code == 2 && stdout.is_empty() && stderr.contains("invalid_request"), "{more}: {stdout}{stderr}");
        assert_eq!(project.said_of().last(), Some(&("refused".to_owned(), "invalid_request".to_owned())), "{more}");
        let rows = project.rows();
        assert_eq!(rows.len(), n + 1, "{more}");
        let row = &rows[n]["row"];
        assert_eq!((&row["tool"], &row["session"], &row["gate"]), (&json!("bash"), &json!(session), &json!("admit")), "{more}");
    }
    // What does not say of which tool it is, is no call.
    let (code, ..) = project.run(&["hook", "--config", "toolgate.toml"], r#"{"tool_input":{},"tool_input":{}}"#);
    assert_eq!((code, project.rows().len()), (2, 7));
    // An event of a tool is one, also where it names none, or no session.
    for (config, event, tool, session) in [
        ("", r#"{"hook_event_name":"PreToolUse","tool_name":"Bash","tool_input":{}}"#, "bash", "(turned away)"),
        ("", r#"{"hook_event_name":"PreToolUse","session_id":"s1","tool_input":{}}"#, "unnamed", "s1"),
        ("", r#"{"tool_input":{}}"#, "unnamed", "plain"),
        ("", r#"{"hook_event_name":"PreToolUse","session_id":"s1","tool_name":5,"tool_input":{}}"#, "unnamed", "s1"),
        ("\n[client]\nundeclared = \"ask\"\n", r#"{"hook_event_name":"PostToolUse","tool_response":{}}"#, "unnamed", "(turned away)"),
    ] {
        project.write("project/toolgate.toml", &format!("{CONFIG}{config}"));
        let before = project.rows().len();
        let (code, stdout, stderr) = project.run(&["hook", "--config", "toolgate.toml"], event);
        let refused = match event.contains("PostToolUse") {
            true => code == 0 && stderr.is_empty() && stdout.contains("\"decision\":\"block\"") && stdout.contains("invalid_request"),
            false => code == 2 && stdout.is_empty() && stderr.contains("invalid_request"),
        };
        assert!(refused, "{event}: {stdout}{stderr}");
        let rows = project.rows();
        assert_eq!(rows.len(), before + 1, "{event}");
        let row = &rows[before]["row"];
        assert_eq!((&row["tool"], &row["session"], &row["gate"]), (&json!(tool), &json!(session), &json!("admit")), "{event}");
    }
}

#[test]
fn a_failure_can_be_asked_about_and_never_passes() {
    let project = Project::with(&format!("{CONFIG}\n[client]\non_failure = \"ask\"\nundeclared = \"ask\"\n"));
    assert_eq!(decision(&project.before("t0", "NewTool", json!({}))).0, "ask");
    assert_eq!(project.before("t1", "Bash", json!({"command": "ls"})), json!({}));
    std::fs::remove_file(project.path("project/ledger.db")).unwrap();
    let answer = project.before("t2", "Bash", json!({"command": "ls -l"}));
    assert_eq!(decision(&answer).0, "ask");
    // A session that begins cannot be stopped: its user and its model are told.
    let answer = project.hook(&json!({"hook_event_name": "SessionStart", "session_id": "s1"}));
    for told in [&answer["systemMessage"], &answer["hookSpecificOutput"]["additionalContext"]] {
        assert!(told.as_str().is_some_and(|told| told.contains("ledger.db is gone")), "{answer}");
    }
    assert_eq!(answer["decision"], Value::Null);
}

#[test]
fn a_projects_file_is_data_until_somebody_accepts_it() {
    let project = Project::with(CONFIG);
    let ask =
        |n: u32, command: &str| project.hook_as(&["hook"], &event("PreToolUse", &format!("t{n}"), "Bash", json!({"command": command})));
    let start = || project.hook_as(&["hook"], &json!({"hook_event_name": "SessionStart", "session_id": "s1"}));
    // Nobody has accepted it, and there is nothing else.
    assert!(decision(&ask(1, "ls")).1.ends_with("is not accepted as it is now; read it, then run `toolgate trust` in a terminal"));
    // The user's own holds alone, and says so.
    let own = "[tools.bash]\nkind = \"client\"\nshell = \"/command\"\n[[policy]]\nname = \"no_curl\"\nrule = \"deny\"\ntools = [\"bash\"]\nwhere = [{ argument = \"/command\", runs = [\"curl\"] }]\n";
    project.write(".config/toolgate/toolgate.toml", own);
    assert_eq!(decision(&ask(2, "git push")).0, "none");
    assert_eq!(decision(&ask(3, "curl x")).0, "deny");
    assert!(start()["systemMessage"].as_str().unwrap().contains("nobody has accepted it"));
    // Accepted, both hold.
    assert_eq!(project.run(&["trust"], "").0, 0);
    assert_eq!(decision(&ask(4, "git push origin")).0, "deny");
    assert_eq!(decision(&ask(5, "curl y")).0, "deny");
    assert_eq!(start(), json!({}));
    // Any change must be accepted anew.
    project.write("project/toolgate.toml", &CONFIG.replace("git push", "git pull"));
    assert_eq!(decision(&ask(6, "git push upstream")).0, "none");
    assert_eq!(project.run(&["trust"], "").0, 0);
    assert_eq!(decision(&ask(7, "git pull")).0, "deny");
    assert_eq!(project.run(&["trust", "--revoke"], "").0, 0);
    assert_eq!(decision(&ask(8, "git pull --all")).0, "none");
}

#[test]
fn what_is_kept_ready_is_dropped_when_anything_changes() {
    let project = Project::with(CONFIG);
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
    let settle = || std::fs::File::open(project.path("project/toolgate.toml")).unwrap().set_modified(old).unwrap();
    settle();
    std::thread::sleep(std::time::Duration::from_millis(1_100));
    let kept = project.path(".local/state/toolgate/compiled");
    assert_eq!(decision(&project.before("t1", "Bash", json!({"command": "git push a"}))).0, "deny");
    let files = || walk(&kept).into_iter().filter(|path| path.file_name().is_some_and(|name| name == "bash")).collect::<Vec<_>>();
    assert_eq!(files().len(), 1);
    // The same words, from what is kept.
    assert_eq!(decision(&project.before("t2", "Bash", json!({"command": "git push b"}))).0, "deny");
    assert_eq!(decision(&project.before("t3", "Read", json!({"file_path": "x"}))).0, "allow");
    // Somebody edits what is kept: it counts for nothing.
    let [path] = files().try_into().unwrap();
    let mut text = std::fs::read(&path).unwrap();
    let at = text.windows(8).position(|part| part == b"git push").unwrap();
    text[at..at + 8].copy_from_slice(b"git pull");
    std::fs::write(&path, text).unwrap();
    assert_eq!(decision(&project.before("t4", "Bash", json!({"command": "git push c"}))).0, "deny");
    // Somebody edits the file: what is kept counts for nothing.
    project.write("project/toolgate.toml", &CONFIG.replace("git push", "git pull"));
    assert_eq!(decision(&project.before("t5", "Bash", json!({"command": "git push d"}))).0, "none");
}

#[test]
fn what_is_kept_ready_is_dropped_when_a_link_leads_elsewhere() {
    let link = |from: PathBuf, to: PathBuf| {
        std::fs::rename(&from, &to).unwrap();
        std::os::unix::fs::symlink(to, from).unwrap();
    };
    for (serves, args) in [(false, ["hook", "--config", "toolgate.toml"]), (true, ["hook", "--socket", "hook.sock"])] {
        let project = Project::with(CONFIG);
        project.write("project/.claude/settings.json", "{}");
        project.write("dotfiles/other.json", "{}");
        std::thread::sleep(std::time::Duration::from_millis(1_200));
        let _service = serves.then(|| Service::start(&project));
        let write = |id: &str, name: &str| {
            let answer = project.hook_as(&args, &event("PreToolUse", id, "Write", json!({"file_path": project.path(name), "content": id})));
            decision(&answer).0.to_owned()
        };
        assert_eq!(write("t1", "dotfiles/one.json"), "none");
        assert_eq!(write("t2", "dotfiles/one.json"), "none");
        assert!(serves || project.path(".local/state/toolgate/compiled").exists());
        link(project.path("project/.claude/settings.json"), project.path("dotfiles/one.json"));
        assert_eq!(write("t3", "dotfiles/one.json"), "deny");
        // Nothing of a file changes where its directory is moved.
        assert_eq!(write("t4", "dotfiles/claude/settings.local.json"), "none");
        link(project.path("project/.claude"), project.path("dotfiles/claude"));
        assert_eq!(write("t5", "dotfiles/claude/settings.local.json"), "deny");
    }
}

#[test]
fn what_is_accepted_is_accepted_by_whatever_name_and_with_its_programs() {
    let config =
        format!("include = [\"more.toml\"]\n{CONFIG}\n[[hooks]]\nname = \"house\"\ncommand = \"./house.sh\"\ntools = [\"bash\"]\n");
    let project = Project::with(&config);
    project.write("project/more.toml", "");
    project.write("project/house.sh", "#!/bin/sh\nexit 0\n");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(project.path("project/house.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let ask = |n: u32| project.hook_as(&["hook"], &event("PreToolUse", &format!("t{n}"), "Bash", json!({"command": format!("ls {n}")})));
    assert_eq!(project.run(&["trust", "toolgate.toml"], "").0, 0);
    assert_eq!(ask(1), json!({}));
    // A program that is asked is part of what was accepted.
    project.write("project/house.sh", "#!/bin/sh\necho '{}'\n");
    assert!(decision(&ask(2)).1.contains("is not accepted as it is now"));
}

#[test]
fn a_program_is_given_secrets_that_stand_nowhere_else() {
    let hook = "[[hooks]]\nname = \"house\"\ncommand = \"./house.sh\"\ntools = [\"bash\"]\nenv = { KEY = { file = \"house.key\" }, PLACE = \"at ${HOME}\" }\n";
    let project = Project::with(&format!("{CONFIG}\n{hook}"));
    project.write("project/house.key", "s3cret\n");
    project.write("project/house.sh", "#!/bin/sh\n[ \"$KEY\" = s3cret ] && [ \"$PLACE\" = \"at $HOME\" ] || exit 2\n");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(project.path("project/house.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(project.before("t1", "Bash", json!({"command": "ls"})), json!({}));
    project.hook(&after("t1", "Bash", json!({"command": "ls"}), json!({})));
    // Not even where it says so itself.
    for (n, end) in [
        "echo \"wrong key $KEY\" >&2; exit 2",
        "echo $KEY >&2; exit 3",
        "echo \"{\\\"decision\\\": \\\"deny\\\", \\\"reason\\\": \\\"$KEY\\\"}\"",
    ]
    .iter()
    .enumerate()
    {
        project.write("project/house.sh", &format!("#!/bin/sh\n{end}\n"));
        let said = project.before(&format!("u{n}"), "Bash", json!({"command": format!("ls {n}")})).to_string();
        assert!(said.contains("deny") && said.contains("[redacted]") && !said.contains("s3cret"), "{said}");
    }
    let everything =
        walk(&project.path("")).into_iter().filter(|path| path.file_name().is_some_and(|name| name != "house.key" && name != "house.sh"));
    for path in everything {
        let text = std::fs::read(&path).unwrap();
        assert!(!text.windows(6).any(|part| part == b"s3cret"), "{}", path.display());
    }
}

#[test]
fn a_hook_that_is_slow_after_the_tool_shows_nothing() {
    let config = format!(
        "{CONFIG}\n[[hooks]]\nname = \"slow\"\ncommand = \"./slow.sh\"\ntools = [\"lookup\"]\nwhen = \"after\"\ntimeout = \"60s\"\n"
    );
    let project = Project::with(&config);
    project.write("project/slow.sh", "#!/bin/sh\nsleep 30\n");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(project.path("project/slow.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(project.before("t1", "lookup", json!({})), json!({}));
    let answer = project.hook(&after("t1", "lookup", json!({}), json!({"secret": "x"})));
    assert_eq!(answer["hookSpecificOutput"]["updatedToolOutput"], json!({"secret": "(withheld)"}));
}

pub(crate) fn walk(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

#[test]
fn clients_that_ask_at_the_same_time_do_not_lose_anything() {
    let project = Project::with(&format!("{CONFIG}\n[limits]\nsession = {{ calls = 6 }}\n"));
    let project = &project;
    let said: Vec<String> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..10)
            .map(|n| {
                scope.spawn(move || decision(&project.before(&format!("t{n}"), "Bash", json!({"command": format!("ls {n}")}))).0.to_owned())
            })
            .collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    assert_eq!(said.iter().filter(|said| *said == "none").count(), 6, "{said:?}");
    let (code, stdout, _) = project.run(&["audit", "verify", "--store", "ledger.db"], "");
    assert_eq!(code, 0, "{stdout}");
}

#[test]
fn a_person_answers_in_a_terminal_where_the_client_cannot_ask() {
    let project = Project::with(
        &CONFIG.replace("reason = \"This deletes something.\"", "reason = \"This deletes something.\"\napprovers = [\"boss\"]"),
    );
    let ask = |id: &str| project.before(id, "Bash", json!({"command": "rm x"}));
    let asked = ask("t1");
    assert!(decision(&asked).1.starts_with("This deletes something. A person must approve this call"));
    let (_, listed, _) = project.run(&["approvals", "list"], "");
    let id = listed.split_whitespace().next().unwrap().to_owned();
    // Whoever is told of it is told where to answer.
    assert!(decision(&asked).1.contains(&format!("with `toolgate approvals approve {id}` in a terminal")), "{asked}");
    let shown = project.said(&["approvals", "list"], "");
    assert!(shown.contains("bash {\"command\":\"rm x\"}") && shown.contains("to be answered by boss"), "{shown}");
    assert!(project.said(&["approvals", "approve", &id, "--as", "mallory"], "").contains("may not answer this one"));
    assert!(project.said(&["approvals", "approve", &id, "--as", "boss"], "").starts_with("exit 0\napproved bash"));
    assert_eq!(ask("t2"), json!({}));
    assert_eq!(decision(&ask("t3")).0, "deny");
    assert_eq!(project.said(&["approvals", "deny", &id], "").lines().next(), Some("exit 2"));
}

#[test]
fn the_environment_counts_for_more_than_the_file_and_a_flag_for_more_than_both() {
    let project = Project::with(CONFIG);
    project.write("other/toolgate.toml", &CONFIG.replace("Nobody pushes", "No one pushes"));
    let run = |variables: &[(&str, &str)], args: &[&str]| {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.environment(&mut command);
        command.envs(variables.iter().copied());
        let event = event("PreToolUse", "t1", "Bash", json!({"command": "git push"})).to_string();
        String::from_utf8(Command::from_std(command).args(args).write_stdin(event).output().unwrap().stdout).unwrap()
    };
    let other = project.path("other/toolgate.toml");
    let variable = [("TOOLGATE_CONFIG", other.to_str().unwrap()), ("TOOLGATE_STORE", "elsewhere.db")];
    assert!(run(&variable, &["hook"]).contains("No one pushes"));
    assert!(project.path("project/elsewhere.db").exists() && !project.path("other/ledger.db").exists());
    assert!(run(&variable, &["hook", "--config", "toolgate.toml"]).contains("Nobody pushes"));
    // With its flag, each has a ledger of its own, and what is kept ready for one is not taken for another.
    for _ in 0..2 {
        for store in ["one.db", "two.db"] {
            run(&variable, &["hook", "--store", store, "--config", "toolgate.toml"]);
        }
    }
    for store in ["one.db", "two.db"] {
        let (_, rows, _) = project.run(&["audit", "query", "--json", "--store", store], "");
        assert_eq!(rows.lines().count(), 2, "{store}: {rows}");
    }
    let (_, said, _) = project.run(&["doctor", "--config", "toolgate.toml", "--store", "three.db"], "");
    assert!(said.contains("✓ ledger") && said.contains("three.db") && said.contains("✓ canary"), "{said}");
}

/// A service, while a test needs it.
struct Service(Child);

impl Service {
    /// One that answers in a project, once it does.
    fn start(project: &Project) -> Self {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.environment(&mut command);
        let args = ["hook", "--serve", "--config", "toolgate.toml", "--socket", "hook.sock"];
        let service = Self(command.args(args).stderr(Stdio::null()).spawn().unwrap());
        // Its socket is there a moment before it is listened at.
        while std::os::unix::net::UnixStream::connect(project.path("project/hook.sock")).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        service
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_service_answers_in_another_process_and_reads_changes() {
    let project = Project::with(CONFIG);
    let service = Service::start(&project);
    let small = |event: &Value| {
        let mut command = std::process::Command::cargo_bin("toolgate-ask").unwrap();
        project.environment(&mut command);
        let mut child =
            command.args(["--socket", "hook.sock"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(event.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    let push = |id: &str, command: &str| event("PreToolUse", id, "Bash", json!({"command": command}));
    let (code, stdout) = small(&push("t1", "git push"));
    assert!(code == 0 && stdout.contains("Nobody pushes"), "{stdout}");
    let large = project.hook_as(&["hook", "--socket", "hook.sock"], &push("t2", "git push -q"));
    assert_eq!(decision(&large).0, "deny");
    assert_eq!(small(&push("t3", "ls")), (0, "{}\n".to_owned()));
    assert_eq!(small(&after("t3", "Bash", json!({"command": "ls"}), json!({}))), (0, "{}\n".to_owned()));
    // A file that does not load leaves the old one in force; one that does is in force at once.
    project.write("project/toolgate.toml", "store = [");
    assert!(small(&push("t4", "git push -f")).1.contains("Nobody pushes"));
    project.write("project/toolgate.toml", &CONFIG.replace("Nobody pushes", "No one pushes"));
    assert!(small(&push("t5", "git push -n")).1.contains("No one pushes"));
    // Also what was mended in a file that only the broken one names.
    let more = CONFIG.replace("Nobody pushes", "She pushes").replace("store =", "include = [\"more.toml\"]\nstore =");
    project.write("project/toolgate.toml", &more);
    assert!(small(&push("m1", "git push -m1")).1.contains("No one pushes"));
    project.write("project/more.toml", "");
    assert!(small(&push("m2", "git push -m2")).1.contains("She pushes"));
    assert_eq!(small(&json!("junk")).0, 2);
    drop(service);
    assert_eq!(small(&push("t6", "ls -a")).0, 2);
}

#[test]
fn a_service_treats_tools_that_nobody_declared_as_the_file_in_force_says() {
    let project = Project::with(&format!("{CONFIG}\n[client]\nundeclared = \"ask\"\n"));
    let _service = Service::start(&project);
    let asked = |id: &str, tool: &str| {
        let answer = project.hook_as(&["hook", "--socket", "hook.sock"], &event("PreToolUse", id, tool, json!({"of": id})));
        decision(&answer).0.to_owned()
    };
    assert_eq!(asked("t1", "Known"), "ask");
    // An edit that does not load changes nothing, also for a tool that was never asked for before.
    project.write("project/toolgate.toml", "store = [");
    assert_eq!([asked("t2", "Known"), asked("t3", "NeverSeen"), asked("t4", "NeverSeen")], ["ask"; 3]);
    project.write("project/toolgate.toml", CONFIG);
    assert_eq!([asked("t5", "Known"), asked("t6", "NeverSeen")], ["deny"; 2]);
}

#[test]
fn a_ledger_that_somebody_else_writes_without_end_is_named() {
    for (setting, answer) in [("", "deny"), ("[client]\non_failure = \"ask\"\n", "ask")] {
        let project = Project::with(&format!("{CONFIG}{setting}"));
        project.before("t0", "read", json!({"file_path": "/tmp/x"}));
        let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
        ledger.execute_batch("BEGIN IMMEDIATE").unwrap();
        let asked = event("PreToolUse", "t1", "bash", json!({"command": "ls"})).to_string();
        let (code, said, told) = project.run(&["hook", "--config", "toolgate.toml"], &asked);
        let read: Value = serde_json::from_str(&said).unwrap();
        assert_eq!((code, decision(&read).0), (0, answer), "{said}");
        assert!(decision(&read).1.contains("store_unavailable") && told.contains("database is locked"), "{said}{told}");
        ledger.execute_batch("COMMIT").unwrap();
        // What was refused is in the ledger all the same, with the next row.
        project.before("t2", "bash", json!({"command": "git push"}));
        assert!(project.said_of().iter().any(|(_, code)| code == "store_unavailable"), "{:?}", project.said_of());
    }
}

#[test]
fn no_program_of_toolgate_is_an_agents_to_change() {
    let project = Project::with(CONFIG);
    let beside = assert_cmd::cargo::cargo_bin("toolgate");
    let home = project.path("");
    let desktop = home.join(".config/Claude/claude_desktop_config.json");
    let programs = ["toolgate", "toolgate-hook", "toolgate-ask"].map(|name| beside.with_file_name(name));
    for (n, path) in programs.into_iter().chain([desktop]).enumerate() {
        let said = project.before(&format!("t{n}"), "bash", json!({"command": format!("cp /bin/true {}", path.display())}));
        assert!(said.to_string().contains("own_files"), "{}: {said}", path.display());
    }
}

#[test]
fn a_whole_configuration_is_tried_on_what_was_recorded() {
    let project = Project::with(CONFIG);
    for n in 0..4 {
        let input = json!({"file_path": format!("/tmp/{n}")});
        project.before(&format!("r{n}"), "read", input.clone());
        project.hook(&after(&format!("r{n}"), "read", input, json!("text")));
    }
    project.before("t1", "bash", json!({"command": "git push"}));
    project.before("t2", "bash", json!({"command": format!("cat {}", project.path("project/ledger.db").display())}));
    let trying = |text: &str| {
        project.write("project/new.toml", text);
        project.said(&["backtest", "--config", "new.toml", "--store", "ledger.db"], "")
    };
    let same = trying(CONFIG);
    assert!(same.starts_with("exit 0\n6 calls: 6 would be decided the same"), "{same}");
    // Limits, tools and what they do are part of it, and so are files that it includes.
    let limited = trying(&CONFIG.replace("name = \"coder\"", "name = \"coder\"\nlimits = { session = { calls = 2 } }"));
    assert!(limited.starts_with("exit 1\n") && limited.matches("now refused").count() >= 2 && limited.contains("budget"), "{limited}");
    let without = trying(&CONFIG.replace("[tools.read]", "[tools.reading]"));
    assert!(without.contains("4 otherwise") && without.contains("unknown_tool"), "{without}");
    let (rules, push) = CONFIG.split_once("[[policy]]\nname = \"no_push\"").unwrap();
    let (_, rest) = push.split_once("[[policy]]").unwrap();
    project.write(
        "project/more.toml",
        "[[policy]]\nname = \"no_tmp\"\nrule = \"deny\"\ntools = [\"read\"]\nwhere = [{ argument = \"/file_path\", glob = \"/tmp/*\" }]\n",
    );
    let included = trying(&format!("include = [\"more.toml\"]\n{rules}[[policy]]{rest}"));
    assert!(included.contains("5 otherwise") && included.contains("by `no_tmp`") && included.contains("now let through"), "{included}");
    // What a tool takes is what the file says now.
    let closed =
        CONFIG.replace("[tools.read]\n", "[tools.read]\ninput = { type = \"object\", properties = { path = { type = \"string\" } } }\n");
    assert!(trying(&closed).contains("4 otherwise"), "{}", trying(&closed));
    // A file that names a read to ask what became of a call is a file for hooks, too.
    let asks = CONFIG.replace("[tools.write]\n", "[tools.write]\nreconcile = { tool = \"read\", happened = { \"/done\" = true } }\n");
    project.write("project/asks.toml", &asks);
    let said = project.hook_as(&["hook", "--config", "asks.toml"], &event("PreToolUse", "w1", "write", json!({})));
    assert_eq!(said, json!({}));
    // What protects toolgate is not the configuration's.
    assert!(!included.contains("ledger.db"), "{included}");
    for (text, why) in [
        (format!("nonsense_key = 1\n{CONFIG}"), "nonsense_key"),
        (CONFIG.replace("name = \"coder\"", "name = \"painter\""), "has no agent `coder`"),
        (
            "limits = { session = { calls = 1 } }\n[[policy]]\nname = \"x\"\nrule = \"deny\"\ntools = [\"bash\"]\n".to_owned(),
            "try a whole configuration",
        ),
    ] {
        let said = trying(&text);
        assert!(said.starts_with("exit 2\n") && said.contains(why), "{said}");
    }
}

#[test]
fn the_small_program_says_what_the_large_one_says() {
    let run = |small: bool, more: &[&str]| {
        let project = Project::with(CONFIG);
        let mut said = Vec::new();
        let events = [
            event("SessionStart", "", "", json!({})),
            event("PreToolUse", "t1", "Bash", json!({"command": "git push"})),
            event("PreToolUse", "t2", "Bash", json!({"command": "rm x"})),
            event("PreToolUse", "t3", "Read", json!({"file_path": "/tmp/x"})),
            after("t3", "Read", json!({"file_path": "/tmp/x"}), json!("text")),
            event("PreToolUse", "t4", "lookup", json!({"id": 7})),
            after("t4", "lookup", json!({"id": 7}), json!({"created": 1_700_000_000})),
            event("PreToolUse", "t5", "Nothing", json!({})),
            json!({"tool_name": "bash", "tool_input": {"command": "git push"}}),
            json!(["no event"]),
            event("SessionEnd", "", "", json!({})),
        ];
        // What is different each time: moments, and names of calls.
        let each_time = Regex::new("20[0-9-]{8}T[0-9:.]+Z|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").unwrap();
        for event in events {
            let mut command = std::process::Command::cargo_bin(if small { "toolgate-hook" } else { "toolgate" }).unwrap();
            project.environment(&mut command);
            let verb: &[&str] = if small { &[] } else { &["hook"] };
            let output = Command::from_std(command)
                .args(verb)
                .args(["--config", "toolgate.toml"])
                .args(more)
                .write_stdin(event.to_string())
                .output()
                .unwrap();
            let text = format!(
                "{:?} {}{}",
                output.status.code(),
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            said.push(each_time.replace_all(&text, "EACH").into_owned());
        }
        let rows = if project.path("project/ledger.db").exists() { project.said_of() } else { Vec::new() };
        (said, rows)
    };
    for more in [&[][..], &["--client", "codex"], &["--client", "cursor"]] {
        assert_eq!(run(true, more), run(false, more), "{more:?}");
    }
    // What it does not understand is a refusal too.
    assert!(run(true, &["--no-such-flag", "x"]).0.iter().all(|said| said.starts_with("Some(2)")));
}

/// On a disk that is full to the last byte there is no place for a row; then it is told, and nothing runs.
#[test]
fn what_can_be_kept_nowhere_is_told() {
    let project = Project::with(CONFIG);
    let script = format!(
        "set -e; mkdir full; mount -t tmpfs -o size=1m none full; cp toolgate.toml full; cd full\n\
         hook() {{ echo \"$1\" | '{}' hook --config toolgate.toml; }}\n\
         hook '{}' | cat > /dev/null\n\
         dd if=/dev/zero of=room bs=4k count=9 2> /dev/null; dd if=/dev/zero of=rest bs=4k 2> /dev/null || true; rm room\n\
         for n in 1 2 3 4 5 6 7 8; do hook '{{\"tool_name\": \"bash\", \"tool_input\": {{\"command\": \"git push '$n'\"}}}}' || echo \"exit $?\"; done\n\
         echo \"left $(find . -name '*.jsonl' -size 0 | wc -l)\"",
        assert_cmd::cargo::cargo_bin("toolgate").display(),
        event("PreToolUse", "t0", "Bash", json!({"command": "git push"})),
    );
    let mut command = std::process::Command::new("unshare");
    project.environment(&mut command);
    let output = command.args(["-m", "sh", "-c", &script]).output().unwrap();
    let (said, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if told.contains("Operation not permitted") || told.contains("must be superuser") {
        eprintln!("SKIPPED: a disk of its own can only be had by root");
        return;
    }
    assert_eq!(said.matches("exit 2").count(), 8, "{said}{told}");
    assert!(told.contains("could be neither stored nor spooled") && told.contains("git push 8"), "{told}");
    assert!(said.contains("left 0"), "{said}");
}

#[test]
fn an_agent_chooses_the_dialect_of_its_errors() {
    let project = Project::with(&format!("dialect = \"bucket\"\n{CONFIG}"));
    // Also from what is kept ready.
    for n in 0..3 {
        std::thread::sleep(std::time::Duration::from_millis(if n == 0 { 1_200 } else { 0 }));
        let said = project.before(&format!("t{n}"), "bash", json!({"command": format!("git push {n}")}));
        let told: Value = serde_json::from_str(decision(&said).1.lines().last().unwrap()).unwrap();
        assert_eq!((&told["error"]["bucket"], &told["error"]["code"]), (&json!("Business"), &json!("no_push")), "{said}");
    }
}

#[test]
fn a_call_that_was_made_before_is_refused_as_such() {
    let once = CONFIG.replace("[tools.write]\n", "[tools.write]\nonce = true\n");
    let input = json!({"file_path": "/tmp/x", "content": "y"});
    for (setting, place) in [("", ""), ("dialect = \"bucket\"\n", "/error")] {
        let project = Project::with(&format!("{setting}{once}"));
        assert_eq!(project.before("t1", "Write", input.clone()), json!({}));
        assert_eq!(project.hook(&after("t1", "Write", input.clone(), json!({"written": 7}))), json!({}));
        let said = project.before("t2", "Write", input.clone());
        let (word, reason) = decision(&said);
        assert_eq!(word, "deny", "{said}");
        let told: Value = serde_json::from_str(reason.lines().last().unwrap()).unwrap();
        let told = told.pointer(place).unwrap();
        for (field, value) in
            [("code", json!("duplicate_call")), ("effects", json!("done")), ("replayed", json!(true)), ("upstream", json!({"written": 7}))]
        {
            assert_eq!(told[field], value, "{said}");
        }
        assert!(told["callId"].is_string(), "{said}");
    }
}

/// A client takes a program that a signal has ended for one that has no objection.
#[test]
fn a_limit_of_the_process_is_a_refusal_and_not_its_end() {
    let limited = |project: &Project, limit: &str, line: &str| {
        let mut command = std::process::Command::new("sh");
        project.environment(&mut command);
        let event = event("PreToolUse", "t1", "Bash", json!({"command": "ls"})).to_string();
        let script = format!("ulimit {limit}; exec {line}");
        let output = Command::from_std(command).args(["-c", &script]).write_stdin(event).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let code = output.status.code().unwrap_or_else(|| panic!("{line} under {limit} was ended: {}", output.status));
        (code, text(output.stdout), text(output.stderr))
    };
    let program = |name: &str| format!("'{}'", assert_cmd::cargo::cargo_bin(name).display());
    let hooks = [program("toolgate-hook"), format!("{} hook", program("toolgate"))];
    for hook in hooks.map(|hook| format!("{hook} --config toolgate.toml")) {
        // Where there is no ledger yet, and where there is one.
        for is_new in [true, false] {
            let project = Project::with(CONFIG);
            if !is_new {
                project.before("t0", "Bash", json!({"command": "pwd"}));
            }
            for limit in ["-f 0", "-f 8", "-f 64"] {
                let (code, stdout, stderr) = limited(&project, limit, &hook);
                let answer: Value = serde_json::from_str(&stdout).unwrap_or_default();
                assert!(code == 2 || (code == 0 && answer.is_object()), "{hook} {limit}: {code} {stdout}{stderr}");
                assert!(limit != "-f 0" || code == 2 || decision(&answer).0 == "deny", "{hook}: {stdout}{stderr}");
            }
        }
        // What cannot be said is a refusal.
        let (code, ..) = limited(&Project::with(CONFIG), "-f 0", &format!("{hook} > said"));
        assert_eq!(code, 2, "{hook}");
    }
    let (code, ..) = limited(&Project::new(), "-f 0", &format!("{} --help > said", program("toolgate-ask")));
    assert_eq!(code, 2);
}
