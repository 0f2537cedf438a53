//! Tests that secrets of an upstream are redacted when the upstream fails.

use std::sync::Arc;

use serde_json::json;

use super::{well_and_ill_config, write_script};
use crate::support::{TestGateway, fixture_config};

#[tokio::test(flavor = "multi_thread")]
async fn upstream_secret_is_redacted_everywhere() {
    let home = tempfile::tempdir().unwrap();
    let secret = "s3cr3t-of-the-upstream";
    std::fs::write(home.path().join("key"), format!("{secret}\n")).unwrap();
    let loud = write_script(
        home.path(),
        "loud",
        "echo \"my key is $KEY\" >&2; echo \"and again $KEY\" >&2; exit 3",
    );
    let ill = format!(
        "command = {loud}\nenv = {{ KEY = {{ file = {} }} }}\n[tools.ill_echo]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\n",
        json!(home.path().join("key"))
    );
    let gate = TestGateway::open(&well_and_ill_config(&ill)).await;
    let result = gate.client().call("ill_echo", json!({"text": "x"})).await.to_string();
    assert!(
        result.contains("my key is [redacted]") || result.contains("and again [redacted]"),
        "{result}"
    );
    let health = serde_json::to_string(&gate.gateway.health()).unwrap();
    let (ledger, home) = (gate.home.path().join("ledger.db"), gate.home.path().to_owned());
    assert!(!result.contains(secret) && !health.contains(secret), "{result} {health}");
    let store = Arc::clone(&gate.store);
    gate.gateway.shut_down().await;
    drop(store);
    for file in [ledger, home.join("ledger.db-wal")] {
        let text = std::fs::read(&file).unwrap_or_default();
        assert!(
            !text.windows(secret.len()).any(|window| window == secret.as_bytes()),
            "{}",
            file.display()
        );
    }
}

/// An error message of an upstream may contain its secrets.
#[tokio::test(flavor = "multi_thread")]
async fn failure_message_redacts_secrets_of_upstream() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("phrase");
    std::fs::write(&file, "batterystaple\n").unwrap();
    // Only values from secret sources and with secret names are redacted.
    let env = format!(
        "{{ KEY = \"s3cr3t-of-the-upstream\", ROOT = \"/usr/bin\", STAGE = \"production\", PASSWORD = \"correcthorse\", PHRASE = {{ file = {} }} }}",
        json!(file)
    );
    let gate =
        TestGateway::open(&fixture_config(&format!("undeclared = \"read\"\nenv = {env}"))).await;
    let message =
        "bad key s3cr3t-of-the-upstream in /usr/bin of production: correcthorse batterystaple";
    let result = gate.client().call("fail", json!({"message": message})).await.to_string();
    assert!(
        result.contains("bad key [redacted] in /usr/bin of production: [redacted] [redacted]")
            && !result.contains("s3cr3t"),
        "{result}"
    );
    gate.shut_down().await;
}
