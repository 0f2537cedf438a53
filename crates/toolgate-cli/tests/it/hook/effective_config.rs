//! Which configuration holds: who has accepted it, what counts for more, and what is kept ready of
//! it.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use assert_cmd::cargo::CommandCargoExt;
use serde_json::json;

use super::service::HookServiceProcess;
use super::{CONFIG, TestProject, decision, hook_event, list_files, post_tool_use_event};

#[test]
fn check_uses_rules_of_effective_config() {
    let own = "name = \"coder\"\n[tools.bash]\nkind = \"client\"\nshell = \"/command\"\n[[policy]]\nname = \"no_curl\"\nrule = \"deny\"\ntools = [\"bash\"]\n\
               where = [{ argument = \"/command\", runs = [\"curl\"] }]\n";
    let project = TestProject::new();
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
            assert!(
                tried(&[verb, "--config", "toolgate.toml"], command).starts_with("allow"),
                "{verb} {command}"
            );
        }
    }
    assert!(!project.path(".local").exists(), "nothing is touched");
}

#[test]
fn backtest_with_effective_config_changes_nothing() {
    let project = TestProject::with_config(&format!("{CONFIG}\n[client]\nundeclared = \"ask\"\n"));
    let input = json!({"place": "Rome"});
    assert_eq!(decision(&project.pre_tool_use("t1", "Weather", input.clone())).0, "ask");
    project.run_hook(&post_tool_use_event("t1", "Weather", input, json!("rain")));
    let tried = |file: &str, code: i32, wanted: &str| {
        let (said, stdout, stderr) =
            project.run(&["backtest", "--config", file, "--store", "ledger.db"], "");
        assert!(said == code && stdout.contains(wanted), "{file}: {said} {stdout}{stderr}");
    };
    // A tool that it does not declare is asked about, as it was.
    tried("toolgate.toml", 0, "1 call: 1 would be decided the same, 0 differently");
    project.write("project/strict.toml", CONFIG);
    tried("strict.toml", 1, "there is no tool `weather`");
    // So it is under other rules.
    let (_, rules) = CONFIG.split_once("[[policy]]").unwrap();
    project.write("project/rules.toml", &format!("[[policy]]{rules}"));
    tried("rules.toml", 0, "1 call: 1 would be decided the same, 0 differently");
}

