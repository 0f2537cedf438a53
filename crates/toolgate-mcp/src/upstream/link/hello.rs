//! Performs the handshake with an upstream, and chooses the protocol era and the timeout.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Link;
use crate::client::Ears;
use crate::upstream::connect::{Connection, Greeting, connect};

/// The timeout of one handshake.
const HELLO: Duration = Duration::from_secs(30);

impl Link {
    /// Connects to the upstream, trying the protocol eras in turn.
    pub(super) async fn greet(self: &Arc<Self>) -> Result<Connection, String> {
        let own = Arc::downgrade(self);
        let hear: Arc<dyn Fn(String) + Send + Sync> = Arc::new(move |line: String| {
            if let Some(link) = own.upgrade() {
                link.hear(line);
            }
        });
        // A server that stayed silent or exited last time may not survive a request of the other
        // era.
        let mut greeting = if self.mute.swap(false, Ordering::Relaxed) { Greeting::Older } else { Greeting::Either };
        loop {
            let ears = Ears::new(Arc::downgrade(self));
            let connecting = connect(&self.upstream, ears, self.launcher.as_deref(), greeting, Arc::clone(&hear));
            let connected = tokio::select! {
                connected = tokio::time::timeout(HELLO, connecting) => connected,
                () = self.stop.cancelled() => return Err("toolgate is stopping".to_owned()),
            };
            match connected {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(refused)) => greeting = greeting.after(&refused).ok_or(refused.why)?,
                Err(_) => {
                    self.mute.store(greeting == Greeting::Either, Ordering::Relaxed);
                    return Err(format!("the handshake did not finish within {HELLO:?}"));
                }
            }
        }
    }
}
