//! Tests that any failure of an event, a file, a disk or a process denies the call.

use assert_cmd::Command;
use serde_json::{Value, json};

use super::{CONFIG, TestProject, decision, hook_event};

#[test]
fn replaced_ledger_is_refused() {
    let project =
        TestProject::with_config(&format!("{CONFIG}\n[limits]\nsession = {{ calls = 2 }}\n"));
    assert_eq!(project.pre_tool_use("t1", "Bash", json!({"command": "ls"})), json!({}));
    std::fs::rename(project.path("project/ledger.db"), project.path("project/moved.db")).unwrap();
    std::os::unix::fs::symlink(project.path("project/fresh.db"), project.path("project/ledger.db"))
        .unwrap();
    project.write("project/fresh.db", "");
    assert_eq!(
        decision(&project.pre_tool_use("t2", "Bash", json!({"command": "ls -l"}))).0,
        "deny"
    );
}

#[test]
fn hook_denies_call_on_any_failure() {
    let good = hook_event("PreToolUse", "t", "Bash", json!({"command": "ls"})).to_string();
    let run_broken = |break_it: &dyn Fn(&TestProject), input: &str| {
        let project = TestProject::with_config(CONFIG);
        break_it(&project);
        let output = project.masked_output(&["hook", "--config", "toolgate.toml"], input);
        let is_denied = output.starts_with("exit 2\n")
            || (output.starts_with("exit 0\n")
                && output.contains("\"permissionDecision\":\"deny\""));
        assert!(is_denied, "{output}");
        output
    };
    let no_change = |_: &TestProject| {};
    let mut report = String::new();
    let mut add = |name: &str, output: &str| report.push_str(&format!("## {name}\n{output}\n"));
    for (name, input) in [
        ("nothing", ""),
        ("no JSON", "{junk"),
        ("a list", "[1]"),
        ("no tool", r#"{"hook_event_name": "PreToolUse", "session_id": "s"}"#),
        (
            "no session",
            r#"{"hook_event_name": "PreToolUse", "tool_name": "Bash", "tool_input": {}}"#,
        ),
        ("another event", r#"{"hook_event_name": "Notification", "session_id": "s"}"#),
        (
            "two keys of one name",
            r#"{"hook_event_name": "PreToolUse", "session_id": "s", "tool_name": "Bash", "tool_input": {"command": "ls", "command": "git push"}, "tool_use_id": "t"}"#,
        ),
    ] {
        add(name, &run_broken(&no_change, input));
    }
    add(
        "no configuration",
        &run_broken(
            &|project| std::fs::remove_file(project.path("project/toolgate.toml")).unwrap(),
            &good,
        ),
    );
    add(
        "a broken configuration",
        &run_broken(
            &|project| project.write("project/toolgate.toml", "[tools.bash]\nkind = \"clint\"\n"),
            &good,
        ),
    );
    add(
        "an ungoverned tool",
        &run_broken(
            &|project| project.write("project/toolgate.toml", "[tools.bash]\nkind = \"client\"\n"),
            &good,
        ),
    );
    add(
        "a store that is none",
        &run_broken(
            &|project| {
                project.write("project/ledger.db", "this text is not a database, and never was")
            },
            &good,
        ),
    );
    let remove_ledger = |project: &TestProject| {
        project.run(&["hook", "--config", "toolgate.toml"], &good);
        std::fs::remove_file(project.path("project/ledger.db")).unwrap();
    };
    add("a store that is gone", &run_broken(&remove_ledger, &good));
    let remove_ledger_and_keys = |project: &TestProject| {
        remove_ledger(project);
        std::fs::remove_dir_all(project.path("project/ledger.db.state")).unwrap();
    };
    add("a store that is gone with its keys", &run_broken(&remove_ledger_and_keys, &good));
    let replace_state = |project: &TestProject| project.write(".local/state/toolgate", "a file");
    add("a state directory that is none", &run_broken(&replace_state, &good));
    insta::assert_snapshot!(report);
}

#[test]
fn ambiguous_event_is_refused_and_recorded() {
    let project = TestProject::with_config(CONFIG);
    let event = r#""hook_event_name":"PreToolUse","session_id":"s1","tool_name":"Bash","tool_input":{"command":"ls"},"tool_use_id":"t1""#;
    let without_session = r#""hook_event_name":"PreToolUse","session_id":7,"tool_name":"Bash""#;
    for (n, (event, duplicate, session)) in [
        (event, r#""tool_input":{"command":"pwd"}"#, "s1"),
        (event, r#""session_id":"s2""#, "s1"),
        (event, r#""tool_name":"Read""#, "s1"),
        (event, r#""hook_event_name":"PostToolUse""#, "s1"),
        (event, r#""is_interrupt":"no""#, "s1"),
        (without_session, r#""cwd":"/""#, "(turned away)"),
        (r#""tool_name":"bash","tool_input":{}"#, r#""tool_input":{}"#, "plain"),
    ]
    .into_iter()
    .enumerate()
    {
        let (code, stdout, stderr) = project
            .run(&["hook", "--config", "toolgate.toml"], &format!("{{{event},{duplicate}}}"));
        assert!(
            code == 2 && stdout.is_empty() && stderr.contains("invalid_request"),
            "{duplicate}: {stdout}{stderr}"
        );
        assert_eq!(
            project.recorded_outcomes().last(),
            Some(&("refused".to_owned(), "invalid_request".to_owned())),
            "{duplicate}"
        );
        let rows = project.exported_rows();
        assert_eq!(rows.len(), n + 1, "{duplicate}");
        let row = &rows[n]["row"];
        assert_eq!(
            (&row["tool"], &row["session"], &row["gate"]),
            (&json!("bash"), &json!(session), &json!("admit")),
            "{duplicate}"
        );
    }
    // Without a tool, the event is not a call.
    let (code, ..) =
        project.run(&["hook", "--config", "toolgate.toml"], r#"{"tool_input":{},"tool_input":{}}"#);
    assert_eq!((code, project.exported_rows().len()), (2, 7));
    // A tool event is a call, even without tool name or session.
    for (config, event, tool, session) in [
        (
            "",
            r#"{"hook_event_name":"PreToolUse","tool_name":"Bash","tool_input":{}}"#,
            "bash",
            "(turned away)",
        ),
        (
            "",
            r#"{"hook_event_name":"PreToolUse","session_id":"s1","tool_input":{}}"#,
            "unnamed",
            "s1",
        ),
        ("", r#"{"tool_input":{}}"#, "unnamed", "plain"),
        (
            "",
            r#"{"hook_event_name":"PreToolUse","session_id":"s1","tool_name":5,"tool_input":{}}"#,
            "unnamed",
            "s1",
        ),
        (
            "\n[client]\nundeclared = \"ask\"\n",
            r#"{"hook_event_name":"PostToolUse","tool_response":{}}"#,
            "unnamed",
            "(turned away)",
        ),
    ] {
        project.write("project/toolgate.toml", &format!("{CONFIG}{config}"));
        let before = project.exported_rows().len();
        let (code, stdout, stderr) = project.run(&["hook", "--config", "toolgate.toml"], event);
        let is_refused = match event.contains("PostToolUse") {
            true => {
                code == 0
                    && stderr.is_empty()
                    && stdout.contains("\"decision\":\"block\"")
                    && stdout.contains("invalid_request")
            }
            false => code == 2 && stdout.is_empty() && stderr.contains("invalid_request"),
        };
        assert!(is_refused, "{event}: {stdout}{stderr}");
        let rows = project.exported_rows();
        assert_eq!(rows.len(), before + 1, "{event}");
        let row = &rows[before]["row"];
        assert_eq!(
            (&row["tool"], &row["session"], &row["gate"]),
            (&json!(tool), &json!(session), &json!("admit")),
            "{event}"
        );
    }
}

#[test]
fn on_failure_ask_never_allows_call() {
    let project = TestProject::with_config(&format!(
        "{CONFIG}\n[client]\non_failure = \"ask\"\nundeclared = \"ask\"\n"
    ));
    assert_eq!(decision(&project.pre_tool_use("t0", "NewTool", json!({}))).0, "ask");
    assert_eq!(project.pre_tool_use("t1", "Bash", json!({"command": "ls"})), json!({}));
    std::fs::remove_file(project.path("project/ledger.db")).unwrap();
    let answer = project.pre_tool_use("t2", "Bash", json!({"command": "ls -l"}));
    assert_eq!(decision(&answer).0, "ask");
    // The start of a session cannot be blocked, so user and model are informed.
    let answer = project.run_hook(&json!({"hook_event_name": "SessionStart", "session_id": "s1"}));
    for text in [&answer["systemMessage"], &answer["hookSpecificOutput"]["additionalContext"]] {
        assert!(
            text.as_str().is_some_and(|text| text.contains("ledger.db is missing")),
            "{answer}"
        );
    }
    assert_eq!(answer["decision"], Value::Null);
}

#[test]
fn locked_ledger_is_reported_and_call_refused() {
    for (setting, expected) in [("", "deny"), ("[client]\non_failure = \"ask\"\n", "ask")] {
        let project = TestProject::with_config(&format!("{CONFIG}{setting}"));
        project.pre_tool_use("t0", "read", json!({"file_path": "/tmp/x"}));
        let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
        ledger.execute_batch("BEGIN IMMEDIATE").unwrap();
        let event = hook_event("PreToolUse", "t1", "bash", json!({"command": "ls"})).to_string();
        let (code, stdout, stderr) = project.run(&["hook", "--config", "toolgate.toml"], &event);
        let answer: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!((code, decision(&answer).0), (0, expected), "{stdout}");
        assert!(
            decision(&answer).1.contains("store_unavailable")
                && stderr.contains("database is locked"),
            "{stdout}{stderr}"
        );
        ledger.execute_batch("COMMIT").unwrap();
        // The refused call is recorded with the next row.
        project.pre_tool_use("t2", "bash", json!({"command": "git push"}));
        assert!(
            project.recorded_outcomes().iter().any(|(_, code)| code == "store_unavailable"),
            "{:?}",
            project.recorded_outcomes()
        );
    }
}

/// Fills a disk to the last byte, so that a row can be neither stored nor spooled.
#[test]
fn unrecordable_call_is_refused_on_full_disk() {
    let project = TestProject::with_config(CONFIG);
    let script = format!(
        "set -e; mkdir full; mount -t tmpfs -o size=1m none full; cp toolgate.toml full; cd full\n\
         hook() {{ echo \"$1\" | '{}' hook --config toolgate.toml; }}\n\
         hook '{}' | cat > /dev/null\n\
         dd if=/dev/zero of=room bs=4k count=9 2> /dev/null; dd if=/dev/zero of=rest bs=4k 2> /dev/null || true; rm room\n\
         for n in 1 2 3 4 5 6 7 8; do hook '{{\"tool_name\": \"bash\", \"tool_input\": {{\"command\": \"git push '$n'\"}}}}' || echo \"exit $?\"; done\n\
         echo \"left $(find . -name '*.jsonl' -size 0 | wc -l)\"",
        assert_cmd::cargo::cargo_bin("toolgate").display(),
        hook_event("PreToolUse", "t0", "Bash", json!({"command": "git push"})),
    );
    let mut command = std::process::Command::new("unshare");
    project.set_environment(&mut command);
    let output = command.args(["-m", "sh", "-c", &script]).output().unwrap();
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if stderr.contains("Operation not permitted") || stderr.contains("must be superuser") {
        eprintln!("SKIPPED: mounting a disk needs root");
        return;
    }
    assert_eq!(stdout.matches("exit 2").count(), 8, "{stdout}{stderr}");
    assert!(stderr.contains("cannot store or spool") && stderr.contains("git push 8"), "{stderr}");
    assert!(stdout.contains("left 0"), "{stdout}");
}

/// Limits the hook process. Clients allow a call if a signal killed the hook.
#[test]
fn process_limit_refuses_call_without_killing_hook() {
    let run_limited = |project: &TestProject, limit: &str, line: &str| {
        let mut command = std::process::Command::new("sh");
        project.set_environment(&mut command);
        let event = hook_event("PreToolUse", "t1", "Bash", json!({"command": "ls"})).to_string();
        let script = format!("ulimit {limit}; exec {line}");
        let output =
            Command::from_std(command).args(["-c", &script]).write_stdin(event).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let code = output
            .status
            .code()
            .unwrap_or_else(|| panic!("{line} under {limit} was killed: {}", output.status));
        (code, text(output.stdout), text(output.stderr))
    };
    let program = |name: &str| format!("'{}'", assert_cmd::cargo::cargo_bin(name).display());
    let hooks = [program("toolgate-hook"), format!("{} hook", program("toolgate"))];
    for hook in hooks.map(|hook| format!("{hook} --config toolgate.toml")) {
        // Without a ledger, and with one.
        for is_new in [true, false] {
            let project = TestProject::with_config(CONFIG);
            if !is_new {
                project.pre_tool_use("t0", "Bash", json!({"command": "pwd"}));
            }
            for limit in ["-f 0", "-f 8", "-f 64"] {
                let (code, stdout, stderr) = run_limited(&project, limit, &hook);
                let answer: Value = serde_json::from_str(&stdout).unwrap_or_default();
                assert!(
                    code == 2 || (code == 0 && answer.is_object()),
                    "{hook} {limit}: {code} {stdout}{stderr}"
                );
                assert!(
                    limit != "-f 0" || code == 2 || decision(&answer).0 == "deny",
                    "{hook}: {stdout}{stderr}"
                );
            }
        }
        // If the answer cannot be written, the exit code denies the call.
        let (code, ..) =
            run_limited(&TestProject::with_config(CONFIG), "-f 0", &format!("{hook} > said"));
        assert_eq!(code, 2, "{hook}");
    }
    let (code, ..) = run_limited(
        &TestProject::new(),
        "-f 0",
        &format!("{} --help > said", program("toolgate-hook")),
    );
    assert_eq!(code, 2);
}
