//! Tests upstreams with the legacy SSE transport.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use toolgate_mcp::UpstreamStatus;

use crate::legacy_upstreams::{http_response, initialize_result, read_request, serve_connections};
use crate::support::{TestGateway, wait_until};

/// A server of revision 2024-11-05: requests are server, and all answers come on one stream.
#[derive(Default)]
struct LegacySseServer {
    stream: Mutex<Option<mpsc::UnboundedSender<String>>>,
    streams: AtomicUsize,
    call_count: AtomicUsize,
    /// The number of the valid token, or 0 for any token.
    token_period: AtomicUsize,
    /// Sessions up to this number are unknown.
    forgotten_sessions: AtomicUsize,
    heads: Mutex<Vec<String>>,
}

impl LegacySseServer {
    async fn handle_connection(self: Arc<Self>, mut stream: TcpStream) {
        let Some((head, request)) = read_request(&mut stream).await else { return };
        self.heads.lock().unwrap().push(head.clone());
        let (period, forgotten) = (
            self.token_period.load(Ordering::SeqCst),
            self.forgotten_sessions.load(Ordering::SeqCst),
        );
        let session = head
            .strip_prefix("post /post/")
            .and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
        let how = request.pointer("/params/arguments/how").and_then(Value::as_str);
        // Posts are accepted only at the address of the `endpoint` event.
        let immediate = match how.and_then(|how| how.parse::<u16>().ok()) {
            _ if head.starts_with("post /sse") => Some(http_response("405 No", "text/html", "<p>")),
            _ if head.starts_with("post /token") => {
                let token = json!({"access_token": format!("t{period}"), "token_type": "bearer"})
                    .to_string();
                Some(http_response("200 OK", "application/json", &token))
            }
            _ if period > 0 && !head.contains(&format!("authorization: bearer t{period}")) => {
                Some(http_response("401 No", "text/html", "<p>"))
            }
            _ if session.is_some_and(|session| session <= forgotten) => {
                Some(http_response("404 No", "text/html", "<p>"))
            }
            status => {
                status.map(|status| http_response(&format!("{status} No"), "text/html", "<p>"))
            }
        };
        if let Some(response) = immediate {
            let _ = stream.write_all(response.as_bytes()).await;
            return;
        }
        if head.starts_with("get ") {
            let (sender, mut receiver) = mpsc::unbounded_channel();
            *self.stream.lock().unwrap() = Some(sender);
            let endpoint = format!(
                "event: endpoint\ndata: /post/{}\n\n",
                self.streams.fetch_add(1, Ordering::SeqCst) + 1
            );
            let mut next = Some(http_response("200 OK", "text/event-stream", &endpoint));
            // The loop ends when the connection ends.
            while let Some(text) = next {
                if stream.write_all(text.as_bytes()).await.is_err() {
                    return;
                }
                next = receiver.recv().await;
            }
            return;
        }
        let _ = stream.write_all(http_response("202 Accepted", "text/plain", "").as_bytes()).await;
        let result = match (request["method"].as_str().unwrap_or_default(), how) {
            ("initialize", _) => {
                let mut initialized = initialize_result();
                initialized["protocolVersion"] = json!("2024-11-05");
                initialized
            }
            ("tools/list", _) => {
                json!({"tools": [{"name": "talk", "description": "Talks.", "inputSchema": {"type": "object"}}]})
            }
            ("tools/call", how) => {
                self.call_count.fetch_add(1, Ordering::SeqCst);
                if how == Some("cut") {
                    *self.stream.lock().unwrap() = None;
                    return;
                }
                let text =
                    if how == Some("long") { "x".repeat(17 << 20) } else { "done".to_owned() };
                json!({"content": [{"type": "text", "text": text}]})
            }
            ("ping", _) => json!({}),
            _ => return,
        };
        let message = json!({"jsonrpc": "2.0", "id": request["id"], "result": result});
        if let Some(line) = self.stream.lock().unwrap().as_ref() {
            let _ = line.send(format!("event: message\ndata: {message}\n\n"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn legacy_sse_upstream_reconnects() {
    let server = Arc::new(LegacySseServer::default());
    let serving = Arc::clone(&server);
    let old = serve_connections(move |stream| Arc::clone(&serving).handle_connection(stream)).await;
    let redirecting = serve_connections(|mut stream| async move {
        let _ = read_request(&mut stream).await;
        let elsewhere = http_response(
            "200 OK",
            "text/event-stream",
            "event: endpoint\ndata: http://127.0.0.1:1/post\n\n",
        );
        let _ = stream.write_all(elsewhere.as_bytes()).await;
    })
    .await;
    let gate = TestGateway::open(&format!(
        "[upstreams.old]\nurl = \"http://{old}/sse\"\ntransport = \"sse\"\nprefix = \"\"\nbearer = \"alpha-token-1\"\n\
         [upstreams.redirecting]\nurl = \"http://{redirecting}/sse\"\ntransport = \"sse\"\nbearer = \"alpha-token-1\"\n\
         [tools.talk]\nkind = \"mcp\"\nupstream = \"old\"\neffect = \"write\"\npolicy = \"open\"\n"
    ))
    .await;
    // A token for one server is not server to another origin.
    match gate.gateway.health().remove(1).status {
        UpstreamStatus::Down { why: reason, .. } => {
            assert_eq!(reason, "the `endpoint` event names another origin")
        }
        status => panic!("{status:?}"),
    }
    let client = gate.client();
    assert_eq!(client.tool_names().await, ["talk"]);
    let result = client.in_session("first").call("talk", json!({"how": "well"})).await;
    assert_eq!(result["content"][0]["text"], "done", "{result}");
    for (streams, how) in [(2, "cut"), (3, "long")] {
        let before = server.call_count.load(Ordering::SeqCst);
        let error = client.in_session(how).call("talk", json!({"how": how})).await["_meta"]["toolgate/error"].clone();
        // The server received the call, and the outcome is unknown.
        assert_eq!(error["effects"], "unknown", "{how}: {error}");
        let mut attempt = 0;
        wait_until("the upstream answers again", async || {
            attempt += 1;
            client
                .in_session(&format!("{how}-{attempt}"))
                .call_code("talk", json!({"how": "well"}))
                .await
                == "ok"
        })
        .await;
        assert_eq!(
            (server.streams.load(Ordering::SeqCst), server.call_count.load(Ordering::SeqCst)),
            (streams, before + 2),
            "{how}"
        );
    }
    let heads = server.heads.lock().unwrap().clone();
    assert!(
        heads.iter().all(|head| head.contains("authorization: bearer alpha-token-1")),
        "{heads:?}"
    );
    assert!(heads.last().unwrap().starts_with("post /post/3 "), "{heads:?}");
    gate.shut_down().await;
}

/// Calls the tool, and returns the code and the effects.
async fn call_outcome(gate: &TestGateway, session: &str, how: &str) -> (String, String) {
    let result = gate.client().in_session(session).call("talk", json!({"how": how})).await;
    let field =
        |name: &str| result["_meta"]["toolgate/error"][name].as_str().unwrap_or("ok").to_owned();
    (field("code"), field("effects"))
}

const TALK_TOOL_CONFIG: &str =
    "[tools.talk]\nkind = \"mcp\"\nupstream = \"old\"\neffect = \"write\"\npolicy = \"open\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn rejected_or_unreachable_post_has_no_effects() {
    let server = Arc::new(LegacySseServer::default());
    let serving = Arc::clone(&server);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepting = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(Arc::clone(&serving).handle_connection(stream));
        }
    });
    let gate = TestGateway::open(&format!(
        "[upstreams.old]\nurl = \"http://{address}/sse\"\ntransport = \"sse\"\nprefix = \"\"\n{TALK_TOOL_CONFIG}"
    ))
    .await;
    for (status, code, effects) in [
        ("403", "upstream_forbidden", "none"),
        ("422", "upstream_rejected", "none"),
        ("410", "upstream_invalid", "none"),
        ("408", "upstream_unavailable", "unknown"),
        ("302", "upstream_unavailable", "unknown"),
        ("500", "upstream_unavailable", "unknown"),
    ] {
        assert_eq!(
            call_outcome(&gate, status, status).await,
            (code.to_owned(), effects.to_owned()),
            "{status}"
        );
        assert_eq!(
            call_outcome(&gate, &format!("{status}-after"), "well").await.0,
            "ok",
            "{status}"
        );
    }
    assert_eq!(
        (server.streams.load(Ordering::SeqCst), server.call_count.load(Ordering::SeqCst)),
        (1, 6)
    );
    // The server forgets its session, and the gateway opens another one.
    server.forgotten_sessions.store(1, Ordering::SeqCst);
    let mut attempt = 0;
    wait_until("the upstream answers again", async || {
        attempt += 1;
        let (code, effects) = call_outcome(&gate, &format!("lost-{attempt}"), "well").await;
        assert!(
            code == "ok" || (code.as_str(), effects.as_str()) == ("upstream_unavailable", "none"),
            "{code} {effects}"
        );
        code == "ok"
    })
    .await;
    assert_eq!(
        (server.streams.load(Ordering::SeqCst), server.call_count.load(Ordering::SeqCst)),
        (2, 7)
    );
    // The stream stays open, and the server accepts no more posts.
    accepting.abort();
    let _ = accepting.await;
    assert_eq!(
        call_outcome(&gate, "unreachable", "well").await,
        ("upstream_unavailable".to_owned(), "none".to_owned())
    );
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_token_is_renewed_for_legacy_sse() {
    let server = Arc::new(LegacySseServer::default());
    server.token_period.store(1, Ordering::SeqCst);
    let serving = Arc::clone(&server);
    let address =
        serve_connections(move |stream| Arc::clone(&serving).handle_connection(stream)).await;
    let gate = TestGateway::open(&format!(
        "[upstreams.old]\nurl = \"http://{address}/sse\"\ntransport = \"sse\"\nprefix = \"\"\n\
         oauth = {{ token_url = \"http://{address}/token\", client_id = \"me\", client_secret = \"sesam\" }}\n{TALK_TOOL_CONFIG}"
    ))
    .await;
    assert_eq!(call_outcome(&gate, "first", "well").await.0, "ok");
    // A new token is not fetched again at once.
    tokio::time::sleep(std::time::Duration::from_millis(2_100)).await;
    server.token_period.store(2, Ordering::SeqCst);
    let mut attempt = 0;
    wait_until("the call succeeds again", async || {
        attempt += 1;
        let (code, effects) = call_outcome(&gate, &format!("s{attempt}"), "well").await;
        // A rejected call has no effect.
        assert!(code == "ok" || effects == "none", "{code} {effects}");
        code == "ok"
    })
    .await;
    assert_eq!(
        (server.streams.load(Ordering::SeqCst), server.call_count.load(Ordering::SeqCst)),
        (2, 2)
    );
    gate.shut_down().await;
}

/// Files of clients do not name the transport, so the gateway detects the transport.
#[tokio::test(flavor = "multi_thread")]
async fn upstream_falls_back_to_legacy_sse_without_transport() {
    let server = Arc::new(LegacySseServer::default());
    let serving = Arc::clone(&server);
    let address =
        serve_connections(move |stream| Arc::clone(&serving).handle_connection(stream)).await;
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("servers.json");
    std::fs::write(
        &file,
        json!({"mcpServers": {"old": {"url": format!("http://{address}/sse")}}}).to_string(),
    )
    .unwrap();
    let gate = TestGateway::open(&format!(
        "mcp_servers = [{}]\n[upstreams.http]\nurl = \"http://{address}/sse\"\ntransport = \"http\"\n\
         [tools.old_talk]\nkind = \"mcp\"\nupstream = \"old\"\neffect = \"read\"\n",
        json!(file)
    ))
    .await;
    let result = gate.client().in_session("s").call("old_talk", json!({})).await;
    assert_eq!(result["content"][0]["text"], "done", "{result}");
    let health = gate.gateway.health();
    let statuses: Vec<(&str, &UpstreamStatus)> =
        health.iter().map(|entry| (entry.name.as_str(), &entry.status)).collect();
    let [("http", UpstreamStatus::Down { why: reason, .. }), ("old", UpstreamStatus::Up { .. })] =
        &statuses[..]
    else {
        panic!("{statuses:?}")
    };
    assert!(reason.contains("HTTP 405") && reason.contains("transport = \"sse\""), "{reason}");
    gate.shut_down().await;
}
