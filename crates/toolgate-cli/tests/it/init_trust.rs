//! Into a project, out of it, and whether it holds.

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
    let tried = project.masked_output(&["init", "--for", "claude-code", "--dry-run"], "");
    assert!(
        tried.contains("would write")
            && tried.contains("would change")
            && !project.path("project/toolgate.toml").exists()
    );
    assert_eq!(project.read("project/.claude/settings.json"), CLIENT_SETTINGS);
    insta::assert_snapshot!("init", project.masked_output(&["init", "--for", "claude-code"], ""));
    insta::assert_snapshot!(
        "init_again",
        project.masked_output(&["init", "--for", "claude-code"], "")
    );
    // What the kernel can do is the machine's business.
    let said = project.masked_output(&["doctor"], "");
    let said: String = said
        .lines()
        .filter(|line| !line.contains(" sandbox "))
        .map(|line| format!("{line}\n"))
        .collect();
    insta::assert_snapshot!("doctor_well", said);
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
            let said = project.masked_output(&["init", "--for", client], "");
            assert!(
                said.starts_with("exit 0\n") && project.read(file) != before,
                "{client}: {said}"
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
    let said = |args: &[&str]| {
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("toolgate"));
        project.set_environment(&mut command);
        let output = command.current_dir(project.path("project/src")).args(args).output().unwrap();
        String::from_utf8(output.stdout)
            .unwrap()
            .replace(project.path("").to_str().unwrap(), "HOME/")
    };
    let doctor = said(&["doctor"]);
    assert!(
        doctor.contains("no client that starts here has a hook; there are hooks in HOME/project: run `toolgate doctor` there\n"),
        "{doctor}"
    );
    assert_eq!(
        said(&["eject"]),
        "no settings with toolgate found; it is in the settings of HOME/project: run this command there\n"
    );
    let init = said(&["init", "--for", "claude-code", "--dry-run"]);
    assert!(
        init.contains("this file replaces HOME/project/toolgate.toml in this directory"),
        "{init}"
    );
    // The user's own holds everywhere.
    assert!(
        !said(&["init", "--for", "claude-code", "--user", "--dry-run"])
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
        let used: String = text
            .lines()
            .map(|line| {
                line.strip_prefix("# ")
                    .filter(|line| line.contains(" = "))
                    .unwrap_or(line)
                    .to_owned()
                    + "\n"
            })
            .collect();
        project.write("project/toolgate.toml", &used);
        let said = project.masked_output(&["lint"], "");
        assert!(said.starts_with("exit 0\nno findings"), "{client}: {said}");
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
        // Nobody knows all that people call theirs.
        ("bash", json!({"command": "cat .env.backup"}), "deny"),
        ("read", json!({"file_path": "/a/.env.example"}), "deny"),
    ] {
        let call = json!({"tool": tool, "arguments": arguments}).to_string();
        let (_, said, told) = project.run(&["check", "--config", "toolgate.toml", &call], "");
        assert!(said.starts_with(expected), "{said}{told}");
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
        let said = project.masked_output(&["init", "--for", client], "");
        assert!(said.starts_with("exit 0\n"), "{said}");
        let said = project.masked_output(&["doctor"], "");
        assert!(said.starts_with("exit 0\n"), "{client}: {said}");
        let written: Value =
            serde_json::from_str(&project.read(&format!("project/{file}"))).unwrap();
        assert!(written["hooks"].is_object(), "{written}");
        let nothing = r#"{"tool": "nothing", "arguments": {}}"#;
        let said = project.masked_output(&["check", "--config", "toolgate.toml"], nothing);
        assert!(said.contains("unknown_tool"), "{said}");
        // As the client would be told: who is not declared is asked about.
        let said = project.masked_output(&["check"], nothing);
        assert!(said.starts_with("exit 0\nask   nothing"), "{said}");
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
        let tried = project.masked_output(&["init", "--for", client, "--dry-run"], "");
        assert!(
            tried.starts_with("exit 0\nwould change HOME/project/toolgate.toml\n"),
            "{client}: {tried}"
        );
        assert!(
            tried.contains("  +[client]\n") && tried.contains(&format!("  +[tools.{shell}]\n")),
            "{client}: {tried}"
        );
        assert_eq!(project.read(CONFIG_FILE), bare, "{client}");
        let said = project.masked_output(&["init", "--for", client], "");
        assert!(
            said.starts_with("exit 0\nchanged HOME/project/toolgate.toml\n")
                && !said.contains("not in force"),
            "{client}: {said}"
        );
        let both = project.read(CONFIG_FILE);
        assert!(both.starts_with(&bare), "{client}: {both}");
        let said = project.masked_output(&["doctor"], "");
        assert!(
            said.starts_with("exit 0\n") && !said.contains("✗ tools") && !said.contains("! tools"),
            "{client}: {said}"
        );
        let push = json!({"tool": shell, "arguments": {"command": "git push --force"}}).to_string();
        let (_, said, told) = project.run(&["check", &push], "");
        assert!(said.starts_with("deny"), "{client}: {said}{told}");
        // What is there is not added again.
        let again = project.masked_output(&["init", "--for", client], "");
        assert!(
            again.starts_with("exit 0\nHOME/project/toolgate.toml exists and is unchanged\n"),
            "{client}: {again}"
        );
        let tried = project.masked_output(&["eject", "--dry-run"], "");
        assert!(tried.contains("would change HOME/project/toolgate.toml\n"), "{client}: {tried}");
        assert_eq!(project.read(CONFIG_FILE), both, "{client}");
        assert_eq!(project.run(&["eject"], "").0, 0, "{client}");
        assert_eq!(project.read(CONFIG_FILE), bare, "{client}");
        let said = project.masked_output(&["doctor"], "");
        assert!(
            said.contains("✓ configuration  HOME/project/toolgate.toml"),
            "{client}, it is accepted still: {said}"
        );
        // What nobody had accepted is not accepted by this.
        project.write(CONFIG_FILE, &format!("{bare}# mine\n"));
        let said = project.masked_output(&["init", "--for", client], "");
        assert!(
            said.contains("changed HOME/project/toolgate.toml")
                && said.contains("not in force yet"),
            "{client}: {said}"
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
    let both = project.read(CONFIG_FILE);
    let added = both.strip_prefix(&first).unwrap_or_else(|| panic!("{both}"));
    let said = |beginning: &str| {
        added.lines().filter(|line| line.starts_with(beginning)).collect::<Vec<_>>()
    };
    assert_eq!(
        said("["),
        ["[tools.shell]", "[tools.delete]", "[[policy]]", "[[policy]]", "[[policy]]"]
    );
    // A name is one rule's, and what the first client's tools may do stays as it was.
    assert_eq!(
        said("name = "),
        [
            "name = \"no_force_push_cursor\"",
            "name = \"no_recursive_delete_cursor\"",
            "name = \"no_secrets_cursor\""
        ]
    );
    assert_eq!(
        said("tools = "),
        ["tools = [\"shell\"]", "tools = [\"shell\"]", "tools = [\"shell\", \"delete\"]"]
    );
    let doctor = project.masked_output(&["doctor"], "");
    assert!(doctor.starts_with("exit 0\n") && !doctor.contains("! tools"), "{doctor}");
    assert_eq!(project.run(&["eject", "--for", "cursor"], "").0, 0);
    assert_eq!(project.read(CONFIG_FILE), first);
    // Where it is said how commands are run, the rest may be left out on purpose: it is told, and
    // not done.
    let told = project.masked_output(&["init", "--for", "codex"], "");
    assert!(
        told.contains("exists and is unchanged\nit does not declare some tools of codex"),
        "{told}"
    );
    assert!(
        told.contains("\n[tools.apply_patch]\nkind = \"client\"\n")
            && !told.contains("\n[tools.bash]"),
        "{told}"
    );
    assert_eq!(project.read(CONFIG_FILE), first);
    let doctor = project.masked_output(&["doctor"], "");
    let note = "! tools          the configuration does not declare these tools of codex: `apply_patch`, `update_plan`, `view_image`\n";
    assert!(doctor.starts_with("exit 0\n") && doctor.contains(note), "{doctor}");
    // What one has added for itself and another uses stays for it.
    let project = TestProject::new();
    assert_eq!(project.run(&["init"], "").0, 0);
    let bare = project.read(CONFIG_FILE);
    for client in ["claude-code", "codex"] {
        assert_eq!(project.run(&["init", "--for", client], "").0, 0);
    }
    let used = project.read(CONFIG_FILE);
    let said = project.masked_output(&["eject", "--for", "claude-code"], "");
    assert!(said.contains("cannot remove from HOME/project/toolgate.toml what was added for claude-code: codex needs it too\n"), "{said}");
    assert_eq!(project.read(CONFIG_FILE), used);
    assert_eq!(project.run(&["eject"], "").0, 0);
    assert_eq!(project.read(CONFIG_FILE), bare);
}

#[test]
fn eject_keeps_block_that_user_changed() {
    const CONFIG_FILE: &str = "project/toolgate.toml";
    let mine = "[[policy]]\nname = \"mine\"\nrule = \"deny\"\ntools = [\"shell\"]\nwhere = [{ argument = \"/command\", runs = [\"make\"] }]\nreason = \"No.\"\n";
    let own = "\n[tools.mine]\nkind = \"client\"\neffect = \"read\"\n";
    let keeps = |why: &str| {
        Some(format!(
            "cannot remove from HOME/project/toolgate.toml what was added for cursor: {why}"
        ))
    };
    for (name, (from, to), more, why) in [
        ("nothing", ("", ""), "", None),
        ("something else after it", ("", ""), own, None),
        ("a changed line in it", ("[\"rm -r\", ", "["), "", keeps("it was changed since")),
        ("a changed comment in it", ("# Rules. ", "# "), "", keeps("it was changed since")),
        (
            "a key that was meant for its last table",
            ("", ""),
            "mode = \"observe\"\n",
            keeps("it was changed since"),
        ),
        ("a rule about its tools", ("", ""), mine, keeps("the rest is not valid without it")),
    ] {
        let project = TestProject::new();
        assert_eq!(project.run(&["init"], "").0, 0);
        let bare = project.read(CONFIG_FILE);
        assert_eq!(project.run(&["init", "--for", "cursor"], "").0, 0);
        let added = project.read(CONFIG_FILE);
        assert!(added.contains(from), "{name}");
        let changed = format!("{}{more}", added.replace(from, to));
        project.write(CONFIG_FILE, &changed);
        let said = project.masked_output(&["eject"], "");
        assert!(said.contains(".cursor/hooks.json"), "{name}: {said}");
        match why {
            None => {
                assert_eq!(project.read(CONFIG_FILE), format!("{bare}{more}"), "{name}: {said}")
            }
            Some(why) => {
                assert!(said.contains(&why), "{name}: {said}");
                assert_eq!(project.read(CONFIG_FILE), changed, "{name}");
            }
        }
    }
    // What leaves no place for it is not touched: a person is told what to write.
    for text in [
        "tools = { look = { kind = \"client\", effect = \"read\" } }\n",
        "[agents.a.tools.look]\nkind = \"client\"\neffect = \"read\"\n",
        "[tools.look\n",
    ] {
        let project = TestProject::with_config(text);
        let said = project.masked_output(&["init", "--for", "cursor"], "");
        assert!(said.contains("it does not declare the shell tool of cursor"), "{text}: {said}");
        assert!(
            said.contains("\n[tools.shell]\nkind = \"client\"\nshell = \"/command\"\n"),
            "{text}: {said}"
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
    // An example that is broken into two lines cannot be copied.
    fn wide_example_lines(stdout: &str) -> Vec<&str> {
        stdout
            .lines()
            .skip_while(|line| *line != "Examples:")
            .filter(|line| line.starts_with("  ") && line.chars().count() > 80)
            .collect()
    }
    let own = listed_verbs(&crate::run_toolgate(&["--help"]).1);
    assert!(own.len() > 15, "{own:?}");
    assert_eq!(wide_example_lines(&crate::run_toolgate(&["--help"]).1), [""; 0]);
    let (mut told, mut inner) = (String::new(), 0);
    for verb in own {
        let (code, stdout, _) = crate::run_toolgate(&[&verb, "--help"]);
        assert!(code == 0 && stdout.contains("Examples:"), "{verb}");
        assert_eq!(wide_example_lines(&stdout), [""; 0], "{verb}");
        told.push_str(&format!("## {verb}\n{stdout}\n"));
        for more in listed_verbs(&stdout) {
            inner += 1;
            let (code, stdout, _) = crate::run_toolgate(&[&verb, &more, "--help"]);
            assert!(code == 0 && stdout.contains("Usage:"), "{verb} {more}");
            assert_eq!(wide_example_lines(&stdout), [""; 0], "{verb} {more}");
            told.push_str(&format!("## {verb} {more}\n{stdout}\n"));
        }
    }
    assert!(inner > 12, "{inner}");
    insta::assert_snapshot!(told);
}
