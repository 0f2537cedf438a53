//! An upstream is lost with calls under way, and comes back: reads are answered all the same, no effect is repeated, and what it was told
//! it is told again.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::entering::{Older, plain};
use crate::old::{about, answer, discovered, fresh, listen, request, result};
use crate::support::{Gate, fixture, kill, lines, processes, until};

/// So many reads at the same time: more than may fail in a row.
const MANY: usize = 8;

/// A server with a tool that reads and one that pays. Who calls for the first time is not answered, until it hangs up on all of them.
struct Host {
    modern: bool,
    /// How often it has forgotten whom it talks to, where it is of an earlier revision.
    life: AtomicUsize,
    hangs_up: watch::Sender<bool>,
    came: Mutex<Vec<String>>,
}

impl Host {
    async fn serve(modern: bool) -> (Arc<Self>, String) {
        let host = Arc::new(Self { modern, life: AtomicUsize::new(0), hangs_up: watch::Sender::new(false), came: Mutex::default() });
        let own = Arc::clone(&host);
        let address = listen(move |stream| Arc::clone(&own).hear(stream)).await;
        let tool = |name: &str, effect: &str| format!("[tools.{name}]\nkind = \"mcp\"\nupstream = \"h\"\n{effect}\n");
        let (look, pay) = (tool("look", "effect = \"read\""), tool("pay", "effect = \"write\"\npolicy = \"open\""));
        (host, format!("[upstreams.h]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\n{look}{pay}"))
    }

    /// How often each came.
    fn times(&self) -> BTreeMap<String, usize> {
        count(self.came.lock().unwrap().iter())
    }

    async fn hear(self: Arc<Self>, mut stream: TcpStream) {
        let Some((head, asked)) = request(&mut stream).await else { return };
        let session = format!("mcp-session-id: life-{}", self.life.load(Ordering::SeqCst));
        let with = |said: Value| fresh(&asked, said);
        let said = match asked["method"].as_str().unwrap_or_default() {
            "server/discover" if self.modern => discovered(&asked, "host", &json!({"tools": {}})),
            "server/discover" => answer("404 No", "text/html", "<p>"),
            "initialize" => result(&asked, about()).replacen("\r\n", &format!("\r\n{session}\r\n"), 1),
            "" if head.starts_with("get ") => answer("405 No", "text/plain", ""),
            _ if !self.modern && !head.contains(&session) => answer("404 Not Found", "text/plain", ""),
            "ping" => result(&asked, json!({})),
            "tools/list" => {
                let text = json!({"type": "string"});
                let schema = json!({"type": "object", "properties": {"key": text, "how": text}});
                let tools = ["look", "pay"].map(|name| json!({"name": name, "description": "Does.", "inputSchema": schema}));
                with(json!({"tools": tools}))
            }
            "tools/call" => {
                let key = asked.pointer("/params/arguments/key").and_then(Value::as_str).unwrap_or_default().to_owned();
                self.came.lock().unwrap().push(key.clone());
                if key.starts_with("never") || (key != "other" && self.times().get(&key) == Some(&1)) {
                    let _ = self.hangs_up.subscribe().wait_for(|over| *over).await;
                    return;
                }
                with(json!({"content": [{"type": "text", "text": "done"}]}))
            }
            _ => answer("202 Accepted", "text/plain", ""),
        };
        let _ = stream.write_all(said.as_bytes()).await;
    }
}

fn count<'k>(keys: impl Iterator<Item = &'k String>) -> BTreeMap<String, usize> {
    let mut times = BTreeMap::new();
    for key in keys {
        *times.entry(key.clone()).or_default() += 1;
    }
    times
}

/// A call that goes on by itself, in a session of its own.
fn begin(gate: &Gate, tool: &'static str, key: &str) -> JoinHandle<Value> {
    let (client, key) = (gate.client().in_session(key), key.to_owned());
    tokio::spawn(async move { client.call(tool, json!({"key": key, "how": "again"})).await })
}

/// Many reads and one effect.
fn begin_all(gate: &Gate) -> (Vec<JoinHandle<Value>>, JoinHandle<Value>) {
    ((0..MANY).map(|n| begin(gate, "look", &format!("read-{n}"))).collect(), begin(gate, "pay", "pay"))
}

