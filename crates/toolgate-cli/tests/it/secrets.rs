//! What the gateway knows, and what its clients come with, is in nothing that it says or writes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use crate::gateway::{ServeProcess, tools_call_request, wait_until};
use crate::hook::TestProject;

/// What a token is asked for with, also as it stands in a header, and the token.
const CLIENT_SECRET: &str = "cl1ent-s3cret-of-ours";
const BASIC_CREDENTIALS: &str = "bWU6Y2wxZW50LXMzY3JldC1vZi1vdXJz";
const ACCESS_TOKEN: &str = "acc3ss-token-of-theirs";
/// What stands in an address, and how it is spelled there.
const QUERY_KEY: &str = "qu3ry k3y of ours";
const QUERY_KEY_ENCODED: &str = "qu3ry%20k3y%20of%20ours";
/// A signed token of a client until the year 2100, made for this test, and the public key of
/// whoever signed it.
const CLIENT_JWT: &str = "eyJhbGciOiJFUzI1NiIsInR5cCI6IkpXVCIsImtpZCI6Im9uZSJ9.eyJpc3MiOiJodHRwczovL2xvZ2luLmV4YW1wbGUvIiwiYXVkIjoiaHR0cHM6Ly9nYXRlLmV4YW1wbGUvbWNwIiwic3ViIjoiYm9iIiwiZXhwIjo0MTAyNDQ0ODAwfQ.WY2CxBWaBWQjAQ71UOI5F-2Bv3QdiW1_8cDCMwSEs3ootd4YkkUPjwrmRKkFXAw09wF4zx_rzKzGx-coBfwW2Q";
const SIGNER_PUBLIC_KEY: (&str, &str) =
    ("YHg24tRiufkMDdxyebKPNcDtzLn1E_dNbgXqim23BhA", "HFMYMB326D1HjDP97WIv63LYH0qxCxgt75-kXeSxzH8");

/// One request: its head in small letters, and its body.
fn read_request(stream: &mut TcpStream) -> Option<(String, String)> {
    let (mut text, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let read = stream.read(&mut chunk).ok().filter(|read| *read > 0)?;
        text.extend_from_slice(&chunk[..read]);
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

/// What an upstream that wants a token says, and whoever gives it. Both say more than they should.
fn leaky_reply(head: &str, asked: &Value) -> String {
    let answer = |status: &str, kind: &str, body: &str| {
        format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: {kind}\r\n\r\n{body}")
    };
    let said = |status: &str, body: Value| answer(status, "application/json", &body.to_string());
    let result = |result: Value| {
        said("200 OK", json!({"jsonrpc": "2.0", "id": asked["id"], "result": result}))
    };
    let path = head.split_whitespace().nth(1).unwrap_or_default();
    match (path, asked["method"].as_str().unwrap_or_default()) {
        ("/token", _) => {
            said("200 OK", json!({"access_token": ACCESS_TOKEN, "token_type": "Bearer"}))
        }
        ("/refuses", _) => said(
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
        // It hangs up in the middle of the call, and whoever asked says what it has asked.
        (_, "tools/call") if path.contains("apikey=") => String::new(),
        (_, "tools/call") => {
            let text = format!("`Bearer {ACCESS_TOKEN}` is not enough, nor is {CLIENT_SECRET}");
            result(json!({"isError": true, "content": [{"type": "text", "text": text}]}))
        }
        (_, "ping") => result(json!({})),
        _ => answer("202 Accepted", "text/plain", ""),
    }
}

/// Both at one address.
fn start_leaky_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let Some((head, body)) = read_request(&mut stream) else { continue };
            let asked: Value = serde_json::from_str(&body).unwrap_or_default();
            let _ = stream.write_all(leaky_reply(&head, &asked).as_bytes());
        }
    });
    address
}

