//! Tests a hook service that answers for many hooks.

use std::io::Write;
use std::process::{Child, Stdio};

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use super::{CONFIG, TestProject, decision, hook_event, post_tool_use_event};
use crate::output_snapshots::{CODER_CONFIG, run_program};

/// A hook service that ends when this value is dropped.
pub(super) struct HookServiceProcess(Child);

impl HookServiceProcess {
    /// Starts a service in a project, and waits until it answers.
    pub(super) fn start(project: &TestProject) -> Self {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.set_environment(&mut command);
        let args = ["hook", "--serve", "--config", "toolgate.toml", "--socket", "hook.sock"];
        let service = Self(command.args(args).stderr(Stdio::null()).spawn().unwrap());
        // The socket file exists before the service listens.
        while std::os::unix::net::UnixStream::connect(project.path("project/hook.sock")).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        service
    }
}

impl Drop for HookServiceProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn hook_service_answers_and_reloads_config() {
    let project = TestProject::with_config(CONFIG);
    let service = HookServiceProcess::start(&project);
    let run_binary = |event: &Value| {
        let mut command = std::process::Command::cargo_bin("toolgate-hook").unwrap();
        project.set_environment(&mut command);
        let mut child = command
            .args(["--socket", "hook.sock"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(event.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    let push =
        |id: &str, command: &str| hook_event("PreToolUse", id, "Bash", json!({"command": command}));
    let (code, stdout) = run_binary(&push("t1", "git push"));
    assert!(code == 0 && stdout.contains("Do not push"), "{stdout}");
    let verb_answer =
        project.run_hook_with(&["hook", "--socket", "hook.sock"], &push("t2", "git push -q"));
    assert_eq!(decision(&verb_answer).0, "deny");
    assert_eq!(run_binary(&push("t3", "ls")), (0, "{}\n".to_owned()));
    assert_eq!(
        run_binary(&post_tool_use_event("t3", "Bash", json!({"command": "ls"}), json!({}))),
        (0, "{}\n".to_owned())
    );
    // An invalid file leaves the old rules in force. A valid file is in force at once.
    project.write("project/toolgate.toml", "store = [");
    assert!(run_binary(&push("t4", "git push -f")).1.contains("Do not push"));
    project.write("project/toolgate.toml", &CONFIG.replace("Do not push", "Never push"));
    assert!(run_binary(&push("t5", "git push -n")).1.contains("Never push"));
    // A change of a file that only the invalid configuration includes is in force too.
    let included = CONFIG
        .replace("Do not push", "Only CI pushes")
        .replace("store =", "include = [\"more.toml\"]\nstore =");
    project.write("project/toolgate.toml", &included);
    assert!(run_binary(&push("m1", "git push -m1")).1.contains("Never push"));
    project.write("project/more.toml", "");
    assert!(run_binary(&push("m2", "git push -m2")).1.contains("Only CI pushes"));
    assert_eq!(run_binary(&json!("junk")).0, 2);
    drop(service);
    let (code, stdout) = run_binary(&push("t6", "ls -a"));
    let answer: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, decision(&answer).0), (0, "deny"));
}

#[test]
fn hook_service_applies_undeclared_setting_of_loaded_file() {
    let project = TestProject::with_config(&format!("{CONFIG}\n[client]\nundeclared = \"ask\"\n"));
    let _service = HookServiceProcess::start(&project);
    let decide = |id: &str, tool: &str| {
        let answer = project.run_hook_with(
            &["hook", "--socket", "hook.sock"],
            &hook_event("PreToolUse", id, tool, json!({"of": id})),
        );
        decision(&answer).0.to_owned()
    };
    assert_eq!(decide("t1", "Known"), "ask");
    // An invalid edit changes nothing, also for tools that were never called before.
    project.write("project/toolgate.toml", "store = [");
    assert_eq!(
        [decide("t2", "Known"), decide("t3", "NeverSeen"), decide("t4", "NeverSeen")],
        ["ask"; 3]
    );
    project.write("project/toolgate.toml", CONFIG);
    assert_eq!([decide("t5", "Known"), decide("t6", "NeverSeen")], ["deny"; 2]);
}

#[test]
fn truncated_service_answer_is_refused() {
    let project = TestProject::with_config(CODER_CONFIG);
    let event = r#"{"hook_event_name": "PreToolUse", "session_id": "s", "tool_name": "Bash", "tool_input": {"command": "ls"}}"#;
    for (reply, is_denied) in [
        ("0", true),
        ("0{\"hookSpecific", true),
        ("0{}", true),
        ("", true),
        ("1{}\n", true),
        ("2no", true),
        ("0{}\n", false),
    ] {
        let socket = project.path("socket");
        let _ = std::fs::remove_file(&socket);
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            std::io::Read::read_to_end(&mut stream, &mut Vec::new()).unwrap();
            std::io::Write::write_all(&mut stream, reply.as_bytes()).unwrap();
        });
        let (code, stdout, _) = run_program(
            &project,
            "toolgate-hook",
            &["--socket", socket.to_str().unwrap()],
            event.as_bytes(),
        );
        serving.join().unwrap();
        assert_eq!(code, 0, "{reply}");
        assert_eq!(
            stdout.contains(r#""permissionDecision":"deny""#),
            is_denied,
            "{reply}: {stdout}"
        );
    }
}
