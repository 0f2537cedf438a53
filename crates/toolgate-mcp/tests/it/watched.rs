//! An upstream is watched: what it says of itself, whether it is well, and what it offers by now.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use toolgate_mcp::Status;

use crate::entering::{Older, plain};
use crate::faults::{config, script, status_of};
use crate::old::{about, answer, listen, request, result};
use crate::support::{Gate, until};

/// A server of an earlier revision that says what it is told to say, and notes what it was asked.
#[derive(Default)]
struct Moody {
    says: Mutex<HashMap<String, Value>>,
    asked: Mutex<Vec<String>>,
    announce: Notify,
    /// How often it has forgotten whom it talks to.
    life: AtomicUsize,
}

impl Moody {
    /// Begins with one tool, one prompt and one resource, and says where it is.
    async fn serve() -> (Arc<Self>, String) {
        let own = Arc::<Self>::default();
        own.says("tools/list", json!({"result": {"tools": [tool("talk")]}}));
        own.says("tools/call", json!({"result": {"content": [{"type": "text", "text": "done"}]}}));
        own.says("prompts/list", json!({"result": {"prompts": [{"name": "hello"}]}}));
        own.says("prompts/get", json!({"result": {"messages": []}}));
        own.says("resources/list", json!({"result": {"resources": [{"uri": "note://a", "name": "a"}]}}));
        own.says("resources/templates/list", json!({"result": {"resourceTemplates": []}}));
        let moody = Arc::clone(&own);
        let address = listen(move |stream| Arc::clone(&moody).hear(stream)).await;
        (own, format!("url = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n"))
    }

    /// From now on it says this, a result or an error; of null it says nothing, until it says something else.
    fn says(&self, method: &str, said: Value) {
        self.says.lock().unwrap().insert(method.to_owned(), said);
    }

