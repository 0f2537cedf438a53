//! Tests access tokens from an issuer whose metadata is discovered.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, serve_connections,
};
use crate::support::TestGateway;

/// The token that the issuer returns.
const ISSUED_TOKEN: &str = "token-of-the-issuer";

/// Reads one request. Returns its head in lower case, and its body.
async fn read_request(stream: &mut TcpStream) -> Option<(String, String)> {
    let (mut text, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let Ok(n @ 1..) = stream.read(&mut chunk).await else { return None };
        text.extend_from_slice(&chunk[..n]);
        let Some((head, body)) = std::str::from_utf8(&text).unwrap().split_once("\r\n\r\n") else {
            continue;
        };
        let head = head.to_ascii_lowercase();
        let length: usize = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .map_or(0, |n| n.trim().parse().unwrap());
        if body.len() >= length {
            return Some((head, body.to_owned()));
        }
    }
}

/// The metadata of an upstream and an issuer at one address. `OWN` stands for the address.
#[derive(Clone)]
struct FakeIssuerMetadata {
    resource: Option<Value>,
    issuer: Value,
    challenge: &'static str,
}

/// Starts an upstream that requires a token, and its issuer, at one address.
async fn start_issuer_and_upstream(
    metadata: FakeIssuerMetadata,
    token_requests: Arc<Mutex<Vec<(String, String)>>>,
) -> String {
    let base_url: Arc<Mutex<String>> = Arc::default();
    let shared_url = Arc::clone(&base_url);
    let address = serve_connections(move |mut stream| {
        let (metadata, token_requests, base_url) = (metadata.clone(), Arc::clone(&token_requests), shared_url.lock().unwrap().clone());
        async move {
            let Some((head, body)) = read_request(&mut stream).await else { return };
            let message: Value = serde_json::from_str(&body).unwrap_or_default();
            let metadata_response = |document: &Value| http_response("200 OK", "application/json", &document.to_string().replace("OWN", &base_url));
            let path = head.split_whitespace().nth(1).unwrap_or_default().to_owned();
            let response = match (path.as_str(), message["method"].as_str().unwrap_or_default()) {
                ("/.well-known/oauth-protected-resource/mcp", _) => match &metadata.resource {
                    Some(resource) => metadata_response(resource),
                    None => http_response("404 No", "text/plain", ""),
                },
                ("/.well-known/oauth-authorization-server/tenant", _) => metadata_response(&metadata.issuer),
                ("/token", _) => {
                    token_requests.lock().unwrap().push((head, body));
                    http_response("200 OK", "application/json", &json!({"access_token": ISSUED_TOKEN, "token_type": "Bearer"}).to_string())
                }
                ("/mcp", _) if !head.contains(&format!("authorization: bearer {ISSUED_TOKEN}")) => {
                    let challenge = metadata.challenge.replace("OWN", &base_url);
                    format!("HTTP/1.1 401 No\r\nconnection: close\r\nwww-authenticate: {challenge}\r\ncontent-length: 0\r\n\r\n")
                }
                ("/mcp", "server/discover") => http_response("404 No", "text/html", "<p>"),
                ("/mcp", "initialize") => json_rpc_result(&message, initialize_result()),
                ("/mcp", "tools/list") => json_rpc_result(
                    &message,
                    json!({"tools": [{"name": "talk", "description": "Talks.", "inputSchema": {"type": "object"}}]}),
                ),
                ("/mcp", "tools/call") => match message["params"]["arguments"]["how"].as_str() {
                    Some("fails") => {
                        let response = format!("`Bearer {ISSUED_TOKEN}` is not enough");
                        json_rpc_result(&message, json!({"isError": true, "content": [{"type": "text", "text": response}]}))
                    }
                    Some("breaks") => {
                        let response = json!({"code": -32000, "message": "no", "data": {"headers": [ISSUED_TOKEN]}});
                        http_response(
                            "200 OK",
                            "application/json",
                            &json!({"jsonrpc": "2.0", "id": message["id"], "error": response}).to_string(),
                        )
                    }
                    _ => json_rpc_result(&message, json!({"content": [{"type": "text", "text": "done"}]})),
                },
                ("/mcp", "ping") => json_rpc_result(&message, json!({})),
                ("/mcp", "") if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                ("/mcp", _) => http_response("202 Accepted", "text/plain", ""),
                _ => http_response("404 No", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await;
    *base_url.lock().unwrap() = format!("http://{address}");
    format!("http://{address}")
}

fn default_issuer_metadata() -> FakeIssuerMetadata {
    FakeIssuerMetadata {
        resource: Some(
            json!({"resource": "OWN/mcp", "authorization_servers": ["OWN/tenant"], "scopes_supported": ["a", "b"]}),
        ),
        issuer: json!({"issuer": "OWN/tenant", "token_endpoint": "OWN/token", "token_endpoint_auth_methods_supported": ["client_secret_basic"]}),
        challenge: "Bearer",
    }
}

fn config(base_url: &str, extra: &str) -> String {
    format!(
        "[upstreams.far]\nurl = \"{base_url}/mcp\"\nundeclared = \"read\"\n\
         oauth = {{ issuer = \"{base_url}/tenant\", client_id = \"me\", client_secret = \"s3cr3t-of-mine\"{extra} }}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn token_endpoint_and_scope_are_discovered() {
    let basic = "authorization: basic bwu6czncm3qtb2ytbwluzq==";
    let by_form = FakeIssuerMetadata {
        issuer: json!({"issuer": "OWN/tenant", "token_endpoint": "OWN/token", "token_endpoint_auth_methods_supported": ["client_secret_post"]}),
        ..default_issuer_metadata()
    };
    let without_metadata = FakeIssuerMetadata { resource: None, ..default_issuer_metadata() };
    let challenged = FakeIssuerMetadata {
        challenge: "Bearer scope=\"only this\", resource_metadata=\"http://evil.example/x\"",
        ..default_issuer_metadata()
    };
    for (name, metadata, extra, head, scope, form) in [
        ("defaults", default_issuer_metadata(), "", Some(basic), Some("scope=a+b"), None),
        (
            "configured scope",
            default_issuer_metadata(),
            ", scope = \"mine\"",
            Some(basic),
            Some("scope=mine"),
            None,
        ),
        ("scope in the challenge", challenged, "", Some(basic), Some("scope=only+this"), None),
        (
            "secret in the form",
            by_form,
            "",
            None,
            Some("scope=a+b"),
            Some("client_secret=s3cr3t-of-mine"),
        ),
        ("no resource metadata", without_metadata, "", Some(basic), None, None),
    ] {
        let token_requests: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
        let base_url = start_issuer_and_upstream(metadata, Arc::clone(&token_requests)).await;
        let gate = TestGateway::open(&config(&base_url, extra)).await;
        assert_eq!(gate.client().call_code("far_talk", json!({})).await, "ok", "{name}");
        gate.shut_down().await;
        let (request_head, body) = token_requests.lock().unwrap()[0].clone();
        let resource = format!(
            "resource={}",
            url::form_urlencoded::byte_serialize(format!("{base_url}/mcp").as_bytes())
                .collect::<String>()
        );
        assert!(
            body.contains("grant_type=client_credentials") && body.contains(&resource),
            "{name}: {body}"
        );
        assert_eq!(body.contains("scope="), scope.is_some(), "{name}: {body}");
        assert!(scope.is_none_or(|scope| body.contains(scope)), "{name}: {body}");
        assert_eq!(body.contains("client_secret="), form.is_some(), "{name}: {body}");
        assert!(form.is_none_or(|form| body.contains(form)), "{name}: {body}");
        assert_eq!(
            request_head.contains("authorization: basic"),
            head.is_some(),
            "{name}: {request_head}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fetched_token_is_redacted_in_failures() {
    let base_url = start_issuer_and_upstream(default_issuer_metadata(), Arc::default()).await;
    let gate = TestGateway::open(&config(&base_url, "")).await;
    for how in ["fails", "breaks"] {
        let result = gate.client().in_session(how).call("far_talk", json!({"how": how})).await;
        let upstream = result["_meta"]["toolgate/error"]["upstream"].to_string();
        assert!(
            upstream.contains("[redacted]") && !result.to_string().contains(ISSUED_TOKEN),
            "{result}"
        );
        let rows = gate.gateway.runtime().session("default", "local", how).rows().await.unwrap();
        assert_eq!(rows.len(), 1);
        assert!(!format!("{rows:?}").contains(ISSUED_TOKEN), "{rows:?}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_secret_is_sent_only_to_matching_issuer() {
    let resource = |resource: &str, issuer: &str| {
        Some(json!({"resource": resource, "authorization_servers": [issuer]}))
    };
    let issuer = |named: &str, methods: Value| json!({"issuer": named, "token_endpoint": "OWN/token", "token_endpoint_auth_methods_supported": methods});
    let basic = json!(["client_secret_basic"]);
    for (name, metadata, reason) in [
        (
            "other resource",
            FakeIssuerMetadata {
                resource: resource("https://evil.example/mcp", "OWN/tenant"),
                ..default_issuer_metadata()
            },
            "names another resource",
        ),
        (
            "other issuer in the resource metadata",
            FakeIssuerMetadata {
                resource: resource("OWN/mcp", "https://evil.example"),
                ..default_issuer_metadata()
            },
            "accepts tokens of `https://evil.example`",
        ),
        (
            "other issuer in the issuer metadata",
            FakeIssuerMetadata {
                issuer: issuer("https://evil.example", basic.clone()),
                ..default_issuer_metadata()
            },
            "another issuer: `https://evil.example`",
        ),
        (
            "no client secrets",
            FakeIssuerMetadata {
                issuer: issuer("OWN/tenant", json!(["private_key_jwt"])),
                ..default_issuer_metadata()
            },
            "does not support client secrets",
        ),
        (
            "no issuer metadata",
            FakeIssuerMetadata { issuer: json!([]), ..default_issuer_metadata() },
            "cannot find the metadata",
        ),
    ] {
        let token_requests: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
        let base_url = start_issuer_and_upstream(metadata, Arc::clone(&token_requests)).await;
        let gate = TestGateway::open(&config(&base_url, "")).await;
        let health = gate.gateway.health();
        let status = format!("{:?}", health[0].status);
        assert!(
            status.contains("cannot get an access token") && status.contains(reason),
            "{name}: {status}"
        );
        assert!(!status.contains("s3cr3t-of-mine"), "{name}: {status}");
        assert!(token_requests.lock().unwrap().is_empty(), "{name}");
        gate.shut_down().await;
    }
}
