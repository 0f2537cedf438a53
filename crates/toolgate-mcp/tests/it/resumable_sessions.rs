//! A client of an earlier revision that is away when its answer comes, and comes back for it.

use std::time::{Duration, Instant};

use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};
use toolgate_store::{Ledger, RowFilter};

use crate::support::{TestGateway, fixture_config, wait_until};
use crate::tls_and_authentication::{ACCEPT_JSON_OR_EVENTS, http_client};

const STREAM_TIMEOUT_CONFIG: &str = "[gateway]\nstream_timeout = \"1s\"\n";
const SLEEP_TOOL_CONFIG: &str =
    "[tools.sleep]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\npolicy = \"open\"\n";

/// A client of some revision that has sessions.
pub(crate) struct ResumableTestSession {
    http: reqwest::Client,
    url: String,
    id: String,
    version: &'static str,
}

/// What was heard in a stream: the messages, and the name of the last event.
#[derive(Debug, Default)]
pub(crate) struct StreamTranscript {
    messages: Vec<Value>,
    last_event_id: Option<String>,
}

impl StreamTranscript {
    pub(crate) fn answer(&self) -> Option<&Value> {
        self.messages.iter().find(|message| message.get("result").is_some())
    }
}

impl ResumableTestSession {
    pub(crate) async fn connect(base: &str, version: &'static str) -> Self {
        let (http, url) = (http_client(), format!("{base}/mcp"));
        let about = json!({"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
        let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about});
        let greeted = http
            .post(&url)
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .json(&hello)
            .send()
            .await
            .unwrap();
        let id = greeted.headers()["mcp-session-id"].to_str().unwrap().to_owned();
        let session = Self { http, url, id, version };
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        assert!(
            session
                .http_request(Method::POST)
                .json(&ready)
                .send()
                .await
                .unwrap()
                .status()
                .is_success()
        );
        session
    }

    pub(crate) fn http_request(&self, method: Method) -> RequestBuilder {
        let request = self.http.request(method, &self.url).header("accept", ACCEPT_JSON_OR_EVENTS);
        request.header("mcp-session-id", &self.id).header("mcp-protocol-version", self.version)
    }

    pub(crate) async fn call(&self, tool: &str, arguments: Value) -> Response {
        let params =
            json!({"name": tool, "arguments": arguments, "_meta": {"progressToken": "mine"}});
        let call = json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params});
        self.http_request(Method::POST).json(&call).send().await.unwrap()
    }

    async fn resume_stream(&self, last: &str) -> Response {
        self.http_request(Method::GET).header("last-event-id", last).send().await.unwrap()
    }
}

/// Listens to a stream until it ends, or until something was said in it, and hangs up.
pub(crate) async fn read_stream(
    mut answer: Response,
    enough: impl Fn(&StreamTranscript) -> bool,
) -> StreamTranscript {
    let (mut heard, mut text) = (StreamTranscript::default(), String::new());
    while let Some(chunk) =
        tokio::time::timeout(Duration::from_secs(60), answer.chunk()).await.unwrap().unwrap()
    {
        text.push_str(&String::from_utf8_lossy(&chunk));
        while let Some(end) = text.find('\n') {
            let line: String = text.drain(..=end).collect();
            if let Some(id) = line.strip_prefix("id:") {
                heard.last_event_id = Some(id.trim().to_owned());
            }
            heard.messages.extend(
                line.strip_prefix("data:")
                    .and_then(|data| serde_json::from_str::<Value>(data.trim()).ok()),
            );
        }
        if enough(&heard) {
            return heard;
        }
    }
    heard
}

