//! Several messages at once, as 2025-03-26 knows them.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::security::digest;
use crate::support::{Gate, lines, until, with_fixture};

const ACCEPT: &str = "application/json, text/event-stream";

fn hello(version: &str) -> Value {
    let about = json!({"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}});
    json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about})
}

fn call(id: u64, tool: &str, arguments: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": tool, "arguments": arguments}})
}

fn ready() -> Value {
    json!({"jsonrpc": "2.0", "method": "notifications/initialized"})
}

/// A tool of toolgate's own, and one that is refused.
fn config(more: &str) -> String {
    with_fixture("undeclared = \"read\"") + "[tools.calc]\nkind = \"builtin\"\n\n" + more
}

struct Old {
    http: reqwest::Client,
    url: String,
    session: String,
}

impl Old {
    async fn open(gate: &Gate) -> Self {
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        let url = format!("{}/mcp", gate.url);
        let answer = http.post(&url).header("accept", ACCEPT).json(&hello("2025-03-26")).send().await.unwrap();
        let session = answer.headers()["mcp-session-id"].to_str().unwrap().to_owned();
        Self { http, url, session }
    }

    /// The status, and all that is said.
    async fn say(&self, messages: &Value, version: Option<&str>) -> (u16, Vec<Value>) {
        let mut request = self.http.post(&self.url).header("accept", ACCEPT).header("mcp-session-id", &self.session);
        if let Some(version) = version {
            request = request.header("mcp-protocol-version", version);
        }
        let answer = request.json(messages).send().await.unwrap();
        let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
        let said: Vec<Value> =
            text.lines().filter_map(|line| line.strip_prefix("data:")).filter_map(|data| serde_json::from_str(data.trim()).ok()).collect();
        (status, if said.is_empty() { serde_json::from_str(&text).into_iter().collect() } else { said })
    }
}

fn by_id(said: &[Value], id: u64) -> &Value {
    let mut found = said.iter().filter(|message| message["id"] == json!(id));
    let one = found.next().unwrap_or_else(|| panic!("no {id}: {said:?}"));
    assert!(found.next().is_none(), "{id} twice: {said:?}");
    one
}

#[tokio::test(flavor = "multi_thread")]
async fn each_message_of_a_batch_is_answered_as_if_it_came_alone() {
    let gate = Gate::open(&config("")).await;
    let old = Old::open(&gate).await;
    assert_eq!(old.say(&json!([ready()]), None).await, (202, vec![]), "nobody waits for an answer");
    let asked = json!([
        call(1, "calc", json!({"expression": "6 * 7"})),
        call(2, "test_tool_with_progress", json!({})),
        call(3, "calc", json!({"expr": "1"})),
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 77}},
        {"jsonrpc": "2.0", "id": 4, "method": "tools/list"},
        {"jsonrpc": "2.0", "id": 5, "method": "no/such"},
    ]);
    for version in [None, Some("2025-03-26")] {
        let (status, said) = old.say(&asked, version).await;
        assert_eq!(status, 200, "{said:?}");
        assert!(by_id(&said, 1)["result"].to_string().contains("42"), "{said:?}");
        assert_eq!(by_id(&said, 2)["result"]["isError"], json!(false), "{said:?}");
        assert_eq!(by_id(&said, 3)["result"]["_meta"]["toolgate/error"]["code"], "invalid_arguments", "{said:?}");
        assert!(by_id(&said, 4)["result"]["tools"].as_array().is_some_and(|tools| tools.len() > 1), "{said:?}");
        assert_eq!(by_id(&said, 5)["error"]["code"], json!(-32601), "{said:?}");
    }
    gate.end().await;
}

