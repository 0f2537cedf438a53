//! Tests that the gateway keeps serving if standard error, files or connections fail.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::cargo::CommandCargoExt;

use crate::gateway::{ServeProcess, wait_until};
use crate::hook::TestProject;

/// Returns the command that starts a gateway.
fn serve_command(project: &TestProject) -> Command {
    let mut command = Command::cargo_bin("toolgate").unwrap();
    project.set_environment(&mut command);
    command.args(["serve", "--config", "toolgate.toml", "--listen", "127.0.0.1:0"]);
    command
}

#[test]
fn gateway_reloads_config_if_stderr_is_full() {
    let config = |rule: &str| {
        format!("store = \"ledger.db\"\n[tools.pay]\nkind = \"client\"\npolicy = \"open\"\n{rule}")
    };
    let deny_rule =
        "[[policy]]\nname = \"no\"\nrule = \"deny\"\ntools = [\"pay\"]\nreason = \"No.\"\n";
    let project = TestProject::with_config(&config(""));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let gateway = ServeProcess::spawn(serve_command(&project).stderr(full));
    let mut n = 0;
    let mut decides = |decision: &str| {
        n += 1;
        gateway.check_call("pay", &format!("c{n}")) == decision
    };
    assert!(decides("allow"));
    // Standard error is full, so neither a reload nor an error can be reported.
    project.write("project/toolgate.toml", &config(deny_rule));
    wait_until("the first change is in force", || decides("deny"));
    project.write("project/toolgate.toml", &config("[[policy]]\nname = \"no\"\nrule = \"dney\"\n"));
    gateway.signal("-HUP");
    project.write("project/toolgate.toml", &config(""));
    wait_until("the next change is in force", || decides("allow"));
}

#[test]
fn settings_that_need_restart_are_reported() {
    let config = |store: &str, hosts: &str| {
        format!(
            "store = \"{store}\"\n[gateway]\nhosts = [{hosts}]\n[tools.pay]\nkind = \"client\"\npolicy = \"open\"\n"
        )
    };
    let project = TestProject::with_config(&config("ledger.db", ""));
    let log = std::fs::File::create(project.path("log")).unwrap();
    let _gateway = ServeProcess::spawn(serve_command(&project).stderr(log));
    let log_text = || std::fs::read_to_string(project.path("log")).unwrap();
    let warning = "changed settings need a restart of `toolgate serve`: ";
    project.write("project/toolgate.toml", &config("other.db", "\"a.example\""));
    wait_until("the changed settings are reported", || {
        log_text().contains(&format!("{warning}`store`, `hosts`"))
    });
    // The original configuration needs no restart.
    project.write("project/toolgate.toml", &config("ledger.db", ""));
    wait_until("the configuration was reloaded", || {
        log_text().matches("reloaded the configuration").count() == 2
    });
    assert_eq!(log_text().matches(warning).count(), 1, "{}", log_text());
}

/// Returns the command that starts a gateway under these `ulimit` commands.
fn serve_command_with_ulimit(project: &TestProject, limits: &str) -> Command {
    let inner = serve_command(project);
    let mut command = Command::new("sh");
    project.set_environment(&mut command);
    command
        .args(["-c", &format!("{limits}; exec \"$0\" \"$@\"")])
        .arg(inner.get_program())
        .args(inner.get_args());
    command.stderr(Stdio::piped());
    command
}

/// Writes an upstream that records its limit of open files, and returns a configuration with it.
fn config_with_counting_upstream(project: &TestProject) -> String {
    project.write_script("project/counting", "#!/bin/sh\nulimit -n > files\nexec sleep 1000\n");
    "store = \"ledger.db\"\n[tools.calc]\nkind = \"builtin\"\n[upstreams.counting]\ncommand = \"./counting\"\nundeclared = \"read\"\n"
        .to_owned()
}

#[test]
fn gateway_raises_file_limit_but_not_for_upstreams() {
    let project = TestProject::new();
    project.write("project/toolgate.toml", &config_with_counting_upstream(&project));
    let gateway = ServeProcess::spawn(
        serve_command_with_ulimit(&project, "ulimit -Sn 200 && ulimit -Hn 2000")
            .args(["--patience", "1s"]),
    );
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", gateway.child.id())).unwrap();
    let files: Vec<&str> = limits
        .lines()
        .find(|line| line.starts_with("Max open files"))
        .unwrap()
        .split_whitespace()
        .collect();
    assert_eq!(files.get(3..5), Some(&["2000", "2000"][..]), "{limits}");
    wait_until("the upstream was started", || {
        std::fs::read_to_string(project.path("project/files")).is_ok_and(|files| files == "200\n")
    });
}

