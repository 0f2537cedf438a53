//! How clients come in, and what goes along with them: certificates, keys that are turned,
//! questions in the middle of a call, and tokens that are for one upstream and no other.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jsonwebtoken::{Algorithm, EncodingKey, Header};
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use toolgate_mcp::UpstreamStatus;

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::security::token_digest;
use crate::support::{McpTestClient, TestGateway, fixture_config, wait_until};

include!("keys.rs");

/// Of the key `FIRST_KEY`, for `localhost`, by itself.
const TLS_CERTIFICATE_PEM: &str = "-----BEGIN CERTIFICATE-----\nMIIBcjCCARmgAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv\nc3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM\nCWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABGB4NuLUYrn5DA3c\ncnmyjzXA7cy59RP3TW4F6opttwYQHFMYMB326D1HjDP97WIv63LYH0qxCxgt75+k\nXeSxzH+jWjBYMAwGA1UdEwEB/wQCMAAwFAYDVR0RBA0wC4IJbG9jYWxob3N0MBMG\nA1UdJQQMMAoGCCsGAQUFBwMBMB0GA1UdDgQWBBQ4nnKCNU5WcGedtnAAh43JbM52\najAKBggqhkjOPQQDAgNHADBEAiBXOnP5MqZR+kv7h5gaFS0UldH1FXRM5jYBSx5B\npBciWQIgFT22YDFcTKL/gAdmZ+CuQfm6xYLKoPT+MrX1ugAZSXk=\n-----END CERTIFICATE-----\n";

fn result_code(result: &Value) -> &str {
    result["_meta"]["toolgate/error"]["code"].as_str().unwrap_or("ok")
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_with_certificate_serves_tls_only() {
    let home = tempfile::tempdir().unwrap();
    let (certificate, key) = (home.path().join("certificate.pem"), home.path().join("key.pem"));
    std::fs::write(&certificate, TLS_CERTIFICATE_PEM).unwrap();
    std::fs::write(&key, FIRST_KEY.0).unwrap();
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
    let said = older
        .call_method("tools/call", json!({"name": "calc", "arguments": {"expression": "6*7"}}))
        .await;
    assert_eq!(said["result"]["isError"], json!(false), "{said}");
    // In the open nothing is said.
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut heard = Vec::new();
    let _ = tokio::time::timeout(Duration::from_secs(60), stream.read_to_end(&mut heard))
        .await
        .unwrap();
    assert!(!String::from_utf8_lossy(&heard).contains("HTTP"), "{heard:?}");
    // Who vouches for itself is not believed, and it is told why.
    let other = TestGateway::open(&format!(
        "[upstreams.far]\nurl = \"{base}/mcp\"\nundeclared = \"read\"\n"
    ))
    .await;
    match other.gateway.health()[0].status.clone() {
        UpstreamStatus::Down { why, .. } => {
            assert!(
                why.starts_with(&format!("cannot reach {base}: ")) && why.contains("certificate"),
                "{why}"
            );
        }
        status => panic!("{status:?}"),
    }
    other.shut_down().await;
    gate.shut_down().await;
    let error = TestGateway::try_open(&tls(&home.path().join("nowhere.pem")))
        .await
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("nowhere.pem"), "{error}");
}

fn key_pair(kid: &str) -> (&'static str, &'static str, &'static str) {
    if kid == "one" { FIRST_KEY } else { SECOND_KEY }
}

fn signed_token(kid: &str) -> String {
    let mut header = Header::new(Algorithm::ES256);
    header.kid = Some(kid.to_owned());
    let claims = json!({"iss": "i", "aud": "a", "sub": "ann", "exp": toolgate::Timestamp::now().as_second() + 600});
    jsonwebtoken::encode(
        &header,
        &claims,
        &EncodingKey::from_ec_pem(key_pair(kid).0.as_bytes()).unwrap(),
    )
    .unwrap()
}

/// Who signs tokens, and publishes one key; or is away.
struct TestJwksServer {
    address: String,
    key: Arc<Mutex<Option<&'static str>>>,
    requests: Arc<AtomicUsize>,
}

impl TestJwksServer {
    async fn start() -> Self {
        let (key, asked) = (Arc::new(Mutex::new(Some("one"))), Arc::new(AtomicUsize::new(0)));
        let (has, count) = (Arc::clone(&key), Arc::clone(&asked));
        let address = serve_connections(move |mut stream| {
            let (has, count) = (Arc::clone(&has), Arc::clone(&count));
            async move {
                if read_request(&mut stream).await.is_none() {
                    return;
                }
                count.fetch_add(1, Ordering::SeqCst);
                let kid: Option<&'static str> = *has.lock().unwrap();
                let said = kid.map_or_else(
                    || http_response("503 Away", "text/plain", ""),
                    |kid| {
                        let (_, x, y) = key_pair(kid);
                        let key = json!({"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": kid, "x": x, "y": y});
                        http_response("200 OK", "application/json", &json!({"keys": [key]}).to_string())
                    },
                );
                let _ = stream.write_all(said.as_bytes()).await;
            }
        })
        .await;
        Self { address, key, requests: asked }
    }

