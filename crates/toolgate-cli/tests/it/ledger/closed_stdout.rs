//! Tests that verbs report a full standard output, and keep their exit code if it is closed.

use super::DemoLedger;

#[test]
fn full_stdout_is_reported_as_error() {
    let demo = DemoLedger::new();
    for verb in ["query", "stats", "export"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("toolgate"));
        command.args(["audit", verb, "--store"]).arg(demo.path()).env_clear().stdout(full);
        let output = command.output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{verb}: {stderr}");
        assert!(stderr.starts_with("error: cannot write to standard output: "), "{verb}: {stderr}");
    }
}

#[test]
fn closed_stdout_pipe_causes_no_panic() {
    let demo = DemoLedger::new();
    let program = assert_cmd::cargo::cargo_bin("toolgate");
    for verb in
        ["query --json", "stats --json", "stats", "export", "verify", "verify --json", "key"]
    {
        let script = format!(
            "'{}' audit {verb} --store '{}' | true; exit ${{PIPESTATUS[0]}}",
            program.display(),
            demo.path().display()
        );
        let output = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!stderr.contains("panicked"), "{verb}: {stderr}");
    }
}

#[test]
fn exit_code_is_kept_if_stdout_is_closed() {
    let demo = DemoLedger::new();
    let (file, receipt) =
        (demo.directory.path().join("policy.toml"), demo.directory.path().join("receipt.json"));
    std::fs::write(
        &file,
        include_str!("../../../src/command/demo/policy.toml").replace("above = 500", "above = 100"),
    )
    .unwrap();
    let call = demo.json_rows(&["audit", "query", "-n", "1"])[0]["row"]["call"]
        .as_str()
        .unwrap()
        .to_owned();
    std::fs::write(&receipt, demo.run(&["audit", "show", &call, "--receipt"]).1).unwrap();
    let (file, receipt, path) = (file.to_str().unwrap(), receipt.to_str().unwrap(), demo.path());
    let exit_code = |args: &[&str]| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("toolgate"));
        command
            .args(args)
            .args(["--store", path.to_str().unwrap()])
            .env_clear()
            .stdout(writer)
            .status()
            .unwrap()
            .code()
    };
    for verb in [&["audit", "verify"][..], &["audit", "receipt", receipt], &["replay", "monday"]] {
        assert_eq!(exit_code(verb), Some(0), "{verb:?}");
    }
    assert_eq!(exit_code(&["backtest", "--config", file]), Some(1));
    demo.open_for_tampering()
        .execute("UPDATE configs SET body = replace(body, 'above = 500', 'above = 50')", [])
        .unwrap();
    for verb in [
        &["audit", "verify"][..],
        &["audit", "verify", "--json"],
        &["audit", "receipt", receipt],
        &["replay", "monday"],
    ] {
        assert_eq!(exit_code(verb), Some(1), "{verb:?}");
    }
}
