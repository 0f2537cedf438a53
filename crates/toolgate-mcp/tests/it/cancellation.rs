//! What is taken back is taken back everywhere: calls and prompts of clients, and questions of
//! upstreams.

use serde_json::{Value, json};

use crate::support::{TestGateway, fixture_path, wait_until};
use crate::tls_and_authentication::{LegacyHttpClient, http_client};

/// A gateway before the fixture, of the newest revision or of an older one, and the file in which
/// that says what it hears.
async fn gateway_with_logging_fixture(options: &str) -> (TestGateway, tempfile::TempDir) {
    let home = tempfile::tempdir().unwrap();
    let config = format!(
        "[upstreams.fix]\ncommand = {}\nargs = [{options}]\nprefix = \"\"\nundeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}\n",
        json!(fixture_path()),
        json!(home.path().join("heard"))
    );
    (TestGateway::open(&config).await, home)
}

async fn wait_for_fixture_line(home: &tempfile::TempDir, line: &str) {
    let heard = async || {
        std::fs::read_to_string(home.path().join("heard"))
            .is_ok_and(|said| said.lines().any(|one| one == line))
    };
    wait_until(line, heard).await;
}

fn cancellation(id: u64) -> Value {
    json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id, "reason": "the user has"}})
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
        wait_for_fixture_line(&home, "woken 60000").await;
        let prompt = client.start_request("prompts/get", &json!({"name": "slow"}));
        wait_for_fixture_line(&home, "prompt").await;
        client.send(&cancellation(prompt));
        wait_for_fixture_line(&home, "prompt taken back").await;
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
    let question = client.inbox.wait_for(|said| said["method"] == "elicitation/create").await;
    let token = question["params"]["_meta"]["progressToken"].clone();
    let progress = json!({"progressToken": token, "progress": 5.5, "message": "the user thinks"});
    client.send(&json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress}));
    // Of what nobody has asked for, nobody hears.
    let other = json!({"progressToken": "nobody's", "progress": 9});
    client.send(&json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": other}));
    wait_for_fixture_line(&home, "progress 5.5").await;
    let told = client.inbox.wait_for(|said| said["method"] == "notifications/cancelled").await;
    assert_eq!(told["params"]["requestId"], question["id"], "{told}");
    let answer = client.wait_for_answer(call).await;
    assert_eq!(
        answer["result"]["content"][0]["text"], "It was asked, and does not matter any more.",
        "{answer}"
    );
    assert!(!std::fs::read_to_string(home.path().join("heard")).unwrap().contains("progress 9"));
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
    let question = client.inbox.wait_for(|said| said["method"] == "elicitation/create").await;
    client.send(&cancellation(call));
    let told = client.inbox.wait_for(|said| said["method"] == "notifications/cancelled").await;
    assert_eq!(told["params"]["requestId"], question["id"], "{told}");
    gate.shut_down().await;
}
