//! Tests how the gateway observes the lists, health and output of an upstream.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use toolgate_mcp::UpstreamStatus;

use crate::legacy_http_client::LegacyHttpClient;
use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{TestGateway, count_rows, http_client, wait_until};
use crate::upstream_faults::{status_of, well_and_ill_config, write_script};

/// A server of an earlier revision with configurable answers, which records its requests.
#[derive(Default)]
struct ScriptedUpstream {
    answers: Mutex<HashMap<String, Value>>,
    requests: Mutex<Vec<String>>,
    announce: Notify,
    /// The number of times that the server lost its sessions.
    session_epoch: AtomicUsize,
}

impl ScriptedUpstream {
    /// Starts the server with one tool, prompt and resource. Returns its configuration.
    async fn start() -> (Arc<Self>, String) {
        let server = Arc::<Self>::default();
        server.set_answer("tools/list", json!({"result": {"tools": [tool_definition("talk")]}}));
        server.set_answer(
            "tools/call",
            json!({"result": {"content": [{"type": "text", "text": "done"}]}}),
        );
        server.set_answer("prompts/list", json!({"result": {"prompts": [{"name": "hello"}]}}));
        server.set_answer("prompts/get", json!({"result": {"messages": []}}));
        server.set_answer(
            "resources/list",
            json!({"result": {"resources": [{"uri": "note://a", "name": "a"}]}}),
        );
        server.set_answer("resources/templates/list", json!({"result": {"resourceTemplates": []}}));
        let shared = Arc::clone(&server);
        let address =
            serve_connections(move |stream| Arc::clone(&shared).handle_connection(stream)).await;
        (server, format!("url = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n"))
    }

    /// Sets the answer to a method: a result or an error. `null` delays the answer until the next
    /// change.
    fn set_answer(&self, method: &str, answer: Value) {
        self.answers.lock().unwrap().insert(method.to_owned(), answer);
    }

    fn request_count(&self, method: &str) -> usize {
        self.requests.lock().unwrap().iter().filter(|requested| *requested == method).count()
    }

    fn answer_to(&self, method: &str) -> Option<Value> {
        self.answers.lock().unwrap().get(method).cloned()
    }

