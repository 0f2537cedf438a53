//! Tools that cannot be pinned.

use serde_json::json;
use toolgate_mcp::Status;

use crate::faults::script;
use crate::support::{Gate, fixture, kill, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_new_tool_that_cannot_be_pinned_is_not_offered_until_it_can_be() {
    let home = tempfile::tempdir().unwrap();
    let flags = home.path().join("flags");
    std::fs::write(&flags, "").unwrap();
    let run = script(home.path(), "server", &format!("exec {} --stdio --tools 61 $(cat {})", fixture().display(), flags.display()));
    let text = format!("[upstreams.fix]\ncommand = {run}\nprefix = \"\"\nundeclared = \"read\"\n");
    let gate = Gate::open(&text).await;
    let client = gate.client();
    assert_eq!(client.in_session("a").code("sleep", json!({"ms": 1})).await, "ok");
    // No directory can be made where there is a file.
    let aside = gate.home.path().join("aside");
    std::fs::rename(gate.pins(), &aside).unwrap();
    std::fs::write(gate.pins(), "").unwrap();
    std::fs::write(&flags, "--version-two").unwrap();
    kill(61);
    let health = || gate.gateway.health().remove(0);
    let is_up = || matches!(health().status, Status::Up { .. });
    until("it is there again, and what is new is seen", async || health().pin_write_error().is_some() && is_up()).await;
    let held = serde_json::to_value(health().held).unwrap();
    let why = |tool: &str| held.as_array().unwrap().iter().find(|one| one["tool"] == tool).map(|one| one["why"].clone());
    assert!(why("extra").unwrap()[0]["why"].as_str().unwrap().contains("fix.json"), "{held}");
    assert_eq!(why("extra").unwrap()[0]["kind"], "unwritten", "{held}");
    gate.reload(&text).await.unwrap();
    assert!(!client.tools().await.contains(&"extra".to_owned()));
    assert_eq!(client.in_session("b").code("extra", json!({})).await, "unknown_tool");
    assert_eq!(client.in_session("b").code("sleep", json!({"ms": 1})).await, "ok");
    // Now it can be.
    std::fs::remove_file(gate.pins()).unwrap();
    std::fs::rename(&aside, gate.pins()).unwrap();
    gate.reload(&text).await.unwrap();
    assert!(health().pin_write_error().is_none());
    assert_eq!(client.in_session("c").code("extra", json!({})).await, "ok");
    gate.end().await;
}
