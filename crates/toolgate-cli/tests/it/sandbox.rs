//! Tests sandboxed programs: arguments, output, limits and isolation.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use toolgate::hook::CommandHook;
use toolgate::{Agent, CommandTool, Effect, Session, Tool, Toolgate};
use toolgate_process::sandbox::Sandbox;

/// A sandbox in a temporary directory, and sessions with one tool, `run`.
struct SandboxFixture {
    directory: tempfile::TempDir,
    sandbox: Sandbox,
    seconds: u64,
}

impl SandboxFixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("mine")).unwrap();
        std::fs::write(directory.path().join("mine/in.txt"), "inside").unwrap();
        std::fs::write(directory.path().join("secret.txt"), "outside").unwrap();
        let sandbox = Sandbox::default().write(directory.path().join("mine"));
        Self { directory, sandbox, seconds: 20 }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn session(&self, program: CommandTool) -> Session {
        self.session_with_launcher(program, Path::new(env!("CARGO_BIN_EXE_toolgate")))
    }

    fn session_with_launcher(&self, program: CommandTool, launcher: &Path) -> Session {
        let program = program.launcher(launcher).sandbox(self.sandbox.clone());
        let schema = json!({"type": "object", "properties": {"word": {"type": "string"}, "n": {"type": "integer"}}});
        let tool = Tool::with_handler("run", "Runs.", schema, Arc::new(program))
            .effect(Effect::Read)
            .retry(0, Duration::ZERO);
        let agent = Agent::builder("a")
            .tool(tool.timeout(Duration::from_secs(self.seconds)))
            .build()
            .unwrap();
        Toolgate::builder().agent(agent).build().unwrap().session("a", "b", "c")
    }

    /// Runs a script in the sandbox, and returns its output or error.
    async fn run_script(&self, script: &str) -> String {
        let session = self.session(CommandTool::new("/bin/bash").arg("-c").arg(script));
        let answer = session.call("run", json!({})).await;
        match answer.outcome.success() {
            Some(output) => {
                output.value.as_str().map_or_else(|| output.value.to_string(), str::to_owned)
            }
            None => format!(
                "ERROR {}",
                answer.outcome.error().map(|error| error.message.clone()).unwrap_or_default()
            ),
        }
    }
}

#[tokio::test]
async fn arguments_are_never_interpreted_by_shell() {
    let fixture = SandboxFixture::new();
    let echo = || CommandTool::new("/bin/echo").arg("--word={/word}").arg("{/n}");
    let call_echo =
        |arguments: Value| async { fixture.session(echo()).call("run", arguments).await };
    let answer = call_echo(json!({"word": "$(id); rm -r / `x` \"", "n": 7})).await;
    assert_eq!(answer.outcome.success().unwrap().value, json!("--word=$(id); rm -r / `x` \" 7"));
    let negative = call_echo(json!({"word": "x", "n": -7})).await;
    assert_eq!(
        negative.outcome.error().map(|e| (&*e.code, e.message.contains("must not begin with `-`"))),
        Some(("invalid_arguments", true))
    );
    let missing = call_echo(json!({"word": "x"})).await;
    assert_eq!(missing.outcome.error().map(|e| &*e.code), Some("invalid_arguments"));
    let with_stdin =
        fixture.session(CommandTool::new("cat")).call("run", json!({"word": "ä"})).await;
    assert_eq!(with_stdin.outcome.success().unwrap().value, json!({"word": "ä"}));
}

#[tokio::test]
async fn truncated_secret_in_stderr_is_redacted() {
    let fixture = SandboxFixture::new();
    let script = "head -c 1985 /dev/zero | tr '\\0' x >&2; cat >&2; exit 3";
    let program = CommandTool::new("/bin/bash")
        .arg("-c")
        .arg(script)
        .launcher(env!("CARGO_BIN_EXE_toolgate"))
        .sandbox(fixture.sandbox.clone());
    let schema =
        json!({"type": "object", "properties": {"word": {"type": "string", "writeOnly": true}}});
    let tool = Tool::with_handler("run", "Runs.", schema, Arc::new(program))
        .effect(Effect::Read)
        .retry(0, Duration::ZERO);
    let agent = Agent::builder("a").tool(tool.timeout(Duration::from_secs(20))).build().unwrap();
    let session = Toolgate::builder().agent(agent).build().unwrap().session("a", "b", "c");
    let answer = session.call("run", json!({"word": "hunter2-long"})).await;
    let message = &answer.outcome.error().unwrap().message;
    assert!(message.ends_with("x{\"word\":\"[redacted]…"), "{message}");
}

