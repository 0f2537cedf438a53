//! Tests the findings and fixes of `lint`.

mod schema_findings;

use serde_json::Value;

use crate::hook::TestProject;

#[test]
fn lint_fix_corrects_misspelled_names() {
    let project = TestProject::new();
    let config = r#"
lint = [{ allow = "thin_description", of = "check_fraud", reason = "it is internal" }]

[tools.verify_customer]
description = "Verify a customer by id."
efect = "read"

[tools.issue_refund]
description = """Pay a refund.
Use it when a customer was wronged.
Amounts are in USD.
Call check_fraud first."""

[tools.check_fraud]
description = "Verify a customer by id, please."
effect = "read"

[[policy]]
name = "verified"
rule = "require"
tools = ["issue_refund"]
any_of = ["verify_custmer"]

[[policy]]
name = "cap"
rule = "deny"
tools = ["issue_refund"]
where = [{ argument = "/amount", above = 5 }]
"#;
    project.write("project/toolgate.toml", config);
    insta::assert_snapshot!("lint", project.masked_output(&["lint"], ""));
    insta::assert_snapshot!("lint_fix", project.masked_output(&["lint", "--fix"], ""));
    let fixed = project.read("project/toolgate.toml");
    assert_eq!(
        fixed,
        config.replace("efect", "effect").replace("verify_custmer", "verify_customer")
    );
    insta::assert_snapshot!(
        "lint_github",
        project.masked_output(&["lint", "--format", "github"], "")
    );
    let (_, sarif, _) = project.run(&["lint", "--format", "sarif"], "");
    let sarif: Value = serde_json::from_str(&sarif).unwrap();
    assert_eq!(sarif["runs"][0]["results"][0]["ruleId"], "thin_description");
    let (_, json, _) = project.run(&["lint", "--format", "json"], "");
    assert_eq!(
        serde_json::from_str::<Value>(&json).unwrap()["findings"].as_array().unwrap().len(),
        sarif["runs"][0]["results"].as_array().unwrap().len()
    );
}

