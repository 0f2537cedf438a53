//! Tests that every call is answered or refused in a broken environment.

use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Stdio;
use std::time::{Duration, Instant};

use assert_cmd::Command;
use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use crate::hook::{CONFIG, TestProject, decision, hook_event};

/// Runs a shell line with this standard input, and returns exit code, stdout and stderr.
fn run_shell(project: &TestProject, line: &str, input: &str) -> (i32, String, String) {
    let mut command = std::process::Command::new("sh");
    project.set_environment(&mut command);
    let output = Command::from_std(command).args(["-c", line]).write_stdin(input).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap_or_else(|| panic!("{line}: {}", output.status)),
        text(output.stdout),
        text(output.stderr),
    )
}

fn quoted_program_path(name: &str) -> String {
    format!("'{}'", assert_cmd::cargo::cargo_bin(name).display())
}

/// Copies a program with `install`.
///
/// A child of another test may inherit a file that this process has open for writing, and such a
/// file cannot be executed.
fn install_program(name: &str, project: &TestProject, to: &str) {
    assert_eq!(
        run_shell(
            project,
            &format!(
                "install -m 755 {} '{}'",
                quoted_program_path(name),
                project.path(to).display()
            ),
            ""
        )
        .0,
        0
    );
}

fn bash_event(id: &str, command: &str) -> String {
    hook_event("PreToolUse", id, "Bash", json!({"command": command})).to_string()
}

#[test]
fn hook_sets_exit_code_if_stdout_is_closed() {
    let rewrites =
        "\n[[hooks]]\nname = \"house\"\ncommand = \"./house.sh\"\ntools = [\"lookup\"]\n";
    let project = TestProject::with_config(&format!("{CONFIG}{rewrites}"));
    project.write_script("project/house.sh", "#!/bin/sh\necho '{\"tool_input\": {\"id\": 8}}'\n");
    let hook_binary = format!("{} --config toolgate.toml", quoted_program_path("toolgate-hook"));
    let hook_verb = format!("{} hook --config toolgate.toml", quoted_program_path("toolgate"));
    let mut count = 0;
    for (hook, closed) in [
        (&hook_binary, ">&-"),
        (&hook_binary, "> /dev/null"),
        (&hook_verb, ">&-"),
        (&hook_verb, "> /dev/null"),
    ] {
        count += 1;
        let plain_event = |command: &str| {
            json!({"tool_name": "bash", "tool_input": {"command": format!("{command} {count}")}})
                .to_string()
        };
        let event_of_tool = |name: &str, tool: &str, input: Value| {
            hook_event("PreToolUse", &format!("{name}{count}"), tool, input).to_string()
        };
        let bash_command = |name: &str, command: &str| {
            event_of_tool(name, "Bash", json!({"command": format!("{command} {count}")}))
        };
        for (title, event, code) in [
            ("pass", bash_command("a", "ls"), 0),
            ("deny", bash_command("b", "git push"), 2),
            ("ask", bash_command("c", "rm"), 2),
            ("changed arguments", event_of_tool("d", "lookup", json!({"id": count})), 2),
            ("allow", event_of_tool("e", "Read", json!({"file_path": format!("/tmp/{count}")})), 0),
            ("plain allow", plain_event("pwd"), 0),
            ("plain deny", plain_event("git push"), 2),
            (
                "result of a call that was not admitted",
                hook_event("PostToolUse", "never", "Bash", json!({"command": "id"})).to_string(),
                2,
            ),
        ] {
            let (exit_code, _, stderr) = run_shell(&project, &format!("{hook} {closed}"), &event);
            assert_eq!(exit_code, code, "{title} {closed}: {stderr}");
        }
        // Both output streams are closed, then standard input.
        assert_eq!(
            run_shell(&project, &format!("{hook} >&- 2>&-"), &bash_command("f", "git push -q")).0,
            2
        );
        assert_eq!(run_shell(&project, &format!("{hook} <&-"), "").0, 2);
    }
    // The hook must detect this without /proc, which the test hides if the system permits.
    let with_hidden_proc =
        |line: &str| format!("unshare -rm sh -c \"mount -t tmpfs none /proc && {line}\"");
    if run_shell(&project, &with_hidden_proc("true"), "").0 == 0 {
        for hook in [&hook_binary, &hook_verb] {
            let (exit_code, _, stderr) = run_shell(
                &project,
                &with_hidden_proc(&format!("{hook} >&-")),
                &bash_event("h", "git push -v"),
            );
            assert_eq!(exit_code, 2, "{hook}: {stderr}");
        }
    } else {
        eprintln!("SKIPPED: /proc cannot be hidden here");
    }
    // The client of a service forwards the answer without parsing it.
    for (reply, code) in [
        ("0{}\n", 0),
        ("0{\"permission\":\"allow\"}\n", 0),
        ("0{\"hookSpecificOutput\":{\"permissionDecision\":\"deny\"}}\n", 2),
    ] {
        let socket = project.path("socket");
        let _ = std::fs::remove_file(&socket);
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_to_end(&mut Vec::new()).unwrap();
            stream.write_all(reply.as_bytes()).unwrap();
        });
        let (exit_code, ..) = run_shell(
            &project,
            &format!(
                "{} --socket '{}' >&-",
                quoted_program_path("toolgate-hook"),
                socket.display()
            ),
            &bash_event("g", "ls"),
        );
        serving.join().unwrap();
        assert_eq!(exit_code, code, "{reply}");
    }
    assert_eq!(
        run_shell(
            &project,
            &format!("{} --help > /dev/null", quoted_program_path("toolgate-hook")),
            ""
        )
        .0,
        0
    );
}

