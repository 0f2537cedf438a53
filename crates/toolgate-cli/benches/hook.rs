//! Measures what a hook costs a coding agent, from start to exit, compared with `/bin/true` and an
//! equivalent Python hook in the same run.
//!
//! Also shows that 1,000 rules and a ledger with 1,000,000 rows do not change the cost. The session
//! was started, so a resident process answers. A hook that works alone has a line of its own.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a benchmark may fail loudly")]

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use toolgate::policy::DecisionFacts;
use toolgate::store::{ClaimResolution, CommitRequest, Store};
use toolgate::{
    CallEffects, CallId, CallOutput, Decision, Gate, Latency, Outcome, Row, SessionKey, Timestamp,
};
use toolgate_json::Digest;
use toolgate_store::SqliteStore;
use toolgate_testkit::bench_report::{BenchLine, median, write_lines};

const ROUNDS: usize = 200;

const CONFIG: &str = r#"
name = "coder"

[tools.bash]
kind = "client"
shell = "/command"

[tools.read]
kind = "client"
effect = "read"

[[policy]]
name = "no_push"
rule = "deny"
tools = ["bash"]
where = [{ argument = "/command", runs = ["git push"] }]
"#;

/// Returns a configuration with additional rules for other tools.
fn config_with_other_rules(count: usize) -> String {
    let mut text = CONFIG.to_owned();
    for n in 0..count / 10 {
        text.push_str(&format!("[tools.other_{n}]\nkind = \"client\"\nshell = \"/command\"\n"));
    }
    for n in 0..count {
        text.push_str(&format!(
            "[[policy]]\nname = \"rule_{n}\"\nrule = \"deny\"\ntools = [\"other_{}\"]\nwhere = [{{ argument = \"/command\", runs = [\"program_{n}\"] }}]\n",
            n % (count / 10)
        ));
    }
    text
}

/// Returns a configuration with additional rules for the called tool.
fn config_with_bash_rules(count: usize) -> String {
    let rule = |n: usize| {
        format!(
            "[[policy]]\nname = \"rule_{n}\"\nrule = \"deny\"\ntools = [\"bash\"]\nwhere = [{{ argument = \"/command\", runs = [\"program_{n}\"] }}]\n"
        )
    };
    CONFIG.to_owned() + &(0..count).map(rule).collect::<String>()
}

/// Makes a call, and returns its duration in milliseconds.
fn time_call(command: &mut Command, n: usize) -> f64 {
    let event = json!({
        "hook_event_name": "PreToolUse", "session_id": "bench", "tool_name": "Bash", "tool_use_id": format!("t{n}-{}", std::process::id()),
        "tool_input": {"command": format!("ls -l {n}")},
    });
    time_process(command, &event.to_string())
}

/// Runs a process on an event, and returns its duration in milliseconds.
fn time_process(command: &mut Command, event: &str) -> f64 {
    let started_at = Instant::now();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that does not read its input has already exited.
    let _ = child.stdin.take().unwrap().write_all(event.as_bytes());
    let output = child.wait_with_output().unwrap();
    let duration = started_at.elapsed().as_secs_f64() * 1e3;
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && (stdout.is_empty() || stdout.trim() == "{}"),
        "{stdout}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    duration
}

/// Measures the commands alternately, so that noise of the machine affects all of them.
fn measure_commands(commands: &mut [Command]) -> Vec<f64> {
    for command in commands.iter_mut() {
        (0..5).for_each(|n| {
            time_call(command, 1_000_000 + n);
        });
    }
    let mut durations: Vec<Vec<f64>> = commands.iter().map(|_| Vec::new()).collect();
    let count = commands.len();
    for n in 0..ROUNDS {
        // A process after a large program finds cold caches, so each command follows each other
        // one.
        for step in 0..count {
            let at = (step * (1 + n % (count - 1)) + n) % count;
            durations[at].push(time_call(&mut commands[at], n * count + step));
        }
    }
    durations.into_iter().map(median).collect()
}

struct HookBenchDir(tempfile::TempDir);

impl HookBenchDir {
    fn write_config(&self, name: &str, text: &str) -> std::path::PathBuf {
        let path = self.0.path().join(format!("{name}.toml"));
        std::fs::write(&path, format!("store = \"{name}.db\"\n{text}")).unwrap();
        path
    }

    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(args)
            .current_dir(self.0.path())
            .env("TOOLGATE_STATE", self.0.path().join("state"));
        command
    }

    /// Copies a program, as an installation would.
    ///
    /// A file that a linker wrote is in small pieces in the page cache, and each piece is mapped
    /// separately. `/bin/true` was copied by its installation too.
    fn install_copy(&self, program: &str) -> String {
        let copy = self.0.path().join(Path::new(program).file_name().unwrap());
        if !copy.exists() {
            std::fs::copy(program, &copy).unwrap();
        }
        copy.display().to_string()
    }

    fn warm_hook(&self, config: &Path) -> Command {
        let mut command = self.command(
            &self.install_copy(env!("CARGO_BIN_EXE_toolgate-hook")),
            &["--config", config.to_str().unwrap()],
        );
        // The first run writes the cache. A file that was just written is not cached.
        time_call(&mut command, 2_000_000);
        std::thread::sleep(Duration::from_millis(1_100));
        time_call(&mut command, 2_000_001);
        command
    }
}

