//! Who is asked, and whose answer counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::legacy_upstreams::{
    discover_result, http_response, json_rpc_result, modern_result, read_request, serve_connections,
};
use crate::security::token_digest;
use crate::support::{TestGateway, fixture_config, fixture_path, wait_until};
use crate::tls_and_authentication::{LegacyHttpClient, http_client};

const APPROVAL_RULES: &str = "[tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
    [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"count\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";

/// The approval that a refused call waits for.
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
    let question = older.inbox.wait_for(|said| said["method"] == "elicitation/create").await;
    let newer = gate.client().in_session("s").with_capabilities(json!({"elicitation": {}}));
    let asked = newer.call("count", json!({})).await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    // From here on it may destroy something.
    gate.reload(&(fixture_config("") + &APPROVAL_RULES.replace("effect = \"write\"\n", "")))
        .await
        .unwrap();
    older.send(&json!({"jsonrpc": "2.0", "id": question["id"], "result": yes}));
    let of_older = older.wait_for_answer(call).await["result"].clone();
    let answer = json!({"toolgate_approval": yes});
    let back = json!({"name": "count", "arguments": {}, "requestState": asked["requestState"], "inputResponses": answer});
    let of_newer = newer.call_method("tools/call", back).await.1["result"].clone();
    for result in [of_older, of_newer] {
        // It still waits for whoever may.
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
    let curious = format!(
        "[upstreams.ill]\ncommand = {}\nargs = [\"--ill\"]\nprefix = \"\"\nundeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}\n",
        json!(fixture_path()),
        json!(marks)
    );
    let asked = APPROVAL_RULES.replace("count", "echo").replace("\"fix\"", "\"ill\"");
    let gate = TestGateway::open(&(curious + &asked)).await;
    let echo = json!({"name": "echo", "arguments": {"text": "x"}});
    // Its upstream's question is refused, too, and it is told what became of the call.
    let mark = |key: &str| json!({"name": "mark", "arguments": {"key": key, "how": "asks"}});
    let told =
        || std::fs::read_to_string(&marks).unwrap().lines().last().unwrap_or_default().to_owned();
    for (can, is_asked) in [(json!({"url": {}}), false), (json!({"form": {}, "url": {}}), true)] {
        let capabilities = json!({"elicitation": can});
        let newer = gate
            .client()
            .in_session(&can.to_string().replace([' ', '"'], ""))
            .with_capabilities(capabilities.clone());
        for (call, key) in [(echo.clone(), "toolgate_approval"), (mark("newer"), "input")] {
            let (_, said) = newer.call_method("tools/call", call.clone()).await;
            assert_eq!(said["result"]["inputRequests"][key].is_object(), is_asked, "{can}: {said}");
        }
        if is_asked {
            continue;
        }
        assert_eq!(told(), "null");
        let refused = newer.call("echo", json!({"text": "x"})).await;
        assert!(!approval_id(&refused).is_empty());
        let mut older = LegacyHttpClient::connect(&http_client(), &gate.url, capabilities).await;
        assert!(
            !approval_id(&older.call_method("tools/call", echo.clone()).await["result"]).is_empty()
        );
        let done = older.call_method("tools/call", mark("older")).await;
        assert_eq!(
            (&done["result"]["structuredContent"], told().as_str()),
            (&json!({"done": true}), "null"),
            "{done}"
        );
        drop(older);
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_at_concurrency_limit_can_answer_and_cancel() {
    let token = |principal: &str| {
        format!(
            "[[gateway.tokens]]\nprincipal = \"{principal}\"\nsha256 = \"{}\"\n",
            token_digest(principal)
        )
    };
    let ask = "[tools.echo]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
        [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"echo\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";
    let gate = TestGateway::open(&format!(
        "{}{ask}[gateway]\nconcurrency = 2\n{}",
        fixture_config(""),
        token("ann")
    ))
    .await;
    let mut own = reqwest::header::HeaderMap::new();
    own.insert("authorization", "Bearer ann".parse().unwrap());
    let http = reqwest::Client::builder().no_proxy().default_headers(own).build().unwrap();
    let mut older = LegacyHttpClient::connect(&http, &gate.url, json!({"elicitation": {}})).await;
    for answers in [true, false] {
        // The call has the one seat that there is for somebody.
        let asked = older.start_request(
            "tools/call",
            &json!({"name": "echo", "arguments": {"text": answers.to_string()}}),
        );
        let question = older.inbox.wait_for(|said| said["method"] == "elicitation/create").await;
        let said = match answers {
            true => {
                json!({"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept", "content": {"approve": true}}})
            }
            false => {
                json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": asked}})
            }
        };
        let taken = older.http_request(reqwest::Method::POST).json(&said).send().await.unwrap();
        assert_eq!(taken.status().as_u16(), 202, "{answers}");
        if answers {
            assert_eq!(older.wait_for_answer(asked).await["result"]["isError"], false);
        }
        let ping = json!({"jsonrpc": "2.0", "id": format!("ping {answers}"), "method": "ping"});
        let pings = async || {
            let answer =
                older.http_request(reqwest::Method::POST).json(&ping).send().await.unwrap();
            let free = answer.status() == 200;
            // To its end: until then it has the seat.
            answer.text().await.unwrap();
            free
        };
        wait_until("the seat is free", pings).await;
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
    let asked = client.call(tool, json!({})).await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    assert_eq!(
        gate.client().in_session("other").call_code("echo", json!({"text": "x"})).await,
        "ok"
    );
    // Nor is it forgotten where the upstream is replaced meanwhile: what is under way ends as it
    // began.
    gate.reload(&upstream(30)).await.unwrap();
    assert_eq!(
        gate.client().in_session("later").call_code("echo", json!({"text": "x"})).await,
        "ok"
    );
    let name = json!({"user_name": {"action": "accept", "content": {"name": "Ann"}}});
    let back = json!({"name": tool, "arguments": {}, "requestState": asked["requestState"], "inputResponses": name});
    let told = client.call_method("tools/call", back).await.1;
    assert_eq!(told["result"]["content"][0]["text"], "Hello, Ann!", "{told}");
    gate.shut_down().await;
}

/// A server of 2026-07-28 that asks back without end, and counts how often it is called.
async fn start_endless_elicitation_server(called: Arc<AtomicUsize>) -> String {
    serve_connections(move |mut stream| {
        let called = Arc::clone(&called);
        async move {
            let Some((_, asked)) = read_request(&mut stream).await else { return };
            let form = json!({"message": "Who?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}});
            let said = match asked["method"].as_str().unwrap_or_default() {
                "server/discover" => discover_result(&asked, "asks", &json!({"tools": {}})),
                "tools/list" => {
                    modern_result(&asked, json!({"tools": [{"name": "ask", "description": "Asks.", "inputSchema": {"type": "object"}}]}))
                }
                "tools/call" => {
                    called.fetch_add(1, Ordering::SeqCst);
                    let questions = json!({"who": {"method": "elicitation/create", "params": form}});
                    json_rpc_result(&asked, json!({"resultType": "input_required", "inputRequests": questions}))
                }
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
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
    let asked = client.call(tool, json!({})).await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    let slow = gate.client().in_session("slow");
    let slow = tokio::spawn(async move { slow.call_code("sleep", json!({"ms": 12_000})).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    gate.reload(&upstream(30)).await.unwrap();
    // Whoever waits for all to be over is at it by now.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let name = json!({"user_name": {"action": "accept", "content": {"name": "Ann"}}});
    let back = json!({"name": tool, "arguments": {}, "requestState": asked["requestState"], "inputResponses": name});
    let told = client.call_method("tools/call", back).await.1;
    assert_eq!(told["result"]["content"][0]["text"], "Hello, Ann!", "{told}");
    assert!(!slow.is_finished(), "it was waited for");
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
    let (mut said, mut answered) = (client.call("ask", json!({})).await, 0);
    while said["resultType"] == "input_required" {
        answered += 1;
        let name = json!({"who": {"action": "accept", "content": {"name": "Ann"}}});
        let back = json!({"name": "ask", "arguments": {}, "requestState": said["requestState"], "inputResponses": name});
        said = client.call_method("tools/call", back).await.1["result"].clone();
    }
    assert_eq!(said["_meta"]["toolgate/error"]["code"], "upstream_rejected", "{said}");
    // The tenth question is not put to it.
    assert_eq!((answered, called.load(Ordering::SeqCst)), (9, 10), "{said}");
    gate.shut_down().await;
}