#[test]
fn idle_connections_do_not_exhaust_file_limit() {
    let project =
        TestProject::with_config("store = \"ledger.db\"\n[tools.calc]\nkind = \"builtin\"\n");
    let gateway = ServeProcess::spawn(
        serve_command_with_ulimit(&project, "ulimit -n 256").args(["--patience", "1s"]),
    );
    let mut idle: Vec<TcpStream> =
        (0..400).map(|_| TcpStream::connect(&gateway.url).unwrap()).collect();
    for stream in &idle {
        stream.set_nonblocking(true).unwrap();
    }
    let is_closed = |stream: &mut TcpStream| match stream.read(&mut [0; 64]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    };
    wait_until("most idle connections are closed", || {
        let open = std::fs::read_dir(format!("/proc/{}/fd", gateway.child.id())).unwrap().count();
        assert!(open < 240, "{open} files are open, which is too close to the limit");
        idle.iter_mut().map(|stream| usize::from(is_closed(stream))).sum::<usize>() >= 200
    });
    // The gateway can still start an upstream.
    project.write("project/toolgate.toml", &config_with_counting_upstream(&project));
    wait_until("an upstream is started", || project.path("project/files").exists());
    // Idle connections are closed after a timeout.
    let fetch_health = || {
        let mut stream = TcpStream::connect(&gateway.url).ok()?;
        stream
            .write_all(
                format!(
                    "GET /healthz HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n",
                    gateway.url
                )
                .as_bytes(),
            )
            .ok()?;
        let mut response = String::new();
        stream.read_to_string(&mut response).ok()?;
        Some(response)
    };
    wait_until("another client is served", || {
        fetch_health().is_some_and(|response| response.starts_with("HTTP/1.1 200"))
    });
}

#[test]
fn sighup_during_startup_does_not_stop_gateway() {
    let project = TestProject::new();
    project.write("project/toolgate.toml", &config_with_counting_upstream(&project));
    // The gateway is still waiting for a silent upstream.
    let mut command = serve_command(&project);
    let mut child = command
        .args(["--patience", "3s"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the upstream was started", || project.path("project/files").exists());
    assert!(
        Command::new("kill").args(["-HUP", &child.id().to_string()]).status().unwrap().success()
    );
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let _ = child.kill();
    let _ = child.wait();
    assert!(line.starts_with("toolgate serves at "), "{line}");
}

/// Returns the status of `/readyz`, or `None` if no gateway listens.
fn readyz_status(address: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream
        .write_all(
            format!("GET /readyz HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")
                .as_bytes(),
        )
        .ok()?;
    let mut response = String::new();
    stream.read_to_string(&mut response).ok()?;
    response.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the time until a gateway with a silent upstream is ready, and its first line.
///
/// Returns `None` if another process has taken the address.
fn time_until_ready(project: &TestProject, patience: Duration) -> Option<(Duration, String)> {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut command = Command::cargo_bin("toolgate").unwrap();
    project.set_environment(&mut command);
    command.args([
        "serve",
        "--config",
        "toolgate.toml",
        "--listen",
        &address,
        "--patience",
        &format!("{}s", patience.as_secs()),
    ]);
    let started_at = Instant::now();
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let stdout = child.stdout.take().unwrap();
    let (mut has_exited, mut ready_after) = (false, None);
    wait_until("the gateway is ready or has exited", || {
        // The page is polled during the whole start.
        ready_after = (readyz_status(&address) == Some(200)).then(|| started_at.elapsed());
        has_exited = child.try_wait().unwrap().is_some();
        has_exited || ready_after.is_some()
    });
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).unwrap();
    let is_still_ready = readyz_status(&address) == Some(200);
    let _ = child.kill();
    let _ = child.wait();
    if has_exited || line.is_empty() {
        return None;
    }
    assert!(is_still_ready, "{line}");
    ready_after.map(|after| (after, line))
}

#[test]
fn readyz_succeeds_only_after_startup_line() {
    let project = TestProject::new();
    project.write("project/toolgate.toml", &config_with_counting_upstream(&project));
    let patience = Duration::from_secs(2);
    let measured = (0..5).find_map(|_| time_until_ready(&project, patience));
    let (after, line) = measured.unwrap_or_else(|| panic!("no free address was found"));
    // The gateway prints its line only after the wait for the upstream.
    assert!(after >= patience && line.starts_with("toolgate serves at "), "{after:?} {line}");
}
