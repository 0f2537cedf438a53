//! Tests that a person can answer an approval while the gateway runs.

use serde_json::{Value, json};

use crate::gateway::{ServeProcess, tools_call_request};
use crate::hook::TestProject;

/// Calls `calc` in a session, and returns the result.
fn call_calc(gateway: &ServeProcess, session: &str) -> Value {
    let headers =
        "mcp-protocol-version: 2026-07-28\r\nmcp-method: tools/call\r\nmcp-name: calc\r\n";
    let mut request = tools_call_request(1, "calc", json!({"expression": "6*7"}));
    request["params"]["_meta"] = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}});
    let body = gateway.post(&format!("/mcp/default/{session}"), headers, &request);
    serde_json::from_str::<Value>(&body).unwrap_or_else(|_| panic!("{body}"))["result"].clone()
}

#[test]
fn approval_is_answered_while_gateway_runs() {
    let project = TestProject::with_config(
        "store = \"ledger.db\"\n[tools.calc]\nkind = \"builtin\"\n\
         [[policy]]\nname = \"person\"\nrule = \"ask\"\ntools = [\"calc\"]\nwhen = \"true\"\nreason = \"A person decides.\"\n",
    );
    let gateway = ServeProcess::start(&project);
    let code = |result: &Value| {
        result["_meta"]["toolgate/error"]["code"].as_str().unwrap_or("ok").to_owned()
    };
    for (session, verb, expected_code) in
        [("yes", "approve", "ok"), ("no", "deny", "approval_denied")]
    {
        let first = call_calc(&gateway, session);
        assert_eq!(code(&first), "approval_required", "{first}");
        let id = first["_meta"]["toolgate/error"]["approval"]["id"].as_str().unwrap().to_owned();
        let (exit, stdout, stderr) =
            project.run(&["approvals", verb, &id, "--store", "ledger.db"], "");
        assert_eq!(exit, 0, "{stdout}{stderr}");
        let second = call_calc(&gateway, session);
        assert_eq!(
            (code(&second).as_str(), second["structuredContent"] == json!({"result": 42})),
            (expected_code, verb == "approve"),
            "{second}"
        );
    }
    // An approval is valid for one call.
    let third = call_calc(&gateway, "yes");
    assert_ne!(code(&third), "ok", "{third}");
}