fn row(n: usize) -> Row {
    Row {
        call: CallId::from_bytes(
            (0x01a1_0000_0000_7000_8000_0000_0000_0000_u128 + ((n as u128) << 20)).to_be_bytes(),
        ),
        client_id: None,
        at: Timestamp::now(),
        key: SessionKey::new("coder", "alice", format!("conversation-{}", n % 10_000)),
        turn: None,
        stop_reason: None,
        tool: "bash".into(),
        arguments: Arc::new(json!({"command": "cargo test --workspace", "n": n})),
        entities: Vec::new(),
        digest: Some(Digest::of(b"call")),
        decision: Decision::Succeeded,
        gate: Gate::Run,
        rule: None,
        facts: Box::new(DecisionFacts::at(Timestamp::now())),
        outcome: Outcome::Success(CallOutput::from_value(
            json!({"stdout": "ok", "stderr": "", "interrupted": false}),
        )),
        effects: CallEffects::Done,
        latency: Latency::default(),
        retries: 0,
        spent: None,
        config: Digest::default(),
        settles: None,
    }
}

/// Fills a ledger with rows of other sessions.
async fn fill_ledger(path: &Path, rows: usize) {
    let store = Arc::new(SqliteStore::open(path).unwrap());
    let mut tasks = Vec::new();
    for task in 0..1_024 {
        let store = Arc::clone(&store);
        tasks.push(tokio::spawn(async move {
            for n in (task..rows).step_by(1_024) {
                let finish = CommitRequest {
                    row: Arc::new(row(n)),
                    version: 0,
                    changes: None,
                    revoked: Vec::new(),
                    provenance: None,
                    logs: Vec::new(),
                    resolution: ClaimResolution::Done,
                    outcome: None,
                    spent: None,
                    outputs: Vec::new(),
                    ended: None,
                    items: Vec::new(),
                    is_durable: false,
                };
                store.commit(Box::new(finish)).await.unwrap().unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
}

/// A hook service that ends when this value is dropped.
struct BenchHookService(Child);

impl Drop for BenchHookService {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn line(name: &str, value: f64, floor: f64, note: &str) -> BenchLine {
    let round = |x: f64| (x * 1_000.0).round() / 1_000.0;
    BenchLine {
        name: name.into(),
        value: round(value),
        unit: "ms".into(),
        floor: round(floor),
        ratio: round(value / floor),
        note: note.into(),
    }
}

fn main() {
    // `cargo test --benches` passes `--test`, and nothing is measured then.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    let directory = HookBenchDir(tempfile::tempdir().unwrap());
    let [plain, served, with_many_rows] =
        ["plain", "served", "aged"].map(|name| directory.write_config(name, CONFIG));
    let with_other_rules = directory.write_config("ruled", &config_with_other_rules(1_000));
    let with_own_rules = directory.write_config("own", &config_with_bash_rules(1_000));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(fill_ledger(&directory.0.path().join("aged.db"), 1_000_000));

    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/hook.py");
    let serve = ["hook", "--serve", "--config", served.to_str().unwrap(), "--socket", "hook.sock"];
    let _service = BenchHookService(
        directory
            .command(env!("CARGO_BIN_EXE_toolgate"), &serve)
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    while !directory.0.path().join("hook.sock").exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut commands = [
        directory.command("/bin/true", &[]),
        directory.warm_hook(&plain),
        directory.command(
            &directory.install_copy(env!("CARGO_BIN_EXE_toolgate-hook")),
            &["--socket", "hook.sock"],
        ),
        directory.command("python3", &[script, plain.to_str().unwrap(), "python.db"]),
        directory.warm_hook(&with_other_rules),
        directory.warm_hook(&with_own_rules),
        directory.warm_hook(&with_many_rows),
    ];
    let durations = measure_commands(&mut commands);
    let [floor, hook, with_service, python, with_other_rules, with_own_rules, with_many_rows] =
        durations[..]
    else {
        return;
    };
    write_lines(vec![
        line("hook_process", hook, floor, "a call decided and claimed durably; floor: `/bin/true`"),
        line("hook_service", with_service, floor, "the same through a service; floor: `/bin/true`"),
        line("hook_vs_python", python, hook, "an equivalent hook in Python; floor: toolgate"),
        line(
            "hook_1000_rules",
            with_other_rules,
            hook,
            "with 1,000 rules for other tools; floor: with one rule",
        ),
        line(
            "hook_1000_own_rules",
            with_own_rules,
            hook,
            "with 1,000 rules for the called tool; floor: with one rule",
        ),
        line(
            "hook_1m_rows",
            with_many_rows,
            hook,
            "with a ledger of 1,000,000 rows; floor: with a new one",
        ),
    ]);
}
