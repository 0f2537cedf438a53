//! Upstreams that turn the gateway away: tokens that run out, and calls that they do not let in.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use super::{about, answer, discovered, fresh, listen, older, request, result, tools};
use crate::support::{Gate, until};

/// A server whose tokens run out: of earlier revisions alone, or of the newest as well. It counts how often it was greeted as an earlier one.
async fn tollgate(modern: bool, period: Arc<AtomicUsize>, ran: Arc<AtomicUsize>, older_hellos: Arc<AtomicUsize>) -> String {
    listen(move |mut stream| {
        let (period, ran, older_hellos) = (period.load(Ordering::SeqCst), Arc::clone(&ran), Arc::clone(&older_hellos));
        async move {
            let Some((head, asked)) = request(&mut stream).await else { return };
            let can = json!({"tools": {}, "prompts": {}, "resources": {}});
            let done = json!({"resultType": "complete", "content": [{"type": "text", "text": "done"}]});
            let with = |said: Value| fresh(&asked, said);
            if asked["method"] == "initialize" {
                older_hellos.fetch_add(1, Ordering::SeqCst);
            }
            let said = match asked["method"].as_str().unwrap_or_default() {
                _ if head.starts_with("post /token") => {
                    // Nobody gets one who does not say who it is.
                    let known = head.contains("authorization: basic bwu6c2vzyw0=");
                    let token = json!({"access_token": format!("t{period}"), "token_type": "bearer"}).to_string();
                    if known { answer("200 OK", "application/json", &token) } else { answer("401 No", "application/json", "{}") }
                }
                _ if !head.contains(&format!("authorization: bearer t{period}")) => answer("401 No", "application/json", "{}"),
                "server/discover" if modern => discovered(&asked, "toll", &can),
                "server/discover" | "" | "initialize" | "ping" => older(&head, &asked, &can),
                "tools/list" => with(tools()),
                "prompts/list" => with(json!({"prompts": [{"name": "ask"}]})),
                "prompts/get" => with(json!({"messages": [{"role": "user", "content": {"type": "text", "text": "done"}}]})),
                "resources/list" => with(json!({"resources": [{"uri": "note://x", "name": "x"}]})),
                "resources/templates/list" => with(json!({"resourceTemplates": []})),
                "resources/read" => with(json!({"contents": [{"uri": "note://x", "text": "done"}]})),
                "tools/call" => {
                    ran.fetch_add(1, Ordering::SeqCst);
                    result(&asked, done)
                }
                _ => answer("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_has_run_out_is_fetched_anew() {
    for modern in [false, true] {
        let (period, ran, older_hellos) = (Arc::new(AtomicUsize::new(1)), Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let address = tollgate(modern, Arc::clone(&period), Arc::clone(&ran), Arc::clone(&older_hellos)).await;
        let gate = Gate::open(&format!(
            "[upstreams.toll]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\noauth = {{ token_url = \"http://{address}/token\", client_id = \"me\", client_secret = \"sesam\" }}\n\
             [tools.talk]\nkind = \"mcp\"\nupstream = \"toll\"\neffect = \"write\"\npolicy = \"open\"\n"
        ))
        .await;
        for round in 0..2 {
            let before = ran.load(Ordering::SeqCst);
            let mut tries = 0;
            until("it is let in", async || {
                tries += 1;
                let said = gate.client().in_session(&format!("s{round}-{tries}")).call("talk", json!({})).await;
                let error = &said["_meta"]["toolgate/error"];
                // Who was not let in has done nothing, and may try again.
                assert!(error.is_null() || (error["effects"] == "none" && error["errorCategory"] == "TRANSIENT"), "{modern}: {error}");
                error.is_null()
            })
            .await;
            assert_eq!(ran.load(Ordering::SeqCst), before + 1);
            // Whoever speaks the newest revision is spoken to in it, however often it is connected to.
            assert_eq!(older_hellos.load(Ordering::SeqCst) > 0, !modern, "{round}");
            tokio::time::sleep(Duration::from_millis(2_100)).await;
            period.fetch_add(1, Ordering::SeqCst);
        }
        gate.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_has_run_out_is_fetched_anew_also_where_no_tool_is_called() {
    for modern in [false, true] {
        let period = Arc::new(AtomicUsize::new(1));
        let address = tollgate(modern, Arc::clone(&period), Arc::default(), Arc::default()).await;
        let gate = Gate::open(&format!(
            "[upstreams.toll]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n\
             oauth = {{ token_url = \"http://{address}/token\", client_id = \"me\", client_secret = \"sesam\" }}\n"
        ))
        .await;
        let client = gate.client();
        let asked = [("prompts/get", json!({"name": "ask"}), "messages"), ("resources/read", json!({"uri": "note://x"}), "contents")];
        for (method, params, member) in asked {
            let (_, said) = client.ask(method, params.clone()).await;
            assert!(said["result"][member].is_array(), "{modern}: {said}");
            tokio::time::sleep(Duration::from_millis(2_100)).await;
            period.fetch_add(1, Ordering::SeqCst);
            let begun = Instant::now();
            until("it is let in again", async || client.ask(method, params.clone()).await.1["result"][member].is_array()).await;
            // Sooner than it would be asked by itself whether it is there.
            assert!(begun.elapsed() < Duration::from_secs(15), "{modern} {method}: {:?}", begun.elapsed());
        }
        gate.end().await;
    }
}

/// A server that turns some calls away: of an earlier revision, or of the newest. It counts those that come too early.
async fn picky(modern: bool, early: Arc<AtomicUsize>) -> String {
    listen(move |mut stream| {
        let early = Arc::clone(&early);
        async move {
            let Some((head, asked)) = request(&mut stream).await else { return };
            let can = json!({"tools": {}, "prompts": {}});
            let with = |said: Value| fresh(&asked, said);
            let said = match asked["method"].as_str().unwrap_or_default() {
                "server/discover" if modern => discovered(&asked, "picky", &can),
                "server/discover" | "" | "initialize" | "ping" => older(&head, &asked, &can),
                "tools/list" => with(tools()),
                "prompts/list" => with(json!({"prompts": [{"name": "ask"}]})),
                "prompts/get" => answer("403 No", "text/html", "<p>"),
                "tools/call" if asked.pointer("/params/arguments/who").is_some_and(|who| who == "bob") => {
                    answer("403 No", "text/html", "<p>")
                }
                "tools/call" if asked.pointer("/params/arguments/who").is_some_and(|who| who == "eve") => {
                    early.fetch_add(1, Ordering::SeqCst);
                    answer("429 Too Many\r\nretry-after: 7", "text/html", "<p>")
                }
                "tools/call" if asked.pointer("/params/arguments/who").is_some_and(|who| who == "dan") => {
                    early.fetch_add(1, Ordering::SeqCst);
                    answer("503 Away\r\nretry-after: 7", "text/html", "<p>")
                }
                "tools/call" => result(&asked, json!({"resultType": "complete", "content": [{"type": "text", "text": "done"}]})),
                _ => answer("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
        }
    })
    .await
}

/// A server of 2026-07-28 that is of an earlier revision from some moment on, and says so as the servers of the TypeScript SDK do, or with
/// a status alone. It counts calls that are carried out.
async fn downgraded(older: Arc<AtomicBool>, status: &'static str, ran: Arc<AtomicUsize>) -> String {
    listen(move |mut stream| {
        let (is_older, ran) = (older.load(Ordering::SeqCst), Arc::clone(&ran));
        async move {
            let Some((head, asked)) = request(&mut stream).await else { return };
            let with = |said: Value| fresh(&asked, said);
            let said = match asked["method"].as_str().unwrap_or_default() {
                "initialize" if is_older => result(&asked, about()).replacen("\r\n", "\r\nmcp-session-id: one\r\n", 1),
                "" if head.starts_with("get ") => answer("405 No", "text/plain", ""),
                _ if is_older && !head.contains("mcp-session-id: one") => match status.starts_with("400") {
                    true => {
                        let error = json!({"code": -32000, "message": "Bad Request: Server not initialized"});
                        answer(status, "application/json", &json!({"jsonrpc": "2.0", "id": null, "error": error}).to_string())
                    }
                    false => answer(status, "text/plain", "no"),
                },
                "server/discover" => discovered(&asked, "host", &json!({"tools": {}})),
                "tools/list" => with(tools()),
                "tools/call" => {
                    ran.fetch_add(1, Ordering::SeqCst);
                    with(json!({"content": [{"type": "text", "text": "done"}]}))
                }
                "ping" => result(&asked, json!({})),
                _ => answer("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_back_with_an_earlier_revision_is_noticed_by_the_next_call() {
    for status in ["400 Bad Request", "404 Not Found", "405 Method Not Allowed", "406 Not Acceptable"] {
        let (older, ran) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let address = downgraded(Arc::clone(&older), status, Arc::clone(&ran)).await;
        let gate = Gate::open(&format!(
            "[upstreams.host]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\n\
             [tools.talk]\nkind = \"mcp\"\nupstream = \"host\"\neffect = \"write\"\npolicy = \"open\"\n"
        ))
        .await;
        assert_eq!(gate.client().in_session("before").code("talk", json!({})).await, "ok", "{status}");
        older.store(true, Ordering::SeqCst);
        // A call that was turned away has done nothing, and may be made again.
        let mut turn = 0;
        let begun = Instant::now();
        until("it is understood", async || {
            turn += 1;
            let error = gate.client().in_session(&format!("s{turn}")).call("talk", json!({})).await["_meta"]["toolgate/error"].clone();
            assert!(error.is_null() || (error["errorCategory"] == "TRANSIENT" && error["effects"] == "none"), "{status}: {error}");
            error.is_null()
        })
        .await;
        // Sooner than it would be asked by itself whether it is there.
        assert!(begun.elapsed() < Duration::from_secs(25), "{status}: {:?}", begun.elapsed());
        assert_eq!(ran.load(Ordering::SeqCst), 2, "{status}");
        gate.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_says_when_it_may_be_asked_again_is_not_asked_before() {
    for modern in [false, true] {
        let early = Arc::new(AtomicUsize::new(0));
        let address = picky(modern, Arc::clone(&early)).await;
        let gate = Gate::open(&format!(
            "[upstreams.picky]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\n\
             [tools.talk]\nkind = \"mcp\"\nupstream = \"picky\"\neffect = \"write\"\npolicy = \"open\"\n"
        ))
        .await;
        let said = gate.client().call("talk", json!({"who": "eve"})).await["_meta"]["toolgate/error"].clone();
        assert_eq!((&said["code"], &said["effects"]), (&json!("upstream_unavailable"), &json!("none")), "{modern}: {said}");
        assert_eq!((&said["isRetryable"], &said["retryAfterMs"]), (&json!(true), &json!(7_000)), "{modern}: {said}");
        assert_eq!(early.load(Ordering::SeqCst), 1, "{modern}: it was not asked again at once");
        gate.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_fails_and_says_when_it_may_be_asked_again_is_not_asked_before() {
    for modern in [false, true] {
        for (effect, left) in [("read", "none"), ("write", "unknown")] {
            let early = Arc::new(AtomicUsize::new(0));
            let address = picky(modern, Arc::clone(&early)).await;
            let gate = Gate::open(&format!(
                "[upstreams.picky]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\n\
                 [tools.talk]\nkind = \"mcp\"\nupstream = \"picky\"\neffect = \"{effect}\"\npolicy = \"open\"\n"
            ))
            .await;
            let said = gate.client().call("talk", json!({"who": "dan"})).await["_meta"]["toolgate/error"].clone();
            assert_eq!((&said["code"], &said["effects"]), (&json!("upstream_unavailable"), &json!(left)), "{modern}: {said}");
            assert_eq!((&said["isRetryable"], &said["retryAfterMs"]), (&json!(left == "none"), &json!(7_000)), "{modern}: {said}");
            // It was reached, and has said so.
            assert!(said["message"].as_str().unwrap().contains("answered with status 503"), "{modern}: {said}");
            assert_eq!(early.load(Ordering::SeqCst), 1, "{modern} {effect}: it was not asked again at once");
            gate.end().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_turned_away_by_an_upstream_keeps_nobody_else_from_it() {
    for modern in [false, true] {
        let address = picky(modern, Arc::default()).await;
        let gate = Gate::open(&format!(
            "[upstreams.picky]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nprompts = true\n\
             [tools.talk]\nkind = \"mcp\"\nupstream = \"picky\"\neffect = \"write\"\npolicy = \"open\"\n"
        ))
        .await;
        for turn in 0..8 {
            let client = gate.client().in_session(&format!("s{turn}"));
            assert_eq!(client.code("talk", json!({"who": "bob"})).await, "upstream_forbidden", "{modern} {turn}");
            let (_, prompt) = client.ask("prompts/get", json!({"name": "ask"})).await;
            let why = prompt["error"]["message"].as_str().unwrap_or_default();
            assert!(!why.is_empty() && !why.contains("there is no prompt"), "{modern} {turn}: {prompt}");
        }
        assert_eq!(gate.client().in_session("ann").code("talk", json!({"who": "ann"})).await, "ok", "{modern}");
        gate.end().await;
    }
}
