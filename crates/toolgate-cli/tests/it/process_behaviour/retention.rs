//! Tests retention, pruning, `audit tail`, and the memory use of exports.

use std::io::{BufRead, BufReader};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::{Value, json};

use super::{ToolgateProcess, serve_output};
use crate::hook::TestProject;
use crate::output_snapshots::{CODER_CONFIG, demo_project, send_hook_event, transcript};

/// Returns the first line on standard error that contains these words.
fn wait_for_stderr_line(process: &mut ToolgateProcess, words: &str) -> String {
    let stderr = BufReader::new(process.0.stderr.take().unwrap());
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    loop {
        let line = receiver.recv_timeout(Duration::from_secs(60)).unwrap();
        if line.contains(words) {
            return line;
        }
    }
}

#[test]
fn serve_prunes_rows_only_with_retention() {
    let project = demo_project();
    let write_config = |retention: &str| {
        let config = format!(
            "store = \"ledger.db\"\n{retention}name = \"desk\"\n[tools.calc]\nkind = \"builtin\"\n"
        );
        project.write("project/toolgate.toml", &config);
    };
    let age_rows = |days: i64| {
        let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
        ledger.execute("UPDATE ledger SET at = at - ?1", [days * 86_400_000_000_000]).unwrap();
    };
    let serve = ["serve", "--config", "toolgate.toml", "--listen", "127.0.0.1:0"];
    // The first row gets an early time. When it is removed, pruning has checked all rows.
    let set_first_time = |at: &str| {
        let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
        let at = i64::try_from(at.parse::<toolgate::Timestamp>().unwrap().as_nanosecond()).unwrap();
        ledger
            .execute("UPDATE ledger SET at = ?1 WHERE seq = (SELECT min(seq) FROM ledger)", [at])
            .unwrap();
    };
    let rows = || project.run(&["audit", "query", "--json"], "").1.lines().count();
    age_rows(40);
    set_first_time("2000-01-01T00:00:00Z");
    write_config("");
    assert!(!serve_output(&project, &serve).contains("(`retention`)"));
    assert_eq!(rows(), 31);
    write_config("retention = \"60d\"\n");
    let line = wait_for_stderr_line(&mut ToolgateProcess::start(&project, &serve), "(`retention`)");
    assert!(line.starts_with("removed 1 row and 0 sealed records from before "), "{line}");
    assert_eq!(rows(), 30);
    // The retention of a configuration applies only to the ledger that the configuration names.
    write_config("retention = \"30d\"\n");
    std::fs::copy(project.path("project/toolgate.toml"), project.path("toolgate.toml")).unwrap();
    let other_store = [
        "serve",
        "--config",
        "../toolgate.toml",
        "--listen",
        "127.0.0.1:0",
        "--store",
        "ledger.db",
    ];
    assert!(!serve_output(&project, &other_store).contains("(`retention`)"));
    assert_eq!(rows(), 30);
    // If the clock is far ahead of the newest row, recent rows stay.
    let replace_times = |from: &str, to: &str| {
        let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
        let (from, to) = (format!("\"at\":\"{from}"), format!("\"at\":\"{to}"));
        ledger.execute("UPDATE ledger SET body = replace(body, ?1, ?2)", [from, to]).unwrap();
    };
    replace_times("20", "19");
    set_first_time("1900-01-01T00:00:00Z");
    let line = wait_for_stderr_line(&mut ToolgateProcess::start(&project, &serve), "(`retention`)");
    assert!(line.starts_with("removed 1 row and 0 sealed records from before 19"), "{line}");
    assert_eq!(rows(), 29);
    replace_times("19", "20");
    let line = wait_for_stderr_line(&mut ToolgateProcess::start(&project, &serve), "(`retention`)");
    assert!(line.starts_with("removed 29 rows and 0 sealed records from before "), "{line}");
    assert_eq!(project.run(&["audit", "query", "--json"], "").1, "");
    assert_eq!(project.run(&["audit", "verify"], "").0, 0, "the remaining rows are not intact");
    age_rows(40);
    let hook = ["hook", "--serve", "--config", "toolgate.toml", "--socket", "hook.sock"];
    assert!(
        wait_for_stderr_line(&mut ToolgateProcess::start(&project, &hook), "(`retention`)")
            .starts_with("removed ")
    );
    let output = transcript(&project, "doctor --config toolgate.toml");
    assert!(
        output.contains("ledger         HOME/project/ledger.db\n                 `toolgate serve` removes rows after 30 days\n"),
        "{output}"
    );
}

