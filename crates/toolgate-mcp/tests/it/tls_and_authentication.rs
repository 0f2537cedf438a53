//! Tests TLS, token keys, approvals during calls, session timeouts, and upstream tokens.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use toolgate_mcp::UpstreamStatus;

use crate::jwt_keys::{FIRST_PRIVATE_KEY_PEM, signed_jwt, signing_key};
use crate::legacy_http_client::LegacyHttpClient;
use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{
    CALC_TOOL_CONFIG, McpTestClient, TestGateway, fixture_config, http_client, token_config,
    wait_until,
};

/// A self-signed certificate for `localhost`, with the first test key.
const TLS_CERTIFICATE_PEM: &str = "-----BEGIN CERTIFICATE-----\nMIIBcjCCARmgAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv\nc3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM\nCWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABGB4NuLUYrn5DA3c\ncnmyjzXA7cy59RP3TW4F6opttwYQHFMYMB326D1HjDP97WIv63LYH0qxCxgt75+k\nXeSxzH+jWjBYMAwGA1UdEwEB/wQCMAAwFAYDVR0RBA0wC4IJbG9jYWxob3N0MBMG\nA1UdJQQMMAoGCCsGAQUFBwMBMB0GA1UdDgQWBBQ4nnKCNU5WcGedtnAAh43JbM52\najAKBggqhkjOPQQDAgNHADBEAiBXOnP5MqZR+kv7h5gaFS0UldH1FXRM5jYBSx5B\npBciWQIgFT22YDFcTKL/gAdmZ+CuQfm6xYLKoPT+MrX1ugAZSXk=\n-----END CERTIFICATE-----\n";

fn result_code(result: &Value) -> &str {
    result["_meta"]["toolgate/error"]["code"].as_str().unwrap_or("ok")
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_with_certificate_serves_tls_only() {
    let home = tempfile::tempdir().unwrap();
    let (certificate, key) = (home.path().join("certificate.pem"), home.path().join("key.pem"));
    std::fs::write(&certificate, TLS_CERTIFICATE_PEM).unwrap();
    std::fs::write(&key, FIRST_PRIVATE_KEY_PEM).unwrap();
    let tls = |certificate: &Path| {
        format!(
            "{CALC_TOOL_CONFIG}[gateway.tls]\ncertificate = {}\nkey = {}\n",
            json!(certificate),
            json!(key)
        )
    };
    let gate = TestGateway::open(&tls(&certificate)).await;
    let address: SocketAddr = gate.url.trim_start_matches("http://").parse().unwrap();
    let base = format!("https://localhost:{}", address.port());
    let trusted = reqwest::Certificate::from_pem(TLS_CERTIFICATE_PEM.as_bytes()).unwrap();
    let http = reqwest::Client::builder()
        .no_proxy()
        .resolve("localhost", address)
        .tls_certs_only([trusted])
        .build()
        .unwrap();
    let mut older = LegacyHttpClient::connect(&http, &base, json!({})).await;
    let answer = older
        .call_method("tools/call", json!({"name": "calc", "arguments": {"expression": "6*7"}}))
        .await;
    assert_eq!(answer["result"]["isError"], json!(false), "{answer}");
    // The port answers no request without TLS.
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut received = Vec::new();
    let _ = tokio::time::timeout(Duration::from_secs(60), stream.read_to_end(&mut received))
        .await
        .unwrap();
    assert!(!String::from_utf8_lossy(&received).contains("HTTP"), "{received:?}");
    // A self-signed certificate is not trusted, and the status names the reason.
    let second_gate = TestGateway::open(&format!(
        "[upstreams.far]\nurl = \"{base}/mcp\"\nundeclared = \"read\"\n"
    ))
    .await;
    match second_gate.gateway.health()[0].status.clone() {
        UpstreamStatus::Down { why: reason, .. } => {
            assert!(
                reason.starts_with(&format!("cannot reach {base}: "))
                    && reason.contains("certificate"),
                "{reason}"
            );
        }
        status => panic!("{status:?}"),
    }
    second_gate.shut_down().await;
    gate.shut_down().await;
    let error = TestGateway::try_open(&tls(&home.path().join("nowhere.pem")))
        .await
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("nowhere.pem"), "{error}");
}

/// A server that publishes one key, or is unavailable.
struct TestJwksServer {
    address: String,
    key: Arc<Mutex<Option<&'static str>>>,
    requests: Arc<AtomicUsize>,
}

