//! Tests that a rotated secret of an upstream is used and redacted.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::sync::Notify;

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{TestGateway, wait_until};

const FIRST_UPSTREAM_KEY: &str = "first-key-of-ours";
const SECOND_UPSTREAM_KEY: &str = "second-key-of-ours";

#[tokio::test(flavor = "multi_thread")]
async fn rotated_secret_is_used_and_old_one_stays_redacted() {
    let home = tempfile::tempdir().unwrap();
    let key = home.path().join("key");
    std::fs::write(&key, format!("{FIRST_UPSTREAM_KEY}\n")).unwrap();
    // The server returns the key of the call, at once or later.
    let (keys, waiting, go) = (
        Arc::<Mutex<Vec<String>>>::default(),
        Arc::new(AtomicUsize::new(0)),
        Arc::new(Notify::new()),
    );
    let (shared_keys, shared_waiting, shared_go) =
        (Arc::clone(&keys), Arc::clone(&waiting), Arc::clone(&go));
    let address = serve_connections(move |mut stream| {
        let (keys, waiting, go) = (Arc::clone(&shared_keys), Arc::clone(&shared_waiting), Arc::clone(&shared_go));
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let key = head.lines().find_map(|line| line.strip_prefix("authorization: bearer ")).unwrap_or_default().to_owned();
            let response = match request["method"].as_str().unwrap_or_default() {
                "server/discover" => http_response("404 No", "text/html", "<p>"),
                "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                "initialize" => json_rpc_result(&request, initialize_result()),
                "tools/list" => {
                    let schema = json!({"type": "object", "properties": {"how": {"type": "string"}}});
                    json_rpc_result(&request, json!({"tools": [{"name": "talk", "description": "Talks.", "inputSchema": schema}]}))
                }
                "tools/call" => {
                    keys.lock().unwrap().push(key.clone());
                    if request.pointer("/params/arguments/how") == Some(&json!("late")) {
                        waiting.fetch_add(1, Ordering::SeqCst);
                        go.notified().await;
                    }
                    let text = format!("no use for {key}");
                    json_rpc_result(&request, json!({"isError": true, "content": [{"type": "text", "text": text}]}))
                }
                "ping" => json_rpc_result(&request, json!({})),
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await;
    let text = format!(
        "[upstreams.old]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\nbearer = {{ file = {} }}\n",
        json!(key)
    );
    let gate = TestGateway::open(&text).await;
    let client = gate.client();
    let before = client.in_session("before").call("talk", json!({"how": "now"})).await.to_string();
    let late = client.in_session("late");
    let late =
        tokio::spawn(async move { late.call("talk", json!({"how": "late"})).await.to_string() });
    wait_until("the slow call runs", async || waiting.load(Ordering::SeqCst) == 1).await;
    // A reload without changes keeps the upstream.
    gate.reload(&text).await.unwrap();
    std::fs::write(&key, format!("{SECOND_UPSTREAM_KEY}\n")).unwrap();
    gate.reload(&text).await.unwrap();
    let after = client.in_session("after").call("talk", json!({"how": "now"})).await.to_string();
    assert_eq!(
        *keys.lock().unwrap(),
        [FIRST_UPSTREAM_KEY, FIRST_UPSTREAM_KEY, SECOND_UPSTREAM_KEY]
    );
    // The slow call ends now, and returns its old key.
    go.notify_one();
    let late = late.await.unwrap();
    for text in [before, late, after] {
        assert!(text.contains("no use for [redacted]") && !text.contains("key-of-ours"), "{text}");
    }
    let health = serde_json::to_string(&gate.gateway.health()).unwrap();
    assert!(!health.contains("key-of-ours"), "{health}");
    gate.gateway.shut_down().await;
    for file in [gate.ledger_path(), gate.home.path().join("ledger.db-wal")] {
        let text = std::fs::read(&file).unwrap_or_default();
        for key in [FIRST_UPSTREAM_KEY, SECOND_UPSTREAM_KEY] {
            assert!(
                !text.windows(key.len()).any(|window| window == key.as_bytes()),
                "{key}: {}",
                file.display()
            );
        }
    }
}
