//! Tests resource metadata, CORS and metrics of the HTTP endpoints.

use reqwest::Method;
use serde_json::{Value, json};

use crate::jwt_keys::signing_key;
use crate::support::{
    ACCEPT_JSON_OR_EVENTS, CALC_TOOL_CONFIG, TestGateway, http_client, token_config,
};

#[tokio::test(flavor = "multi_thread")]
async fn unauthorized_answer_names_resource_metadata_of_path() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys.json");
    std::fs::write(&keys, json!({"keys": [signing_key("one").1]}).to_string()).unwrap();
    let (mcp, local) = ("https://gate.example/mcp", "OWN/mcp");
    let proxied = "resource = \"https://example.com/gate/mcp\"";
    for (audience, resource, path, expected_resource, called_url) in [
        (mcp, "", "/mcp", mcp, mcp),
        (mcp, "", "/mcp/support", mcp, "https://gate.example/mcp/support"),
        (mcp, "", "/mcp/support/s%2F1", mcp, "https://gate.example/mcp/support/s%2F1"),
        (mcp, "", "/v1/calls/check", mcp, mcp),
        (
            "https://gate.example:8443",
            "",
            "/mcp/support",
            "https://gate.example:8443",
            "https://gate.example:8443/mcp/support",
        ),
        // Audiences that are not URLs.
        ("api://gate", "", "/mcp", local, local),
        ("0b1f4d6e-6d0e-4c39-9a5c-0d3c3f3a7c11", "", "/mcp/support", local, "OWN/mcp/support"),
        (
            "api://gate",
            proxied,
            "/mcp",
            "https://example.com/gate/mcp",
            "https://example.com/gate/mcp",
        ),
        (
            mcp,
            proxied,
            "/mcp/support",
            "https://example.com/gate/mcp",
            "https://example.com/gate/mcp/support",
        ),
    ] {
        let jwt = format!(
            "issuer = \"https://login.example/\"\naudience = \"{audience}\"\nkeys = {}\n{resource}\n",
            json!(keys)
        );
        let gate = TestGateway::open(&format!("{CALC_TOOL_CONFIG}[gateway.jwt]\n{jwt}")).await;
        let (expected_resource, called_url) =
            (expected_resource.replace("OWN", &gate.url), called_url.replace("OWN", &gate.url));
        let refused =
            http_client().post(format!("{}{path}", gate.url)).body("{}").send().await.unwrap();
        assert_eq!(refused.status().as_u16(), 401, "{called_url}");
        // A client derives this path from the URL that it calls (RFC 9728 §3.1).
        let called = url::Url::parse(&called_url).unwrap();
        let metadata_path = format!("/.well-known/oauth-protected-resource{}", called.path());
        let challenge = refused.headers()["www-authenticate"].to_str().unwrap();
        assert_eq!(
            challenge,
            format!(
                "Bearer resource_metadata=\"{}{metadata_path}\"",
                called.origin().ascii_serialization()
            )
        );
        let fetch = async |metadata_path: &str| {
            let answer =
                http_client().get(format!("{}{metadata_path}", gate.url)).send().await.unwrap();
            (answer.status().as_u16(), answer.json::<Value>().await.unwrap())
        };
        // The token is valid for the whole resource, whatever path the client calls.
        let (status, metadata) = fetch(&metadata_path).await;
        assert_eq!((status, &metadata["resource"]), (200, &json!(expected_resource)), "{metadata}");
        assert_eq!(
            metadata["authorization_servers"],
            json!(["https://login.example/"]),
            "{metadata}"
        );
        assert_eq!(
            fetch("/.well-known/oauth-protected-resource").await.1["resource"],
            json!(expected_resource),
            "{called_url}"
        );
        // Other paths have no metadata.
        for other in ["/other", "/mcpx", "/gate", "/mcp/a/b/c", "/gate/mcp/a/b/c"] {
            let (status, metadata) =
                fetch(&format!("/.well-known/oauth-protected-resource{other}")).await;
            assert_eq!((status, metadata.get("resource")), (404, None), "{other}: {metadata}");
        }
        gate.shut_down().await;
    }
}

const ALLOW_ORIGIN_HEADER: &str = "access-control-allow-origin";

