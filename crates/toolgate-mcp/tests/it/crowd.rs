//! Sixty-four clients at work while an upstream falls ill: who is not concerned is answered, nothing happens twice, and nothing is
//! left of it.

mod big;
mod leaving;
mod living;
mod wrong;

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
use toolgate_mcp::{Health, Status};

use crate::faults::{Crowd, config};
use crate::old::{about, answer, listen, request, result};
use crate::support::{Client, Gate, alone, children, fixture, kill, processes, until};

/// A tool with an effect, of the upstream that is ill.
const MARK: &str = "[tools.ill_mark]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"write\"\npolicy = \"open\"\n";
/// What the fixture can be told to do once it has left its mark: these it answers, and those it never does.
const ANSWERED: [&str; 4] = ["answer", "slow", "garbage", "twice"];
const UNANSWERED: [&str; 3] = ["half", "glued", "hang"];

/// The fixture that does as it is told, known among the processes by a number.
fn ill(home: &Path, number: u8, more: &str) -> String {
    format!(
        "command = {}\nargs = [\"--ill\", \"--tools\", \"{number}\"]\nenv = {{ FIXTURE_COUNTER = {}, FIXTURE_REVISION = {} }}\n\
         undeclared = \"read\"\nconcurrency = 64\n{more}\n{MARK}",
        json!(fixture()),
        json!(home.join("effects")),
        json!(home.join("revision"))
    )
}

fn health(gate: &Gate) -> Health {
    gate.gateway.health().into_iter().find(|health| health.name == "ill").unwrap()
}

fn is_up(gate: &Gate) -> bool {
    matches!(health(gate).status, Status::Up { .. })
}

fn held(gate: &Gate) -> Vec<String> {
    health(gate).held.into_iter().map(|change| change.tool).collect()
}

/// What is said to a call with an effect. It is in another session each time, or it would be refused as a loop.
async fn mark(client: &Client, key: &str, how: &str, turn: usize) -> Value {
    let meta = json!({"toolgate/idempotencyKey": key});
    let params = json!({"name": "ill_mark", "arguments": {"key": key, "how": how}, "_meta": meta});
    let (status, answer) = client.in_session(&format!("{key}-{turn}")).ask("tools/call", params).await;
    assert!(answer["result"]["_meta"].is_object(), "{key}: {status} {answer}");
    answer["result"]["_meta"].clone()
}

/// What clients were told of their effects, to be held against what happened.
struct Books {
    /// A line for each time that something happened.
    file: PathBuf,
    /// Whether it is sure that it happened, by key.
    told: Mutex<BTreeMap<String, bool>>,
}

impl Books {
    fn open(home: &Path) -> Arc<Self> {
        Arc::new(Self { file: home.join("effects"), told: Mutex::default() })
    }

