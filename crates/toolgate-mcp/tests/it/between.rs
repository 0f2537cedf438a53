//! What is said between a question and its answer, in both directions.

use serde_json::{Value, json};

use crate::entering::{Older, plain};
use crate::support::{Gate, fixture};

/// A gateway before the fixture that does as it is told, and where that leaves its marks.
async fn ill() -> (Gate, tempfile::TempDir) {
    let home = tempfile::tempdir().unwrap();
    let config = format!(
        "[upstreams.ill]\ncommand = {}\nargs = [\"--ill\"]\nprefix = \"\"\nundeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}\n",
        json!(fixture()),
        json!(home.path().join("marks"))
    );
    (Gate::open(&config).await, home)
}

/// The call that leaves this mark, and goes on so.
fn mark(key: &str, how: &str) -> Value {
    json!({"name": "mark", "arguments": {"key": key, "how": how}})
}

#[tokio::test(flavor = "multi_thread")]
async fn no_client_answers_in_the_name_of_toolgate() {
    let (gate, home) = ill().await;
    let said = json!({"action": "accept", "content": {"name": "x"}, "_meta": {"toolgate/approval": "mine", "own": 1}});
    let heard = || {
        let marks = std::fs::read_to_string(home.path().join("marks")).unwrap();
        serde_json::from_str::<Value>(marks.lines().last().unwrap()).unwrap()
    };
    let expected = json!({"action": "accept", "content": {"name": "x"}, "_meta": {"own": 1}});
    let mut older = Older::greet(&plain(), &gate.url, json!({"elicitation": {}})).await;
    let call = older.begin("tools/call", &mark("older", "asks"));
    let question = older.ears.hear(|said| said["method"] == "elicitation/create").await;
    older.say(&json!({"jsonrpc": "2.0", "id": question["id"], "result": said}));
    let answer = older.answer_to(call).await;
    assert_eq!(answer["result"]["structuredContent"], json!({"done": true}), "{answer}");
    assert_eq!(heard(), expected);
    let newer = gate.client().in_session("s").who_can(json!({"elicitation": {}}));
    let asked = newer.ask("tools/call", mark("newer", "asks")).await.1;
    let mut again = mark("newer", "asks");
    again["requestState"] = asked["result"]["requestState"].clone();
    again["inputResponses"] = json!({"input": said});
    let answer = newer.ask("tools/call", again).await.1;
    assert_eq!(answer["result"]["structuredContent"], json!({"done": true}), "{asked} {answer}");
    assert_eq!(heard(), expected);
    gate.end().await;
}
