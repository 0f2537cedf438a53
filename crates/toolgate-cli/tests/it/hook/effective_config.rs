//! Tests which configuration is in force: trust, precedence and named files.

use assert_cmd::Command;
use assert_cmd::cargo::CommandCargoExt;
use serde_json::json;

use super::{CONFIG, TestProject, decision, hook_event, list_files, post_tool_use_event};

#[test]
fn check_uses_rules_of_effective_config() {
    let user_config = "name = \"coder\"\n[tools.bash]\nkind = \"client\"\nshell = \"/command\"\n[[policy]]\nname = \"no_curl\"\nrule = \"deny\"\ntools = [\"bash\"]\n\
               where = [{ argument = \"/command\", runs = [\"curl\"] }]\n";
    let project = TestProject::new();
    let decide = |args: &[&str], command: &str| {
        let call = json!({"tool": "bash", "arguments": {"command": command}}).to_string();
        let (code, stdout, stderr) = project.run(&[args, &[call.as_str()]].concat(), "");
        assert_eq!(code, 0, "{stderr}");
        stdout
    };
    // The user's own file is sufficient.
    project.write(".config/toolgate/toolgate.toml", user_config);
    assert!(decide(&["check"], "curl x.example").contains("no_curl"));
    project.write("project/toolgate.toml", CONFIG);
    for verb in ["check", "explain"] {
        assert!(decide(&[verb], "git push").contains("no_push"), "{verb}");
        assert!(decide(&[verb], "curl x.example").contains("no_curl"), "{verb}");
        assert!(decide(&[verb], "rm .claude/settings.json").contains("own_files"), "{verb}");
        assert!(decide(&[verb], "cat ~/.local/state/toolgate/key").contains("own_state"), "{verb}");
        assert!(decide(&[verb], "ls").starts_with("allow"), "{verb}");
        // A named file applies alone.
        for command in ["curl x.example", "cat ~/.local/state/toolgate/key"] {
            assert!(
                decide(&[verb, "--config", "toolgate.toml"], command).starts_with("allow"),
                "{verb} {command}"
            );
        }
    }
    assert!(!project.path(".local").exists(), "a file was created");
}

#[test]
fn backtest_with_effective_config_changes_nothing() {
    let project = TestProject::with_config(&format!("{CONFIG}\n[client]\nundeclared = \"ask\"\n"));
    let input = json!({"place": "Rome"});
    assert_eq!(decision(&project.pre_tool_use("t1", "Weather", input.clone())).0, "ask");
    project.run_hook(&post_tool_use_event("t1", "Weather", input, json!("rain")));
    let assert_backtest = |file: &str, code: i32, expected: &str| {
        let (exit_code, stdout, stderr) =
            project.run(&["backtest", "--config", file, "--store", "ledger.db"], "");
        assert!(
            exit_code == code && stdout.contains(expected),
            "{file}: {exit_code} {stdout}{stderr}"
        );
    };
    // An undeclared tool still needs approval.
    assert_backtest("toolgate.toml", 0, "1 call: 1 would be decided the same, 0 differently");
    project.write("project/strict.toml", CONFIG);
    assert_backtest("strict.toml", 1, "there is no tool `weather`");
    // The same holds for a file that has only rules.
    let (_, rules) = CONFIG.split_once("[[policy]]").unwrap();
    project.write("project/rules.toml", &format!("[[policy]]{rules}"));
    assert_backtest("rules.toml", 0, "1 call: 1 would be decided the same, 0 differently");
}

#[test]
fn backtest_merges_project_config_under_user_config() {
    let project = TestProject::with_config(CONFIG);
    let user_config = "[tools.bash]\nkind = \"client\"\nshell = \"/command\"\n[[policy]]\nname = \"no_curl\"\nrule = \"deny\"\ntools = [\"bash\"]\n\
               where = [{ argument = \"/command\", runs = [\"curl\"] }]\n";
    project.write(".config/toolgate/toolgate.toml", user_config);
    assert_eq!(project.run(&["trust"], "").0, 0);
    let answer = project.run_hook_with(
        &["hook"],
        &hook_event("PreToolUse", "t1", "Bash", json!({"command": "curl x.example"})),
    );
    assert_eq!(decision(&answer).0, "deny", "{answer}");
    project.write("project/copy.toml", CONFIG);
    // A file other than the project file applies alone.
    for (file, code) in [("toolgate.toml", 0), ("copy.toml", 1)] {
        let (exit_code, stdout, stderr) =
            project.run(&["backtest", "--config", file, "--store", "ledger.db"], "");
        assert_eq!(exit_code, code, "{file}: {stdout}{stderr}");
    }
}

