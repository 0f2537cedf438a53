//! Resources and prompts of upstreams, each in a room of its own.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, WriteHalf};
use tokio::net::TcpStream;
use toolgate::SessionKey;
use toolgate::store::PauseTarget;

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{
    ClientLines, TestGateway, fixture_path, kill_processes_with_number, wait_until,
};

/// Serves one prompt and one resource until it is told to be gone; what it was asked for is noted.
async fn start_resource_server(
    name: &'static str,
    gone: Arc<AtomicBool>,
    asked_for: Arc<Mutex<Vec<Value>>>,
) -> String {
    serve_connections(move |mut stream| {
        let (gone, asked_for) = (Arc::clone(&gone), Arc::clone(&asked_for));
        async move {
            let Some((head, asked)) = read_request(&mut stream).await else { return };
            if gone.load(Ordering::SeqCst) {
                return;
            }
            let mut about = initialize_result();
            about["capabilities"] = json!({"prompts": {}, "resources": {"subscribe": true}});
            asked_for.lock().unwrap().push(asked.clone());
            let said = match asked["method"].as_str().unwrap_or_default() {
                "server/discover" => http_response("404 No", "text/html", "<p>"),
                "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                "initialize" => json_rpc_result(&asked, about),
                "ping" | "resources/subscribe" | "resources/unsubscribe" => json_rpc_result(&asked, json!({})),
                "prompts/list" => json_rpc_result(&asked, json!({"prompts": [{"name": "hello"}]})),
                "resources/list" => json_rpc_result(&asked, json!({"resources": [{"uri": "note://a", "name": "a"}]})),
                "resources/templates/list" => {
                    json_rpc_result(&asked, json!({"resourceTemplates": [{"uriTemplate": format!("{name}://{{id}}"), "name": "t"}]}))
                }
                "prompts/get" => {
                    json_rpc_result(&asked, json!({"messages": [{"role": "user", "content": {"type": "text", "text": name}}]}))
                }
                "resources/read" => json_rpc_result(&asked, json!({"contents": [{"uri": asked["params"]["uri"], "text": name}]})),
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
        }
    })
    .await
}

fn upstream_config(name: &str, address: &str, more: &str) -> String {
    format!("[upstreams.{name}]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\n{more}\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_uris_of_two_upstreams_stay_distinct() {
    let (gone, asked_for) = (Arc::<AtomicBool>::default(), Arc::default());
    let x = start_resource_server("x", Arc::clone(&gone), Arc::clone(&asked_for)).await;
    let y = start_resource_server("y", Arc::default(), Arc::default()).await;
    let gate =
        TestGateway::open(&(upstream_config("x", &x, "") + &upstream_config("y", &y, ""))).await;
    let client = gate.client().in_session("s");
    let listed = client.call_method("resources/list", json!({})).await.1;
    let names: Vec<&str> = listed["result"]["resources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["uri"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["toolgate://x/note://a", "toolgate://y/note://a"]);
    let templates = client.call_method("resources/templates/list", json!({})).await.1;
    assert_eq!(
        templates["result"]["resourceTemplates"][1]["uriTemplate"], "toolgate://y/y://{id}",
        "{templates}"
    );
    let read = async |uri: &str| client.call_method("resources/read", json!({"uri": uri})).await.1;
    for (uri, text) in [
        ("toolgate://x/note://a", "x"),
        ("toolgate://y/note://a", "y"),
        ("toolgate://y/other://b", "y"),
        ("x://7", "x"),
        ("y://7", "y"),
        ("toolgate://x/y://7", "x"),
    ] {
        let read = read(uri).await;
        assert_eq!(
            (&read["result"]["contents"][0]["text"], &read["result"]["contents"][0]["uri"]),
            (&json!(text), &json!(uri)),
            "{read}"
        );
    }
    for (uri, why) in [
        (
            "note://a",
            "several upstreams have `note://a`; ask for one of them: `toolgate://x/note://a`, `toolgate://y/note://a`",
        ),
        ("other://b", "there is no resource `other://b`"),
        ("toolgate://z/note://a", "there is no resource `toolgate://z/note://a`"),
        ("toolgate://x", "there is no resource `toolgate://x`"),
    ] {
        let refused = read(uri).await;
        assert_eq!(refused["error"]["message"], why, "{refused}");
    }
    let meta = json!({"own": {"a": 1}, "toolgate/receipt": "forged"});
    let got = client.call_method("prompts/get", json!({"name": "x_hello", "_meta": meta})).await.1;
    assert_eq!(got["result"]["messages"][0]["content"]["text"], "x", "{got}");
    let seen: Vec<Value> = asked_for.lock().unwrap().clone();
    let seen =
        &seen.iter().find(|asked| asked["method"] == "prompts/get").unwrap()["params"]["_meta"];
    assert_eq!(
        (&seen["own"], &seen["toolgate/receipt"]),
        (&json!({"a": 1}), &Value::Null),
        "{seen:?}"
    );
    // One that is gone is not stood in for by another, and takes nothing from it.
    gone.store(true, Ordering::SeqCst);
    wait_until("it is away", async || read("toolgate://x/note://a").await.get("error").is_some())
        .await;
    assert_eq!(read("toolgate://y/note://a").await["result"]["contents"][0]["text"], "y");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uris_are_unchanged_without_prefix() {
    let x = start_resource_server("x", Arc::default(), Arc::default()).await;
    let y = start_resource_server("y", Arc::default(), Arc::default()).await;
    let gate = TestGateway::open(
        &(upstream_config("x", &x, "prefix = \"\"") + &upstream_config("y", &y, "")),
    )
    .await;
    let client = gate.client().in_session("s");
    for (uri, text) in [
        ("note://a", Some("x")),
        ("toolgate://y/note://a", Some("y")),
        ("toolgate://x/note://a", None),
    ] {
        let read = client.call_method("resources/read", json!({"uri": uri})).await.1;
        assert_eq!(read["result"]["contents"][0]["text"].as_str(), text, "{read}");
    }
    gate.shut_down().await;
}

/// A client of an earlier revision on streams.
struct LegacyStreamClient {
    writer: WriteHalf<DuplexStream>,
    answers: ClientLines,
    last_id: u64,
    /// What it was told without having asked.
    notifications: Vec<Value>,
}

impl LegacyStreamClient {
    async fn open(gate: &TestGateway) -> Self {
        Self::open_as_agent(gate, None).await
    }

    async fn open_as_agent(gate: &TestGateway, agent: Option<&str>) -> Self {
        let (_, ask, answers) = gate.connect_streams(agent);
        let mut old = Self { writer: ask, answers, last_id: 0, notifications: vec![] };
        let about = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}});
        old.call_method("initialize", about).await;
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        old.writer.write_all(format!("{ready}\n").as_bytes()).await.unwrap();
        old
    }

    async fn next_message(&mut self) -> Value {
        serde_json::from_str(&self.answers.next_line().await.unwrap().unwrap()).unwrap()
    }

    async fn call_method(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let request =
            json!({"jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params});
        self.writer.write_all(format!("{request}\n").as_bytes()).await.unwrap();
        loop {
            let said = self.next_message().await;
            if said["id"] == json!(self.last_id) {
                return said;
            }
            self.notifications.push(said);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriber_is_notified_only_of_its_resource() {
    let fixture = |name: &str| {
        format!(
            "[upstreams.{name}]\ncommand = {}\nargs = [\"--stdio\"]\nundeclared = \"open\"\n",
            json!(fixture_path())
        )
    };
    let gate = TestGateway::open(&(fixture("a") + &fixture("b"))).await;
    let watched = "toolgate://b/test://watched-resource";
    let (mut hears, mut other) =
        (LegacyStreamClient::open(&gate).await, LegacyStreamClient::open(&gate).await);
    assert!(
        hears
            .call_method("resources/subscribe", json!({"uri": watched}))
            .await
            .get("result")
            .is_some()
    );
    other
        .call_method("resources/subscribe", json!({"uri": "toolgate://a/test://static-text"}))
        .await;
    let updated = |told: &[Value]| -> Vec<Value> {
        let updates =
            told.iter().filter(|said| said["method"] == "notifications/resources/updated");
        updates.map(|said| said["params"]["uri"].clone()).collect()
    };
    let mut changes = 0;
    // Its upstream may not have heard yet that somebody wants to know: then it is changed again.
    while updated(&hears.notifications).is_empty() && changes < 20 {
        for tool in ["a_count", "b_count"] {
            let counted =
                hears.call_method("tools/call", json!({"name": tool, "arguments": {}})).await;
            assert_eq!(counted["result"]["isError"], json!(false), "{counted}");
        }
        changes += 1;
        while updated(&hears.notifications).is_empty() {
            let Ok(said) = tokio::time::timeout(Duration::from_secs(5), hears.next_message()).await
            else {
                break;
            };
            hears.notifications.push(said);
        }
    }
    // Whatever else was to come has come when this is answered.
    hears.call_method("ping", json!({})).await;
    let told = updated(&hears.notifications);
    assert!(
        (1..=changes).contains(&told.len()) && told.iter().all(|uri| *uri == watched),
        "{told:?} after {changes}"
    );
    other.call_method("ping", json!({})).await;
    assert_eq!(updated(&other.notifications), Vec::<Value>::new());
    drop((hears, other));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_is_unsubscribed_after_last_client() {
    let asked_for: Arc<Mutex<Vec<Value>>> = Arc::default();
    let x = start_resource_server("x", Arc::default(), Arc::clone(&asked_for)).await;
    let gate = TestGateway::open(&upstream_config("x", &x, "")).await;
    let times = |method: &str| {
        asked_for.lock().unwrap().iter().filter(|asked| asked["method"] == method).count()
    };
    let uri = json!({"uri": "toolgate://x/note://a"});
    let (mut one, mut two) =
        (LegacyStreamClient::open(&gate).await, LegacyStreamClient::open(&gate).await);
    one.call_method("resources/subscribe", uri.clone()).await;
    two.call_method("resources/subscribe", uri.clone()).await;
    assert_eq!(times("resources/subscribe"), 1);
    one.call_method("resources/unsubscribe", uri.clone()).await;
    assert_eq!(times("resources/unsubscribe"), 0, "the other still listens");
    drop(two);
    wait_until("it is told", async || times("resources/unsubscribe") == 1).await;
    drop(one);
    // Those who listen to one stream for everything are counted like the rest.
    let listening = ListenStreamClient::open(
        &gate,
        "",
        json!({"resourceSubscriptions": ["toolgate://x/note://a"]}),
    )
    .await;
    wait_until("it is wanted again", async || times("resources/subscribe") == 2).await;
    drop(listening);
    wait_until("it is told again", async || times("resources/unsubscribe") == 2).await;
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subscription_during_reload_is_kept() {
    let asked_for: Arc<Mutex<Vec<Value>>> = Arc::default();
    let x = start_resource_server("x", Arc::default(), Arc::clone(&asked_for)).await;
    let gate = TestGateway::open(&upstream_config("x", &x, "")).await;
    let times = |method: &str| {
        asked_for.lock().unwrap().iter().filter(|asked| asked["method"] == method).count()
    };
    let (mut old, before) = (LegacyStreamClient::open(&gate).await, times("initialize"));
    // One that says nothing is waited for; meanwhile the other one is there twice, as it was and as
    // it will be.
    let slow = "[upstreams.slow]\ncommand = \"/bin/sleep\"\nargs = [\"997\"]\n";
    let config = upstream_config("x", &x, "timeout = \"20s\"") + slow;
    let wants = async {
        wait_until("it is connected to anew", async || times("initialize") > before).await;
        old.call_method("resources/subscribe", json!({"uri": "toolgate://x/note://a"})).await
    };
    let (reloaded, subscribed) = tokio::join!(gate.reload(&config), wants);
    reloaded.unwrap();
    assert!(subscribed.get("result").is_some(), "{subscribed}");
    wait_until("the one that is there now has heard of it", async || {
        times("resources/subscribe") == 2
    })
    .await;
    drop(old);
    gate.shut_down().await;
}

/// A client of 2026-07-28 that listens.
struct ListenStreamClient(Lines<BufReader<TcpStream>>);

impl ListenStreamClient {
    /// As an agent, to what it names.
    async fn open(gate: &TestGateway, agent: &str, notifications: Value) -> Self {
        let address = gate.url.trim_start_matches("http://").to_owned();
        let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}});
        let params = json!({"_meta": meta, "notifications": notifications});
        let body =
            json!({"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": params})
                .to_string();
        let mut stream = TcpStream::connect(&address).await.unwrap();
        let head = format!(
            "POST /mcp/{agent} HTTP/1.1\r\nhost: {address}\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\n\
             mcp-protocol-version: 2026-07-28\r\nmcp-method: subscriptions/listen\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        Self(BufReader::new(stream).lines())
    }

    /// The next that it hears.
    async fn next_message(&mut self) -> Value {
        loop {
            let line = self.0.next_line().await.unwrap().unwrap();
            if let Some(said) = line
                .strip_prefix("data:")
                .and_then(|data| serde_json::from_str::<Value>(data.trim()).ok())
            {
                return said;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_supported_notifications_are_acknowledged() {
    let x = start_resource_server("x", Arc::default(), Arc::default()).await;
    let gate = TestGateway::open(&upstream_config("x", &x, "prompts = false")).await;
    let known = "toolgate://x/note://a";
    let long = format!("toolgate://x/note://{}", "a".repeat(3_000));
    let wanted = json!({"toolsListChanged": true, "promptsListChanged": true, "resourcesListChanged": true,
        "resourceSubscriptions": [known, "toolgate://z/note://a", known, long, "other://"]});
    // A bare address that nobody else has is the only upstream's.
    let kept = json!({"toolsListChanged": true, "resourcesListChanged": true, "resourceSubscriptions": [known, "other://"]});
    let mut listening = ListenStreamClient::open(&gate, "", wanted.clone()).await;
    let said = listening.next_message().await;
    assert_eq!(
        (&said["method"], &said["params"]["notifications"]),
        (&json!("notifications/subscriptions/acknowledged"), &kept),
        "{said}"
    );
    // The same over streams.
    let (_, mut ask, mut answers) = gate.connect_streams(None);
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}});
    let listen = json!({"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": {"_meta": meta, "notifications": wanted}});
    let hello =
        json!({"jsonrpc": "2.0", "id": 0, "method": "server/discover", "params": {"_meta": meta}});
    ask.write_all(format!("{hello}\n{listen}\n").as_bytes()).await.unwrap();
    let said = loop {
        let said: Value =
            serde_json::from_str(&answers.next_line().await.unwrap().unwrap()).unwrap();
        if said["method"] == "notifications/subscriptions/acknowledged" {
            break said;
        }
    };
    assert_eq!(said["params"]["notifications"], kept, "{said}");
    // However many there are, they are looked at in a moment.
    let many: Vec<String> = (0..100_000).map(|n| format!("toolgate://x/note://{n}")).collect();
    let mut listening = tokio::time::timeout(
        std::time::Duration::from_secs(60),
        ListenStreamClient::open(&gate, "", json!({"resourceSubscriptions": many})),
    )
    .await
    .unwrap();
    let said = tokio::time::timeout(std::time::Duration::from_secs(60), listening.next_message())
        .await
        .unwrap();
    assert_eq!(
        said["params"]["notifications"]["resourceSubscriptions"].as_array().map(Vec::len),
        Some(1_000)
    );
    drop((ask, listening));
    gate.shut_down().await;
}

/// Changes what is watched. The same call three times in a row would be a loop.
async fn change_watched_resource(old: &mut LegacyStreamClient, turn: usize) {
    for (name, arguments) in
        [("calc", json!({"expression": format!("{turn} + 1")})), ("x_count", json!({}))]
    {
        let said =
            old.call_method("tools/call", json!({"name": name, "arguments": arguments})).await;
        assert_eq!(said["result"]["isError"], json!(false), "{said}");
    }
}

/// All that is heard until nothing was said for a while.
async fn drain_messages(listening: &mut ListenStreamClient) -> Vec<Value> {
    let mut all = Vec::new();
    while let Ok(said) =
        tokio::time::timeout(std::time::Duration::from_millis(700), listening.next_message()).await
    {
        all.push(said);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_without_upstream_gets_no_more_updates() {
    let config = |of_a: &str| {
        format!(
            "[gateway]\nagent = \"a\"\n[agents.a]\nupstreams = {of_a}\n[agents.a.tools.calc]\nkind = \"builtin\"\n\
             [agents.b]\nupstreams = [\"x\"]\n[agents.b.tools.calc]\nkind = \"builtin\"\n\
             [upstreams.x]\ncommand = {}\nargs = [\"--stdio\"]\nundeclared = \"open\"\n",
            json!(fixture_path())
        )
    };
    let gate = TestGateway::open(&config("[\"x\"]")).await;
    let watched = json!("toolgate://x/test://watched-resource");
    let (mut loses, mut keeps) = (
        LegacyStreamClient::open(&gate).await,
        LegacyStreamClient::open_as_agent(&gate, Some("b")).await,
    );
    let mut listening = ListenStreamClient::open(
        &gate,
        "a",
        json!({"toolsListChanged": true, "resourceSubscriptions": [watched]}),
    )
    .await;
    assert_eq!(
        listening.next_message().await["params"]["notifications"]["resourceSubscriptions"],
        json!([watched])
    );
    for old in [&mut loses, &mut keeps] {
        assert!(
            old.call_method("resources/subscribe", json!({"uri": watched}))
                .await
                .get("result")
                .is_some()
        );
    }
    let updates = |told: &[Value]| {
        told.iter().filter(|said| said["method"] == "notifications/resources/updated").count()
    };
    let mut turn = 0;
    wait_until("both hear of it", async || {
        turn += 1;
        change_watched_resource(&mut keeps, turn).await;
        loses.call_method("ping", json!({})).await;
        updates(&loses.notifications) > 0 && updates(&keeps.notifications) > 0
    })
    .await;
    while listening.next_message().await["method"] != "notifications/resources/updated" {}
    drain_messages(&mut listening).await;
    gate.reload(&config("[]")).await.unwrap();
    // It still hears that there is something else to see. What was on its way until then may come
    // before that.
    while listening.next_message().await["method"] != "notifications/tools/list_changed" {}
    loses.call_method("ping", json!({})).await;
    let before = updates(&loses.notifications);
    for _ in 0..3 {
        let kept = updates(&keeps.notifications);
        turn += 1;
        change_watched_resource(&mut keeps, turn).await;
        while updates(&keeps.notifications) <= kept {
            let said = keeps.next_message().await;
            keeps.notifications.push(said);
        }
    }
    // What was to come has come.
    loses.call_method("ping", json!({})).await;
    assert_eq!(updates(&loses.notifications), before, "{:?}", loses.notifications);
    let more = drain_messages(&mut listening).await;
    assert!(
        more.iter().all(|said| said["method"] == "notifications/tools/list_changed"),
        "{more:?}"
    );
    drop((loses, keeps));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pause_also_stops_prompts_resources_and_completions() {
    let asked_for: Arc<Mutex<Vec<Value>>> = Arc::default();
    let x = start_resource_server("x", Arc::default(), Arc::clone(&asked_for)).await;
    let gate = TestGateway::open(&upstream_config("x", &x, "")).await;
    let runtime = gate.gateway.runtime();
    let client = gate.client().in_session("s");
    let wanted = [
        ("prompts/list", json!({})),
        ("prompts/get", json!({"name": "x_hello"})),
        ("resources/list", json!({})),
        ("resources/templates/list", json!({})),
        ("resources/read", json!({"uri": "toolgate://x/note://a"})),
    ];
    for target in [
        PauseTarget::Agent("default".into()),
        PauseTarget::Principal("local".into()),
        PauseTarget::Session(SessionKey::new("default", "local", "s")),
    ] {
        runtime.pause(target.clone(), "a token is out").await.unwrap();
        let completes = json!({"ref": {"type": "ref/prompt", "name": "x_hello"}, "argument": {"name": "a", "value": ""}});
        for (method, params) in wanted.iter().cloned().chain([("completion/complete", completes)]) {
            let refused = client.call_method(method, params).await.1;
            let told = &refused["error"]["data"];
            assert_eq!(
                (&told["code"], &told["errorCategory"]),
                (&json!("paused"), &json!("PERMISSION")),
                "{target:?} {method}: {refused}"
            );
            assert!(
                refused["error"]["message"].as_str().unwrap().ends_with("a token is out"),
                "{refused}"
            );
        }
        runtime.unpause(target).await.unwrap();
    }
    let reached =
        |asked: &Value| asked["method"] == "prompts/get" || asked["method"] == "resources/read";
    assert!(!asked_for.lock().unwrap().iter().any(reached), "it was asked all the same");
    for (method, params) in wanted {
        let said = client.call_method(method, params).await.1;
        assert!(said.get("result").is_some(), "{method}: {said}");
    }
    // Who listens is told so, and hears nothing else.
    let mut listening =
        ListenStreamClient::open(&gate, "", json!({"toolsListChanged": true})).await;
    assert_eq!(
        listening.next_message().await["method"],
        "notifications/subscriptions/acknowledged"
    );
    runtime.pause(PauseTarget::Principal("local".into()), "a token is out").await.unwrap();
    gate.reload(&upstream_config("x", &x, "timeout = \"20s\"")).await.unwrap();
    let said = listening.next_message().await;
    assert_eq!(said["error"]["data"]["code"], "paused", "{said}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_agent_gets_no_resource_updates() {
    let config = format!(
        "[gateway]\nagent = \"a\"\n[agents.a]\nupstreams = [\"x\"]\n[agents.a.tools.calc]\nkind = \"builtin\"\n\
         [agents.b]\nupstreams = [\"x\"]\n[agents.b.tools.calc]\nkind = \"builtin\"\n\
         [upstreams.x]\ncommand = {}\nargs = [\"--stdio\"]\nundeclared = \"open\"\n",
        json!(fixture_path())
    );
    let gate = TestGateway::open(&config).await;
    let watched = json!({"uri": "toolgate://x/test://watched-resource"});
    let (mut paused, mut other) = (
        LegacyStreamClient::open(&gate).await,
        LegacyStreamClient::open_as_agent(&gate, Some("b")).await,
    );
    for old in [&mut paused, &mut other] {
        assert!(
            old.call_method("resources/subscribe", watched.clone()).await.get("result").is_some()
        );
    }
    let updates = |told: &[Value]| {
        told.iter().filter(|said| said["method"] == "notifications/resources/updated").count()
    };
    let mut turn = 0;
    wait_until("both hear of it", async || {
        turn += 1;
        change_watched_resource(&mut other, turn).await;
        paused.call_method("ping", json!({})).await;
        updates(&paused.notifications) > 0 && updates(&other.notifications) > 0
    })
    .await;
    gate.gateway.runtime().pause(PauseTarget::Agent("a".into()), "a token is out").await.unwrap();
    // What was on its way until then has come by now.
    while let Ok(said) =
        tokio::time::timeout(Duration::from_millis(300), paused.next_message()).await
    {
        paused.notifications.push(said);
    }
    let before = updates(&paused.notifications);
    for _ in 0..3 {
        let kept = updates(&other.notifications);
        turn += 1;
        change_watched_resource(&mut other, turn).await;
        while updates(&other.notifications) <= kept {
            let said = other.next_message().await;
            other.notifications.push(said);
        }
    }
    let refused = paused.call_method("resources/subscribe", watched).await;
    assert_eq!(refused["error"]["data"]["code"], "paused", "{refused}");
    assert_eq!(updates(&paused.notifications), before, "{:?}", paused.notifications);
    drop((paused, other));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subscribers_are_notified_after_upstream_restart() {
    let config = format!(
        "[tools.calc]\nkind = \"builtin\"\n[upstreams.x]\ncommand = {}\nargs = [\"--stdio\", \"--tools\", \"8\"]\nundeclared = \"open\"\n",
        json!(fixture_path())
    );
    // More at once than anybody keeps.
    let wanted: Vec<String> = (0..600).map(|n| format!("toolgate://x/test://{n}")).collect();
    let gate = TestGateway::open(&config).await;
    let mut listening =
        ListenStreamClient::open(&gate, "", json!({"resourceSubscriptions": wanted})).await;
    assert_eq!(
        listening.next_message().await["params"]["notifications"]["resourceSubscriptions"],
        json!(wanted)
    );
    kill_processes_with_number(8);
    let mut told = HashSet::new();
    while told.len() < wanted.len() {
        let said = tokio::time::timeout(Duration::from_secs(60), listening.next_message())
            .await
            .unwrap_or_else(|_| panic!("{} of 600", told.len()));
        if said["method"] == "notifications/resources/updated" {
            told.insert(said["params"]["uri"].to_string());
        }
    }
    drop(listening);
    gate.shut_down().await;
}
