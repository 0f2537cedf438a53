//! Answers that are come back to.

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

/// The answer is a stream that can be come back to, and is started anew with all the rest, and
/// knows nobody: nobody else notices.
#[tokio::test(flavor = "multi_thread")]
async fn read_is_repeated_if_its_stream_cannot_be_resumed() {
    for status in ["404 Not Found", "400 Bad Request"] {
        let (life, came) = (watch::Sender::new(0), Arc::new(AtomicUsize::new(0)));
        let (lives, counted) = (life.clone(), Arc::clone(&came));
        let address = serve_connections(move |mut stream| {
            let (lives, came) = (lives.clone(), Arc::clone(&counted));
            async move {
                let Some((head, asked)) = read_request(&mut stream).await else { return };
                let life = *lives.borrow();
                let session = format!("mcp-session-id: life-{life}");
                let said = match asked["method"].as_str().unwrap_or_default() {
                    "server/discover" => http_response("404 No", "text/html", "<p>"),
                    "initialize" => json_rpc_result(&asked, initialize_result()).replacen(
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
                    "ping" => json_rpc_result(&asked, json!({})),
                    "tools/list" => json_rpc_result(&asked, talk_tool_list()),
                    "tools/call" if life == 0 => {
                        let begun = http_response(
                            "200 OK",
                            "text/event-stream",
                            "id: 1\nretry: 10\ndata:\n\n",
                        );
                        let _ = stream.write_all(begun.as_bytes()).await;
                        came.fetch_add(1, Ordering::SeqCst);
                        let _ = lives.subscribe().wait_for(|life| *life > 0).await;
                        return;
                    }
                    "tools/call" => json_rpc_result(
                        &asked,
                        json!({"content": [{"type": "text", "text": "done"}]}),
                    ),
                    _ => http_response("202 Accepted", "text/plain", ""),
                };
                let _ = stream.write_all(said.as_bytes()).await;
            }
        })
        .await;
        let gate = TestGateway::open(&format!(
            "[upstreams.old]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\n\
             [tools.talk]\nkind = \"mcp\"\nupstream = \"old\"\neffect = \"read\"\ntimeout = \"20s\"\n"
        ))
        .await;
        let client = gate.client().in_session("s");
        let reading = tokio::spawn(async move { client.call_code("talk", json!({})).await });
        wait_until("it is under way", async || came.load(Ordering::SeqCst) == 1).await;
        life.send_replace(1);
        // Where all is slow here, it has come too early as often as it may.
        let said = reading.await.unwrap();
        assert!(["ok", "upstream_unavailable"].contains(&said.as_str()), "{status}: {said}");
        let mut turn = 0;
        wait_until("it is known there", async || {
            turn += 1;
            gate.client().in_session(&format!("s{turn}")).call_code("talk", json!({})).await == "ok"
        })
        .await;
        gate.shut_down().await;
    }
}