#[test]
fn secret_is_absent_from_logs_answers_and_ledger() {
    // What the gateway knows, and what its clients come with.
    let (secret, token) = ("hunter2-and-more", "tg_5esame-and-m0re");
    let giver = start_leaky_server();
    let project = TestProject::new();
    // It says what it knows, and ends.
    project.write("project/teller", "#!/bin/sh\necho \"the key is $KEY\" >&2\nexit 1\n");
    std::fs::set_permissions(
        project.path("project/teller"),
        std::fs::Permissions::from_mode(0o755),
    )
    .unwrap();
    project.write("project/key", secret);
    let key = json!({"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "one", "x": SIGNER_PUBLIC_KEY.0, "y": SIGNER_PUBLIC_KEY.1});
    project.write("project/keys.json", &json!({"keys": [key]}).to_string());
    let oauth = |url: &str| {
        format!(
            "url = \"http://{giver}/mcp\"\nundeclared = \"read\"\n\
             oauth = {{ token_url = \"http://{giver}/{url}\", client_id = \"me\", client_secret = \"${{CLIENT_SECRET}}\" }}\n"
        )
    };
    // Nobody listens there, nor comes to while it is held.
    let held = tokio::net::TcpSocket::new_v4().unwrap();
    held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let nobody = held.local_addr().unwrap();
    project.write(
        "project/toolgate.toml",
        &format!(
            "store = \"ledger.db\"\n[[gateway.tokens]]\nprincipal = \"ann\"\nsha256 = \"{}\"\n\
             [upstreams.teller]\ncommand = \"./teller\"\nenv = {{ KEY = \"${{SECRET}}\" }}\nundeclared = \"read\"\n\
             [upstreams.far]\nurl = \"http://{nobody}/${{SECRET}}/mcp\"\nbearer = {{ file = \"key\" }}\nheaders = {{ x-key = \"${{SECRET}}\" }}\nundeclared = \"read\"\n\
             [upstreams.keyed]\nurl = \"http://{giver}/mcp?apiKey=${{ASKED_WITH}}\"\nundeclared = \"read\"\n\
             [tools.ask]\nkind = \"http\"\nurl = \"http://{nobody}/ask\"\nnetworks = [\"127.0.0.0/8\"]\nheaders = {{ authorization = \"Bearer ${{SECRET}}\" }}\neffect = \"read\"\n\
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
    let served = ServeProcess::start_with(&project, &variables, &["-vv"]);
    let mut said = String::new();
    let forged = format!("{CLIENT_JWT}x");
    for (n, token) in [token, CLIENT_JWT, forged.as_str()].into_iter().enumerate() {
        for tool in ["ask", "fails", "teller_x", "far_x", "given_talk", "shut_x", "keyed_talk"] {
            let headers = format!(
                "authorization: Bearer {token}\r\nmcp-protocol-version: 2026-07-28\r\nmcp-method: tools/call\r\nmcp-name: {tool}\r\n"
            );
            let mut body = tools_call_request(1, tool, json!({}));
            body["params"]["_meta"] = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}});
            let answer = served.post(&format!("/mcp/default/s{n}-{tool}"), &headers, &body);
            assert_eq!(answer.contains("\"result\""), token != forged, "{answer}");
            said.push_str(&answer);
        }
    }
    assert!(said.contains("is not enough"), "{said}");
    assert!(said.contains("upstream_unavailable") && said.contains("[redacted]"), "{said}");
    wait_until("the one that talks was heard", || {
        served.stderr_text.lock().unwrap().contains("the key is")
    });
    let told_of = |line: &str| line.contains("upstream call failed") && line.contains("keyed");
    wait_until("the one that hangs up was told of", || {
        served.stderr_text.lock().unwrap().lines().any(told_of)
    });
    served.signal("-TERM");
    wait_until("it has ended", || std::net::TcpStream::connect(&served.url).is_err());
    std::thread::sleep(std::time::Duration::from_millis(500));
    let logs = served.stderr_text.lock().unwrap().clone();
    // Of a signed token, what proves it.
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
        assert!(!said.contains(secret), "{said}");
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
    let own = std::process::Command::cargo_bin("toolgate")
        .unwrap()
        .get_program()
        .to_str()
        .unwrap()
        .to_owned();
    // It says what it was given, and serves.
    let inner = format!(
        "#!/bin/sh\necho \"$KEY\" >> seen\necho \"the key is $KEY\" >&2\nexec {own} serve --stdio --config inner.toml\n"
    );
    project.write("project/inner", &inner);
    std::fs::set_permissions(project.path("project/inner"), std::fs::Permissions::from_mode(0o755))
        .unwrap();
    project.write("project/inner.toml", crate::gateway::INNER_CONFIG);
    project.write("project/key", first);
    let config = "store = \"ledger.db\"\n[upstreams.in]\ncommand = \"./inner\"\nenv = { KEY = { file = \"key\" } }\nundeclared = \"read\"\n";
    project.write("project/toolgate.toml", config);
    let served = ServeProcess::start_with(&project, &[("RUST_LOG", "trace")], &["-vv"]);
    let told = |times: usize| {
        served.stderr_text.lock().unwrap().matches("the key is [redacted]").count() >= times
    };
    let seen = || project.read("project/seen").lines().next_back().unwrap_or_default().to_owned();
    wait_until("it was started", || seen() == first && told(1));
    project.write("project/key", second);
    wait_until("it was started with the other one", || seen() == second && told(2));
    let logs = served.stderr_text.lock().unwrap().clone();
    assert!(!logs.contains("key-of-ours"), "{logs}");
}
