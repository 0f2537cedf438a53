//! Tests that a read is repeated if its resumable stream is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;

use super::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
    talk_tool_list,
};
use crate::support::{TestGateway, wait_until};

/// The server offers a resumable stream, restarts during the call, and forgets all sessions and
/// streams.
#[tokio::test(flavor = "multi_thread")]
async fn read_is_repeated_if_its_stream_cannot_be_resumed() {
    for status in ["404 Not Found", "400 Bad Request"] {
        let (epoch, calls) = (watch::Sender::new(0), Arc::new(AtomicUsize::new(0)));
        let (epochs, call_counter) = (epoch.clone(), Arc::clone(&calls));
        let address = serve_connections(move |mut stream| {
            let (epochs, calls) = (epochs.clone(), Arc::clone(&call_counter));
            async move {
                let Some((head, request)) = read_request(&mut stream).await else { return };
                let epoch = *epochs.borrow();
                let session = format!("mcp-session-id: life-{epoch}");
                let response = match request["method"].as_str().unwrap_or_default() {
                    "server/discover" => http_response("404 No", "text/html", "<p>"),
                    "initialize" => json_rpc_result(&request, initialize_result()).replacen(
                        "\r\n",
                        &format!("\r\n{session}\r\n"),
                        1,
                    ),
                    "" if head.starts_with("get ") && !head.contains("last-event-id") => {
                        http_response("405 No", "text/plain", "")
                    }
                    "" if head.starts_with("get ") => http_response(status, "text/plain", ""),
                    _ if !head.contains(&session) => {
                        http_response("404 Not Found", "text/plain", "")
                    }
                    "ping" => json_rpc_result(&request, json!({})),
                    "tools/list" => json_rpc_result(&request, talk_tool_list()),
                    "tools/call" if epoch == 0 => {
                        let start = http_response(
                            "200 OK",
                            "text/event-stream",
                            "id: 1\nretry: 10\ndata:\n\n",
                        );
                        let _ = stream.write_all(start.as_bytes()).await;
                        calls.fetch_add(1, Ordering::SeqCst);
                        let _ = epochs.subscribe().wait_for(|epoch| *epoch > 0).await;
                        return;
                    }
                    "tools/call" => json_rpc_result(
                        &request,
                        json!({"content": [{"type": "text", "text": "done"}]}),
                    ),
                    _ => http_response("202 Accepted", "text/plain", ""),
                };
                let _ = stream.write_all(response.as_bytes()).await;
            }
        })
        .await;
        let gate = TestGateway::open(&format!(
            "[upstreams.old]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\n\
             [tools.talk]\nkind = \"mcp\"\nupstream = \"old\"\neffect = \"read\"\ntimeout = \"20s\"\n"
        ))
        .await;
        let client = gate.client().in_session("s");
        let read = tokio::spawn(async move { client.call_code("talk", json!({})).await });
        wait_until("the call runs", async || calls.load(Ordering::SeqCst) == 1).await;
        epoch.send_replace(1);
        // On a slow machine, the gateway may have used all its attempts.
        let code = read.await.unwrap();
        assert!(["ok", "upstream_unavailable"].contains(&code.as_str()), "{status}: {code}");
        let mut attempt = 0;
        wait_until("the session is open again", async || {
            attempt += 1;
            gate.client().in_session(&format!("s{attempt}")).call_code("talk", json!({})).await
                == "ok"
        })
        .await;
        gate.shut_down().await;
    }
}
