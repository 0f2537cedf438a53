//! Tests `explain`, `replay` and `backtest` on recorded calls.

use regex::Regex;
use serde_json::{Value, json};

use super::{DemoLedger, gate_with_read_tool};
use crate::run_toolgate;

#[test]
fn replay_decides_recorded_session_again() {
    let demo = DemoLedger::new();
    insta::assert_snapshot!(demo.masked_output(&["replay", "tuesday"]));
    for session in ["monday", "tuesday", "wednesday"] {
        let lines = demo.json_rows(&["replay", session]);
        assert_eq!(lines.last().unwrap()["summary"]["differ"], 0);
    }
    let first_rows = demo.json_rows(&["replay", "monday", "--until", "2"]);
    assert_eq!(first_rows.len(), 3);
    let (code, _, stderr) = demo.run(&["replay", "sunday"]);
    assert!(code == 2 && stderr.contains("no session `sunday`"), "{stderr}");
    // The recorded rules change in the database.
    demo.open_for_tampering()
        .execute("UPDATE configs SET body = replace(body, 'above = 500', 'above = 50')", [])
        .unwrap();
    let (code, stdout, _) = demo.run(&["replay", "monday"]);
    assert!(code == 1 && stdout.contains("now refused at policy by `refund_cap`"), "{stdout}");
    // A second run of the demo has another agent.
    assert_eq!(demo.run(&["demo"]).0, 0);
    let (code, _, stderr) = demo.run(&["replay", "monday"]);
    assert!(code == 2 && stderr.contains("--agent refund-desk-2 --principal agent-7"), "{stderr}");
}

#[test]
fn backtest_applies_other_rules_to_recorded_calls() {
    let demo = DemoLedger::new();
    let rules = include_str!("../../../src/command/demo/policy.toml");
    let file = demo.directory.path().join("policy.toml");
    let backtest = |text: &str| {
        std::fs::write(&file, text).unwrap();
        demo.masked_output(&["backtest", "--config", file.to_str().unwrap()])
    };
    insta::assert_snapshot!(backtest(rules));
    insta::assert_snapshot!(backtest(&rules.replace("above = 500", "above = 100")));
    insta::assert_snapshot!(backtest(
        &rules.replace("issue_refund", "isue_refund").chars().take(400).collect::<String>()
    ));
    std::fs::write(&file, rules.replace("above = 500", "above = 100")).unwrap();
    let lines = demo.json_rows(&["backtest", "--config", file.to_str().unwrap()]);
    assert_eq!(lines.last().unwrap()["summary"]["calls"], 31);
    let (code, _, stderr) = demo.run(&["backtest", "--config", "nowhere.toml"]);
    assert!(code == 2 && stderr.contains("nowhere.toml"), "{stderr}");
}

#[test]
fn filtered_backtest_decides_like_full_backtest() {
    let demo = DemoLedger::new();
    let rules = include_str!("../../../src/command/demo/policy.toml");
    // Only one of the rules is tested.
    let rule_text =
        rules.split("[[policy]]").find(|rule| rule.contains("name = \"refund_cap\"")).unwrap();
    let file = demo.directory.path().join("one.toml");
    std::fs::write(&file, format!("[[policy]]{rule_text}")).unwrap();
    let backtest = |extra_args: &[&str]| {
        let mut lines = demo
            .json_rows(&[&["backtest", "--config", file.to_str().unwrap()], extra_args].concat());
        lines.pop();
        lines
            .into_iter()
            .map(|line| {
                (line["at"].as_str().unwrap().to_owned(), line["call"].clone(), line["now"].clone())
            })
            .collect::<Vec<_>>()
    };
    let full = backtest(&[]);
    assert!(full.len() > 3, "{full:?}");
    let rows = demo.json_rows(&["audit", "query"]);
    let times: Vec<&str> =
        rows.iter().map(|row| row["row"]["at"].as_str().or(row["at"].as_str()).unwrap()).collect();
    for since in times.iter().step_by(3) {
        let expected: Vec<_> =
            full.iter().filter(|(at, ..)| at.as_str() >= *since).cloned().collect();
        assert_eq!(backtest(&["--since", since]), expected, "since {since}");
    }
}

