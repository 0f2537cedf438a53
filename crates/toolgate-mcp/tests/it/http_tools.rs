//! Tests tools that send requests to a web service.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::{TestGateway, unused_address};

/// A web service that records its requests.
struct HttpServiceFixture {
    port: u16,
    requests: Arc<Mutex<Vec<String>>>,
}

impl HttpServiceFixture {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let recorder = Arc::clone(&requests);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let recorder = Arc::clone(&recorder);
                tokio::spawn(async move {
                    let mut request = Vec::new();
                    let mut chunk = [0; 4096];
                    loop {
                        let read = stream.read(&mut chunk).await.unwrap_or(0);
                        request.extend_from_slice(&chunk[..read]);
                        let text = String::from_utf8_lossy(&request).into_owned();
                        let Some((head, body)) = text.split_once("\r\n\r\n") else {
                            if read == 0 {
                                return;
                            }
                            continue;
                        };
                        let length = head
                            .lines()
                            .find_map(|line| {
                                line.to_ascii_lowercase()
                                    .strip_prefix("content-length: ")?
                                    .parse::<usize>()
                                    .ok()
                            })
                            .unwrap_or(0);
                        if body.len() < length {
                            continue;
                        }
                        recorder.lock().unwrap().push(text.clone());
                        let path = head.split_whitespace().nth(1).unwrap_or_default().to_owned();
                        let answer = response_for(&path, port);
                        let _ = stream.write_all(answer.as_bytes()).await;
                        let _ = stream.shutdown().await;
                        return;
                    }
                });
            }
        });
        Self { port, requests }
    }

    fn recorded_requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

