//! Sixty-four clients at work while an upstream falls ill: who is not concerned is answered,
//! nothing happens twice, and nothing is left of it.

mod client_churn;
mod garbage_upstreams;
mod huge_results;
mod upstream_churn;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::task::JoinHandle;
use toolgate_mcp::{UpstreamHealth, UpstreamStatus};

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{
    McpTestClient, TestGateway, child_processes, fixture_path, kill_processes_with_number,
    processes_with_number, run_in_own_process, wait_until,
};
use crate::upstream_faults::{ClientCrowd, well_and_ill_config};

/// A tool with an effect, of the upstream that is ill.
const MARK_TOOL_CONFIG: &str =
    "[tools.ill_mark]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"write\"\npolicy = \"open\"\n";
/// What the fixture can be told to do once it has left its mark: these it answers, and those it
/// never does.
const ANSWERED_MODES: [&str; 4] = ["answer", "slow", "garbage", "twice"];
const UNANSWERED_MODES: [&str; 3] = ["half", "glued", "hang"];

/// The fixture that does as it is told, known among the processes by a number.
fn scripted_upstream_config(home: &Path, number: u8, more: &str) -> String {
    format!(
        "command = {}\nargs = [\"--ill\", \"--tools\", \"{number}\"]\nenv = {{ FIXTURE_COUNTER = {}, FIXTURE_REVISION = {} }}\n\
         undeclared = \"read\"\nconcurrency = 64\n{more}\n{MARK_TOOL_CONFIG}",
        json!(fixture_path()),
        json!(home.join("effects")),
        json!(home.join("revision"))
    )
}

fn health(gate: &TestGateway) -> UpstreamHealth {
    gate.gateway.health().into_iter().find(|health| health.name == "ill").unwrap()
}

fn is_up(gate: &TestGateway) -> bool {
    matches!(health(gate).status, UpstreamStatus::Up { .. })
}

fn quarantined_tools(gate: &TestGateway) -> Vec<String> {
    health(gate).held.into_iter().map(|change| change.tool).collect()
}

/// What is said to a call with an effect. It is in another session each time, or it would be
/// refused as a loop.
async fn call_mark(client: &McpTestClient, key: &str, how: &str, turn: usize) -> Value {
    let meta = json!({"toolgate/idempotencyKey": key});
    let params = json!({"name": "ill_mark", "arguments": {"key": key, "how": how}, "_meta": meta});
    let (status, answer) =
        client.in_session(&format!("{key}-{turn}")).call_method("tools/call", params).await;
    assert!(answer["result"]["_meta"].is_object(), "{key}: {status} {answer}");
    answer["result"]["_meta"].clone()
}

/// What clients were told of their effects, to be held against what happened.
struct EffectJournal {
    /// A line for each time that something happened.
    file: PathBuf,
    /// Whether it is sure that it happened, by key.
    certain_by_key: Mutex<BTreeMap<String, bool>>,
}

impl EffectJournal {
    fn open(home: &Path) -> Arc<Self> {
        Arc::new(Self { file: home.join("effects"), certain_by_key: Mutex::default() })
    }

    /// It happens.
    fn record(&self, key: &str) {
        let mut file =
            std::fs::OpenOptions::new().create(true).append(true).open(&self.file).unwrap();
        file.write_all(format!("{key}\n").as_bytes()).unwrap();
    }