impl TestJwksServer {
    async fn start() -> Self {
        let (key, requests) = (Arc::new(Mutex::new(Some("one"))), Arc::new(AtomicUsize::new(0)));
        let (published, counter) = (Arc::clone(&key), Arc::clone(&requests));
        let address = serve_connections(move |mut stream| {
            let (published, counter) = (Arc::clone(&published), Arc::clone(&counter));
            async move {
                if read_request(&mut stream).await.is_none() {
                    return;
                }
                counter.fetch_add(1, Ordering::SeqCst);
                let kid: Option<&'static str> = *published.lock().unwrap();
                let response = kid.map_or_else(
                    || http_response("503 Away", "text/plain", ""),
                    |kid| {
                        let keys = json!({"keys": [signing_key(kid).1]});
                        http_response("200 OK", "application/json", &keys.to_string())
                    },
                );
                let _ = stream.write_all(response.as_bytes()).await;
            }
        })
        .await;
        Self { address, key, requests }
    }

    /// Opens a gateway that trusts the keys of this server.
    async fn open_gateway(&self) -> TestGateway {
        let keys = format!("keys = \"http://{}/keys\"", self.address);
        TestGateway::open(&format!(
            "{CALC_TOOL_CONFIG}[gateway.jwt]\nissuer = \"i\"\naudience = \"a\"\n{keys}\n"
        ))
        .await
    }