#[tokio::test]
async fn program_output_and_exit_become_call_result() {
    let mut fixture = SandboxFixture::new();
    assert_eq!(fixture.run_script("echo '{\"a\": 1}'").await, "{\"a\":1}");
    assert_eq!(fixture.run_script("echo plain text").await, "plain text");
    assert!(
        fixture
            .run_script("echo why >&2; exit 3")
            .await
            .starts_with("ERROR the program ended with exit code 3: why")
    );
    let program = CommandTool::new("/bin/bash")
        .arg("-c")
        .arg("echo \"no entry with $KEY\" >&2; exit 3")
        .env("KEY", "s3cret")
        .redact_value("s3cret");
    let answer = fixture.session(program).call("run", json!({})).await;
    assert_eq!(
        answer.outcome.error().unwrap().message,
        "the program ended with exit code 3: no entry with [redacted]"
    );
    assert!(fixture.run_script("kill -9 $$").await.contains("signal"));
    assert!(fixture.run_script("head -c 3000000 /dev/zero").await.contains("printed more than"));
    assert_eq!(fixture.run_script("env | grep -c SECRET_OF_THE_TEST; true").await, "0");
    // A program cannot imitate an error of the sandbox.
    assert!(
        fixture
            .run_script("echo 'toolgate sandbox: no' >&2; exit 126")
            .await
            .contains("ended with exit code 126")
    );
    fixture.sandbox.read.push(fixture.path("nowhere"));
    assert!(fixture.run_script("true").await.starts_with("ERROR toolgate sandbox:"));
    fixture.sandbox.read.clear();
    let (mark, started) =
        (format!("toolgate-late-{}", std::process::id()), fixture.path("mine/begun"));
    // On a busy machine the children start late.
    for seconds in [1, 4, 16] {
        fixture.seconds = seconds;
        // One child leaves the process group.
        let daemon = format!("setsid -f bash -c 'exec -a {mark} sleep 100'");
        let script = format!(
            "{daemon}; (echo > {}; exec -a {mark} sleep 100) & sleep 60",
            started.display()
        );
        assert!(fixture.run_script(&script).await.starts_with("ERROR"));
        if started.exists() {
            break;
        }
    }
    assert!(started.exists(), "no child of the program was started");
    wait_for_exit(&mark).await;
    // A remaining process is waited for only if its output is open.
    fixture.seconds = 60;
    let to_null = "< /dev/null > /dev/null 2>&1";
    assert_eq!(
        fixture
            .run_script(&format!(
                "setsid -f bash -c 'exec -a {mark} sleep 100' {to_null}; echo done"
            ))
            .await,
        "done"
    );
    wait_for_exit(&mark).await;
    assert_eq!(fixture.run_script("exec > >(sleep 0.3; cat); echo said").await, "said");
    assert_eq!(fixture.run_script("(sleep 0.3; echo later) & echo now").await, "now\nlater");
    assert!(
        fixture
            .run_script("exec > /dev/null 2>&1; sleep 0.3; exit 3")
            .await
            .contains("exit code 3")
    );
}

#[tokio::test]
async fn hook_output_is_read_until_end_of_file() {
    let tool =
        Tool::dynamic("run", "Runs.", json!({"type": "object"}), |_, _| async { Ok(json!("ran")) })
            .effect(Effect::Read);
    // A filter or a background process writes the answer after the hook has exited.
    let scripts = [
        "exec > >(sleep 0.3; cat); echo '{\"decision\": \"deny\", \"reason\": \"not today\"}'",
        "(sleep 0.3; echo 'not today' >&2) & exit 2",
    ];
    for script in scripts {
        let hook = CommandHook::new("h", "/bin/bash")
            .arg("-c")
            .arg(script)
            .launcher(env!("CARGO_BIN_EXE_toolgate"))
            .before();
        let agent = Agent::builder("a").tool(tool.clone()).hook(hook).build().unwrap();
        let session = Toolgate::builder().agent(agent).build().unwrap().session("a", "b", "c");
        let answer = session.call("run", json!({})).await;
        let error = answer.outcome.error().unwrap_or_else(|| panic!("{script}: {answer:?}"));
        assert_eq!((&*error.code, &*error.message), ("hook_denied", "not today"), "{script}");
    }
}

