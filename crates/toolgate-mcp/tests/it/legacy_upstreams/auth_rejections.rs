//! Tests how the gateway handles upstreams that reject its tokens or calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use super::{
    discover_result, http_response, initialize_result, json_rpc_result, legacy_response,
    modern_result, read_request, serve_connections, talk_tool_list,
};
use crate::support::{TestGateway, wait_until};

/// Starts a server whose tokens expire, with a legacy or a modern revision.
///
/// `legacy_hellos` counts the handshakes of an earlier revision.
async fn start_expiring_token_server(
    modern: bool,
    period: Arc<AtomicUsize>,
    calls: Arc<AtomicUsize>,
    legacy_hellos: Arc<AtomicUsize>,
) -> String {
    serve_connections(move |mut stream| {
        let (period, calls, legacy_hellos) = (period.load(Ordering::SeqCst), Arc::clone(&calls), Arc::clone(&legacy_hellos));
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let capabilities = json!({"tools": {}, "prompts": {}, "resources": {}});
            let done = json!({"resultType": "complete", "content": [{"type": "text", "text": "done"}]});
            let respond = |result: Value| modern_result(&request, result);
            if request["method"] == "initialize" {
                legacy_hellos.fetch_add(1, Ordering::SeqCst);
            }
            let response = match request["method"].as_str().unwrap_or_default() {
                _ if head.starts_with("post /token") => {
                    // The server issues tokens only to a client with its credentials.
                    let known = head.contains("authorization: basic bwu6c2vzyw0=");
                    let token = json!({"access_token": format!("t{period}"), "token_type": "bearer"}).to_string();
                    if known {
                        http_response("200 OK", "application/json", &token)
                    } else {
                        http_response("401 No", "application/json", "{}")
                    }
                }
                _ if !head.contains(&format!("authorization: bearer t{period}")) => http_response("401 No", "application/json", "{}"),
                "server/discover" if modern => discover_result(&request, "toll", &capabilities),
                "server/discover" | "" | "initialize" | "ping" => legacy_response(&head, &request, &capabilities),
                "tools/list" => respond(talk_tool_list()),
                "prompts/list" => respond(json!({"prompts": [{"name": "ask"}]})),
                "prompts/get" => respond(json!({"messages": [{"role": "user", "content": {"type": "text", "text": "done"}}]})),
                "resources/list" => respond(json!({"resources": [{"uri": "note://x", "name": "x"}]})),
                "resources/templates/list" => respond(json!({"resourceTemplates": []})),
                "resources/read" => respond(json!({"contents": [{"uri": "note://x", "text": "done"}]})),
                "tools/call" => {
                    calls.fetch_add(1, Ordering::SeqCst);
                    json_rpc_result(&request, done)
                }
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_token_is_renewed_for_calls() {
    for modern in [false, true] {
        let (period, calls, legacy_hellos) = (
            Arc::new(AtomicUsize::new(1)),
            Arc::<AtomicUsize>::default(),
            Arc::<AtomicUsize>::default(),
        );
        let address = start_expiring_token_server(
            modern,
            Arc::clone(&period),
            Arc::clone(&calls),
            Arc::clone(&legacy_hellos),
        )
        .await;
        let gate = TestGateway::open(&format!(
            "[upstreams.toll]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\noauth = {{ token_url = \"http://{address}/token\", client_id = \"me\", client_secret = \"sesam\" }}\n\
             [tools.talk]\nkind = \"mcp\"\nupstream = \"toll\"\neffect = \"write\"\npolicy = \"open\"\n"
        ))
        .await;
        for round in 0..2 {
            let before = calls.load(Ordering::SeqCst);
            let mut tries = 0;
            wait_until("the call succeeds", async || {
                tries += 1;
                let result = gate
                    .client()
                    .in_session(&format!("s{round}-{tries}"))
                    .call("talk", json!({}))
                    .await;
                let error = &result["_meta"]["toolgate/error"];
                // A rejected call has no effect, and can be retried.
                assert!(
                    error.is_null()
                        || (error["effects"] == "none" && error["errorCategory"] == "TRANSIENT"),
                    "{modern}: {error}"
                );
                error.is_null()
            })
            .await;
            assert_eq!(calls.load(Ordering::SeqCst), before + 1);
            // A modern upstream never gets a legacy handshake, also after a reconnect.
            assert_eq!(legacy_hellos.load(Ordering::SeqCst) > 0, !modern, "{round}");
            tokio::time::sleep(Duration::from_millis(2_100)).await;
            period.fetch_add(1, Ordering::SeqCst);
        }
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_token_is_renewed_for_prompts_and_resources() {
    for modern in [false, true] {
        let period = Arc::new(AtomicUsize::new(1));
        let address = start_expiring_token_server(
            modern,
            Arc::clone(&period),
            Arc::default(),
            Arc::default(),
        )
        .await;
        let gate = TestGateway::open(&format!(
            "[upstreams.toll]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n\
             oauth = {{ token_url = \"http://{address}/token\", client_id = \"me\", client_secret = \"sesam\" }}\n"
        ))
        .await;
        let client = gate.client();
        let cases = [
            ("prompts/get", json!({"name": "ask"}), "messages"),
            ("resources/read", json!({"uri": "note://x"}), "contents"),
        ];
        for (method, params, member) in cases {
            let (_, answer) = client.call_method(method, params.clone()).await;
            assert!(answer["result"][member].is_array(), "{modern}: {answer}");
            tokio::time::sleep(Duration::from_millis(2_100)).await;
            period.fetch_add(1, Ordering::SeqCst);
            let start = Instant::now();
            wait_until("the request succeeds again", async || {
                client.call_method(method, params.clone()).await.1["result"][member].is_array()
            })
            .await;
            // The gateway recovers before its periodic health check.
            assert!(
                start.elapsed() < Duration::from_secs(15),
                "{modern} {method}: {:?}",
                start.elapsed()
            );
        }
        gate.shut_down().await;
    }
}

/// Starts a server that rejects some calls, with a legacy or a modern revision. `early` counts
/// calls that must wait.
async fn start_rejecting_server(modern: bool, early: Arc<AtomicUsize>) -> String {
    serve_connections(move |mut stream| {
        let early = Arc::clone(&early);
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let capabilities = json!({"tools": {}, "prompts": {}});
            let respond = |result: Value| modern_result(&request, result);
            let response = match request["method"].as_str().unwrap_or_default() {
                "server/discover" if modern => discover_result(&request, "picky", &capabilities),
                "server/discover" | "" | "initialize" | "ping" => legacy_response(&head, &request, &capabilities),
                "tools/list" => respond(talk_tool_list()),
                "prompts/list" => respond(json!({"prompts": [{"name": "ask"}]})),
                "prompts/get" => http_response("403 No", "text/html", "<p>"),
                "tools/call" if request.pointer("/params/arguments/who").is_some_and(|who| who == "bob") => {
                    http_response("403 No", "text/html", "<p>")
                }
                "tools/call" if request.pointer("/params/arguments/who").is_some_and(|who| who == "eve") => {
                    early.fetch_add(1, Ordering::SeqCst);
                    http_response("429 Too Many\r\nretry-after: 7", "text/html", "<p>")
                }
                "tools/call" if request.pointer("/params/arguments/who").is_some_and(|who| who == "dan") => {
                    early.fetch_add(1, Ordering::SeqCst);
                    http_response("503 Away\r\nretry-after: 7", "text/html", "<p>")
                }
                "tools/call" => json_rpc_result(&request, json!({"resultType": "complete", "content": [{"type": "text", "text": "done"}]})),
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await
}

/// Starts a server of revision 2026-07-28 that is downgraded to an earlier revision.
///
/// The server rejects modern requests with this status, like the TypeScript SDK. `ran` counts the
/// calls that ran.
async fn start_downgraded_server(
    older: Arc<AtomicBool>,
    status: &'static str,
    ran: Arc<AtomicUsize>,
) -> String {
    serve_connections(move |mut stream| {
        let (is_older, ran) = (older.load(Ordering::SeqCst), Arc::clone(&ran));
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let respond = |result: Value| modern_result(&request, result);
            let response = match request["method"].as_str().unwrap_or_default() {
                "initialize" if is_older => json_rpc_result(&request, initialize_result()).replacen("\r\n", "\r\nmcp-session-id: one\r\n", 1),
                "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                _ if is_older && !head.contains("mcp-session-id: one") => match status.starts_with("400") {
                    true => {
                        let error = json!({"code": -32000, "message": "Bad Request: Server not initialized"});
                        http_response(status, "application/json", &json!({"jsonrpc": "2.0", "id": null, "error": error}).to_string())
                    }
                    false => http_response(status, "text/plain", "no"),
                },
                "server/discover" => discover_result(&request, "host", &json!({"tools": {}})),
                "tools/list" => respond(talk_tool_list()),
                "tools/call" => {
                    ran.fetch_add(1, Ordering::SeqCst);
                    respond(json!({"content": [{"type": "text", "text": "done"}]}))
                }
                "ping" => json_rpc_result(&request, json!({})),
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn downgraded_upstream_is_detected_by_next_call() {
    for status in
        ["400 Bad Request", "404 Not Found", "405 Method Not Allowed", "406 Not Acceptable"]
    {
        let (older, ran) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let address = start_downgraded_server(Arc::clone(&older), status, Arc::clone(&ran)).await;
        let gate = TestGateway::open(&format!(
            "[upstreams.host]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\n\
             [tools.talk]\nkind = \"mcp\"\nupstream = \"host\"\neffect = \"write\"\npolicy = \"open\"\n"
        ))
        .await;
        assert_eq!(
            gate.client().in_session("before").call_code("talk", json!({})).await,
            "ok",
            "{status}"
        );
        older.store(true, Ordering::SeqCst);
        // A rejected call has no effect, and can be retried.
        let mut attempt = 0;
        let start = Instant::now();
        wait_until("the new revision is detected", async || {
            attempt += 1;
            let error = gate
                .client()
                .in_session(&format!("s{attempt}"))
                .call("talk", json!({}))
                .await["_meta"]["toolgate/error"]
                .clone();
            assert!(
                error.is_null()
                    || (error["errorCategory"] == "TRANSIENT" && error["effects"] == "none"),
                "{status}: {error}"
            );
            error.is_null()
        })
        .await;
        // The gateway recovers before its periodic health check.
        assert!(start.elapsed() < Duration::from_secs(25), "{status}: {:?}", start.elapsed());
        assert_eq!(ran.load(Ordering::SeqCst), 2, "{status}");
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_with_retry_after_is_not_retried_early() {
    for modern in [false, true] {
        for (caller, effect, effects) in
            [("eve", "write", "none"), ("dan", "read", "none"), ("dan", "write", "unknown")]
        {
            let early = Arc::new(AtomicUsize::new(0));
            let address = start_rejecting_server(modern, Arc::clone(&early)).await;
            let gate = TestGateway::open(&format!(
                "[upstreams.picky]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\n\
                 [tools.talk]\nkind = \"mcp\"\nupstream = \"picky\"\neffect = \"{effect}\"\npolicy = \"open\"\n"
            ))
            .await;
            let error =
                gate.client().call("talk", json!({"who": caller})).await["_meta"]["toolgate/error"]
                    .clone();
            assert_eq!(
                (&error["code"], &error["effects"]),
                (&json!("upstream_unavailable"), &json!(effects)),
                "{modern}: {error}"
            );
            assert_eq!(
                (&error["isRetryable"], &error["retryAfterMs"]),
                (&json!(effects == "none"), &json!(7_000)),
                "{modern}: {error}"
            );
            if caller == "dan" {
                // The message says that the server was reached.
                let message = error["message"].as_str().unwrap();
                assert!(message.contains("answered with status 503"), "{modern}: {error}");
            }
            assert_eq!(early.load(Ordering::SeqCst), 1, "{modern} {caller} {effect}");
            gate.shut_down().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_caller_does_not_open_circuit_breaker() {
    for modern in [false, true] {
        let address = start_rejecting_server(modern, Arc::default()).await;
        let gate = TestGateway::open(&format!(
            "[upstreams.picky]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nprompts = true\n\
             [tools.talk]\nkind = \"mcp\"\nupstream = \"picky\"\neffect = \"write\"\npolicy = \"open\"\n"
        ))
        .await;
        for round in 0..8 {
            let client = gate.client().in_session(&format!("s{round}"));
            assert_eq!(
                client.call_code("talk", json!({"who": "bob"})).await,
                "upstream_forbidden",
                "{modern} {round}"
            );
            let (_, prompt) = client.call_method("prompts/get", json!({"name": "ask"})).await;
            let message = prompt["error"]["message"].as_str().unwrap_or_default();
            assert!(
                !message.is_empty() && !message.contains("unknown prompt `"),
                "{modern} {round}: {prompt}"
            );
        }
        assert_eq!(
            gate.client().in_session("ann").call_code("talk", json!({"who": "ann"})).await,
            "ok",
            "{modern}"
        );
        gate.shut_down().await;
    }
}
