//! Into a project, out of it, and whether it holds.

use serde_json::{Value, json};

use crate::hook::Project;

const SETTINGS: &str = r#"{
  "model": "opus",
  "hooks": {
    "PreToolUse": [
      { "matcher": "Bash", "hooks": [{ "type": "command", "command": "./lint.sh" }] }
    ]
  }
}
"#;

#[test]
fn a_client_is_set_up_looked_at_and_left_as_it_was() {
    let project = Project::new();
    project.write("project/.claude/settings.json", SETTINGS);
    let tried = project.said(&["init", "--for", "claude-code", "--dry-run"], "");
    assert!(tried.contains("would write") && tried.contains("would change") && !project.path("project/toolgate.toml").exists());
    assert_eq!(project.read("project/.claude/settings.json"), SETTINGS);
    insta::assert_snapshot!("init", project.said(&["init", "--for", "claude-code"], ""));
    insta::assert_snapshot!("init_again", project.said(&["init", "--for", "claude-code"], ""));
    // What the kernel can do is the machine's business.
    let said = project.said(&["doctor"], "");
    let said: String = said.lines().filter(|line| !line.contains(" sandbox ")).map(|line| format!("{line}\n")).collect();
    insta::assert_snapshot!("doctor_well", said);
    let (_, json, _) = project.run(&["doctor", "--json"], "");
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["ok"], true);
    let ejected = project.said(&["eject"], "");
    assert!(ejected.starts_with("exit 0\nchanged "), "{ejected}");
    assert_eq!(project.read("project/.claude/settings.json"), SETTINGS);
    assert_eq!(project.said(&["eject"], ""), "exit 0\ntoolgate is in none of these settings\n");
}

#[test]
fn who_is_in_a_directory_further_down_is_told() {
    let project = Project::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    project.write("project/src/main.rs", "");
    let said = |args: &[&str]| {
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("toolgate"));
        project.environment(&mut command);
        let output = command.current_dir(project.path("project/src")).args(args).output().unwrap();
        String::from_utf8(output.stdout).unwrap().replace(project.path("").to_str().unwrap(), "HOME/")
    };
    let doctor = said(&["doctor"]);
    assert!(doctor.contains("no client that is started here has any, but in HOME/project: look again there\n"), "{doctor}");
    assert_eq!(said(&["eject"]), "toolgate is in none of these settings; it is in those of HOME/project: run this there\n");
    let init = said(&["init", "--for", "claude-code", "--dry-run"]);
    assert!(init.contains("from here down it counts in place of HOME/project/toolgate.toml: if that is not meant, "), "{init}");
    // The user's own holds everywhere.
    assert!(!said(&["init", "--for", "claude-code", "--user", "--dry-run"]).contains("in place of"));
}

#[test]
fn what_is_somebody_elses_is_left_alone() {
    let project = Project::new();
    let other =
        "{\"hooks\": {\"PreToolUse\": [{\"hooks\": [{\"type\": \"command\", \"command\": \"toolgate audit query | ./my hook\"}]}]}}\n";
    project.write("project/.claude/settings.json", other);
    assert!(project.said(&["eject"], "").contains("in none of these settings"));
    assert_eq!(project.read("project/.claude/settings.json"), other);
    project.write("project/.claude/settings.json", "{\"hooks\": {}, \"hooks\": {}}");
    assert!(project.said(&["init", "--for", "claude-code"], "").contains("it has two `hooks`"));
    assert!(!project.path("project/toolgate.toml").exists());
}

#[test]
fn every_line_that_the_templates_suggest_can_be_used() {
    for client in ["claude-code", "codex", "cursor", "vscode"] {
        let project = Project::new();
        assert_eq!(project.run(&["init", "--for", client], "").0, 0);
        let text = project.read("project/toolgate.toml");
        assert!(text.starts_with("# What holds for the agent that works here.") && text.contains("| toolgate check\n"), "{client}: {text}");
        let used: String = text
            .lines()
            .map(|line| line.strip_prefix("# ").filter(|line| line.contains(" = ")).unwrap_or(line).to_owned() + "\n")
            .collect();
        project.write("project/toolgate.toml", &used);
        let said = project.said(&["lint"], "");
        assert!(said.starts_with("exit 0\nnothing found"), "{client}: {said}");
    }
    let project = Project::new();
    assert_eq!(project.run(&["init", "--store", "here.db"], "").0, 0);
    assert!(project.path("project/here.db").exists());
    assert!(project.said(&["lint"], "").starts_with("exit 0\nnothing found"));
}

