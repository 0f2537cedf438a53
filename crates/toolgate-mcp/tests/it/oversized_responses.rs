//! What an upstream may throw at those before it: answers that are nested or packed without end,
//! more at once than it takes, and nothing at all. And what a client may throw.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use toolgate_mcp::UpstreamStatus;

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{McpTestClient, TestGateway, fixture_path, run_in_own_process, wait_until};
use crate::upstream_faults::{ClientCrowd, well_and_ill_config};

const NESTING_LEVELS: usize = 100_000;
/// Tools that answer with something that is not to be read.
const BOMB_TOOLS: [&str; 9] =
    ["result", "structured", "meta", "error", "levels", "event", "gzip", "deflate", "packed"];
const OBJECT_SCHEMA: &str = r#"{"type":"object"}"#;

fn nested_arrays(levels: usize) -> String {
    format!("{}{}", "[".repeat(levels), "]".repeat(levels))
}

/// A gigabyte of zeros in 7 MB.
fn compressed_zeros(gzip: bool) -> Vec<u8> {
    // A block in the fixed code of RFC 1951: one zero, and then eight times `258 more of the last
    // byte`, which is whole bytes again.
    const DEFLATE_START: [u8; 2] = [0x63, 0x18];
    const DEFLATE_REPEATED_BLOCK: [u8; 13] =
        [0x05, 0xa3, 0x60, 0x14, 0x8c, 0x82, 0x51, 0x30, 0x0a, 0x46, 0xc1, 0x28, 0x18];
    let head: &[u8] = if gzip { &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255] } else { &[0x78, 0x01] };
    [head, &DEFLATE_START[..], &DEFLATE_REPEATED_BLOCK.repeat(520_300)[..]].concat()
}

