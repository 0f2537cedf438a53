//! How an upstream is greeted, and for how long its answer is waited for.

use std::sync::Arc;
use std::time::Duration;

use super::Link;
use crate::client::Ears;
use crate::upstream::connect::{Connection, connect};

/// How long an upstream may take to say hello.
const HELLO: Duration = Duration::from_secs(30);

impl Link {
    /// Connects to it, or says why that cannot be.
    pub(super) async fn greet(self: &Arc<Self>) -> Result<Connection, String> {
        let own = Arc::downgrade(self);
        let hear: Arc<dyn Fn(String) + Send + Sync> = Arc::new(move |line: String| {
            if let Some(link) = own.upgrade() {
                link.hear(line);
            }
        });
        // Some servers do not survive a question from the other era: what fails with it is tried without it.
        let mut connected = Ok(Err(String::new()));
        for probing in [true, false] {
            let connecting = connect(&self.upstream, Ears::new(self), self.launcher.as_deref(), probing, Arc::clone(&hear));
            connected = tokio::select! {
                connected = tokio::time::timeout(HELLO, connecting) => connected,
                () = self.stop.cancelled() => return Err("toolgate ends it".to_owned()),
            };
            if matches!(connected, Ok(Ok(_))) || !probing {
                break;
            }
        }
        connected.unwrap_or_else(|_| Err(format!("it did not say hello within {HELLO:?}")))
    }
}
