//! Tests the reaction to wrong arguments, wrong files and interrupted output.

use assert_cmd::cargo::CommandCargoExt;

use crate::hook::TestProject;
use crate::output_snapshots::{demo_project, run_program, transcript};

#[test]
fn export_keeps_existing_part_file() {
    let project = demo_project();
    let at = |name: &str| project.path("project").join(name);
    for name in ["ledger.db", "ledger.db-wal"] {
        if at(name).exists() {
            std::fs::copy(at(name), at(&name.replace("ledger.db", "out.part"))).unwrap();
        }
    }
    std::fs::write(at("mine.part"), "mine").unwrap();
    let before = std::fs::read(at("out.part")).unwrap();
    for out in ["out.jsonl", "mine.jsonl"] {
        let (code, _, stderr) =
            project.run(&["audit", "export", "--out", out, "--store", "ledger.db"], "");
        assert_eq!((code, stderr.as_str()), (0, ""), "{out}");
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &std::fs::metadata(at(out)).unwrap().permissions(),
        );
        assert_eq!(mode & 0o777, 0o600, "{out}");
    }
    assert_eq!(std::fs::read(at("out.part")).unwrap(), before, "the existing file was changed");
    assert_eq!(std::fs::read_to_string(at("mine.part")).unwrap(), "mine");
    // A failed export leaves no file.
    let files = || std::fs::read_dir(at("")).unwrap().count();
    let (count_before, code) =
        (files(), project.run(&["audit", "export", "--out", ".", "--store", "ledger.db"], "").0);
    assert_eq!((code, files()), (2, count_before));
}

