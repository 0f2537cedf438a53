//! Implements a client of revision 2025-06-18 over HTTP.

use std::time::Duration;

use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::support::ACCEPT_JSON_OR_EVENTS;

/// Collects the messages of several streams.
///
/// Messages that no test has waited for are kept.
pub(crate) struct MessageInbox {
    sender: mpsc::UnboundedSender<Value>,
    receiver: mpsc::UnboundedReceiver<Value>,
    unclaimed: Vec<Value>,
}

impl MessageInbox {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        Self { sender, receiver, unclaimed: Vec::new() }
    }

    /// Sends a request, and collects the messages of its answer.
    pub(crate) fn send(&self, request: RequestBuilder) {
        let sender = self.sender.clone();
        tokio::spawn(async move { forward_messages(request.send().await.unwrap(), sender).await });
    }

    pub(crate) async fn wait_for(&mut self, is_match: impl Fn(&Value) -> bool) -> Value {
        if let Some(index) = self.unclaimed.iter().position(&is_match) {
            return self.unclaimed.remove(index);
        }
        let found = tokio::time::timeout(Duration::from_secs(60), async {
            loop {
                let message = self.receiver.recv().await.unwrap();
                if is_match(&message) {
                    return message;
                }
                self.unclaimed.push(message);
            }
        })
        .await;
        found.unwrap_or_else(|_| panic!("the expected message is missing: {:?}", self.unclaimed))
    }
}

/// Sends the messages of an answer to a channel as they arrive.
async fn forward_messages(mut answer: Response, sender: mpsc::UnboundedSender<Value>) {
    let mut text = String::new();
    while let Ok(Some(chunk)) = answer.chunk().await {
        text.push_str(&String::from_utf8_lossy(&chunk));
        while let Some(end) = text.find('\n') {
            let line: String = text.drain(..=end).collect();
            if let Some(message) =
                line.strip_prefix("data:").and_then(|data| serde_json::from_str(data.trim()).ok())
            {
                let _ = sender.send(message);
            }
        }
    }
    // The answer is one JSON document instead of a stream.
    if let Ok(message) = serde_json::from_str(&text) {
        let _ = sender.send(message);
    }
}

/// A client of revision 2025-06-18 over HTTP.
pub(crate) struct LegacyHttpClient {
    http: reqwest::Client,
    url: String,
    session: String,
    last_id: u64,
    pub(crate) inbox: MessageInbox,
}

impl LegacyHttpClient {
    pub(crate) async fn connect(http: &reqwest::Client, base: &str, capabilities: Value) -> Self {
        let url = format!("{base}/mcp");
        let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18", "capabilities": capabilities, "clientInfo": {"name": "t", "version": "1"}}});
        let response = http
            .post(&url)
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .json(&hello)
            .send()
            .await
            .unwrap();
        let session = response.headers()["mcp-session-id"].to_str().unwrap().to_owned();
        let client =
            Self { http: http.clone(), url, session, last_id: 0, inbox: MessageInbox::new() };
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        assert!(
            client
                .http_request(Method::POST)
                .json(&ready)
                .send()
                .await
                .unwrap()
                .status()
                .is_success()
        );
        let stream = client.http_request(Method::GET).send().await.unwrap();
        tokio::spawn(forward_messages(stream, client.inbox.sender.clone()));
        client
    }

    pub(crate) fn http_request(&self, method: Method) -> RequestBuilder {
        let request = self.http.request(method, &self.url).header("accept", ACCEPT_JSON_OR_EVENTS);
        request.header("mcp-session-id", &self.session).header("mcp-protocol-version", "2025-06-18")
    }

    pub(crate) fn send(&self, message: &Value) {
        self.inbox.send(self.http_request(Method::POST).json(message));
    }

    /// Sends a request without waiting for the answer. Returns its id.
    pub(crate) fn start_request(&mut self, method: &str, params: &Value) -> u64 {
        self.last_id += 1;
        self.send(
            &json!({"jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params}),
        );
        self.last_id
    }

    pub(crate) async fn wait_for_answer(&mut self, id: u64) -> Value {
        // Requests of the gateway have their own ids.
        self.inbox
            .wait_for(|message| message["id"] == json!(id) && message.get("method").is_none())
            .await
    }

    pub(crate) async fn call_method(&mut self, method: &str, params: Value) -> Value {
        let id = self.start_request(method, &params);
        self.wait_for_answer(id).await
    }

    /// Calls a tool that needs approval, answers the question, and returns the result.
    pub(crate) async fn call_with_approval(
        &mut self,
        tool: &str,
        arguments: &Value,
        answer: &Value,
    ) -> Value {
        let id = self.start_request("tools/call", &json!({"name": tool, "arguments": arguments}));
        let question =
            self.inbox.wait_for(|message| message["method"] == "elicitation/create").await;
        let text = question["params"]["message"].as_str().unwrap();
        assert!(
            text.starts_with("A person decides.")
                && text.contains(arguments["text"].as_str().unwrap()),
            "{question}"
        );
        self.send(&json!({"jsonrpc": "2.0", "id": question["id"], "result": answer}));
        self.wait_for_answer(id).await["result"].clone()
    }
}
