//! What is taken back is taken back everywhere: calls and prompts of clients, and questions of upstreams.

use serde_json::{Value, json};

use crate::entering::{Older, plain};
use crate::support::{Gate, fixture, until};

/// A gateway before the fixture, of the newest revision or of an older one, and the file in which that says what it hears.
async fn gate(options: &str) -> (Gate, tempfile::TempDir) {
    let home = tempfile::tempdir().unwrap();
    let config = format!(
        "[upstreams.fix]\ncommand = {}\nargs = [{options}]\nprefix = \"\"\nundeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}\n",
        json!(fixture()),
        json!(home.path().join("heard"))
    );
    (Gate::open(&config).await, home)
}

async fn hears(home: &tempfile::TempDir, line: &str) {
    let heard = async || std::fs::read_to_string(home.path().join("heard")).is_ok_and(|said| said.lines().any(|one| one == line));
    until(line, heard).await;
}

fn taken_back(id: u64) -> Value {
    json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id, "reason": "the user has"}})
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_hears_of_what_its_client_takes_back() {
    for options in ["\"--stdio\"", "\"--stdio\", \"--older\""] {
        let (gate, home) = gate(options).await;
        let mut client = Older::greet(&plain(), &gate.url, json!({})).await;
        let call = client.begin("tools/call", &json!({"name": "sleep", "arguments": {"ms": 60_000}}));
        hears(&home, "sleep 60000").await;
        client.say(&taken_back(call));
        hears(&home, "woken 60000").await;
        let prompt = client.begin("prompts/get", &json!({"name": "slow"}));
        hears(&home, "prompt").await;
        client.say(&taken_back(prompt));
        hears(&home, "prompt taken back").await;
        gate.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_hears_of_a_question_that_is_taken_back_and_an_upstream_how_far_the_answer_is() {
    let (gate, home) = gate("\"--stdio\", \"--older\"").await;
    let mut client = Older::greet(&plain(), &gate.url, json!({"elicitation": {}})).await;
    let call = client.begin("tools/call", &json!({"name": "ask_and_forget", "arguments": {"ms": 1_500}}));
    let question = client.ears.hear(|said| said["method"] == "elicitation/create").await;
    let token = question["params"]["_meta"]["progressToken"].clone();
    let progress = json!({"progressToken": token, "progress": 5.5, "message": "the user thinks"});
    client.say(&json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress}));
    // Of what nobody has asked for, nobody hears.
    let other = json!({"progressToken": "nobody's", "progress": 9});
    client.say(&json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": other}));
    hears(&home, "progress 5.5").await;
    let told = client.ears.hear(|said| said["method"] == "notifications/cancelled").await;
    assert_eq!(told["params"]["requestId"], question["id"], "{told}");
    let answer = client.answer_to(call).await;
    assert_eq!(answer["result"]["content"][0]["text"], "It was asked, and does not matter any more.", "{answer}");
    assert!(!std::fs::read_to_string(home.path().join("heard")).unwrap().contains("progress 9"));
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whose_call_is_over_is_asked_no_more() {
    let (gate, _home) = gate("\"--stdio\", \"--older\"").await;
    let mut client = Older::greet(&plain(), &gate.url, json!({"elicitation": {}})).await;
    let call = client.begin("tools/call", &json!({"name": "ask_and_forget", "arguments": {"ms": 60_000}}));
    let question = client.ears.hear(|said| said["method"] == "elicitation/create").await;
    client.say(&taken_back(call));
    let told = client.ears.hear(|said| said["method"] == "notifications/cancelled").await;
    assert_eq!(told["params"]["requestId"], question["id"], "{told}");
    gate.end().await;
}
