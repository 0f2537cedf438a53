//! Tests that a request with two lengths cannot hide a second request.

use serde_json::json;

use crate::security::send_raw;
use crate::support::{CALC_TOOL_CONFIG, TestGateway};

/// Builds a call in its own session. `frame` returns the length headers and the framed body.
fn framed_call(
    gate: &TestGateway,
    session: &str,
    frame: impl Fn(&str) -> (String, String),
) -> String {
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}, "io.modelcontextprotocol/clientCapabilities": {}});
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "calc", "arguments": {"expression": "1"}, "_meta": meta}});
    let (length, body) = frame(&body.to_string());
    let host = gate.url.trim_start_matches("http://");
    format!(
        "POST /mcp HTTP/1.1\r\nhost: {host}\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\n\
         mcp-protocol-version: 2026-07-28\r\nmcp-method: tools/call\r\nmcp-name: calc\r\ntoolgate-session: {session}\r\n{length}\r\n{body}"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn request_with_two_lengths_smuggles_nothing() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let last = |session: &str| {
        framed_call(&gate, session, |body| {
            (format!("content-length: {}\r\nconnection: close\r\n", body.len()), body.to_owned())
        })
    };
    let chunked = |body: &str| format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let rows = async |session: &str| {
        gate.gateway.runtime().session("default", "local", session).rows().await.unwrap().len()
    };
    for (n, (lengths, is_answered)) in [
        // The control case: the gateway answers both of two correctly framed requests.
        ("transfer-encoding: chunked\r\n", true),
        ("content-length: 4\r\ntransfer-encoding: chunked\r\n", false),
        ("transfer-encoding: chunked\r\ncontent-length: 4\r\n", false),
        ("content-length: 4000\r\ntransfer-encoding: chunked\r\n", false),
        ("content-length: 0\r\ncontent-length: 0\r\ntransfer-encoding: chunked\r\n", false),
    ]
    .into_iter()
    .enumerate()
    {
        let (first, second) = (format!("first{n}"), format!("second{n}"));
        let request =
            framed_call(&gate, &first, |body| (lengths.to_owned(), chunked(body))) + &last(&second);
        // The gateway closes the connection after the last answer.
        let answer = send_raw(&gate, request.as_bytes()).await;
        assert_eq!(
            answer.matches("HTTP/1.1 200").count(),
            1 + usize::from(is_answered),
            "{lengths}: {answer}"
        );
        assert_eq!(
            (rows(&first).await, rows(&second).await),
            (1, usize::from(is_answered)),
            "{lengths}"
        );
    }
    gate.shut_down().await;
}