#[test]
fn a_template_keeps_agents_from_secrets_and_not_from_speaking_of_them() {
    let project = Project::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    for (tool, arguments, expected) in [
        ("edit", json!({"file_path": ".gitignore", "old_string": "x", "new_string": ".env"}), "allow"),
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
fn every_client_gets_a_configuration_that_loads_and_hooks_in_its_own_form() {
    for (client, file) in [
        ("claude-code", ".claude/settings.json"),
        ("codex", ".codex/hooks.json"),
        ("cursor", ".cursor/hooks.json"),
        ("vscode", ".github/hooks/toolgate.json"),
    ] {
        let project = Project::new();
        let said = project.said(&["init", "--for", client], "");
        assert!(said.starts_with("exit 0\n"), "{said}");
        let said = project.said(&["doctor"], "");
        assert!(said.starts_with("exit 0\n"), "{client}: {said}");
        let written: Value = serde_json::from_str(&project.read(&format!("project/{file}"))).unwrap();
        assert!(written["hooks"].is_object(), "{written}");
        let nothing = r#"{"tool": "nothing", "arguments": {}}"#;
        let said = project.said(&["check", "--config", "toolgate.toml"], nothing);
        assert!(said.contains("unknown_tool"), "{said}");
        // As the client would be told: who is not declared is asked about.
        let said = project.said(&["check"], nothing);
        assert!(said.starts_with("exit 0\nask   nothing"), "{said}");
    }
    let project = Project::new();
    insta::assert_snapshot!("init_bare", project.said(&["init"], ""));
}

#[test]
fn a_configuration_that_is_there_gets_the_tools_of_a_client_and_loses_them_again() {
    const FILE: &str = "project/toolgate.toml";
    for (client, shell) in [("claude-code", "bash"), ("codex", "bash"), ("cursor", "shell"), ("vscode", "run_in_terminal")] {
        let project = Project::new();
        assert_eq!(project.run(&["init"], "").0, 0);
        let bare = project.read(FILE);
        let tried = project.said(&["init", "--for", client, "--dry-run"], "");
        assert!(tried.starts_with("exit 0\nwould change HOME/project/toolgate.toml\n"), "{client}: {tried}");
        assert!(tried.contains("  +[client]\n") && tried.contains(&format!("  +[tools.{shell}]\n")), "{client}: {tried}");
        assert_eq!(project.read(FILE), bare, "{client}");
        let said = project.said(&["init", "--for", client], "");
        assert!(said.starts_with("exit 0\nchanged HOME/project/toolgate.toml\n") && !said.contains("not in force"), "{client}: {said}");
        let both = project.read(FILE);
        assert!(both.starts_with(&bare), "{client}: {both}");
        let said = project.said(&["doctor"], "");
        assert!(said.starts_with("exit 0\n") && !said.contains("✗ tools") && !said.contains("! tools"), "{client}: {said}");
        let push = json!({"tool": shell, "arguments": {"command": "git push --force"}}).to_string();
        let (_, said, told) = project.run(&["check", &push], "");
        assert!(said.starts_with("deny"), "{client}: {said}{told}");
        // What is there is not added again.
        let again = project.said(&["init", "--for", client], "");
        assert!(again.starts_with("exit 0\nHOME/project/toolgate.toml is there already, and stays as it is\n"), "{client}: {again}");
        let tried = project.said(&["eject", "--dry-run"], "");
        assert!(tried.contains("would change HOME/project/toolgate.toml\n"), "{client}: {tried}");
        assert_eq!(project.read(FILE), both, "{client}");
        assert_eq!(project.run(&["eject"], "").0, 0, "{client}");
        assert_eq!(project.read(FILE), bare, "{client}");
        let said = project.said(&["doctor"], "");
        assert!(said.contains("✓ configuration  HOME/project/toolgate.toml"), "{client}, it is accepted still: {said}");
        // What nobody had accepted is not accepted by this.
        project.write(FILE, &format!("{bare}# mine\n"));
        let said = project.said(&["init", "--for", client], "");
        assert!(said.contains("changed HOME/project/toolgate.toml") && said.contains("it is not in force yet"), "{client}: {said}");
    }
}

#[test]
fn a_second_client_gets_what_the_first_has_not() {
    const FILE: &str = "project/toolgate.toml";
    let project = Project::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    let first = project.read(FILE);
    assert_eq!(project.run(&["init", "--for", "cursor"], "").0, 0);
    let both = project.read(FILE);
    let added = both.strip_prefix(&first).unwrap_or_else(|| panic!("{both}"));
    let said = |beginning: &str| added.lines().filter(|line| line.starts_with(beginning)).collect::<Vec<_>>();
    assert_eq!(said("["), ["[tools.shell]", "[tools.delete]", "[[policy]]", "[[policy]]", "[[policy]]"]);
    // A name is one rule's, and what the first client's tools may do stays as it was.
    assert_eq!(
        said("name = "),
        ["name = \"no_force_push_cursor\"", "name = \"no_recursive_delete_cursor\"", "name = \"no_secrets_cursor\""]
    );
    assert_eq!(said("tools = "), ["tools = [\"shell\"]", "tools = [\"shell\"]", "tools = [\"shell\", \"delete\"]"]);
    let doctor = project.said(&["doctor"], "");
    assert!(doctor.starts_with("exit 0\n") && !doctor.contains("! tools"), "{doctor}");
    assert_eq!(project.run(&["eject", "--for", "cursor"], "").0, 0);
    assert_eq!(project.read(FILE), first);
    // Where it is said how commands are run, the rest may be left out on purpose: it is told, and not done.
    let told = project.said(&["init", "--for", "codex"], "");
    assert!(told.contains("is there already, and stays as it is\nit leaves out some tools of codex"), "{told}");
    assert!(told.contains("\n[tools.apply_patch]\nkind = \"client\"\n") && !told.contains("\n[tools.bash]"), "{told}");
    assert_eq!(project.read(FILE), first);
    let doctor = project.said(&["doctor"], "");
    let note = "! tools          of the tools of codex, the configuration leaves out `apply_patch`, `update_plan`, `view_image`\n";
    assert!(doctor.starts_with("exit 0\n") && doctor.contains(note), "{doctor}");
    // What one has added for itself and another uses stays for it.
    let project = Project::new();
    assert_eq!(project.run(&["init"], "").0, 0);
    let bare = project.read(FILE);
    for client in ["claude-code", "codex"] {
        assert_eq!(project.run(&["init", "--for", client], "").0, 0);
    }
    let used = project.read(FILE);
    let said = project.said(&["eject", "--for", "claude-code"], "");
    assert!(said.contains("HOME/project/toolgate.toml keeps what was added for claude-code: codex needs it, too\n"), "{said}");
    assert_eq!(project.read(FILE), used);
    assert_eq!(project.run(&["eject"], "").0, 0);
    assert_eq!(project.read(FILE), bare);
}

#[test]
fn nothing_that_a_user_wrote_is_lost_with_what_was_added() {
    const FILE: &str = "project/toolgate.toml";
    let mine = "[[policy]]\nname = \"mine\"\nrule = \"deny\"\ntools = [\"shell\"]\nwhere = [{ argument = \"/command\", runs = [\"make\"] }]\nreason = \"No.\"\n";
    let own = "\n[tools.mine]\nkind = \"client\"\neffect = \"read\"\n";
    let keeps = |why: &str| Some(format!("HOME/project/toolgate.toml keeps what was added for cursor: {why}"));
    for (name, (from, to), more, why) in [
        ("nothing", ("", ""), "", None),
        ("something else after it", ("", ""), own, None),
        ("a changed line in it", ("[\"rm -r\", ", "["), "", keeps("it was changed since")),
        ("a changed comment in it", ("# Rules. ", "# "), "", keeps("it was changed since")),
        ("a key that was meant for its last table", ("", ""), "mode = \"observe\"\n", keeps("it was changed since")),
        ("a rule about its tools", ("", ""), mine, keeps("the rest does not load without it")),
    ] {
        let project = Project::new();
        assert_eq!(project.run(&["init"], "").0, 0);
        let bare = project.read(FILE);
        assert_eq!(project.run(&["init", "--for", "cursor"], "").0, 0);
        let added = project.read(FILE);
        assert!(added.contains(from), "{name}");
        let changed = format!("{}{more}", added.replace(from, to));
        project.write(FILE, &changed);
        let said = project.said(&["eject"], "");
        assert!(said.contains(".cursor/hooks.json"), "{name}: {said}");
        match why {
            None => assert_eq!(project.read(FILE), format!("{bare}{more}"), "{name}: {said}"),
            Some(why) => {
                assert!(said.contains(&why), "{name}: {said}");
                assert_eq!(project.read(FILE), changed, "{name}");
            }
        }
    }
    // What leaves no place for it is not touched: a person is told what to write.
    for text in [
        "tools = { look = { kind = \"client\", effect = \"read\" } }\n",
        "[agents.a.tools.look]\nkind = \"client\"\neffect = \"read\"\n",
        "[tools.look\n",
    ] {
        let project = Project::with(text);
        let said = project.said(&["init", "--for", "cursor"], "");
        assert!(said.contains("it does not declare what cursor runs commands with, and cannot be added to"), "{text}: {said}");
        assert!(said.contains("\n[tools.shell]\nkind = \"client\"\nshell = \"/command\"\n"), "{text}: {said}");
        assert_eq!(project.read(FILE), text);
    }
}

#[test]
fn a_gate_that_is_off_is_seen_to_be_off() {
    type Break = (&'static str, fn(&Project));
    fn edit(project: &Project, from: &str, to: &str) {
        let file = "project/.claude/settings.json";
        project.write(file, &project.read(file).replace(from, to));
    }
    let cases: [Break; 16] = [
        ("the hooks are gone", |project| {
            project.run(&["eject"], "");
        }),
        ("it lets calls run when it fails", |project| edit(project, ",\n            \"onFailure\": \"block\"", "")),
        ("another program", |project| {
            let file = project.read("project/.claude/settings.json");
            let written: Value = serde_json::from_str(&file).unwrap();
            let program = written["hooks"]["PreToolUse"][0]["hooks"][0]["command"].as_str().unwrap();
            edit(project, program, "/nowhere/toolgate-hook");
        }),
        ("only for some tools", |project| edit(project, "\"matcher\": \"*\"", "\"matcher\": \"Read\"")),
        ("hooks are switched off", |project| edit(project, "{\n  \"hooks\"", "{\n  \"disableAllHooks\": true,\n  \"hooks\"")),
        ("hooks are switched off elsewhere", |project| project.write("project/.claude/settings.local.json", "{\"disableAllHooks\": true}")),
        ("started with other words", |project| edit(project, "[\"--client\"", "[\"--help\", \"--client\"")),
        ("a line that ends well whatever it says", |project| {
            let file = project.read("project/.claude/settings.json");
            let mut written: Value = serde_json::from_str(&file).unwrap();
            let entry = &mut written["hooks"]["PreToolUse"][0]["hooks"][0];
            let line = format!("{} --client claude-code > /dev/null; touch ran", entry["command"].as_str().unwrap());
            entry["command"] = line.into();
            entry.as_object_mut().unwrap().remove("args");
            project.write("project/.claude/settings.json", &written.to_string());
        }),
        ("a line that asks for help", |project| {
            let file = project.read("project/.claude/settings.json");
            let mut written: Value = serde_json::from_str(&file).unwrap();
            let entry = &mut written["hooks"]["PreToolUse"][0]["hooks"][0];
            entry["command"] = format!("{} --help; true", entry["command"].as_str().unwrap()).into();
            entry.as_object_mut().unwrap().remove("args");
            project.write("project/.claude/settings.json", &written.to_string());
        }),
        ("a ledger that somebody else writes without end", |project| {
            let ledger = rusqlite::Connection::open(project.path(".local/state/toolgate/ledger.db")).unwrap();
            ledger.execute_batch("BEGIN IMMEDIATE").unwrap();
            std::mem::forget(ledger);
        }),
        ("not waited for", |project| edit(project, "\"timeout\": 10", "\"async\": true, \"timeout\": 10")),
        ("a configuration for something else", |project| {
            project.write("project/toolgate.toml", "[tools.look]\neffect = \"read\"\n");
            project.run(&["trust"], "");
        }),
        ("a time-out that is text", |project| edit(project, "\"timeout\": 10", "\"timeout\": \"10\"")),
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
    ];
    let mut told = String::new();
    for (name, break_it) in cases {
        let project = Project::new();
        assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
        break_it(&project);
        let said = project.said(&["doctor"], "");
        assert!(said.starts_with("exit 1\n"), "{name}: {said}");
        assert!(!project.path("project/ran").exists(), "{name}: a line that anybody may have written was run");
        let ill: Vec<&str> = said
            .lines()
            .filter(|line| !line.contains(" sandbox "))
            .skip_while(|line| !line.starts_with('✗'))
            .take_while(|line| !line.starts_with('✓') && !line.is_empty())
            .collect();
        told.push_str(&format!("## {name}\n{}\n", ill.join("\n")));
    }
    insta::assert_snapshot!(told);
}

#[test]
fn settings_that_a_client_leaves_aside_are_seen() {
    let (claude, codex, cursor) = (".claude/settings.json", ".codex/hooks.json", ".cursor/hooks.json");
    let strict = Some("it may hold no comments and no commas at an end");
    for (client, file, from, to, why) in [
        ("claude-code", claude, "{\n", "{\n  // mine\n", strict),
        ("claude-code", claude, "{\n", "{\n  \"env\": { \"A\": \"b\", },\n", strict),
        ("codex", codex, "{\n", "{\n  // mine\n", strict),
        ("cursor", cursor, "{\n", "{\n  // mine\n", None),
        // What others have written is enough.
        ("claude-code", claude, "\"hooks\": {\n", "\"hooks\": {\n    \"Stop\": [{}],\n", Some("`hooks.Stop[0]` has no list of `hooks`")),
        (
            "claude-code",
            claude,
            "\"hooks\": {\n",
            "\"hooks\": {\n    \"Stop\": [{ \"matcher\": {}, \"hooks\": [] }],\n",
            Some("`hooks.Stop[0]` has a `matcher` that is no text"),
        ),
    ] {
        let project = Project::new();
        assert_eq!(project.run(&["init", "--for", client], "").0, 0, "{client}");
        let path = format!("project/{file}");
        let written = project.read(&path);
        assert!(written.contains(from), "{written}");
        project.write(&path, &written.replacen(from, to, 1));
        let (doctor, again) = (project.said(&["doctor"], ""), project.said(&["init", "--for", client], ""));
        match why {
            None => assert!(doctor.starts_with("exit 0\n") && !again.contains("aside"), "{client}: {doctor}{again}"),
            Some(why) => {
                let said = format!("the client leaves it aside, and all hooks in it: {why}");
                assert!(doctor.starts_with("exit 1\n") && doctor.contains(&said) && !doctor.contains("✓ hooks"), "{to}: {doctor}");
                assert!(again.contains(&format!("{client} leaves this file aside, and all hooks in it, as it is: {why}")), "{to}: {again}");
            }
        }
    }
    // What no client reads is not written to, and of two lists a client takes one.
    for (text, why) in
        [("{'model': 'opus'}\n", ".claude/settings.json: "), ("{\"hooks\": {\"Stop\": [], \"Stop\": []}}\n", "it has two `hooks.Stop`")]
    {
        let project = Project::new();
        project.write("project/.claude/settings.json", text);
        let said = project.said(&["init", "--for", "claude-code"], "");
        assert!(said.starts_with("exit 2\n") && said.contains(why), "{text}: {said}");
        assert_eq!(project.read("project/.claude/settings.json"), text);
        assert!(!project.path("project/toolgate.toml").exists());
    }
}

#[test]
fn another_program_of_the_same_name_is_seen() {
    let project = Project::new();
    let own = assert_cmd::cargo::cargo_bin("toolgate");
    std::fs::create_dir(project.path("bin")).unwrap();
    for name in ["toolgate", "toolgate-hook"] {
        std::fs::copy(own.with_file_name(name), project.path(&format!("bin/{name}"))).unwrap();
    }
    let doctor = |verb: &[&str]| {
        let mut command = std::process::Command::new(project.path("bin/toolgate"));
        project.environment(&mut command);
        let output = command.args(verb).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    assert_eq!(doctor(&["init", "--for", "claude-code"]).0, 0);
    let (code, said) = doctor(&["doctor"]);
    assert_eq!(code, 0, "{said}");
    std::fs::write(project.path("bin/toolgate-hook"), "#!/bin/sh\nexit 0\n").unwrap();
    let (code, said) = doctor(&["doctor"]);
    assert!(code == 1 && said.contains("PreToolUse: a call that must be refused got no decision"), "{said}");
}

#[test]
fn tools_that_take_little_can_be_looked_at_too() {
    let project = Project::new();
    assert_eq!(project.run(&["init"], "").0, 0);
    let said = project.said(&["doctor"], "");
    assert!(!said.contains("✗ canary"), "{said}");
    let closed = "[tools.look]\nkind = \"client\"\neffect = \"read\"\ninput = { type = \"object\", required = [\"where\"], properties = { where = { type = \"string\" } } }\n";
    project.write("project/toolgate.toml", closed);
    assert!(
        project.said(&["doctor", "--config", "toolgate.toml"], "").contains("✓ canary         a call that must be refused was refused")
    );
    project.write("project/toolgate.toml", &closed.replace("type = \"string\"", "type = \"integer\""));
    assert!(
        project.said(&["doctor", "--config", "toolgate.toml"], "").contains("! canary         no tool is declared that could be asked")
    );
}

#[test]
fn a_configuration_is_looked_over_and_mended() {
    let project = Project::new();
    let config = r#"
lint = [{ allow = "thin_description", of = "check_fraud", reason = "it is internal" }]

[tools.verify_customer]
description = "Verify a customer by id."
efect = "read"

[tools.issue_refund]
description = """Pay a refund.
Use it when a customer was wronged.
Amounts are in USD.
Call check_fraud first."""

[tools.check_fraud]
description = "Verify a customer by id, please."
effect = "read"

[[policy]]
name = "verified"
rule = "require"
tools = ["issue_refund"]
any_of = ["verify_custmer"]

[[policy]]
name = "cap"
rule = "deny"
tools = ["issue_refund"]
where = [{ argument = "/amount", above = 5 }]
"#;
    project.write("project/toolgate.toml", config);
    insta::assert_snapshot!("lint", project.said(&["lint"], ""));
    insta::assert_snapshot!("lint_fix", project.said(&["lint", "--fix"], ""));
    let mended = project.read("project/toolgate.toml");
    assert_eq!(mended, config.replace("efect", "effect").replace("verify_custmer", "verify_customer"));
    insta::assert_snapshot!("lint_github", project.said(&["lint", "--format", "github"], ""));
    let (_, sarif, _) = project.run(&["lint", "--format", "sarif"], "");
    let sarif: Value = serde_json::from_str(&sarif).unwrap();
    assert_eq!(sarif["runs"][0]["results"][0]["ruleId"], "thin_description");
    let (_, json, _) = project.run(&["lint", "--format", "json"], "");
    assert_eq!(
        serde_json::from_str::<Value>(&json).unwrap()["findings"].as_array().unwrap().len(),
        sarif["runs"][0]["results"].as_array().unwrap().len()
    );
}

#[test]
fn every_code_can_be_found() {
    let project = Project::new();
    let tool = |name: &str, more: &str| format!("[agents.a.tools.{name}]\ndescription = \"{name}\"\neffect = \"read\"\n{more}");
    let words = "Finds the orders of one customer by name";
    let many: String = (0..5).map(|n| tool(&format!("tool_{n}"), "")).collect();
    let config = format!(
        "store = \"ledger.db\"\nretention = \"1d\"\n{many}[agents.a.tools.find]\ndescription = \"{words}\"\neffect = \"read\"\n[agents.a.tools.search]\ndescription = \"{words} too\"\neffect = \"read\"\n\
         [agents.a.tools.pay]\ndescription = \"Pays. Call find first.\"\npolicy = \"open\"\n\
         [agents.a.tools.send]\ndescription = \"Sends.\"\ninput = {{ type = \"object\", propertes = {{ to = {{}} }} }}\n\
         [agents.a.tools.close]\ndescription = \"Closes.\"\ninput = {{ type = \"object\", properties = {{ status = {{ enum = [\"open\", \"closed\"] }} }} }}\n\
         [[agents.a.policy]]\nname = \"vain\"\nrule = \"deny\"\ntools = [\"close\"]\nwhere = [{{ argument = \"/status\", in = [\"gone\"] }}]\nreason = \"Gone.\"\n\
         [[agents.a.policy]]\nname = \"found\"\nrule = \"require\"\ntools = [\"send\"]\nany_of = [\"find\"]\nreason = \"Find it first.\"\n\
         [[agents.a.policy]]\nname = \"mute\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhen = \"input.amount > 5\"\n\
         [[agents.a.policy]]\nname = \"large\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhere = [{{ argument = \"/amount\", above = 10 }}]\nreason = \"Too much.\"\n\
         [[agents.a.policy]]\nname = \"larger\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhere = [{{ argument = \"/amount\", above = 20 }}]\nreason = \"Far too much.\"\n\
         [[agents.a.policy]]\nname = \"weekly\"\nrule = \"limit\"\ntools = [\"pay\"]\ncalls = 9\nwithin = \"7d\"\nreason = \"Enough for a week.\"\n\
         [agents.b.tools.find]\ndescription = \"{words}\"\neffect = \"read\"\n"
    );
    project.write("project/toolgate.toml", &config);
    let (_, json, stderr) = project.run(&["lint", "--format", "json"], "");
    let found: Value = serde_json::from_str(&json).unwrap_or_else(|_| panic!("{json}{stderr}"));
    let codes: std::collections::BTreeSet<&str> =
        found["findings"].as_array().unwrap().iter().map(|finding| finding["code"].as_str().unwrap()).collect();
    // The other three: one needs a file that does not load, one a ledger, and one an upstream.
    let wanted = [
        "dead_rule",
        "inlined_twice",
        "never_true",
        "ordering_unenforced",
        "ordering_untold",
        "overlap",
        "short_retention",
        "silent_rule",
        "thin_description",
        "too_many_tools",
        "unknown_keyword",
    ];
    assert_eq!(codes, wanted.into_iter().collect(), "{json}");
    // From the top down, whoever has found them.
    let lines = found["findings"].as_array().unwrap().iter().map(|finding| finding["place"]["line"].as_u64().unwrap_or_default());
    assert!(lines.is_sorted(), "{json}");
}

#[test]
fn a_condition_that_no_argument_can_meet_is_found_and_mended() {
    let project = Project::new();
    let config = r#"
[tools.close]
description = """Close a case.
Use it when the customer agrees.
A case that is closed stays closed.
Nothing comes before it."""
input = { type = "object", properties = { status = { enum = ["open", "closed"] }, amount = { type = "number", minimum = 0, maximum = 100 } } }

[[policy]]
name = "vain"
rule = "deny"
tools = ["close"]
where = [
  { argument = "/status", in = ["open", "closd"] },
  { argument = "/amount", below = 0 },
]
when = 'input.amount > 5 || input.status == "gone"'
reason = "Not so."
"#;
    let line = |words: &str| config.lines().position(|line| line.contains(words)).unwrap() + 1;
    let found = || {
        let (code, json, stderr) = project.run(&["lint", "--format", "json"], "");
        assert_eq!(code, 0, "warnings are not wrong: {json}{stderr}");
        let found: Value = serde_json::from_str(&json).unwrap_or_else(|_| panic!("{json}{stderr}"));
        let told = found["findings"].as_array().unwrap().iter().map(|finding| {
            format!("{} {}: {} ({}) {}", finding["place"]["line"], finding["code"], finding["message"], finding["help"], finding["fix"])
        });
        told.collect::<Vec<_>>()
    };
    project.write("project/toolgate.toml", config);
    let vain = [
        format!(r#"{} "never_true": "`/status` of `close` is never \"closd\"" ("did you mean `closed`?") "\"closed\"""#, line("closd")),
        format!(
            r#"{} "never_true": "`/amount` of `close` is never below 0" ("the schema lets it be between 0 and 100") null"#,
            line("below")
        ),
        format!(r#"{} "never_true": "this can never be true" ("the schema lets it be one of \"open\", \"closed\"") null"#, line("gone")),
    ];
    assert_eq!(found(), vain);
    project.run(&["lint", "--fix"], "");
    assert_eq!(project.read("project/toolgate.toml"), config.replace("\"closd\"", "\"closed\""));
    assert_eq!(found(), vain[1..]);
    let left = format!("lint = [{{ allow = \"never_true\", of = \"vain\", reason = \"they are coming\" }}]\n{config}");
    project.write("project/toolgate.toml", &left);
    assert_eq!(found(), Vec::<String>::new());
}

#[test]
fn a_schema_that_is_misspelt_is_found() {
    let project = Project::new();
    for (schema, wanted) in [
        ("{ propertes = { a = {} } }", Some("has `propertes`, which is no keyword of JSON Schema (did you mean `properties`?)")),
        ("{ require = [] }", Some("has `require`, which is no keyword of JSON Schema (did you mean `required`?)")),
        ("{ zzz = 1 }", Some("has `zzz`, which is no keyword of JSON Schema (take it out, or let its name begin with `x-`)")),
        (
            "{ properties = { a = { typ = \"string\" } } }",
            Some("has `typ` in `/properties/a`, which is no keyword of JSON Schema (did you mean `type`?)"),
        ),
        (
            "{ properties = { a = { items = { maximun = 1 } } } }",
            Some("has `maximun` in `/properties/a/items`, which is no keyword of JSON Schema (did you mean `maximum`?)"),
        ),
        (
            "{ anyOf = [{ minimun = 1 }] }",
            Some("has `minimun` in `/anyOf/0`, which is no keyword of JSON Schema (did you mean `minimum`?)"),
        ),
        (
            "{ properties = { customer_id = {} }, required = [\"custmer_id\"] }",
            Some("requires `custmer_id`, which is none of its properties (did you mean `customer_id`?)"),
        ),
        ("{ properties = { typ = {}, require = {} }, required = [\"typ\"] }", None),
        ("{ required = [\"a\"] }", None),
        ("{ properties = { a = {} }, required = [\"b\"], additionalProperties = true }", None),
        ("{ properties = { a = {}, b = {} }, anyOf = [{ properties = { a = { const = 1 } }, required = [\"b\"] }] }", None),
        ("{ enum = [{ typ = 1 }], default = { typ = 1 }, x-mine = 1, \"$comment\" = \"x\" }", None),
    ] {
        for key in ["input", "output"] {
            // What a tool gives may be anything; what it takes is an object.
            let schema = schema.replacen('{', "{ type = \"object\",", 1);
            let text = format!("[tools.look]\ndescription = \"a\\nb\\nc\\nd\"\neffect = \"read\"\n{key} = {schema}\n");
            project.write("project/toolgate.toml", &text);
            let (code, json, stderr) = project.run(&["lint", "--format", "json"], "");
            let found: Value = serde_json::from_str(&json).unwrap_or_else(|_| panic!("{text}{json}{stderr}"));
            let told = found["findings"].as_array().unwrap().iter().map(|finding| {
                assert_eq!(finding["code"], "unknown_keyword", "{text}{json}");
                format!("{} ({})", finding["message"].as_str().unwrap(), finding["help"].as_str().unwrap())
            });
            let told: Vec<String> = told.collect();
            let wanted: Vec<String> = wanted.iter().map(|wanted| format!("the {key} of `look` {wanted}")).collect();
            assert_eq!((code, told), (0, wanted), "{text}");
        }
    }
}

#[test]
fn an_agent_that_lets_nothing_through_is_found() {
    let project = Project::new();
    let tool = "[tools.look]\ndescription = \"a\\nb\\nc\\nd\"\neffect = \"read\"\n";
    for (head, place) in [
        ("principals = []", Some("1:14")),
        ("limits = { session = { calls = 0 } }", Some("1:32")),
        ("limits = { principal = { calls = 0 } }", Some("1:34")),
        ("limits = { rate = { calls = 0, per = \"1s\" } }", Some("1:29")),
        ("principals = [\"ann\"]\nlimits = { session = { calls = 1 } }", None),
    ] {
        project.write("project/toolgate.toml", &format!("{head}\n{tool}"));
        let said = project.said(&["lint"], "");
        let wanted = place.map_or_else(
            || "exit 0\nnothing found\n".to_owned(),
            |place| format!("exit 0\nwarning: every call of the agent `default` is refused [dead_rule]\n --> toolgate.toml:{place}\n"),
        );
        assert!(said.starts_with(&wanted), "{head}: {said}");
    }
}

#[test]
fn what_is_mended_means_what_was_meant() {
    let project = Project::new();
    let config = r#"
[tools.pay]
description = "Pays."
input = { type = "object", properties = { amount = { type = "number" }, order = { type = "object", properties = { amount = { type = "number" } } } } }

[[policy]]
name = "short"
rule = "deny"
tools = ["pay"]
where = [{ argument = "/amuont", above = 5 }]

[[policy]]
name = "long"
rule = "deny"
tools = ["pay"]
where = [{ argument = "/order/amuont", above = 5 }]

[[policy]]
name = "elsewhere"
rule = "deny"
tools = ["pay"]
where = [{ argument = "/ordr/amount", above = 5 }]
"#;
    project.write("project/toolgate.toml", config);
    project.run(&["lint", "--fix"], "");
    // Of a longer path nobody knows which part was meant: a person looks at it.
    assert_eq!(project.read("project/toolgate.toml"), config.replace("\"/amuont\"", "\"/amount\""));
    // What is merely like something, or says what is allowed, is a person's to mend.
    let pay = "[tools.pay]\ninput = { type = \"object\", properties = { amount = { type = \"number\" } } }\n";
    let rule = "[[policy]]\nname = \"r\"\nrule = \"deny\"\ntools = [\"pay\"]\n";
    for (wrong, help) in [
        (format!("{pay}policy = \"deny\"\n"), "there is only `open`"),
        (format!("{pay}policy = \"opn\"\n"), "did you mean `open`?"),
        (format!("{pay}effect = \"reads\"\n"), "did you mean `read`?"),
        (format!("{pay}\"effect\" = \"reads\"\n"), "did you mean `read`?"),
        (format!("{pay}{}", rule.replace("\"deny\"", "\"allow\"")), "there are `require`, `deny`, "),
        (format!("{pay}{}any_off = [\"pay\"]\n", rule.replace("\"deny\"", "\"require\"")), "did you mean `any_of`?"),
        (format!("{pay}{}all_of = [\"pay\"]\n", rule.replace("\"deny\"", "\"require\"")), "did you mean `any_of`?"),
        (format!("{pay}{rule}when = \"amount > 10\"\n"), "arguments are written `input.amount`; there are `input`"),
        (format!("{pay}{rule}when = \"tools > 10\"\n"), "did you mean `tool`? If not, arguments are written `input.tools`"),
        (format!("{pay}{rule}after = {{ pay = [\"pay\"] }}\n"), "did you mean `category`?"),
        (format!("{pay}[gateway]\nport = 7070\n"), "did you mean `rate`?"),
    ] {
        project.write("project/toolgate.toml", &wrong);
        let said = project.said(&["lint", "--fix"], "");
        assert!(said.starts_with("exit 1\nerror") && said.contains(help), "{wrong}: {said}");
        assert_eq!(project.read("project/toolgate.toml"), wrong);
    }
}

#[test]
fn a_tool_that_is_hardly_used_is_found_in_the_ledger() {
    let project = Project::new();
    let tool = |name: &str| format!("[tools.{name}]\ndescription = \"a\\nb\\nc {name}\\nd\"\neffect = \"read\"\n");
    project.write("project/toolgate.toml", &format!("store = \"ledger.db\"\n{}{}", tool("often"), tool("seldom")));
    for n in 0..25 {
        let tool = if n == 0 { "seldom" } else { "often" };
        let event = serde_json::json!({"hook_event_name": "PreToolUse", "session_id": format!("s{n}"), "tool_name": tool, "tool_input": {}, "tool_use_id": "t"});
        let ended = serde_json::json!({"hook_event_name": "SessionEnd", "session_id": format!("s{n}")});
        for event in [event, ended] {
            assert_eq!(project.run(&["hook", "--config", "toolgate.toml"], &event.to_string()).0, 0);
        }
    }
    let said = project.said(&["lint", "--store", "ledger.db"], "");
    assert!(said.contains("`seldom` was used in 1 of 25 sessions [rarely_used]") && !said.contains("`often` was"), "{said}");
}

#[test]
fn every_verb_helps_with_examples() {
    fn verbs(stdout: &str) -> Vec<String> {
        let verbs = stdout.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1).take_while(|line| !line.is_empty());
        let verbs = verbs.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        verbs.filter_map(|line| line.split_whitespace().next()).filter(|verb| *verb != "help").map(str::to_owned).collect()
    }
    // An example that is broken into two lines cannot be copied.
    fn wide(stdout: &str) -> Vec<&str> {
        stdout.lines().skip_while(|line| *line != "Examples:").filter(|line| line.starts_with("  ") && line.chars().count() > 80).collect()
    }
    let own = verbs(&crate::toolgate(&["--help"]).1);
    assert!(own.len() > 15, "{own:?}");
    assert_eq!(wide(&crate::toolgate(&["--help"]).1), [""; 0]);
    let (mut told, mut inner) = (String::new(), 0);
    for verb in own {
        let (code, stdout, _) = crate::toolgate(&[&verb, "--help"]);
        assert!(code == 0 && stdout.contains("Examples:"), "{verb}");
        assert_eq!(wide(&stdout), [""; 0], "{verb}");
        told.push_str(&format!("## {verb}\n{stdout}\n"));
        for more in verbs(&stdout) {
            inner += 1;
            let (code, stdout, _) = crate::toolgate(&[&verb, &more, "--help"]);
            assert!(code == 0 && stdout.contains("Usage:"), "{verb} {more}");
            assert_eq!(wide(&stdout), [""; 0], "{verb} {more}");
            told.push_str(&format!("## {verb} {more}\n{stdout}\n"));
        }
    }
    assert!(inner > 12, "{inner}");
    insta::assert_snapshot!(told);
}

#[test]
fn a_new_ledger_is_begun_on_purpose_only() {
    let project = Project::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    let said = project.said(&["trust", "--new-ledger"], "");
    assert!(said.contains("is there; move it away first"), "{said}");
    for name in ["ledger.db", "ledger.db-wal", "ledger.db-shm"] {
        let _ = std::fs::remove_file(project.path(&format!(".local/state/toolgate/{name}")));
    }
    // What is left of the old one is in the way, and nothing is begun before it is gone.
    let known = project.read(".local/state/toolgate/ledgers.json");
    let said = project.said(&["trust", "--new-ledger"], "");
    assert!(said.starts_with("exit 2\n") && said.contains("ledger.db.state is there; move it away first"), "{said}");
    assert!(!project.path(".local/state/toolgate/ledger.db").exists());
    assert_eq!(project.read(".local/state/toolgate/ledgers.json"), known);
    std::fs::remove_dir_all(project.path(".local/state/toolgate/ledger.db.state")).unwrap();
    assert!(project.said(&["doctor"], "").starts_with("exit 1\n"));
    assert!(project.said(&["trust", "--new-ledger"], "").contains("a new ledger begins"));
    assert!(project.said(&["doctor"], "").starts_with("exit 0\n"));
}
