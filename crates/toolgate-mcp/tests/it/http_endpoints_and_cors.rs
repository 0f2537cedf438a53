//! How the gateway is called by those who do not know it yet: addresses, web pages, and who
//! watches.

use reqwest::Method;
use serde_json::{Value, json};

use crate::security::{signing_key, token_digest};
use crate::support::TestGateway;
use crate::tls_and_authentication::{ACCEPT_JSON_OR_EVENTS, http_client};

const CALC_TOOL_CONFIG: &str = "[tools.calc]\nkind = \"builtin\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn unauthorized_answer_names_resource_metadata_of_path() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys.json");
    std::fs::write(&keys, json!({"keys": [signing_key("one").1]}).to_string()).unwrap();
    let (mcp, own) = ("https://gate.example/mcp", "OWN/mcp");
    let behind = "resource = \"https://example.com/gate/mcp\"";
    for (audience, more, path, root, address) in [
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
        // Names that are no addresses.
        ("api://gate", "", "/mcp", own, own),
        ("0b1f4d6e-6d0e-4c39-9a5c-0d3c3f3a7c11", "", "/mcp/support", own, "OWN/mcp/support"),
        (
            "api://gate",
            behind,
            "/mcp",
            "https://example.com/gate/mcp",
            "https://example.com/gate/mcp",
        ),
        (
            mcp,
            behind,
            "/mcp/support",
            "https://example.com/gate/mcp",
            "https://example.com/gate/mcp/support",
        ),
    ] {
        let jwt = format!(
            "issuer = \"https://login.example/\"\naudience = \"{audience}\"\nkeys = {}\n{more}\n",
            json!(keys)
        );
        let gate = TestGateway::open(&format!("{CALC_TOOL_CONFIG}[gateway.jwt]\n{jwt}")).await;
        let (root, address) = (root.replace("OWN", &gate.url), address.replace("OWN", &gate.url));
        let refused =
            http_client().post(format!("{}{path}", gate.url)).body("{}").send().await.unwrap();
        assert_eq!(refused.status().as_u16(), 401, "{address}");
        // As a client makes it of what it calls (RFC 9728, 3.1).
        let called = url::Url::parse(&address).unwrap();
        let place = format!("/.well-known/oauth-protected-resource{}", called.path());
        let challenge = refused.headers()["www-authenticate"].to_str().unwrap();
        assert_eq!(
            challenge,
            format!(
                "Bearer resource_metadata=\"{}{place}\"",
                called.origin().ascii_serialization()
            )
        );
        let about = async |place: &str| {
            let answer = http_client().get(format!("{}{place}", gate.url)).send().await.unwrap();
            (answer.status().as_u16(), answer.json::<Value>().await.unwrap())
        };
        // And a token is for the whole, whatever it is that a client calls.
        let (status, said) = about(&place).await;
        assert_eq!((status, &said["resource"]), (200, &json!(root)), "{said}");
        assert_eq!(said["authorization_servers"], json!(["https://login.example/"]), "{said}");
        assert_eq!(
            about("/.well-known/oauth-protected-resource").await.1["resource"],
            json!(root),
            "{address}"
        );
        // What is called otherwise is not this.
        for other in ["/other", "/mcpx", "/gate", "/mcp/a/b/c", "/gate/mcp/a/b/c"] {
            let (status, said) =
                about(&format!("/.well-known/oauth-protected-resource{other}")).await;
            assert_eq!((status, said.get("resource")), (404, None), "{other}: {said}");
        }
        gate.shut_down().await;
    }
}

const ALLOW_ORIGIN_HEADER: &str = "access-control-allow-origin";

