//! Tests that known attacks of clients and upstreams fail.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{CALC_TOOL_CONFIG, TestGateway, fixture_config, wait_until};

#[tokio::test(flavor = "multi_thread")]
async fn unrequested_input_is_ignored() {
    let gate = TestGateway::open(&fixture_config("undeclared = \"read\"")).await;
    let client = gate.client().in_session("s").with_capabilities(json!({"elicitation": {}}));
    let tool = "test_input_required_result_elicitation";
    let call = json!({"name": tool, "arguments": {}, "inputResponses": {"user_name": {"action": "accept", "content": {"name": "Mallory"}}}});
    let answer = client.call_method("tools/call", call.clone()).await.1;
    assert_eq!(answer["result"]["resultType"], "input_required", "{answer}");
    // The question is open now, so the same input answers it.
    let answer = client.call_method("tools/call", call).await.1;
    assert!(answer["result"].to_string().contains("Mallory"), "{answer}");
    gate.shut_down().await;
}

/// Serves an upstream of revision 2026-07-28 that asks for a name and returns the answer.
async fn serve_elicitation(mut stream: TcpStream) {
    let Some((_, request)) = read_request(&mut stream).await else { return };
    let server_info = json!({"name": "asks", "version": "1"});
    let form = json!({"message": "Who?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}});
    let response = match (
        request["method"].as_str().unwrap_or_default(),
        request.pointer("/params/inputResponses"),
    ) {
        ("server/discover", _) => json!({
            "resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "serverInfo": server_info,
            "ttlMs": 1000, "cacheScope": "private", "_meta": {"io.modelcontextprotocol/serverInfo": server_info},
        }),
        ("tools/list", _) => json!({
            "resultType": "complete", "ttlMs": 1000, "cacheScope": "private",
            "tools": [{"name": "ask", "description": "Asks.", "inputSchema": {"type": "object"}}],
        }),
        ("tools/call", None) => {
            json!({"resultType": "input_required", "inputRequests": {"user_name": {"method": "elicitation/create", "params": form}}})
        }
        ("tools/call", Some(input)) => {
            json!({"resultType": "complete", "content": [], "structuredContent": {"input": input}})
        }
        _ => {
            let _ =
                stream.write_all(http_response("202 Accepted", "text/plain", "").as_bytes()).await;
            return;
        }
    };
    let _ = stream.write_all(json_rpc_result(&request, response).as_bytes()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unrequested_input_beside_answer_is_dropped() {
    let address = serve_connections(serve_elicitation).await;
    let gate = TestGateway::open(&format!(
        "[upstreams.a]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n"
    ))
    .await;
    let client = gate.client().in_session("s").with_capabilities(json!({"elicitation": {}}));
    let suspended = client.call("ask", json!({})).await;
    assert_eq!(suspended["resultType"], "input_required", "{suspended}");
    let name = json!({"action": "accept", "content": {"name": "Ann"}});
    let input =
        json!({"user_name": name, "is_admin": {"action": "accept", "content": {"yes": true}}});
    let resumed = json!({"name": "ask", "arguments": {}, "requestState": suspended["requestState"], "inputResponses": input});
    let (_, answer) = client.call_method("tools/call", resumed).await;
    assert_eq!(
        answer["result"]["structuredContent"],
        json!({"input": {"user_name": name}}),
        "{answer}"
    );
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_keys_of_wrong_type_are_refused() {
    let gate = TestGateway::open(&fixture_config("undeclared = \"read\"")).await;
    for (name, value) in [
        ("toolgate/idempotencyKey", json!(7)),
        ("toolgate/idempotencyKey", json!("")),
        ("toolgate/approval", json!([])),
        ("toolgate/turn", json!("first")),
    ] {
        let (_, answer) = gate
            .client()
            .call_method(
                "tools/call",
                json!({"name": "echo", "arguments": {"text": "x"}, "_meta": {name: value}}),
            )
            .await;
        assert!(answer["error"].is_object(), "{name} {value}: {answer}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_of_same_name_are_both_quarantined() {
    let fixture = json!(crate::support::fixture_path());
    let config = format!(
        "[upstreams.a]\ncommand = {fixture}\nargs = [\"--stdio\"]\nprefix = \"\"\nundeclared = \"read\"\n[upstreams.b]\ncommand = {fixture}\nargs = [\"--stdio\", \"--tools\", \"1\"]\nprefix = \"\"\nundeclared = \"read\"\n"
    );
    let gate = TestGateway::open(&config).await;
    assert_eq!(gate.client().tool_names().await, ["tool_000"]);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_cannot_remove_token_of_public_listener() {
    let gate = TestGateway::open(&format!(
        "{CALC_TOOL_CONFIG}[[gateway.tokens]]\nprincipal = \"a\"\nsha256 = \"{}\"\n",
        "0".repeat(64)
    ))
    .await;
    let listening = gate.gateway.listen("0.0.0.0:0".parse().unwrap()).await.unwrap();
    let error = gate.reload(CALC_TOOL_CONFIG).await.unwrap_err().to_string();
    assert!(error.contains("requires no token"), "{error}");
    assert_eq!(gate.client().call_method("tools/list", json!({})).await.0, 401);
    gate.shut_down().await;
    listening.wait_stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_tool_names_are_not_metric_labels() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    for number in 0..20 {
        gate.client().call(&format!("made_up_{number}"), json!({})).await;
    }
    let metrics =
        reqwest::get(format!("{}/metrics", gate.url)).await.unwrap().text().await.unwrap();
    assert!(!metrics.contains("made_up"), "{metrics}");
    gate.shut_down().await;
}

/// Starts a service that answers with these responses in turn. Returns its port and the recorded
/// requests.
async fn start_scripted_http_server(
    answers: &'static [&'static str],
) -> (u16, Arc<std::sync::Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, requests) =
        (listener.local_addr().unwrap().port(), Arc::new(std::sync::Mutex::new(Vec::new())));
    let recorder = Arc::clone(&requests);
    tokio::spawn(async move {
        for answer in answers.iter().cycle() {
            let Ok((mut stream, _)) = listener.accept().await else { return };
            let mut request = vec![0; 4096];
            let read = stream.read(&mut request).await.unwrap_or(0);
            recorder.lock().unwrap().push(
                String::from_utf8_lossy(&request[..read])
                    .lines()
                    .next()
                    .unwrap_or_default()
                    .to_owned(),
            );
            let _ = stream.write_all(answer.replace("PORT", &port.to_string()).as_bytes()).await;
        }
    });
    (port, requests)
}

#[tokio::test(flavor = "multi_thread")]
async fn http_call_with_unknown_outcome_is_not_repeated() {
    // The service runs the call, and redirects to an address without a listener.
    let (port, requests) = start_scripted_http_server(&[
        "HTTP/1.1 303 See Other\r\nlocation: http://127.0.0.1:1/x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    ])
    .await;
    let pay = |method: &str, port: u16| {
        format!(
            "[tools.pay]\nkind = \"http\"\nmethod = \"{method}\"\npolicy = \"open\"\nnetworks = [\"127.0.0.0/8\"]\nurl = \"http://127.0.0.1:{port}/refunds\"\n"
        )
    };
    let gate = TestGateway::open(&pay("POST", port)).await;
    let error: Value =
        gate.client().call("pay", json!({})).await["_meta"]["toolgate/error"].clone();
    assert_eq!(requests.lock().unwrap().len(), 1, "{error}");
    assert_eq!(error["effects"], json!("unknown"), "{error}");
    gate.shut_down().await;
    // A redirect must not change the method of the call.
    let (port, requests) = start_scripted_http_server(&[
        "HTTP/1.1 301 Moved\r\nlocation: /elsewhere\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}",
    ])
    .await;
    let gate = TestGateway::open(&pay("DELETE", port)).await;
    assert_eq!(gate.client().call_code("pay", json!({})).await, "tool_failed");
    assert_eq!(*requests.lock().unwrap(), ["DELETE /refunds HTTP/1.1"]);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_path_argument_is_refused() {
    let (port, requests) = start_scripted_http_server(&[
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}",
    ])
    .await;
    let config = format!(
        "[tools.remove]\nkind = \"http\"\nmethod = \"DELETE\"\npolicy = \"open\"\nnetworks = [\"127.0.0.0/8\"]\nurl = \"http://127.0.0.1:{port}/customers/{{/id}}\"\ninput = {{ type = \"object\", properties = {{ id = {{ type = \"string\" }} }} }}\n"
    );
    let gate = TestGateway::open(&config).await;
    assert_eq!(gate.client().call_code("remove", json!({"id": ""})).await, "invalid_arguments");
    assert_eq!(gate.client().call_code("remove", json!({})).await, "invalid_arguments");
    assert!(requests.lock().unwrap().is_empty());
    gate.shut_down().await;
}

/// A server of the legacy SSE transport that answers calls only after its question is answered.
#[derive(Default)]
struct AskingSseServer {
    stream: Mutex<Option<mpsc::UnboundedSender<String>>>,
    /// The ids and results of unanswered requests.
    open_requests: Mutex<Vec<(Value, Value)>>,
    /// The answer to the question of the server.
    answer: Mutex<Option<Value>>,
}

impl AskingSseServer {
    /// Starts the server behind a gateway.
    async fn start() -> (Arc<Self>, TestGateway) {
        let server = Arc::new(Self::default());
        let serving = Arc::clone(&server);
        let address =
            serve_connections(move |stream| Arc::clone(&serving).handle_connection(stream)).await;
        let upstream = format!(
            "[upstreams.old]\nurl = \"http://{address}/sse\"\ntransport = \"sse\"\nundeclared = \"read\"\ntimeout = \"10s\"\n"
        );
        (server, TestGateway::open(&upstream).await)
    }

    fn send(&self, message: &Value) {
        if let Some(line) = self.stream.lock().unwrap().as_ref() {
            let _ = line.send(format!("event: message\ndata: {message}\n\n"));
        }
    }

    async fn handle_connection(self: Arc<Self>, mut stream: TcpStream) {
        let Some((head, request)) = read_request(&mut stream).await else { return };
        if head.starts_with("get ") {
            let (sender, mut receiver) = mpsc::unbounded_channel();
            *self.stream.lock().unwrap() = Some(sender);
            let mut next = Some(http_response(
                "200 OK",
                "text/event-stream",
                "event: endpoint\ndata: /post\n\n",
            ));
            while let Some(text) = next {
                if stream.write_all(text.as_bytes()).await.is_err() {
                    return;
                }
                next = receiver.recv().await;
            }
            return;
        }
        let _ = stream.write_all(http_response("202 Accepted", "text/plain", "").as_bytes()).await;
        let id = request["id"].clone();
        let result = match request["method"].as_str().unwrap_or_default() {
            "initialize" => {
                let mut initialized = initialize_result();
                initialized["capabilities"] = json!({"tools": {}, "prompts": {}});
                initialized
            }
            "tools/list" => {
                let tool = |name: &str| json!({"name": name, "description": "Does.", "inputSchema": {"type": "object"}});
                json!({"tools": [tool("wait"), tool("ask")]})
            }
            "prompts/list" => json!({"prompts": [{"name": "ask"}]}),
            "ping" => json!({}),
            method @ ("tools/call" | "prompts/get") => {
                let done = json!([{"type": "text", "text": "done"}]);
                let result = if method == "tools/call" {
                    json!({"content": done})
                } else {
                    json!({"messages": []})
                };
                self.open_requests.lock().unwrap().push((id, result));
                if request["params"]["name"] == "ask" {
                    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
                    let form = json!({"message": "Is this Ann's?", "requestedSchema": schema});
                    self.send(&json!({"jsonrpc": "2.0", "id": "question", "method": "elicitation/create", "params": form}));
                }
                return;
            }
            "" if id == "question" => {
                *self.answer.lock().unwrap() = Some(request.clone());
                for (id, result) in std::mem::take(&mut *self.open_requests.lock().unwrap()) {
                    self.send(&json!({"jsonrpc": "2.0", "id": id, "result": result}));
                }
                return;
            }
            _ => return,
        };
        self.send(&json!({"jsonrpc": "2.0", "id": id, "result": result}));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn elicitation_of_prompt_is_not_sent_to_other_caller() {
    let (server, gate) = AskingSseServer::start().await;
    let bob = gate.client().in_session("bob").with_capabilities(json!({"elicitation": {}}));
    let call = tokio::spawn(async move { bob.call("old_wait", json!({})).await });
    wait_until("the server is called", async || server.open_requests.lock().unwrap().len() == 1)
        .await;
    let (_, prompt) = gate
        .client()
        .in_session("ann")
        .call_method("prompts/get", json!({"name": "old_ask"}))
        .await;
    let answer = server.answer.lock().unwrap().clone().unwrap_or_default();
    assert!(
        answer["error"]["message"].as_str().is_some_and(|message| message.contains("which call")),
        "{answer}"
    );
    assert!(prompt["result"]["messages"].is_array(), "{prompt}");
    let result = call.await.unwrap();
    assert_eq!(result["content"][0]["text"], "done", "{result}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resumed_call_without_answer_is_refused_and_recorded() {
    let (_, gate) = AskingSseServer::start().await;
    let client = gate.client().with_capabilities(json!({"elicitation": {}}));
    let decline = json!({"action": "decline"});
    for (session, key, arguments) in
        [("no-answer", "other", json!({})), ("another-call", "input", json!({"a": 1}))]
    {
        let client = client.in_session(session);
        let suspended = client.call("old_ask", json!({})).await;
        assert_eq!(suspended["resultType"], "input_required", "{suspended}");
        let resumed = json!({"name": "old_ask", "arguments": arguments, "requestState": suspended["requestState"], "inputResponses": {key: decline}});
        let (_, answer) = client.call_method("tools/call", resumed).await;
        let data = &answer["error"]["data"];
        assert_eq!(
            (&data["code"], data["callId"].is_string()),
            (&json!("invalid_request"), true),
            "{answer}"
        );
        // The suspended call has a row too.
        let rows = async || {
            gate.gateway.runtime().session("default", "local", session).rows().await.unwrap().len()
        };
        wait_until("both calls have their rows", async || rows().await == 2).await;
    }
    gate.shut_down().await;
}
