//! Tests `init`, `eject`, and the state of the gate after them.

use serde_json::{Value, json};

use crate::hook::TestProject;

const CLIENT_SETTINGS: &str = r#"{
  "model": "opus",
  "hooks": {
    "PreToolUse": [
      { "matcher": "Bash", "hooks": [{ "type": "command", "command": "./lint.sh" }] }
    ]
  }
}
"#;

#[test]
fn init_and_eject_restore_client_settings() {
    let project = TestProject::new();
    project.write("project/.claude/settings.json", CLIENT_SETTINGS);
    let dry_run = project.masked_output(&["init", "--for", "claude-code", "--dry-run"], "");
    assert!(
        dry_run.contains("would write")
            && dry_run.contains("would change")
            && !project.path("project/toolgate.toml").exists()
    );
    assert_eq!(project.read("project/.claude/settings.json"), CLIENT_SETTINGS);
    insta::assert_snapshot!("init", project.masked_output(&["init", "--for", "claude-code"], ""));
    insta::assert_snapshot!(
        "init_again",
        project.masked_output(&["init", "--for", "claude-code"], "")
    );
    // Whether the sandbox works depends on the machine.
    let report = project.masked_output(&["doctor"], "");
    let report: String = report
        .lines()
        .filter(|line| !line.contains(" sandbox "))
        .map(|line| format!("{line}\n"))
        .collect();
    insta::assert_snapshot!("doctor_well", report);
    let (_, json, _) = project.run(&["doctor", "--json"], "");
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["ok"], true);
    let ejected = project.masked_output(&["eject"], "");
    assert!(ejected.starts_with("exit 0\nchanged "), "{ejected}");
    assert_eq!(project.read("project/.claude/settings.json"), CLIENT_SETTINGS);
    assert_eq!(project.masked_output(&["eject"], ""), "exit 0\nno settings with toolgate found\n");
}

#[test]
fn eject_restores_files_byte_for_byte() {
    let servers = "{\n  \"mcpServers\": {\n    \"notes\": {\n      \"command\": \"notes-server\"\n    }\n  }\n}\n";
    let config = "[tools.look]\nkind = \"client\"\neffect = \"read\"\n";
    for (client, file, text) in [
        ("claude-code", "project/.claude/settings.json", CLIENT_SETTINGS),
        ("claude-desktop", ".config/Claude/claude_desktop_config.json", servers),
        ("cursor", "project/toolgate.toml", config),
    ] {
        for before in [text.to_owned(), text.trim_end().to_owned(), format!("\u{feff}{text}")] {
            let project = TestProject::new();
            project.write(file, &before);
            let output = project.masked_output(&["init", "--for", client], "");
            assert!(
                output.starts_with("exit 0\n") && project.read(file) != before,
                "{client}: {output}"
            );
            assert_eq!(project.run(&["eject"], "").0, 0, "{client}");
            assert_eq!(project.read(file), before, "{client}");
        }
    }
}

#[test]
fn verbs_name_project_directory_from_subdirectory() {
    let project = TestProject::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    project.write("project/src/main.rs", "");
    let stdout_of = |args: &[&str]| {
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("toolgate"));
        project.set_environment(&mut command);
        let output = command.current_dir(project.path("project/src")).args(args).output().unwrap();
        String::from_utf8(output.stdout)
            .unwrap()
            .replace(project.path("").to_str().unwrap(), "HOME/")
    };
    let doctor = stdout_of(&["doctor"]);
    assert!(
        doctor.contains("no client that starts here has a hook; there are hooks in HOME/project: run `toolgate doctor` there\n"),
        "{doctor}"
    );
    assert_eq!(
        stdout_of(&["eject"]),
        "no settings with toolgate found; it is in the settings of HOME/project: run this command there\n"
    );
    let init = stdout_of(&["init", "--for", "claude-code", "--dry-run"]);
    assert!(
        init.contains("this file replaces HOME/project/toolgate.toml in this directory"),
        "{init}"
    );
    // The user's own configuration applies in every directory.
    assert!(
        !stdout_of(&["init", "--for", "claude-code", "--user", "--dry-run"])
            .contains("this file replaces")
    );
}