fn response_for(path: &str, port: u16) -> String {
    let response = |status: &str, headers: &str, body: &str| {
        format!(
            "HTTP/1.1 {status}\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )
    };
    match path.split('?').next().unwrap_or_default() {
        "/status/404" => response("404 Not Found", "", "nothing here"),
        "/status/422" => response("422 Unprocessable", "", "not today, s3cr3t-token"),
        "/status/429" => response("429 Too Many", "retry-after: 7\r\n", ""),
        "/status/403" => response("403 Forbidden", "", ""),
        "/status/503" => response("503 Unavailable", "", ""),
        "/big" => response("200 OK", "", &"x".repeat(3000)),
        "/text" => response("200 OK", "", "just words"),
        "/refused" => response(
            "200 OK",
            "",
            &json!({"isError": true, "errorCategory": "PERMISSION", "code": "paused"}).to_string(),
        ),
        "/empty" => response("204 No Content", "", ""),
        "/to-self" => response("302 Found", "location: /text\r\n", ""),
        "/to-localhost" => {
            response("302 Found", &format!("location: http://localhost:{port}/text\r\n"), "")
        }
        "/to-metadata" => {
            response("302 Found", "location: http://169.254.169.254/latest/meta-data\r\n", "")
        }
        "/to-file" => response("302 Found", "location: file:///etc/passwd\r\n", ""),
        "/round" => response("302 Found", "location: /round\r\n", ""),
        _ => response(
            "200 OK",
            "content-type: application/json\r\n",
            &json!({"path": path, "price": 1.10}).to_string(),
        ),
    }
}

/// Builds the configuration of a tool that calls the service.
fn http_tool_config(name: &str, service: &HttpServiceFixture, path: &str, extra: &str) -> String {
    format!(
        "[tools.{name}]\nkind = \"http\"\neffect = \"read\"\nnetworks = [\"127.0.0.0/8\"]\nurl = \"http://127.0.0.1:{}{path}\"\nretry = {{ times = 0 }}\n{extra}\n",
        service.port
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn arguments_fill_url_template_query_and_body() {
    let service = HttpServiceFixture::start().await;
    let input = "input = { type = \"object\", properties = { id = { type = \"string\" }, expand = { type = \"string\" }, note = { type = \"string\" }, amount = { type = \"number\" } }, required = [\"id\"] }\n";
    let config = http_tool_config(
        "get",
        &service,
        "/orders/{/id}",
        &format!(
            "{input}query = {{ expand = \"{{/expand}}\", v = \"2\" }}\nheaders = {{ x-key = \"${{PATH}}\" }}"
        ),
    ) + &http_tool_config(
        "post",
        &service,
        "/orders/{/id}",
        &format!("{input}method = \"POST\""),
    ) + &http_tool_config(
        "shaped",
        &service,
        "/pay",
        &format!(
            "{input}method = \"PUT\"\nbody = {{ order = {{ id = \"{{/id}}\", amount = \"{{/amount}}\", label = \"order {{/id}}\", note = \"{{/note}}\" }}, fixed = true }}"
        ),
    ) + &http_tool_config(
        "form",
        &service,
        "/form",
        &format!("{input}method = \"POST\"\nform = {{ id = \"{{/id}}\", note = \"{{/note}}\" }}"),
    );
    let config = config
        + &http_tool_config(
            "typed",
            &service,
            "/typed",
            &format!(
                "{input}method = \"POST\"\nheaders = {{ Content-Type = \"application/vnd.api+json\" }}"
            ),
        );
    let gate = TestGateway::open(&config).await;
    let client = gate.client();
    let result = client.call("get", json!({"id": "A/7 ?#%", "expand": "a&b=c"})).await;
    assert_eq!(
        result["structuredContent"]["path"], "/orders/A%2F7%20%3F%23%25?expand=a%26b%3Dc&v=2",
        "{result}"
    );
    client.call("get", json!({"id": "B"})).await;
    client.call("post", json!({"id": "B", "note": "n", "amount": 1.50})).await;
    client.call("shaped", json!({"id": "B", "amount": 1.50})).await;
    client.call("form", json!({"id": "B&C", "note": "ü"})).await;
    let requests = service.recorded_requests();
    assert!(
        requests[0]
            .to_ascii_lowercase()
            .contains(&format!("x-key: {}", std::env::var("PATH").unwrap().to_ascii_lowercase()))
    );
    assert!(requests[1].starts_with("GET /orders/B?v=2 "), "{}", requests[1]);
    assert!(requests[2].ends_with(r#"{"amount":1.5,"note":"n"}"#), "{}", requests[2]);
    assert!(
        requests[3]
            .ends_with(r#"{"fixed":true,"order":{"amount":1.5,"id":"B","label":"order B"}}"#),
        "{}",
        requests[3]
    );
    assert!(requests[4].ends_with("id=B%26C&note=%C3%BC"), "{}", requests[4]);
    client.call("typed", json!({"id": "B"})).await;
    // Each request has one content type, and a configured type has priority.
    for (index, kind) in [
        (2, "application/json"),
        (4, "application/x-www-form-urlencoded"),
        (5, "application/vnd.api+json"),
    ] {
        let request = service.recorded_requests()[index].to_ascii_lowercase();
        let content_types: Vec<&str> =
            request.lines().filter_map(|line| line.strip_prefix("content-type: ")).collect();
        assert_eq!(content_types, [kind], "{request}");
    }
    for (id, code) in [
        ("..", "invalid_arguments"),
        (".", "invalid_arguments"),
        ("%2e%2e", "ok"),
        ("../../admin", "ok"),
    ] {
        assert_eq!(client.call_code("get", json!({"id": id})).await, code, "{id}");
    }
    assert!(service.recorded_requests().iter().all(|request| !request.starts_with("GET /admin")));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http_statuses_map_to_error_codes() {
    let service = HttpServiceFixture::start().await;
    let mut config = String::new();
    for status in [404, 422, 429, 403, 503] {
        config += &http_tool_config(
            &format!("s{status}"),
            &service,
            &format!("/status/{status}"),
            "headers = { authorization = \"s3cr3t-token\" }",
        );
    }
    config += &http_tool_config("none", &service, "/status/404", "empty_on = [404]");
    config += &http_tool_config("big", &service, "/big", "max_response = 1000");
    config += &(http_tool_config("text", &service, "/text", "")
        + &http_tool_config("empty", &service, "/empty", ""));
    config += &http_tool_config("refused", &service, "/refused", "");
    let gate = TestGateway::open(&config).await;
    let client = gate.client();
    for (tool, code) in [
        ("s404", "upstream_invalid"),
        ("s422", "upstream_rejected"),
        ("s429", "upstream_unavailable"),
        ("s403", "upstream_forbidden"),
        ("s503", "upstream_unavailable"),
        ("none", "ok"),
        ("big", "invalid_result"),
        ("text", "ok"),
        ("empty", "ok"),
        ("refused", "ok"),
    ] {
        assert_eq!(client.call_code(tool, json!({})).await, code, "{tool}");
    }
    let refused = client.call("s422", json!({})).await;
    assert!(!refused.to_string().contains("s3cr3t"), "{refused}");
    assert!(refused.to_string().contains("not today"), "{refused}");
    // A successful response is not a refusal of toolgate.
    let result = client.call("refused", json!({})).await["structuredContent"].clone();
    assert_eq!(
        (&result["upstream"]["code"], &result["isError"], &result["code"]),
        (&json!("paused"), &Value::Null, &Value::Null),
        "{result}"
    );
    let busy = client.call("s429", json!({})).await;
    assert_eq!(busy["_meta"]["toolgate/error"]["retryAfterMs"], json!(7000), "{busy}");
    gate.shut_down().await;
}

/// The service repeats only the secret, without the scheme in front of it.
#[tokio::test(flavor = "multi_thread")]
async fn authorization_secret_is_redacted_without_its_scheme() {
    let service = HttpServiceFixture::start().await;
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("key"), "s3cr3t-token\n").unwrap();
    let mut config = http_tool_config(
        "file",
        &service,
        "/status/422",
        &format!("headers = {{ x-key = {{ file = {} }} }}", json!(home.path().join("key"))),
    );
    config += &http_tool_config(
        "word",
        &service,
        "/status/422",
        "headers = { authorization = \"Bearer s3cr3t-token\" }",
    );
    config += &http_tool_config(
        "unset",
        &service,
        "/status/422",
        "headers = { authorization = \"Bearer ${TOOLGATE_NOT_SET:-s3cr3t-token}\" }",
    );
    let gate = TestGateway::open(&config).await;
    let client = gate.client();
    for tool in ["file", "word", "unset"] {
        let refused = client.call(tool, json!({})).await.to_string();
        assert!(
            refused.contains("not today, [redacted]") && !refused.contains("s3cr3t"),
            "{tool}: {refused}"
        );
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http_tool_refuses_private_networks() {
    let service = HttpServiceFixture::start().await;
    let port = service.port;
    let tool_config = |name: &str, url: &str, extra: &str| {
        format!(
            "[tools.{name}]\nkind = \"http\"\neffect = \"read\"\nurl = \"{url}\"\nretry = {{ times = 0 }}\n{extra}\n"
        )
    };
    let config = tool_config("loopback", &format!("http://127.0.0.1:{port}/text"), "")
        + &tool_config("named", &format!("http://localhost:{port}/text"), "")
        + &tool_config("odd", &format!("http://2130706433:{port}/text"), "")
        + &tool_config("v6", &format!("http://[::ffff:127.0.0.1]:{port}/text"), "")
        + &tool_config("zero", &format!("http://0.0.0.0:{port}/text"), "")
        + &tool_config(
            "allowed",
            &format!("http://localhost:{port}/text"),
            "networks = [\"127.0.0.1\", \"::1\"]",
        )
        + &http_tool_config("to_self", &service, "/to-self", "")
        + &http_tool_config("to_localhost", &service, "/to-localhost", "")
        + &http_tool_config(
            "to_localhost_allowed",
            &service,
            "/to-localhost",
            "hosts = [\"127.0.0.1\", \"localhost\"]\nheaders = { x-key = \"k3y-for-one-host\" }",
        )
        + &http_tool_config(
            "to_metadata",
            &service,
            "/to-metadata",
            "hosts = [\"127.0.0.1\", \"169.254.169.254\"]",
        )
        + &http_tool_config("to_file", &service, "/to-file", "")
        + &http_tool_config("round", &service, "/round", "");
    let gate = TestGateway::open(&config).await;
    let client = gate.client();
    for (tool, code) in [
        ("loopback", "host_forbidden"),
        ("named", "host_forbidden"),
        ("odd", "host_forbidden"),
        ("v6", "host_forbidden"),
        ("zero", "host_forbidden"),
        ("allowed", "ok"),
        ("to_self", "ok"),
        ("to_localhost", "host_forbidden"),
        ("to_localhost_allowed", "ok"),
        ("to_metadata", "host_forbidden"),
        ("to_file", "host_forbidden"),
        ("round", "tool_failed"),
    ] {
        assert_eq!(client.call_code(tool, json!({})).await, code, "{tool}");
    }
    // Headers with secrets are not sent to another host.
    let with_key = service
        .recorded_requests()
        .iter()
        .filter(|request| request.contains("k3y-for-one-host"))
        .count();
    assert_eq!(with_key, 1);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_service_is_retryable_without_effects() {
    let (_held, address) = unused_address();
    let config = format!(
        "[tools.pay]\nkind = \"http\"\nmethod = \"POST\"\npolicy = \"open\"\nnetworks = [\"127.0.0.0/8\"]\nurl = \"http://{address}/\"\nretry = {{ times = 0 }}\n"
    );
    let gate = TestGateway::open(&config).await;
    let error: Value =
        gate.client().call("pay", json!({})).await["_meta"]["toolgate/error"].clone();
    assert_eq!(
        (error["code"].as_str(), error["effects"].as_str(), error["isRetryable"].as_bool()),
        (Some("upstream_unavailable"), Some("none"), Some(true)),
        "{error}"
    );
    gate.shut_down().await;
}
