//! Performs the handshake with an upstream, and chooses the protocol era and the timeout.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::upstream::client_handler::Ears;
use crate::upstream::supervisor::Link;
use crate::upstream::transport::connect::{Connection, Greeting, connect};

/// The timeout of one handshake.
const HELLO: Duration = Duration::from_secs(30);

impl Link {
    /// Connects to the upstream, trying the protocol eras in turn.
    pub(crate) async fn connect(self: &Arc<Self>) -> Result<Connection, String> {
        let own = Arc::downgrade(self);
        let hear: Arc<dyn Fn(String) + Send + Sync> = Arc::new(move |line: String| {
            if let Some(link) = own.upgrade() {
                link.record_stderr_line(line);
            }
        });
        // A server that stayed silent or exited last time may not survive a request of the other
        // era.
        let mut greeting = if self.is_legacy_handshake_due.swap(false, Ordering::Relaxed) { Greeting::Initialize } else { Greeting::Auto };
        loop {
            let ears = Ears::new(Arc::downgrade(self));
            let connecting = connect(&self.upstream, ears, self.launcher.as_deref(), greeting, Arc::clone(&hear));
            let connected = tokio::select! {
                connected = tokio::time::timeout(HELLO, connecting) => connected,
                () = self.stop_requested.cancelled() => return Err("toolgate is stopping".to_owned()),
            };
            match connected {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(refused)) => greeting = greeting.next_after(&refused).ok_or(refused.reason)?,
                Err(_) => {
                    self.is_legacy_handshake_due.store(greeting == Greeting::Auto, Ordering::Relaxed);
                    return Err(format!("the handshake did not finish within {HELLO:?}"));
                }
            }
        }
    }
}
