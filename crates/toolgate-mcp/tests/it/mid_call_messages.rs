//! What is said between a question and its answer, in both directions.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::sync::{Barrier, Semaphore};

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{TestGateway, fixture_config, fixture_path, wait_until};
use crate::tls_and_authentication::{
    ACCEPT_JSON_OR_EVENTS, LegacyHttpClient, MessageInbox, http_client,
};

/// A gateway before the fixture that does as it is told, and where that leaves its marks.
async fn gateway_with_scripted_fixture() -> (TestGateway, tempfile::TempDir) {
    let home = tempfile::tempdir().unwrap();
    let config = format!(
        "[upstreams.ill]\ncommand = {}\nargs = [\"--ill\"]\nprefix = \"\"\nundeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}\n",
        json!(fixture_path()),
        json!(home.path().join("marks"))
    );
    (TestGateway::open(&config).await, home)
}

/// The call that leaves this mark, and goes on so.
fn mark_params(key: &str, how: &str) -> Value {
    json!({"name": "mark", "arguments": {"key": key, "how": how}})
}

#[tokio::test(flavor = "multi_thread")]
async fn client_answer_loses_reserved_metadata() {
    let (gate, home) = gateway_with_scripted_fixture().await;
    let said = json!({"action": "accept", "content": {"name": "x"}, "_meta": {"toolgate/approval": "mine", "own": 1}});
    let heard = || {
        let marks = std::fs::read_to_string(home.path().join("marks")).unwrap();
        serde_json::from_str::<Value>(marks.lines().last().unwrap()).unwrap()
    };
    let expected = json!({"action": "accept", "content": {"name": "x"}, "_meta": {"own": 1}});
    let mut older =
        LegacyHttpClient::connect(&http_client(), &gate.url, json!({"elicitation": {}})).await;
    let call = older.start_request("tools/call", &mark_params("older", "asks"));
    let question = older.inbox.wait_for(|message| message["method"] == "elicitation/create").await;
    older.send(&json!({"jsonrpc": "2.0", "id": question["id"], "result": said}));
    let answer = older.wait_for_answer(call).await;
    assert_eq!(answer["result"]["structuredContent"], json!({"done": true}), "{answer}");
    assert_eq!(heard(), expected);
    let newer = gate.client().in_session("s").with_capabilities(json!({"elicitation": {}}));
    let asked = newer.call_method("tools/call", mark_params("newer", "asks")).await.1;
    let mut again = mark_params("newer", "asks");
    again["requestState"] = asked["result"]["requestState"].clone();
    again["inputResponses"] = json!({"input": said});
    let answer = newer.call_method("tools/call", again).await.1;
    assert_eq!(answer["result"]["structuredContent"], json!({"done": true}), "{asked} {answer}");
    assert_eq!(heard(), expected);
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
                    // Both are under way when either says something.
                    both.wait().await;
                    let params = json!({"level": "error", "data": request["params"]["arguments"]["who"], "_meta": {"own": 1}});
                    let word = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": params});
                    let done = json!({"jsonrpc": "2.0", "id": request["id"], "result": {"content": [{"type": "text", "text": "done"}]}});
                    http_response("200 OK", "text/event-stream", &format!("data: {word}\n\ndata: {done}\n\n"))
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
    for who in ["one", "two"] {
        let mut client = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
        let call =
            client.start_request("tools/call", &json!({"name": "talk", "arguments": {"who": who}}));
        clients.push((who, client, call));
    }
    for (who, client, call) in &mut clients {
        let said =
            client.inbox.wait_for(|message| message["method"] == "notifications/message").await;
        assert_eq!(said["params"]["data"], json!(who), "{said}");
        assert!(!said.to_string().contains("toolgate/"), "{said}");
        let answer = client.wait_for_answer(*call).await;
        assert_eq!(answer["result"]["content"][0]["text"], "done", "{answer}");
    }
    gate.shut_down().await;
}