#[tokio::test]
async fn replay_until_stops_at_turn() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.db");
    let gate = gate_with_read_tool(&path);
    let session = gate.session("a", "b", "talk");
    for (n, turn) in
        [Some(1), Some(1), None, Some(2), None, Some(3), Some(4)].into_iter().enumerate()
    {
        let call = session.prepare("look", json!({"n": n}));
        gate.call(if let Some(turn) = turn { call.turn(turn) } else { call }).await;
    }
    drop(gate);
    for (until, rows) in [("0", 0), ("1", 3), ("2", 5), ("3", 6), ("9", 7)] {
        let (code, stdout, stderr) = run_toolgate(&[
            "replay",
            "talk",
            "--until",
            until,
            "--json",
            "--store",
            path.to_str().unwrap(),
        ]);
        assert_eq!((code, stdout.lines().count()), (0, rows + 1), "{until}: {stdout}{stderr}");
    }
}

#[tokio::test]
async fn backtest_skips_rejected_callers() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.db");
    let gate = gate_with_read_tool(&path);
    gate.session("a", "b", "s").call("look", json!({})).await;
    gate.session("absent", "b", "s").call("look", json!({})).await;
    gate.call(
        gate.session("a", "b", "(turned away)")
            .prepare("look", json!({}))
            .with_transport_rejection("not with this token"),
    )
    .await;
    drop(gate);
    let rules = directory.path().join("rules.toml");
    let backtest = |max_calls: u32| {
        std::fs::write(
            &rules,
            format!(
                "[[policy]]\nname = \"few\"\nrule = \"limit\"\ntools = [\"look\"]\ncalls = {max_calls}\n"
            ),
        )
        .unwrap();
        run_toolgate(&[
            "backtest",
            "--config",
            rules.to_str().unwrap(),
            "--store",
            path.to_str().unwrap(),
        ])
    };
    let (code, stdout, stderr) = backtest(9);
    assert!(
        code == 0 && stdout.contains("2 calls: 2 would be decided the same, 0 differently"),
        "{stdout}{stderr}"
    );
    let (code, stdout, stderr) = backtest(0);
    assert!(
        code == 1 && stdout.contains("2 calls: 1 would be decided the same, 1 differently"),
        "{stdout}{stderr}"
    );
}

#[test]
fn explain_covers_every_recorded_call() {
    let demo = DemoLedger::new();
    let rows = demo.json_rows(&["audit", "query"]);
    let calls: Vec<&str> =
        rows.iter().map(|entry| entry["row"]["call"].as_str().unwrap()).collect();
    let explanations = demo.json_rows(&[&["explain"][..], &calls].concat());
    assert_eq!(explanations.len(), rows.len());
    for (explanation, entry) in explanations.iter().zip(&rows) {
        let row = &entry["row"];
        assert_eq!((&explanation["call"], &explanation["tool"]), (&row["call"], &row["tool"]));
        assert!(explanation["now"].get("differs").is_none(), "{explanation}");
        // Each gate has its recorded result.
        let expected = match row["decision"].as_str().unwrap() {
            "refused" => "deny",
            "failed" => "failed",
            _ => "pass",
        };
        let gates = explanation["explanation"]["gates"].as_array().unwrap();
        assert_eq!(
            gates.iter().find(|note| note["gate"] == row["gate"]).unwrap()["said"],
            expected,
            "{explanation}"
        );
    }
    let (code, _, stderr) = demo.run(&["explain", "01a1df09-ae84-70f4-bcc8-c27a3fb5b2c8"]);
    assert!(code == 2 && stderr.contains("list calls with `toolgate audit query`"), "{stderr}");
    let first = calls[0];
    assert_eq!(demo.run(&["audit", "prune", "--older-than", "0s"]).0, 0);
    let (code, _, stderr) = demo.run(&["explain", first]);
    assert!(code == 2 && stderr.contains("rows up to 31 were pruned since then"), "{stderr}");
}

