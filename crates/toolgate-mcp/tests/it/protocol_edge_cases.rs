//! Tests malformed requests and arguments, and the rows that they get.

use serde_json::{Value, json};
use tokio::io::{AsyncWriteExt, DuplexStream, WriteHalf};

use crate::support::{
    ACCEPT_JSON_OR_EVENTS, CALC_TOOL_CONFIG, ClientLines, TestGateway, count_rows, find_rows,
    http_client, last_message,
};

/// Returns invalid arguments, each with a part of the expected error.
fn bad_arguments() -> Vec<(String, &'static str)> {
    vec![
        (r#"{"expression": "1", "expression": "2"}"#.to_owned(), "given twice"),
        (format!(r#"{{"expression": {}}}"#, "9".repeat(80)), ""),
        (r#"{"expression": 1e400}"#.to_owned(), ""),
        (r#"{"expression": "\ud800"}"#.to_owned(), ""),
        (format!("{{\"expression\": {}1{}}}", "[".repeat(200), "]".repeat(200)), ""),
        ("[]".to_owned(), ""),
        ("\"x\"".to_owned(), ""),
    ]
}

fn calc_call(arguments: &str, meta: &str) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{{"name":"calc","arguments":{arguments}{meta}}}}}"#
    )
}

/// Connects a client of an earlier revision on streams, with a completed handshake.
pub(crate) async fn connect_legacy_stream(
    gate: &TestGateway,
) -> (WriteHalf<DuplexStream>, ClientLines) {
    let (_, mut writer, mut answers) = gate.connect_streams(None);
    let initialize = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    writer
        .write_all(
            format!(
                "{initialize}\n{}\n",
                json!({"jsonrpc": "2.0", "method": "notifications/initialized"})
            )
            .as_bytes(),
        )
        .await
        .unwrap();
    answers.next_line().await.unwrap().unwrap();
    (writer, answers)
}

/// Returns the next message of a client on streams.
pub(crate) async fn next_message(lines: &mut ClientLines) -> Value {
    serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_arguments_are_refused_and_recorded() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let http = http_client();
    let meta = r#","_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}"#;
    let (mut writer, mut answers) = connect_legacy_stream(&gate).await;
    let cases = bad_arguments();
    for (arguments, part) in &cases {
        let answer = http
            .post(format!("{}/mcp", gate.url))
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .header("content-type", "application/json")
            .header("mcp-protocol-version", "2026-07-28")
            .header("mcp-method", "tools/call")
            .header("mcp-name", "calc")
            .body(calc_call(arguments, meta))
            .send()
            .await
            .unwrap();
        let over_http = last_message(&answer.text().await.unwrap());
        writer.write_all(format!("{}\n", calc_call(arguments, "")).as_bytes()).await.unwrap();
        let over_streams: Value = next_message(&mut answers).await;
        for message in [over_http, over_streams] {
            assert_eq!(message["id"], json!(7), "{arguments}: {message}");
            let error = &message["result"]["_meta"]["toolgate/error"];
            let code =
                if arguments.contains("[[") { "payload_too_large" } else { "invalid_arguments" };
            assert_eq!(error["code"], code, "{arguments}: {message}");
            assert!(
                error["message"].as_str().unwrap().contains(part) && error["callId"].is_string(),
                "{arguments}: {message}"
            );
        }
    }
    // `null` counts as no arguments.
    writer.write_all(format!("{}\n", calc_call("null", "")).as_bytes()).await.unwrap();
    let message = answers.next_line().await.unwrap().unwrap();
    assert!(message.contains("requires `expression`"), "{message}");
    // A malformed message is answered with its id, if it has one.
    for (line, id) in [(r#"{"id": 9, "a": 1, "a": 2}"#, json!(9)), ("{", Value::Null)] {
        writer.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        let message: Value = next_message(&mut answers).await;
        assert_eq!(
            (&message["id"], message.get("id").is_some(), &message["error"]["code"]),
            (&id, true, &json!(-32700)),
            "{message}"
        );
    }
    drop((writer, answers));
    assert_eq!(count_rows(&gate, "calc"), 2 * cases.len() + 1);
    gate.shut_down().await;
}

/// Checks that no row of a tool is oversized.
fn assert_small_rows(gate: &TestGateway, tool: &str) {
    let rows = find_rows(gate, tool);
    assert!(rows.iter().all(|entry| entry.row.to_canonical_bytes().unwrap().len() < 10_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn readable_decision_api_request_has_row() {
    let gate = TestGateway::open(&format!(
        "{CALC_TOOL_CONFIG}[tools.mine]\nkind = \"client\"\npolicy = \"open\"\n"
    ))
    .await;
    let http = http_client();
    let decide = async |verb: &str, body: &str| {
        let url = format!("{}/v1/calls/{verb}", gate.url);
        let response = http
            .post(url)
            .header("content-type", "application/json")
            .body(body.to_owned())
            .send()
            .await
            .unwrap();
        (
            response.status().as_u16(),
            serde_json::from_str::<Value>(&response.text().await.unwrap()).unwrap(),
        )
    };
    // Bad arguments get a decision instead of status 400, in a check and in a report.
    let (status, answer) = decide(
        "check",
        r#"{"id": "1", "session": "s", "tool": "mine", "arguments": {"x": 1, "x": 2}}"#,
    )
    .await;
    assert_eq!(
        (status, &answer["decision"], &answer["error"]["code"]),
        (200, &json!("deny"), &json!("invalid_arguments")),
        "{answer}"
    );
    let (status, answer) = decide(
        "report",
        r#"{"id": "1", "session": "s", "tool": "mine", "arguments": {"x": 1e999}, "result": null}"#,
    )
    .await;
    assert_eq!((status, &answer["outcome"]["code"]), (200, &json!("not_admitted")), "{answer}");
    // Only a body that can be read is a call, and has a row.
    let malformed = [
        ("check", r#"{"id": "2", "session": "s", "tool": "mine", "turn": 1, "turn": 2}"#, false),
        ("check", r#"{"id": "2", "session": "s", "tool": "mine", "turn": "x"}"#, false),
        ("check", r#"{"id": "2", "tool": "mine"}"#, true),
        ("check", r#"{"id": "", "session": "s", "tool": "mine"}"#, true),
        ("check", r#"{"id": 2, "session": "s", "tool": "mine", "agent": 7}"#, false),
        ("check", r#"{"id": "2", "session": "s", "tool": "mine", "colour": 1}"#, false),
        ("check", r#"{"id": "2", "session": "s", "tool": "mine", "result": 1}"#, true),
        ("report", r#"{"id": "2", "session": "s", "tool": "mine"}"#, true),
    ];
    let readable = malformed.iter().filter(|(.., is_call)| *is_call).count();
    for (verb, body, is_call) in malformed {
        let (status, answer) = decide(verb, body).await;
        assert_eq!(
            (status, &answer["code"], &answer["errorCategory"]),
            (400, &json!("invalid_request"), &json!("VALIDATION")),
            "{body}: {answer}"
        );
        assert!(
            answer["error"].is_string() && answer["callId"].is_string() == is_call,
            "{body}: {answer}"
        );
    }
    assert_eq!(count_rows(&gate, "mine"), 2 + readable);
    // Invalid values are neither returned nor recorded, and errors are short.
    let secret = "card 4111 1111 1111 1111 declined";
    let long = "k".repeat(5_000);
    for (body, part) in [
        (json!({"id": "2", "session": "s", "tool": "mine", "error": secret}), "`error` must be"),
        (
            json!({"id": "2", "session": "s", "tool": "mine", "error": {"message": "no", "effects": secret}}),
            "`error` must be",
        ),
        (
            json!({"id": "2", "session": "s", "tool": "mine", "turn": secret}),
            "`turn` must be a whole number",
        ),
        (
            json!({"id": "2", "session": "s", "tool": "mine", (long.as_str()): 1}),
            "unknown field `kkk",
        ),
        (
            json!({"id": "2", "session": "s", "tool": "mine", "argument": {}}),
            "unknown field `argument`; known fields: `id`, `tool`, ",
        ),
    ] {
        let (status, answer) = decide("report", &body.to_string()).await;
        let message = answer["error"].as_str().unwrap_or_default();
        assert!(
            status == 400
                && message.contains(part)
                && message.len() <= 300
                && answer["callId"].is_null(),
            "{body}: {answer}"
        );
        assert!(!answer.to_string().contains(secret), "{body}: {answer}");
    }
    let rows = find_rows(&gate, "mine");
    assert_eq!(rows.len(), 2 + readable);
    // A timestamp, duration or digest cannot contain these digits by chance.
    assert!(rows.iter().all(|entry| !format!("{:?}", entry.row).contains("4111 1111")));
    // A request without a tool has no row.
    for body in
        ["{", "[]", r#"{"id": "3"}"#, r#"{"tool": 7}"#, r#"{"tool": "mine", "tool": "calc"}"#]
    {
        let (status, answer) = decide("check", body).await;
        assert_eq!((status, &answer["callId"]), (400, &Value::Null), "{body}: {answer}");
    }
    assert_eq!(count_rows(&gate, "mine"), 2 + readable);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_readable_http_call_has_row() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let http = http_client();
    // The requests are unparsable, contradict their headers, or have an invalid value.
    let meta = r#""io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}"#;
    let twice = calc_call("{}", &format!(r#","_meta":{{{meta},"a":1,"a":2}}"#));
    let plain = calc_call("{}", &format!(r#","_meta":{{{meta}}}"#));
    let turn = calc_call("{}", &format!(r#","_meta":{{{meta},"toolgate/turn":"x"}}"#));
    for (body, name, code, rows) in
        [(&twice, "calc", -32700, 0), (&plain, "other", -32020, 0), (&turn, "calc", -32602, 1)]
    {
        let before = count_rows(&gate, "calc");
        let request = http
            .post(format!("{}/mcp", gate.url))
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .header("content-type", "application/json")
            .header("mcp-protocol-version", "2026-07-28")
            .header("mcp-method", "tools/call")
            .header("mcp-name", name);
        let answer =
            last_message(&request.body(body.clone()).send().await.unwrap().text().await.unwrap());
        assert_eq!(answer["error"]["code"], json!(code), "{answer}");
        assert_eq!(count_rows(&gate, "calc"), before + rows, "{answer}");
    }
    // A client with a session receives the error about its unknown revision in the stream.
    let post = async |session: Option<&str>, version: &str, body: String| {
        let request =
            http.post(format!("{}/mcp", gate.url)).header("accept", ACCEPT_JSON_OR_EVENTS);
        let request = request
            .header("content-type", "application/json")
            .header("mcp-protocol-version", version)
            .body(body);
        let request = session
            .into_iter()
            .fold(request, |request, session| request.header("mcp-session-id", session));
        request.send().await.unwrap()
    };
    let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
    let initialize = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params});
    let response = post(None, "2025-06-18", initialize.to_string()).await;
    let session = response.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    for (version, code, rows) in [("1999-01-01", json!(-32022), 0), ("2025-06-18", Value::Null, 1)]
    {
        let before = count_rows(&gate, "calc");
        let body = calc_call(
            "{}",
            &format!(r#","_meta":{{"io.modelcontextprotocol/protocolVersion":"{version}"}}"#),
        );
        let answer = last_message(&post(Some(&session), version, body).await.text().await.unwrap());
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(7), &code), "{answer}");
        assert_eq!(count_rows(&gate, "calc"), before + rows, "{answer}");
    }
    assert_small_rows(&gate, "calc");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_readable_stdio_call_has_row() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let (mut writer, mut answers) = connect_legacy_stream(&gate).await;
    let before = count_rows(&gate, "calc");
    for (line, is_call) in [
        (calc_call("{}", r#","_meta":{"a":1,"a":2}"#), false),
        (calc_call("{}", r#","_meta":{"toolgate/turn":"x"}"#), true),
        (calc_call("{}", r#","inputResponses":7"#), true),
    ] {
        writer.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        let answer: Value = next_message(&mut answers).await;
        let data = &answer["error"]["data"];
        assert_eq!(
            (&answer["id"], &data["code"], data["callId"].is_string()),
            (&json!(7), &json!("invalid_request"), is_call),
            "{line}: {answer}"
        );
    }
    assert_eq!(count_rows(&gate, "calc"), before + 2);
    // A request that the protocol library rejects has no row.
    let long = "9".repeat(100_000);
    for (version, code) in [("2099-01-01", -32022), ("2026-07-28", -32602), (long.as_str(), -32022)]
    {
        let line = calc_call(
            "{}",
            &format!(r#","_meta":{{"io.modelcontextprotocol/protocolVersion":"{version}"}}"#),
        );
        writer.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        let answer: Value = next_message(&mut answers).await;
        assert_eq!(
            (&answer["id"], &answer["error"]["code"]),
            (&json!(7), &json!(code)),
            "{line}: {answer}"
        );
    }
    assert_eq!(count_rows(&gate, "calc"), before + 2);
    // A request before the handshake has no row.
    let (_, mut early_writer, mut early_answers) = gate.connect_streams(None);
    early_writer.write_all(format!("{}\n", calc_call("{}", "")).as_bytes()).await.unwrap();
    let answer: Value = next_message(&mut early_answers).await;
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(7), &json!(-32602)), "{answer}");
    assert_eq!(count_rows(&gate, "calc"), before + 2);
    drop((early_writer, early_answers));
    assert_small_rows(&gate, "calc");
    drop((writer, answers));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stdio_keeps_numbers_of_any_size() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let (mut writer, mut answers) = connect_legacy_stream(&gate).await;
    for number in ["18446744073709551616", "-9223372036854775809", "9007199254740993"] {
        let call = calc_call(&format!(r#"{{"expression": {number}}}"#), "");
        writer.write_all(format!("{call}\n").as_bytes()).await.unwrap();
        let line = answers.next_line().await.unwrap().unwrap();
        assert!(line.contains("invalid_arguments") && line.contains("callId"), "{number}: {line}");
    }
    drop((writer, answers));
    gate.shut_down().await;
}