#[test]
fn eject_and_init_keep_foreign_hooks() {
    let project = TestProject::new();
    let other = "{\"hooks\": {\"PreToolUse\": [{\"hooks\": [{\"type\": \"command\", \"command\": \"toolgate audit query | ./my hook\"}]}]}}\n";
    project.write("project/.claude/settings.json", other);
    assert!(project.masked_output(&["eject"], "").contains("no settings with toolgate found"));
    assert_eq!(project.read("project/.claude/settings.json"), other);
    project.write("project/.claude/settings.json", "{\"hooks\": {}, \"hooks\": {}}");
    assert!(
        project
            .masked_output(&["init", "--for", "claude-code"], "")
            .contains("duplicate key `hooks`")
    );
    assert!(!project.path("project/toolgate.toml").exists());
}

#[test]
fn every_suggested_template_line_is_valid() {
    for client in ["claude-code", "codex", "cursor", "vscode"] {
        let project = TestProject::new();
        assert_eq!(project.run(&["init", "--for", client], "").0, 0);
        let text = project.read("project/toolgate.toml");
        assert!(
            text.starts_with("# Configuration for the agent in this project.")
                && text.contains("| toolgate check\n"),
            "{client}: {text}"
        );
        let uncommented: String = text
            .lines()
            .map(|line| {
                line.strip_prefix("# ")
                    .filter(|line| line.contains(" = "))
                    .unwrap_or(line)
                    .to_owned()
                    + "\n"
            })
            .collect();
        project.write("project/toolgate.toml", &uncommented);
        let output = project.masked_output(&["lint"], "");
        assert!(output.starts_with("exit 0\nno findings"), "{client}: {output}");
    }
    let project = TestProject::new();
    assert_eq!(project.run(&["init", "--store", "here.db"], "").0, 0);
    assert!(project.path("project/here.db").exists());
    assert!(project.masked_output(&["lint"], "").starts_with("exit 0\nno findings"));
}

#[test]
fn template_denies_secret_files_but_allows_naming_them() {
    let project = TestProject::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    for (tool, arguments, expected) in [
        (
            "edit",
            json!({"file_path": ".gitignore", "old_string": "x", "new_string": ".env"}),
            "allow",
        ),
        ("write", json!({"file_path": ".gitignore", "content": ".env"}), "allow"),
        ("grep", json!({"pattern": ".env"}), "allow"),
        ("grep", json!({"pattern": "x", "path": "src", "glob": "*.rs"}), "allow"),
        ("edit", json!({"file_path": "/a/.env", "old_string": "x", "new_string": "y"}), "deny"),
        ("write", json!({"file_path": ".env.production", "content": "x"}), "deny"),
        ("grep", json!({"pattern": "x", "path": ".env"}), "deny"),
        ("grep", json!({"pattern": "x", "glob": "**/.env*"}), "deny"),
        ("read", json!({"file_path": "/a/.env.development.local"}), "deny"),
        ("bash", json!({"command": "cat .env.staging"}), "deny"),
        // Unknown suffixes are denied too.
        ("bash", json!({"command": "cat .env.backup"}), "deny"),
        ("read", json!({"file_path": "/a/.env.example"}), "deny"),
    ] {
        let call = json!({"tool": tool, "arguments": arguments}).to_string();
        let (_, stdout, stderr) = project.run(&["check", "--config", "toolgate.toml", &call], "");
        assert!(stdout.starts_with(expected), "{stdout}{stderr}");
    }
}

