//! The straight way for calls of 2026-07-28: it says what the long way says, and what breaks on it
//! is told from what was done.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use toolgate_store::{Ledger, RowFilter};

use crate::support::{TestGateway, count_lines, fixture_path, wait_until};

/// The fixture over HTTP, where it is, and where it says what it was asked.
struct HttpFixtureProcess(Child, String, tempfile::TempDir);

impl HttpFixtureProcess {
    fn start() -> Self {
        use std::io::BufRead;
        let home = tempfile::tempdir().unwrap();
        let mut command = Command::new(fixture_path());
        command.args(["--listen", "127.0.0.1:0"]).env("FIXTURE_COUNTER", home.path().join("asked"));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        let address = said
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

/// A request over a connection of its own: what comes back, head and all.
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

/// All messages of an answer, without what is different each time.
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
        // What is said before the answer makes it a stream.
        ("test_tool_with_progress", json!({}), "text/event-stream"),
    ] {
        let straight =
            post_call(&gate.url, call_params(tool, arguments.clone(), Some("mine")), tool).await;
        assert!(
            straight.to_ascii_lowercase().contains(&format!("content-type: {kind}")),
            "{tool}: {straight}"
        );
        // What this revision has no word for goes the long way.
        let mut long = call_params(tool, arguments, Some("mine"));
        long["of no meaning"] = json!(1);
        let said = messages(&straight);
        assert_eq!(said, messages(&post_call(&gate.url, long, tool).await), "{tool}");
        if kind == "text/event-stream" {
            assert!(said.len() > 2 && said[0]["params"]["progressToken"] == "mine", "{said:?}");
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
            said = post_call(&gate.url, call_params("sleep", json!({"ms": 600_000}), None), "sleep") => panic!("nobody waits so long: {said}"),
            () = wait_until("it sleeps", async || count_lines(&upstream.2.path().join("asked")) > 0) => {}
        }
        // Alone, and while the gateway goes on.
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
        wait_until("its row is there", async || !rows().is_empty()).await;
        assert_eq!(rows(), [("cancelled".to_owned(), json!(effects))]);
        gate.shut_down().await;
    }
}

/// A server that does as the name of the tool says.
async fn start_scripted_server() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let ran = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&ran);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve_script(stream, Arc::clone(&counted)));
        }
    });
    (format!("http://{address}/mcp"), ran)
}

const SCRIPTED_TOOLS: [&str; 19] = [
    "plain", "leaves", "breaks", "endless", "stays", "ends", "junk", "other", "stranger",
    "chatters", "nameless", "lost", "ill", "blank", "texts", "long", "page", "logs", "failing",
];

