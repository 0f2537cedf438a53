//! Tests tool calls of clients: results, errors, sessions and the decision API.

use serde_json::{Value, json};

use crate::support::{CALC_TOOL_CONFIG, TestGateway, fixture_config, http_client};

const UNDECLARED_OPEN: &str = "undeclared = \"open\"";

#[tokio::test(flavor = "multi_thread")]
async fn successful_call_returns_result_and_receipt() {
    let gate = TestGateway::open(&fixture_config(UNDECLARED_OPEN)).await;
    let client = gate.client();
    assert!(client.tool_names().await.contains(&"echo".to_owned()));
    let result = client.call("echo", json!({"text": "hello"})).await;
    assert_eq!(result["structuredContent"], json!({"text": "hello"}));
    assert_eq!(result["_meta"]["toolgate/receipt"]["decision"], "succeeded");
    assert_eq!(result["resultType"], "complete");
    // The result keeps the digits of the arguments.
    let sum = client.call("add", json!({"a": 0.1, "b": 0.2})).await;
    assert_eq!(sum["isError"], json!(false), "{sum}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_failure_uses_error_contract() {
    let config = fixture_config(&format!(
        "{UNDECLARED_OPEN}\nerrors = [{{ matches = 'no such order', category = \"VALIDATION\", code = \"no_such_order\", effects = \"none\" }}]"
    ));
    let gate = TestGateway::open(&config).await;
    let client = gate.client();
    for (tool, arguments, code, category) in [
        ("ecko", json!({}), "unknown_tool", "VALIDATION"),
        ("echo", json!({"txt": "x"}), "invalid_arguments", "VALIDATION"),
        ("fail", json!({"message": "it is Sunday"}), "tool_failed", "BUSINESS"),
        ("fail", json!({"message": "no such order: 7"}), "no_such_order", "VALIDATION"),
    ] {
        let result = client.call(tool, arguments).await;
        let error = &result["_meta"]["toolgate/error"];
        assert_eq!(
            (error["code"].as_str(), error["errorCategory"].as_str()),
            (Some(code), Some(category)),
            "{result}"
        );
        assert_eq!(result["isError"], json!(true));
        assert!(result["_meta"]["toolgate/receipt"]["tool"].is_string());
    }
    let result = client.call("fail", json!({"message": "it is Sunday again"})).await;
    assert_eq!(result["_meta"]["toolgate/error"]["upstream"]["said"], "it is Sunday again");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_see_arguments_evidence_and_sessions() {
    let config = fixture_config("")
        + "[tools.echo]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"read\"\nentities = { text = \"/text\" }\nproves = [\"/text\"]\n\
           [tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
           [[policy]]\nname = \"echo_first\"\nrule = \"require\"\ntools = [\"count\"]\nany_of = [\"echo\"]\nreason = \"Echo first.\"\n\
           [[policy]]\nname = \"short\"\nrule = \"deny\"\ntools = [\"echo\"]\nwhen = 'size(input.text) > 5'\nreason = \"Too long.\"\n";
    let gate = TestGateway::open(&config).await;
    // A tool without a declaration is not listed.
    assert_eq!(gate.client().tool_names().await, ["count", "echo"]);
    let (client, other_session) =
        (gate.client().in_session("one"), gate.client().in_session("other"));
    assert_eq!(client.call_code("count", json!({})).await, "prerequisite_missing");
    assert_eq!(client.call_code("echo", json!({"text": "much too long"})).await, "short");
    assert_eq!(client.call_code("echo", json!({"text": "hi"})).await, "ok");
    assert_eq!(client.call_code("count", json!({})).await, "ok");
    assert_eq!(other_session.call_code("count", json!({})).await, "prerequisite_missing");
    assert_eq!(client.call_code("env", json!({"name": "PATH"})).await, "unknown_tool");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn conflicting_session_names_are_refused() {
    let gate = TestGateway::open(&fixture_config(UNDECLARED_OPEN)).await;
    let client = gate.client().in_session("one");
    let call = |session: &str| json!({"name": "echo", "arguments": {"text": "x"}, "_meta": {"toolgate/session": session}});
    assert!(client.call_method("tools/call", call("one")).await.1.get("result").is_some());
    let (_, refused) = client.call_method("tools/call", call("two")).await;
    assert!(
        refused["result"]["structuredContent"]["message"]
            .as_str()
            .unwrap()
            .contains("two sessions"),
        "{refused}"
    );
    let mut path_client = gate.client().in_session("one");
    path_client.url = format!("{}/default/two", path_client.url);
    assert_eq!(path_client.call_code("echo", json!({"text": "x"})).await, "forbidden");
    for name in [json!(7), json!(""), json!("a b"), json!("x".repeat(129))] {
        let (_, answer) = gate
            .client()
            .call_method("tools/call", json!({"name": "echo", "arguments": {"text": "x"}, "_meta": {"toolgate/session": name}}))
            .await;
        // An invalid session name is a validation error, because the client can correct it.
        let data = &answer["error"]["data"];
        assert_eq!(
            (&data["code"], &data["errorCategory"]),
            (&json!("invalid_request"), &json!("VALIDATION")),
            "{name}: {answer}"
        );
    }
    let key = gate.gateway.runtime().session("default", "local", "(turned away)");
    assert_eq!(key.rows().await.unwrap().len(), 6, "rows of refused calls");
    // The same rule applies to the header and to the decision API.
    let (_, answer) = gate
        .client()
        .in_session("a b")
        .call_method("tools/call", json!({"name": "echo", "arguments": {"text": "x"}}))
        .await;
    assert_eq!(answer["error"]["data"]["code"], json!("invalid_request"), "{answer}");
    let check = json!({"id": "1", "tool": "echo", "session": "a b"});
    let http = http_client();
    let response =
        http.post(format!("{}/v1/calls/check", gate.url)).json(&check).send().await.unwrap();
    let (status, answer) = (response.status().as_u16(), response.json::<Value>().await.unwrap());
    assert_eq!((status, &answer["code"]), (400, &json!("invalid_request")), "{answer}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn path_segment_is_percent_decoded_once() {
    let gate = TestGateway::open(CALC_TOOL_CONFIG).await;
    let client_at = |path: &str| {
        let mut client = gate.client();
        client.url = format!("{}/{path}", client.url);
        client
    };
    let rows = async |agent: &str, session: &str| {
        gate.gateway.runtime().session(agent, "local", session).rows().await.unwrap().len()
    };
    let calc = |n: usize| json!({"expression": format!("{n} + 1")});
    // All spellings name the same session.
    for (n, path) in ["default/a-b", "default/a%2Db", "def%61ult/%61-b"].into_iter().enumerate() {
        assert_eq!(client_at(path).call_code("calc", calc(n)).await, "ok", "{path}");
    }
    assert_eq!(client_at("default/a%2db").in_session("a-b").call_code("calc", calc(3)).await, "ok");
    assert_eq!(rows("default", "a-b").await, 4);
    // An encoded separator is part of the name, and is not decoded again.
    assert_eq!(client_at("default/a%2Fb").in_session("a/b").call_code("calc", calc(4)).await, "ok");
    assert_eq!(
        client_at("default/a%252Fb").in_session("a%2Fb").call_code("calc", calc(5)).await,
        "ok"
    );
    assert_eq!((rows("default", "a/b").await, rows("default", "a%2Fb").await), (1, 1));
    assert_eq!(client_at("default%2Fx/s").call_code("calc", calc(6)).await, "forbidden");
    assert_eq!(client_at("default/a/b").call_method("tools/list", json!({})).await.0, 404);
    // An invalid encoding is an error.
    for path in ["default/%zz", "default/a%", "%ff/s"] {
        let (status, answer) = client_at(path)
            .call_method("tools/call", json!({"name": "calc", "arguments": calc(7)}))
            .await;
        assert!(status == 400 && answer["error"].is_string(), "{path}: {answer}");
    }
    let (status, answer) = client_at("default/%zz").call_method("tools/list", json!({})).await;
    assert_eq!((status, &answer["error"]["data"]["callId"]), (400, &Value::Null), "{answer}");
    assert_eq!(rows("(unknown)", "(turned away)").await, 1, "one call names an unknown agent");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_records_turn_and_stop_reason() {
    let gate = TestGateway::open(
        "[tools.calc]\nkind = \"builtin\"\n[tools.mine]\nkind = \"client\"\npolicy = \"open\"\n",
    )
    .await;
    let meta = json!({"toolgate/turn": 3, "toolgate/stopReason": "tool_use"});
    gate.client()
        .in_session("s")
        .call_method(
            "tools/call",
            json!({"name": "calc", "arguments": {"expression": "1"}, "_meta": meta}),
        )
        .await;
    let mut call =
        json!({"id": "1", "session": "s", "tool": "mine", "turn": 4, "stopReason": "tool_calls"});
    let http = http_client();
    let post = async |verb: &str, body: &Value| {
        http.post(format!("{}/v1/calls/{verb}", gate.url)).json(body).send().await.unwrap()
    };
    assert_eq!(post("check", &call).await.status().as_u16(), 200);
    call["result"] = json!({});
    assert_eq!(post("report", &call).await.status().as_u16(), 200);
    let rows = gate.gateway.runtime().session("default", "local", "s").rows().await.unwrap();
    let recorded: Vec<_> = rows.iter().map(|row| (row.turn, row.stop_reason.as_deref())).collect();
    assert_eq!(recorded, [(Some(3), Some("tool_use")), (Some(4), Some("tool_calls"))]);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idempotency_key_replays_recorded_result() {
    let config = fixture_config("")
        + "[tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\npolicy = \"open\"\n";
    let gate = TestGateway::open(&config).await;
    let client = gate.client().in_session("s");
    let call = |key: &str| json!({"name": "count", "arguments": {}, "_meta": {"toolgate/idempotencyKey": key}});
    let first = client.call_method("tools/call", call("k")).await.1;
    let again = client.call_method("tools/call", call("k")).await.1;
    assert_eq!(
        first["result"]["structuredContent"], again["result"]["structuredContent"],
        "{again}"
    );
    assert_eq!(again["result"]["_meta"]["toolgate/replayed"], json!(true));
    let other_key = client.call_method("tools/call", call("l")).await.1;
    assert_ne!(first["result"]["structuredContent"], other_key["result"]["structuredContent"]);
    // The ledger stores the key, so the key has a size limit.
    let long = client.call_method("tools/call", call(&"k".repeat(2_000))).await.1;
    assert_eq!(
        (&long["error"]["code"], &long["error"]["data"]["code"]),
        (&json!(-32602), &json!("invalid_request")),
        "{long}"
    );
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unlisted_tool_is_not_suggested_for_unknown_tool() {
    let own = "[tools.pay]\nkind = \"client\"\neffect = \"read\"\ninput = { type = \"object\" }\n";
    let gate = TestGateway::open(&format!("[tools.calc]\nkind = \"builtin\"\n{own}")).await;
    assert_eq!(gate.client().tool_names().await, ["calc"]);
    let error = gate.client().call("pays", json!({})).await["_meta"]["toolgate/error"].clone();
    assert_eq!(error["code"], "unknown_tool", "{error}");
    assert!(error["message"].as_str().unwrap().ends_with("Available: `calc`"), "{error}");
    assert!(!error.to_string().contains("`pay`"), "{error}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn decision_api_checks_and_reports_call() {
    let config = "[tools.pay]\nkind = \"client\"\ninput = { type = \"object\", properties = { amount = { type = \"number\" } }, required = [\"amount\"] }\n\
        [[policy]]\nname = \"cap\"\nrule = \"deny\"\ntools = [\"pay\"]\nwhere = [{ argument = \"/amount\", above = 10 }]\nreason = \"Too much.\"\n";
    let gate = TestGateway::open(config).await;
    let http = http_client();
    let post = async |verb: &str, body: Value| -> (u16, Value) {
        let answer =
            http.post(format!("{}/v1/calls/{verb}", gate.url)).json(&body).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    };
    let call = |id: &str, amount: i32| json!({"id": id, "session": "s", "tool": "pay", "arguments": {"amount": amount}});
    let (_, refused) = post("check", call("1", 50)).await;
    assert_eq!(
        (refused["decision"].as_str(), refused["rule"].as_str(), refused["error"]["code"].as_str()),
        (Some("deny"), Some("cap"), Some("cap")),
        "{refused}"
    );
    let (_, allowed) = post("check", call("2", 5)).await;
    assert_eq!(allowed["decision"], "allow", "{allowed}");
    let mut report = call("2", 5);
    report["result"] = json!({"paid": true});
    let (_, reported) = post("report", report.clone()).await;
    assert_eq!(reported["outcome"]["isError"], json!(false), "{reported}");
    let (_, again) = post("report", report).await;
    assert_eq!(again["outcome"]["code"], "not_admitted", "{again}");
    // A repeated call returns the recorded outcome, a result or an error.
    let failed = json!({"message": "half of it", "effects": "done"});
    for (amount, member, outcome, code) in [
        (6, "result", json!({"paid": true}), Value::Null),
        (7, "error", failed, json!("client_tool_failed")),
    ] {
        let keyed = |id: &str| {
            let mut call = call(&format!("{id}{amount}"), amount);
            call["idempotencyKey"] = json!(member);
            call
        };
        assert_eq!(post("check", keyed("first")).await.1["decision"], "allow", "{member}");
        let mut report = keyed("first");
        report[member] = outcome;
        post("report", report).await;
        let (_, again) = post("check", keyed("again")).await;
        assert_eq!(
            (&again["decision"], &again["outcome"]["replayed"]),
            (&json!("replay"), &json!(true)),
            "{again}"
        );
        assert_eq!(
            (&again["outcome"]["isError"], &again["outcome"]["code"]),
            (&json!(member == "error"), &code),
            "{again}"
        );
    }
    for (verb, body, status) in [
        ("check", json!({"id": "3", "tool": "pay"}), 400),
        ("check", json!({"id": "", "session": "s", "tool": "pay"}), 400),
        ("check", json!({"id": "3", "session": "s", "tool": "pay", "colour": 1}), 400),
        ("check", json!({"id": "3", "session": "s", "tool": "pay", "agent": "other"}), 403),
        ("report", json!({"id": "3", "session": "s", "tool": "pay"}), 400),
        ("cancel", json!({}), 404),
    ] {
        assert_eq!(post(verb, body.clone()).await.0, status, "{verb} {body}");
    }
    let response = http.get(format!("{}/v1/calls/check", gate.url)).send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), response.headers().get("allow").unwrap().to_str().unwrap()),
        (405, "POST")
    );
    for page in ["healthz", "readyz", "metrics", "openapi.json"] {
        assert_eq!(
            http.get(format!("{}/{page}", gate.url)).send().await.unwrap().status().as_u16(),
            200,
            "{page}"
        );
    }
    let metrics =
        http.get(format!("{}/metrics", gate.url)).send().await.unwrap().text().await.unwrap();
    assert!(
        metrics.contains("toolgate_calls_total{") && metrics.contains("toolgate_canary_refused 1"),
        "{metrics}"
    );
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_config_selects_error_dialect() {
    let gate = TestGateway::open("[agents.plain.tools.calc]\nkind = \"builtin\"\n[agents.other]\ndialect = \"bucket\"\n[agents.other.tools.calc]\nkind = \"builtin\"\n").await;
    for (agent, bucket) in [("plain", false), ("other", true)] {
        let mut client = gate.client();
        client.url = format!("{}/{agent}", client.url);
        let result = client.call("nothing", json!({})).await;
        let (structured, standard) =
            (&result["structuredContent"], &result["_meta"]["toolgate/error"]);
        let text =
            result["content"][0]["text"].as_str().unwrap().lines().last().unwrap().to_owned();
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), *structured, "{agent}");
        assert_eq!(structured["error"]["bucket"].is_string(), bucket, "{agent}: {result}");
        assert_eq!(structured["errorCategory"].is_string(), !bucket, "{agent}: {result}");
        // The metadata has the standard dialect for every agent.
        assert_eq!(
            (standard["errorCategory"].as_str(), standard["code"].as_str()),
            (Some("VALIDATION"), Some("unknown_tool")),
            "{result}"
        );
        let read = toolgate::ToolError::from_bucket(structured).map(|error| error.code.to_string());
        assert_eq!(read.as_deref(), bucket.then_some("unknown_tool"));
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn listed_schema_contains_examples() {
    let tool = "[tools.pay]\nkind = \"http\"\nurl = \"https://bank.example/pay\"\neffect = \"read\"\n\
        input = { type = \"object\", properties = { amount = { type = \"number\" } } }\n\
        examples = [{ description = \"half of it\", input = { amount = 2.50 } }]\n";
    let gate = TestGateway::open(tool).await;
    let (_, listed) = gate.client().call_method("tools/list", json!({})).await;
    assert_eq!(
        listed["result"]["tools"][0]["inputSchema"]["examples"],
        json!([{"amount": 2.5}]),
        "{listed}"
    );
    gate.shut_down().await;
}
