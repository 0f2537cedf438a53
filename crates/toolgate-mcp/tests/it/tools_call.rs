//! What a client sees: tools, results, errors, sessions, approvals.

use serde_json::{Value, json};

use crate::security::token_digest;
use crate::support::{TestGateway, fixture_config};

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
    // Exactly as many digits as were sent.
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
    let said = client.call("fail", json!({"message": "it is Sunday again"})).await;
    assert_eq!(said["_meta"]["toolgate/error"]["upstream"]["said"], "it is Sunday again");
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
    // What nobody declares is not offered.
    assert_eq!(gate.client().tool_names().await, ["count", "echo"]);
    let (one, other) = (gate.client().in_session("one"), gate.client().in_session("other"));
    assert_eq!(one.call_code("count", json!({})).await, "prerequisite_missing");
    assert_eq!(one.call_code("echo", json!({"text": "much too long"})).await, "short");
    assert_eq!(one.call_code("echo", json!({"text": "hi"})).await, "ok");
    assert_eq!(one.call_code("count", json!({})).await, "ok");
    assert_eq!(other.call_code("count", json!({})).await, "prerequisite_missing");
    assert_eq!(one.call_code("env", json!({"name": "PATH"})).await, "unknown_tool");
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
    let mut at = gate.client().in_session("one");
    at.url = format!("{}/default/two", at.url);
    assert_eq!(at.call_code("echo", json!({"text": "x"})).await, "forbidden");
    for bad in [json!(7), json!(""), json!("a b"), json!("x".repeat(129))] {
        let (_, answer) = gate
            .client()
            .call_method("tools/call", json!({"name": "echo", "arguments": {"text": "x"}, "_meta": {"toolgate/session": bad}}))
            .await;
        // That is no question of who asks: it can be put right.
        let told = &answer["error"]["data"];
        assert_eq!(
            (&told["code"], &told["errorCategory"]),
            (&json!("invalid_request"), &json!("VALIDATION")),
            "{bad}: {answer}"
        );
    }
    let key = gate.gateway.runtime().session("default", "local", "(turned away)");
    assert_eq!(key.rows().await.unwrap().len(), 6, "each has its row");
    // The same where another word names it, and by the decision API.
    let (_, answer) = gate
        .client()
        .in_session("a b")
        .call_method("tools/call", json!({"name": "echo", "arguments": {"text": "x"}}))
        .await;
    assert_eq!(answer["error"]["data"]["code"], json!("invalid_request"), "{answer}");
    let check = json!({"id": "1", "tool": "echo", "session": "a b"});
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let said = http.post(format!("{}/v1/calls/check", gate.url)).json(&check).send().await.unwrap();
    let (status, told) = (said.status().as_u16(), said.json::<Value>().await.unwrap());
    assert_eq!((status, &told["code"]), (400, &json!("invalid_request")), "{told}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn path_segment_is_percent_decoded_once() {
    let gate = TestGateway::open("[tools.calc]\nkind = \"builtin\"\n").await;
    let at = |path: &str| {
        let mut client = gate.client();
        client.url = format!("{}/{path}", client.url);
        client
    };
    let rows = async |agent: &str, session: &str| {
        gate.gateway.runtime().session(agent, "local", session).rows().await.unwrap().len()
    };
    let calc = |n: usize| json!({"expression": format!("{n} + 1")});
    // However it is spelt, it is one conversation.
    for (n, path) in ["default/a-b", "default/a%2Db", "def%61ult/%61-b"].into_iter().enumerate() {
        assert_eq!(at(path).call_code("calc", calc(n)).await, "ok", "{path}");
    }
    assert_eq!(at("default/a%2db").in_session("a-b").call_code("calc", calc(3)).await, "ok");
    assert_eq!(rows("default", "a-b").await, 4);
    // An encoded separator is part of the name, and is not decoded again.
    assert_eq!(at("default/a%2Fb").in_session("a/b").call_code("calc", calc(4)).await, "ok");
    assert_eq!(at("default/a%252Fb").in_session("a%2Fb").call_code("calc", calc(5)).await, "ok");
    assert_eq!((rows("default", "a/b").await, rows("default", "a%2Fb").await), (1, 1));
    assert_eq!(at("default%2Fx/s").call_code("calc", calc(6)).await, "forbidden");
    assert_eq!(at("default/a/b").call_method("tools/list", json!({})).await.0, 404);
    // What is no spelling of anything is told as such, and a call in it has its row.
    for path in ["default/%zz", "default/a%", "%ff/s"] {
        let (status, answer) =
            at(path).call_method("tools/call", json!({"name": "calc", "arguments": calc(7)})).await;
        let told = &answer["error"]["data"];
        assert_eq!(
            (status, &told["code"], &told["errorCategory"]),
            (400, &json!("invalid_request"), &json!("VALIDATION")),
            "{path}: {answer}"
        );
        assert!(told["callId"].is_string() && told["receipt"].is_object(), "{path}: {answer}");
    }
    let (status, answer) = at("default/%zz").call_method("tools/list", json!({})).await;
    assert_eq!((status, &answer["error"]["data"]["callId"]), (400, &Value::Null), "{answer}");
    assert_eq!(
        rows("(unknown)", "(turned away)").await,
        4,
        "one of them was for an agent that is not there"
    );
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
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let post = async |verb: &str, body: &Value| {
        http.post(format!("{}/v1/calls/{verb}", gate.url)).json(body).send().await.unwrap()
    };
    assert_eq!(post("check", &call).await.status().as_u16(), 200);
    call["result"] = json!({});
    assert_eq!(post("report", &call).await.status().as_u16(), 200);
    let rows = gate.gateway.runtime().session("default", "local", "s").rows().await.unwrap();
    let said: Vec<_> = rows.iter().map(|row| (row.turn, row.stop_reason.as_deref())).collect();
    assert_eq!(said, [(Some(3), Some("tool_use")), (Some(4), Some("tool_calls"))]);
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
    let other = client.call_method("tools/call", call("l")).await.1;
    assert_ne!(first["result"]["structuredContent"], other["result"]["structuredContent"]);
    // It is kept for as long as what it stands for, and is not longer than that is worth.
    let long = client.call_method("tools/call", call(&"k".repeat(2_000))).await.1;
    assert_eq!(
        (&long["error"]["code"], &long["error"]["data"]["code"]),
        (&json!(-32602), &json!("invalid_request")),
        "{long}"
    );
    gate.shut_down().await;
}

