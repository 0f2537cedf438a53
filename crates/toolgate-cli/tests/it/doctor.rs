//! Tests that `doctor` reports a gate that is off or may be off.

use serde_json::Value;

use crate::hook::TestProject;

#[test]
fn doctor_reports_disabled_gate() {
    type BreakageCase = (&'static str, fn(&TestProject));
    fn edit_settings(project: &TestProject, from: &str, to: &str) {
        let file = "project/.claude/settings.json";
        project.write(file, &project.read(file).replace(from, to));
    }
    let cases: [BreakageCase; 17] = [
        ("the hooks are gone", |project| {
            project.run(&["eject"], "");
        }),
        ("it lets calls run when it fails", |project| {
            edit_settings(project, ",\n            \"onFailure\": \"block\"", "")
        }),
        ("another program", |project| {
            let file = project.read("project/.claude/settings.json");
            let written: Value = serde_json::from_str(&file).unwrap();
            let program =
                written["hooks"]["PreToolUse"][0]["hooks"][0]["command"].as_str().unwrap();
            edit_settings(project, program, "/nowhere/toolgate-hook");
        }),
        ("only for some tools", |project| {
            edit_settings(project, "\"matcher\": \"*\"", "\"matcher\": \"Read\"")
        }),
        ("hooks are switched off", |project| {
            edit_settings(project, "{\n  \"hooks\"", "{\n  \"disableAllHooks\": true,\n  \"hooks\"")
        }),
        ("hooks are switched off elsewhere", |project| {
            project.write("project/.claude/settings.local.json", "{\"disableAllHooks\": true}")
        }),
        ("started with other words", |project| {
            edit_settings(project, "[\"--client\"", "[\"--help\", \"--client\"")
        }),
        ("a line that ends well whatever it says", |project| {
            let file = project.read("project/.claude/settings.json");
            let mut written: Value = serde_json::from_str(&file).unwrap();
            let entry = &mut written["hooks"]["PreToolUse"][0]["hooks"][0];
            let line = format!(
                "{} --client claude-code > /dev/null; touch ran",
                entry["command"].as_str().unwrap()
            );
            entry["command"] = line.into();
            entry.as_object_mut().unwrap().remove("args");
            project.write("project/.claude/settings.json", &written.to_string());
        }),
        ("a line that asks for help", |project| {
            let file = project.read("project/.claude/settings.json");
            let mut written: Value = serde_json::from_str(&file).unwrap();
            let entry = &mut written["hooks"]["PreToolUse"][0]["hooks"][0];
            entry["command"] =
                format!("{} --help; true", entry["command"].as_str().unwrap()).into();
            entry.as_object_mut().unwrap().remove("args");
            project.write("project/.claude/settings.json", &written.to_string());
        }),
        ("a ledger that another program locks", |project| {
            let ledger =
                rusqlite::Connection::open(project.path(".local/state/toolgate/ledger.db"))
                    .unwrap();
            ledger.execute_batch("BEGIN IMMEDIATE").unwrap();
            std::mem::forget(ledger);
        }),
        ("not waited for", |project| {
            edit_settings(project, "\"timeout\": 10", "\"async\": true, \"timeout\": 10")
        }),
        ("a configuration for something else", |project| {
            project.write("project/toolgate.toml", "[tools.look]\neffect = \"read\"\n");
            project.run(&["trust"], "");
        }),
        ("a time-out that is text", |project| {
            edit_settings(project, "\"timeout\": 10", "\"timeout\": \"10\"")
        }),
        ("a changed file", |project| project.write("project/toolgate.toml", "name = \"x\"\n")),
        ("a ledger that is gone", |project| {
            let ledger = project.path(".local/state/toolgate/ledger.db");
            std::fs::remove_file(ledger).unwrap();
        }),
        ("keys that others can read", |project| {
            use std::os::unix::fs::PermissionsExt;
            let keys = project.path(".local/state/toolgate/ledger.db.state/keys/seal.key");
            std::fs::set_permissions(keys, std::fs::Permissions::from_mode(0o644)).unwrap();
        }),
        ("a directory of keys that others can read", |project| {
            use std::os::unix::fs::PermissionsExt;
            for key in ["keys", "keys/seal.key"] {
                let key = project.path(&format!(".local/state/toolgate/ledger.db.state/{key}"));
                std::fs::set_permissions(key, std::fs::Permissions::from_mode(0o755)).unwrap();
            }
        }),
    ];
    let mut reports = String::new();
    for (name, break_it) in cases {
        let project = TestProject::new();
        assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
        break_it(&project);
        let output = project.masked_output(&["doctor"], "");
        assert!(output.starts_with("exit 1\n"), "{name}: {output}");
        assert!(
            !project.path("project/ran").exists(),
            "{name}: `doctor` ran the line of the settings"
        );
        let problems: Vec<&str> = output
            .lines()
            .filter(|line| !line.contains(" sandbox "))
            .skip_while(|line| !line.starts_with('✗'))
            .take_while(|line| !line.starts_with('✓') && !line.is_empty())
            .collect();
        reports.push_str(&format!("## {name}\n{}\n", problems.join("\n")));
    }
    insta::assert_snapshot!(reports);
}

#[test]
fn doctor_reports_hooks_blocked_by_managed_settings() {
    let run_doctor = |client: &str, files: &[(&str, &str)]| {
        let project = TestProject::new();
        assert_eq!(project.run(&["init", "--for", client], "").0, 0);
        for (name, text) in files {
            // The hooks that `init` has written.
            let hooks = std::fs::read_to_string(project.path("project/.claude/settings.json"))
                .unwrap_or_default();
            project.write(name, &text.replace("HOOKS", hooks.trim().trim_start_matches('{')));
        }
        let managed = project.path("managed").display().to_string();
        let (code, stdout, stderr) =
            project.run_with(&[("TOOLGATE_MANAGED_SETTINGS", managed.as_str())], &["doctor"], "");
        assert_eq!(stderr, "");
        (code, stdout.replace(&managed, "MANAGED"))
    };
    let all = "managed/managed-settings.json";
    let (first, second) =
        ("managed/managed-settings.d/10-one.json", "managed/managed-settings.d/20-two.json");
    let (on, off) = ("{\"allowManagedHooksOnly\": true}", "{\"allowManagedHooksOnly\": false}");
    type SettingsFiles<'a> = &'a [(&'a str, &'a str)];
    let cases: [(SettingsFiles<'_>, Option<&str>); 9] = [
        (&[], None),
        (&[(all, off)], None),
        (
            &[(all, on)],
            Some(
                "`allowManagedHooksOnly` is on in MANAGED/managed-settings.json: Claude Code does not run hooks of users",
            ),
        ),
        (
            &[(all, "{}"), (first, on)],
            Some("`allowManagedHooksOnly` is on in MANAGED/managed-settings.d/10-one.json"),
        ),
        // The last managed file takes precedence, and settings of users do not count.
        (&[(first, on), (second, off)], None),
        (&[("project/.claude/settings.local.json", on)], None),
        (
            &[(all, "{\"disableAllHooks\": true}")],
            Some("`disableAllHooks` is on in MANAGED/managed-settings.json"),
        ),
        // Hooks in managed settings run.
        (&[(all, "{\"allowManagedHooksOnly\": true, HOOKS")], None),
        (&[(all, on), (second, "{ HOOKS")], None),
    ];
    for (files, why) in cases {
        let (code, report) = run_doctor("claude-code", files);
        assert_eq!(code, i32::from(why.is_some()), "{files:?}: {report}");
        assert!(why.is_none_or(|why| report.contains(why)), "{files:?}: {report}");
    }
    let (_, report) =
        run_doctor("claude-code", &[(all, "{\"allowManagedHooksOnly\": true, HOOKS")]);
    assert!(report.contains("MANAGED/managed-settings.json (claude-code)"), "{report}");
    // Other clients do not read the managed settings of Claude Code.
    assert_eq!(run_doctor("cursor", &[(all, on)]).0, 0);
}

#[test]
fn doctor_reports_settings_that_client_ignores() {
    let (claude, codex, cursor) =
        (".claude/settings.json", ".codex/hooks.json", ".cursor/hooks.json");
    let strict = Some("comments and trailing commas are not allowed");
    for (client, file, from, to, why) in [
        ("claude-code", claude, "{\n", "{\n  // mine\n", strict),
        ("claude-code", claude, "{\n", "{\n  \"env\": { \"A\": \"b\", },\n", strict),
        ("codex", codex, "{\n", "{\n  // mine\n", strict),
        ("cursor", cursor, "{\n", "{\n  // mine\n", None),
        // A malformed entry of another program disables the whole file.
        (
            "claude-code",
            claude,
            "\"hooks\": {\n",
            "\"hooks\": {\n    \"Stop\": [{}],\n",
            Some("`hooks.Stop[0]` has no list of `hooks`"),
        ),
        (
            "claude-code",
            claude,
            "\"hooks\": {\n",
            "\"hooks\": {\n    \"Stop\": [{ \"matcher\": {}, \"hooks\": [] }],\n",
            Some("`hooks.Stop[0]` has a `matcher` that is not a string"),
        ),
    ] {
        let project = TestProject::new();
        assert_eq!(project.run(&["init", "--for", client], "").0, 0, "{client}");
        let path = format!("project/{file}");
        let written = project.read(&path);
        assert!(written.contains(from), "{written}");
        project.write(&path, &written.replacen(from, to, 1));
        let (doctor_output, init_output) = (
            project.masked_output(&["doctor"], ""),
            project.masked_output(&["init", "--for", client], ""),
        );
        match why {
            None => assert!(
                doctor_output.starts_with("exit 0\n") && !init_output.contains("ignores this file"),
                "{client}: {doctor_output}{init_output}"
            ),
            Some(why) => {
                let expected = format!("the client ignores the file and all hooks in it: {why}");
                assert!(
                    doctor_output.starts_with("exit 1\n")
                        && doctor_output.contains(&expected)
                        && !doctor_output.contains("✓ hooks"),
                    "{to}: {doctor_output}"
                );
                assert!(
                    init_output.contains(&format!(
                        "{client} ignores this file and all hooks in it: {why}"
                    )),
                    "{to}: {init_output}"
                );
            }
        }
    }
    // A file that no client can read is not changed. Of two lists with one name, a client uses one.
    for (text, why) in [
        ("{'model': 'opus'}\n", ".claude/settings.json: "),
        ("{\"hooks\": {\"Stop\": [], \"Stop\": []}}\n", "duplicate key `hooks.Stop`"),
        ("[]\n", ".claude/settings.json: not a JSON object; replace it with `{}` or move it away"),
    ] {
        let project = TestProject::new();
        project.write("project/.claude/settings.json", text);
        let output = project.masked_output(&["init", "--for", "claude-code"], "");
        assert!(output.starts_with("exit 2\n") && output.contains(why), "{text}: {output}");
        assert_eq!(project.read("project/.claude/settings.json"), text);
        assert!(!project.path("project/toolgate.toml").exists());
    }
}

#[test]
fn doctor_reports_other_program_of_same_name() {
    let project = TestProject::new();
    let toolgate = assert_cmd::cargo::cargo_bin("toolgate");
    std::fs::create_dir(project.path("bin")).unwrap();
    for name in ["toolgate", "toolgate-hook"] {
        std::fs::copy(toolgate.with_file_name(name), project.path(&format!("bin/{name}"))).unwrap();
    }
    let run_verb = |verb: &[&str]| {
        let mut command = std::process::Command::new(project.path("bin/toolgate"));
        project.set_environment(&mut command);
        let output = command.args(verb).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    assert_eq!(run_verb(&["init", "--for", "claude-code"]).0, 0);
    let (code, stdout) = run_verb(&["doctor"]);
    assert_eq!(code, 0, "{stdout}");
    std::fs::write(project.path("bin/toolgate-hook"), "#!/bin/sh\nexit 0\n").unwrap();
    let (code, stdout) = run_verb(&["doctor"]);
    assert!(
        code == 1 && stdout.contains("PreToolUse: a call that must be refused got no decision"),
        "{stdout}"
    );
}

#[test]
fn doctor_rejects_canary_denied_by_other_rule() {
    let config = "principals = [\"bob\"]\n[tools.bash]\nkind = \"client\"\nshell = \"/command\"\npolicy = \"open\"\n";
    let project = TestProject::with_config(config);
    let output = project.masked_output(&["doctor", "--config", "toolgate.toml"], "");
    let why = "✗ canary         a call that must be refused was refused, but not by the rule that protects toolgate: ";
    assert!(
        output.starts_with("exit 1\n")
            && output.contains(why)
            && output.contains("may not act as the agent"),
        "{output}"
    );
}

#[test]
fn doctor_sends_canary_to_tools_with_closed_schema() {
    let project = TestProject::new();
    assert_eq!(project.run(&["init"], "").0, 0);
    let output = project.masked_output(&["doctor"], "");
    assert!(!output.contains("✗ canary"), "{output}");
    let closed = "[tools.look]\nkind = \"client\"\neffect = \"read\"\ninput = { type = \"object\", required = [\"where\"], properties = { where = { type = \"string\" } } }\n";
    project.write("project/toolgate.toml", closed);
    assert!(
        project
            .masked_output(&["doctor", "--config", "toolgate.toml"], "")
            .contains("✓ canary         a call that must be refused was refused")
    );
    project
        .write("project/toolgate.toml", &closed.replace("type = \"string\"", "type = \"integer\""));
    assert!(
        project
            .masked_output(&["doctor", "--config", "toolgate.toml"], "")
            .contains("! canary         no declared tool can be asked")
    );
}

#[test]
fn new_ledger_requires_flag_and_empty_path() {
    let project = TestProject::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    let output = project.masked_output(&["trust", "--new-ledger"], "");
    assert!(output.contains("exists; move it away first"), "{output}");
    for name in ["ledger.db", "ledger.db-wal", "ledger.db-shm"] {
        let _ = std::fs::remove_file(project.path(&format!(".local/state/toolgate/{name}")));
    }
    // The state of the old ledger prevents a new ledger, and nothing is created before the state is
    // removed.
    let known_ledgers = project.read(".local/state/toolgate/ledgers.json");
    let output = project.masked_output(&["trust", "--new-ledger"], "");
    assert!(
        output.starts_with("exit 2\n")
            && output.contains("ledger.db.state exists; move it away first"),
        "{output}"
    );
    assert!(!project.path(".local/state/toolgate/ledger.db").exists());
    assert_eq!(project.read(".local/state/toolgate/ledgers.json"), known_ledgers);
    std::fs::remove_dir_all(project.path(".local/state/toolgate/ledger.db.state")).unwrap();
    assert!(project.masked_output(&["doctor"], "").starts_with("exit 1\n"));
    assert!(project.masked_output(&["trust", "--new-ledger"], "").contains("created a new ledger"));
    assert!(project.masked_output(&["doctor"], "").starts_with("exit 0\n"));
}