    async fn handle_connection(self: Arc<Self>, mut stream: TcpStream) {
        let Some((head, request)) = read_request(&mut stream).await else { return };
        let method = request["method"].as_str().unwrap_or_default();
        let session = format!("mcp-session-id: life-{}", self.session_epoch.load(Ordering::SeqCst));
        self.requests.lock().unwrap().push(method.to_owned());
        let response = match method {
            "server/discover" => http_response("404 No", "text/html", "<p>"),
            "" if head.starts_with("get ") => return self.stream_notifications(stream).await,
            "initialize" => {
                let mut initialized = initialize_result();
                initialized["capabilities"] = json!({"tools": {}, "prompts": {}, "resources": {}});
                json_rpc_result(&request, initialized).replacen(
                    "\r\n",
                    &format!("\r\n{session}\r\n"),
                    1,
                )
            }
            // Only prompt requests detect the loss of the session.
            "prompts/get" if !head.contains(&session) => {
                http_response("404 Not Found", "text/plain", "")
            }
            "ping" => json_rpc_result(&request, json!({})),
            _ if self.answer_to(method) == Some(json!("hangs up")) => return,
            // The server asks its client, and waits for the answer.
            "tools/call" if self.answer_to(method) == Some(json!("asks")) => {
                let form = json!({"message": "Who?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}});
                let question = json!({"jsonrpc": "2.0", "id": request["id"], "method": "elicitation/create", "params": form});
                let _ = stream
                    .write_all(
                        http_response(
                            "200 OK",
                            "text/event-stream",
                            &format!("data: {question}\n\n"),
                        )
                        .as_bytes(),
                    )
                    .await;
                return std::future::pending().await;
            }
            _ => {
                let mut answer = self.answer_to(method);
                while answer == Some(Value::Null) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    answer = self.answer_to(method);
                }
                match answer {
                    Some(mut response) => {
                        response["jsonrpc"] = json!("2.0");
                        response["id"] = request["id"].clone();
                        http_response("200 OK", "application/json", &response.to_string())
                    }
                    None => http_response("202 Accepted", "text/plain", ""),
                }
            }
        };
        let _ = stream.write_all(response.as_bytes()).await;
    }

    /// Sends a list change whenever the test requests one.
    async fn stream_notifications(&self, mut stream: TcpStream) {
        let mut response = http_response("200 OK", "text/event-stream", "");
        while stream.write_all(response.as_bytes()).await.is_ok() {
            self.announce.notified().await;
            response = format!(
                "data: {}\n\n",
                json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
            );
        }
    }
}

fn tool_definition(name: &str) -> Value {
    json!({"name": name, "description": "Does it.", "inputSchema": {"type": "object"}})
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_list_request_does_not_restart_upstream() {
    let (server, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    let code =
        async |session: &str| gate.client().in_session(session).call_code("talk", json!({})).await;
    assert_eq!(code("before").await, "ok");
    server.set_answer("tools/list", json!({"error": {"code": -32603, "message": "not now"}}));
    let before = server.request_count("tools/list");
    for round in 1..=5 {
        server.announce.notify_one();
        wait_until("the gateway requests the tool list", async || {
            server.request_count("tools/list") >= before + round
        })
        .await;
        assert_eq!(code(&format!("meanwhile{round}")).await, "ok");
    }
    server.set_answer(
        "tools/list",
        json!({"result": {"tools": [tool_definition("talk"), tool_definition("late")]}}),
    );
    server.announce.notify_one();
    wait_until("the change is detected", async || gate.gateway.health()[0].tools == 2).await;
    assert_eq!((gate.gateway.health()[0].starts, server.request_count("initialize")), (1, 1));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_that_fails_every_request_is_restarted() {
    let (server, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    let terminated = json!({"error": {"code": -32603, "message": "Session terminated"}});
    let well = server.answer_to("tools/call").unwrap();
    server.set_answer("tools/call", terminated.clone());
    server.set_answer("tools/list", terminated);
    let mut calls = 0;
    wait_until("the upstream is restarted", async || {
        calls += 1;
        assert_ne!(
            gate.client().in_session(&format!("s{calls}")).call_code("talk", json!({})).await,
            "ok"
        );
        server.announce.notify_one();
        gate.gateway.health()[0].starts > 1
    })
    .await;
    server.set_answer("tools/call", well);
    server.set_answer("tools/list", json!({"result": {"tools": [tool_definition("talk")]}}));
    wait_until("the upstream is up again", async || {
        calls += 1;
        gate.client().in_session(&format!("s{calls}")).call_code("talk", json!({})).await == "ok"
    })
    .await;
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_line_of_multiline_secret_is_redacted() {
    let home = tempfile::tempdir().unwrap();
    let key = home.path().join("key");
    let lines = [
        "-----BEGIN PRIVATE KEY-----",
        "MIIEvQIBADANBgkqhkiG9w0BAQEF",
        "AASCBKcwggSjAgEAAoIBAQC7VJTU",
        "-----END PRIVATE KEY-----",
    ];
    std::fs::write(&key, lines.join("\n") + "\n").unwrap();
    // The last output line is the reason in the status.
    for (name, script) in [
        ("whole", "echo \"$KEY\" >&2"),
        ("line", "echo \"it is $(echo \"$KEY\" | head -n 3 | tail -n 1), is it?\" >&2"),
    ] {
        let loud = write_script(home.path(), name, &format!("{script}\nexit 3"));
        let ill = format!(
            "command = {loud}\nenv = {{ KEY = {{ file = {} }} }}\n[tools.ill_echo]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\n",
            json!(key)
        );
        let gate = TestGateway::open(&well_and_ill_config(&ill)).await;
        let result = gate.client().call("ill_echo", json!({"text": "x"})).await.to_string();
        let health = serde_json::to_string(&gate.gateway.health()).unwrap();
        for text in [result, health] {
            assert!(text.contains("[redacted]"), "{name}: {text}");
            assert!(!lines.iter().any(|line| text.contains(line)), "{name}: {text}");
        }
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn list_is_kept_if_its_refresh_fails() {
    let (server, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    let listed = async |method: &str, list: &str, name: &str| -> Vec<Value> {
        let answer = gate.client().in_session("s").call_method(method, json!({})).await.1;
        answer["result"][list]
            .as_array()
            .unwrap_or_else(|| panic!("{answer}"))
            .iter()
            .map(|entry| entry[name].clone())
            .collect()
    };
    assert_eq!(listed("prompts/list", "prompts", "name").await, ["hello"]);
    for (code, uri, prompts) in
        [(-32603, "note://b", &["hello"][..]), (-32601, "note://c", &[][..])]
    {
        server.set_answer("prompts/list", json!({"error": {"code": code, "message": "not now"}}));
        server.set_answer(
            "resources/list",
            json!({"result": {"resources": [{"uri": uri, "name": "a"}]}}),
        );
        server.announce.notify_one();
        // The gateway reads resources after prompts, and publishes both together.
        wait_until("the change is detected", async || {
            listed("resources/list", "resources", "uri").await == [uri]
        })
        .await;
        assert_eq!(listed("prompts/list", "prompts", "name").await, prompts, "{code}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn list_changed_without_change_does_not_reload_config() {
    let (server, upstream) = ScriptedUpstream::start().await;
    let text = format!("[upstreams.m]\n{upstream}");
    let gate = TestGateway::open(&text).await;
    let mut older = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
    // A reload would apply this change of the file.
    std::fs::write(
        gate.home.path().join("toolgate.toml"),
        format!("{text}[tools.calc]\nkind = \"builtin\"\n"),
    )
    .unwrap();
    server.announce.notify_one();
    older.inbox.wait_for(|message| message["method"] == "notifications/tools/list_changed").await;
    assert_eq!(gate.client().tool_names().await, ["talk"]);
    server.set_answer(
        "tools/list",
        json!({"result": {"tools": [tool_definition("talk"), tool_definition("late")]}}),
    );
    server.announce.notify_one();
    wait_until("the change is detected", async || gate.client().tool_names().await.len() == 3)
        .await;
    drop(older);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_session_is_reopened_for_prompts() {
    let (server, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    let client = gate.client().in_session("s");
    let has_prompt = async || {
        client.call_method("prompts/get", json!({"name": "hello"})).await.1["result"]["messages"]
            .is_array()
    };
    assert!(has_prompt().await);
    for losses in 1..=2 {
        server.session_epoch.fetch_add(1, Ordering::SeqCst);
        wait_until("the prompt is available again", async || has_prompt().await).await;
        assert_eq!(server.request_count("initialize"), 1 + losses);
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn list_requests_do_not_wait_for_calls() {
    let (server, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}concurrency = 1\n")).await;
    server.set_answer("tools/call", Value::Null);
    let client = gate.client().in_session("slow");
    let slow = tokio::spawn(async move { client.call_code("talk", json!({})).await });
    wait_until("the call runs", async || server.request_count("tools/call") == 1).await;
    server.set_answer(
        "tools/list",
        json!({"result": {"tools": [tool_definition("talk"), tool_definition("late")]}}),
    );
    server.announce.notify_one();
    wait_until("the change is detected during the call", async || {
        gate.gateway.health()[0].tools == 2
    })
    .await;
    assert!(!slow.is_finished());
    server.set_answer("tools/call", json!({"result": {"content": []}}));
    assert_eq!(slow.await.unwrap(), "ok");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn elicitation_timeouts_do_not_open_circuit_breaker() {
    let (server, upstream) = ScriptedUpstream::start().await;
    let declared =
        "[tools.talk]\nkind = \"mcp\"\nupstream = \"m\"\neffect = \"read\"\ntimeout = \"3s\"\n";
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}{declared}")).await;
    server.set_answer("tools/call", json!("asks"));
    let calls = join_all((0..6).map(|number| {
        let client = gate
            .client()
            .in_session(&format!("s{number}"))
            .with_capabilities(json!({"elicitation": {}}));
        async move { client.call("talk", json!({})).await }
    }));
    for result in calls.await {
        assert_eq!(result["resultType"], "input_required", "{result}");
    }
    // The test sends no answers until the calls time out.
    wait_until("the calls have ended", async || count_rows(&gate, "talk") == 6).await;
    server.set_answer("tools/call", json!({"result": {"content": []}}));
    assert_eq!(gate.client().in_session("after").call_code("talk", json!({})).await, "ok");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn session_deadline_does_not_open_circuit_breaker() {
    let (server, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!(
        "[limits]\nsession = {{ wall_time = \"2s\" }}\n[upstreams.m]\n{upstream}"
    ))
    .await;
    server.set_answer("tools/call", Value::Null);
    let late = join_all((0..6).map(|number| {
        let client = gate.client().in_session(&format!("s{number}"));
        async move { client.call_code("talk", json!({})).await }
    }));
    for code in late.await {
        assert_eq!(code, "deadline_exceeded");
    }
    server.set_answer("tools/call", json!({"result": {"content": []}}));
    assert_eq!(gate.client().in_session("after").call_code("talk", json!({})).await, "ok");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn open_circuit_breaker_also_refuses_prompts() {
    let (server, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    server.set_answer("prompts/get", json!("hangs up"));
    let client = gate.client().in_session("s");
    // After several failures, the gateway sends no more requests.
    wait_until("the circuit breaker opens", async || {
        let before = server.request_count("prompts/get");
        let answer = client.call_method("prompts/get", json!({"name": "hello"})).await.1;
        let is_refused = answer["error"]["message"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"))
            .contains("circuit breaker");
        assert!(!is_refused || server.request_count("prompts/get") == before, "{answer}");
        is_refused
    })
    .await;
    assert!(server.request_count("prompts/get") >= 5);
    gate.shut_down().await;
}

/// Calls a tool in a new session, and returns the error.
async fn refusal(gate: &TestGateway, session: usize, tool: &str) -> Value {
    let result = gate.client().in_session(&format!("s{session}")).call(tool, json!({})).await;
    result["_meta"]["toolgate/error"].clone()
}

/// Returns whether the message names the time of the failure.
fn has_since(error: &Value) -> bool {
    error["message"].as_str().is_some_and(|text| text.contains(" since 2"))
}

#[tokio::test(flavor = "multi_thread")]
async fn unavailable_upstream_reports_since_and_retry_after() {
    let declared = "[tools.ill_echo]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\n";
    let home = tempfile::tempdir().unwrap();
    let mut attempt = 0;
    // The upstream is silent.
    let gate = TestGateway::open_with_short_timeout(&well_and_ill_config(&format!(
        "command = {}\n{declared}",
        write_script(home.path(), "mute", "exec sleep 995")
    )))
    .await;
    assert!(matches!(status_of(&gate, "ill"), UpstreamStatus::Starting));
    let error = refusal(&gate, attempt, "ill_echo").await;
    assert!(
        has_since(&error) && error["message"].as_str().unwrap().contains("starting"),
        "{error}"
    );
    assert_eq!(
        (&error["errorCategory"], &error["retryAfterMs"]),
        (&json!("TRANSIENT"), &json!(1_000)),
        "{error}"
    );
    gate.shut_down().await;
    // The upstream exits during both handshakes, and is silent after the restart.
    let runs = home.path().join("runs");
    let script = format!(
        "echo run >> {0}\n[ $(wc -l < {0}) -lt 3 ] && exit 7\nexec sleep 995",
        runs.display()
    );
    let gate = TestGateway::open(&well_and_ill_config(&format!(
        "command = {}\n{declared}",
        write_script(home.path(), "brief", &script)
    )))
    .await;
    let mut error = Value::Null;
    wait_until("an attempt is in progress", async || {
        attempt += 1;
        error = refusal(&gate, attempt, "ill_echo").await;
        assert!(has_since(&error), "{error}");
        error["message"].as_str().unwrap().contains("attempt is in progress")
    })
    .await;
    assert_eq!(error["retryAfterMs"], json!(1_000), "{error}");
    gate.shut_down().await;
    // The circuit breaker is open.
    let (server, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    server.set_answer("tools/call", json!("hangs up"));
    wait_until("the circuit breaker opens", async || {
        attempt += 1;
        error = refusal(&gate, attempt, "talk").await;
        error["message"].as_str().unwrap().contains("circuit breaker")
    })
    .await;
    assert!(
        has_since(&error) && (100..=5_000).contains(&error["retryAfterMs"].as_u64().unwrap()),
        "{error}"
    );
    gate.shut_down().await;
}