#[tokio::test]
async fn program_cannot_forge_sandbox_failure() {
    let mut fixture = SandboxFixture::new();
    fixture.sandbox.read.push("/proc".into());
    // The parent of the program is the supervisor. Its open files are tried too.
    let scripts = [
        "kill -USR2 $$; sleep 60",
        "kill -USR2 $PPID; exit 126",
        "echo 'toolgate sandbox: no room'>&2; exit 126",
        "for f in /proc/$PPID/fd/* /proc/self/fd/*; do case $f in */[012]) ;; *) echo '!' > $f;; esac; done 2> /dev/null; kill -USR2 $PPID; exit 126",
    ];
    for script in scripts {
        let answer = fixture
            .session(CommandTool::new("/bin/bash").arg("-c").arg(script))
            .call("run", json!({}))
            .await;
        let error = answer.outcome.error().unwrap_or_else(|| panic!("{script}: {answer:?}"));
        assert_eq!(error.code, "command_failed", "{script}: {error:?}");
    }
    // A program that did not start is reported as such.
    let answer =
        fixture.session(CommandTool::new("/bin/no-such-program")).call("run", json!({})).await;
    let error = answer.outcome.error().unwrap();
    assert_eq!(
        (&*error.code, error.effects),
        ("internal_fault", toolgate::CallEffects::None),
        "{error:?}"
    );
    assert!(error.message.contains("does not exist"), "{error:?}");
}

#[tokio::test]
async fn sandboxed_program_cannot_escape() {
    let fixture = SandboxFixture::new();
    let (mine, secret) = (fixture.path("mine"), fixture.path("secret.txt"));
    let (mine, secret) = (mine.display(), secret.display());
    // Files in the sandbox are accessible.
    assert_eq!(
        fixture
            .run_script(&format!(
                "cat {mine}/in.txt; echo more > {mine}/out.txt; cat {mine}/out.txt"
            ))
            .await,
        "insidemore"
    );
    let parent = std::process::id();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = (port.local_addr().unwrap().port(), port);
    let outside = std::env::temp_dir().join(format!("toolgate-escape-{parent}"));
    let clone = if cfg!(target_arch = "aarch64") { 220 } else { 56 };
    let attempts: Vec<(&str, String)> = vec![
        ("a file outside", format!("cat {secret}")),
        ("a path that goes up", format!("cat {mine}/../secret.txt")),
        ("a link out", format!("ln -s {secret} {mine}/link; cat {mine}/link")),
        (
            "a link that is swapped",
            // Exits with 0 only if the outside file was read once.
            format!(
                "(while :; do ln -sfn {mine}/in.txt {mine}/l; ln -sfn {secret} {mine}/l; done) & s=$!; \
                 for i in $(seq 2000); do read -r got < {mine}/l; [ \"$got\" = outside ] && kill $s && exit 0; done 2> /dev/null; kill $s; exit 1"
            ),
        ),
        ("a hard link", format!("ln {secret} {mine}/hard && cat {mine}/hard")),
        ("the root of a process", format!("cat /proc/self/root{secret}")),
        ("the memory of the parent", format!("head -c 1 /proc/{parent}/mem")),
        ("the environment of the parent", format!("cat /proc/{parent}/environ")),
        ("a password file", "cat /etc/shadow".to_owned()),
        ("a file elsewhere", format!("echo x > {}", outside.display())),
        ("the network", format!("echo x > /dev/tcp/127.0.0.1/{}", port.0)),
        ("a signal to the parent", format!("kill -0 {parent}")),
        ("a new root", "chroot / true".to_owned()),
        ("a new namespace", "unshare -Ur true".to_owned()),
        (
            "a new namespace by another way",
            format!("perl -e 'exit(syscall({clone}, 0x10000011, 0, 0, 0, 0) < 0 ? 1 : 0)'"),
        ),
        ("the limits of the parent", format!("prlimit --pid {parent} --core=0:0")),
        ("a mount", format!("mount -t tmpfs none {mine}")),
        ("a memory hog", "head -c 4G /dev/zero | tail -c 4G > /dev/null".to_owned()),
        ("a large file", format!("head -c 600M /dev/zero > {mine}/large")),
    ];
    for (name, attempt) in attempts {
        let output = fixture.run_script(&attempt).await;
        assert!(output.starts_with("ERROR") && !output.contains("outside\n"), "{name}: {output}");
    }
    assert!(!outside.exists());
    // A filter cannot read the flags of `clone3`, so it returns `ENOSYS` and libc uses `clone`.
    assert_eq!(fixture.run_script("perl -e 'syscall(435, 0, 0); print $! + 0'").await, "38");
    assert_eq!(
        fixture.run_script("ulimit -c 0 && ulimit -n 100 && (ulimit -n) && echo done | cat").await,
        "100\ndone"
    );
}

