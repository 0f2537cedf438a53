//! Tests `check`, `explain` and `check --tests` with a configuration.

mod config_tests;

use assert_cmd::Command;
use serde_json::{Value, json};

use self::config_tests::run_config_tests;

const CONFIG: &str = r#"
name = "support"

[tools.verify_customer]
description = "Verify a customer."
effect = "read"
input = { type = "object", properties = { customer_id = { type = "string" } }, required = ["customer_id"] }
entities = { customer_id = "/customer_id" }
proves = ["/active"]

[tools.issue_refund]
description = "Pay a refund."
input = { type = "object", properties = { customer_id = { type = "string" }, amount = { type = "number" }, card = { type = "string", writeOnly = true } }, required = ["customer_id", "amount"] }

[tools.run_command]
kind = "client"
policy = "open"

[tools.calc]
kind = "builtin"

[[policy]]
name = "verified"
rule = "require"
tools = ["issue_refund"]
any_of = ["verify_customer"]
same = { customer_id = "/customer_id" }
fields = { "/active" = true }

[[policy]]
name = "daily"
rule = "limit"
tools = ["issue_refund"]
sum = "/amount"
max = 500
per = "/customer_id"
within = "24h"

[[policy]]
name = "big"
rule = "ask"
tools = ["issue_refund"]
where = [{ argument = "/amount", above = 400 }]
"#;

const CALLS: &str = r#"
{"tool": "issue_refund", "arguments": {"customer_id": "C-1", "amount": 100}}
{"tool": "verify_customer", "arguments": {"customer_id": "C-1"}, "result": {"active": true}}
{"tool": "issue_refund", "arguments": {"customer_id": "C-1", "amount": 300}, "result": {"refund_id": "R-1"}}
{"tool": "issue_refund", "arguments": {"customer_id": "C-1", "amount": 150}}
{"tool": "issue_refund", "arguments": {"customer_id": "C-1", "amount": 51}}
{"tool": "issue_refund", "arguments": {"customer_id": "C-1", "amount": 450}}
{"tool": "issue_refund", "arguments": {"customer_id": "C-1", "amount": 20}, "session": "another"}
{"tool": "issue_refnd", "arguments": {"customer_id": "C-1"}}
{"tool": "issue_refund", "arguments": {"customer_id": "C-1", "amount": 1, "amount": 600}}
{"tool": "run_command", "arguments": {"command": "make"}, "result": {"exit": 0}}
{"tool": "calc", "arguments": {"expression": "1 + 1"}}
"#;

fn check(config: &str, calls: &str, extra_args: &[&str]) -> (i32, String, String) {
    run_verb("check", config, calls, extra_args)
}

fn run_verb(verb: &str, config: &str, calls: &str, extra_args: &[&str]) -> (i32, String, String) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("toolgate.toml"), config).unwrap();
    let output = Command::cargo_bin("toolgate")
        .unwrap()
        .arg(verb)
        .args(extra_args)
        .current_dir(directory.path())
        .env_clear()
        // The file applies alone, without files of the user.
        .env("TOOLGATE_CONFIG", "toolgate.toml")
        .write_stdin(calls)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn check_prints_outcome_of_each_call() {
    let (code, stdout, stderr) = check(CONFIG, CALLS, &[]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    insta::assert_snapshot!(stdout);
}

#[test]
fn check_reads_calls_from_arguments_files_or_stdin() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("calls.jsonl");
    std::fs::write(&file, CALLS).unwrap();
    let masked = |output: (i32, String, String)| {
        let call = regex::Regex::new(
            "[0-9a-f]{8}-[0-9a-f-]{27}|20[0-9-]{8}T[0-9:.]+Z|\"retryAfterMs\":[0-9]+",
        )
        .unwrap();
        (output.0, call.replace_all(&output.1, "CALL").into_owned(), output.2)
    };
    let piped = masked(check(CONFIG, CALLS, &["--json"]));
    assert_eq!(masked(check(CONFIG, "", &["--json", file.to_str().unwrap()])), piped);
    let words: Vec<&str> = CALLS.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(masked(check(CONFIG, "", &[&["--json"][..], &words].concat())), piped);
    let (code, _, stderr) = check(CONFIG, "", &["nowhere.jsonl"]);
    assert!(code == 2 && stderr.contains("nowhere.jsonl"), "{stderr}");
    let (code, _, stderr) = check(CONFIG, "", &["{\"tool\": 1}"]);
    assert!(code == 2 && stderr.contains("line 1"), "{stderr}");
}

