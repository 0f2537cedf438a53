//! Tokens by client credentials from an issuer that says itself where it gives them.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, serve_connections,
};
use crate::support::TestGateway;

/// What the issuer gives.
const ISSUED_TOKEN: &str = "token-of-the-issuer";

/// One request: its head, and its body as it came.
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

/// What an upstream and an issuer at one address say of themselves: `OWN` stands for that address.
#[derive(Clone)]
struct FakeIssuerMetadata {
    resource: Option<Value>,
    issuer: Value,
    challenge: &'static str,
}

/// An upstream that wants a token, and the issuer of it.
async fn start_issuer_and_upstream(
    says: FakeIssuerMetadata,
    asked_for: Arc<Mutex<Vec<(String, String)>>>,
) -> String {
    let own: Arc<Mutex<String>> = Arc::default();
    let known = Arc::clone(&own);
    let address = serve_connections(move |mut stream| {
        let (says, asked_for, own) = (says.clone(), Arc::clone(&asked_for), known.lock().unwrap().clone());
        async move {
            let Some((head, body)) = read_request(&mut stream).await else { return };
            let message: Value = serde_json::from_str(&body).unwrap_or_default();
            let about_itself = |response: &Value| http_response("200 OK", "application/json", &response.to_string().replace("OWN", &own));
            let path = head.split_whitespace().nth(1).unwrap_or_default().to_owned();
            let response = match (path.as_str(), message["method"].as_str().unwrap_or_default()) {
                ("/.well-known/oauth-protected-resource/mcp", _) => match &says.resource {
                    Some(resource) => about_itself(resource),
                    None => http_response("404 No", "text/plain", ""),
                },
                ("/.well-known/oauth-authorization-server/tenant", _) => about_itself(&says.issuer),
                ("/token", _) => {
                    asked_for.lock().unwrap().push((head, body));
                    http_response("200 OK", "application/json", &json!({"access_token": ISSUED_TOKEN, "token_type": "Bearer"}).to_string())
                }
                ("/mcp", _) if !head.contains(&format!("authorization: bearer {ISSUED_TOKEN}")) => {
                    let challenge = says.challenge.replace("OWN", &own);
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
    *own.lock().unwrap() = format!("http://{address}");
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

fn config(own: &str, more: &str) -> String {
    format!(
        "[upstreams.far]\nurl = \"{own}/mcp\"\nundeclared = \"read\"\n\
         oauth = {{ issuer = \"{own}/tenant\", client_id = \"me\", client_secret = \"s3cr3t-of-mine\"{more} }}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn token_endpoint_and_scope_are_discovered() {
    let basic = "authorization: basic bwu6czncm3qtb2ytbwluzq==";
    let by_form = FakeIssuerMetadata {
        issuer: json!({"issuer": "OWN/tenant", "token_endpoint": "OWN/token", "token_endpoint_auth_methods_supported": ["client_secret_post"]}),
        ..default_issuer_metadata()
    };
    let silent = FakeIssuerMetadata { resource: None, ..default_issuer_metadata() };
    let narrow = FakeIssuerMetadata {
        challenge: "Bearer scope=\"only this\", resource_metadata=\"http://evil.example/x\"",
        ..default_issuer_metadata()
    };
    for (name, says, more, head, scope, form) in [
        ("as usual", default_issuer_metadata(), "", Some(basic), Some("scope=a+b"), None),
        (
            "said here",
            default_issuer_metadata(),
            ", scope = \"mine\"",
            Some(basic),
            Some("scope=mine"),
            None,
        ),
        ("said in the refusal", narrow, "", Some(basic), Some("scope=only+this"), None),
        ("in the form", by_form, "", None, Some("scope=a+b"), Some("client_secret=s3cr3t-of-mine")),
        ("it says nothing of itself", silent, "", Some(basic), None, None),
    ] {
        let asked_for: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
        let own = start_issuer_and_upstream(says, Arc::clone(&asked_for)).await;
        let gate = TestGateway::open(&config(&own, more)).await;
        assert_eq!(gate.client().call_code("far_talk", json!({})).await, "ok", "{name}");
        gate.shut_down().await;
        let (said, body) = asked_for.lock().unwrap()[0].clone();
        let resource = format!(
            "resource={}",
            url::form_urlencoded::byte_serialize(format!("{own}/mcp").as_bytes())
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
        assert_eq!(said.contains("authorization: basic"), head.is_some(), "{name}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fetched_token_is_redacted_in_failures() {
    let own = start_issuer_and_upstream(default_issuer_metadata(), Arc::default()).await;
    let gate = TestGateway::open(&config(&own, "")).await;
    for how in ["fails", "breaks"] {
        let said = gate.client().in_session(how).call("far_talk", json!({"how": how})).await;
        let upstream = said["_meta"]["toolgate/error"]["upstream"].to_string();
        assert!(
            upstream.contains("[redacted]") && !said.to_string().contains(ISSUED_TOKEN),
            "{said}"
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
    for (name, says, why) in [
        (
            "another's name",
            FakeIssuerMetadata {
                resource: resource("https://evil.example/mcp", "OWN/tenant"),
                ..default_issuer_metadata()
            },
            "names another resource",
        ),
        (
            "another's issuer",
            FakeIssuerMetadata {
                resource: resource("OWN/mcp", "https://evil.example"),
                ..default_issuer_metadata()
            },
            "accepts tokens of `https://evil.example`",
        ),
        (
            "an issuer that is another",
            FakeIssuerMetadata {
                issuer: issuer("https://evil.example", basic.clone()),
                ..default_issuer_metadata()
            },
            "another issuer: `https://evil.example`",
        ),
        (
            "an issuer that wants no secret",
            FakeIssuerMetadata {
                issuer: issuer("OWN/tenant", json!(["private_key_jwt"])),
                ..default_issuer_metadata()
            },
            "does not support client secrets",
        ),
        (
            "an issuer that says nothing",
            FakeIssuerMetadata { issuer: json!([]), ..default_issuer_metadata() },
            "cannot find the metadata",
        ),
    ] {
        let asked_for: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
        let own = start_issuer_and_upstream(says, Arc::clone(&asked_for)).await;
        let gate = TestGateway::open(&config(&own, "")).await;
        let health = gate.gateway.health();
        let said = format!("{:?}", health[0].status);
        assert!(
            said.contains("cannot get an access token") && said.contains(why),
            "{name}: {said}"
        );
        assert!(!said.contains("s3cr3t-of-mine"), "{name}: {said}");
        assert!(asked_for.lock().unwrap().is_empty(), "{name}");
        gate.shut_down().await;
    }
}
