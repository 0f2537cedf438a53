//! An upstream of 2025-11-25 may end the stream of its answer, for its client to come back for it. So does the gateway before it.

use std::time::Duration;

use reqwest::{Client, Method, RequestBuilder};
use serde_json::{Value, json};
use toolgate_store::{Filter, Ledger};

use crate::entering::{EITHER, plain};
use crate::straight::Fixture;
use crate::support::Gate;

/// A client of some revision that has sessions.
struct Session {
    http: Client,
    url: String,
    id: String,
    version: &'static str,
}

impl Session {
    async fn greet(base: &str, version: &'static str) -> Self {
        let (http, url) = (plain(), format!("{base}/mcp"));
        let about = json!({"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
        let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about});
        let greeted = http.post(&url).header("accept", EITHER).json(&hello).send().await.unwrap();
        let id = greeted.headers()["mcp-session-id"].to_str().unwrap().to_owned();
        let session = Self { http, url, id, version };
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        assert!(session.request(Method::POST).json(&ready).send().await.unwrap().status().is_success());
        session
    }

    fn request(&self, method: Method) -> RequestBuilder {
        let request = self.http.request(method, &self.url).header("accept", EITHER);
        request.header("mcp-session-id", &self.id).header("mcp-protocol-version", self.version)
    }
}

/// All of a stream until it ends, or until there is an answer in it: the answer, and the name of the last event.
async fn heard(request: RequestBuilder) -> (Option<Value>, Option<String>) {
    let (mut answer, mut text, mut name) = (request.send().await.unwrap(), String::new(), None);
    while let Some(chunk) = tokio::time::timeout(Duration::from_secs(60), answer.chunk()).await.expect("it never ends").unwrap() {
        text.push_str(&String::from_utf8_lossy(&chunk));
        while let Some(end) = text.find('\n') {
            let line: String = text.drain(..=end).collect();
            if let Some(id) = line.strip_prefix("id:") {
                name = Some(id.trim().to_owned());
            }
            let message = line.strip_prefix("data:").and_then(|data| serde_json::from_str::<Value>(data.trim()).ok());
            if let Some(message) = message.filter(|message| message.get("result").is_some()) {
                return (Some(message), name);
            }
        }
    }
    (None, name)
}

#[tokio::test(flavor = "multi_thread")]
async fn who_can_come_back_is_sent_away_as_the_upstream_does_and_nobody_else() {
    let (older, newest) = (Fixture::start_with(&["--older"]), Fixture::start_with(&[]));
    for (version, upstream, broken) in
        [("2025-11-25", &older, true), ("2025-06-18", &older, false), ("2025-03-26", &older, false), ("2025-11-25", &newest, false)]
    {
        let config = format!("[upstreams.fix]\nurl = {}\nprefix = \"\"\nundeclared = \"read\"\n", json!(upstream.1));
        let gate = Gate::open(&config).await;
        let session = Session::greet(&gate.url, version).await;
        let call = json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "test_reconnection", "arguments": {}}});
        let (mut answer, name) = heard(session.request(Method::POST).json(&call)).await;
        assert_eq!(answer.is_none(), broken, "{version}: {answer:?}");
        if broken {
            let back = session.request(Method::GET).header("last-event-id", name.expect("nothing to come back with"));
            (answer, _) = heard(back).await;
        }
        let answer = answer.expect("it is lost");
        assert_eq!(answer["id"], 7, "{version}");
        assert_eq!(answer["result"]["content"][0]["text"], "The client came back for this.", "{version}: {answer}");
        let rows = Ledger::open(gate.ledger()).unwrap().find(&Filter::default()).unwrap();
        assert_eq!(rows.iter().filter(|row| row.row.tool.as_ref() == "test_reconnection").count(), 1, "{version}");
        gate.end().await;
    }
}
