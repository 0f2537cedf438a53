//! A client of an earlier revision that is away when its answer comes, and comes back for it.

use std::time::{Duration, Instant};

use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};
use toolgate_store::{Filter, Ledger};

use crate::entering::{EITHER, plain};
use crate::support::{Gate, until, with_fixture};

const LIMITED: &str = "[gateway]\nstream_timeout = \"1s\"\n";
const SLEEP: &str = "[tools.sleep]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\npolicy = \"open\"\n";

/// A client of some revision that has sessions.
pub(crate) struct Session {
    http: reqwest::Client,
    url: String,
    id: String,
    version: &'static str,
}

/// What was heard in a stream: the messages, and the name of the last event.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    messages: Vec<Value>,
    last: Option<String>,
}

impl Heard {
    pub(crate) fn answer(&self) -> Option<&Value> {
        self.messages.iter().find(|message| message.get("result").is_some())
    }
}

impl Session {
    pub(crate) async fn greet(base: &str, version: &'static str) -> Self {
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

    pub(crate) fn request(&self, method: Method) -> RequestBuilder {
        let request = self.http.request(method, &self.url).header("accept", EITHER);
        request.header("mcp-session-id", &self.id).header("mcp-protocol-version", self.version)
    }

    pub(crate) async fn call(&self, tool: &str, arguments: Value) -> Response {
        let params = json!({"name": tool, "arguments": arguments, "_meta": {"progressToken": "mine"}});
        let call = json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params});
        self.request(Method::POST).json(&call).send().await.unwrap()
    }

    async fn back(&self, last: &str) -> Response {
        self.request(Method::GET).header("last-event-id", last).send().await.unwrap()
    }
}

/// Listens to a stream until it ends, or until something was said in it, and hangs up.
pub(crate) async fn listen(mut answer: Response, enough: impl Fn(&Heard) -> bool) -> Heard {
    let (mut heard, mut text) = (Heard::default(), String::new());
    while let Some(chunk) = tokio::time::timeout(Duration::from_secs(60), answer.chunk()).await.unwrap().unwrap() {
        text.push_str(&String::from_utf8_lossy(&chunk));
        while let Some(end) = text.find('\n') {
            let line: String = text.drain(..=end).collect();
            if let Some(id) = line.strip_prefix("id:") {
                heard.last = Some(id.trim().to_owned());
            }
            heard.messages.extend(line.strip_prefix("data:").and_then(|data| serde_json::from_str::<Value>(data.trim()).ok()));
        }
        if enough(&heard) {
            return heard;
        }
    }
    heard
}

fn never(_: &Heard) -> bool {
    false
}

