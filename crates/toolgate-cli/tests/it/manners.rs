//! How it behaves towards those around it: terminals, whoever reads along, clients that say anything, a machine that is not in order.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use crate::hook::Project;
use crate::verbs::{CODER, desk, plain, program, tell, told};

#[expect(dead_code, reason = "only its reader is asked")]
#[path = "../../src/command/hook/event.rs"]
mod event;

/// A program that runs until it is dropped.
struct Running(Child);

impl Running {
    fn start(project: &Project, args: &[&str]) -> Self {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.environment(&mut command);
        Self(command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// What the kernel says of it.
    fn status(&self, name: &str) -> Option<String> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap_or_default();
        status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_start_matches(':').trim().to_owned()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// All that a gateway says, with its exit code, when it is told to end as soon as it says that it serves.
fn served(project: &Project, args: &[&str]) -> String {
    let mut gateway = Running::start(project, args);
    let (stdout, stderr) = (gateway.0.stdout.take().unwrap(), gateway.0.stderr.take().unwrap());
    let (tell, told) = std::sync::mpsc::channel();
    let hears = |stream: Box<dyn std::io::Read + Send>, is_error: bool| {
        let tell = tell.clone();
        std::thread::spawn(move || BufReader::new(stream).lines().map_while(Result::ok).for_each(|line| drop(tell.send((is_error, line)))))
    };
    let hearing = [hears(Box::new(stdout), false), hears(Box::new(stderr), true)];
    drop(tell);
    let mut said: Vec<(bool, String)> = Vec::new();
    while let Ok(next) = told.recv_timeout(Duration::from_secs(60)) {
        let ready = next.1.starts_with("toolgate serves");
        said.push(next);
        if ready {
            break;
        }
    }
    let _ = std::process::Command::new("kill").args(["-TERM", &gateway.0.id().to_string()]).output();
    let code = gateway.0.wait().unwrap().code().unwrap_or_else(|| panic!("killed"));
    hearing.into_iter().for_each(|thread| thread.join().unwrap());
    said.extend(told);
    // An upstream is heard whenever it speaks.
    said.sort();
    let said: Vec<String> = said.into_iter().map(|(_, line)| line).collect();
    plain(&format!("$ {} [{code}]\n{}\n", args.join(" "), said.join("\n")))
}

#[test]
fn a_gateway_says_where_it_serves_or_why_not() {
    let project = Project::new();
    insta::assert_snapshot!(told(&project, "serve; serve --config none.toml"), @"
    $ serve [2]
    error: there is no toolgate.toml here, so nothing is in force; make one with `toolgate init`
    $ serve --config none.toml [2]
    error: none.toml: No such file or directory (os error 2)
    ");
    project.write("project/toolgate.toml", "store = \"ledger.db\"\nname = \"desk\"\n[tools.calc]\nkind = \"builtin\"\n");
    let config = ["serve", "--config", "toolgate.toml"];
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let said = [
        served(&project, &[&config[..], &["--listen", "127.0.0.1:0"]].concat()),
        served(&project, &[&config[..], &["--stdio"]].concat()),
        told(
            &project,
            &format!(
                "serve; serve --config toolgate.toml --listen {address}; serve --config toolgate.toml --listen here; \
                 serve --stdio --listen 127.0.0.1:0; serve --config toolgate.toml --agent nobody"
            ),
        ),
    ];
    insta::assert_snapshot!(said.concat(), @"
    $ serve --config toolgate.toml --listen 127.0.0.1:PORT [0]
    toolgate serves at http://127.0.0.1:PORT/mcp
      agent desk: 1 tool
    $ serve --config toolgate.toml --stdio [0]
    toolgate serves on standard streams
    $ serve [2]
    error: HOME/project/toolgate.toml is not accepted as it is now; read it, then run `toolgate trust` in a terminal
    $ serve --config toolgate.toml --listen 127.0.0.1:PORT [2]
    error: 127.0.0.1:PORT: Address already in use (os error 98); listen elsewhere with `--listen`
    $ serve --config toolgate.toml --listen here [2]
    error: invalid value 'here' for '--listen <ADDR>': an address and a port are wanted, like 127.0.0.1:PORT
    For more information, try '--help'.
    $ serve --stdio --listen 127.0.0.1:PORT [2]
    error: the argument '--stdio' cannot be used with '--listen <ADDR>'
    Usage: toolgate serve --stdio
    For more information, try '--help'.
    $ serve --config toolgate.toml --agent nobody [2]
    error: there is no agent `nobody`; there are: desk
    ");
}

#[test]
fn more_is_told_or_nothing_but_what_went_wrong() {
    let project = crate::gateway::project("undeclared = \"read\"\n");
    let serve = ["serve", "--config", "toolgate.toml", "--listen", "127.0.0.1:0"];
    let away = Project::with("store = \"l.db\"\n[upstreams.gone]\ncommand = \"/nowhere/program\"\n");
    let said = served(&away, &[&["-q"][..], &serve].concat());
    assert!(said.contains("an upstream is away"), "what is wrong is told all the same: {said}");
    let said = served(&away, &serve);
    assert!(said.contains("  ✗ gone: away\n") && said.matches("cannot be started").count() == 1, "a reason is given once: {said}");
    let said = [&[][..], &["-q"], &["-v"]].map(|flags| served(&project, &[flags, &serve].concat()));
    insta::assert_snapshot!(said.concat(), @r#"
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
     INFO an upstream is there upstream="in"
     INFO toolgate serves on standard streams upstream="in"
    "#);
    insta::assert_snapshot!(told(&project, "-q serve --config none.toml; -q -v demo"), @"
    $ -q serve --config none.toml [2]
    error: none.toml: No such file or directory (os error 2)
    $ -q -v demo [2]
    error: the argument '--quiet' cannot be used with '--verbose...'
    Usage: toolgate --quiet <COMMAND>
    For more information, try '--help'.
    ");
}

/// The first line on standard error that has these words.
fn heard(running: &mut Running, words: &str) -> String {
    let stderr = BufReader::new(running.0.stderr.take().unwrap());
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
    loop {
        let line = told.recv_timeout(Duration::from_secs(60)).unwrap();
        if line.contains(words) {
            return line;
        }
    }
}

#[test]
fn rows_go_by_themselves_only_where_the_configuration_says_when() {
    let project = desk();
    let keeping = |retention: &str| {
        let config = format!("store = \"ledger.db\"\n{retention}name = \"desk\"\n[tools.calc]\nkind = \"builtin\"\n");
        project.write("project/toolgate.toml", &config);
    };
    let older = |days: i64| {
        let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
        ledger.execute("UPDATE ledger SET at = at - ?1", [days * 86_400_000_000_000]).unwrap();
    };
    let serve = ["serve", "--config", "toolgate.toml", "--listen", "127.0.0.1:0"];
    // The first row is from a time of its own: when it goes, it has been looked for all that may.
    let first = |at: &str| {
        let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
        let at = i64::try_from(at.parse::<toolgate::Timestamp>().unwrap().as_nanosecond()).unwrap();
        ledger.execute("UPDATE ledger SET at = ?1 WHERE seq = (SELECT min(seq) FROM ledger)", [at]).unwrap();
    };
    let rows = || project.run(&["audit", "query", "--json"], "").1.lines().count();
    older(40);
    first("2000-01-01T00:00:00Z");
    keeping("");
    assert!(!served(&project, &serve).contains("are gone"));
    assert_eq!(rows(), 31);
    keeping("retention = \"60d\"\n");
    let line = heard(&mut Running::start(&project, &serve), "are gone");
    assert!(line.starts_with("1 row and 0 sealed records from before "), "{line}");
    assert_eq!(rows(), 30);
    // Of another ledger than the one it names, a configuration says nothing.
    keeping("retention = \"30d\"\n");
    std::fs::copy(project.path("project/toolgate.toml"), project.path("toolgate.toml")).unwrap();
    let elsewhere = ["serve", "--config", "../toolgate.toml", "--listen", "127.0.0.1:0", "--store", "ledger.db"];
    assert!(!served(&project, &elsewhere).contains("are gone"));
    assert_eq!(rows(), 30);
    // A clock that is far ahead of the newest row lets nothing go.
    let written = |from: &str, to: &str| {
        let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
        let (from, to) = (format!("\"at\":\"{from}"), format!("\"at\":\"{to}"));
        ledger.execute("UPDATE ledger SET body = replace(body, ?1, ?2)", [from, to]).unwrap();
    };
    written("20", "19");
    first("1900-01-01T00:00:00Z");
    let line = heard(&mut Running::start(&project, &serve), "are gone");
    assert!(line.starts_with("1 row and 0 sealed records from before 19"), "{line}");
    assert_eq!(rows(), 29);
    written("19", "20");
    let line = heard(&mut Running::start(&project, &serve), "are gone");
    assert!(line.starts_with("29 rows and 0 sealed records from before "), "{line}");
    assert_eq!(project.run(&["audit", "query", "--json"], "").1, "");
    assert_eq!(project.run(&["audit", "verify"], "").0, 0, "what is left holds");
    older(40);
    let hook = ["hook", "--serve", "--config", "toolgate.toml", "--socket", "hook.sock"];
    assert!(heard(&mut Running::start(&project, &hook), "are gone").contains("as `retention` says"));
    let said = told(&project, "doctor --config toolgate.toml");
    assert!(
        said.contains("ledger         HOME/project/ledger.db\n                 rows go after 30 days, while somebody serves\n"),
        "{said}"
    );
}

#[test]
fn what_is_pruned_by_hand_goes_by_the_configuration() {
    let project = desk();
    let pruned = |args: &[&str]| project.run(&[&["audit", "prune", "--dry-run"], args].concat(), "").1;
    let keeping = |store: &str| {
        let config = format!("store = \"{store}\"\nretention = \"36500d\"\n[tools.calc]\nkind = \"builtin\"\n");
        project.write("project/toolgate.toml", &config);
    };
    keeping("ledger.db");
    for args in [Vec::new(), vec!["--store", "ledger.db"]] {
        assert!(pruned(&args).starts_with("0 rows from before 19"), "{}", pruned(&args));
    }
    assert!(pruned(&["--older-than", "1d"]).starts_with("0 rows from before 20"));
    // Of another ledger it says nothing.
    keeping("other.db");
    assert!(pruned(&["--store", "ledger.db"]).starts_with("0 rows from before 20"));
    // What does not load may keep them for longer, and nothing goes by a guess.
    for config in
        ["store = \"ledger.db\"\nretention = \"10 years\"\n", "store = \"ledger.db\"\nretention = \"36500d\"\n", "store = \"ledger.db\n"]
    {
        project.write("project/toolgate.toml", config);
        for args in [&["--dry-run"][..], &[]] {
            let (code, stdout, stderr) = project.run(&[&["audit", "prune", "--store", "ledger.db"], args].concat(), "");
            assert!(
                code == 2 && stdout.is_empty() && stderr.contains("say how old rows may become, with `--older-than`"),
                "{config}: {stderr}"
            );
        }
        assert!(pruned(&["--store", "ledger.db", "--older-than", "1d"]).starts_with("0 rows from before 20"), "{config}");
    }
}

#[test]
fn the_doctor_says_how_old_rows_have_become() {
    let project = desk();
    project.write("project/toolgate.toml", "store = \"ledger.db\"\n[tools.calc]\nkind = \"builtin\"\n");
    assert!(!told(&project, "doctor --config toolgate.toml").contains("the oldest row"));
    let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
    ledger.execute("UPDATE ledger SET body = replace(body, '\"at\":\"20', '\"at\":\"19')", []).unwrap();
    let said = told(&project, "doctor --config toolgate.toml");
    assert!(said.contains("the oldest row is of TIME; rows go by `retention`, or by `toolgate audit prune`\n"), "{said}");
    assert_eq!(project.run(&["audit", "prune", "--older-than", "0s"], "").0, 0);
}

/// What a person at a terminal sees.
fn at_a_terminal(project: &Project, variables: &[(&str, &str)], args: &[&str]) -> String {
    let line = format!("'{}' {}", assert_cmd::cargo::cargo_bin("toolgate").display(), args.join(" "));
    let mut command = std::process::Command::new("script");
    project.environment(&mut command);
    command.env("TERM", "xterm").envs(variables.iter().copied()).args(["-qec", &line, "/dev/null"]).stdin(Stdio::null());
    String::from_utf8(command.output().unwrap().stdout).unwrap()
}

#[test]
fn colours_are_for_terminals_whose_user_wants_them() {
    if std::process::Command::new("script").arg("--version").output().is_err() {
        eprintln!("SKIPPED: `script`, which makes a terminal, is not installed");
        return;
    }
    let project = desk();
    project.write("project/bad.toml", "[tools.look]\nkind = \"clint\"\n");
    for line in ["audit query", "audit verify", "doctor --config bad.toml", "trust bad.toml", "lint --config bad.toml", "dmeo", "--help"] {
        let args: Vec<&str> = line.split(' ').collect();
        assert!(at_a_terminal(&project, &[], &args).contains('\u{1b}'), "{line} has colours");
        for off in [("NO_COLOR", "1"), ("CLICOLOR", "0"), ("TERM", "dumb")] {
            let seen = at_a_terminal(&project, &[off], &args);
            assert!(!seen.is_empty() && !seen.contains('\u{1b}'), "{line} with {off:?}: {seen}");
        }
        let (_, stdout, stderr) = project.run_with(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")], &args, "");
        assert!(!format!("{stdout}{stderr}").contains('\u{1b}'), "{line}");
    }
}

#[test]
fn who_is_waited_for_is_told() {
    if std::process::Command::new("script").arg("--version").output().is_err() {
        eprintln!("SKIPPED: `script`, which makes a terminal, is not installed");
        return;
    }
    let project = Project::with(CODER);
    assert!(at_a_terminal(&project, &[], &["check"]).contains("type calls, one a line"));
    assert!(!project.run(&["check"], "").2.contains("type calls"));
    assert!(at_a_terminal(&project, &[], &["hook"]).contains("waiting for an event of a client"));
    assert!(!project.run(&["hook"], "").2.contains("waiting"));
}

#[test]
fn what_others_wrote_moves_no_cursor_and_begins_no_line() {
    let project = Project::with(CODER);
    let odd = "rm \u{202e}x\u{1b}[2J\r\nls";
    tell(&project, "PreToolUse", odd, &json!({}));
    assert_eq!(project.run(&["pause", "--principal", odd, "--because", odd], "").0, 0);
    for (line, lines) in [("approvals list", 4), ("audit query", 3), ("audit tail", 1), ("pause", 1)] {
        let (_, stdout, _) = project.run(&line.split(' ').collect::<Vec<_>>(), "");
        assert!(!stdout.contains(['\u{202e}', '\u{1b}', '\r']), "{line}: {stdout:?}");
        assert_eq!(stdout.lines().count(), lines, "{line}: {stdout}");
    }
}

#[test]
fn whoever_follows_the_ledger_sees_what_comes() {
    let project = Project::with(CODER);
    tell(&project, "PreToolUse", "rm before", &json!({}));
    let mut tail = Running::start(&project, &["audit", "tail", "-f", "-n", "1", "--decision", "refused"]);
    let (heard, lines) = mpsc::channel();
    let stdout = BufReader::new(tail.0.stdout.take().unwrap());
    std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| heard.send(line)));
    let next = || lines.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(next().contains("rm before"));
    // What does not fit is passed over.
    tell(&project, "PreToolUse", "ls", &json!({}));
    tell(&project, "PostToolUse", "ls", &json!({"tool_response": {}}));
    for command in ["rm after", "rm later"] {
        tell(&project, "PreToolUse", command, &json!({}));
        let line = next();
        assert!(line.contains(command) && line.contains("refused"), "{line}");
    }
    assert!(tail.0.try_wait().unwrap().is_none(), "it goes on");
}

#[test]
fn whoever_follows_the_ledger_goes_with_its_reader() {
    let project = Project::with(CODER);
    tell(&project, "PreToolUse", "rm before", &json!({}));
    for args in [&["audit", "tail", "-f"][..], &["audit", "tail", "-f", "--json"][..]] {
        let mut tail = Running::start(&project, args);
        let (mut stdout, mut line) = (BufReader::new(tail.0.stdout.take().unwrap()), String::new());
        stdout.read_line(&mut line).unwrap();
        assert!(line.contains("rm before"), "{line}");
        assert!(tail.0.try_wait().unwrap().is_none(), "it goes on");
        // Nothing more happens that it could tell of.
        drop(stdout);
        let ended = (0..600).find_map(|_| {
            std::thread::sleep(Duration::from_millis(100));
            tail.0.try_wait().unwrap()
        });
        assert_eq!(ended.and_then(|status| status.code()), Some(0), "{args:?}");
    }
}

#[test]
fn an_export_is_written_as_it_is_read() {
    let project = desk();
    let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
    let copies = "WITH RECURSIVE more(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM more WHERE k < 199)
        INSERT INTO ledger SELECT seq + 31 * k, session, n + 100 * k, randomblob(16), at, tool, decision, gate, code, rule, hash, chain, body FROM ledger, more";
    assert_eq!(ledger.execute(copies, []).unwrap(), 31 * 199);
    let (code, whole, stderr) = project.run(&["audit", "export"], "");
    assert_eq!((code, stderr.as_str(), whole.lines().count()), (0, "", 31 * 200));
    for (n, line) in whole.lines().enumerate() {
        let entry: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert_eq!(entry["seq"], n + 1, "oldest first");
    }
    // However much there is, it takes no more memory: nobody has read on, so all but the first of it is still to come.
    let peak = |more: &[&str]| {
        let mut export = Running::start(&project, &[&["audit", "export"][..], more].concat());
        BufReader::new(export.0.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
        export.status("VmHWM").unwrap().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
    };
    let (few, all) = (peak(&["--tool", "lookup_order"]), peak(&[]));
    assert!(all < few + whole.len() / 2, "{all} after {few} for {}", whole.len());
}

/// What fuzzing has found.
fn corpus() -> Vec<(String, Vec<u8>)> {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/hook");
    let files = std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let mut texts: Vec<_> = files.map(|path| (path.display().to_string(), std::fs::read(&path).unwrap())).collect();
    texts.sort();
    assert!(texts.len() > 20);
    texts
}

#[test]
fn whatever_a_client_says_is_answered_or_refused() {
    let project = Project::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    let odd = [&b"\xff\xfe{}"[..], b"\0\0", b"{\"tool_name\": \"\xff\"}", b"{} {}"].map(|bytes| (format!("{bytes:?}"), bytes.to_vec()));
    let answered = |name: &str, args: &[&str]| {
        for (text, bytes) in corpus().iter().chain(&odd) {
            let (code, stdout, stderr) = program(&project, name, args, bytes);
            match code {
                0 => assert!(serde_json::from_str::<Value>(&stdout).unwrap().is_object(), "{text}: {stdout}"),
                2 => {
                    let reason = stderr.strip_prefix("toolgate: ").unwrap_or_default();
                    assert!(stdout.is_empty() && !reason.trim().is_empty(), "{text}: {stdout}{stderr}");
                }
                _ => panic!("{text}: exit {code}, {stdout}{stderr}"),
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| answered("toolgate-hook", &[]));
        scope.spawn(|| answered("toolgate", &["hook", "--client", "cursor"]));
    });
}

#[test]
fn no_event_breaks_its_reader() {
    for (_, bytes) in corpus() {
        for at in 0..bytes.len() {
            let (before, after) = bytes.split_at(at);
            // Cut off; one byte less; one byte more.
            for text in [before.to_vec(), [before, &after[1..]].concat(), [before, b"\"", after].concat(), [before, b"}", after].concat()] {
                if let Err(reason) = event::Event::read(&String::from_utf8_lossy(&text)) {
                    assert!(!reason.is_empty());
                }
            }
        }
    }
}

#[test]
fn a_user_has_it_in_every_project() {
    let project = Project::new();
    insta::assert_snapshot!(told(&project, "init --user; init --for codex --user --dry-run"), @"
    $ init --user [2]
    error: the following required arguments were not provided:
      --for <CLIENT>
    Usage: toolgate init --for <CLIENT> --user
    For more information, try '--help'.
    $ init --for codex --user --dry-run [0]
    would write HOME/.config/toolgate/toolgate.toml
    would write HOME/.codex/hooks.json
    ");
    assert_eq!(std::fs::read_dir(project.path("")).unwrap().count(), 1, "nothing was written");
    insta::assert_snapshot!(told(&project, "init --for codex --user; init --for codex --user; doctor"), @"
    $ init --for codex --user [0]
    wrote HOME/.config/toolgate/toolgate.toml
    wrote HOME/.codex/hooks.json
    the ledger is HOME/.local/state/toolgate/ledger.db
    Codex runs no hook that was not reviewed: start it and say /hooks
    $ init --for codex --user [0]
    HOME/.config/toolgate/toolgate.toml is there already, and stays as it is
    HOME/.codex/hooks.json stays as it is
    the ledger is HOME/.local/state/toolgate/ledger.db
    Codex runs no hook that was not reviewed: start it and say /hooks
    $ doctor [0]
    ✓ state          TOOLGATE is yours alone
    ✓ configuration  HOME/.config/toolgate/toolgate.toml (3 rules enforced)
    ✓ ledger         HOME/.local/state/toolgate/ledger.db
    ✓ clock          TIME
    ✓ canary         a call that must be refused was refused, in LENGTH
    ✓ hooks          HOME/.codex/hooks.json (codex)
    the gate is on
    ");
    // It says what holds of one's own file, and nothing that holds of a project's.
    let own = project.path(".config/toolgate/toolgate.toml");
    let text = std::fs::read_to_string(&own).unwrap();
    assert!(text.starts_with("# What holds for your agents, wherever they work. Every change is in force at once.\n"), "{text}");
    assert!(text.contains("| toolgate check\n") && !text.contains("toolgate trust"), "{text}");
    let push = json!({"tool_name": "bash", "tool_input": {"command": "git push -f"}});
    let (code, _, stderr) = project.run(&["hook", "--client", "codex"], &push.to_string());
    assert!(code == 2 && stderr.contains("no_force_push"), "{stderr}");
    insta::assert_snapshot!(told(&project, "eject; eject --user; eject --user"), @"
    $ eject [0]
    toolgate is in none of these settings
    $ eject --user [0]
    removed HOME/.codex/hooks.json
    $ eject --user [0]
    toolgate is in none of these settings
    ");
    assert!(project.path(".config/toolgate/toolgate.toml").exists(), "the configuration stays");
}

#[test]
fn the_doctor_sees_a_state_that_is_not_the_users_alone() {
    let project = Project::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    let state = project.path(".local/state/toolgate");
    let allow = |mode: u32| std::fs::set_permissions(&state, std::fs::Permissions::from_mode(mode)).unwrap();
    allow(0o755);
    insta::assert_snapshot!(told(&project, "doctor; doctor --json; trust"), @r#"
    $ doctor [1]
    ✗ state          the state directory HOME/.local/state/toolgate: others may look into it (mode 755); run `chmod 700` on it
    the gate is not what it should be
    $ doctor --json [1]
    {"findings":[{"check":"state","says":"the state directory HOME/.local/state/toolgate: others may look into it (mode 755); run `chmod 700` on it","state":"ill"}],"ok":false}
    $ trust [2]
    error: the state directory HOME/.local/state/toolgate: others may look into it (mode 755); run `chmod 700` on it
    "#);
    allow(0o700);
    assert_eq!(project.run(&["doctor"], "").0, 0);
    // Only root can give something away.
    if std::os::unix::fs::chown(&state, Some(65_534), None).is_ok() {
        assert!(told(&project, "doctor").contains("✗ state          the state directory HOME/.local/state/toolgate: it belongs"));
    }
    std::fs::rename(&state, project.path("moved")).unwrap();
    project.write(".local/state/toolgate", "a file");
    assert!(told(&project, "doctor").contains("✗ state          the state directory HOME/.local/state/toolgate: it is no directory"));
}

#[test]
fn the_doctor_sees_a_clock_that_went_backwards() {
    let project = Project::new();
    assert_eq!(project.run(&["init", "--for", "claude-code"], "").0, 0);
    tell(&project, "PreToolUse", "git push -f", &json!({}));
    let ledger = rusqlite::Connection::open(project.path(".local/state/toolgate/ledger.db")).unwrap();
    let later = "UPDATE ledger SET body = replace(body, '\"at\":\"20', '\"at\":\"30')";
    assert_eq!(ledger.execute(later, []).unwrap(), 1);
    let said = told(&project, "doctor");
    let clock = said.lines().find(|line| line.contains(" clock ")).unwrap();
    insta::assert_snapshot!(clock, @"✗ clock          it is MOMENT, and the ledger has a row of MOMENT: the clock went backwards");
    assert!(said.starts_with("$ doctor [1]\n"), "{said}");
}

#[test]
fn every_verb_has_a_page_and_is_completed_in_every_shell() {
    let project = Project::new();
    insta::assert_snapshot!(told(&project, "man pages; man; completions nosh; schema x"), @"
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
    let mut pages: Vec<String> = pages.map(|page| page.unwrap().file_name().into_string().unwrap().replace(".1", "")).collect();
    pages.sort();
    insta::assert_snapshot!(pages.join(" "), @"toolgate toolgate-approvals toolgate-approvals-approve toolgate-approvals-deny toolgate-approvals-list toolgate-audit toolgate-audit-export toolgate-audit-key toolgate-audit-prune toolgate-audit-query toolgate-audit-receipt toolgate-audit-settle toolgate-audit-show toolgate-audit-stats toolgate-audit-tail toolgate-audit-verify toolgate-backtest toolgate-check toolgate-completions toolgate-demo toolgate-doctor toolgate-eject toolgate-explain toolgate-hook toolgate-init toolgate-lint toolgate-man toolgate-pause toolgate-replay toolgate-resume toolgate-schema toolgate-serve toolgate-token toolgate-trust toolgate-upstream toolgate-upstream-accept toolgate-upstream-diff toolgate-upstream-list");
    assert!(project.read("project/pages/toolgate-token.1").contains("Make a token for a client of the gateway"));
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let (code, script, _) = project.run(&["completions", shell], "");
        assert_eq!(code, 0, "{shell}");
        for verb in pages.iter().flat_map(|page| page.split('-')) {
            assert!(script.contains(verb), "{shell}: {verb}");
        }
        project.write(&format!("project/{shell}"), &script);
    }
    let read = std::process::Command::new("bash").arg("-n").arg(project.path("project/bash")).status().unwrap();
    assert!(read.success(), "bash cannot read its completions");
}

#[test]
fn the_schema_is_the_one_that_is_shipped() {
    let (code, stdout, stderr) = Project::new().run(&["schema"], "");
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(stdout == include_str!("../../../../schema/toolgate.schema.json"), "write it to schema/toolgate.schema.json");
}

#[test]
fn the_small_programs_help_and_refuse() {
    let project = Project::new();
    let mut told = String::new();
    for name in ["toolgate-hook", "toolgate-ask"] {
        for args in [&["--help"][..], &["--nonsense", "x"], &["--socket", "none.sock"]] {
            let (code, stdout, stderr) = program(&project, name, args, b"{\"tool_name\": \"bash\"}");
            told.push_str(&format!("$ {name} {} [{code}]\n{stdout}{stderr}", args.join(" ")));
        }
    }
    insta::assert_snapshot!(told, @"
    $ toolgate-hook --help [0]
    Answer one hook event of a coding agent, as `toolgate hook` does, but sooner.

    Usage: toolgate-hook [--config <FILE>] [--client <CLIENT>] [--agent <AGENT>]
                         [--store <PATH>] [--socket <PATH>]

    The event is read from standard input. Exit code: 0 with a JSON answer, or 2:
    refused. See `toolgate hook --help`.
    $ toolgate-hook --nonsense x [2]
    toolgate: the command line cannot be understood, so the call is refused; see `toolgate-hook --help`
    $ toolgate-hook --socket none.sock [2]
    toolgate: the service at none.sock does not answer: No such file or directory (os error 2); start it with `toolgate hook --serve --config FILE --socket PATH`
    $ toolgate-ask --help [0]
    Ask the service that `toolgate hook --serve` is.

    Usage: toolgate-ask --socket <PATH> [--client <CLIENT>] [--agent <AGENT>]

    The event is read from standard input, as by `toolgate hook`. Exit code: 0 with
    a JSON answer, or 2: refused.
    $ toolgate-ask --nonsense x [2]
    toolgate: there is no `--nonsense`; see `toolgate-ask --help`
    $ toolgate-ask --socket none.sock [2]
    toolgate: the service at none.sock does not answer: No such file or directory (os error 2); start it with `toolgate hook --serve --config FILE --socket PATH`
    ");
}