#[test]
fn init_writes_valid_config_and_hooks_for_each_client() {
    for (client, file) in [
        ("claude-code", ".claude/settings.json"),
        ("codex", ".codex/hooks.json"),
        ("cursor", ".cursor/hooks.json"),
        ("vscode", ".github/hooks/toolgate.json"),
    ] {
        let project = TestProject::new();
        let output = project.masked_output(&["init", "--for", client], "");
        assert!(output.starts_with("exit 0\n"), "{output}");
        let output = project.masked_output(&["doctor"], "");
        assert!(output.starts_with("exit 0\n"), "{client}: {output}");
        let written: Value =
            serde_json::from_str(&project.read(&format!("project/{file}"))).unwrap();
        assert!(written["hooks"].is_object(), "{written}");
        let call = r#"{"tool": "nothing", "arguments": {}}"#;
        let output = project.masked_output(&["check", "--config", "toolgate.toml"], call);
        assert!(output.contains("unknown_tool"), "{output}");
        // Without `--config`, `check` decides like the hook: an undeclared tool needs approval.
        let output = project.masked_output(&["check"], call);
        assert!(output.starts_with("exit 0\nask   nothing"), "{output}");
    }
    let project = TestProject::new();
    insta::assert_snapshot!("init_bare", project.masked_output(&["init"], ""));
}

#[test]
fn existing_config_gains_and_loses_tools_of_client() {
    const CONFIG_FILE: &str = "project/toolgate.toml";
    for (client, shell) in [
        ("claude-code", "bash"),
        ("codex", "bash"),
        ("cursor", "shell"),
        ("vscode", "run_in_terminal"),
    ] {
        let project = TestProject::new();
        assert_eq!(project.run(&["init"], "").0, 0);
        let bare = project.read(CONFIG_FILE);
        let dry_run = project.masked_output(&["init", "--for", client, "--dry-run"], "");
        assert!(
            dry_run.starts_with("exit 0\nwould change HOME/project/toolgate.toml\n"),
            "{client}: {dry_run}"
        );
        assert!(
            dry_run.contains("  +[client]\n") && dry_run.contains(&format!("  +[tools.{shell}]\n")),
            "{client}: {dry_run}"
        );
        assert_eq!(project.read(CONFIG_FILE), bare, "{client}");
        let output = project.masked_output(&["init", "--for", client], "");
        assert!(
            output.starts_with("exit 0\nchanged HOME/project/toolgate.toml\n")
                && !output.contains("not in force"),
            "{client}: {output}"
        );
        let combined = project.read(CONFIG_FILE);
        assert!(combined.starts_with(&bare), "{client}: {combined}");
        let output = project.masked_output(&["doctor"], "");
        assert!(
            output.starts_with("exit 0\n")
                && !output.contains("✗ tools")
                && !output.contains("! tools"),
            "{client}: {output}"
        );
        let push = json!({"tool": shell, "arguments": {"command": "git push --force"}}).to_string();
        let (_, output, stderr) = project.run(&["check", &push], "");
        assert!(output.starts_with("deny"), "{client}: {output}{stderr}");
        // A second `init` adds nothing.
        let second_output = project.masked_output(&["init", "--for", client], "");
        assert!(
            second_output
                .starts_with("exit 0\nHOME/project/toolgate.toml exists and is unchanged\n"),
            "{client}: {second_output}"
        );
        let dry_run = project.masked_output(&["eject", "--dry-run"], "");
        assert!(
            dry_run.contains("would change HOME/project/toolgate.toml\n"),
            "{client}: {dry_run}"
        );
        assert_eq!(project.read(CONFIG_FILE), combined, "{client}");
        assert_eq!(project.run(&["eject"], "").0, 0, "{client}");
        assert_eq!(project.read(CONFIG_FILE), bare, "{client}");
        let output = project.masked_output(&["doctor"], "");
        assert!(
            output.contains("✓ configuration  HOME/project/toolgate.toml"),
            "{client}: no longer trusted: {output}"
        );
        // `init` does not trust a file that was not trusted before.
        project.write(CONFIG_FILE, &format!("{bare}# mine\n"));
        let output = project.masked_output(&["init", "--for", client], "");
        assert!(
            output.contains("changed HOME/project/toolgate.toml")
                && output.contains("not in force yet"),
            "{client}: {output}"
        );
    }
}

