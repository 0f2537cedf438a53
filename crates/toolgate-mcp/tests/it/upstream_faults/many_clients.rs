//! Sixty-four clients of both kinds, at work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::{McpTestClient, wait_until};
use crate::tls_and_authentication::{LegacyHttpClient, http_client};

const CLIENT_COUNT: usize = 64;

/// Sixty-four clients, for as long as this lives. Every fourth has a session of an earlier
/// revision.
pub(crate) struct ClientCrowd {
    stop: Arc<AtomicBool>,
    /// How often each of them was answered.
    answer_counts: Arc<Vec<AtomicUsize>>,
    /// How long one of them had to wait at most, in milliseconds.
    max_wait_ms: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<()>>,
}

/// One of them.
enum CrowdClient {
    Modern(McpTestClient),
    Legacy(LegacyHttpClient),
}

impl CrowdClient {
    /// What a call comes to, which must be a result.
    async fn call(&mut self, tool: &str, text: &str) -> Value {
        let arguments = json!({"text": text});
        match self {
            Self::Modern(client) => client.call(tool, arguments).await,
            Self::Legacy(older) => {
                let said = older
                    .call_method("tools/call", json!({"name": tool, "arguments": arguments}))
                    .await;
                assert!(said.get("result").is_some(), "{tool}: {said}");
                said["result"].clone()
            }
        }
    }
}

impl ClientCrowd {
    /// Of the one that is well.
    pub(crate) fn start(client: &McpTestClient) -> Self {
        Self::start_with_tools(client, &["well_echo"])
    }

    /// Each of them calls one of these.
    pub(crate) fn start_with_tools(client: &McpTestClient, tools: &[&'static str]) -> Self {
        let (stop, longest) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let answered = Arc::new((0..CLIENT_COUNT).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>());
        let (http, base) = (http_client(), client.url.trim_end_matches("/mcp").to_owned());
        let one = |number: usize| {
            let (client, http, base) =
                (client.in_session(&format!("crowd-{number}")), http.clone(), base.clone());
            let (stop, longest, answered) =
                (Arc::clone(&stop), Arc::clone(&longest), Arc::clone(&answered));
            let tool = tools[number / 4 % tools.len()];
            tokio::spawn(async move {
                let mut own = match number % 4 {
                    3 => CrowdClient::Legacy(
                        LegacyHttpClient::connect(&http, &base, json!({})).await,
                    ),
                    _ => CrowdClient::Modern(client),
                };
                while !stop.load(Ordering::Relaxed) {
                    let text = format!("{number}-{}", answered[number].load(Ordering::Relaxed));
                    let begun = Instant::now();
                    let result = own.call(tool, &text).await;
                    assert_eq!(
                        result["structuredContent"]["text"],
                        json!(text),
                        "{tool}: {result}"
                    );
                    longest.fetch_max(begun.elapsed().as_millis() as u64, Ordering::Relaxed);
                    answered[number].fetch_add(1, Ordering::Relaxed);
                    // As often as not all of a small machine is taken by this.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                if let CrowdClient::Legacy(older) = own {
                    let ended = older.http_request(Method::DELETE).send().await.unwrap().status();
                    assert!(ended.is_success(), "{ended}");
                }
            })
        };
        let tasks = (0..CLIENT_COUNT).map(one).collect();
        Self { stop, answer_counts: answered, max_wait_ms: longest, tasks }
    }

    /// They are answered now, and not only before or after: each has asked since, and has its
    /// answer.
    pub(crate) async fn assert_progress(&self) {
        let counts = || {
            self.answer_counts.iter().map(|count| count.load(Ordering::Relaxed)).collect::<Vec<_>>()
        };
        let before = counts();
        wait_until("each of them is answered", async || {
            assert!(
                !self.tasks.iter().any(JoinHandle::is_finished),
                "one of them was not answered as it should be"
            );
            counts().iter().zip(&before).all(|(now, before)| *now >= before + 2)
        })
        .await;
    }

    /// They are answered while something takes its time, and not only after.
    pub(crate) async fn assert_progress_during<T>(&self, slow: &JoinHandle<T>) {
        self.assert_progress().await;
        assert!(!slow.is_finished(), "they were answered only when it was over");
    }

    /// All of them were always answered, and still are.
    pub(crate) async fn finish(self) {
        self.assert_progress().await;
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
    }

    /// The same, and none of them ever waited for as long as this.
    pub(crate) async fn finish_within(self, most: Duration) {
        let longest = Arc::clone(&self.max_wait_ms);
        self.finish().await;
        let longest = Duration::from_millis(longest.load(Ordering::Relaxed));
        assert!(longest < most, "one of them waited for {longest:?}");
    }
}
