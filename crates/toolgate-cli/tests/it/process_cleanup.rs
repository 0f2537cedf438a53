//! Tests that the processes of tools, hooks and upstreams end with their gateway.

use crate::gateway::{ServeProcess, wait_until};
use crate::hook::TestProject;

/// Starts a gateway that does not wait for its silent upstream.
fn start_gateway(project: &TestProject) -> ServeProcess {
    ServeProcess::start_with(project, &[], &["--patience", "1s"])
}

/// Counts the processes whose command line starts with this mark.
fn count_processes(mark: &str) -> usize {
    let has_mark = |entry: &std::fs::DirEntry| {
        std::fs::read(entry.path().join("cmdline"))
            .is_ok_and(|line| line.starts_with(mark.as_bytes()))
    };
    std::fs::read_dir("/proc").unwrap().flatten().filter(has_mark).count()
}

#[test]
fn killed_gateway_ends_tool_and_hook_programs() {
    let mark = format!("toolgate-behind-{}", std::process::id());
    let project = TestProject::new();
    let daemon =
        format!("setsid -f bash -c 'exec -a {mark} sleep 1000' < /dev/null > /dev/null 2>&1");
    project.write_script(
        "project/program",
        &format!("#!/bin/bash\n{daemon}\n(exec -a {mark} sleep 1000)\n:\n"),
    );
    project.write(
        "project/toolgate.toml",
        "store = \"ledger.db\"\n[tools.slow]\nkind = \"command\"\ncommand = \"./program\"\neffect = \"read\"\n\
         [tools.guarded]\nkind = \"command\"\ncommand = \"true\"\neffect = \"read\"\n\
         [[hooks]]\nname = \"slow\"\ncommand = \"./program\"\ntools = [\"guarded\"]\ntimeout = \"60s\"\n",
    );
    for tool in ["slow", "guarded"] {
        let gateway = ServeProcess::start_with(&project, &[], &[]);
        let _call = gateway.start_call(tool);
        wait_until("the processes run", || count_processes(&mark) == 2);
        gateway.signal("-KILL");
        wait_until(tool, || count_processes(&mark) == 0);
    }
}

#[test]
fn killed_gateway_ends_upstream_processes() {
    let mark = format!("toolgate-left-{}", std::process::id());
    let project = TestProject::new();
    // Like a package runner: a shell in between, a background process, and a daemon in its own
    // session.
    let daemon =
        format!("setsid -f bash -c 'exec -a {mark} sleep 1000' < /dev/null > /dev/null 2>&1");
    project.write_script("project/server",
        &format!("#!/bin/bash\n(exec -a {mark} sleep 1000) &\n{daemon}\n[ -e brief ] && echo x >> brief && exit\nbash -c 'exec -a {mark} sleep 1000'\n"),
    );
    project.write("project/toolgate.toml", "store = \"ledger.db\"\n[upstreams.wrapped]\ncommand = \"./server\"\nundeclared = \"read\"\n");
    let count = || count_processes(&mark);
    for signal in ["-KILL", "-TERM"] {
        let gateway = start_gateway(&project);
        wait_until("the processes run", || count() == 3);
        gateway.signal(signal);
        wait_until(signal, || count() == 0);
    }
    // An upstream that exits by itself leaves no process, and is restarted.
    project.write("project/brief", "");
    let gateway = start_gateway(&project);
    let run_count =
        || std::fs::read_to_string(project.path("project/brief")).unwrap().lines().count();
    wait_until("the upstream was restarted", || run_count() > 1);
    // Each run leaves two processes, and the next run starts after a delay. Only the processes of
    // the last run may still exist.
    assert!(count() <= 2, "{}", count());
    gateway.signal("-TERM");
    wait_until("the remaining processes ended", || count() == 0);
    // If the supervisor is killed with `SIGKILL`, the upstream ends too.
    std::fs::remove_file(project.path("project/brief")).unwrap();
    let gateway = start_gateway(&project);
    wait_until("the processes run", || count() == 3);
    let is_supervisor = |entry: &std::fs::DirEntry| {
        let command_line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let parent = format!("__toolgate_child\0{}\0", gateway.child.id());
        command_line.windows(parent.len()).any(|part| part == parent.as_bytes())
    };
    let supervisor =
        std::fs::read_dir("/proc").unwrap().flatten().find(is_supervisor).unwrap().file_name();
    assert!(
        std::process::Command::new("kill")
            .arg("-KILL")
            .arg(&supervisor)
            .status()
            .unwrap()
            .success()
    );
    let program = project.path("project/server").display().to_string();
    let is_upstream = |entry: &std::fs::DirEntry| {
        let command_line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        command_line.windows(program.len()).any(|part| part == program.as_bytes())
    };
    wait_until("the upstream ended", || {
        !std::fs::read_dir("/proc").unwrap().flatten().any(|entry| is_upstream(&entry))
    });
    drop(gateway);
    // The supervisor is dead, so the test ends the remaining processes of the upstream.
    let _ = std::process::Command::new("pkill").args(["-KILL", "-f", &mark]).status();
}
