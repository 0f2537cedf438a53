//! Tokens by client credentials from an issuer that says itself where it gives them.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::old::{about, answer, listen, result};
use crate::support::Gate;

/// What the issuer gives.
const TOKEN: &str = "token-of-the-issuer";

/// One request: its head, and its body as it came.
async fn request(stream: &mut TcpStream) -> Option<(String, String)> {
    let (mut text, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let Ok(n @ 1..) = stream.read(&mut chunk).await else { return None };
        text.extend_from_slice(&chunk[..n]);
        let Some((head, body)) = std::str::from_utf8(&text).unwrap().split_once("\r\n\r\n") else { continue };
        let head = head.to_ascii_lowercase();
        let length: usize = head.lines().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |n| n.trim().parse().unwrap());
        if body.len() >= length {
            return Some((head, body.to_owned()));
        }
    }
}

/// What an upstream and an issuer at one address say of themselves: `OWN` stands for that address.
#[derive(Clone)]
struct Says {
    resource: Option<Value>,
    issuer: Value,
    challenge: &'static str,
}

/// An upstream that wants a token, and the issuer of it.
async fn serve(says: Says, asked_for: Arc<Mutex<Vec<(String, String)>>>) -> String {
    let own: Arc<Mutex<String>> = Arc::default();
    let known = Arc::clone(&own);
    let address = listen(move |mut stream| {
        let (says, asked_for, own) = (says.clone(), Arc::clone(&asked_for), known.lock().unwrap().clone());
        async move {
            let Some((head, body)) = request(&mut stream).await else { return };
            let message: Value = serde_json::from_str(&body).unwrap_or_default();
            let about_itself = |said: &Value| answer("200 OK", "application/json", &said.to_string().replace("OWN", &own));
            let path = head.split_whitespace().nth(1).unwrap_or_default().to_owned();
            let said = match (path.as_str(), message["method"].as_str().unwrap_or_default()) {
                ("/.well-known/oauth-protected-resource/mcp", _) => match &says.resource {
                    Some(resource) => about_itself(resource),
                    None => answer("404 No", "text/plain", ""),
                },
                ("/.well-known/oauth-authorization-server/tenant", _) => about_itself(&says.issuer),
                ("/token", _) => {
                    asked_for.lock().unwrap().push((head, body));
                    answer("200 OK", "application/json", &json!({"access_token": TOKEN, "token_type": "Bearer"}).to_string())
                }
                ("/mcp", _) if !head.contains(&format!("authorization: bearer {TOKEN}")) => {
                    let challenge = says.challenge.replace("OWN", &own);
                    format!("HTTP/1.1 401 No\r\nconnection: close\r\nwww-authenticate: {challenge}\r\ncontent-length: 0\r\n\r\n")
                }
                ("/mcp", "server/discover") => answer("404 No", "text/html", "<p>"),
                ("/mcp", "initialize") => result(&message, about()),
                ("/mcp", "tools/list") => {
                    result(&message, json!({"tools": [{"name": "talk", "description": "Talks.", "inputSchema": {"type": "object"}}]}))
                }
                ("/mcp", "tools/call") => match message["params"]["arguments"]["how"].as_str() {
                    Some("fails") => {
                        let said = format!("`Bearer {TOKEN}` is not enough");
                        result(&message, json!({"isError": true, "content": [{"type": "text", "text": said}]}))
                    }
                    Some("breaks") => {
                        let said = json!({"code": -32000, "message": "no", "data": {"headers": [TOKEN]}});
                        answer("200 OK", "application/json", &json!({"jsonrpc": "2.0", "id": message["id"], "error": said}).to_string())
                    }
                    _ => result(&message, json!({"content": [{"type": "text", "text": "done"}]})),
                },
                ("/mcp", "ping") => result(&message, json!({})),
                ("/mcp", "") if head.starts_with("get ") => answer("405 No", "text/plain", ""),
                ("/mcp", _) => answer("202 Accepted", "text/plain", ""),
                _ => answer("404 No", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
        }
    })
    .await;
    *own.lock().unwrap() = format!("http://{address}");
    format!("http://{address}")
}

fn says() -> Says {
    Says {
        resource: Some(json!({"resource": "OWN/mcp", "authorization_servers": ["OWN/tenant"], "scopes_supported": ["a", "b"]})),
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
async fn an_issuer_says_where_it_gives_tokens_and_hears_for_whom() {
    let basic = "authorization: basic bwu6czncm3qtb2ytbwluzq==";
    let by_form = Says {
        issuer: json!({"issuer": "OWN/tenant", "token_endpoint": "OWN/token", "token_endpoint_auth_methods_supported": ["client_secret_post"]}),
        ..says()
    };
    let silent = Says { resource: None, ..says() };
    let narrow = Says { challenge: "Bearer scope=\"only this\", resource_metadata=\"http://evil.example/x\"", ..says() };
    for (name, says, more, head, scope, form) in [
        ("as usual", says(), "", Some(basic), Some("scope=a+b"), None),
        ("said here", says(), ", scope = \"mine\"", Some(basic), Some("scope=mine"), None),
        ("said in the refusal", narrow, "", Some(basic), Some("scope=only+this"), None),
        ("in the form", by_form, "", None, Some("scope=a+b"), Some("client_secret=s3cr3t-of-mine")),
        ("it says nothing of itself", silent, "", Some(basic), None, None),
    ] {
        let asked_for: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
        let own = serve(says, Arc::clone(&asked_for)).await;
        let gate = Gate::open(&config(&own, more)).await;
        assert_eq!(gate.client().code("far_talk", json!({})).await, "ok", "{name}");
        gate.end().await;
        let (said, body) = asked_for.lock().unwrap()[0].clone();
        let resource = format!("resource={}", url::form_urlencoded::byte_serialize(format!("{own}/mcp").as_bytes()).collect::<String>());
        assert!(body.contains("grant_type=client_credentials") && body.contains(&resource), "{name}: {body}");
        assert_eq!(body.contains("scope="), scope.is_some(), "{name}: {body}");
        assert!(scope.is_none_or(|scope| body.contains(scope)), "{name}: {body}");
        assert_eq!(body.contains("client_secret="), form.is_some(), "{name}: {body}");
        assert!(form.is_none_or(|form| body.contains(form)), "{name}: {body}");
        assert_eq!(said.contains("authorization: basic"), head.is_some(), "{name}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_was_fetched_is_not_told_by_who_fails() {
    let own = serve(says(), Arc::default()).await;
    let gate = Gate::open(&config(&own, "")).await;
    for how in ["fails", "breaks"] {
        let said = gate.client().in_session(how).call("far_talk", json!({"how": how})).await;
        let upstream = said["_meta"]["toolgate/error"]["upstream"].to_string();
        assert!(upstream.contains("[redacted]") && !said.to_string().contains(TOKEN), "{said}");
        let rows = gate.gateway.runtime().session("default", "local", how).rows().await.unwrap();
        assert_eq!(rows.len(), 1);
        assert!(!format!("{rows:?}").contains(TOKEN), "{rows:?}");
    }
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_secret_goes_to_nobody_else() {
    let resource = |resource: &str, issuer: &str| Some(json!({"resource": resource, "authorization_servers": [issuer]}));
    let issuer = |named: &str, methods: Value| json!({"issuer": named, "token_endpoint": "OWN/token", "token_endpoint_auth_methods_supported": methods});
    let basic = json!(["client_secret_basic"]);
    for (name, says, why) in [
        ("another's name", Says { resource: resource("https://evil.example/mcp", "OWN/tenant"), ..says() }, "names another resource"),
        (
            "another's issuer",
            Says { resource: resource("OWN/mcp", "https://evil.example"), ..says() },
            "accepts tokens of `https://evil.example`",
        ),
        (
            "an issuer that is another",
            Says { issuer: issuer("https://evil.example", basic.clone()), ..says() },
            "another issuer: `https://evil.example`",
        ),
        (
            "an issuer that wants no secret",
            Says { issuer: issuer("OWN/tenant", json!(["private_key_jwt"])), ..says() },
            "does not support client secrets",
        ),
        ("an issuer that says nothing", Says { issuer: json!([]), ..says() }, "cannot find the metadata"),
    ] {
        let asked_for: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
        let own = serve(says, Arc::clone(&asked_for)).await;
        let gate = Gate::open(&config(&own, "")).await;
        let health = gate.gateway.health();
        let said = format!("{:?}", health[0].status);
        assert!(said.contains("cannot get an access token") && said.contains(why), "{name}: {said}");
        assert!(!said.contains("s3cr3t-of-mine"), "{name}: {said}");
        assert!(asked_for.lock().unwrap().is_empty(), "{name}");
        gate.end().await;
    }
}