    /// It happens.
    fn note(&self, key: &str) {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&self.file).unwrap();
        file.write_all(format!("{key}\n").as_bytes()).unwrap();
    }

    /// Wants something done and does not let go: it is asked for until it may have happened, and then once more. Whether it is sure.
    async fn want(&self, client: &Client, key: &str, how: &str) -> bool {
        for turn in 0..600 {
            let error = mark(client, key, how, turn).await["toolgate/error"].clone();
            if error["effects"] == "none" {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            let (sure, again) = (error.is_null(), mark(client, key, how, 600).await);
            match sure {
                true => assert_eq!(again["toolgate/replayed"], json!(true), "{key}: {again}"),
                false => assert_eq!(again["toolgate/error"]["code"], "pending_reconciliation", "{key}: {error} {again}"),
            }
            self.told.lock().unwrap().insert(key.to_owned(), sure);
            return sure;
        }
        panic!("{key} was never taken");
    }

    /// How many are sure so far.
    fn sure(&self) -> usize {
        self.told.lock().unwrap().values().filter(|sure| **sure).count()
    }

    /// Nothing happened twice or unasked, and what was answered happened. How many are sure, and how many are not.
    fn balance(&self) -> (usize, usize) {
        let mut happened = BTreeMap::<String, usize>::new();
        for key in std::fs::read_to_string(&self.file).unwrap_or_default().lines() {
            *happened.entry(key.to_owned()).or_default() += 1;
        }
        let told = self.told.lock().unwrap();
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

/// So many who read, and so many whose calls have effects, one call after the other until it is over.
fn at_work(client: &Client, books: &Arc<Books>, over: &Arc<AtomicBool>, readers: usize, writers: usize) -> Vec<JoinHandle<()>> {
    let one = |number: usize| {
        let (client, books, over) = (client.clone(), Arc::clone(books), Arc::clone(over));
        tokio::spawn(async move {
            let mut turn = 0;
            while !over.load(Ordering::Relaxed) {
                let name = format!("w{number}-{turn}");
                if number < readers {
                    insist(&client, &name).await;
                } else {
                    books.want(&client, &name, "slow").await;
                }
                turn += 1;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
    };
    (0..readers + writers).map(one).collect()
}

/// A read, repeated for as long as the answer is that it may be.
async fn insist(client: &Client, text: &str) {
    for turn in 0..600 {
        let said = client.in_session(&format!("{text}-{turn}")).call("ill_echo", json!({"text": text})).await;
        let error = &said["_meta"]["toolgate/error"];
        if error.is_null() {
            assert_eq!(said["structuredContent"]["text"], json!(text), "{said}");
            return;
        }
        assert_eq!((&error["isRetryable"], &error["effects"]), (&json!(true), &json!("none")), "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("`{text}` was never answered");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_said_between_answers_costs_a_call_at_most_and_makes_none_twice() {
    let home = tempfile::tempdir().unwrap();
    let books = Books::open(home.path());
    let gate = Gate::open(&config(&ill(home.path(), 80, "timeout = \"3s\""))).await;
    let client = gate.client();
    let crowd = Crowd::of(&client, &["well_echo"]);
    let all: Vec<&str> = ANSWERED.into_iter().chain(UNANSWERED).collect();
    let (all, wanted, client) = (&all, &books, &client);
    let one = |number: usize| async move {
        let mut came = Vec::new();
        // Each begins elsewhere, so that all of it happens at the same time.
        for how in all.iter().cycle().skip(number).take(all.len()) {
            came.push((*how, wanted.want(client, &format!("{how}-{number}"), how).await));
        }
        came
    };
    let came: Vec<(&str, bool)> = join_all((0..14).map(one)).await.into_iter().flatten().collect();
    // Half a line takes one more line with it, so some of the others are lost as well.
    assert!(ANSWERED.iter().all(|how| came.contains(&(*how, true))), "{came:?}");
    assert!(!UNANSWERED.iter().any(|how| came.contains(&(*how, true))), "{came:?}");
    insist(client, "after").await;
    assert_eq!(health(&gate).starts, 1, "it is not started anew for that");
    crowd.leave().await;
    let (sure, unsure) = books.balance();
    assert!(sure >= 4 && unsure >= 3 * 14, "{sure} {unsure}");
    gate.end().await;
    assert!(processes(80).is_empty(), "{:?}", children());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_changes_holds_back_what_has_changed_and_nothing_else() {
    let home = tempfile::tempdir().unwrap();
    let revision = |text: &str| std::fs::write(home.path().join("revision"), text).unwrap();
    let gate = Gate::open(&config(&ill(home.path(), 81, ""))).await;
    let client = gate.client();
    let mut turn = 0;
    let mut code = async |tool: &str| {
        turn += 1;
        client.in_session(&format!("s{turn}")).code(tool, json!({})).await
    };
    assert_eq!(code("ill_talk").await, "ok");
    // It says so: nobody misses an answer, not even of the same upstream.
    let crowd = Crowd::of(&client, &["well_echo", "ill_echo"]);
    revision("2");
    assert_eq!(code("ill_announce").await, "ok");
    until("the change is seen", async || held(&gate) == ["talk", "whisper"]).await;
    until("what is new and harmless is offered", async || client.tools().await.contains(&"ill_late".to_owned())).await;
    assert_eq!((code("ill_late").await, code("ill_talk").await), ("ok".to_owned(), "definition_changed".to_owned()));
    assert_eq!(code("ill_whisper").await, "unknown_tool");
    let (_, listed) = client.ask("tools/list", json!({})).await;
    let listed = listed["result"]["tools"].as_array().unwrap();
    let talk = listed.iter().find(|tool| tool["name"] == "ill_talk").unwrap();
    assert_eq!(talk["description"], "Talks.", "it is shown as it was accepted");
    assert!(!listed.iter().any(|tool| tool["name"] == "ill_whisper"));
    crowd.leave().await;
    assert_eq!(health(&gate).starts, 1);
    // It says nothing, and is another one when it comes back.
    let crowd = Crowd::of(&client, &["well_echo"]);
    revision("3");
    kill(81);
    until("the change is seen", async || held(&gate) == ["late", "whisper"]).await;
    until("what is new and harmless is offered", async || client.tools().await.contains(&"ill_later".to_owned())).await;
    assert_eq!(code("ill_late").await, "definition_changed");
    for tool in ["ill_talk", "ill_later", "ill_announce"] {
        assert_eq!(code(tool).await, "ok", "{tool}");
    }
    insist(&client, "as-before").await;
    crowd.leave().await;
    gate.end().await;
}

/// The sessions of an upstream.
#[derive(Default)]
struct Sessions {
    open: BTreeSet<String>,
    begun: usize,
    /// How often somebody came with one that is not known any more.
    refused: usize,
}

/// What an upstream of an earlier revision says that has sessions.
fn reply(head: &str, asked: &Value, sessions: &mut Sessions, books: &Books) -> String {
    let session = head.lines().find_map(|line| line.strip_prefix("mcp-session-id: ")).unwrap_or_default().trim();
    let argument = |name: &str| asked.pointer(&format!("/params/arguments/{name}")).and_then(Value::as_str).unwrap_or_default();
    let structured = |value: Value| result(asked, json!({"content": [], "structuredContent": value}));
    match (asked["method"].as_str().unwrap_or_default(), asked.pointer("/params/name").and_then(Value::as_str)) {
        ("server/discover", _) => answer("404 No", "text/html", "<p>"),
        ("initialize", _) => {
            sessions.begun += 1;
            let id = format!("s-{}", sessions.begun);
            let said = result(asked, about()).replacen("\r\n", &format!("\r\nmcp-session-id: {id}\r\n"), 1);
            sessions.open.insert(id);
            said
        }
        _ if head.starts_with("get ") => answer("405 No", "text/plain", ""),
        _ if head.starts_with("delete ") => {
            sessions.open.remove(session);
            answer("200 OK", "text/plain", "")
        }
        _ if !sessions.open.contains(session) => {
            sessions.refused += 1;
            // Some say it by the status, and some in words.
            let words = json!({"jsonrpc": "2.0", "error": {"code": -32000, "message": "No valid session ID provided"}, "id": null});
            match sessions.refused % 2 {
                0 => answer("404 Not Found", "text/plain", ""),
                _ => answer("400 Bad Request", "application/json", &words.to_string()),
            }
        }
        ("tools/list", _) => {
            let text = json!({"type": "string"});
            let schema = json!({"type": "object", "properties": {"text": text, "key": text, "how": text}});
            let tools = ["echo", "mark"].map(|name| json!({"name": name, "description": "Does.", "inputSchema": schema}));
            result(asked, json!({"tools": tools}))
        }
        ("tools/call", Some("mark")) => {
            books.note(argument("key"));
            structured(json!({"done": true}))
        }
        ("tools/call", _) => structured(json!({"text": argument("text")})),
        ("ping", _) => result(asked, json!({})),
        _ => answer("202 Accepted", "text/plain", ""),
    }
}

async fn with_sessions(sessions: &Arc<Mutex<Sessions>>, books: &Arc<Books>) -> String {
    let (sessions, books) = (Arc::clone(sessions), Arc::clone(books));
    listen(move |mut stream| {
        let (sessions, books) = (Arc::clone(&sessions), Arc::clone(&books));
        async move {
            let Some((head, asked)) = request(&mut stream).await else { return };
            let said = reply(&head, &asked, &mut sessions.lock().unwrap(), &books);
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
async fn sessions_that_expire_under_a_crowd_lose_no_read_and_double_no_effect() {
    let home = tempfile::tempdir().unwrap();
    let (books, sessions) = (Books::open(home.path()), Arc::<Mutex<Sessions>>::default());
    let address = with_sessions(&sessions, &books).await;
    let gate = Gate::open(&config(&format!("url = \"http://{address}/mcp\"\nundeclared = \"read\"\n{MARK}"))).await;
    let crowd = Crowd::of(&gate.client(), &["well_echo"]);
    let over = Arc::<AtomicBool>::default();
    let clients = at_work(&gate.client(), &books, &over, 32, 32);
    for round in 1..=3 {
        until("it is there", async || is_up(&gate)).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        sessions.lock().unwrap().open.clear();
        until("another session is begun", async || sessions.lock().unwrap().begun > round).await;
    }
    until("enough has happened to tell", async || books.sure() >= 32).await;
    over.store(true, Ordering::Relaxed);
    join_all(clients).await.into_iter().for_each(Result::unwrap);
    crowd.leave().await;
    let ((sure, unsure), refused) = (books.balance(), sessions.lock().unwrap().refused);
    assert!(sure >= 32 && refused >= 3, "{sure} {unsure} {refused}");
    gate.end().await;
    until("the last session is closed", async || sessions.lock().unwrap().open.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_whose_session_was_lost_is_made_again_in_another() {
    let home = tempfile::tempdir().unwrap();
    let (books, sessions) = (Books::open(home.path()), Arc::<Mutex<Sessions>>::default());
    let address = with_sessions(&sessions, &books).await;
    let gate = Gate::open(&config(&format!("url = \"http://{address}/mcp\"\nundeclared = \"read\"\n{MARK}"))).await;
    until("it is there", async || is_up(&gate)).await;
    sessions.lock().unwrap().open.clear();
    // Its client asks once.
    let said = gate.client().call("ill_echo", json!({"text": "again"})).await;
    assert_eq!(said["structuredContent"]["text"], json!("again"), "{said}");
    assert!(sessions.lock().unwrap().begun > 1);
    assert!(sessions.lock().unwrap().refused > 0);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_another_version_nor_another_configuration_makes_anything_happen_twice() {
    let home = tempfile::tempdir().unwrap();
    let books = Books::open(home.path());
    let text = |seconds: u8| config(&ill(home.path(), 82, &format!("timeout = \"{seconds}s\"")));
    let gate = Gate::open(&text(50)).await;
    let crowd = Crowd::of(&gate.client(), &["well_echo"]);
    let over = Arc::<AtomicBool>::default();
    let clients = at_work(&gate.client(), &books, &over, 0, 32);
    tokio::time::sleep(Duration::from_millis(400)).await;
    std::fs::write(home.path().join("revision"), "2").unwrap();
    kill(82);
    until("another version is there", async || health(&gate).starts > 1 && is_up(&gate)).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    // Each of these is reached in another way than the one before, and takes its place while calls are under way.
    for seconds in 51..55 {
        gate.reload(&text(seconds)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    until("enough has happened to tell", async || books.sure() >= 32).await;
    over.store(true, Ordering::Relaxed);
    join_all(clients).await.into_iter().for_each(Result::unwrap);
    crowd.leave().await;
    let (sure, unsure) = books.balance();
    assert!(sure >= 32, "{sure} {unsure}");
    gate.end().await;
    until("all of them are gone", async || processes(82).is_empty()).await;
}

/// In a process of its own, where nobody else opens files.
#[test]
fn nothing_is_left_of_a_crowd() {
    alone("crowd::counted");
}

fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

/// Files that are open in this process.
fn files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// What is counted, once it stays as it is.
async fn settled<T: PartialEq + Copy>(count: impl Fn() -> T) -> T {
    let mut before = count();
    until("it is settled", async || {
        let last = std::mem::replace(&mut before, count());
        tokio::time::sleep(Duration::from_secs(1)).await;
        before == last && before == count()
    })
    .await;
    before
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by nothing_is_left_of_a_crowd"]
async fn counted() {
    let home = tempfile::tempdir().unwrap();
    let (books, sessions) = (Books::open(home.path()), Arc::<Mutex<Sessions>>::default());
    let address = with_sessions(&sessions, &books).await;
    let text = config(&ill(home.path(), 83, "")) + &format!("[upstreams.old]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\n");
    let mut before = (0, 0);
    for round in 1..=4 {
        let gate = Gate::open(&text).await;
        let crowd = Crowd::of(&gate.client(), &["well_echo"]);
        assert_eq!(sessions.lock().unwrap().open.len(), 1, "one for all clients");
        kill(83);
        sessions.lock().unwrap().open.clear();
        let (client, mut turn) = (gate.client(), 0);
        until("its session is begun anew", async || {
            turn += 1;
            client.in_session(&format!("{round}-{turn}")).code("old_echo", json!({"text": "x"})).await == "ok"
        })
        .await;
        insist(&client, &format!("round-{round}")).await;
        assert_eq!((processes(83).len(), sessions.lock().unwrap().open.len()), (1, 1), "what is gone was replaced, once");
        crowd.leave().await;
        drop(client);
        gate.end().await;
        until("all of it is gone", async || children().is_empty() && sessions.lock().unwrap().open.is_empty()).await;
        // What is opened once for all is open after the first time.
        if round == 1 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            before = (files(), tasks());
        }
    }
    // One a gateway would be three.
    until("its files are closed and its tasks are over", async || files() <= before.0 + 2 && tasks() <= before.1 + 2).await;
}

/// A client of an earlier revision: opens a session, makes a call in it, and says what it is called.
async fn older(http: &reqwest::Client, url: &str) -> String {
    let post = async |session: &str, body: Value| {
        let request = http.post(url).header("accept", "application/json, text/event-stream").json(&body);
        let request = if session.is_empty() { request } else { request.header("mcp-session-id", session) };
        request.send().await.unwrap()
    };
    let about = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}});
    let answer = post("", json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about})).await;
    let session = answer.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    answer.text().await.unwrap();
    post(&session, json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).await.text().await.unwrap();
    let call = json!({"name": "calc", "arguments": {"expression": "20+1"}});
    let said = post(&session, json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})).await.text().await.unwrap();
    assert!(said.contains("\"isError\":false"), "{said}");
    session
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_its_client_ends_is_gone() {
    let gate = Gate::open("[tools.calc]\nkind = \"builtin\"\n").await;
    // A connection that is not kept ends with its answer: what remains is the gateway's.
    let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build().unwrap();
    let (url, before) = (format!("{}/mcp", gate.url), tasks());
    let sessions: Vec<String> = join_all((0..64).map(|_| older(&http, &url))).await;
    assert!(tasks() >= before + 64, "each session is at least a task: {} {before}", tasks());
    for session in &sessions {
        assert!(http.delete(&url).header("mcp-session-id", session).send().await.unwrap().status().is_success());
    }
    until("they are over", async || tasks() <= before + 4).await;
    let late = http.delete(&url).header("mcp-session-id", &sessions[0]).send().await.unwrap();
    assert_eq!(late.status().as_u16(), 404);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_nobody_ends_ends_with_the_gateway() {
    let before = tasks();
    let gate = Gate::open("[tools.calc]\nkind = \"builtin\"\n").await;
    let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build().unwrap();
    let url = format!("{}/mcp", gate.url);
    join_all((0..16).map(|_| older(&http, &url))).await;
    gate.end().await;
    until("they are over", async || tasks() <= before + 2).await;
}
