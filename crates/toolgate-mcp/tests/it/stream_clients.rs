//! Implements clients that receive notifications on streams.

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, WriteHalf};
use tokio::net::TcpStream;

use crate::support::{ClientLines, TestGateway};

/// A client of an earlier revision on streams.
pub(crate) struct LegacyStreamClient {
    writer: WriteHalf<DuplexStream>,
    answers: ClientLines,
    last_id: u64,
    /// Notifications that arrived before an answer.
    pub(crate) notifications: Vec<Value>,
}

impl LegacyStreamClient {
    pub(crate) async fn open(gate: &TestGateway) -> Self {
        Self::open_as_agent(gate, None).await
    }

    pub(crate) async fn open_as_agent(gate: &TestGateway, agent: Option<&str>) -> Self {
        let (_, writer, answers) = gate.connect_streams(agent);
        let mut client = Self { writer, answers, last_id: 0, notifications: vec![] };
        let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}});
        client.call_method("initialize", params).await;
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        client.writer.write_all(format!("{ready}\n").as_bytes()).await.unwrap();
        client
    }

    pub(crate) async fn next_message(&mut self) -> Value {
        serde_json::from_str(&self.answers.next_line().await.unwrap().unwrap()).unwrap()
    }

    pub(crate) async fn call_method(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let request =
            json!({"jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params});
        self.writer.write_all(format!("{request}\n").as_bytes()).await.unwrap();
        loop {
            let message = self.next_message().await;
            if message["id"] == json!(self.last_id) {
                return message;
            }
            self.notifications.push(message);
        }
    }
}

/// A client of revision 2026-07-28 with a `subscriptions/listen` stream.
pub(crate) struct ListenStreamClient(Lines<BufReader<TcpStream>>);

impl ListenStreamClient {
    /// Subscribes to notifications as an agent.
    pub(crate) async fn open(gate: &TestGateway, agent: &str, notifications: Value) -> Self {
        let address = gate.url.trim_start_matches("http://").to_owned();
        let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}});
        let params = json!({"_meta": meta, "notifications": notifications});
        let body =
            json!({"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": params})
                .to_string();
        let mut stream = TcpStream::connect(&address).await.unwrap();
        let head = format!(
            "POST /mcp/{agent} HTTP/1.1\r\nhost: {address}\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\n\
             mcp-protocol-version: 2026-07-28\r\nmcp-method: subscriptions/listen\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        Self(BufReader::new(stream).lines())
    }

    /// Returns the next message.
    pub(crate) async fn next_message(&mut self) -> Value {
        loop {
            let line = self.0.next_line().await.unwrap().unwrap();
            if let Some(message) = line
                .strip_prefix("data:")
                .and_then(|data| serde_json::from_str::<Value>(data.trim()).ok())
            {
                return message;
            }
        }
    }
}
