//! Tests environment variables in the server files of other clients, and trusted root certificates.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use crate::hook::TestProject;

// A self-signed certificate for `localhost`, made for these tests.
const TLS_KEY_PEM: &str = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgfcD7yzgZcjBRkRXg\n8TseOgs/5xTvk9SaS65fZ96w16WhRANCAARgeDbi1GK5+QwN3HJ5so81wO3MufUT\n901uBeqKbbcGEBxTGDAd9ug9R4wz/e1iL+ty2B9KsQsYLe+fpF3kscx/\n-----END PRIVATE KEY-----\n";
const TLS_CERTIFICATE_PEM: &str = "-----BEGIN CERTIFICATE-----\nMIIBcjCCARmgAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv\nc3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM\nCWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABGB4NuLUYrn5DA3c\ncnmyjzXA7cy59RP3TW4F6opttwYQHFMYMB326D1HjDP97WIv63LYH0qxCxgt75+k\nXeSxzH+jWjBYMAwGA1UdEwEB/wQCMAAwFAYDVR0RBA0wC4IJbG9jYWxob3N0MBMG\nA1UdJQQMMAoGCCsGAQUFBwMBMB0GA1UdDgQWBBQ4nnKCNU5WcGedtnAAh43JbM52\najAKBggqhkjOPQQDAgNHADBEAiBXOnP5MqZR+kv7h5gaFS0UldH1FXRM5jYBSx5B\npBciWQIgFT22YDFcTKL/gAdmZ+CuQfm6xYLKoPT+MrX1ugAZSXk=\n-----END CERTIFICATE-----\n";

/// Returns the entry of an upstream in `upstream list`.
fn upstream_status(project: &TestProject, name: &str, variables: &[(&str, &str)]) -> Value {
    let (code, stdout, stderr) = project.run_with(
        variables,
        &["upstream", "list", "--json", "--config", "toolgate.toml"],
        "",
    );
    let upstreams: Vec<Value> =
        serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{code} {stdout}{stderr}"));
    upstreams
        .into_iter()
        .find(|upstream| upstream["name"] == name)
        .unwrap_or_else(|| panic!("{stdout}"))
}

/// Starts a server that rejects every request with 401, and records the heads.
fn start_unauthorized_server() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let heads = Arc::<Mutex<Vec<String>>>::default();
    let recorded = Arc::clone(&heads);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut head = [0; 8 << 10];
            let length = stream.read(&mut head).unwrap_or(0);
            recorded
                .lock()
                .unwrap()
                .push(String::from_utf8_lossy(&head[..length]).to_ascii_lowercase());
            let _ = stream
                .write_all(b"HTTP/1.1 401 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        }
    });
    (address, heads)
}

#[test]
fn server_file_expands_environment_variables() {
    let secret = "hunter2-and-more";
    let (address, heads) = start_unauthorized_server();
    let project =
        TestProject::with_config("store = \"ledger.db\"\nmcp_servers = [\"servers.json\"]\n");
    project.write_script("project/near", "#!/bin/sh\nprintf '%s %s' \"$1\" \"$TOKEN\" > seen\n");
    let servers = json!({"mcpServers": {
        "far": {"url": format!("http://{address}/${{ROOM}}/mcp"), "headers": {"X-Key": "${KEY}"}},
        "near": {"command": "${HERE:-.}/near", "args": ["${ROOM:-nowhere}"], "env": {"TOKEN": "${KEY}"}, "cwd": "${env:HERE:-.}"},
    }});
    project.write("project/servers.json", &servers.to_string());
    let far = upstream_status(&project, "far", &[("KEY", secret), ("ROOM", "room-7")]);
    assert!(
        far["why"].as_str().unwrap().contains("HTTP 401") && !far.to_string().contains(secret),
        "{far}"
    );
    assert_eq!(project.read("project/seen"), format!("room-7 {secret}"));
    let heads = heads.lock().unwrap().clone();
    let has_values = |head: &String| {
        head.starts_with("post /room-7/mcp ") && head.contains(&format!("x-key: {secret}"))
    };
    assert!(!heads.is_empty() && heads.iter().all(has_values), "{heads:?}");
    // The error names the missing variable and no value.
    let far = upstream_status(&project, "far", &[("KEY", secret)]);
    assert_eq!(far["why"], "the environment variable `ROOM` is not set", "{far}");
    assert_eq!(project.read("project/seen"), format!("nowhere {secret}"));
    let servers = servers.to_string().replace("HERE:-.", "HERE");
    project.write("project/servers.json", &servers);
    let near = upstream_status(&project, "near", &[("KEY", secret)]);
    assert_eq!(near["why"], "the environment variable `HERE` is not set", "{near}");
    // If the variable is set, the program is found.
    let here = project.path("project").display().to_string();
    std::fs::remove_file(project.path("project/seen")).unwrap();
    upstream_status(&project, "near", &[("KEY", secret), ("HERE", here.as_str())]);
    assert_eq!(project.read("project/seen"), format!("nowhere {secret}"));
    let (code, stdout, stderr) = project.run_with(
        &[("KEY", secret)],
        &["serve", "--stdio", "--config", "toolgate.toml"],
        "",
    );
    // The gateway serves without the upstream, and reports the variable.
    assert_eq!((code, stdout.as_str()), (0, ""), "{stderr}");
    assert!(
        stderr.contains("the environment variable `ROOM` is not set") && !stderr.contains(secret),
        "{stderr}"
    );
}

/// A gateway with TLS that ends when this value is dropped.
struct TlsServeProcess(Child, String);

impl TlsServeProcess {
    fn start(project: &TestProject) -> Self {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.set_environment(&mut command);
        command.args(["serve", "--config", "toolgate.toml", "--listen", "127.0.0.1:0"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self(child, line)
    }
}

impl Drop for TlsServeProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn upstream_certificate_must_match_trusted_root_and_host() {
    let tls = "[gateway.tls]\ncertificate = \"certificate.pem\"\nkey = \"key.pem\"\n";
    let inner = TestProject::with_config(&format!(
        "store = \"ledger.db\"\n[tools.calc]\nkind = \"builtin\"\n{tls}"
    ));
    inner.write("project/certificate.pem", TLS_CERTIFICATE_PEM);
    inner.write("project/key.pem", TLS_KEY_PEM);
    let gateway = TlsServeProcess::start(&inner);
    let port = gateway
        .1
        .strip_prefix("toolgate serves at https://127.0.0.1:")
        .and_then(|rest| rest.split('/').next());
    let port = port.unwrap_or_else(|| panic!("{}", gateway.1));
    let roots = inner.path("project/certificate.pem").display().to_string();
    let outer = TestProject::new();
    for (host, variables, is_trusted) in [
        ("localhost", vec![("SSL_CERT_FILE", roots.as_str())], true),
        ("127.0.0.1", vec![("SSL_CERT_FILE", roots.as_str())], false),
        ("localhost", vec![], false),
    ] {
        let far = format!(
            "[upstreams.far]\nurl = \"https://{host}:{port}/mcp\"\nundeclared = \"read\"\n"
        );
        outer.write("project/toolgate.toml", &format!("store = \"ledger.db\"\n{far}"));
        let far = upstream_status(&outer, "far", &variables);
        match is_trusted {
            true => assert_eq!(
                (&far["state"], &far["offers"][0]["tool"]),
                (&json!("up"), &json!("calc")),
                "{far}"
            ),
            false => assert!(
                far["state"] == "down" && far["why"].as_str().unwrap().contains("certificate"),
                "{host}: {far}"
            ),
        }
    }
}