/// The names in a header.
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
    let token = format!(
        "[[gateway.tokens]]\nprincipal = \"ann\"\nsha256 = \"{}\"\n",
        token_digest("ann-token")
    );
    let gate = TestGateway::open(&format!(
        "{CALC_TOOL_CONFIG}[gateway]\norigins = [\"https://app.example:443\"]\n{token}"
    ))
    .await;
    let url = format!("{}/mcp", gate.url);
    let from =
        |method: Method, origin: &str| http_client().request(method, &url).header("origin", origin);
    let preflight = |origin: &str| {
        let names = "authorization,content-type,mcp-method,Mcp-Param-City, x-other, mcp-param-b@d";
        let asked = from(Method::OPTIONS, origin).header("access-control-request-method", "POST");
        asked.header("access-control-request-headers", names).send()
    };
    // Browsers ask without a token.
    let said = preflight("https://app.example").await.unwrap();
    assert_eq!(
        (said.status().as_u16(), header_names(&said, ALLOW_ORIGIN_HEADER)),
        (204, vec!["https://app.example".to_owned()])
    );
    assert_eq!(header_names(&said, "vary"), ["origin"]);
    assert_eq!(header_names(&said, "access-control-allow-methods"), ["get", "post", "delete"]);
    let known = "content-type authorization accept last-event-id mcp-protocol-version mcp-session-id mcp-method mcp-name toolgate-session \
        traceparent tracestate";
    let mut wanted: Vec<&str> = known.split(' ').collect();
    wanted.push("mcp-param-city");
    assert_eq!(header_names(&said, "access-control-allow-headers"), wanted);
    assert!(!said.headers().contains_key("access-control-allow-credentials"), "{said:?}");
    // What comes of it is shown to that page, a refusal too.
    let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "page", "version": "1"}}});
    for (token, status) in [("ann-token", 200), ("nobody", 401)] {
        let asked = from(Method::POST, "https://app.example")
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .bearer_auth(token);
        let answer = asked.json(&hello).send().await.unwrap();
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
    // No other page sees anything, and who is no page is answered as before.
    for origin in ["https://evil.example", "http://app.example", "null"] {
        for said in [
            preflight(origin).await.unwrap(),
            from(Method::POST, origin).json(&hello).send().await.unwrap(),
        ] {
            let open =
                said.headers().keys().any(|name| name.as_str().starts_with("access-control-"));
            assert_eq!((said.status().as_u16(), open), (403, false), "{origin}: {said:?}");
        }
    }
    let said = http_client()
        .post(&url)
        .header("accept", ACCEPT_JSON_OR_EVENTS)
        .bearer_auth("ann-token")
        .json(&hello)
        .send()
        .await
        .unwrap();
    assert!(
        said.status().is_success() && !said.headers().contains_key(ALLOW_ORIGIN_HEADER),
        "{said:?}"
    );
    let said = from(Method::OPTIONS, "https://app.example").send().await.unwrap();
    assert_eq!(said.status().as_u16(), 401, "it does not ask what it may do: {said:?}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_require_token_without_agent_restriction() {
    let token = |principal: &str, more: &str| {
        format!(
            "[[gateway.tokens]]\nprincipal = \"{principal}\"\nsha256 = \"{}\"\n{more}",
            token_digest(principal)
        )
    };
    let agents = "[agents.front_desk.tools.calc]\nkind = \"builtin\"\n[agents.vault.tools.calc]\nkind = \"builtin\"\n";
    let tokens = token("operator", "") + &token("clerk", "agents = [\"front_desk\"]\n");
    let gate = TestGateway::open(&format!("{agents}{tokens}")).await;
    let mut vault = gate.client().with_token("operator");
    vault.url = format!("{}/mcp/vault", gate.url);
    assert_eq!(vault.call_code("calc", json!({"expression": "1"})).await, "ok");
    for (who, status) in [("operator", 200), ("clerk", 403)] {
        let said = http_client()
            .get(format!("{}/metrics", gate.url))
            .bearer_auth(who)
            .send()
            .await
            .unwrap();
        assert_eq!(said.status().as_u16(), status, "{who}");
        assert_eq!(said.text().await.unwrap().contains("vault"), status == 200, "{who}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_require_access_to_every_agent_and_tool() {
    let tokens: String = ["root", "bob"]
        .map(|principal| {
            format!(
                "[[gateway.tokens]]\nprincipal = \"{principal}\"\nsha256 = \"{}\"\n",
                token_digest(principal)
            )
        })
        .concat();
    let desk = "[agents.desk.tools.json_query]\nkind = \"builtin\"\n";
    for kept in [
        "[agents.vault]\nprincipals = [\"root\"]\n[agents.vault.tools.calc]\nkind = \"builtin\"\n",
        "[agents.vault.tools.calc]\nkind = \"builtin\"\nvisible_to = [\"root\"]\n",
    ] {
        let gate = TestGateway::open(&format!("{desk}{kept}{tokens}")).await;
        let mut vault = gate.client().with_token("root");
        vault.url = format!("{}/mcp/vault", gate.url);
        assert_eq!(vault.call_code("calc", json!({"expression": "1"})).await, "ok");
        for (who, status) in [("root", 200), ("bob", 403)] {
            let said = http_client()
                .get(format!("{}/metrics", gate.url))
                .bearer_auth(who)
                .send()
                .await
                .unwrap();
            assert_eq!(said.status().as_u16(), status, "{who} {kept}");
            assert_eq!(said.text().await.unwrap().contains("calc"), status == 200, "{who} {kept}");
        }
        gate.shut_down().await;
    }
}

/// What tells one answer from another, but for the name that was asked for.
fn normalize_answer(status: u16, answer: &Value, name: &str) -> (u16, String) {
    let mut answer = answer.clone();
    if let Some(result) = answer.get_mut("result").and_then(Value::as_object_mut) {
        // Both are of one call each.
        result.remove("_meta");
        if let Some(told) = result.get_mut("structuredContent").and_then(Value::as_object_mut) {
            told.remove("callId");
        }
        result.remove("content");
    }
    (status, answer.to_string().replace(name, "NAME"))
}

#[tokio::test(flavor = "multi_thread")]
async fn invisible_tool_is_answered_like_unknown_tool() {
    let token = |principal: &str| {
        format!(
            "[[gateway.tokens]]\nprincipal = \"{principal}\"\nsha256 = \"{}\"\n",
            token_digest(principal)
        )
    };
    let tools = "[tools.calc]\nkind = \"builtin\"\n\
        [tools.gives]\nkind = \"command\"\ncommand = \"cat\"\neffect = \"read\"\ndescription = \"Gives.\"\nvisible_to = [\"alice\"]\n\
        input = { type = \"object\", properties = { place = { type = \"string\" } } }\n\
        output = { type = \"object\", properties = { place = { type = \"string\" } } }\n\
        [tools.finds]\nkind = \"command\"\ncommand = \"cat\"\neffect = \"read\"\ndescription = \"Finds.\"\nvisible_to = [\"alice\"]\n\
        input = { type = \"object\", properties = { place = { type = \"string\", x-mcp-header = \"Region\" } } }\n";
    let gate = TestGateway::open(&format!("{tools}{}{}", token("alice"), token("bob"))).await;
    let bob = gate.client().with_token("bob");
    assert_eq!(bob.tool_names().await, ["calc"]);
    let asked = async |name: &str| {
        let (status, answer) = bob
            .call_method("tools/call", json!({"name": name, "arguments": {"place": "here"}}))
            .await;
        normalize_answer(status, &answer, name)
    };
    let nowhere = asked("qqqqq").await;
    assert!(nowhere.0 == 200 && nowhere.1.contains("unknown_tool"), "{nowhere:?}");
    for name in ["gives", "finds"] {
        assert_eq!(asked(name).await, nowhere, "{name}");
    }
    // Nor by the kind of the answer.
    let kind = async |name: &str| {
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
        let said = request
            .json(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}))
            .send()
            .await
            .unwrap();
        said.headers()["content-type"].to_str().unwrap().to_owned()
    };
    assert_eq!(kind("finds").await, kind("qqqqq").await);
    // Who sees it is told as before.
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
