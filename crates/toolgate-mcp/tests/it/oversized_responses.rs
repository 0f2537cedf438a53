//! Tests oversized and deeply nested messages of upstreams and clients, concurrency limits, and
//! silent upstreams.

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
use crate::support::{
    ACCEPT_JSON_OR_EVENTS, CALC_TOOL_CONFIG, McpTestClient, TestGateway, fixture_path, http_client,
    run_in_own_process, wait_until,
};
use crate::upstream_faults::{ClientCrowd, well_and_ill_config};

const NESTING_LEVELS: usize = 100_000;
/// Tools whose answers are bombs: nested, compressed or malformed.
const BOMB_TOOLS: [&str; 9] =
    ["result", "structured", "meta", "error", "levels", "event", "gzip", "deflate", "packed"];
const OBJECT_SCHEMA: &str = r#"{"type":"object"}"#;

fn nested_arrays(levels: usize) -> String {
    format!("{}{}", "[".repeat(levels), "]".repeat(levels))
}

/// Returns a gigabyte of zeros in 7 MB.
fn compressed_zeros(gzip: bool) -> Vec<u8> {
    // RFC 1951 block with fixed codes: one zero, and then eight repeats of 258 bytes, which end at
    // a byte boundary.
    const DEFLATE_START: [u8; 2] = [0x63, 0x18];
    const DEFLATE_REPEATED_BLOCK: [u8; 13] =
        [0x05, 0xa3, 0x60, 0x14, 0x8c, 0x82, 0x51, 0x30, 0x0a, 0x46, 0xc1, 0x28, 0x18];
    let head: &[u8] = if gzip { &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255] } else { &[0x78, 0x01] };
    [head, &DEFLATE_START[..], &DEFLATE_REPEATED_BLOCK.repeat(520_300)[..]].concat()
}

