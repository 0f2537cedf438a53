//! Records which effects clients were told of, and compares them with the effects that happened.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::McpTestClient;

/// Calls the tool with an effect, and returns the metadata of the answer.
///
/// Each call has its own session. Otherwise toolgate would refuse the repeated call as a loop.
pub(super) async fn call_mark(
    client: &McpTestClient,
    key: &str,
    how: &str,
    attempt: usize,
) -> Value {
    let meta = json!({"toolgate/idempotencyKey": key});
    let params = json!({"name": "ill_mark", "arguments": {"key": key, "how": how}, "_meta": meta});
    let (status, answer) =
        client.in_session(&format!("{key}-{attempt}")).call_method("tools/call", params).await;
    assert!(answer["result"]["_meta"].is_object(), "{key}: {status} {answer}");
    answer["result"]["_meta"].clone()
}

/// Compares what clients were told of their effects with what happened.
pub(super) struct EffectJournal {
    /// A file with a line for each effect that happened.
    file: PathBuf,
    /// Whether the client knows that the effect happened, by key.
    certain_by_key: Mutex<BTreeMap<String, bool>>,
}

impl EffectJournal {
    pub(super) fn open(home: &Path) -> Arc<Self> {
        Arc::new(Self { file: home.join("effects"), certain_by_key: Mutex::default() })
    }

    /// Records that an effect happened.
    pub(super) fn record(&self, key: &str) {
        let mut file =
            std::fs::OpenOptions::new().create(true).append(true).open(&self.file).unwrap();
        file.write_all(format!("{key}\n").as_bytes()).unwrap();
    }

    /// Repeats a call until its effect may have happened, and then once more.
    ///
    /// Returns whether the effect is certain.
    pub(super) async fn call_until_effect(
        &self,
        client: &McpTestClient,
        key: &str,
        how: &str,
    ) -> bool {
        for attempt in 0..600 {
            let error = call_mark(client, key, how, attempt).await["toolgate/error"].clone();
            if error["effects"] == "none" {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            let (is_certain, again) = (error.is_null(), call_mark(client, key, how, 600).await);
            match is_certain {
                true => assert_eq!(again["toolgate/replayed"], json!(true), "{key}: {again}"),
                false => assert_eq!(
                    again["toolgate/error"]["code"], "pending_reconciliation",
                    "{key}: {error} {again}"
                ),
            }
            self.certain_by_key.lock().unwrap().insert(key.to_owned(), is_certain);
            return is_certain;
        }
        panic!("`{key}` had no effect after 600 attempts");
    }

    /// Returns the number of certain effects.
    pub(super) fn certain_count(&self) -> usize {
        self.certain_by_key.lock().unwrap().values().filter(|is_certain| **is_certain).count()
    }

    /// Checks that no effect happened twice or without a call, and that certain effects happened.
    ///
    /// Returns the numbers of certain and uncertain effects.
    pub(super) fn check_effects(&self) -> (usize, usize) {
        let mut happened = BTreeMap::<String, usize>::new();
        for key in std::fs::read_to_string(&self.file).unwrap_or_default().lines() {
            *happened.entry(key.to_owned()).or_default() += 1;
        }
        let reported = self.certain_by_key.lock().unwrap();
        for (key, count) in &happened {
            assert!(*count == 1 && reported.contains_key(key), "`{key}` happened {count} times");
        }
        for (key, is_certain) in reported.iter() {
            assert!(
                !is_certain || happened.contains_key(key),
                "`{key}` was confirmed but did not happen"
            );
        }
        let certain = reported.values().filter(|is_certain| **is_certain).count();
        (certain, reported.len() - certain)
    }
}
