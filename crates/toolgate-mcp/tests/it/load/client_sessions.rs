//! Tests that the gateway removes sessions of clients that end.

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::alive_tasks;
use crate::support::{ACCEPT_JSON_OR_EVENTS, CALC_TOOL_CONFIG, TestGateway, wait_until};

/// Opens a session of an earlier revision and makes a call. Returns the session id.
async fn open_legacy_session(http: &reqwest::Client, url: &str) -> String {
    let post = async |session: &str, body: Value| {
        let request = http.post(url).header("accept", ACCEPT_JSON_OR_EVENTS).json(&body);
        let request =
            if session.is_empty() { request } else { request.header("mcp-session-id", session) };
        request.send().await.unwrap()
    };
    let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}});
    let response =
        post("", json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}))
            .await;
    let session = response.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    response.text().await.unwrap();
    post(&session, json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))
        .await
        .text()
        .await
        .unwrap();
    let call = json!({"name": "calc", "arguments": {"expression": "20+1"}});
    let answer =
        post(&session, json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}))
            .await
            .text()
            .await
            .unwrap();
    assert!(answer.contains("\"isError\":false"), "{answer}");
    session
}

#[tokio::test(flavor = "multi_thread")]
async fn session_ended_by_client_is_removed() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    // Connections are not reused, so remaining tasks belong to the gateway.
    let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build().unwrap();
    let (url, before) = (format!("{}/mcp", gate.url), alive_tasks());
    let sessions: Vec<String> = join_all((0..64).map(|_| open_legacy_session(&http, &url))).await;
    assert!(alive_tasks() >= before + 64, "each session needs a task: {} {before}", alive_tasks());
    for session in &sessions {
        assert!(
            http.delete(&url)
                .header("mcp-session-id", session)
                .send()
                .await
                .unwrap()
                .status()
                .is_success()
        );
    }
    wait_until("the tasks have ended", async || alive_tasks() <= before + 4).await;
    let late = http.delete(&url).header("mcp-session-id", &sessions[0]).send().await.unwrap();
    assert_eq!(late.status().as_u16(), 404);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn open_session_ends_with_gateway() {
    let before = alive_tasks();
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build().unwrap();
    let url = format!("{}/mcp", gate.url);
    join_all((0..16).map(|_| open_legacy_session(&http, &url))).await;
    gate.shut_down().await;
    wait_until("the tasks have ended", async || alive_tasks() <= before + 2).await;
}