#[test]
fn check_json_prints_one_verdict_per_line() {
    let (code, stdout, _) = check(CONFIG, CALLS, &["--json"]);
    assert_eq!(code, 0);
    let lines: Vec<Value> =
        stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let verdicts: Vec<(&str, &str, Option<&str>)> = lines
        .iter()
        .map(|line| {
            (
                line["decision"].as_str().unwrap(),
                line["gate"].as_str().unwrap(),
                line["rule"].as_str(),
            )
        })
        .collect();
    assert_eq!(
        verdicts,
        [
            ("deny", "policy", Some("verified")),
            ("allow", "run", None),
            ("allow", "run", None),
            ("allow", "run", None),
            ("deny", "claim", Some("daily")),
            ("ask", "approval", Some("big")),
            ("deny", "policy", Some("verified")),
            ("deny", "resolve", None),
            ("deny", "validate", None),
            ("allow", "run", None),
            ("allow", "run", None),
        ]
    );
    for line in &lines {
        assert_eq!(line["decision"] == "allow", line["error"].is_null(), "{line}");
        assert!(line["error"].is_null() || line["error"]["isError"] == json!(true));
    }
    assert_eq!(
        lines[0]["error"]["next"],
        json!({"tool": "verify_customer", "arguments": {"customer_id": "C-1"}})
    );
}

#[test]
fn check_explain_prints_reasons() {
    let (_, stdout, _) = check(CONFIG, CALLS.lines().nth(1).unwrap(), &["--explain"]);
    assert!(
        stdout.contains(
            "`verify_customer` succeeded about the same `customer_id`: never in this session"
        ),
        "{stdout}"
    );
    assert_eq!(
        stdout.matches("must have succeeded first in this session").count(),
        1,
        "the reason must be printed once: {stdout}"
    );
    let large = r#"{"tool": "issue_refund", "arguments": {"customer_id": "C-1", "amount": 450}}"#;
    let verify = CALLS.lines().nth(2).unwrap();
    let (_, stdout, _) = check(CONFIG, "", &["--explain", verify, large]);
    assert_eq!(stdout.matches("the rule `big` requires approval").count(), 1, "{stdout}");
}

#[test]
fn explain_predicts_outcome_of_hypothetical_call() {
    let (refund, verify) = (CALLS.lines().nth(1).unwrap(), CALLS.lines().nth(2).unwrap());
    let (code, stdout, stderr) = run_verb("explain", CONFIG, "", &[refund]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    insta::assert_snapshot!(stdout, @r#"
    deny  issue_refund {"customer_id": "C-1", "amount": 100} at policy · verified
          BUSINESS prerequisite_missing: `verify_customer` must have succeeded first in this session
          next verify_customer {"customer_id":"C-1"}
        gates
          admit     pass
          resolve   pass
          validate  pass
          recall    pass
          progress  pass
          limits    pass
          hooks     pass
          policy    deny
          approval  -
          claim     -
          run       -
          shape     -
          settle    -
          record    -

        rules
          deny      verified
                    - `verify_customer` succeeded about the same `customer_id`: never in this session
          -         daily not reached (claim)
                    + at most 500: 100 more
          pass      big
                    - /amount above 400: 100
    "#);
    // `explain` prints the same as `check`. Earlier calls on the command line are its history.
    assert_eq!(check(CONFIG, "", &["--explain", refund]), (0, stdout, String::new()));
    let (_, stdout, _) = run_verb("explain", CONFIG, "", &["--json", verify, refund]);
    let lines: Vec<Value> =
        stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        lines.iter().map(|line| &line["explanation"]["would"]).collect::<Vec<_>>(),
        ["run", "run"]
    );
    let wrong: [(&[&str], &str); 4] = [
        (&["{\"tol\": 1}"], "call 1: not a call"),
        (&["nonsense"], "or a JSON object for a call that was not made"),
        (&[], "<CALL>..."),
        (&["--config", "nowhere.toml", "{\"tool\": \"calc\"}"], "nowhere.toml"),
    ];
    for (words, why) in wrong {
        let (code, stdout, stderr) = run_verb("explain", CONFIG, "", words);
        assert!(code == 2 && stdout.is_empty() && stderr.contains(why), "{stderr}");
    }
}

#[test]
fn specification_example_loads() {
    let page = include_str!("../../../../specs/config.md");
    let examples = || page.split("```toml\n").skip(1).map(|part| part.split("```").next().unwrap());
    let example = examples().next().unwrap();
    let (code, stdout, stderr) = check(
        example,
        "{\"tool\": \"verify_customer\", \"arguments\": {\"customer_id\": \"C-1\"}, \"principal\": \"alice\"}",
        &["--json", "--explain"],
    );
    assert_eq!((code, stderr.as_str()), (0, ""));
    let verdict: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        (&verdict["decision"], &verdict["explanation"]["would"]),
        (&json!("allow"), &json!("run"))
    );
    let tests = examples().find(|example| example.starts_with("[[test]]")).unwrap();
    let (code, stdout, stderr) = run_config_tests(example, tests, &[]);
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
}

#[test]
fn check_reports_line_of_invalid_call() {
    for (calls, why) in [
        ("{\"tool\": \"calc\"}\nnonsense", "line 2: not a call"),
        ("{\"tol\": \"calc\"}", "unknown field `tol`"),
        ("{\"arguments\": {}}", "missing field `tool`"),
    ] {
        let (code, _, stderr) = check(CONFIG, calls, &[]);
        assert!(code == 2 && stderr.contains(why), "{stderr}");
    }
    let (code, _, stderr) = check(CONFIG, "", &["--config", "nowhere.toml"]);
    assert!(code == 2 && stderr.contains("nowhere.toml"), "{stderr}");
}

