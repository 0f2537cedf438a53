//! A service that answers for many hooks.

use std::io::Write;
use std::process::{Child, Stdio};

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use super::{CONFIG, TestProject, decision, hook_event, post_tool_use_event};

/// A service, while a test needs it.
pub(super) struct HookServiceProcess(Child);

impl HookServiceProcess {
    /// One that answers in a project, once it does.
    pub(super) fn start(project: &TestProject) -> Self {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.set_environment(&mut command);
        let args = ["hook", "--serve", "--config", "toolgate.toml", "--socket", "hook.sock"];
        let service = Self(command.args(args).stderr(Stdio::null()).spawn().unwrap());
        // Its socket is there a moment before it is listened at.
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
    let small = |event: &Value| {
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
    let (code, stdout) = small(&push("t1", "git push"));
    assert!(code == 0 && stdout.contains("Nobody pushes"), "{stdout}");
    let large =
        project.run_hook_with(&["hook", "--socket", "hook.sock"], &push("t2", "git push -q"));
    assert_eq!(decision(&large).0, "deny");
    assert_eq!(small(&push("t3", "ls")), (0, "{}\n".to_owned()));
    assert_eq!(
        small(&post_tool_use_event("t3", "Bash", json!({"command": "ls"}), json!({}))),
        (0, "{}\n".to_owned())
    );
    // A file that does not load leaves the old one in force; one that does is in force at once.
    project.write("project/toolgate.toml", "store = [");
    assert!(small(&push("t4", "git push -f")).1.contains("Nobody pushes"));
    project.write("project/toolgate.toml", &CONFIG.replace("Nobody pushes", "No one pushes"));
    assert!(small(&push("t5", "git push -n")).1.contains("No one pushes"));
    // Also what was mended in a file that only the broken one names.
    let more = CONFIG
        .replace("Nobody pushes", "She pushes")
        .replace("store =", "include = [\"more.toml\"]\nstore =");
    project.write("project/toolgate.toml", &more);
    assert!(small(&push("m1", "git push -m1")).1.contains("No one pushes"));
    project.write("project/more.toml", "");
    assert!(small(&push("m2", "git push -m2")).1.contains("She pushes"));
    assert_eq!(small(&json!("junk")).0, 2);
    drop(service);
    let (code, stdout) = small(&push("t6", "ls -a"));
    let answer: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, decision(&answer).0), (0, "deny"));
}

#[test]
fn hook_service_applies_undeclared_setting_of_loaded_file() {
    let project = TestProject::with_config(&format!("{CONFIG}\n[client]\nundeclared = \"ask\"\n"));
    let _service = HookServiceProcess::start(&project);
    let asked = |id: &str, tool: &str| {
        let answer = project.run_hook_with(
            &["hook", "--socket", "hook.sock"],
            &hook_event("PreToolUse", id, tool, json!({"of": id})),
        );
        decision(&answer).0.to_owned()
    };
    assert_eq!(asked("t1", "Known"), "ask");
    // An edit that does not load changes nothing, also for a tool that was never asked for before.
    project.write("project/toolgate.toml", "store = [");
    assert_eq!(
        [asked("t2", "Known"), asked("t3", "NeverSeen"), asked("t4", "NeverSeen")],
        ["ask"; 3]
    );
    project.write("project/toolgate.toml", CONFIG);
    assert_eq!([asked("t5", "Known"), asked("t6", "NeverSeen")], ["deny"; 2]);
}
