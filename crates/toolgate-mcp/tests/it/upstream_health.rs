//! An upstream is watched: what it says of itself, whether it is well, and what it offers by now.

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

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{TestGateway, wait_until};
use crate::tls_and_authentication::{LegacyHttpClient, http_client};
use crate::upstream_faults::{status_of, well_and_ill_config, write_script};

/// A server of an earlier revision that says what it is told to say, and notes what it was asked.
#[derive(Default)]
struct ScriptedUpstream {
    answers: Mutex<HashMap<String, Value>>,
    requests: Mutex<Vec<String>>,
    announce: Notify,
    /// How often it has forgotten whom it talks to.
    session_epoch: AtomicUsize,
}

impl ScriptedUpstream {
    /// Begins with one tool, one prompt and one resource, and says where it is.
    async fn start() -> (Arc<Self>, String) {
        let own = Arc::<Self>::default();
        own.set_answer("tools/list", json!({"result": {"tools": [tool_definition("talk")]}}));
        own.set_answer(
            "tools/call",
            json!({"result": {"content": [{"type": "text", "text": "done"}]}}),
        );
        own.set_answer("prompts/list", json!({"result": {"prompts": [{"name": "hello"}]}}));
        own.set_answer("prompts/get", json!({"result": {"messages": []}}));
        own.set_answer(
            "resources/list",
            json!({"result": {"resources": [{"uri": "note://a", "name": "a"}]}}),
        );
        own.set_answer("resources/templates/list", json!({"result": {"resourceTemplates": []}}));
        let moody = Arc::clone(&own);
        let address =
            serve_connections(move |stream| Arc::clone(&moody).handle_connection(stream)).await;
        (own, format!("url = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n"))
    }

    /// From now on it says this, a result or an error; of null it says nothing, until it says
    /// something else.
    fn set_answer(&self, method: &str, said: Value) {
        self.answers.lock().unwrap().insert(method.to_owned(), said);
    }