const APPROVAL_RULES: &str = "[tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
    [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"count\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";

fn elicitation_capability() -> Value {
    json!({"elicitation": {}})
}

#[tokio::test(flavor = "multi_thread")]
async fn elicited_approval_is_valid_once() {
    let gate = TestGateway::open(&(fixture_config("") + APPROVAL_RULES)).await;
    let client = gate.client().in_session("s").with_capabilities(elicitation_capability());
    let call = |state: Option<&str>, answer: Value| {
        let mut params = json!({"name": "count", "arguments": {}});
        if let Some(state) = state {
            params["requestState"] = json!(state);
            params["inputResponses"] = json!({"toolgate_approval": answer});
        }
        params
    };
    let asked = client.call_method("tools/call", call(None, Value::Null)).await.1;
    assert_eq!(asked["result"]["resultType"], "input_required", "{asked}");
    // It was refused until then, and that has its row.
    let meta = &asked["result"]["_meta"];
    assert_eq!(
        (&meta["toolgate/receipt"]["tool"], meta["toolgate/call"].is_string()),
        (&json!("count"), true),
        "{asked}"
    );
    let question = &asked["result"]["inputRequests"]["toolgate_approval"];
    assert!(
        question["params"]["message"].as_str().unwrap().starts_with("A person decides."),
        "{asked}"
    );
    let state = asked["result"]["requestState"].as_str().unwrap().to_owned();
    let yes = json!({"action": "accept", "content": {"approve": true}});
    // Somebody else's answer, and one that was made up.
    let stranger = gate.client().in_session("t").with_capabilities(elicitation_capability());
    assert!(
        stranger.call_method("tools/call", call(Some(&state), yes.clone())).await.1["error"]
            .is_object()
    );
    let forged: String = state.chars().rev().collect();
    assert!(
        client.call_method("tools/call", call(Some(&forged), yes.clone())).await.1["error"]
            .is_object()
    );
    let done = client.call_method("tools/call", call(Some(&state), yes.clone())).await.1;
    assert_eq!(done["result"]["structuredContent"]["count"], json!(1), "{done}");
    // A second time it is not an answer to anything.
    let again = client.call_method("tools/call", call(Some(&state), yes)).await.1;
    assert!(again["error"].is_object(), "{again}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_state_is_bound_to_principal() {
    let token = |who: &str| {
        format!("[[gateway.tokens]]\nprincipal = \"{who}\"\nsha256 = \"{}\"\n", token_digest(who))
    };
    let gate =
        TestGateway::open(&(fixture_config("") + APPROVAL_RULES + &token("ann") + &token("bob")))
            .await;
    // One name of a session, and one of each of them.
    let [ann, bob] = ["ann", "bob"].map(|who| {
        gate.client().in_session("s").with_capabilities(elicitation_capability()).with_token(who)
    });
    let asked = ann.call_method("tools/call", json!({"name": "count", "arguments": {}})).await.1;
    let answer = json!({"toolgate_approval": {"action": "accept", "content": {"approve": true}}});
    let back = json!({"name": "count", "arguments": {}, "requestState": asked["result"]["requestState"], "inputResponses": answer});
    assert!(back["requestState"].is_string(), "{asked}");
    let stolen = bob.call_method("tools/call", back.clone()).await.1;
    assert!(stolen["error"].is_object(), "{stolen}");
    // It is still there for her, and good for one call.
    let done = ann.call_method("tools/call", back).await.1;
    assert_eq!(done["result"]["structuredContent"]["count"], json!(1), "{done}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn edited_call_needs_new_approval() {
    let config = fixture_config("")
        + "[tools.echo]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
           [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"echo\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";
    let gate = TestGateway::open(&config).await;
    let client = gate.client().in_session("s").with_capabilities(elicitation_capability());
    let asked = client
        .call_method("tools/call", json!({"name": "echo", "arguments": {"text": "small"}}))
        .await
        .1;
    let state = asked["result"]["requestState"].as_str().unwrap();
    let yes = json!({"toolgate_approval": {"action": "accept", "content": {"approve": true}}});
    let edited = json!({"name": "echo", "arguments": {"text": "large"}, "requestState": state, "inputResponses": yes});
    let answer = client.call_method("tools/call", edited).await.1;
    assert_eq!(answer["result"]["resultType"], "input_required", "{answer}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn named_approval_is_bound_to_arguments() {
    let config = fixture_config("")
        + "[tools.echo]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
           [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"echo\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";
    let gate = TestGateway::open(&config).await;
    let client = gate.client().in_session("s");
    for (text, same) in [("one", json!({"text": "one"})), ("two", json!({}))] {
        let asked = client.call("echo", json!({"text": text})).await;
        let id = asked["_meta"]["toolgate/error"]["approval"]["id"].as_str().unwrap().to_owned();
        assert!(gate.gateway.runtime().answer_approval(&id, true, "lead").await.unwrap());
        let named = |arguments: &Value| json!({"name": "echo", "arguments": arguments, "_meta": {"toolgate/approval": id}});
        for other in [json!({"text": "other"}), json!({"txt": text})] {
            let refused = client.call_method("tools/call", named(&other)).await.1;
            let told = &refused["error"]["data"];
            assert_eq!(
                (&told["code"], told["callId"].is_string()),
                (&json!("invalid_request"), true),
                "{refused}"
            );
        }
        let done = client.call_method("tools/call", named(&same)).await.1;
        assert_eq!(done["result"]["structuredContent"]["text"], json!(text), "{done}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn approval_id_is_returned_if_client_cannot_approve() {
    let destructive = APPROVAL_RULES.replace("effect = \"write\"\n", "");
    let named = APPROVAL_RULES.replace("reason =", "approvers = [\"lead\"]\nreason =");
    let left = destructive.replace("reason =", "approvers = [\"client\"]\nreason =");
    for (rules, capabilities, is_asked) in [
        (APPROVAL_RULES, json!({}), false),
        (&destructive, elicitation_capability(), false),
        (&named, elicitation_capability(), false),
        (&left, elicitation_capability(), true),
    ] {
        let gate = TestGateway::open(&(fixture_config("") + rules)).await;
        let client = gate.client().in_session("s").with_capabilities(capabilities);
        let answer =
            client.call_method("tools/call", json!({"name": "count", "arguments": {}})).await.1;
        assert_eq!(
            answer["result"]["resultType"] == "input_required",
            is_asked,
            "{rules}: {answer}"
        );
        if !is_asked {
            let id = answer["result"]["_meta"]["toolgate/error"]["approval"]["id"]
                .as_str()
                .unwrap()
                .to_owned();
            assert!(gate.gateway.runtime().answer_approval(&id, true, "lead").await.unwrap());
            assert_eq!(client.call_code("count", json!({})).await, "ok");
        }
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn declined_approval_denies_call() {
    let gate = TestGateway::open(&(fixture_config("") + APPROVAL_RULES)).await;
    let client = gate.client().in_session("s").with_capabilities(elicitation_capability());
    let asked = client.call_method("tools/call", json!({"name": "count", "arguments": {}})).await.1;
    let state = asked["result"]["requestState"].clone();
    let no = json!({"toolgate_approval": {"action": "decline"}});
    let answer = client
        .call_method(
            "tools/call",
            json!({"name": "count", "arguments": {}, "requestState": state, "inputResponses": no}),
        )
        .await
        .1;
    assert_eq!(answer["result"]["_meta"]["toolgate/error"]["code"], "approval_denied", "{answer}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_elicitation_keeps_approval_open() {
    let gate = TestGateway::open(&(fixture_config("") + APPROVAL_RULES)).await;
    let client = gate.client().in_session("s").with_capabilities(elicitation_capability());
    let asked = client.call_method("tools/call", json!({"name": "count", "arguments": {}})).await.1;
    let state = asked["result"]["requestState"].clone();
    let closed = json!({"toolgate_approval": {"action": "cancel"}});
    let again =
        json!({"name": "count", "arguments": {}, "requestState": state, "inputResponses": closed});
    let answer = client.call_method("tools/call", again.clone()).await.1;
    let meta = &answer["result"]["_meta"];
    assert_eq!(meta["toolgate/error"]["code"], "approval_required", "{answer}");
    assert!(meta["toolgate/receipt"]["signature"].is_string(), "{answer}");
    // Nobody has refused: it can be approved elsewhere, once.
    let id = meta["toolgate/error"]["approval"]["id"].as_str().unwrap();
    assert!(gate.gateway.runtime().answer_approval(id, true, "lead").await.unwrap());
    assert_eq!(client.call_code("count", json!({})).await, "ok");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unrequested_approval_is_refused() {
    let gate = TestGateway::open(&(fixture_config("") + APPROVAL_RULES)).await;
    let yes = json!({"toolgate_approval": {"action": "accept", "content": {"approve": true}}});
    for (n, more) in [json!({}), json!({"requestState": "made up"}), json!({"requestState": ""})]
        .into_iter()
        .enumerate()
    {
        let client =
            gate.client().in_session(&format!("s{n}")).with_capabilities(elicitation_capability());
        let mut call = json!({"name": "count", "arguments": {}, "inputResponses": yes});
        call.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (_, answer) = client.call_method("tools/call", call).await;
        assert_eq!(answer["error"]["code"], -32602, "{answer}");
    }
    // What was asked of one is not answered by another.
    let asked = gate
        .client()
        .in_session("mine")
        .with_capabilities(elicitation_capability())
        .call_method("tools/call", json!({"name": "count", "arguments": {}}))
        .await
        .1;
    let theirs = gate.client().in_session("theirs").with_capabilities(elicitation_capability());
    let stolen = json!({"name": "count", "arguments": {}, "requestState": asked["result"]["requestState"], "inputResponses": yes});
    assert_eq!(theirs.call_method("tools/call", stolen).await.1["error"]["code"], -32602);
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
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let post = async |verb: &str, body: Value| -> (u16, Value) {
        let answer =
            http.post(format!("{}/v1/calls/{verb}", gate.url)).json(&body).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    };
    let call = |id: &str, amount: i32| json!({"id": id, "session": "s", "tool": "pay", "arguments": {"amount": amount}});
    let (_, refused) = post("check", call("1", 50)).await;
    assert_eq!(
        (
            refused["decision"].as_str(),
            refused["rule"].as_str(),
            refused["error"]["message"].as_str()
        ),
        (Some("deny"), Some("cap"), Some("Too much. Repeating this call does not help."))
    );
    let (_, allowed) = post("check", call("2", 5)).await;
    assert_eq!(allowed["decision"], "allow", "{allowed}");
    let mut report = call("2", 5);
    report["result"] = json!({"paid": true});
    let (_, told) = post("report", report.clone()).await;
    assert_eq!(told["outcome"]["isError"], json!(false), "{told}");
    let (_, again) = post("report", report).await;
    assert_eq!(again["outcome"]["code"], "not_admitted", "{again}");
    // What was made before is told again, success or error.
    let failed = json!({"message": "half of it", "effects": "done"});
    for (amount, what, came, code) in [
        (6, "result", json!({"paid": true}), Value::Null),
        (7, "error", failed, json!("client_tool_failed")),
    ] {
        let keyed = |id: &str| {
            let mut call = call(&format!("{id}{amount}"), amount);
            call["idempotencyKey"] = json!(what);
            call
        };
        assert_eq!(post("check", keyed("first")).await.1["decision"], "allow", "{what}");
        let mut report = keyed("first");
        report[what] = came;
        post("report", report).await;
        let (_, again) = post("check", keyed("again")).await;
        assert_eq!(
            (&again["decision"], &again["outcome"]["replayed"]),
            (&json!("replay"), &json!(true)),
            "{again}"
        );
        assert_eq!(
            (&again["outcome"]["isError"], &again["outcome"]["code"]),
            (&json!(what == "error"), &code),
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
    let got = http.get(format!("{}/v1/calls/check", gate.url)).send().await.unwrap();
    assert_eq!(
        (got.status().as_u16(), got.headers().get("allow").unwrap().to_str().unwrap()),
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
async fn decision_api_approval_is_bound_to_arguments() {
    let config = "[tools.pay]\nkind = \"client\"\ninput = { type = \"object\", properties = { amount = { type = \"number\" } }, required = [\"amount\"] }\n\
        [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"pay\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";
    let gate = TestGateway::open(config).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let post = async |verb: &str, body: &Value| -> (u16, Value) {
        let answer =
            http.post(format!("{}/v1/calls/{verb}", gate.url)).json(body).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    };
    let call = |id: &str, amount: i32| json!({"id": id, "session": "s", "tool": "pay", "arguments": {"amount": amount}});
    let named = |id: &str, arguments: Value, approval: &str| json!({"id": id, "session": "s", "tool": "pay", "arguments": arguments, "approval": approval});
    let approved = async |id: &str, amount: i32| -> String {
        let (_, asked) = post("check", &call(id, amount)).await;
        assert_eq!(asked["decision"], "ask", "{asked}");
        let approval = asked["error"]["approval"]["id"]
            .as_str()
            .unwrap_or_else(|| panic!("{asked}"))
            .to_owned();
        assert!(gate.gateway.runtime().answer_approval(&approval, true, "lead").await.unwrap());
        approval
    };
    let approval = approved("1", 50).await;
    // Nothing else runs in its name, and whoever tries is written down.
    for (id, other) in [("2", json!({"amount": 5_000})), ("3", json!({"amuont": 50}))] {
        let (status, refused) = post("check", &named(id, other, &approval)).await;
        assert_eq!((status, &refused["code"]), (400, &json!("invalid_request")), "{refused}");
        assert!(
            refused["error"].as_str().unwrap_or_default().contains("for other arguments"),
            "{refused}"
        );
        assert!(refused["receipt"].is_object() && refused.get("decision").is_none(), "{refused}");
    }
    // What was approved does, and once.
    let same = named("4", json!({"amount": 50}), &approval);
    let (_, allowed) = post("check", &same).await;
    assert_eq!(
        (&allowed["decision"], &allowed["arguments"]),
        (&json!("allow"), &json!({"amount": 50})),
        "{allowed}"
    );
    let mut report = same;
    report["result"] = json!({"paid": true});
    let (_, told) = post("report", &report).await;
    assert_eq!(told["outcome"]["isError"], json!(false), "{told}");
    let (_, again) = post("check", &named("5", json!({"amount": 50}), &approval)).await;
    assert_eq!(again["decision"], "deny", "{again}");
    // Without arguments, those that were approved are told; who reports others has run others.
    let approval = approved("6", 60).await;
    let (_, allowed) = post("check", &named("7", json!({}), &approval)).await;
    assert_eq!(
        (&allowed["decision"], &allowed["arguments"]),
        (&json!("allow"), &json!({"amount": 60})),
        "{allowed}"
    );
    let mut report = named("7", json!({"amount": 6_000}), &approval);
    report["result"] = json!({"paid": true});
    let (status, told) = post("report", &report).await;
    assert_eq!((status, &told["outcome"]["isError"]), (200, &json!(true)), "{told}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_config_selects_error_dialect() {
    let gate = TestGateway::open("[agents.plain.tools.calc]\nkind = \"builtin\"\n[agents.other]\ndialect = \"bucket\"\n[agents.other.tools.calc]\nkind = \"builtin\"\n").await;
    for (agent, bucket) in [("plain", false), ("other", true)] {
        let mut client = gate.client();
        client.url = format!("{}/{agent}", client.url);
        let said = client.call("nothing", json!({})).await;
        let (structured, standard) = (&said["structuredContent"], &said["_meta"]["toolgate/error"]);
        let text = said["content"][0]["text"].as_str().unwrap().lines().last().unwrap().to_owned();
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), *structured, "{agent}");
        assert_eq!(structured["error"]["bucket"].is_string(), bucket, "{agent}: {said}");
        assert_eq!(structured["errorCategory"].is_string(), !bucket, "{agent}: {said}");
        // A program always reads the same.
        assert_eq!(
            (standard["errorCategory"].as_str(), standard["code"].as_str()),
            (Some("VALIDATION"), Some("unknown_tool")),
            "{said}"
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