#[tokio::test]
async fn fork_bomb_is_killed_with_all_children() {
    use std::os::unix::fs::PermissionsExt;
    let mut fixture = SandboxFixture::new();
    fixture.sandbox.processes = 20;
    // The kernel does not limit the processes of root, so another user runs the program.
    let launcher = fixture.path("launcher");
    let program = env!("CARGO_BIN_EXE_toolgate");
    let is_root = std::fs::metadata("/proc/self")
        .is_ok_and(|metadata| std::os::unix::fs::MetadataExt::uid(&metadata) == 0);
    let (copy, exec) = (
        fixture.path("toolgate"),
        if is_root { "exec setpriv --reuid 61234 --regid 61234 --clear-groups " } else { "exec " },
    );
    std::fs::write(
        fixture.path("launcher.txt"),
        format!("#!/bin/sh\n{exec}{} \"$@\"\n", copy.display()),
    )
    .unwrap();
    // A child of another test may inherit a file that this process has open for writing, and such a
    // file cannot be executed. So `install` writes the files.
    for (from, to) in [(PathBuf::from(program), &copy), (fixture.path("launcher.txt"), &launcher)] {
        assert!(
            std::process::Command::new("install")
                .args(["-m", "755"])
                .args([&from, to])
                .status()
                .unwrap()
                .success()
        );
    }
    std::fs::set_permissions(fixture.path(""), std::fs::Permissions::from_mode(0o755)).unwrap();
    let mark = format!("toolgate-bomb-{}", std::process::id());
    // Ten generations at most, so that a broken sandbox does not exhaust the machine.
    let bomb = format!(
        "f() {{ [ $1 -gt 0 ] && {{ f $(($1-1)) & f $(($1-1)) & }}; exec -a {mark} sleep 100; }}; f 9"
    );
    let mut max_count = 0;
    // On a busy machine the children start late.
    for seconds in [3, 12, 48] {
        fixture.seconds = seconds;
        let session = fixture
            .session_with_launcher(CommandTool::new("/bin/bash").arg("-c").arg(&bomb), &launcher);
        let (watched_mark, is_done) = (mark.clone(), Arc::new(AtomicBool::new(false)));
        let stop = Arc::clone(&is_done);
        let counter = tokio::task::spawn_blocking(move || {
            let mut max_count = 0;
            while !stop.load(Ordering::Relaxed) {
                max_count = max_count.max(count_processes_named(&watched_mark));
                std::thread::sleep(Duration::from_millis(20));
            }
            max_count
        });
        let answer = session.call("run", json!({})).await;
        is_done.store(true, Ordering::Relaxed);
        assert!(answer.outcome.error().is_some(), "{answer:?}");
        max_count = counter.await.unwrap();
        if max_count > 0 {
            break;
        }
    }
    assert!((1..=21).contains(&max_count), "{max_count} processes at once");
    wait_for_exit(&mark).await;
}

