//! Tests that secrets of the gateway and of its clients are absent from all output and files.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use crate::gateway::{ServeProcess, tools_call_request, wait_until};
use crate::hook::TestProject;

/// The client secret, its form in a basic authorization header, and the access token.
const CLIENT_SECRET: &str = "cl1ent-s3cret-of-ours";
const BASIC_CREDENTIALS: &str = "bWU6Y2wxZW50LXMzY3JldC1vZi1vdXJz";
const ACCESS_TOKEN: &str = "acc3ss-token-of-theirs";
/// A secret in the query of a URL, plain and encoded.
const QUERY_KEY: &str = "qu3ry k3y of ours";
const QUERY_KEY_ENCODED: &str = "qu3ry%20k3y%20of%20ours";
/// A client token that is valid until 2100, made for this test, and the public key of its signer.
const CLIENT_JWT: &str = "eyJhbGciOiJFUzI1NiIsInR5cCI6IkpXVCIsImtpZCI6Im9uZSJ9.eyJpc3MiOiJodHRwczovL2xvZ2luLmV4YW1wbGUvIiwiYXVkIjoiaHR0cHM6Ly9nYXRlLmV4YW1wbGUvbWNwIiwic3ViIjoiYm9iIiwiZXhwIjo0MTAyNDQ0ODAwfQ.WY2CxBWaBWQjAQ71UOI5F-2Bv3QdiW1_8cDCMwSEs3ootd4YkkUPjwrmRKkFXAw09wF4zx_rzKzGx-coBfwW2Q";
const SIGNER_PUBLIC_KEY: (&str, &str) =
    ("YHg24tRiufkMDdxyebKPNcDtzLn1E_dNbgXqim23BhA", "HFMYMB326D1HjDP97WIv63LYH0qxCxgt75-kXeSxzH8");

/// Reads a request, and returns its lower-case head and its body.
fn read_request(stream: &mut TcpStream) -> Option<(String, String)> {
    let (mut text, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let length = stream.read(&mut chunk).ok().filter(|length| *length > 0)?;
        text.extend_from_slice(&chunk[..length]);
        let all = String::from_utf8_lossy(&text).into_owned();
        let Some((head, body)) = all.split_once("\r\n\r\n") else { continue };
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

/// Returns the reply of an upstream or of its token server. Both reveal secrets.
fn leaky_reply(head: &str, request: &Value) -> String {
    let answer = |status: &str, kind: &str, body: &str| {
        format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: {kind}\r\n\r\n{body}")
    };
    let json_answer =
        |status: &str, body: Value| answer(status, "application/json", &body.to_string());
    let result = |result: Value| {
        json_answer("200 OK", json!({"jsonrpc": "2.0", "id": request["id"], "result": result}))
    };
    let path = head.split_whitespace().nth(1).unwrap_or_default();
    match (path, request["method"].as_str().unwrap_or_default()) {
        ("/token", _) => {
            json_answer("200 OK", json!({"access_token": ACCESS_TOKEN, "token_type": "Bearer"}))
        }
        ("/refuses", _) => json_answer(
            "400 No",
            json!({"error": "invalid_client", "error_description": format!("{CLIENT_SECRET} is wrong")}),
        ),
        _ if head.starts_with("get ") => answer("405 No", "text/plain", ""),
        (_, "server/discover") => answer("404 No", "text/html", "<p>"),
        (_, "initialize") => {
            let info = json!({"name": "given", "version": "1"});
            result(
                json!({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}),
            )
        }
        (_, "tools/list") => result(
            json!({"tools": [{"name": "talk", "description": "Talks.", "inputSchema": {"type": "object"}}]}),
        ),
        // The server disconnects during the call, and the HTTP client reports the URL.
        (_, "tools/call") if path.contains("apikey=") => String::new(),
        (_, "tools/call") => {
            let text = format!("`Bearer {ACCESS_TOKEN}` is not enough, nor is {CLIENT_SECRET}");
            result(json!({"isError": true, "content": [{"type": "text", "text": text}]}))
        }
        (_, "ping") => result(json!({})),
        _ => answer("202 Accepted", "text/plain", ""),
    }
}

/// Starts the upstream and its token server at one address.
fn start_leaky_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let Some((head, body)) = read_request(&mut stream) else { continue };
            let request: Value = serde_json::from_str(&body).unwrap_or_default();
            let _ = stream.write_all(leaky_reply(&head, &request).as_bytes());
        }
    });
    address
}

