//! A request behind a request whose length is said in two ways is never heard.

use serde_json::json;

use crate::security::send_raw;
use crate::support::TestGateway;

/// A call in a session of its own, by the headers that say how long it is and the body as that
/// says.
fn framed_call(
    gate: &TestGateway,
    session: &str,
    framed: impl Fn(&str) -> (String, String),
) -> String {
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}, "io.modelcontextprotocol/clientCapabilities": {}});
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "calc", "arguments": {"expression": "1"}, "_meta": meta}});
    let (length, body) = framed(&body.to_string());
    let host = gate.url.trim_start_matches("http://");
    format!(
        "POST /mcp HTTP/1.1\r\nhost: {host}\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\n\
         mcp-protocol-version: 2026-07-28\r\nmcp-method: tools/call\r\nmcp-name: calc\r\ntoolgate-session: {session}\r\n{length}\r\n{body}"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn request_with_two_lengths_smuggles_nothing() {
    let gate = TestGateway::open("[tools.calc]\nkind = \"builtin\"\n").await;
    let last = |session: &str| {
        framed_call(&gate, session, |body| {
            (format!("content-length: {}\r\nconnection: close\r\n", body.len()), body.to_owned())
        })
    };
    let chunked = |body: &str| format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let rows = async |session: &str| {
        gate.gateway.runtime().session("default", "local", session).rows().await.unwrap().len()
    };
    for (n, (lengths, is_heard)) in [
        // As a test of this test: one behind another is heard.
        ("transfer-encoding: chunked\r\n", true),
        ("content-length: 4\r\ntransfer-encoding: chunked\r\n", false),
        ("transfer-encoding: chunked\r\ncontent-length: 4\r\n", false),
        ("content-length: 4000\r\ntransfer-encoding: chunked\r\n", false),
        ("content-length: 0\r\ncontent-length: 0\r\ntransfer-encoding: chunked\r\n", false),
    ]
    .into_iter()
    .enumerate()
    {
        let (first, behind) = (format!("first{n}"), format!("behind{n}"));
        let request =
            framed_call(&gate, &first, |body| (lengths.to_owned(), chunked(body))) + &last(&behind);
        // Until it hangs up.
        let answer = send_raw(&gate, request.as_bytes()).await;
        assert_eq!(
            answer.matches("HTTP/1.1 200").count(),
            1 + usize::from(is_heard),
            "{lengths}: {answer}"
        );
        assert_eq!(
            (rows(&first).await, rows(&behind).await),
            (1, usize::from(is_heard)),
            "{lengths}"
        );
    }
    gate.shut_down().await;
}
