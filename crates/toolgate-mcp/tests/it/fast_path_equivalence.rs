//! Tests that the fast path for calls of revision 2026-07-28 behaves like the slow path.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use toolgate_store::{Ledger, RowFilter};

use crate::support::{TestGateway, count_lines, fixture_path, wait_until};

/// The fixture over HTTP, its URL, and the directory of its log.
struct HttpFixtureProcess(Child, String, tempfile::TempDir);

impl HttpFixtureProcess {
    fn start() -> Self {
        use std::io::BufRead;
        let home = tempfile::tempdir().unwrap();
        let mut command = Command::new(fixture_path());
        command.args(["--listen", "127.0.0.1:0"]).env("FIXTURE_COUNTER", home.path().join("log"));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line
            .split("http://")
            .nth(1)
            .unwrap()
            .split(['/', ' ', '\n'])
            .next()
            .unwrap()
            .to_owned();
        Self(child, format!("http://{address}/mcp"), home)
    }
}

impl Drop for HttpFixtureProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a call over a new connection. Returns the response with its head.
async fn post_call(address: &str, params: Value, name: &str) -> String {
    let body = json!({"jsonrpc": "2.0", "id": "one", "method": "tools/call", "params": params})
        .to_string();
    let mut stream = TcpStream::connect(address.trim_start_matches("http://")).await.unwrap();
    let head = format!(
        "POST /mcp HTTP/1.1\r\nhost: {}\r\nconnection: close\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\n\
         mcp-protocol-version: 2026-07-28\r\nmcp-method: tools/call\r\nmcp-name: {name}\r\ncontent-length: {}\r\n\r\n",
        address.trim_start_matches("http://"),
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    let mut text = Vec::new();
    stream.read_to_end(&mut text).await.unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

fn call_params(tool: &str, arguments: Value, token: Option<&str>) -> Value {
    let mut meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    if let Some(token) = token {
        meta["progressToken"] = json!(token);
    }
    json!({"name": tool, "arguments": arguments, "_meta": meta})
}

/// Returns all messages of an answer, without the parts that differ each time.
fn messages(answer: &str) -> Vec<Value> {
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let events = body
        .lines()
        .filter_map(|line| line.strip_prefix("data:"))
        .filter_map(|data| serde_json::from_str(data.trim()).ok());
    let mut found: Vec<Value> = events.collect();
    if found.is_empty() {
        found.push(serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}")));
    }
    let plain = |mut message: Value| {
        let Some(meta) = message.pointer_mut("/result/_meta").and_then(Value::as_object_mut) else {
            return message;
        };
        let call = meta.remove("toolgate/call").unwrap();
        assert!(meta.remove("toolgate/receipt").is_some(), "{answer}");
        serde_json::from_str(&message.to_string().replace(call.as_str().unwrap(), "(call)"))
            .unwrap()
    };
    found.into_iter().map(plain).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn fast_path_answers_like_slow_path() {
    let upstream = HttpFixtureProcess::start();
    let gate = TestGateway::open(&format!(
        "[upstreams.fix]\nurl = \"{}\"\nprefix = \"\"\nundeclared = \"read\"\n",
        upstream.1
    ))
    .await;
    for (tool, arguments, kind) in [
        ("echo", json!({"text": "a \u{2028} b"}), "application/json"),
        ("add", json!({"a": 9_007_199_254_740_993_u64, "b": 0}), "application/json"),
        ("echo", json!({"txt": 1}), "application/json"),
        ("fail", json!({}), "application/json"),
        ("nothing_such", json!({}), "application/json"),
        ("test_image_content", json!({}), "application/json"),
        ("test_embedded_resource", json!({}), "application/json"),
        ("test_multiple_content_types", json!({}), "application/json"),
        // Messages before the answer make the response a stream.
        ("test_tool_with_progress", json!({}), "text/event-stream"),
    ] {
        let fast =
            post_call(&gate.url, call_params(tool, arguments.clone(), Some("mine")), tool).await;
        assert!(
            fast.to_ascii_lowercase().contains(&format!("content-type: {kind}")),
            "{tool}: {fast}"
        );
        // An unknown parameter sends the call over the slow path.
        let mut slow_params = call_params(tool, arguments, Some("mine"));
        slow_params["unknown"] = json!(1);
        let fast_messages = messages(&fast);
        assert_eq!(
            fast_messages,
            messages(&post_call(&gate.url, slow_params, tool).await),
            "{tool}"
        );
        if kind == "text/event-stream" {
            assert!(
                fast_messages.len() > 2 && fast_messages[0]["params"]["progressToken"] == "mine",
                "{fast_messages:?}"
            );
        }
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnect_cancels_call_and_row_is_recorded() {
    for (effect, effects) in [("read", "none"), ("write", "unknown")] {
        let upstream = HttpFixtureProcess::start();
        let gate = TestGateway::open(&format!(
            "[upstreams.fix]\nurl = \"{}\"\nprefix = \"\"\n[tools.sleep]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"{effect}\"\npolicy = \"open\"\n",
            upstream.1
        ))
        .await;
        tokio::select! {
            answer = post_call(&gate.url, call_params("sleep", json!({"ms": 600_000}), None), "sleep") => panic!("the call ended early: {answer}"),
            () = wait_until("the call runs", async || count_lines(&upstream.2.path().join("log")) > 0) => {}
        }
        // The gateway writes the row without a client, and while it runs.
        let rows = || {
            let mut found = Vec::new();
            let sleeps = RowFilter { tool: Some("sleep".to_owned()), ..RowFilter::default() };
            let note = |entry: toolgate_store::LedgerEntry| {
                found.push((
                    entry.row.code().unwrap_or_default().to_owned(),
                    json!(entry.row.effects),
                ));
                Ok(true)
            };
            Ledger::open(gate.home.path().join("ledger.db")).unwrap().query(&sleeps, note).unwrap();
            found
        };
        wait_until("the row is written", async || !rows().is_empty()).await;
        assert_eq!(rows(), [("cancelled".to_owned(), json!(effects))]);
        gate.shut_down().await;
    }
}

/// Starts a server on which each tool has the fault in its name. Returns its URL and the call
/// count.
async fn start_scripted_server() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve_script(stream, Arc::clone(&counter)));
        }
    });
    (format!("http://{address}/mcp"), calls)
}