#[test]
fn init_for_second_client_adds_only_missing_tools() {
    const CONFIG_FILE: &str = "project/toolgate.toml";
    let project = TestProject::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    let first = project.read(CONFIG_FILE);
    assert_eq!(project.run(&["init", "--for", "cursor"], "").0, 0);
    let combined = project.read(CONFIG_FILE);
    let added = combined.strip_prefix(&first).unwrap_or_else(|| panic!("{combined}"));
    let added_lines = |beginning: &str| {
        added.lines().filter(|line| line.starts_with(beginning)).collect::<Vec<_>>()
    };
    assert_eq!(
        added_lines("["),
        ["[tools.shell]", "[tools.delete]", "[[policy]]", "[[policy]]", "[[policy]]"]
    );
    // Rule names are unique, and the tools of the first client keep their rules.
    assert_eq!(
        added_lines("name = "),
        [
            "name = \"no_force_push_cursor\"",
            "name = \"no_recursive_delete_cursor\"",
            "name = \"no_secrets_cursor\""
        ]
    );
    assert_eq!(
        added_lines("tools = "),
        ["tools = [\"shell\"]", "tools = [\"shell\"]", "tools = [\"shell\", \"delete\"]"]
    );
    let doctor = project.masked_output(&["doctor"], "");
    assert!(doctor.starts_with("exit 0\n") && !doctor.contains("! tools"), "{doctor}");
    assert_eq!(project.run(&["eject", "--for", "cursor"], "").0, 0);
    assert_eq!(project.read(CONFIG_FILE), first);
    // If the file declares the shell tool, missing tools may be intentional. So `init` reports them
    // and changes nothing.
    let output = project.masked_output(&["init", "--for", "codex"], "");
    assert!(
        output.contains("exists and is unchanged\nit does not declare some tools of codex"),
        "{output}"
    );
    assert!(
        output.contains("\n[tools.apply_patch]\nkind = \"client\"\n")
            && !output.contains("\n[tools.bash]"),
        "{output}"
    );
    assert_eq!(project.read(CONFIG_FILE), first);
    let doctor = project.masked_output(&["doctor"], "");
    let note = "! tools          the configuration does not declare these tools of codex: `apply_patch`, `update_plan`, `view_image`\n";
    assert!(doctor.starts_with("exit 0\n") && doctor.contains(note), "{doctor}");
    // A tool that was added for one client stays if another client uses it.
    let project = TestProject::new();
    assert_eq!(project.run(&["init"], "").0, 0);
    let bare = project.read(CONFIG_FILE);
    for client in ["claude-code", "codex"] {
        assert_eq!(project.run(&["init", "--for", client], "").0, 0);
    }
    let full = project.read(CONFIG_FILE);
    let output = project.masked_output(&["eject", "--for", "claude-code"], "");
    assert!(output.contains("cannot remove from HOME/project/toolgate.toml what was added for claude-code: codex needs it too\n"), "{output}");
    assert_eq!(project.read(CONFIG_FILE), full);
    assert_eq!(project.run(&["eject"], "").0, 0);
    assert_eq!(project.read(CONFIG_FILE), bare);
}

