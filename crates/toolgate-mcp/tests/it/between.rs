//! What is said between a question and its answer, in both directions.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::sync::Barrier;

use crate::entering::{Older, plain};
use crate::old::{about, answer, listen, request, result};
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

#[tokio::test(flavor = "multi_thread")]
async fn a_log_message_within_an_answer_is_for_whose_answer_that_is() {
    let both = Arc::new(Barrier::new(2));
    let address = listen(move |mut stream| {
        let both = Arc::clone(&both);
        async move {
            let Some((head, asked)) = request(&mut stream).await else { return };
            let schema = json!({"type": "object", "properties": {"who": {"type": "string"}}});
            let said = match asked["method"].as_str().unwrap_or_default() {
                "server/discover" => answer("404 No", "text/html", "<p>"),
                "" if head.starts_with("get ") => answer("405 No", "text/plain", ""),
                "initialize" => result(&asked, about()),
                "ping" => result(&asked, json!({})),
                "tools/list" => result(&asked, json!({"tools": [{"name": "talk", "description": "Talks.", "inputSchema": schema}]})),
                "tools/call" => {
                    // Both are under way when either says something.
                    both.wait().await;
                    let params = json!({"level": "error", "data": asked["params"]["arguments"]["who"], "_meta": {"own": 1}});
                    let word = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": params});
                    let done = json!({"jsonrpc": "2.0", "id": asked["id"], "result": {"content": [{"type": "text", "text": "done"}]}});
                    answer("200 OK", "text/event-stream", &format!("data: {word}\n\ndata: {done}\n\n"))
                }
                _ => answer("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
        }
    })
    .await;
    let gate = Gate::open(&format!("[upstreams.old]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n")).await;
    let mut clients = Vec::new();
    for who in ["one", "two"] {
        let mut client = Older::greet(&plain(), &gate.url, json!({})).await;
        let call = client.begin("tools/call", &json!({"name": "talk", "arguments": {"who": who}}));
        clients.push((who, client, call));
    }
    for (who, client, call) in &mut clients {
        let said = client.ears.hear(|said| said["method"] == "notifications/message").await;
        assert_eq!(said["params"]["data"], json!(who), "{said}");
        assert!(!said.to_string().contains("toolgate/"), "{said}");
        let answer = client.answer_to(*call).await;
        assert_eq!(answer["result"]["content"][0]["text"], "done", "{answer}");
    }
    gate.end().await;
}
