//! A gateway ends, and what is under way ends before it.

use std::sync::Arc;

use serde_json::json;

use crate::faults::config;
use crate::support::{Gate, children, fixture, lines, processes, until};

#[tokio::test(flavor = "multi_thread")]
async fn ending_lets_calls_end() {
    for (effect, is_replaced) in [("read", false), ("write", false), ("write", true)] {
        let home = tempfile::tempdir().unwrap();
        let begun = home.path().join("begun");
        let text = |more: &str| {
            config(&format!(
                "command = {}\nargs = [\"--stdio\", \"--tools\", \"7\"]\nenv = {{ FIXTURE_COUNTER = {}{more} }}\n\
                 [tools.ill_sleep]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"{effect}\"\npolicy = \"open\"\n",
                json!(fixture()),
                json!(begun)
            ))
        };
        let gate = Gate::open(&text("")).await;
        let (client, store) = (gate.client().in_session("slow"), Arc::clone(&gate.store));
        let ms = if is_replaced { 4_000 } else { 1_000 };
        let slow = tokio::spawn(async move { client.code("ill_sleep", json!({"ms": ms})).await });
        until("it is under way", async || lines(&begun) > 0).await;
        if is_replaced {
            // Another is there in its place; this one is only there for the call.
            gate.reload(&text(", OTHER = \"1\"")).await.unwrap();
        }
        gate.end().await;
        assert_eq!(slow.await.unwrap(), "ok", "{effect} {is_replaced}");
        // Nobody has to find out what became of it, however late it is.
        let pending = toolgate::Store::pending(&*store, toolgate::Timestamp::MAX).await.unwrap();
        assert!(pending.is_empty() && processes(7).is_empty(), "{pending:?} {:?}", children());
    }
}
