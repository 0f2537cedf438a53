//! Tests that resources and prompts of several upstreams stay separate.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use toolgate::SessionKey;
use toolgate::store::PauseTarget;

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::stream_clients::ListenStreamClient;
use crate::support::{TestGateway, wait_until};

/// Starts a server with one prompt and one resource, which records its requests until `is_gone` is
/// set.
pub(crate) async fn start_resource_server(
    name: &'static str,
    is_gone: Arc<AtomicBool>,
    requests: Arc<Mutex<Vec<Value>>>,
) -> String {
    serve_connections(move |mut stream| {
        let (is_gone, requests) = (Arc::clone(&is_gone), Arc::clone(&requests));
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            if is_gone.load(Ordering::SeqCst) {
                return;
            }
            let mut initialized = initialize_result();
            initialized["capabilities"] = json!({"prompts": {}, "resources": {"subscribe": true}});
            requests.lock().unwrap().push(request.clone());
            let response = match request["method"].as_str().unwrap_or_default() {
                "server/discover" => http_response("404 No", "text/html", "<p>"),
                "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                "initialize" => json_rpc_result(&request, initialized),
                "ping" | "resources/subscribe" | "resources/unsubscribe" => json_rpc_result(&request, json!({})),
                "prompts/list" => json_rpc_result(&request, json!({"prompts": [{"name": "hello"}]})),
                "resources/list" => json_rpc_result(&request, json!({"resources": [{"uri": "note://a", "name": "a"}]})),
                "resources/templates/list" => {
                    json_rpc_result(&request, json!({"resourceTemplates": [{"uriTemplate": format!("{name}://{{id}}"), "name": "t"}]}))
                }
                "prompts/get" => {
                    json_rpc_result(&request, json!({"messages": [{"role": "user", "content": {"type": "text", "text": name}}]}))
                }
                "resources/read" => json_rpc_result(&request, json!({"contents": [{"uri": request["params"]["uri"], "text": name}]})),
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await
}

pub(crate) fn upstream_config(name: &str, address: &str, extra: &str) -> String {
    format!("[upstreams.{name}]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\n{extra}\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_uris_of_two_upstreams_stay_distinct() {
    let (is_gone, requests) = (Arc::<AtomicBool>::default(), Arc::default());
    let x = start_resource_server("x", Arc::clone(&is_gone), Arc::clone(&requests)).await;
    let y = start_resource_server("y", Arc::default(), Arc::default()).await;
    let gate =
        TestGateway::open(&(upstream_config("x", &x, "") + &upstream_config("y", &y, ""))).await;
    let client = gate.client().in_session("s");
    let listed = client.call_method("resources/list", json!({})).await.1;
    let names: Vec<&str> = listed["result"]["resources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|resource| resource["uri"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["toolgate://x/note://a", "toolgate://y/note://a"]);
    let templates = client.call_method("resources/templates/list", json!({})).await.1;
    assert_eq!(
        templates["result"]["resourceTemplates"][1]["uriTemplate"], "toolgate://y/y://{id}",
        "{templates}"
    );
    let read = async |uri: &str| client.call_method("resources/read", json!({"uri": uri})).await.1;
    for (uri, text) in [
        ("toolgate://x/note://a", "x"),
        ("toolgate://y/note://a", "y"),
        ("toolgate://y/other://b", "y"),
        ("x://7", "x"),
        ("y://7", "y"),
        ("toolgate://x/y://7", "x"),
    ] {
        let read = read(uri).await;
        assert_eq!(
            (&read["result"]["contents"][0]["text"], &read["result"]["contents"][0]["uri"]),
            (&json!(text), &json!(uri)),
            "{read}"
        );
    }
    for (uri, message) in [
        (
            "note://a",
            "several upstreams have `note://a`; ask for one of them: `toolgate://x/note://a`, `toolgate://y/note://a`",
        ),
        ("other://b", "unknown resource `other://b`"),
        ("toolgate://z/note://a", "unknown resource `toolgate://z/note://a`"),
        ("toolgate://x", "unknown resource `toolgate://x`"),
    ] {
        let refused = read(uri).await;
        assert_eq!(refused["error"]["message"], message, "{refused}");
    }
    let meta = json!({"own": {"a": 1}, "toolgate/receipt": "forged"});
    let answer =
        client.call_method("prompts/get", json!({"name": "x_hello", "_meta": meta})).await.1;
    assert_eq!(answer["result"]["messages"][0]["content"]["text"], "x", "{answer}");
    let seen: Vec<Value> = requests.lock().unwrap().clone();
    let seen =
        &seen.iter().find(|request| request["method"] == "prompts/get").unwrap()["params"]["_meta"];
    assert_eq!(
        (&seen["own"], &seen["toolgate/receipt"]),
        (&json!({"a": 1}), &Value::Null),
        "{seen:?}"
    );
    // A lost upstream is not replaced by another one, and does not affect the others.
    is_gone.store(true, Ordering::SeqCst);
    wait_until("the upstream is down", async || {
        read("toolgate://x/note://a").await.get("error").is_some()
    })
    .await;
    assert_eq!(read("toolgate://y/note://a").await["result"]["contents"][0]["text"], "y");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uris_are_unchanged_without_prefix() {
    let x = start_resource_server("x", Arc::default(), Arc::default()).await;
    let y = start_resource_server("y", Arc::default(), Arc::default()).await;
    let gate = TestGateway::open(
        &(upstream_config("x", &x, "prefix = \"\"") + &upstream_config("y", &y, "")),
    )
    .await;
    let client = gate.client().in_session("s");
    for (uri, text) in [
        ("note://a", Some("x")),
        ("toolgate://y/note://a", Some("y")),
        ("toolgate://x/note://a", None),
    ] {
        let read = client.call_method("resources/read", json!({"uri": uri})).await.1;
        assert_eq!(read["result"]["contents"][0]["text"].as_str(), text, "{read}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pause_also_stops_prompts_resources_and_completions() {
    let received: Arc<Mutex<Vec<Value>>> = Arc::default();
    let x = start_resource_server("x", Arc::default(), Arc::clone(&received)).await;
    let gate = TestGateway::open(&upstream_config("x", &x, "")).await;
    let runtime = gate.gateway.runtime();
    let client = gate.client().in_session("s");
    let requests = [
        ("prompts/list", json!({})),
        ("prompts/get", json!({"name": "x_hello"})),
        ("resources/list", json!({})),
        ("resources/templates/list", json!({})),
        ("resources/read", json!({"uri": "toolgate://x/note://a"})),
    ];
    for target in [
        PauseTarget::Agent("default".into()),
        PauseTarget::Principal("local".into()),
        PauseTarget::Session(SessionKey::new("default", "local", "s")),
    ] {
        runtime.pause(target.clone(), "a token is out").await.unwrap();
        let completion = json!({"ref": {"type": "ref/prompt", "name": "x_hello"}, "argument": {"name": "a", "value": ""}});
        for (method, params) in
            requests.iter().cloned().chain([("completion/complete", completion)])
        {
            let refused = client.call_method(method, params).await.1;
            let data = &refused["error"]["data"];
            assert_eq!(
                (&data["code"], &data["errorCategory"]),
                (&json!("paused"), &json!("PERMISSION")),
                "{target:?} {method}: {refused}"
            );
            assert!(
                refused["error"]["message"].as_str().unwrap().ends_with("a token is out"),
                "{refused}"
            );
        }
        runtime.unpause(target).await.unwrap();
    }
    let is_forwarded = |request: &Value| {
        request["method"] == "prompts/get" || request["method"] == "resources/read"
    };
    assert!(!received.lock().unwrap().iter().any(is_forwarded), "a request reached the upstream");
    for (method, params) in requests {
        let answer = client.call_method(method, params).await.1;
        assert!(answer.get("result").is_some(), "{method}: {answer}");
    }
    // A client with a subscription receives the error, and nothing else.
    let mut stream = ListenStreamClient::open(&gate, "", json!({"toolsListChanged": true})).await;
    assert_eq!(stream.next_message().await["method"], "notifications/subscriptions/acknowledged");
    runtime.pause(PauseTarget::Principal("local".into()), "a token is out").await.unwrap();
    gate.reload(&upstream_config("x", &x, "timeout = \"20s\"")).await.unwrap();
    let answer = stream.next_message().await;
    assert_eq!(answer["error"]["data"]["code"], "paused", "{answer}");
    gate.shut_down().await;
}
