//! Tests that a gateway finishes a running call when it is stopped.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use crate::gateway::{stdio_input, tools_call_request, wait_until};
use crate::hook::TestProject;

#[test]
fn stdio_shutdown_answers_running_call() {
    let project = TestProject::with_config(
        "store = \"ledger.db\"\n[tools.slow]\nkind = \"command\"\ncommand = \"./slow\"\neffect = \"read\"\nsandbox = { write = [\"mine\"] }\n",
    );
    project.write("project/mine/begun.txt", "");
    project.write_script("project/slow", "#!/bin/bash\n: > mine/begun\nsleep 1\necho finished\n");
    let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
    project.set_environment(&mut command);
    command.args(["serve", "--stdio", "--config", "toolgate.toml"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(stdio_input(&[tools_call_request(1, "slow", json!({}))]).as_bytes()).unwrap();
    wait_until("the call runs", || project.path("project/mine/begun").exists());
    assert!(
        std::process::Command::new("kill")
            .args(["-TERM", &child.id().to_string()])
            .status()
            .unwrap()
            .success()
    );
    // The client keeps its connection open.
    let mut messages = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let answer = messages
        .find(|message| message["id"] == json!(1))
        .unwrap_or_else(|| panic!("the answer is lost"));
    assert!(
        answer["result"]["isError"] != json!(true) && answer.to_string().contains("finished"),
        "{answer}"
    );
    drop(input);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let (_, rows, _) = project.run(&["audit", "export", "--store", "ledger.db"], "");
    assert_eq!(rows.lines().filter(|row| !row.contains("canary")).count(), 1, "{rows}");
}
