//! Tests the scripted agent and the gateway that it starts.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Creates a directory with a script that plays the gateway.
fn install_fake_gateway(name: &str, script: &str) -> std::io::Result<(PathBuf, PathBuf)> {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&home);
    std::fs::create_dir_all(&home)?;
    let gateway = home.join("gateway");
    std::fs::write(&gateway, script)?;
    std::fs::set_permissions(&gateway, std::fs::Permissions::from_mode(0o755))?;
    Ok((home, gateway))
}

#[test]
fn a_signal_to_the_agent_ends_its_gateway() {
    let wait_until = |condition: &str, is_met: &mut dyn FnMut() -> bool| {
        let is_met_in_time = (0..900).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            is_met()
        });
        assert!(is_met_in_time, "timeout while waiting until {condition}");
    };
    for signal in ["-HUP", "-TERM", "-INT"] {
        // A gateway that never becomes ready, for example because of slow upstreams.
        let script =
            "#!/bin/sh\ntrap 'touch ended; exit' TERM\ntouch begun\nwhile :; do sleep 0.1; done\n";
        let (home, gateway) = install_fake_gateway(&format!("ends{signal}"), script).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_refund-agent"));
        command
            .arg(&gateway)
            .arg("toolgate.toml")
            .current_dir(&home)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut agent = command.spawn().unwrap();
        wait_until("the gateway has begun", &mut || home.join("begun").exists());
        assert!(
            Command::new("kill")
                .args([signal, &agent.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
        wait_until("the agent has ended", &mut || agent.try_wait().unwrap().is_some());
        assert!(home.join("ended").exists(), "{signal}: the gateway is still there");
    }
}

#[test]
fn no_work_starts_on_an_unhealthy_gateway() {
    for (name, ready, up, held_tools, why) in [
        ("not-ready", "503 Away", 1, 0, "the gateway is not ready: the canary was not refused"),
        ("away", "200 OK", 0, 0, "the upstream `desk` is down"),
        ("held", "200 OK", 1, 2, "tools of the upstream `desk` are quarantined"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let recorded = Arc::clone(&requests);
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut text = [0; 4096];
                let read = stream.read(&mut text).unwrap_or_default();
                let line = String::from_utf8_lossy(text.get(..read).unwrap_or_default())
                    .lines()
                    .next()
                    .unwrap_or_default()
                    .to_owned();
                let (status, body) = match line.as_str() {
                    "GET /readyz HTTP/1.1" => (ready, "the canary was not refused\n".to_owned()),
                    "GET /metrics HTTP/1.1" => (
                        "200 OK",
                        format!(
                            "toolgate_upstream_up{{upstream=\"desk\"}} {up}\ntoolgate_upstream_held_tools{{upstream=\"desk\"}} {held_tools}\n"
                        ),
                    ),
                    _ => ("404 No", String::new()),
                };
                recorded.lock().unwrap().push(line);
                let head = format!(
                    "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                    body.len()
                );
                let _ = stream.write_all((head + &body).as_bytes());
            }
        });
        let script = format!(
            "#!/bin/sh\ntrap exit TERM\necho toolgate serves at http://{address}/mcp\nwhile :; do sleep 0.1; done\n"
        );
        let (home, gateway) = install_fake_gateway(name, &script).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_refund-agent"));
        let output = command
            .arg(&gateway)
            .args(["toolgate.toml", "--once"])
            .current_dir(&home)
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(why), "{name}: {stderr}");
        // The agent only read the status pages.
        let requests = requests.lock().unwrap();
        assert!(
            !requests.is_empty() && requests.iter().all(|line| line.starts_with("GET ")),
            "{name}: {requests:?}"
        );
    }
}