fn rows(gate: &Gate, tool: &str) -> usize {
    let rows = Ledger::open(gate.ledger()).unwrap().find(&Filter::default()).unwrap();
    rows.iter().filter(|row| row.row.tool.as_ref() == tool).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_waits_for_whoever_was_sent_away() {
    let gate = Gate::open(&with_fixture(&format!("{SLEEP}{LIMITED}"))).await;
    let session = Session::greet(&gate.url, "2025-11-25").await;
    let begun = Instant::now();
    let sent_away = listen(session.call("sleep", json!({"ms": 4_000})).await, never).await;
    assert!(sent_away.answer().is_none() && begun.elapsed() < Duration::from_millis(4_000), "{sent_away:?}");
    let last = sent_away.last.unwrap();
    // Who comes back too early is sent away once more, and knows what to come back with.
    let early = listen(session.back(&last).await, never).await;
    assert!(early.answer().is_none(), "{early:?}");
    let last = early.last.unwrap();
    // The answer comes while nobody listens.
    until("it is over", async || rows(&gate, "sleep") == 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    // However often: an answer may be lost on its way.
    for _ in 0..2 {
        let heard = listen(session.back(&last).await, never).await;
        let answer = heard.answer().unwrap_or_else(|| panic!("it is lost: {heard:?}"));
        assert_eq!((&answer["id"], &answer["result"]["content"][0]["text"]), (&json!(7), &json!("Slept for 4000 milliseconds.")));
        assert_eq!(heard.messages.len(), 1, "{heard:?}");
    }
    assert_eq!(rows(&gate, "sleep"), 1);
    // Another session has its own answers, and a session that was ended has none.
    let other = Session::greet(&gate.url, "2025-11-25").await;
    assert!(listen(other.back(&last).await, never).await.answer().is_none());
    assert!(session.request(Method::DELETE).send().await.unwrap().status().is_success());
    assert_eq!(session.back(&last).await.status(), 404);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_know_to_come_back_is_not_sent_away() {
    let gate = Gate::open(&with_fixture(&format!("{SLEEP}{LIMITED}"))).await;
    for version in ["2025-06-18", "2025-03-26"] {
        let session = Session::greet(&gate.url, version).await;
        let heard = listen(session.call("sleep", json!({"ms": 1_500})).await, never).await;
        assert!(heard.answer().is_some(), "{version}: {heard:?}");
    }
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_waits_for_whoever_lost_the_connection() {
    let gate = Gate::open(&with_fixture("undeclared = \"read\"\n")).await;
    let session = Session::greet(&gate.url, "2025-11-25").await;
    // It hangs up after the first word, and what is said next waits, in its order.
    let first = listen(session.call("test_tool_with_progress", json!({})).await, |heard| !heard.messages.is_empty()).await;
    assert!(first.answer().is_none(), "{first:?}");
    until("it is over", async || rows(&gate, "test_tool_with_progress") == 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let rest = listen(session.back(&first.last.unwrap()).await, never).await;
    let progress: Vec<_> = first.messages.iter().chain(&rest.messages).filter_map(|m| m["params"]["progress"].as_f64()).collect();
    assert_eq!(progress, [0.0, 50.0, 100.0], "{rest:?}");
    assert!(rest.answer().is_some(), "{rest:?}");
    // Who is there again before the answer hears it when it comes.
    let call = session.call("sleep", json!({"ms": 1_000})).await;
    let last = listen(call, |heard| heard.last.is_some()).await.last.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let heard = listen(session.back(&last).await, never).await;
    assert!(heard.answer().is_some(), "{heard:?}");
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_took_its_time_can_be_had_again() {
    let gate = Gate::open(&with_fixture("undeclared = \"read\"\n")).await;
    let session = Session::greet(&gate.url, "2025-06-18").await;
    for (ms, again) in [(1_200, true), (10, false)] {
        let heard = listen(session.call("sleep", json!({"ms": ms})).await, never).await;
        assert!(heard.answer().is_some(), "{heard:?}");
        // What is heard last is the answer: who has not heard it has heard what came first.
        let first = heard.last.unwrap().split_once('/').map(|(_, request)| format!("0/{request}")).unwrap();
        let back = listen(session.back(&first).await, never).await;
        assert_eq!(back.answer().is_some(), again, "{ms}: {back:?}");
    }
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_keeps_its_seat_while_its_client_is_away() {
    let gate = Gate::open(&with_fixture("undeclared = \"read\"\n[gateway]\nconcurrency = 2\nstream_timeout = \"1s\"\n")).await;
    let session = Session::greet(&gate.url, "2025-11-25").await;
    let ask = |id: u64| {
        let call =
            json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": "sleep", "arguments": {"ms": 3_000 + id}}});
        session.request(Method::POST).json(&call).send()
    };
    let (one, two) = (listen(ask(1).await.unwrap(), never), listen(ask(2).await.unwrap(), never));
    let (one, two) = tokio::join!(one, two);
    assert!(one.answer().is_none() && two.answer().is_none(), "{one:?} {two:?}");
    assert_eq!(ask(3).await.unwrap().status(), 503);
    until("both are over", async || rows(&gate, "sleep") >= 2).await;
    let three = listen(ask(4).await.unwrap(), never).await;
    assert!(three.last.is_some(), "{three:?}");
    gate.end().await;
}
