//! Tests the handshake with upstreams of earlier revisions.

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use super::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
    talk_tool_list,
};
use crate::support::TestGateway;

/// The server closes the connection at a modern request, and rejects unknown revisions.
#[tokio::test(flavor = "multi_thread")]
async fn handshake_falls_back_to_supported_revision() {
    let address = serve_connections(move |mut stream| async move {
        let Some((head, request)) = read_request(&mut stream).await else { return };
        let known = ["2025-11-25", "2025-06-18", "2025-03-26"].map(Value::from);
        let response = match request["method"].as_str().unwrap_or_default() {
            "server/discover" => return,
            "initialize" if known.contains(&request["params"]["protocolVersion"]) => {
                json_rpc_result(&request, initialize_result())
            }
            "initialize" => {
                let error = json!({"code": -32602, "message": "Unsupported protocol version"});
                http_response(
                    "200 OK",
                    "application/json",
                    &json!({"jsonrpc": "2.0", "id": request["id"], "error": error}).to_string(),
                )
            }
            "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
            "tools/list" => json_rpc_result(&request, talk_tool_list()),
            "tools/call" => {
                json_rpc_result(&request, json!({"content": [{"type": "text", "text": "done"}]}))
            }
            _ => http_response("202 Accepted", "text/plain", ""),
        };
        let _ = stream.write_all(response.as_bytes()).await;
    })
    .await;
    let gate = TestGateway::open(&format!(
        "[upstreams.strict]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n"
    ))
    .await;
    assert_eq!(gate.client().in_session("s").call_code("talk", json!({})).await, "ok");
    gate.shut_down().await;
}