/// Returns the response of a tool.
fn bomb_response(tool: &str, id: &Value) -> Vec<u8> {
    let response = |result: &str| format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#);
    let complete =
        |extra: &str| response(&format!(r#"{{"resultType":"complete","content":[]{extra}}}"#));
    let structured = |levels: usize| {
        complete(&format!(r#","structuredContent":{{"a":{}}}"#, nested_arrays(levels)))
    };
    let json = |text: &str| http_response("200 OK", "application/json", text).into_bytes();
    let coded = |coding: &str, kind: &str, body: &[u8]| {
        let kind = format!("{kind}\r\ncontent-encoding: {coding}");
        [http_response("200 OK", &kind, "").as_bytes(), body].concat()
    };
    match tool {
        // Nested JSON in a text is only text.
        "text" => json(&response(&format!(
            r#"{{"resultType":"complete","content":[{{"type":"text","text":"{}"}}]}}"#,
            nested_arrays(NESTING_LEVELS)
        ))),
        "result" => json(&response(&nested_arrays(NESTING_LEVELS))),
        "structured" => json(&structured(NESTING_LEVELS)),
        "meta" => {
            json(&complete(&format!(r#","_meta":{{"a":{}}}"#, nested_arrays(NESTING_LEVELS))))
        }
        "error" => json(&format!(
            r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":1,"message":"no","data":{}}}}}"#,
            nested_arrays(NESTING_LEVELS)
        )),
        // The gateway can parse this result, but a row cannot hold it.
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
        _ => json(&complete("")),
    }
}

fn tool_definition(name: &str, schema: &str) -> String {
    format!(r#"{{"name":"{name}","description":"Does.","inputSchema":{schema}}}"#)
}

/// Returns the responses to all requests except calls. `tools` is JSON.
fn handshake_response(modern: bool, head: &str, request: &Value, tools: &str) -> Option<String> {
    let server_info = json!({"name": "thrower", "version": "1"});
    Some(match request["method"].as_str().unwrap_or_default() {
        "server/discover" if modern => json_rpc_result(
            request,
            json!({"resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "serverInfo": server_info,
                "ttlMs": 1000, "cacheScope": "private", "_meta": {"io.modelcontextprotocol/serverInfo": server_info}}),
        ),
        "server/discover" => http_response("404 No", "text/html", "<p>"),
        "initialize" => json_rpc_result(request, initialize_result()),
        "ping" => json_rpc_result(request, json!({})),
        "tools/list" => {
            let id = &request["id"];
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

/// Starts an upstream with these tools. Returns its address and its call count.
async fn start_bomb_server(modern: bool, tools: String) -> (String, Arc<AtomicUsize>) {
    let calls = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&calls);
    let address = serve_connections(move |mut stream| {
        let (tools, calls) = (tools.clone(), Arc::clone(&counter));
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let response = match handshake_response(modern, &head, &request, &tools) {
                _ if head.starts_with("get /packed") => bomb_response("gzip", &Value::Null),
                Some(response) => response.into_bytes(),
                None => {
                    calls.fetch_add(1, Ordering::SeqCst);
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
    (address, calls)
}

/// The test measures memory and may overflow the stack, so it has its own process.
#[test]
fn upstream_bomb_is_an_error() {
    run_in_own_process("oversized_responses::upstream_bombs_in_own_process");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by upstream_bomb_is_an_error"]
async fn upstream_bombs_in_own_process() {
    let tools: Vec<String> = ["fine", "text"]
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
        ("new", start_bomb_server(true, tools.join(",")).await),
        ("old", start_bomb_server(false, tools.join(",")).await),
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
    for (name, (_, calls)) in &servers[..2] {
        for bomb in BOMB_TOOLS {
            let before = calls.load(Ordering::SeqCst);
            let error = call(&format!("{name}_{bomb}"), "s", json!({})).await;
            // The upstream received the call, and the outcome is unknown, so the call is not
            // repeated.
            assert!(
                matches!(error["effects"].as_str(), Some("unknown" | "done")),
                "{name} {bomb}: {:.400}",
                error.to_string()
            );
            assert_eq!(calls.load(Ordering::SeqCst), before + 1, "{name} {bomb}");
            assert_eq!(
                call(&format!("{name}_fine"), bomb, json!({})).await,
                Value::Null,
                "{name} after {bomb}"
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
    // An upstream with an unreadable tool list is down. A deep but readable list disables no other
    // tool.
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
    let peak_memory = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap()
        .trim()
        .trim_end_matches(" kB");
    assert!(peak_memory.parse::<usize>().unwrap() < 512 << 10, "{peak_memory} KiB of memory");
}

/// A stack overflow ends the whole process, so the test has its own.
#[test]
fn client_bomb_is_an_error() {
    run_in_own_process("oversized_responses::client_bombs_in_own_process");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by client_bomb_is_an_error"]
async fn client_bombs_in_own_process() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let (http, client) = (http_client(), gate.client());
    // As deep as the default request size permits.
    let deep = nested_arrays(2_000_000);
    let meta = r#""io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}"#;
    let call = |arguments: &str, extra: &str| {
        let params =
            format!(r#"{{"name":"calc","arguments":{arguments},"_meta":{{{meta}{extra}}}}}"#);
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
        let request =
            http.post(format!("{}/{path}", gate.url)).header("accept", ACCEPT_JSON_OR_EVENTS);
        let request = request
            .header("content-type", "application/json")
            .header("mcp-protocol-version", "2026-07-28");
        let request = request
            .header("mcp-method", "tools/call")
            .header("mcp-name", "calc")
            .header("toolgate-session", format!("s{n}"));
        let response = request.body(body.clone()).send().await.unwrap();
        let (status, answer) = (response.status().as_u16(), response.text().await.unwrap());
        // Bad arguments are denied, and other messages are invalid requests. None is too large.
        let is_denied =
            answer.contains("\"isError\":true") || answer.contains("\"decision\":\"deny\"");
        let is_refused = (400..500).contains(&status) && status != 413;
        assert!(is_refused || (status == 200 && is_denied), "{n}: {status} {answer:.400}");
        assert_eq!(fine(n).await, "ok", "{n}");
    }
    let (_, mut writer, mut answers) = gate.connect_streams(None);
    let initialize = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": {"name": "t", "version": "1"}}});
    writer
        .write_all(
            format!(
                "{initialize}\n{}\n",
                json!({"jsonrpc": "2.0", "method": "notifications/initialized"})
            )
            .as_bytes(),
        )
        .await
        .unwrap();
    answers.next_line().await.unwrap().unwrap();
    for (_, body) in bodies.iter().filter(|(path, _)| *path == "mcp") {
        writer.write_all(format!("{body}\n").as_bytes()).await.unwrap();
        let answer: Value =
            serde_json::from_str(&answers.next_line().await.unwrap().unwrap()).unwrap();
        assert!(
            answer["error"].is_object() || answer["result"]["isError"] == json!(true),
            "{:.400}",
            answer.to_string()
        );
    }
    drop((writer, answers));
    assert_eq!(fine(bodies.len()).await, "ok");
    gate.shut_down().await;
}

/// Counts the calls that run at an upstream.
#[derive(Default)]
struct ConcurrencyProbe {
    running: AtomicUsize,
    peak: AtomicUsize,
    total: AtomicUsize,
    /// Calls wait until this many run at the same time.
    release_at: usize,
}

/// Starts an upstream of revision 2026-07-28 whose calls take the time in `ms`. Returns its
/// configuration and its probe.
async fn start_concurrency_probe(release_at: usize) -> (String, Arc<ConcurrencyProbe>) {
    let probe = Arc::new(ConcurrencyProbe { release_at, ..ConcurrencyProbe::default() });
    let shared_probe = Arc::clone(&probe);
    let schema =
        r#"{"type":"object","properties":{"ms":{"type":"integer"},"n":{"type":"integer"}}}"#;
    let tools = ["wait", "rest"].map(|name| tool_definition(name, schema)).join(",");
    let address = serve_connections(move |mut stream| {
        let (tools, probe) = (tools.clone(), Arc::clone(&shared_probe));
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let response = match handshake_response(true, &head, &request, &tools) {
                Some(response) => response,
                None => {
                    probe.total.fetch_add(1, Ordering::SeqCst);
                    probe.peak.fetch_max(
                        probe.running.fetch_add(1, Ordering::SeqCst) + 1,
                        Ordering::SeqCst,
                    );
                    let ms = request
                        .pointer("/params/arguments/ms")
                        .and_then(Value::as_u64)
                        .unwrap_or_default();
                    while probe.peak.load(Ordering::SeqCst) < probe.release_at {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                    probe.running.fetch_sub(1, Ordering::SeqCst);
                    json_rpc_result(&request, json!({"resultType": "complete", "content": []}))
                }
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await;
    (format!("url = \"http://{address}/mcp\"\n"), probe)
}

/// Makes a call in its own session, and returns its error.
async fn call_error(client: &McpTestClient, tool: &str, n: usize, ms: u64) -> Value {
    let client = client.in_session(&format!("{tool}-{n}"));
    client.call(tool, json!({"ms": ms, "n": n})).await["_meta"]["toolgate/error"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrency_and_timeout_are_per_upstream() {
    let ((narrow, narrow_probe), (usual, usual_probe), (quick, _), (full, full_probe)) = (
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
    let peaks = [narrow_probe, usual_probe].map(|probe| probe.peak.load(Ordering::SeqCst));
    assert_eq!(peaks, [3, 16], "concurrent calls");
    // The timeout of an upstream applies to its tools without a timeout, and to no other upstream.
    let (late, in_time, other) = tokio::join!(
        call_error(&client, "quick_wait", 0, 30_000),
        call_error(&client, "quick_rest", 0, 1_200),
        call_error(&client, "usual_wait", 0, 1_200)
    );
    assert_eq!((&late["code"], &late["effects"]), (&json!("timeout"), &json!("none")), "{late}");
    assert!(in_time.is_null() && other.is_null(), "{in_time} {other}");
    // A call without a permit at its timeout is not sent, and its error reports that.
    let errors = join_all((0..8).map(|n| call_error(&client, "full_wait", n, 30_000))).await;
    let (sent, unsent): (Vec<&Value>, Vec<&Value>) =
        errors.iter().partition(|error| error["effects"] == "unknown");
    let received = full_probe.total.load(Ordering::SeqCst);
    assert!(
        received >= 1 && received <= sent.len() && !unsent.is_empty(),
        "{received} received: {errors:?}"
    );
    assert!(
        unsent
            .iter()
            .all(|error| error["code"] == "upstream_unavailable" && error["effects"] == "none"),
        "{errors:?}"
    );
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn circuit_breaker_opens_and_closes_for_silent_upstream() {
    let ((ill, probe), (well, _)) =
        (start_concurrency_probe(0).await, start_concurrency_probe(0).await);
    let text = format!(
        "[upstreams.ill]\n{ill}undeclared = \"read\"\ntimeout = \"3s\"\nconcurrency = 64\n\
         [tools.ill_rest]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\ntimeout = \"20s\"\n\
         [upstreams.well]\n{well}undeclared = \"read\"\n"
    );
    let gate = TestGateway::open(&text).await;
    let client = gate.client();
    let assert_timeouts = async |from: usize, count: usize| {
        let errors =
            join_all((from..from + count).map(|n| call_error(&client, "ill_wait", n, 600_000)))
                .await;
        assert!(errors.iter().all(|error| error["code"] == "timeout"), "{errors:?}");
    };
    // Four timeouts in a row do not open the circuit breaker, because a success resets the count.
    for round in 0..2 {
        assert_timeouts(round * 10, 4).await;
        assert_eq!(call_error(&client, "ill_rest", round, 0).await, Value::Null);
    }
    assert_timeouts(100, 5).await;
    let received = || probe.total.load(Ordering::SeqCst);
    let before = received();
    let errors = join_all((0..64).map(|n| call_error(&client, "ill_rest", 200 + n, 0))).await;
    let is_refused = |error: &&Value| {
        error["effects"] == "none"
            && error["message"].as_str().is_some_and(|text| text.contains("circuit breaker"))
    };
    let refused = errors.iter().filter(is_refused).count();
    // The upstream received only the calls that succeeded.
    assert!(refused > 0 && received() - before == errors.len() - refused, "{refused} {errors:?}");
    assert_eq!(call_error(&client, "well_wait", 0, 0).await, Value::Null);
    let mut call = 1_000;
    wait_until("the circuit breaker closes", async || {
        call += 1;
        call_error(&client, "ill_rest", call, 0).await.is_null()
    })
    .await;
    assert_timeouts(300, 4).await;
    assert_eq!(
        call_error(&client, "ill_rest", 3_000, 0).await,
        Value::Null,
        "the circuit breaker is still open"
    );
    gate.shut_down().await;
}
