//! Tests which client is asked for approval or input, and which answers count.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::approvals::APPROVAL_RULES;
use crate::legacy_http_client::LegacyHttpClient;
use crate::legacy_upstreams::{
    discover_result, http_response, json_rpc_result, modern_result, read_request, serve_connections,
};
use crate::support::{
    TestGateway, fixture_config, fixture_path, http_client, token_config, wait_until,
};

/// Returns the id of the approval that a refused call needs.
fn approval_id(result: &Value) -> &str {
    let error = &result["_meta"]["toolgate/error"];
    assert_eq!(error["code"], "approval_required", "{result}");
    error["approval"]["id"].as_str().unwrap_or_else(|| panic!("{result}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn client_approval_is_rejected_after_tool_is_destructive() {
    let gate = TestGateway::open(&(fixture_config("") + APPROVAL_RULES)).await;
    let yes = json!({"action": "accept", "content": {"approve": true}});
    let mut older =
        LegacyHttpClient::connect(&http_client(), &gate.url, json!({"elicitation": {}})).await;
    let call = older.start_request("tools/call", &json!({"name": "count", "arguments": {}}));
    let question = older.inbox.wait_for(|message| message["method"] == "elicitation/create").await;
    let newer = gate.client().in_session("s").with_capabilities(json!({"elicitation": {}}));
    let suspended = newer.call("count", json!({})).await;
    assert_eq!(suspended["resultType"], "input_required", "{suspended}");
    // After the reload, the tool is destructive.
    gate.reload(&(fixture_config("") + &APPROVAL_RULES.replace("effect = \"write\"\n", "")))
        .await
        .unwrap();
    older.send(&json!({"jsonrpc": "2.0", "id": question["id"], "result": yes}));
    let older_result = older.wait_for_answer(call).await["result"].clone();
    let input = json!({"toolgate_approval": yes});
    let resumed = json!({"name": "count", "arguments": {}, "requestState": suspended["requestState"], "inputResponses": input});
    let newer_result = newer.call_method("tools/call", resumed).await.1["result"].clone();
    for result in [older_result, newer_result] {
        // The approval is still open for a permitted approver.
        assert!(
            gate.gateway
                .runtime()
                .answer_approval(approval_id(&result), true, "lead")
                .await
                .unwrap(),
            "{result}"
        );
    }
    drop(older);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_without_form_support_gets_no_elicitation() {
    let home = tempfile::tempdir().unwrap();
    let marks = home.path().join("marks");
    let upstream = format!(
        "[upstreams.ill]\ncommand = {}\nargs = [\"--ill\"]\nprefix = \"\"\nundeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}\n",
        json!(fixture_path()),
        json!(marks)
    );
    let rules = APPROVAL_RULES.replace("count", "echo").replace("\"fix\"", "\"ill\"");
    let gate = TestGateway::open(&(upstream + &rules)).await;
    let echo = json!({"name": "echo", "arguments": {"text": "x"}});
    // The gateway also refuses the question of the upstream, and reports the outcome of the call.
    let mark = |key: &str| json!({"name": "mark", "arguments": {"key": key, "how": "asks"}});
    let last_mark =
        || std::fs::read_to_string(&marks).unwrap().lines().last().unwrap_or_default().to_owned();
    for (elicitation, is_asked) in
        [(json!({"url": {}}), false), (json!({"form": {}, "url": {}}), true)]
    {
        let capabilities = json!({"elicitation": elicitation});
        let newer = gate
            .client()
            .in_session(&elicitation.to_string().replace([' ', '"'], ""))
            .with_capabilities(capabilities.clone());
        for (call, key) in [(echo.clone(), "toolgate_approval"), (mark("newer"), "input")] {
            let (_, answer) = newer.call_method("tools/call", call.clone()).await;
            assert_eq!(
                answer["result"]["inputRequests"][key].is_object(),
                is_asked,
                "{elicitation}: {answer}"
            );
        }
        if is_asked {
            continue;
        }
        assert_eq!(last_mark(), "null");
        let refused = newer.call("echo", json!({"text": "x"})).await;
        assert!(!approval_id(&refused).is_empty());
        let mut older = LegacyHttpClient::connect(&http_client(), &gate.url, capabilities).await;
        assert!(
            !approval_id(&older.call_method("tools/call", echo.clone()).await["result"]).is_empty()
        );
        let done = older.call_method("tools/call", mark("older")).await;
        assert_eq!(
            (&done["result"]["structuredContent"], last_mark().as_str()),
            (&json!({"done": true}), "null"),
            "{done}"
        );
        drop(older);
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_at_concurrency_limit_can_answer_and_cancel() {
    let rules = "[tools.echo]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
        [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"echo\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";
    let gate = TestGateway::open(&format!(
        "{}{rules}[gateway]\nconcurrency = 2\n{}",
        fixture_config(""),
        token_config("ann", "ann")
    ))
    .await;
    let mut headers = reqwest::header::HeaderMap::new();
    headers.insert("authorization", "Bearer ann".parse().unwrap());
    let http = reqwest::Client::builder().no_proxy().default_headers(headers).build().unwrap();
    let mut older = LegacyHttpClient::connect(&http, &gate.url, json!({"elicitation": {}})).await;
    for answers in [true, false] {
        // The call holds the only permit of this client.
        let call = older.start_request(
            "tools/call",
            &json!({"name": "echo", "arguments": {"text": answers.to_string()}}),
        );
        let question =
            older.inbox.wait_for(|message| message["method"] == "elicitation/create").await;
        let reply = match answers {
            true => {
                json!({"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept", "content": {"approve": true}}})
            }
            false => {
                json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": call}})
            }
        };
        let accepted = older.http_request(reqwest::Method::POST).json(&reply).send().await.unwrap();
        assert_eq!(accepted.status().as_u16(), 202, "{answers}");
        if answers {
            assert_eq!(older.wait_for_answer(call).await["result"]["isError"], false);
        }
        let ping = json!({"jsonrpc": "2.0", "id": format!("ping {answers}"), "method": "ping"});
        let has_permit = async || {
            let answer =
                older.http_request(reqwest::Method::POST).json(&ping).send().await.unwrap();
            let free = answer.status() == 200;
            // The permit is free only after the body is read completely.
            answer.text().await.unwrap();
            free
        };
        wait_until("the permit is free", has_permit).await;
    }
    drop(older);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn suspended_call_does_not_block_upstream_or_reload() {
    let upstream = |timeout: u8| {
        fixture_config(&format!("undeclared = \"read\"\nconcurrency = 1\ntimeout = \"{timeout}s\""))
    };
    let gate = TestGateway::open(&upstream(20)).await;
    let (tool, client) = (
        "test_input_required_result_elicitation",
        gate.client().in_session("asked").with_capabilities(json!({"elicitation": {}})),
    );
    let suspended = client.call(tool, json!({})).await;
    assert_eq!(suspended["resultType"], "input_required", "{suspended}");
    assert_eq!(
        gate.client().in_session("other").call_code("echo", json!({"text": "x"})).await,
        "ok"
    );
    // A replaced upstream finishes its running calls.
    gate.reload(&upstream(30)).await.unwrap();
    assert_eq!(
        gate.client().in_session("later").call_code("echo", json!({"text": "x"})).await,
        "ok"
    );
    let name = json!({"user_name": {"action": "accept", "content": {"name": "Ann"}}});
    let resumed = json!({"name": tool, "arguments": {}, "requestState": suspended["requestState"], "inputResponses": name});
    let answer = client.call_method("tools/call", resumed).await.1;
    assert_eq!(answer["result"]["content"][0]["text"], "Hello, Ann!", "{answer}");
    gate.shut_down().await;
}

/// Starts a server of revision 2026-07-28 that always asks again, and counts its calls.
async fn start_endless_elicitation_server(called: Arc<AtomicUsize>) -> String {
    serve_connections(move |mut stream| {
        let called = Arc::clone(&called);
        async move {
            let Some((_, request)) = read_request(&mut stream).await else { return };
            let form = json!({"message": "Who?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}});
            let response = match request["method"].as_str().unwrap_or_default() {
                "server/discover" => discover_result(&request, "asks", &json!({"tools": {}})),
                "tools/list" => {
                    modern_result(&request, json!({"tools": [{"name": "ask", "description": "Asks.", "inputSchema": {"type": "object"}}]}))
                }
                "tools/call" => {
                    called.fetch_add(1, Ordering::SeqCst);
                    let questions = json!({"who": {"method": "elicitation/create", "params": form}});
                    json_rpc_result(&request, json!({"resultType": "input_required", "inputRequests": questions}))
                }
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn suspended_call_resumes_after_upstream_is_replaced() {
    let upstream = |timeout: u8| {
        fixture_config(&format!("undeclared = \"read\"\nconcurrency = 2\ntimeout = \"{timeout}s\""))
    };
    let gate = TestGateway::open(&upstream(20)).await;
    let (tool, client) = (
        "test_input_required_result_elicitation",
        gate.client().in_session("asked").with_capabilities(json!({"elicitation": {}})),
    );
    let suspended = client.call(tool, json!({})).await;
    assert_eq!(suspended["resultType"], "input_required", "{suspended}");
    let slow = gate.client().in_session("slow");
    let slow = tokio::spawn(async move { slow.call_code("sleep", json!({"ms": 12_000})).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    gate.reload(&upstream(30)).await.unwrap();
    // By now the replaced upstream waits for its calls.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let name = json!({"user_name": {"action": "accept", "content": {"name": "Ann"}}});
    let resumed = json!({"name": tool, "arguments": {}, "requestState": suspended["requestState"], "inputResponses": name});
    let answer = client.call_method("tools/call", resumed).await.1;
    assert_eq!(answer["result"]["content"][0]["text"], "Hello, Ann!", "{answer}");
    assert!(!slow.is_finished(), "the slow call has already ended");
    slow.abort();
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_elicitation_ends_after_ten_rounds() {
    let called = Arc::<AtomicUsize>::default();
    let address = start_endless_elicitation_server(Arc::clone(&called)).await;
    let gate = TestGateway::open(&format!(
        "[upstreams.a]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n"
    ))
    .await;
    let client = gate.client().in_session("s").with_capabilities(json!({"elicitation": {}}));
    let (mut result, mut answered) = (client.call("ask", json!({})).await, 0);
    while result["resultType"] == "input_required" {
        answered += 1;
        let name = json!({"who": {"action": "accept", "content": {"name": "Ann"}}});
        let resumed = json!({"name": "ask", "arguments": {}, "requestState": result["requestState"], "inputResponses": name});
        result = client.call_method("tools/call", resumed).await.1["result"].clone();
    }
    assert_eq!(result["_meta"]["toolgate/error"]["code"], "upstream_rejected", "{result}");
    // The tenth question is not forwarded.
    assert_eq!((answered, called.load(Ordering::SeqCst)), (9, 10), "{result}");
    gate.shut_down().await;
}