#[test]
fn secret_is_absent_from_logs_answers_and_ledger() {
    // A secret of the gateway, and the token of a client.
    let (secret, token) = ("hunter2-and-more", "tg_5esame-and-m0re");
    let leaky_server = start_leaky_server();
    let project = TestProject::new();
    // This program prints its secret and exits.
    project.write_script("project/teller", "#!/bin/sh\necho \"the key is $KEY\" >&2\nexit 1\n");
    project.write("project/key", secret);
    let key = json!({"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "one", "x": SIGNER_PUBLIC_KEY.0, "y": SIGNER_PUBLIC_KEY.1});
    project.write("project/keys.json", &json!({"keys": [key]}).to_string());
    let oauth = |url: &str| {
        format!(
            "url = \"http://{leaky_server}/mcp\"\nundeclared = \"read\"\n\
             oauth = {{ token_url = \"http://{leaky_server}/{url}\", client_id = \"me\", client_secret = \"${{CLIENT_SECRET}}\" }}\n"
        )
    };
    // The bound socket does not listen, so connections to this address fail.
    let bound_socket = tokio::net::TcpSocket::new_v4().unwrap();
    bound_socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let closed_address = bound_socket.local_addr().unwrap();
    project.write(
        "project/toolgate.toml",
        &format!(
            "store = \"ledger.db\"\n[[gateway.tokens]]\nprincipal = \"ann\"\nsha256 = \"{}\"\n\
             [upstreams.teller]\ncommand = \"./teller\"\nenv = {{ KEY = \"${{SECRET}}\" }}\nundeclared = \"read\"\n\
             [upstreams.far]\nurl = \"http://{closed_address}/${{SECRET}}/mcp\"\nbearer = {{ file = \"key\" }}\nheaders = {{ x-key = \"${{SECRET}}\" }}\nundeclared = \"read\"\n\
             [upstreams.keyed]\nurl = \"http://{leaky_server}/mcp?apiKey=${{ASKED_WITH}}\"\nundeclared = \"read\"\n\
             [tools.ask]\nkind = \"http\"\nurl = \"http://{closed_address}/ask\"\nnetworks = [\"127.0.0.0/8\"]\nheaders = {{ authorization = \"Bearer ${{SECRET}}\" }}\neffect = \"read\"\n\
             [tools.fails]\nkind = \"command\"\ncommand = \"./teller\"\nenv = {{ KEY = {{ file = \"key\" }} }}\neffect = \"read\"\nsandbox = {{ read = [\".\"] }}\n\
             [gateway.jwt]\nissuer = \"https://login.example/\"\naudience = \"https://gate.example/mcp\"\nkeys = \"keys.json\"\n\
             [upstreams.given]\n{}[upstreams.shut]\n{}",
            toolgate_json::Digest::of(token.as_bytes()),
            oauth("token"),
            oauth("refuses")
        ),
    );
    let variables = [
        ("SECRET", secret),
        ("CLIENT_SECRET", CLIENT_SECRET),
        ("ASKED_WITH", QUERY_KEY),
        ("RUST_LOG", "trace"),
    ];
    let gateway = ServeProcess::start_with(&project, &variables, &["-vv"]);
    let mut answers = String::new();
    let forged = format!("{CLIENT_JWT}x");
    for (n, token) in [token, CLIENT_JWT, forged.as_str()].into_iter().enumerate() {
        for tool in ["ask", "fails", "teller_x", "far_x", "given_talk", "shut_x", "keyed_talk"] {
            let headers = format!(
                "authorization: Bearer {token}\r\nmcp-protocol-version: 2026-07-28\r\nmcp-method: tools/call\r\nmcp-name: {tool}\r\n"
            );
            let mut body = tools_call_request(1, tool, json!({}));
            body["params"]["_meta"] = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}});
            let answer = gateway.post(&format!("/mcp/default/s{n}-{tool}"), &headers, &body);
            assert_eq!(answer.contains("\"result\""), token != forged, "{answer}");
            answers.push_str(&answer);
        }
    }
    assert!(answers.contains("is not enough"), "{answers}");
    assert!(
        answers.contains("upstream_unavailable") && answers.contains("[redacted]"),
        "{answers}"
    );
    wait_until("the output of `teller` was logged", || {
        gateway.stderr_text.lock().unwrap().contains("the key is")
    });
    let is_failed_call =
        |line: &str| line.contains("upstream call failed") && line.contains("keyed");
    wait_until("the failed call of `keyed` was logged", || {
        gateway.stderr_text.lock().unwrap().lines().any(is_failed_call)
    });
    gateway.signal("-TERM");
    wait_until("the gateway has exited", || std::net::TcpStream::connect(&gateway.url).is_err());
    std::thread::sleep(std::time::Duration::from_millis(500));
    let logs = gateway.stderr_text.lock().unwrap().clone();
    // Only the signature of a signed token is secret.
    let signature = CLIENT_JWT.rsplit('.').next().unwrap();
    for secret in [
        secret,
        token,
        CLIENT_SECRET,
        BASIC_CREDENTIALS,
        ACCESS_TOKEN,
        QUERY_KEY,
        QUERY_KEY_ENCODED,
        signature,
    ] {
        assert!(
            !logs.contains(secret),
            "{}",
            logs.lines().find(|line| line.contains(secret)).unwrap()
        );
        assert!(!answers.contains(secret), "{answers}");
        for path in crate::hook::list_files(&project.path("")) {
            let text = std::fs::read(&path).unwrap();
            let found = text.windows(secret.len()).any(|part| part == secret.as_bytes());
            assert!(!found || path.ends_with("project/key"), "{}", path.display());
        }
    }
}

