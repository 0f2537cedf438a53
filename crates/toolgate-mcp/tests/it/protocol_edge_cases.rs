//! What is said badly, and what is said beside.

use serde_json::{Value, json};
use tokio::io::{AsyncWriteExt, DuplexStream, WriteHalf};
use tokio::net::TcpStream;

use crate::legacy_upstreams::{
    http_response, json_rpc_result, read_request, serve_connections, start_tool_server,
};
use crate::support::{ClientLines, TestGateway, fixture_config, last_message};

/// Arguments that are no good, and what the gate says of them.
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

/// A client of an earlier revision on streams, which has said hello.
pub(crate) async fn connect_legacy_stream(
    gate: &TestGateway,
) -> (WriteHalf<DuplexStream>, ClientLines) {
    let (_, mut ask, mut answers) = gate.connect_streams(None);
    let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    ask.write_all(
        format!("{hello}\n{}\n", json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))
            .as_bytes(),
    )
    .await
    .unwrap();
    answers.next_line().await.unwrap().unwrap();
    (ask, answers)
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_arguments_are_refused_and_recorded() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let meta = r#","_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}"#;
    let (mut ask, mut answers) = connect_legacy_stream(&gate).await;
    let cases = bad_arguments();
    for (arguments, why) in &cases {
        let answer = http
            .post(format!("{}/mcp", gate.url))
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json")
            .header("mcp-protocol-version", "2026-07-28")
            .header("mcp-method", "tools/call")
            .header("mcp-name", "calc")
            .body(calc_call(arguments, meta))
            .send()
            .await
            .unwrap();
        let over_http = last_message(&answer.text().await.unwrap());
        ask.write_all(format!("{}\n", calc_call(arguments, "")).as_bytes()).await.unwrap();
        let over_streams: Value =
            serde_json::from_str(&answers.next_line().await.unwrap().unwrap()).unwrap();
        for said in [over_http, over_streams] {
            assert_eq!(said["id"], json!(7), "{arguments}: {said}");
            let error = &said["result"]["_meta"]["toolgate/error"];
            let code =
                if arguments.contains("[[") { "payload_too_large" } else { "invalid_arguments" };
            assert_eq!(error["code"], code, "{arguments}: {said}");
            assert!(
                error["message"].as_str().unwrap().contains(why) && error["callId"].is_string(),
                "{arguments}: {said}"
            );
        }
    }
    // Nothing is nothing, and no bad argument.
    ask.write_all(format!("{}\n", calc_call("null", "")).as_bytes()).await.unwrap();
    let said = answers.next_line().await.unwrap().unwrap();
    assert!(said.contains("requires `expression`"), "{said}");
    // What is no message at all is answered under its name, as far as it has one.
    for (line, id) in [(r#"{"id": 9, "a": 1, "a": 2}"#, json!(9)), ("{", Value::Null)] {
        ask.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        let said: Value =
            serde_json::from_str(&answers.next_line().await.unwrap().unwrap()).unwrap();
        assert_eq!(
            (&said["id"], said.get("id").is_some(), &said["error"]["code"]),
            (&id, true, &json!(-32700)),
            "{said}"
        );
    }
    drop((ask, answers));
    let refused = toolgate_store::RowFilter { tool: Some("calc".to_owned()), ..Default::default() };
    let rows = toolgate_store::Ledger::open(gate.home.path().join("ledger.db"))
        .unwrap()
        .find(&refused)
        .unwrap()
        .len();
    assert_eq!(rows, 2 * cases.len() + 1);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recognizable_call_is_recorded_in_malformed_request() {
    let gate = TestGateway::open(&format!(
        "{CALC_TOOL_CONFIG}[tools.mine]\nkind = \"client\"\npolicy = \"open\"\n"
    ))
    .await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let decide = async |verb: &str, body: &str| {
        let url = format!("{}/v1/calls/{verb}", gate.url);
        let answer = http
            .post(url)
            .header("content-type", "application/json")
            .body(body.to_owned())
            .send()
            .await
            .unwrap();
        (
            answer.status().as_u16(),
            serde_json::from_str::<Value>(&answer.text().await.unwrap()).unwrap(),
        )
    };
    // What the gate can say it says, for a pass or a report.
    let (status, said) = decide(
        "check",
        r#"{"id": "1", "session": "s", "tool": "mine", "arguments": {"x": 1, "x": 2}}"#,
    )
    .await;
    assert_eq!(
        (status, &said["decision"], &said["error"]["code"]),
        (200, &json!("deny"), &json!("invalid_arguments")),
        "{said}"
    );
    let (status, said) = decide(
        "report",
        r#"{"id": "1", "session": "s", "tool": "mine", "arguments": {"x": 1e999}, "result": null}"#,
    )
    .await;
    assert_eq!((status, &said["outcome"]["code"]), (200, &json!("not_admitted")), "{said}");
    let wrong = [
        ("check", r#"{"id": "2", "session": "s", "tool": "mine", "turn": 1, "turn": 2}"#),
        ("check", r#"{"id": "2", "session": "s", "tool": "mine", "turn": "x"}"#),
        ("check", r#"{"id": "2", "tool": "mine"}"#),
        ("check", r#"{"id": "", "session": "s", "tool": "mine"}"#),
        ("check", r#"{"id": 2, "session": "s", "tool": "mine", "agent": 7}"#),
        ("check", r#"{"id": "2", "session": "s", "tool": "mine", "colour": 1}"#),
        ("check", r#"{"id": "2", "session": "s", "tool": "mine", "result": 1}"#),
        ("report", r#"{"id": "2", "session": "s", "tool": "mine"}"#),
    ];
    for (verb, body) in wrong {
        let (status, said) = decide(verb, body).await;
        assert_eq!(
            (status, &said["code"], &said["errorCategory"]),
            (400, &json!("invalid_request"), &json!("VALIDATION")),
            "{body}: {said}"
        );
        assert!(
            said["error"].is_string() && said["callId"].is_string() && said["receipt"].is_object(),
            "{body}: {said}"
        );
    }
    assert_eq!(count_rows(&gate, "mine"), 2 + wrong.len());
    // What stands where something else must is neither told nor written down, and of what is, as
    // much as somebody reads.
    let secret = "card 4111 1111 1111 1111 declined";
    let long = "k".repeat(5_000);
    for (body, why) in [
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
        let (status, said) = decide("report", &body.to_string()).await;
        let words = said["error"].as_str().unwrap_or_default();
        assert!(
            status == 400
                && words.contains(why)
                && words.len() <= 300
                && said["callId"].is_string(),
            "{body}: {said}"
        );
        assert!(!said.to_string().contains(secret), "{body}: {said}");
    }
    let wanted = toolgate_store::RowFilter { tool: Some("mine".to_owned()), ..Default::default() };
    let rows = toolgate_store::Ledger::open(gate.ledger_path()).unwrap().find(&wanted).unwrap();
    assert_eq!(rows.len(), 7 + wrong.len());
    // So much of it stands in no time, length of time or digest by chance.
    assert!(rows.iter().all(|one| !format!("{:?}", one.row).contains("4111 1111")));
    // What is no call has none.
    for body in
        ["{", "[]", r#"{"id": "3"}"#, r#"{"tool": 7}"#, r#"{"tool": "mine", "tool": "calc"}"#]
    {
        let (status, said) = decide("check", body).await;
        assert_eq!((status, &said["callId"]), (400, &Value::Null), "{body}: {said}");
    }
    assert_eq!(count_rows(&gate, "mine"), 7 + wrong.len());
    // The same over MCP: what cannot be read, what the headers contradict, and what is no word of
    // toolgate's.
    let own = r#""io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}"#;
    let twice = calc_call("{}", &format!(r#","_meta":{{{own},"a":1,"a":2}}"#));
    let plain = calc_call("{}", &format!(r#","_meta":{{{own}}}"#));
    let turn = calc_call("{}", &format!(r#","_meta":{{{own},"toolgate/turn":"x"}}"#));
    for (body, name, code) in
        [(&twice, "calc", -32700), (&plain, "other", -32020), (&turn, "calc", -32602)]
    {
        let before = count_rows(&gate, "calc");
        let request = http
            .post(format!("{}/mcp", gate.url))
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json")
            .header("mcp-protocol-version", "2026-07-28")
            .header("mcp-method", "tools/call")
            .header("mcp-name", name);
        let said =
            last_message(&request.body(body.clone()).send().await.unwrap().text().await.unwrap());
        assert_eq!(said["error"]["code"], json!(code), "{said}");
        assert_eq!(count_rows(&gate, "calc"), before + 1, "{said}");
    }
    // In a session of an older client it is told in the stream that nobody knows the revision.
    let post = async |session: Option<&str>, version: &str, body: String| {
        let request = http
            .post(format!("{}/mcp", gate.url))
            .header("accept", "application/json, text/event-stream");
        let request = request
            .header("content-type", "application/json")
            .header("mcp-protocol-version", version)
            .body(body);
        let request = session
            .into_iter()
            .fold(request, |request, session| request.header("mcp-session-id", session));
        request.send().await.unwrap()
    };
    let about = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
    let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about});
    let greeted = post(None, "2025-06-18", hello.to_string()).await;
    let session = greeted.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    for (version, code) in [("1999-01-01", json!(-32022)), ("2025-06-18", Value::Null)] {
        let before = count_rows(&gate, "calc");
        let body = calc_call(
            "{}",
            &format!(r#","_meta":{{"io.modelcontextprotocol/protocolVersion":"{version}"}}"#),
        );
        let said = last_message(&post(Some(&session), version, body).await.text().await.unwrap());
        assert_eq!((&said["id"], &said["error"]["code"]), (&json!(7), &code), "{said}");
        assert_eq!(count_rows(&gate, "calc"), before + 1, "{said}");
    }
    let (mut ask, mut answers) = connect_legacy_stream(&gate).await;
    let before = count_rows(&gate, "calc");
    for line in [
        calc_call("{}", r#","_meta":{"a":1,"a":2}"#),
        calc_call("{}", r#","_meta":{"toolgate/turn":"x"}"#),
        calc_call("{}", r#","inputResponses":7"#),
    ] {
        ask.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        let said: Value =
            serde_json::from_str(&answers.next_line().await.unwrap().unwrap()).unwrap();
        let told = &said["error"]["data"];
        assert_eq!(
            (&said["id"], &told["code"], told["callId"].is_string()),
            (&json!(7), &json!("invalid_request"), true),
            "{line}: {said}"
        );
    }
    assert_eq!(count_rows(&gate, "calc"), before + 3);
    // What is refused before the door has seen it has its row, too, and is told as it was.
    let long = "9".repeat(100_000);
    for (version, code) in [("2099-01-01", -32022), ("2026-07-28", -32602), (long.as_str(), -32022)]
    {
        let line = calc_call(
            "{}",
            &format!(r#","_meta":{{"io.modelcontextprotocol/protocolVersion":"{version}"}}"#),
        );
        ask.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        let said: Value =
            serde_json::from_str(&answers.next_line().await.unwrap().unwrap()).unwrap();
        assert_eq!(
            (&said["id"], &said["error"]["code"]),
            (&json!(7), &json!(code)),
            "{line}: {said}"
        );
    }
    assert_eq!(count_rows(&gate, "calc"), before + 6);
    // So has one that comes before the greeting.
    let (_, mut early, mut told) = gate.connect_streams(None);
    early.write_all(format!("{}\n", calc_call("{}", "")).as_bytes()).await.unwrap();
    let said: Value = serde_json::from_str(&told.next_line().await.unwrap().unwrap()).unwrap();
    assert_eq!((&said["id"], &said["error"]["code"]), (&json!(7), &json!(-32602)), "{said}");
    assert_eq!(count_rows(&gate, "calc"), before + 7);
    drop((early, told));
    let wanted = toolgate_store::RowFilter { tool: Some("calc".to_owned()), ..Default::default() };
    let rows = toolgate_store::Ledger::open(gate.ledger_path()).unwrap().find(&wanted).unwrap();
    assert!(rows.iter().all(|one| one.row.to_canonical_bytes().unwrap().len() < 10_000));
    drop((ask, answers));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stdio_keeps_numbers_of_any_size() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let (mut ask, mut answers) = connect_legacy_stream(&gate).await;
    for number in ["18446744073709551616", "-9223372036854775809", "9007199254740993"] {
        let call = calc_call(&format!(r#"{{"expression": {number}}}"#), "");
        ask.write_all(format!("{call}\n").as_bytes()).await.unwrap();
        let said = answers.next_line().await.unwrap().unwrap();
        assert!(said.contains("invalid_arguments") && said.contains("callId"), "{number}: {said}");
    }
    drop((ask, answers));
    gate.shut_down().await;
}
