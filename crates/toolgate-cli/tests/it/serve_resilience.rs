//! A gateway goes on, whatever becomes of what is around it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::cargo::CommandCargoExt;

use crate::gateway::{ServeProcess, wait_until};
use crate::hook::TestProject;

/// How a gateway is started.
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
    let no = "[[policy]]\nname = \"no\"\nrule = \"deny\"\ntools = [\"pay\"]\nreason = \"No.\"\n";
    let project = TestProject::with_config(&config(""));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let served = ServeProcess::spawn(serve_command(&project).stderr(full));
    let mut n = 0;
    let mut decided = |wanted: &str| {
        n += 1;
        served.check_call("pay", &format!("c{n}")) == wanted
    };
    assert!(decided("allow"));
    // What was read, what does not load, and what was read after that: of nothing can anybody be
    // told.
    project.write("project/toolgate.toml", &config(no));
    wait_until("the first change holds", || decided("deny"));
    project.write("project/toolgate.toml", &config("[[policy]]\nname = \"no\"\nrule = \"dney\"\n"));
    served.signal("-HUP");
    project.write("project/toolgate.toml", &config(""));
    wait_until("the next change holds, too", || decided("allow"));
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
    let _served = ServeProcess::spawn(serve_command(&project).stderr(log));
    let said = || std::fs::read_to_string(project.path("log")).unwrap();
    let told = "changed settings need a restart of `toolgate serve`: ";
    project.write("project/toolgate.toml", &config("other.db", "\"a.example\""));
    wait_until("it is told", || said().contains(&format!("{told}`store`, `hosts`")));
    // As it was at the start, nothing is missing.
    project.write("project/toolgate.toml", &config("ledger.db", ""));
    wait_until("it was read again", || said().matches("reloaded the configuration").count() == 2);
    assert_eq!(said().matches(told).count(), 1, "{}", said());
}

/// The same, where no more files may be open than a shell says with these words.
fn serve_command_with_ulimit(project: &TestProject, limits: &str) -> Command {
    let plain = serve_command(project);
    let mut command = Command::new("sh");
    project.set_environment(&mut command);
    command
        .args(["-c", &format!("{limits}; exec \"$0\" \"$@\"")])
        .arg(plain.get_program())
        .args(plain.get_args());
    command.stderr(Stdio::piped());
    command
}

/// An upstream that writes down how many files it may have open, and that it was there.
fn config_with_counting_upstream(project: &TestProject) -> String {
    project.write("project/counting", "#!/bin/sh\nulimit -n > files\nexec sleep 1000\n");
    std::fs::set_permissions(
        project.path("project/counting"),
        std::fs::Permissions::from_mode(0o755),
    )
    .unwrap();
    "store = \"ledger.db\"\n[tools.calc]\nkind = \"builtin\"\n[upstreams.counting]\ncommand = \"./counting\"\nundeclared = \"read\"\n"
        .to_owned()
}

#[test]
fn gateway_raises_file_limit_but_not_for_upstreams() {
    let project = TestProject::new();
    project.write("project/toolgate.toml", &config_with_counting_upstream(&project));
    let served = ServeProcess::spawn(
        serve_command_with_ulimit(&project, "ulimit -Sn 200 && ulimit -Hn 2000")
            .args(["--patience", "1s"]),
    );
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", served.child.id())).unwrap();
    let files: Vec<&str> = limits
        .lines()
        .find(|line| line.starts_with("Max open files"))
        .unwrap()
        .split_whitespace()
        .collect();
    assert_eq!(files.get(3..5), Some(&["2000", "2000"][..]), "{limits}");
    wait_until("its upstream was there", || {
        std::fs::read_to_string(project.path("project/files")).is_ok_and(|files| files == "200\n")
    });
}