    /// A gateway that believes it.
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

/// Half a minute: so long nobody is asked for keys again. Whoever comes meanwhile with an unknown
/// one is one of hundreds.
#[tokio::test(flavor = "multi_thread")]
async fn unknown_key_ids_fetch_keys_once_and_keep_known_keys() {
    let (turns, leaves) = (TestJwksServer::start().await, TestJwksServer::start().await);
    let (one, other) = (turns.open_gateway().await, leaves.open_gateway().await);
    let (at_one, at_other) = (one.client(), other.client());
    let enters = async |client: &McpTestClient, kid: &str| {
        client.with_token(&signed_token(kid)).call_method("tools/list", json!({})).await.0 == 200
    };
    assert!(enters(&at_one, "one").await && enters(&at_other, "one").await);
    *turns.key.lock().unwrap() = Some("two");
    *leaves.key.lock().unwrap() = None;
    assert!(!enters(&at_one, "two").await, "it was asked a moment ago");
    wait_until("the new key is known", async || enters(&at_one, "two").await).await;
    assert!(!enters(&at_one, "one").await, "it is not published any more");
    assert_eq!(turns.request_count(), 2);
    // Who is asked in vain takes nothing away.
    wait_until("the other one is asked in vain", async || {
        assert!(!enters(&at_other, "two").await);
        leaves.request_count() == 2
    })
    .await;
    assert!(enters(&at_other, "one").await);
    one.shut_down().await;
    other.shut_down().await;
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
    for (text, said, wanted) in [
        ("said yes", &yes, "ok"),
        // What was approved was that call, and once.
        ("said yes, and more", &no, "approval_denied"),
        ("said yes", &no, "approval_denied"),
        (
            "said no by saying yes",
            &json!({"action": "accept", "content": {"approve": false}}),
            "approval_denied",
        ),
        ("said nothing in it", &json!({"action": "accept", "content": {}}), "approval_denied"),
    ] {
        let result = older.call_with_approval("echo", &json!({"text": text}), said).await;
        assert_eq!(result_code(&result), wanted, "{text}: {result}");
        assert_eq!(result["structuredContent"]["text"] == text, wanted == "ok", "{result}");
    }
    // Who closes the question has refused nothing.
    let closed = older
        .call_with_approval("echo", &json!({"text": "closed"}), &json!({"action": "cancel"}))
        .await;
    assert_eq!(result_code(&closed), "approval_required", "{closed}");
    let id = closed["_meta"]["toolgate/error"]["approval"]["id"].as_str().unwrap();
    assert!(gate.gateway.runtime().answer_approval(id, true, "lead").await.unwrap());
    let call = json!({"name": "echo", "arguments": {"text": "closed"}});
    assert_eq!(result_code(&older.call_method("tools/call", call.clone()).await["result"]), "ok");
    // Who cannot ask anybody is not asked.
    let mut alone = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
    assert_eq!(
        result_code(&alone.call_method("tools/call", call).await["result"]),
        "approval_required"
    );
    drop((older, alone));
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
    // On a machine with much to do two calls may be too far apart: then they are made again.
    let mut tries = 0;
    wait_until("one goes on where the other has ended", async || {
        tries += 1;
        assert_eq!(client.call_code("echo", json!({"text": tries.to_string()})).await, "ok");
        client.call_code("count", json!({})).await == "ok"
    })
    .await;
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    assert_eq!(client.call_code("count", json!({})).await, "prerequisite_missing");
    // One that has a name is what it was.
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
    // On a machine with much to do the second call may come too late: then both are made again.
    let mut told = String::new();
    for more in 0..5 {
        assert_eq!(client.call_code("sleep", json!({"ms": 1_100 + more})).await, "ok");
        told = client.call_code("count", json!({})).await;
        if told == "ok" {
            break;
        }
    }
    assert_eq!(told, "ok", "what the long call has proved is lost");
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
    let asked = client.call_method("tools/call", call.clone()).await.1;
    assert_eq!(asked["result"]["resultType"], "input_required", "{asked}");
    tokio::time::sleep(Duration::from_millis(700)).await;
    call["requestState"] = asked["result"]["requestState"].clone();
    call["inputResponses"] =
        json!({"toolgate_approval": {"action": "accept", "content": {"approve": true}}});
    let done = client.call_method("tools/call", call).await.1;
    assert_eq!(done["result"]["structuredContent"], json!({"text": "x"}), "{done}");
    gate.shut_down().await;
}

/// Serves one tool, of an earlier revision or of the newest, and notes the heads of what it is
/// asked. Whom it does not let in it tells what they came with.
async fn start_header_recording_server(modern: bool, heads: Arc<Mutex<Vec<String>>>) -> String {
    serve_connections(move |mut stream| {
        let heads = Arc::clone(&heads);
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            heads.lock().unwrap().push(head.clone());
            let locked = head.starts_with("post /locked") || request.pointer("/params/arguments/how") == Some(&json!("locked"));
            let own = json!({"name": "noting", "version": "1"});
            let response = match request["method"].as_str().unwrap_or_default() {
                _ if locked => http_response("401 No", "text/plain", &head),
                "server/discover" if modern => json_rpc_result(
                    &request,
                    json!({"resultType": "complete", "supportedVersions": ["2026-07-28"],
                    "capabilities": {"tools": {}}, "serverInfo": own, "ttlMs": 1000, "cacheScope": "private",
                    "_meta": {"io.modelcontextprotocol/serverInfo": own}}),
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
    let (secret, entry) = ("alpha-token-1", "entry-token-2");
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("key"), format!("{secret}\n")).unwrap();
    let bearer = format!("bearer = {{ file = {} }}\n", json!(home.path().join("key")));
    let digest: String =
        Sha256::digest(entry.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    for modern in [false, true] {
        let (with, without) =
            (Arc::<Mutex<Vec<String>>>::default(), Arc::<Mutex<Vec<String>>>::default());
        let (a, b) = (
            start_header_recording_server(modern, Arc::clone(&with)).await,
            start_header_recording_server(modern, Arc::clone(&without)).await,
        );
        let gate = TestGateway::open(&format!(
            "[upstreams.a]\nurl = \"http://{a}/mcp\"\nundeclared = \"read\"\n{bearer}[upstreams.b]\nurl = \"http://{b}/mcp\"\nundeclared = \"read\"\n\
             [upstreams.c]\nurl = \"http://{a}/locked\"\nundeclared = \"read\"\n{bearer}[[gateway.tokens]]\nprincipal = \"ann\"\nsha256 = \"{digest}\"\n"
        ))
        .await;
        let client = gate.client().with_token(entry).in_session("s");
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
        let (with, without) = (with.lock().unwrap().clone(), without.lock().unwrap().clone());
        assert!(
            with.iter().all(|head| head.contains(&format!("authorization: bearer {secret}"))),
            "{with:?}"
        );
        assert!(
            !without.is_empty() && without.iter().all(|head| !head.contains("authorization")),
            "{without:?}"
        );
        assert!(
            with.iter().chain(&without).all(|head| !head.contains(entry)),
            "{with:?} {without:?}"
        );
        let mut kept = Vec::new();
        for file in ["ledger.db", "ledger.db-wal"] {
            kept.extend(std::fs::read(gate.home.path().join(file)).unwrap_or_default());
        }
        let texts = format!("{refused} {health} {}", String::from_utf8_lossy(&kept));
        assert!(
            texts.contains("upstream_forbidden")
                && !texts.contains(secret)
                && !texts.contains(entry)
        );
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn session_name_is_scoped_to_principal() {
    let token = |principal: &str| {
        format!(
            "[[gateway.tokens]]\nprincipal = \"{principal}\"\nsha256 = \"{}\"\n",
            token_digest(principal)
        )
    };
    let gate =
        TestGateway::open(&format!("{CALC_TOOL_CONFIG}{}{}", token("ann"), token("bob"))).await;
    let asks = async |who: &str, by: &str| {
        let (mut client, mut params) = (
            gate.client().with_token(who),
            json!({"name": "calc", "arguments": {"expression": "6*7"}}),
        );
        match by {
            "header" => client.session = Some("shared".to_owned()),
            "path" => client.url = format!("{}/mcp/default/shared", gate.url),
            _ => params["_meta"] = json!({"toolgate/session": "shared"}),
        }
        let (_, answer) = client.call_method("tools/call", params).await;
        answer["result"]["_meta"]["toolgate/error"]["code"].as_str().unwrap_or("ok").to_owned()
    };
    // The third of the same is refused, whichever way the session is named; the calls of somebody
    // else do not count.
    for (who, by, code) in [
        ("ann", "header", "ok"),
        ("ann", "path", "ok"),
        ("bob", "header", "ok"),
        ("bob", "meta", "ok"),
        ("ann", "meta", "loop_detected"),
        ("bob", "path", "loop_detected"),
    ] {
        assert_eq!(asks(who, by).await, code, "{who} by {by}");
    }
    gate.shut_down().await;
}
