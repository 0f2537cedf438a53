//! Sixty-four clients of both kinds, at work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::entering::{Older, plain};
use crate::support::{Client, until};

const MANY: usize = 64;

/// Sixty-four clients, for as long as this lives. Every fourth has a session of an earlier revision.
pub(crate) struct Crowd {
    stop: Arc<AtomicBool>,
    /// How often each of them was answered.
    answered: Arc<Vec<AtomicUsize>>,
    /// How long one of them had to wait at most, in milliseconds.
    longest: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<()>>,
}

/// One of them.
enum One {
    Newer(Client),
    Older(Older),
}

impl One {
    /// What a call comes to, which must be a result.
    async fn call(&mut self, tool: &str, text: &str) -> Value {
        let arguments = json!({"text": text});
        match self {
            Self::Newer(client) => client.call(tool, arguments).await,
            Self::Older(older) => {
                let said = older.ask("tools/call", json!({"name": tool, "arguments": arguments})).await;
                assert!(said.get("result").is_some(), "{tool}: {said}");
                said["result"].clone()
            }
        }
    }
}

impl Crowd {
    /// Of the one that is well.
    pub(crate) fn gather(client: &Client) -> Self {
        Self::of(client, &["well_echo"])
    }

    /// Each of them calls one of these.
    pub(crate) fn of(client: &Client, tools: &[&'static str]) -> Self {
        let (stop, longest) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let answered = Arc::new((0..MANY).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>());
        let (http, base) = (plain(), client.url.trim_end_matches("/mcp").to_owned());
        let one = |number: usize| {
            let (client, http, base) = (client.in_session(&format!("crowd-{number}")), http.clone(), base.clone());
            let (stop, longest, answered) = (Arc::clone(&stop), Arc::clone(&longest), Arc::clone(&answered));
            let tool = tools[number / 4 % tools.len()];
            tokio::spawn(async move {
                let mut own = match number % 4 {
                    3 => One::Older(Older::greet(&http, &base, json!({})).await),
                    _ => One::Newer(client),
                };
                while !stop.load(Ordering::Relaxed) {
                    let text = format!("{number}-{}", answered[number].load(Ordering::Relaxed));
                    let begun = Instant::now();
                    let result = own.call(tool, &text).await;
                    assert_eq!(result["structuredContent"]["text"], json!(text), "{tool}: {result}");
                    longest.fetch_max(begun.elapsed().as_millis() as u64, Ordering::Relaxed);
                    answered[number].fetch_add(1, Ordering::Relaxed);
                    // As often as not all of a small machine is taken by this.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                if let One::Older(older) = own {
                    let ended = older.request(Method::DELETE).send().await.unwrap().status();
                    assert!(ended.is_success(), "{ended}");
                }
            })
        };
        let tasks = (0..MANY).map(one).collect();
        Self { stop, answered, longest, tasks }
    }

    /// They are answered now, and not only before or after: each has asked since, and has its answer.
    pub(crate) async fn goes_on(&self) {
        let counts = || self.answered.iter().map(|count| count.load(Ordering::Relaxed)).collect::<Vec<_>>();
        let before = counts();
        until("each of them is answered", async || {
            assert!(!self.tasks.iter().any(JoinHandle::is_finished), "one of them was not answered as it should be");
            counts().iter().zip(&before).all(|(now, before)| *now >= before + 2)
        })
        .await;
    }

    /// They are answered while something takes its time, and not only after.
    pub(crate) async fn goes_on_beside<T>(&self, slow: &JoinHandle<T>) {
        self.goes_on().await;
        assert!(!slow.is_finished(), "they were answered only when it was over");
    }

    /// All of them were always answered, and still are.
    pub(crate) async fn leave(self) {
        self.goes_on().await;
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
    }

    /// The same, and none of them ever waited for as long as this.
    pub(crate) async fn leave_unhindered(self, most: Duration) {
        let longest = Arc::clone(&self.longest);
        self.leave().await;
        let longest = Duration::from_millis(longest.load(Ordering::Relaxed));
        assert!(longest < most, "one of them waited for {longest:?}");
    }
}
