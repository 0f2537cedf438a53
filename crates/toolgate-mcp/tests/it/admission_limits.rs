//! Tests the size limits of one client, and how long a client keeps its permit.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::mid_call_messages::{gateway_with_slow_server, slow_server_requests};
use crate::resumable_sessions::{ResumableTestSession, read_stream};
use crate::support::{
    ACCEPT_JSON_OR_EVENTS, CALC_TOOL_CONFIG, TestGateway, count_lines, count_rows, http_client,
    last_message, wait_until,
};
use crate::upstream_faults::write_script;

#[tokio::test(flavor = "multi_thread")]
async fn client_info_and_capabilities_have_size_limits() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let http = http_client();
    let post = async |message: Value| {
        let request = http
            .post(format!("{}/mcp", gate.url))
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .json(&message);
        let response = request.send().await.unwrap();
        let has_session = response.headers().contains_key("mcp-session-id");
        (response.status().as_u16(), has_session, last_message(&response.text().await.unwrap()))
    };
    let initialize = |capabilities: Value, description: &str, id: Value| {
        let client = json!({"name": "t", "version": "1", "description": description});
        let params = json!({"protocolVersion": "2025-06-18", "capabilities": capabilities, "clientInfo": client});
        json!({"jsonrpc": "2.0", "id": id, "method": "initialize", "params": params})
    };
    let capabilities =
        |zeros: usize| json!({"elicitation": {}, "experimental": {"x": {"a": vec![0; zeros]}}});
    // Real clients send much less than this.
    let (status, has_session, answer) =
        post(initialize(capabilities(1_000), &"t".repeat(30_000), json!(0))).await;
    assert!((status, has_session) == (200, true) && answer["result"].is_object(), "{answer}");
    let long = "t".repeat(70_000);
    for message in [
        initialize(capabilities(3_000), "", json!(0)),
        initialize(json!({}), &long, json!(0)),
        initialize(json!({}), "", json!(long)),
    ] {
        let (status, has_session, answer) = post(message).await;
        assert_eq!(
            (status, has_session, &answer["error"]["data"]["code"]),
            (400, false, &json!("invalid_request")),
            "{answer}"
        );
        assert!(
            answer["error"]["message"].as_str().unwrap().contains("at most 64 KiB"),
            "{answer}"
        );
    }
    // A request that is too large to be read is no call, and has no row.
    let calc = |id: u64, description: &str| {
        let meta = json!({"progressToken": 1, "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x": description});
        let params =
            json!({"name": "calc", "arguments": {"expression": id.to_string()}, "_meta": meta});
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
    };
    let (status, _, answer) = post(calc(1, &long)).await;
    assert!(
        (status, count_rows(&gate, "calc")) == (400, 0)
            && answer["error"]["data"]["callId"].is_null(),
        "{answer}"
    );
    let (status, _, answer) = post(json!([calc(1, ""), calc(2, &long)])).await;
    assert_eq!((status, count_rows(&gate, "calc")), (400, 0), "batches are rejected: {answer}");
    for (session, meta) in [
        ("a", json!({"progressToken": 1, "x": "t".repeat(30_000)})),
        ("b", json!({"x": vec![0; 1_000]})),
    ] {
        let client = gate.client().in_session(session);
        let (status, answer) = client
            .call_method(
                "tools/call",
                json!({"name": "calc", "arguments": {"expression": "6 * 7"}, "_meta": meta}),
            )
            .await;
        assert!(
            status == 200 && answer["result"]["structuredContent"] == json!({"result": 42}),
            "{answer}"
        );
    }
    // The arguments of a call may be longer than the metadata.
    let long = format!("1{}", " ".repeat(100_000));
    let (status, answer) = gate
        .client()
        .call_method("tools/call", json!({"name": "calc", "arguments": {"expression": long}}))
        .await;
    assert_eq!((status, answer["result"]["isError"].is_boolean()), (200, true), "{status}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn non_call_requests_keep_permits_while_client_is_away() {
    let permits = Arc::new(Semaphore::new(0));
    let gate =
        gateway_with_slow_server(&permits, "[gateway]\nconcurrency = 3\nstream_timeout = \"1s\"\n")
            .await;
    let session = ResumableTestSession::connect(&gate.url, "2025-11-25").await;
    let post = |message: Value| session.http_request(Method::POST).json(&message).send();
    // The stream timeout ends each stream before the answer.
    let streams =
        slow_server_requests().into_iter().enumerate().map(|(id, (method, params, ..))| {
            let response =
                post(json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
            async move { read_stream(response.await.unwrap(), |_| false).await }
        });
    for transcript in join_all(streams).await {
        assert!(transcript.answer().is_none(), "{transcript:?}");
    }
    let ping = async || {
        let answer = post(json!({"jsonrpc": "2.0", "id": "ping", "method": "ping"})).await.unwrap();
        let status = answer.status().as_u16();
        // The permit is free only after the body is read completely.
        answer.text().await.unwrap();
        status
    };
    assert_eq!(ping().await, 503);
    permits.add_permits(3);
    wait_until("the permits are free", async || ping().await == 200).await;
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_keeps_permit_until_hooks_end_after_disconnect() {
    let home = tempfile::tempdir().unwrap();
    let (starts, release) = (home.path().join("starts"), home.path().join("release"));
    let hook = write_script(
        home.path(),
        "hook",
        &format!(
            "cat > /dev/null; echo x >> {}; until [ -e {} ]; do sleep 0.02; done",
            starts.display(),
            release.display()
        ),
    );
    let gate = TestGateway::open(&format!(
        "[tools.pay]\nkind = \"client\"\npolicy = \"open\"\n[[hooks]]\nname = \"slow\"\ncommand = {hook}\ntools = [\"pay\"]\n\
         timeout = \"60s\"\n[gateway]\nconcurrency = 1\n"
    ))
    .await;
    let http = http_client();
    let check = |id: &str| {
        http.post(format!("{}/v1/calls/check", gate.url))
            .json(&json!({"id": id, "session": id, "tool": "pay"}))
            .send()
    };
    let first = tokio::spawn(check("first"));
    wait_until("the hook runs", async || count_lines(&starts) == 1).await;
    first.abort();
    assert!(first.await.is_err(), "the client has not disconnected");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(check("second").await.unwrap().status(), 503);
    std::fs::write(&release, "").unwrap();
    wait_until("the permit is free", async || check("third").await.unwrap().status() == 200).await;
    assert_eq!(count_lines(&starts), 2);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_keeps_permit_until_it_ends_after_disconnect() {
    let home = tempfile::tempdir().unwrap();
    let (starts, release) = (home.path().join("starts"), home.path().join("release"));
    let hook = write_script(
        home.path(),
        "hook",
        &format!(
            "cat > /dev/null; echo x >> {}; until [ -e {} ]; do sleep 0.02; done",
            starts.display(),
            release.display()
        ),
    );
    let gate = TestGateway::open(&format!(
        "{CALC_TOOL_CONFIG}[[hooks]]\nname = \"slow\"\ncommand = {hook}\ntools = [\"calc\"]\nwhen = \"after\"\ntimeout = \"60s\"\n[gateway]\nconcurrency = 1\n"
    ))
    .await;
    // Unknown metadata sends the second call over the slow path.
    for (round, meta) in [(1, json!({})), (2, json!({"x": 1}))] {
        let call = |session: &str| {
            let (client, meta) =
                (gate.client().in_session(&format!("{session}{round}")), meta.clone());
            async move {
                client
                    .call_method(
                        "tools/call",
                        json!({"name": "calc", "arguments": {"expression": "1"}, "_meta": meta}),
                    )
                    .await
                    .0
            }
        };
        let first = tokio::spawn(call("first"));
        wait_until("the hook runs", async || count_lines(&starts) == 2 * round - 1).await;
        first.abort();
        assert!(first.await.is_err(), "the client has not disconnected");
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(call("second").await, 503);
        std::fs::write(&release, "").unwrap();
        wait_until("the permit is free", async || call("third").await == 200).await;
        assert_eq!(count_lines(&starts), 2 * round);
        std::fs::remove_file(&release).unwrap();
    }
    gate.shut_down().await;
}
