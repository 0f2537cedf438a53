//! Who gets in, and what is turned away before it is a call.

use std::time::Duration;

use futures_util::future::join_all;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{McpTestClient, TestGateway, fixture_config};
use crate::tls_and_authentication::LegacyHttpClient;

pub(crate) const CALC_TOOL_CONFIG: &str = "[tools.calc]\nkind = \"builtin\"\n";

pub(crate) fn token_digest(token: &str) -> String {
    Sha256::digest(token.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes to the gateway as they are, and what it says to that until it hangs up.
pub(crate) async fn send_raw(gate: &TestGateway, request: &[u8]) -> String {
    let address = gate.url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(Duration::from_secs(60), stream.read_to_end(&mut answer))
        .await
        .unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

pub(crate) async fn call_calc(client: &McpTestClient) -> (u16, Value) {
    client
        .call_method("tools/call", json!({"name": "calc", "arguments": {"expression": "1+1"}}))
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_matched_by_digest() {
    let config = format!(
        "[agents.a.tools.calc]\nkind = \"builtin\"\n[agents.b.tools.calc]\nkind = \"builtin\"\n[gateway]\nagent = \"a\"\n\
         [[gateway.tokens]]\nprincipal = \"ann\"\nsha256 = \"{}\"\n[[gateway.tokens]]\nprincipal = \"bob\"\nsha256 = \"{}\"\nagents = [\"b\"]\n",
        token_digest("ann-token"),
        token_digest("bob-token").to_uppercase()
    );
    let gate = TestGateway::open(&config).await;
    let client = gate.client();
    let at = |token: &str, agent: &str| {
        let mut client = client.with_token(token);
        client.url = format!("{}/mcp/{agent}", gate.url);
        client
    };
    assert_eq!(call_calc(&client).await.0, 401);
    assert_eq!(call_calc(&client.with_token("nobody")).await.0, 401);
    assert_eq!(call_calc(&client.with_token(&token_digest("ann-token"))).await.0, 401);
    assert_eq!(call_calc(&at("ann-token", "a")).await.1["result"]["isError"], json!(false));
    assert_eq!(call_calc(&at("ann-token", "b")).await.1["result"]["isError"], json!(false));
    assert_eq!(call_calc(&at("bob-token", "b")).await.1["result"]["isError"], json!(false));
    for (token, agent) in [("bob-token", "a"), ("ann-token", "c"), ("ann-token", "toolgate-canary")]
    {
        let client = at(token, agent);
        let (_, answer) = call_calc(&client).await;
        let error = &answer["result"]["structuredContent"];
        assert_eq!(
            (&error["code"], &error["errorCategory"]),
            (&json!("forbidden"), &json!("PERMISSION")),
            "{answer}"
        );
        assert!(
            error["message"].as_str().unwrap_or_default().contains("may not act as"),
            "{answer}"
        );
        assert!(answer["result"]["_meta"]["toolgate/receipt"].is_object(), "{answer}");
        // Whoever may not call may not see either.
        let (_, answer) = client.call_method("tools/list", json!({})).await;
        assert!(
            answer["error"]["message"].as_str().unwrap_or_default().contains("may not act as"),
            "{answer}"
        );
    }
    // Each of them has its row. What an agent was called that is not there is the caller's text,
    // and opens no conversation of its own.
    let turned_away = async |agent: &str, principal: &str| {
        let rows =
            gate.gateway.runtime().session(agent, principal, "(turned away)").rows().await.unwrap();
        rows.iter()
            .map(|row| (row.gate.name().to_owned(), row.code().unwrap_or_default().to_owned()))
            .collect::<Vec<_>>()
    };
    let one = || ("admit".to_owned(), "forbidden".to_owned());
    assert_eq!(turned_away("a", "bob").await, [one()]);
    assert_eq!(turned_away("(unknown)", "ann").await, [one(), one()]);
    // Pages for those who watch: two need no token, and tell nothing.
    for (page, status) in
        [("healthz", 200), ("readyz", 200), ("metrics", 401), ("v1/calls/check", 401)]
    {
        assert_eq!(
            reqwest::get(format!("{}/{page}", gate.url)).await.unwrap().status().as_u16(),
            status,
            "{page}"
        );
    }
    assert!(gate.gateway.runtime().session("b", "bob", "x").rows().await.unwrap().is_empty());
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn error_without_agent_names_only_permitted_agents() {
    let config = format!(
        "[agents.front_desk.tools.calc]\nkind = \"builtin\"\n[agents.vault.tools.calc]\nkind = \"builtin\"\n\
         [[gateway.tokens]]\nprincipal = \"ann\"\nsha256 = \"{}\"\n[[gateway.tokens]]\nprincipal = \"bob\"\nsha256 = \"{}\"\nagents = [\"front_desk\"]\n",
        token_digest("ann-token"),
        token_digest("bob-token")
    );
    let gate = TestGateway::open(&config).await;
    for (token, learns) in [("ann-token", true), ("bob-token", false)] {
        let client = gate.client().with_token(token);
        for said in
            [client.call_method("tools/list", json!({})).await.1, call_calc(&client).await.1]
        {
            let said = said.to_string();
            assert_eq!(
                (said.contains("front_desk"), said.contains("vault")),
                (true, learns),
                "{token}: {said}"
            );
        }
    }
    gate.shut_down().await;
}

/// Keys for tokens: one to sign with, and the set that says so.
pub(crate) fn signing_key(kid: &str) -> (EncodingKey, Value) {
    // Fixed keys of P-256, made for this test.
    let (private, x, y) = match kid {
        "one" => (FIRST_KEY.0, FIRST_KEY.1, FIRST_KEY.2),
        _ => (SECOND_KEY.0, SECOND_KEY.1, SECOND_KEY.2),
    };
    let key = EncodingKey::from_ec_pem(private.as_bytes()).unwrap();
    (
        key,
        json!({"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": kid, "x": x, "y": y}),
    )
}

include!("keys.rs");

pub(crate) fn signed_jwt(kid: &str, claims: &Value) -> String {
    let mut header = Header::new(Algorithm::ES256);
    header.kid = Some(kid.to_owned());
    jsonwebtoken::encode(&header, claims, &signing_key(kid).0).unwrap()
}

pub(crate) fn base64url(bytes: &[u8]) -> String {
    const BASE64URL_ALPHABET: &[u8; 64] =
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte))
            << (8 * (3 - chunk.len()));
        for place in 0..=chunk.len() {
            text.push(char::from(BASE64URL_ALPHABET[(bits >> (18 - 6 * place) & 63) as usize]));
        }
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn altered_jwt_is_rejected() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys.json");
    std::fs::write(&keys, json!({"keys": [signing_key("one").1]}).to_string()).unwrap();
    let config = format!(
        "{CALC_TOOL_CONFIG}[gateway.jwt]\nissuer = \"https://login.example/\"\naudience = \"https://gate.example/mcp\"\nkeys = {}\nsession = \"conversation\"\nagents = \"agents\"\n",
        json!(keys)
    );
    let gate = TestGateway::open(&config).await;
    let now = toolgate::Timestamp::now().as_second();
    let good = || json!({"iss": "https://login.example/", "aud": "https://gate.example/mcp", "sub": "ann", "exp": now + 600, "agents": ["default"]});
    let but = |key: &str, value: Value| {
        let mut claims = good();
        claims[key] = value;
        claims
    };
    let client = gate.client();
    assert_eq!(
        call_calc(&client.with_token(&signed_jwt("one", &good()))).await.1["result"]["isError"],
        json!(false)
    );
    let without = |key: &str| {
        let mut claims = good();
        claims.as_object_mut().unwrap().remove(key);
        claims
    };
    let none = format!(
        "{}.{}.",
        base64url(br#"{"alg":"none","typ":"JWT"}"#),
        base64url(good().to_string().as_bytes())
    );
    let hs = {
        // The public key as a secret: the oldest trick.
        let header = Header::new(Algorithm::HS256);
        jsonwebtoken::encode(
            &header,
            &good(),
            &EncodingKey::from_secret(signing_key("one").1["x"].as_str().unwrap().as_bytes()),
        )
        .unwrap()
    };
    let mut edited = signed_jwt("one", &good());
    let middle = edited.split('.').nth(1).unwrap().to_owned();
    edited = edited.replace(&middle, &base64url(but("sub", json!("root")).to_string().as_bytes()));
    let critical = Header {
        kid: Some("one".to_owned()),
        crit: Some(vec!["exp".to_owned()]),
        ..Header::new(Algorithm::ES256)
    };
    let bad = [
        (
            "with what must be understood",
            jsonwebtoken::encode(&critical, &good(), &signing_key("one").0).unwrap(),
        ),
        ("expired", signed_jwt("one", &but("exp", json!(now - 600)))),
        ("not yet", signed_jwt("one", &but("nbf", json!(now + 600)))),
        ("for somebody else", signed_jwt("one", &but("aud", json!("https://other.example/mcp")))),
        ("from somebody else", signed_jwt("one", &but("iss", json!("https://evil.example/")))),
        ("without an end", signed_jwt("one", &without("exp"))),
        ("without an audience", signed_jwt("one", &without("aud"))),
        ("of nobody", signed_jwt("one", &without("sub"))),
        ("of the canary", signed_jwt("one", &but("sub", json!("(canary)")))),
        ("signed by another key", signed_jwt("two", &good())),
        ("not signed", none),
        ("signed with what everybody knows", hs),
        ("edited", edited),
        ("junk", "a.b.c".to_owned()),
    ];
    for (what, token) in bad {
        let (status, answer) = call_calc(&client.with_token(&token)).await;
        assert_eq!(status, 401, "{what}: {answer}");
        assert!(!answer.to_string().contains(&token), "{what}");
    }
    let (_, refused) =
        call_calc(&client.with_token(&signed_jwt("one", &but("agents", json!(["other"]))))).await;
    assert_eq!(refused["result"]["structuredContent"]["code"], json!("forbidden"), "{refused}");
    let (_, refused) = call_calc(&client.with_token(&signed_jwt("one", &without("agents")))).await;
    assert_eq!(refused["result"]["structuredContent"]["code"], json!("forbidden"), "{refused}");
    // The token names the conversation; nobody else may name another.
    let (_, refused) = call_calc(
        &client
            .with_token(&signed_jwt("one", &but("conversation", json!("c-1"))))
            .in_session("c-2"),
    )
    .await;
    assert_eq!(refused["result"]["structuredContent"]["code"], json!("forbidden"), "{refused}");
    assert_eq!(
        call_calc(&client.with_token(&signed_jwt("one", &but("conversation", json!("c-1")))))
            .await
            .1["result"]["isError"],
        json!(false)
    );
    assert_eq!(
        gate.gateway.runtime().session("default", "ann", "c-1").rows().await.unwrap().len(),
        1
    );
    // RFC 9728: where tokens are to be had.
    let answer =
        reqwest::Client::new().post(format!("{}/mcp", gate.url)).body("{}").send().await.unwrap();
    let challenge = answer.headers()["www-authenticate"].to_str().unwrap().to_owned();
    assert!(
        challenge.contains(
            "resource_metadata=\"https://gate.example/.well-known/oauth-protected-resource/mcp\""
        ),
        "{challenge}"
    );
    let metadata: Value =
        reqwest::get(format!("{}/.well-known/oauth-protected-resource", gate.url))
            .await
            .unwrap()
            .json()
            .await
            .unwrap();
    assert_eq!(
        (metadata["resource"].as_str(), metadata["authorization_servers"][0].as_str()),
        (Some("https://gate.example/mcp"), Some("https://login.example/"))
    );
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jwt_keys_are_replaced_by_reload() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys.json");
    std::fs::write(&keys, json!({"keys": [signing_key("one").1]}).to_string()).unwrap();
    let config = format!(
        "{CALC_TOOL_CONFIG}[gateway.jwt]\nissuer = \"i\"\naudience = \"a\"\nkeys = {}\n",
        json!(keys)
    );
    let gate = TestGateway::open(&config).await;
    let claims = json!({"iss": "i", "aud": "a", "sub": "ann", "exp": toolgate::Timestamp::now().as_second() + 600});
    assert_eq!(call_calc(&gate.client().with_token(&signed_jwt("two", &claims))).await.0, 401);
    std::fs::write(&keys, json!({"keys": [signing_key("two").1]}).to_string()).unwrap();
    gate.reload(&config).await.unwrap();
    assert_eq!(call_calc(&gate.client().with_token(&signed_jwt("two", &claims))).await.0, 200);
    assert_eq!(call_calc(&gate.client().with_token(&signed_jwt("one", &claims))).await.0, 401);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn public_listener_requires_token() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let error = gate.gateway.listen("0.0.0.0:0".parse().unwrap()).await.err().unwrap();
    assert!(error.to_string().contains("no token is required"), "{error}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn maximum_concurrency_setting_is_accepted() {
    let gate =
        TestGateway::open(&format!("{CALC_TOOL_CONFIG}[gateway]\nconcurrency = {}\n", i64::MAX))
            .await;
    assert_eq!(call_calc(&gate.client()).await.1["result"]["isError"], json!(false));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_hosts_and_origins_are_rejected() {
    let config = format!(
        "{CALC_TOOL_CONFIG}[gateway]\nhosts = [\"gate.example\", \"Door.Example\", \"Port.Example:81\"]\norigins = [\"https://app.example:443\"]\n"
    );
    let gate = TestGateway::open(&config).await;
    let host = gate.url.trim_start_matches("http://").to_owned();
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}, "io.modelcontextprotocol/clientCapabilities": {}});
    let list =
        json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": meta}})
            .to_string();
    let kinds = "content-type: application/json\r\naccept: application/json, text/event-stream\r\n";
    let named = "mcp-protocol-version: 2026-07-28\r\nmcp-method: tools/list\r\n";
    let post =
        (format!("POST /mcp HTTP/1.1\r\n{kinds}{named}content-length: {}\r\n", list.len()), list);
    let pages = ["/healthz", "/readyz", "/metrics", "/v1/calls/check", "/mcp", "/mcp/default/s"];
    let pages = pages.map(|path| (format!("GET {path} HTTP/1.1\r\n"), String::new()));
    let (door, wanted) = (&gate, [&pages[..], &[post]].concat());
    // Whatever is asked for.
    let ask = async |headers: &str| {
        let all = wanted
            .iter()
            .map(|(head, body)| format!("{head}{headers}connection: close\r\n\r\n{body}"));
        join_all(all.map(|request| async move {
            let answer = send_raw(door, request.as_bytes()).await;
            (
                request,
                answer.split_whitespace().nth(1).unwrap_or_default().parse::<u16>().unwrap_or(0),
            )
        }))
        .await
    };
    for (headers, is_let_in) in [
        (format!("host: {host}\r\n"), true),
        ("host: localhost\r\n".to_owned(), true),
        ("host: gate.example\r\n".to_owned(), true),
        // In names, capitals are letters like others.
        ("host: GATE.example\r\n".to_owned(), true),
        ("host: door.example\r\n".to_owned(), true),
        ("host: Door.Example:80\r\n".to_owned(), true),
        ("host: port.example:81\r\n".to_owned(), true),
        ("host: port.example:82\r\n".to_owned(), false),
        ("host: evil.example\r\n".to_owned(), false),
        ("host: 127.0.0.1.evil.example\r\n".to_owned(), false),
        (String::new(), false),
        (format!("host: {host}\r\norigin: https://app.example\r\n"), true),
        (format!("host: {host}\r\norigin: https://evil.example\r\n"), false),
        (format!("host: {host}\r\norigin: null\r\n"), false),
        (format!("host: {host}\r\norigin: http://localhost\r\n"), false),
        (format!("host: {host}\r\nhost: localhost\r\n"), false),
    ] {
        for (request, status) in ask(&headers).await {
            assert_eq!(!matches!(status, 400 | 403 | 0), is_let_in, "{request:?}: {status}");
        }
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_are_rejected() {
    let config = format!("{CALC_TOOL_CONFIG}[gateway]\nmax_request = 20000\n");
    let gate = TestGateway::open(&config).await;
    let host = gate.url.trim_start_matches("http://").to_owned();
    let head = |more: &str| {
        format!(
            "POST /mcp HTTP/1.1\r\nhost: {host}\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\nconnection: close\r\n{more}\r\n"
        )
    };
    let with = |body: &str| head(&format!("content-length: {}\r\n", body.len())) + body;
    let deep = format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{{\"name\":\"calc\",\"arguments\":{}1{}}}}}",
        "[".repeat(5000),
        "]".repeat(5000)
    );
    let twice = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"calc","arguments":{"expression":"1","expression":"2"}}}"#;
    let cases = [
        ("too large", with(&format!("{{\"a\":\"{}\"}}", "x".repeat(30_000))), "413"),
        ("too deep", with(&deep), "400"),
        ("a key twice", with(twice), "400"),
        ("no JSON", with("hello"), "400"),
        ("half a JSON", with("{\"jsonrpc\":"), "400"),
        ("packed", head("content-encoding: gzip\r\ncontent-length: 3\r\n") + "abc", "415"),
        ("two lengths", head("content-length: 3\r\ncontent-length: 4\r\n") + "abcd", "400"),
        ("odd chunks", head("transfer-encoding: xchunked\r\n") + "0\r\n\r\n", "400"),
        (
            "endless chunks",
            head("transfer-encoding: chunked\r\n")
                + &format!("{:x}\r\n{}\r\n", 30_000, "x".repeat(30_000)),
            "413",
        ),
        ("no HTTP", "hello\r\n\r\n".to_owned(), "400"),
    ];
    for (what, request, status) in cases {
        let answer = send_raw(&gate, request.as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{what}: {answer:.200}");
    }
    // It is there for others all the time.
    assert_eq!(call_calc(&gate.client()).await.0, 200);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_must_match_body() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}, "io.modelcontextprotocol/clientCapabilities": {}});
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "calc", "arguments": {"expression": "1"}, "_meta": meta}});
    for (version, method, name, status) in [
        ("2026-07-28", "tools/call", "calc", 200),
        ("2026-07-28", "tools/list", "calc", 400),
        ("2026-07-28", "tools/call", "other", 400),
        ("2025-06-18", "tools/call", "calc", 400),
    ] {
        let request = http
            .post(format!("{}/mcp", gate.url))
            .header("accept", "application/json, text/event-stream");
        let request = request
            .header("mcp-protocol-version", version)
            .header("mcp-method", method)
            .header("mcp-name", name)
            .json(&body);
        assert_eq!(
            request.send().await.unwrap().status().as_u16(),
            status,
            "{version} {method} {name}"
        );
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn legacy_session_belongs_to_its_principal() {
    let token = |principal: &str, token: &str, more: &str| {
        format!(
            "[[gateway.tokens]]\nprincipal = \"{principal}\"\nsha256 = \"{}\"\n{more}",
            token_digest(token)
        )
    };
    let others = [
        token("ann", "ann-next", ""),
        token("ann", "ann-narrow", "agents = [\"default\"]\n"),
        token("bob", "bob-token", ""),
    ];
    let later = format!("{CALC_TOOL_CONFIG}{}", others.concat());
    let gate = TestGateway::open(&format!("{later}{}", token("ann", "ann-token", ""))).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let post = |token: &str, session: Option<&str>, body: Value| {
        let mut request = http
            .post(format!("{}/mcp", gate.url))
            .header("accept", "application/json, text/event-stream")
            .bearer_auth(token)
            .json(&body);
        if let Some(session) = session {
            request = request
                .header("mcp-session-id", session)
                .header("mcp-protocol-version", "2025-06-18");
        }
        async move { request.send().await.unwrap() }
    };
    let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    let session = post("ann-token", None, hello).await.headers()["mcp-session-id"]
        .to_str()
        .unwrap()
        .to_owned();
    let list = |token: &str| json!({"jsonrpc": "2.0", "id": token, "method": "tools/list"});
    // Another token of hers that allows the same will do.
    let own = session.as_str();
    for (token, named, status) in [
        ("ann-token", own, 200),
        ("ann-next", own, 200),
        ("ann-narrow", own, 404),
        ("bob-token", own, 404),
        ("ann-token", "made-up", 404),
    ] {
        assert_eq!(
            post(token, Some(named), list(token)).await.status().as_u16(),
            status,
            "{token} {named}"
        );
    }
    // Nor can he listen to it, or end it.
    for method in [reqwest::Method::GET, reqwest::Method::DELETE] {
        let request = http
            .request(method.clone(), format!("{}/mcp", gate.url))
            .header("accept", "text/event-stream")
            .bearer_auth("bob-token");
        assert_eq!(
            request.header("mcp-session-id", &session).send().await.unwrap().status().as_u16(),
            404,
            "{method}"
        );
    }
    gate.reload(&later).await.unwrap();
    for (token, status) in [("ann-token", 401), ("ann-next", 200)] {
        assert_eq!(
            post(token, Some(&session), list(&format!("{token} again"))).await.status().as_u16(),
            status,
            "{token}"
        );
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_with_unsupported_revision_keeps_session() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("{}/mcp", gate.url);
    let accept = "application/json, text/event-stream";
    let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    let greeted = http.post(&url).header("accept", accept).json(&hello).send().await.unwrap();
    let session = greeted.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    let ended = async |version: &str| {
        let request = http
            .delete(&url)
            .header("mcp-session-id", &session)
            .header("mcp-protocol-version", version);
        request.send().await.unwrap().status().as_u16()
    };
    let listed = async || {
        let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
        let answer = http
            .post(&url)
            .header("accept", accept)
            .header("mcp-session-id", &session)
            .json(&list)
            .send()
            .await
            .unwrap();
        let status = answer.status().as_u16();
        answer.text().await.unwrap();
        status
    };
    // A revision that has no sessions, and one that nobody knows, end none.
    for (version, status) in [("2026-07-28", 405), ("1999-01-01", 400)] {
        assert_eq!((ended(version).await, listed().await), (status, 200), "{version}");
    }
    assert_eq!((ended("2025-06-18").await, listed().await), (202, 404));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn legacy_subscription_survives_token_replacement() {
    let config = |token: &str| {
        let token = format!(
            "[[gateway.tokens]]\nprincipal = \"ann\"\nsha256 = \"{}\"\n",
            token_digest(token)
        );
        fixture_config("undeclared = \"open\"") + &token
    };
    let gate = TestGateway::open(&config("ann-token")).await;
    let mut headers = reqwest::header::HeaderMap::new();
    headers.insert(reqwest::header::AUTHORIZATION, "Bearer ann-token".parse().unwrap());
    let http = reqwest::Client::builder().no_proxy().default_headers(headers).build().unwrap();
    let mut older = LegacyHttpClient::connect(&http, &gate.url, json!({})).await;
    let subscribed =
        older.call_method("resources/subscribe", json!({"uri": "test://watched-resource"})).await;
    assert!(subscribed.get("result").is_some(), "{subscribed}");
    gate.reload(&config("ann-next")).await.unwrap();
    let client = gate.client().with_token("ann-next");
    // Its upstream may not have heard yet that somebody wants to know.
    let changes = async {
        for turn in 0.. {
            assert_eq!(
                client.in_session(&format!("s{turn}")).call_code("count", json!({})).await,
                "ok"
            );
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::select! {
        _ = older.inbox.wait_for(|said| said["method"] == "notifications/resources/updated") => {}
        () = changes => {}
    }
    drop(older);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rate_limited_request_gets_retry_after() {
    let config = format!("{CALC_TOOL_CONFIG}[gateway]\nrate = {{ calls = 3, per = \"60s\" }}\n");
    let gate = TestGateway::open(&config).await;
    for _ in 0..3 {
        assert_eq!(call_calc(&gate.client()).await.0, 200);
    }
    let answer = reqwest::get(format!("{}/metrics", gate.url)).await.unwrap();
    let wait = answer
        .headers()
        .get("retry-after")
        .and_then(|wait| wait.to_str().ok()?.parse::<u64>().ok());
    assert!(
        answer.status().as_u16() == 429 && wait.is_some_and(|wait| (1..=61).contains(&wait)),
        "{answer:?}"
    );
    gate.shut_down().await;
}
