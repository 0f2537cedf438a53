//! Tests the messages in both directions between a request and its answer.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::sync::{Barrier, Semaphore};

use crate::legacy_http_client::{LegacyHttpClient, MessageInbox};
use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{
    ACCEPT_JSON_OR_EVENTS, TestGateway, fixture_config, fixture_path, http_client, wait_until,
};

/// Opens a gateway with the scripted fixture. Returns also the directory of its marks.
async fn gateway_with_scripted_fixture() -> (TestGateway, tempfile::TempDir) {
    let home = tempfile::tempdir().unwrap();
    let config = format!(
        "[upstreams.ill]\ncommand = {}\nargs = [\"--ill\"]\nprefix = \"\"\nundeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}\n",
        json!(fixture_path()),
        json!(home.path().join("marks"))
    );
    (TestGateway::open(&config).await, home)
}

/// Returns the parameters of a call that leaves a mark and then behaves as `how` selects.
fn mark_params(key: &str, how: &str) -> Value {
    json!({"name": "mark", "arguments": {"key": key, "how": how}})
}

#[tokio::test(flavor = "multi_thread")]
async fn client_answer_loses_reserved_metadata() {
    let (gate, home) = gateway_with_scripted_fixture().await;
    let input = json!({"action": "accept", "content": {"name": "x"}, "_meta": {"toolgate/approval": "mine", "own": 1}});
    let last_mark = || {
        let marks = std::fs::read_to_string(home.path().join("marks")).unwrap();
        serde_json::from_str::<Value>(marks.lines().last().unwrap()).unwrap()
    };
    let expected = json!({"action": "accept", "content": {"name": "x"}, "_meta": {"own": 1}});
    let mut older =
        LegacyHttpClient::connect(&http_client(), &gate.url, json!({"elicitation": {}})).await;
    let call = older.start_request("tools/call", &mark_params("older", "asks"));
    let question = older.inbox.wait_for(|message| message["method"] == "elicitation/create").await;
    older.send(&json!({"jsonrpc": "2.0", "id": question["id"], "result": input}));
    let answer = older.wait_for_answer(call).await;
    assert_eq!(answer["result"]["structuredContent"], json!({"done": true}), "{answer}");
    assert_eq!(last_mark(), expected);
    let newer = gate.client().in_session("s").with_capabilities(json!({"elicitation": {}}));
    let suspended = newer.call_method("tools/call", mark_params("newer", "asks")).await.1;
    let mut resumed = mark_params("newer", "asks");
    resumed["requestState"] = suspended["result"]["requestState"].clone();
    resumed["inputResponses"] = json!({"input": input});
    let answer = newer.call_method("tools/call", resumed).await.1;
    assert_eq!(
        answer["result"]["structuredContent"],
        json!({"done": true}),
        "{suspended} {answer}"
    );
    assert_eq!(last_mark(), expected);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn log_message_in_response_reaches_only_its_caller() {
    let both = Arc::new(Barrier::new(2));
    let address = serve_connections(move |mut stream| {
        let both = Arc::clone(&both);
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let schema = json!({"type": "object", "properties": {"who": {"type": "string"}}});
            let response = match request["method"].as_str().unwrap_or_default() {
                "server/discover" => http_response("404 No", "text/html", "<p>"),
                "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                "initialize" => json_rpc_result(&request, initialize_result()),
                "ping" => json_rpc_result(&request, json!({})),
                "tools/list" => {
                    json_rpc_result(&request, json!({"tools": [{"name": "talk", "description": "Talks.", "inputSchema": schema}]}))
                }
                "tools/call" => {
                    // Both calls run before either log message is sent.
                    both.wait().await;
                    let params = json!({"level": "error", "data": request["params"]["arguments"]["who"], "_meta": {"own": 1}});
                    let notification = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": params});
                    let done = json!({"jsonrpc": "2.0", "id": request["id"], "result": {"content": [{"type": "text", "text": "done"}]}});
                    http_response("200 OK", "text/event-stream", &format!("data: {notification}\n\ndata: {done}\n\n"))
                }
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await;
    let gate = TestGateway::open(&format!(
        "[upstreams.old]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n"
    ))
    .await;
    let mut clients = Vec::new();
    for name in ["one", "two"] {
        let mut client = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
        let call = client
            .start_request("tools/call", &json!({"name": "talk", "arguments": {"who": name}}));
        clients.push((name, client, call));
    }
    for (name, client, call) in &mut clients {
        let message =
            client.inbox.wait_for(|message| message["method"] == "notifications/message").await;
        assert_eq!(message["params"]["data"], json!(name), "{message}");
        assert!(!message.to_string().contains("toolgate/"), "{message}");
        let answer = client.wait_for_answer(*call).await;
        assert_eq!(answer["result"]["content"][0]["text"], "done", "{answer}");
    }
    gate.shut_down().await;
}

/// Starts a server of an earlier revision with a slow prompt, resource and completion.
///
/// Each request sends a progress notification, and ends when the test adds a permit. With the
/// argument `endless`, the request sends progress until the server receives a cancellation.
async fn start_slow_server(permits: Arc<Semaphore>) -> String {
    serve_connections(move |mut stream| {
        let permits = Arc::clone(&permits);
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let method = request["method"].as_str().unwrap_or_default();
            let done = match method {
                "prompts/get" => json!({"messages": [{"role": "user", "content": {"type": "text", "text": request["params"]["name"]}}]}),
                "resources/read" => json!({"contents": [{"uri": request["params"]["uri"], "text": "here"}]}),
                "completion/complete" => json!({"completion": {"values": [request["params"]["ref"]["name"]]}}),
                _ => Value::Null,
            };
            if !done.is_null() {
                let token = &request["params"]["_meta"]["progressToken"];
                let params = json!({"progressToken": token, "progress": 1, "message": token.to_string()});
                let notification = json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params});
                let done = json!({"jsonrpc": "2.0", "id": request["id"], "result": done});
                let _ = stream.write_all(http_response("200 OK", "text/event-stream", &format!("data: {notification}\n\n")).as_bytes()).await;
                if request["params"]["arguments"]["who"] == "endless" {
                    let params = json!({"progressToken": token, "progress": 2, "message": "x".repeat(60 << 10)});
                    let notification = json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params});
                    while !permits.is_closed() && stream.write_all(format!("data: {notification}\n\n").as_bytes()).await.is_ok() {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    return;
                }
                permits.acquire().await.unwrap().forget();
                let _ = stream.write_all(format!("data: {done}\n\n").as_bytes()).await;
                return;
            }
            if method == "notifications/cancelled" {
                permits.close();
            }
            let mut initialized = initialize_result();
            initialized["capabilities"] = json!({"tools": {}, "prompts": {}, "resources": {}, "completions": {}});
            let response = match method {
                "server/discover" => http_response("404 No", "text/html", "<p>"),
                "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                "initialize" => json_rpc_result(&request, initialized),
                "ping" => json_rpc_result(&request, json!({})),
                "tools/list" => json_rpc_result(
                    &request,
                    json!({"tools": [{"name": "talk", "description": "Talks.", "inputSchema": {"type": "object"}}]}),
                ),
                "tools/call" => json_rpc_result(&request, json!({"content": [{"type": "text", "text": "done"}]})),
                "prompts/list" => json_rpc_result(&request, json!({"prompts": [{"name": "hello", "arguments": [{"name": "who"}]}]})),
                "resources/list" => json_rpc_result(&request, json!({"resources": [{"uri": "x://a", "name": "a"}]})),
                "resources/templates/list" => json_rpc_result(&request, json!({"resourceTemplates": []})),
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await
}

/// Opens a gateway with the slow server, and waits for its lists.
pub(crate) async fn gateway_with_slow_server(permits: &Arc<Semaphore>, extra: &str) -> TestGateway {
    let address = start_slow_server(Arc::clone(permits)).await;
    let gate = TestGateway::open(&format!(
        "[upstreams.x]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\n{extra}"
    ))
    .await;
    let client = gate.client();
    for list in ["prompts", "resources"] {
        let is_listed = async || {
            client.call_method(&format!("{list}/list"), json!({})).await.1["result"][list]
                .as_array()
                .is_some_and(|all| !all.is_empty())
        };
        wait_until(&format!("{list} are listed"), is_listed).await;
    }
    gate
}

/// Returns requests for the slow server: the method, the parameters, and where the answer has which
/// value.
///
/// The gateway adds a prefix to the names of the upstream.
pub(crate) fn slow_server_requests() -> [(&'static str, Value, &'static str, &'static str); 3] {
    let completion = json!({"ref": {"type": "ref/prompt", "name": "x_hello"}, "argument": {"name": "who", "value": "h"}});
    [
        ("prompts/get", json!({"name": "x_hello"}), "/result/messages/0/content/text", "hello"),
        ("resources/read", json!({"uri": "toolgate://x/x://a"}), "/result/contents/0/text", "here"),
        ("completion/complete", completion, "/result/completion/values/0", "hello"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_of_prompt_resource_and_completion_is_forwarded() {
    let permits = Arc::new(Semaphore::new(0));
    let gate = gateway_with_slow_server(&permits, "").await;
    let mut older = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
    for (method, params, pointer, expected) in slow_server_requests() {
        let is_progress = |message: &Value| message["method"] == "notifications/progress";
        let check_progress = |message: &Value| {
            assert_eq!(
                (&message["params"]["progressToken"], message["params"]["progress"].as_f64()),
                (&json!(method), Some(1.0)),
                "{message}"
            );
            // The upstream receives another progress token than the gateway.
            assert_ne!(message["params"]["message"], json!(json!(method).to_string()), "{message}");
        };
        let mut params_with_meta = params.clone();
        params_with_meta["_meta"] = json!({"progressToken": method});
        let id = older.start_request(method, &params_with_meta);
        check_progress(&older.inbox.wait_for(is_progress).await);
        permits.add_permits(1);
        let answer = older.wait_for_answer(id).await;
        assert_eq!(answer.pointer(pointer), Some(&json!(expected)), "{method}: {answer}");
        let mut newer = MessageInbox::new();
        params_with_meta["_meta"] = json!({"progressToken": method, "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}, "io.modelcontextprotocol/clientCapabilities": {}});
        let mut post = http_client()
            .post(format!("{}/mcp", gate.url))
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .header("mcp-protocol-version", "2026-07-28");
        if let Some(name) = params.get("name").or_else(|| params.get("uri")).and_then(Value::as_str)
        {
            post = post.header("mcp-name", name);
        }
        newer.send(post.header("mcp-method", method).json(
            &json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params_with_meta}),
        ));
        check_progress(&newer.wait_for(is_progress).await);
        permits.add_permits(1);
        let answer = newer.wait_for(|message| message["id"] == json!(1)).await;
        assert_eq!(answer.pointer(pointer), Some(&json!(expected)), "{method}: {answer}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_stops_reading_loses_permit_after_timeout() {
    let permits = Arc::new(Semaphore::new(0));
    let address = start_slow_server(Arc::clone(&permits)).await;
    let upstream = format!(
        "[upstreams.x]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\nconcurrency = 1\ntimeout = \"2s\"\n"
    );
    let gate = TestGateway::open(&upstream).await;
    let other = gate.client();
    wait_until("prompts are listed", async || {
        other.call_method("prompts/list", json!({})).await.1["result"]["prompts"][0]["name"]
            == "x_hello"
    })
    .await;
    let (_serving, mut writer, mut lines) = gate.connect_streams(None);
    let initialize = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    let params = json!({"name": "x_hello", "arguments": {"who": "endless"}, "_meta": {"progressToken": "far"}});
    let prompt = json!({"jsonrpc": "2.0", "id": 1, "method": "prompts/get", "params": params});
    writer.write_all(format!("{initialize}\n{ready}\n{prompt}\n").as_bytes()).await.unwrap();
    while !lines.next_line().await.unwrap().unwrap().contains("notifications/progress") {}
    // The client stops reading, and the upstream sends more than the buffers hold.
    wait_until("the upstream receives the cancellation", async || permits.is_closed()).await;
    assert_eq!(other.in_session("s").call_code("x_talk", json!({})).await, "ok");
    drop((writer, lines));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn early_or_repeated_answer_does_not_run_tool() {
    let home = tempfile::tempdir().unwrap();
    let counter = home.path().join("ran");
    let config = fixture_config(&format!("env = {{ FIXTURE_COUNTER = {} }}", json!(counter)))
        + "[tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
           [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"count\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";
    let gate = TestGateway::open(&config).await;
    let mut client =
        LegacyHttpClient::connect(&http_client(), &gate.url, json!({"elicitation": {}})).await;
    let yes = json!({"action": "accept", "content": {"approve": true}});
    // The test guesses the id of the question.
    for id in 0..10 {
        let early = json!({"jsonrpc": "2.0", "id": id, "result": yes});
        client.http_request(Method::POST).json(&early).send().await.unwrap();
    }
    let call = client.start_request("tools/call", &json!({"name": "count", "arguments": {}}));
    let question = client.inbox.wait_for(|message| message["method"] == "elicitation/create").await;
    assert!(!counter.exists(), "the tool ran before the question");
    for result in [json!({"action": "decline"}), yes] {
        let reply = json!({"jsonrpc": "2.0", "id": question["id"], "result": result});
        client.http_request(Method::POST).json(&reply).send().await.unwrap();
    }
    let answer = client.wait_for_answer(call).await;
    assert_eq!(answer["result"]["_meta"]["toolgate/error"]["code"], "approval_denied", "{answer}");
    assert!(!counter.exists(), "the tool ran despite the refusal");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn notifications_are_forwarded_in_order_before_answer() {
    let (gate, _home) = gateway_with_scripted_fixture().await;
    let (_serving, mut writer, mut lines) = gate.connect_streams(None);
    let initialize = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    writer.write_all(format!("{initialize}\n{ready}\n").as_bytes()).await.unwrap();
    lines.next_line().await.unwrap().unwrap();
    for n in 1..=50 {
        let mut params = mark_params(&n.to_string(), "chatter");
        params["_meta"] = json!({"progressToken": format!("of {n}")});
        let call = json!({"jsonrpc": "2.0", "id": n, "method": "tools/call", "params": params});
        writer.write_all(format!("{call}\n").as_bytes()).await.unwrap();
        let mut progress = Vec::new();
        loop {
            let message: Value =
                serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
            if message["id"] == json!(n) {
                assert_eq!(
                    message["result"]["structuredContent"],
                    json!({"done": true}),
                    "{message}"
                );
                break;
            }
            assert_eq!(
                message["params"]["progressToken"], params["_meta"]["progressToken"],
                "{message}"
            );
            progress.push(message["params"]["progress"].as_f64().unwrap());
        }
        assert_eq!(progress, [1.0, 2.0, 3.0], "{n}");
    }
    drop((writer, lines));
    gate.shut_down().await;
}
