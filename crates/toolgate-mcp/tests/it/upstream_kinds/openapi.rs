//! Tests that the OpenAPI document describes the served paths.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::{TestGateway, http_client};

/// Returns all `$ref` values of a document.
fn schema_references(value: &Value) -> Vec<String> {
    match value {
        Value::Object(map) => {
            let reference = map.get("$ref").and_then(Value::as_str).map(str::to_owned);
            reference.into_iter().chain(map.values().flat_map(schema_references)).collect()
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
    for reference in schema_references(&described) {
        assert!(
            reference.strip_prefix('#').and_then(|pointer| described.pointer(pointer)).is_some(),
            "{reference} has no target"
        );
    }
    // The answer at an unknown path lists the served paths.
    let not_found = http
        .post(format!("{}/v1/calls/else", gate.url))
        .json(&json!({}))
        .send()
        .await
        .unwrap()
        .json::<Value>()
        .await
        .unwrap();
    let served: BTreeSet<&str> = not_found["error"]
        .as_str()
        .unwrap()
        .split_whitespace()
        .filter(|word| word.starts_with("/v1/"))
        .collect();
    assert!(!served.is_empty(), "{not_found}");
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
    // The described fields are accepted, and the answers contain only described fields.
    let call = json!({"id": "1", "agent": "default", "session": "s", "tool": "pay", "arguments": {}, "turn": 1, "stopReason": "tool_use", "idempotencyKey": "k",
        "approval": "none"});
    let mut report = call.clone();
    report["result"] = json!({});
    report["error"] = json!({"message": "no", "effects": "none"});
    for (path, mut body, exclusive_field) in
        [("/v1/calls/check", call, None), ("/v1/calls/report", report, Some("error"))]
    {
        let post = &described["paths"][path]["post"];
        let request_schema = &post["requestBody"]["content"]["application/json"]["schema"];
        assert_eq!(key_set(&request_schema["properties"]), key_set(&body), "{path}");
        // A report has either a result or an error.
        if let Some(excluded) = exclusive_field {
            body.as_object_mut().unwrap().remove(excluded);
        }
        let response = http.post(format!("{}{path}", gate.url)).json(&body).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 200, "{path}");
        let answer: Value = response.json().await.unwrap();
        let response_schema = &post["responses"]["200"]["content"]["application/json"]["schema"];
        assert!(
            key_set(&answer).is_subset(&key_set(&response_schema["properties"])),
            "{path}: {answer}"
        );
        assert!(
            response_schema["required"]
                .as_array()
                .unwrap()
                .iter()
                .all(|key| answer.get(key.as_str().unwrap()).is_some()),
            "{path}: {answer}"
        );
    }
    gate.shut_down().await;
}