    fn request_count(&self, method: &str) -> usize {
        self.requests.lock().unwrap().iter().filter(|asked| *asked == method).count()
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
                let mut about = initialize_result();
                about["capabilities"] = json!({"tools": {}, "prompts": {}, "resources": {}});
                json_rpc_result(&request, about).replacen("\r\n", &format!("\r\n{session}\r\n"), 1)
            }
            // All others do not notice.
            "prompts/get" if !head.contains(&session) => {
                http_response("404 Not Found", "text/plain", "")
            }
            "ping" => json_rpc_result(&request, json!({})),
            _ if self.answer_to(method) == Some(json!("hangs up")) => return,
            // It asks its client, and waits for what that says.
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
                let mut known = self.answer_to(method);
                while known == Some(Value::Null) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    known = self.answer_to(method);
                }
                match known {
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

    /// Says that its lists have changed, whenever it is told to.
    async fn stream_notifications(&self, mut stream: TcpStream) {
        let mut said = http_response("200 OK", "text/event-stream", "");
        while stream.write_all(said.as_bytes()).await.is_ok() {
            self.announce.notified().await;
            said = format!(
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
    let (moody, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    let code =
        async |session: &str| gate.client().in_session(session).call_code("talk", json!({})).await;
    assert_eq!(code("before").await, "ok");
    moody.set_answer("tools/list", json!({"error": {"code": -32603, "message": "not now"}}));
    let asked = moody.request_count("tools/list");
    for times in 1..=5 {
        moody.announce.notify_one();
        wait_until("it is asked what it offers", async || {
            moody.request_count("tools/list") >= asked + times
        })
        .await;
        assert_eq!(code(&format!("meanwhile{times}")).await, "ok");
    }
    moody.set_answer(
        "tools/list",
        json!({"result": {"tools": [tool_definition("talk"), tool_definition("late")]}}),
    );
    moody.announce.notify_one();
    wait_until("the change is seen", async || gate.gateway.health()[0].tools == 2).await;
    assert_eq!((gate.gateway.health()[0].starts, moody.request_count("initialize")), (1, 1));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_that_fails_every_request_is_restarted() {
    let (moody, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    let terminated = json!({"error": {"code": -32603, "message": "Session terminated"}});
    let well = moody.answer_to("tools/call").unwrap();
    moody.set_answer("tools/call", terminated.clone());
    moody.set_answer("tools/list", terminated);
    let mut calls = 0;
    wait_until("it is started again", async || {
        calls += 1;
        assert_ne!(
            gate.client().in_session(&format!("s{calls}")).call_code("talk", json!({})).await,
            "ok"
        );
        moody.announce.notify_one();
        gate.gateway.health()[0].starts > 1
    })
    .await;
    moody.set_answer("tools/call", well);
    moody.set_answer("tools/list", json!({"result": {"tools": [tool_definition("talk")]}}));
    wait_until("it is there again", async || {
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
    // The last line that it says is the reason why it is away.
    for (name, says) in [
        ("whole", "echo \"$KEY\" >&2"),
        ("line", "echo \"it is $(echo \"$KEY\" | head -n 3 | tail -n 1), is it?\" >&2"),
    ] {
        let loud = write_script(home.path(), name, &format!("{says}\nexit 3"));
        let ill = format!(
            "command = {loud}\nenv = {{ KEY = {{ file = {} }} }}\n[tools.ill_echo]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\n",
            json!(key)
        );
        let gate = TestGateway::open(&well_and_ill_config(&ill)).await;
        let said = gate.client().call("ill_echo", json!({"text": "x"})).await.to_string();
        let health = serde_json::to_string(&gate.gateway.health()).unwrap();
        for told in [said, health] {
            assert!(told.contains("[redacted]"), "{name}: {told}");
            assert!(!lines.iter().any(|line| told.contains(line)), "{name}: {told}");
        }
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn list_is_kept_if_its_refresh_fails() {
    let (moody, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    let listed = async |method: &str, list: &str, name: &str| -> Vec<Value> {
        let said = gate.client().in_session("s").call_method(method, json!({})).await.1;
        said["result"][list]
            .as_array()
            .unwrap_or_else(|| panic!("{said}"))
            .iter()
            .map(|one| one[name].clone())
            .collect()
    };
    assert_eq!(listed("prompts/list", "prompts", "name").await, ["hello"]);
    for (code, uri, prompts) in
        [(-32603, "note://b", &["hello"][..]), (-32601, "note://c", &[][..])]
    {
        moody.set_answer("prompts/list", json!({"error": {"code": code, "message": "not now"}}));
        moody.set_answer(
            "resources/list",
            json!({"result": {"resources": [{"uri": uri, "name": "a"}]}}),
        );
        moody.announce.notify_one();
        // They are asked for after prompts, and told together.
        wait_until("the change is seen", async || {
            listed("resources/list", "resources", "uri").await == [uri]
        })
        .await;
        assert_eq!(listed("prompts/list", "prompts", "name").await, prompts, "{code}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn list_changed_without_change_does_not_reload_config() {
    let (moody, upstream) = ScriptedUpstream::start().await;
    let text = format!("[upstreams.m]\n{upstream}");
    let gate = TestGateway::open(&text).await;
    let mut older = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
    // Whatever stands there by now is in force once it is read again.
    std::fs::write(
        gate.home.path().join("toolgate.toml"),
        format!("{text}[tools.calc]\nkind = \"builtin\"\n"),
    )
    .unwrap();
    moody.announce.notify_one();
    older.inbox.wait_for(|message| message["method"] == "notifications/tools/list_changed").await;
    assert_eq!(gate.client().tool_names().await, ["talk"]);
    moody.set_answer(
        "tools/list",
        json!({"result": {"tools": [tool_definition("talk"), tool_definition("late")]}}),
    );
    moody.announce.notify_one();
    wait_until("the change is seen", async || gate.client().tool_names().await.len() == 3).await;
    drop(older);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_session_is_reopened_for_prompts() {
    let (moody, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    let client = gate.client().in_session("s");
    let is_told = async || {
        client.call_method("prompts/get", json!({"name": "hello"})).await.1["result"]["messages"]
            .is_array()
    };
    assert!(is_told().await);
    for lost in 1..=2 {
        moody.session_epoch.fetch_add(1, Ordering::SeqCst);
        wait_until("it is told again", async || is_told().await).await;
        assert_eq!(moody.request_count("initialize"), 1 + lost);
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn list_requests_do_not_wait_for_calls() {
    let (moody, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}concurrency = 1\n")).await;
    moody.set_answer("tools/call", Value::Null);
    let client = gate.client().in_session("slow");
    let slow = tokio::spawn(async move { client.call_code("talk", json!({})).await });
    wait_until("it is called", async || moody.request_count("tools/call") == 1).await;
    moody.set_answer(
        "tools/list",
        json!({"result": {"tools": [tool_definition("talk"), tool_definition("late")]}}),
    );
    moody.announce.notify_one();
    wait_until("the change is seen meanwhile", async || gate.gateway.health()[0].tools == 2).await;
    assert!(!slow.is_finished());
    moody.set_answer("tools/call", json!({"result": {"content": []}}));
    assert_eq!(slow.await.unwrap(), "ok");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn elicitation_timeouts_do_not_open_circuit_breaker() {
    let (moody, upstream) = ScriptedUpstream::start().await;
    let declared =
        "[tools.talk]\nkind = \"mcp\"\nupstream = \"m\"\neffect = \"read\"\ntimeout = \"3s\"\n";
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}{declared}")).await;
    moody.set_answer("tools/call", json!("asks"));
    let asked = join_all((0..6).map(|number| {
        let client = gate
            .client()
            .in_session(&format!("s{number}"))
            .with_capabilities(json!({"elicitation": {}}));
        async move { client.call("talk", json!({})).await }
    }));
    for said in asked.await {
        assert_eq!(said["resultType"], "input_required", "{said}");
    }
    // Nobody answers, until their time is over.
    let wanted = toolgate_store::RowFilter { tool: Some("talk".to_owned()), ..Default::default() };
    wait_until("they are over", async || {
        toolgate_store::Ledger::open(gate.ledger_path()).unwrap().find(&wanted).unwrap().len() == 6
    })
    .await;
    moody.set_answer("tools/call", json!({"result": {"content": []}}));
    assert_eq!(gate.client().in_session("after").call_code("talk", json!({})).await, "ok");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn session_deadline_does_not_open_circuit_breaker() {
    let (moody, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!(
        "[limits]\nsession = {{ wall_time = \"2s\" }}\n[upstreams.m]\n{upstream}"
    ))
    .await;
    moody.set_answer("tools/call", Value::Null);
    let late = join_all((0..6).map(|number| {
        let client = gate.client().in_session(&format!("s{number}"));
        async move { client.call_code("talk", json!({})).await }
    }));
    for code in late.await {
        assert_eq!(code, "deadline_exceeded");
    }
    moody.set_answer("tools/call", json!({"result": {"content": []}}));
    assert_eq!(gate.client().in_session("after").call_code("talk", json!({})).await, "ok");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn open_circuit_breaker_also_refuses_prompts() {
    let (moody, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    moody.set_answer("prompts/get", json!("hangs up"));
    let client = gate.client().in_session("s");
    // So often it may fail, and is not asked any more.
    wait_until("it is left alone", async || {
        let before = moody.request_count("prompts/get");
        let said = client.call_method("prompts/get", json!({"name": "hello"})).await.1;
        let left_alone = said["error"]["message"]
            .as_str()
            .unwrap_or_else(|| panic!("{said}"))
            .contains("circuit breaker");
        assert!(!left_alone || moody.request_count("prompts/get") == before, "{said}");
        left_alone
    })
    .await;
    assert!(moody.request_count("prompts/get") >= 5);
    gate.shut_down().await;
}

/// What a call in a session of its own is refused with.
async fn refusal(gate: &TestGateway, session: usize, tool: &str) -> Value {
    let said = gate.client().in_session(&format!("s{session}")).call(tool, json!({})).await;
    said["_meta"]["toolgate/error"].clone()
}

/// Whether it is told since when.
fn has_since(said: &Value) -> bool {
    said["message"].as_str().is_some_and(|message| message.contains(" since 2"))
}

#[tokio::test(flavor = "multi_thread")]
async fn unavailable_upstream_reports_since_and_retry_after() {
    let declared = "[tools.ill_echo]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\n";
    let home = tempfile::tempdir().unwrap();
    let mut tries = 0;
    // It says nothing at all.
    let gate = TestGateway::open_with_short_timeout(&well_and_ill_config(&format!(
        "command = {}\n{declared}",
        write_script(home.path(), "mute", "exec sleep 995")
    )))
    .await;
    assert!(matches!(status_of(&gate, "ill"), UpstreamStatus::Starting));
    let said = refusal(&gate, tries, "ill_echo").await;
    assert!(has_since(&said) && said["message"].as_str().unwrap().contains("starting"), "{said}");
    assert_eq!(
        (&said["errorCategory"], &said["retryAfterMs"]),
        (&json!("TRANSIENT"), &json!(1_000)),
        "{said}"
    );
    gate.shut_down().await;
    // It ends at once, in both ways in which it is greeted at first, and then it says nothing.
    let runs = home.path().join("runs");
    let text = format!(
        "echo run >> {0}\n[ $(wc -l < {0}) -lt 3 ] && exit 7\nexec sleep 995",
        runs.display()
    );
    let gate = TestGateway::open(&well_and_ill_config(&format!(
        "command = {}\n{declared}",
        write_script(home.path(), "brief", &text)
    )))
    .await;
    let mut said = Value::Null;
    wait_until("it is being tried", async || {
        tries += 1;
        said = refusal(&gate, tries, "ill_echo").await;
        assert!(has_since(&said), "{said}");
        said["message"].as_str().unwrap().contains("attempt is in progress")
    })
    .await;
    assert_eq!(said["retryAfterMs"], json!(1_000), "{said}");
    gate.shut_down().await;
    // It is left alone.
    let (moody, upstream) = ScriptedUpstream::start().await;
    let gate = TestGateway::open(&format!("[upstreams.m]\n{upstream}")).await;
    moody.set_answer("tools/call", json!("hangs up"));
    wait_until("it is left alone", async || {
        tries += 1;
        said = refusal(&gate, tries, "talk").await;
        said["message"].as_str().unwrap().contains("circuit breaker")
    })
    .await;
    assert!(
        has_since(&said) && (100..=5_000).contains(&said["retryAfterMs"].as_u64().unwrap()),
        "{said}"
    );
    gate.shut_down().await;
}