/// A server of an earlier revision with a prompt and a resource. It says how far it is with either,
/// and with a completion, and is through when it is let; or it says so without end, until it hears
/// that nobody waits any more.
async fn start_slow_server(let_go: Arc<Semaphore>) -> String {
    serve_connections(move |mut stream| {
        let let_go = Arc::clone(&let_go);
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
                let word = json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params});
                let done = json!({"jsonrpc": "2.0", "id": request["id"], "result": done});
                let _ = stream.write_all(http_response("200 OK", "text/event-stream", &format!("data: {word}\n\n")).as_bytes()).await;
                if request["params"]["arguments"]["who"] == "endless" {
                    let params = json!({"progressToken": token, "progress": 2, "message": "x".repeat(60 << 10)});
                    let word = json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params});
                    while !let_go.is_closed() && stream.write_all(format!("data: {word}\n\n").as_bytes()).await.is_ok() {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    return;
                }
                let_go.acquire().await.unwrap().forget();
                let _ = stream.write_all(format!("data: {done}\n\n").as_bytes()).await;
                return;
            }
            if method == "notifications/cancelled" {
                let_go.close();
            }
            let mut own = initialize_result();
            own["capabilities"] = json!({"tools": {}, "prompts": {}, "resources": {}, "completions": {}});
            let response = match method {
                "server/discover" => http_response("404 No", "text/html", "<p>"),
                "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                "initialize" => json_rpc_result(&request, own),
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

/// A gateway before such a server, whose prompts and resources it knows.
pub(crate) async fn gateway_with_slow_server(let_go: &Arc<Semaphore>, more: &str) -> TestGateway {
    let address = start_slow_server(Arc::clone(let_go)).await;
    let gate = TestGateway::open(&format!(
        "[upstreams.x]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\n{more}"
    ))
    .await;
    let client = gate.client();
    for list in ["prompts", "resources"] {
        let there = async || {
            client.call_method(&format!("{list}/list"), json!({})).await.1["result"][list]
                .as_array()
                .is_some_and(|all| !all.is_empty())
        };
        wait_until(&format!("there are {list}"), there).await;
    }
    gate
}

/// What is asked of it, and where its answer stands in what comes. What is namespaced here is
/// called there as it calls it itself.
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
    let let_go = Arc::new(Semaphore::new(0));
    let gate = gateway_with_slow_server(&let_go, "").await;
    let mut older = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
    for (method, params, place, found) in slow_server_requests() {
        let far = |said: &Value| said["method"] == "notifications/progress";
        let is_own = |said: &Value| {
            assert_eq!(
                (&said["params"]["progressToken"], said["params"]["progress"].as_f64()),
                (&json!(method), Some(1.0)),
                "{said}"
            );
            // To the upstream it is another one.
            assert_ne!(said["params"]["message"], json!(json!(method).to_string()), "{said}");
        };
        let mut asked = params.clone();
        asked["_meta"] = json!({"progressToken": method});
        let id = older.start_request(method, &asked);
        is_own(&older.inbox.wait_for(far).await);
        let_go.add_permits(1);
        let answer = older.wait_for_answer(id).await;
        assert_eq!(answer.pointer(place), Some(&json!(found)), "{method}: {answer}");
        let mut newer = MessageInbox::new();
        asked["_meta"] = json!({"progressToken": method, "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}, "io.modelcontextprotocol/clientCapabilities": {}});
        let mut post = http_client()
            .post(format!("{}/mcp", gate.url))
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .header("mcp-protocol-version", "2026-07-28");
        if let Some(name) = params.get("name").or_else(|| params.get("uri")).and_then(Value::as_str)
        {
            post = post.header("mcp-name", name);
        }
        newer.send(
            post.header("mcp-method", method)
                .json(&json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": asked})),
        );
        is_own(&newer.wait_for(far).await);
        let_go.add_permits(1);
        let answer = newer.wait_for(|message| message["id"] == json!(1)).await;
        assert_eq!(answer.pointer(place), Some(&json!(found)), "{method}: {answer}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_stops_reading_loses_permit_after_timeout() {
    let let_go = Arc::new(Semaphore::new(0));
    let address = start_slow_server(Arc::clone(&let_go)).await;
    let upstream = format!(
        "[upstreams.x]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\nconcurrency = 1\ntimeout = \"2s\"\n"
    );
    let gate = TestGateway::open(&upstream).await;
    let other = gate.client();
    wait_until("there are prompts", async || {
        other.call_method("prompts/list", json!({})).await.1["result"]["prompts"][0]["name"]
            == "x_hello"
    })
    .await;
    let (_serving, mut ask, mut told) = gate.connect_streams(None);
    let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    let params = json!({"name": "x_hello", "arguments": {"who": "endless"}, "_meta": {"progressToken": "far"}});
    let prompt = json!({"jsonrpc": "2.0", "id": 1, "method": "prompts/get", "params": params});
    ask.write_all(format!("{hello}\n{ready}\n{prompt}\n").as_bytes()).await.unwrap();
    while !told.next_line().await.unwrap().unwrap().contains("notifications/progress") {}
    // It reads nothing any more, and the upstream says more than waits for it.
    wait_until("the upstream hears that nobody waits any more", async || let_go.is_closed()).await;
    assert_eq!(other.in_session("s").call_code("x_talk", json!({})).await, "ok");
    drop((ask, told));
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
    // Whatever the question will be called.
    for id in 0..10 {
        let early = json!({"jsonrpc": "2.0", "id": id, "result": yes});
        client.http_request(Method::POST).json(&early).send().await.unwrap();
    }
    let call = client.start_request("tools/call", &json!({"name": "count", "arguments": {}}));
    let question = client.inbox.wait_for(|message| message["method"] == "elicitation/create").await;
    assert!(!counter.exists(), "it ran before anybody was asked");
    for said in [json!({"action": "decline"}), yes] {
        let said = json!({"jsonrpc": "2.0", "id": question["id"], "result": said});
        client.http_request(Method::POST).json(&said).send().await.unwrap();
    }
    let answer = client.wait_for_answer(call).await;
    assert_eq!(answer["result"]["_meta"]["toolgate/error"]["code"], "approval_denied", "{answer}");
    assert!(!counter.exists(), "it ran although it was refused");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn notifications_are_forwarded_in_order_before_answer() {
    let (gate, _home) = gateway_with_scripted_fixture().await;
    let (_serving, mut ask, mut told) = gate.connect_streams(None);
    let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    ask.write_all(format!("{hello}\n{ready}\n").as_bytes()).await.unwrap();
    told.next_line().await.unwrap().unwrap();
    for n in 1..=50 {
        let mut params = mark_params(&n.to_string(), "chatter");
        params["_meta"] = json!({"progressToken": format!("of {n}")});
        let call = json!({"jsonrpc": "2.0", "id": n, "method": "tools/call", "params": params});
        ask.write_all(format!("{call}\n").as_bytes()).await.unwrap();
        let mut heard = Vec::new();
        loop {
            let said: Value =
                serde_json::from_str(&told.next_line().await.unwrap().unwrap()).unwrap();
            if said["id"] == json!(n) {
                assert_eq!(said["result"]["structuredContent"], json!({"done": true}), "{said}");
                break;
            }
            assert_eq!(said["params"]["progressToken"], params["_meta"]["progressToken"], "{said}");
            heard.push(said["params"]["progress"].as_f64().unwrap());
        }
        assert_eq!(heard, [1.0, 2.0, 3.0], "{n}");
    }
    drop((ask, told));
    gate.shut_down().await;
}