async fn serve_script(mut stream: TcpStream, ran: Arc<AtomicUsize>) {
    let mut text = Vec::new();
    loop {
        let mut chunk = [0; 4096];
        let head = loop {
            if let Some(at) = text.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
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
        let asked: Value = serde_json::from_slice(&text[head..head + length]).unwrap_or_default();
        text.drain(..head + length);
        let result = |result: Value| {
            json!({"jsonrpc": "2.0", "id": asked["id"], "result": result}).to_string()
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
        let tool = asked.pointer("/params/name").and_then(Value::as_str).unwrap_or_default();
        ran.fetch_add(usize::from(!tool.is_empty()), Ordering::SeqCst);
        let answer = match (asked["method"].as_str().unwrap_or_default(), tool) {
            ("server/discover", _) => {
                let about = json!({"name": "scripted", "version": "1"});
                json(&result(json!({
                    "resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "serverInfo": about,
                    "ttlMs": 1000, "cacheScope": "private", "_meta": {"io.modelcontextprotocol/serverInfo": about},
                })))
            }
            ("tools/list", _) => {
                let one = |name: &&str| json!({"name": name, "description": "Does so.", "inputSchema": {"type": "object"}});
                let tools: Vec<Value> = SCRIPTED_TOOLS.iter().map(one).collect();
                json(&result(json!({"resultType": "complete", "tools": tools, "ttlMs": 1000, "cacheScope": "private"})))
            }
            ("tools/call", "plain") => json(&done),
            // It answers, and goes without a word.
            ("tools/call", "leaves") => {
                let _ = stream.write_all(&json(&done)).await;
                return;
            }
            // It does what it was asked, and says nothing.
            ("tools/call", "breaks") => return,
            // An answer that does not end.
            ("tools/call", "endless") => {
                let _ =
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{\"jsonrpc\": \"2.0\", \"x\": \"").await;
                while stream.write_all(&[b'a'; 1 << 16]).await.is_ok() {}
                return;
            }
            // It answers, and leaves the stream open.
            ("tools/call", "stays") => stream_of(&done).into_bytes(),
            // Words and the answer in one breath.
            ("tools/call", "chatters") => {
                let token = asked.pointer("/params/_meta/progressToken").cloned().unwrap_or_default();
                let word = |n: u8| {
                    json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": token, "progress": n}})
                        .to_string()
                };
                let body = format!("data: {}\n\ndata: {}\n\ndata: {done}\n\n", word(1), word(2));
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // It says what goes on, whoever wants to hear it.
            ("tools/call", "logs") => {
                let word = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "error", "data": "oh"}});
                let body = format!("data: {word}\n\ndata: {done}\n\n");
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // A stream that ends before the answer.
            ("tools/call", "ends") => b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 8\r\n\r\n: hello\n".to_vec(),
            ("tools/call", "junk") => json("{\"jsonrpc\": \"2.0\", "),
            // The answer to another question.
            ("tools/call", "other") => json(&done.replacen("\"id\":", "\"id\":1000", 1)),
            // Turned away with an error that has no name, whatever it says.
            ("tools/call", "nameless" | "lost" | "ill") => {
                let status = match tool {
                    "nameless" => "400 Bad Request",
                    "lost" => "404 Not Found",
                    _ => "503 Service Unavailable",
                };
                let body = r#"{"jsonrpc": "2.0", "id": null, "error": {"code": -32000, "message": "no"}}"#;
                format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // It has done something, and says with the status, too, that it went wrong.
            ("tools/call", "failing") => {
                let mut said: Value = serde_json::from_str(&done).unwrap();
                said["result"]["isError"] = json!(true);
                let body = said.to_string();
                format!("HTTP/1.1 400 No\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // An event that says nothing, and one without a kind.
            ("tools/call", "blank") => {
                let body = format!("id: 0\ndata: \n\nevent:\ndata: {done}\n\n");
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // It says the number of the question as text.
            ("tools/call", "texts") => {
                let mut said: Value = serde_json::from_str(&done).unwrap();
                said["id"] = json!(asked["id"].to_string());
                json(&said.to_string())
            }
            // Each event is no longer than it may be; all of them are.
            ("tools/call", "long") => {
                let pad = "a".repeat(6 << 20);
                let word = format!(r#"data: {{"jsonrpc": "2.0", "method": "notifications/other", "params": {{"pad": "{pad}"}}}}"#);
                let body = format!("{word}\n\n{word}\n\n{word}\n\ndata: {done}\n\n");
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // Something for people.
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
    let find = |agent: &str, more: &str| {
        format!(
            "[agents.{agent}.tools.find]\nkind = \"command\"\ncommand = \"cat\"\neffect = \"read\"\ndescription = \"Finds.\"\n\
             input = {{ type = \"object\", properties = {{ place = {{ type = \"string\"{more} }} }} }}\n"
        )
    };
    let tools = [
        find("a", ", x-mcp-header = \"Region\""),
        find("b", ""),
        find("c", ", x-mcp-header = \"Zone\""),
    ]
    .concat();
    let gate = TestGateway::open(&tools).await;
    for (agent, status, why) in [
        ("a", 400, "missing Mcp-Param-Region"),
        ("b", 200, ""),
        ("c", 400, "missing Mcp-Param-Zone"),
    ] {
        let mut client = gate.client();
        client.url = format!("{}/mcp/{agent}", gate.url);
        let (found, answer) = client
            .call_method("tools/call", json!({"name": "find", "arguments": {"place": "here"}}))
            .await;
        assert_eq!(found, status, "{agent}: {answer}");
        assert!(
            answer["error"]["message"].as_str().unwrap_or_default().starts_with(why),
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
        let said = messages(
            &post_call(
                &gate.url,
                call_params("chatters", json!({"n": n}), Some("mine")),
                "chatters",
            )
            .await,
        );
        let progress: Vec<&Value> =
            said.iter().filter_map(|message| message.pointer("/params/progress")).collect();
        assert_eq!(progress, [&json!(1.0), &json!(2.0)], "{said:?}");
        assert_eq!(said.last().unwrap()["result"]["content"][0]["text"], "done");
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
    for (level, hears) in [
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
        let said = messages(&post_call(&gate.url, params, "logs").await);
        assert_eq!(
            said.iter().any(|message| message["method"] == "notifications/message"),
            hears,
            "{level:?}: {said:?}"
        );
        assert_eq!(said.last().unwrap()["result"]["content"][0]["text"], "done");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_response_is_distinguished_from_completed_call() {
    let (url, ran) = start_scripted_server().await;
    let tools: String = SCRIPTED_TOOLS
        .iter()
        .map(|tool| format!("[tools.{tool}]\nkind = \"mcp\"\nupstream = \"s\"\neffect = \"write\"\npolicy = \"open\"\ntimeout = \"20s\"\n"))
        .collect();
    let gate =
        TestGateway::open(&format!("[upstreams.s]\nurl = \"{url}\"\nprefix = \"\"\n{tools}")).await;
    let mut asked = 0;
    // Nobody waits for more than there is: that would be `timeout`.
    for (tool, code, effects) in [
        ("plain", "ok", Value::Null),
        ("plain", "ok", Value::Null),
        ("leaves", "ok", Value::Null),
        // The connection that was left is not taken for one that stands, and nothing is unclear
        // about the call after it.
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
        // Who says with such a status alone that nothing was done may be of another revision by
        // now: it is asked for its tools.
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
        asked += 1;
        let mut said =
            gate.client().in_session(&format!("s{asked}")).call(tool, json!({"n": asked})).await;
        while code == "upstream_invalid"
            && said["_meta"]["toolgate/error"]["code"] == "upstream_unavailable"
        {
            // It has not told them yet.
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert!(asked < 500, "{said}");
            asked += 1;
            said = gate
                .client()
                .in_session(&format!("s{asked}"))
                .call(tool, json!({"n": asked}))
                .await;
        }
        let error = &said["_meta"]["toolgate/error"];
        let (found, left) = (
            error["code"].as_str().unwrap_or("ok"),
            error.get("effects").cloned().unwrap_or_default(),
        );
        assert_eq!((found, &left), (code, &effects), "{tool}: {:.600}", said.to_string());
        assert_eq!(ran.load(Ordering::SeqCst), asked, "{tool} was asked for once");
    }
    gate.shut_down().await;
}
