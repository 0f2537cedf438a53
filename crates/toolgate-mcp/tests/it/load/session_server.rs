//! Implements an upstream of an earlier revision that has sessions.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::load::effect_journal::EffectJournal;

/// The sessions of the upstream.
#[derive(Default)]
pub(super) struct FakeUpstreamSessions {
    pub(super) open: BTreeSet<String>,
    pub(super) opened_count: usize,
    /// The number of requests with an unknown session.
    pub(super) refused_count: usize,
}

/// Returns the response of the upstream to a request.
fn session_server_reply(
    head: &str,
    request: &Value,
    sessions: &mut FakeUpstreamSessions,
    journal: &EffectJournal,
) -> String {
    let session = head
        .lines()
        .find_map(|line| line.strip_prefix("mcp-session-id: "))
        .unwrap_or_default()
        .trim();
    let argument = |name: &str| {
        request
            .pointer(&format!("/params/arguments/{name}"))
            .and_then(Value::as_str)
            .unwrap_or_default()
    };
    let structured =
        |value: Value| json_rpc_result(request, json!({"content": [], "structuredContent": value}));
    match (
        request["method"].as_str().unwrap_or_default(),
        request.pointer("/params/name").and_then(Value::as_str),
    ) {
        ("server/discover", _) => http_response("404 No", "text/html", "<p>"),
        ("initialize", _) => {
            sessions.opened_count += 1;
            let id = format!("s-{}", sessions.opened_count);
            let response = json_rpc_result(request, initialize_result()).replacen(
                "\r\n",
                &format!("\r\nmcp-session-id: {id}\r\n"),
                1,
            );
            sessions.open.insert(id);
            response
        }
        _ if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
        _ if head.starts_with("delete ") => {
            sessions.open.remove(session);
            http_response("200 OK", "text/plain", "")
        }
        _ if !sessions.open.contains(session) => {
            sessions.refused_count += 1;
            // The upstream rejects an unknown session in two ways.
            let error = json!({"jsonrpc": "2.0", "error": {"code": -32000, "message": "No valid session ID provided"}, "id": null});
            match sessions.refused_count % 2 {
                0 => http_response("404 Not Found", "text/plain", ""),
                _ => http_response("400 Bad Request", "application/json", &error.to_string()),
            }
        }
        ("tools/list", _) => {
            let text = json!({"type": "string"});
            let schema =
                json!({"type": "object", "properties": {"text": text, "key": text, "how": text}});
            let tools = ["echo", "mark"]
                .map(|name| json!({"name": name, "description": "Does.", "inputSchema": schema}));
            json_rpc_result(request, json!({"tools": tools}))
        }
        ("tools/call", Some("mark")) => {
            journal.record(argument("key"));
            structured(json!({"done": true}))
        }
        ("tools/call", _) => structured(json!({"text": argument("text")})),
        ("ping", _) => json_rpc_result(request, json!({})),
        _ => http_response("202 Accepted", "text/plain", ""),
    }
}

pub(super) async fn start_session_server(
    sessions: &Arc<Mutex<FakeUpstreamSessions>>,
    journal: &Arc<EffectJournal>,
) -> String {
    let (sessions, journal) = (Arc::clone(sessions), Arc::clone(journal));
    serve_connections(move |mut stream| {
        let (sessions, journal) = (Arc::clone(&sessions), Arc::clone(&journal));
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let response =
                session_server_reply(&head, &request, &mut sessions.lock().unwrap(), &journal);
            // The effect happens before the answer, so a lost connection makes its outcome unknown.
            if request.pointer("/params/name").is_some_and(|name| name == "mark") {
                tokio::time::sleep(Duration::from_millis(30)).await;
            }
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await
}
