//! Tests that cancellations of calls, prompts and questions reach the other side.

use serde_json::{Value, json};

use crate::legacy_http_client::LegacyHttpClient;
use crate::support::{TestGateway, fixture_path, http_client, wait_until};

/// Opens a gateway whose fixture logs requests to the file `log`. Options select the revision.
async fn gateway_with_logging_fixture(options: &str) -> (TestGateway, tempfile::TempDir) {
    let home = tempfile::tempdir().unwrap();
    let config = format!(
        "[upstreams.fix]\ncommand = {}\nargs = [{options}]\nprefix = \"\"\nundeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}\n",
        json!(fixture_path()),
        json!(home.path().join("log"))
    );
    (TestGateway::open(&config).await, home)
}

async fn wait_for_fixture_line(home: &tempfile::TempDir, line: &str) {
    let is_logged = async || {
        std::fs::read_to_string(home.path().join("log"))
            .is_ok_and(|log| log.lines().any(|logged| logged == line))
    };
    wait_until(&format!("the fixture logs `{line}`"), is_logged).await;
}

fn cancellation(id: u64) -> Value {
    json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id, "reason": "cancelled by the user"}})
}

#[tokio::test(flavor = "multi_thread")]
async fn cancellation_by_client_reaches_upstream() {
    for options in ["\"--stdio\"", "\"--stdio\", \"--older\""] {
        let (gate, home) = gateway_with_logging_fixture(options).await;
        let mut client = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
        let call = client
            .start_request("tools/call", &json!({"name": "sleep", "arguments": {"ms": 60_000}}));
        wait_for_fixture_line(&home, "sleep 60000").await;
        client.send(&cancellation(call));
        wait_for_fixture_line(&home, "cancelled sleep 60000").await;
        let prompt = client.start_request("prompts/get", &json!({"name": "slow"}));
        wait_for_fixture_line(&home, "prompt").await;
        client.send(&cancellation(prompt));
        wait_for_fixture_line(&home, "cancelled prompt").await;
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_elicitation_and_its_progress_are_forwarded() {
    let (gate, home) = gateway_with_logging_fixture("\"--stdio\", \"--older\"").await;
    let mut client =
        LegacyHttpClient::connect(&http_client(), &gate.url, json!({"elicitation": {}})).await;
    let call = client.start_request(
        "tools/call",
        &json!({"name": "ask_and_forget", "arguments": {"ms": 1_500}}),
    );
    let question = client.inbox.wait_for(|message| message["method"] == "elicitation/create").await;
    let token = question["params"]["_meta"]["progressToken"].clone();
    let progress = json!({"progressToken": token, "progress": 5.5, "message": "the user thinks"});
    client.send(&json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress}));
    // Progress with an unknown token is not forwarded.
    let unknown = json!({"progressToken": "unknown", "progress": 9});
    client.send(&json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": unknown}));
    wait_for_fixture_line(&home, "progress 5.5").await;
    let cancelled =
        client.inbox.wait_for(|message| message["method"] == "notifications/cancelled").await;
    assert_eq!(cancelled["params"]["requestId"], question["id"], "{cancelled}");
    let answer = client.wait_for_answer(call).await;
    assert_eq!(answer["result"]["content"][0]["text"], "The question was cancelled.", "{answer}");
    assert!(!std::fs::read_to_string(home.path().join("log")).unwrap().contains("progress 9"));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_call_cancels_its_elicitation() {
    let (gate, _home) = gateway_with_logging_fixture("\"--stdio\", \"--older\"").await;
    let mut client =
        LegacyHttpClient::connect(&http_client(), &gate.url, json!({"elicitation": {}})).await;
    let call = client.start_request(
        "tools/call",
        &json!({"name": "ask_and_forget", "arguments": {"ms": 60_000}}),
    );
    let question = client.inbox.wait_for(|message| message["method"] == "elicitation/create").await;
    client.send(&cancellation(call));
    let cancelled =
        client.inbox.wait_for(|message| message["method"] == "notifications/cancelled").await;
    assert_eq!(cancelled["params"]["requestId"], question["id"], "{cancelled}");
    gate.shut_down().await;
}
