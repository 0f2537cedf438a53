//! Tests `check --tests`, which runs the tests of a configuration.

use assert_cmd::Command;
use serde_json::{Value, json};

use super::{CONFIG, check};
use crate::hook::TestProject;

const TESTS: &str = r#"
[[test]]
name = "a refund needs a verified customer"
call = { tool = "issue_refund", arguments = { customer_id = "C-1", amount = 20 } }
expect = "deny"
rule = "verified"
code = "prerequisite_missing"

[[test]]
name = "and gets one"
given = [{ tool = "verify_customer", arguments = { customer_id = "C-1" }, result = { active = true } }]
call = { tool = "issue_refund", arguments = { customer_id = "C-1", amount = 20 } }
expect = "allow"

[[test]]
name = "large ones are for a person"
given = [{ tool = "verify_customer", arguments = { customer_id = "C-1" }, result = { active = true } }]
call = { tool = "issue_refund", arguments = { customer_id = "C-1", amount = 450 } }
expect = "ask"
"#;

fn check_tests(tests: &str, extra_args: &[&str]) -> (i32, String, String) {
    run_config_tests(CONFIG, tests, extra_args)
}

pub(super) fn run_config_tests(
    config: &str,
    tests: &str,
    extra_args: &[&str],
) -> (i32, String, String) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("toolgate.toml"), config).unwrap();
    std::fs::write(directory.path().join("tests.toml"), tests).unwrap();
    let mut command = Command::cargo_bin("toolgate").unwrap();
    let output = command
        .args(["check", "--tests", "tests.toml"])
        .args(extra_args)
        .current_dir(directory.path())
        .env_clear()
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn check_fails_without_calls_or_tests() {
    for output in [
        check(CONFIG, " \n\n", &[]),
        check_tests("", &[]),
        check_tests("# none yet\n", &["--json"]),
    ] {
        assert!(
            output.0 == 2 && output.1.is_empty() && output.2.contains("so nothing was checked"),
            "{output:?}"
        );
    }
}

#[test]
fn check_runs_config_tests() {
    let (code, stdout, stderr) = check_tests(TESTS, &[]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    insta::assert_snapshot!(stdout);
    let (code, stdout, _) =
        check_tests(&TESTS.replace("expect = \"ask\"", "expect = \"deny\"\nrule = \"daily\""), &[]);
    assert_eq!(code, 1);
    insta::assert_snapshot!(stdout);
    let (_, stdout, _) = check_tests(TESTS, &["--json"]);
    let summary: Value = serde_json::from_str(stdout.trim()).unwrap();
    assert_eq!(
        summary,
        json!({"summary": {"passed": 3, "failed": 0, "rules": 3, "never_spoke": ["daily"]}})
    );
    let (code, _, stderr) = check_tests(
        &TESTS
            .replace("expect = \"allow\"", "expct = \"allow\"")
            .replace("expect = \"ask\"", "expect = \"aks\""),
        &[],
    );
    assert_eq!(code, 2);
    insta::assert_snapshot!(stderr);
}

#[test]
fn config_test_with_invalid_call_or_result_fails() {
    let config = CONFIG.replace(
        "proves = [\"/active\"]",
        "proves = [\"/active\"]\noutput = { type = \"object\", properties = { active = { type = \"boolean\" } }, required = [\"active\"] }",
    );
    let refund =
        "call = { tool = \"issue_refund\", arguments = { customer_id = \"C-1\", amount = 20 } }";
    let verify = "given = [{ tool = \"verify_customer\", arguments = { customer_id = \"C-1\" }, result = { active = false } }]";
    let test = format!("[[test]]\nname = \"t\"\n{verify}\n{refund}\nexpect = \"deny\"\n");
    for (from, to, why) in [
        (
            "issue_refund",
            "issue_refnd",
            Some("test `t`: the call is refused before any rule: unknown_tool:"),
        ),
        (
            "amount = 20",
            "amuont = 20",
            Some("if this is intended, add `code = \"invalid_arguments\"`"),
        ),
        (
            "active = false",
            "actve = false",
            Some("test `t`: the result of call 1 of `given` does not count: invalid_result: "),
        ),
        (
            "\"C-1\" }, result = { active = false }",
            "7 }",
            Some("test `t`: call 1 of `given` is refused: invalid_arguments: "),
        ),
        ("expect = \"deny\"", "expect = \"deny\"\nrule = \"verified\"", None),
        (
            "amount = 20 } }\nexpect = \"deny\"",
            "amuont = 20 } }\nexpect = \"deny\"\ncode = \"invalid_arguments\"",
            None,
        ),
        // A given call without a result has unknown evidence.
        (", result = { active = false }", "", None),
    ] {
        assert!(test.contains(from), "{from}");
        let (code, stdout, stderr) = run_config_tests(&config, &test.replace(from, to), &[]);
        assert_eq!((code, stderr.as_str()), (i32::from(why.is_some()), ""), "{to}: {stdout}");
        assert!(why.is_none_or(|why| stdout.contains(why)), "{to}: {stdout}");
    }
}

#[test]
fn config_test_fails_if_given_call_is_refused() {
    let project = TestProject::with_config(
        "name = \"desk\"\n[tools.verify]\neffect = \"read\"\n\
         input = { type = \"object\", properties = { id = { type = \"string\" } }, required = [\"id\"] }\nentities = { id = \"/id\" }\n\
         [tools.pay]\ninput = { type = \"object\", properties = { id = { type = \"string\" } }, required = [\"id\"] }\n\
         [[policy]]\nname = \"verified\"\nrule = \"require\"\ntools = [\"pay\"]\nany_of = [\"verify\"]\nsame = { id = \"/id\" }\n",
    );
    let test = |given_call: &str, expect: &str| {
        let text = format!(
            "[[test]]\nname = \"t\"\ngiven = [{{ tool = \"verify\", {given_call} }}]\ncall = {{ tool = \"pay\", arguments = {{ id = \"C\" }} }}\nexpect = \"{expect}\"\n"
        );
        project.write("project/tests.toml", &text);
        let (code, stdout, stderr) =
            project.run(&["check", "--config", "toolgate.toml", "--tests", "tests.toml"], "");
        (code, stdout + &stderr)
    };
    let (code, output) = test("arguments = { id = \"C\" }, result = {}", "allow");
    assert_eq!(code, 0, "{output}");
    let (code, output) = test("arguments = { ident = \"C\" }, result = {}", "deny");
    assert!(
        code == 1 && output.contains("call 1 of `given` is refused: invalid_arguments"),
        "{output}"
    );
    let (code, output) = test("arguments = { ident = \"C\" }, refused = true", "deny");
    assert_eq!(code, 0, "{output}");
    let (code, output) = test("arguments = { id = \"C\" }, result = {}, refused = true", "allow");
    assert!(code == 1 && output.contains("is allowed"), "{output}");
}