#[test]
fn idle_connections_do_not_exhaust_file_limit() {
    let project =
        TestProject::with_config("store = \"ledger.db\"\n[tools.calc]\nkind = \"builtin\"\n");
    let served = ServeProcess::spawn(
        serve_command_with_ulimit(&project, "ulimit -n 256").args(["--patience", "1s"]),
    );
    let mut idle: Vec<TcpStream> =
        (0..400).map(|_| TcpStream::connect(&served.url).unwrap()).collect();
    for stream in &idle {
        stream.set_nonblocking(true).unwrap();
    }
    let hung_up = |stream: &mut TcpStream| match stream.read(&mut [0; 64]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    };
    wait_until("most of them are hung up on", || {
        let open = std::fs::read_dir(format!("/proc/{}/fd", served.child.id())).unwrap().count();
        assert!(open < 240, "{open} files are open: there is no room for anything else");
        idle.iter_mut().map(|stream| usize::from(hung_up(stream))).sum::<usize>() >= 200
    });
    // What needs files has them.
    project.write("project/toolgate.toml", &config_with_counting_upstream(&project));
    wait_until("an upstream is started", || project.path("project/files").exists());
    // Who says nothing is not waited for without end.
    let served_too = || {
        let mut stream = TcpStream::connect(&served.url).ok()?;
        stream
            .write_all(
                format!(
                    "GET /healthz HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n",
                    served.url
                )
                .as_bytes(),
            )
            .ok()?;
        let mut said = String::new();
        stream.read_to_string(&mut said).ok()?;
        Some(said)
    };
    wait_until("somebody else is served", || {
        served_too().is_some_and(|said| said.starts_with("HTTP/1.1 200"))
    });
}

#[test]
fn sighup_during_startup_does_not_stop_gateway() {
    let project = TestProject::new();
    project.write("project/toolgate.toml", &config_with_counting_upstream(&project));
    // It is still waiting for an upstream that never says a word.
    let mut command = serve_command(&project);
    let mut child = command
        .args(["--patience", "3s"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("its upstream was started", || project.path("project/files").exists());
    assert!(
        Command::new("kill").args(["-HUP", &child.id().to_string()]).status().unwrap().success()
    );
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let _ = child.kill();
    let _ = child.wait();
    assert!(line.starts_with("toolgate serves at "), "{line}");
}

/// What `/readyz` answers with; nothing where nobody listens.
fn readyz_status(address: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream
        .write_all(
            format!("GET /readyz HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")
                .as_bytes(),
        )
        .ok()?;
    let mut said = String::new();
    stream.read_to_string(&mut said).ok()?;
    said.split_whitespace().nth(1)?.parse().ok()
}

/// How long it took until a gateway was ready that waits so long for an upstream which never says a
/// word, and the line in which it says so; nothing where somebody else has taken its address
/// meanwhile.
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
    let begun = Instant::now();
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let said = child.stdout.take().unwrap();
    let (mut ended, mut ready) = (false, None);
    wait_until("it is ready, or has given up", || {
        // It is asked all the time.
        ready = (readyz_status(&address) == Some(200)).then(|| begun.elapsed());
        ended = child.try_wait().unwrap().is_some();
        ended || ready.is_some()
    });
    let mut line = String::new();
    BufReader::new(said).read_line(&mut line).unwrap();
    let stays = readyz_status(&address) == Some(200);
    let _ = child.kill();
    let _ = child.wait();
    if ended || line.is_empty() {
        return None;
    }
    assert!(stays, "{line}");
    ready.map(|after| (after, line))
}

#[test]
fn readyz_succeeds_only_after_startup_line() {
    let project = TestProject::new();
    project.write("project/toolgate.toml", &config_with_counting_upstream(&project));
    let patience = Duration::from_secs(2);
    let tried = (0..5).find_map(|_| time_until_ready(&project, patience));
    let (after, line) = tried.unwrap_or_else(|| panic!("there is no address for it"));
    // Its line comes when it has waited for that upstream, and not before.
    assert!(after >= patience && line.starts_with("toolgate serves at "), "{after:?} {line}");
}
