//! Tests that the secrets of quarantined tools stay hidden.

use serde_json::json;
use toolgate::{Toolgate, ToolgateBuilder};

use super::{build_with_tools, config_with_upstream, remote_tool};

/// Checks the secrets of a quarantined tool, because its refused calls are recorded.
#[tokio::test]
async fn secret_of_quarantined_tool_is_redacted_in_ledger() {
    let rule = "[[policy]]\nname = \"cap\"\nrule = \"deny\"\ntools = [\"x\"]\nwhere = [{ argument = \"/amuont\", above = 5 }]\n";
    let input = json!({"type": "object", "properties": {"amount": {"type": "number"}, "key": {"type": "string", "writeOnly": true}}});
    let (agents, unusable) = build_with_tools(
        &config_with_upstream("", rule),
        vec![remote_tool("x", input), remote_tool("y", json!({"type": "object"}))],
        true,
    )
    .unwrap();
    assert_eq!(unusable.len(), 1);
    let spec = agents[0].tools().find(|spec| spec.name() == "x").unwrap();
    assert!(serde_json::to_string(spec).unwrap().contains("/key"), "{spec:?}");
}

/// Checks that all arguments count as secret if the faulty declaration concerns a secret.
#[tokio::test]
async fn arguments_are_redacted_if_secrets_are_unknown() {
    let input = json!({"type": "object", "properties": {"id": {"type": "string", "writeOnly": true}, "key": {"type": "string"}}});
    let text = config_with_upstream("effect = \"read\"\nentities = { customer = \"/id\" }", "");
    let (agents, _) = build_with_tools(
        &text,
        vec![remote_tool("x", input), remote_tool("y", json!({"type": "object"}))],
        true,
    )
    .unwrap();
    let gate =
        agents.into_iter().fold(Toolgate::builder(), ToolgateBuilder::agent).build().unwrap();
    let session = gate.session("default", "alice", "s");
    let answer = session.call("x", json!({"id": "hunter2", "key": "hunter3"})).await;
    assert_eq!(answer.outcome.error().map(|error| &*error.code), Some("definition_changed"));
    let rows = serde_json::to_string(&session.rows().await.unwrap()).unwrap();
    assert!(rows.contains("[redacted ") && !rows.contains("hunter"), "{rows}");
}

/// Checks counter names and refusals, because both can contain arguments.
#[tokio::test]
async fn rule_messages_hide_arguments_with_unknown_secrets() {
    let input =
        json!({"type": "object", "properties": {"id": {"type": "string", "writeOnly": true}}});
    for rule in [
        "rule = \"limit\"\ncalls = 3\nper = \"/id\"",
        "rule = \"deny\"\nwhere = [{ argument = \"/id\", in = [\"hunter2\"] }]",
    ] {
        let limit = "[[policy]]\nname = \"most\"\nrule = \"limit\"\ntools = [\"x\"]\ncalls = 3\nper = \"/id\"\n";
        let rules = format!("{limit}[[policy]]\nname = \"cap\"\ntools = [\"x\"]\n{rule}\n");
        let (agents, _) = build_with_tools(
            &config_with_upstream("", &rules),
            vec![remote_tool("x", input.clone()), remote_tool("y", json!({"type": "object"}))],
            true,
        )
        .unwrap();
        let gate =
            agents.into_iter().fold(Toolgate::builder(), ToolgateBuilder::agent).build().unwrap();
        let session = gate.session("default", "alice", "s");
        let mut written = String::new();
        for arguments in [json!("hunter2"), json!(["hunter2"]), json!({"id": "hunter2"})] {
            let answer = session.call("x", arguments).await;
            assert_eq!(
                answer.outcome.error().map(|error| &*error.code),
                Some("definition_changed"),
                "{rule}"
            );
            written += &format!("{answer:?} ");
        }
        written += &format!("{:?}", session.rows().await.unwrap());
        assert!(!written.contains("hunter2"), "{rule}: {written}");
    }
}