    fn times(&self, method: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|asked| *asked == method).count()
    }

    fn known(&self, method: &str) -> Option<Value> {
        self.says.lock().unwrap().get(method).cloned()
    }

    async fn hear(self: Arc<Self>, mut stream: TcpStream) {
        let Some((head, asked)) = request(&mut stream).await else { return };
        let method = asked["method"].as_str().unwrap_or_default();
        let session = format!("mcp-session-id: life-{}", self.life.load(Ordering::SeqCst));
        self.asked.lock().unwrap().push(method.to_owned());
        let said = match method {
            "server/discover" => answer("404 No", "text/html", "<p>"),
            "" if head.starts_with("get ") => return self.tell(stream).await,
            "initialize" => {
                let mut about = about();
                about["capabilities"] = json!({"tools": {}, "prompts": {}, "resources": {}});
                result(&asked, about).replacen("\r\n", &format!("\r\n{session}\r\n"), 1)
            }
            // All others do not notice.
            "prompts/get" if !head.contains(&session) => answer("404 Not Found", "text/plain", ""),
            "ping" => result(&asked, json!({})),
            _ if self.known(method) == Some(json!("hangs up")) => return,
            // It asks its client, and waits for what that says.
            "tools/call" if self.known(method) == Some(json!("asks")) => {
                let form = json!({"message": "Who?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}});
                let question = json!({"jsonrpc": "2.0", "id": asked["id"], "method": "elicitation/create", "params": form});
                let _ = stream.write_all(answer("200 OK", "text/event-stream", &format!("data: {question}\n\n")).as_bytes()).await;
                return std::future::pending().await;
            }
            _ => {
                let mut known = self.known(method);
                while known == Some(Value::Null) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    known = self.known(method);
                }
                match known {
                    Some(mut said) => {
                        said["jsonrpc"] = json!("2.0");
                        said["id"] = asked["id"].clone();
                        answer("200 OK", "application/json", &said.to_string())
                    }
                    None => answer("202 Accepted", "text/plain", ""),
                }
            }
        };
        let _ = stream.write_all(said.as_bytes()).await;
    }

    /// Says that its lists have changed, whenever it is told to.
    async fn tell(&self, mut stream: TcpStream) {
        let mut said = answer("200 OK", "text/event-stream", "");
        while stream.write_all(said.as_bytes()).await.is_ok() {
            self.announce.notified().await;
            said = format!("data: {}\n\n", json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
        }
    }
}

fn tool(name: &str) -> Value {
    json!({"name": name, "description": "Does it.", "inputSchema": {"type": "object"}})
}

#[tokio::test(flavor = "multi_thread")]
async fn who_answers_with_an_error_is_there() {
    let (moody, upstream) = Moody::serve().await;
    let gate = Gate::open(&format!("[upstreams.m]\n{upstream}")).await;
    let code = async |session: &str| gate.client().in_session(session).code("talk", json!({})).await;
    assert_eq!(code("before").await, "ok");
    moody.says("tools/list", json!({"error": {"code": -32603, "message": "not now"}}));
    let asked = moody.times("tools/list");
    for times in 1..=5 {
        moody.announce.notify_one();
        until("it is asked what it offers", async || moody.times("tools/list") >= asked + times).await;
        assert_eq!(code(&format!("meanwhile{times}")).await, "ok");
    }
    moody.says("tools/list", json!({"result": {"tools": [tool("talk"), tool("late")]}}));
    moody.announce.notify_one();
    until("the change is seen", async || gate.gateway.health()[0].tools == 2).await;
    assert_eq!((gate.gateway.health()[0].starts, moody.times("initialize")), (1, 1));
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_answers_everything_with_an_error_is_started_again() {
    let (moody, upstream) = Moody::serve().await;
    let gate = Gate::open(&format!("[upstreams.m]\n{upstream}")).await;
    let terminated = json!({"error": {"code": -32603, "message": "Session terminated"}});
    let well = moody.known("tools/call").unwrap();
    moody.says("tools/call", terminated.clone());
    moody.says("tools/list", terminated);
    let mut calls = 0;
    until("it is started again", async || {
        calls += 1;
        assert_ne!(gate.client().in_session(&format!("s{calls}")).code("talk", json!({})).await, "ok");
        moody.announce.notify_one();
        gate.gateway.health()[0].starts > 1
    })
    .await;
    moody.says("tools/call", well);
    moody.says("tools/list", json!({"result": {"tools": [tool("talk")]}}));
    until("it is there again", async || {
        calls += 1;
        gate.client().in_session(&format!("s{calls}")).code("talk", json!({})).await == "ok"
    })
    .await;
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_key_with_several_lines_none_is_told() {
    let home = tempfile::tempdir().unwrap();
    let key = home.path().join("key");
    let lines =
        ["-----BEGIN PRIVATE KEY-----", "MIIEvQIBADANBgkqhkiG9w0BAQEF", "AASCBKcwggSjAgEAAoIBAQC7VJTU", "-----END PRIVATE KEY-----"];
    std::fs::write(&key, lines.join("\n") + "\n").unwrap();
    // The last line that it says is the reason why it is away.
    for (name, says) in [("whole", "echo \"$KEY\" >&2"), ("line", "echo \"it is $(echo \"$KEY\" | head -n 3 | tail -n 1), is it?\" >&2")] {
        let loud = script(home.path(), name, &format!("{says}\nexit 3"));
        let ill = format!(
            "command = {loud}\nenv = {{ KEY = {{ file = {} }} }}\n[tools.ill_echo]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\n",
            json!(key)
        );
        let gate = Gate::open(&config(&ill)).await;
        let said = gate.client().call("ill_echo", json!({"text": "x"})).await.to_string();
        let health = serde_json::to_string(&gate.gateway.health()).unwrap();
        for told in [said, health] {
            assert!(told.contains("[redacted]"), "{name}: {told}");
            assert!(!lines.iter().any(|line| told.contains(line)), "{name}: {told}");
        }
        gate.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_is_not_told_is_what_it_was() {
    let (moody, upstream) = Moody::serve().await;
    let gate = Gate::open(&format!("[upstreams.m]\n{upstream}")).await;
    let listed = async |method: &str, list: &str, name: &str| -> Vec<Value> {
        let said = gate.client().in_session("s").ask(method, json!({})).await.1;
        said["result"][list].as_array().unwrap_or_else(|| panic!("{said}")).iter().map(|one| one[name].clone()).collect()
    };
    assert_eq!(listed("prompts/list", "prompts", "name").await, ["hello"]);
    for (code, uri, prompts) in [(-32603, "note://b", &["hello"][..]), (-32601, "note://c", &[][..])] {
        moody.says("prompts/list", json!({"error": {"code": code, "message": "not now"}}));
        moody.says("resources/list", json!({"result": {"resources": [{"uri": uri, "name": "a"}]}}));
        moody.announce.notify_one();
        // They are asked for after prompts, and told together.
        until("the change is seen", async || listed("resources/list", "resources", "uri").await == [uri]).await;
        assert_eq!(listed("prompts/list", "prompts", "name").await, prompts, "{code}");
    }
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_only_says_that_something_has_changed_is_passed_on_and_has_nothing_read_again() {
    let (moody, upstream) = Moody::serve().await;
    let text = format!("[upstreams.m]\n{upstream}");
    let gate = Gate::open(&text).await;
    let mut older = Older::greet(&plain(), &gate.url, json!({})).await;
    // Whatever stands there by now is in force once it is read again.
    std::fs::write(gate.home.path().join("toolgate.toml"), format!("{text}[tools.calc]\nkind = \"builtin\"\n")).unwrap();
    moody.announce.notify_one();
    older.ears.hear(|said| said["method"] == "notifications/tools/list_changed").await;
    assert_eq!(gate.client().tools().await, ["talk"]);
    moody.says("tools/list", json!({"result": {"tools": [tool("talk"), tool("late")]}}));
    moody.announce.notify_one();
    until("the change is seen", async || gate.client().tools().await.len() == 3).await;
    drop(older);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_session_is_begun_anew_also_where_no_tool_is_called() {
    let (moody, upstream) = Moody::serve().await;
    let gate = Gate::open(&format!("[upstreams.m]\n{upstream}")).await;
    let client = gate.client().in_session("s");
    let is_told = async || client.ask("prompts/get", json!({"name": "hello"})).await.1["result"]["messages"].is_array();
    assert!(is_told().await);
    for lost in 1..=2 {
        moody.life.fetch_add(1, Ordering::SeqCst);
        until("it is told again", async || is_told().await).await;
        assert_eq!(moody.times("initialize"), 1 + lost);
    }
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_it_is_asked_does_not_wait_behind_calls() {
    let (moody, upstream) = Moody::serve().await;
    let gate = Gate::open(&format!("[upstreams.m]\n{upstream}concurrency = 1\n")).await;
    moody.says("tools/call", Value::Null);
    let client = gate.client().in_session("slow");
    let slow = tokio::spawn(async move { client.code("talk", json!({})).await });
    until("it is called", async || moody.times("tools/call") == 1).await;
    moody.says("tools/list", json!({"result": {"tools": [tool("talk"), tool("late")]}}));
    moody.announce.notify_one();
    until("the change is seen meanwhile", async || gate.gateway.health()[0].tools == 2).await;
    assert!(!slow.is_finished());
    moody.says("tools/call", json!({"result": {"content": []}}));
    assert_eq!(slow.await.unwrap(), "ok");
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_client_is_not_to_blame() {
    let (moody, upstream) = Moody::serve().await;
    let declared = "[tools.talk]\nkind = \"mcp\"\nupstream = \"m\"\neffect = \"read\"\ntimeout = \"3s\"\n";
    let gate = Gate::open(&format!("[upstreams.m]\n{upstream}{declared}")).await;
    moody.says("tools/call", json!("asks"));
    let asked = join_all((0..6).map(|number| {
        let client = gate.client().in_session(&format!("s{number}")).who_can(json!({"elicitation": {}}));
        async move { client.call("talk", json!({})).await }
    }));
    for said in asked.await {
        assert_eq!(said["resultType"], "input_required", "{said}");
    }
    // Nobody answers, until their time is over.
    let wanted = toolgate_store::Filter { tool: Some("talk".to_owned()), ..Default::default() };
    until("they are over", async || toolgate_store::Ledger::open(gate.ledger()).unwrap().find(&wanted).unwrap().len() == 6).await;
    moody.says("tools/call", json!({"result": {"content": []}}));
    assert_eq!(gate.client().in_session("after").code("talk", json!({})).await, "ok");
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_less_time_than_the_tool_blames_nobody() {
    let (moody, upstream) = Moody::serve().await;
    let gate = Gate::open(&format!("[limits]\nsession = {{ wall_time = \"2s\" }}\n[upstreams.m]\n{upstream}")).await;
    moody.says("tools/call", Value::Null);
    let late = join_all((0..6).map(|number| {
        let client = gate.client().in_session(&format!("s{number}"));
        async move { client.code("talk", json!({})).await }
    }));
    for code in late.await {
        assert_eq!(code, "deadline_exceeded");
    }
    moody.says("tools/call", json!({"result": {"content": []}}));
    assert_eq!(gate.client().in_session("after").code("talk", json!({})).await, "ok");
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_left_alone_is_asked_for_no_prompt_either() {
    let (moody, upstream) = Moody::serve().await;
    let gate = Gate::open(&format!("[upstreams.m]\n{upstream}")).await;
    moody.says("prompts/get", json!("hangs up"));
    let client = gate.client().in_session("s");
    // So often it may fail, and is not asked any more.
    until("it is left alone", async || {
        let before = moody.times("prompts/get");
        let said = client.ask("prompts/get", json!({"name": "hello"})).await.1;
        let left_alone = said["error"]["message"].as_str().unwrap_or_else(|| panic!("{said}")).contains("circuit breaker");
        assert!(!left_alone || moody.times("prompts/get") == before, "{said}");
        left_alone
    })
    .await;
    assert!(moody.times("prompts/get") >= 5);
    gate.end().await;
}

/// What a call in a session of its own is refused with.
async fn refused(gate: &Gate, session: usize, tool: &str) -> Value {
    let said = gate.client().in_session(&format!("s{session}")).call(tool, json!({})).await;
    said["_meta"]["toolgate/error"].clone()
}

/// Whether it is told since when.
fn says_since(said: &Value) -> bool {
    said["message"].as_str().is_some_and(|said| said.contains(" since 2"))
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_not_answered_is_told_since_when_and_when_to_try_again() {
    let declared = "[tools.ill_echo]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\n";
    let home = tempfile::tempdir().unwrap();
    let mut tries = 0;
    // It says nothing at all.
    let gate = Gate::hasty(&config(&format!("command = {}\n{declared}", script(home.path(), "mute", "exec sleep 995")))).await;
    assert!(matches!(status_of(&gate, "ill"), Status::Starting));
    let said = refused(&gate, tries, "ill_echo").await;
    assert!(says_since(&said) && said["message"].as_str().unwrap().contains("starting"), "{said}");
    assert_eq!((&said["errorCategory"], &said["retryAfterMs"]), (&json!("TRANSIENT"), &json!(1_000)), "{said}");
    gate.end().await;
    // It ends at once, in both ways in which it is greeted at first, and then it says nothing.
    let runs = home.path().join("runs");
    let text = format!("echo run >> {0}\n[ $(wc -l < {0}) -lt 3 ] && exit 7\nexec sleep 995", runs.display());
    let gate = Gate::open(&config(&format!("command = {}\n{declared}", script(home.path(), "brief", &text)))).await;
    let mut said = Value::Null;
    until("it is being tried", async || {
        tries += 1;
        said = refused(&gate, tries, "ill_echo").await;
        assert!(says_since(&said), "{said}");
        said["message"].as_str().unwrap().contains("attempt is in progress")
    })
    .await;
    assert_eq!(said["retryAfterMs"], json!(1_000), "{said}");
    gate.end().await;
    // It is left alone.
    let (moody, upstream) = Moody::serve().await;
    let gate = Gate::open(&format!("[upstreams.m]\n{upstream}")).await;
    moody.says("tools/call", json!("hangs up"));
    until("it is left alone", async || {
        tries += 1;
        said = refused(&gate, tries, "talk").await;
        said["message"].as_str().unwrap().contains("circuit breaker")
    })
    .await;
    assert!(says_since(&said) && (100..=5_000).contains(&said["retryAfterMs"].as_u64().unwrap()), "{said}");
    gate.end().await;
}
