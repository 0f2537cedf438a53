//! Tests that answers without an end are cut off.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
    talk_tool_list,
};
use crate::support::{TestGateway, wait_until};

/// The server sends at most this many bytes, so that a failed test ends.
const MAX_SENT_BYTES: usize = 200 << 20;

async fn serve_endless_answer(mut stream: TcpStream, sent: Arc<AtomicUsize>) {
    let Some((head, request)) = read_request(&mut stream).await else { return };
    let result = |result: Value| json_rpc_result(&request, result);
    let start = match (
        request["method"].as_str().unwrap_or_default(),
        request.pointer("/params/arguments/how").and_then(Value::as_str),
    ) {
        ("initialize", _) => result(initialize_result()),
        ("ping", _) => result(json!({})),
        ("tools/list", _) => result(talk_tool_list()),
        ("tools/call", Some("answer")) => {
            result(json!({"content": [{"type": "text", "text": "done"}]}))
        }
        ("tools/call", Some("json")) => {
            http_response("200 OK", "application/json", "{\"jsonrpc\": \"2.0\", \"x\": \"")
        }
        ("tools/call", Some("event")) => {
            http_response("200 OK", "text/event-stream", ": hello\n\ndata: x")
        }
        ("tools/call", Some("error")) => {
            http_response("500 Oh", "application/json", "{\"jsonrpc\": \"2.0\", \"x\": \"")
        }
        ("tools/call", Some("rejected")) => http_response("400 No", "text/html", "<p>"),
        ("tools/call", Some("unauthorized")) => {
            http_response("401 No", "application/json", "{\"jsonrpc\": \"2.0\", \"x\": \"")
        }
        ("", _) if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
        ("server/discover", _) => http_response("404 No", "text/html", "<p>"),
        _ => http_response("202 Accepted", "text/plain", ""),
    };
    if stream.write_all(start.as_bytes()).await.is_err() || !start.ends_with(['x', '"', '>']) {
        return;
    }
    let mut total = 0;
    while total < MAX_SENT_BYTES && stream.write_all(&[b'x'; 1 << 16]).await.is_ok() {
        total += 1 << 16;
    }
    sent.fetch_max(total, Ordering::SeqCst);
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_answer_is_cut_off() {
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&sent);
    let address =
        serve_connections(move |stream| serve_endless_answer(stream, Arc::clone(&counter))).await;
    let config = format!(
        "[upstreams.old]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n[tools.talk]\nkind = \"mcp\"\nupstream = \"old\"\neffect = \"write\"\npolicy = \"open\"\n"
    );
    let gate = TestGateway::open(&config).await;
    for (n, (how, code, effects)) in [
        ("answer", "ok", ""),
        // The upstream received the call and answered, but the outcome is unknown.
        ("json", "invalid_result", "unknown"),
        ("event", "invalid_result", "unknown"),
        ("error", "invalid_result", "unknown"),
        // A rejected call has no effect.
        ("rejected", "upstream_invalid", "none"),
        ("unauthorized", "upstream_forbidden", "none"),
    ]
    .into_iter()
    .enumerate()
    {
        let client = gate.client().in_session(&format!("s{n}"));
        let mut error = Value::Null;
        // An open circuit breaker refuses calls for a short time.
        wait_until("the upstream receives the call", async || {
            error =
                client.call("talk", json!({"how": how})).await["_meta"]["toolgate/error"].clone();
            error["code"] != "upstream_unavailable"
        })
        .await;
        let found =
            (error["code"].as_str().unwrap_or("ok"), error["effects"].as_str().unwrap_or_default());
        assert_eq!(found, (code, effects), "{how}: {error}");
    }
    let max_sent = sent.load(Ordering::SeqCst);
    assert!(max_sent < 64 << 20, "{max_sent} bytes of one answer were read");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_legacy_sse_event_is_cut_off() {
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&sent);
    let address = serve_connections(move |mut stream| {
        let counter = Arc::clone(&counter);
        async move {
            let _ = read_request(&mut stream).await;
            let start = http_response(
                "200 OK",
                "text/event-stream",
                "event: endpoint\ndata: /post\n\ndata: x",
            );
            let _ = stream.write_all(start.as_bytes()).await;
            let mut total = 0;
            while total < MAX_SENT_BYTES && stream.write_all(&[b'x'; 1 << 16]).await.is_ok() {
                total += 1 << 16;
            }
            counter.fetch_max(total, Ordering::SeqCst);
        }
    })
    .await;
    let gate =
        TestGateway::open(&format!("[upstreams.old]\nurl = \"http://{address}/sse\"\ntransport = \"sse\"\nundeclared = \"read\"\n")).await;
    wait_until("the upstream has sent bytes", async || sent.load(Ordering::SeqCst) > 0).await;
    let max_sent = sent.load(Ordering::SeqCst);
    assert!(max_sent < 64 << 20, "{max_sent} bytes of one event were read");
    gate.shut_down().await;
}
