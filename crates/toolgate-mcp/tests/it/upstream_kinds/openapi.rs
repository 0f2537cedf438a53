//! What a program is told of all that is served.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::TestGateway;
use crate::tls_and_authentication::http_client;

/// All that is referred to in a description.
fn schema_references(value: &Value) -> Vec<String> {
    match value {
        Value::Object(map) => {
            let own = map.get("$ref").and_then(Value::as_str).map(str::to_owned);
            own.into_iter().chain(map.values().flat_map(schema_references)).collect()
        }
        Value::Array(items) => items.iter().flat_map(schema_references).collect(),
        _ => Vec::new(),
    }
}

fn key_set(value: &Value) -> BTreeSet<&str> {
    value.as_object().unwrap_or_else(|| panic!("{value}")).keys().map(String::as_str).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn openapi_document_describes_served_paths() {
    let gate = TestGateway::open("[tools.pay]\nkind = \"client\"\npolicy = \"open\"\n").await;
    let http = http_client();
    let page =
        http.get(format!("{}/openapi.json", gate.url)).send().await.unwrap().text().await.unwrap();
    let described: Value = serde_json::from_str(&page).unwrap();
    for to in schema_references(&described) {
        assert!(
            to.strip_prefix('#').and_then(|at| described.pointer(at)).is_some(),
            "{to} leads nowhere"
        );
    }
    // Whoever asks for something else is told what there is.
    let lost = http
        .post(format!("{}/v1/calls/else", gate.url))
        .json(&json!({}))
        .send()
        .await
        .unwrap()
        .json::<Value>()
        .await
        .unwrap();
    let served: BTreeSet<&str> = lost["error"]
        .as_str()
        .unwrap()
        .split_whitespace()
        .filter(|word| word.starts_with("/v1/"))
        .collect();
    assert!(!served.is_empty(), "{lost}");
    let named: BTreeSet<&str> =
        key_set(&described["paths"]).into_iter().filter(|path| path.starts_with("/v1/")).collect();
    assert_eq!(named, served);
    for path in ["/healthz", "/readyz"] {
        let status =
            http.get(format!("{}{path}", gate.url)).send().await.unwrap().status().as_u16();
        assert!(
            described["paths"][path]["get"]["responses"][status.to_string()].is_object(),
            "{path}: {status}"
        );
    }
    // All that it names is taken, and what comes back has its names.
    let call = json!({"id": "1", "agent": "default", "session": "s", "tool": "pay", "arguments": {}, "turn": 1, "stopReason": "tool_use", "idempotencyKey": "k",
        "approval": "none"});
    let mut report = call.clone();
    report["result"] = json!({});
    report["error"] = json!({"message": "no", "effects": "none"});
    for (path, mut body, either) in
        [("/v1/calls/check", call, None), ("/v1/calls/report", report, Some("error"))]
    {
        let post = &described["paths"][path]["post"];
        let taken = &post["requestBody"]["content"]["application/json"]["schema"];
        assert_eq!(key_set(&taken["properties"]), key_set(&body), "{path}");
        // It came to one of the two.
        if let Some(other) = either {
            body.as_object_mut().unwrap().remove(other);
        }
        let answer = http.post(format!("{}{path}", gate.url)).json(&body).send().await.unwrap();
        assert_eq!(answer.status().as_u16(), 200, "{path}");
        let said: Value = answer.json().await.unwrap();
        let told = &post["responses"]["200"]["content"]["application/json"]["schema"];
        assert!(key_set(&said).is_subset(&key_set(&told["properties"])), "{path}: {said}");
        assert!(
            told["required"]
                .as_array()
                .unwrap()
                .iter()
                .all(|key| said.get(key.as_str().unwrap()).is_some()),
            "{path}: {said}"
        );
    }
    gate.shut_down().await;
}
