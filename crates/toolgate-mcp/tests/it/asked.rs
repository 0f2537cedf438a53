//! Who is asked, and whose answer counts.

use serde_json::{Value, json};

use crate::entering::{Older, plain};
use crate::support::{Gate, with_fixture};

const ASKED: &str = "[tools.count]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"write\"\n\
    [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"count\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n";

/// The approval that a refused call waits for.
fn approval(result: &Value) -> &str {
    let error = &result["_meta"]["toolgate/error"];
    assert_eq!(error["code"], "approval_required", "{result}");
    error["approval"]["id"].as_str().unwrap_or_else(|| panic!("{result}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_answer_goes_by_what_the_tool_is_when_the_answer_comes() {
    let gate = Gate::open(&(with_fixture("") + ASKED)).await;
    let yes = json!({"action": "accept", "content": {"approve": true}});
    let mut older = Older::greet(&plain(), &gate.url, json!({"elicitation": {}})).await;
    let call = older.begin("tools/call", &json!({"name": "count", "arguments": {}}));
    let question = older.ears.hear(|said| said["method"] == "elicitation/create").await;
    let newer = gate.client().in_session("s").who_can(json!({"elicitation": {}}));
    let asked = newer.call("count", json!({})).await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    // From here on it may destroy something.
    gate.reload(&(with_fixture("") + &ASKED.replace("effect = \"write\"\n", ""))).await.unwrap();
    older.say(&json!({"jsonrpc": "2.0", "id": question["id"], "result": yes}));
    let of_older = older.answer_to(call).await["result"].clone();
    let answer = json!({"toolgate_approval": yes});
    let back = json!({"name": "count", "arguments": {}, "requestState": asked["requestState"], "inputResponses": answer});
    let of_newer = newer.ask("tools/call", back).await.1["result"].clone();
    for result in [of_older, of_newer] {
        // It still waits for whoever may.
        assert!(gate.gateway.gate().answer_approval(approval(&result), true, "lead").await.unwrap(), "{result}");
    }
    drop(older);
    gate.end().await;
}
