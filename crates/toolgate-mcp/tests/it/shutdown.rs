//! Tests that a shutdown waits for running calls and leaves no process.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::Semaphore;

use crate::approvals::APPROVAL_RULES;
use crate::legacy_http_client::LegacyHttpClient;
use crate::mid_call_messages::{gateway_with_slow_server, slow_server_requests};
use crate::resumable_sessions::{ResumableTestSession, read_stream};
use crate::support::{
    CALC_TOOL_CONFIG, TestGateway, child_processes, count_lines, fixture_config, fixture_path,
    http_client, processes_with_number, wait_until,
};
use crate::upstream_faults::{well_and_ill_config, write_script};

/// Returns the answer to a call that runs when the gateway shuts down.
async fn answer_at_shutdown(effect: &str, in_session: bool, is_replaced: bool) -> String {
    let home = tempfile::tempdir().unwrap();
    let calls = home.path().join("calls");
    let number = if in_session { 13 } else { 7 };
    let config = |env: &str| {
        well_and_ill_config(&format!(
            "command = {}\nargs = [\"--stdio\", \"--tools\", \"{number}\"]\nenv = {{ FIXTURE_COUNTER = {}{env} }}\n\
             [tools.ill_sleep]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"{effect}\"\npolicy = \"open\"\n",
            json!(fixture_path()),
            json!(calls)
        ))
    };
    let gate = TestGateway::open(&config("")).await;
    let ms = if is_replaced { 4_000 } else { 1_000 };
    let (client, store) = (gate.client().in_session("slow"), Arc::clone(&gate.store));
    let slow = if in_session {
        let session = ResumableTestSession::connect(&gate.url, "2025-06-18").await;
        tokio::spawn(async move {
            let transcript =
                read_stream(session.call("ill_sleep", json!({ "ms": ms })).await, |transcript| {
                    transcript.answer().is_some()
                })
                .await;
            transcript
                .answer()
                .map(|answer| answer["result"].clone())
                .unwrap_or_else(|| panic!("the answer is lost: {transcript:?}"))
        })
    } else {
        tokio::spawn(async move { client.call("ill_sleep", json!({ "ms": ms })).await })
    };
    wait_until("the call runs", async || count_lines(&calls) > 0).await;
    if is_replaced {
        // A new upstream replaces this one, which runs only until its call ends.
        gate.reload(&config(", OTHER = \"1\"")).await.unwrap();
    }
    gate.shut_down().await;
    let result = slow.await.unwrap();
    // No claim is pending.
    let pending = toolgate::Store::pending_claims(&*store).await.unwrap();
    assert!(
        pending.is_empty() && processes_with_number(number).is_empty(),
        "{pending:?} {:?}",
        child_processes()
    );
    result["content"][0]["text"].as_str().map(str::to_owned).unwrap_or_else(|| panic!("{result}"))
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
    let gate = TestGateway::open(&(fixture_config("") + APPROVAL_RULES)).await;
    let mut older =
        LegacyHttpClient::connect(&http_client(), &gate.url, json!({"elicitation": {}})).await;
    let call = older.start_request("tools/call", &json!({"name": "count", "arguments": {}}));
    older.inbox.wait_for(|message| message["method"] == "elicitation/create").await;
    let gateway = gate.gateway.clone();
    let ending = tokio::spawn(async move { gateway.shut_down().await });
    // The answer has the id of the approval.
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
    let fixture = json!(fixture_path());
    let config = format!(
        "[upstreams.ill]\ncommand = {fixture}\nargs = [\"--ill\"]\nprefix = \"\"\nundeclared = \"read\"\n"
    );
    let gate = TestGateway::open(&config).await;
    let client = gate.client().in_session("s").with_capabilities(json!({"elicitation": {}}));
    let suspended = client.call("mark", json!({"key": "a", "how": "asks"})).await;
    assert_eq!(suspended["resultType"], "input_required", "{suspended}");
    gate.gateway.shut_down().await;
    // The row exists already, and records the cancellation instead of a fault of the upstream.
    let rows = gate.gateway.runtime().session("default", "local", "s").rows().await.unwrap();
    assert_eq!(rows.iter().map(|row| row.code()).collect::<Vec<_>>(), [Some("cancelled")]);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_waits_for_prompts_resources_and_completions() {
    let permits = Arc::new(Semaphore::new(0));
    let gate = gateway_with_slow_server(&permits, "").await;
    let mut older = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
    let mut requests = Vec::new();
    for (method, mut params, pointer, expected) in slow_server_requests() {
        params["_meta"] = json!({"progressToken": method});
        let id = older.start_request(method, &params);
        older
            .inbox
            .wait_for(|message| {
                message["method"] == "notifications/progress"
                    && message["params"]["progressToken"] == method
            })
            .await;
        requests.push((id, pointer, expected));
    }
    let gateway = gate.gateway.clone();
    let ending = tokio::spawn(async move { gateway.shut_down().await });
    // Longer than the shutdown waits for subscriptions.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    permits.add_permits(requests.len());
    for (id, pointer, expected) in requests {
        let answer = older.wait_for_answer(id).await;
        assert_eq!(answer.pointer(pointer), Some(&json!(expected)), "{answer}");
    }
    ending.await.unwrap();
    drop(older);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_during_shutdown_fails_and_leaves_no_process() {
    let home = tempfile::tempdir().unwrap();
    let silent = write_script(home.path(), "silent.sh", "sleep 600");
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let config = format!(
        "{CALC_TOOL_CONFIG}[upstreams.silent]\ncommand = {silent}\nargs = [\"--tools\", \"88\"]\n"
    );
    std::fs::write(gate.home.path().join("toolgate.toml"), config).unwrap();
    let gateway = gate.gateway.clone();
    let reload = tokio::spawn(async move { gateway.reload().await });
    wait_until("the upstream is started", async || !processes_with_number(88).is_empty()).await;
    gate.gateway.shut_down().await;
    // The reload ends its new upstream and fails, and later reloads start nothing.
    assert!(reload.await.unwrap().is_err());
    assert!(gate.gateway.reload().await.is_err());
    wait_until("the upstream process has exited", async || processes_with_number(88).is_empty())
        .await;
    gate.shut_down().await;
}
