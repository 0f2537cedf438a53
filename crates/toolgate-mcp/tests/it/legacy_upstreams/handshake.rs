//! How upstreams of earlier revisions are greeted.

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use super::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
    talk_tool_list,
};
use crate::support::TestGateway;

/// One that hangs up on whoever asks in the words of the newest revision, and talks to nobody who
/// names one that has no such greeting.
#[tokio::test(flavor = "multi_thread")]
async fn handshake_falls_back_to_supported_revision() {
    let address = serve_connections(move |mut stream| async move {
        let Some((head, asked)) = read_request(&mut stream).await else { return };
        let known = ["2025-11-25", "2025-06-18", "2025-03-26"].map(Value::from);
        let said = match asked["method"].as_str().unwrap_or_default() {
            "server/discover" => return,
            "initialize" if known.contains(&asked["params"]["protocolVersion"]) => {
                json_rpc_result(&asked, initialize_result())
            }
            "initialize" => {
                let error = json!({"code": -32602, "message": "Unsupported protocol version"});
                http_response(
                    "200 OK",
                    "application/json",
                    &json!({"jsonrpc": "2.0", "id": asked["id"], "error": error}).to_string(),
                )
            }
            "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
            "tools/list" => json_rpc_result(&asked, talk_tool_list()),
            "tools/call" => {
                json_rpc_result(&asked, json!({"content": [{"type": "text", "text": "done"}]}))
            }
            _ => http_response("202 Accepted", "text/plain", ""),
        };
        let _ = stream.write_all(said.as_bytes()).await;
    })
    .await;
    let gate = TestGateway::open(&format!(
        "[upstreams.strict]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n"
    ))
    .await;
    assert_eq!(gate.client().in_session("s").call_code("talk", json!({})).await, "ok");
    gate.shut_down().await;
}
