//! A call waits for a person, who answers beside the gateway while that runs.

use serde_json::{Value, json};

use crate::gateway::{ServeProcess, tools_call_request};
use crate::hook::TestProject;

/// What a client is told that makes the same call as ever.
fn call_calc(served: &ServeProcess, session: &str) -> Value {
    let headers =
        "mcp-protocol-version: 2026-07-28\r\nmcp-method: tools/call\r\nmcp-name: calc\r\n";
    let mut body = tools_call_request(1, "calc", json!({"expression": "6*7"}));
    body["params"]["_meta"] = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}});
    let said = served.post(&format!("/mcp/default/{session}"), headers, &body);
    serde_json::from_str::<Value>(&said).unwrap_or_else(|_| panic!("{said}"))["result"].clone()
}

#[test]
fn approval_is_answered_while_gateway_runs() {
    let project = TestProject::with_config(
        "store = \"ledger.db\"\n[tools.calc]\nkind = \"builtin\"\n\
         [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"calc\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n",
    );
    let served = ServeProcess::start(&project);
    let code =
        |said: &Value| said["_meta"]["toolgate/error"]["code"].as_str().unwrap_or("ok").to_owned();
    for (session, verb, came) in [("yes", "approve", "ok"), ("no", "deny", "approval_denied")] {
        let asked = call_calc(&served, session);
        assert_eq!(code(&asked), "approval_required", "{asked}");
        let id = asked["_meta"]["toolgate/error"]["approval"]["id"].as_str().unwrap().to_owned();
        let (exit, stdout, stderr) =
            project.run(&["approvals", verb, &id, "--store", "ledger.db"], "");
        assert_eq!(exit, 0, "{stdout}{stderr}");
        let told = call_calc(&served, session);
        assert_eq!(
            (code(&told).as_str(), told["structuredContent"] == json!({"result": 42})),
            (came, verb == "approve"),
            "{told}"
        );
    }
    // It was for one call.
    let again = call_calc(&served, "yes");
    assert_ne!(code(&again), "ok", "{again}");
}