#[test]
fn untrusted_project_file_does_not_block_hook() {
    let project = TestProject::new();
    project.write(".config/toolgate/toolgate.toml", CONFIG);
    assert!(
        std::process::Command::new("mkfifo").arg(project.path("pipe")).status().unwrap().success()
    );
    let pipe = project.path("pipe").display().to_string();
    let hook = format!(
        "[[hooks]]\nname = \"h\"\ncommand = \"{pipe}\"\nenv = {{ KEY = {{ file = \"{pipe}\" }} }}\n"
    );
    // The user's own file is in force.
    let assert_user_rule_applies = |id: &str, config: &str| {
        let call =
            hook_event("PreToolUse", id, "Bash", json!({"command": format!("git push {id}")}));
        let answer = project.run_hook_with(&["hook"], &call);
        assert!(decision(&answer).1.contains("Do not push"), "{config}: {answer}");
    };
    let files = [
        format!("include = [\"{pipe}\"]\n{CONFIG}"),
        format!("mcp_servers = [\"{pipe}\"]\n{CONFIG}"),
        format!("{CONFIG}{hook}"),
    ];
    for (n, config) in files.into_iter().enumerate() {
        project.write("project/toolgate.toml", &config);
        assert_user_rule_applies(&format!("a{n}"), &config);
        // `check` of the file reports the error.
        let (code, _, stderr) =
            project.run(&["check", "--config", "toolgate.toml", "{\"tool\": \"bash\"}"], "");
        assert!(code == 2 && stderr.contains("not a regular file"), "{config}: {stderr}");
        // The same holds for a file that was trusted before it changed.
        project.write("project/toolgate.toml", CONFIG);
        assert_eq!(project.run(&["trust"], "").0, 0);
        project.write("project/toolgate.toml", &config);
        assert_user_rule_applies(&format!("b{n}"), &config);
        assert_eq!(project.run(&["trust", "--revoke"], "").0, 0);
    }
}

#[test]
fn agent_cannot_write_config_in_subdirectory() {
    let project = TestProject::with_config(CONFIG);
    project.write(
        ".config/toolgate/toolgate.toml",
        "[tools.write]\nkind = \"client\"\npolicy = \"open\"\n",
    );
    assert_eq!(project.run(&["trust"], "").0, 0);
    std::fs::create_dir_all(project.path("project/inner")).unwrap();
    let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
    project.set_environment(&mut command);
    command.current_dir(project.path("project/inner"));
    let event = hook_event(
        "PreToolUse",
        "t1",
        "Write",
        json!({"file_path": project.path("project/inner/toolgate.toml"), "content": ""}),
    );
    let output =
        Command::from_std(command).arg("hook").write_stdin(event.to_string()).output().unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().contains("own_files"));
}

#[test]
fn project_config_is_ignored_until_trusted() {
    let project = TestProject::with_config(CONFIG);
    let ask = |n: u32, command: &str| {
        project.run_hook_with(
            &["hook"],
            &hook_event("PreToolUse", &format!("t{n}"), "Bash", json!({"command": command})),
        )
    };
    let start_session = || {
        project.run_hook_with(
            &["hook"],
            &json!({"hook_event_name": "SessionStart", "session_id": "s1"}),
        )
    };
    // The project file is not trusted, and the user has no file.
    assert!(decision(&ask(1, "ls")).1.ends_with(
        "is not trusted in its current form; read it, then run `toolgate trust` in a terminal"
    ));
    // The user's own file applies alone, and a message reports that.
    let user_config = "[tools.bash]\nkind = \"client\"\nshell = \"/command\"\n[[policy]]\nname = \"no_curl\"\nrule = \"deny\"\ntools = [\"bash\"]\nwhere = [{ argument = \"/command\", runs = [\"curl\"] }]\n";
    project.write(".config/toolgate/toolgate.toml", user_config);
    assert_eq!(decision(&ask(2, "git push")).0, "none");
    assert_eq!(decision(&ask(3, "curl x")).0, "deny");
    assert!(start_session()["systemMessage"].as_str().unwrap().contains("is ignored: not trusted"));
    // When the project file is trusted, both files apply.
    assert_eq!(project.run(&["trust"], "").0, 0);
    assert_eq!(decision(&ask(4, "git push origin")).0, "deny");
    assert_eq!(decision(&ask(5, "curl y")).0, "deny");
    assert_eq!(start_session(), json!({}));
    // After any change the file must be trusted again.
    project.write("project/toolgate.toml", &CONFIG.replace("git push", "git pull"));
    assert_eq!(decision(&ask(6, "git push upstream")).0, "none");
    assert_eq!(project.run(&["trust"], "").0, 0);
    assert_eq!(decision(&ask(7, "git pull")).0, "deny");
    assert_eq!(project.run(&["trust", "--revoke"], "").0, 0);
    assert_eq!(decision(&ask(8, "git pull --all")).0, "none");
}