/// Returns the comma-separated names in a header, in lower case.
fn header_names(answer: &reqwest::Response, header: &str) -> Vec<String> {
    let values = answer
        .headers()
        .get_all(header)
        .iter()
        .flat_map(|value| value.to_str().unwrap().split(','));
    values.map(|name| name.trim().to_ascii_lowercase()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn cors_preflight_allows_configured_origin() {
    let token = token_config("ann", "ann-token");
    let gate = TestGateway::open(&format!(
        "{CALC_TOOL_CONFIG}[gateway]\norigins = [\"https://app.example:443\"]\n{token}"
    ))
    .await;
    let url = format!("{}/mcp", gate.url);
    let from =
        |method: Method, origin: &str| http_client().request(method, &url).header("origin", origin);
    let preflight = |origin: &str| {
        let names = "authorization,content-type,mcp-method,Mcp-Param-City, x-other, mcp-param-b@d";
        let request = from(Method::OPTIONS, origin).header("access-control-request-method", "POST");
        request.header("access-control-request-headers", names).send()
    };
    // Browsers send the preflight request without a token.
    let answer = preflight("https://app.example").await.unwrap();
    assert_eq!(
        (answer.status().as_u16(), header_names(&answer, ALLOW_ORIGIN_HEADER)),
        (204, vec!["https://app.example".to_owned()])
    );
    assert_eq!(header_names(&answer, "vary"), ["origin"]);
    assert_eq!(header_names(&answer, "access-control-allow-methods"), ["get", "post", "delete"]);
    let known = "content-type authorization accept last-event-id mcp-protocol-version mcp-session-id mcp-method mcp-name toolgate-session \
        traceparent tracestate";
    let mut expected: Vec<&str> = known.split(' ').collect();
    expected.push("mcp-param-city");
    assert_eq!(header_names(&answer, "access-control-allow-headers"), expected);
    assert!(!answer.headers().contains_key("access-control-allow-credentials"), "{answer:?}");
    // The page can read every answer, also a refusal.
    let initialize = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "page", "version": "1"}}});
    for (token, status) in [("ann-token", 200), ("unknown", 401)] {
        let request = from(Method::POST, "https://app.example")
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .bearer_auth(token);
        let answer = request.json(&initialize).send().await.unwrap();
        assert_eq!(
            (answer.status().as_u16(), header_names(&answer, ALLOW_ORIGIN_HEADER)),
            (status, vec!["https://app.example".to_owned()])
        );
        assert_eq!(
            header_names(&answer, "access-control-expose-headers"),
            ["mcp-session-id", "www-authenticate", "retry-after"]
        );
        assert!(header_names(&answer, "vary").contains(&"origin".to_owned()), "{answer:?}");
        assert_eq!(answer.headers().contains_key("mcp-session-id"), status == 200, "{answer:?}");
    }
    // Other origins are refused. A client without an origin is not affected.
    for origin in ["https://evil.example", "http://app.example", "null"] {
        for answer in [
            preflight(origin).await.unwrap(),
            from(Method::POST, origin).json(&initialize).send().await.unwrap(),
        ] {
            let open =
                answer.headers().keys().any(|name| name.as_str().starts_with("access-control-"));
            assert_eq!((answer.status().as_u16(), open), (403, false), "{origin}: {answer:?}");
        }
    }
    let answer = http_client()
        .post(&url)
        .header("accept", ACCEPT_JSON_OR_EVENTS)
        .bearer_auth("ann-token")
        .json(&initialize)
        .send()
        .await
        .unwrap();
    assert!(
        answer.status().is_success() && !answer.headers().contains_key(ALLOW_ORIGIN_HEADER),
        "{answer:?}"
    );
    let answer = from(Method::OPTIONS, "https://app.example").send().await.unwrap();
    assert_eq!(answer.status().as_u16(), 401, "OPTIONS without preflight headers: {answer:?}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_require_access_to_every_agent_and_tool() {
    let vault_tool = "[agents.vault.tools.calc]\nkind = \"builtin\"\n";
    let desk = "[agents.desk.tools.json_query]\nkind = \"builtin\"\n";
    let (root, bob) = (token_config("root", "root"), token_config("bob", "bob"));
    for (config, hidden) in [
        // The token of Bob is restricted to one agent.
        (format!("{desk}{vault_tool}{root}{bob}agents = [\"desk\"]\n"), "vault"),
        // The agent is restricted to a principal.
        (format!("{desk}[agents.vault]\nprincipals = [\"root\"]\n{vault_tool}{root}{bob}"), "calc"),
        // The tool is restricted to a principal.
        (format!("{desk}{vault_tool}visible_to = [\"root\"]\n{root}{bob}"), "calc"),
    ] {
        let gate = TestGateway::open(&config).await;
        let mut vault = gate.client().with_token("root");
        vault.url = format!("{}/mcp/vault", gate.url);
        assert_eq!(vault.call_code("calc", json!({"expression": "1"})).await, "ok");
        for (token, status) in [("root", 200), ("bob", 403)] {
            let answer = http_client()
                .get(format!("{}/metrics", gate.url))
                .bearer_auth(token)
                .send()
                .await
                .unwrap();
            assert_eq!(answer.status().as_u16(), status, "{token} {config}");
            let text = answer.text().await.unwrap();
            assert_eq!(text.contains(hidden), status == 200, "{token} {config}");
        }
        gate.shut_down().await;
    }
}