fn read_to_end(_: &StreamTranscript) -> bool {
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_is_kept_for_client_after_stream_timeout() {
    let gate =
        TestGateway::open(&fixture_config(&format!("{SLEEP_TOOL_CONFIG}{STREAM_TIMEOUT_CONFIG}")))
            .await;
    let session = ResumableTestSession::connect(&gate.url, "2025-11-25").await;
    let begun = Instant::now();
    let sent_away =
        read_stream(session.call("sleep", json!({"ms": 4_000})).await, read_to_end).await;
    assert!(
        sent_away.answer().is_none() && begun.elapsed() < Duration::from_millis(4_000),
        "{sent_away:?}"
    );
    let last = sent_away.last_event_id.unwrap();
    // Who comes back too early is sent away once more, and knows what to come back with.
    let early = read_stream(session.resume_stream(&last).await, read_to_end).await;
    assert!(early.answer().is_none(), "{early:?}");
    let last = early.last_event_id.unwrap();
    // The answer comes while nobody listens.
    wait_until("it is over", async || count_rows(&gate, "sleep") == 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    // However often: an answer may be lost on its way.
    for _ in 0..2 {
        let heard = read_stream(session.resume_stream(&last).await, read_to_end).await;
        let answer = heard.answer().unwrap_or_else(|| panic!("it is lost: {heard:?}"));
        assert_eq!(
            (&answer["id"], &answer["result"]["content"][0]["text"]),
            (&json!(7), &json!("Slept for 4000 milliseconds."))
        );
        assert_eq!(heard.messages.len(), 1, "{heard:?}");
    }
    assert_eq!(count_rows(&gate, "sleep"), 1);
    // Another session has its own answers, and a session that was ended has none.
    let other = ResumableTestSession::connect(&gate.url, "2025-11-25").await;
    assert!(read_stream(other.resume_stream(&last).await, read_to_end).await.answer().is_none());
    assert!(session.http_request(Method::DELETE).send().await.unwrap().status().is_success());
    assert_eq!(session.resume_stream(&last).await.status(), 404);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_timeout_does_not_apply_to_older_revisions() {
    let gate =
        TestGateway::open(&fixture_config(&format!("{SLEEP_TOOL_CONFIG}{STREAM_TIMEOUT_CONFIG}")))
            .await;
    for version in ["2025-06-18", "2025-03-26"] {
        let session = ResumableTestSession::connect(&gate.url, version).await;
        let heard =
            read_stream(session.call("sleep", json!({"ms": 1_500})).await, read_to_end).await;
        assert!(heard.answer().is_some(), "{version}: {heard:?}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_is_kept_for_client_after_connection_loss() {
    let gate = TestGateway::open(&fixture_config("undeclared = \"read\"\n")).await;
    let session = ResumableTestSession::connect(&gate.url, "2025-11-25").await;
    // It hangs up after the first word, and what is said next waits, in its order.
    let first = read_stream(session.call("test_tool_with_progress", json!({})).await, |heard| {
        !heard.messages.is_empty()
    })
    .await;
    assert!(first.answer().is_none(), "{first:?}");
    wait_until("it is over", async || count_rows(&gate, "test_tool_with_progress") == 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let rest =
        read_stream(session.resume_stream(&first.last_event_id.unwrap()).await, read_to_end).await;
    let progress: Vec<_> = first
        .messages
        .iter()
        .chain(&rest.messages)
        .filter_map(|m| m["params"]["progress"].as_f64())
        .collect();
    assert_eq!(progress, [0.0, 50.0, 100.0], "{rest:?}");
    assert!(rest.answer().is_some(), "{rest:?}");
    // Who is there again before the answer hears it when it comes.
    let call = session.call("sleep", json!({"ms": 1_000})).await;
    let last =
        read_stream(call, |heard| heard.last_event_id.is_some()).await.last_event_id.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let heard = read_stream(session.resume_stream(&last).await, read_to_end).await;
    assert!(heard.answer().is_some(), "{heard:?}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_answer_can_be_replayed() {
    let gate = TestGateway::open(&fixture_config("undeclared = \"read\"\n")).await;
    let session = ResumableTestSession::connect(&gate.url, "2025-06-18").await;
    for (ms, again) in [(1_200, true), (10, false)] {
        let heard = read_stream(session.call("sleep", json!({"ms": ms})).await, read_to_end).await;
        assert!(heard.answer().is_some(), "{heard:?}");
        // What is heard last is the answer: who has not heard it has heard what came first.
        let first = heard
            .last_event_id
            .unwrap()
            .split_once('/')
            .map(|(_, request)| format!("0/{request}"))
            .unwrap();
        let back = read_stream(session.resume_stream(&first).await, read_to_end).await;
        assert_eq!(back.answer().is_some(), again, "{ms}: {back:?}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_keeps_permit_while_client_is_away() {
    let gate = TestGateway::open(&fixture_config(
        "undeclared = \"read\"\n[gateway]\nconcurrency = 2\nstream_timeout = \"1s\"\n",
    ))
    .await;
    let session = ResumableTestSession::connect(&gate.url, "2025-11-25").await;
    let ask = |id: u64| {
        let call = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": "sleep", "arguments": {"ms": 3_000 + id}}});
        session.http_request(Method::POST).json(&call).send()
    };
    let (one, two) = (
        read_stream(ask(1).await.unwrap(), read_to_end),
        read_stream(ask(2).await.unwrap(), read_to_end),
    );
    let (one, two) = tokio::join!(one, two);
    assert!(one.answer().is_none() && two.answer().is_none(), "{one:?} {two:?}");
    assert_eq!(ask(3).await.unwrap().status(), 503);
    wait_until("both are over", async || count_rows(&gate, "sleep") >= 2).await;
    let three = read_stream(ask(4).await.unwrap(), read_to_end).await;
    assert!(three.last_event_id.is_some(), "{three:?}");
    gate.shut_down().await;
}
