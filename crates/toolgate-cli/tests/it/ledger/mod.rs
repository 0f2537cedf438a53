//! Tests the `audit` verbs on a durable ledger.

mod closed_stdout;
mod pending_calls;
mod replay_and_backtest;

use std::cell::Cell;
use std::path::{Path, PathBuf};

use regex::Regex;
use serde_json::{Value, json};

use crate::replay_check::assert_replay_unchanged;
use crate::run_toolgate;

/// The ledger of `toolgate demo` in a temporary directory.
struct DemoLedger {
    directory: tempfile::TempDir,
    is_tampered: Cell<bool>,
}

/// Replays all sessions at the end of a test.
impl Drop for DemoLedger {
    fn drop(&mut self) {
        self.check_replay();
    }
}

impl DemoLedger {
    fn new() -> Self {
        let demo = Self { directory: tempfile::tempdir().unwrap(), is_tampered: Cell::new(false) };
        let (code, stdout, stderr) = demo.run(&["demo"]);
        assert_eq!((code, stderr.as_str()), (0, ""));
        assert!(stdout.contains("The ledger is in"), "{stdout}");
        demo
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("ledger.db")
    }

    fn run(&self, args: &[&str]) -> (i32, String, String) {
        let path = self.path();
        let store = ["--store", path.to_str().unwrap()];
        run_toolgate(&[args, &store].concat())
    }

