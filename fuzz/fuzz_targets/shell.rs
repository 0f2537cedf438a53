//! Checks that every shell command gets a decision.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::json;
use toolgate::policy::{Condition, Deny};
use toolgate::{Agent, Tool, Toolgate};

fuzz_target!(|command: &str| {
    let rule = Deny::new("r", ["bash"]).when("/command", Condition::Runs(vec!["rm -r".to_owned(), "git push".to_owned()]));
    let agent = Agent::builder("a").tool(Tool::external("bash", "Runs.", None).shell("/command")).policy(rule).build().unwrap();
    let gate = Toolgate::builder().agent(agent).build().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let _ = gate.session("a", "b", "c").explain("bash", json!({"command": command})).await;
    });
});