/// The reads were made again and are answered; the effect was made once, and nobody knows what became of it.
async fn all_is_well(gate: Gate, (reads, pay): (Vec<JoinHandle<Value>>, JoinHandle<Value>), times: impl Fn() -> BTreeMap<String, usize>) {
    for read in reads {
        let said = read.await.unwrap();
        assert!(said["_meta"]["toolgate/error"].is_null(), "{said}");
    }
    let error = pay.await.unwrap()["_meta"]["toolgate/error"].clone();
    assert_eq!((&error["code"], &error["effects"]), (&json!("upstream_unavailable"), &json!("unknown")), "{error}");
    assert_eq!(gate.gateway.runtime().pending_calls().await.unwrap().len(), 1);
    let mut expected: BTreeMap<String, usize> = (0..MANY).map(|n| (format!("read-{n}"), 2)).collect();
    expected.insert("pay".to_owned(), 1);
    let mut found = times();
    found.remove("other");
    assert_eq!(found, expected);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_under_way_when_a_session_is_lost_are_answered_in_the_next_one() {
    let (host, config) = Host::serve(false).await;
    let gate = Gate::open(&config).await;
    let under_way = begin_all(&gate);
    until("all are under way", async || host.times().len() == MANY + 1).await;
    host.life.store(1, Ordering::SeqCst);
    let mut turn = 0;
    until("it is noticed", async || {
        turn += 1;
        gate.client().in_session(&format!("s{turn}")).code("look", json!({"key": "other"})).await == "ok"
    })
    .await;
    all_is_well(gate, under_way, || host.times()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_under_way_when_connections_break_are_answered_over_others() {
    for modern in [true, false] {
        let (host, config) = Host::serve(modern).await;
        let gate = Gate::open(&config).await;
        let under_way = begin_all(&gate);
        until("all are under way", async || host.times().len() == MANY + 1).await;
        host.hangs_up.send_replace(true);
        all_is_well(gate, under_way, || host.times()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_hangs_up_on_each_call_is_left_alone_also_where_it_says_what_it_offers() {
    for modern in [true, false] {
        let (host, config) = Host::serve(modern).await;
        let gate = Gate::open(&config).await;
        host.hangs_up.send_replace(true);
        let mut turn = 0;
        until("it is left alone", async || {
            turn += 1;
            let (key, before) = (format!("never-{turn}"), host.times().len());
            let error = begin(&gate, "pay", &key).await.unwrap()["_meta"]["toolgate/error"].clone();
            let left_alone = error["message"].as_str().unwrap().contains("circuit breaker");
            assert!(!left_alone || (error["effects"] == "none" && host.times().len() == before), "{modern}: {error}");
            left_alone
        })
        .await;
        gate.end().await;
    }
}

/// What was left by a program.
fn marks(path: &Path) -> BTreeMap<String, usize> {
    count(std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect::<Vec<_>>().iter())
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_under_way_when_a_program_dies_are_answered_by_the_next_one() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("marks");
    let gate = Gate::open(&format!(
        "[upstreams.ill]\ncommand = {}\nargs = [\"--ill\", \"--tools\", \"87\"]\nenv = {{ FIXTURE_COUNTER = {} }}\n\
         [tools.look]\nkind = \"mcp\"\nupstream = \"ill\"\ntool = \"mark\"\neffect = \"read\"\n\
         [tools.pay]\nkind = \"mcp\"\nupstream = \"ill\"\ntool = \"mark\"\neffect = \"write\"\npolicy = \"open\"\n",
        json!(fixture()),
        json!(path)
    ))
    .await;
    let under_way = begin_all(&gate);
    until("all are under way", async || lines(&path) == MANY + 1).await;
    assert_eq!(kill(87), 1);
    all_is_well(gate, under_way, || marks(&path)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_dies_while_its_question_is_open_is_sent_nothing_more() {
    let home = tempfile::tempdir().unwrap();
    let gate = Gate::open(&format!(
        "[upstreams.ill]\ncommand = {}\nargs = [\"--ill\", \"--tools\", \"89\"]\nenv = {{ FIXTURE_COUNTER = {} }}\n\
         [tools.look]\nkind = \"mcp\"\nupstream = \"ill\"\ntool = \"mark\"\neffect = \"read\"\n\
         [tools.pay]\nkind = \"mcp\"\nupstream = \"ill\"\ntool = \"mark\"\neffect = \"write\"\npolicy = \"open\"\n",
        json!(fixture()),
        json!(home.path().join("marks"))
    ))
    .await;
    // Nobody answers.
    let asked = gate.client().in_session("s").who_can(json!({"elicitation": {}})).call("look", json!({"key": "a", "how": "asks"})).await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    let program = processes(89);
    assert_eq!(kill(89), 1);
    until("it is dead", async || processes(89) != program).await;
    let mut turn = 0;
    until("another is there in its place", async || {
        turn += 1;
        let client = gate.client().in_session(&format!("s{turn}"));
        let error = client.call("pay", json!({"key": "pay", "how": "answer"})).await["_meta"]["toolgate/error"].clone();
        // What was sent to nobody has not happened.
        assert!(error.is_null() || error["effects"] == "none", "{error}");
        error.is_null()
    })
    .await;
    assert!(gate.gateway.runtime().pending_calls().await.unwrap().is_empty());
    gate.end().await;
}

/// A server of an earlier revision that says what goes on to whoever wanted that in this session, and which one it is.
async fn talkative(life: Arc<AtomicUsize>, told: Arc<Mutex<BTreeMap<usize, Value>>>) -> String {
    listen(move |mut stream| {
        let (life, told) = (life.load(Ordering::SeqCst), Arc::clone(&told));
        async move {
            let Some((head, asked)) = request(&mut stream).await else { return };
            let session = format!("mcp-session-id: life-{life}");
            let said = match asked["method"].as_str().unwrap_or_default() {
                "server/discover" => answer("404 No", "text/html", "<p>"),
                "initialize" => {
                    let mut own = about();
                    own["capabilities"]["logging"] = json!({});
                    result(&asked, own).replacen("\r\n", &format!("\r\n{session}\r\n"), 1)
                }
                "" if head.starts_with("get ") => answer("405 No", "text/plain", ""),
                _ if !head.contains(&session) => answer("404 Not Found", "text/plain", ""),
                "ping" => result(&asked, json!({})),
                "logging/setLevel" => {
                    told.lock().unwrap().insert(life, asked["params"]["level"].clone());
                    result(&asked, json!({}))
                }
                "tools/list" => {
                    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
                    result(&asked, json!({"tools": [{"name": "look", "description": "Looks.", "inputSchema": schema}]}))
                }
                "tools/call" => {
                    let params = json!({"level": "debug", "data": life});
                    let word = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": params});
                    let done = json!({"jsonrpc": "2.0", "id": asked["id"], "result": {"content": [{"type": "text", "text": "done"}]}});
                    match told.lock().unwrap().get(&life) == Some(&json!("debug")) {
                        true => answer("200 OK", "text/event-stream", &format!("data: {word}\n\ndata: {done}\n\n")),
                        false => answer("200 OK", "application/json", &done.to_string()),
                    }
                }
                _ => answer("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_connected_to_anew_is_told_again_which_log_messages_are_wanted() {
    let (life, told) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<BTreeMap<usize, Value>>>::default());
    let address = talkative(Arc::clone(&life), Arc::clone(&told)).await;
    let gate = Gate::open(&format!("[upstreams.t]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n")).await;
    let mut client = Older::greet(&plain(), &gate.url, json!({})).await;
    assert!(client.ask("logging/setLevel", json!({"level": "debug"})).await.get("result").is_some());
    for round in 0..2 {
        life.store(round, Ordering::SeqCst);
        for turn in 0..2 {
            // The first one notices that it is somebody else.
            let said = client.ask("tools/call", json!({"name": "look", "arguments": {"n": 2 * round + turn}})).await;
            assert_eq!(said["result"]["content"][0]["text"], "done", "{round}: {said}");
            until("it is told", async || told.lock().unwrap().contains_key(&round)).await;
        }
        client.ears.hear(|said| said["method"] == "notifications/message" && said["params"]["data"] == json!(round)).await;
    }
    drop(client);
    gate.end().await;
}