#[test]
fn prune_defaults_to_retention_of_config() {
    let project = demo_project();
    let prune =
        |args: &[&str]| project.run(&[&["audit", "prune", "--dry-run"], args].concat(), "").1;
    let write_config = |store: &str| {
        let config = format!(
            "store = \"{store}\"\nretention = \"36500d\"\n[tools.calc]\nkind = \"builtin\"\n"
        );
        project.write("project/toolgate.toml", &config);
    };
    write_config("ledger.db");
    for args in [Vec::new(), vec!["--store", "ledger.db"]] {
        assert!(prune(&args).starts_with("0 rows from before 19"), "{}", prune(&args));
    }
    assert!(prune(&["--older-than", "1d"]).starts_with("0 rows from before 20"));
    // The retention of a configuration does not apply to another ledger.
    write_config("other.db");
    assert!(prune(&["--store", "ledger.db"]).starts_with("0 rows from before 20"));
    // An invalid configuration may have a longer retention. So pruning needs an explicit age.
    for config in [
        "store = \"ledger.db\"\nretention = \"10 years\"\n",
        "store = \"ledger.db\"\nretention = \"36500d\"\n",
        "store = \"ledger.db\n",
    ] {
        project.write("project/toolgate.toml", config);
        for args in [&["--dry-run"][..], &[]] {
            let (code, stdout, stderr) =
                project.run(&[&["audit", "prune", "--store", "ledger.db"], args].concat(), "");
            assert!(
                code == 2
                    && stdout.is_empty()
                    && stderr.contains("set the maximum age of rows with `--older-than`"),
                "{config}: {stderr}"
            );
        }
        assert!(
            prune(&["--store", "ledger.db", "--older-than", "1d"])
                .starts_with("0 rows from before 20"),
            "{config}"
        );
    }
}

#[test]
fn doctor_reports_age_of_oldest_row() {
    let project = demo_project();
    project.write(
        "project/toolgate.toml",
        "store = \"ledger.db\"\n[tools.calc]\nkind = \"builtin\"\n",
    );
    assert!(!transcript(&project, "doctor --config toolgate.toml").contains("the oldest row"));
    let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
    ledger
        .execute("UPDATE ledger SET body = replace(body, '\"at\":\"20', '\"at\":\"19')", [])
        .unwrap();
    let output = transcript(&project, "doctor --config toolgate.toml");
    assert!(
        output
            .contains("the oldest row is from TIME; set `retention` or run `toolgate audit prune`"),
        "{output}"
    );
    assert_eq!(project.run(&["audit", "prune", "--older-than", "0s"], "").0, 0);
}

#[test]
fn audit_tail_prints_new_rows() {
    let project = TestProject::with_config(CODER_CONFIG);
    send_hook_event(&project, "PreToolUse", "rm before", &json!({}));
    let mut tail = ToolgateProcess::start(
        &project,
        &["audit", "tail", "-f", "-n", "1", "--decision", "refused"],
    );
    let (sender, receiver) = mpsc::channel();
    let stdout = BufReader::new(tail.0.stdout.take().unwrap());
    std::thread::spawn(move || {
        stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    let next = || receiver.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(next().contains("rm before"));
    // Rows that do not match the filter are skipped.
    send_hook_event(&project, "PreToolUse", "ls", &json!({}));
    send_hook_event(&project, "PostToolUse", "ls", &json!({"tool_response": {}}));
    for command in ["rm after", "rm later"] {
        send_hook_event(&project, "PreToolUse", command, &json!({}));
        let line = next();
        assert!(line.contains(command) && line.contains("refused"), "{line}");
    }
    assert!(tail.0.try_wait().unwrap().is_none(), "`audit tail` exited");
}

#[test]
fn audit_tail_exits_with_its_reader() {
    let project = TestProject::with_config(CODER_CONFIG);
    send_hook_event(&project, "PreToolUse", "rm before", &json!({}));
    for args in [&["audit", "tail", "-f"][..], &["audit", "tail", "-f", "--json"][..]] {
        let mut tail = ToolgateProcess::start(&project, args);
        let (mut stdout, mut line) = (BufReader::new(tail.0.stdout.take().unwrap()), String::new());
        stdout.read_line(&mut line).unwrap();
        assert!(line.contains("rm before"), "{line}");
        assert!(tail.0.try_wait().unwrap().is_none(), "`audit tail` exited");
        // No more rows follow, so only the closed pipe can end the program.
        drop(stdout);
        let exit = (0..600).find_map(|_| {
            std::thread::sleep(Duration::from_millis(100));
            tail.0.try_wait().unwrap()
        });
        assert_eq!(exit.and_then(|status| status.code()), Some(0), "{args:?}");
    }
}

#[test]
fn export_streams_rows_with_bounded_memory() {
    let project = demo_project();
    let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
    let copies = "WITH RECURSIVE more(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM more WHERE k < 199)
        INSERT INTO ledger SELECT seq + 31 * k, session, n + 100 * k, randomblob(16), at, tool, decision, gate, code, rule, hash, chain, body FROM ledger, more";
    assert_eq!(ledger.execute(copies, []).unwrap(), 31 * 199);
    let (code, exported, stderr) = project.run(&["audit", "export"], "");
    assert_eq!((code, stderr.as_str(), exported.lines().count()), (0, "", 31 * 200));
    for (n, line) in exported.lines().enumerate() {
        let entry: Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert_eq!(entry["seq"], n + 1, "oldest first");
    }
    // The reader stops after the first line, so almost all rows are unread. The memory must not
    // grow with their number.
    let peak = |extra_args: &[&str]| {
        let mut export =
            ToolgateProcess::start(&project, &[&["audit", "export"][..], extra_args].concat());
        BufReader::new(export.0.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
        export.proc_status("VmHWM").unwrap().trim_end_matches(" kB").parse::<usize>().unwrap()
            * 1024
    };
    let (few, all) = (peak(&["--tool", "lookup_order"]), peak(&[]));
    assert!(all < few + exported.len() / 2, "{all} after {few} for {}", exported.len());
}