#[test]
fn eject_keeps_block_that_user_changed() {
    const CONFIG_FILE: &str = "project/toolgate.toml";
    let user_rule = "[[policy]]\nname = \"mine\"\nrule = \"deny\"\ntools = [\"shell\"]\nwhere = [{ argument = \"/command\", runs = [\"make\"] }]\nreason = \"No.\"\n";
    let other_tool = "\n[tools.mine]\nkind = \"client\"\neffect = \"read\"\n";
    let refusal = |why: &str| {
        Some(format!(
            "cannot remove from HOME/project/toolgate.toml what was added for cursor: {why}"
        ))
    };
    for (name, (from, to), extra, why) in [
        ("nothing", ("", ""), "", None),
        ("another tool after it", ("", ""), other_tool, None),
        ("a changed line", ("[\"rm -r\", ", "["), "", refusal("it was changed since")),
        ("a changed comment", ("# Rules. ", "# "), "", refusal("it was changed since")),
        (
            "a key of its last table",
            ("", ""),
            "mode = \"observe\"\n",
            refusal("it was changed since"),
        ),
        (
            "a rule about its tools",
            ("", ""),
            user_rule,
            refusal("the rest is not valid without it"),
        ),
    ] {
        let project = TestProject::new();
        assert_eq!(project.run(&["init"], "").0, 0);
        let bare = project.read(CONFIG_FILE);
        assert_eq!(project.run(&["init", "--for", "cursor"], "").0, 0);
        let added = project.read(CONFIG_FILE);
        assert!(added.contains(from), "{name}");
        let changed = format!("{}{extra}", added.replace(from, to));
        project.write(CONFIG_FILE, &changed);
        let output = project.masked_output(&["eject"], "");
        assert!(output.contains(".cursor/hooks.json"), "{name}: {output}");
        match why {
            None => {
                assert_eq!(project.read(CONFIG_FILE), format!("{bare}{extra}"), "{name}: {output}")
            }
            Some(why) => {
                assert!(output.contains(&why), "{name}: {output}");
                assert_eq!(project.read(CONFIG_FILE), changed, "{name}");
            }
        }
    }
    // If the block cannot be added, `init` prints the lines and changes nothing.
    for text in [
        "tools = { look = { kind = \"client\", effect = \"read\" } }\n",
        "[agents.a.tools.look]\nkind = \"client\"\neffect = \"read\"\n",
        "[tools.look\n",
    ] {
        let project = TestProject::with_config(text);
        let output = project.masked_output(&["init", "--for", "cursor"], "");
        assert!(
            output.contains("it does not declare the shell tool of cursor"),
            "{text}: {output}"
        );
        assert!(
            output.contains("\n[tools.shell]\nkind = \"client\"\nshell = \"/command\"\n"),
            "{text}: {output}"
        );
        assert_eq!(project.read(CONFIG_FILE), text);
    }
}

#[test]
fn every_verb_help_has_examples() {
    fn listed_verbs(stdout: &str) -> Vec<String> {
        let verbs = stdout
            .lines()
            .skip_while(|line| !line.starts_with("Commands:"))
            .skip(1)
            .take_while(|line| !line.is_empty());
        let verbs = verbs.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        verbs
            .filter_map(|line| line.split_whitespace().next())
            .filter(|verb| *verb != "help")
            .map(str::to_owned)
            .collect()
    }
    // A wrapped example cannot be copied.
    fn wide_example_lines(stdout: &str) -> Vec<&str> {
        stdout
            .lines()
            .skip_while(|line| *line != "Examples:")
            .filter(|line| line.starts_with("  ") && line.chars().count() > 80)
            .collect()
    }
    let all_verbs = listed_verbs(&crate::run_toolgate(&["--help"]).1);
    assert!(all_verbs.len() > 15, "{all_verbs:?}");
    assert_eq!(wide_example_lines(&crate::run_toolgate(&["--help"]).1), [""; 0]);
    let (mut help, mut subcommand_count) = (String::new(), 0);
    for verb in all_verbs {
        let (code, stdout, _) = crate::run_toolgate(&[&verb, "--help"]);
        assert!(code == 0 && stdout.contains("Examples:"), "{verb}");
        assert_eq!(wide_example_lines(&stdout), [""; 0], "{verb}");
        help.push_str(&format!("## {verb}\n{stdout}\n"));
        for subcommand in listed_verbs(&stdout) {
            subcommand_count += 1;
            let (code, stdout, _) = crate::run_toolgate(&[&verb, &subcommand, "--help"]);
            assert!(code == 0 && stdout.contains("Usage:"), "{verb} {subcommand}");
            assert_eq!(wide_example_lines(&stdout), [""; 0], "{verb} {subcommand}");
            help.push_str(&format!("## {verb} {subcommand}\n{stdout}\n"));
        }
    }
    assert!(subcommand_count > 12, "{subcommand_count}");
    insta::assert_snapshot!(help);
}
