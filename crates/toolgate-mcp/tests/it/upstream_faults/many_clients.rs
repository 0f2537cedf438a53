//! Runs 64 modern and legacy clients that call tools continuously.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::legacy_http_client::LegacyHttpClient;
use crate::support::{McpTestClient, http_client, wait_until};

const CLIENT_COUNT: usize = 64;

/// 64 clients that run until the test stops them. Every fourth has a session of an earlier
/// revision.
pub(crate) struct ClientCrowd {
    stop: Arc<AtomicBool>,
    /// The number of answers of each client.
    answer_counts: Arc<Vec<AtomicUsize>>,
    /// The longest wait of any client, in milliseconds.
    max_wait_ms: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<()>>,
}

/// A client of either kind.
enum CrowdClient {
    Modern(McpTestClient),
    Legacy(LegacyHttpClient),
}

impl CrowdClient {
    /// Calls a tool, and returns the result, which must exist.
    async fn call(&mut self, tool: &str, text: &str) -> Value {
        let arguments = json!({"text": text});
        match self {
            Self::Modern(client) => client.call(tool, arguments).await,
            Self::Legacy(older) => {
                let answer = older
                    .call_method("tools/call", json!({"name": tool, "arguments": arguments}))
                    .await;
                assert!(answer.get("result").is_some(), "{tool}: {answer}");
                answer["result"].clone()
            }
        }
    }
}

impl ClientCrowd {
    /// Starts clients that call the working upstream.
    pub(crate) fn start(client: &McpTestClient) -> Self {
        Self::start_with_tools(client, &["well_echo"])
    }

    /// Starts clients that each call one of these tools.
    pub(crate) fn start_with_tools(client: &McpTestClient, tools: &[&'static str]) -> Self {
        let (stop, longest) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let answered = Arc::new((0..CLIENT_COUNT).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>());
        let (http, base) = (http_client(), client.url.trim_end_matches("/mcp").to_owned());
        let spawn_client = |number: usize| {
            let (client, http, base) =
                (client.in_session(&format!("crowd-{number}")), http.clone(), base.clone());
            let (stop, longest, answered) =
                (Arc::clone(&stop), Arc::clone(&longest), Arc::clone(&answered));
            let tool = tools[number / 4 % tools.len()];
            tokio::spawn(async move {
                let mut crowd_client = match number % 4 {
                    3 => CrowdClient::Legacy(
                        LegacyHttpClient::connect(&http, &base, json!({})).await,
                    ),
                    _ => CrowdClient::Modern(client),
                };
                while !stop.load(Ordering::Relaxed) {
                    let text = format!("{number}-{}", answered[number].load(Ordering::Relaxed));
                    let start = Instant::now();
                    let result = crowd_client.call(tool, &text).await;
                    assert_eq!(
                        result["structuredContent"]["text"],
                        json!(text),
                        "{tool}: {result}"
                    );
                    longest.fetch_max(start.elapsed().as_millis() as u64, Ordering::Relaxed);
                    answered[number].fetch_add(1, Ordering::Relaxed);
                    // The pause leaves processor time for other tests on a small machine.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                if let CrowdClient::Legacy(older) = crowd_client {
                    let status = older.http_request(Method::DELETE).send().await.unwrap().status();
                    assert!(status.is_success(), "{status}");
                }
            })
        };
        let tasks = (0..CLIENT_COUNT).map(spawn_client).collect();
        Self { stop, answer_counts: answered, max_wait_ms: longest, tasks }
    }

    /// Checks that each client gets an answer to a new call.
    pub(crate) async fn assert_progress(&self) {
        let counts = || {
            self.answer_counts.iter().map(|count| count.load(Ordering::Relaxed)).collect::<Vec<_>>()
        };
        let before = counts();
        wait_until("each client is answered", async || {
            assert!(
                !self.tasks.iter().any(JoinHandle::is_finished),
                "a client received a wrong answer"
            );
            counts().iter().zip(&before).all(|(now, before)| *now >= before + 2)
        })
        .await;
    }

    /// Checks that the clients get answers while the slow task runs.
    pub(crate) async fn assert_progress_during<T>(&self, slow: &JoinHandle<T>) {
        self.assert_progress().await;
        assert!(!slow.is_finished(), "the clients were answered only after the slow task");
    }

    /// Checks that all clients still get answers, and stops them.
    pub(crate) async fn finish(self) {
        self.assert_progress().await;
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
    }

    /// Stops the clients, and checks that no client waited longer than this.
    pub(crate) async fn finish_within(self, max_wait: Duration) {
        let longest = Arc::clone(&self.max_wait_ms);
        self.finish().await;
        let longest = Duration::from_millis(longest.load(Ordering::Relaxed));
        assert!(longest < max_wait, "a client waited for {longest:?}");
    }
}