#[test]
fn backtest_merges_project_config_under_user_config() {
    let project = TestProject::with_config(CONFIG);
    let own = "[tools.bash]\nkind = \"client\"\nshell = \"/command\"\n[[policy]]\nname = \"no_curl\"\nrule = \"deny\"\ntools = [\"bash\"]\n\
               where = [{ argument = \"/command\", runs = [\"curl\"] }]\n";
    project.write(".config/toolgate/toolgate.toml", own);
    assert_eq!(project.run(&["trust"], "").0, 0);
    let answer = project.run_hook_with(
        &["hook"],
        &hook_event("PreToolUse", "t1", "Bash", json!({"command": "curl x.example"})),
    );
    assert_eq!(decision(&answer).0, "deny", "{answer}");
    project.write("project/copy.toml", CONFIG);
    // Another file is all there is.
    for (file, code) in [("toolgate.toml", 0), ("copy.toml", 1)] {
        let (said, stdout, stderr) =
            project.run(&["backtest", "--config", file, "--store", "ledger.db"], "");
        assert_eq!(said, code, "{file}: {stdout}{stderr}");
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
    // What holds is one's own.
    let holds = |id: &str, named: &str| {
        let call =
            hook_event("PreToolUse", id, "Bash", json!({"command": format!("git push {id}")}));
        let answer = project.run_hook_with(&["hook"], &call);
        assert!(decision(&answer).1.contains("Nobody pushes"), "{named}: {answer}");
    };
    let files = [
        format!("include = [\"{pipe}\"]\n{CONFIG}"),
        format!("mcp_servers = [\"{pipe}\"]\n{CONFIG}"),
        format!("{CONFIG}{hook}"),
    ];
    for (n, named) in files.into_iter().enumerate() {
        project.write("project/toolgate.toml", &named);
        holds(&format!("a{n}"), &named);
        // Whoever looks at it hears what is wrong with it.
        let (code, _, said) =
            project.run(&["check", "--config", "toolgate.toml", "{\"tool\": \"bash\"}"], "");
        assert!(code == 2 && said.contains("not a regular file"), "{named}: {said}");
        // The same where it was accepted as it was before.
        project.write("project/toolgate.toml", CONFIG);
        assert_eq!(project.run(&["trust"], "").0, 0);
        project.write("project/toolgate.toml", &named);
        holds(&format!("b{n}"), &named);
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
fn config_cache_is_separate_per_environment() {
    let project = TestProject::with_config(&CONFIG.replace("store = \"ledger.db\"\n", ""));
    std::thread::sleep(std::time::Duration::from_millis(1_200));
    let run = |store: Option<&str>, id: &str| {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.set_environment(&mut command);
        command.envs(store.map(|store| ("TOOLGATE_STORE", store)));
        let event =
            hook_event("PreToolUse", id, "Bash", json!({"command": format!("git push {id}")}));
        Command::from_std(command)
            .args(["hook", "--config", "toolgate.toml"])
            .write_stdin(event.to_string())
            .output()
            .unwrap();
    };
    let rows = |store: &Path| {
        project.run(&["audit", "export", "--store", store.to_str().unwrap()], "").1.lines().count()
    };
    (0..3).for_each(|n| run(None, &format!("a{n}")));
    (0..2).for_each(|n| run(Some("other.db"), &format!("b{n}")));
    assert_eq!(
        (
            rows(&project.path(".local/state/toolgate/ledger.db")),
            rows(&project.path("project/other.db"))
        ),
        (3, 2)
    );
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
    let start = || {
        project.run_hook_with(
            &["hook"],
            &json!({"hook_event_name": "SessionStart", "session_id": "s1"}),
        )
    };
    // Nobody has accepted it, and there is nothing else.
    assert!(decision(&ask(1, "ls")).1.ends_with(
        "is not trusted in its current form; read it, then run `toolgate trust` in a terminal"
    ));
    // The user's own holds alone, and says so.
    let own = "[tools.bash]\nkind = \"client\"\nshell = \"/command\"\n[[policy]]\nname = \"no_curl\"\nrule = \"deny\"\ntools = [\"bash\"]\nwhere = [{ argument = \"/command\", runs = [\"curl\"] }]\n";
    project.write(".config/toolgate/toolgate.toml", own);
    assert_eq!(decision(&ask(2, "git push")).0, "none");
    assert_eq!(decision(&ask(3, "curl x")).0, "deny");
    assert!(start()["systemMessage"].as_str().unwrap().contains("is ignored: not trusted"));
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
fn config_cache_is_dropped_on_any_change() {
    let project = TestProject::with_config(CONFIG);
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
    let settle = || {
        std::fs::File::open(project.path("project/toolgate.toml"))
            .unwrap()
            .set_modified(old)
            .unwrap()
    };
    settle();
    std::thread::sleep(std::time::Duration::from_millis(1_100));
    let kept = project.path(".local/state/toolgate/compiled");
    assert_eq!(
        decision(&project.pre_tool_use("t1", "Bash", json!({"command": "git push a"}))).0,
        "deny"
    );
    let files = || {
        list_files(&kept)
            .into_iter()
            .filter(|path| path.file_name().is_some_and(|name| name == "bash"))
            .collect::<Vec<_>>()
    };
    assert_eq!(files().len(), 1);
    // The same words, from what is kept.
    assert_eq!(
        decision(&project.pre_tool_use("t2", "Bash", json!({"command": "git push b"}))).0,
        "deny"
    );
    assert_eq!(decision(&project.pre_tool_use("t3", "Read", json!({"file_path": "x"}))).0, "allow");
    // Somebody edits what is kept: it counts for nothing.
    let [path] = files().try_into().unwrap();
    let mut text = std::fs::read(&path).unwrap();
    let at = text.windows(8).position(|part| part == b"git push").unwrap();
    text[at..at + 8].copy_from_slice(b"git pull");
    std::fs::write(&path, text).unwrap();
    assert_eq!(
        decision(&project.pre_tool_use("t4", "Bash", json!({"command": "git push c"}))).0,
        "deny"
    );
    // Somebody edits the file: what is kept counts for nothing.
    project.write("project/toolgate.toml", &CONFIG.replace("git push", "git pull"));
    assert_eq!(
        decision(&project.pre_tool_use("t5", "Bash", json!({"command": "git push d"}))).0,
        "none"
    );
}

#[test]
fn config_cache_is_dropped_when_symlink_changes() {
    let link = |from: PathBuf, to: PathBuf| {
        std::fs::rename(&from, &to).unwrap();
        std::os::unix::fs::symlink(to, from).unwrap();
    };
    for (serves, args) in
        [(false, ["hook", "--config", "toolgate.toml"]), (true, ["hook", "--socket", "hook.sock"])]
    {
        let project = TestProject::with_config(CONFIG);
        project.write("project/.claude/settings.json", "{}");
        project.write("dotfiles/other.json", "{}");
        std::thread::sleep(std::time::Duration::from_millis(1_200));
        let _service = serves.then(|| HookServiceProcess::start(&project));
        let write = |id: &str, name: &str| {
            let answer = project.run_hook_with(
                &args,
                &hook_event(
                    "PreToolUse",
                    id,
                    "Write",
                    json!({"file_path": project.path(name), "content": id}),
                ),
            );
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
fn trust_covers_config_path_includes_and_programs() {
    let config = format!(
        "include = [\"more.toml\"]\n{CONFIG}\n[[hooks]]\nname = \"house\"\ncommand = \"./house.sh\"\ntools = [\"bash\"]\n"
    );
    let project = TestProject::with_config(&config);
    project.write("project/more.toml", "");
    project.write("project/house.sh", "#!/bin/sh\nexit 0\n");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(
        project.path("project/house.sh"),
        std::fs::Permissions::from_mode(0o755),
    )
    .unwrap();
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
    // A program that is asked is part of what was accepted.
    project.write("project/house.sh", "#!/bin/sh\necho '{}'\n");
    let answer = ask(2);
    let said = decision(&answer).1;
    assert!(
        said.contains("project/toolgate.toml or an included file (")
            && said.contains("is not trusted"),
        "{said}"
    );
    assert!(
        said.contains("`more.toml`") && said.contains("house.sh`"),
        "which of them it is, nobody knows: {said}"
    );
}

#[test]
fn hook_secret_is_absent_from_ledger_and_output() {
    let hook = "[[hooks]]\nname = \"house\"\ncommand = \"./house.sh\"\ntools = [\"bash\"]\nenv = { KEY = { file = \"house.key\" }, PLACE = \"at ${HOME}\" }\n";
    let project = TestProject::with_config(&format!("{CONFIG}\n{hook}"));
    project.write("project/house.key", "s3cret\n");
    project.write(
        "project/house.sh",
        "#!/bin/sh\n[ \"$KEY\" = s3cret ] && [ \"$PLACE\" = \"at $HOME\" ] || exit 2\n",
    );
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(
        project.path("project/house.sh"),
        std::fs::Permissions::from_mode(0o755),
    )
    .unwrap();
    assert_eq!(project.pre_tool_use("t1", "Bash", json!({"command": "ls"})), json!({}));
    project.run_hook(&post_tool_use_event("t1", "Bash", json!({"command": "ls"}), json!({})));
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
        let said = project
            .pre_tool_use(&format!("u{n}"), "Bash", json!({"command": format!("ls {n}")}))
            .to_string();
        assert!(
            said.contains("deny") && said.contains("[redacted]") && !said.contains("s3cret"),
            "{said}"
        );
    }
    let everything = list_files(&project.path("")).into_iter().filter(|path| {
        path.file_name().is_some_and(|name| name != "house.key" && name != "house.sh")
    });
    for path in everything {
        let text = std::fs::read(&path).unwrap();
        assert!(!text.windows(6).any(|part| part == b"s3cret"), "{}", path.display());
    }
}

#[test]
fn flag_overrides_environment_and_environment_overrides_file() {
    let project = TestProject::with_config(CONFIG);
    project.write("other/toolgate.toml", &CONFIG.replace("Nobody pushes", "No one pushes"));
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
    assert!(run(&variable, &["hook"]).contains("No one pushes"));
    assert!(
        project.path("project/elsewhere.db").exists() && !project.path("other/ledger.db").exists()
    );
    assert!(run(&variable, &["hook", "--config", "toolgate.toml"]).contains("Nobody pushes"));
    // With its flag, each has a ledger of its own, and what is kept ready for one is not taken for
    // another.
    for _ in 0..2 {
        for store in ["one.db", "two.db"] {
            run(&variable, &["hook", "--store", store, "--config", "toolgate.toml"]);
        }
    }
    for store in ["one.db", "two.db"] {
        let (_, rows, _) = project.run(&["audit", "query", "--json", "--store", store], "");
        assert_eq!(rows.lines().count(), 2, "{store}: {rows}");
    }
    let (_, said, _) =
        project.run(&["doctor", "--config", "toolgate.toml", "--store", "three.db"], "");
    assert!(
        said.contains("✓ ledger") && said.contains("three.db") && said.contains("✓ canary"),
        "{said}"
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
    let trying = |text: &str| {
        project.write("project/new.toml", text);
        project.masked_output(&["backtest", "--config", "new.toml", "--store", "ledger.db"], "")
    };
    let same = trying(CONFIG);
    assert!(same.starts_with("exit 0\n6 calls: 6 would be decided the same"), "{same}");
    // Limits, tools and what they do are part of it, and so are files that it includes.
    let limited = trying(
        &CONFIG
            .replace("name = \"coder\"", "name = \"coder\"\nlimits = { session = { calls = 2 } }"),
    );
    assert!(
        limited.starts_with("exit 1\n")
            && limited.matches("now refused").count() >= 2
            && limited.contains("budget"),
        "{limited}"
    );
    let without = trying(&CONFIG.replace("[tools.read]", "[tools.reading]"));
    assert!(without.contains("4 differently") && without.contains("unknown_tool"), "{without}");
    let (rules, push) = CONFIG.split_once("[[policy]]\nname = \"no_push\"").unwrap();
    let (_, rest) = push.split_once("[[policy]]").unwrap();
    project.write(
        "project/more.toml",
        "[[policy]]\nname = \"no_tmp\"\nrule = \"deny\"\ntools = [\"read\"]\nwhere = [{ argument = \"/file_path\", glob = \"/tmp/*\" }]\n",
    );
    let included = trying(&format!("include = [\"more.toml\"]\n{rules}[[policy]]{rest}"));
    assert!(
        included.contains("5 differently")
            && included.contains("by `no_tmp`")
            && included.contains("now admitted"),
        "{included}"
    );
    // What a tool takes is what the file says now.
    let closed =
        CONFIG.replace("[tools.read]\n", "[tools.read]\ninput = { type = \"object\", properties = { path = { type = \"string\" } } }\n");
    assert!(trying(&closed).contains("4 differently"), "{}", trying(&closed));
    // A file that names a read to ask what became of a call is a file for hooks, too.
    let asks = CONFIG.replace(
        "[tools.write]\n",
        "[tools.write]\nreconcile = { tool = \"read\", happened = { \"/done\" = true } }\n",
    );
    project.write("project/asks.toml", &asks);
    let said = project.run_hook_with(
        &["hook", "--config", "asks.toml"],
        &hook_event("PreToolUse", "w1", "write", json!({})),
    );
    assert_eq!(said, json!({}));
    // What protects toolgate is not the configuration's.
    assert!(!included.contains("ledger.db"), "{included}");
    for (text, why) in [
        (format!("nonsense_key = 1\n{CONFIG}"), "nonsense_key"),
        (CONFIG.replace("name = \"coder\"", "name = \"painter\""), "has no agent `coder`"),
        (
            "limits = { session = { calls = 1 } }\n[[policy]]\nname = \"x\"\nrule = \"deny\"\ntools = [\"bash\"]\n".to_owned(),
            "pass a complete configuration",
        ),
    ] {
        let said = trying(&text);
        assert!(said.starts_with("exit 2\n") && said.contains(why), "{said}");
    }
}
