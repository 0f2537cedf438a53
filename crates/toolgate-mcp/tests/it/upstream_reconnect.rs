//! Tests that reads are repeated and effects are not when an upstream with running calls is lost.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::legacy_http_client::LegacyHttpClient;
use crate::legacy_upstreams::{
    discover_result, http_response, initialize_result, json_rpc_result, modern_result,
    read_request, serve_connections,
};
use crate::support::{
    TestGateway, count_lines, fixture_path, has_ended, http_client, kill_processes_with_number,
    processes_with_number, wait_until,
};

/// The number of concurrent reads: more than the circuit breaker permits to fail in a row.
const READ_COUNT: usize = 8;

/// A server with a read tool and a payment tool.
///
/// The first call with each key gets no answer until the server drops all connections.
struct DroppingServer {
    modern: bool,
    /// The number of times that a legacy server lost its sessions.
    session_epoch: AtomicUsize,
    disconnects: watch::Sender<bool>,
    received_keys: Mutex<Vec<String>>,
}

impl DroppingServer {
    async fn start(modern: bool) -> (Arc<Self>, String) {
        let host = Arc::new(Self {
            modern,
            session_epoch: AtomicUsize::new(0),
            disconnects: watch::Sender::new(false),
            received_keys: Mutex::default(),
        });
        let shared = Arc::clone(&host);
        let address =
            serve_connections(move |stream| Arc::clone(&shared).handle_connection(stream)).await;
        let tool = |name: &str, effect: &str| {
            format!("[tools.{name}]\nkind = \"mcp\"\nupstream = \"h\"\n{effect}\n")
        };
        let (look, pay) = (
            tool("look", "effect = \"read\""),
            tool("pay", "effect = \"write\"\npolicy = \"open\""),
        );
        (host, format!("[upstreams.h]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\n{look}{pay}"))
    }

    /// Returns the number of calls by key.
    fn call_counts(&self) -> BTreeMap<String, usize> {
        count_by_key(self.received_keys.lock().unwrap().iter())
    }

    async fn handle_connection(self: Arc<Self>, mut stream: TcpStream) {
        let Some((head, request)) = read_request(&mut stream).await else { return };
        let session = format!("mcp-session-id: life-{}", self.session_epoch.load(Ordering::SeqCst));
        let respond = |result: Value| modern_result(&request, result);
        let response = match request["method"].as_str().unwrap_or_default() {
            "server/discover" if self.modern => {
                discover_result(&request, "host", &json!({"tools": {}}))
            }
            "server/discover" => http_response("404 No", "text/html", "<p>"),
            "initialize" => json_rpc_result(&request, initialize_result()).replacen(
                "\r\n",
                &format!("\r\n{session}\r\n"),
                1,
            ),
            "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
            _ if !self.modern && !head.contains(&session) => {
                http_response("404 Not Found", "text/plain", "")
            }
            "ping" => json_rpc_result(&request, json!({})),
            "tools/list" => {
                let text = json!({"type": "string"});
                let schema = json!({"type": "object", "properties": {"key": text, "how": text}});
                let tools = ["look", "pay"].map(
                    |name| json!({"name": name, "description": "Does.", "inputSchema": schema}),
                );
                respond(json!({"tools": tools}))
            }
            "tools/call" => {
                let key = request
                    .pointer("/params/arguments/key")
                    .and_then(Value::as_str)
                    .unwrap_or_default()
                    .to_owned();
                self.received_keys.lock().unwrap().push(key.clone());
                if key.starts_with("never")
                    || (key != "other" && self.call_counts().get(&key) == Some(&1))
                {
                    let _ = self
                        .disconnects
                        .subscribe()
                        .wait_for(|is_disconnected| *is_disconnected)
                        .await;
                    return;
                }
                respond(json!({"content": [{"type": "text", "text": "done"}]}))
            }
            _ => http_response("202 Accepted", "text/plain", ""),
        };
        let _ = stream.write_all(response.as_bytes()).await;
    }
}

fn count_by_key<'k>(keys: impl Iterator<Item = &'k String>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for key in keys {
        *counts.entry(key.clone()).or_default() += 1;
    }
    counts
}

/// Starts a call in its own session.
fn spawn_call(gate: &TestGateway, tool: &'static str, key: &str) -> JoinHandle<Value> {
    let (client, key) = (gate.client().in_session(key), key.to_owned());
    tokio::spawn(async move { client.call(tool, json!({"key": key, "how": "again"})).await })
}

/// Starts many reads and one payment.
fn spawn_reads_and_payment(gate: &TestGateway) -> (Vec<JoinHandle<Value>>, JoinHandle<Value>) {
    (
        (0..READ_COUNT).map(|n| spawn_call(gate, "look", &format!("read-{n}"))).collect(),
        spawn_call(gate, "pay", "pay"),
    )
}

