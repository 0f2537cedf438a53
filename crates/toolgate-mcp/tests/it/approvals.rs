//! Tests which answers approve a call, and which call an approval permits.

use serde_json::{Value, json};

use crate::support::{TestGateway, fixture_config, http_client, token_config};

pub(crate) const APPROVAL_RULES: &str = "[tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
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
    let suspended = client.call_method("tools/call", call(None, Value::Null)).await.1;
    assert_eq!(suspended["result"]["resultType"], "input_required", "{suspended}");
    // The suspended call was refused, and has its row.
    let meta = &suspended["result"]["_meta"];
    assert_eq!(
        (&meta["toolgate/receipt"]["tool"], meta["toolgate/call"].is_string()),
        (&json!("count"), true),
        "{suspended}"
    );
    let question = &suspended["result"]["inputRequests"]["toolgate_approval"];
    assert!(
        question["params"]["message"].as_str().unwrap().starts_with("A person decides."),
        "{suspended}"
    );
    let state = suspended["result"]["requestState"].as_str().unwrap().to_owned();
    let yes = json!({"action": "accept", "content": {"approve": true}});
    // Another session and a forged state cannot answer.
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
    // A second answer has no open question.
    let again = client.call_method("tools/call", call(Some(&state), yes)).await.1;
    assert!(again["error"].is_object(), "{again}");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_state_is_bound_to_principal() {
    let tokens = token_config("ann", "ann") + &token_config("bob", "bob");
    let gate = TestGateway::open(&(fixture_config("") + APPROVAL_RULES + &tokens)).await;
    // Both principals use the same session name.
    let [ann, bob] = ["ann", "bob"].map(|principal| {
        gate.client()
            .in_session("s")
            .with_capabilities(elicitation_capability())
            .with_token(principal)
    });
    let suspended =
        ann.call_method("tools/call", json!({"name": "count", "arguments": {}})).await.1;
    let input = json!({"toolgate_approval": {"action": "accept", "content": {"approve": true}}});
    let resumed = json!({"name": "count", "arguments": {}, "requestState": suspended["result"]["requestState"], "inputResponses": input});
    assert!(resumed["requestState"].is_string(), "{suspended}");
    let stolen = bob.call_method("tools/call", resumed.clone()).await.1;
    assert!(stolen["error"].is_object(), "{stolen}");
    // The approval stays valid for Ann, for one call.
    let done = ann.call_method("tools/call", resumed).await.1;
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
    let suspended = client
        .call_method("tools/call", json!({"name": "echo", "arguments": {"text": "small"}}))
        .await
        .1;
    let state = suspended["result"]["requestState"].as_str().unwrap();
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
    for (text, approved) in [("one", json!({"text": "one"})), ("two", json!({}))] {
        let refused = client.call("echo", json!({"text": text})).await;
        let id = refused["_meta"]["toolgate/error"]["approval"]["id"].as_str().unwrap().to_owned();
        assert!(gate.gateway.runtime().answer_approval(&id, true, "lead").await.unwrap());
        let named = |arguments: &Value| json!({"name": "echo", "arguments": arguments, "_meta": {"toolgate/approval": id}});
        for arguments in [json!({"text": "other"}), json!({"txt": text})] {
            let answer = client.call_method("tools/call", named(&arguments)).await.1;
            let data = &answer["error"]["data"];
            assert_eq!(
                (&data["code"], data["callId"].is_string()),
                (&json!("invalid_request"), true),
                "{answer}"
            );
        }
        let done = client.call_method("tools/call", named(&approved)).await.1;
        assert_eq!(done["result"]["structuredContent"]["text"], json!(text), "{done}");
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn approval_id_is_returned_if_client_cannot_approve() {
    let destructive = APPROVAL_RULES.replace("effect = \"write\"\n", "");
    let by_lead = APPROVAL_RULES.replace("reason =", "approvers = [\"lead\"]\nreason =");
    let by_client = destructive.replace("reason =", "approvers = [\"client\"]\nreason =");
    for (rules, capabilities, is_asked) in [
        (APPROVAL_RULES, json!({}), false),
        (&destructive, elicitation_capability(), false),
        (&by_lead, elicitation_capability(), false),
        (&by_client, elicitation_capability(), true),
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
    let suspended =
        client.call_method("tools/call", json!({"name": "count", "arguments": {}})).await.1;
    let state = suspended["result"]["requestState"].clone();
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
    let suspended =
        client.call_method("tools/call", json!({"name": "count", "arguments": {}})).await.1;
    let state = suspended["result"]["requestState"].clone();
    let cancel = json!({"toolgate_approval": {"action": "cancel"}});
    let resumed =
        json!({"name": "count", "arguments": {}, "requestState": state, "inputResponses": cancel});
    let answer = client.call_method("tools/call", resumed.clone()).await.1;
    let meta = &answer["result"]["_meta"];
    assert_eq!(meta["toolgate/error"]["code"], "approval_required", "{answer}");
    assert!(meta["toolgate/receipt"]["signature"].is_string(), "{answer}");
    // The approval is still open, and can be granted once elsewhere.
    let id = meta["toolgate/error"]["approval"]["id"].as_str().unwrap();
    assert!(gate.gateway.runtime().answer_approval(id, true, "lead").await.unwrap());
    assert_eq!(client.call_code("count", json!({})).await, "ok");
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unrequested_approval_is_refused() {
    let gate = TestGateway::open(&(fixture_config("") + APPROVAL_RULES)).await;
    let yes = json!({"toolgate_approval": {"action": "accept", "content": {"approve": true}}});
    for (n, extra) in [json!({}), json!({"requestState": "made up"}), json!({"requestState": ""})]
        .into_iter()
        .enumerate()
    {
        let client =
            gate.client().in_session(&format!("s{n}")).with_capabilities(elicitation_capability());
        let mut call = json!({"name": "count", "arguments": {}, "inputResponses": yes});
        call.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let (_, answer) = client.call_method("tools/call", call).await;
        assert_eq!(answer["error"]["code"], -32602, "{answer}");
    }
    // Another session cannot answer the question.
    let suspended = gate
        .client()
        .in_session("mine")
        .with_capabilities(elicitation_capability())
        .call_method("tools/call", json!({"name": "count", "arguments": {}}))
        .await
        .1;
    let other = gate.client().in_session("theirs").with_capabilities(elicitation_capability());
    let stolen = json!({"name": "count", "arguments": {}, "requestState": suspended["result"]["requestState"], "inputResponses": yes});
    assert_eq!(other.call_method("tools/call", stolen).await.1["error"]["code"], -32602);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn decision_api_approval_is_bound_to_arguments() {
    let config = "[tools.pay]\nkind = \"client\"\ninput = { type = \"object\", properties = { amount = { type = \"number\" } }, required = [\"amount\"] }\n\
        [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"pay\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";
    let gate = TestGateway::open(config).await;
    let http = http_client();
    let post = async |verb: &str, body: &Value| -> (u16, Value) {
        let answer =
            http.post(format!("{}/v1/calls/{verb}", gate.url)).json(body).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    };
    let call = |id: &str, amount: i32| json!({"id": id, "session": "s", "tool": "pay", "arguments": {"amount": amount}});
    let named = |id: &str, arguments: Value, approval: &str| json!({"id": id, "session": "s", "tool": "pay", "arguments": arguments, "approval": approval});
    let approved = async |id: &str, amount: i32| -> String {
        let (_, checked) = post("check", &call(id, amount)).await;
        assert_eq!(checked["decision"], "ask", "{checked}");
        let approval = checked["error"]["approval"]["id"]
            .as_str()
            .unwrap_or_else(|| panic!("{checked}"))
            .to_owned();
        assert!(gate.gateway.runtime().answer_approval(&approval, true, "lead").await.unwrap());
        approval
    };
    let approval = approved("1", 50).await;
    // A call with other arguments is refused and recorded.
    for (id, arguments) in [("2", json!({"amount": 5_000})), ("3", json!({"amuont": 50}))] {
        let (status, refused) = post("check", &named(id, arguments, &approval)).await;
        assert_eq!((status, &refused["code"]), (400, &json!("invalid_request")), "{refused}");
        assert!(
            refused["error"].as_str().unwrap_or_default().contains("for other arguments"),
            "{refused}"
        );
        assert!(refused["receipt"].is_object() && refused.get("decision").is_none(), "{refused}");
    }
    // The approved call runs once.
    let same = named("4", json!({"amount": 50}), &approval);
    let (_, allowed) = post("check", &same).await;
    assert_eq!(
        (&allowed["decision"], &allowed["arguments"]),
        (&json!("allow"), &json!({"amount": 50})),
        "{allowed}"
    );
    let mut report = same;
    report["result"] = json!({"paid": true});
    let (_, reported) = post("report", &report).await;
    assert_eq!(reported["outcome"]["isError"], json!(false), "{reported}");
    let (_, again) = post("check", &named("5", json!({"amount": 50}), &approval)).await;
    assert_eq!(again["decision"], "deny", "{again}");
    // Without arguments, the check returns the approved ones. A report with other arguments is an
    // error.
    let approval = approved("6", 60).await;
    let (_, allowed) = post("check", &named("7", json!({}), &approval)).await;
    assert_eq!(
        (&allowed["decision"], &allowed["arguments"]),
        (&json!("allow"), &json!({"amount": 60})),
        "{allowed}"
    );
    let mut report = named("7", json!({"amount": 6_000}), &approval);
    report["result"] = json!({"paid": true});
    let (status, reported) = post("report", &report).await;
    assert_eq!((status, &reported["outcome"]["isError"]), (200, &json!(true)), "{reported}");
    gate.shut_down().await;
}