#[tokio::test]
async fn explain_uses_facts_recorded_with_call() {
    use toolgate::policy::source::RuleSet;
    use toolgate::{Agent, Tool, Toolgate};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.db");
    let schema = json!({"type": "object", "properties": {"amount": {"type": "number"}}, "required": ["amount"]});
    let pay = Tool::dynamic("pay", "Pays.", schema, |_, _| async { Ok(json!({"paid": true})) });
    let rules = RuleSet::parse(
        "policy.toml",
        r#"
        [[policy]]
        name = "cap"
        rule = "deny"
        tools = ["pay"]
        where = [{ argument = "/amount", above = 500 }]
        reason = "Over 500 a person decides."

        [[policy]]
        name = "daily"
        rule = "limit"
        tools = ["pay"]
        sum = "/amount"
        max = 500
        "#,
    );
    let gate = Toolgate::builder()
        .store(std::sync::Arc::new(toolgate_store::SqliteStore::open(&path).unwrap()))
        .agent(Agent::builder("desk").tool(pay).rules(rules).build().unwrap())
        .build()
        .unwrap();
    let session = gate.session("desk", "alice", "monday");
    for amount in [300, 600, 250] {
        session.call("pay", json!({"amount": amount})).await;
    }
    let calls: Vec<String> =
        session.rows().await.unwrap().iter().map(|row| row.call.to_string()).collect();
    let explain = |args: &[&str]| {
        let (code, stdout, stderr) =
            run_toolgate(&[&["explain"][..], args, &["--store", path.to_str().unwrap()]].concat());
        assert_eq!((code, stderr.as_str()), (0, ""));
        Regex::new("[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}Z")
            .unwrap()
            .replace_all(&stdout, "TIME")
            .into_owned()
    };
    // The last part of a call id is sufficient.
    insta::assert_snapshot!(explain(&[calls[1].rsplit('-').next().unwrap()]), @r#"
    refused pay {"amount":600} at policy · cap
          BUSINESS cap: Over 500 a person decides. Repeating this call does not help.
          TIME session monday of alice with desk
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
          deny      cap
                    + /amount above 500: 600
          deny      daily the limit `daily` of 500 in total would be exceeded
                    - at most 500: 600 more
    "#);
    insta::assert_snapshot!(explain(&[calls[0].as_str()]), @r#"
    succeeded pay {"amount":300}
          TIME session monday of alice with desk
        gates
          admit     pass
          resolve   pass
          validate  pass
          recall    pass
          progress  pass
          limits    pass
          hooks     pass
          policy    pass
          approval  pass
          claim     pass      0 of 500 used
          run       pass
          shape     pass
          settle    pass
          record    pass

        rules
          pass      cap
                    - /amount above 500: 300
          pass      daily 0 of 500 used
                    + at most 500: 300 more
    "#);
    let explanation: Value =
        serde_json::from_str(&explain(&["--json", calls[2].as_str()])).unwrap();
    assert_eq!(
        (&explanation["now"], &explanation["was"]["refused"]["rule"]),
        (&json!("same"), &json!("daily"))
    );
    let rules = explanation["explanation"]["rules"].as_array().unwrap();
    assert_eq!(rules.iter().map(|note| &note["said"]).collect::<Vec<_>>(), ["pass", "deny"]);
    assert!(rules[1]["why"].as_str().unwrap().ends_with("(used: 300)"), "{explanation}");
    assert_eq!(
        rules[1]["looked_at"],
        json!([{"what": "at most 500", "found": "300 used, 250 more", "holds": false}])
    );
}
