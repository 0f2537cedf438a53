//! Tests how the hook maps the tool names of clients, and undeclared tools.

use serde_json::{Value, json};

use super::TestProject;
use crate::output_snapshots::CODER_CONFIG;

#[test]
fn undeclared_tool_is_asked_and_its_result_recorded() {
    let project =
        TestProject::with_config(&format!("{}\n[client]\nundeclared = \"ask\"\n", CODER_CONFIG));
    let send_event = |name: &str, fields: Value| {
        let mut event = json!({"hook_event_name": name, "session_id": "s1", "tool_name": "mcp__x__y", "tool_use_id": "u1", "tool_input": {"a": 1}});
        event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        project.run(&["hook", "--config", "toolgate.toml"], &event.to_string())
    };
    for _ in 0..2 {
        let (code, stdout, _) = send_event("PreToolUse", json!({}));
        assert!(
            code == 0
                && stdout.contains("\"ask\"")
                && stdout.contains("This tool is not declared. To declare it, add `[tools.mcp__x__y]` to the configuration."),
            "{stdout}"
        );
        assert_eq!(
            send_event("PostToolUse", json!({"tool_response": {"done": true}})),
            (0, "{}\n".to_owned(), String::new())
        );
    }
    // An undeclared tool cannot access the state of toolgate either.
    let path =
        json!({"tool_input": {"path": project.path("project/ledger.db")}, "tool_use_id": "u2"});
    let (_, stdout, _) = send_event("PreToolUse", path);
    assert!(stdout.contains("\"deny\"") && stdout.contains("toolgate's own state"), "{stdout}");
    let rows = project.run(&["audit", "query", "--json"], "").1;
    let decisions: Vec<String> = rows
        .lines()
        .map(|row| {
            serde_json::from_str::<Value>(row).unwrap()["row"]["decision"]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    assert_eq!(decisions, ["succeeded", "succeeded", "refused"], "{rows}");
    let first: Value = serde_json::from_str(rows.lines().next().unwrap()).unwrap();
    let (_, explanation, stderr) =
        project.run(&["explain", first["row"]["call"].as_str().unwrap()], "");
    assert!(
        explanation.contains("left to the client of ") && !explanation.contains("approved by"),
        "{explanation}{stderr}"
    );
}

#[test]
fn long_tool_names_stay_distinct_after_truncation() {
    let project =
        TestProject::with_config(&format!("{}\n[client]\nundeclared = \"ask\"\n", CODER_CONFIG));
    let long_name = format!("mcp__server__{}", "a".repeat(70));
    let mut names = Vec::new();
    for name in [long_name.clone(), format!("{long_name}b")] {
        let event = json!({"hook_event_name": "PreToolUse", "session_id": "s1", "tool_name": name, "tool_use_id": name, "tool_input": {}});
        let (code, stdout, stderr) =
            project.run(&["hook", "--config", "toolgate.toml"], &event.to_string());
        assert!(code == 0 && stdout.contains("\"ask\""), "{stdout}{stderr}");
        let event = json!({"hook_event_name": "PostToolUse", "session_id": "s1", "tool_name": name, "tool_use_id": name, "tool_input": {}, "tool_response": {}});
        project.run(&["hook", "--config", "toolgate.toml"], &event.to_string());
    }
    for row in project.run(&["audit", "query", "--json"], "").1.lines() {
        names.push(
            serde_json::from_str::<Value>(row).unwrap()["row"]["tool"].as_str().unwrap().to_owned(),
        );
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 2, "{names:?}");
}

#[test]
fn similar_client_tool_names_stay_distinct() {
    let declared = |name: &str| {
        format!("[tools.{name}]\nkind = \"client\"\neffect = \"read\"\nskip_client_prompt = true\n")
    };
    // The name that a configuration must declare for `READ.ALL`.
    let derived = toolgate::tool::name::tool_name_from_client("READ.ALL");
    let config =
        format!("{}\n[client]\nundeclared = \"ask\"\n{}", CODER_CONFIG, declared("read_all"));
    let without_derived = TestProject::with_config(&config);
    let with_derived = TestProject::with_config(&format!("{config}{}", declared(&derived)));
    let ask = |project: &TestProject, name: &str| {
        let mut event = json!({"hook_event_name": "PreToolUse", "session_id": "s1", "tool_name": name, "tool_use_id": name});
        event["tool_input"] = json!({"of": name});
        let (code, stdout, stderr) =
            project.run(&["hook", "--config", "toolgate.toml"], &event.to_string());
        assert_eq!(code, 0, "{stderr}");
        let answer: Value = serde_json::from_str(&stdout).unwrap();
        answer["hookSpecificOutput"]["permissionDecision"].as_str().unwrap_or("none").to_owned()
    };
    for (name, expected_without, expected_with) in [
        ("read_all", "allow", "allow"),
        ("Read_All", "allow", "allow"),
        ("READ.ALL", "ask", "allow"),
        ("read.all", "ask", "ask"),
        ("read all", "ask", "ask"),
        ("read\u{2024}all", "ask", "ask"),
        // A client tool with the derived name is another tool.
        (derived.as_str(), "ask", "ask"),
        ("..", "ask", "ask"),
    ] {
        assert_eq!(
            (ask(&without_derived, name), ask(&with_derived, name)),
            (expected_without.to_owned(), expected_with.to_owned()),
            "{name}"
        );
    }
    // `check` decides like the hook. If a file declares the client's name, the error suggests the
    // derived name.
    let output = with_derived.masked_output(
        &["check", "--config", "toolgate.toml", r#"{"tool": "READ.ALL", "arguments": {}}"#],
        "",
    );
    assert!(output.contains(&derived) && !output.contains("unknown_tool"), "{output}");
    with_derived.write("project/named.toml", &declared("\"READ.ALL\""));
    let output = with_derived.masked_output(
        &["check", "--config", "named.toml", r#"{"tool": "bash", "arguments": {}}"#],
        "",
    );
    assert!(output.contains(&format!("write `{derived}`")), "{output}");
    // The canary of `doctor` uses the client's name of a tool.
    with_derived.write(
        "project/two.toml",
        &format!("store = \"two.db\"\n{}{}", declared(&derived), declared("write_all")),
    );
    let report = with_derived.masked_output(&["doctor", "--config", "two.toml"], "");
    assert!(report.contains("✓ canary"), "{report}");
}