/// What a tool answers.
fn bomb_response(tool: &str, id: &Value) -> Vec<u8> {
    let said = |result: &str| format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#);
    let with = |more: &str| said(&format!(r#"{{"resultType":"complete","content":[]{more}}}"#));
    let structured =
        |levels: usize| with(&format!(r#","structuredContent":{{"a":{}}}"#, nested_arrays(levels)));
    let json = |text: &str| http_response("200 OK", "application/json", text).into_bytes();
    let coded = |coding: &str, kind: &str, body: &[u8]| {
        let kind = format!("{kind}\r\ncontent-encoding: {coding}");
        [http_response("200 OK", &kind, "").as_bytes(), body].concat()
    };
    match tool {
        // JSON within a text is text, however deep.
        "text" => json(&said(&format!(
            r#"{{"resultType":"complete","content":[{{"type":"text","text":"{}"}}]}}"#,
            nested_arrays(NESTING_LEVELS)
        ))),
        "result" => json(&said(&nested_arrays(NESTING_LEVELS))),
        "structured" => json(&structured(NESTING_LEVELS)),
        "meta" => json(&with(&format!(r#","_meta":{{"a":{}}}"#, nested_arrays(NESTING_LEVELS)))),
        "error" => json(&format!(
            r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":1,"message":"no","data":{}}}}}"#,
            nested_arrays(NESTING_LEVELS)
        )),
        // It can be read, and is more than a row may hold.
        "levels" => json(&structured(110)),
        "event" => http_response(
            "200 OK",
            "text/event-stream",
            &format!("data: {}\n\n", structured(NESTING_LEVELS)),
        )
        .into_bytes(),
        "gzip" => coded("gzip", "application/json", &compressed_zeros(true)),
        "deflate" => coded("deflate", "application/json", &compressed_zeros(false)),
        "packed" => coded("gzip", "text/event-stream", &compressed_zeros(true)),
        _ => json(&with("")),
    }
}

fn tool_definition(name: &str, schema: &str) -> String {
    format!(r#"{{"name":"{name}","description":"Does.","inputSchema":{schema}}}"#)
}

/// What a server of either time says to all but calls; `tools` is JSON.
fn handshake_response(modern: bool, head: &str, asked: &Value, tools: &str) -> Option<String> {
    let own = json!({"name": "thrower", "version": "1"});
    Some(match asked["method"].as_str().unwrap_or_default() {
        "server/discover" if modern => json_rpc_result(
            asked,
            json!({"resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "serverInfo": own,
                "ttlMs": 1000, "cacheScope": "private", "_meta": {"io.modelcontextprotocol/serverInfo": own}}),
        ),
        "server/discover" => http_response("404 No", "text/html", "<p>"),
        "initialize" => json_rpc_result(asked, initialize_result()),
        "ping" => json_rpc_result(asked, json!({})),
        "tools/list" => {
            let id = &asked["id"];
            let listed = format!(
                r#"{{"resultType":"complete","tools":[{tools}],"ttlMs":1000,"cacheScope":"private"}}"#
            );
            http_response(
                "200 OK",
                "application/json",
                &format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{listed}}}"#),
            )
        }
        "tools/call" => return None,
        "" if head.starts_with("get ") || head.starts_with("delete ") => {
            http_response("405 No", "text/plain", "")
        }
        _ => http_response("202 Accepted", "text/plain", ""),
    })
}

/// An upstream of either time with these tools; where it is, and how often one of them ran.
async fn start_bomb_server(modern: bool, tools: String) -> (String, Arc<AtomicUsize>) {
    let ran = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&ran);
    let address = serve_connections(move |mut stream| {
        let (tools, ran) = (tools.clone(), Arc::clone(&counted));
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let response = match handshake_response(modern, &head, &request, &tools) {
                _ if head.starts_with("get /packed") => bomb_response("gzip", &Value::Null),
                Some(response) => response.into_bytes(),
                None => {
                    ran.fetch_add(1, Ordering::SeqCst);
                    bomb_response(
                        request.pointer("/params/name").and_then(Value::as_str).unwrap_or_default(),
                        &request["id"],
                    )
                }
            };
            let _ = stream.write_all(&response).await;
        }
    })
    .await;
    (address, ran)
}

/// In a process of its own, where nobody else needs memory, and a stack that overflows takes nobody
/// along.
#[test]
fn upstream_bomb_is_an_error() {
    run_in_own_process("oversized_responses::upstream_bombs_in_own_process");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by upstream_bomb_is_an_error"]
async fn upstream_bombs_in_own_process() {
    let all: Vec<String> = ["fine", "text"]
        .into_iter()
        .chain(BOMB_TOOLS)
        .map(|name| tool_definition(name, OBJECT_SCHEMA))
        .collect();
    let deep = tool_definition(
        "deep",
        &format!(
            r#"{{"type":"object","properties":{{"a":{{"enum":{}}}}}}}"#,
            nested_arrays(NESTING_LEVELS)
        ),
    );
    let items = format!("{}{{}}{}", r#"{"items":"#.repeat(100), "}".repeat(100));
    let steep =
        tool_definition("steep", &format!(r#"{{"type":"object","properties":{{"a":{items}}}}}"#))
            + ","
            + &tool_definition("fine", OBJECT_SCHEMA);
    let servers = [
        ("new", start_bomb_server(true, all.join(",")).await),
        ("old", start_bomb_server(false, all.join(",")).await),
        ("deep_new", start_bomb_server(true, deep.clone()).await),
        ("deep_old", start_bomb_server(false, deep).await),
        ("steep", start_bomb_server(true, steep).await),
    ];
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("revision"), "deep").unwrap();
    let (program, revision) = (json!(fixture_path()), json!(home.path().join("revision")));
    let mut text = well_and_ill_config(&format!(
        "command = {program}\nargs = [\"--ill\"]\nundeclared = \"open\"\ntimeout = \"1s\""
    ));
    for (name, (address, _)) in &servers {
        text += &format!(
            "[upstreams.{name}]\nurl = \"http://{address}/mcp\"\nundeclared = \"open\"\ntimeout = \"20s\"\n"
        );
    }
    text += &format!(
        "[upstreams.deep_out]\ncommand = {program}\nargs = [\"--ill\"]\nenv = {{ FIXTURE_REVISION = {revision} }}\n"
    );
    let web = &servers[0].1.0;
    text += &format!(
        "[tools.web]\nkind = \"http\"\neffect = \"read\"\nnetworks = [\"127.0.0.0/8\"]\nurl = \"http://{web}/packed\"\nretry = {{ times = 0 }}\n"
    );
    let gate = TestGateway::open(&text).await;
    let client = gate.client();
    let call = async |tool: &str, session: &str, arguments: Value| {
        client.in_session(&format!("{tool}-{session}")).call(tool, arguments).await["_meta"]["toolgate/error"].clone()
    };
    let crowd = ClientCrowd::start_with_tools(&client, &["well_echo"]);
    for (name, (_, ran)) in &servers[..2] {
        for bomb in BOMB_TOOLS {
            let before = ran.load(Ordering::SeqCst);
            let error = call(&format!("{name}_{bomb}"), "s", json!({})).await;
            // It was asked, and what it did nobody can tell; so it is not asked again.
            assert!(
                matches!(error["effects"].as_str(), Some("unknown" | "done")),
                "{name} {bomb}: {:.400}",
                error.to_string()
            );
            assert_eq!(ran.load(Ordering::SeqCst), before + 1, "{name} {bomb}");
            assert_eq!(
                call(&format!("{name}_fine"), bomb, json!({})).await,
                Value::Null,
                "{name} goes on after {bomb}"
            );
        }
        assert_eq!(call(&format!("{name}_text"), "s", json!({})).await, Value::Null);
    }
    let error = call("ill_mark", "s", json!({"key": "k", "how": "deep"})).await;
    assert_eq!(
        (&error["code"], &error["effects"]),
        (&json!("timeout"), &json!("unknown")),
        "{error}"
    );
    assert_eq!(call("ill_echo", "s", json!({"text": "x"})).await, Value::Null);
    assert_eq!(call("web", "s", json!({})).await["code"], "invalid_result");
    // Whose tools cannot be read has none; whose tools are many levels deep has others as well.
    for health in gate.gateway.health() {
        assert_eq!(
            matches!(health.status, UpstreamStatus::Up { .. }),
            !health.name.starts_with("deep"),
            "{}: {:?}",
            health.name,
            health.status
        );
    }
    assert_eq!(call("steep_fine", "s", json!({})).await, Value::Null);
    crowd.finish().await;
    gate.shut_down().await;
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let most = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap()
        .trim()
        .trim_end_matches(" kB");
    assert!(most.parse::<usize>().unwrap() < 512 << 10, "{most} KiB of memory");
}

/// In a process of its own: a stack that overflows takes all of it along.
#[test]
fn client_bomb_is_an_error() {
    run_in_own_process("oversized_responses::client_bombs_in_own_process");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by client_bomb_is_an_error"]
async fn client_bombs_in_own_process() {
    let gate = TestGateway::open("[tools.calc]\nkind = \"builtin\"\n").await;
    let (http, client) = (crate::tls_and_authentication::http_client(), gate.client());
    // As deep as there is room for in a request, where nobody has said how large it may be.
    let deep = nested_arrays(2_000_000);
    let meta = r#""io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}"#;
    let call = |arguments: &str, more: &str| {
        let params =
            format!(r#"{{"name":"calc","arguments":{arguments},"_meta":{{{meta}{more}}}}}"#);
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{params}}}"#)
    };
    let bodies = [
        ("mcp", call(&deep, "")),
        ("mcp", call(&format!(r#"{{"expression":{deep}}}"#), "")),
        ("mcp", call(r#"{"expression":"1"}"#, &format!(r#","a":{deep}"#))),
        ("mcp", deep.clone()),
        ("mcp", "[".repeat(4_000_000)),
        (
            "v1/calls/check",
            format!(
                r#"{{"id":"1","session":"s","tool":"calc","arguments":{{"expression":{deep}}}}}"#
            ),
        ),
        ("v1/calls/check", deep),
    ];
    let fine =
        async |n: usize| client.call_code("calc", json!({"expression": format!("{n}+1")})).await;
    for (n, (path, body)) in bodies.iter().enumerate() {
        let request = http
            .post(format!("{}/{path}", gate.url))
            .header("accept", "application/json, text/event-stream");
        let request = request
            .header("content-type", "application/json")
            .header("mcp-protocol-version", "2026-07-28");
        let request = request
            .header("mcp-method", "tools/call")
            .header("mcp-name", "calc")
            .header("toolgate-session", format!("s{n}"));
        let said = request.body(body.clone()).send().await.unwrap();
        let (status, said) = (said.status().as_u16(), said.text().await.unwrap());
        // Arguments are judged by the gate; all else is no request. It is not too large.
        let is_denied = said.contains("\"isError\":true") || said.contains("\"decision\":\"deny\"");
        let is_refused = (400..500).contains(&status) && status != 413;
        assert!(is_refused || (status == 200 && is_denied), "{n}: {status} {said:.400}");
        assert_eq!(fine(n).await, "ok", "{n}");
    }
    let (_, mut ask, mut answers) = gate.connect_streams(None);
    let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": {"name": "t", "version": "1"}}});
    ask.write_all(
        format!("{hello}\n{}\n", json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))
            .as_bytes(),
    )
    .await
    .unwrap();
    answers.next_line().await.unwrap().unwrap();
    for (_, body) in bodies.iter().filter(|(path, _)| *path == "mcp") {
        ask.write_all(format!("{body}\n").as_bytes()).await.unwrap();
        let said: Value =
            serde_json::from_str(&answers.next_line().await.unwrap().unwrap()).unwrap();
        assert!(
            said["error"].is_object() || said["result"]["isError"] == json!(true),
            "{:.400}",
            said.to_string()
        );
    }
    drop((ask, answers));
    assert_eq!(fine(bodies.len()).await, "ok");
    gate.shut_down().await;
}

/// Who is at an upstream.
#[derive(Default)]
struct ConcurrencyProbe {
    running: AtomicUsize,
    peak: AtomicUsize,
    total: AtomicUsize,
    /// Nobody leaves before so many are there.
    release_at: usize,
}

/// An upstream of 2026-07-28 whose tools take as long as they are told: how to reach it, and who is
/// there.
async fn start_concurrency_probe(full: usize) -> (String, Arc<ConcurrencyProbe>) {
    let desk = Arc::new(ConcurrencyProbe { release_at: full, ..ConcurrencyProbe::default() });
    let own = Arc::clone(&desk);
    let schema =
        r#"{"type":"object","properties":{"ms":{"type":"integer"},"n":{"type":"integer"}}}"#;
    let tools = ["wait", "rest"].map(|name| tool_definition(name, schema)).join(",");
    let address = serve_connections(move |mut stream| {
        let (tools, desk) = (tools.clone(), Arc::clone(&own));
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let response = match handshake_response(true, &head, &request, &tools) {
                Some(response) => response,
                None => {
                    desk.total.fetch_add(1, Ordering::SeqCst);
                    desk.peak.fetch_max(
                        desk.running.fetch_add(1, Ordering::SeqCst) + 1,
                        Ordering::SeqCst,
                    );
                    let ms = request
                        .pointer("/params/arguments/ms")
                        .and_then(Value::as_u64)
                        .unwrap_or_default();
                    while desk.peak.load(Ordering::SeqCst) < desk.release_at {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                    desk.running.fetch_sub(1, Ordering::SeqCst);
                    json_rpc_result(&request, json!({"resultType": "complete", "content": []}))
                }
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await;
    (format!("url = \"http://{address}/mcp\"\n"), desk)
}

/// A call, each in a session of its own: what went wrong with it.
async fn call_error(client: &McpTestClient, tool: &str, n: usize, ms: u64) -> Value {
    let client = client.in_session(&format!("{tool}-{n}"));
    client.call(tool, json!({"ms": ms, "n": n})).await["_meta"]["toolgate/error"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrency_and_timeout_are_per_upstream() {
    let ((narrow, few), (usual, many), (quick, _), (full, one)) = (
        start_concurrency_probe(3).await,
        start_concurrency_probe(16).await,
        start_concurrency_probe(0).await,
        start_concurrency_probe(0).await,
    );
    let text = format!(
        "[upstreams.narrow]\n{narrow}undeclared = \"read\"\nconcurrency = 3\n[upstreams.usual]\n{usual}undeclared = \"read\"\n\
         [upstreams.quick]\n{quick}undeclared = \"read\"\ntimeout = \"400ms\"\n\
         [tools.quick_rest]\nkind = \"mcp\"\nupstream = \"quick\"\neffect = \"read\"\ntimeout = \"20s\"\n\
         [upstreams.full]\n{full}concurrency = 1\ntimeout = \"4s\"\n\
         [tools.full_wait]\nkind = \"mcp\"\nupstream = \"full\"\neffect = \"write\"\npolicy = \"open\"\n"
    );
    let gate = TestGateway::open(&text).await;
    let client = gate.client();
    let crowd = (0..128)
        .map(|n| call_error(&client, if n < 64 { "narrow_wait" } else { "usual_wait" }, n, 60));
    let errors = join_all(crowd).await;
    assert!(errors.iter().all(Value::is_null), "{errors:?}");
    let (few, many) = (few.peak.load(Ordering::SeqCst), many.peak.load(Ordering::SeqCst));
    assert_eq!((few, many), (3, 16), "so many at the same time, and no more");
    // The time of an upstream holds for its tools but for those that have their own, and for nobody
    // else's.
    let (late, patient, other) = tokio::join!(
        call_error(&client, "quick_wait", 0, 30_000),
        call_error(&client, "quick_rest", 0, 1_200),
        call_error(&client, "usual_wait", 0, 1_200)
    );
    assert_eq!((&late["code"], &late["effects"]), (&json!("timeout"), &json!("none")), "{late}");
    assert!(patient.is_null() && other.is_null(), "{patient} {other}");
    // Who finds no place in time was not sent, and is told so.
    let told = join_all((0..8).map(|n| call_error(&client, "full_wait", n, 30_000))).await;
    let (sent, unsent): (Vec<&Value>, Vec<&Value>) =
        told.iter().partition(|error| error["effects"] == "unknown");
    let came = one.total.load(Ordering::SeqCst);
    assert!(came >= 1 && came <= sent.len() && !unsent.is_empty(), "{came} came: {told:?}");
    assert!(
        unsent
            .iter()
            .all(|error| error["code"] == "upstream_unavailable" && error["effects"] == "none"),
        "{told:?}"
    );
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn circuit_breaker_opens_and_closes_for_silent_upstream() {
    let ((ill, desk), (well, _)) =
        (start_concurrency_probe(0).await, start_concurrency_probe(0).await);
    let text = format!(
        "[upstreams.ill]\n{ill}undeclared = \"read\"\ntimeout = \"3s\"\nconcurrency = 64\n\
         [tools.ill_rest]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\ntimeout = \"20s\"\n\
         [upstreams.well]\n{well}undeclared = \"read\"\n"
    );
    let gate = TestGateway::open(&text).await;
    let client = gate.client();
    let unanswered = async |from: usize, many: usize| {
        let told =
            join_all((from..from + many).map(|n| call_error(&client, "ill_wait", n, 600_000)))
                .await;
        assert!(told.iter().all(|error| error["code"] == "timeout"), "{told:?}");
    };
    // Four in a row are no reason, however often: an answer in between counts.
    for round in 0..2 {
        unanswered(round * 10, 4).await;
        assert_eq!(call_error(&client, "ill_rest", round, 0).await, Value::Null);
    }
    unanswered(100, 5).await;
    let came = || desk.total.load(Ordering::SeqCst);
    let before = came();
    let told = join_all((0..64).map(|n| call_error(&client, "ill_rest", 200 + n, 0))).await;
    let is_left_alone = |error: &&Value| {
        error["effects"] == "none"
            && error["message"].as_str().is_some_and(|message| message.contains("circuit breaker"))
    };
    let turned_away = told.iter().filter(is_left_alone).count();
    // Nobody was sent there but those who were answered.
    assert!(
        turned_away > 0 && came() - before == told.len() - turned_away,
        "{turned_away} {told:?}"
    );
    assert_eq!(call_error(&client, "well_wait", 0, 0).await, Value::Null);
    let mut turn = 1_000;
    wait_until("it is asked again", async || {
        turn += 1;
        call_error(&client, "ill_rest", turn, 0).await.is_null()
    })
    .await;
    unanswered(300, 4).await;
    assert_eq!(
        call_error(&client, "ill_rest", 3_000, 0).await,
        Value::Null,
        "it is as any other again"
    );
    gate.shut_down().await;
}