    /// Wants something done and does not let go: it is asked for until it may have happened, and
    /// then once more. Whether it is sure.
    async fn call_until_effect(&self, client: &McpTestClient, key: &str, how: &str) -> bool {
        for turn in 0..600 {
            let error = call_mark(client, key, how, turn).await["toolgate/error"].clone();
            if error["effects"] == "none" {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            let (sure, again) = (error.is_null(), call_mark(client, key, how, 600).await);
            match sure {
                true => assert_eq!(again["toolgate/replayed"], json!(true), "{key}: {again}"),
                false => assert_eq!(
                    again["toolgate/error"]["code"], "pending_reconciliation",
                    "{key}: {error} {again}"
                ),
            }
            self.certain_by_key.lock().unwrap().insert(key.to_owned(), sure);
            return sure;
        }
        panic!("{key} was never taken");
    }

    /// How many are sure so far.
    fn certain_count(&self) -> usize {
        self.certain_by_key.lock().unwrap().values().filter(|sure| **sure).count()
    }

    /// Nothing happened twice or unasked, and what was answered happened. How many are sure, and
    /// how many are not.
    fn check_effects(&self) -> (usize, usize) {
        let mut happened = BTreeMap::<String, usize>::new();
        for key in std::fs::read_to_string(&self.file).unwrap_or_default().lines() {
            *happened.entry(key.to_owned()).or_default() += 1;
        }
        let told = self.certain_by_key.lock().unwrap();
        for (key, times) in &happened {
            assert!(*times == 1 && told.contains_key(key), "`{key}` happened {times} times");
        }
        for (key, sure) in told.iter() {
            assert!(!sure || happened.contains_key(key), "`{key}` was answered and never happened");
        }
        let sure = told.values().filter(|sure| **sure).count();
        (sure, told.len() - sure)
    }
}

/// So many who read, and so many whose calls have effects, one call after the other until it is
/// over.
fn spawn_clients(
    client: &McpTestClient,
    books: &Arc<EffectJournal>,
    over: &Arc<AtomicBool>,
    readers: usize,
    writers: usize,
) -> Vec<JoinHandle<()>> {
    let one = |number: usize| {
        let (client, books, over) = (client.clone(), Arc::clone(books), Arc::clone(over));
        tokio::spawn(async move {
            let mut turn = 0;
            while !over.load(Ordering::Relaxed) {
                let name = format!("w{number}-{turn}");
                if number < readers {
                    read_until_ok(&client, &name).await;
                } else {
                    books.call_until_effect(&client, &name, "slow").await;
                }
                turn += 1;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
    };
    (0..readers + writers).map(one).collect()
}

/// A read, repeated for as long as the answer is that it may be.
async fn read_until_ok(client: &McpTestClient, text: &str) {
    for turn in 0..600 {
        let said = client
            .in_session(&format!("{text}-{turn}"))
            .call("ill_echo", json!({"text": text}))
            .await;
        let error = &said["_meta"]["toolgate/error"];
        if error.is_null() {
            assert_eq!(said["structuredContent"]["text"], json!(text), "{said}");
            return;
        }
        assert_eq!(
            (&error["isRetryable"], &error["effects"]),
            (&json!(true), &json!("none")),
            "{error}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("`{text}` was never answered");
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_messages_lose_one_call_and_repeat_none() {
    let home = tempfile::tempdir().unwrap();
    let books = EffectJournal::open(home.path());
    let gate = TestGateway::open(&well_and_ill_config(&scripted_upstream_config(
        home.path(),
        80,
        "timeout = \"3s\"",
    )))
    .await;
    let client = gate.client();
    let crowd = ClientCrowd::start_with_tools(&client, &["well_echo"]);
    let all: Vec<&str> = ANSWERED_MODES.into_iter().chain(UNANSWERED_MODES).collect();
    let (all, wanted, client) = (&all, &books, &client);
    let one = |number: usize| async move {
        let mut came = Vec::new();
        // Each begins elsewhere, so that all of it happens at the same time.
        for how in all.iter().cycle().skip(number).take(all.len()) {
            came.push((
                *how,
                wanted.call_until_effect(client, &format!("{how}-{number}"), how).await,
            ));
        }
        came
    };
    let came: Vec<(&str, bool)> = join_all((0..14).map(one)).await.into_iter().flatten().collect();
    // Half a line takes one more line with it, so some of the others are lost as well.
    assert!(ANSWERED_MODES.iter().all(|how| came.contains(&(*how, true))), "{came:?}");
    assert!(!UNANSWERED_MODES.iter().any(|how| came.contains(&(*how, true))), "{came:?}");
    read_until_ok(client, "after").await;
    assert_eq!(health(&gate).starts, 1, "it is not started anew for that");
    crowd.finish().await;
    let (sure, unsure) = books.check_effects();
    assert!(sure >= 4 && unsure >= 3 * 14, "{sure} {unsure}");
    gate.shut_down().await;
    assert!(processes_with_number(80).is_empty(), "{:?}", child_processes());
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_list_quarantines_only_changed_tools() {
    let home = tempfile::tempdir().unwrap();
    let revision = |text: &str| std::fs::write(home.path().join("revision"), text).unwrap();
    let gate =
        TestGateway::open(&well_and_ill_config(&scripted_upstream_config(home.path(), 81, "")))
            .await;
    let client = gate.client();
    let mut turn = 0;
    let mut code = async |tool: &str| {
        turn += 1;
        client.in_session(&format!("s{turn}")).call_code(tool, json!({})).await
    };
    assert_eq!(code("ill_talk").await, "ok");
    // It says so: nobody misses an answer, not even of the same upstream.
    let crowd = ClientCrowd::start_with_tools(&client, &["well_echo", "ill_echo"]);
    revision("2");
    assert_eq!(code("ill_announce").await, "ok");
    wait_until("the change is seen", async || quarantined_tools(&gate) == ["talk", "whisper"])
        .await;
    wait_until("what is new and harmless is offered", async || {
        client.tool_names().await.contains(&"ill_late".to_owned())
    })
    .await;
    assert_eq!(
        (code("ill_late").await, code("ill_talk").await),
        ("ok".to_owned(), "definition_changed".to_owned())
    );
    assert_eq!(code("ill_whisper").await, "unknown_tool");
    let (_, listed) = client.call_method("tools/list", json!({})).await;
    let listed = listed["result"]["tools"].as_array().unwrap();
    let talk = listed.iter().find(|tool| tool["name"] == "ill_talk").unwrap();
    assert_eq!(talk["description"], "Talks.", "it is shown as it was accepted");
    assert!(!listed.iter().any(|tool| tool["name"] == "ill_whisper"));
    crowd.finish().await;
    assert_eq!(health(&gate).starts, 1);
    // It says nothing, and is another one when it comes back.
    let crowd = ClientCrowd::start_with_tools(&client, &["well_echo"]);
    revision("3");
    kill_processes_with_number(81);
    wait_until("the change is seen", async || quarantined_tools(&gate) == ["late", "whisper"])
        .await;
    wait_until("what is new and harmless is offered", async || {
        client.tool_names().await.contains(&"ill_later".to_owned())
    })
    .await;
    assert_eq!(code("ill_late").await, "definition_changed");
    for tool in ["ill_talk", "ill_later", "ill_announce"] {
        assert_eq!(code(tool).await, "ok", "{tool}");
    }
    read_until_ok(&client, "as-before").await;
    crowd.finish().await;
    gate.shut_down().await;
}

/// The sessions of an upstream.
#[derive(Default)]
struct FakeUpstreamSessions {
    open: BTreeSet<String>,
    opened_count: usize,
    /// How often somebody came with one that is not known any more.
    refused_count: usize,
}

/// What an upstream of an earlier revision says that has sessions.
fn session_server_reply(
    head: &str,
    asked: &Value,
    sessions: &mut FakeUpstreamSessions,
    books: &EffectJournal,
) -> String {
    let session = head
        .lines()
        .find_map(|line| line.strip_prefix("mcp-session-id: "))
        .unwrap_or_default()
        .trim();
    let argument = |name: &str| {
        asked
            .pointer(&format!("/params/arguments/{name}"))
            .and_then(Value::as_str)
            .unwrap_or_default()
    };
    let structured =
        |value: Value| json_rpc_result(asked, json!({"content": [], "structuredContent": value}));
    match (
        asked["method"].as_str().unwrap_or_default(),
        asked.pointer("/params/name").and_then(Value::as_str),
    ) {
        ("server/discover", _) => http_response("404 No", "text/html", "<p>"),
        ("initialize", _) => {
            sessions.opened_count += 1;
            let id = format!("s-{}", sessions.opened_count);
            let said = json_rpc_result(asked, initialize_result()).replacen(
                "\r\n",
                &format!("\r\nmcp-session-id: {id}\r\n"),
                1,
            );
            sessions.open.insert(id);
            said
        }
        _ if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
        _ if head.starts_with("delete ") => {
            sessions.open.remove(session);
            http_response("200 OK", "text/plain", "")
        }
        _ if !sessions.open.contains(session) => {
            sessions.refused_count += 1;
            // Some say it by the status, and some in words.
            let words = json!({"jsonrpc": "2.0", "error": {"code": -32000, "message": "No valid session ID provided"}, "id": null});
            match sessions.refused_count % 2 {
                0 => http_response("404 Not Found", "text/plain", ""),
                _ => http_response("400 Bad Request", "application/json", &words.to_string()),
            }
        }
        ("tools/list", _) => {
            let text = json!({"type": "string"});
            let schema =
                json!({"type": "object", "properties": {"text": text, "key": text, "how": text}});
            let tools = ["echo", "mark"]
                .map(|name| json!({"name": name, "description": "Does.", "inputSchema": schema}));
            json_rpc_result(asked, json!({"tools": tools}))
        }
        ("tools/call", Some("mark")) => {
            books.record(argument("key"));
            structured(json!({"done": true}))
        }
        ("tools/call", _) => structured(json!({"text": argument("text")})),
        ("ping", _) => json_rpc_result(asked, json!({})),
        _ => http_response("202 Accepted", "text/plain", ""),
    }
}

async fn start_session_server(
    sessions: &Arc<Mutex<FakeUpstreamSessions>>,
    books: &Arc<EffectJournal>,
) -> String {
    let (sessions, books) = (Arc::clone(sessions), Arc::clone(books));
    serve_connections(move |mut stream| {
        let (sessions, books) = (Arc::clone(&sessions), Arc::clone(&books));
        async move {
            let Some((head, asked)) = read_request(&mut stream).await else { return };
            let said = session_server_reply(&head, &asked, &mut sessions.lock().unwrap(), &books);
            // What is done is not said at once: whoever is cut off in between knows nothing.
            if asked.pointer("/params/name").is_some_and(|name| name == "mark") {
                tokio::time::sleep(Duration::from_millis(30)).await;
            }
            let _ = stream.write_all(said.as_bytes()).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_sessions_lose_no_read_and_repeat_no_effect() {
    let home = tempfile::tempdir().unwrap();
    let (books, sessions) =
        (EffectJournal::open(home.path()), Arc::<Mutex<FakeUpstreamSessions>>::default());
    let address = start_session_server(&sessions, &books).await;
    let gate = TestGateway::open(&well_and_ill_config(&format!(
        "url = \"http://{address}/mcp\"\nundeclared = \"read\"\n{MARK_TOOL_CONFIG}"
    )))
    .await;
    let crowd = ClientCrowd::start_with_tools(&gate.client(), &["well_echo"]);
    let over = Arc::<AtomicBool>::default();
    let clients = spawn_clients(&gate.client(), &books, &over, 32, 32);
    for round in 1..=3 {
        wait_until("it is there", async || is_up(&gate)).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        sessions.lock().unwrap().open.clear();
        wait_until("another session is begun", async || {
            sessions.lock().unwrap().opened_count > round
        })
        .await;
    }
    wait_until("enough has happened to tell", async || books.certain_count() >= 32).await;
    over.store(true, Ordering::Relaxed);
    join_all(clients).await.into_iter().for_each(Result::unwrap);
    crowd.finish().await;
    let ((sure, unsure), refused) = (books.check_effects(), sessions.lock().unwrap().refused_count);
    assert!(sure >= 32 && refused >= 3, "{sure} {unsure} {refused}");
    gate.shut_down().await;
    wait_until("the last session is closed", async || sessions.lock().unwrap().open.is_empty())
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn read_is_repeated_in_new_session_after_session_loss() {
    let home = tempfile::tempdir().unwrap();
    let (books, sessions) =
        (EffectJournal::open(home.path()), Arc::<Mutex<FakeUpstreamSessions>>::default());
    let address = start_session_server(&sessions, &books).await;
    let gate = TestGateway::open(&well_and_ill_config(&format!(
        "url = \"http://{address}/mcp\"\nundeclared = \"read\"\n{MARK_TOOL_CONFIG}"
    )))
    .await;
    wait_until("it is there", async || is_up(&gate)).await;
    sessions.lock().unwrap().open.clear();
    // Its client asks once.
    let said = gate.client().call("ill_echo", json!({"text": "again"})).await;
    assert_eq!(said["structuredContent"]["text"], json!("again"), "{said}");
    assert!(sessions.lock().unwrap().opened_count > 1);
    assert!(sessions.lock().unwrap().refused_count > 0);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_and_reload_repeat_no_effect() {
    let home = tempfile::tempdir().unwrap();
    let books = EffectJournal::open(home.path());
    let text = |seconds: u8| {
        well_and_ill_config(&scripted_upstream_config(
            home.path(),
            82,
            &format!("timeout = \"{seconds}s\""),
        ))
    };
    let gate = TestGateway::open(&text(50)).await;
    let crowd = ClientCrowd::start_with_tools(&gate.client(), &["well_echo"]);
    let over = Arc::<AtomicBool>::default();
    let clients = spawn_clients(&gate.client(), &books, &over, 0, 32);
    tokio::time::sleep(Duration::from_millis(400)).await;
    std::fs::write(home.path().join("revision"), "2").unwrap();
    kill_processes_with_number(82);
    wait_until("another version is there", async || health(&gate).starts > 1 && is_up(&gate)).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    // Each of these is reached in another way than the one before, and takes its place while calls
    // are under way.
    for seconds in 51..55 {
        gate.reload(&text(seconds)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    wait_until("enough has happened to tell", async || books.certain_count() >= 32).await;
    over.store(true, Ordering::Relaxed);
    join_all(clients).await.into_iter().for_each(Result::unwrap);
    crowd.finish().await;
    let (sure, unsure) = books.check_effects();
    assert!(sure >= 32, "{sure} {unsure}");
    gate.shut_down().await;
    wait_until("all of them are gone", async || processes_with_number(82).is_empty()).await;
}

/// In a process of its own, where nobody else opens files.
#[test]
fn crowd_of_clients_leaks_no_resources() {
    run_in_own_process("load::crowd_leaks_in_own_process");
}

fn alive_tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

/// Files that are open in this process.
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// What is counted, once it stays as it is.
async fn wait_until_stable<T: PartialEq + Copy>(count: impl Fn() -> T) -> T {
    let mut before = count();
    wait_until("it is settled", async || {
        let last = std::mem::replace(&mut before, count());
        tokio::time::sleep(Duration::from_secs(1)).await;
        before == last && before == count()
    })
    .await;
    before
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by crowd_of_clients_leaks_no_resources"]
async fn crowd_leaks_in_own_process() {
    let home = tempfile::tempdir().unwrap();
    let (books, sessions) =
        (EffectJournal::open(home.path()), Arc::<Mutex<FakeUpstreamSessions>>::default());
    let address = start_session_server(&sessions, &books).await;
    let text = well_and_ill_config(&scripted_upstream_config(home.path(), 83, ""))
        + &format!("[upstreams.old]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\n");
    let mut before = (0, 0);
    for round in 1..=4 {
        let gate = TestGateway::open(&text).await;
        let crowd = ClientCrowd::start_with_tools(&gate.client(), &["well_echo"]);
        assert_eq!(sessions.lock().unwrap().open.len(), 1, "one for all clients");
        kill_processes_with_number(83);
        sessions.lock().unwrap().open.clear();
        let (client, mut turn) = (gate.client(), 0);
        wait_until("its session is begun anew", async || {
            turn += 1;
            client
                .in_session(&format!("{round}-{turn}"))
                .call_code("old_echo", json!({"text": "x"}))
                .await
                == "ok"
        })
        .await;
        read_until_ok(&client, &format!("round-{round}")).await;
        assert_eq!(
            (processes_with_number(83).len(), sessions.lock().unwrap().open.len()),
            (1, 1),
            "what is gone was replaced, once"
        );
        crowd.finish().await;
        drop(client);
        gate.shut_down().await;
        wait_until("all of it is gone", async || {
            child_processes().is_empty() && sessions.lock().unwrap().open.is_empty()
        })
        .await;
        // What is opened once for all is open after the first time.
        if round == 1 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            before = (open_files(), alive_tasks());
        }
    }
    // One a gateway would be three.
    wait_until("its files are closed and its tasks are over", async || {
        open_files() <= before.0 + 2 && alive_tasks() <= before.1 + 2
    })
    .await;
}

/// A client of an earlier revision: opens a session, makes a call in it, and says what it is
/// called.
async fn open_legacy_session(http: &reqwest::Client, url: &str) -> String {
    let post = async |session: &str, body: Value| {
        let request =
            http.post(url).header("accept", "application/json, text/event-stream").json(&body);
        let request =
            if session.is_empty() { request } else { request.header("mcp-session-id", session) };
        request.send().await.unwrap()
    };
    let about = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}});
    let answer =
        post("", json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about})).await;
    let session = answer.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    answer.text().await.unwrap();
    post(&session, json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))
        .await
        .text()
        .await
        .unwrap();
    let call = json!({"name": "calc", "arguments": {"expression": "20+1"}});
    let said =
        post(&session, json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}))
            .await
            .text()
            .await
            .unwrap();
    assert!(said.contains("\"isError\":false"), "{said}");
    session
}

#[tokio::test(flavor = "multi_thread")]
async fn session_ended_by_client_is_removed() {
    let gate = TestGateway::open("[tools.calc]\nkind = \"builtin\"\n").await;
    // A connection that is not kept ends with its answer: what remains is the gateway's.
    let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build().unwrap();
    let (url, before) = (format!("{}/mcp", gate.url), alive_tasks());
    let sessions: Vec<String> = join_all((0..64).map(|_| open_legacy_session(&http, &url))).await;
    assert!(
        alive_tasks() >= before + 64,
        "each session is at least a task: {} {before}",
        alive_tasks()
    );
    for session in &sessions {
        assert!(
            http.delete(&url)
                .header("mcp-session-id", session)
                .send()
                .await
                .unwrap()
                .status()
                .is_success()
        );
    }
    wait_until("they are over", async || alive_tasks() <= before + 4).await;
    let late = http.delete(&url).header("mcp-session-id", &sessions[0]).send().await.unwrap();
    assert_eq!(late.status().as_u16(), 404);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn open_session_ends_with_gateway() {
    let before = alive_tasks();
    let gate = TestGateway::open("[tools.calc]\nkind = \"builtin\"\n").await;
    let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build().unwrap();
    let url = format!("{}/mcp", gate.url);
    join_all((0..16).map(|_| open_legacy_session(&http, &url))).await;
    gate.shut_down().await;
    wait_until("they are over", async || alive_tasks() <= before + 2).await;
}
