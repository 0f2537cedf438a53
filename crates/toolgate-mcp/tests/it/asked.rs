//! Who is asked, and whose answer counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::entering::{Older, plain};
use crate::old::{answer, discovered, fresh, listen, request, result};
use crate::security::digest;
use crate::support::{Gate, fixture, until, with_fixture};

const ASKED: &str = "[tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
    [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"count\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";

/// The approval that a refused call waits for.
fn approval(result: &Value) -> &str {
    let error = &result["_meta"]["toolgate/error"];
    assert_eq!(error["code"], "approval_required", "{result}");
    error["approval"]["id"].as_str().unwrap_or_else(|| panic!("{result}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_answer_goes_by_what_the_tool_is_when_the_answer_comes() {
    let gate = Gate::open(&(with_fixture("") + ASKED)).await;
    let yes = json!({"action": "accept", "content": {"approve": true}});
    let mut older = Older::greet(&plain(), &gate.url, json!({"elicitation": {}})).await;
    let call = older.begin("tools/call", &json!({"name": "count", "arguments": {}}));
    let question = older.ears.hear(|said| said["method"] == "elicitation/create").await;
    let newer = gate.client().in_session("s").who_can(json!({"elicitation": {}}));
    let asked = newer.call("count", json!({})).await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    // From here on it may destroy something.
    gate.reload(&(with_fixture("") + &ASKED.replace("effect = \"write\"\n", ""))).await.unwrap();
    older.say(&json!({"jsonrpc": "2.0", "id": question["id"], "result": yes}));
    let of_older = older.answer_to(call).await["result"].clone();
    let answer = json!({"toolgate_approval": yes});
    let back = json!({"name": "count", "arguments": {}, "requestState": asked["requestState"], "inputResponses": answer});
    let of_newer = newer.ask("tools/call", back).await.1["result"].clone();
    for result in [of_older, of_newer] {
        // It still waits for whoever may.
        assert!(gate.gateway.runtime().answer_approval(approval(&result), true, "lead").await.unwrap(), "{result}");
    }
    drop(older);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_knows_no_forms_is_sent_none() {
    let home = tempfile::tempdir().unwrap();
    let marks = home.path().join("marks");
    let curious = format!(
        "[upstreams.ill]\ncommand = {}\nargs = [\"--ill\"]\nprefix = \"\"\nundeclared = \"read\"\nenv = {{ FIXTURE_COUNTER = {} }}\n",
        json!(fixture()),
        json!(marks)
    );
    let asked = ASKED.replace("count", "echo").replace("\"fix\"", "\"ill\"");
    let gate = Gate::open(&(curious + &asked)).await;
    let echo = json!({"name": "echo", "arguments": {"text": "x"}});
    // Its upstream's question is refused, too, and it is told what became of the call.
    let mark = |key: &str| json!({"name": "mark", "arguments": {"key": key, "how": "asks"}});
    let told = || std::fs::read_to_string(&marks).unwrap().lines().last().unwrap_or_default().to_owned();
    for (can, is_asked) in [(json!({"url": {}}), false), (json!({"form": {}, "url": {}}), true)] {
        let capabilities = json!({"elicitation": can});
        let newer = gate.client().in_session(&can.to_string().replace([' ', '"'], "")).who_can(capabilities.clone());
        for (call, key) in [(echo.clone(), "toolgate_approval"), (mark("newer"), "input")] {
            let (_, said) = newer.ask("tools/call", call.clone()).await;
            assert_eq!(said["result"]["inputRequests"][key].is_object(), is_asked, "{can}: {said}");
        }
        if is_asked {
            continue;
        }
        assert_eq!(told(), "null");
        let refused = newer.call("echo", json!({"text": "x"})).await;
        assert!(!approval(&refused).is_empty());
        let mut older = Older::greet(&plain(), &gate.url, capabilities).await;
        assert!(!approval(&older.ask("tools/call", echo.clone()).await["result"]).is_empty());
        let done = older.ask("tools/call", mark("older")).await;
        assert_eq!((&done["result"]["structuredContent"], told().as_str()), (&json!({"done": true}), "null"), "{done}");
        drop(older);
    }
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_no_seat_left_can_still_answer_and_take_back() {
    let token = |principal: &str| format!("[[gateway.tokens]]\nprincipal = \"{principal}\"\nsha256 = \"{}\"\n", digest(principal));
    let ask = "[tools.echo]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
        [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"echo\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";
    let gate = Gate::open(&format!("{}{ask}[gateway]\nconcurrency = 2\n{}", with_fixture(""), token("ann"))).await;
    let mut own = reqwest::header::HeaderMap::new();
    own.insert("authorization", "Bearer ann".parse().unwrap());
    let http = reqwest::Client::builder().no_proxy().default_headers(own).build().unwrap();
    let mut older = Older::greet(&http, &gate.url, json!({"elicitation": {}})).await;
    for answers in [true, false] {
        // The call has the one seat that there is for somebody.
        let asked = older.begin("tools/call", &json!({"name": "echo", "arguments": {"text": answers.to_string()}}));
        let question = older.ears.hear(|said| said["method"] == "elicitation/create").await;
        let said = match answers {
            true => json!({"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept", "content": {"approve": true}}}),
            false => json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": asked}}),
        };
        let taken = older.request(reqwest::Method::POST).json(&said).send().await.unwrap();
        assert_eq!(taken.status().as_u16(), 202, "{answers}");
        if answers {
            assert_eq!(older.answer_to(asked).await["result"]["isError"], false);
        }
        let ping = json!({"jsonrpc": "2.0", "id": format!("ping {answers}"), "method": "ping"});
        let pings = async || {
            let answer = older.request(reqwest::Method::POST).json(&ping).send().await.unwrap();
            let free = answer.status() == 200;
            // To its end: until then it has the seat.
            answer.text().await.unwrap();
            free
        };
        until("the seat is free", pings).await;
    }
    drop(older);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_asked_by_an_upstream_keeps_nobody_else_from_it() {
    let upstream = |timeout: u8| with_fixture(&format!("undeclared = \"read\"\nconcurrency = 1\ntimeout = \"{timeout}s\""));
    let gate = Gate::open(&upstream(20)).await;
    let (tool, client) = ("test_input_required_result_elicitation", gate.client().in_session("asked").who_can(json!({"elicitation": {}})));
    let asked = client.call(tool, json!({})).await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    assert_eq!(gate.client().in_session("other").code("echo", json!({"text": "x"})).await, "ok");
    // Nor is it forgotten where the upstream is replaced meanwhile: what is under way ends as it began.
    gate.reload(&upstream(30)).await.unwrap();
    assert_eq!(gate.client().in_session("later").code("echo", json!({"text": "x"})).await, "ok");
    let name = json!({"user_name": {"action": "accept", "content": {"name": "Ann"}}});
    let back = json!({"name": tool, "arguments": {}, "requestState": asked["requestState"], "inputResponses": name});
    let told = client.ask("tools/call", back).await.1;
    assert_eq!(told["result"]["content"][0]["text"], "Hello, Ann!", "{told}");
    gate.end().await;
}

/// A server of 2026-07-28 that asks back without end, and counts how often it is called.
async fn asks_without_end(called: Arc<AtomicUsize>) -> String {
    listen(move |mut stream| {
        let called = Arc::clone(&called);
        async move {
            let Some((_, asked)) = request(&mut stream).await else { return };
            let form = json!({"message": "Who?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}});
            let said = match asked["method"].as_str().unwrap_or_default() {
                "server/discover" => discovered(&asked, "asks", &json!({"tools": {}})),
                "tools/list" => {
                    fresh(&asked, json!({"tools": [{"name": "ask", "description": "Asks.", "inputSchema": {"type": "object"}}]}))
                }
                "tools/call" => {
                    called.fetch_add(1, Ordering::SeqCst);
                    let questions = json!({"who": {"method": "elicitation/create", "params": form}});
                    result(&asked, json!({"resultType": "input_required", "inputRequests": questions}))
                }
                _ => answer("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(said.as_bytes()).await;
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn who_was_asked_goes_on_beside_another_call_where_the_upstream_is_replaced() {
    let upstream = |timeout: u8| with_fixture(&format!("undeclared = \"read\"\nconcurrency = 2\ntimeout = \"{timeout}s\""));
    let gate = Gate::open(&upstream(20)).await;
    let (tool, client) = ("test_input_required_result_elicitation", gate.client().in_session("asked").who_can(json!({"elicitation": {}})));
    let asked = client.call(tool, json!({})).await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    let slow = gate.client().in_session("slow");
    let slow = tokio::spawn(async move { slow.code("sleep", json!({"ms": 12_000})).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    gate.reload(&upstream(30)).await.unwrap();
    // Whoever waits for all to be over is at it by now.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let name = json!({"user_name": {"action": "accept", "content": {"name": "Ann"}}});
    let back = json!({"name": tool, "arguments": {}, "requestState": asked["requestState"], "inputResponses": name});
    let told = client.ask("tools/call", back).await.1;
    assert_eq!(told["result"]["content"][0]["text"], "Hello, Ann!", "{told}");
    assert!(!slow.is_finished(), "it was waited for");
    slow.abort();
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_asked_what_nobody_reads() {
    let called = Arc::<AtomicUsize>::default();
    let address = asks_without_end(Arc::clone(&called)).await;
    let gate = Gate::open(&format!("[upstreams.a]\nurl = \"http://{address}/mcp\"\nprefix = \"\"\nundeclared = \"read\"\n")).await;
    let client = gate.client().in_session("s").who_can(json!({"elicitation": {}}));
    let (mut said, mut answered) = (client.call("ask", json!({})).await, 0);
    while said["resultType"] == "input_required" {
        answered += 1;
        let name = json!({"who": {"action": "accept", "content": {"name": "Ann"}}});
        let back = json!({"name": "ask", "arguments": {}, "requestState": said["requestState"], "inputResponses": name});
        said = client.ask("tools/call", back).await.1["result"].clone();
    }
    assert_eq!(said["_meta"]["toolgate/error"]["code"], "upstream_rejected", "{said}");
    // The tenth question is not put to it.
    assert_eq!((answered, called.load(Ordering::SeqCst)), (9, 10), "{said}");
    gate.end().await;
}
