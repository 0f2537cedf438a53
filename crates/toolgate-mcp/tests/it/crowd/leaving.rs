//! One gateway that lives on while its clients go without a word and its configuration is replaced: nothing piles up in it.

use std::path::Path;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{files, settled, tasks};
use crate::support::{Gate, alone, children, fixture, until};

/// So many of each kind.
const MANY: usize = 16;
/// So many other configurations in each round. Every second one reaches the upstream in another way.
const RELOADS: usize = 6;

/// In a process of its own, where nobody else opens files.
#[test]
fn nothing_piles_up_of_clients_that_vanish_and_configurations_that_are_replaced() {
    alone("crowd::leaving::counted");
}

/// Files that are open, tasks, and processes.
fn counts() -> (usize, usize, usize) {
    (files(), tasks(), children().len())
}

fn config(home: &Path, turn: usize) -> String {
    format!(
        "[upstreams.fix]\ncommand = {}\nargs = [\"--stdio\", \"--tools\", \"12\"]\nprefix = \"\"\nundeclared = \"read\"\nconcurrency = 64\n\
         timeout = \"{}s\"\nenv = {{ FIXTURE_COUNTER = {} }}\n[tools.calc]\nkind = \"builtin\"\ndescription = \"Turn {turn}.\"\n",
        json!(fixture()),
        20 + turn / 2,
        json!(home.join("begun"))
    )
}

/// A request of 2026-07-28, as it is sent.
fn request(gate: &Gate, session: &str, method: &str, name: &str, mut params: Value) -> String {
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
async fn said(gate: &Gate, text: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(gate.url.trim_start_matches("http://")).await.unwrap();
    stream.write_all(text).await.unwrap();
    stream
}

/// Clients in the middle of a call, of a question and of an answer without end, all of which go without a word.
async fn come_and_go(gate: &Gate, home: &Path, round: usize) {
    let mut there = Vec::new();
    for n in 0..MANY {
        let session = format!("s{round}-{n}");
        // It ends by itself, should nobody hear that its client is gone.
        let ms = 2_000 + round * MANY + n;
        let call = request(gate, &session, "tools/call", "sleep", json!({"name": "sleep", "arguments": {"ms": ms}}));
        let wanted = json!({"notifications": {"toolsListChanged": true, "resourceSubscriptions": ["test://watched-resource"]}});
        let mut listening = said(gate, request(gate, &session, "subscriptions/listen", "", wanted).as_bytes()).await;
        assert!(listening.read(&mut [0; 64]).await.unwrap() > 0);
        there.push(listening);
        // Half of what it wants to say, in the head or behind it.
        let half = if n % 2 == 0 { 100 } else { call.len() - 10 };
        there.push(said(gate, &call.as_bytes()[..half]).await);
        there.push(said(gate, call.as_bytes()).await);
    }
    let begun = || std::fs::read_to_string(home.join("begun")).unwrap_or_default().lines().filter(|line| line.starts_with("sleep")).count();
    until("all calls are under way", async || begun() >= (round + 1) * MANY).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by nothing_piles_up_of_clients_that_vanish_and_configurations_that_are_replaced"]
async fn counted() {
    let home = tempfile::tempdir().unwrap();
    let gate = Gate::open(&config(home.path(), 0)).await;
    let mut before = (0, 0, 0);
    for round in 0..3 {
        come_and_go(&gate, home.path(), round).await;
        for turn in 0..RELOADS {
            gate.reload(&config(home.path(), 1 + round * RELOADS + turn)).await.unwrap();
        }
        until("what was replaced is gone", async || children().len() == 1).await;
        // What is opened once for all is open after the first time.
        if round == 0 {
            before = settled(counts).await;
        }
    }
    // One for each client, or for each configuration, would be a dozen at least.
    until("nothing has piled up", async || {
        let now = counts();
        now.0 <= before.0 + 4 && now.1 <= before.1 + 4 && now.2 == before.2
    })
    .await;
    gate.end().await;
    until("all of it is gone", async || children().is_empty()).await;
}
