//! A gateway that is told to end: whoever has a call under way hears its answer, and nothing is left of it.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::Semaphore;

use crate::between::{before_slow, questions};
use crate::entering::{Older, plain};
use crate::faults::{config, script};
use crate::returning::{Session, listen};
use crate::support::{Gate, children, fixture, lines, processes, until, with_fixture};

/// What a client is told of a call that is under way when the gateway is told to end.
async fn told(effect: &str, in_session: bool, is_replaced: bool) -> String {
    let home = tempfile::tempdir().unwrap();
    let begun = home.path().join("begun");
    let number = if in_session { 13 } else { 7 };
    let text = |more: &str| {
        config(&format!(
            "command = {}\nargs = [\"--stdio\", \"--tools\", \"{number}\"]\nenv = {{ FIXTURE_COUNTER = {}{more} }}\n\
             [tools.ill_sleep]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"{effect}\"\npolicy = \"open\"\n",
            json!(fixture()),
            json!(begun)
        ))
    };
    let gate = Gate::open(&text("")).await;
    let ms = if is_replaced { 4_000 } else { 1_000 };
    let (client, store) = (gate.client().in_session("slow"), Arc::clone(&gate.store));
    let slow = if in_session {
        let session = Session::greet(&gate.url, "2025-06-18").await;
        tokio::spawn(async move {
            let heard = listen(session.call("ill_sleep", json!({ "ms": ms })).await, |heard| heard.answer().is_some()).await;
            heard.answer().map(|answer| answer["result"].clone()).unwrap_or_else(|| panic!("it is lost: {heard:?}"))
        })
    } else {
        tokio::spawn(async move { client.call("ill_sleep", json!({ "ms": ms })).await })
    };
    until("it is under way", async || lines(&begun) > 0).await;
    if is_replaced {
        // Another is there in its place; this one is only there for the call.
        gate.reload(&text(", OTHER = \"1\"")).await.unwrap();
    }
    gate.end().await;
    let said = slow.await.unwrap();
    // Nobody has to find out what became of it, however late it is.
    let pending = toolgate::Store::pending(&*store, toolgate::Timestamp::MAX).await.unwrap();
    assert!(pending.is_empty() && processes(number).is_empty(), "{pending:?} {:?}", children());
    said["content"][0]["text"].as_str().map(str::to_owned).unwrap_or_else(|| panic!("{said}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_lets_calls_end() {
    for effect in ["read", "write"] {
        assert_eq!(told(effect, false, false).await, "Slept for 1000 milliseconds.", "{effect}");
    }
    assert_eq!(told("write", false, true).await, "Slept for 4000 milliseconds.");
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_lets_calls_of_a_session_end() {
    for effect in ["read", "write"] {
        assert_eq!(told(effect, true, false).await, "Slept for 1000 milliseconds.", "{effect}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_waits_for_nobody_who_is_asked_to_approve() {
    let rules = "[tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
        [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"count\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";
    let gate = Gate::open(&(with_fixture("") + rules)).await;
    let mut older = Older::greet(&plain(), &gate.url, json!({"elicitation": {}})).await;
    let call = older.begin("tools/call", &json!({"name": "count", "arguments": {}}));
    older.ears.hear(|said| said["method"] == "elicitation/create").await;
    let gateway = gate.gateway.clone();
    let ending = tokio::spawn(async move { gateway.shut_down().await });
    // It is told how it can be approved otherwise.
    let answer = older.answer_to(call).await;
    let error = &answer["result"]["_meta"]["toolgate/error"];
    assert_eq!((&error["code"], error["approval"]["id"].is_string()), (&json!("approval_required"), true), "{answer}");
    ending.await.unwrap();
    drop(older);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_waits_for_its_client_has_its_row_when_the_gateway_ends() {
    let own = json!(fixture());
    let config = format!("[upstreams.ill]\ncommand = {own}\nargs = [\"--ill\"]\nprefix = \"\"\nundeclared = \"read\"\n");
    let gate = Gate::open(&config).await;
    let client = gate.client().in_session("s").who_can(json!({"elicitation": {}}));
    let asked = client.call("mark", json!({"key": "a", "how": "asks"})).await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    gate.gateway.shut_down().await;
    // There by now, and by what became of it, not by what becomes of an upstream that ends.
    let rows = gate.gateway.runtime().session("default", "local", "s").rows().await.unwrap();
    assert_eq!(rows.iter().map(|row| row.code()).collect::<Vec<_>>(), [Some("cancelled")]);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ending_lets_prompts_resources_and_completions_end() {
    let let_go = Arc::new(Semaphore::new(0));
    let gate = before_slow(&let_go, "").await;
    let mut older = Older::greet(&plain(), &gate.url, json!({})).await;
    let mut asked = Vec::new();
    for (method, mut params, place, found) in questions() {
        params["_meta"] = json!({"progressToken": method});
        let id = older.begin(method, &params);
        older.ears.hear(|said| said["method"] == "notifications/progress" && said["params"]["progressToken"] == method).await;
        asked.push((id, place, found));
    }
    let gateway = gate.gateway.clone();
    let ending = tokio::spawn(async move { gateway.shut_down().await });
    // Longer than those have who only listen.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let_go.add_permits(asked.len());
    for (id, place, found) in asked {
        let answer = older.answer_to(id).await;
        assert_eq!(answer.pointer(place), Some(&json!(found)), "{answer}");
    }
    ending.await.unwrap();
    drop(older);
    gate.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_reads_the_configuration_while_the_gateway_ends_leaves_nothing_behind() {
    let home = tempfile::tempdir().unwrap();
    let silent = script(home.path(), "silent.sh", "sleep 600");
    let calc = "[tools.calc]\nkind = \"builtin\"\n";
    let gate = Gate::open(calc).await;
    let more = format!("{calc}[upstreams.silent]\ncommand = {silent}\nargs = [\"--tools\", \"88\"]\n");
    std::fs::write(gate.home.path().join("toolgate.toml"), more).unwrap();
    let gateway = gate.gateway.clone();
    let reading = tokio::spawn(async move { gateway.reload().await });
    until("it is started", async || !processes(88).is_empty()).await;
    gate.gateway.shut_down().await;
    // What it has started meanwhile is not put in place where nobody would end it, and nothing more is started.
    assert!(reading.await.unwrap().is_err());
    assert!(gate.gateway.reload().await.is_err());
    until("nothing of it is left", async || processes(88).is_empty()).await;
    gate.end().await;
}