/// Returns the parts of an answer that do not depend on the call or the tool name.
fn normalize_answer(status: u16, answer: &Value, name: &str) -> (u16, String) {
    let mut answer = answer.clone();
    if let Some(result) = answer.get_mut("result").and_then(Value::as_object_mut) {
        // Each answer has its own call id.
        result.remove("_meta");
        if let Some(error) = result.get_mut("structuredContent").and_then(Value::as_object_mut) {
            error.remove("callId");
        }
        result.remove("content");
    }
    (status, answer.to_string().replace(name, "NAME"))
}

#[tokio::test(flavor = "multi_thread")]
async fn invisible_tool_is_answered_like_unknown_tool() {
    let tools = "[tools.calc]\nkind = \"builtin\"\n\
        [tools.gives]\nkind = \"command\"\ncommand = \"cat\"\neffect = \"read\"\ndescription = \"Gives.\"\nvisible_to = [\"alice\"]\n\
        input = { type = \"object\", properties = { place = { type = \"string\" } } }\n\
        output = { type = \"object\", properties = { place = { type = \"string\" } } }\n\
        [tools.finds]\nkind = \"command\"\ncommand = \"cat\"\neffect = \"read\"\ndescription = \"Finds.\"\nvisible_to = [\"alice\"]\n\
        input = { type = \"object\", properties = { place = { type = \"string\", x-mcp-header = \"Region\" } } }\n";
    let tokens = token_config("alice", "alice") + &token_config("bob", "bob");
    let gate = TestGateway::open(&format!("{tools}{tokens}")).await;
    let bob = gate.client().with_token("bob");
    assert_eq!(bob.tool_names().await, ["calc"]);
    let answer_for = async |name: &str| {
        let (status, answer) = bob
            .call_method("tools/call", json!({"name": name, "arguments": {"place": "here"}}))
            .await;
        normalize_answer(status, &answer, name)
    };
    let unknown = answer_for("qqqqq").await;
    assert!(unknown.0 == 200 && unknown.1.contains("unknown_tool"), "{unknown:?}");
    for name in ["gives", "finds"] {
        assert_eq!(answer_for(name).await, unknown, "{name}");
    }
    // The content type is equal too.
    let content_type = async |name: &str| {
        let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}});
        let params = json!({"name": name, "arguments": {"place": "here"}, "_meta": meta});
        let request = http_client()
            .post(format!("{}/mcp", gate.url))
            .bearer_auth("bob")
            .header("accept", ACCEPT_JSON_OR_EVENTS);
        let request = request
            .header("mcp-protocol-version", "2026-07-28")
            .header("mcp-method", "tools/call")
            .header("mcp-name", name);
        let response = request
            .json(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}))
            .send()
            .await
            .unwrap();
        response.headers()["content-type"].to_str().unwrap().to_owned()
    };
    assert_eq!(content_type("finds").await, content_type("qqqqq").await);
    // A caller that sees the tool gets the normal error.
    let alice = gate.client().with_token("alice");
    let (status, answer) = alice
        .call_method("tools/call", json!({"name": "finds", "arguments": {"place": "here"}}))
        .await;
    assert!(
        status == 400
            && answer["error"]["message"].as_str().unwrap().starts_with("missing Mcp-Param-Region"),
        "{answer}"
    );
    gate.shut_down().await;
}
