//! Tests that a client of an earlier revision can disconnect and resume the stream of its answer.

use std::time::{Duration, Instant};

use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use crate::support::{
    ACCEPT_JSON_OR_EVENTS, TestGateway, count_rows, fixture_config, http_client, wait_until,
};

const STREAM_TIMEOUT_CONFIG: &str = "[gateway]\nstream_timeout = \"1s\"\n";
const SLEEP_TOOL_CONFIG: &str =
    "[tools.sleep]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\npolicy = \"open\"\n";

/// A client with a session of a given revision.
pub(crate) struct ResumableTestSession {
    http: reqwest::Client,
    url: String,
    id: String,
    version: &'static str,
}

/// The messages of a stream, and the id of its last event.
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
        let params = json!({"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
        let initialize =
            json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params});
        let response = http
            .post(&url)
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .json(&initialize)
            .send()
            .await
            .unwrap();
        let id = response.headers()["mcp-session-id"].to_str().unwrap().to_owned();
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

/// Reads a stream until the stream ends or `is_enough` is true, and then disconnects.
pub(crate) async fn read_stream(
    mut answer: Response,
    is_enough: impl Fn(&StreamTranscript) -> bool,
) -> StreamTranscript {
    let (mut transcript, mut text) = (StreamTranscript::default(), String::new());
    while let Some(chunk) =
        tokio::time::timeout(Duration::from_secs(60), answer.chunk()).await.unwrap().unwrap()
    {
        text.push_str(&String::from_utf8_lossy(&chunk));
        while let Some(end) = text.find('\n') {
            let line: String = text.drain(..=end).collect();
            if let Some(id) = line.strip_prefix("id:") {
                transcript.last_event_id = Some(id.trim().to_owned());
            }
            transcript.messages.extend(
                line.strip_prefix("data:")
                    .and_then(|data| serde_json::from_str::<Value>(data.trim()).ok()),
            );
        }
        if is_enough(&transcript) {
            return transcript;
        }
    }
    transcript
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
    let start = Instant::now();
    let first = read_stream(session.call("sleep", json!({"ms": 4_000})).await, read_to_end).await;
    assert!(
        first.answer().is_none() && start.elapsed() < Duration::from_millis(4_000),
        "{first:?}"
    );
    let last = first.last_event_id.unwrap();
    // A client that resumes too early is disconnected again, with a new event id.
    let early = read_stream(session.resume_stream(&last).await, read_to_end).await;
    assert!(early.answer().is_none(), "{early:?}");
    let last = early.last_event_id.unwrap();
    // The answer arrives while the client is disconnected.
    wait_until("the call has ended", async || count_rows(&gate, "sleep") == 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    // The stream can be resumed repeatedly, because an answer may be lost on its way.
    for _ in 0..2 {
        let transcript = read_stream(session.resume_stream(&last).await, read_to_end).await;
        let answer =
            transcript.answer().unwrap_or_else(|| panic!("the answer is lost: {transcript:?}"));
        assert_eq!(
            (&answer["id"], &answer["result"]["content"][0]["text"]),
            (&json!(7), &json!("Slept for 4000 milliseconds."))
        );
        assert_eq!(transcript.messages.len(), 1, "{transcript:?}");
    }
    assert_eq!(count_rows(&gate, "sleep"), 1);
    // Another session and an ended session cannot resume the stream.
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
        let transcript =
            read_stream(session.call("sleep", json!({"ms": 1_500})).await, read_to_end).await;
        assert!(transcript.answer().is_some(), "{version}: {transcript:?}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_is_kept_for_client_after_connection_loss() {
    let gate = TestGateway::open(&fixture_config("undeclared = \"read\"\n")).await;
    let session = ResumableTestSession::connect(&gate.url, "2025-11-25").await;
    // The client disconnects after the first message, and the next messages are kept in order.
    let first =
        read_stream(session.call("test_tool_with_progress", json!({})).await, |transcript| {
            !transcript.messages.is_empty()
        })
        .await;
    assert!(first.answer().is_none(), "{first:?}");
    wait_until("the call has ended", async || count_rows(&gate, "test_tool_with_progress") == 1)
        .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let rest =
        read_stream(session.resume_stream(&first.last_event_id.unwrap()).await, read_to_end).await;
    let progress: Vec<_> = first
        .messages
        .iter()
        .chain(&rest.messages)
        .filter_map(|message| message["params"]["progress"].as_f64())
        .collect();
    assert_eq!(progress, [0.0, 50.0, 100.0], "{rest:?}");
    assert!(rest.answer().is_some(), "{rest:?}");
    // A client that resumes before the answer receives the answer when it comes.
    let call = session.call("sleep", json!({"ms": 1_000})).await;
    let last = read_stream(call, |transcript| transcript.last_event_id.is_some())
        .await
        .last_event_id
        .unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let transcript = read_stream(session.resume_stream(&last).await, read_to_end).await;
    assert!(transcript.answer().is_some(), "{transcript:?}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_answer_can_be_replayed() {
    let gate = TestGateway::open(&fixture_config("undeclared = \"read\"\n")).await;
    let session = ResumableTestSession::connect(&gate.url, "2025-06-18").await;
    for (ms, is_replayed) in [(1_200, true), (10, false)] {
        let transcript =
            read_stream(session.call("sleep", json!({"ms": ms})).await, read_to_end).await;
        assert!(transcript.answer().is_some(), "{transcript:?}");
        // The last event is the answer, and the first event of the request has the number 0.
        let first = transcript
            .last_event_id
            .unwrap()
            .split_once('/')
            .map(|(_, request)| format!("0/{request}"))
            .unwrap();
        let resumed = read_stream(session.resume_stream(&first).await, read_to_end).await;
        assert_eq!(resumed.answer().is_some(), is_replayed, "{ms}: {resumed:?}");
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
    let start_call = |id: u64| {
        let call = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": "sleep", "arguments": {"ms": 3_000 + id}}});
        session.http_request(Method::POST).json(&call).send()
    };
    let (first, second) = (
        read_stream(start_call(1).await.unwrap(), read_to_end),
        read_stream(start_call(2).await.unwrap(), read_to_end),
    );
    let (first, second) = tokio::join!(first, second);
    assert!(first.answer().is_none() && second.answer().is_none(), "{first:?} {second:?}");
    assert_eq!(start_call(3).await.unwrap().status(), 503);
    wait_until("both calls have ended", async || count_rows(&gate, "sleep") >= 2).await;
    let third = read_stream(start_call(4).await.unwrap(), read_to_end).await;
    assert!(third.last_event_id.is_some(), "{third:?}");
    gate.shut_down().await;
}
