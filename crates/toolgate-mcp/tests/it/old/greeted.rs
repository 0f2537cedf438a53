//! How upstreams of earlier revisions are greeted.

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use super::{about, answer, listen, request, result, tools};
use crate::support::Gate;

/// One that hangs up on whoever asks in the words of the newest revision, and talks to nobody who names one that has no such greeting.
#[tokio::test(flavor = "multi_thread")]
async fn who_takes_its_own_revisions_alone_is_greeted_with_one() {
    let address = listen(move |mut stream| async move {
        let Some((head, asked)) = request(&mut stream).await else { return };
        let known = ["2025-11-25", "2025-06-18", "2025-03-26"].map(Value::from);
        let said = match asked["method"].as_str().unwrap_or_default() {
            "server/discover" => return,
            "initialize" if known.contains(&asked["params"]["protocolVersion"]) => result(&asked, about()),
            "initialize" => {
                let error = json!({"code": -32602, "message": "Unsupported protocol version"});
                answer("200 OK", "application/json", &json!({"jsonrpc": "2.0", "id": asked["id"], "error": error}).to_string())
            }
            "" if head.starts_with("get ") => answer("405 No", "text/plain", ""),
            "tools/list" => result(&asked, tools()),
            "tools/call" => result(&asked, json!({"content": [{"type": "text", "text": "done"}]})),
            _ => answer("202 Accepted", "text/plain", ""),
        };
        let _ = stream.write_all(said.as_bytes()).await;
    })
    .await;
    let gate = Gate::open(&format!("[upstreams.strict]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n")).await;
    assert_eq!(gate.client().in_session("s").code("talk", json!({})).await, "ok");
    gate.end().await;
}
