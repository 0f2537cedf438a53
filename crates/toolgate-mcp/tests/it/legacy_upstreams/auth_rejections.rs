//! Upstreams that turn the gateway away: tokens that run out, and calls that they do not let in.

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

/// A server whose tokens run out: of earlier revisions alone, or of the newest as well. It counts
/// how often it was greeted as an earlier one.
async fn start_expiring_token_server(
    modern: bool,
    period: Arc<AtomicUsize>,
    ran: Arc<AtomicUsize>,
    older_hellos: Arc<AtomicUsize>,
) -> String {
    serve_connections(move |mut stream| {
        let (period, ran, older_hellos) = (period.load(Ordering::SeqCst), Arc::clone(&ran), Arc::clone(&older_hellos));
        async move {
            let Some((head, asked)) = read_request(&mut stream).await else { return };
            let can = json!({"tools": {}, "prompts": {}, "resources": {}});
            let done = json!({"resultType": "complete", "content": [{"type": "text", "text": "done"}]});
            let with = |said: Value| modern_result(&asked, said);
            if asked["method"] == "initialize" {
                older_hellos.fetch_add(1, Ordering::SeqCst);
            }
            let said = match asked["method"].as_str().unwrap_or_default() {
                _ if head.starts_with("post /token") => {
                    // Nobody gets one who does not say who it is.
                    let known = head.contains("authorization: basic bwu6c2vzyw0=");
                    let token = json!({"access_token": format!("t{period}"), "token_type": "bearer"}).to_string();
                    if known {
                        http_response("200 OK", "application/json", &token)
                    } else {
                        http_response("401 No", "application/json", "{}")
                    }
                }
                _ if !head.contains(&format!("authorization: bearer t{period}")) => http_response("401 No", "application/json", "{}"),
                "server/discover" if modern => discover_result(&asked, "toll", &can),
                "server/discover" | "" | "initialize" | "ping" => legacy_response(&head, &asked, &can),
                "tools/list" => with(talk_tool_list()),
                "prompts/list" => with(json!({"prompts": [{"name": "ask"}]})),
                "prompts/get" => with(json!({"messages": [{"role": "user", "content": {"type": "text", "text": "done"}}]})),
                "resources/list" => with(json!({"resources": [{"uri": "note://x", "name": "x"}]})),
                "resources/templates/list" => with(json!({"resourceTemplates": []})),
                "resources/read" => with(json!({"contents": [{"uri": "note://x", "text": "done"}]})),
                "tools/call" => {
                    ran.fetch_add(1, Ordering::SeqCst);
                    json_rpc_result(&asked, done)
                }
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_token_is_renewed_for_calls() {
    for modern in [false, true] {
        let (period, ran, older_hellos) = (
            Arc::new(AtomicUsize::new(1)),
            Arc::<AtomicUsize>::default(),
            Arc::<AtomicUsize>::default(),
        );
        let address = start_expiring_token_server(
            modern,
            Arc::clone(&period),
            Arc::clone(&ran),
            Arc::clone(&older_hellos),
        )
        .await;
        let gate = TestGateway::open(&format!(
            "[upstreams.toll]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\noauth = {{ token_url = \"http://{address}/token\", client_id = \"me\", client_secret = \"sesam\" }}\n\
             [tools.talk]\nkind = \"mcp\"\nupstream = \"toll\"\neffect = \"write\"\npolicy = \"open\"\n"
        ))
        .await;
        for round in 0..2 {
            let before = ran.load(Ordering::SeqCst);
            let mut tries = 0;
            wait_until("it is let in", async || {
                tries += 1;
                let said = gate
                    .client()
                    .in_session(&format!("s{round}-{tries}"))
                    .call("talk", json!({}))
                    .await;
                let error = &said["_meta"]["toolgate/error"];
                // Who was not let in has done nothing, and may try again.
                assert!(
                    error.is_null()
                        || (error["effects"] == "none" && error["errorCategory"] == "TRANSIENT"),
                    "{modern}: {error}"
                );
                error.is_null()
            })
            .await;
            assert_eq!(ran.load(Ordering::SeqCst), before + 1);
            // Whoever speaks the newest revision is spoken to in it, however often it is connected
            // to.
            assert_eq!(older_hellos.load(Ordering::SeqCst) > 0, !modern, "{round}");
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
        let asked = [
            ("prompts/get", json!({"name": "ask"}), "messages"),
            ("resources/read", json!({"uri": "note://x"}), "contents"),
        ];
        for (method, params, member) in asked {
            let (_, said) = client.call_method(method, params.clone()).await;
            assert!(said["result"][member].is_array(), "{modern}: {said}");
            tokio::time::sleep(Duration::from_millis(2_100)).await;
            period.fetch_add(1, Ordering::SeqCst);
            let begun = Instant::now();
            wait_until("it is let in again", async || {
                client.call_method(method, params.clone()).await.1["result"][member].is_array()
            })
            .await;
            // Sooner than it would be asked by itself whether it is there.
            assert!(
                begun.elapsed() < Duration::from_secs(15),
                "{modern} {method}: {:?}",
                begun.elapsed()
            );
        }
        gate.shut_down().await;
    }
}

/// A server that turns some calls away: of an earlier revision, or of the newest. It counts those
/// that come too early.
async fn start_rejecting_server(modern: bool, early: Arc<AtomicUsize>) -> String {
    serve_connections(move |mut stream| {
        let early = Arc::clone(&early);
        async move {
            let Some((head, asked)) = read_request(&mut stream).await else { return };
            let can = json!({"tools": {}, "prompts": {}});
            let with = |said: Value| modern_result(&asked, said);
            let said = match asked["method"].as_str().unwrap_or_default() {
                "server/discover" if modern => discover_result(&asked, "picky", &can),
                "server/discover" | "" | "initialize" | "ping" => legacy_response(&head, &asked, &can),
                "tools/list" => with(talk_tool_list()),
                "prompts/list" => with(json!({"prompts": [{"name": "ask"}]})),
                "prompts/get" => http_response("403 No", "text/html", "<p>"),
                "tools/call" if asked.pointer("/params/arguments/who").is_some_and(|who| who == "bob") => {
                    http_response("403 No", "text/html", "<p>")
                }
                "tools/call" if asked.pointer("/params/arguments/who").is_some_and(|who| who == "eve") => {
                    early.fetch_add(1, Ordering::SeqCst);
                    http_response("429 Too Many\r\nretry-after: 7", "text/html", "<p>")
                }
                "tools/call" if asked.pointer("/params/arguments/who").is_some_and(|who| who == "dan") => {
                    early.fetch_add(1, Ordering::SeqCst);
                    http_response("503 Away\r\nretry-after: 7", "text/html", "<p>")
                }
                "tools/call" => json_rpc_result(&asked, json!({"resultType": "complete", "content": [{"type": "text", "text": "done"}]})),
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
        }
    })
    .await
}

/// A server of 2026-07-28 that is of an earlier revision from some moment on, and says so as the
/// servers of the TypeScript SDK do, or with a status alone. It counts calls that are carried out.
async fn start_downgraded_server(
    older: Arc<AtomicBool>,
    status: &'static str,
    ran: Arc<AtomicUsize>,
) -> String {
    serve_connections(move |mut stream| {
        let (is_older, ran) = (older.load(Ordering::SeqCst), Arc::clone(&ran));
        async move {
            let Some((head, asked)) = read_request(&mut stream).await else { return };
            let with = |said: Value| modern_result(&asked, said);
            let said = match asked["method"].as_str().unwrap_or_default() {
                "initialize" if is_older => json_rpc_result(&asked, initialize_result()).replacen("\r\n", "\r\nmcp-session-id: one\r\n", 1),
                "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                _ if is_older && !head.contains("mcp-session-id: one") => match status.starts_with("400") {
                    true => {
                        let error = json!({"code": -32000, "message": "Bad Request: Server not initialized"});
                        http_response(status, "application/json", &json!({"jsonrpc": "2.0", "id": null, "error": error}).to_string())
                    }
                    false => http_response(status, "text/plain", "no"),
                },
                "server/discover" => discover_result(&asked, "host", &json!({"tools": {}})),
                "tools/list" => with(talk_tool_list()),
                "tools/call" => {
                    ran.fetch_add(1, Ordering::SeqCst);
                    with(json!({"content": [{"type": "text", "text": "done"}]}))
                }
                "ping" => json_rpc_result(&asked, json!({})),
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
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
        // A call that was turned away has done nothing, and may be made again.
        let mut turn = 0;
        let begun = Instant::now();
        wait_until("it is understood", async || {
            turn += 1;
            let error = gate.client().in_session(&format!("s{turn}")).call("talk", json!({})).await
                ["_meta"]["toolgate/error"]
                .clone();
            assert!(
                error.is_null()
                    || (error["errorCategory"] == "TRANSIENT" && error["effects"] == "none"),
                "{status}: {error}"
            );
            error.is_null()
        })
        .await;
        // Sooner than it would be asked by itself whether it is there.
        assert!(begun.elapsed() < Duration::from_secs(25), "{status}: {:?}", begun.elapsed());
        assert_eq!(ran.load(Ordering::SeqCst), 2, "{status}");
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejection_with_retry_after_is_not_retried_early() {
    for modern in [false, true] {
        let early = Arc::new(AtomicUsize::new(0));
        let address = start_rejecting_server(modern, Arc::clone(&early)).await;
        let gate = TestGateway::open(&format!(
            "[upstreams.picky]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\n\
             [tools.talk]\nkind = \"mcp\"\nupstream = \"picky\"\neffect = \"write\"\npolicy = \"open\"\n"
        ))
        .await;
        let said =
            gate.client().call("talk", json!({"who": "eve"})).await["_meta"]["toolgate/error"]
                .clone();
        assert_eq!(
            (&said["code"], &said["effects"]),
            (&json!("upstream_unavailable"), &json!("none")),
            "{modern}: {said}"
        );
        assert_eq!(
            (&said["isRetryable"], &said["retryAfterMs"]),
            (&json!(true), &json!(7_000)),
            "{modern}: {said}"
        );
        assert_eq!(early.load(Ordering::SeqCst), 1, "{modern}: it was not asked again at once");
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failure_with_retry_after_is_not_retried_early() {
    for modern in [false, true] {
        for (effect, left) in [("read", "none"), ("write", "unknown")] {
            let early = Arc::new(AtomicUsize::new(0));
            let address = start_rejecting_server(modern, Arc::clone(&early)).await;
            let gate = TestGateway::open(&format!(
                "[upstreams.picky]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\n\
                 [tools.talk]\nkind = \"mcp\"\nupstream = \"picky\"\neffect = \"{effect}\"\npolicy = \"open\"\n"
            ))
            .await;
            let said =
                gate.client().call("talk", json!({"who": "dan"})).await["_meta"]["toolgate/error"]
                    .clone();
            assert_eq!(
                (&said["code"], &said["effects"]),
                (&json!("upstream_unavailable"), &json!(left)),
                "{modern}: {said}"
            );
            assert_eq!(
                (&said["isRetryable"], &said["retryAfterMs"]),
                (&json!(left == "none"), &json!(7_000)),
                "{modern}: {said}"
            );
            // It was reached, and has said so.
            assert!(
                said["message"].as_str().unwrap().contains("answered with status 503"),
                "{modern}: {said}"
            );
            assert_eq!(
                early.load(Ordering::SeqCst),
                1,
                "{modern} {effect}: it was not asked again at once"
            );
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
        for turn in 0..8 {
            let client = gate.client().in_session(&format!("s{turn}"));
            assert_eq!(
                client.call_code("talk", json!({"who": "bob"})).await,
                "upstream_forbidden",
                "{modern} {turn}"
            );
            let (_, prompt) = client.call_method("prompts/get", json!({"name": "ask"})).await;
            let why = prompt["error"]["message"].as_str().unwrap_or_default();
            assert!(
                !why.is_empty() && !why.contains("there is no prompt"),
                "{modern} {turn}: {prompt}"
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