    fn request_count(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

/// The gateway fetches keys at most once in 30 s, because unknown key ids can come from hundreds of
/// clients.
#[tokio::test(flavor = "multi_thread")]
async fn unknown_key_ids_fetch_keys_once_and_keep_known_keys() {
    let (rotating, failing) = (TestJwksServer::start().await, TestJwksServer::start().await);
    let (rotating_gate, failing_gate) =
        (rotating.open_gateway().await, failing.open_gateway().await);
    let (rotating_client, failing_client) = (rotating_gate.client(), failing_gate.client());
    let is_accepted = async |client: &McpTestClient, kid: &str| {
        let claims = json!({"iss": "i", "aud": "a", "sub": "ann", "exp": toolgate::Timestamp::now().as_second() + 600});
        let client = client.with_token(&signed_jwt(kid, &claims));
        client.call_method("tools/list", json!({})).await.0 == 200
    };
    assert!(
        is_accepted(&rotating_client, "one").await && is_accepted(&failing_client, "one").await
    );
    *rotating.key.lock().unwrap() = Some("two");
    *failing.key.lock().unwrap() = None;
    assert!(!is_accepted(&rotating_client, "two").await, "keys were fetched a moment ago");
    wait_until("the new key is known", async || is_accepted(&rotating_client, "two").await).await;
    assert!(!is_accepted(&rotating_client, "one").await, "the old key is not published any more");
    assert_eq!(rotating.request_count(), 2);
    // A failed fetch removes no known key.
    wait_until("the other fetch fails", async || {
        assert!(!is_accepted(&failing_client, "two").await);
        failing.request_count() == 2
    })
    .await;
    assert!(is_accepted(&failing_client, "one").await);
    rotating_gate.shut_down().await;
    failing_gate.shut_down().await;
}

const APPROVAL_RULES: &str = "[tools.echo]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
    [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"echo\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn legacy_client_is_asked_during_its_call() {
    let gate = TestGateway::open(&(fixture_config("") + APPROVAL_RULES)).await;
    let mut older =
        LegacyHttpClient::connect(&http_client(), &gate.url, json!({"elicitation": {}})).await;
    let yes = json!({"action": "accept", "content": {"approve": true}});
    let no = json!({"action": "decline"});
    for (text, answer, expected) in [
        ("approved", &yes, "ok"),
        // The approval was for the other call, and for one use.
        ("another call", &no, "approval_denied"),
        ("approved", &no, "approval_denied"),
        (
            "accepted with false",
            &json!({"action": "accept", "content": {"approve": false}}),
            "approval_denied",
        ),
        (
            "accepted without content",
            &json!({"action": "accept", "content": {}}),
            "approval_denied",
        ),
    ] {
        let result = older.call_with_approval("echo", &json!({"text": text}), answer).await;
        assert_eq!(result_code(&result), expected, "{text}: {result}");
        assert_eq!(result["structuredContent"]["text"] == text, expected == "ok", "{result}");
    }
    // A cancelled question denies nothing.
    let cancelled = older
        .call_with_approval("echo", &json!({"text": "closed"}), &json!({"action": "cancel"}))
        .await;
    assert_eq!(result_code(&cancelled), "approval_required", "{cancelled}");
    let id = cancelled["_meta"]["toolgate/error"]["approval"]["id"].as_str().unwrap();
    assert!(gate.gateway.runtime().answer_approval(id, true, "lead").await.unwrap());
    let call = json!({"name": "echo", "arguments": {"text": "closed"}});
    assert_eq!(result_code(&older.call_method("tools/call", call.clone()).await["result"]), "ok");
    // A client without elicitation is not asked.
    let mut plain_client = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
    assert_eq!(
        result_code(&plain_client.call_method("tools/call", call).await["result"]),
        "approval_required"
    );
    drop((older, plain_client));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn default_session_ends_after_idle_timeout() {
    let config = fixture_config("")
        + "[tools.echo]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"read\"\nproves = [\"/text\"]\n[tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
           [[policy]]\nname = \"echo_first\"\nrule = \"require\"\ntools = [\"count\"]\nany_of = [\"echo\"]\nreason = \"Echo first.\"\n\
           [gateway]\nsession_idle_timeout = \"2s\"\n";
    let gate = TestGateway::open(&config).await;
    let (client, named) = (gate.client(), gate.client().in_session("named"));
    assert_eq!(client.call_code("count", json!({})).await, "prerequisite_missing");
    assert_eq!(named.call_code("echo", json!({"text": "x"})).await, "ok");
    assert_eq!(named.call_code("count", json!({})).await, "ok");
    // On a busy machine, the pause between two calls may exceed the timeout. Then both are
    // repeated.
    let mut tries = 0;
    wait_until("the second call uses the session of the first", async || {
        tries += 1;
        assert_eq!(client.call_code("echo", json!({"text": tries.to_string()})).await, "ok");
        client.call_code("count", json!({})).await == "ok"
    })
    .await;
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    assert_eq!(client.call_code("count", json!({})).await, "prerequisite_missing");
    // A named session has no idle timeout.
    assert_eq!(named.call_code("count", json!({})).await, "ok");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn default_session_stays_open_during_call() {
    let config = fixture_config("")
        + "[tools.sleep]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"read\"\n[tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
           [[policy]]\nname = \"sleep_first\"\nrule = \"require\"\ntools = [\"count\"]\nany_of = [\"sleep\"]\nreason = \"Sleep first.\"\n\
           [gateway]\nsession_idle_timeout = \"1s\"\n";
    let gate = TestGateway::open(&config).await;
    let client = gate.client();
    // On a busy machine, the second call may come too late. Then both are repeated.
    let mut code = String::new();
    for extra_ms in 0..5 {
        assert_eq!(client.call_code("sleep", json!({"ms": 1_100 + extra_ms})).await, "ok");
        code = client.call_code("count", json!({})).await;
        if code == "ok" {
            break;
        }
    }
    assert_eq!(code, "ok", "the evidence of the long call is lost");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn late_approval_is_accepted_after_idle_timeout() {
    let gate = TestGateway::open(
        &(fixture_config("") + APPROVAL_RULES + "[gateway]\nsession_idle_timeout = \"500ms\"\n"),
    )
    .await;
    let client = gate.client().with_capabilities(json!({"elicitation": {}}));
    let mut call = json!({"name": "echo", "arguments": {"text": "x"}});
    let suspended = client.call_method("tools/call", call.clone()).await.1;
    assert_eq!(suspended["result"]["resultType"], "input_required", "{suspended}");
    tokio::time::sleep(Duration::from_millis(700)).await;
    call["requestState"] = suspended["result"]["requestState"].clone();
    call["inputResponses"] =
        json!({"toolgate_approval": {"action": "accept", "content": {"approve": true}}});
    let done = client.call_method("tools/call", call).await.1;
    assert_eq!(done["result"]["structuredContent"], json!({"text": "x"}), "{done}");
    gate.shut_down().await;
}

/// Starts a server with one tool, with a legacy or a modern revision, which records the heads of
/// its requests.
///
/// A rejection repeats the head of the request.
async fn start_header_recording_server(modern: bool, heads: Arc<Mutex<Vec<String>>>) -> String {
    serve_connections(move |mut stream| {
        let heads = Arc::clone(&heads);
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            heads.lock().unwrap().push(head.clone());
            let is_locked = head.starts_with("post /locked") || request.pointer("/params/arguments/how") == Some(&json!("locked"));
            let server_info = json!({"name": "noting", "version": "1"});
            let response = match request["method"].as_str().unwrap_or_default() {
                _ if is_locked => http_response("401 No", "text/plain", &head),
                "server/discover" if modern => json_rpc_result(
                    &request,
                    json!({"resultType": "complete", "supportedVersions": ["2026-07-28"],
                    "capabilities": {"tools": {}}, "serverInfo": server_info, "ttlMs": 1000, "cacheScope": "private",
                    "_meta": {"io.modelcontextprotocol/serverInfo": server_info}}),
                ),
                "server/discover" => http_response("404 No", "text/html", "<p>"),
                "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                "initialize" => json_rpc_result(&request, initialize_result()),
                "tools/list" => json_rpc_result(
                    &request,
                    json!({"resultType": "complete", "ttlMs": 1000, "cacheScope": "private",
                    "tools": [{"name": "talk", "description": "Talks.", "inputSchema": {"type": "object"}}]}),
                ),
                "tools/call" => json_rpc_result(&request, json!({"resultType": "complete", "content": [{"type": "text", "text": "done"}]})),
                "ping" => json_rpc_result(&request, json!({})),
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_token_is_sent_only_to_its_upstream() {
    let (secret, client_token) = ("alpha-token-1", "entry-token-2");
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("key"), format!("{secret}\n")).unwrap();
    let bearer = format!("bearer = {{ file = {} }}\n", json!(home.path().join("key")));
    for modern in [false, true] {
        let (authorized, plain) =
            (Arc::<Mutex<Vec<String>>>::default(), Arc::<Mutex<Vec<String>>>::default());
        let (a, b) = (
            start_header_recording_server(modern, Arc::clone(&authorized)).await,
            start_header_recording_server(modern, Arc::clone(&plain)).await,
        );
        let gate = TestGateway::open(&format!(
            "[upstreams.a]\nurl = \"http://{a}/mcp\"\nundeclared = \"read\"\n{bearer}[upstreams.b]\nurl = \"http://{b}/mcp\"\nundeclared = \"read\"\n\
             [upstreams.c]\nurl = \"http://{a}/locked\"\nundeclared = \"read\"\n{bearer}{}",
            token_config("ann", client_token)
        ))
        .await;
        let client = gate.client().with_token(client_token).in_session("s");
        for tool in ["a_talk", "b_talk"] {
            assert_eq!(
                client.call_code(tool, json!({"how": "open"})).await,
                "ok",
                "{modern} {tool}"
            );
        }
        let refused = client.call("a_talk", json!({"how": "locked"})).await;
        assert_eq!(result_code(&refused), "upstream_forbidden", "{refused}");
        let health = serde_json::to_string(&gate.gateway.health()).unwrap();
        assert!(health.contains("HTTP 401"), "{health}");
        let (authorized, plain) =
            (authorized.lock().unwrap().clone(), plain.lock().unwrap().clone());
        assert!(
            authorized.iter().all(|head| head.contains(&format!("authorization: bearer {secret}"))),
            "{authorized:?}"
        );
        assert!(
            !plain.is_empty() && plain.iter().all(|head| !head.contains("authorization")),
            "{plain:?}"
        );
        assert!(
            authorized.iter().chain(&plain).all(|head| !head.contains(client_token)),
            "{authorized:?} {plain:?}"
        );
        let mut ledger_bytes = Vec::new();
        for file in ["ledger.db", "ledger.db-wal"] {
            ledger_bytes.extend(std::fs::read(gate.home.path().join(file)).unwrap_or_default());
        }
        let texts = format!("{refused} {health} {}", String::from_utf8_lossy(&ledger_bytes));
        assert!(
            texts.contains("upstream_forbidden")
                && !texts.contains(secret)
                && !texts.contains(client_token)
        );
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn session_name_is_scoped_to_principal() {
    let tokens = token_config("ann", "ann") + &token_config("bob", "bob");
    let gate = TestGateway::open(&format!("{CALC_TOOL_CONFIG}{tokens}")).await;
    let call = async |principal: &str, place: &str| {
        let (mut client, mut params) = (
            gate.client().with_token(principal),
            json!({"name": "calc", "arguments": {"expression": "6*7"}}),
        );
        match place {
            "header" => client.session = Some("shared".to_owned()),
            "path" => client.url = format!("{}/mcp/default/shared", gate.url),
            _ => params["_meta"] = json!({"toolgate/session": "shared"}),
        }
        let (_, answer) = client.call_method("tools/call", params).await;
        answer["result"]["_meta"]["toolgate/error"]["code"].as_str().unwrap_or("ok").to_owned()
    };
    // The third equal call in a session is refused, however the session is named. Calls of another
    // principal do not count.
    for (principal, place, code) in [
        ("ann", "header", "ok"),
        ("ann", "path", "ok"),
        ("bob", "header", "ok"),
        ("bob", "meta", "ok"),
        ("ann", "meta", "loop_detected"),
        ("bob", "path", "loop_detected"),
    ] {
        assert_eq!(call(principal, place).await, code, "{principal} by {place}");
    }
    gate.shut_down().await;
}