    /// Returns the exit code and output of a verb with masked ids, times and digests.
    fn masked_output(&self, args: &[&str]) -> String {
        let (code, stdout, stderr) = self.run(args);
        let text = format!("exit {code}\n{stdout}{stderr}")
            .replace(self.directory.path().to_str().unwrap(), "DIR");
        let mask = |pattern: &str, to: &str, text: &str| {
            Regex::new(pattern).unwrap().replace_all(text, to).into_owned()
        };
        let text =
            mask("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "CALL", &text);
        let text = mask("[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}Z", "TIME", &text);
        let text = mask("20[0-9]{2}-[0-9]{2}-[0-9]{2} ", "DAY ", &text);
        let text = mask("[0-9]{2}:[0-9]{2}:[0-9]{2}Z", "TIME", &text);
        let text = mask("[0-9a-f]{64}", "HEX", &text);
        mask(r"[0-9.]+ (ns|µs|ms|s)\b *", "LENGTH ", &text)
    }

    /// Returns a listing without its column widths.
    ///
    /// The widths depend on the dates: around midnight, a listing has two days.
    fn masked_listing(&self, args: &[&str]) -> String {
        let output = self.masked_output(args).replace("DAY TIME", "TIME");
        let output = Regex::new(" {2,}").unwrap().replace_all(&output, "  ").into_owned();
        Regex::new("(?m)^(20[0-9-]{8}|time|DAY) +tool")
            .unwrap()
            .replace_all(&output, "WHEN  tool")
            .into_owned()
    }

    fn json_rows(&self, args: &[&str]) -> Vec<Value> {
        let (_, stdout, stderr) = self.run(&[args, &["--json"]].concat());
        assert_eq!(stderr, "");
        stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn check_replay(&self) {
        if !self.is_tampered.get() {
            assert_replay_unchanged(&self.path(), run_toolgate);
        }
    }

    /// Opens the database for changes. The sessions are replayed before, and not any more at the
    /// end.
    fn open_for_tampering(&self) -> rusqlite::Connection {
        self.check_replay();
        self.is_tampered.set(true);
        rusqlite::Connection::open(self.path()).unwrap()
    }
}

#[test]
fn audit_query_filters_rows() {
    let demo = DemoLedger::new();
    insta::assert_snapshot!(demo.masked_listing(&["audit", "query", "--decision", "refused"]));
    insta::assert_snapshot!(demo.masked_listing(&[
        "audit",
        "query",
        "--entity",
        "customer_id=C-2002",
        "-n",
        "2"
    ]));
    assert_eq!(demo.json_rows(&["audit", "query"]).len(), 31);
    for (filter, count) in [
        (["--tool", "lookup_order"], 7),
        (["--session", "monday"], 10),
        (["--agent", "absent"], 0),
        (["--principal", "agent-7"], 31),
        (["--code", "refund_cap"], 3),
        (["--rule", "same_customer"], 2),
        (["--since", "1h"], 31),
        (["--until", "1h"], 0),
        (["--until", "today"], 31),
        (["--entity", "order_id=A-7"], 6),
    ] {
        assert_eq!(
            demo.json_rows(&[&["audit", "query"][..], &filter].concat()).len(),
            count,
            "{filter:?}"
        );
    }
    let (code, stdout, _) = demo.run(&["audit", "query", "--agent", "absent"]);
    assert_eq!((code, stdout.as_str()), (0, "no matching rows\n"));
    let (code, _, stderr) = demo.run(&["audit", "query", "--since", "tomorrow"]);
    assert!(code == 2 && stderr.contains("use 2026-11-15T09:00:00Z"), "{stderr}");
    let (code, _, stderr) = demo.run(&["audit", "query", "--decision", "refusd"]);
    assert!(code == 2 && stderr.contains("succeeded, failed, refused"), "{stderr}");
}

#[test]
fn audit_show_prints_call_with_its_facts() {
    let demo = DemoLedger::new();
    let refused = &demo.json_rows(&["audit", "query", "--rule", "same_customer"])[0];
    let call = refused["row"]["call"].as_str().unwrap();
    let output = demo.masked_output(&["audit", "show", call]);
    // The text contains the current time.
    let output = Regex::new("20[0-9]{2}-[0-9]{2}-[0-9]{2}T([0-9:.]+Z|TIME)")
        .unwrap()
        .replace_all(&output, "MOMENT")
        .into_owned();
    insta::assert_snapshot!(output.split("time by gate").next().unwrap());
    assert_eq!(demo.json_rows(&["audit", "show", call])[0], *refused);
    let (code, _, stderr) = demo.run(&["audit", "show", "01a1df09-ae84-70f4-bcc8-c27a3fb5b2c8"]);
    assert!(code == 2 && stderr.contains("list calls with `toolgate audit query`"), "{stderr}");
    let (code, _, stderr) = demo.run(&["audit", "show", "7"]);
    assert!(code == 2 && stderr.contains("at least 6 at the beginning or the end"), "{stderr}");
}

#[test]
fn verify_fails_after_row_is_changed() {
    let demo = DemoLedger::new();
    // Rows are signed every second and at the end, so the number of signatures varies.
    let signed = Regex::new("[1-9][0-9]* signatures?\\b").unwrap();
    let output =
        signed.replace(&demo.masked_output(&["audit", "verify"]), "1 signature").into_owned();
    insta::assert_snapshot!(output);
    let verified = &demo.json_rows(&["audit", "verify"])[0];
    assert_eq!((&verified["holds"], &verified["verified"]["rows"]), (&json!(true), &json!(31)));
    let anchor = verified["verified"]["anchor"].as_str().unwrap();
    assert_eq!(demo.run(&["audit", "verify", "--anchor", anchor]).0, 0);
    let (code, _, stderr) = demo.run(&["audit", "verify", "--anchor", "31"]);
    assert!(code == 2 && stderr.contains("as `toolgate audit verify` prints it"), "{stderr}");
    demo.open_for_tampering()
        .execute("UPDATE ledger SET body = replace(body, ':120', ':121') WHERE seq = 7", [])
        .unwrap();
    insta::assert_snapshot!(demo.masked_output(&["audit", "verify"]));
    assert_eq!(demo.json_rows(&["audit", "verify"])[0]["flaw"]["seq"], 7);
    std::fs::write(demo.path(), "something else altogether").unwrap();
    let (code, stdout, _) = demo.run(&["audit", "verify"]);
    assert!(code == 1 && stdout.contains("the ledger is not intact"), "{stdout}");
}

#[test]
fn verbs_report_missing_ledger() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none.db");
    let path = path.to_str().unwrap();
    for verb in [
        &["audit", "query"][..],
        &["audit", "verify"],
        &["audit", "stats"],
        &["audit", "settle"],
        &["replay", "s"],
        &["explain", "c27a3fb5b2c8"],
        &["audit", "prune"],
        &["audit", "key"],
    ] {
        let (code, stdout, stderr) = run_toolgate(&[verb, &["--store", path]].concat());
        assert_eq!((code, stdout.as_str()), (2, ""), "{verb:?}");
        assert!(stderr.contains("none.db"), "{verb:?}: {stderr}");
        assert!(!Path::new(path).exists(), "{verb:?} created a ledger");
        let (code, _, stderr) = run_toolgate(verb);
        assert!(code == 2 && stderr.contains("`--store PATH`"), "{verb:?}: {stderr}");
    }
}

#[test]
fn audit_show_prints_counter_names() {
    let demo = DemoLedger::new();
    let rows = demo.json_rows(&["audit", "query"]);
    let claims = |row: &&Value| {
        row["row"]["facts"]["claimed"].as_array().is_some_and(|claimed| claimed.len() == 2)
    };
    let call = rows.iter().find(claims).unwrap()["row"]["call"].as_str().unwrap().to_owned();
    let (_, stdout, _) = demo.run(&["audit", "show", &call]);
    assert!(
        stdout.contains("        daily_sum for \"C-1001\",\n") && !stdout.contains("u001f"),
        "{stdout}"
    );
    // The JSON output has the exact key.
    let (_, json, _) = demo.run(&["audit", "show", &call, "--json"]);
    assert!(json.contains("limit\\u001frefund-desk\\u001fdaily_sum\\u001f"), "{json}");
}

#[test]
fn stats_and_export_cover_all_rows() {
    let demo = DemoLedger::new();
    let stats = &demo.json_rows(&["audit", "stats"])[0];
    assert_eq!(
        stats["decisions"],
        json!({"failed": 2, "refused": 14, "replayed": 1, "succeeded": 14})
    );
    assert_eq!(stats["refused_by"]["refund_cap"], 3);
    let policy = |part: &str| stats["latency"]["policy"][part].as_u64().unwrap();
    assert!(
        policy("p50_ns") <= policy("p95_ns") && policy("p95_ns") <= policy("p99_ns"),
        "{stats}"
    );
    let (_, stdout, _) = demo.run(&["audit", "stats"]);
    assert!(stdout.contains("refused by") && stdout.contains("median"), "{stdout}");
    let out = demo.directory.path().join("out.jsonl");
    let (code, stdout, _) = demo.run(&["audit", "export", "--out", out.to_str().unwrap()]);
    assert!(code == 0 && stdout.starts_with("31 rows in "), "{stdout}");
    let text = std::fs::read_to_string(out).unwrap();
    let (_, piped, _) = demo.run(&["audit", "export"]);
    assert_eq!((text.lines().count(), &text), (31, &piped));
    let (_, tail, _) = demo.run(&["audit", "tail", "-n", "3"]);
    assert_eq!(tail.lines().count(), 3);
}

#[test]
fn export_refuses_to_overwrite_ledger_files() {
    let demo = DemoLedger::new();
    let before = std::fs::read(demo.path()).unwrap();
    let (code, _, stderr) = demo.run(&["audit", "export", "--out", demo.path().to_str().unwrap()]);
    assert!(code == 2 && stderr.contains("is the ledger itself"), "{stderr}");
    assert_eq!(std::fs::read(demo.path()).unwrap(), before);
    // Files that toolgate may create later are refused too.
    let at = |name: &str| demo.directory.path().join(name);
    std::fs::create_dir_all(at("ledger.db.state/spool")).unwrap();
    std::os::unix::fs::symlink("ledger.db-journal", at("ahead.jsonl")).unwrap();
    for name in ["ledger.db-journal", "ledger.db.state/spool/x.jsonl", "ahead.jsonl"] {
        let (code, _, stderr) = demo.run(&["audit", "export", "--out", at(name).to_str().unwrap()]);
        assert!(
            code == 2 && stderr.contains("is the ledger itself") && !at(name).exists(),
            "{name}: {stderr}"
        );
    }
}

#[test]
fn receipt_is_issued_and_verified() {
    let demo = DemoLedger::new();
    let paid =
        &demo.json_rows(&["audit", "query", "--tool", "issue_refund", "--decision", "succeeded"])
            [0];
    let call = paid["row"]["call"].as_str().unwrap();
    let (code, receipt, _) = demo.run(&["audit", "show", call, "--receipt"]);
    assert_eq!(code, 0);
    let file = demo.directory.path().join("receipt.json");
    std::fs::write(&file, &receipt).unwrap();
    let file = file.to_str().unwrap();
    let key = demo.run(&["audit", "key"]).1.trim().to_uppercase();
    let (code, stdout, _) = run_toolgate(&["audit", "receipt", file, "--key", &key]);
    assert!(
        code == 0 && stdout.contains("the receipt is valid: `issue_refund` succeeded"),
        "{stdout}"
    );
    let (code, stdout, _) = demo.run(&["audit", "receipt", file]);
    assert!(code == 0 && stdout.contains("its row is in the ledger, unchanged"), "{stdout}");
    let (code, _, stderr) = run_toolgate(&["audit", "receipt", file, "--key", "5f"]);
    assert!(code == 2 && stderr.contains("64 hexadecimal digits"), "{stderr}");
    let (code, _, stderr) = run_toolgate(&["audit", "receipt", file]);
    assert!(code == 2 && stderr.contains("no ledger to check against"), "{stderr}");
    std::fs::write(file, receipt.replace("succeeded", "refused")).unwrap();
    let (code, stdout, _) = run_toolgate(&["audit", "receipt", file, "--key", &key]);
    assert!(code == 1 && stdout.contains("this ledger did not sign it"), "{stdout}");
    std::fs::write(file, &receipt).unwrap();
    demo.open_for_tampering().execute("UPDATE ledger SET body = replace(body, '120', '121') WHERE call = (SELECT call FROM ledger WHERE tool = 'issue_refund' AND decision = 'succeeded' LIMIT 1)", []).unwrap();
    let (code, stdout, _) = demo.run(&["audit", "receipt", file]);
    assert!(code == 1 && stdout.contains("the ledger is not intact"), "{stdout}");
    let (code, stdout, stderr) = demo.run(&["audit", "show", call, "--receipt"]);
    assert!(
        code == 2 && stdout.is_empty() && stderr.contains("the row was changed"),
        "a receipt was signed for a changed row: {stdout}{stderr}"
    );
}

#[test]
fn foreign_database_is_refused_and_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("other.db");
    rusqlite::Connection::open(&path)
        .unwrap()
        .execute_batch("CREATE TABLE mine (x); INSERT INTO mine VALUES (1)")
        .unwrap();
    let before = std::fs::read(&path).unwrap();
    let (code, _, stderr) = run_toolgate(&["demo", "--store", path.to_str().unwrap()]);
    assert!(code == 2 && stderr.contains("a database of another program"), "{stderr}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "another file was created");
    let (code, _, stderr) = run_toolgate(&["demo", "--store", directory.path().to_str().unwrap()]);
    assert!(code == 2 && stderr.contains("is a directory"), "{stderr}");
}

#[test]
fn fifo_as_ledger_is_refused_without_waiting() {
    let demo = DemoLedger::new();
    demo.check_replay();
    demo.is_tampered.set(true);
    let (pipe_ledger, state) =
        (demo.directory.path().join("pipe.db"), demo.directory.path().join("ledger.db.state"));
    let make_fifo = |path: &Path| {
        let _ = std::fs::remove_file(path);
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    make_fifo(&pipe_ledger);
    for verb in [
        &["audit", "query"][..],
        &["audit", "verify"],
        &["audit", "key"],
        &["audit", "settle"],
        &["demo"],
    ] {
        let (code, _, stderr) =
            run_toolgate(&[verb, &["--store", pipe_ledger.to_str().unwrap()]].concat());
        assert!(code == 2 && stderr.contains("not a regular file"), "{verb:?}: {stderr}");
    }
    // An unusable key file does not hide the other keys.
    make_fifo(&state.join("keys/sign-0000000000000000.key"));
    std::fs::write(state.join("keys/sign-1111111111111111.key"), "something else").unwrap();
    assert_eq!(demo.run(&["audit", "verify"]).0, 0);
    make_fifo(&state.join("mark.json"));
    for verb in [["audit", "verify"], ["audit", "prune"]] {
        let (code, _, stderr) = demo.run(&verb);
        assert!(
            code == 2 && stderr.contains("`mark.json` of the ledger is not a regular file"),
            "{verb:?}: {stderr}"
        );
    }
    make_fifo(&state.join("keys/redact.key"));
    let (code, _, stderr) = demo.run(&["audit", "prune"]);
    assert!(code == 2 && stderr.contains("redact.key: not a regular file"), "{stderr}");
}

/// Builds a gate with a ledger and a read tool.
fn gate_with_read_tool(ledger: &Path) -> toolgate::Toolgate {
    use toolgate::{Agent, Effect, Tool, Toolgate};
    let look =
        Tool::dynamic("look", "Looks.", json!({"type": "object"}), |_, _| async { Ok(json!(1)) })
            .effect(Effect::Read);
    let store = std::sync::Arc::new(toolgate_store::SqliteStore::open(ledger).unwrap());
    Toolgate::builder()
        .store(store)
        .agent(Agent::builder("a").tool(look).build().unwrap())
        .build()
        .unwrap()
}

#[tokio::test]
async fn audit_output_escapes_control_characters() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.db");
    let gate = gate_with_read_tool(&path);
    let hostile = "a\u{9b}2Kb\u{202e}c\u{2028}d\u{e0041}e\u{7f}";
    let call = gate
        .session("a", hostile, "talk")
        .call("look", json!({"said": hostile}))
        .await
        .call
        .to_string();
    gate.session("a", "b", "talk").call("look", json!({})).await;
    drop(gate);
    let output_of = |args: &[&str]| {
        let (_, stdout, stderr) =
            run_toolgate(&[args, &["--store", path.to_str().unwrap()]].concat());
        let text = format!("{stdout}{stderr}");
        assert!(
            !text.contains(['\u{9b}', '\u{202e}', '\u{2028}', '\u{e0041}', '\u{7f}']),
            "{args:?}: {text:?}"
        );
        text
    };
    // The escaped JSON text has the same value.
    let shown = output_of(&["audit", "show", &call]);
    assert!(shown.contains(r#""said": "a\u009b2Kb\u202ec\u2028d\udb40\udc41e\u007f""#), "{shown}");
    let several = output_of(&["replay", "talk"]);
    assert!(
        several.contains("several sessions are called `talk`")
            && several.contains("--principal a\u{fffd}2Kb"),
        "{several}"
    );
    output_of(&["replay", "talk", "--principal", "b"]);
    output_of(&["audit", "query"]);
    output_of(&["audit", "tail"]);
    output_of(&["audit", "stats"]);
    output_of(&["explain", &call]);
}

#[test]
fn demo_ledger_is_pruned_and_its_key_rotated() {
    let demo = DemoLedger::new();
    let (code, stdout, _) = demo.run(&["audit", "settle"]);
    assert_eq!((code, stdout.as_str()), (0, "no pending calls\n"));
    let (code, _, stderr) = demo.run(&[
        "audit",
        "settle",
        "01a1df09-ae84-70f4-bcc8-c27a3fb5b2c8",
        "--never",
        "--by",
        "ann",
    ]);
    assert!(code == 2 && stderr.contains("is not pending"), "{stderr}");
    let (_, stdout, _) = demo.run(&["audit", "prune", "--older-than", "0s", "--dry-run"]);
    assert!(stdout.starts_with("31 rows from before"), "{stdout}");
    let (_, stdout, _) = demo.run(&["audit", "prune"]);
    assert!(stdout.starts_with("deleted 0 rows"), "{stdout}");
    let first = demo.run(&["audit", "key"]).1;
    let second = demo.run(&["audit", "key", "--rotate"]).1;
    assert_ne!(first, second);
    assert_eq!(demo.run(&["audit", "key"]).1, second);
    let call = demo.json_rows(&["audit", "query", "-n", "1"])[0]["row"]["call"]
        .as_str()
        .unwrap()
        .to_owned();
    let (_, stdout, _) = demo.run(&["audit", "prune", "--older-than", "0s"]);
    assert!(stdout.starts_with("deleted 31 rows"), "{stdout}");
    let (code, _, stderr) = demo.run(&["audit", "show", &call]);
    assert!(
        code == 2
            && stderr.contains("rows up to 31 were pruned since then, and it may be one of them"),
        "{stderr}"
    );
    let (code, stdout, _) = demo.run(&["audit", "verify", "--key", first.trim()]);
    assert!(code == 0 && stdout.contains("31 rows before them"), "{stdout}");
}