/// Two calls with arguments that are no good, and one with good ones.
fn mixed() -> String {
    let odd = |id: u64, arguments: &str| {
        format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"calc","arguments":{arguments}}}}}"#)
    };
    let good = call(2, "calc", json!({"expression": "6 * 7"}));
    format!("[{}, {good}, {}]", odd(1, r#"{"expression":"1","expression":"2"}"#), odd(3, "[]"))
}

/// What became of them: the gate has seen each, and each has its row.
fn judged(said: &[Value], gate: &Gate, many: usize) {
    for id in [1, 3] {
        assert_eq!(by_id(said, id)["result"]["_meta"]["toolgate/error"]["code"], "invalid_arguments", "{said:?}");
    }
    assert!(by_id(said, 2)["result"].to_string().contains("42"), "{said:?}");
    assert_eq!(rows(gate), many);
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_arguments_in_a_batch_have_their_row_and_take_no_other_along() {
    let gate = Gate::open(&config("")).await;
    let old = Old::open(&gate).await;
    let request = old.http.post(&old.url).header("accept", ACCEPT).header("mcp-session-id", &old.session);
    let answer = request.header("content-type", "application/json").body(mixed()).send().await.unwrap();
    assert_eq!(answer.status().as_u16(), 200);
    let text = answer.text().await.unwrap();
    let said: Vec<Value> =
        text.lines().filter_map(|line| line.strip_prefix("data:")).filter_map(|data| serde_json::from_str(data.trim()).ok()).collect();
    judged(&said, &gate, 3);
    let (serving, mut ask, mut answers) = gate.streams(None);
    ask.write_all(format!("{}\n", hello("2025-03-26")).as_bytes()).await.unwrap();
    answers.next_line().await.unwrap().unwrap();
    ask.write_all(format!("{}\n{}\n", ready(), mixed()).as_bytes()).await.unwrap();
    let mut said = vec![];
    while said.len() < 3 {
        said.push(serde_json::from_str::<Value>(&answers.next_line().await.unwrap().unwrap()).unwrap());
    }
    judged(&said, &gate, 6);
    drop((ask, answers));
    serving.await.unwrap();
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_is_none_does_nothing() {
    let gate = Gate::open(&config("[gateway]\nconcurrency = 8\nrate = { calls = 112, per = \"1h\" }")).await;
    let old = Old::open(&gate).await;
    let one = || call(1, "calc", json!({"expression": "1"}));
    let many: Vec<Value> = (0..65).map(|id| call(id, "calc", json!({"expression": "1"}))).collect();
    for (messages, version, why) in [
        (json!([]), None, "1 to 64 messages"),
        (json!(many), None, "1 to 64 messages"),
        (json!([one(), [one()]]), None, "and nothing else"),
        (json!([one(), one()]), None, "the same `id`"),
        (json!([one(), hello("2025-03-26")]), None, "comes alone"),
        // Nothing is heard of a batch that would be refused half way.
        (json!([one(), {"jsonrpc": "2.0", "id": 2}]), None, "no message of the protocol"),
        (json!([one()]), Some("2025-06-18"), "only 2025-03-26"),
        (json!([one()]), Some("2026-07-28"), "only 2025-03-26"),
    ] {
        let (status, said) = old.say(&messages, version).await;
        assert_eq!(status, 400, "{said:?}");
        assert!(said.iter().any(|said| said["error"]["message"].as_str().is_some_and(|said| said.contains(why))), "{why}: {said:?}");
    }
    // No call of them ran, and each that could be told has its row: as many as a batch may hold of the first, then 1, 2, 1, 1, 1 and 1.
    let refused =
        toolgate_store::Filter { tool: Some("calc".to_owned()), decision: Some(toolgate::Decision::Refused), ..Default::default() };
    assert_eq!(toolgate_store::Ledger::open(gate.ledger()).unwrap().find(&refused).unwrap().len(), 71);
    assert_eq!(rows(&gate), 71);
    // Nine messages take nine seats, which there are not; and each counts as one of those that may come in an hour. So does each that is
    // written down: these were 64, 2 and now 9, and seven were requests with one call or none, the greeting among them. That is 82 of 112;
    // 106 with three times eight. The fourth eight are refused, and six of them are written down: that is all that there is room for.
    let calls = |many: u64| json!((0..many).map(|id| call(id, "calc", json!({"expression": "1"}))).collect::<Vec<_>>());
    assert_eq!(old.say(&calls(9), None).await.0, 400);
    let statuses = [8, 8, 8, 8, 1, 1].map(&calls);
    let mut seen = Vec::new();
    for calls in &statuses {
        seen.push(old.say(calls, None).await.0);
    }
    assert_eq!(seen, [200, 200, 200, 429, 429, 429]);
    assert_eq!(rows(&gate), 71 + 9 + 24 + 6);
    gate.end().await;
    // What is refused as a request is not an answer to a message.
    let gate = Gate::open(&config("")).await;
    let mut old = Old::open(&gate).await;
    old.session = "gone".to_owned();
    assert_eq!(old.say(&calls(2), None).await.0, 404);
    gate.end().await;
}

/// How many calls of `calc` there were.
fn rows(gate: &Gate) -> usize {
    let calc = toolgate_store::Filter { tool: Some("calc".to_owned()), ..Default::default() };
    toolgate_store::Ledger::open(gate.ledger()).unwrap().find(&calc).unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_of_a_batch_that_is_refused_has_its_row() {
    let gate = Gate::open(&config("")).await;
    let old = Old::open(&gate).await;
    let calls: Vec<Value> = (1..=3).map(|n| call(n, "calc", json!({"expression": n.to_string()}))).collect();
    let answer = old.http.post(&old.url).header("accept", "text/plain").header("mcp-session-id", &old.session).json(&calls).send().await;
    assert_eq!(answer.unwrap().status(), 406);
    assert_eq!(rows(&gate), 3);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_is_refused_has_no_more_rows_than_the_rate_allows() {
    for (many, version) in [(64, Some("2025-06-18")), (20, None)] {
        let gate = Gate::open(&config("[gateway]\nrate = { calls = 10, per = \"1h\" }")).await;
        let old = Old::open(&gate).await;
        let calls = json!((0..many).map(|id| call(id, "calc", json!({"expression": "1"}))).collect::<Vec<_>>());
        // Whoever has opened a session has nine left.
        for status in [400, 429] {
            assert_eq!(old.say(&calls, version).await.0, status, "{many}");
            assert_eq!(rows(&gate), 9, "{many}");
        }
        let calc = toolgate_store::Filter { tool: Some("calc".to_owned()), ..Default::default() };
        let found = toolgate_store::Ledger::open(gate.ledger()).unwrap().find(&calc).unwrap();
        let told =
            |said: &str| found.iter().filter(|entry| entry.row.outcome.error().is_some_and(|error| error.message.ends_with(said))).count();
        assert_eq!(told(&format!("not written down: {})", many - 9)), 1, "{many}");
        gate.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_that_comes_while_there_is_no_room_has_its_row() {
    let home = tempfile::tempdir().unwrap();
    let begun = home.path().join("begun");
    let fixture = with_fixture(&format!("undeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}", json!(begun)));
    let gate = Gate::open(&format!("{fixture}[tools.calc]\nkind = \"builtin\"\n\n[gateway]\nconcurrency = 2\n")).await;
    let sleeper = |session: &str| {
        let client = gate.client().in_session(session);
        tokio::spawn(async move { client.call("sleep", json!({"ms": 600_000})).await })
    };
    let sleepers = [sleeper("a"), sleeper("b")];
    until("both seats are taken", async || lines(&begun) == 2).await;
    let one = || call(1, "calc", json!({"expression": "1"}));
    let two = json!([one(), call(2, "calc", json!({"expression": "2"}))]);
    let three = json!([one(), call(2, "calc", json!({"expression": "2"})), call(3, "calc", json!({"expression": "3"}))]);
    let unread = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"calc"},"x":1e999}"#;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let mut written = 0;
    for (place, body, status, many, why) in [
        ("/mcp", two.to_string(), 503, 2, "at the same time"),
        ("/mcp", one().to_string(), 503, 1, "at the same time"),
        ("/v1/calls/check", json!({"id": "a", "session": "s", "tool": "calc"}).to_string(), 503, 1, "at the same time"),
        ("/mcp", three.to_string(), 400, 3, "taken at once"),
        ("/mcp", unread.to_owned(), 400, 1, ""),
        ("/mcp/%ff", one().to_string(), 400, 1, "hexadecimal"),
    ] {
        let request = http.post(format!("{}{place}", gate.url)).header("accept", ACCEPT).header("content-type", "application/json");
        let answer = request.body(body.clone()).send().await.unwrap();
        assert_eq!(answer.status().as_u16(), status, "{body}");
        // There may be room later; what is wrong stays so.
        assert_eq!(answer.headers().contains_key("retry-after"), status == 503, "{body}");
        let said = answer.text().await.unwrap();
        assert!(said.contains(why), "{said}");
        written += many;
        assert_eq!(rows(&gate), written, "{body}");
    }
    for sleeper in sleepers {
        sleeper.abort();
    }
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_half_of_the_seats_leaves_the_others_to_others() {
    let home = tempfile::tempdir().unwrap();
    let begun = home.path().join("begun");
    let fixture = with_fixture(&format!("undeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}", json!(begun)));
    let token = |principal: &str| format!("[[gateway.tokens]]\nprincipal = \"{principal}\"\nsha256 = \"{}\"\n", digest(principal));
    let tokens = token("ann") + &token("bob");
    let gate = Gate::open(&format!("{fixture}[tools.calc]\nkind = \"builtin\"\n\n[gateway]\nconcurrency = 4\n{tokens}")).await;
    let sleeper = |session: &str| {
        let client = gate.client().with_token("ann").in_session(session);
        tokio::spawn(async move { client.call("sleep", json!({"ms": 600_000})).await })
    };
    let sleepers = [sleeper("a"), sleeper("b")];
    until("half of the seats are taken", async || lines(&begun) == 2).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let one = |id: u64| call(id, "calc", json!({"expression": "1"}));
    for (messages, status, many) in [(one(1), 503, 1), (json!([one(1), one(2)]), 503, 3), (json!([one(1), one(2), one(3)]), 400, 6)] {
        let request = http.post(format!("{}/mcp", gate.url)).header("accept", ACCEPT).bearer_auth("ann");
        let answer = request.json(&messages).send().await.unwrap();
        assert_eq!((answer.status().as_u16(), answer.headers().contains_key("retry-after")), (status, status == 503), "{messages}");
        assert_eq!(rows(&gate), many, "{messages}");
    }
    // For somebody else there is room.
    assert_eq!(gate.client().with_token("bob").code("calc", json!({"expression": "1"})).await, "ok");
    for sleeper in sleepers {
        sleeper.abort();
    }
    // What is given back may be taken again.
    let client = gate.client().with_token("ann").in_session("c");
    until("a seat is free", async || client.ask("tools/call", json!({"name": "calc", "arguments": {"expression": "2"}})).await.0 == 200)
        .await;
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_another_request_has_is_refused_until_that_is_answered() {
    let home = tempfile::tempdir().unwrap();
    let begun = home.path().join("begun");
    let fixture = with_fixture(&format!("undeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}", json!(begun)));
    let gate = Gate::open(&format!("{fixture}[tools.calc]\nkind = \"builtin\"\n")).await;
    let old = Old::open(&gate).await;
    assert_eq!(old.say(&ready(), None).await.0, 202);
    let sleeper = old.http.post(&old.url).header("accept", ACCEPT).header("mcp-session-id", &old.session);
    let sleeper = sleeper.json(&call(7, "sleep", json!({"ms": 600_000})));
    let sleeping = tokio::spawn(async move { sleeper.send().await.unwrap().text().await });
    until("it sleeps", async || lines(&begun) == 1).await;
    let seven = |n: u64| call(7, "calc", json!({"expression": n.to_string()}));
    let (status, said) = old.say(&seven(1), None).await;
    assert_eq!((status, &said[0]["error"]["data"]["code"]), (400, &json!("invalid_request")), "{said:?}");
    assert!(said[0]["error"]["message"].as_str().unwrap().contains("the same `id`"), "{said:?}");
    assert_eq!(rows(&gate), 1);
    let (status, said) = old.say(&json!([call(8, "calc", json!({"expression": "2"})), seven(3)]), None).await;
    assert_eq!((status, rows(&gate)), (400, 3), "{said:?}");
    // Nothing of that batch was heard, so its other name is free; and so is this one in another session.
    assert_eq!(old.say(&call(8, "calc", json!({"expression": "4"})), None).await.0, 200);
    assert_eq!(Old::open(&gate).await.say(&seven(5), None).await.0, 200);
    // The first is waited for until it is over.
    let cancel = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}});
    assert_eq!(old.say(&cancel, None).await.0, 202);
    tokio::time::timeout(Duration::from_secs(30), sleeping).await.unwrap().unwrap().unwrap();
    // One after the other may have the same name.
    until("its name is free", async || old.say(&seven(6), None).await.0 == 200).await;
    for n in 7..9 {
        assert_eq!(old.say(&seven(n), None).await.0, 200);
    }
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_taken_until_its_call_is_over_though_nobody_waits_for_it() {
    let home = tempfile::tempdir().unwrap();
    let begun = home.path().join("begun");
    let fixture = with_fixture(&format!("undeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}", json!(begun)));
    let gate = Gate::open(&format!("{fixture}[tools.calc]\nkind = \"builtin\"\n")).await;
    let old = Old::open(&gate).await;
    assert_eq!(old.say(&ready(), None).await.0, 202);
    let sleeper = old.http.post(&old.url).header("accept", ACCEPT).header("mcp-session-id", &old.session);
    let sleeper = sleeper.json(&call(7, "sleep", json!({"ms": 3_000})));
    let sleeping = tokio::spawn(async move { sleeper.send().await.unwrap().text().await });
    until("it sleeps", async || lines(&begun) == 1).await;
    sleeping.abort();
    assert!(sleeping.await.is_err(), "it has hung up");
    tokio::time::sleep(Duration::from_millis(300)).await;
    let seven = call(7, "calc", json!({"expression": "6 * 7"}));
    let (status, said) = old.say(&seven, None).await;
    assert_eq!((status, &said[0]["error"]["data"]["code"]), (400, &json!("invalid_request")), "{said:?}");
    let mut said = Vec::new();
    until("its name is free", async || {
        let (status, heard) = old.say(&seven, None).await;
        said = heard;
        status == 200
    })
    .await;
    assert_eq!(by_id(&said, 7)["result"]["structuredContent"], json!({"result": 42}), "{said:?}");
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_another_request_has_is_refused_over_streams_too() {
    let home = tempfile::tempdir().unwrap();
    let begun = home.path().join("begun");
    let fixture = with_fixture(&format!("undeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}", json!(begun)));
    let gate = Gate::open(&format!("{fixture}[tools.calc]\nkind = \"builtin\"\n")).await;
    let (serving, mut ask, mut answers) = gate.streams(None);
    ask.write_all(format!("{}\n{}\n", hello("2025-06-18"), ready()).as_bytes()).await.unwrap();
    answers.next_line().await.unwrap().unwrap();
    ask.write_all(format!("{}\n", call(7, "sleep", json!({"ms": 3_000}))).as_bytes()).await.unwrap();
    until("it sleeps", async || lines(&begun) == 1).await;
    let seven = call(7, "calc", json!({"expression": "6 * 7"}));
    ask.write_all(format!("{seven}\n").as_bytes()).await.unwrap();
    let refused = answers.next_line().await.unwrap().unwrap();
    assert!(refused.contains("the same `id`") && refused.contains("callId"), "{refused}");
    assert_eq!(rows(&gate), 1);
    let slept = answers.next_line().await.unwrap().unwrap();
    assert!(slept.contains("Slept for"), "{slept}");
    ask.write_all(format!("{seven}\n").as_bytes()).await.unwrap();
    let done = answers.next_line().await.unwrap().unwrap();
    assert!(done.contains("{\"result\":42}"), "{done}");
    drop((ask, answers));
    serving.await.unwrap();
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_counts_no_more_when_a_batch_is_here_leaves_room_for_its_rows() {
    let gate = Gate::open(&config("[gateway]\nrate = { calls = 4, per = \"2s\" }")).await;
    let old = Old::open(&gate).await;
    let calls = json!((0..4).map(|id| call(id, "calc", json!({"expression": "1"}))).collect::<Vec<_>>()).to_string();
    let address = gate.url.trim_start_matches("http://");
    let head = format!(
        "POST /mcp HTTP/1.1\r\nhost: {address}\r\naccept: {ACCEPT}\r\ncontent-type: application/json\r\nmcp-session-id: {}\r\n\
         mcp-protocol-version: 2025-06-18\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        old.session,
        calls.len()
    );
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    // The greeting counts when the head is read, and does not when the body is.
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    stream.write_all(calls.as_bytes()).await.unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).await.unwrap();
    assert!(said.starts_with("HTTP/1.1 400 "), "{said}");
    assert_eq!(rows(&gate), 4);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_is_answered_though_nobody_says_more() {
    let gate = Gate::open(&config("")).await;
    let (serving, mut ask, mut answers) = gate.streams(None);
    ask.write_all(format!("{}\n{}\n", hello("2025-06-18"), ready()).as_bytes()).await.unwrap();
    answers.next_line().await.unwrap().unwrap();
    let bad: String = (0..500)
        .map(|n| format!(r#"{{"jsonrpc":"2.0","id":{n},"method":"tools/call","params":{{"name":"calc"}},"x":1e999}}{}"#, '\n'))
        .collect();
    let asking = tokio::spawn(async move {
        ask.write_all(bad.as_bytes()).await.unwrap();
        ask.shutdown().await.unwrap();
        ask
    });
    let mut refused = 0;
    while let Ok(Some(line)) = answers.next_line().await {
        assert!(line.contains("callId"), "{line}");
        refused += 1;
    }
    assert_eq!((refused, rows(&gate)), (500, 500));
    drop(asking.await);
    serving.await.unwrap();
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_comes_over_streams_too() {
    let gate = Gate::open(&config("")).await;
    for (version, takes) in [("2025-03-26", true), ("2025-06-18", false)] {
        let (serving, mut ask, mut answers) = gate.streams(None);
        let batch = json!([ready(), call(1, "calc", json!({"expression": "6 * 7"})), call(2, "calc", json!({"expression": "2 + 3"}))]);
        ask.write_all(format!("{}\n", hello(version)).as_bytes()).await.unwrap();
        let agreed = answers.next_line().await.unwrap().unwrap();
        assert!(agreed.contains(version), "{agreed}");
        if takes {
            ask.write_all(format!("{batch}\n").as_bytes()).await.unwrap();
            let mut said = vec![];
            while said.len() < 2 {
                said.push(serde_json::from_str::<Value>(&answers.next_line().await.unwrap().unwrap()).unwrap());
            }
            assert!(by_id(&said, 1)["result"].to_string().contains("42"), "{said:?}");
            assert!(by_id(&said, 2)["result"].to_string().contains('5'), "{said:?}");
            // Where one of them is none of the protocol's, none is heard.
            let before = rows(&gate);
            let odd = json!([call(3, "calc", json!({"expression": "1"})), {"jsonrpc": "2.0", "id": 4, "method": 5}]);
            ask.write_all(format!("{odd}\n").as_bytes()).await.unwrap();
            let refused = answers.next_line().await.unwrap().unwrap();
            assert!(refused.contains("one of the batch is no message of the protocol") && refused.contains("invalid_request"), "{refused}");
            assert_eq!(rows(&gate), before + 1, "its call is written down");
        } else {
            ask.write_all(format!("{}\n{batch}\n", ready()).as_bytes()).await.unwrap();
            let refused = answers.next_line().await.unwrap().unwrap();
            assert!(refused.contains("only 2025-03-26 knows batches"), "{refused}");
        }
        drop((ask, answers));
        serving.await.unwrap();
    }
    gate.end().await;
}
