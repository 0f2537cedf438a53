//! Things that are easily said wrong, or done to the wrong file.

use crate::hook::Project;
use crate::verbs::{desk, program, told};

#[test]
fn an_export_takes_no_file_that_is_there_for_its_draft() {
    let project = desk();
    let at = |name: &str| project.path("project").join(name);
    for name in ["ledger.db", "ledger.db-wal"] {
        if at(name).exists() {
            std::fs::copy(at(name), at(&name.replace("ledger.db", "out.part"))).unwrap();
        }
    }
    std::fs::write(at("mine.part"), "mine").unwrap();
    let before = std::fs::read(at("out.part")).unwrap();
    for out in ["out.jsonl", "mine.jsonl"] {
        let (code, _, stderr) = project.run(&["audit", "export", "--out", out, "--store", "ledger.db"], "");
        assert_eq!((code, stderr.as_str()), (0, ""), "{out}");
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(at(out)).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600, "{out}");
    }
    assert_eq!(std::fs::read(at("out.part")).unwrap(), before, "the ledger of that name is as it was");
    assert_eq!(std::fs::read_to_string(at("mine.part")).unwrap(), "mine");
    // Nothing is left of one that did not come to its end.
    let files = || std::fs::read_dir(at("")).unwrap().count();
    let (was, code) = (files(), project.run(&["audit", "export", "--out", ".", "--store", "ledger.db"], "").0);
    assert_eq!((code, files()), (2, was));
}

#[test]
fn what_is_said_wrong_is_told_in_its_own_words() {
    let project = desk();
    std::fs::write(project.path("project/file"), "").unwrap();
    let said = told(
        &project,
        "man file; audit query --since yesterday; audit query --since 999999999d --tool nothing; audit prune --older-than 2026-11-15T09:00:00Z; \
         pause --agent a --principal p --because x",
    );
    insta::assert_snapshot!(said, @"
    $ man file [2]
    error: file: File exists (os error 17)
    $ audit query --since yesterday [2]
    error: invalid value 'yesterday' for '--since <TIME>': a time is like MOMENT, a length of time like 90s, 15m, 2h or 7d
    For more information, try '--help'.
    $ audit query --since 999999999d --tool nothing [0]
    nothing is recorded that fits
    $ audit prune --older-than MOMENT [2]
    error: invalid value 'MOMENT' for '--older-than <TIME>': a length of time is like 90s, 15m, 2h or 7d
    For more information, try '--help'.
    $ pause --agent a --principal p --because x [2]
    error: of which session? Say it with `--session`, or leave out one of `--agent` and `--principal`
    ");
    for args in [&["pause", "--agent", "a", "--because", " "][..], &["token", ""], &["-q", "pause", "--agent", "a", "--because", "x"]] {
        let (code, _, stderr) = project.run(args, "");
        assert_eq!((code, stderr.is_empty()), if args[0] == "-q" { (0, true) } else { (2, false) }, "{args:?}: {stderr}");
    }
    project.write("project/toolgate.toml", crate::verbs::CODER);
    let (code, _, stderr) =
        program(&project, "toolgate", &["hook", "--serve", "--config", "toolgate.toml", "--socket", "/nowhere/x.sock"], b"");
    assert_eq!(code, 2);
    assert!(stderr.contains("/nowhere/x.sock: "), "{stderr}");
}

#[test]
fn a_list_is_no_event() {
    let project = Project::with(crate::verbs::CODER);
    for event in ["[]", " [1]", r#"["PreToolUse", "s", null, "Bash", {"command": "ls"}, null, null, null, null, null, null, false, null]"#]
    {
        let (code, _, stderr) = project.run(&["hook", "--config", "toolgate.toml"], event);
        assert_eq!(code, 2, "{event}");
        assert!(stderr.contains("it is a list, not a JSON object"), "{event}: {stderr}");
    }
}

#[test]
fn nothing_is_left_of_what_was_only_for_toolgate() {
    for client in ["claude-code", "codex", "cursor", "vscode"] {
        let project = Project::new();
        let files = || -> Vec<_> {
            let mut files = crate::hook::walk(&project.path("project"));
            files.retain(|file| !file.ends_with("toolgate.toml"));
            files.sort();
            files
        };
        let before = files();
        assert_eq!(project.run(&["init", "--for", client], "").0, 0, "{client}");
        assert_ne!(files(), before, "{client}");
        assert_eq!(project.run(&["eject"], "").0, 0, "{client}");
        assert_eq!(files(), before, "{client}");
    }
    // What somebody else has said there stays.
    let project = Project::new();
    project.write("project/.claude/settings.json", "{\n  // mine\n}\n");
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    assert_eq!(project.run(&["eject"], "").0, 0);
    assert!(project.read("project/.claude/settings.json").contains("// mine"));
}