#[test]
fn trust_covers_config_path_includes_and_programs() {
    let config = format!(
        "include = [\"more.toml\"]\n{CONFIG}\n[[hooks]]\nname = \"house\"\ncommand = \"./house.sh\"\ntools = [\"bash\"]\n"
    );
    let project = TestProject::with_config(&config);
    project.write("project/more.toml", "");
    project.write_script("project/house.sh", "#!/bin/sh\nexit 0\n");
    let ask = |n: u32| {
        project.run_hook_with(
            &["hook"],
            &hook_event(
                "PreToolUse",
                &format!("t{n}"),
                "Bash",
                json!({"command": format!("ls {n}")}),
            ),
        )
    };
    assert_eq!(project.run(&["trust", "toolgate.toml"], "").0, 0);
    assert_eq!(ask(1), json!({}));
    // The program of a hook is part of the trusted configuration.
    project.write("project/house.sh", "#!/bin/sh\necho '{}'\n");
    let answer = ask(2);
    let reason = decision(&answer).1;
    assert!(
        reason.contains("project/toolgate.toml or an included file (")
            && reason.contains("is not trusted"),
        "{reason}"
    );
    assert!(
        reason.contains("`more.toml`") && reason.contains("house.sh`"),
        "the message must name all files: {reason}"
    );
}

#[test]
fn hook_secret_is_absent_from_ledger_and_output() {
    let hook = "[[hooks]]\nname = \"house\"\ncommand = \"./house.sh\"\ntools = [\"bash\"]\nenv = { KEY = { file = \"house.key\" }, PLACE = \"at ${HOME}\" }\n";
    let project = TestProject::with_config(&format!("{CONFIG}\n{hook}"));
    project.write("project/house.key", "s3cret\n");
    project.write_script(
        "project/house.sh",
        "#!/bin/sh\n[ \"$KEY\" = s3cret ] && [ \"$PLACE\" = \"at $HOME\" ] || exit 2\n",
    );
    assert_eq!(project.pre_tool_use("t1", "Bash", json!({"command": "ls"})), json!({}));
    project.run_hook(&post_tool_use_event("t1", "Bash", json!({"command": "ls"}), json!({})));
    // The secret is redacted even if the hook prints it.
    for (n, command) in [
        "echo \"wrong key $KEY\" >&2; exit 2",
        "echo $KEY >&2; exit 3",
        "echo \"{\\\"decision\\\": \\\"deny\\\", \\\"reason\\\": \\\"$KEY\\\"}\"",
    ]
    .iter()
    .enumerate()
    {
        project.write("project/house.sh", &format!("#!/bin/sh\n{command}\n"));
        let answer = project
            .pre_tool_use(&format!("u{n}"), "Bash", json!({"command": format!("ls {n}")}))
            .to_string();
        assert!(
            answer.contains("deny") && answer.contains("[redacted]") && !answer.contains("s3cret"),
            "{answer}"
        );
    }
    let other_files = list_files(&project.path("")).into_iter().filter(|path| {
        path.file_name().is_some_and(|name| name != "house.key" && name != "house.sh")
    });
    for path in other_files {
        let text = std::fs::read(&path).unwrap();
        assert!(!text.windows(6).any(|part| part == b"s3cret"), "{}", path.display());
    }
}

#[test]
fn flag_overrides_environment_and_environment_overrides_file() {
    let project = TestProject::with_config(CONFIG);
    project.write("other/toolgate.toml", &CONFIG.replace("Do not push", "Never push"));
    let run = |variables: &[(&str, &str)], args: &[&str]| {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.set_environment(&mut command);
        command.envs(variables.iter().copied());
        let event =
            hook_event("PreToolUse", "t1", "Bash", json!({"command": "git push"})).to_string();
        String::from_utf8(
            Command::from_std(command).args(args).write_stdin(event).output().unwrap().stdout,
        )
        .unwrap()
    };
    let other = project.path("other/toolgate.toml");
    let variable =
        [("TOOLGATE_CONFIG", other.to_str().unwrap()), ("TOOLGATE_STORE", "elsewhere.db")];
    assert!(run(&variable, &["hook"]).contains("Never push"));
    assert!(
        project.path("project/elsewhere.db").exists() && !project.path("other/ledger.db").exists()
    );
    assert!(run(&variable, &["hook", "--config", "toolgate.toml"]).contains("Do not push"));
    // Each `--store` has its own ledger and its own cache.
    for _ in 0..2 {
        for store in ["one.db", "two.db"] {
            run(&variable, &["hook", "--store", store, "--config", "toolgate.toml"]);
        }
    }
    for store in ["one.db", "two.db"] {
        let (_, rows, _) = project.run(&["audit", "query", "--json", "--store", store], "");
        assert_eq!(rows.lines().count(), 2, "{store}: {rows}");
    }
    let (_, output, _) =
        project.run(&["doctor", "--config", "toolgate.toml", "--store", "three.db"], "");
    assert!(
        output.contains("✓ ledger") && output.contains("three.db") && output.contains("✓ canary"),
        "{output}"
    );
}