#[test]
fn hook_exits_if_client_does_not_read_answer() {
    let project = TestProject::with_config(CONFIG);
    // The answer is larger than the buffer of a pipe.
    let result: serde_json::Map<String, Value> =
        (0..20_000).map(|n| (format!("key_{n}"), json!("text"))).collect();
    let mut event = hook_event("PostToolUse", "never", "Bash", json!({"command": "ls"}));
    event["tool_response"] = Value::Object(result);
    let mut command = std::process::Command::cargo_bin("toolgate-hook").unwrap();
    project.set_environment(&mut command);
    command
        .args(["--config", "toolgate.toml"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let (started_at, mut child) = (Instant::now(), command.spawn().unwrap());
    child.stdin.take().unwrap().write_all(event.to_string().as_bytes()).unwrap();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if started_at.elapsed() > Duration::from_secs(30) => {
                let _ = child.kill();
                panic!("the hook waits for a client that does not read");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert_eq!(status.code(), Some(2));
}

#[test]
fn relative_home_directory_is_ignored() {
    let project = TestProject::new();
    let open = "[tools.bash]\nkind = \"client\"\npolicy = \"open\"\n";
    // A file at these paths must not count as the user's own configuration.
    project.write("project/.config/toolgate/toolgate.toml", open);
    project.write("project/home/.config/toolgate/toolgate.toml", open);
    for state in ["project/.local/state/toolgate", "project/home/.local/state/toolgate"] {
        std::fs::create_dir_all(project.path(state)).unwrap();
        std::fs::set_permissions(project.path(state), std::fs::Permissions::from_mode(0o700))
            .unwrap();
    }
    // If `HOME` is empty, the hook uses the passwd entry, so that case is absent.
    for home in [".", "home"] {
        let (code, stdout, stderr) =
            project.run_with(&[("HOME", home)], &["hook"], &bash_event("t1", "ls"));
        let answer: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!((code, decision(&answer).0), (0, "deny"), "{home}: {stdout}{stderr}");
        assert!(decision(&answer).1.contains("no home directory"), "{home}: {stdout}");
    }
}

#[test]
fn unreadable_user_config_denies_every_call() {
    let project = TestProject::with_config(CONFIG);
    assert_eq!(project.run(&["trust"], "").0, 0);
    std::fs::create_dir_all(project.path(".config/toolgate")).unwrap();
    symlink("toolgate.toml", project.path(".config/toolgate/toolgate.toml")).unwrap();
    let answer = project.run_hook_with(
        &["hook"],
        &hook_event("PreToolUse", "t1", "Bash", json!({"command": "ls"})),
    );
    assert!(
        decision(&answer).0 == "deny" && decision(&answer).1.contains("toolgate denies every call"),
        "{answer}"
    );
}

#[test]
fn symlink_target_of_own_file_is_protected() {
    let project = TestProject::new();
    project.write("dotfiles/mine.toml", CONFIG);
    project.write("kept/nothing", "");
    std::fs::set_permissions(project.path("kept"), std::fs::Permissions::from_mode(0o700)).unwrap();
    for directory in [".config/toolgate", ".local/state"] {
        std::fs::create_dir_all(project.path(directory)).unwrap();
    }
    symlink(project.path("dotfiles/mine.toml"), project.path(".config/toolgate/toolgate.toml"))
        .unwrap();
    symlink(project.path("kept"), project.path(".local/state/toolgate")).unwrap();
    let call = |id: &str, tool: &str, input: Value| {
        project.run_hook_with(&["hook"], &hook_event("PreToolUse", id, tool, input)).to_string()
    };
    assert!(call("t0", "Read", json!({"file_path": "/tmp/x"})).contains("allow"));
    let at = |name: &str| project.path(name).display().to_string();
    for (n, (tool, input, code)) in [
        ("Write", json!({"file_path": at("dotfiles/mine.toml"), "content": ""}), "own_files"),
        (
            "Write",
            json!({"file_path": at(".config/toolgate/toolgate.toml"), "content": ""}),
            "own_files",
        ),
        (
            "Bash",
            json!({"command": format!("sed -i s/deny/ask/ {}", at("dotfiles/mine.toml"))}),
            "own_files",
        ),
        ("Read", json!({"file_path": at("kept/key")}), "own_state"),
        ("Read", json!({"file_path": at(".local/state/toolgate/key")}), "own_state"),
        ("Bash", json!({"command": format!("cat {}", at("kept/trusted.json"))}), "own_state"),
    ]
    .into_iter()
    .enumerate()
    {
        let answer = call(&format!("t1{n}"), tool, input.clone());
        assert!(answer.contains(code), "{input}: {answer}");
    }
    assert_eq!(
        call("t2", "Write", json!({"file_path": at("dotfiles/another.toml"), "content": ""})),
        "{}"
    );
    // A settings file that links to /dev/null does not protect /dev/null.
    project.write(".claude/nothing", "");
    symlink("/dev/null", project.path(".claude/settings.json")).unwrap();
    assert_eq!(call("t3", "Bash", json!({"command": "ls > /dev/null"})), "{}");
}

#[test]
fn non_utf8_config_path_is_denied() {
    let project = TestProject::new();
    let directory = project.path("project").join(std::ffi::OsStr::from_bytes(b"odd\xff"));
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("toolgate.toml"), CONFIG).unwrap();
    let mut command = std::process::Command::cargo_bin("toolgate-hook").unwrap();
    project.set_environment(&mut command);
    command.current_dir(&directory);
    let output = Command::from_std(command)
        .args(["--config", "toolgate.toml"])
        .write_stdin(bash_event("t1", "ls"))
        .output()
        .unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(
        output.status.success() && decision(&answer).1.contains("path is not valid UTF-8"),
        "{answer}"
    );
}

#[test]
fn hook_denies_in_broken_environment() {
    let project = TestProject::with_config(CONFIG);
    let hook = quoted_program_path("toolgate-hook");
    let push = bash_event("t1", "git push");
    for line in [
        // A removed directory, an unusable state directory or ledger, few file descriptors, and an
        // unusable configuration.
        format!("mkdir gone; cd gone; rmdir ../gone; {hook} --config ../toolgate.toml"),
        format!("mkdir gone2; cd gone2; rmdir ../gone2; {hook}"),
        format!("ulimit -n 4; {hook} --config toolgate.toml"),
        format!("ulimit -n 6; {hook} --config toolgate.toml"),
        format!("env TMPDIR=/nowhere {hook} --config toolgate.toml"),
        format!("env TOOLGATE_STATE=/proc/nowhere {hook} --config toolgate.toml"),
        format!("env TOOLGATE_STATE=/dev/null {hook} --config toolgate.toml"),
        format!("env TOOLGATE_STORE=toolgate.toml/x.db {hook} --config toolgate.toml"),
        format!("env \"HOME=$PWD/toolgate.toml\" {hook} --config toolgate.toml"),
        format!("env CLAUDE_PROJECT_DIR=/nowhere {hook}"),
        format!("{hook} --config /dev/null"),
        format!("{hook} --config ."),
        format!("{hook} --agent absent --config toolgate.toml"),
    ] {
        let (code, stdout, stderr) = run_shell(&project, &line, &push);
        let answer: Value = serde_json::from_str(&stdout).unwrap_or_default();
        assert!(
            code == 2 || (code == 0 && decision(&answer).0 == "deny"),
            "{line}: {code} {stdout}{stderr}"
        );
    }
    // Input above the size limit, and two events in one input.
    for input in [" ".repeat((32 << 20) + 1), format!("{push}{push}")] {
        assert_eq!(run_shell(&project, &format!("{hook} --config toolgate.toml"), &input).0, 2);
    }
}

#[test]
fn inherited_file_descriptors_are_closed_in_children() {
    let config = format!(
        "{CONFIG}\n[[hooks]]\nname = \"looks\"\ncommand = \"./looks.sh\"\ntools = [\"bash\"]\n"
    );
    let project = TestProject::with_config(&config);
    project.write(
        "looks.txt",
        "#!/bin/sh\necho asked > asked\n[ -e /proc/self/fd/9 ] && cat <&9 > seen\nexit 0\n",
    );
    assert_eq!(
        run_shell(&project, "install -m 755 ../looks.txt looks.sh; echo secret > secret", "").0,
        0
    );
    for (n, hook) in
        [quoted_program_path("toolgate-hook"), format!("{} hook", quoted_program_path("toolgate"))]
            .into_iter()
            .enumerate()
    {
        let line = format!("rm -f asked; exec 9< secret; {hook} --config toolgate.toml");
        let (code, stdout, stderr) =
            run_shell(&project, &line, &bash_event(&format!("o{n}"), &format!("ls {n}")));
        assert_eq!((code, stdout.as_str()), (0, "{}\n"), "{stderr}");
        assert!(
            project.path("project/asked").exists() && !project.path("project/seen").exists(),
            "{hook}"
        );
    }
    // The launcher of upstreams.
    let line = format!(
        "exec 9< secret; exec {} __toolgate_child {}",
        quoted_program_path("toolgate"),
        std::process::id()
    );
    let (code, stdout, stderr) =
        run_shell(&project, &format!("{line} sh -c 'echo begun; test ! -e /proc/self/fd/9'"), "");
    assert_eq!((code, stdout.as_str()), (0, "begun\n"), "{stderr}");
}

#[test]
fn user_without_passwd_entry_is_denied() {
    let project = TestProject::with_config(CONFIG);
    // Only root can change its user id.
    if run_shell(&project, "test \"$(id -u)\" = 0 && command -v setpriv", "").0 != 0 {
        eprintln!("SKIPPED: needs root and `setpriv`");
        return;
    }
    install_program("toolgate-hook", &project, "hook");
    std::fs::set_permissions(project.path(""), std::fs::Permissions::from_mode(0o755)).unwrap();
    let line = format!(
        "cd / && env -u HOME setpriv --reuid 54321 --clear-groups '{}'",
        project.path("hook").display()
    );
    let (code, stdout, stderr) = run_shell(&project, &line, &bash_event("a", "ls"));
    let answer: Value =
        serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{code} {stdout}{stderr}"));
    assert_eq!((code, decision(&answer).0), (0, "deny"), "{stdout}{stderr}");
    assert!(decision(&answer).1.contains("no home directory"), "{stdout}");
}

#[test]
fn demo_with_unwritable_ledger_prints_one_error() {
    let project = crate::output_snapshots::demo_project();
    let line = format!(
        "trap '' XFSZ; ulimit -f 128; exec {} demo --store ledger.db",
        quoted_program_path("toolgate")
    );
    let (code, stdout, stderr) = run_shell(&project, &line, "");
    assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
    let errors = stderr.lines().filter(|line| line.starts_with("error: ")).count();
    assert!(errors == 1 && stderr.lines().count() < 10, "{stderr}");
    // An incomplete session cannot be replayed when the project is dropped.
    std::fs::remove_file(project.path("project/ledger.db")).unwrap();
}

#[test]
fn unreadable_ledger_is_not_reported_as_tampered() {
    let project = crate::output_snapshots::demo_project();
    if run_shell(&project, "test \"$(id -u)\" = 0 && command -v setpriv", "").0 != 0 {
        eprintln!("SKIPPED: needs root and `setpriv`");
        return;
    }
    install_program("toolgate", &project, "toolgate");
    std::fs::set_permissions(project.path(""), std::fs::Permissions::from_mode(0o755)).unwrap();
    let as_other = |verb: &str| {
        let line = format!(
            "setpriv --reuid 54321 --clear-groups '{}' {verb} --store ledger.db",
            project.path("toolgate").display()
        );
        run_shell(&project, &line, "")
    };
    let (code, stdout, stderr) = as_other("audit verify");
    assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
    assert!(stderr.contains("cannot check the ledger") && !stderr.contains("file:/"), "{stderr}");
    // A user who can read the ledger, but cannot write beside it, can query it.
    std::fs::set_permissions(
        project.path("project/ledger.db"),
        std::fs::Permissions::from_mode(0o644),
    )
    .unwrap();
    let (code, stdout, stderr) = as_other("audit query --json");
    assert_eq!((code, stdout.lines().count()), (0, 31), "{stderr}");
}
