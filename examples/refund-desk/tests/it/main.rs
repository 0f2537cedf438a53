//! The agent, and the gateway that it starts.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn a_gateway_ends_with_its_agent_whoever_ends_that() {
    let until = |what: &str, is: &mut dyn FnMut() -> bool| {
        let so = (0..900).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            is()
        });
        assert!(so, "it never came to that {what}");
    };
    for signal in ["-HUP", "-TERM", "-INT"] {
        let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ends{signal}"));
        let _ = std::fs::remove_dir_all(&home);
        std::fs::create_dir_all(&home).unwrap();
        // A gateway that never becomes ready, as one whose upstreams take their time.
        let gateway = home.join("gateway");
        std::fs::write(&gateway, "#!/bin/sh\ntrap 'touch ended; exit' TERM\ntouch begun\nwhile :; do sleep 0.1; done\n").unwrap();
        std::fs::set_permissions(&gateway, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_refund-agent"));
        command.arg(&gateway).arg("toolgate.toml").current_dir(&home).stdout(Stdio::null()).stderr(Stdio::null());
        let mut agent = command.spawn().unwrap();
        until("the gateway has begun", &mut || home.join("begun").exists());
        assert!(Command::new("kill").args([signal, &agent.id().to_string()]).status().unwrap().success());
        until("the agent has ended", &mut || agent.try_wait().unwrap().is_some());
        assert!(home.join("ended").exists(), "{signal}: the gateway is still there");
    }
}
