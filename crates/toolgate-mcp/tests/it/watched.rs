//! An upstream is watched: what it says of itself, whether it is well, and what it offers by now.

use serde_json::json;

use crate::faults::{config, script};
use crate::support::Gate;

#[tokio::test(flavor = "multi_thread")]
async fn of_a_key_with_several_lines_none_is_told() {
    let home = tempfile::tempdir().unwrap();
    let key = home.path().join("key");
    let lines =
        ["-----BEGIN PRIVATE KEY-----", "MIIEvQIBADANBgkqhkiG9w0BAQEF", "AASCBKcwggSjAgEAAoIBAQC7VJTU", "-----END PRIVATE KEY-----"];
    std::fs::write(&key, lines.join("\n") + "\n").unwrap();
    // The last line that it says is the reason why it is away.
    for (name, says) in [("whole", "echo \"$KEY\" >&2"), ("line", "echo \"it is $(echo \"$KEY\" | head -n 3 | tail -n 1), is it?\" >&2")] {
        let loud = script(home.path(), name, &format!("{says}\nexit 3"));
        let ill = format!(
            "command = {loud}\nenv = {{ KEY = {{ file = {} }} }}\n[tools.ill_echo]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\n",
            json!(key)
        );
        let gate = Gate::open(&config(&ill)).await;
        let said = gate.client().call("ill_echo", json!({"text": "x"})).await.to_string();
        let health = serde_json::to_string(&gate.gateway.health()).unwrap();
        for told in [said, health] {
            assert!(told.contains("[redacted]"), "{name}: {told}");
            assert!(!lines.iter().any(|line| told.contains(line)), "{name}: {told}");
        }
        gate.end().await;
    }
}
