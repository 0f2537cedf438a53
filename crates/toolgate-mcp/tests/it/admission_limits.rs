//! What one client may take of what all have, and for how long.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use toolgate_store::{Ledger, RowFilter};

use crate::mid_call_messages::{gateway_with_slow_server, slow_server_requests};
use crate::resumable_sessions::{ResumableTestSession, read_stream};
use crate::support::{TestGateway, count_lines, last_message, wait_until};
use crate::tls_and_authentication::{ACCEPT_JSON_OR_EVENTS, http_client};
use crate::upstream_faults::write_script;

const CALC_TOOL_CONFIG: &str = "[tools.calc]\nkind = \"builtin\"\n";

fn count_rows(gate: &TestGateway, tool: &str) -> usize {
    let wanted = RowFilter { tool: Some(tool.to_owned()), ..Default::default() };
    Ledger::open(gate.ledger_path()).unwrap().find(&wanted).unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn client_info_and_capabilities_have_size_limits() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let http = http_client();
    let post = async |message: Value| {
        let request = http
            .post(format!("{}/mcp", gate.url))
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .json(&message);
        let answer = request.send().await.unwrap();
        let opened = answer.headers().contains_key("mcp-session-id");
        (answer.status().as_u16(), opened, last_message(&answer.text().await.unwrap()))
    };
    let hello = |capabilities: Value, about: &str, id: Value| {
        let client = json!({"name": "t", "version": "1", "description": about});
        let params = json!({"protocolVersion": "2025-06-18", "capabilities": capabilities, "clientInfo": client});
        json!({"jsonrpc": "2.0", "id": id, "method": "initialize", "params": params})
    };
    let can = |many: usize| json!({"elicitation": {}, "experimental": {"x": {"a": vec![0; many]}}});
    // Much more than real ones say.
    let (status, opened, said) = post(hello(can(1_000), &"t".repeat(30_000), json!(0))).await;
    assert!((status, opened) == (200, true) && said["result"].is_object(), "{said}");
    let long = "t".repeat(70_000);
    for greeting in [
        hello(can(3_000), "", json!(0)),
        hello(json!({}), &long, json!(0)),
        hello(json!({}), "", json!(long)),
    ] {
        let (status, opened, said) = post(greeting).await;
        assert_eq!(
            (status, opened, &said["error"]["data"]["code"]),
            (400, false, &json!("invalid_request")),
            "{said}"
        );
        assert!(said["error"]["message"].as_str().unwrap().contains("at most 64 KiB"), "{said}");
    }
    // A call of one that is refused so has its row, alone or among others.
    let calc = |id: u64, about: &str| {
        let meta = json!({"progressToken": 1, "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x": about});
        let params =
            json!({"name": "calc", "arguments": {"expression": id.to_string()}, "_meta": meta});
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
    };
    let (status, _, said) = post(calc(1, &long)).await;
    assert!(
        (status, count_rows(&gate, "calc")) == (400, 1)
            && said["error"]["data"]["callId"].is_string(),
        "{said}"
    );
    let (status, _, said) = post(json!([calc(1, ""), calc(2, &long)])).await;
    assert_eq!((status, count_rows(&gate, "calc")), (400, 3), "{said}");
    for (session, meta) in [
        ("a", json!({"progressToken": 1, "x": "t".repeat(30_000)})),
        ("b", json!({"x": vec![0; 1_000]})),
    ] {
        let client = gate.client().in_session(session);
        let (status, said) = client
            .call_method(
                "tools/call",
                json!({"name": "calc", "arguments": {"expression": "6 * 7"}, "_meta": meta}),
            )
            .await;
        assert!(
            status == 200 && said["result"]["structuredContent"] == json!({"result": 42}),
            "{said}"
        );
    }
    // What is asked for may be long.
    let long = format!("1{}", " ".repeat(100_000));
    let (status, said) = gate
        .client()
        .call_method("tools/call", json!({"name": "calc", "arguments": {"expression": long}}))
        .await;
    assert_eq!((status, said["result"]["isError"].is_boolean()), (200, true), "{status}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn non_call_requests_keep_permits_while_client_is_away() {
    let let_go = Arc::new(Semaphore::new(0));
    let gate =
        gateway_with_slow_server(&let_go, "[gateway]\nconcurrency = 3\nstream_timeout = \"1s\"\n")
            .await;
    let session = ResumableTestSession::connect(&gate.url, "2025-11-25").await;
    let post = |message: Value| session.http_request(Method::POST).json(&message).send();
    // Each is sent away before its answer is there.
    let away = slow_server_requests().into_iter().enumerate().map(|(id, (method, params, ..))| {
        let asked = post(json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        async move { read_stream(asked.await.unwrap(), |_| false).await }
    });
    for heard in join_all(away).await {
        assert!(heard.answer().is_none(), "{heard:?}");
    }
    let ping = async || {
        let answer = post(json!({"jsonrpc": "2.0", "id": "ping", "method": "ping"})).await.unwrap();
        let status = answer.status().as_u16();
        // To its end: until then it has a seat.
        answer.text().await.unwrap();
        status
    };
    assert_eq!(ping().await, 503);
    let_go.add_permits(3);
    wait_until("their seats are free", async || ping().await == 200).await;
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_keeps_permit_until_hooks_end_after_disconnect() {
    let home = tempfile::tempdir().unwrap();
    let (begun, enough) = (home.path().join("begun"), home.path().join("enough"));
    let hook = write_script(
        home.path(),
        "hook",
        &format!(
            "cat > /dev/null; echo x >> {}; until [ -e {} ]; do sleep 0.02; done",
            begun.display(),
            enough.display()
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
    wait_until("its hook runs", async || count_lines(&begun) == 1).await;
    first.abort();
    assert!(first.await.is_err(), "it has hung up");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(check("second").await.unwrap().status(), 503);
    std::fs::write(&enough, "").unwrap();
    wait_until("its seat is free", async || check("third").await.unwrap().status() == 200).await;
    assert_eq!(count_lines(&begun), 2);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_keeps_permit_until_it_ends_after_disconnect() {
    let home = tempfile::tempdir().unwrap();
    let (begun, enough) = (home.path().join("begun"), home.path().join("enough"));
    let hook = write_script(
        home.path(),
        "hook",
        &format!(
            "cat > /dev/null; echo x >> {}; until [ -e {} ]; do sleep 0.02; done",
            begun.display(),
            enough.display()
        ),
    );
    let gate = TestGateway::open(&format!(
        "{CALC_TOOL_CONFIG}[[hooks]]\nname = \"slow\"\ncommand = {hook}\ntools = [\"calc\"]\nwhen = \"after\"\ntimeout = \"60s\"\n[gateway]\nconcurrency = 1\n"
    ))
    .await;
    // In one way or the other: the second says something that is of no meaning.
    for (round, more) in [(1, json!({})), (2, json!({"x": 1}))] {
        let call = |session: &str| {
            let (client, more) =
                (gate.client().in_session(&format!("{session}{round}")), more.clone());
            async move {
                client
                    .call_method(
                        "tools/call",
                        json!({"name": "calc", "arguments": {"expression": "1"}, "_meta": more}),
                    )
                    .await
                    .0
            }
        };
        let first = tokio::spawn(call("first"));
        wait_until("its hook runs", async || count_lines(&begun) == 2 * round - 1).await;
        first.abort();
        assert!(first.await.is_err(), "it has hung up");
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(call("second").await, 503);
        std::fs::write(&enough, "").unwrap();
        wait_until("its seat is free", async || call("third").await == 200).await;
        assert_eq!(count_lines(&begun), 2 * round);
        std::fs::remove_file(&enough).unwrap();
    }
    gate.shut_down().await;
}