#[test]
fn one_file_defines_several_agents() {
    let config = "[agents.a.tools.calc]\nkind = \"builtin\"\n[agents.b]\nprincipals = [\"bob\"]\n[agents.b.tools.calc]\nkind = \"builtin\"\n";
    let (code, _, stderr) = check(config, "{\"tool\": \"calc\"}", &[]);
    assert!(code == 2 && stderr.contains("set `agent` to one of a, b"), "{stderr}");
    let (_, stdout, _) = check(
        config,
        "{\"tool\": \"calc\", \"arguments\": {\"expression\": \"1\"}, \"agent\": \"b\"}",
        &["--json"],
    );
    assert!(stdout.contains("forbidden"), "{stdout}");
    let (_, stdout, _) = check(
        config,
        "{\"tool\": \"calc\", \"arguments\": {\"expression\": \"1\"}, \"agent\": \"b\", \"principal\": \"bob\"}",
        &["--json"],
    );
    assert!(stdout.contains("allow"), "{stdout}");
}

#[test]
fn rules_load_from_included_files() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(
        directory.path().join("rules.toml"),
        "[[policy]]\nname = \"never\"\nrule = \"deny\"\ntools = [\"calc\"]\n",
    )
    .unwrap();
    std::fs::write(
        directory.path().join("toolgate.toml"),
        "include = [\"rules.toml\", \"gone.toml\"]\n[tools.calc]\nkind = \"builtin\"\n",
    )
    .unwrap();
    let run = || {
        let path = directory.path().join("toolgate.toml");
        let output = Command::cargo_bin("toolgate")
            .unwrap()
            .args(["check", "--json", "--config"])
            .arg(path)
            .env_clear()
            .write_stdin("{\"tool\": \"calc\", \"arguments\": {\"expression\": \"1\"}}")
            .output()
            .unwrap();
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    assert!(run().1.contains("gone.toml: No such file"), "{}", run().1);
    std::fs::write(
        directory.path().join("toolgate.toml"),
        "include = \"rules.toml\"\n[tools.calc]\nkind = \"builtin\"\n",
    )
    .unwrap();
    assert!(run().0.contains("\"rule\":\"never\""), "{}", run().0);
}

#[test]
fn check_reports_all_config_errors_at_once() {
    let config = CONFIG
        .replace("effect = \"read\"", "effct = \"read\"")
        .replace("kind = \"builtin\"", "kind = \"buildin\"")
        .replace("any_of = [\"verify_customer\"]", "any_of = [\"verify_custmer\"]")
        .replace("max = 500", "max = \"x\"")
        .replace(
            "name = \"support\"",
            "name = \"support\"\nredact = [\"(\"]\ncolour = 1\nlimits = { rate = { calls = 3 } }",
        );
    let (code, stdout, stderr) = check(&config, "", &[]);
    assert_eq!((code, stdout.as_str()), (2, ""));
    insta::assert_snapshot!(stderr);
    let (_, _, stderr) = check("[tools.send]\ndescription = \"Sends.\"\n", "", &[]);
    insta::assert_snapshot!(stderr);
    let (_, _, stderr) = check("", "", &[]);
    insta::assert_snapshot!(stderr);
    let (_, _, stderr) = check("[tools.send\n", "", &[]);
    insta::assert_snapshot!(stderr);
}

#[test]
fn ledger_path_comes_from_config() {
    let directory = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let output = Command::cargo_bin("toolgate")
            .unwrap()
            .args(args)
            .current_dir(directory.path())
            .env_clear()
            .output()
            .unwrap();
        (
            output.status.code().unwrap(),
            String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap(),
        )
    };
    std::fs::write(
        directory.path().join("toolgate.toml"),
        format!("store = \"kept/ledger.db\"\n{CONFIG}"),
    )
    .unwrap();
    std::fs::create_dir(directory.path().join("kept")).unwrap();
    assert_eq!(run(&["demo"]).0, 0);
    assert!(
        !directory.path().join("kept/ledger.db").exists(),
        "the demo wrote a ledger without `--store`"
    );
    assert_eq!(run(&["demo", "--store", "kept/ledger.db"]).0, 0);
    let (code, text) = run(&["audit", "verify"]);
    assert!(code == 0 && text.contains("the ledger is intact"), "{text}");
    // `backtest` accepts a whole configuration as well as a policy file.
    let rules = include_str!("../../src/command/demo/policy.toml");
    std::fs::write(
        directory.path().join("new.toml"),
        format!("store = \"x\"\n{}", rules.replace("above = 500", "above = 100")),
    )
    .unwrap();
    let (code, text) = run(&["backtest", "--config", "new.toml"]);
    assert!(code == 1 && text.contains("now refused at policy by `refund_cap`"), "{text}");
}
