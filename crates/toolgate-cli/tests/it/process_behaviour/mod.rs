//! Tests startup output, verbosity, invalid input, `init --user`, `doctor`, and man pages.

mod retention;
mod terminal_output;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Stdio};
use std::time::Duration;

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use crate::hook::TestProject;
use crate::output_snapshots::{mask_variable_parts, run_program, send_hook_event, transcript};

/// A toolgate process that ends when this value is dropped.
struct ToolgateProcess(Child);

impl ToolgateProcess {
    fn start(project: &TestProject, args: &[&str]) -> Self {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.set_environment(&mut command);
        Self(
            command
                .args(args)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        )
    }

    /// Returns a field of `/proc/PID/status`.
    fn proc_status(&self, name: &str) -> Option<String> {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap_or_default();
        status.lines().find_map(|line| {
            Some(line.strip_prefix(name)?.trim_start_matches(':').trim().to_owned())
        })
    }
}

impl Drop for ToolgateProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the output and exit code of a gateway that is stopped when it serves.
fn serve_output(project: &TestProject, args: &[&str]) -> String {
    let mut gateway = ToolgateProcess::start(project, args);
    let (stdout, stderr) = (gateway.0.stdout.take().unwrap(), gateway.0.stderr.take().unwrap());
    let (sender, receiver) = std::sync::mpsc::channel();
    let forward_lines = |stream: Box<dyn std::io::Read + Send>, is_error: bool| {
        let sender = sender.clone();
        std::thread::spawn(move || {
            BufReader::new(stream)
                .lines()
                .map_while(Result::ok)
                .for_each(|line| drop(sender.send((is_error, line))))
        })
    };
    let threads = [forward_lines(Box::new(stdout), false), forward_lines(Box::new(stderr), true)];
    drop(sender);
    let mut lines: Vec<(bool, String)> = Vec::new();
    while let Ok(next) = receiver.recv_timeout(Duration::from_secs(60)) {
        let ready = next.1.starts_with("toolgate serves");
        lines.push(next);
        if ready {
            break;
        }
    }
    let _ =
        std::process::Command::new("kill").args(["-TERM", &gateway.0.id().to_string()]).output();
    let code = gateway.0.wait().unwrap().code().unwrap_or_else(|| panic!("killed"));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    lines.extend(receiver);
    // Lines of upstreams can arrive at any time.
    lines.sort();
    let lines: Vec<String> = lines.into_iter().map(|(_, line)| line).collect();
    mask_variable_parts(&format!("$ {} [{code}]\n{}\n", args.join(" "), lines.join("\n")))
}

