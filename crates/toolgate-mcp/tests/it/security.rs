//! Tests access control of clients: tokens, sessions, hosts and malformed requests.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::legacy_http_client::LegacyHttpClient;
use crate::support::{
    ACCEPT_JSON_OR_EVENTS, CALC_TOOL_CONFIG, McpTestClient, TestGateway, fixture_config,
    http_client, token_config, token_digest,
};

/// Sends raw bytes to the gateway. Returns the response until the connection closes.
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
    let client_at = |token: &str, agent: &str| {
        let mut client = client.with_token(token);
        client.url = format!("{}/mcp/{agent}", gate.url);
        client
    };
    assert_eq!(call_calc(&client).await.0, 401);
    assert_eq!(call_calc(&client.with_token("unknown")).await.0, 401);
    assert_eq!(call_calc(&client.with_token(&token_digest("ann-token"))).await.0, 401);
    assert_eq!(call_calc(&client_at("ann-token", "a")).await.1["result"]["isError"], json!(false));
    assert_eq!(call_calc(&client_at("ann-token", "b")).await.1["result"]["isError"], json!(false));
    assert_eq!(call_calc(&client_at("bob-token", "b")).await.1["result"]["isError"], json!(false));
    for (token, agent) in [("bob-token", "a"), ("ann-token", "c"), ("ann-token", "toolgate-canary")]
    {
        let client = client_at(token, agent);
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
        // A refused token cannot list tools either.
        let (_, answer) = client.call_method("tools/list", json!({})).await;
        assert!(
            answer["error"]["message"].as_str().unwrap_or_default().contains("may not act as"),
            "{answer}"
        );
    }
    // Each refused call has its row. An unknown agent name is input of the caller, and creates no
    // session.
    let turned_away = async |agent: &str, principal: &str| {
        let rows =
            gate.gateway.runtime().session(agent, principal, "(turned away)").rows().await.unwrap();
        rows.iter()
            .map(|row| (row.gate.name().to_owned(), row.code().unwrap_or_default().to_owned()))
            .collect::<Vec<_>>()
    };
    let refusal = || ("admit".to_owned(), "forbidden".to_owned());
    assert_eq!(turned_away("a", "bob").await, [refusal()]);
    assert_eq!(turned_away("(unknown)", "ann").await, [refusal(), refusal()]);
    // The two health pages need no token, and reveal nothing.
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
    for (token, sees_vault) in [("ann-token", true), ("bob-token", false)] {
        let client = gate.client().with_token(token);
        for answer in
            [client.call_method("tools/list", json!({})).await.1, call_calc(&client).await.1]
        {
            let answer = answer.to_string();
            assert_eq!(
                (answer.contains("front_desk"), answer.contains("vault")),
                (true, sees_vault),
                "{token}: {answer}"
            );
        }
    }
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
    let content_headers =
        "content-type: application/json\r\naccept: application/json, text/event-stream\r\n";
    let mcp_headers = "mcp-protocol-version: 2026-07-28\r\nmcp-method: tools/list\r\n";
    let post = (
        format!(
            "POST /mcp HTTP/1.1\r\n{content_headers}{mcp_headers}content-length: {}\r\n",
            list.len()
        ),
        list,
    );
    let pages = ["/healthz", "/readyz", "/metrics", "/v1/calls/check", "/mcp", "/mcp/default/s"];
    let pages = pages.map(|path| (format!("GET {path} HTTP/1.1\r\n"), String::new()));
    let (gateway, requests) = (&gate, [&pages[..], &[post]].concat());
    // The check applies to all requests.
    let send = async |headers: &str| {
        let messages = requests
            .iter()
            .map(|(head, body)| format!("{head}{headers}connection: close\r\n\r\n{body}"));
        join_all(messages.map(|request| async move {
            let answer = send_raw(gateway, request.as_bytes()).await;
            (
                request,
                answer.split_whitespace().nth(1).unwrap_or_default().parse::<u16>().unwrap_or(0),
            )
        }))
        .await
    };
    for (headers, is_accepted) in [
        (format!("host: {host}\r\n"), true),
        ("host: localhost\r\n".to_owned(), true),
        ("host: gate.example\r\n".to_owned(), true),
        // Host names are not case-sensitive.
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
        for (request, status) in send(&headers).await {
            assert_eq!(!matches!(status, 400 | 403 | 0), is_accepted, "{request:?}: {status}");
        }
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_requests_are_rejected() {
    let config = format!("{CALC_TOOL_CONFIG}[gateway]\nmax_request = 20000\n");
    let gate = TestGateway::open(&config).await;
    let host = gate.url.trim_start_matches("http://").to_owned();
    let head = |headers: &str| {
        format!(
            "POST /mcp HTTP/1.1\r\nhost: {host}\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\nconnection: close\r\n{headers}\r\n"
        )
    };
    let request = |body: &str| head(&format!("content-length: {}\r\n", body.len())) + body;
    let deep = format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{{\"name\":\"calc\",\"arguments\":{}1{}}}}}",
        "[".repeat(5000),
        "]".repeat(5000)
    );
    let twice = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"calc","arguments":{"expression":"1","expression":"2"}}}"#;
    let cases = [
        ("too large", request(&format!("{{\"a\":\"{}\"}}", "x".repeat(30_000))), "413"),
        ("too deep", request(&deep), "400"),
        ("a key twice", request(twice), "400"),
        ("no JSON", request("hello"), "400"),
        ("half a JSON", request("{\"jsonrpc\":"), "400"),
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
    for (name, request, status) in cases {
        let answer = send_raw(&gate, request.as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{name}: {answer:.200}");
    }
    // The gateway still serves other clients.
    assert_eq!(call_calc(&gate.client()).await.0, 200);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_must_match_body() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let http = http_client();
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}, "io.modelcontextprotocol/clientCapabilities": {}});
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "calc", "arguments": {"expression": "1"}, "_meta": meta}});
    for (version, method, name, status) in [
        ("2026-07-28", "tools/call", "calc", 200),
        ("2026-07-28", "tools/list", "calc", 400),
        ("2026-07-28", "tools/call", "other", 400),
        ("2025-06-18", "tools/call", "calc", 400),
    ] {
        let request =
            http.post(format!("{}/mcp", gate.url)).header("accept", ACCEPT_JSON_OR_EVENTS);
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
    let narrow_token = token_config("ann", "ann-narrow") + "agents = [\"default\"]\n";
    let remaining = [
        CALC_TOOL_CONFIG.to_owned(),
        token_config("ann", "ann-next"),
        narrow_token,
        token_config("bob", "bob-token"),
    ]
    .concat();
    let gate = TestGateway::open(&format!("{remaining}{}", token_config("ann", "ann-token"))).await;
    let http = http_client();
    let post = |token: &str, session: Option<&str>, body: Value| {
        let mut request = http
            .post(format!("{}/mcp", gate.url))
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .bearer_auth(token)
            .json(&body);
        if let Some(session) = session {
            request = request
                .header("mcp-session-id", session)
                .header("mcp-protocol-version", "2025-06-18");
        }
        async move { request.send().await.unwrap() }
    };
    let initialize = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    let session = post("ann-token", None, initialize).await.headers()["mcp-session-id"]
        .to_str()
        .unwrap()
        .to_owned();
    let list = |token: &str| json!({"jsonrpc": "2.0", "id": token, "method": "tools/list"});
    // Another token of the same principal with the same permissions can use the session.
    let session_id = session.as_str();
    for (token, named, status) in [
        ("ann-token", session_id, 200),
        ("ann-next", session_id, 200),
        ("ann-narrow", session_id, 404),
        ("bob-token", session_id, 404),
        ("ann-token", "made-up", 404),
    ] {
        assert_eq!(
            post(token, Some(named), list(token)).await.status().as_u16(),
            status,
            "{token} {named}"
        );
    }
    // Bob cannot listen to the session or end it.
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
    gate.reload(&remaining).await.unwrap();
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
    let http = http_client();
    let url = format!("{}/mcp", gate.url);
    let accept = ACCEPT_JSON_OR_EVENTS;
    let initialize = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    let response = http.post(&url).header("accept", accept).json(&initialize).send().await.unwrap();
    let session = response.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    let delete = async |version: &str| {
        let request = http
            .delete(&url)
            .header("mcp-session-id", &session)
            .header("mcp-protocol-version", version);
        request.send().await.unwrap().status().as_u16()
    };
    let list_tools = async || {
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
    // A revision without sessions and an unknown revision end no session.
    for (version, status) in [("2026-07-28", 405), ("1999-01-01", 400)] {
        assert_eq!((delete(version).await, list_tools().await), (status, 200), "{version}");
    }
    assert_eq!((delete("2025-06-18").await, list_tools().await), (202, 404));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn legacy_subscription_survives_token_replacement() {
    let config =
        |token: &str| fixture_config("undeclared = \"open\"") + &token_config("ann", token);
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
    // The upstream may not have received the subscription yet, so the resource changes repeatedly.
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
        _ = older.inbox.wait_for(|message| message["method"] == "notifications/resources/updated") => {}
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