#[test]
fn sarif_locations_are_encoded_uris() {
    let project = TestProject::new();
    let home = project.path("").display().to_string();
    let outside = format!("file://{home}other/my%20rules%23.toml");
    for (file, written, address) in [
        ("toolgate.toml", "project/toolgate.toml", "toolgate.toml"),
        ("my rules#.toml", "project/my rules#.toml", "my%20rules%23.toml"),
        (&*project.path("project/a/b.toml").display().to_string(), "project/a/b.toml", "a/b.toml"),
        ("../other/my rules#.toml", "other/my rules#.toml", &*outside),
        ("./100%/ä:b.toml", "project/100%/ä:b.toml", "100%25/%C3%A4%3Ab.toml"),
    ] {
        project.write(written, "[tools.look]\nefect = \"read\"\n");
        let (_, sarif, stderr) = project.run(&["lint", "--format", "sarif", "--config", file], "");
        let sarif: Value =
            serde_json::from_str(&sarif).unwrap_or_else(|_| panic!("{file}: {sarif}{stderr}"));
        assert_eq!(
            sarif["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
                ["uri"],
            address,
            "{file}"
        );
    }
}

#[test]
fn every_lint_code_is_reachable() {
    let project = TestProject::new();
    let tool = |name: &str, extra: &str| {
        format!("[agents.a.tools.{name}]\ndescription = \"{name}\"\neffect = \"read\"\n{extra}")
    };
    let words = "Finds the orders of one customer by name";
    let many: String = (0..5).map(|n| tool(&format!("tool_{n}"), "")).collect();
    let config = format!(
        "store = \"ledger.db\"\nretention = \"1d\"\n{many}[agents.a.tools.find]\ndescription = \"{words}\"\neffect = \"read\"\n[agents.a.tools.search]\ndescription = \"{words} too\"\neffect = \"read\"\n\
         [agents.a.tools.pay]\ndescription = \"Pays. Call find first.\"\npolicy = \"open\"\n\
         [agents.a.tools.send]\ndescription = \"Sends.\"\ninput = {{ type = \"object\", propertes = {{ to = {{}} }} }}\n\
         [agents.a.tools.close]\ndescription = \"Closes.\"\nsecrets = \"/stats\"\ninput = {{ type = \"object\", properties = {{ status = {{ enum = [\"open\", \"closed\"] }} }} }}\n\
         [[agents.a.policy]]\nname = \"vain\"\nrule = \"deny\"\ntools = [\"close\"]\nwhere = [{{ argument = \"/status\", in = [\"gone\"] }}]\nreason = \"Gone.\"\n\
         [[agents.a.policy]]\nname = \"found\"\nrule = \"require\"\ntools = [\"send\"]\nany_of = [\"find\"]\nreason = \"Find it first.\"\n\
         [[agents.a.policy]]\nname = \"mute\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhen = \"input.amount > 5\"\n\
         [[agents.a.policy]]\nname = \"large\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhere = [{{ argument = \"/amount\", above = 10 }}]\nreason = \"Too much.\"\n\
         [[agents.a.policy]]\nname = \"larger\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhere = [{{ argument = \"/amount\", above = 20 }}]\nreason = \"Far too much.\"\n\
         [[agents.a.policy]]\nname = \"weekly\"\nrule = \"limit\"\ntools = [\"pay\"]\ncalls = 9\nwithin = \"7d\"\nreason = \"Enough for a week.\"\n\
         [agents.b.tools.find]\ndescription = \"{words}\"\neffect = \"read\"\n\
         [gateway]\nlisten = \"0.0.0.0:7070\"\n"
    );
    project.write("project/toolgate.toml", &config);
    let (_, json, stderr) = project.run(&["lint", "--format", "json"], "");
    let found: Value = serde_json::from_str(&json).unwrap_or_else(|_| panic!("{json}{stderr}"));
    let codes: std::collections::BTreeSet<&str> = found["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| finding["code"].as_str().unwrap())
        .collect();
    // The other three codes need an invalid file, a ledger or an upstream.
    let expected = [
        "dead_rule",
        "inlined_twice",
        "never_true",
        "open_listener",
        "ordering_unenforced",
        "ordering_untold",
        "overlap",
        "short_retention",
        "silent_rule",
        "thin_description",
        "too_many_tools",
        "unknown_keyword",
        "unknown_secret",
    ];
    assert_eq!(codes, expected.into_iter().collect(), "{json}");
    // A reason of one or two words is a finding.
    let short = |rule: &str| {
        json.contains(&format!("the reason of the rule `{rule}` is too short to act on"))
    };
    assert_eq!(["vain", "large", "larger"].map(short), [true, true, false], "{json}");
    // Findings are ordered by line.
    let lines = found["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| finding["place"]["line"].as_u64().unwrap_or_default());
    assert!(lines.is_sorted(), "{json}");
}

#[test]
fn lint_fixes_condition_no_argument_can_satisfy() {
    let project = TestProject::new();
    let config = r#"
[tools.close]
description = """Close a case.
Use it when the customer agrees.
A case that is closed stays closed.
Nothing comes before it."""
input = { type = "object", properties = { status = { enum = ["open", "closed"] }, amount = { type = "number", minimum = 0, maximum = 100 } } }

[[policy]]
name = "vain"
rule = "deny"
tools = ["close"]
where = [
  { argument = "/status", in = ["open", "closd"] },
  { argument = "/amount", below = 0 },
]
when = 'input.amount > 5 || input.status == "gone"'
reason = "Leave it as it is."
"#;
    let line = |words: &str| config.lines().position(|line| line.contains(words)).unwrap() + 1;
    let found = || {
        let (code, json, stderr) = project.run(&["lint", "--format", "json"], "");
        assert_eq!(code, 0, "warnings must not fail: {json}{stderr}");
        let found: Value = serde_json::from_str(&json).unwrap_or_else(|_| panic!("{json}{stderr}"));
        let lines = found["findings"].as_array().unwrap().iter().map(|finding| {
            format!(
                "{} {}: {} ({}) {}",
                finding["place"]["line"],
                finding["code"],
                finding["message"],
                finding["help"],
                finding["fix"]
            )
        });
        lines.collect::<Vec<_>>()
    };
    project.write("project/toolgate.toml", config);
    let vain = [
        format!(
            r#"{} "never_true": "`/status` of `close` is never \"closd\"" ("did you mean `closed`?") "\"closed\"""#,
            line("closd")
        ),
        format!(
            r#"{} "never_true": "`/amount` of `close` is never below 0" ("allowed by the schema: between 0 and 100") null"#,
            line("below")
        ),
        format!(
            r#"{} "never_true": "this can never be true" ("allowed by the schema: one of \"open\", \"closed\"") null"#,
            line("gone")
        ),
    ];
    assert_eq!(found(), vain);
    project.run(&["lint", "--fix"], "");
    assert_eq!(project.read("project/toolgate.toml"), config.replace("\"closd\"", "\"closed\""));
    assert_eq!(found(), vain[1..]);
    let with_exception = format!(
        "lint = [{{ allow = \"never_true\", of = \"vain\", reason = \"they are coming\" }}]\n{config}"
    );
    project.write("project/toolgate.toml", &with_exception);
    assert_eq!(found(), Vec::<String>::new());
}

#[test]
fn lint_reports_public_gateway_without_authentication() {
    let project = TestProject::new();
    let tool = "[tools.look]\nkind = \"client\"\neffect = \"read\"\n";
    let digest = "0".repeat(64);
    let token = format!("tokens = [{{ principal = \"ci\", sha256 = \"{digest}\" }}]");
    let jwt = "jwt = { issuer = \"https://a.example/\", audience = \"b\", keys = \"keys.json\" }";
    for (listen, settings, is_found) in [
        ("0.0.0.0:7070", "", true),
        ("[::]:7070", "hosts = [\"gate.example.com\"]", true),
        ("127.0.0.1:7070", "", false),
        ("[::1]:7070", "", false),
        ("0.0.0.0:7070", token.as_str(), false),
        ("0.0.0.0:7070", jwt, false),
    ] {
        project.write(
            "project/toolgate.toml",
            &format!("{tool}[gateway]\nlisten = \"{listen}\"\n{settings}\n"),
        );
        let output = project.masked_output(&["lint"], "");
        let expected = match is_found {
            true => format!(
                "exit 1\nerror: {listen} is reachable from other machines, and no token is required [open_listener]\n --> toolgate.toml:5:10\n"
            ),
            false => "exit 0\nno findings\n".to_owned(),
        };
        assert!(output.starts_with(&expected), "{listen} {settings}: {output}");
        // The configuration still loads.
        assert_eq!(
            project.run(&["check", "--config", "toolgate.toml", "{\"tool\": \"look\"}"], "").0,
            0,
            "{listen} {settings}"
        );
    }
    let exception = "lint = [{ allow = \"open_listener\", of = \"gateway\", reason = \"only hooks read this file\" }]\n";
    project.write(
        "project/toolgate.toml",
        &format!("{exception}{tool}[gateway]\nlisten = \"0.0.0.0:7070\"\n"),
    );
    assert_eq!(project.masked_output(&["lint"], ""), "exit 0\nno findings\n");
}

#[test]
fn lint_reports_agent_that_denies_every_call() {
    let project = TestProject::new();
    let tool = "[tools.look]\ndescription = \"a\\nb\\nc\\nd\"\neffect = \"read\"\n";
    for (head, place) in [
        ("principals = []", Some("1:14")),
        ("limits = { session = { calls = 0 } }", Some("1:32")),
        ("limits = { principal = { calls = 0 } }", Some("1:34")),
        ("limits = { rate = { calls = 0, per = \"1s\" } }", Some("1:29")),
        ("principals = [\"ann\"]\nlimits = { session = { calls = 1 } }", None),
    ] {
        project.write("project/toolgate.toml", &format!("{head}\n{tool}"));
        let output = project.masked_output(&["lint"], "");
        let expected = place.map_or_else(
            || "exit 0\nno findings\n".to_owned(),
            |place| format!("exit 0\nwarning: the agent `default` refuses every call [dead_rule]\n --> toolgate.toml:{place}\n"),
        );
        assert!(output.starts_with(&expected), "{head}: {output}");
    }
}

#[test]
fn lint_fix_changes_only_unambiguous_names() {
    let project = TestProject::new();
    let config = r#"
[tools.pay]
description = "Pays."
input = { type = "object", properties = { amount = { type = "number" }, order = { type = "object", properties = { amount = { type = "number" } } } } }

[[policy]]
name = "short"
rule = "deny"
tools = ["pay"]
where = [{ argument = "/amuont", above = 5 }]

[[policy]]
name = "long"
rule = "deny"
tools = ["pay"]
where = [{ argument = "/order/amuont", above = 5 }]

[[policy]]
name = "elsewhere"
rule = "deny"
tools = ["pay"]
where = [{ argument = "/ordr/amount", above = 5 }]
"#;
    project.write("project/toolgate.toml", config);
    project.run(&["lint", "--fix"], "");
    // In a longer path several parts may be misspelled, so a person must fix it.
    assert_eq!(project.read("project/toolgate.toml"), config.replace("\"/amuont\"", "\"/amount\""));
    // Values and other keys are suggestions, because a fix could allow more calls.
    let pay = "[tools.pay]\ninput = { type = \"object\", properties = { amount = { type = \"number\" } } }\n";
    let rule = "[[policy]]\nname = \"r\"\nrule = \"deny\"\ntools = [\"pay\"]\n";
    for (wrong, help) in [
        (format!("{pay}policy = \"deny\"\n"), "the only value is `open`"),
        (format!("{pay}policy = \"opn\"\n"), "did you mean `open`?"),
        (format!("{pay}effect = \"reads\"\n"), "did you mean `read`?"),
        (format!("{pay}\"effect\" = \"reads\"\n"), "did you mean `read`?"),
        (
            format!("{pay}{}", rule.replace("\"deny\"", "\"allow\"")),
            "expected one of `require`, `deny`, ",
        ),
        (
            format!("{pay}{}any_off = [\"pay\"]\n", rule.replace("\"deny\"", "\"require\"")),
            "did you mean `any_of`?",
        ),
        (
            format!("{pay}{}all_of = [\"pay\"]\n", rule.replace("\"deny\"", "\"require\"")),
            "did you mean `any_of`?",
        ),
        (
            format!("{pay}{rule}when = \"amount > 10\"\n"),
            "write an argument as `input.amount`; the variables are `input`",
        ),
        (
            format!("{pay}{rule}when = \"tools > 10\"\n"),
            "did you mean `tool`? If not, write an argument as `input.tools`",
        ),
        (format!("{pay}{rule}after = {{ pay = [\"pay\"] }}\n"), "did you mean `category`?"),
        (format!("{pay}[gateway]\nport = 7070\n"), "did you mean `rate`?"),
    ] {
        project.write("project/toolgate.toml", &wrong);
        let output = project.masked_output(&["lint", "--fix"], "");
        assert!(output.starts_with("exit 1\nerror") && output.contains(help), "{wrong}: {output}");
        assert_eq!(project.read("project/toolgate.toml"), wrong);
    }
}

#[test]
fn lint_reports_rarely_used_tool_from_ledger() {
    let project = TestProject::new();
    let tool = |name: &str| {
        format!("[tools.{name}]\ndescription = \"a\\nb\\nc {name}\\nd\"\neffect = \"read\"\n")
    };
    project.write(
        "project/toolgate.toml",
        &format!("store = \"ledger.db\"\n{}{}", tool("often"), tool("seldom")),
    );
    for n in 0..25 {
        let tool = if n == 0 { "seldom" } else { "often" };
        let event = serde_json::json!({"hook_event_name": "PreToolUse", "session_id": format!("s{n}"), "tool_name": tool, "tool_input": {}, "tool_use_id": "t"});
        let session_end =
            serde_json::json!({"hook_event_name": "SessionEnd", "session_id": format!("s{n}")});
        for event in [event, session_end] {
            assert_eq!(
                project.run(&["hook", "--config", "toolgate.toml"], &event.to_string()).0,
                0
            );
        }
    }
    let output = project.masked_output(&["lint", "--store", "ledger.db"], "");
    assert!(
        output.contains("`seldom` was used in 1 of 25 sessions [rarely_used]")
            && !output.contains("`often` was"),
        "{output}"
    );
}