#[test]
fn export_writes_through_links_and_pipes() {
    let project = demo_project();
    let at = |name: &str| project.path("project").join(name);
    let export =
        |out: &str| project.run(&["audit", "export", "--out", out, "--store", "ledger.db"], "");
    project.write("project/real.jsonl", "old");
    for (link, to) in [("link.jsonl", "real.jsonl"), ("ahead.jsonl", "later.jsonl")] {
        std::os::unix::fs::symlink(to, at(link)).unwrap();
        assert_eq!(export(link).0, 0, "{link}");
        assert!(at(link).is_symlink(), "{link}");
        assert_eq!(project.read(&format!("project/{to}")).lines().count(), 31, "{link}");
    }
    assert!(std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
    let reader = std::thread::spawn({
        let pipe = at("pipe");
        move || std::fs::read_to_string(pipe).unwrap().lines().count()
    });
    assert_eq!(export("pipe").0, 0);
    // If a file replaced the pipe, the reader would wait forever.
    assert!(!at("pipe").is_file());
    assert_eq!(reader.join().unwrap(), 31);
    // If the reader closes the pipe early, the export fails. The pipe may have room for all rows,
    // so the attempt is repeated.
    let export_is_cut_off = || {
        let (pipe, reader) = (
            at("pipe"),
            std::thread::spawn({
                let pipe = at("pipe");
                move || drop(std::fs::File::open(pipe).unwrap())
            }),
        );
        let output = export("pipe");
        reader.join().unwrap();
        output.0 == 2
            && output.2.contains(&pipe.display().to_string().rsplit('/').next().unwrap().to_owned())
    };
    assert!((0..20).any(|_| export_is_cut_off()));
    for (out, why) in
        [(".", ".: is a directory"), ("toolgate.toml", "toolgate.toml is a configuration")]
    {
        let (code, _, stderr) = export(out);
        assert!(code == 2 && stderr.contains(why), "{stderr}");
    }
    assert_eq!(project.read("project/toolgate.toml"), "store = \"ledger.db\"\n");
}

#[test]
fn invalid_arguments_are_reported_with_input() {
    let project = demo_project();
    std::fs::write(project.path("project/file"), "").unwrap();
    let output = transcript(
        &project,
        "man file; audit query --since tomorrow; audit query --since 999999999d --tool nothing; audit prune --older-than 2026-11-15T09:00:00Z; \
         pause --agent a --principal p --because x",
    );
    insta::assert_snapshot!(output, @"
    $ man file [2]
    error: file: File exists (os error 17)
    $ audit query --since tomorrow [2]
    error: invalid value 'tomorrow' for '--since <TIME>': not a time: use MOMENT, 2026-11-15, today, yesterday, or a duration like 90s, 15m, 2h, 7d or 3w
    For more information, try '--help'.
    $ audit query --since 999999999d --tool nothing [0]
    no matching rows
    $ audit prune --older-than MOMENT [2]
    error: invalid value 'MOMENT' for '--older-than <TIME>': not a duration: use a form like 90s, 15m, 2h, 7d or 3w
    For more information, try '--help'.
    $ pause --agent a --principal p --because x [2]
    error: missing `--session`: add it, or leave out `--agent` or `--principal`
    ");
    for args in [
        &["pause", "--agent", "a", "--because", " "][..],
        &["token", ""],
        &["-q", "pause", "--agent", "a", "--because", "x"],
    ] {
        let (code, _, stderr) = project.run(args, "");
        assert_eq!(
            (code, stderr.is_empty()),
            if args[0] == "-q" { (0, true) } else { (2, false) },
            "{args:?}: {stderr}"
        );
    }
    project.write("project/toolgate.toml", crate::output_snapshots::CODER_CONFIG);
    let (code, _, stderr) = run_program(
        &project,
        "toolgate",
        &["hook", "--serve", "--config", "toolgate.toml", "--socket", "/nowhere/x.sock"],
        b"",
    );
    assert_eq!(code, 2);
    assert!(stderr.contains("/nowhere/x.sock: "), "{stderr}");
}

#[test]
fn misplaced_subcommand_gets_suggestion() {
    let output =
        transcript(&demo_project(), "query; list; init claude-code; lint sarif; doctor codex");
    insta::assert_snapshot!(output, @"
    $ query [2]
    error: unrecognized subcommand 'query'
      tip: did you mean `toolgate audit query`?
    Usage: toolgate [OPTIONS] <COMMAND>
    For more information, try '--help'.
    $ list [2]
    error: unrecognized subcommand 'list'
      tip: did you mean `toolgate approvals list` or `toolgate upstream list`?
    Usage: toolgate [OPTIONS] <COMMAND>
    For more information, try '--help'.
    $ init claude-code [2]
    error: unexpected argument 'claude-code' found
      tip: did you mean `--for claude-code`?
    Usage: toolgate init [OPTIONS]
    For more information, try '--help'.
    $ lint sarif [2]
    error: unexpected argument 'sarif' found
      tip: did you mean `--format sarif`?
    Usage: toolgate lint [OPTIONS]
    For more information, try '--help'.
    $ doctor codex [2]
    error: unexpected argument 'codex' found
    Usage: toolgate doctor [OPTIONS]
    For more information, try '--help'.
    ");
}

#[test]
fn version_is_printed_and_invalid_numbers_are_explained() {
    let project = demo_project();
    let output = run_program(&project, "toolgate-hook", &["--version"], b"");
    assert_eq!(
        output,
        (0, format!("toolgate-hook {}\n", env!("CARGO_PKG_VERSION")), String::new())
    );
    let wrong: [(&[&str], &str); 4] = [
        (&["serve", "--listen", "7381"], "expected an address and a port, like 127.0.0.1:7381"),
        (&["audit", "query", "-n", "abc"], "expected a whole number"),
        (&["audit", "tail", "-n", "1.5"], "expected a whole number"),
        (&["replay", "monday", "--until", "x"], "expected a whole number"),
    ];
    for (args, why) in wrong {
        let (code, _, stderr) = project.run(args, "");
        assert!(code == 2 && stderr.contains(why), "{args:?}: {stderr}");
    }
}

#[test]
fn file_of_wrong_kind_is_named_in_error() {
    let project = TestProject::with_config(crate::output_snapshots::CODER_CONFIG);
    project.write(
        "project/some.toml",
        &"x = \"no ledger, and long enough to have a header\"\n".repeat(40),
    );
    project.write("project/empty.json", "");
    project.write("project/pretty.jsonl", "{\n  \"tool\": \"bash\"\n}\n");
    std::fs::write(project.path("project/wide.jsonl"), b"\xff\xfe{\0\n\0").unwrap();
    let key = "a".repeat(64);
    let wrong: [(&[&str], &str); 10] = [
        (&["audit", "query", "--store", "."], "is a directory; name a file"),
        (&["audit", "verify", "--store", "."], "is a directory; name a file"),
        (&["pause", "--store", "."], "is a directory; name a file"),
        (&["audit", "query", "--store", "some.toml"], "not a toolgate ledger"),
        (&["demo", "--store", "some.toml"], "not a toolgate ledger"),
        (
            &["demo", "--store", "nowhere/ledger.db"],
            "check that the directory exists and is writable",
        ),
        (&["audit", "receipt", "empty.json", "--key", &key], "empty.json: not valid JSON"),
        (&["check", "."], ".: is a directory; name a file"),
        (&["check", "wide.jsonl"], "wide.jsonl, line 1: "),
        (&["check", "pretty.jsonl"], "one object per line"),
    ];
    for (args, why) in wrong {
        let (code, _, stderr) = project.run(args, "");
        assert!(code == 2 && stderr.contains(why), "{args:?}: {stderr}");
    }
    let (code, stdout, stderr) = project
        .run(&["check"], "\u{feff}{\"tool\": \"bash\", \"arguments\": {\"command\": \"ls\"}}\n");
    assert!(code == 0 && stdout.starts_with("allow"), "{stdout}{stderr}");
}

#[test]
fn json_array_is_not_a_hook_event() {
    let project = TestProject::with_config(crate::output_snapshots::CODER_CONFIG);
    for event in [
        "[]",
        " [1]",
        r#"["PreToolUse", "s", null, "Bash", {"command": "ls"}, null, null, null, null, null, null, false, null]"#,
    ] {
        let (code, _, stderr) = project.run(&["hook", "--config", "toolgate.toml"], event);
        assert_eq!(code, 2, "{event}");
        assert!(stderr.contains("a list, not a JSON object"), "{event}: {stderr}");
    }
}

#[test]
fn eject_removes_files_that_init_created() {
    for client in ["claude-code", "codex", "cursor", "vscode"] {
        let project = TestProject::new();
        let files = || -> Vec<_> {
            let mut files = crate::hook::list_files(&project.path("project"));
            files.retain(|file| !file.ends_with("toolgate.toml"));
            files.sort();
            files
        };
        let before = files();
        assert_eq!(project.run(&["init", "--for", client], "").0, 0, "{client}");
        assert_ne!(files(), before, "{client}");
        assert_eq!(project.run(&["eject"], "").0, 0, "{client}");
        assert_eq!(files(), before, "{client}");
        assert_eq!(
            std::fs::read_dir(project.path("project")).unwrap().count(),
            1,
            "{client}: an empty directory is left"
        );
    }
    let project = TestProject::new();
    assert_eq!(project.run(&["init", "--for", "claude-desktop"], "").0, 0);
    assert_eq!(project.run(&["eject", "--for", "claude-desktop"], "").0, 0);
    assert!(!project.path(".config/Claude").exists());
    // Comments of the user stay.
    let project = TestProject::new();
    project.write("project/.claude/settings.json", "{\n  // mine\n}\n");
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    assert_eq!(project.run(&["eject"], "").0, 0);
    assert!(project.read("project/.claude/settings.json").contains("// mine"));
}

#[test]
fn init_draft_does_not_follow_project_symlink() {
    let project = TestProject::new();
    project.write("mine", "mine");
    std::fs::create_dir(project.path("project/.claude")).unwrap();
    for draft in ["project/toolgate.toolgate-new", "project/.claude/settings.toolgate-new"] {
        std::os::unix::fs::symlink(project.path("mine"), project.path(draft)).unwrap();
    }
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    assert_eq!(project.read("mine"), "mine");
    for written in ["project/toolgate.toml", "project/.claude/settings.json"] {
        let path = project.path(written);
        assert!(path.is_file() && !path.is_symlink(), "{written}");
        // The new files have the user's default permissions.
        let mode = |path: &std::path::Path| {
            std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(path).unwrap().permissions())
        };
        assert_eq!(mode(&path), mode(&project.path("mine")), "{written}");
    }
    assert_eq!(std::fs::read_dir(project.path("project")).unwrap().count(), 3, "a draft is left");
}

#[test]
fn eject_edits_symlink_target_and_keeps_link() {
    for (client, file) in
        [("claude-code", ".claude/settings.json"), ("cursor", ".cursor/hooks.json")]
    {
        let project = TestProject::new();
        project.write("dotfiles/settings.json", "{}\n");
        let link = project.path("project").join(file);
        std::fs::create_dir(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(project.path("dotfiles/settings.json"), &link).unwrap();
        assert_eq!(project.run(&["init", "--for", client], "").0, 0, "{client}");
        assert!(project.read("dotfiles/settings.json").contains("toolgate"), "{client}");
        let output = project.masked_output(&["eject"], "");
        assert!(output.contains(&format!("changed HOME/project/{file}")), "{client}: {output}");
        assert!(
            link.is_symlink() && !project.read("dotfiles/settings.json").contains("toolgate"),
            "{client}"
        );
        assert!(
            project.masked_output(&["eject"], "").contains("no settings with toolgate found"),
            "{client}"
        );
    }
}

#[test]
fn rows_are_found_by_call_id_part_and_day_name() {
    let project = demo_project();
    let rows = project.run(&["audit", "query", "--json", "--store", "ledger.db"], "").1;
    let call = serde_json::from_str::<serde_json::Value>(rows.lines().next().unwrap()).unwrap()["row"]["call"].as_str().unwrap().to_owned();
    for part in [call.get(24..).unwrap(), call.get(28..).unwrap(), &call] {
        let (code, stdout, stderr) =
            project.run(&["audit", "show", part, "--store", "ledger.db"], "");
        assert!(code == 0 && stdout.contains(&call), "{part}: {stderr}");
    }
    // A call id starts with its time. The first six digits are equal for hours. The first eight are
    // equal for a minute, which may end between two calls.
    for (part, why) in [
        (call.get(..6).unwrap(), "several calls match"),
        ("000000000000", "has no call `000000000000`"),
        ("abc", "at least 6"),
        ("nothing", "at least 6"),
    ] {
        let (code, _, stderr) = project.run(&["audit", "show", part, "--store", "ledger.db"], "");
        assert!(code == 2 && stderr.contains(why), "{part}: {stderr}");
    }
    let count = |args: &[&str]| {
        project
            .run(&[&["audit", "query", "--json", "--store", "ledger.db"], args].concat(), "")
            .1
            .lines()
            .count()
    };
    assert_eq!(
        (
            count(&["--since", "yesterday"]),
            count(&["--since", "2w"]),
            count(&["--until", "yesterday"])
        ),
        (31, 31, 0)
    );
    assert_eq!((count(&["--since", "2020-01-01"]), count(&["--since", "3 weeks"])), (31, 31));
    for (age, expected) in [("3w", 0), ("90 days", 0), ("1 day ago", 2), ("+3w", 2)] {
        let (code, _, stderr) = project
            .run(&["audit", "prune", "--dry-run", "--older-than", age, "--store", "ledger.db"], "");
        assert_eq!(code, expected, "{age}: {stderr}");
    }
    let (_, message, _) =
        project.run(&["audit", "query", "--entity", "customer=C-1001", "--store", "ledger.db"], "");
    assert!(
        message.contains("no row has the entity `customer`, known entities: customer_id, order_id"),
        "{message}"
    );
}

#[test]
fn receipt_is_verified_without_ledger() {
    let project = demo_project();
    let stdout_of = |args: &[&str]| project.run(args, "").1;
    let rows = stdout_of(&["audit", "query", "--json", "--store", "ledger.db"]);
    let call = serde_json::from_str::<serde_json::Value>(rows.lines().next().unwrap()).unwrap()["row"]["call"].as_str().unwrap().to_owned();
    project.write(
        "elsewhere/receipt.json",
        &stdout_of(&["audit", "show", &call, "--receipt", "--store", "ledger.db"]),
    );
    let key = stdout_of(&["audit", "key", "--store", "ledger.db"]).trim().to_owned();
    // Another ledger has this path now.
    std::fs::remove_dir_all(project.path("project/ledger.db.state")).unwrap();
    std::fs::remove_file(project.path("project/ledger.db")).unwrap();
    assert_eq!(project.run(&["demo", "--store", "ledger.db"], "").0, 0);
    let (code, stdout, stderr) =
        project.run(&["audit", "receipt", "../elsewhere/receipt.json", "--key", &key], "");
    assert!(code == 0 && stdout.contains("the receipt is valid"), "{stdout}{stderr}");
}

#[test]
fn init_and_eject_finish_if_stdout_is_closed() {
    let project = TestProject::new();
    let exit_code = |args: &[&str]| {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.set_environment(&mut command);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.args(args).stdout(writer).status().unwrap().code()
    };
    assert_eq!(exit_code(&["init", "--for", "claude-code"]), Some(0));
    let (code, stdout, _) = project.run(&["doctor"], "");
    assert_eq!(code, 0, "{stdout}");
    assert_eq!(exit_code(&["eject"]), Some(0));
    assert!(!project.path("project/.claude").exists());
    // `init` does not report a file that it could not write.
    std::os::unix::fs::symlink("nowhere", project.path("project/.claude")).unwrap();
    let (code, stdout, stderr) = project.run(&["init", "--for", "claude-code"], "");
    assert!(
        code == 2 && !stdout.contains("wrote") && stderr.contains(".claude/settings.json: "),
        "{stdout}{stderr}"
    );
}

#[test]
fn failed_pause_is_not_reported_as_paused() {
    let project = demo_project();
    // Without its keys, a ledger is readable but not writable.
    std::fs::rename(project.path("project/ledger.db.state"), project.path("project/away")).unwrap();
    let (code, stdout, stderr) =
        project.run(&["pause", "--tool", "unheard_of", "--because", "x"], "");
    assert!(
        code == 2 && !stdout.contains("paused") && !stderr.contains("paused"),
        "{stdout}{stderr}"
    );
}