#[test]
fn serve_prints_address_or_error() {
    let project = TestProject::new();
    insta::assert_snapshot!(transcript(&project, "serve; serve --config none.toml"), @"
    $ serve [2]
    error: no toolgate.toml here, so no configuration is in force; create one with `toolgate init`
    $ serve --config none.toml [2]
    error: none.toml: No such file or directory (os error 2)
    ");
    project.write(
        "project/toolgate.toml",
        "store = \"ledger.db\"\nname = \"desk\"\n[tools.calc]\nkind = \"builtin\"\n",
    );
    let config = ["serve", "--config", "toolgate.toml"];
    let occupied = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = occupied.local_addr().unwrap();
    let outputs = [
        serve_output(&project, &[&config[..], &["--listen", "127.0.0.1:0"]].concat()),
        serve_output(&project, &[&config[..], &["--stdio"]].concat()),
        transcript(
            &project,
            &format!(
                "serve; serve --config toolgate.toml --listen {address}; serve --config toolgate.toml --listen here; \
                 serve --stdio --listen 127.0.0.1:0; serve --config toolgate.toml --agent absent"
            ),
        ),
    ];
    insta::assert_snapshot!(outputs.concat(), @"
    $ serve --config toolgate.toml --listen 127.0.0.1:PORT [0]
    toolgate serves at http://127.0.0.1:PORT/mcp
      agent desk: 1 tool
    $ serve --config toolgate.toml --stdio [0]
    toolgate serves on standard input and output
    $ serve [2]
    error: HOME/project/toolgate.toml is not trusted in its current form; read it, then run `toolgate trust` in a terminal
    $ serve --config toolgate.toml --listen 127.0.0.1:PORT [2]
    error: cannot listen on 127.0.0.1:PORT: Address already in use (os error 98); choose another address with `--listen`
    $ serve --config toolgate.toml --listen here [2]
    error: invalid value 'here' for '--listen <ADDR>': expected an address and a port, like 127.0.0.1:PORT
    For more information, try '--help'.
    $ serve --stdio --listen 127.0.0.1:PORT [2]
    error: the argument '--stdio' cannot be used with '--listen <ADDR>'
    Usage: toolgate serve --stdio
    For more information, try '--help'.
    $ serve --config toolgate.toml --agent absent [2]
    error: unknown agent `absent`; the only one is `desk`
    ");
}

#[test]
fn verbosity_flags_control_serve_output() {
    let project = crate::gateway::project_with_inner_upstream("undeclared = \"read\"\n");
    let serve = ["serve", "--config", "toolgate.toml", "--listen", "127.0.0.1:0"];
    let unreachable = TestProject::with_config(
        "store = \"l.db\"\n[upstreams.gone]\ncommand = \"/nowhere/program\"\n",
    );
    let output = serve_output(&unreachable, &[&["-q"][..], &serve].concat());
    assert!(output.contains("upstream is down"), "`-q` hides an error: {output}");
    let output = serve_output(&unreachable, &serve);
    assert!(
        output.contains("  ✗ gone: unavailable\n")
            && output.matches("cannot be started").count() == 1,
        "the reason must be printed once: {output}"
    );
    let output =
        [&[][..], &["-q"], &["-v"]].map(|flags| serve_output(&project, &[flags, &serve].concat()));
    insta::assert_snapshot!(output.concat(), @r#"
    $ serve --config toolgate.toml --listen 127.0.0.1:PORT [0]
    toolgate serves at http://127.0.0.1:PORT/mcp
      agent default: 2 tools
      ✓ in: 2 tools
    $ -q serve --config toolgate.toml --listen 127.0.0.1:PORT [0]
    toolgate serves at http://127.0.0.1:PORT/mcp
    $ -v serve --config toolgate.toml --listen 127.0.0.1:PORT [0]
    toolgate serves at http://127.0.0.1:PORT/mcp
      agent default: 2 tools
      ✓ in: 2 tools
     INFO toolgate serves on standard input and output upstream="in"
     INFO upstream is up upstream="in"
    "#);
    insta::assert_snapshot!(transcript(&project, "-q serve --config none.toml; -q -v demo"), @"
    $ -q serve --config none.toml [2]
    error: none.toml: No such file or directory (os error 2)
    $ -q -v demo [2]
    error: the argument '--quiet' cannot be used with '--verbose...'
    Usage: toolgate --quiet <COMMAND>
    For more information, try '--help'.
    ");
}

/// Returns the inputs that the fuzzer found.
fn hook_fuzz_corpus() -> Vec<(String, Vec<u8>)> {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/hook");
    let files = std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let mut texts: Vec<_> =
        files.map(|path| (path.display().to_string(), std::fs::read(&path).unwrap())).collect();
    texts.sort();
    assert!(texts.len() > 20);
    texts
}

#[test]
fn any_hook_input_is_answered_or_refused() {
    let project = TestProject::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    let invalid = [&b"\xff\xfe{}"[..], b"\0\0", b"{\"tool_name\": \"\xff\"}", b"{} {}"]
        .map(|bytes| (format!("{bytes:?}"), bytes.to_vec()));
    let assert_answered = |name: &str, args: &[&str]| {
        for (text, bytes) in hook_fuzz_corpus().iter().chain(&invalid) {
            let (code, stdout, stderr) = run_program(&project, name, args, bytes);
            match code {
                0 => assert!(
                    serde_json::from_str::<Value>(&stdout).unwrap().is_object(),
                    "{text}: {stdout}"
                ),
                2 => {
                    let reason = stderr.strip_prefix("toolgate: ").unwrap_or_default();
                    assert!(
                        stdout.is_empty() && !reason.trim().is_empty(),
                        "{text}: {stdout}{stderr}"
                    );
                }
                _ => panic!("{text}: exit {code}, {stdout}{stderr}"),
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| assert_answered("toolgate-hook", &[]));
        scope.spawn(|| assert_answered("toolgate", &["hook", "--client", "cursor"]));
    });
}

#[test]
fn mutated_event_does_not_panic_parser() {
    for (_, bytes) in hook_fuzz_corpus() {
        for at in 0..bytes.len() {
            let (before, after) = bytes.split_at(at);
            // Cut off; one byte removed; one byte added.
            for text in [
                before.to_vec(),
                [before, &after[1..]].concat(),
                [before, b"\"", after].concat(),
                [before, b"}", after].concat(),
            ] {
                if let Err(reason) = toolgate_hook::event::HookEvent::parse(&text) {
                    assert!(!reason.is_empty());
                }
            }
        }
    }
}

#[test]
fn init_user_installs_hooks_for_all_projects() {
    let project = TestProject::new();
    insta::assert_snapshot!(transcript(&project, "init --user; init --for codex --user --dry-run"), @"
    $ init --user [2]
    error: the following required arguments were not provided:
      --for <CLIENT>
    Usage: toolgate init --for <CLIENT> --user
    For more information, try '--help'.
    $ init --for codex --user --dry-run [0]
    would write HOME/.config/toolgate/toolgate.toml
    would write HOME/.codex/hooks.json
    ");
    assert_eq!(std::fs::read_dir(project.path("")).unwrap().count(), 1, "a file was written");
    insta::assert_snapshot!(transcript(&project, "init --for codex --user; init --for codex --user; doctor"), @"
    $ init --for codex --user [0]
    wrote HOME/.config/toolgate/toolgate.toml
    wrote HOME/.codex/hooks.json
    ledger: HOME/.local/state/toolgate/ledger.db
    Codex runs only reviewed hooks: start it and enter /hooks
    $ init --for codex --user [0]
    HOME/.config/toolgate/toolgate.toml exists and is unchanged
    HOME/.codex/hooks.json is unchanged
    ledger: HOME/.local/state/toolgate/ledger.db
    Codex runs only reviewed hooks: start it and enter /hooks
    $ doctor [0]
    ✓ state          TOOLGATE is private
    ✓ configuration  HOME/.config/toolgate/toolgate.toml (3 rules enforced)
    ✓ ledger         HOME/.local/state/toolgate/ledger.db
    ✓ clock          TIME
    ✓ canary         a call that must be refused was refused, in LENGTH
    ✓ hooks          HOME/.codex/hooks.json (codex)
    the gate is on
    ");
    // The user file has the header for user files, which does not mention `toolgate trust`.
    let user_config = project.path(".config/toolgate/toolgate.toml");
    let text = std::fs::read_to_string(&user_config).unwrap();
    assert!(
        text.starts_with(
            "# Configuration for your agents in all projects. Every change is in force at once.\n"
        ),
        "{text}"
    );
    assert!(text.contains("| toolgate check\n") && !text.contains("toolgate trust"), "{text}");
    let push = json!({"tool_name": "bash", "tool_input": {"command": "git push -f"}});
    let (code, _, stderr) = project.run(&["hook", "--client", "codex"], &push.to_string());
    assert!(code == 2 && stderr.contains("no_force_push"), "{stderr}");
    insta::assert_snapshot!(transcript(&project, "eject; eject --user; eject --user"), @"
    $ eject [0]
    no settings with toolgate found
    $ eject --user [0]
    removed HOME/.codex/hooks.json
    $ eject --user [0]
    no settings with toolgate found
    ");
    assert!(
        project.path(".config/toolgate/toolgate.toml").exists(),
        "the configuration was removed"
    );
}

#[test]
fn doctor_reports_shared_state_directory() {
    let project = TestProject::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    let state = project.path(".local/state/toolgate");
    let allow = |mode: u32| {
        std::fs::set_permissions(&state, std::fs::Permissions::from_mode(mode)).unwrap()
    };
    allow(0o755);
    insta::assert_snapshot!(transcript(&project, "doctor; doctor --json; trust"), @r#"
    $ doctor [1]
    ✗ state          the state directory HOME/.local/state/toolgate: accessible to other users (mode 755); run `chmod 700` on it
    the gate has problems
    $ doctor --json [1]
    {"findings":[{"check":"state","says":"the state directory HOME/.local/state/toolgate: accessible to other users (mode 755); run `chmod 700` on it","state":"ill"}],"ok":false}
    $ trust [2]
    error: the state directory HOME/.local/state/toolgate: accessible to other users (mode 755); run `chmod 700` on it
    "#);
    allow(0o700);
    assert_eq!(project.run(&["doctor"], "").0, 0);
    // Only root can change the owner.
    if std::os::unix::fs::chown(&state, Some(65_534), None).is_ok() {
        assert!(
            transcript(&project, "doctor").contains(
                "✗ state          the state directory HOME/.local/state/toolgate: owned by"
            )
        );
    }
    std::fs::rename(&state, project.path("moved")).unwrap();
    project.write(".local/state/toolgate", "a file");
    assert!(transcript(&project, "doctor").contains(
        "✗ state          the state directory HOME/.local/state/toolgate: not a directory"
    ));
}

#[test]
fn doctor_reports_clock_set_back() {
    let project = TestProject::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    send_hook_event(&project, "PreToolUse", "git push -f", &json!({}));
    let ledger =
        rusqlite::Connection::open(project.path(".local/state/toolgate/ledger.db")).unwrap();
    let move_to_future = "UPDATE ledger SET body = replace(body, '\"at\":\"20', '\"at\":\"30')";
    assert_eq!(ledger.execute(move_to_future, []).unwrap(), 1);
    let output = transcript(&project, "doctor");
    let clock = output.lines().find(|line| line.contains(" clock ")).unwrap();
    insta::assert_snapshot!(clock, @"✗ clock          the clock went backwards: it is MOMENT, but the ledger has a row of MOMENT");
    assert!(output.starts_with("$ doctor [1]\n"), "{output}");
}

#[test]
fn every_verb_has_man_page_and_completion() {
    let project = TestProject::new();
    insta::assert_snapshot!(transcript(&project, "man pages; man; completions nosh; schema x"), @"
    $ man pages [0]
    $ man [2]
    error: the following required arguments were not provided:
      <DIRECTORY>
    Usage: toolgate man <DIRECTORY>
    For more information, try '--help'.
    $ completions nosh [2]
    error: invalid value 'nosh' for '<SHELL>'
      [possible values: bash, elvish, fish, powershell, zsh]
      tip: a similar value exists: 'zsh'
    For more information, try '--help'.
    $ schema x [2]
    error: unexpected argument 'x' found
    Usage: toolgate schema [OPTIONS]
    For more information, try '--help'.
    ");
    let pages = std::fs::read_dir(project.path("project/pages")).unwrap();
    let mut pages: Vec<String> = pages
        .map(|page| page.unwrap().file_name().into_string().unwrap().replace(".1", ""))
        .collect();
    pages.sort();
    insta::assert_snapshot!(pages.join(" "), @"toolgate toolgate-approvals toolgate-approvals-approve toolgate-approvals-deny toolgate-approvals-list toolgate-audit toolgate-audit-export toolgate-audit-key toolgate-audit-prune toolgate-audit-query toolgate-audit-receipt toolgate-audit-settle toolgate-audit-show toolgate-audit-stats toolgate-audit-tail toolgate-audit-verify toolgate-backtest toolgate-check toolgate-completions toolgate-demo toolgate-doctor toolgate-eject toolgate-explain toolgate-hook toolgate-init toolgate-lint toolgate-man toolgate-pause toolgate-replay toolgate-resume toolgate-schema toolgate-serve toolgate-token toolgate-trust toolgate-upstream toolgate-upstream-accept toolgate-upstream-diff toolgate-upstream-list");
    assert!(
        project
            .read("project/pages/toolgate-token.1")
            .contains("Create a token for a client of the gateway")
    );
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let (code, script, _) = project.run(&["completions", shell], "");
        assert_eq!(code, 0, "{shell}");
        for verb in pages.iter().flat_map(|page| page.split('-')) {
            assert!(script.contains(verb), "{shell}: {verb}");
        }
        project.write(&format!("project/{shell}"), &script);
    }
    let status = std::process::Command::new("bash")
        .arg("-n")
        .arg(project.path("project/bash"))
        .status()
        .unwrap();
    assert!(status.success(), "bash cannot read its completions");
}

#[test]
fn printed_schema_equals_shipped_schema() {
    let (code, stdout, stderr) = TestProject::new().run(&["schema"], "");
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(
        stdout == include_str!("../../../../../schema/toolgate.schema.json"),
        "write it to schema/toolgate.schema.json"
    );
}

#[test]
fn hook_binary_prints_help_and_rejects_arguments() {
    let project = TestProject::new();
    let run =
        |args: &[&str]| run_program(&project, "toolgate-hook", args, b"{\"tool_name\": \"bash\"}");
    let (code, stdout, _) = run(&["--help"]);
    assert!(code == 0 && stdout.contains("Usage: toolgate-hook"), "{stdout}");
    let (code, stdout, stderr) = run(&["--nonsense", "x"]);
    assert!(code == 2 && stdout.is_empty() && stderr.contains("--nonsense"), "{stderr}");
    let (code, stdout, stderr) = run(&["--serve", "--config", "c.toml", "--socket", "none.sock"]);
    assert!(code == 2 && stdout.is_empty() && stderr.contains("toolgate hook --serve"), "{stderr}");
    let (code, _, stderr) = run(&["--socket", "none.sock"]);
    assert!(code == 2 && stderr.contains("none.sock does not answer"), "{stderr}");
}