const SCRIPTED_TOOLS: [&str; 19] = [
    "plain", "leaves", "breaks", "endless", "stays", "ends", "junk", "other", "stranger",
    "chatters", "nameless", "lost", "ill", "blank", "texts", "long", "page", "logs", "failing",
];

async fn serve_script(mut stream: TcpStream, calls: Arc<AtomicUsize>) {
    let mut text = Vec::new();
    loop {
        let mut chunk = [0; 4096];
        let head = loop {
            if let Some(end) = text.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            match stream.read(&mut chunk).await {
                Ok(n) if n > 0 => text.extend_from_slice(&chunk[..n]),
                _ => return,
            }
        };
        let lower = String::from_utf8_lossy(&text[..head]).to_ascii_lowercase();
        let length: usize = lower
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .map_or(0, |n| n.trim().parse().unwrap());
        while text.len() < head + length {
            let Ok(n @ 1..) = stream.read(&mut chunk).await else { return };
            text.extend_from_slice(&chunk[..n]);
        }
        let request: Value = serde_json::from_slice(&text[head..head + length]).unwrap_or_default();
        text.drain(..head + length);
        let result = |result: Value| {
            json!({"jsonrpc": "2.0", "id": request["id"], "result": result}).to_string()
        };
        let json = |body: &str| {
            format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
        };
        let stream_of = |body: &str| {
            let chunk = format!("data: {body}\n\n");
            format!(
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{chunk}\r\n",
                chunk.len()
            )
        };
        let done = result(
            json!({"resultType": "complete", "content": [{"type": "text", "text": "done"}]}),
        );
        let tool = request.pointer("/params/name").and_then(Value::as_str).unwrap_or_default();
        calls.fetch_add(usize::from(!tool.is_empty()), Ordering::SeqCst);
        let answer = match (request["method"].as_str().unwrap_or_default(), tool) {
            ("server/discover", _) => {
                let server_info = json!({"name": "scripted", "version": "1"});
                json(&result(json!({
                    "resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "serverInfo": server_info,
                    "ttlMs": 1000, "cacheScope": "private", "_meta": {"io.modelcontextprotocol/serverInfo": server_info},
                })))
            }
            ("tools/list", _) => {
                let tool_definition = |name: &&str| json!({"name": name, "description": "Does so.", "inputSchema": {"type": "object"}});
                let tools: Vec<Value> = SCRIPTED_TOOLS.iter().map(tool_definition).collect();
                json(&result(json!({"resultType": "complete", "tools": tools, "ttlMs": 1000, "cacheScope": "private"})))
            }
            ("tools/call", "plain") => json(&done),
            // The server answers, and then closes the connection without a notice.
            ("tools/call", "leaves") => {
                let _ = stream.write_all(&json(&done)).await;
                return;
            }
            // The server runs the call, and closes the connection without an answer.
            ("tools/call", "breaks") => return,
            // The answer never ends.
            ("tools/call", "endless") => {
                let _ =
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{\"jsonrpc\": \"2.0\", \"x\": \"").await;
                while stream.write_all(&[b'a'; 1 << 16]).await.is_ok() {}
                return;
            }
            // The server answers, and keeps the stream open.
            ("tools/call", "stays") => stream_of(&done).into_bytes(),
            // Notifications and the answer are in one chunk.
            ("tools/call", "chatters") => {
                let token = request.pointer("/params/_meta/progressToken").cloned().unwrap_or_default();
                let notification = |n: u8| {
                    json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": token, "progress": n}})
                        .to_string()
                };
                let body = format!("data: {}\n\ndata: {}\n\ndata: {done}\n\n", notification(1), notification(2));
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The server sends a log message to every client.
            ("tools/call", "logs") => {
                let notification = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "error", "data": "oh"}});
                let body = format!("data: {notification}\n\ndata: {done}\n\n");
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The stream ends before the answer.
            ("tools/call", "ends") => b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 8\r\n\r\n: hello\n".to_vec(),
            ("tools/call", "junk") => json("{\"jsonrpc\": \"2.0\", "),
            // The answer has the id of another request.
            ("tools/call", "other") => json(&done.replacen("\"id\":", "\"id\":1000", 1)),
            // The rejection has an error without an id.
            ("tools/call", "nameless" | "lost" | "ill") => {
                let status = match tool {
                    "nameless" => "400 Bad Request",
                    "lost" => "404 Not Found",
                    _ => "503 Service Unavailable",
                };
                let body = r#"{"jsonrpc": "2.0", "id": null, "error": {"code": -32000, "message": "no"}}"#;
                format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The call has an effect, and the result and the status report a failure.
            ("tools/call", "failing") => {
                let mut message: Value = serde_json::from_str(&done).unwrap();
                message["result"]["isError"] = json!(true);
                let body = message.to_string();
                format!("HTTP/1.1 400 No\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The stream has an event without data, and an event without a type.
            ("tools/call", "blank") => {
                let body = format!("id: 0\ndata: \n\nevent:\ndata: {done}\n\n");
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The answer has the id of the request as text.
            ("tools/call", "texts") => {
                let mut message: Value = serde_json::from_str(&done).unwrap();
                message["id"] = json!(request["id"].to_string());
                json(&message.to_string())
            }
            // Each event is within the size limit, but all events together exceed the limit.
            ("tools/call", "long") => {
                let pad = "a".repeat(6 << 20);
                let notification = format!(r#"data: {{"jsonrpc": "2.0", "method": "notifications/other", "params": {{"pad": "{pad}"}}}}"#);
                let body = format!("{notification}\n\n{notification}\n\n{notification}\n\ndata: {done}\n\n");
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The server answers with an HTML page.
            ("tools/call", "page") => b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi".to_vec(),
            ("tools/call", "stranger") => b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n".to_vec(),
            _ => b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n".to_vec(),
        };
        if stream.write_all(&answer).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parameter_headers_are_checked_against_tool_of_agent() {
    let find = |agent: &str, extra: &str| {
        format!(
            "[agents.{agent}.tools.find]\nkind = \"command\"\ncommand = \"cat\"\neffect = \"read\"\ndescription = \"Finds.\"\n\
             input = {{ type = \"object\", properties = {{ place = {{ type = \"string\"{extra} }} }} }}\n"
        )
    };
    let tools = [
        find("a", ", x-mcp-header = \"Region\""),
        find("b", ""),
        find("c", ", x-mcp-header = \"Zone\""),
    ]
    .concat();
    let gate = TestGateway::open(&tools).await;
    for (agent, status, prefix) in [
        ("a", 400, "missing Mcp-Param-Region"),
        ("b", 200, ""),
        ("c", 400, "missing Mcp-Param-Zone"),
    ] {
        let mut client = gate.client();
        client.url = format!("{}/mcp/{agent}", gate.url);
        let (answered, answer) = client
            .call_method("tools/call", json!({"name": "find", "arguments": {"place": "here"}}))
            .await;
        assert_eq!(answered, status, "{agent}: {answer}");
        assert!(
            answer["error"]["message"].as_str().unwrap_or_default().starts_with(prefix),
            "{agent}: {answer}"
        );
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_in_same_chunk_as_answer_is_forwarded() {
    let (url, _) = start_scripted_server().await;
    let gate = TestGateway::open(&format!(
        "[upstreams.s]\nurl = \"{url}\"\nprefix = \"\"\nundeclared = \"read\"\n"
    ))
    .await;
    for n in 0..20 {
        let received = messages(
            &post_call(
                &gate.url,
                call_params("chatters", json!({"n": n}), Some("mine")),
                "chatters",
            )
            .await,
        );
        let progress: Vec<&Value> =
            received.iter().filter_map(|message| message.pointer("/params/progress")).collect();
        assert_eq!(progress, [&json!(1.0), &json!(2.0)], "{received:?}");
        assert_eq!(received.last().unwrap()["result"]["content"][0]["text"], "done");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn log_messages_follow_requested_level() {
    let (url, _) = start_scripted_server().await;
    let gate = TestGateway::open(&format!(
        "[upstreams.s]\nurl = \"{url}\"\nprefix = \"\"\nundeclared = \"read\"\n"
    ))
    .await;
    for (level, is_forwarded) in [
        (None, false),
        (Some("loud"), false),
        (Some("critical"), false),
        (Some("error"), true),
        (Some("debug"), true),
    ] {
        let mut params = call_params("logs", json!({"level": level}), None);
        if let Some(level) = level {
            params["_meta"]["io.modelcontextprotocol/logLevel"] = json!(level);
        }
        let received = messages(&post_call(&gate.url, params, "logs").await);
        assert_eq!(
            received.iter().any(|message| message["method"] == "notifications/message"),
            is_forwarded,
            "{level:?}: {received:?}"
        );
        assert_eq!(received.last().unwrap()["result"]["content"][0]["text"], "done");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_response_is_distinguished_from_completed_call() {
    let (url, calls) = start_scripted_server().await;
    let tools: String = SCRIPTED_TOOLS
        .iter()
        .map(|tool| format!("[tools.{tool}]\nkind = \"mcp\"\nupstream = \"s\"\neffect = \"write\"\npolicy = \"open\"\ntimeout = \"20s\"\n"))
        .collect();
    let gate =
        TestGateway::open(&format!("[upstreams.s]\nurl = \"{url}\"\nprefix = \"\"\n{tools}")).await;
    let mut call_count = 0;
    // The gateway does not wait for the end of a stream after its answer: that would be `timeout`.
    for (tool, code, effects) in [
        ("plain", "ok", Value::Null),
        ("plain", "ok", Value::Null),
        ("leaves", "ok", Value::Null),
        // The gateway does not reuse the closed connection, and the next call has a known outcome.
        ("plain", "ok", Value::Null),
        ("stays", "ok", Value::Null),
        ("plain", "ok", Value::Null),
        ("breaks", "upstream_unavailable", json!("unknown")),
        ("plain", "ok", Value::Null),
        ("endless", "invalid_result", json!("unknown")),
        ("ends", "upstream_unavailable", json!("unknown")),
        ("junk", "upstream_rejected", json!("unknown")),
        ("other", "upstream_rejected", json!("unknown")),
        ("plain", "ok", Value::Null),
        ("stranger", "upstream_forbidden", json!("none")),
        ("plain", "ok", Value::Null),
        ("failing", "tool_failed", json!("done")),
        // A server that rejects calls by status may have changed its revision. The gateway reads
        // its tools again.
        ("nameless", "upstream_unavailable", json!("none")),
        ("nameless", "upstream_invalid", json!("none")),
        ("lost", "upstream_invalid", json!("none")),
        ("ill", "upstream_unavailable", json!("unknown")),
        ("plain", "ok", Value::Null),
        ("blank", "ok", Value::Null),
        ("texts", "ok", Value::Null),
        ("long", "ok", Value::Null),
        ("page", "upstream_rejected", json!("unknown")),
        ("plain", "ok", Value::Null),
    ] {
        call_count += 1;
        let mut result = gate
            .client()
            .in_session(&format!("s{call_count}"))
            .call(tool, json!({"n": call_count}))
            .await;
        while code == "upstream_invalid"
            && result["_meta"]["toolgate/error"]["code"] == "upstream_unavailable"
        {
            // The upstream has not sent its tools yet.
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert!(call_count < 500, "{result}");
            call_count += 1;
            result = gate
                .client()
                .in_session(&format!("s{call_count}"))
                .call(tool, json!({"n": call_count}))
                .await;
        }
        let error = &result["_meta"]["toolgate/error"];
        let (found_code, found_effects) = (
            error["code"].as_str().unwrap_or("ok"),
            error.get("effects").cloned().unwrap_or_default(),
        );
        assert_eq!(
            (found_code, &found_effects),
            (code, &effects),
            "{tool}: {:.600}",
            result.to_string()
        );
        assert_eq!(
            calls.load(Ordering::SeqCst),
            call_count,
            "{tool}: the upstream received another number of calls"
        );
    }
    gate.shut_down().await;
}
