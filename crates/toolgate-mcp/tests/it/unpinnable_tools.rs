//! Tests that tools without a stored pin are quarantined.

use serde_json::json;
use toolgate_mcp::UpstreamStatus;

use crate::support::{TestGateway, fixture_path, kill_processes_with_number, wait_until};
use crate::upstream_faults::write_script;

#[tokio::test(flavor = "multi_thread")]
async fn new_tool_is_hidden_until_it_can_be_pinned() {
    let home = tempfile::tempdir().unwrap();
    let flags = home.path().join("flags");
    std::fs::write(&flags, "").unwrap();
    let run = write_script(
        home.path(),
        "server",
        &format!("exec {} --stdio --tools 61 $(cat {})", fixture_path().display(), flags.display()),
    );
    let text = format!("[upstreams.fix]\ncommand = {run}\nprefix = \"\"\nundeclared = \"read\"\n");
    let gate = TestGateway::open(&text).await;
    let client = gate.client();
    assert_eq!(client.in_session("a").call_code("sleep", json!({"ms": 1})).await, "ok");
    // A file at the path of the pin directory prevents writes.
    let aside = gate.home.path().join("aside");
    std::fs::rename(gate.pins_dir(), &aside).unwrap();
    std::fs::write(gate.pins_dir(), "").unwrap();
    std::fs::write(&flags, "--version-two").unwrap();
    kill_processes_with_number(61);
    let health = || gate.gateway.health().remove(0);
    let is_up = || matches!(health().status, UpstreamStatus::Up { .. });
    wait_until("the upstream is up again and the new tool is detected", async || {
        health().pin_write_error().is_some() && is_up()
    })
    .await;
    let quarantined = serde_json::to_value(health().held).unwrap();
    let reasons = |tool: &str| {
        quarantined
            .as_array()
            .unwrap()
            .iter()
            .find(|change| change["tool"] == tool)
            .map(|change| change["why"].clone())
    };
    assert!(
        reasons("extra").unwrap()[0]["why"].as_str().unwrap().contains("fix.json"),
        "{quarantined}"
    );
    assert_eq!(reasons("extra").unwrap()[0]["kind"], "unwritten", "{quarantined}");
    gate.reload(&text).await.unwrap();
    assert!(!client.tool_names().await.contains(&"extra".to_owned()));
    assert_eq!(client.in_session("b").call_code("extra", json!({})).await, "unknown_tool");
    assert_eq!(client.in_session("b").call_code("sleep", json!({"ms": 1})).await, "ok");
    // The pins can be written again.
    std::fs::remove_file(gate.pins_dir()).unwrap();
    std::fs::rename(&aside, gate.pins_dir()).unwrap();
    gate.reload(&text).await.unwrap();
    assert!(health().pin_write_error().is_none());
    assert_eq!(client.in_session("c").call_code("extra", json!({})).await, "ok");
    gate.shut_down().await;
}
