//! How the gateway is called by those who do not know it yet: addresses, web pages, and who watches.

use serde_json::{Value, json};

use crate::entering::plain;
use crate::security::signer;
use crate::support::Gate;

const CALC: &str = "[tools.calc]\nkind = \"builtin\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn who_needs_a_token_is_told_where_by_the_address_that_it_calls() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys.json");
    std::fs::write(&keys, json!({"keys": [signer("one").1]}).to_string()).unwrap();
    let (mcp, own) = ("https://gate.example/mcp", "OWN/mcp");
    let behind = "resource = \"https://example.com/gate/mcp\"";
    for (audience, more, path, root, resource) in [
        (mcp, "", "/mcp", mcp, mcp),
        (mcp, "", "/mcp/support", mcp, "https://gate.example/mcp/support"),
        (mcp, "", "/mcp/support/s%2F1", mcp, "https://gate.example/mcp/support/s%2F1"),
        (mcp, "", "/v1/calls/check", mcp, mcp),
        ("https://gate.example:8443", "", "/mcp/support", "https://gate.example:8443", "https://gate.example:8443/mcp/support"),
        // Names that are no addresses.
        ("api://gate", "", "/mcp", own, own),
        ("0b1f4d6e-6d0e-4c39-9a5c-0d3c3f3a7c11", "", "/mcp/support", own, "OWN/mcp/support"),
        ("api://gate", behind, "/mcp", "https://example.com/gate/mcp", "https://example.com/gate/mcp"),
        (mcp, behind, "/mcp/support", "https://example.com/gate/mcp", "https://example.com/gate/mcp/support"),
    ] {
        let jwt = format!("issuer = \"https://login.example/\"\naudience = \"{audience}\"\nkeys = {}\n{more}\n", json!(keys));
        let gate = Gate::open(&format!("{CALC}[gateway.jwt]\n{jwt}")).await;
        let (root, resource) = (root.replace("OWN", &gate.url), resource.replace("OWN", &gate.url));
        let refused = plain().post(format!("{}{path}", gate.url)).body("{}").send().await.unwrap();
        assert_eq!(refused.status().as_u16(), 401, "{resource}");
        // As a client makes it of what it calls (RFC 9728, 3.1).
        let called = url::Url::parse(&resource).unwrap();
        let place = format!("/.well-known/oauth-protected-resource{}", called.path());
        let challenge = refused.headers()["www-authenticate"].to_str().unwrap();
        assert_eq!(challenge, format!("Bearer resource_metadata=\"{}{place}\"", called.origin().ascii_serialization()));
        let about = async |place: &str| {
            let answer = plain().get(format!("{}{place}", gate.url)).send().await.unwrap();
            (answer.status().as_u16(), answer.json::<Value>().await.unwrap())
        };
        let (status, said) = about(&place).await;
        assert_eq!((status, &said["resource"]), (200, &json!(resource)), "{said}");
        assert_eq!(said["authorization_servers"], json!(["https://login.example/"]), "{said}");
        assert_eq!(about("/.well-known/oauth-protected-resource").await.1["resource"], json!(root), "{resource}");
        // What is called otherwise is not this.
        for other in ["/other", "/mcpx", "/gate", "/mcp/a/b/c", "/gate/mcp/a/b/c"] {
            let (status, said) = about(&format!("/.well-known/oauth-protected-resource{other}")).await;
            assert_eq!((status, said.get("resource")), (404, None), "{other}: {said}");
        }
        gate.end().await;
    }
}
