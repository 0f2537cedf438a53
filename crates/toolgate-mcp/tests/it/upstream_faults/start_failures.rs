//! Tests what the gateway reports about an upstream that cannot start.

use std::time::Duration;

use serde_json::json;
use toolgate_mcp::UpstreamStatus;

use super::{status_of, well_and_ill_config};
use crate::support::{TestGateway, fixture_path, unused_address, wait_until};

#[tokio::test(flavor = "multi_thread")]
async fn missing_secret_disables_upstream_until_reload() {
    let home = tempfile::tempdir().unwrap();
    let key = home.path().join("key");
    let ill = |env: &str| {
        let declared = "[tools.ill_echo]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\n";
        well_and_ill_config(&format!(
            "command = {}\nargs = [\"--stdio\"]\nenv = {{ KEY = {env} }}\n{declared}",
            json!(fixture_path())
        ))
    };
    let text = ill(&format!("{{ file = {} }}", json!(key)));
    let gate = TestGateway::open(&text).await;
    let client = gate.client().in_session("s");
    assert_eq!(
        client.call("well_echo", json!({"text": "a"})).await["structuredContent"]["text"],
        "a"
    );
    assert!(client.tool_names().await.contains(&"ill_echo".to_owned()));
    let refused =
        client.call("ill_echo", json!({"text": "a"})).await["_meta"]["toolgate/error"].clone();
    assert_eq!(
        (&refused["code"], &refused["errorCategory"]),
        (&json!("upstream_unavailable"), &json!("TRANSIENT")),
        "{refused}"
    );
    assert!(refused["upstream"]["said"].as_str().unwrap().contains("key"), "{refused}");
    let UpstreamStatus::Down { since, .. } = status_of(&gate, "ill") else {
        panic!("{:?}", status_of(&gate, "ill"))
    };
    assert!(
        refused["message"]
            .as_str()
            .unwrap()
            .contains(&since.strftime("%Y-%m-%d %H:%M:%SZ").to_string()),
        "{refused}"
    );
    // The reload does not wait for the next attempt, which may be far away.
    tokio::time::sleep(Duration::from_secs(3)).await;
    std::fs::write(&key, "secret-of-ill").unwrap();
    gate.reload(&text).await.unwrap();
    let is_up = || matches!(status_of(&gate, "ill"), UpstreamStatus::Up { .. });
    wait_until("the upstream is up", async || is_up()).await;
    let mut attempt = 0;
    wait_until("the call succeeds", async || {
        attempt += 1;
        client.call_code("ill_echo", json!({"text": format!("b{attempt}")})).await == "ok"
    })
    .await;
    // An unset variable is an error, and a default value corrects it.
    gate.reload(&ill("\"${TOOLGATE_NO_SUCH_VARIABLE}\"")).await.unwrap();
    let lacks_variable = |status: UpstreamStatus| matches!(status, UpstreamStatus::Down { why: reason, .. } if reason == "the environment variable `TOOLGATE_NO_SUCH_VARIABLE` is not set");
    assert!(lacks_variable(status_of(&gate, "ill")), "{:?}", status_of(&gate, "ill"));
    assert_eq!(client.call_code("ill_echo", json!({"text": "c"})).await, "upstream_unavailable");
    gate.reload(&ill("\"${TOOLGATE_NO_SUCH_VARIABLE:-something}\"")).await.unwrap();
    wait_until("the upstream is up again", async || is_up()).await;
    assert_eq!(
        client.call("well_echo", json!({"text": "d"})).await["structuredContent"]["text"],
        "d"
    );
    gate.shut_down().await;
}

/// Starts a server that answers every request with this response.
fn start_fixed_answer_server(answer: &'static str) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/mcp", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        use std::io::{Read, Write};
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 8 << 10]);
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn unavailable_upstream_reports_plain_reason() {
    let (_held, closed) = unused_address();
    let page = start_fixed_answer_server(
        "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi",
    );
    let locked = start_fixed_answer_server(
        "HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    );
    let lost = start_fixed_answer_server(
        "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    );
    let config = format!(
        "[upstreams.closed]\nurl = \"http://{closed}/mcp\"\n[upstreams.page]\nurl = \"{page}\"\n[upstreams.locked]\nurl = \"{locked}\"\n\
         [upstreams.lost]\nurl = \"{lost}\"\n[upstreams.brief]\ncommand = \"/bin/true\"\n[upstreams.nowhere]\ncommand = \"/no/such/program\"\n"
    );
    let gate = TestGateway::open(&config).await;
    let expected = [
        ("closed", format!("cannot reach http://{closed}: Connection refused (os error 111)")),
        ("page", "the server answered with text/html, not with MCP; check the path of `url`".to_owned()),
        (
            "locked",
            "the server answered HTTP 401: credentials are missing or wrong; set `bearer`, `oauth` or `headers` of the upstream".to_owned(),
        ),
        ("lost", "the server answered HTTP 404: no MCP endpoint at this address; check the path of `url`".to_owned()),
        ("brief", "the server exited or closed its output before the handshake was complete".to_owned()),
        ("nowhere", "`/no/such/program` cannot be started: No such file or directory (os error 2)".to_owned()),
    ];
    for (name, expected_reason) in expected {
        let health = gate.gateway.health().into_iter().find(|health| health.name == name).unwrap();
        match health.status {
            UpstreamStatus::Down { why: reason, .. } => {
                assert_eq!(reason, expected_reason, "{name}")
            }
            status => panic!("{name}: {status:?}"),
        }
    }
    gate.shut_down().await;
}
