//! No process is left behind, however its gateway or its program goes.

use std::os::unix::fs::PermissionsExt;

use crate::gateway::{ServeProcess, wait_until};
use crate::hook::TestProject;

/// Its upstream never says a word, and nobody waits for it.
fn start_gateway(project: &TestProject) -> ServeProcess {
    ServeProcess::start_with(project, &[], &["--patience", "1s"])
}

/// How many processes are called so.
fn count_processes(mark: &str) -> usize {
    let named = |entry: &std::fs::DirEntry| {
        std::fs::read(entry.path().join("cmdline"))
            .is_ok_and(|line| line.starts_with(mark.as_bytes()))
    };
    std::fs::read_dir("/proc").unwrap().flatten().filter(named).count()
}

#[test]
fn killed_gateway_ends_tool_and_hook_programs() {
    let mark = format!("toolgate-behind-{}", std::process::id());
    let project = TestProject::new();
    let daemon =
        format!("setsid -f bash -c 'exec -a {mark} sleep 1000' < /dev/null > /dev/null 2>&1");
    project.write(
        "project/program",
        &format!("#!/bin/bash\n{daemon}\n(exec -a {mark} sleep 1000)\n:\n"),
    );
    std::fs::set_permissions(
        project.path("project/program"),
        std::fs::Permissions::from_mode(0o755),
    )
    .unwrap();
    project.write(
        "project/toolgate.toml",
        "store = \"ledger.db\"\n[tools.slow]\nkind = \"command\"\ncommand = \"./program\"\neffect = \"read\"\n\
         [tools.guarded]\nkind = \"command\"\ncommand = \"true\"\neffect = \"read\"\n\
         [[hooks]]\nname = \"slow\"\ncommand = \"./program\"\ntools = [\"guarded\"]\ntimeout = \"60s\"\n",
    );
    for tool in ["slow", "guarded"] {
        let served = ServeProcess::start_with(&project, &[], &[]);
        let _call = served.start_call(tool);
        wait_until("they run", || count_processes(&mark) == 2);
        served.signal("-KILL");
        wait_until(tool, || count_processes(&mark) == 0);
    }
}

#[test]
fn killed_gateway_ends_upstream_processes() {
    let mark = format!("toolgate-left-{}", std::process::id());
    let project = TestProject::new();
    // As with a package runner: a shell in between, something in the background, and something that
    // wants to be nobody's child.
    let daemon =
        format!("setsid -f bash -c 'exec -a {mark} sleep 1000' < /dev/null > /dev/null 2>&1");
    project.write(
        "project/server",
        &format!("#!/bin/bash\n(exec -a {mark} sleep 1000) &\n{daemon}\n[ -e brief ] && echo x >> brief && exit\nbash -c 'exec -a {mark} sleep 1000'\n"),
    );
    std::fs::set_permissions(
        project.path("project/server"),
        std::fs::Permissions::from_mode(0o755),
    )
    .unwrap();
    project.write("project/toolgate.toml", "store = \"ledger.db\"\n[upstreams.wrapped]\ncommand = \"./server\"\nundeclared = \"read\"\n");
    let count = || count_processes(&mark);
    for signal in ["-KILL", "-TERM"] {
        let served = start_gateway(&project);
        wait_until("they run", || count() == 3);
        served.signal(signal);
        wait_until(signal, || count() == 0);
    }
    // One that ends by itself leaves nobody behind, either, and is started again and again.
    project.write("project/brief", "");
    let served = start_gateway(&project);
    let times = || std::fs::read_to_string(project.path("project/brief")).unwrap().lines().count();
    wait_until("it was started again", || times() > 1);
    // Each leaves two behind, and the next comes a while after it: those of the last alone may
    // still be there.
    assert!(count() <= 2, "{}", count());
    served.signal("-TERM");
    wait_until("what it left is gone", || count() == 0);
    // What leads into it, killed by force, takes it along.
    std::fs::remove_file(project.path("project/brief")).unwrap();
    let served = start_gateway(&project);
    wait_until("they run", || count() == 3);
    let leads = |entry: &std::fs::DirEntry| {
        let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let parent = format!("__toolgate_child\0{}\0", served.child.id());
        words.windows(parent.len()).any(|part| part == parent.as_bytes())
    };
    let leader = std::fs::read_dir("/proc").unwrap().flatten().find(leads).unwrap().file_name();
    assert!(
        std::process::Command::new("kill").arg("-KILL").arg(&leader).status().unwrap().success()
    );
    let program = project.path("project/server").display().to_string();
    let runs = |entry: &std::fs::DirEntry| {
        let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        words.windows(program.len()).any(|part| part == program.as_bytes())
    };
    wait_until("it is gone", || {
        !std::fs::read_dir("/proc").unwrap().flatten().any(|entry| runs(&entry))
    });
    drop(served);
    // What it had started is nobody's child by now, and nobody else ends it.
    let _ = std::process::Command::new("pkill").args(["-KILL", "-f", &mark]).status();
}
