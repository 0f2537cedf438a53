//! A gateway that is told to end: whoever has a call under way hears its answer, and nothing is
//! left of it.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::Semaphore;

use crate::mid_call_messages::{gateway_with_slow_server, slow_server_requests};
use crate::resumable_sessions::{ResumableTestSession, read_stream};
use crate::support::{
    TestGateway, child_processes, count_lines, fixture_config, fixture_path, processes_with_number,
    wait_until,
};
use crate::tls_and_authentication::{LegacyHttpClient, http_client};
use crate::upstream_faults::{well_and_ill_config, write_script};

/// What a client is told of a call that is under way when the gateway is told to end.
async fn answer_at_shutdown(effect: &str, in_session: bool, is_replaced: bool) -> String {
    let home = tempfile::tempdir().unwrap();
    let begun = home.path().join("begun");
    let number = if in_session { 13 } else { 7 };
    let text = |more: &str| {
        well_and_ill_config(&format!(
            "command = {}\nargs = [\"--stdio\", \"--tools\", \"{number}\"]\nenv = {{ FIXTURE_COUNTER = {}{more} }}\n\
             [tools.ill_sleep]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"{effect}\"\npolicy = \"open\"\n",
            json!(fixture_path()),
            json!(begun)
        ))
    };
    let gate = TestGateway::open(&text("")).await;
    let ms = if is_replaced { 4_000 } else { 1_000 };
    let (client, store) = (gate.client().in_session("slow"), Arc::clone(&gate.store));
    let slow = if in_session {
        let session = ResumableTestSession::connect(&gate.url, "2025-06-18").await;
        tokio::spawn(async move {
            let heard =
                read_stream(session.call("ill_sleep", json!({ "ms": ms })).await, |heard| {
                    heard.answer().is_some()
                })
                .await;
            heard
                .answer()
                .map(|answer| answer["result"].clone())
                .unwrap_or_else(|| panic!("it is lost: {heard:?}"))
        })
    } else {
        tokio::spawn(async move { client.call("ill_sleep", json!({ "ms": ms })).await })
    };
    wait_until("it is under way", async || count_lines(&begun) > 0).await;
    if is_replaced {
        // Another is there in its place; this one is only there for the call.
        gate.reload(&text(", OTHER = \"1\"")).await.unwrap();
    }
    gate.shut_down().await;
    let said = slow.await.unwrap();
    // Nobody has to find out what became of it, however late it is.
    let pending = toolgate::Store::pending_claims(&*store, toolgate::Timestamp::MAX).await.unwrap();
    assert!(
        pending.is_empty() && processes_with_number(number).is_empty(),
        "{pending:?} {:?}",
        child_processes()
    );
    said["content"][0]["text"].as_str().map(str::to_owned).unwrap_or_else(|| panic!("{said}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_waits_for_running_calls() {
    for effect in ["read", "write"] {
        assert_eq!(
            answer_at_shutdown(effect, false, false).await,
            "Slept for 1000 milliseconds.",
            "{effect}"
        );
    }
    assert_eq!(answer_at_shutdown("write", false, true).await, "Slept for 4000 milliseconds.");
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_waits_for_running_session_calls() {
    for effect in ["read", "write"] {
        assert_eq!(
            answer_at_shutdown(effect, true, false).await,
            "Slept for 1000 milliseconds.",
            "{effect}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_does_not_wait_for_approval() {
    let rules = "[tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
        [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"count\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";
    let gate = TestGateway::open(&(fixture_config("") + rules)).await;
    let mut older =
        LegacyHttpClient::connect(&http_client(), &gate.url, json!({"elicitation": {}})).await;
    let call = older.start_request("tools/call", &json!({"name": "count", "arguments": {}}));
    older.inbox.wait_for(|message| message["method"] == "elicitation/create").await;
    let gateway = gate.gateway.clone();
    let ending = tokio::spawn(async move { gateway.shut_down().await });
    // It is told how it can be approved otherwise.
    let answer = older.wait_for_answer(call).await;
    let error = &answer["result"]["_meta"]["toolgate/error"];
    assert_eq!(
        (&error["code"], error["approval"]["id"].is_string()),
        (&json!("approval_required"), true),
        "{answer}"
    );
    ending.await.unwrap();
    drop(older);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_records_suspended_call_as_cancelled() {
    let own = json!(fixture_path());
    let config = format!(
        "[upstreams.ill]\ncommand = {own}\nargs = [\"--ill\"]\nprefix = \"\"\nundeclared = \"read\"\n"
    );
    let gate = TestGateway::open(&config).await;
    let client = gate.client().in_session("s").with_capabilities(json!({"elicitation": {}}));
    let asked = client.call("mark", json!({"key": "a", "how": "asks"})).await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    gate.gateway.shut_down().await;
    // There by now, and by what became of it, not by what becomes of an upstream that ends.
    let rows = gate.gateway.runtime().session("default", "local", "s").rows().await.unwrap();
    assert_eq!(rows.iter().map(|row| row.code()).collect::<Vec<_>>(), [Some("cancelled")]);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_waits_for_prompts_resources_and_completions() {
    let let_go = Arc::new(Semaphore::new(0));
    let gate = gateway_with_slow_server(&let_go, "").await;
    let mut older = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
    let mut asked = Vec::new();
    for (method, mut params, place, found) in slow_server_requests() {
        params["_meta"] = json!({"progressToken": method});
        let id = older.start_request(method, &params);
        older
            .inbox
            .wait_for(|message| {
                message["method"] == "notifications/progress"
                    && message["params"]["progressToken"] == method
            })
            .await;
        asked.push((id, place, found));
    }
    let gateway = gate.gateway.clone();
    let ending = tokio::spawn(async move { gateway.shut_down().await });
    // Longer than those have who only listen.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let_go.add_permits(asked.len());
    for (id, place, found) in asked {
        let answer = older.wait_for_answer(id).await;
        assert_eq!(answer.pointer(place), Some(&json!(found)), "{answer}");
    }
    ending.await.unwrap();
    drop(older);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_during_shutdown_fails_and_leaves_no_process() {
    let home = tempfile::tempdir().unwrap();
    let silent = write_script(home.path(), "silent.sh", "sleep 600");
    let calc = "[tools.calc]\nkind = \"builtin\"\n";
    let gate = TestGateway::open(calc).await;
    let more =
        format!("{calc}[upstreams.silent]\ncommand = {silent}\nargs = [\"--tools\", \"88\"]\n");
    std::fs::write(gate.home.path().join("toolgate.toml"), more).unwrap();
    let gateway = gate.gateway.clone();
    let reading = tokio::spawn(async move { gateway.reload().await });
    wait_until("it is started", async || !processes_with_number(88).is_empty()).await;
    gate.gateway.shut_down().await;
    // What it has started meanwhile is not put in place where nobody would end it, and nothing more
    // is started.
    assert!(reading.await.unwrap().is_err());
    assert!(gate.gateway.reload().await.is_err());
    wait_until("nothing of it is left", async || processes_with_number(88).is_empty()).await;
    gate.shut_down().await;
}
