//! Tests that the fast path for calls of revision 2026-07-28 behaves like the slow path.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use toolgate_store::{Ledger, RowFilter};

use crate::scripted_server::{SCRIPTED_TOOLS, start_scripted_server};
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
