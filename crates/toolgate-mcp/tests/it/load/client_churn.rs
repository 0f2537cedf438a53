//! One gateway that lives on while its clients go without a word and its configuration is replaced:
//! nothing piles up in it.

use std::path::Path;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{alive_tasks, open_files, wait_until_stable};
use crate::support::{TestGateway, child_processes, fixture_path, run_in_own_process, wait_until};

/// So many of each kind.
const CLIENTS_PER_KIND: usize = 16;
/// So many other configurations in each round. Every second one reaches the upstream in another
/// way.
const RELOADS_PER_ROUND: usize = 6;

/// In a process of its own, where nobody else opens files.
#[test]
fn vanished_clients_and_reloads_leak_no_resources() {
    run_in_own_process("load::client_churn::client_churn_in_own_process");
}

/// Files that are open, tasks, and processes.
fn resource_counts() -> (usize, usize, usize) {
    (open_files(), alive_tasks(), child_processes().len())
}

fn config(home: &Path, turn: usize) -> String {
    format!(
        "[upstreams.fix]\ncommand = {}\nargs = [\"--stdio\", \"--tools\", \"12\"]\nprefix = \"\"\nundeclared = \"read\"\nconcurrency = 64\n\
         timeout = \"{}s\"\nenv = {{ FIXTURE_COUNTER = {} }}\n[tools.calc]\nkind = \"builtin\"\ndescription = \"Turn {turn}.\"\n",
        json!(fixture_path()),
        20 + turn / 2,
        json!(home.join("begun"))
    )
}

/// A request of 2026-07-28, as it is sent.
fn raw_request(
    gate: &TestGateway,
    session: &str,
    method: &str,
    name: &str,
    mut params: Value,
) -> String {
    params["_meta"] = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}});
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
    let name = if name.is_empty() { String::new() } else { format!("mcp-name: {name}\r\n") };
    format!(
        "POST /mcp HTTP/1.1\r\nhost: {}\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\n\
         mcp-protocol-version: 2026-07-28\r\nmcp-method: {method}\r\n{name}toolgate-session: {session}\r\ncontent-length: {}\r\n\r\n{body}",
        gate.url.trim_start_matches("http://"),
        body.len()
    )
}

/// A client that has said this, and has heard nothing yet.
async fn connect_and_send(gate: &TestGateway, text: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(gate.url.trim_start_matches("http://")).await.unwrap();
    stream.write_all(text).await.unwrap();
    stream
}

/// Clients in the middle of a call, of a question and of an answer without end, all of which go
/// without a word.
async fn connect_and_vanish(gate: &TestGateway, home: &Path, round: usize) {
    let mut there = Vec::new();
    for n in 0..CLIENTS_PER_KIND {
        let session = format!("s{round}-{n}");
        // It ends by itself, should nobody hear that its client is gone.
        let ms = 2_000 + round * CLIENTS_PER_KIND + n;
        let call = raw_request(
            gate,
            &session,
            "tools/call",
            "sleep",
            json!({"name": "sleep", "arguments": {"ms": ms}}),
        );
        let wanted = json!({"notifications": {"toolsListChanged": true, "resourceSubscriptions": ["test://watched-resource"]}});
        let mut listening = connect_and_send(
            gate,
            raw_request(gate, &session, "subscriptions/listen", "", wanted).as_bytes(),
        )
        .await;
        assert!(listening.read(&mut [0; 64]).await.unwrap() > 0);
        there.push(listening);
        // Half of what it wants to say, in the head or behind it.
        let half = if n % 2 == 0 { 100 } else { call.len() - 10 };
        there.push(connect_and_send(gate, &call.as_bytes()[..half]).await);
        there.push(connect_and_send(gate, call.as_bytes()).await);
    }
    let begun = || {
        std::fs::read_to_string(home.join("begun"))
            .unwrap_or_default()
            .lines()
            .filter(|line| line.starts_with("sleep"))
            .count()
    };
    wait_until("all calls are under way", async || begun() >= (round + 1) * CLIENTS_PER_KIND).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by vanished_clients_and_reloads_leak_no_resources"]
async fn client_churn_in_own_process() {
    let home = tempfile::tempdir().unwrap();
    let gate = TestGateway::open(&config(home.path(), 0)).await;
    let mut before = (0, 0, 0);
    for round in 0..3 {
        connect_and_vanish(&gate, home.path(), round).await;
        for turn in 0..RELOADS_PER_ROUND {
            gate.reload(&config(home.path(), 1 + round * RELOADS_PER_ROUND + turn)).await.unwrap();
        }
        wait_until("what was replaced is gone", async || child_processes().len() == 1).await;
        // What is opened once for all is open after the first time.
        if round == 0 {
            before = wait_until_stable(resource_counts).await;
        }
    }
    // One for each client, or for each configuration, would be a dozen at least.
    wait_until("nothing has piled up", async || {
        let now = resource_counts();
        now.0 <= before.0 + 4 && now.1 <= before.1 + 4 && now.2 == before.2
    })
    .await;
    gate.shut_down().await;
    wait_until("all of it is gone", async || child_processes().is_empty()).await;
}