#[tokio::test]
async fn inherited_file_descriptors_are_closed_in_sandbox() {
    let fixture = SandboxFixture::new();
    let (secret, launcher) = (fixture.path("secret.txt"), fixture.path("launcher"));
    let script = format!(
        "#!/bin/sh\nexec 9< {}\nexec {} \"$@\"\n",
        secret.display(),
        env!("CARGO_BIN_EXE_toolgate")
    );
    std::fs::write(fixture.path("launcher.txt"), script).unwrap();
    // `install` writes the file, see above.
    let status = std::process::Command::new("install")
        .args(["-m", "755"])
        .args([&fixture.path("launcher.txt"), &launcher])
        .status();
    assert!(status.unwrap().success());
    let session = fixture
        .session_with_launcher(CommandTool::new("/bin/bash").arg("-c").arg("cat <&9"), &launcher);
    let answer = session.call("run", json!({})).await;
    assert_eq!(
        answer.outcome.error().map(|error| &*error.code),
        Some("command_failed"),
        "{answer:?}"
    );
    let session = fixture
        .session_with_launcher(CommandTool::new("/bin/bash").arg("-c").arg("cat"), &launcher);
    assert_eq!(
        session.call("run", json!({"n": 7})).await.outcome.success().unwrap().value,
        json!({"n": 7})
    );
}

/// Waits until no process with this mark exists. Each would run for longer by itself.
async fn wait_for_exit(mark: &str) {
    for _ in 0..600 {
        if count_processes_named(mark) == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{} processes are left", count_processes_named(mark));
}

fn count_processes_named(mark: &str) -> usize {
    let has_mark = |entry: &std::fs::DirEntry| {
        std::fs::read(entry.path().join("cmdline"))
            .is_ok_and(|line| line.starts_with(mark.as_bytes()))
    };
    std::fs::read_dir(Path::new("/proc")).unwrap().flatten().filter(has_mark).count()
}

#[tokio::test]
async fn granted_network_allows_tcp_and_denies_unix_sockets() {
    let mut fixture = SandboxFixture::new();
    fixture.sandbox.network = true;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    assert_eq!(
        fixture.run_script(&format!("echo x > /dev/tcp/127.0.0.1/{port} && echo sent")).await,
        "sent"
    );
    // A local service could start programs outside the sandbox.
    let socket = fixture.path("mine/socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let connect = format!(
        "socket(S, AF_UNIX, SOCK_STREAM, 0) && connect(S, sockaddr_un(\"{}\")) or exit 1",
        socket.display()
    );
    assert!(
        fixture.run_script(&format!("perl -MSocket -e '{connect}'")).await.starts_with("ERROR")
    );
    let pair = "socketpair(A, B, AF_UNIX, SOCK_STREAM, 0) or exit 1; print \"paired\"";
    assert_eq!(fixture.run_script(&format!("perl -MSocket -e '{pair}'")).await, "paired");
}

#[tokio::test]
async fn command_tool_runs_in_configured_sandbox() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("key"), "s3cret\n").unwrap();
    let config = r#"
        [tools.show]
        kind = "command"
        command = "/bin/bash"
        args = ["-c", "echo \"{\\\"word\\\": \\\"$0\\\", \\\"key\\\": \\\"$KEY\\\"}\"", "{/word}"]
        effect = "read"
        input = { type = "object", properties = { word = { type = "string" } }, required = ["word"] }
        env = { KEY = { file = "key" } }
        sandbox = { memory = "1GB", cpu = "5s" }
    "#;
    let path = directory.path().join("toolgate.toml");
    std::fs::write(&path, config).unwrap();
    let loaded =
        toolgate_config::Config::load(&path).unwrap().with_launcher(env!("CARGO_BIN_EXE_toolgate"));
    let agent = loaded
        .build_agents(None)
        .unwrap_or_else(|error| panic!("{}", error.render(false)))
        .remove(0);
    assert!(!agent.definition().contains("s3cret"));
    let session = Toolgate::builder().agent(agent).build().unwrap().session("default", "b", "c");
    let answer = session.call("show", json!({"word": "hello"})).await;
    assert_eq!(answer.outcome.success().unwrap().value, json!({"word": "hello", "key": "s3cret"}));
}