#[test]
fn rotated_secret_is_reloaded_and_both_are_redacted() {
    let (first, second) = ("first-key-of-ours", "second-key-of-ours");
    let project = TestProject::new();
    let toolgate = std::process::Command::cargo_bin("toolgate")
        .unwrap()
        .get_program()
        .to_str()
        .unwrap()
        .to_owned();
    // This upstream records and prints its key, then serves.
    let inner = format!(
        "#!/bin/sh\necho \"$KEY\" >> seen\necho \"the key is $KEY\" >&2\nexec {toolgate} serve --stdio --config inner.toml\n"
    );
    project.write_script("project/inner", &inner);
    project.write("project/inner.toml", crate::gateway::INNER_CONFIG);
    project.write("project/key", first);
    let config = "store = \"ledger.db\"\n[upstreams.in]\ncommand = \"./inner\"\nenv = { KEY = { file = \"key\" } }\nundeclared = \"read\"\n";
    project.write("project/toolgate.toml", config);
    let gateway = ServeProcess::start_with(&project, &[("RUST_LOG", "trace")], &["-vv"]);
    let is_logged = |times: usize| {
        gateway.stderr_text.lock().unwrap().matches("the key is [redacted]").count() >= times
    };
    let last_key =
        || project.read("project/seen").lines().next_back().unwrap_or_default().to_owned();
    wait_until("the upstream was started", || last_key() == first && is_logged(1));
    project.write("project/key", second);
    wait_until("the upstream was started with the new key", || {
        last_key() == second && is_logged(2)
    });
    let logs = gateway.stderr_text.lock().unwrap().clone();
    assert!(!logs.contains("key-of-ours"), "{logs}");
}