#[test]
fn backtest_decides_recorded_calls_by_whole_config() {
    let project = TestProject::with_config(CONFIG);
    for n in 0..4 {
        let input = json!({"file_path": format!("/tmp/{n}")});
        project.pre_tool_use(&format!("r{n}"), "read", input.clone());
        project.run_hook(&post_tool_use_event(&format!("r{n}"), "read", input, json!("text")));
    }
    project.pre_tool_use("t1", "bash", json!({"command": "git push"}));
    project.pre_tool_use(
        "t2",
        "bash",
        json!({"command": format!("cat {}", project.path("project/ledger.db").display())}),
    );
    let backtest = |text: &str| {
        project.write("project/new.toml", text);
        project.masked_output(&["backtest", "--config", "new.toml", "--store", "ledger.db"], "")
    };
    let same = backtest(CONFIG);
    assert!(same.starts_with("exit 0\n6 calls: 6 would be decided the same"), "{same}");
    // Limits, tools, effects and included files are part of a configuration.
    let limited = backtest(
        &CONFIG
            .replace("name = \"coder\"", "name = \"coder\"\nlimits = { session = { calls = 2 } }"),
    );
    assert!(
        limited.starts_with("exit 1\n")
            && limited.matches("now refused").count() >= 2
            && limited.contains("budget"),
        "{limited}"
    );
    let without = backtest(&CONFIG.replace("[tools.read]", "[tools.reading]"));
    assert!(without.contains("4 differently") && without.contains("unknown_tool"), "{without}");
    let (rules, push) = CONFIG.split_once("[[policy]]\nname = \"no_push\"").unwrap();
    let (_, rest) = push.split_once("[[policy]]").unwrap();
    project.write(
        "project/more.toml",
        "[[policy]]\nname = \"no_tmp\"\nrule = \"deny\"\ntools = [\"read\"]\nwhere = [{ argument = \"/file_path\", glob = \"/tmp/*\" }]\n",
    );
    let included = backtest(&format!("include = [\"more.toml\"]\n{rules}[[policy]]{rest}"));
    assert!(
        included.contains("5 differently")
            && included.contains("by `no_tmp`")
            && included.contains("now admitted"),
        "{included}"
    );
    // The new input schemas apply.
    let closed =
        CONFIG.replace("[tools.read]\n", "[tools.read]\ninput = { type = \"object\", properties = { path = { type = \"string\" } } }\n");
    assert!(backtest(&closed).contains("4 differently"), "{}", backtest(&closed));
    // A configuration with `reconcile` works for hooks too.
    let with_reconcile = CONFIG.replace(
        "[tools.write]\n",
        "[tools.write]\nreconcile = { tool = \"read\", happened = { \"/done\" = true } }\n",
    );
    project.write("project/asks.toml", &with_reconcile);
    let output = project.run_hook_with(
        &["hook", "--config", "asks.toml"],
        &hook_event("PreToolUse", "w1", "write", json!({})),
    );
    assert_eq!(output, json!({}));
    // The protection of toolgate does not depend on the configuration.
    assert!(!included.contains("ledger.db"), "{included}");
    for (text, why) in [
        (format!("nonsense_key = 1\n{CONFIG}"), "nonsense_key"),
        (CONFIG.replace("name = \"coder\"", "name = \"painter\""), "has no agent `coder`"),
        (
            "limits = { session = { calls = 1 } }\n[[policy]]\nname = \"x\"\nrule = \"deny\"\ntools = [\"bash\"]\n".to_owned(),
            "pass a complete configuration",
        ),
    ] {
        let output = backtest(&text);
        assert!(output.starts_with("exit 2\n") && output.contains(why), "{output}");
    }
}