/// Checks that all reads were repeated and answered, and that the payment was sent once and is
/// pending.
async fn assert_reads_answered_and_payment_unknown(
    gate: TestGateway,
    (reads, pay): (Vec<JoinHandle<Value>>, JoinHandle<Value>),
    call_counts: impl Fn() -> BTreeMap<String, usize>,
) {
    for read in reads {
        let result = read.await.unwrap();
        assert!(result["_meta"]["toolgate/error"].is_null(), "{result}");
    }
    let error = pay.await.unwrap()["_meta"]["toolgate/error"].clone();
    assert_eq!(
        (&error["code"], &error["effects"]),
        (&json!("upstream_unavailable"), &json!("unknown")),
        "{error}"
    );
    assert_eq!(gate.gateway.runtime().pending_calls().await.unwrap().len(), 1);
    let mut expected: BTreeMap<String, usize> =
        (0..READ_COUNT).map(|n| (format!("read-{n}"), 2)).collect();
    expected.insert("pay".to_owned(), 1);
    let mut found = call_counts();
    found.remove("other");
    assert_eq!(found, expected);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn running_reads_are_repeated_after_lost_session() {
    let (host, config) = DroppingServer::start(false).await;
    let gate = TestGateway::open(&config).await;
    let running = spawn_reads_and_payment(&gate);
    wait_until("all calls run", async || host.call_counts().len() == READ_COUNT + 1).await;
    host.session_epoch.store(1, Ordering::SeqCst);
    let mut attempt = 0;
    wait_until("the lost session is detected", async || {
        attempt += 1;
        gate.client()
            .in_session(&format!("s{attempt}"))
            .call_code("look", json!({"key": "other"}))
            .await
            == "ok"
    })
    .await;
    assert_reads_answered_and_payment_unknown(gate, running, || host.call_counts()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn running_reads_are_repeated_after_broken_connections() {
    for modern in [true, false] {
        let (host, config) = DroppingServer::start(modern).await;
        let gate = TestGateway::open(&config).await;
        let running = spawn_reads_and_payment(&gate);
        wait_until("all calls run", async || host.call_counts().len() == READ_COUNT + 1).await;
        host.disconnects.send_replace(true);
        assert_reads_answered_and_payment_unknown(gate, running, || host.call_counts()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn circuit_breaker_opens_if_upstream_drops_every_call() {
    for modern in [true, false] {
        let (host, config) = DroppingServer::start(modern).await;
        let gate = TestGateway::open(&config).await;
        host.disconnects.send_replace(true);
        let mut attempt = 0;
        wait_until("the circuit breaker opens", async || {
            attempt += 1;
            let (key, before) = (format!("never-{attempt}"), host.call_counts().len());
            let error =
                spawn_call(&gate, "pay", &key).await.unwrap()["_meta"]["toolgate/error"].clone();
            let is_refused = error["message"].as_str().unwrap().contains("circuit breaker");
            assert!(
                !is_refused || (error["effects"] == "none" && host.call_counts().len() == before),
                "{modern}: {error}"
            );
            is_refused
        })
        .await;
        gate.shut_down().await;
    }
}

/// Counts the marks of a program by key.
fn mark_counts(path: &Path) -> BTreeMap<String, usize> {
    count_by_key(
        std::fs::read_to_string(path)
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect::<Vec<_>>()
            .iter(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn running_reads_are_repeated_after_program_crash() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("marks");
    let gate = TestGateway::open(&format!(
        "[upstreams.ill]\ncommand = {}\nargs = [\"--ill\", \"--tools\", \"87\"]\nenv = {{ FIXTURE_COUNTER = {} }}\n\
         [tools.look]\nkind = \"mcp\"\nupstream = \"ill\"\ntool = \"mark\"\neffect = \"read\"\n\
         [tools.pay]\nkind = \"mcp\"\nupstream = \"ill\"\ntool = \"mark\"\neffect = \"write\"\npolicy = \"open\"\n",
        json!(fixture_path()),
        json!(path)
    ))
    .await;
    let running = spawn_reads_and_payment(&gate);
    wait_until("all calls run", async || count_lines(&path) == READ_COUNT + 1).await;
    assert_eq!(kill_processes_with_number(87), 1);
    assert_reads_answered_and_payment_unknown(gate, running, || mark_counts(&path)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn late_answer_is_not_sent_to_restarted_program() {
    let home = tempfile::tempdir().unwrap();
    let gate = TestGateway::open(&format!(
        "[upstreams.ill]\ncommand = {}\nargs = [\"--ill\", \"--tools\", \"89\"]\nenv = {{ FIXTURE_COUNTER = {} }}\n\
         [tools.look]\nkind = \"mcp\"\nupstream = \"ill\"\ntool = \"mark\"\neffect = \"read\"\n\
         [tools.pay]\nkind = \"mcp\"\nupstream = \"ill\"\ntool = \"mark\"\neffect = \"write\"\npolicy = \"open\"\n",
        json!(fixture_path()),
        json!(home.path().join("marks"))
    ))
    .await;
    // The test does not answer the question.
    let suspended = gate
        .client()
        .in_session("s")
        .with_capabilities(json!({"elicitation": {}}))
        .call("look", json!({"key": "a", "how": "asks"}))
        .await;
    assert_eq!(suspended["resultType"], "input_required", "{suspended}");
    let program = processes_with_number(89);
    assert_eq!(kill_processes_with_number(89), 1);
    wait_until("the program has exited", async || program.iter().all(|pid| has_ended(*pid))).await;
    let mut attempt = 0;
    wait_until("another program is up", async || {
        attempt += 1;
        let client = gate.client().in_session(&format!("s{attempt}"));
        let error = client.call("pay", json!({"key": "pay", "how": "answer"})).await["_meta"]["toolgate/error"].clone();
        // A call that was not sent has no effect.
        assert!(error.is_null() || error["effects"] == "none", "{error}");
        error.is_null()
    })
    .await;
    assert!(gate.gateway.runtime().pending_calls().await.unwrap().is_empty());
    gate.shut_down().await;
}

/// Starts a server of an earlier revision that sends its epoch as a log message to sessions with
/// the level `debug`.
async fn start_logging_server(
    epoch: Arc<AtomicUsize>,
    levels: Arc<Mutex<BTreeMap<usize, Value>>>,
) -> String {
    serve_connections(move |mut stream| {
        let (epoch, levels) = (epoch.load(Ordering::SeqCst), Arc::clone(&levels));
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let session = format!("mcp-session-id: life-{epoch}");
            let response = match request["method"].as_str().unwrap_or_default() {
                "server/discover" => http_response("404 No", "text/html", "<p>"),
                "initialize" => {
                    let mut initialized = initialize_result();
                    initialized["capabilities"]["logging"] = json!({});
                    json_rpc_result(&request, initialized).replacen("\r\n", &format!("\r\n{session}\r\n"), 1)
                }
                "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                _ if !head.contains(&session) => http_response("404 Not Found", "text/plain", ""),
                "ping" => json_rpc_result(&request, json!({})),
                "logging/setLevel" => {
                    levels.lock().unwrap().insert(epoch, request["params"]["level"].clone());
                    json_rpc_result(&request, json!({}))
                }
                "tools/list" => {
                    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
                    json_rpc_result(&request, json!({"tools": [{"name": "look", "description": "Looks.", "inputSchema": schema}]}))
                }
                "tools/call" => {
                    let params = json!({"level": "debug", "data": epoch});
                    let notification = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": params});
                    let done = json!({"jsonrpc": "2.0", "id": request["id"], "result": {"content": [{"type": "text", "text": "done"}]}});
                    match levels.lock().unwrap().get(&epoch) == Some(&json!("debug")) {
                        true => http_response("200 OK", "text/event-stream", &format!("data: {notification}\n\ndata: {done}\n\n")),
                        false => http_response("200 OK", "application/json", &done.to_string()),
                    }
                }
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn log_level_is_set_again_after_reconnect() {
    let (epoch, levels) =
        (Arc::<AtomicUsize>::default(), Arc::<Mutex<BTreeMap<usize, Value>>>::default());
    let address = start_logging_server(Arc::clone(&epoch), Arc::clone(&levels)).await;
    let gate = TestGateway::open(&format!(
        "[upstreams.t]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n"
    ))
    .await;
    let mut client = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
    assert!(
        client
            .call_method("logging/setLevel", json!({"level": "debug"}))
            .await
            .get("result")
            .is_some()
    );
    for round in 0..2 {
        epoch.store(round, Ordering::SeqCst);
        for turn in 0..2 {
            // The first call after the change loses its session.
            let answer = client
                .call_method(
                    "tools/call",
                    json!({"name": "look", "arguments": {"n": 2 * round + turn}}),
                )
                .await;
            assert_eq!(answer["result"]["content"][0]["text"], "done", "{round}: {answer}");
            wait_until("the log level is set", async || {
                levels.lock().unwrap().contains_key(&round)
            })
            .await;
        }
        client
            .inbox
            .wait_for(|message| {
                message["method"] == "notifications/message"
                    && message["params"]["data"] == json!(round)
            })
            .await;
    }
    drop(client);
    gate.shut_down().await;
}
